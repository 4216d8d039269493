//! syscalls: system calls per request by name, with the server's core saturated.
//!
//! `perf stat` counts them at their entry, which hardly slows the server, so it batches as under full load. It counts
//! all calls together, and by name those that servers are known to make; the rest is "other". If perf is missing or
//! forbidden, `strace -c -f` counts. That slows the server so much that it batches less, which the report mentions.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;
use serde::Serialize;

use crate::Measured;
use crate::case::{Case, Sample, WARM_UP_TIME, in_turn, measure_once};
use crate::client::ClientKind;
use crate::options::Options;
use crate::process::{self, Process};
use crate::report::{self, Document, Spread, percent};
use crate::servers::{Program, Running, send_signal};

/// System calls that are counted by name. Setup of counters for all 360 calls takes the kernel half a minute.
const NAMES: &[&str] = &[
    "accept4",
    "close",
    "connect",
    "epoll_ctl",
    "epoll_pwait",
    "epoll_wait",
    "fcntl",
    "futex",
    "getsockname",
    "io_uring_enter",
    "madvise",
    "mmap",
    "munmap",
    "newfstat",
    "newfstatat",
    "openat",
    "openat2",
    "pread64",
    "preadv2",
    "read",
    "readv",
    "recvfrom",
    "recvmsg",
    "sendfile64",
    "sendmsg",
    "sendto",
    "setsockopt",
    "shutdown",
    "statx",
    "write",
    "writev",
];

/// System calls by name during one run.
type Calls = BTreeMap<String, u64>;

#[derive(Debug, Serialize)]
struct Row {
    server: String,
    rounds: Vec<Round>,
}

#[derive(Debug, Serialize)]
struct Round {
    per_request: f64,
    by_name: BTreeMap<String, f64>,
    counted_by: &'static str,
    sample: Sample,
}

#[derive(Debug, Serialize)]
struct Table {
    case: &'static str,
    title: String,
    rows: Vec<Row>,
}

pub fn measure(options: &Options) -> Measured {
    let programs = options.servers(None)?;
    let client = options.client.unwrap_or(ClientKind::Lean);
    let connections = *options.connections.last().expect("at least one");
    let mut cases = vec![
        Case::keepalive(options, client, connections),
        Case::file(options, client, connections),
        Case::short(options),
    ];
    cases.extend(Case::passed_on_if_chosen(options, client, connections)?);
    let mut tables = Vec::new();
    for case in options.chosen_cases(cases)? {
        eprintln!("{}:", case.title);
        let programs = case.programs(&programs);
        let rounds = in_turn(options.rounds, &programs, |program, round| {
            let counted = measure_one(options, &case, program)?;
            eprintln!("  round {round}, {}: {:.3} with {}", program.label, counted.per_request, counted.counted_by);
            Ok(counted)
        })?;
        let rows = programs.iter().zip(rounds).map(|(program, rounds)| Row { server: program.label.clone(), rounds });
        tables.push(Table { case: case.name, title: case.title.clone(), rows: rows.collect() });
    }
    let body: String = tables.iter().map(|table| table.markdown(options)).collect();
    Ok((Document::new("syscalls", "System calls per request", &programs, &(body + NOTES), &tables)?, true))
}

const NOTES: &str = "\
Per request: median (least – greatest) of the rounds; by name: of the first round. Opening and closing of the \
connections is counted, too. Server, client: share of a core that each used; a client below 95 % was not the limit. \
Calls counted by strace are those of a server that is slowed down, and is seldom saturated.\n";

fn measure_one(options: &Options, case: &Case, program: &Program) -> Result<Round, String> {
    let server = program.start(case.setting())?;
    measure_once(case, &server, WARM_UP_TIME, None)?;
    let (calls, sample, counted_by) = match count_with_perf(case, &server, NAMES, Whose::Server, options) {
        Ok((calls, sample)) => (calls, sample, "perf"),
        Err(error) => {
            eprintln!("note: {}: without perf: {error}", server.label);
            let (calls, sample) = trace(case, &server, options)?;
            (calls, sample, "strace")
        }
    };
    let per_request = |count: u64| count as f64 / sample.figures.requests as f64;
    Ok(Round {
        per_request: per_request(calls.values().sum()),
        by_name: calls.into_iter().map(|(name, count)| (name, per_request(count))).collect(),
        counted_by,
        sample,
    })
}

