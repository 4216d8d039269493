//! The end of worker processes that the kernel holds.
//!
//! A process is gone when the kernel says so. That it cannot do while one of its threads waits for a file system that
//! has taken a request and never answers: not even SIGKILL ends that, and until then the process keeps its link and
//! everything else that would tell of its death. So once a second the master looks whether its worker processes are
//! alive, and who was found dead, has said its last word, or was killed, and is still there after a while, is counted
//! as gone, with an alert.
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

/// How often it is looked whether worker processes are alive. One look reads a file of procfs.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Longest time that the end of a process takes, when nothing in the kernel holds it: dropping what it has, and freeing
/// its memory.
const END_TIMEOUT: Duration = Duration::from_secs(3);
/// The same from when it was found dead. Nobody serves then, and a successor that comes too early does no harm.
const DEAD_TIMEOUT: Duration = Duration::from_secs(1);
/// So many threads that hold a process up are named.
const HELD_NAMED_MAX: usize = 4;

/// A worker process that ends, and that counts as gone from a moment on even if the kernel has not said so.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ending {
    pub gone_at: Instant,
    /// Nobody was told before.
    is_found: bool,
}

/// What is left of a process that has died and has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Remains {
    /// Its first thread has ended, and some other has not.
    Threads,
    /// It dumps core, or is about to: all threads have to take part in that.
    Core,
}

impl WorkerProcess {
    /// It has said that it ends, or was killed.
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

    /// Whether the kernel holds a process that has our sockets, one that an old binary has left behind included.
    pub(super) fn is_any_held(&self) -> bool {
        !self.held.is_empty() || !self.left_behind.is_empty()
    }

    /// These for a new binary, and those of which it will show: it leaves out who turns out to have ended.
    pub(super) fn all_held(&self) -> Vec<Pid> {
        let ending = self.workers.iter().filter(|worker| worker.ending.is_some()).map(|worker| worker.pid);
        self.held.iter().chain(&self.left_behind).copied().chain(ending).collect()
    }

    /// When to look again, if there is anything to look at.
    pub(super) fn look_at(&self) -> Option<Instant> {
        let is_anything = self.is_any_held() || self.workers.iter().any(|worker| worker.ending.is_none());
        is_anything.then_some(self.next_look)
    }

    /// Finds those that have died, and gives up those that should have ended long ago.
    pub(super) fn check_ending(&mut self, now: Instant) {
        if self.look_at().is_some_and(|at| at <= now) {
            self.next_look = now + LOOK_EVERY;
            self.look(now);
        }
        let is_over = |worker: &WorkerProcess| worker.ending.is_some_and(|ending| ending.gone_at <= now);
        // First those whose end is only not taken notice of yet.
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
        // No child of ours: nobody tells us of its end.
        self.left_behind.retain(|pid| remains(*pid).is_some());
        if self.is_any_held() {
            self.have_connections_looked_for();
        }
    }

    /// Of a new connection the kernel may have told a loop of a process that it holds, and nobody else.
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
            // If it is not the kernel that holds it, that ends it. It was not reaped: the number is still its own.
            self.kill(pid, rustix::process::Signal::KILL);
        }
        let what = match worker.ending {
            Some(Ending { is_found: true, .. }) => "has died, but has not exited within a second".to_owned(),
            _ => format!("has not exited within {} seconds", END_TIMEOUT.as_secs()),
        };
        let core = if remains == Some(Remains::Core) { ", it is dumping core" } else { "" };
        let held = match held_threads(pid) {
            // Whoever writes the core waits for the disk, too.
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

    /// If this was one that is not waited for any more, its end is logged as any other's.
    pub(super) fn take_leave_of_held(&mut self, pid: Pid, status: WaitStatus) {
        if let Some(position) = self.held.iter().position(|held| *held == pid) {
            self.held.swap_remove(position);
            self.log_exit("worker process", pid, status);
        }
    }
}

/// What is left of a process if it has died. Without procfs nothing is known.
fn remains(pid: Pid) -> Option<Remains> {
    remains_in(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

/// From `/proc/PID/status`, which is about the first thread.
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

/// The threads of a process that wait for something which no signal interrupts (state D), by name.
fn held_threads(pid: Pid) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let stats = tasks.filter_map(|task| fs::read_to_string(task.path().join("stat")).ok());
    let name = |stat: String| {
        // "number (name) state …", and the name may hold anything.
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
