//! Reports operations that failed because the kernel had no memory to accept them or to keep their completions, to one
//! reporter (the engine's log), at most once a minute.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use crate::environment::Environment;

/// Minimum time between two reports of all loops.
const TELL_EVERY_NANOS: u64 = 60_000_000_000;

/// The kernel had no memory for operations or completions of a loop's io_uring. Each operation has failed with ENOMEM:
/// connections end, and listening sockets are accepted from again later.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingShortage {
    /// The loop's [`crate::worker`].
    pub worker: usize,
    /// Operations of all loops that were refused or lost since the last report.
    pub refused: u64,
    /// The loop's [`crate::RingCounters::reads_kept`], if completions were lost.
    pub reads_kept: u64,
}

impl fmt::Display for RingShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RingShortage { worker, refused, reads_kept } = self;
        write!(f, "io_uring of worker {worker}: the kernel has no memory, {refused} operations failed")?;
        if *reads_kept > 0 {
            write!(f, ", the results of {reads_kept} file reads are unknown and their buffers are kept")?;
        }
        Ok(())
    }
}

type Reporter = Arc<dyn Fn(&RingShortage) + Send + Sync>;

static REPORTER: RwLock<Option<Reporter>> = RwLock::new(None);

/// Failed operations that were not reported yet.
static UNTOLD: AtomicU64 = AtomicU64::new(0);

/// Earliest time of the next report, by the monotonic clock.
static TELL_FROM: AtomicU64 = AtomicU64::new(0);

/// Sets the function that reports shortages. It is called on the thread of a loop, at most once a minute.
pub fn set_shortage_reporter(reporter: impl Fn(&RingShortage) + Send + Sync + 'static) {
    let displaced = REPORTER.write().replace(Arc::new(reporter));
    drop(displaced);
}

/// Counts operations of the current loop that the kernel has refused or lost. `reads_kept` is the number of reads whose
/// memory stays.
pub(super) fn note(refused: u64, reads_kept: u64) {
    UNTOLD.fetch_add(refused, Ordering::Relaxed);
    // A loop that starts or ends has no environment: the next report includes its operations.
    let Some((worker, now)) =
        Environment::try_with(|environment| (environment.worker, environment.clock.now().as_nanos()))
    else {
        return;
    };
    let tell_from = TELL_FROM.load(Ordering::Relaxed);
    let next = now.saturating_add(TELL_EVERY_NANOS);
    // A virtual clock may be far ahead of the next loop's.
    let is_due = now >= tell_from || tell_from > next;
    if !is_due || TELL_FROM.compare_exchange(tell_from, next, Ordering::Relaxed, Ordering::Relaxed).is_err() {
        return;
    }
    // Called without the lock, which the reporter may take itself.
    let Some(reporter) = REPORTER.read().clone() else { return };
    reporter(&RingShortage { worker, refused: UNTOLD.swap(0, Ordering::Relaxed), reads_kept });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_that_keep_their_buffers_are_said() {
        let shortage = RingShortage { worker: 1, refused: 7, reads_kept: 0 };
        assert_eq!(shortage.to_string(), "io_uring of worker 1: the kernel has no memory, 7 operations failed");
        let text = RingShortage { reads_kept: 3, ..shortage }.to_string();
        assert!(text.ends_with("failed, the results of 3 file reads are unknown and their buffers are kept"), "{text}");
    }
}
