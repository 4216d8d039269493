//! check: cost of reading and checking a large configuration (`-t`), which is also the first part of start, reload and
//! respawn.
//!
//! User-space instructions are counted by callgrind, so the result is the same in every run. nginx is configured with
//! hash tables of sufficient size.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde::Serialize;

use crate::Measured;
use crate::instructions;
use crate::options::Options;
use crate::report::{self, Document};
use crate::servers::Program;

#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    what: &'static str,
    http: fn() -> String,
}

const CASES: [Case; 6] = [
    Case { name: "locations", what: "20,000 locations, a tenth of them expressions", http: || server(&locations()) },
    Case {
        name: "returns",
        what: "20,000 locations with a return",
        http: || server(&lines(20_000, |number| format!("location /p{number:05} {{ return 200 ok; }}"))),
    },
    Case { name: "servers", what: "5,000 servers of 3 locations", http: servers },
    Case { name: "logs", what: "400 servers with logs of their own", http: servers_with_logs },
    Case {
        name: "map",
        what: "a map of 100,000 lines",
        http: || format!("map $uri $value {{ {} }}", lines(100_000, |number| format!("/key/{number:06} v{number};"))),
    },
    Case {
        name: "geo",
        what: "a geo of 100,000 networks",
        http: || {
            format!("geo $value {{ {} }}", lines(100_000, |number| format!("{} v{};", network(number), number % 300)))
        },
    },
];

fn lines(count: u32, line: impl Fn(u32) -> String) -> String {
    (0..count).map(|number| line(number) + "\n").collect()
}

fn server(content: &str) -> String {
    format!("server {{ listen 127.0.0.1:1; {content} }}")
}

/// Returns locations: of ten, six are prefixes, two are exact, one is `^~`, and one is a regular expression.
fn locations() -> String {
    lines(20_000, |number| {
        let uri = format!("/section-{}/page-{number:05}", number % 97);
        let pattern = match number % 10 {
            0..=5 => uri,
            6 | 7 => format!("= {uri}"),
            8 => format!("^~ {uri}"),
            _ => format!(r"~ ^{uri}\.(jpg|png)$"),
        };
        let content = match number / 10 % 4 {
            0 => format!("return 200 ok{number};"),
            1 => format!("root /srv/www/{number};"),
            2 => format!("expires 1h; add_header X-A b{number};"),
            _ => "index a.html b.html;".to_owned(),
        };
        format!("location {pattern} {{ {content} }}")
    })
}

fn servers() -> String {
    lines(5000, |number| {
        format!(
            r"server {{ listen 127.0.0.1:1; server_name s{number}.test www.s{number}.test; root /srv/{number};
            location / {{ index index.html; }} location /img/ {{ expires 30d; }} location ~ \.php$ {{ return 403; }} }}"
        )
    })
}

fn servers_with_logs() -> String {
    lines(400, |number| {
        format!(
            "server {{ listen 127.0.0.1:1; server_name s{number}.test; access_log s{number}.access.log combined;
            error_log s{number}.error.log; location / {{ root /srv/{number}; }} }}"
        )
    })
}

/// Returns 101.0.0.0/24, 101.0.1.0/24 and so on.
fn network(number: u32) -> String {
    let [_, first, second, third] = number.to_be_bytes();
    format!("{}.{second}.{third}.0/24", 101 + first)
}

#[derive(Debug, Serialize)]
struct Row {
    what: &'static str,
    server: String,
    instructions: u64,
}

/// Counts for nginx and Gale, or for the chosen servers.
pub fn measure(options: &Options) -> Measured {
    let mut programs = instructions::programs(options, &["nginx", "gale"])?;
    // The driver makes no difference, because nothing is served.
    programs.dedup_by_key(|program| program.kind);
    let is_chosen = |case: &Case| options.cases.as_ref().is_none_or(|names| names.iter().any(|name| name == case.name));
    let directory = std::env::temp_dir().join(format!("gale-bench-{}.check", std::process::id()));
    let mut rows = Vec::new();
    for case in CASES.into_iter().filter(is_chosen) {
        for program in &programs {
            fs::create_dir_all(directory.join("logs")).map_err(|error| format!("{}: {error}", directory.display()))?;
            let counted = count(program, &(case.http)(), &directory);
            let _ = fs::remove_dir_all(&directory);
            let (what, server, instructions) = (case.what, program.label.clone(), counted?);
            eprintln!("{what}, {server}: {instructions}");
            rows.push(Row { what, server, instructions });
        }
    }
    let table = report::table_of(
        &rows,
        &[
            ("configuration", &|row: &Row| row.what.to_owned()),
            ("server", &|row| row.server.clone()),
            ("million instructions", &|row| format!("{:.0}", row.instructions as f64 / 1e6)),
        ],
    );
    let body = format!("Instructions in user space of `-t`.\n\n{table}");
    Ok((Document::new("check", "Checking large configurations", &programs, &body, &rows)?, true))
}

fn count(program: &Program, http: &str, directory: &Path) -> Result<u64, String> {
    let text = format!(
        "pid pid; error_log error.log; events {{ }} http {{ access_log off; server_names_hash_max_size 65536;
        server_names_hash_bucket_size 128; map_hash_max_size 262144; map_hash_bucket_size 128;\n{http} }}"
    );
    let (path, totals) = (directory.join("server.conf"), directory.join("totals"));
    fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))?;
    let out_file = format!("--callgrind-out-file={}", totals.display());
    let mut command = Command::new("valgrind");
    command.args(["--quiet", "--tool=callgrind", &out_file]).arg(&program.binary).args(["-t", "-q", "-p"]);
    command.arg(format!("{}/", directory.display())).arg("-c").arg(&path).stdin(Stdio::null());
    let output = command.output().map_err(|error| format!("valgrind: {error}"))?;
    if !output.status.success() {
        return Err(format!("{}: {}", program.label, String::from_utf8_lossy(&output.stderr)));
    }
    let text = fs::read_to_string(&totals).map_err(|error| format!("valgrind wrote nothing: {error}"))?;
    instructions::parse(&text).ok_or_else(|| "valgrind wrote no totals".to_owned())
}
