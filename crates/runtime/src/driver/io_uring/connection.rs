//! A connection in the driver's table: what it wants, what is in flight for it, and what completions have said.
//!
//! Operations are single-shot, and there is at most one of each [`Op`]. Their entries are made from what the slot says when
//! the turn ends, so none is ever submitted for a descriptor that has been closed.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::task::Waker;

use io_uring::squeue::{self, Flags};
use io_uring::{cqueue, opcode, types};
use rustix::io::Errno;

use super::buffers::{BUFFER_SIZE, GROUP};
use super::operation::{Op, Ops, user_data};
use super::ring::{Completion, Ring};
use crate::buffer::Lease;
use crate::driver::epoll::Share;
use crate::output::{Output, SLICES_MAX};
use crate::slots::Key;

/// `IORING_RECVSEND_POLL_FIRST`: the socket is known to be empty, so wait before the first attempt.
const POLL_FIRST: u16 = 1;

pub(super) struct Connection {
    /// `None` when closed: the slot waits for what is in flight.
    pub socket: Option<OwnedFd>,
    /// As far as is known, a direct call may succeed.
    pub readable: bool,
    pub writable: bool,
    pub hung_up: bool,
    /// A receive has completed on the ring: sends are queued.
    pub is_on_ring: bool,
    /// There is a request for it.
    pub is_requested: bool,
    pub wanted: Ops,
    pub in_flight: Ops,
    pub reads: Share,
    pub writes: Share,
    pub received: Option<Received>,
    pub receive_error: Option<Errno>,
    pub sending: Option<Box<Sending>>,
    pub reader: Option<Waker>,
    pub writer: Option<Waker>,
    pub closed_waiter: Option<Waker>,
}

/// What a receive on the ring got, until the reader takes it.
pub(super) enum Received {
    Lease(Lease),
    /// The bound of leases was reached. At most a buffer per connection.
    Heap(Vec<u8>),
}

impl Received {
    pub fn bytes(&self) -> &[u8] {
        match self {
            Received::Lease(lease) => lease,
            Received::Heap(bytes) => bytes,
        }
    }

    pub fn advance(&mut self, count: usize) {
        match self {
            Received::Lease(lease) => lease.advance(count),
            Received::Heap(bytes) => drop(bytes.drain(..count)),
        }
    }
}

/// A send on the ring: the bytes, and how the kernel is told of them.
pub(super) struct Sending {
    pub output: Output,
    pub ticket: u32,
    pub offered: usize,
    pub result: Option<Result<usize, Errno>>,
    pub slices: Vec<libc::iovec>,
    pub header: libc::msghdr,
}

impl Connection {
    pub fn socket(&self) -> &OwnedFd {
        self.socket.as_ref().expect("an open stream has its socket")
    }

    /// Submits what is wanted and not in flight already.
    pub fn make_entries(&mut self, key: Key, ring: &mut Ring) {
        self.is_requested = false;
        let wanted = std::mem::take(&mut self.wanted);
        let Some(socket) = &self.socket else { return };
        let descriptor = types::Fd(socket.as_raw_fd());
        let in_flight = self.in_flight;
        for op in Op::ALL.into_iter().filter(|op| wanted.has(*op) && !in_flight.has(*op)) {
            let poll = |events: i32| opcode::PollAdd::new(descriptor, events as u32).build();
            let entry = match op {
                Op::Readable => poll(i32::from(libc::POLLIN) | libc::EPOLLRDHUP),
                Op::Writable => poll(libc::POLLOUT.into()),
                Op::HungUp => poll(libc::EPOLLRDHUP),
                Op::Recv => opcode::Recv::new(descriptor, std::ptr::null_mut(), BUFFER_SIZE as u32)
                    .buf_group(GROUP)
                    .ioprio(POLL_FIRST)
                    .build()
                    .flags(Flags::BUFFER_SELECT),
                Op::Send => match &mut self.sending {
                    Some(sending) => sending.entry(descriptor.0),
                    None => continue,
                },
            };
            self.in_flight.add(op);
            // SAFETY: the slot owns the descriptor now, and a close can only come after this is submitted: entries are
            // made when the turn ends, right before the call. The memory of a send stays in the slot until it completes.
            unsafe { ring.push(&entry.user_data(user_data(op as u64, key))) };
        }
    }

