//! proxy: passes requests to HTTP servers.
//!   proxy_pass URL;                              location, if in location, limit_except
//!   proxy_set_header NAME VALUE;  proxy_method METHOD;  proxy_http_version 1.0|1.1|2;  proxy_set_body TEXT;
//!   proxy_redirect default|off|FROM TO;  proxy_cookie_domain …;  proxy_cookie_path …;  proxy_cookie_flags …;
//!   proxy_upgrade TOKEN ...|off;  proxy_pass_trailers on|off;  proxy_protocol on|off|v2;
//!   health_check [PARAMETER ...];                location
//!   match NAME { ... }                           http
//!   and the directives of the protocol's groups (`upstream_rows.rs`)
//!                                                http, server, location
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html>)
//!
//! Requests to servers are unambiguous: Gale itself writes the length of the body, removes connection-specific fields
//! of the client, and refuses anything that cannot be written without ambiguity. WebSockets pass without configuration;
//! other protocols only if `proxy_upgrade` names them, and h2c never, since requests inside it would evade access
//! rules.

mod cookies;
mod head;
mod health;
mod matching;
mod redirect;
mod target;

use std::any::Any;
use std::cell::Cell;
use std::net::IpAddr;
use std::sync::Arc;

use bstr::BString;
use gale_base::log_level::Level;
use gale_config::{
    Body as BlockBody, Contexts, Custom, Diagnostic, One, OneWith, Setting, Statement, Takes, slot, values,
};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::phases::Flow;
use gale_http::request::request_body::read_body;
use gale_http::request::response::ShortText;
use gale_http::variables::Variable;
use gale_http::variables::template::Template;
use gale_http_upstream::caching::{CacheNote, Consulted, Serving};
use gale_http_upstream::http1::{Chunked, Http1Reader};
use gale_http_upstream::receiving::ResponseReader;
use gale_http_upstream::sending::{BodyFraming, RequestBody, Unframed};
use gale_http_upstream::settings::{HeadSettings, RetryOn, ServerTlsSettings, UpstreamOf};
use gale_http_upstream::{
    Alone, HeadRewriter, Http2Request, Passing, PassingTls, ServerNames, USUALLY_HIDDEN, Wire, pass_on,
};
use gale_protocol::http1::request_writer::Unwritable;
use gale_protocol::request::{KnownHeader, Method, Version};
use gale_runtime::Bytes;

use self::cookies::{CookieFlags, Rewrites};
use self::redirect::Redirects;
use self::target::{Pass, Target};
use crate::http::cache_rows;
use crate::http::upstream_head::SetHeader;
use crate::http::upstream_pass::{BodySource, PassRequests, body_source, consult_cache, note_store, serving};
use crate::http::upstream_rows::{self, own_row as row, upstream_protocol, upstream_table};
use crate::shared::append::append;
use crate::shared::tls_client::template;

