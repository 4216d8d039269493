//! What a client did wrong: every offence has a name, an answer and the words that nginx would log.
//!
//! An offence is always the peer's fault and never worth a retry: the connection is answered and
//! closed. It carries ranges, not text, so that it stays small and `Copy`; [`Offence::describe`]
//! adds the text for the log.

use std::fmt;

use crate::Range32;

/// A violation of the protocol by the client.
///
/// `Display` gives nginx's log message without the details that need the input and without "while
/// …", which belongs to whoever knows what the connection was doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Offence {
    /// The method is not made of `A-Z`, `-` and `_`, or the connection does not speak HTTP at all.
    InvalidMethod,
    /// The request line breaks the grammar of RFC 9112 §3, or the path cannot be decoded.
    InvalidRequest,
    /// The major version is 2 or more: RFC 9110 §15.6.6.
    InvalidVersion,
    /// A request without version whose method is not GET.
    InvalidHttp09Method,
    /// The request line is longer than allowed.
    UriTooLong,
    /// The host in an absolute request target is not one.
    InvalidRequestLineHost,
    /// A header line that no lenient reading can make safe: RFC 9112 §5, or a name that only
    /// pretends to be a framing field.
    InvalidHeaderLine {
        /// What precedes the offending byte in the line.
        before: Range32,
        /// The offending byte, if there is a single one.
        byte: Option<u8>,
    },
    /// A header line is longer than allowed.
    HeaderLineTooLong {
        /// As much of the line as there was.
        line: Range32,
    },
    /// The whole head is larger than allowed.
    HeadTooLarge,
    /// More header lines than `max_headers`.
    TooManyHeaders,
    /// A field that may occur once occurs again.
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
    /// The value of Host is not a host: RFC 9110 §7.2.
    InvalidHost,
    /// HTTP/1.1 without Host: RFC 9112 §3.2.
    MissingHost,
    /// `:authority` and Host name different hosts: RFC 9113 §8.3.1.
    AuthorityAndHostDiffer,
    /// HTTP/2 without `:authority` and without Host, where one of them is needed: RFC 9113 §8.3.1.
    MissingAuthority,
    /// Content-Length is not one plain number that fits in 63 bits: RFC 9110 §8.6.
    InvalidContentLength,
    /// Transfer-Encoding in HTTP/1.0: RFC 9112 §6.1.
    TransferEncodingInHttp10,
    /// Both framings at once: RFC 9112 §6.1.
    LengthAndTransferEncoding,
    /// A malformed list, or `chunked` twice or not last: RFC 9112 §6.1, §6.3.
    InvalidTransferEncoding,
    /// A coding that is not implemented: RFC 9112 §6.1.
    UnknownTransferEncoding {
        /// The field's value.
        value: Range32,
    },
    /// CONNECT has no body: RFC 9110 §9.3.6.
    ConnectWithBody,
    /// A broken chunk: RFC 9112 §7.1.
    InvalidChunk,
    /// The chunk extensions of one body are together larger than allowed.
    ChunkExtensionsTooLarge,
    /// A broken trailer line: RFC 9112 §7.1.2.
    InvalidTrailer,
    /// The trailer section is larger than allowed.
    TrailersTooLarge,
}

impl Offence {
    /// The status that nginx gives this fault: one of 400, 414, 494 and 501, 505. 494 is nginx's
    /// own number, which `error_page` can name; on the wire it is 400
    /// ([`crate::http1::response::wire_status`]).
    pub fn status(self) -> u16 {
        match self {
            Self::InvalidVersion => 505,
            Self::UriTooLong => 414,
            Self::HeaderLineTooLong { .. } | Self::HeadTooLarge | Self::TooManyHeaders => 494,
            Self::UnknownTransferEncoding { .. } => 501,
            _ => 400,
        }
    }

    /// The message together with what the client sent, as nginx logs it; `input` is the buffer that
    /// was parsed.
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
///
/// Bytes that are not UTF-8 are shown with replacement characters by `Display`;
/// [`Description::write_to`] keeps them as they are.
#[derive(Clone, Copy, Debug)]
pub struct Description<'i> {
    offence: Offence,
    input: &'i [u8],
}

impl Description<'_> {
    /// Appends the message to `out`, the client's bytes unchanged. Details are cut after
    /// 1748 bytes.
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

/// Longest piece of client text in a log message, in bytes: nginx cuts its lines at 2048, less 300
/// for the rest of the line.
pub const DETAIL_MAX: usize = 1748;
