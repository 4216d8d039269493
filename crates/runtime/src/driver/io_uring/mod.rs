//! The io_uring driver: what would wait is queued during the turn and submitted by the call that waits.
//!
//! A fresh connection is served like with epoll: receive and send at once, because the data is usually there and a
//! request per connection gains nothing from a queue. From the first receive on that had to wait the connection uses
//! the ring: a receive is armed with provided buffers, and what it gets is copied to a lease when it completes, so a
//! waiting connection holds no memory of ours and a buffer never outlives its completion. Of a connection that is kept
//! alive one multishot receive serves all requests. A short answer is queued: its [`Output`] goes on loan until the
//! completion. What is large, or goes on after a full socket, is tried directly and waits by a poll, which moves no
//! data before somebody wants it: a slow consumer stops the sender. A short answer that is there at once is posted: it
//! leaves with the call that ends the turn, and nobody waits for it (`posts.rs`). Sockets are closed with that call,
//! too. A multishot receive whose data nobody reads is ended. (`streams.rs`, and `connection.rs` for its slots)
//!
//! Operations have a shape that leaves little to go wrong. There is at most one of each [`Op`] per connection. A poll
//! of the task only *notes* what it wants; the entry is made when the turn ends, from what the slot says then, so
//! nothing is ever submitted for a descriptor that has been closed or given to another. User data is operation +
//! generation + slot. The slot of a closed connection stays until its last operation has completed: it holds the memory
//! of a send, repeats a cancellation that found nothing, and is what the end of a loop waits for. That no completion
//! reaches the next owner of a slot does not depend on this: the generation sees to it. A completion whose slot has
//! gone is stale and finds nothing.
//!
//! Losing nothing: a receive without a buffer (ENOBUFS) is done directly; a full completion queue is kept by the kernel
//! and read with the next call; a multishot operation that the kernel ends is armed again. What the kernel has no
//! memory for has failed with ENOMEM: that connection ends, accepting pauses, and the rest goes on. Where it had none
//! to keep a completion, all that is in flight is cancelled to find out whose it was (`lost.rs`).

mod buffers;
mod connection;
mod file_reads;
mod idle;
mod linux;
mod listeners;
mod lost;
mod operation;
mod posts;
pub(crate) mod ring;
pub(crate) mod sockets;
mod streams;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use io_uring::squeue::Flags;
use io_uring::{cqueue, opcode, types};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

use self::buffers::Buffers;
use self::connection::{Connection, Expects, Multishot, OWNED, Receive, ReceiveOptions, Sending};
use self::file_reads::FileReads;
use self::idle::Sweep;
use self::linux::LinuxQueues;
use self::listeners::Listeners;
use self::operation::{
    KIND_CANCEL, KIND_CANCEL_OP, KIND_CLOSE, KIND_FILE_READ, KIND_INBOX, KIND_LISTENER, KIND_POST, Op, Ops,
    kind_and_key, push_cancel, user_data,
};
use self::posts::Posts;
use self::ring::{Completion, Queues, Ring};
use self::sockets::{LinuxSockets, Sockets};
use super::{
    DatagramDriver, Driver, End, FileDriver, Fresh, ListenerDriver, RingCounters, RingOptions, StreamDriver, datagrams,
};
use crate::buffer::Buffer;
use crate::executor::parked::Parked;
use crate::executor::slots::{Key, Slots};
use crate::files::file_read::{FileRead, FileReading};
use crate::output::Output;
use crate::socket::AcceptOptions;
use crate::socket::SocketAddress;
use crate::socket::datagram::{DatagramOptions, Received, Room, Transmit};

/// How many unused [`Sending`]s are kept.
const SENDINGS_KEPT_MAX: usize = 64;

/// For what belongs to no connection.
const NO_KEY: Key = Key { index: 0, generation: 0 };

/// What the self-test wants to receive: fits every buffer.
const TEST_BYTES_MAX: usize = 16;

