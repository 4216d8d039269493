//! The head of a response as a client of an upstream server receives it: status line and fields, parsed as they arrive.
//!
//! The same fields without a status line are the head of a CGI response (RFC 3875 §6), which FastCGI, SCGI and uwsgi
//! carry. Line ends may be a bare LF, as in nginx, since backends write it; whatever could be read in two ways is
//! refused: control characters, folded lines, a space before the colon, two lengths, a length beside a transfer coding.
//! Invariant: the outcome does not depend on how the input was split.

use super::connection::ConnectionOptions;
use super::field_line::{self, FieldLine, is_token_byte, pretends_framing, trim};
use super::framing::parse_length;
use super::head::Status;
use super::scan::{LineEnd, find_line_end};
use crate::Range32;
use crate::request::{Method, Version};
use crate::response::ResponseField;
use crate::upstream_fault::{ReceivedLine, ResponseFault, write_duplicate, write_quoted};

/// One field of a response, as offsets into the input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReceivedField {
    /// The name as written.
    pub name: Range32,
    /// The value without surrounding spaces and tabs.
    pub value: Range32,
    /// Which field it is, if Gale knows it.
    pub known: Option<ResponseField>,
    /// It concerns the connection to the upstream only and is not forwarded: `Connection`, `Keep-Alive`,
    /// `Proxy-Connection`, `TE`, `Transfer-Encoding`, `Upgrade` and whatever `Connection` names (RFC 9110 §7.6.1).
    pub is_hop_by_hop: bool,
}

impl ReceivedField {
    pub(crate) fn line(&self) -> ReceivedLine {
        ReceivedLine { name: self.name, value: self.value }
    }
}

/// What `Keep-Alive` announces about the connection: RFC 2068 §19.7.1, which servers still send.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KeepAlive {
    /// The upstream closes the connection when it has been idle for that many seconds.
    pub timeout_s: Option<u32>,
    /// The upstream answers that many further requests.
    pub requests_max: Option<u32>,
}

/// A field line that was passed over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IgnoredLine {
    /// A field that has one value came again; the first one counts, as in nginx.
    Duplicate {
        /// The line that was passed over.
        line: ReceivedLine,
        /// The line that counts.
        previous: ReceivedLine,
    },
    /// The name is no token (RFC 9110 §5.1), or there is no colon.
    InvalidName {
        /// The line.
        line: Range32,
    },
}

impl IgnoredLine {
    /// Appends a message for the log, the upstream's bytes unchanged; `input` is what was parsed.
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

/// A parsed response head: offsets into the input that was parsed, and what frames the body.
///
/// Reusable: the parser clears it and keeps its capacity. After a fault it holds what had been understood so far.
#[derive(Clone, Debug, Default)]
pub struct ResponseParts {
    /// HTTP/1.0, HTTP/1.1, which stands for all later ones of that kind too, or HTTP/2.
    pub version: Version,
    /// The status: 100 to 999.
    pub status: u16,
    /// The reason phrase, which may be empty.
    pub reason: Range32,
    /// The fields in their order, without the ignored ones.
    pub fields: Vec<ReceivedField>,
    /// The value of `Content-Length`.
    pub content_length: Option<u64>,
    /// `Transfer-Encoding` is `chunked`.
    pub is_chunked: bool,
    /// What `Connection` says, all its lines together.
    pub connection: ConnectionOptions,
    /// What `Keep-Alive` says.
    pub keep_alive: KeepAlive,
    /// Whether this is a CGI response.
    pub is_cgi: bool,
    /// How many field lines were passed over.
    pub ignored_count: u32,
    /// The first of them, for the log.
    pub ignored_first: Option<IgnoredLine>,
    /// The names that `Connection` lists besides the options that it has itself.
    pub connection_names: Vec<Range32>,
    /// The bit of each known field that is there.
    present: u64,
}

impl ResponseParts {
    /// Forgets everything but the capacity.
    pub fn clear(&mut self) {
        let mut fields = std::mem::take(&mut self.fields);
        let mut connection_names = std::mem::take(&mut self.connection_names);
        fields.clear();
        connection_names.clear();
        *self = Self { fields, connection_names, ..Self::default() };
    }

