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
//! had it. What nobody takes cools down into the pool. Both together keep to `keepalive` (`idle_permits.rs`), count as
//! the worker's connections (`worker_connections`), and are given up when it has too many.

use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::time::Duration;

use gale_runtime::{Moment, now, sleep, spawn};

use super::idle_permits::IdlePermit;
use super::pool::{Knowledge, Pool, PoolKey, PooledConnection, WeakPool};
use crate::worker::{IdleConnections, Search, Worker};

/// How long a connection stays warm.
const WARM_TIME: Duration = Duration::from_millis(200);

/// Most warm connections of a worker, of all pools. Each holds a descriptor and some hundred bytes, for 200 ms at most;
/// a search in a group of many servers may look at all of its pool. Where they are fewer than are in use at once, the
/// rest goes through the pool of all workers with each request: with 64 warm ones for 128 clients, that was 1.3
/// `epoll_ctl` and 0.6 receives in vain for each.
const WARM_MAX: usize = 512;

/// What a worker knows of the connections that it has left idle.
#[derive(Default)]
pub(super) struct WarmConnections {
    /// Those of each pool that has some or had some a moment ago.
    pools: Vec<WarmPool>,
    /// How many there are.
    count: usize,
    /// A task has them cool down.
    is_cooling: bool,
    /// Where it has parked some.
    parked_in: Vec<WeakPool>,
    /// What it can do without; `None` before there is anything.
    dispensable: Option<Rc<Dispensable>>,
}

/// The warm connections of one pool.
struct WarmPool {
    pool: Pool,
    /// Those that were used last behind.
    connections: VecDeque<(PoolKey, Box<PooledConnection>)>,
    /// The permits that this worker has, at least one for each connection.
    held: usize,
    /// How many connections there were at most, since permits were given back.
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

    /// Sees to a permit for one more connection, and says how many were closed for that: those that have been idle for
    /// longest, here of the warm ones.
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

    /// A permit for a connection that is not warm.
    fn hand_over_permit(&mut self) -> IdlePermit {
        self.held -= 1;
        self.most = self.most.min(self.held);
        self.pool.permits().one_held()
    }

    /// Gives back the permits that were not needed for some time.
    fn give_back_permits(&mut self) {
        self.pool.permits().give_back(self.held - self.most);
        self.held = self.most;
        self.most = self.connections.len();
    }

    /// Since when the oldest one is idle.
    fn idle_since(&self) -> Option<Moment> {
        self.connections.front().map(|(_, connection)| connection.age.idle_since)
    }
}

impl WarmConnections {
    fn of_pool(&mut self, pool: &Pool) -> Option<&mut WarmPool> {
        self.pools.iter_mut().find(|warm| warm.pool.is_same(pool))
    }

    /// The connection with this key that was used last.
    fn take(&mut self, pool: &Pool, key: &PoolKey) -> Option<Box<PooledConnection>> {
        let warm = self.of_pool(pool)?;
        let found = warm.connections.iter().rposition(|(own, _)| own == key)?;
        let (_, connection) = warm.connections.remove(found)?;
        self.count -= 1;
        Some(connection)
    }

    /// The one that has been idle for longest, if it has been for so long at this time.
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

    /// Where connections of this pool are, with a permit for one more.
    fn ensure_permit(&mut self, pool: &Pool) -> usize {
        let known = self.pools.iter().position(|warm| warm.pool.is_same(pool));
        let index = known.unwrap_or_else(|| {
            self.pools.push(WarmPool::new(pool));
            self.pools.len() - 1
        });
        self.count -= self.pools[index].ensure_permit();
        index
    }

    /// Adds a connection, and says whether a task has to be started that lets them cool down. If there are as many as
    /// may be, it is given back with its permit.
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

    /// Remembers where connections are parked.
    fn note_parked(&mut self, pool: &Pool) {
        if !self.parked_in.iter().any(|parked_in| parked_in.is_of(pool)) {
            self.parked_in.retain(|parked_in| parked_in.own_len() > 0);
            self.parked_in.push(pool.downgrade());
        }
    }

    /// Forgets the pools of which nothing was warm for some time, and says whether others are left.
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

/// The idle connections of a worker as something to be given up when it has too many connections.
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
            // What is parked has been idle for longer than what is warm.
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
pub(super) fn take(worker: &Worker, pool: &Pool, key: &PoolKey, knowledge: Knowledge) -> Option<Box<PooledConnection>> {
    loop {
        let connection = worker.with_note(|warm: &mut WarmConnections| warm.take(pool, key))?;
        if connection.is_idle(knowledge) && !connection.age.is_near_end(now()) {
            return Some(connection);
        }
    }
}

/// Keeps a connection warm, or parks it for all workers if there are as many warm ones as may be. False if it was
/// closed instead.
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
    // A request that waits for a connection may have this one's permit.
    worker.connections.note_idle();
    true
}

/// Parks a connection for all workers. False if it was closed instead.
fn cool(worker: &Rc<Worker>, WarmConnection { pool, key, connection, permit }: WarmConnection) -> bool {
    if pool.permits().are_overdrawn() {
        // Its permit is what others have too many.
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

/// Gives connections that nobody has taken to their pools, until none is left.
async fn cool_down(worker: Weak<Worker>) {
    loop {
        sleep(WARM_TIME).await;
        let Some(worker) = worker.upgrade() else { return };
        loop {
            // Nothing is idle since before the clock began.
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
