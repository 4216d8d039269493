//! Idle connections: a receive that has got nothing for a whole period gives way to a poll.
//!
//! An armed receive costs the kernel about 870 bytes, a poll 270. There is no timer per connection: time is counted in
//! periods, a receive remembers the one in which it was armed or got something, and when a new period begins all slots
//! are looked at, so many per turn. Without armed receives nothing is looked at and nobody is woken for it. Periods are
//! counted in a byte: who is looked at in each need not remember more.
//!
//! The poll also tells of an end that the receive has missed: from Linux 6.17 on, until that was mended, of a Unix
//! socket's that comes right behind data (<https://github.com/axboe/liburing/issues/1549>).

use std::cell::Cell;
use std::time::Duration;

use super::connection::{Connection, Receive};
use super::operation::Op;
use crate::environment::Environment;
use crate::executor::slots::{Key, Slots};

/// Slots that are looked at per turn: some microseconds.
const SLOTS_PER_TURN: u32 = 1024;

/// How long an idle loop sleeps between two looks of one sweep.
const PAUSE: Duration = Duration::from_millis(1);

/// No sweep is under way.
const DONE: u32 = u32::MAX;

pub(super) struct Sweep {
    /// In nanoseconds; 0 = connections never count as idle.
    period_length: u64,
    period: Cell<u8>,
    /// In nanoseconds of the loop's clock.
    period_ends: Cell<u64>,
    /// The slot to go on with.
    cursor: Cell<u32>,
    /// Receives in flight.
    pub armed: Cell<usize>,
    /// Receives that gave way to a poll.
    pub ended: Cell<u64>,
}

impl Sweep {
    pub fn new(idle_after: Option<Duration>) -> Self {
        let period_length = idle_after.map_or(0, |after| u64::try_from(after.as_nanos()).unwrap_or(0).max(1));
        Sweep {
            period_length,
            period: Cell::new(0),
            period_ends: Cell::new(0),
            cursor: Cell::new(DONE),
            armed: Cell::new(0),
            ended: Cell::new(0),
        }
    }

    pub fn period(&self) -> u8 {
        self.period.get()
    }

    /// Ends the receives of some idle connections (`found` gets each) and returns how long to wait at most, for the
    /// sake of the others. `None` = as long as it pleases. `may_arm` = receives may be submitted before the wait.
    pub fn run(
        &self,
        may_arm: bool,
        connections: &mut Slots<Connection>,
        mut found: impl FnMut(Key, &mut Connection),
    ) -> Option<Duration> {
        if self.period_length == 0 {
            return None;
        }
        let (now, is_virtual) =
            Environment::try_with(|environment| (environment.clock.now().as_nanos(), environment.clock.is_virtual()))?;
        if now >= self.period_ends.get() {
            let period = now / self.period_length;
            self.period.set(period as u8);
            self.period_ends.set((period + 1).saturating_mul(self.period_length));
            self.cursor.set(0);
        }
        if self.armed.get() == 0 && !may_arm {
            self.cursor.set(DONE);
            return None;
        }
        let period = self.period.get();
        let begin = self.cursor.get();
        if begin != DONE {
            self.cursor.set(if begin + SLOTS_PER_TURN < connections.end() { begin + SLOTS_PER_TURN } else { DONE });
            connections.for_each_in(begin..begin + SLOTS_PER_TURN, |key, connection| {
                let is_idle = connection.in_flight.has(Op::Recv) && period.wrapping_sub(connection.period) >= 2;
                if is_idle && connection.end_receive(Receive::EndingIdle) {
                    self.ended.update(|ended| ended + 1);
                    found(key, connection);
                }
            });
        }
        // Virtual time does not pass while the loop waits.
        (!is_virtual).then(|| match self.cursor.get() {
            DONE => Duration::from_nanos(self.period_ends.get() - now),
            _ => PAUSE,
        })
    }
}
