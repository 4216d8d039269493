//! Idle connections that any loop may reuse: those to upstream servers, between two requests.
//!
//! ```text
//!   loop 1: park(key, stream)                         loop 2: take(&key)
//!     │ detached: nothing is in flight                  │ claimed: removed from its shard under the lock
//!     ▼                                                 │ not watched any more, looked at: no bytes, no end
//!   shard of loop 1 ── watched by the thread ──────────►▼
//!                      "idle streams"                 attached to loop 2
//! ```
//!
//! Only the loop that submitted an operation to its ring may cancel it, so a parked stream has left its driver and has
//! nothing in flight. Taking a stream needs no other thread: it is removed under a lock that is held for a few
//! instructions. Another loop's lock is only tried, so a loop that stalls or has ended delays no other, and the streams
//! it has parked remain available.
//!
//! All workers share them, so that `keepalive` is a number of the server and not of each worker, and a server's closed
//! connections are found before a request meets one; `docs/decisions/0002-threads-in-one-worker-process.md`.
//!
//! A stream with unread bytes, an end or an error is not idle. It is closed by the first that notices: `park`, the
//! thread (by an epoll event), or `take`. The thread also closes streams whose timeout has expired, within a second.
//!
//! In a simulation there is no thread: only `park` and `take` check.

mod watch;

use std::borrow::Borrow;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::hash::Hash;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use self::watch::Watch;
use super::Stream;
use crate::environment::Environment;
use crate::socket::Fresh;
use crate::time::{Moment, system_now};

/// Streams found not to be idle that one `take` closes at most before it returns `None`.
const CLOSED_PER_TAKE_MAX: usize = 16;

/// Limits of a set of idle streams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IdleOptions {
    /// Number of loops: each parks in a shard of its own and takes from there first.
    pub loops: usize,
    /// Streams that a loop parks at most; one more closes the one that has been idle longest (`keepalive`).
    pub per_loop_max: usize,
    /// Time that a stream may be idle (`keepalive_timeout`).
    pub timeout: Duration,
}

/// Idle streams by key, such as the address of the peer, each with data of the caller. A clone is the same set.
pub struct IdleStreams<K, T = ()> {
    shared: Arc<Shared<K, T>>,
}

