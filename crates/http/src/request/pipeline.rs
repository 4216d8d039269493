//! A request's way through the phases: take the next handler, run it, act on
//! what it decided.
//!
//! [`advance`] goes as far as it can without waiting; a request that never waits
//! costs no future. [`finish`] is the rest, for those that do. Only this file
//! performs effects: handlers decide.

use std::borrow::Cow;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use gale_protocol::http1::{Version, response};
use gale_runtime::{Bytes, SocketAddress, Timer};

use crate::configuration::settings::{CoreSettings, Satisfy, ServerTokens};
use crate::configuration::{BoundHandler, HttpConfiguration};
use crate::files;
use crate::files::delivery::FileOptions;
use crate::request::Request;
use crate::request::body::{Body, BodyItem};
use crate::request::error_page;
use crate::request::exchange::{BodyLength, ResponseOptions};
use crate::request::filters::Filtered;
use crate::request::limit_rate::{self, Rate};
use crate::request::phases::{CLIENT_LEFT, Decision, Flow, Phase};
use crate::request::request_body;
use gale_base::log_level::Level;
use gale_engine::configuration::ScopeId;

/// Where a request stands when it cannot go on by itself.
#[derive(Debug)]
pub enum Step {
    /// The body is to be sent; the head is in the request. The filters have seen both.
    Answer(Body),
    /// A handler has to wait.
    Wait(Waiting),
    /// Nothing happens for this time.
    Delay(Duration, Afterwards),
    /// The connection is closed without an answer (444).
    Close,
}

/// What comes after a delay.
#[derive(Clone, Copy, Debug)]
pub enum Afterwards {
    /// The handler that asked for the delay is asked again.
    AskAgain,
    /// The request ends with this status.
    Respond(u16),
}

/// A handler that has to wait, and the scope that it was asked in: its settings are those of that one, although what it
/// did may have brought the request into another.
pub struct Waiting(BoundHandler, ScopeId);

impl std::fmt::Debug for Waiting {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Waiting")
    }
}

/// Runs a request from its current phase as far as it goes without waiting.
pub fn advance(request: &mut Request) -> Step {
    let configuration = Rc::clone(request.configuration());
    loop {
        let flow = match next_handler(configuration.http(), request) {
            Next::Handler(bound) => {
                let scope = request.scope;
                let conf = configuration.http().conf(&bound, scope);
                match bound.handler.decide(request, conf) {
                    Decision::Flow(flow) => flow,
                    Decision::MustWait => return Step::Wait(Waiting(bound, scope)),
                }
            }
            Next::Flow(flow) => match conclude(request, flow) {
                Some(step) => return step,
                None => continue,
            },
            Next::TurnAway(status) => match turn_away(request, status) {
                Some(step) => return step,
                None => continue,
            },
        };
        if let Some(step) = perform(request, flow) {
            return step;
        }
    }
}

/// Goes on from a step that has to wait, until there is an answer.
pub async fn finish(request: &mut Request, mut step: Step) -> Option<Body> {
    loop {
        let performed = match step {
            Step::Answer(body) => return Some(body),
            Step::Close => return None,
            Step::Delay(time, afterwards) => match (client_stays(request, time).await, afterwards) {
                (false, _) => conclude(request, Flow::Respond(CLIENT_LEFT)),
                (true, Afterwards::Respond(status)) => conclude(request, Flow::Respond(status)),
                (true, Afterwards::AskAgain) => {
                    request.next_handler -= 1;
                    None
                }
            },
            Step::Wait(Waiting(bound, scope)) => {
                let configuration = Rc::clone(request.configuration());
                let conf = configuration.http().conf(&bound, scope);
                let flow = bound.handler.wait(request, conf).await;
                perform(request, flow)
            }
        };
        step = match performed {
            Some(step) => step,
            None => advance(request),
        };
    }
}

/// Waits for a time; `false` if the client leaves before.
async fn client_stays(request: &Request, time: Duration) -> bool {
    let exchange = request.exchange();
    let mut timer = Timer::after(time);
    let stays = poll_fn(|context| match timer.poll_expired(context) {
        Poll::Ready(()) => Poll::Ready(true),
        Poll::Pending => exchange.poll_gone(context).map(|()| false),
    })
    .await;
    if !stays {
        request.log(Level::Info, format_args!("client prematurely closed connection"));
    }
    stays
}

