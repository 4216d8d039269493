//! `cargo xtask fuzz [--minutes N] [TARGET…]`: runs the fuzz targets, all or those named, one by one with
//! AddressSanitizer for this time in total, and prints a table of the outcomes. It requires a nightly compiler and a
//! C++ compiler, and replaces `cargo fuzz run`, which need not be installed. Inputs with new coverage are stored in
//! `target/fuzz/corpus`, failing ones in `fuzz/artifacts`; the committed corpus is not modified.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use crate::packages::root;

const USAGE: &str = "usage: cargo xtask fuzz [--minutes N] [TARGET…]";

/// Default time for all targets together.
const MINUTES: u64 = 10;

/// Compiler options of cargo-fuzz: coverage for libFuzzer, AddressSanitizer, assertions.
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Cdebug-assertions -Zsanitizer=address";

struct Outcome {
    name: String,
    runs: String,
    /// Number of code edges that inputs have reached.
    coverage: String,
    is_well: bool,
}

pub fn main(args: &[String]) -> ExitCode {
    let (mut minutes, mut names, mut rest) = (MINUTES, Vec::new(), args.iter());
    while let Some(word) = rest.next() {
        match (word.as_str(), word.starts_with('-')) {
            ("--minutes", _) => match rest.next().and_then(|value| value.parse().ok()).filter(|minutes| *minutes > 0) {
                Some(value) => minutes = value,
                None => return usage(),
            },
            (_, true) => return usage(),
            (name, false) => names.push(name.to_owned()),
        }
    }
    match fuzz(&names, minutes * 60) {
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

fn fuzz(wanted: &[String], seconds: u64) -> Result<Vec<Outcome>, String> {
    let all = targets(&root().join("fuzz/fuzz_targets"))?;
    if let Some(unknown) = wanted.iter().find(|name| !all.contains(name)) {
        return Err(format!("there is no target {unknown}; there are {}", all.join(", ")));
    }
    let names = if wanted.is_empty() { all } else { wanted.to_vec() };
    let programs = build(&names)?;
    // At least a second: a target without time finds nothing.
    let seconds_each = (seconds / names.len() as u64).max(1);
    names.iter().map(|name| run(name, &programs.join(name), seconds_each)).collect()
}

/// Returns the names of the targets in order.
fn targets(folder: &Path) -> Result<Vec<String>, String> {
    let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let is_target = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "rs");
    let mut names: Vec<String> =
        paths.filter(is_target).filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())).collect();
    names.sort_unstable();
    Ok(names)
}

/// Builds the targets and returns their folder.
fn build(names: &[String]) -> Result<PathBuf, String> {
    let host = crate::host().ok_or("rustc does not say what it compiles for")?;
    let folder = root().join("target/fuzz");
    let mut cargo = Command::new("rustup");
    cargo.args(["run", "nightly", "cargo", "build", "--release", "--manifest-path"]);
    cargo.arg(root().join("fuzz/Cargo.toml"));
    // With a target, build scripts and macros are compiled without the sanitizer.
    cargo.args(["--target", &host, "--target-dir"]).arg(&folder);
    cargo.args(names.iter().flat_map(|name| ["--bin", name]));
    let status = cargo.env("RUSTFLAGS", FLAGS).status().map_err(|error| format!("rustup: {error}"))?;
    if !status.success() {
        return Err("the targets do not compile".to_owned());
    }
    Ok(folder.join(host).join("release"))
}

fn run(name: &str, program: &Path, seconds: u64) -> Result<Outcome, String> {
    let (kept, failed) = (root().join("target/fuzz/corpus").join(name), root().join("fuzz/artifacts").join(name));
    for folder in [&kept, &failed] {
        fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    println!("{name}: {seconds} seconds");
    let mut command = Command::new(program);
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
    fn targets_are_those_that_the_manifest_has() {
        let manifest = fs::read_to_string(root().join("fuzz/Cargo.toml")).expect("a manifest");
        let found = targets(&root().join("fuzz/fuzz_targets")).expect("a folder");
        let mut named: Vec<&str> = manifest
            .lines()
            .filter_map(|line| line.strip_prefix("path = \"fuzz_targets/")?.strip_suffix(".rs\""))
            .collect();
        named.sort_unstable();
        assert_eq!(found, named);
    }
}
