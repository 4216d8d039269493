//! Streams on the ring. An operation that can succeed at once is a direct call; otherwise its entry is requested and
//! the task parked until it completes.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::task::{Context, Poll};

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::connection::{BusyState, Connection, Expects, OWNED, Receive, Stage};
use super::operation::Op;
use super::sockets::Sockets;
use super::{IoUring, Kernel};
use crate::driver::direct::{self, Attempted, Direction, OPERATIONS_PER_TURN, SEND_MAX};
use crate::driver::{End, Fresh, Released, StreamDriver};
use crate::executor::slots::Key;
use crate::memory::buffer::Buffer;
use crate::memory::output::{Output, SLICES_MAX};
use crate::socket::SocketAddress;
use crate::socket::connect::{ConnectError, ConnectOptions};
use crate::socket::splice;

/// Responses up to this size are queued. For larger ones the system call costs little, and the kernel's copying would
/// delay the entries behind them.
const QUEUED_SEND_MAX: usize = 32 * 1024;

/// Sockets that the call at the end of a turn closes at most: as many as a turn has polls.
const CLOSES_MAX: usize = 512;

impl<K: Kernel> IoUring<K> {
    /// Runs `operation` if it may succeed, until it succeeds; if it would block, parks the task until `op` completes.
    ///
    /// `operation` is called with the table borrowed: it makes system calls and runs no foreign code.
    pub(super) fn attempt<T>(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        op: Op,
        operation: impl FnMut(&mut Connection) -> Result<T, Errno>,
    ) -> Poll<io::Result<T>> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        match direct::attempt(connection, op.direction(), self.turn.get(), operation) {
            Attempted::Done(result) => return Poll::Ready(result),
            Attempted::NextTurn => {
                drop(connections);
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            Attempted::WouldBlock => {}
        }
        let is_read = op.direction() == Direction::Read;
        if let Some(errno) = connection.take_error(is_read) {
            return Poll::Ready(Err(errno.into()));
        }
        self.request(key, connection, op);
        let waiter = if is_read { &mut connection.reader } else { &mut connection.busy().writer };
        let displaced = waiter.park(cx.waker());
        drop(connections);
        drop(displaced);
        Poll::Pending
    }

    /// Takes bytes that the ring has received, or `None` if the reader has to receive directly.
    fn take_received(&self, key: Key, into: &mut Buffer, max: usize) -> Option<io::Result<usize>> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        let BusyState { received, receive_error, .. } = &mut **connection.busy.as_mut()?;
        let count = received.len().min(max);
        if count == 0 {
            return receive_error.take().map(|errno| Err(errno.into()));
        }
        if count == received.len() && into.is_empty() {
            *into = std::mem::take(received);
            return Some(Ok(count));
        }
        let appended = into.append(&received.readable()[..count]);
        if appended.is_ok() {
            received.consume(count);
        }
        Some(appended.map(|()| count))
    }

    /// Result of the send in flight: `None` if there is none and `out` is to be sent.
    fn poll_sending(&self, key: Key, cx: &mut Context<'_>, out: &mut Output) -> Option<Poll<io::Result<usize>>> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        let Some(sending) = connection.sending() else {
            out.forget_loan();
            return None;
        };
        let Some(result) = sending.result.take() else {
            let displaced = connection.busy().writer.park(cx.waker());
            drop(connections);
            drop(displaced);
            return Some(Poll::Pending);
        };
        let mut sending = connection.take_sending().expect("checked above");
        let sent = result.unwrap_or(0);
        sending.output.consume(sent);
        connection.readiness.note_sent(sent == sending.offered);
        let is_own = out.take_back(sending.ticket, &mut sending.output);
        drop(connections);
        self.keep(sending);
        match result {
            // The send of another queue, or one that sent nothing: now `out` is sent.
            _ if !is_own => out.forget_loan(),
            Ok(0) => {}
            Ok(sent) => return Some(Poll::Ready(Ok(sent))),
            Err(errno) => return Some(Poll::Ready(Err(errno.into()))),
        }
        None
    }

    /// Puts `out` on the ring if it qualifies.
    fn queue_send(&self, key: Key, cx: &mut Context<'_>, out: &mut Output) -> bool {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        let is_fit = connection.mode.is_on_ring()
            && connection.readiness.is(Direction::Write)
            && !connection.readiness.has_hung_up();
        // Data that a file follows has to be sent before that, which is now.
        if !is_fit || out.more_follows() || out.len_bytes() > QUEUED_SEND_MAX || out.chunk_count() > SLICES_MAX {
            return false;
        }
        let ticket = self.tickets.get().wrapping_add(1).max(OWNED + 1);
        self.tickets.set(ticket);
        let mut sending = self.sendings.borrow_mut().pop().unwrap_or_default();
        sending.ticket = ticket;
        sending.offered = out.len_bytes();
        sending.output = out.lend(ticket);
        let busy = connection.busy();
        busy.sending = Some(sending);
        let displaced = busy.writer.park(cx.waker());
        self.request(key, connection, Op::Send);
        drop(connections);
        drop(displaced);
        true
    }

    fn send_fire_and_forget_now_by(&self, key: Key) {
        if !self.fire_and_forget_sends.borrow().is_empty() {
            let mut connections = self.connections.borrow_mut();
            self.send_fire_and_forget_now(key, connections.get_mut(key).expect("an open stream owns its slot"), false);
        }
    }

    pub(super) fn with_socket<T>(&self, key: Key, f: impl FnOnce(&OwnedFd) -> io::Result<T>) -> io::Result<T> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        f(connection.socket())
    }
}

