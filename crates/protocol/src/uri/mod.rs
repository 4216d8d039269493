//! Request targets: split into their parts, and paths brought into the form that locations are
//! matched against.
//!
//! Follows nginx where RFC 3986 leaves room: a fragment is cut off, "+" means itself, an encoded
//! slash or dot counts like a plain one. Knows no configuration and no file system. Invariant: a
//! normalised path begins with "/", holds no NUL and no "." or ".." segment, and with
//! `merge_slashes` no empty segment except perhaps the last.

pub mod escape;

use crate::{Offence, Range32};

/// The form of a request target: RFC 9112 §3.2.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Form {
    /// `/path?query`.
    #[default]
    Origin,
    /// `http://host/path?query`.
    Absolute,
    /// `host:port`, only with CONNECT.
    Authority,
    /// `*`, only with OPTIONS.
    Asterisk,
}

/// A request target in its parts, as offsets into the input.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Target {
    /// Which form it has.
    pub form: Form,
    /// True if the path holds no percent-encoding, no "//" and no segment that begins with a dot:
    /// it can be used as it is.
    pub plain: bool,
    /// The scheme of the absolute form, as written.
    pub scheme: Option<Range32>,
    /// Host with port, of the absolute and the authority form; to be checked with
    /// [`crate::host::validate_in`].
    pub host: Option<Range32>,
    /// The raw path without query and fragment; empty for `http://host`, `http://host?query` and in
    /// the authority form.
    pub path: Range32,
    /// What follows the first "?", without fragment.
    pub query: Option<Range32>,
}

impl Target {
    /// The raw path; "/" where it is empty.
    pub fn raw_path<'i>(&self, input: &'i [u8]) -> &'i [u8] {
        if self.path.is_empty() { b"/" } else { self.path.of(input) }
    }

    /// The path that locations are matched against: borrowed where it is plain, otherwise
    /// normalised into `scratch`, which is cleared. The asterisk form gives "*".
    pub fn normalized_path<'a>(
        &self,
        input: &'a [u8],
        merge_slashes: bool,
        scratch: &'a mut Vec<u8>,
    ) -> Result<&'a [u8], Offence> {
        if self.plain || self.form == Form::Asterisk {
            return Ok(self.raw_path(input));
        }
        scratch.clear();
        normalize(self.raw_path(input), merge_slashes, scratch)?;
        Ok(scratch)
    }
}

/// Splits a reference that stands in a document or in a response into a decoded path and arguments. It need not begin
/// with "/" and is not normalised. `None` if it is empty, has a NUL, or a ".." segment, be it encoded.
pub fn split_unsafe(reference: &[u8]) -> Option<(Vec<u8>, &[u8])> {
    let mark = memchr::memchr(b'?', reference);
    let (path, args) = match mark {
        Some(mark) => (&reference[..mark], &reference[mark + 1..]),
        None => (reference, &b""[..]),
    };
    let mut decoded = Vec::new();
    escape::unescape(escape::Unescape::All, path, &mut decoded);
    let is_refused =
        |path: &[u8]| path.contains(&0) || path.split(|&byte| byte == b'/').any(|segment| segment == b"..");
    (!path.is_empty() && !is_refused(path) && !is_refused(&decoded)).then_some((decoded, args))
}

/// Splits a request target in origin, absolute or asterisk form; the offsets are those of `target`.
///
/// Spaces and control characters are refused, bytes from 0x80 are not (as in nginx).
/// Percent-encoding is not looked into: that is [`normalize`]'s part.
pub fn split(target: &[u8]) -> Result<Target, Offence> {
    if target.len() > u32::MAX as usize {
        return Err(Offence::UriTooLong);
    }
    split_in(target, Range32::new(0, target.len()))
}

/// Like [`split`] for a part of a larger input.
pub fn split_in(input: &[u8], range: Range32) -> Result<Target, Offence> {
    let target = range.of(input);
    match target.first() {
        Some(b'/') => split_path(input, range.start(), range.end(), Target::default()),
        Some(byte) if byte.is_ascii_alphabetic() => split_absolute(input, range),
        Some(b'*') if target.len() == 1 => Ok(Target { form: Form::Asterisk, path: range, ..Target::default() }),
        _ => Err(Offence::InvalidRequest),
    }
}

