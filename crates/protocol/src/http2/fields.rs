//! Conversion of field blocks to heads and trailers: RFC 9113 §8.
//!
//! The text of a head has the form of HTTP/1, `name: value` for each field followed by the request line, so that the
//! layers above need not know the HTTP version: `:authority` becomes the field Host, several cookie fields are joined
//! (§8.2.3), and anything that HTTP/1 would parse differently is refused. Invariants: a block is always decoded to its
//! end, since the dynamic table requires it; after a refusal no further text is kept.

use super::error::{ConnectionFault, StateFault, StreamFault};
use super::hpack::{DecodedField, Decoder, NameKind};
use super::limits::Limits;
use super::priority::Priority;
use crate::host::LastHost;
use crate::http1::{self, HEADERS_MAX, ResponseParts, is_token_byte, note_known, parse_length, pretends_framing};
use crate::request::{Framing, HeaderField, KnownHeader, Method, RequestHead, Version};
use crate::response::ResponseField;
use crate::{Offence, Range32, uri};

/// Storage for the fields of a message. All connections of an event loop share one, since each event is handled before
/// the next one. The caller takes the parts that it keeps, with `std::mem::take` or by swapping.
#[derive(Debug, Default)]
pub struct Fields {
    /// Text that all ranges refer to.
    pub text: Vec<u8>,
    /// Head of a request, after [`super::Event::Request`]; after [`super::Event::BadRequest`] the part parsed so far.
    pub request: RequestHead,
    /// Head of a response, after [`super::Event::Response`].
    pub response: ResponseParts,
    /// Trailers, after [`super::Event::Trailers`]. They may contain fields that have no meaning in trailers.
    pub trailers: Vec<HeaderField>,
    /// Size of the compressed block in bytes.
    pub block_bytes: usize,
    /// Value of the field `priority` of a request.
    priority: Option<Range32>,
    pseudo: Pseudo,
    /// Values of all cookie fields but the first; `cookie` is the index of the first.
    crumbs: Vec<Range32>,
    cookie: Option<usize>,
    /// Value of Content-Length, once parsed.
    content_length: Option<u64>,
    last_host: LastHost,
}

#[derive(Clone, Copy, Debug, Default)]
struct Pseudo {
    method: Option<Range32>,
    scheme: Option<Range32>,
    authority: Option<Range32>,
    path: Option<Range32>,
    protocol: Option<Range32>,
    status: Option<Range32>,
    /// A regular field has been seen.
    is_over: bool,
    /// There is a field Host equal to `:authority`.
    has_equal_host: bool,
}

/// Reason for refusing a message whose block could be decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The message is malformed: RFC 9113 §8.1.1. A server may respond, and then resets the stream with the fault's
    /// code.
    Malformed(StreamFault),
    /// The request is invalid in a way that is answered as in HTTP/1. Ranges refer to [`Fields::text`].
    Offence(Offence),
}

impl Refusal {
    /// Status of the response: see [`Offence::status`].
    pub fn status(self) -> u16 {
        match self {
            Self::Malformed(_) => 400,
            Self::Offence(offence) => offence.status(),
        }
    }
}

impl From<StreamFault> for Refusal {
    fn from(fault: StreamFault) -> Self {
        Self::Malformed(fault)
    }
}

impl From<Offence> for Refusal {
    fn from(offence: Offence) -> Self {
        Self::Offence(offence)
    }
}

/// Kind of a field block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum BlockKind {
    /// A request, with or without a body.
    Request {
        end_stream: bool,
    },
    Response,
    Trailers,
    /// Decoded only to update the dynamic table.
    Discarded,
}

impl Fields {
    /// Creates empty storage.
    pub fn new() -> Self {
        Self::default()
    }

    /// The value of the request's field `priority`: RFC 9218 §5.
    pub(super) fn priority(&self) -> Option<Priority> {
        self.priority.map(|value| Priority::parse(value.of(&self.text)))
    }

    /// The value of Content-Length.
    pub(super) fn content_length(&self) -> Option<u64> {
        self.content_length
    }

