//! Per-thread counters: any number of threads add and read without blocking each other.
//!
//! Each counting thread has its own copy on its own cache lines and updates it with plain stores: no locked
//! instruction, no cache line that moves between processors. A reader sums the copies, so a total may be slightly out
//! of date. Counts survive the end of a thread; its copy is reused by the next one.
//!
//! Invariant: every copy but the first is written by at most one thread. The first is shared by threads without a copy
//! of their own, because there are too many threads or because the thread is ending; they use locked instructions.
//!
//! ```text
//! Tally ── near:  [ shared | 1 … 7 ]  a copy is made when its thread counts for the first time
//!       ── row 0: [ 8 … 15 ]
//!       ── row 1: [ 16 … 31 ]
//! ```
//!
//! The first threads of a process are its event loops, so a request usually finds its copy among the near ones.

use std::array::from_fn;
use std::cell::Cell;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Copies stored in the tally itself; those of further threads are stored in rows.
const NEAR: usize = 8;

/// Rows of copies, each twice as long as the one before. Together they serve a thousand threads.
const ROWS: usize = 7;

const COPIES_MAX: usize = NEAR << ROWS;

/// Number of the copy shared by threads without one of their own.
const SHARED: usize = 0;

/// Numbers in use by a thread; [`SHARED`] always counts as in use.
static TAKEN: Mutex<Vec<bool>> = Mutex::new(Vec::new());

/// A thread's number in all tallies, held until the thread ends.
struct Number(usize);

thread_local! {
    /// A plain value without initialization flag or destructor, because a request reads it several times.
    static NUMBER: Cell<usize> = const { Cell::new(UNKNOWN) };
    static OWN: Number = Number::take();
}

/// Value of `NUMBER` before the thread has one.
const UNKNOWN: usize = usize::MAX;

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
        // Counts that the thread adds while it ends go to the shared copy.
        NUMBER.set(SHARED);
        if self.0 != SHARED {
            lock(&TAKEN)[self.0] = false;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the number of the running thread's copy in every tally.
#[inline]
pub fn own_number() -> usize {
    match NUMBER.get() {
        UNKNOWN => take_number(),
        number => number,
    }
}

#[cold]
fn take_number() -> usize {
    let number = OWN.try_with(|own| own.0).unwrap_or(SHARED);
    NUMBER.set(number);
    number
}

/// `N` counters, each with a copy per thread.
#[derive(Debug)]
pub struct Tally<const N: usize> {
    near: [OnceLock<Box<Counts<N>>>; NEAR],
    rows: [OnceLock<Row<N>>; ROWS],
    /// The sums at the last reset.
    base: Mutex<Option<Box<[u64; N]>>>,
}

type Row<const N: usize> = Box<[OnceLock<Box<Counts<N>>>]>;

/// The counts of one thread. Aligned to two cache lines, because processors fetch them in pairs.
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
    /// Adds to one counter.
    #[inline]
    pub fn add(&self, counter: usize, count: u64) {
        let counter = &self.counters[counter];
        if self.is_shared {
            counter.fetch_add(count, Release);
        } else {
            counter.store(counter.load(Relaxed).wrapping_add(count), Release);
        }
    }

    /// Adds to several counters; the check for the shared copy is made only once.
    #[inline]
    pub fn add_each<const M: usize>(&self, counts: [(usize, u64); M]) {
        if self.is_shared {
            for (counter, count) in counts {
                self.add(counter, count);
            }
            return;
        }
        for (counter, count) in counts {
            let counter = &self.counters[counter];
            counter.store(counter.load(Relaxed).wrapping_add(count), Release);
        }
    }

    /// Sets a counter whose maximum over all threads is wanted: see [`Tally::max`].
    #[inline]
    pub fn set(&self, counter: usize, value: u64) {
        self.counters[counter].store(value, Relaxed);
    }
}

impl<const N: usize> Tally<N> {
    /// Returns a tally in which all counters are zero.
    pub const fn new() -> Tally<N> {
        Tally {
            near: [const { OnceLock::new() }; NEAR],
            rows: [const { OnceLock::new() }; ROWS],
            base: Mutex::new(None),
        }
    }

