//! Begins the client's response once a server's head is there: from the cache, with a body, or as a tunnel.

use std::rc::Rc;
use std::sync::Arc;

use gale_base::log_level::Level;
use gale_http::request::Request;
use gale_http::request::body::Body;
use gale_http::request::phases::Flow;
use gale_protocol::http1::lists_token;
use gale_protocol::request::{Method, Version};
use gale_protocol::response::ResponseField;
use gale_runtime::Bytes;

use crate::answering::Answering;
use crate::body::{Came, NoBody, UpstreamBody};
use crate::caching;
use crate::client_head::{copy_head, intercept, is_buffered, obey_head};
use crate::passing::Passing;
use crate::receiving::{BodyRead, UpstreamHead};
use crate::store::{self, Storing};
use crate::tunnel::UpstreamTunnel;

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
