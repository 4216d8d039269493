//! Sends a request to a server: its head, then its body, framed by the protocol.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_http::request::Request;
use gale_http::request::body::BodyItem;
use gale_http::request::exchange::{LOW_WATER_BYTES, RequestBodyError};
use gale_http::request::request_body::{PassedBody, StoredBody};
use gale_runtime::{Bytes, Output, Timer};
use gale_spool::{SpoolError, SpoolReader};
use gale_tls::Transport;

/// Number of bytes of a stored body read at once.
const PIECE_BYTES: usize = 32 * 1024;

/// Framing of a request's body.
pub trait BodyFraming: Sync {
    /// Queues a non-empty piece of the body.
    ///
    /// # Errors
    /// `OutOfMemory` at the hard limit of leases.
    fn push(&self, piece: Bytes, output: &mut Output) -> io::Result<()>;

    /// True if the protocol marks the end of a body, even of an empty one.
    fn tells_end(&self) -> bool {
        false
    }

    /// Queues the end of the body, with the client's trailers.
    ///
    /// # Errors
    /// As for a piece.
    fn end(&self, trailers: &[(Bytes, Bytes)], output: &mut Output) -> io::Result<()>;
}

/// No framing: the length was announced, or the connection ends.
pub struct Unframed;

impl BodyFraming for Unframed {
    fn push(&self, piece: Bytes, output: &mut Output) -> io::Result<()> {
        output.push(piece);
        Ok(())
    }

    fn end(&self, _: &[(Bytes, Bytes)], _: &mut Output) -> io::Result<()> {
        Ok(())
    }
}

/// The source of a request's body.
#[derive(Clone, Default)]
pub enum RequestBody {
    /// No body, or one that is not passed on.
    #[default]
    None,
    /// These bytes.
    Own(Bytes),
    /// The whole body, stored, so that it can be sent again.
    Stored(StoredBody),
    /// The client, while it sends. The body can be read only once.
    Client,
}

impl RequestBody {
    /// True if it is sent while the client sends it.
    pub fn is_streamed(&self) -> bool {
        matches!(self, RequestBody::Client)
    }
}

/// Reason for which a request could not be sent.
#[derive(Debug)]
pub enum SendError {
    /// The connection to the server failed.
    Server(io::Error),
    /// The server reads nothing.
    TimedOut,
    /// The client's body is incomplete.
    Client(RequestBodyError),
    /// The stored body cannot be read.
    Stored(SpoolError),
    /// The worker's memory for buffers is exhausted.
    NoMemory,
}

/// A request being sent to a server.
pub(super) struct Sending {
    /// The head, until it was passed to the socket or to `output`.
    head: Bytes,
    /// Queued bytes. Boxed: it is large, and most requests are sent with one call.
    output: Option<Box<Output>>,
    pieces: Pieces,
    framing: &'static dyn BodyFraming,
    timer: Timer,
    time_max: Duration,
    is_waiting: bool,
    /// Number of bytes sent.
    pub sent: u64,
}

/// A request's body, read in pieces from its source.
pub(super) struct Pieces {
    source: Source,
    has_taken_body: bool,
    /// The kept beginning of the client's body, and the number of its pieces that were returned here.
    kept: Option<(Rc<RefCell<Kept>>, usize)>,
}

/// The beginning of a client's body, kept for sending the request again.
#[derive(Default)]
pub(super) struct Kept {
    pieces: Vec<Bytes>,
    bytes: usize,
    /// Set if the whole body is kept, with its trailers.
    end: Option<Vec<(Bytes, Bytes)>>,
    /// True if the body is longer than the part that may be kept.
    is_partial: bool,
}

/// Maximum number of bytes kept of a client's body.
const KEPT_MAX: usize = 64 * 1024;

impl Kept {
    fn keep(&mut self, piece: &Bytes) {
        self.bytes += piece.len();
        self.is_partial |= self.bytes > KEPT_MAX;
        if self.is_partial {
            self.pieces = Vec::new();
        } else {
            self.pieces.push(piece.clone());
        }
    }
}

enum Source {
    Ended,
    /// Given up: the body is incomplete, so the connection cannot be reused.
    GivenUp,
    Own(Bytes),
    Stored(SpoolReader),
    Client {
        trailers: Vec<(Bytes, Bytes)>,
    },
}

