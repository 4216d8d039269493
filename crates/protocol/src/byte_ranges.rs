//! The `Range` field: the requested parts of a response.
//! (RFC 9110 §14; <https://nginx.org/en/docs/http/ngx_http_core_module.html#max_ranges>)
//!
//! Ranges keep the order of the request and may overlap. If they are longer in total than the response, the whole
//! response is sent: a request cannot make the server send more than that.

use std::ops::Range;

/// Maximum position: as in nginx, which uses signed numbers.
const POSITION_MAX: u64 = i64::MAX as u64;

/// Default of `max_ranges`. With it, the heads of the parts are added to the size of the ranges.
const MAX_RANGES_DEFAULT: u64 = i32::MAX as u64;

/// Bytes counted for the head of each part.
const PART_HEAD_COST: u64 = 256;

/// Bytes of part heads that are not counted.
const PART_HEADS_FREE: u64 = 4096;

/// Result of evaluating a `Range` field.
#[derive(Debug, PartialEq, Eq)]
pub enum Asked {
    /// The whole response: there is no usable range, or ranges would save nothing.
    Whole,
    /// These parts: none is empty, none extends beyond the end.
    Parts(Vec<Range<u64>>),
    /// No satisfiable range: status 416.
    Impossible,
}

/// Parses the value of a `Range` field for a response of `total` bytes.
///
/// A range after the end of the response, or one whose end is before its start, is ignored if a valid one is left. A
/// malformed list leads to 416, as in nginx; units other than bytes are ignored.
pub fn parse(value: &[u8], total: u64, max_ranges: u64) -> Asked {
    let is_bytes = value.len() > 6 && value[..6].eq_ignore_ascii_case(b"bytes=");
    if !is_bytes {
        return Asked::Whole;
    }
    let mut text = Text(&value[6..]);
    let mut ranges = Vec::new();
    let mut sum: u64 = 0;
    loop {
        let Some(range) = text.range(total) else { return Asked::Impossible };
        if !range.is_empty() {
            let Some(longer) = sum.checked_add(range.end - range.start) else { return Asked::Impossible };
            if ranges.len() as u64 >= max_ranges {
                return Asked::Whole;
            }
            sum = longer;
            ranges.push(range);
        } else if range.start == 0 {
            return Asked::Whole;
        }
        if !text.skip(b',') {
            break;
        }
    }
    match ranges.len() as u64 {
        0 => Asked::Impossible,
        1 => Asked::Parts(ranges),
        _ if sum > total => Asked::Whole,
        count
            if max_ranges == MAX_RANGES_DEFAULT
                && sum + count * PART_HEAD_COST > total.saturating_add(PART_HEADS_FREE) =>
        {
            Asked::Whole
        }
        _ => Asked::Parts(ranges),
    }
}

/// The rest of a field value.
struct Text<'v>(&'v [u8]);

