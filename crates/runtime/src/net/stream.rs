//! Streams: connected TCP and Unix sockets.
//!
//! All methods take `&self`: a stream belongs to one loop, and one task may read while another writes. Dropping the
//! future of any method loses no data: received bytes are in the caller's buffer, and sent bytes have left the caller's
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
use crate::memory::buffer::Buffer;
use crate::memory::output::Output;
use crate::socket::ConnectOptions;
use crate::socket::SocketAddress;
use crate::socket::options::{self, TcpInfo};

/// A connected socket. Closed when dropped.
pub struct Stream {
    environment: Rc<Environment>,
    /// Key of the driver's slot, which owns the socket for as long as this stream exists.
    key: Key,
    /// Data received by an earlier loop, or put back; it is read first.
    ahead: Cell<Option<Box<Ahead>>>,
}

/// Data that was received before the stream came to this loop, or put back.
struct Ahead {
    bytes: Buffer,
    error: Option<Errno>,
}

/// A stream between two loops, with all data that was received and not read, so that neither data nor the end is lost.
/// Closes the connection when dropped.
#[derive(Debug)]
pub struct Detached {
    socket: OwnedFd,
    received: Vec<u8>,
    /// Error to report after `received`.
    error: Option<Errno>,
}

impl Detached {
    /// Attaches the stream to the running loop. Panics outside of one.
    pub fn attach(self) -> Stream {
        let Detached { socket, received, error } = self;
        let stream = Stream::attach(Environment::current(), socket, Fresh::Accepted);
        if !received.is_empty() || error.is_some() {
            let mut bytes = Buffer::new();
            // These bytes exist already: the limit applied when they were received.
            bytes.append_past_limit(&received);
            stream.ahead.set(Some(Box::new(Ahead { bytes, error })));
        }
        stream
    }
}

impl Detached {
    /// A stream from another process, with the bytes that it had received.
    pub fn new(socket: OwnedFd, received: Vec<u8>) -> Detached {
        Detached { socket, received, error: None }
    }

    /// Data that was received and not read; `None` if the connection is broken.
    pub fn received(&self) -> Option<&[u8]> {
        self.error.is_none().then_some(&self.received)
    }

    /// The socket, if no unread data was received.
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

