//! As many idle connections as the machine lets one process have: they are served, kept, and leave nothing behind.
//!
//! This is a test program of its own, because it needs all descriptors that a process may have.

mod support;

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use rustix::process::{Pid, Resource, Rlimit, getrlimit, setrlimit};
use support::{Client, DEADLINE, Driver, Server, Setup, with_each_driver};

with_each_driver!(thousands_of_idle_connections_leave_nothing_behind);

const COUNT_MAX: usize = 20_000;
/// Fewer would show nothing.
const COUNT_MIN: usize = 2_000;
/// Descriptors that the test program or the worker process has for other things.
const DESCRIPTORS_BESIDE: usize = 300;
/// How much of what the connections cost may stay with the worker process: memory that its allocator keeps for the next ones.
const KEPT_SHARE_MAX: f64 = 0.25;

/// One at a time: each takes all descriptors.
static ALONE: Mutex<()> = Mutex::new(());

/// How many connections there can be, after the limit has been raised as far as it goes. The server inherits it.
fn connections_possible() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let wanted = (COUNT_MAX + DESCRIPTORS_BESIDE) as u64;
    let maximum = limit.maximum.unwrap_or(wanted);
    if maximum < wanted {
        // Root may raise it further, if nobody has forbidden that.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: Some(wanted) });
    }
    let maximum = getrlimit(Resource::Nofile).maximum.unwrap_or(wanted);
    let current = maximum.min(wanted);
    setrlimit(Resource::Nofile, Rlimit { current: Some(current), maximum: Some(maximum) }).expect("up to the maximum");
    (current as usize).saturating_sub(DESCRIPTORS_BESIDE).min(COUNT_MAX)
}

fn thousands_of_idle_connections_leave_nothing_behind(driver: Driver) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let count = connections_possible();
    if count < COUNT_MIN {
        eprintln!("skipped: with a limit of {} descriptors nothing would be shown", count + DESCRIPTORS_BESIDE);
        return;
    }
    if count < COUNT_MAX {
        eprintln!("{count} connections instead of {COUNT_MAX}: the limit of descriptors says so");
    }
    let text = "access_log off; keepalive_timeout 3600s; server { listen %UNIX%; return 200 hello; }";
    let server = Setup::http(driver, text)
        .replace("worker_processes 2", "worker_processes 1")
        .replace("worker_connections 128", &format!("worker_connections {}", count + 100))
        .start();
    let worker = server.worker();
    // What is set up once is there before.
    open_and_ask(&server, 100);
    wait_closed(&server, worker, 50);
    let (descriptors, before) = (support::descriptors_of(worker), support::proportional_memory(worker));

    let mut idle = open_and_ask(&server, count);
    assert!(support::descriptors_of(worker) >= count, "all of them are open");
    let most = support::proportional_memory(worker);
    // They are kept, and one as good as another.
    idle.iter_mut().step_by(97).for_each(assert_hello);
    drop(idle);
    wait_closed(&server, worker, descriptors);

    let after = support::proportional_memory(worker);
    let (grown, kept) = (most.saturating_sub(before), after.saturating_sub(before));
    eprintln!("{count} connections: {} KiB, of which {} KiB stay", grown / 1024, kept / 1024);
    assert!(kept as f64 <= KEPT_SHARE_MAX * grown as f64, "{before} bytes before, {most} with them, {after} after");
    server.stop();
}

fn open_and_ask(server: &Server, count: usize) -> Vec<Client> {
    let open = |_| {
        let mut client = server.connect();
        assert_hello(&mut client);
        client
    };
    (0..count).map(open).collect()
}

#[track_caller]
fn assert_hello(client: &mut Client) {
    assert_eq!(client.get("/").text(), "hello");
}

/// Waits until the worker process has no more descriptors than that.
#[track_caller]
fn wait_closed(server: &Server, worker: Pid, descriptors: usize) {
    let begin = Instant::now();
    let mut other = server.connect();
    // Beside the one that it answers meanwhile.
    while support::descriptors_of(worker) > descriptors + 1 {
        assert!(begin.elapsed() < DEADLINE, "{} descriptors\n{server}", support::descriptors_of(worker));
        assert_hello(&mut other);
    }
}