    fn clear(&mut self) {
        self.text.clear();
        self.request.clear();
        self.response.clear();
        self.trailers.clear();
        self.priority = None;
        self.pseudo = Pseudo::default();
        self.crumbs.clear();
        self.cookie = None;
        self.content_length = None;
    }

    /// Decodes a complete block.
    pub(super) fn decode(
        &mut self,
        decoder: &mut Decoder,
        block: &[u8],
        kind: BlockKind,
        limits: &Limits,
    ) -> Result<Result<(), Refusal>, ConnectionFault> {
        self.clear();
        self.block_bytes = block.len();
        decoder.begin_block();
        let list_max = limits.head.head_max;
        let (mut at, mut list_size, mut result) = (0, 0usize, Ok(()));
        loop {
            let start = self.text.len();
            let Some(field) = decoder.next_field(block, &mut at, &mut self.text)? else { break };
            list_size += field.list_size();
            // A few bytes can expand to kilobytes, so decoding of refused fields is bounded.
            if list_size > 2 * list_max + DISCARDED_MAX {
                return Err(StateFault::HeaderListTooLong.into());
            }
            if kind == BlockKind::Discarded || result.is_err() {
                self.text.truncate(start);
                continue;
            }
            result = match kind {
                _ if list_size > list_max => Err(too_large(kind)),
                BlockKind::Request { .. } => self.take_request_field(field, &limits.head),
                BlockKind::Response => self.take_response_field(field),
                BlockKind::Trailers | BlockKind::Discarded => self.take_trailer(field, limits),
            };
        }
        if result.is_ok() {
            result = match kind {
                BlockKind::Request { end_stream } => self.finish_request(end_stream, limits),
                BlockKind::Response => self.finish_response(),
                BlockKind::Trailers | BlockKind::Discarded => Ok(()),
            };
        }
        Ok(result)
    }

    fn take_request_field(&mut self, field: DecodedField, limits: &http1::Limits) -> Result<(), Refusal> {
        let line = Range32::new(field.name.start(), field.value.end());
        if line.len() + b"\r\n".len() > limits.line_max {
            let is_path = field.name.of(&self.text) == b":path";
            return Err(if is_path { Offence::UriTooLong } else { Offence::HeaderLineTooLong { line } }.into());
        }
        if field.name_kind == NameKind::Pseudo {
            return self.take_request_pseudo(field);
        }
        self.pseudo.is_over = true;
        check_field(&field, &self.text)?;
        if !self.is_wanted_name(&field, limits) {
            self.request.ignored_count += 1;
            self.request.ignored_first.get_or_insert(line);
            return Ok(());
        }
        let known = KnownHeader::from_token(field.name.of(&self.text));
        match known {
            Some(known) => self.take_known(known, field, limits),
            None => {
                if field.name.of(&self.text) == b"priority" {
                    self.priority.get_or_insert(field.value);
                }
                self.push_field(field.name, field.value, None, limits)
            }
        }
    }

    /// nginx's rules for names: `ignore_invalid_headers`, `underscores_in_headers`.
    fn is_wanted_name(&self, field: &DecodedField, limits: &http1::Limits) -> bool {
        let is_underscore_only = || {
            let is_valid = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
            field.name.of(&self.text).iter().all(is_valid)
        };
        field.name_kind == NameKind::Plain
            || !limits.ignore_invalid_headers
            || limits.underscores_in_headers && is_underscore_only()
    }

    fn take_request_pseudo(&mut self, field: DecodedField) -> Result<(), Refusal> {
        if self.pseudo.is_over {
            return Err(StreamFault::PseudoHeaderBehindField.into());
        }
        if !field.is_valid_value {
            return Err(StreamFault::InvalidFieldValue.into());
        }
        let place = match field.name.of(&self.text) {
            b":method" => &mut self.pseudo.method,
            b":scheme" => &mut self.pseudo.scheme,
            b":authority" => &mut self.pseudo.authority,
            b":path" => &mut self.pseudo.path,
            b":protocol" => &mut self.pseudo.protocol,
            _ => return Err(StreamFault::UnknownPseudoHeader.into()),
        };
        match place.replace(field.value) {
            Some(_) => Err(StreamFault::DuplicatePseudoHeader.into()),
            None => Ok(()),
        }
    }

