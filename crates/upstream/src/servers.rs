//! Current servers of a group: those of the configuration, with the changes made at run time.
//! (<https://nginx.org/en/docs/http/ngx_http_api_module.html#http_upstreams_http_upstream_name_servers_>)
//!
//! Changes survive a reload under the group's name, unless the reload alters the group's `server` lines. A group with a
//! `state` file stores them there: the file is written before a change takes effect. Servers whose names are resolved
//! repeatedly (`resolve`) cannot be changed.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use gale_runtime::{Moment, PoolError, SocketAddress, default_pool};
use gale_worker::traffic::{HandshakeFigures, TrafficFigures};

use super::Group;
use super::health::HealthFigures;
use super::peer::{ServerSettings, Standing};
use super::peers::View;
use super::queue::QueueFigures;
use super::state_file;

/// Most servers of a group with changes at run time.
pub const SERVERS_MAX: usize = 65_536;

/// A server with a known address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupServer {
    /// Number, unique in the group and never reused.
    pub id: u64,
    /// Its address.
    pub address: SocketAddress,
    /// Name as written.
    pub name: Arc<[u8]>,
    /// Settings.
    pub settings: Arc<ServerSettings>,
}

/// Reason why a group's servers were not changed. The change has had no effect at all.
#[derive(Debug)]
pub enum EditError {
    /// No server has this number.
    NotFound(u64),
    /// A server with this address exists, with this number.
    Exists(u64),
    /// The group would have too many servers.
    TooMany,
    /// The group's state file cannot be written.
    NotWritten(io::Error),
    /// No thread is available.
    Overloaded(PoolError),
    /// Too many changes are waiting.
    Busy,
}

impl fmt::Display for EditError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EditError::NotFound(id) => write!(f, "server with ID \"{id}\" does not exist"),
            EditError::Exists(id) => write!(f, "server with ID \"{id}\" has this address"),
            EditError::TooMany => write!(f, "a group can have at most {SERVERS_MAX} servers"),
            EditError::NotWritten(error) => write!(f, "the state file cannot be written: {error}"),
            EditError::Overloaded(error) => error.fmt(f),
            EditError::Busy => f.write_str("too many changes of the group are pending"),
        }
    }
}

impl std::error::Error for EditError {}

/// Servers of a group during a change, which is applied completely or not at all.
#[derive(Clone, Debug)]
pub struct Editing {
    servers: Vec<GroupServer>,
    next_id: u64,
}

/// Changes made at run time. Groups share ownership, so they end with the last configuration that has the changed
/// lines.
#[derive(Debug)]
pub(super) struct Changes {
    /// Servers of the configuration that was changed.
    configured: Vec<GroupServer>,
    /// Servers before the last change; a reload may have read these from a state file.
    before: Arc<[GroupServer]>,
    changed: Instant,
    pub servers: Arc<[GroupServer]>,
}

/// Longest time from reading a configuration until its servers are requested.
const READING_MAX: Duration = Duration::from_secs(120);

/// Servers in a group's state.
#[derive(Debug, Default)]
pub(super) struct KnownServers {
    /// Numbers of the last known servers.
    numbers: HashMap<SocketAddress, Vec<u64>>,
    next_id: u64,
    changes: Weak<Changes>,
    /// Groups of all configurations in use or being built.
    groups: Vec<Weak<Group>>,
}

impl KnownServers {
    /// Servers of a group with these configured ones, and the changes made to them. `has_file` means that `configured`
    /// was read from a state file.
    pub fn settle(&mut self, configured: &[GroupServer], has_file: bool) -> (Arc<[GroupServer]>, Option<Arc<Changes>>) {
        let changes = self.changes.upgrade().filter(|changes| match has_file {
            false => same_lines(&changes.configured, configured),
            // The file was read before it was written.
            true => changes.changed.elapsed() < READING_MAX && same_lines(&changes.before, configured),
        });
        match changes {
            Some(changes) => (Arc::clone(&changes.servers), Some(changes)),
            None => (self.numbered(configured).into(), None),
        }
    }

