//! The cost of waiting for requests: compares the drivers, and the ways in which the io_uring driver can receive.
//!
//! ```text
//!   cargo run --release -p gale-runtime --example waiting -- cpu [ROUNDS] [CONNECTIONS]
//!   cargo run --release -p gale-runtime --example waiting -- memory [CONNECTIONS]          as root
//! ```
//!
//! `cpu`: a loop on core 0 answers, one on core 1 asks over keep-alive connections; all ways take turns, and medians of
//! the CPU time per request are printed, user and kernel together. `memory`: growth of the kernel's slabs when
//! CONNECTIONS connections begin to wait, without the sockets themselves. There is no HTTP in it, and no verdict.

mod common;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::{Duration, Instant};

use common::{RUN, WARM_UP, beside_server, median_and_least, pin, state_of, thread_time};
use gale_runtime::*;

const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: 127.0.0.1:8080\r\n\r\n";
const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nServer: gale\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\n\
    Content-Type: text/plain\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nok";

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number =
        |place: usize, default: usize| arguments.get(place).map_or(default, |text| text.parse().expect("a number"));
    match arguments.first().map(String::as_str) {
        Some("cpu") => compare_cpu(number(1, 9), number(2, 128)),
        Some("memory") => compare_memory(number(1, 10_000)),
        _ => eprintln!("usage: waiting cpu [ROUNDS] [CONNECTIONS] | memory [CONNECTIONS]"),
    }
}

/// The ways to wait, by name.
fn ways() -> Vec<(String, LoopOptions)> {
    let way = |name: &str, driver, ring| (name.to_owned(), LoopOptions { driver, ring, ..LoopOptions::default() });
    let default = RingOptions::default();
    let mut ways = vec![
        way("epoll", DriverChoice::Epoll, default),
        way("io_uring, polls", DriverChoice::IoUring, RingOptions { buffers: 0, ..default }),
        way("io_uring, single", DriverChoice::IoUring, RingOptions { multishot: false, ..default }),
    ];
    for (buffers, buffer_bytes) in [(32, 4096), (128, 1024), (128, 2048), (128, 4096), (512, 4096), (512, 1024)] {
        let name = format!("io_uring, multishot, {buffers} × {buffer_bytes}");
        ways.push(way(&name, DriverChoice::IoUring, RingOptions { buffers, buffer_bytes, ..default }));
    }
    ways
}

#[derive(Clone, Copy)]
struct Sample {
    server_us: f64,
    client_us: f64,
    calls: f64,
    operations: f64,
    missed: f64,
    requests_per_second: f64,
}

fn compare_cpu(rounds: usize, connections: usize) {
    let ways = ways();
    let accepting = AcceptOptions { batch: MULTI_ACCEPT_BATCH, ..AcceptOptions::default() };
    let mut samples = vec![Vec::new(); ways.len()];
    for _ in 0..rounds {
        for ((_, options), samples) in ways.iter().zip(&mut samples) {
            let ask = move |address, server| ask(&address, connections, &server);
            samples.push(beside_server(options.clone(), accepting, answer, ask));
        }
    }
    println!("{rounds} rounds, {connections} connections; medians (least) per request\n");
    println!(
        "| | server µs | client µs | ring calls | operations | no buffer | requests/s |\n|---|---|---|---|---|---|---|"
    );
    for ((name, _), samples) in ways.iter().zip(&samples) {
        let column = |figure| median_and_least::<Sample>(samples, figure);
        println!(
            "| {name} | {:.2} ({:.2}) | {:.2} | {:.3} | {:.3} | {:.4} | {:.0} |",
            column(|sample| sample.server_us).0,
            column(|sample| sample.server_us).1,
            column(|sample| sample.client_us).0,
            column(|sample| sample.calls).0,
            column(|sample| sample.operations).0,
            column(|sample| sample.missed).0,
            column(|sample| sample.requests_per_second).0,
        );
    }
}

async fn answer(stream: Stream) {
    let (mut input, mut output) = (Buffer::new(), Output::new());
    while let Ok(1..) = stream.recv(&mut input, 1024).await {
        input.clear();
        output.push(ANSWER);
        if stream.send_all(&mut output).await.is_err() {
            return;
        }
    }
}

