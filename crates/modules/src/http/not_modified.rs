//! not_modified: responses to conditional requests.
//!   If-Unmodified-Since, If-Match           412 if the condition fails
//!   If-Modified-Since, If-None-Match        304 if the response is unmodified
//! (RFC 9110 §13; <https://nginx.org/en/docs/http/ngx_http_core_module.html#if_modified_since>)
//!
//! A response from a cache that follows RFC 9111 is judged by the RFC: an entity tag takes precedence over a date, a
//! date later than the response's spares the body, too, and without `Last-Modified` the response's own `Date` counts.
//!
//! There are no directives: `if_modified_since` belongs to the core module. Only a response of status 200 is judged;
//! for other statuses the conditions do not apply. The body is neither read nor compared.
//!
//! The head of a 304 keeps its fields, so that later filters change `ETag`, `Last-Modified` and `Vary` as they would
//! for the whole response: caches find their entry by these. Fields that describe the body are removed when the head is
//! sent.

use gale_base::http_date;
use gale_engine::module::Module;
use gale_http::configuration::settings::IfModifiedSince;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::Body;
use gale_http::request::filters::{Filtered, Judge};
use gale_http::request::response::ResponseHead;
use gale_protocol::request::{KnownHeader, KnownHeaders};
use gale_protocol::response::ResponseField;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_not_modified_filter",
    parts: &[&HttpPart { filters: &[&Judge { applies: |_: &()| true, run: check }], ..HttpPart::EMPTY }],
    ..Module::EMPTY
};

/// Header fields that make a request conditional, except `If-Range`.
const CONDITIONS: KnownHeaders = KnownHeaders::of(&[
    KnownHeader::IfUnmodifiedSince,
    KnownHeader::IfMatch,
    KnownHeader::IfModifiedSince,
    KnownHeader::IfNoneMatch,
]);

fn check(request: &mut Request, _conf: &(), body: &mut Body) -> Filtered {
    if request.response.status != 200
        || request.response.is_from_upstream
        || !request.is_main()
        || !request.parsed.has_any(CONDITIONS)
    {
        return Filtered::Goes;
    }
    let conditions = Conditions {
        unmodified_since: request.header(KnownHeader::IfUnmodifiedSince),
        matches: request.header(KnownHeader::IfMatch),
        modified_since: request.header(KnownHeader::IfModifiedSince),
        none_match: request.header(KnownHeader::IfNoneMatch),
        how: *request.scope().core.if_modified_since.get(),
    };
    match conditions.judge(&request.response) {
        Verdict::Send => Filtered::Goes,
        Verdict::NotModified => {
            request.response.status = 304;
            *body = Body::Empty;
            Filtered::Goes
        }
        Verdict::Failed => {
            request.response.clear();
            Filtered::Respond(412)
        }
    }
}

/// Conditions of a request.
struct Conditions<'r> {
    unmodified_since: Option<&'r [u8]>,
    matches: Option<&'r [u8]>,
    modified_since: Option<&'r [u8]>,
    none_match: Option<&'r [u8]>,
    how: IfModifiedSince,
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Send,
    NotModified,
    Failed,
}

impl Conditions<'_> {
    /// Judges in nginx's order: first the two conditions that may fail, then the two that may spare the body, all of
    /// which must agree.
    fn judge(&self, head: &ResponseHead) -> Verdict {
        let modified = head.last_modified;
        if head.follows_rfc_conditions {
            return self.judge_by_rfc(head);
        }
        if self.unmodified_since.is_some_and(|date| !is_unmodified(date, modified)) {
            return Verdict::Failed;
        }
        if self.matches.is_some_and(|list| !lists(list, &head.etag, Comparison::Strong)) {
            return Verdict::Failed;
        }
        if self.modified_since.is_none() && self.none_match.is_none() {
            return Verdict::Send;
        }
        if self.modified_since.is_some_and(|date| is_modified(date, modified, self.how)) {
            return Verdict::Send;
        }
        if self.none_match.is_some_and(|list| !lists(list, &head.etag, Comparison::Weak)) {
            return Verdict::Send;
        }
        Verdict::NotModified
    }

    /// Judges in the RFC's order: of two conditions of a kind, only the one with an entity tag counts.
    fn judge_by_rfc(&self, head: &ResponseHead) -> Verdict {
        let field = |known| head.field(known).and_then(http_date::parse);
        let modified = head.last_modified.or_else(|| field(ResponseField::LastModified));
        let may_go_on = match (self.matches, self.unmodified_since) {
            (Some(list), _) => lists(list, &head.etag, Comparison::Strong),
            (None, Some(date)) => is_unmodified(date, modified),
            (None, None) => true,
        };
        if !may_go_on {
            return Verdict::Failed;
        }
        let is_same = match (self.none_match, self.modified_since) {
            (Some(list), _) => lists(list, &head.etag, Comparison::Weak),
            (None, Some(date)) if self.how != IfModifiedSince::Off => {
                !is_modified(date, modified.or_else(|| field(ResponseField::Date)), IfModifiedSince::Before)
            }
            (None, _) => false,
        };
        if is_same { Verdict::NotModified } else { Verdict::Send }
    }
}

