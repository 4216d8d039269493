//! A response's body: nothing, bytes, a piece of a file, or a stream of items.
//!
//! The same items serve every protocol version: a codec frames them, and knows
//! how to send a file's piece in the way that suits the connection.

use std::collections::VecDeque;
use std::io;
use std::task::{Context, Poll};

use bytes::Bytes;
use gale_runtime::{File, Lease};

use super::request::Request;
use super::subrequest::Subrequest;

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

/// One thing that a body consists of.
#[derive(Debug)]
pub enum BodyItem {
    /// Bytes in memory.
    Bytes(Bytes),
    /// Bytes in memory on loan from the worker.
    Lease(Lease),
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
            BodyItem::Lease(lease) => lease.len() as u64,
            BodyItem::File(piece) => piece.length,
            BodyItem::Flush | BodyItem::Trailers(_) | BodyItem::Subrequest(_) => 0,
        }
    }
}

/// A body that comes as it is made.
pub trait BodyStream {
    /// The next item of this request's response, `None` at the end. An error means that
    /// the response cannot be completed: the client has to notice.
    fn poll_next(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<io::Result<BodyItem>>>;
}

impl Body {
    /// The length in bytes, unless only the end will tell.
    pub fn length(&self) -> Option<u64> {
        match self {
            Body::Empty => Some(0),
            Body::Bytes(bytes) => Some(bytes.len() as u64),
            Body::File(piece) => Some(piece.length),
            Body::Items(items) => Some(items.iter().map(BodyItem::length).sum()),
            Body::Stream(_) => None,
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