/// Calls until a cancelled receive must have completed: one, unless the queue was full.
const CANCEL_CALLS_MAX: u32 = 16;

/// Waits for the operations of closed connections when a loop ends, and how long each is: a second in all.
const CLOSE_CALLS_MAX: u32 = 100;
const CLOSE_PAUSE: Duration = Duration::from_millis(10);

/// What stands behind the driver.
pub(crate) trait Kernel {
    type Queues: Queues;
    type Sockets: Sockets;
}

/// The kernel itself.
pub(crate) struct Linux;

impl Kernel for Linux {
    type Queues = LinuxQueues;
    type Sockets = LinuxSockets;
}

pub(crate) struct IoUring<K: Kernel = Linux> {
    /// Dropped first: then the kernel has let go of the memory below.
    ring: RefCell<Ring<K::Queues>>,
    sockets: K::Sockets,
    buffers: RefCell<Option<Buffers>>,
    connections: RefCell<Slots<Connection>>,
    listeners: Listeners,
    file_reads: FileReads,
    /// What to look at when the turn ends.
    requests: RefCell<Vec<Request>>,
    completions: RefCell<Vec<Completion>>,
    /// Not dropped before reuse: they keep the allocations of a send.
    #[expect(clippy::vec_box, reason = "the kernel knows their address while they are in use")]
    sendings: RefCell<Vec<Box<Sending>>>,
    tickets: Cell<u32>,
    posts: RefCell<Posts>,
    /// The kernel carries posted sends out while it takes them.
    may_post: Cell<bool>,
    /// To be closed when the turn ends.
    closing: RefCell<Vec<OwnedFd>>,
    /// Connections that stayed when they were closed, the newest last; see `posts.rs`.
    closed: RefCell<VecDeque<Key>>,
    /// How many of them are still there, and who waits until none is.
    staying: Cell<usize>,
    all_sent_waiter: RefCell<Parked>,
    /// The kernel can close without a word.
    may_close: bool,
    inbox: OwnedFd,
    is_inbox_armed: Cell<bool>,
    multishot: Cell<Multishot>,
    sweep: Sweep,
    buffers_missed: Cell<u64>,
    completions_max: usize,
    turn: Cell<u32>,
    /// After the last call there was more for the next one.
    has_more: Cell<bool>,
}

enum Request {
    /// A connection wants operations.
    Connection(Key),
    /// The operation of this user data is not wanted any more.
    Cancel(u64),
}

impl IoUring<Linux> {
    /// A driver that has been tried out; `is_best_only` = with the features that make it better than epoll.
    ///
    /// Errors: why the kernel cannot or must not be used this way.
    pub fn new(
        options: &RingOptions,
        is_best_only: bool,
        completions_max: usize,
        inbox: BorrowedFd<'_>,
    ) -> io::Result<Self> {
        let queues = LinuxQueues::new(options)?;
        if is_best_only && !queues.is_deferred() {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel's io_uring is not faster than epoll"));
        }
        let can_skip_success = options.allows(5, 17) && queues.can_skip_success();
        let driver = IoUring::over(queues, LinuxSockets, options, can_skip_success, completions_max, inbox)?;
        driver.test()?;
        Ok(driver)
    }

