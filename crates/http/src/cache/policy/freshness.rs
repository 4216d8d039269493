//! Whether a response is stored, and for how long it is fresh. (RFC 9111 §3, §4.2)
//!
//! ```text
//!   X-Accel-Expires  ►  CDN-Cache-Control, Cache-Control  ►  Expires  ►  proxy_cache_valid  ►  proxy_cache_heuristic
//!                                                                                             the first that says
//! ```

use gale_base::http_date;
use gale_base::units;
use gale_protocol::response::ResponseField;

use super::cache_control::{ResponseDirectives, seconds};
use super::rules::Rules;
use super::vary::Vary;
use crate::request::response::FieldList;

/// Fields of a response that a location does not listen to: `proxy_ignore_headers`.
#[derive(Clone, Copy, Debug, Default)]
pub struct IgnoredFields {
    /// `X-Accel-Expires`
    pub x_accel_expires: bool,
    /// `Expires`
    pub expires: bool,
    /// `Cache-Control`, and the more specific field of caches.
    pub cache_control: bool,
    /// `Set-Cookie`
    pub set_cookie: bool,
    /// `Vary`
    pub vary: bool,
}

/// A response whose storing is to be judged.
pub struct Judged<'r> {
    /// Its status.
    pub status: u16,
    /// Its fields.
    pub fields: &'r FieldList,
    /// When it came, in seconds since 1970.
    pub now: u64,
    /// The request had an `Authorization` that the key does not tell apart.
    pub has_authorization: bool,
    /// What has no effect.
    pub ignored: IgnoredFields,
    /// What `proxy_cache_valid` says of the status, in seconds.
    pub valid: Option<u32>,
    /// What `proxy_cache_heuristic` says.
    pub heuristic: Option<Heuristic>,
    /// Whose rules count.
    pub rules: Rules,
}

/// For how long a response is fresh that says nothing of it, by how long it had not changed when it came. (§4.2.2)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heuristic {
    /// So many percent of that time.
    pub percent: u32,
    /// At most so long, in seconds.
    pub seconds_max: u32,
}

/// What becomes of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Storing {
    /// It is stored.
    Store {
        /// For how long it may be used.
        lifetime: Lifetime,
        /// What of the request it depends on.
        vary: Vary,
        /// Fields that are not stored with it, in lower case.
        left_out: Vec<Box<[u8]>>,
    },
    /// It is not.
    Not(NotStored),
}

/// For how long something stored may be used, in seconds since 1970 and in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lifetime {
    /// The last second in which it is fresh.
    pub fresh_until: u64,
    /// How much longer it may be used while it is being fetched anew: `stale-while-revalidate`.
    pub stale_while_revalidate: u32,
    /// How much longer it may be used when the server fails: `stale-if-error`.
    pub stale_if_error: u32,
    /// Stale it is used by nobody: `must-revalidate`.
    pub must_revalidate: bool,
    /// When it came.
    pub received: u64,
    /// How old it was then.
    pub initial_age: u32,
}

/// Why a response is not stored: what the log and `Cache-Status` tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotStored {
    /// `no-store`
    NoStore,
    /// `no-cache`
    NoCache,
    /// `private`
    Private,
    /// It is stale when it comes.
    Expired,
    /// It sets a cookie.
    Cookie,
    /// `Vary: *`, or too much of it.
    Vary,
    /// The request had an `Authorization`.
    Authorization,
    /// `X-Accel-Expires: 0`
    AccelExpires,
    /// A number in `Cache-Control` is none.
    Invalid,
    /// Nothing says for how long it is fresh.
    NoLifetime,
    /// `must-understand`, and a status that nobody here understands.
    NotUnderstood,
    /// A part of a response: it does not answer for all of it.
    Part,
    /// A filter refuses it: it is not the slice that was asked for.
    Refused,
    /// It was not asked for as often as `proxy_cache_min_uses` says.
    MinUses,
    /// `proxy_no_cache`
    Excluded,
    /// It is larger than all of the cache: `max_size`.
    TooLarge,
    /// Its head is too long.
    LongHead,
    /// `proxy_buffering off`
    Unbuffered,
    /// The request wants a part that is too far inside: `proxy_cache_max_range_offset`.
    RangeOffset,
    /// Somebody else has fetched it for longer than `proxy_cache_lock_timeout`.
    LockTimeout,
    /// It was purged while the server was asked.
    Purged,
    /// Too many lists of fields in `Vary`, or rules of `No-Vary-Search`, are in use.
    TooManyRules,
    /// The disk does not answer, or the last response could not be written.
    Disk,
}

