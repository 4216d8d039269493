//! Connections to servers that belong to one client (`ntlm`). A connection that a client has authenticated acts for
//! that user in all its requests, so it only carries requests of that client's connection and ends with it.
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_module.html#ntlm>)
//!
//! ```text
//!   exchange with NTLM credentials has ended ─► bound to the client's connection
//!            ▲                                                 │
//!            └──────── next request of the same client ◄───────┘
//! ```
//!
//! A connection may be used by any location, even with `keepalive … local`, since a site has several. An idle one is
//! only checked at its client's next request; until then it is idle at most as long as the client may be.

use gale_engine::connections::ConnectionInfo;
use gale_runtime::{SocketAddress, now};

use super::pool::{Knowledge, Pool, PoolKey, PooledConnection, WeakPool};

/// Most connections bound to one client, over all groups; each is a descriptor. The last used one of a group decides
/// the peer of the next request.
const BOUND_MAX: usize = 8;

/// Connections of a client, in order of last use.
#[derive(Default)]
struct BoundConnections(Vec<Bound>);

impl BoundConnections {
    /// Index of a connection of this pool with the same peer and options, whatever its user.
    fn place(&self, pool: &Pool, key: &PoolKey) -> Option<usize> {
        let is_for = |own: &PoolKey| own.peer == key.peer && own.made_with == key.made_with;
        self.0.iter().position(|bound| bound.pool.is_of(pool) && is_for(&bound.key))
    }
}

struct Bound {
    pool: WeakPool,
    key: PoolKey,
    connection: Box<PooledConnection>,
}

impl Pool {
    /// Peer of this client's own connection, if it has one.
    pub fn bound_peer(&self, client: &ConnectionInfo) -> Option<SocketAddress> {
        let find = |bound: &mut BoundConnections| {
            bound.0.iter().rfind(|bound| bound.pool.is_of(self)).map(|bound| bound.key.peer.clone())
        };
        client.with_note_if_any(find).flatten()
    }

    /// Takes this client's own connection with this key, if it has a usable one.
    pub fn take_bound(
        &self,
        client: &ConnectionInfo,
        key: &PoolKey,
        knowledge: Knowledge,
    ) -> Option<Box<PooledConnection>> {
        let take = |bound: &mut BoundConnections| {
            let place = bound.place(self, key)?;
            Some(bound.0.remove(place))
        };
        let Bound { connection, .. } = client.with_note_if_any(take).flatten()?;
        let idle_max = self.settings().timeout;
        let is_good = connection.is_idle(knowledge)
            && !connection.age.is_near_end(now())
            && now().since(connection.age.idle_since) <= idle_max;
        is_good.then_some(connection)
    }

    /// Keeps a connection that has carried another request for this client alone; its age includes the request. It is
    /// closed instead if it has reached its limits, or if the client has another one with this key; one that was bound
    /// before replaces the other.
    pub fn bind(&self, client: &ConnectionInfo, key: PoolKey, mut connection: Box<PooledConnection>, was_bound: bool) {
        connection.age.idle_since = now();
        if self.is_spent(&connection.age) {
            return;
        }
        let pool = self.downgrade();
        client.with_note(|bound: &mut BoundConnections| {
            // A connection opened meanwhile for a subrequest may only have been challenged.
            if let Some(other) = bound.place(self, &key) {
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
