//! WebSockets over HTTP/2 (RFC 8441): a client opens one with an extended CONNECT, as with an upgrade in HTTP/1.
//!
//! The request becomes one of HTTP/1, as section 5 has it: a GET with `Upgrade` and `Connection`, and a key. So all
//! rules of a configuration about upgrades apply, `$http_upgrade` included, and upstream servers need know nothing of
//! HTTP/2. The answer's 101 becomes 200 again; a success that is no tunnel must not look like one.

use std::io;

use gale_protocol::Range32;
use gale_protocol::request::{Framing, HeaderField, KnownHeader, Method, RequestHead};
use gale_runtime::Buffer;

/// The protocol that is known. Another one stays a CONNECT, which no server has.
const WEBSOCKET: &[u8] = b"websocket";

/// Turns an extended CONNECT into a request of HTTP/1. Returns `false` for any other request.
///
/// # Errors
/// No memory for the fields: nothing has changed.
pub(super) fn translate(head: &mut RequestHead, text: &mut Buffer) -> io::Result<bool> {
    let is_websocket = |protocol: Range32| protocol.of(text.readable()).eq_ignore_ascii_case(WEBSOCKET);
    if !head.connect_protocol.is_some_and(is_websocket) {
        return Ok(false);
    }
    let key = key(u128::from(gale_runtime::secret_u64()) << 64 | u128::from(gale_runtime::secret_u64()));
    let start = text.len();
    text.append(&[b"GETUpgradewebsocketConnectionSec-WebSocket-Key", &key[..]].concat())?;
    let mut end = start;
    let mut part = |length: usize| {
        let range = Range32::new(end, end + length);
        end += length;
        range
    };
    head.method = Method::Get;
    head.method_range = part(3);
    let (upgrade, websocket, connection) = (part(7), part(9), part(10));
    head.push(HeaderField { name: upgrade, value: websocket, known: Some(KnownHeader::Upgrade) });
    head.push(HeaderField { name: connection, value: upgrade, known: Some(KnownHeader::Connection) });
    let name = part(17);
    head.push(HeaderField { name, value: part(key.len()), known: None });
    // The next bytes are those of the tunnel.
    head.framing = Framing::None;
    Ok(true)
}

/// Sixteen bytes in base64 (RFC 6455, section 4.1).
fn key(bytes: u128) -> [u8; 24] {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = *b"......................==";
    for (place, digit) in text[..22].iter_mut().enumerate() {
        let shift = 122 - 6 * place as i32;
        let bits = if shift >= 0 { bytes >> shift } else { bytes << -shift };
        *digit = DIGITS[(bits & 63) as usize];
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_sixteen_bytes_in_base64() {
        assert_eq!(&key(0), b"AAAAAAAAAAAAAAAAAAAAAA==");
        assert_eq!(&key(u128::MAX), b"/////////////////////w==");
        // RFC 6455, section 1.3: "the sample nonce".
        assert_eq!(&key(u128::from_be_bytes(*b"the sample nonce")), b"dGhlIHNhbXBsZSBub25jZQ==");
    }
}
