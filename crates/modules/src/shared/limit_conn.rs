//! limit_conn: limit on the number of concurrent requests or sessions per key.
//!   limit_conn_zone KEY zone=NAME:SIZE;                          http, stream
//!   limit_conn ZONE NUMBER;
//!   limit_conn_log_level LEVEL;  limit_conn_dry_run on | off;
//!   $limit_conn_status
//! (<https://nginx.org/en/docs/http/ngx_http_limit_conn_module.html>)
//!
//! A subject counts from its check until its end, however it ends, and is checked once. A full zone rejects, since
//! every key in it is in use.

use std::cell::Cell;
use std::sync::Arc;

use bstr::{BStr, BString};
use gale_base::log_level::Level;
use gale_base::tally::Tally;
use gale_base::units;
use gale_config::{Body, Contexts, Custom, Diagnostic, Setting, Statement, Takes};
use gale_engine::configuration::{Builder, ZoneRef, ZoneSize};
use gale_engine::module::Directive;
use gale_engine::variables::subject::Subject;
use gale_engine::variables::template::Template;
use gale_engine::zone::{Full, Ticket, Zone};

use super::limits::{invalid_parameter, needs_zone};

/// Returns `limit_conn_zone` for blocks in `contexts`.
pub const fn zone_directive<S: Counting>(contexts: Contexts) -> Directive {
    Directive {
        name: ZONE,
        contexts,
        takes: Takes::Exactly(2),
        body: Body::None,
        default: "",
        about: "Defines a zone that keeps the current number of requests or sessions for each key.",
        store: &Custom(add_zone::<S>),
    }
}

/// Limits of a scope.
pub struct Limits<S: 'static> {
    limits: Setting<Vec<Limit<S>>>,
    /// `limit_conn_log_level`
    pub log_level: Setting<Level>,
    /// `limit_conn_dry_run`
    pub dry_run: Setting<bool>,
}

const ZONE: &str = "limit_conn_zone";

/// Maximum length of a key that is counted.
const KEY_LENGTH_MAX: usize = 255;

/// The largest limit.
const NUMBER_MAX: u64 = 65_535;

/// `limit_conn`
struct Limit<S: 'static> {
    zone: ZoneRef<Counted<S>>,
    number: u32,
}

/// `limit_conn_zone`
struct Counted<S> {
    name: BString,
    key: Template<S>,
    /// The key as written in the configuration, for messages.
    key_text: BString,
    /// Number of concurrent subjects of each key: at least one.
    counts: Arc<Zone<u32>>,
    verdicts: Arc<Verdicts>,
}

/// Verdicts on the subjects of a zone, indexed by [`Verdict`].
pub type Verdicts = Tally<3>;

/// A subject whose zones are listed under a kind of their own.
pub trait Counting: Subject {
    /// The kind of the zones; see [`figures`](super::figures).
    const FIGURES: &'static str;
}

impl<S> Default for Limits<S> {
    fn default() -> Limits<S> {
        Limits { limits: Setting::new(), log_level: Setting::new(), dry_run: Setting::new() }
    }
}

impl<S> Clone for Limit<S> {
    fn clone(&self) -> Limit<S> {
        Limit { zone: self.zone.clone(), number: self.number }
    }
}

/// Verdict on a subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Within the limits.
    Passed,
    /// Above a limit.
    Rejected,
    /// Above a limit, but it may go on.
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

/// A subject counted in a zone; dropping it uncounts the subject.
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

/// Verdict on the subject; a note, also seen by its subrequests, so that it is checked once.
#[derive(Default)]
struct Judged(Cell<Option<Verdict>>);

/// Appends `$limit_conn_status`.
pub fn append_status<S: Subject>(subject: &S, _: &[u8], out: &mut Vec<u8>) -> bool {
    let Some(verdict) = subject.shared_note::<Judged>().0.get() else { return false };
    out.extend_from_slice(verdict.name());
    true
}

impl<S: Subject> Limits<S> {
    /// Returns `true` if there are no limits.
    pub fn is_empty(&self) -> bool {
        self.limits.get().is_empty()
    }