fn ask(address: &SocketAddress, connections: usize, server: &Remote) -> Sample {
    pin(1);
    let options = LoopOptions { driver: DriverChoice::Epoll, ..LoopOptions::default() };
    EventLoop::new(options).expect("a loop").run(async {
        let requests = Rc::new(Cell::new(0u64));
        for _ in 0..connections {
            let stream = Stream::connect(address).await.expect("the server accepts");
            let requests = Rc::clone(&requests);
            spawn(async move {
                let (mut input, mut output) = (Buffer::new(), Output::new());
                loop {
                    output.push(REQUEST);
                    stream.send_all(&mut output).await.expect("the server receives");
                    while input.len() < ANSWER.len() {
                        assert_ne!(stream.recv(&mut input, 4096).await.expect("the server answers"), 0);
                    }
                    input.clear();
                    requests.set(requests.get() + 1);
                }
            });
        }
        sleep(WARM_UP).await;
        let before = (Instant::now(), requests.get(), thread_time(), state_of(server, state).await);
        sleep(RUN).await;
        let after = (Instant::now(), requests.get(), thread_time(), state_of(server, state).await);
        let count = (after.1 - before.1) as f64;
        let (ring, earlier) = (after.3.1, before.3.1);
        Sample {
            server_us: (after.3.0 - before.3.0).as_secs_f64() * 1e6 / count,
            client_us: (after.2 - before.2).as_secs_f64() * 1e6 / count,
            calls: (ring.calls - earlier.calls) as f64 / count,
            operations: (ring.operations - earlier.operations) as f64 / count,
            missed: (ring.buffers_missed - earlier.buffers_missed) as f64 / count,
            requests_per_second: count / (after.0 - before.0).as_secs_f64(),
        }
    })
}

fn state() -> (Duration, RingCounters) {
    (thread_time(), ring_counters())
}

fn compare_memory(connections: usize) {
    println!("kernel memory per waiting connection, {connections} of them\n\n| | bytes | of these |\n|---|---|---|");
    let default = RingOptions { idle_after: None, ..RingOptions::default() };
    let soon = Some(Duration::from_millis(50));
    let ways = [
        ("epoll", DriverChoice::Epoll, default),
        ("io_uring, single receive", DriverChoice::IoUring, RingOptions { multishot: false, ..default }),
        ("io_uring, multishot receive", DriverChoice::IoUring, default),
        ("io_uring, poll after a receive", DriverChoice::IoUring, RingOptions { idle_after: soon, ..default }),
        ("io_uring, poll", DriverChoice::IoUring, RingOptions { buffers: 0, ..default }),
    ];
    for (name, driver, ring) in ways {
        // On a thread of its own, with a fresh ring, so that no way reuses memory of the one before.
        let wait = move || wait_idly(LoopOptions { driver, ring, ..LoopOptions::default() }, connections);
        let grown = std::thread::spawn(wait).join().expect("the loop ran");
        let total: i64 = grown.iter().map(|(_, bytes)| bytes).sum();
        let mut largest = grown;
        largest.sort_by_key(|(_, bytes)| -bytes);
        let largest: Vec<String> =
            largest.iter().take(4).map(|(slab, bytes)| format!("{slab} {}", bytes / connections as i64)).collect();
        println!("| {name} | {} | {} |", total / connections as i64, largest.join(", "));
    }
}

/// Growth of the slabs when connections that have received data before begin to wait.
fn wait_idly(options: LoopOptions, connections: usize) -> Vec<(String, i64)> {
    let idle_after = options.ring.idle_after;
    EventLoop::new(options).expect("a loop").run(async {
        let mut streams = Vec::new();
        let mut peers = Vec::new();
        for _ in 0..connections {
            let (near, far) = UnixStream::pair().expect("enough descriptors");
            let (near, far) = (Stream::from_fd(near.into()).expect("a socket"), far);
            std::io::Write::write_all(&mut &far, b"first").expect("the peer writes");
            near.recv(&mut Buffer::new(), 100).await.expect("it is there");
            streams.push(near);
            peers.push(far);
        }
        let before = slabs();
        for stream in streams {
            spawn(async move {
                let _ = stream.recv(&mut Buffer::new(), 1000).await;
            });
        }
        sleep(idle_after.map_or(Duration::from_millis(500), |after| after * 6 + Duration::from_millis(500))).await;
        let after = slabs();
        after.into_iter().map(|(name, bytes)| (name.clone(), bytes - before.get(&name).unwrap_or(&0))).collect()
    })
}

/// Bytes of live objects by slab, of those that waiting may use: others belong to the rest of the machine.
fn slabs() -> BTreeMap<String, i64> {
    let table = std::fs::read_to_string("/proc/slabinfo").expect("only root reads /proc/slabinfo");
    let row = |line: &str| {
        let mut words = line.split_whitespace();
        let name = words.next()?.to_owned();
        let concerns = ["kmalloc", "io_kiocb", "eventpoll", "ep_head"].iter().any(|start| name.starts_with(start));
        let live: i64 = words.next()?.parse().ok()?;
        let size: i64 = words.nth(1)?.parse().ok()?;
        concerns.then_some((name, live * size))
    };
    table.lines().filter_map(row).collect()
}
