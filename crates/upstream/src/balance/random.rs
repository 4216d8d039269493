//! Random balancing by weight (`random`), or the better of two random peers (`random two`).

use gale_runtime::{Moment, random_u64};

use super::{LeastTime, Preference, TRIES_MAX};
use crate::peers::{PeerSet, View};
use crate::selection::{Selection, Tried};

impl Selection {
    pub(super) fn pick_by_chance(
        &self,
        preference: Option<Preference>,
        tries: &mut u32,
        view: &View,
        now: Moment,
        lost: &Tried,
    ) -> Option<usize> {
        let set = view.peers.set(self.in_backup);
        if *tries > TRIES_MAX || set.peers.len() < 2 {
            return self.pick_in_turn(view, now, lost);
        }
        if let Some(bound) = self.bound_peer(set, now, lost) {
            return Some(bound);
        }
        let mut first = None;
        while *tries <= TRIES_MAX {
            let drawn = set.at_weight(random_u64() % set.total_weight);
            if first != Some(drawn) && self.is_candidate(set, drawn, now, lost) {
                match (preference, first) {
                    (None, _) => return Some(drawn),
                    (Some(_), None) => first = Some(drawn),
                    (Some(preference), Some(first)) => return Some(preferred(preference, set, first, drawn, now)),
                }
            }
            *tries += 1;
        }
        self.pick_in_turn(view, now, lost)
    }
}

/// The better peer; on a tie the second.
fn preferred(preference: Preference, set: &PeerSet, first: usize, second: usize, now: Moment) -> usize {
    let load = |index: usize| {
        let peer = &set.peers[index];
        match preference {
            Preference::LeastConn => u64::from(peer.state.requests()),
            Preference::LeastTime(metric) => peer.estimated_time(LeastTime { metric, counts_inflight: false }, now),
        }
    };
    let weight = |index: usize| u128::from(set.peers[index].settings.weight);
    let is_worse = u128::from(load(second)) * weight(first) > u128::from(load(first)) * weight(second);
    if is_worse { first } else { second }
}
