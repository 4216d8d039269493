//! Operations that the kernel had no memory to take, or to tell the end of: told to one reporter (the engine's log), a
//! line a minute at most.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use crate::environment::Environment;

/// Shortages are told of so often at most, by all loops together.
const TELL_EVERY_NANOS: u64 = 60_000_000_000;

/// The kernel had no memory for what a loop's io_uring was to do, or to say. Each of the operations has failed with
/// ENOMEM for whoever wanted it: connections end, and listening sockets are accepted from again later.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingShortage {
    /// The loop's [`crate::worker`].
    pub worker: usize,
    /// Operations, of all loops, that were refused or lost since the last shortage that was told of.
    pub refused: u64,
    /// The loop's [`crate::RingCounters::reads_kept`], where completions were lost.
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

/// What nobody was told of yet.
static UNTOLD: AtomicU64 = AtomicU64::new(0);

/// From when on, by the monotonic clock, the next may be told of.
static TELL_FROM: AtomicU64 = AtomicU64::new(0);

/// Names the function that is told of shortages. Called on the thread of a loop, once a minute at most.
pub fn set_shortage_reporter(reporter: impl Fn(&RingShortage) + Send + Sync + 'static) {
    let displaced = REPORTER.write().replace(Arc::new(reporter));
    drop(displaced);
}

/// Notes that the kernel has refused, or lost, so many operations of the current loop, which keeps the memory of so
/// many reads.
pub(super) fn note(refused: u64, reads_kept: u64) {
    UNTOLD.fetch_add(refused, Ordering::Relaxed);
    // While a loop is set up, or ends, there is nobody to tell it for: the next one does.
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
    // Called without the lock, which it may want itself.
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
