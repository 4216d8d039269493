//! Integers with a prefix: RFC 7541 §5.1.
//!
//! No number in HPACK needs more than 28 bits here, so longer integers are refused without reading them to their end.

use super::HpackFault;

/// Reads the integer whose first byte is at `*at`, and moves `*at` behind it. The bits above the prefix are ignored.
#[inline]
pub(super) fn read(block: &[u8], at: &mut usize, prefix_bits: u32) -> Result<u32, HpackFault> {
    let mask = (1u32 << prefix_bits) - 1;
    let first = u32::from(*block.get(*at).ok_or(HpackFault::Truncated)?) & mask;
    *at += 1;
    if first < mask { Ok(first) } else { read_rest(block, at, mask) }
}

fn read_rest(block: &[u8], at: &mut usize, prefix: u32) -> Result<u32, HpackFault> {
    let mut value = prefix;
    for shift in [0, 7, 14, 21] {
        let byte = *block.get(*at).ok_or(HpackFault::Truncated)?;
        *at += 1;
        value += u32::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(HpackFault::IntegerTooLong)
}

/// Appends an integer; `pattern` contains the bits above the prefix.
#[inline]
pub(super) fn write(out: &mut Vec<u8>, pattern: u8, prefix_bits: u32, value: usize) {
    let mask = (1usize << prefix_bits) - 1;
    if value < mask {
        out.push(pattern | value as u8);
        return;
    }
    out.push(pattern | mask as u8);
    let mut rest = value - mask;
    while rest >= 0x80 {
        out.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rfc_7541_c_1_examples_are_read_and_written() {
        for (value, prefix_bits, bytes) in
            [(10, 5, &b"\x0a"[..]), (1337, 5, b"\x1f\x9a\x0a"), (42, 8, b"\x2a"), (31, 5, b"\x1f\x00")]
        {
            let mut out = Vec::new();
            write(&mut out, 0, prefix_bits, value as usize);
            assert_eq!(out, bytes);
            let mut at = 0;
            assert_eq!(read(bytes, &mut at, prefix_bits), Ok(value));
            assert_eq!(at, bytes.len());
        }
    }

    #[test]
    fn long_and_unfinished_integers_are_refused() {
        assert_eq!(read(b"", &mut 0, 7), Err(HpackFault::Truncated));
        assert_eq!(read(b"\x7f\x80", &mut 0, 7), Err(HpackFault::Truncated));
        assert_eq!(read(b"\x7f\x80\x80\x80\x80\x00", &mut 0, 7), Err(HpackFault::IntegerTooLong));
        assert_eq!(read(b"\x7f\xff\xff\xff\x7f", &mut 0, 7), Ok(0x7f + 0x0fff_ffff));
    }
}
