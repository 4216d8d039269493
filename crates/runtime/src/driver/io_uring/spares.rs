//! Boxes of what connections need now and then: kept for use again, so that a request allocates none.

use std::cell::RefCell;

/// How many are kept. In one turn more connections may need one; what they give back beyond this is freed.
const KEPT_MAX: usize = 64;

/// They are not dropped before reuse: whoever keeps one has seen to what is in it.
pub(super) struct Spares<T>(RefCell<Vec<Box<T>>>);

impl<T: Default> Spares<T> {
    pub fn new() -> Self {
        Spares(RefCell::new(Vec::new()))
    }

    /// A spare one, or a new one.
    pub fn take(&self) -> Box<T> {
        self.0.borrow_mut().pop().unwrap_or_default()
    }

    pub fn keep(&self, spare: Box<T>) {
        let mut kept = self.0.borrow_mut();
        if kept.len() < KEPT_MAX {
            kept.push(spare);
        }
    }
}
