//! A program for the process layer without HTTP: it reads a line and answers with a line.
//!
//! Its configuration has one directive per line. Its event loop is `poll` over a thread-local list. It is the smallest
//! program that accepts, keeps connections, changes over and drains.

use std::cell::RefCell;
use std::future::Future;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use gale_base::log_level::{Level, LineForm};
use gale_process::{
    BuildRequest, Built, Completion, ErrorLog, ErrorLogDestination, ErrorLogOutput, ErrorLogSetting, ErrorLogTarget,
    ListenAddress, ListenSpec, ListenerHandle, LogHandle, LoopMain, ProcessSettings, Program, Report, Resources,
    Successor, Worker, WorkerSlot,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags};

pub struct Toy;

pub struct Configuration {
    settings: ProcessSettings,
    listeners: Vec<ListenerHandle>,
    answer: String,
    trace: Option<LogHandle>,
    addresses: Option<PathBuf>,
    start_fails: bool,
    start_fails_at: Option<usize>,
    start_waits_open: Option<PathBuf>,
    tells_settled: bool,
}

impl Program for Toy {
    type Configuration = Configuration;
    type Worker = ToyWorker;

    fn build(&self, request: &BuildRequest, resources: &mut dyn Resources) -> Result<Built<Configuration>, Report> {
        build(request, resources).map_err(|message| Report::new(Level::Emerg, message))
    }

    fn process_settings<'c>(&self, configuration: &'c Configuration) -> &'c ProcessSettings {
        &configuration.settings
    }

    fn error_log(&self, targets: &[ErrorLogTarget]) -> Arc<dyn ErrorLog> {
        let file = targets.iter().find_map(|target| match &target.output {
            ErrorLogOutput::File(file) => Some(Arc::clone(file)),
            _ => None,
        });
        Arc::new(ToyLog { file })
    }

    fn run_loop(&self, _: usize, _: Arc<Configuration>, main: LoopMain) -> io::Result<()> {
        run_loop(main)
    }

    fn start(&self, slot: WorkerSlot, configuration: Arc<Configuration>) -> Result<ToyWorker, String> {
        if configuration.start_fails || configuration.start_fails_at == Some(slot.worker) {
            return Err("told to fail".into());
        }
        if let (0, Some(path)) = (slot.worker, &configuration.addresses) {
            let address = |listener: &ListenerHandle| Some(listener.local_address().ok()?.to_string());
            let addresses: Vec<String> = configuration.listeners.iter().filter_map(address).collect();
            // A file of another user can be replaced even if it cannot be written.
            let _ = std::fs::remove_file(path);
            std::fs::write(path, addresses.join("\n")).map_err(|error| error.to_string())?;
        }
        if let (0, Some(path)) = (slot.worker, &configuration.start_waits_open) {
            let _ = std::fs::read(path);
        }
        TURN.with_borrow_mut(|turn| turn.serve(slot, configuration));
        Ok(ToyWorker)
    }
}

