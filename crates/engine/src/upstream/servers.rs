//! The servers of a group as they are now: those of the configuration, until some are added, changed or removed at run
//! time.
//! (<https://nginx.org/en/docs/http/ngx_http_api_module.html#http_upstreams_http_upstream_name_servers_>)
//!
//! Changes follow the group's name over a reload, unless the reload alters the group's `server` lines. A group with a
//! `state` file has them there, too: the file is written before a change counts. Servers whose names are asked for
//! again and again (`resolve`) are the configuration's alone.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use gale_runtime::{Moment, PoolError, SocketAddress, default_pool};

use super::Group;
use super::health::HealthFigures;
use super::peer::{ServerSettings, Standing};
use super::peers::View;
use super::queue::QueueFigures;
use super::state_file;
use crate::traffic::{HandshakeFigures, TrafficFigures};

/// Most servers that a group may have by changes at run time.
pub const SERVERS_MAX: usize = 65_536;

/// A server of a group whose address is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupServer {
    /// Its number, which no other server of the group gets.
    pub id: u64,
    /// Its address.
    pub address: SocketAddress,
    /// As it is written.
    pub name: Arc<[u8]>,
    /// Its parameters.
    pub settings: Arc<ServerSettings>,
}

/// Why the servers of a group are not changed. Nothing of the change has happened then.
#[derive(Debug)]
pub enum EditError {
    /// There is no server of this number.
    NotFound(u64),
    /// There is a server of this address: its number.
    Exists(u64),
    /// The group would have more servers than it may.
    TooMany,
    /// The group's state file cannot be written.
    NotWritten(io::Error),
    /// No thread could be had for it.
    Overloaded(PoolError),
    /// Too many changes wait.
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

/// The servers of a group while they are changed: all of the changes happen, or none.
#[derive(Clone, Debug)]
pub struct Editing {
    servers: Vec<GroupServer>,
    next_id: u64,
}

/// What was changed at run time. Whichever group has it keeps it: it ends with the last configuration whose lines it
/// belongs to.
#[derive(Debug)]
pub(super) struct Changes {
    /// The servers of the configuration that was changed.
    configured: Vec<GroupServer>,
    /// The servers before the last change, which a state file may have had when a reload read it.
    before: Arc<[GroupServer]>,
    changed: Instant,
    pub servers: Arc<[GroupServer]>,
}

/// How long reading a configuration may take at most, until its servers are asked for.
const READING_MAX: Duration = Duration::from_secs(120);

/// What a group's state knows of its servers.
#[derive(Debug, Default)]
pub(super) struct KnownServers {
    /// The numbers of those that were there last.
    numbers: HashMap<SocketAddress, Vec<u64>>,
    next_id: u64,
    changes: Weak<Changes>,
    /// The groups of all configurations that are in use or being built.
    groups: Vec<Weak<Group>>,
}

impl KnownServers {
    /// The servers of a group of which the configuration says this, and what was changed of them. `has_file`: these are
    /// what a state file has.
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

    /// A server that stays keeps its number.
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

    /// A group is made of what the configuration says.
    pub fn register(&mut self, group: &Arc<Group>) {
        self.groups.retain(|group| group.strong_count() > 0);
        self.groups.push(Arc::downgrade(group));
    }
}

/// Whether the lines of the configuration are the same, whatever addresses names stand for.
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
    /// There is one of this address, or there are as many as may be.
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

    /// Gives a server other parameters.
    ///
    /// # Errors
    /// There is none of this number.
    pub fn change(&mut self, id: u64, change: impl FnOnce(&mut ServerSettings)) -> Result<GroupServer, EditError> {
        let server = self.servers.iter_mut().find(|server| server.id == id).ok_or(EditError::NotFound(id))?;
        change(Arc::make_mut(&mut server.settings));
        Ok(server.clone())
    }

