//! Settings of a `resolver` directive; `configuration/resolver.rs` parses it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use gale_config::server_address::HostAddresses;

use super::figures::ResolverZone;

/// One `resolver` directive.
#[derive(Debug)]
pub struct ResolverSettings {
    /// Name servers, asked in turn.
    pub servers: Vec<NameServer>,
    /// `valid=`: overrides the time to live of answers.
    pub valid: Option<Duration>,
    /// `true` if IPv4 addresses are resolved. At least one of the two is.
    pub ipv4: bool,
    /// `true` if IPv6 addresses are resolved.
    pub ipv6: bool,
    /// `status_zone=`: counters of questions and responses.
    pub zone: Option<Arc<ResolverZone>>,
}

/// A name server.
#[derive(Debug)]
pub enum NameServer {
    /// Its address.
    Address(SocketAddr),
    /// A name, resolved with the configuration.
    Host(HostAddresses, u16),
}

impl ResolverSettings {
    /// These servers without parameters.
    pub fn new(servers: impl IntoIterator<Item = SocketAddr>) -> ResolverSettings {
        let servers = servers.into_iter().map(NameServer::Address).collect();
        ResolverSettings { servers, valid: None, ipv4: true, ipv6: true, zone: None }
    }

    /// Addresses of the name servers, in order.
    pub fn servers(&self) -> Vec<SocketAddr> {
        let addresses = |server: &NameServer| match server {
            NameServer::Address(address) => vec![*address],
            NameServer::Host(host, port) => host.get().iter().map(|&ip| SocketAddr::new(ip, *port)).collect(),
        };
        self.servers.iter().flat_map(addresses).collect()
    }
}
