//! Common part of the heads of requests to servers, in HTTP/1 and HTTP/2: configured fields, the client's fields, and
//! the URI.
//!
//! Connection-specific fields, those that the client's `Connection` lists, and `HTTP2-Settings` are not passed on (RFC
//! 9110 §7.6.1).

use gale_config::{Diagnostic, Statement};
use gale_engine::configuration::Builder;
use gale_http::configuration::builder::InHttp;
use gale_http::request::Request;
use gale_http::variables::template::Template;
use gale_http_upstream::Http2Request;
use gale_http_upstream::caching::{CacheNote, is_for_cache};
use gale_protocol::http1::request_writer::{Unwritable, write_field, write_field_unless_empty};
use gale_protocol::request::KnownHeader;
use gale_protocol::uri::escape::{Class, escape};

/// Output of a head's fields.
pub(crate) trait WriteFields {
    /// Appends a field.
    ///
    /// # Errors
    /// The field would be misread.
    fn field(&mut self, name: &[u8], value: &[u8]) -> Result<(), Unwritable>;

    /// Appends a field whose value `write` appends, or nothing if that is empty.
    ///
    /// # Errors
    /// The field would be misread.
    fn field_unless_empty(&mut self, name: &[u8], write: impl FnOnce(&mut Vec<u8>)) -> Result<(), Unwritable>;
}

/// Fields in HTTP/1.
impl WriteFields for Vec<u8> {
    fn field(&mut self, name: &[u8], value: &[u8]) -> Result<(), Unwritable> {
        write_field(self, name, value)
    }

    fn field_unless_empty(&mut self, name: &[u8], write: impl FnOnce(&mut Vec<u8>)) -> Result<(), Unwritable> {
        write_field_unless_empty(self, name, write)
    }
}

impl WriteFields for Http2Request {
    fn field(&mut self, name: &[u8], value: &[u8]) -> Result<(), Unwritable> {
        self.push(name, value)
    }

    fn field_unless_empty(&mut self, name: &[u8], write: impl FnOnce(&mut Vec<u8>)) -> Result<(), Unwritable> {
        self.push_unless_empty(name, write)
    }
}

/// `proxy_set_header NAME VALUE;`, `grpc_set_header`.
#[derive(Clone)]
pub(crate) struct SetHeader {
    pub name: Box<[u8]>,
    pub known: Option<KnownHeader>,
    pub value: Template,
}

impl SetHeader {
    /// Parses the directive.
    ///
    /// # Errors
    /// A message in nginx's words.
    pub fn read(builder: &mut Builder, statement: &Statement) -> Result<SetHeader, Diagnostic> {
        let name: &[u8] = &statement.args[0].text;
        let value = builder.http_mut().template(&statement.args[1])?;
        Ok(SetHeader { name: name.into(), known: KnownHeader::from_name(name), value })
    }

    fn is_of(&self, known: Option<KnownHeader>, name: &[u8]) -> bool {
        match (self.known, known) {
            (None, None) => self.name.eq_ignore_ascii_case(name),
            (one, other) => one == other,
        }
    }
}

/// Returns the configured field that replaces the client's.
pub(crate) fn find_set(set_headers: &[SetHeader], known: KnownHeader) -> Option<&SetHeader> {
    set_headers.iter().find(|set| set.known == Some(known))
}

/// Returns the server's name in HTTP/2: the configured one, or else `host`.
pub(crate) fn authority(request: &Request, set_headers: &[SetHeader], host: &[u8]) -> Vec<u8> {
    let set = find_set(set_headers, KnownHeader::Host).map(|set| set.value.evaluate(request));
    set.filter(|set| !set.is_empty()).unwrap_or_else(|| host.to_vec())
}

/// Writes the configured fields, except those for the connection or the framing of the body.
pub(crate) fn write_set_fields(
    request: &Request,
    set_headers: &[SetHeader],
    out: &mut impl WriteFields,
) -> Result<(), Unwritable> {
    for set in set_headers {
        match set.known {
            Some(
                KnownHeader::Host
                | KnownHeader::ContentLength
                | KnownHeader::TransferEncoding
                | KnownHeader::Upgrade
                | KnownHeader::Connection
                | KnownHeader::Http2Settings,
            ) => {}
            _ => out.field_unless_empty(&set.name, |value| set.value.append(request, value))?,
        }
    }
    Ok(())
}

/// Writes the client's fields, except those that the configuration sets and those that must not be passed on.
pub(crate) fn write_client_fields(
    request: &Request,
    set_headers: &[SetHeader],
    out: &mut impl WriteFields,
) -> Result<(), Unwritable> {
    let listed = request.connection_fields();
    let note = request.notes.get::<CacheNote>();
    for (field, name, value) in request.fields() {
        let is_of_connection = matches!(
            field.known,
            Some(
                KnownHeader::Host
                    | KnownHeader::Connection
                    | KnownHeader::ProxyConnection
                    | KnownHeader::ContentLength
                    | KnownHeader::TransferEncoding
                    | KnownHeader::Te
                    // The trailers that it announces are not passed on.
                    | KnownHeader::Trailer
                    | KnownHeader::KeepAlive
                    | KnownHeader::Expect
                    | KnownHeader::Upgrade
                    | KnownHeader::Http2Settings
            )
        );
        if is_of_connection
            || is_for_cache(note, field.known)
            || set_headers.iter().any(|set| set.is_of(field.known, name))
        {
            continue;
        }
        if listed.iter().any(|listed| listed.eq_ignore_ascii_case(name)) && !is_end_to_end(field.known) {
            continue;
        }
        out.field(name, value)?;
    }
    Ok(())
}

/// Returns `true` for fields that a client must not be able to remove by listing them in `Connection`, because servers
/// rely on them.
fn is_end_to_end(known: Option<KnownHeader>) -> bool {
    matches!(
        known,
        Some(
            KnownHeader::Authorization
                | KnownHeader::Cookie
                | KnownHeader::ContentType
                | KnownHeader::XForwardedFor
                | KnownHeader::XForwardedProto
                | KnownHeader::XForwardedHost
                | KnownHeader::XRealIp
                | KnownHeader::Forwarded
                | KnownHeader::Via
        )
    )
}

/// Appends the request's own URI: as the client sent it, or as redirects and rewrites have left it.
pub(crate) fn append_uri(request: &Request, uri: &mut Vec<u8>) {
    if request.has_sent_uri() {
        let sent = request.target_in_origin_form();
        if sent.starts_with(b"?") {
            // `http://host?args`: the path is empty, and a request line must have one (RFC 9112 §3.2.1).
            uri.push(b'/');
        }
        uri.extend_from_slice(sent);
    } else {
        append_changed_uri(request, 0, uri);
    }
}

/// Appends the present URI, without its first bytes, and the arguments.
pub(crate) fn append_changed_uri(request: &Request, from: usize, uri: &mut Vec<u8>) {
    let path = &request.uri[from..];
    if request.is_internal() || request.came_encoded() {
        escape(Class::Uri, path, uri);
    } else {
        uri.extend_from_slice(path);
    }
    if !request.args.is_empty() {
        uri.push(b'?');
        uri.extend_from_slice(&request.args);
    }
}