#[derive(Debug, Clone, Copy)]
pub enum Whose {
    /// All threads of the server.
    Server,
    /// All except the watchdog, which waits for timers and not for locks.
    AllButWatchdog,
}

impl Whose {
    /// Returns the arguments for perf.
    fn arguments(self, server: &Running) -> [String; 2] {
        let processes = server.root.tree();
        match self {
            Whose::Server => ["-p".to_owned(), ids_of(&processes).join(",")],
            Whose::AllButWatchdog => {
                let threads = process::threads(&processes).into_keys();
                let is_wanted = |id: &u32| process::thread_name(*id).is_some_and(|name| name != WATCHDOG);
                ["-t".to_owned(), threads.filter(is_wanted).map(|id| id.to_string()).collect::<Vec<_>>().join(",")]
            }
        }
    }
}

/// Name of Gale's thread that monitors the loops.
const WATCHDOG: &str = "watchdog";

/// Counts calls of these names and "other" during one run. perf counts for the lifetime of the command that it starts,
/// the client.
pub fn count_with_perf(
    case: &Case,
    server: &Running,
    names: &[&str],
    whose: Whose,
    options: &Options,
) -> Result<(Calls, Sample), String> {
    let counts = scratch_file("perf");
    let mut events = vec![EVENT_ALL.to_owned()];
    events.extend(names.iter().filter(|name| is_known(name)).map(|name| format!("{EVENT_ONE}{name}")));
    let mut command = Command::new("perf");
    command.args(["stat", "-x,", "-e", &events.join(","), "-o"]).arg(&counts);
    command.args(whose.arguments(server));
    let sample = measure_once(case, server, options.run_time, Some(command));
    let text = fs::read_to_string(&counts).unwrap_or_default();
    let _ = fs::remove_file(&counts);
    match parse_counts(&text) {
        Some(calls) => Ok((calls, sample?)),
        None => Err(format!("perf: {text}{}", sample.err().unwrap_or_default())),
    }
}

const EVENT_ALL: &str = "raw_syscalls:sys_enter";
const EVENT_ONE: &str = "syscalls:sys_enter_";

/// Returns true if the kernel can count calls of this name. With one unknown name perf refuses all of them.
fn is_known(name: &str) -> bool {
    let folders = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
    folders.iter().any(|folder| Path::new(folder).join("events/syscalls").join(format!("sys_enter_{name}")).exists())
}

/// Parses the lines of `perf stat -x,`: count, unit, event and more. Returns `None` if the number of all calls is
/// missing.
fn parse_counts(text: &str) -> Option<Calls> {
    let lines = text.lines().filter_map(|line| {
        let mut fields = line.split(',');
        let count: u64 = fields.next()?.parse().ok()?;
        Some((fields.nth(1)?, count))
    });
    let counts: BTreeMap<&str, u64> = lines.collect();
    let all = *counts.get(EVENT_ALL)?;
    let named = counts.iter().filter_map(|(event, count)| Some((event.strip_prefix(EVENT_ONE)?.to_owned(), *count)));
    let mut calls: Calls = named.collect();
    let other = all.saturating_sub(calls.values().sum());
    calls.insert("other".to_owned(), other);
    Some(calls)
}

