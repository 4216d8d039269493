//! One worker's share of http: its connections, its handle on the configuration,
//! and what its requests use again and again.
//!
//! Everything here belongs to one event loop. What a request touches is never
//! shared with another worker.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use gale_base::http_date;
use gale_process::ListenAddress;
use gale_runtime::SocketAddress;

use crate::configuration::HttpConfiguration;
use crate::connection::http1::{Http1, Transfer};
use crate::request::Request;
use gale_engine::configuration::{Configuration, ThreadPools};
use gale_engine::connections::{ConnectionInfo, ConnectionTable};
use gale_engine::log::ErrorLog;
use gale_engine::protocol::ProtocolWorker;
use gale_engine::transport::Transport;
use gale_engine::worker::Worker;

/// Requests kept for their memory when they are done.
const SPARE_REQUESTS_MAX: usize = 64;

/// The `Date` field before a date is filled in, and where that goes.
const DATE_LINE: [u8; DATE_LINE_BYTES] = *b"Date: Thu, 01 Jan 1970 00:00:00 GMT\r\n";
const DATE_VALUE: std::ops::Range<usize> = 6..35;
const DATE_LINE_BYTES: usize = 37;

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

    /// The thread pools.
    pub fn thread_pools(&self) -> &ThreadPools {
        &self.configuration.thread_pools
    }

    /// The http block.
    pub fn http(&self) -> &HttpConfiguration {
        &self.http
    }
}

/// One worker's share of http.
pub struct HttpWorker {
    /// What the protocols of this loop share.
    pub common: Rc<Worker>,
    configuration: RefCell<Rc<Configured>>,
    /// The connections.
    pub(crate) connections: Rc<ConnectionTable<Http1>>,
    is_draining: Cell<bool>,
    #[expect(clippy::vec_box, reason = "a request stays where it is: a kilobyte that is not moved")]
    spare_requests: RefCell<Vec<Box<Request>>>,
    #[expect(clippy::vec_box, reason = "as the requests")]
    spare_transfers: RefCell<Vec<Box<Transfer>>>,
    /// The second that the line was made for, and the line.
    date_line: RefCell<(u64, [u8; DATE_LINE_BYTES])>,
    /// A response head is put together here before it is queued.
    pub(crate) scratch: RefCell<Vec<u8>>,
}

impl HttpWorker {
    /// A worker that begins with `configuration`.
    pub fn new(common: Rc<Worker>, configuration: Rc<Configured>) -> Rc<HttpWorker> {
        Rc::new(HttpWorker {
            connections: ConnectionTable::new(Rc::clone(&common)),
            common,
            configuration: RefCell::new(configuration),
            is_draining: Cell::new(false),
            spare_requests: RefCell::default(),
            spare_transfers: RefCell::default(),
            date_line: RefCell::new((u64::MAX, DATE_LINE)),
            scratch: RefCell::default(),
        })
    }

    /// The configuration for the next exchange.
    pub fn configuration(&self) -> Rc<Configured> {
        Rc::clone(&self.configuration.borrow())
    }

    /// Calls `look` with the configuration for the next exchange.
    pub fn with_configuration<T>(&self, look: impl FnOnce(&Configured) -> T) -> T {
        look(&self.configuration.borrow())
    }

    /// Whether the worker is on its way out: connections close after the current answer.
    pub fn is_draining(&self) -> bool {
        self.is_draining.get()
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

    /// What an HTTP/1 exchange sends and receives with: a spare one, or a new one.
    pub(crate) fn take_transfer(&self) -> Box<Transfer> {
        self.spare_transfers.borrow_mut().pop().unwrap_or_default()
    }

    /// Takes a transfer back of which nothing is left.
    pub(crate) fn give_transfer_back(&self, transfer: Box<Transfer>) {
        let mut spare = self.spare_transfers.borrow_mut();
        if spare.len() < SPARE_REQUESTS_MAX {
            spare.push(transfer);
        }
    }

    /// Appends the `Date` field with its line end, made once a second.
    pub(crate) fn append_date_line(&self, out: &mut Vec<u8>) {
        let now = gale_runtime::wall_seconds();
        let (made, line) = &mut *self.date_line.borrow_mut();
        if *made != now {
            *made = now;
            line[DATE_VALUE].copy_from_slice(&http_date::format(now));
        }
        out.extend_from_slice(line);
    }
}

impl ProtocolWorker for HttpWorker {
    fn commit(&self, configuration: &Arc<Configuration>) {
        let old = self.configuration.replace(Configured::new(Arc::clone(configuration)));
        // Nobody will answer these any more: better closed now than under a request.
        let configuration = self.configuration();
        self.connections.close_some(|connection, is_awake| {
            if connection.has_place(&configuration) {
                return false;
            }
            // What has begun, or may have, the old one answers; also if the task has not run yet.
            let may_have_begun = connection.may_have_begun() || is_awake;
            if may_have_begun {
                connection.begin_with(&old);
            }
            !may_have_begun
        });
        self.connections.look_at_all_again();
    }

    fn serve(
        self: Rc<Self>,
        transport: Transport,
        remote: SocketAddress,
        address: &Rc<ListenAddress>,
        configuration: Option<&Arc<Configuration>>,
    ) {
        let info = ConnectionInfo::accepted(remote, Rc::clone(address));
        let first = configuration.map(|configuration| Configured::new(Arc::clone(configuration)));
        let connection = Rc::new(Http1::new(info, transport, Rc::clone(&self), first));
        let number = self.connections.insert(&connection);
        connection.set_listed(number);
        self.connections.set_task(number, gale_runtime::spawn(connection.serve()));
    }

    fn drain(self: Rc<Self>) {
        self.is_draining.set(true);
        self.connections.drain();
    }

    fn poll_closed(&self, context: &mut Context<'_>) -> Poll<()> {
        self.connections.poll_empty(context)
    }

    fn expire(&self, configuration: Option<&Configuration>) {
        let newest = match configuration {
            None => u64::MAX,
            Some(configuration) => match configuration.protocol::<HttpConfiguration>() {
                Some(http) => http.generation,
                // Nobody began anything with it.
                None => return,
            },
        };
        let is_expired = |generation: Option<u64>| generation.is_some_and(|generation| generation <= newest);
        self.connections.close_some(|connection, _| {
            configuration.is_none()
                || is_expired(connection.exchange_generation())
                || is_expired(connection.next_generation())
        });
        self.connections.expire_background(newest);
    }

    fn connection_count(&self) -> usize {
        self.connections.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::respond;

    /// How many bytes the future of an asynchronous function takes, which need not be called for that.
    fn future_bytes<A, F: Future>(_function: impl FnOnce(A) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn a_connection_is_small_and_an_exchange_is_not_much_larger() {
        let connection = future_bytes(Http1::serve);
        let exchange = future_bytes(|(request, step)| respond::finish_and_send(request, step));
        let state = size_of::<Http1>();
        println!("futures: connection {connection} bytes, exchange {exchange} bytes; Http1 {state} bytes");
        // What is allocated for each idle connection: just within the allocator's classes of 64 and 192 bytes.
        assert!(connection <= 64, "the connection's future has {connection} bytes");
        assert!(state + 2 * size_of::<usize>() <= 192, "the connection has {state} bytes");
        assert!(exchange <= 512, "the exchange's future has {exchange} bytes");
    }
}