/// The next part of a request's body.
pub(super) enum Piece {
    /// A non-empty piece.
    Bytes(Bytes),
    /// The end, with the trailers.
    End(Vec<(Bytes, Bytes)>),
}

impl Pieces {
    /// Reads the whole body.
    pub fn new(body: &RequestBody) -> Pieces {
        let source = match body {
            RequestBody::None => Source::Ended,
            RequestBody::Own(bytes) => Source::Own(bytes.clone()),
            RequestBody::Stored(stored) => stored.read(..).map_or(Source::Ended, Source::Stored),
            RequestBody::Client => Source::Client { trailers: Vec::new() },
        };
        Pieces { source, has_taken_body: false, kept: None }
    }

    /// Like [`Pieces::new`], but keeps the beginning of a client's body, and returns the part that is already kept
    /// first.
    pub fn keeping(body: &RequestBody, kept: &mut Option<Rc<RefCell<Kept>>>) -> Pieces {
        let mut pieces = Pieces::new(body);
        if body.is_streamed() {
            pieces.kept = Some((Rc::clone(kept.get_or_insert_default()), 0));
        }
        pieces
    }

    /// Drops the kept beginning: the request will not be sent again.
    pub fn keep_nothing(&mut self) {
        self.kept = None;
    }

    /// True if a part of the client's body, or its end, was consumed and is not kept: the request cannot be sent again.
    pub fn has_taken_body(&self) -> bool {
        self.has_taken_body && self.kept.as_ref().is_none_or(|(kept, _)| kept.borrow().is_partial)
    }

    /// The next kept piece.
    fn next_kept(&mut self) -> Option<Piece> {
        let (kept, taken) = self.kept.as_mut()?;
        let kept = kept.borrow();
        if let Some(piece) = kept.pieces.get(*taken) {
            *taken += 1;
            return Some(Piece::Bytes(piece.clone()));
        }
        kept.end.clone().map(Piece::End)
    }

    /// True if the whole body was read.
    pub fn has_ended(&self) -> bool {
        matches!(self.source, Source::Ended)
    }

    /// True if there is nothing more to read.
    pub fn is_over(&self) -> bool {
        matches!(self.source, Source::Ended | Source::GivenUp)
    }

    /// Stops reading before the end.
    pub fn give_up(&mut self) {
        self.source = Source::GivenUp;
    }

    /// Returns the next part.
    pub fn poll_next(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Result<Piece, SendError>> {
        if matches!(self.source, Source::Client { .. })
            && let Some(piece) = self.next_kept()
        {
            self.has_taken_body = true;
            if let Piece::End(_) = &piece {
                self.source = Source::Ended;
            }
            return Poll::Ready(Ok(piece));
        }
        loop {
            let piece = match &mut self.source {
                Source::Ended | Source::GivenUp => None,
                Source::Own(bytes) => Some(std::mem::take(bytes)).filter(|bytes| !bytes.is_empty()),
                Source::Stored(reader) => ready!(reader.poll_read(context, PIECE_BYTES)).map_err(SendError::Stored)?,
                Source::Client { trailers } => {
                    let item = ready!(request.exchange().poll_body(context, &request.body_limits()));
                    self.has_taken_body = true;
                    match item.map_err(SendError::Client)? {
                        Some(BodyItem::Bytes(bytes)) => {
                            PassedBody::note(request, &bytes);
                            if let Some((kept, taken)) = &mut self.kept
                                && !bytes.is_empty()
                            {
                                kept.borrow_mut().keep(&bytes);
                                *taken += 1;
                            }
                            Some(bytes)
                        }
                        Some(BodyItem::Trailers(fields)) => {
                            *trailers = fields;
                            continue;
                        }
                        Some(_) => continue,
                        None => {
                            if let Some((kept, _)) = &self.kept {
                                kept.borrow_mut().end = Some(trailers.clone());
                            }
                            None
                        }
                    }
                }
            };
            match piece {
                Some(piece) if piece.is_empty() => {}
                Some(piece) => return Poll::Ready(Ok(Piece::Bytes(piece))),
                None => {
                    return Poll::Ready(Ok(Piece::End(match std::mem::replace(&mut self.source, Source::Ended) {
                        Source::Client { trailers } => trailers,
                        Source::Ended | Source::GivenUp | Source::Own(_) | Source::Stored(_) => Vec::new(),
                    })));
                }
            }
        }
    }
}

impl Sending {
    /// Begins to send a request.
    #[inline]
    pub fn new(head: Bytes, body: &RequestBody, framing: &'static dyn BodyFraming, time_max: Duration) -> Sending {
        Sending {
            head,
            output: None,
            pieces: Pieces::new(body),
            framing,
            timer: Timer::new(),
            time_max,
            is_waiting: false,
            sent: 0,
        }
    }

