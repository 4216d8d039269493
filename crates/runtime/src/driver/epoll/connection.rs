//! Connections and datagram sockets in the driver's table, and the events seen on them.
//!
//! A connection is registered when it has to wait for the first time, so one that never waits costs no `epoll_ctl`.
//! Events are remembered as `readable`, `writable` and `hung_up` until a call finds the contrary. A recv that returns
//! less than was asked for has drained the socket (epoll(7)), so there is no second call to see EAGAIN: later data is a
//! new edge. After a hang-up `readable` stays, because the end of the stream is still to be read and no edge will
//! announce it. (Urgent data, and descriptors passed over a Unix socket, can make a recv return early. No protocol here
//! uses either; a peer that sends them waits until it sends more or leaves.)

use std::io;
use std::os::fd::OwnedFd;
use std::task::{Context, Poll};

use rustix::event::epoll;
use rustix::io::Errno;

use super::Epoll;
use crate::driver::Fresh;
use crate::driver::direct::{OPERATIONS_PER_TURN, Share};
use crate::executor::parked::Parked;
use crate::executor::slots::Key;

pub(super) struct Connection {
    pub socket: OwnedFd,
    pub interest: Interest,
    pub is_datagram: bool,
    pub readable: bool,
    pub writable: bool,
    /// RDHUP, HUP or ERR was seen.
    pub hung_up: bool,
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

/// A direction of a connection, with its state, limit and waiter.
#[derive(Clone, Copy)]
pub(super) enum Direction {
    Read,
    Write,
}

impl Connection {
    pub fn new(socket: OwnedFd, fresh: Fresh) -> Self {
        Connection {
            socket,
            interest: Interest::None,
            is_datagram: fresh == Fresh::Datagram,
            readable: fresh == Fresh::Accepted,
            writable: fresh != Fresh::Connecting,
            hung_up: false,
            reads: Share::default(),
            writes: Share::default(),
            reader: Parked::new(),
            writer: Parked::new(),
            closed_waiter: Parked::new(),
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
        mut operation: impl FnMut(&mut Connection) -> Result<T, Errno>,
    ) -> Poll<io::Result<T>> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        if *direction.ready(connection) {
            if !direction.share(connection).take(self.turn.get(), OPERATIONS_PER_TURN) {
                drop(connections);
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            loop {
                match operation(connection) {
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => break,
                    result => return Poll::Ready(result.map_err(io::Error::from)),
                }
            }
            *direction.ready(connection) = false;
        }
        if let Err(error) = self.register(key, connection, direction) {
            return Poll::Ready(Err(error));
        }
        let displaced = direction.waiter(connection).park(cx.waker());
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
        connection.hung_up |= hung_up;
        let (mut reader, mut writer, mut closed_waiter) = (None, None, None);
        if hung_up || flags.contains(epoll::EventFlags::IN) {
            connection.readable = true;
            reader = connection.reader.take();
        }
        if broken || flags.contains(epoll::EventFlags::OUT) {
            connection.writable = true;
            writer = connection.writer.take();
            if connection.is_datagram && connection.interest == Interest::Both {
                let data = epoll::EventData::new_u64(key.pack());
                // The socket was added and is open, so this cannot fail.
                let _ = epoll::modify(&self.epoll, &connection.socket, data, Interest::Read.flags());
                connection.interest = Interest::Read;
            }
        }
        if hung_up {
            closed_waiter = connection.closed_waiter.take();
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

impl Direction {
    fn ready(self, connection: &mut Connection) -> &mut bool {
        match self {
            Direction::Read => &mut connection.readable,
            Direction::Write => &mut connection.writable,
        }
    }

    fn share(self, connection: &mut Connection) -> &mut Share {
        match self {
            Direction::Read => &mut connection.reads,
            Direction::Write => &mut connection.writes,
        }
    }

    fn waiter(self, connection: &mut Connection) -> &mut Parked {
        match self {
            Direction::Read => &mut connection.reader,
            Direction::Write => &mut connection.writer,
        }
    }
}