/// Ends a request with a status before any phase has run: a head that cannot be
/// understood.
pub fn fail(request: &mut Request, status: u16) -> Step {
    conclude(request, Flow::Respond(status)).unwrap_or_else(|| advance(request))
}

enum Next {
    Handler(BoundHandler),
    Flow(Flow),
    /// Nobody in the access phase was satisfied.
    TurnAway(u16),
}

/// The next handler in the order of the phases. Between the phases lies what
/// belongs to no module: the location is found, a changed URI searched again.
fn next_handler(http: &HttpConfiguration, request: &mut Request) -> Next {
    loop {
        let handlers = &http.scope(request.scope).handlers[request.phase as usize];
        if let Some(&bound) = handlers.get(request.next_handler) {
            request.next_handler += 1;
            return Next::Handler(bound);
        }
        request.next_handler = 0;
        request.phase = match request.phase {
            Phase::PostRead => Phase::ServerRewrite,
            Phase::ServerRewrite => match find_location(http, request) {
                Ok(()) => Phase::Rewrite,
                Err(status) => return Next::Flow(Flow::Respond(status)),
            },
            Phase::Rewrite if request.uri_was_changed => {
                if !spend_redirect(request) {
                    request.log(
                        Level::Error,
                        format_args!(
                            "rewrite or internal redirection cycle while processing \"{}\"",
                            bstr::BStr::new(&request.uri)
                        ),
                    );
                    return Next::Flow(Flow::Respond(500));
                }
                request.scope = http.server(request.server).scope;
                match find_location(http, request) {
                    Ok(()) => Phase::Rewrite,
                    Err(status) => return Next::Flow(Flow::Respond(status)),
                }
            }
            Phase::Rewrite => Phase::PreAccess,
            // Whether the client may was settled for its own request.
            Phase::PreAccess if !request.is_main() => Phase::PreContent,
            Phase::PreAccess => Phase::Access,
            Phase::Access => match request.refusal.take() {
                Some(status) => return Next::TurnAway(status),
                None => Phase::PreContent,
            },
            Phase::PreContent => Phase::Content,
            Phase::Content | Phase::Log => return Next::Flow(no_content(request)),
        };
    }
}

/// No module had an answer.
fn no_content(request: &Request) -> Flow {
    if request.uri.last() == Some(&b'/') {
        let mut path = Vec::new();
        if files::find_path(request, &mut path).is_ok() {
            request.log(Level::Error, format_args!("directory index of \"{}\" is forbidden", bstr::BStr::new(&path)));
        }
        return Flow::Respond(403);
    }
    request.log(Level::Error, format_args!("no handler found"));
    Flow::Respond(404)
}

/// Puts the request into the location for its URI.
fn find_location(http: &HttpConfiguration, request: &mut Request) -> Result<(), u16> {
    request.uri_was_changed = false;
    request.has_left_location = false;
    let server = http.server(request.server);
    let found = server.locations.find(&request.uri).map_err(|error| {
        request.log(Level::Alert, format_args!("{}", error.0));
        500_u16
    })?;
    if let Some(found) = found {
        request.scope = http.scope_for(found.scope, request.method());
        if let Some(matched) = found.matched {
            let subject = std::mem::take(&mut request.uri);
            request.take_match(matched, &subject);
            request.uri = subject;
        }
    }
    let core = &http.scope(request.scope).core;
    if *core.internal.get() && !request.is_internal {
        return Err(404);
    }
    if request_body::is_refused(request) { Err(413) } else { Ok(()) }
}

fn spend_redirect(request: &mut Request) -> bool {
    let left = request.redirects_left;
    request.redirects_left = left.saturating_sub(1);
    left > 0
}

/// Acts on a handler's decision; `None` means that the request goes on through the phases.
fn perform(request: &mut Request, flow: Flow) -> Option<Step> {
    match flow {
        Flow::Respond(status) if request.phase == Phase::Access => refuse(request, status),
        flow => conclude(request, flow),
    }
}

