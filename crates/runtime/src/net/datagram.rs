//! Datagram sockets: what is sent arrives whole, late, twice or not at all.
//!
//! Sending never waits: what the kernel has no room for is not sent, and the caller is told; it may wait for room, or
//! take it as lost. Receiving waits by readiness and takes nothing ahead, so a future that is dropped loses nothing.
//!
//! Single datagrams are for whoever asks a question now and then. Whoever carries traffic receives and sends in
//! batches, one system call for up to [`BATCH_MAX`](crate::BATCH_MAX) of them, with what the kernel tells of each:
//!
//! ```no_run
//! # use gale_runtime::*;
//! # async fn serve(wildcard: SocketAddress) -> std::io::Result<()> {
//! let socket = DatagramOptions { local: Some(wildcard), local_address: true, ..DatagramOptions::default() }.open()?;
//! let mut batch = ReceiveBatch::new(32, 2048);
//! loop {
//!     socket.recv_batch(&mut batch).await?;
//!     for (from, bytes) in batch.iter() {
//!         // From the address that was asked, which `local_address` tells.
//!         let answer = Transmit { source: from.local, ..Transmit::to(&from.source, bytes) };
//!         // A datagram that cannot leave is lost like any other.
//!         let _ = socket.try_send_batch(&[answer]);
//!     }
//! }
//! # }
//! ```

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::task::{Context, Poll};

use crate::environment::Environment;
use crate::executor::slots::Key;
use crate::socket::datagram::Room;
use crate::socket::{BATCH_MAX, DatagramOptions, ReceiveBatch, SocketAddress, Transmit};

impl DatagramOptions {
    /// Makes the socket: bound to `local`, connected to `peer`; one of the two is there. Errors: the kernel's. Panics
    /// outside of a loop.
    pub fn open(&self) -> io::Result<Datagram> {
        let environment = Environment::current();
        let key = environment.driver.open_datagram(self)?;
        Ok(Datagram { environment, key })
    }

    /// Takes a datagram socket that is bound already, sets it non-blocking, and sets what these options say of it but
    /// for the addresses. Errors: the kernel's; `Unsupported` in a simulation. Panics outside of a loop.
    pub fn adopt(&self, socket: OwnedFd) -> io::Result<Datagram> {
        let environment = Environment::current();
        let key = environment.driver.adopt_datagram(socket, self)?;
        Ok(Datagram { environment, key })
    }
}

/// A datagram socket. Closed when dropped.
pub struct Datagram {
    environment: Rc<Environment>,
    key: Key,
}

impl Datagram {
    /// A socket on a port of its own that nobody can foretell, which sends to `peer` and hears nobody else: what others
    /// send to it never reaches us.
    ///
    /// Errors: the kernel's. Panics outside of a loop.
    pub fn connect(peer: &SocketAddress) -> io::Result<Datagram> {
        DatagramOptions { peer: Some(peer.clone()), ..DatagramOptions::default() }.open()
    }

    /// A socket at this address, which hears everybody. Errors: the kernel's. Panics outside of a loop.
    pub fn bind(local: &SocketAddress) -> io::Result<Datagram> {
        DatagramOptions { local: Some(local.clone()), ..DatagramOptions::default() }.open()
    }

