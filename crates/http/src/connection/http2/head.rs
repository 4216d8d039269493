//! The head of a response as a block of fields (RFC 9113, section 8.3.2), in nginx's order.
//!
//! A field that HTTP/2 has not, such as `Connection`, is left out; so is one that no peer could read.

use gale_protocol::http2::FieldsWriter;
use gale_protocol::http2::hpack::Indexing;
use gale_protocol::response::ResponseField;
use gale_runtime::Bytes;

use crate::connection::worker::HttpConnections;
use crate::request::response::ResponseHead;

/// Writes the fields of a head; `server` is what `Server` says, if anything.
pub(super) fn write_head(
    head: &ResponseHead,
    server: &[u8],
    connections: &HttpConnections,
    fields: &mut FieldsWriter<'_>,
) {
    let mut known = |field, value: &[u8]| {
        // What cannot be written is left out.
        let _ = fields.known(field, value);
    };
    if !head.has(ResponseField::Server) && !head.omits_server && !server.is_empty() {
        known(ResponseField::Server, server);
    }
    if !head.has(ResponseField::Date) {
        known(ResponseField::Date, &connections.date());
    }
    if !head.content_type.is_empty() {
        known(ResponseField::ContentType, &head.content_type);
    }
    if let Some(length) = head.content_length {
        let _ = fields.known_number(ResponseField::ContentLength, length);
    }
    let mut known = |field, value: &[u8]| {
        let _ = fields.known(field, value);
    };
    if let Some(time) = head.last_modified_text() {
        known(ResponseField::LastModified, &time);
    }
    if !head.location.is_empty() {
        known(ResponseField::Location, &head.location);
    }
    if !head.etag.is_empty() {
        known(ResponseField::ETag, &head.etag);
    }
    if head.allows_ranges {
        known(ResponseField::AcceptRanges, b"bytes");
    }
    for field in head.fields.iter() {
        // What answers the key that the client has not sent.
        if head.status == 101 && field.name.eq_ignore_ascii_case(b"sec-websocket-accept") {
            continue;
        }
        let _ = match field.name.known() {
            Some(name) => fields.known(name, &field.value),
            None => fields.field(&field.name, &field.value, Indexing::of_response(None)),
        };
    }
}

/// Writes fields that somebody gives by name.
pub(super) fn write_fields(list: &[(Bytes, Bytes)], fields: &mut FieldsWriter<'_>) {
    for (name, value) in list {
        let known = ResponseField::from_name(name);
        let _ = fields.field(name, value, Indexing::of_response(known));
    }
}
