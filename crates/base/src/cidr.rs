//! IP networks in nginx's configuration syntax: an address, or `ADDRESS/LENGTH`.
//!
//! Invariant: the bits of a network's address beyond its prefix length are zero.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A network of IPv4 or IPv6 addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    address: IpAddr,
    length: u8,
}

impl Cidr {
    /// Parses a network. The second value is `true` if the address had bits set beyond the prefix length; they are
    /// dropped.
    pub fn parse(text: &[u8]) -> Option<(Cidr, bool)> {
        let text = std::str::from_utf8(text).ok()?;
        let (address, length) = match text.split_once('/') {
            Some((address, length)) => (address, Some(length)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().ok()?;
        let length_max = if address.is_ipv4() { 32 } else { 128 };
        let length = match length {
            Some(length) => crate::units::parse_number(length.as_bytes()).filter(|&length| length <= length_max)?,
            None => length_max,
        };
        let cidr = Cidr::new(address, length as u8);
        Some((cidr, cidr.address != address))
    }

    /// Returns the network that contains only this address.
    pub fn of(address: IpAddr) -> Cidr {
        Cidr { address, length: if address.is_ipv4() { 32 } else { 128 } }
    }

    fn new(address: IpAddr, length: u8) -> Cidr {
        let address = match address {
            IpAddr::V4(address) => IpAddr::V4(Ipv4Addr::from_bits(address.to_bits() & mask_v4(length))),
            IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & mask_v6(length))),
        };
        Cidr { address, length }
    }

    /// The first address of the network.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// The prefix length in bits.
    pub fn length(&self) -> u8 {
        self.length
    }

    /// Returns `true` for an IPv4 network.
    pub fn is_v4(&self) -> bool {
        self.address.is_ipv4()
    }

    /// Returns `true` if the address belongs to the network. An IPv4-mapped IPv6 address counts as IPv6.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V4(own), IpAddr::V4(other)) => other.to_bits() & mask_v4(self.length) == own.to_bits(),
            (IpAddr::V6(own), IpAddr::V6(other)) => other.to_bits() & mask_v6(self.length) == own.to_bits(),
            _ => false,
        }
    }
}

fn mask_v4(length: u8) -> u32 {
    u32::MAX.checked_shl(32 - u32::from(length)).unwrap_or(0)
}

fn mask_v6(length: u8) -> u128 {
    u128::MAX.checked_shl(128 - u32::from(length)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn contains(network: &str, address: &str) -> bool {
        let (cidr, _) = Cidr::parse(network.as_bytes()).unwrap();
        cidr.contains(address.parse().unwrap())
    }

    #[test]
    fn addresses_belong_to_networks() {
        assert!(contains("10.0.0.0/8", "10.255.0.1") && !contains("10.0.0.0/8", "11.0.0.0"));
        assert!(contains("0.0.0.0/0", "255.255.255.255") && contains("::/0", "ffff::"));
        assert!(contains("192.0.2.1", "192.0.2.1") && !contains("192.0.2.1", "192.0.2.0"));
        assert!(contains("2001:db8::/33", "2001:db8:7fff::1") && !contains("2001:db8::/33", "2001:db8:8000::1"));
        assert!(!contains("::/0", "192.0.2.1") && !contains("0.0.0.0/0", "::1"));
        assert!(!contains("0.0.0.0/0", "::ffff:192.0.2.1") && contains("::ffff:0:0/96", "::ffff:192.0.2.1"));
    }

    #[test]
    fn bits_behind_the_length_are_told_and_dropped() {
        let (cidr, has_low_bits) = Cidr::parse(b"192.0.2.7/24").unwrap();
        assert!(has_low_bits && cidr.contains("192.0.2.1".parse().unwrap()));
        assert!(!Cidr::parse(b"192.0.2.0/24").unwrap().1);
        assert!(Cidr::parse(b"2001:db8::1/64").unwrap().1);
    }

    #[test]
    fn malformed_networks_are_refused() {
        let wrong =
            ["", "x", "1.2.3", "1.2.3.4/", "1.2.3.4/33", "1.2.3.4/-1", "::/129", "::1/x", "1.2.3.4 ", "/8", "[::1]"];
        for text in wrong {
            assert_eq!(Cidr::parse(text.as_bytes()), None, "{text}");
        }
    }
}
