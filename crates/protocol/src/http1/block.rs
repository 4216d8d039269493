//! Classification of sixteen bytes at once: a bit mask of the bytes that belong to a class.
//!
//! Uses SSE2 on x86-64, where every processor has it, and a loop elsewhere. SSE2 takes some seven instructions per
//! block; the loop takes as many per byte.

/// Size of a block.
pub(super) const BYTES: usize = 16;

/// Returns the mask of control characters, tab included.
pub(super) fn controls(block: &[u8; BYTES]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of this architecture has SSE2.
    return unsafe { sse2::controls(block) };
    #[cfg(not(target_arch = "x86_64"))]
    return one_by_one(block, is_control);
}

/// Returns the mask of letters, digits and "-", which make up nearly all field names.
pub(super) fn usual_in_names(block: &[u8; BYTES]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of this architecture has SSE2.
    return unsafe { sse2::usual_in_names(block) };
    #[cfg(not(target_arch = "x86_64"))]
    return one_by_one(block, is_usual_in_names);
}

#[cfg(any(test, not(target_arch = "x86_64")))]
fn one_by_one(block: &[u8; BYTES], is_of_kind: fn(u8) -> bool) -> u32 {
    block.iter().enumerate().fold(0, |bits, (index, &byte)| bits | u32::from(is_of_kind(byte)) << index)
}

#[cfg(any(test, not(target_arch = "x86_64")))]
fn is_control(byte: u8) -> bool {
    byte < 0x20 || byte == 0x7f
}

#[cfg(any(test, not(target_arch = "x86_64")))]
fn is_usual_in_names(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'-'
}

#[cfg(target_arch = "x86_64")]
mod sse2 {
    use std::arch::x86_64::{
        __m128i, _mm_cmpeq_epi8, _mm_min_epu8, _mm_movemask_epi8, _mm_or_si128, _mm_set_epi64x, _mm_set1_epi8,
        _mm_sub_epi8,
    };

    use super::BYTES;

    #[target_feature(enable = "sse2")]
    pub(super) fn controls(block: &[u8; BYTES]) -> u32 {
        let bytes = load(block);
        let delete = _mm_cmpeq_epi8(bytes, _mm_set1_epi8(0x7f));
        _mm_movemask_epi8(_mm_or_si128(at_most(bytes, 0x1f), delete)) as u32
    }

    #[target_feature(enable = "sse2")]
    pub(super) fn usual_in_names(block: &[u8; BYTES]) -> u32 {
        let bytes = load(block);
        // Range check: a byte below the first of the range wraps around to more than the length of the range.
        let small = _mm_or_si128(bytes, _mm_set1_epi8(0x20));
        let letter = at_most(_mm_sub_epi8(small, _mm_set1_epi8(b'a' as i8)), 25);
        let digit = at_most(_mm_sub_epi8(bytes, _mm_set1_epi8(b'0' as i8)), 9);
        let hyphen = _mm_cmpeq_epi8(bytes, _mm_set1_epi8(b'-' as i8));
        _mm_movemask_epi8(_mm_or_si128(_mm_or_si128(letter, digit), hyphen)) as u32
    }

    #[target_feature(enable = "sse2")]
    fn load(block: &[u8; BYTES]) -> __m128i {
        let whole = u128::from_le_bytes(*block);
        _mm_set_epi64x((whole >> 64) as i64, whole as i64)
    }

    /// Sets all bits of the bytes that are at most `most`, compared as unsigned numbers.
    #[target_feature(enable = "sse2")]
    fn at_most(bytes: __m128i, most: i8) -> __m128i {
        _mm_cmpeq_epi8(_mm_min_epu8(bytes, _mm_set1_epi8(most)), bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_as_its_bytes_one_by_one() {
        for filler in [b'a', b'-', b' ', 0xff] {
            for place in 0..BYTES {
                for byte in 0..=255u8 {
                    let mut block = [filler; BYTES];
                    block[place] = byte;
                    assert_eq!(controls(&block), one_by_one(&block, is_control), "{block:?}");
                    assert_eq!(usual_in_names(&block), one_by_one(&block, is_usual_in_names), "{block:?}");
                }
            }
        }
    }
}