    /// Notes what a completion says.
    pub fn handle(&mut self, op: Op, completion: &Completion, bytes: &[u8]) {
        self.in_flight.remove(op);
        let result = match completion.result {
            count @ 0.. => Ok(count as usize),
            negative => Err(Errno::from_raw_os_error(-negative)),
        };
        match op {
            Op::Recv => self.handle_received(result, bytes, cqueue::sock_nonempty(completion.flags)),
            Op::Send => {
                if let Some(sending) = &mut self.sending {
                    sending.result = Some(match result {
                        // Nothing is wrong with the socket: it is tried directly.
                        Err(errno) if is_temporary(errno) => Ok(0),
                        result => result,
                    });
                }
            }
            Op::Readable | Op::Writable | Op::HungUp => {
                // A poll that failed says nothing; a direct call will tell.
                let events = result.unwrap_or(0) as i32;
                let is_broken = events & i32::from(libc::POLLHUP | libc::POLLERR) != 0;
                self.hung_up |= is_broken || events & libc::EPOLLRDHUP != 0;
                self.readable |= op == Op::Readable || self.hung_up;
                self.writable |= op == Op::Writable || is_broken;
            }
        }
    }

    pub fn handle_received(&mut self, result: Result<usize, Errno>, bytes: &[u8], has_more: bool) {
        match result {
            // The end: there to be found again.
            Ok(0) => (self.readable, self.hung_up) = (true, true),
            Ok(_) => {
                self.is_on_ring = true;
                self.readable = has_more || bytes.len() == BUFFER_SIZE || self.hung_up;
                let lease = Lease::copy_of(bytes);
                self.received = Some(lease.map_or_else(|_| Received::Heap(bytes.to_vec()), Received::Lease));
            }
            Err(errno) if is_temporary(errno) => self.readable = true,
            Err(errno) => self.receive_error = Some(errno),
        }
    }

    /// Those who have to look after a completion of `op`.
    pub fn take_wakers(&mut self, op: Op) -> [Option<Waker>; 3] {
        let is_read = matches!(op, Op::Recv | Op::Readable) || self.hung_up && !self.in_flight.has(Op::Recv);
        let is_write = matches!(op, Op::Send | Op::Writable) || self.writable && !self.in_flight.has(Op::Send);
        [
            is_read.then(|| self.reader.take()).flatten(),
            (is_write && self.sending.as_ref().is_none_or(|sending| sending.result.is_some()))
                .then(|| self.writer.take())
                .flatten(),
            self.hung_up.then(|| self.closed_waiter.take()).flatten(),
        ]
    }
}

/// Errors after which a direct call may succeed, or tells more. ENOBUFS: all provided buffers were in use.
fn is_temporary(errno: Errno) -> bool {
    matches!(errno, Errno::NOBUFS | Errno::CANCELED | Errno::INTR | Errno::AGAIN | Errno::NOMEM)
}

impl Sending {
    pub fn new() -> Box<Self> {
        // SAFETY: a `msghdr` of zeros is a valid one without anything: pointers and lengths are null.
        let header = unsafe { std::mem::zeroed() };
        Box::new(Sending { output: Output::new(), ticket: 0, offered: 0, result: None, slices: Vec::new(), header })
    }

    /// The entry that sends `output`. What it points to stays: the bytes within leases and shared memory, slices and
    /// header in this box, all of it until the completion.
    pub fn entry(&mut self, descriptor: RawFd) -> squeue::Entry {
        if self.output.chunk_count() == 1 {
            let bytes = self.output.first();
            let send = opcode::Send::new(types::Fd(descriptor), bytes.as_ptr(), bytes.len() as u32);
            return send.flags(libc::MSG_NOSIGNAL).build();
        }
        self.slices.clear();
        let slices = self.output.chunks().take(SLICES_MAX);
        self.slices.extend(
            slices.map(|chunk| libc::iovec { iov_base: chunk.as_ptr().cast_mut().cast(), iov_len: chunk.len() }),
        );
        self.header.msg_iov = self.slices.as_mut_ptr();
        self.header.msg_iovlen = self.slices.len() as _;
        opcode::SendMsg::new(types::Fd(descriptor), &raw const self.header).flags(libc::MSG_NOSIGNAL as u32).build()
    }
}
