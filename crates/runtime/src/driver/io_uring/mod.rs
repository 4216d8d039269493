//! The io_uring driver: operations that would wait are queued during the turn and submitted by the call that waits.
//!
//! - A fresh connection is served as with epoll: direct receive and send, because the data is usually there and one
//!   request per connection gains nothing from a queue. From the first receive that had to wait, the connection uses
//!   the ring.
//! - Receives on the ring use provided buffers, whose bytes are copied to a lease on completion: a waiting connection
//!   holds no memory, and a buffer never outlives its completion. A keep-alive connection has one multishot receive for
//!   all its requests; it is ended if its data is not read.
//! - A short response that is ready at once is sent fire-and-forget, with the call that ends the turn
//!   (`fire_and_forget.rs`). Other short responses are queued: their [`Output`] is on loan until the completion. Large
//!   ones, and those that continue after a full socket, are sent directly and wait by a poll, which moves no data
//!   before the consumer wants it: a slow consumer stops the sender.
//! - Sockets are closed with the call that ends the turn.
//!
//! Invariants: at most one of each [`Op`] is in flight per connection. A task's poll only *notes* the operation it
//! wants; the entry is made from the slot's state when the turn ends, so nothing is submitted for a descriptor that has
//! been closed or reused. User data is operation + generation + slot: the generation keeps a completion from reaching
//! the next owner of a slot, and a completion without a slot is stale and ignored. The slot of a closed connection
//! stays until its last operation has completed: it holds the memory of a send, repeats a cancellation that found
//! nothing, and lets the end of a loop wait.
//!
//! No data is lost: a receive without a buffer (ENOBUFS) is repeated directly; the kernel keeps completions that
//! overflow their queue for the next call; a multishot operation that the kernel ends is armed again. An operation for
//! which the kernel has no memory fails with ENOMEM: its connection ends, accepting pauses, and the rest goes on. If
//! completions themselves were lost, everything in flight is cancelled (`lost.rs`).

mod buffers;
mod connection;
mod datagrams;
mod ending;
mod file_reads;
mod fire_and_forget;
mod idle;
mod linux;
mod listeners;
mod lost;
mod operation;
pub(crate) mod ring;
pub(crate) mod sockets;
mod streams;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use io_uring::squeue::Flags;
use io_uring::{cqueue, opcode, types};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

use self::buffers::Buffers;
use self::connection::{Connection, Expects, Mode, Multishot, OWNED, Receive, ReceiveOptions, Sending, Stage};
use self::file_reads::FileReads;
use self::fire_and_forget::FireAndForgetSends;
use self::idle::Sweep;
use self::linux::LinuxQueues;
use self::listeners::Listeners;
use self::operation::{
    KIND_CANCEL, KIND_CANCEL_OP, KIND_CLOSE, KIND_FILE_READ, KIND_FIRE_AND_FORGET_SEND, KIND_INBOX, KIND_LISTENER, Op,
    kind_and_key, push_cancel, user_data,
};
use self::ring::{Completion, Queues, Ring};
use self::sockets::{LinuxSockets, Sockets};
use super::file_read::{FileRead, FileReading};
use super::{Driver, FileDriver, Fresh, RingCounters, RingOptions, StreamDriver};
use crate::executor::parked::Parked;
use crate::executor::slots::{Key, Slots};
use crate::memory::buffer::Buffer;
use crate::memory::output::Output;

/// Limit of unused [`Sending`]s that are kept.
const SENDINGS_KEPT_MAX: usize = 64;

/// Key for operations that belong to no connection.
const NO_KEY: Key = Key { index: 0, generation: 0 };

/// Bytes that the self-test receives: fewer than any buffer holds.
const TEST_BYTES_MAX: usize = 16;

/// Calls until a cancelled receive must have completed: one, unless the queue was full.
const CANCEL_CALLS_MAX: u32 = 16;

/// The world behind the driver: the kernel, or a simulation.
pub(crate) trait Kernel {
    type Queues: Queues;
    type Sockets: Sockets;
}

/// The real kernel.
pub(crate) struct Linux;

impl Kernel for Linux {
    type Queues = LinuxQueues;
    type Sockets = LinuxSockets;
}

