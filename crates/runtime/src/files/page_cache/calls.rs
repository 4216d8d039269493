//! Whether calls on a loop that should not wait did.
//!
//! Two readings of the clock cost what a small call does. So a call only leaves a mark of its device, and the length of
//! the turn, which is known anyway, says whether one of its calls can have waited. After a long turn calls are timed
//! one by one, for a while. A call that takes long has not always waited, either: on a busy machine the thread may have
//! been preempted. The kernel's figures of the thread tell them apart; they are asked for once in a turn whose calls
//! are timed, and after each long call.
//!
//! | the thread | voluntary switches | processor time | verdict |
//! |---|---|---|---|
//! | waited | grown | | waited |
//! | searched for memory, or copied much | the same | long | long; waited, if so long that every client has noticed |
//! | was preempted | the same | short | quick: that says nothing of the device |
//!
//! Of a turn whose calls were not timed only its length is known. One of over 100 ms is taken to have waited.
//!
//! What a look has found stays there for the rest of its turn: whoever sends a piece asks for it more than once.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use super::residency::{FileHash, Part};
use crate::simulation::World;
use crate::stall::usage::ThreadUsage;
use crate::time::{Moment, system_now};

/// A call, or a turn with calls in it, that takes longer has waited, or its thread was held up.
const LONG: Duration = Duration::from_millis(5);

/// One that takes longer counts as having waited, unless its thread was preempted.
const WAITED: Duration = Duration::from_millis(100);

/// How long calls are timed after a long turn, and after a long call.
const TIMED_FOR: Duration = Duration::from_secs(10);

/// How a call went that should not wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    Quick,
    /// It took long, for whatever reason.
    Long,
    /// It has waited.
    Waited,
}

/// The calls for files of one loop.
pub(crate) struct LoopCalls {
    /// In a simulated world chance says which calls wait.
    world: Option<Rc<World>>,
    /// The devices of this turn's calls, a bit each.
    called: Cell<u64>,
    timed_until: Cell<Moment>,
    /// Before the first call of this turn that is timed, or after the last long one.
    usage: Cell<Option<ThreadUsage>>,
    /// What looks of this turn found last.
    found: Cell<Option<Found>>,
}

/// A piece of a file.
#[derive(Clone, Copy)]
struct Found {
    file: FileHash,
    begin: u64,
    end: u64,
}

/// A call that has begun.
pub(super) enum Begun {
    Untimed,
    At(Moment),
}

impl LoopCalls {
    pub fn new(world: Option<Rc<World>>) -> Self {
        let timed_until = Cell::new(Moment::from_nanos(0));
        LoopCalls { world, called: Cell::new(0), timed_until, usage: Cell::new(None), found: Cell::new(None) }
    }

    /// A call for this device begins, in a turn that began at this moment.
    #[inline]
    pub(super) fn begin(&self, device: usize, turn_began: Moment) -> Begun {
        self.called.set(self.called.get() | 1 << device);
        if turn_began >= self.timed_until.get() {
            return Begun::Untimed;
        }
        if self.usage.get().is_none() {
            self.usage.set(Some(ThreadUsage::now()));
        }
        Begun::At(system_now())
    }

    /// The call is over.
    #[inline]
    pub(super) fn end(&self, begun: Begun) -> Verdict {
        match (begun, &self.world) {
            (_, Some(world)) if world.call_was_slow() => Verdict::Waited,
            (Begun::Untimed, _) | (_, Some(_)) => Verdict::Quick,
            (Begun::At(begun), None) => self.judge(begun),
        }
    }

    fn judge(&self, begun: Moment) -> Verdict {
        let ended = system_now();
        if ended <= begun + LONG {
            return Verdict::Quick;
        }
        self.found.set(None);
        self.timed_until.set(ended + TIMED_FOR);
        let now = ThreadUsage::now();
        let before = self.usage.replace(Some(now)).unwrap_or(now);
        judge_long(ended - begun, before, now)
    }

    /// Whether a look of this turn has found this.
    pub(super) fn has_found(&self, file: FileHash, part: &Part) -> bool {
        self.found.get().is_some_and(|last| file == last.file && last.begin <= part.begin && part.end <= last.end)
    }

    /// A look has found this.
    pub(super) fn note_found(&self, file: FileHash, part: &Part) {
        let last = self.found.get().filter(|last| (last.file, last.end) == (file, part.begin));
        self.found.set(Some(Found { file, begin: last.map_or(part.begin, |last| last.begin), end: part.end }));
    }