fn build(request: &BuildRequest, resources: &mut dyn Resources) -> Result<Built<Configuration>, String> {
    let mut configuration = Configuration {
        settings: ProcessSettings { daemon: false, ..ProcessSettings::default() },
        listeners: Vec::new(),
        answer: String::new(),
        trace: None,
        addresses: None,
        start_fails: false,
        start_fails_at: None,
        start_waits_open: None,
        tells_settled: false,
    };
    let mut specs = Vec::new();
    let mut waits_open = "";
    let text = resources.read(&request.configuration_path).map_err(|error| error.to_string())?;
    let text = String::from_utf8(text).map_err(|error| error.to_string())?;
    for line in text.lines() {
        let (name, value) = line.split_once(' ').unwrap_or((line, ""));
        let settings = &mut configuration.settings;
        match name {
            "workers" => settings.workers = value.parse().expect("a number"),
            "pid" => settings.pid_path = value.into(),
            "daemon" => settings.daemon = true,
            "single" => settings.master_process = false,
            "rlimit_nofile" => settings.rlimit_nofile = Some(value.parse().expect("a number")),
            "working_directory" => settings.working_directory = Some(value.into()),
            "shutdown_timeout" => settings.shutdown_timeout = Some(Duration::from_millis(value.parse().expect("ms"))),
            "user" => settings.account = resources.account(value, None).map_err(|error| error.to_string())?,
            "error_log" => {
                resources.log_file(value.as_ref()).map_err(|error| error.to_string())?;
                let destination = ErrorLogDestination::File(value.into());
                settings.error_log.push(ErrorLogSetting { level: Level::Notice, form: LineForm::Text, destination });
            }
            "logs" => {
                // Many descriptors.
                for index in 0..value.parse().expect("a number") {
                    let path = format!("{}.{index}", request.configuration_path.display());
                    resources.log_file(path.as_ref()).map_err(|error| error.to_string())?;
                }
            }
            "trace" => {
                configuration.trace = Some(resources.log_file(value.as_ref()).map_err(|error| error.to_string())?);
            }
            "listen" => specs.push(ListenSpec::new(ListenAddress::Inet(value.parse().expect("an address")))),
            "listen_unix" => specs.push(ListenSpec::new(ListenAddress::Unix(value.into()))),
            "reuseport" => {
                let (count, address) = value.split_once(' ').unwrap_or((value, "127.0.0.1:0"));
                let address = ListenAddress::Inet(address.parse::<SocketAddr>().expect("an address"));
                specs.push(ListenSpec { reuseport: count.parse().expect("a number"), ..ListenSpec::new(address) });
            }
            "answer" => configuration.answer = value.into(),
            "addresses" => configuration.addresses = Some(value.into()),
            "start_fails" => configuration.start_fails = true,
            "start_fails_at" => configuration.start_fails_at = Some(value.parse().expect("a number")),
            "panic" => panic!("told to panic"),
            "waits" => wait_for_test(value),
            "waits_open" => waits_open = value,
            "tells_settled" => configuration.tells_settled = true,
            "start_waits_open" => configuration.start_waits_open = Some(value.into()),
            "worker_panics" if std::env::var_os("GALE_PROCESS").is_some_and(|role| role == "worker") => {
                panic!("told to panic")
            }
            "worker_panics" => {}
            _ => {
                return Err(format!("unknown directive \"{name}\" in {}:1", request.configuration_path.display()));
            }
        }
    }
    configuration.listeners = resources.listeners(&specs).map_err(|error| error.to_string())?;
    if !waits_open.is_empty() {
        wait_for_test(waits_open);
    }
    Ok(Built { configuration, warnings: Report::default() })
}

/// `ROLE FIFO`: in this role, waits until the test has opened that FIFO for writing and closed it again.
fn wait_for_test(value: &str) {
    let (waiting, path) = value.split_once(' ').expect("a role and a path");
    if std::env::var_os("GALE_PROCESS").is_some_and(|role| role == waiting) {
        let _ = std::fs::read(path);
    }
}

struct ToyLog {
    file: Option<LogHandle>,
}

impl ErrorLog for ToyLog {
    fn write(&self, level: Level, message: &str) {
        let line = format!("[{}] {}: {message}\n", level.name(), std::process::id());
        match &self.file {
            Some(file) => drop(rustix::io::write(file, line.as_bytes())),
            None => eprint!("{line}"),
        }
    }
}

pub struct ToyWorker;

impl Worker for ToyWorker {
    type Configuration = Configuration;

    fn commit(&mut self, slot: WorkerSlot, configuration: Arc<Configuration>) -> Completion {
        TURN.with_borrow_mut(|turn| turn.serve(slot, configuration));
        Box::pin(std::future::ready(()))
    }

    fn settled(&mut self) {
        TURN.with_borrow(|turn| {
            let configuration = turn.configuration.as_ref().filter(|configuration| configuration.tells_settled);
            if let Some((configuration, trace)) = configuration.and_then(|known| Some((known, known.trace.as_ref()?))) {
                let line = format!("worker {} has settled with {}\n", turn.worker, configuration.answer);
                let _ = rustix::io::write(trace, line.as_bytes());
            }
        });
    }

    fn stop_accepting(&mut self, _: bool) -> Completion {
        TURN.with_borrow_mut(|turn| turn.sockets.clear());
        Box::pin(std::future::ready(()))
    }

    fn drain(&mut self, _: Option<&Successor>) -> Completion {
        Box::pin(Drained)
    }

    fn expire(&mut self, configuration: Option<&Arc<Configuration>>) {
        TURN.with_borrow_mut(|turn| {
            let current = configuration.and(turn.configuration.clone());
            let keep = |held: &Arc<Configuration>| current.as_ref().is_some_and(|current| Arc::ptr_eq(held, current));
            turn.connections.retain(|connection| keep(&connection.configuration));
        });
    }

    fn reopen(&mut self) {
        TURN.with_borrow(|turn| {
            if let Some(trace) = turn.configuration.as_ref().and_then(|configuration| configuration.trace.as_ref()) {
                let line = format!("worker {} reopens\n", turn.worker);
                let _ = rustix::io::write(trace, line.as_bytes());
            }
        });
    }

    fn connections(&self) -> usize {
        TURN.with_borrow(|turn| turn.connections.len())
    }
}

struct Drained;

impl Future for Drained {
    type Output = ();

