//! The budget of a turn: small work goes before large work, and all large work together has a bounded share.
//!
//! A request head, a small response or a few bytes of a tunnel are handled at once. A large send, a body that keeps
//! arriving, or a piece of compression is *bulk*: its task waits in one queue, the line, first come, first served,
//! which advances when no other task can run. Each task in line gets one quantum; when the turn's share is used up, the
//! loop looks for events. So a thousand connections that take all they can get delay a quiet one by the rest of a turn,
//! not by a thousand bounded sends.
//!
//! ```text
//!   turn:  | events, calls, timers | small work of tasks … | quantum | quantum | wait (0 s unless the line is empty)
//!                                    TURN_NANOS at most      BULK_NANOS at most
//! ```
//!
//! If the kernel has more events than the turn brought (a ring brings about twenty completions at once), the line
//! stands still, for at most [`STARVED_TURNS`] turns.
//!
//! The time of work is estimated before it is done; that of bulk is measured by the clock. In virtual time nothing
//! takes any time: estimates take the place of measurements, and the order is the same every time.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};

use super::slots::Key;
use crate::environment::Environment;

/// Time for small work in a turn before the loop looks for events.
pub(crate) const TURN_NANOS: u64 = 1_000_000;

/// Time for all bulk of a turn. The look for events that follows costs a system call of about a microsecond.
pub(crate) const BULK_NANOS: u64 = 500_000;

/// Time of one task in line before the next one.
const QUANTUM_NANOS: u64 = 125_000;

/// Work of at most this time in one poll is small.
const LITTLE_NANOS: u64 = 50_000;

/// Turns without bulk after which the first task in line goes before all others.
const STARVED_TURNS: u64 = 8;

/// Estimated time to copy a KiB into a socket or out of one (loopback, two cores: 150 to 300 ns).
const COPY_NANOS_PER_KIB: u64 = 250;

/// Bytes that one task sends or receives at once: about a quantum.
pub(crate) const QUANTUM_BYTES: usize = 512 * 1024;

/// Intended time of one piece of a computation: all bulk of a turn, and long enough to be worth starting.
const PIECE_NANOS: u64 = BULK_NANOS;

/// Longest time of a piece with the worst input: far below a stall, even on a busy machine.
const PIECE_NANOS_WORST: u64 = 2_000_000;

/// Time per unit of work in nanoseconds; a unit is a byte, as a rule.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Usually.
    pub usual_nanos: u64,
    /// With the worst input possible.
    pub worst_nanos: u64,
}

impl Effort {
    /// Upper limit of units in one piece.
    pub fn units_at_once(self) -> usize {
        let usual = PIECE_NANOS / self.usual_nanos.max(1);
        let worst = PIECE_NANOS_WORST / self.worst_nanos.max(1);
        usual.min(worst).max(1) as usize
    }

    fn nanos(self, units: usize) -> u64 {
        (units as u64).saturating_mul(self.usual_nanos)
    }
}

/// Ready when the running task may do work of `units` now; until then it waits in line. The work has to be done in this
/// poll, and reported to [`charge_units`].
pub fn poll_units(context: &mut Context<'_>, effort: Effort, units: usize) -> Poll<()> {
    Environment::with(|environment| environment.poll_budget(context, effort.nanos(units)))
}

/// Charges work of `units` that was done.
pub fn charge_units(effort: Effort, units: usize) {
    Environment::with(|environment| {
        environment.budget.has_computed.set(true);
        environment.budget.charge(effort.nanos(units));
    });
}

/// Ready when the running task may start work now that other tasks will do; until then it waits in line. The first
/// start in a poll never waits. The work has to be started in this poll, and reported to [`charge_begun`].
pub fn poll_begin(context: &mut Context<'_>) -> Poll<()> {
    Environment::with(|environment| match environment.budget.begun_nanos.get() {
        0 => Poll::Ready(()),
        _ => environment.poll_bulk(context),
    })
}

/// Charges work of `units` that the running task has started and other tasks do. It counts for the line, so that a task
/// that starts much waits like one that does much, but not for the task's own small work.
pub fn charge_begun(effort: Effort, units: usize) {
    Environment::with(|environment| {
        let begun = &environment.budget.begun_nanos;
        begun.set(begun.get().saturating_add(effort.nanos(units)));
    });
}