pub(crate) struct IoUring<K: Kernel = Linux> {
    /// Dropped first, after which the kernel no longer uses the memory below.
    ring: RefCell<Ring<K::Queues>>,
    sockets: K::Sockets,
    buffers: RefCell<Option<Buffers>>,
    connections: RefCell<Slots<Connection>>,
    listeners: Listeners,
    file_reads: FileReads,
    /// Requests to carry out when the turn ends.
    requests: RefCell<Vec<Request>>,
    completions: RefCell<Vec<Completion>>,
    /// Sends for reuse, which keep their allocations.
    #[expect(clippy::vec_box, reason = "the kernel knows their address while they are in use")]
    sendings: RefCell<Vec<Box<Sending>>>,
    tickets: Cell<u32>,
    fire_and_forget_sends: RefCell<FireAndForgetSends>,
    /// The kernel carries out fire-and-forget sends while it accepts them.
    may_send_fire_and_forget: Cell<bool>,
    /// Sockets to close when the turn ends.
    closing: RefCell<Vec<OwnedFd>>,
    /// Closed connections that stay to send their rest, newest last; see `fire_and_forget.rs`.
    closed: RefCell<VecDeque<Key>>,
    /// Number of those that still exist, and the task that waits until there are none.
    staying: Cell<usize>,
    all_sent_waiter: RefCell<Parked>,
    /// The kernel can close a descriptor without a completion.
    may_close: bool,
    inbox: OwnedFd,
    is_inbox_armed: Cell<bool>,
    multishot: Cell<Multishot>,
    sweep: Sweep,
    buffers_missed: Cell<u64>,
    completions_max: usize,
    turn: Cell<u32>,
    /// The last call left events for the next one.
    has_more: Cell<bool>,
}

enum Request {
    /// Submit the wanted operations of a connection.
    Connection(Key),
    /// Cancel the operation with this user data.
    Cancel(u64),
}

impl IoUring<Linux> {
    /// A driver that has passed its self-test. `is_best_only` = fail unless the kernel has the features that make it
    /// better than epoll.
    ///
    /// Errors: the reason why the kernel cannot or must not be used this way.
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

    /// Sends and receives over a socket pair with every operation that will be used.
    fn test(&self) -> io::Result<()> {
        let refused = |what: &str| io::Error::new(io::ErrorKind::Unsupported, format!("its self-test failed: {what}"));
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let pair = || net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let (near, far) = pair()?;
        let (near, far) = (self.attach(near, Fresh::Connected), self.attach(far, Fresh::Connected));
        {
            let mut connections = self.connections.borrow_mut();
            connections.get_mut(near).expect("just attached").mode = Mode::Ring(Expects::Messages);
            connections.get_mut(far).expect("just attached").mode = Mode::Direct(Expects::Messages);
        }
        // One round for each kind of receive, as the kernel may not know the better ones.
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
            // All of it happens within the first call; the second is for kernels that defer work.
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
        let tested = tested.and_then(|()| self.test_fire_and_forget_sends(pair));
        self.close(near);
        self.close(far);
        tested
    }
}

impl<K: Kernel> IoUring<K> {
    /// A driver over these queues and sockets. `can_skip_success` = successful operations can complete silently.
    ///
    /// Errors: the kernel's, when there is no memory for buffers or no descriptor.
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
            fire_and_forget_sends: RefCell::default(),
            may_send_fire_and_forget: Cell::new(can_skip_success),
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

    /// Requests that the entry of this operation is made when the turn ends.
    fn request(&self, key: Key, connection: &mut Connection, op: Op) {
        connection.wanted.add(op);
        self.request_wanted(key, connection);
    }

    /// Requests that the entries of all wanted operations are made when the turn ends.
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

    /// Ends receives of idle connections; returns the time to wait.
    fn sweep(&self, timeout: Option<Duration>) -> Option<Duration> {
        let mut connections = self.connections.borrow_mut();
        let may_arm = !self.requests.borrow().is_empty();
        let limit = self.sweep.run(may_arm, &mut connections, |key, connection| self.request_wanted(key, connection));
        match (timeout, limit) {
            (Some(timeout), Some(limit)) => Some(timeout.min(limit)),
            (timeout, limit) => timeout.or(limit),
        }
    }

