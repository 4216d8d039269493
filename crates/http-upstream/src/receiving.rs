//! The interface of a protocol's reader of responses: parses received bytes, without I/O.

use std::fmt;

use gale_base::log_level::Level;

use gale_http::request::response::FieldList;
use gale_runtime::{Buffer, Bytes};

/// The head of a server's response.
#[derive(Debug, Default)]
pub struct UpstreamHead {
    /// The status.
    pub status: u16,
    /// The reason phrase; `None` if it is the usual one or missing.
    pub reason: Option<Bytes>,
    /// All fields, in order, without those of the connection.
    pub fields: FieldList,
    /// Length of the body, if it was announced.
    pub length: Option<u64>,
    /// `Upgrade`: the protocol that the connection changes to, or could change to.
    pub upgrade: Option<Bytes>,
    /// True if trailers may follow the body.
    pub may_have_trailers: bool,
}

/// Usual texts of servers that accept a tunnel, of which no copy is kept.
const USUAL_TEXTS: [&[u8]; 2] = [b"Switching Protocols", b"websocket"];

impl UpstreamHead {
    /// Releases the receive buffer, because the head may be kept for as long as a tunnel.
    pub(super) fn detach(&mut self) {
        for text in [&mut self.reason, &mut self.upgrade].into_iter().flatten() {
            let usual = USUAL_TEXTS.into_iter().find(|usual| *usual == &text[..]);
            *text = usual.map_or_else(|| Bytes::copy_from_slice(text), Bytes::from_static);
        }
        self.fields.detach();
    }
}

/// Result of reading a head.
#[derive(Debug)]
pub enum HeadRead {
    /// More bytes are needed.
    Partial,
    /// An interim response, with its fields; another head follows.
    Interim(u16, FieldList),
    /// The final response.
    Whole(Box<UpstreamHead>),
}

/// The next part of a body.
#[derive(Debug)]
pub enum BodyRead {
    /// A piece of the body.
    Piece(Bytes),
    /// More bytes are needed.
    Partial,
    /// The end of the body.
    End,
}

/// Description of an invalid response, in nginx's words.
#[derive(Debug)]
pub struct Malformed(pub String);

impl Malformed {
    /// For a response whose error was described by a message of the server.
    pub fn told() -> Malformed {
        Malformed(String::new())
    }

    /// True if there is nothing to add in the error log.
    pub fn is_told(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Malformed {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// A message about a response for the error log.
#[derive(Debug)]
pub struct Message {
    /// Its severity.
    pub level: Level,
    /// The text in nginx's words, without the current action.
    pub text: Vec<u8>,
}

/// Reads one response.
pub trait ResponseReader {
    /// True if no request is sent and no response is read, because the client asked for a tunnel (CONNECT).
    fn is_tunnel(&self) -> bool {
        false
    }

    /// Parses the head at the beginning of the input and takes it from there. `has_ended` is true if no more bytes will
    /// arrive.
    ///
    /// # Errors
    /// The head is invalid.
    fn read_head(&mut self, input: &mut Buffer, has_ended: bool) -> Result<HeadRead, Malformed>;

    /// Takes received bytes of the body, behind the head. Called again until it returns [`BodyRead::Partial`].
    ///
    /// # Errors
    /// The framing is invalid, or the body ends too early.
    fn read_body(&mut self, input: &mut Buffer, has_ended: bool) -> Result<BodyRead, Malformed>;

    /// True if the response was complete, once its body has ended. If a protocol marks the end, and the connection ends
    /// without that mark, this is false: the response is passed on, and not stored.
    fn is_whole(&self) -> bool {
        true
    }

    /// Number of bytes that may be received at once without reading into the next response; `None` if the protocol does
    /// not tell in advance.
    fn wants(&self) -> Option<u64> {
        None
    }

    /// True if the connection can carry another request after the response has ended.
    fn keeps_alive(&self) -> bool;

    /// Seconds for which the server announces to keep an idle connection.
    fn idle_seconds(&self) -> Option<u64> {
        None
    }

    /// Takes the trailers.
    fn take_trailers(&mut self) -> Vec<(Bytes, Bytes)> {
        Vec::new()
    }

    /// Takes a message about the response, such as a skipped field or FastCGI's stderr, of one line.
    fn take_message(&mut self) -> Option<Message> {
        None
    }
}
