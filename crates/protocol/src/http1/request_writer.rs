//! Writer for the head of a request to an upstream server: request line and fields.
//!
//! Makes no decisions. Values come from the configuration, which may build them from a client's request: an ambiguous
//! value is refused, never corrected. Invariant: after a refusal `out` is unchanged.

use std::fmt;

use super::field_line::is_token_byte;
use super::scan;
use crate::request::Version;

/// A part of a request that cannot be written, since the receiver would read it as something else.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unwritable {
    /// The method is not a token: RFC 9110 §9.1.
    Method,
    /// The target is empty or contains a space or a control character: RFC 9112 §3.2.
    Target,
    /// The field name is not a token: RFC 9110 §5.1.
    Name,
    /// The field value contains CR, LF or NUL: RFC 9110 §5.5.
    Value,
}

impl fmt::Display for Unwritable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Method => "invalid request method",
            Self::Target => "invalid characters in request URI",
            Self::Name => "invalid request header name",
            Self::Value => "invalid characters in request header value",
        })
    }
}

impl std::error::Error for Unwritable {}

/// Appends the line `METHOD TARGET HTTP/1.x`: HTTP/1.0 for versions before 1.1, otherwise HTTP/1.1.
pub fn write_request_line(out: &mut Vec<u8>, method: &[u8], target: &[u8], version: Version) -> Result<(), Unwritable> {
    if !is_token(method) {
        return Err(Unwritable::Method);
    }
    if target.is_empty() || scan::has_control(target) || memchr::memchr(b' ', target).is_some() {
        return Err(Unwritable::Target);
    }
    out.reserve(method.len() + target.len() + 12);
    out.extend_from_slice(method);
    out.push(b' ');
    out.extend_from_slice(target);
    out.extend_from_slice(if version < Version::Http11 { b" HTTP/1.0\r\n" } else { b" HTTP/1.1\r\n" });
    Ok(())
}

/// Appends the line `NAME: VALUE`.
#[inline]
pub fn write_field(out: &mut Vec<u8>, name: &[u8], value: &[u8]) -> Result<(), Unwritable> {
    if !is_token(name) {
        return Err(Unwritable::Name);
    }
    if ends_line(value) {
        return Err(Unwritable::Value);
    }
    out.reserve(name.len() + value.len() + 4);
    out.extend_from_slice(name);
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
    Ok(())
}

/// Appends a field whose value is written by `write`, which may only append. If the value is empty, no field is
/// written, as in nginx with `proxy_set_header NAME ""`.
pub fn write_field_unless_empty(
    out: &mut Vec<u8>,
    name: &[u8],
    write: impl FnOnce(&mut Vec<u8>),
) -> Result<(), Unwritable> {
    if !is_token(name) {
        return Err(Unwritable::Name);
    }
    let start = out.len();
    out.extend_from_slice(name);
    out.extend_from_slice(b": ");
    let value_start = out.len();
    write(out);
    let value = out.get(value_start..).unwrap_or_default();
    let (is_empty, is_wrong) = (value.is_empty(), ends_line(value));
    if is_empty || is_wrong {
        out.truncate(start);
        return if is_wrong { Err(Unwritable::Value) } else { Ok(()) };
    }
    out.extend_from_slice(b"\r\n");
    Ok(())
}

/// Appends the empty line at the end of a head.
pub fn write_head_end(out: &mut Vec<u8>) {
    out.extend_from_slice(b"\r\n");
}

pub(crate) fn is_token(text: &[u8]) -> bool {
    !text.is_empty() && text.iter().all(|&byte| is_token_byte(byte))
}

/// Returns `true` if some parsers would see a line end in the value.
pub(crate) fn ends_line(value: &[u8]) -> bool {
    scan::has_control(value) && memchr::memchr3(b'\r', b'\n', 0, value).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn right_parts_are_written_as_they_are() {
        let mut out = Vec::new();
        write_request_line(&mut out, b"GET", b"/a?b\xe9", Version::Http11).unwrap();
        write_request_line(&mut out, b"M-SEARCH", b"*", Version::Http10).unwrap();
        write_field(&mut out, b"Host", b"a").unwrap();
        write_field(&mut out, b"X_y", b"a\tb \x01\xff").unwrap();
        write_field(&mut out, b"Empty", b"").unwrap();
        write_field_unless_empty(&mut out, b"A", |out| out.extend_from_slice(b"b")).unwrap();
        write_field_unless_empty(&mut out, b"Gone", |_| {}).unwrap();
        write_head_end(&mut out);
        let expected = b"GET /a?b\xe9 HTTP/1.1\r\nM-SEARCH * HTTP/1.0\r\nHost: a\r\nX_y: a\tb \x01\xff\r\nEmpty: \r\n\
                         A: b\r\n\r\n";
        assert_eq!(out, expected);
    }

    #[test]
    fn ambiguous_request_is_refused_and_writes_nothing() {
        let mut out = b"before".to_vec();
        for method in ["", "G T", "GET\r\n", "G\0T", "GET:"] {
            assert_eq!(
                write_request_line(&mut out, method.as_bytes(), b"/", Version::Http11),
                Err(Unwritable::Method),
                "{method:?}"
            );
        }
        for target in ["", "/a b", "/a\r\nX: y", "/\n", "/\0", "/\t", "/\x7f", " "] {
            assert_eq!(
                write_request_line(&mut out, b"GET", target.as_bytes(), Version::Http11),
                Err(Unwritable::Target),
                "{target:?}"
            );
        }
        for name in ["", "X:", "X Y", " X", "X\n", "X\r\nY", "X\0", "\u{e9}"] {
            assert_eq!(write_field(&mut out, name.as_bytes(), b""), Err(Unwritable::Name), "{name:?}");
            assert_eq!(write_field_unless_empty(&mut out, name.as_bytes(), |_| {}), Err(Unwritable::Name), "{name:?}");
        }
        for value in ["a\r", "a\nb", "\0", "a\r\nX: y"] {
            let value = value.as_bytes();
            assert_eq!(write_field(&mut out, b"X", value), Err(Unwritable::Value), "{value:?}");
            let result = write_field_unless_empty(&mut out, b"X", |out| out.extend_from_slice(value));
            assert_eq!(result, Err(Unwritable::Value), "{value:?}");
        }
        assert_eq!(out, b"before");
    }
}
