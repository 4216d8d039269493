//! Backlog of a loop: bytes of all spill queues that wait for their files, beyond the memory of each queue.
//!
//! It bounds the memory used by many slow clients on a slow disk. Beyond [`max`] a queue only has room for its own
//! memory, so its server waits for its client. Then all waiting bytes are written, however few each queue has, and when
//! half of them are written, the refused queues check again. Invariant: while a queue is refused, more than half of the
//! bound is waiting.
//!
//! Below the bound, the more queues wait, the less each may have: [`share`]. A disk is as busy with 16 KiB of each of a
//! thousand queues as with 128 KiB of each of a few.

use std::cell::{Cell, RefCell};
use std::rc::Weak;

use gale_runtime::leased_bytes_max;

use super::state::Shared;
use crate::state::QUEUED_BYTES_MAX;

/// Waiting bytes that suffice to keep a disk busy.
const USEFUL_BYTES_MAX: usize = 64 << 20;

/// Waiting bytes up to which each queue may have [`QUEUED_BYTES_MAX`].
const PLENTY_BYTES: usize = 8 << 20;

/// The least that a queue may have waiting, however many others do.
pub(super) const SHARE_MIN: usize = 16 * 1024;

thread_local! {
    static BYTES: Cell<usize> = const { Cell::new(0) };
    /// Queues with waiting bytes.
    static QUEUES: Cell<usize> = const { Cell::new(0) };
    /// Queues whose writers wait for the backlog.
    static REFUSED: RefCell<Vec<Weak<Shared>>> = const { RefCell::new(Vec::new()) };
    /// Queues with too few waiting bytes for a write.
    static SMALL: RefCell<Vec<Weak<Shared>>> = const { RefCell::new(Vec::new()) };
}

/// The bound in bytes: half of the loop's leases, which is an eighth of the memory for all loops together.
fn max() -> usize {
    (leased_bytes_max() / 2).min(USEFUL_BYTES_MAX)
}

/// `true` if more bytes may wait.
pub(super) fn has_room() -> bool {
    BYTES.get() < max() && REFUSED.with_borrow(Vec::is_empty)
}

/// Bytes of one queue that may wait.
pub(super) fn share() -> usize {
    (PLENTY_BYTES / QUEUES.get().max(1)).clamp(SHARE_MIN, QUEUED_BYTES_MAX)
}

/// Registers a queue that was refused room. It is woken when there is room, and all waiting bytes are written.
pub(super) fn refuse(queue: Weak<Shared>) {
    REFUSED.with_borrow_mut(|refused| refused.push(queue));
    for small in SMALL.take().iter().filter_map(Weak::upgrade) {
        small.write_now();
    }
}

/// Registers a queue with too few waiting bytes for a write.
pub(super) fn list_small(queue: Weak<Shared>) {
    SMALL.with_borrow_mut(|small| {
        if small.len() == small.capacity() {
            // Removes ended queues before the list grows.
            small.retain(|queue| queue.strong_count() > 0);
            small.reserve(small.len() + 16);
        }
        small.push(queue);
    });
}

/// A queue's share of the backlog.
#[derive(Default)]
pub(super) struct Part(usize);

impl Part {
    /// `true` if bytes of the queue are waiting.
    pub fn is_some(&self) -> bool {
        self.0 > 0
    }

    /// Sets the queue's waiting bytes. Returns the queues that should check again; the caller wakes their writers once
    /// it holds no borrow.
    #[must_use]
    pub fn set(&mut self, bytes: usize) -> Vec<Weak<Shared>> {
        let all = BYTES.get() - self.0 + bytes;
        let is_less = bytes < self.0;
        QUEUES.set(QUEUES.get() - usize::from(self.0 > 0) + usize::from(bytes > 0));
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
        // Refused queues of a loop that ends are dropped with it.
        let queues = self.set(0);
        wake(queues);
    }
}
