//! limit_req: leaky-bucket limit on the rate of requests or sessions.
//!   limit_req_zone KEY zone=NAME:SIZE rate=N(r/s|r/m);           http; in stream limit_session_zone
//!   limit_req zone=NAME [burst=N] [nodelay | delay=N];           in stream limit_session, without delays
//! (<https://nginx.org/en/docs/http/ngx_http_limit_req_module.html>)
//!
//! As in nginx, rates and excesses are in thousandths of a request and times in milliseconds, so that the same requests
//! are delayed for the same time.

use std::sync::Arc;
use std::time::Duration;

use bstr::{BStr, BString};
use gale_base::log_level::Level;
use gale_base::tally::Tally;
use gale_base::units;
use gale_config::{Body, Contexts, Custom, Diagnostic, Setting, Statement, Takes};
use gale_engine::configuration::{Builder, ZoneRef, ZoneSize};
use gale_engine::module::Directive;
use gale_engine::variables::subject::Subject;
use gale_engine::variables::template::Template;
use gale_engine::zone::table::KEY_LENGTH_MAX;
use gale_engine::zone::{EntryId, Full, Key, Table, Ticket, Zone};

use smallvec::SmallVec;

use super::limits::{invalid, invalid_parameter, needs_zone};

/// A subject whose rate may be limited.
pub trait Limited: Subject {
    /// Name of the directive that defines a zone.
    const ZONE: &'static str;
    /// Name of the directive that sets a limit.
    const LIMIT: &'static str;
    /// The kind of the zones; see [`figures`](super::figures).
    const FIGURES: &'static str;
}

/// Verdicts on the subjects of a zone, indexed by [`Verdict`].
pub type Verdicts = Tally<5>;

/// Verdict of the limits on a subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Within the rate.
    Passed,
    /// Above the rate, within the burst: it is delayed.
    Delayed,
    /// Above the rate and the burst.
    Rejected,
    /// It would be delayed.
    DelayedDryRun,
    /// It would be rejected.
    RejectedDryRun,
}

/// Returns the directive that defines zones, for blocks in `contexts`.
pub(crate) const fn zone_directive<S: Limited>(contexts: Contexts, about: &'static str) -> Directive {
    Directive {
        name: S::ZONE,
        contexts,
        takes: Takes::Exactly(3),
        body: Body::None,
        default: "",
        about,
        store: const { &Custom(|_: &mut (), builder, statement| add_zone::<S>(builder, statement)) },
    }
}

/// One request, in the unit of rates and excesses.
pub(crate) const REQUEST: u64 = 1000;

/// Value of `nodelay`: larger than any excess.
const NEVER_DELAY: u64 = u64::MAX;

/// A limit of a scope.
pub(crate) struct Limit<S: 'static> {
    zone: ZoneRef<Rate<S>>,
    burst: u64,
    /// Requests above this excess are delayed.
    delay: u64,
}

impl<S> Clone for Limit<S> {
    fn clone(&self) -> Limit<S> {
        Limit { zone: self.zone.clone(), burst: self.burst, delay: self.delay }
    }
}

/// A zone with its key and its rate.
pub(crate) struct Rate<S: 'static> {
    pub name: BString,
    key: Template<S>,
    /// The key as written in the configuration, for messages.
    key_text: BString,
    /// Thousandths of a request per second.
    rate: u64,
    buckets: Arc<Zone<Bucket>>,
    verdicts: Arc<Verdicts>,
}

impl<S> Rate<S> {
    fn count(&self, verdict: Verdict) {
        self.verdicts.own().add(verdict as usize, 1);
    }
}

/// State of one key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Bucket {
    /// Time of the last count, in milliseconds.
    last_ms: u64,
    excess: u64,
    /// Number of requests that have checked the bucket and not counted yet. It is not removed while there are any.
    holders: u32,
    /// `true` until the first count.
    is_fresh: bool,
}

/// Result of all limits together.
pub(crate) enum Judgement<'l, S: 'static> {
    /// No zone has a key for the subject.
    Unlimited,
    Passed,
    Delayed {
        time: Duration,
        excess: u64,
        zone: &'l Rate<S>,
    },
    Rejected {
        excess: u64,
        zone: &'l Rate<S>,
    },
    /// A zone is full of keys that cannot be removed.
    NoRoom,
}

