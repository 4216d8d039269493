//! The end of worker processes that the kernel holds.
//!
//! A process is gone when the kernel says so. That it cannot do while one of its threads waits for a file system that has
//! taken a request and never answers: not even SIGKILL ends that. So who has said its last word, or was killed, and is still
//! there after a while, is counted as gone, with an alert.

use std::time::{Duration, Instant};

use rustix::process::Pid;

use super::Master;
use super::workers::WorkerProcess;
use crate::process::errors::Level;
use crate::process::program::Program;

/// Longest time that the end of a process takes, when nothing in the kernel holds it: freeing its memory.
const END_TIMEOUT: Duration = Duration::from_secs(3);
/// So many threads that hold a process up are named.
const HELD_NAMED_MAX: usize = 4;

impl WorkerProcess {
    /// It has said that it ends, or was killed.
    pub fn expect_gone(&mut self, now: Instant) {
        self.gone_at.get_or_insert(now + END_TIMEOUT);
    }
}

impl<P: Program> Master<P> {
    pub(super) fn handle_ending(&mut self, pid: Pid) {
        if let Some(worker) = self.worker_mut(pid) {
            worker.expect_gone(Instant::now());
        }
    }

    /// Gives up those that should have ended long ago.
    pub(super) fn check_ending(&mut self, now: Instant) {
        // First those whose end is only not taken notice of yet.
        if self.workers.iter().any(|worker| worker.gone_at.is_some_and(|at| at <= now)) {
            self.reap();
        }
        while let Some(position) = self.workers.iter().position(|worker| worker.gone_at.is_some_and(|at| at <= now)) {
            let worker = self.workers.remove(position);
            let (pid, seconds) = (worker.pid, END_TIMEOUT.as_secs());
            // If it is not the kernel that holds it, that ends it. It was not reaped: the number is still its own.
            self.kill(pid, rustix::process::Signal::KILL);
            let held = match held_threads(pid) {
                names if names.is_empty() => String::new(),
                names => format!(
                    ", the kernel holds its {}, as it does for a file system that does not answer",
                    names.join(", ")
                ),
            };
            let text =
                format!("worker process {pid} has not ended within {seconds} seconds{held}; not waiting any longer");
            self.log.write(Level::Alert, &text);
            self.handle_worker_exit(&worker);
        }
    }
}

/// The threads of a process that wait for something which no signal interrupts (state D), by name.
fn held_threads(pid: Pid) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let stats = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
    let name = |stat: String| {
        // "number (name) state …", and the name may hold anything.
        let (name, rest) = stat.split_once('(')?.1.rsplit_once(") ")?;
        rest.starts_with('D').then(|| format!("thread \"{name}\""))
    };
    stats.filter_map(name).take(HELD_NAMED_MAX).collect()
}