impl<K, T> IdleStreams<K, T>
where
    K: Clone + Eq + Hash + Send + 'static,
    T: Send + 'static,
{
    /// An empty set.
    pub fn new(options: IdleOptions) -> Self {
        assert!(options.loops > 0 && options.per_loop_max > 0);
        let shards = (0..options.loops).map(|_| Shard::default()).collect();
        IdleStreams { shared: Arc::new_cyclic(|this| Shared { shards, options, this: this.clone() }) }
    }

    /// Parks a stream of the running loop on which no data is expected before the next request. False if it was closed
    /// instead: it is not idle, a send is in flight, or the kernel has no memory to watch it. With io_uring it costs
    /// one more system call if a receive is in flight. Panics outside of a loop.
    pub fn park(&self, key: K, stream: Stream, data: T) -> bool {
        if stream.has_input() {
            return false;
        }
        let is_watched = stream.kernel_socket().is_some();
        let Ok(detached) = stream.detach() else { return false };
        let socket = match detached.into_idle() {
            Ok(socket) => socket,
            Err(detached) => {
                drop(detached.attach());
                return false;
            }
        };
        let watch = if is_watched { Watch::started() } else { None };
        if is_watched && watch.is_none() {
            return false;
        }
        let shared = &self.shared;
        let number = own_shard(shared.shards.len());
        let shard = &shared.shards[number];
        let idle = Idle { key, socket, data, deadline: now() + shared.options.timeout, watch };
        let mut state = shard.lock();
        let mut closed = state.take_expired(now());
        if state.by_age.len() >= shared.options.per_loop_max {
            closed.extend(state.take_oldest());
        }
        // Under the lock: the loop that takes it next must find it watched.
        let is_kept = match watch.map(|watch| (watch, watch.enroll(&mut state.watched, &shared.this, number))) {
            Some((watch, shard)) => watch.add(idle.socket.as_fd(), shard, state.next).is_ok(),
            None => true,
        };
        if is_kept {
            state.insert(idle);
        } else {
            closed.push(idle);
        }
        shard.note_count(&state);
        drop(state);
        closed.into_iter().for_each(Idle::close);
        is_kept
    }

    /// Takes the stream with this key that was parked last, preferably by this loop, as a stream of the running loop.
    /// Panics outside of a loop.
    pub fn take<Q>(&self, key: &Q) -> Option<(Stream, T)>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        let now = now();
        for _ in 0..CLOSED_PER_TAKE_MAX {
            let idle = self.shared.claim(key)?;
            if idle.deadline <= now {
                idle.close();
                continue;
            }
            if let Some(watch) = idle.watch {
                watch.remove(idle.socket.as_fd());
            }
            let stream = Stream::attach(Environment::current(), idle.socket, Fresh::Connected);
            if !stream.has_input() {
                return Some((stream, idle.data));
            }
        }
        None
    }

    /// True if both are the same set.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Number of streams that the running loop has parked. Panics outside of a loop.
    pub fn own_len(&self) -> usize {
        self.shared.shards[own_shard(self.shared.shards.len())].count.load(Ordering::Relaxed)
    }

    /// Number of parked streams.
    pub fn len(&self) -> usize {
        self.shared.shards.iter().map(|shard| shard.count.load(Ordering::Relaxed)).sum()
    }

    /// True if no stream is parked.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Closes the stream parked by the running loop that has been idle longest. False if there is none. Panics outside
    /// of a loop.
    pub fn close_oldest_own(&self) -> bool {
        let shard = &self.shared.shards[own_shard(self.shared.shards.len())];
        let mut state = shard.lock();
        let oldest = state.take_oldest();
        shard.note_count(&state);
        drop(state);
        oldest.map(Idle::close).is_some()
    }

    /// Closes a stream that has been idle for long: the oldest one of the running loop, or of another loop whose lock
    /// is free. False if there is none. Panics outside of a loop.
    pub fn close_oldest(&self) -> bool {
        let shards = &self.shared.shards;
        let own = own_shard(shards.len());
        let oldest = (0..shards.len()).find_map(|distance| {
            let shard = &shards[(own + distance) % shards.len()];
            if shard.is_empty() {
                return None;
            }
            let mut state = if distance == 0 { shard.lock() } else { shard.state.try_lock()? };
            let oldest = state.take_oldest();
            shard.note_count(&state);
            oldest
        });
        oldest.map(Idle::close).is_some()
    }

    /// Closes all streams that are parked now.
    pub fn clear(&self) {
        self.shared.clear();
    }

    /// A weak handle to the same set.
    pub fn downgrade(&self) -> WeakIdleStreams<K, T> {
        WeakIdleStreams { shared: Arc::downgrade(&self.shared) }
    }
}

/// A weak handle to [`IdleStreams`].
pub struct WeakIdleStreams<K, T = ()> {
    shared: Weak<Shared<K, T>>,
}

impl<K, T> WeakIdleStreams<K, T> {
    /// The set, if it still exists.
    pub fn upgrade(&self) -> Option<IdleStreams<K, T>> {
        self.shared.upgrade().map(|shared| IdleStreams { shared })
    }

    /// True if this handle is to `streams`.
    pub fn is_of(&self, streams: &IdleStreams<K, T>) -> bool {
        self.shared.as_ptr() == Arc::as_ptr(&streams.shared)
    }
}

/// The state that clones share; the thread has a weak reference.
struct Shared<K, T> {
    shards: Vec<Shard<K, T>>,
    options: IdleOptions,
    this: Weak<Shared<K, T>>,
}

/// The streams of one loop. Padded: each loop writes to its own.
#[repr(align(128))]
struct Shard<K, T> {
    state: Mutex<State<K, T>>,
    /// Number of streams in `state`, readable without the lock.
    count: AtomicUsize,
}

struct State<K, T> {
    /// By number, in ascending order of parking.
    by_age: BTreeMap<u64, Idle<K, T>>,
    /// The numbers of each key, ascending.
    by_key: HashMap<K, VecDeque<u64>>,
    next: u64,
    /// The thread's name for this shard, once it is enrolled.
    watched: Option<watch::ShardId>,
}

/// A parked stream.
struct Idle<K, T> {
    key: K,
    socket: OwnedFd,
    data: T,
    deadline: Moment,
    /// `None` in a simulation.
    watch: Option<&'static Watch>,
}

impl<K, T> Idle<K, T> {
    fn close(self) {
        // A simulated socket is closed by its world; other threads have no world.
        if self.watch.is_none() && Environment::try_with(|_| ()).is_some() {
            drop(Stream::attach(Environment::current(), self.socket, Fresh::Connected));
        }
    }
}

