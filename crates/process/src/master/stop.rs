//! How worker processes are told to leave, and how the master ends: graceful, fast, or only at rest (WINCH).
//!
//! The master ends when its last worker process has. A fast stop is bounded: who has not ended then is killed.

use gale_base::log_level::Level;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use super::Master;
use super::reload::Reload;
use super::workers::{WorkerPhase, WorkerProcess};
use crate::control::Ending;
use crate::errors::{IN_FORCE, OLD_STAYS};
use crate::handover::{self, Successor};
use crate::link::{Link, Message};
use crate::listen::{self, ListenerHandle, OpenedBy};
use crate::program::Program;
use crate::{pid_file, system};

/// A fast stop turns to SIGKILL after this long; nginx's own delays add up to about the same.
const KILL_AFTER: Duration = Duration::from_secs(2);

pub(super) enum Stop {
    Graceful,
    Fast { kill_at: Option<Instant> },
}

/// The worker process that is the last to accept, and our copies of what it accepts from, whose files are removed. They
/// are kept until it accepts no more: closing is not enough when a process that the kernel holds has them as well.
pub(super) struct LastAccepting {
    worker: Pid,
    listeners: Vec<ListenerHandle>,
}

impl<P: Program> Master<P> {
    pub(super) fn begin_graceful_stop(&mut self) {
        if self.stop.is_some() {
            return;
        }
        self.notifier.stopping();
        self.stop = Some(Stop::Graceful);
        self.drop_reload();
        // The first: a successor that is not ready yet comes after it.
        let serving = self.serving_worker().map(|worker| worker.pid);
        let is_shared = self.upgrade_is_running();
        let unreachable = self.tell_to_leave(&Message::Quit { is_last: !is_shared }, Signal::QUIT);
        match serving.filter(|pid| !is_shared && !unreachable.contains(pid)) {
            Some(worker) => {
                let listeners = std::mem::take(&mut self.bundle.record.listeners);
                listeners.iter().for_each(|listener| system::remove_socket_file(listener, &*self.log));
                self.last_accepting = Some(LastAccepting { worker, listeners });
            }
            // What only this binary opened is dealt with at the end, if a dead process has it as well.
            None if is_shared && self.is_any_held() => {}
            // Nobody accepts, or nobody would tell us of the end of it.
            None => self.close_listeners(),
        }
    }

    /// This worker process accepts no more, or is gone. If it was the last, the addresses are free from now on.
    pub(super) fn handle_accepting_ended(&mut self, pid: Pid) {
        if let Some(worker) = self.worker_mut(pid) {
            // All of its loops have served, also of one that was told to leave before it could say that it is ready.
            worker.kill_at = None;
        }
        let last = self.last_accepting.take_if(|last| last.worker == pid);
        if let Some(last) = last.filter(|_| self.is_any_held()) {
            last.listeners.iter().for_each(|listener| listen::shut_down(listener));
        }
    }

    pub(super) fn begin_fast_stop(&mut self) {
        if matches!(self.stop, Some(Stop::Fast { .. })) {
            return;
        }
        if self.stop.is_none() {
            self.notifier.stopping();
        }
        self.drop_reload();
        self.stop = Some(Stop::Fast { kill_at: Some(Instant::now() + KILL_AFTER) });
        for worker in &mut self.workers {
            worker.phase = WorkerPhase::Serving; // also one that drains
        }
        self.tell_to_leave(&Message::Terminate, Signal::TERM);
    }

    pub(super) fn rest(&mut self) {
        if self.stop.is_some() {
            return;
        }
        self.resting = true;
        self.respawn.at = None;
        let end = match &self.reload {
            Some(Reload::Committing { .. }) => Some((Level::Notice, IN_FORCE)),
            // A lost one was to be replaced with what it had.
            Some(Reload::Replacing { bundle, .. }) if bundle.generation == self.bundle.generation => None,
            Some(_) => Some((Level::Error, OLD_STAYS)),
            None => None,
        };
        if let Some((Level::Notice, _)) = end {
            self.control.reload_ended(Ending::Done, "");
        }
        self.drop_reload();
        if let Some((level, text)) = end {
            self.log.write(level, text);
            self.notifier.ready();
        }
        self.tell_to_leave(&Message::Quit { is_last: false }, Signal::QUIT);
    }

    /// Tells every worker process that is not leaving already. Returns those that could only be told by signal.
    fn tell_to_leave(&mut self, message: &Message, signal: Signal) -> Vec<Pid> {
        let successor = self.successor.clone();
        self.send_away(|worker| worker.phase != WorkerPhase::Leaving, message, signal, successor.as_ref())
    }

    /// The other worker processes leave, and pass what they can to this one.
    pub(super) fn retire_all_but(&mut self, pid: Pid) {
        let successor = self.worker_mut(pid).and_then(|worker| {
            let (successor, arrivals) = handover::pair().ok()?;
            worker.link.as_mut()?.send_with(&Message::Arrivals, arrivals.descriptor()).ok()?;
            // It has loops that serve: they will look there.
            arrivals.announce();
            Some(successor)
        });
        let quit = Message::Quit { is_last: false };
        self.send_away(|worker| worker.pid != pid, &quit, Signal::QUIT, successor.as_ref());
    }

    /// Tells those chosen; by signal when the link is gone. Returns these.
    fn send_away(
        &mut self,
        is_chosen: impl Fn(&WorkerProcess) -> bool,
        message: &Message,
        signal: Signal,
        successor: Option<&Successor>,
    ) -> Vec<Pid> {
        let mut unreachable = Vec::new();
        for worker in self.workers.iter_mut().filter(|worker| is_chosen(worker)) {
            worker.phase = WorkerPhase::Leaving;
            let tell = |link: &mut Link| {
                if let Some(successor) = successor {
                    link.send_with(&Message::Successor, successor.descriptor())?;
                }
                link.send(message)
            };
            if worker.link.as_mut().is_none_or(|link| tell(link).is_err()) {
                unreachable.push(worker.pid);
            }
        }
        for pid in &unreachable {
            self.kill(*pid, signal);
        }
        unreachable
    }

    fn close_listeners(&mut self) {
        // As nginx: not while another binary uses the files.
        let shared = self.upgrade_is_running();
        for listener in std::mem::take(&mut self.bundle.record.listeners) {
            if !shared || (listener.opened_by == OpenedBy::Us && self.new_binary.is_none()) {
                system::remove_socket_file(&listener, &*self.log);
                if self.is_any_held() {
                    listen::shut_down(&listener);
                }
            }
        }
    }

    pub(super) fn leave(&mut self) {
        let path = if self.new_binary.is_some() { pid_file::old_path(&self.pid_path) } else { self.pid_path.clone() };
        pid_file::remove(&path, &*self.log);
        self.close_listeners();
        self.log.write(Level::Notice, "exit");
        self.program.finish();
    }
}
