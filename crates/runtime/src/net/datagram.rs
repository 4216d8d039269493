//! Datagram sockets: what is sent arrives whole, late, twice or not at all.
//!
//! Sending never waits: a datagram for which the kernel has no room is lost like any other, and the caller is told. Receiving
//! waits by readiness and takes nothing ahead, so a future that is dropped loses nothing.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll};

use crate::environment::Environment;
use crate::executor::slots::Key;
use crate::net::SocketAddress;

/// A datagram socket. Closed when dropped.
pub struct Datagram {
    environment: Rc<Environment>,
    key: Key,
}

impl Datagram {
    /// A socket on a port of its own that nobody can foretell (the kernel chooses it by chance), which sends to `peer` and
    /// hears nobody else: what others send to it never reaches us.
    ///
    /// Errors: the kernel's. Panics outside of a loop.
    pub fn connect(peer: &SocketAddress) -> io::Result<Datagram> {
        Self::open(None, Some(peer))
    }

    /// A socket at this address, which hears everybody. Errors: the kernel's. Panics outside of a loop.
    pub fn bind(local: &SocketAddress) -> io::Result<Datagram> {
        Self::open(Some(local), None)
    }

    fn open(local: Option<&SocketAddress>, peer: Option<&SocketAddress>) -> io::Result<Datagram> {
        let environment = Environment::current();
        let key = environment.driver.open_datagram(local, peer)?;
        Ok(Datagram { environment, key })
    }

    /// Sends to the peer of a connected socket.
    ///
    /// Errors: what an earlier datagram met with (ECONNREFUSED); EAGAIN when the socket's buffer is full.
    pub fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.environment.driver.send_datagram(self.key, bytes, None)
    }

    /// Sends to somebody. Errors as [`Datagram::send`].
    pub fn send_to(&self, bytes: &[u8], to: &SocketAddress) -> io::Result<()> {
        self.environment.driver.send_datagram(self.key, bytes, Some(to))
    }

    /// The next datagram: its length and its sender. What has no place in `into` is lost. One task receives at a time.
    ///
    /// Errors: what a datagram that was sent earlier met with; the socket can be used further.
    pub fn poll_recv(&self, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<(usize, SocketAddress)>> {
        self.environment.driver.poll_recv_datagram(self.key, cx, into)
    }

    /// Waits for the next datagram; see [`Datagram::poll_recv`].
    pub async fn recv(&self, into: &mut [u8]) -> io::Result<(usize, SocketAddress)> {
        poll_fn(|cx| self.poll_recv(cx, into)).await
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