/// Returns `true` if the response is unmodified. As in nginx, an invalid date is before all others, and a response
/// without a date may have changed at any time.
fn is_unmodified(since: &[u8], modified: Option<u64>) -> bool {
    match (http_date::parse(since), modified) {
        (Some(since), Some(modified)) => since >= modified,
        _ => false,
    }
}

fn is_modified(since: &[u8], modified: Option<u64>, how: IfModifiedSince) -> bool {
    let (Some(since), Some(modified)) = (http_date::parse(since), modified) else { return true };
    match how {
        IfModifiedSince::Off => true,
        IfModifiedSince::Exact => since != modified,
        IfModifiedSince::Before => since < modified,
    }
}

/// Comparison of two entity tags. (RFC 9110 §8.8.3.2)
#[derive(Clone, Copy, PartialEq, Eq)]
enum Comparison {
    Strong,
    /// `W/` is ignored.
    Weak,
}

/// Returns `true` if a list of entity tags contains this one; `*` matches every tag, and an empty tag none.
fn lists(list: &[u8], etag: &[u8], comparison: Comparison) -> bool {
    if list == b"*" {
        return true;
    }
    let opaque = |tag| if comparison == Comparison::Weak { without_weakness(tag) } else { tag };
    let etag = opaque(etag);
    let mut rest = list;
    while !etag.is_empty() && !rest.is_empty() {
        if let Some(after) = opaque(rest).strip_prefix(etag)
            && matches!(after.trim_ascii_start().first(), None | Some(b','))
        {
            return true;
        }
        let next = rest.iter().position(|&byte| byte == b',').map_or(rest.len(), |comma| comma + 1);
        rest = rest[next..].trim_ascii_start();
    }
    false
}