    /// Sends and receives over a socket pair by every operation that will be used.
    fn test(&self) -> io::Result<()> {
        let refused = |what: &str| io::Error::new(io::ErrorKind::Unsupported, format!("its self-test failed: {what}"));
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let pair = || net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let (near, far) = pair()?;
        let (near, far) = (self.attach(near, Fresh::Connected), self.attach(far, Fresh::Connected));
        {
            let mut connections = self.connections.borrow_mut();
            connections.get_mut(near).expect("just attached").is_on_ring = true;
            connections.get_mut(far).expect("just attached").expects = Expects::Messages;
        }
        // A round for each kind of receive, as the kernel may not know the better ones.
        let tested = (0..3).try_for_each(|_| {
            let mut cx = Context::from_waker(Waker::noop());
            let (mut output, mut input) = (Output::new(), Buffer::new());
            output.push(b"self-");
            output.push(b"test");
            let is_pending = self.poll_recv(far, &mut cx, &mut input, TEST_BYTES_MAX).is_pending()
                && self.poll_send(near, &mut cx, &mut output).is_pending();
            if !is_pending {
                return Err(refused("nothing was queued"));
            }
            // All of it happens within the first call; the second is for kernels that put it off.
            for _ in 0..2 {
                self.wait(Some(Duration::ZERO))?;
            }
            match self.poll_send(near, &mut cx, &mut output) {
                Poll::Ready(Ok(9)) => {}
                Poll::Ready(Err(error)) => return Err(error),
                _ => return Err(refused("nothing was sent")),
            }
            match self.poll_recv(far, &mut cx, &mut input, TEST_BYTES_MAX) {
                Poll::Ready(Ok(_)) if input.readable() == b"self-test" => Ok(()),
                Poll::Ready(Err(error)) => Err(error),
                _ => Err(refused("nothing was received")),
            }
        });
        let tested = tested.and_then(|()| self.test_posts(pair));
        self.close(near);
        self.close(far);
        tested
    }
}

impl<K: Kernel> IoUring<K> {
    /// A driver over these queues and sockets; `can_skip_success` = an operation can end without a word when all went
    /// well.
    ///
    /// Errors: the kernel's, when it has no buffers or descriptors.
    pub fn over(
        queues: K::Queues,
        sockets: K::Sockets,
        options: &RingOptions,
        can_skip_success: bool,
        completions_max: usize,
        inbox: BorrowedFd<'_>,
    ) -> io::Result<Self> {
        let mut ring = Ring::new(queues);
        let buffers = match options.buffers {
            0 => None,
            _ if !options.allows(5, 19) => None,
            count => match Buffers::register(&mut ring, count, options.buffer_bytes) {
                Ok(buffers) => Some(buffers),
                // An older kernel: receives wait by a poll.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => None,
                Err(error) => return Err(error),
            },
        };
        Ok(IoUring {
            ring: RefCell::new(ring),
            sockets,
            buffers: RefCell::new(buffers),
            connections: RefCell::new(Slots::new()),
            listeners: Listeners::new(),
            file_reads: FileReads::new(),
            requests: RefCell::new(Vec::new()),
            completions: RefCell::new(Vec::new()),
            sendings: RefCell::new(Vec::new()),
            tickets: Cell::new(OWNED),
            posts: RefCell::default(),
            may_post: Cell::new(can_skip_success),
            closing: RefCell::default(),
            closed: RefCell::default(),
            staying: Cell::new(0),
            all_sent_waiter: RefCell::default(),
            may_close: can_skip_success,
            inbox: inbox.try_clone_to_owned()?,
            is_inbox_armed: Cell::new(false),
            multishot: Cell::new(match options.multishot {
                true if options.allows(6, 17) => Multishot::Limited,
                true if options.allows(6, 0) => Multishot::Unlimited,
                _ => Multishot::Never,
            }),
            sweep: Sweep::new(options.idle_after),
            buffers_missed: Cell::new(0),
            completions_max,
            turn: Cell::new(0),
            has_more: Cell::new(false),
        })
    }

    /// Has the entry of this operation made when the turn ends.
    fn request(&self, key: Key, connection: &mut Connection, op: Op) {
        connection.wanted.add(op);
        self.request_wanted(key, connection);
    }

    /// Has the entries of all that a connection wants made when the turn ends.
    fn request_wanted(&self, key: Key, connection: &mut Connection) {
        if !std::mem::replace(&mut connection.is_requested, true) {
            self.requests.borrow_mut().push(Request::Connection(key));
        }
    }

