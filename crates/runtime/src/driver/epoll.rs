//! The epoll driver: try first, wait after EAGAIN; one edge-triggered registration per connection, for its life.
//!
//! A connection is registered when it has to wait for the first time, so one that never waits costs no `epoll_ctl`.
//! What the kernel has announced is remembered as `readable`, `writable` and `hung_up` until a call finds the contrary.
//! A recv that returns less than it was asked for has drained the socket (epoll(7)), so no second one is made to see
//! EAGAIN: whatever arrives later is a new edge. After a hang-up `readable` stays, because the end of the stream is
//! still to be read and no edge will announce it. (Urgent data, and descriptors passed over a Unix socket, can make a
//! recv return early. No protocol here has either; a peer that sends them waits for itself until it sends more or
//! leaves.)
//!
//! Listening sockets are level-triggered: after each batch the kernel tells whether there is more, without a last
//! accept that fails. An event that nobody waits for unregisters the socket until it is polled again, so a pause never
//! spins. Where loops share a socket, the kernel tells one of them of each connection; one that stops listening while
//! connections wait therefore has the others look for themselves. (Loops of another process that has the same socket
//! are not reached: they are told with the next connection. So whoever stops listening for good accepts what waits
//! then.)

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use rustix::event::{PollFlags, Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{self, sockopt};

use super::direct::{
    OPERATIONS_PER_TURN, SEND_MAX, Share, is_broken, look_for, receive, send, send_chunks_now, send_now,
};
use super::listening::{Listening, accept};
use super::{DatagramDriver, Driver, End, FileDriver, Fresh, ListenerDriver, Released, StreamDriver, datagrams};
use crate::executor::parked::Parked;
use crate::executor::slots::{Key, Slots};
use crate::memory::buffer::Buffer;
use crate::memory::output::Output;
use crate::socket::AcceptOptions;
use crate::socket::SocketAddress;
use crate::socket::datagram::{DatagramOptions, Received, Room, Transmit};
use crate::socket::options;
use crate::socket::splice;

const INBOX: u64 = u64::MAX;

pub(crate) struct Epoll {
    epoll: OwnedFd,
    connections: RefCell<Slots<Connection>>,
    listeners: RefCell<Slots<Listening<Registered>>>,
    events: RefCell<Vec<epoll::Event>>,
    turn: Cell<u32>,
    /// The last call brought as many events as it could.
    was_full: Cell<bool>,
}

struct Connection {
    socket: OwnedFd,
    interest: Interest,
    is_datagram: bool,
    readable: bool,
    writable: bool,
    /// RDHUP, HUP or ERR was seen.
    hung_up: bool,
    reads: Share,
    writes: Share,
    reader: Parked,
    writer: Parked,
    closed_waiter: Parked,
}

/// What the kernel tells of.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Interest {
    None,
    /// Of a datagram socket: each datagram that leaves makes room, and would be an event.
    Read,
    Both,
}

impl Interest {
    fn flags(self) -> epoll::EventFlags {
        let read = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        if self == Interest::Both { read | epoll::EventFlags::OUT } else { read }
    }
}

/// Whether the kernel watches a listening socket.
type Registered = bool;

/// Marks the keys of listeners in epoll's data; generations leave these bits free.
const LISTENER: u64 = 1 << 31;
const _: () = assert!(crate::executor::slots::GENERATION_BITS < 31);

impl Epoll {
    pub fn new(events_max: usize, inbox: BorrowedFd<'_>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, inbox, epoll::EventData::new_u64(INBOX), flags)?;
        Ok(Epoll {
            epoll,
            connections: RefCell::new(Slots::new()),
            listeners: RefCell::new(Slots::new()),
            events: RefCell::new(Vec::with_capacity(events_max)),
            turn: Cell::new(0),
            was_full: Cell::new(false),
        })
    }

