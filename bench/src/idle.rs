//! idle: memory per idle keep-alive connection, with thousands of connections that have had one answer each.
//!
//! User memory is the growth of all processes of the server. Kernel memory is the growth of the whole machine's, minus
//! that of as many connections that are never accepted. The difference is the server's share beyond the pair of
//! sockets, however it waits for the next request. Both are measured at once and after some idle seconds, because a
//! server may change how it waits. Each measurement uses a fresh server.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use serde::Serialize;

use crate::Measured;
use crate::case::in_turn;
use crate::client::idle::Idle;
use crate::memory::{self, Memory};
use crate::options::Options;
use crate::report::{self, Document, Spread};
use crate::servers::{Program, Running, Setting};

/// Connections before the first reading. They trigger one-time allocations.
const WARM_UP_CONNECTIONS: usize = 100;
/// Limit of the kernel for one socket's queue (net.core.somaxconn, 4096 since Linux 5.4).
const QUEUE: usize = 4000;
/// Number of connections that get another request at the end.
const ASKED_AGAIN: usize = 100;

#[derive(Debug, Serialize)]
struct Row {
    server: String,
    rounds: Vec<Readings>,
}

/// Readings of a server. Growth is relative to the time before the connections, per connection.
#[derive(Debug, Clone, Serialize)]
struct Readings {
    before: Memory,
    at_once: Growth,
    later: Growth,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Growth {
    memory: Memory,
    user_kib: f64,
    private_dirty_kib: f64,
    /// Of the whole machine, including both sides of the connection.
    machine_kib: f64,
    /// Without the pair of sockets.
    kernel_kib: f64,
}

pub fn measure(options: &Options) -> Measured {
    let programs = options.servers(None)?;
    let bare = Spread::of((0..options.idle_rounds).map(|_| bare_pair_kib(options)).collect::<Result<Vec<_>, _>>()?);
    eprintln!("bare pair of sockets: {bare} KiB");
    let rounds = in_turn(options.idle_rounds, &programs, |program, round| {
        let readings = measure_one(options, program, bare.median)?;
        eprintln!(
            "  round {round}, {}: user {:.3} KiB, kernel {:.3}, then {:.3}",
            program.label, readings.at_once.user_kib, readings.at_once.kernel_kib, readings.later.kernel_kib
        );
        Ok(readings)
    })?;
    let rows: Vec<Row> =
        programs.iter().zip(rounds).map(|(program, rounds)| Row { server: program.label.clone(), rounds }).collect();
    let title = format!("Memory of {} idle keep-alive connections", options.idle_connections);
    let body = markdown(options, &rows, bare);
    let data = serde_json::json!({ "connections": options.idle_connections, "bare_pair_kib": bare, "rows": rows });
    Ok((Document::new("idle", &title, &programs, &body, data)?, true))
}

/// Returns the kernel memory of a connection that is never accepted: both sockets and the client's file.
fn bare_pair_kib(options: &Options) -> Result<f64, String> {
    let fault = |error: std::io::Error| format!("listening: {error}");
    let count = options.idle_connections;
    let listeners = (0..count.div_ceil(QUEUE)).map(|_| {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        rustix::net::listen(&listener, QUEUE as i32)?;
        Ok(listener)
    });
    let listeners: Vec<TcpListener> = listeners.collect::<std::io::Result<_>>().map_err(fault)?;
    let addresses: Vec<SocketAddr> =
        listeners.iter().map(TcpListener::local_addr).collect::<std::io::Result<_>>().map_err(fault)?;
    let before = memory::kernel_kib();
    let idle = Idle::open(&addresses, count, None)?;
    let growth = memory::kernel_kib() as f64 - before as f64;
    drop(idle);
    Ok(growth / count as f64)
}

fn measure_one(options: &Options, program: &Program, bare_pair_kib: f64) -> Result<Readings, String> {
    let count = options.idle_connections;
    // With a reserve for closing connections and listening sockets.
    let setting =
        Setting { connections_max: count + 1024, cores: Some(vec![options.server_core]), ..Setting::default() };
    let server = program.start(setting)?;
    let address: SocketAddr = server.address.parse().map_err(|_| "an address of ours".to_owned())?;
    drop(Idle::open(&[address], WARM_UP_CONNECTIONS, Some("/return"))?);
    wait_until_alone(&server)?;
    let before = Memory::read(&server.root.tree());
    let machine_before = memory::kernel_kib();
    let growth = || {
        let memory = Memory::read(&server.root.tree());
        let machine = memory::kernel_kib() as f64 - machine_before as f64;
        let per_connection = |now: u64, then: u64| (now as f64 - then as f64) / count as f64;
        let machine_kib = machine / count as f64;
        Growth {
            memory,
            user_kib: per_connection(memory.pss_kib, before.pss_kib),
            private_dirty_kib: per_connection(memory.private_dirty_kib, before.private_dirty_kib),
            machine_kib,
            kernel_kib: machine_kib - bare_pair_kib,
        }
    };
    let mut idle = Idle::open(&[address], count, Some("/return"))?;
    let at_once = growth();
    std::thread::sleep(options.idle_time);
    let later = growth();
    // All of them must still be open.
    idle.ask_some(count.div_ceil(ASKED_AGAIN), "/return").map_err(|error| format!("{}: {error}", server.label))?;
    Ok(Readings { before, at_once, later })
}

/// Waits until the server has closed the connections of the warm-up.
fn wait_until_alone(server: &Running) -> Result<(), String> {
    const LEFT_OPEN_MAX: usize = 50;
    const TIME_LIMIT: Duration = Duration::from_secs(10);
    let begun = std::time::Instant::now();
    let own = |process: &crate::process::Process| process.descriptors();
    while server.root.tree().iter().map(own).max().unwrap_or(0) > LEFT_OPEN_MAX {
        if begun.elapsed() > TIME_LIMIT {
            return Err(format!("{}: does not close the connections of the warm-up", server.label));
        }
        std::thread::sleep(crate::servers::POLL_INTERVAL);
    }
    Ok(())
}

impl Row {
    fn median(&self, figure: impl Fn(&Readings) -> f64) -> f64 {
        Spread::of(self.rounds.iter().map(figure)).median
    }
}

fn markdown(options: &Options, rows: &[Row], bare: Spread) -> String {
    let kib = |row: &Row, figure: fn(&Readings) -> f64| format!("{:.2}", row.median(figure));
    let mib = |row: &Row, figure: fn(&Readings) -> u64| format!("{:.1}", row.median(|r| figure(r) as f64) / 1024.0);
    let table = report::table_of(
        rows,
        &[
            ("server", &|row: &Row| row.server.clone()),
            ("user", &|row| kib(row, |r| r.at_once.user_kib)),
            ("of it dirty", &|row| kib(row, |r| r.at_once.private_dirty_kib)),
            ("kernel", &|row| kib(row, |r| r.at_once.kernel_kib)),
            ("together", &|row| kib(row, |r| r.at_once.user_kib + r.at_once.kernel_kib)),
            ("user, later", &|row| kib(row, |r| r.later.user_kib)),
            ("kernel, later", &|row| kib(row, |r| r.later.kernel_kib)),
            ("together, later", &|row| kib(row, |r| r.later.user_kib + r.later.kernel_kib)),
            ("PSS before, MiB", &|row| mib(row, |r| r.before.pss_kib)),
            ("with them, MiB", &|row| mib(row, |r| r.at_once.memory.pss_kib)),
        ],
    );
    format!(
        "KiB per connection, medians of {} rounds; later: after {} idle seconds.\n\n{table}\nUser: growth of the PSS \
         of all processes. Kernel: growth of objects in slabs, stacks, page tables and per-core memory of the whole \
         machine, less {:.2} KiB for a connection that is not accepted yet (both sockets, the client's file). \"PSS \
         before\" includes the memory that a server reserves for connections at its start.\n",
        options.idle_rounds,
        options.idle_time.as_secs(),
        bare.median,
    )
}
