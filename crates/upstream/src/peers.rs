//! Peers of a group at one time: an immutable list, replaced as a whole.
//!
//! Each worker uses the list through its own [`View`] with its own cursors, so a request writes nothing that workers
//! share.

use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use gale_runtime::Moment;
use parking_lot::{Mutex, MutexGuard};

use super::Common;
use super::balance::{Balance, Points};
use super::peer::{Peer, Standing};

/// Peers of a group at one time.
#[derive(Debug)]
pub(super) struct Peers {
    pub primary: PeerSet,
    pub backup: PeerSet,
}

/// A set of peers to choose from.
#[derive(Debug)]
pub(super) struct PeerSet {
    pub peers: Box<[Peer]>,
    pub total_weight: u64,
    /// Attempts of one request: peers that are not down.
    pub tries: usize,
    /// Cumulative weights by peer, including its own.
    weights: Box<[u64]>,
    /// Index by name for `sticky`; the first peer of a name.
    by_session: HashMap<Arc<str>, usize>,
    /// Points of `hash … consistent`.
    pub points: Option<Points>,
}

impl PeerSet {
    fn new(peers: Vec<Peer>) -> PeerSet {
        let mut total_weight = 0;
        let mut by_session = HashMap::new();
        let weights = peers.iter().enumerate().map(|(index, peer)| {
            if !peer.session_id.is_empty() {
                by_session.entry(Arc::clone(&peer.session_id)).or_insert(index);
            }
            total_weight += u64::from(peer.settings.weight);
            total_weight
        });
        let weights = weights.collect();
        let tries = peers.iter().filter(|peer| peer.settings.standing == Standing::Up).count();
        PeerSet { peers: peers.into(), total_weight, tries, weights, by_session, points: None }
    }

    /// The peer at this position within the sum of weights, from zero.
    pub fn at_weight(&self, weight: u64) -> usize {
        self.weights.partition_point(|&until| until <= weight)
    }

    /// The peer with this name for `sticky`.
    pub fn by_session(&self, id: &str) -> Option<usize> {
        self.by_session.get(id).copied()
    }
}

impl Peers {
    pub fn new(primary: Vec<Peer>, backup: Vec<Peer>, balance: Balance) -> Peers {
        let mut primary = PeerSet::new(primary);
        if balance == Balance::ConsistentHash {
            primary.points = Some(Points::new(&primary.peers, primary.total_weight));
        }
        Peers { primary, backup: PeerSet::new(backup) }
    }

    /// `true` if there is only one peer, which is never put down.
    pub fn is_single(&self) -> bool {
        self.primary.peers.len() == 1 && self.backup.peers.is_empty()
    }

    pub fn set(&self, is_backup: bool) -> &PeerSet {
        if is_backup { &self.backup } else { &self.primary }
    }
}

/// Name of a peer: its address.
#[derive(Debug)]
pub struct PeerName {
    address: Box<str>,
    server: Arc<[u8]>,
}

impl PeerName {
    pub(super) fn of(peer: &Peer) -> Arc<PeerName> {
        Arc::new(PeerName { address: (*peer.name).into(), server: Arc::clone(&peer.server) })
    }

    /// Name of a group, used where there is no server.
    pub fn of_group(name: &str) -> Arc<PeerName> {
        Arc::new(PeerName { address: name.into(), server: Arc::default() })
    }

    /// The `server` parameter as written; empty for a group.
    pub fn server(&self) -> &[u8] {
        &self.server
    }
}

impl Deref for PeerName {
    type Target = str;

    fn deref(&self) -> &str {
        &self.address
    }
}

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self)
    }
}

/// One worker's view of a list.
pub(super) struct View {
    pub common: Arc<Common>,
    pub peers: Arc<Peers>,
    pub worker: usize,
    /// Names of chosen peers, by set. They are this worker's copies, because each request changes their reference
    /// count.
    names: [Box<[OnceLock<Arc<PeerName>>]>; 2],
    /// Only locked by its worker.
    cursors: Mutex<[Cursor; 2]>,
}

/// State of smooth weighted round robin: the current weight of each peer.
///
/// Each round adds its effective weight to every available peer; the highest one is chosen and loses the sum of what
/// was added. Weights 5, 1, 1 give the order a a b a c a a.
#[derive(Debug)]
pub(super) struct Cursor(Box<[i64]>);

impl Cursor {
    fn new(peers: &PeerSet) -> Cursor {
        Cursor(vec![0; peers.peers.len()].into())
    }

    pub fn current_weight(&self, index: usize) -> i64 {
        self.0[index]
    }

    /// Performs a round among `candidates`, ascending. Chooses the highest one (on a tie the first), or `bound` if
    /// given.
    pub fn round(
        &mut self,
        peers: &PeerSet,
        unit: i64,
        now: Moment,
        candidates: impl Iterator<Item = usize>,
        bound: Option<usize>,
    ) -> Option<usize> {
        let mut total = 0;
        let mut best: Option<usize> = None;
        for index in candidates {
            let peer = &peers.peers[index];
            let weight = peer.effective_weight(now, unit);
            self.0[index] += weight;
            total += weight;
            peer.regain_weight();
            if best.is_none_or(|best| self.0[index] > self.0[best]) {
                best = Some(index);
            }
        }
        let chosen = bound.or(best)?;
        self.0[chosen] -= total;
        Some(chosen)
    }
}

impl View {
    pub fn new(common: &Arc<Common>, peers: &Arc<Peers>, worker: usize) -> Arc<View> {
        let cursors = Mutex::new([Cursor::new(&peers.primary), Cursor::new(&peers.backup)]);
        let names = [&peers.primary, &peers.backup].map(|set| set.peers.iter().map(|_| OnceLock::new()).collect());
        Arc::new(View { common: Arc::clone(common), peers: Arc::clone(peers), worker, names, cursors })
    }

    /// Name of a peer, to be kept.
    pub fn name(&self, is_backup: bool, index: usize) -> &Arc<PeerName> {
        let name = || PeerName::of(&self.peers.set(is_backup).peers[index]);
        self.names[usize::from(is_backup)][index].get_or_init(name)
    }

    /// The same worker's view of another list; remaining peers keep their current weights.
    pub fn renewed(&self, peers: &Arc<Peers>, moves: &Moves) -> Arc<View> {
        let view = View::new(&self.common, peers, self.worker);
        let (earlier, mut later) = (self.cursors(), view.cursors());
        for (set, moves) in moves.0.iter().enumerate() {
            moves.iter().for_each(|&(from, to)| later[set].0[to] = earlier[set].0[from]);
        }
        drop(later);
        view
    }

    pub fn cursors(&self) -> MutexGuard<'_, [Cursor; 2]> {
        self.cursors.lock()
    }
}

/// Indices of the same peers in two lists, by set.
pub(super) struct Moves([Vec<(usize, usize)>; 2]);

impl Moves {
    pub fn between(earlier: &Peers, later: &Peers) -> Moves {
        let of_set = |is_backup| {
            let places = earlier.set(is_backup).peers.iter().zip(0..);
            let places: HashMap<_, usize> = places.map(|(peer, place)| (Arc::as_ptr(&peer.state), place)).collect();
            let stays = |(peer, to): (&Peer, usize)| places.get(&Arc::as_ptr(&peer.state)).map(|&from| (from, to));
            later.set(is_backup).peers.iter().zip(0..).filter_map(stays).collect()
        };
        Moves([of_set(false), of_set(true)])
    }
}
