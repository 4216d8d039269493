//! Incremental parser for response heads of upstream servers: status line and fields.
//!
//! Without a status line the same fields form the head of a CGI response (RFC 3875 §6), used by FastCGI, SCGI and
//! uwsgi. As in nginx a bare LF ends a line, since backends send it. Everything ambiguous is refused: control
//! characters, folded lines, a space before the colon, two lengths, a length together with a transfer coding.
//! Invariant: the result does not depend on how the input is split.

use super::connection::ConnectionOptions;
use super::field_line::{self, FieldLine, is_token_byte, pretends_framing, trim};
use super::framing::parse_length;
use super::head::Status;
use super::scan::{LineEnd, find_line_end};
use crate::Range32;
use crate::request::{Method, Version};
use crate::response::ResponseField;
use crate::upstream_fault::{ReceivedLine, ResponseFault, write_duplicate, write_quoted};

/// A field of a response, as offsets into the input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReceivedField {
    /// The name as written.
    pub name: Range32,
    /// The value without surrounding spaces and tabs.
    pub value: Range32,
    /// The known field with this name, if any.
    pub known: Option<ResponseField>,
    /// `true` if the field concerns only the upstream connection and is not forwarded: `Connection`, `Keep-Alive`,
    /// `Proxy-Connection`, `TE`, `Transfer-Encoding`, `Upgrade`, and every field named in `Connection` (RFC 9110
    /// §7.6.1).
    pub is_hop_by_hop: bool,
}

impl ReceivedField {
    pub(crate) fn line(&self) -> ReceivedLine {
        ReceivedLine { name: self.name, value: self.value }
    }
}

/// Parameters of the `Keep-Alive` field: RFC 2068 §19.7.1, which servers still send.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KeepAlive {
    /// Seconds of idleness after which the upstream closes the connection.
    pub timeout_s: Option<u32>,
    /// Number of further requests that the upstream accepts.
    pub requests_max: Option<u32>,
}

/// A field line that was ignored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IgnoredLine {
    /// A second line of a field with a single value; the first one counts, as in nginx.
    Duplicate {
        /// The ignored line.
        line: ReceivedLine,
        /// The line that counts.
        previous: ReceivedLine,
    },
    /// The name is not a token (RFC 9110 §5.1), or there is no colon.
    InvalidName {
        /// The ignored line.
        line: Range32,
    },
}

impl IgnoredLine {
    /// Appends a message for the log, with the upstream's bytes unchanged; `input` is the parsed input.
    pub fn write_to(&self, input: &[u8], out: &mut Vec<u8>) {
        match *self {
            Self::Duplicate { line, previous } => write_duplicate(out, input, line, previous),
            Self::InvalidName { line } => {
                out.extend_from_slice(b"upstream sent invalid header line: ");
                write_quoted(out, input, line);
            }
        }
        out.extend_from_slice(b", ignored");
    }
}

/// A parsed response head: offsets into the parsed input, and the fields that determine the framing of the body.
///
/// Reusable: the parser clears it and keeps its capacity. After a fault it contains the parts parsed so far.
#[derive(Clone, Debug, Default)]
pub struct ResponseParts {
    /// HTTP/1.0, HTTP/1.1 (also if the status line has a later version), or HTTP/2.
    pub version: Version,
    /// Status code: 100 to 999.
    pub status: u16,
    /// Reason phrase, may be empty.
    pub reason: Range32,
    /// The fields in their order, without ignored ones.
    pub fields: Vec<ReceivedField>,
    /// Value of `Content-Length`.
    pub content_length: Option<u64>,
    /// `true` if `Transfer-Encoding` is `chunked`.
    pub is_chunked: bool,
    /// Options from all `Connection` lines.
    pub connection: ConnectionOptions,
    /// Parameters of `Keep-Alive`.
    pub keep_alive: KeepAlive,
    /// `true` for a CGI response.
    pub is_cgi: bool,
    /// Number of ignored field lines.
    pub ignored_count: u32,
    /// The first ignored line, for the log.
    pub ignored_first: Option<IgnoredLine>,
    /// Names listed in `Connection` other than the options defined for it.
    pub connection_names: Vec<Range32>,
    /// Bit set of the known fields present.
    present: u64,
}

