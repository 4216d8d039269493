//! limit_conn: how many requests a key may have under way at once.
//!   limit_conn_zone KEY zone=NAME:SIZE;                          http
//!   limit_conn ZONE NUMBER;                                      http, server, location
//!   limit_conn_status CODE;  limit_conn_log_level LEVEL;  limit_conn_dry_run on | off;
//!   $limit_conn_status
//! (<https://nginx.org/en/docs/http/ngx_http_limit_conn_module.html>)
//!
//! A request counts from when it is judged until it is over, however it ends. It is judged once, also over internal
//! redirects and by its subrequests. A copy that `mirror` makes does not hold the places of its request: the request is
//! over before its copies are. A zone that is full rejects: every key in it is in use.

use std::any::Any;
use std::cell::Cell;
use std::sync::Arc;

use bstr::{BStr, BString};
use gale_base::log_level::Level;
use gale_base::units;
use gale_config::{Body, Custom, Diagnostic, One, Place, Setting, Statement, Takes, slot, values};
use gale_engine::configuration::{Builder, ZoneRef, ZoneSize};
use gale_engine::module::{ConfType, Directive, Module};
use gale_engine::zone::{Full, Ticket, Zone};
use gale_http::configuration::builder::InHttp;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::phases::{Decide, Flow, Phase};
use gale_http::variables::Variable;
use gale_http::variables::template::Template;

use super::limits::{invalid_parameter, log_level, needs_zone, rejection_status};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_limit_conn",
    directives: &[
        Directive {
            name: ZONE,
            place: Place::HTTP,
            takes: Takes::Exactly(2),
            body: Body::None,
            default: "",
            about: "A zone that counts requests under way by a key.",
            store: &Custom(|_: &mut (), builder, statement| add_zone(builder, statement)),
        },
        Directive {
            name: "limit_conn",
            place: Place::ANYWHERE,
            takes: Takes::Exactly(2),
            body: Body::None,
            default: "",
            about: "A zone, and how many requests a key of it may have under way here.",
            store: &Custom(add_limit),
        },
        Directive {
            name: "limit_conn_log_level",
            place: Place::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "error",
            about: "The level of messages about rejected requests.",
            store: &One { parse: log_level, slot: slot!(Conf, log_level) },
        },
        Directive {
            name: "limit_conn_status",
            place: Place::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "503",
            about: "What a rejected request is answered.",
            store: &One { parse: rejection_status, slot: slot!(Conf, status) },
        },
        Directive {
            name: "limit_conn_dry_run",
            place: Place::ANYWHERE,
            takes: Takes::Flag,
            body: Body::None,
            default: "off",
            about: "Whether requests are only counted.",
            store: &One { parse: values::flag, slot: slot!(Conf, dry_run) },
        },
    ],
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart {
        variables: &[Variable::named("limit_conn_status", |request, _, out| {
            let Some(verdict) = request.shared_note::<Judged>().0.get() else { return false };
            out.extend_from_slice(verdict.name());
            true
        })],
        handlers: &[(Phase::PreAccess, &Decide { applies: |conf: &Conf| !conf.limits.get().is_empty(), run: limit })],
        ..HttpPart::EMPTY
    }],
    ..Module::EMPTY
};

const ZONE: &str = "limit_conn_zone";

/// The longest key that counts.
const KEY_LENGTH_MAX: usize = 255;

/// The largest limit.
const NUMBER_MAX: u64 = 65_535;

#[derive(Default)]
struct Conf {
    limits: Setting<Vec<Limit>>,
    log_level: Setting<Level>,
    status: Setting<u16>,
    dry_run: Setting<bool>,
}

/// `limit_conn`
#[derive(Clone)]
struct Limit {
    zone: ZoneRef<Counted>,
    number: u32,
}

/// `limit_conn_zone`
struct Counted {
    name: BString,
    key: Template,
    /// As it is written, for messages.
    key_text: BString,
    /// How many requests each key has under way: one at least.
    counts: Arc<Zone<u32>>,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Passed,
    Rejected,
    RejectedDryRun,
}

impl Verdict {
    fn name(self) -> &'static [u8] {
        match self {
            Verdict::Passed => b"PASSED",
            Verdict::Rejected => b"REJECTED",
            Verdict::RejectedDryRun => b"REJECTED_DRY_RUN",
        }
    }
}

/// A place in a zone, given back when it is dropped.
struct Held {
    counts: Arc<Zone<u32>>,
    ticket: Ticket,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.counts.with_entry(&self.ticket, |table, id| match table.value_mut(id) {
            1 => table.remove(id),
            count => *count -= 1,
        });
    }
}

