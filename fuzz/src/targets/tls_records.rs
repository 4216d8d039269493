//! Bytes in pieces to a server that speaks TLS: it ends the connection with an alert or without, and keeps nothing.

use std::time::Duration;

use gale_runtime::Bytes;
use gale_runtime::simulation::Sending;

use crate::world::{ADDRESS, serve};

/// Content types of TLS records (RFC 8446, section 5.1) that a server sends in the clear.
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    let Some((&size, records)) = data.split_first() else { return };
    let configuration = format!(
        "server {{ listen {ADDRESS} ssl; access_log off; ssl_certificate /certificate.pem; \
         ssl_certificate_key /key.pem; return 200 secret; }}"
    );
    let piece = usize::from(size).max(1);
    let sends = vec![Sending::Pieces(Bytes::from(records.to_vec()), piece, Duration::from_millis(1))];
    let received = serve(&configuration, sends).expect("it is right").received;
    // A request in the clear is answered in the clear, with an error; one without a version, by its page alone.
    let plain: [&[u8]; 3] = [b"HTTP/1.1 4", b"HTTP/1.1 5", b"<html>"];
    let is_plain = plain.iter().any(|beginning| received.starts_with(beginning));
    assert!(is_plain || received.first().is_none_or(|kind| [ALERT, HANDSHAKE].contains(kind)));
    assert!(!received.windows(6).any(|window| window == b"secret"));
}
