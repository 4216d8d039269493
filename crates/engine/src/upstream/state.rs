//! What is known of a group for as long as some configuration has it: it follows the group's name over a reload, and
//! what is known of a peer follows its address.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::peer::{PeerId, PeerState};
use super::plan::{Findings, Found, Plan, ResolvedServer};
use super::pool::{KeepaliveSettings, Pool};
use super::servers::KnownServers;

/// See the file's head.
#[derive(Debug, Default)]
pub(super) struct GroupState {
    /// Whoever has a list of peers keeps what is known of them.
    peers: Mutex<HashMap<PeerId, Weak<PeerState>>>,
    /// What names stood for last.
    found: Mutex<HashMap<NameKey, Arc<[Found]>>>,
    /// The servers whose addresses are known.
    pub servers: Mutex<KnownServers>,
    /// Held while they are changed.
    pub editing: Mutex<()>,
    /// The idle connections of the newest configuration.
    pool: Mutex<Weak<Pool>>,
}

/// The name of a server that is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct NameKey {
    host: Arc<str>,
    service: Option<Arc<str>>,
}

impl NameKey {
    fn of(server: &ResolvedServer) -> NameKey {
        NameKey { host: Arc::clone(&server.host), service: server.service.clone() }
    }
}

impl GroupState {
    /// What is known of a peer.
    pub fn peer(&self, id: PeerId) -> Arc<PeerState> {
        let mut peers = self.peers.lock();
        if let Some(known) = peers.get(&id).and_then(Weak::upgrade) {
            return known;
        }
        let state = Arc::new(PeerState::new());
        peers.insert(id, Arc::downgrade(&state));
        state
    }

    /// Forgets the peers that no list has any more.
    pub fn forget_gone(&self) {
        self.peers.lock().retain(|_, state| state.strong_count() > 0);
    }

    /// A pool of idle connections for so many workers: that of before, if it has the same settings.
    pub fn pool(&self, settings: KeepaliveSettings, workers: usize) -> Arc<Pool> {
        let mut pool = self.pool.lock();
        if let Some(known) = pool.upgrade().filter(|known| known.is_for(settings, workers)) {
            return known;
        }
        let new = Arc::new(Pool::new(settings, workers));
        *pool = Arc::downgrade(&new);
        new
    }

    /// What the names of these servers stood for last.
    pub fn findings(&self, plan: &Plan) -> Findings {
        let found = self.found.lock();
        let last = |server| found.get(&NameKey::of(server)).cloned().unwrap_or_default();
        plan.resolved.iter().map(last).collect()
    }

    /// Remembers what the names of a group stand for now, and no others.
    pub fn remember(&self, plan: &Plan, findings: &Findings) {
        let keys = plan.resolved.iter().map(NameKey::of);
        *self.found.lock() = keys.zip(findings.iter().cloned()).collect();
    }
}
