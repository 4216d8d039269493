//! Messages from issuers, in JSON (RFC 8555, section 7.1). They are untrusted input: missing fields are empty, and
//! texts are cleaned before they are logged.

use std::collections::HashMap;
use std::time::Duration;

use gale_base::{http_date, units};
use serde::Deserialize;

/// Maximum length of an issuer's text in the log, in characters.
const LOGGED_MAX: usize = 300;

/// The issuer's URLs (section 7.1.1).
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Directory {
    pub new_nonce: String,
    pub new_account: String,
    pub new_order: String,
    /// See RFC 9773.
    pub renewal_info: Option<String>,
    pub meta: Meta,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Meta {
    pub terms_of_service: Option<String>,
    pub external_account_required: bool,
    pub profiles: HashMap<String, serde_json::Value>,
}

/// States of section 7.1.6; any other counts as unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    Pending,
    Ready,
    Processing,
    Valid,
    Invalid,
    Deactivated,
    Expired,
    Revoked,
    #[default]
    #[serde(other)]
    Unknown,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Account {
    pub status: State,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Order {
    pub status: State,
    pub authorizations: Vec<String>,
    pub finalize: String,
    pub certificate: Option<String>,
    pub error: Option<Problem>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Authorization {
    pub status: State,
    pub identifier: Identifier,
    pub challenges: Vec<OfferedChallenge>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Identifier {
    pub value: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct OfferedChallenge {
    #[serde(rename = "type")]
    pub kind: String,
    pub url: String,
    pub token: String,
    pub status: State,
    pub error: Option<Problem>,
}

/// Reason of a refusal (RFC 7807).
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Problem {
    #[serde(rename = "type")]
    pub kind: String,
    pub detail: String,
}

/// Suggested time of renewal (RFC 9773, section 4.2).
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct RenewalInfo {
    pub suggested_window: Window,
    #[serde(rename = "explanationURL")]
    pub explanation_url: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Window {
    pub start: String,
    pub end: String,
}

impl Problem {
    /// Returns the kind without the common prefix: `rateLimited`.
    pub fn short_kind(&self) -> &str {
        self.kind.strip_prefix("urn:ietf:params:acme:error:").unwrap_or(&self.kind)
    }

    /// Returns a text for messages: `rateLimited: too many certificates`.
    pub fn describe(&self) -> String {
        let kind = if self.kind.is_empty() { "unknown error" } else { self.short_kind() };
        clean(&if self.detail.is_empty() { kind.to_owned() } else { format!("{kind}: {}", self.detail) })
    }
}

/// Returns an issuer's text for the log: one line of bounded length.
pub(super) fn clean(text: &str) -> String {
    let printable = |character: char| if character.is_control() { ' ' } else { character };
    text.chars().take(LOGGED_MAX).map(printable).collect()
}

/// Parses a `Retry-After` field: seconds, or a date.
pub(super) fn retry_after(text: &[u8], now: u64) -> Option<Duration> {
    let seconds = units::parse_number(text).or_else(|| http_date::parse(text).map(|date| date.saturating_sub(now)));
    seconds.map(Duration::from_secs)
}

/// Parses a time (RFC 3339) into seconds since 1970, without fractions: `2026-01-02T03:04:05.6Z`, `…+01:00`.
pub(super) fn time(text: &str) -> Option<u64> {
    let number = |range: std::ops::Range<usize>| {
        let digits = text.get(range)?;
        digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse::<i64>().ok())?
    };
    let mark = |place: usize, marks: &[u8]| text.as_bytes().get(place).is_some_and(|byte| marks.contains(byte));
    let (year, month, day) = (number(0..4)?, number(5..7)?, number(8..10)?);
    let (hour, minute, second) = (number(11..13)?, number(14..16)?, number(17..19)?);
    let is_shaped = mark(4, b"-") && mark(7, b"-") && mark(10, b"Tt ") && mark(13, b":") && mark(16, b":");
    let is_time = (1..=12).contains(&month) && (1..=31).contains(&day) && hour < 24 && minute < 60 && second <= 60;
    if !is_shaped || !is_time {
        return None;
    }
    let rest =
        text[19..].strip_prefix('.').map_or(&text[19..], |rest| rest.trim_start_matches(|c: char| c.is_ascii_digit()));
    let offset = match rest.as_bytes() {
        b"Z" | b"z" => 0,
        [sign @ (b'+' | b'-'), a, b, b':', c, d] if [a, b, c, d].iter().all(|byte| byte.is_ascii_digit()) => {
            let digit = |byte: &u8| i64::from(byte - b'0');
            let minutes = (digit(a) * 10 + digit(b)) * 60 + digit(c) * 10 + digit(d);
            if *sign == b'+' { minutes * 60 } else { -minutes * 60 }
        }
        _ => return None,
    };
    let seconds = days_until(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second - offset;
    u64::try_from(seconds).ok()
}

/// Returns the number of days from 1970 to a date of the Gregorian calendar.
fn days_until(year: i64, month: i64, day: i64) -> i64 {
    // Years begin in March here, so that the leap day is the last one.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let of_year = (153 * month + 2) / 5 + day - 1;
    365 * year + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        for (text, seconds) in [
            ("1970-01-01T00:00:00Z", Some(0)),
            ("2000-02-29T12:00:00Z", Some(951_825_600)),
            ("2026-11-23T01:02:03.456789Z", Some(1_795_395_723)),
            ("2026-11-23T02:02:03+01:00", Some(1_795_395_723)),
            ("2026-11-22T20:32:03-04:30", Some(1_795_395_723)),
            ("2026-11-23", None),
            ("2026-13-01T00:00:00Z", None),
            ("2026-11-23T01:02:03", None),
            ("1969-12-31T23:59:59Z", None),
            ("\u{e4}026-11-23T01:02:03Z", None),
            ("", None),
        ] {
            assert_eq!(time(text), seconds, "{text}");
        }
    }

    #[test]
    fn pauses_are_read() {
        assert_eq!(retry_after(b"7", 0), Some(Duration::from_secs(7)));
        assert_eq!(retry_after(b"Thu, 01 Jan 1970 00:01:40 GMT", 40), Some(Duration::from_secs(60)));
        assert_eq!(retry_after(b"Thu, 01 Jan 1970 00:01:40 GMT", 200), Some(Duration::ZERO));
        assert_eq!(retry_after(b"soon", 0), None);
    }

    #[test]
    fn messages_may_say_less_and_more_than_is_known() {
        let order: Order = serde_json::from_str(r#"{"status": "strange", "x": [1]}"#).unwrap();
        assert_eq!((order.status, order.finalize.as_str()), (State::Unknown, ""));
        let problem: Problem =
            serde_json::from_str(r#"{"type": "urn:ietf:params:acme:error:rateLimited", "detail": "a\nb"}"#).unwrap();
        assert_eq!(problem.describe(), "rateLimited: a b");
        assert_eq!(clean(&"x".repeat(1000)).len(), LOGGED_MAX);
    }
}
