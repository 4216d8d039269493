//! Processor affinity of threads.
//!
//! Event loops may be bound to processors. A new thread inherits the affinity of the thread that starts it, so every
//! other thread that a loop may start resets it to that of the process, which is the main thread's: that is no event
//! loop.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::getpid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Upper bound of processor numbers: the size of the kernel's set.
pub const PROCESSORS_MAX: usize = CpuSet::MAX_CPU;

/// True if some thread was bound.
static IS_USED: AtomicBool = AtomicBool::new(false);

/// Numbers of the processors that the process may use, ascending.
///
/// # Errors
/// Those of `sched_getaffinity`.
pub fn processors_of_process() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(Some(getpid()))?;
    Ok((0..PROCESSORS_MAX).filter(|&processor| set.is_set(processor)).collect())
}

/// Binds the calling thread, an event loop's, to these processors.
///
/// # Errors
/// Those of `sched_setaffinity`: the process may use none of them. The affinity is unchanged then.
///
/// # Panics
/// If one of them is not below [`PROCESSORS_MAX`].
pub fn stay_on_processors(processors: &[usize]) -> io::Result<()> {
    IS_USED.store(true, Ordering::Relaxed);
    let mut set = CpuSet::new();
    processors.iter().for_each(|&processor| set.set(processor));
    Ok(sched_setaffinity(None, &set)?)
}

/// Resets the affinity of the calling thread to that of the process. Every thread that an event loop may have started
/// calls this first.
pub fn leave_processors() {
    if IS_USED.load(Ordering::Relaxed)
        && let Ok(set) = sched_getaffinity(Some(getpid()))
    {
        // After a failure the thread still runs, but not on all processors.
        let _ = sched_setaffinity(None, &set);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn processors_of_thread() -> Vec<usize> {
        let set = sched_getaffinity(None).expect("this thread");
        (0..PROCESSORS_MAX).filter(|&processor| set.is_set(processor)).collect()
    }

    #[test]
    fn thread_stays_on_its_processors_until_it_leaves_them() {
        let all = processors_of_process().expect("this process");
        stay_on_processors(&all[..1]).expect("one that it may use");
        assert_eq!(processors_of_thread(), all[..1]);
        let inherited = std::thread::spawn(|| {
            let before = processors_of_thread();
            leave_processors();
            (before, processors_of_thread())
        });
        assert_eq!(inherited.join().expect("it ends"), (all[..1].to_vec(), all.clone()));
        assert!(stay_on_processors(&[]).is_err());
        leave_processors();
        assert_eq!(processors_of_thread(), all);
    }
}
