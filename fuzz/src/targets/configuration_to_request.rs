//! A configuration and the bytes of a client, separated by a line `--`: the server refuses the configuration or serves,
//! no task panics, and nothing is left of the connection.

use std::time::Duration;

use gale_runtime::Bytes;
use gale_runtime::simulation::Sending;

use crate::world::{ADDRESS, is_safe, serve};

const SEPARATOR: &[u8] = b"\n--\n";

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    let Some(at) = data.windows(SEPARATOR.len()).position(|window| window == SEPARATOR) else { return };
    let (text, client) = (&data[..at], &data[at + SEPARATOR.len()..]);
    let Some((&size, client)) = client.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    if !is_safe(text.as_bytes()) {
        return;
    }
    let configuration = format!("server {{ listen {ADDRESS}; http2 on; root /www; access_log off; {text} }}");
    let piece = usize::from(size).max(1);
    let sends = vec![Sending::Pieces(Bytes::from(client.to_vec()), piece, Duration::from_millis(1))];
    serve(&configuration, sends);
}
