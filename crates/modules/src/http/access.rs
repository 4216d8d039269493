//! access: access control of requests by address. See [`shared::access`](crate::shared::access).
//!   allow ADDRESS | CIDR | unix: | all;                          http, server, location, limit_except
//!   deny  ADDRESS | CIDR | unix: | all;                          http, server, location, limit_except
//! (<https://nginx.org/en/docs/http/ngx_http_access_module.html>)

use gale_base::log_level::Level;
use gale_config::{Body, Contexts, ManyWith, Setting, Takes, slot};
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::configuration::settings::Satisfy;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::phases::{Decide, Flow, Phase};

use crate::shared::access::{Rule, decide, rule};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_access",
    directives: &[
        Directive {
            name: "allow",
            about: "Allows access for an address, a network, unix: or all.",
            store: &ManyWith { parse: |builder, statement| rule(builder, statement, true), slot: slot!(Conf, rules) },
            ..RULE
        },
        Directive {
            name: "deny",
            about: "Denies access for an address, a network, unix: or all.",
            store: &ManyWith { parse: |builder, statement| rule(builder, statement, false), slot: slot!(Conf, rules) },
            ..RULE
        },
    ],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart {
        handlers: &[(Phase::Access, &Decide { applies: |conf: &Conf| !conf.rules.get().is_empty(), run })],
        ..HttpPart::EMPTY
    }],
};

/// Common fields of the directive rows.
const RULE: Directive = Directive {
    name: "",
    contexts: Contexts::ANYWHERE.or(Contexts::LIMIT_EXCEPT),
    takes: Takes::Exactly(1),
    body: Body::None,
    default: "",
    about: "",
    store: &gale_config::Inert,
};

#[derive(Default)]
struct Conf {
    rules: Setting<Vec<Rule>>,
}

fn run(request: &mut Request, conf: &Conf) -> Flow {
    match decide(conf.rules.get(), request.remote()) {
        None => Flow::Next,
        Some(true) => Flow::Allow,
        Some(false) => {
            if *request.scope().core.satisfy.get() == Satisfy::All {
                request.log(Level::Error, format_args!("access forbidden by rule"));
            }
            Flow::Respond(403)
        }
    }
}