/// The target in origin form that begins at `start` and ends before a space, and where it ends: only for one whose path
/// is plain and that has no fragment. `None` for everything else, the wrong included.
pub(crate) fn split_plain_until_space(input: &[u8], start: usize) -> Option<(Target, usize)> {
    if input.get(start) != Some(&b'/') {
        return None;
    }
    let mut at = start;
    let mut before = b'\0';
    let (path_end, last) = loop {
        let byte = *input.get(at)?;
        if PATH[byte as usize] != ORDINARY {
            match byte {
                b'/' | b'.' if before != b'/' => {}
                b'?' | b' ' => break (at, byte),
                _ => return None,
            }
        }
        before = byte;
        at += 1;
    };
    let mut target = Target { plain: true, path: Range32::new(start, path_end), ..Target::default() };
    if last == b' ' {
        return Some((target, path_end));
    }
    let query = input.get(path_end + 1..)?;
    let length = query.iter().position(|&byte| byte <= b' ' || byte == 0x7f || byte == b'#')?;
    let end = path_end + 1 + length;
    target.query = Some(Range32::new(path_end + 1, end));
    (input[end] == b' ').then_some((target, end))
}

/// Splits the target of CONNECT, `host:port`, where the port must be present: RFC 9110 §9.3.6.
pub fn split_authority(input: &[u8], range: Range32) -> Result<Target, Offence> {
    let end = host_end(input, range.start(), range.end())?;
    let has_port = range.of(input).iter().rposition(|&byte| byte == b':').is_some_and(|colon| colon + 1 < range.len());
    let literal_only = input[range.as_range()].last() == Some(&b']');
    if end != range.end() || !has_port || literal_only {
        return Err(Offence::InvalidRequest);
    }
    let path = Range32::new(range.end(), range.end());
    Ok(Target { form: Form::Authority, plain: true, host: Some(range), path, ..Target::default() })
}

/// Appends the normalised form of a raw path (without query) to `out`, as nginx does for `$uri`:
/// percent-decoding, "." and ".." segments, and with `merge_slashes` runs of slashes.
///
/// An encoded "?", "#" or "%" is an ordinary character of the name; an unencoded "?" or "#" ends
/// the path. Refused with `InvalidRequest`: a path that does not begin with "/", broken
/// percent-encoding, an encoded NUL, ".." above the root.
pub fn normalize(raw_path: &[u8], merge_slashes: bool, out: &mut Vec<u8>) -> Result<(), Offence> {
    if raw_path.first() != Some(&b'/') {
        return Err(Offence::InvalidRequest);
    }
    let root = out.len();
    out.reserve(raw_path.len());
    out.push(b'/');
    let mut segment = out.len(); // where the current segment begins, just behind its slash
    let mut at = 1;
    while let Some(&byte) = raw_path.get(at) {
        at += 1;
        if PATH[byte as usize] == ORDINARY {
            out.push(byte);
            continue;
        }
        let decoded = match byte {
            b'?' | b'#' => break,
            b'%' => {
                let byte = decode_pair(raw_path.get(at..at + 2)).ok_or(Offence::InvalidRequest)?;
                at += 2;
                byte
            }
            byte => byte,
        };
        match decoded {
            0 => return Err(Offence::InvalidRequest),
            b'/' => segment = close_segment(out, root, segment, !merge_slashes)?,
            byte => out.push(byte),
        }
    }
    if matches!(&out[segment..], b"." | b"..") {
        close_segment(out, root, segment, false)?;
    }
    Ok(())
}

/// Ends the segment that begins at `segment` with a slash, which is left out where the path ends
/// with one already, and gives the beginning of the next segment.
fn close_segment(out: &mut Vec<u8>, root: usize, segment: usize, keep_empty: bool) -> Result<usize, Offence> {
    match &out[segment..] {
        b"." => out.truncate(segment),
        b".." => {
            let parents = &out[root..segment - 1];
            let slash = memchr::memrchr(b'/', parents).ok_or(Offence::InvalidRequest)?;
            out.truncate(root + slash + 1);
        }
        b"" if !keep_empty => {}
        _ => out.push(b'/'),
    }
    Ok(out.len())
}

/// The value of two hexadecimal digits.
pub(crate) fn decode_pair(pair: Option<&[u8]>) -> Option<u8> {
    let &[high, low] = pair? else { return None };
    let (high, low) = (HEX_VALUE[high as usize], HEX_VALUE[low as usize]);
    (high < 16 && low < 16).then_some(high << 4 | low)
}

