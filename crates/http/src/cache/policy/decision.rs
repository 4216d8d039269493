//! Decision about a cacheable request: the cache answers it, or a server is asked.
//!
//! [`decide`] is one pure function of the result of a look into the cache, the client's directives, and the settings of
//! the location. `upstream/caching/consult.rs` looks, performs the decision, and looks again where an entry has gone
//! or another request's fetch has ended.

use super::RequestDirectives;
use super::freshness::{Lifetime, NotStored, current_age, is_of_later};
use crate::cache::purges::Verdict;

/// Result of a look into the cache; `S` is the caller's handle of a stored response.
#[derive(Clone, Copy, Debug)]
pub enum Found<S> {
    /// The location does not use what is stored (`cache_bypass`), or the client forbids to store (`no-store`).
    Bypassed,
    /// A stored response, which was opened and can be read.
    Stored(Stored, S),
    /// The server failed with this status a moment ago, and `cache_valid` keeps it.
    Error(u16),
    /// Nothing that the request can use.
    Missing(Missing),
}

/// Facts about a stored response.
#[derive(Clone, Copy, Debug)]
pub struct Stored {
    /// Lifetime in its head.
    pub lifetime: Lifetime,
    /// Lifetime in the index, which the answer to a question about it may have renewed since.
    pub renewed: Renewed,
    /// Whether it was purged.
    pub purged: Verdict,
}

/// The part of a [`Lifetime`] that the index keeps.
#[derive(Clone, Copy, Debug)]
pub struct Renewed {
    /// See [`Lifetime::is_fresh`].
    pub is_fresh: bool,
    /// The last second in which it is fresh.
    pub fresh_until: u64,
    /// See [`Lifetime`].
    pub stale_while_revalidate: u32,
    /// See [`Lifetime`].
    pub must_revalidate: bool,
}

/// Facts about a response that another request is fetching, or has fetched and that is not in its file yet.
#[derive(Clone, Copy, Debug)]
pub struct Coming {
    /// Its lifetime.
    pub lifetime: Lifetime,
    /// Whether it was purged.
    pub purged: Verdict,
    /// It is for this request, has a body if the request wants one, comes without a pause, and can still be read from
    /// its beginning.
    pub is_readable: bool,
}

/// Reason for which the request can use nothing.
#[derive(Clone, Copy, Debug)]
pub enum Missing {
    /// Nothing is stored.
    Unknown {
        /// Requests for it so far, this one included.
        uses: u64,
        /// The last response was not to be stored: the next request does not wait for this one.
        is_uncacheable: bool,
    },
    /// The stored response cannot be read, or it, or the one that is coming, does not suit the request.
    Unusable {
        /// The one that is coming is not to be stored.
        is_uncacheable: bool,
    },
}

/// Settings of the location, as they apply to the request.
#[derive(Clone, Copy, Debug)]
pub struct Allowed {
    /// `cache_use_stale updating`
    pub stale_while_updating: bool,
    /// `cache_background_update`
    pub background_update: bool,
    /// `cache_lock`
    pub lock: bool,
    /// `cache_min_uses`
    pub min_uses: u64,
    /// The client's range begins behind `cache_max_range_offset`.
    pub is_beyond_range: bool,
}

/// Decision about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision<S> {
    /// The stored response answers it.
    Serve(S, Age),
    /// The server's error of a moment ago answers it.
    ServeError(u16),
    /// It is answered with this status of the cache's own.
    Refuse(u16),
    /// The stored response was purged: it is removed, and the cache is asked again.
    Remove(S),
    /// A server is asked whether the stored response has changed.
    Revalidate(S, Revalidation),
    /// A server is asked for all of the response.
    Fetch(StorePlan),
    /// The request is passed on as it is, and its response is not stored.
    Pass(NotStored),
}

/// Manner in which a stored response is revalidated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Revalidation {
    /// Use of the stored response until the server has answered.
    pub meanwhile: Meanwhile,
    /// It is fresh, and the client wants it confirmed.
    pub is_by_request: bool,
}

