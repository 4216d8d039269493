//! Upstream groups: the servers behind a proxy, which of them a request goes to, and the connections to them that are
//! idle. Neutral: nothing here knows what is said on these connections.
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_module.html>)
//!
//! ```text
//!   Upstream<S>  a group, and what a subject chooses by: a hash key, a cookie
//!     │ select(subject)
//!     ▼
//!   Selection ── next() ─► Chosen ─► fail() or succeed()      one request: whom it has tried, who is next
//!     │
//!     ▼
//!   View         a worker's own: cursors of smooth weighted round robin
//!     │
//!     ▼
//!   Peers        an immutable list, replaced as a whole ── Peer ── PeerState   failures, times, counts: of the address
//! ```
//!
//! A group's peers are chosen without waiting, and no lock that several workers want is held on the way: cursors are
//! each worker's, what is known of a peer is in atomics, and these are written only when a peer has failed or where a
//! setting asks for exact counts.

mod balance;
mod bind;
mod bound;
pub mod connecting;
mod health;
mod idle_permits;
mod outliers;
mod peer;
mod peers;
mod plan;
mod pool;
mod proxy_header;
mod queue;
mod registry;
mod resolving;
mod retry_budget;
mod selection;
mod servers;
mod state;
mod state_file;
mod sticky;
mod target;
#[cfg(test)]
mod tests;
mod warm;

use std::fmt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use gale_runtime::{SocketAddress, worker};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::variables::subject::Subject;
use crate::variables::template::Template;
use balance::Choice;
pub use balance::{Balance, LeastTime, Metric, Preference};
pub use bind::Bind;
use health::HealthPlan;
pub use health::{
    BeforeFirstCheck, CHECKS_MAX, Check, CheckId, CheckedPeer, CheckedPeers, HealthChange, HealthFigures, Thresholds,
};
pub use outliers::OutlierSettings;
pub use peer::{ServerSettings, Standing};
pub use peers::PeerName;
use peers::{Moves, Peers, View};
use plan::{Findings, FixedServer, Found, Plan};
pub use pool::{ConnectionAge, KeepaliveSettings, Knowledge, Pool, PoolKey, PooledConnection};
pub use proxy_header::ProxyVersion;
use queue::Queue;
pub use queue::{QueueFigures, QueueSettings};
pub use registry::{
    GroupDraft, HasUpstreams, ResolverDefaults, ServerDraft, ServerSource, UpstreamId, UpstreamTable, UpstreamTarget,
    Upstreams,
};
use retry_budget::RetryBudget;
pub use retry_budget::{Retry, RetryBudgetSettings};
pub use selection::{Chosen, NoPeer, Selection, Timing};
use servers::Changes;
pub use servers::{EditError, Editing, GroupServer, PeerReport, ReportedPeers, SERVERS_MAX};
use state::GroupState;
pub use sticky::{
    CookieExpires, Learning, ROUTE_LENGTH_MAX, Session, Sessions, Sticky, StickyCookie, StickyLearn, is_same_site,
};
pub use target::{AddressPass, BareAddress, LookUpError, PassTarget, PassedOn, TlsTarget, plain, without_port};

/// The servers of one `upstream` block, or those that a name stands for.
pub struct Group {
    common: Arc<Common>,
    plan: Plan,
    /// The servers of the plan whose addresses are known, as the configuration has them.
    configured: Box<[GroupServer]>,
    /// By worker.
    views: Box<[CurrentView]>,
    source: Mutex<Versioned>,
    /// The version of the source that the list was made of.
    renewed: Mutex<u64>,
}

/// What a worker sees of the group now. Only this worker locks it, and whoever replaces the list.
#[repr(align(128))]
struct CurrentView(Mutex<Arc<View>>);

/// What the list of peers is made of, and how often that has changed.
struct Versioned {
    version: u64,
    /// The servers whose addresses are known.
    servers: Arc<[GroupServer]>,
    /// What was changed of them, if anything was.
    changes: Option<Arc<Changes>>,
    /// What the names of the others stand for.
    findings: Findings,
}

