//! The page cache, as far as it is known: what of files is in memory, how their devices behave, and what may therefore
//! be done on a loop.
//!
//! Nobody can ask the kernel for the truth: `mincore` and `cachestat` say nothing true to who does not own a file, and
//! what is there now may have gone before the next call. So there are observations ([`residency`]), each believed for a
//! time that depends on the device's [`Condition`], and one question, [`Condition::permits`].

mod calls;
mod device;
mod residency;

use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use self::calls::{Begun, Verdict};
use self::device::{BELIEVED_TICKS, Call, DeviceState, Permission};
use self::residency::{FileParts, GRANULE, PAGE, Part, Residency, next_part, parts};
use super::File;
use super::counters::{Event, Rung, count_event, count_piece};
use super::file_system::{PAGE_CACHE, file_system};
use super::shared_reads::{PieceRead, ReadHow, Reads};
use super::single_flight::SingleFlight;
use crate::environment::Environment;
use crate::memory::buffer::Lease;
use crate::memory::bytes::Bytes;
use crate::pool::{Device, ThreadPool};
use crate::time::{Moment, now_anywhere, real_now_anywhere};

pub(crate) use self::calls::LoopCalls;
pub(crate) use self::device::Condition;
pub(crate) use self::residency::FileHash;

/// How many threads of a pool may look for what is in memory at the same time, before what they look for stands in the
/// device's own line. A look takes a few microseconds, and is as bad as a read only on a device that hangs.
const LOOKS_MAX: u32 = 2;

/// The same of looks that write a time of access. As many as there are wait for the journal when that is stuck: the
/// threads that the pool lends to others then are for other devices, and this one's other lines have to find some, too.
const ACCESS_LOOKS_MAX: u32 = 4;

/// As many as [`LoopCalls`] has bits.
const DEVICES: usize = 64;

/// The slot that has the state of the device of this number.
#[inline]
fn slot(device: u64) -> usize {
    // Minor numbers of disks' partitions and of anonymous devices are consecutive.
    (device ^ device >> 8) as usize % DEVICES
}

/// A turn of a loop is over: if it was long, calls for files that it made may have waited.
#[inline]
pub(crate) fn end_turn(calls: &LoopCalls, began: Moment, ended: Moment) {
    let (devices, verdict) = calls.end_turn(began, ended);
    // A turn that was only long says too little: its calls are timed from now on.
    if verdict == Verdict::Waited && devices != 0 {
        let is_called = |&(slot, _): &(usize, &DeviceState)| devices & 1 << slot != 0;
        let called = PAGE_CACHE.devices.iter().enumerate().filter(is_called);
        // Which call it was nobody knows.
        called.for_each(|(_, device)| PAGE_CACHE.note_long(device, Call::Send, verdict));
    }
}

/// What all loops know together.
pub(crate) struct PageCache {
    residency: Residency,
    devices: [DeviceState; DEVICES],
    /// What is being read because it is not there.
    pub(super) reads: Arc<Reads>,
}

impl PageCache {
    pub fn new() -> Arc<Self> {
        PageCache::with(Residency::new())
    }

    /// Which remembers so many parts of files: a power of two, 8 at least.
    pub fn with_slots(count: usize) -> Arc<Self> {
        PageCache::with(Residency::with_slots(count))
    }

    fn with(residency: Residency) -> Arc<Self> {
        let devices = [const { DeviceState::new() }; DEVICES];
        Arc::new(PageCache { residency, devices, reads: SingleFlight::new() })
    }

    /// How the device of this number (`st_dev`) behaves now.
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

    /// What is known of the devices that something was asked of, by their numbers.
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

    /// A call for files of this device, or a turn with such calls, took longer than it should.
    #[cold]
    fn note_long(&self, device: &DeviceState, call: Call, verdict: Verdict) {
        count_event(Event::LongCall);
        let now = now_anywhere();
        device.note_miss(now);
        if verdict == Verdict::Waited {
            count_event(Event::Misprediction);
            match call {
                Call::Look => device.note_full(now),
                Call::Send => device.back_off(now),
            }
        }
    }

