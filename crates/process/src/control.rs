//! The control socket: orders to a master whose sender waits for the result, which a signal cannot tell.
//!
//! ```text
//!   gale reload ── "reload\n" ──► master
//!               ◄── "done\n" or "refused\n", then what the configuration's errors and warnings are; end
//! ```
//!
//! Its name is abstract and has the master's process number, which the pid file holds: no file is left behind or in the
//! way, and an upgrade, which moves the pid file, moves it as well. Who may ask is judged by the kernel's word for the
//! other end (`SO_PEERCRED`): root and the master's own user. In return the sender looks whether it is that process
//! that answers.

use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;

use gale_base::log_level::Level;
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, geteuid};

use super::errors::{SignalError, errno_text};
use super::pid_file;

/// What a master is asked for.
pub(super) const RELOAD: &[u8] = b"reload\n";

/// How a reload has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// The new configuration is in force.
    Done,
    /// The old one stays.
    Refused,
}

impl Ending {
    /// The first line of an answer.
    pub fn line(self) -> &'static str {
        match self {
            Ending::Done => "done\n",
            Ending::Refused => "refused\n",
        }
    }
}

/// Binds the socket of the process of this number.
///
/// # Errors
/// Those of socket(2), bind(2) and listen(2).
pub(super) fn bind(pid: u32) -> io::Result<UnixListener> {
    let listener = UnixListener::bind_addr(&address(pid)?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn address(pid: u32) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("gale/control/{pid}"))
}

/// Whether the other end may give orders: root and who runs this process.
pub(super) fn is_permitted(stream: &UnixStream) -> bool {
    socket_peercred(stream).is_ok_and(|peer| peer.uid.is_root() || peer.uid == geteuid())
}

/// What a master said of a reload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reloaded {
    /// Whether the new configuration is in force.
    pub is_in_force: bool,
    /// Its errors and warnings, as `-t` prints them.
    pub text: String,
}

/// Has the master that `pid_path` names read its configuration again, and waits for the result.
///
/// # Errors
/// There is no such process, it has no control socket, it does not let us, or it ends before the reload does.
pub fn reload(pid_path: &Path) -> Result<Reloaded, SignalError> {
    let failed = |message: String| SignalError { level: Level::Error, message };
    let number = pid_file::read(pid_path).map_err(failed)?;
    let told = |what: &str, error: &io::Error| {
        let hint = "\"gale -s reload\" sends a signal and does not wait";
        failed(format!("{what} the control socket of process {number} failed{}; {hint}", errno_text(error)))
    };
    let pid = Pid::from_raw(number).expect("a pid file's number is positive");
    let connect = || UnixStream::connect_addr(&address(number.cast_unsigned())?);
    let mut stream = connect().map_err(|error| told("connect() to", &error))?;
    let peer = socket_peercred(&stream).map_err(|error| told("getsockopt() of", &error.into()))?;
    if peer.pid != pid || !(peer.uid.is_root() || peer.uid == geteuid()) {
        return Err(failed(format!("the control socket of process {number} is another's")));
    }
    let mut answer = Vec::new();
    // A master that does not let us closes at once.
    let _ = stream.write_all(RELOAD);
    let read = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer);
    let of = |ending: Ending| answer.strip_prefix(ending.line());
    match (of(Ending::Done), of(Ending::Refused), read) {
        (Some(text), _, _) => Ok(Reloaded { is_in_force: true, text: text.to_owned() }),
        (_, Some(text), _) => Ok(Reloaded { is_in_force: false, text: text.to_owned() }),
        (None, None, Err(error)) if error.kind() != io::ErrorKind::ConnectionReset => Err(told("read() from", &error)),
        (None, None, _) => Err(failed(format!("process {number} has not answered: it ends, or does not let us"))),
    }
}
