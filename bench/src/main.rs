//! gale-bench: measures Gale beside nginx, h2o, haproxy and a bare floor; `cargo xtask bench` builds and starts it.
//!
//! It is a program of its own, and not a part of xtask, because the floor and the load must be compiled with
//! optimisation while the chores are not. It measures and reports, and passes judgement only where a figure is
//! absolute (a failed request, a connection that did not survive): the exit status is then 1. It refuses to
//! measure a server that does not answer correctly first.

mod cpu;
mod floor;
mod load;
mod memory;
mod options;
mod process;
mod reload;
mod report;
mod respawn;
mod servers;
mod syscalls;
mod wrk;

use std::process::ExitCode;

use options::Options;

/// What a measurement gives back: the document and whether every absolute figure holds.
type Measured = Result<(report::Document, bool), String>;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(args: &[String]) -> Result<bool, String> {
    let Some((measurement, rest)) = args.split_first() else {
        eprint!("{}", options::USAGE);
        return Ok(false);
    };
    if measurement == "--help" || rest.iter().any(|arg| arg == "--help") {
        print!("{}", options::USAGE);
        return Ok(true);
    }
    if measurement == "floor" {
        return floor::main(rest).map(|()| true);
    }
    let options = Options::parse(rest)?;
    let one = |measure: fn(&Options) -> Measured| {
        let (document, holds) = measure(&options)?;
        document.publish(&options.results)?;
        Ok::<bool, String>(holds)
    };
    match measurement.as_str() {
        "cpu" => one(cpu::measure),
        "syscalls" => one(syscalls::measure),
        "reload" => one(reload::measure),
        "respawn" => one(respawn::measure),
        "all" => {
            let measurements = [cpu::measure, syscalls::measure, reload::measure, respawn::measure];
            // All of them, also after one that does not hold.
            let mut holds = true;
            for measure in measurements {
                holds &= one(measure)?;
            }
            Ok(holds)
        }
        other => Err(format!("there is no measurement \"{other}\"\n\n{}", options::USAGE)),
    }
}
