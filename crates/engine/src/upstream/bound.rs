//! Connections to servers that belong to one client (`ntlm`): whoever has authenticated a connection is the user of all
//! that it carries, so it carries requests of that client's connection alone, and ends with it.
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_module.html#ntlm>)
//!
//! ```text
//!   response has ended, credentials of the connection were in it ─► bound to the client's connection
//!            ▲                                                               │
//!            └──────────── next request of the same client ◄─────────────────┘
//! ```
//!
//! The location that a connection was made for does not matter, even with `keepalive … local`: a site has several. An
//! idle one is looked at when its client has another request; until then it is idle for no longer than the client may be.

use gale_runtime::{SocketAddress, now};

use super::pool::{Knowledge, Pool, PoolKey, PooledConnection, WeakPool};
use crate::connections::ConnectionInfo;

/// Most connections that belong to one client, of all groups: each is a descriptor. The one that was used last of a
/// group says which peer the next request goes to.
const BOUND_MAX: usize = 8;

/// Those of a client, in the order in which they were used last.
#[derive(Default)]
struct BoundConnections(Vec<Bound>);

struct Bound {
    pool: WeakPool,
    key: PoolKey,
    connection: Box<PooledConnection>,
}

impl Pool {
    /// The peer that this client's own connection leads to, if it has one.
    pub fn bound_peer(&self, client: &ConnectionInfo) -> Option<SocketAddress> {
        let find = |bound: &mut BoundConnections| {
            bound.0.iter().rfind(|bound| bound.pool.is_of(self)).map(|bound| bound.key.peer.clone())
        };
        client.with_note_if_any(find).flatten()
    }

    /// This client's own connection with this key, if it has one that is still good.
    pub fn take_bound(
        &self,
        client: &ConnectionInfo,
        key: &PoolKey,
        knowledge: Knowledge,
    ) -> Option<Box<PooledConnection>> {
        let take = |bound: &mut BoundConnections| {
            let place = bound.0.iter().position(|bound| bound.pool.is_of(self) && is_for(&bound.key, key))?;
            Some(bound.0.remove(place))
        };
        let Bound { connection, .. } = client.with_note_if_any(take).flatten()?;
        let idle_max = self.settings().timeout;
        let is_good = connection.is_idle(knowledge)
            && !connection.age.is_near_end(now())
            && now().since(connection.age.idle_since) <= idle_max;
        is_good.then_some(connection)
    }

    /// Keeps a connection that has carried a request more for this client alone; its age counts it. It is closed
    /// instead if it has had its requests or its time, or if the client has another one with this key; one that was
    /// the client's own before takes the place of that one.
    pub fn bind(&self, client: &ConnectionInfo, key: PoolKey, mut connection: Box<PooledConnection>, was_bound: bool) {
        connection.age.idle_since = now();
        if self.is_spent(&connection.age) {
            return;
        }
        let pool = self.downgrade();
        client.with_note(|bound: &mut BoundConnections| {
            // One that was opened beside it meanwhile, for a subrequest, may have been challenged only.
            if let Some(other) = bound.0.iter().position(|bound| bound.pool.is_of(self) && is_for(&bound.key, &key)) {
                if !was_bound {
                    return;
                }
                bound.0.remove(other);
            }
            if bound.0.len() == BOUND_MAX {
                bound.0.remove(0);
            }
            bound.0.push(Bound { pool, key, connection });
        });
    }
}

/// Whether a connection with one key may stand for one with the other, whoever uses it.
fn is_for(one: &PoolKey, other: &PoolKey) -> bool {
    one.peer == other.peer && one.made_with == other.made_with
}
