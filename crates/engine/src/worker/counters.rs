//! What the workers count: connections and requests, for `stub_status` and whoever else asks.
//!
//! Each worker writes its own counters and nobody else's, so that a request costs a plain store. Whoever asks adds up
//! those of all workers. The counters of a worker that has ended go on with the next one: totals never go back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// One worker's counters.
#[derive(Debug, Default)]
#[repr(align(64))] // A cache line of its own: workers do not slow each other down.
pub struct Counters {
    accepted: AtomicU64,
    closed: AtomicU64,
    requests: AtomicU64,
    reading: AtomicU64,
    writing: AtomicU64,
}

/// The sum over all workers of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Connections accepted since the process started.
    pub accepted: u64,
    /// Connections that are open.
    pub active: u64,
    /// Requests since the process started.
    pub requests: u64,
    /// Connections of which the head of a request is being read.
    pub reading: u64,
    /// Connections with a request that is being answered.
    pub writing: u64,
}

impl Totals {
    /// Connections that wait for a request.
    pub fn waiting(&self) -> u64 {
        self.active.saturating_sub(self.reading + self.writing)
    }
}

/// All counters of the process. The second of each pair says whether a worker has them.
static ALL: Mutex<Vec<(Arc<Counters>, bool)>> = Mutex::new(Vec::new());

/// A worker's hold on its counters.
#[derive(Debug)]
pub struct OwnCounters(Arc<Counters>);

impl OwnCounters {
    /// Counters for a worker: those of one that has ended, or new ones.
    pub fn take() -> OwnCounters {
        let mut all = ALL.lock();
        if let Some((counters, is_taken)) = all.iter_mut().find(|(_, is_taken)| !is_taken) {
            *is_taken = true;
            return OwnCounters(Arc::clone(counters));
        }
        let counters = Arc::new(Counters::default());
        all.push((Arc::clone(&counters), true));
        OwnCounters(counters)
    }

    /// A connection was accepted.
    pub fn count_accepted(&self) {
        add(&self.0.accepted, 1);
    }

    /// A connection has ended.
    pub fn count_closed(&self) {
        add(&self.0.closed, 1);
    }

    /// A part of a request's head has come.
    pub fn begin_reading(&self) {
        add(&self.0.reading, 1);
    }

    /// The rest has come, too, or never will.
    pub fn end_reading(&self) {
        add(&self.0.reading, u64::MAX);
    }

    /// A request is being answered from now on.
    pub fn begin_request(&self) {
        add(&self.0.requests, 1);
        add(&self.0.writing, 1);
    }

    /// A request has ended.
    pub fn end_request(&self) {
        add(&self.0.writing, u64::MAX);
    }
}

/// Only the owner writes, so no operation need be atomic as a whole.
fn add(counter: &AtomicU64, number: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(number), Ordering::Relaxed);
}

impl Drop for OwnCounters {
    fn drop(&mut self) {
        let mut all = ALL.lock();
        if let Some((_, is_taken)) = all.iter_mut().find(|(counters, _)| Arc::ptr_eq(counters, &self.0)) {
            *is_taken = false;
        }
    }
}

/// The sum over all workers, each a moment old.
pub fn totals() -> Totals {
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    ALL.lock().iter().fold(Totals::default(), |sum, (counters, _)| {
        // In this order, so that a connection that ends meanwhile is not counted as closed before it was accepted.
        let closed = read(&counters.closed);
        let accepted = read(&counters.accepted);
        Totals {
            accepted: sum.accepted + accepted,
            active: sum.active + accepted.saturating_sub(closed),
            requests: sum.requests + read(&counters.requests),
            reading: sum.reading + read(&counters.reading),
            writing: sum.writing + read(&counters.writing),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_outlive_the_worker_that_counted_them() {
        let before = totals();
        let own = OwnCounters::take();
        (0..3).for_each(|_| own.count_accepted());
        own.count_closed();
        own.begin_request();
        own.begin_reading();
        let found = totals();
        assert_eq!((found.accepted - before.accepted, found.active - before.active), (3, 2));
        assert_eq!((found.requests - before.requests, found.writing - before.writing), (1, 1));
        assert_eq!(found.reading - before.reading, 1);
        own.end_reading();
        own.end_request();
        drop(own);
        assert_eq!(totals().accepted - before.accepted, 3);
        assert_eq!(totals().writing, before.writing);
    }
}
