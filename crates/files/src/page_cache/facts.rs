//! Facts about pages in memory, each with the time at which the kernel gave it: an answer of the page cache helper, a
//! read that did not wait, a `sendfile` that did not.
//!
//! Further tables of this kind have the parts that the page cache helper holds in memory, and the parts that were used.
//!
//! A lock-free table for all files and loops, by device and inode. An entry is one word and describes a *window* of 1
//! MiB in *parts* of 64 KiB; a bit is set if all of a part was in memory. An entry is as old as its oldest bit. A set
//! of two entries holds facts of a window at two times, or of two windows with the same hash; the older entry is
//! replaced. A lost fact costs one question to the kernel.
//!
//! ```text
//!   63      40 39        24 23      0
//!   | tag 24  |  parts 16  | tick 24 |      a tick is 8 ms; ticks repeat after 39 hours
//! ```
//!
//! The validity of a fact depends on its device: `PageCache::fact_time`.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use gale_runtime::Moment;

pub(super) const PART: u64 = 64 * 1024;

const WINDOW_PARTS: u64 = 16;

const WINDOW: u64 = WINDOW_PARTS * PART;

/// Entries of the table: 512 KiB of memory when all are in use, 64 GiB of files.
const SLOTS: usize = 1 << 16;

const TICK_SHIFT: u32 = 23;
const TICK_MASK: u64 = (1 << 24) - 1;
const PARTS_SHIFT: u32 = 24;
const PARTS_MASK: u64 = (1 << WINDOW_PARTS) - 1;
const TAG_MASK: u64 = !0 << 40;

/// Age up to which an entry accepts further bits. It keeps its age, so that no bit seems newer than it is.
const MERGED_TICKS: u64 = 1;

/// The same for entries about uses: a minute.
const USES_MERGED_TICKS: u64 = 60 * 125;

/// Ticks by which another loop's clock may be ahead.
const AHEAD_TICKS_MAX: u64 = 125;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FileHash(u64);

impl FileHash {
    pub fn new(device: u64, inode: u64) -> FileHash {
        FileHash(mix(device ^ mix(inode)))
    }
}

pub(crate) struct Facts {
    slots: Box<[AtomicU64]>,
}

impl Facts {
    pub fn new() -> Facts {
        Facts::with_slots(SLOTS)
    }

    /// `count` is a power of two, at least 2.
    pub fn with_slots(count: usize) -> Facts {
        assert!(count.is_power_of_two() && (2..=SLOTS).contains(&count));
        let layout = Layout::array::<AtomicU64>(count).expect("a small table");
        // SAFETY: the layout has a non-zero size and is that of `count` atomics, for which zeros are valid. Zeroed
        // memory from the system takes no room until it is written; `collect` would write all of it.
        let slots = unsafe {
            let memory = alloc_zeroed(layout).cast::<AtomicU64>();
            if memory.is_null() {
                handle_alloc_error(layout);
            }
            Box::from_raw(std::ptr::slice_from_raw_parts_mut(memory, count))
        };
        Facts { slots }
    }

    /// Notes that all of `range` is in memory now. The last part of a file of this `size` is whole at the end of the
    /// file.
    #[inline]
    pub fn note(&self, file: FileHash, range: Range<u64>, size: u64, now: Moment) {
        self.note_range(file, range, size, MERGED_TICKS, now);
    }

    /// Notes that all of `range` is used now, in a table of uses: an entry accepts bits for a minute.
    #[inline]
    pub fn note_use(&self, file: FileHash, range: Range<u64>, size: u64, now: Moment) {
        self.note_range(file, range, size, USES_MERGED_TICKS, now);
    }

    #[inline]
    fn note_range(&self, file: FileHash, range: Range<u64>, size: u64, merged_ticks: u64, now: Moment) {
        let first = range.start.div_ceil(PART);
        let end = if range.end == size { size.div_ceil(PART) } else { range.end / PART };
        let mut part = first;
        while part < end {
            let window = part / WINDOW_PARTS;
            let window_end = end.min((window + 1) * WINDOW_PARTS);
            let parts = bits(part % WINDOW_PARTS..window_end - window * WINDOW_PARTS);
            self.note_window(file, window, parts, merged_ticks, now);
            part = window_end;
        }
    }

