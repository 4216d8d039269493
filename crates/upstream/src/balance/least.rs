//! Balancing by least load relative to weight: fewest requests (`least_conn`), or least estimated time to finish the
//! requests in flight (`least_time`). Ties are chosen in turn.

use gale_runtime::Moment;
use smallvec::SmallVec;

use super::LeastTime;
use crate::peers::View;
use crate::selection::{Selection, Tried};

impl Selection {
    pub(super) fn pick_least_conn(&self, view: &View, now: Moment, lost: &Tried) -> Option<usize> {
        let set = view.peers.set(self.in_backup);
        self.pick_least(view, now, lost, |index| u64::from(set.peers[index].state.requests()))
    }

    pub(super) fn pick_least_time(&self, how: LeastTime, view: &View, now: Moment, lost: &Tried) -> Option<usize> {
        let set = view.peers.set(self.in_backup);
        self.pick_least(view, now, lost, |index| {
            let peer = &set.peers[index];
            if how.counts_inflight {
                peer.state.measure_inflight(now);
            }
            peer.estimated_time(how, now)
        })
    }

    fn pick_least(&self, view: &View, now: Moment, lost: &Tried, load: impl Fn(usize) -> u64) -> Option<usize> {
        let set = view.peers.set(self.in_backup);
        if let Some(bound) = self.bound_peer(set, now, lost) {
            return Some(bound);
        }
        // Read once, because other workers change it meanwhile.
        let loads: SmallVec<[(usize, u64); 16]> =
            self.candidates(view, now, lost).into_iter().map(|index| (index, load(index))).collect();
        let weight = |index: usize| u128::from(set.peers[index].settings.weight);
        let mut best = *loads.first()?;
        let mut is_tie = false;
        for &(index, load) in &loads[1..] {
            let (own, least) = (u128::from(load) * weight(best.0), u128::from(best.1) * weight(index));
            match own.cmp(&least) {
                std::cmp::Ordering::Less => (best, is_tie) = ((index, load), false),
                std::cmp::Ordering::Equal => is_tie = true,
                std::cmp::Ordering::Greater => {}
            }
        }
        if !is_tie {
            return Some(best.0);
        }
        let is_equal = |&(index, load): &(usize, u64)| {
            index >= best.0 && u128::from(load) * weight(best.0) == u128::from(best.1) * weight(index)
        };
        let equals = loads.iter().copied().filter(is_equal).map(|(index, _)| index);
        view.cursors()[usize::from(self.in_backup)].round(set, view.common.weight_unit, now, equals, None)
    }
}
