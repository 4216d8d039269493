//! Worker processes from the master's side: from start to exit, and their successors.
//!
//! ```text
//!   Starting ── "ready" ──► Serving ── told to leave, or leaves unasked ──► Leaving ──► gone
//!      │ late: killed          │ link lost: a successor takes over
//!      └───────────────────────┴── died: started again, at once, or later if it dies again and again
//! ```
//!
//! A worker process that is wanted is always replaced. Only if none has ever been ready does the master give up.

use gale_base::log_level::Level;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, WaitOptions, WaitStatus};

use super::Master;
use super::ending::Ending;
use super::page_cache_helper::PageCacheHelper;
use super::reload::Reload;
use crate::bundle::Bundle;
use crate::errors::{IN_FORCE, Report, errno_text, say};
use crate::link::{Link, Message};
use crate::program::Program;
use crate::secrets::SERIES_MAX;
use crate::spawn::Role;
use crate::upgrade;

/// First pause before a worker process that keeps dying is restarted; doubled each time.
const RESPAWN_PAUSE_MIN: Duration = Duration::from_millis(100);
const RESPAWN_PAUSE_MAX: Duration = Duration::from_secs(5);
/// Maximum time for a worker process to become ready.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Number of deaths within `DEATHS_INTERVAL` after which restarts are delayed; before that they are immediate.
const DEATHS_MAX: usize = 20;
const DEATHS_INTERVAL: Duration = Duration::from_secs(60);
/// Number of consecutive deaths before readiness after which restarts are delayed: the next process will most likely
/// die, too.
const EARLY_DEATHS_MAX: u32 = 3;

const WORKER_PROCESS: &str = "worker process";

/// Explanation of a death by SIGSYS.
const SIGSYS_MEANS: &str = ": it made a system call that its sandbox forbids, which \"sandbox auto diagnose;\" names";

pub(super) struct WorkerProcess {
    pub pid: Pid,
    /// `None` after the link was lost.
    pub link: Option<Link>,
    /// Time at which a process that has lost its link is replaced if it still lives, because it can receive no orders.
    pub replace_at: Option<Instant>,
    /// Deadline for becoming ready, after which it is killed.
    pub kill_at: Option<Instant>,
    pub ending: Option<Ending>,
    pub page_cache_helper: Option<PageCacheHelper>,
    pub phase: WorkerPhase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WorkerPhase {
    Starting,
    Serving,
    /// Told to exit, or exiting by itself.
    Leaving,
}

/// Restart delays of a dying worker process.
#[derive(Default)]
pub(super) struct Respawn {
    pub at: Option<Instant>,
    /// Pause before the last delayed restart.
    pause: Duration,
    /// Times of the latest deaths that were followed by an immediate restart, at most [`DEATHS_MAX`].
    deaths: VecDeque<Instant>,
    /// Consecutive worker processes that died before they were ready.
    early_deaths: u32,
    /// Total number of restarts.
    pub count: u64,
}

impl Respawn {
    /// Schedules a restart and returns the pause before it.
    fn schedule(&mut self, was_ready: bool, now: Instant) -> Duration {
        self.early_deaths = if was_ready { 0 } else { self.early_deaths + 1 };
        let pause = if self.early_deaths <= EARLY_DEATHS_MAX && self.count_death(now) {
            self.pause = Duration::ZERO;
            Duration::ZERO
        } else {
            self.pause = (self.pause * 2).clamp(RESPAWN_PAUSE_MIN, RESPAWN_PAUSE_MAX);
            self.pause
        };
        self.at = Some(now + pause);
        pause
    }

    /// Counts a death; `false` if there were too many recently.
    fn count_death(&mut self, now: Instant) -> bool {
        self.deaths.retain(|&death| now.duration_since(death) < DEATHS_INTERVAL);
        let is_one_of_few = self.deaths.len() < DEATHS_MAX;
        if is_one_of_few {
            self.deaths.push_back(now);
        }
        is_one_of_few
    }
}

impl<P: Program> Master<P> {
    pub(super) fn spawn_worker(&mut self) {
        self.log.write(Level::Notice, "start worker processes");
        self.renew_secrets(&[]);
        match self.start_worker(&self.bundle) {
            Ok(worker) => self.workers.push(worker),
            Err(error) => {
                self.log.write(
                    Level::Alert,
                    &format!("fork() failed while spawning \"worker process\"{}", errno_text(&error)),
                );
                if self.serving_since_start {
                    self.schedule_respawn(false);
                } else {
                    self.fail(&Report::new(Level::Emerg, "could not start the worker process"));
                }
            }
        }
    }

