//! Which processors a thread runs on.
//!
//! Event loops may be told to stay on some. A thread starts on the processors of the thread that starts it, so every
//! other thread that a loop may start goes back to those of the process, which are its main thread's: that is no event
//! loop.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::getpid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// How many processors there may be: those that the kernel's calls can name.
pub const PROCESSORS_MAX: usize = CpuSet::MAX_CPU;

/// Some thread has been told where to stay.
static IS_USED: AtomicBool = AtomicBool::new(false);

/// The processors that the process may use, by number, in ascending order.
///
/// # Errors
/// Those of `sched_getaffinity`.
pub fn processors_of_process() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(Some(getpid()))?;
    Ok((0..PROCESSORS_MAX).filter(|&processor| set.is_set(processor)).collect())
}

/// The calling thread, an event loop's, stays on these processors.
///
/// # Errors
/// Those of `sched_setaffinity`: the process may use none of them. The thread stays where it was then.
///
/// # Panics
/// If one of them is not below [`PROCESSORS_MAX`].
pub fn stay_on_processors(processors: &[usize]) -> io::Result<()> {
    IS_USED.store(true, Ordering::Relaxed);
    let mut set = CpuSet::new();
    processors.iter().for_each(|&processor| set.set(processor));
    Ok(sched_setaffinity(None, &set)?)
}

/// The calling thread runs wherever the process may. To be called first on a thread that an event loop may have
/// started.
pub fn leave_processors() {
    if IS_USED.load(Ordering::Relaxed)
        && let Ok(set) = sched_getaffinity(Some(getpid()))
    {
        // It runs, only not everywhere.
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
