//! Decides whether a response is stored, and for how long it is fresh. (RFC 9111 §3, §4.2)
//!
//! ```text
//!   X-Accel-Expires  ►  CDN-Cache-Control, Cache-Control  ►  Expires  ►  proxy_cache_valid  ►  proxy_cache_heuristic
//!                                                                                         the first that is present
//! ```

use gale_base::http_date;
use gale_base::units;
use gale_http::request::response::FieldList;
use gale_protocol::response::ResponseField;

use super::cache_control::{ResponseDirectives, seconds};
use super::rules::Rules;
use super::vary::Vary;

/// Fields of a response that a location ignores: `proxy_ignore_headers`.
#[derive(Clone, Copy, Debug, Default)]
pub struct IgnoredFields {
    /// `X-Accel-Expires`
    pub x_accel_expires: bool,
    /// `Expires`
    pub expires: bool,
    /// `Cache-Control` and `CDN-Cache-Control`.
    pub cache_control: bool,
    /// `Set-Cookie`
    pub set_cookie: bool,
    /// `Vary`
    pub vary: bool,
}

/// A response, and the settings that decide about storing it.
pub struct Judged<'r> {
    /// Its status.
    pub status: u16,
    /// Its fields.
    pub fields: &'r FieldList,
    /// Time at which it was received, in seconds since 1970.
    pub now: u64,
    /// True if the request had an `Authorization` that is not part of the key.
    pub has_authorization: bool,
    /// Fields to ignore.
    pub ignored: IgnoredFields,
    /// `proxy_cache_valid` for the status, in seconds.
    pub valid: Option<u32>,
    /// `proxy_cache_heuristic`
    pub heuristic: Option<Heuristic>,
    /// The rules to follow.
    pub rules: Rules,
}

/// Freshness of a response without an explicit lifetime, from the time since its last modification. (§4.2.2)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heuristic {
    /// Percentage of that time.
    pub percent: u32,
    /// Maximum, in seconds.
    pub seconds_max: u32,
}

/// Result of [`judge`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Storing {
    /// The response is stored.
    Store {
        /// The time for which it may be used.
        lifetime: Lifetime,
        /// The request fields that it depends on.
        vary: Vary,
        /// Fields that are not stored with it, in lower case.
        left_out: Vec<Box<[u8]>>,
    },
    /// The response is not stored.
    Not(NotStored),
}

/// Times for which a stored response may be used, in seconds since 1970 and in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lifetime {
    /// The last second in which it is fresh.
    pub fresh_until: u64,
    /// Additional seconds of use while it is fetched again: `stale-while-revalidate`.
    pub stale_while_revalidate: u32,
    /// Additional seconds of use when the server fails: `stale-if-error`.
    pub stale_if_error: u32,
    /// True if it must not be used stale: `must-revalidate`.
    pub must_revalidate: bool,
    /// Time at which it was received.
    pub received: u64,
    /// Its age at that time.
    pub initial_age: u32,
}

/// Reason for which a response is not stored, for the log and `Cache-Status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotStored {
    /// `no-store`
    NoStore,
    /// `no-cache`
    NoCache,
    /// `private`
    Private,
    /// The response is stale when it arrives.
    Expired,
    /// The response sets a cookie.
    Cookie,
    /// `Vary: *`, or too many fields in `Vary`.
    Vary,
    /// The request had an `Authorization`.
    Authorization,
    /// `X-Accel-Expires: 0`
    AccelExpires,
    /// A number in `Cache-Control` is invalid.
    Invalid,
    /// The response has no lifetime, and no setting gives it one.
    NoLifetime,
    /// `must-understand`, and a status that Gale does not know.
    NotUnderstood,
    /// The response is only a part of the resource.
    Part,
    /// A filter refuses the response: it is not the requested slice.
    Refused,
    /// Fewer requests than `proxy_cache_min_uses`.
    MinUses,
    /// `proxy_no_cache`
    Excluded,
    /// The response is larger than the whole cache: `max_size`.
    TooLarge,
    /// The head is too long.
    LongHead,
    /// `proxy_buffering off`
    Unbuffered,
    /// The requested range begins too far inside: `proxy_cache_max_range_offset`.
    RangeOffset,
    /// Another request has been fetching it for longer than `proxy_cache_lock_timeout`.
    LockTimeout,
    /// Purged while it was fetched.
    Purged,
    /// Too many lists of fields in `Vary`, or rules of `No-Vary-Search`, are in use.
    TooManyRules,
    /// The disk does not answer, or the last response could not be written.
    Disk,
}

