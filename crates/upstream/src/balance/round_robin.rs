//! Smooth weighted round robin. (See [`Cursor`](crate::peers::Cursor).)

use gale_runtime::Moment;

use crate::peers::View;
use crate::selection::{Selection, Tried};

impl Selection {
    /// Chooses in turn. The session's own peer is preferred; its requests count in the round, bounded so that the other
    /// peers do not get ahead too far.
    pub(super) fn pick_in_turn(&self, view: &View, now: Moment, lost: &Tried) -> Option<usize> {
        let set = view.peers.set(self.in_backup);
        let unit = view.common.weight_unit;
        let cursor = &mut view.cursors()[usize::from(self.in_backup)];
        let bound = self.bound_peer(set, now, lost);
        if let Some(bound) = bound {
            let own_weight = u64::from(set.peers[bound].settings.weight);
            let others = i64::try_from(set.total_weight - own_weight).unwrap_or(i64::MAX).saturating_mul(unit);
            if cursor.current_weight(bound) <= -others {
                return Some(bound);
            }
        }
        let candidates = (0..set.peers.len()).filter(|&index| self.is_candidate(set, index, now, lost));
        cursor.round(set, unit, now, candidates, bound)
    }
}
