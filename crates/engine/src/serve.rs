//! What runs in the processes: the [`Program`] that the process layer starts,
//! reloads and stops.
//!
//! It ties the parts together and decides nothing itself: building belongs to
//! `configuration`, connections to `http`, lines to `log`.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gale_base::os_error::OsErrorText;
use gale_runtime::{EventLoop, Listener, LoopOptions, TaskId};
use parking_lot::Mutex;

use crate::configuration::{self, Configuration, Texts};
use crate::http::worker::{Configured, HttpWorker, accept_options};
use crate::log::{self, DeferredLog, ErrorLog, Target, Writers};
use crate::module::Order;
use crate::process::{
    self, BuildRequest, Built, ErrorLogTarget, Level, ListenAddress, LoopMain, ProcessSettings, Program, Quiet, Report,
    Resources, Seat,
};

/// How long the end of the process waits for tasks in thread pools: a third of what there is for everything that is to be
/// finished, so that a task that hangs leaves the time to the logs.
const POOLS_STOP_TIMEOUT: Duration = Duration::from_millis(300);

/// The web server.
pub struct Server {
    order: &'static Order,
    /// The texts of the last configuration that was built, for `-T`.
    texts: Mutex<Option<Texts>>,
    announce: Option<Announce>,
}

/// Told an address that the server listens on.
type Announce = Box<dyn Fn(String) + Send + Sync>;

impl Server {
    /// A server made of these modules.
    pub fn new(order: &'static Order) -> Server {
        Server { order, texts: Mutex::new(None), announce: None }
    }

    /// Tells every address, as soon as its socket listens.
    pub fn announcing(mut self, announce: impl Fn(String) + Send + Sync + 'static) -> Server {
        self.announce = Some(Box::new(announce));
        self
    }

    /// The texts that the last configuration was built from.
    pub fn take_texts(&self) -> Option<Texts> {
        self.texts.lock().take()
    }
}

impl Program for Server {
    type Configuration = Configuration;
    type Worker = Serving;

    fn build(&self, request: &BuildRequest, resources: &mut dyn Resources) -> Result<Built<Configuration>, Report> {
        let (built, texts) = configuration::build(self.order, request, resources);
        *self.texts.lock() = Some(texts);
        if let (Ok(built), Some(announce)) = (&built, &self.announce) {
            let addresses = built.configuration.http.iter().flat_map(|http| &http.addresses);
            addresses
                .filter_map(|address| address.listener.local_address().ok())
                .for_each(|local| announce(local.to_string()));
        }
        built
    }

    fn process_settings<'c>(&self, configuration: &'c Configuration) -> &'c ProcessSettings {
        &configuration.process
    }

    fn error_log(&self, targets: &[ErrorLogTarget]) -> Arc<dyn process::ErrorLog> {
        let target = |target: &ErrorLogTarget| match target {
            ErrorLogTarget::Stderr(level) => Some((*level, Target::Stderr)),
            ErrorLogTarget::File(level, file) => {
                let deferred = DeferredLog::new(file.path().to_owned());
                deferred.set(Writers::of_process().writer(file));
                Some((*level, Target::File(deferred)))
            }
            // Refused when the configuration was read.
            ErrorLogTarget::Syslog(..) => None,
        };
        Arc::new(ErrorLog::direct(targets.iter().filter_map(target).collect()))
    }

    fn run_loop(&self, worker: usize, configuration: Arc<Configuration>, main: LoopMain) -> io::Result<()> {
        let driver = *configuration.events.driver.get();
        let workers = configuration.process.workers;
        // The C library reads the time zone's file when it is first asked.
        log::local_time(0);
        let mut event_loop = EventLoop::new(LoopOptions { driver, worker, workers, ..LoopOptions::default() })?;
        if let Some(reason) = event_loop.driver_reason() {
            let message = format!("io_uring is not available {}, epoll is used", OsErrorText(reason));
            configuration.error_log.write(Level::Notice, None, &message);
        }
        drop(configuration);
        event_loop.run(main);
        Ok(())
    }

    fn start(&self, seat: Seat, configuration: Arc<Configuration>) -> Result<Serving, String> {
        report_panics_to(&configuration);
        configuration.thread_pools.apply();
        let mut serving = Serving { worker: None, retired: Vec::new(), accepting: Vec::new() };
        serving
            .take_over(seat, &configuration)
            .map_err(|error| format!("worker {} cannot accept: {error}", seat.worker))?;
        Ok(serving)
    }

    fn finish(&self) {
        // Before the logs, in which the last tasks may have something to say.
        gale_runtime::stop_pools(POOLS_STOP_TIMEOUT);
        log::finish();
    }
}

/// A panic costs one connection; it is told where people look.
fn report_panics_to(configuration: &Configuration) {
    let log = Arc::clone(&configuration.error_log);
    gale_runtime::set_panic_reporter(move |panic| log.write(Level::Alert, None, panic));
}

/// One event loop's share of the server.
pub struct Serving {
    worker: Option<Rc<HttpWorker>>,
    /// Workers of configurations that had an http block, until their last connection ends.
    retired: Vec<Rc<HttpWorker>>,
    accepting: Vec<Accepting>,
}

/// A listening socket that this loop accepts from.
struct Accepting {
    socket: Arc<OwnedFd>,
    address: ListenAddress,
    task: TaskId,
}

impl Serving {
    fn workers(&self) -> impl Iterator<Item = &Rc<HttpWorker>> {
        self.worker.iter().chain(&self.retired)
    }

