//! The head of a request as every version of HTTP has it: method, target, host, fields.
//!
//! All of it are offsets into a text: what HTTP/1 has received, or what a decoder of fields has written. The codecs
//! fill it; nothing above them need know which one did.

mod field;
mod method;

use crate::host::Authority;
use crate::{Range32, uri};

pub use field::{KnownHeader, KnownHeaders};
pub use method::Method;

/// Version of HTTP that a request speaks. 1.2 to 1.9 count as 1.1 (RFC 9110 §2.5); the text is in
/// [`RequestHead::version_text`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Version {
    /// A request line without version, no header fields.
    Http09,
    /// HTTP/1.0.
    Http10,
    /// HTTP/1.1.
    #[default]
    Http11,
    /// HTTP/2.
    Http2,
    /// HTTP/3.
    Http3,
}

/// The scheme of a request's target.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Scheme {
    /// Over a connection in the clear.
    #[default]
    Http,
    /// Over TLS.
    Https,
}

impl Scheme {
    /// The scheme as it stands in a URL: `$scheme`.
    pub const fn name(self) -> &'static str {
        match self {
            Scheme::Http => "http",
            Scheme::Https => "https",
        }
    }

    /// The port that a URL of this scheme need not name.
    pub const fn default_port(self) -> u16 {
        match self {
            Scheme::Http => 80,
            Scheme::Https => 443,
        }
    }
}

/// How the body of a request is delimited.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Framing {
    /// There is no body.
    #[default]
    None,
    /// That many bytes follow; may be 0 where the client said so.
    Length(u64),
    /// The version's own framing tells the end: chunks in HTTP/1.1, frames in later ones.
    Chunked,
}

/// One header field, as offsets into the input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeaderField {
    /// The name as written.
    pub name: Range32,
    /// The value without surrounding spaces and tabs.
    pub value: Range32,
    /// Which field it is, if Gale knows it.
    pub known: Option<KnownHeader>,
}

impl HeaderField {
    pub(crate) fn line(&self) -> Range32 {
        Range32::new(self.name.start(), self.value.end())
    }
}

/// A parsed request head: offsets into the input that was parsed.
///
/// Reusable: the parser clears it and keeps its capacity. After an offence it holds what had been
/// understood so far.
#[derive(Clone, Debug, Default)]
pub struct RequestHead {
    /// The method.
    pub method: Method,
    /// The method's text.
    pub method_range: Range32,
    /// The request target as written: nginx's `$request_uri` in the origin form.
    pub target_range: Range32,
    /// The request target in its parts.
    pub target: uri::Target,
    /// The version.
    pub version: Version,
    /// The version's text, such as "HTTP/1.1"; empty in HTTP/0.9.
    pub version_range: Range32,
    /// The request line without its line end: nginx's `$request`. Empty until all of it was understood.
    pub line: Range32,
    /// The header fields in their order, without the ignored ones.
    pub headers: Vec<HeaderField>,
    /// The host that the request is for: from an absolute target, otherwise from Host.
    pub authority: Option<Authority>,
    /// The protocol that an extended CONNECT asks for, such as "websocket": RFC 8441 §4. The target then has the origin
    /// form.
    pub connect_protocol: Option<Range32>,
    /// How the body is delimited; meaningful once the head is complete.
    pub framing: Framing,
    /// How many header lines were ignored for their names.
    pub ignored_count: u32,
    /// The first ignored line, for the log.
    pub ignored_first: Option<Range32>,
    pub(crate) known: KnownIndex,
}

impl RequestHead {
    /// Forgets everything but the capacity.
    pub fn clear(&mut self) {
        // Field by field: what is large, the list and the places of known fields, stays where it is.
        let RequestHead {
            method,
            method_range,
            target_range,
            target,
            version,
            version_range,
            line,
            headers,
            authority,
            connect_protocol,
            framing,
            ignored_count,
            ignored_first,
            known,
        } = self;
        *method = Method::default();
        *method_range = Range32::default();
        *target_range = Range32::default();
        *target = uri::Target::default();
        *version = Version::default();
        *version_range = Range32::default();
        *line = Range32::default();
        headers.clear();
        *authority = None;
        *connect_protocol = None;
        *framing = Framing::default();
        *ignored_count = 0;
        *ignored_first = None;
        known.present = 0;
    }

