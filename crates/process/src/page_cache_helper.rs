//! The page cache helper of a worker process: a process that may ask the kernel what of any file is in memory.
//!
//! The questions and answers are the program's. This file gives the process its rights: the account of the worker
//! process, CAP_FOWNER and no other capability.

use std::env;
use std::io;
use std::process::ExitCode;

use rustix::thread::{CapabilitySet, CapabilitySets};

use super::program::Program;
use super::spawn;

/// Nice value of the helper.
const PRIORITY: i32 = -10;

/// Runs the helper until its worker process is gone.
pub(super) fn run<P: Program>(program: &P) -> io::Result<ExitCode> {
    let socket = spawn::inherited_socket()?;
    // No file system has to stay mounted for this process.
    env::set_current_dir("/")?;
    restrict()?;
    match program.serve_page_cache_questions(socket)? {}
}

fn restrict() -> io::Result<()> {
    let permitted = rustix::thread::capabilities(None)?.permitted;
    let kept = permitted & CapabilitySet::FOWNER;
    // Its answers take microseconds, and loops with many clients wait for them. Without the right it does without.
    let _ = rustix::process::setpriority_process(None, PRIORITY);
    if let Some(account) = spawn::inherited_account()? {
        // Does nothing without root.
        account.assume(kept).map_err(io::Error::other)?;
    }
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}