    #[inline]
    fn note_window(&self, file: FileHash, window: u64, parts: u64, merged_ticks: u64, now: Moment) {
        let (set, tag) = self.set(file, window);
        let entries = [set[0].load(Relaxed), set[1].load(Relaxed)];
        let is_own = |entry: u64| entry & TAG_MASK == tag;
        let is_newer = |entry: u64| is_own(entry) && ticks_ahead(entry, now) > MERGED_TICKS;
        if entries.into_iter().any(is_newer) {
            // A late note would make its bits as new as the entry.
            return;
        }
        let is_merged = |entry: u64| is_own(entry) && age_ticks(entry, now) <= merged_ticks;
        let is_covered = |entry: u64| entry == 0 || is_own(entry) && entry >> PARTS_SHIFT & PARTS_MASK & !parts == 0;
        let find = |suits: &dyn Fn(u64) -> bool| entries.iter().position(|&entry| suits(entry));
        // Older bits that are not among the new ones stay in the other entry.
        let index = find(&is_merged)
            .or_else(|| find(&is_covered))
            .unwrap_or_else(|| usize::from(age_ticks(entries[1], now) > age_ticks(entries[0], now)));
        let entry = entries[index];
        let new = match is_merged(entry) {
            true => entry | parts << PARTS_SHIFT,
            false => tag | parts << PARTS_SHIFT | tick(now),
        };
        // A part in constant use is written once in a tick, not with every request on every core.
        if new != entry {
            set[index].store(new, Relaxed);
        }
    }

    /// Forgets the facts about this range, which is not empty.
    pub fn forget(&self, file: FileHash, range: Range<u64>) {
        let (mut part, end) = (range.start / PART, range.end.div_ceil(PART));
        while part < end {
            let window = part / WINDOW_PARTS;
            let window_end = end.min((window + 1) * WINDOW_PARTS);
            let parts = bits(part % WINDOW_PARTS..window_end - window * WINDOW_PARTS) << PARTS_SHIFT;
            let (set, tag) = self.set(file, window);
            for slot in set {
                let entry = slot.load(Relaxed);
                if entry & TAG_MASK == tag && entry & parts != 0 {
                    slot.store(entry & !parts, Relaxed);
                }
            }
            part = window_end;
        }
    }

    /// Bytes from `offset` on that were in memory at most `age` ago, up to `length`; in whole parts, except at the ends
    /// of the piece.
    #[inline]
    pub fn known_length(&self, file: FileHash, offset: u64, length: u64, age: Duration, now: Moment) -> u64 {
        let age = (age.as_nanos() as u64) >> TICK_SHIFT;
        let end = offset.saturating_add(length);
        let mut at = offset;
        while at < end {
            let window = at / WINDOW;
            let (set, tag) = self.set(file, window);
            let known = |entry: u64| match entry & TAG_MASK == tag && age_ticks(entry, now) <= age {
                true => entry >> PARTS_SHIFT & PARTS_MASK,
                false => 0,
            };
            let parts = known(set[0].load(Relaxed)) | known(set[1].load(Relaxed));
            let first = at % WINDOW / PART;
            let count = u64::from((parts >> first).trailing_ones());
            at = at.max((window * WINDOW_PARTS + first + count) * PART).min(end);
            if first + count < WINDOW_PARTS {
                break;
            }
        }
        at.saturating_sub(offset)
    }

