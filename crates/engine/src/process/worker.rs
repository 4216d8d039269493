//! The worker process: one control thread (this file) and an event loop per worker.
//!
//! ```text
//!   reload:  bundle ─► building (own thread) ─► growing (new loops set up) ─► committing ─► settled
//!                          │ refused                │ refused      │ "prepared"      │ "committed"
//! ```
//!
//! The control thread only polls: signals, the link, events of the loops. It waits for no loop; whoever is stuck delays
//! neither a fast stop nor the others. With `master_process off` the same control does what little a master does.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::process::{DumpableBehavior, Resource, Rlimit};

use super::bundle::Bundle;
use super::daemon::Waiting;
use super::errors::{ErrorLog, KeptLog, Level, Report, errno_text, say};
use super::helper;
use super::link::{Link, Message, Received};
use super::listen;
use super::log_file::{self, LogHandle};
use super::loops::{self, Change, Events, LoopEvent, LoopHandle, Order};
use super::notify::Notifier;
use super::pid_file;
use super::program::{BuildRequest, Built, Program, Seat};
use super::settings::{ProcessSettings, WORKERS_MAX};
use super::signals::{Arrived, Signal, Signals, timespec};
use super::system::{self, SystemResources};

/// Longest wait for the first bundle.
const BUNDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a fast stop waits for the loops to end, so that what they hold is dropped in order.
const LOOPS_STOP_TIMEOUT: Duration = Duration::from_millis(500);
/// How long it then waits for `Program::finish`.
const FINISH_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a change of log files waits for loops that still hold lines for the old ones.
const LOOPS_REOPEN_TIMEOUT: Duration = Duration::from_millis(500);
/// How often it is looked whether an old configuration is free.
const RETIRED_CHECK: Duration = Duration::from_secs(1);
/// Longest time that a build may take. `master_process off` may have to wait for slow name servers meanwhile.
const BUILD_TIMEOUT: Duration = Duration::from_secs(90);
/// Builds that run at the same time: one that was given up may still be under way.
const BUILDERS_MAX: usize = 3;
/// Longest time that new loops may take to be set up.
const GROW_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a loop may take to change over before it counts as stuck.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long this process waits before it asks once more for logs that it had no descriptors for.
const ASK_FOR_LOGS_PAUSE: Duration = Duration::from_secs(1);
/// Why something did not come through the link.
const NO_ROOM: &str = "the worker process has too many open files to receive more (worker_rlimit_nofile)";
/// Exit status that nginx's workers use for what another try would not mend.
const EXIT_FATAL: u8 = 2;

/// Runs the worker process on the link to its master.
pub(super) fn run<P: Program>(program: P, signals: Signals, mut link: Link) -> ExitCode {
    // Only cosmetic: the name in `ps -L` and `top`.
    let _ = rustix::thread::set_name(c"gale worker");
    let mut bundle = match link.wait(Instant::now() + BUNDLE_TIMEOUT) {
        Ok(Received::Bundle(bundle)) => bundle,
        other => {
            let why = match other {
                Ok(Received::BundleLost { .. }) => NO_ROOM.to_owned(),
                Ok(_) => "unexpected message from the master process".to_owned(),
                Err(error) => format!("no configuration came from the master process: {error}"),
            };
            let refused = Message::Refused { generation: 0, report: Report::new(Level::Emerg, &why).bounded() };
            if link.send(&refused).is_err() {
                say(&format!("worker process: [emerg] {why}\n"));
            }
            return ExitCode::from(EXIT_FATAL);
        }
    };
    let generation = bundle.generation;
    let log = program.error_log(&bundle.error_log_targets());
    let prepared = prepare(&program, &mut bundle, &*log);
    match prepared {
        Ok(configuration) => {
            match Control::new(program, signals, Arc::clone(&log), *bundle, configuration, Origin::Master(Some(link))) {
                Ok(control) => control.run(),
                Err(error) => {
                    log.write(Level::Emerg, &format!("the worker process could not be set up{}", errno_text(&error)));
                    ExitCode::from(EXIT_FATAL)
                }
            }
        }
        Err(report) => {
            report.log_to(&*log);
            let _ = link.send(&Message::Refused { generation, report: report.bounded() });
            let _ = link.drain(Instant::now() + BUNDLE_TIMEOUT);
            program.finish();
            ExitCode::from(EXIT_FATAL)
        }
    }
}

/// What a process without a master looks after itself.
pub(super) struct Single {
    pub waiting: Option<Waiting>,
    pub notifier: Notifier,
}

/// Runs everything in this process: `master_process off`.
pub(super) fn run_single<P: Program>(
    program: P,
    signals: Signals,
    bundle: Bundle,
    configuration: P::Configuration,
    single: Single,
) -> ExitCode {
    let log = program.error_log(&bundle.error_log_targets());
    match Control::new(program, signals, Arc::clone(&log), bundle, configuration, Origin::Single(single)) {
        Ok(control) => control.run(),
        Err(error) => {
            log.write(Level::Emerg, &format!("the process could not be set up{}", errno_text(&error)));
            ExitCode::FAILURE
        }
    }
}

