//! Effects of a decision: a response, another way through the phases, or the end of the connection. Decisions have
//! effects in this file only.

use gale_protocol::response::ResponseField;
use std::rc::Rc;

use gale_base::log_level::Level;

use crate::request::advance::{AfterDelay, Step};
use crate::request::body::Body;
use crate::request::configuration::settings::Satisfy;
use crate::request::error_page;
use crate::request::filters::Filtered;
use crate::request::phases::{CLIENT_LEFT, Flow, Phase};
use crate::request::routing::UriOrigin;
use crate::request::{REDIRECTS_MAX, Request};

/// Acts on a handler's decision; `None` means that the request goes on through the phases.
pub(super) fn perform(request: &mut Request, flow: Flow) -> Option<Step> {
    match flow {
        Flow::Respond(status) if request.routing.phase == Phase::Access => refuse(request, status),
        flow => conclude(request, flow),
    }
}

/// Refuses the client for a module of the access phase: for good, unless `satisfy any` lets another one decide.
/// (<https://nginx.org/en/docs/http/ngx_http_core_module.html#satisfy>)
fn refuse(request: &mut Request, status: u16) -> Option<Step> {
    let is_any = *request.scope().core.satisfy.get() == Satisfy::Any;
    if !is_any || !matches!(status, 401 | 403 | 407) {
        return deny_with(request, status);
    }
    // A client that could come in with a password is told so.
    if !matches!(request.outcome.refusal, Some(401 | 407)) {
        request.outcome.refusal = Some(status);
    }
    None
}

/// A module of the access phase lets the client in.
fn allow(request: &mut Request) {
    if *request.scope().core.satisfy.get() == Satisfy::Any {
        request.outcome.refusal = None;
        request.response.remove(ResponseField::WwwAuthenticate);
        request.response.remove(ResponseField::ProxyAuthenticate);
        request.routing.next_handler = usize::MAX;
    }
}

/// Ends the access phase with a refusal.
pub(super) fn deny(request: &mut Request, status: u16) -> Option<Step> {
    if status == 403 {
        request.log(Level::Error, format_args!("access forbidden by rule"));
    }
    deny_with(request, status)
}

/// Ends the access phase with a status: a wrong password after `auth_delay`.
fn deny_with(request: &mut Request, status: u16) -> Option<Step> {
    let delay = *request.scope().core.auth_delay.get();
    if matches!(status, 401 | 407) && !delay.is_zero() {
        request.log(Level::Info, format_args!("delaying unauthorized request"));
        return Some(Step::Delay(delay, AfterDelay::Respond(status)));
    }
    conclude(request, Flow::Respond(status))
}

/// Acts on a decision. `None` means that the request goes on through the phases.
pub(super) fn conclude(request: &mut Request, mut flow: Flow) -> Option<Step> {
    // A way that leads back spends a redirect, or is the last response that is tried.
    loop {
        let body = match flow {
            Flow::Next => return None,
            Flow::Allow => {
                allow(request);
                return None;
            }
            Flow::PhaseDone => {
                request.routing.next_handler = usize::MAX;
                return None;
            }
            Flow::Delay(time) => return Some(Step::Delay(time, AfterDelay::AskAgain)),
            Flow::Answer(body) => body,
            Flow::Upgrade(_) if !request.is_main() => {
                request.log(Level::Error, format_args!("a subrequest cannot become a tunnel"));
                flow = Flow::Respond(500);
                continue;
            }
            Flow::Upgrade(tunnel) => {
                request.outcome.tunnel = Some(tunnel);
                Body::Empty
            }
            Flow::Respond(_) if request.extras.fallback.is_some() => {
                let fallback = request.extras.fallback.take()?;
                request.response.clear();
                request.response.status = 200;
                request.response.content_type = fallback.content_type;
                Body::Bytes(fallback.text)
            }
            Flow::Respond(status @ (444 | CLIENT_LEFT)) => {
                request.response.status = status;
                return Some(Step::Close);
            }
            Flow::Respond(status) => match error_page::respond(request, status) {
                Flow::Answer(body) => body,
                elsewhere => {
                    flow = elsewhere;
                    continue;
                }
            },
            Flow::Redirect { uri, args } => match redirect(request, uri, args) {
                Ok(()) => return None,
                Err(InCircles) => fail_plainly(request),
            },
            Flow::Named(name) => match go_to_named(request, &name) {
                Ok(()) => return None,
                Err(Refused::InCircles) => fail_plainly(request),
                Err(Refused::Status(status)) => {
                    flow = Flow::Respond(status);
                    continue;
                }
            },
        };
        flow = match filter(request, body) {
            Filtering::Done(body) => return Some(Step::Answer(body)),
            // Bounded as redirects are. The last response is not filtered again.
            Filtering::Refused(status) if !spend_redirect(request) => {
                return Some(Step::Answer(error_page::plain(request, status)));
            }
            Filtering::Refused(status) => Flow::Respond(status),
            Filtering::TooCostlyBefore => Flow::Respond(500),
            Filtering::TooCostly => Flow::Answer(fail_plainly(request)),
        };
    }
}

