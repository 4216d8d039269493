//! limit_session: limit on the rate of new sessions per key. See [`shared::limit_req`](crate::shared::limit_req).
//!   limit_session_zone KEY zone=NAME:SIZE rate=N(r/s|r/m);       stream
//!   limit_session zone=NAME [burst=N];                           stream, server
//!   limit_session_log_level LEVEL;  limit_session_dry_run on | off;     stream, server
//!   $limit_session_status
//!
//! Gale's own: nginx limits the number of open sessions (`limit_conn`), not the rate of new ones. A session above the
//! rate and the burst is closed; none is delayed, since a delayed session would keep its connection.

use std::any::Any;
use std::cell::Cell;

use gale_base::log_level::Level;
use gale_config::{Contexts, Custom, Diagnostic, One, Setting, Takes, slot, values};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_engine::variables::Variable;
use gale_engine::variables::subject::Subject;
use gale_stream::module::StreamPart;
use gale_stream::session::phases::{Decide, Flow, Phase};
use gale_stream::session::{self, Session};

use super::ROW;
use crate::shared::figures;
use crate::shared::limit_req::{Judgement, Limit, Limited, REQUEST, add_limit, judge, zone_directive};
use crate::shared::limits::log_level;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "stream_limit_session",
    directives: &[
        zone_directive::<Session>(
            Contexts::STREAM,
            "Defines a zone that keeps the rate of new sessions for each key, and the maximum rate.",
        ),
        Directive {
            name: "limit_session",
            takes: Takes::Between(1, 2),
            about: "Sets the zone whose session rate applies, and the maximum burst size.",
            store: &Custom(|conf: &mut Conf, builder, statement| {
                add_limit(&mut conf.limits, false, builder, statement)
            }),
            ..ROW
        },
        Directive {
            name: "limit_session_log_level",
            default: "error",
            about: "Sets the log level for rejected sessions.",
            store: &One { parse: log_level, slot: slot!(Conf, log_level) },
            ..ROW
        },
        Directive {
            name: "limit_session_dry_run",
            takes: Takes::Flag,
            default: "off",
            about: "Enables or disables the dry run mode: sessions are counted, but not limited.",
            store: &One { parse: values::flag, slot: slot!(Conf, dry_run) },
            ..ROW
        },
    ],
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&StreamPart {
        variables: &[Variable::named("limit_session_status", |session: &Session, _, out| {
            let Some(verdict) = session.shared_note::<Judged>().0.get() else { return false };
            out.extend_from_slice(verdict);
            true
        })],
        handlers: &[(Phase::PreAccess, &Decide { applies: |conf: &Conf| !conf.limits.get().is_empty(), run: limit })],
        ..StreamPart::EMPTY
    }],
};

impl Limited for Session {
    const ZONE: &'static str = "limit_session_zone";
    const LIMIT: &'static str = "limit_session";
    const FIGURES: &'static str = figures::STREAM_LIMIT_SESSIONS;
}

#[derive(Default)]
struct Conf {
    limits: Setting<Vec<Limit<Session>>>,
    log_level: Setting<Level>,
    dry_run: Setting<bool>,
}

/// Name of the verdict on the session; a note.
#[derive(Default)]
struct Judged(Cell<Option<&'static [u8]>>);

fn limit(session: &mut Session, conf: &Conf) -> Flow {
    let is_dry_run = *conf.dry_run.get();
    let judgement = judge(session, conf.limits.get(), is_dry_run);
    if let Judgement::Rejected { excess, zone } = &judgement {
        let dry_run = if is_dry_run { ", dry run" } else { "" };
        let (whole, rest, name) = (excess / REQUEST, excess % REQUEST, &zone.name);
        let message = format_args!("limiting sessions{dry_run}, excess: {whole}.{rest:03} by zone \"{name}\"");
        session.log(*conf.log_level.get(), message);
    }
    let (verdict, flow): (&[u8], Flow) = match judgement {
        Judgement::Unlimited => return Flow::Next,
        Judgement::Passed | Judgement::Delayed { .. } => (b"PASSED", Flow::Next),
        Judgement::Rejected { .. } | Judgement::NoRoom if is_dry_run => (b"REJECTED_DRY_RUN", Flow::Next),
        Judgement::Rejected { .. } | Judgement::NoRoom => (b"REJECTED", Flow::Finish(session::SERVICE_UNAVAILABLE)),
    };
    session.shared_note::<Judged>().0.set(Some(verdict));
    flow
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
