//! A response's body: nothing, bytes, a piece of a file, or a stream of items.
//!
//! All protocol versions share the same items. Each codec frames them in its own way, and sends a piece of a file as
//! suits the connection.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::ops::Range;
use std::task::{Context, Poll};
use std::time::Duration;

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_runtime::{Bytes, PoolError};

pub use crate::files::FilePiece;
use crate::request::Request;
use crate::request::exchange::RequestBodyError;
use crate::request::subrequest::Subrequest;

/// The body of a response.
#[derive(Default)]
pub enum Body {
    /// No bytes at all.
    #[default]
    Empty,
    /// The whole body, in memory.
    Bytes(Bytes),
    /// One piece of a file.
    File(FilePiece),
    /// A stored body, all of whose items are known.
    Items(VecDeque<BodyItem>),
    /// Items that are produced one after the other.
    Stream(Box<dyn BodyStream>),
}

/// One item of a body.
#[derive(Debug)]
pub enum BodyItem {
    /// Bytes in memory.
    Bytes(Bytes),
    /// A piece of a file.
    File(FilePiece),
    /// The items before this one are sent without waiting for more.
    Flush,
    /// The end, followed by these fields where the protocol can carry them. Those of a request come from the client:
    /// they may be passed on as trailers, but are never merged into a head (RFC 9110 §6.5.1).
    Trailers(Vec<(Bytes, Bytes)>),
    /// Place of a subrequest's output, which the filter `postpone` inserts.
    Subrequest(Box<Subrequest>),
}

impl BodyItem {
    /// Length in bytes; 0 for an item without bytes.
    pub fn length(&self) -> u64 {
        match self {
            BodyItem::Bytes(bytes) => bytes.len() as u64,
            BodyItem::File(piece) => piece.length,
            BodyItem::Flush | BodyItem::Trailers(_) | BodyItem::Subrequest(_) => 0,
        }
    }

    /// Cuts an item that begins at `start` of the body to the part inside `wanted`; `None` if there is no such part.
    pub fn cut(self, start: u64, wanted: &Range<u64>) -> Option<BodyItem> {
        let (from, to) = (wanted.start.max(start), wanted.end.min(start + self.length()));
        if from >= to {
            return None;
        }
        match self {
            BodyItem::Bytes(bytes) => {
                Some(BodyItem::Bytes(bytes.slice((from - start) as usize..(to - start) as usize)))
            }
            BodyItem::File(mut piece) => {
                piece.offset += from - start;
                piece.length = to - from;
                Some(BodyItem::File(piece))
            }
            _ => None,
        }
    }

    /// The bytes of an item in memory; empty for any other.
    pub fn bytes(&self) -> &[u8] {
        match self {
            BodyItem::Bytes(bytes) => bytes,
            BodyItem::File(_) | BodyItem::Flush | BodyItem::Trailers(_) | BodyItem::Subrequest(_) => &[],
        }
    }
}

/// Reason why a body cannot be completed. If part of it has already been sent, the response is broken off in a way that
/// the client notices.
#[derive(Debug)]
pub enum BodyError {
    /// The source sent nothing within its timeout.
    TimedOut,
    /// The connection to the source was reset.
    Reset,
    /// The source ended before the announced length. The text is the message, and names the source.
    Short(String),
    /// A thread pool's queue is full, or the pool has no thread. A later request may succeed.
    Overloaded(PoolError),
    /// The worker's memory for buffers is exhausted.
    NoMemory,
    /// A file cannot be read. The text is its quoted name.
    File(String, io::Error),
    /// The request's body, from which this one is made, broke off.
    Request(RequestBodyError),
    /// Any other error. The text is the message.
    Other(String),
}

impl BodyError {
    /// Converts an error of reading a file. `name` is the file's name, quoted.
    pub fn of_file(name: String, error: io::Error) -> BodyError {
        match BodyError::from(error) {
            BodyError::Other(text) => BodyError::File(name, io::Error::other(text)),
            BodyError::File(_, error) => BodyError::File(name, error),
            error => error,
        }
    }

    /// Level of the message in the error log.
    pub fn level(&self) -> Level {
        match self {
            // A file was shortened while it was being sent.
            BodyError::Short(_) | BodyError::NoMemory => Level::Alert,
            BodyError::File(..) => Level::Crit,
            _ => Level::Error,
        }
    }
}

impl From<io::Error> for BodyError {
    fn from(error: io::Error) -> BodyError {
        match error.kind() {
            io::ErrorKind::OutOfMemory if error.raw_os_error().is_none() => return BodyError::NoMemory,
            io::ErrorKind::UnexpectedEof => return BodyError::Short(error.to_string()),
            _ if error.raw_os_error().is_some() => return BodyError::File("a file".to_owned(), error),
            _ => {}
        }
        match error.downcast::<PoolError>() {
            Ok(overload @ (PoolError::Overflow { .. } | PoolError::NoThread(_))) => BodyError::Overloaded(overload),
            Ok(error) => BodyError::Other(error.to_string()),
            Err(error) => BodyError::Other(error.to_string()),
        }
    }
}

