//! The `$upstream_*` variables: the servers that a request was passed to.
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_module.html#variables>)
//!
//! Commas separate servers, colons separate groups after internal redirects.

use std::net::SocketAddr;

use bstr::ByteSlice;
use gale_http::request::Request;
use gale_http::variables::Variable;
use gale_http_upstream::caching::CacheNote;
use gale_http_upstream::record::{Attempt, Entry, Records};

use super::variables::is_folded;
use crate::shared::append::{append, append_joined, append_number, append_or_dash, append_seconds_or_dash};

pub(crate) const VARIABLES: &[Variable] = &[
    Variable::named("upstream_addr", |request, _, out| {
        append_each(request, out, |attempt, out| out.extend_from_slice(attempt.peer.as_bytes()))
    }),
    Variable::named("upstream_last_addr", append_last_address),
    Variable::named("upstream_last_server_name", |request, _, out| {
        with_last(request, |attempt| !attempt.peer.server().is_empty() && append(out, attempt.peer.server()))
    }),
    Variable::named("upstream_status", |request, _, out| {
        append_each(request, out, |attempt, out| {
            let status = Some(u64::from(attempt.status)).filter(|&status| status > 0);
            append_or_dash(out, status, append_number);
        })
    }),
    Variable::named("upstream_queue_time", |request, _, out| {
        append_each(request, out, |attempt, out| append_seconds_or_dash(out, attempt.queue_time))
    }),
    Variable::named("upstream_connect_time", |request, _, out| {
        append_each(request, out, |attempt, out| append_seconds_or_dash(out, attempt.connect_time))
    }),
    Variable::named("upstream_header_time", |request, _, out| {
        append_each(request, out, |attempt, out| append_seconds_or_dash(out, attempt.header_time))
    }),
    Variable::named("upstream_response_time", |request, _, out| {
        append_each(request, out, |attempt, out| append_seconds_or_dash(out, attempt.response_time))
    }),
    Variable::named("upstream_response_length", |request, _, out| {
        append_each(request, out, |attempt, out| {
            append_number(out, attempt.response_length);
        })
    }),
    Variable::named("upstream_bytes_received", |request, _, out| {
        append_each(request, out, |attempt, out| {
            append_number(out, attempt.bytes_received);
        })
    }),
    Variable::named("upstream_bytes_sent", |request, _, out| {
        append_each(request, out, |attempt, out| {
            append_number(out, attempt.bytes_sent);
        })
    }),
    Variable::named("upstream_cache_status", |request, _, out| {
        let status = request.notes.get::<CacheNote>().and_then(|note| note.status);
        status.is_some_and(|status| append(out, status.name().as_bytes()))
    }),
    Variable::named("upstream_cache_key", |request, _, out| {
        request.notes.get::<CacheNote>().is_some_and(|note| append(out, &note.key))
    }),
    Variable::named("upstream_cache_last_modified", |request, _, out| {
        let value = request.notes.get::<CacheNote>().and_then(|note| note.last_modified.as_deref());
        value.is_some_and(|value| append(out, value))
    }),
    Variable::named("upstream_cache_etag", |request, _, out| {
        let value = request.notes.get::<CacheNote>().and_then(|note| note.etag.as_deref());
        value.is_some_and(|value| append(out, value))
    }),
    Variable::family("upstream_http_", append_field),
    Variable::family("upstream_trailer_", append_trailer),
    Variable::family("upstream_cookie_", append_cookie),
];

/// Appends a part for each server that was tried. Returns `false` if there was none.
fn append_each(request: &Request, out: &mut Vec<u8>, append: impl Fn(&Attempt, &mut Vec<u8>)) -> bool {
    let Some(records) = Records::of(request) else { return false };
    let entries = records.entries();
    let mut separator: &[u8] = b"";
    for entry in entries.iter() {
        match entry {
            Entry::Attempt(attempt) => {
                out.extend_from_slice(separator);
                append(attempt, out);
                separator = b", ";
            }
            Entry::Elsewhere => separator = b" : ",
        }
    }
    if entries.is_empty() {
        return false;
    }
    if separator == b" : " {
        out.extend_from_slice(separator);
    }
    true
}

/// Appends the address of the last server without its port.
fn append_last_address(request: &Request, _: &[u8], out: &mut Vec<u8>) -> bool {
    with_last(request, |attempt| match attempt.peer.parse::<SocketAddr>() {
        Ok(address) => append(out, address.ip().to_string().as_bytes()),
        Err(_) => attempt.peer.starts_with("unix:") && append(out, attempt.peer.as_bytes()),
    })
}

fn with_last(request: &Request, f: impl FnOnce(&Attempt) -> bool) -> bool {
    let Some(records) = Records::of(request) else { return false };
    let entries = records.entries();
    matches!(entries.last(), Some(Entry::Attempt(attempt)) if f(attempt))
}

fn append_field(request: &Request, name: &[u8], out: &mut Vec<u8>) -> bool {
    let Some(fields) = Records::of(request).and_then(Records::fields) else { return false };
    let fields = fields.iter().filter(|field| is_folded(&field.name, name));
    append_joined(out, fields.map(|field| &*field.value), b", ")
}

fn append_trailer(request: &Request, name: &[u8], out: &mut Vec<u8>) -> bool {
    let Some(records) = Records::of(request) else { return false };
    let trailers = records.trailers();
    let values = trailers.iter().filter(|(field, _)| is_folded(field, name)).map(|(_, value)| &value[..]);
    append_joined(out, values, b", ")
}

/// Appends the value of a cookie that the server sets.
fn append_cookie(request: &Request, name: &[u8], out: &mut Vec<u8>) -> bool {
    let Some(fields) = Records::of(request).and_then(Records::fields) else { return false };
    for field in fields.iter().filter(|field| field.name.eq_ignore_ascii_case(b"Set-Cookie")) {
        let pair = field.value.split(|&byte| byte == b';').next().unwrap_or_default();
        let Some(equals) = pair.find_byte(b'=') else { continue };
        if pair[..equals].trim_with(|c| c == ' ').eq_ignore_ascii_case(name) {
            out.extend_from_slice(pair[equals + 1..].trim_with(|c| c == ' '));
            return true;
        }
    }
    false
}