    /// The main future is polled after every turn.
    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
        if TURN.with_borrow(|turn| turn.connections.is_empty()) { Poll::Ready(()) } else { Poll::Pending }
    }
}

thread_local! {
    static TURN: RefCell<Turn> = RefCell::default();
}

#[derive(Default)]
struct Turn {
    worker: usize,
    configuration: Option<Arc<Configuration>>,
    sockets: Vec<Arc<OwnedFd>>,
    connections: Vec<Connection>,
}

struct Connection {
    stream: TcpStream,
    /// Configuration of the current request; the next request uses the latest one.
    configuration: Arc<Configuration>,
}

impl Turn {
    fn serve(&mut self, slot: WorkerSlot, configuration: Arc<Configuration>) {
        self.worker = slot.worker;
        let mine = |listener: &ListenerHandle| -> Vec<Arc<OwnedFd>> {
            match listener.sockets.as_slice() {
                _ if slot.worker >= slot.workers => Vec::new(),
                [shared] => vec![Arc::clone(shared)],
                several => several.iter().skip(slot.worker).step_by(slot.workers).cloned().collect(),
            }
        };
        self.sockets = configuration.listeners.iter().flat_map(mine).collect();
        self.configuration = Some(configuration);
    }

    fn accept(&mut self) {
        for socket in &self.sockets {
            while let Ok(stream) = rustix::net::accept_with(socket, rustix::net::SocketFlags::NONBLOCK) {
                let configuration = Arc::clone(self.configuration.as_ref().expect("it serves"));
                self.connections.push(Connection { stream: TcpStream::from(stream), configuration });
            }
        }
    }

    fn answer(&mut self) {
        let current = self.configuration.clone();
        let worker = self.worker;
        self.connections.retain_mut(|connection| {
            let mut input = [0; 256];
            let length = match connection.stream.read(&mut input) {
                Ok(0) => return false,
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
                Ok(length) => length,
            };
            match &input[..length] {
                b"stuck\n" => loop {
                    std::thread::park();
                },
                b"panic\n" => panic!("told to panic"),
                b"exhaust\n" => exhaust_descriptors(),
                b"release\n" => DESCRIPTORS.with_borrow_mut(Vec::clear),
                b"unlink\n" => cut_link(),
                // A long exchange: it keeps the configuration that it began with.
                b"hold\n" => return connection.stream.write_all(b"holding\n").is_ok(),
                _ => {}
            }
            let configuration = current.as_ref().expect("it serves");
            connection.configuration = Arc::clone(configuration);
            if let Some(trace) = &configuration.trace {
                let _ = rustix::io::write(trace, &input[..length]);
            }
            let line = format!("{} {worker} {}\n", std::process::id(), configuration.answer);
            connection.stream.write_all(line.as_bytes()).is_ok()
        });
    }
}

thread_local! {
    static DESCRIPTORS: RefCell<Vec<std::fs::File>> = RefCell::default();
}

/// Uses up all free descriptors of this process.
fn exhaust_descriptors() {
    DESCRIPTORS.with_borrow_mut(|held| held.extend(std::iter::from_fn(|| std::fs::File::open("/dev/null").ok())));
}

/// Shuts down the worker's link to its master: its only socket of that type.
fn cut_link() {
    let names = std::fs::read_dir("/proc/self/fd").expect("a list").flatten();
    for number in names.filter_map(|entry| entry.file_name().to_str()?.parse().ok()) {
        // SAFETY: borrowed for calls that fail with EBADF if it is not open.
        let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
        if rustix::net::sockopt::socket_type(descriptor) == Ok(rustix::net::SocketType::SEQPACKET) {
            rustix::net::shutdown(descriptor, rustix::net::Shutdown::Both).expect("it is connected");
        }
    }
}

struct EventWaker(OwnedFd);

impl Wake for EventWaker {
    fn wake(self: Arc<Self>) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

fn run_loop(mut main: LoopMain) -> io::Result<()> {
    let event = rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
    let waker = Waker::from(Arc::new(EventWaker(event.try_clone()?)));
    while main.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
        TURN.with_borrow_mut(|turn| {
            let mut polled = vec![PollFd::new(&event, PollFlags::IN)];
            polled.extend(turn.sockets.iter().map(|socket| PollFd::new(socket, PollFlags::IN)));
            polled.extend(
                turn.connections.iter().map(|each| PollFd::from_borrowed_fd(each.stream.as_fd(), PollFlags::IN)),
            );
            let _ = rustix::event::poll(&mut polled, None);
            drop(polled);
            let _ = rustix::io::read(&event, &mut [0u8; 8]);
            turn.accept();
            turn.answer();
        });
    }
    TURN.take();
    Ok(())
}
