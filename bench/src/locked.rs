//! locked: locked instructions per request: those with a `lock` prefix, and `xchg` with memory. Each takes a cache line
//! from all other cores.
//!
//! callgrind counts every instruction, objdump finds the locked ones, and addr2line their functions. So the counts are
//! exact, also without contention. They do not show if other workers write the same line; ARCHITECTURE.md lists such
//! memory, from reading the source. Plain stores to lines that others read are not counted.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::process::Command;

use serde::Serialize;

use crate::Measured;
use crate::backend::Backend;
use crate::callgrind::{self, Frame, Instruction, output};
use crate::instructions::{self, Asked, BATCH};
use crate::options::Options;
use crate::report::{self, Document};
use crate::servers::{Program, SMALL_BODY, Setting, file_body};

/// Smallest count per request that is shown. Instructions of the loop that run once in many turns belong to no request.
const SHOWN_MIN: f64 = 0.005;

#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    title: &'static str,
    path: &'static str,
    http: &'static str,
    server: &'static str,
    content: fn() -> Vec<u8>,
}

const CASES: [Case; 7] = [
    Case {
        name: "return",
        title: "2-byte answer",
        path: "/return",
        http: "",
        server: "",
        content: || SMALL_BODY.to_vec(),
    },
    Case { name: "file", title: "1 KiB file", path: "/file", http: "", server: "", content: file_body },
    Case {
        name: "open-file-cache",
        title: "1 KiB file with open_file_cache",
        path: "/file",
        http: "open_file_cache max=100;",
        server: "",
        content: file_body,
    },
    Case {
        name: "proxied",
        title: "2 bytes from a backend",
        path: "/proxied",
        http: "",
        server: "",
        content: || vec![b'x'; SMALL_BODY.len()],
    },
    Case {
        name: "cached",
        title: "2 bytes found in a cache",
        path: "/cached",
        http: "proxy_cache_path cache keys_zone=responses:1m; proxy_cache_valid 1h;",
        server: "location = /cached { proxy_pass http://backend/proxied; proxy_cache responses; }",
        content: || vec![b'x'; SMALL_BODY.len()],
    },
    Case {
        name: "limited",
        title: "2-byte answer with limit_req",
        path: "/limited",
        http: "limit_req_zone $binary_remote_addr zone=addresses:1m rate=1000000r/s;",
        server: "location = /limited { limit_req zone=addresses burst=10000 nodelay; try_files /return =404; }",
        content: || SMALL_BODY.to_vec(),
    },
    Case {
        name: "counted",
        title: "2-byte answer with limit_conn and status_zone",
        path: "/return",
        http: "limit_conn_zone $binary_remote_addr zone=addresses:1m;",
        server: "limit_conn addresses 10000; status_zone site;",
        content: || SMALL_BODY.to_vec(),
    },
];

/// Locked instructions of a function per request.
#[derive(Debug, Serialize)]
struct Row {
    server: String,
    case: &'static str,
    function: String,
    per_request: f64,
}

/// Counts for Gale, or for the chosen servers.
pub fn measure(options: &Options) -> Measured {
    let programs = instructions::programs(options, &["gale"])?;
    let is_chosen = |case: &Case| options.cases.as_ref().is_none_or(|names| names.iter().any(|name| name == case.name));
    let backend = Backend::start(options.client_core, SMALL_BODY.len())?;
    let (mut body, mut rows) = (String::new(), Vec::new());
    for program in &programs {
        let mut objects = Objects::default();
        for case in CASES.into_iter().filter(is_chosen) {
            let found = count(options, program, case, &backend, &mut objects)?;
            let all: f64 = found.iter().map(|row| row.per_request).sum();
            eprintln!("{}, {}: {all:.2}", program.label, case.name);
            let table = report::table_of(
                &found,
                &[
                    ("function", &|row: &Row| format!("`{}`", row.function)),
                    ("per request", &|row| format!("{:.2}", row.per_request)),
                ],
            );
            body.push_str(&format!("## {}: {}: {all:.2}\n\n{table}\n", program.label, case.title));
            rows.extend(found);
        }
    }
    let head = format!(
        "Locked instructions per request in user space, by the function of Gale that contains them, otherwise by that \
         of the library. Functions with fewer than {SHOWN_MIN} per request are omitted.\n\n"
    );
    Ok((Document::new("locked", "Locked instructions per request", &programs, &(head + &body), &rows)?, true))
}

fn count(
    options: &Options,
    program: &Program,
    case: Case,
    backend: &Backend,
    objects: &mut Objects,
) -> Result<Vec<Row>, String> {
    let asked = Asked {
        path: &|_| case.path.to_owned(),
        headers: &[],
        content: (case.content)(),
        is_short: false,
        batch: BATCH,
    };
    let (http, server) = (case.http.to_owned(), case.server.to_owned());
    let setting = Setting { http, server, backend: Some(backend.port), ..Setting::default() };
    let executed = callgrind::per_request(options, program, &setting, &asked)?;
    let mut locked = Vec::new();
    for (instruction, per_request) in executed.into_iter().filter(|(_, per_request)| *per_request >= SHOWN_MIN) {
        if objects.is_locked(&instruction)? {
            locked.push((instruction, per_request));
        }
    }
    let frames = callgrind::frames(locked.iter().map(|(instruction, _)| instruction))?;
    let mut functions: BTreeMap<String, f64> = BTreeMap::new();
    for (instruction, per_request) in &locked {
        let own = frames.get(instruction).and_then(|frames| Frame::own(frames));
        let name = own.map(|frame| format!("{} ({}:{})", frame.function, frame.file, frame.line));
        *functions.entry(name.unwrap_or_default()).or_default() += per_request;
    }
    let row = |(function, per_request)| Row { server: program.label.clone(), case: case.name, function, per_request };
    let mut rows: Vec<Row> = functions.into_iter().map(row).collect();
    rows.sort_by(|a, b| b.per_request.total_cmp(&a.per_request));
    Ok(rows)
}

/// Addresses of locked instructions, by object file.
#[derive(Default)]
struct Objects {
    locked: HashMap<String, HashSet<u64>>,
}

impl Objects {
    fn is_locked(&mut self, (object, address): &Instruction) -> Result<bool, String> {
        if !self.locked.contains_key(object) {
            // Code generated at run time is in no file.
            let text = if object.starts_with('/') {
                output(Command::new("objdump").args(["-d", "--no-show-raw-insn"]).arg(object))?
            } else {
                String::new()
            };
            self.locked.insert(object.clone(), locked_addresses(&text));
        }
        Ok(self.locked[object].contains(address))
    }
}

/// Parses lines of `ADDRESS:\tINSTRUCTION` and returns the addresses of locked instructions. (`xchg` of two registers
/// is not locked.)
fn locked_addresses(text: &str) -> HashSet<u64> {
    let locks = |words: &str| words.starts_with("lock ") || words.starts_with("xchg ") && words.contains('(');
    let address = |line: &str| {
        let (address, words) = line.split_once(":\t")?;
        u64::from_str_radix(address.trim(), 16).ok().filter(|_| locks(words.trim()))
    };
    text.lines().filter_map(address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exchange_of_registers_does_not_lock() {
        let text = "\n0000 <main>:\n  10:\tlock xadd %rax,(%rdx)\n  14:\txchg %ax,%ax\n  16:\txchg %rax,0x8(%rdx)\n  \
            1a:\tret\n";
        assert_eq!(locked_addresses(text), [0x10, 0x16].into());
    }
}
