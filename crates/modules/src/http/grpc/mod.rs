//! grpc: passes requests to gRPC servers, over HTTP/2.
//!   grpc_pass ADDRESS;                                  location, if in location
//!   grpc_set_header NAME VALUE;
//!   health_check … type=grpc …;                         location (`health.rs`)
//!   and the directives of the protocol's groups (`upstream_rows.rs`)
//!                                                       http, server, location
//! (<https://nginx.org/en/docs/http/ngx_http_grpc_module.html>)
//!
//! Bodies pass as they arrive, in both directions, and trailers follow them. A client's `grpc-timeout` bounds the call.
//! Gale's own errors have the same status as in nginx; a gRPC client gets them with `grpc-status` and without an error
//! page.

mod health;

pub(in crate::http) use self::health::{Draft, keep, parse_status};

use std::any::Any;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_config::{Contexts, Custom, Diagnostic, Setting, Statement, Takes};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::Body;
use gale_http::request::filters::Change;
use gale_http::request::phases::Flow;
use gale_http::request::response::FieldName;
use gale_http::variables::Variable;
use gale_http_upstream::settings::{RetryOn, UpstreamOf};
use gale_http_upstream::{Http2Request, KeepHead, Passing, PassingTls, USUALLY_HIDDEN, Wire, pass_on};
use gale_protocol::http1::request_writer::Unwritable;
use gale_protocol::request::KnownHeader;
use gale_runtime::Bytes;
use gale_upstream::{AddressPass, BareAddress, TlsTarget};

use crate::http::gateway;
use crate::http::upstream_head::{SetHeader, append_uri, authority, write_client_fields, write_set_fields};
use crate::http::upstream_pass::{PassRequests, look_up_status};
use crate::http::upstream_rows::{own_row, prepare_tls, upstream_protocol, upstream_table};
use crate::shared::append::append;

/// Header fields that are not passed to clients unless `grpc_pass_header` names them.
const HIDDEN: &[&str] = &["Date", "Server"];

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_grpc",
    directives: &upstream_table!([
        Directive {
            contexts: Contexts::LOCATION.or(Contexts::IF_IN_LOCATION),
            ..own_row(
                "grpc_pass",
                Takes::Exactly(1),
                "",
                "Sets the gRPC server address, or the group of servers, to which requests are passed.",
                &Custom(grpc_pass),
            )
        },
        own_row(
            "grpc_set_header",
            Takes::Exactly(2),
            "",
            "Sets a header field of the request passed to the server; an empty value removes the field.",
            &Custom(set_header),
        ),
    ]),
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart {
        variables: &[Variable::named("grpc_internal_trailers", |request, _, out| {
            wants_trailers(request) && append(out, b"trailers")
        })],
        handlers: PassRequests::<Conf>::HANDLERS,
        filters: &[&Change { applies: |conf: &Conf| conf.pass.is_some(), run: tell_status }],
        ..HttpPart::EMPTY
    }],
};

upstream_protocol! {
    /// The protocol: messages in both directions, as they arrive, with trailers behind them.
    GrpcProtocol, Conf, "grpc",
    has [
        ConnectSettings, SocketBufferSettings, ExchangeSettings, DeadlineSettings, RetrySettings, HeadSettings,
        ServerTlsSettings,
    ],
    retry_on RetryOn::WORDS,
    pass_by pass,
    always {
        http.pass_trailers = Setting::of(true),
        tls.directives.offers_http2 = true,
    }
}

#[derive(Default)]
struct Conf {
    upstream: UpstreamOf<GrpcProtocol>,
    /// Not inherited: a location's content handler is its own.
    pass: Option<AddressPass<Request>>,
    set_headers: Vec<SetHeader>,
    /// Not inherited, like `pass`.
    check: Option<Draft>,
}

fn grpc_pass(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    conf.pass = Some(AddressPass::read(builder, statement, conf.pass.is_some(), without_scheme)?);
    Ok(())
}

