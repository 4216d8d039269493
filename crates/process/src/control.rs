//! The control socket: orders to a master whose sender waits for the result, which a signal cannot return.
//!
//! ```text
//!   gale reload ── "reload\n" ──► master
//!               ◄── "done\n" or "refused\n", then errors and warnings of the configuration; end
//!   gale top    ── "status\n" ──► master ── the socket itself, over the link ──► worker process
//!               ◄── "done\n" and the statistics, or "refused\n" and the reason; end
//! ```
//!
//! Its address is an abstract name with the pid of the master, which is in the pid file: no file is left behind, and an
//! upgrade, which moves the pid file, moves the socket's name as well. Only root and the master's own user may give
//! orders; the kernel reports the user at the other end (`SO_PEERCRED`). In return the sender checks that the process
//! that answers is the one in the pid file.

use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use gale_base::log_level::Level;
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, geteuid};

use super::errors::{SignalError, errno_text};
use super::pid_file;

/// Order to reload the configuration.
pub(super) const RELOAD: &[u8] = b"reload\n";
/// Order to send the statistics of the worker process.
pub(super) const STATUS: &[u8] = b"status\n";

/// Time that a client waits for the next part of the statistics: longer than the worker process takes to collect those
/// of ten thousand servers.
const STATUS_PATIENCE: Duration = Duration::from_secs(20);

/// Maximum size of the statistics in bytes. A server of a group has some 1.5 KiB of them, so this is 40,000 servers.
const STATUS_BYTES_MAX: u64 = 64 << 20;

/// Result of an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// For a reload: the new configuration is in force.
    Done,
    /// For a reload: the old one stays in force.
    Refused,
}

impl Ending {
    /// Returns the first line of an answer.
    pub fn line(self) -> &'static str {
        match self {
            Ending::Done => "done\n",
            Ending::Refused => "refused\n",
        }
    }
}

/// Binds the socket of the process with this pid.
///
/// # Errors
/// Errors of socket(2), bind(2) and listen(2).
pub(super) fn bind(pid: u32) -> io::Result<UnixListener> {
    let listener = UnixListener::bind_addr(&address(pid)?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn address(pid: u32) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("gale/control/{pid}"))
}

/// True if the other end may give orders: root and the user of this process.
pub(super) fn is_permitted(stream: &UnixStream) -> bool {
    socket_peercred(stream).is_ok_and(|peer| peer.uid.is_root() || peer.uid == geteuid())
}

/// Result of a reload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reloaded {
    /// True if the new configuration is in force.
    pub is_in_force: bool,
    /// Errors and warnings of the configuration, as `-t` prints them.
    pub text: String,
}

/// Has the master in the pid file `pid_path` reload its configuration, and waits for the result.
///
/// # Errors
/// There is no such process, it has no control socket, it denies access, or it exits before the reload ends.
pub fn reload(pid_path: &Path) -> Result<Reloaded, SignalError> {
    let hint = "; \"gale -s reload\" sends a signal and does not wait";
    let master = Asked::connect(pid_path, hint)?;
    let (ending, text) = master.order(RELOAD, None, u64::MAX)?;
    Ok(Reloaded { is_in_force: ending == Ending::Done, text })
}

/// Gets the statistics of the worker process from the master in the pid file `pid_path`, as the program formats them:
/// JSON.
///
/// # Errors
/// As for [`reload`]; no process serves right now, there are too many clients at once, or the answer is incomplete.
pub fn status(pid_path: &Path) -> Result<String, SignalError> {
    let master = Asked::connect(pid_path, "")?;
    let number = master.number;
    match master.order(STATUS, Some(STATUS_PATIENCE), STATUS_BYTES_MAX)? {
        (Ending::Done, text) if text.is_empty() => Err(failed(format!("process {number} sent an empty answer"))),
        (Ending::Done, text) => Ok(text),
        (Ending::Refused, text) => Err(failed(format!("process {number} sent no figures: {}", text.trim_end()))),
    }
}

fn failed(message: String) -> SignalError {
    SignalError { level: Level::Error, message }
}

/// The client's connection to a master.
struct Asked {
    stream: UnixStream,
    number: i32,
    /// Alternative for the user, appended to errors of the socket.
    hint: &'static str,
}

impl Asked {
    fn connect(pid_path: &Path, hint: &'static str) -> Result<Asked, SignalError> {
        let number = pid_file::read(pid_path).map_err(failed)?;
        let pid = Pid::from_raw(number).expect("a pid file's number is positive");
        let connect = || UnixStream::connect_addr(&address(number.cast_unsigned())?);
        let stream = connect().map_err(|error| told("connect() to", number, &error, hint))?;
        let peer = socket_peercred(&stream);
        let peer = peer.map_err(|error| told("getsockopt() of", number, &error.into(), hint))?;
        if peer.pid != pid || !(peer.uid.is_root() || peer.uid == geteuid()) {
            return Err(failed(format!("the control socket of process {number} belongs to another process")));
        }
        Ok(Asked { stream, number, hint })
    }

    /// Sends the order and waits for the answer: at most `patience` for each part of it, and up to `bytes_max`.
    fn order(self, order: &[u8], patience: Option<Duration>, bytes_max: u64) -> Result<(Ending, String), SignalError> {
        let Asked { mut stream, number, hint } = self;
        let mut answer = Vec::new();
        // A master that denies access closes the connection at once.
        let _ = stream.write_all(order);
        let read = stream.set_read_timeout(patience);
        let read = read.and_then(|()| stream.take(bytes_max).read_to_end(&mut answer));
        let is_whole = read.as_ref().is_ok_and(|&count| (count as u64) < bytes_max);
        let answer = String::from_utf8_lossy(&answer);
        let of = |ending: Ending| answer.strip_prefix(ending.line()).map(|text| (ending, text.to_owned()));
        match (of(Ending::Done).or_else(|| of(Ending::Refused)), read) {
            (Some(_), _) if patience.is_some() && !is_whole => {
                Err(failed(format!("the answer of process {number} is incomplete after {} bytes", answer.len())))
            }
            (Some(told), _) => Ok(told),
            (None, Err(error)) if error.kind() != io::ErrorKind::ConnectionReset => {
                Err(told("read() from", number, &error, hint))
            }
            (None, _) => Err(failed(format!("process {number} did not answer: it is exiting, or access is denied"))),
        }
    }
}

fn told(what: &str, number: i32, error: &io::Error, hint: &str) -> SignalError {
    failed(format!("{what} the control socket of process {number} failed{}{hint}", errno_text(error)))
}

#[doc(hidden)]
pub mod fuzzing {
    //! The answer of a master, as `gale reload` and `gale top` read it.

    use std::net::Shutdown;

    use super::*;

    /// Answers both orders with these bytes.
    pub fn read_answer(bytes: &[u8]) {
        // More would wait for a reader.
        let bytes = &bytes[..bytes.len().min(4096)];
        for (order, patience) in [(RELOAD, None), (STATUS, Some(STATUS_PATIENCE))] {
            let (stream, mut theirs) = UnixStream::pair().expect("descriptors");
            theirs.write_all(bytes).expect("room");
            theirs.shutdown(Shutdown::Write).expect("connected");
            let answer = Asked { stream, number: 1, hint: "" }.order(order, patience, STATUS_BYTES_MAX);
            let expected = [Ending::Done, Ending::Refused].map(|ending| bytes.starts_with(ending.line().as_bytes()));
            assert_eq!(answer.is_ok(), expected != [false; 2]);
        }
    }
}
