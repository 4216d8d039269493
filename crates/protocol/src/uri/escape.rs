//! Percent-encoding in nginx's classes, decoding, and escaping for HTML and JSON.
//!
//! Each class encodes the same bytes as in nginx (a superset of those required by RFC 3986), so that redirects and
//! proxied requests are identical. Invariant: decoding reverses encoding in every class that encodes `%`: all but
//! [`Class::Refresh`].

use super::decode_pair;

/// Use of the escaped text. It determines which bytes are encoded besides control characters and bytes from 0x7f.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// A path: space `"` `#` `%` `<` `>` `?` `\` `^` `` ` `` `{` `|` `}`.
    Uri,
    /// One argument: as [`Class::Uri`], and `&` `+` `;`.
    Args,
    /// Everything but letters, digits, `-` `.` `_` `~`: RFC 3986 §2.3.
    Component,
    /// A link inside HTML: as [`Class::Uri`] with `'`, but not `?`.
    Html,
    /// A URL in a Refresh header: space `"` `'` `<` `>` `\` `^` `` ` `` `{` `|` `~`; existing percent-encoding is kept.
    Refresh,
    /// A memcached key: only control characters, space and `%`; bytes from 0x7f are kept.
    Memcached,
}

/// Appends `text` to `out`, encoding the bytes of `class`.
pub fn escape(class: Class, text: &[u8], out: &mut Vec<u8>) {
    let map = class.map();
    out.reserve(text.len());
    for &byte in text {
        if map[byte as usize] {
            out.extend_from_slice(&[b'%', HEX[(byte >> 4) as usize], HEX[(byte & 15) as usize]]);
        } else {
            out.push(byte);
        }
    }
}

/// Returns the number of bytes that would be encoded; each makes the escaped text two bytes longer.
pub fn count_escapes(class: Class, text: &[u8]) -> usize {
    let map = class.map();
    text.iter().filter(|&&byte| map[byte as usize]).count()
}

/// Scope of decoding.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unescape {
    /// Decodes everything.
    All,
    /// A URI: ends after the first "?", plain or encoded, where the arguments begin.
    Uri,
    /// The target of a redirect: only printable characters above "%" are decoded, and it ends after the first plain
    /// "?".
    Redirect,
}

/// Appends the decoded `text` to `out` and returns the number of bytes of `text` processed, which is smaller if
/// [`Unescape`] ends at a "?". As in nginx, an invalid encoding loses its "%", and if a hexadecimal digit follows, also
/// that and the byte behind it.
pub fn unescape(kind: Unescape, text: &[u8], out: &mut Vec<u8>) -> usize {
    out.reserve(text.len());
    let mut at = 0;
    while let Some(&byte) = text.get(at) {
        at += 1;
        if byte == b'?' && kind != Unescape::All {
            out.push(byte);
            return at;
        }
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let Some(decoded) = decode_pair(text.get(at..at + 2)) else {
            at = drop_broken(text, at, out);
            continue;
        };
        let pair = &text[at - 1..at + 2];
        at += 2;
        match kind {
            Unescape::All => out.push(decoded),
            Unescape::Uri => {
                out.push(decoded);
                if decoded == b'?' {
                    return at;
                }
            }
            Unescape::Redirect if decoded == b'?' => {
                out.push(decoded);
                return at;
            }
            Unescape::Redirect if decoded > b'%' && decoded < 0x7f => out.push(decoded),
            Unescape::Redirect => out.extend_from_slice(pair),
        }
    }
    at
}

/// Handles an invalid encoding, whose "%" is before `at`, and returns where the text goes on. A byte that is no
/// hexadecimal digit is kept; a digit is dropped with the byte behind it.
fn drop_broken(text: &[u8], at: usize, out: &mut Vec<u8>) -> usize {
    match text.get(at) {
        None => at,
        Some(byte) if byte.is_ascii_hexdigit() => (at + 2).min(text.len()),
        Some(&byte) => {
            out.push(byte);
            at + 1
        }
    }
}

/// Appends `text` to `out` with `<`, `>`, `&` and `"` as HTML entities.
pub fn escape_html(text: &[u8], out: &mut Vec<u8>) {
    for &byte in text {
        match byte {
            b'<' => out.extend_from_slice(b"&lt;"),
            b'>' => out.extend_from_slice(b"&gt;"),
            b'&' => out.extend_from_slice(b"&amp;"),
            b'"' => out.extend_from_slice(b"&quot;"),
            byte => out.push(byte),
        }
    }
}

/// Appends `text` to `out` as the content of a JSON string (RFC 8259 §7). Invalid UTF-8 is kept.
pub fn escape_json(text: &[u8], out: &mut Vec<u8>) {
    for &byte in text {
        let short = match byte {
            b'"' | b'\\' => byte,
            b'\n' => b'n',
            b'\r' => b'r',
            b'\t' => b't',
            8 => b'b',
            12 => b'f',
            0..0x20 => {
                out.extend_from_slice(&[b'\\', b'u', b'0', b'0', HEX[(byte >> 4) as usize], HEX[(byte & 15) as usize]]);
                continue;
            }
            byte => {
                out.push(byte);
                continue;
            }
        };
        out.extend_from_slice(&[b'\\', short]);
    }
}

static HEX: [u8; 16] = *b"0123456789ABCDEF";

impl Class {
    fn map(self) -> &'static [bool; 256] {
        match self {
            Self::Uri => &URI,
            Self::Args => &ARGS,
            Self::Component => &COMPONENT,
            Self::Html => &HTML,
            Self::Refresh => &REFRESH,
            Self::Memcached => &MEMCACHED,
        }
    }
}

static URI: [bool; 256] = not_allowed(b"\"#%<>?\\^`{|}");
static ARGS: [bool; 256] = not_allowed(b"\"#%&+;<>?\\^`{|}");
static HTML: [bool; 256] = not_allowed(b"\"#%'<>\\^`{|}");
// "~" and not "}": as in nginx's table, presumably a one-bit mistake, but visible in its responses.
static REFRESH: [bool; 256] = not_allowed(b"\"'<>\\^`{|~");
static COMPONENT: [bool; 256] = {
    let mut map = [true; 256];
    let mut byte = 0;
    while byte < 256 {
        let b = byte as u8;
        map[byte] = !(b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b'~'));
        byte += 1;
    }
    map
};
static MEMCACHED: [bool; 256] = {
    let mut map = [false; 256];
    let mut byte = 0;
    while byte <= 0x20 {
        map[byte] = true;
        byte += 1;
    }
    map[b'%' as usize] = true;
    map
};

/// Marks control characters, space, bytes from 0x7f and the listed ones.
const fn not_allowed(listed: &[u8]) -> [bool; 256] {
    let mut map = [false; 256];
    let mut byte = 0;
    while byte < 256 {
        map[byte] = byte <= 0x20 || byte >= 0x7f;
        byte += 1;
    }
    let mut index = 0;
    while index < listed.len() {
        map[listed[index] as usize] = true;
        index += 1;
    }
    map
}
