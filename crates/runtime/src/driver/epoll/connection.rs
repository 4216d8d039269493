//! Connections and datagram sockets in the driver's table, and the events seen on them.
//!
//! A connection is registered when it has to wait for the first time, so one that never waits costs no `epoll_ctl`.
//! Events are remembered as its [`Readiness`] until a call finds the contrary. A recv that returns
//! less than was asked for has drained the socket (epoll(7)), so there is no second call to see EAGAIN: later data is a
//! new edge. After a hang-up it stays readable, because the end of the stream is still to be read and no edge will
//! announce it. (Urgent data, and descriptors passed over a Unix socket, can make a recv return early. No protocol here
//! uses either; a peer that sends them waits until it sends more or leaves.)

use std::io;
use std::os::fd::OwnedFd;
use std::task::{Context, Poll};

use rustix::event::epoll;
use rustix::io::Errno;

use super::Epoll;
use crate::driver::Fresh;
use crate::driver::direct::{self, Attempted, Direct, Direction, Readiness, Share};
use crate::executor::parked::Parked;
use crate::executor::slots::Key;

pub(super) struct Connection {
    pub socket: OwnedFd,
    pub interest: Interest,
    pub is_datagram: bool,
    pub readiness: Readiness,
    pub reads: Share,
    pub writes: Share,
    pub reader: Parked,
    pub writer: Parked,
    pub closed_waiter: Parked,
}

/// Events that the kernel reports.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Interest {
    None,
    /// Not for room to send: the kernel would report it at once when a socket is registered, though no task waits for
    /// it, and on a datagram socket whenever a datagram has left.
    Read,
    Both,
}

impl Interest {
    fn flags(self) -> epoll::EventFlags {
        let read = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        if self == Interest::Both { read | epoll::EventFlags::OUT } else { read }
    }
}

impl Connection {
    pub fn new(socket: OwnedFd, fresh: Fresh) -> Self {
        Connection {
            socket,
            interest: Interest::None,
            is_datagram: fresh == Fresh::Datagram,
            readiness: Readiness::new(fresh),
            reads: Share::default(),
            writes: Share::default(),
            reader: Parked::new(),
            writer: Parked::new(),
            closed_waiter: Parked::new(),
        }
    }

    fn waiter(&mut self, direction: Direction) -> &mut Parked {
        match direction {
            Direction::Read => &mut self.reader,
            Direction::Write => &mut self.writer,
        }
    }
}

impl Direct for Connection {
    fn readiness(&mut self) -> &mut Readiness {
        &mut self.readiness
    }

    fn share(&mut self, direction: Direction) -> &mut Share {
        match direction {
            Direction::Read => &mut self.reads,
            Direction::Write => &mut self.writes,
        }
    }
}

impl Epoll {
    /// Registers for input, or for input and room to send.
    pub(super) fn register(&self, key: Key, connection: &mut Connection, direction: Direction) -> io::Result<()> {
        let wanted = if matches!(direction, Direction::Read) { Interest::Read } else { Interest::Both };
        if connection.interest >= wanted {
            return Ok(());
        }
        let data = epoll::EventData::new_u64(key.pack());
        match connection.interest {
            Interest::None => epoll::add(&self.epoll, &connection.socket, data, wanted.flags())?,
            _ => epoll::modify(&self.epoll, &connection.socket, data, wanted.flags())?,
        }
        connection.interest = wanted;
        Ok(())
    }

    /// Runs `operation` while its direction is ready, until it succeeds; if it would block, registers the task to be
    /// woken.
    ///
    /// `operation` is called with the table borrowed: it makes system calls and runs no foreign code.
    pub(super) fn attempt<T>(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        direction: Direction,
        operation: impl FnMut(&mut Connection) -> Result<T, Errno>,
    ) -> Poll<io::Result<T>> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        match direct::attempt(connection, direction, self.turn.get(), operation) {
            Attempted::Done(result) => return Poll::Ready(result),
            Attempted::NextTurn => {
                drop(connections);
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            Attempted::WouldBlock => {}
        }
        if let Err(error) = self.register(key, connection, direction) {
            return Poll::Ready(Err(error));
        }
        let displaced = connection.waiter(direction).park(cx.waker());
        drop(connections);
        drop(displaced);
        Poll::Pending
    }

    pub(super) fn with_socket<T>(&self, key: Key, f: impl FnOnce(&OwnedFd) -> io::Result<T>) -> io::Result<T> {
        let mut connections = self.connections.borrow_mut();
        f(&connections.get_mut(key).expect("an open socket owns its slot").socket)
    }

    pub(super) fn handle_connection(&self, key: Key, flags: epoll::EventFlags) {
        let mut connections = self.connections.borrow_mut();
        // A stale event: the slot belongs to another connection now.
        let Some(connection) = connections.get_mut(key) else {
            return;
        };
        let broken = flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR);
        let hung_up = broken || flags.contains(epoll::EventFlags::RDHUP);
        let (mut reader, mut writer, mut closed_waiter) = (None, None, None);
        if hung_up {
            connection.readiness.hang_up();
            closed_waiter = connection.closed_waiter.take();
        }
        if hung_up || flags.contains(epoll::EventFlags::IN) {
            connection.readiness.set(Direction::Read, true);
            reader = connection.reader.take();
        }
        if broken || flags.contains(epoll::EventFlags::OUT) {
            connection.readiness.set(Direction::Write, true);
            writer = connection.writer.take();
            if connection.is_datagram && connection.interest == Interest::Both {
                let data = epoll::EventData::new_u64(key.pack());
                // The socket was added and is open, so this cannot fail.
                let _ = epoll::modify(&self.epoll, &connection.socket, data, Interest::Read.flags());
                connection.interest = Interest::Read;
            }
        }
        drop(connections);
        // No iterator over the three: nearly every event wakes one.
        if let Some(reader) = reader {
            reader.wake();
        }
        if let Some(writer) = writer {
            writer.wake();
        }
        if let Some(closed_waiter) = closed_waiter {
            closed_waiter.wake();
        }
    }
}
