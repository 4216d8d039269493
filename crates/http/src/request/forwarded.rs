//! `X-Forwarded-For`: the client's address behind trusted servers.
//!
//! Every server appends its client's address, so a list is read from its end, as far as its addresses are trusted.

use std::net::{IpAddr, SocketAddr};

use gale_base::units;

/// Returns the client's address from the field's values: the last address, which our own (trusted) peer wrote, or with
/// `is_recursive` the last address that is not itself trusted. `None` if there is no address.
pub fn client(values: &[&[u8]], is_recursive: bool, trusts: impl Fn(IpAddr) -> bool) -> Option<SocketAddr> {
    let mut client = None;
    for value in values.iter().rev() {
        let mut rest: &[u8] = value;
        let mut says_anything = false;
        while let Some(address) = take_last(&mut rest) {
            client = Some(address);
            says_anything = true;
            if !is_recursive || !trusts(address.ip().to_canonical()) {
                return client;
            }
        }
        // The rest cannot be parsed: addresses before it are not trusted.
        if !says_anything || rest.iter().any(|byte| !is_separator(byte)) {
            return client;
        }
    }
    client
}

fn is_separator(byte: &u8) -> bool {
    matches!(byte, b' ' | b',')
}

/// Removes the last address of a list and returns it; `None`, with the list unchanged, if there is none or it cannot be
/// parsed.
fn take_last(list: &mut &[u8]) -> Option<SocketAddr> {
    let end = list.iter().rposition(|byte| !is_separator(byte))? + 1;
    let start = list[..end].iter().rposition(is_separator).map_or(0, |before| before + 1);
    let address = parse_address(&list[start..end])?;
    *list = &list[..start];
    Some(address)
}

/// Parses an address, with or without a port. An IPv6 address may have brackets, and with a port must have them.
pub fn parse_address(text: &[u8]) -> Option<SocketAddr> {
    let text = std::str::from_utf8(text).ok()?;
    if let Ok(address) = text.parse::<IpAddr>() {
        return Some(SocketAddr::new(address, 0));
    }
    if let Some(address) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) {
        return Some(SocketAddr::new(address.parse().ok()?, 0));
    }
    let (address, port) = text.rsplit_once(':')?;
    let address = match address.strip_prefix('[') {
        Some(address) => IpAddr::V6(address.strip_suffix(']')?.parse().ok()?),
        None => IpAddr::V4(address.parse().ok()?),
    };
    let port =
        units::parse_number(port.as_bytes()).and_then(|port| u16::try_from(port).ok()).filter(|&port| port > 0)?;
    Some(SocketAddr::new(address, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(is_recursive: bool, values: &[&str]) -> Option<String> {
        let values: Vec<&[u8]> = values.iter().map(|value| value.as_bytes()).collect();
        let found = client(&values, is_recursive, |address| address.to_string().starts_with("10."));
        found.map(|address| if address.port() == 0 { address.ip().to_string() } else { address.to_string() })
    }

    #[track_caller]
    fn is(is_recursive: bool, values: &[&str], expected: &str) {
        assert_eq!(find(is_recursive, values).as_deref(), Some(expected), "{values:?}");
    }

    #[test]
    fn the_last_address_counts() {
        is(false, &["192.0.2.1"], "192.0.2.1");
        is(false, &["192.0.2.1, 10.1.1.1"], "10.1.1.1");
        is(false, &["192.0.2.1", "192.0.2.2 ,, "], "192.0.2.2");
        is(false, &["2001:db8::1"], "2001:db8::1");
    }

    #[test]
    fn the_last_address_counts_that_is_not_trusted() {
        is(true, &["192.0.2.1, 192.0.2.2, 10.1.1.1"], "192.0.2.2");
        is(true, &["192.0.2.1, 10.1.1.1", "10.1.1.2"], "192.0.2.1");
        is(true, &["10.1.1.1,10.1.1.2"], "10.1.1.1");
        is(true, &["192.0.2.1, ::ffff:10.1.1.2"], "192.0.2.1");
    }

    #[test]
    fn what_cannot_be_understood_ends_the_list() {
        assert_eq!(find(false, &["x"]), None);
        assert_eq!(find(true, &["192.0.2.1, x"]), None);
        assert_eq!(find(true, &[""]), None);
        assert_eq!(find(true, &[]), None);
        is(true, &["192.0.2.1, unknown, 10.1.1.1"], "10.1.1.1");
        is(true, &["192.0.2.1", "x, 10.1.1.1"], "10.1.1.1");
        is(true, &["192.0.2.1", "", "10.1.1.1"], "10.1.1.1");
    }

    #[test]
    fn addresses_may_have_ports() {
        is(false, &["192.0.2.1:80"], "192.0.2.1:80");
        is(false, &["[2001:db8::1]:80"], "[2001:db8::1]:80");
        is(false, &["[2001:db8::1]"], "2001:db8::1");
        for wrong in
            ["192.0.2.1:0", "192.0.2.1:65536", "192.0.2.1:", "[192.0.2.1]:1x", "[2001:db8::1", "[::1]x:1", ":80"]
        {
            assert_eq!(find(false, &[wrong]), None, "{wrong}");
        }
    }
}
