//! limit_req: leaky-bucket limit on the request rate.
//!   limit_req_zone KEY zone=NAME:SIZE rate=N(r/s|r/m);           http
//!   limit_req zone=NAME [burst=N] [nodelay | delay=N];           http, server, location
//!   limit_req_status CODE;  limit_req_log_level LEVEL;  limit_req_dry_run on | off;
//!   $limit_req_status
//! (<https://nginx.org/en/docs/http/ngx_http_limit_req_module.html>)
//!
//! Rates and what exceeds them are counted in thousandths of a request, times in milliseconds, as nginx does, so that
//! the same requests are delayed for the same time. A request is judged once, also over internal redirects.

use std::any::Any;
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use bstr::{BStr, BString};
use gale_base::log_level::Level;
use gale_base::units;
use gale_config::{Body, Contexts, Custom, Diagnostic, One, Setting, Statement, Takes, slot, values};
use gale_engine::configuration::{Builder, ZoneRef, ZoneSize};
use gale_engine::module::{ConfType, Directive, Module};
use gale_engine::zone::table::KEY_LENGTH_MAX;
use gale_engine::zone::{EntryId, Full, Key, Table, Ticket, Zone};
use gale_http::configuration::builder::InHttp;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::phases::{Decide, Flow, Phase};
use gale_http::variables::Variable;
use gale_http::variables::template::Template;

use crate::shared::limits::{invalid, invalid_parameter, log_level, needs_zone, rejection_status};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_limit_req",
    directives: &[
        Directive {
            name: ZONE,
            contexts: Contexts::HTTP,
            takes: Takes::Exactly(3),
            body: Body::None,
            default: "",
            about: "A zone that counts requests by a key, and the rate that each may have.",
            store: &Custom(|_: &mut (), builder, statement| add_zone(builder, statement)),
        },
        Directive {
            name: "limit_req",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Between(1, 3),
            body: Body::None,
            default: "",
            about: "A zone whose rate holds here, and how many requests may exceed it.",
            store: &Custom(add_limit),
        },
        Directive {
            name: "limit_req_log_level",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "error",
            about: "The level of messages about rejected requests; delayed ones are a level below.",
            store: &One { parse: log_level, slot: slot!(Conf, log_level) },
        },
        Directive {
            name: "limit_req_status",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "503",
            about: "What a rejected request is answered.",
            store: &One { parse: rejection_status, slot: slot!(Conf, status) },
        },
        Directive {
            name: "limit_req_dry_run",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Flag,
            body: Body::None,
            default: "off",
            about: "Whether requests are only counted.",
            store: &One { parse: values::flag, slot: slot!(Conf, dry_run) },
        },
    ],
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart {
        variables: &[Variable::named("limit_req_status", |request, _, out| {
            let Some(verdict) = request.shared_note::<Judged>().0.get() else { return false };
            out.extend_from_slice(verdict.name());
            true
        })],
        handlers: &[(Phase::PreAccess, &Decide { applies: |conf: &Conf| !conf.limits.get().is_empty(), run: limit })],
        ..HttpPart::EMPTY
    }],
};

const ZONE: &str = "limit_req_zone";

/// A request, in the unit of rates and excesses.
const REQUEST: u64 = 1000;

/// `nodelay`: more than any excess.
const NEVER_DELAY: u64 = u64::MAX;

#[derive(Default)]
struct Conf {
    limits: Setting<Vec<Limit>>,
    log_level: Setting<Level>,
    status: Setting<u16>,
    dry_run: Setting<bool>,
}

/// `limit_req`
#[derive(Clone)]
struct Limit {
    zone: ZoneRef<Rate>,
    burst: u64,
    /// Above this excess requests are delayed.
    delay: u64,
}

/// `limit_req_zone`
struct Rate {
    name: BString,
    key: Template,
    /// As it is written, for messages.
    key_text: BString,
    /// Thousandths of a request a second.
    rate: u64,
    buckets: Arc<Zone<Bucket>>,
}

