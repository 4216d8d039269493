//! wrk: one run of wrk, pinned to a core, and the figures that it prints.
//!
//! It measures the client's CPU time too, because a server can only be compared where the client is not the limit.

use std::process::{Command, Stdio};
use std::time::Duration;

use serde::Serialize;

use crate::process;

/// What is asked of the server.
#[derive(Debug, Clone)]
pub struct Run<'a> {
    pub url: &'a str,
    pub connections: u32,
    /// One request per connection.
    pub is_short: bool,
    pub run_time: Duration,
    pub core: usize,
}

#[derive(Debug, Clone, Copy, Default, Serialize, PartialEq)]
pub struct Figures {
    pub requests: u64,
    pub requests_per_second: f64,
    /// Connect, read, write errors, time-outs and answers other than 2xx or 3xx.
    pub errors: u64,
    pub latency_p50_us: f64,
    pub latency_p99_us: f64,
}

impl Figures {
    /// How long the run lasted, as wrk itself counts it.
    pub fn duration(&self) -> Duration {
        Duration::from_secs_f64(self.requests as f64 / self.requests_per_second.max(f64::MIN_POSITIVE))
    }
}

/// Runs wrk with one thread and gives its figures and its CPU time.
pub fn run(run: &Run) -> Result<(Figures, Duration), String> {
    run_with(Command::new("wrk"), run)
}

/// The same with a command that ends in wrk: `perf stat … wrk`. The CPU time is then that of both.
pub fn run_with(mut command: Command, run: &Run) -> Result<(Figures, Duration), String> {
    command.args(["-t1", "--latency"]);
    command.arg(format!("-c{}", run.connections)).arg(format!("-d{}s", run.run_time.as_secs()));
    if run.is_short {
        command.args(["-H", "Connection: close"]);
    }
    command.arg(run.url).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let before = process::ended_children_cpu_time();
    let child = process::spawn_pinned(&mut command, run.core)?;
    let output = child.wait_with_output().map_err(|error| format!("wrk: {error}"))?;
    let cpu_time = process::ended_children_cpu_time() - before;
    let text = String::from_utf8_lossy(&output.stdout);
    match parse(&text) {
        Some(figures) if output.status.success() => Ok((figures, cpu_time)),
        _ => Err(format!("wrk {}: {text}{}", run.url, String::from_utf8_lossy(&output.stderr))),
    }
}

fn parse(text: &str) -> Option<Figures> {
    let mut figures = Figures::default();
    for line in text.lines().map(str::trim) {
        if let Some((requests, _)) = line.split_once(" requests in ") {
            figures.requests = requests.parse().ok()?;
        } else if let Some(rate) = line.strip_prefix("Requests/sec:") {
            figures.requests_per_second = rate.trim().parse().ok()?;
        } else if let Some(errors) = line.strip_prefix("Socket errors:") {
            let counts = errors.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse::<u64>().ok());
            figures.errors += counts.sum::<u64>();
        } else if let Some(count) = line.strip_prefix("Non-2xx or 3xx responses:") {
            figures.errors += count.trim().parse::<u64>().ok()?;
        } else if let Some(latency) = line.strip_prefix("50%") {
            figures.latency_p50_us = microseconds(latency.trim())?;
        } else if let Some(latency) = line.strip_prefix("99%") {
            figures.latency_p99_us = microseconds(latency.trim())?;
        }
    }
    (figures.requests > 0 && figures.requests_per_second > 0.0).then_some(figures)
}

/// wrk prints `us`, `ms`, `s`, `m` or `h`.
fn microseconds(text: &str) -> Option<f64> {
    const UNITS: [(&str, f64); 5] = [("us", 1.0), ("ms", 1e3), ("s", 1e6), ("m", 60e6), ("h", 3600e6)];
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = UNITS.iter().find(|(name, _)| *name == &text[digits.len()..])?;
    Some(digits.parse::<f64>().ok()? * unit.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_are_read() {
        let text = "Running 4s test @ http://127.0.0.1:1/\n  1 threads and 128 connections\n  Thread Stats   Avg\n  \
            Latency Distribution\n     50%  640.00us\n     75%  700.00us\n     90%    1.00ms\n     99%    1.50ms\n  \
            800000 requests in 4.00s, 120.00MB read\n  Socket errors: connect 0, read 3, write 0, timeout 1\n  \
            Non-2xx or 3xx responses: 2\nRequests/sec: 200000.00\nTransfer/sec:     30.00MB\n";
        let figures = parse(text).unwrap();
        assert_eq!((figures.requests, figures.errors), (800_000, 6));
        assert_eq!((figures.latency_p50_us, figures.latency_p99_us), (640.0, 1500.0));
        assert_eq!(figures.duration(), Duration::from_secs(4));
    }

    #[test]
    fn a_run_without_requests_is_no_run() {
        assert_eq!(parse("unable to connect to 127.0.0.1:1 Connection refused\n"), None);
        assert_eq!(parse("  0 requests in 4.00s, 0.00B read\nRequests/sec:      0.00\n"), None);
    }
}
