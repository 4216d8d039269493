//! The lines of a response: status lines with nginx's reason phrases, header fields, chunk framing.
//!
//! Writes bytes, decides nothing. Invariant: whatever value is written as a field, it cannot end
//! its line.

use std::borrow::Cow;

use super::scan;

/// Declares the status codes that have a phrase.
macro_rules! phrases {
    ($($code:literal $phrase:literal)+) => {
        /// nginx's reason phrase of a status code; empty where it has none.
        pub const fn reason(status: u16) -> &'static str {
            match status {
                $($code => $phrase,)+
                _ => "",
            }
        }

        /// The whole status line with its line end, where there is a phrase.
        pub const fn status_line(status: u16) -> Option<&'static [u8]> {
            match status {
                $($code => Some(concat!("HTTP/1.1 ", $code, " ", $phrase, "\r\n").as_bytes()),)+
                _ => None,
            }
        }
    };
}

// nginx's words, which are older than those of RFC 9110 §15 ("Moved Temporarily"); clients and
// tests know them.
phrases! {
    100 "Continue"
    101 "Switching Protocols"
    103 "Early Hints"
    200 "OK"
    201 "Created"
    202 "Accepted"
    204 "No Content"
    206 "Partial Content"
    301 "Moved Permanently"
    302 "Moved Temporarily"
    303 "See Other"
    304 "Not Modified"
    307 "Temporary Redirect"
    308 "Permanent Redirect"
    400 "Bad Request"
    401 "Unauthorized"
    402 "Payment Required"
    403 "Forbidden"
    404 "Not Found"
    405 "Not Allowed"
    406 "Not Acceptable"
    407 "Proxy Authentication Required"
    408 "Request Time-out"
    409 "Conflict"
    410 "Gone"
    411 "Length Required"
    412 "Precondition Failed"
    413 "Request Entity Too Large"
    414 "Request-URI Too Large"
    415 "Unsupported Media Type"
    416 "Requested Range Not Satisfiable"
    421 "Misdirected Request"
    429 "Too Many Requests"
    500 "Internal Server Error"
    501 "Not Implemented"
    502 "Bad Gateway"
    503 "Service Temporarily Unavailable"
    504 "Gateway Time-out"
    505 "HTTP Version Not Supported"
    507 "Insufficient Storage"
}

/// The status that a client is shown: nginx's own numbers 494 to 498 (head too large, TLS faults)
/// are 400 on the wire.
pub const fn wire_status(status: u16) -> u16 {
    match status {
        494..=498 => 400,
        status => status,
    }
}

/// Appends the status line; a code without phrase is followed by a space and nothing, as in nginx.
pub fn write_status_line(out: &mut Vec<u8>, status: u16) {
    match status_line(status) {
        Some(line) => out.extend_from_slice(line),
        None => {
            out.extend_from_slice(b"HTTP/1.1 ");
            write_decimal_padded(out, status);
            out.extend_from_slice(b" \r\n");
        }
    }
}

/// Appends a status line with another server's or the configuration's own phrase.
pub fn write_status_line_with(out: &mut Vec<u8>, status: u16, phrase: &[u8]) {
    out.extend_from_slice(b"HTTP/1.1 ");
    write_decimal_padded(out, status);
    out.push(b' ');
    out.extend_from_slice(&clean_value(phrase));
    out.extend_from_slice(b"\r\n");
}

/// Appends `name: value` with its line end, the value as [`clean_value`] has it; whether that changed it. The name
/// comes from the configuration or from a table and is written as it is.
#[inline]
pub fn write_header(out: &mut Vec<u8>, name: &[u8], value: &[u8]) -> bool {
    out.reserve(name.len() + value.len() + 4);
    out.extend_from_slice(name);
    out.extend_from_slice(b": ");
    let value = clean_value(value);
    out.extend_from_slice(&value);
    out.extend_from_slice(b"\r\n");
    matches!(value, Cow::Owned(_))
}

