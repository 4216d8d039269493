//! instructions: user-space instructions per request, counted exactly by callgrind.
//!
//! A server runs as one process under valgrind, once with few requests and once with many; the difference excludes
//! start and stop. It is paused while requests are sent, so that it always finds the same number of them, like a
//! saturated worker. Every answer is checked. Kernel work is not counted.
//!
//! valgrind must see all system calls, so Gale is built anew for it with those of the C library. With versions of
//! valgrind that lack `openat2`, Gale opens files in a pool; with io_uring its threads then never run, and there is no
//! result.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;

use rustix::process::Signal;
use serde::Serialize;

use crate::Measured;
use crate::backend::Backend;
use crate::callgrind::{self, Instruction};
use crate::client::Headers;
use crate::client::load::{self, Connection};
use crate::interpreter::{Interpreter, Language};
use crate::location::{self, Page};
use crate::options::Options;
use crate::report::{self, Column, Document, Spread};
use crate::servers::{Accepting, FILES, Kind, Program, Running, SMALL_BODY, Setting, file_body, letters, send_signal};

/// Requests of the first run. The second run has additional ones.
pub const REQUESTS_FEW: u32 = 640;
/// The same for pages, some of which take millions of instructions; and the maximum of additional requests.
const PAGES_FEW: u32 = 128;
const PAGES_MORE_MAX: u32 = 512;
/// Requests that a server finds at once.
pub const BATCH: u32 = 64;

/// Files of this size or more do not fit into the sockets, and how often a server finds these full varies. Their
/// requests are sent one by one, a smaller number is enough, and their cost is shown but not judged.
const LARGE_BYTES: usize = 1 << 20;
const LARGE_REQUESTS: u32 = 320;

/// Repetitions of counts that are compared.
const TIMES_COMPARED: usize = 3;

/// Maximum ratio of the instructions with `aio auto` to those with `aio off`, with everything in memory.
const AUTO_MAX: f64 = 1.02;

#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub name: &'static str,
    pub title: &'static str,
    path: &'static str,
    is_short: bool,
    /// Event loops, each with its own listening socket.
    workers: u32,
    /// A page from [`location::PAGES`].
    page: Option<Page>,
    /// Size of a file, which is counted with each value of `aio`.
    file_bytes: Option<usize>,
    /// Language of the backend application.
    language: Option<Language>,
}

const ANSWER: Case = Case {
    name: "return",
    title: "2-byte answer",
    path: "/return",
    is_short: false,
    workers: 1,
    page: None,
    file_bytes: None,
    language: None,
};

/// Basic cases; files and pages are added to them.
pub const CASES: [Case; 7] = [
    ANSWER,
    Case { name: "two-workers", title: "2-byte answer, two workers", workers: 2, ..ANSWER },
    Case { name: "file", title: "1 KiB file", path: "/file", ..ANSWER },
    Case { name: "short", title: "short connection", is_short: true, ..ANSWER },
    Case { name: "proxied", title: "2 bytes from a backend", path: "/proxied", ..ANSWER },
    Case { name: "fastcgi", title: "2 bytes of PHP-FPM", path: "/fastcgi", language: Some(Language::Php), ..ANSWER },
    Case { name: "uwsgi", title: "2 bytes of uWSGI", path: "/uwsgi", language: Some(Language::Python), ..ANSWER },
];

impl Case {
    fn of_page(page: Page) -> Case {
        Case { name: page.name, title: page.title, path: page.path, page: Some(page), ..ANSWER }
    }

    fn of_file((name, path, bytes): (&'static str, &'static str, usize)) -> Case {
        Case { name, title: name, path, file_bytes: Some(bytes), ..ANSWER }
    }

    fn is_proxied(&self) -> bool {
        self.path == "/proxied"
    }

    fn is_large(&self) -> bool {
        self.file_bytes.is_some_and(|bytes| bytes >= LARGE_BYTES)
    }

    fn batch(&self) -> u32 {
        if self.is_large() { 1 } else { BATCH * self.workers }
    }

