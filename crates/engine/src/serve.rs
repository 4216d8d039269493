//! The [`Program`] of the processes, which the process layer starts, reloads and stops.
//!
//! It connects the parts and decides nothing itself: building belongs to `configuration`, connections to the protocols,
//! lines to `log`.

use std::cell::RefCell;
use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_log::{DeferredLog, DeferredSyslog, Destination, ErrorLog, SyslogServer, SyslogSettings, Target, Writers};
use gale_process::{
    Arrivals, BuildRequest, Built, Completion, ErrorLogOutput, ErrorLogTarget, ListenAddress, ListenerHandle, LogFile,
    LoopMain, ProcessSettings, Program, Report, Resources, SecretSeries, SocketKind, Successor, WorkerSlot,
};
use gale_runtime::stall::StallKind;
use gale_runtime::watchdog::{self, Stall};
use gale_runtime::{DriverChoice, EventLoop, Listener, LoopOptions, RingOptions, TaskId, affinity};
use gale_tls::{random, syslog_tls};
use gale_worker::Worker;
use gale_worker::service::{HeldConfiguration, Services};
use parking_lot::Mutex;

use crate::configuration::module::Order;
use crate::configuration::protocol::{DatagramReceiver, ProtocolWorker};
use crate::configuration::{self, Configuration, Texts};
use crate::connections::{
    Acceptor, DrainingListener, QUEUED_WAIT_MAX, accept_late, accept_options, accept_queued, leave_accept_mutex,
    serve_arrivals, set_receivers,
};

/// Longest wait for tasks in thread pools at the end of the process: a third of the total time, so that a hanging task
/// leaves time for the logs.
const POOLS_STOP_TIMEOUT: Duration = Duration::from_millis(300);

/// Longest wait for the last lines of logs at the end of the process.
const LOGS_FINISH_TIMEOUT: Duration = Duration::from_millis(900);

/// The same after a failed start.
const FAILURE_LOG_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval of checks whether a removed protocol can still get connections.
const RETIRED_LOOK_EVERY: Duration = Duration::from_secs(1);

/// Longest time that a loop with no open connections stays for unsent data: nginx's default for a client to accept a
/// part of an answer (`send_timeout`).
const LAST_ANSWERS_WAIT_MAX: Duration = Duration::from_secs(60);

/// The web server.
pub struct Server {
    order: &'static Order,
    /// Texts of the last configuration that was built, for `-T`.
    texts: Mutex<Option<Texts>>,
    announce: Option<Announce>,
}

/// Called with each address that the server listens on.
type Announce = Box<dyn Fn(String) + Send + Sync>;

impl Server {
    /// A server with these modules.
    pub fn new(order: &'static Order) -> Server {
        Server { order, texts: Mutex::new(None), announce: None }
    }

    /// Sets the function called with each address once its socket listens.
    pub fn announcing(mut self, announce: impl Fn(String) + Send + Sync + 'static) -> Server {
        self.announce = Some(Box::new(announce));
        self
    }

