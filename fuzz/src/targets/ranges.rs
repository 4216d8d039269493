//! `Range` fields: a resulting range is never empty, beyond the end or longer than the whole, and there are no more
//! than allowed.

use gale_protocol::byte_ranges::{Asked, parse};

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    let Some((total, rest)) = data.split_first_chunk() else { return };
    let Some((&max, value)) = rest.split_first() else { return };
    let total = u64::from_le_bytes(*total);
    let with_unit = [b"bytes=", value].concat();
    for value in [value, &with_unit[..]] {
        for max_ranges in [u64::from(max).max(1), i32::MAX as u64] {
            let Asked::Parts(ranges) = parse(value, total, max_ranges) else { continue };
            assert!(!ranges.is_empty() && ranges.len() as u64 <= max_ranges);
            assert!(ranges.iter().all(|range| range.start < range.end && range.end <= total));
            let sum: u128 = ranges.iter().map(|range| u128::from(range.end - range.start)).sum();
            assert!(ranges.len() == 1 || sum <= u128::from(total));
        }
    }
}
