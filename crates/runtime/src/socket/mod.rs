//! Kernel sockets before a loop owns them: addresses, options, and helpers for drivers. Nothing here waits.

mod address;
pub(crate) mod connect;
pub(crate) mod datagram;
pub(crate) mod options;

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;

pub use address::SocketAddress;
pub use connect::{ConnectError, ConnectOptions, ConnectStep};
pub use datagram::{BATCH_MAX, DatagramOptions, Ecn, ReceiveBatch, Received, Transmit};
pub(crate) use options::AcceptQueue;
pub use options::TcpInfo;

/// Options for accepting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AcceptOptions {
    /// Other loops wait for the same socket: each connection wakes one of them (`EPOLLEXCLUSIVE`), not all.
    pub exclusive: bool,
    /// Connections accepted per turn at most; a few more from a long queue of a socket that is not shared. 1 is nginx's
    /// `multi_accept off`.
    pub batch: u32,
}

impl Default for AcceptOptions {
    fn default() -> Self {
        AcceptOptions { exclusive: false, batch: 1 }
    }
}

/// `multi_accept on`: bounded, so that a flood of connections does not delay the open ones.
pub const MULTI_ACCEPT_BATCH: u32 = 64;

/// The local address, if only this loop accepts from the socket.
pub(crate) fn own_address(socket: &OwnedFd, options: AcceptOptions) -> Option<SocketAddress> {
    if options.exclusive { None } else { SocketAddress::bound_to(socket).ok() }
}

/// Initial state of a socket that is attached to a driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fresh {
    /// There may be data already: try before waiting.
    Accepted,
    /// The connection is being established.
    Connecting,
    /// Connected by us: no data until the peer answers.
    Connected,
    /// A datagram socket: whenever a datagram has left there is room again, an event that is reported only if a task
    /// waits for it.
    Datagram,
}

/// Moves bytes between a socket and a pipe that is ready; EAGAIN means that the socket is not.
pub(crate) fn splice(from: BorrowedFd<'_>, to: BorrowedFd<'_>, max: usize) -> Result<usize, Errno> {
    let flags = rustix::pipe::SpliceFlags::MOVE | rustix::pipe::SpliceFlags::NONBLOCK;
    rustix::pipe::splice(from, None, to, None, max, flags)
}
