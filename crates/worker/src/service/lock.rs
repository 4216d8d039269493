//! Lock of an exclusive service, while this process holds it.
//!
//! Releasing it may wait for a file server, so a thread of the default pool does that, however the service ends.

use std::sync::Arc;

use gale_process::LockGuard;
use gale_runtime::{Device, default_pool};

/// A share of the lock of an exclusive service. The lock is held until the last share is dropped, on any thread.
#[derive(Clone)]
pub struct LockShare(Arc<HeldLock>);

impl LockShare {
    pub(super) fn new(lock: HeldLock) -> LockShare {
        LockShare(Arc::new(lock))
    }

    /// The lock, if this is its last share.
    pub(super) fn into_last(self) -> Option<HeldLock> {
        Arc::into_inner(self.0)
    }
}

/// A lock that is held. It may be dropped on an event loop.
pub(super) struct HeldLock(Option<LockGuard>);

impl HeldLock {
    pub fn new(guard: LockGuard) -> HeldLock {
        HeldLock(Some(guard))
    }

    /// Releases the lock synchronously, for a thread of a pool.
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
