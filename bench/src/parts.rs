//! parts: user-space instructions per request, by purpose and by function.
//!
//! Every instruction counts for the innermost function of the server that contains it, with inlined code; separate
//! libraries (the allocator, copies of the C library) are parts of their own. A table assigns source files to purposes;
//! the first matching row applies. The counts are as exact as those of `instructions`, which are their sum.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::Measured;
use crate::callgrind::{self, Frame};
use crate::instructions::{self, BATCH, CASES, Case};
use crate::options::Options;
use crate::report::{self, Column, Document, percent};
use crate::servers::{Kind, Program};

/// Smallest share of a request for which a function is shown.
const SHOWN_MIN: f64 = 0.01;

/// In the order of the report.
const PARTS: [&str; 12] = [
    "the request's head",
    "server, location, phases",
    "the server's request, variables",
    "its server, its connection",
    "the server's response",
    "the answer's head and body",
    "the send queue",
    "log, counters",
    "event loop, sockets, timers, clock",
    "requests, buffers",
    "the allocator",
    "the C library, the rest",
];

/// Path prefix of a source file, and index of its part.
type Row = (&'static str, usize);

/// Relative to `crates`.
const GALE: &[Row] = &[
    ("protocol/src/http1/response_head.rs", 4),
    ("protocol/src/http1/response.rs", 5),
    ("protocol/src/http1/request_writer.rs", 2),
    ("protocol/src/fastcgi.rs", 2),
    ("protocol/src/uwsgi.rs", 2),
    ("protocol/src/", 0),
    ("http/src/connection/http1/head.rs", 0),
    ("http/src/connection/http1/framing.rs", 5),
    ("http/src/connection/http1/send.rs", 6),
    ("http/src/connection/output/", 6),
    ("http/src/connection/", 0),
    ("http/src/request/begin.rs", 0),
    ("http/src/request/respon", 5),
    ("http/src/request/filters.rs", 5),
    ("http/src/request/body.rs", 5),
    ("http/src/request/pump.rs", 6),
    ("http/src/request/counting.rs", 7),
    ("http/src/request/mod.rs", 9),
    ("http/src/request/worker.rs", 9),
    ("http/src/request/", 1),
    ("http-upstream/src/attempt.rs", 3),
    ("http-upstream/src/client.rs", 3),
    ("http-upstream/src/sending.rs", 3),
    ("http-upstream/src/receiving.rs", 3),
    ("http-upstream/src/response.rs", 4),
    ("http-upstream/src/client_head.rs", 4),
    ("http-upstream/src/answering.rs", 4),
    ("http-upstream/src/heading.rs", 4),
    ("http-upstream/src/failure.rs", 4),
    ("http-upstream/src/passing_tls.rs", 3),
    ("http-upstream/src/body.rs", 4),
    ("http-upstream/src/record.rs", 4),
    ("http-upstream/src/", 2),
    ("modules/src/shared/upstream", 2),
    ("modules/src/http/proxy", 2),
    ("modules/src/http/fastcgi", 2),
    ("modules/src/http/gateway.rs", 2),
    ("modules/src/http/variables.rs", 2),
    ("modules/src/http/upstream_head.rs", 2),
    ("modules/src/http/upstream", 3),
    ("modules/src/shared/append.rs", 2),
    ("modules/src/shared/variables.rs", 2),
    ("modules/src/", 1),
    ("engine/src/variables/", 2),
    ("engine/src/upstream/", 3),
    ("engine/src/log/", 7),
    ("engine/src/worker/", 7),
    ("engine/src/traffic.rs", 7),
    ("engine/src/transport.rs", 8),
    ("engine/src/tls/", 8),
    ("engine/src/", 1),
    ("runtime/src/memory/", 9),
    ("runtime/src/", 8),
    ("base/src/tally.rs", 7),
    ("base/src/", 1),
];

/// nginx's files, by name.
const NGINX: &[Row] = &[
    ("ngx_http_parse.c", 0),
    ("ngx_http_request.c", 0),
    ("ngx_http_core_module.c", 1),
    ("ngx_http_rewrite_module.c", 1),
    ("ngx_http_script.c", 2),
    ("ngx_http_variables.c", 2),
    ("ngx_http_proxy_module.c", 2),
    ("ngx_http_fastcgi_module.c", 2),
    ("ngx_http_upstream", 3),
    ("ngx_event_connect.c", 3),
    ("ngx_event_pipe.c", 4),
    ("ngx_http_log_module.c", 7),
    ("ngx_http_write_filter_module.c", 6),
    ("ngx_writev_chain.c", 6),
    ("ngx_linux_sendfile_chain.c", 6),
    ("ngx_http_", 5),
    ("ngx_output_chain.c", 5),
    ("ngx_palloc.c", 9),
    ("ngx_buf.c", 9),
    ("ngx_list.c", 9),
    ("ngx_array.c", 9),
    ("ngx_alloc.c", 9),
    ("ngx_event", 8),
    ("ngx_epoll", 8),
    ("ngx_rbtree", 8),
    ("ngx_recv.c", 8),
    ("ngx_send.c", 8),
    ("ngx_times.c", 8),
    ("ngx_process_cycle.c", 8),
    ("ngx_connection.c", 8),
];

const ALLOCATOR: usize = 10;
const REST: usize = 11;

/// Instructions of a server per request.
#[derive(Debug, Serialize)]
struct Profile {
    server: String,
    case: &'static str,
    all: f64,
    /// In the order of [`PARTS`].
    parts: Vec<f64>,
    /// Functions with a share of at least [`SHOWN_MIN`], largest first.
    functions: Vec<Function>,
}

#[derive(Debug, Serialize)]
struct Function {
    name: String,
    part: &'static str,
    per_request: f64,
}

/// Counts for the chosen servers, or for the floors, nginx and Gale.
pub fn measure(options: &Options) -> Measured {
    let programs = instructions::programs(options, &["floor", "nginx", "gale"])?;
    let is_chosen = |case: &&Case| match &options.cases {
        Some(names) => names.iter().any(|name| name == case.name),
        None => case.name == "return",
    };
    let mut body = String::new();
    let mut all = Vec::new();
    for case in CASES.iter().filter(is_chosen) {
        let mut profiles = Vec::new();
        for program in &programs {
            match profile(options, program, case) {
                Ok(profile) => {
                    eprintln!("{}, {}: {:.0}", program.label, case.name, profile.all);
                    profiles.push(profile);
                }
                Err(error) => eprintln!("note: {}, {}: {error}", program.label, case.name),
            }
        }
        body.push_str(&format!("## {}\n\n{}\n", case.title, table(&profiles)));
        body.extend(profiles.iter().filter(|profile| !profile.server.starts_with("floor")).map(functions));
        all.extend(profiles);
    }
    let head = format!(
        "Instructions in user space per request, {BATCH} requests at a time, each on a connection of its own; \
         each counts for the innermost function of the server's own that it is in, and functions are told from {} \
         of a request on.\n\n",
        percent(SHOWN_MIN)
    );
    let title = "Instructions per request by purpose";
    Ok((Document::new("parts", title, &programs, &(head + &body), &all)?, true))
}

fn profile(options: &Options, program: &Program, case: &Case) -> Result<Profile, String> {
    let executions = case.executions(options, program)?;
    let frames = callgrind::frames(executions.iter().map(|(instruction, _)| instruction))?;
    let mut parts = vec![0.0; PARTS.len()];
    let mut functions: BTreeMap<(String, usize), f64> = BTreeMap::new();
    for (instruction, per_request) in &executions {
        let frame = frames.get(instruction).and_then(|frames| own(program, frames));
        let part = frame.map_or(REST, |frame| part_of(program.kind, frame));
        let name = frame.map_or("?".to_owned(), |frame| format!("{} ({})", frame.function, frame.file));
        parts[part] += per_request;
        *functions.entry((name, part)).or_default() += per_request;
    }
    let all: f64 = parts.iter().sum();
    let mut functions: Vec<Function> = functions
        .into_iter()
        .filter(|(_, per_request)| *per_request >= all * SHOWN_MIN)
        .map(|((name, part), per_request)| Function { name, part: PARTS[part], per_request })
        .collect();
    functions.sort_by(|a, b| b.per_request.total_cmp(&a.per_request));
    Ok(Profile { server: program.label.clone(), case: case.name, all, parts, functions })
}

/// Returns the function that an instruction counts for. Code of Rust libraries that is inlined in Gale counts as
/// Gale's.
fn own<'f>(program: &Program, frames: &'f [Frame]) -> Option<&'f Frame> {
    match program.kind {
        Kind::Gale => Frame::own(frames),
        _ => frames.first(),
    }
}

