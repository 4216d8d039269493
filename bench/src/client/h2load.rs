//! h2load: its command line, and parsing of its output.

use super::{Figures, Run};

pub fn command(run: &Run, address: &str, connections: u32, streams: u32) -> Vec<String> {
    let seconds = run.run_time.as_secs();
    let mut words = ["h2load", "-t1"].map(str::to_owned).to_vec();
    words.extend([format!("-c{connections}"), format!("-m{streams}"), format!("-D{seconds}")]);
    words.extend(run.headers.iter().flat_map(|line| ["-H", line]).map(str::to_owned));
    words.extend(run.body.map(|path| format!("-d{}", path.display())));
    words.push(run.url(address));
    words
}

pub fn parse(text: &str) -> Option<Figures> {
    let mut figures = Figures::default();
    for line in text.lines().map(str::trim) {
        if let Some(rest) = line.strip_prefix("finished in ") {
            figures.requests_per_second =
                rest.split(", ").find_map(|part| part.strip_suffix(" req/s"))?.parse().ok()?;
        } else if let Some(counts) = line.strip_prefix("requests: ") {
            let count = |what: &str| counts.split(", ").find_map(|part| part.strip_suffix(what)?.trim().parse().ok());
            figures.requests = count("succeeded")?;
            figures.errors = [count("failed")?, count("errored")?, count("timeout")?].iter().sum();
        } else if let Some(times) = line.strip_prefix("time for request:") {
            // Minimum, maximum, mean, standard deviation, share within one deviation.
            let mut times = times.split_whitespace().skip(2);
            figures.latency_mean_us = super::wrk::microseconds(times.next()?)?;
            figures.latency_deviation_us = super::wrk::microseconds(times.next()?)?;
        }
    }
    (figures.requests > 0 && figures.requests_per_second > 0.0).then_some(figures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_are_read() {
        let text = "finished in 2.00s, 3327.06 req/s, 208.22MB/s\n\
            requests: 2000 total, 2000 started, 2000 done, 1998 succeeded, 2 failed, 0 errored, 1 timeout\n\
            time for request:      124us     12.34ms      5.60ms      1.20ms    70.00%\n";
        let figures = parse(text).unwrap();
        assert_eq!((figures.requests, figures.errors), (1998, 3));
        assert_eq!((figures.requests_per_second, figures.latency_mean_us), (3327.06, 5600.0));
        assert_eq!(
            parse("finished in 1.0s, 0.00 req/s\nrequests: 0 total, 0 succeeded, 0 failed, 0 errored, 0 timeout"),
            None
        );
    }
}
