//! The pools of this process: found by name for a configuration, listed for the status page, and ended with the
//! process.
//!
//! The registry keeps no pool alive, except `default`: the others belong to the configurations that name them.

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{Handle, PoolStatus, Shared, ThreadPool};

/// nginx's implicit pool: `thread_pool default threads=32 max_queue=65536`.
const DEFAULT_NAME: &str = "default";
const DEFAULT_THREADS: usize = 32;
const DEFAULT_QUEUE_MAX: usize = 65536;

/// All pools that have threads or an owner.
static POOLS: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

/// Pools that were requested by name.
static NAMED: Mutex<Vec<(Arc<str>, Weak<Handle>)>> = Mutex::new(Vec::new());

/// The pool named `default`, which always exists. [`ThreadPool::resize`] changes its limits.
pub fn default_pool() -> ThreadPool {
    static DEFAULT: OnceLock<ThreadPool> = OnceLock::new();
    DEFAULT.get_or_init(|| ThreadPool::new(DEFAULT_NAME, DEFAULT_THREADS, DEFAULT_QUEUE_MAX)).clone()
}

/// The existing pool of this name, with its limits; otherwise a new one with these. It exists as long as there are
/// handles to it.
pub fn named_pool(name: &str, threads: usize, queue_max: usize) -> ThreadPool {
    if name == DEFAULT_NAME {
        return default_pool();
    }
    let mut named = NAMED.lock();
    named.retain(|(_, handle)| handle.strong_count() > 0);
    let known = named.iter().find(|(known, _)| **known == *name).and_then(|(_, handle)| handle.upgrade());
    if let Some(handle) = known {
        return ThreadPool { handle };
    }
    let pool = ThreadPool::new(name, threads, queue_max);
    named.push((Arc::clone(&pool.handle.shared.name), Arc::downgrade(&pool.handle)));
    pool
}

/// All pools of this process, including ended ones whose threads have not.
pub fn pools() -> Vec<PoolStatus> {
    all().iter().map(|shared| shared.status()).collect()
}

/// Ends all pools: new tasks are refused, existing ones have at most `wait` to finish. True if all threads have ended.
/// Blocks: for the end of the process.
pub fn stop_pools(wait: Duration) -> bool {
    let deadline = Instant::now() + wait;
    let pools = all();
    pools.iter().for_each(|shared| shared.begin_end());
    // Every pool drops its waiting tasks, even if others did not end.
    let have_ended: Vec<bool> = pools.iter().map(|shared| shared.end(deadline)).collect();
    !have_ended.contains(&false)
}

pub(super) fn enter(shared: &Arc<Shared>) {
    let mut pools = POOLS.lock();
    pools.retain(|pool| pool.strong_count() > 0);
    pools.push(Arc::downgrade(shared));
}

fn all() -> Vec<Arc<Shared>> {
    POOLS.lock().iter().filter_map(Weak::upgrade).collect()
}
