//! Worker processes that are stuck in the kernel while they exit.
//!
//! A process has exited only when the kernel reports it. It cannot do so while a thread waits for a file system that
//! never answers: even SIGKILL does not interrupt that wait, and until then the process keeps its link and every other
//! descriptor whose closing would reveal its death. So once a second the master checks whether its worker processes are
//! alive. A worker that was found dead, has sent its last message, or was killed, and still exists after a timeout, is
//! treated as gone, with an alert.
//!
//! ```text
//!   alive ── last word, killed ──► ending, 3 s ──┐
//!     └───── found dead ─────────► ending, 1 s ──┴─► held: not waited for, a successor serves ──► gone
//! ```

use gale_base::log_level::Level;
use std::fs;
use std::time::{Duration, Instant};

use rustix::process::{Pid, WaitStatus};

use super::Master;
use super::workers::{WorkerPhase, WorkerProcess};
use crate::link::Message;
use crate::program::Program;

/// Interval between checks of the worker processes. Each check reads one file of procfs per process.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Maximum time for a process to exit when nothing in the kernel holds it: closing its descriptors and freeing its
/// memory.
const END_TIMEOUT: Duration = Duration::from_secs(3);
/// The same, counted from when it was found dead. It serves no more, so a successor that comes too early does no harm.
const DEAD_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of stuck threads named in the log.
const HELD_NAMED_MAX: usize = 4;

/// A worker process that is exiting, and the time from which it is treated as gone even if the kernel has not reported
/// it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ending {
    pub gone_at: Instant,
    /// True if the process was found dead by a check, without any notice before.
    is_found: bool,
}

/// State of a process that has died but not exited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Remains {
    /// Its main thread has exited, but another one has not.
    Threads,
    /// It dumps core or is about to, in which all threads take part.
    Core,
}

impl WorkerProcess {
    /// Starts the exit timeout: the process has announced its exit or was killed.
    pub fn expect_gone(&mut self, now: Instant) {
        self.ending.get_or_insert(Ending { gone_at: now + END_TIMEOUT, is_found: false });
    }
}

impl<P: Program> Master<P> {
    pub(super) fn handle_ending(&mut self, pid: Pid) {
        if let Some(worker) = self.worker_mut(pid) {
            worker.expect_gone(Instant::now());
        }
    }

    /// True if a process stuck in the kernel has our sockets, including one left behind by an old binary.
    pub(super) fn is_any_held(&self) -> bool {
        !self.held.is_empty() || !self.left_behind.is_empty()
    }

    /// Processes that a new binary must know of: stuck ones, and those that are exiting and may get stuck. The new
    /// binary drops those that have exited by then.
    pub(super) fn all_held(&self) -> Vec<Pid> {
        let ending = self.workers.iter().filter(|worker| worker.ending.is_some()).map(|worker| worker.pid);
        self.held.iter().chain(&self.left_behind).copied().chain(ending).collect()
    }

    /// Time of the next check, or `None` if there is nothing to check.
    pub(super) fn look_at(&self) -> Option<Instant> {
        let is_anything = self.is_any_held() || self.workers.iter().any(|worker| worker.ending.is_none());
        is_anything.then_some(self.next_look)
    }

    /// Finds dead processes, and gives up those whose exit timeout has passed.
    pub(super) fn check_ending(&mut self, now: Instant) {
        if self.look_at().is_some_and(|at| at <= now) {
            self.next_look = now + LOOK_EVERY;
            self.look(now);
        }
        let is_over = |worker: &WorkerProcess| worker.ending.is_some_and(|ending| ending.gone_at <= now);
        // First reap those that have exited but were not reaped yet.
        if self.workers.iter().any(is_over) {
            self.reap();
        }
        while let Some(position) = self.workers.iter().position(is_over) {
            let worker = self.workers.remove(position);
            self.give_up(&worker);
        }
    }

    fn look(&mut self, now: Instant) {
        for worker in self.workers.iter_mut().filter(|worker| worker.ending.is_none()) {
            if remains(worker.pid).is_some() {
                worker.ending = Some(Ending { gone_at: now + DEAD_TIMEOUT, is_found: true });
            }
        }
        // Not children of this process, so no SIGCHLD reports their exit.
        self.left_behind.retain(|pid| remains(*pid).is_some());
        if self.is_any_held() {
            self.have_connections_looked_for();
        }
    }

