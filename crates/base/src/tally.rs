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
//! Tally ── near:  [ shared | 1 … 7 ]  a copy is made when its thread counts for the first time
//!       ── row 0: [ 8 … 15 ]
//!       ── row 1: [ 16 … 31 ]
//! ```
//!
//! The first threads of a process are its loops, so a request mostly finds its copies among the near ones.

use std::array::from_fn;
use std::cell::Cell;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Copies that a tally has room for itself; those of further threads stand in rows.
const NEAR: usize = 8;

/// Rows of copies, each twice as long as the one before: a thousand threads.
const ROWS: usize = 7;

/// How many copies there are at most.
const COPIES_MAX: usize = NEAR << ROWS;

/// The number of the copy that threads without one share.
const SHARED: usize = 0;

/// Which numbers have a thread; that of [`SHARED`] has none.
static TAKEN: Mutex<Vec<bool>> = Mutex::new(Vec::new());

/// A thread's number in all tallies, until it ends.
struct Number(usize);

thread_local! {
    /// A plain value, because a request looks it up several times: no flag, no destructor.
    static NUMBER: Cell<usize> = const { Cell::new(UNKNOWN) };
    static OWN: Number = Number::take();
}

/// In place of a thread's number before it has one.
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
        // What the thread counts while it ends goes to the copy that is shared.
        NUMBER.set(SHARED);
        if self.0 != SHARED {
            lock(&TAKEN)[self.0] = false;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of the running thread's copy in every tally.
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

/// `N` counters. See the file's head.
#[derive(Debug)]
pub struct Tally<const N: usize> {
    near: [OnceLock<Box<Counts<N>>>; NEAR],
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

    /// Counts so many of each: as [`Own::add`], with what is the same for all of them found out once.
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

    /// Has the counter say this, for one whose largest value is asked for.
    #[inline]
    pub fn set(&self, counter: usize, value: u64) {
        self.counters[counter].store(value, Relaxed);
    }
}

impl<const N: usize> Tally<N> {
    /// Nothing is counted.
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

    /// The copy of this number, if it was made.
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
        let copy = self.find(number.min(COPIES_MAX - 1));
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

/// The row of a copy that is not near, and its place there.
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
        // More than there are near copies.
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
    fn what_a_thread_counts_while_it_ends_is_not_lost() {
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
            // Destructors come in the order of first uses, or in the other: one of these is later than the number's.
            BEFORE.with(|_| ());
            TALLY.own().add(0, 1);
            AFTER.with(|_| ());
        })
        .join()
        .unwrap();
        assert_eq!(TALLY.sums(), [3]);
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
