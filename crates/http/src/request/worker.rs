//! What the requests of one event loop share: the configuration for the next one, and requests that are kept for their
//! memory. A request holds this, so nothing here knows a connection.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use crate::request::Request;
use crate::request::configuration::HttpConfiguration;
use gale_engine::configuration::{Configuration, ThreadPools};
use gale_engine::connections::BackgroundTasks;
use gale_engine::log::ErrorLog;
use gale_engine::worker::Worker;
use gale_runtime::Moment;

/// Requests kept for their memory when they are done.
const SPARE_REQUESTS_MAX: usize = 64;

/// The configuration as the requests of one worker hold it: counted without
/// atomics. The thread that supervises the loops holds it, too, and longer, so that
/// it is never freed on a loop.
pub struct Configured {
    /// A part of `configuration`, and dropped before it: whoever drops the last handle of the whole drops this, too.
    http: Arc<HttpConfiguration>,
    configuration: Arc<Configuration>,
}

impl Configured {
    /// A handle on a configuration that has an http block.
    pub fn new(configuration: Arc<Configuration>) -> Rc<Configured> {
        let http = configuration.protocol().expect("a worker of http has an http block");
        Rc::new(Configured { configuration, http })
    }

    /// Where messages go that belong to no request.
    pub fn error_log(&self) -> &Arc<ErrorLog> {
        &self.configuration.error_log
    }

    /// The whole configuration.
    pub fn whole(&self) -> &Arc<Configuration> {
        &self.configuration
    }

    /// The thread pools.
    pub fn thread_pools(&self) -> &ThreadPools {
        &self.configuration.thread_pools
    }

    /// The http block.
    pub fn http(&self) -> &HttpConfiguration {
        &self.http
    }
}

/// See the file's head.
pub struct HttpWorker {
    /// What the protocols of this loop share.
    pub common: Rc<Worker>,
    /// Subrequests that no connection waits for.
    pub(crate) background: Rc<BackgroundTasks>,
    configuration: RefCell<Rc<Configured>>,
    is_draining: Cell<bool>,
    /// Until then idle connections wait for a request although the worker is on its way out.
    idle_kept_until: Cell<Moment>,
    #[expect(clippy::vec_box, reason = "a request stays where it is: a kilobyte that is not moved")]
    spare_requests: RefCell<Vec<Box<Request>>>,
}

impl HttpWorker {
    /// A worker that begins with `configuration`.
    pub fn new(common: Rc<Worker>, configuration: Rc<Configured>) -> Rc<HttpWorker> {
        Rc::new(HttpWorker {
            background: BackgroundTasks::new(Rc::clone(&common)),
            common,
            configuration: RefCell::new(configuration),
            is_draining: Cell::new(false),
            idle_kept_until: Cell::new(Moment::from_nanos(0)),
            spare_requests: RefCell::default(),
        })
    }

    /// The configuration for the next exchange.
    pub fn configuration(&self) -> Rc<Configured> {
        Rc::clone(&self.configuration.borrow())
    }

    /// From now on new exchanges use `configuration`; returns the one before.
    pub(crate) fn commit(&self, configuration: Rc<Configured>) -> Rc<Configured> {
        self.configuration.replace(configuration)
    }

    /// Calls `look` with the configuration for the next exchange.
    pub fn with_configuration<T>(&self, look: impl FnOnce(&Configured) -> T) -> T {
        look(&self.configuration.borrow())
    }

    /// Whether the worker is on its way out: connections close after the current answer.
    pub fn is_draining(&self) -> bool {
        self.is_draining.get()
    }

    /// Until when idle connections may not be closed for want of something better: a moment long past, unless
    /// [`HttpWorker::keep_idle_until`] was called.
    pub(crate) fn idle_kept_until(&self) -> Moment {
        self.idle_kept_until.get()
    }

    /// Has the worker on its way out wait so long for requests on idle connections.
    pub(crate) fn keep_idle_until(&self, until: Moment) {
        self.idle_kept_until.set(until);
    }

    /// From now on the worker is on its way out.
    pub(crate) fn drain(&self) {
        self.is_draining.set(true);
    }

    /// A request to fill: a spare one, or a new one.
    pub(crate) fn take_request(self: &Rc<Self>) -> Box<Request> {
        let spare = self.spare_requests.borrow_mut().pop();
        let mut request = spare.unwrap_or_else(|| Box::new(Request::new()));
        request.worker = Some(Rc::clone(self));
        request
    }

    /// Takes a request back.
    pub(crate) fn give_back(&self, mut request: Box<Request>) {
        request.reset();
        let mut spare = self.spare_requests.borrow_mut();
        if spare.len() < SPARE_REQUESTS_MAX {
            spare.push(request);
        }
    }
}
