//! limit_req: leaky-bucket limit on the request rate. See [`shared::limit_req`](crate::shared::limit_req).
//!   limit_req_zone KEY zone=NAME:SIZE rate=N(r/s|r/m);           http
//!   limit_req zone=NAME [burst=N] [nodelay | delay=N];           http, server, location
//!   limit_req_status CODE;  limit_req_log_level LEVEL;  limit_req_dry_run on | off;       http, server, location
//!   $limit_req_status
//! (<https://nginx.org/en/docs/http/ngx_http_limit_req_module.html>)
//!
//! A request is checked once, across internal redirects.

use std::any::Any;
use std::cell::Cell;

use gale_base::log_level::Level;
use gale_config::{Body, Contexts, Custom, Diagnostic, One, Setting, Takes, slot, values};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::phases::{Decide, Flow, Phase};
use gale_http::variables::Variable;

use crate::shared::figures;
use crate::shared::limit_req::{Judgement, Limit, Limited, REQUEST, Verdict, add_limit, judge, zone_directive};
use crate::shared::limits::{log_level, rejection_status};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_limit_req",
    directives: &[
        zone_directive::<Request>(
            Contexts::HTTP,
            "Defines a zone that keeps the request rate for each key, and the maximum rate.",
        ),
        Directive {
            name: "limit_req",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Between(1, 3),
            body: Body::None,
            default: "",
            about: "Sets the zone whose request rate applies, and the maximum burst size.",
            store: &Custom(|conf: &mut Conf, builder, statement| add_limit(&mut conf.limits, true, builder, statement)),
        },
        Directive {
            name: "limit_req_log_level",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "error",
            about: "Sets the log level for rejected requests; delayed ones are logged one level lower.",
            store: &One { parse: log_level, slot: slot!(Conf, log_level) },
        },
        Directive {
            name: "limit_req_status",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "503",
            about: "Sets the status code of responses to rejected requests.",
            store: &One { parse: rejection_status, slot: slot!(Conf, status) },
        },
        Directive {
            name: "limit_req_dry_run",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Flag,
            body: Body::None,
            default: "off",
            about: "Enables or disables the dry run mode: requests are counted, but not limited.",
            store: &One { parse: values::flag, slot: slot!(Conf, dry_run) },
        },
    ],
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart {
        variables: &[Variable::named("limit_req_status", |request, _, out| {
            let Some(verdict) = request.shared_note::<Judged>().0.get() else { return false };
            out.extend_from_slice(name(verdict));
            true
        })],
        handlers: &[(Phase::PreAccess, &Decide { applies: |conf: &Conf| !conf.limits.get().is_empty(), run: limit })],
        ..HttpPart::EMPTY
    }],
};

impl Limited for Request {
    const ZONE: &'static str = "limit_req_zone";
    const LIMIT: &'static str = "limit_req";
    const FIGURES: &'static str = figures::HTTP_LIMIT_REQS;
}

#[derive(Default)]
struct Conf {
    limits: Setting<Vec<Limit<Request>>>,
    log_level: Setting<Level>,
    status: Setting<u16>,
    dry_run: Setting<bool>,
}

fn name(verdict: Verdict) -> &'static [u8] {
    match verdict {
        Verdict::Passed => b"PASSED",
        Verdict::Delayed => b"DELAYED",
        Verdict::Rejected => b"REJECTED",
        Verdict::DelayedDryRun => b"DELAYED_DRY_RUN",
        Verdict::RejectedDryRun => b"REJECTED_DRY_RUN",
    }
}

/// Verdict on the client's request, which is checked once, even if a subrequest comes first; a note.
#[derive(Default)]
struct Judged(Cell<Option<Verdict>>);

fn limit(request: &mut Request, conf: &Conf) -> Flow {
    let judged = request.shared_note::<Judged>();
    if judged.0.get().is_some() {
        return Flow::Next;
    }
    let is_dry_run = *conf.dry_run.get();
    let judgement = judge(request, conf.limits.get(), is_dry_run);
    complain(request, conf, &judgement);
    let (verdict, flow) = match judgement {
        Judgement::Unlimited => return Flow::Next,
        Judgement::Passed => (Verdict::Passed, Flow::Next),
        Judgement::Delayed { .. } if is_dry_run => (Verdict::DelayedDryRun, Flow::Next),
        Judgement::Delayed { time, .. } => (Verdict::Delayed, Flow::Delay(time)),
        Judgement::Rejected { .. } | Judgement::NoRoom if is_dry_run => (Verdict::RejectedDryRun, Flow::Next),
        Judgement::Rejected { .. } | Judgement::NoRoom => (Verdict::Rejected, Flow::Respond(*conf.status.get())),
    };
    judged.0.set(Some(verdict));
    flow
}

fn complain(request: &Request, conf: &Conf, judgement: &Judgement<'_, Request>) {
    let level = *conf.log_level.get();
    let dry_run = if *conf.dry_run.get() { ", dry run" } else { "" };
    match judgement {
        Judgement::Rejected { excess, zone } => {
            let (whole, rest) = (excess / REQUEST, excess % REQUEST);
            request.log(
                level,
                format_args!("limiting requests{dry_run}, excess: {whole}.{rest:03} by zone \"{}\"", zone.name),
            );
        }
        Judgement::Delayed { excess, zone, .. } => {
            let (whole, rest) = (excess / REQUEST, excess % REQUEST);
            request.log(
                level_below(level),
                format_args!("delaying request{dry_run}, excess: {whole}.{rest:03}, by zone \"{}\"", zone.name),
            );
        }
        Judgement::Unlimited | Judgement::Passed | Judgement::NoRoom => {}
    }
}

fn level_below(level: Level) -> Level {
    match level {
        Level::Error => Level::Warn,
        Level::Warn => Level::Notice,
        _ => Level::Info,
    }
}

/// A level with limits of its own inherits none.
fn merge(conf: &mut dyn Any, parent: Option<&dyn Any>, _: &mut Builder) -> Result<(), Diagnostic> {
    let conf: &mut Conf = conf.downcast_mut().expect("this module's settings");
    if let Some(parent) = parent.and_then(|parent| parent.downcast_ref::<Conf>()) {
        conf.limits.inherit(&parent.limits);
    }
    if !conf.limits.is_set() {
        conf.limits.set(Vec::new(), None);
    }
    Ok(())
}
