//! The head of the request to a server.
//!
//! Neither the configuration nor the client decides the framing: `Content-Length` and `Transfer-Encoding` describe the
//! body that Gale sends.

use bstr::BString;
use gale_config::{Diagnostic, Setting, Statement};
use gale_engine::configuration::Builder;
use gale_http::request::Request;
use gale_http_upstream::Http2Request;
use gale_http_upstream::caching::CacheNote;
use gale_protocol::http1::lists_token;
use gale_protocol::http1::request_writer::{
    Unwritable, write_field, write_field_unless_empty, write_head_end, write_request_line,
};
use gale_protocol::request::{KnownHeader, Version};

use super::{BodyLength, Conf};
use crate::http::upstream_head::{SetHeader, WriteFields, authority, write_client_fields, write_set_fields};

/// Parts of the request line, and the name of the server.
pub(super) struct Line<'r> {
    pub method: &'r [u8],
    pub uri: &'r [u8],
    pub host: &'r [u8],
    pub version: Version,
}

/// Parses `proxy_set_header`.
pub(super) fn set_header(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    conf.set_headers.push(SetHeader::read(builder, statement)?);
    Ok(())
}

/// Returns the protocol of an upgrade: the client's wish, if it is allowed.
pub(super) fn upgrade(request: &Request, allowed: &Setting<Vec<BString>>, conf: &Conf) -> Option<Vec<u8>> {
    if *conf.version.get() < Version::Http11 || !request.is_main() || !request.may_upgrade() {
        return None;
    }
    let set = conf.set_headers.iter().find(|set| set.known == Some(KnownHeader::Upgrade));
    let asked = match set {
        Some(set) => set.value.evaluate(request),
        None => request.asked_upgrade()?.to_vec(),
    };
    if lists_token(&asked, b"h2c") {
        return None;
    }
    let upgrade = match set {
        Some(_) => asked,
        // Of several protocols, the client's first choice that is allowed.
        None => {
            let is_allowed = |token: &&[u8]| allowed.get().iter().any(|allowed| allowed.eq_ignore_ascii_case(token));
            asked.split(|&byte| byte == b',').map(<[u8]>::trim_ascii).find(is_allowed)?.to_vec()
        }
    };
    (!upgrade.is_empty()).then_some(upgrade)
}

/// Writes the whole head.
///
/// # Errors
/// A part of it would be misread.
pub(super) fn write(
    request: &Request,
    conf: &Conf,
    line: &Line<'_>,
    upgrade: &Option<Vec<u8>>,
    out: &mut Vec<u8>,
) -> Result<(), Unwritable> {
    write_request_line(out, line.method, line.uri, line.version)?;
    write_host(request, conf, line, out)?;
    write_framing(request, out)?;
    write_upgrade(request, conf, upgrade, out)?;
    write_set_fields(request, &conf.set_headers, out)?;
    write_cache_conditions(request, conf, out)?;
    if *conf.upstream.request_body.pass_request_headers.get() {
        write_client_fields(request, &conf.set_headers, out)?;
    }
    write_head_end(out);
    Ok(())
}

/// Returns the whole head in HTTP/2.
///
/// # Errors
/// A part of it would be misread.
pub(super) fn http2(
    request: &Request,
    conf: &Conf,
    line: &Line<'_>,
    scheme: &'static str,
) -> Result<Http2Request, Unwritable> {
    let authority = authority(request, &conf.set_headers, line.host);
    let mut head = Http2Request::new(line.method, scheme, &authority, line.uri)?;
    if let Some(BodyLength(length, false)) = request.notes.get::<BodyLength>() {
        head.field(b"content-length", length)?;
    }
    write_set_fields(request, &conf.set_headers, &mut head)?;
    write_cache_conditions(request, conf, &mut head)?;
    if *conf.upstream.request_body.pass_request_headers.get() {
        write_client_fields(request, &conf.set_headers, &mut head)?;
    }
    Ok(head)
}

