//! Counters that many threads add to and anybody reads, without any of them waiting for another.
//!
//! Each thread that counts has a copy of its own, on cache lines of its own, and writes it with plain stores: no locked
//! instruction, no line that moves between processors. Whoever reads adds the copies up, each a moment old. What a
//! thread has counted stays when it ends: its copy goes on with the next thread.
//!
//! Invariant: of every copy but the first there is at most one thread that writes it. The first is for threads that get
//! none of their own, because there are too many or they are ending; they add to it with locked instructions.
//!
//! ```text
//! Tally ── row 0: [ shared ]          a copy is made when its thread counts for the first time
//!       ── row 1: [ 1 | 2 ]
//!       ── row 2: [ 3 | 4 | 5 | 6 ]
//! ```

use std::array::from_fn;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Rows of copies, each twice as long as the one before: a thousand threads.
const ROWS: usize = 10;

/// How many threads have a copy of their own at most.
const COPIES_MAX: usize = (1 << ROWS) - 1;

/// The number of the copy that threads without one share.
const SHARED: usize = 0;

/// Which numbers have a thread; that of [`SHARED`] has none.
static TAKEN: Mutex<Vec<bool>> = Mutex::new(Vec::new());

/// A thread's number in all tallies, until it ends.
struct Number(usize);

thread_local! {
    static NUMBER: Number = Number::take();
}

impl Number {
    fn take() -> Number {
        let mut taken = lock(&TAKEN);
        if taken.is_empty() {
            taken.push(true);
        }
        if let Some(free) = taken.iter().position(|is_taken| !is_taken) {
            taken[free] = true;
            return Number(free);
        }
        if taken.len() == COPIES_MAX {
            return Number(SHARED);
        }
        taken.push(true);
        Number(taken.len() - 1)
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        if self.0 != SHARED {
            lock(&TAKEN)[self.0] = false;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of the running thread's copy in every tally.
pub fn own_number() -> usize {
    NUMBER.try_with(|number| number.0).unwrap_or(SHARED)
}

/// `N` counters. See the file's head.
#[derive(Debug)]
pub struct Tally<const N: usize> {
    rows: [OnceLock<Row<N>>; ROWS],
    /// What had been counted when it was reset last.
    base: Mutex<Option<Box<[u64; N]>>>,
}

type Row<const N: usize> = Box<[OnceLock<Box<Counts<N>>>]>;

/// What one thread has counted. Two lines, because processors fetch them in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct Counts<const N: usize>([AtomicU64; N]);

/// The running thread's copy of a tally.
#[derive(Clone, Copy, Debug)]
pub struct Own<'t, const N: usize> {
    counters: &'t [AtomicU64; N],
    is_shared: bool,
}

impl<const N: usize> Own<'_, N> {
    /// Counts so many.
    #[inline]
    pub fn add(&self, counter: usize, count: u64) {
        let counter = &self.counters[counter];
        if self.is_shared {
            counter.fetch_add(count, Release);
        } else {
            counter.store(counter.load(Relaxed).wrapping_add(count), Release);
        }
    }

    /// Has the counter say this, for one whose largest value is asked for.
    #[inline]
    pub fn set(&self, counter: usize, value: u64) {
        self.counters[counter].store(value, Relaxed);
    }
}

impl<const N: usize> Tally<N> {
    /// Nothing is counted.
    pub const fn new() -> Tally<N> {
        Tally { rows: [const { OnceLock::new() }; ROWS], base: Mutex::new(None) }
    }

    /// The running thread's copy.
    #[inline]
    pub fn own(&self) -> Own<'_, N> {
        let number = own_number();
        let (row, place) = place_of(number);
        let copy = match self.rows[row].get().and_then(|row| row[place].get()) {
            Some(copy) => copy,
            None => self.make(row, place),
        };
        Own { counters: &copy.0, is_shared: number == SHARED }
    }

    #[cold]
    fn make(&self, row: usize, place: usize) -> &Counts<N> {
        let row = self.rows[row].get_or_init(|| (0..1 << row).map(|_| OnceLock::new()).collect());
        row[place].get_or_init(|| Box::new(Counts([const { AtomicU64::new(0) }; N])))
    }

