//! Which parts of files were found in memory lately: a table of fixed size, for all files and all loops.
//!
//! Kept by device and inode, not by open file, so that a request that opens its file anew knows what the last one has
//! found. It is a memory of observations and may be wrong: what was seen can have been evicted since. So an entry is worth
//! something for a while only, how much depends on what a wrong guess would cost, and nobody relies on it alone.
//!
//! A slot is one word, without a lock: the upper bits of a hash, and when. A part has two slots where it may be, and takes
//! the place of what was seen longest ago: what streams past displaces other such things, and not what is in constant use.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::time::Moment;

/// The parts that are remembered: what one look at one page stands for. Reading ahead brings in twice as much at once.
pub(crate) const GRANULE: u64 = 64 * 1024;

/// Half a MiB of address space, of which only the pages that are used take memory; enough for 4 GiB that are in constant use.
const SLOTS: usize = 1 << 16;

/// Ticks have 268 ms, and 16 bits: they repeat after five hours, when an entry may seem new that is old.
const TICK_SHIFT: u32 = 28;
const TICK_BITS: u32 = 16;

/// So far ahead an entry may seem of a thread that took the time earlier: a minute.
const AHEAD_TICKS_MAX: u16 = 0xff;

/// How long it is believed that a part is still in memory, where a call would wait for the disk if it is not: it has been used
/// a moment ago, and the kernel evicts first what was used longest ago. About a second.
pub(crate) const BELIEVED_TICKS: u16 = 4;

/// How long a part is worth an attempt that is refused if it is not in memory any more. About ten seconds.
pub(crate) const WORTH_TRYING_TICKS: u16 = 40;

pub(crate) struct Residency {
    slots: Box<[AtomicU64]>,
}

/// Names a file for [`Residency`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FileHash(u64);

impl FileHash {
    pub fn new(device: u64, inode: u64) -> FileHash {
        FileHash(mix(device ^ mix(inode)))
    }
}

impl Residency {
    pub fn new() -> Self {
        Self::with_slots(SLOTS)
    }

    /// `count` is a power of two.
    pub fn with_slots(count: usize) -> Self {
        assert!(count.is_power_of_two() && (2..=SLOTS).contains(&count));
        let layout = Layout::array::<AtomicU64>(count).expect("a small table");
        // SAFETY: the layout is not of size zero and that of `count` atomics, for which zeros are valid. Zeroed memory that
        // comes from the system is not touched; `collect` would touch all of it.
        let slots = unsafe {
            let memory = alloc_zeroed(layout).cast::<AtomicU64>();
            if memory.is_null() {
                handle_alloc_error(layout);
            }
            Box::from_raw(std::ptr::slice_from_raw_parts_mut(memory, count))
        };
        Residency { slots }
    }

    /// How many ticks ago the part was seen in memory; `None` if that is not known.
    #[inline]
    pub fn age(&self, file: FileHash, granule: u64, now: Moment) -> Option<u16> {
        let (slots, tag) = self.place(file, granule);
        let found = slots.iter().map(|slot| slot.load(Relaxed)).find(|found| found >> TICK_BITS == tag)?;
        Some(age_at(now, found))
    }

    /// The part was seen in memory.
    #[inline]
    pub fn note(&self, file: FileHash, granule: u64, now: Moment) {
        let (slots, tag) = self.place(file, granule);
        let entry = tag << TICK_BITS | u64::from(tick(now));
        let found = [slots[0].load(Relaxed), slots[1].load(Relaxed)];
        let age = |index: usize| age_at(now, found[index]);
        let own = found.iter().position(|found| found >> TICK_BITS == tag);
        let index = own.unwrap_or_else(|| match found {
            [0, _] => 0,
            [_, 0] => 1,
            _ => usize::from(age(1) > age(0)),
        });
        // What is in constant use is written some times a second, not with every request on every core.
        if found[index] != entry {
            slots[index].store(entry, Relaxed);
        }
    }

