//! What an upstream server did wrong: every fault of a response has a name and the words that nginx would log.
//!
//! A fault is always the upstream's. Nothing of the response has been used by then if it concerns the head, so that
//! another server may be asked. It carries ranges, not text; [`ResponseFault::write_to`] adds the text for the log.

use std::fmt;

use crate::offence::DETAIL_MAX;
use crate::{Offence, Range32};

/// Name and value of a field line, as offsets into the input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReceivedLine {
    /// The name.
    pub name: Range32,
    /// The value.
    pub value: Range32,
}

/// A violation of the protocol by an upstream server.
///
/// `Display` gives nginx's log message without the details that need the input and without "while reading …", which
/// belongs to whoever knows what the connection was doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ResponseFault {
    /// The response does not begin with a status line: RFC 9112 §4.
    NoStatusLine,
    /// 103 in HTTP/1.0: RFC 9110 §15.2.
    EarlyHintsInHttp10,
    /// The field `Status` of a CGI response has no three digits: RFC 3875 §6.3.3.
    InvalidStatus {
        /// The field's value.
        value: Range32,
    },
    /// The head is larger than the buffer for it.
    TooBigHeader,
    /// A field line that no lenient reading can make safe: RFC 9112 §5, or a name that only pretends to be a framing
    /// field.
    InvalidHeader {
        /// What precedes the offending byte in the line.
        before: Range32,
        /// The offending byte, if there is a single one.
        byte: Option<u8>,
    },
    /// A second `Content-Length` or `Transfer-Encoding`.
    DuplicateHeader {
        /// The second line.
        line: ReceivedLine,
        /// The first line.
        previous: ReceivedLine,
    },
    /// `Content-Length` is not one plain number that fits in 63 bits: RFC 9110 §8.6.
    InvalidContentLength {
        /// The line.
        line: ReceivedLine,
    },
    /// A coding other than one `chunked`: RFC 9112 §6.1.
    UnknownTransferEncoding {
        /// The field's value.
        value: Range32,
    },
    /// Both framings at once: RFC 9112 §6.1.
    LengthAndTransferEncoding,
    /// `Connection` names more fields than anybody has a use for.
    TooManyConnectionOptions,
    /// A broken chunk: RFC 9112 §7.1.
    InvalidChunk,
    /// A broken trailer line: RFC 9112 §7.1.2.
    InvalidTrailer,
    /// The trailer section is larger than allowed.
    TooBigTrailers,
}

impl ResponseFault {
    /// The message together with what the upstream sent, its bytes unchanged, as nginx logs it; `input` is the buffer
    /// that was parsed. Each detail is cut after 1748 bytes.
    pub fn write_to(self, input: &[u8], out: &mut Vec<u8>) {
        if let Self::DuplicateHeader { line, previous } = self {
            return write_duplicate(out, input, line, previous);
        }
        out.extend_from_slice(self.message().as_bytes());
        match self {
            Self::InvalidHeader { before, byte } => {
                out.extend_from_slice(b": \"");
                out.extend_from_slice(detail(input, before));
                if let Some(byte) = byte {
                    out.extend_from_slice(format!("\\x{byte:02x}...").as_bytes());
                }
                out.push(b'"');
            }
            Self::InvalidContentLength { line } => {
                out.extend_from_slice(b": ");
                write_line(out, input, line);
            }
            Self::UnknownTransferEncoding { value } => {
                out.extend_from_slice(b": ");
                write_quoted(out, input, value);
            }
            Self::InvalidStatus { value } => {
                out.push(b' ');
                write_quoted(out, input, value);
            }
            _ => {}
        }
    }

    fn message(self) -> &'static str {
        match self {
            Self::NoStatusLine => "upstream sent no valid HTTP/1.0 header",
            Self::EarlyHintsInHttp10 => "upstream sent HTTP/1.0 response with early hints",
            Self::InvalidStatus { .. } => "upstream sent invalid status",
            Self::TooBigHeader => "upstream sent too big header",
            Self::InvalidHeader { .. } => "upstream sent invalid header",
            Self::DuplicateHeader { .. } => DUPLICATE,
            Self::InvalidContentLength { .. } => "upstream sent invalid \"Content-Length\" header",
            Self::UnknownTransferEncoding { .. } => "upstream sent unknown \"Transfer-Encoding\"",
            Self::LengthAndTransferEncoding => {
                "upstream sent \"Content-Length\" and \"Transfer-Encoding\" headers at the same time"
            }
            Self::TooManyConnectionOptions => "upstream sent too many connection options",
            Self::InvalidChunk => "upstream sent invalid chunked response",
            Self::InvalidTrailer => "upstream sent invalid trailer",
            Self::TooBigTrailers => "upstream sent too big trailers",
        }
    }
}

impl fmt::Display for ResponseFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message())
    }
}

impl std::error::Error for ResponseFault {}

/// What the decoder of chunks found wrong, when it was an upstream that sent them.
impl From<Offence> for ResponseFault {
    fn from(offence: Offence) -> Self {
        match offence {
            Offence::InvalidTrailer => Self::InvalidTrailer,
            Offence::TrailersTooLarge => Self::TooBigTrailers,
            _ => Self::InvalidChunk,
        }
    }
}

const DUPLICATE: &str = "upstream sent duplicate header line";

/// Appends nginx's message about a second line.
pub(crate) fn write_duplicate(out: &mut Vec<u8>, input: &[u8], line: ReceivedLine, previous: ReceivedLine) {
    out.extend_from_slice(DUPLICATE.as_bytes());
    out.extend_from_slice(b": ");
    write_line(out, input, line);
    out.extend_from_slice(b", previous value: ");
    write_line(out, input, previous);
}

/// Appends a piece of the input in quotes.
pub(crate) fn write_quoted(out: &mut Vec<u8>, input: &[u8], range: Range32) {
    out.push(b'"');
    out.extend_from_slice(detail(input, range));
    out.push(b'"');
}

fn write_line(out: &mut Vec<u8>, input: &[u8], line: ReceivedLine) {
    out.push(b'"');
    out.extend_from_slice(detail(input, line.name));
    out.extend_from_slice(b": ");
    out.extend_from_slice(detail(input, line.value));
    out.push(b'"');
}

fn detail(input: &[u8], range: Range32) -> &[u8] {
    let text = range.of_lenient(input);
    &text[..text.len().min(DETAIL_MAX)]
}
