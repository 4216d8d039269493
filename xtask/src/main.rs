//! Development tasks, which are not part of the product: `cargo xtask CHORE …`.
//!
//! This file selects the task. An unknown task or option is an error that prints the usage. The exit status is 0 if a
//! check passes, 1 if it fails, and 2 if it could not be made.

mod deny;
mod fuzz;
mod nginx_tests;
mod packages;
mod sbom;

use std::process::{Command, ExitCode};

const USAGE: &str = "\
usage: cargo xtask CHORE [OPTION…]

  nginx-tests   run nginx's own test suite against a binary (see tests/nginx/README.md)
  bench         measure Gale beside other servers (see bench/README.md)
  deny          check licences, sources, bans and known advisories of all packages, without a network
  sbom          write the packages that are in the program as CycloneDX, to target/sbom/gale.cdx.json
  fuzz          run the fuzz targets in turn, with libFuzzer if it is at hand: [--minutes N] [--seed N] [TARGET…]
  campaign      attack Gale and have everything around it fail, and tell what it lost (see bench/README.md)
  sanitize      run the runtime's tests under AddressSanitizer (needs a nightly compiler); options go to cargo test

`cargo xtask CHORE --help` lists a chore's options.
";

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let chore = args.next();
    let rest: Vec<String> = args.collect();
    match chore.as_deref() {
        Some("nginx-tests") => nginx_tests::main(&rest),
        Some("bench") => bench(&rest),
        Some("deny") => deny::main(&rest),
        Some("fuzz") => fuzz::main(&rest),
        Some("sbom") => sbom::main(&rest),
        Some("campaign") => bench(&[vec!["campaign".to_owned()], rest].concat()),
        Some("sanitize") => sanitize(&rest),
        Some("help" | "--help" | "-h") => {
            print!("{USAGE}");
            ExitCode::SUCCESS
        }
        Some(other) => {
            eprint!("xtask: there is no chore \"{other}\"\n\n{USAGE}");
            ExitCode::from(2)
        }
        None => {
            eprint!("{USAGE}");
            ExitCode::from(2)
        }
    }
}

/// Runs the benchmarks, which are a separate program compiled with optimisation.
fn bench(args: &[String]) -> ExitCode {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let run = ["run", "--quiet", "--release", "--package", "gale-bench", "--"];
    match Command::new(cargo).args(run).args(args).status() {
        Ok(status) => ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(2)),
        Err(error) => {
            eprintln!("xtask bench: cargo: {error}");
            ExitCode::from(2)
        }
    }
}

/// Runs the tests of the runtime, which has nearly all `unsafe` code, with AddressSanitizer. Many of them drop futures
/// and streams in every state. The sanitizer finds use after free and leaks, but does not see writes by the kernel.
fn sanitize(args: &[String]) -> ExitCode {
    let Some(host) = host() else {
        eprintln!("xtask sanitize: rustc does not report its target");
        return ExitCode::from(2);
    };
    let mut tests = Command::new("rustup");
    tests.args(["run", "nightly", "cargo", "test", "--package", "gale-runtime", "--package", "gale-files", "--tests"]);
    // With a target, build scripts and macros are compiled without the sanitizer. A separate folder keeps other builds
    // valid.
    tests.args(["--target", &host, "--target-dir", "target/sanitizer"]).args(args);
    tests.env("RUSTFLAGS", "-Zsanitizer=address");
    let suppressions = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/runtime/tests/leaks.txt");
    tests.env("LSAN_OPTIONS", format!("suppressions={suppressions},print_suppressions=0"));
    match tests.status() {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(1),
        Err(error) => {
            eprintln!("xtask sanitize: rustup: {error}");
            ExitCode::from(2)
        }
    }
}

fn host() -> Option<String> {
    let output = Command::new("rustc").arg("-vV").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.lines().find_map(|line| line.strip_prefix("host: "))?.to_owned())
}
