//! A direction of a plain tunnel: bytes go from one socket to another by splice(2), through a pipe and past our memory.
//!
//! By splice(2) itself with every driver: as an operation of a ring it would go to the kernel's threads. Small pieces
//! are received and sent, which is cheaper (`docs/decisions/0021-splice.md`): a piece that fills the buffer says that
//! more comes than that, and the next one is spliced, until one is small again. An idle direction has neither pipe nor
//! memory.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::task::{Context, Poll, ready};

use rustix::io::Errno;
use rustix::pipe::PipeFlags;

use super::Stream;
use crate::memory::buffer::Buffer;
use crate::memory::output::Output;

/// What is received at once where that is cheaper; a larger piece is spliced. By measurement.
const COPIED_MAX: usize = 64 * 1024;

/// What is sent out of the memory that it was received into, without a queue between: what one that wants little may
/// send.
const SMALL_MAX: usize = 16 * 1024;

/// What a pipe holds at most. A socket's bytes come in pages of their own, so it is full earlier where packets are
/// small.
const PIPE_BYTES: usize = 256 * 1024;

/// Pipes that a loop keeps for the next who wants one.
const PIPES_KEPT_MAX: usize = 16;

/// Pipes that a loop has at most: those of destinations that take nothing hold memory of the kernel and descriptors.
/// The others' bytes pass through memory, which has a limit of its own.
const PIPES_MAX: usize = 64;

thread_local! {
    static PIPES: RefCell<Vec<Pipe>> = const { RefCell::new(Vec::new()) };
    static PIPES_OPEN: Cell<usize> = const { Cell::new(0) };
}

/// Moves bytes from one stream to another, in one direction.
#[derive(Default)]
pub struct Splice {
    /// With bytes, or about to have them.
    pipe: Option<Pipe>,
    /// How many.
    piped: usize,
    /// What was received and not sent yet, while there is something.
    output: Option<Box<Output>>,
    has_much: bool,
    /// One of the sockets cannot do it.
    is_impossible: bool,
    is_eager: bool,
    /// What was done last was a send.
    is_sending: bool,
    nodelay: Nodelay,
}

/// Whether small pieces leave at once (`TCP_NODELAY`).
///
/// The kernel holds a small packet back only while an earlier one is not acknowledged, so the first piece never waits:
/// a connection that carries no second one is spared the system call.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Nodelay {
    /// It is set, or nobody wants it.
    #[default]
    Settled,
    /// Nothing has been sent.
    BehindFirst,
    /// It has to be set before anything else is sent.
    Due,
}

impl Splice {
    /// Moves each piece in the way that is cheaper.
    pub fn new() -> Self {
        Splice::default()
    }

    /// Splices every piece, however small: for measurements.
    pub fn eager() -> Self {
        Splice { is_eager: true, ..Splice::default() }
    }

    /// Sets `TCP_NODELAY` at the destination, as soon as that makes a difference.
    pub fn set_nodelay(&mut self) {
        self.nodelay = Nodelay::BehindFirst;
    }

    /// Sends these bytes before all else: what was read ahead, or a header of our own.
    pub fn begin_with(&mut self, ahead: Output) {
        self.output = (!ahead.is_empty()).then(|| Box::new(ahead));
    }

    /// How many bytes have been received and not sent.
    pub fn under_way(&self) -> usize {
        self.piped + self.output.as_ref().map_or(0, |output| output.len_bytes())
    }

    /// After an error: whether sending has failed, and not receiving.
    pub fn failed_sending(&self) -> bool {
        self.is_sending
    }

