//! memcached: answers requests with values from a memcached server.
//!   set $memcached_key KEY;
//!   memcached_pass ADDRESS;                             location, if in location
//!   memcached_gzip_flag NUMBER;
//!   and the directives of the protocol's groups (`upstream_rows.rs`)
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
use gale_http::request::phases::Flow;
use gale_http::variables::template::Template;
use gale_http_upstream::memcached::MemcachedReader;
use gale_http_upstream::receiving::ResponseReader;
use gale_http_upstream::sending::{RequestBody, Unframed};
use gale_http_upstream::settings::{RetryOn, UpstreamOf};
use gale_http_upstream::{Alone, KeepHead, Passing, Wire, pass_on, written_before};
use gale_protocol::memcached::write_get;
use gale_protocol::request::Method;
use gale_runtime::Bytes;
use gale_upstream::{AddressPass, plain};

use crate::http::upstream_pass::{PassRequests, look_up_status};
use crate::http::upstream_rows::{own_row, reworded, upstream_protocol, upstream_table};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_memcached",
    directives: &reworded(
        upstream_table!([
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
        ]),
        &[
            (
                "memcached_request_timeout",
                "Limits the time from the first connection attempt to the end of the reply; 0 disables the limit.",
            ),
            ("memcached_buffer_size", "Sets the size of the buffer for the first line of a reply."),
        ],
    ),
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart { handlers: PassRequests::<Conf>::HANDLERS, ..HttpPart::EMPTY }],
};

upstream_protocol! {
    /// The protocol: values without fields, found or not.
    MemcachedProtocol, Conf, "memcached",
    has [ConnectSettings, ExchangeSettings, DeadlineSettings, RetrySettings],
    retry_on RETRY_CONDITIONS,
    pass_by pass,
    always {
        answers_not_found = true,
        response_body.force_ranges = Setting::of(true),
    }
}

/// The conditions of `memcached_next_upstream`.
const RETRY_CONDITIONS: &[(&str, u32)] = &[
    ("error", RetryOn::ERROR.bits()),
    ("timeout", RetryOn::TIMEOUT.bits()),
    ("invalid_response", RetryOn::INVALID_HEADER.bits()),
    ("not_found", RetryOn::HTTP_404.bits()),
    ("off", RetryOn::OFF.bits()),
    ("denied", RetryOn::DENIED.bits()),
];

#[derive(Default)]
struct Conf {
    upstream: UpstreamOf<MemcachedProtocol>,
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

fn merge(conf: &mut dyn Any, _: Option<&dyn Any>, _: &mut Builder) -> Result<(), Diagnostic> {
    let conf: &mut Conf = conf.downcast_mut().expect("this module's settings");
    conf.upstream.complete(&[])
}

/// Fetches the value from a server. The error is the status of the response.
async fn pass(request: &mut Request, conf: &Conf) -> Result<Flow, u16> {
    if !matches!(request.method(), Method::Get | Method::Head) {
        return Err(405);
    }
    let (pass, key) = conf.pass.as_ref().expect("a location with this handler has the setting");
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
