//! Active health checks, as far as the choice of peers goes: what checks have found, and who looks at a group's peers
//! to check them. How a peer is asked belongs to its protocol.
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_hc_module.html>)
//!
//! What a check has found belongs to the address in its group, so that it outlives a list of peers and a reload. Which
//! checks count is the configuration's to say: a check that is removed is forgotten with the configuration that had it.
//! A single check that finds a peer ill is enough.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gale_runtime::{Moment, SocketAddress};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::Group;
use super::peer::PeerState;
use super::peers::{PeerName, Peers};

/// Checks of one group at most: each has a bit.
pub const CHECKS_MAX: usize = 64;

/// A health check of a configuration, as an index. See [`Upstreams::add_check`](super::Upstreams::add_check).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CheckId(pub u32);

/// What a check says about peers that it has not checked yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum BeforeFirstCheck {
    /// They get requests.
    #[default]
    Healthy,
    /// They get none (`mandatory`), after every reload.
    Checking,
    /// They get none unless they were healthy before a reload (`mandatory persistent`).
    CheckingUnlessKnown,
}

/// How many results in a row change a peer's health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// `fails`: one at least.
    pub fails: u32,
    /// `passes`: one at least.
    pub passes: u32,
}

/// The checks of a group in one configuration.
#[derive(Debug)]
pub(super) struct HealthPlan {
    /// What each says about peers that it has not checked, by its place in the group.
    checks: SmallVec<[BeforeFirstCheck; 1]>,
    /// Later configurations have higher numbers.
    serial: u64,
}

impl HealthPlan {
    pub fn new(checks: SmallVec<[BeforeFirstCheck; 1]>) -> HealthPlan {
        debug_assert!(checks.len() <= CHECKS_MAX, "more checks than bits");
        static SERIALS: AtomicU64 = AtomicU64::new(0);
        HealthPlan { checks, serial: SERIALS.fetch_add(1, Ordering::Relaxed) + 1 }
    }

    /// The bits of its checks.
    fn bits(&self) -> u64 {
        u64::MAX.checked_shr((CHECKS_MAX - self.checks.len()) as u32).unwrap_or(0)
    }

    /// Whether a peer may get requests, as far as checks go.
    pub fn allows(&self, health: &Health) -> bool {
        health.ill.load(Ordering::Relaxed) & self.bits() == 0
            && (health.passed_all.load(Ordering::Relaxed) >= self.serial || self.has_passed(health))
    }

    /// Whether a peer has passed the checks that it has to pass before its first request.
    fn has_passed(&self, health: &Health) -> bool {
        let records = health.records.lock();
        let has_passed = self.checks.iter().enumerate().all(|(place, before)| {
            let passed = records.get(place).map_or(0, |record| record.passed);
            match before {
                BeforeFirstCheck::Healthy => true,
                BeforeFirstCheck::Checking => passed >= self.serial,
                BeforeFirstCheck::CheckingUnlessKnown => passed > 0,
            }
        });
        if has_passed {
            health.passed_all.fetch_max(self.serial, Ordering::Relaxed);
        }
        has_passed
    }
}

/// What checks have found of a peer.
#[derive(Debug, Default)]
pub(super) struct Health {
    /// The bit of each check that finds it ill.
    ill: AtomicU64,
    /// The serial of the newest configuration whose checks it has passed as far as these were to be passed first.
    passed_all: AtomicU64,
    /// How many results there were, how many of these said that it is ill, and how often it became ill.
    checks: AtomicU64,
    fails: AtomicU64,
    unhealthy: AtomicU64,
    /// What the last one said.
    last_passed: AtomicBool,
    records: Mutex<SmallVec<[Record; 1]>>,
}

/// What checks of a peer have come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HealthFigures {
    /// How many results there were.
    pub checks: u64,
    /// How many of these said that it is ill.
    pub fails: u64,
    /// How often it became ill.
    pub unhealthy: u64,
    /// What the last one said; `None` if there was none.
    pub last_passed: Option<bool>,
}

impl Health {
    fn count(&self, has_passed: bool) {
        self.checks.fetch_add(1, Ordering::Relaxed);
        self.last_passed.store(has_passed, Ordering::Relaxed);
        if !has_passed {
            self.fails.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// What checks have come to since they were forgotten last.
    pub fn figures(&self) -> HealthFigures {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let checks = read(&self.checks);
        let last_passed = (checks > 0).then(|| self.last_passed.load(Ordering::Relaxed));
        HealthFigures { checks, fails: read(&self.fails), unhealthy: read(&self.unhealthy), last_passed }
    }

    /// Forgets the figures.
    pub fn reset(&self) {
        [&self.checks, &self.fails, &self.unhealthy]
            .into_iter()
            .for_each(|counter| counter.store(0, Ordering::Relaxed));
    }
}

/// What one check has found.
#[derive(Clone, Copy, Debug, Default)]
struct Record {
    /// In a row.
    fails: u32,
    passes: u32,
    /// The serial of the newest configuration in which the check was passed; 0 for never.
    passed: u64,
}

/// What follows from a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthChange {
    /// Nothing.
    None,
    /// From now on the peer gets no requests because of this check.
    Ill,
    /// From now on this check has nothing against the peer.
    Well,
}

/// A check of a group in one configuration: who checks asks it for the peers, and tells it what has come out.
#[derive(Clone)]
pub struct Check {
    group: Arc<Group>,
    place: usize,
}

/// The peers of a group at one time, as one who checks them sees them.
#[derive(Clone)]
pub struct CheckedPeers(Arc<Peers>);

/// A peer that is checked.
#[derive(Clone)]
pub struct CheckedPeer {
    /// Where to connect to.
    pub address: SocketAddress,
    /// Its name.
    pub name: Arc<PeerName>,
    state: Arc<PeerState>,
    is_slow_starting: bool,
}

impl Check {
    pub(super) fn new(group: &Arc<Group>, place: usize) -> Check {
        Check { group: Arc::clone(group), place }
    }

