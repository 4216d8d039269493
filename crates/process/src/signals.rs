//! Signals as descriptors: blocked for the whole process, read from a signalfd. No code runs in a signal handler.
//!
//! The names and meanings are nginx's. <https://nginx.org/en/docs/control.html>

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::event::Timespec;

/// A signal that the server handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Signal {
    /// SIGTERM, SIGINT: stop fast.
    Terminate,
    /// SIGQUIT: stop after all requests have been answered.
    Quit,
    /// SIGHUP: reload the configuration.
    Reconfigure,
    /// SIGUSR1: reopen the logs.
    Reopen,
    /// SIGWINCH: stop accepting, in an upgrade.
    StopAccepting,
    /// SIGUSR2: start a new binary.
    ChangeBinary,
    /// SIGCHLD: a child process has exited.
    Child,
    /// A signal that is only logged.
    Other,
}

/// Number, name, meaning. SIGPIPE is missing because Rust ignores it: if it were blocked, it would be queued
/// nevertheless.
const SIGNALS: [(i32, &str, Signal); 10] = [
    (libc::SIGHUP, "SIGHUP", Signal::Reconfigure),
    (libc::SIGUSR1, "SIGUSR1", Signal::Reopen),
    (libc::SIGWINCH, "SIGWINCH", Signal::StopAccepting),
    (libc::SIGTERM, "SIGTERM", Signal::Terminate),
    (libc::SIGQUIT, "SIGQUIT", Signal::Quit),
    (libc::SIGUSR2, "SIGUSR2", Signal::ChangeBinary),
    (libc::SIGALRM, "SIGALRM", Signal::Other),
    (libc::SIGINT, "SIGINT", Signal::Terminate),
    (libc::SIGIO, "SIGIO", Signal::Other),
    (libc::SIGCHLD, "SIGCHLD", Signal::Child),
];

pub(super) struct Arrived {
    pub signal: Signal,
    number: i32,
    name: &'static str,
    sender: u32,
}

impl Arrived {
    /// nginx's line: `signal 1 (SIGHUP) received from 123, reconfiguring`.
    pub fn message(&self, action: &str) -> String {
        let (number, name) = (self.number, self.name);
        match self.sender {
            0 => format!("signal {number} ({name}) received{action}"),
            sender => format!("signal {number} ({name}) received from {sender}{action}"),
        }
    }
}

/// The signals of this process, queued since its creation.
pub(super) struct Signals {
    descriptor: OwnedFd,
}

impl Signals {
    /// Blocks the signals for this thread and those that it starts from now on.
    pub fn take() -> io::Result<Signals> {
        // A careless parent may have it ignored, in which case the kernel would reap our child processes.
        set_disposition(libc::SIGCHLD, libc::SIG_DFL)?;
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `sigemptyset` initialises the set that the following calls read; all pointers are to locals.
        let descriptor = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for (number, _, _) in SIGNALS {
                libc::sigaddset(set.as_mut_ptr(), number);
            }
            let code = libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
            if code != 0 {
                return Err(io::Error::from_raw_os_error(code));
            }
            libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `signalfd` has just returned this descriptor; it has no other owner.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        Ok(Signals { descriptor })
    }

    /// Returns the next signal, if one has arrived.
    pub fn next(&self) -> Option<Arrived> {
        let mut information = MaybeUninit::<libc::signalfd_siginfo>::zeroed();
        let length = size_of::<libc::signalfd_siginfo>();
        // SAFETY: the buffer is `length` bytes of writable memory.
        let read = unsafe { libc::read(self.descriptor.as_raw_fd(), information.as_mut_ptr().cast(), length) };
        if read != length as isize {
            return None;
        }
        // SAFETY: plain integers, zeroed before and filled by the kernel.
        let information = unsafe { information.assume_init() };
        let number = information.ssi_signo as i32;
        let (_, name, signal) = SIGNALS.into_iter().find(|row| row.0 == number)?;
        Some(Arrived { signal, number, name, sender: information.ssi_pid })
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Ignores signals with orders for master and worker, in a process that is part of the service but takes no orders.
pub(super) fn ignore_orders() -> io::Result<()> {
    ignore(&[libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2, libc::SIGWINCH])
}

/// Also ignores signals that end the service, in a process that must not exit before another one.
pub(super) fn ignore_all_orders() -> io::Result<()> {
    ignore_orders()?;
    ignore(&[libc::SIGTERM, libc::SIGINT, libc::SIGQUIT])
}

fn ignore(signals: &[libc::c_int]) -> io::Result<()> {
    signals.iter().copied().try_for_each(|number| set_disposition(number, libc::SIG_IGN))
}

fn set_disposition(number: i32, disposition: libc::sighandler_t) -> io::Result<()> {
    // SAFETY: no handler is installed: the callers pass only SIG_DFL and SIG_IGN.
    let previous = unsafe { libc::signal(number, disposition) };
    if previous == libc::SIG_ERR { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Converts a duration for `poll`.
pub(super) fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX), tv_nsec: duration.subsec_nanos().into() }
}
