//! The budget of a turn: who wants little goes before who wants much, and all that want much have a bounded share.
//!
//! A head, a small answer or a few bytes for a tunnel is done at once. A large send, a body that keeps arriving, or a
//! piece of compression is *bulk*: its task waits in one line, first come, first served, and the line moves when
//! nothing else can run. A task then has one quantum before the next one's turn; when the share of the turn is spent,
//! the loop looks for events. So a thousand connections that take all they can get delay a quiet one by the rest of a
//! turn, and not by a thousand bounded sends.
//!
//! ```text
//!   turn:  | events, calls, timers | tasks that want little … | quantum | quantum | wait (0 s while anybody is in line)
//!                                    TURN_NANOS at most         BULK_NANOS at most
//! ```
//!
//! The kernel may know of more events than a turn brought (a ring brings some twenty completions at once): then the
//! line stands still, but for no more than [`STARVED_TURNS`] turns.
//!
//! What work takes is estimated before it is done, and for bulk measured by the clock. In virtual time nothing takes
//! any time: the estimates stand in its place, and the order is the same every time.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};

use super::slots::Key;
use crate::environment::Environment;

/// What tasks that want little may take of a turn before the loop looks for events.
pub(crate) const TURN_NANOS: u64 = 1_000_000;

/// What all bulk of a turn may take together. Looking for events after that costs a system call of about a microsecond.
pub(crate) const BULK_NANOS: u64 = 500_000;

/// What one task may take of that before the next one in line.
const QUANTUM_NANOS: u64 = 125_000;

/// A task that takes no more than this in one poll wants little.
const LITTLE_NANOS: u64 = 50_000;

/// After so many turns without bulk the first in line goes before everything else.
const STARVED_TURNS: u64 = 8;

/// What it takes to copy a KiB into a socket or out of one, by estimate (loopback, two cores: 150 to 300 ns).
const COPY_NANOS_PER_KIB: u64 = 250;

/// As many bytes as one task sends or receives at once: about a quantum.
pub(crate) const QUANTUM_BYTES: usize = 512 * 1024;

/// How long a piece of a computation should take: it is a turn's bulk by itself, and long enough to be worth its
/// beginning.
const PIECE_NANOS: u64 = BULK_NANOS;

/// How long one may take at worst: a stall is far, even on a machine that is busy.
const PIECE_NANOS_WORST: u64 = 2_000_000;

/// What a unit of work takes, in nanoseconds; a unit is a byte, as a rule.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// On the whole.
    pub usual_nanos: u64,
    /// For the worst input that there is.
    pub worst_nanos: u64,
}

impl Effort {
    /// How many units should make a piece, at most.
    pub fn units_at_once(self) -> usize {
        let usual = PIECE_NANOS / self.usual_nanos.max(1);
        let worst = PIECE_NANOS_WORST / self.worst_nanos.max(1);
        usual.min(worst).max(1) as usize
    }

    fn nanos(self, units: usize) -> u64 {
        (units as u64).saturating_mul(self.usual_nanos)
    }
}

/// Ready when the running task may do work of so many units now; until then it waits in line for its share of a turn.
/// Do the work in this poll, and tell [`charge_units`].
pub fn poll_units(context: &mut Context<'_>, effort: Effort, units: usize) -> Poll<()> {
    Environment::with(|environment| environment.poll_budget(context, effort.nanos(units)))
}

/// Work of so many units has been done.
pub fn charge_units(effort: Effort, units: usize) {
    Environment::with(|environment| {
        environment.budget.has_computed.set(true);
        environment.budget.charge(effort.nanos(units));
    });
}

/// Ready when the running task may begin something now that other tasks will do; until then it waits in line for its
/// share of a turn. The first in a poll is always begun. Begin it in this poll, and tell [`charge_begun`].
pub fn poll_begin(context: &mut Context<'_>) -> Poll<()> {
    Environment::with(|environment| match environment.budget.begun_nanos.get() {
        0 => Poll::Ready(()),
        _ => environment.poll_bulk(context),
    })
}

/// The running task has begun work of so many units that other tasks do. It counts for the line as work of this one, so
/// that who begins much waits like who does much, but not for what this one does itself.
pub fn charge_begun(effort: Effort, units: usize) {
    Environment::with(|environment| {
        let begun = &environment.budget.begun_nanos;
        begun.set(begun.get().saturating_add(effort.nanos(units)));
    });
}