    fn copies(&self) -> impl Iterator<Item = &Counts<N>> {
        self.rows.iter().filter_map(OnceLock::get).flatten().filter_map(|copy| copy.get().map(|copy| &**copy))
    }

    /// What all threads have counted. The counters of a thread are read in their order: who sees what it has counted in
    /// one of them sees in the later ones all that it had counted before.
    pub fn sums(&self) -> [u64; N] {
        let mut sums = [0_u64; N];
        for copy in self.copies() {
            for (sum, counter) in sums.iter_mut().zip(&copy.0) {
                *sum = sum.wrapping_add(counter.load(Acquire));
            }
        }
        sums
    }

    /// What all threads have counted since it was reset.
    pub fn since_reset(&self) -> [u64; N] {
        self.after_reset(self.sums())
    }

    /// What of these sums was counted since it was reset.
    pub fn after_reset(&self, sums: [u64; N]) -> [u64; N] {
        match &*lock(&self.base) {
            Some(base) => from_fn(|counter| sums[counter].wrapping_sub(base[counter])),
            None => sums,
        }
    }

    /// What was counted so far counts no more for [`Tally::since_reset`].
    pub fn reset(&self) {
        *lock(&self.base) = Some(Box::new(self.sums()));
    }

    /// What the thread of this number has counted, and those that had it before.
    pub fn counted_by(&self, number: usize) -> [u64; N] {
        let (row, place) = place_of(number.min(COPIES_MAX - 1));
        let copy = self.rows[row].get().and_then(|row| row[place].get());
        copy.map_or([0; N], |copy| from_fn(|counter| copy.0[counter].load(Relaxed)))
    }

    /// The largest value that a thread has [set](Own::set).
    pub fn max(&self, counter: usize) -> u64 {
        self.copies().map(|copy| copy.0[counter].load(Relaxed)).max().unwrap_or(0)
    }
}

impl<const N: usize> Default for Tally<N> {
    fn default() -> Self {
        Tally::new()
    }
}

/// The row of a copy, and its place there.
#[inline]
fn place_of(number: usize) -> (usize, usize) {
    let row = (number + 1).ilog2() as usize;
    (row, number + 1 - (1 << row))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_a_place_of_its_own() {
        let mut places: Vec<_> = (0..COPIES_MAX).map(place_of).collect();
        assert!(places.iter().all(|&(row, place)| row < ROWS && place < 1 << row));
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), COPIES_MAX);
    }

    #[test]
    fn nothing_that_threads_count_at_once_or_one_after_the_other_is_lost() {
        static TALLY: Tally<2> = Tally::new();
        for _ in 0..8 {
            std::thread::scope(|scope| {
                for _ in 0..8 {
                    scope.spawn(|| (0..1000).for_each(|_| TALLY.own().add(0, 2)));
                }
            });
        }
        assert_eq!(TALLY.sums(), [8 * 8 * 2000, 0]);
    }

    #[test]
    fn threads_without_a_number_share_a_copy() {
        let tally = Tally::<1>::new();
        let shared = Own { counters: &tally.make(0, 0).0, is_shared: true };
        std::thread::scope(|scope| {
            (0..4).for_each(|_| _ = scope.spawn(|| (0..1000).for_each(|_| shared.add(0, 1))));
        });
        assert_eq!((tally.sums(), tally.counted_by(SHARED)), ([4000], [4000]));
    }

    #[test]
    fn a_reset_hides_what_was_before_and_changes_no_sum() {
        let tally = Tally::<2>::new();
        tally.own().add(0, 3);
        tally.reset();
        assert_eq!((tally.since_reset(), tally.sums()), ([0, 0], [3, 0]));
        tally.own().add(0, 1);
        tally.own().set(1, 9);
        assert_eq!((tally.since_reset(), tally.sums(), tally.max(1)), ([1, 9], [4, 9], 9));
        assert_eq!(tally.counted_by(own_number()), [4, 9]);
        assert_eq!(tally.counted_by(usize::MAX), [0, 0]);
    }
}
