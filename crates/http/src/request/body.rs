//! A response's body: nothing, bytes, a piece of a file, or a stream of items.
//!
//! The same items serve every protocol version: a codec frames them, and knows
//! how to send a file's piece in the way that suits the connection.

use std::collections::VecDeque;
use std::io;
use std::task::{Context, Poll};

use gale_runtime::{Bytes, File};

use crate::request::Request;
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

/// A piece of an open file.
#[derive(Clone, Debug)]
pub struct FilePiece {
    /// The file.
    pub file: File,
    /// Where the piece begins, in bytes.
    pub offset: u64,
    /// How long it is, in bytes.
    pub length: u64,
}

impl FilePiece {
    /// Notes that so many bytes of the piece have been dealt with. None at all means that the file has become shorter than
    /// it was when its length was announced.
    pub fn advance(&mut self, count: u64) -> io::Result<()> {
        if count == 0 {
            let message = format!("{} was truncated at {} while it was being sent", self.name(), self.offset);
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, message));
        }
        self.offset += count;
        self.length -= count;
        Ok(())
    }

    /// The file's name for messages, quoted.
    pub fn name(&self) -> String {
        self.file.path().map_or_else(|| "a file".to_owned(), |path| format!("\"{}\"", path.display()))
    }
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
    /// The end, with these fields after it where the protocol can carry them.
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

    /// The bytes of one that is in memory; none of any other.
    pub fn bytes(&self) -> &[u8] {
        match self {
            BodyItem::Bytes(bytes) => bytes,
            BodyItem::File(_) | BodyItem::Flush | BodyItem::Trailers(_) | BodyItem::Subrequest(_) => &[],
        }
    }
}

/// A body that comes as it is made.
pub trait BodyStream {
    /// The next item of this request's response, `None` at the end. An error means that
    /// the response cannot be completed: the client has to notice.
    fn poll_next(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<io::Result<BodyItem>>>;

    /// Whether it is known that no further item will come.
    fn is_at_end(&self) -> bool {
        false
    }

    /// The length in bytes, if it is known before the end.
    fn length(&self) -> Option<u64> {
        None
    }

    /// One that has not begun and puts another byte in the place of each of a body has that body cut by `cut`. Any other
    /// leaves it: it cannot be had in parts. Whoever does cut knows its length.
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
    pub fn poll_next(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<io::Result<BodyItem>>> {
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
