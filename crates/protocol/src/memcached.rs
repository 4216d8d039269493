//! The part of memcached's text protocol that a web server needs: requesting and receiving one value.
//!
//! ```text
//! get KEY CRLF
//! VALUE KEY flags length CRLF value CRLF END CRLF        or, if there is no value:  END CRLF
//! ```
//!
//! Invariant: a key cannot be parsed as two keys or as another command, and a truncated value is always detected.

use std::fmt;

use crate::Range32;
use crate::http1::{Decoded, Status};
use crate::offence::DETAIL_MAX;

/// Appends the request for the value of `key`, which must not be empty. As in nginx, spaces, control characters and "%"
/// are escaped as `%XX`. Returns the length of the escaped key, which is at the end of `out` before the last two bytes.
pub fn write_get(out: &mut Vec<u8>, key: &[u8]) -> usize {
    debug_assert!(!key.is_empty(), "there is no value without a key");
    out.extend_from_slice(b"get ");
    let start = out.len();
    for &byte in key {
        if byte <= b' ' || byte == b'%' {
            let digit = |value: u8| b"0123456789ABCDEF"[usize::from(value)];
            out.extend_from_slice(&[b'%', digit(byte >> 4), digit(byte & 15)]);
        } else {
            out.push(byte);
        }
    }
    let length = out.len() - start;
    out.extend_from_slice(b"\r\n");
    length
}

/// First line of a reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Reply {
    /// There is no value, and nothing follows.
    #[default]
    NotFound,
    /// The value and its trailer follow.
    Found {
        /// Flags stored with the value; `None` if they are not a number, which nginx refuses only with
        /// `memcached_gzip_flag`: see [`ReplyParser::checking_flags`].
        flags: Option<u64>,
        /// Length of the value in bytes.
        length: u64,
    },
}

/// A violation of the protocol by a memcached server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemcachedFault {
    /// Kind of the violation.
    pub kind: MemcachedFaultKind,
    /// First line of the reply, as far as it arrived; empty if it is not the cause.
    pub line: Range32,
}

/// Kind of a protocol violation. `Display` gives nginx's message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemcachedFaultKind {
    /// The line exceeds the buffer.
    LineTooLong,
    /// Neither a value nor END: an error reported by the server.
    InvalidResponse,
    /// The value belongs to another key.
    InvalidKey,
    /// The flags are not a number.
    InvalidFlags,
    /// The length is not a number of at most 63 bits.
    InvalidLength,
    /// The value is not followed by its trailer.
    InvalidTrailer,
}

impl fmt::Display for MemcachedFaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LineTooLong => "upstream sent too big header",
            Self::InvalidResponse => "memcached sent invalid response",
            Self::InvalidKey => "memcached sent invalid key in response",
            Self::InvalidFlags => "memcached sent invalid flags in response",
            Self::InvalidLength => "memcached sent invalid length in response",
            Self::InvalidTrailer => "memcached sent invalid trailer",
        })
    }
}

impl MemcachedFault {
    /// Appends nginx's log message; `input` is the parsed input, `key` the requested key. Each detail is cut after 1748
    /// bytes.
    pub fn write_to(&self, input: &[u8], key: &[u8], out: &mut Vec<u8>) {
        out.extend_from_slice(self.kind.to_string().as_bytes());
        let mut quote = |before: &[u8], text: &[u8]| {
            out.extend_from_slice(before);
            out.push(b'"');
            out.extend_from_slice(&text[..text.len().min(DETAIL_MAX)]);
            out.push(b'"');
        };
        match self.kind {
            MemcachedFaultKind::LineTooLong | MemcachedFaultKind::InvalidTrailer => {}
            MemcachedFaultKind::InvalidResponse => quote(b": ", self.line.of_lenient(input)),
            MemcachedFaultKind::InvalidKey | MemcachedFaultKind::InvalidFlags | MemcachedFaultKind::InvalidLength => {
                quote(b" ", self.line.of_lenient(input));
                quote(b" for key ", key);
            }
        }
    }
}

/// Incremental parser for the first line of a reply: call it with the same, growing buffer until the line is complete.
#[derive(Clone, Debug)]
pub struct ReplyParser {
    line_max: usize,
    checks_flags: bool,
    /// Position up to which the input contains no line end.
    scanned: usize,
}