impl NotStored {
    /// The word for it in `Cache-Status`.
    pub fn word(self) -> &'static str {
        match self {
            NotStored::NoStore => "no-store",
            NotStored::NoCache => "no-cache",
            NotStored::Private => "private",
            NotStored::Expired => "expired",
            NotStored::Cookie => "cookie",
            NotStored::Vary => "vary",
            NotStored::Authorization => "authorization",
            NotStored::AccelExpires => "x-accel-expires",
            NotStored::Invalid => "invalid",
            NotStored::NoLifetime => "no-lifetime",
            NotStored::NotUnderstood => "not-understood",
            NotStored::Part => "part",
            NotStored::Refused => "refused",
            NotStored::MinUses => "min-uses",
            NotStored::Excluded => "excluded",
            NotStored::TooLarge => "too-large",
            NotStored::LongHead => "long-head",
            NotStored::Unbuffered => "unbuffered",
            NotStored::RangeOffset => "range-offset",
            NotStored::LockTimeout => "lock-timeout",
            NotStored::Purged => "purged",
            NotStored::TooManyRules => "too-many-rules",
            NotStored::Disk => "disk",
        }
    }
}

impl Lifetime {
    /// Whether it is fresh.
    pub fn is_fresh(&self, now: u64) -> bool {
        self.fresh_until >= now && !is_of_later(self.received, now)
    }

    /// Whether it may be used while it is being fetched anew.
    pub fn may_be_stale_while_revalidating(&self, now: u64) -> bool {
        !self.must_revalidate && self.fresh_until.saturating_add(self.stale_while_revalidate.into()) >= now
    }

    /// Whether it may be used when the server fails.
    pub fn may_be_stale_if_error(&self, now: u64) -> bool {
        !self.must_revalidate && self.fresh_until.saturating_add(self.stale_if_error.into()) >= now
    }
}

/// By so many seconds the clock may be set back without effect: clocks that are kept right are set by less.
const CLOCK_STEP_MAX: u64 = 5;

/// Whether something was stored later than now: the clock was set back since. Nobody knows how old it is, so it is
/// stale; otherwise it would be fresh for longer by all that the clock was set back. (§4.2.3)
pub fn is_of_later(received: u64, now: u64) -> bool {
    received > now.saturating_add(CLOCK_STEP_MAX)
}

/// How old something stored is, in seconds. A clock that was set back makes nothing younger than it came. (§4.2.3)
pub fn current_age(lifetime: &Lifetime, now: u64) -> u64 {
    u64::from(lifetime.initial_age) + now.saturating_sub(lifetime.received)
}

/// Judges a response.
pub fn judge(response: &Judged<'_>) -> Storing {
    match lifetime(response) {
        Ok((lifetime, left_out)) => {
            let vary = match response.ignored.vary {
                true => Vary::Nothing,
                false => Vary::parse(values(response.fields, ResponseField::Vary)),
            };
            match vary {
                Vary::Unknown => Storing::Not(NotStored::Vary),
                vary => Storing::Store { lifetime, vary, left_out },
            }
        }
        Err(why) => Storing::Not(why),
    }
}

/// Names of fields that are not stored.
type LeftOut = Vec<Box<[u8]>>;