/// Age of a response that is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Age {
    /// It is fresh.
    Fresh,
    /// It is stale, and the client accepts that (`max-stale`).
    Stale,
}

/// Use of a stale response while it is fetched anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meanwhile {
    /// None: all requests wait, for as long as `cache_lock` says.
    Wait,
    /// It answers all requests but the one that fetches it anew.
    ServeOthers,
    /// It answers all requests; one is repeated in the background.
    ServeAll,
}

/// Storing of the response that a server gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StorePlan {
    /// One request fetches it, others wait for it (`cache_lock`).
    Alone,
    /// Each request fetches it; the last one counts.
    Beside,
    /// It is not stored.
    Unstored,
}

/// Decides about a request at this second (Unix time).
pub fn decide<S>(found: Found<S>, asked: &RequestDirectives, allowed: &Allowed, now: u64) -> Decision<S> {
    match found {
        Found::Bypassed if asked.only_if_cached => Decision::Refuse(GATEWAY_TIMEOUT),
        Found::Bypassed if asked.no_store => Decision::Fetch(StorePlan::Unstored),
        Found::Bypassed => Decision::Fetch(StorePlan::Beside),
        Found::Stored(stored, handle) => decide_stored(&stored, handle, asked, allowed, now),
        Found::Error(status) => Decision::ServeError(status),
        Found::Missing(missing) => decide_missing(missing, asked, allowed),
    }
}

/// Whether a response that is coming answers the request.
pub fn is_served_while_it_comes(coming: &Coming, asked: &RequestDirectives, now: u64) -> bool {
    coming.is_readable
        && coming.purged == Verdict::Valid
        && coming.lifetime.is_fresh(now)
        && accepts_fresh(asked, &coming.lifetime, now)
}

/// `only-if-cached` and nothing to use. (RFC 9111 §5.2.1.7)
const GATEWAY_TIMEOUT: u16 = 504;

fn decide_stored<S>(stored: &Stored, handle: S, asked: &RequestDirectives, allowed: &Allowed, now: u64) -> Decision<S> {
    let Stored { lifetime, renewed, purged } = stored;
    let is_valid = renewed.is_fresh && *purged == Verdict::Valid;
    if *purged == Verdict::Gone {
        Decision::Remove(handle)
    } else if is_valid && accepts_fresh(asked, lifetime, now) {
        Decision::Serve(handle, Age::Fresh)
    } else if accepts_stale(asked, lifetime, now) {
        Decision::Serve(handle, Age::Stale)
    } else if asked.only_if_cached {
        Decision::Refuse(GATEWAY_TIMEOUT)
    } else {
        let meanwhile = meanwhile(renewed, asked, allowed, now);
        Decision::Revalidate(handle, Revalidation { meanwhile, is_by_request: is_valid })
    }
}

/// `cache_use_stale updating`, or `stale-while-revalidate` of the response (RFC 5861 §3).
fn meanwhile(renewed: &Renewed, asked: &RequestDirectives, allowed: &Allowed, now: u64) -> Meanwhile {
    let until = renewed.fresh_until.saturating_add(renewed.stale_while_revalidate.into());
    let is_revalidating = renewed.stale_while_revalidate > 0 && until >= now;
    let may_be_stale = !renewed.must_revalidate && !asked.no_cache;
    match may_be_stale && (allowed.stale_while_updating || is_revalidating) {
        false => Meanwhile::Wait,
        true if allowed.background_update => Meanwhile::ServeAll,
        true => Meanwhile::ServeOthers,
    }
}

fn decide_missing<S>(missing: Missing, asked: &RequestDirectives, allowed: &Allowed) -> Decision<S> {
    if asked.only_if_cached {
        return Decision::Refuse(GATEWAY_TIMEOUT);
    }
    let is_uncacheable = match missing {
        Missing::Unknown { uses, .. } if uses < allowed.min_uses => return Decision::Pass(NotStored::MinUses),
        Missing::Unknown { is_uncacheable, .. } | Missing::Unusable { is_uncacheable } => is_uncacheable,
    };
    if allowed.is_beyond_range {
        return Decision::Pass(NotStored::RangeOffset);
    }
    Decision::Fetch(if allowed.lock && !is_uncacheable { StorePlan::Alone } else { StorePlan::Beside })
}

