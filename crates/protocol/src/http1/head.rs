//! The head of a request: request line and header fields, parsed as they arrive.
//!
//! Works line by line on the caller's buffer and keeps offsets, never text. Lines are searched for
//! their end once, however small the pieces are in which they come, and parsed when complete; a
//! beginning that can never become HTTP (a TLS handshake, garbage) is refused at its first wrong
//! byte. Invariant: the outcome does not depend on how the input was split.

use super::field_line::{self, FieldLine, NAME, VALID, is_token_byte, pretends_framing, trim};
use super::framing;
use super::scan::{LineEnd, find_line_end};
use crate::host::{self, LastHost};
use crate::request::{HeaderField, KnownHeader, Method, RequestHead, Version};
use crate::{Offence, Range32, uri};

/// Bounds and leniencies, from the configuration.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Longest line with its line end, in bytes: the size in nginx's `large_client_header_buffers`.
    pub line_max: usize,
    /// Longest head with all line ends, in bytes.
    pub head_max: usize,
    /// Most header lines: nginx's `max_headers`. Counts above 65535 mean 65535.
    pub headers_max: usize,
    /// nginx's `ignore_invalid_headers`: fields with names of other bytes than letters, digits and
    /// "-" are passed over; if false, they are kept where the name is at least a token, and refused
    /// otherwise.
    pub ignore_invalid_headers: bool,
    /// nginx's `underscores_in_headers`: "_" is valid in names.
    pub underscores_in_headers: bool,
}

impl Default for Limits {
    /// nginx's defaults.
    fn default() -> Self {
        Self {
            line_max: 8 * 1024,
            head_max: 33 * 1024, // client_header_buffer_size 1k, large_client_header_buffers 4 8k
            headers_max: 1000,
            ignore_invalid_headers: true,
            underscores_in_headers: false,
        }
    }
}

/// Answer of [`HeadParser::parse`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// The head is not complete: call again with the same bytes and more behind them.
    NeedMore,
    /// The head is complete and took that many bytes of the input.
    Complete {
        /// Bytes of the head, leading empty lines included.
        consumed: usize,
    },
}

/// Incremental parser of request heads: feed it the same, growing buffer until the head is
/// complete.
///
/// Holds its place, and the host that was validated last. After `Complete` and after an offence it is
/// ready for a new head at the beginning of its next input.
#[derive(Clone, Debug, Default)]
pub struct HeadParser {
    phase: Phase,
    /// Where the current line begins.
    line_start: u32,
    /// Everything before is known to hold no line end and no control character.
    scanned: u32,
    /// Kept from head to head.
    last_host: LastHost,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Phase {
    /// Before the request line; empty lines may come.
    #[default]
    Start,
    /// In the method, all of whose bytes so far are right.
    Method,
    /// In the request line behind the method, which ends at `method_end`.
    RequestLine { method_end: u32 },
    /// In the header fields.
    Fields,
}

/// Most bytes of empty lines before a request line. RFC 9112 §2.2 asks for one line; this is
/// generous to clients that send an extra CRLF after every body, and an end to those that send
/// nothing else.
const LEADING_EMPTY_MAX: usize = 64;

impl HeadParser {
    /// A parser at the beginning of a head.
    pub fn new() -> Self {
        Self::default()
    }

    /// Back to the beginning of a head.
    pub fn reset(&mut self) {
        self.phase = Phase::Start;
        self.begin_line(0);
    }

    /// True if nothing but empty lines has been seen of the current head: its end here is no error
    /// of the client.
    pub fn is_idle(&self) -> bool {
        self.phase == Phase::Start
    }

    /// Parses as much of `input` as has arrived. `input` begins where the head begins and grows
    /// from call to call; it may move in memory. `limits` and `head` stay the same ones throughout
    /// a head.
    pub fn parse(&mut self, input: &[u8], limits: &Limits, head: &mut RequestHead) -> Result<Status, Offence> {
        let result = self.advance(input, limits, head);
        if !matches!(result, Ok(Status::NeedMore)) {
            self.reset();
        }
        result
    }