/// Ready when the running task may copy `bytes` now (read them from the page cache, send them); until then it waits in
/// line. Streams call this themselves: use it only for work before a send.
pub fn poll_copy(context: &mut Context<'_>, bytes: usize) -> Poll<()> {
    Environment::with(|environment| environment.poll_copy(context, bytes.min(QUANTUM_BYTES)))
}

/// Estimated time to copy `bytes`.
fn copy_nanos(bytes: usize) -> u64 {
    bytes as u64 * COPY_NANOS_PER_KIB / 1024
}

/// The budget of a loop's turns.
#[derive(Default)]
pub(crate) struct Budget {
    /// The tasks in line; each once, so they are no more than there are tasks.
    line: RefCell<VecDeque<Waiting>>,
    /// Time used by bulk in this turn.
    bulk_nanos: Cell<u64>,
    /// Estimated time charged in this turn.
    turn_nanos: Cell<u64>,
    /// Estimated time charged in this poll.
    poll_nanos: Cell<u64>,
    /// Estimated time of work that this poll has started and other tasks do.
    begun_nanos: Cell<u64>,
    /// A computation was charged in this turn.
    has_computed: Cell<bool>,
    /// The task from the line that was woken and not polled yet.
    next: Cell<Option<Key>>,
    /// Quantum of the current poll, if it has one.
    quantum: Cell<Option<Quantum>>,
    /// Last turn with bulk, or in which a task entered an empty line.
    last_bulk: Cell<u64>,
}

/// State at the beginning of a quantum.
#[derive(Clone, Copy)]
struct Quantum {
    /// Time by the clock.
    began: u64,
    /// Time charged in the poll so far, and estimated time of the work that it had started.
    charged: u64,
    begun: u64,
}

struct Waiting {
    task: Key,
    /// A waker to wake besides the task, if the caller's waker is not the task's own.
    inner: Option<Waker>,
}

impl Budget {
    /// True if a task is in line, so that the loop must not sleep.
    pub fn is_awaited(&self) -> bool {
        !self.line.borrow().is_empty()
    }

    /// True if small work has used its share of this turn, by estimate.
    pub fn is_turn_spent(&self) -> bool {
        self.turn_nanos.get() >= TURN_NANOS
    }

    pub fn charge_copy(&self, bytes: usize) {
        self.charge(copy_nanos(bytes));
    }

    fn charge(&self, nanos: u64) {
        self.poll_nanos.set(self.poll_nanos.get().saturating_add(nanos));
    }

    fn begin_turn(&self) {
        self.bulk_nanos.set(0);
        self.turn_nanos.set(0);
        self.has_computed.set(false);
    }

    fn has_bulk_left(&self) -> bool {
        self.bulk_nanos.get() < BULK_NANOS && self.next.get().is_none()
    }
}

impl Environment {
    #[inline]
    pub fn poll_copy(&self, context: &mut Context<'_>, bytes: usize) -> Poll<()> {
        self.poll_budget(context, copy_nanos(bytes))
    }

    #[inline]
    pub fn poll_budget(&self, context: &mut Context<'_>, nanos: u64) -> Poll<()> {
        if self.budget.poll_nanos.get().saturating_add(nanos) <= LITTLE_NANOS {
            return Poll::Ready(());
        }
        self.poll_bulk(context)
    }

    fn poll_bulk(&self, context: &mut Context<'_>) -> Poll<()> {
        let Budget { line, quantum, last_bulk, .. } = &self.budget;
        match quantum.get() {
            Some(begin) if self.taken_since(begin) < QUANTUM_NANOS => return Poll::Ready(()),
            // No other task can run: no need to queue.
            None if !self.executor.has_ready() && line.borrow().is_empty() && self.budget.has_bulk_left() => {
                self.begin_quantum();
                return Poll::Ready(());
            }
            _ => {}
        }
        let Some((task, is_new)) = self.executor.enter_line() else {
            // Outside of any task there is nothing to wake.
            return Poll::Ready(());
        };
        let mut line = line.borrow_mut();
        let inner = || (!self.executor.is_waker_of(task, context.waker())).then(|| context.waker().clone());
        if is_new {
            if line.is_empty() {
                last_bulk.set(self.clock.turn());
            }
            line.push_back(Waiting { task, inner: inner() });
        } else if let Some(inner) = inner() {
            // A future with wakers of its own: the last one that asked is woken.
            if let Some(waiting) = line.iter_mut().find(|waiting| waiting.task == task) {
                waiting.inner = Some(inner);
            }
        }
        Poll::Pending
    }

