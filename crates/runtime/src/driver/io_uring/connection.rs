//! A connection in the driver's table: the operations it wants, those in flight, and the results of completions.
//!
//! At most one of each [`Op`] is in flight. Entries are made from the slot's state when the turn ends, so none is ever
//! submitted for a descriptor that has been closed.
//!
//! Ways of waiting for data, and their ends:
//!
//! ```text
//!   nothing received yet ──► Single ──── data ───► reader
//!   kept alive ────────────► Multishot ─ data ───► reader, and goes on
//!                                │ unread data, or the reader wants more than a buffer   ─► Ending ──► direct receive
//!                                │ nothing for some seconds                               ─► EndingIdle ──► poll
//!   no buffers, or more is wanted than they hold, now or the last time ────────────────► poll, direct receive
//! ```
//!
//! While a receive is in flight there is no direct receive: the kernel may have put bytes in a buffer already.
//!
//! Most connections are idle, so an idle one is small: 48 bytes in the table. The rest is in a [`BusyState`].

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::task::Waker;

use io_uring::squeue::{self, Flags};
use io_uring::{cqueue, opcode, types};
use rustix::io::Errno;

use super::buffers::GROUP;
use super::operation::{Op, Ops, push_cancel, user_data};
use super::ring::{Completion, Queues, Ring};
use crate::driver::direct::{Direct, Direction, Readiness, Share};
use crate::executor::parked::Parked;
use crate::executor::slots::Key;
use crate::memory::buffer::Buffer;
use crate::memory::output::{Output, SLICES_MAX};
use crate::socket::Fresh;

/// `IORING_RECVSEND_POLL_FIRST`: the socket is known to be empty, so wait before the first attempt.
const POLL_FIRST: u16 = 1;

/// `IORING_RECV_MULTISHOT`.
const MULTISHOT: u16 = 2;

/// Unread bytes at which a multishot receive is ended. A request and the beginning of the next are usual; more is a
/// body, or a client that does not wait for responses.
const UNREAD_MAX: usize = 4096;

/// Bytes after which a multishot receive has to be armed again, where the kernel can count them: the limit of unread
/// data until the kernel sees the cancellation. (Where it cannot, a receive may use all buffers once.) Some hundred
/// requests.
const MULTISHOT_BYTES: u32 = 16 * 1024;

pub(super) struct Connection {
    pub stage: Stage,
    pub readiness: Readiness,
    pub mode: Mode,
    /// This connection is in the list of requests.
    pub is_requested: bool,
    pub wanted: Ops,
    pub in_flight: InFlight,
    pub reads: Share,
    pub writes: Share,
    pub reader: Parked,
    /// `None` for an idle connection.
    pub busy: Option<Box<BusyState>>,
}

/// Stage of a connection's life; the later ones come in this order.
pub(super) enum Stage {
    Open(OwnedFd),
    /// The connection will be reset: unsent data is dropped.
    Resetting(OwnedFd),
    /// The stream was dropped; the connection is closed when the driver has sent the rest.
    Lingering(OwnedFd),
    /// The slot stays for the operations in flight.
    Closed,
}

impl Stage {
    pub fn socket(&self) -> Option<&OwnedFd> {
        match self {
            Stage::Open(socket) | Stage::Resetting(socket) | Stage::Lingering(socket) => Some(socket),
            Stage::Closed => None,
        }
    }

    /// Of an open connection: that it will be reset.
    #[must_use]
    pub fn reset(self) -> Stage {
        match self {
            Stage::Open(socket) => Stage::Resetting(socket),
            other => other,
        }
    }

    /// Of an open connection: that its stream was dropped.
    #[must_use]
    pub fn linger(self) -> Stage {
        match self {
            Stage::Open(socket) => Stage::Lingering(socket),
            other => other,
        }
    }
}

/// State of a connection with data or operations on their way. It stays for as long as a receive is in flight, so that
/// no request allocates it, and is freed when the connection has been idle for some seconds.
#[derive(Default)]
pub(super) struct BusyState {
    /// Bytes received on the ring and not yet read.
    pub received: Buffer,
    /// Error to report after `received`.
    pub receive_error: Option<Errno>,
    /// A poll has failed: room to send then does not mean that a connection attempt has succeeded.
    pub poll_failed: bool,
    /// Error because of which room to send cannot be waited for.
    pub send_error: Option<Errno>,
    pub sending: Option<Box<Sending>>,
    pub writer: Parked,
    pub closed_waiter: Parked,
}