/// Becomes the worker: limits, user, directory; then builds. The user changes before the first thread.
fn prepare<P: Program>(program: &P, bundle: &mut Bundle, log: &dyn ErrorLog) -> Result<P::Configuration, Report> {
    let emerg = |message: String| Report::new(Level::Emerg, message);
    let kept = KeptLog::default();
    let became = become_worker(&bundle.settings, &kept);
    kept.pass_on(log);
    became.map_err(emerg)?;
    // On a thread of its own, as in a reload: the allocator then finds the memory of
    // this build again for the next one.
    let built = thread::scope(|scope| {
        let build = || helper::guarded(|| program.build(&bundle.request, &mut bundle.resources()));
        let builder = thread::Builder::new().name("builder".into()).spawn_scoped(scope, build);
        let builder = builder.map_err(|error| emerg(format!("pthread_create() failed{}", errno_text(&error))))?;
        builder.join().map_err(|_| emerg("the builder thread panicked".to_owned()))?
    })?;
    Ok(built.configuration)
}

fn become_worker(settings: &ProcessSettings, log: &dyn ErrorLog) -> Result<(), String> {
    if settings.priority != 0
        && let Err(error) = rustix::process::setpriority_process(None, settings.priority)
    {
        let why = errno_text(&error.into());
        log.write(Level::Alert, &format!("setpriority({}) failed{why}", settings.priority));
    }
    if let Some(limit) = settings.rlimit_nofile {
        limit_descriptors(limit, log);
    }
    if let Some(limit) = settings.rlimit_core {
        let limits = Rlimit { current: Some(limit), maximum: Some(limit) };
        if let Err(error) = rustix::process::setrlimit(Resource::Core, limits) {
            log.write(Level::Alert, &format!("setrlimit(RLIMIT_CORE, {limit}) failed{}", errno_text(&error.into())));
        }
    }
    if let Some(account) = &settings.account {
        account.assume(settings.keep_net_raw)?;
    }
    // A change of user forbids core dumps until they are allowed again.
    if let Err(error) = rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable) {
        log.write(Level::Alert, &format!("prctl(PR_SET_DUMPABLE) failed{}", errno_text(&error.into())));
    }
    if let Some(directory) = &settings.working_directory {
        std::env::set_current_dir(directory)
            .map_err(|error| format!("chdir(\"{}\") failed{}", directory.display(), errno_text(&error)))?;
    }
    Ok(())
}

fn limit_descriptors(limit: u64, log: &dyn ErrorLog) {
    let limits = Rlimit { current: Some(limit), maximum: Some(limit) };
    if rustix::process::getrlimit(Resource::Nofile) == limits {
        return; // the master may have set it for us, which we might not be allowed to
    }
    if let Err(error) = rustix::process::setrlimit(Resource::Nofile, limits) {
        log.write(Level::Alert, &format!("setrlimit(RLIMIT_NOFILE, {limit}) failed{}", errno_text(&error.into())));
    }
}

/// Who gives the orders.
enum Origin {
    /// The master, or nobody any more.
    Master(Option<Link>),
    /// `master_process off`
    Single(Single),
}

/// What the control thread hears from other threads of this process.
enum Event<C> {
    Loop(u64, LoopEvent),
    Built(Box<Bundle>, Built<C>),
    NotBuilt { generation: u64, report: Report },
    Finished,
}

/// One event loop.
struct Loop<C> {
    id: u64,
    worker: usize,
    handle: LoopHandle<C>,
    phase: LoopPhase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LoopPhase {
    /// Its thread sets it up.
    SettingUp,
    /// Set up, not yet part of the service.
    Idle,
    Serving,
    /// Accepts no more from some moment on; `until` bounds it.
    Draining {
        until: Option<Instant>,
        stopped_accepting: bool,
        /// Its connections have been told to close.
        expired: bool,
    },
    /// Told to end.
    Stopping,
}

/// Where a reload stands. See the head of the file.
enum Reload<C> {
    /// `logs` are those of the bundle, which the builder has.
    Building {
        generation: u64,
        logs: Vec<LogHandle>,
        until: Instant,
    },
    Growing {
        bundle: Box<Bundle>,
        configuration: Arc<C>,
        waiting: BTreeSet<u64>,
        until: Instant,
    },
    Committing {
        generation: u64,
        previous: Box<Bundle>,
        change: ChangeOver,
    },
}

/// A change that the loops have been told of.
struct ChangeOver {
    number: u64,
    /// Loops that serve after it.
    workers: usize,
    waiting: BTreeSet<u64>,
    until: Instant,
}

/// A configuration that was replaced and that something still holds.
struct Retired<C> {
    configuration: Arc<C>,
    expires: Option<Instant>,
}

/// Log files are about to change; the loops write out what they have gathered first.
struct Reopening {
    waiting: BTreeSet<u64>,
    until: Instant,
    logs: Reopened,
}

/// Who opens the files.
enum Reopened {
    /// This process, as far as it may.
    Here,
    ByMaster(Vec<(PathBuf, OwnedFd)>),
}

enum Stop {
    /// Connections finish; `until` is `worker_shutdown_timeout`.
    Graceful { until: Option<Instant> },
    /// Loops are ending.
    Fast { until: Instant },
    /// `Program::finish` runs.
    Finishing { until: Instant },
}

struct Control<P: Program> {
    program: Arc<P>,
    signals: Signals,
    log: Arc<dyn ErrorLog>,
    /// /dev/null, for sockets to be closed under their holders.
    null: OwnedFd,
    origin: Origin,
    events: Arc<Events<Event<P::Configuration>>>,
    /// Number of the newest bundle that this process itself began to build: `master_process off`.
    generation: u64,
    bundle: Box<Bundle>,
    configuration: Arc<P::Configuration>,
    loops: Vec<Loop<P::Configuration>>,
    next_loop: u64,
    next_change: u64,
    /// Builds that run.
    builders: usize,
    /// The first configuration serves on every loop.
    started: bool,
    reload: Option<Reload<P::Configuration>>,
    reload_wanted: bool,
    reopening: Option<Reopening>,
    /// After the reload, once more.
    reopen_wanted: bool,
    /// Reopened logs did not come through.
    ask_for_logs_at: Option<Instant>,
    retired: Vec<Retired<P::Configuration>>,
    stop: Option<Stop>,
    exit_code: u8,
}

impl<P: Program> Control<P> {
    fn new(
        program: P,
        signals: Signals,
        log: Arc<dyn ErrorLog>,
        bundle: Bundle,
        configuration: P::Configuration,
        origin: Origin,
    ) -> io::Result<Control<P>> {
        Ok(Control {
            program: Arc::new(program),
            signals,
            log,
            null: listen::open_null()?,
            origin,
            events: Arc::new(Events::new()?),
            generation: bundle.generation,
            bundle: Box::new(bundle),
            configuration: Arc::new(configuration),
            loops: Vec::new(),
            next_loop: 0,
            next_change: 0,
            builders: 0,
            started: false,
            reload: None,
            reload_wanted: false,
            reopening: None,
            reopen_wanted: false,
            ask_for_logs_at: None,
            retired: Vec::new(),
            stop: None,
            exit_code: 0,
        })
    }

