//! The master: supervises one worker process, handles signals, and can restart everything from memory.
//!
//! It has one thread that only polls, and one that writes its log. Each round handles the pending events, in this file;
//! every concept has a file of its own:
//!
//! ```text
//!               ┌ signals.rs   the actions of each signal, a new binary included
//!   one round ──┼ control.rs   orders from the control socket
//!               ├ links.rs     messages of the worker processes and of the reload helper
//!               └ deadlines    all timeouts, in mod.rs
//!
//!   workers.rs   worker processes: started, ready, dead, started again
//!   ending.rs    worker processes that have died but are stuck in the kernel
//!   page_cache_helper.rs   the process beside a worker process that knows which file contents are in memory
//!   reload.rs    a new configuration: built by a helper, taken over by the worker process
//!   logs.rs      log files, reopened
//!   stop.rs      exit of the worker processes and of the master
//! ```
//!
//! It parses nothing, resolves no names and waits for no process. The only files it opens itself (the pid file, log
//! files on USR1) are local and small.

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
#[doc(hidden)]
pub use self::control::read_order;
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

pub(super) struct Start {
    pub bundle: Bundle,
    pub signals: Signals,
    pub notifier: Notifier,
    /// The process on the terminal that waits for our start to succeed.
    pub waiting: Option<Waiting>,
    /// True if detached from the terminal, where WINCH is an order.
    pub daemonized: bool,
    /// Pid of the master of the old binary, if that has started us.
    pub old_master: Option<Pid>,
    /// Dead worker processes of the old binary that are stuck in the kernel.
    pub left_behind: Vec<Pid>,
    /// Secrets of the old binary, so that its clients can resume their sessions.
    pub secrets: SecretKeeper,
    /// Idle connections that the old binary passes on.
    pub arrivals: Option<Arrivals>,
    /// Sockets that the service manager has opened for us.
    pub passed: Vec<ListenerHandle>,
}

pub(super) struct Master<P: Program> {
    program: P,
    executable: Executable,
    signals: Signals,
    notifier: Notifier,
    log: Arc<dyn ErrorLog>,
    /// The bundle that was acknowledged last.
    bundle: Box<Bundle>,
    secrets: SecretKeeper,
    /// Sockets of the service manager, used or not: a later configuration may listen on any of them.
    passed: Vec<ListenerHandle>,
    /// Generation of the newest bundle.
    generation: u64,
    workers: Vec<WorkerProcess>,
    /// Worker processes that are stuck in the kernel and were given up.
    held: Vec<Pid>,
    /// Stuck worker processes of the old binary, which are not children of this process.
    left_behind: Vec<Pid>,
    next_look: Instant,
    reload: Option<Reload>,
    reload_wanted: bool,
    control: Control,
    respawn: Respawn,
    stop: Option<Stop>,
    /// Sockets of the last worker process that accepts, during a graceful stop.
    last_accepting: Option<LastAccepting>,
    /// True once any worker process was ready: from then on the master does not give up.
    serving_since_start: bool,
    waiting: Option<Waiting>,
    daemonized: bool,
    old_master: Option<Pid>,
    /// Path of our pid file; during an upgrade, the path that it was renamed from.
    pid_path: PathBuf,
    new_binary: Option<Pid>,
    /// The new binary, to which our worker processes pass their idle connections.
    successor: Option<Successor>,
    /// Idle connections that the old binary passes on.
    arrivals: Option<Arrivals>,
    /// True after WINCH: no worker process is wanted.
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
    /// The process keeps the name it was started with: `start-stop-daemon --name nginx` looks for that.
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
        // An interrupted wait only ends early.
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