    /// Returns `true` if the subject may go on. It is counted until its end.
    pub fn admit(&self, subject: &mut S) -> bool {
        let judged = subject.shared_note::<Judged>();
        if judged.0.get().is_some() {
            return true;
        }
        let verdict = match self.take_places(subject) {
            Some(places) if places.is_empty() => return true,
            Some(places) => {
                subject.hold(places);
                Verdict::Passed
            }
            None if *self.dry_run.get() => Verdict::RejectedDryRun,
            None => Verdict::Rejected,
        };
        judged.0.set(Some(verdict));
        verdict != Verdict::Rejected
    }

    fn verdict(&self, taken: &Take) -> Verdict {
        match taken {
            Take::Held(_) => Verdict::Passed,
            Take::Exceeds | Take::NoRoom if *self.dry_run.get() => Verdict::RejectedDryRun,
            Take::Exceeds | Take::NoRoom => Verdict::Rejected,
        }
    }

    /// Counts the subject in every zone that has a key for it. Returns `None`, and counts nothing, if one of them is at
    /// its limit.
    fn take_places(&self, subject: &S) -> Option<Vec<Held>> {
        let mut places = Vec::new();
        for limit in self.limits.get() {
            let zone = &*limit.zone;
            let key = zone.key.evaluate(subject);
            if key.is_empty() {
                continue;
            }
            if key.len() > KEY_LENGTH_MAX {
                let (text, key) = (&zone.key_text, BStr::new(&key));
                let message = format_args!("the value of the \"{text}\" key is more than 255 bytes: \"{key}\"");
                subject.log(Level::Error, message);
                continue;
            }
            let taken = zone.take(&key, limit.number);
            zone.verdicts.own().add(self.verdict(&taken) as usize, 1);
            match taken {
                Take::Held(held) => places.push(held),
                Take::Exceeds => {
                    let dry_run = if *self.dry_run.get() { ", dry run," } else { "" };
                    let message = format_args!("limiting connections{dry_run} by zone \"{}\"", zone.name);
                    subject.log(*self.log_level.get(), message);
                    return None;
                }
                Take::NoRoom => {
                    let name = &zone.name;
                    let message = format!("ngx_slab_alloc() failed: no memory in limit_conn_zone \"{name}\"");
                    subject.error_log().write(Level::Crit, None, &message);
                    return None;
                }
            }
        }
        Some(places)
    }

    /// Adds `limit_conn ZONE NUMBER`.
    ///
    /// # Errors
    /// A message in nginx's words.
    pub fn add(&mut self, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
        let (name, number) = (&statement.args[0], &statement.args[1]);
        let zone = builder.zone::<Counted<S>>(ZONE, &name.text, name.span)?;
        let mut limits = self.limits.take().unwrap_or_default();
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
        self.limits.set(limits, Some(statement.span));
        Ok(())
    }

    /// Inherits the parent's limits if the level has none of its own.
    pub fn inherit(&mut self, parent: Option<&Limits<S>>) {
        if let Some(parent) = parent {
            self.limits.inherit(&parent.limits);
        }
        if !self.limits.is_set() {
            self.limits.set(Vec::new(), None);
        }
    }
}

enum Take {
    Held(Held),
    Exceeds,
    NoRoom,
}

impl<S> Counted<S> {
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

fn add_zone<S: Counting>(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let (key_word, parameters) = statement.args.split_first().expect("two arguments");
    let key = builder.variables::<S>().template(key_word)?;
    let mut size = None;
    for word in parameters {
        let text = word.text.strip_prefix(b"zone=").ok_or_else(|| invalid_parameter(word))?;
        size = Some(ZoneSize::parse(word, text)?);
    }
    let size = size.filter(|size| !size.name.is_empty()).ok_or_else(|| needs_zone(statement))?;
    let zone = builder.declare_zone::<Counted<S>>(ZONE, &size, statement.span)?;
    if let Some(earlier) = zone.declared() {
        let message = format!("{ZONE} \"{}\" is already bound to key \"{}\"", size.name, earlier.key_text);
        return Err(statement.error(message));
    }
    let counts = size.state(builder, ZONE, ZONE, key_word, statement.span)?;
    let verdicts = builder.figures(S::FIGURES, &size.name);
    zone.declare(Counted { name: size.name, key, key_text: key_word.text.clone(), counts, verdicts });
    Ok(())
}
