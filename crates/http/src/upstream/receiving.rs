//! How a protocol reads responses: out of what has been received, without I/O.

use std::fmt;

use gale_base::log_level::Level;

use gale_runtime::{Buffer, Bytes};

use crate::request::response::FieldList;

/// The head of a server's response.
#[derive(Debug, Default)]
pub struct UpstreamHead {
    /// The status.
    pub status: u16,
    /// The words that came with it; none where they are the usual ones, or did not come.
    pub reason: Option<Bytes>,
    /// All fields, in order, those of the connection left out.
    pub fields: FieldList,
    /// How long the body is, if that was announced.
    pub length: Option<u64>,
    /// What `Upgrade` says: to what the connection changes, or could change.
    pub upgrade: Option<Bytes>,
    /// Whether fields may follow the body.
    pub may_have_trailers: bool,
}

/// What servers say when they agree to a tunnel, nearly always: no copy of these is kept.
const USUAL_TEXTS: [&[u8]; 2] = [b"Switching Protocols", b"websocket"];

impl UpstreamHead {
    /// Keeps nothing of the buffer that it came in: it may be there for as long as a tunnel is.
    pub(super) fn detach(&mut self) {
        for text in [&mut self.reason, &mut self.upgrade].into_iter().flatten() {
            let usual = USUAL_TEXTS.into_iter().find(|usual| *usual == &text[..]);
            *text = usual.map_or_else(|| Bytes::copy_from_slice(text), Bytes::from_static);
        }
        self.fields.detach();
    }
}

/// What a reader has found so far of a head.
#[derive(Debug)]
pub enum HeadRead {
    /// More has to come.
    Partial,
    /// An interim response, with its fields; the next one is to be read.
    Interim(u16, FieldList),
    /// The final one.
    Whole(Box<UpstreamHead>),
}

/// The next part of a body.
#[derive(Debug)]
pub enum BodyRead {
    /// Some of it.
    Piece(Bytes),
    /// More has to come.
    Partial,
    /// That was all.
    End,
}

/// What is wrong with a response, in nginx's words.
#[derive(Debug)]
pub struct Malformed(pub String);

impl Malformed {
    /// A message of the server has told what is wrong.
    pub fn told() -> Malformed {
        Malformed(String::new())
    }

    /// Whether there is nothing to add in the error log.
    pub fn is_told(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Malformed {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// Something about a response for the error log.
#[derive(Debug)]
pub struct Message {
    /// How severe it is.
    pub level: Level,
    /// In nginx's words, without what was being done.
    pub text: Vec<u8>,
}

/// Reads one response.
pub trait ResponseReader {
    /// Whether no request is sent and no response is read: the connection itself is what the client wants (CONNECT).
    fn is_tunnel(&self) -> bool {
        false
    }

    /// Looks for the head in what has been received and takes it from there. `has_ended` says that nothing more will
    /// come.
    ///
    /// # Errors
    /// It is no head of this protocol.
    fn read_head(&mut self, input: &mut Buffer, has_ended: bool) -> Result<HeadRead, Malformed>;

    /// Takes what has been received of the body, behind the head. Asked again until it says that more has to come.
    ///
    /// # Errors
    /// The framing is wrong, or the body ends too early.
    fn read_body(&mut self, input: &mut Buffer, has_ended: bool) -> Result<BodyRead, Malformed>;

    /// Whether the response is whole, once its body has ended. Of one that breaks off where the protocol has something
    /// that ends it this is not known: it is passed on, and not stored.
    fn is_whole(&self) -> bool {
        true
    }

    /// How many bytes may be asked for at once, so that none of them belong to the next response; `None` when the
    /// protocol tells only as it goes.
    fn wants(&self) -> Option<u64> {
        None
    }

    /// Whether the connection may carry another request now that the response has ended, and for how long the server
    /// says that it waits for that, in seconds.
    fn keeps_alive(&self) -> bool;

    /// For how many seconds the server keeps an idle connection, if it said so.
    fn idle_seconds(&self) -> Option<u64> {
        None
    }

    /// The fields behind the body.
    fn take_trailers(&mut self) -> Vec<(Bytes, Bytes)> {
        Vec::new()
    }

    /// What is to be told besides the response: a field that is passed over, FastCGI's stderr. A line each.
    fn take_message(&mut self) -> Option<Message> {
        None
    }
}
