//! auth_request: access control by the response of a subrequest.
//!   auth_request URI|off;                http, server, location
//!   auth_request_set $VARIABLE VALUE;    http, server, location
//! (<https://nginx.org/en/docs/http/ngx_http_auth_request_module.html>)
//!
//! 2xx lets the request pass, 401 (with its challenges) and 403 become its response, and any other status leads to 500.
//! The subrequest has no body, and only the head of its response is used.

use gale_protocol::response::ResponseField;
use std::sync::Arc;

use gale_base::log_level::Level;
use gale_config::{Body, Contexts, Custom, Diagnostic, Statement, Takes};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_engine::variables::subject::Subject;
use gale_engine::variables::{Definition, VariableId};
use gale_http::configuration::builder::InHttp;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::phases::{Flow, Phase, Wait};
use gale_http::request::response::Field;
use gale_http::request::subrequest::{Target, ask};
use gale_http::variables::template::Template;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_auth_request",
    directives: &[
        Directive {
            name: "auth_request",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "off",
            about: "Enables authorization by the result of a subrequest to this URI, or disables it (off).",
            store: &Custom(auth_request),
        },
        Directive {
            name: "auth_request_set",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(2),
            body: Body::None,
            default: "",
            about: "Sets a variable after the authorization subrequest completes; the value may contain variables of \
                    its response.",
            store: &Custom(auth_request_set),
        },
    ],
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart {
        handlers: &[(
            Phase::Access,
            &Wait {
                applies: |conf: &Conf| conf.uri().is_some(),
                first: |_, _| None,
                then: |request, conf| Box::pin(decide(request, conf)),
            },
        )],
        ..HttpPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    /// The URI, or `None` for `off`, set here or inherited.
    asks: Option<Option<Box<[u8]>>>,
    set: Vec<(VariableId, Template)>,
}

impl Conf {
    fn uri(&self) -> Option<&[u8]> {
        self.asks.as_ref()?.as_deref()
    }
}

/// A variable before the subrequest has a response.
struct Unset;

impl Definition<Request> for Unset {
    fn append(&self, _: &Request, _: &mut Vec<u8>) -> bool {
        false
    }
}

fn auth_request(conf: &mut Conf, _: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if conf.asks.is_some() {
        return Err(statement.directive_error("is duplicate"));
    }
    let uri: &[u8] = &statement.args[0].text;
    conf.asks = Some((uri != b"off").then(|| uri.into()));
    Ok(())
}

fn auth_request_set(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let word = &statement.args[0];
    let Some(name) = word.text.strip_prefix(b"$") else {
        return Err(Diagnostic::emerg(format!("invalid variable name \"{}\"", word.text)).at(word.span));
    };
    let http = builder.http_mut();
    let variable = http.variables.table.assigned(name, Some(word.span), Arc::new(Unset), false);
    let value = http.template(&statement.args[1])?;
    conf.set.push((variable, value));
    Ok(())
}

fn merge(conf: &mut dyn std::any::Any, parent: Option<&dyn std::any::Any>, _: &mut Builder) -> Result<(), Diagnostic> {
    let conf: &mut Conf = conf.downcast_mut().expect("its own settings");
    let Some(parent) = parent.and_then(|parent| parent.downcast_ref::<Conf>()) else { return Ok(()) };
    conf.asks = conf.asks.take().or_else(|| parent.asks.clone());
    if conf.set.is_empty() {
        conf.set = parent.set.clone();
    }
    Ok(())
}

async fn decide(request: &mut Request, conf: &Conf) -> Flow {
    let uri = conf.uri().expect("a location with this handler has the setting");
    let answer = match ask(request, Target { shares_body: false, ..Target::new(uri) }).await {
        Ok(answer) => answer,
        Err(status) => return Flow::Respond(status),
    };
    // Stored values outlive internal redirects.
    for (variable, value) in &conf.set {
        request.assign_variable(*variable, &value.evaluate(&answer));
    }
    match answer.response.status {
        200..300 => Flow::Allow,
        403 => Flow::Respond(403),
        401 => {
            let is_challenge = |field: &&Field| field.name.known() == Some(ResponseField::WwwAuthenticate);
            for challenge in answer.response.fields.iter().filter(is_challenge) {
                request.response.add(challenge.name.clone(), challenge.value.clone());
            }
            Flow::Respond(401)
        }
        status => {
            request.log(Level::Error, format_args!("auth request unexpected status: {status}"));
            Flow::Respond(500)
        }
    }
}
