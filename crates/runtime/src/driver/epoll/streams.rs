//! Streams: the operations of connections.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::task::{Context, Poll};

use rustix::event::{PollFlags, epoll};
use rustix::io::Errno;
use rustix::net::{self, sockopt};

use super::Epoll;
use super::connection::{Connection, Interest};
use crate::driver::direct::{
    Direction, OPERATIONS_PER_TURN, SEND_MAX, has_hung_up, is_broken, look_for, receive, send, send_chunks_now,
    send_now,
};
use crate::driver::{Fresh, Released, StreamDriver};
use crate::executor::slots::Key;
use crate::memory::buffer::Buffer;
use crate::memory::output::Output;
use crate::socket::{options, splice};

impl StreamDriver for Epoll {
    fn attach(&self, socket: OwnedFd, fresh: Fresh) -> Key {
        self.connections.borrow_mut().insert(Connection::new(socket, fresh))
    }

    fn release(&self, key: Key) -> io::Result<Released> {
        let connection = self.connections.borrow_mut().remove(key).ok_or(io::ErrorKind::NotConnected)?;
        if connection.interest != Interest::None {
            // The socket was added and is open, so this cannot fail.
            let _ = epoll::delete(&self.epoll, &connection.socket);
        }
        Ok(Released { socket: connection.socket, received: Buffer::new(), error: None })
    }

    fn descriptor(&self, key: Key) -> RawFd {
        let mut connections = self.connections.borrow_mut();
        connections.get_mut(key).expect("an open stream owns its slot").socket.as_raw_fd()
    }

    fn close(&self, key: Key) {
        // Closing unregisters. A duplicate of the descriptor may still send events: their key is stale then.
        let connection = self.connections.borrow_mut().remove(key);
        drop(connection);
    }

    fn may_have_input(&self, key: Key) -> bool {
        let is_told = {
            let mut connections = self.connections.borrow_mut();
            let connection = connections.get_mut(key).expect("an open stream owns its slot");
            // The edge that makes it readable is an event.
            connection.interest != Interest::None
                && !connection.readiness.is(Direction::Read)
                && !connection.readiness.has_hung_up()
        };
        !is_told && self.has_input(key)
    }

    fn poll_readable(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let events = PollFlags::IN | PollFlags::RDHUP;
        self.attempt(key, cx, Direction::Read, |connection| look_for(connection.socket.as_fd(), events))
    }

    fn poll_writable(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.attempt(key, cx, Direction::Write, |connection| look_for(connection.socket.as_fd(), PollFlags::OUT))
    }

    fn is_full(&self, key: Key) -> bool {
        self.connections.borrow_mut().get_mut(key).is_some_and(|connection| !connection.readiness.is(Direction::Write))
    }

    fn poll_recv(&self, key: Key, cx: &mut Context<'_>, into: &mut Buffer, max: usize) -> Poll<io::Result<usize>> {
        self.attempt(key, cx, Direction::Read, |connection| {
            let received = receive(connection.socket.as_fd(), into, max)?;
            connection.readiness.note_received(received, max);
            Ok(received)
        })
    }

    fn poll_send(&self, key: Key, cx: &mut Context<'_>, out: &mut Output) -> Poll<io::Result<usize>> {
        if out.is_empty() {
            return Poll::Ready(Ok(0));
        }
        self.attempt(key, cx, Direction::Write, |connection| {
            let (sent, asked) = send(connection.socket.as_fd(), out)?;
            out.consume(sent);
            connection.readiness.note_sent(sent == asked);
            Ok(sent)
        })
    }

    fn try_send(&self, key: Key, out: &mut Output, is_last: bool) -> io::Result<usize> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        if !connection.readiness.is(Direction::Write)
            || out.is_empty()
            || !connection.writes.take(self.turn.get(), OPERATIONS_PER_TURN)
        {
            return Ok(0);
        }
        let (sent, asked) = send_chunks_now(connection.socket.as_fd(), out, is_last)?;
        out.consume(sent);
        connection.readiness.note_sent(sent == asked);
        Ok(sent)
    }

    fn try_send_copy(&self, key: Key, bytes: &[u8], is_last: bool) -> io::Result<usize> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        if !connection.readiness.is(Direction::Write) || !connection.writes.take(self.turn.get(), OPERATIONS_PER_TURN) {
            return Ok(0);
        }
        let sent = send_now(connection.socket.as_fd(), bytes, is_last)?;
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
        let asked = length.min(SEND_MAX);
        self.attempt(key, cx, Direction::Write, |connection| {
            let sent = rustix::fs::sendfile(&connection.socket, file, Some(offset), asked)?;
            // Mostly the socket is full. But the file may have been truncated, or a disk may have failed: then no edge
            // would come. Asking takes a tenth of the time of a second call in vain.
            let is_all = sent == asked || has_room(connection.socket.as_fd());
            connection.readiness.note_sent(is_all);
            Ok(sent)
        })
    }

    fn poll_connected(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.attempt(key, cx, Direction::Write, |connection| match connection.readiness.has_hung_up() {
            true => sockopt::socket_error(&connection.socket)?,
            // The kernel has reported room to send, and would have reported an error.
            false => Ok(()),
        })
    }

    fn poll_peer_closed(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        if connection.readiness.has_hung_up() {
            return Poll::Ready(Ok(()));
        }
        if let Err(error) = self.register(key, connection, Direction::Read) {
            return Poll::Ready(Err(error));
        }
        let displaced = connection.closed_waiter.park(cx.waker());
        drop(connections);
        drop(displaced);
        Poll::Pending
    }

    fn has_hung_up(&self, key: Key) -> bool {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        connection.readiness.has_hung_up() || has_hung_up(connection.socket.as_fd())
    }

    fn is_broken(&self, key: Key) -> bool {
        let mut connections = self.connections.borrow_mut();
        is_broken(connections.get_mut(key).expect("an open stream owns its slot").socket.as_fd())
    }

    fn poll_splice_in(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        pipe: BorrowedFd<'_>,
        max: usize,
    ) -> Poll<io::Result<usize>> {
        self.attempt(key, cx, Direction::Read, |connection| {
            let moved = splice(connection.socket.as_fd(), pipe, max)?;
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
        self.attempt(key, cx, Direction::Write, |connection| {
            let moved = splice(pipe, connection.socket.as_fd(), max)?;
            connection.writes.count_spliced(moved);
            Ok(moved)
        })
    }

    fn shutdown_write(&self, key: Key) -> io::Result<()> {
        self.with_socket(key, |socket| Ok(net::shutdown(socket, net::Shutdown::Write)?))
    }

    fn set_linger_reset(&self, key: Key) -> io::Result<()> {
        self.with_socket(key, |socket| options::set_linger_reset(socket.as_fd()))
    }
}

/// True if a send would not wait. If it would, an event will report room.
fn has_room(socket: BorrowedFd<'_>) -> bool {
    look_for(socket, PollFlags::OUT) != Err(Errno::AGAIN)
}
