//! The request body in the configuration: early reading, and variables.
//!   client_body_early_read STRING ...;          http, server
//!   $request_body   $request_body_file
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html#client_body_early_read>)
//!
//! Modules that read the body later get the bytes that were read here.

use gale_config::{Body as BlockBody, Contexts, Custom, Diagnostic, Setting, Statement, Takes};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::configuration::builder::InHttp;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::phases::{Flow, LocalBoxFuture, Phase, Wait};
use gale_http::request::request_body::{PassedBody, is_refused, read_body};
use gale_http::variables::Variable;
use gale_http::variables::template::{Template, any_is_true};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_client_body",
    directives: &[Directive {
        name: "client_body_early_read",
        contexts: Contexts::HTTP.or(Contexts::SERVER),
        takes: Takes::AtLeast(1),
        body: BlockBody::None,
        default: "",
        about: "Reads the whole request body before any other processing if at least one value is non-empty and not 0.",
        store: &Custom(early_read),
    }],
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart {
        variables: &[
            Variable::named("request_body", |request, _, out| append_body(request, out)),
            Variable::named("request_body_file", |request, _, out| append_path(request, out)),
        ],
        handlers: &[(
            Phase::PostRead,
            &Wait {
                applies: |conf: &Conf| conf.early_read.is_set(),
                first: |request, conf| {
                    if any_is_true(conf.early_read.get(), request) { None } else { Some(Flow::Next) }
                },
                then: |request, _| read(request),
            },
        )],
        ..HttpPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    early_read: Setting<Vec<Template>>,
}

fn early_read(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let mut texts = conf.early_read.take().unwrap_or_default();
    for word in &statement.args {
        texts.push(builder.http_mut().template(word)?);
    }
    conf.early_read.set(texts, Some(statement.span));
    Ok(())
}

fn merge(conf: &mut dyn std::any::Any, parent: Option<&dyn std::any::Any>, _: &mut Builder) -> Result<(), Diagnostic> {
    let conf: &mut Conf = conf.downcast_mut().expect("the settings of this module");
    if let Some(parent) = parent.and_then(|parent| parent.downcast_ref::<Conf>()) {
        conf.early_read.inherit(&parent.early_read);
    }
    Ok(())
}

fn read(request: &mut Request) -> LocalBoxFuture<'_, Flow> {
    Box::pin(async move {
        if is_refused(request) {
            return Flow::Respond(413);
        }
        match read_body(request).await {
            Ok(_) => Flow::Next,
            Err(error) => Flow::Respond(error.status()),
        }
    })
}

/// Appends the body. As in nginx, a body that is stored in a file is not read back for a variable.
fn append_body(request: &Request, out: &mut Vec<u8>) -> bool {
    match &request.body {
        Some(body) if body.file().is_none() && body.length() > 0 => {
            body.memory().iter().for_each(|piece| out.extend_from_slice(piece));
            true
        }
        Some(_) => false,
        None => request.shared_note::<PassedBody>().append(out),
    }
}

fn append_path(request: &Request, out: &mut Vec<u8>) -> bool {
    let path = request.body.as_ref().and_then(|body| body.path());
    if let Some(path) = &path {
        out.extend_from_slice(path.as_os_str().as_encoded_bytes());
    }
    path.is_some()
}
