//! The head of a request for HTTP/2 before it is encoded, which each connection does with a table of its own.

use gale_protocol::Range32;
use gale_protocol::http1::request_writer::Unwritable;
use gale_protocol::http2::hpack::Indexing;
use gale_protocol::http2::{FieldsWriter, RequestLine, check_field};
use gale_protocol::request::KnownHeader;
use gale_runtime::Bytes;

/// A request's head. The default is not written yet.
#[derive(Default)]
pub struct Http2Request {
    /// The text that the ranges refer to.
    text: Vec<u8>,
    method: Range32,
    authority: Range32,
    path: Range32,
    scheme: &'static str,
    fields: Vec<(Range32, Range32)>,
    /// True if the client's trailers are passed on.
    pub passes_trailers: bool,
}

impl Http2Request {
    /// Creates a head without fields.
    ///
    /// # Errors
    /// A part would be read as something else.
    pub fn new(method: &[u8], scheme: &'static str, authority: &[u8], path: &[u8]) -> Result<Http2Request, Unwritable> {
        let mut text = Vec::with_capacity(512);
        let mut put = |part: &[u8]| {
            let start = text.len();
            text.extend_from_slice(part);
            Range32::new(start, text.len())
        };
        let (method, authority, path) = (put(method), put(authority), put(path));
        let request = Http2Request {
            text,
            method,
            authority,
            path,
            scheme,
            fields: Vec::with_capacity(16),
            passes_trailers: false,
        };
        request.line().check()?;
        Ok(request)
    }

    /// Appends a field, with its name in lower case. A field that HTTP/2 does not allow is left out (RFC 9113 §8.2.2).
    ///
    /// # Errors
    /// It would be read as something else.
    pub fn push(&mut self, name: &[u8], value: &[u8]) -> Result<(), Unwritable> {
        match KnownHeader::from_name(name) {
            Some(
                KnownHeader::Host
                | KnownHeader::Connection
                | KnownHeader::KeepAlive
                | KnownHeader::ProxyConnection
                | KnownHeader::TransferEncoding
                | KnownHeader::Upgrade
                | KnownHeader::Http2Settings,
            ) => return Ok(()),
            Some(KnownHeader::Te) if !value.eq_ignore_ascii_case(b"trailers") => return Ok(()),
            _ => {}
        }
        check_field(name, value)?;
        let start = self.text.len();
        self.text.extend(name.iter().map(u8::to_ascii_lowercase));
        let name_end = self.text.len();
        self.text.extend_from_slice(value);
        self.fields.push((Range32::new(start, name_end), Range32::new(name_end, self.text.len())));
        Ok(())
    }

    /// Appends a field with the value that `write` appends, unless that is empty.
    ///
    /// # Errors
    /// It would be read as something else.
    pub fn push_unless_empty(&mut self, name: &[u8], write: impl FnOnce(&mut Vec<u8>)) -> Result<(), Unwritable> {
        let mut value = Vec::new();
        write(&mut value);
        if value.is_empty() { Ok(()) } else { self.push(name, &value) }
    }

    /// The path and query.
    pub fn path(&self) -> Bytes {
        Bytes::copy_from_slice(self.path.of(&self.text))
    }

    pub(super) fn line(&self) -> RequestLine<'_> {
        RequestLine {
            method: self.method.of(&self.text),
            scheme: self.scheme.as_bytes(),
            authority: self.authority.of(&self.text),
            path: self.path.of(&self.text),
            protocol: None,
        }
    }

    pub(super) fn write(&self, fields: &mut FieldsWriter<'_>) {
        for (name, value) in &self.fields {
            let name = name.of(&self.text);
            // They were checked when they were added.
            let _ = fields.field(name, value.of(&self.text), Indexing::of_request(name));
        }
    }
}