    /// Assigns numbers; remaining servers keep theirs.
    fn numbered(&mut self, configured: &[GroupServer]) -> Vec<GroupServer> {
        let mut earlier = std::mem::take(&mut self.numbers);
        earlier.values_mut().for_each(|numbers| numbers.reverse());
        let number = |server: &GroupServer| {
            let id = earlier.get_mut(&server.address).and_then(Vec::pop).unwrap_or_else(|| {
                self.next_id += 1;
                self.next_id - 1
            });
            GroupServer { id, ..server.clone() }
        };
        let numbered: Vec<GroupServer> = configured.iter().map(number).collect();
        self.remember(&numbered);
        numbered
    }

    fn remember(&mut self, servers: &[GroupServer]) {
        self.numbers.clear();
        for server in servers {
            self.numbers.entry(server.address.clone()).or_default().push(server.id);
        }
    }

    fn take(&mut self, edited: Editing, configured: &[GroupServer], before: Arc<[GroupServer]>) -> Arc<Changes> {
        self.next_id = edited.next_id;
        self.remember(&edited.servers);
        let (configured, servers) = (configured.to_vec(), edited.servers.into());
        let changes = Arc::new(Changes { configured, before, changed: Instant::now(), servers });
        self.changes = Arc::downgrade(&changes);
        changes
    }

    /// Registers a group that was built from a configuration.
    pub fn register(&mut self, group: &Arc<Group>) {
        self.groups.retain(|group| group.strong_count() > 0);
        self.groups.push(Arc::downgrade(group));
    }
}

/// `true` if the lines of the configuration are the same, whatever addresses the names have.
fn same_lines(earlier: &[GroupServer], later: &[GroupServer]) -> bool {
    fn lines(servers: &[GroupServer]) -> Vec<(&Arc<[u8]>, &Arc<ServerSettings>)> {
        let mut lines: Vec<_> = servers.iter().map(|server| (&server.name, &server.settings)).collect();
        lines.dedup();
        lines
    }
    lines(earlier) == lines(later)
}

impl Editing {
    /// The servers so far.
    pub fn servers(&self) -> &[GroupServer] {
        &self.servers
    }

    /// Adds a server.
    ///
    /// # Errors
    /// The address exists, or there are too many servers.
    pub fn add(
        &mut self,
        address: SocketAddress,
        name: Arc<[u8]>,
        settings: ServerSettings,
    ) -> Result<GroupServer, EditError> {
        if let Some(known) = self.servers.iter().find(|known| known.address == address) {
            return Err(EditError::Exists(known.id));
        }
        if self.servers.len() >= SERVERS_MAX {
            return Err(EditError::TooMany);
        }
        let server = GroupServer { id: self.next_id, address, name, settings: Arc::new(settings) };
        self.next_id += 1;
        self.servers.push(server.clone());
        Ok(server)
    }

    /// Changes a server's settings.
    ///
    /// # Errors
    /// No server has this number.
    pub fn change(&mut self, id: u64, change: impl FnOnce(&mut ServerSettings)) -> Result<GroupServer, EditError> {
        let server = self.servers.iter_mut().find(|server| server.id == id).ok_or(EditError::NotFound(id))?;
        change(Arc::make_mut(&mut server.settings));
        Ok(server.clone())
    }

    /// Removes a server.
    ///
    /// # Errors
    /// No server has this number.
    pub fn remove(&mut self, id: u64) -> Result<(), EditError> {
        let place = self.servers.iter().position(|server| server.id == id).ok_or(EditError::NotFound(id))?;
        self.servers.remove(place);
        Ok(())
    }

