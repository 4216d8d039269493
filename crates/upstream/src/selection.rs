//! One request's selection among the peers of a group: peers tried, and the next one.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use gale_runtime::{Moment, SocketAddress, now, try_now};
use gale_worker::traffic::{Handshakes, Served};
use smallvec::SmallVec;

use super::Group;
use super::balance::{Balance, Choice, Metric, Preference};
use super::outliers::Observed;
use super::peer::{Peer, Standing};
use super::peers::{PeerName, PeerSet, View};
use super::pool::Pool;
use super::retry_budget::Retry;

/// One request's choice among the peers of a group. See [`Upstream::select`](super::Upstream::select).
pub struct Selection {
    pub(super) view: Arc<View>,
    /// The group, if it has a queue.
    pub(super) group: Option<Arc<Group>>,
    pub(super) choice: Choice,
    /// Name for `sticky` of the peer that the session is bound to.
    bound_to: Option<Box<str>>,
    /// `true` once backup servers are used.
    pub(super) in_backup: bool,
    pub(super) tried: Tried,
    tries_left: usize,
    /// `true` once it counts as a request of the group.
    is_counted: bool,
}

/// Peers of a set that were tried.
#[derive(Debug, Default)]
pub(super) struct Tried(SmallVec<[u64; 2]>);

impl Tried {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn contains(&self, index: usize) -> bool {
        self.0.get(index / 64).is_some_and(|bits| bits >> (index % 64) & 1 == 1)
    }

    pub fn insert(&mut self, index: usize) {
        if self.0.len() <= index / 64 {
            self.0.resize(index / 64 + 1, 0);
        }
        self.0[index / 64] |= 1 << (index % 64);
    }
}

/// Reason why no peer is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPeer {
    /// All peers are down, were tried or are full: nginx's `no live upstreams while connecting to upstream`.
    NoneAlive,
    /// In addition the queue is full.
    QueueFull,
    /// In addition the wait in the queue timed out.
    QueueTimedOut,
}

impl fmt::Display for NoPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoPeer::NoneAlive => f.write_str("no live upstreams"),
            NoPeer::QueueFull => f.write_str("no live upstreams, and the queue is full"),
            NoPeer::QueueTimedOut => f.write_str("no live upstreams, and the queue timed out"),
        }
    }
}

impl std::error::Error for NoPeer {}

/// Times of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Time to the end of the response's header, if there was one.
    pub header: Option<Duration>,
    /// Time to the end of the response.
    pub response: Duration,
}

impl Selection {
    pub(super) fn new(view: Arc<View>, choice: Choice, bound_to: Option<Box<str>>) -> Selection {
        let tries_left = view.peers.primary.tries + view.peers.backup.tries;
        let tried = Tried::default();
        Selection { view, group: None, choice, bound_to, in_backup: false, tried, tries_left, is_counted: false }
    }

    /// Continues with this view. If the list has changed, all its peers may be tried.
    pub(super) fn look_anew(&mut self, view: Arc<View>) {
        self.in_backup = false;
        if !Arc::ptr_eq(&view.peers, &self.view.peers) {
            self.tried = Tried::default();
            self.tries_left = view.peers.primary.tries + view.peers.backup.tries;
        }
        self.view = view;
    }

    /// The group's name.
    pub fn group_name(&self) -> &str {
        &self.view.common.name
    }

    /// The next peer to try.
    ///
    /// # Errors
    /// No peer is available.
    #[expect(clippy::should_implement_trait, reason = "no iterator: after an error there may be another peer")]
    pub fn next(&mut self) -> Result<Chosen, NoPeer> {
        // Waiting requests have priority.
        if self.is_first_try() && self.group.as_ref().is_some_and(|group| group.has_waiting()) {
            return Err(NoPeer::NoneAlive);
        }
        let now = now();
        self.count_request(now);
        self.next_at(now)
    }

