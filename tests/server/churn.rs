//! Clients that connect without a pause while the server changes: reloads, new worker processes, killed ones. No client
//! is refused or reset, and no descriptor is leaked.
//!
//! A short connection sends one request and reads to the end: a complete answer and then the end, or it counts as lost.
//! Only a connection that a killed process may have accepted can be lost.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Instant;

use rustix::process::{Pid, Signal};

use crate::support::{self, Client, DEADLINE, Driver, Server, Setup, http_configuration, with_each_driver};

with_each_driver!(
    reloads_disturb_no_client_on_a_shared_socket,
    reloads_disturb_no_client_on_sockets_of_each_worker,
    a_process_takes_over_from_another_on_a_shared_socket,
    a_process_takes_over_from_another_on_sockets_of_each_worker,
    killed_process_loses_only_its_own_requests_on_a_shared_socket,
    killed_process_loses_only_its_own_requests_on_sockets_of_each_worker,
);

const SHARED: &str = "";
const REUSEPORT: &str = "reuseport";

/// Number of threads that open one connection after the other, and of threads that keep their connection.
const SHORT_CLIENTS: usize = 4;
const KEPT_CLIENTS: usize = 2;
/// Answers between two changes, so that each change meets active clients.
const ANSWERS_BETWEEN: u64 = 50;

fn reloads_disturb_no_client_on_a_shared_socket(driver: Driver) {
    reloads_disturb_no_client(driver, SHARED);
}

fn reloads_disturb_no_client_on_sockets_of_each_worker(driver: Driver) {
    reloads_disturb_no_client(driver, REUSEPORT);
}

fn a_process_takes_over_from_another_on_a_shared_socket(driver: Driver) {
    a_process_takes_over_from_another(driver, SHARED);
}

fn a_process_takes_over_from_another_on_sockets_of_each_worker(driver: Driver) {
    a_process_takes_over_from_another(driver, REUSEPORT);
}

fn killed_process_loses_only_its_own_requests_on_a_shared_socket(driver: Driver) {
    killed_process_loses_only_its_own_requests(driver, SHARED);
}

fn killed_process_loses_only_its_own_requests_on_sockets_of_each_worker(driver: Driver) {
    killed_process_loses_only_its_own_requests(driver, REUSEPORT);
}

fn configuration(driver: Driver, socket: &str) -> String {
    http_configuration(
        driver,
        &format!("keepalive_requests 1000000; server {{ listen %UNIX%; listen %TCP% {socket}; return 200 hello; }}"),
    )
}

fn reloads_disturb_no_client(driver: Driver, socket: &str) {
    let text = configuration(driver, socket);
    let mut server = Setup::configuration(&text).start();
    let worker = server.worker();
    server.reload(&text);
    let open = Descriptors::of(&server);
    churn(server.directory.address(1), KEPT_CLIENTS, |churn| {
        for _ in 0..10 {
            server.reload(&text);
            churn.wait_for_answers();
        }
    });
    open.assert_no_more(&server);
    assert_eq!(server.worker(), worker, "reloads take place in the same process");
    server.stop();
}

fn a_process_takes_over_from_another(driver: Driver, socket: &str) {
    let text = configuration(driver, socket);
    // Settings that are fixed for the life of a process require a new process.
    let with = |number: usize| format!("env GALE_TEST={number};\n{text}");
    let mut server = Setup::configuration(&with(0)).start();
    server.reload(&with(1));
    wait_one_worker(&server);
    let open = Descriptors::of(&server);
    churn(server.directory.address(1), 0, |churn| {
        let mut worker = server.worker();
        for number in 2..8 {
            server.reload(&with(number));
            churn.wait_for_answers();
            wait_one_worker(&server);
            let before = std::mem::replace(&mut worker, server.worker());
            assert_ne!(before, worker, "another process\n{server}");
        }
    });
    open.assert_no_more(&server);
    server.stop();
}

fn killed_process_loses_only_its_own_requests(driver: Driver, socket: &str) {
    let mut server = Setup::configuration(&configuration(driver, socket)).start();
    let open = Descriptors::of(&server);
    churn(server.directory.address(1), 0, |churn| {
        for _ in 0..4 {
            wait_one_worker(&server);
            let worker = server.worker();
            churn.while_connections_may_be_lost(|| {
                rustix::process::kill_process(worker, Signal::KILL).expect("it runs");
                assert!(support::wait_ended(worker));
            });
            churn.wait_for_answers();
        }
    });
    open.assert_no_more(&server);
    // The death of a worker was logged as an alert.
    server.end(Signal::TERM);
}

/// Waits until the master has one worker process and no other child.
#[track_caller]
fn wait_one_worker(server: &Server) {
    let begin = Instant::now();
    while support::children_of(server.pid()).len() != 1 {
        assert!(begin.elapsed() < DEADLINE, "{server}");
        // Clients are served meanwhile.
        assert_eq!(short_connection(server.directory.address(1)), Ok(()));
    }
}

/// State shared by the clients.
#[derive(Default)]
struct Churn {
    answers: Mutex<u64>,
    answered: Condvar,
    /// Odd while a process is being killed.
    phase: AtomicU64,
    is_over: AtomicBool,
}

