//! Which parts of files were found in memory lately: a table of fixed size, for all files and all loops. The only
//! memory of that fact.
//!
//! Kept by device and inode, not by open file, so that a request that opens its file anew knows what the last one has
//! found. It is a memory of observations and may be wrong: what was seen can have been evicted since. So an entry is
//! worth something for a while only; how long depends on what a wrong guess would cost ([`super::device::Condition`]).
//!
//! ```text
//!   line, 64 bytes: four parts that follow each other in a file, two slots for each
//!     slot, one word without a lock:  tag: 32 bits │ pages of the part: 16 bits │ tick: 16 bits
//! ```
//!
//! Pages that are seen within one tick gather in one slot. Those of a later tick replace them if they are all of them;
//! otherwise they begin the other slot, since whoever sends a file rarely stops where a part ends, and what was seen of
//! the part before is believed on for a while. What has to make room is what was seen longest ago: what streams past
//! displaces other such things, and not what is in constant use.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::time::Moment;

/// The parts that are remembered: as many pages as a slot has bits for.
pub(crate) const GRANULE: u64 = 16 * PAGE;

/// What the kernel has in memory or not: a page, or several.
pub(super) const PAGE: u64 = 4096;

/// Half a MiB of address space, of which only the pages that are used take memory; enough for 4 GiB that are in
/// constant use.
const SLOTS: usize = 1 << 16;

/// A line of the processor's cache, so that a piece of 256 KiB costs one miss.
const LINE_SLOTS: usize = 8;

/// How many parts a line has room for, with two slots each.
const LINE_PARTS: u64 = LINE_SLOTS as u64 / 2;

/// The bytes of a file that a line knows of.
const LINE_BYTES: u64 = LINE_PARTS * GRANULE;

/// Ticks have 268 ms, and 16 bits: they repeat after five hours, when an entry may seem new that is old.
const TICK_SHIFT: u32 = 28;
const TICK_BITS: u32 = 16;

/// The bits of an entry that are the tag, and those of the tick.
const TAG: u64 = 0xffff_ffff << 32;
const TICK: u64 = (1 << TICK_BITS) - 1;

/// So far ahead an entry may seem of a thread that took the time earlier: a minute.
const AHEAD_TICKS_MAX: u16 = 0xff;

pub(crate) struct Residency {
    lines: Box<[Line]>,
}

#[repr(align(64))]
struct Line([AtomicU64; LINE_SLOTS]);

/// Names a file for [`Residency`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FileHash(u64);

impl FileHash {
    pub fn new(device: u64, inode: u64) -> FileHash {
        FileHash(mix(device ^ mix(inode)))
    }
}

/// What a piece of a file has of one part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    /// The number of the part in its file.
    number: u64,
    /// The pages that the piece touches, a bit each.
    pages: u16,
    /// Where the piece's share of the part begins and ends in the file.
    pub begin: u64,
    pub end: u64,
}

impl Part {
    /// The page in which this byte lies.
    #[inline]
    pub fn with_byte(offset: u64) -> Part {
        Part::at(offset, offset.saturating_add(1))
    }

    /// The part in which this byte lies, up to the end of the part or of the piece.
    #[inline]
    fn at(begin: u64, piece_end: u64) -> Part {
        let number = begin / GRANULE;
        let end = ((number + 1) * GRANULE).min(piece_end);
        let (first, last) = (begin % GRANULE / PAGE, (end - 1) % GRANULE / PAGE);
        Part { number, pages: u16::MAX << first & u16::MAX >> (15 - last), begin, end }
    }
}

/// The parts of a piece, which may be empty.
#[inline]
pub(crate) fn parts(offset: u64, length: u64) -> impl Iterator<Item = Part> {
    let mut piece = offset..offset.saturating_add(length);
    std::iter::from_fn(move || next_part(&mut piece))
}

/// The first part of a piece, which then begins behind it.
#[inline]
pub(crate) fn next_part(piece: &mut Range<u64>) -> Option<Part> {
    let part = (piece.start < piece.end).then(|| Part::at(piece.start, piece.end))?;
    piece.start = part.end;
    Some(part)
}