/// What is known of one key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Bucket {
    /// When it was counted last, in milliseconds.
    last_ms: u64,
    excess: u64,
    /// How many requests are between looking at it and counting: it is not removed meanwhile.
    holders: u32,
    /// It was never counted.
    is_fresh: bool,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Passed,
    Delayed,
    Rejected,
    DelayedDryRun,
    RejectedDryRun,
}

impl Verdict {
    fn name(self) -> &'static [u8] {
        match self {
            Verdict::Passed => b"PASSED",
            Verdict::Delayed => b"DELAYED",
            Verdict::Rejected => b"REJECTED",
            Verdict::DelayedDryRun => b"DELAYED_DRY_RUN",
            Verdict::RejectedDryRun => b"REJECTED_DRY_RUN",
        }
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
    let judgement = judge(request, conf.limits.get());
    let is_dry_run = *conf.dry_run.get();
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

fn complain(request: &Request, conf: &Conf, judgement: &Judgement<'_>) {
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

/// What all the limits of a location together say.
enum Judgement<'l> {
    /// No zone has a key for the request.
    Unlimited,
    Passed,
    Delayed {
        time: Duration,
        excess: u64,
        zone: &'l Rate,
    },
    Rejected {
        excess: u64,
        zone: &'l Rate,
    },
    /// A zone is full of keys that cannot be removed.
    NoRoom,
}

/// All limits are looked at first; the request counts only if none of them rejects it.
fn judge<'l>(request: &Request, limits: &'l [Limit]) -> Judgement<'l> {
    let now_ms = gale_runtime::now().as_nanos() / 1_000_000;
    let mut held: Vec<Held<'_>> = Vec::new();
    let mut worst: Option<(u64, u64, &Limit)> = None;
    for (number, limit) in limits.iter().enumerate() {
        let zone = &*limit.zone;
        let key = zone.key.evaluate(request);
        if key.is_empty() {
            continue;
        }
        if key.len() > KEY_LENGTH_MAX {
            let (text, key) = (&zone.key_text, BStr::new(&key));
            let message = format_args!("the value of the \"{text}\" key is more than 65535 bytes: \"{key}\"");
            request.log(Level::Error, message);
            continue;
        }
        let key = zone.buckets.key(&key);
        // Nothing can come between for the last one.
        let counts_now = number + 1 == limits.len();
        match limit.check(&key, now_ms, counts_now) {
            Check::Exceeds(excess) => return Judgement::Rejected { excess, zone },
            Check::Counted(excess) => worst = Some((limit.delay_ms(excess), excess, limit)),
            Check::Held(ticket) => held.push(Held { limit, ticket, is_counted: false }),
            Check::NoRoom => {
                let message = format!("could not allocate node in limit_req zone \"{}\"", zone.name);
                request.configuration().error_log().write(Level::Alert, None, &message);
                return Judgement::NoRoom;
            }
        }
    }
    if worst.is_none() && held.is_empty() {
        return Judgement::Unlimited;
    }
    for mut held in held.into_iter().rev() {
        let excess = held.count(now_ms);
        let delay_ms = held.limit.delay_ms(excess);
        if worst.is_none_or(|(worst_ms, ..)| delay_ms > worst_ms) {
            worst = Some((delay_ms, excess, held.limit));
        }
    }
    match worst {
        Some((delay_ms @ 1.., excess, limit)) => {
            Judgement::Delayed { time: Duration::from_millis(delay_ms), excess, zone: &limit.zone }
        }
        _ => Judgement::Passed,
    }
}

/// What one limit says, before the request counts.
enum Check {
    Exceeds(u64),
    Counted(u64),
    Held(Ticket),
    NoRoom,
}

impl Limit {
    fn check(&self, key: &Key<'_>, now_ms: u64, counts_now: bool) -> Check {
        let Rate { rate, buckets, .. } = &*self.zone;
        buckets.with(key, |table| {
            let id = match table.find(key) {
                Some(id) => {
                    table.bump(id);
                    let excess = table.value(id).excess_with_request(now_ms, *rate);
                    if excess > self.burst {
                        return Check::Exceeds(excess);
                    }
                    id
                }
                None => match make_room(table, key, now_ms, *rate) {
                    Ok(id) => id,
                    Err(Full) => return Check::NoRoom,
                },
            };
            let bucket = table.value_mut(id);
            if counts_now {
                return Check::Counted(bucket.count(now_ms, *rate));
            }
            bucket.holders += 1;
            Check::Held(buckets.ticket(key, table, id))
        })
    }