    /// Texts of the last configuration that was built.
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
            listeners(&built.configuration)
                .filter_map(|listener| listener.local_address().ok())
                .for_each(|local| announce(local.to_string()));
        }
        built
    }

    fn process_settings<'c>(&self, configuration: &'c Configuration) -> &'c ProcessSettings {
        &configuration.process
    }

    fn figures(&self, configuration: &Arc<Configuration>) -> Option<String> {
        self.order.figures.map(|tell| tell(configuration))
    }

    fn error_log(&self, targets: &[ErrorLogTarget]) -> Arc<dyn gale_process::ErrorLog> {
        let target = |output: &ErrorLogOutput| match output {
            ErrorLogOutput::Stderr => Some(Target::Stderr),
            ErrorLogOutput::File(file) => {
                let deferred = DeferredLog::new(file.path().to_owned());
                deferred.set(Writers::of_process().writer(file));
                Some(Target::File(deferred))
            }
            // With the tag and address that the configuration was read with.
            ErrorLogOutput::Syslog(text) => {
                let settings = SyslogSettings::parse(text.as_bytes(), "gale").ok()?;
                let is_known = !matches!(settings.server, SyslogServer::Host(..));
                is_known.then(|| {
                    let secure = syslog_tls::of_process(&settings);
                    let server = DeferredSyslog::new(settings);
                    server.complete(None, secure);
                    Target::Syslog(server)
                })
            }
        };
        // Standard error is redirected to the first file, so writers use that file's form for their own messages.
        let first_file = targets.iter().find(|target| matches!(target.output, ErrorLogOutput::File(_)));
        Writers::of_process().set_report_form(first_file.map(|target| target.form).unwrap_or_default());
        let destination = |ErrorLogTarget { level, form, output }: &ErrorLogTarget| {
            Some(Destination { level: *level, form: *form, target: target(output)? })
        };
        Arc::new(ErrorLog::new(targets.iter().filter_map(destination).collect()))
    }

    fn failure_log(&self, request: &BuildRequest) -> Option<Arc<dyn gale_process::ErrorLog>> {
        let (path, form) = configuration::failure_log_path(self.order, request)?;
        let output = ErrorLogOutput::File(Arc::new(LogFile::open(&path).ok()?));
        Some(Arc::new(FailureLog(self.error_log(&[ErrorLogTarget { level: Level::Error, form, output }]))))
    }

    fn has_page_cache_helper(&self) -> bool {
        true
    }

    fn serve_page_cache_questions(&self, socket: OwnedFd) -> io::Result<Infallible> {
        gale_files::serve_page_cache_questions(&socket)
    }

    fn use_page_cache_helper(&self, socket: OwnedFd) -> io::Result<()> {
        gale_files::use_page_cache_helper(socket)
    }

    fn run_loop(&self, worker: usize, configuration: Arc<Configuration>, main: LoopMain) -> io::Result<()> {
        let driver = *configuration.events.driver.get();
        let ring = RingOptions { is_restricted: configuration.process.sandbox.is_on(), ..RingOptions::default() };
        // Loads the time zone, because the C library reads its file at the first use.
        gale_log::local_time(0);
        random::prepare();
        gale_files::prepare();
        let mut event_loop =
            EventLoop::new(LoopOptions { driver, worker, ring, survives_panics: true, ..LoopOptions::default() })?;
        if let Some(reason) = event_loop.driver_reason() {
            // A warning if io_uring was requested by name.
            let level = if driver == DriverChoice::IoUring { Level::Warn } else { Level::Notice };
            let message = format!("io_uring is not available {}, epoll is used", OsErrorText(reason));
            configuration.error_log.write(level, None, &message);
        } else if worker == 0 {
            let message = format!("using the \"{}\" event method", event_loop.driver_name());
            configuration.error_log.write(Level::Notice, None, &message);
        }
        drop(configuration);
        event_loop.run(main);
        Ok(())
    }

    fn start(&self, slot: WorkerSlot, configuration: Arc<Configuration>) -> Result<Serving, String> {
        report_to(&configuration);
        // Number of serving workers; it was not known yet when this loop was created.
        gale_runtime::share_leases(slot.workers);
        configuration.thread_pools.apply();
        configuration.zones.serve_first();
        place_on_processors(slot, &configuration);
        let connections_max = *configuration.events.worker_connections.get();
        let worker = Worker::new(connections_max, Arc::clone(&configuration.error_log));
        let mut serving = Serving {
            worker,
            configuration: Arc::clone(&configuration),
            protocols: Vec::new(),
            retired: Rc::default(),
            accepting: Vec::new(),
            receiving: Vec::new(),
            arriving: Vec::new(),
            slot,
            services: Services::default(),
        };
        let (_, accepted) = serving.take_over(slot, &configuration);
        accepted.map_err(|error| format!("worker {} cannot accept: {error}", slot.worker))?;
        Ok(serving)
    }

    fn use_secrets(&self, series: &[SecretSeries]) {
        gale_tls::use_ticket_keys(series);
    }

    fn look_for_connections(&self) {
        gale_runtime::look_for_connections();
    }

    fn finish(&self) {
        // Before the logs, because the last tasks may still log.
        gale_runtime::stop_pools(POOLS_STOP_TIMEOUT);
        gale_log::finish(LOGS_FINISH_TIMEOUT);
    }
}

/// Log of a failed start. This process serves nothing, so it waits for the lines.
struct FailureLog(Arc<dyn gale_process::ErrorLog>);

impl gale_process::ErrorLog for FailureLog {
    fn write(&self, level: Level, message: &str) {
        self.0.write(level, message);
    }
}

impl Drop for FailureLog {
    fn drop(&mut self) {
        gale_log::finish(FAILURE_LOG_TIMEOUT);
    }
}

