//! Search for the end of a line, many bytes at a time.
//!
//! A line ends with CRLF or, leniently, LF (RFC 9112 §2.2). All other bytes below 0x20, except tab, and 0x7f are not
//! allowed in a head: the position of a bare CR, a NUL or an escape sequence is reported. Invariant: every byte is
//! scanned only once.

use super::block;

/// Result of the search.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LineEnd {
    /// The text of the line ends at `end`; the next line begins at `next`.
    Found { end: usize, next: usize },
    /// No line end yet; the next search begins at `resume`.
    Incomplete { resume: usize },
    /// A byte that is not allowed.
    Control { at: usize },
}

/// Searches for the end of the line in `input[from..]`.
pub(super) fn find_line_end(input: &[u8], from: usize) -> LineEnd {
    let mut at = from;
    loop {
        at = skip_text(input, at);
        match input.get(at) {
            None => return LineEnd::Incomplete { resume: at },
            Some(b'\n') => {
                return LineEnd::Found { end: at, next: at + 1 };
            }
            Some(b'\t') => at += 1,
            Some(b'\r') => {
                return match input.get(at + 1) {
                    None => LineEnd::Incomplete { resume: at },
                    Some(b'\n') => LineEnd::Found { end: at, next: at + 2 },
                    Some(_) => LineEnd::Control { at },
                };
            }
            Some(_) => return LineEnd::Control { at },
        }
    }
}

/// Returns the position of the first control character (tab included) at or after `from`, or the length of the input.
pub(crate) fn skip_text(input: &[u8], from: usize) -> usize {
    let mut at = from;
    let mut rest = &input[from..];
    while let Some((block, tail)) = rest.split_first_chunk::<{ block::BYTES }>() {
        let found = block::controls(block);
        if found != 0 {
            return at + found.trailing_zeros() as usize;
        }
        at += block::BYTES;
        rest = tail;
    }
    while let Some((word, tail)) = rest.split_first_chunk::<8>() {
        let found = control_mask(u64::from_le_bytes(*word));
        if found != 0 {
            return at + (found.trailing_zeros() / 8) as usize;
        }
        at += 8;
        rest = tail;
    }
    at + rest.iter().position(|&byte| byte < 0x20 || byte == 0x7f).unwrap_or(rest.len())
}

/// Returns `true` if the text contains a control character (tab included). Meant for short texts.
pub(super) fn has_control(text: &[u8]) -> bool {
    skip_text(text, 0) < text.len()
}

/// Returns a mask with the high bits of control characters set. Only the lowest set bit is exact, because a borrow can
/// carry into higher bytes.
fn control_mask(word: u64) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGH: u64 = ONES * 0x80;
    let below_space = word.wrapping_sub(ONES * 0x20) & !word;
    let delete = word ^ (ONES * 0x7f);
    let is_delete = delete.wrapping_sub(ONES) & !delete;
    (below_space | is_delete) & HIGH
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_at_every_place() {
        for length in 0..80 {
            for place in 0..length {
                for byte in 0..=255u8 {
                    let mut text = vec![b'a'; length];
                    text[place] = byte;
                    let expected = if byte < 0x20 || byte == 0x7f { place } else { length };
                    assert_eq!(skip_text(&text, 0), expected, "byte {byte:#x} at {place} of {length}");
                }
            }
        }
    }

    #[test]
    fn high_bytes_do_not_hide_controls() {
        for byte in [0x80, 0xa0, 0xff, 0x7e, 0x20] {
            let text = [byte, 0x7f, byte, 0x00, byte, b'\n', byte, byte];
            assert_eq!(skip_text(&text, 0), 1);
            assert_eq!(skip_text(&text, 2), 3);
            assert_eq!(skip_text(&text, 4), 5);
        }
    }

    #[test]
    fn line_ends() {
        assert_eq!(find_line_end(b"ab\r\nc", 0), LineEnd::Found { end: 2, next: 4 });
        assert_eq!(find_line_end(b"a\tb\nc", 0), LineEnd::Found { end: 3, next: 4 });
        assert_eq!(find_line_end(b"ab\r", 0), LineEnd::Incomplete { resume: 2 });
        assert_eq!(find_line_end(b"ab", 0), LineEnd::Incomplete { resume: 2 });
        assert_eq!(find_line_end(b"ab\rc", 0), LineEnd::Control { at: 2 });
        assert_eq!(find_line_end(b"ab\r\r\n", 0), LineEnd::Control { at: 2 });
        assert_eq!(find_line_end(b"a\0\n", 0), LineEnd::Control { at: 1 });
    }
}
