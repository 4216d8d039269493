//! Framing of a request body, strictly according to RFC 9112 §6: if two programs disagree here, requests can be
//! smuggled.

use crate::request::{Framing, Method, Version};
use crate::{Offence, Range32};

/// Decides on the framing. The head parser has checked that the fields are unique.
pub(super) fn decide(
    input: &[u8],
    method: Method,
    version: Version,
    content_length: Option<Range32>,
    transfer_encoding: Option<Range32>,
) -> Result<Framing, Offence> {
    let framing = match (content_length, transfer_encoding) {
        (None, None) => return Ok(Framing::None),
        (Some(length), None) => Framing::Length(parse_length(length.of(input)).ok_or(Offence::InvalidContentLength)?),
        (_, Some(_)) if version < Version::Http11 => return Err(Offence::TransferEncodingInHttp10),
        (length, Some(value)) => {
            check_codings(value.of(input)).map_err(|fault| match fault {
                CodingFault::Malformed => Offence::InvalidTransferEncoding,
                CodingFault::NotImplemented => Offence::UnknownTransferEncoding { value },
            })?;
            if length.is_some() {
                return Err(Offence::LengthAndTransferEncoding);
            }
            Framing::Chunked
        }
    };
    if method == Method::Connect && framing != Framing::Length(0) {
        return Err(Offence::ConnectWithBody);
    }
    Ok(framing)
}

/// Parses a length: one or more digits and nothing else, at most 2⁶³−1 (the maximum file offset).
pub(crate) fn parse_length(value: &[u8]) -> Option<u64> {
    if value.is_empty() {
        return None;
    }
    let mut length: u64 = 0;
    for byte in value {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        length = length.checked_mul(10)?.checked_add(u64::from(digit))?;
    }
    (length <= i64::MAX as u64).then_some(length)
}

enum CodingFault {
    Malformed,
    NotImplemented,
}

/// Accepts only `chunked`. Of all other values, malformed lists and `chunked` before another coding or twice are the
/// client's fault (400); other codings are not implemented (501).
fn check_codings(value: &[u8]) -> Result<(), CodingFault> {
    if value.eq_ignore_ascii_case(b"chunked") {
        return Ok(());
    }
    let mut chunked_before = false;
    let mut fault = CodingFault::NotImplemented;
    for coding in value.split(|&byte| byte == b',').map(<[u8]>::trim_ascii) {
        if coding.is_empty() || !coding.iter().all(|&byte| super::field_line::is_token_byte(byte)) {
            return Err(CodingFault::Malformed);
        }
        let is_chunked = coding.eq_ignore_ascii_case(b"chunked");
        let is_registered = is_chunked || REGISTERED.iter().any(|name| coding.eq_ignore_ascii_case(name.as_bytes()));
        if !is_registered {
            return Err(CodingFault::NotImplemented);
        }
        if chunked_before {
            fault = CodingFault::Malformed;
        }
        chunked_before |= is_chunked;
    }
    Err(fault)
}

/// Transfer codings other than `chunked`: RFC 9112 §7.2 and the IANA registry. (`identity` was withdrawn.)
const REGISTERED: &[&str] = &["compress", "deflate", "gzip", "x-compress", "x-gzip"];
