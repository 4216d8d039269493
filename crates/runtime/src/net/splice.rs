//! One direction of a plain tunnel: splice(2) moves bytes from one socket to another through a pipe, without copies to
//! user space.
//!
//! All drivers call splice(2) directly: a ring would run it on kernel threads. Small pieces are received and sent,
//! which is cheaper (`docs/decisions/0021-splice.md`). A piece that fills the buffer means that more is coming, so the
//! next ones are spliced, until one is small again. An idle direction has neither pipe nor memory.

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

/// Bytes received at once in the cheaper way; larger pieces are spliced. Measured.
const COPIED_MAX: usize = 64 * 1024;

/// Bytes that are sent directly from the receive buffer, without a queue: the limit for small work in a turn.
const SMALL_MAX: usize = 16 * 1024;

/// Capacity of a pipe. Each packet of a socket takes pages of its own, so with small packets the pipe is full earlier.
const PIPE_BYTES: usize = 256 * 1024;

/// Unused pipes that a loop keeps.
const PIPES_KEPT_MAX: usize = 16;

/// Limit of pipes per loop: those of stuck destinations hold kernel memory and descriptors. Further directions copy
/// through user memory, which has a limit of its own.
const PIPES_MAX: usize = 64;

thread_local! {
    static PIPES: RefCell<Vec<Pipe>> = const { RefCell::new(Vec::new()) };
    static PIPES_OPEN: Cell<usize> = const { Cell::new(0) };
}

/// Moves bytes from one stream to another, in one direction.
#[derive(Default)]
pub struct Splice {
    /// Present while it holds bytes or is about to.
    pipe: Option<Pipe>,
    piped: usize,
    /// Bytes received and not sent yet, if there are any.
    output: Option<Box<Output>>,
    has_much: bool,
    /// One of the sockets does not support splice(2).
    is_impossible: bool,
    is_eager: bool,
    /// The last operation was a send.
    is_sending: bool,
    nodelay: Nodelay,
}

/// State of `TCP_NODELAY`, with which small pieces leave at once.
///
/// The kernel holds a small packet back only while an earlier one is not acknowledged, so the first piece never waits,
/// and a connection that carries only one piece needs no system call.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Nodelay {
    /// Set, or not wanted.
    #[default]
    Settled,
    /// Wanted; nothing has been sent yet.
    BehindFirst,
    /// To be set before the next send.
    Due,
}

impl Splice {
    /// Moves each piece in the cheaper way.
    pub fn new() -> Self {
        Splice::default()
    }

    /// Splices every piece, however small: for measurements.
    pub fn eager() -> Self {
        Splice { is_eager: true, ..Splice::default() }
    }

    /// Sets `TCP_NODELAY` on the destination as soon as that makes a difference.
    pub fn set_nodelay(&mut self) {
        self.nodelay = Nodelay::BehindFirst;
    }

    /// Sends these bytes first: data that was read ahead, or a header.
    pub fn begin_with(&mut self, ahead: Output) {
        self.output = (!ahead.is_empty()).then(|| Box::new(ahead));
    }

    /// Number of bytes received and not sent.
    pub fn under_way(&self) -> usize {
        self.piped + self.output.as_ref().map_or(0, |output| output.len_bytes())
    }

    /// After an error: whether sending failed, and not receiving.
    pub fn failed_sending(&self) -> bool {
        self.is_sending
    }

    /// Moves data that has arrived from `from` to `to`, which are the same in every call. Ready with the number of
    /// bytes that `to` has taken, or with 0 when `from` has ended and all was taken. No other task may receive from
    /// `from` or send to `to`.
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
                    // The socket is full: wait for room.
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

    /// Sends bytes that were received.
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
            // `TCP_NODELAY` affects only speed.
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
        let pipe = self.pipe.as_ref().expect("the pipe was taken at the start");
        let received = from.poll_splice_in(cx, pipe.input.as_fd(), PIPE_BYTES);
        match received {
            Poll::Ready(Ok(count @ 1..)) => self.piped = count,
            // The pipe is empty.
            _ => self.return_pipe(),
        }
        received
    }

    /// Receives a piece and, if it is small, sends it at once; ready with the number of bytes sent. The rest is kept in
    /// `output`.
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
        // Kept after an error too: it was received.
        if let Some(rest) = input.take_lease() {
            self.output.get_or_insert_default().push(rest);
        }
        Poll::Ready(result)
    }

    /// Ensures that there is a pipe; false if that fails.
    fn take_pipe(&mut self) -> bool {
        if self.pipe.is_none() {
            let kept = PIPES.with_borrow_mut(Vec::pop);
            self.pipe = kept.or_else(|| Pipe::new().ok());
        }
        self.pipe.is_some()
    }

    /// Returns the pipe, which is empty, to those that are kept.
    fn return_pipe(&mut self) {
        let pipe = self.pipe.take();
        PIPES.with_borrow_mut(|pipes| pipes.extend(pipe.filter(|_| pipes.len() < PIPES_KEPT_MAX)));
    }
}

struct Pipe {
    output: OwnedFd,
    input: OwnedFd,
}

impl Pipe {
    /// Errors: the kernel's; `MFILE` at the loop's limit.
    fn new() -> Result<Pipe, Errno> {
        if PIPES_OPEN.get() >= PIPES_MAX {
            return Err(Errno::MFILE);
        }
        let (output, input) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        PIPES_OPEN.set(PIPES_OPEN.get() + 1);
        // The user's limit of pipe memory may be reached; then the default size stays.
        let _ = rustix::pipe::fcntl_setpipe_size(&input, PIPE_BYTES);
        Ok(Pipe { output, input })
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        // When the thread ends the counter may be dropped before the pipes.
        let _ = PIPES_OPEN.try_with(|open| open.set(open.get() - 1));
    }
}

impl fmt::Debug for Splice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Splice({} bytes under way)", self.under_way())
    }
}
