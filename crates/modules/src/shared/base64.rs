//! Base64 (RFC 4648), decoded as nginx does: a text may be cut off, surplus bits are dropped, and everything from the
//! first `=` on is ignored.

/// Returns the bytes of a base64 text (§4), or `None` if it is invalid.
pub(crate) fn decode(encoded: &[u8]) -> Option<impl Iterator<Item = u8>> {
    decode_with(encoded, |byte| match byte {
        b'+' => Some(62),
        b'/' => Some(63),
        byte => letter_or_digit(byte),
    })
}

/// Returns the bytes of a text in the URL-safe alphabet (§5), or `None` if it is invalid.
pub(crate) fn decode_url(encoded: &[u8]) -> Option<impl Iterator<Item = u8>> {
    decode_with(encoded, |byte| match byte {
        b'-' => Some(62),
        b'_' => Some(63),
        byte => letter_or_digit(byte),
    })
}

fn decode_with(encoded: &[u8], sextet: fn(u8) -> Option<u8>) -> Option<impl Iterator<Item = u8>> {
    let end = encoded.iter().position(|&byte| byte == b'=').unwrap_or(encoded.len());
    let encoded = &encoded[..end];
    if encoded.len() % 4 == 1 || !encoded.iter().all(|&byte| sextet(byte).is_some()) {
        return None;
    }
    // Bits that do not make up a byte yet.
    let (mut bits, mut count) = (0_u32, 0);
    Some(encoded.iter().filter_map(move |&byte| sextet(byte)).filter_map(move |value| {
        bits = bits << 6 | u32::from(value);
        count += 6;
        (count >= 8).then(|| {
            count -= 8;
            (bits >> count) as u8
        })
    }))
}

fn letter_or_digit(byte: u8) -> Option<u8> {
    match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        _ => None,
    }
}

/// Appends bytes in base64 (§4), with padding.
pub(crate) fn append(out: &mut Vec<u8>, bytes: &[u8]) {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for group in bytes.chunks(3) {
        let byte = |place: usize| u32::from(group.get(place).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for place in 0..4 {
            let character = ALPHABET[(bits >> (18 - 6 * place) & 63) as usize];
            out.push(if place <= group.len() { character } else { b'=' });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rfc_s_examples_are_written_and_read() {
        for (text, encoded) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("foobar", "Zm9vYmFy")]
        {
            let mut out = Vec::new();
            append(&mut out, text.as_bytes());
            assert_eq!(out, encoded.as_bytes());
            assert_eq!(decode(encoded.as_bytes()).unwrap().collect::<Vec<_>>(), text.as_bytes());
        }
    }

    #[test]
    fn each_alphabet_has_its_own_last_characters() {
        let read = |encoded: &[u8]| decode(encoded).map(Iterator::collect::<Vec<_>>);
        let read_url = |encoded: &[u8]| decode_url(encoded).map(Iterator::collect::<Vec<_>>);
        assert_eq!((read(b"+/+/"), read_url(b"+/+/")), (Some(vec![0xfb, 0xff, 0xbf]), None));
        assert_eq!((read(b"-_-_"), read_url(b"-_-_")), (None, Some(vec![0xfb, 0xff, 0xbf])));
        assert_eq!((read(b"Zg=!!"), read(b"Z"), read(b"Zg\0")), (Some(b"f".to_vec()), None, None));
    }
}