/// Checks all limits first; the request counts only if none of them rejects it.
pub(crate) fn judge<'l, S: Limited>(subject: &S, limits: &'l [Limit<S>], is_dry_run: bool) -> Judgement<'l, S> {
    let mut asked: SmallVec<[&Rate<S>; 2]> = SmallVec::new();
    let judgement = ask(subject, limits, &mut asked);
    let rejected = if is_dry_run { Verdict::RejectedDryRun } else { Verdict::Rejected };
    let delayed = if is_dry_run { Verdict::DelayedDryRun } else { Verdict::Delayed };
    match &judgement {
        // The last zone checked has rejected the subject; those before it have not counted it.
        Judgement::Rejected { .. } | Judgement::NoRoom => {
            asked.last().into_iter().for_each(|zone| zone.count(rejected))
        }
        Judgement::Delayed { zone: slowest, .. } => {
            let is_slowest = |zone: &Rate<S>| std::ptr::eq(zone, *slowest);
            let verdict = |zone| if is_slowest(zone) { delayed } else { Verdict::Passed };
            asked.iter().for_each(|zone| zone.count(verdict(zone)));
        }
        Judgement::Passed | Judgement::Unlimited => asked.iter().for_each(|zone| zone.count(Verdict::Passed)),
    }
    judgement
}

