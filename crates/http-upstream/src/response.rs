//! Processes a response's head on its way to the client.

use std::rc::Rc;
use std::sync::Arc;

use gale_base::http_date;
use gale_base::log_level::Level;
use gale_base::units;
use gale_http::request::Request;
use gale_http::request::body::Body;
use gale_http::request::phases::Flow;
use gale_http::request::response::{Field, FieldList, FieldName, FieldText, Reason, ShortText};
use gale_protocol::http1::{is_token_byte, lists_token};
use gale_protocol::request::{Method, Scheme, Version};
use gale_protocol::response::ResponseField;
use gale_protocol::uri::split_unsafe;
use gale_runtime::Bytes;

use crate::answering::Answering;
use crate::attempt::Passing;
use crate::body::{Came, NoBody, UpstreamBody};
use crate::caching;
use crate::receiving::{BodyRead, UpstreamHead};
use crate::settings::{HiddenFields, Ignored, UpstreamSettings};
use crate::store::{self, Storing};
use crate::tunnel::UpstreamTunnel;

/// Fields hidden from clients by default, for all protocols.
pub const USUALLY_HIDDEN: &[&str] =
    &["X-Accel-Expires", "X-Accel-Redirect", "X-Accel-Limit-Rate", "X-Accel-Buffering", "X-Accel-Charset"];

/// Rewrites fields that name the server, for `proxy_redirect` and similar directives.
pub trait HeadRewriter {
    /// The new value for a `Location`, or for the URL of a `Refresh`.
    fn location(&self, _request: &Request, _value: &[u8]) -> Option<Vec<u8>> {
        None
    }

    /// The new value for a `Set-Cookie`.
    fn cookie(&self, _request: &Request, _value: &[u8]) -> Option<Vec<u8>> {
        None
    }

    /// The server's names for the URIs of clients; `None` if it has none of its own.
    fn server_names(&self, _request: &Request) -> Option<ServerNames> {
        None
    }
}

/// A server's own names for the URIs of clients.
pub struct ServerNames {
    /// The scheme of its URLs.
    pub scheme: Scheme,
    /// The host, with its port unless that is the default.
    pub host: Arc<[u8]>,
    /// The replaced part of paths; `None` if paths are the same or unknown.
    pub replaced: Option<ReplacedPath>,
}

/// A prefix of clients' paths, and the server's prefix in its place.
pub struct ReplacedPath {
    /// The prefix for clients.
    pub client: Box<[u8]>,
    /// The prefix for the server.
    pub server: Box<[u8]>,
}

/// `X-Accel-Charset`: the charset that a server demands for its response, for the filter `charset`.
/// (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_ignore_headers>)
pub struct AccelCharset(pub ShortText);

/// Rewrites nothing.
pub struct KeepHead;

impl HeadRewriter for KeepHead {}

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

/// Begins the response for a server's head.
pub(super) fn begin(
    request: &mut Request,
    passing: &mut Passing<'_>,
    mut answering: Box<Answering>,
    mut head: Box<UpstreamHead>,
) -> Flow {
    if head.status == 101 || answering.is_tunnel() {
        head.detach();
    }
    if passing.caching.is_some() && answering.is_of_user(request) {
        caching::note_of_user(request);
    }
    if let Some(flow) = caching::revalidate(request, passing, &head) {
        answering.end_early(request);
        return flow;
    }
    let settings = passing.settings;
    let fields = Rc::new(std::mem::take(&mut head.fields));
    answering.records.set_fields(Rc::clone(&fields));
    if let Some(status) = intercept(request, settings, head.status, &fields) {
        caching::tell_intercepted(request, passing, head.status, &fields);
        answering.end_early(request);
        return Flow::Respond(status);
    }
    if let Some(flow) = obey_head(request, settings, &fields) {
        answering.end_early(request);
        return flow;
    }
    let is_buffered = is_buffered(settings, &fields);
    let stored = caching::judge(request, passing, &head, &fields, is_buffered);
    let session = answering.learn_session(request);
    copy_head(request, settings, passing.rewriter, &head, &fields);
    caching::tell_status(request, &settings.cache, None, stored.is_some());
    if let Some(cookie) = session {
        request.response.add(ResponseField::SetCookie, cookie);
    }
    if let Some(upgrade) = head.upgrade.as_ref().filter(|_| head.status == 426)
        && request.version() == Version::Http11
    {
        // The client has to know the protocols that it may change to. (RFC 9110 §15.5.22)
        request.response.add(ResponseField::Upgrade, upgrade.clone());
    }
    if answering.is_tunnel() {
        return tunnel(passing, answering);
    }
    if head.status == 101 {
        return begin_tunnel(request, passing, answering, &head);
    }
    if let Some(stored) = stored {
        return caching::begin(request, passing, answering, &head, stored);
    }
    if caching::asks_for_whole(request) && matches!(request.method(), Method::Get | Method::Head) {
        // The server was asked for the whole response, without the client's conditions.
        caching::finish_head(request, settings);
    } else if *settings.response_body.force_ranges.get() {
        request.response.allows_ranges = true;
        request.response.remove(ResponseField::AcceptRanges);
    }
    request.response.has_trailers = head.may_have_trailers && *settings.http.pass_trailers.get();
    if request.response.has_trailers {
        answering.hidden_in_trailers = Some(Arc::clone(&settings.head.hidden));
    }
    if !is_buffered {
        // An unbuffered response has the server's rate.
        request.set_limit_rate(0);
    }
    let storing = if is_buffered { store::begin(request, passing, &head, &fields) } else { None };
    begin_body(request, passing, answering, &head, is_buffered, storing)
}