impl fmt::Display for BodyError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BodyError::TimedOut => formatter.write_str("timed out"),
            BodyError::Reset => formatter.write_str("the connection was reset"),
            BodyError::Short(text) | BodyError::Other(text) => formatter.write_str(text),
            BodyError::Overloaded(error) => error.fmt(formatter),
            BodyError::NoMemory => formatter.write_str("the worker's memory for buffers is exhausted"),
            BodyError::File(name, error) => write!(formatter, "reading {name} failed {}", OsErrorText(error)),
            BodyError::Request(error) => write!(formatter, "the request body ended prematurely: {error:?}"),
        }
    }
}

/// A body whose items are produced one after the other.
pub trait BodyStream {
    /// Returns the next item of this request's response, `None` at the end. After an error the response cannot be
    /// completed, and is broken off in a way that the client notices.
    fn poll_next(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>>;

    /// Makes progress without returning an item: reads ahead, within bounds, or stores the bytes that arrive. Called in
    /// place of [`BodyStream::poll_next`] while the client is slow.
    fn poll_ahead(&mut self, _request: &Request, _context: &mut Context<'_>) {}

    /// Returns `true` if it is certain that no further item will come.
    fn is_at_end(&self) -> bool {
        false
    }

    /// Maximum time without an item after which a client that has half-closed its connection counts as one that has
    /// left; usually `default`.
    fn patience(&self, default: Duration) -> Duration {
        default
    }

    /// The length in bytes, if it is known before the end.
    fn length(&self) -> Option<u64> {
        None
    }

    /// Returns `true` if the body can be cut to parts: it has not begun, its length is known, and
    /// [`BodyStream::cut_to`] or [`BodyStream::cut`] is implemented.
    fn can_be_cut(&self) -> bool {
        false
    }

    /// Returns `true` if one part can be obtained by skipping all bytes before and after it: the body has not begun,
    /// its length is known, and it consists only of bytes and files.
    fn can_leave_out(&self) -> bool {
        false
    }

    /// Cuts a body that has not begun to `range`. Returns `false` if [`BodyStream::cut`] has to be used instead.
    fn cut_to(&mut self, _range: &Range<u64>) -> bool {
        false
    }

    /// Returns a part of a body that has not begun, without changing the body: any part, any number of times. `None` if
    /// the body is produced only once, while it is sent.
    fn part(&self, _range: &Range<u64>) -> Option<Body> {
        None
    }

    /// Calls `cut` for the inner body, to cut that. For a body that replaces each byte of an inner body by one byte, so
    /// that the ranges of both are the same.
    fn cut(&mut self, _cut: &mut dyn FnMut(Body) -> Body) {}
}

impl Body {
    /// The length in bytes, if it is known before the end.
    pub fn length(&self) -> Option<u64> {
        match self {
            Body::Empty => Some(0),
            Body::Bytes(bytes) => Some(bytes.len() as u64),
            Body::File(piece) => Some(piece.length),
            Body::Items(items) => Some(items.iter().map(BodyItem::length).sum()),
            Body::Stream(stream) => stream.length(),
        }
    }

    /// Returns `true` if the body can be cut to parts.
    pub fn can_be_cut(&self) -> bool {
        match self {
            Body::Empty | Body::Bytes(_) | Body::File(_) | Body::Items(_) => true,
            Body::Stream(stream) => stream.can_be_cut(),
        }
    }

    /// See [`BodyStream::can_leave_out`].
    pub fn can_leave_out(&self) -> bool {
        matches!(self, Body::Stream(stream) if stream.can_leave_out())
    }

    /// See [`BodyStream::poll_ahead`].
    pub fn poll_ahead(&mut self, request: &Request, context: &mut Context<'_>) {
        if let Body::Stream(stream) = self {
            stream.poll_ahead(request, context);
        }
    }

    /// See [`BodyStream::patience`].
    pub fn patience(&self, default: Duration) -> Duration {
        match self {
            Body::Stream(stream) => stream.patience(default),
            _ => default,
        }
    }

    /// Returns `true` if it is certain that no further item will come.
    pub fn is_at_end(&self) -> bool {
        match self {
            Body::Empty => true,
            Body::Bytes(_) | Body::File(_) => false,
            Body::Items(items) => items.is_empty(),
            Body::Stream(stream) => stream.is_at_end(),
        }
    }

    /// Returns the next item of this request's response, `None` at the end.
    pub fn poll_next(
        &mut self,
        request: &Request,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<BodyItem, BodyError>>> {
        let item = match self {
            Body::Stream(stream) => return stream.poll_next(request, context),
            Body::Items(items) => items.pop_front(),
            other => match std::mem::take(other) {
                Body::Bytes(bytes) => Some(BodyItem::Bytes(bytes)),
                Body::File(piece) => Some(BodyItem::File(piece)),
                _ => None,
            },
        };
        Poll::Ready(item.map(Ok))
    }
}

impl std::fmt::Debug for Body {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.length() {
            Some(length) => write!(formatter, "Body({length} bytes)"),
            None => formatter.write_str("Body(stream)"),
        }
    }
}