/// Checks all limits; `asked` gets the zones that have a key for the subject.
fn ask<'l, S: Limited>(
    subject: &S,
    limits: &'l [Limit<S>],
    asked: &mut SmallVec<[&'l Rate<S>; 2]>,
) -> Judgement<'l, S> {
    let now_ms = gale_runtime::now().as_nanos() / 1_000_000;
    let mut held: Vec<Held<'_, S>> = Vec::new();
    let mut worst: Option<(u64, u64, &Limit<S>)> = None;
    for (number, limit) in limits.iter().enumerate() {
        let zone = &*limit.zone;
        let key = zone.key.evaluate(subject);
        if key.is_empty() {
            continue;
        }
        if key.len() > KEY_LENGTH_MAX {
            let (text, key) = (&zone.key_text, BStr::new(&key));
            let message = format_args!("the value of the \"{text}\" key is more than 65535 bytes: \"{key}\"");
            subject.log(Level::Error, message);
            continue;
        }
        asked.push(zone);
        let key = zone.buckets.key(&key);
        // No later limit can reject the request, so the last one counts at once.
        let counts_now = number + 1 == limits.len();
        match limit.check(&key, now_ms, counts_now) {
            Check::Exceeds(excess) => return Judgement::Rejected { excess, zone },
            Check::Counted(excess) => worst = Some((limit.delay_ms(excess), excess, limit)),
            Check::Held(ticket) => held.push(Held { limit, ticket, is_counted: false }),
            Check::NoRoom => {
                let message = format!("could not allocate node in {} zone \"{}\"", S::LIMIT, zone.name);
                subject.error_log().write(Level::Alert, None, &message);
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

/// Result of one limit, before the request counts.
enum Check {
    Exceeds(u64),
    Counted(u64),
    Held(Ticket),
    NoRoom,
}

impl<S> Limit<S> {
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

    /// Returns the delay of a request with this excess.
    fn delay_ms(&self, excess: u64) -> u64 {
        excess.saturating_sub(self.delay).saturating_mul(1000) / self.zone.rate
    }
}

impl Bucket {
    /// Returns the time since the last count. Clocks of workers differ by some milliseconds: time does not go back.
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

    /// Counts a request and returns its excess.
    fn count(&mut self, now_ms: u64, rate: u64) -> u64 {
        self.excess = self.excess_with_request(now_ms, rate);
        // Nothing leaks within a millisecond.
        if self.elapsed_ms(now_ms) > 0 {
            self.last_ms = now_ms;
        }
        self.is_fresh = false;
        self.excess
    }

    /// Returns `true` if the bucket is in the same state as a new one.
    fn has_leaked_out(&self, now_ms: u64, rate: u64) -> bool {
        let elapsed_ms = self.elapsed_ms(now_ms);
        elapsed_ms >= IDLE_MS_MIN && self.excess <= rate.saturating_mul(elapsed_ms) / 1000
    }
}

/// Buckets used within this time are not considered when old ones are removed.
const IDLE_MS_MIN: u64 = 60_000;

/// Maximum number of empty buckets that are removed for each new key.
const CLEARED_MAX: usize = 2;

/// Maximum number of buckets that a new key may evict, whatever their excess: a long key must not reset hundreds of
/// others.
const PUSHED_OUT_MAX: usize = 3;

/// Returns a bucket for a new key. If the zone is full, the least recently used buckets are evicted, whatever their
/// excess.
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

/// A bucket that was checked and not counted yet.
struct Held<'l, S: 'static> {
    limit: &'l Limit<S>,
    ticket: Ticket,
    is_counted: bool,
}

impl<S> Held<'_, S> {
    /// Counts the request and returns its excess; 0 in a zone that was emptied meanwhile.
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

impl<S> Drop for Held<'_, S> {
    fn drop(&mut self) {
        if !self.is_counted {
            self.limit.zone.buckets.with_entry(&self.ticket, |table, id| table.value_mut(id).holders -= 1);
        }
    }
}

fn add_zone<S: Limited>(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let (key_word, parameters) = statement.args.split_first().expect("three arguments");
    let key = builder.variables::<S>().template(key_word)?;
    let mut size = None;
    let mut rate = REQUEST;
    for word in parameters {
        if let Some(text) = word.text.strip_prefix(b"zone=") {
            size = Some(ZoneSize::parse(word, text)?);
        } else if let Some(text) = word.text.strip_prefix(b"rate=") {
            rate = parse_rate(text).ok_or_else(|| {
                let error = Diagnostic::emerg(format!("invalid rate \"{}\"", word.text)).at(word.span);
                error.hint("a rate is a number of requests per second or per minute: rate=10r/s")
            })?;
        } else {
            return Err(invalid_parameter(word));
        }
    }
    let size = size.filter(|size| !size.name.is_empty()).ok_or_else(|| needs_zone(statement))?;
    let zone = builder.declare_zone::<Rate<S>>(S::ZONE, &size, statement.span)?;
    if let Some(earlier) = zone.declared() {
        let message = format!("{} \"{}\" is already bound to key \"{}\"", S::ZONE, size.name, earlier.key_text);
        return Err(statement.error(message));
    }
    let buckets = size.state(builder, S::ZONE, S::LIMIT, key_word, statement.span)?;
    let verdicts = builder.figures(S::FIGURES, &size.name);
    zone.declare(Rate { name: size.name, key, key_text: key_word.text.clone(), rate, buckets, verdicts });
    Ok(())
}

/// Parses `10r/s` or `10r/m`; a plain number means requests per second.
fn parse_rate(text: &[u8]) -> Option<u64> {
    let (number, seconds) = match text {
        [number @ .., b'r', b'/', b's'] => (number, 1),
        [number @ .., b'r', b'/', b'm'] => (number, 60),
        number => (number, 1),
    };
    let requests = units::parse_number(number).filter(|&requests| requests > 0)?;
    Some(requests.saturating_mul(REQUEST) / seconds)
}

/// Adds a limit to those of its level. `may_delay` allows the parameters `delay` and `nodelay`.
pub(crate) fn add_limit<S: Limited>(
    limits: &mut Setting<Vec<Limit<S>>>,
    may_delay: bool,
    builder: &mut Builder,
    statement: &Statement,
) -> Result<(), Diagnostic> {
    let mut zone = None;
    let (mut burst, mut delay) = (0, if may_delay { 0 } else { NEVER_DELAY });
    for word in &statement.args {
        if let Some(name) = word.text.strip_prefix(b"zone=") {
            zone = Some(builder.zone::<Rate<S>>(S::ZONE, name, word.span)?);
        } else if let Some(text) = word.text.strip_prefix(b"burst=") {
            burst = requests(text).ok_or_else(|| invalid(word, "burst value"))?;
        } else if let Some(text) = word.text.strip_prefix(b"delay=").filter(|_| may_delay) {
            delay = requests(text).ok_or_else(|| invalid(word, "delay value"))?;
        } else if may_delay && word.text == "nodelay" {
            delay = NEVER_DELAY;
        } else {
            return Err(invalid_parameter(word));
        }
    }
    let zone = zone.ok_or_else(|| needs_zone(statement))?;
    let mut all = limits.take().unwrap_or_default();
    if all.iter().any(|limit| limit.zone.is(&zone)) {
        return Err(statement.directive_error("is duplicate"));
    }
    all.push(Limit { zone, burst, delay });
    limits.set(all, Some(statement.span));
    Ok(())
}

fn requests(text: &[u8]) -> Option<u64> {
    units::parse_number(text).filter(|&number| number > 0).map(|number| number.saturating_mul(REQUEST))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the excess of each request in a sequence; the pauses before them are in milliseconds.
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
        // 16 thousandths a second; nothing leaks in less than 63 milliseconds, and that time is lost.
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
        // A key that can never fit evicts nothing; one that needs more room than three buckets leave is not added at
        // once.
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
    fn full_zone_evicts_the_least_recently_used_entry() {
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
        // A minute later all other buckets are empty: each new key removes two.
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
        assert!((0..10_000).any(fills), "no entry can be removed before the first");
    }
}