/// Origin form, or what follows the host in the absolute form: path and query.
fn split_path(input: &[u8], start: usize, end: usize, mut target: Target) -> Result<Target, Offence> {
    let mut plain = true;
    let mut after_slash = false;
    let mut path_end = end;
    for (at, &byte) in input[start..end].iter().enumerate() {
        match PATH[byte as usize] {
            ORDINARY => after_slash = false,
            FORBIDDEN => return Err(Offence::InvalidRequest),
            _ => match byte {
                b'/' => {
                    plain &= !after_slash;
                    after_slash = true;
                }
                b'.' => {
                    plain &= !after_slash;
                    after_slash = false;
                }
                b'%' => {
                    plain = false;
                    after_slash = false;
                }
                // A fragment is the client's alone (RFC 9112 §3.2), and servers behind differ in what it ends.
                b'#' => return Err(Offence::InvalidRequest),
                _ => {
                    path_end = start + at; // "?"
                    break;
                }
            },
        }
    }
    target.plain = plain;
    target.path = Range32::new(start, path_end);
    if path_end < end {
        let rest = &input[path_end..end];
        if !is_printable(rest) || rest.contains(&b'#') {
            return Err(Offence::InvalidRequest);
        }
        target.query = Some(Range32::new(path_end + 1, end));
    }
    Ok(target)
}

fn split_absolute(input: &[u8], range: Range32) -> Result<Target, Offence> {
    let target = range.of(input);
    let scheme_length = target
        .iter()
        .position(|byte| !(byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.')))
        .ok_or(Offence::InvalidRequest)?;
    if !target[scheme_length..].starts_with(b"://") {
        return Err(Offence::InvalidRequest);
    }
    let host_start = range.start() + scheme_length + 3;
    let host_end = host_end(input, host_start, range.end())?;
    let parts = Target {
        form: Form::Absolute,
        scheme: Some(Range32::new(range.start(), range.start() + scheme_length)),
        host: Some(Range32::new(host_start, host_end)),
        ..Target::default()
    };
    match input[host_end..range.end()].first() {
        None | Some(b'/' | b'?') => split_path(input, host_end, range.end(), parts),
        Some(_) => Err(Offence::InvalidRequest),
    }
}

/// Where a host with optional port ends: letters, digits, "." and "-", or a bracketed literal (RFC
/// 3986 §3.2.2; nginx takes no other characters in a request line).
fn host_end(input: &[u8], start: usize, limit: usize) -> Result<usize, Offence> {
    let text = &input[start..limit];
    let name_length = if text.first() == Some(&b'[') {
        memchr::memchr(b']', text).ok_or(Offence::InvalidRequest)? + 1
    } else {
        text.iter()
            .position(|byte| !(byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-')))
            .unwrap_or(text.len())
    };
    let port = &text[name_length..];
    let port_length = match port.first() {
        Some(b':') => 1 + port[1..].iter().take_while(|byte| byte.is_ascii_digit()).count(),
        _ => 0,
    };
    Ok(start + name_length + port_length)
}

/// No spaces and no control characters: as one pass without early exit, which the compiler turns
/// into vector instructions.
fn is_printable(text: &[u8]) -> bool {
    text.iter().fold(true, |good, &byte| good & (byte > 0x20) & (byte != 0x7f))
}

const ORDINARY: u8 = 0;
const SPECIAL: u8 = 1;
const FORBIDDEN: u8 = 2;

/// Bytes of a path that mean something, and those that may not be there. [`normalize`] itself lets
/// the forbidden ones but NUL pass: it is also used on paths that were never in a request line.
static PATH: [u8; 256] = {
    let mut classes = [ORDINARY; 256];
    let mut byte = 0;
    while byte <= 0x20 {
        classes[byte] = FORBIDDEN;
        byte += 1;
    }
    classes[0x7f] = FORBIDDEN;
    classes[b'/' as usize] = SPECIAL;
    classes[b'.' as usize] = SPECIAL;
    classes[b'%' as usize] = SPECIAL;
    classes[b'?' as usize] = SPECIAL;
    classes[b'#' as usize] = SPECIAL;
    classes
};

/// The value of a hexadecimal digit, 16 for everything else.
pub(crate) static HEX_VALUE: [u8; 256] = {
    let mut values = [16; 256];
    let mut byte = 0;
    while byte < 256 {
        let b = byte as u8;
        values[byte] = match b {
            b'0'..=b'9' => b - b'0',
            b'a'..=b'f' => b - b'a' + 10,
            b'A'..=b'F' => b - b'A' + 10,
            _ => 16,
        };
        byte += 1;
    }
    values
};
