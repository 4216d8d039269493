//! wrk: its command line, and parsing of its output.

use super::{Figures, Run};

pub fn command(run: &Run, address: &str, connections: u32) -> Vec<String> {
    let seconds = run.run_time.as_secs();
    let mut words = ["wrk", "-t1", "--latency"].map(str::to_owned).to_vec();
    words.extend([format!("-c{connections}"), format!("-d{seconds}s")]);
    if run.is_short {
        words.extend(["-H", "Connection: close"].map(str::to_owned));
    }
    words.extend(run.headers.iter().flat_map(|line| ["-H", line]).map(str::to_owned));
    words.push(run.url(address));
    words
}

pub fn parse(text: &str) -> Option<Figures> {
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
        } else if let Some(columns) = line.strip_prefix("Latency  ") {
            // Average, standard deviation, maximum, share within one deviation.
            let mut columns = columns.split_whitespace();
            figures.latency_mean_us = microseconds(columns.next()?)?;
            figures.latency_deviation_us = microseconds(columns.next()?)?;
        }
    }
    (figures.requests > 0 && figures.requests_per_second > 0.0).then_some(figures)
}

/// Parses a time of wrk or h2load in `us`, `ms`, `s`, `m` or `h`.
pub(super) fn microseconds(text: &str) -> Option<f64> {
    const UNITS: [(&str, f64); 5] = [("us", 1.0), ("ms", 1e3), ("s", 1e6), ("m", 60e6), ("h", 3600e6)];
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = UNITS.iter().find(|(name, _)| *name == &text[digits.len()..])?;
    Some(digits.parse::<f64>().ok()? * unit.1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_figures_are_read() {
        let text = "Running 4s test @ http://127.0.0.1:1/\n  1 threads and 128 connections\n  \
            Thread Stats   Avg      Stdev     Max   +/- Stdev\n    Latency   651.20us    1.50ms  18.08ms   95.40%\n    \
            Req/Sec   190.44k     9.52k  200.00k    75.00%\n  \
            Latency Distribution\n     50%  640.00us\n     75%  700.00us\n     90%    1.00ms\n     99%    1.50ms\n  \
            800000 requests in 4.00s, 120.00MB read\n  Socket errors: connect 0, read 3, write 0, timeout 1\n  \
            Non-2xx or 3xx responses: 2\nRequests/sec: 200000.00\nTransfer/sec:     30.00MB\n";
        let figures = parse(text).unwrap();
        assert_eq!((figures.requests, figures.errors), (800_000, 6));
        assert_eq!((figures.latency_p50_us, figures.latency_p99_us), (640.0, 1500.0));
        assert_eq!((figures.latency_mean_us, figures.latency_deviation_us), (651.2, 1500.0));
        assert_eq!(figures.duration(), Duration::from_secs(4));
    }

    #[test]
    fn a_run_without_requests_is_no_run() {
        assert_eq!(parse("unable to connect to 127.0.0.1:1 Connection refused\n"), None);
        assert_eq!(parse("  0 requests in 4.00s, 0.00B read\nRequests/sec:      0.00\n"), None);
    }
}
