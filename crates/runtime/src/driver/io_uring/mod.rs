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
//! too. A multishot receive whose data nobody reads is ended. (`connection.rs`)
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
//! memory for has failed with ENOMEM: that connection ends, accepting pauses, and the rest goes on.

mod buffers;
mod connection;
mod file_reads;
mod idle;
mod linux;
mod listeners;
mod operation;
mod posts;
pub(crate) mod ring;
pub(crate) mod sockets;
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
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

use self::buffers::Buffers;
use self::connection::{BusyState, Connection, Multishot, OWNED, Receive, ReceiveOptions, Sending};
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
use super::direct::{OPERATIONS_PER_TURN, SEND_MAX};
use super::{
    DatagramDriver, Driver, End, FileDriver, Fresh, ListenerDriver, Released, RingCounters, RingOptions, StreamDriver,
    datagrams,
};
use crate::buffer::Buffer;
use crate::executor::parked::Parked;
use crate::executor::slots::{Key, Slots};
use crate::files::file_read::{FileRead, FileReading};
use crate::output::{Output, SLICES_MAX};
use crate::socket::AcceptOptions;
use crate::socket::SocketAddress;
use crate::socket::connect::{ConnectError, ConnectOptions};
use crate::socket::datagram::{DatagramOptions, Received, Room, Transmit};
use crate::socket::splice;

/// Answers up to this size are queued. For larger ones the system call costs little, and the kernel's copying should
/// not hold up what is queued behind.
const QUEUED_SEND_MAX: usize = 32 * 1024;

/// How many unused [`Sending`]s are kept.
const SENDINGS_KEPT_MAX: usize = 64;