    /// Replaces all servers; those with the same address keep their numbers.
    ///
    /// # Errors
    /// An address occurs twice, or there are too many.
    pub fn replace(
        &mut self,
        servers: Vec<(SocketAddress, Arc<[u8]>, ServerSettings)>,
    ) -> Result<Vec<GroupServer>, EditError> {
        if servers.len() > SERVERS_MAX {
            return Err(EditError::TooMany);
        }
        let mut numbers: HashMap<SocketAddress, Option<u64>> =
            self.servers.iter().map(|server| (server.address.clone(), Some(server.id))).collect();
        let mut used = HashMap::with_capacity(servers.len());
        let mut list = Vec::with_capacity(servers.len());
        for (address, name, settings) in servers {
            let id = numbers.get_mut(&address).and_then(Option::take).unwrap_or_else(|| {
                self.next_id += 1;
                self.next_id - 1
            });
            if let Some(other) = used.insert(address.clone(), id) {
                return Err(EditError::Exists(other));
            }
            list.push(GroupServer { id, address, name, settings: Arc::new(settings) });
        }
        self.servers = list;
        Ok(self.servers.clone())
    }
}

/// Report on a peer, for the API and metrics.
#[derive(Clone, Debug)]
pub struct PeerReport {
    /// Number of its server; `None` if its name is resolved repeatedly.
    pub id: Option<u64>,
    /// Its address.
    pub address: Arc<str>,
    /// Its `server` parameter as written.
    pub server: Arc<[u8]>,
    /// Settings.
    pub settings: Arc<ServerSettings>,
    /// `true` for a backup server.
    pub is_backup: bool,
    /// State in the words of nginx's API.
    pub state: &'static str,
    /// Requests or sessions.
    pub traffic: TrafficFigures,
    /// TLS handshakes with it, if any.
    pub handshakes: Option<HandshakeFigures>,
    /// Time when it was last chosen.
    pub chosen: Option<Moment>,
    /// Failed attempts.
    pub fails: u64,
    /// Times that failures have put it down.
    pub downs: u64,
    /// Start of the current downtime.
    pub down_since: Option<Moment>,
    /// Total downtime.
    pub downtime: Duration,
    /// Statistics of health checks.
    pub health: HealthFigures,
}

impl Group {
    /// Servers with known addresses.
    pub fn servers(&self) -> Arc<[GroupServer]> {
        Arc::clone(&self.source.lock().servers)
    }

    /// Changes the servers in a thread of the default pool, completely or not at all. Requests in flight go on with
    /// their servers.
    ///
    /// # Errors
    /// An error of the change itself; the state file cannot be written; no thread is available; too many changes wait.
    pub async fn edit<T: Send + 'static>(
        self: &Arc<Self>,
        change: impl FnOnce(&mut Editing) -> Result<T, EditError> + Send + 'static,
    ) -> Result<T, EditError> {
        let group = Arc::clone(self);
        // One change at a time, even while a disk is slow to write the file.
        let turn = self.common.state.edits.next().await.ok_or(EditError::Busy)?;
        let edit = move || {
            let result = group.edit_now(change);
            drop(turn);
            result
        };
        match default_pool().run(edit).await {
            Ok(result) => result,
            Err(error) => Err(EditError::Overloaded(error)),
        }
    }

    /// Applies a change; it is this change's turn.
    fn edit_now<T>(&self, change: impl FnOnce(&mut Editing) -> Result<T, EditError>) -> Result<T, EditError> {
        let before = self.servers();
        let next_id = self.common.state.servers.lock().next_id;
        let mut editing = Editing { servers: before.to_vec(), next_id };
        let result = change(&mut editing)?;
        if let Some(path) = &self.common.state_file {
            state_file::write(path, &editing.servers).map_err(EditError::NotWritten)?;
        }
        let (changes, groups) = {
            let mut known = self.common.state.servers.lock();
            (known.take(editing, &self.configured, before), known.groups.clone())
        };
        self.take_changes(&changes);
        // A reload in progress may have built its groups already.
        for group in groups.iter().filter_map(Weak::upgrade) {
            let is_other = !std::ptr::eq(self, &*group);
            if is_other && (self.common.state_file.is_some() || same_lines(&group.configured, &self.configured)) {
                group.take_changes(&changes);
            }
        }
        Ok(result)
    }

    fn take_changes(&self, changes: &Arc<Changes>) {
        let version = {
            let mut source = self.source.lock();
            source.servers = Arc::clone(&changes.servers);
            source.changes = Some(Arc::clone(changes));
            source.version += 1;
            source.version
        };
        self.renew(version);
    }

    /// Current peers, for reports.
    pub fn reported(&self) -> ReportedPeers {
        ReportedPeers(self.view_of(0))
    }

    /// Figures of the queue, if the group has one.
    pub fn queue(&self) -> Option<QueueFigures> {
        self.common.queue.as_ref().map(super::Queue::figures)
    }

    /// Resets the peers' statistics.
    pub fn reset_figures(&self) {
        let view = self.view_of(0);
        for peer in view.peers.primary.peers.iter().chain(&view.peers.backup.peers) {
            peer.state.traffic.reset();
            peer.state.handshakes.get().into_iter().for_each(|handshakes| handshakes.reset());
            peer.state.failures.reset();
            peer.state.health.reset();
        }
        self.common.queue.iter().for_each(super::Queue::reset_figures);
    }

    /// Idle connections kept for all workers.
    pub fn idle_connections(&self) -> usize {
        self.connections().map_or(0, super::Pool::len)
    }

    /// `true` if its method supports backup servers and `slow_start`.
    pub fn has_backups(&self) -> bool {
        self.plan.balance.has_backups()
    }
}

