//! The head of a response: what it says of the body, of the connection and of the server; then the body follows.

use std::net::SocketAddr;
use std::rc::Rc;

use gale_runtime::{Bytes, SocketAddress};

use crate::files::delivery::FileOptions;
use crate::request::Request;
use crate::request::advance::{Step, finish};
use crate::request::body::{Body, BodyItem};
use crate::request::configuration::settings::CoreSettings;
use crate::request::error_page;
use crate::request::exchange::{BodyLength, ResponseBody, ResponseOptions, ResponseStart};
use crate::request::limit_rate::Rate;
use crate::request::pump::send_rest;
use crate::request::tunnel::Opened;

/// What has become of a request that had to wait.
pub enum Answered {
    /// There is no answer: the connection is to be closed.
    Not,
    /// All of the answer was given to the exchange.
    Wholly,
    /// The head was: what follows are bytes both ways. They may go on for days, so the caller carries them, and frees
    /// before that what the request needed on its way here.
    Tunnel(Opened),
}

/// The rest of a request that has to wait: through the phases and on to the last item of the body, or to the beginning
/// of a tunnel.
pub async fn finish_and_send(request: &mut Request, step: Step) -> Answered {
    let Some(body) = finish(request, step).await else { return Answered::Not };
    match start_response(request, body) {
        Some(rest) => rest.send(request).await,
        None => Answered::Wholly,
    }
}

/// What follows a response's head and is not given with it.
pub enum Rest {
    /// A body that comes item by item.
    Body(ResponseBody, Body),
    /// Bytes both ways.
    Tunnel(Opened),
}

impl Rest {
    /// Sends a body to its end, or until the client leaves. A tunnel is the caller's to carry.
    pub async fn send(self, request: &Request) -> Answered {
        match self {
            Rest::Body(response, body) => send_rest(request, response, body).await,
            Rest::Tunnel(opened) => return Answered::Tunnel(opened),
        }
        Answered::Wholly
    }
}

/// Gives the head to the exchange and returns what is to follow, both as the
/// filters made them. When this returns `None`, all of it has been given.
pub fn start_response(request: &mut Request, mut body: Body) -> Option<Rest> {
    request.record.answered = Some(gale_runtime::now());
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
    let core = &scope.core;
    let is_tunnel = request.outcome.tunnel.is_some();
    let is_limited = !is_tunnel && length != BodyLength::NoBody && Rate::of(request).is_some();
    let has_trailers = !is_tunnel && length == BodyLength::UntilEnd && request.response.has_trailers;
    // What is sent bit by bit is gathered as `postpone_output` says.
    let files = files.or_else(|| (is_limited || has_trailers).then(|| FileOptions::without_pool(core)));
    let options = ResponseOptions { length, files, send_timeout: *core.send_timeout.get() };
    if let Some(other_end) = request.outcome.tunnel.take() {
        let response = ResponseStart::of(request).start_tunnel(request, &options);
        return Some(Rest::Tunnel(Opened { response, other_end }));
    }
    let response = ResponseStart::of(request);
    let body = if length == BodyLength::NoBody { Body::Empty } else { body };
    match body {
        body if is_limited || has_trailers => {
            return Some(Rest::Body(response.start(request, &options), body));
        }
        Body::Empty => response.respond(request, &options, Bytes::new()),
        Body::Bytes(bytes) => response.respond(request, &options, bytes),
        Body::File(piece) => {
            let response = response.start(request, &options);
            response.push(BodyItem::File(piece));
            response.end();
        }
        rest @ (Body::Items(_) | Body::Stream(_)) => {
            return Some(Rest::Body(response.start(request, &options), rest));
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
    let scheme = exchange.scheme();
    let mut url = [scheme.name().as_bytes(), b"://"].concat();
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
    let port = local.map_or(scheme.default_port(), |local| local.port());
    if *core.port_in_redirect.get() && port != scheme.default_port() {
        url.extend_from_slice(format!(":{port}").as_bytes());
    }
    url.append(&mut request.response.location);
    request.response.location = url;
}

/// How the body's end is told, and what the head announces.
fn body_length(request: &mut Request, body: &Body) -> BodyLength {
    let length = body.length();
    let status = request.response.status;
    if request.outcome.tunnel.is_some() {
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
    if request.response.has_trailers && request.exchange().carries_trailers(request) {
        request.response.content_length = None;
    }
    request.response.content_length.map_or(BodyLength::UntilEnd, BodyLength::Known)
}