/// Result of the filters.
enum Filtering {
    Done(Body),
    /// A filter refuses the response with this status.
    Refused(u16),
    /// Variables have become too costly, before the filters or in them. This is reported once.
    TooCostlyBefore,
    TooCostly,
}

/// Applies the filters to a response.
fn filter(request: &mut Request, mut body: Body) -> Filtering {
    if request.take_too_costly() {
        request.response.clear();
        request.outcome.tunnel = None;
        return Filtering::TooCostlyBefore;
    }
    if let Some(status) = request.outcome.status_override.take() {
        request.response.replace_status(status);
    }
    if looks_like_tunnel(request) {
        request.log(Level::Info, format_args!("the response to an extended CONNECT opens no tunnel"));
        request.response.clear();
        return Filtering::Refused(501);
    }
    if request.response.status < 300
        && let Some(content_type) = request.outcome.content_type_override.take()
    {
        request.response.content_type = content_type;
    }
    let configuration = Rc::clone(request.configuration());
    let scope = configuration.http().scope(request.scope);
    let filters = if request.routing.skips_filters { &[][..] } else { &scope.filters };
    for bound in filters {
        if let Filtered::Respond(status) = bound.filter.apply(request, scope.conf(bound.module), &mut body) {
            request.outcome.tunnel = None;
            if status >= 500 {
                // The response itself is wrong. A 412 or a 416 is about the client's conditions.
                request.refuse_response();
            }
            return Filtering::Refused(status);
        }
    }
    if request.take_too_costly() {
        request.response.clear();
        request.outcome.tunnel = None;
        return Filtering::TooCostly;
    }
    Filtering::Done(body)
}

/// True if a client that has asked for a tunnel over HTTP/2 would take this success for one (RFC 8441, section 4).
fn looks_like_tunnel(request: &Request) -> bool {
    request.parsed.connect_protocol.is_some()
        && (200..300).contains(&request.response.status)
        && request.outcome.tunnel.is_none()
        && request.is_main()
}

/// Response of a request that is redirected in a cycle.
fn fail_plainly(request: &mut Request) -> Body {
    request.outcome.status_override = None;
    request.close_after_response();
    error_page::plain(request, 500)
}

/// Counts a redirect; returns `false` when the request has made as many as it may.
pub(super) fn spend_redirect(request: &mut Request) -> bool {
    let is_left = request.routing.redirects < REDIRECTS_MAX;
    if is_left {
        request.routing.redirects += 1;
    }
    is_left
}

/// The request has made all redirects that it may make.
struct InCircles;

/// Reason why a request cannot go on in a named location.
enum Refused {
    InCircles,
    Status(u16),
}

/// Redirects internally: the request starts again at the server's rewrites.
fn redirect(request: &mut Request, uri: Vec<u8>, args: Option<Vec<u8>>) -> Result<(), InCircles> {
    if !spend_redirect(request) {
        request.log(
            Level::Error,
            format_args!(
                "rewrite or internal redirection cycle while internally redirecting to \"{}\"",
                bstr::BStr::new(&uri)
            ),
        );
        return Err(InCircles);
    }
    request.uri = uri;
    request.routing.origin = UriOrigin::Internal;
    request.routing.adds_uri_to_alias = false;
    if let Some(args) = args {
        request.args = args;
    }
    request.scope = request.server().scope;
    request.routing.phase = Phase::ServerRewrite;
    request.routing.next_handler = 0;
    Ok(())
}

/// Goes on in `location @name`, from its rewrites on.
fn go_to_named(request: &mut Request, name: &[u8]) -> Result<(), Refused> {
    let shown = bstr::BStr::new(name);
    if !spend_redirect(request) {
        let message = "rewrite or internal redirection cycle while redirect to named location";
        request.log(Level::Error, format_args!("{message} \"@{shown}\""));
        return Err(Refused::InCircles);
    }
    if request.uri.is_empty() {
        request.log(Level::Error, format_args!("empty URI in redirect to named location \"@{shown}\""));
        return Err(Refused::Status(500));
    }
    let Some(&scope) = request.server().named.get(name) else {
        request.log(Level::Error, format_args!("could not find named location \"@{shown}\""));
        return Err(Refused::Status(500));
    };
    request.routing.origin = request.routing.origin.redirected();
    request.scope = request.http().scope_for(scope, request.method());
    request.routing.fit.end_search();
    request.routing.phase = Phase::Rewrite;
    request.routing.next_handler = 0;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::any::Any;

    use gale_runtime::{EventLoop, LoopOptions};

    use super::*;
    use crate::request::advance::advance;
    use crate::request::configuration::{BoundFilter, Scope};
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

    /// The response of a server that has nothing, with this filter.
    fn answer_with(filter: &'static dyn Filter) -> (Step, u16, Option<Vec<u8>>) {
        EventLoop::new(LoopOptions::default()).unwrap().run(async {
            let scope = mock::scope(mock::settings());
            let filters = vec![BoundFilter { filter, module: 0 }];
            let scope = Scope { filters, confs: [None].into(), ..scope };
            let mut request = mock::request_in(&MockExchange::new(), scope);
            let step = advance(&mut request);
            let seen = request.response.field_by_name(&b"X-Seen".into()).map(<[u8]>::to_vec);
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