impl ResponseParts {
    /// Clears everything and keeps the capacity.
    pub fn clear(&mut self) {
        let mut fields = std::mem::take(&mut self.fields);
        let mut connection_names = std::mem::take(&mut self.connection_names);
        fields.clear();
        connection_names.clear();
        *self = Self { fields, connection_names, ..Self::default() };
    }

    /// Returns `true` for an interim response (RFC 9110 §15.2), after which another head follows. 101 is a final
    /// response.
    pub fn is_interim(&self) -> bool {
        matches!(self.status, 100 | 102..=199) && !self.is_cgi
    }

    /// Returns `true` if a field of that kind is present.
    pub fn has(&self, field: ResponseField) -> bool {
        self.present >> field as u8 & 1 == 1
    }

    /// Returns the first field of that kind.
    pub fn field(&self, field: ResponseField) -> Option<&ReceivedField> {
        if !self.has(field) {
            return None;
        }
        self.fields.iter().find(|received| received.known == Some(field))
    }

    /// Returns the value of the first field of that kind.
    pub fn value<'i>(&self, input: &'i [u8], field: ResponseField) -> Option<&'i [u8]> {
        Some(self.field(field)?.value.of(input))
    }

    /// Iterates over the values of all fields of that kind, in their order.
    pub fn values<'s, 'i>(
        &'s self,
        input: &'i [u8],
        field: ResponseField,
    ) -> impl Iterator<Item = &'i [u8]> + use<'s, 'i> {
        let fields: &[ReceivedField] = if self.has(field) { &self.fields } else { &[] };
        fields.iter().filter(move |received| received.known == Some(field)).map(move |field| field.value.of(input))
    }

    /// Returns `true` if the connection can be reused after the body, which is delimited by `framing`, has been read
    /// completely (RFC 9112 §9.3). `false` for CGI responses, whose protocols have their own rules.
    pub fn keeps_alive(&self, framing: ResponseFraming) -> bool {
        let is_delimited = match framing {
            // A server may send a body although the status forbids it.
            ResponseFraming::None => self.status != 204 || !self.is_chunked && self.content_length.unwrap_or(0) == 0,
            ResponseFraming::Length(_) | ResponseFraming::Chunked => true,
            ResponseFraming::UntilClose | ResponseFraming::Tunnel => false,
        };
        let is_wanted = match self.version {
            // HTTP/1.0 has no transfer codings: RFC 9112 §6.1.
            Version::Http09 | Version::Http10 => self.connection.keep_alive && !self.is_chunked,
            Version::Http11 | Version::Http2 | Version::Http3 => true,
        };
        is_delimited && is_wanted && !self.connection.close && !self.is_cgi
    }

    fn ignore(&mut self, line: IgnoredLine) {
        self.ignored_count += 1;
        self.ignored_first.get_or_insert(line);
    }
}

/// Framing of a response body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ResponseFraming {
    /// No body.
    None,
    /// A body of this many bytes.
    Length(u64),
    /// A body in chunked coding.
    Chunked,
    /// A body that ends with the connection, so that a truncated body cannot be distinguished from a complete one.
    UntilClose,
    /// A tunnel: the connection continues with another protocol, after 101 or a successful CONNECT.
    Tunnel,
}

impl ResponseFraming {
    /// Returns the framing of a final response to a request with `method` (RFC 9112 §6.3).
    pub fn decide(method: Method, parts: &ResponseParts) -> Self {
        match (method, parts.status) {
            (_, 101) | (Method::Connect, 200..=299) => Self::Tunnel,
            (Method::Head, _) | (_, 100..=199 | 204 | 304) => Self::None,
            // The protocols that carry CGI responses have their own framing.
            _ if parts.is_chunked && !parts.is_cgi => Self::Chunked,
            _ => parts.content_length.map_or(Self::UntilClose, Self::Length),
        }
    }
}

