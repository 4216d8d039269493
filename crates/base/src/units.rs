//! Numbers, sizes and times in nginx's configuration syntax.
//!
//! Each function refuses what nginx's own parser of such a value refuses, overflow included. A sign and a fraction are
//! accepted only by the function whose name says so ([`parse_signed_number`], [`parse_fixed_point`]).
//! Invariant: every accepted value fits nginx's signed 64-bit integer, so no sum or product here can wrap.
//! Source: <https://nginx.org/en/docs/syntax.html>

use std::time::Duration;

/// The largest number that nginx accepts on a 64-bit system.
pub const NUMBER_MAX: u64 = i64::MAX as u64;

/// Parses decimal digits without sign or blanks. Returns `None` for anything else and for values above [`NUMBER_MAX`].
pub fn parse_number(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0, |value, &byte| push_digit(value, byte))
}

/// Parses a decimal number with at most `places` digits after the dot; the digits on one side of it may be missing. The
/// result is in units of the last place: `33.3` with two places is 3330.
pub fn parse_fixed_point(text: &[u8], places: usize) -> Option<u64> {
    let dot = text.iter().position(|&byte| byte == b'.').unwrap_or(text.len());
    let (whole, behind) = (&text[..dot], text.get(dot + 1..).unwrap_or_default());
    if text.is_empty() || behind.len() > places {
        return None;
    }
    let zeros = std::iter::repeat_n(&b'0', places - behind.len());
    whole.iter().chain(behind).chain(zeros).try_fold(0, |value, &byte| push_digit(value, byte))
}

/// Parses decimal digits with an optional leading `-`.
pub fn parse_signed_number(text: &[u8]) -> Option<i64> {
    let (digits, sign) = match text.strip_prefix(b"-") {
        Some(digits) => (digits, -1),
        None => (text, 1),
    };
    let magnitude = i64::try_from(parse_number(digits)?).ok()?;
    Some(sign * magnitude)
}

/// Parses a size in bytes: digits with an optional `k`/`K` or `m`/`M` (1024-based).
///
/// As in nginx, `g` is not accepted: it is only for [offsets](parse_offset), such as file sizes.
pub fn parse_size(text: &[u8]) -> Option<u64> {
    match scale_of_suffix(text) {
        Some((_, GIBI)) => None,
        other => scaled(text, other),
    }
}

/// Parses an offset or a file size in bytes: as [`parse_size`], and `g`/`G` is accepted.
pub fn parse_offset(text: &[u8]) -> Option<u64> {
    scaled(text, scale_of_suffix(text))
}

/// Parses a time with millisecond resolution: `ms s m h d w`, combined from the largest unit to the smallest
/// (`1h 30m`).
///
/// A number without a unit is in seconds. As in nginx, months and years are accepted only for times
/// [in seconds](parse_time_seconds).
pub fn parse_time(text: &[u8]) -> Option<Duration> {
    parse_time_in(text, Resolution::Milliseconds).map(Duration::from_millis)
}

/// Parses a time with second resolution: `s m h d w M y` (a month is 30 days, a year 365), combined from the largest
/// unit to the smallest. `ms` is refused. A number without a unit is in seconds.
pub fn parse_time_seconds(text: &[u8]) -> Option<Duration> {
    parse_time_in(text, Resolution::Seconds).map(Duration::from_secs)
}

const KIBI: u64 = 1 << 10;
const MEBI: u64 = 1 << 20;
const GIBI: u64 = 1 << 30;

/// Splits off a size suffix: returns the digits before it and its factor.
fn scale_of_suffix(text: &[u8]) -> Option<(&[u8], u64)> {
    let (&unit, digits) = text.split_last()?;
    match unit {
        b'k' | b'K' => Some((digits, KIBI)),
        b'm' | b'M' => Some((digits, MEBI)),
        b'g' | b'G' => Some((digits, GIBI)),
        _ => None,
    }
}

fn scaled(text: &[u8], suffix: Option<(&[u8], u64)>) -> Option<u64> {
    let (digits, scale) = suffix.unwrap_or((text, 1));
    within_bounds(parse_number(digits)?.checked_mul(scale)?)
}

