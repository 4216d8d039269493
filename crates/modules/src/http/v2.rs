//! http_v2: settings of HTTP/2.
//!   http2 on|off;                                    http, server
//!   http2_max_concurrent_streams N;                  http, server
//!   http2_body_preread_size SIZE;                    http, server
//!   http2_recv_buffer_size SIZE;                     http
//!   http2_chunk_size SIZE;                           http, server, location
//!   http2_flood_limits KIND=N ...;                   http, server; Gale's own
//!   http2_push, http2_max_requests, ...              obsolete: accepted with a warning
//!   $http2
//! (<https://nginx.org/en/docs/http/ngx_http_v2_module.html>)
//!
//! `gale-http` implements the protocol (`connection/http2/`).

use bstr::{BStr, ByteSlice};
use gale_base::units;
use gale_config::{Body, Contexts, Custom, Diagnostic, Inert, One, Statement, Takes, slot, values};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::configuration::http2::Http2Settings;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::variables::Variable;
use gale_protocol::http2::FloodLimits;
use gale_protocol::request::{Scheme, Version};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_v2",
    directives: DIRECTIVES,
    conf: Some(ConfType::of::<Http2Settings>()),
    parts: &[&HttpPart { variables: VARIABLES, ..HttpPart::EMPTY }],
};

const PLACE: Contexts = Contexts::HTTP.or(Contexts::SERVER);
const WITH_LOCATION: Contexts = PLACE.or(Contexts::LOCATION);

/// A window is a number of 31 bits (RFC 9113, section 6.9.1).
const WINDOW_MAX: u64 = 0x7fff_ffff;

const DIRECTIVES: &[Directive] = &[
    Directive {
        name: "http2",
        contexts: PLACE,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Enables or disables HTTP/2.",
        store: &One { parse: values::flag, slot: slot!(Http2Settings, enabled) },
    },
    Directive {
        name: "http2_max_concurrent_streams",
        contexts: PLACE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "128",
        about: "Sets the maximum number of concurrent HTTP/2 streams in a connection.",
        store: &One { parse: streams, slot: slot!(Http2Settings, concurrent_streams_max) },
    },
    Directive {
        name: "http2_body_preread_size",
        contexts: PLACE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "64k",
        about: "Sets the size of the buffer in which a request body is saved before it is processed.",
        store: &One { parse: window, slot: slot!(Http2Settings, body_preread_size) },
    },
    Directive {
        name: "http2_recv_buffer_size",
        contexts: Contexts::HTTP,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "256k",
        about: "Sets the size of the input buffer; at most 16k is received at once.",
        store: &One { parse: values::size, slot: slot!(Http2Settings, recv_buffer_size) },
    },
    Directive {
        name: "http2_chunk_size",
        contexts: WITH_LOCATION,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "8k",
        about: "Sets the maximum size of the chunks into which a response body is sliced.",
        store: &One { parse: chunk, slot: slot!(Http2Settings, chunk_size) },
    },
    Directive {
        name: "http2_flood_limits",
        contexts: PLACE,
        takes: Takes::AtLeast(1),
        body: Body::None,
        default: "resets=500",
        about: "Limits, per ten seconds, actions of a client that cost the server more than the client: resets, pings, \
                settings, empty_frames, window_updates, priorities, unknown_frames, refused_streams.",
        store: &One { parse: flood_limits, slot: slot!(Http2Settings, flood_limits) },
    },
    without_effect("http2_pool_size", PLACE, "No effect: there are no memory pools."),
    without_effect("http2_streams_index_size", PLACE, "No effect: hash tables grow by themselves."),
    obsolete("http2_max_requests", PLACE, Takes::Exactly(1)),
    obsolete("http2_max_field_size", PLACE, Takes::Exactly(1)),
    obsolete("http2_max_header_size", PLACE, Takes::Exactly(1)),
    obsolete("http2_recv_timeout", PLACE, Takes::Exactly(1)),
    obsolete("http2_idle_timeout", PLACE, Takes::Exactly(1)),
    obsolete("http2_max_concurrent_pushes", PLACE, Takes::Exactly(1)),
    obsolete("http2_push", WITH_LOCATION, Takes::Exactly(1)),
    obsolete("http2_push_preload", WITH_LOCATION, Takes::Flag),
];

