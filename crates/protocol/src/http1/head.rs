//! Incremental parser for request heads: request line and header fields.
//!
//! Works line by line on the caller's buffer and stores offsets, not text. Every byte is searched for the line end only
//! once, even if the input arrives in small pieces, and a line is parsed when complete. Input that cannot become HTTP
//! (a TLS handshake, garbage) is refused at its first wrong byte. Invariant: the result does not depend on how the
//! input is split.

use super::field_line::{self, FieldLine, NAME, VALID, is_token_byte, pretends_framing, trim};
use super::framing;
use super::scan::{LineEnd, find_line_end};
use crate::host::{self, LastHost};
use crate::request::{HeaderField, KnownHeader, Method, RequestHead, Version};
use crate::{Offence, Range32, uri};

/// Limits and lenient parsing options from the configuration.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Maximum length of a line with its line end in bytes: the buffer size of nginx's `large_client_header_buffers`.
    pub line_max: usize,
    /// Maximum length of a head with all line ends in bytes.
    pub head_max: usize,
    /// Maximum number of header lines: nginx's `max_headers`. Values above 65535 mean 65535.
    pub headers_max: usize,
    /// nginx's `ignore_invalid_headers`. If `true`, fields are ignored whose names contain bytes other than letters,
    /// digits and "-"; if `false`, such a field is kept if its name is a token, and refused otherwise.
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

/// Result of [`HeadParser::parse`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// The head is not complete: call again with the same bytes followed by more.
    NeedMore,
    /// The head is complete.
    Complete {
        /// Length of the head in bytes, including empty lines before it.
        consumed: usize,
    },
}

/// Incremental parser for request heads: call it with the same, growing buffer until the head is complete.
///
/// It keeps its position and the last validated host. After `Complete` or an offence it expects a new head at the
/// beginning of the next input.
#[derive(Clone, Debug, Default)]
pub struct HeadParser {
    phase: Phase,
    line_start: u32,
    /// Position up to which the input contains no line end and no control character.
    scanned: u32,
    /// Kept across heads.
    last_host: LastHost,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Phase {
    /// Before the request line; empty lines are allowed.
    #[default]
    Start,
    /// In the method; all bytes so far are valid.
    Method,
    /// In the request line, after the method, which ends at `method_end`.
    RequestLine { method_end: u32 },
    /// In the header fields.
    Fields,
}

/// Maximum size of empty lines before a request line in bytes. RFC 9112 §2.2 requires one line to be ignored. This
/// limit tolerates clients that send an extra CRLF after every body, and stops clients that send nothing else.
const LEADING_EMPTY_MAX: usize = 64;

impl HeadParser {
    /// Creates a parser at the beginning of a head.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns to the beginning of a head.
    pub fn reset(&mut self) {
        self.phase = Phase::Start;
        self.begin_line(0);
    }

    /// Returns `true` if the current head consists only of empty lines so far: if the input ends here, the client is
    /// not at fault.
    pub fn is_idle(&self) -> bool {
        self.phase == Phase::Start
    }

    /// Parses the input so far. `input` begins at the start of the head and grows from call to call; it may move in
    /// memory. The caller passes the same `limits` and `head` for the whole head.
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
            return Ok(Status::NeedMore); // the input became shorter: wait for the known bytes
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
            // The fast path is tried once per line: if the line arrives in pieces, only new bytes are searched.
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

    /// Moves to the first byte of the request line. Returns `false` if it has not arrived.
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

    /// Returns the end of the method, if the space after it has arrived. As in nginx only capitals, "-" and "_" are
    /// allowed: fewer characters than in a token (RFC 9110 §9.1), so that other protocols are detected at once.
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

    /// Returns the end of the current line and the start of the next, if within the limits.
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

    /// Returns the field line that begins here, if it is complete and in the usual form.
    fn find_usual_field(&self, input: &[u8], limits: &Limits) -> Option<(FieldLine, usize)> {
        let (limit, _) = self.deadline(limits);
        field_line::find_usual(&input[..input.len().min(limit)], self.line_start as usize)
    }

    /// Returns the maximum end of the current line, and `true` if the line's own limit determines it.
    fn deadline(&self, limits: &Limits) -> (usize, bool) {
        let start = self.line_start as usize;
        let line = start.saturating_add(limits.line_max);
        let head = limits.head_max.max(start);
        (line.min(head).min(u32::MAX as usize), line <= head)
    }
}

/// Fast path: parses a request line of the form `GET /path?query HTTP/1.1` in one pass, if it is complete. Returns the
/// start of the next line. Other request lines need the full parser.
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

/// Parses the request line `input[start..end]`, whose method is valid (RFC 9112 §3). As in nginx, several spaces are
/// accepted in place of one.
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

/// Parses `HTTP/1.` followed by one digit (RFC 9112 §2.3). A larger major number is an unsupported version of HTTP,
/// anything else is invalid.
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

/// Parses the header line `input[start..end]` (RFC 9112 §5), which is not empty and contains no control characters
/// other than tabs.
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

/// Adds a field, whose line contains no control characters other than tabs.
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

/// Checks duplicates and `Host`, and adds a known field to the index.
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
        head.authority.get_or_insert(authority); // an absolute target takes precedence: RFC 9112 §3.2.2
    }
    Ok(())
}

/// Checks a name that contains bytes other than letters, digits and "-". Returns its length, and `true` if the line is
/// to be ignored.
#[cold]
fn judge_name(input: &[u8], start: usize, end: usize, limits: &Limits) -> Result<(usize, bool), Offence> {
    let line = &input[start..end];
    let colon = line.iter().position(|&byte| matches!(byte, b':' | b' ' | b'\t'));
    let length = match colon {
        // No colon, or a space before it: RFC 9112 §5.1 requires 400. A line that begins with a space is obsolete line
        // folding (§5.2), which is refused as well.
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

/// Checks that need the complete head.
fn finish(input: &[u8], head: &mut RequestHead) -> Result<(), Offence> {
    if head.version == Version::Http11 && !head.has(KnownHeader::Host) {
        return Err(Offence::MissingHost);
    }
    let value = |header| head.field(header).map(|field| field.value);
    let (length, encoding) = (value(KnownHeader::ContentLength), value(KnownHeader::TransferEncoding));
    head.framing = framing::decide(input, head.method, head.version, length, encoding)?;
    Ok(())
}

/// Maximum number of header fields in any head: their indices have 16 bits.
pub(crate) const HEADERS_MAX: usize = u16::MAX as usize;
