//! The clock of a loop, and timers.

mod clock;
mod timer;

pub use clock::{ClockChoice, Moment, now_anywhere, real_now_anywhere, system_now, wall_anywhere};
pub use timer::{Elapsed, Timer, sleep, sleep_until, timeout};

pub(crate) use clock::{Clock, VIRTUAL_START_NANOS};
pub(crate) use timer::Wheel;
