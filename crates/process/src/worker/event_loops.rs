//! The event loops of the worker process: their phases, and the handling of their events.
//!
//! ```text
//!   SettingUp ──► Idle ──► Serving ──► Draining ──► Stopping ──► gone
//!       └───────────┴─────────────────────────────────┘ not needed, or the process stops
//! ```
//!
//! The control thread never waits for a loop: it leaves orders for it, and results arrive as events
//! (`process/loops.rs`).

use gale_base::log_level::Level;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::reload::Reload;
use super::stop::{LOOPS_STOP_TIMEOUT, Stop};
use super::{Control, EXIT_FATAL, Event, Origin};
use crate::errors::errno_text;
use crate::link::Message;
use crate::listen;
use crate::loops::{self, Change, LoopEvent, LoopHandle, Order};
use crate::program::{Program, WorkerSlot};
use crate::sandbox;

pub(super) struct Loop<C> {
    pub id: u64,
    pub worker: usize,
    pub handle: LoopHandle<C>,
    pub phase: LoopPhase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LoopPhase {
    /// Its thread is setting it up.
    SettingUp,
    /// Set up, but not yet serving.
    Idle,
    /// Serving, or told to start serving.
    Serving,
    /// Finishing its connections; it may still accept until `stopped_accepting`. `until` is the deadline.
    Draining {
        until: Option<Instant>,
        stopped_accepting: bool,
        /// True once its connections were told to close.
        expired: bool,
    },
    /// Told to end.
    Stopping,
}

impl<P: Program> Control<P> {
    pub(super) fn spawn_loop(&mut self, worker: usize, configuration: &Arc<P::Configuration>) -> io::Result<u64> {
        let id = self.next_loop;
        self.next_loop += 1;
        let events = Arc::clone(&self.events);
        let report = move |event| events.push(Event::Loop(id, event));
        let handle = loops::spawn(Arc::clone(&self.program), worker, Arc::clone(configuration), report)?;
        self.loops.push(Loop { id, worker, handle, phase: LoopPhase::SettingUp });
        Ok(id)
    }

    pub(super) fn handle_loop_event(&mut self, id: u64, event: LoopEvent) {
        let Some(index) = self.loops.iter().position(|each| each.id == id) else {
            return;
        };
        match event {
            LoopEvent::Ready if self.loops[index].phase == LoopPhase::SettingUp => {
                self.loops[index].phase = LoopPhase::Idle;
                if self.started {
                    self.continue_growing(Some(id));
                } else if self.loops.iter().all(|each| each.phase == LoopPhase::Idle) {
                    self.start_loops();
                }
            }
            LoopEvent::Ready => {}
            LoopEvent::Started { number, result: Ok(()) } if self.started => {
                self.continue_committing(Some((number, id)));
            }
            LoopEvent::Started { result: Ok(()), .. } => self.handle_started(),
            LoopEvent::Started { number, result: Err(message) } if self.started => {
                self.log.write(Level::Alert, &message);
                self.loops[index].handle.order(Order::Stop);
                self.loops[index].phase = LoopPhase::Stopping;
                self.continue_committing(Some((number, id)));
            }
            LoopEvent::Started { result: Err(message), .. } => self.fail_to_start(message),
            LoopEvent::Committed { number } => self.continue_committing(Some((number, id))),
            LoopEvent::Reopened => self.check_reopening(Some(id)),
            LoopEvent::Draining => self.handle_draining(index),
            LoopEvent::Drained => {
                self.loops[index].handle.order(Order::Stop);
                self.loops[index].phase = LoopPhase::Stopping;
            }
            LoopEvent::Exited(result) => self.handle_exited(index, result),
        }
    }

    fn start_loops(&mut self) {
        let workers = self.loops.len();
        let number = self.next_change;
        self.next_change += 1;
        for each in &mut self.loops {
            let slot = WorkerSlot { worker: each.worker, workers };
            each.handle.order(Order::Start(Change { number, slot, configuration: Arc::clone(&self.configuration) }));
            each.phase = LoopPhase::Serving;
        }
        self.starting = workers;
    }

    /// Counts the loops that have started; reports readiness after the last one.
    fn handle_started(&mut self) {
        self.starting -= 1;
        if self.stop.is_none() && self.starting == 0 {
            self.started = true;
            self.forbid_rings();
            self.tell_settled();
            self.receive_arrivals();
            self.redirect_standard_error();
            let generation = self.bundle.generation;
            self.tell_master(&Message::Ready { generation });
            if let Origin::Single(single) = &mut self.origin {
                if let Some(waiting) = single.waiting.take() {
                    waiting.release();
                }
                single.notifier.ready();
            }
            self.finish_reload();
        }
    }