    fn advance(&mut self, input: &[u8], limits: &Limits, head: &mut RequestHead) -> Result<Status, Offence> {
        let input = &input[..input.len().min(u32::MAX as usize)];
        if input.len() < self.scanned as usize {
            return Ok(Status::NeedMore); // the caller lost bytes that it had shown: wait for them
        }
        if self.phase == Phase::Start {
            head.clear();
            let (limit, _) = self.deadline(limits);
            if let Some(next) = parse_usual_request_line(&input[..input.len().min(limit)], head) {
                self.phase = Phase::Fields;
                self.begin_line(next);
            } else if !self.skip_empty_lines(input)? {
                return Ok(Status::NeedMore);
            }
        }
        if self.phase != Phase::Fields {
            let Some(method_end) = self.find_method_end(input, limits)? else {
                return Ok(Status::NeedMore);
            };
            let Some((end, next)) = self.find_line(input, limits, true)? else {
                return Ok(Status::NeedMore);
            };
            parse_request_line(input, self.line_start as usize, method_end, end, head)?;
            if head.version == Version::Http09 {
                return Ok(Status::Complete { consumed: next });
            }
            self.phase = Phase::Fields;
            self.begin_line(next);
        }
        loop {
            // Tried once for each line: of one that comes in pieces only what is new is looked at.
            if self.scanned == self.line_start
                && let Some((field, next)) = self.find_usual_field(input, limits)
            {
                add_field(input, field.name, field.value, limits, &mut self.last_host, head)?;
                self.begin_line(next);
                continue;
            }
            let Some((end, next)) = self.find_line(input, limits, false)? else {
                return Ok(Status::NeedMore);
            };
            let start = self.line_start as usize;
            if start == end {
                finish(input, head)?;
                return Ok(Status::Complete { consumed: next });
            }
            parse_field(input, start, end, limits, &mut self.last_host, head)?;
            self.begin_line(next);
        }
    }

    fn begin_line(&mut self, at: usize) {
        self.line_start = at as u32;
        self.scanned = at as u32;
    }

    /// Moves to the first byte of the request line; false if it has not arrived.
    fn skip_empty_lines(&mut self, input: &[u8]) -> Result<bool, Offence> {
        let mut at = self.line_start as usize;
        loop {
            match &input[at..] {
                [b'\n', ..] => at += 1,
                [b'\r', b'\n', ..] => at += 2,
                [] | [b'\r'] => {
                    self.begin_line(at);
                    return Ok(false);
                }
                [_, ..] => break,
            }
            if at > LEADING_EMPTY_MAX {
                return Err(Offence::InvalidRequest);
            }
        }
        self.begin_line(at);
        self.phase = Phase::Method;
        Ok(true)
    }

    /// The end of the method, once its space has arrived. nginx's rule: capitals, "-" and "_" only,
    /// which is narrower than a token (RFC 9110 §9.1) and tells other protocols at once.
    fn find_method_end(&mut self, input: &[u8], limits: &Limits) -> Result<Option<usize>, Offence> {
        if let Phase::RequestLine { method_end } = self.phase {
            return Ok(Some(method_end as usize));
        }
        let (limit, _) = self.deadline(limits);
        let seen = &input[..input.len().min(limit)];
        let mut at = self.scanned as usize;
        while let Some(&byte) = seen.get(at) {
            if byte == b' ' && at > self.line_start as usize {
                self.phase = Phase::RequestLine { method_end: at as u32 };
                self.scanned = at as u32;
                return Ok(Some(at));
            }
            if !matches!(byte, b'A'..=b'Z' | b'-' | b'_') {
                return Err(Offence::InvalidMethod);
            }
            at += 1;
        }
        self.scanned = at as u32;
        if input.len() >= limit { Err(Offence::UriTooLong) } else { Ok(None) }
    }

    /// The end of the current line and the beginning of the next, if within the limits.
    fn find_line(
        &mut self,
        input: &[u8],
        limits: &Limits,
        request_line: bool,
    ) -> Result<Option<(usize, usize)>, Offence> {
        let (limit, line_is_limit) = self.deadline(limits);
        let start = self.line_start as usize;
        match find_line_end(&input[..input.len().min(limit)], limit.min(self.scanned as usize)) {
            LineEnd::Found { end, next } => Ok(Some((end, next))),
            LineEnd::Control { .. } if request_line => Err(Offence::InvalidRequest),
            LineEnd::Control { at } => Err(invalid_field(input, start, at)),
            LineEnd::Incomplete { .. } if input.len() >= limit => Err(if request_line {
                Offence::UriTooLong
            } else if line_is_limit {
                Offence::HeaderLineTooLong { line: Range32::new(start, limit) }
            } else {
                Offence::HeadTooLarge
            }),
            LineEnd::Incomplete { resume } => {
                self.scanned = resume as u32;
                Ok(None)
            }
        }
    }

