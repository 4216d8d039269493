//! The page cache helper of a worker process: a process that may ask the kernel which parts of any file are in memory.
//!
//! The program defines the questions and answers. This file sets the rights of the process: the account of the worker
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
    // This process must not keep a file system mounted.
    env::set_current_dir("/")?;
    restrict()?;
    match program.serve_page_cache_questions(socket)? {}
}

fn restrict() -> io::Result<()> {
    let permitted = rustix::thread::capabilities(None)?.permitted;
    let kept = permitted & CapabilitySet::FOWNER;
    // Its answers take microseconds, and loops with many clients wait for them. Failure, for lack of permission, is
    // ignored.
    let _ = rustix::process::setpriority_process(None, PRIORITY);
    if let Some(account) = spawn::inherited_account()? {
        // No effect without root.
        account.assume(kept).map_err(io::Error::other)?;
    }
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}