    /// Adds a field behind the others, which somebody makes that is not the client. It is not judged.
    pub fn push(&mut self, field: HeaderField) {
        if let Some(known) = field.known
            && !self.has(known)
        {
            self.known.note(known, self.headers.len());
        }
        self.headers.push(field);
    }

    /// Takes all fields of this name away, in any case, and adds this one behind the others, if there is one. It is not
    /// judged.
    pub fn replace(&mut self, input: &[u8], name: &[u8], field: Option<HeaderField>) {
        self.headers.retain(|own| !own.name.of_lenient(input).eq_ignore_ascii_case(name));
        self.headers.extend(field);
        self.known.present = 0;
        // Backwards, so that the first of a kind is the one that is noted in the end.
        for (place, field) in self.headers.iter().enumerate().rev() {
            if let Some(known) = field.known {
                self.known.note(known, place);
            }
        }
    }

    /// The method's text.
    pub fn method_name<'i>(&self, input: &'i [u8]) -> &'i [u8] {
        self.method_range.of(input)
    }

    /// The version's text; empty in HTTP/0.9.
    pub fn version_text<'i>(&self, input: &'i [u8]) -> &'i [u8] {
        self.version_range.of(input)
    }

    /// Takes the first line for the request line if there was no proper one, as far as it came: so that logs can show
    /// it.
    pub fn keep_first_line(&mut self, input: &[u8]) {
        let is_line_end = |byte: &&u8| matches!(byte, b'\r' | b'\n');
        if self.line.is_empty() {
            let start = input.iter().take_while(is_line_end).count();
            let length = input[start..].iter().take_while(|byte| !is_line_end(byte)).count();
            self.line = Range32::new(start, start + length);
        }
    }

    /// True if a field of that kind is there.
    pub fn has(&self, header: KnownHeader) -> bool {
        self.known.first(header).is_some()
    }

    /// True if a field of any of these kinds is there.
    #[inline]
    pub fn has_any(&self, headers: KnownHeaders) -> bool {
        headers.has_any_of(self.known.present)
    }

    /// The first field of that kind.
    pub fn field(&self, header: KnownHeader) -> Option<&HeaderField> {
        self.headers.get(self.known.first(header)?)
    }

    /// The value of the first field of that kind.
    pub fn value<'i>(&self, input: &'i [u8], header: KnownHeader) -> Option<&'i [u8]> {
        Some(self.field(header)?.value.of(input))
    }

    /// The values of all fields of that kind, in their order.
    pub fn values<'s, 'i>(
        &'s self,
        input: &'i [u8],
        header: KnownHeader,
    ) -> impl Iterator<Item = &'i [u8]> + use<'s, 'i> {
        let from = self.known.first(header).unwrap_or(self.headers.len());
        self.headers[from..]
            .iter()
            .filter(move |field| field.known == Some(header))
            .map(move |field| field.value.of(input))
    }

    /// The value of the first field of that name, in any case.
    pub fn value_by_name<'i>(&self, input: &'i [u8], name: &[u8]) -> Option<&'i [u8]> {
        match KnownHeader::from_name(name) {
            Some(known) => self.value(input, known),
            None => {
                let same =
                    |field: &&HeaderField| field.known.is_none() && field.name.of(input).eq_ignore_ascii_case(name);
                Some(self.headers.iter().find(same)?.value.of(input))
            }
        }
    }
}

/// Where the first field of each known kind is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KnownIndex {
    present: u64,
    first: [u16; KnownHeader::ALL.len()],
}

impl Default for KnownIndex {
    fn default() -> Self {
        Self { present: 0, first: [0; KnownHeader::ALL.len()] }
    }
}

impl KnownIndex {
    fn first(&self, header: KnownHeader) -> Option<usize> {
        let present = self.present >> (header as u8) & 1 == 1;
        present.then(|| self.first[header as usize] as usize)
    }

    pub(crate) fn note(&mut self, header: KnownHeader, place: usize) {
        self.present |= 1 << header as u8;
        self.first[header as usize] = place as u16;
    }
}