/// Operations in flight.
#[derive(Clone, Copy, Default)]
pub(super) struct InFlight {
    /// All but [`Op::Recv`].
    others: Ops,
    receive: Option<Armed>,
}

/// A receive in flight.
#[derive(Clone, Copy)]
struct Armed {
    kind: Receive,
    /// Period in which it was armed or last got data; see `idle.rs`.
    period: u8,
}

impl InFlight {
    pub fn has(self, op: Op) -> bool {
        if op == Op::Recv { self.receive.is_some() } else { self.others.has(op) }
    }

    pub fn is_empty(self) -> bool {
        self.receive.is_none() && self.others.is_empty()
    }

    pub fn ops(self) -> impl Iterator<Item = Op> {
        Op::ALL.into_iter().filter(move |op| self.has(*op))
    }

    /// Kind of the receive.
    pub fn receive(self) -> Option<Receive> {
        self.receive.map(|armed| armed.kind)
    }

    /// Adds an operation other than a receive.
    pub fn add(&mut self, op: Op) {
        debug_assert!(op != Op::Recv, "a receive is armed");
        self.others.add(op);
    }

    /// Adds a receive.
    pub fn arm(&mut self, kind: Receive, period: u8) {
        self.receive = Some(Armed { kind, period });
    }

    pub fn remove(&mut self, op: Op) {
        if op == Op::Recv { self.receive = None } else { self.others.remove(op) }
    }

    /// Notes that the end of the receive was requested; false without a receive.
    pub fn note_ending(&mut self, ending: Receive) -> bool {
        self.receive.as_mut().map(|armed| armed.kind = ending).is_some()
    }

    /// Notes that the receive got data in this period.
    fn note_data(&mut self, period: u8) {
        if let Some(armed) = &mut self.receive {
            armed.period = period;
        }
    }

    /// True if the receive got no data for a whole period.
    pub fn is_idle(self, period: u8) -> bool {
        self.receive.is_some_and(|armed| period.wrapping_sub(armed.period) >= 2)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Receive {
    Single,
    Multishot,
    /// Its cancellation was requested; data that it still receives is kept.
    Ending,
    /// As `Ending`; a poll takes its place afterwards.
    EndingIdle,
}

/// How a connection receives and sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mode {
    /// Nothing has been received yet.
    Fresh,
    /// All receives were direct calls, and so are sends.
    Direct(Expects),
    /// A receive has completed on the ring, so sends are queued.
    Ring(Expects),
}

/// Data that is likely to come next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Expects {
    /// Messages that fit a buffer: the connection is kept alive.
    Messages,
    /// More: the last read asked for more than a buffer holds. Bodies are received directly into their destination,
    /// because each piece in a buffer costs a copy, and the receive has to be ended first.
    Bodies,
}

impl Mode {
    pub fn is_on_ring(self) -> bool {
        matches!(self, Mode::Ring(_))
    }

    /// `None` before anything is known.
    pub fn expects(self) -> Option<Expects> {
        match self {
            Mode::Fresh => None,
            Mode::Direct(expects) | Mode::Ring(expects) => Some(expects),
        }
    }

    pub fn expect(&mut self, expects: Expects) {
        *self = match self {
            Mode::Fresh | Mode::Direct(_) => Mode::Direct(expects),
            Mode::Ring(_) => Mode::Ring(expects),
        };
    }

    /// Notes that a direct call has received something.
    pub fn note_received(&mut self) {
        if *self == Mode::Fresh {
            *self = Mode::Direct(Expects::Messages);
        }
    }

    /// Notes that the ring has received something.
    fn note_received_on_ring(&mut self) {
        *self = Mode::Ring(self.expects().unwrap_or(Expects::Messages));
    }
}

/// Support for multishot receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Multishot {
    Never,
    /// Since 6.0.
    Unlimited,
    /// Limited to a number of bytes: since 6.17.
    Limited,
}

