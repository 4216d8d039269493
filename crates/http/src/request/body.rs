//! A response's body: nothing, bytes, a piece of a file, or a stream of items.
//!
//! The same items serve every protocol version: a codec frames them, and knows
//! how to send a file's piece in the way that suits the connection.

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

/// A body on its way out.
#[derive(Default)]
pub enum Body {
    /// No bytes at all.
    #[default]
    Empty,
    /// All of it, in memory.
    Bytes(Bytes),
    /// One piece of a file.
    File(FilePiece),
    /// Several items, all known: a body that was stored.
    Items(VecDeque<BodyItem>),
    /// Items that come as they are made.
    Stream(Box<dyn BodyStream>),
}

/// One thing that a body consists of.
#[derive(Debug)]
pub enum BodyItem {
    /// Bytes in memory.
    Bytes(Bytes),
    /// A piece of a file.
    File(FilePiece),
    /// What has come so far shall not wait for more.
    Flush,
    /// The end, with these fields after it where the protocol can carry them. Those of a request are what the client
    /// sent: they may be passed on as trailers, and are never merged into a head (RFC 9110 §6.5.1).
    Trailers(Vec<(Bytes, Bytes)>),
    /// The output of a subrequest comes here: the filter `postpone` puts it into its place.
    Subrequest(Box<Subrequest>),
}

impl BodyItem {
    /// How many bytes of body the item stands for.
    pub fn length(&self) -> u64 {
        match self {
            BodyItem::Bytes(bytes) => bytes.len() as u64,
            BodyItem::File(piece) => piece.length,
            BodyItem::Flush | BodyItem::Trailers(_) | BodyItem::Subrequest(_) => 0,
        }
    }

    /// Cuts an item that begins at `start` to the part inside of `wanted`; `None` if there is no such part.
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

    /// The bytes of one that is in memory; none of any other.
    pub fn bytes(&self) -> &[u8] {
        match self {
            BodyItem::Bytes(bytes) => bytes,
            BodyItem::File(_) | BodyItem::Flush | BodyItem::Trailers(_) | BodyItem::Subrequest(_) => &[],
        }
    }
}

/// Why a body cannot be completed. If some of it has left already, the client has to notice.
#[derive(Debug)]
pub enum BodyError {
    /// Nothing came from its source for as long as that is waited for.
    TimedOut,
    /// Its source was reset.
    Reset,
    /// It ended before its announced length; the text says what did.
    Short(String),
    /// A thread pool has no room for what has to be done, or no thread: that passes.
    Overloaded(PoolError),
    /// The worker's memory for buffers is exhausted.
    NoMemory,
    /// A file, named and quoted, cannot be read.
    File(String, io::Error),
    /// The request's body, of which this one is made, broke off.
    Request(RequestBodyError),
    /// What the text says.
    Other(String),
}

impl BodyError {
    /// Why a file of this name, quoted, could not be read.
    pub fn of_file(name: String, error: io::Error) -> BodyError {
        match BodyError::from(error) {
            BodyError::Other(text) => BodyError::File(name, io::Error::other(text)),
            BodyError::File(_, error) => BodyError::File(name, error),
            error => error,
        }
    }

    /// How severe a message about it is.
    pub fn level(&self) -> Level {
        match self {
            // Somebody shortens a file while it is sent.
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

/// A body that comes as it is made.
pub trait BodyStream {
    /// The next item of this request's response, `None` at the end. An error means that
    /// the response cannot be completed: the client has to notice.
    fn poll_next(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>>;

    /// Goes on with what can be done before the client's side takes another item: reads ahead, within bounds, or stores
    /// what comes. Asked in place of [`BodyStream::poll_next`] while the client is slow.
    fn poll_ahead(&mut self, _request: &Request, _context: &mut Context<'_>) {}

    /// Whether it is known that no further item will come.
    fn is_at_end(&self) -> bool {
        false
    }

    /// How long a client that has ended its own direction is waited with while nothing comes; usually `default`.
    fn patience(&self, default: Duration) -> Duration {
        default
    }

    /// The length in bytes, if it is known before the end.
    fn length(&self) -> Option<u64> {
        None
    }

    /// Whether parts of it can be had: it has not begun, knows its length, and [`BodyStream::cut`] cuts it.
    fn can_be_cut(&self) -> bool {
        false
    }

    /// Whether one part of it can be had by leaving out what is before and behind: it has not begun, knows its length,
    /// and consists of bytes and files alone.
    fn can_leave_out(&self) -> bool {
        false
    }

    /// Cuts it to a part, before it has begun; `false` if it has to be cut by [`BodyStream::cut`].
    fn cut_to(&mut self, _range: &Range<u64>) -> bool {
        false
    }

    /// A part of one that has not begun, and stays as it is: any part can be had, as often as somebody asks. `None` if
    /// it is made once, on its way.
    fn part(&self, _range: &Range<u64>) -> Option<Body> {
        None
    }

    /// One that can be cut, since it puts another byte in the place of each of a body, has that body cut by `cut`.
    fn cut(&mut self, _cut: &mut dyn FnMut(Body) -> Body) {}
}

impl Body {
    /// The length in bytes, unless only the end will tell.
    pub fn length(&self) -> Option<u64> {
        match self {
            Body::Empty => Some(0),
            Body::Bytes(bytes) => Some(bytes.len() as u64),
            Body::File(piece) => Some(piece.length),
            Body::Items(items) => Some(items.iter().map(BodyItem::length).sum()),
            Body::Stream(stream) => stream.length(),
        }
    }

    /// Whether parts of it can be had.
    pub fn can_be_cut(&self) -> bool {
        match self {
            Body::Empty | Body::Bytes(_) | Body::File(_) | Body::Items(_) => true,
            Body::Stream(stream) => stream.can_be_cut(),
        }
    }

    /// Whether one part of it can be had by leaving out the rest.
    pub fn can_leave_out(&self) -> bool {
        matches!(self, Body::Stream(stream) if stream.can_leave_out())
    }

    /// Goes on with what can be done before the client's side takes another item.
    pub fn poll_ahead(&mut self, request: &Request, context: &mut Context<'_>) {
        if let Body::Stream(stream) = self {
            stream.poll_ahead(request, context);
        }
    }

    /// How long a client that has ended its own direction is waited with.
    pub fn patience(&self, default: Duration) -> Duration {
        match self {
            Body::Stream(stream) => stream.patience(default),
            _ => default,
        }
    }

    /// Whether it is known that no further item will come.
    pub fn is_at_end(&self) -> bool {
        match self {
            Body::Empty => true,
            Body::Bytes(_) | Body::File(_) => false,
            Body::Items(items) => items.is_empty(),
            Body::Stream(stream) => stream.is_at_end(),
        }
    }

    /// The next item of this request's response, `None` at the end.
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
