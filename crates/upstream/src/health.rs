//! Active health checks, as far as balancing is concerned: stores results and gives checks access to a group's peers.
//! Probing a peer belongs to its protocol. (<https://nginx.org/en/docs/http/ngx_http_upstream_hc_module.html>)
//!
//! Results belong to the address in its group, so they survive a new list of peers and a reload. The configuration
//! decides which checks count: a removed check is forgotten with its configuration. A peer is unhealthy if any check
//! finds it so.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gale_runtime::{Moment, SocketAddress};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::Group;
use super::peer::PeerState;
use super::peers::{PeerName, Peers};

/// Most checks of a group; each has a bit.
pub const CHECKS_MAX: usize = 64;

/// A health check of a configuration, as an index. See [`Upstreams::add_check`](super::Upstreams::add_check).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CheckId(pub u32);

/// State of peers before the first check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum BeforeFirstCheck {
    /// Healthy: they get requests.
    #[default]
    Healthy,
    /// Unhealthy, also after every reload (`mandatory`).
    Checking,
    /// Unhealthy unless they were healthy before a reload (`mandatory persistent`).
    CheckingUnlessKnown,
}

/// Consecutive results that change a peer's health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// `fails`; at least one.
    pub fails: u32,
    /// `passes`; at least one.
    pub passes: u32,
}

/// Checks of a group in one configuration.
#[derive(Debug)]
pub(super) struct HealthPlan {
    /// State of peers before the first check, by index of the check in the group.
    checks: SmallVec<[BeforeFirstCheck; 1]>,
    /// Number of the configuration; later ones are higher.
    serial: u64,
}

impl HealthPlan {
    pub fn new(checks: SmallVec<[BeforeFirstCheck; 1]>) -> HealthPlan {
        debug_assert!(checks.len() <= CHECKS_MAX, "a group has at most CHECKS_MAX checks");
        static SERIALS: AtomicU64 = AtomicU64::new(0);
        HealthPlan { checks, serial: SERIALS.fetch_add(1, Ordering::Relaxed) + 1 }
    }

    fn bits(&self) -> u64 {
        u64::MAX.checked_shr((CHECKS_MAX - self.checks.len()) as u32).unwrap_or(0)
    }

    /// `true` if checks let the peer get requests.
    pub fn allows(&self, health: &Health) -> bool {
        health.ill.load(Ordering::Relaxed) & self.bits() == 0
            && (health.passed_all.load(Ordering::Relaxed) >= self.serial || self.has_passed(health))
    }

    /// `true` if a peer has passed the checks that are mandatory before its first request.
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

/// Check results of a peer.
#[derive(Debug, Default)]
pub(super) struct Health {
    /// Bits of the checks that find it unhealthy.
    ill: AtomicU64,
    /// Serial of the newest configuration whose mandatory checks it has passed.
    passed_all: AtomicU64,
    /// Results, failed results, and changes to unhealthy.
    checks: AtomicU64,
    fails: AtomicU64,
    unhealthy: AtomicU64,
    /// The last result.
    last_passed: AtomicBool,
    records: Mutex<SmallVec<[Record; 1]>>,
}

/// Statistics of a peer's checks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HealthFigures {
    /// Number of results.
    pub checks: u64,
    /// Number of failed results.
    pub fails: u64,
    /// Number of changes to unhealthy.
    pub unhealthy: u64,
    /// The last result; `None` if there was none.
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

    /// Statistics since the last reset.
    pub fn figures(&self) -> HealthFigures {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let checks = read(&self.checks);
        let last_passed = (checks > 0).then(|| self.last_passed.load(Ordering::Relaxed));
        HealthFigures { checks, fails: read(&self.fails), unhealthy: read(&self.unhealthy), last_passed }
    }

    /// Resets the statistics.
    pub fn reset(&self) {
        [&self.checks, &self.fails, &self.unhealthy]
            .into_iter()
            .for_each(|counter| counter.store(0, Ordering::Relaxed));
    }
}

/// Results of one check.
#[derive(Clone, Copy, Debug, Default)]
struct Record {
    /// Consecutive fails and passes.
    fails: u32,
    passes: u32,
    /// Serial of the newest configuration in which the check passed; 0 for never.
    passed: u64,
}

/// Effect of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthChange {
    /// No change.
    None,
    /// The check now finds the peer unhealthy.
    Ill,
    /// The check now finds the peer healthy.
    Well,
}

/// A check of a group in one configuration. The service that probes peers gets them from it and reports the results to
/// it.
#[derive(Clone)]
pub struct Check {
    group: Arc<Group>,
    place: usize,
}

/// Peers of a group at one time, for checks.
#[derive(Clone)]
pub struct CheckedPeers(Arc<Peers>);

/// A peer to check.
#[derive(Clone)]
pub struct CheckedPeer {
    /// Address to connect to.
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

    /// The current peers.
    pub fn peers(&self) -> CheckedPeers {
        CheckedPeers(Arc::clone(&self.group.view_of(0).peers))
    }

    /// `true` if this check finds the peer unhealthy.
    pub fn finds_ill(&self, peer: &CheckedPeer) -> bool {
        peer.state.health.ill.load(Ordering::Relaxed) >> self.place & 1 == 1
    }

    /// Records a result and returns its effect.
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
            // A peer in its first check has no credit.
            if was_ill || record.fails < thresholds.fails && has_been_passed {
                return HealthChange::None;
            }
            // After the next reload it does not count as known to be healthy.
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
        // Earlier failures no longer count.
        peer.state.recover(now);
        HealthChange::Well
    }
}

impl CheckedPeers {
    /// `true` if this is still the group's current list.
    pub fn is_current(&self, check: &Check) -> bool {
        Arc::ptr_eq(&self.0, &check.group.view_of(0).peers)
    }

    /// Peers that can get requests; those marked `down` are not checked.
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
    /// `true` if it is the same peer: the same occurrence of the address in the group.
    pub fn is_same(&self, other: &CheckedPeer) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    /// A number that is unique among existing peers.
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