    fn run(mut self) -> ExitCode {
        for worker in 0..worker_count(&self.bundle.settings) {
            if let Err(error) = self.spawn_loop(worker, &Arc::clone(&self.configuration)) {
                self.fail_to_start(format!("pthread_create() failed{}", errno_text(&error)));
                break;
            }
        }
        loop {
            self.wait();
            while let Some(arrived) = self.signals.next() {
                self.handle_signal(&arrived);
            }
            for event in self.events.take() {
                self.handle_event(event);
            }
            self.handle_link();
            self.check_reload();
            self.check_retired();
            self.check_draining();
            self.check_reopening(None);
            self.check_lost_logs();
            if self.check_stop() {
                break;
            }
        }
        if let Origin::Single(_) = self.origin {
            self.leave_single();
        }
        // Not a return from main: a stuck thread must not be waited for, nor run against destructors of statics.
        process::exit(self.exit_code.into())
    }

    fn wait(&self) {
        let link = match &self.origin {
            Origin::Master(Some(link)) => Some(link),
            _ => None,
        };
        let mut polled = vec![PollFd::new(&self.signals, PollFlags::IN), PollFd::new(&*self.events, PollFlags::IN)];
        polled.extend(link.map(|link| PollFd::new(link, link.interest())));
        let timeout = self.next_deadline().map(|at| timespec(at.saturating_duration_since(Instant::now())));
        // An interrupted wait is a short one.
        let _ = rustix::event::poll(&mut polled, timeout.as_ref());
    }

    fn next_deadline(&self) -> Option<Instant> {
        let stop = match self.stop {
            Some(Stop::Graceful { until }) => until.map(|until| until + 2 * LOOPS_STOP_TIMEOUT),
            Some(Stop::Fast { until } | Stop::Finishing { until }) => Some(until),
            None => None,
        };
        let draining = self.loops.iter().filter_map(|each| match each.phase {
            LoopPhase::Draining { until, .. } => until,
            _ => None,
        });
        let expiring = self.retired.iter().filter_map(|retired| retired.expires);
        let retired = (!self.retired.is_empty()).then(|| Instant::now() + RETIRED_CHECK);
        let reopening = self.reopening.as_ref().map(|reopening| reopening.until);
        let reload = self.reload.as_ref().map(|reload| match reload {
            Reload::Building { until, .. } | Reload::Growing { until, .. } => *until,
            Reload::Committing { change, .. } => change.until,
        });
        let retry = match &self.origin {
            Origin::Master(Some(link)) => link.retry_at(),
            _ => None,
        };
        stop.into_iter()
            .chain(reload)
            .chain(retry)
            .chain(reopening)
            .chain(self.ask_for_logs_at)
            .chain(draining)
            .chain(expiring)
            .chain(retired)
            .min()
    }

    // Signals

    fn handle_signal(&mut self, arrived: &Arrived) {
        let single = matches!(self.origin, Origin::Single(_));
        // On a terminal every change of its size sends WINCH to the whole process group.
        let stops_accepting = !single && self.bundle.settings.daemon;
        let action = match arrived.signal {
            Signal::Quit => ", shutting down",
            Signal::StopAccepting if stops_accepting => ", shutting down",
            Signal::Terminate => ", exiting",
            Signal::Reopen => ", reopening logs",
            Signal::Reconfigure if single => ", reconfiguring",
            Signal::Reconfigure | Signal::ChangeBinary => ", ignoring",
            _ => "",
        };
        self.log.write(Level::Notice, &arrived.message(action));
        match action {
            ", shutting down" => self.begin_graceful_stop(),
            ", exiting" => self.begin_fast_stop(),
            ", reopening logs" => self.begin_reopening(Reopened::Here),
            ", reconfiguring" => self.begin_own_reload(),
            _ => {}
        }
    }