fn part_of(kind: Kind, frame: &Frame) -> usize {
    let is_allocator = frame.function.trim_start_matches('_').starts_with("mi_") || frame.file == "malloc.c";
    if is_allocator {
        return ALLOCATOR;
    }
    let rows = match kind {
        Kind::Gale if frame.is_of_gale => GALE,
        Kind::Nginx => NGINX,
        _ => return REST,
    };
    rows.iter().find(|(beginning, _)| frame.file.starts_with(beginning)).map_or(REST, |&(_, part)| part)
}

/// Returns a table with a row for each part and a column for each server.
fn table(profiles: &[Profile]) -> String {
    let cell = |profile: &Profile, part: &Option<usize>| match part {
        Some(part) => format!("{:.0}", profile.parts[*part]),
        None => format!("{:.0}", profile.all),
    };
    let cells: Vec<_> = profiles.iter().map(|profile| move |part: &Option<usize>| cell(profile, part)).collect();
    let name = |part: &Option<usize>| part.map_or("all", |part| PARTS[part]).to_owned();
    let mut columns: Vec<Column<Option<usize>>> = vec![("part", &name)];
    columns.extend(profiles.iter().zip(&cells).map(|(profile, cell)| (&profile.server[..], cell as &dyn Fn(&_) -> _)));
    let rows: Vec<Option<usize>> = (0..PARTS.len()).map(Some).chain([None]).collect();
    report::table_of(&rows, &columns)
}

