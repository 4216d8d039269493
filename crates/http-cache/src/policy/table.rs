//! RFC 9111 and related RFCs, a row per rule: the section, the situation, and the result by the RFC, by nginx, and by
//! Gale's default. A figure is the number of seconds for which a response is fresh; otherwise the row gives the reason
//! for not storing it. `against_nginx.rs` checks nginx's results against nginx itself.

use gale_http::request::response::{Field, FieldList};

use super::freshness::{Heuristic, IgnoredFields, Judged, judge};
use super::{Conformance, NotStored, Storing, current_age};
use crate::index::{Entry, Kind};

/// Time at which every response of the table is received: Sun, 06 Nov 1994 08:49:37 GMT.
pub(super) const NOW: u64 = 784_111_777;

/// Expected result of [`judge`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Is {
    /// Stored, and fresh for this many seconds.
    Fresh(i64),
    Not(NotStored),
}

use Is::{Fresh, Not};
use NotStored::*;

/// A response's status and fields, whether the request had an `Authorization`, and the seconds of `cache_valid`.
pub(super) struct Row {
    pub section: &'static str,
    pub status: u16,
    pub fields: &'static [&'static str],
    pub authorization: bool,
    pub valid: Option<u32>,
    pub heuristic: Option<Heuristic>,
    rfc: Is,
    pub nginx: Is,
    mixed: Is,
}

