//! `cargo xtask fuzz [--minutes N] [--seed N] [TARGET…]`: runs the fuzz targets, all or those named, one by one for
//! this time in total, and prints a table of the outcomes.
//!
//! With a nightly compiler, a C++ compiler and the crate libfuzzer-sys it runs libFuzzer with AddressSanitizer, and
//! replaces `cargo fuzz run`, which need not be installed: inputs with new coverage are stored in `target/fuzz/corpus`.
//! Otherwise it says so, and runs seeded mutations of the committed corpus in a debug build
//! (`fuzz/examples/mutate.rs`), without coverage. Failing inputs are stored in `fuzz/artifacts`; the committed corpus
//! is not modified.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::SystemTime;

use crate::packages::root;

const USAGE: &str = "usage: cargo xtask fuzz [--minutes N] [--seed N] [TARGET…]";

/// Default time for all targets together.
const MINUTES: u64 = 10;

/// Folder of libFuzzer's program, a workspace of its own.
const LIBFUZZER: &str = "fuzz/libfuzzer";

/// Compiler options of cargo-fuzz: coverage for libFuzzer, AddressSanitizer, assertions.
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Cdebug-assertions -Zsanitizer=address";

struct Outcome {
    name: String,
    runs: String,
    /// Number of code edges that inputs have reached; empty without libFuzzer.
    coverage: String,
    is_well: bool,
}

pub fn main(args: &[String]) -> ExitCode {
    let (mut minutes, mut seed, mut names, mut rest) = (MINUTES, None, Vec::new(), args.iter());
    let number = |word: Option<&String>| word.and_then(|value| value.parse::<u64>().ok());
    while let Some(word) = rest.next() {
        match (word.as_str(), word.starts_with('-')) {
            ("--minutes", _) => match number(rest.next()).filter(|minutes| *minutes > 0) {
                Some(value) => minutes = value,
                None => return usage(),
            },
            ("--seed", _) => match number(rest.next()) {
                Some(value) => seed = Some(value),
                None => return usage(),
            },
            (_, true) => return usage(),
            (name, false) => names.push(name.to_owned()),
        }
    }
    match fuzz(&names, minutes * 60, seed.unwrap_or_else(seed_of_now)) {
        Ok(outcomes) => report(&outcomes),
        Err(error) => {
            eprintln!("xtask fuzz: {error}");
            ExitCode::from(2)
        }
    }
}

fn usage() -> ExitCode {
    eprintln!("{USAGE}");
    ExitCode::from(2)
}

/// Another one each second; it is printed, so that a run can be repeated.
fn seed_of_now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(1, |time| time.as_secs())
}

fn fuzz(wanted: &[String], seconds: u64, seed: u64) -> Result<Vec<Outcome>, String> {
    let all = targets(&root().join("fuzz/src/targets"))?;
    if let Some(unknown) = wanted.iter().find(|name| !all.contains(name)) {
        return Err(format!("there is no target {unknown}; there are {}", all.join(", ")));
    }
    let names = if wanted.is_empty() { all } else { wanted.to_vec() };
    // At least a second: a target without time finds nothing.
    let seconds_each = (seconds / names.len() as u64).max(1);
    match lacking() {
        None => {
            let program = build_libfuzzer()?;
            names.iter().map(|name| run_libfuzzer(name, &program, seconds_each)).collect()
        }
        Some(lacks) => {
            println!("{lacks}: mutations without coverage and AddressSanitizer instead, with the seed {seed}");
            let program = build_mutations()?;
            names.iter().map(|name| run_mutations(name, &program, seconds_each, seed)).collect()
        }
    }
}

/// Returns what libFuzzer lacks here; `None` if it can be compiled.
fn lacking() -> Option<&'static str> {
    let succeeds = |command: &mut Command| {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    if !succeeds(Command::new("rustup").args(["run", "nightly", "rustc", "--version"])) {
        return Some("There is no nightly compiler");
    }
    if !succeeds(Command::new("c++").arg("--version")) {
        return Some("There is no C++ compiler");
    }
    let manifest = root().join(LIBFUZZER).join("Cargo.toml");
    let mut fetch = Command::new("rustup");
    fetch.args(["run", "nightly", "cargo", "fetch", "--locked", "--manifest-path"]).arg(manifest);
    (!succeeds(&mut fetch)).then_some("The crate libfuzzer-sys is not at hand")
}

/// Returns the names of the targets in order.
fn targets(folder: &Path) -> Result<Vec<String>, String> {
    let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let is_target = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "rs");
    let stems = paths.filter(is_target).filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()));
    let mut names: Vec<String> = stems.filter(|name| name != "mod").collect();
    names.sort_unstable();
    Ok(names)
}

