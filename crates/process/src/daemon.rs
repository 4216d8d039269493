//! Daemonization: the starting process waits until the server is ready, and exits with its result.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags};
use rustix::pipe::PipeFlags;

/// Held by the daemon until the first worker process is ready. If it is dropped without a release, the starting process
/// exits with 1.
pub(super) struct Waiting {
    pipe: std::fs::File,
}

impl Waiting {
    /// Lets the starting process exit with 0.
    pub fn release(mut self) {
        // The starting process may have been interrupted meanwhile.
        let _ = self.pipe.write_all(b"r");
    }
}

/// Result of `daemonize` in either process.
pub(super) enum Forked {
    /// This process is the daemon.
    Daemon(Waiting),
    /// This process started the daemon, which serves (`true`) or has failed and reported why.
    Starter(bool),
}

/// Forks; the child becomes leader of a new session with /dev/null as standard input and output. Standard error stays
/// open until the server is ready, so that its errors are seen.
///
/// # Errors
/// nginx's text: `fork() failed (…)`.
pub(super) fn daemonize() -> Result<Forked, String> {
    let failed = |call: &'static str| move |error: io::Error| format!("{call} failed{}", super::errno_text(&error));
    let (reader, writer) =
        rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(|error| failed("pipe()")(error.into()))?;
    // SAFETY: the process has one thread at this point (`Program::build` must not start any), so the child is a
    // complete copy and may do anything.
    match unsafe { libc::fork() } {
        -1 => Err(failed("fork()")(io::Error::last_os_error())),
        0 => {
            drop(reader);
            become_daemon()?;
            Ok(Forked::Daemon(Waiting { pipe: writer.into() }))
        }
        _ => {
            drop(writer);
            Ok(Forked::Starter(wait(reader)))
        }
    }
}

fn become_daemon() -> Result<(), String> {
    let failed = |call: &'static str| {
        move |error: rustix::io::Errno| format!("{call} failed{}", super::user::system_text(error))
    };
    rustix::process::setsid().map_err(failed("setsid()"))?;
    rustix::process::umask(Mode::empty());
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(failed("open(\"/dev/null\")"))?;
    rustix::stdio::dup2_stdin(&null).map_err(failed("dup2(STDIN)"))?;
    rustix::stdio::dup2_stdout(&null).map_err(failed("dup2(STDOUT)"))?;
    Ok(())
}

fn wait(reader: OwnedFd) -> bool {
    let mut byte = [0];
    matches!(std::fs::File::from(reader).read(&mut byte), Ok(1))
}