    fn take_known(&mut self, known: KnownHeader, field: DecodedField, limits: &http1::Limits) -> Result<(), Refusal> {
        let value = field.value.of(&self.text);
        match known {
            // RFC 9113 §8.2.2.
            KnownHeader::Connection
            | KnownHeader::KeepAlive
            | KnownHeader::ProxyConnection
            | KnownHeader::TransferEncoding
            | KnownHeader::Upgrade => return Err(StreamFault::ConnectionSpecificField.into()),
            KnownHeader::Te if !value.eq_ignore_ascii_case(b"trailers") => return Err(StreamFault::InvalidTe.into()),
            KnownHeader::Cookie if self.cookie.is_some() => {
                self.crumbs.push(field.value);
                let count = self.request.headers.len() + self.crumbs.len();
                return if count > limits.headers_max.min(HEADERS_MAX) {
                    Err(Offence::TooManyHeaders.into())
                } else {
                    Ok(())
                };
            }
            KnownHeader::Cookie => self.cookie = Some(self.request.headers.len()),
            // Clients that translate from HTTP/1 send both (§8.3.1). They must be equal, and one is dropped.
            KnownHeader::Host => {
                if let Some(authority) = self.pseudo.authority
                    && !self.pseudo.has_equal_host
                {
                    let is_same = authority.of(&self.text) == value;
                    if !is_same {
                        return Err(Offence::AuthorityAndHostDiffer.into());
                    }
                    self.pseudo.has_equal_host = true;
                }
            }
            _ => {}
        }
        self.push_field(field.name, field.value, Some(known), limits)
    }

    fn push_field(
        &mut self,
        name: Range32,
        value: Range32,
        known: Option<KnownHeader>,
        limits: &http1::Limits,
    ) -> Result<(), Refusal> {
        let Self { text, request, last_host, crumbs, .. } = self;
        if request.headers.len() + crumbs.len() >= limits.headers_max.min(HEADERS_MAX) {
            return Err(Offence::TooManyHeaders.into());
        }
        let field = HeaderField { name, value, known };
        if let Some(known) = known {
            note_known(text, known, &field, last_host, request)?;
        }
        request.headers.push(field);
        Ok(())
    }

    /// Checks that need all fields.
    fn finish_request(&mut self, end_stream: bool, limits: &Limits) -> Result<(), Refusal> {
        let pseudo = self.pseudo;
        let method = pseudo.method.ok_or(StreamFault::MissingMethod)?;
        let is_connect = method.of(&self.text) == b"CONNECT";
        if pseudo.protocol.is_some() && !(is_connect && limits.extended_connect) {
            return Err(StreamFault::UnexpectedProtocol.into());
        }
        self.request.version = Version::Http2;
        self.request.connect_protocol = pseudo.protocol;
        self.join_cookies();
        if let Some(authority) = pseudo.authority
            && !pseudo.has_equal_host
        {
            self.add_host(authority, &limits.head)?;
        }
        if is_connect && pseudo.protocol.is_none() {
            // RFC 9113 §8.5.
            if pseudo.scheme.is_some() || pseudo.path.is_some() {
                return Err(StreamFault::InvalidConnect.into());
            }
            let authority = pseudo.authority.ok_or(StreamFault::InvalidConnect)?;
            self.write_line(method, authority)?;
            self.request.target = uri::split_authority(&self.text, self.request.target_range)?;
        } else {
            self.finish_target(method)?;
        }
        self.decide_framing(end_stream)
    }

    /// Checks scheme, path and host of all requests except plain CONNECT: RFC 9113 §8.3.1.
    fn finish_target(&mut self, method: Range32) -> Result<(), Refusal> {
        let scheme = self.pseudo.scheme.ok_or(StreamFault::MissingScheme)?;
        let path = self.pseudo.path.ok_or(StreamFault::MissingPath)?;
        if path.is_empty() {
            return Err(StreamFault::EmptyPath.into());
        }
        if !is_scheme(scheme.of(&self.text)) {
            return Err(StreamFault::InvalidScheme.into());
        }
        self.write_line(method, path)?;
        let head = &mut self.request;
        // An absolute URI would contain the host a second time.
        head.target = match self.text[head.target_range.start()] {
            b'/' => match uri::split_plain_until_space(&self.text, head.target_range.start()) {
                Some((target, end)) if end == head.target_range.end() => target,
                _ => uri::split_in(&self.text, head.target_range)?,
            },
            b'*' if head.method == Method::Options => uri::split_in(&self.text, head.target_range)?,
            _ => return Err(Offence::InvalidRequest.into()),
        };
        if head.authority.is_none() {
            return Err(Offence::MissingAuthority.into());
        }
        Ok(())
    }

