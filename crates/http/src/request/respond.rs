//! Starts a response: its head, with the fields about the body, the connection and the server; then the body.

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

/// Outcome of a request that had to wait.
pub enum Answered {
    /// No response: the connection is to be closed.
    Not,
    /// The exchange has the whole response.
    Wholly,
    /// The exchange has the head; a tunnel follows. It may last for days, so the caller carries its bytes, after it has
    /// freed the memory that the request needed.
    Tunnel(Opened),
}

/// Runs a request that has to wait through the remaining phases, and sends its response up to the last item of the body
/// or the beginning of a tunnel.
pub async fn finish_and_send(request: &mut Request, step: Step) -> Answered {
    let Some(body) = finish(request, step).await else { return Answered::Not };
    match start_response(request, body) {
        Some(rest) => rest.send(request).await,
        None => Answered::Wholly,
    }
}

/// Part of a response that follows its head and is not given with it.
pub enum Rest {
    /// A body that comes item by item.
    Body(ResponseBody, Body),
    /// Bytes both ways.
    Tunnel(Opened),
}

impl Rest {
    /// Sends a body to its end, or until the client leaves. A tunnel is returned for the caller to carry.
    pub async fn send(self, request: &Request) -> Answered {
        match self {
            Rest::Body(response, body) => send_rest(request, response, body).await,
            Rest::Tunnel(opened) => return Answered::Tunnel(opened),
        }
        Answered::Wholly
    }
}

/// Gives the head to the exchange and returns the rest of the response, both as changed by the filters. `None` if the
/// exchange has the whole response.
pub fn start_response(request: &mut Request, mut body: Body) -> Option<Rest> {
    request.record.answered = Some(gale_runtime::now());
    let configuration = Rc::clone(request.configuration());
    let scope = configuration.http().scope(request.scope);
    let files = match &body {
        Body::Empty | Body::Bytes(_) => None,
        // Not sent: a 304 has no body.
        _ if request.response.status == 304 => None,
        Body::File(_) | Body::Items(_) | Body::Stream(_) => {
            let files = FileOptions::of(request, &scope.core);
            if files.is_none() {
                // The fields describe a body that is not sent.
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
    // Bodies sent piece by piece are buffered according to `postpone_output`.
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

/// `absolute_redirect`: turns a path into a URL with the scheme, the requested host, and the port.
/// (<https://nginx.org/en/docs/http/ngx_http_core_module.html#absolute_redirect>)
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

/// Returns the framing of the body, and sets the fields of the head that depend on it.
fn body_length(request: &mut Request, body: &Body) -> BodyLength {
    let length = body.length();
    let status = request.response.status;
    if request.outcome.tunnel.is_some() {
        request.response.content_length = None;
        return BodyLength::UntilEnd;
    }
    if status < 200 || matches!(status, 204 | 304) {
        match status {
            // An `error_page` has replaced a response with a body.
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