/// Properties of the ring that decide how a connection receives.
#[derive(Clone, Copy)]
pub(super) struct ReceiveOptions {
    pub multishot: Multishot,
    pub buffer_bytes: usize,
    pub period: u8,
}

/// Ticket of sends that the driver owns.
pub(super) const OWNED: u32 = 0;

/// A send on the ring: its bytes, and the structures that describe them to the kernel.
pub(super) struct Sending {
    pub output: Output,
    /// Identifies the owner: an [`Output`] that is on loan, or the driver ([`OWNED`]).
    pub ticket: u32,
    pub offered: usize,
    /// Shut down the write side after this send.
    pub is_last: bool,
    pub result: Option<Result<usize, Errno>>,
    pub slices: Vec<libc::iovec>,
    pub header: libc::msghdr,
}

impl Connection {
    pub fn new(socket: OwnedFd, fresh: Fresh) -> Self {
        Connection {
            stage: Stage::Open(socket),
            readiness: Readiness::new(fresh),
            mode: Mode::Fresh,
            is_requested: false,
            wanted: Ops::default(),
            in_flight: InFlight::default(),
            reads: Share::default(),
            writes: Share::default(),
            reader: Parked::new(),
            busy: None,
        }
    }

    pub fn socket(&self) -> &OwnedFd {
        self.stage.socket().expect("an open stream has its socket")
    }

    /// Moves to another stage, made of this one.
    pub fn change_stage(&mut self, change: impl FnOnce(Stage) -> Stage) {
        self.stage = change(std::mem::replace(&mut self.stage, Stage::Closed));
    }

    /// The busy state, created if there is none.
    pub fn busy(&mut self) -> &mut BusyState {
        self.busy.get_or_insert_default()
    }

    /// True if a poll has failed since the connection became busy.
    pub fn has_failed_poll(&self) -> bool {
        self.busy.as_ref().is_some_and(|busy| busy.poll_failed)
    }

    pub fn drop_idle_state(&mut self) {
        self.busy.take_if(|busy| busy.is_empty());
    }

    pub fn sending(&mut self) -> Option<&mut Sending> {
        self.busy.as_mut()?.sending.as_deref_mut()
    }

    pub fn take_sending(&mut self) -> Option<Box<Sending>> {
        self.busy.as_mut()?.sending.take()
    }

    /// Takes a send that was not submitted yet or has completed: the kernel does not use its memory.
    pub fn take_sending_of_ours(&mut self) -> Option<Box<Sending>> {
        if self.in_flight.has(Op::Send) { None } else { self.take_sending() }
    }

    /// Submits the wanted operations that are not in flight already.
    pub fn make_entries(&mut self, key: Key, ring: &mut Ring<impl Queues>, options: ReceiveOptions) {
        self.is_requested = false;
        let wanted = std::mem::take(&mut self.wanted);
        let Some(socket) = self.stage.socket() else { return };
        let descriptor = types::Fd(socket.as_raw_fd());
        for op in Op::ALL.into_iter().filter(|op| wanted.has(*op)) {
            if self.in_flight.has(op) {
                continue;
            }
            let poll = |events: i32| opcode::PollAdd::new(descriptor, events as u32).build();
            let entry = match op {
                Op::Readable => poll(i32::from(libc::POLLIN) | libc::EPOLLRDHUP),
                Op::Writable => poll(libc::POLLOUT.into()),
                // A receive reports a hang-up too; when it ends, this is wanted again.
                Op::HungUp if self.in_flight.has(Op::Recv) => continue,
                Op::HungUp => poll(libc::EPOLLRDHUP),
                Op::Recv => {
                    let expects_messages = self.mode.expects() == Some(Expects::Messages);
                    let is_multishot = options.multishot != Multishot::Never && expects_messages;
                    let kind = if is_multishot { Receive::Multishot } else { Receive::Single };
                    self.in_flight.arm(kind, options.period);
                    receive_entry(descriptor, kind, options)
                }
                Op::Send => match self.busy.as_mut().and_then(|busy| busy.sending.as_mut()) {
                    Some(sending) => sending.entry(descriptor.0),
                    None => continue,
                },
                Op::EndRecv => {
                    if self.in_flight.has(Op::Recv) {
                        push_cancel(ring, user_data(Op::Recv as u64, key));
                    }
                    continue;
                }
            };
            if op != Op::Recv {
                self.in_flight.add(op);
            }
            // SAFETY: the slot owns the descriptor, and a close can only come after the submission: entries are made
            // when the turn ends, right before the call. The memory of a send stays in the slot until its completion.
            unsafe { ring.push(&entry.user_data(user_data(op as u64, key))) };
        }
    }