    /// Whether this is an interim response (RFC 9110 §15.2): the head of another one follows. 101 is a final response.
    pub fn is_interim(&self) -> bool {
        matches!(self.status, 100 | 102..=199) && !self.is_cgi
    }

    /// True if a field of that kind is there.
    pub fn has(&self, field: ResponseField) -> bool {
        self.present >> field as u8 & 1 == 1
    }

    /// The first field of that kind.
    pub fn field(&self, field: ResponseField) -> Option<&ReceivedField> {
        if !self.has(field) {
            return None;
        }
        self.fields.iter().find(|received| received.known == Some(field))
    }

    /// The value of the first field of that kind.
    pub fn value<'i>(&self, input: &'i [u8], field: ResponseField) -> Option<&'i [u8]> {
        Some(self.field(field)?.value.of(input))
    }

    /// The values of all fields of that kind, in their order.
    pub fn values<'s, 'i>(
        &'s self,
        input: &'i [u8],
        field: ResponseField,
    ) -> impl Iterator<Item = &'i [u8]> + use<'s, 'i> {
        let fields: &[ReceivedField] = if self.has(field) { &self.fields } else { &[] };
        fields.iter().filter(move |received| received.known == Some(field)).map(move |field| field.value.of(input))
    }

    /// Whether the connection may be used again once the body, which is delimited by `framing`, was read to its end:
    /// RFC 9112 §9.3. False for CGI responses, whose protocols have their own rules.
    pub fn keeps_alive(&self, framing: ResponseFraming) -> bool {
        let is_delimited = match framing {
            // A body that must not be there may come all the same.
            ResponseFraming::None => self.status != 204 || !self.is_chunked && self.content_length.unwrap_or(0) == 0,
            ResponseFraming::Length(_) | ResponseFraming::Chunked => true,
            ResponseFraming::UntilClose | ResponseFraming::Tunnel => false,
        };
        let is_wanted = match self.version {
            // Transfer codings came with HTTP/1.1: RFC 9112 §6.1.
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

/// How the body of a response is delimited.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ResponseFraming {
    /// There is no body.
    None,
    /// That many bytes follow.
    Length(u64),
    /// The chunked coding tells the end.
    Chunked,
    /// The end of the connection is the end of the body, so that a body cut short cannot be told from a whole one.
    UntilClose,
    /// The connection speaks another protocol from here on: a 101, or success of CONNECT.
    Tunnel,
}

impl ResponseFraming {
    /// How the body of that answer to a request with `method` is delimited: RFC 9112 §6.3, for a final response.
    pub fn decide(method: Method, parts: &ResponseParts) -> Self {
        match (method, parts.status) {
            (_, 101) | (Method::Connect, 200..=299) => Self::Tunnel,
            (Method::Head, _) | (_, 100..=199 | 204 | 304) => Self::None,
            // What carries a CGI response has a framing of its own.
            _ if parts.is_chunked && !parts.is_cgi => Self::Chunked,
            _ => parts.content_length.map_or(Self::UntilClose, Self::Length),
        }
    }
}

/// Incremental parser of response heads: feed it the same, growing buffer until the head is complete.
///
/// After `Complete` and after a fault it is ready for a new head at the beginning of its next input: for the final
/// response after an interim one.
#[derive(Clone, Debug)]
pub struct ResponseHeadParser {
    form: Form,
    head_max: usize,
    phase: Phase,
    /// Where the current line begins.
    line_start: u32,
    /// Everything before is known to hold no line end and no control character.
    scanned: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    Http,
    Cgi,
    /// A status line, or the fields at once.
    CgiOrHttp,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Start,
    StatusLine,
    Fields,
}

/// Most names that a `Connection` field may list: each is compared with each field.
const CONNECTION_NAMES_MAX: usize = 64;

impl ResponseHeadParser {
    /// A parser of HTTP/1 responses whose heads have at most `head_max` bytes: the size of nginx's `proxy_buffer_size`.
    pub fn new(head_max: usize) -> Self {
        Self::of_form(Form::Http, head_max)
    }

    /// A parser of CGI responses, as FastCGI carries them: the status comes with the field `Status` (RFC 3875 §6.3.3)
    /// and otherwise is 302 if there is a `Location`, else 200.
    pub fn cgi(head_max: usize) -> Self {
        Self::of_form(Form::Cgi, head_max)
    }

    /// A parser for SCGI and uwsgi, whose applications begin with a status line or with the fields at once.
    pub fn cgi_or_http(head_max: usize) -> Self {
        Self::of_form(Form::CgiOrHttp, head_max)
    }

    fn of_form(form: Form, head_max: usize) -> Self {
        Self { form, head_max: head_max.min(u32::MAX as usize), phase: Phase::Start, line_start: 0, scanned: 0 }
    }

    /// Back to the beginning of a head.
    pub fn reset(&mut self) {
        self.phase = Phase::Start;
        self.begin_line(0);
    }

    /// Parses as much of `input` as has arrived. `input` begins where the head begins and grows from call to call; it
    /// may move in memory. `parts` stays the same one throughout a head.
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
            return Ok(Status::NeedMore); // the caller lost bytes that it had shown: wait for them
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
            // Tried once for each line: of one that comes in pieces only what is new is looked at.
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

    /// Parses the status line; false if it has not arrived. Where it may be missing and is, the fields begin.
    fn take_status_line(&mut self, input: &[u8], parts: &mut ResponseParts) -> Result<bool, ResponseFault> {
        let length = input.len().min(PREFIX.len());
        let line = if input[..length] != PREFIX[..length] {
            LineEnd::Control { at: 0 } // no need to wait for the end of what is no status line
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

/// Parses the status line `input[..end]` (RFC 9112 §4), which begins with `HTTP/`; false if it is none. Lenient as
/// nginx is: more spaces, no phrase, IIS's sub-status ("403.1").
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

/// The version in a status line, and where it ends.
fn find_version(line: &[u8]) -> Option<(Version, usize)> {
    const USUAL: &[u8] = b"HTTP/1.1 ";
    if line.starts_with(USUAL) {
        return Some((Version::Http11, USUAL.len() - 1));
    }
    let space = memchr::memchr(b' ', line)?;
    Some((parse_version(&line[PREFIX.len()..space])?, space))
}

/// Major and minor number, of three digits at most; all from 1.1 on count as 1.1.
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

/// The three digits at the beginning.
fn parse_status(text: &[u8]) -> Option<u16> {
    let digits = text.first_chunk::<3>().filter(|digits| digits.iter().all(u8::is_ascii_digit))?;
    let status = digits.iter().fold(0, |number, digit| number * 10 + u16::from(digit - b'0'));
    (status >= 100).then_some(status)
}

/// The field line `input[start..end]`, which is not empty and free of control characters other than tabs.
fn parse_field(input: &[u8], start: usize, end: usize, parts: &mut ResponseParts) -> Result<(), ResponseFault> {
    let line = &input[start..end];
    let name_length = line.iter().position(|&byte| !is_token_byte(byte)).unwrap_or(line.len());
    if name_length > 0 && line.get(name_length) == Some(&b':') {
        let value = trim(input, start + name_length + 1, end);
        return add_field(input, FieldLine { name: Range32::new(start, start + name_length), value }, parts);
    }
    // IIS writes its status line twice.
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

/// Fields of which the first counts and later ones are passed over, as in nginx.
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

/// Fields that concern one connection: RFC 9110 §7.6.1.
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

/// Takes a field of a response that came in another version's framing; the name is a token.
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

/// Acts on a known field; false if it is to be passed over.
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

/// Fields that say more than what is passed on.
const ACTED_ON: u64 = bits(&[
    ResponseField::Connection,
    ResponseField::ContentLength,
    ResponseField::KeepAlive,
    ResponseField::TransferEncoding,
]);

/// Acts on a field that is no duplicate.
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
        // Nearly always it is one of these, and nothing else.
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

/// Keeps the names that are no options of the connection itself.
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

/// `timeout=5, max=100`, in any order; the smaller of two values counts, and what is no number is passed over.
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

/// What can only be judged when all fields are there.
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