    /// The peer at this address as the first one to try, if it is available.
    pub fn first_at(&mut self, address: &SocketAddress) -> Option<Chosen> {
        let (now, view) = (now(), Arc::clone(&self.view));
        let of = |is_backup| view.peers.set(is_backup).peers.iter().position(|peer| peer.address == *address);
        let (is_backup, index) = [false, true].into_iter().find_map(|is_backup| Some((is_backup, of(is_backup)?)))?;
        let set = view.peers.set(is_backup);
        let peer = &set.peers[index];
        // A single peer needs no choice.
        let may_be = !view.peers.is_single()
            && peer.settings.standing != Standing::Down
            && self.is_free(set, index, now, &Tried::default());
        if !may_be || !peer.take_place() {
            return None;
        }
        if !peer.begin_use(now) {
            peer.leave_place();
            return None;
        }
        self.count_request(now);
        if !is_backup {
            self.tried.insert(index);
        }
        self.tries_left = self.tries_left.saturating_sub(1);
        Some(Chosen::new(view, is_backup, index, now))
    }

    /// Counts as a request of the group, once.
    fn count_request(&mut self, now: Moment) {
        if !std::mem::replace(&mut self.is_counted, true)
            && let Some(budget) = &self.view.common.retry_budget
        {
            budget.note_request(self.view.worker, now);
        }
    }

    /// The group's idle connections; `None` if none are kept.
    pub fn connections(&self) -> Option<&Pool> {
        self.view.common.pool.as_deref()
    }

    /// Asks the group's `retry_budget` for a retry, which then counts. Call it once for each retry.
    pub fn take_retry(&self) -> Retry {
        match &self.view.common.retry_budget {
            Some(budget) => budget.take_retry(self.view.worker, now()),
            None => Retry::Granted,
        }
    }

    /// `true` if no peer was tried yet.
    pub(super) fn is_first_try(&self) -> bool {
        !self.in_backup && self.tried.is_empty()
    }

    pub(super) fn next_at(&mut self, now: Moment) -> Result<Chosen, NoPeer> {
        let view = Arc::clone(&self.view);
        if view.peers.is_single() {
            let set = &view.peers.primary;
            let is_usable = set.peers[0].settings.standing == Standing::Up
                || self.bound_peer(set, now, &Tried::default()).is_some();
            if !is_usable || !view.common.is_well(&set.peers[0]) || !set.peers[0].take_place() {
                return Err(NoPeer::NoneAlive);
            }
            self.tries_left = 0;
            return Ok(Chosen::new(view, false, 0, now));
        }
        loop {
            if let Some(index) = self.choose(&view, now) {
                self.tries_left = self.tries_left.saturating_sub(1);
                return Ok(Chosen::new(view, self.in_backup, index, now));
            }
            if self.in_backup || view.peers.backup.peers.is_empty() {
                return Err(NoPeer::NoneAlive);
            }
            self.in_backup = true;
            self.tried = Tried::default();
            if self.choice.falls_back_in_turn() {
                self.choice = Choice::RoundRobin;
            }
        }
    }

    /// Peers that may be tried after this one: nginx's `peer.tries`.
    pub fn tries_left(&self) -> usize {
        self.tries_left
    }

    /// Limits the remaining attempts (`proxy_next_upstream_tries`).
    pub fn limit_tries(&mut self, tries_max: usize) {
        self.tries_left = self.tries_left.min(tries_max);
    }

    /// Undoes the count of the last attempt, whose idle connection had been closed.
    pub fn add_try(&mut self) {
        self.tries_left += 1;
    }

    /// Chooses in the current set and takes the peer's place.
    fn choose(&mut self, view: &View, now: Moment) -> Option<usize> {
        // If another worker takes the peer's last place or its trial first, the peer is unavailable from then on, so
        // the loop ends.
        let mut lost = Tried::default();
        loop {
            let index = self.pick(view, now, &lost)?;
            let peer = &view.peers.set(self.in_backup).peers[index];
            if peer.take_place() {
                if peer.begin_use(now) {
                    self.tried.insert(index);
                    return Some(index);
                }
                peer.leave_place();
            }
            lost.insert(index);
        }
    }

    /// `true` if a peer is available.
    pub(super) fn is_candidate(&self, set: &PeerSet, index: usize, now: Moment, lost: &Tried) -> bool {
        set.peers[index].settings.standing == Standing::Up && self.is_free(set, index, now, lost)
    }