    fn begin_reopening(&mut self, logs: Reopened) {
        self.log.write(Level::Notice, "reopening logs");
        if let (Origin::Single(_), Some(Reload::Building { .. })) = (&self.origin, &self.reload) {
            self.reopen_wanted = true; // what the builder has opened meanwhile is not known yet
        }
        let logs = match (self.reopening.take().map(|earlier| earlier.logs), logs) {
            (Some(Reopened::ByMaster(mut earlier)), Reopened::ByMaster(logs)) => {
                earlier.extend(logs);
                Reopened::ByMaster(earlier)
            }
            (_, logs) => logs,
        };
        let has_taken = |each: &&Loop<_>| each.phase != LoopPhase::Stopping && each.handle.order(Order::Reopen);
        let waiting = self.loops.iter().filter(has_taken).map(|each| each.id).collect();
        self.reopening = Some(Reopening { waiting, until: Instant::now() + LOOPS_REOPEN_TIMEOUT, logs });
        self.check_reopening(None);
    }

    /// A signal of our own, without the master's help: what we may open ourselves.
    fn reopen_logs(&mut self) {
        let paths: BTreeSet<PathBuf> = self.open_logs().map(|log| log.path().to_owned()).collect();
        for path in paths {
            match log_file::reopen(&path, None) {
                Ok(descriptor) => self.replace_log(&path, &descriptor),
                Err(message) => self.log.write(Level::Emerg, &message),
            }
        }
    }

    /// Those of the configuration, and of the one that is under way.
    fn open_logs(&self) -> impl Iterator<Item = &LogHandle> {
        let coming = match &self.reload {
            Some(Reload::Building { logs, .. }) => logs.as_slice(),
            Some(Reload::Growing { bundle, .. }) => &bundle.record.logs,
            Some(Reload::Committing { .. }) | None => &[],
        };
        self.bundle.record.logs.iter().chain(coming)
    }

    fn replace_log(&self, path: &Path, descriptor: &OwnedFd) {
        for log in self.open_logs().filter(|log| log.path() == path) {
            if let Err(error) = log.replace(descriptor) {
                self.log.write(Level::Alert, &format!("dup3() \"{}\" failed{}", path.display(), errno_text(&error)));
            }
        }
    }

    fn redirect_standard_error(&self) {
        if let Some(file) = self.bundle.standard_error()
            && let Err(error) = rustix::stdio::dup2_stderr(&*file)
        {
            self.log.write(Level::Alert, &format!("dup2(STDERR) failed{}", errno_text(&error.into())));
        }
    }

    // The link

    fn handle_link(&mut self) {
        loop {
            let Origin::Master(Some(link)) = &mut self.origin else {
                return;
            };
            let received = link.flush().and_then(|()| link.receive());
            match received {
                Ok(Some(received)) => self.handle_received(received),
                Ok(None) => return,
                Err(error) => {
                    let why = match error.kind() {
                        io::ErrorKind::UnexpectedEof => String::new(),
                        _ => format!(": {error}"),
                    };
                    let text = format!("the link to the master process was lost{why}, serving on until signalled");
                    self.log.write(Level::Alert, &text);
                    self.origin = Origin::Master(None);
                }
            }
        }
    }

    fn handle_received(&mut self, received: Received) {
        match received {
            Received::Bundle(bundle) => self.begin_reload(bundle),
            Received::BundleLost { generation } => {
                self.tell_refused(generation, Report::new(Level::Emerg, NO_ROOM));
            }
            Received::ReopenedLost => {
                self.log.write(Level::Alert, &format!("log files could not be reopened: {NO_ROOM}, trying again"));
                self.ask_for_logs_at = Some(Instant::now() + ASK_FOR_LOGS_PAUSE);
            }
            Received::Reopened(logs) => self.begin_reopening(Reopened::ByMaster(logs)),
            Received::Message(Message::Quit) => self.begin_graceful_stop(),
            Received::Message(Message::Terminate) => self.begin_fast_stop(),
            Received::Message(_) => self.log.write(Level::Alert, "unexpected message from the master process"),
        }
    }

    fn tell_master(&mut self, message: &Message) {
        if let Origin::Master(Some(link)) = &mut self.origin
            && link.send(message).is_err()
        {
            // Seen and logged by the next look at the link.
        }
    }

    // Reload

    fn begin_reload(&mut self, mut bundle: Box<Bundle>) {
        let generation = bundle.generation;
        let busy = match (&self.stop, &self.reload, self.started) {
            (Some(_), _, _) => Some("the worker process is shutting down"),
            (None, Some(_), _) => Some("the worker process is still busy with another configuration"),
            (None, None, false) => Some("the worker process is still starting"),
            (None, None, true) if self.builders >= BUILDERS_MAX => Some("earlier configurations are still being built"),
            (None, None, true) => None,
        };
        if let Some(why) = busy {
            return self.tell_refused(generation, Report::new(Level::Emerg, why));
        }
        bundle.adopt(&self.bundle);
        let program = Arc::clone(&self.program);
        let logs = bundle.record.logs.clone();
        self.build(generation, logs, move || {
            let built = program.build(&bundle.request, &mut bundle.resources())?;
            Ok((*bundle, built))
        });
    }

    fn begin_own_reload(&mut self) {
        if self.stop.is_some() {
            return;
        }
        if self.reload.is_some() || !self.started || self.builders >= BUILDERS_MAX {
            self.reload_wanted = true;
            return;
        }
        self.log.write(Level::Notice, "reconfiguring");
        if let Origin::Single(single) = &self.origin {
            single.notifier.reloading();
        }
        let (program, log) = (Arc::clone(&self.program), Arc::clone(&self.log));
        let request: BuildRequest = self.bundle.request.clone();
        let open = self.bundle.record.listeners.clone();
        self.generation += 1;
        let generation = self.generation;
        self.build(generation, Vec::new(), move || {
            let resources = SystemResources::new(Arc::clone(&log)).with_existing(open);
            let helper::Fresh { mut bundle, built, .. } = helper::build(&*program, request, resources)?;
            built.warnings.log_to(&*log);
            bundle.generation = generation;
            Ok((bundle, built))
        });
    }

