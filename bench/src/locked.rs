//! locked: how often a request locks a cache line: the instructions with a `lock` prefix, and `xchg` with memory, each
//! of which takes the line from every other processor.
//!
//! callgrind counts every instruction (`--dump-instr=yes`), objdump tells which ones lock, and addr2line in which
//! function of Gale's they are. So the counts are exact, also where nobody contends. They do not tell whether other
//! workers write the same line; that is read in the source, and listed in ARCHITECTURE.md. A plain store to a line that
//! others read is not found here.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::process::Command;

use serde::Serialize;

use crate::Measured;
use crate::behind::Behind;
use crate::instructions::{self, Asked, BATCH, REQUESTS_FEW};
use crate::options::Options;
use crate::report::{self, Document};
use crate::servers::{Program, SMALL_BODY, Setting, file_body};

/// Least that is shown, of one request: what the loop does once in so many turns is no request's.
const SHOWN_MIN: f64 = 0.005;

/// Names compressed, addresses would be relative to the line before.
const CALLGRIND_OPTIONS: [&str; 3] = ["--dump-instr=yes", "--compress-strings=no", "--compress-pos=no"];

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
        title: "2 bytes from a server behind",
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
        server: "location = /cached { proxy_pass http://behind/proxied; proxy_cache responses; }",
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

/// Locked instructions of one function, for each request.
#[derive(Debug, Serialize)]
struct Row {
    server: String,
    case: &'static str,
    function: String,
    per_request: f64,
}

/// Counts for Gale, or for the servers that were chosen.
pub fn measure(options: &Options) -> Measured {
    let programs = instructions::programs(options, &["gale"])?;
    let is_chosen = |case: &Case| options.cases.as_ref().is_none_or(|names| names.iter().any(|name| name == case.name));
    let behind = Behind::start(options.client_core, SMALL_BODY.len())?;
    let (mut body, mut rows) = (String::new(), Vec::new());
    for program in &programs {
        let mut objects = Objects::default();
        for case in CASES.into_iter().filter(is_chosen) {
            let found = count(options, program, case, &behind, &mut objects)?;
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
        "Locked instructions per request in user space, by the function of Gale's that they are in, or else by the \
         library's. What comes less often than {SHOWN_MIN} times a request is left out.\n\n"
    );
    Ok((Document::new("locked", "Locked instructions per request", &programs, &(head + &body), &rows)?, true))
}

fn count(
    options: &Options,
    program: &Program,
    case: Case,
    behind: &Behind,
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
    let setting = Setting { http, server, behind: Some(behind.port), ..Setting::default() };
    let more = options.requests.next_multiple_of(BATCH);
    let run = |requests| {
        let (text, _) = instructions::run(options, program, &setting, &asked, requests, &CALLGRIND_OPTIONS)?;
        Ok::<_, String>(executions(&text))
    };
    let (few, many) = (run(REQUESTS_FEW)?, run(REQUESTS_FEW + more)?);
    let mut functions: BTreeMap<String, f64> = BTreeMap::new();
    for (place, &executed) in &many {
        let of_more = executed.saturating_sub(few.get(place).copied().unwrap_or(0)) as f64 / f64::from(more);
        if of_more >= SHOWN_MIN && objects.is_locked(place)? {
            *functions.entry(objects.function(place)?).or_default() += of_more;
        }
    }
    let row = |(function, per_request)| Row { server: program.label.clone(), case: case.name, function, per_request };
    let mut rows: Vec<Row> = functions.into_iter().map(row).collect();
    rows.sort_by(|a, b| b.per_request.total_cmp(&a.per_request));
    Ok(rows)
}

/// An instruction: the file that it is in, and its address there.
type Place = (String, u64);

/// How often each instruction was executed. A line of costs is `ADDRESS LINE COUNT`; one after `calls=` has the costs
/// of what was called.
fn executions(text: &str) -> HashMap<Place, u64> {
    let mut counts: HashMap<Place, u64> = HashMap::new();
    let mut object = String::new();
    let mut is_of_a_call = false;
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("ob=") {
            name.clone_into(&mut object);
        } else if line.starts_with("calls=") {
            is_of_a_call = true;
        } else if let Some(line) = line.strip_prefix("0x") {
            let mut words = line.split(' ');
            let address = words.next().and_then(|word| u64::from_str_radix(word, 16).ok());
            let count = words.nth(1).and_then(|word| word.parse::<u64>().ok());
            if let (Some(address), Some(count), false) = (address, count, is_of_a_call) {
                *counts.entry((object.clone(), address)).or_default() += count;
            }
            is_of_a_call = false;
        }
    }
    counts
}

