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
use crate::report::{self, Document, Spread};
use crate::servers::{FILES, Kind, Program, Running, SMALL_BODY, Setting, file_body, letters, send_signal};

/// Requests of the first run; those of the second come on top.
const REQUESTS_FEW: u32 = 640;
/// Requests that a server finds at once.
const BATCH: u32 = 64;

/// Files from this size on do not fit into the sockets at once, and how often a server finds them full is chance: their
/// requests come one by one, so many of them are enough, and what they cost is shown and not judged.
const LARGE_BYTES: usize = 1 << 20;
const LARGE_REQUESTS: u32 = 320;

/// How often what is compared is counted.
const TIMES_COMPARED: u32 = 3;

/// Most instructions that `aio auto` may need for one of `aio off` when everything is in memory.
const AUTO_MAX: f64 = 1.02;

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Case {
    name: &'static str,
    title: &'static str,
    path: &'static str,
    body_bytes: Option<usize>,
    is_short: bool,
    /// With each value of `aio`, where there is more than one.
    by_aio: bool,
}

fn all_cases() -> Vec<Case> {
    let answer = Case {
        name: "return",
        title: "2-byte answer",
        path: "/return",
        body_bytes: None,
        is_short: false,
        by_aio: false,
    };
    let mut cases = vec![
        answer,
        Case { name: "file", title: "1 KiB file", path: "/file", body_bytes: Some(file_body().len()), ..answer },
        Case { name: "short", title: "short connection", is_short: true, ..answer },
    ];
    cases.extend(FILES.map(|(name, path, bytes)| Case {
        name,
        title: name,
        path,
        body_bytes: Some(bytes),
        by_aio: true,
        ..answer
    }));
    cases
}

impl Case {
    fn batch(&self) -> u32 {
        if self.is_large() { 1 } else { BATCH }
    }

    fn is_large(&self) -> bool {
        self.body_bytes.is_some_and(|bytes| bytes >= LARGE_BYTES)
    }

    /// How many of the first run, and how many more of the second.
    fn requests(&self, options: &Options) -> (u32, u32) {
        match self.is_large() {
            true => (LARGE_REQUESTS, LARGE_REQUESTS.min(options.requests)),
            false => (REQUESTS_FEW, whole_batches(options.requests)),
        }
    }

    fn body(&self) -> Vec<u8> {
        self.body_bytes.map_or_else(|| SMALL_BODY.to_vec(), letters)
    }
}

/// A server with its way of reading files.
#[derive(Debug, Serialize)]
struct Row {
    server: String,
    /// The value of `aio`, where it was said.
    aio: Option<&'static str>,
    /// Per request, by case; None where it could not be counted.
    per_request: Vec<(&'static str, Option<f64>)>,
}

impl Row {
    fn label(&self) -> String {
        self.aio.map_or_else(|| self.server.clone(), |aio| format!("{}, aio {aio}", self.server))
    }

    fn count(&self, case: &str) -> Option<f64> {
        self.per_request.iter().find(|(name, _)| *name == case).and_then(|(_, count)| *count)
    }
}

/// Counts for every chosen server; nginx and Gale when none is chosen.
pub fn measure(options: &Options) -> Measured {
    let mut programs = options.servers(Some(&["nginx", "gale"]))?;
    for program in &mut programs {
        match program.kind {
            Kind::Gale => program.binary = gale_for_valgrind(options)?,
            Kind::Nginx => {}
            _ => return Err(format!("{} cannot be told to be one process", program.label)),
        }
    }
    let is_chosen = |case: &Case| options.cases.as_ref().is_none_or(|names| names.iter().any(|name| name == case.name));
    let cases: Vec<Case> = all_cases().into_iter().filter(is_chosen).collect();
    let rows: Vec<Row> = programs.iter().flat_map(|program| rows_of(options, program, &cases)).collect();
    let table = table(&cases, &rows);
    let comparisons = comparisons(&rows);
    let compared = match comparisons.is_empty() {
        true => String::new(),
        false => format!(
            "\nWith everything in memory, for one instruction with `aio off` (wanted: {AUTO_MAX} at most):\n\n{}",
            report::table_of(
                &comparisons,
                &[
                    ("server", &|compared: &Comparison| compared.server.clone()),
                    ("file", &|compared| compared.case.to_owned()),
                    ("`aio auto`", &|compared| format!("{:.3}", compared.ratio)),
                    ("judged", &|compared| if compared.is_judged { "yes" } else { "no" }.to_owned()),
                ]
            )
        ),
    };
    let body = format!(
        "Instructions in user space per request: the difference of {REQUESTS_FEW} and {} requests, {BATCH} at a time, each \
         on a connection of its own (files of {} MiB and more: of {} and {}, one at a time).\n\n{table}{compared}",
        REQUESTS_FEW + whole_batches(options.requests),
        LARGE_BYTES >> 20,
        LARGE_REQUESTS,
        LARGE_REQUESTS + LARGE_REQUESTS.min(options.requests),
    );
    let holds = comparisons.iter().all(|compared| !compared.is_judged || compared.ratio <= AUTO_MAX);
    Ok((Document::new("instructions", "Instructions per request", &programs, &body, &rows)?, holds))
}

/// One server, and once more with `aio off` where that makes a difference.
fn rows_of(options: &Options, program: &Program, cases: &[Case]) -> Vec<Row> {
    let has_files = cases.iter().any(|case| case.by_aio);
    let ways: &[Option<&'static str>] = match program.kind {
        Kind::Gale if has_files => &[Some("auto"), Some("off")],
        _ => &[None],
    };
    let row = |&aio: &Option<&'static str>| {
        let is_asked = |case: &&Case| case.by_aio || aio != Some("off");
        let per_request = cases.iter().filter(is_asked).map(|&case| {
            let counted = difference(options, program, case, aio);
            match &counted {
                Ok(count) => eprintln!("{}, {}, aio {}: {count:.0}", program.label, case.name, aio.unwrap_or("–")),
                Err(error) => eprintln!("note: {}, {}: {error}", program.label, case.name),
            }
            (case.name, counted.ok())
        });
        Row { server: program.label.clone(), aio, per_request: per_request.collect() }
    };
    ways.iter().map(row).collect()
}