    /// `true` if a peer is available apart from its administrative state.
    fn is_free(&self, set: &PeerSet, index: usize, now: Moment, lost: &Tried) -> bool {
        let peer = &set.peers[index];
        !self.tried.contains(index)
            && !lost.contains(index)
            && !peer.is_failed(now)
            && !self.view.common.has_ejected(peer, now)
            && !peer.is_full()
            && self.view.common.is_well(peer)
    }

    /// The peer of this set that the session is bound to, if it is available; it may be draining.
    pub(super) fn bound_peer(&self, set: &PeerSet, now: Moment, lost: &Tried) -> Option<usize> {
        let index = set.by_session(self.bound_to.as_deref()?)?;
        let is_down = set.peers[index].settings.standing == Standing::Down;
        (!is_down && self.is_free(set, index, now, lost)).then_some(index)
    }
}

impl fmt::Debug for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Selection").field("group", &self.group_name()).field("tries_left", &self.tries_left).finish()
    }
}

/// A chosen peer. It counts as one of the peer's requests until dropped.
pub struct Chosen {
    view: Arc<View>,
    is_backup: bool,
    index: usize,
    since: Moment,
    /// `true` once the outcome was reported.
    is_judged: bool,
    /// `true` while it counts as a request without a response.
    is_inflight: bool,
    is_header_measured: bool,
    /// `true` once it was recorded for outlier ejection, and whether as an error.
    is_observed: bool,
    has_error: bool,
}

impl Chosen {
    fn new(view: Arc<View>, is_backup: bool, index: usize, now: Moment) -> Chosen {
        let balance = view.common.balance;
        let chosen = Chosen {
            is_inflight: balance.counts_inflight() && !view.peers.is_single(),
            view,
            is_backup,
            index,
            since: now,
            is_judged: false,
            is_header_measured: false,
            is_observed: false,
            has_error: false,
        };
        let peer = chosen.peer();
        peer.state.traffic.begin_at(now.as_nanos());
        if balance.counts_requests() {
            peer.state.begin_request(chosen.view.worker);
        }
        if balance.measures_time() {
            peer.note_chosen(now);
        }
        if chosen.is_inflight {
            peer.state.begin_inflight(now);
        }
        chosen
    }

    fn peer(&self) -> &Peer {
        &self.view.peers.set(self.is_backup).peers[self.index]
    }

    /// Address to connect to.
    pub fn address(&self) -> &SocketAddress {
        &self.peer().address
    }

    /// Address for `$upstream_addr`: `127.0.0.1:8080`, `unix:/run/app`.
    pub fn name(&self) -> &str {
        &self.peer().name
    }

    /// Name of the peer, shared on this worker.
    pub fn shared_name(&self) -> &Arc<PeerName> {
        self.view.name(self.is_backup, self.index)
    }

    /// The group's idle connections; `None` if none are kept.
    pub fn connections(&self) -> Option<&Pool> {
        self.view.common.pool.as_deref()
    }

    /// Name of the peer for `sticky`; empty in a group without sessions.
    pub(super) fn session_id(&self) -> &Arc<str> {
        &self.peer().session_id
    }

    /// Reports the time to the response's header, for `least_time header inflight` and `outlier_ejection`.
    pub fn header_received(&mut self, time: Duration) {
        if let Some(observed) = self.observed() {
            observed.note_response(time);
            self.is_observed = true;
        }
        self.header_received_at(time, now());
    }

    /// Reports the time to connect, for `least_time connect inflight`.
    pub fn connected(&mut self, time: Duration) {
        self.measure(Metric::Connect, time, now());
    }

    pub(super) fn header_received_at(&mut self, time: Duration, now: Moment) {
        self.measure(Metric::Header, time, now);
    }

    /// Reports that the peer is reachable, before the request is over. If this was a trial, other requests may use the
    /// peer, too.
    pub fn is_there(&self) {
        if self.view.peers.is_single() {
            self.peer().forget_failures();
        } else if self.peer().has_failures() {
            self.peer().succeed(now());
        }
    }