/// Header fields that are not passed to clients unless `proxy_pass_header` names them.
const HIDDEN: &[&str] = &["Date", "Server", "X-Pad"];

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_proxy",
    directives: &upstream_table!([
        Directive {
            name: "proxy_pass",
            contexts: Contexts::LOCATION.or(Contexts::IF_IN_LOCATION).or(Contexts::LIMIT_EXCEPT),
            takes: Takes::Exactly(1),
            body: BlockBody::None,
            default: "",
            about: "Sets the protocol and address of the server, or the group of servers, to which requests are \
                    passed.",
            store: &Custom(target::proxy_pass),
        },
        Directive {
            name: "health_check",
            contexts: Contexts::LOCATION,
            takes: Takes::AtLeast(0),
            body: BlockBody::None,
            default: "",
            about: "Enables periodic health checks of the servers to which the surrounding location passes \
                    requests.",
            store: &Custom(health::health_check),
        },
        Directive {
            name: "match",
            contexts: Contexts::HTTP,
            takes: Takes::Exactly(1),
            body: BlockBody::Block,
            default: "",
            about: "Defines the conditions that a response to a health check must meet.",
            store: &Custom(matching::match_block),
        },
        row(
            "proxy_set_header",
            Takes::Exactly(2),
            "",
            "Sets a header field of the request passed to the server; an empty value removes the field.",
            &Custom(head::set_header),
        ),
        row(
            "proxy_method",
            Takes::Exactly(1),
            "",
            "Sets the HTTP method of the request passed to the server, instead of the client's.",
            &OneWith { parse: template, slot: slot!(Conf, method) },
        ),
        row(
            "proxy_http_version",
            Takes::Exactly(1),
            "1.1",
            "Sets the HTTP version for requests to servers.",
            &One { parse: http_version, slot: slot!(Conf, version) },
        ),
        row(
            "proxy_set_body",
            Takes::Exactly(1),
            "",
            "Sets the body of the request passed to the server, instead of the client's.",
            &OneWith { parse: template, slot: slot!(Conf, body) },
        ),
        row(
            "proxy_redirect",
            Takes::Between(1, 2),
            "",
            "Replaces a text in the Location and Refresh response header fields: default, off, or a text and its \
             replacement.",
            &Custom(redirect::proxy_redirect),
        ),
        row(
            "proxy_cookie_domain",
            Takes::Between(1, 2),
            "",
            "Replaces a text in the domain attribute of cookies that servers set; off changes nothing.",
            &Custom(cookies::cookie_domain),
        ),
        row(
            "proxy_cookie_path",
            Takes::Between(1, 2),
            "",
            "Replaces a text in the path attribute of cookies that servers set; off changes nothing.",
            &Custom(cookies::cookie_path),
        ),
        row(
            "proxy_cookie_flags",
            Takes::Between(1, 4),
            "",
            "Sets or removes flags of cookies that servers set.",
            &Custom(cookies::cookie_flags),
        ),
        row(
            "proxy_upgrade",
            Takes::AtLeast(1),
            "websocket",
            "Sets the protocols to which a client may upgrade through the proxy; off leaves upgrades to \
             proxy_set_header.",
            &One { parse: upgrades, slot: slot!(Conf, upgrades) },
        ),
        row(
            "proxy_send_lowat",
            Takes::Exactly(1),
            "",
            "No effect on Linux, as in nginx.",
            &OneWith { parse: upstream_rows::send_lowat, slot: slot!(Conf, send_lowat) },
        ),
    ]),
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart {
        variables: &[
            Variable::named("proxy_host", |request, _, out| with_target(request, |target| append(out, &target.host)))
                .changeable(),
            Variable::named("proxy_port", |request, _, out| with_target(request, |target| append(out, &target.port)))
                .changeable(),
            Variable::named("proxy_uri", append_proxy_uri),
            Variable::named("proxy_add_x_forwarded_for", append_x_forwarded_for),
            Variable::named("proxy_add_forwarded", append_forwarded),
            Variable::named("proxy_internal_body_length", |request, _, out| {
                request.notes.get::<BodyLength>().is_some_and(|length| append(out, &length.0))
            }),
            Variable::named("proxy_internal_chunked", |request, _, out| {
                request.notes.get::<BodyLength>().is_some_and(|length| length.1 && append(out, b"chunked"))
            }),
        ],
        handlers: PassRequests::<Conf>::HANDLERS,
        reach: Some(note_store::<Conf>),
        ..HttpPart::EMPTY
    }],
};