fn without_weakness(tag: &[u8]) -> &[u8] {
    tag.strip_prefix(b"W/").unwrap_or(tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODIFIED: u64 = 784_111_777;
    const AT: &[u8] = b"Sun, 06 Nov 1994 08:49:37 GMT";
    const BEFORE: &[u8] = b"Sun, 06 Nov 1994 08:49:36 GMT";
    const AFTER: &[u8] = b"Sun, 06 Nov 1994 08:49:38 GMT";

    const NONE: Conditions<'static> = Conditions {
        unmodified_since: None,
        matches: None,
        modified_since: None,
        none_match: None,
        how: IfModifiedSince::Exact,
    };

    fn head() -> ResponseHead {
        let etag = b"\"tag\"".as_slice().into();
        ResponseHead { status: 200, last_modified: Some(MODIFIED), etag, ..ResponseHead::default() }
    }

    #[test]
    fn a_request_without_conditions_gets_everything() {
        assert_eq!(NONE.judge(&head()), Verdict::Send);
    }

    #[test]
    fn if_modified_since_is_compared_as_the_setting_says() {
        let judge = |date, how| Conditions { modified_since: Some(date), how, ..NONE }.judge(&head());
        for how in [IfModifiedSince::Exact, IfModifiedSince::Before] {
            assert_eq!(judge(AT, how), Verdict::NotModified);
            assert_eq!(judge(BEFORE, how), Verdict::Send);
            assert_eq!(judge(b"yesterday", how), Verdict::Send);
        }
        assert_eq!(judge(AFTER, IfModifiedSince::Exact), Verdict::Send);
        assert_eq!(judge(AFTER, IfModifiedSince::Before), Verdict::NotModified);
        assert_eq!(judge(AT, IfModifiedSince::Off), Verdict::Send);
    }

    #[test]
    fn if_unmodified_since_fails_on_anything_later_and_on_anything_unknown() {
        let judge = |date| Conditions { unmodified_since: Some(date), ..NONE }.judge(&head());
        assert_eq!(judge(AT), Verdict::Send);
        assert_eq!(judge(AFTER), Verdict::Send);
        assert_eq!(judge(BEFORE), Verdict::Failed);
        assert_eq!(judge(b"tomorrow"), Verdict::Failed);
        let undated = ResponseHead { last_modified: None, ..head() };
        assert_eq!(Conditions { unmodified_since: Some(AFTER), ..NONE }.judge(&undated), Verdict::Failed);
    }

    #[test]
    fn a_response_without_date_is_always_modified() {
        let undated = ResponseHead { last_modified: None, ..head() };
        let conditions = Conditions { modified_since: Some(AT), how: IfModifiedSince::Before, ..NONE };
        assert_eq!(conditions.judge(&undated), Verdict::Send);
    }

    #[test]
    fn a_tag_is_found_in_a_list() {
        let judge = |list| Conditions { none_match: Some(list), ..NONE }.judge(&head());
        for list in [&b"\"tag\""[..], b"*", b"W/\"tag\"", b"\"a\", \"tag\" ,\"b\"", b"\"a\",\t\"tag\"", b",, \"tag\""] {
            assert_eq!(judge(list), Verdict::NotModified, "{}", bstr::BStr::new(list));
        }
        for list in [&b""[..], b"\"tag", b"\"tag\"x", b"tag", b"\"a\"", b"**", b",", b"\"tags\""] {
            assert_eq!(judge(list), Verdict::Send, "{}", bstr::BStr::new(list));
        }
    }

    #[test]
    fn if_match_does_not_accept_weak_tags() {
        let judge = |list| Conditions { matches: Some(list), ..NONE }.judge(&head());
        assert_eq!(judge(b"\"a\", \"tag\""), Verdict::Send);
        assert_eq!(judge(b"*"), Verdict::Send);
        assert_eq!(judge(b"W/\"tag\""), Verdict::Failed);
        assert_eq!(judge(b"\"other\""), Verdict::Failed);
    }

    #[test]
    fn a_weak_tag_of_ours_matches_weakly_only() {
        let weak = ResponseHead { etag: b"W/\"tag\"".as_slice().into(), ..head() };
        let none_match = |list| Conditions { none_match: Some(list), ..NONE }.judge(&weak);
        assert_eq!(none_match(b"\"tag\""), Verdict::NotModified);
        assert_eq!(none_match(b"W/\"tag\""), Verdict::NotModified);
        assert_eq!(Conditions { matches: Some(b"\"tag\""), ..NONE }.judge(&weak), Verdict::Failed);
    }

    #[test]
    fn without_a_tag_only_the_asterisk_matches() {
        let untagged = ResponseHead { etag: Default::default(), ..head() };
        let judge = |list| Conditions { matches: Some(list), ..NONE }.judge(&untagged);
        assert_eq!(judge(b"*"), Verdict::Send);
        assert_eq!(judge(b"\"\""), Verdict::Failed);
        assert_eq!(judge(b""), Verdict::Failed);
    }

    #[test]
    fn date_and_tag_must_both_agree_that_nothing_changed() {
        let judge =
            |date, list| Conditions { modified_since: Some(date), none_match: Some(list), ..NONE }.judge(&head());
        assert_eq!(judge(AT, b"\"tag\""), Verdict::NotModified);
        assert_eq!(judge(BEFORE, b"\"tag\""), Verdict::Send);
        assert_eq!(judge(AT, b"\"other\""), Verdict::Send);
    }

    #[test]
    fn tag_decides_before_date_by_the_rfc() {
        let head = ResponseHead { follows_rfc_conditions: true, ..head() };
        let both = |date, list| Conditions { modified_since: Some(date), none_match: Some(list), ..NONE }.judge(&head);
        assert_eq!(both(BEFORE, b"\"tag\""), Verdict::NotModified);
        assert_eq!(both(AT, b"\"other\""), Verdict::Send);
        let date = |date| Conditions { modified_since: Some(date), ..NONE }.judge(&head);
        assert_eq!((date(AT), date(AFTER), date(BEFORE)), (Verdict::NotModified, Verdict::NotModified, Verdict::Send));
        let fails = |date, list| Conditions { unmodified_since: Some(date), matches: Some(list), ..NONE }.judge(&head);
        assert_eq!((fails(BEFORE, b"\"tag\""), fails(AFTER, b"\"other\"")), (Verdict::Send, Verdict::Failed));
    }

    #[test]
    fn date_of_response_stands_in_for_last_modified_by_the_rfc() {
        let mut head = ResponseHead { follows_rfc_conditions: true, last_modified: None, ..head() };
        let judge = |head: &ResponseHead, date| Conditions { modified_since: Some(date), ..NONE }.judge(head);
        assert_eq!(judge(&head, AFTER), Verdict::Send);
        head.set(ResponseField::Date, std::str::from_utf8(AT).unwrap().to_owned());
        assert_eq!((judge(&head, AT), judge(&head, BEFORE)), (Verdict::NotModified, Verdict::Send));
    }

    #[test]
    fn a_failed_precondition_comes_before_an_unchanged_file() {
        let conditions = Conditions { matches: Some(b"\"other\""), none_match: Some(b"\"tag\""), ..NONE };
        assert_eq!(conditions.judge(&head()), Verdict::Failed);
    }
}
