//! tunnel: connects clients to servers by CONNECT, and relays their bytes.
//!   tunnel_pass [ADDRESS];                              server, location, if in location
//!   and the directives of the protocol's groups (`upstream_rows.rs`)
//!                                                       http, server, location
//! (<https://nginx.org/en/docs/http/ngx_http_tunnel_module.html>, RFC 9110 §9.3.6)
//!
//! Access rules must restrict the hosts and ports: without an address in `tunnel_pass` a client can reach any server
//! that it names.

use std::any::Any;

use gale_config::{Contexts, Custom, Diagnostic, OneWith, Setting, Statement, Takes, slot};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::configuration::builder::InHttp;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::phases::Flow;
use gale_http_upstream::receiving::{BodyRead, HeadRead, Malformed, ResponseReader, UpstreamHead};
use gale_http_upstream::sending::{RequestBody, Unframed};
use gale_http_upstream::settings::{RetryOn, UpstreamOf};
use gale_http_upstream::{Alone, KeepHead, Passing, Wire, pass_on, written_before};
use gale_protocol::request::Method;
use gale_runtime::{Buffer, Bytes};
use gale_upstream::{AddressPass, plain};

use crate::http::upstream_pass::{PassRequests, look_up_status};
use crate::http::upstream_rows::{own_row, reworded, send_lowat, upstream_protocol, upstream_table};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_tunnel",
    directives: &reworded(
        upstream_table!([
            Directive {
                contexts: Contexts::SERVER.or(Contexts::LOCATION).or(Contexts::IF_IN_LOCATION),
                ..own_row(
                    "tunnel_pass",
                    Takes::Between(0, 1),
                    "",
                    "Enables tunnels for CONNECT requests, to a server or group of servers, or by default to the \
                     requested host.",
                    &Custom(tunnel_pass),
                )
            },
            own_row(
                "tunnel_send_lowat",
                Takes::Exactly(1),
                "",
                "No effect on Linux, as in nginx.",
                &OneWith { parse: send_lowat, slot: slot!(Conf, send_lowat) },
            ),
        ]),
        &[
            (
                "tunnel_send_timeout",
                "No effect: tunnels without traffic are closed after tunnel_read_timeout. The value is checked.",
            ),
            ("tunnel_read_timeout", "Sets the timeout after which a tunnel without traffic is closed."),
            ("tunnel_buffer_size", "No effect: tunnels choose the size of their buffers. The value is checked."),
        ],
    ),
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart { handlers: PassRequests::<Conf>::HANDLERS, ..HttpPart::EMPTY }],
};

upstream_protocol! {
    /// The protocol: a connection without requests.
    TunnelProtocol, Conf, "tunnel",
    has [ConnectSettings, SocketBufferSettings, ExchangeSettings, RetrySettings],
    retry_on RETRY_CONDITIONS,
    pass_by pass,
}

/// The conditions of `tunnel_next_upstream`: a server that is only connected to has no invalid responses.
const RETRY_CONDITIONS: &[(&str, u32)] = &[
    ("error", RetryOn::ERROR.bits()),
    ("timeout", RetryOn::TIMEOUT.bits()),
    ("off", RetryOn::OFF.bits()),
    ("denied", RetryOn::DENIED.bits()),
];

#[derive(Default)]
struct Conf {
    upstream: UpstreamOf<TunnelProtocol>,
    /// Not inherited: a location's content handler is its own.
    pass: Option<AddressPass<Request>>,
    send_lowat: Setting<u64>,
}

fn tunnel_pass(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let word = statement.args.first().cloned().unwrap_or_else(|| {
        let mut word = statement.name.clone();
        word.text = "$host:$request_port".into();
        word
    });
    conf.pass = Some(AddressPass::of_word(builder, statement, &word, conf.pass.is_some(), plain)?);
    builder.allow_connect();
    Ok(())
}

fn merge(conf: &mut dyn Any, _: Option<&dyn Any>, _: &mut Builder) -> Result<(), Diagnostic> {
    let conf: &mut Conf = conf.downcast_mut().expect("this module's settings");
    conf.upstream.complete(&[])
}

/// Connects a client to a server. The error is the status of the response.
async fn pass(request: &mut Request, conf: &Conf) -> Result<Flow, u16> {
    if request.method() != Method::Connect {
        return Err(405);
    }
    let target = conf
        .pass
        .as_ref()
        .expect("a location with this handler has the setting")
        .resolve(request)
        .await
        .map_err(look_up_status)?;
    let reader = || -> Box<dyn ResponseReader> { Box::new(Connected) };
    let mut passing = Passing {
        selection: target.select(request),
        upstream: target.sticky_upstream(request),
        scheme: "",
        tls: None,
        write: &written_before,
        uri: Bytes::new(),
        wire: Wire::Alone(Alone { head: Bytes::new(), framing: &Unframed, reader: &reader, reuses_connections: false }),
        body: RequestBody::None,
        settings: &conf.upstream,
        time_max: None,
        rewriter: &KeepHead,
        upgrade: None,
        caching: None,
    };
    Ok(pass_on(request, &mut passing).await)
}

/// Protocol of a server that gets no request: the connection itself is its response.
struct Connected;

impl ResponseReader for Connected {
    fn is_tunnel(&self) -> bool {
        true
    }

    fn read_head(&mut self, _: &mut Buffer, _: bool) -> Result<HeadRead, Malformed> {
        Ok(HeadRead::Whole(Box::new(UpstreamHead { status: 200, ..UpstreamHead::default() })))
    }

    fn read_body(&mut self, _: &mut Buffer, _: bool) -> Result<BodyRead, Malformed> {
        Ok(BodyRead::Partial)
    }

    fn keeps_alive(&self) -> bool {
        false
    }
}