/// What became of the client's request: it is judged once, be it in a subrequest.
#[derive(Default)]
struct Judged(Cell<Option<Verdict>>);

fn limit(request: &mut Request, conf: &Conf) -> Flow {
    let judged = request.shared_note::<Judged>();
    if judged.0.get().is_some() {
        return Flow::Next;
    }
    let is_dry_run = *conf.dry_run.get();
    match take_places(request, conf) {
        Some(places) if places.is_empty() => Flow::Next,
        Some(places) => {
            request.hold(places);
            judged.0.set(Some(Verdict::Passed));
            Flow::Next
        }
        None if is_dry_run => {
            judged.0.set(Some(Verdict::RejectedDryRun));
            Flow::Next
        }
        None => {
            judged.0.set(Some(Verdict::Rejected));
            Flow::Respond(*conf.status.get())
        }
    }
}

/// A place in every zone that has a key for the request; none when one of them has no more.
fn take_places(request: &Request, conf: &Conf) -> Option<Vec<Held>> {
    let mut places = Vec::new();
    for limit in conf.limits.get() {
        let zone = &*limit.zone;
        let key = zone.key.evaluate(request);
        if key.is_empty() {
            continue;
        }
        if key.len() > KEY_LENGTH_MAX {
            let (text, key) = (&zone.key_text, BStr::new(&key));
            let message = format_args!("the value of the \"{text}\" key is more than 255 bytes: \"{key}\"");
            request.log(Level::Error, message);
            continue;
        }
        match zone.take(&key, limit.number) {
            Take::Held(held) => places.push(held),
            Take::Exceeds => {
                let dry_run = if *conf.dry_run.get() { ", dry run," } else { "" };
                let message = format_args!("limiting connections{dry_run} by zone \"{}\"", zone.name);
                request.log(*conf.log_level.get(), message);
                return None;
            }
            Take::NoRoom => {
                let name = &zone.name;
                let message = format!("ngx_slab_alloc() failed: no memory in limit_conn_zone \"{name}\"");
                request.configuration().error_log().write(Level::Crit, None, &message);
                return None;
            }
        }
    }
    Some(places)
}

enum Take {
    Held(Held),
    Exceeds,
    NoRoom,
}

impl Counted {
    fn take(&self, key: &[u8], number: u32) -> Take {
        let key = self.counts.key(key);
        self.counts.with(&key, |table| {
            let id = match table.find(&key) {
                Some(id) if *table.value(id) >= number => return Take::Exceeds,
                Some(id) => {
                    *table.value_mut(id) += 1;
                    id
                }
                None => match table.insert(&key, 1) {
                    Ok(id) => id,
                    Err(Full) => return Take::NoRoom,
                },
            };
            Take::Held(Held { counts: Arc::clone(&self.counts), ticket: self.counts.ticket(&key, table, id) })
        })
    }
}

fn add_zone(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let (key_word, parameters) = statement.args.split_first().expect("two arguments");
    let key = builder.http_mut().template(key_word)?;
    let mut size = None;
    for word in parameters {
        let text = word.text.strip_prefix(b"zone=").ok_or_else(|| invalid_parameter(word))?;
        size = Some(ZoneSize::parse(word, text)?);
    }
    let size = size.filter(|size| !size.name.is_empty()).ok_or_else(|| needs_zone(statement))?;
    let zone = builder.declare_zone::<Counted>(ZONE, &size, statement.span)?;
    if let Some(earlier) = zone.declared() {
        let message = format!("{ZONE} \"{}\" is already bound to key \"{}\"", size.name, earlier.key_text);
        return Err(statement.error(message));
    }
    let counts = size.state(builder, ZONE, ZONE, key_word, statement.span)?;
    zone.declare(Counted { name: size.name, key, key_text: key_word.text.clone(), counts });
    Ok(())
}

fn add_limit(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let (name, number) = (&statement.args[0], &statement.args[1]);
    let zone = builder.zone::<Counted>(ZONE, &name.text, name.span)?;
    let mut limits = conf.limits.take().unwrap_or_default();
    if limits.iter().any(|limit| limit.zone.is(&zone)) {
        return Err(statement.directive_error("is duplicate"));
    }
    let number = match units::parse_number(&number.text) {
        None | Some(0) => {
            let message = format!("invalid number of connections \"{}\"", number.text);
            return Err(Diagnostic::emerg(message).at(number.span));
        }
        Some(number @ 1..=NUMBER_MAX) => number as u32,
        Some(_) => return Err(Diagnostic::emerg("connection limit must be less 65536").at(number.span)),
    };
    limits.push(Limit { zone, number });
    conf.limits.set(limits, Some(statement.span));
    Ok(())
}

/// A level with limits of its own has none from outside.
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