    /// Returns the requests of the first run, and the additional ones of the second.
    fn requests(&self, options: &Options) -> (u32, u32) {
        let more = options.requests.next_multiple_of(BATCH * self.workers);
        if self.is_large() {
            return (LARGE_REQUESTS, LARGE_REQUESTS.min(more));
        }
        if self.page.is_some() { (PAGES_FEW, more.min(PAGES_MORE_MAX)) } else { (REQUESTS_FEW, more) }
    }

    fn content(&self) -> Vec<u8> {
        match self.page {
            Some(page) => location::html(page.bytes),
            None if self.file_bytes.is_some() => self.file_bytes.map(letters).unwrap_or_default(),
            None if self.path == "/file" => file_body(),
            // The body of the backend.
            None if self.is_proxied() => xs(SMALL_BODY.len()),
            None => SMALL_BODY.to_vec(),
        }
    }

    fn asked<'a>(&self, path: &'a dyn Fn(u32) -> String, program: &Program) -> Asked<'a> {
        let content = self.content();
        Asked {
            path,
            headers: self.page.map_or(&[][..], |page| page.headers),
            // The floor sends a text of its own.
            content: if program.kind == Kind::Floor { xs(content.len()) } else { content },
            is_short: self.is_short,
            batch: self.batch(),
        }
    }

    /// Starts the backends of the case. Returns them with the server's settings.
    fn prepare(&self, options: &Options, program: &Program) -> Result<Prepared, String> {
        if self.workers > 1 && program.kind != Kind::Gale {
            return Err("its workers are processes".to_owned());
        }
        let setting = if self.page.is_some() { location::setting() } else { Setting::default() };
        let backend = match self.is_proxied() {
            true => Some(Backend::start(options.client_core, SMALL_BODY.len())?),
            false => None,
        };
        let interpreter = match self.language {
            Some(language) => Some(
                Interpreter::start(language, options.client_core)?
                    .ok_or_else(|| format!("{language:?} is not installed"))?,
            ),
            None => None,
        };
        let server = interpreter.as_ref().map_or(setting.server.clone(), |interpreter| interpreter.location(self.path));
        let floor_request = interpreter.as_ref().map(Interpreter::for_floor).transpose()?;
        let accepting = if self.workers > 1 { Accepting::Reuseport } else { Accepting::Shared };
        let setting = Setting {
            is_short: self.is_short,
            workers: self.workers as usize,
            accepting,
            floor_body_bytes: self.content().len(),
            server,
            backend: backend.as_ref().map(|backend| backend.port),
            floor_request,
            ..setting
        };
        Ok(Prepared { setting, _backend: backend, _interpreter: interpreter })
    }

    pub fn executions(&self, options: &Options, program: &Program) -> Result<Vec<(Instruction, f64)>, String> {
        let prepared = self.prepare(options, program)?;
        callgrind::per_request(options, program, &prepared.setting, &self.asked(&|_| self.path.to_owned(), program))
    }
}

/// Settings, and the backends, which run while this is held.
struct Prepared {
    setting: Setting,
    _backend: Option<Rc<Backend>>,
    _interpreter: Option<Interpreter>,
}

fn xs(length: usize) -> Vec<u8> {
    vec![b'x'; length]
}

/// A case, with the count of each server.
#[derive(Debug, Serialize)]
struct Row {
    case: &'static str,
    title: &'static str,
    servers: Vec<Count>,
}

#[derive(Debug, Serialize)]
struct Count {
    server: String,
    /// `None` if it could not be counted.
    per_request: Option<f64>,
    /// Length of the body as sent.
    body_bytes: Option<usize>,
}

pub struct Asked<'a> {
    /// Returns the target of the request with this number.
    pub path: &'a dyn Fn(u32) -> String,
    pub headers: Headers,
    pub content: Vec<u8>,
    pub is_short: bool,
    /// Requests that the server finds at once.
    pub batch: u32,
}

/// Returns the chosen servers, ready for valgrind; those of `default` if none are chosen.
pub fn programs(options: &Options, default: &[&str]) -> Result<Vec<Program>, String> {
    let mut programs = options.servers(Some(default))?;
    for program in &mut programs {
        match program.kind {
            Kind::Gale => program.binary = gale_for_valgrind(options)?,
            Kind::Nginx | Kind::Floor => {}
            _ => return Err(format!("{} cannot be told to be one process", program.label)),
        }
    }
    Ok(programs)
}

