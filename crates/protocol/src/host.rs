//! Validation of host names sent by clients; nothing is resolved.
//!
//! Accepts the hosts that nginx accepts in Host (RFC 3986 reg-name and bracketed literals), with an optional port.
//! Invariant: an [`Authority`] is never empty, and its name has no port, no trailing dot and no character outside of
//! that grammar.

use crate::Range32;

/// A validated host with optional port, as offsets into the input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Authority {
    /// The name without port and trailing dot; an IPv6 literal keeps its brackets.
    pub name: Range32,
    /// The port, if present; "host:" has none.
    pub port: Option<u16>,
    /// `true` if the name has no capitals, so that it can be compared unchanged.
    pub lowercase: bool,
}

impl Authority {
    /// Returns the name in lower case: borrowed from `input` if possible, otherwise written to `scratch`, which is
    /// cleared.
    pub fn lowercase_name<'a>(&self, input: &'a [u8], scratch: &'a mut Vec<u8>) -> &'a [u8] {
        let name = self.name.of(input);
        if self.lowercase {
            return name;
        }
        scratch.clear();
        scratch.extend(name.iter().map(u8::to_ascii_lowercase));
        scratch
    }
}

/// The text is not a host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InvalidHost;

impl std::fmt::Display for InvalidHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("invalid host")
    }
}

impl std::error::Error for InvalidHost {}

/// Validates a text as a host with optional port: RFC 3986 §3.2.2, as interpreted by nginx.
///
/// Refuses two dots in a row, a port over 65535, an unclosed bracket and an empty name.
pub fn validate(text: &[u8]) -> Result<Authority, InvalidHost> {
    if text.len() > u32::MAX as usize {
        return Err(InvalidHost);
    }
    validate_in(text, Range32::new(0, text.len()))
}

/// As [`validate`], for a part of a larger input; the offsets in the result refer to `input`.
pub fn validate_in(input: &[u8], range: Range32) -> Result<Authority, InvalidHost> {
    let text = range.of(input);
    let literal = text.first() == Some(&b'[');
    let (mut name_length, lowercase) = if literal { scan_literal(text)? } else { scan_name(text)? };
    let port = match &text[name_length..] {
        [] | [b':'] => None,
        [b':', digits @ ..] => Some(parse_port(digits)?),
        _ => return Err(InvalidHost),
    };
    if !literal && text[..name_length].last() == Some(&b'.') {
        name_length -= 1;
    }
    if name_length == 0 {
        return Err(InvalidHost);
    }
    Ok(Authority { name: Range32::new(range.start(), range.start() + name_length), port, lowercase })
}

/// Cache of the last validated host: most requests have the same host as the previous one.
#[derive(Clone, Debug)]
pub struct LastHost {
    text: [u8; LAST_HOST_MAX],
    length: usize,
    /// Its offsets are relative to the beginning of `text`.
    authority: Authority,
}

/// Longer hosts are not cached.
const LAST_HOST_MAX: usize = 48;

impl Default for LastHost {
    fn default() -> Self {
        let authority = Authority { name: Range32::default(), port: None, lowercase: true };
        LastHost { text: [0; LAST_HOST_MAX], length: 0, authority }
    }
}

impl LastHost {
    /// Returns the result of [`validate_in`].
    pub fn validate_in(&mut self, input: &[u8], range: Range32) -> Result<Authority, InvalidHost> {
        let text = range.of(input);
        if !text.is_empty() && *text == self.text[..self.length] {
            let name = Range32::new(range.start(), range.start() + self.authority.name.end());
            return Ok(Authority { name, ..self.authority });
        }
        let found = validate_in(input, range)?;
        if let Some(kept) = self.text.get_mut(..text.len()) {
            kept.copy_from_slice(text);
            self.length = text.len();
            self.authority = Authority { name: Range32::new(0, found.name.end() - range.start()), ..found };
        }
        Ok(found)
    }
}

/// Returns the length of the name at the beginning of the text, and `true` if it has no capitals.
fn scan_name(text: &[u8]) -> Result<(usize, bool), InvalidHost> {
    let scanned = scan(text, NAME);
    if scanned.has_two_dots { Err(InvalidHost) } else { Ok((scanned.length, scanned.is_lowercase)) }
}

/// As [`scan_name`], for a literal including its brackets.
fn scan_literal(text: &[u8]) -> Result<(usize, bool), InvalidHost> {
    let scanned = scan(&text[1..], LITERAL);
    if scanned.has_two_dots || text.get(1 + scanned.length) != Some(&b']') {
        return Err(InvalidHost);
    }
    Ok((scanned.length + 2, scanned.is_lowercase))
}

/// Properties of a run of bytes of one class.
struct Scanned {
    length: usize,
    is_lowercase: bool,
    has_two_dots: bool,
}

