//! Exit of the worker processes and of the master: graceful, fast, or of the worker processes only (WINCH).
//!
//! The master exits after its last worker process. A fast stop is bounded: processes that still run then are killed.

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

/// Time after which a fast stop sends SIGKILL; nginx's own delays add up to about the same.
const KILL_AFTER: Duration = Duration::from_secs(2);

pub(super) enum Stop {
    Graceful,
    Fast { kill_at: Option<Instant> },
}

/// The last worker process to accept, and our copies of its listening sockets, whose files are removed. They are kept
/// until it stops accepting: closing them is not enough when a process stuck in the kernel has them as well.
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
        // The first in the list: a successor that is not ready yet comes after it.
        let serving = self.serving_worker().map(|worker| worker.pid);
        let is_shared = self.upgrade_is_running();
        let unreachable = self.tell_to_leave(&Message::Quit { is_last: !is_shared }, Signal::QUIT);
        match serving.filter(|pid| !is_shared && !unreachable.contains(pid)) {
            Some(worker) => {
                let listeners = std::mem::take(&mut self.bundle.record.listeners);
                listeners.iter().for_each(|listener| system::remove_socket_file(listener, &*self.log));
                self.last_accepting = Some(LastAccepting { worker, listeners });
            }
            // Sockets that only this binary opened are handled at the end, if a stuck process has them as well.
            None if is_shared && self.is_any_held() => {}
            // No process accepts, or none could report that it has stopped accepting.
            None => self.close_listeners(),
        }
    }

    /// Called when a worker process has stopped accepting or is gone. If it was the last one, its addresses are free
    /// from now on.
    pub(super) fn handle_accepting_ended(&mut self, pid: Pid) {
        if let Some(worker) = self.worker_mut(pid) {
            // All of its loops have served, even if it was told to exit before it could report that it is ready.
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
            worker.phase = WorkerPhase::Serving; // including one that drains
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
            // The new process was only to replace one that had lost its link, with the same configuration.
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

    /// Tells every worker process that is not leaving already to exit. Returns those that had to be signalled.
    fn tell_to_leave(&mut self, message: &Message, signal: Signal) -> Vec<Pid> {
        let successor = self.successor.clone();
        self.send_away(|worker| worker.phase != WorkerPhase::Leaving, message, signal, successor.as_ref())
    }

    /// Tells all other worker processes to exit and to pass their idle connections to this one.
    pub(super) fn retire_all_but(&mut self, pid: Pid) {
        let successor = self.worker_mut(pid).and_then(|worker| {
            let (successor, arrivals) = handover::pair().ok()?;
            worker.link.as_mut()?.send_with(&Message::Arrivals, arrivals.descriptor()).ok()?;
            // Its loops serve already and will take them.
            arrivals.announce();
            Some(successor)
        });
        let quit = Message::Quit { is_last: false };
        self.send_away(|worker| worker.pid != pid, &quit, Signal::QUIT, successor.as_ref());
    }

    /// Tells the chosen worker processes to exit, by signal if the link is gone. Returns those that had to be
    /// signalled.
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
        // As in nginx, the files stay while another binary uses them.
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