    /// How long a request with this excess waits.
    fn delay_ms(&self, excess: u64) -> u64 {
        excess.saturating_sub(self.delay).saturating_mul(1000) / self.zone.rate
    }
}

impl Bucket {
    /// Clocks of workers differ by some milliseconds: time does not go back.
    fn elapsed_ms(&self, now_ms: u64) -> u64 {
        if self.is_fresh { u64::MAX } else { now_ms.saturating_sub(self.last_ms) }
    }

    fn excess_with_request(&self, now_ms: u64, rate: u64) -> u64 {
        if self.is_fresh {
            return 0;
        }
        let leaked = rate.saturating_mul(self.elapsed_ms(now_ms)) / 1000;
        (self.excess + REQUEST).saturating_sub(leaked)
    }

    /// Counts a request and says the excess.
    fn count(&mut self, now_ms: u64, rate: u64) -> u64 {
        self.excess = self.excess_with_request(now_ms, rate);
        // Within a millisecond nothing leaks.
        if self.elapsed_ms(now_ms) > 0 {
            self.last_ms = now_ms;
        }
        self.is_fresh = false;
        self.excess
    }

    /// Nothing would change if it were not there.
    fn has_leaked_out(&self, now_ms: u64, rate: u64) -> bool {
        let elapsed_ms = self.elapsed_ms(now_ms);
        elapsed_ms >= IDLE_MS_MIN && self.excess <= rate.saturating_mul(elapsed_ms) / 1000
    }
}

/// Keys that were used within this time are not looked at when old ones are cleared away.
const IDLE_MS_MIN: u64 = 60_000;

/// How many keys that have leaked out are cleared away when a new one comes.
const CLEARED_MAX: usize = 2;

/// How many keys a new one may push out, whatever their excess: a long key must not let hundreds of others begin anew.
const PUSHED_OUT_MAX: usize = 3;

/// A bucket for a new key. When the zone is full, keys that were not used for longest make room, whatever their excess.
fn make_room(table: &mut Table<Bucket>, key: &Key<'_>, now_ms: u64, rate: u64) -> Result<EntryId, Full> {
    if !table.could_hold(key) {
        return Err(Full);
    }
    let fresh = Bucket { is_fresh: true, ..Bucket::default() };
    for _ in 0..CLEARED_MAX {
        let oldest = table.oldest().map(|id| (id, *table.value(id)));
        match oldest {
            Some((id, bucket)) if bucket.holders == 0 && bucket.has_leaked_out(now_ms, rate) => table.remove(id),
            _ => break,
        }
    }
    for _ in 0..PUSHED_OUT_MAX {
        match (table.insert(key, fresh), table.oldest()) {
            (Err(Full), Some(oldest)) if table.value(oldest).holders == 0 => table.remove(oldest),
            (result, _) => return result,
        }
    }
    table.insert(key, fresh)
}

/// A bucket that has been looked at and not yet counted.
struct Held<'l> {
    limit: &'l Limit,
    ticket: Ticket,
    is_counted: bool,
}

impl Held<'_> {
    /// Counts the request and says the excess; none in a zone that was emptied meanwhile.
    fn count(&mut self, now_ms: u64) -> u64 {
        self.is_counted = true;
        let Rate { rate, buckets, .. } = &*self.limit.zone;
        let counted = buckets.with_entry(&self.ticket, |table, id| {
            let bucket = table.value_mut(id);
            bucket.holders -= 1;
            bucket.count(now_ms, *rate)
        });
        counted.unwrap_or(0)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if !self.is_counted {
            self.limit.zone.buckets.with_entry(&self.ticket, |table, id| table.value_mut(id).holders -= 1);
        }
    }
}