/// Sockets that the call at the end of a turn closes at most: as many as a turn has polls.
const CLOSES_MAX: usize = 512;

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
            connections.get_mut(far).expect("just attached").has_received = true;
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

    /// Runs `operation` if it may succeed, until it succeeds or would block; then has the task woken by `op`.
    ///
    /// `operation` is called with the table borrowed: it makes system calls and runs nobody's code.
    fn attempt<T>(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        op: Op,
        mut operation: impl FnMut(&mut Connection) -> Result<T, Errno>,
    ) -> Poll<io::Result<T>> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        let is_read = matches!(op, Op::Readable | Op::Recv);
        if if is_read { connection.readable } else { connection.writable } {
            let share = if is_read { &mut connection.reads } else { &mut connection.writes };
            if !share.take(self.turn.get(), OPERATIONS_PER_TURN) {
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
            *(if is_read { &mut connection.readable } else { &mut connection.writable }) = false;
        }
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

    /// What the ring has received, or `None` if the reader has to try for itself.
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

    /// What became of the send in flight: `None` if there is none and `out` is to be sent.
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
        let mut sending = connection.take_sending().expect("looked at above");
        let sent = result.unwrap_or(0);
        sending.output.consume(sent);
        // A short send has filled the socket.
        connection.writable = sent == sending.offered || connection.hung_up;
        let is_own = out.take_back(sending.ticket, &mut sending.output);
        drop(connections);
        self.keep(sending);
        match result {
            // Not this queue's send, or nothing of it: now this one.
            _ if !is_own => out.forget_loan(),
            Ok(0) => {}
            Ok(sent) => return Some(Poll::Ready(Ok(sent))),
            Err(errno) => return Some(Poll::Ready(Err(errno.into()))),
        }
        None
    }

    /// Puts `out` on the ring if it is fit for that.
    fn queue_send(&self, key: Key, cx: &mut Context<'_>, out: &mut Output) -> bool {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        let is_fit = connection.is_on_ring && connection.writable && !connection.hung_up;
        // What is followed by a file has to be sent before that, which is now.
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

    fn send_posted_by(&self, key: Key) {
        if !self.posts.borrow().is_empty() {
            let mut connections = self.connections.borrow_mut();
            self.send_posted(key, connections.get_mut(key).expect("an open stream owns its slot"), false);
        }
    }

    fn with_socket<T>(&self, key: Key, f: impl FnOnce(&OwnedFd) -> io::Result<T>) -> io::Result<T> {
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
            self.send_posted(key, connection, false);
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
            let Some(connection) = connections.get_mut(key).filter(|connection| connection.socket.is_some()) else {
                return;
            };
            self.send_posted(key, connection, true);
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
            // What the receive in flight gets is kept for the next reader.
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

    fn poll_writable(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.send_posted_by(key);
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
        let op = {
            let buffer_bytes = self.receive_options().buffer_bytes;
            let mut connections = self.connections.borrow_mut();
            let connection = connections.get_mut(key).expect("an open stream owns its slot");
            // What the receive in flight gets comes first.
            if connection.in_flight.has(Op::Recv) {
                // A body or a tunnel: received piece by piece into its destination, when somebody wants it.
                if max > buffer_bytes
                    && connection.receive == Receive::Multishot
                    && connection.end_receive(Receive::Ending)
                {
                    self.request_wanted(key, connection);
                }
                let displaced = connection.reader.park(cx.waker());
                drop(connections);
                drop(displaced);
                return Poll::Pending;
            }
            // One of the two waits, never both: what an earlier call wanted and is not in flight yet is forgotten.
            connection.wanted.remove(Op::Recv);
            if max <= buffer_bytes && !connection.in_flight.has(Op::Readable) {
                connection.wanted.remove(Op::Readable);
                Op::Recv
            } else {
                Op::Readable
            }
        };
        self.attempt(key, cx, op, |connection| {
            let received = self.sockets.receive(connection.socket().as_fd(), into, max)?;
            connection.has_received |= received > 0;
            // As in the other driver.
            connection.readable = received == max || received == 0 || connection.hung_up;
            Ok(received)
        })
    }

    fn poll_send(&self, key: Key, cx: &mut Context<'_>, out: &mut Output) -> Poll<io::Result<usize>> {
        if out.is_empty() {
            return Poll::Ready(Ok(0));
        }
        self.send_posted_by(key);
        if let Some(polled) = self.poll_sending(key, cx, out) {
            return polled;
        }
        if out.is_empty() {
            // All that it had was on loan to a connection that has gone.
            return Poll::Ready(Ok(0));
        }
        if self.queue_send(key, cx, out) {
            return Poll::Pending;
        }
        self.attempt(key, cx, Op::Writable, |connection| {
            let (sent, asked) = self.sockets.send(connection.socket().as_fd(), out)?;
            out.consume(sent);
            // A short send has filled the socket.
            connection.writable = sent == asked || connection.hung_up;
            Ok(sent)
        })
    }

    fn try_send(&self, key: Key, out: &mut Output, is_last: bool) -> io::Result<usize> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        if connection.sending().is_some() || !connection.writable {
            return Ok(0);
        }
        if connection.is_on_ring {
            let length = out.len_bytes();
            let is_posted = !is_last && self.try_post(key, connection, out);
            return Ok(if is_posted { length } else { 0 });
        }
        if !connection.writes.take(self.turn.get(), OPERATIONS_PER_TURN) {
            return Ok(0);
        }
        let (sent, asked) = self.sockets.send_chunks_now(connection.socket().as_fd(), out, is_last)?;
        out.consume(sent);
        // A short send has filled the socket.
        connection.writable = sent == asked || connection.hung_up;
        Ok(sent)
    }

    fn try_send_copy(&self, key: Key, bytes: &[u8], is_last: bool) -> io::Result<usize> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        if connection.sending().is_some() || !connection.writable {
            return Ok(0);
        }
        if connection.is_on_ring {
            let is_posted = !is_last && self.try_post_copy(key, connection, bytes);
            return Ok(if is_posted { bytes.len() } else { 0 });
        }
        if !connection.writes.take(self.turn.get(), OPERATIONS_PER_TURN) {
            return Ok(0);
        }
        let sent = self.sockets.send_now(connection.socket().as_fd(), bytes, is_last)?;
        // A short send has filled the socket.
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
        self.send_posted_by(key);
        // A send that nobody waits for any more still comes first.
        if let Some(Poll::Pending) = self.poll_sending(key, cx, &mut Output::new()) {
            return Poll::Pending;
        }
        self.attempt(key, cx, Op::Writable, |connection| {
            self.sockets.sendfile(connection.socket().as_fd(), file, offset, length.min(SEND_MAX))
        })
    }

    fn poll_connected(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.attempt(key, cx, Op::Writable, |connection| match connection.take_error(false) {
            Some(errno) => Err(errno),
            None => self.sockets.connect_result(connection.socket().as_fd()),
        })
    }

    fn poll_peer_closed(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        if connection.hung_up {
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
        self.send_posted_by(key);
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
        // What was wanted and is not in flight yet is forgotten.
        connection.wanted.remove(Op::Recv);
        connection.in_flight.has(Op::Recv) || connection.busy.as_ref().is_some_and(|busy| busy.has_input())
    }

    fn flush(&self, key: Key) {
        self.send_posted_by(key);
    }

    fn shutdown_write(&self, key: Key) -> io::Result<()> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        self.send_posted(key, connection, true);
        if let Some(sending) = connection.sending().filter(|sending| sending.is_owned()) {
            // What was posted counts as sent.
            sending.is_last = true;
            return Ok(());
        }
        Ok(self.sockets.shutdown_write(connection.socket().as_fd())?)
    }

    fn set_linger_reset(&self, key: Key) -> io::Result<()> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key).expect("an open stream owns its slot");
        connection.is_reset = true;
        self.send_posted(key, connection, false);
        self.sockets.set_linger_reset(connection.socket().as_fd())
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
        self.turn.set(self.turn.get().wrapping_add(1));
        self.handle_failed_posts(&completions);
        self.clear_posts();
        // Where there were posts all that had completed was taken.
        self.ring.borrow_mut().put_back(&mut completions, self.completions_max, Posts::is_of_post);
        for completion in completions.iter() {
            self.handle_completion(completion);
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
