//! Calls on a loop, which should not wait, and whether they did.
//!
//! Timing each call would cost as much as a small call itself. So a call only marks what it might wait for. If the turn
//! becomes a stall in which the thread slept, the caller is told the marks of the turn when it ends.

use std::cell::Cell;

use super::{StallKind, Turns};

/// Number of marks.
pub const MARKS: usize = 64;

/// Function that is told the marks of a turn whose calls may have waited, a bit each. Runs on the loop.
pub type Waited = fn(u64);

#[derive(Default)]
pub(crate) struct LoopCalls {
    /// The marks of this turn's calls, a bit each.
    called: Cell<u64>,
    waited: Cell<Option<Waited>>,
}

impl LoopCalls {
    /// Notes a call in this turn with this mark, below [`MARKS`]. All callers have the same function.
    #[inline]
    pub fn note(&self, mark: usize, waited: Waited) {
        self.called.set(self.called.get() | 1 << mark);
        self.waited.set(Some(waited));
    }

    /// Ends the turn that began at this time.
    #[inline]
    pub fn end_turn(&self, turns: &Turns, began: u64) {
        let called = self.called.replace(0);
        if called != 0 && turns.ended_stall(began).is_some_and(|stall| stall.guess == StallKind::Blocked) {
            self.waited.get().into_iter().for_each(|waited| waited(called));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::STALL_THRESHOLD;
    use super::super::usage::ThreadUsage;
    use super::*;

    thread_local! {
        static TOLD: Cell<u64> = const { Cell::new(0) };
    }

    fn compute() {
        let begun = ThreadUsage::now().run;
        while ThreadUsage::now().run - begun < 2 * STALL_THRESHOLD {}
    }

    /// The marks told by a turn of this length with calls of the fourth one.
    fn marks(turn: Duration, act: impl FnOnce()) -> u64 {
        let (calls, turns, began) = (LoopCalls::default(), Turns::new(), 1_000_000_000);
        turns.mark(began, ThreadUsage::now());
        turns.begin(began);
        calls.note(3, |marks| TOLD.set(marks));
        act();
        turns.end(began, began + turn.as_nanos() as u64);
        let told = || {
            calls.end_turn(&turns, began);
            TOLD.replace(0)
        };
        let marks = told();
        assert_eq!(told(), 0, "each turn has its own calls");
        marks
    }

    #[test]
    fn turn_that_slept_tells_the_marks_of_its_calls() {
        std::thread::spawn(|| {
            let sleep = || std::thread::sleep(Duration::from_millis(1));
            // A thread that was also preempted is not judged blocked.
            assert!((0..1000).any(|_| marks(2 * STALL_THRESHOLD, sleep) == 1 << 3));
            assert_eq!(marks(STALL_THRESHOLD / 2, sleep), 0, "a short turn");
            assert_eq!(marks(2 * STALL_THRESHOLD, compute), 0, "a turn that computed");
        })
        .join()
        .expect("no assertion fails");
    }
}
