//! Budgets: process-wide limits, shared by all workers, on one kind of resource. For texts held in memory until the
//! slowest client has received them, the bytes are counted until the last reference is dropped; for descriptors, their
//! number.

use std::sync::atomic::{AtomicUsize, Ordering};

use gale_runtime::Bytes;

/// A limit with its current use.
pub struct Budget {
    most: usize,
    taken: AtomicUsize,
}

/// A share of a budget, returned on drop.
pub struct BudgetShare {
    budget: &'static Budget,
    size: usize,
}

/// A text with its share.
struct Held {
    text: Box<[u8]>,
    _taken: BudgetShare,
}

impl Budget {
    /// Creates a budget of this size.
    pub const fn new(most: usize) -> Budget {
        Budget { most, taken: AtomicUsize::new(0) }
    }

    /// Takes a share if there is enough left. An unused budget grants one share of any size.
    pub fn take(&'static self, size: usize) -> Option<BudgetShare> {
        let with = |before: usize| match before.checked_add(size) {
            Some(after) if before == 0 || after <= self.most => Some(after),
            _ => None,
        };
        let taken = self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, with);
        taken.is_ok().then(|| BudgetShare { budget: self, size })
    }

    /// Amount in use.
    pub fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }

    /// `true` if all of it is in use.
    pub fn is_full(&self) -> bool {
        self.taken() >= self.most
    }
}

impl BudgetShare {
    /// Attaches the share to the text that it is for, until the text's last reference is dropped.
    pub fn hold(self, text: impl Into<Box<[u8]>>) -> Bytes {
        Bytes::from_owner(Held { text: text.into(), _taken: self })
    }
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.text
    }
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        self.budget.taken.fetch_sub(self.size, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_takes_room_until_its_last_slice_is_dropped() {
        static BUDGET: Budget = Budget::new(10);
        let text = BUDGET.take(6).expect("there is room").hold(*b"abcdef");
        let part = text.slice(2..4);
        assert!(BUDGET.take(5).is_none());
        drop(BUDGET.take(4).expect("there is just as much"));
        assert_eq!(BUDGET.taken(), 6, "what is refused or dropped takes none");
        drop(text);
        assert_eq!((&*part, BUDGET.taken()), (&b"cd"[..], 6));
        drop(part);
        assert_eq!(BUDGET.taken(), 0);
    }

    #[test]
    fn one_text_is_never_too_long() {
        static BUDGET: Budget = Budget::new(10);
        let long = BUDGET.take(usize::MAX);
        assert!(long.is_some() && BUDGET.is_full() && BUDGET.take(0).is_none());
        drop(long);
        assert!(!BUDGET.is_full() && BUDGET.take(10).is_some());
    }
}
