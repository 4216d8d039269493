//! `mutate TARGET SECONDS SEED ARTIFACTS`: runs a target on mutations of its corpus for this time. The first input that
//! fails, or takes longer than ten seconds, is stored in the folder ARTIFACTS and ends the program with status 1.
//! Otherwise it prints the number of inputs.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use gale_fuzz::{Mutator, Target, corpus, find};

/// Longest time of one input. A debug build on a busy machine stays far below it.
const INPUT_TIME_MAX: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, seconds, seed, artifacts] = &arguments[..] else { return usage() };
    match (find(name), seconds.parse(), seed.parse()) {
        (Some(target), Ok(seconds), Ok(seed)) => run(target, Duration::from_secs(seconds), seed, Path::new(artifacts)),
        _ => usage(),
    }
}

fn usage() -> ExitCode {
    eprintln!("usage: mutate TARGET SECONDS SEED ARTIFACTS");
    ExitCode::from(2)
}

fn run(target: &'static Target, time: Duration, seed: u64, artifacts: &Path) -> ExitCode {
    let mut mutator = Mutator::new(seed, corpus(target.name));
    let (inputs, received) = channel::<Vec<u8>>();
    let (results, ended) = channel();
    // Another thread, so that an input that never ends is found.
    std::thread::spawn(move || {
        for input in received {
            let is_well = catch_unwind(AssertUnwindSafe(|| (target.run)(&input))).is_ok();
            if results.send(is_well).is_err() {
                return;
            }
        }
    });
    let (end, mut count) = (Instant::now() + time, 0_u64);
    while Instant::now() < end {
        let input = mutator.next_input();
        inputs.send(input.clone()).expect("the thread catches panics");
        let what = match ended.recv_timeout(INPUT_TIME_MAX) {
            Ok(true) => {
                count += 1;
                continue;
            }
            Err(RecvTimeoutError::Timeout) => "slow",
            Ok(false) | Err(RecvTimeoutError::Disconnected) => "crash",
        };
        let path = artifacts.join(format!("{what}-{seed}-{count}"));
        match fs::create_dir_all(artifacts).and_then(|()| fs::write(&path, &input)) {
            Ok(()) => eprintln!("{}: {what} after {count} inputs: {}", target.name, path.display()),
            Err(error) => eprintln!("{}: {what}: {error}: b\"{}\"", target.name, input.escape_ascii()),
        }
        println!("{count}");
        return ExitCode::from(1);
    }
    println!("{count}");
    ExitCode::SUCCESS
}
