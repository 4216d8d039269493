//! A reload in the worker process: the configuration is built, then every loop changes over to it.
//!
//! ```text
//!   bundle ─► building (own thread) ─► growing (new loops set up) ─► committing ─► settled
//!                 │ refused                │ refused      │ "prepared"      │ "committed"
//! ```
//!
//! One reload runs at a time, and each step is bounded: a build that takes too long is given up, a stuck loop is left
//! behind. Until "prepared" the old configuration serves undisturbed; after it there is no way back.

use gale_base::log_level::Level;
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::event_loops::{Loop, LoopPhase};
use super::logs::Reopened;
use super::retired::Retired;
use super::start::limit_descriptors;
use super::{Control, Event, Origin, worker_count};
use crate::bundle::Bundle;
use crate::errors::{IN_FORCE, OLD_STAYS, Report, errno_text};
use crate::link::Message;
use crate::listen::{self, OpenedBy};
use crate::log_file::LogHandle;
use crate::loops::{Change, Order};
use crate::program::{BuildRequest, Built, Program, WorkerSlot};
use crate::system::{self, SystemResources};
use crate::{activation, helper, pid_file};

/// Maximum time of a build. With `master_process off` it may have to wait for slow name servers.
const BUILD_TIMEOUT: Duration = Duration::from_secs(90);
/// Maximum number of simultaneous builds: one that was given up may still run.
const BUILDERS_MAX: usize = 3;
/// Maximum time to set up new loops.
const GROW_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time for a loop to change over before it is treated as stuck.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(5);

/// Stage of a reload; see the head of the file.
pub(super) enum Reload<C> {
    /// `logs` are those of the bundle, which the builder owns.
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

/// A change that the loops were told to make.
pub(super) struct ChangeOver {
    pub number: u64,
    /// Number of loops that serve after it.
    pub workers: usize,
    pub waiting: BTreeSet<u64>,
    pub until: Instant,
}

impl<P: Program> Control<P> {
    pub(super) fn begin_reload(&mut self, mut bundle: Box<Bundle>) {
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
        // The sandbox of this process stays as it is.
        bundle.record.places.clear();
        let program = Arc::clone(&self.program);
        let logs = bundle.record.logs.clone();
        self.build(generation, logs, move || {
            let built = program.build(&bundle.request, &mut bundle.resources())?;
            Ok((*bundle, built))
        });
    }