    /// Runs a build on a thread of its own.
    fn build(
        &mut self,
        generation: u64,
        logs: Vec<LogHandle>,
        build: impl FnOnce() -> Result<(Bundle, Built<P::Configuration>), Report> + Send + 'static,
    ) {
        let events = Arc::clone(&self.events);
        let spawned = thread::Builder::new().name("builder".into()).spawn(move || {
            events.push(match helper::guarded(build) {
                Ok((bundle, built)) => Event::Built(Box::new(bundle), built),
                Err(report) => Event::NotBuilt { generation, report },
            });
        });
        match spawned {
            Ok(_) => {
                self.builders += 1;
                self.reload = Some(Reload::Building { generation, logs, until: Instant::now() + BUILD_TIMEOUT });
            }
            Err(error) => {
                let message = format!("pthread_create() failed{}", errno_text(&error));
                self.refuse(generation, Report::new(Level::Emerg, message));
            }
        }
    }

    fn refuse(&mut self, generation: u64, report: Report) {
        match &self.origin {
            Origin::Single(single) => {
                report.log_to(&*self.log);
                single.notifier.ready();
            }
            Origin::Master(_) => self.tell_refused(generation, report),
        }
        self.finish_reload();
    }

    fn tell_refused(&mut self, generation: u64, report: Report) {
        self.tell_master(&Message::Refused { generation, report: report.bounded() });
    }

    fn finish_reload(&mut self) {
        self.reload = None;
        if std::mem::take(&mut self.reopen_wanted) {
            self.begin_reopening(Reopened::Here);
        }
        self.take_up_wanted_reload();
    }

    fn take_up_wanted_reload(&mut self) {
        if self.reload.is_none() && std::mem::take(&mut self.reload_wanted) {
            self.begin_own_reload();
        }
    }

    /// A build has ended; true when it is still waited for.
    fn has_awaited(&mut self, built: u64) -> bool {
        self.builders -= 1;
        let awaited = matches!(&self.reload, Some(Reload::Building { generation, .. }) if *generation == built);
        if !awaited {
            // A wanted reload may have waited for room among the builders.
            self.take_up_wanted_reload();
        }
        awaited
    }

    /// Gives up what takes too long.
    fn check_reload(&mut self) {
        let now = Instant::now();
        match self.reload.take() {
            Some(Reload::Building { generation, until, .. }) if until <= now => {
                let text = format!("the configuration was not built within {} seconds", BUILD_TIMEOUT.as_secs());
                self.refuse(generation, Report::new(Level::Emerg, text));
            }
            Some(Reload::Growing { bundle, until, .. }) if until <= now => {
                let text = format!("new event loops were not set up within {} seconds", GROW_TIMEOUT.as_secs());
                self.give_up_growing(&bundle, text);
            }
            Some(Reload::Committing { generation, previous, mut change }) if change.until <= now => {
                for stuck in self.loops.iter().filter(|each| change.waiting.contains(&each.id)) {
                    let text = format!("worker {} is stuck, going on without it", stuck.worker);
                    self.log.write(Level::Alert, &text);
                }
                change.waiting.clear();
                self.reload = Some(Reload::Committing { generation, previous, change });
                self.continue_committing(None);
            }
            other => self.reload = other,
        }
    }

    /// The configuration is good; first the loops it needs more.
    fn begin_growing(&mut self, bundle: Box<Bundle>, configuration: P::Configuration) {
        if self.stop.is_some() {
            self.reload = None;
            return self.abandon(&bundle);
        }
        let configuration = Arc::new(configuration);
        let serving = self.loops.iter().filter(|each| each.phase == LoopPhase::Serving).count();
        let mut waiting = BTreeSet::new();
        for worker in serving..worker_count(&bundle.settings) {
            match self.spawn_loop(worker, &configuration) {
                Ok(id) => drop(waiting.insert(id)),
                Err(error) => {
                    let message = format!("pthread_create() failed{}", errno_text(&error));
                    return self.give_up_growing(&bundle, message);
                }
            }
        }
        let until = Instant::now() + GROW_TIMEOUT;
        self.reload = Some(Reload::Growing { bundle, configuration, waiting, until });
        self.continue_growing(None);
    }

    fn continue_growing(&mut self, ready: Option<u64>) {
        let Some(Reload::Growing { waiting, .. }) = &mut self.reload else {
            return;
        };
        if let Some(id) = ready {
            waiting.remove(&id);
        }
        if waiting.is_empty()
            && let Some(Reload::Growing { bundle, configuration, .. }) = self.reload.take()
        {
            self.commit(bundle, configuration);
        }
    }

    /// A master does that itself, when it is refused.
    fn abandon(&self, bundle: &Bundle) {
        if let Origin::Single(_) = self.origin {
            system::remove_rejected_socket_files(bundle, &self.bundle, &*self.log);
        }
    }