    fn keep(&self, mut sending: Box<Sending>) {
        sending.output = Output::new();
        sending.is_last = false;
        sending.result = None;
        let mut sendings = self.sendings.borrow_mut();
        if sendings.len() < SENDINGS_KEPT_MAX {
            sendings.push(sending);
        }
    }

    /// Turns to idle connections; returns how long to wait.
    fn sweep(&self, timeout: Option<Duration>) -> Option<Duration> {
        let mut connections = self.connections.borrow_mut();
        let may_arm = !self.requests.borrow().is_empty();
        let limit = self.sweep.run(may_arm, &mut connections, |key, connection| self.request_wanted(key, connection));
        match (timeout, limit) {
            (Some(timeout), Some(limit)) => Some(timeout.min(limit)),
            (timeout, limit) => timeout.or(limit),
        }
    }

    /// Makes the entries of everything that was requested in this turn.
    fn make_entries(&self) {
        let mut ring = self.ring.borrow_mut();
        if !self.is_inbox_armed.replace(true) {
            let poll = opcode::PollAdd::new(types::Fd(self.inbox.as_raw_fd()), libc::POLLIN as u32).multi(true);
            // SAFETY: the inbox's descriptor belongs to this driver.
            unsafe { ring.push(&poll.build().user_data(user_data(KIND_INBOX, NO_KEY))) };
        }
        let receive_options = self.receive_options();
        self.posts.borrow_mut().make_entries(&mut ring);
        self.make_closes(&mut ring);
        let mut connections = self.connections.borrow_mut();
        self.listeners.make_entries(&mut ring);
        self.file_reads.make_entries(&mut ring);
        for request in self.requests.borrow_mut().drain(..) {
            match request {
                Request::Connection(key) => {
                    if let Some(connection) = connections.get_mut(key) {
                        let was_armed = connection.in_flight.has(Op::Recv);
                        connection.make_entries(key, &mut ring, receive_options);
                        let is_armed = connection.in_flight.has(Op::Recv);
                        if is_armed && !was_armed {
                            self.sweep.armed.update(|armed| armed + 1);
                            ring.counters.receives += 1;
                        }
                    }
                }
                Request::Cancel(operation) => push_cancel(&mut ring, operation),
            }
        }
    }

    /// Has the kernel close what was closed in this turn.
    fn make_closes(&self, ring: &mut Ring<impl Queues>) {
        for socket in self.closing.borrow_mut().drain(..) {
            let descriptor = socket.into_raw_fd();
            let close = opcode::Close::new(types::Fd(descriptor)).build().flags(Flags::SKIP_SUCCESS);
            // SAFETY: the descriptor is nobody's any more, and stays what it is until the kernel takes the entry.
            unsafe { ring.push(&close.user_data(user_data(KIND_CLOSE, key_of_descriptor(descriptor)))) };
        }
    }

    fn receive_options(&self) -> ReceiveOptions {
        let buffer_bytes = self.buffers.borrow().as_ref().map_or(0, Buffers::size);
        ReceiveOptions { multishot: self.multishot.get(), buffer_bytes, period: self.sweep.period() }
    }

    fn handle_completion(&self, completion: &Completion) {
        let (kind, key) = kind_and_key(completion.user_data);
        match kind {
            KIND_INBOX => self.is_inbox_armed.set(cqueue::more(completion.flags)),
            KIND_CANCEL if completion.was_refused() => self.listeners.cancel_again(key),
            KIND_CANCEL_OP if completion.was_refused() || completion.result == -libc::ENOENT => self.cancel_again(key),
            KIND_CLOSE if completion.was_refused() => self.sockets.close(descriptor_of_key(key)),
            // `handle_failed_posts` has seen to posts.
            KIND_CANCEL | KIND_CANCEL_OP | KIND_CLOSE | KIND_POST => {}
            KIND_FILE_READ => self.file_reads.handle_completion(key, completion),
            KIND_LISTENER => self.listeners.handle_completion(key, completion),
            kind => self.handle_connection(Op::ALL[kind as usize], key, completion),
        }
    }