    /// Requests the end of the receive in flight; false if there is none or its end was requested before.
    pub fn end_receive(&mut self, ending: Receive) -> bool {
        if !matches!(self.in_flight.receive(), Some(Receive::Single | Receive::Multishot)) {
            return false;
        }
        self.in_flight.note_ending(ending);
        self.wanted.add(Op::EndRecv);
        true
    }

    /// True if the end of the receive in flight was requested.
    pub fn is_receive_ending(&self) -> bool {
        matches!(self.in_flight.receive(), Some(Receive::Ending | Receive::EndingIdle))
    }

    /// Handles a completion, and notes the operations that are wanted because of it.
    pub fn handle(&mut self, op: Op, completion: &Completion, bytes: &[u8], options: ReceiveOptions) {
        let receive = self.in_flight.receive().unwrap_or(Receive::Single);
        if !cqueue::more(completion.flags) {
            self.in_flight.remove(op);
        }
        if completion.was_refused() {
            self.handle_refused(op);
        } else if op == Op::Recv {
            self.handle_received(receive, completion, bytes, options);
        } else {
            self.handle_news(op, completion);
        }
        let is_watched = self.readiness.has_hung_up() || self.in_flight.has(Op::HungUp) || self.in_flight.has(Op::Recv);
        if !is_watched && self.busy.as_ref().is_some_and(|busy| busy.closed_waiter.is_some()) {
            self.wanted.add(Op::HungUp);
        }
    }

    fn handle_news(&mut self, op: Op, completion: &Completion) {
        let result = result_of(completion);
        match op {
            Op::Send => {
                if let Some(sending) = self.sending() {
                    sending.result = Some(match result {
                        // The socket is not at fault: the bytes are sent directly.
                        Err(errno) if is_temporary(errno) => Ok(0),
                        result => result,
                    });
                }
            }
            Op::Readable | Op::Writable | Op::HungUp => {
                // A failed poll tells nothing; a direct call will.
                if result.is_err() {
                    self.busy().poll_failed = true;
                }
                let events = result.unwrap_or(0) as i32;
                let is_broken = events & i32::from(libc::POLLHUP | libc::POLLERR) != 0;
                if is_broken || events & libc::EPOLLRDHUP != 0 || self.readiness.has_hung_up() {
                    self.readiness.hang_up();
                }
                if op == Op::Readable {
                    self.readiness.set(Direction::Read, true);
                }
                if op == Op::Writable || is_broken {
                    self.readiness.set(Direction::Write, true);
                }
            }
            Op::Recv | Op::EndRecv => {}
        }
    }

    /// The kernel had no memory for an operation: the waiting task gets the error and gives the connection up.
    fn handle_refused(&mut self, op: Op) {
        match op {
            Op::Readable | Op::Recv => {
                self.busy().receive_error.get_or_insert(Errno::NOMEM);
                self.readiness.set(Direction::Read, true);
            }
            Op::Writable => {
                self.busy().send_error = Some(Errno::NOMEM);
                self.readiness.set(Direction::Write, true);
            }
            Op::Send => {
                if let Some(sending) = self.sending() {
                    sending.result = Some(Err(Errno::NOMEM));
                }
            }
            // A peer that cannot be watched counts as gone.
            Op::HungUp => self.readiness.hang_up(),
            Op::EndRecv => {}
        }
    }

    /// Takes the error because of which there is nothing to wait for in this direction.
    pub fn take_error(&mut self, is_read: bool) -> Option<Errno> {
        let busy = self.busy.as_mut()?;
        if is_read { busy.receive_error.take() } else { busy.send_error.take() }
    }

