//! Span of a finished request: name, times and attributes, as in nginx's module.
//! (<https://nginx.org/en/docs/ngx_otel_module.html#default-span-attributes>; the semantic conventions for HTTP of
//! OpenTelemetry 1.16)

use std::time::{Duration, UNIX_EPOCH};

use gale_http::request::Request;
use gale_protocol::request::KnownHeader;

use super::context::TraceContext;
use super::encoder::{Begin, SpanEncoder};
use super::{Attribute, Conf};
use crate::http::variables::{protocol, request_uri, server_name, status};
use crate::shared::append::port;

/// Statuses from this one on are errors of the server.
const FIRST_ERROR: u16 = 500;

/// Returns the encoded message.
pub(super) fn encode(request: &Request, conf: &Conf, context: &TraceContext) -> Vec<u8> {
    let end = gale_runtime::wall().duration_since(UNIX_EPOCH).unwrap_or_default();
    let start = end.saturating_sub(gale_runtime::now().since(request.arrival.started));
    let parent = context.parent.as_ref();
    let name = conf.span_name.get_opt().map(|name| name.text(request));
    let mut span = SpanEncoder::begin(&Begin {
        trace_id: &context.trace_id,
        span_id: &context.span_id,
        trace_state: parent.map(|parent| &parent.state[..]).unwrap_or_default(),
        parent_span_id: parent.map(|parent| &parent.span_id[..]).unwrap_or_default(),
        name: name.as_deref().unwrap_or(&request.scope().name),
        start_nanos: nanoseconds(start),
        end_nanos: nanoseconds(end),
    });
    add_usual(request, &mut span);
    for Attribute { name, value, is_list } in conf.span_attributes.get() {
        let value = value.text(request);
        if *is_list { span.list(name, &value) } else { span.text(name, &value) }
    }
    span.end(status(request) >= FIRST_ERROR)
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Adds the attributes of every span.
fn add_usual(request: &Request, span: &mut SpanEncoder) {
    span.text("http.method", request.method_name());
    span.text("http.target", request_uri(request));
    let route = &request.scope().name;
    if !route.is_empty() {
        span.text("http.route", route);
    }
    let scheme = request.exchange().scheme();
    span.text("http.scheme", scheme.name().as_bytes());
    if let Some(version) = protocol(request).strip_prefix(b"HTTP/") {
        span.text("http.flavor", version);
    }
    if let Some(agent) = request.header(KnownHeader::UserAgent) {
        span.text("http.user_agent", agent);
    }
    let received = request.declared_body_length().or_else(|| request.body.as_ref().map(|body| body.length()));
    span.number_attribute("http.request_content_length", received.unwrap_or(0));
    let sent = request.sent();
    span.number_attribute("http.response_content_length", sent.bytes.saturating_sub(sent.head_bytes));
    let status = status(request);
    if status > 0 {
        span.number_attribute("http.status_code", status.into());
    }
    let name = server_name(request);
    span.text("net.host.name", if name.is_empty() { &request.host } else { name });
    let own_port = request.exchange().local_address().and_then(port);
    if let Some(port) = own_port.filter(|&port| port != scheme.default_port()) {
        span.number_attribute("net.host.port", port.into());
    }
    span.text("net.sock.peer.addr", request.remote_text().as_bytes());
    if let Some(port) = port(request.remote()) {
        span.number_attribute("net.sock.peer.port", port.into());
    }
}