/// A module of the access phase refuses the client: for good, unless one of the others may be enough.
/// (<https://nginx.org/en/docs/http/ngx_http_core_module.html#satisfy>)
fn refuse(request: &mut Request, status: u16) -> Option<Step> {
    let is_any = *request.scope().core.satisfy.get() == Satisfy::Any;
    if !is_any || !matches!(status, 401 | 403 | 407) {
        return turn_away_with(request, status);
    }
    // Who could come in with a password is told so.
    if !matches!(request.refusal, Some(401 | 407)) {
        request.refusal = Some(status);
    }
    None
}

/// A module of the access phase lets the client in.
fn allow(request: &mut Request) -> Option<Step> {
    if *request.scope().core.satisfy.get() == Satisfy::Any {
        request.refusal = None;
        request.response.remove(b"WWW-Authenticate");
        request.response.remove(b"Proxy-Authenticate");
        request.next_handler = usize::MAX;
    }
    None
}

/// Nobody was satisfied.
fn turn_away(request: &mut Request, status: u16) -> Option<Step> {
    if status == 403 {
        request.log(Level::Error, format_args!("access forbidden by rule"));
    }
    turn_away_with(request, status)
}

/// Ends the access phase with a status: a wrong password after `auth_delay`.
fn turn_away_with(request: &mut Request, status: u16) -> Option<Step> {
    let delay = *request.scope().core.auth_delay.get();
    if matches!(status, 401 | 407) && !delay.is_zero() {
        request.log(Level::Info, format_args!("delaying unauthorized request"));
        return Some(Step::Delay(delay, Afterwards::Respond(status)));
    }
    conclude(request, Flow::Respond(status))
}

/// Acts on a decision that nobody objects to.
fn conclude(request: &mut Request, flow: Flow) -> Option<Step> {
    match flow {
        Flow::Next => None,
        Flow::Allow => allow(request),
        Flow::PhaseDone => {
            request.next_handler = usize::MAX;
            None
        }
        Flow::Delay(time) => Some(Step::Delay(time, Afterwards::AskAgain)),
        Flow::Answer(body) => answer(request, body),
        Flow::Respond(_) if request.fallback.is_some() => {
            let fallback = request.fallback.take()?;
            request.response.clear();
            request.response.status = 200;
            request.response.content_type = fallback.content_type;
            answer(request, Body::Bytes(fallback.text))
        }
        Flow::Respond(status @ (444 | CLIENT_LEFT)) => {
            request.response.status = status;
            Some(Step::Close)
        }
        Flow::Respond(status) => match error_page::respond(request, status) {
            Flow::Answer(body) => answer(request, body),
            redirect => conclude(request, redirect),
        },
        Flow::Redirect { uri, args } => redirect(request, uri, args),
        Flow::Named(name) => go_to_named(request, &name),
    }
}

/// The request has an answer: the filters change it, or put another in its place.
fn answer(request: &mut Request, mut body: Body) -> Option<Step> {
    if request.take_too_costly() {
        request.response.clear();
        return conclude(request, Flow::Respond(500));
    }
    if let Some(status) = request.status_override.take() {
        request.response.status = status;
    }
    let configuration = Rc::clone(request.configuration());
    let scope = configuration.http().scope(request.scope);
    for bound in &scope.filters {
        match bound.filter.apply(request, scope.conf(bound.module), &mut body) {
            Filtered::Goes => {}
            // Bounded as redirects are; what comes out then is not filtered again.
            Filtered::Respond(status) if !spend_redirect(request) => {
                return Some(Step::Answer(error_page::plain(request, status)));
            }
            Filtered::Respond(status) => return conclude(request, Flow::Respond(status)),
        }
    }
    if request.take_too_costly() {
        request.response.clear();
        return fail_plainly(request);
    }
    Some(Step::Answer(body))
}

/// Ends a request that went in circles.
fn fail_plainly(request: &mut Request) -> Option<Step> {
    request.status_override = None;
    request.close_after_response();
    let body = error_page::plain(request, 500);
    answer(request, body)
}