/// Whether the client accepts a fresh response of this age. (RFC 9111 §5.2.1)
fn accepts_fresh(asked: &RequestDirectives, lifetime: &Lifetime, now: u64) -> bool {
    !asked.no_cache
        && asked.max_age.is_none_or(|most| current_age(lifetime, now) <= most.into())
        && asked.min_fresh.is_none_or(|least| lifetime.is_fresh(now.saturating_add(least.into())))
}

/// Whether the client accepts every response that is fresh.
pub fn accepts_any_fresh(asked: &RequestDirectives) -> bool {
    !asked.no_cache && asked.max_age.is_none() && asked.min_fresh.is_none()
}

/// Whether the client accepts this stale response. (RFC 9111 §5.2.1.2)
fn accepts_stale(asked: &RequestDirectives, lifetime: &Lifetime, now: u64) -> bool {
    let most = asked.max_stale.unwrap_or(0);
    !asked.no_cache
        && most > 0
        && !is_of_later(lifetime.received, now)
        && !lifetime.must_revalidate
        && asked.max_age.is_none_or(|most| current_age(lifetime, now) <= most.into())
        && now.saturating_sub(lifetime.fresh_until) <= most.into()
}

#[cfg(test)]
mod tests {
    use super::Decision::{Fetch, Pass, Refuse, Remove, Revalidate, Serve, ServeError};
    use super::Meanwhile::{ServeAll, ServeOthers, Wait};
    use super::StorePlan::{Alone, Beside, Unstored};
    use super::*;

    /// The second of every row.
    const NOW: u64 = 1_000_000;

    /// Settings of most rows: nginx's defaults, but for `cache_lock on`.
    const USUAL: Allowed = Allowed {
        stale_while_updating: false,
        background_update: false,
        lock: true,
        min_uses: 1,
        is_beyond_range: false,
    };

    const UPDATING: Allowed = Allowed { stale_while_updating: true, ..USUAL };
    const BACKGROUND: Allowed = Allowed { background_update: true, ..UPDATING };

    /// A response that came so many seconds ago, and is fresh for so many after it came.
    fn lived(age: u64, fresh_for: u64) -> Lifetime {
        Lifetime {
            fresh_until: NOW - age + fresh_for,
            stale_while_revalidate: 0,
            stale_if_error: 0,
            must_revalidate: false,
            received: NOW - age,
            initial_age: 0,
        }
    }

    fn must_revalidate(lifetime: Lifetime) -> Lifetime {
        Lifetime { must_revalidate: true, ..lifetime }
    }

    fn while_revalidating(lifetime: Lifetime, seconds: u32) -> Lifetime {
        Lifetime { stale_while_revalidate: seconds, ..lifetime }
    }

    fn asked(directives: &str) -> RequestDirectives {
        RequestDirectives::parse([directives.as_bytes()], None)
    }

    fn decide_about(lifetime: Lifetime, purged: Verdict, directives: &str, allowed: &Allowed) -> Decision<()> {
        let renewed = Renewed {
            is_fresh: lifetime.is_fresh(NOW),
            fresh_until: lifetime.fresh_until,
            stale_while_revalidate: lifetime.stale_while_revalidate,
            must_revalidate: lifetime.must_revalidate,
        };
        decide(Found::Stored(Stored { lifetime, renewed, purged }, ()), &asked(directives), allowed, NOW)
    }