    /// Has the worker processes poll their listening sockets: the kernel may have reported a new connection only to an
    /// event loop of a stuck process.
    fn have_connections_looked_for(&mut self) {
        for worker in self.workers.iter_mut().filter(|worker| worker.phase == WorkerPhase::Serving) {
            if let Some(link) = &mut worker.link {
                // A lost link is found and logged when it is read.
                let _ = link.send_unless_waiting(&Message::Look);
            }
        }
    }

    fn give_up(&mut self, worker: &WorkerProcess) {
        let (pid, remains) = (worker.pid, remains(worker.pid));
        if remains.is_none() {
            // Ends the process if it is not stuck in the kernel. It has not been reaped, so the pid is still its own.
            self.kill(pid, rustix::process::Signal::KILL);
        }
        let what = match worker.ending {
            Some(Ending { is_found: true, .. }) => "has died, but has not exited within a second".to_owned(),
            _ => format!("has not exited within {} seconds", END_TIMEOUT.as_secs()),
        };
        let core = if remains == Some(Remains::Core) { ", it is dumping core" } else { "" };
        let held = match held_threads(pid) {
            // The thread that writes the core waits for the disk, too.
            names if names.len() <= usize::from(remains == Some(Remains::Core)) => String::new(),
            names => {
                format!(", the kernel holds its {}, as for a file system that does not respond", names.join(", "))
            }
        };
        let text = format!("worker process {pid} {what}{core}{held}; not waiting any longer");
        self.log.write(Level::Alert, &text);
        self.held.push(pid);
        self.handle_worker_exit(worker);
    }

    /// Logs the exit of a process that was already given up like any other exit.
    pub(super) fn take_leave_of_held(&mut self, pid: Pid, status: WaitStatus) {
        if let Some(position) = self.held.iter().position(|held| *held == pid) {
            self.held.swap_remove(position);
            self.log_exit("worker process", pid, status);
        }
    }
}

/// Returns the state of a process if it has died; `None` if it lives, or without procfs.
fn remains(pid: Pid) -> Option<Remains> {
    remains_in(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

/// Parses `/proc/PID/status`, which describes the main thread.
fn remains_in(status: &str) -> Option<Remains> {
    let value = |name| Some(status.lines().find_map(|line| line.strip_prefix(name))?.trim_start());
    if value("State:").is_some_and(|state| state.starts_with(['Z', 'X'])) {
        Some(Remains::Threads)
    } else if value("CoreDumping:") == Some("1") {
        Some(Remains::Core)
    } else {
        None
    }
}

/// Names of the threads of a process that are in an uninterruptible wait (state D).
fn held_threads(pid: Pid) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let stats = tasks.filter_map(|task| fs::read_to_string(task.path().join("stat")).ok());
    let name = |stat: String| {
        // Format: "number (name) state …"; the name may contain any character.
        let (name, rest) = stat.split_once('(')?.1.rsplit_once(") ")?;
        rest.starts_with('D').then(|| format!("thread \"{name}\""))
    };
    stats.filter_map(name).take(HELD_NAMED_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dead_are_told_from_the_living() {
        let status =
            |state: &str, more: &str| format!("Name:\tgale Z\nUmask:\t0022\nState:\t{state}\nTgid:\t7\n{more}");
        assert_eq!(remains_in(&status("S (sleeping)", "CoreDumping:\t0\n")), None);
        assert_eq!(remains_in(&status("D (disk sleep)", "CoreDumping:\t0\n")), None);
        assert_eq!(remains_in(&status("T (stopped)", "")), None);
        assert_eq!(remains_in(&status("D (disk sleep)", "CoreDumping:\t1\n")), Some(Remains::Core));
        assert_eq!(remains_in(&status("Z (zombie)", "Threads:\t2\n")), Some(Remains::Threads));
        assert_eq!(remains_in(""), None);
    }

    #[test]
    fn a_child_that_was_not_reaped_is_dead_and_we_are_not() {
        let mut child = std::process::Command::new("true").spawn().expect("a process");
        let pid = Pid::from_child(&child);
        let handle = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).expect("not reaped");
        let mut polled = [rustix::event::PollFd::new(&handle, rustix::event::PollFlags::IN)];
        rustix::io::retry_on_intr(|| rustix::event::poll(&mut polled, None)).expect("it ends");
        assert_eq!(remains(pid), Some(Remains::Threads));
        child.wait().expect("reaped");
        assert_eq!(remains(rustix::process::getpid()), None);
    }
}
