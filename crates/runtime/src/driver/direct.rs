//! Non-blocking socket calls that both real drivers make, and their limits per turn.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{self, RecvFlags, SendAncillaryBuffer, SendFlags};
use smallvec::SmallVec;

use super::Fresh;
use crate::executor::budget::QUANTUM_BYTES;
use crate::memory::buffer::Buffer;
use crate::memory::output::{Output, SLICES_MAX};

/// Operations in each direction of a connection per turn. Then a connection that always has data yields to the others.
pub(super) const OPERATIONS_PER_TURN: u32 = 16;

/// Bytes offered in one call at most. If the peer reads as fast as we write, one call would otherwise last as long as
/// there is data (the reason for nginx's `sendfile_max_chunk`).
pub(crate) const SEND_MAX: usize = QUANTUM_BYTES;

/// Spliced bytes that count as one operation.
const SPLICED_PER_OPERATION: usize = 64 * 1024;

/// Operations that one direction of a socket has used in a turn. Every connection has two of these, so the turn number
/// is only 16 bits wide: once in 65,536 turns a connection that was idle since looks busy and yields a turn early.
#[derive(Clone, Copy, Default)]
pub(super) struct Share {
    turn: u16,
    used: u16,
}

impl Share {
    /// Takes one of `max` operations of this turn; false if all are used.
    pub(super) fn take(&mut self, turn: u32, max: u32) -> bool {
        let turn = turn as u16;
        if self.turn != turn {
            *self = Share { turn, used: 0 };
        }
        self.used = self.used.saturating_add(1);
        u32::from(self.used) <= max
    }

    /// Counts the operation just taken as `operations`.
    pub(super) fn count_as(&mut self, operations: u16) {
        self.used = self.used.saturating_add(operations - 1);
    }

    /// Counts the bytes spliced by the operation just taken.
    pub(super) fn count_spliced(&mut self, bytes: usize) {
        self.count_as(bytes.div_ceil(SPLICED_PER_OPERATION).max(1) as u16);
    }

    /// True if the last operation was taken in this turn.
    pub(super) fn is_of(self, turn: u32) -> bool {
        self.turn == turn as u16
    }

    /// Operations taken in the turn of the last `take`.
    pub(super) fn used(self) -> u32 {
        self.used.into()
    }
}

/// A direction of a connection, with its state, share and waiter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Direction {
    Read,
    Write,
}

/// Directions in which a direct call may succeed, as far as events and earlier calls tell, and the peer's hang-up. A
/// byte, because every connection has one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Readiness(u8);

impl Readiness {
    const HUNG_UP: u8 = 1 << 2;

    pub(super) fn new(fresh: Fresh) -> Self {
        let mut readiness = Readiness(0);
        readiness.set(Direction::Read, fresh == Fresh::Accepted);
        readiness.set(Direction::Write, fresh != Fresh::Connecting);
        readiness
    }

    pub(super) fn is(self, direction: Direction) -> bool {
        self.0 & 1 << direction as u8 != 0
    }

    pub(super) fn set(&mut self, direction: Direction, is_ready: bool) {
        self.0 = self.0 & !(1 << direction as u8) | u8::from(is_ready) << direction as u8;
    }

    /// True if RDHUP, HUP or ERR was seen.
    pub(super) fn has_hung_up(self) -> bool {
        self.0 & Readiness::HUNG_UP != 0
    }

    /// Notes that the peer has hung up: the end of the stream is there to be read.
    pub(super) fn hang_up(&mut self) {
        self.0 |= Readiness::HUNG_UP;
        self.set(Direction::Read, true);
    }

    /// Notes a receive of at most `max` bytes. The socket may be drained; after a hang-up the end is still to be read,
    /// and no event will announce it.
    pub(super) fn note_received(&mut self, received: usize, max: usize) {
        self.set(Direction::Read, received == max || received == 0 || self.has_hung_up());
    }

    /// Notes a batch of datagrams; `has_all` = the socket is drained.
    pub(super) fn note_batch(&mut self, has_all: bool) {
        self.set(Direction::Read, !has_all || self.has_hung_up());
    }

    /// Notes a send. A short one has filled the socket; an event will announce room.
    pub(super) fn note_sent(&mut self, is_all: bool) {
        self.set(Direction::Write, is_all || self.has_hung_up());
    }
}

/// A connection on which direct calls are attempted.
pub(super) trait Direct {
    fn readiness(&mut self) -> &mut Readiness;

    fn share(&mut self, direction: Direction) -> &mut Share;
}

/// Result of [`attempt`].
pub(super) enum Attempted<T> {
    Done(io::Result<T>),
    /// The connection has used its share of the turn.
    NextTurn,
    /// The call would block: the task has to wait for an event.
    WouldBlock,
}

