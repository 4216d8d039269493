//! Address of a server in directives: `192.0.2.1`, `[2001:db8::1]:53`, `name:53`, `unix:/path`.
//!
//! Only parses the text; the caller resolves names. Errors are nginx's without their place: `invalid port`, to be
//! followed by `in resolver "…"`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use bstr::ByteSlice;
use gale_base::units;

/// A server's address as written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerAddress {
    /// An address with a port.
    Inet(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
    /// A host name with a port, to be resolved.
    Host(String, u16),
}

/// Addresses of a host name; empty before the configuration is complete.
#[derive(Clone, Debug, Default)]
pub struct HostAddresses(Arc<OnceLock<Vec<IpAddr>>>);

impl HostAddresses {
    /// Addresses found when the configuration was built.
    pub fn get(&self) -> &[IpAddr] {
        self.0.get().map_or(&[], |addresses| addresses)
    }

    /// Sets the addresses, once, when the configuration is complete.
    pub fn set(&self, addresses: Vec<IpAddr>) {
        // The first and only call.
        drop(self.0.set(addresses));
    }
}

impl ServerAddress {
    /// Parses an address; `port_default` is for one without a port.
    ///
    /// # Errors
    /// The fault, in nginx's words.
    pub fn parse(text: &[u8], port_default: u16) -> Result<ServerAddress, &'static str> {
        if text.len() >= 5 && text[..5].eq_ignore_ascii_case(b"unix:") {
            let path = text[5..].to_path().map_err(|_| "invalid path")?;
            return match path.as_os_str().is_empty() {
                true => Err("no path in the unix domain socket"),
                false => Ok(ServerAddress::Unix(path.to_owned())),
            };
        }
        if let Some(rest) = text.strip_prefix(b"[") {
            return parse_bracketed(rest, port_default);
        }
        if text.contains_str("/") || text.contains_str("?") {
            return Err("invalid host");
        }
        let (host, port) = match text.split_once_str(":") {
            Some((host, port)) => (host, parse_port(port)?),
            None => (text, port_default),
        };
        if host.is_empty() {
            return Err("no host");
        }
        let host = host.to_str().map_err(|_| "host not found")?;
        Ok(match host.parse::<Ipv4Addr>() {
            Ok(address) => ServerAddress::Inet(SocketAddr::new(IpAddr::V4(address), port)),
            Err(_) => ServerAddress::Host(host.to_owned(), port),
        })
    }
}

/// Parses the text after a `[`.
fn parse_bracketed(text: &[u8], port_default: u16) -> Result<ServerAddress, &'static str> {
    let (host, rest) = text.split_once_str("]").ok_or("invalid host")?;
    if rest.contains_str("/") {
        return Err("invalid host");
    }
    let port = match rest.strip_prefix(b":") {
        Some(port) => parse_port(port)?,
        None if rest.is_empty() => port_default,
        None => return Err("invalid host"),
    };
    if host.is_empty() {
        return Err("no host");
    }
    let address = host.to_str().ok().and_then(|host| host.parse::<Ipv6Addr>().ok()).ok_or("invalid IPv6 address")?;
    Ok(ServerAddress::Inet(SocketAddr::new(IpAddr::V6(address), port)))
}

fn parse_port(text: &[u8]) -> Result<u16, &'static str> {
    let port = units::parse_number(text).and_then(|port| u16::try_from(port).ok());
    port.filter(|&port| port > 0).ok_or("invalid port")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<String, &'static str> {
        ServerAddress::parse(text.as_bytes(), 53).map(|address| match address {
            ServerAddress::Inet(address) => address.to_string(),
            ServerAddress::Unix(path) => format!("unix {}", path.display()),
            ServerAddress::Host(host, port) => format!("{host} {port}"),
        })
    }

    #[test]
    fn every_form_of_an_address() {
        let cases = [
            ("192.0.2.1", "192.0.2.1:53"),
            ("192.0.2.1:5353", "192.0.2.1:5353"),
            ("[2001:db8::1]", "[2001:db8::1]:53"),
            ("[2001:db8::1]:5353", "[2001:db8::1]:5353"),
            ("ns.example", "ns.example 53"),
            ("ns.example:5353", "ns.example 5353"),
            ("1.2.3", "1.2.3 53"),
            ("unix:/run/x", "unix /run/x"),
        ];
        for (text, expected) in cases {
            assert_eq!(parse(text).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn wrong_addresses_give_nginx_s_errors() {
        let cases = [
            ("", "no host"),
            (":53", "no host"),
            ("192.0.2.1:", "invalid port"),
            ("192.0.2.1:0", "invalid port"),
            ("192.0.2.1:65536", "invalid port"),
            ("192.0.2.1:5x", "invalid port"),
            ("2001:db8::1", "invalid port"),
            ("192.0.2.1/53", "invalid host"),
            ("ns.example?x", "invalid host"),
            ("[2001:db8::1", "invalid host"),
            ("[2001:db8::1]x", "invalid host"),
            ("[2001:db8::1]:", "invalid port"),
            ("[]", "no host"),
            ("[192.0.2.1]", "invalid IPv6 address"),
            ("unix:", "no path in the unix domain socket"),
        ];
        for (text, expected) in cases {
            assert_eq!(parse(text), Err(expected), "{text}");
        }
    }
}
