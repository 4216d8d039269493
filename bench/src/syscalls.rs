//! syscalls: system calls per request, counted over a bounded run.
//!
//! Twice: their number with `perf stat`, which does not slow the server down, so that it batches as it does under
//! full load; and by name with `strace -c -f`, which does. Where perf is missing or forbidden the first is left out.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;
use serde::Serialize;

use crate::Measured;
use crate::cpu::{self, Case};
use crate::options::Options;
use crate::process::Process;
use crate::report::{self, Document};
use crate::servers::{Program, Running, send_signal};
use crate::wrk;

#[derive(Debug, Serialize)]
struct Row {
    server: String,
    /// With perf; None where it could not be used.
    per_request: Option<f64>,
    per_request_traced: f64,
    requests: u64,
    requests_traced: u64,
    /// Calls per request by name, under strace.
    by_name: BTreeMap<String, f64>,
}

#[derive(Debug, Serialize)]
struct Table {
    case: &'static str,
    title: String,
    rows: Vec<Row>,
}

/// Counts for every case and server.
pub fn measure(options: &Options) -> Measured {
    let programs = options.servers(None)?;
    let mut tables = Vec::new();
    for case in cpu::cases(options)? {
        eprintln!("{}:", case.title);
        let mut rows = Vec::new();
        for program in case.programs(&programs) {
            rows.push(measure_one(options, &case, &program)?);
        }
        tables.push(Table { case: case.name, title: case.title, rows });
    }
    let body: String = tables.iter().map(Table::markdown).collect();
    Ok((Document::new("syscalls", "System calls per request", &programs, &body, &tables)?, true))
}

fn measure_one(options: &Options, case: &Case, program: &Program) -> Result<Row, String> {
    let server = program.start(case.setting(options))?;
    let url = server.url(case.path);
    let run = case.run(&url, options.run_time, options);
    wrk::run(&wrk::Run { run_time: std::time::Duration::from_secs(1), ..run.clone() })?;
    let counted = count_with_perf(&server, &run);
    if let Err(error) = &counted {
        eprintln!("note: {}: without perf: {error}", server.label);
    }
    let (calls, traced) = trace(&server, &run)?;
    let per_traced = |count: u64| count as f64 / traced.requests as f64;
    let row = Row {
        server: server.label.clone(),
        per_request: counted.as_ref().ok().map(|(count, figures)| *count as f64 / figures.requests as f64),
        per_request_traced: per_traced(calls.values().sum()),
        requests: counted.as_ref().map_or(0, |(_, figures)| figures.requests),
        requests_traced: traced.requests,
        by_name: calls.into_iter().map(|(name, count)| (name, per_traced(count))).collect(),
    };
    eprintln!("  {}: {:?} with perf, {:.2} with strace", row.server, row.per_request, row.per_request_traced);
    Ok(row)
}

/// All system calls of the server during one run of wrk: perf counts those of the server's processes as long as the
/// command that it starts, wrk, lasts.
fn count_with_perf(server: &Running, run: &wrk::Run) -> Result<(u64, wrk::Figures), String> {
    let counts = std::env::temp_dir().join(format!("gale-bench-{}.perf", std::process::id()));
    let mut command = Command::new("perf");
    command.args(["stat", "-x,", "-e", "raw_syscalls:sys_enter", "-o"]).arg(&counts);
    command.args(["-p", &ids_of(&server.root.tree()).join(","), "wrk"]);
    let figures = wrk::run_with(command, run);
    let text = fs::read_to_string(&counts).unwrap_or_default();
    let _ = fs::remove_file(&counts);
    let line = text.lines().find(|line| line.contains("sys_enter"));
    let count = line.and_then(|line| line.split(',').next()?.trim().parse().ok());
    Ok((count.ok_or_else(|| format!("perf: {text}"))?, figures?.0))
}

/// Calls by name during one run of wrk.
fn trace(server: &Running, run: &wrk::Run) -> Result<(BTreeMap<String, u64>, wrk::Figures), String> {
    let summary = std::env::temp_dir().join(format!("gale-bench-{}.strace", std::process::id()));
    let ids = ids_of(&server.root.tree());
    let mut command = Command::new("strace");
    command.args(["-c", "-f", "-o"]).arg(&summary);
    for id in &ids {
        command.args(["-p", id]);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut strace = command.spawn().map_err(|error| format!("strace: {error}"))?;
    let mut messages = BufReader::new(strace.stderr.take().ok_or("strace: no messages")?);
    // One line per process once all of its threads are traced.
    for _ in &ids {
        let mut line = String::new();
        messages.read_line(&mut line).map_err(|error| format!("strace: {error}"))?;
        if !line.contains("attached") {
            let _ = strace.wait();
            return Err(line);
        }
    }
    let figures = wrk::run(run);
    interrupt(&strace)?;
    // It detaches and says so; nobody else holds the pipe.
    std::io::copy(&mut messages, &mut std::io::sink()).map_err(|error| format!("strace: {error}"))?;
    strace.wait().map_err(|error| format!("strace: {error}"))?;
    let text = fs::read_to_string(&summary).map_err(|error| format!("strace: {error}"))?;
    let _ = fs::remove_file(&summary);
    Ok((parse_summary(&text), figures?.0))
}

/// The table of `strace -c`: share, seconds, µs per call, calls, perhaps errors, name.
fn parse_summary(text: &str) -> BTreeMap<String, u64> {
    let rows = text.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let name = *fields.last()?;
        let calls = fields.get(3)?.parse().ok()?;
        (fields.len() >= 5 && name != "total").then(|| (name.to_owned(), calls))
    });
    rows.collect()
}

fn ids_of(processes: &[Process]) -> Vec<String> {
    processes.iter().map(|process| process.id.to_string()).collect()
}

fn interrupt(child: &Child) -> Result<(), String> {
    let process = Process::find(child.id()).ok_or("the counter has ended")?;
    send_signal(process, Signal::INT)
}

impl Table {
    fn markdown(&self) -> String {
        let rows: Vec<Vec<String>> = self
            .rows
            .iter()
            .map(|row| {
                let mut names: Vec<(&String, &f64)> = row.by_name.iter().collect();
                names.sort_by(|a, b| b.1.total_cmp(a.1));
                let names = names.iter().filter(|(_, calls)| **calls >= 0.005);
                let names: Vec<String> = names.map(|(name, calls)| format!("{name} {calls:.2}")).collect();
                let counted = row.per_request.map_or("–".to_owned(), |calls| format!("{calls:.2}"));
                vec![row.server.clone(), counted, format!("{:.2}", row.per_request_traced), names.join(", ")]
            })
            .collect();
        let header = ["server", "per request (perf)", "per request (strace)", "by name (strace)"];
        format!("## {}\n\n{}\n", self.title, report::table(&header, &rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_is_read_with_and_without_errors() {
        let text = "% time     seconds  usecs/call     calls    errors syscall\n\
            ------ ----------- ----------- --------- --------- ----------------\n\
            \x2060.00    0.600000           6    100000           writev\n\
            \x2040.00    0.400000           3    120000     20000 recvfrom\n\
            ------ ----------- ----------- --------- --------- ----------------\n\
            100.00    1.000000           4    220000     20000 total\n";
        let calls = parse_summary(text);
        assert_eq!(calls, BTreeMap::from([("recvfrom".to_owned(), 120_000), ("writev".to_owned(), 100_000)]));
    }
}