    /// Renews the secrets for the given lifetimes, those of the configuration and those of the one being loaded.
    /// Changes are sent to all worker processes; a process that starts gets the secrets in any case.
    pub(super) fn renew_secrets(&mut self, lifetimes: &[u32]) {
        let mut lifetimes = lifetimes.to_vec();
        lifetimes.extend(&self.bundle.settings.secret_lifetimes);
        if let Some(Reload::Preparing { bundle, .. } | Reload::Replacing { bundle, .. }) = &self.reload {
            lifetimes.extend(&bundle.settings.secret_lifetimes);
        }
        lifetimes.sort_unstable();
        lifetimes.dedup();
        // Drops the shortest lifetimes if there are too many: losing a long-lived secret causes more work.
        lifetimes.drain(..lifetimes.len().saturating_sub(SERIES_MAX));
        if self.secrets.renew(&lifetimes) {
            let message = self.secrets_message();
            for link in self.workers.iter_mut().filter_map(|worker| worker.link.as_mut()) {
                // A lost link is logged when it is next read.
                let _ = link.send(&message);
            }
        }
    }

    fn secrets_message(&self) -> Message {
        Message::Secrets { series: self.secrets.series().to_vec() }
    }

    pub(super) fn start_worker(&self, bundle: &Bundle) -> io::Result<WorkerProcess> {
        let (pid, mut link) = self.executable.start(Role::Worker, &bundle.request.program, &bundle.settings)?;
        self.log.write(Level::Notice, &format!("start worker process {pid}"));
        let count = self.respawn.count;
        let mut sent = link.send(&self.secrets_message()).and_then(|()| link.send_bundle(bundle));
        if count > 0 {
            sent = sent.and_then(|()| link.send(&Message::Respawned { count }));
        }
        if let Some(arrivals) = &self.arrivals {
            sent = sent.and_then(|()| link.send_with(&Message::Arrivals, arrivals.descriptor()));
        }
        let page_cache_helper = self.start_page_cache_helper(bundle, &mut link);
        if let Err(error) = &sent {
            // Without its link the process exits, and SIGCHLD reports it.
            self.log.write(Level::Alert, &format!("the bundle could not be sent to worker process {pid}: {error}"));
        }
        let link = sent.is_ok().then_some(link);
        let kill_at = Some(Instant::now() + START_TIMEOUT);
        let phase = WorkerPhase::Starting;
        Ok(WorkerProcess { pid, link, replace_at: None, kill_at, ending: None, page_cache_helper, phase })
    }

    /// Starts the page cache helper. A failure is logged; the worker process can do without it.
    fn start_page_cache_helper(&self, bundle: &Bundle, link: &mut Link) -> Option<PageCacheHelper> {
        if !self.program.has_page_cache_helper() {
            return None;
        }
        match PageCacheHelper::start(&self.executable, bundle) {
            Ok((helper, theirs)) => {
                // A lost link is logged when it is next read.
                let _ = link.send_with(&Message::PageCacheHelper, &Arc::new(theirs));
                Some(helper)
            }
            Err(error) => {
                let text = format!("fork() failed while spawning \"page cache helper\"{}", errno_text(&error));
                self.log.write(Level::Alert, &text);
                None
            }
        }
    }

    pub(super) fn serving_worker(&self) -> Option<&WorkerProcess> {
        self.workers.iter().find(|worker| worker.phase != WorkerPhase::Leaving)
    }

    pub(super) fn worker_mut(&mut self, pid: Pid) -> Option<&mut WorkerProcess> {
        self.workers.iter_mut().find(|worker| worker.pid == pid)
    }

    pub(super) fn handle_ready(&mut self, pid: Pid) {
        if let Some(worker) = self.worker_mut(pid)
            && worker.phase == WorkerPhase::Starting
        {
            worker.phase = WorkerPhase::Serving;
            worker.kill_at = None;
        }
        if !std::mem::replace(&mut self.serving_since_start, true) {
            if let Some(waiting) = self.waiting.take() {
                waiting.release();
            }
            self.redirect_standard_error();
            self.notifier.ready();
        }
        match self.reload.take() {
            Some(Reload::Replacing { bundle, worker }) if worker == pid => {
                // The reload has brought a worker process back, which is wanted from now on.
                self.resting = false;
                // A process that replaces one with a lost link has the same configuration.
                let is_new = bundle.generation != self.bundle.generation;
                self.acknowledge(bundle);
                self.retire_all_but(pid);
                if is_new {
                    self.log.write(Level::Notice, IN_FORCE);
                }
                self.finish_commit();
            }
            other => {
                self.reload = other;
                self.take_up_wanted_reload();
            }
        }
    }

