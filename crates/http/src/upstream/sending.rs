//! Sends a request to a server: its head, then its body, framed as the protocol wants it.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_engine::spool::{SpoolError, SpoolReader};
use gale_engine::transport::Transport;
use gale_runtime::{Bytes, Output, Timer};

use crate::request::Request;
use crate::request::body::BodyItem;
use crate::request::exchange::{LOW_WATER_BYTES, RequestBodyError};
use crate::request::request_body::{PassedBody, StoredBody};

/// How much of a stored body is read at once, in bytes.
const PIECE_BYTES: usize = 32 * 1024;

/// How a protocol puts a request's body on the wire.
pub trait BodyFraming: Sync {
    /// Queues a piece of the body, which is not empty.
    ///
    /// # Errors
    /// `OutOfMemory` at the hard limit of leases.
    fn push(&self, piece: Bytes, output: &mut Output) -> io::Result<()>;

    /// Whether the end of a body is told, also of an empty one.
    fn tells_end(&self) -> bool {
        false
    }

    /// Queues what follows the last piece, with the fields that came behind the client's body.
    ///
    /// # Errors
    /// As for a piece.
    fn end(&self, trailers: &[(Bytes, Bytes)], output: &mut Output) -> io::Result<()>;
}

/// The body as it is: its length was announced, or the end of the connection tells.
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

/// Where a request's body comes from.
#[derive(Clone, Default)]
pub enum RequestBody {
    /// There is none, or it is not passed on.
    #[default]
    None,
    /// These bytes.
    Own(Bytes),
    /// The whole body, which can be sent again.
    Stored(StoredBody),
    /// The client, as it sends: once.
    Client,
}

impl RequestBody {
    /// Whether it is sent while the client sends it.
    pub fn is_streamed(&self) -> bool {
        matches!(self, RequestBody::Client)
    }
}

/// Why a request could not be sent.
#[derive(Debug)]
pub enum SendError {
    /// The connection failed.
    Server(io::Error),
    /// The server takes nothing.
    TimedOut,
    /// The client's body broke off.
    Client(RequestBodyError),
    /// What was stored of the body cannot be read.
    Stored(SpoolError),
    /// The worker's memory for buffers is exhausted.
    NoMemory,
}

/// A request on its way to a server.
pub(super) struct Sending {
    /// The head, until it has been given to the socket or to `output`.
    head: Bytes,
    /// What has to wait, if there was any. Apart: it is large, and most requests leave with one call.
    output: Option<Box<Output>>,
    pieces: Pieces,
    framing: &'static dyn BodyFraming,
    timer: Timer,
    time_max: Duration,
    is_waiting: bool,
    /// What has left, in bytes.
    pub sent: u64,
}

/// A request's body, piece by piece, out of where it comes from.
pub(super) struct Pieces {
    source: Source,
    has_taken_body: bool,
    /// What was taken of the client's body, and how much of that was taken from here.
    kept: Option<(Rc<RefCell<Kept>>, usize)>,
}

/// The beginning of a client's body, in case that the request has to be sent again.
#[derive(Default)]
pub(super) struct Kept {
    pieces: Vec<Bytes>,
    bytes: usize,
    /// That is all of it, with the fields behind it.
    end: Option<Vec<(Bytes, Bytes)>>,
    /// There was more than is kept.
    is_partial: bool,
}

/// How much of a client's body is kept, in bytes.
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
    /// As ended, but for the connection.
    GivenUp,
    Own(Bytes),
    Stored(SpoolReader),
    Client {
        trailers: Vec<(Bytes, Bytes)>,
    },
}

/// The next part of a request's body.
pub(super) enum Piece {
    /// Some of it, which is not empty.
    Bytes(Bytes),
    /// The end, with the fields that came behind it. There is nothing more to ask for.
    End(Vec<(Bytes, Bytes)>),
}

impl Pieces {
    /// The whole body.
    pub fn new(body: &RequestBody) -> Pieces {
        let source = match body {
            RequestBody::None => Source::Ended,
            RequestBody::Own(bytes) => Source::Own(bytes.clone()),
            RequestBody::Stored(stored) => stored.read(..).map_or(Source::Ended, Source::Stored),
            RequestBody::Client => Source::Client { trailers: Vec::new() },
        };
        Pieces { source, has_taken_body: false, kept: None }
    }

    /// The same, and the beginning of a client's body is kept; what is kept already comes first.
    pub fn keeping(body: &RequestBody, kept: &mut Option<Rc<RefCell<Kept>>>) -> Pieces {
        let mut pieces = Pieces::new(body);
        if body.is_streamed() {
            pieces.kept = Some((Rc::clone(kept.get_or_insert_default()), 0));
        }
        pieces
    }

    /// The request will not be sent again.
    pub fn keep_nothing(&mut self) {
        self.kept = None;
    }

    /// Something of the client's body was taken that nobody has any more, its end included: this request cannot be sent
    /// again.
    pub fn has_taken_body(&self) -> bool {
        self.has_taken_body && self.kept.as_ref().is_none_or(|(kept, _)| kept.borrow().is_partial)
    }

    /// The next of what is kept.
    fn next_kept(&mut self) -> Option<Piece> {
        let (kept, taken) = self.kept.as_mut()?;
        let kept = kept.borrow();
        if let Some(piece) = kept.pieces.get(*taken) {
            *taken += 1;
            return Some(Piece::Bytes(piece.clone()));
        }
        kept.end.clone().map(Piece::End)
    }

    /// Whether all of it was taken.
    pub fn has_ended(&self) -> bool {
        matches!(self.source, Source::Ended)
    }

    /// Whether nothing more is to be had.
    pub fn is_over(&self) -> bool {
        matches!(self.source, Source::Ended | Source::GivenUp)
    }

    /// Nothing more is taken, although that was not all.
    pub fn give_up(&mut self) {
        self.source = Source::GivenUp;
    }

    /// The next part.
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
    /// A request from its first byte on.
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

    /// Frames an empty body, too: for protocols in which its end is told.
    pub fn frame_end(&mut self, body: &RequestBody) -> io::Result<()> {
        if self.pieces.has_ended() && !matches!(body, RequestBody::Client) && self.framing.tells_end() {
            let output = self.output.get_or_insert_default();
            output.push(std::mem::take(&mut self.head));
            self.framing.end(&[], output)?;
        }
        Ok(())
    }

    /// Whether all of it has left.
    pub fn is_done(&self) -> bool {
        self.pieces.has_ended() && self.output.as_ref().is_none_or(|output| output.is_empty()) && self.head.is_empty()
    }

    /// Something of the client's body was taken, its end included: this request cannot be sent again.
    pub fn has_taken_body(&self) -> bool {
        self.pieces.has_taken_body()
    }

    /// Nothing more is sent. The request is not whole, and the connection cannot be used again.
    pub fn give_up(&mut self) {
        self.pieces.give_up();
        self.head = Bytes::new();
        self.output = None;
    }

    /// Sends on. Ready when all of it has left.
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
                // Whoever waits for the client does not wait for the server.
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

    /// Gives the head to the socket: alone if that is all, else with the beginning of the body.
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

    /// Queues of the body what there is and what may be queued. Ready when all of it is.
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
