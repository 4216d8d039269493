//! headers: fields that a configuration adds to responses.
//!   add_header NAME VALUE [always];          http, server, location, if in location
//! (<https://nginx.org/en/docs/http/ngx_http_headers_module.html>)

use gale_base::http_date;
use gale_config::{Body as BlockBody, Diagnostic, ManyWith, Place, Setting, Statement, Takes, slot};
use gale_engine::configuration::Builder;
use gale_engine::http::body::Body;
use gale_engine::http::filters::Change;
use gale_engine::http::request::Request;
use gale_engine::http::template::Template;
use gale_engine::module::{ConfType, Directive, Module};

/// See the file's head.
pub const MODULE: Module = Module {
    name: "http_headers_filter",
    directives: &[Directive {
        name: "add_header",
        place: Place::ANYWHERE.or(Place::IF_IN_LOCATION),
        takes: Takes::Between(2, 3),
        body: BlockBody::None,
        default: "",
        about: "A field to add to responses; with always, also to errors.",
        store: &ManyWith { parse: added, slot: slot!(Conf, added) },
    }],
    conf: Some(ConfType::of::<Conf>()),
    filters: &[&Change { applies: |conf: &Conf| !conf.added.get().is_empty(), run: add }],
    ..Module::EMPTY
};

#[derive(Default)]
struct Conf {
    added: Setting<Vec<Added>>,
}

#[derive(Clone)]
struct Added {
    name: Box<[u8]>,
    value: Template,
    always: bool,
}

fn added(builder: &mut Builder, statement: &Statement) -> Result<Added, Diagnostic> {
    let always = match statement.args.get(2) {
        None => false,
        Some(word) if word.text == "always" => true,
        Some(word) => return Err(Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span)),
    };
    Ok(Added {
        name: statement.args[0].text.as_slice().into(),
        value: builder.http_mut().template(&statement.args[1])?,
        always,
    })
}

/// The statuses that `add_header` without `always` is for.
fn is_usual(status: u16) -> bool {
    matches!(status, 200 | 201 | 204 | 206 | 301 | 302 | 303 | 304 | 307 | 308)
}

fn add(request: &mut Request, conf: &Conf, _body: &mut Body) {
    if !request.is_main() {
        return;
    }
    let is_usual = is_usual(request.response.status);
    for added in conf.added.get().iter().filter(|added| added.always || is_usual) {
        let value = added.value.evaluate(request);
        if added.name.eq_ignore_ascii_case(b"last-modified") {
            // The field is the file's own: it is replaced, and what depends on it follows.
            request.response.last_modified = http_date::parse(&value);
        } else if added.name.eq_ignore_ascii_case(b"etag") {
            request.response.etag = value.as_slice().into();
        } else if !value.is_empty() {
            // An empty value means: leave it out.
            request.response.add(&added.name, &value);
        }
    }
}