/// Reports panics and stalls to the error log: a panic costs one connection, a stall delays all of a worker's.
fn report_to(configuration: &Configuration) {
    let log = Arc::clone(&configuration.error_log);
    gale_runtime::set_panic_reporter(move |panic| log.write(Level::Alert, None, panic));
    let log = Arc::clone(&configuration.error_log);
    gale_runtime::set_shortage_reporter(move |shortage| log.write(Level::Alert, None, shortage));
    let log = Arc::clone(&configuration.error_log);
    watchdog::set_stall_reporter(move |stall| log.write(level_of(stall), None, &stall_text(stall)));
    if let Err(error) = watchdog::start_watchdog() {
        let message = format!("stalls cannot be detected: {}", OsErrorText(&error));
        configuration.error_log.write(Level::Alert, None, &message);
    }
}

/// `worker_cpu_affinity`: binds the loop's thread to its processors, or unbinds it if the directive is not set.
fn place_on_processors(slot: WorkerSlot, configuration: &Configuration) {
    let Some(cpu_affinity) = &configuration.cpu_affinity else { return affinity::leave_processors() };
    let placed = affinity::processors_of_process().and_then(|allowed| {
        let Some(processors) = cpu_affinity.processors(slot.worker, &allowed) else { return Ok(()) };
        for processor in processors {
            let message = format!("sched_setaffinity(): using cpu #{processor}");
            configuration.error_log.write(Level::Notice, None, &message);
        }
        affinity::stay_on_processors(processors)
    });
    if let Err(error) = placed {
        let message = format!("sched_setaffinity() failed {}", OsErrorText(&error));
        configuration.error_log.write(Level::Alert, None, &message);
    }
}

/// A preemption is caused by the machine, which neither the configuration nor a module can change.
fn level_of(stall: &Stall) -> Level {
    if stall.kind == StallKind::Preempted { Level::Info } else { Level::Warn }
}

fn stall_text(stall: &Stall) -> String {
    let so_far = if stall.is_over { "" } else { " so far" };
    let place = if stall.at.is_empty() { "" } else { ", in " };
    let untold = match stall.untold {
        0 => String::new(),
        untold => format!("; {untold} more of this kind since the last report"),
    };
    let milliseconds = stall.duration.as_millis();
    format!("worker {} stalled for {milliseconds} ms{so_far}: {}{place}{}{untold}", stall.worker, stall.kind, stall.at)
}

/// Listening sockets of all protocols; several addresses may share one.
fn listeners(configuration: &Configuration) -> impl Iterator<Item = ListenerHandle> {
    configuration.protocols.iter().flat_map(|protocol| protocol.listeners())
}

/// One event loop's part of the server.
pub struct Serving {
    worker: Rc<Worker>,
    configuration: Arc<Configuration>,
    /// Protocols of the configuration, by name.
    protocols: Vec<(&'static str, Rc<dyn ProtocolWorker>)>,
    /// Protocols of earlier configurations, until their last connection ends.
    retired: Rc<RefCell<Vec<Rc<dyn ProtocolWorker>>>>,
    accepting: Vec<Accepting>,
    receiving: Vec<Receiving>,
    /// Tasks that take over idle connections of other processes.
    arriving: Vec<TaskId>,
    slot: WorkerSlot,
    /// Services of this loop.
    services: Services,
}

/// A listening socket that this loop accepts from.
struct Accepting {
    socket: Arc<OwnedFd>,
    /// State needed once the loop stops accepting from it.
    left: DrainingListener,
    /// Set with `accept_mutex`.
    accept_mutex_delay: Option<Duration>,
    task: TaskId,
}

/// A socket that this loop receives datagrams from.
struct Receiving {
    socket: Arc<OwnedFd>,
    /// Name of the protocol that receives them.
    protocol: &'static str,
    receiver: Rc<dyn DatagramReceiver>,
}

impl Accepting {
    fn stop(&self) {
        gale_runtime::abort(self.task);
        self.left.listener.pause();
    }

    /// Prepares for the end of the socket, which no loop will use any more.
    fn leave_for_good(self) -> DrainingListener {
        if self.left.is_deferred {
            gale_process::stop_deferring(&self.socket);
        }
        self.left
    }
}

/// A listening socket that a loop should accept from.
struct Wanted {
    socket: Arc<OwnedFd>,
    address: ListenAddress,
    /// Name of the protocol that serves there.
    protocol: &'static str,
    /// `true` if other loops accept from it, too.
    is_shared: bool,
    is_deferred: bool,
    /// Connections or datagrams.
    kind: SocketKind,
}

impl Serving {
    fn workers(&self) -> Vec<Rc<dyn ProtocolWorker>> {
        let current = self.protocols.iter().map(|(_, protocol)| Rc::clone(protocol));
        current.chain(self.retired.borrow().iter().cloned()).collect()
    }