/// Incremental parser for response heads: call it with the same, growing buffer until the head is complete.
///
/// After `Complete` or a fault it expects a new head at the beginning of the next input: for example the final response
/// after an interim one.
#[derive(Clone, Debug)]
pub struct ResponseHeadParser {
    form: Form,
    head_max: usize,
    phase: Phase,
    line_start: u32,
    /// Position up to which the input contains no line end and no control character.
    scanned: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    Http,
    Cgi,
    /// Begins with a status line or directly with the fields.
    CgiOrHttp,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Start,
    StatusLine,
    Fields,
}

/// Maximum number of names in `Connection`: each is compared with each field.
const CONNECTION_NAMES_MAX: usize = 64;

impl ResponseHeadParser {
    /// Creates a parser for HTTP/1 responses. `head_max` is the maximum size of a head in bytes: nginx's
    /// `proxy_buffer_size`.
    pub fn new(head_max: usize) -> Self {
        Self::of_form(Form::Http, head_max)
    }

    /// Creates a parser for CGI responses as carried by FastCGI. The status is that of the field `Status` (RFC 3875
    /// §6.3.3); without it 302 if there is a `Location`, otherwise 200.
    pub fn cgi(head_max: usize) -> Self {
        Self::of_form(Form::Cgi, head_max)
    }

    /// Creates a parser for SCGI and uwsgi, whose responses begin with a status line or directly with the fields.
    pub fn cgi_or_http(head_max: usize) -> Self {
        Self::of_form(Form::CgiOrHttp, head_max)
    }

    fn of_form(form: Form, head_max: usize) -> Self {
        Self { form, head_max: head_max.min(u32::MAX as usize), phase: Phase::Start, line_start: 0, scanned: 0 }
    }

    /// Returns to the beginning of a head.
    pub fn reset(&mut self) {
        self.phase = Phase::Start;
        self.begin_line(0);
    }

    /// Parses the input so far. `input` begins at the start of the head and grows from call to call; it may move in
    /// memory. The caller passes the same `parts` for the whole head.
    pub fn parse(&mut self, input: &[u8], parts: &mut ResponseParts) -> Result<Status, ResponseFault> {
        let result = self.advance(input, parts);
        if !matches!(result, Ok(Status::NeedMore)) {
            self.reset();
        }
        result
    }

    fn advance(&mut self, input: &[u8], parts: &mut ResponseParts) -> Result<Status, ResponseFault> {
        let input = &input[..input.len().min(self.head_max)];
        if input.len() < self.scanned as usize {
            return Ok(Status::NeedMore); // the input became shorter: wait for the known bytes
        }
        if self.phase == Phase::Start {
            parts.clear();
            parts.is_cgi = self.form != Form::Http;
            self.phase = if self.form == Form::Cgi { Phase::Fields } else { Phase::StatusLine };
        }
        let incomplete =
            if input.len() < self.head_max { Ok(Status::NeedMore) } else { Err(ResponseFault::TooBigHeader) };
        if self.phase == Phase::StatusLine && !self.take_status_line(input, parts)? {
            return incomplete;
        }
        loop {
            // The fast path is tried once per line: if the line arrives in pieces, only new bytes are searched.
            if self.scanned == self.line_start
                && let Some((line, next)) = field_line::find_usual(input, self.line_start as usize)
            {
                add_field(input, line, parts)?;
                self.begin_line(next);
                continue;
            }
            let start = self.line_start as usize;
            match find_line_end(input, self.scanned as usize) {
                LineEnd::Found { end, next } if start == end => {
                    finish(input, parts)?;
                    return Ok(Status::Complete { consumed: next });
                }
                LineEnd::Found { end, next } => {
                    parse_field(input, start, end, parts)?;
                    self.begin_line(next);
                }
                LineEnd::Control { at } => return Err(invalid_header(input, start, at)),
                LineEnd::Incomplete { resume } => {
                    self.scanned = resume as u32;
                    return incomplete;
                }
            }
        }
    }

    fn begin_line(&mut self, at: usize) {
        self.line_start = at as u32;
        self.scanned = at as u32;
    }