    /// Frames the end of an empty body, for protocols that mark it.
    pub fn frame_end(&mut self, body: &RequestBody) -> io::Result<()> {
        if self.pieces.has_ended() && !matches!(body, RequestBody::Client) && self.framing.tells_end() {
            let output = self.output.get_or_insert_default();
            output.push(std::mem::take(&mut self.head));
            self.framing.end(&[], output)?;
        }
        Ok(())
    }

    /// True if everything was sent.
    pub fn is_done(&self) -> bool {
        self.pieces.has_ended() && self.output.as_ref().is_none_or(|output| output.is_empty()) && self.head.is_empty()
    }

    /// True if a part of the client's body, or its end, was consumed: the request cannot be sent again.
    pub fn has_taken_body(&self) -> bool {
        self.pieces.has_taken_body()
    }

    /// Stops sending. The request is incomplete, and the connection cannot be reused.
    pub fn give_up(&mut self) {
        self.pieces.give_up();
        self.head = Bytes::new();
        self.output = None;
    }

    /// Continues sending. Ready when everything was sent.
    pub fn poll(
        &mut self,
        request: &Request,
        stream: &Transport,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), SendError>> {
        if !self.head.is_empty() {
            self.send_head(stream)?;
            if self.is_done() {
                return Poll::Ready(Ok(()));
            }
        }
        loop {
            let is_filled = self.poll_fill(request, context)?;
            let output = self.output.get_or_insert_default();
            if output.is_empty() {
                // A wait for the client is none for the server.
                self.is_waiting = false;
                return is_filled.map(Ok);
            }
            match stream.poll_send(context, output) {
                Poll::Ready(Ok(sent)) => {
                    self.sent += sent as u64;
                    self.is_waiting = false;
                }
                Poll::Ready(Err(error)) => return Poll::Ready(Err(SendError::Server(error))),
                Poll::Pending => {
                    if !std::mem::replace(&mut self.is_waiting, true) {
                        self.timer.set_after(self.time_max);
                    }
                    ready!(self.timer.poll_expired(context));
                    return Poll::Ready(Err(SendError::TimedOut));
                }
            }
        }
    }

    /// Sends the head: alone if there is no body, else with the beginning of the body.
    fn send_head(&mut self, stream: &Transport) -> Result<(), SendError> {
        let mut head = std::mem::take(&mut self.head);
        if self.pieces.has_ended() {
            let sent = stream.try_send_copy(&head, false).map_err(SendError::Server)?;
            self.sent += sent as u64;
            head.advance(sent);
        }
        if !head.is_empty() {
            self.output.get_or_insert_default().push(head);
        }
        Ok(())
    }

    /// Queues the available part of the body, within the bound. Ready when the whole body was queued.
    fn poll_fill(&mut self, request: &Request, context: &mut Context<'_>) -> Result<Poll<()>, SendError> {
        let output = self.output.get_or_insert_default();
        while output.len_bytes() as u64 <= LOW_WATER_BYTES {
            if self.pieces.is_over() {
                return Ok(Poll::Ready(()));
            }
            let Poll::Ready(piece) = self.pieces.poll_next(request, context)? else { return Ok(Poll::Pending) };
            let queued = match piece {
                Piece::Bytes(piece) => self.framing.push(piece, output),
                Piece::End(trailers) => self.framing.end(&trailers, output),
            };
            queued.map_err(|_| SendError::NoMemory)?;
        }
        Ok(Poll::Pending)
    }
}
