//! The page cache: facts about the pages of files in memory, and the operations that a loop may do without waiting.
//!
//! Only the kernel knows, and its answer is valid for a moment. So a loop sends by `sendfile` only pages that a fact
//! says are in memory ([`facts`]), and reads on its own only where it cannot wait. The [`Condition`] of the device
//! decides how long a fact is valid, and whether a read that must not wait really does not. If a read might wait, the
//! kernel is asked first: by the page cache helper ([`helper`]), or by the loop itself for small pieces of files of its
//! own user (cachestat(2)). On a busy device `sendfile` takes only pages that the helper holds in memory ([`held`]).

mod device;
mod facts;
mod held;
mod helper;
mod questions;

use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

use gale_runtime::simulation::Simulation;
use gale_runtime::stall::MARKS;
use gale_runtime::{Bytes, Device, Lease, Moment, ThreadPool, note_call, now_anywhere, real_now_anywhere};
use rustix::io::Errno;

use self::device::{DeviceState, READ_AHEAD_BYTES_MAX};
use self::facts::{Facts, PART};
use self::held::HELD_FOR_QUESTION_MAX;
use self::helper::{QUESTION_BYTES_MAX, Question};
use self::questions::{QUESTIONS, Told};
use super::File;
use super::counters::{Event, Rung, count_event, count_piece};
use super::file::ReadAccess;
use super::file_system::{PAGE_CACHE, file_system};
use super::shared_reads::{PieceRead, ReadHow, Reads};
use super::single_flight::SingleFlight;

pub(crate) use self::device::Condition;
pub(crate) use self::facts::FileHash;
pub use self::helper::serve_page_cache_questions;
pub use self::questions::use_page_cache_helper;

/// Validity of a fact while nothing has to be read from any device: then no pages that were used a moment ago are
/// evicted.
const FACT_TIME: Duration = Duration::from_secs(1);

/// Validity of a fact within [`FACT_TIME`] of a read from a device: each read takes memory, for its read-ahead as well.
const FACT_TIME_READING: Duration = Duration::from_millis(250);

/// Validity of a fact on a busy device. Long enough for all clients of a popular file to use one answer.
const FACT_TIME_BUSY: Duration = Duration::from_millis(24);

/// Time for which a part that was used is likely to be in memory, unless it was found missing: if the kernel cannot be
/// asked, a pool thread checks for such parts before it reads.
const IN_DEMAND_TIME: Duration = Duration::from_secs(60);

/// Checks in flight per device on pool threads. Such a check updates the file's access time, or is made because the
/// kernel cannot be asked. The limit leaves threads to the device's other queues when checks wait for the journal.
const LOOKS_MAX: u32 = 4;

/// Checks of these that may update access times.
const ACCESS_LOOKS_MAX: u32 = 2;

/// Limit of bytes of one `sendfile` that are read first, to find out if they are in memory.
const PROBED_BYTES_MAX: u64 = 256 * 1024;

/// Number of device states, each the mark of calls for its devices.
const DEVICES: usize = MARKS;

/// Index of the state of the device with this number.
#[inline]
fn slot(device: u64) -> usize {
    // Minor numbers of disks' partitions and of anonymous devices are consecutive.
    (device ^ device >> 8) as usize % DEVICES
}

/// Notes that calls of a turn, which may have been for files of these devices, have waited.
#[cold]
fn note_waits(devices: u64) {
    let is_called = |&(slot, _): &(usize, &DeviceState)| devices & 1 << slot != 0;
    let called = PAGE_CACHE.devices.iter().enumerate().filter(is_called);
    called.for_each(|(_, device)| note_wait(device));
}

/// Notes that a call of a loop for files of this device has waited.
#[cold]
fn note_wait(device: &DeviceState) {
    count_event(Event::Misprediction);
    device.stay_busy(now_anywhere());
}

/// Facts and states that all loops share.
pub(crate) struct PageCache {
    facts: Facts,
    /// Parts that the page cache helper holds in memory.
    held: Facts,
    /// Parts that were sent or read in the last minute.
    uses: Facts,
    devices: [DeviceState; DEVICES],
    /// Time at which a piece of any device was last missing in memory; 0 = never.
    missed_at_nanos: AtomicU64,
    /// Reads in flight of pieces that are not in memory.
    pub(super) reads: Arc<Reads>,
}

impl PageCache {
    pub fn new() -> Arc<Self> {
        PageCache::with(Facts::new)
    }