/// What is known of the files that have instructions.
#[derive(Default)]
struct Objects {
    locked: HashMap<String, HashSet<u64>>,
    functions: HashMap<Place, String>,
}

impl Objects {
    fn is_locked(&mut self, (object, address): &Place) -> Result<bool, String> {
        if !self.locked.contains_key(object) {
            // Code that was made at run time is in no file.
            let text = if object.starts_with('/') {
                output(Command::new("objdump").args(["-d", "--no-show-raw-insn"]).arg(object))?
            } else {
                String::new()
            };
            self.locked.insert(object.clone(), locked_addresses(&text));
        }
        Ok(self.locked[object].contains(address))
    }

    /// The innermost function of Gale's that an instruction is in, with all that is inlined; else the outermost of all.
    fn function(&mut self, place: &Place) -> Result<String, String> {
        if let Some(function) = self.functions.get(place) {
            return Ok(function.clone());
        }
        let mut command = Command::new("addr2line");
        command.args(["--functions", "--inlines", "--demangle", "--exe"]).arg(&place.0).arg(format!("{:#x}", place.1));
        let function = function_of(&output(&mut command)?);
        self.functions.insert(place.clone(), function.clone());
        Ok(function)
    }
}

fn output(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{:?}: {error}", command.get_program()))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// In lines of `ADDRESS:\tINSTRUCTION`, those that lock. (`xchg` of two registers does not.)
fn locked_addresses(text: &str) -> HashSet<u64> {
    let locks = |words: &str| words.starts_with("lock ") || words.starts_with("xchg ") && words.contains('(');
    let address = |line: &str| {
        let (address, words) = line.split_once(":\t")?;
        u64::from_str_radix(address.trim(), 16).ok().filter(|_| locks(words.trim()))
    };
    text.lines().filter_map(address).collect()
}

/// Of pairs of lines, function and file with line, the innermost first.
fn function_of(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let name = |pair: &&[&str]| format!("{} ({})", without_hash(pair[0]), short_path(pair[1]));
    let mut pairs = lines.chunks_exact(2);
    let is_own = |pair: &&[&str]| {
        (pair[1].contains("/crates/") || pair[1].starts_with("crates/")) && !pair[1].contains("/registry/")
    };
    let own = pairs.clone().find(is_own);
    own.or_else(|| pairs.next_back()).as_ref().map(name).unwrap_or_default()
}

/// Without the hash that the compiler adds.
fn without_hash(name: &str) -> &str {
    name.rsplit_once("::h").filter(|(_, hash)| hash.len() == 16).map_or(name, |(name, _)| name)
}

/// No path of the machine: from the crate's folder on.
fn short_path(path: &str) -> &str {
    let path = path.split(" (discriminator").next().unwrap_or(path);
    let cut = |mark: &str| path.rfind(mark).map(|at| &path[at + mark.len()..]);
    cut("/crates/").or_else(|| cut("/library/")).or_else(|| path.rsplit('/').next()).unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_of_calls_are_not_counted_as_executions() {
        let text = "ob=/bin/gale\nfn=main\n0x10 1 5\n0x14 1 2\ncfn=other\ncalls=2 0x20 \n0x14 1 900\n0x10 1 1\nob=/libc\n0x10 0 7\n";
        let counts = executions(text);
        let of = |object: &str, address| counts[&(object.to_owned(), address)];
        assert_eq!((of("/bin/gale", 0x10), of("/bin/gale", 0x14), of("/libc", 0x10)), (6, 2, 7));
    }

    #[test]
    fn exchange_of_registers_does_not_lock() {
        let text = "\n0000 <main>:\n  10:\tlock xadd %rax,(%rdx)\n  14:\txchg %ax,%ax\n  16:\txchg %rax,0x8(%rdx)\n  1a:\tret\n";
        assert_eq!(locked_addresses(text), [0x10, 0x16].into());
    }

    #[test]
    fn function_is_the_innermost_of_gale() {
        let text = "core::sync::atomic::AtomicUsize::fetch_add\n/rustc/1/library/core/src/sync/atomic.rs:3\n\
                    gale_http::find::h0123456789abcdef\n/home/x/gale/crates/http/src/find.rs:7 (discriminator 2)\n\
                    gale_http::run\n/home/x/gale/crates/http/src/run.rs:8\n";
        assert_eq!(function_of(text), "gale_http::find (http/src/find.rs:7)");
        assert_eq!(function_of("malloc\n/build/glibc/malloc.c:1\n"), "malloc (malloc.c:1)");
    }
}