    /// Moves what has arrived at `from` to `to`, always the same two; ready with the number of bytes that `to` has
    /// taken, or with 0 when `from` has ended and all was taken. Nothing else may receive from the one and send to the
    /// other.
    ///
    /// Errors: those of either connection; `OutOfMemory` at the hard limit of leases. Bytes may be lost then.
    pub fn poll_transfer(&mut self, cx: &mut Context<'_>, from: &Stream, to: &Stream) -> Poll<io::Result<usize>> {
        loop {
            if self.under_way() > 0 {
                return self.poll_send(cx, to);
            }
            self.is_sending = false;
            if !self.may_splice(from, to) {
                match ready!(self.poll_copy(cx, from, to))? {
                    // The socket takes nothing now: it is waited for.
                    0 if self.under_way() > 0 => continue,
                    moved => return Poll::Ready(Ok(moved)),
                }
            }
            match ready!(self.poll_pipe(cx, from)) {
                Ok(0) => return Poll::Ready(Ok(0)),
                Ok(count) => self.has_much = count >= COPIED_MAX,
                // splice(2): the socket does not support it.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) && !self.is_impossible => {
                    self.is_impossible = true;
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    /// Sends of what was received.
    fn poll_send(&mut self, cx: &mut Context<'_>, to: &Stream) -> Poll<io::Result<usize>> {
        self.begin_send(to);
        let sent = if let Some(output) = &mut self.output {
            let sent = ready!(to.poll_send(cx, output));
            if output.is_empty() {
                self.output = None;
            }
            sent?
        } else {
            let pipe = self.pipe.as_ref().expect("it holds what was piped");
            let sent = ready!(to.poll_splice_out(cx, pipe.output.as_fd(), self.piped))?;
            self.piped -= sent;
            if self.piped == 0 {
                self.return_pipe();
            }
            sent
        };
        self.note_sent(sent);
        Poll::Ready(Ok(sent))
    }

    fn begin_send(&mut self, to: &Stream) {
        self.is_sending = true;
        if self.nodelay == Nodelay::Due {
            self.nodelay = Nodelay::Settled;
            // Whether the kernel waits for more is a matter of speed alone.
            let _ = to.set_nodelay(true);
        }
    }

    fn note_sent(&mut self, sent: usize) {
        if sent > 0 && self.nodelay == Nodelay::BehindFirst {
            self.nodelay = Nodelay::Due;
        }
    }

    fn may_splice(&mut self, from: &Stream, to: &Stream) -> bool {
        let is_worth_it = (self.has_much || self.is_eager) && !self.is_impossible;
        is_worth_it
            && from.kernel_socket().is_some()
            && to.kernel_socket().is_some()
            && !from.receives_ahead()
            && self.take_pipe()
    }

    fn poll_pipe(&mut self, cx: &mut Context<'_>, from: &Stream) -> Poll<io::Result<usize>> {
        let pipe = self.pipe.as_ref().expect("taken before");
        let received = from.poll_splice_in(cx, pipe.input.as_fd(), PIPE_BYTES);
        match received {
            Poll::Ready(Ok(count @ 1..)) => self.piped = count,
            // It is empty.
            _ => self.return_pipe(),
        }
        received
    }

    /// Receives a piece, and sends it at once if it is small; ready with how much of it has left. The rest waits.
    fn poll_copy(&mut self, cx: &mut Context<'_>, from: &Stream, to: &Stream) -> Poll<io::Result<usize>> {
        let mut input = Buffer::new();
        let received = ready!(from.poll_recv(cx, &mut input, COPIED_MAX))?;
        self.has_much = received >= COPIED_MAX;
        let mut result = Ok(0);
        if (1..=SMALL_MAX).contains(&received) {
            self.begin_send(to);
            result = to.try_send_copy(input.readable(), false);
            let sent = *result.as_ref().unwrap_or(&0);
            self.note_sent(sent);
            input.consume(sent);
        }
        // Also after an error: it has been received.
        if let Some(rest) = input.take_lease() {
            self.output.get_or_insert_default().push(rest);
        }
        Poll::Ready(result)
    }

    /// Has a pipe; false if there can be none.
    fn take_pipe(&mut self) -> bool {
        if self.pipe.is_none() {
            let kept = PIPES.with_borrow_mut(Vec::pop);
            self.pipe = kept.or_else(|| Pipe::new().ok());
        }
        self.pipe.is_some()
    }

    /// Gives the pipe, which is empty, to whoever wants one next.
    fn return_pipe(&mut self) {
        let pipe = self.pipe.take();
        PIPES.with_borrow_mut(|pipes| pipes.extend(pipe.filter(|_| pipes.len() < PIPES_KEPT_MAX)));
    }
}

/// A pipe with nothing in it.
struct Pipe {
    output: OwnedFd,
    input: OwnedFd,
}

impl Pipe {
    /// Errors: the kernel's; `MFILE` when the loop has as many as it may have.
    fn new() -> Result<Pipe, Errno> {
        if PIPES_OPEN.get() >= PIPES_MAX {
            return Err(Errno::MFILE);
        }
        let (output, input) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        PIPES_OPEN.set(PIPES_OPEN.get() + 1);
        // A user may have so much in pipes; then it stays as it is.
        let _ = rustix::pipe::fcntl_setpipe_size(&input, PIPE_BYTES);
        Ok(Pipe { output, input })
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        // At the end of the thread the count may be gone before its pipes.
        let _ = PIPES_OPEN.try_with(|open| open.set(open.get() - 1));
    }
}

impl fmt::Debug for Splice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Splice({} bytes under way)", self.under_way())
    }
}
