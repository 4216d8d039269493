//! A worker: what the protocols of one event loop share.
//!
//! Everything here belongs to one loop. What a request touches is never shared with another worker.

mod counters;
mod limit;

use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_runtime::Moment;

use crate::log::{AccessBuffers, ErrorLog};
use crate::notes::Notes;
use crate::resolver::{Resolver, ResolverSettings, Resolvers};

pub use counters::{
    OwnCounters, Totals, reset_connections, reset_requests, totals, totals_by_worker, totals_since_reset,
};
pub use limit::{CountedConnection, IdleConnections, ParkedConnection, Search, WorkerConnections};

/// How often the same worker complains at most, as in nginx.
const COMPLAINT_PAUSE: Duration = Duration::from_secs(1);

/// See the file's head.
pub struct Worker {
    /// The connections of all protocols, counted.
    pub connections: WorkerConnections,
    /// The access logs' lines on their way.
    pub access: Rc<AccessBuffers>,
    /// What this worker counts.
    pub counters: OwnCounters,
    error_log: RefCell<Arc<ErrorLog>>,
    resolvers: RefCell<Resolvers>,
    /// What modules keep from request to request.
    notes: RefCell<Notes>,
    last_complaint: Cell<Option<Moment>>,
}

impl Worker {
    /// A worker that holds at most `connections_max` connections.
    pub fn new(connections_max: usize, error_log: Arc<ErrorLog>) -> Rc<Worker> {
        Rc::new(Worker {
            connections: WorkerConnections::new(connections_max),
            access: Rc::default(),
            counters: OwnCounters::take(gale_runtime::worker()),
            error_log: RefCell::new(error_log),
            resolvers: RefCell::default(),
            notes: RefCell::default(),
            last_complaint: Cell::new(None),
        })
    }

    /// From now on there may be so many connections, and messages that belong to none go there.
    pub fn commit(&self, connections_max: usize, error_log: Arc<ErrorLog>) {
        self.error_log.replace(error_log);
        self.access.forget_unused();
        self.connections.set_max(connections_max);
    }

    /// Where messages go that belong to no connection.
    pub fn error_log(&self) -> Arc<ErrorLog> {
        Arc::clone(&self.error_log.borrow())
    }

    /// Warns of a shortage, at most once a second. Says whether it has.
    pub fn complain(&self, message: &dyn Display) -> bool {
        let now = gale_runtime::now();
        if self.last_complaint.get().is_some_and(|last| now.since(last) < COMPLAINT_PAUSE) {
            return false;
        }
        self.last_complaint.set(Some(now));
        self.error_log.borrow().write(Level::Warn, None, message);
        true
    }

    /// Says that there are too few `worker_connections`.
    pub fn complain_of_connections(&self) {
        self.complain(&format_args!("{} worker_connections are not enough", self.connections.max()));
    }

    /// This worker's resolver of a `resolver` directive.
    pub fn resolver(&self, settings: &Arc<ResolverSettings>) -> Rc<Resolver> {
        self.resolvers.borrow_mut().get(settings, &self.error_log.borrow())
    }

    /// Calls `f` with what a module keeps on this worker from request to request: a type of its own. It must not wait
    /// or ask for another's.
    pub fn with_note<T: Default + 'static, R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        f(self.notes.borrow_mut().or_default())
    }
}