/// nginx's internal redirect: the request starts again at the server's rewrites.
fn redirect(request: &mut Request, uri: Vec<u8>, args: Option<Vec<u8>>) -> Option<Step> {
    if !spend_redirect(request) {
        request.log(
            Level::Error,
            format_args!(
                "rewrite or internal redirection cycle while internally redirecting to \"{}\"",
                bstr::BStr::new(&uri)
            ),
        );
        return fail_plainly(request);
    }
    request.uri = uri;
    request.adds_uri_to_alias = false;
    if let Some(args) = args {
        request.args = args;
    }
    request.is_internal = true;
    request.scope = request.server().scope;
    request.phase = Phase::ServerRewrite;
    request.next_handler = 0;
    None
}

/// Goes on in `location @name`, from its rewrites on.
fn go_to_named(request: &mut Request, name: &[u8]) -> Option<Step> {
    let shown = bstr::BStr::new(name);
    if !spend_redirect(request) {
        let message = "rewrite or internal redirection cycle while redirect to named location";
        request.log(Level::Error, format_args!("{message} \"@{shown}\""));
        return fail_plainly(request);
    }
    if request.uri.is_empty() {
        request.log(Level::Error, format_args!("empty URI in redirect to named location \"@{shown}\""));
        return conclude(request, Flow::Respond(500));
    }
    let Some(&scope) = request.server().named.get(name) else {
        request.log(Level::Error, format_args!("could not find named location \"@{shown}\""));
        return conclude(request, Flow::Respond(500));
    };
    request.is_internal = true;
    request.scope = request.http().scope_for(scope, request.method());
    request.uri_was_changed = false;
    request.phase = Phase::Rewrite;
    request.next_handler = 0;
    None
}

/// Gives the head to the exchange and returns the body to send, both as the
/// filters made them. When this returns `None`, all of it has been given.
pub fn start_response(request: &mut Request, mut body: Body) -> Option<Body> {
    let configuration = Rc::clone(request.configuration());
    let scope = configuration.http().scope(request.scope);
    let files = match &body {
        Body::Empty | Body::Bytes(_) => None,
        // What filters have made of no body.
        _ if request.response.status == 304 => None,
        Body::File(_) | Body::Items(_) | Body::Stream(_) => {
            let files = FileOptions::of(request, &scope.core);
            if files.is_none() {
                // Its fields speak of the body that there will not be.
                request.response.clear();
                request.close_after_response();
                body = error_page::plain(request, 500);
            }
            files
        }
    };
    make_location_absolute(request, &scope.core);
    let length = body_length(request, &body);
    let exchange = request.exchange();
    let core = &scope.core;
    let server_line = server_line(request, core);
    let keep_alive = *core.keepalive_timeout.get();
    let keeps_alive = request.keeps_alive();
    let is_limited = length != BodyLength::NoBody && Rate::of(request).is_some();
    let has_trailers = length == BodyLength::UntilEnd && request.response.has_trailers;
    // What is sent bit by bit is gathered as `postpone_output` says.
    let files = files.or_else(|| (is_limited || has_trailers).then(|| FileOptions::without_pool(core)));
    let options = ResponseOptions {
        length,
        server_line: &server_line,
        keep_alive: keeps_alive,
        keep_alive_idle: keep_alive.idle,
        keep_alive_advertised: keep_alive.told(),
        lingering_close: request.lingering_close(),
        chunked: *core.chunked_transfer_encoding.get(),
        files,
        send_timeout: *core.send_timeout.get(),
    };
    let body = if length == BodyLength::NoBody { Body::Empty } else { body };
    match body {
        body if is_limited || has_trailers => {
            exchange.start(&request.response, &options);
            return Some(body);
        }
        Body::Empty => exchange.respond(&request.response, &options, Bytes::new()),
        Body::Bytes(bytes) => exchange.respond(&request.response, &options, bytes),
        Body::File(piece) => {
            exchange.start(&request.response, &options);
            exchange.push(BodyItem::File(piece));
            exchange.end();
        }
        rest @ (Body::Items(_) | Body::Stream(_)) => {
            exchange.start(&request.response, &options);
            return Some(rest);
        }
    }
    None
}

