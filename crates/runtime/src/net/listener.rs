//! Listening sockets: bounded batches of accepts, sockets shared by loops, and pausing.

use std::future::poll_fn;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::environment::Environment;
use crate::executor::slots::Key;
use crate::net::Stream;
use crate::socket::Fresh;
use crate::socket::{AcceptOptions, SocketAddress, own_address};
use crate::stall::watched::has_connection;

/// A listening socket of one loop. Dropping it ends this loop's accepting; the socket is closed with its last owner.
pub struct Listener {
    environment: Rc<Environment>,
    socket: Arc<OwnedFd>,
    key: Key,
}

impl Listener {
    /// Accepts from a socket that already listens, and sets it non-blocking.
    ///
    /// Errors: the descriptor's. Panics outside of a loop.
    pub fn from_fd(socket: Arc<OwnedFd>, options: AcceptOptions) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&*socket, true)?;
        let environment = Environment::current();
        let key = environment.driver.attach_listener(Arc::clone(&socket), options);
        environment.inbox.watched.note_listener(&socket, own_address(&socket, options));
        Ok(Listener { environment, socket, key })
    }

    /// Binds a new socket and listens. A Unix path must not exist yet.
    pub fn bind(address: &SocketAddress, backlog: i32, options: AcceptOptions) -> io::Result<Self> {
        let socket = Environment::with(|environment| environment.driver.listen(address, backlog))?;
        Listener::from_fd(Arc::new(socket), options)
    }

    /// The next connection and its peer.
    ///
    /// Errors are the listening socket's or the process's (EMFILE, ENFILE, ENOBUFS, ENOMEM): the caller pauses with a
    /// timer and polls again. Failures of a single connection (ECONNABORTED and the like) are skipped. Not polling is a
    /// pause: connections wait in the kernel, and the loop does not spin.
    pub fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(Stream, SocketAddress)>> {
        self.environment.driver.poll_accept(self.key, cx).map_ok(|(socket, peer)| self.stream(socket, peer))
    }

    /// Waits for the next connection; see [`Listener::poll_accept`].
    pub async fn accept(&self) -> io::Result<(Stream, SocketAddress)> {
        poll_fn(|cx| self.poll_accept(cx)).await
    }

    /// The next connection and its peer if one is pending, else `None`. Neither waits nor registers a waker, and does
    /// not count towards the turn's batch: the caller limits its calls. Errors as [`Listener::poll_accept`].
    pub fn try_accept(&self) -> io::Result<Option<(Stream, SocketAddress)>> {
        let accepted = self.environment.driver.try_accept(self.key)?;
        Ok(accepted.map(|(socket, peer)| self.stream(socket, peer)))
    }

    /// True if a connection is pending in the kernel. A system call.
    pub fn has_waiting(&self) -> bool {
        has_connection(&self.socket)
    }

    fn stream(&self, socket: OwnedFd, peer: SocketAddress) -> (Stream, SocketAddress) {
        (Stream::attach(Rc::clone(&self.environment), socket, Fresh::Accepted), peer)
    }

    /// Stops listening for events until the next `poll_accept`. On a shared socket this matters: the kernel reports
    /// each connection to one waiting loop, which must not be one that does not accept.
    pub fn pause(&self) {
        self.environment.driver.pause_listener(self.key);
    }

    /// Changes the accept options, as when loops come and go.
    pub fn set_options(&self, options: AcceptOptions) {
        self.environment.driver.set_accept_options(self.key, options);
        self.environment.inbox.watched.note_listener(&self.socket, own_address(&self.socket, options));
    }

    /// The local address.
    pub fn local_address(&self) -> io::Result<SocketAddress> {
        self.environment.driver.listener_address(&self.socket)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.environment.driver.detach_listener(self.key);
        self.environment.inbox.watched.forget_listener(&self.socket);
    }
}
