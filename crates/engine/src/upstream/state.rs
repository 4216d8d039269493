//! What is known of a group for as long as some configuration has it: it follows the group's name over a reload, and
//! what is known of a peer follows its address.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::peer::{PeerId, PeerState};

/// See the file's head.
#[derive(Debug, Default)]
pub(super) struct GroupState {
    /// Whoever has a list of peers keeps what is known of them.
    peers: Mutex<HashMap<PeerId, Weak<PeerState>>>,
}

impl GroupState {
    /// What is known of a peer. One that is new is counted by so many workers.
    pub fn peer(&self, id: PeerId, workers: usize) -> Arc<PeerState> {
        let mut peers = self.peers.lock();
        if let Some(known) = peers.get(&id).and_then(Weak::upgrade) {
            return known;
        }
        let state = Arc::new(PeerState::new(workers));
        peers.insert(id, Arc::downgrade(&state));
        state
    }

    /// Forgets the peers that no list has any more.
    pub fn forget_gone(&self) {
        self.peers.lock().retain(|_, state| state.strong_count() > 0);
    }
}