    pub(super) fn begin_own_reload(&mut self) {
        if self.stop.is_some() {
            return;
        }
        if self.reload.is_some() || !self.started || self.builders >= BUILDERS_MAX {
            self.reload_wanted = true;
            return;
        }
        self.log.write(Level::Notice, "reconfiguring");
        let mut open = self.bundle.record.listeners.clone();
        if let Origin::Single(single) = &self.origin {
            single.notifier.reloading();
            open.extend(self.bundle.unused(&single.passed).cloned());
        }
        let (program, log) = (Arc::clone(&self.program), Arc::clone(&self.log));
        let request: BuildRequest = self.bundle.request.clone();
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

    /// Runs a build on its own thread.
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

    /// Handles the end of a build; true if the reload still waits for it.
    pub(super) fn has_awaited(&mut self, built: u64) -> bool {
        self.builders -= 1;
        let awaited = matches!(&self.reload, Some(Reload::Building { generation, .. }) if *generation == built);
        if !awaited {
            // A requested reload may have waited for a free builder.
            self.take_up_wanted_reload();
        }
        awaited
    }

    /// Starts the additional loops that a valid new configuration needs.
    pub(super) fn begin_growing(&mut self, bundle: Box<Bundle>, configuration: P::Configuration) {
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

    pub(super) fn continue_growing(&mut self, ready: Option<u64>) {
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

    /// Reports "prepared", then changes every loop over.
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
        self.renew_secrets();
        if let Origin::Single(_) = &self.origin {
            // Like the master: before the last accept on the sockets.
            system::remove_old_socket_files(&previous.own_addresses(), &self.bundle, &*self.log);
        }
        let old = std::mem::replace(&mut self.configuration, configuration);
        let expires = self.bundle.settings.shutdown_timeout.map(|timeout| Instant::now() + timeout);
        self.retired.push(Retired { configuration: old, expires });
        let change = self.change_over(worker_count(&self.bundle.settings));
        self.reload = Some(Reload::Committing { generation, previous, change });
        self.continue_committing(None);
    }

    /// Gives every loop its slot among `workers`, in order, and the current configuration.
    fn change_over(&mut self, workers: usize) -> ChangeOver {
        let number = self.next_change;
        self.next_change += 1;
        let mut waiting = BTreeSet::new();
        let part_of_service = |each: &&mut Loop<_>| matches!(each.phase, LoopPhase::Serving | LoopPhase::Idle);
        for (worker, each) in self.loops.iter_mut().filter(part_of_service).enumerate() {
            each.worker = worker;
            let slot = WorkerSlot { worker, workers };
            let change = Change { number, slot, configuration: Arc::clone(&self.configuration) };
            let order = if each.phase == LoopPhase::Idle { Order::Start(change) } else { Order::Commit(change) };
            each.phase = LoopPhase::Serving;
            if each.handle.order(order) {
                waiting.insert(each.id);
            } else {
                self.log.write(Level::Alert, &format!("worker {worker} accepts no commands"));
            }
        }
        ChangeOver { number, workers, waiting, until: Instant::now() + COMMIT_TIMEOUT }
    }

    /// Handles a loop that has made this change or has failed to.
    pub(super) fn continue_committing(&mut self, settled: Option<(u64, u64)>) {
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
            // Some loops could not start; their sockets are distributed among the others.
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

    /// Releases the resources that only the old configuration used, once every loop uses the new one.
    fn settle(&mut self, generation: u64, previous: &Bundle, workers: usize) {
        let until = self.bundle.settings.shutdown_timeout.map(|timeout| Instant::now() + timeout);
        for each in self.loops.iter_mut().filter(|each| each.phase == LoopPhase::Serving && each.worker >= workers) {
            each.handle.order(Order::Drain { is_last: false, successor: None });
            each.phase = LoopPhase::Draining { until, stopped_accepting: false, expired: false };
        }
        self.tell_settled();
        let mut removed = self.bundle.sockets_removed_since(previous);
        if let Origin::Single(single) = &self.origin {
            // They are kept for a later configuration.
            let is_passed = |socket: &Arc<OwnedFd>| {
                single.passed.iter().flat_map(|kept| &kept.sockets).any(|kept| Arc::ptr_eq(kept, socket))
            };
            removed.retain(|socket| !is_passed(socket));
        }
        if let Err(error) = listen::detach(&self.null, removed) {
            self.log.write(Level::Alert, &format!("closing removed listening sockets failed{}", errno_text(&error)));
        }
        if let Origin::Single(single) = &self.origin {
            for listener in &self.bundle.record.listeners {
                match previous.spec_of(listener) {
                    None if listener.opened_by == OpenedBy::ServiceManager => {
                        listen::configure_inherited(listener, &*self.log);
                    }
                    old => listen::configure(listener, old, &*self.log),
                }
            }
            activation::tell_unused(&self.bundle, &single.passed, &*self.log);
            pid_file::change(&previous.settings.pid_path, &self.bundle.settings.pid_path, &*self.log);
            self.log.write(Level::Notice, IN_FORCE);
            single.notifier.ready();
        }
        self.redirect_standard_error();
        self.tell_master(&Message::Committed { generation });
        self.finish_reload();
    }

    /// Gives up a stage whose deadline has passed.
    pub(super) fn check_reload(&mut self) {
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

    pub(super) fn give_up_growing(&mut self, bundle: &Bundle, message: String) {
        for each in &mut self.loops {
            if matches!(each.phase, LoopPhase::SettingUp | LoopPhase::Idle) {
                each.handle.order(Order::Stop);
                each.phase = LoopPhase::Stopping;
            }
        }
        self.abandon(bundle);
        self.refuse(bundle.generation, Report::new(Level::Emerg, message));
    }

    /// Removes the socket files of a refused bundle. With a master, the master does that.
    pub(super) fn abandon(&self, bundle: &Bundle) {
        if let Origin::Single(_) = self.origin {
            system::remove_rejected_socket_files(bundle, &self.bundle, &*self.log);
        }
    }

    pub(super) fn refuse(&mut self, generation: u64, report: Report) {
        match &self.origin {
            Origin::Single(single) => {
                report.log_to(&*self.log);
                self.log.write(Level::Error, OLD_STAYS);
                single.notifier.ready();
            }
            Origin::Master(_) => self.tell_refused(generation, report),
        }
        self.finish_reload();
    }

    pub(super) fn finish_reload(&mut self) {
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
}
