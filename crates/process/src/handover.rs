//! Idle connections passed from a worker process that leaves to its successor: in an upgrade of the binary, and when a
//! reload needs another worker process.
//!
//! ```text
//!   loops that leave ── Successor ═══ SOCK_SEQPACKET ═══► Arrivals ── loops that serve
//! ```
//!
//! A packet is one connection: its socket, its state, and the bytes received meanwhile. Nothing here blocks. The
//! successor announces first that it serves; before that no connection is passed, because the new binary may not
//! support this (nginx).

use std::env;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::{Errno, FdFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};

use super::listen::ListenAddress;

/// Environment variable that tells a new binary the descriptor on which connections arrive.
const VARIABLE: &str = "GALE_ARRIVALS";

/// Maximum packet size in bytes: a note, and the bytes received while the connection left its loop.
const PACKET_BYTES_MAX: usize = 32 * 1024;

/// The announcement of the successor.
const HELLO: &[u8] = b"ready";

/// The end to which connections are passed.
#[derive(Clone, Debug)]
pub struct Successor(Arc<OwnedFd>);

/// The end at which connections arrive.
#[derive(Clone, Debug)]
pub struct Arrivals(Arc<OwnedFd>);

/// State of an idle connection that is passed with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdleNote {
    /// Address of the listening socket that accepted it.
    pub listening: ListenAddress,
    /// Number of its requests so far.
    pub requests: u64,
    /// Time since it was accepted.
    pub age: Duration,
    /// Maximum idle time from now on.
    pub idle_max: Duration,
}

/// A connection that has arrived.
#[derive(Debug)]
pub struct Arrived {
    /// Its socket.
    pub connection: OwnedFd,
    /// Its state.
    pub note: IdleNote,
    /// Bytes received while the connection was passed: they precede everything read from the socket.
    pub received: Vec<u8>,
}

/// Returns both ends.
pub(crate) fn pair() -> io::Result<(Successor, Arrivals)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    Ok((Successor(Arc::new(ours)), Arrivals(Arc::new(theirs))))
}

impl Successor {
    /// Wraps the end that was received over the link.
    pub(crate) fn new(socket: OwnedFd) -> Successor {
        Successor(Arc::new(socket))
    }

    pub(crate) fn descriptor(&self) -> &Arc<OwnedFd> {
        &self.0
    }

    /// True if the other end has announced that it takes connections.
    pub fn is_there(&self) -> bool {
        // The announcement stays in the socket, for all loops to see.
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        rustix::net::recv(&*self.0, &mut [0; HELLO.len()], flags).is_ok_and(|(count, _)| count == HELLO.len())
    }

    /// True if the other end may still announce that it takes connections.
    pub(crate) fn is_awaited(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        matches!(rustix::net::recv(&*self.0, &mut [0; HELLO.len()], flags), Err(Errno::AGAIN))
    }