    /// With room for facts about `count` windows: a power of two, at least 2.
    pub fn with_slots(count: usize) -> Arc<Self> {
        PageCache::with(|| Facts::with_slots(count))
    }

    fn with(table: impl Fn() -> Facts) -> Arc<Self> {
        Arc::new(PageCache {
            facts: table(),
            held: table(),
            uses: table(),
            devices: [const { DeviceState::new() }; DEVICES],
            missed_at_nanos: AtomicU64::new(0),
            reads: SingleFlight::new(),
        })
    }

    /// Condition of the device with this number (`st_dev`).
    #[inline]
    pub fn condition(&self, device: u64) -> Condition {
        self.device(device).condition(now_anywhere())
    }

    #[inline]
    fn device(&self, number: u64) -> &DeviceState {
        let device = &self.devices[slot(number)];
        device.note_asked(number);
        device
    }

    /// Validity of facts about files on a device in this condition.
    #[inline]
    fn fact_time(&self, condition: Condition, now: Moment) -> Duration {
        let missed_at = self.missed_at_nanos.load(Relaxed);
        match condition {
            Condition::Healthy if missed_at == 0 || now > Moment::from_nanos(missed_at) + FACT_TIME => FACT_TIME,
            Condition::Healthy => FACT_TIME_READING,
            Condition::Busy | Condition::NotAnswering => FACT_TIME_BUSY,
        }
    }

    /// Counters of the used devices, by number.
    pub fn read_figures(&self, now: Moment) -> Vec<(u64, DeviceReads)> {
        let figures = |device: &DeviceState| DeviceReads {
            condition: device.condition(now).name(),
            in_flight: device.reads.load(Relaxed),
            done: device.reads_done.load(Relaxed),
            time: Duration::from_nanos(device.reads_nanos.load(Relaxed)),
        };
        let asked = self.devices.iter().map(|device| (device.number.load(Relaxed), device));
        asked.filter(|&(number, _)| number != 0).map(|(number, device)| (number, figures(device))).collect()
    }

    /// Notes that a piece was not in memory.
    fn note_miss(&self, now: Moment) {
        // All loops read this with each request, so it is only written when it changes much.
        let is_known = now < Moment::from_nanos(self.missed_at_nanos.load(Relaxed)) + FACT_TIME_READING / 4;
        if !is_known {
            self.missed_at_nanos.store(now.as_nanos().max(1), Relaxed);
        }
    }

    /// Counts a read in flight until [`InFlight::end`], or until the result is dropped: then the read was abandoned.
    pub fn begin_read(self: &Arc<Self>, device: u64) -> InFlight {
        let now = now_anywhere();
        self.device(device).begin_read(now);
        InFlight { page_cache: Arc::clone(self), device, count: |state| &state.reads, began: now, end: End::GivenUp }
    }

    /// Counts a check by a pool thread, if one more is allowed.
    pub fn begin_look(self: &Arc<Self>, device: u64, writes_access_time: bool) -> Option<InFlight> {
        let looks = &self.device(device).looks;
        let most = if writes_access_time { ACCESS_LOOKS_MAX } else { LOOKS_MAX };
        looks.fetch_update(Relaxed, Relaxed, |before| (before < most).then_some(before + 1)).ok()?;
        let (began, count) = (now_anywhere(), (|state| &state.looks) as fn(&DeviceState) -> &AtomicU32);
        Some(InFlight { page_cache: Arc::clone(self), device, count, began, end: End::GivenUp })
    }
}

/// True if a piece of this length is one of several, as a whole file is sent: the page cache helper is asked about what
/// follows, too.
fn is_large(length: u64) -> bool {
    length >= PART / 2
}

/// A read or a check in flight on a device.
pub(crate) struct InFlight {
    page_cache: Arc<PageCache>,
    device: u64,
    count: fn(&DeviceState) -> &AtomicU32,
    began: Moment,
    end: End,
}

/// End of a read or a check.
enum End {
    /// It was not carried out, or tells nothing.
    GivenUp,
    FoundInMemory,
    /// The device has answered.
    Read,
}

