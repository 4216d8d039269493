//! access: access control of sessions by address. See [`shared::access`](crate::shared::access).
//!   allow ADDRESS | CIDR | unix: | all;                          stream, server
//!   deny  ADDRESS | CIDR | unix: | all;                          stream, server
//! (<https://nginx.org/en/docs/stream/ngx_stream_access_module.html>)

use gale_base::log_level::Level;
use gale_config::{ManyWith, Setting, slot};
use gale_engine::module::{ConfType, Directive, Module};
use gale_engine::variables::subject::Subject;
use gale_stream::module::StreamPart;
use gale_stream::session::phases::{Decide, Flow, Phase};
use gale_stream::session::{self, Session};

use super::ROW;
use crate::shared::access::{Rule, decide, rule};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "stream_access",
    directives: &[
        Directive {
            name: "allow",
            about: "Allows access for an address, a network, unix: or all.",
            store: &ManyWith { parse: |builder, statement| rule(builder, statement, true), slot: slot!(Conf, rules) },
            ..ROW
        },
        Directive {
            name: "deny",
            about: "Denies access for an address, a network, unix: or all.",
            store: &ManyWith { parse: |builder, statement| rule(builder, statement, false), slot: slot!(Conf, rules) },
            ..ROW
        },
    ],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&StreamPart {
        handlers: &[(Phase::Access, &Decide { applies: |conf: &Conf| !conf.rules.get().is_empty(), run })],
        ..StreamPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    rules: Setting<Vec<Rule>>,
}

fn run(session: &mut Session, conf: &Conf) -> Flow {
    match decide(conf.rules.get(), session.remote()) {
        None => Flow::Next,
        Some(true) => Flow::PhaseDone,
        Some(false) => {
            session.log(Level::Error, format_args!("access forbidden by rule"));
            Flow::Finish(session::FORBIDDEN)
        }
    }
}
