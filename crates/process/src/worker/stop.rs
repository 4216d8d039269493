//! Exit of the worker process: graceful or fast, both bounded in case loops are stuck.
//!
//! ```text
//!   (waits for a successor)
//!       ▼
//!   Graceful (loops drain) ──► Finishing (the program's end, on a thread) ──► exit
//!       │ over time                │
//!       └──► Fast (loops end) ─────┘
//! ```

use gale_base::log_level::Level;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::event_loops::LoopPhase;
use super::{Control, EXIT_FATAL, Event, Origin};
use crate::errors::{Report, say};
use crate::handover::Successor;
use crate::link::Message;
use crate::loops::Order;
use crate::pid_file;
use crate::program::Program;
use crate::system;

/// Maximum delay of a graceful stop for a successor that has started but does not serve yet, for example because it
/// reads a large configuration. A binary without this protocol never reports that it serves.
const SUCCESSOR_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that a fast stop waits for the loops to end, so that their resources are dropped in order.
pub(super) const LOOPS_STOP_TIMEOUT: Duration = Duration::from_millis(500);
/// Time that it then waits for `Program::finish`.
const FINISH_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) enum Stop {
    /// Connections finish; `until` is `worker_shutdown_timeout`.
    Graceful { until: Option<Instant> },
    /// Loops are ending.
    Fast { until: Instant },
    /// `Program::finish` runs.
    Finishing { until: Instant },
}

impl<P: Program> Control<P> {
    pub(super) fn fail_to_start(&mut self, message: String) {
        self.log.write(Level::Emerg, &message);
        if let Origin::Single(_) = self.origin {
            say(&format!("{}: [emerg] {message}\n", self.bundle.request.program));
        }
        let generation = self.bundle.generation;
        self.tell_refused(generation, Report::new(Level::Emerg, message));
        self.exit_code = EXIT_FATAL;
        self.begin_fast_stop();
    }

    /// Starts a graceful stop. `is_last`: no other process accepts on the sockets afterwards. Otherwise the stop waits
    /// for a successor that is still starting, so that it gets the idle connections.
    pub(super) fn begin_graceful_stop(&mut self, is_last: bool) {
        if self.stop.is_some() {
            return;
        }
        if !is_last && self.leave_at.is_none() && self.awaits_successor() {
            self.leave_at = Some(Instant::now() + SUCCESSOR_TIMEOUT);
            return;
        }
        self.leave_at = None;
        // During the start, one loop may have clients before another one serves.
        if !self.loops.iter().any(|each| each.phase == LoopPhase::Serving) {
            return self.begin_fast_stop();
        }
        self.log.write(Level::Notice, "gracefully shutting down");
        // A master that did not order the stop starts a successor at once.
        self.tell_master(&Message::Leaving);
        if let Origin::Single(single) = &self.origin {
            single.notifier.stopping();
        }
        // A binary without this protocol takes no connections.
        let successor = self.successor.take().filter(|successor| !is_last && successor.is_there());
        let until = self.bundle.settings.shutdown_timeout.map(|timeout| Instant::now() + timeout);
        self.stop = Some(Stop::Graceful { until });
        for each in &mut self.loops {
            match each.phase {
                LoopPhase::Serving => {
                    each.handle.order(Order::Drain { is_last, successor: successor.clone() });
                    each.phase = LoopPhase::Draining { until, stopped_accepting: false, expired: false };
                }
                LoopPhase::SettingUp | LoopPhase::Idle => {
                    each.handle.order(Order::Stop);
                    each.phase = LoopPhase::Stopping;
                }
                LoopPhase::Draining { .. } | LoopPhase::Stopping => {}
            }
        }
    }

    fn awaits_successor(&self) -> bool {
        self.successor.as_ref().is_some_and(Successor::is_awaited)
    }

    /// Starts the stop when the successor serves, is gone, or takes too long.
    pub(super) fn check_leaving(&mut self) {
        if self.leave_at.is_some_and(|at| at <= Instant::now() || !self.awaits_successor()) {
            self.begin_graceful_stop(false);
        }
    }

    pub(super) fn begin_fast_stop(&mut self) {
        if matches!(self.stop, Some(Stop::Fast { .. } | Stop::Finishing { .. })) {
            return;
        }
        self.leave_at = None;
        if let Origin::Single(single) = &self.origin {
            single.notifier.stopping();
        }
        self.log.write(Level::Notice, "exiting");
        self.stop_loops();
        self.stop = Some(Stop::Fast { until: Instant::now() + LOOPS_STOP_TIMEOUT });
    }

    fn stop_loops(&mut self) {
        for each in &mut self.loops {
            each.handle.order(Order::Stop);
            each.phase = LoopPhase::Stopping;
        }
    }

    /// Advances the stop; true when the process is to exit.
    pub(super) fn check_stop(&mut self) -> bool {
        let now = Instant::now();
        match self.stop {
            None => false,
            Some(Stop::Graceful { until }) => {
                // Loops have their own deadline, see `check_draining`; this one is for a stuck loop.
                let until = until.map(|until| until + 2 * LOOPS_STOP_TIMEOUT);
                let timed_out = until.is_some_and(|until| until <= now);
                if self.loops.is_empty() {
                    self.log.write(Level::Notice, "exiting");
                    self.begin_finishing();
                } else if timed_out {
                    self.begin_fast_stop();
                }
                false
            }
            Some(Stop::Fast { until }) => {
                if self.loops.is_empty() || until <= now {
                    self.begin_finishing();
                }
                false
            }
            Some(Stop::Finishing { until }) => until <= now,
        }
    }

    fn begin_finishing(&mut self) {
        let (program, events) = (Arc::clone(&self.program), Arc::clone(&self.events));
        let spawned = thread::Builder::new().name("finish".into()).spawn(move || {
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| program.finish()));
            events.push(Event::Finished);
        });
        let wait = if spawned.is_ok() { FINISH_TIMEOUT } else { Duration::ZERO };
        self.stop = Some(Stop::Finishing { until: Instant::now() + wait });
    }

    pub(super) fn leave_single(&self) {
        pid_file::remove(&self.bundle.settings.pid_path, &*self.log);
        for listener in &self.bundle.record.listeners {
            system::remove_socket_file(listener, &*self.log);
        }
        self.log.write(Level::Notice, "exit");
        self.program.finish();
    }
}