upstream_protocol! {
    /// The protocol: HTTP, which has all groups.
    HttpProtocol, Conf, "proxy",
    has [
        ConnectSettings, SocketBufferSettings, HttpServerSettings, ExchangeSettings, DeadlineSettings, RetrySettings,
        HeadSettings, RequestBodySettings, ResponseBodySettings, CacheSettings, StaleSettings, StoreSettings,
        ServerTlsSettings,
    ],
    retry_on RetryOn::WORDS,
    pass_by pass,
    handler {
        fn rewriter(&self) -> &dyn HeadRewriter {
            self
        }

        fn prepare(&self, request: &mut Request) -> bool {
            let known = self.pass.as_ref().and_then(target::Pass::known);
            known.is_some_and(|target| {
                // Variables in the key may use the target.
                request.notes.put(Arc::clone(target));
                true
            })
        }
    }
}

#[derive(Default)]
pub(super) struct Conf {
    upstream: UpstreamOf<HttpProtocol>,
    /// Not inherited: a location's content handler is its own.
    pass: Option<Pass>,
    set_headers: Vec<SetHeader>,
    method: Setting<Template>,
    version: Setting<Version>,
    body: Setting<Template>,
    redirects: Redirects,
    cookie_domains: Rewrites,
    cookie_paths: Rewrites,
    cookie_flags: CookieFlags,
    upgrades: Setting<Vec<BString>>,
    send_lowat: Setting<u64>,
    /// Not inherited, like `pass`.
    check: Option<health::Draft>,
    /// The `match` blocks, which exist in the http block only.
    matches: Vec<Arc<matching::Match>>,
}

/// Length of the request's body as text, and `true` if it is unknown.
struct BodyLength(Vec<u8>, bool);

fn http_version(statement: &Statement) -> Result<Version, Diagnostic> {
    values::enumeration(statement, &[("1.0", Version::Http10), ("1.1", Version::Http11), ("2", Version::Http2)])
}

fn upgrades(statement: &Statement) -> Result<Vec<BString>, Diagnostic> {
    let words = &statement.args;
    if let [word] = &words[..]
        && &**word.text == b"off"
    {
        return Ok(Vec::new());
    }
    for word in words {
        if word.text.eq_ignore_ascii_case(b"h2c") || word.text.eq_ignore_ascii_case(b"off") {
            let error = Diagnostic::emerg(format!("invalid value \"{}\"", word.text)).at(word.span);
            return Err(error.hint("requests inside h2c would bypass access rules"));
        }
    }
    Ok(words.iter().map(|word| word.text.clone()).collect())
}

fn merge(conf: &mut dyn Any, parent: Option<&dyn Any>, builder: &mut Builder) -> Result<(), Diagnostic> {
    let conf: &mut Conf = conf.downcast_mut().expect("this module's settings");
    let parent: Option<&Conf> = parent.and_then(|parent| parent.downcast_ref());
    if let Some(parent) = parent {
        if conf.set_headers.is_empty() {
            conf.set_headers = parent.set_headers.clone();
        }
        if !parent.matches.is_empty() {
            conf.matches = parent.matches.clone();
        }
        conf.redirects.inherit(&parent.redirects);
        conf.cookie_domains.inherit(&parent.cookie_domains);
        conf.cookie_paths.inherit(&parent.cookie_paths);
        conf.cookie_flags.inherit(&parent.cookie_flags);
    }
    let hidden: Vec<&str> = HIDDEN.iter().chain(USUALLY_HIDDEN).copied().collect();
    let passes_requests = conf.pass.is_some();
    conf.upstream.group_mut::<ServerTlsSettings>().directives.offers_http2 = *conf.version.get() == Version::Http2;
    if conf.pass.as_ref().is_some_and(target::Pass::may_be_tls) {
        upstream_rows::prepare_tls(&mut conf.upstream, builder)?;
    }
    cache_rows::complete(
        &mut conf.upstream,
        parent.map(|parent| &parent.upstream),
        builder,
        Some("$scheme$proxy_host$proxy_uri"),
    )?;
    upstream_rows::complete_temp_path(&mut conf.upstream, builder, passes_requests);
    conf.upstream.complete(&hidden)?;
    let head: &mut HeadSettings = conf.upstream.group_mut();
    let passed = head.pass_header.get_opt().map(Vec::as_slice).unwrap_or_default();
    head.leaves_server_field = passed.iter().any(|name| name.eq_ignore_ascii_case(b"Server"));
    health::complete(conf, builder)
}