    /// Uses `configuration` from now on. Sockets that this loop no longer accepts from
    /// are given back, and nothing is accepted from them any more.
    fn take_over(&mut self, seat: Seat, configuration: &Arc<Configuration>) -> io::Result<Vec<Accepting>> {
        let wanted = sockets_of(seat, configuration);
        let (kept, removed) = std::mem::take(&mut self.accepting)
            .into_iter()
            .partition(|accepting: &Accepting| wanted.iter().any(|(socket, _)| Arc::ptr_eq(socket, &accepting.socket)));
        self.accepting = kept;
        for accepting in &removed {
            gale_runtime::abort(accepting.task);
        }
        if configuration.http.is_none() {
            // Nothing is served any more: connections end with their current answer.
            if let Some(worker) = self.worker.take() {
                worker.drain();
                self.retired.push(worker);
            }
            return Ok(removed);
        }
        let connections_max = *configuration.events.worker_connections.get();
        let configured = Configured::new(Arc::clone(configuration));
        let worker = match &self.worker {
            Some(worker) => {
                worker.commit(configured, connections_max);
                Rc::clone(worker)
            }
            None => Rc::clone(self.worker.insert(HttpWorker::new(configured, connections_max))),
        };
        for (socket, address) in wanted {
            if self.accepting.iter().any(|accepting| Arc::ptr_eq(&accepting.socket, &socket)) {
                continue;
            }
            let is_shared = seat.workers > 1;
            let options = accept_options(is_shared, *configuration.events.multi_accept.get());
            let listener = Listener::from_fd(Arc::clone(&socket), options)?;
            let task = gale_runtime::spawn(Rc::clone(&worker).accept_from(listener, address.clone()));
            self.accepting.push(Accepting { socket, address, task });
        }
        Ok(removed)
    }
}

/// Whether some loop accepts from this socket under this configuration.
fn has_socket(configuration: &Configuration, socket: &Arc<OwnedFd>) -> bool {
    let addresses = configuration.http.iter().flat_map(|http| &http.addresses);
    addresses.flat_map(|address| &address.listener.sockets).any(|known| Arc::ptr_eq(known, socket))
}

impl Drop for Serving {
    /// What was logged is handed on, however the loop ends.
    fn drop(&mut self) {
        self.workers().for_each(|worker| worker.access.flush());
    }
}

/// The sockets that this loop accepts from: a shared one of every address, or, where
/// there are several (`reuseport`), its own.
fn sockets_of(seat: Seat, configuration: &Configuration) -> Vec<(Arc<OwnedFd>, ListenAddress)> {
    let mut sockets: Vec<(Arc<OwnedFd>, ListenAddress)> = Vec::new();
    if seat.worker >= seat.workers {
        return sockets;
    }
    for address in configuration.http.iter().flat_map(|http| &http.addresses) {
        let listener = &address.listener;
        let is_own = |index: usize| listener.sockets.len() == 1 || index % seat.workers == seat.worker;
        for (_, socket) in listener.sockets.iter().enumerate().filter(|(index, _)| is_own(*index)) {
            // Several addresses may share one socket.
            if !sockets.iter().any(|(known, _)| Arc::ptr_eq(known, socket)) {
                sockets.push((Arc::clone(socket), listener.spec.address.clone()));
            }
        }
    }
    sockets
}

impl process::Worker for Serving {
    type Configuration = Configuration;

    fn commit(&mut self, seat: Seat, configuration: Arc<Configuration>) -> Quiet {
        report_panics_to(&configuration);
        configuration.thread_pools.apply();
        self.retired.retain(|worker| worker.connection_count() > 0);
        let old = self.worker.as_ref().map(|worker| worker.configuration());
        let worker = self.worker.clone();
        let removed = match self.take_over(seat, &configuration) {
            Ok(removed) => removed,
            Err(error) => {
                configuration.error_log.write(
                    Level::Alert,
                    None,
                    &format!("a new socket cannot be accepted from: {error}"),
                );
                Vec::new()
            }
        };
        // A socket that another loop takes over is not drained: its queue lives on.
        let removed = removed.into_iter().filter(move |accepting| !has_socket(&configuration, &accepting.socket));
        let removed: Vec<Accepting> = removed.collect();
        Box::pin(async move {
            let (Some(worker), Some(old)) = (worker, old) else { return };
            for accepting in removed {
                worker.accept_what_is_queued(accepting.socket, &accepting.address, &old).await;
            }
        })
    }

    fn drain(&mut self) -> Quiet {
        for accepting in self.accepting.drain(..) {
            gale_runtime::abort(accepting.task);
        }
        let workers: Vec<Rc<HttpWorker>> = self.workers().cloned().collect();
        workers.iter().for_each(HttpWorker::drain);
        Box::pin(async move {
            for worker in workers {
                worker.all_closed().await;
                worker.access.flush();
            }
        })
    }

    fn expire(&mut self, configuration: Option<&Arc<Configuration>>) {
        let newest = match configuration.map(|configuration| configuration.http.as_ref()) {
            None => None,
            Some(Some(http)) => Some(http),
            // Nobody began anything with it.
            Some(None) => return,
        };
        self.workers().for_each(|worker| worker.expire(newest));
    }

    fn reopen(&mut self) {
        self.workers().for_each(|worker| worker.access.flush());
    }

    fn connections(&self) -> usize {
        self.workers().map(|worker| worker.connection_count()).sum()
    }
}