/// Runs clients during `change`; all have ended on return.
fn churn(address: SocketAddr, kept_clients: usize, change: impl FnOnce(&Churn)) {
    let churn = Churn::default();
    std::thread::scope(|scope| {
        let _over = Over(&churn);
        for _ in 0..SHORT_CLIENTS {
            scope.spawn(|| churn.run_short(address));
        }
        for _ in 0..kept_clients {
            scope.spawn(|| churn.run_kept(address));
        }
        churn.wait_for_answers();
        change(&churn);
    });
}

/// Ends the clients, even when the test has failed.
struct Over<'a>(&'a Churn);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }
}

impl Churn {
    fn run_short(&self, address: SocketAddr) {
        let _over = Over(self);
        while !self.is_over.load(Ordering::Relaxed) {
            let before = self.phase.load(Ordering::SeqCst);
            match short_connection(address) {
                Ok(()) => self.count(),
                Err(lost) => {
                    let after = self.phase.load(Ordering::SeqCst);
                    // The master keeps the listening sockets, so every connection is accepted in the end.
                    assert!(lost.was_connected && (before % 2 == 1 || before != after), "{lost:?}");
                }
            }
        }
    }

    fn run_kept(&self, address: SocketAddr) {
        let _over = Over(self);
        let mut client = Client::tcp(address);
        while !self.is_over.load(Ordering::Relaxed) {
            let response = client.get("/");
            assert_eq!((response.text(), response.header("Connection")), ("hello", Some("keep-alive")));
            self.count();
        }
    }

    fn count(&self) {
        *self.answers.lock().expect("nobody panics while counting") += 1;
        self.answered.notify_one();
    }

    /// Waits until the clients have received some more answers.
    #[track_caller]
    fn wait_for_answers(&self) {
        let answers = self.answers.lock().expect("nobody panics while counting");
        let target = *answers + ANSWERS_BETWEEN;
        let is_waiting = |answers: &mut u64| *answers < target && !self.is_over.load(Ordering::Relaxed);
        let waited = self.answered.wait_timeout_while(answers, DEADLINE, is_waiting).expect("nobody panics");
        assert!(*waited.0 >= target, "no answers");
    }

    /// Connections opened before the end of this may be lost; later ones may not.
    fn while_connections_may_be_lost(&self, kill: impl FnOnce()) {
        self.phase.fetch_add(1, Ordering::SeqCst);
        kill();
        self.phase.fetch_add(1, Ordering::SeqCst);
    }
}

/// A connection without its complete answer.
#[derive(Debug, PartialEq)]
struct Lost {
    was_connected: bool,
    error: String,
    received: String,
}

/// Sends one request; the answer is complete and the connection ends after it.
fn short_connection(address: SocketAddr) -> Result<(), Lost> {
    let mut stream = connect(address).map_err(|error| Lost {
        was_connected: false,
        error: error.to_string(),
        received: String::new(),
    })?;
    stream.set_read_timeout(Some(DEADLINE)).expect("an option");
    let mut received = Vec::new();
    let asked = stream.write_all(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
    let ended = asked.and_then(|()| stream.read_to_end(&mut received).map(|_| ()));
    let received = String::from_utf8_lossy(&received).into_owned();
    let is_whole = received.starts_with("HTTP/1.1 200 ") && received.ends_with("\r\n\r\nhello");
    match ended {
        Ok(()) if is_whole => Ok(()),
        ended => Err(Lost { was_connected: true, error: format!("{ended:?}"), received }),
    }
}

/// Connects. Retries when this machine has no free port, because other processes have many connections: that does not
/// concern the server.
fn connect(address: SocketAddr) -> std::io::Result<TcpStream> {
    let begin = Instant::now();
    loop {
        match TcpStream::connect(address) {
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable && begin.elapsed() < DEADLINE => {
                std::thread::yield_now();
            }
            connected => return connected,
        }
    }
}

/// Number of descriptors of master and worker process without connections.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Descriptors {
    master: usize,
    worker: usize,
}

impl Descriptors {
    fn of(server: &Server) -> Descriptors {
        wait_one_worker(server);
        Descriptors { master: support::descriptors_of(server.pid()), worker: support::descriptors_of(server.worker()) }
    }

    /// Asserts that no more descriptors are open than before, once ended connections are cleaned up.
    #[track_caller]
    fn assert_no_more(&self, server: &Server) {
        let begin = Instant::now();
        loop {
            let now = Descriptors::of(server);
            if now.master <= self.master && now.worker <= self.worker {
                return;
            }
            let open = [server.pid(), server.worker()].map(open_files);
            assert!(begin.elapsed() < DEADLINE, "{self:?} then, {now:?} now: {open:#?}\n{server}");
            assert_eq!(short_connection(server.directory.address(1)), Ok(()));
        }
    }
}

/// Targets of the descriptors of a process.
fn open_files(pid: Pid) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs").flatten();
    entries.filter_map(|entry| fs::read_link(entry.path()).ok()).map(|path| path.display().to_string()).collect()
}