/// Runs `operation` if its direction is ready, until it succeeds.
#[inline]
pub(super) fn attempt<C: Direct, T>(
    connection: &mut C,
    direction: Direction,
    turn: u32,
    mut operation: impl FnMut(&mut C) -> Result<T, Errno>,
) -> Attempted<T> {
    if !connection.readiness().is(direction) {
        return Attempted::WouldBlock;
    }
    if !connection.share(direction).take(turn, OPERATIONS_PER_TURN) {
        return Attempted::NextTurn;
    }
    loop {
        match operation(connection) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => break,
            result => return Attempted::Done(result.map_err(io::Error::from)),
        }
    }
    connection.readiness().set(direction, false);
    Attempted::WouldBlock
}

/// Receives at most `max` bytes at the end of `into`; 0 is the end of the stream. Less than `max` means that the socket
/// is drained. Errors: the connection's; ENOMEM at the hard limit of leases.
pub(super) fn receive(socket: BorrowedFd<'_>, into: &mut Buffer, max: usize) -> Result<usize, Errno> {
    let spare = into.spare(max).map_err(|_| Errno::NOMEM)?;
    let received = net::recv(socket, spare, RecvFlags::empty()).map(|(received, _)| received);
    into.commit(received.unwrap_or(0));
    received
}

/// One call: plain for one chunk, vectored for several. Returns the bytes sent and the bytes offered.
pub(super) fn send(socket: BorrowedFd<'_>, out: &Output) -> Result<(usize, usize), Errno> {
    send_chunks(socket, out, out.more_follows())
}

/// As [`send`], but a full socket is no error: 0 bytes were sent then.
pub(super) fn send_chunks_now(socket: BorrowedFd<'_>, out: &Output, is_last: bool) -> io::Result<(usize, usize)> {
    loop {
        match send_chunks(socket, out, is_last) {
            Ok(sent) => return Ok(sent),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok((0, out.len_bytes())),
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn send_chunks(socket: BorrowedFd<'_>, out: &Output, more_follows: bool) -> Result<(usize, usize), Errno> {
    let mut flags = SendFlags::NOSIGNAL;
    flags.set(SendFlags::MORE, more_follows);
    if out.chunk_count() == 1 {
        let chunk = out.first();
        let chunk = &chunk[..chunk.len().min(SEND_MAX)];
        return Ok((net::send(socket, chunk, flags)?, chunk.len()));
    }
    let mut offered = 0;
    let mut slices = SmallVec::<[IoSlice<'_>; SLICES_MAX]>::new();
    for chunk in out.chunks().take(SLICES_MAX) {
        let chunk = &chunk[..chunk.len().min(SEND_MAX - offered)];
        offered += chunk.len();
        slices.push(IoSlice::new(chunk));
        if offered == SEND_MAX {
            break;
        }
    }
    let sent = net::sendmsg(socket, &slices, &mut SendAncillaryBuffer::default(), flags)?;
    Ok((sent, offered))
}

/// Sends a few bytes as far as the socket takes them, perhaps none.
pub(super) fn send_now(socket: BorrowedFd<'_>, bytes: &[u8], is_last: bool) -> io::Result<usize> {
    let mut flags = SendFlags::NOSIGNAL;
    // An incomplete packet waits for more data: the end of the stream, which close sends.
    flags.set(SendFlags::MORE, is_last);
    loop {
        match net::send(socket, bytes, flags) {
            Ok(sent) => return Ok(sent),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(0),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// True if there are bytes to receive, the end of the stream, or an error.
pub(super) fn has_input(socket: BorrowedFd<'_>) -> bool {
    let looked = net::recv(socket, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT);
    !matches!(looked, Err(Errno::AGAIN))
}

/// Succeeds if one of these events is pending or the connection is broken; EAGAIN if not. As with a call that fails,
/// the socket then notes that room to send is wanted, so the next waiter gets an event.
pub(super) fn look_for(socket: BorrowedFd<'_>, events: PollFlags) -> Result<(), Errno> {
    let mut sources = [PollFd::from_borrowed_fd(socket, events)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    match rustix::event::poll(&mut sources, Some(&at_once))? {
        0 => Err(Errno::AGAIN),
        _ => Ok(()),
    }
}

/// True if the peer has shut down its write side; see [`super::StreamDriver::has_hung_up`].
pub(super) fn has_hung_up(socket: BorrowedFd<'_>) -> bool {
    look_for(socket, PollFlags::RDHUP).is_ok()
}

/// True if a connection is reset, or closed in both directions; see [`super::StreamDriver::is_broken`].
pub(super) fn is_broken(socket: BorrowedFd<'_>) -> bool {
    // The kernel reports HUP and ERR unasked.
    let mut sources = [PollFd::from_borrowed_fd(socket, PollFlags::empty())];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    match rustix::event::poll(&mut sources, Some(&at_once)) {
        Ok(_) => sources[0].revents().intersects(PollFlags::HUP | PollFlags::ERR),
        // A failed call tells nothing about the connection.
        Err(_) => false,
    }
}
