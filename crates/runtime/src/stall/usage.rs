//! Resource usage of a thread: its running time, and the number and kinds of its context switches.

use std::time::Duration;

/// Usage of one thread at one time (getrusage(2)).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct ThreadUsage {
    /// Processor time used.
    pub run: Duration,
    /// Number of waits.
    pub voluntary_switches: u64,
    /// Number of preemptions.
    pub involuntary_switches: u64,
}

impl ThreadUsage {
    /// Usage of the calling thread. Takes less than a microsecond.
    pub fn now() -> ThreadUsage {
        // SAFETY: an all-zero `rusage` is valid, and the call fills in the given one.
        let usage = unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
            usage
        };
        let time = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
        ThreadUsage {
            run: time(usage.ru_utime) + time(usage.ru_stime),
            voluntary_switches: usage.ru_nvcsw as u64,
            involuntary_switches: usage.ru_nivcsw as u64,
        }
    }
}

/// Calls `call`, and returns whether the thread has waited in it: for a disk, if the call can wait for nothing else. A
/// call that found everything in memory has not.
pub fn watch_waiting<T>(call: impl FnOnce() -> T) -> (T, bool) {
    let before = ThreadUsage::now().voluntary_switches;
    let result = call();
    (result, ThreadUsage::now().voluntary_switches != before)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_waits_is_told_from_one_that_computes() {
        assert_eq!(watch_waiting(|| std::thread::sleep(Duration::from_millis(1))), ((), true));
        assert_eq!(watch_waiting(|| 6 * 7), (42, false));
    }
}