    /// Parses the status line. Returns `false` if it has not arrived. If it is optional and missing, the fields begin
    /// here.
    fn take_status_line(&mut self, input: &[u8], parts: &mut ResponseParts) -> Result<bool, ResponseFault> {
        let length = input.len().min(PREFIX.len());
        let line = if input[..length] != PREFIX[..length] {
            LineEnd::Control { at: 0 } // not a status line: no need to wait for its end
        } else {
            find_line_end(input, self.scanned as usize)
        };
        let next = match line {
            LineEnd::Incomplete { resume } => {
                self.scanned = resume as u32;
                return Ok(false);
            }
            LineEnd::Found { end, next } => parse_status_line(input, end, parts).then_some(next),
            LineEnd::Control { .. } => None,
        };
        match next {
            None if self.form == Form::Http => return Err(ResponseFault::NoStatusLine),
            None => self.begin_line(0),
            Some(_) if parts.status == 103 && parts.version == Version::Http10 => {
                return Err(ResponseFault::EarlyHintsInHttp10);
            }
            Some(next) => self.begin_line(next),
        }
        self.phase = Phase::Fields;
        Ok(true)
    }
}

const PREFIX: &[u8] = b"HTTP/";

/// Parses the status line `input[..end]` (RFC 9112 §4), which begins with `HTTP/`. Returns `false` if it is invalid. As
/// lenient as nginx: several spaces, no phrase, IIS's sub-status ("403.1").
fn parse_status_line(input: &[u8], end: usize, parts: &mut ResponseParts) -> bool {
    let line = &input[..end];
    let Some((version, space)) = find_version(line) else {
        return false;
    };
    let start = space + line[space..].iter().take_while(|&&byte| byte == b' ').count();
    let Some(status) = parse_status(&line[start..]) else {
        return false;
    };
    let behind = match line.get(start + 3) {
        None => end,
        Some(b' ') => start + 3,
        Some(b'.') => memchr::memchr(b' ', &line[start..]).map_or(end, |length| start + length),
        Some(_) => return false,
    };
    parts.version = version;
    parts.status = status;
    parts.reason = trim(input, behind, end);
    true
}

/// Returns the version in a status line, and its end.
fn find_version(line: &[u8]) -> Option<(Version, usize)> {
    const USUAL: &[u8] = b"HTTP/1.1 ";
    if line.starts_with(USUAL) {
        return Some((Version::Http11, USUAL.len() - 1));
    }
    let space = memchr::memchr(b' ', line)?;
    Some((parse_version(&line[PREFIX.len()..space])?, space))
}

/// Parses major and minor number with at most three digits each; all versions after 1.0 count as 1.1.
fn parse_version(text: &[u8]) -> Option<Version> {
    if text == b"1.0" {
        return Some(Version::Http10);
    }
    let dot = text.iter().position(|&byte| byte == b'.')?;
    let is_number = |digits: &[u8]| matches!(digits.len(), 1..=3) && digits.iter().all(u8::is_ascii_digit);
    let (major, minor) = (&text[..dot], &text[dot + 1..]);
    if !is_number(major) || !is_number(minor) || major[0] == b'0' {
        return None;
    }
    let is_first = major == b"1" && minor.iter().all(|&byte| byte == b'0');
    Some(if is_first { Version::Http10 } else { Version::Http11 })
}

/// Parses the three digits at the beginning.
fn parse_status(text: &[u8]) -> Option<u16> {
    let digits = text.first_chunk::<3>().filter(|digits| digits.iter().all(u8::is_ascii_digit))?;
    let status = digits.iter().fold(0, |number, digit| number * 10 + u16::from(digit - b'0'));
    (status >= 100).then_some(status)
}

/// Parses the field line `input[start..end]`, which is not empty and contains no control characters other than tabs.
fn parse_field(input: &[u8], start: usize, end: usize, parts: &mut ResponseParts) -> Result<(), ResponseFault> {
    let line = &input[start..end];
    let name_length = line.iter().position(|&byte| !is_token_byte(byte)).unwrap_or(line.len());
    if name_length > 0 && line.get(name_length) == Some(&b':') {
        let value = trim(input, start + name_length + 1, end);
        return add_field(input, FieldLine { name: Range32::new(start, start + name_length), value }, parts);
    }
    // IIS may send its status line twice.
    if !line.starts_with(PREFIX) {
        let stop = line.iter().position(|&byte| matches!(byte, b':' | b' ' | b'\t')).unwrap_or(line.len());
        if stop == 0 || line.get(stop).is_some_and(|&byte| byte != b':') {
            return Err(invalid_header(input, start, start + stop));
        }
        if pretends_framing(&line[..stop]) {
            return Err(ResponseFault::InvalidHeader { before: Range32::new(start, end), byte: None });
        }
    }
    parts.ignore(IgnoredLine::InvalidName { line: Range32::new(start, end) });
    Ok(())
}