    fn protocol(&self, name: &str) -> Option<&Rc<dyn ProtocolWorker>> {
        self.protocols.iter().find(|(known, _)| *known == name).map(|(_, protocol)| protocol)
    }

    /// Switches to `configuration`. Returns the sockets that this loop no longer accepts from.
    ///
    /// The result reports a socket that cannot be accepted from; all others are used.
    fn take_over(&mut self, slot: WorkerSlot, configuration: &Arc<Configuration>) -> (Vec<Accepting>, io::Result<()>) {
        self.configuration = Arc::clone(configuration);
        self.slot = slot;
        let wanted = sockets_of(slot, configuration);
        let is_kept = |accepting: &Accepting| wanted.iter().any(|each| Arc::ptr_eq(&each.socket, &accepting.socket));
        let (kept, removed) = std::mem::take(&mut self.accepting).into_iter().partition(is_kept);
        self.accepting = kept;
        removed.iter().for_each(Accepting::stop);
        let still_receives = |receiving: &Receiving| {
            let is_same = |wanted: &Wanted| {
                Arc::ptr_eq(&wanted.socket, &receiving.socket) && wanted.protocol == receiving.protocol
            };
            wanted.iter().any(is_same)
        };
        let (kept, left) = std::mem::take(&mut self.receiving).into_iter().partition(still_receives);
        self.receiving = kept;
        let stop = |receiving: &Receiving| receiving.receiver.stop(has_socket(configuration, &receiving.socket));
        left.iter().for_each(stop);
        if self.accepting.is_empty() {
            leave_accept_mutex();
        }
        let connections_max = *configuration.events.worker_connections.get();
        self.worker.commit(connections_max, Arc::clone(&configuration.error_log));
        self.commit_protocols(configuration);
        let accept = |wanted: Wanted| match wanted.kind {
            SocketKind::Stream => self.accept_from(wanted, configuration),
            SocketKind::Datagram => self.receive_from(wanted),
        };
        let accepted: Vec<io::Result<()>> = wanted.into_iter().map(accept).collect();
        self.tell_receivers(configuration);
        (removed, accepted.into_iter().collect())
    }

    /// Keeps existing protocols, starts new ones, and ends the connections of removed ones after their current
    /// exchange.
    fn commit_protocols(&mut self, configuration: &Arc<Configuration>) {
        let mut earlier = std::mem::take(&mut self.protocols);
        for protocol in &configuration.protocols {
            let name = protocol.name();
            let known = earlier.iter().position(|(known, _)| *known == name).map(|place| earlier.swap_remove(place).1);
            let worker = match known {
                Some(known) => {
                    known.commit(configuration);
                    known
                }
                None => protocol.start(&self.worker, configuration),
            };
            self.protocols.push((name, worker));
        }
        for (_, gone) in earlier {
            self.retire(gone);
        }
    }

    /// Ends a protocol after its last connection. It holds its configuration until then.
    fn retire(&self, gone: Rc<dyn ProtocolWorker>) {
        Rc::clone(&gone).drain(None);
        self.retired.borrow_mut().push(Rc::clone(&gone));
        let retired = Rc::downgrade(&self.retired);
        gale_runtime::spawn(async move {
            poll_fn(|context| gone.poll_closed(context)).await;
            // A socket that is being left may still deliver connections.
            while Rc::strong_count(&gone) > 2 {
                gale_runtime::sleep(RETIRED_LOOK_EVERY).await;
                poll_fn(|context| gone.poll_closed(context)).await;
            }
            if let Some(retired) = retired.upgrade() {
                retired.borrow_mut().retain(|other| !Rc::ptr_eq(other, &gone));
            }
        });
    }