    /// Passes a connection. The caller keeps its own descriptor and closes it.
    ///
    /// # Errors
    /// `WouldBlock` while too many others are in flight; any other error means that it cannot be passed.
    pub fn pass(&self, connection: BorrowedFd<'_>, note: &IdleNote, received: &[u8]) -> io::Result<()> {
        let mut packet = serde_json::to_vec(note)?;
        packet.push(b'\n');
        packet.extend_from_slice(received);
        if packet.len() > PACKET_BYTES_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let descriptors = [connection];
        let fits = ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        assert!(fits, "there is room for one");
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match rustix::net::sendmsg(&*self.0, &[IoSlice::new(&packet)], &mut ancillary, flags) {
            Ok(_) => Ok(()),
            // Too many descriptors in flight, or no memory for the packet.
            Err(Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM) => Err(io::ErrorKind::WouldBlock.into()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Arrivals {
    /// Wraps the end that was received over the link.
    pub(crate) fn new(socket: OwnedFd) -> Arrivals {
        Arrivals(Arc::new(socket))
    }

    /// Returns the end that the previous binary left us, if it did. Must be called before anything is opened.
    pub(crate) fn inherited() -> Option<Arrivals> {
        let number = env::var(VARIABLE).ok()?.parse().ok().filter(|&number: &RawFd| number > 2)?;
        // SAFETY: only borrowed for calls that fail with EBADF if it is not open.
        let probe = unsafe { BorrowedFd::borrow_raw(number) };
        let is_ours = rustix::net::sockopt::socket_type(probe).ok()? == SocketType::SEQPACKET;
        if !is_ours || rustix::net::sockopt::socket_domain(probe).ok()? != AddressFamily::UNIX {
            return None;
        }
        // SAFETY: an open socket that existed when the process started, which has opened none of this kind yet: nothing
        // in it owns the number.
        let socket = unsafe { OwnedFd::from_raw_fd(number) };
        rustix::io::fcntl_setfd(&socket, FdFlags::CLOEXEC).ok()?;
        Some(Arrivals::new(socket))
    }

    /// Returns the environment variable for the new binary.
    pub(crate) fn variable(&self) -> (&'static str, String) {
        (VARIABLE, self.0.as_raw_fd().to_string())
    }

    pub(crate) fn descriptor(&self) -> &Arc<OwnedFd> {
        &self.0
    }

    /// Announces that connections are taken here from now on. Further announcements do no harm.
    pub fn announce(&self) {
        // If the other end is gone, it has no connections to pass.
        let _ = rustix::net::send(&*self.0, HELLO, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    /// Returns the next connection, if one has arrived.
    ///
    /// # Errors
    /// `UnexpectedEof`: all senders are gone. Any other error: this connection is lost.
    pub fn take(&self) -> io::Result<Option<Arrived>> {
        let mut packet = vec![0; PACKET_BYTES_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let mut into = [IoSliceMut::new(&mut packet)];
        let mut received = rustix::net::recvmsg(&*self.0, &mut into, &mut ancillary, flags);
        if matches!(received, Err(Errno::CONNRESET)) {
            // Reported once, before the pending packets, when a process has exited without reading our announcement.
            received = rustix::net::recvmsg(&*self.0, &mut into, &mut ancillary, flags);
        }
        let received = match received {
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let descriptors = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        let connection = descriptors.flatten().next();
        if received.bytes == 0 && connection.is_none() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let packet = &packet[..received.bytes];
        let parts = packet.iter().position(|&byte| byte == b'\n').map(|end| packet.split_at(end));
        match (connection, parts) {
            (Some(connection), Some((note, received))) => {
                let note = serde_json::from_slice(note)?;
                Ok(Some(Arrived { connection, note, received: received[1..].to_vec() }))
            }
            // This process had no free descriptor: the client sees its connection closed.
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

impl AsFd for Arrivals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    fn note() -> IdleNote {
        let listening = ListenAddress::Unix("/run/a socket".into());
        let (age, idle_max) = (Duration::from_millis(1500), Duration::from_secs(75));
        IdleNote { listening, requests: 7, age, idle_max }
    }

    #[test]
    fn connection_arrives_with_its_note_and_is_passed_only_to_a_successor() {
        let (successor, arrivals) = pair().unwrap();
        assert!(!successor.is_there(), "a binary that knows nothing of this takes none");
        assert!(successor.is_awaited());
        arrivals.announce();
        assert!(successor.is_there() && successor.is_there(), "for every loop");
        assert!(!successor.is_awaited());
        let (mut client, ours) = UnixStream::pair().unwrap();
        successor.pass(ours.as_fd(), &note(), b"GET\n").unwrap();
        drop(ours);
        let Arrived { connection, note: arrived, received } = arrivals.take().unwrap().expect("one");
        assert_eq!((arrived, &*received), (note(), &b"GET\n"[..]));
        UnixStream::from(connection).write_all(b"hello").unwrap();
        let mut text = String::new();
        client.read_to_string(&mut text).unwrap();
        assert_eq!(text, "hello");
        assert!(arrivals.take().unwrap().is_none());
        drop(successor);
        assert_eq!(arrivals.take().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn successor_that_has_gone_is_not_awaited() {
        let (successor, arrivals) = pair().unwrap();
        drop(arrivals);
        assert!(!successor.is_awaited() && !successor.is_there());
    }

    #[test]
    fn successor_that_takes_no_connection_does_not_block() {
        let (successor, _arrivals) = pair().unwrap();
        let (_client, ours) = UnixStream::pair().unwrap();
        let refused = (0..100_000).find_map(|_| successor.pass(ours.as_fd(), &note(), &[0; 1000]).err());
        assert_eq!(refused.expect("at some time").kind(), io::ErrorKind::WouldBlock);
    }
}
