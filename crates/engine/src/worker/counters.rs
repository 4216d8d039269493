//! What the workers count: connections and requests, for `stub_status` and whoever else asks.
//!
//! Each worker has its own copy of the counters ([`Tally`]), so that a request costs a plain store. Whoever asks adds
//! up those of all workers. The counters of a worker that has ended go on with the next one: totals never go back.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

use gale_base::tally::{Own, Tally, own_number};
use parking_lot::Mutex;

/// In this order, so that a connection that ends while the counters are read is not counted as closed before it was
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

/// The counters of all workers of the process.
static ALL: Tally<COUNTERS> = Tally::new();

/// What of these is not told to those who ask since when things are counted ([`totals_since_reset`]).
static CONNECTIONS_BEFORE: AtomicU64 = AtomicU64::new(0);
static REQUESTS_BEFORE: AtomicU64 = AtomicU64::new(0);

/// The workers that there are: their numbers, and those of their threads in the tally.
static WORKERS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// The sum over all workers of the process, or what one of them has counted.
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

/// A worker's hold on its counters. It stays on its worker's thread.
#[derive(Debug)]
pub struct OwnCounters {
    counters: Own<'static, COUNTERS>,
    thread: usize,
    _not_send: PhantomData<*const ()>,
}

impl OwnCounters {
    /// Counters for the worker of this number, on its thread.
    pub fn take(worker: usize) -> OwnCounters {
        let thread = own_number();
        WORKERS.lock().push((worker, thread));
        OwnCounters { counters: ALL.own(), thread, _not_send: PhantomData }
    }

    #[inline]
    fn add(&self, counter: Counter, number: u64) {
        self.counters.add(counter as usize, number);
    }

    /// A connection was accepted.
    pub fn count_accepted(&self) {
        self.add(Counter::Accepted, 1);
    }

    /// A connection has ended.
    pub fn count_closed(&self) {
        self.add(Counter::Closed, 1);
    }

    /// A part of a request's head has come.
    pub fn begin_reading(&self) {
        self.add(Counter::Reading, 1);
    }

    /// The rest has come, too, or never will.
    pub fn end_reading(&self) {
        self.add(Counter::Reading, u64::MAX);
    }

    /// A request is being answered from now on.
    pub fn begin_request(&self) {
        self.add(Counter::Requests, 1);
        self.add(Counter::Writing, 1);
    }

    /// A request has ended.
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

/// The sum over all workers, each a moment old.
pub fn totals() -> Totals {
    Totals::of(&ALL.sums())
}

/// The same, without the connections and the requests that were accepted before these were reset.
pub fn totals_since_reset() -> Totals {
    let all = totals();
    Totals {
        accepted: all.accepted.saturating_sub(CONNECTIONS_BEFORE.load(Ordering::Relaxed)),
        requests: all.requests.saturating_sub(REQUESTS_BEFORE.load(Ordering::Relaxed)),
        ..all
    }
}

/// What was accepted so far counts no more in [`totals_since_reset`].
pub fn reset_connections() {
    CONNECTIONS_BEFORE.store(totals().accepted, Ordering::Relaxed);
}

/// The requests so far count no more in [`totals_since_reset`].
pub fn reset_requests() {
    REQUESTS_BEFORE.store(totals().requests, Ordering::Relaxed);
}

/// What each worker has counted that runs now, by its number: with what was counted by those whose place it has taken.
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
