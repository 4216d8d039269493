//! addition: output of subrequests before and after a response.
//!   add_before_body URI;             http, server, location
//!   add_after_body URI;              http, server, location
//!   addition_types TYPE ...;         http, server, location
//! (<https://nginx.org/en/docs/http/ngx_http_addition_module.html>)
//!
//! Applies to responses of status 200 only. The subrequest after the body starts together with the one before it. If
//! the body is a stream, it starts at the stream's end instead, so that its response is not held for a long time.

use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_config::{Body as BlockBody, Contexts, Diagnostic, ManyWith, One, Setting, Statement, Takes, slot};
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::configuration::media_types::MediaTypes;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::{Body, BodyError, BodyItem, BodyStream};
use gale_http::request::filters::Change;
use gale_http::request::subrequest::{Subrequest, Target};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_addition_filter",
    directives: &[
        Directive {
            name: "add_before_body",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: BlockBody::None,
            default: "",
            about: "Adds the response to a subrequest for this URI before the response body.",
            store: &One { parse: uri, slot: slot!(Conf, add_before_body) },
        },
        Directive {
            name: "add_after_body",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: BlockBody::None,
            default: "",
            about: "Adds the response to a subrequest for this URI after the response body.",
            store: &One { parse: uri, slot: slot!(Conf, add_after_body) },
        },
        Directive {
            name: "addition_types",
            contexts: Contexts::ANYWHERE,
            takes: Takes::AtLeast(1),
            body: BlockBody::None,
            default: "text/html",
            about: "Sets the MIME types of responses to which text is added, in addition to text/html.",
            store: &ManyWith { parse: MediaTypes::parse, slot: slot!(Conf, addition_types) },
        },
    ],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart {
        filters: &[&Change { applies: |conf: &Conf| conf.before().is_some() || conf.after().is_some(), run: add }],
        ..HttpPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    add_before_body: Setting<Box<[u8]>>,
    add_after_body: Setting<Box<[u8]>>,
    addition_types: Setting<Vec<MediaTypes>>,
}

impl Conf {
    fn before(&self) -> Option<&[u8]> {
        given(&self.add_before_body)
    }

    fn after(&self) -> Option<&[u8]> {
        given(&self.add_after_body)
    }
}

/// Returns the URI, or `None` for an empty one, which cancels the inherited URI.
fn given(setting: &Setting<Box<[u8]>>) -> Option<&[u8]> {
    setting.is_set().then(|| &**setting.get()).filter(|uri| !uri.is_empty())
}

fn uri(statement: &Statement) -> Result<Box<[u8]>, Diagnostic> {
    Ok(statement.args[0].text.as_slice().into())
}

fn add(request: &mut Request, conf: &Conf, body: &mut Body) {
    let is_wanted = request.is_main()
        && matches!(request.response.status, 200 | 304)
        && MediaTypes::contain(conf.addition_types.get(), &request.response.content_type);
    if !is_wanted {
        return;
    }
    request.response.will_change();
    request.outcome.makes_subrequests = true;
    let (before, after) = (conf.before().map(Target::new), conf.after().map(Target::new));
    *body = Body::Stream(Box::new(Added { before, body: std::mem::take(body), after, last: None }));
}

struct Added {
    /// Not started yet, like `after`.
    before: Option<Target>,
    body: Body,
    after: Option<Target>,
    /// The subrequest after the body, already started.
    last: Option<BodyItem>,
}

impl BodyStream for Added {
    fn poll_next(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
        let is_made_later = matches!(self.body, Body::Stream(_));
        if let Some(before) = self.before.take() {
            return Poll::Ready(Some(begin(request, before)));
        }
        if !is_made_later && let Some(after) = self.after.take() {
            match begin(request, after) {
                Ok(item) => self.last = Some(item),
                error => return Poll::Ready(Some(error)),
            }
        }
        if let Some(item) = ready!(self.body.poll_next(request, context)) {
            return Poll::Ready(Some(item));
        }
        self.body = Body::Empty;
        let last = self.last.take().map(Ok);
        Poll::Ready(last.or_else(|| Some(begin(request, self.after.take()?))))
    }

    fn poll_ahead(&mut self, request: &Request, context: &mut Context<'_>) {
        self.body.poll_ahead(request, context);
    }

    fn patience(&self, default: Duration) -> Duration {
        self.body.patience(default)
    }

    fn is_at_end(&self) -> bool {
        self.before.is_none() && self.after.is_none() && self.last.is_none() && self.body.is_at_end()
    }
}

fn begin(request: &Request, target: Target) -> Result<BodyItem, BodyError> {
    let subrequest =
        Subrequest::start(request, target).ok_or_else(|| BodyError::Other("too many subrequests".to_owned()))?;
    Ok(BodyItem::Subrequest(Box::new(subrequest)))
}
