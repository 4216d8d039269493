//! Parked wakers: a waker stored in one word instead of two.
//!
//! Nearly all wakers are this runtime's own, which are one word anyway (`executor/mod.rs`). Others (of a combinator
//! that has its own wakers) are boxed, and marked with the loop number that no loop has.

use std::num::NonZeroU64;
use std::task::Waker;

use crate::executor::{self, FOREIGN};

/// A slot for at most one waker. Dropping it drops the waker.
#[derive(Default)]
pub(crate) struct Parked(
    /// The complement of a waker's word: 0 is a valid word, all ones is not.
    Option<NonZeroU64>,
);

impl Parked {
    /// An empty slot.
    pub const fn new() -> Self {
        Parked(None)
    }

    pub fn is_some(&self) -> bool {
        self.0.is_some()
    }

    /// Stores a waker and returns the displaced one: dropping that may run foreign code, so the caller drops it last.
    #[inline]
    pub fn park(&mut self, waker: &Waker) -> Option<Waker> {
        let Some(word) = executor::word_of(waker) else {
            return self.park_foreign(waker);
        };
        match self.0.replace(complement(word)) {
            Some(old) if is_foreign(!old.get()) => Some(into_waker(!old.get())),
            // Own wakers need no drop.
            _ => None,
        }
    }

    #[cold]
    fn park_foreign(&mut self, waker: &Waker) -> Option<Waker> {
        let displaced = self.take();
        let pointer = Box::into_raw(Box::new(waker.clone())).expose_provenance() as u64;
        assert!(pointer & FOREIGN == 0, "an address of user space");
        self.0 = Some(complement(pointer | FOREIGN));
        displaced
    }

    #[inline]
    pub fn take(&mut self) -> Option<Waker> {
        self.0.take().map(|word| into_waker(!word.get()))
    }
}

impl Drop for Parked {
    #[inline]
    fn drop(&mut self) {
        if self.0.is_some_and(|word| is_foreign(!word.get())) {
            drop(self.take());
        }
    }
}

fn complement(word: u64) -> NonZeroU64 {
    // All ones would be a foreign waker at the last address, where no box can be.
    NonZeroU64::new(!word).expect("no word is all ones")
}

fn is_foreign(word: u64) -> bool {
    word & FOREIGN == FOREIGN
}

#[inline]
fn into_waker(word: u64) -> Waker {
    if !is_foreign(word) {
        return executor::waker_of(word);
    }
    let pointer = std::ptr::with_exposed_provenance_mut((word & !FOREIGN) as usize);
    // SAFETY: `park_foreign` made the word from a box, and each word is used once: it is taken out of its slot.
    *unsafe { Box::<Waker>::from_raw(pointer) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_waker_of_others_is_woken_once_and_freed() {
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        let mut parked = Parked::new();
        assert!(parked.take().is_none() && !parked.is_some());
        assert!(parked.park(&waker).is_none());
        assert!(parked.park(&waker).is_some_and(|displaced| displaced.will_wake(&waker)));
        assert!(parked.is_some());
        parked.take().expect("the second one").wake();
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert!(parked.park(&waker).is_none());
        drop((parked, waker));
        assert_eq!(Arc::strong_count(&count), 1);
    }

    #[test]
    fn our_own_wakers_come_back_as_they_were() {
        for word in [0, 1, FOREIGN - 1, 1 << 54, 5 << 54 | 77 << 28 | 3] {
            let waker = executor::waker_of(word);
            let mut parked = Parked::new();
            assert!(parked.park(&waker).is_none() && parked.is_some());
            assert!(parked.park(&waker).is_none(), "nothing to drop");
            assert!(parked.take().is_some_and(|taken| taken.will_wake(&waker)));
            assert!(!parked.is_some());
        }
        assert_eq!(size_of::<Parked>(), 8);
    }
}