/// `absolute_redirect`: a path becomes a URL with the scheme, the host that was asked
/// for, and the port. (<https://nginx.org/en/docs/http/ngx_http_core_module.html#absolute_redirect>)
fn make_location_absolute(request: &mut Request, core: &CoreSettings) {
    if request.response.location.first() != Some(&b'/') || !*core.absolute_redirect.get() {
        return;
    }
    let exchange = request.exchange();
    let local = exchange.local_address().and_then(SocketAddress::inet);
    let mut url = b"http://".to_vec();
    if *core.server_name_in_redirect.get() {
        url.extend_from_slice(&request.server().name);
    } else if !request.host.is_empty() {
        url.extend_from_slice(&request.host);
    } else if let Some(local) = local {
        match local {
            SocketAddr::V4(local) => url.extend_from_slice(local.ip().to_string().as_bytes()),
            SocketAddr::V6(local) => url.extend_from_slice(format!("[{}]", local.ip()).as_bytes()),
        }
    }
    let port = local.map_or(HTTP_PORT, |local| local.port());
    if *core.port_in_redirect.get() && port != HTTP_PORT {
        url.extend_from_slice(format!(":{port}").as_bytes());
    }
    url.append(&mut request.response.location);
    request.response.location = url;
}

/// The port that need not be named.
const HTTP_PORT: u16 = 80;

/// What the `Server` field says.
pub fn server_field<'c>(request: &Request, core: &'c CoreSettings) -> Cow<'c, [u8]> {
    match core.server_tokens.get() {
        ServerTokens::On | ServerTokens::Build => Cow::Borrowed(crate::SERVER_WITH_VERSION),
        ServerTokens::Off => Cow::Borrowed(crate::SERVER),
        ServerTokens::Text(text) => match text.as_constant() {
            Some(text) => Cow::Borrowed(text),
            None => Cow::Owned(text.evaluate(request)),
        },
    }
}

/// The `Server` field with its line end; empty when there is none.
fn server_line<'c>(request: &Request, core: &'c CoreSettings) -> Cow<'c, [u8]> {
    match core.server_tokens.get() {
        ServerTokens::On | ServerTokens::Build => Cow::Borrowed(crate::SERVER_LINE_WITH_VERSION),
        ServerTokens::Off => Cow::Borrowed(crate::SERVER_LINE),
        ServerTokens::Text(_) => {
            let value = server_field(request, core);
            let mut line = Vec::new();
            if !value.is_empty() {
                response::write_header(&mut line, b"Server", &value);
            }
            Cow::Owned(line)
        }
    }
}

/// How the body's end is told, and what the head announces.
fn body_length(request: &mut Request, body: &Body) -> BodyLength {
    let length = body.length();
    let status = request.response.status;
    let can_be_chunked = request.version() == Version::Http11 && *request.scope().core.chunked_transfer_encoding.get();
    if request.is_tunnel {
        request.response.content_length = None;
        return BodyLength::UntilEnd;
    }
    if status < 200 || matches!(status, 204 | 304) {
        match status {
            // An `error_page` has made it out of something with a body.
            204 => request.response.content_type.clear(),
            304 => request.response.describe_nothing(),
            _ => {}
        }
        request.response.content_length = None;
        return BodyLength::NoBody;
    }
    if length.is_some() {
        request.response.content_length = length;
    }
    if request.is_head() {
        return BodyLength::NoBody;
    }
    let response = &mut request.response;
    if response.has_trailers && can_be_chunked {
        response.content_length = None;
    }
    request.response.content_length.map_or(BodyLength::UntilEnd, BodyLength::Known)
}

/// The rest of a request that has to wait: through the phases and on to the last
/// item of the body. `false` when the connection is to be closed without an answer.
pub async fn finish_and_send(request: &mut Request, step: Step) -> bool {
    let Some(body) = finish(request, step).await else { return false };
    if let Some(rest) = start_response(request, body) {
        send_rest(request, rest).await;
    }
    true
}

/// Runs the handlers of the log phase.
pub fn log(request: &mut Request) {
    let configuration = Rc::clone(request.configuration());
    let scope = configuration.http().scope(request.scope);
    for bound in &scope.handlers[Phase::Log as usize] {
        // Nothing waits and nothing is decided any more.
        let _ = bound.handler.decide(request, scope.conf(bound.module));
    }
}

