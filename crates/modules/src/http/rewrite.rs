//! rewrite: answers that the configuration itself gives.
//!   return CODE [TEXT];   return CODE URL;   return URL;          server, location, if
//! (<https://nginx.org/en/docs/http/ngx_http_rewrite_module.html>)

use bytes::Bytes;
use gale_base::units;
use gale_config::{Body as BlockBody, Custom, Diagnostic, Place, Statement, Takes, Word};
use gale_engine::configuration::Builder;
use gale_engine::http::body::Body;
use gale_engine::http::files::set_content_type;
use gale_engine::http::phases::{Decide, Flow, Phase};
use gale_engine::http::request::Request;
use gale_engine::http::template::Template;
use gale_engine::module::{ConfType, Directive, Module};

/// See the file's head.
pub const MODULE: Module = Module {
    name: "http_rewrite",
    directives: &[Directive {
        name: "return",
        place: Place::SERVER.or(Place::LOCATION).or(Place::IF_IN_SERVER).or(Place::IF_IN_LOCATION),
        takes: Takes::Between(1, 2),
        body: BlockBody::None,
        default: "",
        about: "Ends the request with a status, and a text or a place to go to.",
        store: &Custom(add_return),
    }],
    conf: Some(ConfType::of::<Conf>()),
    handlers: &[
        (Phase::ServerRewrite, &Decide { applies: |conf: &Conf| conf.answer.is_some(), run }),
        (Phase::Rewrite, &Decide { applies: |conf: &Conf| conf.answer.is_some(), run }),
    ],
    ..Module::EMPTY
};

/// Not inherited: what a server returns is settled before a location is found.
#[derive(Default)]
struct Conf {
    /// The first `return` is the one that acts.
    answer: Option<Answer>,
}

struct Answer {
    status: u16,
    text: Option<Template>,
}

/// Statuses whose second argument is a place to go to.
fn is_redirect(status: u16) -> bool {
    matches!(status, 301 | 302 | 303 | 307 | 308)
}

fn add_return(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let answer = match statement.args.as_slice() {
        [word] => match status_of(word) {
            Some(status) => Answer { status, text: None },
            None if is_url(word) => Answer { status: 302, text: Some(builder.http_mut().template(word)?) },
            None => return Err(invalid_code(word)),
        },
        [word, text] => {
            let status = status_of(word).ok_or_else(|| invalid_code(word))?;
            Answer { status, text: Some(builder.http_mut().template(text)?) }
        }
        _ => return Err(statement.directive_error("takes one or two arguments")),
    };
    conf.answer.get_or_insert(answer);
    Ok(())
}

fn status_of(word: &Word) -> Option<u16> {
    units::parse_number(&word.text)
        .and_then(|number| u16::try_from(number).ok())
        .filter(|status| !(100..200).contains(status) && *status <= 999)
}

fn is_url(word: &Word) -> bool {
    [&b"http://"[..], b"https://", b"$scheme"].iter().any(|start| word.text.starts_with(start))
}

fn invalid_code(word: &Word) -> Diagnostic {
    Diagnostic::emerg(format!("invalid return code \"{}\"", word.text)).at(word.span)
}

fn run(request: &mut Request, conf: &Conf) -> Flow {
    let Some(answer) = &conf.answer else { return Flow::Next };
    let status = answer.status;
    let Some(text) = &answer.text else {
        return if status >= 400 { Flow::Respond(status) } else { respond_with(request, status, Bytes::new()) };
    };
    if is_redirect(status) {
        request.response.location = text.evaluate(request);
        return Flow::Respond(status);
    }
    let body = match text.as_constant() {
        Some(text) => Bytes::copy_from_slice(text),
        None => text.evaluate(request).into(),
    };
    respond_with(request, status, body)
}

/// The text as the whole answer: no error page takes its place.
fn respond_with(request: &mut Request, status: u16, body: Bytes) -> Flow {
    request.response.status = status;
    if status == 204 {
        return Flow::Answer(Body::Empty);
    }
    set_content_type(request);
    Flow::Answer(if body.is_empty() { Body::Empty } else { Body::Bytes(body) })
}
