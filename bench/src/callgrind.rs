//! callgrind: executions of each instruction of a server per request, with its place in the source.
//!
//! callgrind counts the executions of every address (`--dump-instr=yes`). addr2line reports the functions and files of
//! an address, including inlined ones.

use std::collections::HashMap;
use std::fs;
use std::process::Command;

use crate::instructions::{self, Asked, REQUESTS_FEW};
use crate::options::Options;
use crate::servers::{Program, Setting};

/// With compression, addresses would be relative to the line before.
const OPTIONS: [&str; 3] = ["--dump-instr=yes", "--compress-strings=no", "--compress-pos=no"];

/// An instruction: its object file, and its address in it.
pub type Instruction = (String, u64);

/// A function and a source line in it.
#[derive(Debug, Clone, PartialEq)]
pub struct Frame {
    pub function: String,
    /// Relative to `crates` in Gale's sources or `library` in Rust's, else the file name alone; `??` if unknown.
    pub file: String,
    pub line: String,
    pub is_of_gale: bool,
}

/// Returns the executions of each instruction per request.
pub fn per_request(
    options: &Options,
    program: &Program,
    setting: &Setting,
    asked: &Asked<'_>,
) -> Result<Vec<(Instruction, f64)>, String> {
    let more = options.requests.next_multiple_of(asked.batch);
    let run = |requests| {
        let (text, _) = instructions::run(options, program, setting, asked, requests, &OPTIONS)?;
        Ok::<_, String>(executions(&text))
    };
    let (few, many) = (run(REQUESTS_FEW)?, run(REQUESTS_FEW + more)?);
    let of_more = |(instruction, executed): (Instruction, u64)| {
        let before = few.get(&instruction).copied().unwrap_or(0);
        (instruction, (executed as f64 - before as f64) / f64::from(more))
    };
    Ok(many.into_iter().map(of_more).collect())
}

/// Counts executions. A line of costs is `ADDRESS LINE COUNT`; the one after `calls=` has the inclusive costs of a
/// call.
fn executions(text: &str) -> HashMap<Instruction, u64> {
    let mut counts: HashMap<Instruction, u64> = HashMap::new();
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

/// Returns the functions that each instruction is in, innermost first.
pub fn frames<'a>(
    instructions: impl Iterator<Item = &'a Instruction>,
) -> Result<HashMap<Instruction, Vec<Frame>>, String> {
    let mut by_object: HashMap<&str, Vec<u64>> = HashMap::new();
    for (object, address) in instructions {
        by_object.entry(object).or_default().push(*address);
    }
    let mut all = HashMap::new();
    for (object, addresses) in by_object {
        if !object.starts_with('/') {
            continue; // code generated at run time
        }
        let list = std::env::temp_dir().join(format!("gale-bench-{}.addresses", std::process::id()));
        let lines: String = addresses.iter().map(|address| format!("{address:#x}\n")).collect();
        fs::write(&list, lines).map_err(|error| format!("{}: {error}", list.display()))?;
        let mut command = Command::new("addr2line");
        command.args(["--addresses", "--functions", "--inlines", "--demangle", "--exe", object]);
        let text = output(command.arg(format!("@{}", list.display())))?;
        let _ = fs::remove_file(&list);
        let found = frames_of(&text);
        all.extend(found.into_iter().map(|(address, frames)| ((object.to_owned(), address), frames)));
    }
    Ok(all)
}

/// Runs a command and returns its standard output.
pub fn output(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{:?}: {error}", command.get_program()))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Parses the output of addr2line: an address, then pairs of lines with a function and its file and line.
fn frames_of(text: &str) -> Vec<(u64, Vec<Frame>)> {
    let mut all: Vec<(u64, Vec<Frame>)> = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let address = line.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok());
        match (address, all.last_mut()) {
            (Some(address), _) => all.push((address, Vec::new())),
            (None, Some((_, frames))) => frames.push(frame_of(line, lines.next().unwrap_or_default())),
            (None, None) => {}
        }
    }
    all
}

fn frame_of(function: &str, location: &str) -> Frame {
    let location = location.split(" (discriminator").next().unwrap_or(location);
    let (path, line) = location.rsplit_once(':').unwrap_or((location, "?"));
    let is_of_gale = (path.contains("/crates/") || path.starts_with("crates/")) && !path.contains("/registry/");
    let file = short_path(path).to_owned();
    Frame { function: without_hash(function).to_owned(), file, line: line.to_owned(), is_of_gale }
}

impl Frame {
    /// Returns the innermost frame in Gale, or the outermost frame if there is none.
    pub fn own(frames: &[Frame]) -> Option<&Frame> {
        frames.iter().find(|frame| frame.is_of_gale).or(frames.last())
    }
}

/// Removes the hash that the compiler appends.
fn without_hash(name: &str) -> &str {
    name.rsplit_once("::h").filter(|(_, hash)| hash.len() == 16).map_or(name, |(name, _)| name)
}

/// Removes the machine's directories: the path begins with the crate's folder.
fn short_path(path: &str) -> &str {
    let cut = |mark: &str| path.rfind(mark).map(|at| &path[at + mark.len()..]);
    cut("/crates/").or_else(|| cut("/library/")).or_else(|| path.rsplit('/').next()).unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_of_calls_are_not_counted_as_executions() {
        let text = "ob=/bin/gale\nfn=main\n0x10 1 5\n0x14 1 2\ncfn=other\ncalls=2 0x20 \n0x14 1 900\n0x10 1 1\n\
            ob=/libc\n0x10 0 7\n";
        let counts = executions(text);
        let of = |object: &str, address| counts[&(object.to_owned(), address)];
        assert_eq!((of("/bin/gale", 0x10), of("/bin/gale", 0x14), of("/libc", 0x10)), (6, 2, 7));
    }

    #[test]
    fn function_is_the_innermost_of_gale() {
        let text = "0x0000000000000010\ncore::sync::atomic::AtomicUsize::fetch_add\n\
                    /rustc/1/library/core/src/sync/atomic.rs:3\n\
                    gale_http::find::h0123456789abcdef\n/home/x/gale/crates/http/src/find.rs:7 (discriminator 2)\n\
                    gale_http::run\n/home/x/gale/crates/http/src/run.rs:8\n\
                    0x20\nmalloc\n/build/glibc/malloc.c:1\n";
        let all = frames_of(text);
        let own = |number: usize| {
            let (address, frames) = &all[number];
            let frame = Frame::own(frames).unwrap();
            (*address, &frame.function[..], &frame.file[..], &frame.line[..])
        };
        assert_eq!(all[0].1.len(), 3);
        assert_eq!(own(0), (0x10, "gale_http::find", "http/src/find.rs", "7"));
        assert_eq!(own(1), (0x20, "malloc", "malloc.c", "1"));
    }
}
