//! Whether calls on a loop that should not wait did.
//!
//! A call that takes long has not always waited: on a busy machine the thread may have been held up. Only the kernel's count
//! of a thread's voluntary switches tells the two apart, and asking for it costs as much as a small read; so the first long
//! call makes its thread suspicious, and switches are counted from then on, for a while. A call that took so long that
//! every client has noticed is taken to have waited in any case.

use std::cell::Cell;
use std::time::Duration;

use crate::clock::{Moment, system_now};

/// A call on the loop that takes longer has waited, or its thread was held up.
const LONG_CALL: Duration = Duration::from_millis(5);

/// One that takes longer counts as having waited.
const WAITED_CALL: Duration = Duration::from_millis(100);

/// How long a thread is suspicious after a long call.
const SUSPICION_TIME: Duration = Duration::from_secs(10);

/// How a call went that should not wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    Quick,
    /// It took long, for whatever reason.
    Long,
    /// It has waited.
    Waited,
}

thread_local! {
    static SUSPICIOUS_UNTIL: Cell<Moment> = const { Cell::new(Moment::from_nanos(0)) };
}

/// Calls something that should not wait, and judges whether it did.
#[inline]
pub(crate) fn watch<T>(call: impl FnOnce() -> T) -> (T, Verdict) {
    let begun = system_now();
    let before = (begun < SUSPICIOUS_UNTIL.get()).then(voluntary_switches);
    let result = call();
    let ended = system_now();
    if ended <= begun + LONG_CALL {
        return (result, Verdict::Quick);
    }
    SUSPICIOUS_UNTIL.set(ended + SUSPICION_TIME);
    let has_waited = ended > begun + WAITED_CALL || before.is_some_and(|before| voluntary_switches() > before);
    (result, if has_waited { Verdict::Waited } else { Verdict::Long })
}

/// How often this thread has waited for something.
fn voluntary_switches() -> i64 {
    // SAFETY: zeros are a valid `rusage`, and the call fills in the one that it is given.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        usage.ru_nvcsw as i64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_waits_is_told_from_one_that_computes_once_there_is_suspicion() {
        let wait = || watch(|| std::thread::sleep(2 * LONG_CALL)).1;
        let compute = || {
            let begun = system_now();
            watch(|| while system_now() - begun < 2 * LONG_CALL {}).1
        };
        std::thread::spawn(move || {
            assert_eq!((compute(), compute()), (Verdict::Long, Verdict::Long));
            assert_eq!(wait(), Verdict::Waited);
        })
        .join()
        .unwrap();
        std::thread::spawn(move || assert_eq!((wait(), wait()), (Verdict::Long, Verdict::Waited))).join().unwrap();
    }
}