    /// Counts a read of a piece that is not in memory, until [`InFlight::end`], or until the result is dropped: then
    /// nobody has read it.
    pub fn begin_read(self: &Arc<Self>, device: u64) -> InFlight {
        let now = now_anywhere();
        self.device(device).begin_read(now);
        self.read_since(device, now)
    }

    /// Counts a read of a piece that may be in memory, until the result is dropped.
    fn begin_unlooked_read(self: &Arc<Self>, device: u64) -> InFlight {
        let now = now_anywhere();
        self.device(device).count_read(now);
        self.read_since(device, now)
    }

    fn read_since(self: &Arc<Self>, device: u64, began: Moment) -> InFlight {
        InFlight { page_cache: Arc::clone(self), device, count: |state| &state.reads, began, end: End::GivenUp }
    }

    /// Counts a look by a thread of a pool, if there may be one more.
    pub fn begin_look(self: &Arc<Self>, device: u64) -> Option<InFlight> {
        self.begin(device, |state| &state.looks, LOOKS_MAX)
    }

    /// The same of a look that writes a time of access.
    pub fn begin_access_look(self: &Arc<Self>, device: u64) -> Option<InFlight> {
        self.begin(device, |state| &state.access_looks, ACCESS_LOOKS_MAX)
    }

    fn begin(self: &Arc<Self>, device: u64, count: fn(&DeviceState) -> &AtomicU32, most: u32) -> Option<InFlight> {
        let counted = count(self.device(device));
        counted.fetch_update(Relaxed, Relaxed, |before| (before < most).then_some(before + 1)).ok()?;
        Some(InFlight { page_cache: Arc::clone(self), device, count, began: now_anywhere(), end: End::GivenUp })
    }
}

/// Something that a device is asked for.
pub(crate) struct InFlight {
    page_cache: Arc<PageCache>,
    device: u64,
    count: fn(&DeviceState) -> &AtomicU32,
    began: Moment,
    end: End,
}

/// How a read or a look ended.
enum End {
    /// It was not carried out, or says nothing.
    GivenUp,
    FoundInMemory,
    /// The device has answered.
    Read,
}

impl InFlight {
    /// The piece was read. If a thread has waited for that the device has answered; else it was in memory after all.
    pub fn end(mut self, has_waited: bool) {
        self.end = if has_waited { End::Read } else { End::FoundInMemory };
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let device = self.page_cache.device(self.device);
        // The real time: a loop hears of it before its clock has moved on.
        match self.end {
            End::GivenUp => {}
            End::FoundInMemory => device.note_progress(real_now_anywhere()),
            End::Read => {
                let now = real_now_anywhere();
                device.note_read(now.since(self.began), now);
            }
        }
        (self.count)(device).fetch_sub(1, Relaxed);
    }
}

/// Reads of a device that were not in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DeviceReads {
    pub condition: &'static str,
    pub in_flight: u32,
    pub done: u64,
    pub time: Duration,
}

/// What a look at a piece of a file found.
#[derive(Debug)]
pub enum CachedRead {
    /// This much of the piece from its beginning; nothing at the end of the file.
    Found(Bytes),
    /// It is not in memory; the kernel has begun to read it.
    NotInMemory,
    /// The look itself might have waited.
    NotLooked,
}

impl CachedRead {
    /// How the piece is read when it was not found.
    pub fn how(&self) -> ReadHow {
        ReadHow { unlooked: matches!(self, CachedRead::NotLooked), ..ReadHow::default() }
    }
}

/// Whether a read of this device, by anybody, has ended since then, so that it is slow at most, and does not hang. What
/// was in memory does not count.
pub fn has_device_answered_since(device: Device, then: Moment) -> bool {
    file_system(|file_system| file_system.page_cache().device(device.file_device()).has_answered_since(then))
}

