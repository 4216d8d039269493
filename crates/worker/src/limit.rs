//! `worker_connections`: limit on a loop's connections, and making room for new ones.
//! (<https://nginx.org/en/docs/ngx_core_module.html#worker_connections>)
//!
//! Connections of clients count and, as in nginx, those to upstreams, including idle ones. Owners of idle connections
//! that can be closed register them as [`IdleConnections`]. Those to upstreams are closed before those of clients,
//! which would have to reconnect over a longer distance.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Poll, Waker};

use gale_runtime::{Moment, TaskId};

use super::Worker;

/// Most connections above the limit, besides one for each socket. An idle connection is closed only after a new one was
/// accepted, and may be busy by then. At this number, idle ones are closed before the next one is accepted.
const ABOVE_LIMIT_MAX: usize = 32;

/// Progress of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Search {
    /// A connection that may be closed was found.
    Found,
    /// Nothing yet; the search continues in the next turn.
    GoesOn,
    /// Nothing was found anywhere. Search again when a connection becomes idle, at the latest at this time.
    InVain(Option<Moment>),
}

impl Search {
    /// Combines the results of two searches.
    fn or(self, other: Search) -> Search {
        match (self, other) {
            (Search::Found, _) | (_, Search::Found) => Search::Found,
            (Search::GoesOn, _) | (_, Search::GoesOn) => Search::GoesOn,
            (Search::InVain(one), Search::InVain(other)) => Search::InVain(one.into_iter().chain(other).min()),
        }
    }
}

/// Idle connections of one kind, which can be closed to make room.
pub trait IdleConnections {
    /// Searches for one that may be closed, with bounded work.
    fn search(&self) -> Search;

    /// Closes about as many as wanted, the longest idle of those examined.
    fn close_longest_idle(&self, wanted: usize);
}

/// Count of the connections of one loop.
pub struct WorkerConnections {
    open: Cell<usize>,
    /// Connections that this loop has parked for all loops to take.
    parked: Arc<AtomicUsize>,
    max: Cell<usize>,
    waiting: RefCell<Vec<Waker>>,
    idle: RefCell<Vec<Weak<dyn IdleConnections>>>,
    /// Time and task of the next wake-up of those that wait for room.
    alarm: Cell<Option<(Moment, TaskId)>>,
}

impl WorkerConnections {
    /// No open connections, with this limit.
    pub fn new(max: usize) -> WorkerConnections {
        WorkerConnections {
            open: Cell::new(0),
            parked: Arc::default(),
            max: Cell::new(max),
            waiting: RefCell::default(),
            idle: RefCell::default(),
            alarm: Cell::new(None),
        }
    }

    /// Number of open connections.
    pub fn open(&self) -> usize {
        self.open.get() + self.parked.load(Ordering::Relaxed)
    }

    /// The limit.
    pub fn max(&self) -> usize {
        self.max.get()
    }

    /// Changes the limit.
    pub fn set_max(&self, max: usize) {
        self.max.set(max);
        self.wake_waiting();
    }

    /// Counts an open connection, even above the limit.
    pub fn count_opened(&self) {
        self.open.set(self.open.get() + 1);
    }

    /// Counts a closed connection.
    #[inline]
    pub fn count_closed(&self) {
        self.open.set(self.open.get() - 1);
        self.wake_waiting();
    }

    /// Counts a connection here that any loop may take, until one does.
    pub fn count_parked(&self) -> ParkedConnection {
        self.parked.fetch_add(1, Ordering::Relaxed);
        ParkedConnection(Arc::clone(&self.parked))
    }

    /// `true` if one more is within the limit.
    pub fn has_room(&self) -> bool {
        self.open() < self.max.get()
    }

    /// Number of connections above seven eighths of the limit (nginx's accept_disabled).
    pub fn above_comfort(&self) -> usize {
        let max = self.max.get();
        self.open().saturating_sub(max - max / 8)
    }

    fn above_limit(&self) -> usize {
        self.open().saturating_sub(self.max.get())
    }

