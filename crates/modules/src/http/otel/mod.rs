//! otel: traces of requests, sent to an OpenTelemetry collector in the background.
//!   otel_exporter { … }                                        http; see `exporter.rs`
//!   otel_service_name NAME;                                    http
//!   otel_resource_attr NAME VALUE;                             http
//!   otel_trace on | off | PERCENT% | $VARIABLE;                http, server, location (a percentage is Gale's own)
//!   otel_trace_context extract | inject | propagate | ignore;  http, server, location
//!   otel_span_name NAME;                                       http, server, location
//!   otel_span_attr NAME VALUE;                                 http, server, location
//!   $otel_trace_id, $otel_span_id, $otel_parent_id, $otel_parent_sampled
//! (<https://nginx.org/en/docs/ngx_otel_module.html>)
//!
//! ```text
//!   head ─► rewrite phase: traced?  ─► … ─► logged: its span ───► queue ─► exporter ─► collector
//!           context                                    span        of the loop   a service
//! ```
//!
//! A client's request has a span, subrequests have none. The first location decides whether the request is traced; a
//! redirect changes nothing. Ids are created for traced requests, and where a variable or a server needs them. No
//! request waits for a collector: a full queue drops spans.

mod collector;
mod context;
mod encoder;
mod exporter;
mod messages;
mod queue;
mod span;

use std::any::Any;
use std::sync::Arc;

use bstr::{BString, ByteSlice};
use gale_base::log_level::Level;
use gale_base::units;
use gale_config::{
    Body as Block, Contexts, Custom, Diagnostic, Many, ManyWith, One, OneWith, Setting, Statement, Takes, slot, values,
};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::configuration::builder::InHttp;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::phases::{Decide, Flow, Phase};
use gale_http::variables::Variable;
use gale_http::variables::template::Template;

use self::context::{Note, TraceContext};
use self::exporter::{Draft, Exporter};
use self::queue::Queue;
use crate::shared::append::{append, append_hex};

pub(crate) use self::queue::SPANS;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "otel",
    directives: &[
        Directive {
            name: "otel_exporter",
            contexts: Contexts::HTTP,
            takes: Takes::Exactly(0),
            body: Block::Block,
            default: "",
            about: "Configures the export of traces: endpoint, interval, batch_size, batch_count, header, \
                    trusted_certificate.",
            store: &Custom(exporter),
        },
        Directive {
            name: "otel_service_name",
            contexts: Contexts::HTTP,
            takes: Takes::Exactly(1),
            body: Block::None,
            default: "unknown_service:nginx",
            about: "Sets the service.name attribute of the OpenTelemetry resource.",
            store: &One { parse: values::string, slot: slot!(Conf, service_name) },
        },
        Directive {
            name: "otel_resource_attr",
            contexts: Contexts::HTTP,
            takes: Takes::Exactly(2),
            body: Block::None,
            default: "",
            about: "Sets a custom OpenTelemetry resource attribute.",
            store: &Many { parse: values::key_value, slot: slot!(Conf, resource_attributes) },
        },
        Directive {
            name: "otel_trace",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Block::None,
            default: "off",
            about: "Enables or disables tracing: on, off, a random percentage of requests (1%), or a variable with the \
                    value on or 1.",
            store: &OneWith { parse: trace, slot: slot!(Conf, trace) },
        },
        Directive {
            name: "otel_trace_context",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Block::None,
            default: "ignore",
            about: "Sets how traceparent and tracestate are propagated: extract (from clients), inject (to servers), \
                    propagate (both) or ignore.",
            store: &One { parse: propagation, slot: slot!(Conf, propagation) },
        },
        Directive {
            name: "otel_span_name",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Block::None,
            default: "",
            about: "Defines the name of the OpenTelemetry span; the name of the location by default.",
            store: &OneWith { parse: span_name, slot: slot!(Conf, span_name) },
        },
        Directive {
            name: "otel_span_attr",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(2),
            body: Block::None,
            default: "",
            about: "Adds a custom OpenTelemetry span attribute.",
            store: &ManyWith { parse: span_attribute, slot: slot!(Conf, span_attributes) },
        },
    ],
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart {
        variables: &[
            Variable::named("otel_trace_id", |request, _, out| {
                with_context(request, |context| append_hex(out, &context.trace_id))
            }),
            Variable::named("otel_span_id", |request, _, out| {
                with_context(request, |context| append_hex(out, &context.span_id))
            }),
            Variable::named("otel_parent_id", |request, _, out| {
                let parent = |context: &TraceContext| context.parent.as_ref().map(|parent| parent.span_id);
                with_context(request, parent).is_some_and(|id| append_hex(out, &id))
            }),
            Variable::named("otel_parent_sampled", |request, _, out| {
                let is_sampled = |context: &TraceContext| context.parent.as_ref().is_some_and(|own| own.is_sampled);
                append(out, if with_context(request, is_sampled) { b"1" } else { b"0" })
            }),
        ],
        handlers: &[(Phase::Rewrite, &Decide { applies: Conf::looks_at_requests, run: begin })],
        ..HttpPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    service_name: Setting<BString>,
    resource_attributes: Setting<Vec<(BString, BString)>>,
    trace: Setting<Trace>,
    propagation: Setting<Propagation>,
    span_name: Setting<Template>,
    span_attributes: Setting<Vec<Attribute>>,
    /// `otel_exporter` as written, until the settings of the http block are complete.
    draft: Option<Draft>,
    /// The exporter of the http block, the same in each scope.
    exporter: Option<Arc<Exporter>>,
}