    fn give_up_growing(&mut self, bundle: &Bundle, message: String) {
        for each in &mut self.loops {
            if matches!(each.phase, LoopPhase::SettingUp | LoopPhase::Idle) {
                each.handle.order(Order::Stop);
                each.phase = LoopPhase::Stopping;
            }
        }
        self.abandon(bundle);
        self.refuse(bundle.generation, Report::new(Level::Emerg, message));
    }

    /// Acknowledges, then changes every loop over.
    fn commit(&mut self, bundle: Box<Bundle>, configuration: Arc<P::Configuration>) {
        let generation = bundle.generation;
        if let Some(limit) = bundle.settings.rlimit_nofile
            && self.bundle.settings.rlimit_nofile != Some(limit)
        {
            limit_descriptors(limit, &*self.log);
        }
        self.tell_master(&Message::Prepared { generation });
        self.log = self.program.error_log(&bundle.error_log_targets());
        let previous = std::mem::replace(&mut self.bundle, bundle);
        let old = std::mem::replace(&mut self.configuration, configuration);
        let expires = self.bundle.settings.shutdown_timeout.map(|timeout| Instant::now() + timeout);
        self.retired.push(Retired { configuration: old, expires });
        let change = self.change_over(worker_count(&self.bundle.settings));
        self.reload = Some(Reload::Committing { generation, previous, change });
        self.continue_committing(None);
    }

    /// Gives every loop its seat among `workers`, in order, and the current configuration.
    fn change_over(&mut self, workers: usize) -> ChangeOver {
        let number = self.next_change;
        self.next_change += 1;
        let mut waiting = BTreeSet::new();
        let part_of_service = |each: &&mut Loop<_>| matches!(each.phase, LoopPhase::Serving | LoopPhase::Idle);
        for (worker, each) in self.loops.iter_mut().filter(part_of_service).enumerate() {
            each.worker = worker;
            let seat = Seat { worker, workers };
            let change = Change { number, seat, configuration: Arc::clone(&self.configuration) };
            let order = if each.phase == LoopPhase::Idle { Order::Start(change) } else { Order::Commit(change) };
            each.phase = LoopPhase::Serving;
            if each.handle.order(order) {
                waiting.insert(each.id);
            } else {
                self.log.write(Level::Alert, &format!("worker {worker} takes no orders"));
            }
        }
        ChangeOver { number, workers, waiting, until: Instant::now() + COMMIT_TIMEOUT }
    }

    /// A loop has carried out this change, or could not.
    fn continue_committing(&mut self, settled: Option<(u64, u64)>) {
        let Some(Reload::Committing { change, .. }) = &mut self.reload else {
            return;
        };
        if let Some((number, id)) = settled
            && number == change.number
        {
            change.waiting.remove(&id);
        }
        if !change.waiting.is_empty() {
            return;
        }
        let workers = change.workers;
        let serving = self.loops.iter().filter(|each| each.phase == LoopPhase::Serving).count();
        if (1..workers).contains(&serving) {
            // Some could not start; sockets that were theirs need others.
            let again = self.change_over(serving);
            if let Some(Reload::Committing { change, .. }) = &mut self.reload {
                *change = again;
            }
            return self.continue_committing(None);
        }
        if let Some(Reload::Committing { generation, previous, .. }) = self.reload.take() {
            self.settle(generation, &previous, workers);
        }
    }

    /// Every loop uses the new configuration: lets go of what only the old one had.
    fn settle(&mut self, generation: u64, previous: &Bundle, workers: usize) {
        let until = self.bundle.settings.shutdown_timeout.map(|timeout| Instant::now() + timeout);
        for each in self.loops.iter_mut().filter(|each| each.phase == LoopPhase::Serving && each.worker >= workers) {
            each.handle.order(Order::Drain);
            each.phase = LoopPhase::Draining { until, stopped_accepting: false, expired: false };
        }
        let removed = self.bundle.sockets_removed_since(previous);
        if let Err(error) = listen::detach(&self.null, removed) {
            self.log.write(Level::Alert, &format!("closing removed listening sockets failed{}", errno_text(&error)));
        }
        if let Origin::Single(single) = &self.origin {
            for listener in &self.bundle.record.listeners {
                listen::configure(listener, previous.spec_of(listener), &*self.log);
            }
            system::remove_old_socket_files(&previous.addresses(), &self.bundle, &*self.log);
            pid_file::change(&previous.settings.pid_path, &self.bundle.settings.pid_path, &*self.log);
            single.notifier.ready();
        }
        self.redirect_standard_error();
        self.tell_master(&Message::Committed { generation });
        self.finish_reload();
    }

    /// Drops old configurations that nobody holds any more: here, because that can take a while and a loop has no time.
    fn check_retired(&mut self) {
        let now = Instant::now();
        self.retired.retain(|retired| Arc::strong_count(&retired.configuration) > 1);
        // The newest of them stands for the older ones too.
        let mut expired = None;
        for retired in &mut self.retired {
            if retired.expires.is_some_and(|at| at <= now) {
                retired.expires = None;
                expired = Some(Arc::clone(&retired.configuration));
            }
        }
        if expired.is_some() {
            for each in &self.loops {
                each.handle.order(Order::Expire { configuration: expired.clone() });
            }
        }
    }