/// Scans the bytes of a class at the beginning of the text in one pass, since it is called for every request.
fn scan(text: &[u8], class: u8) -> Scanned {
    let (mut length, mut seen, mut previous, mut dots) = (0, 0, 0, 0);
    for &byte in text {
        let found = CLASSES[byte as usize];
        if found & class == 0 {
            break;
        }
        dots |= found & previous;
        seen |= found;
        previous = found;
        length += 1;
    }
    Scanned { length, is_lowercase: seen & CAPITAL == 0, has_two_dots: dots & DOT != 0 }
}

fn parse_port(digits: &[u8]) -> Result<u16, InvalidHost> {
    let mut port: u16 = 0;
    for &byte in digits {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return Err(InvalidHost);
        }
        port = port.checked_mul(10).and_then(|port| port.checked_add(u16::from(digit))).ok_or(InvalidHost)?;
    }
    Ok(port)
}

const NAME: u8 = 1;
const LITERAL: u8 = 2;
const CAPITAL: u8 = 4;
const DOT: u8 = 8;

/// Classes of bytes: unreserved and sub-delims are allowed in names and literals, "%" only in names, ":" only in
/// literals (RFC 3986 §2.2, §2.3).
static CLASSES: [u8; 256] = {
    let mut classes = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let b = byte as u8;
        classes[byte] = match b {
            b'A'..=b'Z' => NAME | LITERAL | CAPITAL,
            b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'~' => NAME | LITERAL,
            b'.' => NAME | LITERAL | DOT,
            b'!' | b'$' | b'&' | b'\'' | b'(' | b')' | b'*' | b'+' | b',' | b';' | b'=' => NAME | LITERAL,
            b'%' => NAME,
            b':' => LITERAL,
            _ => 0,
        };
        byte += 1;
    }
    classes
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_split_and_lowered() {
        let cases: &[(&str, &str, Option<u16>)] = &[
            ("l", "l", None),
            ("L", "l", None),
            ("abcd-ef.g02.xyz:", "abcd-ef.g02.xyz", None),
            ("Example.COM:8080", "example.com", Some(8080)),
            ("example.com.", "example.com", None),
            ("example.com.:88", "example.com", Some(88)),
            (".com", ".com", None),
            ("h:0", "h", Some(0)),
            ("h:65535", "h", Some(65535)),
            ("h:000080", "h", Some(80)),
            ("[abcd::EF98:0]:80", "[abcd::ef98:0]", Some(80)),
            ("[::ffff:12.30.67.89]", "[::ffff:12.30.67.89]", None),
            ("[::1]:", "[::1]", None),
            ("[]", "[]", None),
            ("a_b~!$&'()*+,;=%41", "a_b~!$&'()*+,;=%41", None),
        ];
        for &(text, name, port) in cases {
            let authority = validate(text.as_bytes()).unwrap_or_else(|_| panic!("{text:?}"));
            let mut scratch = Vec::new();
            assert_eq!(authority.lowercase_name(text.as_bytes(), &mut scratch), name.as_bytes(), "{text:?}");
            assert_eq!(authority.port, port, "{text:?}");
        }
    }

    #[test]
    fn a_host_that_is_remembered_is_the_same_wherever_it_stands() {
        let long = "long.".repeat(12) + "example";
        let mut last = LastHost::default();
        let hosts =
            ["", "a", "a", "A.:8", "a", "a:8", "a.:8", "A.:8", "[::1]:9", "[::1]", "a..b", "a", &long, &long, "a"];
        for host in hosts {
            for before in ["", "Host: ", "x"] {
                let input = [before, host, "/"].concat();
                let range = Range32::new(before.len(), before.len() + host.len());
                let validated = validate_in(input.as_bytes(), range);
                assert_eq!(last.validate_in(input.as_bytes(), range), validated, "{input:?}");
            }
        }
    }

    #[test]
    fn malformed_hosts_are_refused() {
        let cases: &[&[u8]] = &[
            b"",
            b".",
            b"..",
            b"a..b",
            b"a..",
            b":80",
            b".:80",
            b"h:65536",
            b"h:98777",
            b"h:-1",
            b"h:+1",
            b"h:1.2",
            b"h:80:80",
            b"h:8 ",
            b"a b",
            b"a/b",
            b"a\\b",
            b"a@b",
            b"a?b",
            b"a#b",
            b"a\0",
            b"a\x02",
            b"\xff",
            b"[::1",
            b"[::1].",
            b"[::1].:98",
            b"[::1]x",
            b"x[::1]",
            b"[a..b]",
            b"[a/b]",
            b"[a%b]",
            b"[[::1]]",
            b"[a]b]",
            b"<a>",
            b"\"a\"",
        ];
        for text in cases {
            assert_eq!(validate(text), Err(InvalidHost), "{:?}", String::from_utf8_lossy(text));
        }
    }

    #[test]
    fn offsets_are_those_of_the_larger_input() {
        let input = b"Host: A.b:1";
        let authority = validate_in(input, Range32::new(6, input.len())).unwrap();
        assert_eq!(authority.name.of(input), b"A.b");
        assert!(!authority.lowercase);
    }
}
