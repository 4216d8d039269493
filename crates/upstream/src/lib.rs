//! Groups of servers behind a proxy: balancing, checks of health, and idle connections, for any protocol.
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_module.html>)
//!
//! ```text
//!   Upstream<S>  a group, and its hash key or cookie for a subject
//!     │ select(subject)
//!     ▼
//!   Selection ── next() ─► Chosen ─► fail() or succeed()      one request: peers tried, next peer
//!     │
//!     ▼
//!   View         a worker's own: cursors of smooth weighted round robin
//!     │
//!     ▼
//!   Peers        an immutable list, replaced as a whole ── Peer ── PeerState   failures, times, counts: of the address
//! ```
//!
//! Choosing a peer never waits and takes no contended lock: each worker has its own cursors, and the state of a peer is
//! in atomics, which are only written after a failure or where a setting requires exact counts.

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

use gale_engine::variables::subject::Subject;
use gale_engine::variables::template::Template;
use gale_runtime::{SocketAddress, worker};
use parking_lot::Mutex;
use smallvec::SmallVec;

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
    Upstreams, upstreams_of,
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

/// Servers of one `upstream` block, or addresses of one name.
pub struct Group {
    common: Arc<Common>,
    plan: Plan,
    /// The configuration's servers with known addresses.
    configured: Box<[GroupServer]>,
    /// Views by worker.
    views: Box<[CurrentView]>,
    source: Mutex<Versioned>,
    /// Version of the source that the list was made from.
    renewed: Mutex<u64>,
}

/// A worker's current view of the group. Only this worker and the thread that replaces the list lock it.
#[repr(align(128))]
struct CurrentView(Mutex<Arc<View>>);

/// Source of the list of peers, with its version.
struct Versioned {
    version: u64,
    /// Servers with known addresses.
    servers: Arc<[GroupServer]>,
    /// Changes made to them at run time.
    changes: Option<Arc<Changes>>,
    /// Addresses found for the other servers' names.
    findings: Findings,
}

/// Parts of a group that stay when the list is replaced.
struct Common {
    name: Box<str>,
    balance: Balance,
    /// Units in a weight of one; more than one only where weights grow slowly.
    weight_unit: i64,
    pool: Option<Arc<Pool>>,
    queue: Option<Queue>,
    /// `true` if outliers are ejected.
    ejects: bool,
    /// `None` if retries are unlimited.
    retry_budget: Option<RetryBudget>,
    /// The group's checks, if any; known once the whole configuration was read.
    health: OnceLock<HealthPlan>,
    state: Arc<GroupState>,
    /// `state`: the file with the servers.
    state_file: Option<Arc<Path>>,
    workers: usize,
}

/// Units in a weight of one in a group with `slow_start`.
const SLOW_WEIGHT_UNIT: i64 = 1000;

impl Group {
    /// Name of the block, or the host.
    pub fn name(&self) -> &str {
        &self.common.name
    }

    /// A group for one request, of addresses that were found at run time. They are used in turn and keep no state.
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

    /// The group's idle connections; `None` if none are kept.
    pub fn connections(&self) -> Option<&Pool> {
        self.common.pool.as_deref()
    }

    /// Peers for one request, in turn, for a group of addresses found at run time.
    pub fn select(&self) -> Selection {
        Selection::new(self.view(), Choice::RoundRobin, None)
    }

    /// `true` if requests wait in the queue.
    fn has_waiting(&self) -> bool {
        self.common.queue.as_ref().is_some_and(Queue::has_waiting)
    }

    /// The running worker's view.
    fn view(&self) -> Arc<View> {
        self.view_of(worker())
    }

    fn view_of(&self, worker: usize) -> Arc<View> {
        let view = &self.views[worker % self.views.len()];
        Arc::clone(&view.0.lock())
    }

    fn peer_count(&self) -> usize {
        let view = self.view_of(0);
        view.peers.primary.peers.len() + view.peers.backup.peers.len()
    }

    /// Stores the addresses of a server's name; `now` merges them with the earlier ones. Returns the new version if
    /// they changed.
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

    /// Rebuilds the list from the servers and the addresses of names. This takes a while if there are many, and may be
    /// done on any thread; `version` is the source's version that it is done for.
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

    /// Makes this the list for new requests.
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
    fn list(&self, plan: &Plan, servers: &[GroupServer], findings: &Findings) -> Peers {
        let peers = plan.list(servers, findings, &self.state, self.workers);
        if self.ejects {
            let all = peers.primary.peers.iter().chain(&peers.backup.peers);
            all.for_each(|peer| peer.state.observe(self.workers));
        }
        peers
    }

    /// `true` if a peer is ejected as an outlier.
    fn has_ejected(&self, peer: &peer::Peer, now: gale_runtime::Moment) -> bool {
        self.ejects && peer.state.ejection.is_on(now)
    }

    /// `true` if health checks let the peer get requests.
    fn is_well(&self, peer: &peer::Peer) -> bool {
        self.health.get().is_none_or(|plan| plan.allows(&peer.state.health))
    }

    /// Round robin without idle connections.
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

/// A group of a configuration, with its hash key and session settings.
pub struct Upstream<S> {
    group: Arc<Group>,
    /// Key of `hash`.
    key: Option<Template<S>>,
    sticky: Option<Sticky<S>>,
}

impl<S> Upstream<S> {
    /// The group.
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// `true` if sessions are bound to its servers.
    fn is_sticky(&self) -> bool {
        self.sticky.is_some()
    }
}

impl<S: Subject> Upstream<S> {
    /// Peers for this subject, in the order of the group's method.
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

    /// Value of the `Set-Cookie` field for a response of this peer, if the group has `sticky cookie`.
    pub fn session_cookie(&self, subject: &S, chosen: &Chosen) -> Option<Vec<u8>> {
        self.sticky.as_ref().and_then(|sticky| sticky.cookie(subject, chosen))
    }

    /// Learns from a response that a session is bound to this peer, if the group has `sticky learn`. Call it at both
    /// points of [`Learning`].
    pub fn learn_session(&self, subject: &S, chosen: &Chosen, when: Learning) {
        if let Some(sticky) = &self.sticky {
            sticky.learn(subject, chosen, when);
        }
    }
}

/// Bytes of a client's address; empty if it has no IP address.
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
