//! Request targets: splitting into parts, and normalisation of paths for matching locations.
//!
//! Follows nginx where RFC 3986 leaves a choice: "+" stands for itself, and an encoded slash or dot counts like a plain
//! one. No configuration and no file system. Invariant: a normalised path begins with "/", contains no NUL and no "."
//! or ".." segment, and with `merge_slashes` no empty segment except possibly the last.

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

/// The parts of a request target, as offsets into the input.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Target {
    /// Form of the target.
    pub form: Form,
    /// `true` if the path contains no percent-encoding, no "//" and no segment that begins with a dot, so that it needs
    /// no normalisation.
    pub plain: bool,
    /// Scheme of the absolute form, as written.
    pub scheme: Option<Range32>,
    /// Host with port of the absolute and the authority form, not validated: see [`crate::host::validate_in`].
    pub host: Option<Range32>,
    /// Raw path without query; empty for `http://host`, `http://host?query` and in authority form.
    pub path: Range32,
    /// Query after the first "?".
    pub query: Option<Range32>,
}

impl Target {
    /// Returns the raw path, or "/" if it is empty.
    pub fn raw_path<'i>(&self, input: &'i [u8]) -> &'i [u8] {
        if self.path.is_empty() { b"/" } else { self.path.of(input) }
    }

    /// Returns the path for matching locations: borrowed if it is plain, otherwise normalised into `scratch`, which is
    /// cleared. The asterisk form results in "*".
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

/// Splits a reference from a document or response into a decoded path and arguments. The path need not begin with "/"
/// and is not normalised. `None` if the path is empty or contains NUL or a ".." segment, also if encoded.
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

/// Splits a request target in origin, absolute or asterisk form. The offsets in the result refer to `target`.
///
/// Spaces and control characters are refused; bytes from 0x80 are accepted, as in nginx. Percent-encoding is checked
/// only by [`normalize`].
pub fn split(target: &[u8]) -> Result<Target, Offence> {
    if target.len() > u32::MAX as usize {
        return Err(Offence::UriTooLong);
    }
    split_in(target, Range32::new(0, target.len()))
}

/// As [`split`], for a part of a larger input.
pub fn split_in(input: &[u8], range: Range32) -> Result<Target, Offence> {
    let target = range.of(input);
    match target.first() {
        Some(b'/') => split_path(input, range.start(), range.end(), Target::default()),
        Some(byte) if byte.is_ascii_alphabetic() => split_absolute(input, range),
        Some(b'*') if target.len() == 1 => Ok(Target { form: Form::Asterisk, path: range, ..Target::default() }),
        _ => Err(Offence::InvalidRequest),
    }
}

/// Fast path: parses a target in origin form that begins at `start` and ends before a space, with a plain path and
/// without fragment. Returns the target and its end; `None` for all other targets, including invalid ones.
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

/// Splits the target of CONNECT, `host:port`, whose port is required: RFC 9110 §9.3.6.
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

/// Appends the normalised form of a raw path (without query) to `out`, as nginx does for `$uri`: decodes
/// percent-encoding, resolves "." and ".." segments, and with `merge_slashes` merges slashes.
///
/// An encoded "?", "#" or "%" is an ordinary character of the path; an unencoded "?" or "#" ends the path. Refused with
/// `InvalidRequest`: a path that does not begin with "/", invalid percent-encoding, an encoded NUL, ".." above the
/// root.
pub fn normalize(raw_path: &[u8], merge_slashes: bool, out: &mut Vec<u8>) -> Result<(), Offence> {
    if raw_path.first() != Some(&b'/') {
        return Err(Offence::InvalidRequest);
    }
    let root = out.len();
    out.reserve(raw_path.len());
    out.push(b'/');
    let mut segment = out.len(); // start of the current segment, after its slash
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

/// Ends the segment that begins at `segment` with a slash, which is omitted if the path already ends with one. Returns
/// the start of the next segment.
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

/// Returns the value of two hexadecimal digits.
pub(crate) fn decode_pair(pair: Option<&[u8]>) -> Option<u8> {
    let &[high, low] = pair? else { return None };
    let (high, low) = (HEX_VALUE[high as usize], HEX_VALUE[low as usize]);
    (high < 16 && low < 16).then_some(high << 4 | low)
}

/// Splits path and query: the origin form, or the part after the host in absolute form.
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
                // A fragment must not be sent (RFC 9112 §3.2), and upstream servers disagree about the end of the path.
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

/// Returns the end of a host with optional port: letters, digits, "." and "-", or a bracketed literal (RFC 3986 §3.2.2;
/// nginx accepts no other characters in a request line).
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

/// Returns `true` if the text has no spaces and no control characters. A single pass without early exit, so that the
/// compiler can vectorize it.
fn is_printable(text: &[u8]) -> bool {
    text.iter().fold(true, |good, &byte| good & (byte > 0x20) & (byte != 0x7f))
}

const ORDINARY: u8 = 0;
const SPECIAL: u8 = 1;
const FORBIDDEN: u8 = 2;

/// Special and forbidden bytes of a path. [`normalize`] itself accepts the forbidden ones except NUL, because it is
/// also used for paths that were never in a request line.
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

/// Value of a hexadecimal digit; 16 for all other bytes.
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
