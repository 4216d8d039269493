//! limit_conn: limit on the number of concurrent sessions per key. See
//! [`shared::limit_conn`](crate::shared::limit_conn).
//!   limit_conn_zone KEY zone=NAME:SIZE;                          stream
//!   limit_conn ZONE NUMBER;                                      stream, server
//!   limit_conn_log_level LEVEL;  limit_conn_dry_run on | off;    stream, server
//!   $limit_conn_status
//! (<https://nginx.org/en/docs/stream/ngx_stream_limit_conn_module.html>)

use std::any::Any;

use gale_config::{Contexts, Custom, Diagnostic, One, Takes, slot, values};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_engine::variables::Variable;
use gale_stream::module::StreamPart;
use gale_stream::session::phases::{Decide, Flow, Phase};
use gale_stream::session::{self, Session};

use super::ROW;
use crate::shared::figures;
use crate::shared::limit_conn::{Counting, Limits, append_status, zone_directive};
use crate::shared::limits::log_level;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "stream_limit_conn",
    directives: &[
        zone_directive::<Session>(Contexts::STREAM),
        Directive {
            name: "limit_conn",
            takes: Takes::Exactly(2),
            about: "Sets the zone and the maximum number of concurrent sessions for a key.",
            store: &Custom(|limits: &mut Limits<Session>, builder, statement| limits.add(builder, statement)),
            ..ROW
        },
        Directive {
            name: "limit_conn_log_level",
            default: "error",
            about: "Sets the log level for rejected sessions.",
            store: &One { parse: log_level, slot: slot!(Limits<Session>, log_level) },
            ..ROW
        },
        Directive {
            name: "limit_conn_dry_run",
            takes: Takes::Flag,
            default: "off",
            about: "Enables or disables the dry run mode: sessions are counted, but not limited.",
            store: &One { parse: values::flag, slot: slot!(Limits<Session>, dry_run) },
            ..ROW
        },
    ],
    conf: Some(ConfType { merge, ..ConfType::of::<Limits<Session>>() }),
    parts: &[&StreamPart {
        variables: &[Variable::named("limit_conn_status", append_status)],
        handlers: &[(Phase::PreAccess, &Decide { applies: |limits: &Limits<Session>| !limits.is_empty(), run: limit })],
        ..StreamPart::EMPTY
    }],
};

impl Counting for Session {
    const FIGURES: &'static str = figures::STREAM_LIMIT_CONNS;
}

fn limit(session: &mut Session, limits: &Limits<Session>) -> Flow {
    if limits.admit(session) { Flow::Next } else { Flow::Finish(session::SERVICE_UNAVAILABLE) }
}

fn merge(conf: &mut dyn Any, parent: Option<&dyn Any>, _: &mut Builder) -> Result<(), Diagnostic> {
    let limits: &mut Limits<Session> = conf.downcast_mut().expect("this module's settings");
    limits.inherit(parent.and_then(|parent| parent.downcast_ref()));
    Ok(())
}
