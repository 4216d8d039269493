//! mirror: copies of requests, whose responses are discarded.
//!   mirror URI|off;                 http, server, location; several make several copies
//!   mirror_request_body on|off;     http, server, location
//! (<https://nginx.org/en/docs/http/ngx_http_mirror_module.html>)
//!
//! A copy has the method, the arguments and, unless `mirror_request_body` is off, the body of the original, which is
//! then read first. Copies run in the background: unlike in nginx, the next request of the connection does not wait for
//! them.

use gale_config::{Body, Contexts, Custom, Diagnostic, One, Setting, Statement, Takes, slot, values};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::phases::{Flow, LocalBoxFuture, Phase, Wait};
use gale_http::request::request_body::read_body;
use gale_http::request::subrequest::{Target, run_in_background};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_mirror",
    directives: &[
        Directive {
            name: "mirror",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "off",
            about: "Sets the URI to which copies of requests are sent; off disables mirroring.",
            store: &Custom(mirror),
        },
        Directive {
            name: "mirror_request_body",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Flag,
            body: Body::None,
            default: "on",
            about: "Enables or disables mirroring of the request body.",
            store: &One { parse: values::flag, slot: slot!(Conf, mirror_request_body) },
        },
    ],
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart {
        handlers: &[(
            Phase::PreContent,
            &Wait { applies: |conf: &Conf| !conf.uris().is_empty(), first: at_once, then: read_and_copy },
        )],
        ..HttpPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    /// Empty for `off`; `None` until it is set here or inherited.
    copies: Option<Vec<Box<[u8]>>>,
    mirror_request_body: Setting<bool>,
}

impl Conf {
    fn uris(&self) -> &[Box<[u8]>] {
        self.copies.as_deref().unwrap_or_default()
    }
}

fn mirror(conf: &mut Conf, _: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let uri: &[u8] = &statement.args[0].text;
    match (&mut conf.copies, uri) {
        (copies @ None, b"off") => *copies = Some(Vec::new()),
        (Some(_), b"off") => return Err(statement.directive_error("is duplicate")),
        (Some(uris), _) if uris.is_empty() => return Err(statement.directive_error("is duplicate")),
        (copies, uri) => copies.get_or_insert_default().push(uri.into()),
    }
    Ok(())
}

fn merge(conf: &mut dyn std::any::Any, parent: Option<&dyn std::any::Any>, _: &mut Builder) -> Result<(), Diagnostic> {
    let conf: &mut Conf = conf.downcast_mut().expect("its own settings");
    if let Some(parent) = parent.and_then(|parent| parent.downcast_ref::<Conf>())
        && conf.copies.is_none()
    {
        conf.copies = parent.copies.clone();
    }
    Ok(())
}

/// Starts the copies at once if there is no body to read first.
fn at_once(request: &mut Request, conf: &Conf) -> Option<Flow> {
    if !request.is_main() {
        return Some(Flow::Next);
    }
    let reads_body = *conf.mirror_request_body.get() && request.declared_body_length() != Some(0);
    if reads_body && request.body.is_none() {
        return None;
    }
    Some(copy(request, conf))
}

fn read_and_copy<'a>(request: &'a mut Request, conf: &'a Conf) -> LocalBoxFuture<'a, Flow> {
    Box::pin(async move {
        match read_body(request).await {
            Ok(_) => copy(request, conf),
            Err(error) => Flow::Respond(error.status()),
        }
    })
}

fn copy(request: &mut Request, conf: &Conf) -> Flow {
    for uri in conf.uris() {
        let target = Target { args: request.args.clone(), keeps_method: true, ..Target::new(uri) };
        // Too many subrequests are logged; the client's response does not change.
        run_in_background(request, target);
    }
    Flow::Next
}