    /// Begins a turn. A task that was starved is woken first.
    pub fn begin_budget(&self) {
        self.budget.begin_turn();
        // A task that was woken and not polled before the turn ended keeps its place; one that has ended frees it.
        if self.budget.next.get().is_some_and(|task| !self.executor.is_queued(task)) {
            self.budget.next.set(None);
        }
        if self.budget.is_awaited() && self.budget.next.get().is_none() && self.is_bulk_starved() {
            self.wake_next_in_line();
        }
    }

    /// Wakes the first task in line if the turn's share is not used up and no events are pending; called when nothing
    /// else can run. False if no task was woken.
    pub fn wake_bulk(&self) -> bool {
        let may_run = self.budget.is_awaited() && self.budget.has_bulk_left();
        may_run && (!self.driver.has_events() || self.is_bulk_starved()) && self.wake_next_in_line()
    }

    fn is_bulk_starved(&self) -> bool {
        self.clock.turn() - self.budget.last_bulk.get() >= STARVED_TURNS
    }

    fn wake_next_in_line(&self) -> bool {
        loop {
            let Some(Waiting { task, inner }) = self.budget.line.borrow_mut().pop_front() else { return false };
            // A task that has ended is skipped.
            if self.executor.leave_line(task) {
                self.budget.next.set(Some(task));
                self.executor.wake_first(task);
                inner.into_iter().for_each(Waker::wake);
                return true;
            }
        }
    }

    #[inline]
    pub fn begin_poll(&self, task: Key) {
        if self.budget.next.get() == Some(task) {
            self.budget.next.set(None);
            self.begin_quantum();
        }
    }

    #[inline]
    pub fn end_poll(&self) {
        let budget = &self.budget;
        match budget.quantum.take() {
            None => {
                let taken = budget.poll_nanos.take().saturating_add(budget.begun_nanos.take());
                budget.turn_nanos.set(budget.turn_nanos.get().saturating_add(taken));
            }
            Some(quantum) => {
                self.end_quantum(quantum);
                budget.poll_nanos.set(0);
                budget.begun_nanos.set(0);
            }
        }
    }

    fn begin_quantum(&self) {
        let Budget { poll_nanos, begun_nanos, quantum, .. } = &self.budget;
        let (began, charged, begun) = (self.clock.read(), poll_nanos.get(), begun_nanos.get());
        quantum.set(Some(Quantum { began, charged, begun }));
    }

    fn end_quantum(&self, quantum: Quantum) {
        let budget = &self.budget;
        let before = quantum.charged.saturating_add(quantum.begun);
        budget.turn_nanos.set(budget.turn_nanos.get().saturating_add(before));
        budget.bulk_nanos.set(budget.bulk_nanos.get().saturating_add(self.taken_since(quantum)));
        budget.last_bulk.set(self.clock.turn());
    }

    /// Time used by the current poll since its quantum began, including the work that it has started.
    fn taken_since(&self, quantum: Quantum) -> u64 {
        let own = match self.clock.is_virtual() {
            true => self.budget.poll_nanos.get() - quantum.charged,
            false => self.clock.read().saturating_sub(quantum.began),
        };
        own.saturating_add(self.budget.begun_nanos.get() - quantum.begun)
    }

    /// Checks the budget at the end of a turn in a simulation: it may be exceeded only by one operation of a task, a
    /// copy or a piece of a computation.
    pub fn end_budget(&self) {
        if self.simulation.is_none() {
            return;
        }
        let Budget { bulk_nanos, turn_nanos, has_computed, .. } = &self.budget;
        let (bulk, turn) = (bulk_nanos.get(), turn_nanos.get());
        let at_once = if has_computed.get() { PIECE_NANOS } else { copy_nanos(QUANTUM_BYTES) };
        assert!(bulk <= BULK_NANOS + QUANTUM_NANOS + at_once, "bulk took {bulk} ns of a turn");
        assert!(turn <= TURN_NANOS + LITTLE_NANOS + at_once, "a turn took {turn} ns");
    }
}