fn add_zone(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let (key_word, parameters) = statement.args.split_first().expect("three arguments");
    let key = builder.http_mut().template(key_word)?;
    let mut size = None;
    let mut rate = REQUEST;
    for word in parameters {
        if let Some(text) = word.text.strip_prefix(b"zone=") {
            size = Some(ZoneSize::parse(word, text)?);
        } else if let Some(text) = word.text.strip_prefix(b"rate=") {
            rate = parse_rate(text).ok_or_else(|| {
                let error = Diagnostic::emerg(format!("invalid rate \"{}\"", word.text)).at(word.span);
                error.hint("a rate is a number of requests a second or a minute: rate=10r/s")
            })?;
        } else {
            return Err(invalid_parameter(word));
        }
    }
    let size = size.filter(|size| !size.name.is_empty()).ok_or_else(|| needs_zone(statement))?;
    let zone = builder.declare_zone::<Rate>(ZONE, &size, statement.span)?;
    if let Some(earlier) = zone.declared() {
        let message = format!("{ZONE} \"{}\" is already bound to key \"{}\"", size.name, earlier.key_text);
        return Err(statement.error(message));
    }
    let buckets = size.state(builder, ZONE, "limit_req", key_word, statement.span)?;
    zone.declare(Rate { name: size.name, key, key_text: key_word.text.clone(), rate, buckets });
    Ok(())
}

/// `10r/s`, `10r/m`; a number alone is one of requests a second.
fn parse_rate(text: &[u8]) -> Option<u64> {
    let (number, seconds) = match text {
        [number @ .., b'r', b'/', b's'] => (number, 1),
        [number @ .., b'r', b'/', b'm'] => (number, 60),
        number => (number, 1),
    };
    let requests = units::parse_number(number).filter(|&requests| requests > 0)?;
    Some(requests.saturating_mul(REQUEST) / seconds)
}

fn add_limit(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let mut zone = None;
    let (mut burst, mut delay) = (0, 0);
    for word in &statement.args {
        if let Some(name) = word.text.strip_prefix(b"zone=") {
            zone = Some(builder.zone::<Rate>(ZONE, name, word.span)?);
        } else if let Some(text) = word.text.strip_prefix(b"burst=") {
            burst = requests(text).ok_or_else(|| invalid(word, "burst value"))?;
        } else if let Some(text) = word.text.strip_prefix(b"delay=") {
            delay = requests(text).ok_or_else(|| invalid(word, "delay value"))?;
        } else if word.text == "nodelay" {
            delay = NEVER_DELAY;
        } else {
            return Err(invalid_parameter(word));
        }
    }
    let zone = zone.ok_or_else(|| needs_zone(statement))?;
    let mut limits = conf.limits.take().unwrap_or_default();
    if limits.iter().any(|limit| limit.zone.is(&zone)) {
        return Err(statement.directive_error("is duplicate"));
    }
    limits.push(Limit { zone, burst, delay });
    conf.limits.set(limits, Some(statement.span));
    Ok(())
}

