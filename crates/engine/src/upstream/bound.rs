//! Connections to servers that belong to one client (`ntlm`): a connection that a client has authenticated stands for
//! that user in all that it carries, so it carries requests of that client's connection alone, and ends with it.
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_module.html#ntlm>)
//!
//! ```text
//!   response has ended, credentials of the connection were in it ─► bound to the client's connection
//!            ▲                                                               │
//!            └──────────── next request of the same client ◄─────────────────┘
//! ```
//!
//! The location that a connection was made for does not matter, even with `keepalive … local`: a site has several. An
//! idle one is looked at when its client has another request; until then it is idle for no longer than the client may
//! be.

use gale_runtime::{SocketAddress, now};

use super::pool::{Knowledge, Pool, PoolKey, PooledConnection, WeakPool};
use crate::connections::ConnectionInfo;

/// Most connections that belong to one client, of all groups: each is a descriptor. The one that was used last of a
/// group says which peer the next request goes to.
const BOUND_MAX: usize = 8;

/// Those of a client, in the order in which they were used last.
#[derive(Default)]
struct BoundConnections(Vec<Bound>);

impl BoundConnections {
    /// Where one of this pool is that may stand for one with this key, whoever uses it.
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