/// Passes a request on. The error is the status of the response.
async fn pass(request: &mut Request, conf: &Conf) -> Result<Flow, u16> {
    let pass = conf.pass.as_ref().expect("a location with this handler has the setting");
    // The rare lookup that waits is kept out of this future, whose size every request pays for.
    let resolved;
    let target = match pass.known() {
        Some(target) => target,
        None => {
            resolved = Box::pin(pass.resolve(request)).await?;
            &resolved
        }
    };
    // Variables may use the target.
    request.notes.put(Arc::clone(target));
    let serving = Serving { converts_head: true, ..serving(&conf.upstream, conf) };
    let caching = match consult_cache(request, serving).await {
        Consulted::Answer(flow) => return Ok(flow),
        Consulted::Ask(caching) => caching,
    };
    let body = match body_at_once(request, conf) {
        Some(body) => body,
        None => Box::pin(store_body(request, conf)).await?,
    };
    // The reading of a response depends on the request's method.
    let method = Cell::new(Method::Get);
    let reader = || -> Box<dyn ResponseReader> { Box::new(Http1Reader::new(method.get(), conf.upstream.head_max())) };
    let write = |request: &mut Request, passing: &mut Passing<'_>| {
        write_request(request, conf, target, passing).map(|asked| method.set(asked))
    };
    // The block keeps the values that are only passed through out of the future.
    let mut passing = {
        let SentBody { body, framing } = body;
        let wire = match *conf.version.get() {
            Version::Http2 => Wire::Http2(Http2Request::default()),
            _ => Wire::Alone(Alone { head: Bytes::new(), framing, reader: &reader, reuses_connections: true }),
        };
        Passing {
            selection: target.select(request),
            upstream: target.sticky_upstream(request),
            scheme: if target.is_tls { "https://" } else { "http://" },
            tls: target.is_tls.then(|| Box::new(PassingTls::new(&conf.upstream, &target.host))),
            write: &write,
            uri: Bytes::new(),
            wire,
            body,
            settings: &conf.upstream,
            time_max: None,
            rewriter: conf,
            upgrade: None,
            caching,
        }
    };
    Ok(pass_on(request, &mut passing).await)
}

/// Writes the head of the request to the server. Returns the method.
fn write_request(
    request: &mut Request,
    conf: &Conf,
    target: &Target,
    passing: &mut Passing<'_>,
) -> Result<Method, u16> {
    let own = conf.body.get_opt().map(|template| template.evaluate(request));
    if let Some(own) = &own {
        request.notes.put(BodyLength(own.len().to_string().into_bytes(), false));
    }
    let head = write_head(request, conf, target, own.unwrap_or_default())?;
    match head.text {
        HeadText::Http1(head) => passing.set_head(head),
        HeadText::Http2(head, own) => {
            passing.wire = Wire::Http2(head);
            if let Some(own) = own {
                passing.body = RequestBody::Own(own);
            }
        }
    }
    passing.uri = head.uri;
    passing.upgrade = head.upgrade;
    // The response to a HEAD that the client did not send must not be cached for its GET.
    if head.method == Method::Head && !request.is_head() {
        passing.caching = None;
    }
    Ok(head.method)
}

/// The head of a request to a server.
struct RequestHead {
    /// The whole head.
    text: HeadText,
    /// The target within it.
    uri: Bytes,
    /// The method, as far as reading the response depends on it.
    method: Method,
    /// The protocol of an upgrade.
    upgrade: Option<Bytes>,
}

/// A head, and the configured body.
enum HeadText {
    Http1(Bytes),
    Http2(Http2Request, Option<Bytes>),
}

