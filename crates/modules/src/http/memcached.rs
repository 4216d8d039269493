//! memcached: answers requests with values from a memcached server.
//!   set $memcached_key KEY;
//!   memcached_pass ADDRESS;                             location, if in location
//!   memcached_gzip_flag NUMBER;
//!   and some directives of all proxying modules (`upstream_rows.rs`)
//!                                                       http, server, location
//! (<https://nginx.org/en/docs/http/ngx_http_memcached_module.html>)

use std::any::Any;

use gale_base::log_level::Level;
use gale_config::{Contexts, Custom, Diagnostic, One, Setting, Statement, Takes, slot, values};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::configuration::builder::InHttp;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::files::set_content_type;
use gale_http::request::phases::{Flow, Phase};
use gale_http::upstream::memcached::MemcachedReader;
use gale_http::upstream::receiving::ResponseReader;
use gale_http::upstream::sending::{RequestBody, Unframed};
use gale_http::upstream::settings::UpstreamSettings;
use gale_http::upstream::{Alone, KeepHead, Passing, Wire, pass_on, written_before};
use gale_http::variables::template::{SizeTemplate, Template};
use gale_protocol::memcached::write_get;
use gale_protocol::request::Method;
use gale_runtime::Bytes;
use gale_upstream::{AddressPass, plain};

use crate::http::upstream_pass::{PassRequests, look_up_status};
use crate::http::upstream_rows::{self, fix, own_row, row};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_memcached",
    directives: &[
        Directive {
            contexts: Contexts::LOCATION.or(Contexts::IF_IN_LOCATION),
            ..own_row(
                "memcached_pass",
                Takes::Exactly(1),
                "",
                "Sets the memcached server address, or the group of servers, that is asked for $memcached_key.",
                &Custom(memcached_pass),
            )
        },
        own_row(
            "memcached_gzip_flag",
            Takes::Exactly(1),
            "0",
            "Sets the memcached flag that marks a value as gzipped.",
            &One { parse: values::number, slot: slot!(Conf, gzip_flag) },
        ),
        row!(Conf, "memcached", "_bind", Takes::Between(1, 2), "off",
            "Sets the local address of connections to servers.", with bind, bind),
        row!(Conf, "memcached", "_bind_dynamic", Takes::Flag, "off",
            "No effect: the local address is always resolved when a connection is opened.",
            values flag, bind_dynamic),
        row!(Conf, "memcached", "_allow_upstream", Takes::AtLeast(1), "",
            "Allows access to the chosen server only if all values are non-empty and not 0.",
            many_with conditions, allow_upstream),
        row!(Conf, "memcached", "_socket_keepalive", Takes::Flag, "off",
            "Enables or disables TCP keepalive (SO_KEEPALIVE) on connections to servers.",
            values flag, socket_keepalive),
        row!(Conf, "memcached", "_connect_timeout", Takes::Exactly(1), "60s",
            "Sets the timeout for establishing a connection with a server.", values time_ms, connect_timeout),
        row!(Conf, "memcached", "_send_timeout", Takes::Exactly(1), "60s",
            "Sets the timeout between two successive writes to the server.", values time_ms, send_timeout),
        row!(Conf, "memcached", "_read_timeout", Takes::Exactly(1), "60s",
            "Sets the timeout between two successive reads from the server.", values time_ms, read_timeout),
        row!(Conf, "memcached", "_request_timeout", Takes::Exactly(1), "0",
            "Limits the time from the first connection attempt to the end of the reply; 0 disables the limit.",
            values time_ms, request_timeout),
        row!(Conf, "memcached", "_buffer_size", Takes::Exactly(1), "4k",
            "Sets the size of the buffer for the first line of a reply.", values size, buffer_size),
        row!(Conf, "memcached", "_next_upstream", Takes::AtLeast(1), "error timeout",
            "Sets the failures after which the next server of the group is tried.",
            updated memcached_next_upstream, next_upstream),
        row!(Conf, "memcached", "_next_upstream_tries", Takes::Exactly(1), "0",
            "Limits the number of servers that are tried; 0 disables the limit.", values number, next_upstream_tries),
        row!(Conf, "memcached", "_next_upstream_timeout", Takes::Exactly(1), "0",
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
    pass: Option<(AddressPass<Request>, Template)>,
    gzip_flag: Setting<u64>,
}

fn memcached_pass(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let pass = AddressPass::read(builder, statement, conf.pass.is_some(), plain)?;
    let mut word = statement.name.clone();
    word.text = "$memcached_key".into();
    conf.pass = Some((pass, builder.http_mut().template(&word)?));
    Ok(())
}

fn merge(conf: &mut dyn Any, _: Option<&dyn Any>, builder: &mut Builder) -> Result<(), Diagnostic> {
    let conf: &mut Conf = conf.downcast_mut().expect("this module's settings");
    let settings = &mut conf.upstream;
    fix(&mut settings.socket_rcvbuf, 0);
    fix(&mut settings.socket_sndbuf, 0);
    fix(&mut settings.buffers, (8, 4096));
    fix(&mut settings.buffering, false);
    fix(&mut settings.request_buffering, true);
    fix(&mut settings.max_temp_file_size, 0);
    fix(&mut settings.ignore_client_abort, false);
    fix(&mut settings.intercept_errors, true);
    settings.answers_not_found = true;
    fix(&mut settings.force_ranges, true);
    fix(&mut settings.limit_rate, SizeTemplate::Constant(0));
    fix(&mut settings.pass_request_headers, false);
    fix(&mut settings.pass_request_body, false);
    upstream_rows::complete(settings, builder, false, "memcached", "memcached", &[])
}

/// Fetches the value from a server. The error is the status of the response.
async fn pass(request: &mut Request, conf: &Conf) -> Result<Flow, u16> {
    if !matches!(request.method(), Method::Get | Method::Head) {
        return Err(405);
    }
    let (pass, key) = conf.pass.as_ref().expect("there whenever the handler is");
    let target = pass.resolve(request).await.map_err(look_up_status)?;
    let key = key.evaluate(request);
    if key.is_empty() {
        request.log(Level::Error, format_args!("the \"$memcached_key\" variable is not set"));
        return Err(500);
    }
    set_content_type(request);
    let mut line = Vec::with_capacity(key.len() + 16);
    let key_length = write_get(&mut line, &key);
    let head = Bytes::from(line);
    let key = head.slice(head.len() - 2 - key_length..head.len() - 2);
    let line_max = conf.upstream.head_max();
    let gzip_flag = *conf.gzip_flag.get();
    let reader = || -> Box<dyn ResponseReader> { Box::new(MemcachedReader::new(key.clone(), line_max, gzip_flag)) };
    let mut passing = Passing {
        selection: target.select(request),
        upstream: target.sticky_upstream(request),
        scheme: "memcached://",
        tls: None,
        write: &written_before,
        uri: Bytes::new(),
        wire: Wire::Alone(Alone { head, framing: &Unframed, reader: &reader, reuses_connections: true }),
        body: RequestBody::None,
        settings: &conf.upstream,
        time_max: None,
        rewriter: &KeepHead,
        upgrade: None,
        caching: None,
    };
    Ok(pass_on(request, &mut passing).await)
}