    /// The running thread's copy.
    #[inline]
    pub fn own(&self) -> Own<'_, N> {
        let number = own_number();
        let copy = match self.near.get(number).and_then(OnceLock::get) {
            Some(copy) => copy,
            None => self.find_or_make(number),
        };
        Own { counters: &copy.0, is_shared: number == SHARED }
    }

    /// Returns the copy of this number, if it has been created.
    fn find(&self, number: usize) -> Option<&Counts<N>> {
        let copy = match self.near.get(number) {
            Some(near) => near.get(),
            None => {
                let (row, place) = place_of(number);
                self.rows[row].get().and_then(|row| row[place].get())
            }
        };
        copy.map(|copy| &**copy)
    }

    #[cold]
    fn find_or_make(&self, number: usize) -> &Counts<N> {
        let copy = match self.near.get(number) {
            Some(near) => near,
            None => {
                let (row, place) = place_of(number);
                &self.rows[row].get_or_init(|| (0..NEAR << row).map(|_| OnceLock::new()).collect())[place]
            }
        };
        copy.get_or_init(|| Box::new(Counts([const { AtomicU64::new(0) }; N])))
    }

    fn copies(&self) -> impl Iterator<Item = &Counts<N>> {
        let rows = self.rows.iter().filter_map(OnceLock::get).flatten();
        self.near.iter().chain(rows).filter_map(|copy| copy.get().map(|copy| &**copy))
    }

    /// Returns the sums over all threads. The counters of a thread are read in index order: a reader that sees an
    /// addition to one counter also sees all earlier additions of that thread to the counters after it.
    pub fn sums(&self) -> [u64; N] {
        let mut sums = [0_u64; N];
        for copy in self.copies() {
            for (sum, counter) in sums.iter_mut().zip(&copy.0) {
                *sum = sum.wrapping_add(counter.load(Acquire));
            }
        }
        sums
    }

    /// Returns the sums since the last reset.
    pub fn since_reset(&self) -> [u64; N] {
        self.after_reset(self.sums())
    }

    /// Subtracts from `sums` the values at the last reset.
    pub fn after_reset(&self, sums: [u64; N]) -> [u64; N] {
        match &*lock(&self.base) {
            Some(base) => from_fn(|counter| sums[counter].wrapping_sub(base[counter])),
            None => sums,
        }
    }

    /// Resets [`Tally::since_reset`] to zero. [`Tally::sums`] is not changed.
    pub fn reset(&self) {
        *lock(&self.base) = Some(Box::new(self.sums()));
    }

    /// Returns the counts of the thread with this number, including those of earlier threads that had the same number.
    pub fn counted_by(&self, number: usize) -> [u64; N] {
        let copy = self.find(number.min(COPIES_MAX - 1));
        copy.map_or([0; N], |copy| from_fn(|counter| copy.0[counter].load(Relaxed)))
    }

    /// Returns the largest value that any thread has [set](Own::set).
    pub fn max(&self, counter: usize) -> u64 {
        self.copies().map(|copy| copy.0[counter].load(Relaxed)).max().unwrap_or(0)
    }
}

impl<const N: usize> Default for Tally<N> {
    fn default() -> Self {
        Tally::new()
    }
}

/// Returns the row of a copy that is not near, and its index within the row.
fn place_of(number: usize) -> (usize, usize) {
    let row = (number / NEAR).ilog2() as usize;
    (row, number - (NEAR << row))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_a_place_of_its_own() {
        let mut places: Vec<_> = (NEAR..COPIES_MAX).map(place_of).collect();
        assert!(places.iter().all(|&(row, place)| row < ROWS && place < NEAR << row));
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), COPIES_MAX - NEAR);
    }

    #[test]
    fn nothing_that_threads_count_at_once_or_one_after_the_other_is_lost() {
        static TALLY: Tally<2> = Tally::new();
        // More threads than near copies.
        for _ in 0..8 {
            std::thread::scope(|scope| {
                for _ in 0..20 {
                    scope.spawn(|| (0..1000).for_each(|_| TALLY.own().add(0, 2)));
                }
            });
        }
        assert_eq!(TALLY.sums(), [8 * 20 * 2000, 0]);
    }

    #[test]
    fn threads_without_a_number_share_a_copy() {
        let tally = Tally::<1>::new();
        let shared = Own { counters: &tally.find_or_make(SHARED).0, is_shared: true };
        std::thread::scope(|scope| {
            (0..4).for_each(|_| _ = scope.spawn(|| (0..1000).for_each(|_| shared.add(0, 1))));
        });
        assert_eq!((tally.sums(), tally.counted_by(SHARED)), ([4000], [4000]));
    }

    #[test]
    fn counts_by_a_thread_that_ends_are_kept() {
        static TALLY: Tally<1> = Tally::new();
        struct Late;
        impl Drop for Late {
            fn drop(&mut self) {
                TALLY.own().add(0, 1);
            }
        }
        thread_local! {
            static BEFORE: Late = const { Late };
            static AFTER: Late = const { Late };
        }
        std::thread::spawn(|| {
            // Thread-local destructors run in the order of first use or in reverse: either way one of these two runs
            // after the number's.
            BEFORE.with(|_| ());
            TALLY.own().add(0, 1);
            AFTER.with(|_| ());
        })
        .join()
        .unwrap();
        assert_eq!(TALLY.sums(), [3]);
    }

    #[test]
    fn reset_hides_earlier_counts_and_changes_no_sum() {
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
