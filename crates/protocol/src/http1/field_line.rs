//! A field line of a head, `name: value`: the code shared by request and response heads.
//!
//! Only finds the positions of name and value; the head parsers interpret them.

use super::block;
use super::scan::skip_text;
use crate::Range32;

pub(super) struct FieldLine {
    pub(super) name: Range32,
    pub(super) value: Range32,
}

/// Fast path: parses the field line at `start` in one pass, if it is complete and in the usual form. Returns it and the
/// start of the next line. Other lines need the full parser.
#[inline]
pub(super) fn find_usual(input: &[u8], start: usize) -> Option<(FieldLine, usize)> {
    let name_end = skip_valid(input, start)?;
    if name_end == start || input[name_end] != b':' {
        return None;
    }
    let value_start = name_end + 1 + usize::from(input.get(name_end + 1) == Some(&b' '));
    let value_end = skip_text(input, value_start);
    let has_more_space = input.get(value_start) == Some(&b' ') || input[value_end - 1] == b' ';
    if has_more_space && value_end > value_start || !input[value_end..].starts_with(b"\r\n") {
        return None;
    }
    let field = FieldLine { name: Range32::new(start, name_end), value: Range32::new(value_start, value_end) };
    Some((field, value_end + 2))
}

/// Returns the position of the first byte at or after `from` that is not a letter, digit or "-", if there is one.
#[inline]
fn skip_valid(input: &[u8], from: usize) -> Option<usize> {
    let rest = input.get(from..)?;
    // Most names are shorter than a block.
    let skipped = match rest.first_chunk::<{ block::BYTES }>() {
        Some(block) => block::usual_in_names(block).trailing_ones() as usize,
        None => 0,
    };
    let rest = &rest[skipped..];
    Some(from + skipped + rest.iter().position(|&byte| NAME[byte as usize] != VALID)?)
}

/// Trims spaces and tabs at both ends (RFC 9110 §5.5).
pub(super) fn trim(input: &[u8], start: usize, end: usize) -> Range32 {
    let is_space = |&&byte: &&u8| byte == b' ' || byte == b'\t';
    let start = start + input[start..end].iter().take_while(is_space).count();
    let end = end - input[start..end].iter().rev().take_while(is_space).count();
    Range32::new(start, end)
}

/// Returns `true` if the name, without its special characters, equals Content-Length or Transfer-Encoding: another
/// program might take it for that field.
pub(crate) fn pretends_framing(name: &[u8]) -> bool {
    let letters = || name.iter().filter(|byte| byte.is_ascii_alphanumeric()).map(u8::to_ascii_lowercase);
    letters().eq(b"contentlength".iter().copied()) || letters().eq(b"transferencoding".iter().copied())
}

/// Returns `true` for the bytes of a token (RFC 9110 §5.6.2).
pub fn is_token_byte(byte: u8) -> bool {
    NAME[byte as usize] != NO_TOKEN
}

/// Letters, digits and "-": the bytes that nginx accepts in names by default.
pub(super) const VALID: u8 = 0;
/// The other bytes of a token.
const TOKEN: u8 = 1;
const NO_TOKEN: u8 = 2;

pub(super) static NAME: [u8; 256] = {
    let mut classes = [NO_TOKEN; 256];
    let mut byte = 0;
    while byte < 256 {
        classes[byte] = match byte as u8 {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' => VALID,
            b'!' | b'#' | b'$' | b'%' | b'&' | b'\'' | b'*' | b'+' | b'.' | b'^' | b'_' | b'`' | b'|' | b'~' => TOKEN,
            _ => NO_TOKEN,
        };
        byte += 1;
    }
    classes
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_of_a_name_at_every_place() {
        for length in 0..40 {
            for place in 0..length {
                for byte in 0..=255u8 {
                    let mut text = vec![b'a'; length];
                    text[place] = byte;
                    let expected = (NAME[byte as usize] != VALID).then_some(place);
                    assert_eq!(skip_valid(&text, 0), expected, "byte {byte:#x} at {place} of {length}");
                }
            }
        }
    }
}
