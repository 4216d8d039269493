//! The head of a response as a block of fields (RFC 9113, section 8.3.2), in nginx's order.
//!
//! A field that HTTP/2 has not, such as `Connection`, is left out; values are as in HTTP/1.

use std::borrow::Cow;
use std::cell::Cell;

use gale_protocol::http1::response::clean_value;
use gale_protocol::http2::FieldsWriter;
use gale_protocol::http2::hpack::Indexing;
use gale_protocol::response::ResponseField;
use gale_runtime::Bytes;

use crate::connection::worker::HttpConnections;
use crate::request::response::ResponseHead;

/// Writes the fields of a head. `server` is the value of `Server`, empty for none. Returns `true` if line ends in
/// values became spaces.
pub(super) fn write_head(
    head: &ResponseHead,
    server: &[u8],
    connections: &HttpConnections,
    fields: &mut FieldsWriter<'_>,
) -> bool {
    let is_changed = Cell::new(false);
    let known = |fields: &mut FieldsWriter<'_>, field, value: &[u8]| {
        let value = clean_value(value);
        is_changed.set(is_changed.get() | matches!(value, Cow::Owned(_)));
        // A field that cannot be written is left out.
        let _ = fields.known(field, &value);
    };
    if !head.has(ResponseField::Server) && !head.omits_server && !server.is_empty() {
        known(fields, ResponseField::Server, server);
    }
    if !head.has(ResponseField::Date) {
        known(fields, ResponseField::Date, &connections.date());
    }
    if !head.content_type.is_empty() {
        known(fields, ResponseField::ContentType, &head.content_type);
    }
    if let Some(length) = head.content_length {
        let _ = fields.known_number(ResponseField::ContentLength, length);
    }
    if let Some(time) = head.last_modified_text() {
        known(fields, ResponseField::LastModified, &time);
    }
    if !head.location.is_empty() {
        known(fields, ResponseField::Location, &head.location);
    }
    if !head.etag.is_empty() {
        known(fields, ResponseField::ETag, &head.etag);
    }
    if head.allows_ranges {
        known(fields, ResponseField::AcceptRanges, b"bytes");
    }
    for field in head.fields.iter() {
        // The answer to a key that the client has not sent.
        if head.status == 101 && field.name.eq_ignore_ascii_case(b"sec-websocket-accept") {
            continue;
        }
        match field.name.known() {
            Some(name) => known(fields, name, &field.value),
            None => is_changed.set(is_changed.get() | write_field(&field.name, &field.value, None, fields)),
        }
    }
    is_changed.get()
}

/// Writes fields by their names.
pub(super) fn write_fields(list: &[(Bytes, Bytes)], fields: &mut FieldsWriter<'_>) {
    for (name, value) in list {
        write_field(name, value, ResponseField::from_name(name), fields);
    }
}

/// Writes a field. Returns `true` if line ends in its value became spaces.
fn write_field(name: &[u8], value: &[u8], known: Option<ResponseField>, fields: &mut FieldsWriter<'_>) -> bool {
    let value = clean_value(value);
    // A field that cannot be written is left out.
    let _ = fields.field(name, &value, Indexing::of_response(known));
    matches!(value, Cow::Owned(_))
}
