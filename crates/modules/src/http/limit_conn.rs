//! limit_conn: limit on the number of concurrent requests per key. See
//! [`shared::limit_conn`](crate::shared::limit_conn).
//!   limit_conn_zone KEY zone=NAME:SIZE;                          http
//!   limit_conn ZONE NUMBER;                                      http, server, location
//!   limit_conn_status CODE;  limit_conn_log_level LEVEL;  limit_conn_dry_run on | off;    http, server, location
//!   $limit_conn_status
//! (<https://nginx.org/en/docs/http/ngx_http_limit_conn_module.html>)
//!
//! A request is checked once, across internal redirects and subrequests. A copy made by `mirror` does not count: the
//! request may end before its copies do.

use std::any::Any;

use gale_config::{Body, Contexts, Custom, Diagnostic, One, Setting, Takes, slot, values};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::phases::{Decide, Flow, Phase};
use gale_http::variables::Variable;

use crate::shared::figures;
use crate::shared::limit_conn::{Counting, Limits, append_status, zone_directive};
use crate::shared::limits::{log_level, rejection_status};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_limit_conn",
    directives: &[
        zone_directive::<Request>(Contexts::HTTP),
        Directive {
            name: "limit_conn",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(2),
            body: Body::None,
            default: "",
            about: "Sets the zone and the maximum number of concurrent requests for a key.",
            store: &Custom(|conf: &mut Conf, builder, statement| conf.limits.add(builder, statement)),
        },
        Directive {
            name: "limit_conn_log_level",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "error",
            about: "Sets the log level for rejected requests.",
            store: &One { parse: log_level, slot: slot!(Conf, limits.log_level) },
        },
        Directive {
            name: "limit_conn_status",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "503",
            about: "Sets the status code of responses to rejected requests.",
            store: &One { parse: rejection_status, slot: slot!(Conf, status) },
        },
        Directive {
            name: "limit_conn_dry_run",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Flag,
            body: Body::None,
            default: "off",
            about: "Enables or disables the dry run mode: requests are counted, but not limited.",
            store: &One { parse: values::flag, slot: slot!(Conf, limits.dry_run) },
        },
    ],
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart {
        variables: &[Variable::named("limit_conn_status", append_status)],
        handlers: &[(Phase::PreAccess, &Decide { applies: |conf: &Conf| !conf.limits.is_empty(), run: limit })],
        ..HttpPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    limits: Limits<Request>,
    status: Setting<u16>,
}

impl Counting for Request {
    const FIGURES: &'static str = figures::HTTP_LIMIT_CONNS;
}

fn limit(request: &mut Request, conf: &Conf) -> Flow {
    if conf.limits.admit(request) { Flow::Next } else { Flow::Respond(*conf.status.get()) }
}

fn merge(conf: &mut dyn Any, parent: Option<&dyn Any>, _: &mut Builder) -> Result<(), Diagnostic> {
    let conf: &mut Conf = conf.downcast_mut().expect("this module's settings");
    let parent: Option<&Conf> = parent.and_then(|parent| parent.downcast_ref());
    conf.limits.inherit(parent.map(|parent| &parent.limits));
    Ok(())
}