fn push_digit(value: u64, byte: u8) -> Option<u64> {
    let digit = byte.checked_sub(b'0').filter(|&digit| digit <= 9)?;
    within_bounds(value.checked_mul(10)?.checked_add(u64::from(digit))?)
}

fn within_bounds(value: u64) -> Option<u64> {
    (value <= NUMBER_MAX).then_some(value)
}

#[derive(Clone, Copy, PartialEq)]
enum Resolution {
    Milliseconds,
    Seconds,
}

/// Units from the largest to the smallest. A unit may follow only a larger one.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
enum Step {
    Start,
    Year,
    Month,
    Week,
    Day,
    Hour,
    Minute,
    Second,
    Millisecond,
    /// Seconds without a unit, followed by a blank.
    Unitless,
}

/// Parses a time and returns it in units of the resolution.
fn parse_time_in(text: &[u8], resolution: Resolution) -> Option<u64> {
    // Months and years would suggest a precision that milliseconds do not have; nginx refuses them there.
    let mut step = if resolution == Resolution::Seconds { Step::Start } else { Step::Month };
    let per_second = if resolution == Resolution::Seconds { 1 } else { 1000 };
    let (mut total, mut value, mut any_digit) = (0u64, 0u64, false);
    let mut rest = text;

    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        if byte.is_ascii_digit() {
            value = push_digit(value, byte)?;
            any_digit = true;
            continue;
        }
        let is_millisecond = byte == b'm' && rest.first() == Some(&b's');
        let (next, seconds) = match byte {
            b'y' => (Step::Year, 365 * 86_400),
            b'M' => (Step::Month, 30 * 86_400),
            b'w' => (Step::Week, 7 * 86_400),
            b'd' => (Step::Day, 86_400),
            b'h' => (Step::Hour, 3_600),
            b'm' if is_millisecond => (Step::Millisecond, 0),
            b'm' => (Step::Minute, 60),
            b's' => (Step::Second, 1),
            b' ' if step < Step::Second => (Step::Unitless, 1),
            _ => return None,
        };
        if step >= next || (is_millisecond && resolution == Resolution::Seconds) {
            return None;
        }
        step = next;
        let scale = if is_millisecond { 1 } else { seconds * per_second };
        total = within_bounds(total.checked_add(value.checked_mul(scale)?)?)?;
        value = 0;
        if is_millisecond {
            rest = &rest[1..];
        }
        rest = skip_blanks(rest);
    }

    if !any_digit {
        return None;
    }
    within_bounds(total.checked_add(value.checked_mul(per_second)?)?)
}

