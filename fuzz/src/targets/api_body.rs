//! Bodies sent to nginx's commercial API with `write=on`: a server is added, changed and all are replaced with them.
//! Each request is answered, and the list of servers can be read afterwards.

use gale_runtime::Bytes;
use gale_runtime::simulation::Sending;

use crate::world::{ADDRESS, serve};

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    let configuration = format!(
        "upstream group {{ zone group 64k; server 192.0.2.7; }}
         server {{ listen {ADDRESS}; access_log off; location /api {{ api write=on; }} }}"
    );
    let mut sent = Vec::new();
    for (method, id) in [("POST", ""), ("PATCH", "/0"), ("PUT", "")] {
        let length = data.len();
        let head = format!(
            "{method} /api/9/http/upstreams/group/servers{id} HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n\r\n"
        );
        sent.extend_from_slice(head.as_bytes());
        sent.extend_from_slice(data);
    }
    sent.extend_from_slice(b"GET /api/9/http/upstreams/group/servers HTTP/1.0\r\n\r\n");
    let transcript = serve(&configuration, vec![Sending::Bytes(Bytes::from(sent))]).expect("it is right");
    let text = String::from_utf8_lossy(&transcript.received);
    let statuses: Vec<&str> = text.match_indices("HTTP/1.1 ").map(|(at, _)| &text[at + 9..at + 12]).collect();
    assert_eq!(statuses.len(), 4, "{text}");
    assert!(statuses[..3].iter().all(|status| ["200", "201", "400", "404", "409", "415"].contains(status)), "{text}");
    assert_eq!(statuses[3], "200", "{text}");
}
