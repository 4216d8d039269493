//! What decides in a simulated world: its clock, its chance, what is going to happen, and the record of what has
//! happened.

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

/// Something takes this long even where nothing is slow: what follows from an event never happens at the same moment.
const SHORT: Duration = Duration::from_micros(10);

/// What can happen in a turn of a program that does not run in circles: a turn polls 512 times.
const NOTES_PER_TURN_MAX: u32 = 1_000_000;

/// What can happen in a world that comes to an end: the largest of the tests take a tenth of it.
const NOTES_MAX: u32 = 5_000_000;

/// Turns without a step of the clock: no program that comes to rest needs as many.
const TURNS_PER_MOMENT_MAX: u32 = 100_000;

/// What is going to happen.
pub(crate) enum Event {
    /// Something arrives at an end of a connection.
    Arrival { end: Key, arrival: Arrival },
    /// An end hears that the other one has room again.
    Room { end: Key, bytes: usize },
    /// A datagram arrives.
    Datagram(Datagram),
    /// A connection arrives at a listener.
    Incoming { listener: Key, end: Key },
    /// The network breaks a connection, of which this is one end.
    Cut { end: Key },
    /// A loop's socket is told of something.
    Ready { slot: Key, side: Side },
    /// A loop's listener is told of connections.
    ListenerReady { slot: Key },
    /// The kernel lets go of memory that was on loan to it.
    Release { _memory: Output },
    /// A pool's thread comes to a task, or to its end.
    Thread(SimulatedThread),
    /// A ring comes to the operation of this number.
    Operation(u64),
}

/// What a socket is told of.
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
    /// By time; what has the same time happens in the order in which it was planned.
    agenda: RefCell<BTreeMap<(u64, u64), Event>>,
    planned: Cell<u64>,
    trace: RefCell<Trace>,
    notes_in_turn: Cell<u32>,
    notes: Cell<u32>,
    /// The moment of the last turn, and how many turns it has had.
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

    /// A time up to `max`, and never none.
    pub fn within(&self, max: Duration) -> Duration {
        SHORT + Duration::from_nanos(self.random.below(max.as_nanos() as u64 + 1))
    }

    /// How long news take to reach whoever waits.
    pub fn lateness(&self) -> Duration {
        if self.strikes(|faults| faults.late_events) { self.within(self.faults().late_max) } else { Duration::ZERO }
    }

    /// How long something takes to cross the network.
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

    /// When the next event is due.
    pub fn next_event(&self) -> Option<u64> {
        self.agenda.borrow().first_key_value().map(|((nanos, _), _)| *nanos)
    }

    /// The next event if it is due, and it was planned before number `before`.
    pub fn take_due(&self, before: u64) -> Option<Event> {
        let mut agenda = self.agenda.borrow_mut();
        let first = agenda.first_entry()?;
        let (nanos, number) = *first.key();
        (nanos <= self.now() && number < before).then(|| first.remove())
    }

    /// How many events have been planned so far.
    pub fn planned(&self) -> u64 {
        self.planned.get()
    }

    /// A turn of the loop. Panics when the program runs in circles.
    pub fn begin_turn(&self) {
        self.notes_in_turn.set(0);
        let now = self.now();
        let turns = if self.moment.replace(now) == now { self.turns.get() + 1 } else { 0 };
        // A driver that is dropped then has turns, too.
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

    /// Panics when so much happens that it will never end.
    fn count_note(&self, what: &'static str) {
        self.notes_in_turn.set(self.notes_in_turn.get() + 1);
        self.notes.set(self.notes.get() + 1);
        // Destructors note, too, and another task of this turn may be as bad: both get as much again.
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