impl Residency {
    pub fn new() -> Self {
        Self::with_slots(SLOTS)
    }

    /// `count` is a power of two, and a line's at least.
    pub fn with_slots(count: usize) -> Self {
        assert!(count.is_power_of_two() && (LINE_SLOTS..=SLOTS).contains(&count));
        let count = count / LINE_SLOTS;
        let layout = Layout::array::<Line>(count).expect("a small table");
        // SAFETY: the layout is not of size zero and that of `count` lines of atomics, for which zeros are valid.
        // Zeroed memory that comes from the system is not touched; `collect` would touch all of it.
        let lines = unsafe {
            let memory = alloc_zeroed(layout).cast::<Line>();
            if memory.is_null() {
                handle_alloc_error(layout);
            }
            Box::from_raw(std::ptr::slice_from_raw_parts_mut(memory, count))
        };
        Residency { lines }
    }

    /// What is known of this file.
    #[inline]
    pub fn of(&self, file: FileHash) -> FileParts<'_> {
        FileParts { residency: self, file, line_number: u64::MAX, line: &self.lines[0], tag: 0 }
    }
}

/// What is known of one file's parts. Those that follow each other share a line, which is looked for once.
pub(crate) struct FileParts<'r> {
    residency: &'r Residency,
    file: FileHash,
    /// The parts in `line`: from four times this number on.
    line_number: u64,
    line: &'r Line,
    /// Of the entries in `line` that belong to these parts.
    tag: u64,
}

impl<'r> FileParts<'r> {
    /// The first part of a piece, given by where it begins and ends, that was not seen in memory in this very tick; the
    /// piece then begins behind it. What is in constant use is passed over line by line.
    #[inline]
    pub fn next_stale(&mut self, piece: &mut Range<u64>, now: Moment) -> Option<Part> {
        while piece.start < piece.end {
            let is_whole_line = piece.start.is_multiple_of(LINE_BYTES) && piece.end - piece.start >= LINE_BYTES;
            if is_whole_line && self.is_line_fresh(piece.start / LINE_BYTES, now) {
                piece.start += LINE_BYTES;
                continue;
            }
            match next_part(piece) {
                Some(part) if self.was_seen(&part, 0, now) => {}
                part => return part,
            }
        }
        None
    }

    /// Whether all parts of a line were seen in this tick, as far as their first slots say.
    #[inline]
    fn is_line_fresh(&mut self, line_number: u64, now: Moment) -> bool {
        self.seek(line_number);
        let seen = self.tag | u64::from(u16::MAX) << TICK_BITS | u64::from(tick(now));
        let first_slots = self.line.0.iter().step_by(2);
        first_slots.fold(0, |difference, slot| difference | slot.load(Relaxed) ^ seen) == 0
    }

    /// Whether all of this was seen in memory, so many ticks ago at most.
    #[inline]
    pub fn was_seen(&mut self, part: &Part, ticks: u16, now: Moment) -> bool {
        let (slots, wanted) = self.slots(part);
        let is_it = |entry: u64| (entry ^ wanted) & (TAG | wanted) & !TICK == 0 && age_at(now, entry) <= ticks;
        is_it(slots[0].load(Relaxed)) || is_it(slots[1].load(Relaxed))
    }

    /// This was seen in memory.
    #[inline]
    pub fn note(&mut self, part: &Part, now: Moment) {
        let (slots, wanted) = self.slots(part);
        let entries = [slots[0].load(Relaxed), slots[1].load(Relaxed)];
        let seen = wanted | u64::from(tick(now));
        let is_own = |entry: u64| (entry ^ seen) & TAG == 0;
        if let Some(index) = entries.iter().position(|&entry| is_own(entry) && (entry ^ seen) & TICK == 0) {
            // What is in constant use is written some times a second, not with every request on every core.
            if entries[index] | seen != entries[index] {
                slots[index].store(entries[index] | seen, Relaxed);
            }
            return;
        }
        let is_covered = |entry: u64| entry == 0 || is_own(entry) && pages(entry) & !part.pages == 0;
        let index = entries
            .iter()
            .position(|&entry| is_covered(entry))
            .unwrap_or_else(|| usize::from(age_at(now, entries[1]) > age_at(now, entries[0])));
        slots[index].store(seen, Relaxed);
    }

