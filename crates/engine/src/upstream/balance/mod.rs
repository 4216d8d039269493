//! The methods by which a peer is chosen among those of a group, each in nginx's order.
//!
//! A method looks at the peers that can be chosen (up, not tried, not failed, not full) and names one; the
//! [`Selection`] takes its place. A session that is bound to a peer goes first, whatever the method.

mod hash;
mod least;
mod random;
mod round_robin;

use gale_runtime::Moment;
use smallvec::SmallVec;

use super::peers::View;
use super::selection::{Selection, Tried};
use hash::Hashing;
pub(super) use hash::Points;

/// How a group chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Balance {
    /// In turn, by weight.
    #[default]
    RoundRobin,
    /// `least_conn`: the one with the fewest requests for its weight, in turn among equals.
    LeastConn,
    /// `least_time`: the one that will probably be done first.
    LeastTime(LeastTime),
    /// `ip_hash`: by the client's address.
    IpHash,
    /// `hash KEY`
    Hash,
    /// `hash KEY consistent`
    ConsistentHash,
    /// `random [two [METHOD]]`: by chance and weight; of two that chance has drawn, the one that the method prefers.
    Random(Option<Preference>),
}

/// `least_time`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeastTime {
    /// What is measured.
    pub metric: Metric,
    /// `inflight`: whether the time of requests that have no answer yet counts.
    pub counts_inflight: bool,
}

/// Which time of a response counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Until the connection was there (`connect`).
    Connect,
    /// Until its header was there (`header`), or its first byte (`first_byte`).
    Header,
    /// Until all of it was there (`last_byte`).
    LastByte,
}

/// Which one of two is preferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preference {
    /// The one with fewer requests for its weight.
    LeastConn,
    /// The one that will probably be done first.
    LeastTime(Metric),
}

impl Balance {
    /// Whether servers may be backups and start slowly with it, as in nginx.
    pub fn has_backups(self) -> bool {
        matches!(self, Balance::RoundRobin | Balance::LeastConn | Balance::LeastTime(_))
    }

    /// Whether the requests that a peer has are counted.
    pub(super) fn counts_requests(self) -> bool {
        matches!(self, Balance::LeastConn | Balance::LeastTime(_) | Balance::Random(Some(_)))
    }

    /// Whether the time of responses is measured.
    pub(super) fn measures_time(self) -> bool {
        matches!(self, Balance::LeastTime(_) | Balance::Random(Some(Preference::LeastTime(_))))
    }

    /// Whether the requests count that a peer has not answered yet.
    pub(super) fn counts_inflight(self) -> bool {
        matches!(self, Balance::LeastTime(LeastTime { counts_inflight: true, .. }))
    }
}

/// Peers that a hash or chance leads to and that cannot be chosen before it is gone on in turn, as in nginx.
const TRIES_MAX: u32 = 20;

/// What one request chooses by.
#[derive(Debug)]
pub(super) enum Choice {
    RoundRobin,
    LeastConn,
    LeastTime(LeastTime),
    Hash(Hashing),
    Random { preference: Option<Preference>, tries: u32 },
}

impl Choice {
    /// What a request chooses by; `key` is the hash key or the client's address.
    pub fn new(balance: Balance, view: &View, key: &[u8]) -> Choice {
        match balance {
            Balance::RoundRobin => Choice::RoundRobin,
            Balance::LeastConn => Choice::LeastConn,
            Balance::LeastTime(how) => Choice::LeastTime(how),
            Balance::IpHash => Choice::Hash(Hashing::by_address(key)),
            Balance::Hash => Choice::Hash(Hashing::by_key(key)),
            Balance::ConsistentHash => Choice::Hash(Hashing::consistent(key, &view.peers.primary)),
            Balance::Random(preference) => Choice::Random { preference, tries: 0 },
        }
    }

    /// Whether the backup servers are at first chosen in turn.
    pub fn falls_back_in_turn(&self) -> bool {
        matches!(self, Choice::Hash(_) | Choice::Random { .. })
    }
}

/// The peers of a set that can be chosen, ascending.
pub(super) type Candidates = SmallVec<[usize; 16]>;

impl Selection {
    /// The peer of the current set that the group's method chooses. Those in `lost` cannot be chosen.
    pub(super) fn pick(&mut self, view: &View, now: Moment, lost: &Tried) -> Option<usize> {
        // The choice leaves the selection while it counts its tries.
        let mut choice = std::mem::replace(&mut self.choice, Choice::RoundRobin);
        let picked = match &mut choice {
            Choice::RoundRobin => self.pick_in_turn(view, now, lost),
            Choice::LeastConn => self.pick_least_conn(view, now, lost),
            Choice::LeastTime(how) => self.pick_least_time(*how, view, now, lost),
            Choice::Hash(hashing) => self.pick_by_hash(hashing, view, now, lost),
            Choice::Random { preference, tries } => self.pick_by_chance(*preference, tries, view, now, lost),
        };
        self.choice = choice;
        picked
    }

    fn candidates(&self, view: &View, now: Moment, lost: &Tried) -> Candidates {
        let set = view.peers.set(self.in_backup);
        (0..set.peers.len()).filter(|&index| self.is_candidate(set, index, now, lost)).collect()
    }
}