/// Sends a body that comes in several items, waiting for the client between them.
pub async fn send_rest(request: &Request, mut body: Body) {
    let exchange = request.exchange();
    let mut rate = Rate::of(request).map(Box::new);
    loop {
        let next = poll_fn(|context| match body.poll_next(request, context) {
            Poll::Ready(item) => Poll::Ready(Ok(item)),
            // What is queued, the head at first, need not wait for what comes.
            Poll::Pending => match exchange.poll_sent(context) {
                Poll::Ready(Err(gone)) => Poll::Ready(Err(gone)),
                Poll::Ready(Ok(())) | Poll::Pending => Poll::Pending,
            },
        });
        let Ok(item) = next.await else { return };
        match item {
            Some(Ok(item)) => match &mut rate {
                None => exchange.push(item),
                Some(rate) => {
                    if Box::pin(limit_rate::push(&*exchange, rate, item)).await.is_err() {
                        return;
                    }
                }
            },
            Some(Err(error)) => {
                let Err(error) = exchange.take_back(error) else { return };
                request.log(Level::Error, format_args!("the response broke off: {error}"));
                // What came before is the client's, also if it was still being gathered. Without the client nothing is.
                let _ = poll_fn(|context| exchange.poll_sent(context)).await;
                return exchange.abort();
            }
            None => return end_response(request),
        }
        // The last item and the end leave together.
        if body.is_at_end() {
            return end_response(request);
        }
        if exchange.may_gather() {
            continue;
        }
        if poll_fn(|context| exchange.poll_sent(context)).await.is_err() {
            return;
        }
    }
}

fn end_response(request: &Request) {
    let exchange = request.exchange();
    if request.response.has_trailers {
        let configuration = Rc::clone(request.configuration());
        let scope = configuration.http().scope(request.scope);
        for bound in &scope.filters {
            bound.filter.add_trailers(request, scope.conf(bound.module));
        }
        exchange.push(BodyItem::Trailers(request.trailers().clone()));
    }
    exchange.end();
}

#[cfg(test)]
mod tests {
    use std::any::Any;

    use gale_runtime::{EventLoop, LoopOptions};

    use super::*;
    use crate::configuration::{BoundFilter, Scope};
    use crate::request::exchange::mock::{self, MockExchange};
    use crate::request::filters::Filter;

    /// Refuses responses of the first status; the second takes their place.
    struct Refuse(u16, u16);

    impl Filter for Refuse {
        fn applies(&self, _conf: &dyn Any) -> bool {
            true
        }

        fn apply(&self, request: &mut Request, _conf: &dyn Any, _body: &mut Body) -> Filtered {
            if request.response.status != self.0 {
                request.response.add(b"X-Seen", b"yes");
                return Filtered::Goes;
            }
            request.response.clear();
            Filtered::Respond(self.1)
        }
    }

    /// The answer of a server that has nothing, with this filter.
    fn answer_with(filter: &'static dyn Filter) -> (Step, u16, Option<Vec<u8>>) {
        EventLoop::new(LoopOptions::default()).unwrap().run(async {
            let scope = mock::scope(mock::settings());
            let filters = vec![BoundFilter { filter, module: 0 }];
            let scope = Scope { filters, confs: [None].into(), ..scope };
            let mut request = mock::request_in(&MockExchange::new(), scope);
            let step = advance(&mut request);
            let seen = request.response.field(b"X-Seen").map(<[u8]>::to_vec);
            (step, request.response.status, seen)
        })
    }

    #[test]
    fn a_response_that_a_filter_refuses_is_replaced_and_filtered_anew() {
        let (step, status, seen) = answer_with(&Refuse(404, 412));
        assert!(matches!(step, Step::Answer(Body::Bytes(page)) if page.starts_with(b"<html>")));
        assert_eq!((status, seen.as_deref()), (412, Some(&b"yes"[..])));
    }

    #[test]
    fn a_filter_may_close_the_connection() {
        assert!(matches!(answer_with(&Refuse(404, 444)).0, Step::Close));
    }

    #[test]
    fn a_filter_that_refuses_everything_does_not_hold_a_request_up() {
        let (step, status, seen) = answer_with(&Refuse(404, 404));
        assert!(matches!(step, Step::Answer(Body::Bytes(_))));
        assert_eq!((status, seen), (404, None));
    }
}