    /// Handles the completion of a receive of this kind.
    fn handle_received(&mut self, receive: Receive, completion: &Completion, bytes: &[u8], options: ReceiveOptions) {
        self.in_flight.note_data(options.period);
        match result_of(completion) {
            // The end of the stream: a direct receive finds it again.
            Ok(0) => self.readiness.hang_up(),
            Ok(_) => {
                self.mode.note_received_on_ring();
                let may_have_more = cqueue::sock_nonempty(completion.flags)
                    || bytes.len() == options.buffer_bytes
                    || receive != Receive::Single
                    || self.readiness.has_hung_up();
                // While the receive goes on, only the ring may receive.
                self.readiness.set(Direction::Read, !cqueue::more(completion.flags) && may_have_more);
                let received = &mut self.busy().received;
                received.append_past_limit(bytes);
                if received.len() > UNREAD_MAX {
                    self.end_receive(Receive::Ending);
                }
            }
            Err(Errno::CANCELED) if receive == Receive::EndingIdle => {
                if self.reader.is_some() {
                    self.wanted.add(Op::Readable);
                }
            }
            Err(errno) if is_temporary(errno) || receive != Receive::Single && errno == Errno::INVAL => {
                self.readiness.set(Direction::Read, true);
            }
            Err(errno) => {
                self.busy().receive_error = Some(errno);
                self.readiness.hang_up();
            }
        }
    }

    /// Marks the connection as broken: the next read gets the error, after the data received so far.
    pub fn break_off(&mut self, errno: Errno) {
        self.busy().receive_error.get_or_insert(errno);
        self.readiness.hang_up();
        self.readiness.set(Direction::Write, true);
    }

    /// Takes a completed send of the driver. If it was short, requests a send of the rest instead.
    pub fn take_owned(&mut self) -> Option<Box<Sending>> {
        let sending = self.sending().filter(|sending| sending.is_owned())?;
        let result = sending.result?;
        sending.output.consume(result.unwrap_or(0));
        if result.is_ok() && !sending.output.is_empty() {
            sending.result = None;
            self.wanted.add(Op::Send);
            return None;
        }
        self.take_sending()
    }

    /// Takes all wakers, when no task may wait any longer.
    pub fn take_all_wakers(&mut self) -> [Option<Waker>; 3] {
        let reader = self.reader.take();
        let Some(busy) = &mut self.busy else { return [reader, None, None] };
        [reader, busy.writer.take(), busy.closed_waiter.take()]
    }

