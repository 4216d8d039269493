//! The cost of a short connection: compares the drivers, and the ways in which the io_uring driver can accept.
//!
//! ```text
//!   cargo run --release -p gale-runtime --example accepting -- [ROUNDS] [CLIENTS] [CORE]
//! ```
//!
//! A loop on core 0 accepts, answers one request and closes; one on core 1 (or CORE: with 0 there is always a queue)
//! keeps CLIENTS connections open at a time. All ways take turns; medians (and minima) of the CPU time per connection
//! are printed, user and kernel together. There is no HTTP in it, and no verdict.

mod common;

use std::cell::Cell;
use std::rc::Rc;
use std::time::Instant;

use common::{RUN, WARM_UP, beside_server, median_and_least, pin, state_of, thread_time};
use gale_runtime::*;

const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nConnection: close\r\n\r\n";
const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nServer: gale\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\n\
    Content-Type: text/plain\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok";

fn main() {
    let number = |place: usize, default: usize| {
        std::env::args().nth(place).map_or(default, |text| text.parse().expect("a number"))
    };
    let (rounds, clients, client_core) = (number(1, 15), number(2, 64), number(3, 1));
    let ways = ways();
    let mut samples = vec![Vec::new(); ways.len()];
    for _ in 0..rounds {
        for ((_, driver, options), samples) in ways.iter().zip(&mut samples) {
            let server = LoopOptions { driver: *driver, ..LoopOptions::default() };
            let ask = move |address, server| ask(&address, clients, client_core, &server);
            samples.push(beside_server(server, *options, answer, ask));
        }
    }
    println!("{rounds} rounds, {clients} clients; medians (least) per connection\n");
    println!("| | server µs | client µs | turns | connections/s |\n|---|---|---|---|---|");
    for ((name, ..), samples) in ways.iter().zip(&samples) {
        let column = |figure| median_and_least::<Sample>(samples, figure);
        println!(
            "| {name} | {:.2} ({:.2}) | {:.2} ({:.2}) | {:.3} | {:.0} |",
            column(|sample| sample.server_us).0,
            column(|sample| sample.server_us).1,
            column(|sample| sample.client_us).0,
            column(|sample| sample.client_us).1,
            column(|sample| sample.turns).0,
            column(|sample| sample.connections_per_second).0,
        );
    }
}

fn ways() -> Vec<(&'static str, DriverChoice, AcceptOptions)> {
    let default = AcceptOptions::default();
    let all = AcceptOptions { batch: MULTI_ACCEPT_BATCH, ..default };
    vec![
        ("epoll", DriverChoice::Epoll, default),
        ("epoll, multi_accept", DriverChoice::Epoll, all),
        ("io_uring, poll", DriverChoice::IoUring, default),
        ("io_uring, poll, multi_accept", DriverChoice::IoUring, all),
    ]
}

#[derive(Clone, Copy)]
struct Sample {
    server_us: f64,
    client_us: f64,
    turns: f64,
    connections_per_second: f64,
}

async fn answer(stream: Stream) {
    let (mut input, mut output) = (Buffer::new(), Output::new());
    if let Ok(1..) = stream.recv(&mut input, 1024).await {
        output.push(ANSWER);
        let _ = stream.send_all(&mut output).await;
    }
}

fn ask(address: &SocketAddress, clients: usize, client_core: usize, server: &Remote) -> Sample {
    pin(client_core);
    let options = LoopOptions { driver: DriverChoice::Epoll, ..LoopOptions::default() };
    EventLoop::new(options).expect("a loop").run(async {
        let connections = Rc::new(Cell::new(0u64));
        for _ in 0..clients {
            let (connections, address) = (Rc::clone(&connections), address.clone());
            spawn(async move {
                let (mut input, mut output) = (Buffer::new(), Output::new());
                loop {
                    let stream = Stream::connect(&address).await.expect("the server accepts");
                    output.push(REQUEST);
                    stream.send_all(&mut output).await.expect("the server receives");
                    while stream.recv(&mut input, 4096).await.expect("the server answers") > 0 {}
                    assert_eq!(input.len(), ANSWER.len());
                    input.clear();
                    connections.set(connections.get() + 1);
                }
            });
        }
        sleep(WARM_UP).await;
        let before = (
            Instant::now(),
            connections.get(),
            thread_time(),
            state_of(server, thread_time).await,
            server.turns().count(),
        );
        sleep(RUN).await;
        let after = (
            Instant::now(),
            connections.get(),
            thread_time(),
            state_of(server, thread_time).await,
            server.turns().count(),
        );
        let count = (after.1 - before.1) as f64;
        Sample {
            server_us: (after.3 - before.3).as_secs_f64() * 1e6 / count,
            client_us: (after.2 - before.2).as_secs_f64() * 1e6 / count,
            turns: (after.4 - before.4) as f64 / count,
            connections_per_second: count / (after.0 - before.0).as_secs_f64(),
        }
    })
}