/// Counts for the chosen servers, or for nginx and Gale.
pub fn measure(options: &Options) -> Measured {
    let programs = programs(options, &["nginx", "gale"])?;
    let is_chosen = |case: &Case| options.cases.as_ref().is_none_or(|names| names.iter().any(|name| name == case.name));
    let all = CASES.into_iter().chain(FILES.map(Case::of_file)).chain(location::PAGES.map(Case::of_page));
    let cases: Vec<Case> = all.filter(is_chosen).collect();
    let candidates = candidates(&programs, cases.iter().any(|case| case.file_bytes.is_some()));
    let rows: Vec<Row> = cases.into_iter().map(|case| count_all(options, &candidates, case)).collect();
    let comparisons = comparisons(&candidates, &rows);
    let compared = match comparisons.is_empty() {
        true => String::new(),
        false => format!(
            "\nWith everything in memory, for one instruction with `aio off` (wanted: {AUTO_MAX} at most; \
             what does not fit into a socket is not judged):\n\n{}",
            report::table_of(
                &comparisons,
                &[
                    ("server", &|compared: &Comparison| compared.server.clone()),
                    ("file", &|compared| compared.case.to_owned()),
                    ("`aio auto`", &|compared| format!("{:.3}", compared.ratio)),
                ]
            )
        ),
    };
    let body = format!(
        "Instructions in user space per request: the difference of {REQUESTS_FEW} and {} requests, {BATCH} \
         at a time for each worker, each on a connection of its own. In brackets the share of the first server's, and \
         the bytes of the body as they were sent. Of pages, which cost more, {PAGES_FEW} and at most {} requests; \
         of files of 4 MiB as many, one at a time.\n\n{}{compared}",
        REQUESTS_FEW + whole_batches(options.requests),
        PAGES_FEW + PAGES_MORE_MAX,
        table(&candidates, &rows)
    );
    Ok((Document::new("instructions", "Instructions per request", &programs, &body, &rows)?, holds(&comparisons)))
}

/// A server, with a value of `aio` if that matters.
struct Candidate {
    label: String,
    program: Program,
    aio: Option<&'static str>,
}

fn candidates(programs: &[Program], has_files: bool) -> Vec<Candidate> {
    let aio_values = |program: &Program| -> &[Option<&'static str>] {
        if has_files && program.kind == Kind::Gale { &[None, Some("off")] } else { &[None] }
    };
    let candidate = |program: &Program, aio: Option<&'static str>| {
        let label = aio.map_or_else(|| program.label.clone(), |aio| format!("{}, aio {aio}", program.label));
        Candidate { label, program: program.clone(), aio }
    };
    programs.iter().flat_map(|program| aio_values(program).iter().map(move |&aio| candidate(program, aio))).collect()
}

/// Cost of a file with the default, `aio auto`, relative to `aio off`.
#[derive(Debug, PartialEq)]
struct Comparison {
    server: String,
    case: &'static str,
    ratio: f64,
}

fn comparisons(candidates: &[Candidate], rows: &[Row]) -> Vec<Comparison> {
    let compare = |row: &Row| {
        let pairs = candidates.iter().zip(&row.servers).zip(row.servers.iter().skip(1));
        let is_pair = |((candidate, _), off): &((&Candidate, &Count), &Count)| {
            candidate.aio.is_none() && off.server == format!("{}, aio off", candidate.label)
        };
        let ratio = |((candidate, auto), off): ((&Candidate, &Count), &Count)| {
            let ratio = auto.per_request? / off.per_request?;
            Some(Comparison { server: candidate.label.clone(), case: row.case, ratio })
        };
        pairs.filter(is_pair).filter_map(ratio).collect::<Vec<_>>()
    };
    rows.iter().flat_map(compare).collect()
}

fn holds(comparisons: &[Comparison]) -> bool {
    let is_large = |name: &str| FILES.iter().any(|&(case, _, bytes)| case == name && bytes >= LARGE_BYTES);
    comparisons.iter().all(|compared| is_large(compared.case) || compared.ratio <= AUTO_MAX)
}

