//! Connections that a worker has used a moment ago: it takes them again without asking anybody, and without a system
//! call.
//!
//! ```text
//!   response has ended ─► warm: this worker's, still with its driver ── idle for 200 ms ─► Pool: all workers'
//!            ▲                       │
//!            └──── next request ◄────┘
//! ```
//!
//! A connection in the pool has left its driver, and a thread watches it: to park and to take it costs some five system
//! calls, more than a small request does otherwise. Under load a connection is used again at once, by the worker that
//! had it. What nobody takes cools down into the pool. Both together keep to `keepalive`.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use gale_runtime::{Moment, now, sleep, spawn};

use super::pool::{ConnectionAge, Pool, PoolKey};
use crate::transport::Transport;
use crate::worker::Worker;

/// How long a connection stays warm.
const WARM_TIME: Duration = Duration::from_millis(200);

/// Most warm connections of a worker, of all pools: a search looks at all of them.
const WARM_MAX: usize = 64;

/// The warm connections of one worker, those that were used last behind.
#[derive(Default)]
pub(super) struct WarmConnections {
    connections: VecDeque<WarmConnection>,
    /// A task has them cool down.
    is_cooling: bool,
}

struct WarmConnection {
    pool: Pool,
    key: PoolKey,
    transport: Transport,
    age: ConnectionAge,
}

impl WarmConnections {
    /// The connection with this key that was used last.
    fn take(&mut self, pool: &Pool, key: &PoolKey) -> Option<WarmConnection> {
        let found = self.connections.iter().rposition(|warm| warm.key == *key && warm.pool.is_same(pool))?;
        self.connections.remove(found)
    }

    /// The oldest one, if it has been idle for so long at this time.
    fn take_cold(&mut self, now: Moment) -> Option<WarmConnection> {
        let oldest = self.connections.front()?;
        if now.since(oldest.age.idle_since) < WARM_TIME { None } else { self.connections.pop_front() }
    }
}

/// A warm connection with this key that is still idle.
pub(super) fn take(worker: &Worker, pool: &Pool, key: &PoolKey) -> Option<(Transport, ConnectionAge)> {
    loop {
        let warm = worker.with_note(|warm: &mut WarmConnections| warm.take(pool, key))?;
        if !warm.age.is_near_end(now()) && warm.transport.is_idle() {
            return Some((warm.transport, warm.age));
        }
    }
}

/// Keeps a connection warm. Returns it if there are as many as may be.
pub(super) fn keep(
    worker: &Rc<Worker>,
    pool: &Pool,
    key: PoolKey,
    transport: Transport,
    age: ConnectionAge,
) -> Result<(), (PoolKey, Transport)> {
    worker.with_note(|warm: &mut WarmConnections| {
        let of_pool = warm.connections.iter().filter(|other| other.pool.is_same(pool)).count();
        if of_pool + pool.own_len() >= pool.connections_max() {
            // One more closes the one that has been idle for longest; here, of the warm ones.
            let Some(oldest) = warm.connections.iter().position(|other| other.pool.is_same(pool)) else {
                return Err((key, transport));
            };
            warm.connections.remove(oldest);
        }
        if warm.connections.len() >= WARM_MAX {
            return Err((key, transport));
        }
        warm.connections.push_back(WarmConnection { pool: pool.clone(), key, transport, age });
        if !std::mem::replace(&mut warm.is_cooling, true) {
            spawn(cool_down(Rc::downgrade(worker)));
        }
        Ok(())
    })
}

/// Gives connections that nobody has taken to their pools, until none is left.
async fn cool_down(worker: std::rc::Weak<Worker>) {
    loop {
        sleep(WARM_TIME).await;
        let Some(worker) = worker.upgrade() else { return };
        while let Some(cold) = worker.with_note(|warm: &mut WarmConnections| warm.take_cold(now())) {
            let WarmConnection { pool, key, transport, age } = cold;
            pool.park_cold(key, transport, age);
        }
        let is_done = worker.with_note(|warm: &mut WarmConnections| {
            warm.is_cooling = !warm.connections.is_empty();
            !warm.is_cooling
        });
        if is_done {
            return;
        }
    }
}
