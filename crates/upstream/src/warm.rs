//! Warm connections: used by a worker a moment ago, and taken again without locks, with one system call at most (a
//! look for input where the driver does not watch the socket).
//!
//! ```text
//!   response has ended ─► warm: this worker's, still with its driver ── idle for 200 ms ─► Pool: all workers'
//!            ▲                       │
//!            └──── next request ◄────┘
//! ```
//!
//! A connection in the pool has left its driver, and a thread watches it: parking and taking it costs some five system
//! calls, more than the rest of a small request. Without warm ones a small proxied answer took 21.2 µs of CPU time with
//! epoll, in nginx 11.7; now it takes 0.97 of nginx's (`docs/decisions/0050-what-a-proxied-request-costs.md`).
//!
//! Under load a connection is reused at once by the same worker. An unused one cools down into the pool. Both together
//! respect `keepalive` (`idle_permits.rs`), count towards `worker_connections`, and are closed when the worker has too
//! many connections.

use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::time::Duration;

use gale_runtime::{Moment, now, sleep, spawn};
use gale_worker::{IdleConnections, Search, Worker};

use super::idle_permits::IdlePermit;
use super::pool::{Knowledge, Pool, PoolKey, PooledConnection, WeakPool};

/// Time that a connection stays warm.
const WARM_TIME: Duration = Duration::from_millis(200);

/// Most warm connections of a worker, over all pools. Each holds a descriptor and some hundred bytes, for at most 200
/// ms; in a group of many servers a search may scan its whole pool. If the limit is below the connections in concurrent
/// use, the rest pass through the shared pool at each request: 64 warm connections for 128 clients cost 1.3 `epoll_ctl`
/// and 0.6 failed receives a request.
const WARM_MAX: usize = 512;

/// A worker's warm connections.
#[derive(Default)]
pub(super) struct WarmConnections {
    /// Pools that have warm connections or had some a moment ago.
    pools: Vec<WarmPool>,
    /// Number of warm connections.
    count: usize,
    /// `true` while a task lets them cool down.
    is_cooling: bool,
    /// Pools where this worker has parked connections.
    parked_in: Vec<WeakPool>,
    /// Registration as idle connections that may be closed; `None` until the first one.
    dispensable: Option<Rc<Dispensable>>,
}

struct WarmPool {
    pool: Pool,
    /// Connections in order of last use.
    connections: VecDeque<(PoolKey, Box<PooledConnection>)>,
    /// Permits held by this worker, at least one for each connection.
    held: usize,
    /// Most connections since permits were last given back.
    most: usize,
}

struct WarmConnection {
    pool: Pool,
    key: PoolKey,
    connection: Box<PooledConnection>,
    permit: IdlePermit,
}

impl WarmPool {
    fn new(pool: &Pool) -> WarmPool {
        WarmPool { pool: pool.clone(), connections: VecDeque::new(), held: 0, most: 0 }
    }

    /// Ensures a permit for one more connection. Returns the number of connections closed for that: the longest idle of
    /// this pool's warm ones.
    fn ensure_permit(&mut self) -> usize {
        let permits = self.pool.permits();
        if permits.are_owed(self.held) {
            self.held -= 1;
            self.most = self.most.min(self.held);
            permits.give_back(1);
        }
        let before = self.connections.len();
        while self.connections.len() >= self.held {
            match self.pool.take_permit(self.held) {
                true => self.held += 1,
                false => drop(self.connections.pop_front()),
            }
        }
        before - self.connections.len()
    }

    /// Takes a permit for a connection that is no longer warm.
    fn hand_over_permit(&mut self) -> IdlePermit {
        self.held -= 1;
        self.most = self.most.min(self.held);
        self.pool.permits().one_held()
    }

    /// Gives back permits that were not needed for some time.
    fn give_back_permits(&mut self) {
        self.pool.permits().give_back(self.held - self.most);
        self.held = self.most;
        self.most = self.connections.len();
    }

    /// Start of the oldest connection's idle time.
    fn idle_since(&self) -> Option<Moment> {
        self.connections.front().map(|(_, connection)| connection.age.idle_since)
    }
}

impl WarmConnections {
    fn of_pool(&mut self, pool: &Pool) -> Option<&mut WarmPool> {
        self.pools.iter_mut().find(|warm| warm.pool.is_same(pool))
    }

    /// Takes the last used connection with this key.
    fn take(&mut self, pool: &Pool, key: &PoolKey) -> Option<Box<PooledConnection>> {
        let warm = self.of_pool(pool)?;
        let found = warm.connections.iter().rposition(|(own, _)| own == key)?;
        let (_, connection) = warm.connections.remove(found)?;
        self.count -= 1;
        Some(connection)
    }

    /// Takes the longest idle connection, if it has been idle since `until`.
    fn take_oldest(&mut self, until: Option<Moment>) -> Option<WarmConnection> {
        let oldest = self.pools.iter_mut().filter(|warm| warm.idle_since().is_some());
        let oldest = oldest.min_by_key(|warm| warm.idle_since())?;
        if until.is_some_and(|until| oldest.idle_since() > Some(until)) {
            return None;
        }
        let (key, connection) = oldest.connections.pop_front()?;
        self.count -= 1;
        Some(WarmConnection { pool: oldest.pool.clone(), key, connection, permit: oldest.hand_over_permit() })
    }