/// What stays the same when the list is replaced.
struct Common {
    name: Box<str>,
    balance: Balance,
    /// How many parts a weight of one has: more than one only where weights grow slowly.
    weight_unit: i64,
    pool: Option<Arc<Pool>>,
    queue: Option<Queue>,
    /// Whether peers that stand out are set aside.
    ejects: bool,
    /// `None` where everything may be tried anew.
    retry_budget: Option<RetryBudget>,
    /// The group's checks, if it has any: known when all of the configuration was read.
    health: OnceLock<HealthPlan>,
    state: Arc<GroupState>,
    /// `state`: the file that has the servers.
    state_file: Option<Arc<Path>>,
    workers: usize,
}

/// How many parts a weight of one has in a group with `slow_start`.
const SLOW_WEIGHT_UNIT: i64 = 1000;

impl Group {
    /// The group's name: that of its block, or the host.
    pub fn name(&self) -> &str {
        &self.common.name
    }

    /// A group of addresses that were found at run time, for one request: in turn, and nothing is remembered of them.
    pub fn of_addresses(name: &str, addresses: &[SocketAddress]) -> Arc<Group> {
        let server = FixedServer {
            addresses: addresses.to_vec(),
            name: name.as_bytes().into(),
            settings: Arc::new(ServerSettings::default()),
        };
        let balance = Balance::RoundRobin;
        let plan = Plan { balance, is_sticky: false, fixed: vec![server], resolved: Vec::new() };
        Group::new(Common::in_turn(name, Arc::default(), 1), plan)
    }

    fn new(common: Common, plan: Plan) -> Arc<Group> {
        let findings = common.state.findings(&plan);
        let configured: Box<[GroupServer]> = plan.configured().into();
        let (servers, changes) = common.state.servers.lock().settle(&configured, common.state_file.is_some());
        let common = Arc::new(common);
        let peers = Arc::new(common.list(&plan, &servers, &findings));
        let view = |worker| CurrentView(Mutex::new(View::new(&common, &peers, worker)));
        let views = (0..common.workers).map(view).collect();
        let source = Mutex::new(Versioned { version: 0, servers, changes, findings });
        let group = Arc::new(Group { common, plan, configured, views, source, renewed: Mutex::new(0) });
        group.common.state.servers.lock().register(&group);
        group
    }

    /// The group's idle connections; `None` where none are kept.
    pub fn connections(&self) -> Option<&Pool> {
        self.common.pool.as_deref()
    }

    /// The peers for one request, in turn: for a group of addresses that were found at run time.
    pub fn select(&self) -> Selection {
        Selection::new(self.view(), Choice::RoundRobin, None)
    }

    /// Whether requests wait in the queue.
    fn has_waiting(&self) -> bool {
        self.common.queue.as_ref().is_some_and(Queue::has_waiting)
    }

    /// What the running worker sees.
    fn view(&self) -> Arc<View> {
        self.view_of(worker())
    }

    fn view_of(&self, worker: usize) -> Arc<View> {
        let view = &self.views[worker % self.views.len()];
        Arc::clone(&view.0.lock())
    }

    /// How many peers there are now.
    fn peer_count(&self) -> usize {
        let view = self.view_of(0);
        view.peers.primary.peers.len() + view.peers.backup.peers.len()
    }

    /// Takes down what a server's name stands for now, as `now` puts it in order behind what it was. The version of
    /// that if it has changed.
    fn note_found(&self, index: usize, now: impl FnOnce(&[Found]) -> Vec<Found>) -> Option<u64> {
        let mut noted = self.source.lock();
        let found = now(&noted.findings[index]);
        if found == *noted.findings[index] {
            return None;
        }
        noted.findings[index] = found.into();
        noted.version += 1;
        self.common.state.remember(&self.plan, &noted.findings);
        Some(noted.version)
    }

    /// Makes the list anew from the servers, and from what names stand for. It takes a while if there are many, and may
    /// be done on any thread; `version` is that of the source that it is done for.
    fn renew(&self, version: u64) {
        if *self.renewed.lock() >= version {
            return;
        }
        let source = self.source.lock();
        let (version, servers, findings) = (source.version, Arc::clone(&source.servers), source.findings.clone());
        drop(source);
        let peers = self.common.list(&self.plan, &servers, &findings);
        let mut renewed = self.renewed.lock();
        if *renewed < version {
            *renewed = version;
            self.replace(Arc::new(peers));
        }
    }

