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
use crate::location::{self, Page};
use crate::options::Options;
use crate::report::{self, Column, Document};
use crate::servers::{Kind, Program, Running, SMALL_BODY, Setting, file_body, send_signal};

/// Requests of the first run; those of the second come on top.
const REQUESTS_FEW: u32 = 640;
/// The same for pages, of which some cost millions of instructions; and how many there may be on top.
const PAGES_FEW: u32 = 128;
const PAGES_MORE_MAX: u32 = 512;
/// Requests that a server finds at once.
const BATCH: u32 = 64;

#[derive(Debug, Clone, Copy)]
struct Case {
    name: &'static str,
    title: &'static str,
    path: &'static str,
    is_short: bool,
    /// One of a location of its own.
    page: Option<Page>,
}

/// They and the pages.
const CASES: [Case; 3] = [
    Case { name: "return", title: "2-byte answer", path: "/return", is_short: false, page: None },
    Case { name: "file", title: "1 KiB file", path: "/file", is_short: false, page: None },
    Case { name: "short", title: "short connection", path: "/return", is_short: true, page: None },
];

impl Case {
    fn of_page(page: Page) -> Case {
        Case { name: page.name, title: page.title, path: page.path, is_short: false, page: Some(page) }
    }

    /// Requests of the first run, and how many more the second one has.
    fn requests(&self, options: &Options) -> (u32, u32) {
        let more = whole_batches(options.requests);
        if self.page.is_some() { (PAGES_FEW, more.min(PAGES_MORE_MAX)) } else { (REQUESTS_FEW, more) }
    }

    fn content(&self) -> Vec<u8> {
        match self.page {
            Some(page) => location::html(page.bytes),
            None if self.path == "/file" => file_body(),
            None => SMALL_BODY.to_vec(),
        }
    }
}

/// A case, and what every server needs for it.
#[derive(Debug, Serialize)]
struct Row {
    case: &'static str,
    title: &'static str,
    servers: Vec<Count>,
}

#[derive(Debug, Serialize)]
struct Count {
    server: String,
    /// None where it could not be counted.
    per_request: Option<f64>,
    /// Bytes of the answer's body as they were sent.
    body_bytes: Option<usize>,
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
    let all = CASES.into_iter().chain(location::PAGES.map(Case::of_page));
    let rows: Vec<Row> = all.filter(is_chosen).map(|case| count_all(options, &programs, case)).collect();
    let body = format!(
        "Instructions in user space per request: the difference of {REQUESTS_FEW} and {} requests, {BATCH} at a time, each \
         on a connection of its own. In brackets the share of the first server's, and the bytes of the body as they \
         were sent. Of pages, which cost more, {PAGES_FEW} and at most {} requests.\n\n{}",
        REQUESTS_FEW + whole_batches(options.requests),
        PAGES_FEW + PAGES_MORE_MAX,
        table(&programs, &rows)
    );
    Ok((Document::new("instructions", "Instructions per request", &programs, &body, &rows)?, true))
}

fn count_all(options: &Options, programs: &[Program], case: Case) -> Row {
    let count = |program: &Program| {
        let counted = difference(options, program, case);
        match &counted {
            Ok((count, bytes)) => eprintln!("{}, {}: {count:.0}, {bytes} bytes", program.label, case.name),
            Err(error) => eprintln!("note: {}, {}: {error}", program.label, case.name),
        }
        let (per_request, body_bytes) = counted.ok().unzip();
        Count { server: program.label.clone(), per_request, body_bytes }
    };
    Row { case: case.name, title: case.title, servers: programs.iter().map(count).collect() }
}

/// A row for each case, and a column for each server.
fn table(programs: &[Program], rows: &[Row]) -> String {
    let cell = |row: &Row, number: usize| {
        let Count { per_request: Some(count), body_bytes: Some(bytes), .. } = row.servers[number] else {
            return "–".to_owned();
        };
        let share = row.servers[0].per_request.filter(|_| number > 0).map(|first| format!("{:.2}; ", count / first));
        format!("{count:.0} ({}{bytes} B)", share.unwrap_or_default())
    };
    let cells: Vec<_> = (0..programs.len()).map(|number| move |row: &Row| cell(row, number)).collect();
    let mut columns: Vec<Column<Row>> = vec![("case", &|row| row.title.to_owned())];
    columns.extend(
        programs.iter().zip(&cells).map(|(program, cell)| (&program.label[..], cell as &dyn Fn(&Row) -> String)),
    );
    report::table_of(rows, &columns)
}

fn whole_batches(requests: u32) -> u32 {
    requests.next_multiple_of(BATCH)
}

/// Instructions per request, and bytes of the body as they were sent.
fn difference(options: &Options, program: &Program, case: Case) -> Result<(f64, usize), String> {
    let (first, more) = case.requests(options);
    let (few, _) = count(options, program, case, first)?;
    let (many, body_bytes) = count(options, program, case, first + more)?;
    Ok((many.saturating_sub(few) as f64 / f64::from(more), body_bytes))
}

/// Instructions of a whole life with that many requests, and bytes of a body.
fn count(options: &Options, program: &Program, case: Case, requests: u32) -> Result<(u64, usize), String> {
    let totals = std::env::temp_dir().join(format!("gale-bench-{}.callgrind", std::process::id()));
    let out_file = format!("--callgrind-out-file={}", totals.display());
    let words = ["valgrind", "--quiet", "--tool=callgrind", &out_file].map(str::to_owned).to_vec();
    let setting = if case.page.is_some() { location::setting() } else { Setting::default() };
    let setting = Setting { alone_under: Some(words), cores: Some(vec![options.server_core]), ..setting };
    let server = program.start(setting)?;
    let body_bytes =
        ask(&server, case, requests / BATCH).map_err(|error| format!("{error}\n{}", server.error_log_end()))?;
    // Gracefully, so that valgrind writes its file.
    server.end(Signal::TERM)?;
    let text = std::fs::read_to_string(&totals).map_err(|error| format!("valgrind wrote nothing: {error}"))?;
    let _ = std::fs::remove_file(&totals);
    let instructions = parse(&text).ok_or_else(|| "valgrind wrote no totals".to_owned())?;
    Ok((instructions, body_bytes))
}

/// Asks, and tells how many bytes the body of an answer had.
fn ask(server: &Running, case: Case, batches: u32) -> Result<usize, String> {
    let content = case.content();
    let headers = case.page.map_or(&[][..], |page| page.headers);
    let mut body_bytes = 0;
    let failed = |failure: load::Failure| format!("{failure:?}");
    let mut connections: Vec<Connection> = Vec::new();
    for _ in 0..batches {
        server.pause()?;
        if case.is_short {
            connections.clear();
        }
        while connections.len() < BATCH as usize {
            connections.push(Connection::open(&server.address).map_err(failed)?);
        }
        for connection in &mut connections {
            connection.send(case.path, headers, case.is_short).map_err(failed)?;
        }
        send_signal(server.root, Signal::CONT)?;
        for connection in &mut connections {
            let answer = connection.receive().map_err(failed)?;
            if answer.status != 200 || answer.content().map_err(failed)? != content {
                return Err(format!("wrong answer: {answer:?}"));
            }
            body_bytes = answer.body.len();
        }
    }
    Ok(body_bytes)
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