    /// The field line that begins here, if it is whole and written as nearly all are.
    fn find_usual_field(&self, input: &[u8], limits: &Limits) -> Option<(FieldLine, usize)> {
        let (limit, _) = self.deadline(limits);
        field_line::find_usual(&input[..input.len().min(limit)], self.line_start as usize)
    }

    /// Where the current line must have ended, and whether that is because of its own length.
    fn deadline(&self, limits: &Limits) -> (usize, bool) {
        let start = self.line_start as usize;
        let line = start.saturating_add(limits.line_max);
        let head = limits.head_max.max(start);
        (line.min(head).min(u32::MAX as usize), line <= head)
    }
}

/// The request line at the beginning of the input, if it is whole and written as nearly all are, and where the next
/// line begins: `GET /path?query HTTP/1.1`. Looked at once from front to back; everything else is for the thorough way.
fn parse_usual_request_line(input: &[u8], head: &mut RequestHead) -> Option<usize> {
    let (method, method_end) = match input {
        [b'G', b'E', b'T', b' ', ..] => (Method::Get, 3),
        [b'P', b'O', b'S', b'T', b' ', ..] => (Method::Post, 4),
        [b'H', b'E', b'A', b'D', b' ', ..] => (Method::Head, 4),
        _ => return None,
    };
    let start = method_end + 1;
    let (target, end) = uri::split_plain_until_space(input, start)?;
    let version_end = end + 1 + b"HTTP/1.1".len();
    if !input[end..].starts_with(b" HTTP/1.1\r\n") {
        return None;
    }
    head.method = method;
    head.method_range = Range32::new(0, method_end);
    head.target_range = Range32::new(start, end);
    head.target = target;
    head.version = Version::Http11;
    head.version_range = Range32::new(end + 1, version_end);
    head.line = Range32::new(0, version_end);
    Some(version_end + 2)
}

/// The request line `input[start..end]`, whose method has been checked: RFC 9112 §3, with runs of
/// spaces allowed as in nginx.
fn parse_request_line(
    input: &[u8],
    start: usize,
    method_end: usize,
    end: usize,
    head: &mut RequestHead,
) -> Result<(), Offence> {
    head.method_range = Range32::new(start, method_end);
    head.method = Method::from_name(&input[start..method_end]);

    let target_start = skip_spaces(input, method_end, end);
    let target_end = memchr::memchr(b' ', &input[target_start..end]).map_or(end, |length| target_start + length);
    let target = Range32::new(target_start, target_end);
    head.target_range = target;
    head.target = if head.method == Method::Connect {
        uri::split_authority(input, target)?
    } else {
        uri::split_in(input, target)?
    };
    if head.target.form == uri::Form::Asterisk && head.method != Method::Options {
        return Err(Offence::InvalidRequest);
    }

    let version_start = skip_spaces(input, target_end, end);
    let version_end = end - input[version_start..end].iter().rev().take_while(|&&byte| byte == b' ').count();
    head.version_range = Range32::new(version_start, version_end);
    head.version = parse_version(&input[version_start..version_end])?;
    if head.version == Version::Http09 && head.method != Method::Get {
        return Err(Offence::InvalidHttp09Method);
    }
    if let Some(host) = head.target.host {
        head.authority = Some(host::validate_in(input, host).map_err(|_| Offence::InvalidRequestLineHost)?);
    }
    head.line = Range32::new(start, end);
    Ok(())
}

fn skip_spaces(input: &[u8], from: usize, end: usize) -> usize {
    from + input[from..end].iter().take_while(|&&byte| byte == b' ').count()
}

/// `HTTP/1.` and one digit (RFC 9112 §2.3); a larger major number is another version of HTTP,
/// anything else is no version.
fn parse_version(text: &[u8]) -> Result<Version, Offence> {
    match text {
        b"HTTP/1.1" => return Ok(Version::Http11),
        b"HTTP/1.0" => return Ok(Version::Http10),
        b"" => return Ok(Version::Http09),
        _ => {}
    }
    match text.strip_prefix(b"HTTP/") {
        Some([b'1', b'.', b'2'..=b'9']) => Ok(Version::Http11),
        Some([b'2'..=b'9', ..] | [b'1', b'0'..=b'9', ..]) => Err(Offence::InvalidVersion),
        _ => Err(Offence::InvalidRequest),
    }
}

/// The header line `input[start..end]`, which is not empty and free of control characters other
/// than tabs: RFC 9112 §5.
fn parse_field(
    input: &[u8],
    start: usize,
    end: usize,
    limits: &Limits,
    last_host: &mut LastHost,
    head: &mut RequestHead,
) -> Result<(), Offence> {
    let line = &input[start..end];
    let name_length = line.iter().position(|&byte| NAME[byte as usize] != VALID).unwrap_or(line.len());
    let (name_length, ignored) = match line.get(name_length) {
        Some(b':') if name_length > 0 => (name_length, false),
        _ => judge_name(input, start, end, limits)?,
    };
    if ignored {
        head.ignored_count += 1;
        head.ignored_first.get_or_insert(Range32::new(start, end));
        return Ok(());
    }
    let name = Range32::new(start, start + name_length);
    let value = trim(input, start + name_length + 1, end);
    add_field(input, name, value, limits, last_host, head)
}

/// Notes a field, whose line holds no control characters but perhaps tabs.
fn add_field(
    input: &[u8],
    name: Range32,
    value: Range32,
    limits: &Limits,
    last_host: &mut LastHost,
    head: &mut RequestHead,
) -> Result<(), Offence> {
    let known = KnownHeader::from_token(name.of(input));
    let field = HeaderField { name, value, known };
    if head.headers.len() >= limits.headers_max.min(HEADERS_MAX) {
        return Err(Offence::TooManyHeaders);
    }
    if let Some(header) = known {
        note_known(input, header, &field, last_host, head)?;
    }
    head.headers.push(field);
    Ok(())
}

/// Duplicates, Host, and the index of known fields.
pub(crate) fn note_known(
    input: &[u8],
    header: KnownHeader,
    field: &HeaderField,
    last_host: &mut LastHost,
    head: &mut RequestHead,
) -> Result<(), Offence> {
    if let Some(previous) = head.field(header) {
        let (line, previous) = (field.line(), previous.line());
        return match header {
            KnownHeader::Host => Err(Offence::DuplicateHost { line, previous }),
            _ if header.is_unique() => Err(Offence::DuplicateHeader { line, previous }),
            _ => Ok(()),
        };
    }
    head.known.note(header, head.headers.len());
    if header == KnownHeader::Host {
        let authority = last_host.validate_in(input, field.value).map_err(|_| Offence::InvalidHost)?;
        head.authority.get_or_insert(authority); // an absolute target wins: RFC 9112 §3.2.2
    }
    Ok(())
}

/// A name that is not letters, digits and "-" up to the colon: its length, and whether the line is
/// to be ignored.
#[cold]
fn judge_name(input: &[u8], start: usize, end: usize, limits: &Limits) -> Result<(usize, bool), Offence> {
    let line = &input[start..end];
    let colon = line.iter().position(|&byte| matches!(byte, b':' | b' ' | b'\t'));
    let length = match colon {
        // No colon, or a space before it: RFC 9112 §5.1 demands 400 here. A line that begins with a
        // space is obsolete folding (§5.2), refused likewise.
        Some(at) if at > 0 && line[at] == b':' => at,
        Some(at) => return Err(invalid_field(input, start, start + at)),
        None => {
            return Err(Offence::InvalidHeaderLine { before: Range32::new(start, end), byte: None });
        }
    };
    let name = &line[..length];
    if pretends_framing(name) {
        return Err(Offence::InvalidHeaderLine { before: Range32::new(start, end), byte: None });
    }
    let valid =
        name.iter().all(|&byte| NAME[byte as usize] == VALID || (byte == b'_' && limits.underscores_in_headers));
    if !valid && limits.ignore_invalid_headers {
        return Ok((length, true));
    }
    match name.iter().position(|&byte| !is_token_byte(byte)) {
        Some(at) => Err(invalid_field(input, start, start + at)),
        None => Ok((length, false)),
    }
}

fn invalid_field(input: &[u8], start: usize, at: usize) -> Offence {
    Offence::InvalidHeaderLine { before: Range32::new(start, at), byte: input.get(at).copied() }
}

/// What can only be judged when all fields are there.
fn finish(input: &[u8], head: &mut RequestHead) -> Result<(), Offence> {
    if head.version == Version::Http11 && !head.has(KnownHeader::Host) {
        return Err(Offence::MissingHost);
    }
    let value = |header| head.field(header).map(|field| field.value);
    let (length, encoding) = (value(KnownHeader::ContentLength), value(KnownHeader::TransferEncoding));
    head.framing = framing::decide(input, head.method, head.version, length, encoding)?;
    Ok(())
}

/// Most header fields in any head: their places are kept in 16 bits.
pub(crate) const HEADERS_MAX: usize = u16::MAX as usize;
