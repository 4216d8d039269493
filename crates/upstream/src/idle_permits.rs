//! Limit of a pool's idle connections, as permits: a fixed number for each worker, usable by all.
//!
//! ```text
//!   free ◄──► held by a worker, for the connections that it keeps warm ──► of a parked connection ──► free
//! ```
//!
//! Workers can use the permits that others do not need, because the kernel spreads clients unevenly and all of them may
//! have an idle connection at the same moment. A worker always gets its own number. If others hold all permits at that
//! time, the pool is overdrawn until a worker with more than its number gives one up: at the next connection that it
//! keeps or would let cool down.
//!
//! Without that, 6,406 of the 6,448 new connections of `bench upstreams` were those that a busier worker had closed at
//! its own limit; now there are 1.4 in 1,000 requests, in nginx 4.1 (`bench/results/upstreams.md`).
//!
//! A worker holds permits over many requests, so a request touches no shared memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};

/// Permits of one pool. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct IdlePermits {
    /// Negative if the pool is overdrawn.
    free: Arc<AtomicIsize>,
    per_worker: usize,
}

/// A permit, freed on drop.
#[derive(Debug)]
pub(super) struct IdlePermit(IdlePermits);

impl IdlePermits {
    pub fn new(per_worker: usize, workers: usize) -> IdlePermits {
        let all = isize::try_from(per_worker.saturating_mul(workers)).unwrap_or(isize::MAX);
        IdlePermits { free: Arc::new(AtomicIsize::new(all)), per_worker }
    }

    /// `true` if a permit is free.
    pub fn are_free(&self) -> bool {
        self.free.load(Ordering::Relaxed) > 0
    }

    /// `true` if more permits are taken than exist.
    pub fn are_overdrawn(&self) -> bool {
        self.free.load(Ordering::Relaxed) < 0
    }

    /// Takes a permit for a worker that holds `held`.
    pub fn take(&self, held: usize) -> bool {
        if held < self.per_worker {
            self.free.fetch_sub(1, Ordering::Relaxed);
            return true;
        }
        let one_less = |free: isize| (free > 0).then_some(free - 1);
        self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok()
    }

    /// `true` if a worker that holds `held` has to give one up.
    pub fn are_owed(&self, held: usize) -> bool {
        held > self.per_worker && self.are_overdrawn()
    }

    /// Returns permits.
    pub fn give_back(&self, count: usize) {
        self.free.fetch_add(count as isize, Ordering::Relaxed);
    }

    /// Turns a permit that a worker holds into an independent one.
    pub fn one_held(&self) -> IdlePermit {
        IdlePermit(self.clone())
    }
}

impl Drop for IdlePermit {
    fn drop(&mut self) {
        self.0.give_back(1);
    }
}
