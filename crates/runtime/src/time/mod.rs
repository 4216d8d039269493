//! The clock of a loop, and timers.

mod clock;
mod timer;

pub use clock::{ClockChoice, Moment};
pub use timer::{Elapsed, Timer, sleep, sleep_until, timeout};

pub(crate) use clock::{Clock, VIRTUAL_START_NANOS, now_anywhere, system_now, wall_anywhere};
pub(crate) use timer::Wheel;