impl ReplyParser {
    /// Creates a parser for lines of at most `line_max` bytes: nginx's `memcached_buffer_size`.
    pub fn new(line_max: usize) -> Self {
        Self { line_max: line_max.min(u32::MAX as usize), checks_flags: false, scanned: 0 }
    }

    /// Treats non-numeric flags as a fault ([`MemcachedFaultKind::InvalidFlags`]).
    pub fn checking_flags(self) -> Self {
        Self { checks_flags: true, ..self }
    }

    /// Parses the input so far; `key` is the escaped key as sent. After `Complete`, `reply` contains the result.
    pub fn parse(&mut self, input: &[u8], key: &[u8], reply: &mut Reply) -> Result<Status, MemcachedFault> {
        let input = &input[..input.len().min(self.line_max)];
        let from = self.scanned.min(input.len());
        let Some(end) = memchr::memchr(b'\n', &input[from..]).map(|length| from + length) else {
            self.scanned = input.len();
            let line = Range32::new(0, input.len());
            let too_long = MemcachedFault { kind: MemcachedFaultKind::LineTooLong, line };
            return if input.len() < self.line_max { Ok(Status::NeedMore) } else { Err(too_long) };
        };
        self.scanned = 0;
        let (line, result) = match input[..end].strip_suffix(b"\r") {
            Some(line) => (line, parse_line(line, key, self.checks_flags)),
            None => (&input[..end], Err(MemcachedFaultKind::InvalidResponse)),
        };
        *reply = result.map_err(|kind| MemcachedFault { kind, line: Range32::new(0, line.len()) })?;
        Ok(Status::Complete { consumed: end + 1 })
    }
}

fn parse_line(line: &[u8], key: &[u8], checks_flags: bool) -> Result<Reply, MemcachedFaultKind> {
    if line == b"END" {
        return Ok(Reply::NotFound);
    }
    let rest = line.strip_prefix(b"VALUE ").ok_or(MemcachedFaultKind::InvalidResponse)?;
    let rest = rest.strip_prefix(key).ok_or(MemcachedFaultKind::InvalidKey)?;
    let rest = rest.strip_prefix(b" ").ok_or(MemcachedFaultKind::InvalidResponse)?;
    let space = memchr::memchr(b' ', rest).ok_or(MemcachedFaultKind::InvalidResponse)?;
    let flags = crate::http1::parse_length(&rest[..space]);
    if checks_flags && flags.is_none() {
        return Err(MemcachedFaultKind::InvalidFlags);
    }
    let length = crate::http1::parse_length(&rest[space + 1..]).ok_or(MemcachedFaultKind::InvalidLength)?;
    Ok(Reply::Found { flags, length })
}

/// Trailer of a value.
const TRAILER: &[u8] = b"\r\nEND\r\n";

/// Incremental decoder for a value and its trailer.
#[derive(Clone, Debug)]
pub struct ValueDecoder {
    remaining: u64,
    /// Number of bytes of [`TRAILER`] received.
    trailer_seen: usize,
}

impl ValueDecoder {
    /// Creates a decoder for a value of `length` bytes.
    pub fn new(length: u64) -> Self {
        Self { remaining: length, trailer_seen: 0 }
    }

    /// Number of bytes of the value that have not been returned yet.
    pub fn remaining(&self) -> u64 {
        self.remaining
    }

    /// Returns `true` after the value and its trailer; further bytes would be unsolicited.
    pub fn is_finished(&self) -> bool {
        self.trailer_seen == TRAILER.len()
    }

    /// Decodes a piece of the value or of its trailer.
    ///
    /// Call again with the input after `consumed` until none is left or the value is finished. A fault concerns only
    /// the trailer; the value was returned completely before.
    pub fn decode(&mut self, input: &[u8]) -> Result<Decoded, MemcachedFault> {
        if self.remaining > 0 && !input.is_empty() {
            let length = usize::try_from(self.remaining).unwrap_or(usize::MAX).min(input.len());
            self.remaining -= length as u64;
            return Ok(Decoded { consumed: length, data: Some(0..length), finished: false });
        }
        let expected = &TRAILER[self.trailer_seen..];
        let length = expected.len().min(input.len());
        if input[..length] != expected[..length] {
            return Err(MemcachedFault { kind: MemcachedFaultKind::InvalidTrailer, line: Range32::default() });
        }
        self.trailer_seen += length;
        Ok(Decoded { consumed: length, data: None, finished: self.is_finished() })
    }
}