    /// Appends the request line in the form of HTTP/1.
    fn write_line(&mut self, method: Range32, target: Range32) -> Result<(), Refusal> {
        const VERSION: &[u8] = b"HTTP/2.0";
        let is_method_byte = |byte: &u8| matches!(byte, b'A'..=b'Z' | b'-' | b'_');
        if method.is_empty() || !method.of(&self.text).iter().all(is_method_byte) {
            return Err(Offence::InvalidMethod.into());
        }
        let (text, head) = (&mut self.text, &mut self.request);
        text.reserve(method.len() + target.len() + VERSION.len() + 2);
        let start = text.len();
        text.extend_from_within(method.as_range());
        head.method_range = Range32::new(start, text.len());
        text.push(b' ');
        let target_start = text.len();
        text.extend_from_within(target.as_range());
        head.target_range = Range32::new(target_start, text.len());
        text.push(b' ');
        let version_start = text.len();
        text.extend_from_slice(VERSION);
        head.version_range = Range32::new(version_start, text.len());
        head.line = Range32::new(start, text.len());
        head.method = Method::from_name(head.method_range.of(text));
        Ok(())
    }

    /// Adds the field Host from `:authority`.
    fn add_host(&mut self, authority: Range32, limits: &http1::Limits) -> Result<(), Refusal> {
        let start = self.text.len();
        self.text.extend_from_slice(b"host: ");
        let value_start = self.text.len();
        self.text.extend_from_within(authority.as_range());
        let (name, value) = (Range32::new(start, start + 4), Range32::new(value_start, self.text.len()));
        // It was not sent as a field, so it does not count for `max_headers`.
        let limits = http1::Limits { headers_max: limits.headers_max.saturating_add(1), ..limits.clone() };
        self.push_field(name, value, Some(KnownHeader::Host), &limits)
    }

    /// Joins several cookie fields: RFC 9113 §8.2.3.
    fn join_cookies(&mut self) {
        let Some(place) = self.cookie.filter(|_| !self.crumbs.is_empty()) else {
            return;
        };
        let field = &mut self.request.headers[place];
        let start = self.text.len();
        self.text.extend_from_slice(b"cookie: ");
        let value_start = self.text.len();
        self.text.extend_from_within(field.value.as_range());
        for crumb in &self.crumbs {
            self.text.extend_from_slice(b"; ");
            self.text.extend_from_within(crumb.as_range());
        }
        field.name = Range32::new(start, start + 6);
        field.value = Range32::new(value_start, self.text.len());
    }

    fn decide_framing(&mut self, end_stream: bool) -> Result<(), Refusal> {
        let (text, head) = (&self.text, &mut self.request);
        let is_plain_connect = head.method == Method::Connect && head.connect_protocol.is_none();
        head.framing = match head.value(text, KnownHeader::ContentLength) {
            Some(_) if is_plain_connect => return Err(Offence::ConnectWithBody.into()),
            Some(value) => {
                let length = parse_length(value).ok_or(Offence::InvalidContentLength)?;
                self.content_length = Some(length);
                if end_stream && length > 0 {
                    return Err(StreamFault::ContentLengthMismatch.into());
                }
                Framing::Length(length)
            }
            None if end_stream => Framing::None,
            None => Framing::Chunked,
        };
        Ok(())
    }

