//! Offences: protocol violations by a client. Each has a name, a response status and nginx's log message.
//!
//! An offence is always the client's fault and never worth a retry: it is answered, and the connection is closed. It
//! contains ranges instead of text, so that it is small and `Copy`; [`Offence::describe`] adds the text for the log.

use std::fmt;

use crate::Range32;

/// A protocol violation by the client.
///
/// `Display` gives nginx's log message without details that need the input, and without "while …", which depends on the
/// state of the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Offence {
    /// The method contains bytes other than `A-Z`, `-` and `_`, or the client does not speak HTTP at all.
    InvalidMethod,
    /// The request line violates the grammar of RFC 9112 §3, or the path cannot be decoded.
    InvalidRequest,
    /// The major version is 2 or more: RFC 9110 §15.6.6.
    InvalidVersion,
    /// A request without version whose method is not GET.
    InvalidHttp09Method,
    /// The request line is longer than allowed.
    UriTooLong,
    /// The host in an absolute request target is invalid.
    InvalidRequestLineHost,
    /// A header line that cannot be accepted safely: RFC 9112 §5, or a name that resembles a framing field.
    InvalidHeaderLine {
        /// Part of the line before the offending byte.
        before: Range32,
        /// The offending byte, if there is a single one.
        byte: Option<u8>,
    },
    /// A header line is longer than allowed.
    HeaderLineTooLong {
        /// The received part of the line.
        line: Range32,
    },
    /// The whole head is larger than allowed.
    HeadTooLarge,
    /// More header lines than `max_headers`.
    TooManyHeaders,
    /// A second line of a field that may occur only once.
    DuplicateHeader {
        /// The second line.
        line: Range32,
        /// The first line.
        previous: Range32,
    },
    /// A second Host: RFC 9112 §3.2.
    DuplicateHost {
        /// The second line.
        line: Range32,
        /// The first line.
        previous: Range32,
    },
    /// The value of Host is not a valid host: RFC 9110 §7.2.
    InvalidHost,
    /// HTTP/1.1 without Host: RFC 9112 §3.2.
    MissingHost,
    /// `:authority` and Host name different hosts: RFC 9113 §8.3.1.
    AuthorityAndHostDiffer,
    /// An HTTP/2 request that needs a host, without `:authority` and Host: RFC 9113 §8.3.1.
    MissingAuthority,
    /// Content-Length is not a single plain number that fits in 63 bits: RFC 9110 §8.6.
    InvalidContentLength,
    /// Transfer-Encoding in HTTP/1.0: RFC 9112 §6.1.
    TransferEncodingInHttp10,
    /// Content-Length together with Transfer-Encoding: RFC 9112 §6.1.
    LengthAndTransferEncoding,
    /// A malformed list, or `chunked` twice or not last: RFC 9112 §6.1, §6.3.
    InvalidTransferEncoding,
    /// A coding that is not implemented: RFC 9112 §6.1.
    UnknownTransferEncoding {
        /// Value of the field.
        value: Range32,
    },
    /// CONNECT with a body: RFC 9110 §9.3.6.
    ConnectWithBody,
    /// An invalid chunk: RFC 9112 §7.1.
    InvalidChunk,
    /// The chunk extensions of one body together exceed their limit.
    ChunkExtensionsTooLarge,
    /// An invalid trailer line: RFC 9112 §7.1.2.
    InvalidTrailer,
    /// The trailer section exceeds its limit.
    TrailersTooLarge,
}

impl Offence {
    /// Returns nginx's status for the offence: 400, 414, 494, 501 or 505. 494 is nginx's internal code, available to
    /// `error_page`; it is sent as 400 ([`crate::http1::response::wire_status`]).
    pub fn status(self) -> u16 {
        match self {
            Self::InvalidVersion => 505,
            Self::UriTooLong => 414,
            Self::HeaderLineTooLong { .. } | Self::HeadTooLarge | Self::TooManyHeaders => 494,
            Self::UnknownTransferEncoding { .. } => 501,
            _ => 400,
        }
    }

