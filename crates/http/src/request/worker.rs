//! State shared by the requests of one event loop: the configuration for the next one, and spare requests, kept to
//! reuse their memory. Every request holds a handle on it, so nothing here knows a connection.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use gale_engine::configuration::{Configuration, ThreadPools};
use gale_engine::connections::BackgroundTasks;
use gale_log::ErrorLog;
use gale_runtime::Moment;
use gale_worker::Worker;

use crate::request::Request;
use crate::request::configuration::HttpConfiguration;

/// Maximum number of spare requests, and of spare transfers of connections, that are kept to reuse their memory: as
/// many as a proxying worker has in flight under load. Each one beyond is allocated, filled and freed in memory that is
/// in no CPU cache.
pub(crate) const SPARES_MAX: usize = 512;

/// Maximum memory of a spare request, in bytes; larger ones are freed, since the client decides their size. A usual
/// request takes a tenth.
const SPARE_REQUEST_BYTES_MAX: usize = 8 * 1024;

/// Maximum capacity of a scratch buffer that is kept, in bytes.
const SCRATCH_BYTES_MAX: usize = 16 * 1024;

/// The configuration with a reference count of one worker, which needs no atomics. The thread that supervises the loops
/// holds it longer, so it is never freed on a loop.
pub struct Configured {
    /// A part of `configuration`, and dropped before it: the last handle of `configuration` frees both.
    http: Arc<HttpConfiguration>,
    configuration: Arc<Configuration>,
}

impl Configured {
    /// A handle on a configuration that has an http block.
    pub fn new(configuration: Arc<Configuration>) -> Rc<Configured> {
        let http = configuration.protocol().expect("a worker of http has an http block");
        Rc::new(Configured { configuration, http })
    }

    /// The error log for messages that belong to no request.
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

/// State shared by the requests of one event loop.
pub struct HttpWorker {
    /// State shared by all protocols of this loop.
    pub common: Rc<Worker>,
    /// Subrequests that no connection waits for.
    pub(crate) background: Rc<BackgroundTasks>,
    configuration: RefCell<Rc<Configured>>,
    is_draining: Cell<bool>,
    /// Time until which idle connections stay open while the worker drains.
    idle_kept_until: Cell<Moment>,
    #[expect(clippy::vec_box, reason = "a request stays where it is: a kilobyte that is not moved")]
    spare_requests: RefCell<Vec<Box<Request>>>,
    /// Scratch buffers: one for each level of nested [`HttpWorker::with_scratch`] calls.
    scratches: RefCell<Vec<Vec<u8>>>,
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
            scratches: RefCell::default(),
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

    /// `true` if the worker drains: connections close after the current response.
    pub fn is_draining(&self) -> bool {
        self.is_draining.get()
    }

    /// Time until which a draining worker keeps idle connections open: long past, unless
    /// [`HttpWorker::keep_idle_until`] was called.
    pub(crate) fn idle_kept_until(&self) -> Moment {
        self.idle_kept_until.get()
    }

    /// Keeps idle connections open until this time while the worker drains.
    pub(crate) fn keep_idle_until(&self, until: Moment) {
        self.idle_kept_until.set(until);
    }

    /// Starts to drain the worker.
    pub(crate) fn drain(&self) {
        self.is_draining.set(true);
    }

    /// A request to fill: a spare one, or a new one.
    pub(crate) fn take_request(self: &Rc<Self>) -> Box<Request> {
        let spare = self.spare_requests.borrow_mut().pop();
        let mut request = spare.unwrap_or_default();
        request.worker = Some(Rc::clone(self));
        request
    }

    /// Keeps a finished request as a spare one, or frees it.
    pub(crate) fn give_back(&self, mut request: Box<Request>) {
        request.reset();
        let mut spare = self.spare_requests.borrow_mut();
        if spare.len() < SPARES_MAX && request.memory_bytes() <= SPARE_REQUEST_BYTES_MAX {
            spare.push(request);
        }
    }

    /// Calls `write` with an empty scratch buffer: the one used last, whose memory is in the CPU caches.
    pub fn with_scratch<T>(&self, write: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let mut scratch = self.scratches.borrow_mut().pop().unwrap_or_default();
        let result = write(&mut scratch);
        if scratch.capacity() <= SCRATCH_BYTES_MAX {
            scratch.clear();
            self.scratches.borrow_mut().push(scratch);
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use gale_runtime::{EventLoop, LoopOptions};

    use super::*;
    use crate::request::exchange::mock::{self, MockExchange};

    fn run(test: impl FnOnce(&Rc<HttpWorker>)) {
        EventLoop::new(LoopOptions::default()).unwrap().run(async {
            let exchange = MockExchange::new();
            test(mock::request(&exchange, mock::settings()).worker());
        });
    }

    #[test]
    fn a_request_that_has_taken_much_memory_is_not_kept() {
        run(|worker| {
            let [usual, mut long] = [(); 2].map(|()| worker.take_request());
            long.uri = vec![b'x'; SPARE_REQUEST_BYTES_MAX + 1];
            worker.give_back(long);
            assert_eq!(worker.spare_requests.borrow().len(), 0);
            worker.give_back(usual);
            assert_eq!(worker.spare_requests.borrow().len(), 1);
        });
    }

    #[test]
    fn a_scratch_buffer_is_empty_and_one_within_another_is_its_own() {
        run(|worker| {
            worker.with_scratch(|outer| {
                outer.extend_from_slice(b"outer");
                worker.with_scratch(|inner| inner.extend_from_slice(b"inner"));
                assert_eq!(outer, b"outer");
            });
            assert_eq!(worker.scratches.borrow().len(), 2);
            worker.with_scratch(|large| {
                assert!(large.is_empty());
                large.resize(SCRATCH_BYTES_MAX + 1, 0);
            });
            assert_eq!(worker.scratches.borrow().len(), 1);
        });
    }
}