fn invalid_header(input: &[u8], start: usize, at: usize) -> ResponseFault {
    ResponseFault::InvalidHeader { before: Range32::new(start, at), byte: input.get(at).copied() }
}

/// Fields with a single value: the first one counts and later ones are ignored, as in nginx.
const SINGLE: u64 = bits(&[
    ResponseField::ContentType,
    ResponseField::Date,
    ResponseField::ETag,
    ResponseField::Expires,
    ResponseField::LastModified,
    ResponseField::Location,
    ResponseField::Refresh,
    ResponseField::Server,
    ResponseField::Status,
    ResponseField::XAccelExpires,
    ResponseField::XAccelLimitRate,
    ResponseField::XAccelRedirect,
]);

/// Hop-by-hop fields: RFC 9110 §7.6.1.
const HOP_BY_HOP: u64 = bits(&[
    ResponseField::Connection,
    ResponseField::KeepAlive,
    ResponseField::ProxyConnection,
    ResponseField::Te,
    ResponseField::TransferEncoding,
    ResponseField::Upgrade,
]);

const fn bits(fields: &[ResponseField]) -> u64 {
    let (mut set, mut index) = (0, 0);
    while index < fields.len() {
        set |= bit(fields[index]);
        index += 1;
    }
    set
}

const fn bit(field: ResponseField) -> u64 {
    1 << field as u8
}

/// Adds a field of a response received in the framing of another HTTP version; the name is a token.
pub(crate) fn add_received(
    input: &[u8],
    name: Range32,
    value: Range32,
    parts: &mut ResponseParts,
) -> Result<(), ResponseFault> {
    add_field(input, FieldLine { name, value }, parts)
}

fn add_field(input: &[u8], line: FieldLine, parts: &mut ResponseParts) -> Result<(), ResponseFault> {
    let FieldLine { name, value } = line;
    let known = ResponseField::from_token(name.of(input));
    let is_hop_by_hop = known.is_some_and(|known| HOP_BY_HOP & bit(known) != 0);
    let field = ReceivedField { name, value, known, is_hop_by_hop };
    match known {
        Some(known) if !parts.is_interim() => {
            if !take_known(input, known, &field, parts)? {
                return Ok(());
            }
            parts.present |= bit(known);
        }
        Some(known) => parts.present |= bit(known),
        None if pretends_framing(name.of(input)) => {
            let before = Range32::new(name.start(), value.end());
            return Err(ResponseFault::InvalidHeader { before, byte: None });
        }
        None => {}
    }
    parts.fields.push(field);
    Ok(())
}

/// Processes a known field. Returns `false` if it is to be ignored.
fn take_known(
    input: &[u8],
    known: ResponseField,
    field: &ReceivedField,
    parts: &mut ResponseParts,
) -> Result<bool, ResponseFault> {
    if let Some(previous) = parts.field(known) {
        let (line, previous) = (field.line(), previous.line());
        if matches!(known, ResponseField::ContentLength | ResponseField::TransferEncoding) {
            return Err(ResponseFault::DuplicateHeader { line, previous });
        }
        if SINGLE & bit(known) != 0 {
            parts.ignore(IgnoredLine::Duplicate { line, previous });
            return Ok(false);
        }
    }
    if ACTED_ON & bit(known) != 0 {
        act_on(input, known, field, parts)?;
    }
    Ok(true)
}

/// Fields that the parser evaluates itself.
const ACTED_ON: u64 = bits(&[
    ResponseField::Connection,
    ResponseField::ContentLength,
    ResponseField::KeepAlive,
    ResponseField::TransferEncoding,
]);