    /// `true` if the method measures the time to connect instead of the response.
    pub fn counts_connecting(&self) -> bool {
        match self.view.common.balance {
            Balance::LeastTime(how) => how.metric == Metric::Connect,
            Balance::Random(Some(Preference::LeastTime(metric))) => metric == Metric::Connect,
            _ => false,
        }
    }

    /// Records a time if the method uses this metric.
    fn measure(&mut self, metric: Metric, time: Duration, now: Moment) {
        let is_metric = matches!(self.view.common.balance, Balance::LeastTime(how) if how.metric == metric);
        if self.is_inflight && is_metric {
            self.is_header_measured = true;
            self.peer().state.measure_header(time);
            self.end_inflight(now, time);
        }
    }

    /// Reports an error response, for `outlier_ejection`.
    pub fn note_error(&mut self) {
        if !std::mem::replace(&mut self.has_error, true)
            && let Some(observed) = self.observed()
        {
            observed.note_error(self.is_observed);
        }
    }

    fn observed(&self) -> Option<&Observed> {
        if self.view.common.ejects { self.peer().state.observed_by(self.view.worker) } else { None }
    }

    /// Reports a failure that counts towards `max_fails`. Returns `true` if it puts the peer down; nginx then warns
    /// `upstream server temporarily disabled`.
    pub fn fail(&mut self) -> bool {
        self.note_error();
        self.fail_at(now())
    }

    pub(super) fn fail_at(&mut self, now: Moment) -> bool {
        if std::mem::replace(&mut self.is_judged, true) {
            return false;
        }
        self.peer().state.failures.note_attempt();
        if self.view.peers.is_single() {
            return false;
        }
        self.peer().fail(now)
    }

    /// Reports that the peer was not used: neither a success nor a failure, even in a trial.
    pub fn abandon(&mut self) {
        self.is_judged = true;
    }

    /// Reports a response. If the request is tried elsewhere because of it (`proxy_next_upstream http_404`), the choice
    /// is dropped instead.
    pub fn succeed(&mut self, timing: Timing) {
        self.succeed_at(Some(timing), now());
    }

    pub(super) fn succeed_at(&mut self, timing: Option<Timing>, now: Moment) {
        if std::mem::replace(&mut self.is_judged, true) {
            return;
        }
        if self.view.peers.is_single() {
            self.peer().forget_failures()
        } else {
            self.peer().succeed(now)
        }
        let Some(Timing { header: Some(header), response }) = timing else { return };
        if self.view.common.balance.measures_time() {
            self.peer().state.measure_response(response);
            if !self.is_header_measured {
                self.peer().state.measure_header(header);
            }
            self.end_inflight(now, response);
        }
    }

    /// Records the time to connect in the peer's metrics.
    pub fn note_connected(&self, time: Duration) {
        self.peer().state.traffic.note_connected(time);
    }

    /// Counters of handshakes with the peer.
    pub fn handshakes(&self) -> &Handshakes {
        self.peer().state.handshakes.get_or_init(Box::default)
    }

    /// Records the request in the peer's metrics.
    pub fn note_served(&self, served: &Served) {
        self.peer().state.traffic.note(served);
    }

    fn end_inflight(&mut self, now: Moment, time: Duration) {
        if std::mem::take(&mut self.is_inflight) {
            self.peer().state.end_inflight(now, time);
        }
    }

    pub(super) fn end_at(&mut self, now: Moment) {
        if !self.is_judged {
            self.succeed_at(None, now);
        }
        self.end_inflight(now, now.since(self.since));
    }
}

impl Drop for Chosen {
    /// Without a report the attempt has not failed.
    fn drop(&mut self) {
        if self.is_inflight || !self.is_judged && self.peer().has_failures() {
            self.end_at(try_now().unwrap_or(self.since));
        }
        let peer = self.peer();
        peer.state.traffic.end();
        if self.view.common.balance.counts_requests() {
            peer.state.end_request(self.view.worker);
        }
        peer.leave_place();
        if let Some(queue) = &self.view.common.queue {
            queue.wake_one();
        }
    }
}

impl fmt::Debug for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chosen").field("peer", &self.name()).finish()
    }
}