    pub(super) fn check_starting(&mut self, now: Instant) {
        let is_late = |worker: &&mut WorkerProcess| worker.kill_at.is_some_and(|at| at <= now);
        let Some(late) = self.workers.iter_mut().find(is_late) else {
            return;
        };
        // SIGCHLD does the rest, unless the process is stuck in the kernel.
        late.kill_at = None;
        late.expect_gone(now);
        let pid = late.pid;
        let seconds = START_TIMEOUT.as_secs();
        self.log.write(Level::Alert, &format!("worker process {pid} was not ready within {seconds} seconds"));
        self.kill(pid, rustix::process::Signal::KILL);
    }

    /// Handles a worker process that starts to drain. Unless the master ordered it, it was signalled from outside and
    /// needs a successor.
    pub(super) fn handle_leaving(&mut self, pid: Pid) {
        let unasked = self.worker_mut(pid).filter(|worker| worker.phase != WorkerPhase::Leaving);
        let Some(worker) = unasked else { return };
        let before = std::mem::replace(&mut worker.phase, WorkerPhase::Leaving);
        self.end_reload_of(pid, "the worker process was told to exit");
        self.succeed(before);
    }

    pub(super) fn reap(&mut self) {
        // Reaps all children: as process 1 of a container we also inherit orphans.
        while let Ok(Some((pid, status))) = rustix::process::waitpid(None, WaitOptions::NOHANG) {
            // Its last messages come first: they say why it exited.
            self.handle_links();
            self.handle_exit(pid, status);
        }
    }

    fn handle_exit(&mut self, pid: Pid, status: WaitStatus) {
        if self.handle_page_cache_helper_exit(pid, status) {
            return;
        }
        let is_helper = matches!(&self.reload, Some(Reload::Helping { pid: helper, .. }) if *helper == pid);
        let position = self.workers.iter().position(|worker| worker.pid == pid);
        let name = match (position, is_helper, self.new_binary == Some(pid)) {
            (Some(_), _, _) => WORKER_PROCESS,
            (None, true, _) => "reload helper",
            (None, false, true) => "new binary process",
            // A stuck process that was given up, a helper that has finished, or an orphan.
            (None, false, false) => return self.take_leave_of_held(pid, status),
        };
        self.log_exit(name, pid, status);
        if is_helper {
            self.reject(Report::new(Level::Emerg, format!("reload helper {pid} died")));
        } else if self.new_binary == Some(pid) {
            (self.new_binary, self.successor) = (None, None);
            upgrade::restore_pid_file(&self.pid_path, &*self.log);
            self.move_pid_file();
            if std::mem::take(&mut self.resting) && self.stop.is_none() {
                self.spawn_worker();
            }
        } else if let Some(position) = position {
            let worker = self.workers.remove(position);
            self.handle_worker_exit(&worker);
        }
    }

    pub(super) fn log_exit(&self, name: &str, pid: Pid, status: WaitStatus) {
        match (status.terminating_signal(), status.exit_status()) {
            (Some(signal), _) => {
                let core = if libc::WCOREDUMP(status.as_raw()) { " (core dumped)" } else { "" };
                let is_forbidden = signal == libc::SIGSYS && name == WORKER_PROCESS;
                let why = if is_forbidden { SIGSYS_MEANS } else { "" };
                self.log.write(Level::Alert, &format!("{name} {pid} exited on signal {signal}{core}{why}"));
            }
            (None, code) => {
                self.log.write(Level::Notice, &format!("{name} {pid} exited with code {}", code.unwrap_or(-1)));
            }
        }
    }

    pub(super) fn handle_worker_exit(&mut self, worker: &WorkerProcess) {
        self.handle_accepting_ended(worker.pid);
        self.end_reload_of(worker.pid, "the worker process died before it was ready for the new configuration");
        if worker.phase == WorkerPhase::Leaving {
            return;
        }
        if !self.serving_since_start && self.stop.is_none() {
            self.fail(&Report::new(Level::Emerg, "the worker process failed to start"));
            return;
        }
        self.succeed(worker.phase);
    }

