//! The master: supervises one worker process, takes signals, and can start everything again from memory.
//!
//! One thread that only polls (and the one that writes its log). Each round of it takes what has arrived, here, and
//! every concept has a file of its own:
//!
//! ```text
//!               ┌ signals.rs   what each signal asks for, a new binary included
//!   one round ──┼ control.rs   what the control socket asks for
//!               ├ links.rs     what the worker processes and the helper of a reload say
//!               └ deadlines    of whatever has one, in mod.rs
//!
//!   workers.rs   worker processes: started, ready, dead, started again
//!   ending.rs    worker processes that have died and do not end: the kernel holds them
//!   page_cache_helper.rs   the process beside a worker process that says what of files is in memory
//!   reload.rs    a new configuration: built by a helper, taken over by the worker process
//!   logs.rs      log files, opened again
//!   stop.rs      worker processes leave, and the master ends
//! ```
//!
//! It parses nothing, resolves nothing, waits for no process. Whatever it opens itself (the pid file, log files on
//! USR1) is local and small.

mod control;
mod ending;
mod links;
mod logs;
mod page_cache_helper;
mod reload;
mod signals;
mod stop;
mod workers;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use gale_base::log_level::Level;
use rustix::event::{PollFd, PollFlags};
use rustix::process::Pid;

use self::control::Control;
use self::reload::Reload;
use self::stop::{LastAccepting, Stop};
use self::workers::{Respawn, WorkerProcess};
use super::bundle::Bundle;
use super::daemon::Waiting;
use super::errors::ErrorLog;
use super::handover::{Arrivals, Successor};
use super::listen::ListenerHandle;
use super::notify::Notifier;
use super::program::Program;
use super::secrets::SecretKeeper;
use super::signals::{Signals, timespec};
use super::spawn::Executable;

/// What a master begins with.
pub(super) struct Start {
    pub bundle: Bundle,
    pub signals: Signals,
    pub notifier: Notifier,
    /// The process on the terminal that waits for us.
    pub waiting: Option<Waiting>,
    /// No terminal: WINCH means something.
    pub daemonized: bool,
    /// The previous binary's, if that has started us.
    pub old_master: Option<Pid>,
    /// Dead worker processes of its that the kernel holds.
    pub left_behind: Vec<Pid>,
    /// What it has left for those that come back.
    pub secrets: SecretKeeper,
    /// Where its idle connections come.
    pub arrivals: Option<Arrivals>,
    /// What the service manager has opened for us.
    pub passed: Vec<ListenerHandle>,
}

/// See the head of the file.
pub(super) struct Master<P: Program> {
    program: P,
    executable: Executable,
    signals: Signals,
    notifier: Notifier,
    log: Arc<dyn ErrorLog>,
    /// The one that was acknowledged last.
    bundle: Box<Bundle>,
    secrets: SecretKeeper,
    /// The sockets of the service manager, used or not: a later configuration may listen on any of them.
    passed: Vec<ListenerHandle>,
    /// Number of the newest bundle.
    generation: u64,
    workers: Vec<WorkerProcess>,
    /// Worker processes that the kernel holds and nobody waits for. No more than it took to die one after the other.
    held: Vec<Pid>,
    /// The same of the binary before this one: nobody's child but its master's.
    left_behind: Vec<Pid>,
    next_look: Instant,
    reload: Option<Reload>,
    reload_wanted: bool,
    control: Control,
    respawn: Respawn,
    stop: Option<Stop>,
    /// In a graceful stop.
    last_accepting: Option<LastAccepting>,
    /// A worker process has been ready at some time: from then on the master does not give up.
    serving_since_start: bool,
    waiting: Option<Waiting>,
    daemonized: bool,
    old_master: Option<Pid>,
    /// Where our pid file is; in an upgrade, aside of it.
    pid_path: PathBuf,
    new_binary: Option<Pid>,
    /// Who takes the idle connections of our worker processes: the new binary.
    successor: Option<Successor>,
    /// Where those of the old binary come.
    arrivals: Option<Arrivals>,
    /// WINCH: no worker process is wanted.
    resting: bool,
    failed: bool,
}