impl<K: Kernel> StreamDriver for IoUring<K> {
    fn connect(&self, address: &SocketAddress, options: &ConnectOptions) -> Result<(OwnedFd, Fresh), ConnectError> {
        self.sockets.connect(address, options)
    }

    fn attach(&self, socket: OwnedFd, fresh: Fresh) -> Key {
        self.connections.borrow_mut().insert(Connection::new(socket, fresh))
    }

    fn descriptor(&self, key: Key) -> RawFd {
        let mut connections = self.connections.borrow_mut();
        connections.get_mut(key).expect("an open stream owns its slot").socket().as_raw_fd()
    }

    fn kernel_socket(&self, key: Key) -> Option<RawFd> {
        self.sockets.kernel_socket(self.descriptor(key))
    }

    fn address(&self, key: Key, end: End) -> io::Result<SocketAddress> {
        self.with_socket(key, |socket| self.sockets.address(socket.as_fd(), end))
    }

    fn release(&self, key: Key) -> io::Result<Released> {
        if let Some(connection) = self.connections.borrow_mut().get_mut(key) {
            self.send_fire_and_forget_now(key, connection, false);
        }
        self.settle(key)?;
        let (received, error) = {
            let mut connections = self.connections.borrow_mut();
            let connection = connections.get_mut(key).ok_or(io::ErrorKind::NotConnected)?;
            let received = |busy: &mut Box<BusyState>| (std::mem::take(&mut busy.received), busy.receive_error.take());
            connection.busy.as_mut().map(received).unwrap_or_default()
        };
        let (socket, in_flight) = self.take_socket(key).ok_or(io::ErrorKind::NotConnected)?;
        self.cancel(key, in_flight);
        Ok(Released { socket, received, error })
    }

    fn close(&self, key: Key) {
        {
            let mut connections = self.connections.borrow_mut();
            let Some(connection) = connections.get_mut(key).filter(|connection| connection.stage.socket().is_some())
            else {
                return;
            };
            self.send_fire_and_forget_now(key, connection, true);
            if self.must_stay(connection) {
                let wakers = connection.take_all_wakers();
                drop(connections);
                drop(wakers);
                return self.stay_closed(key);
            }
        }
        if let Some((socket, in_flight)) = self.take_socket(key) {
            let mut closing = self.closing.borrow_mut();
            match self.may_close && closing.len() < CLOSES_MAX {
                true => closing.push(socket),
                false => self.sockets.close(socket),
            }
            self.cancel(key, in_flight);
        }
    }

    fn poll_all_sent(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.staying.get() == 0 {
            return Poll::Ready(());
        }
        let displaced = self.all_sent_waiter.borrow_mut().park(cx.waker());
        drop(displaced);
        Poll::Pending
    }

    fn poll_readable(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        {
            let mut connections = self.connections.borrow_mut();
            let connection = connections.get_mut(key).expect("an open stream owns its slot");
            if connection.busy.as_ref().is_some_and(|busy| busy.has_input()) {
                return Poll::Ready(Ok(()));
            }
            // The data of the receive in flight is kept for the next reader.
            if connection.in_flight.has(Op::Recv) {
                let displaced = connection.reader.park(cx.waker());
                drop(connections);
                drop(displaced);
                return Poll::Pending;
            }
            // As in `poll_recv`.
            connection.wanted.remove(Op::Recv);
        }
        let events = PollFlags::IN | PollFlags::RDHUP;
        self.attempt(key, cx, Op::Readable, |connection| self.sockets.look_for(connection.socket().as_fd(), events))
    }

    fn has_input(&self, key: Key) -> bool {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        connection.busy.as_ref().is_some_and(|busy| busy.has_input())
            || self.sockets.has_input(connection.socket().as_fd())
    }