/// The status to answer with instead of a server's error that has an error page in the location.
pub(super) fn intercept(
    request: &mut Request,
    settings: &UpstreamSettings,
    status: u16,
    fields: &FieldList,
) -> Option<u16> {
    if status == 404 && settings.answers_not_found {
        return Some(404);
    }
    if !*settings.head.intercept_errors.get() || status < 300 || !has_error_page(request, status) {
        return None;
    }
    if status == 401 {
        for field in fields.iter().filter(|field| field.name.known() == Some(ResponseField::WwwAuthenticate)) {
            request.response.add(field.name.clone(), field.value.clone());
        }
    }
    Some(status)
}

fn first_value(fields: &FieldList, known: ResponseField) -> Option<&[u8]> {
    // Most of these fields are missing in most responses.
    let field = fields.has(known).then(|| fields.iter().find(|field| field.name.known() == Some(known)));
    field.flatten().map(|field| &*field.value)
}

/// Obeys `X-Accel-Limit-Rate`, `X-Accel-Charset` and `X-Accel-Redirect`. Returns the redirect of the last one.
pub(super) fn obey_head(request: &mut Request, settings: &UpstreamSettings, fields: &FieldList) -> Option<Flow> {
    let ignored = settings.head.ignored;
    let rate = first_value(fields, ResponseField::XAccelLimitRate);
    if let Some(rate) = rate.filter(|_| !ignored.has(Ignored::X_ACCEL_LIMIT_RATE))
        && let Some(rate) = units::parse_number(rate)
    {
        request.set_limit_rate(rate);
    }
    let charset = first_value(fields, ResponseField::XAccelCharset).filter(|_| !ignored.has(Ignored::X_ACCEL_CHARSET));
    if let Some(name) = charset.filter(|name| !name.is_empty() && name.iter().all(|&byte| is_token_byte(byte))) {
        request.notes.put(AccelCharset(name.into()));
    }
    let target = first_value(fields, ResponseField::XAccelRedirect);
    let target = target.filter(|_| !ignored.has(Ignored::X_ACCEL_REDIRECT))?;
    Some(redirect(request, fields, target))
}

/// True if the response is read ahead of the client.
fn is_buffered(settings: &UpstreamSettings, fields: &FieldList) -> bool {
    let ignored = settings.head.ignored;
    let text = first_value(fields, ResponseField::XAccelBuffering);
    match text.filter(|_| !ignored.has(Ignored::X_ACCEL_BUFFERING)) {
        Some(text) if text.eq_ignore_ascii_case(b"no") => false,
        Some(text) if text.eq_ignore_ascii_case(b"yes") => true,
        _ => *settings.response_body.buffering.get(),
    }
}

/// Takes a body that has arrived with the head, or begins a stream.
fn begin_body(
    request: &mut Request,
    passing: &Passing<'_>,
    mut answering: Box<Answering>,
    head: &UpstreamHead,
    is_buffered: bool,
    storing: Option<Box<Storing>>,
) -> Flow {
    let mut first: Option<Bytes> = None;
    if request.is_head() {
        // Its length is that of the body that a GET would have.
        answering.end_early(request);
        return Flow::Answer(Body::Stream(Box::new(NoBody(head.length))));
    }
    loop {
        match answering.read_body() {
            Ok(BodyRead::End) => {
                answering.pass_trailers(request);
                answering.finish(request);
                if let Some(storing) = storing {
                    storing.finish_with(request, first.as_ref());
                }
                return Flow::Answer(first.map_or(Body::Empty, Body::Bytes));
            }
            Ok(BodyRead::Piece(piece)) if first.is_none() => first = Some(piece),
            next => {
                let came = Came { first, next };
                let body = UpstreamBody::new(request, passing, answering, head.length, is_buffered, came, storing);
                return Flow::Answer(Body::Stream(Box::new(body)));
            }
        }
    }
}

fn begin_tunnel(request: &mut Request, passing: &Passing<'_>, answering: Box<Answering>, head: &UpstreamHead) -> Flow {
    let is_asked_for = match (&passing.upgrade, &head.upgrade) {
        // The configuration may pass several protocols on, of which the server chooses one.
        (Some(asked), Some(given)) => lists_token(asked, given),
        _ => false,
    };
    if !is_asked_for {
        request.response.clear();
        let message =
            "upstream sent unexpected \"101 Switching Protocols\" while reading response header from upstream";
        request.log(Level::Error, format_args!("{message}"));
        answering.records.last().status = 502;
        answering.give_up();
        return Flow::Respond(502);
    }
    if let Some(token) = &head.upgrade {
        request.response.set(ResponseField::Upgrade, token.clone());
    }
    tunnel(passing, answering)
}

