//! ETag: the validator of a file, as nginx makes it, and its weak form for a body that filters change.
//!
//! The field itself is `etag` in [`ResponseHead`]; the module `not_modified` compares it with a request's conditions.

use crate::request::response::ResponseHead;

/// Maximum length of an `ETag` of a file.
const ETAG_MAX: usize = 36;

impl ResponseHead {
    /// Sets `ETag` from a file's time and length, as nginx makes it:
    /// `"hex(seconds)-hex(length)"`, with a sign before 1970.
    pub fn set_etag(&mut self, modified_seconds: i64, length: u64) {
        // Written from the end, since digits are computed from the last one on.
        let mut text = *b"\"-ffffffffffffffff-ffffffffffffffff\"";
        let start = put_hex_before(&mut text, ETAG_MAX - 1, length) - 1;
        text[start] = b'-';
        let mut start = put_hex_before(&mut text, start, modified_seconds.unsigned_abs()) - 1;
        if modified_seconds < 0 {
            text[start] = b'-';
            start -= 1;
        }
        text[start] = b'"';
        self.etag.clear();
        self.etag.extend_from_slice(&text[start..]);
    }

    /// Makes a strong `ETag` weak, since the body will be another one, and removes one that is neither.
    pub(super) fn weaken_etag(&mut self) {
        if self.etag.starts_with(b"\"") {
            self.etag.insert_from_slice(0, b"W/");
        } else if !self.etag.starts_with(b"W/") {
            self.etag.clear();
        }
    }
}

/// Writes a number in hexadecimal that ends at `end`, and returns its beginning. Avoids `format!`, since every file's
/// response needs it.
fn put_hex_before(text: &mut [u8; ETAG_MAX], end: usize, mut number: u64) -> usize {
    let mut start = end;
    loop {
        start -= 1;
        text[start] = b"0123456789abcdef"[(number & 0xf) as usize];
        number >>= 4;
        if number == 0 {
            return start;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_etag_is_nginx_s() {
        let mut head = ResponseHead::default();
        head.set_etag(0x5f00_0000, 615);
        assert_eq!(&*head.etag, b"\"5f000000-267\"");
        head.set_etag(0, u64::MAX);
        assert_eq!(&*head.etag, b"\"0-ffffffffffffffff\"");
        head.set_etag(-1000, 4);
        assert_eq!(&*head.etag, b"\"-3e8-4\"");
        head.set_etag(i64::MIN, u64::MAX);
        assert_eq!(&*head.etag, b"\"-8000000000000000-ffffffffffffffff\"");
    }
}
