//! Counters of workers: connections and requests, for `stub_status` and metrics.
//!
//! Each worker has its own copy ([`Tally`]), so that a request costs a plain store; readers add up all copies. The next
//! worker takes over the counters of one that has ended, so totals never decrease.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

use gale_base::tally::{Own, Tally, own_number};
use parking_lot::Mutex;

/// In reading order: a connection that ends while the counters are read is not counted as closed before it was
/// accepted.
#[derive(Clone, Copy)]
enum Counter {
    Closed,
    Accepted,
    Requests,
    Reading,
    Writing,
}

const COUNTERS: usize = 5;

/// Counters of all workers of the process.
static ALL: Tally<COUNTERS> = Tally::new();

/// Values at the last reset, subtracted by [`totals_since_reset`].
static CONNECTIONS_BEFORE: AtomicU64 = AtomicU64::new(0);
static REQUESTS_BEFORE: AtomicU64 = AtomicU64::new(0);

/// Running workers: their numbers, and those of their threads in the tally.
static WORKERS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// Totals of all workers of the process, or of one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Connections accepted since the process started.
    pub accepted: u64,
    /// Open connections.
    pub active: u64,
    /// Requests since the process started.
    pub requests: u64,
    /// Connections on which a request head is being read.
    pub reading: u64,
    /// Connections whose request is being answered.
    pub writing: u64,
}

impl Totals {
    fn of(counters: &[u64; COUNTERS]) -> Totals {
        let read = |counter: Counter| counters[counter as usize];
        let accepted = read(Counter::Accepted);
        Totals {
            accepted,
            active: accepted.saturating_sub(read(Counter::Closed)),
            requests: read(Counter::Requests),
            reading: read(Counter::Reading),
            writing: read(Counter::Writing),
        }
    }

    /// Connections that wait for a request.
    pub fn waiting(&self) -> u64 {
        self.active.saturating_sub(self.reading + self.writing)
    }
}

/// A worker's access to its counters, bound to its thread.
#[derive(Debug)]
pub struct OwnCounters {
    counters: Own<'static, COUNTERS>,
    thread: usize,
    _not_send: PhantomData<*const ()>,
}

impl OwnCounters {
    /// Takes counters for the worker of this number, on its thread.
    pub fn take(worker: usize) -> OwnCounters {
        let thread = own_number();
        WORKERS.lock().push((worker, thread));
        OwnCounters { counters: ALL.own(), thread, _not_send: PhantomData }
    }

    #[inline]
    fn add(&self, counter: Counter, number: u64) {
        self.counters.add(counter as usize, number);
    }

    /// Counts an accepted connection.
    pub fn count_accepted(&self) {
        self.add(Counter::Accepted, 1);
    }

    /// Counts a closed connection.
    pub fn count_closed(&self) {
        self.add(Counter::Closed, 1);
    }

    /// Notes that a part of a request head has been received.
    pub fn begin_reading(&self) {
        self.add(Counter::Reading, 1);
    }

    /// Notes that the head is complete, or was given up.
    pub fn end_reading(&self) {
        self.add(Counter::Reading, u64::MAX);
    }

    /// Counts a request whose answer begins.
    pub fn begin_request(&self) {
        self.add(Counter::Requests, 1);
        self.add(Counter::Writing, 1);
    }

    /// Notes the end of a request.
    pub fn end_request(&self) {
        self.add(Counter::Writing, u64::MAX);
    }
}

impl Drop for OwnCounters {
    fn drop(&mut self) {
        let mut workers = WORKERS.lock();
        if let Some(place) = workers.iter().position(|&(_, thread)| thread == self.thread) {
            workers.swap_remove(place);
        }
    }
}

/// Totals of all workers, each a moment old.
pub fn totals() -> Totals {
    Totals::of(&ALL.sums())
}

/// Totals without the connections and requests before their resets.
pub fn totals_since_reset() -> Totals {
    let all = totals();
    Totals {
        accepted: all.accepted.saturating_sub(CONNECTIONS_BEFORE.load(Ordering::Relaxed)),
        requests: all.requests.saturating_sub(REQUESTS_BEFORE.load(Ordering::Relaxed)),
        ..all
    }
}

/// Resets accepted connections in [`totals_since_reset`].
pub fn reset_connections() {
    CONNECTIONS_BEFORE.store(totals().accepted, Ordering::Relaxed);
}

/// Resets requests in [`totals_since_reset`].
pub fn reset_requests() {
    REQUESTS_BEFORE.store(totals().requests, Ordering::Relaxed);
}

/// Totals of each running worker, by its number, including those of its predecessors.
pub fn totals_by_worker() -> Vec<(usize, Totals)> {
    let mut workers = WORKERS.lock().clone();
    workers.sort_unstable();
    workers.into_iter().map(|(worker, thread)| (worker, Totals::of(&ALL.counted_by(thread)))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_outlive_the_worker_that_counted_them() {
        let before = totals();
        let own = OwnCounters::take(3);
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
        let of_worker = |(worker, _): &(usize, Totals)| *worker == 3;
        assert!(totals_by_worker().iter().any(of_worker));
        drop(own);
        assert!(!totals_by_worker().iter().any(of_worker));
        assert_eq!(totals().accepted - before.accepted, 3);
        assert_eq!(totals().writing, before.writing);
    }
}
