//! The head of the request to a server.
//!
//! Framing is never the configuration's or the client's to decide: `Content-Length` and `Transfer-Encoding` say what
//! Gale sends. Fields of the client's connection, those that its `Connection` lists and `HTTP2-Settings` are not passed
//! on (RFC 9110 §7.6.1).

use bstr::BString;
use gale_config::{Diagnostic, Setting, Statement};
use gale_engine::configuration::Builder;
use gale_http::configuration::builder::InHttp;
use gale_http::request::Request;
use gale_http::upstream::caching::{CacheNote, is_for_cache};
use gale_http::variables::template::Template;
use gale_protocol::http1::names_option;
use gale_protocol::http1::request_writer::{
    Unwritable, write_field, write_field_unless_empty, write_head_end, write_request_line,
};
use gale_protocol::request::{KnownHeader, Version};

use super::{BodyLength, Conf};

/// `proxy_set_header NAME VALUE;`
#[derive(Clone)]
pub(super) struct SetHeader {
    name: Box<[u8]>,
    known: Option<KnownHeader>,
    value: Template,
}

/// The request line, and the name of the server.
pub(super) struct Line<'r> {
    pub method: &'r [u8],
    pub uri: &'r [u8],
    pub host: &'r [u8],
    pub version: Version,
}

/// `proxy_set_header`
pub(super) fn set_header(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let name: &[u8] = &statement.args[0].text;
    let value = builder.http_mut().template(&statement.args[1])?;
    conf.set_headers.push(SetHeader { name: name.into(), known: KnownHeader::from_name(name), value });
    Ok(())
}

/// The protocol that the server is asked to change to: what the client asks for, if it may.
pub(super) fn upgrade(request: &Request, allowed: &Setting<Vec<BString>>, conf: &Conf) -> Option<Vec<u8>> {
    if *conf.version.get() < Version::Http11 || !request.is_main() || !request.may_upgrade() {
        return None;
    }
    let set = conf.set_headers.iter().find(|set| set.known == Some(KnownHeader::Upgrade));
    let token = match set {
        Some(set) => set.value.evaluate(request),
        None => {
            let token = request.asked_upgrade()?;
            let is_allowed = allowed.get().iter().any(|allowed| allowed.eq_ignore_ascii_case(token));
            is_allowed.then(|| token.to_vec())?
        }
    };
    let is_h2c = token.split(|&byte| byte == b',').any(|token| token.trim_ascii().eq_ignore_ascii_case(b"h2c"));
    (!token.is_empty() && !is_h2c).then_some(token)
}

/// Writes the whole head.
///
/// # Errors
/// A part of it would be read as something else.
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
    write_set_fields(request, conf, out)?;
    write_cache_conditions(request, conf, out)?;
    if *conf.upstream.pass_request_headers.get() {
        write_client_fields(request, conf, out)?;
    }
    write_head_end(out);
    Ok(())
}

/// What the cache asks with whether something has changed, unless the configuration has fields of that name.
fn write_cache_conditions(request: &Request, conf: &Conf, out: &mut Vec<u8>) -> Result<(), Unwritable> {
    let Some(note) = request.notes.get::<CacheNote>() else { return Ok(()) };
    let is_set = |known| conf.set_headers.iter().any(|set| set.known == Some(known));
    for (known, value) in [(KnownHeader::IfModifiedSince, &note.last_modified), (KnownHeader::IfNoneMatch, &note.etag)]
    {
        if let Some(value) = value.as_ref().filter(|_| !is_set(known)) {
            write_field(out, known.name().as_bytes(), value)?;
        }
    }
    Ok(())
}

/// Writes the head of a health check, which nobody has asked for: the fields that the configuration sets.
///
/// # Errors
/// A part of it would be read as something else.
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
    write_set_fields(request, conf, out)?;
    write_head_end(out);
    Ok(())
}

/// The fields that the configuration sets, but for those that are about the connection or the body.
fn write_set_fields(request: &Request, conf: &Conf, out: &mut Vec<u8>) -> Result<(), Unwritable> {
    for set in &conf.set_headers {
        match set.known {
            Some(
                KnownHeader::Host
                | KnownHeader::ContentLength
                | KnownHeader::TransferEncoding
                | KnownHeader::Upgrade
                | KnownHeader::Connection
                | KnownHeader::Http2Settings,
            ) => {}
            _ => write_field_unless_empty(out, &set.name, |value| set.value.append(request, value))?,
        }
    }
    Ok(())
}

/// The server's name: what the configuration says, and the one in `proxy_pass` otherwise.
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

/// How long the body is, or that its chunks tell.
fn write_framing(request: &Request, out: &mut Vec<u8>) -> Result<(), Unwritable> {
    match request.notes.get::<BodyLength>() {
        Some(BodyLength(_, true)) => write_field(out, b"Transfer-Encoding", b"chunked"),
        Some(BodyLength(length, false)) => write_field(out, b"Content-Length", length),
        None => Ok(()),
    }
}

/// What becomes of the connection: another protocol, or what the configuration says.
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
        // Set by those who know nginx: without the other field it means nothing.
        Some(set) => {
            let value = set.value.evaluate(request);
            if !value.is_empty() && (upgrade.is_some() || !names_option(&value, b"upgrade")) {
                write_field(out, b"Connection", &value)?;
            }
        }
        None if upgrade.is_some() => write_field(out, b"Connection", b"upgrade")?,
        None => {}
    }
    Ok(())
}

/// The client's fields, but for those that are set or are not for the server.
fn write_client_fields(request: &Request, conf: &Conf, out: &mut Vec<u8>) -> Result<(), Unwritable> {
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
                    // The fields that it announces stay here.
                    | KnownHeader::Trailer
                    | KnownHeader::KeepAlive
                    | KnownHeader::Expect
                    | KnownHeader::Upgrade
                    | KnownHeader::Http2Settings
            )
        );
        if is_of_connection
            || is_for_cache(note, field.known)
            || conf.set_headers.iter().any(|set| set.is_of(field.known, name))
        {
            continue;
        }
        if listed.iter().any(|listed| listed.eq_ignore_ascii_case(name)) && !is_end_to_end(field.known) {
            continue;
        }
        write_field(out, name, value)?;
    }
    Ok(())
}

/// Fields that a client must not have taken away by listing them in `Connection`: servers decide by them.
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

impl SetHeader {
    fn is_of(&self, known: Option<KnownHeader>, name: &[u8]) -> bool {
        match (self.known, known) {
            (None, None) => self.name.eq_ignore_ascii_case(name),
            (one, other) => one == other,
        }
    }
}