const fn without_effect(name: &'static str, contexts: Contexts, about: &'static str) -> Directive {
    Directive { name, contexts, takes: Takes::Exactly(1), body: Body::None, default: "", about, store: &Inert }
}

const fn obsolete(name: &'static str, contexts: Contexts, takes: Takes) -> Directive {
    Directive {
        name,
        contexts,
        takes,
        body: Body::None,
        default: "",
        about: "No effect: obsolete, and ignored by nginx as well.",
        store: &Custom(warn_obsolete),
    }
}

/// Obsolete directives with their replacements.
const SUCCESSORS: &[(&str, &str)] = &[
    ("http2_max_requests", "keepalive_requests"),
    ("http2_max_field_size", "large_client_header_buffers"),
    ("http2_max_header_size", "large_client_header_buffers"),
    ("http2_recv_timeout", "client_header_timeout"),
    ("http2_idle_timeout", "keepalive_timeout"),
];

fn warn_obsolete(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let name = &statement.name.text;
    let message = match SUCCESSORS.iter().find(|(old, _)| *name == *old) {
        Some((_, new)) => format!("the \"{name}\" directive is obsolete, use the \"{new}\" directive instead"),
        None => format!("the \"{name}\" directive is obsolete, ignored"),
    };
    builder.note([Diagnostic::warn(message).at(statement.name.span)]);
    Ok(())
}

fn streams(statement: &Statement) -> Result<u32, Diagnostic> {
    Ok(u32::try_from(values::number_between(statement, 1, u64::from(u32::MAX))?).unwrap_or(u32::MAX))
}

fn window(statement: &Statement) -> Result<u32, Diagnostic> {
    let size = values::size(statement)?;
    if size > WINDOW_MAX {
        let word = &statement.args[0];
        return Err(statement.directive_error("has too large a value").at(word.span).hint("the maximum is 2147483647"));
    }
    Ok(size as u32)
}

fn chunk(statement: &Statement) -> Result<u64, Diagnostic> {
    Ok(values::size(statement)?.max(1))
}

fn flood_limits(statement: &Statement) -> Result<FloodLimits, Diagnostic> {
    let mut limits = FloodLimits::default();
    for word in &statement.args {
        let invalid = || {
            let hint = "it must be KIND=N: at most N in ten seconds, for example resets=500";
            Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span).hint(hint)
        };
        let (kind, count) = word.text.split_once_str("=").ok_or_else(invalid)?;
        let count = units::parse_number(count).and_then(|count| u32::try_from(count).ok()).ok_or_else(invalid)?;
        let limit = match kind {
            b"resets" => &mut limits.resets,
            b"pings" => &mut limits.pings,
            b"settings" => &mut limits.settings,
            b"empty_frames" => &mut limits.empty_frames,
            b"window_updates" => &mut limits.window_updates,
            b"priorities" => &mut limits.priorities,
            b"unknown_frames" => &mut limits.unknown_frames,
            b"refused_streams" => &mut limits.refused_streams,
            _ => {
                let message = format!("unknown kind \"{}\"", BStr::new(kind));
                return Err(Diagnostic::emerg(message).at(word.span).hint(
                    "resets, pings, settings, empty_frames, window_updates, priorities, unknown_frames or \
                     refused_streams",
                ));
            }
        };
        *limit = count;
    }
    Ok(limits)
}

const VARIABLES: &[Variable] = &[Variable::named("http2", negotiated)];

/// Appends `h2` over TLS, `h2c` in the clear, otherwise nothing.
fn negotiated(request: &Request, _: &[u8], out: &mut Vec<u8>) -> bool {
    if request.version() != Version::Http2 {
        return false;
    }
    let name: &[u8] = if request.exchange().scheme() == Scheme::Https { b"h2" } else { b"h2c" };
    out.extend_from_slice(name);
    true
}