    fn may_have_input(&self, key: Key) -> bool {
        let is_told = {
            let mut connections = self.connections.borrow_mut();
            let connection = connections.get_mut(key).expect("an open stream owns its slot");
            // The receive or poll in flight will report data and the end.
            let is_quiet =
                connection.busy.as_ref().is_none_or(|busy| !busy.has_input()) && !connection.readiness.has_hung_up();
            let is_polled = connection.in_flight.has(Op::Readable) && !connection.readiness.is(Direction::Read);
            is_quiet && (connection.in_flight.has(Op::Recv) || is_polled)
        };
        !is_told && self.has_input(key)
    }

    fn is_full(&self, key: Key) -> bool {
        self.connections.borrow_mut().get_mut(key).is_some_and(|connection| !connection.readiness.is(Direction::Write))
    }

    fn poll_writable(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.send_fire_and_forget_now_by(key);
        {
            let mut connections = self.connections.borrow_mut();
            let connection = connections.get_mut(key).expect("an open stream owns its slot");
            match connection.sending().map(|sending| sending.result.is_some()) {
                None => {}
                Some(true) => return Poll::Ready(Ok(())),
                Some(false) => {
                    let displaced = connection.busy().writer.park(cx.waker());
                    drop(connections);
                    drop(displaced);
                    return Poll::Pending;
                }
            }
        }
        self.attempt(key, cx, Op::Writable, |connection| {
            self.sockets.look_for(connection.socket().as_fd(), PollFlags::OUT)
        })
    }

    fn poll_recv(&self, key: Key, cx: &mut Context<'_>, into: &mut Buffer, max: usize) -> Poll<io::Result<usize>> {
        if let Some(received) = self.take_received(key, into, max) {
            return Poll::Ready(received);
        }
        let buffer_bytes = self.receive_options().buffer_bytes;
        let op = {
            let mut connections = self.connections.borrow_mut();
            let connection = connections.get_mut(key).expect("an open stream owns its slot");
            if max > buffer_bytes {
                connection.mode.expect(Expects::Bodies);
            }
            // Data of the receive in flight comes first.
            if connection.in_flight.has(Op::Recv) {
                // A body or a tunnel: received in pieces directly into its destination, when the reader asks.
                if max > buffer_bytes
                    && connection.in_flight.receive() == Some(Receive::Multishot)
                    && connection.end_receive(Receive::Ending)
                {
                    self.request_wanted(key, connection);
                }
                let displaced = connection.reader.park(cx.waker());
                drop(connections);
                drop(displaced);
                return Poll::Pending;
            }
            // Only one of the two may wait: an earlier wish that is not in flight yet is dropped.
            connection.wanted.remove(Op::Recv);
            if connection.mode.expects() != Some(Expects::Bodies) && !connection.in_flight.has(Op::Readable) {
                connection.wanted.remove(Op::Readable);
                Op::Recv
            } else {
                Op::Readable
            }
        };
        self.attempt(key, cx, op, |connection| {
            let received = self.sockets.receive(connection.socket().as_fd(), into, max)?;
            if received > 0 {
                connection.mode.note_received();
            }
            // Everything that came fits a buffer: the next receive may use the ring again.
            if max <= buffer_bytes && received < max {
                connection.mode.expect(Expects::Messages);
            }
            connection.readiness.note_received(received, max);
            Ok(received)
        })
    }

    fn poll_send(&self, key: Key, cx: &mut Context<'_>, out: &mut Output) -> Poll<io::Result<usize>> {
        if out.is_empty() {
            return Poll::Ready(Ok(0));
        }
        self.send_fire_and_forget_now_by(key);
        if let Some(polled) = self.poll_sending(key, cx, out) {
            return polled;
        }
        if out.is_empty() {
            // All its data was on loan to a connection that has gone.
            return Poll::Ready(Ok(0));
        }
        if self.queue_send(key, cx, out) {
            return Poll::Pending;
        }
        self.attempt(key, cx, Op::Writable, |connection| {
            let (sent, asked) = self.sockets.send(connection.socket().as_fd(), out)?;
            out.consume(sent);
            connection.readiness.note_sent(sent == asked);
            Ok(sent)
        })
    }