    fn accept_from(&mut self, wanted: Wanted, configuration: &Configuration) -> io::Result<()> {
        let events = &configuration.events;
        let Wanted { socket, address, protocol, is_shared, is_deferred, kind: _ } = wanted;
        let protocol = Rc::clone(self.protocol(protocol).expect("the configuration has the protocol of its address"));
        let address = Rc::new(address);
        let options = accept_options(is_shared, *events.multi_accept.get());
        let takes_turns = is_shared && *events.accept_mutex.get();
        let accept_mutex_delay = takes_turns.then(|| *events.accept_mutex_delay.get());
        let accept = |listener: &Rc<Listener>| {
            let acceptor = Acceptor {
                worker: Rc::clone(&self.worker),
                protocol: Rc::clone(&protocol),
                listener: Rc::clone(listener),
                address: Rc::clone(&address),
                accept_mutex_delay,
            };
            gale_runtime::spawn(acceptor.run())
        };
        if let Some(kept) = self.accepting.iter_mut().find(|accepting| Arc::ptr_eq(&accepting.socket, &socket)) {
            kept.left.listener.set_options(options);
            kept.left.is_deferred = is_deferred;
            if kept.accept_mutex_delay != accept_mutex_delay || !Rc::ptr_eq(&kept.left.protocol, &protocol) {
                kept.stop();
                (kept.task, kept.accept_mutex_delay) = (accept(&kept.left.listener), accept_mutex_delay);
                kept.left.protocol = protocol;
            }
            return Ok(());
        }
        let listener = Rc::new(Listener::from_fd(Arc::clone(&socket), options)?);
        let task = accept(&listener);
        let left = DrainingListener { listener, address, is_deferred, protocol };
        self.accepting.push(Accepting { socket, left, accept_mutex_delay, task });
        Ok(())
    }
}

impl Serving {
    /// Sets the protocols that serve each address, for connections passed on internally.
    fn tell_receivers(&self, configuration: &Configuration) {
        let listeners = configuration.protocols.iter().flat_map(|protocol| {
            let own = protocol.listeners().into_iter();
            own.filter(|listener| listener.spec.kind == SocketKind::Stream).map(|listener| (listener, protocol.name()))
        });
        let receivers =
            listeners.filter_map(|(listener, name)| Some((listener.spec.address.clone(), self.protocol(name)?)));
        set_receivers(&self.worker, receivers);
    }

    fn receive_from(&mut self, wanted: Wanted) -> io::Result<()> {
        let Wanted { socket, address, protocol, .. } = wanted;
        if self.receiving.iter().any(|receiving| Arc::ptr_eq(&receiving.socket, &socket)) {
            return Ok(());
        }
        let worker = Rc::clone(self.protocol(protocol).expect("the configuration has the protocol of its address"));
        let receiver = worker.receive(socket.try_clone()?, &Rc::new(address))?;
        self.receiving.push(Receiving { socket, protocol, receiver });
        Ok(())
    }
}

/// `true` if any loop accepts from this socket under this configuration.
fn has_socket(configuration: &Configuration, socket: &Arc<OwnedFd>) -> bool {
    listeners(configuration).any(|listener| listener.sockets.iter().any(|known| Arc::ptr_eq(known, socket)))
}

impl Drop for Serving {
    /// Hands on log lines, however the loop ends.
    fn drop(&mut self) {
        self.worker.access.flush();
    }
}

/// Sockets that this loop accepts from: the shared one of each address, or its own if there are several (`reuseport`).
fn sockets_of(slot: WorkerSlot, configuration: &Configuration) -> Vec<Wanted> {
    let mut sockets: Vec<Wanted> = Vec::new();
    if slot.worker >= slot.workers {
        return sockets;
    }
    for protocol in &configuration.protocols {
        for listener in protocol.listeners() {
            let is_single = listener.sockets.len() == 1;
            let is_own = |index: usize| is_single || index % slot.workers == slot.worker;
            for (_, socket) in listener.sockets.iter().enumerate().filter(|(index, _)| is_own(*index)) {
                // Several addresses may share one socket.
                if !sockets.iter().any(|known| Arc::ptr_eq(&known.socket, socket)) {
                    sockets.push(Wanted {
                        socket: Arc::clone(socket),
                        address: listener.spec.address.clone(),
                        protocol: protocol.name(),
                        is_shared: is_single && slot.workers > 1,
                        is_deferred: listener.spec.deferred,
                        kind: listener.spec.kind,
                    });
                }
            }
        }
    }
    sockets
}

impl gale_process::Worker for Serving {
    type Configuration = Configuration;

