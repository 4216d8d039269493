//! Datagram sockets. A datagram arrives whole, late, twice or not at all.
//!
//! Sending never waits: a datagram for which the kernel has no room is an error, and the caller waits for room or
//! counts it as lost. Receiving waits for readiness and reads nothing ahead, so a dropped future loses nothing.
//!
//! The single-datagram calls suit occasional queries. Servers receive and send in batches, one system call for up to
//! [`BATCH_MAX`](crate::BATCH_MAX) datagrams, with the metadata of each:
//!
//! ```no_run
//! # use gale_runtime::*;
//! # async fn serve(wildcard: SocketAddress) -> std::io::Result<()> {
//! let socket = DatagramOptions { local: Some(wildcard), local_address: true, ..DatagramOptions::default() }.open()?;
//! let mut batch = ReceiveBatch::new(32, 2048);
//! loop {
//!     socket.recv_batch(&mut batch).await?;
//!     for (from, bytes) in batch.iter() {
//!         // From the address that the client has sent to, which `local_address` asks for.
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
    /// Opens the socket: bound to `local`, connected to `peer`; at least one of them is set. Errors: the kernel's.
    /// Panics outside of a loop.
    pub fn open(&self) -> io::Result<Datagram> {
        let environment = Environment::current();
        let key = environment.driver.open_datagram(self)?;
        Ok(Datagram { environment, key })
    }

    /// Adopts a bound datagram socket: sets it non-blocking, and applies these options except the addresses. Errors:
    /// the kernel's; `Unsupported` in a simulation. Panics outside of a loop.
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
    /// Opens a socket on an unpredictable port that sends to `peer` and receives only from it.
    ///
    /// Errors: the kernel's. Panics outside of a loop.
    pub fn connect(peer: &SocketAddress) -> io::Result<Datagram> {
        DatagramOptions { peer: Some(peer.clone()), ..DatagramOptions::default() }.open()
    }

    /// Opens a socket at this address that receives from any source. Errors: the kernel's. Panics outside of a loop.
    pub fn bind(local: &SocketAddress) -> io::Result<Datagram> {
        DatagramOptions { local: Some(local.clone()), ..DatagramOptions::default() }.open()
    }

    /// Sends to the peer of a connected socket.
    ///
    /// Errors: the result of an earlier datagram (ECONNREFUSED); EAGAIN when the socket's buffer is full.
    pub fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.try_send_batch(&[Transmit::to_peer(bytes)]).map(drop)
    }

    /// Sends to this address. Errors as [`Datagram::send`].
    pub fn send_to(&self, bytes: &[u8], to: &SocketAddress) -> io::Result<()> {
        self.try_send_batch(&[Transmit::to(to, bytes)]).map(drop)
    }

    /// The next datagram: its length and its source. Bytes that do not fit `into` are lost. One task receives at a
    /// time.
    ///
    /// Errors: the result of a datagram that was sent earlier; the socket remains usable.
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

    /// Receives the datagrams that have arrived, up to the capacity of `batch`, and replaces its content; ready with at
    /// least one. The batch holds memory only while it holds datagrams. One task receives at a time.
    ///
    /// Errors: as [`Datagram::poll_recv`]; `OutOfMemory` at the hard limit of leases.
    pub fn poll_recv_batch(&self, cx: &mut Context<'_>, batch: &mut ReceiveBatch) -> Poll<io::Result<usize>> {
        self.poll_recv_some(cx, batch, BATCH_MAX, false)
    }

    /// Receives one datagram, as [`Datagram::poll_recv_batch`], but only its bytes: the cheapest call, if no other is
    /// expected behind it and its source is known.
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
    /// EMSGSIZE when it is too long; the result of an earlier datagram (ECONNREFUSED); EIO, EINVAL or EMSGSIZE when it
    /// has segments, or was joined with others, and the kernel cannot divide them on this route: sent one by one they
    /// may leave.
    pub fn try_send_batch(&self, transmits: &[Transmit<'_>]) -> io::Result<usize> {
        self.environment.driver.send_datagrams(self.key, &transmits[..transmits.len().min(BATCH_MAX)])
    }

    /// Ready when there is room to send. One task waits at a time. Fails if the kernel has no memory for the wait.
    pub fn poll_send_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.environment.driver.poll_send_ready(self.key, cx)
    }

    /// Turns on generic receive offload for datagrams that arrive from now on; [`DatagramOptions::gro`] does so from
    /// the beginning. Errors: setsockopt(2)'s; the socket may not be UDP.
    pub fn set_gro(&self) -> io::Result<()> {
        self.environment.driver.set_datagram_gro(self.key)
    }

    /// The local address; a system call.
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