fn trace(case: &Case, server: &Running, options: &Options) -> Result<(Calls, Sample), String> {
    let summary = scratch_file("strace");
    let ids = ids_of(&server.root.tree());
    let mut command = Command::new("strace");
    command.args(["-c", "-f", "-o"]).arg(&summary);
    for id in &ids {
        command.args(["-p", id]);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut strace = command.spawn().map_err(|error| format!("strace: {error}"))?;
    let mut messages = BufReader::new(strace.stderr.take().ok_or("strace: no messages")?);
    // strace prints a line for each process when all of its threads are traced.
    for _ in &ids {
        let mut line = String::new();
        messages.read_line(&mut line).map_err(|error| format!("strace: {error}"))?;
        if !line.contains("attached") {
            let _ = strace.wait();
            return Err(line);
        }
    }
    let sample = measure_once(case, server, options.run_time, None);
    interrupt(&strace)?;
    // strace detaches and prints messages. The pipe ends then, because it has no other writers.
    std::io::copy(&mut messages, &mut std::io::sink()).map_err(|error| format!("strace: {error}"))?;
    strace.wait().map_err(|error| format!("strace: {error}"))?;
    let text = fs::read_to_string(&summary).map_err(|error| format!("strace: {error}"))?;
    let _ = fs::remove_file(&summary);
    Ok((parse_summary(&text), sample?))
}

/// Parses the table of `strace -c`: share, seconds, µs per call, calls, possibly errors, name.
fn parse_summary(text: &str) -> Calls {
    let rows = text.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let name = *fields.last()?;
        let calls = fields.get(3)?.parse().ok()?;
        (fields.len() >= 5 && name != "total").then(|| (name.to_owned(), calls))
    });
    rows.collect()
}

pub fn ids_of(processes: &[Process]) -> Vec<String> {
    processes.iter().map(|process| process.id.to_string()).collect()
}

fn scratch_file(kind: &str) -> PathBuf {
    std::env::temp_dir().join(format!("gale-bench-{}.{kind}", std::process::id()))
}

fn interrupt(child: &Child) -> Result<(), String> {
    let process = Process::find(child.id()).ok_or("the counter has ended")?;
    send_signal(process, Signal::INT)
}

impl Row {
    fn spread(&self, figure: impl Fn(&Round) -> f64) -> Spread {
        Spread::of(self.rounds.iter().map(figure))
    }

    /// Returns `recvfrom 1.00, …`, most frequent first.
    fn names(&self) -> String {
        let mut names: Vec<(&String, &f64)> = self.rounds[0].by_name.iter().collect();
        names.sort_by(|a, b| b.1.total_cmp(a.1));
        let names = names.iter().filter(|(_, calls)| **calls >= 0.001);
        names.map(|(name, calls)| format!("{name} {calls:.3}")).collect::<Vec<String>>().join(", ")
    }
}

impl Table {
    fn markdown(&self, options: &Options) -> String {
        let table = report::table_of(
            &self.rows,
            &[
                ("server", &|row: &Row| row.server.clone()),
                ("per request", &|row| {
                    let Spread { median, least, greatest } = row.spread(|round| round.per_request);
                    format!("{median:.3} ({least:.3} – {greatest:.3})")
                }),
                ("by name", &Row::names),
                ("server", &|row| percent(row.spread(|round| round.sample.server_utilisation).median)),
                ("client", &|row| percent(row.spread(|round| round.sample.client_utilisation).median)),
                ("requests/s", &|row| {
                    format!("{:.0}", row.spread(|round| round.sample.figures.requests_per_second).median)
                }),
                ("counted by", &|row| row.rounds[0].counted_by.to_owned()),
            ],
        );
        let seconds = options.run_time.as_secs();
        format!("## {}\n\n{} rounds of {seconds} s\n\n{table}\n", self.title, options.rounds)
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

    #[test]
    fn the_counts_of_perf_are_read() {
        let text = "# started on Thu Jan  1\n\n2100,,raw_syscalls:sys_enter,1000,100.00,,\n\
            2000,,syscalls:sys_enter_recvfrom,1000,100.00,,\n<not counted>,,syscalls:sys_enter_write,0,0.00,,\n";
        let expected = BTreeMap::from([("recvfrom".to_owned(), 2000), ("other".to_owned(), 100)]);
        assert_eq!(parse_counts(text), Some(expected));
        assert_eq!(parse_counts("2000,,syscalls:sys_enter_recvfrom,1000,100.00,,\n"), None);
    }
}
