//! Percent-encoding in nginx's classes, its reverse, and the escaping of HTML and JSON.
//!
//! Which bytes a class encodes is nginx's choice (a superset of what RFC 3986 demands), so that
//! redirects and proxied requests look the same. Invariant: unescaping undoes escaping in every
//! class.

use super::decode_pair;

/// Where the escaped text will stand, and so which bytes must be encoded besides control characters
/// and bytes from 0x7f.
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
    /// A URL in a Refresh header: space `"` `'` `<` `>` `\` `^` `` ` `` `{` `|` `~`; an existing
    /// encoding stays.
    Refresh,
    /// A memcached key: control characters, space and `%` only; bytes from 0x7f stay.
    Memcached,
}

/// Appends `text` to `out`, encoding what `class` demands.
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

/// How many bytes of `text` would be encoded: the escaped text is longer by twice that many.
pub fn count_escapes(class: Class, text: &[u8]) -> usize {
    let map = class.map();
    text.iter().filter(|&&byte| map[byte as usize]).count()
}

/// What to decode, and where to stop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unescape {
    /// Everything.
    All,
    /// A URI: ends behind the first "?", plain or encoded, where the arguments begin.
    Uri,
    /// The target of a redirect: only printable characters above "%" are decoded, and it ends
    /// behind the first plain "?".
    Redirect,
}

/// Appends the decoded `text` to `out` and returns how many bytes of `text` were used: fewer than
/// all where [`Unescape`] stops at a "?". Broken encodings are dropped as nginx does: "%" with what
/// follows it, up to the first byte that is no digit.
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

/// nginx's treatment of a broken encoding: "%" is dropped; a first byte that is no digit is kept; a
/// digit is dropped together with the byte after it.
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

/// Appends `text` to `out` as the inside of a JSON string (RFC 8259 §7). What is no UTF-8 stays as it is.
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
// "~" and not "}": so in nginx's table, presumably a slip of one bit, but visible in its answers.
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

/// Control characters, space, bytes from 0x7f and the listed ones.
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