/// Returns the head of the request to the server.
fn write_head(request: &Request, conf: &Conf, target: &Target, own_body: Vec<u8>) -> Result<RequestHead, u16> {
    request.worker().with_scratch(|uri| {
        target.append_uri(request, uri);
        write_head_for(request, conf, target, uri, own_body)
    })
}

/// As above, for this URI.
fn write_head_for(
    request: &Request,
    conf: &Conf,
    target: &Target,
    uri: &[u8],
    own_body: Vec<u8>,
) -> Result<RequestHead, u16> {
    let mut method = ShortText::new();
    match conf.method.get_opt() {
        // HEAD was changed to GET, so that the response can be cached; as in nginx this takes precedence over
        // `proxy_method`.
        _ if request.notes.get::<CacheNote>().is_some_and(|note| note.converts_head) => {
            method.extend_from_slice(b"GET");
        }
        Some(template) => method.extend_from_slice(&template.text(request)),
        None if request.counts_as_get() => method.extend_from_slice(b"GET"),
        None => method.extend_from_slice(request.method_name()),
    }
    let line = head::Line { method: &method, uri, host: &target.host, version: *conf.version.get() };
    let refuse = |error: Unwritable| {
        request.log(Level::Error, format_args!("{error} while preparing a request to an upstream"));
        500_u16
    };
    let known_method = if request.is_head() && &*method != b"GET" { Method::Head } else { Method::from_name(&method) };
    if line.version == Version::Http2 {
        let scheme = if target.is_tls { "https" } else { "http" };
        let head = head::http2(request, conf, &line, scheme).map_err(refuse)?;
        let own = conf.body.get_opt().map(|_| Bytes::from(own_body));
        return Ok(RequestHead {
            uri: head.path(),
            text: HeadText::Http2(head, own),
            method: known_method,
            upgrade: None,
        });
    }
    let upgrade = head::upgrade(request, &conf.upgrades, conf);
    let bytes = request.worker().with_scratch(|head| {
        head::write(request, conf, &line, &upgrade, head).map_err(refuse)?;
        head.extend_from_slice(&own_body);
        Ok::<_, u16>(Bytes::copy_from_slice(head))
    })?;
    let uri_start = method.len() + 1;
    Ok(RequestHead {
        uri: bytes.slice(uri_start..uri_start + uri.len()),
        text: HeadText::Http1(bytes),
        method: known_method,
        upgrade: upgrade.map(Bytes::from),
    })
}

/// The body to send.
struct SentBody {
    /// Its source.
    body: RequestBody,
    framing: &'static dyn BodyFraming,
}

/// No body, or a configured one, which is written together with the head.
const WITHOUT: SentBody = SentBody { body: RequestBody::None, framing: &Unframed };

/// Returns the body, unless it has to be read completely first.
fn body_at_once(request: &mut Request, conf: &Conf) -> Option<SentBody> {
    let declared = request.declared_body_length();
    if conf.body.is_set() {
        // A configured body may contain `$request_body`.
        let is_read = request.body.is_some() || request.body_is_gone() || declared == Some(0) || !request.is_main();
        return is_read.then_some(WITHOUT);
    }
    match body_source(request, &conf.upstream, *conf.version.get() >= Version::Http11) {
        BodySource::None => {
            // A body that is not passed on has no length in the variable either.
            if declared == Some(0) && request.header(KnownHeader::ContentLength).is_some() {
                request.notes.put(BodyLength(b"0".to_vec(), false));
            } else {
                request.notes.take::<BodyLength>();
            }
            Some(WITHOUT)
        }
        BodySource::Client => {
            let (length, framing): (_, &dyn BodyFraming) = match declared {
                Some(length) => (BodyLength(length.to_string().into_bytes(), false), &Unframed),
                None => (BodyLength(Vec::new(), true), &Chunked),
            };
            request.notes.put(length);
            Some(SentBody { body: RequestBody::Client, framing })
        }
        BodySource::Stored | BodySource::Kept => None,
    }
}

