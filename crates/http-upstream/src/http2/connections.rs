//! The connections of one worker to servers that speak HTTP/2: one for each server, and a further one when that accepts
//! no more requests.
//!
//! All requests that could use a connection wait while it is being opened. Idle connections are kept as `keepalive`
//! configures; without it, a connection ends with its last request. They count as connections of the worker, and idle
//! ones are closed when it has too many.

use std::cell::Cell;
use std::rc::{Rc, Weak};

use gale_runtime::Notify;
use gale_tls::Transport;
use gale_upstream::{Pool, PoolKey};
use gale_worker::{CountedConnection, IdleConnections, Search, Worker};

use super::connection::Http2Connection;

/// Identifies connections that are interchangeable.
#[derive(Clone)]
pub(crate) struct Destination {
    key: PoolKey,
    /// The group's pool of idle connections.
    pub(super) pool: Option<Pool>,
}

/// A worker's connections over HTTP/2.
#[derive(Default)]
struct Connections {
    /// Connections with running tasks.
    open: Vec<Weak<Http2Connection>>,
    opening: Vec<(Destination, Rc<Outcome>)>,
    /// Number of connections so far.
    count: u64,
    /// The handle through which idle ones are given up; `None` before the first connection.
    dispensable: Option<Rc<Dispensable>>,
}

/// Result of opening a connection.
#[derive(Default)]
pub(crate) struct Outcome {
    ended: Rc<Notify>,
    has_failed: Cell<bool>,
}

impl Outcome {
    /// Waits for the result. True if there is no connection: waiting requests need not try the same.
    pub async fn known(&self) -> bool {
        self.ended.notified().await;
        self.has_failed.get()
    }
}

/// Result of a search for a connection.
pub(crate) enum Found {
    /// A connection with room.
    Room(Rc<Http2Connection>),
    /// A connection whose server has not sent its settings yet.
    Beginning(Rc<Notify>),
    /// A connection being opened.
    Opening(Rc<Outcome>),
    /// None: the caller opens one.
    None(Opening),
}

/// A connection being opened, which others wait for.
pub(crate) struct Opening {
    worker: Rc<Worker>,
    outcome: Rc<Outcome>,
    destination: Destination,
}

impl Destination {
    /// The destination for this key, in a group with this pool of idle connections.
    pub fn new(key: PoolKey, pool: Option<&Pool>) -> Destination {
        let key = pool.map_or_else(|| key.clone(), |pool| pool.own_key(key.clone()));
        Destination { key, pool: pool.cloned() }
    }

    fn is_same(&self, other: &Destination) -> bool {
        let is_same_pool = match (&self.pool, &other.pool) {
            (Some(one), Some(other)) => one.is_same(other),
            (None, None) => true,
            _ => false,
        };
        is_same_pool && self.key == other.key
    }
}

/// Finds a connection for a request, other than the one with the number `avoided`.
pub(crate) fn find(worker: &Rc<Worker>, destination: &Destination, avoided: Option<u64>) -> Found {
    worker.with_note(|connections: &mut Connections| {
        connections.open.retain(|connection| connection.strong_count() > 0);
        let mut beginning = None;
        for connection in connections.open.iter().filter_map(Weak::upgrade) {
            if !connection.destination.is_same(destination) || Some(connection.number) == avoided {
                continue;
            }
            if connection.has_room() {
                return Found::Room(connection);
            }
            if connection.is_beginning() {
                beginning = Some(Rc::clone(&connection.news));
            }
        }
        if let Some(news) = beginning {
            return Found::Beginning(news);
        }
        if let Some((_, outcome)) = connections.opening.iter().find(|(other, _)| other.is_same(destination)) {
            return Found::Opening(Rc::clone(outcome));
        }
        let outcome = Rc::<Outcome>::default();
        connections.opening.push((destination.clone(), Rc::clone(&outcome)));
        Found::None(Opening { worker: Rc::clone(worker), outcome, destination: destination.clone() })
    })
}

impl Opening {
    /// Begins HTTP/2 on the opened connection, with heads of at most `head_max` bytes.
    pub fn begin(self, transport: Transport, counted: CountedConnection, head_max: usize) -> Rc<Http2Connection> {
        let number = self.worker.with_note(|connections: &mut Connections| {
            connections.count += 1;
            connections.count
        });
        let connection =
            Http2Connection::begin(&self.worker, number, self.destination.clone(), transport, counted, head_max);
        let weak = Rc::downgrade(&connection);
        self.worker.with_note(|connections: &mut Connections| connections.open.push(weak));
        register(&self.worker);
        connection
    }

    /// Notes a failure that concerns all waiting requests.
    pub fn fail(self) {
        self.outcome.has_failed.set(true);
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        let outcome = &self.outcome;
        self.worker.with_note(|connections: &mut Connections| {
            connections.opening.retain(|(_, other)| !Rc::ptr_eq(other, outcome));
        });
        outcome.ended.notify_all();
    }
}

/// Notes that a connection has become idle, so that its place can be given to others.
pub(super) fn note_idle(worker: &Weak<Worker>, destination: &Destination) {
    if let Some(worker) = worker.upgrade() {
        close_surplus(&worker, destination);
        worker.connections.note_idle();
    }
}

/// Closes surplus idle connections of a pool, those that have been idle longest first.
fn close_surplus(worker: &Worker, destination: &Destination) {
    let Some(pool) = &destination.pool else { return };
    let mut idle = worker.with_note(|connections: &mut Connections| connections.idle());
    idle.retain(|connection| connection.destination.pool.as_ref().is_some_and(|other| other.is_same(pool)));
    idle.sort_by_key(|connection| connection.idle_since());
    let surplus = idle.len().saturating_sub(pool.settings().connections);
    idle.iter().take(surplus).for_each(|connection| connection.close());
}

impl Connections {
    fn idle(&self) -> Vec<Rc<Http2Connection>> {
        let open = self.open.iter().filter_map(Weak::upgrade);
        open.filter(|connection| connection.idle_since().is_some()).collect()
    }
}

/// The idle connections of a worker, for closing when it has too many connections.
struct Dispensable(Weak<Worker>);

impl IdleConnections for Dispensable {
    fn search(&self) -> Search {
        let Some(worker) = self.0.upgrade() else { return Search::InVain(None) };
        let has_some = worker.with_note(|connections: &mut Connections| {
            connections.open.iter().filter_map(Weak::upgrade).any(|connection| connection.idle_since().is_some())
        });
        if has_some { Search::Found } else { Search::InVain(None) }
    }

    /// They are closed in the next turn.
    fn close_longest_idle(&self, wanted: usize) {
        let Some(worker) = self.0.upgrade() else { return };
        let mut idle = worker.with_note(|connections: &mut Connections| connections.idle());
        idle.sort_by_key(|connection| connection.idle_since());
        idle.iter().take(wanted).for_each(|connection| connection.close());
    }
}

/// Registers the idle connections of a worker for closing, with the first connection.
fn register(worker: &Rc<Worker>) {
    let dispensable = worker.with_note(|connections: &mut Connections| {
        if connections.dispensable.is_some() {
            return None;
        }
        Some(Rc::clone(connections.dispensable.insert(Rc::new(Dispensable(Rc::downgrade(worker))))))
    });
    if let Some(dispensable) = dispensable {
        let dispensable: Rc<dyn IdleConnections> = dispensable;
        worker.connections.register_first(Rc::downgrade(&dispensable));
    }
}