    fn handle_connection(&self, op: Op, key: Key, completion: &Completion) {
        let receive_options = self.receive_options();
        let mut connections = self.connections.borrow_mut();
        let mut buffers = self.buffers.borrow_mut();
        let buffer = cqueue::buffer_select(completion.flags);
        if op == Op::Recv && !cqueue::more(completion.flags) {
            self.sweep.armed.update(|armed| armed - 1);
            self.buffers_missed.update(|count| count + u64::from(completion.result == -libc::ENOBUFS));
        }
        let mut is_broken_off = false;
        // A slot outlives its operations, so this is not expected; a buffer goes back nevertheless.
        if let Some(connection) = connections.get_mut(key) {
            if completion.result == -libc::EINVAL && op == Op::Recv && connection.receive != Receive::Single {
                // An older kernel.
                self.multishot.set(match receive_options.multishot {
                    Multishot::Limited => Multishot::Unlimited,
                    _ => Multishot::Never,
                });
            }
            let length = usize::try_from(completion.result).unwrap_or(0);
            let bytes = match (buffer, buffers.as_ref()) {
                (Some(number), Some(buffers)) => buffers.bytes(number, length),
                _ => &[],
            };
            connection.handle(op, completion, bytes, receive_options);
            if let Some(sent) = connection.take_owned() {
                // Nobody else might say so.
                if let Some(Err(errno)) = sent.result {
                    self.break_off(connection, errno);
                    is_broken_off = true;
                } else if sent.is_last
                    && let Some(socket) = &connection.socket
                {
                    // A peer that has gone meanwhile is no news.
                    let _ = self.sockets.shutdown_write(socket.as_fd());
                }
                self.keep(sent);
            }
        }
        if let (Some(number), Some(buffers)) = (buffer, buffers.as_mut()) {
            buffers.give_back(number);
        }
        drop(buffers);
        let Some(connection) = connections.get_mut(key) else {
            return;
        };
        if connection.is_closing && connection.socket.is_some() && connection.sending().is_none() {
            drop(connections);
            return self.close(key);
        }
        if connection.socket.is_none() {
            let sending = connection.take_sending_of_ours();
            let removed = connection.in_flight.is_empty().then(|| connections.remove(key));
            drop(connections);
            drop((sending, removed));
            return;
        }
        let wakers = if is_broken_off { connection.take_all_wakers() } else { connection.take_wakers(op) };
        if !connection.wanted.is_empty() {
            self.request_wanted(key, connection);
        }
        if !cqueue::more(completion.flags) {
            connection.drop_empty_transit();
        }
        drop(connections);
        wakers.into_iter().flatten().for_each(Waker::wake);
    }

    /// Part of what was to be sent is missing for good: nothing may follow. The caller wakes everybody.
    fn break_off(&self, connection: &mut Connection, errno: Errno) {
        connection.break_off(errno);
        if let Some(socket) = &connection.socket {
            // One that is broken has ended.
            let _ = self.sockets.shutdown(socket.as_fd());
        }
    }