    /// The group.
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// The peers now.
    pub fn peers(&self) -> CheckedPeers {
        CheckedPeers(Arc::clone(&self.group.view_of(0).peers))
    }

    /// Whether this check finds a peer ill.
    pub fn finds_ill(&self, peer: &CheckedPeer) -> bool {
        peer.state.health.ill.load(Ordering::Relaxed) >> self.place & 1 == 1
    }

    /// Takes down what a check of a peer has come to, and tells what follows.
    pub fn note(&self, peer: &CheckedPeer, has_passed: bool, thresholds: Thresholds) -> HealthChange {
        let change = self.note_at(peer, has_passed, thresholds, gale_runtime::now());
        if let (HealthChange::Well, Some(queue)) = (change, &self.group.common.queue) {
            queue.wake_all();
        }
        change
    }

    pub(super) fn note_at(
        &self,
        peer: &CheckedPeer,
        has_passed: bool,
        thresholds: Thresholds,
        now: Moment,
    ) -> HealthChange {
        let plan = self.group.common.health.get().expect("a group with checks has a plan");
        let health = &peer.state.health;
        health.count(has_passed);
        let was_allowed = plan.allows(health);
        let (was_ill, bit) = (self.finds_ill(peer), 1 << self.place);
        let mut records = health.records.lock();
        if records.len() <= self.place {
            records.resize(self.place + 1, Record::default());
        }
        let record = &mut records[self.place];
        let has_been_passed = match plan.checks[self.place] {
            BeforeFirstCheck::Healthy => true,
            BeforeFirstCheck::Checking => record.passed >= plan.serial,
            BeforeFirstCheck::CheckingUnlessKnown => record.passed > 0,
        };
        if !has_passed {
            (record.fails, record.passes) = (record.fails.saturating_add(1), 0);
            // A peer that is being checked for the first time has no credit.
            if was_ill || record.fails < thresholds.fails && has_been_passed {
                return HealthChange::None;
            }
            // After the next reload it is not known as a healthy one.
            record.passed = 0;
            health.unhealthy.fetch_add(1, Ordering::Relaxed);
            health.ill.fetch_or(bit, Ordering::Relaxed);
            return HealthChange::Ill;
        }
        (record.fails, record.passes) = (0, record.passes.saturating_add(1));
        if was_ill && record.passes < thresholds.passes {
            return HealthChange::None;
        }
        record.passed = plan.serial;
        drop(records);
        health.ill.fetch_and(!bit, Ordering::Relaxed);
        if !was_allowed && plan.allows(health) && peer.is_slow_starting {
            peer.state.begin_slowly(now);
        }
        if !was_ill && has_been_passed {
            return HealthChange::None;
        }
        // What it did wrong before was an illness that is over.
        peer.state.recover(now);
        HealthChange::Well
    }
}

impl CheckedPeers {
    /// Whether the group's list is still this one.
    pub fn is_current(&self, check: &Check) -> bool {
        Arc::ptr_eq(&self.0, &check.group.view_of(0).peers)
    }

    /// Those that may get requests at all; one that is `down` is not checked.
    pub fn iter(&self) -> impl Iterator<Item = CheckedPeer> + '_ {
        let peers = self.0.primary.peers.iter().chain(&self.0.backup.peers);
        peers.filter(|peer| peer.settings.standing != super::Standing::Down).map(|peer| CheckedPeer {
            address: peer.address.clone(),
            name: PeerName::of(peer),
            state: Arc::clone(&peer.state),
            is_slow_starting: !peer.settings.slow_start.is_zero(),
        })
    }
}

impl CheckedPeer {
    /// Whether it is the same peer: that address, at that occurrence in the group.
    pub fn is_same(&self, other: &CheckedPeer) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    /// A number that no other peer has for as long as this one is there.
    pub fn key(&self) -> usize {
        Arc::as_ptr(&self.state) as usize
    }
}

impl fmt::Debug for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Check").field("group", &self.group.name()).field("place", &self.place).finish()
    }
}

impl fmt::Debug for CheckedPeers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl fmt::Debug for CheckedPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckedPeer").field("name", &self.name).finish_non_exhaustive()
    }
}