const fn row(section: &'static str, fields: &'static [&'static str], rfc: Is, nginx: Is, mixed: Is) -> Row {
    Row { section, status: 200, fields, authorization: false, valid: None, heuristic: None, rfc, nginx, mixed }
}

/// A row with the same result for all three.
const fn all(section: &'static str, fields: &'static [&'static str], is: Is) -> Row {
    row(section, fields, is, is, is)
}

/// 1000 seconds before the response is received.
const UNCHANGED: &str = "Last-Modified: Sun, 06 Nov 1994 08:32:57 GMT";

const TENTH: Option<Heuristic> = Some(Heuristic { percent: 10, seconds_max: 86_400 });

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    all("9111 3: nothing says for how long", &[], Not(NoLifetime)),
    all("9111 5.4: Pragma in a response means nothing", &["Pragma: no-cache", "Cache-Control: max-age=60"], Fresh(60)),
    Row { status: 204, ..all("9111 3: no content", &["Cache-Control: max-age=60"], Fresh(60)) },
    Row { status: 299, ..all("9111 3: an unknown status", &["Cache-Control: max-age=60"], Fresh(60)) },
    Row { status: 302, ..all("9111 3: a redirection", &["Cache-Control: max-age=60"], Fresh(60)) },
    Row { status: 302, ..all("9111 3: a redirection, and nothing says for how long", &[], Not(NoLifetime)) },
    Row { status: 404, ..all("9111 3: the client's error", &["Cache-Control: max-age=60"], Fresh(60)) },
    Row { status: 404, ..all("9111 3: an error, and nothing says for how long", &[], Not(NoLifetime)) },
    Row { status: 503, ..all("9111 3: the server's error", &["Cache-Control: max-age=60"], Fresh(60)) },
    all("9111 5.2.2.1: max-age", &["Cache-Control: max-age=60"], Fresh(60)),
    all("9111 5.2.2.10: s-maxage counts before max-age", &["Cache-Control: max-age=60, s-maxage=5"], Fresh(5)),
    all("9111 4.2.1: max-age counts before Expires",
        &["Cache-Control: max-age=60", "Expires: Thu, 01 Jan 1970 00:00:00 GMT"], Fresh(60)),
    row("9111 5.2: names in any case, values quoted", &["cache-control: Max-Age=\"60\""],
        Fresh(60), Not(Invalid), Fresh(60)),
    all("9111 5.2: a semicolon in place of a comma", &["Cache-Control: max-age=60; must-revalidate"], Fresh(60)),
    all("9111 5.2: a space in place of a comma", &["Cache-Control: max-age=60 must-revalidate"], Fresh(60)),
    all("9111 5.2: private before a semicolon", &["Cache-Control: private; max-age=60"], Not(Private)),
    Row { valid: Some(30), ..all("9111 5.2: no-store before a semicolon", &["Cache-Control: no-store; x"],
        Not(NoStore)) },
    row("9111 5.2: spaces round the equals sign", &["Cache-Control: max-age = 60"],
        Fresh(60), Not(NoLifetime), Fresh(60)),
    row("9111 5.2: a word in quotes", &["Cache-Control: max-age=60, ext=\"no-store\""],
        Fresh(60), Not(NoStore), Fresh(60)),
    row("9111 5.2: a word in another one", &["Cache-Control: max-age=60, x-private"],
        Fresh(60), Not(Private), Fresh(60)),
    row("9111 5.2: max-age in another word", &["Cache-Control: my-max-age=60"],
        Not(NoLifetime), Fresh(60), Not(NoLifetime)),
    all("9111 4.2.1: max-age twice in a field, the first counts", &["Cache-Control: max-age=60, max-age=5"], Fresh(60)),
    row("9111 4.2.1: max-age in two fields, the first counts",
        &["Cache-Control: max-age=60", "Cache-Control: max-age=5"], Fresh(60), Fresh(5), Fresh(60)),
    row("9111 4.2.1: s-maxage counts from whichever field",
        &["Cache-Control: s-maxage=5", "Cache-Control: max-age=60"], Fresh(5), Fresh(60), Fresh(5)),
    all("9111 4.2.1: max-age=0 in one of two fields",
        &["Cache-Control: max-age=0", "Cache-Control: max-age=60"], Not(Expired)),
    all("9111 5.2: several fields are one list", &["Cache-Control: public", "Cache-Control: max-age=60"], Fresh(60)),
    all("9111 1.2.2: a number that is too large", &["Cache-Control: max-age=99999999999"], Fresh(i32::MAX as i64)),
    all("9111 5.2.2.1: a number that is none", &["Cache-Control: max-age=abc"], Not(Invalid)),
    row("9111 5.2.2.10: s-maxage without a number", &["Cache-Control: max-age=60, s-maxage"],
        Not(Invalid), Fresh(60), Not(Invalid)),
    all("9111 5.2.2.10: s-maxage=0", &["Cache-Control: max-age=60, s-maxage=0"], Not(Expired)),
    all("9111 5.2.2.2: must-revalidate", &["Cache-Control: max-age=60, must-revalidate"], Fresh(60)),
    all("9111 5.2.2.2: must-revalidate says nothing of how long", &["Cache-Control: must-revalidate"], Not(NoLifetime)),
    all("9111 5.2.2.6: no-transform", &["Cache-Control: max-age=60, no-transform"], Fresh(60)),
    all("9111 5.2.2.8: proxy-revalidate", &["Cache-Control: max-age=60, proxy-revalidate"], Fresh(60)),
    all("9111 5.2.2.9: public", &["Cache-Control: max-age=60, public"], Fresh(60)),
    all("9111 5.2.2.9: public says nothing of how long", &["Cache-Control: public"], Not(NoLifetime)),
    all("9111 5.2.3: an unknown directive", &["Cache-Control: max-age=60, community=\"UCI\""], Fresh(60)),
    all("9111 5.2.3: it lifts nothing", &["Cache-Control: private, max-age=60, community=\"UCI\""], Not(Private)),
    all("9111 5.2.3: it says nothing of how long", &["Cache-Control: community=\"UCI\""], Not(NoLifetime)),
    all("9111 5.2.2.5: no-store", &["Cache-Control: no-store, max-age=60"], Not(NoStore)),
    all("9111 5.2.2.7: private", &["Cache-Control: private, max-age=60"], Not(Private)),
    row("9111 5.2.2.7: private with names", &["Cache-Control: private=\"X-A\", max-age=60"],
        Fresh(60), Not(Private), Not(Private)),
    row("9111 5.2.2.4: no-cache, with a validator", &["Cache-Control: no-cache, max-age=60", "ETag: \"a\""],
        Fresh(-1), Not(NoCache), Not(NoCache)),
    all("9111 5.2.2.4: no-cache, without a validator", &["Cache-Control: no-cache, max-age=60"], Not(NoCache)),
    row("9111 5.2.2.4: no-cache with names", &["Cache-Control: no-cache=\"X-A\", max-age=60"],
        Fresh(60), Not(NoCache), Not(NoCache)),
    row("9111 5.2.2.3: must-understand lifts no-store", &["Cache-Control: must-understand, no-store, max-age=60"],
        Fresh(60), Not(NoStore), Fresh(60)),
    Row { status: 299, ..row("9111 5.2.2.3: a status that is not understood",
        &["Cache-Control: must-understand, max-age=60"], Not(NotUnderstood), Fresh(60), Not(NotUnderstood)) },
    Row { status: 599, ..row("9111 5.2.2.3: another one, of the class of errors",
        &["Cache-Control: must-understand, max-age=60"], Not(NotUnderstood), Fresh(60), Not(NotUnderstood)) },
    all("9111 5.3: Expires", &["Expires: Sun, 06 Nov 1994 08:50:37 GMT"], Fresh(60)),
    row("9111 4.2.1: Expires counts from Date",
        &["Expires: Sun, 06 Nov 1994 08:50:37 GMT", "Date: Sun, 06 Nov 1994 08:50:07 GMT"],
        Fresh(30), Fresh(60), Fresh(30)),
    all("9111 5.3: Expires in the forms of old", &["Expires: Sunday, 06-Nov-94 08:50:37 GMT"], Fresh(60)),
    all("9111 5.3: Expires in the form of asctime", &["Expires: Sun Nov  6 08:50:37 1994"], Fresh(60)),
    all("9111 5.3: Expires in another time zone", &["Expires: Sun, 06 Nov 1994 08:50:37 UTC"], Not(Expired)),
    row("9111 5.3: Expires is this second", &["Expires: Sun, 06 Nov 1994 08:49:37 GMT"],
        Not(Expired), Fresh(0), Not(Expired)),
    all("9111 4.2.1: Expires twice, the first counts",
        &["Expires: Sun, 06 Nov 1994 08:50:37 GMT", "Expires: Sun, 06 Nov 1994 09:49:37 GMT"], Fresh(60)),
    all("9111 4.2.1: Expires twice, the first is no date",
        &["Expires: 0", "Expires: Sun, 06 Nov 1994 08:50:37 GMT"], Not(Expired)),
    all("9111 4.2.1: Expires, and a Date that is none",
        &["Expires: Sun, 06 Nov 1994 08:50:37 GMT", "Date: yesterday"], Fresh(60)),
    all("9111 5.3: an Expires that is no date", &["Expires: 0"], Not(Expired)),
    all("9111 5.3: an Expires that has passed", &["Expires: Sun, 06 Nov 1994 08:49:36 GMT"], Not(Expired)),
    row("9111 5.1: Age", &["Cache-Control: max-age=60", "Age: 20"], Fresh(40), Fresh(60), Fresh(40)),
    row("9111 5.1: Age twice, the first counts", &["Cache-Control: max-age=60", "Age: 20", "Age: 50"],
        Fresh(40), Fresh(60), Fresh(40)),
    row("9111 5.1: a list of ages, the first counts", &["Cache-Control: max-age=60", "Age: 20, 50"],
        Fresh(40), Fresh(60), Fresh(40)),
    all("9111 5.1: an Age that is none", &["Cache-Control: max-age=60", "Age: old"], Fresh(60)),
    all("9111 5.1: an Age below zero", &["Cache-Control: max-age=60", "Age: -20"], Fresh(60)),
    all("9111 5.1: a part of a second", &["Cache-Control: max-age=60", "Age: 20.5"], Fresh(60)),
    row("9111 1.2.2: an Age that is too large", &["Cache-Control: max-age=60", "Age: 99999999999999999999"],
        Not(Expired), Fresh(60), Not(Expired)),
    row("9111 4.2.3: older than its lifetime", &["Cache-Control: max-age=60", "Age: 90"],
        Not(Expired), Fresh(60), Not(Expired)),
    row("9111 4.2.3: the age that Date tells",
        &["Cache-Control: max-age=60", "Date: Sun, 06 Nov 1994 08:49:17 GMT"], Fresh(40), Fresh(60), Fresh(60)),
    all("9111 4.2.3: a Date that is none", &["Cache-Control: max-age=60", "Date: 0"], Fresh(60)),
    all("9111 4.2.3: a Date that is to come",
        &["Cache-Control: max-age=60", "Date: Sun, 06 Nov 1994 08:50:37 GMT"], Fresh(60)),
    row("9111 4.2.3: max-age=0, with a validator", &["Cache-Control: max-age=0", "ETag: \"a\""],
        Fresh(-1), Not(Expired), Not(Expired)),
    all("9111 4.1: Vary *", &["Cache-Control: max-age=60", "Vary: accept, *"], Not(Vary)),
    row("9111 7.3: cookies", &["Cache-Control: max-age=60", "Set-Cookie: a=b"], Fresh(60), Not(Cookie), Not(Cookie)),
    Row { authorization: true, ..row("9111 3.5: Authorization", &["Cache-Control: max-age=60"],
        Not(Authorization), Fresh(60), Not(Authorization)) },
    Row { authorization: true, ..all("9111 3.5: public", &["Cache-Control: public, max-age=60"], Fresh(60)) },
    Row { authorization: true, ..all("9111 3.5: s-maxage", &["Cache-Control: s-maxage=60"], Fresh(60)) },
    Row { authorization: true, ..all("9111 3.5: must-revalidate", &["Cache-Control: must-revalidate, max-age=9"],
        Fresh(9)) },
    Row { authorization: true, ..row("9111 3.5: proxy-revalidate", &["Cache-Control: proxy-revalidate, max-age=60"],
        Not(Authorization), Fresh(60), Not(Authorization)) },
    row("9213 2.2: CDN-Cache-Control", &["CDN-Cache-Control: max-age=60", "Cache-Control: no-store"],
        Fresh(60), Not(NoStore), Fresh(60)),
    row("9213 2.2: it counts before Expires, too",
        &["CDN-Cache-Control: public", "Expires: Sun, 06 Nov 1994 08:50:37 GMT"],
        Not(NoLifetime), Fresh(60), Not(NoLifetime)),
    all("9213 2.1: an empty one says nothing", &["CDN-Cache-Control: ", "Cache-Control: max-age=60"], Fresh(60)),
    all("9213 2.1: an invalid one says nothing", &["CDN-Cache-Control: no-store, =", "Cache-Control: max-age=60"],
        Fresh(60)),
    all("9213 2.1: names are in lower case", &["CDN-Cache-Control: No-Store", "Cache-Control: max-age=60"], Fresh(60)),
    row("9213 2.1: a lifetime that is no number", &["CDN-Cache-Control: max-age=a", "Cache-Control: max-age=60"],
        Not(Invalid), Fresh(60), Not(Invalid)),
    row("9213 2.1: a number in quotes", &["CDN-Cache-Control: max-age=\"60\"", "Cache-Control: no-store"],
        Not(Invalid), Not(NoStore), Not(Invalid)),
    Row { valid: Some(30), ..all("nginx: cache_valid", &[], Fresh(30)) },
    Row { valid: Some(30), ..all("nginx: fields count before cache_valid", &["Cache-Control: max-age=60"], Fresh(60)) },
    all("9111 4.2.2: heuristics are off", &[UNCHANGED], Not(NoLifetime)),
    Row { heuristic: TENTH, ..all("9111 4.2.2: a part of the time that it has not changed", &[UNCHANGED], Fresh(100)) },
    Row { heuristic: Some(Heuristic { percent: 10, seconds_max: 40 }), ..all("9111 4.2.2: the part has a bound",
        &[UNCHANGED], Fresh(40)) },
    Row { heuristic: TENTH, ..row("9111 4.2.2: the time counts from Date, and the age does",
        &[UNCHANGED, "Date: Sun, 06 Nov 1994 08:49:27 GMT", "Age: 9"], Fresh(89), Fresh(90), Fresh(90)) },
    Row { heuristic: TENTH, ..all("9111 4.2.2: nothing says when it changed", &[], Not(NoLifetime)) },
    Row { heuristic: TENTH, ..all("9111 4.2.2: it changed just now",
        &["Last-Modified: Sun, 06 Nov 1994 08:49:37 GMT"], Not(NoLifetime)) },
    Row { heuristic: TENTH, ..all("9111 4.2.2: it will have changed",
        &["Last-Modified: Sun, 06 Nov 1994 08:50:37 GMT"], Not(NoLifetime)) },
    Row { heuristic: TENTH, ..all("9111 4.2.2: an explicit lifetime counts before",
        &[UNCHANGED, "Cache-Control: max-age=9"], Fresh(9)) },
    Row { heuristic: TENTH, valid: Some(30), ..all("cache_valid counts before heuristics", &[UNCHANGED], Fresh(30)) },
    Row { heuristic: TENTH, valid: Some(0), ..all("cache_valid 0 forbids them", &[UNCHANGED], Not(NoLifetime)) },
    Row { heuristic: TENTH, status: 302, ..all("9110 15.1: a status that is for no cache",
        &[UNCHANGED], Not(NoLifetime)) },
    Row { heuristic: TENTH, status: 302, ..all("9111 4.2.2: public",
        &[UNCHANGED, "Cache-Control: public"], Fresh(100)) },
    all("nginx: X-Accel-Expires counts before all", &["X-Accel-Expires: 7", "Cache-Control: no-store"], Fresh(7)),
    all("nginx: X-Accel-Expires as a moment", &["X-Accel-Expires: @784111787"], Fresh(10)),
    all("nginx: X-Accel-Expires: 0", &["X-Accel-Expires: 0", "Cache-Control: max-age=60"], Not(AccelExpires)),
    all("nginx: X-Accel-Expires that is none", &["X-Accel-Expires: x", "Cache-Control: max-age=60"], Fresh(60)),
];

fn fields(lines: &[&str]) -> FieldList {
    let mut list = FieldList::default();
    for line in lines {
        let (name, value) = line.split_once(": ").expect("a field");
        list.push(Field { name: name.as_bytes().into(), value: value.as_bytes().into() });
    }
    list
}

fn outcome(row: &Row, conformance: Conformance) -> Is {
    let storing = judge(&Judged {
        status: row.status,
        fields: &fields(row.fields),
        now: NOW,
        has_authorization: row.authorization,
        ignored: IgnoredFields::default(),
        valid: row.valid,
        heuristic: row.heuristic,
        rules: conformance.rules(),
    });
    match storing {
        Storing::Store { lifetime, .. } => Fresh(lifetime.fresh_until as i64 - NOW as i64),
        Storing::Not(why) => Not(why),
    }
}

#[test]
fn every_rule_is_followed_as_the_conformance_says() {
    let mut wrong = Vec::new();
    for row in ROWS {
        let all = [(Conformance::Rfc9111, row.rfc), (Conformance::Nginx, row.nginx), (Conformance::Mixed, row.mixed)];
        for (conformance, expected) in all {
            let found = outcome(row, conformance);
            if found != expected {
                wrong.push(format!("{}, {conformance:?}: {found:?}, not {expected:?}", row.section));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn fields_that_are_ignored_say_nothing() {
    let lines = ["X-Accel-Expires: 7", "Cache-Control: no-store", "Expires: 0", "Set-Cookie: a=b", "Vary: *"];
    let ignored =
        IgnoredFields { x_accel_expires: true, expires: true, cache_control: true, set_cookie: true, vary: true };
    let judged = Judged {
        status: 200,
        fields: &fields(&lines),
        now: NOW,
        has_authorization: false,
        ignored,
        valid: Some(9),
        heuristic: None,
        rules: Conformance::Nginx.rules(),
    };
    assert!(matches!(judge(&judged), Storing::Store { lifetime, .. } if lifetime.fresh_until == NOW + 9));
}

#[test]
fn stale_response_may_be_used_as_long_as_its_fields_allow() {
    let lifetime = |text: &'static str, conformance: Conformance| {
        let lines: &'static [&'static str] = Box::leak(Box::new([text]));
        let judged = Judged {
            status: 200,
            fields: &fields(lines),
            now: NOW,
            has_authorization: false,
            ignored: IgnoredFields::default(),
            valid: None,
            heuristic: None,
            rules: conformance.rules(),
        };
        match judge(&judged) {
            Storing::Store { lifetime, .. } => lifetime,
            Storing::Not(why) => panic!("{why:?}"),
        }
    };
    let stale = lifetime("Cache-Control: max-age=10, stale-while-revalidate=5", Conformance::Mixed);
    assert!(stale.is_fresh(NOW + 10) && !stale.is_fresh(NOW + 11));
    assert!(stale.may_be_stale_while_revalidating(NOW + 15) && !stale.may_be_stale_while_revalidating(NOW + 16));
    // As in nginx, that also allows use after an error.
    assert!(stale.may_be_stale_if_error(NOW + 15));
    let error = lifetime("Cache-Control: max-age=10, stale-if-error=50", Conformance::Mixed);
    assert!(error.may_be_stale_if_error(NOW + 60) && !error.may_be_stale_while_revalidating(NOW + 11));
    let strict = "Cache-Control: max-age=10, must-revalidate, stale-if-error=50";
    assert!(!lifetime(strict, Conformance::Rfc9111).may_be_stale_if_error(NOW + 11));
    assert!(lifetime(strict, Conformance::Mixed).may_be_stale_if_error(NOW + 11));
}

#[test]
fn a_clock_that_is_set_back_makes_nothing_younger() {
    let row = all("", &["Cache-Control: max-age=60", "Age: 20"], Fresh(40));
    assert_eq!(outcome(&row, Conformance::Mixed), Fresh(40));
    let lifetime = super::Lifetime { received: NOW, initial_age: 20, ..super::Lifetime::default() };
    assert_eq!((current_age(&lifetime, NOW + 5), current_age(&lifetime, NOW - 500)), (25, 20));
    // It is not fresh for longer either, except by the tolerance for corrections of the clock.
    let lifetime = super::Lifetime { fresh_until: NOW + 60, received: NOW, ..super::Lifetime::default() };
    assert_eq!([NOW + 61, NOW, NOW - 5, NOW - 6].map(|now| lifetime.is_fresh(now)), [false, true, true, false]);
    let mut entry = Entry::new([0; 16], Kind::Stored, NOW);
    entry.set_lifetime(&lifetime);
    assert_eq!([NOW + 61, NOW, NOW - 5, NOW - 6].map(|now| entry.is_fresh(now)), [false, true, true, false]);
}
