//! Registers tests that this machine cannot run. Other crates include this file by its path.
//!
//! A skipped test passes, so each one reports itself here. `.ci/run` compares the reports with
//! `tests/expected-skips.txt`.

use std::fmt::Display;
use std::fs::File;
use std::io::Write;

/// Reports that the running test, or a part of it, is skipped. The reason is the same in every run: it contains no
/// process numbers and no messages of programs.
pub fn skip(reason: impl Display) {
    // The harness names the thread after the test.
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a thread of a test");
    let line = format!("{}::{test}: {reason}\n", env!("CARGO_CRATE_NAME"));
    // Not a macro: the harness would capture its output, because the test passes.
    let _ = std::io::stderr().write_all(format!("skipped: {line}").as_bytes());
    if let Some(path) = std::env::var_os("GALE_SKIPS") {
        let file = File::options().append(true).create(true).open(path);
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect("the file of GALE_SKIPS can be written");
    }
}
