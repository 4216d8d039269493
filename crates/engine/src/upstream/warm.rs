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
//! had it. What nobody takes cools down into the pool. Both together keep to `keepalive`, count as the worker's
//! connections (`worker_connections`), and are given up when it has too many.

use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::time::Duration;

use gale_runtime::{Moment, now, sleep, spawn};

use super::pool::{IdleConnection, Knowledge, Pool, PoolKey, WeakPool};
use crate::worker::{IdleConnections, Search, Worker};

/// How long a connection stays warm.
const WARM_TIME: Duration = Duration::from_millis(200);

/// Most warm connections of a worker, of all pools: a search looks at all of them.
const WARM_MAX: usize = 64;

/// What a worker knows of the connections that it has left idle.
#[derive(Default)]
pub(super) struct WarmConnections {
    /// Those that were used last behind.
    connections: VecDeque<WarmConnection>,
    /// A task has them cool down.
    is_cooling: bool,
    /// Where it has parked some.
    parked_in: Vec<WeakPool>,
    /// What it can do without; `None` before there is anything.
    dispensable: Option<Rc<Dispensable>>,
}

struct WarmConnection {
    pool: Pool,
    key: PoolKey,
    connection: IdleConnection,
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
        if now.since(oldest.connection.age.idle_since) < WARM_TIME { None } else { self.connections.pop_front() }
    }

    /// Whether there is room for one more of this pool. One more than the pool may have closes the one that has been
    /// idle for longest; here, of the warm ones.
    fn make_room(&mut self, pool: &Pool) -> bool {
        let of_pool = self.connections.iter().filter(|other| other.pool.is_same(pool)).count();
        if of_pool + pool.own_len() >= pool.connections_max() {
            let Some(oldest) = self.connections.iter().position(|other| other.pool.is_same(pool)) else {
                return false;
            };
            self.connections.remove(oldest);
        }
        self.connections.len() < WARM_MAX
    }

    /// Remembers where connections are parked.
    fn note_parked(&mut self, pool: &Pool) {
        if !self.parked_in.iter().any(|parked_in| parked_in.is_of(pool)) {
            self.parked_in.retain(|parked_in| parked_in.own_len() > 0);
            self.parked_in.push(pool.downgrade());
        }
    }
}

/// The idle connections of a worker as something to be given up when it has too many connections.
struct Dispensable(Weak<Worker>);

impl IdleConnections for Dispensable {
    fn search(&self) -> Search {
        let has_some = self.0.upgrade().is_some_and(|worker| {
            worker.with_note(|warm: &mut WarmConnections| {
                !warm.connections.is_empty() || warm.parked_in.iter().any(|pool| pool.own_len() > 0)
            })
        });
        if has_some { Search::Found } else { Search::InVain(None) }
    }

    fn close_longest_idle(&self, wanted: usize) {
        let Some(worker) = self.0.upgrade() else { return };
        for _ in 0..wanted {
            // What is parked has been idle for longer than what is warm.
            let is_parked_closed =
                worker.with_note(|warm: &mut WarmConnections| warm.parked_in.iter().any(WeakPool::close_oldest_own));
            if !is_parked_closed {
                let oldest = worker.with_note(|warm: &mut WarmConnections| warm.connections.pop_front());
                if oldest.is_none() {
                    return;
                }
            }
        }
    }
}

/// Has a worker give up its idle connections if it must, from the first one on.
fn register(worker: &Rc<Worker>) {
    let dispensable = worker.with_note(|warm: &mut WarmConnections| {
        if warm.dispensable.is_some() {
            return None;
        }
        Some(Rc::clone(warm.dispensable.insert(Rc::new(Dispensable(Rc::downgrade(worker))))))
    });
    if let Some(dispensable) = dispensable {
        let dispensable: Rc<dyn IdleConnections> = dispensable;
        worker.connections.register_first(Rc::downgrade(&dispensable));
    }
}

/// A warm connection with this key that is still idle.
pub(super) fn take(worker: &Worker, pool: &Pool, key: &PoolKey, knowledge: Knowledge) -> Option<IdleConnection> {
    loop {
        let WarmConnection { connection, .. } = worker.with_note(|warm: &mut WarmConnections| warm.take(pool, key))?;
        let is_idle = match knowledge {
            Knowledge::Driver => connection.transport.is_idle(),
            Knowledge::Kernel => connection.transport.is_idle() && !connection.transport.socket().has_input(),
        };
        if is_idle && !connection.age.is_near_end(now()) {
            return Some(connection);
        }
    }
}

/// Keeps a connection warm, or parks it for all workers if there are as many warm ones as may be. False if it was
/// closed instead.
pub(super) fn keep(worker: &Rc<Worker>, pool: &Pool, key: PoolKey, connection: IdleConnection) -> bool {
    if !worker.with_note(|warm: &mut WarmConnections| warm.make_room(pool)) {
        return cool(worker, pool, key, connection);
    }
    let was_cooling = worker.with_note(|warm: &mut WarmConnections| {
        warm.connections.push_back(WarmConnection { pool: pool.clone(), key, connection });
        std::mem::replace(&mut warm.is_cooling, true)
    });
    if !was_cooling {
        register(worker);
        spawn(cool_down(Rc::downgrade(worker)));
    }
    // Whoever waits for a connection may have this one's place.
    worker.connections.note_idle();
    true
}

/// Parks a connection for all workers. False if it was closed instead.
fn cool(worker: &Rc<Worker>, pool: &Pool, key: PoolKey, connection: IdleConnection) -> bool {
    let is_parked = pool.park_cold(worker, key, connection);
    if is_parked {
        register(worker);
        worker.with_note(|warm: &mut WarmConnections| warm.note_parked(pool));
        worker.connections.note_idle();
    }
    is_parked
}

/// Gives connections that nobody has taken to their pools, until none is left.
async fn cool_down(worker: Weak<Worker>) {
    loop {
        sleep(WARM_TIME).await;
        let Some(worker) = worker.upgrade() else { return };
        while let Some(cold) = worker.with_note(|warm: &mut WarmConnections| warm.take_cold(now())) {
            let WarmConnection { pool, key, connection } = cold;
            cool(&worker, &pool, key, connection);
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
