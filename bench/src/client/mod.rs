//! client: clients for the measurements.
//!
//! `wrk` is widely used, but its HTTP parser makes it slower than the servers, so with one core each it is the limit.
//! `lean` is our own; it checks only the number of bytes, so the server's core is saturated. `h2load` speaks HTTP/2,
//! and so does `http2`, with a few frames of our own. `handshakes` opens a TLS connection for each request, with a key
//! exchange group that wrk and h2load lack. `load` checks every byte, and `idle` only holds connections. `swarm`
//! requests megabytes over many connections, `timetable` sends requests at times fixed in advance. Invariant: figures
//! come from a run with at least one request.

mod h2load;
pub mod handshakes;
pub mod http2;
pub mod idle;
pub mod idle_tls;
pub mod lean;
pub mod load;
pub mod swarm;
pub mod timetable;
mod tls;
mod wrk;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::process;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientKind {
    Wrk,
    /// Keep-alive connections only.
    Lean,
    /// HTTP/2 in the clear with prior knowledge, with this many concurrent streams on each connection.
    H2load(u32),
    /// A TLS connection for each request, with a hybrid key exchange (X25519MLKEM768).
    Handshakes,
}

/// Header lines of a request in addition to the default ones.
pub type Headers = &'static [&'static str];

#[derive(Debug, Clone)]
pub struct Run<'a> {
    pub kind: ClientKind,
    /// Addresses of the servers: the first clients, one on each core, use the first; the next ones the second, and so
    /// on.
    pub addresses: Vec<&'a str>,
    pub path: &'a str,
    pub headers: Headers,
    /// Body of each request, for h2load only.
    pub body: Option<&'a Path>,
    /// Number of all clients together.
    pub connections: u32,
    pub is_short: bool,
    /// Certificate of the server; `None` for no TLS.
    pub certificate: Option<&'a Path>,
    pub run_time: Duration,
    /// Number of client processes.
    pub clients: usize,
    /// Cores, assigned to the clients in turn.
    pub cores: &'a [usize],
}

impl Run<'_> {
    /// Returns the URL at one of the addresses.
    fn url(&self, address: &str) -> String {
        let scheme = if self.certificate.is_some() { "https" } else { "http" };
        format!("{scheme}://{address}{}", self.path)
    }
}

#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, PartialEq)]
pub struct Figures {
    pub requests: u64,
    pub requests_per_second: f64,
    /// Connect, read and write errors, time-outs, and responses other than 2xx or 3xx.
    pub errors: u64,
    pub latency_mean_us: f64,
    pub latency_deviation_us: f64,
    pub latency_p50_us: f64,
    pub latency_p99_us: f64,
}

impl Figures {
    /// Duration of the run as measured by the client.
    pub fn duration(&self) -> Duration {
        Duration::from_secs_f64(self.requests as f64 / self.requests_per_second.max(f64::MIN_POSITIVE))
    }

    /// Combines the results of two concurrent clients. Percentiles cannot be added, so the greater one is used.
    fn with(self, other: Figures) -> Figures {
        let requests = self.requests + other.requests;
        let shares = [self.requests, other.requests].map(|own| own as f64 / requests as f64);
        let mean = shares[0] * self.latency_mean_us + shares[1] * other.latency_mean_us;
        let square = |own: &Figures| own.latency_deviation_us.powi(2) + own.latency_mean_us.powi(2);
        let variance = shares[0] * square(&self) + shares[1] * square(&other) - mean.powi(2);
        Figures {
            requests,
            requests_per_second: self.requests_per_second + other.requests_per_second,
            errors: self.errors + other.errors,
            latency_mean_us: mean,
            latency_deviation_us: variance.max(0.0).sqrt(),
            latency_p50_us: self.latency_p50_us.max(other.latency_p50_us),
            latency_p99_us: self.latency_p99_us.max(other.latency_p99_us),
        }
    }
}

/// Runs the clients. Returns their figures and CPU time, which the kernel counts in ticks of 10 ms. `under` is a
/// command that starts the first client as its child (`perf stat … `); the CPU time then includes both.
pub fn run(run: &Run, under: Option<Command>) -> Result<(Figures, Duration), String> {
    let before = process::ended_children_cpu_time();
    let mut under = under;
    let children: Vec<Child> =
        (0..run.clients).map(|number| start(run, number, under.take())).collect::<Result<_, _>>()?;
    let mut all: Option<Figures> = None;
    // Waits for all of them, also after a failure, so that none is left running.
    let outputs: Vec<_> = children.into_iter().map(Child::wait_with_output).collect();
    for output in outputs {
        let output = output.map_err(|error| format!("client: {error}"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let figures = match run.kind {
            ClientKind::Wrk => wrk::parse(&text),
            ClientKind::Lean | ClientKind::Handshakes => lean::parse(&text),
            ClientKind::H2load(_) => h2load::parse(&text),
        };
        let figures = figures.filter(|_| output.status.success());
        let figures = figures.ok_or_else(|| {
            let (addresses, errors) = (run.addresses.join(", "), String::from_utf8_lossy(&output.stderr));
            format!("{:?} at {addresses}{}: {text}{errors}", run.kind, run.path)
        })?;
        all = Some(all.map_or(figures, |all| all.with(figures)));
    }
    let cpu_time = process::ended_children_cpu_time() - before;
    Ok((all.ok_or("no client was asked for")?, cpu_time))
}

fn start(run: &Run, number: usize, under: Option<Command>) -> Result<Child, String> {
    // The first clients take the remainder of the division.
    let clients = run.clients as u32;
    let connections = run.connections / clients + u32::from((number as u32) < run.connections % clients);
    let address = run.addresses[number / run.cores.len() % run.addresses.len()];
    let words = match run.kind {
        ClientKind::Wrk => wrk::command(run, address, connections),
        ClientKind::Lean => lean::command(run, address, connections)?,
        ClientKind::H2load(streams) => h2load::command(run, address, connections, streams),
        ClientKind::Handshakes => handshakes::command(run, address, connections)?,
    };
    let mut command = match under {
        Some(mut command) => {
            command.args(&words);
            command
        }
        None => {
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]);
            command
        }
    };
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    process::spawn_pinned(&mut command, &[run.cores[number % run.cores.len()]])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_clients_are_as_one() {
        let of = |requests: u64, mean, deviation| Figures {
            requests,
            requests_per_second: requests as f64,
            latency_mean_us: mean,
            latency_deviation_us: deviation,
            ..Figures::default()
        };
        // 10 ± 0 and 20 ± 0 in equal numbers give 15 ± 5.
        let both = of(100, 10.0, 0.0).with(of(100, 20.0, 0.0));
        assert_eq!((both.requests, both.latency_mean_us, both.latency_deviation_us), (200, 15.0, 5.0));
        assert_eq!(both.duration(), Duration::from_secs(1));
        // Combining equal results changes nothing.
        let same = of(50, 7.0, 3.0).with(of(50, 7.0, 3.0));
        assert!((same.latency_deviation_us - 3.0).abs() < 1e-9);
    }
}