/// Skips spaces only: tabs and newlines are not part of a time.
fn skip_blanks(text: &[u8]) -> &[u8] {
    let blanks = text.iter().take_while(|&&byte| byte == b' ').count();
    &text[blanks..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ms(text: &str) -> Option<u64> {
        parse_time(text.as_bytes()).map(|time| time.as_millis() as u64)
    }

    fn seconds(text: &str) -> Option<u64> {
        parse_time_seconds(text.as_bytes()).map(|time| time.as_secs())
    }

    #[test]
    fn fixed_points_have_places() {
        let parse = |text: &str| parse_fixed_point(text.as_bytes(), 2);
        assert_eq!(
            (parse("33.3"), parse("0.01"), parse("100"), parse(".5")),
            (Some(3330), Some(1), Some(10000), Some(50))
        );
        for wrong in ["", "0.001", "1.2.3", "-1", "a", "1 ", "92233720368547758.08"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
        assert_eq!(parse("1."), Some(100));
    }

    #[test]
    fn numbers_are_digits_only() {
        assert_eq!(parse_number(b"0"), Some(0));
        assert_eq!(parse_number(b"0042"), Some(42));
        assert_eq!(parse_number(b"9223372036854775807"), Some(NUMBER_MAX));
        for wrong in ["", "-1", "+1", " 1", "1 ", "1.5", "0x10", "9223372036854775808", "99999999999999999999999"] {
            assert_eq!(parse_number(wrong.as_bytes()), None, "{wrong:?}");
        }
    }

    #[test]
    fn signed_numbers_may_begin_with_a_minus() {
        assert_eq!(parse_signed_number(b"-10"), Some(-10));
        assert_eq!(parse_signed_number(b"19"), Some(19));
        for wrong in ["", "-", "--1", "+1", "-9223372036854775808"] {
            assert_eq!(parse_signed_number(wrong.as_bytes()), None, "{wrong:?}");
        }
    }

    #[test]
    fn sizes_know_kilobytes_and_megabytes() {
        assert_eq!(parse_size(b"512"), Some(512));
        assert_eq!(parse_size(b"4k"), Some(4096));
        assert_eq!(parse_size(b"4K"), Some(4096));
        assert_eq!(parse_size(b"1m"), Some(1 << 20));
        assert_eq!(parse_size(b"8M"), Some(8 << 20));
        for wrong in ["", "k", "1g", "1G", "1kk", "1 k", "-1k", "9007199254740992k", "1b"] {
            assert_eq!(parse_size(wrong.as_bytes()), None, "{wrong:?}");
        }
    }

    #[test]
    fn offsets_know_gigabytes_too() {
        assert_eq!(parse_offset(b"1g"), Some(1 << 30));
        assert_eq!(parse_offset(b"1024G"), Some(1 << 40));
        assert_eq!(parse_offset(b"10m"), Some(10 << 20));
        assert_eq!(parse_offset(b"0"), Some(0));
        assert_eq!(parse_offset(b"8589934592g"), None);
    }

    #[test]
    fn a_time_without_a_unit_counts_seconds() {
        assert_eq!(ms("60"), Some(60_000));
        assert_eq!(seconds("60"), Some(60));
        assert_eq!(ms("0"), Some(0));
    }

    #[test]
    fn times_combine_units_from_large_to_small() {
        assert_eq!(ms("1h 30m"), Some(5_400_000));
        assert_eq!(ms("1h30m"), Some(5_400_000));
        assert_eq!(ms("1d2h3m4s5ms"), Some(93_784_005));
        assert_eq!(ms("1m 30"), Some(90_000));
        assert_eq!(seconds("1y 1M 1w"), Some((365 + 30 + 7) * 86_400));
        assert_eq!(ms("500ms"), Some(500));
        assert_eq!(ms("1s500ms"), Some(1_500));
    }

    #[test]
    fn times_out_of_order_or_repeated_are_refused() {
        for wrong in ["30m 1h", "1s1s", "1ms1s", "1ms 1ms", "1d 1w"] {
            assert_eq!(ms(wrong), None, "{wrong:?}");
        }
        assert_eq!(seconds("1M1y"), None);
        assert_eq!(seconds("1y1y"), None);
    }

    #[test]
    fn months_and_years_belong_to_seconds_and_ms_to_milliseconds() {
        assert_eq!(ms("1y"), None);
        assert_eq!(ms("1M"), None);
        assert_eq!(ms("1w"), Some(604_800_000));
        assert_eq!(seconds("5ms"), None);
        assert_eq!(seconds("1M"), Some(2_592_000));
    }

    #[test]
    fn blanks_follow_nginx() {
        assert_eq!(ms("30 "), Some(30_000));
        assert_eq!(ms("1 30"), Some(31_000));
        assert_eq!(ms("1s  "), Some(1_000));
        assert_eq!(ms("1h  30m"), Some(5_400_000));
        for wrong in ["", " ", "s", "1\t", "1x", "1.5s", "-1"] {
            assert_eq!(ms(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn times_that_overflow_are_refused() {
        assert_eq!(ms("9223372036854775807"), None);
        assert_eq!(ms("9223372036854775807ms"), Some(NUMBER_MAX));
        assert_eq!(ms("9223372036854775s 808ms"), None);
        assert_eq!(seconds("9223372036854775807"), Some(NUMBER_MAX));
        assert_eq!(seconds("9223372036854775807y"), None);
    }

    proptest! {
        #[test]
        fn hostile_text_never_panics(text in proptest::collection::vec(any::<u8>(), 0..40)) {
            let _ = (parse_number(&text), parse_signed_number(&text), parse_size(&text), parse_offset(&text));
            let _ = (parse_time(&text), parse_time_seconds(&text));
        }

        #[test]
        fn texts_made_of_units_never_panic(text in "[0-9smhdwMy ]{0,30}") {
            let _ = (parse_time(text.as_bytes()), parse_time_seconds(text.as_bytes()));
        }
    }
}