    /// Attaches a connected stream socket and sets it non-blocking. Errors: the descriptor's. Panics outside of a loop.
    pub fn from_fd(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Stream::attach(Environment::current(), socket, Fresh::Accepted))
    }

    /// Detaches the stream from its loop, for another one ([`Detached::attach`]), with data that a pending receive may
    /// have got. With io_uring that costs a system call.
    ///
    /// Errors, after which the connection is closed: a send is in flight, so the number of bytes that will have left is
    /// unknown; or the kernel's.
    pub fn detach(self) -> io::Result<Detached> {
        self.release()
    }

    /// As [`Stream::detach`], for a caller that does not own the stream. The stream is only good for dropping then: all
    /// other methods panic.
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

    /// True if nothing has arrived: no bytes, no end, no error. No system call where the driver would know; events of
    /// this turn may be visible only in the next one.
    pub fn is_idle(&self) -> bool {
        !self.has_ahead() && !self.environment.driver.may_have_input(self.key)
    }

    /// True if there is data that came with the stream or was put back.
    fn has_ahead(&self) -> bool {
        let ahead = self.ahead.take();
        let has_ahead = ahead.is_some();
        self.ahead.set(ahead);
        has_ahead
    }

    /// True if a receive would not wait: there are bytes, the end, or an error. A system call.
    pub fn has_input(&self) -> bool {
        self.has_ahead() || self.environment.driver.has_input(self.key)
    }

    /// Ready when a receive would not wait: there are bytes, the end, or an error. Reads nothing, so it stays ready
    /// until a receive. A system call, unless bytes have been received already. Errors: no memory in the kernel to wait
    /// with.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.has_ahead() {
            return Poll::Ready(Ok(()));
        }
        self.environment.driver.poll_readable(self.key, cx)
    }

    /// Ready when a send would not wait: there is room as the kernel counts it (a third of the buffer, with TCP), or an
    /// error. It stays ready until the room is used. A system call. Fails if the kernel has no memory for the wait.
    pub fn poll_writable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.environment.driver.poll_writable(self.key, cx)
    }

    /// True if the last send was short and the kernel has not announced room since. A send may wait for other reasons,
    /// such as the turn's budget. No system call.
    pub fn is_full(&self) -> bool {
        self.environment.driver.is_full(self.key)
    }

    /// Receives at most `max` bytes at the end of `into`. `Ok(0)` is the end of the stream. The buffer holds memory
    /// only while it holds bytes, not while this waits.
    ///
    /// Errors: the connection's; `OutOfMemory` at the hard limit of leases.
    #[inline]
    pub fn poll_recv(&self, cx: &mut Context<'_>, into: &mut Buffer, max: usize) -> Poll<io::Result<usize>> {
        debug_assert!(max > 0, "an empty receive would look like the end of the stream");
        if let Some(ahead) = self.ahead.take() {
            return Poll::Ready(self.take_ahead(ahead, into, max));
        }
        self.poll_within_budget(cx, max, |driver, cx| driver.poll_recv(self.key, cx, into, max))
    }

    /// Moves bytes once the task's budget for this turn allows it.
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

    /// Puts received bytes back, to be received first by the next reader.
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
            return Err(ahead.error.expect("a result is kept only with bytes or an error").into());
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

    /// Sends as much of `out` as the socket takes and removes it. Ready with more than 0, or with 0 only when `out` is
    /// empty. Errors: the connection's.
    #[inline]
    pub fn poll_send(&self, cx: &mut Context<'_>, out: &mut Output) -> Poll<io::Result<usize>> {
        let environment = &*self.environment;
        let wanted = out.len_bytes().min(QUANTUM_BYTES);
        ready!(environment.poll_copy(cx, wanted));
        let polled = environment.driver.poll_send(self.key, cx, out);
        match polled {
            Poll::Ready(Ok(sent)) => environment.budget.charge_copy(sent),
            // The data may be queued for the call that ends the turn.
            Poll::Pending => environment.budget.charge_copy(wanted),
            Poll::Ready(Err(_)) => {}
        }
        polled
    }

    /// Sends bytes from the front of `out` if that is possible without waiting, removes them and returns their number.
    /// 0 is no error: use [`Stream::poll_send`] for the rest. No other data may be waiting to be sent. As with bytes
    /// written to a socket's buffer, bytes that count as sent may not have left yet: they do in this turn, or when the
    /// peer takes them, even if the stream is dropped. But call `poll_send` before [`Stream::shutdown_write`].
    /// `is_last` promises that the stream is dropped or shut down right after this, if all was sent: then the end
    /// leaves in the same packet. Errors: the connection's.
    #[inline]
    pub fn try_send(&self, out: &mut Output, is_last: bool) -> io::Result<usize> {
        let sent = self.environment.driver.try_send(self.key, out, is_last)?;
        self.environment.budget.charge_copy(sent);
        Ok(sent)
    }

    /// As [`Stream::try_send`], for a short response, which then needs no memory of its own: bytes that are not sent at
    /// once are copied. Use [`Stream::poll_send`] for the rest.
    #[inline]
    pub fn try_send_copy(&self, bytes: &[u8], is_last: bool) -> io::Result<usize> {
        self.environment.budget.charge_copy(bytes.len());
        self.environment.driver.try_send_copy(self.key, bytes, is_last)
    }

    /// Sends at most `length` bytes of `file` (half a MiB per call) from `offset` on, and advances `offset`. `Ok(0)` is
    /// the end of the file.
    ///
    /// Reads pages that are not in memory from the disk and *blocks* meanwhile: only for pieces known to be resident.
    /// The process must ignore SIGPIPE, as Rust programs do. Errors: the connection's and the file's.
    pub fn poll_sendfile(
        &self,
        cx: &mut Context<'_>,
        file: impl AsFd,
        offset: &mut u64,
        length: usize,
    ) -> Poll<io::Result<usize>> {
        let length = length.min(QUANTUM_BYTES);
        self.poll_within_budget(cx, length, |driver, cx| {
            driver.poll_sendfile(self.key, cx, file.as_fd(), offset, length)
        })
    }

    /// Moves bytes from the socket into an empty pipe; for [`super::Splice`].
    pub(super) fn poll_splice_in(
        &self,
        cx: &mut Context<'_>,
        pipe: BorrowedFd<'_>,
        max: usize,
    ) -> Poll<io::Result<usize>> {
        self.poll_within_budget(cx, max, |driver, cx| driver.poll_splice_in(self.key, cx, pipe, max))
    }

    /// Moves bytes from a pipe to the socket; for [`super::Splice`].
    pub(super) fn poll_splice_out(
        &self,
        cx: &mut Context<'_>,
        pipe: BorrowedFd<'_>,
        max: usize,
    ) -> Poll<io::Result<usize>> {
        self.poll_within_budget(cx, max, |driver, cx| driver.poll_splice_out(self.key, cx, pipe, max))
    }

    /// True if this stream or the driver holds, or may come to hold, bytes that the reader has not asked for.
    pub(super) fn receives_ahead(&self) -> bool {
        self.has_ahead() || self.environment.driver.receives_ahead(self.key)
    }

    /// Ready when the peer has closed or reset the connection. Reads nothing. A half-close counts: unread data may
    /// remain, and the peer may still read.
    pub fn poll_peer_closed(&self, cx: &mut Context<'_>) -> Poll<()> {
        // Watching fails only for lack of kernel memory: then the peer counts as gone.
        self.environment.driver.poll_peer_closed(self.key, cx).map(drop)
    }

    /// True if the connection is broken: reset, or closed in both directions. A peer that has only shut down its write
    /// side may still read; over TCP one that has closed its socket looks the same until data is sent to it. A system
    /// call.
    pub fn is_broken(&self) -> bool {
        self.environment.driver.is_broken(self.key)
    }

    /// True if the peer has shut down its write side, or the connection is broken, even with data unread. A system
    /// call, unless an event has told already.
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

    /// Sends everything in `out`. If the future is dropped, `out` holds the rest.
    pub async fn send_all(&self, out: &mut Output) -> io::Result<()> {
        while !out.is_empty() {
            self.send(out).await?;
        }
        Ok(())
    }

    /// Sends a piece of a file; see [`Stream::poll_sendfile`].
    pub async fn sendfile(&self, file: impl AsFd, offset: &mut u64, length: usize) -> io::Result<usize> {
        poll_fn(|cx| self.poll_sendfile(cx, &file, offset, length)).await
    }

    /// Waits until the peer closes; see [`Stream::poll_peer_closed`].
    pub async fn peer_closed(&self) {
        poll_fn(|cx| self.poll_peer_closed(cx)).await;
    }

    /// Shuts down the write side; the peer sees the end of the stream and may still send.
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

    /// Makes close reset the connection and drop queued data (`reset_timedout_connection`).
    pub fn set_linger_reset(&self) -> io::Result<()> {
        self.environment.driver.set_linger_reset(self.key)
    }

    /// True if the kernel holds data that was not received: closing the socket would then reset the connection. A
    /// system call; false if that is unknown.
    pub fn has_unread(&self) -> bool {
        self.kernel_socket().is_some_and(|socket| options::unread(socket).is_ok_and(|bytes| bytes > 0))
    }

    /// The kernel's information about the connection; a system call. Errors: not a TCP connection.
    pub fn tcp_info(&self) -> io::Result<TcpInfo> {
        TcpInfo::of(self.kernel_socket().ok_or(io::ErrorKind::Unsupported)?)
    }

    /// The socket, if it is a kernel socket: a simulated one has no options.
    pub(super) fn kernel_socket(&self) -> Option<BorrowedFd<'_>> {
        let descriptor = self.environment.driver.kernel_socket(self.key)?;
        // SAFETY: as for `as_fd`.
        Some(unsafe { BorrowedFd::borrow_raw(descriptor) })
    }

    fn set_option(&self, set: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>) -> io::Result<()> {
        self.kernel_socket().map_or(Ok(()), set)
    }

    /// The local address; a system call.
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
        // After `detach` the key is stale and this does nothing.
        self.environment.driver.close(self.key);
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:?})", self.key)
    }
}