    /// Makes the entries of all requests of this turn.
    fn make_entries(&self) {
        let mut ring = self.ring.borrow_mut();
        if !self.is_inbox_armed.replace(true) {
            let poll = opcode::PollAdd::new(types::Fd(self.inbox.as_raw_fd()), libc::POLLIN as u32).multi(true);
            // SAFETY: the inbox's descriptor belongs to this driver.
            unsafe { ring.push(&poll.build().user_data(user_data(KIND_INBOX, NO_KEY))) };
        }
        let receive_options = self.receive_options();
        self.fire_and_forget_sends.borrow_mut().make_entries(&mut ring);
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

    /// Makes the entries that close the sockets closed in this turn.
    fn make_closes(&self, ring: &mut Ring<impl Queues>) {
        for socket in self.closing.borrow_mut().drain(..) {
            let descriptor = socket.into_raw_fd();
            let close = opcode::Close::new(types::Fd(descriptor)).build().flags(Flags::SKIP_SUCCESS);
            // SAFETY: the descriptor has no other owner, and stays open until the kernel accepts the entry.
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
            // Failed sends were handled by `handle_failed_fire_and_forget_sends`.
            KIND_CANCEL | KIND_CANCEL_OP | KIND_CLOSE | KIND_FIRE_AND_FORGET_SEND => {}
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
        // A slot outlives its operations, so this is not expected; the buffer is returned nevertheless.
        if let Some(connection) = connections.get_mut(key) {
            let is_single = connection.in_flight.receive().is_none_or(|kind| kind == Receive::Single);
            if completion.result == -libc::EINVAL && op == Op::Recv && !is_single {
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
                // No other operation may report this error.
                if let Some(Err(errno)) = sent.result {
                    self.break_off(connection, errno);
                    is_broken_off = true;
                } else if sent.is_last
                    && let Some(socket) = connection.stage.socket()
                {
                    // If the peer has gone meanwhile, there is nothing left to do.
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
        if matches!(connection.stage, Stage::Lingering(_)) && connection.sending().is_none() {
            drop(connections);
            return self.close(key);
        }
        if matches!(connection.stage, Stage::Closed) {
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
            connection.drop_idle_state();
        }
        drop(connections);
        wakers.into_iter().flatten().for_each(Waker::wake);
    }

    /// Marks a connection as broken whose data was sent only in part: nothing may follow. The caller wakes all its
    /// tasks.
    fn break_off(&self, connection: &mut Connection, errno: Errno) {
        connection.break_off(errno);
        if let Some(socket) = connection.stage.socket() {
            // Fails only if the connection has ended already.
            let _ = self.sockets.shutdown(socket.as_fd());
        }
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
        let reads_kept = self.file_reads.given_up() as u64;
        RingCounters { idle, buffers_missed, reads_kept, ..self.ring.borrow().counters }
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
        // Borrowed while wakers run: only this function uses it, and no waker calls it.
        let mut completions = self.completions.borrow_mut();
        {
            let mut ring = self.ring.borrow_mut();
            let is_look = timeout == Some(Duration::ZERO);
            // A call does a bounded part of the kernel's work; a wait of no time has to see everything that has
            // happened.
            for _ in 0..if is_look { CANCEL_CALLS_MAX } else { 1 } {
                if ring.has_work() || !(is_look || ring.has_completions()) {
                    ring.enter(timeout)?;
                }
                ring.take(&mut completions, self.completions_max);
                self.take_failed_fire_and_forget_sends(&mut ring, &mut completions)?;
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
        self.handle_failed_fire_and_forget_sends(&completions);
        if has_lost {
            self.break_off_fire_and_forget_sends();
        }
        self.clear_fire_and_forget_sends();
        if !has_lost {
            // If there were fire-and-forget sends, more than the limit was taken.
            self.ring.borrow_mut().put_back(
                &mut completions,
                self.completions_max,
                FireAndForgetSends::is_of_fire_and_forget_send,
            );
        }
        for completion in completions.iter() {
            self.handle_completion(completion);
        }
        if has_lost {
            self.end_lost()?;
        }
        let count = completions.len();
        completions.clear();
        Ok(count)
    }
}

/// Encodes a descriptor that the ring is to close as a key for user data.
fn key_of_descriptor(descriptor: RawFd) -> Key {
    Key { index: descriptor as u32, generation: 0 }
}

/// The descriptor of a close that the kernel has refused.
fn descriptor_of_key(key: Key) -> OwnedFd {
    // SAFETY: `make_closes` made the key of a descriptor without another owner, and the kernel has not accepted its
    // entry.
    unsafe { OwnedFd::from_raw_fd(key.index as RawFd) }
}
