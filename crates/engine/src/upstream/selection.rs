//! One request's way through the peers of a group: whom it has tried, and who is next.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use gale_runtime::{Moment, SocketAddress, now};
use smallvec::SmallVec;

use super::balance::Choice;
use super::peer::{Peer, Standing};
use super::peers::{PeerSet, View};
use super::pool::Pool;

/// One request's choice among the peers of a group. See [`Upstream::select`](super::Upstream::select).
pub struct Selection {
    pub(super) view: Arc<View>,
    pub(super) choice: Choice,
    /// Whether the backup servers are asked by now.
    pub(super) in_backup: bool,
    pub(super) tried: Tried,
    tries_left: usize,
}

/// Which peers of a set were tried.
#[derive(Debug, Default)]
pub(super) struct Tried(SmallVec<[u64; 2]>);

impl Tried {
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

/// Why there is no peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPeer {
    /// All are down, were tried, or have as many requests as they may: nginx's `no live upstreams while connecting to
    /// upstream`.
    NoneAlive,
}

impl fmt::Display for NoPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoPeer::NoneAlive => f.write_str("no live upstreams"),
        }
    }
}

impl std::error::Error for NoPeer {}

/// How long a peer has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// From the beginning to the end of the response's header, if there was one.
    pub header: Option<Duration>,
    /// From the beginning to the end of the response.
    pub response: Duration,
}

impl Selection {
    pub(super) fn new(view: Arc<View>, choice: Choice) -> Selection {
        let tries_left = view.peers.primary.tries + view.peers.backup.tries;
        Selection { view, choice, in_backup: false, tried: Tried::default(), tries_left }
    }

    /// The group's name.
    pub fn group_name(&self) -> &str {
        &self.view.common.name
    }

    /// The next peer to try.
    ///
    /// # Errors
    /// There is none.
    pub fn next(&mut self) -> Result<Chosen, NoPeer> {
        self.next_at(now())
    }

    pub(super) fn next_at(&mut self, now: Moment) -> Result<Chosen, NoPeer> {
        let view = Arc::clone(&self.view);
        if view.peers.is_single() {
            let peer = &view.peers.primary.peers[0];
            if peer.settings.standing == Standing::Down || !peer.take_place() {
                return Err(NoPeer::NoneAlive);
            }
            self.tries_left = 0;
            return Ok(Chosen::new(view, false, 0));
        }
        loop {
            if let Some(index) = self.choose(&view, now) {
                self.tries_left = self.tries_left.saturating_sub(1);
                return Ok(Chosen::new(view, self.in_backup, index));
            }
            if self.in_backup || view.peers.backup.peers.is_empty() {
                return Err(NoPeer::NoneAlive);
            }
            self.in_backup = true;
            self.tried = Tried::default();
        }
    }

    /// How many peers may be tried after this one: nginx's `peer.tries`.
    pub fn tries_left(&self) -> usize {
        self.tries_left
    }

    /// At most so many tries more (`proxy_next_upstream_tries`).
    pub fn limit_tries(&mut self, tries_max: usize) {
        self.tries_left = self.tries_left.min(tries_max);
    }

    /// The last try does not count: its connection was an idle one that had ended.
    pub fn add_try(&mut self) {
        self.tries_left += 1;
    }

    /// Chooses in the current set, and has the choice count.
    fn choose(&mut self, view: &View, now: Moment) -> Option<usize> {
        // Another worker may be faster with the last place of a peer, or with its trial: then it cannot be chosen any
        // more, so that this ends.
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

    /// Whether a peer can be chosen now.
    pub(super) fn is_candidate(&self, set: &PeerSet, index: usize, now: Moment, lost: &Tried) -> bool {
        let peer = &set.peers[index];
        !self.tried.contains(index)
            && !lost.contains(index)
            && peer.settings.standing == Standing::Up
            && !peer.is_failed(now)
            && !peer.is_full()
    }
}

impl fmt::Debug for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Selection").field("group", &self.group_name()).field("tries_left", &self.tries_left).finish()
    }
}

/// A peer that was chosen. It counts as one of the peer's requests until it is dropped.
pub struct Chosen {
    view: Arc<View>,
    is_backup: bool,
    index: usize,
    /// Whether it was said how it went.
    is_judged: bool,
}

impl Chosen {
    fn new(view: Arc<View>, is_backup: bool, index: usize) -> Chosen {
        let chosen = Chosen { view, is_backup, index, is_judged: false };
        chosen.peer().state.count_connection(chosen.view.worker);
        chosen
    }

    fn peer(&self) -> &Peer {
        &self.view.peers.set(self.is_backup).peers[self.index]
    }

    /// Where to connect to.
    pub fn address(&self) -> &SocketAddress {
        &self.peer().address
    }

    /// The address as `$upstream_addr` has it: `127.0.0.1:8080`, `unix:/run/app`.
    pub fn name(&self) -> &str {
        &self.peer().name
    }

    /// The group's idle connections; `None` where none are kept.
    pub fn connections(&self) -> Option<&Pool> {
        self.view.common.pool.as_ref()
    }

    /// It has failed in a way that counts towards `max_fails`. True if that has put the peer down: nginx warns `upstream
    /// server temporarily disabled` then.
    pub fn fail(&mut self) -> bool {
        self.fail_at(now())
    }

    pub(super) fn fail_at(&mut self, now: Moment) -> bool {
        if std::mem::replace(&mut self.is_judged, true) || self.view.peers.is_single() {
            return false;
        }
        self.peer().fail(now)
    }

    /// It has answered. Times of requests that are tried elsewhere (`proxy_next_upstream http_404`) are not told.
    pub fn succeed(&mut self, timing: Timing) {
        self.succeed_at(Some(timing), now());
    }

    pub(super) fn succeed_at(&mut self, _timing: Option<Timing>, now: Moment) {
        if std::mem::replace(&mut self.is_judged, true) {
            return;
        }
        if self.view.peers.is_single() { self.peer().forget_failures() } else { self.peer().succeed(now) }
    }
}

impl Drop for Chosen {
    /// One of which nobody said how it went has not failed.
    fn drop(&mut self) {
        if !self.is_judged && self.peer().has_failures() {
            self.succeed_at(None, now());
        }
        let peer = self.peer();
        peer.state.discount_connection(self.view.worker);
        peer.leave_place();
    }
}

impl fmt::Debug for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chosen").field("peer", &self.name()).finish()
    }
}
