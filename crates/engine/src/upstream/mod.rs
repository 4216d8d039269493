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
mod peer;
mod peers;
mod pool;
mod registry;
mod selection;
mod state;

use std::fmt;
use std::sync::Arc;

use gale_runtime::{SocketAddress, worker};
use parking_lot::Mutex;

use crate::variables::subject::Subject;
pub use balance::Balance;
use balance::Choice;
use peer::{Peer, address_name};
pub use peer::{ServerSettings, Standing};
use peers::{Peers, View};
pub use pool::{ConnectionAge, KeepaliveSettings, Pool, PoolKey};
pub use registry::{
    GroupDraft, HasUpstreams, ServerDraft, ServerSource, UpstreamId, UpstreamTable, UpstreamTarget, Upstreams,
};
pub use selection::{Chosen, NoPeer, Selection, Timing};
use state::GroupState;

/// The servers of one `upstream` block, or those that a name stands for.
pub struct Group {
    common: Arc<Common>,
    /// By worker.
    seats: Box<[Seat]>,
}

/// What a worker sees of the group now. Only this worker locks it, and whoever replaces the list.
#[repr(align(128))]
struct Seat(Mutex<Arc<View>>);

/// What stays the same when the list is replaced.
struct Common {
    name: Box<str>,
    balance: Balance,
    /// How many parts a weight of one has: more than one only where weights grow slowly.
    weight_unit: i64,
    pool: Option<Pool>,
    state: Arc<GroupState>,
    workers: usize,
}

impl Group {
    /// The group's name: that of its block, or the host.
    pub fn name(&self) -> &str {
        &self.common.name
    }

    /// A group of addresses that were found at run time, for one request: in turn, and nothing is remembered of them.
    pub fn of_addresses(name: &str, addresses: &[SocketAddress]) -> Arc<Group> {
        let settings = Arc::new(ServerSettings::default());
        let server: Arc<[u8]> = name.as_bytes().into();
        let peer = |address: &SocketAddress| Peer {
            address: address.clone(),
            name: address_name(address),
            server: Arc::clone(&server),
            settings: Arc::clone(&settings),
            state: Arc::new(peer::PeerState::new(0)),
        };
        let peers = Peers::new(addresses.iter().map(peer).collect(), Vec::new());
        let common = Common {
            name: name.into(),
            balance: Balance::RoundRobin,
            weight_unit: 1,
            pool: None,
            state: Arc::default(),
            workers: 1,
        };
        Group::new(common, peers)
    }

    fn new(common: Common, peers: Peers) -> Arc<Group> {
        let (common, peers) = (Arc::new(common), Arc::new(peers));
        let seat = |worker| Seat(Mutex::new(View::new(&common, &peers, worker)));
        let seats = (0..common.workers).map(seat).collect();
        Arc::new(Group { common, seats })
    }

    /// The group's idle connections; `None` where none are kept.
    pub fn connections(&self) -> Option<&Pool> {
        self.common.pool.as_ref()
    }

    /// The peers for one request, when there is nothing to choose by: round robin.
    pub fn select(&self) -> Selection {
        Selection::new(self.view(), Choice::RoundRobin)
    }

    /// What the running worker sees.
    fn view(&self) -> Arc<View> {
        let seat = &self.seats[worker() % self.seats.len()];
        Arc::clone(&seat.0.lock())
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
    of: std::marker::PhantomData<fn(&S)>,
}

impl<S> Upstream<S> {
    fn new(group: Arc<Group>) -> Upstream<S> {
        Upstream { group, of: std::marker::PhantomData }
    }

    /// The group.
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }
}

impl<S: Subject> Upstream<S> {
    /// The peers for this subject, in the order that the group's method chooses.
    pub fn select(&self, _subject: &S) -> Selection {
        self.group.select()
    }
}

impl<S> fmt::Debug for Upstream<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.group, f)
    }
}
