//! `worker_connections`: how many connections a loop has and may have, and who makes room for the next.
//! (<https://nginx.org/en/docs/ngx_core_module.html#worker_connections>)
//!
//! Connections of clients and, as in nginx, those to upstreams count, idle ones included. Whoever has idle ones that it
//! can do without registers them as [`IdleConnections`]. Those to upstreams are given up before those of clients, who
//! would have to come again from afar.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Poll, Waker};

use gale_runtime::{Moment, TaskId};

use super::Worker;

/// How many connections there may be above the limit, besides one for each socket: an idle connection is closed only
/// when a new one has been accepted, and by then it may be busy. Once there are so many, idle ones are closed before
/// the next one is accepted.
const ABOVE_LIMIT_MAX: usize = 32;

/// What has come of a search so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Search {
    /// A connection that may be closed.
    Found,
    /// Nothing yet: the next turn looks on.
    GoesOn,
    /// Nothing, at any place. Look again when a connection has become idle, at the latest at this moment.
    InVain(Option<Moment>),
}

impl Search {
    /// What has come of this search and of another one.
    fn or(self, other: Search) -> Search {
        match (self, other) {
            (Search::Found, _) | (_, Search::Found) => Search::Found,
            (Search::GoesOn, _) | (_, Search::GoesOn) => Search::GoesOn,
            (Search::InVain(one), Search::InVain(other)) => Search::InVain(one.into_iter().chain(other).min()),
        }
    }
}

/// Idle connections of one kind, which can be closed when there is no room.
pub trait IdleConnections {
    /// Looks for one that may be closed, with bounded work.
    fn search(&self) -> Search;

    /// Closes those that have been idle longest, of the ones that are looked at for it: about as many as are wanted.
    fn close_longest_idle(&self, wanted: usize);
}

/// The connections of one loop, counted.
pub struct WorkerConnections {
    open: Cell<usize>,
    /// Those that this loop has parked for all loops. Any of them may take one.
    parked: Arc<AtomicUsize>,
    max: Cell<usize>,
    waiting: RefCell<Vec<Waker>>,
    idle: RefCell<Vec<Weak<dyn IdleConnections>>>,
    /// The task that will wake those that wait for room, and when.
    alarm: Cell<Option<(Moment, TaskId)>>,
}

impl WorkerConnections {
    /// None are open, and there may be so many.
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

    /// How many are open.
    pub fn open(&self) -> usize {
        self.open.get() + self.parked.load(Ordering::Relaxed)
    }

    /// How many there may be.
    pub fn max(&self) -> usize {
        self.max.get()
    }

    /// From now on there may be so many.
    pub fn set_max(&self, max: usize) {
        self.max.set(max);
        self.wake_waiting();
    }

    /// One more is open. Once it is, it stays, even above the limit.
    pub fn count_opened(&self) {
        self.open.set(self.open.get() + 1);
    }

    /// One has ended.
    #[inline]
    pub fn count_closed(&self) {
        self.open.set(self.open.get() - 1);
        self.wake_waiting();
    }

    /// One is open that any loop may take: it counts here until then.
    pub fn count_parked(&self) -> ParkedConnection {
        self.parked.fetch_add(1, Ordering::Relaxed);
        ParkedConnection(Arc::clone(&self.parked))
    }

    /// Whether one more is within the limit.
    pub fn has_room(&self) -> bool {
        self.open() < self.max.get()
    }

    /// How many there are above seven eighths of those that there may be. (nginx's accept_disabled)
    pub fn above_comfort(&self) -> usize {
        let max = self.max.get();
        self.open().saturating_sub(max - max / 8)
    }

    fn above_limit(&self) -> usize {
        self.open().saturating_sub(self.max.get())
    }

    /// Idle connections that may be closed to make room, behind those that were registered before.
    pub fn register(&self, idle: Weak<dyn IdleConnections>) {
        let mut all = self.idle.borrow_mut();
        all.retain(|idle| idle.strong_count() > 0);
        all.push(idle);
    }

    /// Idle connections that are closed before all others.
    pub fn register_first(&self, idle: Weak<dyn IdleConnections>) {
        self.idle.borrow_mut().insert(0, idle);
    }

    fn idle_connections(&self) -> Vec<Rc<dyn IdleConnections>> {
        self.idle.borrow().iter().filter_map(Weak::upgrade).collect()
    }

    /// Looks for room, with bounded work: there is some, or an idle connection can be closed for a new one.
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

    /// Closes idle connections, so that there is room for one more if so many are found.
    pub fn close_longest_idle(&self) {
        for idle in self.idle_connections() {
            idle.close_longest_idle(self.above_limit() + 1);
            if self.has_room() {
                return;
            }
        }
    }

    /// A connection has become idle: whoever waits for room may have it.
    #[inline]
    pub fn note_idle(&self) {
        if !self.has_room() {
            self.wake_waiting();
        }
    }

    /// Has those that wait for room look again.
    #[inline]
    pub fn wake_waiting(&self) {
        if !self.waiting.borrow().is_empty() {
            self.waiting.take().into_iter().for_each(Waker::wake);
        }
    }
}

/// A connection that counts towards `worker_connections` until it is dropped: one to an upstream.
pub struct CountedConnection(Rc<Worker>);

impl CountedConnection {
    /// One more, if there may be one more: an idle one is closed for it.
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

    /// One that is open already, which this worker takes from another one: it counts even above the limit.
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

/// A connection that counts for the worker that has parked it until it is dropped, on whichever thread.
#[derive(Debug)]
pub struct ParkedConnection(Arc<AtomicUsize>);

impl Drop for ParkedConnection {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Worker {
    /// Waits until somebody says that there may be room, or until `later`, when a connection that is protected for a
    /// while (`keepalive_min_timeout`) may be closed.
    pub(crate) async fn room(self: &Rc<Self>, later: Option<Moment>) {
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