    /// Removes a server.
    ///
    /// # Errors
    /// There is none of this number.
    pub fn remove(&mut self, id: u64) -> Result<(), EditError> {
        let place = self.servers.iter().position(|server| server.id == id).ok_or(EditError::NotFound(id))?;
        self.servers.remove(place);
        Ok(())
    }

    /// Puts other servers in the place of all: those whose addresses stay keep their numbers.
    ///
    /// # Errors
    /// An address is there twice, or there are more than may be.
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

/// What is known of one peer, for those who ask from outside.
#[derive(Clone, Debug)]
pub struct PeerReport {
    /// The number of its server; `None` for one whose name is asked for.
    pub id: Option<u64>,
    /// Its address.
    pub address: Arc<str>,
    /// Its server, as it is written.
    pub server: Arc<[u8]>,
    /// Its parameters.
    pub settings: Arc<ServerSettings>,
    /// Whether it is asked only when no other one can be.
    pub is_backup: bool,
    /// Whether it gets requests, in the words of nginx's API.
    pub state: &'static str,
    /// Its requests, or sessions.
    pub traffic: TrafficFigures,
    /// Handshakes with it, if there were any.
    pub handshakes: Option<HandshakeFigures>,
    /// When it was chosen last.
    pub chosen: Option<Moment>,
    /// How many attempts have come to nothing.
    pub fails: u64,
    /// How often they have put it down.
    pub downs: u64,
    /// Since when it is.
    pub down_since: Option<Moment>,
    /// How long it was down, all in all.
    pub downtime: Duration,
    /// What checks have come to.
    pub health: HealthFigures,
}

impl Group {
    /// The servers whose addresses are known.
    pub fn servers(&self) -> Arc<[GroupServer]> {
        Arc::clone(&self.source.lock().servers)
    }

    /// Changes the servers, in a thread of the default pool: all of it happens, or nothing. Requests under way go on
    /// with the servers that they began with.
    ///
    /// # Errors
    /// Those of the change; the state file cannot be written; no thread can be had; too many others wait.
    pub async fn edit<T: Send + 'static>(
        self: &Arc<Self>,
        change: impl FnOnce(&mut Editing) -> Result<T, EditError> + Send + 'static,
    ) -> Result<T, EditError> {
        let group = Arc::clone(self);
        // One change after the other, also while a disk takes its time with the file.
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

    /// It is this thread's turn.
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
        // A reload that is under way may have been built already.
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

    /// The peers by now, of which something can be told.
    pub fn reported(&self) -> ReportedPeers {
        ReportedPeers(self.view_of(0))
    }

    /// How many requests wait, and how many were turned away, if the group has a queue: with how many may wait.
    pub fn queue(&self) -> Option<QueueFigures> {
        self.common.queue.as_ref().map(super::Queue::figures)
    }

    /// Forgets what was counted of the peers.
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

    /// How many idle connections are kept for all workers.
    pub fn idle_connections(&self) -> usize {
        self.connections().map_or(0, super::Pool::len)
    }

    /// Whether its method knows backup servers and slow starts.
    pub fn has_backups(&self) -> bool {
        self.plan.balance.has_backups()
    }
}

/// The peers of a group at one time. Asking for one after the other leaves room for others in between.
pub struct ReportedPeers(Arc<View>);

impl ReportedPeers {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.peers.primary.peers.len() + self.0.peers.backup.peers.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What is known of one of them at this moment of the loops' clock.
    ///
    /// # Panics
    /// There are not so many.
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

    /// Changes what a group has, as its configuration says it.
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
        // One that is only built changes nothing for those that are in use.
        let others = [server(1, 1), server(2, 3)];
        assert_eq!(numbers(&known.settle(&others, false).0), [(3, 1), (1, 3)]);
        assert_eq!(numbers(&known.settle(&lines, false).0), [(1, 5), (2, 7)]);
        drop(changes);
        assert_eq!(numbers(&known.settle(&lines, false).0), [(3, 1), (1, 1)]);
    }

    #[test]
    fn a_state_file_goes_before_what_was_changed_unless_it_was_read_before() {
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