    /// Has everything that moves data of a connection come to its end, in some calls: the receive in flight is
    /// cancelled and has told what it got until then, a queued send is submitted and done. Errors: if that is not so.
    fn settle(&self, key: Key) -> io::Result<()> {
        for _ in 0..CANCEL_CALLS_MAX {
            let mut completions = Vec::new();
            {
                let mut connections = self.connections.borrow_mut();
                let connection = connections.get_mut(key).ok_or(io::ErrorKind::NotConnected)?;
                let is_send_wanted = connection.wanted.has(Op::Send);
                connection.wanted = Ops::default();
                if is_send_wanted {
                    connection.wanted.add(Op::Send);
                }
                if connection.in_flight.has(Op::Recv) {
                    connection.receive = Receive::Ending;
                    connection.wanted.add(Op::EndRecv);
                }
                if connection.wanted.is_empty()
                    && !connection.in_flight.has(Op::Recv)
                    && !connection.in_flight.has(Op::Send)
                {
                    return match connection.sending() {
                        Some(sending) if sending.result != Some(Ok(sending.offered)) => Err(send_under_way()),
                        _ => Ok(()),
                    };
                }
                let mut ring = self.ring.borrow_mut();
                connection.make_entries(key, &mut ring, self.receive_options());
                ring.enter(Some(Duration::ZERO))?;
                ring.take(&mut completions, usize::MAX);
            }
            completions.iter().for_each(|completion| self.handle_completion(completion));
        }
        Err(send_under_way())
    }

    /// Submits the cancellations that were requested last, and waits until nothing is in flight any more for
    /// connections that were closed. False if that takes too long.
    fn finish_closed(&self) -> bool {
        self.make_entries();
        self.finish(|| self.connections.borrow().len() == 0 && self.file_reads.is_empty())
    }

    /// Waits for what is in flight, for a bounded time, until there is no more of it.
    fn finish(&self, is_over: impl Fn() -> bool) -> bool {
        for call in 0..CLOSE_CALLS_MAX {
            // Most of it ends within the first calls, without a wait.
            let is_first = call < 2;
            if is_over() {
                return true;
            }
            let mut completions = Vec::new();
            {
                let mut ring = self.ring.borrow_mut();
                if ring.enter(Some(if is_first { Duration::ZERO } else { CLOSE_PAUSE })).is_err() {
                    return false;
                }
                ring.take(&mut completions, usize::MAX);
            }
            completions.iter().for_each(|completion| self.handle_completion(completion));
        }
        false
    }

    /// Takes the socket out of a slot, which stays for as long as something is in flight: to be cancelled by the
    /// caller.
    fn take_socket(&self, key: Key) -> Option<(OwnedFd, Ops)> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key)?;
        let socket = connection.socket.take()?;
        connection.wanted = Ops::default();
        let waiter = connection.is_closing.then(|| self.leave_closed()).flatten();
        let wakers = connection.take_all_wakers();
        let received = connection.busy.as_mut().map(|busy| std::mem::take(&mut busy.received));
        let sending = connection.take_sending_of_ours();
        let in_flight = connection.in_flight;
        let removed = in_flight.is_empty().then(|| connections.remove(key));
        drop(connections);
        drop((wakers, received, sending, removed));
        waiter.into_iter().for_each(Waker::wake);
        Some((socket, in_flight))
    }

    /// Ends operations of a socket that has been closed, when the turn ends: until then the kernel keeps the connection
    /// open, and the peer hears nothing of its end.
    fn cancel(&self, key: Key, operations: Ops) {
        let in_flight = Op::ALL.into_iter().filter(|op| operations.has(*op));
        self.requests.borrow_mut().extend(in_flight.map(|op| Request::Cancel(user_data(op as u64, key))));
    }

    /// The kernel did not find an operation that was to be cancelled: it has completed, or is just between two
    /// attempts. Or there was no memory for the cancellation. What is in flight all the same is cancelled once more.
    fn cancel_again(&self, key: Key) {
        let mut connections = self.connections.borrow_mut();
        let Some(connection) = connections.get_mut(key) else { return };
        if connection.socket.is_none() {
            self.cancel(key, connection.in_flight);
        } else if connection.is_receive_ending() {
            self.request(key, connection, Op::EndRecv);
        }
    }
}

impl<K: Kernel> DatagramDriver for IoUring<K> {
    fn open_datagram(&self, options: &DatagramOptions) -> io::Result<Key> {
        if let Some(datagrams) = self.sockets.datagrams() {
            return datagrams.open_datagram(options);
        }
        Ok(self.attach(datagrams::open(options)?, Fresh::Datagram))
    }