/// Writes the cache's conditions for a revalidation or for the rest of a response, unless the configuration sets fields
/// with these names.
fn write_cache_conditions(request: &Request, conf: &Conf, out: &mut impl WriteFields) -> Result<(), Unwritable> {
    let Some(note) = request.notes.get::<CacheNote>() else { return Ok(()) };
    let is_set = |known| conf.set_headers.iter().any(|set| set.known == Some(known));
    let part = note.part.as_ref();
    for (known, value) in [
        (KnownHeader::IfModifiedSince, note.last_modified.as_ref()),
        (KnownHeader::IfNoneMatch, note.etag.as_ref()),
        (KnownHeader::Range, part.map(|part| &part.range)),
        (KnownHeader::IfRange, part.map(|part| &part.if_range)),
    ] {
        if let Some(value) = value.filter(|_| !is_set(known)) {
            out.field(known.name().as_bytes(), value)?;
        }
    }
    Ok(())
}

/// Writes the head of a health check, which has no client: only the configured fields.
///
/// # Errors
/// A part of it would be misread.
pub(super) fn write_check(
    request: &Request,
    conf: &Conf,
    line: &Line<'_>,
    keeps_alive: bool,
    out: &mut Vec<u8>,
) -> Result<(), Unwritable> {
    write_request_line(out, line.method, line.uri, line.version)?;
    write_host(request, conf, line, out)?;
    match (keeps_alive, line.version) {
        (false, Version::Http11) => write_field(out, b"Connection", b"close")?,
        (true, Version::Http10) => write_field(out, b"Connection", b"keep-alive")?,
        _ => {}
    }
    write_set_fields(request, &conf.set_headers, out)?;
    write_head_end(out);
    Ok(())
}

/// As above, in HTTP/2.
///
/// # Errors
/// A part of it would be misread.
pub(super) fn http2_check(
    request: &Request,
    conf: &Conf,
    line: &Line<'_>,
    scheme: &'static str,
) -> Result<Http2Request, Unwritable> {
    let authority = authority(request, &conf.set_headers, line.host);
    let mut head = Http2Request::new(line.method, scheme, &authority, line.uri)?;
    write_set_fields(request, &conf.set_headers, &mut head)?;
    Ok(head)
}

/// Writes the `Host` field: the configured value, or else the host in `proxy_pass`.
fn write_host(request: &Request, conf: &Conf, line: &Line<'_>, out: &mut Vec<u8>) -> Result<(), Unwritable> {
    let host = conf.set_headers.iter().find(|set| set.known == Some(KnownHeader::Host));
    match host {
        None => write_field(out, b"Host", line.host),
        Some(set) => {
            let before = out.len();
            write_field_unless_empty(out, &set.name, |value| set.value.append(request, value))?;
            if out.len() == before && line.version >= Version::Http11 {
                write_field(out, b"Host", line.host)?;
            }
            Ok(())
        }
    }
}

/// Writes the length of the body, or `Transfer-Encoding: chunked`.
fn write_framing(request: &Request, out: &mut Vec<u8>) -> Result<(), Unwritable> {
    match request.notes.get::<BodyLength>() {
        Some(BodyLength(_, true)) => write_field(out, b"Transfer-Encoding", b"chunked"),
        Some(BodyLength(length, false)) => write_field(out, b"Content-Length", length),
        None => Ok(()),
    }
}

/// Writes `Upgrade` and `Connection`: for an upgrade, or as configured.
fn write_upgrade(
    request: &Request,
    conf: &Conf,
    upgrade: &Option<Vec<u8>>,
    out: &mut Vec<u8>,
) -> Result<(), Unwritable> {
    if let Some(token) = upgrade {
        write_field(out, b"Upgrade", token)?;
    }
    let set = conf.set_headers.iter().find(|set| set.known == Some(KnownHeader::Connection));
    match set {
        // Many configurations for nginx set `upgrade` for all requests; it is left out without an `Upgrade` field.
        Some(set) => {
            let value = set.value.text(request);
            if value.is_empty() {
                // An empty `Connection` is nginx's way to keep connections.
                write_upgrade_option(upgrade, out)?;
            } else if upgrade.is_some() || !lists_token(&value, b"upgrade") {
                write_field(out, b"Connection", &value)?;
            }
        }
        None => write_upgrade_option(upgrade, out)?,
    }
    Ok(())
}

/// Writes the connection option without which `Upgrade` has no meaning. (RFC 9110 §7.8)
fn write_upgrade_option(upgrade: &Option<Vec<u8>>, out: &mut Vec<u8>) -> Result<(), Unwritable> {
    if upgrade.is_some() { write_field(out, b"Connection", b"upgrade") } else { Ok(()) }
}
