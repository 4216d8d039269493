//! Worker processes as the master sees them: from their start to their end, and whoever comes after them.
//!
//! ```text
//!   Starting ── "ready" ──► Serving ── told to leave, or leaves unasked ──► Leaving ──► gone
//!      │ late: killed          │ link lost: a successor takes over
//!      └───────────────────────┴── died: started again, at once, or later if it dies again and again
//! ```
//!
//! As long as one is wanted there is one. Only while none has ever been ready the master gives up instead.

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

/// First pause before a worker process that dies again and again is started once more; doubled each time.
const RESPAWN_PAUSE_MIN: Duration = Duration::from_millis(100);
/// Longest pause.
const RESPAWN_PAUSE_MAX: Duration = Duration::from_secs(5);
/// Longest time that a worker process may take to become ready.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// A worker process that has died is succeeded at once, for so many deaths in this time.
const DEATHS_MAX: usize = 20;
const DEATHS_INTERVAL: Duration = Duration::from_secs(60);
/// Not if so many in a row have died before they were ready: the next one will most likely do so again.
const EARLY_DEATHS_MAX: u32 = 3;

/// How messages call one.
const WORKER_PROCESS: &str = "worker process";

/// The reason for a death by SIGSYS.
const SIGSYS_MEANS: &str = ": it made a system call that its sandbox forbids, which \"sandbox auto diagnose;\" names";

/// One worker process.
pub(super) struct WorkerProcess {
    pub pid: Pid,
    /// None after it was lost.
    pub link: Option<Link>,
    /// It has lost its link, so that it cannot be told anything: it is replaced then, if it still lives.
    pub replace_at: Option<Instant>,
    /// Until when it has to be ready.
    pub kill_at: Option<Instant>,
    pub ending: Option<Ending>,
    pub page_cache_helper: Option<PageCacheHelper>,
    pub phase: WorkerPhase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WorkerPhase {
    /// Not ready yet.
    Starting,
    Serving,
    /// Told to finish, or about to be gone.
    Leaving,
}

/// Pauses between starts of a dying worker process.
#[derive(Default)]
pub(super) struct Respawn {
    pub at: Option<Instant>,
    /// The pause before the next start that has to wait.
    pause: Duration,
    /// The last deaths after which a start did not wait, [`DEATHS_MAX`] at most.
    deaths: VecDeque<Instant>,
    /// Worker processes that have died before they were ready, in a row.
    early_deaths: u32,
    /// How often it has come to that.
    pub count: u64,
}

impl Respawn {
    /// Schedules a start and returns the pause before it.
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

    /// Counts a death; false if there were too many of late.
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

    /// Brings the secrets up to the present, and has secrets for these lifetimes beside those of the configuration and
    /// of the one that is on its way.
    /// Every worker process is told of changes; one that is started is told in any case.
    pub(super) fn renew_secrets(&mut self, lifetimes: &[u32]) {
        let mut lifetimes = lifetimes.to_vec();
        lifetimes.extend(&self.bundle.settings.secret_lifetimes);
        if let Some(Reload::Preparing { bundle, .. } | Reload::Replacing { bundle, .. }) = &self.reload {
            lifetimes.extend(&bundle.settings.secret_lifetimes);
        }
        lifetimes.sort_unstable();
        lifetimes.dedup();
        // Those for which much is made anew when they are gone come last.
        lifetimes.drain(..lifetimes.len().saturating_sub(SERIES_MAX));
        if self.secrets.renew(&lifetimes) {
            let message = self.secrets_message();
            for link in self.workers.iter_mut().filter_map(|worker| worker.link.as_mut()) {
                // A lost link is seen and logged by the next look at it.
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
            // Without its link it ends, and SIGCHLD says so.
            self.log.write(Level::Alert, &format!("the bundle could not be sent to worker process {pid}: {error}"));
        }
        let link = sent.is_ok().then_some(link);
        let kill_at = Some(Instant::now() + START_TIMEOUT);
        let phase = WorkerPhase::Starting;
        Ok(WorkerProcess { pid, link, replace_at: None, kill_at, ending: None, page_cache_helper, phase })
    }

    /// A worker process can do without.
    fn start_page_cache_helper(&self, bundle: &Bundle, link: &mut Link) -> Option<PageCacheHelper> {
        if !self.program.has_page_cache_helper() {
            return None;
        }
        match PageCacheHelper::start(&self.executable, bundle) {
            Ok((helper, theirs)) => {
                // A lost link is seen and logged by the next look at it.
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
                // A lost one is replaced with what it had.
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
        // SIGCHLD tells the rest, unless the kernel holds it.
        late.kill_at = None;
        late.expect_gone(now);
        let pid = late.pid;
        let seconds = START_TIMEOUT.as_secs();
        self.log.write(Level::Alert, &format!("worker process {pid} was not ready within {seconds} seconds"));
        self.kill(pid, rustix::process::Signal::KILL);
    }

    /// A worker process drains. Unless we told it to, somebody signalled it, and it has to be succeeded.
    pub(super) fn handle_leaving(&mut self, pid: Pid) {
        let unasked = self.worker_mut(pid).filter(|worker| worker.phase != WorkerPhase::Leaving);
        let Some(worker) = unasked else { return };
        let before = std::mem::replace(&mut worker.phase, WorkerPhase::Leaving);
        self.end_reload_of(pid, "the worker process was told to exit");
        self.succeed(before);
    }

    pub(super) fn reap(&mut self) {
        // All of them: as process 1 of a container we inherit strangers too.
        while let Ok(Some((pid, status))) = rustix::process::waitpid(None, WaitOptions::NOHANG) {
            // Its last words come first: why it exited.
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
            // Or a helper that has done its work, or a stranger.
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

    /// Sees to it that a worker process comes after one that is gone or leaves from this phase, if one is wanted.
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

    /// This process serves, but hears no orders any more. A successor with the same configuration takes over, and the
    /// old one drains, as in a reload that needs a new process.
    pub(super) fn replace_lost(&mut self, pid: Pid, now: Instant) {
        // SIGCHLD may have been taken by somebody else, or be on its way.
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

    /// The first start has failed: says why on the terminal and ends.
    pub(super) fn fail(&mut self, report: &Report) {
        if !std::mem::replace(&mut self.failed, true) {
            report.log_to(&*self.log);
            say(&report.render(&self.bundle.request.program));
        }
        self.begin_fast_stop();
    }

    pub(super) fn kill(&self, pid: Pid, signal: rustix::process::Signal) {
        // Not reaped yet, so the number is still its own.
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
        // The first of them is a minute ago.
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
