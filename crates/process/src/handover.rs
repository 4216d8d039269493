//! Idle connections on their way from a worker process that leaves to the one that serves after it: in an upgrade of
//! the binary, and when a reload needs another worker process.
//!
//! ```text
//!   loops of who leaves ── Successor ═══ SOCK_SEQPACKET ═══► Arrivals ── loops of who serves
//! ```
//!
//! A packet is one connection: its socket, what is known of it, and what was received of it meanwhile. Nothing here
//! blocks. Whoever serves says so first; without that nothing is passed, because the new binary may be one that knows
//! nothing of this (nginx).

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

/// Names the descriptor by which connections come, in the environment of a new binary.
const VARIABLE: &str = "GALE_ARRIVALS";

/// The longest packet, in bytes: a note, and what was received while the connection left its loop.
const PACKET_BYTES_MAX: usize = 32 * 1024;

/// What who serves says first.
const HELLO: &[u8] = b"ready";

/// Where connections can be passed to.
#[derive(Clone, Debug)]
pub struct Successor(Arc<OwnedFd>);

/// Where they arrive.
#[derive(Clone, Debug)]
pub struct Arrivals(Arc<OwnedFd>);

/// What an idle connection takes along.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdleNote {
    /// The address of the listening socket that it came in by.
    pub listening: ListenAddress,
    /// Its requests so far.
    pub requests: u64,
    /// How long ago it was accepted.
    pub age: Duration,
    /// How long it may be idle from now on.
    pub idle_max: Duration,
}

/// A connection that has arrived.
#[derive(Debug)]
pub struct Arrived {
    /// Its socket.
    pub connection: OwnedFd,
    /// What is known of it.
    pub note: IdleNote,
    /// What its client has sent just then: comes before all else.
    pub received: Vec<u8>,
}

/// Both ends.
pub(crate) fn pair() -> io::Result<(Successor, Arrivals)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    Ok((Successor(Arc::new(ours)), Arrivals(Arc::new(theirs))))
}

impl Successor {
    /// The end that came over the link.
    pub(crate) fn new(socket: OwnedFd) -> Successor {
        Successor(Arc::new(socket))
    }

    pub(crate) fn descriptor(&self) -> &Arc<OwnedFd> {
        &self.0
    }

    /// Whether somebody takes what is passed.
    pub fn is_there(&self) -> bool {
        // It stays there, for all loops to see.
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        rustix::net::recv(&*self.0, &mut [0; HELLO.len()], flags).is_ok_and(|(count, _)| count == HELLO.len())
    }

    /// Whether somebody may still come who takes it.
    pub(crate) fn is_awaited(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        matches!(rustix::net::recv(&*self.0, &mut [0; HELLO.len()], flags), Err(Errno::AGAIN))
    }

    /// Passes a connection. Who passes it still holds it, and closes it.
    ///
    /// # Errors
    /// `WouldBlock` while others are on their way; else it cannot be passed.
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
            // Too many descriptors on their way, or no memory for the packet.
            Err(Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM) => Err(io::ErrorKind::WouldBlock.into()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Arrivals {
    /// The end that came over the link.
    pub(crate) fn new(socket: OwnedFd) -> Arrivals {
        Arrivals(Arc::new(socket))
    }

    /// The end that the previous binary left us, if it did. To be asked before anything is opened.
    pub(crate) fn inherited() -> Option<Arrivals> {
        let number = env::var(VARIABLE).ok()?.parse().ok().filter(|&number: &RawFd| number > 2)?;
        // SAFETY: only borrowed for calls that fail with EBADF if it is not open.
        let probe = unsafe { BorrowedFd::borrow_raw(number) };
        let is_ours = rustix::net::sockopt::socket_type(probe).ok()? == SocketType::SEQPACKET;
        if !is_ours || rustix::net::sockopt::socket_domain(probe).ok()? != AddressFamily::UNIX {
            return None;
        }
        // SAFETY: an open socket that was there when the process began, which has opened none of this kind yet: nothing
        // in it owns the number.
        let socket = unsafe { OwnedFd::from_raw_fd(number) };
        rustix::io::fcntl_setfd(&socket, FdFlags::CLOEXEC).ok()?;
        Some(Arrivals::new(socket))
    }

    /// The variable that tells the new binary of it.
    pub(crate) fn variable(&self) -> (&'static str, String) {
        (VARIABLE, self.0.as_raw_fd().to_string())
    }

    pub(crate) fn descriptor(&self) -> &Arc<OwnedFd> {
        &self.0
    }

    /// Says that connections are taken here from now on. Once is enough, more does no harm.
    pub fn announce(&self) {
        // Whoever has gone has nothing to pass.
        let _ = rustix::net::send(&*self.0, HELLO, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    /// The next connection, if one has come.
    ///
    /// # Errors
    /// `UnexpectedEof`: all who could pass some are gone. Others: this one is lost.
    pub fn take(&self) -> io::Result<Option<Arrived>> {
        let mut packet = vec![0; PACKET_BYTES_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let mut into = [IoSliceMut::new(&mut packet)];
        let mut received = rustix::net::recvmsg(&*self.0, &mut into, &mut ancillary, flags);
        if matches!(received, Err(Errno::CONNRESET)) {
            // Said once, before what has come, of a process that ended without reading our greeting.
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
            // This process had no room for the descriptor: the client finds its connection closed.
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
    fn a_connection_arrives_with_its_note_and_nothing_is_passed_to_nobody() {
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
    fn nobody_is_awaited_who_has_gone() {
        let (successor, arrivals) = pair().unwrap();
        drop(arrivals);
        assert!(!successor.is_awaited() && !successor.is_there());
    }

    #[test]
    fn who_takes_nothing_holds_nobody_up() {
        let (successor, _arrivals) = pair().unwrap();
        let (_client, ours) = UnixStream::pair().unwrap();
        let refused = (0..100_000).find_map(|_| successor.pass(ours.as_fd(), &note(), &[0; 1000]).err());
        assert_eq!(refused.expect("at some time").kind(), io::ErrorKind::WouldBlock);
    }
}