    /// Bounds the draining of each loop: first its connections are closed in order, a little later the loop ends with
    /// whatever is left.
    fn check_draining(&mut self) {
        let now = Instant::now();
        for each in &mut self.loops {
            let LoopPhase::Draining { until, expired, .. } = &mut each.phase else {
                continue;
            };
            if until.is_none_or(|until| until > now) {
                continue;
            }
            if !std::mem::replace(expired, true) && each.handle.order(Order::Expire { configuration: None }) {
                *until = Some(now + LOOPS_STOP_TIMEOUT);
            } else {
                each.handle.order(Order::Stop);
                each.phase = LoopPhase::Stopping;
            }
        }
    }

    fn check_lost_logs(&mut self) {
        if self.ask_for_logs_at.is_some_and(|at| at <= Instant::now()) {
            self.ask_for_logs_at = None;
            self.tell_master(&Message::ReopenAgain);
        }
    }

    /// Every loop has written out what it had, or is stuck: now the files change.
    fn check_reopening(&mut self, reopened: Option<u64>) {
        let Some(reopening) = &mut self.reopening else {
            return;
        };
        if let Some(id) = reopened {
            reopening.waiting.remove(&id);
        }
        if (reopening.waiting.is_empty() || reopening.until <= Instant::now())
            && let Some(reopening) = self.reopening.take()
        {
            match reopening.logs {
                Reopened::Here => self.reopen_logs(),
                Reopened::ByMaster(logs) => {
                    for (path, descriptor) in logs {
                        self.replace_log(&path, &descriptor);
                    }
                }
            }
            self.redirect_standard_error();
        }
    }

    // Loops

    fn spawn_loop(&mut self, worker: usize, configuration: &Arc<P::Configuration>) -> io::Result<u64> {
        let id = self.next_loop;
        self.next_loop += 1;
        let events = Arc::clone(&self.events);
        let report = move |event| events.push(Event::Loop(id, event));
        let handle = loops::spawn(Arc::clone(&self.program), worker, Arc::clone(configuration), report)?;
        self.loops.push(Loop { id, worker, handle, phase: LoopPhase::SettingUp });
        Ok(id)
    }

    fn handle_event(&mut self, event: Event<P::Configuration>) {
        match event {
            Event::Loop(id, event) => self.handle_loop_event(id, event),
            Event::Built(bundle, built) if self.has_awaited(bundle.generation) => {
                self.begin_growing(bundle, built.configuration);
            }
            Event::Built(bundle, _) => self.abandon(&bundle),
            Event::NotBuilt { generation, report } if self.has_awaited(generation) => self.refuse(generation, report),
            Event::NotBuilt { .. } => {}
            Event::Finished => {
                if let Some(Stop::Finishing { until }) = &mut self.stop {
                    *until = Instant::now();
                }
            }
        }
    }

    fn handle_loop_event(&mut self, id: u64, event: LoopEvent) {
        let Some(index) = self.loops.iter().position(|each| each.id == id) else {
            return;
        };
        match event {
            LoopEvent::Ready if self.loops[index].phase == LoopPhase::SettingUp => {
                self.loops[index].phase = LoopPhase::Idle;
                if self.started {
                    self.continue_growing(Some(id));
                } else if self.loops.iter().all(|each| each.phase == LoopPhase::Idle) {
                    self.start_loops();
                }
            }
            LoopEvent::Ready => {}
            LoopEvent::Started { number, result: Ok(()) } if self.started => {
                self.continue_committing(Some((number, id)));
            }
            LoopEvent::Started { result: Ok(()), .. } => self.handle_started(index),
            LoopEvent::Started { number, result: Err(message) } if self.started => {
                self.log.write(Level::Alert, &message);
                self.loops[index].handle.order(Order::Stop);
                self.loops[index].phase = LoopPhase::Stopping;
                self.continue_committing(Some((number, id)));
            }
            LoopEvent::Started { result: Err(message), .. } => self.fail_to_start(message),
            LoopEvent::Committed { number } => self.continue_committing(Some((number, id))),
            LoopEvent::Reopened => self.check_reopening(Some(id)),
            LoopEvent::Draining => self.handle_draining(index),
            LoopEvent::Drained => {
                self.loops[index].handle.order(Order::Stop);
                self.loops[index].phase = LoopPhase::Stopping;
            }
            LoopEvent::Exited(result) => self.handle_exited(index, result),
        }
    }

    fn start_loops(&mut self) {
        let workers = self.loops.len();
        let number = self.next_change;
        self.next_change += 1;
        for each in &mut self.loops {
            let seat = Seat { worker: each.worker, workers };
            each.handle.order(Order::Start(Change { number, seat, configuration: Arc::clone(&self.configuration) }));
        }
    }

    /// At the start.
    fn handle_started(&mut self, index: usize) {
        if self.loops[index].phase == LoopPhase::Idle {
            self.loops[index].phase = LoopPhase::Serving;
        }
        if self.stop.is_none() && self.loops.iter().all(|each| each.phase == LoopPhase::Serving) {
            self.started = true;
            self.redirect_standard_error();
            let generation = self.bundle.generation;
            self.tell_master(&Message::Ready { generation });
            if let Origin::Single(single) = &mut self.origin {
                if let Some(waiting) = single.waiting.take() {
                    waiting.release();
                }
                single.notifier.ready();
            }
            self.finish_reload();
        }
    }

    /// When no loop accepts any more, the sockets are closed, so that new connections are refused instead of waiting.
    fn handle_draining(&mut self, index: usize) {
        if let LoopPhase::Draining { stopped_accepting, .. } = &mut self.loops[index].phase {
            *stopped_accepting = true;
        }
        let accepts = |each: &Loop<_>| match each.phase {
            LoopPhase::Draining { stopped_accepting, .. } => !stopped_accepting,
            LoopPhase::Stopping => false,
            _ => true,
        };
        if self.stop.is_some() && !self.loops.iter().any(accepts) {
            self.detach_all();
        }
    }

