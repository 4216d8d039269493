//! The fate of a simulated world: its clock, its randomness, its planned events, and the record of past ones.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use super::datagrams::Datagram;
use super::faults::Faults;
use super::network::Arrival;
use super::random::Random;
use super::trace::Trace;
use crate::executor::slots::Key;
use crate::memory::output::Output;
use crate::pool::SimulatedThread;

/// Minimum time of everything, even if nothing is slow: consequences of an event never happen at the same moment.
const SHORT: Duration = Duration::from_micros(10);

/// Limit of events in a turn, for programs that do not loop for ever: a turn polls 512 times.
const NOTES_PER_TURN_MAX: u32 = 1_000_000;

/// Limit of events in a world, for programs that end: the largest tests take a tenth of it.
const NOTES_MAX: u32 = 5_000_000;

/// Limit of turns without progress of the clock.
const TURNS_PER_MOMENT_MAX: u32 = 100_000;

/// A planned event.
pub(crate) enum Event {
    /// Data or a signal arrives at an end of a connection.
    Arrival { end: Key, arrival: Arrival },
    /// An end learns that the other one has room again.
    Room { end: Key, bytes: usize },
    /// A datagram arrives.
    Datagram(Datagram),
    /// A connection arrives at a listener.
    Incoming { listener: Key, end: Key },
    /// The network breaks the connection with this end.
    Cut { end: Key },
    /// A loop's socket gets an event.
    Ready { slot: Key, side: Side },
    /// A loop's listener gets an event.
    ListenerReady { slot: Key },
    /// The kernel releases memory that was on loan to it.
    Release { _memory: Output },
    /// A pool's thread takes a task, or ends.
    Thread(SimulatedThread),
    /// A ring continues the operation with this number.
    Operation(u64),
}

/// The kind of event of a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    Read,
    Write,
    HangUp,
}

pub(crate) struct Fate {
    /// Shared with the loop's clock.
    clock: Rc<Cell<u64>>,
    pub random: Random,
    faults: Cell<Faults>,
    /// By time; events of the same time happen in the order in which they were planned.
    agenda: RefCell<BTreeMap<(u64, u64), Event>>,
    planned: Cell<u64>,
    trace: RefCell<Trace>,
    notes_in_turn: Cell<u32>,
    notes: Cell<u32>,
    /// Time of the last turn, and the number of turns at that time.
    moment: Cell<u64>,
    turns: Cell<u32>,
}

impl Fate {
    pub fn new(seed: u64, faults: Faults, clock: Rc<Cell<u64>>) -> Self {
        Fate {
            clock,
            random: Random::new(seed),
            faults: Cell::new(faults),
            agenda: RefCell::new(BTreeMap::new()),
            planned: Cell::new(0),
            trace: RefCell::new(Trace::new()),
            notes_in_turn: Cell::new(0),
            notes: Cell::new(0),
            moment: Cell::new(0),
            turns: Cell::new(0),
        }
    }

    pub fn clock(&self) -> &Rc<Cell<u64>> {
        &self.clock
    }

    pub fn now(&self) -> u64 {
        self.clock.get()
    }

    pub fn faults(&self) -> Faults {
        self.faults.get()
    }

    pub fn set_faults(&self, faults: Faults) {
        self.faults.set(faults);
    }

    /// Draws whether a fault strikes.
    pub fn strikes(&self, fault: impl FnOnce(&Faults) -> u16) -> bool {
        self.random.chance(fault(&self.faults.get()))
    }

    /// A random positive time up to `max`.
    pub fn within(&self, max: Duration) -> Duration {
        SHORT + Duration::from_nanos(self.random.below(max.as_nanos() as u64 + 1))
    }

    /// Random delay of a wake-up.
    pub fn lateness(&self) -> Duration {
        if self.strikes(|faults| faults.late_events) { self.within(self.faults().late_max) } else { Duration::ZERO }
    }

    /// Random delay of a message in the network.
    pub fn latency(&self) -> Duration {
        self.within(self.faults().latency_max)
    }

    pub fn plan(&self, delay: Duration, event: Event) {
        self.plan_at(self.now() + delay.as_nanos() as u64, event);
    }

    pub fn plan_at(&self, nanos: u64, event: Event) {
        let number = self.planned.replace(self.planned.get() + 1);
        self.agenda.borrow_mut().insert((nanos, number), event);
    }

    pub fn next_event(&self) -> Option<u64> {
        self.agenda.borrow().first_key_value().map(|((nanos, _), _)| *nanos)
    }

    /// Takes the next event if it is due and was planned before number `before`.
    pub fn take_due(&self, before: u64) -> Option<Event> {
        let mut agenda = self.agenda.borrow_mut();
        let first = agenda.first_entry()?;
        let (nanos, number) = *first.key();
        (nanos <= self.now() && number < before).then(|| first.remove())
    }

    /// Number of events planned so far.
    pub fn planned(&self) -> u64 {
        self.planned.get()
    }

    /// Begins a turn of the loop. Panics if the program loops without progress.
    pub fn begin_turn(&self) {
        self.notes_in_turn.set(0);
        let now = self.now();
        let turns = if self.moment.replace(now) == now { self.turns.get() + 1 } else { 0 };
        // A driver that is dropped after that has turns too.
        self.turns.set(if turns < TURNS_PER_MOMENT_MAX { turns } else { 0 });
        assert!(turns < TURNS_PER_MOMENT_MAX, "{turns} turns at one moment: a task runs in circles");
    }

    pub fn note(&self, what: &'static str, number: u64, amount: usize) {
        self.count_note(what);
        self.trace.borrow_mut().note(self.now(), what, number, amount as u64);
    }

    pub fn note_bytes(&self, what: &'static str, number: u64, bytes: &[u8]) {
        self.note(what, number, bytes.len());
        self.trace.borrow_mut().bytes(bytes);
    }

    /// Panics if there are so many events that the program will never end.
    fn count_note(&self, what: &'static str) {
        self.notes_in_turn.set(self.notes_in_turn.get() + 1);
        self.notes.set(self.notes.get() + 1);
        // Destructors record events too, and another task of this turn may be as bad: both get the same number again.
        if self.notes_in_turn.get() > NOTES_PER_TURN_MAX {
            self.notes_in_turn.set(0);
            panic!("{what} so many times in one turn: a poll runs in circles");
        }
        if self.notes.get() > NOTES_MAX {
            self.notes.set(0);
            panic!("{what} so many times: a task runs in circles");
        }
    }

    pub fn trace_hash(&self) -> u64 {
        self.trace.borrow().hash()
    }

    pub fn trace_tail(&self, count: usize) -> String {
        self.trace.borrow().tail(count)
    }
}
