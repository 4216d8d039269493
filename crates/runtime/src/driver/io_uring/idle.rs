//! Idle connections: a receive that got no data for a whole period is replaced by a poll.
//!
//! An armed receive costs the kernel about 870 bytes, a poll 270. There is no timer per connection. Time is counted in
//! periods, and a receive remembers the one in which it was armed or last got data; when a new period begins, a sweep
//! visits all slots, some in each turn. Without armed receives there is no sweep and no wake-up for it. Since each
//! sweep visits every slot, one byte suffices to count periods.
//!
//! The poll also reports an end of the stream that the receive has missed: from Linux 6.17 on, until the fix, that of a
//! Unix socket right behind data (<https://github.com/axboe/liburing/issues/1549>).

use std::cell::Cell;
use std::time::Duration;

use super::connection::{Connection, Receive};
use crate::environment::Environment;
use crate::executor::slots::{Key, Slots};

/// Slots that are visited per turn: some microseconds.
const SLOTS_PER_TURN: u32 = 1024;

/// Time that an idle loop sleeps between two steps of a sweep.
const PAUSE: Duration = Duration::from_millis(1);

/// Cursor while no sweep runs.
const DONE: u32 = u32::MAX;

pub(super) struct Sweep {
    /// In nanoseconds; 0 = connections never count as idle.
    period_length: u64,
    period: Cell<u8>,
    /// In nanoseconds of the loop's clock.
    period_ends: Cell<u64>,
    cursor: Cell<u32>,
    /// Receives in flight.
    pub armed: Cell<usize>,
    /// Receives that were replaced by a poll.
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

    /// Visits some slots, calls `found` for each idle connection, whose receive is ended, and returns the longest time
    /// until the next step. `None` = no limit. `may_arm` = receives may be submitted before the wait.
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
                if connection.in_flight.is_idle(period) && connection.end_receive(Receive::EndingIdle) {
                    self.ended.update(|ended| ended + 1);
                    found(key, connection);
                }
            });
        }
        // Virtual time stands still while the loop waits.
        (!is_virtual).then(|| match self.cursor.get() {
            DONE => Duration::from_nanos(self.period_ends.get() - now),
            _ => PAUSE,
        })
    }
}