    fn take_response_field(&mut self, field: DecodedField) -> Result<(), Refusal> {
        if field.name_kind == NameKind::Pseudo {
            return self.take_status(field);
        }
        check_field(&field, &self.text)?;
        if self.pseudo.status.is_none() {
            return Err(StreamFault::InvalidStatus.into());
        }
        self.pseudo.is_over = true;
        let name = field.name.of(&self.text);
        match ResponseField::from_token(name) {
            // These fields are malformed (RFC 9113 §8.2.2), but some servers send them. As in nginx they are ignored
            // and not forwarded.
            Some(field)
                if field.is_of_connection() && field != ResponseField::Te && field != ResponseField::Trailer =>
            {
                return Ok(());
            }
            _ if self.response.fields.len() >= HEADERS_MAX => return Err(StreamFault::TooBigResponseHead.into()),
            _ => {}
        }
        http1::add_received(&self.text, field.name, field.value, &mut self.response)
            .map_err(|_| StreamFault::InvalidContentLength.into())
    }

    /// Parses `:status`: three digits other than 101, which HTTP/2 does not have (RFC 9113 §8.6).
    fn take_status(&mut self, field: DecodedField) -> Result<(), Refusal> {
        if self.pseudo.is_over {
            return Err(StreamFault::PseudoHeaderBehindField.into());
        }
        if field.name.of(&self.text) != b":status" {
            return Err(StreamFault::UnknownPseudoHeader.into());
        }
        if self.pseudo.status.replace(field.value).is_some() {
            return Err(StreamFault::DuplicatePseudoHeader.into());
        }
        let status = match field.value.of(&self.text) {
            [a @ b'1'..=b'9', b @ b'0'..=b'9', c @ b'0'..=b'9'] => {
                [a, b, c].iter().fold(0, |status, &&digit| status * 10 + u16::from(digit - b'0'))
            }
            _ => 101,
        };
        if status == 101 {
            return Err(StreamFault::InvalidStatus.into());
        }
        self.response.version = Version::Http2;
        self.response.status = status;
        Ok(())
    }

    fn finish_response(&mut self) -> Result<(), Refusal> {
        self.content_length = self.response.content_length;
        if self.pseudo.status.is_none() { Err(StreamFault::InvalidStatus.into()) } else { Ok(()) }
    }

    fn take_trailer(&mut self, field: DecodedField, limits: &Limits) -> Result<(), Refusal> {
        if field.name_kind == NameKind::Pseudo {
            return Err(StreamFault::PseudoHeaderInTrailers.into());
        }
        check_field(&field, &self.text)?;
        let known = KnownHeader::from_token(field.name.of(&self.text));
        if let Some(
            KnownHeader::Connection
            | KnownHeader::KeepAlive
            | KnownHeader::ProxyConnection
            | KnownHeader::TransferEncoding
            | KnownHeader::Upgrade,
        ) = known
        {
            return Err(StreamFault::ConnectionSpecificField.into());
        }
        if self.trailers.len() >= limits.head.headers_max {
            return Err(StreamFault::TooBigTrailers.into());
        }
        self.trailers.push(HeaderField { name: field.name, value: field.value, known });
        Ok(())
    }
}

/// Bytes of fields decoded only for the dynamic table, in addition to twice the limit.
const DISCARDED_MAX: usize = 64 * 1024;

fn too_large(kind: BlockKind) -> Refusal {
    match kind {
        BlockKind::Request { .. } => Offence::HeadTooLarge.into(),
        BlockKind::Response => StreamFault::TooBigResponseHead.into(),
        BlockKind::Trailers | BlockKind::Discarded => StreamFault::TooBigTrailers.into(),
    }
}

/// Checks name and value of a regular field: RFC 9113 §8.2.1.
fn check_field(field: &DecodedField, text: &[u8]) -> Result<(), StreamFault> {
    match field.name_kind {
        NameKind::Plain => {}
        NameKind::Token if !pretends_framing(field.name.of(text)) => {}
        _ => return Err(StreamFault::InvalidFieldName),
    }
    if field.is_valid_value { Ok(()) } else { Err(StreamFault::InvalidFieldValue) }
}

/// Checks the syntax of a scheme: RFC 3986 §3.1.
fn is_scheme(scheme: &[u8]) -> bool {
    scheme.first().is_some_and(u8::is_ascii_alphabetic)
        && scheme.iter().all(|&byte| is_token_byte(byte) && (byte.is_ascii_alphanumeric() || b"+-.".contains(&byte)))
}
