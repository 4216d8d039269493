//! instructions: user-space instructions per request, counted exactly by callgrind.
//!
//! A server runs as one process under valgrind and is asked twice, for few and for many requests; the difference is free
//! of what starting and stopping cost. It is stopped while requests are put before it, so that it always finds as many
//! at once, as a saturated worker does, and never fewer by chance. Every answer is checked. Kernel work is not counted.
//!
//! valgrind must see all system calls, so Gale is built anew for it, with the C library's. Versions of valgrind that do
//! not know `openat2` have Gale open files in a pool; with io_uring its threads then never run, and there is no figure.

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;
use serde::Serialize;

use crate::Measured;
use crate::client::load::{self, Connection};
use crate::options::Options;
use crate::report::{self, Document};
use crate::servers::{Kind, Program, Running, SMALL_BODY, Setting, file_body, send_signal};

/// Requests of the first run; those of the second come on top.
const REQUESTS_FEW: u32 = 640;
/// Requests that a server finds at once.
const BATCH: u32 = 64;

#[derive(Debug, Clone, Copy)]
struct Case {
    name: &'static str,
    path: &'static str,
    is_short: bool,
}

const CASES: [Case; 3] = [
    Case { name: "return", path: "/return", is_short: false },
    Case { name: "file", path: "/file", is_short: false },
    Case { name: "short", path: "/return", is_short: true },
];

#[derive(Debug, Serialize)]
struct Row {
    server: String,
    /// Per request, by case; None where it could not be counted.
    per_request: Vec<(&'static str, Option<f64>)>,
}

/// What a server is asked, and what its configuration has for that.
pub struct Load<'l> {
    /// More for the http block and for the server's block.
    pub http: String,
    pub server: String,
    /// The target of the request of this number.
    pub path: &'l dyn Fn(u32) -> String,
    pub body: Vec<u8>,
    pub is_short: bool,
}

/// The chosen servers, ready for valgrind; those of `default` when none is chosen.
pub fn programs(options: &Options, default: &[&str]) -> Result<Vec<Program>, String> {
    let mut programs = options.servers(Some(default))?;
    for program in &mut programs {
        match program.kind {
            Kind::Gale => program.binary = gale_for_valgrind(options)?,
            Kind::Nginx => {}
            _ => return Err(format!("{} cannot be told to be one process", program.label)),
        }
    }
    Ok(programs)
}

/// Counts for every chosen server; nginx and Gale when none is chosen.
pub fn measure(options: &Options) -> Measured {
    let programs = programs(options, &["nginx", "gale"])?;
    let is_chosen = |case: &Case| options.cases.as_ref().is_none_or(|names| names.iter().any(|name| name == case.name));
    let cases: Vec<Case> = CASES.into_iter().filter(is_chosen).collect();
    let mut rows = Vec::new();
    for program in &programs {
        let mut per_request = Vec::new();
        for &case in &cases {
            let body = if case.path == "/file" { file_body() } else { SMALL_BODY.to_vec() };
            let (http, server) = Default::default();
            let load = Load { http, server, path: &|_| case.path.to_owned(), body, is_short: case.is_short };
            let counted = count_per_request(options, program, &load);
            match &counted {
                Ok(count) => eprintln!("{}, {}: {count:.0}", program.label, case.name),
                Err(error) => eprintln!("note: {}, {}: {error}", program.label, case.name),
            }
            per_request.push((case.name, counted.ok()));
        }
        rows.push(Row { server: program.label.clone(), per_request });
    }
    let cell = |row: &Row, name: &str| {
        let found = row.per_request.iter().find(|(case, _)| *case == name).and_then(|(_, count)| *count);
        found.map_or("–".to_owned(), |count| format!("{count:.0}"))
    };
    let table = report::table_of(
        &rows,
        &[
            ("server", &|row: &Row| row.server.clone()),
            ("2-byte answer", &|row| cell(row, "return")),
            ("1 KiB file", &|row| cell(row, "file")),
            ("short connection", &|row| cell(row, "short")),
        ],
    );
    let body = format!(
        "Instructions in user space per request: the difference of {REQUESTS_FEW} and {} requests, {BATCH} at a time, each \
         on a connection of its own.\n\n{table}",
        REQUESTS_FEW + whole_batches(options.requests)
    );
    Ok((Document::new("instructions", "Instructions per request", &programs, &body, &rows)?, true))
}

