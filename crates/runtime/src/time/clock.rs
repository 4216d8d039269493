//! The clock of a loop: real, or virtual for tests.
//!
//! Read once when a turn begins and once when it ends (the second reading times the turn and sets the next wait); in
//! between the time does not change. Virtual time moves only when no task can run.

use std::cell::Cell;
use std::fmt;
use std::ops::{Add, Sub};
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

use crate::environment::Environment;

/// A point of monotonic time, in nanoseconds from an arbitrary start. Cheap to copy and to compare.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(u64);

impl Moment {
    /// A moment that never comes.
    pub const NEVER: Moment = Moment(u64::MAX);

    /// From nanoseconds since the clock's start.
    pub const fn from_nanos(nanos: u64) -> Self {
        Moment(nanos)
    }

    /// Nanoseconds since the clock's start.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The time from `earlier` to this moment; zero when `earlier` is later.
    pub fn since(self, earlier: Moment) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Moment {
    type Output = Moment;

    #[inline]
    fn add(self, duration: Duration) -> Moment {
        Moment(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Sub<Moment> for Moment {
    type Output = Duration;

    fn sub(self, earlier: Moment) -> Duration {
        self.since(earlier)
    }
}

impl fmt::Debug for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:09}s", self.0 / 1_000_000_000, self.0 % 1_000_000_000)
    }
}

/// The clock of a loop.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ClockChoice {
    /// `CLOCK_MONOTONIC` and `CLOCK_REALTIME`.
    #[default]
    System,
    /// Time stands still while any task can run, and jumps to the next timer when none can. Tasks in thread pools are
    /// first waited for in real time; threads outside of the loop (of a test) are not.
    Virtual,
}

/// The virtual wall clock begins at 2001-09-09T01:46:40Z, a number that is easily recognised.
const VIRTUAL_WALL_START: Duration = Duration::from_secs(1_000_000_000);
/// Not zero, so that "before the start" can be expressed.
pub(crate) const VIRTUAL_START_NANOS: u64 = 1_000_000_000;

/// The time of the running loop's turn, or the system's on a thread without a loop.
pub fn now_anywhere() -> Moment {
    Environment::try_with(|environment| environment.clock.now()).unwrap_or_else(system_now)
}

/// As [`now_anywhere`], but the current time of a loop's clock, not that of its turn.
pub fn real_now_anywhere() -> Moment {
    Environment::try_with(|environment| Moment(environment.clock.read())).unwrap_or_else(system_now)
}

/// The wall clock, since the epoch: that of the running loop's turn, or the system's on a thread without a loop.
pub fn wall_anywhere() -> Duration {
    Environment::try_with(|environment| environment.clock.wall())
        .unwrap_or_else(|| Duration::from_nanos(nanoseconds(ClockId::Realtime)))
}

/// The current system time, even if the loop's clock is virtual: for timing a call.
#[inline]
pub fn system_now() -> Moment {
    Moment(nanoseconds(ClockId::Monotonic))
}

pub(crate) struct Clock {
    /// `Some` for virtual time.
    virtual_nanos: Option<Rc<Cell<u64>>>,
    now: Cell<u64>,
    turn: Cell<u64>,
    /// The wall clock of this turn, in nanoseconds since the epoch; zero = not read yet in this turn.
    wall: Cell<u64>,
}

impl Clock {
    pub fn new(choice: ClockChoice) -> Self {
        let virtual_nanos = (choice == ClockChoice::Virtual).then(|| Rc::new(Cell::new(VIRTUAL_START_NANOS)));
        Clock::with(virtual_nanos)
    }

    /// A virtual clock that is shared with others.
    pub fn shared(nanos: Rc<Cell<u64>>) -> Self {
        Clock::with(Some(nanos))
    }

    fn with(virtual_nanos: Option<Rc<Cell<u64>>>) -> Self {
        let clock = Clock { virtual_nanos, now: Cell::new(0), turn: Cell::new(0), wall: Cell::new(0) };
        clock.begin_turn();
        clock
    }

    pub fn is_virtual(&self) -> bool {
        self.virtual_nanos.is_some()
    }

    /// Reads the clock for a new turn.
    pub fn begin_turn(&self) {
        self.now.set(self.read());
        self.turn.set(self.turn.get() + 1);
        self.wall.set(0);
    }

    pub fn now(&self) -> Moment {
        Moment(self.now.get())
    }

    pub fn turn(&self) -> u64 {
        self.turn.get()
    }

    /// The clock itself, in nanoseconds.
    pub fn read(&self) -> u64 {
        match &self.virtual_nanos {
            Some(nanos) => nanos.get(),
            None => system_now().as_nanos(),
        }
    }

    /// Moves virtual time forward.
    pub fn advance_to(&self, nanos: u64) {
        if let Some(clock) = &self.virtual_nanos {
            clock.set(clock.get().max(nanos));
        }
    }

    /// The wall clock, read at the first use in a turn.
    pub fn wall(&self) -> Duration {
        if self.wall.get() == 0 {
            self.wall.set(match &self.virtual_nanos {
                Some(nanos) => VIRTUAL_WALL_START.as_nanos() as u64 + nanos.get() - VIRTUAL_START_NANOS,
                None => nanoseconds(ClockId::Realtime),
            });
        }
        Duration::from_nanos(self.wall.get())
    }

    pub fn wall_time(&self) -> SystemTime {
        UNIX_EPOCH + self.wall()
    }
}

fn nanoseconds(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
