//! A worker: state shared by the protocols of one event loop.
//!
//! Everything here belongs to one loop, so requests share nothing with other workers.

use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_log::{AccessBuffers, ErrorLog};
use gale_resolver::{Resolver, ResolverSettings, Resolvers};
use gale_runtime::Moment;

use crate::counters::OwnCounters;
use crate::limit::WorkerConnections;
use crate::notes::Notes;

/// Shortest interval between warnings of a worker, as in nginx.
const COMPLAINT_PAUSE: Duration = Duration::from_secs(1);

/// State shared by the protocols of one event loop.
pub struct Worker {
    /// Count of the connections of all protocols.
    pub connections: WorkerConnections,
    /// Buffers of access logs.
    pub access: Rc<AccessBuffers>,
    /// This worker's counters.
    pub counters: OwnCounters,
    error_log: RefCell<Arc<ErrorLog>>,
    resolvers: RefCell<Resolvers>,
    /// Modules' state that outlives requests.
    notes: RefCell<Notes>,
    last_complaint: Cell<Option<Moment>>,
}

impl Worker {
    /// Creates a worker with this limit on connections.
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

    /// Applies a configuration's limit on connections and its error log.
    pub fn commit(&self, connections_max: usize, error_log: Arc<ErrorLog>) {
        self.error_log.replace(error_log);
        self.access.forget_unused();
        self.connections.set_max(connections_max);
    }

    /// Error log for messages outside of connections.
    pub fn error_log(&self) -> Arc<ErrorLog> {
        Arc::clone(&self.error_log.borrow())
    }

    /// Warns of a shortage, at most once a second. Returns `true` if it did.
    pub fn complain(&self, message: &dyn Display) -> bool {
        let now = gale_runtime::now();
        if self.last_complaint.get().is_some_and(|last| now.since(last) < COMPLAINT_PAUSE) {
            return false;
        }
        self.last_complaint.set(Some(now));
        self.error_log.borrow().write(Level::Warn, None, message);
        true
    }

    /// Warns that the limit `worker_connections` is reached.
    pub fn complain_of_connections(&self) {
        self.complain(&format_args!("{} worker_connections are not enough", self.connections.max()));
    }

    /// This worker's resolver of a `resolver` directive.
    pub fn resolver(&self, settings: &Arc<ResolverSettings>) -> Rc<Resolver> {
        self.resolvers.borrow_mut().get(settings, &self.error_log.borrow())
    }

    /// Calls `f` with a module's state on this worker, which has a type of its own. `f` must neither wait nor call this
    /// again.
    pub fn with_note<T: Default + 'static, R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        f(self.notes.borrow_mut().or_default())
    }
}