fn tunnel(passing: &Passing<'_>, answering: Box<Answering>) -> Flow {
    Flow::Upgrade(Box::new(UpstreamTunnel::new(answering, *passing.settings.exchange.read_timeout.get())))
}

fn has_error_page(request: &Request, status: u16) -> bool {
    request.scope().core.error_page.get().iter().any(|page| page.status == status)
}

/// `X-Accel-Redirect`: answers from the named location.
fn redirect(request: &mut Request, fields: &FieldList, target: &[u8]) -> Flow {
    request.response.clear();
    for field in fields.iter() {
        match field.name.known() {
            Some(ResponseField::ContentType) => request.outcome.content_type_override = Some((*field.value).into()),
            Some(
                ResponseField::SetCookie
                | ResponseField::ContentDisposition
                | ResponseField::CacheControl
                | ResponseField::AcceptRanges
                | ResponseField::Expires,
            ) => {
                request.response.add(field.name.clone(), field.value.clone());
            }
            _ => {}
        }
    }
    if let Some(name) = target.strip_prefix(b"@") {
        return Flow::Named(name.into());
    }
    let Some((uri, args)) = split_unsafe(target) else {
        request.log(Level::Error, format_args!("unsafe URI \"{}\" was detected", bstr::BStr::new(target)));
        return Flow::Respond(404);
    };
    let args = args.to_vec();
    if !request.is_head() {
        request.become_get();
    }
    Flow::Redirect { uri, args: Some(args) }
}

/// Sets the status and the fields of the response to the client.
pub(super) fn copy_head(
    request: &mut Request,
    settings: &UpstreamSettings,
    rewriter: &dyn HeadRewriter,
    head: &UpstreamHead,
    fields: &FieldList,
) {
    // With the status of an error page, the server's own field is passed on like any other, as in nginx.
    let tells_last_modified = matches!(request.outcome.status_override.unwrap_or(head.status), 200 | 206 | 304);
    let response = &mut request.response;
    response.status = head.status;
    response.reason = head.reason.clone().map(|phrase| Reason { status: head.status, phrase });
    response.content_length = head.length;
    response.is_from_upstream = true;
    response.omits_server = settings.head.leaves_server_field && !fields.has(ResponseField::Server);
    for field in fields.iter() {
        if settings.head.hidden.has(&field.name) {
            continue;
        }
        let add = |request: &mut Request, value| request.response.add(field.name.clone(), value);
        match field.name.known() {
            // The client's connection is another one, and its exchange frames the body.
            Some(ResponseField::ContentLength) => {}
            Some(known) if known.is_of_connection() => {}
            Some(ResponseField::ContentType) => {
                // The target of an `X-Accel-Redirect` knows its own type better.
                request.outcome.content_type_override = None;
                request.response.content_type.clear();
                request.response.content_type.extend_from_slice(&field.value);
            }
            Some(ResponseField::ETag) if request.response.etag.is_empty() => {
                request.response.etag.extend_from_slice(&field.value);
            }
            Some(ResponseField::LastModified) if tells_last_modified => match seconds_of(&field.value) {
                Some(seconds) => request.response.last_modified = Some(seconds),
                None => add(request, field.value.clone()),
            },
            Some(ResponseField::Location) => {
                match rewriter.location(request, &field.value) {
                    Some(value) => request.response.location = value,
                    // A path of the server is not made absolute.
                    None if field.value.starts_with(b"/") => add(request, field.value.clone()),
                    None => request.response.location = field.value.to_vec(),
                }
            }
            Some(ResponseField::Refresh) => {
                let value = rewrite_refresh(request, rewriter, &field.value);
                add(request, value.map_or_else(|| field.value.clone(), FieldText::from));
            }
            Some(ResponseField::SetCookie) => {
                let value = rewriter.cookie(request, &field.value);
                add(request, value.map_or_else(|| field.value.clone(), FieldText::from));
            }
            _ => add(request, field.value.clone()),
        }
    }
}

/// Rewrites the URL behind `url=` in a `Refresh`.
fn rewrite_refresh(request: &Request, rewriter: &dyn HeadRewriter, value: &[u8]) -> Option<Vec<u8>> {
    let lower = value.to_ascii_lowercase();
    let start = bstr::ByteSlice::find(&*lower, "url=")? + 4;
    let url = rewriter.location(request, &value[start..])?;
    Some([&value[..start], &url].concat())
}

/// Parses a date; `None` if formatting it would not give the same text.
fn seconds_of(text: &[u8]) -> Option<u64> {
    let seconds = http_date::parse(text)?;
    (http_date::format(seconds)[..] == *text).then_some(seconds)
}