    /// The turn is over. Returns the devices, a bit each, of calls of which nobody else has judged how they went, and
    /// how the turn did.
    #[inline]
    pub(super) fn end_turn(&self, began: Moment, ended: Moment) -> (u64, Verdict) {
        let called = self.called.replace(0);
        if called == 0 {
            return (0, Verdict::Quick);
        }
        self.found.set(None);
        let were_timed = self.usage.take().is_some();
        if ended <= began + LONG {
            return (0, Verdict::Quick);
        }
        self.timed_until.set(ended + TIMED_FOR);
        let verdict = if ended > began + WAITED { Verdict::Waited } else { Verdict::Long };
        if were_timed { (0, verdict) } else { (called, verdict) }
    }
}

/// How a call went that took so long. `before` may have been asked for earlier in the turn; a turn's other work is
/// short, and its waits, for locks, are rare.
fn judge_long(took: Duration, before: ThreadUsage, after: ThreadUsage) -> Verdict {
    if after.voluntary_switches != before.voluntary_switches {
        Verdict::Waited
    } else if after.run.saturating_sub(before.run) <= LONG {
        Verdict::Quick
    } else if took > WAITED {
        Verdict::Waited
    } else {
        Verdict::Long
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGIN: Moment = Moment::from_nanos(1_000_000_000);

    fn call(calls: &LoopCalls, turn_began: Moment, call: impl FnOnce()) -> Verdict {
        let begun = calls.begin(3, turn_began);
        call();
        calls.end(begun)
    }

    fn compute() {
        let begun = ThreadUsage::now().run;
        while ThreadUsage::now().run - begun < 2 * LONG {}
    }

    #[test]
    fn calls_are_timed_only_after_a_long_turn() {
        let calls = LoopCalls::new(None);
        let is_timed = |now: Moment| matches!(calls.begin(3, now), Begun::At(_));
        assert!(!is_timed(BEGIN));
        assert_eq!(calls.end_turn(BEGIN, BEGIN + LONG), (0, Verdict::Quick));
        assert!(!is_timed(BEGIN));
        let long = BEGIN + 2 * LONG;
        assert_eq!(calls.end_turn(BEGIN, long), (1 << 3, Verdict::Long));
        assert!(is_timed(long));
        // They are judged one by one.
        assert_eq!(calls.end_turn(long, long + 2 * WAITED), (0, Verdict::Waited));
        let later = long + 2 * WAITED + TIMED_FOR;
        assert!(!is_timed(later));
        assert_eq!(calls.end_turn(later, later + 2 * WAITED), (1 << 3, Verdict::Waited));
        assert_eq!(calls.end_turn(later, later + 2 * WAITED), (0, Verdict::Quick), "without calls");
    }

    #[test]
    fn a_long_call_whose_thread_was_preempted_says_nothing_of_the_device() {
        let usage = |voluntary_switches, millis| ThreadUsage {
            run: Duration::from_millis(millis),
            voluntary_switches,
            involuntary_switches: 0,
        };
        let verdict = |took, switches: u64, run: u64| judge_long(took, usage(7, 300), usage(7 + switches, 300 + run));
        for took in [2 * LONG, 3 * WAITED] {
            assert_eq!(verdict(took, 0, 0), Verdict::Quick);
            assert_eq!(verdict(took, 0, 5), Verdict::Quick);
            assert_eq!(verdict(took, 1, 0), Verdict::Waited);
            assert_eq!(verdict(took, 1, 9), Verdict::Waited);
        }
        // Memory was searched for, or so.
        assert_eq!(verdict(2 * LONG, 0, 9), Verdict::Long);
        assert_eq!(verdict(3 * WAITED, 0, 9), Verdict::Waited);
    }

    #[test]
    fn a_timed_call_that_waits_is_told_from_one_that_computes() {
        std::thread::spawn(|| {
            let calls = LoopCalls::new(None);
            let now = system_now();
            calls.begin(0, now);
            calls.end_turn(now, now + 2 * LONG);
            assert_eq!(call(&calls, now, || ()), Verdict::Quick);
            assert_ne!(call(&calls, now, compute), Verdict::Quick);
            assert_eq!(call(&calls, now, || std::thread::sleep(2 * LONG)), Verdict::Waited);
        })
        .join()
        .unwrap();
    }
}