    /// The part was not in memory.
    #[inline]
    pub fn forget(&self, file: FileHash, granule: u64) {
        let (slots, tag) = self.place(file, granule);
        for slot in slots.iter().filter(|slot| slot.load(Relaxed) >> TICK_BITS == tag) {
            slot.store(0, Relaxed);
        }
    }

    #[inline]
    fn place(&self, file: FileHash, granule: u64) -> (&[AtomicU64; 2], u64) {
        let hash = mix(file.0.wrapping_add(granule.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        // An empty slot has the tag 0.
        let tag = (hash >> TICK_BITS).max(1);
        let pairs = self.slots.as_chunks::<2>().0;
        (&pairs[hash as usize & (pairs.len() - 1)], tag)
    }
}

/// A run of a file's pages that were seen in memory, and when the first of them was, in one word, for a file that many
/// requests share. Like the table it may be wrong, and is believed for as long; it is more exact than that, because who sends
/// a file rarely stops where a part ends.
///
/// ```text
///   first page: 24 bits │ behind the last: 24 bits │ tick: 16 bits
/// ```
#[derive(Default)]
pub(crate) struct Run(AtomicU64);

/// What the kernel has in memory or not: a page, or several.
pub(crate) const PAGE: u64 = 4096;

/// Pages have numbers of so many bits; of a file beyond 64 GiB nothing is kept in a run.
const PAGE_BITS: u32 = 24;

impl Run {
    /// Whether all of these were seen within so many ticks.
    #[inline]
    pub fn covers(&self, pages: &Range<u64>, now: Moment, ticks: u16) -> bool {
        let word = self.0.load(Relaxed);
        let seen = Run::pages_of(word);
        seen.start <= pages.start && pages.end <= seen.end && age_at(now, word) <= ticks
    }

    /// These were seen, the first of them so many ticks ago. What was seen just then and stands beside them stays. Returns
    /// all that is known of now.
    pub fn note(&self, pages: Range<u64>, age: u16, now: Moment) -> Range<u64> {
        let (word, seen_at) = (self.0.load(Relaxed), tick(now).wrapping_sub(age));
        let seen = Run::pages_of(word);
        let touches = word as u16 == seen_at && seen.start <= pages.end && pages.start <= seen.end;
        let run = if touches { seen.start.min(pages.start)..seen.end.max(pages.end) } else { pages };
        if run.end < 1 << PAGE_BITS {
            self.0.store(run.start << (TICK_BITS + PAGE_BITS) | run.end << TICK_BITS | u64::from(seen_at), Relaxed);
        }
        run
    }

    /// Some were not in memory.
    pub fn forget(&self) {
        self.0.store(0, Relaxed);
    }

    fn pages_of(word: u64) -> Range<u64> {
        word >> (TICK_BITS + PAGE_BITS)..(word >> TICK_BITS) & ((1 << PAGE_BITS) - 1)
    }
}

#[inline]
fn tick(now: Moment) -> u16 {
    (now.as_nanos() >> TICK_SHIFT) as u16
}

/// How old an entry is. Another thread may have a clock that is ahead of this one's: what it notes is new.
#[inline]
fn age_at(now: Moment, entry: u64) -> u16 {
    let age = tick(now).wrapping_sub(entry as u16);
    if age > u16::MAX - AHEAD_TICKS_MAX { 0 } else { age }
}

/// The finish of splitmix64: every bit of the input reaches every bit of the result.
#[inline]
fn mix(value: u64) -> u64 {
    let mixed = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::from_nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn what_was_seen_is_known_and_grows_old() {
        let residency = Residency::with_slots(1024);
        let (one, other) = (FileHash::new(1, 2), FileHash::new(2, 1));
        assert_eq!(residency.age(one, 0, at(100)), None);
        residency.note(one, 0, at(100));
        assert_eq!(residency.age(one, 0, at(100)), Some(0));
        assert!(residency.age(one, 0, at(101)).is_some_and(|age| age <= BELIEVED_TICKS));
        assert!(residency.age(one, 0, at(103)).is_some_and(|age| age > BELIEVED_TICKS && age <= WORTH_TRYING_TICKS));
        assert!(residency.age(one, 0, at(120)).is_some_and(|age| age > WORTH_TRYING_TICKS));
        assert_eq!((residency.age(one, 1, at(100)), residency.age(other, 0, at(100))), (None, None));
        residency.note(one, 0, at(120));
        assert_eq!(residency.age(one, 0, at(120)), Some(0));
        residency.forget(other, 0);
        residency.forget(one, 0);
        assert_eq!(residency.age(one, 0, at(120)), None);
    }

    #[test]
    fn what_another_thread_has_noted_in_the_next_tick_is_new() {
        let residency = Residency::with_slots(2);
        let files: Vec<FileHash> = (0..3).map(|inode| FileHash::new(1, inode)).collect();
        residency.note(files[0], 0, at(100));
        residency.note(files[1], 0, at(102));
        assert_eq!(residency.age(files[1], 0, at(101)), Some(0));
        residency.note(files[2], 0, at(101));
        assert_eq!((residency.age(files[0], 0, at(101)), residency.age(files[1], 0, at(101))), (None, Some(0)));
    }

    #[test]
    fn a_run_is_what_was_seen_side_by_side() {
        let run = Run::default();
        assert!(!run.covers(&(0..1), at(100), WORTH_TRYING_TICKS));
        run.note(4..8, 0, at(100));
        assert_eq!(run.note(8..12, 0, at(100)), 4..12);
        assert!(
            run.covers(&(4..12), at(100), 0) && !run.covers(&(3..5), at(100), 0) && !run.covers(&(8..13), at(100), 0)
        );
        assert!(run.covers(&(5..6), at(101), BELIEVED_TICKS) && !run.covers(&(5..6), at(103), BELIEVED_TICKS));
        // What was seen long ago does not become new by what is seen beside it.
        run.note(12..16, 0, at(103));
        assert!(run.covers(&(12..16), at(103), 0) && !run.covers(&(11..16), at(103), WORTH_TRYING_TICKS));
        run.note(0..2, 3, at(103));
        assert!(run.covers(&(0..2), at(103), 3) && !run.covers(&(0..2), at(103), 2));
        run.note(0..1 << PAGE_BITS, 0, at(103));
        assert!(!run.covers(&(0..3), at(103), WORTH_TRYING_TICKS), "too many");
        run.forget();
        assert!(!run.covers(&(0..1), at(103), WORTH_TRYING_TICKS));
    }

    #[test]
    fn what_streams_past_does_not_displace_what_is_in_use() {
        let residency = Residency::with_slots(1024);
        let (hot, stream) = (FileHash::new(1, 1), FileHash::new(1, 2));
        for second in 0..100 {
            (0..8).for_each(|granule| residency.note(hot, granule, at(second)));
            (0..20).for_each(|part| residency.note(stream, second * 20 + part, at(second)));
            let known = (0..8).filter(|&granule| residency.age(hot, granule, at(second)).is_some()).count();
            assert!(known >= 7, "{known} in second {second}");
        }
    }

    #[test]
    fn as_many_parts_as_there_are_slots_are_mostly_kept() {
        let residency = Residency::new();
        let files: Vec<FileHash> = (0..1000).map(|inode| FileHash::new(7, inode)).collect();
        let parts = || files.iter().flat_map(|&file| (0..8).map(move |granule| (file, granule)));
        parts().for_each(|(file, granule)| residency.note(file, granule, at(5)));
        let kept = parts().filter(|&(file, granule)| residency.age(file, granule, at(5)).is_some()).count();
        assert!(kept > 7000, "{kept} of 8000");
    }
}
