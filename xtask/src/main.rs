//! The chores that are not part of the product: `cargo xtask CHORE …`.
//!
//! This file only chooses the chore. It refuses to guess: an unknown chore or option is an error with the
//! usage, and every chore's exit status says whether what it checked holds (0), does not hold (1), or could
//! not be checked (2).

mod nginx_tests;

use std::process::{Command, ExitCode};

const USAGE: &str = "\
usage: cargo xtask CHORE [OPTION…]

  nginx-tests   run nginx's own test suite against a binary (see tests/nginx/README.md)
  bench         measure Gale beside other servers (see bench/README.md)

`cargo xtask CHORE --help` lists a chore's options.
";

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let chore = args.next();
    let rest: Vec<String> = args.collect();
    match chore.as_deref() {
        Some("nginx-tests") => nginx_tests::main(&rest),
        Some("bench") => bench(&rest),
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

/// The measurements are a program of their own, compiled with optimisation: this one is not.
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