    /// Ensures that this pool is listed and has a permit for one more connection.
    fn ensure_permit(&mut self, pool: &Pool) -> usize {
        let known = self.pools.iter().position(|warm| warm.pool.is_same(pool));
        let index = known.unwrap_or_else(|| {
            self.pools.push(WarmPool::new(pool));
            self.pools.len() - 1
        });
        self.count -= self.pools[index].ensure_permit();
        index
    }

    /// Adds a connection; returns `true` if the task that lets them cool down has to be started. At the limit, the
    /// connection is returned with its permit.
    fn keep(
        &mut self,
        pool: &Pool,
        key: PoolKey,
        connection: Box<PooledConnection>,
    ) -> Result<bool, Box<WarmConnection>> {
        let index = self.ensure_permit(pool);
        let warm = &mut self.pools[index];
        if self.count >= WARM_MAX {
            let permit = warm.hand_over_permit();
            return Err(Box::new(WarmConnection { pool: pool.clone(), key, connection, permit }));
        }
        warm.connections.push_back((key, connection));
        warm.most = warm.most.max(warm.connections.len());
        self.count += 1;
        Ok(!std::mem::replace(&mut self.is_cooling, true))
    }

    /// Remembers a pool with parked connections.
    fn note_parked(&mut self, pool: &Pool) {
        if !self.parked_in.iter().any(|parked_in| parked_in.is_of(pool)) {
            self.parked_in.retain(|parked_in| parked_in.own_len() > 0);
            self.parked_in.push(pool.downgrade());
        }
    }

    /// Removes pools without warm connections for some time; returns `true` if others remain.
    fn forget_empty_pools(&mut self) -> bool {
        self.pools.iter_mut().for_each(WarmPool::give_back_permits);
        self.pools.retain(|warm| warm.held > 0);
        !self.pools.is_empty()
    }
}

impl Drop for WarmPool {
    fn drop(&mut self) {
        self.pool.permits().give_back(self.held);
    }
}

/// A worker's idle connections, to be closed when it has too many connections.
struct Dispensable(Weak<Worker>);

impl IdleConnections for Dispensable {
    fn search(&self) -> Search {
        let has_some = self.0.upgrade().is_some_and(|worker| {
            worker.with_note(|warm: &mut WarmConnections| {
                warm.count > 0 || warm.parked_in.iter().any(|pool| pool.own_len() > 0)
            })
        });
        if has_some { Search::Found } else { Search::InVain(None) }
    }

    fn close_longest_idle(&self, wanted: usize) {
        let Some(worker) = self.0.upgrade() else { return };
        for _ in 0..wanted {
            // Parked connections have been idle longer than warm ones.
            let is_parked_closed =
                worker.with_note(|warm: &mut WarmConnections| warm.parked_in.iter().any(WeakPool::close_oldest_own));
            if !is_parked_closed {
                let oldest = worker.with_note(|warm: &mut WarmConnections| warm.take_oldest(None));
                if oldest.is_none() {
                    return;
                }
            }
        }
    }
}

/// Registers a worker's idle connections for closing, at the first one.
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

/// Takes a warm connection with this key that is still idle.
pub(super) fn take(worker: &Worker, pool: &Pool, key: &PoolKey, knowledge: Knowledge) -> Option<Box<PooledConnection>> {
    loop {
        let connection = worker.with_note(|warm: &mut WarmConnections| warm.take(pool, key))?;
        if connection.is_idle(knowledge) && !connection.age.is_near_end(now()) {
            return Some(connection);
        }
    }
}

/// Keeps a connection warm, or parks it for all workers at the limit. Returns `false` if it was closed instead.
pub(super) fn keep(worker: &Rc<Worker>, pool: &Pool, key: PoolKey, connection: Box<PooledConnection>) -> bool {
    let kept = worker.with_note(|warm: &mut WarmConnections| warm.keep(pool, key, connection));
    match kept {
        Ok(false) => {}
        Ok(true) => {
            register(worker);
            spawn(cool_down(Rc::downgrade(worker)));
        }
        Err(connection) => return cool(worker, *connection),
    }
    // A request that waits for a connection may get this one's place.
    worker.connections.note_idle();
    true
}

/// Parks a connection for all workers. Returns `false` if it was closed instead.
fn cool(worker: &Rc<Worker>, WarmConnection { pool, key, connection, permit }: WarmConnection) -> bool {
    if pool.permits().are_overdrawn() {
        // Closing frees the permit that the pool owes.
        return false;
    }
    let is_parked = pool.park_cold(worker, key, *connection, permit);
    if is_parked {
        register(worker);
        worker.with_note(|warm: &mut WarmConnections| warm.note_parked(&pool));
        worker.connections.note_idle();
    }
    is_parked
}

/// Moves unused connections to their pools until none is left.
async fn cool_down(worker: Weak<Worker>) {
    loop {
        sleep(WARM_TIME).await;
        let Some(worker) = worker.upgrade() else { return };
        loop {
            // Saturates, because the clock starts at zero.
            let until = Moment::from_nanos(now().as_nanos().saturating_sub(WARM_TIME.as_nanos() as u64));
            let cold = worker.with_note(|warm: &mut WarmConnections| warm.take_oldest(Some(until)));
            let Some(cold) = cold else { break };
            cool(&worker, cold);
        }
        let is_done = worker.with_note(|warm: &mut WarmConnections| {
            warm.is_cooling = warm.forget_empty_pools();
            !warm.is_cooling
        });
        if is_done {
            return;
        }
    }
}
