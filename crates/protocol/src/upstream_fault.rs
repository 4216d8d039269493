//! Faults: protocol violations by an upstream server. Each fault of a response has a name and nginx's log message.
//!
//! A fault is always the upstream's. If it concerns the head, no part of the response has been used yet, so the request
//! may be sent to another server. A fault contains ranges instead of text; [`ResponseFault::write_to`] adds the text
//! for the log.

use std::fmt;

use crate::offence::DETAIL_MAX;
use crate::{Offence, Range32};

/// Name and value of a field line, as offsets into the input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReceivedLine {
    /// Name.
    pub name: Range32,
    /// Value.
    pub value: Range32,
}

/// A protocol violation by an upstream server.
///
/// `Display` gives nginx's log message without details that need the input, and without "while reading …", which
/// depends on the state of the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ResponseFault {
    /// The response does not begin with a status line: RFC 9112 §4.
    NoStatusLine,
    /// Status 103 in HTTP/1.0: RFC 9110 §15.2.
    EarlyHintsInHttp10,
    /// The field `Status` of a CGI response does not begin with three digits: RFC 3875 §6.3.3.
    InvalidStatus {
        /// Value of the field.
        value: Range32,
    },
    /// The head exceeds the buffer.
    TooBigHeader,
    /// A field line that cannot be accepted safely: RFC 9112 §5, or a name that resembles a framing field.
    InvalidHeader {
        /// Part of the line before the offending byte.
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
    /// `Content-Length` is not a single plain number that fits in 63 bits: RFC 9110 §8.6.
    InvalidContentLength {
        /// The line.
        line: ReceivedLine,
    },
    /// A coding other than a single `chunked`: RFC 9112 §6.1.
    UnknownTransferEncoding {
        /// Value of the field.
        value: Range32,
    },
    /// `Content-Length` together with `Transfer-Encoding`: RFC 9112 §6.1.
    LengthAndTransferEncoding,
    /// `Connection` names too many fields.
    TooManyConnectionOptions,
    /// An invalid chunk: RFC 9112 §7.1.
    InvalidChunk,
    /// An invalid trailer line: RFC 9112 §7.1.2.
    InvalidTrailer,
    /// The trailer section exceeds its limit.
    TooBigTrailers,
}

impl ResponseFault {
    /// Appends nginx's log message, with the upstream's bytes unchanged; `input` is the parsed buffer. Each detail is
    /// cut after 1748 bytes.
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

/// Converts an offence of the chunk decoder to a fault of the upstream.
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

/// Appends nginx's message about a duplicate line.
pub(crate) fn write_duplicate(out: &mut Vec<u8>, input: &[u8], line: ReceivedLine, previous: ReceivedLine) {
    out.extend_from_slice(DUPLICATE.as_bytes());
    out.extend_from_slice(b": ");
    write_line(out, input, line);
    out.extend_from_slice(b", previous value: ");
    write_line(out, input, previous);
}

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