    fn detach_all(&self) {
        let sockets = self.bundle.record.listeners.iter().flat_map(|listener| listener.sockets.iter().cloned());
        if let Err(error) = listen::detach(&self.null, sockets) {
            self.log.write(Level::Alert, &format!("closing listening sockets failed{}", errno_text(&error)));
        }
    }

    fn handle_exited(&mut self, index: usize, result: Result<(), String>) {
        let ended = self.loops.remove(index);
        self.check_reopening(Some(ended.id));
        let message = match result {
            Err(message) => message,
            Ok(()) if ended.phase == LoopPhase::Stopping || self.stop.is_some() => return,
            Ok(()) => format!("event loop of worker {} ended unasked", ended.worker),
        };
        match self.reload.take() {
            reload if self.stop.is_some() || ended.phase == LoopPhase::Stopping => {
                self.reload = reload;
                self.log.write(Level::Alert, &message);
            }
            Some(Reload::Growing { bundle, .. }) if ended.phase == LoopPhase::SettingUp => {
                self.give_up_growing(&bundle, message);
            }
            _ if !self.started => self.fail_to_start(message),
            // The connections of that loop are lost, and its share of the sockets with it: only a new process helps.
            _ => {
                self.log.write(Level::Alert, &message);
                self.exit_code = EXIT_FATAL;
                self.begin_fast_stop();
            }
        }
    }

    // Stopping

    fn fail_to_start(&mut self, message: String) {
        self.log.write(Level::Emerg, &message);
        if let Origin::Single(_) = self.origin {
            say(&format!("{}: [emerg] {message}\n", self.bundle.request.program));
        }
        let generation = self.bundle.generation;
        self.tell_refused(generation, Report::new(Level::Emerg, message));
        self.exit_code = EXIT_FATAL;
        self.begin_fast_stop();
    }

    fn begin_graceful_stop(&mut self) {
        if self.stop.is_some() {
            return;
        }
        if !self.started {
            return self.begin_fast_stop();
        }
        self.log.write(Level::Notice, "gracefully shutting down");
        // If it was not the master who wanted that, it starts a successor at once.
        self.tell_master(&Message::Leaving);
        if let Origin::Single(single) = &self.origin {
            single.notifier.stopping();
        }
        let until = self.bundle.settings.shutdown_timeout.map(|timeout| Instant::now() + timeout);
        self.stop = Some(Stop::Graceful { until });
        for each in &mut self.loops {
            match each.phase {
                LoopPhase::Serving => {
                    each.handle.order(Order::Drain);
                    each.phase = LoopPhase::Draining { until, stopped_accepting: false, expired: false };
                }
                LoopPhase::SettingUp | LoopPhase::Idle => {
                    each.handle.order(Order::Stop);
                    each.phase = LoopPhase::Stopping;
                }
                LoopPhase::Draining { .. } | LoopPhase::Stopping => {}
            }
        }
    }

    fn begin_fast_stop(&mut self) {
        if matches!(self.stop, Some(Stop::Fast { .. } | Stop::Finishing { .. })) {
            return;
        }
        if let Origin::Single(single) = &self.origin {
            single.notifier.stopping();
        }
        self.log.write(Level::Notice, "exiting");
        self.stop_loops();
        self.stop = Some(Stop::Fast { until: Instant::now() + LOOPS_STOP_TIMEOUT });
    }

    fn stop_loops(&mut self) {
        for each in &mut self.loops {
            each.handle.order(Order::Stop);
            each.phase = LoopPhase::Stopping;
        }
    }

    /// Moves the stop on; true when the process is to end.
    fn check_stop(&mut self) -> bool {
        let now = Instant::now();
        match self.stop {
            None => false,
            Some(Stop::Graceful { until }) => {
                // The loops bound themselves, see `check_draining`; this is for one that is stuck.
                let until = until.map(|until| until + 2 * LOOPS_STOP_TIMEOUT);
                let timed_out = until.is_some_and(|until| until <= now);
                if self.loops.is_empty() {
                    self.log.write(Level::Notice, "exiting");
                    self.begin_finishing();
                } else if timed_out {
                    self.begin_fast_stop();
                }
                false
            }
            Some(Stop::Fast { until }) => {
                if self.loops.is_empty() || until <= now {
                    self.begin_finishing();
                }
                false
            }
            Some(Stop::Finishing { until }) => until <= now,
        }
    }

    fn begin_finishing(&mut self) {
        let (program, events) = (Arc::clone(&self.program), Arc::clone(&self.events));
        let spawned = thread::Builder::new().name("finish".into()).spawn(move || {
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| program.finish()));
            events.push(Event::Finished);
        });
        let wait = if spawned.is_ok() { FINISH_TIMEOUT } else { Duration::ZERO };
        self.stop = Some(Stop::Finishing { until: Instant::now() + wait });
    }

    fn leave_single(&self) {
        pid_file::remove(&self.bundle.settings.pid_path, &*self.log);
        for listener in &self.bundle.record.listeners {
            system::remove_socket_file(listener, &*self.log);
        }
        self.log.write(Level::Notice, "exit");
        self.program.finish();
    }
}

fn worker_count(settings: &ProcessSettings) -> usize {
    settings.workers.clamp(1, WORKERS_MAX)
}
