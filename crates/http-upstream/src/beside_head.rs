//! Fields that a server sends beside the head of its response: early hints before it, trailers behind the body.

use gale_base::log_level::Level;
use gale_http::request::Request;
use gale_http::request::response::{Field, FieldList, FieldName};
use gale_protocol::response::ResponseField;
use gale_runtime::Bytes;

use crate::settings::{HiddenFields, UpstreamSettings};

/// Interim responses of a server. Early hints are passed to the client, if the location allows it.
#[derive(Default)]
pub(super) struct Interim {
    /// Total length of the hints' heads, in bytes.
    hint_bytes: usize,
    /// True if that exceeds the limit of a head, which was logged.
    is_too_long: bool,
}

impl Interim {
    /// Passes an interim response on. As in nginx, hints are dropped once they exceed the limit of a head together.
    pub fn pass(&mut self, request: &Request, settings: &UpstreamSettings, status: u16, fields: &FieldList) {
        if status != 103 || self.is_too_long {
            return;
        }
        let length_of = |field: &Field| field.name.len() + field.value.len() + b": \r\n".len();
        self.hint_bytes = self.hint_bytes.saturating_add(fields.iter().map(length_of).sum());
        if self.hint_bytes > settings.head_max() {
            self.is_too_long = true;
            request.log(Level::Info, format_args!("upstream sent too big early hints"));
            return;
        }
        let passed = fields.iter().filter(|field| passes_beside_head(&settings.head.hidden, &field.name));
        let passed = passed.map(|field| (Bytes::copy_from_slice(&field.name), Bytes::copy_from_slice(&field.value)));
        request.send_early_hints(&passed.collect::<Vec<_>>());
    }
}

/// Passes a server's trailers to the client.
pub(super) fn pass_trailers(request: &Request, hidden: &HiddenFields, trailers: Vec<(Bytes, Bytes)>) {
    for (name, value) in trailers {
        if passes_beside_head(hidden, &FieldName::from(&*name)) {
            request.add_trailer(&name, value.to_vec());
        }
    }
}

/// True if a field of this name in an interim response or a trailer is passed to clients. It is hidden there if it is
/// hidden in a head, belongs to the connection, or frames a body (RFC 9110 §6.5.1, §8.6).
fn passes_beside_head(hidden: &HiddenFields, name: &FieldName) -> bool {
    let frames = |field: ResponseField| field == ResponseField::ContentLength || field.is_of_connection();
    !hidden.has(name) && !name.known().is_some_and(frames)
}
