//! memcached's text protocol as far as a web server needs it: one value is asked for and received.
//!
//! ```text
//! get KEY CRLF
//! VALUE KEY flags length CRLF value CRLF END CRLF        or, where there is none:  END CRLF
//! ```
//!
//! Invariant: a key cannot be taken for two, nor for another command; a value that is not followed by its end is told
//! from a whole one.

use std::fmt;

use crate::Range32;
use crate::http1::{Decoded, Status};
use crate::offence::DETAIL_MAX;

/// Appends the request for the value of `key`, which must not be empty; returns the length of the key as it is sent:
/// with spaces, control characters and "%" escaped as `%XX`, as nginx does. It stands before the last two bytes.
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

/// What the first line of a reply says.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Reply {
    /// There is no such value; nothing follows.
    #[default]
    NotFound,
    /// The value follows, and its end.
    Found {
        /// What was stored with the value; `None` if it is no number, which nginx minds only with
        /// `memcached_gzip_flag`: see [`ReplyParser::checking_flags`].
        flags: Option<u64>,
        /// Bytes of the value.
        length: u64,
    },
}

/// A violation of the protocol by a memcached server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemcachedFault {
    /// What is wrong.
    pub kind: MemcachedFaultKind,
    /// The reply's first line, or as much of it as there was; empty where it is not to blame.
    pub line: Range32,
}

/// What a memcached server did wrong. `Display` gives nginx's words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemcachedFaultKind {
    /// The line is longer than the buffer for it.
    LineTooLong,
    /// Neither a value nor the end of values: an error of the server's.
    InvalidResponse,
    /// The value of another key.
    InvalidKey,
    /// Flags that are no number.
    InvalidFlags,
    /// A length that is no number of at most 63 bits.
    InvalidLength,
    /// The value is not followed by its end.
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
    /// Appends the message as nginx logs it; `input` is what was parsed, `key` what was asked for. Each detail is cut
    /// after 1748 bytes.
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

/// Incremental parser of the first line of a reply: feed it the same, growing buffer until the line is complete.
#[derive(Clone, Debug)]
pub struct ReplyParser {
    line_max: usize,
    checks_flags: bool,
    /// Everything before is known to hold no line end.
    scanned: usize,
}

impl ReplyParser {
    /// A parser of lines of at most `line_max` bytes: the size of nginx's `memcached_buffer_size`.
    pub fn new(line_max: usize) -> Self {
        Self { line_max: line_max.min(u32::MAX as usize), checks_flags: false, scanned: 0 }
    }

    /// The same parser, for which flags that are no number are a fault ([`MemcachedFaultKind::InvalidFlags`]).
    pub fn checking_flags(self) -> Self {
        Self { checks_flags: true, ..self }
    }

    /// Parses as much of `input` as has arrived; `key` is the key as it was sent. After `Complete`, `reply` holds what
    /// was understood.
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

/// What follows the value.
const TRAILER: &[u8] = b"\r\nEND\r\n";

/// Incremental decoder of a value and its end.
#[derive(Clone, Debug)]
pub struct ValueDecoder {
    remaining: u64,
    /// Bytes of [`TRAILER`] that have come.
    trailer_seen: usize,
}

impl ValueDecoder {
    /// A decoder of a value of `length` bytes.
    pub fn new(length: u64) -> Self {
        Self { remaining: length, trailer_seen: 0 }
    }

    /// Bytes of the value that have not been handed out.
    pub fn remaining(&self) -> u64 {
        self.remaining
    }

    /// True when the value and its end have been seen: whatever follows has not been asked for.
    pub fn is_finished(&self) -> bool {
        self.trailer_seen == TRAILER.len()
    }

    /// Decodes a piece of the value, or what follows it.
    ///
    /// Call again with what follows `consumed` until that is nothing or the value is finished. A fault concerns what
    /// follows the value, all of which was handed out before.
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
