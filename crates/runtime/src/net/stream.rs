//! Streams: connected TCP and Unix sockets.
//!
//! All methods take `&self`: a stream belongs to one loop, and one task may read while another writes. Dropping a
//! future of any method loses no data: what was received is in the caller's buffer, what was sent has left the caller's
//! queue.

use std::cell::Cell;
use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use rustix::io::Errno;

use crate::driver::{Driver, End, Fresh, Released};
use crate::environment::Environment;
use crate::executor::budget::QUANTUM_BYTES;
use crate::executor::slots::Key;
use crate::files::File;
use crate::memory::buffer::Buffer;
use crate::memory::output::Output;
use crate::socket::ConnectOptions;
use crate::socket::SocketAddress;
use crate::socket::options::{self, TcpInfo};

/// A connected socket. Closed when dropped.
pub struct Stream {
    environment: Rc<Environment>,
    /// Of the driver's slot, which owns the socket for as long as this stream exists.
    key: Key,
    /// What an earlier loop had received; comes before all else.
    ahead: Cell<Option<Box<Ahead>>>,
}

/// What was received before a stream came to this loop.
struct Ahead {
    bytes: Buffer,
    error: Option<Errno>,
}

/// A stream between two loops, with everything that has been received and not read: nothing is lost on the way, neither
/// data nor the end. Closes the connection when dropped.
#[derive(Debug)]
pub struct Detached {
    socket: OwnedFd,
    received: Vec<u8>,
    /// Comes after `received`.
    error: Option<Errno>,
}

impl Detached {
    /// Makes it a stream of the running loop. Panics outside of one.
    pub fn attach(self) -> Stream {
        let Detached { socket, received, error } = self;
        let stream = Stream::attach(Environment::current(), socket, Fresh::Accepted);
        if !received.is_empty() || error.is_some() {
            let mut bytes = Buffer::new();
            // There already; the bound is that of who received it.
            bytes.append_past_limit(&received);
            stream.ahead.set(Some(Box::new(Ahead { bytes, error })));
        }
        stream
    }
}

impl Detached {
    /// A stream that has come from another process, with what that had received.
    pub fn new(socket: OwnedFd, received: Vec<u8>) -> Detached {
        Detached { socket, received, error: None }
    }

    /// What was received and nobody has read; `None` if the connection is broken.
    pub fn received(&self) -> Option<&[u8]> {
        self.error.is_none().then_some(&self.received)
    }

    /// The socket, if nothing was received that nobody has read.
    pub(super) fn into_idle(self) -> Result<OwnedFd, Detached> {
        if self.received.is_empty() && self.error.is_none() { Ok(self.socket) } else { Err(self) }
    }
}

impl AsFd for Detached {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Stream {
    pub(crate) fn attach(environment: Rc<Environment>, socket: OwnedFd, fresh: Fresh) -> Self {
        let key = environment.driver.attach(socket, fresh);
        Stream { environment, key, ahead: Cell::new(None) }
    }

    /// Takes a connected stream socket, which is set non-blocking. Errors: the descriptor's. Panics outside of a loop.
    pub fn from_fd(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Stream::attach(Environment::current(), socket, Fresh::Accepted))
    }

    /// Takes the stream from its loop, for another one ([`Detached::attach`]). A receive that nobody waits
    /// for any more may have got something: that comes along. With io_uring it costs a system call to be sure of that.
    ///
    /// Errors, with which the connection is closed: a send is under way, so that nobody could tell how much of it will
    /// have left; or the kernel's.
    pub fn detach(self) -> io::Result<Detached> {
        self.release()
    }

    /// As [`Stream::detach`], for whoever cannot give the stream away. It is to be dropped then: whatever else it is
    /// asked panics.
    pub fn release(&self) -> io::Result<Detached> {
        let Released { socket, received, error } = self.environment.driver.release(self.key)?;
        let ahead = self.ahead.take().map(|ahead| *ahead).unwrap_or(Ahead { bytes: Buffer::new(), error: None });
        let received = [ahead.bytes.readable(), received.readable()].concat();
        Ok(Detached { socket, received, error: ahead.error.or(error) })
    }

    /// Connects without options; otherwise as [`ConnectOptions::connect`].
    pub fn connect(address: &SocketAddress) -> impl Future<Output = io::Result<Stream>> + use<> {
        let connecting = ConnectOptions::default().connect(address);
        async move { Ok(connecting.await?) }
    }

