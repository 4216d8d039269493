//! 20,000 idle connections are served, kept, and leak nothing.
//!
//! All workers of a server are one process, which has a descriptor for each connection. If the limit of descriptors is
//! too low for all of them in one process (20,000 descriptors are not enough for 20,000 connections, and raising limits
//! needs a privilege), a second server takes the rest at the same time; the output says so. For the same reason the
//! clients are in processes of their own, one for each server.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use rustix::process::Pid;

use crate::support::{
    self, Client, DEADLINE, Driver, Server, Setup, descriptor_limit, skip, turn_of_crowds, with_each_driver,
};

with_each_driver!(twenty_thousand_idle_connections_leave_nothing_behind);

const COUNT: usize = 20_000;
/// Minimum for each server: with fewer, memory that a worker keeps anyway would hide a leak.
const COUNT_OF_ONE_MIN: usize = 5_000;
/// Connections opened and closed before anything is measured.
const WARM_UP_COUNT: usize = 500;
/// Descriptors that a process needs besides.
const DESCRIPTORS_BESIDE: usize = 300;
/// Maximum share of the connections' memory that may stay, in partly used pages of the allocator.
const KEPT_SHARE_MAX: f64 = 0.2;
/// Memory in bytes that each worker process may keep besides, for any number of connections: queues that have grown,
/// buffers.
const KEPT_BY_EACH_MAX: u64 = 1024 * 1024;
/// Maximum share that as many further connections may add: a leak for each connection would show here.
const ADDED_SHARE_MAX: f64 = 0.1;

/// A server, its worker process, and the number of its descriptors without connections.
struct Host {
    server: Server,
    worker: Pid,
    descriptors: usize,
}

impl Host {
    fn start(driver: Driver, count: usize) -> Host {
        let text = "access_log off; keepalive_timeout 3600s; server { listen %UNIX%; return 200 hello; }";
        let server = Setup::http(driver, text)
            .replace("worker_processes 2", "worker_processes 1")
            .replace("worker_connections 128", &format!("worker_connections {}", count.max(WARM_UP_COUNT) + 100))
            .start();
        let worker = server.worker();
        // Structures that are allocated once exist before the measurement.
        drop(open_and_ask(&server.directory.path().join(SOCKET), WARM_UP_COUNT));
        let mut host = Host { server, worker, descriptors: 50 };
        host.wait_closed();
        host.descriptors = support::descriptors_of(worker);
        host
    }

    /// Waits until the worker process has no more descriptors than before.
    #[track_caller]
    fn wait_closed(&self) {
        let begin = Instant::now();
        let mut other = self.server.connect();
        // One more for the connection of these requests.
        while support::descriptors_of(self.worker) > self.descriptors + 1 {
            let count = support::descriptors_of(self.worker);
            assert!(begin.elapsed() < DEADLINE, "{count} descriptors\n{}", self.server);
            assert_hello(&mut other);
        }
    }
}

fn twenty_thousand_idle_connections_leave_nothing_behind(driver: Driver) {
    let _turn = turn_of_crowds();
    let limit = descriptor_limit();
    let count_of_one = limit.saturating_sub(DESCRIPTORS_BESIDE).min(COUNT);
    if count_of_one < COUNT_OF_ONE_MIN {
        return skip("a process can have too few descriptors here");
    }
    let counts: Vec<usize> = (0..COUNT).step_by(count_of_one).map(|from| count_of_one.min(COUNT - from)).collect();
    if counts.len() > 1 {
        eprintln!(
            "a process can have {limit} descriptors: {COUNT} connections are {counts:?}, each at a server of its own"
        );
    }
    let kept_by_all = KEPT_BY_EACH_MAX * counts.len() as u64;
    let hosts: Vec<Host> = counts.iter().map(|count| Host::start(driver, *count)).collect();
    let before = memory_of(&hosts);
    let most = keep_idle(&hosts, &counts);
    let after = memory_of(&hosts);
    keep_idle(&hosts, &counts);
    let after_more = memory_of(&hosts);
    hosts.into_iter().for_each(|host| host.server.stop());

    let (grown, kept) = (most.saturating_sub(before), after.saturating_sub(before));
    let added = after_more.saturating_sub(after);
    let told = format!("{COUNT} connections: {grown} bytes, of which {kept} stay, and {added} of as many once more");
    eprintln!("{told}");
    assert!(kept.saturating_sub(kept_by_all) as f64 <= KEPT_SHARE_MAX * grown as f64, "{told}");
    assert!(added as f64 <= ADDED_SHARE_MAX * grown as f64, "{told}");
}

