//! prometheus: metrics in Prometheus' text format or OpenMetrics.
//!   prometheus [NAME];                                                                       location
//!   prometheus_template NAME { METRIC $VARIABLE [path=[~]PATH] [type=TYPE] [help=TEXT]; … }   http
//!   $p8s_value
//! (A module of Angie, <https://en.angie.software/angie/docs/configuration/modules/http/http_prometheus/>; paths are
//! those of Gale's API. Unless there is a template of that name, `prometheus all` and `prometheus` send all metrics in
//! a fixed form, which is Gale's own.)
//!
//! The pool collects the objects, since each listening socket takes a system call. The fixed form is written while it
//! is sent, in pieces with the budget of bulk work, so that ten thousand peers do not stall a loop. Templates are in
//! `template.rs`. The location's access rules control access.

mod families;
mod template;
mod text;

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use gale_config::{Body as BlockBody, Contexts, Custom, Diagnostic, Statement, Takes, Word};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::{Body, BodyError, BodyItem, BodyStream};
use gale_http::request::phases::{Decision, Flow, Handler, LocalBoxFuture, Phase};
use gale_http::variables::Variable;
use gale_protocol::request::{KnownHeader, Method};
use gale_protocol::response::ResponseField;
use gale_runtime::{Bytes, Effort, charge_units, default_pool, poll_units};

use super::api;
use families::{FAMILIES, Sources};
use template::{CurrentValue, Template};
use text::{Format, Out};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_prometheus",
    directives: &[
        Directive {
            name: "prometheus",
            contexts: Contexts::LOCATION,
            takes: Takes::Between(0, 1),
            body: BlockBody::None,
            default: "",
            about: "Enables the Prometheus metrics page in the surrounding location: the metrics of a template, or \
                    all.",
            store: &Custom(prometheus),
        },
        Directive {
            name: "prometheus_template",
            contexts: Contexts::HTTP,
            takes: Takes::Exactly(1),
            body: BlockBody::Block,
            default: "",
            about: "Defines a template of Prometheus metrics, whose values come from paths in the API.",
            store: &Custom(prometheus_template),
        },
    ],
    conf: Some(ConfType {
        make: || Box::new(Conf::default()),
        merge: |conf, outer, _| {
            let conf = conf.downcast_mut::<Conf>().expect("settings have their module's type");
            conf.complete(outer.and_then(|outer| outer.downcast_ref()))
        },
        complete_main: |_, _| Ok(()),
    }),
    parts: &[&HttpPart {
        variables: &[Variable::named("p8s_value", |request, _, out| CurrentValue::append(request, out))],
        handlers: &[(Phase::Content, &Prometheus)],
        ..HttpPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    /// Templates of the `http` block.
    templates: Arc<BTreeMap<Box<[u8]>, Arc<Template>>>,
    /// Name of the location's template, if it has one.
    wanted: Option<Option<Word>>,
    /// Not inherited, as for all content handlers.
    answer: Option<Answer>,
}

/// Output of a location.
enum Answer {
    All,
    Of(Arc<Template>),
}

fn prometheus(conf: &mut Conf, _: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if conf.wanted.is_some() {
        return Err(statement.directive_error("is duplicate"));
    }
    conf.wanted = Some(statement.args.first().cloned());
    Ok(())
}

fn prometheus_template(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let name = &statement.args[0];
    let template = Arc::new(Template::read(builder, statement));
    let templates = Arc::get_mut(&mut conf.templates).expect("the map is shared after the whole text is read");
    if templates.insert((**name.text).into(), template).is_some() {
        return Err(Diagnostic::emerg(format!("duplicate Prometheus template \"{}\"", name.text)).at(name.span));
    }
    Ok(())
}

impl Conf {
    fn complete(&mut self, outer: Option<&Conf>) -> Result<(), Diagnostic> {
        if let Some(outer) = outer {
            self.templates = Arc::clone(&outer.templates);
        }
        let Some(name) = &self.wanted else { return Ok(()) };
        let text = name.as_ref().map_or(&b"all"[..], |name| &name.text);
        let found = self.templates.get(text).map(|found| Answer::Of(Arc::clone(found)));
        self.answer = match (found, name) {
            (None, Some(name)) if name.text != "all" => {
                let error = Diagnostic::emerg(format!("unknown Prometheus template \"{}\"", name.text)).at(name.span);
                return Err(error.hint(
                    "templates are defined by \"prometheus_template\" in \"http\"; \"all\" is always available",
                ));
            }
            (found, _) => Some(found.unwrap_or(Answer::All)),
        };
        Ok(())
    }
}

struct Prometheus;

fn conf_of(conf: &dyn Any) -> &Conf {
    conf.downcast_ref().expect("a handler's settings are of its module's type")
}

impl Handler for Prometheus {
    fn applies(&self, conf: &dyn Any) -> bool {
        conf_of(conf).answer.is_some()
    }

    fn decide(&self, request: &mut Request, _: &dyn Any) -> Decision {
        match request.method() {
            Method::Get | Method::Head => Decision::MustWait,
            _ => Decision::Flow(Flow::Respond(405)),
        }
    }

    fn wait<'a>(&'a self, request: &'a mut Request, conf: &'a dyn Any) -> LocalBoxFuture<'a, Flow> {
        Box::pin(async move {
            match &conf_of(conf).answer {
                Some(Answer::Of(template)) => answer_of(request, template).await,
                _ => answer_all(request).await,
            }
        })
    }
}