/// Whether something is being read from this device, or waits for a thread to read it.
pub fn is_device_reading(device: Device) -> bool {
    file_system(|file_system| file_system.page_cache().device(device.file_device()).reads.load(Relaxed) > 0)
}

thread_local! {
    /// Where [`File::is_resident`] reads what it only wants to know of.
    static PROBED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl File {
    /// Reads what is in memory now, at most `length` bytes from `offset` on, if that cannot wait. Errors: pread(2)'s,
    /// `OutOfMemory` at the hard limit of leases.
    pub fn look(&self, offset: u64, length: usize) -> io::Result<CachedRead> {
        self.look_unless(offset, length, || self.writes_access_time())
    }

    /// As [`File::look`] at a file of our own, of whose time of access nobody makes anything.
    pub(super) fn look_at_own(&self, offset: u64, length: usize) -> io::Result<CachedRead> {
        self.look_unless(offset, length, || false)
    }

    fn look_unless(&self, offset: u64, length: usize, waits: impl FnOnce() -> bool) -> io::Result<CachedRead> {
        if self.waits_for_others() {
            return Ok(CachedRead::NotLooked);
        }
        self.with_page_cache(|cache| {
            if !self.may_look(cache, offset, length as u64) || waits() {
                return Ok(CachedRead::NotLooked);
            }
            let mut lease = Lease::new(length)?;
            match self.watch(Call::Look, || self.read_nowait(offset, &mut lease)) {
                Some(Ok(count)) => {
                    lease.truncate(count);
                    self.note_found(cache, offset, length, count);
                    count_event(Event::Hit);
                    count_piece(Rung::Read, count as u64);
                    Ok(CachedRead::Found(lease.freeze()))
                }
                Some(Err(error)) => Err(error),
                None => {
                    self.note_gone(cache, &Part::with_byte(offset));
                    count_event(Event::Miss);
                    Ok(CachedRead::NotInMemory)
                }
            }
        })
    }

    fn may_look(&self, cache: &PageCache, offset: u64, length: u64) -> bool {
        let now = now_anywhere();
        let condition = cache.device(self.metadata().device).condition(now);
        // Behind the end there is nothing to be known of.
        let length = length.min(self.metadata().size.saturating_sub(offset)).max(1);
        let mut known = cache.residency.of(self.shared.hash);
        let is_permitted =
            |part| condition.permits(Call::Look, |ticks| known.was_seen(&part, ticks, now)) == Permission::Yes;
        condition.permits(Call::Look, |_| false) == Permission::Yes || parts(offset, length).all(is_permitted)
    }

    /// How the device behaves for what is to be sent of this file.
    fn condition(&self, cache: &PageCache, now: Moment) -> Condition {
        let condition = cache.device(self.metadata().device).condition(now);
        // What is written, and sent once, is the first to go.
        let is_next_to_go = condition >= Condition::MemoryShort && self.is_written();
        if is_next_to_go { condition.max(Condition::BackingOff) } else { condition }
    }

    /// Whether a piece seems to be in memory, so that `sendfile` will not wait: every part of it was seen there lately,
    /// or a look finds it now. False, too, where a look might wait, and for a while after calls that should not have
    /// waited did. Errors: pread(2)'s.
    pub fn is_resident(&self, offset: u64, length: u64) -> io::Result<bool> {
        Ok(self.sendable(offset, length, length)? == length)
    }

    /// Counts a read of what is not in memory, as [`PageCache::begin_read`] does.
    pub(super) fn begin_counted_read(&self) -> InFlight {
        self.with_page_cache(|cache| cache.begin_unlooked_read(self.metadata().device))
    }

    /// Whether all of a piece is in constant use: it was in memory a tick ago at most. Then it is read without waiting
    /// even if its device hangs; `sendfile` would wait if it had gone since.
    pub fn is_in_use(&self, offset: u64, length: u64) -> bool {
        if self.waits_for_others() || self.writes_access_time() {
            return false;
        }
        self.with_page_cache(|cache| {
            let (mut known, now) = (cache.residency.of(self.shared.hash), now_anywhere());
            parts(offset, length).all(|part| {
                let permission = Condition::Silent.permits(Call::Look, |ticks| known.was_seen(&part, ticks, now));
                permission == Permission::Yes
            })
        })
    }

    /// How many bytes of a piece one `sendfile` may take now, from its beginning on: less while memory is short, 0
    /// unless all of them seem to be in memory as [`File::is_resident`] says. Errors: pread(2)'s.
    pub fn sendfile_length(&self, offset: u64, length: u64) -> io::Result<u64> {
        self.sendable(offset, length, 0)
    }

    /// `least` is asked for in any case.
    fn sendable(&self, offset: u64, length: u64, least: u64) -> io::Result<u64> {
        if self.waits_for_others() || self.writes_access_time() {
            return Ok(0);
        }
        self.with_page_cache(|cache| {
            let now = now_anywhere();
            let condition = self.condition(cache, now);
            let is_belief_enough = match condition.permits(Call::Send, |_| true) {
                Permission::No => return Ok(0),
                permission => permission == Permission::Yes,
            };
            let length = length.min(condition.sendfile_max().max(least));
            let (mut known, mut piece) = (cache.residency.of(self.shared.hash), offset..offset.saturating_add(length));
            let mut next = |known: &mut FileParts<'_>| match is_belief_enough {
                true => known.next_stale(&mut piece, now),
                false => next_part(&mut piece),
            };
            while let Some(part) = next(&mut known) {
                let is_there = match condition.permits(Call::Send, |ticks| known.was_seen(&part, ticks, now)) {
                    Permission::Yes => continue,
                    Permission::No => return Ok(0),
                    Permission::AskForAll if self.was_found_in_this_turn(&part) => continue,
                    Permission::AskForAll => self.probe_whole(&part)?,
                    // What is asked is whether the part has been read at all: reading ahead brings in twice as much at
                    // once.
                    Permission::AskForEnds => self.probe(part.begin)? && self.probe(part.end - 1)?,
                };
                count_event(if is_there { Event::Hit } else { Event::Miss });
                if !is_there {
                    self.note_gone(cache, &part);
                    return Ok(0);
                }
                known.note(&part, now);
            }
            Ok(length)
        })
    }

    fn probe(&self, offset: u64) -> io::Result<bool> {
        self.probe_into(offset, &mut [0])
    }

    /// Reads a part and forgets it: some 5 µs for 64 KiB, half of what it takes to send it by a copy.
    fn probe_whole(&self, part: &Part) -> io::Result<bool> {
        let is_there = PROBED.with_borrow_mut(|memory| {
            memory.resize(GRANULE as usize, 0);
            self.probe_into(part.begin, &mut memory[..(part.end - part.begin) as usize])
        })?;
        if is_there {
            _ = Environment::try_with(|environment| environment.file_calls.note_found(self.shared.hash, part));
        }
        Ok(is_there)
    }

    fn was_found_in_this_turn(&self, part: &Part) -> bool {
        Environment::try_with(|environment| environment.file_calls.has_found(self.shared.hash, part)).unwrap_or(false)
    }

    fn probe_into(&self, offset: u64, memory: &mut [u8]) -> io::Result<bool> {
        let found = self.watch(Call::Look, || self.read_nowait(offset, memory));
        found.transpose().map(|count| count == Some(memory.len()))
    }

    /// Sends something of this file, which should not wait. If it waited, that is counted, and the device is given
    /// time.
    pub fn watched<T>(&self, send: impl FnOnce() -> T) -> T {
        self.watch(Call::Send, send)
    }

    fn watch<T>(&self, kind: Call, call: impl FnOnce() -> T) -> T {
        let device = self.metadata().device;
        let begin = |environment: &Environment| environment.file_calls.begin(slot(device), environment.clock.now());
        let begun = Environment::try_with(begin).unwrap_or(Begun::Untimed);
        let result = call();
        let verdict = Environment::try_with(|environment| environment.file_calls.end(begun)).unwrap_or(Verdict::Quick);
        if verdict != Verdict::Quick {
            self.with_page_cache(|cache| cache.note_long(cache.device(device), kind, verdict));
        }
        result
    }

    /// A piece has been sent or written, so it is in memory now.
    pub fn note_sent(&self, offset: u64, length: usize) {
        self.with_page_cache(|cache| self.note_seen(cache, offset, length));
    }

    /// So many bytes of those that were asked for were found in memory; the part where the rest begins is not.
    pub(crate) fn note_found(&self, cache: &PageCache, offset: u64, asked: usize, found: usize) {
        self.note_seen(cache, offset, found);
        let end = offset + found as u64;
        if found < asked && end < self.metadata().size {
            match end % PAGE {
                0 => self.note_gone(cache, &Part::with_byte(end)),
                // The file has become shorter.
                _ => _ = cache.residency.of(self.shared.hash).forget(&Part::with_byte(end), 0, now_anywhere()),
            }
        }
    }

    /// Something of this is not in memory. If it was seen there within a second, beliefs are not to be trusted for a
    /// while.
    fn note_gone(&self, cache: &PageCache, part: &Part) {
        let now = now_anywhere();
        let was_believed = cache.residency.of(self.shared.hash).forget(part, BELIEVED_TICKS, now);
        // While somebody writes the file, a look at it may be refused for want of a lock (XFS).
        if was_believed && !self.is_written() && !self.shared.lacks_nowait.load(Relaxed) {
            cache.device(self.metadata().device).note_wrong_belief(now);
        }
    }

    fn note_seen(&self, cache: &PageCache, offset: u64, length: usize) {
        let now = now_anywhere();
        let (mut known, mut piece) =
            (cache.residency.of(self.shared.hash), offset..offset.saturating_add(length as u64));
        while let Some(part) = known.next_stale(&mut piece, now) {
            known.note(&part, now);
        }
    }

    fn with_page_cache<R>(&self, f: impl FnOnce(&Arc<PageCache>) -> R) -> R {
        file_system(|file_system| f(file_system.page_cache()))
    }

    /// Begins to read a piece that is not in memory in a pool, or takes part in such a read that is under way; not
    /// beyond the end of the piece, fewer bytes at the end of the file, none behind it. Errors: `OutOfMemory` at the
    /// hard limit of leases.
    pub fn begin_read(&self, pool: &ThreadPool, offset: u64, length: usize, how: ReadHow) -> io::Result<PieceRead> {
        // No look is of use there.
        let how = ReadHow { unlooked: how.unlooked && !self.waits_for_others() && how.direct.is_none(), ..how };
        self.with_page_cache(|cache| PieceRead::begin(cache, self, pool, (offset, length), how))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn reads_in_flight_congest_their_device_and_no_other() {
        let cache = PageCache::with_slots(16);
        let reads: Vec<InFlight> = (0..4).map(|_| cache.begin_read(5)).collect();
        let condition = |device| cache.device(device).condition(Moment::from_nanos(1));
        assert_eq!((condition(5), condition(6)), (Condition::Congested, Condition::New));
        drop(reads);
        assert_eq!(condition(5), Condition::MemoryShort);
    }

    #[test]
    fn read_that_nobody_has_done_is_no_answer_of_its_device() {
        let cache = PageCache::with_slots(16);
        let began = Moment::from_nanos(1);
        drop(cache.begin_read(5));
        assert!(!cache.device(5).has_answered_since(began));
        cache.begin_read(5).end(true);
        assert!(cache.device(5).has_answered_since(began) && !cache.device(6).has_answered_since(began));
        assert_eq!(cache.device(5).reads_done.load(Relaxed), 1);
    }

    #[test]
    fn looks_are_few() {
        let cache = PageCache::with_slots(16);
        let looks: Vec<_> = (0..LOOKS_MAX).map(|_| cache.begin_look(5).expect("room")).collect();
        assert!(cache.begin_look(5).is_none() && cache.begin_look(6).is_some());
        drop(looks);
        assert!(cache.begin_look(5).is_some());
        let accesses: Vec<_> = (0..ACCESS_LOOKS_MAX).map(|_| cache.begin_access_look(5).expect("room")).collect();
        assert!(cache.begin_access_look(5).is_none() && cache.begin_look(5).is_some());
        drop(accesses);
        assert!(cache.begin_access_look(5).is_some());
    }

    #[test]
    fn a_short_look_says_that_the_rest_is_not_in_memory() {
        let file = std::fs::File::open("/proc/self/exe").and_then(File::from_std).expect("it runs");
        let cache = PageCache::with_slots(64);
        let is_known = |number: u64| {
            let part = parts(number * GRANULE, GRANULE.min(file.metadata().size - number * GRANULE)).next();
            cache.residency.of(file.shared.hash).was_seen(&part.expect("not empty"), u16::MAX, now_anywhere())
        };
        let length = 2 * GRANULE as usize;
        file.note_found(&cache, 0, length, length);
        assert!(is_known(0) && is_known(1) && !is_known(2));
        file.note_found(&cache, 0, length, length - 4096);
        assert!(is_known(0) && !is_known(1));
        // At its end nothing is missing.
        let last = (file.metadata().size - 1) / GRANULE;
        let rest = (file.metadata().size - last * GRANULE) as usize;
        file.note_found(&cache, last * GRANULE, length, rest);
        assert!(is_known(last));
    }

    /// How many pages of the file the kernel has in memory, which it tells since Linux 6.5. Only asks.
    fn cached_pages(file: &std::fs::File) -> Option<u64> {
        const CACHESTAT: libc::c_long = 451;
        let (range, mut counts) = ([0_u64; 2], [0_u64; 5]);
        // SAFETY: cachestat(2) reads `struct cachestat_range`, two numbers, and fills `struct cachestat`, five.
        let code = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), &range, &mut counts, 0) };
        (code == 0).then_some(counts[0])
    }

    /// What is asked here depends on no device's condition, which other tests of the process change.
    #[test]
    fn a_hole_between_two_pages_is_found_where_all_of_a_part_is_asked_for() {
        let path = std::env::temp_dir().join(format!("gale-hole-{}", std::process::id()));
        std::fs::write(&path, vec![b'x'; 2 * GRANULE as usize]).expect("room");
        let descriptor = std::fs::File::open(&path).expect("it was written");
        std::fs::remove_file(&path).expect("it is there");
        descriptor.sync_all().expect("room");
        rustix::fs::fadvise(&descriptor, 0, None, rustix::fs::Advice::DontNeed).expect("a file");
        // Page by page, so that the kernel has no reason to read more.
        rustix::fs::fadvise(&descriptor, 0, None, rustix::fs::Advice::Random).expect("a file");
        let hole = GRANULE + 8 * 4096..GRANULE + 10 * 4096;
        for page in (0..2 * GRANULE).step_by(4096).filter(|page| !hole.contains(page)) {
            descriptor.read_exact_at(&mut [0; 4096], page).expect("so long a file");
        }
        let file = File::from_std(descriptor.try_clone().expect("a descriptor")).expect("a file");
        let before = cached_pages(&descriptor);
        let ends = [GRANULE, 2 * GRANULE - 1].map(|offset| file.probe(offset).expect("a file"));
        let whole = |begin| file.probe_whole(&parts(begin, GRANULE).next().expect("a part")).expect("a file");
        let parts = [0, GRANULE].map(whole);
        let pages = 2 * GRANULE / 4096 - 2;
        let (after, is_expected) = (cached_pages(&descriptor), (ends, parts) == ([true, true], [true, false]));
        // A look that misses has the kernel read: only what was not found says nothing then.
        if before != Some(pages) || after < before || after > before && !is_expected {
            return eprintln!("skipped: the kernel has more or less in memory than it was asked for");
        }
        assert!(is_expected, "{ends:?}, {parts:?}");
    }
}
