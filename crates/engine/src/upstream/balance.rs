//! The methods by which a peer is chosen among those of a group.

use gale_runtime::Moment;

use super::peers::View;
use super::selection::{Selection, Tried};

/// How a group chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Balance {
    /// In turn, by weight.
    #[default]
    RoundRobin,
}

/// What one request chooses by.
#[derive(Debug)]
pub(super) enum Choice {
    RoundRobin,
}

impl Selection {
    /// The peer of the current set that the group's method chooses.
    pub(super) fn pick(&mut self, view: &View, now: Moment, lost: &Tried) -> Option<usize> {
        match &self.choice {
            Choice::RoundRobin => self.pick_round_robin(view, now, lost),
        }
    }

    fn pick_round_robin(&self, view: &View, now: Moment, lost: &Tried) -> Option<usize> {
        let set = view.peers.set(self.in_backup);
        let candidates = (0..set.peers.len()).filter(|&index| self.is_candidate(set, index, now, lost));
        view.cursors()[usize::from(self.in_backup)].round(set, view.common.weight_unit, now, candidates)
    }
}