fn whole_batches(requests: u32) -> u32 {
    requests.next_multiple_of(BATCH)
}

/// Instructions of one request.
pub fn count_per_request(options: &Options, program: &Program, load: &Load<'_>) -> Result<f64, String> {
    let more = whole_batches(options.requests);
    let few = count(options, program, load, REQUESTS_FEW)?;
    let many = count(options, program, load, REQUESTS_FEW + more)?;
    Ok(many.saturating_sub(few) as f64 / f64::from(more))
}

/// Instructions of a whole life with that many requests.
fn count(options: &Options, program: &Program, load: &Load<'_>, requests: u32) -> Result<u64, String> {
    let totals = std::env::temp_dir().join(format!("gale-bench-{}.callgrind", std::process::id()));
    let out_file = format!("--callgrind-out-file={}", totals.display());
    let words = ["valgrind", "--quiet", "--tool=callgrind", &out_file].map(str::to_owned).to_vec();
    let (http, server) = (load.http.clone(), load.server.clone());
    let cores = Some(vec![options.server_core]);
    let setting = Setting { alone_under: Some(words), cores, http, server, ..Setting::default() };
    let server = program.start(setting)?;
    ask(&server, load, requests / BATCH).map_err(|error| format!("{error}\n{}", server.error_log_end()))?;
    // Gracefully, so that valgrind writes its file.
    server.end(Signal::TERM)?;
    let text = std::fs::read_to_string(&totals).map_err(|error| format!("valgrind wrote nothing: {error}"))?;
    let _ = std::fs::remove_file(&totals);
    parse(&text).ok_or_else(|| "valgrind wrote no totals".to_owned())
}

fn ask(server: &Running, load: &Load<'_>, batches: u32) -> Result<(), String> {
    let failed = |failure: load::Failure| format!("{failure:?}");
    let mut connections: Vec<Connection> = Vec::new();
    for batch in 0..batches {
        server.pause()?;
        if load.is_short {
            connections.clear();
        }
        while connections.len() < BATCH as usize {
            connections.push(Connection::open(&server.address).map_err(failed)?);
        }
        for (number, connection) in (batch * BATCH..).zip(&mut connections) {
            connection.send(&(load.path)(number), load.is_short).map_err(failed)?;
        }
        send_signal(server.root, Signal::CONT)?;
        for connection in &mut connections {
            let answer = connection.receive().map_err(failed)?;
            if answer.status != 200 || answer.body != load.body {
                return Err(format!("wrong answer: {answer:?}"));
            }
        }
    }
    Ok(())
}

/// The line `totals: N` or, of older versions, `summary: N`; one number, since one kind of event is counted.
fn parse(text: &str) -> Option<u64> {
    let of = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    of("totals:").or_else(|| of("summary:"))
}

/// The one given, or one that is built: system calls made without the C library hide from valgrind.
fn gale_for_valgrind(options: &Options) -> Result<PathBuf, String> {
    if let Some(path) = &options.callgrind_gale {
        return std::fs::canonicalize(path).map_err(|error| format!("{}: {error}", path.display()));
    }
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let target = workspace.join("target/callgrind");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--release", "--package", "gale", "--target-dir"]).arg(&target);
    command.env("RUSTFLAGS", "--cfg=rustix_use_libc").current_dir(&workspace);
    eprintln!("building Gale for valgrind");
    match command.status() {
        Ok(status) if status.success() => Ok(target.join("release/gale")),
        Ok(status) => Err(format!("cargo build: {status}")),
        Err(error) => Err(format!("cargo build: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_totals_are_read() {
        assert_eq!(parse("events: Ir\nsummary: 12\n\nfn=main\n1 12\n\ntotals: 1234\n"), Some(1234));
        assert_eq!(parse("events: Ir\nsummary: 12\n"), Some(12));
        assert_eq!(parse("events: Ir\n"), None);
    }
}