impl Text<'_> {
    /// Parses one range with surrounding spaces, cut at the end of the response; an unsatisfiable range is empty.
    /// `None` if it is malformed or not followed by a comma or the end.
    fn range(&mut self, total: u64) -> Option<Range<u64>> {
        self.skip_spaces();
        let range = if self.skip(b'-') {
            total.saturating_sub(self.position()?)..total
        } else {
            let start = self.position()?;
            self.skip_spaces();
            if !self.skip(b'-') {
                return None;
            }
            self.skip_spaces();
            let end = if self.is_at_end_of_range() { total } else { total.min(self.position()? + 1) };
            start..end
        };
        self.skip_spaces();
        self.is_at_end_of_range().then_some(range)
    }

    /// Parses an unsigned number; `None` if there is none or it is too large.
    fn position(&mut self) -> Option<u64> {
        let digits = self.0.iter().take_while(|byte| byte.is_ascii_digit()).count();
        if digits == 0 {
            return None;
        }
        let (number, rest) = self.0.split_at(digits);
        self.0 = rest;
        number.iter().try_fold(0_u64, |position, digit| {
            let position = position.checked_mul(10)?.checked_add(u64::from(digit - b'0'))?;
            (position <= POSITION_MAX).then_some(position)
        })
    }

    fn skip(&mut self, byte: u8) -> bool {
        let is_next = self.0.first() == Some(&byte);
        if is_next {
            self.0 = &self.0[1..];
        }
        is_next
    }

    fn skip_spaces(&mut self) {
        while self.skip(b' ') {}
    }

    fn is_at_end_of_range(&self) -> bool {
        matches!(self.0.first(), None | Some(b','))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UNLIMITED: u64 = MAX_RANGES_DEFAULT;

    fn ask(value: &str, total: u64) -> Asked {
        parse(value.as_bytes(), total, UNLIMITED)
    }

    #[allow(clippy::single_range_in_vec_init, reason = "that is what it is")]
    fn one(range: Range<u64>) -> Asked {
        Asked::Parts(vec![range])
    }

    #[test]
    fn one_range_is_cut_at_the_end_of_the_response() {
        for (value, range) in [
            ("bytes=0-8", 0..9),
            ("bytes=0-0", 0..1),
            ("bytes=0-", 0..1000),
            ("bytes=990-", 990..1000),
            ("bytes=990-1990", 990..1000),
            ("bytes=-10", 990..1000),
            ("bytes=-1000", 0..1000),
            ("bytes=-5000", 0..1000),
            ("BYTES= 1 - 2 ", 1..3),
            ("bytes=0-9223372036854775807", 0..1000),
            ("bytes=5-2,0-1", 0..2),
            ("bytes=1000-,-1", 999..1000),
        ] {
            assert_eq!(ask(value, 1000), one(range), "{value}");
        }
    }

    #[test]
    fn malformed_range_or_one_behind_the_end_is_unsatisfiable() {
        for value in [
            "bytes=alpha",
            "bytes=10-alpha",
            "bytes=10",
            "bytes=10-11 12-",
            "bytes=--1",
            "bytes=-",
            "bytes=- 1",
            "bytes= ",
            "bytes=,",
            "bytes=0-1,",
            "bytes=0-1,,2-3",
            "bytes=+1-2",
            "bytes=1000-",
            "bytes=5-2",
            "bytes=-0",
            "bytes=9223372036854775808-",
            "bytes=0-99999999999999999999999",
            "bytes=-99999999999999999999",
        ] {
            assert_eq!(ask(value, 1000), Asked::Impossible, "{value}");
        }
    }

    #[test]
    fn other_units_and_ranges_of_nothing_mean_the_whole() {
        for value in ["", "bytes=", "bytes", "lines=1-2", "bytes:0-1"] {
            assert_eq!(ask(value, 1000), Asked::Whole, "{value}");
        }
        for value in ["bytes=0-", "bytes=-5", "bytes=0-0"] {
            assert_eq!(ask(value, 0), Asked::Whole, "{value}");
        }
        assert_eq!(ask("bytes=1-", 0), Asked::Impossible);
    }

    #[test]
    fn several_ranges_keep_their_order() {
        let parts = Asked::Parts(vec![0..10, 990..1000, 10..20]);
        assert_eq!(ask("bytes=0-9, -10, 100000-, 10-19", 1000), parts);
    }

    #[test]
    fn ranges_that_are_longer_than_the_whole_get_the_whole() {
        assert_eq!(ask("bytes=0-,0-0", 1000), Asked::Whole);
        assert_eq!(ask("bytes=0-499,500-", 1000), Asked::Parts(vec![0..500, 500..1000]));
        let many = format!("bytes={}", vec!["0-0"; 30].join(","));
        assert_eq!(ask(&many, 1000), Asked::Whole, "their heads alone are longer");
        assert!(matches!(parse(many.as_bytes(), 1000, 30), Asked::Parts(_)), "unless so many are allowed in words");
    }

    #[test]
    fn more_ranges_than_allowed_get_the_whole() {
        assert_eq!(parse(b"bytes=0-0,1-1,2-2", 1000, 2), Asked::Whole);
        assert_eq!(parse(b"bytes=0-0,5-2,1-1", 1000, 2), Asked::Parts(vec![0..1, 1..2]), "empty ones are not counted");
    }

    /// One range as written by a client, valid or not.
    fn written() -> impl Strategy<Value = String> {
        prop_oneof![
            (0..40_u64, 0..40_u64).prop_map(|(first, last)| format!("{first}-{last}")),
            (0..40_u64).prop_map(|first| format!(" {first}- ")),
            (0..40_u64).prop_map(|length| format!("-{length}")),
            "[0-9 ,-]{0,12}",
        ]
    }

    proptest! {
        #[test]
        fn parts_are_never_empty_nor_beyond_the_end_nor_more_than_the_whole(
            value in prop_oneof![
                "bytes=[0-9 ,-]{0,60}",
                prop::collection::vec(written(), 1..8).prop_map(|all| format!("bytes={}", all.join(","))),
            ],
            total in prop_oneof![0..40_u64, Just(u64::MAX / 2)],
            max_ranges in prop_oneof![1..5_u64, Just(UNLIMITED)],
        ) {
            if let Asked::Parts(ranges) = parse(value.as_bytes(), total, max_ranges) {
                prop_assert!(!ranges.is_empty() && ranges.len() as u64 <= max_ranges);
                prop_assert!(ranges.iter().all(|range| range.start < range.end && range.end <= total));
                let sum: u128 = ranges.iter().map(|range| u128::from(range.end - range.start)).sum();
                prop_assert!(ranges.len() == 1 || sum <= u128::from(total));
            }
        }

        #[test]
        fn any_bytes_are_parsed_without_panic(value in prop::collection::vec(any::<u8>(), 0..80), total: u64) {
            let _ = parse(&value, total, UNLIMITED);
            let _ = parse(&[b"bytes=", &value[..]].concat(), total, UNLIMITED);
        }
    }
}