    pub(super) fn poll_connected(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.environment.driver.poll_connected(self.key, cx)
    }

    /// Whether nothing has come: no bytes, no end, no error. Without a system call where the driver would know; what
    /// has come in this turn may be told only in the next one.
    pub fn is_idle(&self) -> bool {
        !self.has_ahead() && !self.environment.driver.may_have_input(self.key)
    }

    /// Whether something came with the stream that nobody has received yet.
    fn has_ahead(&self) -> bool {
        let ahead = self.ahead.take();
        let has_ahead = ahead.is_some();
        self.ahead.set(ahead);
        has_ahead
    }

    /// Whether a receive would give something now: bytes, the end, or an error. A system call.
    pub fn has_input(&self) -> bool {
        self.has_ahead() || self.environment.driver.has_input(self.key)
    }

    /// Ready when a receive would not wait: there are bytes, the end, or an error. Takes nothing, and is ready again
    /// for as long as that is so; whoever does not receive then asks in vain. A system call, unless bytes have been
    /// received already. Errors: no memory in the kernel to wait with.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.has_ahead() {
            return Poll::Ready(Ok(()));
        }
        self.environment.driver.poll_readable(self.key, cx)
    }

    /// Ready when a send would not wait: there is room as the kernel counts it (a third of the buffer, with TCP), or an
    /// error. Ready again for as long as that is so. A system call. Errors: no memory in the kernel to wait with.
    pub fn poll_writable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.environment.driver.poll_writable(self.key, cx)
    }

    /// Whether the kernel took less than it was offered when it was asked last, and has announced no room since. A send
    /// may wait for other reasons, such as the turn's budget. No system call.
    pub fn is_full(&self) -> bool {
        self.environment.driver.is_full(self.key)
    }

    /// Receives at most `max` bytes behind those in `into`. `Ok(0)` is the end of the stream. The buffer holds memory
    /// only while there are bytes, not while this waits.
    ///
    /// Errors: the connection's; `OutOfMemory` at the hard limit of leases.
    #[inline]
    pub fn poll_recv(&self, cx: &mut Context<'_>, into: &mut Buffer, max: usize) -> Poll<io::Result<usize>> {
        debug_assert!(max > 0, "a receive of nothing looks like the end of the stream");
        if let Some(ahead) = self.ahead.take() {
            return Poll::Ready(self.take_ahead(ahead, into, max));
        }
        self.poll_within_budget(cx, max, |driver, cx| driver.poll_recv(self.key, cx, into, max))
    }

    /// Moves bytes, when the running task may move so many in this turn.
    #[inline]
    fn poll_within_budget(
        &self,
        cx: &mut Context<'_>,
        max: usize,
        operation: impl FnOnce(&dyn Driver, &mut Context<'_>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        ready!(self.environment.poll_copy(cx, max.min(QUANTUM_BYTES)));
        let polled = operation(&*self.environment.driver, cx);
        if let Poll::Ready(Ok(moved)) = polled {
            self.environment.budget.charge_copy(moved);
        }
        polled
    }

    /// What was received comes again, before all else: for whoever goes on with the stream.
    pub fn put_back(&self, bytes: Buffer) {
        if bytes.is_empty() {
            return;
        }
        let (earlier, error) = match self.ahead.take() {
            Some(earlier) => (earlier.bytes, earlier.error),
            None => (Buffer::new(), None),
        };
        let mut all = bytes;
        all.append_past_limit(earlier.readable());
        self.ahead.set(Some(Box::new(Ahead { bytes: all, error })));
    }

    #[cold]
    fn take_ahead(&self, mut ahead: Box<Ahead>, into: &mut Buffer, max: usize) -> io::Result<usize> {
        let count = ahead.bytes.len().min(max);
        if count == 0 {
            return Err(ahead.error.expect("nothing is kept for nothing").into());
        }
        let appended = into.append(&ahead.bytes.readable()[..count]);
        if appended.is_ok() {
            ahead.bytes.consume(count);
        }
        if !ahead.bytes.is_empty() || ahead.error.is_some() {
            self.ahead.set(Some(ahead));
        }
        appended.map(|()| count)
    }

    /// Sends as much of `out` as the socket takes and removes it from there. Ready with more than 0 when there was
    /// progress, with 0 only when `out` is empty. Errors: the connection's.
    #[inline]
    pub fn poll_send(&self, cx: &mut Context<'_>, out: &mut Output) -> Poll<io::Result<usize>> {
        let environment = &*self.environment;
        let wanted = out.len_bytes().min(QUANTUM_BYTES);
        ready!(environment.poll_copy(cx, wanted));
        let polled = environment.driver.poll_send(self.key, cx, out);
        match polled {
            Poll::Ready(Ok(sent)) => environment.budget.charge_copy(sent),
            // It may be queued, for the call that ends the turn.
            Poll::Pending => environment.budget.charge_copy(wanted),
            Poll::Ready(Err(_)) => {}
        }
        polled
    }

    /// Sends the first of `out` if that takes no waiting, removes it from there and returns how many bytes that were. 0
    /// says nothing; what is left goes by [`Stream::poll_send`]. Nothing else may be waiting to be sent. As with what
    /// is written to a socket's buffer, that bytes count as sent does not mean that they have left: they do in this
    /// turn, or when the peer takes them, also if the stream is dropped. But who ends its side by
    /// [`Stream::shutdown_write`] uses `poll_send` before. `is_last` promises that the stream is dropped or shut down
    /// right after this, if all was sent: then the end leaves in the same packet. Errors: the connection's.
    #[inline]
    pub fn try_send(&self, out: &mut Output, is_last: bool) -> io::Result<usize> {
        let sent = self.environment.driver.try_send(self.key, out, is_last)?;
        self.environment.budget.charge_copy(sent);
        Ok(sent)
    }

    /// As [`Stream::try_send`], for a short answer, which then needs no memory of its own: what is not sent at once is
    /// copied. What is left goes by [`Stream::poll_send`].
    #[inline]
    pub fn try_send_copy(&self, bytes: &[u8], is_last: bool) -> io::Result<usize> {
        self.environment.budget.charge_copy(bytes.len());
        self.environment.driver.try_send_copy(self.key, bytes, is_last)
    }

    /// Sends at most `length` bytes of `file` (half a MiB per call) from `offset` on, and moves `offset`. `Ok(0)` is
    /// the end of the file.
    ///
    /// Reads what is not in memory from the disk and *blocks* meanwhile: for pieces known to be resident only. The
    /// process must ignore SIGPIPE, as Rust programs do. Errors: the connection's and the file's.
    pub fn poll_sendfile(
        &self,
        cx: &mut Context<'_>,
        file: &File,
        offset: &mut u64,
        length: usize,
    ) -> Poll<io::Result<usize>> {
        let length = length.min(QUANTUM_BYTES);
        self.poll_within_budget(cx, length, |driver, cx| {
            driver.poll_sendfile(self.key, cx, file.as_fd(), offset, length)
        })
    }

    /// Moves bytes into an empty pipe; for [`super::Splice`].
    pub(super) fn poll_splice_in(
        &self,
        cx: &mut Context<'_>,
        pipe: BorrowedFd<'_>,
        max: usize,
    ) -> Poll<io::Result<usize>> {
        self.poll_within_budget(cx, max, |driver, cx| driver.poll_splice_in(self.key, cx, pipe, max))
    }

    /// Moves bytes out of a pipe; for [`super::Splice`].
    pub(super) fn poll_splice_out(
        &self,
        cx: &mut Context<'_>,
        pipe: BorrowedFd<'_>,
        max: usize,
    ) -> Poll<io::Result<usize>> {
        self.poll_within_budget(cx, max, |driver, cx| driver.poll_splice_out(self.key, cx, pipe, max))
    }

    /// Whether bytes are, or may come to be, here or with the driver, ahead of the reader.
    pub(super) fn receives_ahead(&self) -> bool {
        self.has_ahead() || self.environment.driver.receives_ahead(self.key)
    }

    /// Ready when the peer has closed or reset the connection, without reading. Half-closing counts: data may still be
    /// there to be read, and the peer may still read.
    pub fn poll_peer_closed(&self, cx: &mut Context<'_>) -> Poll<()> {
        // It cannot be watched only for lack of kernel memory: then the peer counts as gone.
        self.environment.driver.poll_peer_closed(self.key, cx).map(drop)
    }

    /// Whether the connection is broken: reset, or closed in both directions. A peer that has only ended its own data
    /// may still read; over TCP one that has closed its socket looks the same until something is sent to it. A system
    /// call.
    pub fn is_broken(&self) -> bool {
        self.environment.driver.is_broken(self.key)
    }

    /// Whether the peer has ended its direction, or the connection is broken, whatever it has sent before that. A
    /// system call, unless an event has told.
    pub fn has_hung_up(&self) -> bool {
        self.environment.driver.has_hung_up(self.key)
    }

    /// Waits for data; see [`Stream::poll_recv`].
    pub async fn recv(&self, into: &mut Buffer, max: usize) -> io::Result<usize> {
        poll_fn(|cx| self.poll_recv(cx, into, max)).await
    }

    /// Sends at least a part; see [`Stream::poll_send`].
    pub async fn send(&self, out: &mut Output) -> io::Result<usize> {
        poll_fn(|cx| self.poll_send(cx, out)).await
    }

    /// Sends everything in `out`. When dropped before the end, the rest is still there.
    pub async fn send_all(&self, out: &mut Output) -> io::Result<()> {
        while !out.is_empty() {
            self.send(out).await?;
        }
        Ok(())
    }

    /// Sends a piece of a file; see [`Stream::poll_sendfile`].
    pub async fn sendfile(&self, file: &File, offset: &mut u64, length: usize) -> io::Result<usize> {
        poll_fn(|cx| self.poll_sendfile(cx, file, offset, length)).await
    }

    /// Waits until the peer leaves; see [`Stream::poll_peer_closed`].
    pub async fn peer_closed(&self) {
        poll_fn(|cx| self.poll_peer_closed(cx)).await;
    }

    /// Ends our data; the peer sees the end of the stream and may still send.
    pub fn shutdown_write(&self) -> io::Result<()> {
        self.environment.driver.shutdown_write(self.key)
    }

    /// `TCP_NODELAY`.
    pub fn set_nodelay(&self, on: bool) -> io::Result<()> {
        self.set_option(|socket| options::set_nodelay(socket, on))
    }

    /// `TCP_CORK` (`tcp_nopush`).
    pub fn set_cork(&self, on: bool) -> io::Result<()> {
        self.environment.driver.flush(self.key);
        self.set_option(|socket| options::set_cork(socket, on))
    }

    /// `SO_KEEPALIVE`.
    pub fn set_keepalive(&self, on: bool) -> io::Result<()> {
        self.set_option(|socket| options::set_keepalive(socket, on))
    }

    /// Closing resets the connection and drops what is queued (`reset_timedout_connection`).
    pub fn set_linger_reset(&self) -> io::Result<()> {
        self.environment.driver.set_linger_reset(self.key)
    }

    /// Whether the kernel has data that nobody has received yet: whoever closes now resets the connection. A system
    /// call; false where nothing can be known.
    pub fn has_unread(&self) -> bool {
        self.kernel_socket().is_some_and(|socket| options::unread(socket).is_ok_and(|bytes| bytes > 0))
    }

    /// What the kernel knows of the connection; a system call. Errors: that it is no TCP connection.
    pub fn tcp_info(&self) -> io::Result<TcpInfo> {
        TcpInfo::of(self.kernel_socket().ok_or(io::ErrorKind::Unsupported)?)
    }

    /// The socket, if it is one of the kernel's: a simulated one has no options.
    pub(super) fn kernel_socket(&self) -> Option<BorrowedFd<'_>> {
        let descriptor = self.environment.driver.kernel_socket(self.key)?;
        // SAFETY: as for `as_fd`.
        Some(unsafe { BorrowedFd::borrow_raw(descriptor) })
    }

    fn set_option(&self, set: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>) -> io::Result<()> {
        self.kernel_socket().map_or(Ok(()), set)
    }

    /// Our address; a system call.
    pub fn local_address(&self) -> io::Result<SocketAddress> {
        self.environment.driver.address(self.key, End::Local)
    }

    /// The peer's address; a system call. An accepted stream came with it.
    pub fn peer_address(&self) -> io::Result<SocketAddress> {
        self.environment.driver.address(self.key, End::Peer)
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the driver's slot owns the descriptor until this stream is dropped or consumed by `detach`, and the
        // result borrows the stream.
        unsafe { BorrowedFd::borrow_raw(self.environment.driver.descriptor(self.key)) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // After `detach` the key is stale and nothing happens.
        self.environment.driver.close(self.key);
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:?})", self.key)
    }
}
