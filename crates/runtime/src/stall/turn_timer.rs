//! The timer that wakes the watchdog while a turn is long: a kernel timer for each loop, which expires 10 ms after it
//! was set.
//!
//! ```text
//!   set                 set again (5 ms later at the earliest)      nothing began since: expires in the turn
//!    │turn│ │turn│ │turn ││turn│ │turn│ │turn ││turn│  │ a long turn ······················│
//!    0 ms                 5 ms                          ├──────────── 10 ms ───────────┤► the watchdog looks
//! ```
//!
//! A turn sets it unless it was set within 5 ms, so a busy loop makes 200 calls a second and the timer never expires.
//! When it does, the current turn is 5 to 10 ms old. It expires in vain when the loop has become idle. A loop whose
//! turns are further apart clears it before it waits, so that the watchdog sleeps in that case too.

use std::cell::Cell;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::event::epoll;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use crate::stall::{STALL_THRESHOLD, SUSPECT_AGE};

/// Time for which a timer is set.
const EXPIRES_AFTER: u64 = STALL_THRESHOLD.as_nanos() as u64;

/// Time for which it stays unchanged: if it expires after that, the turn is suspect.
const SET_EVERY: u64 = EXPIRES_AFTER - SUSPECT_AGE.as_nanos() as u64;

const EVENTS_MAX: usize = 16;

/// The timer of one loop. Only the loop's thread owns it; [`wait`] tells the watchdog that it has expired.
pub(crate) struct TurnTimer {
    timer: OwnedFd,
    schedule: Schedule,
}

impl TurnTimer {
    /// Errors: no descriptor, or no memory in the kernel.
    pub fn new() -> io::Result<TurnTimer> {
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        // Timers are never read, so each expiry is an edge.
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(timers()?, &timer, epoll::EventData::new_u64(0), flags)?;
        Ok(TurnTimer { timer, schedule: Schedule::default() })
    }

    /// Begins a turn. Returns whether it has set the timer.
    #[inline]
    pub fn begin_turn(&self, now: u64) -> bool {
        let sets = self.schedule.begin_turn(now);
        if sets {
            self.set(now + EXPIRES_AFTER);
        }
        sets
    }

    /// The turn has ended, and the loop waits for events.
    #[inline]
    pub fn rest(&self) {
        if self.schedule.rest() {
            self.set(0);
        }
    }

    /// Sets the expiry to this time of the monotonic clock; 0 = never.
    #[cold]
    fn set(&self, at: u64) {
        let nanos =
            |nanos: u64| Timespec { tv_sec: (nanos / 1_000_000_000) as _, tv_nsec: (nanos % 1_000_000_000) as _ };
        let once = Itimerspec { it_interval: nanos(0), it_value: nanos(at) };
        // The timer and the time are valid, so this cannot fail.
        let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &once);
    }
}

/// Waits until the timer of any loop expires, or for `timeout`.
pub(crate) fn wait(timeout: Option<Duration>) -> io::Result<()> {
    let mut events = Vec::with_capacity(EVENTS_MAX);
    let timeout =
        timeout.map(|timeout| Timespec { tv_sec: timeout.as_secs() as _, tv_nsec: timeout.subsec_nanos() as _ });
    match epoll::wait(timers()?, rustix::buffer::spare_capacity(&mut events), timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The epoll set with the timers of all loops. A timer that is closed leaves it.
fn timers() -> io::Result<&'static OwnedFd> {
    static TIMERS: OnceLock<OwnedFd> = OnceLock::new();
    if let Some(timers) = TIMERS.get() {
        return Ok(timers);
    }
    let timers = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    Ok(TIMERS.get_or_init(|| timers))
}

/// Times at which the timer is set and cleared.
#[derive(Default)]
struct Schedule {
    set_at: Cell<u64>,
    /// Turns that begin earlier leave the timer unchanged; 0 = it is not set.
    next_set_at: Cell<u64>,
    /// True if the turn before the one that set it last was so long ago that it has expired, or would have.
    is_sparse: Cell<bool>,
}

impl Schedule {
    /// True if the turn that begins sets the timer.
    #[inline]
    fn begin_turn(&self, now: u64) -> bool {
        if now < self.next_set_at.get() {
            return false;
        }
        self.is_sparse.set(now >= self.set_at.get() + EXPIRES_AFTER);
        self.set_at.set(now);
        self.next_set_at.set(now + SET_EVERY);
        true
    }

    /// True if the loop, which is about to wait, clears it.
    #[inline]
    fn rest(&self) -> bool {
        self.is_sparse.get() && self.next_set_at.replace(0) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// A loop and its timer with a clock of their own.
    #[derive(Default)]
    struct Model {
        schedule: Schedule,
        now: u64,
        calls: u32,
        expires_at: Option<u64>,
        expired_in_vain: u32,
    }

    impl Model {
        /// A turn that begins after a wait of `idle` and takes `length`. Returns its age when the timer expires.
        fn turn(&mut self, idle: u64, length: u64) -> Option<u64> {
            self.now += idle;
            self.expired_in_vain += u32::from(self.expires_at.take_if(|at| *at <= self.now).is_some());
            let began = self.now;
            if self.schedule.begin_turn(began) {
                self.calls += 1;
                self.expires_at = Some(began + EXPIRES_AFTER);
            }
            self.now += length;
            let expired = self.expires_at.take_if(|at| *at <= self.now);
            if self.schedule.rest() {
                self.calls += 1;
                self.expires_at = None;
            }
            expired.map(|at| at - began)
        }
    }

    #[test]
    fn the_timer_expires_in_every_stall_before_it_is_one_and_never_in_a_short_turn() {
        let (mut model, mut random) = (Model { now: MS, ..Model::default() }, 1_u64);
        let mut up_to = |nanos: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % nanos
        };
        for round in 0..100_000 {
            let idle = up_to([1, MS, 4 * MS, 30 * MS][round / 7 % 4]);
            let length = up_to([MS, MS, 2 * MS, 8 * MS, 30 * MS][round % 5]);
            match model.turn(idle, length) {
                Some(age) => assert!(age > 5 * MS && age <= 10 * MS, "{age}"),
                None => assert!(length < 10 * MS, "a turn of {length} was missed"),
            }
        }
    }

    #[test]
    fn the_timer_of_a_busy_loop_is_set_200_times_a_second_and_never_expires() {
        let mut model = Model { now: MS, ..Model::default() };
        (0..100_000).for_each(|_| assert_eq!(model.turn(MS / 100, MS / 20), None));
        assert!(model.calls <= 1 + 6_000 / 5, "{}", model.calls);
        assert_eq!(model.expired_in_vain, 0);
    }

    #[test]
    fn the_timer_of_a_loop_that_is_rarely_busy_does_not_expire_either() {
        let mut model = Model { now: MS, ..Model::default() };
        for idle in [100 * MS, 11 * MS, 2 * MS] {
            (0..1000).for_each(|_| assert_eq!(model.turn(idle, MS / 20), None));
        }
        // At most once, when it becomes so.
        assert!(model.expired_in_vain <= 1, "{}", model.expired_in_vain);
        assert!(model.calls <= 2 * 1000 + 2 * 1000 + 1000, "{}", model.calls);
    }
}
