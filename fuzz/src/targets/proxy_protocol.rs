//! PROXY protocol: parsing at once and byte by byte give the same result, and no value lies outside the header.

use gale_protocol::proxy_protocol::{LENGTH_MAX, Status, parse};

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    let whole = parse(data);
    let first = (0..=data.len()).map(|length| parse(&data[..length])).find(|status| *status != Ok(Status::NeedMore));
    match (&whole, first) {
        (Ok(Status::NeedMore), None) => {}
        (Ok(_), Some(found)) => assert_eq!(whole, found),
        (Err(_), Some(found)) => assert!(found.is_err()),
        (_, None) => panic!("whole it is more than in pieces"),
    }
    let Ok(Status::Complete { consumed, header }) = whole else { return };
    assert!(consumed <= data.len() && consumed <= LENGTH_MAX);
    let Some(header) = header else { return };
    for name in ["alpn", "authority", "ssl_verify", "ssl_cn", "0x04", "ssl_0x25"] {
        let mut value = Vec::new();
        header.append_tlv(name.as_bytes(), &mut value);
        assert!(value.len() <= consumed.max(10));
    }
}
