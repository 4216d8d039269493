//! What is in the page cache, as far as is known, and what may be done on a loop.

pub(crate) mod device;
pub(crate) mod residency;

use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::sync::{Arc, LazyLock};

use self::device::{Knowledge, Verdict, watch};
use self::residency::{BELIEVED_TICKS, GRANULE, PAGE, Residency, WORTH_TRYING_TICKS};
use super::File;
use super::counters::{Event, Rung, count_event, count_piece};
use super::file::Access;
use super::shared_reads::{Flights, PieceRead, ReadHow};
use crate::buffer::Lease;
use crate::clock::{Moment, now_anywhere};
use crate::pool::ThreadPool;
use crate::simulation::World;

thread_local! {
    /// Where [`File::is_resident`] reads what it only wants to know of.
    static PROBED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// What a look at a piece of a file found.
#[derive(Debug)]
pub enum Look {
    /// This much of the piece from its beginning; nothing at the end of the file.
    Found(Lease),
    /// It is not in memory; the kernel has begun to read it.
    NotInMemory,
    /// The look itself might have waited.
    NotLooked,
}

impl Look {
    /// How the piece is read when it was not found.
    pub fn how(&self) -> ReadHow {
        ReadHow { unlooked: matches!(self, Look::NotLooked), ..ReadHow::default() }
    }
}

/// What all loops of the process know together.
static KNOWLEDGE: LazyLock<Arc<Knowledge>> = LazyLock::new(|| Knowledge::new(Residency::new()));
static FLIGHTS: LazyLock<Arc<Flights>> = LazyLock::new(Flights::new);

impl File {
    /// Reads what is in memory now, at most `length` bytes from `offset` on; `None` when the first byte is not, or when the
    /// look might wait.
    pub fn try_read_at(&self, offset: u64, length: usize) -> io::Result<Option<Lease>> {
        match self.look(offset, length)? {
            Look::Found(lease) => Ok(Some(lease)),
            Look::NotInMemory | Look::NotLooked => Ok(None),
        }
    }

    /// Reads what is in memory now, at most `length` bytes from `offset` on, if that cannot wait. Errors: pread(2)'s,
    /// `OutOfMemory` at the hard limit of leases.
    pub fn look(&self, offset: u64, length: usize) -> io::Result<Look> {
        if self.waits_for_others() {
            return Ok(Look::NotLooked);
        }
        self.with_knowledge(|knowledge| {
            let now = now_anywhere();
            let is_crowded = knowledge.device(self.metadata().device).is_crowded(now);
            if is_crowded && !self.is_known(knowledge, offset, length as u64, now, WORTH_TRYING_TICKS)
                || self.writes_access_time()
            {
                return Ok(Look::NotLooked);
            }
            let mut lease = Lease::new(length)?;
            match self.watched(|| self.read_nowait(offset, &mut lease)).0 {
                Some(Ok(count)) => {
                    lease.truncate(count);
                    self.note_found(knowledge, offset, length, count);
                    count_event(Event::Hit);
                    count_piece(Rung::Read, count as u64);
                    Ok(Look::Found(lease))
                }
                Some(Err(error)) => Err(error),
                None => {
                    self.forget(knowledge, offset);
                    count_event(Event::Miss);
                    Ok(Look::NotInMemory)
                }
            }
        })
    }

    /// Whether a piece seems to be in memory, so that `sendfile` will not wait: every part of it was seen there a moment ago,
    /// or a page of it is now. False, too, where a look might wait, and for a while after calls that should not have waited
    /// did. Errors: pread(2)'s.
    pub fn is_resident(&self, offset: u64, length: u64) -> io::Result<bool> {
        if self.waits_for_others() {
            return Ok(false);
        }
        self.with_knowledge(|knowledge| {
            let now = now_anywhere();
            let device = knowledge.device(self.metadata().device);
            if device.is_distrusted(now) || self.writes_access_time() {
                return Ok(false);
            }
            // Each read takes memory for what is read ahead as well, so what was there a moment ago may have gone, all but
            // what is used again and again: a file that was sent as a whole just now.
            if device.is_crowded(now) {
                return Ok(self.shared.whole.covers(&self.all_pages(), now, BELIEVED_TICKS));
            }
            let pages = pages_of(offset, length);
            if self.shared.seen.covers(&pages, now, BELIEVED_TICKS) {
                return Ok(true);
            }
            let end = offset + length;
            let (mut at, mut oldest) = (offset, 0);
            while at < end {
                let granule = at / GRANULE;
                let part_end = ((granule + 1) * GRANULE).min(end);
                let age = knowledge.residency.age(self.shared.hash, granule, now);
                if let Some(age) = age.filter(|&age| age <= BELIEVED_TICKS) {
                    oldest = oldest.max(age);
                } else {
                    // A byte at either end, for as long as memory holds everything: what is asked is whether the part has
                    // been read at all. When pages have to go, they go in runs of whatever length they were read in, and
                    // what lies between two that are there may be gone. Then only reading all of it tells.
                    let is_there = match device.is_memory_short(now) {
                        true => self.probe_whole(at, part_end)?,
                        false => self.probe(at)? && self.probe(part_end - 1)?,
                    };
                    count_event(if is_there { Event::Hit } else { Event::Miss });
                    if !is_there {
                        return Ok(false);
                    }
                    // The ends are those of what the piece has of the part: of the rest nothing was learned, so only a
                    // whole part is noted.
                    if self.is_whole_part(granule, &pages_of(at, part_end - at)) {
                        knowledge.residency.note(self.shared.hash, granule, now);
                    }
                }
                at = part_end;
            }
            self.shared.seen.note(pages, oldest, now);
            Ok(true)
        })
    }
    fn all_pages(&self) -> Range<u64> {
        0..self.metadata().size.div_ceil(PAGE)
    }

    /// Whether the pages are all that the file has in a part.
    fn is_whole_part(&self, granule: u64, pages: &Range<u64>) -> bool {
        let begin = granule * GRANULE;
        let end = (begin + GRANULE).min(self.metadata().size);
        begin < end && pages.start <= begin / PAGE && end.div_ceil(PAGE) <= pages.end
    }

    fn probe(&self, offset: u64) -> io::Result<bool> {
        self.probe_into(offset, &mut [0])
    }

    /// Reads a part and forgets it: some 5 µs for 64 KiB, half of what it takes to send it by a copy.
    fn probe_whole(&self, begin: u64, end: u64) -> io::Result<bool> {
        PROBED.with_borrow_mut(|memory| {
            memory.resize(GRANULE as usize, 0);
            self.probe_into(begin, &mut memory[..(end - begin) as usize])
        })
    }

    fn probe_into(&self, offset: u64, memory: &mut [u8]) -> io::Result<bool> {
        let found = self.watched(|| self.read_nowait(offset, memory)).0;
        found.transpose().map(|count| count == Some(memory.len()))
    }

    /// Calls something that should not wait for this file, and says whether it was quick. If it waited, that is counted, and
    /// the device is distrusted for a while.
    pub fn watched<T>(&self, call: impl FnOnce() -> T) -> (T, bool) {
        let (result, mut verdict) = watch(call);
        if matches!(self.shared.access, Access::Simulated(_)) {
            let is_slow = World::current().is_some_and(|world| world.call_was_slow());
            verdict = if is_slow { Verdict::Waited } else { Verdict::Quick };
        }
        if verdict != Verdict::Quick {
            count_event(Event::LongCall);
            self.with_knowledge(|knowledge| knowledge.device(self.metadata().device).note_miss(now_anywhere()));
        }
        if verdict == Verdict::Waited {
            count_event(Event::Misprediction);
            self.with_knowledge(|knowledge| knowledge.device(self.metadata().device).distrust(now_anywhere()));
        }
        (result, verdict == Verdict::Quick)
    }

    /// A piece has been sent, and that was so quick that it must have been in memory.
    pub fn note_sent(&self, offset: u64, length: usize) {
        if let Some((pages, now)) = self.not_noted(offset, length) {
            self.with_knowledge(|knowledge| self.note_resident(knowledge, pages, now));
        }
    }

    /// So many bytes of those that were asked for were found in memory; the part where the rest begins is not.
    pub(crate) fn note_found(&self, knowledge: &Knowledge, offset: u64, asked: usize, found: usize) {
        if let Some((pages, now)) = self.not_noted(offset, found) {
            self.note_resident(knowledge, pages, now);
        }
        let end = offset + found as u64;
        if found < asked && end < self.metadata().size {
            self.forget(knowledge, end);
        }
    }

    /// The part at this place is not in memory.
    fn forget(&self, knowledge: &Knowledge, offset: u64) {
        knowledge.residency.forget(self.shared.hash, offset / GRANULE);
        self.shared.seen.forget();
        self.shared.whole.forget();
    }

    /// The pages of a piece that was found in memory, and the time, unless that was noted in this very tick.
    #[inline]
    fn not_noted(&self, offset: u64, length: usize) -> Option<(Range<u64>, Moment)> {
        if length == 0 {
            return None;
        }
        let (pages, now) = (pages_of(offset, length as u64), now_anywhere());
        (!self.shared.seen.covers(&pages, now, 0)).then_some((pages, now))
    }

    fn note_resident(&self, knowledge: &Knowledge, pages: Range<u64>, now: Moment) {
        let parts = pages.start * PAGE / GRANULE..(pages.end * PAGE).div_ceil(GRANULE);
        // With what was sent before, a part may be whole.
        let seen = self.shared.seen.note(pages, 0, now);
        let all = self.all_pages();
        if seen.start == 0 && all.end <= seen.end {
            self.shared.whole.note(all, 0, now);
        }
        for granule in parts.filter(|&granule| self.is_whole_part(granule, &seen)) {
            knowledge.residency.note(self.shared.hash, granule, now);
        }
    }

    fn is_known(&self, knowledge: &Knowledge, offset: u64, length: u64, now: Moment, ticks: u16) -> bool {
        let last = (offset + length).saturating_sub(1).min(self.metadata().size.saturating_sub(1)) / GRANULE;
        (offset / GRANULE..=last)
            .all(|granule| knowledge.residency.age(self.shared.hash, granule, now).is_some_and(|age| age <= ticks))
    }

    fn with_knowledge<R>(&self, f: impl FnOnce(&Arc<Knowledge>) -> R) -> R {
        match World::current() {
            Some(world) => f(&world.knowledge),
            None => f(&KNOWLEDGE),
        }
    }

    /// Begins to read a piece that is not in memory in a pool, or takes part in such a read that is under way; not beyond
    /// the end of the piece, fewer bytes at the end of the file, none behind it. Errors: `OutOfMemory` at the hard limit of
    /// leases.
    pub fn begin_read(&self, pool: &ThreadPool, offset: u64, length: usize, how: ReadHow) -> io::Result<PieceRead> {
        // No look is of use there.
        let how = ReadHow { unlooked: how.unlooked && !self.waits_for_others() && how.direct.is_none(), ..how };
        match World::current() {
            Some(world) => world.flights.join(&world.knowledge, self, pool, (offset, length), how),
            None => FLIGHTS.join(&KNOWLEDGE, self, pool, (offset, length), how),
        }
    }
}

/// The pages that a piece lies in, which is not empty.
fn pages_of(offset: u64, length: u64) -> Range<u64> {
    offset / PAGE..(offset + length).div_ceil(PAGE)
}