/// Evaluates a field that is not a duplicate.
fn act_on(
    input: &[u8],
    known: ResponseField,
    field: &ReceivedField,
    parts: &mut ResponseParts,
) -> Result<(), ResponseFault> {
    let value = field.value.of(input);
    match known {
        ResponseField::ContentLength => {
            if parts.has(ResponseField::TransferEncoding) {
                return Err(ResponseFault::LengthAndTransferEncoding);
            }
            let length = parse_length(value).ok_or(ResponseFault::InvalidContentLength { line: field.line() })?;
            parts.content_length = Some(length);
        }
        ResponseField::TransferEncoding => {
            if parts.has(ResponseField::ContentLength) {
                return Err(ResponseFault::LengthAndTransferEncoding);
            }
            if !value.eq_ignore_ascii_case(b"chunked") {
                return Err(ResponseFault::UnknownTransferEncoding { value: field.value });
            }
            parts.is_chunked = true;
        }
        // Fast path: nearly always the whole value is one of these.
        ResponseField::Connection if value == b"keep-alive" => parts.connection.keep_alive = true,
        ResponseField::Connection if value == b"close" => parts.connection.close = true,
        ResponseField::Connection => {
            parts.connection.add(value);
            note_connection_names(input, field.value, parts)?;
        }
        ResponseField::KeepAlive => note_keep_alive(value, &mut parts.keep_alive),
        _ => {}
    }
    Ok(())
}

/// Records the names that are not options defined for `Connection`.
fn note_connection_names(input: &[u8], value: Range32, parts: &mut ResponseParts) -> Result<(), ResponseFault> {
    const OPTIONS: &[&[u8]] = &[b"close", b"keep-alive", b"upgrade", b"te"];
    let mut start = value.start();
    for option in value.of(input).split(|&byte| byte == b',') {
        let name = trim(input, start, start + option.len());
        start += option.len() + 1;
        if name.is_empty() || OPTIONS.iter().any(|option| name.of(input).eq_ignore_ascii_case(option)) {
            continue;
        }
        if parts.connection_names.len() == CONNECTION_NAMES_MAX {
            return Err(ResponseFault::TooManyConnectionOptions);
        }
        parts.connection_names.push(name);
    }
    Ok(())
}

/// Parses `timeout=5, max=100` in any order. The smaller of two values counts; invalid numbers are ignored.
fn note_keep_alive(value: &[u8], keep_alive: &mut KeepAlive) {
    for parameter in value.split(|&byte| byte == b',') {
        let Some(equals) = memchr::memchr(b'=', parameter) else {
            continue;
        };
        let (name, number) = (parameter[..equals].trim_ascii(), parameter[equals + 1..].trim_ascii());
        let place = if name.eq_ignore_ascii_case(b"timeout") {
            &mut keep_alive.timeout_s
        } else if name.eq_ignore_ascii_case(b"max") {
            &mut keep_alive.requests_max
        } else {
            continue;
        };
        if let Some(number) = parse_length(number) {
            let number = u32::try_from(number).unwrap_or(u32::MAX);
            *place = Some(place.map_or(number, |other| other.min(number)));
        }
    }
}

/// Checks that need the complete head.
fn finish(input: &[u8], parts: &mut ResponseParts) -> Result<(), ResponseFault> {
    if parts.is_cgi {
        decide_cgi_status(input, parts)?;
    }
    let ResponseParts { fields, connection_names, .. } = parts;
    if !connection_names.is_empty() {
        for field in fields.iter_mut() {
            let name = field.name.of(input);
            field.is_hop_by_hop |= connection_names.iter().any(|listed| listed.of(input).eq_ignore_ascii_case(name));
        }
    }
    Ok(())
}

fn decide_cgi_status(input: &[u8], parts: &mut ResponseParts) -> Result<(), ResponseFault> {
    if parts.status != 0 {
        return Ok(()); // from a status line
    }
    let Some(field) = parts.field(ResponseField::Status) else {
        parts.status = if parts.has(ResponseField::Location) { 302 } else { 200 };
        return Ok(());
    };
    let value = field.value;
    let text = value.of(input);
    let status = parse_status(text).filter(|_| !text.get(3).is_some_and(u8::is_ascii_digit));
    parts.status = status.ok_or(ResponseFault::InvalidStatus { value })?;
    parts.reason = trim(input, value.start() + 3, value.end());
    Ok(())
}