    fn commit(&mut self, slot: WorkerSlot, configuration: Arc<Configuration>) -> Completion {
        report_to(&configuration);
        gale_runtime::share_leases(slot.workers);
        place_on_processors(slot, &configuration);
        configuration.thread_pools.apply();
        configuration.zones.serve();
        let old = Arc::clone(&self.configuration);
        let (removed, accepted) = self.take_over(slot, &configuration);
        if let Err(error) = accepted {
            let message = format!("connections cannot be accepted on a new socket: {error}");
            configuration.error_log.write(Level::Alert, None, &message);
        }
        // A socket that another loop takes over is not drained, because its queue is still served.
        let removed = removed.into_iter().filter(move |accepting| !has_socket(&configuration, &accepting.socket));
        let removed: Vec<DrainingListener> = removed.map(Accepting::leave_for_good).collect();
        let worker = Rc::clone(&self.worker);
        Box::pin(async move {
            accept_late(&worker, &removed, Some(&old)).await;
            let until = gale_runtime::now() + QUEUED_WAIT_MAX;
            accept_queued(&worker, &removed, Some(&old), until).await;
            // A ring holds a socket until the system call at the end of the turn; meanwhile a removed address would
            // accept connections that are never answered.
            drop(removed);
            gale_runtime::yield_now().await;
        })
    }

    fn settled(&mut self) {
        let held: HeldConfiguration = Arc::<Configuration>::clone(&self.configuration);
        self.services.settle(self.slot, &self.worker, &self.configuration.services, &held);
    }

    fn stop_accepting(&mut self, is_last: bool) -> Completion {
        self.services.stop();
        self.arriving.drain(..).for_each(gale_runtime::abort);
        let accepting = std::mem::take(&mut self.accepting);
        accepting.iter().for_each(Accepting::stop);
        // Unless the server ends, another process has the sockets by now.
        std::mem::take(&mut self.receiving).iter().for_each(|receiving| receiving.receiver.stop(!is_last));
        leave_accept_mutex();
        let worker = Rc::clone(&self.worker);
        let protocols: Vec<Rc<dyn ProtocolWorker>> =
            self.protocols.iter().map(|(_, protocol)| Rc::clone(protocol)).collect();
        Box::pin(async move {
            let leave = |accepting: Accepting| if is_last { accepting.leave_for_good() } else { accepting.left };
            let left: Vec<DrainingListener> = accepting.into_iter().map(leave).collect();
            if is_last {
                // The other protocols need not wait for them.
                protocols.into_iter().for_each(|protocol| protocol.drain(None));
                accept_late(&worker, &left, None).await;
            }
            let until = gale_runtime::now() + QUEUED_WAIT_MAX;
            accept_queued(&worker, &left, None, until).await;
            // Until the end of the turn, when the kernel learns that this loop no longer listens, it may have reported
            // new connections to this loop only. Loops of another process that shares the socket, as in an upgrade,
            // would only notice them with the next connection.
            gale_runtime::yield_now().await;
            accept_queued(&worker, &left, None, until).await;
            // As in `commit`.
            drop(left);
            gale_runtime::yield_now().await;
        })
    }

    fn drain(&mut self, successor: Option<&Successor>) -> Completion {
        // The drain may be slow, and the process may end at any time.
        self.worker.access.flush();
        let protocols = self.workers();
        protocols.iter().for_each(|protocol| Rc::clone(protocol).drain(successor));
        self.services.stop();
        let services_ended = self.services.ended();
        let worker = Rc::clone(&self.worker);
        Box::pin(async move {
            for protocol in protocols {
                poll_fn(|context| protocol.poll_closed(context)).await;
            }
            services_ended.await;
            worker.access.flush();
            // In vain for peers that accept nothing; a shorter `worker_shutdown_timeout` ends the loop earlier.
            let _ = gale_runtime::timeout(LAST_ANSWERS_WAIT_MAX, gale_runtime::all_sent()).await;
        })
    }

    fn receive(&mut self, arrivals: &Arrivals) {
        let task = gale_runtime::spawn(serve_arrivals(Rc::clone(&self.worker), arrivals.clone()));
        self.arriving.push(task);
    }

    fn expire(&mut self, configuration: Option<&Arc<Configuration>>) {
        if configuration.is_none() {
            self.services.abort();
        }
        self.workers().iter().for_each(|protocol| protocol.expire(configuration.map(Arc::as_ref)));
    }

    fn reopen(&mut self) {
        self.worker.access.flush();
    }

    fn connections(&self) -> usize {
        self.workers().iter().map(|protocol| protocol.connection_count()).sum()
    }
}