/// Builds libFuzzer above all targets and returns the program.
fn build_libfuzzer() -> Result<PathBuf, String> {
    let host = crate::host().ok_or("rustc does not say what it compiles for")?;
    let folder = root().join("target/fuzz");
    let mut cargo = Command::new("rustup");
    cargo.args(["run", "nightly", "cargo", "build", "--release", "--manifest-path"]);
    cargo.arg(root().join(LIBFUZZER).join("Cargo.toml"));
    // With a target, build scripts and macros are compiled without the sanitizer.
    cargo.args(["--target", &host, "--target-dir"]).arg(&folder);
    compile(cargo.env("RUSTFLAGS", FLAGS))?;
    Ok(folder.join(host).join("release/gale-libfuzzer"))
}

fn build_mutations() -> Result<PathBuf, String> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root()).args(["build", "-p", "gale-fuzz", "--example", "mutate"]);
    compile(&mut cargo)?;
    Ok(root().join("target/debug/examples/mutate"))
}

fn compile(cargo: &mut Command) -> Result<(), String> {
    let status = cargo.status().map_err(|error| format!("{}: {error}", cargo.get_program().display()))?;
    if status.success() { Ok(()) } else { Err("the targets do not compile".to_owned()) }
}

fn run_mutations(name: &str, program: &Path, seconds: u64, seed: u64) -> Result<Outcome, String> {
    println!("{name}: {seconds} seconds");
    let mut command = Command::new(program);
    command.args([name, &seconds.to_string(), &seed.to_string()]).arg(root().join("fuzz/artifacts").join(name));
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{}: {error}", program.display()))?;
    let is_well = output.status.success();
    if !is_well {
        eprintln!("{}", String::from_utf8_lossy(&output.stderr));
    }
    let runs = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    Ok(Outcome { name: name.to_owned(), runs, coverage: String::new(), is_well })
}

fn run_libfuzzer(name: &str, program: &Path, seconds: u64) -> Result<Outcome, String> {
    let (kept, failed) = (root().join("target/fuzz/corpus").join(name), root().join("fuzz/artifacts").join(name));
    for folder in [&kept, &failed] {
        fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    println!("{name}: {seconds} seconds");
    let mut command = Command::new(program);
    command.env("GALE_FUZZ_TARGET", name);
    command.arg(format!("-max_total_time={seconds}")).arg("-print_final_stats=1");
    // With a slash the prefix is a folder.
    command.arg(format!("-artifact_prefix={}/", failed.display())).arg(&kept);
    let committed = root().join("fuzz/corpus").join(name);
    if committed.is_dir() {
        command.arg(committed);
    }
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{}: {error}", program.display()))?;
    let log = String::from_utf8_lossy(&output.stderr);
    let is_well = output.status.success();
    if !is_well {
        // Prints the log from the finding on.
        let at = log.find("==ERROR").or_else(|| log.find("panicked")).unwrap_or(0);
        eprintln!("{}", &log[at..]);
    }
    let runs = last_number(&log, "stat::number_of_executed_units:");
    Ok(Outcome { name: name.to_owned(), runs, coverage: last_number(&log, "cov:"), is_well })
}

/// Returns the number after the last occurrence of the word.
fn last_number(log: &str, word: &str) -> String {
    let behind = log.rfind(word).map_or("", |at| log[at + word.len()..].trim_start());
    behind.chars().take_while(char::is_ascii_digit).collect()
}

fn report(outcomes: &[Outcome]) -> ExitCode {
    println!("\n| target | runs | coverage | |\n|---|--:|--:|---|");
    for Outcome { name, runs, coverage, is_well } in outcomes {
        let result = if *is_well { "" } else { "failed: fuzz/artifacts" };
        println!("| {name} | {runs} | {coverage} | {result} |");
    }
    if outcomes.iter().all(|outcome| outcome.is_well) { ExitCode::SUCCESS } else { ExitCode::from(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_number_is_that_of_the_last_line() {
        let log = "#1 INITED cov: 5 ft: 6\n#9 DONE cov: 71 ft: 80\nstat::number_of_executed_units: 900\n";
        assert_eq!(last_number(log, "cov:"), "71");
        assert_eq!(last_number(log, "stat::number_of_executed_units:"), "900");
        assert_eq!(last_number("", "cov:"), "");
    }

    #[test]
    fn targets_are_those_of_the_table() {
        let table = fs::read_to_string(root().join("fuzz/src/targets/mod.rs")).expect("a table");
        let found = targets(&root().join("fuzz/src/targets")).expect("a folder");
        let (_, rows) = table.split_once("\ntargets!(").expect("a list");
        let named: Vec<&str> =
            rows.lines().filter_map(|line| line.trim().strip_suffix(',')).filter(|name| !name.is_empty()).collect();
        assert_eq!(found, named);
    }
}