/// Reads the whole body.
async fn store_body(request: &mut Request, conf: &Conf) -> Result<SentBody, u16> {
    let is_announced = request.header(KnownHeader::ContentLength).is_some();
    let is_chunked = request.declared_body_length().is_none();
    let stored = read_body(request).await.map_err(|error| error.status())?;
    if conf.body.is_set() {
        return Ok(WITHOUT);
    }
    if !*conf.upstream.request_body.pass_request_body.get() {
        request.notes.take::<BodyLength>();
        return Ok(WITHOUT);
    }
    let length = stored.length();
    if length > 0 || is_announced || is_chunked && request.is_main() {
        request.notes.put(BodyLength(length.to_string().into_bytes(), false));
    }
    Ok(SentBody { body: RequestBody::Stored(stored), framing: &Unframed })
}

impl HeadRewriter for Conf {
    fn location(&self, request: &Request, value: &[u8]) -> Option<Vec<u8>> {
        self.redirects.apply(request, value, self.pass.as_ref())
    }

    fn cookie(&self, request: &Request, value: &[u8]) -> Option<Vec<u8>> {
        cookies::rewrite(request, value, &self.cookie_domains, &self.cookie_paths, &self.cookie_flags)
    }

    fn server_names(&self, request: &Request) -> Option<ServerNames> {
        request.notes.get::<Arc<Target>>().map(|target| target.names(request))
    }
}

fn with_target(request: &Request, f: impl FnOnce(&Target) -> bool) -> bool {
    request.notes.get::<Arc<Target>>().is_some_and(|target| f(target))
}

/// Appends the URI of the request to the server: the path and the arguments.
fn append_proxy_uri(request: &Request, _: &[u8], out: &mut Vec<u8>) -> bool {
    with_target(request, |target| {
        target.append_uri(request, out);
        true
    })
}

/// Appends the client's `Forwarded` field and the client itself. (RFC 7239)
fn append_forwarded(request: &Request, _: &[u8], out: &mut Vec<u8>) -> bool {
    for (_, _, value) in request.fields().filter(|(_, name, _)| name.eq_ignore_ascii_case(b"Forwarded")) {
        out.extend_from_slice(value);
        out.extend_from_slice(b", ");
    }
    out.extend_from_slice(b"for=");
    let client = request.remote_text();
    match client.parse::<IpAddr>() {
        Ok(IpAddr::V4(_)) => out.extend_from_slice(client.as_bytes()),
        Ok(IpAddr::V6(_)) => out.extend_from_slice(format!("\"[{client}]\"").as_bytes()),
        // A client on a UNIX-domain socket. (section 6.2)
        Err(_) => out.extend_from_slice(b"unknown"),
    }
    if !request.host.is_empty() {
        out.extend_from_slice(b";host=\"");
        for &byte in &request.host {
            if matches!(byte, b'"' | b'\\') {
                out.push(b'\\');
            }
            out.push(byte);
        }
        if let Some(port) = request.parsed.authority.and_then(|authority| authority.port) {
            out.extend_from_slice(format!(":{port}").as_bytes());
        }
        out.push(b'"');
    }
    out.extend_from_slice(b";proto=");
    append(out, request.exchange().scheme().name().as_bytes())
}

/// Appends the client's `X-Forwarded-For` field and the client's address.
fn append_x_forwarded_for(request: &Request, _: &[u8], out: &mut Vec<u8>) -> bool {
    let fields = request.fields().filter(|(field, _, _)| field.known == Some(KnownHeader::XForwardedFor));
    for (_, _, value) in fields {
        out.extend_from_slice(value);
        out.extend_from_slice(b", ");
    }
    append(out, request.remote_text().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::upstream_pass::tests::assert_small;

    #[test]
    fn a_request_that_is_passed_on_takes_one_small_allocation() {
        assert_small(|(request, conf)| pass(request, conf));
    }
}
