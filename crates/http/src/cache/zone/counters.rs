//! What a cache has done, counted.

use std::sync::atomic::AtomicU64;

use gale_base::tally::Tally;

/// What a cache has done, since the process began.
#[derive(Default, Debug)]
pub struct Counters {
    /// Requests by what the cache has done for them, and what was stored because of them.
    pub uses: Uses,
    /// Read while somebody else fetched it.
    pub collapsed: AtomicU64,
    /// Taken out to make room.
    pub evicted: AtomicU64,
    /// What the disk could not do.
    pub disk_errors: AtomicU64,
    /// How often a request did not wait any longer for the disk.
    pub disk_timeouts: AtomicU64,
    /// Files that were not what had been written.
    pub damaged: AtomicU64,
    /// Files that the loader has found.
    pub loaded: AtomicU64,
}

/// In how many ways a request may use a cache: as many as nginx has words for.
pub const WAYS: usize = 7;

/// Uses of a cache, by their way: how many, and their bytes; then what was stored because of them, the same.
#[derive(Debug, Default)]
pub struct Uses(Tally<{ 4 * WAYS }>);

/// How often a cache was used in one way.
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
    /// A client has its response.
    pub fn count(&self, way: usize, bytes: u64) {
        let own = self.0.own();
        own.add(4 * way + 1, bytes);
        own.add(4 * way, 1);
    }

    /// A response was stored.
    pub fn count_written(&self, way: usize, bytes: u64) {
        let own = self.0.own();
        own.add(4 * way + 3, bytes);
        own.add(4 * way + 2, 1);
    }

    /// The figures by way.
    pub fn figures(&self) -> [UseFigures; WAYS] {
        let counters = self.0.since_reset();
        std::array::from_fn(|way| UseFigures {
            responses: counters[4 * way],
            bytes: counters[4 * way + 1],
            written: counters[4 * way + 2],
            bytes_written: counters[4 * way + 3],
        })
    }

    /// What was counted so far counts no more.
    pub fn reset(&self) {
        self.0.reset();
    }
}