    /// Something of this was not in memory: nothing of the part is known any more. Returns whether all of it was seen
    /// there, so many ticks ago at most.
    #[inline]
    pub fn forget(&mut self, part: &Part, ticks: u16, now: Moment) -> bool {
        let was_seen = self.was_seen(part, ticks, now);
        let (slots, wanted) = self.slots(part);
        for slot in slots.iter().filter(|slot| (slot.load(Relaxed) ^ wanted) & TAG == 0) {
            slot.store(0, Relaxed);
        }
        was_seen
    }

    /// The slots of a part, and what an entry is that says that its pages were seen, but for the tick.
    #[inline]
    fn slots(&mut self, part: &Part) -> (&'r [AtomicU64; 2], u64) {
        self.seek(part.number / LINE_PARTS);
        // The first parts of files, of which there are most, are spread over the line.
        let pair = (part.number ^ self.file.0) % LINE_PARTS;
        (&self.line.0.as_chunks::<2>().0[pair as usize], self.tag | u64::from(part.pages) << TICK_BITS)
    }

    #[inline]
    fn seek(&mut self, line_number: u64) {
        if line_number != self.line_number {
            let hash = mix(self.file.0.wrapping_add(line_number.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
            let lines = &self.residency.lines;
            self.line_number = line_number;
            self.line = &lines[hash as usize & (lines.len() - 1)];
            // An empty slot has the tag 0.
            self.tag = (hash & TAG).max(TAG & TAG.wrapping_neg());
        }
    }
}

#[inline]
fn pages(entry: u64) -> u16 {
    (entry >> TICK_BITS) as u16
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

    impl FileParts<'_> {
        /// How many ticks ago all of this was seen; `None` if that is not known.
        fn age(&mut self, part: &Part, now: Moment) -> Option<u16> {
            (0..=u16::MAX).find(|&ticks| self.was_seen(part, ticks, now))
        }
    }

    fn part(number: u64) -> Part {
        Part::at(number * GRANULE, (number + 1) * GRANULE)
    }

    #[test]
    fn a_piece_is_made_of_the_pages_that_it_touches() {
        let all = |offset, length| parts(offset, length).map(|part| (part.number, part.pages)).collect::<Vec<_>>();
        assert_eq!(all(0, 1), [(0, 1)]);
        assert_eq!(all(4095, 2), [(0, 0b11)]);
        assert_eq!(all(GRANULE - 1, 2), [(0, 0x8000), (1, 1)]);
        assert_eq!(all(GRANULE, 2 * GRANULE), [(1, 0xffff), (2, 0xffff)]);
        assert_eq!(all(7, 0), []);
        let ends: Vec<_> = parts(10, GRANULE).map(|part| (part.begin, part.end)).collect();
        assert_eq!(ends, [(10, GRANULE), (GRANULE, GRANULE + 10)]);
    }

    #[test]
    fn what_was_seen_is_known_and_grows_old() {
        let residency = Residency::with_slots(1024);
        let (one, other) = (FileHash::new(1, 2), FileHash::new(2, 1));
        let age = |file, number, seconds| residency.of(file).age(&part(number), at(seconds));
        assert_eq!(age(one, 0, 100), None);
        residency.of(one).note(&part(0), at(100));
        assert_eq!(age(one, 0, 100), Some(0));
        assert!(age(one, 0, 101).is_some_and(|age| (3..=4).contains(&age)));
        assert!(age(one, 0, 110).is_some_and(|age| (37..=38).contains(&age)));
        assert_eq!((age(one, 1, 100), age(other, 0, 100)), (None, None));
        residency.of(one).note(&part(0), at(120));
        assert_eq!(age(one, 0, 120), Some(0));
        let forget = |file, offset, ticks| residency.of(file).forget(&Part::with_byte(offset), ticks, at(121));
        assert!(!forget(other, 0, u16::MAX));
        assert_eq!(age(one, 0, 120), Some(0));
        assert!(forget(one, GRANULE - 1, 4), "it was seen a second ago");
        assert_eq!(age(one, 0, 120), None);
    }

    #[test]
    fn parts_that_were_not_seen_in_this_tick_are_found_in_their_order() {
        let (residency, file) = (Residency::with_slots(1024), FileHash::new(1, 1));
        let stale = |begin: u64, end: u64, seconds| {
            let (mut known, mut piece) = (residency.of(file), begin..end);
            std::iter::from_fn(|| known.next_stale(&mut piece, at(seconds))).map(|part| part.number).collect::<Vec<_>>()
        };
        assert_eq!(stale(0, 0, 100), []);
        assert_eq!(stale(0, 3 * GRANULE + 1, 100), [0, 1, 2, 3]);
        (0..12).for_each(|number| residency.of(file).note(&part(number), at(100)));
        assert_eq!(stale(0, 12 * GRANULE, 100), []);
        assert_eq!(stale(GRANULE + 1, 13 * GRANULE, 100), [12]);
        assert_eq!(stale(0, 12 * GRANULE, 101), (0..12).collect::<Vec<_>>());
        residency.of(file).forget(&Part::with_byte(6 * GRANULE), 0, at(100));
        assert_eq!(stale(0, 12 * GRANULE, 100), [6]);
        residency.of(file).note(&Part::at(6 * GRANULE, 7 * GRANULE - PAGE), at(100));
        assert_eq!(stale(0, 12 * GRANULE, 100), [6], "a page of it was not");
        assert_eq!(stale(6 * GRANULE, 7 * GRANULE - PAGE, 100), []);
    }

    #[test]
    fn only_pages_that_were_seen_are_known() {
        let (residency, file) = (Residency::with_slots(64), FileHash::new(1, 1));
        let half = |begin: u64| parts(begin * GRANULE / 2, GRANULE / 2).next().expect("a part");
        let age = |part: &Part, seconds| residency.of(file).age(part, at(seconds));
        residency.of(file).note(&half(0), at(100));
        assert_eq!((age(&half(0), 100), age(&half(1), 100), age(&part(0), 100)), (Some(0), None, None));
        residency.of(file).note(&half(1), at(100));
        assert_eq!(age(&part(0), 100), Some(0), "in two halves");
        // What is seen of it later makes the rest no newer, and does not make it unknown, either.
        residency.of(file).note(&half(0), at(110));
        assert_eq!(age(&half(0), 110), Some(0));
        assert!(age(&half(1), 110) > Some(30) && age(&part(0), 110) > Some(30));
        residency.of(file).note(&half(1), at(110));
        assert_eq!(age(&part(0), 110), Some(0));
    }

    #[test]
    fn what_another_thread_has_noted_in_the_next_tick_is_new() {
        let (residency, file) = (Residency::with_slots(8), FileHash::new(1, 1));
        residency.of(file).note(&part(0), at(102));
        assert_eq!(residency.of(file).age(&part(0), at(101)), Some(0));
    }

    #[test]
    fn what_streams_past_does_not_displace_what_is_in_use() {
        let residency = Residency::with_slots(1024);
        let (hot, stream) = (FileHash::new(1, 1), FileHash::new(1, 2));
        for second in 0..100 {
            (0..8).for_each(|number| residency.of(hot).note(&part(number), at(second)));
            (0..20).for_each(|number| residency.of(stream).note(&part(second * 20 + number), at(second)));
            let known = (0..8).filter(|&number| residency.of(hot).age(&part(number), at(second)).is_some()).count();
            assert!(known >= 7, "{known} in second {second}");
        }
    }

    #[test]
    fn as_many_parts_as_there_are_slots_are_mostly_kept() {
        let kept_of = |files: u64, parts: u64| {
            let residency = Residency::new();
            let all =
                || (0..files).flat_map(|inode| (0..parts).map(move |number| (FileHash::new(7, inode), part(number))));
            all().for_each(|(file, part)| residency.of(file).note(&part, at(5)));
            all().filter(|(file, part)| residency.of(*file).age(part, at(5)).is_some()).count()
        };
        let (large, small) = (kept_of(1000, 8), kept_of(8000, 1));
        assert!(large > 7000 && small > 7000, "{large} and {small} of 8000");
    }
}