impl<P: Program> Master<P> {
    pub fn new(program: P, executable: Executable, start: Start) -> Master<P> {
        let log = program.error_log(&start.bundle.error_log_targets());
        Master {
            program,
            executable,
            signals: start.signals,
            notifier: start.notifier,
            log,
            generation: start.bundle.generation,
            pid_path: start.bundle.settings.pid_path.clone(),
            bundle: Box::new(start.bundle),
            secrets: start.secrets,
            passed: start.passed,
            workers: Vec::new(),
            held: Vec::new(),
            left_behind: start.left_behind,
            next_look: Instant::now(),
            reload: None,
            reload_wanted: false,
            control: Control::default(),
            respawn: Respawn::default(),
            stop: None,
            last_accepting: None,
            serving_since_start: false,
            waiting: start.waiting,
            daemonized: start.daemonized,
            old_master: start.old_master,
            new_binary: None,
            successor: None,
            arrivals: start.arrivals,
            resting: false,
            failed: false,
        }
    }

    /// Supervises until told to stop, or until the first worker process fails to become ready.
    ///
    /// The process keeps the name that it was started by: `start-stop-daemon --name nginx` looks for that.
    pub fn run(mut self) -> ExitCode {
        if let Err(message) = self.control.begin() {
            self.log.write(Level::Warn, &message);
        }
        self.spawn_worker();
        while !self.is_done() {
            self.wait();
            while let Some(arrived) = self.signals.next() {
                self.handle_signal(&arrived);
            }
            self.handle_control();
            self.handle_links();
            self.handle_time(Instant::now());
        }
        self.leave();
        if self.failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
    }

    fn is_done(&self) -> bool {
        (self.stop.is_some() || self.failed) && self.workers.is_empty()
    }

    fn wait(&self) {
        let mut polled = vec![PollFd::new(&self.signals, PollFlags::IN)];
        let links = self.workers.iter().filter_map(|worker| worker.link.as_ref());
        let helper = match &self.reload {
            Some(Reload::Helping { link, .. }) => link.as_ref(),
            _ => None,
        };
        polled.extend(links.chain(helper).map(|link| PollFd::new(link, link.interest())));
        polled.extend(self.control.polled());
        let timeout = self.next_deadline().map(|at| timespec(at.saturating_duration_since(Instant::now())));
        // An interrupted wait is a short one.
        let _ = rustix::event::poll(&mut polled, timeout.as_ref());
    }

    fn next_deadline(&self) -> Option<Instant> {
        let reload = match &self.reload {
            Some(
                Reload::Helping { until, .. } | Reload::Preparing { until, .. } | Reload::Committing { until, .. },
            ) => Some(*until),
            Some(Reload::Replacing { .. }) | None => None, // bounded by the worker process's own deadline
        };
        let kill = match &self.stop {
            Some(Stop::Fast { kill_at }) => *kill_at,
            _ => None,
        };
        let workers = self
            .workers
            .iter()
            .flat_map(|worker| [worker.replace_at, worker.kill_at, worker.ending.map(|ending| ending.gone_at)]);
        let helper = match &self.reload {
            Some(Reload::Helping { link, .. }) => link.as_ref(),
            _ => None,
        };
        let restarts = self.workers.iter().map(|worker| worker.page_cache_helper.as_ref()?.restart_at);
        let links = self.workers.iter().filter_map(|worker| worker.link.as_ref()).chain(helper);
        let retries = links.map(|link| link.retry_at());
        [reload, kill, self.respawn.at, self.look_at(), self.secrets.next()]
            .into_iter()
            .chain(workers)
            .chain(restarts)
            .chain(retries)
            .flatten()
            .min()
    }

    fn handle_time(&mut self, now: Instant) {
        if let Some(Stop::Fast { kill_at: Some(at) }) = self.stop
            && at <= now
        {
            self.stop = Some(Stop::Fast { kill_at: None });
            for worker in &self.workers {
                self.kill(worker.pid, rustix::process::Signal::KILL);
            }
            self.workers.iter_mut().for_each(|worker| worker.expect_gone(now));
        }
        if self.secrets.next().is_some_and(|at| at <= now) {
            self.renew_secrets(&[]);
        }
        self.check_ending(now);
        self.check_reload(now);
        self.check_starting(now);
        self.restart_page_cache_helpers(now);
        if self.respawn.at.is_some_and(|at| at <= now) {
            self.respawn.at = None;
            if self.stop.is_none() && !self.resting && self.serving_worker().is_none() {
                self.respawn.count += 1;
                self.spawn_worker();
            }
        }
        let lost = self.workers.iter().find(|worker| worker.replace_at.is_some_and(|at| at <= now));
        if let Some(pid) = lost.map(|worker| worker.pid) {
            self.replace_lost(pid, now);
        }
    }
}