    /// Returns nginx's log message, with the text sent by the client; `input` is the parsed buffer.
    pub fn describe(self, input: &[u8]) -> Description<'_> {
        Description { offence: self, input }
    }

    fn message(self) -> &'static str {
        match self {
            Self::InvalidMethod => "client sent invalid method",
            Self::InvalidRequest => "client sent invalid request",
            Self::InvalidVersion => "client sent invalid version",
            Self::InvalidHttp09Method => "client sent invalid method in HTTP/0.9 request",
            Self::UriTooLong => "client sent too long URI",
            Self::InvalidRequestLineHost => "client sent invalid host in request line",
            Self::InvalidHeaderLine { .. } => "client sent invalid header line",
            Self::HeaderLineTooLong { .. } => "client sent too long header line",
            Self::HeadTooLarge => "client sent too large request",
            Self::TooManyHeaders => "client sent too many header lines",
            Self::DuplicateHeader { .. } => "client sent duplicate header line",
            Self::DuplicateHost { .. } => "client sent duplicate host header",
            Self::InvalidHost => "client sent invalid host header",
            Self::MissingHost => "client sent HTTP/1.1 request without \"Host\" header",
            Self::AuthorityAndHostDiffer => "client sent \":authority\" and \"Host\" headers with different values",
            Self::MissingAuthority => "client sent neither \":authority\" nor \"Host\" header",
            Self::InvalidContentLength => "client sent invalid \"Content-Length\" header",
            Self::TransferEncodingInHttp10 => "client sent HTTP/1.0 request with \"Transfer-Encoding\" header",
            Self::LengthAndTransferEncoding => {
                "client sent \"Content-Length\" and \"Transfer-Encoding\" headers at the same time"
            }
            Self::InvalidTransferEncoding => "client sent invalid \"Transfer-Encoding\" header",
            Self::UnknownTransferEncoding { .. } => "client sent unknown \"Transfer-Encoding\"",
            Self::ConnectWithBody => "client sent CONNECT request with body",
            Self::InvalidChunk | Self::ChunkExtensionsTooLarge | Self::InvalidTrailer | Self::TrailersTooLarge => {
                "client sent invalid chunked body"
            }
        }
    }
}

impl fmt::Display for Offence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message())
    }
}

impl std::error::Error for Offence {}

/// The full log message of an offence: see [`Offence::describe`].
/// `Display` shows bytes that are not UTF-8 as replacement characters; [`Description::write_to`] keeps them unchanged.
#[derive(Clone, Copy, Debug)]
pub struct Description<'i> {
    offence: Offence,
    input: &'i [u8],
}

impl Description<'_> {
    /// Appends the message to `out`, with the client's bytes unchanged. Details are cut after 1748 bytes.
    pub fn write_to(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.offence.message().as_bytes());
        match self.offence {
            Offence::InvalidHeaderLine { before, byte } => {
                out.extend_from_slice(b": \"");
                out.extend_from_slice(self.detail(before));
                if let Some(byte) = byte {
                    out.extend_from_slice(format!("\\x{byte:02x}...").as_bytes());
                }
                out.push(b'"');
            }
            Offence::HeaderLineTooLong { line } => {
                out.extend_from_slice(b": \"");
                out.extend_from_slice(self.detail(line));
                out.extend_from_slice(b"...\"");
            }
            Offence::DuplicateHeader { line, previous } | Offence::DuplicateHost { line, previous } => {
                out.extend_from_slice(b": \"");
                out.extend_from_slice(self.detail(line));
                out.extend_from_slice(b"\", previous value: \"");
                out.extend_from_slice(self.detail(previous));
                out.push(b'"');
            }
            Offence::UnknownTransferEncoding { value } => {
                out.extend_from_slice(b": \"");
                out.extend_from_slice(self.detail(value));
                out.push(b'"');
            }
            _ => {}
        }
    }

    fn detail(&self, range: Range32) -> &[u8] {
        let text = range.of_lenient(self.input);
        &text[..text.len().min(DETAIL_MAX)]
    }
}

impl fmt::Display for Description<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = Vec::new();
        self.write_to(&mut text);
        f.write_str(&String::from_utf8_lossy(&text))
    }
}

/// Maximum length of client text in a log message in bytes: nginx cuts log lines at 2048 bytes; 300 are reserved for
/// the rest of the line.
pub const DETAIL_MAX: usize = 1748;
