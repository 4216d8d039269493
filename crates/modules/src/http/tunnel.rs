//! tunnel: connects clients to servers by CONNECT, and relays their bytes.
//!   tunnel_pass [ADDRESS];                              server, location, if in location
//!   and some directives of all proxying modules (`upstream_rows.rs`)
//!                                                       http, server, location
//! (<https://nginx.org/en/docs/http/ngx_http_tunnel_module.html>, RFC 9110 §9.3.6)
//!
//! Access rules must restrict the hosts and ports: without an address in `tunnel_pass` a client can reach any server
//! that it names.

use std::any::Any;
use std::time::Duration;

use gale_config::{Contexts, Custom, Diagnostic, OneWith, Setting, Statement, Takes, slot};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::configuration::builder::InHttp;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::phases::{Flow, Phase};
use gale_http::upstream::receiving::{BodyRead, HeadRead, Malformed, ResponseReader, UpstreamHead};
use gale_http::upstream::sending::{RequestBody, Unframed};
use gale_http::upstream::settings::UpstreamSettings;
use gale_http::upstream::{Alone, KeepHead, Passing, Wire, pass_on, written_before};
use gale_http::variables::template::SizeTemplate;
use gale_protocol::request::Method;
use gale_runtime::{Buffer, Bytes};
use gale_upstream::{AddressPass, plain};

use crate::http::upstream_pass::{PassRequests, look_up_status};
use crate::http::upstream_rows::{self, fix, own_row, row};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_tunnel",
    directives: &[
        Directive {
            contexts: Contexts::SERVER.or(Contexts::LOCATION).or(Contexts::IF_IN_LOCATION),
            ..own_row(
                "tunnel_pass",
                Takes::Between(0, 1),
                "",
                "Enables tunnels for CONNECT requests, to a server or group of servers, or by default to the requested \
                 host.",
                &Custom(tunnel_pass),
            )
        },
        own_row(
            "tunnel_send_lowat",
            Takes::Exactly(1),
            "",
            "No effect on Linux, as in nginx.",
            &OneWith { parse: upstream_rows::send_lowat, slot: slot!(Conf, send_lowat) },
        ),
        row!(Conf, "tunnel", "_bind", Takes::Between(1, 2), "off",
            "Sets the local address of connections to servers.", with bind, bind),
        row!(Conf, "tunnel", "_bind_dynamic", Takes::Flag, "off",
            "No effect: the local address is always resolved when a connection is opened.",
            values flag, bind_dynamic),
        row!(Conf, "tunnel", "_allow_upstream", Takes::AtLeast(1), "",
            "Allows access to the chosen server only if all values are non-empty and not 0.",
            many_with conditions, allow_upstream),
        row!(Conf, "tunnel", "_socket_keepalive", Takes::Flag, "off",
            "Enables or disables TCP keepalive (SO_KEEPALIVE) on connections to servers.",
            values flag, socket_keepalive),
        row!(Conf, "tunnel", "_socket_rcvbuf", Takes::Exactly(1), "0",
            "Sets the receive buffer size (SO_RCVBUF) of connections to servers.", values size, socket_rcvbuf),
        row!(Conf, "tunnel", "_socket_sndbuf", Takes::Exactly(1), "0",
            "Sets the send buffer size (SO_SNDBUF) of connections to servers.", values size, socket_sndbuf),
        row!(Conf, "tunnel", "_connect_timeout", Takes::Exactly(1), "60s",
            "Sets the timeout for establishing a connection with a server.", values time_ms, connect_timeout),
        row!(Conf, "tunnel", "_send_timeout", Takes::Exactly(1), "60s",
            "No effect: tunnels without traffic are closed after tunnel_read_timeout. The value is checked.",
            values time_ms, send_timeout),
        row!(Conf, "tunnel", "_read_timeout", Takes::Exactly(1), "60s",
            "Sets the timeout after which a tunnel without traffic is closed.", values time_ms, read_timeout),
        row!(Conf, "tunnel", "_buffer_size", Takes::Exactly(1), "4k",
            "No effect: tunnels choose the size of their buffers. The value is checked.", values size, buffer_size),
        row!(Conf, "tunnel", "_next_upstream", Takes::AtLeast(1), "error timeout",
            "Sets the failures after which the next server of the group is tried.",
            updated tunnel_next_upstream, next_upstream),
        row!(Conf, "tunnel", "_next_upstream_tries", Takes::Exactly(1), "0",
            "Limits the number of servers that are tried; 0 disables the limit.", values number, next_upstream_tries),
        row!(Conf, "tunnel", "_next_upstream_timeout", Takes::Exactly(1), "0",
            "Limits the time during which further servers are tried; 0 disables the limit.",
            values time_ms, next_upstream_timeout),
    ],
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart {
        handlers: &[(
            Phase::Content,
            &PassRequests {
                has_target: |conf: &Conf| conf.pass.is_some(),
                settings: |conf| &conf.upstream,
                rewriter: |_| &KeepHead,
                prepare: |_, _| true,
                pass: |request, conf| Box::pin(async { pass(request, conf).await.unwrap_or_else(Flow::Respond) }),
            },
        )],
        ..HttpPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    upstream: UpstreamSettings,
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

fn merge(conf: &mut dyn Any, _: Option<&dyn Any>, builder: &mut Builder) -> Result<(), Diagnostic> {
    let conf: &mut Conf = conf.downcast_mut().expect("this module's settings");
    let settings = &mut conf.upstream;
    fix(&mut settings.request_timeout, Duration::ZERO);
    fix(&mut settings.buffers, (8, 4096));
    fix(&mut settings.buffering, false);
    fix(&mut settings.request_buffering, false);
    fix(&mut settings.max_temp_file_size, 0);
    fix(&mut settings.ignore_client_abort, false);
    fix(&mut settings.intercept_errors, false);
    fix(&mut settings.force_ranges, false);
    fix(&mut settings.limit_rate, SizeTemplate::Constant(0));
    fix(&mut settings.pass_request_headers, false);
    fix(&mut settings.pass_request_body, false);
    upstream_rows::complete(settings, builder, false, "tunnel", "tunnel", &[])
}

/// Connects a client to a server. The error is the status of the response.
async fn pass(request: &mut Request, conf: &Conf) -> Result<Flow, u16> {
    if request.method() != Method::Connect {
        return Err(405);
    }
    let target =
        conf.pass.as_ref().expect("there whenever the handler is").resolve(request).await.map_err(look_up_status)?;
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