    /// Has the kernel tell of the connection, of both its directions, or of a datagram socket.
    fn register(&self, key: Key, connection: &mut Connection, direction: Direction) -> io::Result<()> {
        let is_read_alone = connection.is_datagram && matches!(direction, Direction::Read);
        let wanted = if is_read_alone { Interest::Read } else { Interest::Both };
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

    /// Runs `operation` if `waiting` says that it may succeed, until it succeeds or would block; then has the task
    /// woken.
    ///
    /// `operation` is called with the table borrowed: it makes system calls and runs nobody's code.
    fn attempt<T>(
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

    fn with_socket<T>(&self, key: Key, f: impl FnOnce(&OwnedFd) -> io::Result<T>) -> io::Result<T> {
        let mut connections = self.connections.borrow_mut();
        f(&connections.get_mut(key).expect("an open socket owns its slot").socket)
    }

    fn handle_connection(&self, key: Key, flags: epoll::EventFlags) {
        let mut connections = self.connections.borrow_mut();
        // A stale event: the slot has been given to another connection since.
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
                // It was added and is open, so this cannot fail.
                let _ = epoll::modify(&self.epoll, &connection.socket, data, Interest::Read.flags());
                connection.interest = Interest::Read;
            }
        }
        if hung_up {
            closed_waiter = connection.closed_waiter.take();
        }
        drop(connections);
        [reader, writer, closed_waiter].into_iter().flatten().for_each(Waker::wake);
    }

    fn handle_listener(&self, key: Key) {
        let mut listeners = self.listeners.borrow_mut();
        let Some(listener) = listeners.get_mut(key) else {
            return;
        };
        let acceptor = listener.handle_event();
        if acceptor.is_none() {
            self.unregister(listener);
        }
        drop(listeners);
        acceptor.into_iter().for_each(Waker::wake);
    }

    fn unregister(&self, listener: &mut Listening<Registered>) {
        if !std::mem::take(&mut listener.registration) {
            return;
        }
        // It was added and is open, so this cannot fail.
        let _ = epoll::delete(&self.epoll, &*listener.socket);
        listener.pass_on();
    }

    fn add_listener(&self, key: Key, listener: &Listening<Registered>) -> Result<(), Errno> {
        let mut flags = epoll::EventFlags::IN;
        if listener.options.exclusive {
            flags |= epoll::EventFlags::EXCLUSIVE;
        }
        epoll::add(&self.epoll, &*listener.socket, epoll::EventData::new_u64(key.pack() | LISTENER), flags)
    }
}

impl StreamDriver for Epoll {
    fn attach(&self, socket: OwnedFd, fresh: Fresh) -> Key {
        self.connections.borrow_mut().insert(Connection {
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
        })
    }

    fn release(&self, key: Key) -> io::Result<Released> {
        let connection = self.connections.borrow_mut().remove(key).ok_or(io::ErrorKind::NotConnected)?;
        if connection.interest != Interest::None {
            // It was added and is open, so this cannot fail.
            let _ = epoll::delete(&self.epoll, &connection.socket);
        }
        Ok(Released { socket: connection.socket, received: Buffer::new(), error: None })
    }

    fn descriptor(&self, key: Key) -> RawFd {
        let mut connections = self.connections.borrow_mut();
        connections.get_mut(key).expect("an open stream owns its slot").socket.as_raw_fd()
    }

    fn close(&self, key: Key) {
        // Closing unregisters. A duplicate of the descriptor elsewhere may still send events: their key is stale then.
        let connection = self.connections.borrow_mut().remove(key);
        drop(connection);
    }