    fn adopt_datagram(&self, socket: OwnedFd, options: &DatagramOptions) -> io::Result<Key> {
        if let Some(datagrams) = self.sockets.datagrams() {
            return datagrams.adopt_datagram(socket, options);
        }
        Ok(self.attach(datagrams::adopt(socket, options)?, Fresh::Datagram))
    }

    fn close_datagram(&self, key: Key) {
        if let Some(datagrams) = self.sockets.datagrams() {
            return datagrams.close_datagram(key);
        }
        self.close(key);
    }

    fn poll_recv_datagrams(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        room: Room<'_>,
        received: &mut Vec<Received>,
    ) -> Poll<io::Result<()>> {
        if let Some(datagrams) = self.sockets.datagrams() {
            return datagrams.poll_recv_datagrams(key, cx, room, received);
        }
        let Room { memory, bytes_each, count } = room;
        // Few datagrams say nothing about the next one: the socket is readable until it says EAGAIN.
        self.attempt(key, cx, Op::Readable, |connection| {
            let room = Room { memory: &mut *memory, bytes_each, count };
            datagrams::receive(connection.socket().as_fd(), room, received)?;
            connection.reads.count_as(datagrams::operations(received));
            Ok(())
        })
    }

    fn send_datagrams(&self, key: Key, transmits: &[Transmit<'_>]) -> io::Result<usize> {
        if let Some(datagrams) = self.sockets.datagrams() {
            return datagrams.send_datagrams(key, transmits);
        }
        self.with_socket(key, |socket| datagrams::send(socket.as_fd(), transmits))
    }

    fn poll_send_ready(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(datagrams) = self.sockets.datagrams() {
            return datagrams.poll_send_ready(key, cx);
        }
        self.poll_writable(key, cx)
    }

    fn datagram_address(&self, key: Key) -> io::Result<SocketAddress> {
        if let Some(datagrams) = self.sockets.datagrams() {
            return datagrams.datagram_address(key);
        }
        self.address(key, End::Local)
    }
}

impl<K: Kernel> ListenerDriver for IoUring<K> {
    fn listen(&self, address: &SocketAddress, backlog: i32) -> io::Result<OwnedFd> {
        self.sockets.listen(address, backlog)
    }

    fn listener_address(&self, socket: &OwnedFd) -> io::Result<SocketAddress> {
        self.sockets.listener_address(socket)
    }

    fn attach_listener(&self, socket: Arc<OwnedFd>, options: AcceptOptions) -> Key {
        self.listeners.attach(socket, options)
    }

    fn set_accept_options(&self, key: Key, options: AcceptOptions) {
        self.listeners.set_options(key, options);
    }

    fn detach_listener(&self, key: Key) {
        self.listeners.detach(key);
    }

    fn pause_listener(&self, key: Key) {
        self.listeners.pause(key);
    }

    fn rearm_shared_listeners(&self) {
        self.listeners.rearm_shared();
    }

    fn accept_for_another(&self, address: &SocketAddress, socket: Arc<OwnedFd>) {
        self.listeners.accept_for_another(address, &socket);
    }

    fn try_accept(&self, key: Key) -> io::Result<Option<(OwnedFd, SocketAddress)>> {
        self.listeners.try_accept(key, &self.sockets)
    }

    fn poll_accept(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<(OwnedFd, SocketAddress)>> {
        self.listeners.poll_accept(key, cx, self.turn.get(), &self.sockets)
    }
}

impl<K: Kernel> FileDriver for IoUring<K> {
    fn read_file(&self, read: FileRead) -> Result<FileReading, FileRead> {
        self.file_reads.begin(read)
    }
}

impl<K: Kernel> Driver for IoUring<K> {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn ring_counters(&self) -> RingCounters {
        let (idle, buffers_missed) = (self.sweep.ended.get(), self.buffers_missed.get());
        RingCounters { idle, buffers_missed, ..self.ring.borrow().counters }
    }

