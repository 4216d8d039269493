//! What is known of a group for as long as some configuration has it: it follows the group's name over a reload, and
//! what is known of a peer follows its address.

use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};

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
    /// Whose turn it is to change them.
    pub edits: Arc<Turns>,
    /// The idle connections of the newest configuration.
    pool: Mutex<Weak<Pool>>,
}

/// How many wait at most to change a group.
const WAITING_MAX: usize = 64;

/// One after the other, on whichever loop or thread. Nobody waits in a thread: a disk that hangs under one change must
/// not take a pool's threads for the next ones.
#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    is_taken: bool,
    next_number: u64,
    waiting: VecDeque<(u64, Waker)>,
}

/// A turn, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn(Arc<Turns>);

impl Turns {
    /// Waits for a turn; none if too many wait.
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

/// Who no longer waits, and may have been woken for nothing.
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