/// Splits the scheme, if there is one, off an address.
fn without_scheme(text: &[u8]) -> Result<BareAddress<'_>, &'static str> {
    let behind = |scheme: &[u8]| {
        let (start, rest) = text.split_at_checked(scheme.len())?;
        start.eq_ignore_ascii_case(scheme).then_some(rest)
    };
    let over_tls = behind(b"grpcs://");
    let is_tls = over_tls.is_some();
    Ok(BareAddress { text: over_tls.or(behind(b"grpc://")).unwrap_or(text), is_tls })
}

fn set_header(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    conf.set_headers.push(SetHeader::read(builder, statement)?);
    Ok(())
}

fn merge(conf: &mut dyn Any, parent: Option<&dyn Any>, builder: &mut Builder) -> Result<(), Diagnostic> {
    let conf: &mut Conf = conf.downcast_mut().expect("this module's settings");
    let parent: Option<&Conf> = parent.and_then(|parent| parent.downcast_ref());
    if let Some(parent) = parent.filter(|_| conf.set_headers.is_empty()) {
        conf.set_headers = parent.set_headers.clone();
    }
    if conf.pass.as_ref().is_some_and(AddressPass::may_be_tls) {
        prepare_tls(&mut conf.upstream, builder)?;
    }
    let hidden: Vec<&str> = HIDDEN.iter().chain(USUALLY_HIDDEN).copied().collect();
    conf.upstream.complete(&hidden)?;
    health::complete(conf, builder)
}

/// Delay of the error response behind a call's deadline. Clients end the call at the deadline by themselves; a library
/// that maps HTTP statuses would take an earlier response for a different failure.
const DEADLINE_GRACE: Duration = Duration::from_millis(100);

/// Passes a request on. The error is the status of the response.
async fn pass(request: &mut Request, conf: &Conf) -> Result<Flow, u16> {
    let pass = conf.pass.as_ref().expect("a location with this handler has the setting");
    let target = pass.resolve_tls(request).await.map_err(look_up_status)?;
    let (body, length) = gateway::take_body(request, &conf.upstream, true).await?;
    let is_announced = request.header(KnownHeader::ContentLength).is_some();
    let length = length.filter(|_| is_announced);
    let write = |request: &mut Request, passing: &mut Passing<'_>| {
        let head = head(request, conf, &target, length).map_err(|error| {
            request.log(Level::Error, format_args!("{error} while preparing a request to an upstream"));
            500_u16
        })?;
        passing.uri = head.path();
        passing.wire = Wire::Http2(head);
        Ok(())
    };
    let time_max = request.fields().find(|(_, name, _)| name.eq_ignore_ascii_case(b"grpc-timeout"));
    let time_max = time_max.and_then(|(_, _, value)| parse_timeout(value)?.checked_add(DEADLINE_GRACE));
    let mut passing = Passing {
        selection: target.servers.select(request),
        upstream: target.servers.sticky_upstream(request),
        scheme: if target.tls_host.is_some() { "grpcs://" } else { "grpc://" },
        tls: target.tls_host.as_ref().map(|host| Box::new(PassingTls::new(&conf.upstream, host))),
        write: &write,
        uri: Bytes::new(),
        wire: Wire::Http2(Http2Request::default()),
        body,
        settings: &conf.upstream,
        time_max,
        rewriter: &KeepHead,
        upgrade: None,
        caching: None,
    };
    Ok(pass_on(request, &mut passing).await)
}

/// Returns the head of the request to the server.
fn head(request: &Request, conf: &Conf, target: &TlsTarget, length: Option<u64>) -> Result<Http2Request, Unwritable> {
    let method = if request.counts_as_get() { b"GET" } else { request.method_name() };
    let scheme = if target.tls_host.is_some() { "https" } else { "http" };
    let mut uri = Vec::with_capacity(64);
    append_uri(request, &mut uri);
    let mut head = Http2Request::new(method, scheme, &authority(request, &conf.set_headers, &target.authority), &uri)?;
    head.passes_trailers = true;
    if let Some(length) = length {
        head.push(b"content-length", length.to_string().as_bytes())?;
    }
    let is_te_set = conf.set_headers.iter().any(|set| set.known == Some(KnownHeader::Te));
    if wants_trailers(request) && !is_te_set {
        head.push(b"te", b"trailers")?;
    }
    write_set_fields(request, &conf.set_headers, &mut head)?;
    write_client_fields(request, &conf.set_headers, &mut head)?;
    Ok(head)
}