/// Answers with the output of a template.
async fn answer_of(request: &mut Request, template: &Arc<Template>) -> Flow {
    let (view, of_task) = (api::view(request), Arc::clone(template));
    let found = match default_pool().run(move || of_task.gather(&view)).await {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => {
            template::report(request, &error);
            return Flow::Respond(500);
        }
        Err(error) => {
            template::report(request, &error.to_string());
            return Flow::Respond(503);
        }
    };
    let text = template.write(request, found).await;
    set_head(request, Format::Prometheus);
    Flow::Answer(Body::Bytes(Bytes::from(text.into_bytes())))
}

/// Answers with all metrics.
async fn answer_all(request: &mut Request) -> Flow {
    let view = api::view(request);
    let sources = match default_pool().run(move || Sources::of(&view)).await {
        Ok(sources) => sources,
        Err(error) => {
            template::report(request, &error.to_string());
            return Flow::Respond(503);
        }
    };
    let accepted = request.fields().filter(|(field, ..)| field.known == Some(KnownHeader::Accept));
    let format = Format::wanted(accepted.map(|(.., value)| value));
    let exposition = Exposition { sources, format, family: 0, item: 0, is_over: false };
    set_head(request, format);
    Flow::Answer(Body::Stream(Box::new(exposition)))
}

fn set_head(request: &mut Request, format: Format) {
    let head = &mut request.response;
    head.status = 200;
    head.content_type = format.content_type().as_bytes().into();
    head.set(ResponseField::CacheControl, b"no-cache");
}

/// Effort per byte of text.
const EFFORT: Effort = Effort { usual_nanos: 8, worst_nanos: 60 };

/// Text that is being sent.
struct Exposition {
    sources: Sources,
    format: Format,
    /// Position: a family, and the number of an object.
    family: usize,
    item: usize,
    is_over: bool,
}

impl Exposition {
    /// Returns the next piece, of about this length.
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
                // At least one object after the family's header.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Maximum length of one object's text in one family: a histogram with two labels of maximum length.
    const ITEM_BYTES_MAX: usize = 20 * 1024;

    #[test]
    fn thousands_of_zones_are_told_in_pieces_that_are_no_longer_than_asked_for_but_for_one_item() {
        const ZONES: usize = 5000;
        const PIECE_BYTES: usize = 2000;
        let names = (0..ZONES).map(|zone| format!("{zone}-{}", "x".repeat(300)));
        let sources = Sources::of_locations(names);
        let mut exposition = Exposition { sources, format: Format::OpenMetrics, family: 0, item: 0, is_over: false };
        let (mut whole, mut pieces, mut items_before) = (String::new(), 0, (0, 0));
        while !exposition.is_over {
            let piece = exposition.piece(PIECE_BYTES);
            assert!(piece.len() < PIECE_BYTES + ITEM_BYTES_MAX, "{}", piece.len());
            // A piece of families without objects is as short as its work, since families are few.
            let items = (exposition.family, exposition.item);
            assert!(items > items_before);
            items_before = items;
            whole += &piece;
            pieces += 1;
        }
        assert!(pieces > whole.len() / (PIECE_BYTES + ITEM_BYTES_MAX), "{pieces} of {}", whole.len());
        assert_eq!(whole.matches("\ngale_http_location_zone_requests_total{").count(), ZONES);
        assert_eq!(whole.matches("# TYPE gale_http_location_zone_requests counter\n").count(), 1);
        assert!(whole.ends_with("# EOF\n"));
    }
}