/// Argument of `otel_trace`.
#[derive(Clone)]
enum Trace {
    Off,
    On,
    /// Requests whose random number is smaller.
    Share(u64),
    By(Template),
}

/// Argument of `otel_trace_context`.
#[derive(Clone, Copy)]
struct Propagation {
    extracts: bool,
    injects: bool,
}

/// Arguments of `otel_span_attr`.
#[derive(Clone)]
struct Attribute {
    name: String,
    value: Template,
    /// `true` for a header field, which may be repeated and so has a list.
    is_list: bool,
}

impl Conf {
    fn looks_at_requests(&self) -> bool {
        let Propagation { extracts, injects } = *self.propagation.get();
        !matches!(self.trace.get(), Trace::Off) || extracts || injects
    }
}

fn exporter(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if conf.draft.is_some() {
        return Err(statement.directive_error("is duplicate"));
    }
    conf.draft = Some(exporter::exporter_block(builder, statement)?);
    Ok(())
}

fn trace(builder: &mut Builder, statement: &Statement) -> Result<Trace, Diagnostic> {
    let word = &statement.args[0];
    let template = builder.http_mut().template(word)?;
    let Some(text) = template.as_constant() else { return Ok(Trace::By(template)) };
    if let Some(number) = text.strip_suffix(b"%") {
        return match units::parse_fixed_point(number, 2) {
            Some(WHOLE) => Ok(Trace::On),
            Some(share) if share < WHOLE => Ok(Trace::Share(u64::MAX / WHOLE * share)),
            _ => Err(Diagnostic::emerg(format!("invalid percent value \"{}\"", word.text)).at(word.span)),
        };
    }
    Ok(if is_on(text) { Trace::On } else { Trace::Off })
}

/// All requests, in hundredths of a percent.
const WHOLE: u64 = 10_000;

/// Returns `true` for "on" or "1"; as in nginx, any other value means off.
fn is_on(text: &[u8]) -> bool {
    matches!(text, b"on" | b"1")
}

fn propagation(statement: &Statement) -> Result<Propagation, Diagnostic> {
    let of = |extracts, injects| Propagation { extracts, injects };
    let choices = [
        ("ignore", of(false, false)),
        ("extract", of(true, false)),
        ("inject", of(false, true)),
        ("propagate", of(true, true)),
    ];
    values::enumeration(statement, &choices)
}

fn span_name(builder: &mut Builder, statement: &Statement) -> Result<Template, Diagnostic> {
    builder.http_mut().template(&statement.args[0])
}

fn span_attribute(builder: &mut Builder, statement: &Statement) -> Result<Attribute, Diagnostic> {
    let name = statement.args[0].text.to_str_lossy().into_owned();
    let is_list = ["http.request.header.", "http.response.header."].iter().any(|prefix| name.starts_with(prefix));
    Ok(Attribute { name, is_list, value: builder.http_mut().template(&statement.args[1])? })
}

fn merge(conf: &mut dyn Any, parent: Option<&dyn Any>, builder: &mut Builder) -> Result<(), Diagnostic> {
    let conf: &mut Conf = conf.downcast_mut().expect("this module's settings");
    if let Some(parent) = parent.and_then(|parent| parent.downcast_ref::<Conf>()) {
        conf.exporter.clone_from(&parent.exporter);
    } else if let Some(draft) = conf.draft.take() {
        let service_name = (conf.service_name.get().as_bstr(), conf.service_name.span().is_some());
        conf.exporter = Some(draft.complete(conf.resource_attributes.get(), service_name, builder)?);
    }
    match conf.exporter.is_none() && conf.trace.span().is_some() {
        true => Err(conf.trace.error("\"otel_exporter\" block is missing")),
        false => Ok(()),
    }
}

/// Calls `look` with the request's trace context, which is created if there is none yet.
fn with_context<T>(request: &Request, look: impl FnOnce(&TraceContext) -> T) -> T {
    let extracts = || request.scope().conf_of::<Conf>().is_some_and(|conf| conf.propagation.get().extracts);
    look(request.shared_note::<Note>().context(request, extracts))
}

/// Decides whether a client's request is traced.
fn begin(request: &mut Request, conf: &Conf) -> Flow {
    // A redirected request was decided before.
    if !request.is_main() || request.is_redirected() {
        return Flow::Next;
    }
    let Propagation { extracts, injects } = *conf.propagation.get();
    let context = |request: &Request| _ = request.shared_note::<Note>().context(request, || extracts);
    if extracts || injects {
        // Created before the decision, which may depend on it.
        context(request);
    }
    let is_sampled = match conf.trace.get() {
        Trace::Off => false,
        Trace::On => true,
        Trace::Share(below) => gale_runtime::random_u64() < *below,
        Trace::By(template) => template.with_text(request, is_on),
    };
    if is_sampled {
        context(request);
        request.when_logged(end);
    }
    if injects {
        let note = request.shared_note::<Note>();
        if let Err(error) = note.context(request, || extracts).inject(request, is_sampled) {
            request.log(Level::Alert, format_args!("the trace context cannot be passed on: {error}"));
        }
    }
    Flow::Next
}

/// Queues the span of a finished request.
fn end(request: &mut Request) {
    // A location without `otel_trace` may end a request that another one has begun.
    let Some(conf) = request.scope().conf_of::<Conf>() else { return };
    if let Some(exporter) = &conf.exporter {
        let span = with_context(request, |context| span::encode(request, conf, context));
        Queue::of(&request.worker().common).add(span, exporter.limits);
    }
}