    /// From now on requests see this list.
    fn replace(&self, peers: Arc<Peers>) {
        let moves = Moves::between(&self.view_of(0).peers, &peers);
        for (worker, current) in self.views.iter().enumerate() {
            let view = self.view_of(worker).renewed(&peers, &moves);
            *current.0.lock() = view;
        }
        if let Some(queue) = &self.common.queue {
            queue.wake_all();
        }
    }
}

impl Common {
    /// The peers of these servers.
    fn list(&self, plan: &Plan, servers: &[GroupServer], findings: &Findings) -> Peers {
        let peers = plan.list(servers, findings, &self.state, self.workers);
        if self.ejects {
            let all = peers.primary.peers.iter().chain(&peers.backup.peers);
            all.for_each(|peer| peer.state.observe(self.workers));
        }
        peers
    }

    /// Whether a peer is set aside because it stands out.
    fn has_ejected(&self, peer: &peer::Peer, now: gale_runtime::Moment) -> bool {
        self.ejects && peer.state.ejection.is_on(now)
    }

    /// Whether health checks leave requests to a peer.
    fn is_well(&self, peer: &peer::Peer) -> bool {
        self.health.get().is_none_or(|plan| plan.allows(&peer.state.health))
    }

    /// Peers in turn, and no idle connections.
    fn in_turn(name: &str, state: Arc<GroupState>, workers: usize) -> Common {
        let (name, balance) = (name.into(), Balance::RoundRobin);
        let (retry_budget, health) = (None, OnceLock::new());
        let (pool, queue, state_file) = (None, None, None);
        Common {
            name,
            balance,
            weight_unit: 1,
            pool,
            queue,
            ejects: false,
            retry_budget,
            health,
            state,
            state_file,
            workers,
        }
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group").field("name", &self.name()).finish_non_exhaustive()
    }
}

/// A group of a configuration, with what its subjects choose by.
pub struct Upstream<S> {
    group: Arc<Group>,
    /// Of `hash`.
    key: Option<Template<S>>,
    sticky: Option<Sticky<S>>,
}

impl<S> Upstream<S> {
    /// The group.
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// Whether sessions stick to its servers.
    fn is_sticky(&self) -> bool {
        self.sticky.is_some()
    }
}

impl<S: Subject> Upstream<S> {
    /// The peers for this subject, in the order that the group's method chooses.
    pub fn select(&self, subject: &S) -> Selection {
        let view = self.group.view();
        let choice = match (view.common.balance, &self.key) {
            (Balance::RoundRobin, _) => Choice::RoundRobin,
            (balance @ Balance::IpHash, _) => Choice::new(balance, &view, &client_address(subject)),
            (balance, Some(key)) => Choice::new(balance, &view, &key.text(subject)),
            (balance, None) => Choice::new(balance, &view, b""),
        };
        let bound_to = self.sticky.as_ref().and_then(|sticky| sticky.bound_to(subject));
        let mut selection = Selection::new(view, choice, bound_to);
        selection.group = self.group.common.queue.as_ref().map(|_| Arc::clone(&self.group));
        selection
    }

    /// The value of the `Set-Cookie` field that an answer of this peer gets, if the group has `sticky cookie`.
    pub fn session_cookie(&self, subject: &S, chosen: &Chosen) -> Option<Vec<u8>> {
        self.sticky.as_ref().and_then(|sticky| sticky.cookie(subject, chosen))
    }

    /// Learns from a response which session is bound to this peer, if the group has `sticky learn`. To be called both
    /// times.
    pub fn learn_session(&self, subject: &S, chosen: &Chosen, when: Learning) {
        if let Some(sticky) = &self.sticky {
            sticky.learn(subject, chosen, when);
        }
    }
}

/// The bytes of a client's address; none if it has no IP address.
fn client_address<S: Subject>(subject: &S) -> SmallVec<[u8; 16]> {
    match subject.remote().inet().map(|address| address.ip()) {
        Some(std::net::IpAddr::V4(ip)) => SmallVec::from_slice(&ip.octets()),
        Some(std::net::IpAddr::V6(ip)) => SmallVec::from_slice(&ip.octets()),
        None => SmallVec::new(),
    }
}

impl<S> fmt::Debug for Upstream<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.group, f)
    }
}