    /// Sends to the peer of a connected socket.
    ///
    /// Errors: what an earlier datagram met with (ECONNREFUSED); EAGAIN when the socket's buffer is full.
    pub fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.try_send_batch(&[Transmit::to_peer(bytes)]).map(drop)
    }

    /// Sends to somebody. Errors as [`Datagram::send`].
    pub fn send_to(&self, bytes: &[u8], to: &SocketAddress) -> io::Result<()> {
        self.try_send_batch(&[Transmit::to(to, bytes)]).map(drop)
    }

    /// The next datagram: its length and its sender. What does not fit `into` is lost. One task receives at a time.
    ///
    /// Errors: what a datagram that was sent earlier met with; the socket can be used further.
    pub fn poll_recv(&self, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<(usize, SocketAddress)>> {
        let mut received = Vec::new();
        let room = Room { bytes_each: into.len(), count: 1, memory: into, is_bare: false };
        let polled = self.environment.driver.poll_recv_datagrams(self.key, cx, room, &mut received);
        polled.map_ok(|()| received.pop().map(|one| (one.length, one.source)).expect("ready with a datagram"))
    }

    /// Waits for the next datagram; see [`Datagram::poll_recv`].
    pub async fn recv(&self, into: &mut [u8]) -> io::Result<(usize, SocketAddress)> {
        poll_fn(|cx| self.poll_recv(cx, into)).await
    }

    /// Receives what has arrived, as much as `batch` has places for, in place of what is there; ready with at least one
    /// datagram. The batch holds memory only while it holds datagrams. One task receives at a time.
    ///
    /// Errors: as [`Datagram::poll_recv`]; `OutOfMemory` at the hard limit of leases.
    pub fn poll_recv_batch(&self, cx: &mut Context<'_>, batch: &mut ReceiveBatch) -> Poll<io::Result<usize>> {
        self.poll_recv_some(cx, batch, BATCH_MAX, false)
    }

    /// Receives the next datagram alone, as [`Datagram::poll_recv_batch`]: for who expects no other behind it, and
    /// knows who it is from. Only its bytes are told, which is the cheapest call.
    pub fn poll_recv_single(&self, cx: &mut Context<'_>, batch: &mut ReceiveBatch) -> Poll<io::Result<usize>> {
        self.poll_recv_some(cx, batch, 1, true)
    }

    fn poll_recv_some(
        &self,
        cx: &mut Context<'_>,
        batch: &mut ReceiveBatch,
        count_max: usize,
        is_bare: bool,
    ) -> Poll<io::Result<usize>> {
        let (room, received) = batch.prepare(count_max, is_bare)?;
        let polled = self.environment.driver.poll_recv_datagrams(self.key, cx, room, received);
        if !matches!(polled, Poll::Ready(Ok(()))) {
            batch.clear();
        }
        polled.map_ok(|()| batch.len())
    }

    /// Waits for datagrams; see [`Datagram::poll_recv_batch`].
    pub async fn recv_batch(&self, batch: &mut ReceiveBatch) -> io::Result<usize> {
        poll_fn(|cx| self.poll_recv_batch(cx, batch)).await
    }

    /// Sends the first of these, at most [`BATCH_MAX`](crate::BATCH_MAX) in one call, and returns how many.
    ///
    /// Errors, of the first one, when nothing was sent: EAGAIN when there is no room ([`Datagram::poll_send_ready`]);
    /// EMSGSIZE when it is too long; what an earlier datagram met with (ECONNREFUSED), of which this one is innocent;
    /// EIO, EINVAL or EMSGSIZE when it has segments, or was joined with others, and the kernel cannot divide them on
    /// the way that they go: each by itself may leave.
    pub fn try_send_batch(&self, transmits: &[Transmit<'_>]) -> io::Result<usize> {
        self.environment.driver.send_datagrams(self.key, &transmits[..transmits.len().min(BATCH_MAX)])
    }

    /// Ready when there is room to send. One task waits at a time. Errors: no memory in the kernel to wait with.
    pub fn poll_send_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.environment.driver.poll_send_ready(self.key, cx)
    }

    /// Has the kernel join datagrams that arrive from now on, as [`DatagramOptions::gro`] does from the beginning.
    /// Errors: setsockopt(2)'s; the socket may not be one of UDP.
    pub fn set_gro(&self) -> io::Result<()> {
        self.environment.driver.set_datagram_gro(self.key)
    }

    /// Our address; a system call.
    pub fn local_address(&self) -> io::Result<SocketAddress> {
        self.environment.driver.datagram_address(self.key)
    }
}

impl Drop for Datagram {
    fn drop(&mut self) {
        self.environment.driver.close_datagram(self.key);
    }
}

impl fmt::Debug for Datagram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Datagram")
    }
}