/// Like [`write_header`], for values that the program made itself and that hold no line end:
/// dates, tags, constants.
#[inline]
pub fn write_own_header(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    debug_assert!(memchr::memchr3(b'\r', b'\n', 0, value).is_none(), "a value of our own with a line end");
    out.reserve(name.len() + value.len() + 4);
    out.extend_from_slice(name);
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

/// Appends `name: number` with its line end.
#[inline]
pub fn write_header_number(out: &mut Vec<u8>, name: &[u8], number: u64) {
    out.reserve(name.len() + 24);
    out.extend_from_slice(name);
    out.extend_from_slice(b": ");
    write_decimal(out, number);
    out.extend_from_slice(b"\r\n");
}

/// Appends a number in decimal.
pub fn write_decimal(out: &mut Vec<u8>, mut number: u64) {
    let mut digits = [0; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

/// What ends a chunked body without trailers.
pub const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// What ends a chunk's data.
pub const CHUNK_END: &[u8] = b"\r\n";

/// The size line of a chunk, kept on the stack.
#[derive(Clone, Copy, Debug)]
pub struct ChunkHeader {
    text: [u8; 18],
    start: u8,
}

impl ChunkHeader {
    /// The line for a chunk of `size` bytes. A size of 0 would end the body: [`LAST_CHUNK`] is for
    /// that.
    pub fn new(size: u64) -> Self {
        debug_assert!(size > 0, "an empty chunk ends the body");
        let mut text = [0; 18];
        text[16] = b'\r';
        text[17] = b'\n';
        let mut at = 16;
        let mut rest = size;
        loop {
            at -= 1;
            text[at] = b"0123456789abcdef"[(rest & 15) as usize];
            rest >>= 4;
            if rest == 0 {
                break;
            }
        }
        Self { text, start: at as u8 }
    }

    /// The line with its line end.
    pub fn as_bytes(&self) -> &[u8] {
        &self.text[self.start as usize..]
    }
}

/// Appends one whole chunk; nothing for empty data, which would end the body.
pub fn write_chunk(out: &mut Vec<u8>, data: &[u8]) {
    if data.is_empty() {
        return;
    }
    out.reserve(data.len() + 20);
    out.extend_from_slice(ChunkHeader::new(data.len() as u64).as_bytes());
    out.extend_from_slice(data);
    out.extend_from_slice(CHUNK_END);
}

/// A field's value as clients get it in any version of HTTP: CR, LF and NUL become spaces (RFC 9110 §5.5), since a
/// value that is made from a decoded path must not be able to add lines.
#[inline]
pub fn clean_value(value: &[u8]) -> Cow<'_, [u8]> {
    if !scan::has_control(value) {
        return Cow::Borrowed(value);
    }
    let breaks = |byte: u8| matches!(byte, b'\r' | b'\n' | 0);
    if !value.iter().any(|&byte| breaks(byte)) {
        return Cow::Borrowed(value);
    }
    Cow::Owned(value.iter().map(|&byte| if breaks(byte) { b' ' } else { byte }).collect())
}

/// Three digits at least: `%03ui` in nginx.
fn write_decimal_padded(out: &mut Vec<u8>, status: u16) {
    for limit in [100, 10] {
        if status < limit {
            out.push(b'0');
        }
    }
    write_decimal(out, u64::from(status));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written<T>(write: impl FnOnce(&mut Vec<u8>) -> T) -> String {
        let mut out = Vec::new();
        write(&mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn status_lines() {
        assert_eq!(written(|out| write_status_line(out, 200)), "HTTP/1.1 200 OK\r\n");
        assert_eq!(written(|out| write_status_line(out, 302)), "HTTP/1.1 302 Moved Temporarily\r\n");
        assert_eq!(written(|out| write_status_line(out, 203)), "HTTP/1.1 203 \r\n");
        assert_eq!(written(|out| write_status_line(out, 7)), "HTTP/1.1 007 \r\n");
        assert_eq!(written(|out| write_status_line(out, 65535)), "HTTP/1.1 65535 \r\n");
        assert_eq!(written(|out| write_status_line_with(out, 299, b"Fine\nX: y")), "HTTP/1.1 299 Fine X: y\r\n");
        assert_eq!(reason(425), "");
        assert_eq!((wire_status(494), wire_status(499), wire_status(404)), (400, 499, 404));
    }

    #[test]
    fn every_phrase_has_its_line() {
        for status in 0..1000 {
            match status_line(status) {
                Some(line) => assert_eq!(line, format!("HTTP/1.1 {status} {}\r\n", reason(status)).as_bytes()),
                None => assert_eq!(reason(status), ""),
            }
        }
    }

    #[test]
    fn values_cannot_end_their_line() {
        assert_eq!(
            written(|out| write_header(out, b"Location", b"/a\r\nSet-Cookie: x\0")),
            "Location: /a  Set-Cookie: x \r\n"
        );
        assert_eq!(written(|out| write_header(out, b"Empty", b"")), "Empty: \r\n");
        assert_eq!(written(|out| write_header_number(out, b"Content-Length", 0)), "Content-Length: 0\r\n");
        assert_eq!(written(|out| write_decimal(out, u64::MAX)), "18446744073709551615");
    }

    #[test]
    fn chunk_framing() {
        for (size, text) in
            [(1, "1\r\n"), (15, "f\r\n"), (16, "10\r\n"), (0xabcdef, "abcdef\r\n"), (u64::MAX, "ffffffffffffffff\r\n")]
        {
            assert_eq!(ChunkHeader::new(size).as_bytes(), text.as_bytes());
        }
        assert_eq!(written(|out| write_chunk(out, b"hello")), "5\r\nhello\r\n");
        assert_eq!(written(|out| write_chunk(out, b"")), "");
    }
}
