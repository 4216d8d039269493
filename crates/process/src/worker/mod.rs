//! The worker process: one control thread (this folder) and an event loop per worker.
//!
//! The control thread only polls: signals, the link, events of the loops. It waits for no loop, so a stuck loop delays
//! neither a fast stop nor the other loops. With `master_process off` the same thread does the few tasks that remain of
//! a master's. Each round handles the pending events, in this file; every concept has a file of its own:
//!
//! ```text
//!   start.rs          becomes the worker (limits, user, directory) and builds the first configuration
//!   link.rs           orders of the master and reports to it
//!   event_loops.rs    the event loops: set up, serving, draining, ended
//!   reload.rs         a new configuration: built, then taken over by every loop
//!   retired.rs        replaced configurations, until their last user is gone
//!   logs.rs           log files, reopened
//!   status.rs         the statistics, sent to clients of the control socket
//!   stop.rs           graceful and fast exit
//! ```

mod event_loops;
mod link;
mod logs;
mod reload;
mod retired;
mod start;
mod status;
mod stop;

use gale_base::log_level::Level;
use std::io;
use std::os::fd::OwnedFd;
use std::process::{self, ExitCode};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};

use self::event_loops::{Loop, LoopPhase};
pub use self::link::respawned;
use self::logs::{Reopened, Reopening};
use self::reload::Reload;
use self::retired::{RETIRED_CHECK, Retired};
use self::stop::{LOOPS_STOP_TIMEOUT, Stop};
use super::bundle::Bundle;
use super::daemon::Waiting;
use super::errors::{ErrorLog, Report, errno_text};
use super::handover::{Arrivals, Successor};
use super::link::{Link, Message};
use super::listen::{self, ListenerHandle};
use super::loops::{Events, LoopEvent};
use super::notify::Notifier;
use super::program::{Built, Program};
use super::secrets::SecretKeeper;
use super::settings::{ProcessSettings, WORKERS_MAX};
use super::signals::{Arrived, Signal, Signals, timespec};

pub(super) use self::start::{forbid_core_files, run, run_single};

/// Exit status that nginx's workers use for errors that a restart would not fix.
const EXIT_FATAL: u8 = 2;

/// State of a process without a master.
pub(super) struct Single {
    pub waiting: Option<Waiting>,
    pub notifier: Notifier,
    /// The sockets of the service manager, used or not.
    pub passed: Vec<ListenerHandle>,
}

/// Source of orders.
enum Origin {
    /// The master; `None` after its link was lost.
    Master(Option<Link>),
    /// `master_process off`
    Single(Single),
}

/// Event from another thread of this process.
enum Event<C> {
    Loop(u64, LoopEvent),
    Built(Box<Bundle>, Built<C>),
    NotBuilt { generation: u64, report: Report },
    Finished,
}

struct Control<P: Program> {
    program: Arc<P>,
    signals: Signals,
    log: Arc<dyn ErrorLog>,
    /// /dev/null, put in the place of sockets that are closed while others hold them.
    null: OwnedFd,
    origin: Origin,
    events: Arc<Events<Event<P::Configuration>>>,
    /// Generation of the newest bundle that this process began to build itself, with `master_process off`.
    generation: u64,
    bundle: Box<Bundle>,
    configuration: Arc<P::Configuration>,
    loops: Vec<Loop<P::Configuration>>,
    next_loop: u64,
    next_change: u64,
    /// Number of running builds.
    builders: usize,
    /// Number of loops that were told to serve the first configuration and have not confirmed it yet.
    starting: usize,
    /// True once all loops serve.
    started: bool,
    reload: Option<Reload<P::Configuration>>,
    reload_wanted: bool,
    reopening: Option<Reopening>,
    /// True if logs are to be reopened once more after the reload.
    reopen_wanted: bool,
    /// Time to ask again for reopened logs that could not be received.
    ask_for_logs_at: Option<Instant>,
    retired: Vec<Retired<P::Configuration>>,
    /// The process that takes the idle connections when this one leaves.
    successor: Option<Successor>,
    /// Idle connections that other processes pass on.
    arrivals: Option<Arrivals>,
    /// Deadline for a successor that does not serve yet, once this process was told to leave.
    leave_at: Option<Instant>,
    stop: Option<Stop>,
    exit_code: u8,
    /// Secrets of this process with `master_process off`; otherwise the master has them.
    secrets: SecretKeeper,
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
            starting: 0,
            started: false,
            reload: None,
            reload_wanted: false,
            reopening: None,
            reopen_wanted: false,
            ask_for_logs_at: None,
            retired: Vec::new(),
            successor: None,
            arrivals: None,
            leave_at: None,
            stop: None,
            exit_code: 0,
            secrets: SecretKeeper::default(),
        })
    }

    fn run(mut self) -> ExitCode {
        self.renew_secrets();
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
            if self.secrets.next().is_some_and(|at| at <= Instant::now()) {
                self.renew_secrets();
            }
            self.check_reload();
            self.check_retired();
            self.check_draining();
            self.check_reopening(None);
            self.check_lost_logs();
            self.check_leaving();
            if self.check_stop() {
                break;
            }
        }
        if let Origin::Single(_) = self.origin {
            self.leave_single();
        }
        // A thread stuck in the kernel keeps all descriptors open, and connections to its listening sockets would never
        // be accepted. Sockets that a loop has registered with the kernel stay open even so: the master handles those.
        self.detach_all();
        self.tell_master(&Message::Ending);
        // Not a return from main, which would wait for a stuck thread or run destructors of statics beside it.
        process::exit(self.exit_code.into())
    }

    fn wait(&self) {
        let link = match &self.origin {
            Origin::Master(Some(link)) => Some(link),
            _ => None,
        };
        let mut polled = vec![PollFd::new(&self.signals, PollFlags::IN), PollFd::new(&*self.events, PollFlags::IN)];
        polled.extend(link.map(|link| PollFd::new(link, link.interest())));
        let awaited = self.successor.as_ref().filter(|_| self.leave_at.is_some());
        polled.extend(awaited.map(|successor| PollFd::new(successor.descriptor(), PollFlags::IN)));
        let timeout = self.next_deadline().map(|at| timespec(at.saturating_duration_since(Instant::now())));
        // An interrupted wait only ends early.
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
            .chain(self.leave_at)
            .chain(self.secrets.next())
            .chain(draining)
            .chain(expiring)
            .chain(retired)
            .min()
    }

    /// Renews the process's own secrets, which it has only without a master.
    fn renew_secrets(&mut self) {
        if let Origin::Single(_) = self.origin
            && self.secrets.renew(&self.bundle.settings.secret_lifetimes)
        {
            self.program.use_secrets(self.secrets.series());
        }
    }

    fn handle_signal(&mut self, arrived: &Arrived) {
        let single = matches!(self.origin, Origin::Single(_));
        // On a terminal, every change of its size sends WINCH to the whole process group.
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
            ", shutting down" => {
                // If a master lives, it starts another worker process.
                let is_last = !matches!(self.origin, Origin::Master(Some(_)));
                self.begin_graceful_stop(is_last);
            }
            ", exiting" => self.begin_fast_stop(),
            ", reopening logs" => self.begin_reopening(Reopened::Here),
            ", reconfiguring" => self.begin_own_reload(),
            _ => {}
        }
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
}

fn worker_count(settings: &ProcessSettings) -> usize {
    settings.workers.clamp(1, WORKERS_MAX)
}