fn lifetime(response: &Judged<'_>) -> Result<(Lifetime, LeftOut), NotStored> {
    let Judged { fields, now, ignored, rules, .. } = *response;
    if fields.has(ResponseField::SetCookie) && !ignored.set_cookie && !rules.stores_cookies {
        return Err(NotStored::Cookie);
    }
    let (directives, is_targeted) = directives(response);
    if response.has_authorization && rules.protects_authorization && !permits_authorization(&directives) {
        return Err(NotStored::Authorization);
    }
    let initial_age = initial_age(response);
    let mut lifetime = Lifetime {
        fresh_until: 0,
        stale_while_revalidate: directives.stale_while_revalidate.unwrap_or(0),
        // As in nginx: what may be used while it is fetched anew may be used when that fails.
        stale_if_error: directives.stale_if_error.or(directives.stale_while_revalidate).unwrap_or(0),
        must_revalidate: rules.obeys_must_revalidate
            && (directives.must_revalidate || directives.proxy_revalidate || directives.s_maxage.is_some()),
        received: now,
        initial_age,
    };
    match accel_expires(response)? {
        Some(until) => {
            lifetime.fresh_until = until;
            return Ok((lifetime, Vec::new()));
        }
        None if directives.has_invalid_number => return Err(NotStored::Invalid),
        None => {}
    }
    let left_out = check_permission(response, &directives)?;
    let age = if rules.counts_age { u64::from(initial_age) } else { 0 };
    if let Some(seconds) = directives.s_maxage.or(directives.max_age) {
        if seconds == 0 && !(rules.stores_no_cache && has_validator(fields)) {
            return Err(NotStored::Expired);
        }
        lifetime.fresh_until = (now + u64::from(seconds)).saturating_sub(age);
        if u64::from(seconds) <= age {
            // Not even in this second: max-age=0 means that it is asked about each time.
            lifetime.fresh_until = lifetime.fresh_until.min(now.saturating_sub(1));
        }
    } else if directives.no_cache == super::cache_control::Named::All {
        lifetime.fresh_until = now.saturating_sub(1);
    } else if fields.has(ResponseField::Expires) && !ignored.expires && !is_targeted {
        let until = expires(response).ok_or(NotStored::Expired)?;
        lifetime.fresh_until = until.saturating_sub(age);
        if lifetime.fresh_until < now {
            return Err(NotStored::Expired);
        }
    } else {
        let seconds = match response.valid {
            Some(seconds) => Some(seconds),
            None => heuristic(response, &directives).map(|seconds| seconds.saturating_sub(initial_age)),
        };
        let seconds = seconds.filter(|&seconds| seconds > 0).ok_or(NotStored::NoLifetime)?;
        lifetime.fresh_until = now + u64::from(seconds);
    }
    if directives.no_cache == super::cache_control::Named::All {
        lifetime.fresh_until = lifetime.fresh_until.min(now.saturating_sub(1));
        lifetime.must_revalidate = true;
    }
    let is_useless = lifetime.fresh_until < now && lifetime.stale_if_error == 0 && !has_validator(fields);
    if is_useless { Err(NotStored::Expired) } else { Ok((lifetime, left_out)) }
}

/// For how long a response is taken for fresh that does not say so itself, counted from when it was made. (§4.2.2)
fn heuristic(response: &Judged<'_>, directives: &ResponseDirectives) -> Option<u32> {
    let Heuristic { percent, seconds_max } = response.heuristic?;
    // RFC 9110 §15.1; of others the server has to say that they may be stored.
    let is_usual = matches!(response.status, 200 | 203 | 204 | 206 | 300 | 301 | 308 | 404 | 405 | 410 | 414 | 501);
    if !is_usual && !directives.public {
        return None;
    }
    let changed = http_date::parse(values(response.fields, ResponseField::LastModified).next()?)?;
    let made = date(response.fields).unwrap_or(response.now).min(response.now);
    let seconds = made.checked_sub(changed)?.saturating_mul(percent.into()) / 100;
    Some(u32::try_from(seconds).unwrap_or(u32::MAX).min(seconds_max))
}

/// What of a response's directives counts: those of `CDN-Cache-Control` where it is there and valid. True if so: then
/// `Expires` says nothing, either. (RFC 9213 §2.2)
fn directives(response: &Judged<'_>) -> (ResponseDirectives, bool) {
    if response.ignored.cache_control {
        return (ResponseDirectives::default(), false);
    }
    if response.rules.obeys_cdn_cache_control {
        let is_specific = |name: &[u8]| name.eq_ignore_ascii_case(b"CDN-Cache-Control");
        let specific = response.fields.iter().filter(|field| field.name.known().is_none() && is_specific(&field.name));
        if let Some(directives) = ResponseDirectives::parse_targeted(specific.map(|field| &*field.value)) {
            return (directives, true);
        }
    }
    let values = values(response.fields, ResponseField::CacheControl);
    let directives = match response.rules.parses_directives {
        true => ResponseDirectives::parse(values),
        false => ResponseDirectives::search(values),
    };
    (directives, false)
}