    fn may_have_input(&self, key: Key) -> bool {
        let is_told = {
            let mut connections = self.connections.borrow_mut();
            let connection = connections.get_mut(key).expect("an open stream owns its slot");
            // The edge that makes it readable is an event.
            connection.interest != Interest::None && !connection.readable && !connection.hung_up
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
        self.connections.borrow_mut().get_mut(key).is_some_and(|connection| !connection.writable)
    }

    fn poll_recv(&self, key: Key, cx: &mut Context<'_>, into: &mut Buffer, max: usize) -> Poll<io::Result<usize>> {
        self.attempt(key, cx, Direction::Read, |connection| {
            let received = receive(connection.socket.as_fd(), into, max)?;
            // It may have drained the socket; after a hang-up the end is still to be read, and no edge will announce
            // it.
            connection.readable = received == max || received == 0 || connection.hung_up;
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
            // A short send has filled the socket; that it has room again will be an edge.
            connection.writable = sent == asked || connection.hung_up;
            Ok(sent)
        })
    }

    fn try_send(&self, key: Key, out: &mut Output, is_last: bool) -> io::Result<usize> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        if !connection.writable || out.is_empty() || !connection.writes.take(self.turn.get(), OPERATIONS_PER_TURN) {
            return Ok(0);
        }
        let (sent, asked) = send_chunks_now(connection.socket.as_fd(), out, is_last)?;
        out.consume(sent);
        // A short send has filled the socket; that it has room again will be an edge.
        connection.writable = sent == asked || connection.hung_up;
        Ok(sent)
    }

