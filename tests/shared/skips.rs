//! What of the tests this machine cannot do. Other crates include this file by its path.
//!
//! A test that is not done passes all the same, so each one says so here. `.ci/run` compares what was said with
//! `tests/expected-skips.txt`.

use std::fmt::Display;
use std::fs::File;
use std::io::Write;

/// Registers that the running test, or a part of it, is not done here. The reason is the same in every run: no numbers
/// of processes, no messages of programs.
pub fn skip(reason: impl Display) {
    // The harness names the thread by the test.
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a thread of a test");
    let line = format!("{}::{test}: {reason}\n", env!("CARGO_CRATE_NAME"));
    // No macro: the harness would keep what is printed to itself, since the test passes.
    let _ = std::io::stderr().write_all(format!("skipped: {line}").as_bytes());
    if let Some(path) = std::env::var_os("GALE_SKIPS") {
        let file = File::options().append(true).create(true).open(path);
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect("the file of GALE_SKIPS can be written");
    }
}
