//! The master: supervises one worker process, takes signals, and can start everything again from memory.
//!
//! ```text
//!   HUP ─► helping (helper builds) ─► preparing (worker builds) ─► committing (worker changes over) ─► done
//!                  │ refused, died         │ refused                    │ the bundle is the acknowledged one from here
//!                  └───────────────────────┴──► the old configuration serves on
//! ```
//!
//! One thread that only polls (and the one that writes its log). It parses nothing, resolves nothing, waits for no process. Whatever it opens itself (the pid
//! file, log files on USR1) is local and small.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, Resource, Rlimit, WaitOptions, WaitStatus};

use super::bundle::Bundle;
use super::daemon::Waiting;
use super::errors::{ErrorLog, Level, Report, errno_text, say};
use super::link::{Link, Message, Received};
use super::listen::{self, ListenAddress};
use super::log_file::{self, LogHandle};
use super::notify::Notifier;
use super::pid_file;
use super::program::Program;
use super::signals::{Arrived, Signal, Signals, timespec};
use super::spawn::{Executable, Role};
use super::system;
use super::upgrade;
use super::user;

/// A fast stop turns to SIGKILL after this long; nginx's own delays add up to about the same.
const KILL_AFTER: Duration = Duration::from_secs(2);
/// Longest time that the helper of a reload may take: names may have to be resolved by slow servers.
const HELPER_TIMEOUT: Duration = Duration::from_secs(120);
/// First pause before a worker process that dies again and again is started once more; doubled each time.
const RESPAWN_PAUSE_MIN: Duration = Duration::from_millis(100);
/// Longest pause.
const RESPAWN_PAUSE_MAX: Duration = Duration::from_secs(5);
/// Longest time that a worker process may take to become ready.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Longest time that a worker process may take to build a new configuration: more than it allows itself.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(120);
/// Longest time that it may then take to change over: more than it allows itself.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a process that closed its link may take to end; one that lives on then is replaced.
const LOST_GRACE: Duration = Duration::from_secs(1);
/// A worker process that lived so long was healthy.
const RESPAWN_HEALTHY: Duration = Duration::from_secs(60);

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
}