    fn has_events(&self) -> bool {
        self.has_more.get()
    }

    fn next_event(&self) -> Option<u64> {
        self.ring.borrow().next_event()
    }

    fn wait(&self, timeout: Option<Duration>) -> io::Result<usize> {
        let timeout = self.sweep(timeout);
        self.make_entries();
        // Held while wakers run: only this function uses it, and no waker calls it.
        let mut completions = self.completions.borrow_mut();
        {
            let mut ring = self.ring.borrow_mut();
            let is_look = timeout == Some(Duration::ZERO);
            // A call does a bounded part of the kernel's work; a look has to see all that has happened.
            for _ in 0..if is_look { CANCEL_CALLS_MAX } else { 1 } {
                if ring.has_work() || !(is_look || ring.has_completions()) {
                    ring.enter(timeout)?;
                }
                ring.take(&mut completions, self.completions_max);
                self.take_failed_posts(&mut ring, &mut completions)?;
                self.has_more.set(ring.has_deferred_work() || ring.has_completions());
                if !completions.is_empty() || !ring.has_deferred_work() {
                    break;
                }
            }
        }
        let has_lost = self.ring.borrow().has_lost();
        if has_lost {
            self.cancel_all(&mut completions)?;
        }
        self.turn.set(self.turn.get().wrapping_add(1));
        self.handle_failed_posts(&completions);
        if has_lost {
            self.break_off_posted();
        }
        self.clear_posts();
        if !has_lost {
            // Where there were posts all that had completed was taken.
            self.ring.borrow_mut().put_back(&mut completions, self.completions_max, Posts::is_of_post);
        }
        for completion in completions.iter() {
            self.handle_completion(completion);
        }
        if has_lost {
            self.end_lost();
        }
        let count = completions.len();
        completions.clear();
        Ok(count)
    }
}

/// A descriptor that the ring is to close, as user data has it.
fn key_of_descriptor(descriptor: RawFd) -> Key {
    Key { index: descriptor as u32, generation: 0 }
}

/// The descriptor that the ring was to close and has not.
fn descriptor_of_key(key: Key) -> OwnedFd {
    // SAFETY: `make_closes` has made the key of a descriptor that is nobody's, and the kernel has not taken its entry.
    unsafe { OwnedFd::from_raw_fd(key.index as RawFd) }
}

fn send_under_way() -> io::Error {
    io::Error::new(io::ErrorKind::ResourceBusy, "data is still being sent")
}

impl<K: Kernel> Drop for IoUring<K> {
    fn drop(&mut self) {
        let handle = |completion: &Completion| {
            if let (KIND_FILE_READ, key) = kind_and_key(completion.user_data) {
                self.file_reads.handle_completion(key, completion);
            }
        };
        self.file_reads.give_up_begun();
        // No turn comes that would see what the last has left: a descriptor that the kernel has not closed is among it.
        let mut completions = Vec::new();
        self.ring.borrow_mut().take(&mut completions, usize::MAX);
        completions.iter().for_each(|completion| self.handle_completion(completion));
        // No turn comes that would close them.
        self.closing.take().into_iter().for_each(|socket| self.sockets.close(socket));
        // Every stream has gone before; what is left of them is in flight.
        let is_cancelled = self.ring.borrow_mut().cancel_all(handle);
        let is_over = is_cancelled || self.finish_closed();
        // No cancellation ends what a disk is doing.
        if !self.finish(|| self.file_reads.is_empty()) {
            self.file_reads.forget_memory();
        }
        if !is_over {
            // The kernel may still read what is being sent, and fill buffers.
            self.connections.borrow_mut().for_each(|_, connection| std::mem::forget(connection.take_sending()));
            std::mem::forget(self.buffers.borrow_mut().take());
        }
    }
}
