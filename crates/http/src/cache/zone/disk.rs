//! How the disk of a cache is: whether requests should wait for it at all.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use gale_runtime::Moment;

/// How often a disk that does not answer is tried.
const TRY_EVERY: Duration = Duration::from_secs(1);

/// How a cache's disk is: whether requests should wait for it at all.
#[derive(Default)]
pub struct Disk {
    /// Since when nothing has come back from it, as nanoseconds; 0 if it is well.
    silent_since: AtomicU64,
    next_try: AtomicU64,
}

impl Disk {
    /// Whether a request may wait for it. While it does not answer, one in a second tries.
    pub fn may_try(&self, now: Moment) -> bool {
        if self.silent_since.load(Relaxed) == 0 {
            return true;
        }
        let (now, next) = (now.as_nanos(), self.next_try.load(Relaxed));
        let then = now + TRY_EVERY.as_nanos() as u64;
        now >= next && self.next_try.compare_exchange(next, then, Relaxed, Relaxed).is_ok()
    }

    /// It has answered.
    pub fn note_alive(&self) {
        if self.silent_since.load(Relaxed) != 0 {
            self.silent_since.store(0, Relaxed);
        }
    }

    /// A request has waited as long as it may. True if that is news.
    pub fn note_silent(&self, now: Moment) -> bool {
        let now = now.as_nanos().max(1);
        self.next_try.store(now + TRY_EVERY.as_nanos() as u64, Relaxed);
        self.silent_since.compare_exchange(0, now, Relaxed, Relaxed).is_ok()
    }

    /// Whether it answers.
    pub fn is_well(&self) -> bool {
        self.silent_since.load(Relaxed) == 0
    }
}