/// One worker process.
struct WorkerProcess {
    pid: Pid,
    /// None after it was lost.
    link: Option<Link>,
    /// It has lost its link, so that it cannot be told anything: it is replaced then, if it still lives.
    replace_at: Option<Instant>,
    /// Until when it has to be ready.
    kill_at: Option<Instant>,
    phase: WorkerPhase,
    since: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WorkerPhase {
    /// Not ready yet.
    Starting,
    Serving,
    /// Told to finish, or about to be gone.
    Leaving,
}

/// Where a reload stands. See the head of the file.
enum Reload {
    Helping {
        pid: Pid,
        /// None after it was lost.
        link: Option<Link>,
        until: Instant,
        /// Logs were reopened since it began: it may have opened those before.
        reopened: bool,
    },
    Preparing {
        bundle: Box<Bundle>,
        worker: Pid,
        until: Instant,
    },
    /// As preparing, for what needs a new process: it is started with the bundle while the old one serves.
    Replacing {
        bundle: Box<Bundle>,
        worker: Pid,
    },
    Committing {
        previous: Vec<ListenAddress>,
        worker: Pid,
        until: Instant,
    },
}

enum Stop {
    Graceful,
    Fast { kill_at: Option<Instant> },
}

/// Pauses between starts of a dying worker process.
struct Respawn {
    at: Option<Instant>,
    pause: Duration,
}

/// What a poll found worth handling, in order.
enum Heard {
    Worker(Pid, io::Result<Received>),
    Helper(io::Result<Received>),
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
    /// Number of the newest bundle.
    generation: u64,
    workers: Vec<WorkerProcess>,
    reload: Option<Reload>,
    reload_wanted: bool,
    respawn: Respawn,
    stop: Option<Stop>,
    /// A worker process has been ready at some time: from then on the master does not give up.
    serving_since_start: bool,
    waiting: Option<Waiting>,
    daemonized: bool,
    old_master: Option<Pid>,
    /// Where our pid file is; in an upgrade, aside of it.
    pid_path: PathBuf,
    new_binary: Option<Pid>,
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
            workers: Vec::new(),
            reload: None,
            reload_wanted: false,
            respawn: Respawn { at: None, pause: Duration::ZERO },
            stop: None,
            serving_since_start: false,
            waiting: start.waiting,
            daemonized: start.daemonized,
            old_master: start.old_master,
            new_binary: None,
            resting: false,
            failed: false,
        }
    }

    /// Supervises until told to stop, or until the first worker process fails to become ready.
    pub fn run(mut self) -> ExitCode {
        // Only cosmetic: the name in `top`.
        let _ = rustix::thread::set_name(c"gale master");
        self.spawn_worker();
        while !self.is_done() {
            self.wait();
            while let Some(arrived) = self.signals.next() {
                self.handle_signal(&arrived);
            }
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
        let workers = self.workers.iter().flat_map(|worker| [worker.replace_at, worker.kill_at]);
        let helper = match &self.reload {
            Some(Reload::Helping { link, .. }) => link.as_ref(),
            _ => None,
        };
        let links = self.workers.iter().filter_map(|worker| worker.link.as_ref()).chain(helper);
        let retries = links.map(|link| link.retry_at());
        [reload, kill, self.respawn.at].into_iter().chain(workers).chain(retries).flatten().min()
    }

    fn handle_time(&mut self, now: Instant) {
        if let Some(Stop::Fast { kill_at: Some(at) }) = self.stop
            && at <= now
        {
            self.stop = Some(Stop::Fast { kill_at: None });
            for worker in &self.workers {
                self.kill(worker.pid, rustix::process::Signal::KILL);
            }
        }
        self.check_reload(now);
        self.check_starting(now);
        if self.respawn.at.is_some_and(|at| at <= now) {
            self.respawn.at = None;
            if self.stop.is_none() && !self.resting && self.serving_worker().is_none() {
                self.spawn_worker();
            }
        }
        let lost = self.workers.iter().find(|worker| worker.replace_at.is_some_and(|at| at <= now));
        if let Some(pid) = lost.map(|worker| worker.pid) {
            self.replace_lost(pid, now);
        }
    }

    /// Gives up what takes too long.
    fn check_reload(&mut self, now: Instant) {
        match self.reload.take() {
            Some(Reload::Helping { pid, until, .. }) if until <= now => {
                self.kill(pid, rustix::process::Signal::KILL);
                let text = format!("the configuration was not built within {} seconds", HELPER_TIMEOUT.as_secs());
                self.reject(Report::new(Level::Emerg, text));
            }
            Some(Reload::Preparing { bundle, until, .. }) if until <= now => {
                let seconds = PREPARE_TIMEOUT.as_secs();
                self.discard(*bundle, &format!("the worker process was not prepared within {seconds} seconds"));
            }
            Some(Reload::Committing { previous, worker, until }) if until <= now => {
                let text = format!("worker process {worker} has not changed over completely");
                self.log.write(Level::Alert, &text);
                self.finish_commit(&previous);
            }
            other => self.reload = other,
        }
    }

    fn check_starting(&mut self, now: Instant) {
        let is_late = |worker: &&mut WorkerProcess| worker.kill_at.is_some_and(|at| at <= now);
        let Some(late) = self.workers.iter_mut().find(is_late) else {
            return;
        };
        // SIGCHLD tells the rest.
        late.kill_at = None;
        let pid = late.pid;
        let seconds = START_TIMEOUT.as_secs();
        self.log.write(Level::Alert, &format!("worker process {pid} was not ready within {seconds} seconds"));
        self.kill(pid, rustix::process::Signal::KILL);
    }

    // Signals

    fn handle_signal(&mut self, arrived: &Arrived) {
        // As nginx: while our own parent is the old binary, or a new one runs, there is no further upgrade. Nor in a stop,
        // which has closed the sockets.
        let ignored = arrived.signal == Signal::ChangeBinary && (self.upgrade_is_running() || self.stop.is_some());
        let action = match arrived.signal {
            Signal::Quit => ", shutting down",
            Signal::Terminate => ", exiting",
            Signal::StopAccepting if self.daemonized => ", stop accepting connections",
            Signal::Reconfigure => ", reconfiguring",
            Signal::Reopen => ", reopening logs",
            Signal::ChangeBinary if ignored => ", ignoring",
            Signal::ChangeBinary => ", changing binary",
            Signal::StopAccepting | Signal::Child | Signal::Other => "",
        };
        self.log.write(Level::Notice, &arrived.message(action));
        match arrived.signal {
            Signal::Quit => self.begin_graceful_stop(),
            Signal::Terminate => self.begin_fast_stop(),
            Signal::StopAccepting if self.daemonized => self.rest(),
            Signal::Reconfigure => self.reconfigure(),
            Signal::Reopen => self.reopen_logs(),
            Signal::ChangeBinary if ignored => self.log.write(
                Level::Crit,
                "the changing binary signal is ignored: \
                 you should shutdown or terminate before either old or new binary's process",
            ),
            Signal::ChangeBinary => self.change_binary(),
            Signal::Child => self.reap(),
            Signal::StopAccepting | Signal::Other => {}
        }
    }

    fn upgrade_is_running(&self) -> bool {
        self.new_binary.is_some() || self.old_binary_runs()
    }

    fn old_binary_runs(&self) -> bool {
        self.old_master.is_some() && rustix::process::getppid() == self.old_master
    }

    fn begin_graceful_stop(&mut self) {
        if self.stop.is_some() {
            return;
        }
        self.notifier.stopping();
        self.stop = Some(Stop::Graceful);
        self.drop_reload();
        self.tell_to_leave(&Message::Quit, rustix::process::Signal::QUIT);
        self.close_listeners();
    }

    fn begin_fast_stop(&mut self) {
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
        self.tell_to_leave(&Message::Terminate, rustix::process::Signal::TERM);
    }

    /// Tells every worker process that is not leaving already; by signal when the link is gone.
    fn tell_to_leave(&mut self, message: &Message, signal: rustix::process::Signal) {
        let mut unreachable = Vec::new();
        for worker in self.workers.iter_mut().filter(|worker| worker.phase != WorkerPhase::Leaving) {
            worker.phase = WorkerPhase::Leaving;
            if worker.link.as_mut().is_none_or(|link| link.send(message).is_err()) {
                unreachable.push(worker.pid);
            }
        }
        for pid in unreachable {
            self.kill(pid, signal);
        }
    }

    fn rest(&mut self) {
        if self.stop.is_some() {
            return;
        }
        self.resting = true;
        self.respawn.at = None;
        self.drop_reload();
        self.tell_to_leave(&Message::Quit, rustix::process::Signal::QUIT);
    }

    fn kill(&self, pid: Pid, signal: rustix::process::Signal) {
        // Not reaped yet, so the number is still its own.
        if let Err(error) = rustix::process::kill_process(pid, signal) {
            let text = format!("kill({pid}, {}) failed{}", signal.as_raw(), errno_text(&error.into()));
            self.log.write(Level::Alert, &text);
        }
    }

    fn reopen_logs(&mut self) {
        self.log.write(Level::Notice, "reopening logs");
        if let Some(Reload::Helping { reopened, .. }) = &mut self.reload {
            *reopened = true;
        }
        let reopened = self.reopen(self.open_logs());
        let mut unreachable = Vec::new();
        for worker in &mut self.workers {
            if worker.link.as_mut().is_none_or(|link| link.send_reopened(&reopened).is_err()) {
                unreachable.push(worker.pid);
            }
        }
        for pid in unreachable {
            self.kill(pid, rustix::process::Signal::USR1);
        }
        self.redirect_standard_error();
    }

    /// Those of the configuration, and of the one that is under way.
    fn open_logs(&self) -> Vec<LogHandle> {
        let mut logs = self.bundle.record.logs.clone();
        if let Some(Reload::Preparing { bundle, .. } | Reload::Replacing { bundle, .. }) = &self.reload {
            let is_new = |log: &&LogHandle| !self.bundle.record.logs.iter().any(|known| Arc::ptr_eq(known, log));
            logs.extend(bundle.record.logs.iter().filter(is_new).cloned());
        }
        logs
    }

    /// Opens them again; what fails is logged. Those that could be.
    fn reopen(&self, logs: Vec<LogHandle>) -> Vec<LogHandle> {
        let owner = self.bundle.settings.account.as_ref().filter(|_| user::is_super_user()).map(|account| account.user);
        let is_reopened = |log: &LogHandle| {
            let replaced = log_file::reopen(log.path(), owner).and_then(|descriptor| {
                log.replace(&descriptor)
                    .map_err(|error| format!("dup3() \"{}\" failed{}", log.path().display(), errno_text(&error)))
            });
            replaced.inspect_err(|message| self.log.write(Level::Emerg, message)).is_ok()
        };
        logs.into_iter().filter(is_reopened).collect()
    }

    /// The worker process had no room for the descriptors when the logs were reopened.
    fn send_logs_again(&mut self, pid: Pid) {
        self.log.write(Level::Notice, &format!("sending the log files of worker process {pid} again"));
        let logs = self.open_logs();
        if let Some(link) = self.worker_mut(pid).and_then(|worker| worker.link.as_mut()) {
            // A lost link is found and logged when it is read.
            let _ = link.send_reopened(&logs);
        }
    }

    fn redirect_standard_error(&self) {
        if let Some(file) = self.bundle.standard_error()
            && let Err(error) = rustix::stdio::dup2_stderr(&*file)
        {
            self.log.write(Level::Alert, &format!("dup2(STDERR) failed{}", errno_text(&error.into())));
        }
    }

    fn change_binary(&mut self) {
        self.log.write(Level::Notice, "changing binary");
        match upgrade::start_new_binary(&self.bundle, &self.pid_path) {
            Ok(pid) => {
                self.log.write(Level::Notice, &format!("start new binary process {pid}"));
                self.new_binary = Some(pid);
            }
            Err(message) => self.log.write(Level::Alert, &message),
        }
    }

    // Processes

    fn spawn_worker(&mut self) {
        self.log.write(Level::Notice, "start worker processes");
        match self.start_worker(&self.bundle) {
            Ok(worker) => self.workers.push(worker),
            Err(error) => {
                self.log.write(
                    Level::Alert,
                    &format!("fork() failed while spawning \"worker process\"{}", errno_text(&error)),
                );
                if self.serving_since_start {
                    self.schedule_respawn();
                } else {
                    self.fail(&Report::new(Level::Emerg, "could not start the worker process"));
                }
            }
        }
    }

    fn start_worker(&self, bundle: &Bundle) -> io::Result<WorkerProcess> {
        let (pid, mut link) = self.executable.start(Role::Worker, &bundle.request.program, &bundle.settings)?;
        self.log.write(Level::Notice, &format!("start worker process {pid}"));
        let sent = link.send_bundle(bundle);
        if let Err(error) = &sent {
            // Without its link it ends, and SIGCHLD says so.
            self.log.write(Level::Alert, &format!("the bundle could not be sent to worker process {pid}: {error}"));
        }
        let link = sent.is_ok().then_some(link);
        let since = Instant::now();
        let kill_at = Some(since + START_TIMEOUT);
        Ok(WorkerProcess { pid, link, replace_at: None, kill_at, phase: WorkerPhase::Starting, since })
    }

    fn serving_worker(&self) -> Option<&WorkerProcess> {
        self.workers.iter().find(|worker| worker.phase != WorkerPhase::Leaving)
    }

    fn worker_mut(&mut self, pid: Pid) -> Option<&mut WorkerProcess> {
        self.workers.iter_mut().find(|worker| worker.pid == pid)
    }

    fn reap(&mut self) {
        // All of them: as process 1 of a container we inherit strangers too.
        while let Ok(Some((pid, status))) = rustix::process::waitpid(None, WaitOptions::NOHANG) {
            // Its last words come first: why it exited.
            self.handle_links();
            self.handle_exit(pid, status);
        }
    }

    fn handle_exit(&mut self, pid: Pid, status: WaitStatus) {
        let is_helper = matches!(&self.reload, Some(Reload::Helping { pid: helper, .. }) if *helper == pid);
        let position = self.workers.iter().position(|worker| worker.pid == pid);
        let name = match (position, is_helper, self.new_binary == Some(pid)) {
            (Some(_), _, _) => "worker process",
            (None, true, _) => "reload helper",
            (None, false, true) => "new binary process",
            // A helper that has done its work, or a stranger.
            (None, false, false) => return,
        };
        match (status.terminating_signal(), status.exit_status()) {
            (Some(signal), _) => {
                let core = if libc::WCOREDUMP(status.as_raw()) { " (core dumped)" } else { "" };
                self.log.write(Level::Alert, &format!("{name} {pid} exited on signal {signal}{core}"));
            }
            (None, code) => {
                self.log.write(Level::Notice, &format!("{name} {pid} exited with code {}", code.unwrap_or(-1)));
            }
        }
        if is_helper {
            self.reject(Report::new(
                Level::Emerg,
                format!("reload helper {pid} died, the configuration was not changed"),
            ));
        } else if self.new_binary == Some(pid) {
            self.new_binary = None;
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

    fn handle_worker_exit(&mut self, worker: &WorkerProcess) {
        self.end_reload_of(worker.pid, "the worker process died before it was ready for the new configuration");
        if worker.phase == WorkerPhase::Leaving {
            return;
        }
        if !self.serving_since_start && self.stop.is_none() {
            self.fail(&Report::new(Level::Emerg, "the worker process failed to start"));
            return;
        }
        if worker.since.elapsed() >= RESPAWN_HEALTHY {
            self.respawn.pause = Duration::ZERO;
        }
        self.succeed();
    }

    /// Sees to it that a worker process comes after one that is gone or leaves, if one is wanted.
    fn succeed(&mut self) {
        if self.stop.is_none() && !self.resting && !self.failed {
            self.schedule_respawn();
        }
    }

    /// A worker process will say no more about the reload that it was part of.
    fn end_reload_of(&mut self, pid: Pid, why: &str) {
        match self.reload.take() {
            Some(Reload::Preparing { bundle, worker, .. } | Reload::Replacing { bundle, worker }) if worker == pid => {
                self.discard(*bundle, why);
            }
            // Acknowledged: the next process is started with the new configuration.
            Some(Reload::Committing { previous, worker, .. }) if worker == pid => self.finish_commit(&previous),
            other => self.reload = other,
        }
    }

    /// At once the first time, then later and later.
    fn schedule_respawn(&mut self) {
        let pause = self.respawn.pause;
        self.respawn.pause = (pause * 2).clamp(RESPAWN_PAUSE_MIN, RESPAWN_PAUSE_MAX);
        self.respawn.at = Some(Instant::now() + pause);
    }

    /// The first start has failed: says why on the terminal and ends.
    fn fail(&mut self, report: &Report) {
        if !std::mem::replace(&mut self.failed, true) {
            report.log_to(&*self.log);
            say(&report.render(&self.bundle.request.program));
        }
        self.begin_fast_stop();
    }

    // Links

    fn handle_links(&mut self) {
        for heard in self.hear() {
            match heard {
                Heard::Worker(pid, Ok(received)) => self.handle_worker(pid, received),
                Heard::Worker(pid, Err(error)) => self.handle_lost(pid, &error),
                Heard::Helper(Ok(received)) => self.handle_helper(received),
                // SIGCHLD tells the rest, and what it has opened it removes before.
                Heard::Helper(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {}
                Heard::Helper(Err(error)) => {
                    self.log.write(Level::Alert, &format!("the link to the reload helper was lost: {error}"));
                }
            }
        }
    }

    fn hear(&mut self) -> VecDeque<Heard> {
        let mut heard = VecDeque::new();
        for worker in &mut self.workers {
            let Some(link) = &mut worker.link else {
                continue;
            };
            let result = drain(link, |received| heard.push_back(Heard::Worker(worker.pid, Ok(received))));
            if let Err(error) = result {
                worker.link = None;
                worker.replace_at = Some(Instant::now() + LOST_GRACE);
                heard.push_back(Heard::Worker(worker.pid, Err(error)));
            }
        }
        if let Some(Reload::Helping { link: maybe_link, .. }) = &mut self.reload
            && let Some(link) = maybe_link
        {
            let result = drain(link, |received| heard.push_back(Heard::Helper(Ok(received))));
            if let Err(error) = result {
                *maybe_link = None;
                heard.push_back(Heard::Helper(Err(error)));
            }
        }
        heard
    }

    /// A process that has gone is SIGCHLD's business, one that has not is `replace_lost`'s. One that talks nonsense is ended.
    fn handle_lost(&mut self, pid: Pid, error: &io::Error) {
        if matches!(
            error.kind(),
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
        ) {
            return;
        }
        self.log.write(Level::Alert, &format!("the link to worker process {pid} was lost: {error}"));
        self.kill(pid, rustix::process::Signal::TERM);
    }

    /// This process serves, but hears no orders any more. A successor with the same configuration takes over, and the old
    /// one drains, as in a reload that needs a new process.
    fn replace_lost(&mut self, pid: Pid, now: Instant) {
        // SIGCHLD may have been taken by somebody else.
        let is_gone = matches!(rustix::process::waitpid(Some(pid), WaitOptions::NOHANG), Err(rustix::io::Errno::CHILD));
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

    fn handle_worker(&mut self, pid: Pid, received: Received) {
        let Received::Message(message) = received else {
            return self.log.write(Level::Alert, &format!("unexpected bundle from worker process {pid}"));
        };
        match message {
            Message::Ready { .. } => self.handle_ready(pid),
            Message::Prepared { generation } => self.handle_prepared(pid, generation),
            Message::Committed { .. } => self.handle_committed(pid),
            Message::Refused { report, .. } => self.handle_refused(pid, report),
            Message::Log { level, message } => self.log.write(level, &message),
            Message::Leaving => self.handle_leaving(pid),
            Message::ReopenAgain => self.send_logs_again(pid),
            _ => self.log.write(Level::Alert, &format!("unexpected message from worker process {pid}")),
        }
    }

    fn handle_ready(&mut self, pid: Pid) {
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
                self.retire_all_but(pid);
                let previous = self.acknowledge(bundle);
                self.finish_commit(&previous);
            }
            other => {
                self.reload = other;
                self.take_up_wanted_reload();
            }
        }
    }

    /// A worker process drains. Unless we told it to, somebody signalled it, and it has to be succeeded.
    fn handle_leaving(&mut self, pid: Pid) {
        let unasked = self.worker_mut(pid).is_some_and(|worker| worker.phase != WorkerPhase::Leaving);
        if !unasked {
            return;
        }
        if let Some(worker) = self.worker_mut(pid) {
            worker.phase = WorkerPhase::Leaving;
        }
        self.end_reload_of(pid, "the worker process was told to leave");
        self.succeed();
    }

    fn retire_all_but(&mut self, pid: Pid) {
        let mut unreachable = Vec::new();
        for worker in self.workers.iter_mut().filter(|worker| worker.pid != pid) {
            worker.phase = WorkerPhase::Leaving;
            if worker.link.as_mut().is_none_or(|link| link.send(&Message::Quit).is_err()) {
                unreachable.push(worker.pid);
            }
        }
        for pid in unreachable {
            self.kill(pid, rustix::process::Signal::QUIT);
        }
    }

    fn handle_refused(&mut self, pid: Pid, report: Report) {
        let ours = matches!(&self.reload,
            Some(Reload::Preparing { worker, .. } | Reload::Replacing { worker, .. }) if *worker == pid);
        if ours {
            self.reject(report);
        } else if self.serving_since_start {
            // A worker process that was started again and cannot: it exits, and is started later once more.
            report.log_to(&*self.log);
        } else {
            self.fail(&report);
        }
    }

    // Reload

    fn reconfigure(&mut self) {
        if self.stop.is_some() {
            return;
        }
        // In an upgrade, HUP brings the old binary's worker back.
        if self.resting && self.new_binary.is_some() {
            self.resting = false;
            return self.spawn_worker();
        }
        if self.reload.is_some() || !self.serving_since_start {
            self.log.write(Level::Notice, "still busy with the previous configuration, this one follows");
            self.reload_wanted = true;
            return;
        }
        self.log.write(Level::Notice, "reconfiguring");
        self.notifier.reloading();
        let started = self.executable.start(Role::Helper, &self.bundle.request.program, &self.bundle.settings);
        let sent = started.and_then(|(pid, mut link)| {
            link.send_bundle(&self.bundle)?;
            link.send(&Message::Build { request: self.bundle.request.clone() })?;
            Ok((pid, link))
        });
        match sent {
            Ok((pid, link)) => {
                let link = Some(link);
                self.reload =
                    Some(Reload::Helping { pid, link, until: Instant::now() + HELPER_TIMEOUT, reopened: false });
            }
            Err(error) => {
                self.reject(Report::new(
                    Level::Emerg,
                    format!("could not start the reload helper{}", errno_text(&error)),
                ));
            }
        }
    }

    fn handle_helper(&mut self, received: Received) {
        match received {
            Received::Message(Message::Log { level, message }) => self.log.write(level, &message),
            Received::Message(Message::Refused { report, .. }) => self.reject(report),
            Received::BundleLost { .. } => {
                let text = "the master process has too many open files to receive the new configuration";
                self.reject(Report::new(Level::Emerg, text));
            }
            Received::Bundle(bundle) => {
                if let Some(Reload::Helping { link: Some(link), .. }) = &mut self.reload {
                    // From here on we remove what it has opened. If the helper does not hear that, it has ended.
                    let _ = link.send(&Message::Taken);
                }
                self.prepare(bundle);
            }
            _ => self.log.write(Level::Alert, "unexpected message from the reload helper"),
        }
    }

    /// The bundle is complete: whoever is to serve it has to build it now.
    fn prepare(&mut self, mut bundle: Box<Bundle>) {
        self.generation += 1;
        bundle.generation = self.generation;
        if let Some(Reload::Helping { reopened: true, .. }) = &self.reload {
            self.reopen(bundle.record.logs.clone());
        }
        bundle.adopt(&self.bundle);
        let is_reachable = |worker: &WorkerProcess| worker.phase == WorkerPhase::Serving && worker.link.is_some();
        let serving = self.workers.iter().position(is_reachable);
        let in_place = serving.filter(|_| !self.bundle.settings.needs_new_process(&bundle.settings));
        let Some(position) = in_place else {
            return self.replace_worker(bundle);
        };
        self.raise_descriptor_limit(self.workers[position].pid, &bundle);
        let worker = &mut self.workers[position];
        let pid = worker.pid;
        match worker.link.as_mut().map(|link| link.send_bundle(&bundle)) {
            Some(Ok(())) => {
                let until = Instant::now() + PREPARE_TIMEOUT;
                self.reload = Some(Reload::Preparing { bundle, worker: pid, until });
            }
            _ => self.discard(*bundle, "the worker process cannot be reached"),
        }
    }

    fn replace_worker(&mut self, bundle: Box<Bundle>) {
        match self.start_worker(&bundle) {
            Ok(worker) => {
                let pid = worker.pid;
                self.workers.push(worker);
                self.reload = Some(Reload::Replacing { bundle, worker: pid });
            }
            Err(error) => {
                let text = format!("fork() failed while spawning \"worker process\"{}", errno_text(&error));
                self.discard(*bundle, &text);
            }
        }
    }

    /// The worker may not raise its own limit, we may. If not even we, it says so itself.
    fn raise_descriptor_limit(&self, pid: Pid, bundle: &Bundle) {
        if let Some(limit) = bundle.settings.rlimit_nofile {
            let limits = Rlimit { current: Some(limit), maximum: Some(limit) };
            let _ = rustix::process::prlimit(Some(pid), Resource::Nofile, limits);
        }
    }

    fn handle_prepared(&mut self, pid: Pid, generation: u64) {
        match self.reload.take() {
            Some(Reload::Preparing { bundle, worker, .. }) if worker == pid && bundle.generation == generation => {
                let previous = self.acknowledge(bundle);
                self.reload = Some(Reload::Committing { previous, worker, until: Instant::now() + COMMIT_TIMEOUT });
            }
            other => {
                self.reload = other;
                self.handle_prepared_late(pid);
            }
        }
    }

    /// The worker process changes over to what was given up. It serves the wrong configuration, so another takes its place.
    fn handle_prepared_late(&mut self, pid: Pid) {
        self.log.write(Level::Alert, &format!("worker process {pid} was prepared too late"));
        if let Some(worker) = self.worker_mut(pid) {
            worker.link = None;
            worker.replace_at = Some(Instant::now());
        }
    }

    /// From here on this is the configuration, whatever happens to the worker. Our copies of removed sockets are closed with
    /// the previous bundle; the worker has its own, accepts what they have queued, and is the last to close them. The other
    /// way round, what is queued between its last look and our closing would be reset.
    fn acknowledge(&mut self, bundle: Box<Bundle>) -> Vec<ListenAddress> {
        let previous = std::mem::replace(&mut self.bundle, bundle);
        self.log = self.program.error_log(&self.bundle.error_log_targets());
        for listener in &self.bundle.record.listeners {
            if let Some(old) = previous.spec_of(listener) {
                listen::configure(listener, Some(old), &*self.log);
            }
        }
        self.move_pid_file();
        self.redirect_standard_error();
        previous.addresses()
    }

    /// To where the configuration wants it; not while the file of a new binary is in that place.
    fn move_pid_file(&mut self) {
        let wanted = &self.bundle.settings.pid_path;
        if self.new_binary.is_none() && pid_file::change(&self.pid_path, wanted, &*self.log) {
            self.pid_path = wanted.clone();
        }
    }

    fn handle_committed(&mut self, pid: Pid) {
        match self.reload.take() {
            Some(Reload::Committing { previous, worker, .. }) if worker == pid => self.finish_commit(&previous),
            other => self.reload = other,
        }
    }

    fn finish_commit(&mut self, previous: &[ListenAddress]) {
        system::remove_old_socket_files(previous, &self.bundle, &*self.log);
        self.notifier.ready();
        self.take_up_wanted_reload();
    }

    fn take_up_wanted_reload(&mut self) {
        if self.reload.is_none() && std::mem::take(&mut self.reload_wanted) {
            self.reconfigure();
        }
    }

    /// The new configuration is no good: says why, and the old one serves on.
    fn reject(&mut self, report: Report) {
        match self.reload.take() {
            Some(Reload::Preparing { bundle, .. } | Reload::Replacing { bundle, .. }) => {
                system::remove_rejected_socket_files(&bundle, &self.bundle, &*self.log);
            }
            Some(Reload::Helping { .. } | Reload::Committing { .. }) | None => {}
        }
        report.log_to(&*self.log);
        self.notifier.ready();
        self.take_up_wanted_reload();
    }

    fn discard(&mut self, bundle: Bundle, why: &str) {
        self.reload = None;
        system::remove_rejected_socket_files(&bundle, &self.bundle, &*self.log);
        drop(bundle);
        self.reject(Report::new(Level::Emerg, format!("{why}, the old configuration stays")));
    }

    fn drop_reload(&mut self) {
        self.reload_wanted = false;
        match self.reload.take() {
            Some(Reload::Helping { pid, .. }) => self.kill(pid, rustix::process::Signal::KILL),
            Some(Reload::Preparing { bundle, .. } | Reload::Replacing { bundle, .. }) => {
                system::remove_rejected_socket_files(&bundle, &self.bundle, &*self.log);
            }
            Some(Reload::Committing { previous, .. }) => {
                system::remove_old_socket_files(&previous, &self.bundle, &*self.log);
            }
            None => {}
        }
    }

    // The end

    fn close_listeners(&mut self) {
        // As nginx: not while another binary uses the files.
        let shared = self.upgrade_is_running();
        for listener in std::mem::take(&mut self.bundle.record.listeners) {
            if !shared || (!listener.inherited && self.new_binary.is_none()) {
                system::remove_socket_file(&listener, &*self.log);
            }
        }
    }

    fn leave(&mut self) {
        let path = if self.new_binary.is_some() { pid_file::old_path(&self.pid_path) } else { self.pid_path.clone() };
        pid_file::remove(&path, &*self.log);
        self.close_listeners();
        self.log.write(Level::Notice, "exit");
        self.program.finish();
    }
}

/// Reads what has arrived, everything before the error included.
fn drain(link: &mut Link, mut hear: impl FnMut(Received)) -> io::Result<()> {
    let flushed = link.flush();
    while let Some(received) = link.receive()? {
        hear(received);
    }
    flushed
}