fn functions(profile: &Profile) -> String {
    let rows = report::table_of(
        &profile.functions,
        &[
            ("function", &|function: &Function| format!("`{}`", function.name)),
            ("per request", &|function| format!("{:.0}", function.per_request)),
            ("share", &|function| percent(function.per_request / profile.all)),
            ("part", &|function| function.part.to_owned()),
        ],
    );
    format!("### {}, {}\n\n{rows}\n", profile.server, profile.case)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_of_the_tables_is_reached_and_names_a_part() {
        for rows in [GALE, NGINX] {
            for (number, (beginning, part)) in rows.iter().enumerate() {
                assert!(*part < ALLOCATOR, "{beginning}");
                let shadowed = rows[..number].iter().any(|(earlier, _)| beginning.starts_with(earlier));
                assert!(!shadowed, "{beginning} stands behind a row that it begins with");
            }
        }
    }

    #[test]
    fn function_belongs_to_the_part_of_its_file() {
        let frame = |function: &str, file: &str, is_of_gale| Frame {
            function: function.to_owned(),
            file: file.to_owned(),
            line: "1".to_owned(),
            is_of_gale,
        };
        let part = |kind, frame: Frame| PARTS[part_of(kind, &frame)];
        assert_eq!(part(Kind::Gale, frame("parse", "protocol/src/http1/head.rs", true)), PARTS[0]);
        assert_eq!(part(Kind::Gale, frame("mi_free", "free.c", false)), PARTS[ALLOCATOR]);
        assert_eq!(part(Kind::Nginx, frame("ngx_http_static_handler", "ngx_http_static_module.c", false)), PARTS[5]);
        assert_eq!(part(Kind::Nginx, frame("memcpy", "memmove.S", false)), PARTS[REST]);
    }
}