    const FRESH: Decision<()> = Serve((), Age::Fresh);
    const STALE: Decision<()> = Serve((), Age::Stale);
    const ASK: Decision<()> = Revalidate((), Revalidation { meanwhile: Wait, is_by_request: false });
    const CONFIRM: Decision<()> = Revalidate((), Revalidation { meanwhile: Wait, is_by_request: true });
    const SERVE_OTHERS: Decision<()> = Revalidate((), Revalidation { meanwhile: ServeOthers, is_by_request: false });
    const SERVE_ALL: Decision<()> = Revalidate((), Revalidation { meanwhile: ServeAll, is_by_request: false });

    #[test]
    #[rustfmt::skip]
    fn stored_responses_are_used_as_rfc_9111_says() {
        let (fresh, stale) = (lived(10, 60), lived(70, 60));
        let rows: &[(&str, Lifetime, &str, &Allowed, Decision<()>)] = &[
            ("4.2: fresh", fresh, "", &USUAL, FRESH),
            ("4.2: fresh in its last second", lived(60, 60), "", &USUAL, FRESH),
            ("4.2: stale", stale, "", &USUAL, ASK),
            ("4.2.3: of a time to come", Lifetime { received: NOW + 90_000, fresh_until: NOW + 90_060, ..fresh }, "",
                &USUAL, ASK),
            ("5.2.1.1: max-age, younger", fresh, "max-age=10", &USUAL, FRESH),
            ("5.2.1.1: max-age, older", fresh, "max-age=9", &USUAL, CONFIRM),
            ("5.2.1.1: max-age counts the age with which it came", Lifetime { initial_age: 5, ..fresh }, "max-age=14",
                &USUAL, CONFIRM),
            ("5.2.1.2: max-stale", stale, "max-stale", &USUAL, STALE),
            ("5.2.1.2: max-stale, as stale", stale, "max-stale=10", &USUAL, STALE),
            ("5.2.1.2: max-stale, more stale", stale, "max-stale=9", &USUAL, ASK),
            ("5.2.1.2: max-stale and max-age", stale, "max-stale=10, max-age=69", &USUAL, ASK),
            ("5.2.2.2: max-stale and must-revalidate", must_revalidate(stale), "max-stale", &USUAL, ASK),
            ("5.2.1.3: min-fresh, as fresh", fresh, "min-fresh=50", &USUAL, FRESH),
            ("5.2.1.3: min-fresh, less fresh", fresh, "min-fresh=51", &USUAL, CONFIRM),
            ("5.2.1.4: no-cache", fresh, "no-cache", &USUAL, CONFIRM),
            ("5.2.1.4: no-cache and max-stale", stale, "no-cache, max-stale", &USUAL, ASK),
            ("5.2.1.7: only-if-cached, fresh", fresh, "only-if-cached", &USUAL, FRESH),
            ("5.2.1.7: only-if-cached, stale", stale, "only-if-cached", &USUAL, Refuse(504)),
            ("5.2.1.7: only-if-cached and max-stale", stale, "only-if-cached, max-stale", &USUAL, STALE),
            ("5861 3: stale-while-revalidate", while_revalidating(stale, 10), "", &USUAL,
                SERVE_OTHERS),
            ("5861 3: stale-while-revalidate, too long ago", while_revalidating(stale, 9), "", &USUAL, ASK),
            ("5861 3: stale-while-revalidate and no-cache", while_revalidating(stale, 10), "no-cache", &USUAL, ASK),
            ("cache_use_stale updating", stale, "", &UPDATING,
                SERVE_OTHERS),
            ("cache_background_update", stale, "", &BACKGROUND,
                SERVE_ALL),
            ("cache_background_update without updating", stale, "", &Allowed { background_update: true, ..USUAL }, ASK),
            ("5.2.2.2: updating and must-revalidate", must_revalidate(stale), "", &BACKGROUND, ASK),
        ];
        for (rule, lifetime, directives, allowed, expected) in rows {
            assert_eq!(decide_about(*lifetime, Verdict::Valid, directives, allowed), *expected, "{rule}");
        }
    }