impl<K, T> Default for Shard<K, T> {
    fn default() -> Self {
        let state = State { by_age: BTreeMap::new(), by_key: HashMap::new(), next: 0, watched: None };
        Shard { state: Mutex::new(state), count: AtomicUsize::new(0) }
    }
}

impl<K, T> Shard<K, T> {
    fn lock(&self) -> MutexGuard<'_, State<K, T>> {
        self.state.lock()
    }

    fn note_count(&self, state: &State<K, T>) {
        self.count.store(state.by_age.len(), Ordering::Relaxed);
    }

    fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }
}

impl<K: Clone + Eq + Hash, T> State<K, T> {
    fn insert(&mut self, idle: Idle<K, T>) {
        let number = self.next;
        self.next += 1;
        self.by_key.entry(idle.key.clone()).or_default().push_back(number);
        self.by_age.insert(number, idle);
    }

    fn remove(&mut self, number: u64) -> Option<Idle<K, T>> {
        let idle = self.by_age.remove(&number)?;
        let numbers = self.by_key.get_mut(&idle.key).expect("each has its key");
        if let Ok(index) = numbers.binary_search(&number) {
            numbers.remove(index);
        }
        if numbers.is_empty() {
            self.by_key.remove(&idle.key);
        }
        Some(idle)
    }

    fn take_newest<Q>(&mut self, key: &Q) -> Option<Idle<K, T>>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        let number = *self.by_key.get(key)?.back()?;
        self.remove(number)
    }

    fn take_oldest(&mut self) -> Option<Idle<K, T>> {
        let number = *self.by_age.first_key_value()?.0;
        self.remove(number)
    }

    /// Takes all expired streams: they are the oldest, as all have the same timeout.
    fn take_expired(&mut self, now: Moment) -> Vec<Idle<K, T>> {
        let mut expired = Vec::new();
        while self.by_age.first_key_value().is_some_and(|(_, idle)| idle.deadline <= now) {
            expired.extend(self.take_oldest());
        }
        expired
    }
}

impl<K: Clone + Eq + Hash, T> Shared<K, T> {
    /// Removes a stream with this key, which then belongs to the caller alone.
    fn claim<Q>(&self, key: &Q) -> Option<Idle<K, T>>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        let own = own_shard(self.shards.len());
        (0..self.shards.len()).find_map(|distance| {
            let shard = &self.shards[(own + distance) % self.shards.len()];
            if shard.is_empty() {
                return None;
            }
            let mut state = if distance == 0 { shard.lock() } else { shard.state.try_lock()? };
            let idle = state.take_newest(key);
            shard.note_count(&state);
            idle
        })
    }
}

impl<K, T> Shared<K, T> {
    fn clear(&self) {
        for shard in &self.shards {
            let mut state = shard.lock();
            let (by_age, by_key) = (std::mem::take(&mut state.by_age), std::mem::take(&mut state.by_key));
            shard.note_count(&state);
            drop(state);
            drop(by_key);
            by_age.into_values().for_each(Idle::close);
        }
    }
}

/// Called by the thread.
impl<K, T> watch::Watched for Shared<K, T>
where
    K: Clone + Eq + Hash + Send + 'static,
    T: Send + 'static,
{
    fn close(&self, shard: usize, number: u64) {
        let shard = &self.shards[shard];
        let mut state = shard.lock();
        // None if it was taken meanwhile.
        let idle = state.remove(number);
        shard.note_count(&state);
        drop(state);
        drop(idle);
    }

    fn close_expired(&self, shard: usize) {
        let shard = &self.shards[shard];
        let mut state = shard.lock();
        let expired = state.take_expired(system_now());
        shard.note_count(&state);
        drop(state);
        drop(expired);
    }
}

impl<K, T> Drop for Shared<K, T> {
    fn drop(&mut self) {
        self.clear();
    }
}

/// The shard of the running loop.
fn own_shard(shards: usize) -> usize {
    Environment::with(|environment| environment.worker % shards)
}

/// Time by the clock of the deadlines: the thread's, or that of the simulated world.
fn now() -> Moment {
    Environment::with(|environment| match environment.simulation {
        Some(_) => environment.clock.now(),
        None => system_now(),
    })
}

impl<K, T> Clone for IdleStreams<K, T> {
    fn clone(&self) -> Self {
        IdleStreams { shared: Arc::clone(&self.shared) }
    }
}

impl<K, T> fmt::Debug for IdleStreams<K, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IdleStreams")
    }
}