    /// Forbids new io_uring rings under `sandbox on`, since the loops have theirs. A reload that needs more loops uses
    /// another process for them.
    fn forbid_rings(&self) {
        if let Origin::Master(_) = self.origin
            && self.bundle.settings.sandbox.forbids_rings()
            && let Err(error) = sandbox::forbid_rings()
        {
            self.log.write(Level::Alert, &format!("seccomp() failed{}", errno_text(&error)));
        }
    }

    /// Tells the serving loops that all of them use the current configuration.
    pub(super) fn tell_settled(&self) {
        for each in self.loops.iter().filter(|each| each.phase == LoopPhase::Serving) {
            if !each.handle.order(Order::Settled) {
                self.log.write(Level::Alert, &format!("worker {} accepts no commands", each.worker));
            }
        }
    }

    /// Has the loops serve the idle connections that other processes pass on, once all of them serve.
    pub(super) fn receive_arrivals(&self) {
        let Some(arrivals) = self.arrivals.as_ref().filter(|_| self.started) else { return };
        for each in self.loops.iter().filter(|each| each.phase == LoopPhase::Serving) {
            each.handle.order(Order::Receive(arrivals.clone()));
        }
    }

    fn handle_draining(&mut self, index: usize) {
        if let LoopPhase::Draining { stopped_accepting, .. } = &mut self.loops[index].phase {
            *stopped_accepting = true;
        }
        self.check_accepting();
    }

    /// Closes the sockets when no loop accepts any more, so that new connections are refused instead of being queued.
    /// The master is told each time that it asks, because it may have copies.
    pub(super) fn check_accepting(&mut self) {
        let accepts = |each: &Loop<_>| match each.phase {
            LoopPhase::Draining { stopped_accepting, .. } => !stopped_accepting,
            LoopPhase::Stopping => false,
            _ => true,
        };
        if matches!(self.stop, Some(Stop::Graceful { .. })) && !self.loops.iter().any(accepts) {
            self.detach_all();
            self.tell_master(&Message::AcceptingEnded);
        }
    }

    /// Closes all listening sockets, including copies that stuck threads hold.
    pub(super) fn detach_all(&self) {
        let sockets = self.bundle.record.listeners.iter().flat_map(|listener| listener.sockets.iter().cloned());
        if let Err(error) = listen::detach(&self.null, sockets) {
            self.log.write(Level::Alert, &format!("closing listening sockets failed{}", errno_text(&error)));
        }
    }

    /// Enforces the drain deadline of each loop: its connections are first closed in order; a little later the loop
    /// ends with the remaining ones.
    pub(super) fn check_draining(&mut self) {
        let now = Instant::now();
        for each in &mut self.loops {
            let LoopPhase::Draining { until, expired, .. } = &mut each.phase else {
                continue;
            };
            if until.is_none_or(|until| until > now) {
                continue;
            }
            if !std::mem::replace(expired, true) && each.handle.order(Order::Expire { configuration: None }) {
                *until = Some(now + LOOPS_STOP_TIMEOUT);
            } else {
                each.handle.order(Order::Stop);
                each.phase = LoopPhase::Stopping;
            }
        }
    }

    fn handle_exited(&mut self, index: usize, result: Result<(), String>) {
        let ended = self.loops.remove(index);
        self.check_reopening(Some(ended.id));
        let message = match result {
            Err(message) => message,
            Ok(()) if ended.phase == LoopPhase::Stopping || self.stop.is_some() => return,
            Ok(()) => format!("event loop of worker {} ended unexpectedly", ended.worker),
        };
        match self.reload.take() {
            reload if self.stop.is_some() || ended.phase == LoopPhase::Stopping => {
                self.reload = reload;
                self.log.write(Level::Alert, &message);
                self.check_accepting();
            }
            Some(Reload::Growing { bundle, .. }) if ended.phase == LoopPhase::SettingUp => {
                self.give_up_growing(&bundle, message);
            }
            _ if !self.started => self.fail_to_start(message),
            // The connections of that loop are lost, and its share of the sockets, too: only a new process helps.
            _ => {
                self.log.write(Level::Alert, &message);
                self.exit_code = EXIT_FATAL;
                self.begin_fast_stop();
            }
        }
    }
}
