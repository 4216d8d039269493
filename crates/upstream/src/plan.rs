//! Builds a list of peers from a group's servers and the addresses found for their names.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use gale_runtime::SocketAddress;

use super::Balance;
use super::peer::{Peer, PeerId, ServerSettings, address_name};
use super::peers::Peers;
use super::servers::GroupServer;
use super::state::GroupState;
use super::sticky::default_session_id;

/// Servers of a group.
#[derive(Debug)]
pub(super) struct Plan {
    pub balance: Balance,
    /// `true` if peers have names for `sticky`.
    pub is_sticky: bool,
    /// Servers with known addresses.
    pub fixed: Vec<FixedServer>,
    /// Servers whose names are resolved repeatedly.
    pub resolved: Vec<ResolvedServer>,
}

#[derive(Debug)]
pub(super) struct FixedServer {
    pub addresses: Vec<SocketAddress>,
    /// The parameter as written.
    pub name: Arc<[u8]>,
    pub settings: Arc<ServerSettings>,
}

/// A server with `resolve`.
#[derive(Debug)]
pub(super) struct ResolvedServer {
    pub host: Arc<str>,
    /// `service`
    pub service: Option<Arc<str>>,
    pub port: u16,
    /// The parameter as written.
    pub name: Arc<[u8]>,
    pub settings: Arc<ServerSettings>,
}

/// An address of a name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Found {
    pub ip: IpAddr,
    /// SRV fields, if it came from a service.
    pub service: Option<FoundService>,
}

/// Fields of an SRV record.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct FoundService {
    pub port: u16,
    /// Name of the server.
    pub name: Arc<str>,
    pub weight: u16,
    /// `true` unless the record has the best priority.
    pub is_secondary: bool,
}

/// Addresses found, by resolved server.
pub(super) type Findings = Vec<Arc<[Found]>>;

impl Plan {
    /// One server for each known address, without numbers.
    pub fn configured(&self) -> Vec<GroupServer> {
        let of = |server: &FixedServer| {
            let (name, settings) = (Arc::clone(&server.name), Arc::clone(&server.settings));
            let with = move |address: &SocketAddress| GroupServer {
                id: 0,
                address: address.clone(),
                name: Arc::clone(&name),
                settings: Arc::clone(&settings),
            };
            server.addresses.iter().map(with).collect::<Vec<_>>()
        };
        self.fixed.iter().flat_map(of).collect()
    }

    /// Peers of these servers and of the addresses found for the others.
    pub fn list(
        &self,
        servers: &[GroupServer],
        findings: &[Arc<[Found]>],
        state: &GroupState,
        workers: usize,
    ) -> Peers {
        let occurrences = HashMap::new();
        let mut list = List { plan: self, state, workers, primary: Vec::new(), backup: Vec::new(), occurrences };
        for server in servers {
            let GroupServer { id, address, name, settings } = server;
            list.add(Some(*id), address.clone(), name, settings, settings.is_backup);
        }
        for (server, found) in self.resolved.iter().zip(findings) {
            for found in found.iter() {
                list.add_found(server, found);
            }
        }
        let peers = Peers::new(list.primary, list.backup, self.balance);
        state.forget_gone();
        peers
    }
}

struct List<'p> {
    plan: &'p Plan,
    state: &'p GroupState,
    workers: usize,
    primary: Vec<Peer>,
    backup: Vec<Peer>,
    occurrences: HashMap<SocketAddress, u32>,
}

impl List<'_> {
    fn add(
        &mut self,
        server_id: Option<u64>,
        address: SocketAddress,
        server: &Arc<[u8]>,
        settings: &Arc<ServerSettings>,
        is_backup: bool,
    ) {
        let occurrence = self.occurrences.entry(address.clone()).or_insert(0);
        let id = PeerId { address: address.clone(), occurrence: *occurrence };
        *occurrence += 1;
        let name = address_name(&address);
        let session_id = match &settings.route {
            _ if !self.plan.is_sticky => Arc::default(),
            Some(route) => Arc::clone(route),
            None => default_session_id(&name),
        };
        let state = self.state.peer(id);
        if self.plan.balance.counts_requests() {
            state.count_requests(self.workers);
        }
        let (server, settings) = (Arc::clone(server), Arc::clone(settings));
        let peer = Peer { server_id, address, name, server, settings, session_id, state };
        if is_backup { &mut self.backup } else { &mut self.primary }.push(peer);
    }

    fn add_found(&mut self, server: &ResolvedServer, found: &Found) {
        let is_backup = server.settings.is_backup;
        let address = |port| SocketAddress::Inet(SocketAddr::new(found.ip, port));
        match &found.service {
            None => self.add(None, address(server.port), &server.name, &server.settings, is_backup),
            // Secondary servers of a service that is itself a backup are not used.
            Some(service) if is_backup && service.is_secondary => {}
            Some(service) => {
                // A weight in the configuration overrides the service's.
                let mut settings = Arc::clone(&server.settings);
                if settings.weight == 1 && service.weight > 1 {
                    settings = Arc::new(ServerSettings { weight: service.weight.into(), ..(*settings).clone() });
                }
                let name = Arc::from(service.name.as_bytes());
                self.add(None, address(service.port), &name, &settings, is_backup || service.is_secondary);
            }
        }
    }
}