/// Returns `true` if the client accepts trailers.
fn wants_trailers(request: &Request) -> bool {
    let has_it = |value: &[u8]| {
        let mut options = value.split(|&byte| byte == b',');
        options.any(|option| option.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii() == b"trailers")
    };
    request.header(KnownHeader::Te).is_some_and(|value| has_it(&value.to_ascii_lowercase()))
}

/// Parses `grpc-timeout`: at most eight digits and a unit.
/// (<https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md#requests>)
fn parse_timeout(text: &[u8]) -> Option<Duration> {
    let (unit, digits) = text.split_last()?;
    if digits.is_empty() || digits.len() > 8 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let count = digits.iter().fold(0, |count: u64, digit| count * 10 + u64::from(digit - b'0'));
    Some(match unit {
        b'H' => Duration::from_secs(count * 3600),
        b'M' => Duration::from_secs(count * 60),
        b'S' => Duration::from_secs(count),
        b'm' => Duration::from_millis(count),
        b'u' => Duration::from_micros(count),
        b'n' => Duration::from_nanos(count),
        _ => return None,
    })
}

/// Converts an error response of Gale's own for a gRPC client: it gets the gRPC status beside the HTTP status, which
/// stays, and no error page.
fn tell_status(request: &mut Request, _: &Conf, body: &mut Body) {
    if request.response.is_from_upstream || request.response.status < 400 || !speaks_grpc(request) {
        return;
    }
    let status = request.response.status;
    request.response.content_type = b"application/grpc".as_slice().into();
    request.response.content_length = None;
    let code = grpc_status(status).to_string().into_bytes();
    let message = gale_protocol::http1::response::reason(status);
    request.response.set(FieldName::from(&b"grpc-status"[..]), code);
    request.response.set(FieldName::from(&b"grpc-message"[..]), message.as_bytes().to_vec());
    *body = Body::Empty;
}

fn speaks_grpc(request: &Request) -> bool {
    const TYPE: &[u8] = b"application/grpc";
    request.header(KnownHeader::ContentType).is_some_and(|value| {
        value.split_at_checked(TYPE.len()).is_some_and(|(start, rest)| {
            start.eq_ignore_ascii_case(TYPE) && matches!(rest.first(), None | Some(b'+' | b';' | b' '))
        })
    })
}

/// Returns the gRPC status for an HTTP status, by the mapping that clients use; for statuses that they would map to
/// UNKNOWN, the status that describes Gale's error best.
/// (<https://github.com/grpc/grpc/blob/master/doc/http-grpc-status-mapping.md>)
fn grpc_status(status: u16) -> u8 {
    const UNKNOWN: u8 = 2;
    const DEADLINE_EXCEEDED: u8 = 4;
    const PERMISSION_DENIED: u8 = 7;
    const RESOURCE_EXHAUSTED: u8 = 8;
    const UNIMPLEMENTED: u8 = 12;
    const INTERNAL: u8 = 13;
    const UNAVAILABLE: u8 = 14;
    const UNAUTHENTICATED: u8 = 16;
    match status {
        400 | 405 | 500 => INTERNAL,
        401 => UNAUTHENTICATED,
        403 => PERMISSION_DENIED,
        404 | 501 => UNIMPLEMENTED,
        408 | 504 => DEADLINE_EXCEEDED,
        413 | 414 => RESOURCE_EXHAUSTED,
        429 | 502 | 503 => UNAVAILABLE,
        _ => UNKNOWN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_is_digits_and_a_unit() {
        let milliseconds = |text: &str| parse_timeout(text.as_bytes()).map(|time| time.as_millis());
        assert_eq!(["2H", "3M", "4S", "5m", "6000u", "7000000n"].map(milliseconds), {
            [Some(7_200_000), Some(180_000), Some(4000), Some(5), Some(6), Some(7)]
        });
        assert_eq!(["", "S", "1", "1s", "123456789S", "-1S", "1.5S"].map(milliseconds), [None; 7]);
        assert!(parse_timeout(b"99999999H").is_some());
    }
}
