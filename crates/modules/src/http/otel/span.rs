//! The span of a request that is over: its name, its times, and its attributes, as nginx's module has them.
//! (<https://nginx.org/en/docs/ngx_otel_module.html#default-span-attributes>; the semantic conventions for HTTP of
//! OpenTelemetry 1.16)

use std::time::{Duration, UNIX_EPOCH};

use gale_http::request::Request;
use gale_protocol::request::KnownHeader;
use prost::Message;

use super::context::TraceContext;
use super::messages::{KeyValue, SPAN_KIND_SERVER, STATUS_CODE_ERROR, Span, Status, utf8};
use super::{Attribute, Conf};
use crate::http::variables::{protocol, request_uri, server_name, status};
use crate::shared::append::port;

/// From this status on the server is at fault.
const FIRST_ERROR: u16 = 500;

/// The encoded message.
pub(super) fn encode(request: &Request, conf: &Conf, context: &TraceContext) -> Vec<u8> {
    let end = gale_runtime::wall().duration_since(UNIX_EPOCH).unwrap_or_default();
    let start = end.saturating_sub(gale_runtime::now().since(request.started));
    let parent = context.parent.as_ref();
    let mut attributes = Vec::with_capacity(16);
    add_usual(request, &mut attributes);
    for Attribute { name, value, is_list } in conf.span_attributes.get() {
        let value = value.text(request);
        attributes.push(if *is_list { KeyValue::list(name, &value) } else { KeyValue::text(name, &value) });
    }
    let name = conf.span_name.get_opt().map(|name| name.text(request));
    let is_error = status(request) >= FIRST_ERROR;
    let span = Span {
        trace_id: context.trace_id.to_vec(),
        span_id: context.span_id.to_vec(),
        trace_state: parent.map(|parent| utf8(&parent.state)).unwrap_or_default(),
        parent_span_id: parent.map(|parent| parent.span_id.to_vec()).unwrap_or_default(),
        name: utf8(name.as_deref().unwrap_or(&request.scope().name)),
        kind: SPAN_KIND_SERVER,
        start_time_unix_nano: nanoseconds(start),
        end_time_unix_nano: nanoseconds(end),
        attributes,
        status: is_error.then_some(Status { code: STATUS_CODE_ERROR }),
    };
    span.encode_to_vec()
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The attributes that every span has.
fn add_usual(request: &Request, attributes: &mut Vec<KeyValue>) {
    let mut add = |attribute| attributes.push(attribute);
    add(KeyValue::text("http.method", request.method_name()));
    add(KeyValue::text("http.target", request_uri(request)));
    let route = &request.scope().name;
    if !route.is_empty() {
        add(KeyValue::text("http.route", route));
    }
    let scheme = request.exchange().scheme();
    add(KeyValue::text("http.scheme", scheme.name().as_bytes()));
    if let Some(version) = protocol(request).strip_prefix(b"HTTP/") {
        add(KeyValue::text("http.flavor", version));
    }
    if let Some(agent) = request.header(KnownHeader::UserAgent) {
        add(KeyValue::text("http.user_agent", agent));
    }
    let received = request.declared_body_length().or_else(|| request.body.as_ref().map(|body| body.length()));
    add(KeyValue::number("http.request_content_length", received.unwrap_or(0)));
    let sent = request.sent();
    add(KeyValue::number("http.response_content_length", sent.bytes.saturating_sub(sent.head_bytes)));
    let status = status(request);
    if status > 0 {
        add(KeyValue::number("http.status_code", status.into()));
    }
    let name = server_name(request);
    add(KeyValue::text("net.host.name", if name.is_empty() { &request.host } else { name }));
    let own_port = request.exchange().local_address().and_then(port);
    if let Some(port) = own_port.filter(|&port| port != scheme.default_port()) {
        add(KeyValue::number("net.host.port", port.into()));
    }
    add(KeyValue::text("net.sock.peer.addr", request.remote_text().as_bytes()));
    if let Some(port) = port(request.remote()) {
        add(KeyValue::number("net.sock.peer.port", port.into()));
    }
}
