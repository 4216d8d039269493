//! How many idle connections a pool may keep, as permits: so many for each of its workers, wherever they are.
//!
//! ```text
//!   free ◄──► held by a worker, for the connections that it keeps warm ──► of a parked connection ──► free
//! ```
//!
//! What some workers do not need, others use: the kernel gives one worker more clients than another, and each of them
//! may have an idle connection at the same moment. A worker always gets its own number. If others have all permits
//! then, the pool is overdrawn, until one that has more than its number gives one up: at the next connection that it
//! keeps, or that would cool down.
//!
//! A worker holds its permits over many requests, so a request touches nothing that workers share.

use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};

/// The permits of one pool. A clone is the same.
#[derive(Clone, Debug)]
pub(super) struct IdlePermits {
    /// Below zero where the pool is overdrawn.
    free: Arc<AtomicIsize>,
    per_worker: usize,
}

/// A permit, which is free again when this is dropped.
#[derive(Debug)]
pub(super) struct IdlePermit(IdlePermits);

impl IdlePermits {
    pub fn new(per_worker: usize, workers: usize) -> IdlePermits {
        let all = isize::try_from(per_worker.saturating_mul(workers)).unwrap_or(isize::MAX);
        IdlePermits { free: Arc::new(AtomicIsize::new(all)), per_worker }
    }

    /// Whether some are free.
    pub fn are_free(&self) -> bool {
        self.free.load(Ordering::Relaxed) > 0
    }

    /// Whether more are taken than there are.
    pub fn are_overdrawn(&self) -> bool {
        self.free.load(Ordering::Relaxed) < 0
    }

    /// Takes one for a worker that has so many of them.
    pub fn take(&self, held: usize) -> bool {
        if held < self.per_worker {
            self.free.fetch_sub(1, Ordering::Relaxed);
            return true;
        }
        let one_less = |free: isize| (free > 0).then_some(free - 1);
        self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok()
    }

    /// Whether a worker that has so many of them has to give one up.
    pub fn are_owed(&self, held: usize) -> bool {
        held > self.per_worker && self.are_overdrawn()
    }

    /// So many are free again.
    pub fn give_back(&self, count: usize) {
        self.free.fetch_add(count as isize, Ordering::Relaxed);
    }

    /// One of those that a worker holds, from now on by itself.
    pub fn one_held(&self) -> IdlePermit {
        IdlePermit(self.clone())
    }
}

impl Drop for IdlePermit {
    fn drop(&mut self) {
        self.0.give_back(1);
    }
}
