//! State of a group, kept as long as a configuration has the group. Over reloads it is found by the group's name, and a
//! peer's state by its address.

use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};

use parking_lot::Mutex;

use super::peer::{PeerId, PeerState};
use super::plan::{Findings, Found, Plan, ResolvedServer};
use super::pool::{KeepaliveSettings, Pool};
use super::servers::KnownServers;

#[derive(Debug, Default)]
pub(super) struct GroupState {
    /// Peers' states, owned by the lists of peers.
    peers: Mutex<HashMap<PeerId, Weak<PeerState>>>,
    /// Last known addresses of names.
    found: Mutex<HashMap<NameKey, Arc<[Found]>>>,
    /// Servers with known addresses.
    pub servers: Mutex<KnownServers>,
    /// Serialises changes.
    pub edits: Arc<Turns>,
    /// Idle connections of the newest configuration.
    pool: Mutex<Weak<Pool>>,
}

/// Most changes that wait for a group.
const WAITING_MAX: usize = 64;

/// Asynchronous mutex for event loops and threads. Waiting blocks no thread: a disk that hangs during one change must
/// not use up a pool's threads for the next ones.
#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    is_taken: bool,
    next_number: u64,
    waiting: VecDeque<(u64, Waker)>,
}

/// A turn, which ends when it is dropped.
#[derive(Debug)]
pub(super) struct Turn(Arc<Turns>);

impl Turns {
    /// Waits for a turn; `None` if too many wait.
    pub async fn next(self: &Arc<Turns>) -> Option<Turn> {
        let number = {
            let mut turns = self.0.lock();
            turns.next_number += 1;
            turns.next_number
        };
        let leaving = Leaving { turns: self, number };
        let turn = poll_fn(|context| {
            let mut turns = self.0.lock();
            if !std::mem::replace(&mut turns.is_taken, true) {
                return Poll::Ready(Some(Turn(Arc::clone(self))));
            }
            if let Some(place) = turns.waiting.iter().position(|(known, _)| *known == number) {
                turns.waiting[place].1.clone_from(context.waker());
                return Poll::Pending;
            }
            if turns.waiting.len() >= WAITING_MAX {
                return Poll::Ready(None);
            }
            turns.waiting.push_back((number, context.waker().clone()));
            Poll::Pending
        });
        let turn = turn.await;
        drop(leaving);
        turn
    }

    fn wake_next(&self) {
        let next = self.0.lock().waiting.pop_front();
        next.into_iter().for_each(|(_, waker)| waker.wake());
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.0.lock().is_taken = false;
        self.0.wake_next();
    }
}

/// A waiter that gives up, and may have been woken in vain.
struct Leaving<'t> {
    turns: &'t Turns,
    number: u64,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let mut turns = self.turns.0.lock();
        turns.waiting.retain(|(number, _)| *number != self.number);
        let is_free = !turns.is_taken;
        drop(turns);
        if is_free {
            self.turns.wake_next();
        }
    }
}

/// Name of a server that is resolved repeatedly.
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
    /// State of a peer.
    pub fn peer(&self, id: PeerId) -> Arc<PeerState> {
        let mut peers = self.peers.lock();
        if let Some(known) = peers.get(&id).and_then(Weak::upgrade) {
            return known;
        }
        let state = Arc::new(PeerState::new());
        peers.insert(id, Arc::downgrade(&state));
        state
    }

    /// Removes peers that no list contains any more.
    pub fn forget_gone(&self) {
        self.peers.lock().retain(|_, state| state.strong_count() > 0);
    }

    /// Pool of idle connections for this many workers; the existing one if its settings are the same.
    pub fn pool(&self, settings: KeepaliveSettings, workers: usize) -> Arc<Pool> {
        let mut pool = self.pool.lock();
        if let Some(known) = pool.upgrade().filter(|known| known.is_for(settings, workers)) {
            return known;
        }
        let new = Arc::new(Pool::new(settings, workers));
        *pool = Arc::downgrade(&new);
        new
    }

    /// Last known addresses of these servers' names.
    pub fn findings(&self, plan: &Plan) -> Findings {
        let found = self.found.lock();
        let last = |server| found.get(&NameKey::of(server)).cloned().unwrap_or_default();
        plan.resolved.iter().map(last).collect()
    }

    /// Stores the current addresses of a group's names and forgets all others.
    pub fn remember(&self, plan: &Plan, findings: &Findings) {
        let keys = plan.resolved.iter().map(NameKey::of);
        *self.found.lock() = keys.zip(findings.iter().cloned()).collect();
    }
}