    #[inline]
    fn set(&self, file: FileHash, window: u64) -> (&[AtomicU64; 2], u64) {
        let hash = mix(file.0.wrapping_add(window.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        let sets = self.slots.as_chunks::<2>().0;
        // An empty entry has the tag 0.
        (&sets[hash as usize & (sets.len() - 1)], (hash & TAG_MASK).max(1 << 40))
    }
}

#[inline]
fn bits(parts: Range<u64>) -> u64 {
    (1 << parts.end) - (1 << parts.start)
}

#[inline]
fn tick(now: Moment) -> u64 {
    now.as_nanos() >> TICK_SHIFT & TICK_MASK
}

#[inline]
fn age_ticks(entry: u64, now: Moment) -> u64 {
    let age = tick(now).wrapping_sub(entry) & TICK_MASK;
    if age > TICK_MASK - AHEAD_TICKS_MAX { 0 } else { age }
}

/// Ticks by which an entry is ahead of `now`; 0 if it is not.
#[inline]
fn ticks_ahead(entry: u64, now: Moment) -> u64 {
    let ahead = entry.wrapping_sub(tick(now)) & TICK_MASK;
    if ahead <= AHEAD_TICKS_MAX { ahead } else { 0 }
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

    const MIB: u64 = 1 << 20;
    const LARGE: u64 = 1 << 40;
    const SECOND: Duration = Duration::from_secs(1);

    fn at(milliseconds: u64) -> Moment {
        Moment::from_nanos(milliseconds * 1_000_000)
    }

    #[test]
    fn fact_covers_whole_parts_and_grows_old() {
        let (facts, file, other) = (Facts::with_slots(1024), FileHash::new(1, 2), FileHash::new(2, 1));
        let known = |file, offset, length, now| facts.known_length(file, offset, length, SECOND, at(now));
        facts.note(file, 100..3 * PART + 5, LARGE, at(5000));
        assert_eq!(known(file, 0, MIB, 5000), 0, "a part of which the beginning is not known");
        assert_eq!(known(file, PART, MIB, 5000), 2 * PART);
        assert_eq!(known(file, PART + 10, 20, 5900), 20);
        assert_eq!(known(file, PART, MIB, 6100), 0, "too old");
        assert_eq!(known(other, PART, MIB, 5000), 0);
        facts.forget(file, 2 * PART + 1..2 * PART + 2);
        assert_eq!(known(file, PART, MIB, 5000), PART);
    }

    #[test]
    fn last_part_is_whole_at_the_end_of_its_file() {
        let (facts, file) = (Facts::with_slots(1024), FileHash::new(1, 1));
        facts.note(file, 0..300_000, 300_000, at(0));
        assert_eq!(facts.known_length(file, 0, 300_000, SECOND, at(0)), 300_000);
        facts.note(file, MIB..MIB + 1000, 8 * MIB, at(0));
        assert_eq!(facts.known_length(file, MIB, 1000, SECOND, at(0)), 0);
    }

    #[test]
    fn fact_spans_windows_and_entry_is_as_old_as_its_oldest_part() {
        let (facts, file) = (Facts::with_slots(1024), FileHash::new(1, 1));
        facts.note(file, 0..4 * MIB, 4 * MIB, at(0));
        let known = |now| facts.known_length(file, 0, 4 * MIB, Duration::from_millis(24), at(now));
        assert_eq!(known(8), 4 * MIB);
        facts.note(file, 0..PART, 4 * MIB, at(8));
        assert_eq!((known(24), known(33)), (4 * MIB, 0), "the other parts did not become newer, nor did the first");
        facts.note(file, 0..PART, 4 * MIB, at(40));
        assert_eq!(known(40), PART, "old bits do not become new ones");
        let longer = facts.known_length(file, 0, 4 * MIB, Duration::from_millis(48), at(40));
        assert_eq!(longer, 4 * MIB, "nor are they forgotten");
    }

    #[test]
    fn fact_of_a_thread_whose_clock_is_ahead_is_new() {
        let (facts, file) = (Facts::with_slots(8), FileHash::new(1, 1));
        facts.note(file, 0..PART, LARGE, at(2000));
        assert_eq!(facts.known_length(file, 0, PART, Duration::ZERO, at(1500)), PART);
    }

    #[test]
    fn late_note_does_not_become_as_new_as_a_later_one() {
        let (facts, file) = (Facts::with_slots(8), FileHash::new(1, 1));
        let known = |part, now| facts.known_length(file, part * PART, PART, Duration::from_millis(24), at(now));
        facts.note(file, 8 * PART..16 * PART, LARGE, at(60));
        facts.note(file, 0..4 * PART, LARGE, at(0));
        assert_eq!((known(0, 70), known(8, 70)), (0, PART));
    }

    #[test]
    fn as_many_windows_as_there_are_entries_are_mostly_kept() {
        let facts = Facts::with_slots(8192);
        let files = || (0..4000).map(|inode| FileHash::new(7, inode));
        files().for_each(|file| facts.note(file, 0..PART, LARGE, at(5)));
        let kept = files().filter(|&file| facts.known_length(file, 0, PART, SECOND, at(5)) > 0).count();
        assert!(kept > 3400, "{kept} of 4000");
    }
}
