//! Greedy clients beside quiet ones: the real binary with one worker, with both drivers.
//!
//! The measure is progress and not time: the number of answers that the flood gets between a quiet client's request and
//! its answer. The access log has the answers in order. The worker stalls while the requests are sent, so that all wait
//! at the start.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

use rustix::fs::{CWD, FileType, Mode};

use crate::support::{Client, Driver, Server, Setup, descriptor_limit, turn_of_crowds, with_each_driver};

with_each_driver!(quiet_clients_have_their_turn_beside_a_flood);

/// Number of clients that ask now and then.
const QUIET: usize = 1000;

/// Number of connections that carry requests without end.
const FLOODS: usize = 4;

/// Number of threads that open connections without end, each with a request.
const OPENERS: usize = 2;

/// Most answers that a turn of the loop gives to the flood: 16 to each greedy connection, 1 to a new one, of which 8
/// are accepted, and 1 to each opener that has been waiting longer.
const FLOOD_ANSWERS_PER_TURN: usize = 16 * FLOODS + 8 + OPENERS;

/// Most turns that the requests of all quiet clients take: each needs two events, to receive and to send, and a turn's
/// share of work. Doubled, because the flood has events, too.
fn turns(driver: Driver) -> usize {
    let events_per_turn = match driver {
        Driver::Epoll => 512,
        // Deferred work done in one call (IO_LOCAL_TW_DEFAULT_MAX in Linux).
        Driver::IoUring => 20,
    };
    2 * (2 * QUIET).div_ceil(events_per_turn)
}

const ASK_QUIETLY: &str = "GET /quiet HTTP/1.1\r\nHost: localhost\r\n\r\n";

const FLOOD: &str = "GET /flood HTTP/1.1\r\nHost: localhost\r\n\r\n";

/// Connections that send requests, and openers that make connections, until the end.
struct Flood {
    is_over: Arc<AtomicBool>,
    answers: Arc<AtomicUsize>,
    connections: Vec<Client>,
    threads: Vec<JoinHandle<()>>,
}

impl Flood {
    fn begin(server: &Server) -> Flood {
        let is_over = Arc::new(AtomicBool::new(false));
        let answers = Arc::new(AtomicUsize::new(0));
        let connections: Vec<Client> = (0..FLOODS).map(|_| server.connect()).collect();
        let mut threads = Vec::new();
        for connection in &connections {
            let (mut sender, mut reader) = (connection.sender(), connection.sender());
            let many = FLOOD.repeat(1000);
            // Until the connection is shut down.
            threads.push(thread::spawn(move || while sender.try_send(&many).is_ok() {}));
            let answers = Arc::clone(&answers);
            threads.push(thread::spawn(move || {
                while reader.take_some() {
                    answers.fetch_add(1, Ordering::Relaxed);
                }
            }));
        }
        for _ in 0..OPENERS {
            let address = server.directory.address(1);
            let is_over = Arc::clone(&is_over);
            threads.push(thread::spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    let mut client = Client::tcp(address);
                    client.send("GET /opened HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
                    assert_eq!(client.response().status, 200);
                }
            }));
        }
        Flood { is_over, answers, connections, threads }
    }

    /// Number of reads by the flood so far.
    fn progress(&self) -> usize {
        self.answers.load(Ordering::Relaxed)
    }

    fn end(self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.connections.iter().for_each(Client::close_both);
        self.threads.into_iter().for_each(|thread| thread.join().expect("it was answered to the end"));
    }
}

fn quiet_clients_have_their_turn_beside_a_flood(driver: Driver) {
    let _turn = turn_of_crowds();
    assert!(descriptor_limit() >= 4 * QUIET, "the limit of descriptors is too low for this test");
    let text = "location /stall { test_stall %DIR%/fifo; test_echo; } location / { return 200 hello; }";
    let text = format!("server {{ listen %UNIX%; listen %TCP%; keepalive_requests 1000000000; {text} }}");
    let setup = Setup::http(driver, &text).replace("worker_processes 2;", "worker_processes 1;");
    let server = setup.replace("worker_connections 128;", &format!("worker_connections {};", 3 * QUIET)).start();
    let fifo = server.directory.path().join("fifo");
    rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::empty(), 0).expect("a FIFO");
    rustix::fs::chmod(&fifo, Mode::from_raw_mode(0o666)).expect("ours");
    let mut staller = server.connect();
    let mut quiet: Vec<Client> = (0..QUIET).map(|_| server.connect()).collect();
    for client in &mut quiet {
        assert_eq!(client.get("/first").text(), "hello");
    }

    let flood = Flood::begin(&server);
    for _ in 0..3 {
        let before = flood.progress();
        server.directory.wait_until("an answer to the flood", |_| flood.progress() > before);
        staller.send("GET /stall HTTP/1.1\r\nHost: localhost\r\n\r\n");
        // Opening for writing waits for the reader.
        let writer = File::options().write(true).open(&fifo).expect("a FIFO");
        quiet.iter_mut().for_each(|client| client.send(ASK_QUIETLY));
        drop(writer);
        for client in &mut quiet {
            assert_eq!(client.response().text(), "hello");
        }
        assert_eq!(staller.response().status, 200);
    }
    // The worker continues, and so do the clients.
    for client in &mut quiet {
        assert_eq!(client.get("/later").text(), "hello");
    }
    let before = flood.progress();
    server.directory.wait_until("more answers to the flood", |_| flood.progress() > before);
    flood.end();
    let log = server.directory.read("access.log");
    let later = log.split_once("\"GET /later ").and_then(|(_, rest)| rest.rsplit_once("\"GET /later ")).expect("two").0;
    let count = |text: &str| later.matches(text).count();
    let (flooded, opened) = (count("\"GET /flood "), count("\"GET /opened "));
    assert!(flooded > 0 && opened > 0, "the flood went on meanwhile: {flooded} answers, {opened} to new connections");
    let between = flood_answers_beside_quiet_ones(&log);
    let bound = turns(driver) * FLOOD_ANSWERS_PER_TURN;
    println!("{driver:?}: answers to the flood beside {QUIET} quiet clients: {between:?}, at most {bound}");
    assert!(between.iter().all(|&answers| answers <= bound), "{between:?} exceeds {bound}");
    server.stop();
}

/// For each stall: number of answers to the flood from its end until the last quiet client had its answer.
fn flood_answers_beside_quiet_ones(log: &str) -> Vec<usize> {
    let mut stalls = Vec::new();
    for stall in log.split("\"GET /stall ").skip(1) {
        let (mut quiet, mut others) = (0, 0);
        for line in stall.lines().skip(1) {
            if line.contains("\"GET /quiet ") {
                quiet += 1;
            } else {
                others += 1;
            }
            if quiet == QUIET {
                break;
            }
        }
        assert_eq!(quiet, QUIET, "all were answered");
        stalls.push(others);
    }
    stalls
}