fn count_all(options: &Options, candidates: &[Candidate], case: Case) -> Row {
    let count = |candidate: &Candidate| {
        let label = candidate.label.clone();
        if candidate.aio.is_some() && case.file_bytes.is_none() {
            return Count { server: label, per_request: None, body_bytes: None };
        }
        let counted = difference(options, candidate, case);
        match &counted {
            Ok((count, bytes)) => eprintln!("{label}, {}: {count:.0}, {bytes} bytes", case.name),
            Err(error) => eprintln!("note: {label}, {}: {error}", case.name),
        }
        let (per_request, body_bytes) = counted.ok().unzip();
        Count { server: label, per_request, body_bytes }
    };
    Row { case: case.name, title: case.title, servers: candidates.iter().map(count).collect() }
}

/// Returns a table with a row for each case and a column for each server.
fn table(candidates: &[Candidate], rows: &[Row]) -> String {
    let cell = |row: &Row, number: usize| {
        let Count { per_request: Some(count), body_bytes: Some(bytes), .. } = row.servers[number] else {
            return "–".to_owned();
        };
        let share = row.servers[0].per_request.filter(|_| number > 0).map(|first| format!("{:.2}; ", count / first));
        format!("{count:.0} ({}{bytes} B)", share.unwrap_or_default())
    };
    let cells: Vec<_> = (0..candidates.len()).map(|number| move |row: &Row| cell(row, number)).collect();
    let mut columns: Vec<Column<Row>> = vec![("case", &|row| row.title.to_owned())];
    columns
        .extend(candidates.iter().zip(&cells).map(|(each, cell)| (&each.label[..], cell as &dyn Fn(&Row) -> String)));
    report::table_of(rows, &columns)
}

fn whole_batches(requests: u32) -> u32 {
    requests.next_multiple_of(BATCH)
}

/// Returns the instructions per request and the length of the body as sent. For comparisons, this is the median of
/// several counts, because threads that act on timers cause a difference of a percent or two.
fn difference(options: &Options, candidate: &Candidate, case: Case) -> Result<(f64, usize), String> {
    let path = |_| case.path.to_owned();
    let asked = case.asked(&path, &candidate.program);
    let prepared = case.prepare(options, &candidate.program)?;
    let http = candidate.aio.map_or(prepared.setting.http.clone(), |aio| format!("aio {aio};"));
    let setting = Setting { http, ..prepared.setting.clone() };
    let times = if case.file_bytes.is_some() { TIMES_COMPARED } else { 1 };
    let mut differences = Vec::new();
    let mut body_bytes = 0;
    while differences.len() < times {
        let (difference, bytes) = difference_of(options, &candidate.program, &setting, &asked, case.requests(options))?;
        differences.push(difference);
        body_bytes = bytes;
    }
    Ok((Spread::of(differences).median, body_bytes))
}

/// Returns the same for a configuration. `requests` are those of the first run and the additional ones of the second.
fn difference_of(
    options: &Options,
    program: &Program,
    setting: &Setting,
    asked: &Asked<'_>,
    requests: (u32, u32),
) -> Result<(f64, usize), String> {
    let (first, more) = requests;
    let (few, _) = count(options, program, setting, asked, first)?;
    let (many, body_bytes) = count(options, program, setting, asked, first + more)?;
    Ok(((many as f64 - few as f64) / f64::from(more), body_bytes))
}

pub fn count_per_request(
    options: &Options,
    program: &Program,
    setting: &Setting,
    asked: &Asked<'_>,
) -> Result<f64, String> {
    let requests = (REQUESTS_FEW, whole_batches(options.requests));
    difference_of(options, program, setting, asked, requests).map(|(per_request, _)| per_request)
}

/// Returns the instructions of a whole process with this number of requests, and the length of a body.
fn count(
    options: &Options,
    program: &Program,
    setting: &Setting,
    asked: &Asked<'_>,
    requests: u32,
) -> Result<(u64, usize), String> {
    let (text, body_bytes) = run(options, program, setting, asked, requests, &[])?;
    let instructions = parse(&text).ok_or_else(|| "valgrind wrote no totals".to_owned())?;
    Ok((instructions, body_bytes))
}