    /// Schedules a successor for a worker process that is gone or leaves, if one is wanted.
    fn succeed(&mut self, phase: WorkerPhase) {
        if self.stop.is_none() && !self.resting && !self.failed {
            self.schedule_respawn(phase != WorkerPhase::Starting);
        }
    }

    fn schedule_respawn(&mut self, was_ready: bool) {
        let pause = self.respawn.schedule(was_ready, Instant::now());
        if !pause.is_zero() {
            let message = format!("worker processes keep dying, the next one is started in {} ms", pause.as_millis());
            self.log.write(Level::Alert, &message);
        }
    }

    /// Replaces a process that serves but can receive no orders. A successor with the same configuration takes over,
    /// and the old process drains, as in a reload that needs a new process.
    pub(super) fn replace_lost(&mut self, pid: Pid, now: Instant) {
        // The child may have been reaped elsewhere, or its SIGCHLD may be on its way.
        let is_gone = match rustix::process::waitpid(Some(pid), WaitOptions::NOHANG) {
            Ok(Some((_, status))) => return self.handle_exit(pid, status),
            Ok(None) => false,
            Err(errno) => errno == rustix::io::Errno::CHILD,
        };
        let Some(position) = self.workers.iter().position(|worker| worker.pid == pid) else {
            return;
        };
        if is_gone {
            let worker = self.workers.remove(position);
            self.log.write(Level::Alert, &format!("worker process {pid} is gone"));
            return self.handle_worker_exit(&worker);
        }
        let worker = &mut self.workers[position];
        if worker.phase != WorkerPhase::Serving || self.stop.is_some() {
            worker.replace_at = None; // it leaves, or is killed when it does not become ready
            return;
        }
        worker.replace_at = Some(now + RESPAWN_PAUSE_MAX);
        self.end_reload_of(pid, "the link to the worker process was lost");
        if self.reload.is_none() {
            let text = format!("worker process {pid} runs on without its link to the master, replacing it");
            self.log.write(Level::Alert, &text);
            self.replace_worker(self.bundle.clone());
        }
    }

    /// Handles a failed first start: reports the reason on the terminal and stops.
    pub(super) fn fail(&mut self, report: &Report) {
        if !std::mem::replace(&mut self.failed, true) {
            report.log_to(&*self.log);
            say(&report.render(&self.bundle.request.program));
        }
        self.begin_fast_stop();
    }

    pub(super) fn kill(&self, pid: Pid, signal: rustix::process::Signal) {
        // Not reaped yet, so the pid is still its own.
        if let Err(error) = rustix::process::kill_process(pid, signal) {
            let text = format!("kill({pid}, {}) failed{}", signal.as_raw(), errno_text(&error.into()));
            self.log.write(Level::Alert, &text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn respawn_after_twenty_deaths_within_a_minute_waits_longer_each_time() {
        let (mut respawn, begin) = (Respawn::default(), Instant::now());
        for death in 0..20 {
            assert_eq!(respawn.schedule(true, begin + Duration::from_secs(death)), Duration::ZERO);
        }
        let pauses = [100, 200, 400, 800, 1600, 3200, 5000, 5000].map(Duration::from_millis);
        for pause in pauses {
            assert_eq!(respawn.schedule(true, begin + Duration::from_secs(30)), pause);
        }
        // The first of the deaths is a minute ago.
        assert_eq!(respawn.schedule(true, begin + Duration::from_secs(60)), Duration::ZERO);
        assert_eq!(respawn.schedule(true, begin + Duration::from_secs(60)), pauses[0]);
    }

    #[test]
    fn respawn_of_workers_that_are_never_ready_waits() {
        let (mut respawn, now) = (Respawn::default(), Instant::now());
        for _ in 0..EARLY_DEATHS_MAX {
            assert_eq!(respawn.schedule(false, now), Duration::ZERO);
        }
        assert_eq!(respawn.schedule(false, now), RESPAWN_PAUSE_MIN);
        assert_eq!(respawn.schedule(false, now), RESPAWN_PAUSE_MIN * 2);
        assert_eq!(respawn.schedule(true, now), Duration::ZERO);
        assert_eq!(respawn.schedule(false, now), Duration::ZERO);
    }
}