/// Ready when the running task may copy so many bytes now (read them from the page cache, send them); until then it
/// waits in line for its share of a turn. Streams ask by themselves: this is for what comes before a send.
pub fn poll_copy(context: &mut Context<'_>, bytes: usize) -> Poll<()> {
    Environment::with(|environment| environment.poll_copy(context, bytes.min(QUANTUM_BYTES)))
}

/// The estimate for copying so many bytes.
fn copy_nanos(bytes: usize) -> u64 {
    bytes as u64 * COPY_NANOS_PER_KIB / 1024
}

/// The budget of a loop's turns.
#[derive(Default)]
pub(crate) struct Budget {
    /// The tasks in line; each once, so they are no more than there are tasks.
    line: RefCell<VecDeque<Waiting>>,
    /// What bulk has taken of this turn.
    bulk_nanos: Cell<u64>,
    /// What was charged in this turn, by estimate.
    turn_nanos: Cell<u64>,
    /// What was charged in this poll, by estimate.
    poll_nanos: Cell<u64>,
    /// Estimated time of work that this poll has begun and other tasks do.
    begun_nanos: Cell<u64>,
    /// A computation was charged in this turn.
    has_computed: Cell<bool>,
    /// Whose turn in line has come, until it is polled.
    next: Cell<Option<Key>>,
    /// When the poll under way began to have a quantum; `None` for one without.
    quantum: Cell<Option<Quantum>>,
    /// The turn in which there was bulk for the last time, or in which somebody came into an empty line.
    last_bulk: Cell<u64>,
}

/// The beginning of a quantum.
#[derive(Clone, Copy)]
struct Quantum {
    /// By the clock.
    began: u64,
    /// Time charged in the poll by then, and estimated time of the work that it had begun.
    charged: u64,
    begun: u64,
}

struct Waiting {
    task: Key,
    /// Who has to be woken beside the task, where that is not the task's own waker.
    inner: Option<Waker>,
}

impl Budget {
    /// Whether somebody is in line: the loop must not sleep.
    pub fn is_awaited(&self) -> bool {
        !self.line.borrow().is_empty()
    }

    /// Whether tasks that want little have had, by estimate, their share of this turn.
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
            // Nobody else wants anything: no need to queue.
            None if !self.executor.has_ready() && line.borrow().is_empty() && self.budget.has_bulk_left() => {
                self.begin_quantum();
                return Poll::Ready(());
            }
            _ => {}
        }
        let Some((task, is_new)) = self.executor.enter_line() else {
            // Outside of any task nobody could be woken.
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
            // A future with wakers of its own: the last one to ask is woken.
            if let Some(waiting) = line.iter_mut().find(|waiting| waiting.task == task) {
                waiting.inner = Some(inner);
            }
        }
        Poll::Pending
    }

    /// A turn begins. Who has waited for long comes first.
    pub fn begin_budget(&self) {
        self.budget.begin_turn();
        // One that was woken in a turn that ended before it was polled keeps its place; one that has ended makes room.
        if self.budget.next.get().is_some_and(|task| !self.executor.is_queued(task)) {
            self.budget.next.set(None);
        }
        if self.budget.is_awaited() && self.budget.next.get().is_none() && self.is_bulk_starved() {
            self.wake_next_in_line();
        }
    }

    /// Nothing else can run: wakes the first in line if the share of the turn is not spent and no events wait. False if
    /// nobody was woken.
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
            // One that has ended is not there any more.
            if self.executor.leave_line(task) {
                self.budget.next.set(Some(task));
                self.executor.wake_first(task);
                inner.into_iter().for_each(Waker::wake);
                return true;
            }
        }
    }

    /// A poll of this task begins.
    #[inline]
    pub fn begin_poll(&self, task: Key) {
        if self.budget.next.get() == Some(task) {
            self.budget.next.set(None);
            self.begin_quantum();
        }
    }

    /// The poll is over.
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

    /// Time that the poll under way has taken since its quantum began, with the work that it has begun.
    fn taken_since(&self, quantum: Quantum) -> u64 {
        let own = match self.clock.is_virtual() {
            true => self.budget.poll_nanos.get() - quantum.charged,
            false => self.clock.read().saturating_sub(quantum.began),
        };
        own.saturating_add(self.budget.begun_nanos.get() - quantum.begun)
    }

    /// The tasks of a turn have run. In a simulated world none goes beyond its budget by more than what one task does
    /// at once: a copy, or a piece of a computation.
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