/// Returns the output of callgrind, run with these options, for a whole process with this number of requests; and the
/// length of a body.
pub fn run(
    options: &Options,
    program: &Program,
    setting: &Setting,
    asked: &Asked<'_>,
    requests: u32,
    callgrind_options: &[&str],
) -> Result<(String, usize), String> {
    let totals = std::env::temp_dir().join(format!("gale-bench-{}.callgrind", std::process::id()));
    let out_file = format!("--callgrind-out-file={}", totals.display());
    let words = [&["valgrind", "--quiet", "--tool=callgrind", &out_file], callgrind_options].concat();
    let words = words.into_iter().map(str::to_owned).collect();
    let cores = Some(vec![options.server_core]);
    let setting = Setting { alone_under: Some(words), cores, ..setting.clone() };
    let server = program.start(setting)?;
    let body_bytes =
        ask(&server, asked, requests / asked.batch).map_err(|error| format!("{error}\n{}", server.error_log_end()))?;
    // A graceful end, so that valgrind writes its file.
    server.end(Signal::TERM)?;
    let text = std::fs::read_to_string(&totals).map_err(|error| format!("valgrind wrote nothing: {error}"))?;
    let _ = std::fs::remove_file(&totals);
    Ok((text, body_bytes))
}

/// Sends the requests. Returns the length of a body.
fn ask(server: &Running, asked: &Asked<'_>, batches: u32) -> Result<usize, String> {
    let mut body_bytes = 0;
    let failed = |failure: load::Failure| format!("{failure:?}");
    let mut connections: Vec<Connection> = Vec::new();
    for batch in 0..batches {
        server.pause()?;
        if asked.is_short {
            connections.clear();
        }
        while connections.len() < asked.batch as usize {
            connections.push(Connection::open(&server.address).map_err(failed)?);
        }
        for (number, connection) in (batch * asked.batch..).zip(&mut connections) {
            connection.send(&(asked.path)(number), asked.headers, asked.is_short).map_err(failed)?;
        }
        send_signal(server.root, Signal::CONT)?;
        for connection in &mut connections {
            let answer = connection.receive().map_err(failed)?;
            if answer.status != 200 || answer.content().map_err(failed)? != asked.content {
                return Err(format!("wrong answer: {} and {} bytes", answer.status, answer.body.len()));
            }
            body_bytes = answer.body.len();
        }
    }
    Ok(body_bytes)
}

/// Parses the line `totals: N`, or `summary: N` of older versions. It has one number, because one kind of event is
/// counted.
pub fn parse(text: &str) -> Option<u64> {
    let of = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    of("totals:").or_else(|| of("summary:"))
}

/// Returns the given binary, or builds one: valgrind does not see system calls that bypass the C library.
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
    fn rows_with_both_counts_are_compared() {
        let candidate = |label: &str, aio| {
            let program = Program::new("gale", Kind::Gale, Path::new("gale"));
            Candidate { label: label.to_owned(), program, aio }
        };
        let candidates = [candidate("nginx", None), candidate("gale", None), candidate("gale, aio off", Some("off"))];
        let row = |case, counts: [Option<f64>; 3]| {
            let count = |(candidate, per_request): (&Candidate, Option<f64>)| Count {
                server: candidate.label.clone(),
                per_request,
                body_bytes: None,
            };
            Row { case, title: case, servers: candidates.iter().zip(counts).map(count).collect() }
        };
        let rows = [
            row("1k", [Some(7.0), Some(51.0), Some(50.0)]),
            row("64k", [Some(7.0), Some(60.0), None]),
            row("4m", [None, Some(60.0), Some(30.0)]),
        ];
        let found = comparisons(&candidates, &rows);
        let expected = |case, ratio| Comparison { server: "gale".to_owned(), case, ratio };
        assert_eq!(found, [expected("1k", 1.02), expected("4m", 2.0)]);
        assert!(holds(&found), "4 MiB are not judged");
        assert!(!holds(&[expected("64k", 1.03)]));
    }
}
