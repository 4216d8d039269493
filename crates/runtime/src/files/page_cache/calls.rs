//! File system calls on a loop, which should not wait, and whether they did.
//!
//! Timing each call would cost as much as a small call itself. So a call only marks its device. If the turn becomes a
//! stall in which the thread slept (`stall/`), the devices marked in it count as busy for a while.

use std::cell::Cell;

use crate::stall::{StallKind, Turns};

#[derive(Default)]
pub(crate) struct LoopCalls {
    /// The devices of this turn's calls, a bit each.
    called: Cell<u64>,
}

impl LoopCalls {
    /// Marks a device as called in this turn.
    #[inline]
    pub(super) fn note(&self, device: usize) {
        self.called.set(self.called.get() | 1 << device);
    }

    /// Ends the turn that began at this time. Returns the devices, a bit each, whose calls may have waited.
    #[inline]
    pub(super) fn end_turn(&self, turns: &Turns, began: u64) -> u64 {
        let called = self.called.replace(0);
        let has_waited = || turns.ended_stall(began).is_some_and(|stall| stall.guess == StallKind::Blocked);
        if called != 0 && has_waited() { called } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::stall::STALL_THRESHOLD;
    use crate::stall::usage::ThreadUsage;

    fn compute() {
        let begun = ThreadUsage::now().run;
        while ThreadUsage::now().run - begun < 2 * STALL_THRESHOLD {}
    }

    /// The devices made busy by a turn of this length with calls for the fourth one.
    fn devices(turn: Duration, act: impl FnOnce()) -> u64 {
        let (calls, turns, began) = (LoopCalls::default(), Turns::new(), 1_000_000_000);
        turns.mark(began, ThreadUsage::now());
        turns.begin(began);
        calls.note(3);
        act();
        turns.end(began, began + turn.as_nanos() as u64);
        let devices = calls.end_turn(&turns, began);
        assert_eq!(calls.end_turn(&turns, began), 0, "each turn has its own calls");
        devices
    }

    #[test]
    fn turn_that_slept_makes_the_devices_of_its_calls_busy() {
        std::thread::spawn(|| {
            let sleep = || std::thread::sleep(Duration::from_millis(1));
            // A thread that was also preempted is not judged blocked.
            assert!((0..1000).any(|_| devices(2 * STALL_THRESHOLD, sleep) == 1 << 3));
            assert_eq!(devices(STALL_THRESHOLD / 2, sleep), 0, "a short turn");
            assert_eq!(devices(2 * STALL_THRESHOLD, compute), 0, "a turn that computed");
        })
        .join()
        .expect("no assertion fails");
    }
}
