//! The lock of an exclusive service while this process holds it.
//!
//! A release may wait for a file server, so a thread of the default pool does it, however the service ends.

use gale_process::LockGuard;
use gale_runtime::{Device, default_pool};

/// A lock that is held. It may be dropped on an event loop.
pub(super) struct HeldLock(Option<LockGuard>);

impl HeldLock {
    pub fn new(guard: LockGuard) -> HeldLock {
        HeldLock(Some(guard))
    }

    /// Releases the lock before it returns, for a thread of a pool.
    pub fn release(mut self) {
        self.0 = None;
    }
}

impl Drop for HeldLock {
    fn drop(&mut self) {
        if let Some(guard) = self.0.take() {
            default_pool().dispose(Device::NONE, guard);
        }
    }
}
