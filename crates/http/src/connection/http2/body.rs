//! The body of a request in HTTP/2: bytes that have come and were not read yet. Our window bounds them
//! (`flow_control.rs`).

use std::io;
use std::task::{Context, Poll};
use std::time::Duration;

use gale_protocol::request::{KnownHeader, RequestHead};
use gale_runtime::{Buffer, Bytes, Timer};

use crate::connection::body_wait::BodyWait;
use crate::request::exchange::{BodyLimits, RequestBodyError};

/// Largest piece that is given at once.
const PIECE_MAX: usize = 16 * 1024;

/// See the file's head.
#[derive(Default)]
pub(super) struct RequestBody {
    /// Bytes that have come and were not read.
    buffer: Buffer,
    trailers: Option<Vec<(Bytes, Bytes)>>,
    /// Nothing more comes.
    is_complete: bool,
    received: u64,
    /// Size of the head before it, as a block of fields.
    head_bytes: usize,
    /// The client waits for `100 Continue` before it sends.
    wants_continue: bool,
    /// It is the client's direction of a tunnel.
    is_tunnel: bool,
    failure: Option<RequestBodyError>,
    wait: BodyWait,
    timer: Timer,
}

/// Result of reading.
pub(super) enum Piece {
    /// Bytes of the body. As many bytes of the window are free again.
    Bytes(Bytes),
    Trailers(Vec<(Bytes, Bytes)>),
    End,
}

impl RequestBody {
    /// The body behind this head.
    pub fn new(head: &RequestHead, text: &[u8], head_bytes: usize, is_complete: bool) -> RequestBody {
        let expects =
            || head.value(text, KnownHeader::Expect).is_some_and(|value| value.eq_ignore_ascii_case(b"100-continue"));
        let wants_continue = !is_complete && expects();
        RequestBody { is_complete, wants_continue, head_bytes, ..RequestBody::default() }
    }

    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Takes a piece that follows nothing.
    pub fn put(&mut self, piece: Buffer) {
        self.buffer = piece;
    }

    /// Takes a piece that may follow others.
    pub fn append(&mut self, piece: &[u8]) -> io::Result<()> {
        self.buffer.append(piece)
    }

    /// Takes the fields behind the body.
    pub fn put_trailers(&mut self, trailers: Vec<(Bytes, Bytes)>) {
        self.trailers = Some(trailers).filter(|trailers| !trailers.is_empty());
    }

    /// Notes that a piece, or the end, has come.
    pub fn note_came(&mut self, is_complete: bool) {
        self.wait.stop();
        self.wants_continue = false;
        self.is_complete |= is_complete;
    }

    /// Notes that the client has gone. A body that came whole can still be read, by a request that outlives its client.
    pub fn lose(&mut self) {
        if !self.is_complete {
            self.fail(RequestBodyError::PeerGone);
        }
    }

    pub fn fail(&mut self, error: RequestBodyError) {
        self.failure.get_or_insert(error);
        self.buffer.clear();
        self.trailers = None;
    }

    /// The client waits for `100 Continue`; it is told once.
    pub fn take_wants_continue(&mut self) -> bool {
        std::mem::take(&mut self.wants_continue)
    }

    pub fn become_tunnel(&mut self) {
        self.is_tunnel = true;
    }

    /// Returns `true` if all of it has come.
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Returns `true` if all of it has come and was read.
    pub fn is_read(&self) -> bool {
        self.is_complete && self.buffer.is_empty() && self.trailers.is_none()
    }

    pub fn received(&self) -> u64 {
        self.received
    }

    /// Total time that the client has been waited for.
    pub fn waited(&self) -> Duration {
        self.wait.waited()
    }

    pub fn head_bytes(&self) -> usize {
        self.head_bytes
    }

    /// The next piece. After an error there is nothing but that error.
    pub fn poll_next(
        &mut self,
        context: &mut Context<'_>,
        limits: &BodyLimits,
    ) -> Poll<Result<Piece, RequestBodyError>> {
        let polled = match self.failure {
            Some(error) => return Poll::Ready(Err(error)),
            None => self.poll_piece(context, limits),
        };
        if let Poll::Ready(result) = &polled {
            self.timer.clear();
            if let Err(error) = result {
                self.failure = Some(*error);
            }
        }
        polled
    }

    fn poll_piece(&mut self, context: &mut Context<'_>, limits: &BodyLimits) -> Poll<Result<Piece, RequestBodyError>> {
        if let Some(bytes) = self.take_bytes()? {
            self.received += bytes.len() as u64;
            if limits.length_max > 0 && self.received > limits.length_max {
                return Poll::Ready(Err(RequestBodyError::TooLarge));
            }
            return Poll::Ready(Ok(Piece::Bytes(bytes)));
        }
        if self.is_complete {
            return Poll::Ready(Ok(self.trailers.take().map_or(Piece::End, Piece::Trailers)));
        }
        // A tunnel has a time of its own.
        if self.is_tunnel || limits.silence_max == Duration::MAX {
            return Poll::Pending;
        }
        self.wait.poll_ended(&mut self.timer, self.received, limits, context).map(Err)
    }

    fn take_bytes(&mut self) -> Result<Option<Bytes>, RequestBodyError> {
        let lease = match self.buffer.len() {
            ..=PIECE_MAX => self.buffer.take_lease(),
            _ => Some(self.buffer.split_to(PIECE_MAX).map_err(|_| RequestBodyError::NoMemory)?),
        };
        Ok(lease.map(|lease| lease.freeze()))
    }
}