/// Whether the response may be stored as far as its directives go; the fields that must be left out then.
fn check_permission(response: &Judged<'_>, directives: &ResponseDirectives) -> Result<LeftOut, NotStored> {
    use super::cache_control::Named;
    let rules = response.rules;
    if directives.must_understand && rules.obeys_must_understand {
        if !is_understood(response.status) {
            return Err(NotStored::NotUnderstood);
        }
    } else if directives.no_store {
        return Err(NotStored::NoStore);
    }
    match (&directives.private, rules.stores_no_cache) {
        (Named::Absent, _) | (Named::Fields(_), true) => {}
        _ => return Err(NotStored::Private),
    }
    match (&directives.no_cache, rules.stores_no_cache) {
        (Named::Absent, _) | (Named::Fields(_), true) => {}
        (Named::All, true) if has_validator(response.fields) => {}
        _ => return Err(NotStored::NoCache),
    }
    Ok(directives.private.fields().iter().chain(directives.no_cache.fields()).cloned().collect())
}

/// Statuses whose meaning for caches is known: those of RFC 9110 §15, RFC 6585 and RFC 7725. (§5.2.2.3)
fn is_understood(status: u16) -> bool {
    matches!(status, 200..=206 | 300..=305 | 307 | 308 | 400..=417 | 421 | 422 | 426 | 428 | 429 | 431 | 451)
        || matches!(status, 500..=505 | 511)
}

/// What allows to store the response to a request with `Authorization`. (§3.5)
fn permits_authorization(directives: &ResponseDirectives) -> bool {
    directives.public || directives.must_revalidate || directives.s_maxage.is_some()
}

/// Until when `X-Accel-Expires` says that the response is fresh, if it says anything.
fn accel_expires(response: &Judged<'_>) -> Result<Option<u64>, NotStored> {
    if response.ignored.x_accel_expires {
        return Ok(None);
    }
    let Some(value) = values(response.fields, ResponseField::XAccelExpires).next() else { return Ok(None) };
    match value.strip_prefix(b"@") {
        Some(moment) => Ok(units::parse_number(moment)),
        None => match units::parse_number(value) {
            Some(0) => Err(NotStored::AccelExpires),
            Some(seconds) => Ok(Some(response.now.saturating_add(seconds))),
            None => Ok(None),
        },
    }
}

/// Until when `Expires` says that it is fresh; `None` for a date that is none, or has passed. (§5.3)
fn expires(response: &Judged<'_>) -> Option<u64> {
    let expires = http_date::parse(values(response.fields, ResponseField::Expires).next()?)?;
    if !response.rules.expires_from_date {
        return (expires >= response.now).then_some(expires);
    }
    // Without a valid `Date` it was made when it came. (RFC 9110 §6.6.1)
    let date = date(response.fields).unwrap_or(response.now);
    (expires > date).then(|| response.now.saturating_add(expires - date))
}

fn initial_age(response: &Judged<'_>) -> u32 {
    // The first counts, of fields and in a list; what is no number says nothing. (§5.1)
    let first = values(response.fields, ResponseField::Age).next().and_then(|value| value.split(|&b| b == b',').next());
    let told = u64::from(seconds(first.map(<[u8]>::trim_ascii)).unwrap_or(0));
    let apparent = match date(response.fields) {
        Some(date) if response.rules.counts_date => response.now.saturating_sub(date),
        _ => 0,
    };
    u32::try_from(told.max(apparent)).unwrap_or(i32::MAX as u32).min(i32::MAX as u32)
}

fn date(fields: &FieldList) -> Option<u64> {
    values(fields, ResponseField::Date).next().and_then(http_date::parse)
}

fn has_validator(fields: &FieldList) -> bool {
    fields.has(ResponseField::ETag) || fields.has(ResponseField::LastModified)
}

fn values(fields: &FieldList, known: ResponseField) -> impl Iterator<Item = &[u8]> {
    let fields = if fields.has(known) { &**fields } else { &[] };
    fields.iter().filter(move |field| field.name.known() == Some(known)).map(|field| &*field.value)
}