impl NotStored {
    /// The reason's word in `Cache-Status`.
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
    /// True if it is fresh.
    pub fn is_fresh(&self, now: u64) -> bool {
        self.fresh_until >= now && !is_of_later(self.received, now)
    }

    /// True if it may be used while it is fetched again.
    pub fn may_be_stale_while_revalidating(&self, now: u64) -> bool {
        !self.must_revalidate && self.fresh_until.saturating_add(self.stale_while_revalidate.into()) >= now
    }

    /// True if it may be used when the server fails.
    pub fn may_be_stale_if_error(&self, now: u64) -> bool {
        !self.must_revalidate && self.fresh_until.saturating_add(self.stale_if_error.into()) >= now
    }
}

/// Seconds by which the clock may be set back without effect: larger than the corrections of a synchronised clock.
const CLOCK_STEP_MAX: u64 = 5;

/// True if the response was received in the future: the clock was set back since. Its age is unknown, so it is stale;
/// otherwise it would be fresh for longer, by the time that the clock was set back. (§4.2.3)
pub fn is_of_later(received: u64, now: u64) -> bool {
    received > now.saturating_add(CLOCK_STEP_MAX)
}

/// Age of a stored response, in seconds. A clock that was set back makes it no younger than it was on receipt. (§4.2.3)
pub fn current_age(lifetime: &Lifetime, now: u64) -> u64 {
    u64::from(lifetime.initial_age) + now.saturating_sub(lifetime.received)
}

/// Decides about a response.
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
        // As in nginx, `stale-while-revalidate` also allows use after an error.
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
            // Not even in this second: max-age=0 demands a revalidation of each use.
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

/// Heuristic freshness of a response without an explicit lifetime, counted from its `Date`. (§4.2.2)
fn heuristic(response: &Judged<'_>, directives: &ResponseDirectives) -> Option<u32> {
    let Heuristic { percent, seconds_max } = response.heuristic?;
    // RFC 9110 §15.1; with another status the server must allow storing.
    let is_usual = matches!(response.status, 200 | 203 | 204 | 206 | 300 | 301 | 308 | 404 | 405 | 410 | 414 | 501);
    if !is_usual && !directives.public {
        return None;
    }
    let changed = http_date::parse(values(response.fields, ResponseField::LastModified).next()?)?;
    let made = date(response.fields).unwrap_or(response.now).min(response.now);
    let seconds = made.checked_sub(changed)?.saturating_mul(percent.into()) / 100;
    Some(u32::try_from(seconds).unwrap_or(u32::MAX).min(seconds_max))
}

/// The directives to follow: those of `CDN-Cache-Control` if it is present and valid. Returns true in that case:
/// `Expires` is then ignored too. (RFC 9213 §2.2)
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

/// Checks whether the directives permit storing. Returns the fields to leave out.
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

/// True if the directives permit storing the response to a request with `Authorization`. (§3.5)
fn permits_authorization(directives: &ResponseDirectives) -> bool {
    directives.public || directives.must_revalidate || directives.s_maxage.is_some()
}

/// End of freshness by `X-Accel-Expires`, if it is present.
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

/// End of freshness by `Expires`; `None` for a date that is invalid or in the past. (§5.3)
fn expires(response: &Judged<'_>) -> Option<u64> {
    let expires = http_date::parse(values(response.fields, ResponseField::Expires).next()?)?;
    if !response.rules.expires_from_date {
        return (expires >= response.now).then_some(expires);
    }
    // Without a valid `Date`, the time of receipt is used. (RFC 9110 §6.6.1)
    let date = date(response.fields).unwrap_or(response.now);
    (expires > date).then(|| response.now.saturating_add(expires - date))
}

fn initial_age(response: &Judged<'_>) -> u32 {
    // The first value is used, among fields and in a list; an invalid number is ignored. (§5.1)
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
