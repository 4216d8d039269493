//! The backlog of a loop: bytes of all spill queues that wait for their files, beyond the memory of each queue.
//!
//! Many slow clients of a slow disk would else hold as much each as one may hold. Beyond [`max`] a queue has room for
//! its own memory alone, so its server waits for its client. Then everything that waits is written, however little each
//! queue has, and when half of it is written, the queues that were refused look again. Invariant: while there is one
//! that was refused, more than half of the bound waits.

use std::cell::{Cell, RefCell};
use std::rc::Weak;

use gale_runtime::leased_bytes_max;

use super::state::Shared;

/// More than this a disk need not have waiting to be busy, in bytes.
const USEFUL_BYTES_MAX: usize = 64 << 20;

thread_local! {
    static BYTES: Cell<usize> = const { Cell::new(0) };
    /// Queues whose writers wait for the backlog.
    static REFUSED: RefCell<Vec<Weak<Shared>>> = const { RefCell::new(Vec::new()) };
    /// Queues of which so little waits that it is not written before more comes.
    static SMALL: RefCell<Vec<Weak<Shared>>> = const { RefCell::new(Vec::new()) };
}

/// The bound, in bytes: half of the loop's leases, which is an eighth of the memory for all loops together.
fn max() -> usize {
    (leased_bytes_max() / 2).min(USEFUL_BYTES_MAX)
}

/// Whether more may wait.
pub(super) fn has_room() -> bool {
    BYTES.get() < max() && REFUSED.with_borrow(Vec::is_empty)
}

/// A queue was refused room: it is called when there is some, and everything that waits is written.
pub(super) fn refuse(queue: Weak<Shared>) {
    REFUSED.with_borrow_mut(|refused| refused.push(queue));
    for small in SMALL.take().iter().filter_map(Weak::upgrade) {
        small.write_now();
    }
}

/// Lists a queue of which too little waits to be written now.
pub(super) fn list_small(queue: Weak<Shared>) {
    SMALL.with_borrow_mut(|small| {
        if small.len() == small.capacity() {
            // Those that have ended, before the list grows.
            small.retain(|queue| queue.strong_count() > 0);
            small.reserve(small.len() + 16);
        }
        small.push(queue);
    });
}

/// A queue's part of the backlog.
#[derive(Default)]
pub(super) struct Part(usize);

impl Part {
    /// Some bytes of the queue wait.
    pub fn is_some(&self) -> bool {
        self.0 > 0
    }

    /// The queue has so many bytes waiting now. Returns the queues that are to look again; the caller wakes their
    /// writers when it has borrowed nothing.
    #[must_use]
    pub fn set(&mut self, bytes: usize) -> Vec<Weak<Shared>> {
        let all = BYTES.get() - self.0 + bytes;
        let is_less = bytes < self.0;
        self.0 = bytes;
        BYTES.set(all);
        if is_less && all <= max() / 2 { REFUSED.take() } else { Vec::new() }
    }
}

/// Wakes the writers of these queues.
pub(super) fn wake(queues: Vec<Weak<Shared>>) {
    for queue in queues.iter().filter_map(Weak::upgrade) {
        queue.wake_writer();
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // A loop that ends takes those that wait with it.
        let queues = self.set(0);
        wake(queues);
    }
}
