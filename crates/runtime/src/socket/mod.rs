//! Sockets of the kernel, before a loop has them: addresses, options, and what is asked of a driver. Nothing here
//! waits.

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

/// How a loop accepts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AcceptOptions {
    /// Other loops wait for the same socket: one of them is woken per connection (`EPOLLEXCLUSIVE`), not all.
    pub exclusive: bool,
    /// Connections accepted per turn at most; a few more from a queue found long on a socket that is not shared. 1 is
    /// nginx's `multi_accept off`.
    pub batch: u32,
}

impl Default for AcceptOptions {
    fn default() -> Self {
        AcceptOptions { exclusive: false, batch: 1 }
    }
}

/// `multi_accept on`: bounded, so that a flood of connections does not hold up those that are open.
pub const MULTI_ACCEPT_BATCH: u32 = 64;

/// Where a socket listens, if only this loop accepts from it.
pub(crate) fn own_address(socket: &OwnedFd, options: AcceptOptions) -> Option<SocketAddress> {
    if options.exclusive { None } else { SocketAddress::bound_to(socket).ok() }
}

/// What is known about a socket that is handed to the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fresh {
    /// Data may be there already: try before waiting.
    Accepted,
    /// The connection is still being made.
    Connecting,
    /// Connected by us: nothing to read until the peer answers.
    Connected,
    /// A datagram socket: of each datagram that has left there is room again, which is told only when somebody waits
    /// for it.
    Datagram,
}

/// Moves bytes between a socket and a pipe, of which the pipe can do its part; EAGAIN is the socket's.
pub(crate) fn splice(from: BorrowedFd<'_>, to: BorrowedFd<'_>, max: usize) -> Result<usize, Errno> {
    let flags = rustix::pipe::SpliceFlags::MOVE | rustix::pipe::SpliceFlags::NONBLOCK;
    rustix::pipe::splice(from, None, to, None, max, flags)
}