fn table(cases: &[Case], rows: &[Row]) -> String {
    let label = |row: &Row| row.label();
    let cells: Vec<_> = cases
        .iter()
        .map(|case| move |row: &Row| row.count(case.name).map_or("–".to_owned(), |count| format!("{count:.0}")))
        .collect();
    let mut columns: Vec<report::Column<'_, Row>> = vec![("server", &label)];
    columns.extend(cases.iter().zip(&cells).map(|(case, cell)| (case.title, cell as &dyn Fn(&Row) -> String)));
    report::table_of(rows, &columns)
}

/// What a file costs with `aio auto` for each instruction with `aio off`.
#[derive(Debug, PartialEq)]
struct Comparison {
    server: String,
    case: &'static str,
    ratio: f64,
    is_judged: bool,
}

fn comparisons(rows: &[Row]) -> Vec<Comparison> {
    let compare = |auto: &Row| {
        let off = rows.iter().find(|row| row.server == auto.server && row.aio == Some("off"))?;
        let ratio = |(case, count): &(&'static str, Option<f64>)| {
            let is_large = all_cases().iter().any(|each| each.name == *case && each.is_large());
            let ratio = (*count)? / off.count(case)?;
            Some(Comparison { server: auto.server.clone(), case, ratio, is_judged: !is_large })
        };
        Some(auto.per_request.iter().filter_map(ratio).collect::<Vec<_>>())
    };
    rows.iter().filter(|row| row.aio == Some("auto")).filter_map(compare).flatten().collect()
}

fn whole_batches(requests: u32) -> u32 {
    requests.next_multiple_of(BATCH)
}

/// The median of some differences where two are compared: threads that look about by the clock, and a client that reads when
/// it is its turn, make a percent or two.
fn difference(options: &Options, program: &Program, case: Case, aio: Option<&str>) -> Result<f64, String> {
    let (few, more) = case.requests(options);
    let times = if case.by_aio { TIMES_COMPARED } else { 1 };
    let once = |_| {
        let counted_few = count(options, program, case, aio, few)?;
        let counted_many = count(options, program, case, aio, few + more)?;
        Ok((counted_many as f64 - counted_few as f64) / f64::from(more))
    };
    Ok(Spread::of((0..times).map(once).collect::<Result<Vec<f64>, String>>()?).median)
}

/// Instructions of a whole life with that many requests.
fn count(options: &Options, program: &Program, case: Case, aio: Option<&str>, requests: u32) -> Result<u64, String> {
    let totals = std::env::temp_dir().join(format!("gale-bench-{}.callgrind", std::process::id()));
    let out_file = format!("--callgrind-out-file={}", totals.display());
    let words = ["valgrind", "--quiet", "--tool=callgrind", &out_file].map(str::to_owned).to_vec();
    let http = aio.map_or_else(String::new, |aio| format!("aio {aio};"));
    let cores = Some(vec![options.server_core]);
    let server = program.start(Setting { alone_under: Some(words), cores, http, ..Setting::default() })?;
    ask(&server, case, requests / case.batch()).map_err(|error| format!("{error}\n{}", server.error_log_end()))?;
    // Gracefully, so that valgrind writes its file.
    server.end(Signal::TERM)?;
    let text = std::fs::read_to_string(&totals).map_err(|error| format!("valgrind wrote nothing: {error}"))?;
    let _ = std::fs::remove_file(&totals);
    parse(&text).ok_or_else(|| "valgrind wrote no totals".to_owned())
}

fn ask(server: &Running, case: Case, batches: u32) -> Result<(), String> {
    let body = case.body();
    let failed = |failure: load::Failure| format!("{failure:?}");
    let mut connections: Vec<Connection> = Vec::new();
    for _ in 0..batches {
        server.pause()?;
        if case.is_short {
            connections.clear();
        }
        while connections.len() < case.batch() as usize {
            connections.push(Connection::open(&server.address).map_err(failed)?);
        }
        for connection in &mut connections {
            connection.send(case.path, case.is_short).map_err(failed)?;
        }
        send_signal(server.root, Signal::CONT)?;
        for connection in &mut connections {
            let answer = connection.receive().map_err(failed)?;
            if answer.status != 200 || answer.body != body {
                return Err(format!("wrong answer: {} and {} bytes", answer.status, answer.body.len()));
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

    #[test]
    fn what_can_be_compared_is() {
        let row = |server: &str, aio, counts: [Option<f64>; 2]| {
            let per_request = ["1k", "64k"].into_iter().zip(counts).collect();
            Row { server: server.to_owned(), aio, per_request }
        };
        let rows = [
            row("nginx", None, [Some(7.0), Some(7.0)]),
            row("gale", Some("auto"), [Some(51.0), Some(60.0)]),
            row("gale", Some("off"), [Some(50.0), None]),
        ];
        let expected = Comparison { server: "gale".to_owned(), case: "1k", ratio: 1.02, is_judged: true };
        assert_eq!(comparisons(&rows), [expected]);
    }
}