impl InFlight {
    /// Ends a read. If a thread has waited for it the device has answered; else the piece was in memory after all.
    pub fn end(mut self, has_waited: bool) {
        self.end = if has_waited { End::Read } else { End::FoundInMemory };
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let device = self.page_cache.device(self.device);
        // The current time: a loop learns of it before its clock has moved on.
        match self.end {
            End::GivenUp => {}
            End::FoundInMemory => device.note_progress(real_now_anywhere()),
            End::Read => {
                let now = real_now_anywhere();
                self.page_cache.note_miss(now);
                device.note_read(now.since(self.began), now);
            }
        }
        (self.count)(device).fetch_sub(1, Relaxed);
    }
}

/// Reads from a device of pieces that were not in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DeviceReads {
    pub condition: &'static str,
    pub in_flight: u32,
    pub done: u64,
    pub time: Duration,
}

/// Result of a check of a piece of a file.
#[derive(Debug)]
pub enum CachedRead {
    /// Bytes from the beginning of the piece; empty at the end of the file.
    Found(Bytes),
    /// The beginning of the piece is not in memory.
    NotInMemory,
    /// The check might have waited.
    NotLooked,
}

impl CachedRead {
    /// Options for reading the piece, which was not found.
    pub fn how(&self) -> ReadHow {
        ReadHow { unlooked: matches!(self, CachedRead::NotLooked), ..ReadHow::default() }
    }
}

/// Answer about a piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Residency {
    /// The piece is in memory, with the pages that the kernel would read ahead.
    InMemory,
    /// The beginning of the piece is in memory, or was a while ago. A read may trigger read-ahead.
    NearMissing,
    /// The first page is missing.
    Missing,
    /// The kernel does not tell.
    Unknown,
}

/// True if a read from this device has ended since then, so it is slow at most, and does not hang. Reads of pieces that
/// were in memory do not count.
pub fn has_device_answered_since(device: Device, then: Moment) -> bool {
    file_system(|file_system| file_system.page_cache().device(device.file_device()).has_answered_since(then))
}

/// True if a read from this device is in flight, or waits for a thread.
pub fn is_device_reading(device: Device) -> bool {
    file_system(|file_system| file_system.page_cache().device(device.file_device()).reads.load(Relaxed) > 0)
}