    /// Registers idle connections that may be closed to make room, after those registered before.
    pub fn register(&self, idle: Weak<dyn IdleConnections>) {
        let mut all = self.idle.borrow_mut();
        all.retain(|idle| idle.strong_count() > 0);
        all.push(idle);
    }

    /// Registers idle connections that are closed before all others.
    pub fn register_first(&self, idle: Weak<dyn IdleConnections>) {
        self.idle.borrow_mut().insert(0, idle);
    }

    fn idle_connections(&self) -> Vec<Rc<dyn IdleConnections>> {
        self.idle.borrow().iter().filter_map(Weak::upgrade).collect()
    }

    /// Searches for room, with bounded work: below the limit, or an idle connection that can be closed.
    pub fn look_for_room(&self) -> Search {
        if self.has_room() {
            return Search::Found;
        }
        let mut found = Search::InVain(None);
        for idle in self.idle_connections() {
            found = found.or(idle.search());
        }
        if found == Search::Found && self.above_limit() >= ABOVE_LIMIT_MAX {
            self.close_longest_idle();
            return Search::GoesOn;
        }
        found
    }

    /// Closes idle connections, so that there is room for one more if enough are found.
    pub fn close_longest_idle(&self) {
        for idle in self.idle_connections() {
            idle.close_longest_idle(self.above_limit() + 1);
            if self.has_room() {
                return;
            }
        }
    }

    /// Notes that a connection has become idle, and wakes those that wait for room.
    #[inline]
    pub fn note_idle(&self) {
        if !self.has_room() {
            self.wake_waiting();
        }
    }

    /// Wakes those that wait for room.
    #[inline]
    pub fn wake_waiting(&self) {
        if !self.waiting.borrow().is_empty() {
            self.waiting.take().into_iter().for_each(Waker::wake);
        }
    }
}

/// A connection to an upstream, which counts towards `worker_connections` until dropped.
pub struct CountedConnection(Rc<Worker>);

impl CountedConnection {
    /// Counts one more if there is room; an idle one is closed if needed.
    pub fn open(worker: &Rc<Worker>) -> Option<CountedConnection> {
        let connections = &worker.connections;
        if !connections.has_room() {
            connections.close_longest_idle();
            if !connections.has_room() {
                return None;
            }
        }
        Some(CountedConnection::taken(worker))
    }

    /// Counts an open connection taken from another worker, even above the limit.
    pub fn taken(worker: &Rc<Worker>) -> CountedConnection {
        worker.connections.count_opened();
        CountedConnection(Rc::clone(worker))
    }
}

impl Drop for CountedConnection {
    fn drop(&mut self) {
        self.0.connections.count_closed();
    }
}

/// A connection that counts for the worker that has parked it until it is dropped, on any thread.
#[derive(Debug)]
pub struct ParkedConnection(Arc<AtomicUsize>);

impl Drop for ParkedConnection {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Worker {
    /// Waits for a wake-up that there may be room, or until `later`, when a protected connection
    /// (`keepalive_min_timeout`) may be closed.
    pub async fn room(self: &Rc<Self>, later: Option<Moment>) {
        let mut has_waited = false;
        poll_fn(|context| {
            if std::mem::replace(&mut has_waited, true) {
                return Poll::Ready(());
            }
            self.connections.waiting.borrow_mut().push(context.waker().clone());
            if let Some(later) = later {
                self.wake_waiting_at(later);
            }
            Poll::Pending
        })
        .await;
    }

    fn wake_waiting_at(self: &Rc<Self>, time: Moment) {
        let alarm = &self.connections.alarm;
        match alarm.get() {
            Some((earlier, _)) if earlier <= time => return,
            Some((_, task)) => gale_runtime::abort(task),
            None => {}
        }
        let worker = Rc::downgrade(self);
        let task = gale_runtime::spawn(async move {
            gale_runtime::sleep_until(time).await;
            if let Some(worker) = worker.upgrade() {
                worker.connections.alarm.set(None);
                worker.connections.wake_waiting();
            }
        });
        alarm.set(Some((time, task)));
    }
}
