//! A request to be passed on, as its module has prepared it.

use std::sync::Arc;
use std::time::Duration;

use gale_http::request::Request;
use gale_runtime::Bytes;
use gale_upstream::{Selection, Upstream};

use crate::caching_state::Caching;
use crate::http2::Http2Request;
use crate::passing_tls::PassingTls;
use crate::receiving::ResponseReader;
use crate::rewriter::HeadRewriter;
use crate::sending::{BodyFraming, RequestBody};
use crate::settings::UpstreamSettings;

/// A request to be passed on, as its module has prepared it.
pub struct Passing<'p> {
    /// The servers to choose from.
    pub selection: Selection,
    /// The group, if its sessions are sticky.
    pub upstream: Option<Arc<Upstream<Request>>>,
    /// The protocol as messages show it: `http://`.
    pub scheme: &'static str,
    /// Settings of TLS, whose names are evaluated for each server; `None` for plain connections.
    pub tls: Option<Box<PassingTls>>,
    /// Writes the request for a server: `uri`, the head in `wire`, and everything else that depends on it. Called once
    /// for all servers, or with `request_dynamic` once for each of them.
    pub write: &'p WriteRequest<'p>,
    /// The URI of the request to the server, for messages.
    pub uri: Bytes,
    /// The part of the request before its body.
    pub wire: Wire<'p>,
    /// The request's body.
    pub body: RequestBody,
    /// The settings of the location.
    pub settings: &'p UpstreamSettings,
    /// Time limit for the whole exchange besides the location's: the client waits no longer.
    pub time_max: Option<Duration>,
    /// Rewrites fields of the response's head that name the server.
    pub rewriter: &'p dyn HeadRewriter,
    /// The protocol that the request asks to change to.
    pub upgrade: Option<Bytes>,
    /// State of the cache for this request.
    pub caching: Option<Box<Caching>>,
}

/// Writes a request for a server. An error is the status to answer with.
pub type WriteRequest<'p> = dyn Fn(&mut Request, &mut Passing<'_>) -> Result<(), u16> + 'p;

/// Does nothing, for a head that is the same for all servers and was written before.
pub fn written_before(_: &mut Request, _: &mut Passing<'_>) -> Result<(), u16> {
    Ok(())
}

/// The kind of connection for a request and its response.
pub enum Wire<'p> {
    /// A connection that carries only this request at a time.
    Alone(Alone<'p>),
    /// A connection shared with other requests: HTTP/2.
    Http2(Http2Request),
}

/// A request with a connection of its own.
pub struct Alone<'p> {
    /// The encoded request up to its body; empty until it is written.
    pub head: Bytes,
    /// Framing of the body.
    pub framing: &'static dyn BodyFraming,
    /// Creates a reader for the response.
    pub reader: &'p dyn Fn() -> Box<dyn ResponseReader>,
    /// True if the request may use an idle connection.
    pub reuses_connections: bool,
}

impl Passing<'_> {
    /// Sets the head that `write` has made, for a connection of its own.
    pub fn set_head(&mut self, head: Bytes) {
        if let Wire::Alone(wire) = &mut self.wire {
            wire.head = head;
        }
    }
}