thread_local! {
    /// Destination of reads whose bytes are not needed.
    static PROBED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl File {
    /// Reads bytes that are in memory, at most `length` from `offset` on, if that cannot wait. Errors: pread(2)'s,
    /// `OutOfMemory` at the hard limit of leases.
    pub fn look(&self, offset: u64, length: usize) -> io::Result<CachedRead> {
        self.look_unless(offset, length, || self.writes_access_time())
    }

    /// As [`File::look`], for a file of this process alone, whose access time does not matter.
    pub(super) fn look_at_own(&self, offset: u64, length: usize) -> io::Result<CachedRead> {
        self.look_unless(offset, length, || false)
    }

    fn look_unless(&self, offset: u64, length: usize, waits: impl FnOnce() -> bool) -> io::Result<CachedRead> {
        if self.waits_for_others() {
            return Ok(CachedRead::NotLooked);
        }
        if waits() {
            return Ok(CachedRead::NotLooked);
        }
        self.with_page_cache(|cache| {
            match self.may_be_read(cache, offset, length as u64) {
                Some(true) => {}
                Some(false) => return Ok(CachedRead::NotInMemory),
                None => return Ok(CachedRead::NotLooked),
            }
            let mut lease = Lease::new(length)?;
            match self.watched(|| self.read_nowait(offset, &mut lease)) {
                Some(Ok(count)) => {
                    lease.truncate(count);
                    self.note_found(cache, offset, length, count);
                    count_event(Event::Hit);
                    count_piece(Rung::Read, count as u64);
                    Ok(CachedRead::Found(lease.freeze()))
                }
                Some(Err(error)) => Err(error),
                None => {
                    self.note_missing(cache, offset);
                    count_event(Event::Miss);
                    Ok(CachedRead::NotInMemory)
                }
            }
        })
    }

    /// True if a loop may read this piece: not if pages are missing on a busy device. `None` if that is unknown.
    fn may_be_read(&self, cache: &PageCache, offset: u64, length: u64) -> Option<bool> {
        let now = now_anywhere();
        let condition = cache.device(self.metadata().device).condition(now);
        // There are no pages behind the end.
        let length = length.min(self.metadata().size.saturating_sub(offset)).max(1);
        if condition == Condition::Healthy || self.known_length(cache, offset, length, FACT_TIME_BUSY, now) == length {
            return Some(true);
        }
        self.is_cached(cache, offset, length)
    }

    /// True if all pages of a piece are in the page cache, with those that the kernel would read ahead; pages that are
    /// still being read count. `None` if that is unknown: the kernel tells only the file's owner, and the pages ahead
    /// may be missing.
    fn is_cached(&self, cache: &PageCache, offset: u64, length: u64) -> Option<bool> {
        if self.shared.access != ReadAccess::Local || self.shared.is_foreign.load(Relaxed) {
            return None;
        }
        let page = rustix::param::page_size() as u64;
        let size = self.metadata().size;
        let end = offset + length;
        let ahead =
            size.min(end + cache.device(self.metadata().device).read_ahead_bytes().min(READ_AHEAD_BYTES_MAX)).max(end);
        let pages = |end: u64| end.div_ceil(page) - offset / page;
        match helper::cached_pages(self.as_fd(), offset, ahead - offset) {
            Ok(0) => Some(false),
            Ok(cached) => (cached >= pages(ahead)).then_some(true),
            Err(Errno::INTR) => None,
            Err(_) => {
                self.shared.is_foreign.store(true, Relaxed);
                None
            }
        }
    }

    /// Bytes from the beginning of a piece that were in memory at most `age` ago.
    #[inline]
    fn known_length(&self, cache: &PageCache, offset: u64, length: u64, age: Duration, now: Moment) -> u64 {
        cache.facts.known_length(self.shared.hash, offset, length, age, now)
    }

    /// True if a piece is known to be in memory, so that `sendfile` will not wait. False also if finding out might
    /// wait. Errors: pread(2)'s.
    pub fn is_resident(&self, offset: u64, length: u64) -> io::Result<bool> {
        Ok(self.sendable(offset, length, length)? == length)
    }

    /// True if a loop can read all of a piece without waiting even if its device hangs.
    pub fn is_in_use(&self, offset: u64, length: u64) -> bool {
        if self.waits_for_others() || self.writes_access_time() {
            return false;
        }
        self.with_page_cache(|cache| {
            // For pages that are still being read only a read gives the answer.
            self.known_length(cache, offset, length, FACT_TIME_BUSY, now_anywhere()) == length
                || self.is_cached(cache, offset, length) == Some(true)
                    && self.probe(cache, offset, length).is_ok_and(|found| found == length)
        })
    }

    /// Number of bytes that one `sendfile` may take now from the beginning of a piece; 0 unless these are in memory as
    /// for [`File::is_resident`]. Errors: pread(2)'s.
    pub fn sendfile_length(&self, offset: u64, length: u64) -> io::Result<u64> {
        self.sendable(offset, length, 0)
    }

    /// True if `sendfile` takes a piece of which [`File::sendfile_length`] is 0 only after a question to the page cache
    /// helper.
    pub fn must_be_held(&self) -> bool {
        let is_busy = || self.with_page_cache(|cache| cache.condition(self.metadata().device) == Condition::Busy);
        self.shared.access == ReadAccess::Local && QUESTIONS.is_served() && !self.is_written() && is_busy()
    }

    /// Probes at least `least` bytes, even beyond [`PROBED_BYTES_MAX`], if no fact covers them.
    fn sendable(&self, offset: u64, length: u64, least: u64) -> io::Result<u64> {
        if self.waits_for_others() || self.writes_access_time() {
            return Ok(0);
        }
        self.with_page_cache(|cache| {
            let now = now_anywhere();
            let condition = cache.device(self.metadata().device).condition(now);
            match condition {
                Condition::Healthy => {}
                Condition::NotAnswering => return Ok(0),
                Condition::Busy => {
                    // The time of the turn may be so old that the pages have been released.
                    let now = real_now_anywhere();
                    return Ok(cache.held.known_length(self.shared.hash, offset, length, FACT_TIME_BUSY, now));
                }
            }
            let known = self.known_length(cache, offset, length, cache.fact_time(condition, now), now);
            if known > 0 && known >= least {
                return Ok(known);
            }
            self.probe(cache, offset, length.min(PROBED_BYTES_MAX.max(least)))
        })
    }

    /// Reads a piece part by part, to find out how much of it is in memory. Reading a byte at either end of a part
    /// would not reveal a hole between them.
    fn probe(&self, cache: &PageCache, offset: u64, length: u64) -> io::Result<u64> {
        let mut at = offset;
        while at < offset + length {
            let end = ((at / PART + 1) * PART).min(offset + length);
            let is_there = PROBED.with_borrow_mut(|memory| {
                memory.resize(PART as usize, 0);
                let memory = &mut memory[..(end - at) as usize];
                self.watched(|| self.read_nowait(at, memory)).transpose().map(|count| count == Some(memory.len()))
            })?;
            count_event(if is_there { Event::Hit } else { Event::Miss });
            if !is_there {
                self.note_missing(cache, at);
                break;
            }
            at = end;
        }
        self.note_in_memory(cache, offset..at);
        Ok(at - offset)
    }

    /// Makes a system call for this file that should not wait. If it has waited, the device is busy for a while.
    #[inline]
    pub fn watched<T>(&self, call: impl FnOnce() -> T) -> T {
        let device = self.metadata().device;
        note_call(slot(device), note_waits);
        let result = call();
        // In a simulation chance decides which calls wait.
        if Simulation::current().is_some_and(|simulation| simulation.strikes(|faults| faults.slow_calls)) {
            self.with_page_cache(|cache| note_wait(cache.device(device)));
        }
        result
    }

    /// Notes that a piece was sent or written, so it is in memory now.
    pub fn note_sent(&self, offset: u64, length: usize) {
        self.with_page_cache(|cache| self.note_used(cache, offset..offset.saturating_add(length as u64)));
    }

    fn note_used(&self, cache: &PageCache, range: Range<u64>) {
        if !range.is_empty() {
            cache.uses.note_use(self.shared.hash, range.clone(), self.metadata().size, now_anywhere());
        }
        self.note_in_memory(cache, range);
    }

    /// Notes that `found` of the `asked` bytes were in memory, and the next one was not.
    pub(crate) fn note_found(&self, cache: &PageCache, offset: u64, asked: usize, found: usize) {
        let end = offset + found as u64;
        self.note_used(cache, offset..end);
        if found < asked && end < self.metadata().size {
            self.note_missing(cache, end);
        }
    }

    fn note_in_memory(&self, cache: &PageCache, range: Range<u64>) {
        if !range.is_empty() {
            cache.facts.note(self.shared.hash, range, self.metadata().size, now_anywhere());
        }
    }

    /// Notes that the page at this offset is not in memory.
    pub(super) fn note_missing(&self, cache: &PageCache, offset: u64) {
        [&cache.facts, &cache.held, &cache.uses]
            .into_iter()
            .for_each(|table| table.forget(self.shared.hash, offset..offset + 1));
        cache.note_miss(now_anywhere());
    }

    /// Asks the page cache helper about a piece, and notes the answer. If a whole large piece is wanted, the question
    /// covers the rest of the file too. For `sendfile` the helper holds the beginning of it in memory.
    pub(super) async fn ask(&self, cache: &PageCache, offset: u64, length: u64, for_sendfile: bool) -> Residency {
        let size = self.metadata().size;
        let read_ahead = cache.device(self.metadata().device).read_ahead_bytes();
        let ahead = read_ahead.min(READ_AHEAD_BYTES_MAX);
        let wanted = if is_large(length) { QUESTION_BYTES_MAX } else { (length + ahead).min(QUESTION_BYTES_MAX) };
        let asked = wanted.min(size.saturating_sub(offset));
        let hold = if for_sendfile { HELD_FOR_QUESTION_MAX } else { 0 };
        let question = Question { number: 0, offset, length: asked, ahead: read_ahead, hold };
        let asking = match self.shared.access {
            ReadAccess::Local => QUESTIONS.ask(self, question),
            ReadAccess::Waits | ReadAccess::Simulated(_) => None,
        };
        let Some(asking) = asking else { return Residency::Unknown };
        count_event(Event::Question);
        let Told { bytes: Some(told), held, at } = asking.await else { return Residency::Unknown };
        let is_late = real_now_anywhere() > at + FACT_TIME_BUSY;
        if !is_late {
            cache.held.note(self.shared.hash, offset..offset + held, size, at);
        }
        match told {
            0 => {
                self.note_missing(cache, offset);
                Residency::Missing
            }
            told => {
                count_event(Event::ResidentAnswer);
                let end = offset + told;
                let safe_end = if end < size { end.saturating_sub(ahead) } else { end };
                if is_late || safe_end < (offset + length).min(size) {
                    return Residency::NearMissing;
                }
                cache.facts.note(self.shared.hash, offset..safe_end, size, at);
                Residency::InMemory
            }
        }
    }

    /// True if a check by a pool thread is likely to find the piece.
    pub(super) fn is_worth_a_look(&self, cache: &PageCache, offset: u64) -> bool {
        cache.uses.known_length(self.shared.hash, offset, 1, IN_DEMAND_TIME, now_anywhere()) > 0
    }

    /// Counts a read in flight, as [`PageCache::begin_read`] does.
    pub(super) fn begin_counted_read(&self) -> InFlight {
        self.with_page_cache(|cache| cache.begin_read(self.metadata().device))
    }

    fn with_page_cache<R>(&self, f: impl FnOnce(&Arc<PageCache>) -> R) -> R {
        file_system(|file_system| f(file_system.page_cache()))
    }

    /// Begins to read a piece that is not in memory in a pool, or joins such a read in flight. The result ends with the
    /// piece; it is shorter at the end of the file, and empty behind it. Errors: `OutOfMemory` at the hard limit of
    /// leases.
    pub fn begin_read(&self, pool: &ThreadPool, offset: u64, length: usize, how: ReadHow) -> io::Result<PieceRead> {
        // A check is of no use for these.
        let how = ReadHow { unlooked: how.unlooked && !self.waits_for_others() && how.direct.is_none(), ..how };
        self.with_page_cache(|cache| PieceRead::begin(cache, self, pool, (offset, length), how))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_in_flight_make_their_device_busy_and_no_other() {
        let cache = PageCache::with_slots(16);
        let reads: Vec<InFlight> = (0..4).map(|_| cache.begin_read(5)).collect();
        let condition = |device| cache.device(device).condition(Moment::from_nanos(1));
        assert_eq!((condition(5), condition(6)), (Condition::Busy, Condition::Healthy));
        drop(reads);
        let later = now_anywhere() + Duration::from_secs(3);
        assert_eq!(cache.device(5).condition(later), Condition::Healthy);
    }

    #[test]
    fn read_that_was_given_up_is_no_answer_of_its_device() {
        let cache = PageCache::with_slots(16);
        let began = Moment::from_nanos(1);
        drop(cache.begin_read(5));
        assert!(!cache.device(5).has_answered_since(began));
        cache.begin_read(5).end(true);
        assert!(cache.device(5).has_answered_since(began) && !cache.device(6).has_answered_since(began));
        assert_eq!(cache.device(5).reads_done.load(Relaxed), 1);
    }

    #[test]
    fn facts_hold_for_less_time_after_a_read_and_on_a_busy_device() {
        let cache = PageCache::with_slots(16);
        let later = now_anywhere() + Duration::from_secs(10);
        assert_eq!(cache.fact_time(Condition::Healthy, later), FACT_TIME);
        cache.note_miss(later);
        assert_eq!(cache.fact_time(Condition::Healthy, later), FACT_TIME_READING);
        assert_eq!(cache.fact_time(Condition::Busy, later), FACT_TIME_BUSY);
        assert_eq!(cache.fact_time(Condition::Healthy, later + 2 * FACT_TIME), FACT_TIME);
    }

    #[test]
    fn looks_are_few() {
        let cache = PageCache::with_slots(16);
        let looks: Vec<_> = (0..ACCESS_LOOKS_MAX).map(|_| cache.begin_look(5, true).expect("room")).collect();
        assert!(cache.begin_look(5, true).is_none() && cache.begin_look(6, true).is_some());
        let others: Vec<_> = (ACCESS_LOOKS_MAX..LOOKS_MAX).map(|_| cache.begin_look(5, false).expect("room")).collect();
        assert!(cache.begin_look(5, false).is_none());
        drop((looks, others));
        assert!(cache.begin_look(5, true).is_some());
    }

    #[test]
    fn a_short_look_says_that_the_rest_is_not_in_memory() {
        let file = std::fs::File::open("/proc/self/exe").and_then(File::from_std).expect("it runs");
        let cache = PageCache::with_slots(64);
        let is_known = |number: u64| file.known_length(&cache, number * PART, 1, FACT_TIME, now_anywhere()) > 0;
        let length = 2 * PART as usize;
        file.note_found(&cache, 0, length, length);
        assert!(is_known(0) && is_known(1) && !is_known(2));
        file.note_found(&cache, 0, length, length - 4096);
        assert!(is_known(0) && !is_known(1));
        // At the end of the file nothing is missing.
        let last = (file.metadata().size - 1) / PART;
        let rest = (file.metadata().size - last * PART) as usize;
        file.note_found(&cache, last * PART, length, rest);
        assert!(is_known(last));
    }
}