/// Peers of a group at one time. Reports are made one by one, so that other work can run in between.
pub struct ReportedPeers(Arc<View>);

impl ReportedPeers {
    /// Number of peers.
    pub fn len(&self) -> usize {
        self.0.peers.primary.peers.len() + self.0.peers.backup.peers.len()
    }

    /// `true` if there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Report on one peer at this moment of the loops' clock.
    ///
    /// # Panics
    /// Panics if the index is out of range.
    pub fn report(&self, index: usize, now: Moment) -> PeerReport {
        let (primary, backup) = (&self.0.peers.primary.peers, &self.0.peers.backup.peers);
        let is_backup = index >= primary.len();
        let peer = if is_backup { &backup[index - primary.len()] } else { &primary[index] };
        let common = &self.0.common;
        let failures = peer.state.failures.figures(now);
        PeerReport {
            id: peer.server_id,
            address: Arc::clone(&peer.name),
            server: Arc::clone(&peer.server),
            settings: Arc::clone(&peer.settings),
            is_backup,
            state: match peer.settings.standing {
                Standing::Down => "down",
                Standing::Draining => "draining",
                Standing::Up if !common.is_well(peer) => "unhealthy",
                Standing::Up if peer.is_failed(now) || common.has_ejected(peer, now) => "unavail",
                Standing::Up => "up",
            },
            traffic: peer.state.traffic.figures(),
            handshakes: peer.state.handshakes.get().map(|handshakes| handshakes.figures()),
            chosen: peer.state.traffic.chosen().map(Moment::from_nanos),
            fails: failures.attempts,
            downs: failures.downs,
            down_since: failures.down_since,
            downtime: failures.downtime,
            health: peer.state.health.figures(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(port: u16, weight: u32) -> GroupServer {
        let address = SocketAddress::Inet(([127, 0, 0, 1], port).into());
        let settings = Arc::new(ServerSettings { weight, ..ServerSettings::default() });
        GroupServer { id: 0, address, name: format!("127.0.0.1:{port}").into_bytes().into(), settings }
    }

    fn numbers(servers: &[GroupServer]) -> Vec<(u64, u32)> {
        servers.iter().map(|server| (server.id, server.settings.weight)).collect()
    }

    fn add(editing: &mut Editing, server: GroupServer) -> Result<GroupServer, EditError> {
        editing.add(server.address, server.name, (*server.settings).clone())
    }

    /// Changes the servers of a group with this configuration.
    fn edit(known: &mut KnownServers, configured: &[GroupServer], change: impl FnOnce(&mut Editing)) -> Arc<Changes> {
        let has_file = false;
        let (before, _held) = known.settle(configured, has_file);
        let mut editing = Editing { servers: before.to_vec(), next_id: known.next_id };
        change(&mut editing);
        known.take(editing, configured, before)
    }

    #[test]
    fn changes_stay_until_no_configuration_has_their_lines() {
        let mut known = KnownServers::default();
        let lines = vec![server(1, 1), server(2, 1)];
        assert_eq!(numbers(&known.settle(&lines, false).0), [(0, 1), (1, 1)]);
        let changes = edit(&mut known, &lines, |editing| {
            editing.remove(0).unwrap();
            assert_eq!(add(editing, server(3, 7)).unwrap().id, 2);
            editing.change(1, |settings| settings.weight = 5).unwrap();
        });
        assert_eq!(numbers(&known.settle(&lines, false).0), [(1, 5), (2, 7)]);
        // Building other configurations does not affect those in use.
        let others = [server(1, 1), server(2, 3)];
        assert_eq!(numbers(&known.settle(&others, false).0), [(3, 1), (1, 3)]);
        assert_eq!(numbers(&known.settle(&lines, false).0), [(1, 5), (2, 7)]);
        drop(changes);
        assert_eq!(numbers(&known.settle(&lines, false).0), [(3, 1), (1, 1)]);
    }

    #[test]
    fn state_file_overrides_changes_unless_it_was_read_before() {
        let mut known = KnownServers::default();
        let before = vec![server(1, 1)];
        known.settle(&before, true);
        let _changes = edit(&mut known, &before, |editing| drop(add(editing, server(2, 1)).unwrap()));
        assert_eq!(numbers(&known.settle(&before, true).0), [(0, 1), (1, 1)]);
        assert_eq!(numbers(&known.settle(&[server(1, 1), server(2, 1)], true).0), [(0, 1), (1, 1)]);
        assert_eq!(numbers(&known.settle(&[server(2, 4)], true).0), [(1, 4)]);
    }

    #[test]
    fn a_server_that_stands_there_twice_has_two_numbers() {
        let mut known = KnownServers::default();
        let twice = [server(1, 1), server(1, 2), server(2, 1)];
        assert_eq!(numbers(&known.settle(&twice, false).0), [(0, 1), (1, 2), (2, 1)]);
        assert_eq!(numbers(&known.settle(&twice[1..], false).0), [(0, 2), (2, 1)]);
    }

    #[test]
    fn an_address_is_there_once_and_a_number_names_one_server() {
        let mut known = KnownServers::default();
        let lines = [server(1, 1), server(2, 1)];
        edit(&mut known, &lines, check_editing);
    }

    fn check_editing(editing: &mut Editing) {
        assert!(matches!(add(editing, server(2, 9)), Err(EditError::Exists(1))));
        assert!(matches!(editing.remove(7), Err(EditError::NotFound(7))));
        assert!(matches!(editing.change(7, |_| {}), Err(EditError::NotFound(7))));
        let list = |ports: &[u16]| {
            let of = |&port| {
                let GroupServer { address, name, settings, .. } = server(port, 1);
                (address, name, (*settings).clone())
            };
            ports.iter().map(of).collect::<Vec<_>>()
        };
        let replaced = editing.replace(list(&[3, 2])).unwrap();
        assert_eq!(numbers(&replaced), [(2, 1), (1, 1)]);
        assert!(matches!(editing.replace(list(&[4, 2, 4])), Err(EditError::Exists(_))));
        assert_eq!(numbers(editing.servers()), [(2, 1), (1, 1)], "nothing of it has happened");
    }
}