    fn try_send_copy(&self, key: Key, bytes: &[u8], is_last: bool) -> io::Result<usize> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        if !connection.writable || !connection.writes.take(self.turn.get(), OPERATIONS_PER_TURN) {
            return Ok(0);
        }
        let sent = send_now(connection.socket.as_fd(), bytes, is_last)?;
        // A short send has filled the socket; that it has room again will be an edge.
        connection.writable = sent == bytes.len() || connection.hung_up;
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
            // Mostly the socket is full, but it may be the end of a file that was cut off, or a disk that has failed:
            // then no edge would come. To ask takes a tenth of what a second call in vain does.
            connection.writable = sent == asked || connection.hung_up || has_room(connection.socket.as_fd());
            Ok(sent)
        })
    }

    fn poll_connected(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.attempt(key, cx, Direction::Write, |connection| sockopt::socket_error(&connection.socket)?)
    }

    fn poll_peer_closed(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        if connection.hung_up {
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

impl DatagramDriver for Epoll {
    fn open_datagram(&self, options: &DatagramOptions) -> io::Result<Key> {
        Ok(self.attach(datagrams::open(options)?, Fresh::Datagram))
    }

    fn adopt_datagram(&self, socket: OwnedFd, options: &DatagramOptions) -> io::Result<Key> {
        Ok(self.attach(datagrams::adopt(socket, options)?, Fresh::Datagram))
    }

    fn close_datagram(&self, key: Key) {
        self.close(key);
    }

    fn poll_recv_datagrams(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        room: Room<'_>,
        received: &mut Vec<Received>,
    ) -> Poll<io::Result<()>> {
        let Room { memory, bytes_each, count } = room;
        // Few datagrams say nothing about the next one: the socket is readable until it says EAGAIN.
        self.attempt(key, cx, Direction::Read, |connection| {
            let room = Room { memory: &mut *memory, bytes_each, count };
            datagrams::receive(connection.socket.as_fd(), room, received)?;
            connection.reads.count_as(datagrams::operations(received));
            Ok(())
        })
    }

    fn send_datagrams(&self, key: Key, transmits: &[Transmit<'_>]) -> io::Result<usize> {
        self.with_socket(key, |socket| datagrams::send(socket.as_fd(), transmits))
    }

    fn poll_send_ready(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_writable(key, cx)
    }

    fn datagram_address(&self, key: Key) -> io::Result<SocketAddress> {
        self.address(key, End::Local)
    }
}

impl FileDriver for Epoll {}

impl ListenerDriver for Epoll {
    fn attach_listener(&self, socket: Arc<OwnedFd>, options: AcceptOptions) -> Key {
        self.listeners.borrow_mut().insert(Listening::new(socket, options))
    }

    fn set_accept_options(&self, key: Key, options: AcceptOptions) {
        let mut listeners = self.listeners.borrow_mut();
        let Some(listener) = listeners.get_mut(key) else {
            return;
        };
        let acceptor = if listener.set_options(options) && listener.registration {
            self.unregister(listener);
            listener.acceptor.take()
        } else {
            None
        };
        drop(listeners);
        acceptor.into_iter().for_each(Waker::wake);
    }

    fn detach_listener(&self, key: Key) {
        self.pause_listener(key);
        let listener = self.listeners.borrow_mut().remove(key);
        drop(listener);
    }

    fn pause_listener(&self, key: Key) {
        let mut listeners = self.listeners.borrow_mut();
        let Some(listener) = listeners.get_mut(key) else {
            return;
        };
        self.unregister(listener);
        let acceptor = listener.pause();
        drop(listeners);
        drop(acceptor);
    }

    fn rearm_shared_listeners(&self) {
        // Adding looks at the socket, and epoll does not allow to modify exclusive registrations.
        self.listeners.borrow_mut().for_each(|key, listener| {
            if listener.registration && listener.options.exclusive {
                let _ = epoll::delete(&self.epoll, &*listener.socket);
                if self.add_listener(key, listener).is_err() {
                    // No kernel memory: the acceptor tries again and is told.
                    listener.registration = false;
                    listener.acceptor.take().into_iter().for_each(Waker::wake);
                }
            }
        });
    }

    fn accept_for_another(&self, address: &SocketAddress, socket: Arc<OwnedFd>) {
        let mut wakers = Vec::new();
        self.listeners
            .borrow_mut()
            .for_each(|_, listener| wakers.extend(listener.accept_for_another(address, &socket)));
        wakers.into_iter().for_each(Waker::wake);
    }

    fn try_accept(&self, key: Key) -> io::Result<Option<(OwnedFd, SocketAddress)>> {
        let mut listeners = self.listeners.borrow_mut();
        let listener = listeners.get_mut(key).expect("an open listener owns its slot");
        accept(&listener.socket)
    }

    fn poll_accept(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<(OwnedFd, SocketAddress)>> {
        let mut listeners = self.listeners.borrow_mut();
        let listener = listeners.get_mut(key).expect("an open listener owns its slot");
        if let Some(accepted) = listener.next(self.turn.get(), accept).transpose() {
            return Poll::Ready(accepted);
        }
        if !listener.registration {
            if let Err(errno) = self.add_listener(key, listener) {
                return Poll::Ready(Err(errno.into()));
            }
            listener.registration = true;
        }
        let displaced = listener.acceptor.park(cx.waker());
        let has_more = listener.has_more();
        drop(listeners);
        if has_more {
            cx.waker().wake_by_ref();
        }
        drop(displaced);
        Poll::Pending
    }
}

impl Driver for Epoll {
    fn name(&self) -> &'static str {
        "epoll"
    }

    fn has_events(&self) -> bool {
        self.was_full.get()
    }

    fn wait(&self, timeout: Option<Duration>) -> io::Result<usize> {
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        // Held while wakers run: only this function uses it, and no waker calls it.
        let mut events = self.events.borrow_mut();
        events.clear();
        let result = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut *events), timeout.as_ref());
        self.turn.set(self.turn.get().wrapping_add(1));
        self.was_full.set(events.len() == events.capacity());
        match result {
            Err(Errno::INTR) => return Ok(0),
            other => other?,
        };
        for event in events.iter() {
            let (flags, data) = (event.flags, event.data.u64());
            match data {
                INBOX => {}
                data if data & LISTENER != 0 => self.handle_listener(Key::unpack(data & !LISTENER)),
                data => self.handle_connection(Key::unpack(data), flags),
            }
        }
        Ok(events.len())
    }
}

/// Whether a send would not wait. If it would, the kernel will tell of room.
fn has_room(socket: BorrowedFd<'_>) -> bool {
    look_for(socket, PollFlags::OUT) != Err(Errno::AGAIN)
}

/// The two directions of a connection and what belongs to each.
#[derive(Clone, Copy)]
enum Direction {
    Read,
    Write,
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