    #[test]
    fn purged_responses_go_or_count_as_stale() {
        let fresh = lived(10, 60);
        assert_eq!(decide_about(fresh, Verdict::Gone, "", &USUAL), Remove(()));
        assert_eq!(decide_about(fresh, Verdict::Gone, "only-if-cached", &USUAL), Remove(()));
        assert_eq!(decide_about(fresh, Verdict::Stale, "", &USUAL), ASK);
        assert_eq!(decide_about(fresh, Verdict::Stale, "", &BACKGROUND), SERVE_ALL);
    }

    #[test]
    fn renewed_lifetime_of_the_index_counts_for_freshness() {
        let lifetime = lived(70, 60);
        let renewed =
            Renewed { is_fresh: true, fresh_until: NOW + 60, stale_while_revalidate: 0, must_revalidate: false };
        let stored = Found::Stored(Stored { lifetime, renewed, purged: Verdict::Valid }, ());
        assert_eq!(decide(stored, &asked(""), &USUAL, NOW), FRESH);
    }

    #[test]
    fn responses_that_come_answer_those_whom_they_suit() {
        let usual = Coming { lifetime: lived(0, 60), purged: Verdict::Valid, is_readable: true };
        let rows = [
            ("fresh", usual, "", true),
            ("fresh, and max-age=0", usual, "max-age=0", true),
            ("fresh, and no-cache", usual, "no-cache", false),
            ("another variant, or stalled", Coming { is_readable: false, ..usual }, "", false),
            ("purged since", Coming { purged: Verdict::Stale, ..usual }, "", false),
            ("stale", Coming { lifetime: lived(70, 60), ..usual }, "", false),
            ("stale, and max-stale", Coming { lifetime: lived(70, 60), ..usual }, "max-stale", false),
        ];
        for (rule, coming, directives, expected) in rows {
            assert_eq!(is_served_while_it_comes(&coming, &asked(directives), NOW), expected, "{rule}");
        }
    }

    #[test]
    #[rustfmt::skip]
    fn nothing_is_fetched_as_the_location_allows() {
        let unknown = |uses, is_uncacheable| Missing::Unknown { uses, is_uncacheable };
        let range = Allowed { is_beyond_range: true, ..USUAL };
        let unlocked = Allowed { lock: false, ..USUAL };
        let seldom = Allowed { min_uses: 3, ..USUAL };
        let rows: &[(&str, Missing, &str, &Allowed, Decision<()>)] = &[
            ("cache_lock on", unknown(1, false), "", &USUAL, Fetch(Alone)),
            ("cache_lock off", unknown(1, false), "", &unlocked, Fetch(Beside)),
            ("not to be stored the last time", unknown(1, true), "", &USUAL, Fetch(Beside)),
            ("cache_min_uses, too seldom", unknown(2, false), "", &seldom, Pass(NotStored::MinUses)),
            ("cache_min_uses, often enough", unknown(3, false), "", &seldom, Fetch(Alone)),
            ("cache_min_uses, and something unreadable", Missing::Unusable { is_uncacheable: false }, "", &seldom,
                Fetch(Alone)),
            ("cache_max_range_offset", unknown(1, false), "", &range, Pass(NotStored::RangeOffset)),
            ("5.2.1.7: only-if-cached", unknown(1, false), "only-if-cached", &USUAL, Refuse(504)),
        ];
        for (rule, missing, directives, allowed, expected) in rows {
            assert_eq!(decide(Found::Missing(*missing), &asked(directives), allowed, NOW), *expected, "{rule}");
        }
    }

    #[test]
    fn bypassed_requests_and_noted_errors_are_not_looked_for() {
        let bypassed = |directives: &str| decide(Found::<()>::Bypassed, &asked(directives), &USUAL, NOW);
        assert_eq!(bypassed(""), Fetch(Beside));
        assert_eq!(bypassed("no-store"), Fetch(Unstored));
        assert_eq!(bypassed("no-store, only-if-cached"), Refuse(504));
        assert_eq!(decide(Found::<()>::Error(502), &asked(""), &USUAL, NOW), ServeError(502));
    }
}