    /// Takes the wakers of the tasks that a completion of `op` concerns.
    pub fn take_wakers(&mut self, op: Op) -> [Option<Waker>; 3] {
        // A reader that now waits by a poll goes on waiting.
        let is_replaced = op == Op::Recv && self.wanted.has(Op::Readable);
        let has_hung_up = self.readiness.has_hung_up();
        let is_read =
            !is_replaced && matches!(op, Op::Recv | Op::Readable) || has_hung_up && !self.in_flight.has(Op::Recv);
        let is_writable = self.readiness.is(Direction::Write);
        let is_write = matches!(op, Op::Send | Op::Writable) || is_writable && !self.in_flight.has(Op::Send);
        let reader = is_read.then(|| self.reader.take()).flatten();
        let Some(busy) = &mut self.busy else { return [reader, None, None] };
        let is_sent = busy.sending.as_ref().is_none_or(|sending| sending.result.is_some());
        [
            reader,
            (is_write && is_sent).then(|| busy.writer.take()).flatten(),
            has_hung_up.then(|| busy.closed_waiter.take()).flatten(),
        ]
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

impl BusyState {
    /// True if there is data or an error for the reader.
    pub fn has_input(&self) -> bool {
        !self.received.is_empty() || self.receive_error.is_some()
    }

    fn is_empty(&self) -> bool {
        let is_waited_for = self.writer.is_some() || self.closed_waiter.is_some();
        let has_error = self.receive_error.is_some() || self.send_error.is_some();
        self.received.is_empty() && !has_error && self.sending.is_none() && !is_waited_for
    }
}

fn result_of(completion: &Completion) -> Result<usize, Errno> {
    match completion.result {
        count @ 0.. => Ok(count as usize),
        negative => Err(Errno::from_raw_os_error(-negative)),
    }
}

/// A receive into provided buffers, which waits before the first attempt.
fn receive_entry(descriptor: types::Fd, receive: Receive, options: ReceiveOptions) -> squeue::Entry {
    // The length of a multishot receive is that of the buffers.
    let (length, kind) = match receive {
        Receive::Multishot => (0, MULTISHOT),
        _ => (options.buffer_bytes as u32, 0),
    };
    let entry = opcode::Recv::new(descriptor, std::ptr::null_mut(), length).buf_group(GROUP).ioprio(POLL_FIRST | kind);
    let entry = entry.build().flags(Flags::BUFFER_SELECT);
    if receive != Receive::Multishot || options.multishot != Multishot::Limited {
        return entry;
    }
    // SAFETY: an entry is `struct io_uring_sqe`, 64 bytes for which every value is valid.
    let mut words: [u32; 16] = unsafe { std::mem::transmute(entry) };
    // `optlen` (io_uring_enter(2)), which the library does not support for receives.
    words[11] = MULTISHOT_BYTES;
    // SAFETY: as above.
    unsafe { std::mem::transmute(words) }
}

/// Errors after which a direct call may succeed, or returns the exact error. ENOBUFS: all provided buffers were in use.
pub(super) fn is_temporary(errno: Errno) -> bool {
    matches!(errno, Errno::NOBUFS | Errno::CANCELED | Errno::INTR | Errno::AGAIN | Errno::NOMEM)
}

impl Default for Sending {
    fn default() -> Self {
        // SAFETY: an all-zero `msghdr` is valid and empty: pointers and lengths are null.
        let header = unsafe { std::mem::zeroed() };
        Sending {
            output: Output::new(),
            ticket: 0,
            offered: 0,
            is_last: false,
            result: None,
            slices: Vec::new(),
            header,
        }
    }
}

impl Sending {
    pub fn is_owned(&self) -> bool {
        self.ticket == OWNED
    }

    /// The entry that sends `output`, to its end if the driver owns it. The memory that it points to stays until the
    /// completion: bytes in leases and shared memory, slices and header in this box.
    pub fn entry(&mut self, descriptor: RawFd) -> squeue::Entry {
        let all = if self.is_owned() && self.output.chunk_count() == 1 { libc::MSG_WAITALL } else { 0 };
        self.entry_with(descriptor, libc::MSG_NOSIGNAL | all)
    }

    /// As `entry`, with other flags.
    pub fn entry_with(&mut self, descriptor: RawFd, flags: i32) -> squeue::Entry {
        if self.output.chunk_count() == 1 {
            let bytes = self.output.first();
            let send = opcode::Send::new(types::Fd(descriptor), bytes.as_ptr(), bytes.len() as u32);
            return send.flags(flags).build();
        }
        self.slices.clear();
        let slices = self.output.chunks().take(SLICES_MAX);
        self.slices.extend(
            slices.map(|chunk| libc::iovec { iov_base: chunk.as_ptr().cast_mut().cast(), iov_len: chunk.len() }),
        );
        self.header.msg_iov = self.slices.as_mut_ptr();
        self.header.msg_iovlen = self.slices.len() as _;
        opcode::SendMsg::new(types::Fd(descriptor), &raw const self.header).flags(flags as u32).build()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::slots::Slots;

    const OPTIONS: ReceiveOptions = ReceiveOptions { multishot: Multishot::Unlimited, buffer_bytes: 4096, period: 0 };

    fn completion(result: i32, goes_on: bool) -> Completion {
        // `IORING_CQE_F_MORE`.
        Completion { user_data: 0, result, flags: if goes_on { 2 } else { 0 } }
    }

    #[test]
    fn an_idle_connection_is_as_small_as_with_epoll() {
        assert_eq!(Slots::<Connection>::BYTES, 48);
        let (near, _far) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut connection = Connection::new(near.into(), Fresh::Accepted);
        connection.in_flight.arm(Receive::Multishot, 0);
        connection.handle(Op::Recv, &completion(5, true), b"hello", OPTIONS);
        connection.drop_idle_state();
        assert_eq!(std::mem::take(&mut connection.busy().received).readable(), b"hello");
        assert!(connection.end_receive(Receive::EndingIdle));
        connection.handle(Op::Recv, &completion(-libc::ECANCELED, false), b"", OPTIONS);
        connection.drop_idle_state();
        assert!(connection.busy.is_none() && connection.in_flight.is_empty());
    }
}
