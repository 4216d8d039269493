//! The `$upstream_*` variables: what is known of the servers that a request was passed to.
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_module.html#variables>)
//!
//! Servers are separated by commas, groups after internal redirects by colons.

use std::time::Duration;

use bstr::ByteSlice;
use gale_http::request::Request;
use gale_http::upstream::record::{Attempt, Entry, Records};
use gale_http::variables::Variable;

use crate::shared::append::{append_number, append_seconds};

pub(crate) const VARIABLES: &[Variable] = &[
    Variable::named("upstream_addr", |request, _, out| {
        append_each(request, out, |attempt, out| out.extend_from_slice(attempt.peer.as_bytes()))
    }),
    Variable::named("upstream_status", |request, _, out| {
        append_each(request, out, |attempt, out| {
            let status = Some(u64::from(attempt.status)).filter(|&status| status > 0);
            append_or_dash(out, status, append_number);
        })
    }),
    Variable::named("upstream_connect_time", |request, _, out| {
        append_each(request, out, |attempt, out| append_time(out, attempt.connect_time))
    }),
    Variable::named("upstream_header_time", |request, _, out| {
        append_each(request, out, |attempt, out| append_time(out, attempt.header_time))
    }),
    Variable::named("upstream_response_time", |request, _, out| {
        append_each(request, out, |attempt, out| append_time(out, attempt.response_time))
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
    Variable::family("upstream_http_", append_field),
    Variable::family("upstream_trailer_", append_trailer),
    Variable::family("upstream_cookie_", append_cookie),
];

/// Appends a part for each server. `false` if there is none.
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

fn append_or_dash<T>(out: &mut Vec<u8>, value: Option<T>, append: impl Fn(&mut Vec<u8>, T) -> bool) {
    match value {
        Some(value) => {
            append(out, value);
        }
        None => out.push(b'-'),
    }
}

fn append_time(out: &mut Vec<u8>, time: Option<Duration>) {
    append_or_dash(out, time, append_seconds);
}

/// Whether a field's name is that of a variable: in lower case, with underscores for dashes.
fn is_named(field: &[u8], name: &[u8]) -> bool {
    let fold = |byte: u8| if byte == b'-' { b'_' } else { byte.to_ascii_lowercase() };
    field.len() == name.len() && field.iter().zip(name).all(|(&byte, &other)| fold(byte) == other)
}

fn append_joined<'v>(out: &mut Vec<u8>, values: impl Iterator<Item = &'v [u8]>) -> bool {
    let mut is_found = false;
    for value in values {
        if std::mem::replace(&mut is_found, true) {
            out.extend_from_slice(b", ");
        }
        out.extend_from_slice(value);
    }
    is_found
}

fn append_field(request: &Request, name: &[u8], out: &mut Vec<u8>) -> bool {
    let Some(fields) = Records::of(request).and_then(Records::fields) else { return false };
    let fields = fields.iter().filter(|field| is_named(&field.name, name));
    append_joined(out, fields.map(|field| &*field.value))
}

fn append_trailer(request: &Request, name: &[u8], out: &mut Vec<u8>) -> bool {
    let Some(records) = Records::of(request) else { return false };
    let trailers = records.trailers();
    append_joined(out, trailers.iter().filter(|(field, _)| is_named(field, name)).map(|(_, value)| &value[..]))
}

/// The value of a cookie that the server sets.
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
