//! What a `resolver` directive says; `configuration/resolver.rs` reads it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::figures::ResolverZone;
use crate::server_address::HostAddresses;

/// One `resolver` directive.
#[derive(Debug)]
pub struct ResolverSettings {
    pub(crate) servers: Vec<NameServer>,
    /// `valid=`: how long answers are believed, whatever they say themselves.
    pub valid: Option<Duration>,
    /// Whether IPv4 addresses are asked for. One of the two is.
    pub ipv4: bool,
    /// Whether IPv6 addresses are asked for.
    pub ipv6: bool,
    /// `status_zone=`: where questions and answers are counted.
    pub zone: Option<Arc<ResolverZone>>,
}

#[derive(Debug)]
pub(crate) enum NameServer {
    Address(SocketAddr),
    /// A name, looked up with the configuration.
    Host(HostAddresses, u16),
}

impl ResolverSettings {
    /// These servers and no parameters.
    pub fn new(servers: impl IntoIterator<Item = SocketAddr>) -> ResolverSettings {
        let servers = servers.into_iter().map(NameServer::Address).collect();
        ResolverSettings { servers, valid: None, ipv4: true, ipv6: true, zone: None }
    }

    /// The name servers' addresses, in order.
    pub fn servers(&self) -> Vec<SocketAddr> {
        let addresses = |server: &NameServer| match server {
            NameServer::Address(address) => vec![*address],
            NameServer::Host(host, port) => host.get().iter().map(|&ip| SocketAddr::new(ip, *port)).collect(),
        };
        self.servers.iter().flat_map(addresses).collect()
    }
}