/// Opens all connections, keeps them idle, and closes them; returns the memory of the worker processes in between.
fn keep_idle(hosts: &[Host], counts: &[usize]) -> u64 {
    let mut crowds: Vec<Crowd> = hosts.iter().zip(counts).map(|(host, count)| Crowd::open(host, *count)).collect();
    for (host, count) in hosts.iter().zip(counts) {
        assert!(support::descriptors_of(host.worker) >= *count, "all of them are open");
    }
    let memory = memory_of(hosts);
    crowds.iter_mut().for_each(Crowd::ask_some);
    drop(crowds);
    hosts.iter().for_each(Host::wait_closed);
    memory
}

fn memory_of(hosts: &[Host]) -> u64 {
    hosts.iter().map(|host| support::anonymous_memory(host.worker)).sum()
}

/// A process with clients of a server: this program again, running only `a_crowd_of_another_process`.
struct Crowd {
    process: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

const CROWD: &str = "GALE_TEST_CROWD";
const SOCKET: &str = "gale.sock";
/// Written by a crowd when its connections are open, and when some have made another request.
const DONE: &str = "done";

impl Crowd {
    fn open(host: &Host, count: usize) -> Crowd {
        let mut program = Command::new(std::env::current_exe().expect("a test program"));
        program.args(["--exact", "idle_connections::a_crowd_of_another_process", "--nocapture"]);
        program.current_dir(host.server.directory.path()).env(CROWD, count.to_string());
        let mut process = program.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it runs already");
        let orders = process.stdin.take();
        let answers = BufReader::new(process.stdout.take().expect("a pipe"));
        let mut crowd = Crowd { process, orders, answers };
        crowd.wait_done();
        crowd
    }

    /// Makes another request on some of the connections.
    fn ask_some(&mut self) {
        self.orders.as_mut().expect("it is open").write_all(b"ask\n").expect("it listens");
        self.wait_done();
    }

    /// Waits until the crowd has received its responses; panics if it has failed.
    fn wait_done(&mut self) {
        let mut line = String::new();
        while !line.trim_end().ends_with(DONE) {
            line.clear();
            assert_ne!(self.answers.read_line(&mut line).expect("a pipe"), 0, "a crowd has failed");
        }
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        // The process and its connections end when its input is closed.
        drop(self.orders.take());
        // Its exit status does not matter any more.
        let _ = self.process.wait();
    }
}

/// The process of a [`Crowd`]; does nothing unless started by one.
#[test]
fn a_crowd_of_another_process() {
    let Ok(count) = std::env::var(CROWD) else { return };
    let mut idle = open_and_ask(Path::new(SOCKET), count.parse().expect("a number"));
    println!("{DONE}");
    for order in std::io::stdin().lines() {
        assert_eq!(order.expect("a pipe"), "ask");
        idle.iter_mut().step_by(97).for_each(assert_hello);
        println!("{DONE}");
    }
}

fn open_and_ask(socket: &Path, count: usize) -> Vec<Client> {
    let open = |_| {
        let mut client = Client::unix(socket);
        assert_hello(&mut client);
        client
    };
    (0..count).map(open).collect()
}

#[track_caller]
fn assert_hello(client: &mut Client) {
    assert_eq!(client.get("/").text(), "hello");
}
