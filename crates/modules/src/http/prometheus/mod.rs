//! prometheus: the figures of the server for Prometheus, and for whoever else reads its format or OpenMetrics.
//!   prometheus [all];          location
//! (Gale's own; the directive is Angie's,
//! <https://en.angie.software/angie/docs/configuration/modules/http/http_prometheus/>, whose templates are not there:
//! all figures are told, in a fixed form.)
//!
//! The text is made while it is sent, in pieces that have the share of a turn that bulk has: ten thousand peers hold up
//! nobody. Who may ask is for the access rules of the location to say.

mod families;
mod text;

use std::task::{Context, Poll, ready};

use gale_config::{Body as BlockBody, Contexts, Custom, Diagnostic, Statement, Takes};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::{Body, BodyError, BodyItem, BodyStream};
use gale_http::request::phases::{Decide, Flow, Phase};
use gale_protocol::request::{KnownHeader, Method};
use gale_protocol::response::ResponseField;
use gale_runtime::{Effort, charge_units, poll_units};

use crate::shared::limits::invalid_parameter;
use families::{FAMILIES, Sources};
use text::{Format, Out};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_prometheus",
    directives: &[Directive {
        name: "prometheus",
        contexts: Contexts::LOCATION,
        takes: Takes::Between(0, 1),
        body: BlockBody::None,
        default: "",
        about: "Answers with the figures of the server, for Prometheus.",
        store: &Custom(prometheus),
    }],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart {
        handlers: &[(Phase::Content, &Decide { applies: |conf: &Conf| conf.is_on, run: |request, _| answer(request) })],
        ..HttpPart::EMPTY
    }],
};

/// Not inherited, as with all that answers a location.
#[derive(Default)]
struct Conf {
    is_on: bool,
}

fn prometheus(conf: &mut Conf, _: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if std::mem::replace(&mut conf.is_on, true) {
        return Err(statement.directive_error("is duplicate"));
    }
    match statement.args.first() {
        Some(word) if word.text != "all" => Err(invalid_parameter(word).hint("the only template is \"all\"")),
        _ => Ok(()),
    }
}

fn answer(request: &mut Request) -> Flow {
    if !matches!(request.method(), Method::Get | Method::Head) {
        return Flow::Respond(405);
    }
    let accepted = request.fields().filter(|(field, ..)| field.known == Some(KnownHeader::Accept));
    let format = Format::wanted(accepted.map(|(.., value)| value));
    let exposition = Exposition { sources: Sources::of(request), format, family: 0, item: 0, is_over: false };
    let head = &mut request.response;
    head.status = 200;
    head.content_type = format.content_type().as_bytes().into();
    head.set(ResponseField::CacheControl, b"no-cache");
    Flow::Answer(Body::Stream(Box::new(exposition)))
}

/// Per byte of text.
const EFFORT: Effort = Effort { usual_nanos: 8, worst_nanos: 60 };

/// The text on its way.
struct Exposition {
    sources: Sources,
    format: Format,
    /// Where it goes on: a family, and the number of what it is about.
    family: usize,
    item: usize,
    is_over: bool,
}

impl Exposition {
    /// The next piece, about so long.
    fn piece(&mut self, bytes: usize) -> String {
        let mut out = Out::new(self.format);
        while out.text.len() < bytes {
            let Some(family) = FAMILIES.get(self.family) else {
                out.end();
                self.is_over = true;
                break;
            };
            let items = (family.items)(&self.sources);
            if self.item < items {
                match self.item {
                    0 => out.begin(family.name, family.kind, family.help),
                    _ => out.go_on(family.name, family.kind),
                }
                // One at least, behind the family's beginning.
                loop {
                    (family.write)(&self.sources, self.item, &mut out);
                    self.item += 1;
                    if self.item >= items || out.text.len() >= bytes {
                        break;
                    }
                }
            }
            if self.item >= items {
                (self.family, self.item) = (self.family + 1, 0);
            }
        }
        out.text
    }
}

impl BodyStream for Exposition {
    fn poll_next(&mut self, _: &Request, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let bytes = EFFORT.units_at_once();
        ready!(poll_units(context, EFFORT, bytes));
        let piece = self.piece(bytes);
        charge_units(EFFORT, piece.len());
        if piece.is_empty() {
            return Poll::Ready(None);
        }
        Poll::Ready(Some(Ok(BodyItem::Bytes(piece.into_bytes().into()))))
    }

    fn is_at_end(&self) -> bool {
        self.is_over
    }
}
