//! Counters of a cache.

use std::sync::atomic::AtomicU64;

use gale_base::tally::Tally;

/// Counters of a cache since the process began.
#[derive(Default, Debug)]
pub struct Counters {
    /// Requests by cache status, and the responses stored for them.
    pub uses: Uses,
    /// Requests that read a response while another one fetched it.
    pub collapsed: AtomicU64,
    /// Entries evicted to make room.
    pub evicted: AtomicU64,
    /// Disk operations that failed.
    pub disk_errors: AtomicU64,
    /// Requests that stopped waiting for the disk.
    pub disk_timeouts: AtomicU64,
    /// Files that were damaged.
    pub damaged: AtomicU64,
    /// Files that the loader has found.
    pub loaded: AtomicU64,
}

/// Number of cache statuses, which are nginx's.
pub const WAYS: usize = 7;

/// Four counters for each status: responses, their bytes, responses stored, their bytes.
#[derive(Debug, Default)]
pub struct Uses(Tally<{ 4 * WAYS }>);

/// Figures of one status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UseFigures {
    /// Responses to clients.
    pub responses: u64,
    /// Bytes of their bodies.
    pub bytes: u64,
    /// Responses that were stored.
    pub written: u64,
    /// Bytes of their files.
    pub bytes_written: u64,
}

impl Uses {
    /// Counts a response to a client.
    pub fn count(&self, way: usize, bytes: u64) {
        let own = self.0.own();
        own.add(4 * way + 1, bytes);
        own.add(4 * way, 1);
    }

    /// Counts a stored response.
    pub fn count_written(&self, way: usize, bytes: u64) {
        let own = self.0.own();
        own.add(4 * way + 3, bytes);
        own.add(4 * way + 2, 1);
    }

    /// The figures of all statuses.
    pub fn figures(&self) -> [UseFigures; WAYS] {
        let counters = self.0.since_reset();
        std::array::from_fn(|way| UseFigures {
            responses: counters[4 * way],
            bytes: counters[4 * way + 1],
            written: counters[4 * way + 2],
            bytes_written: counters[4 * way + 3],
        })
    }

    /// Resets all figures.
    pub fn reset(&self) {
        self.0.reset();
    }
}
