//! The peers of a group at one time: a list that never changes, and that is replaced as a whole.
//!
//! Each worker looks at the list through a [`View`] of its own, with its own cursors: the workers share nothing that a
//! request writes to.

use std::sync::Arc;

use gale_runtime::Moment;
use parking_lot::{Mutex, MutexGuard};

use super::Common;
use super::peer::{Peer, Standing};

/// See the file's head.
#[derive(Debug)]
pub(super) struct Peers {
    pub primary: PeerSet,
    pub backup: PeerSet,
}

/// The peers among which one is chosen.
#[derive(Debug, Default)]
pub(super) struct PeerSet {
    pub peers: Box<[Peer]>,
    pub total_weight: u64,
    /// How many requests may be tried on: peers that are not down.
    pub tries: usize,
}

impl PeerSet {
    pub fn new(peers: Vec<Peer>) -> PeerSet {
        let total_weight = peers.iter().map(|peer| u64::from(peer.settings.weight)).sum();
        let tries = peers.iter().filter(|peer| peer.settings.standing == Standing::Up).count();
        PeerSet { peers: peers.into(), total_weight, tries }
    }
}

impl Peers {
    pub fn new(primary: Vec<Peer>, backup: Vec<Peer>) -> Peers {
        Peers { primary: PeerSet::new(primary), backup: PeerSet::new(backup) }
    }

    /// Whether there is one peer and no other: it is never put down.
    pub fn is_single(&self) -> bool {
        self.primary.peers.len() == 1 && self.backup.peers.is_empty()
    }

    pub fn set(&self, is_backup: bool) -> &PeerSet {
        if is_backup { &self.backup } else { &self.primary }
    }
}

/// One worker's view of a list.
pub(super) struct View {
    pub common: Arc<Common>,
    pub peers: Arc<Peers>,
    pub worker: usize,
    /// Only its worker locks it.
    cursors: Mutex<[Cursor; 2]>,
}

/// Where smooth weighted round robin stands: the current weight of every peer.
///
/// Each round adds to every peer that can be chosen its effective weight, the highest one is chosen, and loses what all
/// others have got: peers of weights 5, 1, 1 come as a a b a c a a.
#[derive(Debug)]
pub(super) struct Cursor(Box<[i64]>);

impl Cursor {
    fn new(peers: &PeerSet) -> Cursor {
        Cursor(vec![0; peers.peers.len()].into())
    }

    /// A round among `candidates`, ascending: the one that is chosen. On a tie it is the first.
    pub fn round(
        &mut self,
        peers: &PeerSet,
        unit: i64,
        now: Moment,
        candidates: impl Iterator<Item = usize>,
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
        if let Some(best) = best {
            self.0[best] -= total;
        }
        best
    }
}

impl View {
    pub fn new(common: &Arc<Common>, peers: &Arc<Peers>, worker: usize) -> Arc<View> {
        let cursors = Mutex::new([Cursor::new(&peers.primary), Cursor::new(&peers.backup)]);
        Arc::new(View { common: Arc::clone(common), peers: Arc::clone(peers), worker, cursors })
    }

    pub fn cursors(&self) -> MutexGuard<'_, [Cursor; 2]> {
        self.cursors.lock()
    }
}
