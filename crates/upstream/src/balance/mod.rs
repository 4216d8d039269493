//! Balancing methods, each in nginx's order.
//!
//! A method picks one of the available peers (up, not tried, not failed, not full); the [`Selection`] takes its place.
//! A peer that the session is bound to is preferred, whatever the method.

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

/// Balancing method of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Balance {
    /// In turn, by weight (smooth weighted round robin).
    #[default]
    RoundRobin,
    /// `least_conn`: fewest requests relative to weight, ties in turn.
    LeastConn,
    /// `least_time`: least estimated time to finish.
    LeastTime(LeastTime),
    /// `ip_hash`: hash of the client's address.
    IpHash,
    /// `hash KEY`
    Hash,
    /// `hash KEY consistent`
    ConsistentHash,
    /// `random [two [METHOD]]`: random by weight; with `two`, the better of two random peers.
    Random(Option<Preference>),
}

/// `least_time`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeastTime {
    /// Time that is measured.
    pub metric: Metric,
    /// `inflight`: requests without a response count.
    pub counts_inflight: bool,
}

/// Response time that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Time to connect (`connect`).
    Connect,
    /// Time to the response header (`header`) or the first byte (`first_byte`).
    Header,
    /// Time to the end of the response (`last_byte`).
    LastByte,
}

/// Choice between two random peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preference {
    /// Fewest requests relative to weight.
    LeastConn,
    /// Least estimated time to finish.
    LeastTime(Metric),
}

impl Balance {
    /// `true` if servers may have `backup` and `slow_start` with this method, as in nginx.
    pub fn has_backups(self) -> bool {
        matches!(self, Balance::RoundRobin | Balance::LeastConn | Balance::LeastTime(_))
    }

    /// `true` if requests in flight are counted by peer.
    pub(super) fn counts_requests(self) -> bool {
        matches!(self, Balance::LeastConn | Balance::LeastTime(_) | Balance::Random(Some(_)))
    }

    /// `true` if response times are measured.
    pub(super) fn measures_time(self) -> bool {
        matches!(self, Balance::LeastTime(_) | Balance::Random(Some(Preference::LeastTime(_))))
    }

    /// `true` if requests without a response count.
    pub(super) fn counts_inflight(self) -> bool {
        matches!(self, Balance::LeastTime(LeastTime { counts_inflight: true, .. }))
    }
}

/// Unavailable peers that a hash or chance may hit before peers are chosen in turn, as in nginx.
const TRIES_MAX: u32 = 20;

/// State of the balancing method for one request.
#[derive(Debug)]
pub(super) enum Choice {
    RoundRobin,
    LeastConn,
    LeastTime(LeastTime),
    Hash(Hashing),
    Random { preference: Option<Preference>, tries: u32 },
}

impl Choice {
    /// State for a new request; `key` is the hash key or the client's address.
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

    /// `true` if backup servers are first chosen in turn.
    pub fn falls_back_in_turn(&self) -> bool {
        matches!(self, Choice::Hash(_) | Choice::Random { .. })
    }
}

/// Available peers of a set, ascending.
pub(super) type Candidates = SmallVec<[usize; 16]>;

impl Selection {
    /// The peer of the current set that the method picks. Those in `lost` are unavailable.
    pub(super) fn pick(&mut self, view: &View, now: Moment, lost: &Tried) -> Option<usize> {
        // Moved out, because it is changed while the selection is borrowed.
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