    fn try_send(&self, key: Key, out: &mut Output, is_last: bool) -> io::Result<usize> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        if connection.sending().is_some() || !connection.readiness.is(Direction::Write) {
            return Ok(0);
        }
        if connection.mode.is_on_ring() {
            let length = out.len_bytes();
            let is_taken = !is_last && self.try_send_fire_and_forget(key, connection, out);
            return Ok(if is_taken { length } else { 0 });
        }
        if !connection.writes.take(self.turn.get(), OPERATIONS_PER_TURN) {
            return Ok(0);
        }
        let (sent, asked) = self.sockets.send_chunks_now(connection.socket().as_fd(), out, is_last)?;
        out.consume(sent);
        connection.readiness.note_sent(sent == asked);
        Ok(sent)
    }

    fn try_send_copy(&self, key: Key, bytes: &[u8], is_last: bool) -> io::Result<usize> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        if connection.sending().is_some() || !connection.readiness.is(Direction::Write) {
            return Ok(0);
        }
        if connection.mode.is_on_ring() {
            let is_taken = !is_last && self.try_send_copy_fire_and_forget(key, connection, bytes);
            return Ok(if is_taken { bytes.len() } else { 0 });
        }
        if !connection.writes.take(self.turn.get(), OPERATIONS_PER_TURN) {
            return Ok(0);
        }
        let sent = self.sockets.send_now(connection.socket().as_fd(), bytes, is_last)?;
        connection.readiness.note_sent(sent == bytes.len());
        Ok(sent)
    }

    fn poll_sendfile(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        file: BorrowedFd<'_>,
        offset: &mut u64,
        length: usize,
    ) -> Poll<io::Result<usize>> {
        self.send_fire_and_forget_now_by(key);
        // A send whose waiter has gone still comes first.
        if let Some(Poll::Pending) = self.poll_sending(key, cx, &mut Output::new()) {
            return Poll::Pending;
        }
        self.attempt(key, cx, Op::Writable, |connection| {
            let asked = length.min(SEND_MAX);
            let sent = self.sockets.sendfile(connection.socket().as_fd(), file, offset, asked)?;
            // Mostly the socket is full. If the file was truncated instead, the poll reports room at once.
            connection.readiness.note_sent(sent == asked);
            Ok(sent)
        })
    }

    fn poll_connected(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.attempt(key, cx, Op::Writable, |connection| match connection.take_error(false) {
            Some(errno) => Err(errno),
            // The kernel has reported room to send, and would have reported an error.
            None if !connection.readiness.has_hung_up() && !connection.has_failed_poll() => Ok(()),
            None => self.sockets.connect_result(connection.socket().as_fd()),
        })
    }

    fn poll_peer_closed(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        if connection.readiness.has_hung_up() {
            return Poll::Ready(Ok(()));
        }
        if !connection.in_flight.has(Op::HungUp) {
            self.request(key, connection, Op::HungUp);
        }
        let displaced = connection.busy().closed_waiter.park(cx.waker());
        drop(connections);
        drop(displaced);
        Poll::Pending
    }

    fn has_hung_up(&self, key: Key) -> bool {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        connection.readiness.has_hung_up() || self.sockets.has_hung_up(connection.socket().as_fd())
    }

    fn is_broken(&self, key: Key) -> bool {
        let mut connections = self.connections.borrow_mut();
        self.sockets.is_broken(connections.get_mut(key).expect("an open stream owns its slot").socket().as_fd())
    }

    fn poll_splice_in(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        pipe: BorrowedFd<'_>,
        max: usize,
    ) -> Poll<io::Result<usize>> {
        self.attempt(key, cx, Op::Readable, |connection| {
            let moved = splice(connection.socket().as_fd(), pipe, max)?;
            connection.reads.count_spliced(moved);
            Ok(moved)
        })
    }

    fn poll_splice_out(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        pipe: BorrowedFd<'_>,
        max: usize,
    ) -> Poll<io::Result<usize>> {
        self.send_fire_and_forget_now_by(key);
        // As in `poll_sendfile`.
        if let Some(Poll::Pending) = self.poll_sending(key, cx, &mut Output::new()) {
            return Poll::Pending;
        }
        self.attempt(key, cx, Op::Writable, |connection| {
            let moved = splice(pipe, connection.socket().as_fd(), max)?;
            connection.writes.count_spliced(moved);
            Ok(moved)
        })
    }

    fn receives_ahead(&self, key: Key) -> bool {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        // A receive that was wanted and is not in flight yet is dropped.
        connection.wanted.remove(Op::Recv);
        connection.in_flight.has(Op::Recv) || connection.busy.as_ref().is_some_and(|busy| busy.has_input())
    }

    fn flush(&self, key: Key) {
        self.send_fire_and_forget_now_by(key);
    }

    fn shutdown_write(&self, key: Key) -> io::Result<()> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        self.send_fire_and_forget_now(key, connection, true);
        if let Some(sending) = connection.sending().filter(|sending| sending.is_owned()) {
            // To its sender a fire-and-forget send is done, so the shutdown follows it.
            sending.is_last = true;
            return Ok(());
        }
        Ok(self.sockets.shutdown_write(connection.socket().as_fd())?)
    }

    fn set_linger_reset(&self, key: Key) -> io::Result<()> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        connection.change_stage(Stage::reset);
        self.send_fire_and_forget_now(key, connection, false);
        self.sockets.set_linger_reset(connection.socket().as_fd())
    }
}
