//! What the kernel counts of a thread: how long it ran, and how often it was switched away from, and why.

use std::time::Duration;

/// The figures of one thread at one moment (getrusage(2)).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct ThreadUsage {
    /// Processor time that it has had.
    pub run: Duration,
    /// How often it has waited for something.
    pub voluntary_switches: u64,
    /// How often it could have gone on and was not let.
    pub involuntary_switches: u64,
}

impl ThreadUsage {
    /// Of the calling thread. Takes less than a microsecond.
    pub fn now() -> ThreadUsage {
        // SAFETY: zeros are a valid `rusage`, and the call fills in the one that it is given.
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

/// Makes a call, and says whether the calling thread has waited meanwhile: for a disk, if that is all that the call can
/// wait for. One that found everything in memory has not.
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