fn requests(text: &[u8]) -> Option<u64> {
    units::parse_number(text).filter(|&number| number > 0).map(|number| number.saturating_mul(REQUEST))
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A sequence of requests, each so many milliseconds after the one before, and what each exceeds the rate by.
    #[track_caller]
    fn excesses(rate: &str, pauses_ms: &[u64]) -> Vec<u64> {
        let rate = parse_rate(rate.as_bytes()).unwrap();
        let mut bucket = Bucket { is_fresh: true, ..Bucket::default() };
        let mut now_ms = 5;
        let count = |&pause: &u64| {
            now_ms += pause;
            bucket.count(now_ms, rate)
        };
        pauses_ms.iter().map(count).collect()
    }

    #[test]
    fn buckets_leak_as_nginx_s_do() {
        assert_eq!(excesses("1r/s", &[0, 0, 0]), [0, 1000, 2000]);
        assert_eq!(excesses("1r/s", &[0, 999, 1, 1000]), [0, 1, 1000, 1000]);
        assert_eq!(excesses("1r/s", &[0, 500, 600, 10_000]), [0, 500, 900, 0]);
        assert_eq!(excesses("10r/s", &[0, 1, 1, 198]), [0, 990, 1980, 1000]);
        // 16 thousandths a second; nothing leaks in less than 63 milliseconds, and then it is forgotten.
        assert_eq!(excesses("1r/m", &[0, 62, 62, 1000]), [0, 1000, 2000, 2984]);
        assert_eq!(excesses("30r/m", &[0, 1000, 1000]), [0, 500, 1000]);
        assert_eq!(excesses("9223372036854775807r/s", &[0, 0, 1]), [0, 1000, 0]);
    }

    #[test]
    fn a_new_key_pushes_out_three_at_most() {
        let zone: Zone<Bucket> = Zone::new(32 * 1024);
        let take = |bytes: &[u8]| {
            let key = zone.key(bytes);
            zone.with(&key, |table| {
                let made = make_room(table, &key, 0, REQUEST).map(|id| table.value_mut(id).count(0, REQUEST));
                (made.is_ok(), table.len())
            })
        };
        let mut count = 0;
        while take(format!("{count}").as_bytes()).1 > count {
            count += 1;
        }
        // What never fits pushes nobody out; what needs more room than three leave does not get it at once.
        assert_eq!(take(&[b'a'; KEY_LENGTH_MAX]), (false, count));
        assert_eq!(take(&[b'b'; 300]), (false, count - 3));
        assert_eq!(take(&[b'c'; 100]), (true, count - 2));
        assert!(!take(&[b'b'; 300]).0);
    }

    #[test]
    fn time_does_not_go_back() {
        let mut bucket = Bucket { last_ms: 1000, excess: 0, ..Bucket::default() };
        assert_eq!(bucket.count(990, 1000), 1000);
        assert_eq!(bucket.last_ms, 1000);
    }

    #[test]
    fn rates_are_numbers_a_second_or_a_minute() {
        assert_eq!(parse_rate(b"1r/s"), Some(1000));
        assert_eq!(parse_rate(b"1r/m"), Some(16));
        assert_eq!(parse_rate(b"30r/m"), Some(500));
        assert_eq!(parse_rate(b"5"), Some(5000));
        for wrong in ["", "0r/s", "r/s", "1r/h", "-1r/s", "1.5r/s"] {
            assert_eq!(parse_rate(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    fn a_full_zone_forgets_who_was_seen_last_longest_ago() {
        let zone = Zone::<Bucket>::new(32 * 1024);
        let insert = |number: u32, now_ms| {
            let name = number.to_be_bytes();
            let key = zone.key(&name);
            zone.with(&key, |table| {
                make_room(table, &key, now_ms, 1000).map(|id| {
                    table.value_mut(id).count(now_ms, 1000);
                    table.len()
                })
            })
        };
        let has = |number: u32| {
            let name = number.to_be_bytes();
            let key = zone.key(&name);
            zone.with(&key, |table| table.find(&key).is_some())
        };
        let capacity = (0..).map(|number| insert(number, 0).unwrap()).zip(0..).find(|(len, number)| len == number);
        let (capacity, next) = capacity.expect("it is full at some time");
        assert!(capacity > 400 && !has(0) && has(1) && has(next as u32));
        // A minute later everybody else has leaked out: two go for each that comes.
        assert_eq!(insert(1_000_000, 60_000), Ok(capacity - 1));
        assert!(!has(1) && !has(2) && has(3));
    }

    #[test]
    fn a_key_that_is_held_is_not_forgotten() {
        let zone = Zone::<Bucket>::new(32 * 1024);
        let first = zone.key(b"first");
        let held = Bucket { holders: 1, ..Bucket::default() };
        zone.with(&first, |table| table.insert(&first, held)).unwrap();
        let fills = |number: u32| {
            let name = number.to_be_bytes();
            let key = zone.key(&name);
            zone.with(&key, |table| make_room(table, &key, 1 << 40, 1000)).is_err()
        };
        assert!((0..10_000).any(fills), "nobody can be removed before the first");
    }
}
