//! One worker's share of http: its connections, its handle on the configuration,
//! and what its requests use again and again.
//!
//! Everything here belongs to one event loop. What a request touches is never
//! shared with another worker.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use gale_base::http_date;
use gale_base::os_error::OsErrorText;
use gale_runtime::{AcceptOptions, Listener, Moment, SocketAddress, Stream, TaskId};
use slab::Slab;

use super::configuration::HttpConfiguration;
use super::connection::ConnectionInfo;
use super::http1::Http1;
use super::request::Request;
use crate::configuration::{Configuration, ThreadPools};
use crate::log::{AccessBuffers, ErrorLog};
use crate::process::{Level, ListenAddress};

/// Requests kept for their memory when they are done.
const SPARE_REQUESTS_MAX: usize = 64;

/// How long accepting pauses when the process is out of descriptors, as in nginx.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);

/// Most connections that are accepted from a socket before it is closed: the
/// kernel's own bound on a queue, usually.
const QUEUED_MAX: usize = 65536;

/// How many of them are accepted before the loop's other work has its turn.
const QUEUED_PER_TURN: usize = 64;

/// How long accepting pauses when the worker's memory for buffers is exhausted.
const MEMORY_PAUSE: Duration = Duration::from_millis(50);

/// How many idle connections are closed at most to make room for one, as in nginx.
const REUSED_AT_ONCE: usize = 32;

/// The configuration as the requests of one worker hold it: counted without
/// atomics. The thread that supervises the loops holds it, too, and longer, so that
/// it is never freed on a loop.
pub struct Configured(Arc<Configuration>);

impl Configured {
    /// A handle on a configuration that has an http block.
    pub fn new(configuration: Arc<Configuration>) -> Rc<Configured> {
        Rc::new(Configured(configuration))
    }

    /// Where messages go that belong to no request.
    pub fn error_log(&self) -> &ErrorLog {
        &self.0.error_log
    }

    /// The thread pools.
    pub fn thread_pools(&self) -> &ThreadPools {
        &self.0.thread_pools
    }

    /// The http block.
    pub fn http(&self) -> &HttpConfiguration {
        self.0.http.as_ref().expect("a worker of http has an http block")
    }
}

/// One worker's share of http.
pub struct HttpWorker {
    configuration: RefCell<Rc<Configured>>,
    /// The access logs' lines on their way.
    pub access: Rc<AccessBuffers>,
    connections: RefCell<Slab<Entry>>,
    connections_max: Cell<usize>,
    is_draining: Cell<bool>,
    #[expect(clippy::vec_box, reason = "a request stays where it is: a kilobyte that is not moved")]
    spare_requests: RefCell<Vec<Box<Request>>>,
    waiting_for_room: RefCell<Vec<Waker>>,
    waiting_for_end: RefCell<Vec<Waker>>,
    date: Cell<(u64, [u8; 29])>,
    /// A response head is put together here before it is queued.
    pub(crate) scratch: RefCell<Vec<u8>>,
    last_complaint: Cell<Option<Moment>>,
    /// A task will wake those that wait for room.
    has_room_alarm: Cell<bool>,
}

struct Entry {
    task: Option<TaskId>,
    connection: Weak<Http1>,
}

impl Entry {
    /// Since when the connection could have been closed to make room; none while it is
    /// busy.
    fn idle_since(&self, now: Moment) -> Option<Moment> {
        self.connection.upgrade()?.may_close_at().filter(|&time| time <= now)
    }
}

/// Numbers the connections of all workers.
static CONNECTION_NUMBERS: AtomicU64 = AtomicU64::new(1);

impl HttpWorker {
    /// A worker that begins with `configuration` and holds at most
    /// `connections_max` connections.
    pub fn new(configuration: Rc<Configured>, connections_max: usize) -> Rc<HttpWorker> {
        Rc::new(HttpWorker {
            configuration: RefCell::new(configuration),
            access: Rc::default(),
            connections: RefCell::default(),
            connections_max: Cell::new(connections_max),
            is_draining: Cell::new(false),
            spare_requests: RefCell::default(),
            waiting_for_room: RefCell::default(),
            waiting_for_end: RefCell::default(),
            date: Cell::new((u64::MAX, [0; 29])),
            scratch: RefCell::default(),
            last_complaint: Cell::new(None),
            has_room_alarm: Cell::new(false),
        })
    }

    /// The configuration for the next exchange.
    pub fn configuration(&self) -> Rc<Configured> {
        Rc::clone(&self.configuration.borrow())
    }

    /// From now on new exchanges use `configuration`.
    pub fn commit(&self, configuration: Rc<Configured>, connections_max: usize) {
        let old = self.configuration.replace(configuration);
        self.access.forget_unused();
        self.connections_max.set(connections_max);
        // Nobody will answer these any more: better closed now than under a request.
        let configuration = self.configuration();
        self.close_some(|connection| {
            let has_no_place = connection.is_idle() && !connection.has_place(&configuration);
            // One that was just accepted may have sent its request: the old one answers.
            has_no_place && !connection.begin_with(&old)
        });
        self.wake_waiting_for_room();
    }

    /// How many connections are open.
    pub fn connection_count(&self) -> usize {
        self.connections.borrow().len()
    }

    /// Whether the worker is on its way out: connections close after the current answer.
    pub fn is_draining(&self) -> bool {
        self.is_draining.get()
    }

    /// Closes idle connections, and every other one after its current answer. Idle
    /// ones with a `keepalive_min_timeout` are given that time.
    pub fn drain(self: &Rc<Self>) {
        self.is_draining.set(true);
        self.access.flush();
        self.close_idle();
        let worker = Rc::downgrade(self);
        gale_runtime::spawn(async move {
            while let Some(next) = worker.upgrade().and_then(|worker| worker.next_close()) {
                gale_runtime::sleep_until(next).await;
                if let Some(worker) = worker.upgrade() {
                    worker.close_idle();
                }
            }
        });
    }

    /// When the next idle connection may be closed.
    fn next_close(&self) -> Option<Moment> {
        let connections = self.connections.borrow();
        let times = connections.iter().filter_map(|(_, entry)| entry.connection.upgrade()?.may_close_at());
        times.min()
    }

    /// Ready when no connection is open any more.
    pub async fn all_closed(&self) {
        poll_fn(|context: &mut Context<'_>| {
            if self.connection_count() == 0 {
                return Poll::Ready(());
            }
            self.waiting_for_end.borrow_mut().push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Closes the connections whose exchange began with this configuration or an
    /// older one; without one, all of them.
    pub fn expire(&self, configuration: Option<&HttpConfiguration>) {
        let newest = configuration.map_or(u64::MAX, |http| http.generation);
        let is_last_call = configuration.is_none();
        self.close_some(|connection| {
            is_last_call || connection.exchange_generation().is_some_and(|generation| generation <= newest)
        });
    }

    /// Closes idle connections that may be closed now.
    fn close_idle(&self) {
        let now = gale_runtime::now();
        self.close_some(|connection| connection.may_close_at().is_some_and(|time| time <= now));
    }

    fn close_some(&self, chosen: impl Fn(&Http1) -> bool) {
        let is_chosen = |entry: &Entry| entry.connection.upgrade().is_some_and(|connection| chosen(&connection));
        let tasks: Vec<TaskId> = {
            let connections = self.connections.borrow();
            let entries = connections.iter().filter(|(_, entry)| is_chosen(entry));
            entries.filter_map(|(_, entry)| entry.task).collect()
        };
        // Each abort drops a connection, which takes itself off the list.
        for &task in &tasks {
            gale_runtime::abort(task);
        }
    }

    /// Accepts connections from one listening socket until the task is aborted.
    pub async fn accept_from(self: Rc<Self>, listener: Listener, address: ListenAddress) {
        loop {
            if gale_runtime::leases_exhausted() {
                self.complain("the memory for buffers is exhausted, accepting pauses");
                listener.pause();
                gale_runtime::sleep(MEMORY_PAUSE).await;
                continue;
            }
            poll_fn(|context| self.poll_welcome(context, &listener)).await;
            match listener.accept().await {
                Ok((stream, remote)) => {
                    if !self.has_room() {
                        self.complain_of_connections();
                        self.close_longest_idle();
                    }
                    // Once accepted it is served, even one above the limit: sent away it would be lost.
                    self.start_connection(stream, remote, &address, None);
                }
                Err(error) => {
                    let message = format!("accept4() failed {}", OsErrorText(&error));
                    self.configuration().error_log().write(Level::Crit, None, &message);
                    listener.pause();
                    gale_runtime::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    /// Accepts what the kernel has queued on a socket that is to be closed. These
    /// connections are answered as `configuration` says, which still knew the address.
    pub async fn accept_what_is_queued(
        self: &Rc<Self>,
        socket: Arc<OwnedFd>,
        address: &ListenAddress,
        configuration: &Rc<Configured>,
    ) {
        let Ok(listener) = Listener::from_fd(socket, AcceptOptions::default()) else { return };
        for count in 1..=QUEUED_MAX {
            // An error ends it, too: the socket is closed in a moment.
            let Ok(Some((stream, remote))) = listener.try_accept() else { return };
            self.start_connection(stream, remote, address, Some(Rc::clone(configuration)));
            if count % QUEUED_PER_TURN == 0 {
                gale_runtime::yield_now().await;
            }
        }
    }

    /// Ready when a connection may be accepted: there is room, or it can be made once
    /// somebody has come. Before that no idle connection is closed for it.
    fn poll_welcome(self: &Rc<Self>, context: &mut Context<'_>, listener: &Listener) -> Poll<()> {
        if self.has_room() || self.has_idle() {
            return Poll::Ready(());
        }
        self.wait_for_room(context, listener)
    }

    fn wait_for_room(self: &Rc<Self>, context: &mut Context<'_>, listener: &Listener) -> Poll<()> {
        self.complain_of_connections();
        listener.pause();
        self.waiting_for_room.borrow_mut().push(context.waker().clone());
        self.wake_when_one_may_close();
        Poll::Pending
    }

    /// An idle connection may be protected for a while (`keepalive_min_timeout`): whoever
    /// waits for room looks again when that is over.
    fn wake_when_one_may_close(self: &Rc<Self>) {
        let Some(next) = self.next_close() else { return };
        if self.has_room_alarm.replace(true) {
            return;
        }
        let worker = Rc::downgrade(self);
        gale_runtime::spawn(async move {
            gale_runtime::sleep_until(next).await;
            if let Some(worker) = worker.upgrade() {
                worker.has_room_alarm.set(false);
                worker.wake_waiting_for_room();
            }
        });
    }

    fn has_room(&self) -> bool {
        self.connection_count() < self.connections_max.get()
    }

    fn has_idle(&self) -> bool {
        let now = gale_runtime::now();
        self.connections.borrow().iter().any(|(_, entry)| entry.idle_since(now).is_some())
    }

    /// Closes connections that have been idle longest: an eighth of them, as nginx does.
    fn close_longest_idle(&self) {
        let now = gale_runtime::now();
        let mut idle: Vec<(Moment, TaskId)> = {
            let connections = self.connections.borrow();
            connections.iter().filter_map(|(_, entry)| Some((entry.idle_since(now)?, entry.task?))).collect()
        };
        idle.sort_unstable_by_key(|&(since, _)| since);
        for &(_, task) in idle.iter().take((idle.len() / 8).clamp(1, REUSED_AT_ONCE)) {
            gale_runtime::abort(task);
        }
    }

    fn complain_of_connections(&self) {
        self.complain(&format!("{} worker_connections are not enough", self.connections_max.get()));
    }

    /// A connection has become idle: one that waits for room may take its place.
    pub(crate) fn note_idle(&self) {
        self.wake_waiting_for_room();
    }

    /// At most once a second, as nginx does.
    fn complain(&self, message: &str) {
        let now = gale_runtime::now();
        let is_recent = |last: Moment| now.since(last) < Duration::from_secs(1);
        if !self.last_complaint.get().is_some_and(is_recent) {
            self.last_complaint.set(Some(now));
            self.configuration().error_log().write(Level::Warn, None, &message);
        }
    }

    fn wake_waiting_for_room(&self) {
        self.waiting_for_room.take().into_iter().for_each(Waker::wake);
    }

    fn start_connection(
        self: &Rc<Self>,
        stream: Stream,
        remote: SocketAddress,
        address: &ListenAddress,
        first: Option<Rc<Configured>>,
    ) {
        let number = CONNECTION_NUMBERS.fetch_add(1, Ordering::Relaxed);
        let info = ConnectionInfo::new(number, remote, address.clone(), gale_runtime::now());
        let connection = Rc::new(Http1::new(info, stream, Rc::clone(self), first));
        let entry = Entry { task: None, connection: Rc::downgrade(&connection) };
        let place = self.connections.borrow_mut().insert(entry);
        let listed = Listed { worker: Rc::clone(self), place };
        let task = gale_runtime::spawn(serve(listed, connection));
        // The task has not run yet: it is there to be found.
        self.connections.borrow_mut()[place].task = Some(task);
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

    /// The `Date` field's value, made once a second.
    pub fn date(&self) -> [u8; 29] {
        let now = gale_runtime::wall_seconds();
        let (made, date) = self.date.get();
        if made == now {
            return date;
        }
        let date = http_date::format(now);
        self.date.set((now, date));
        date
    }
}

/// A connection's task: what an idle connection costs beside its [`Http1`].
async fn serve(_listed: Listed, connection: Rc<Http1>) {
    connection.serve().await;
}

/// A connection's place in its worker's list, given back when it ends, however
/// it ends.
struct Listed {
    worker: Rc<HttpWorker>,
    place: usize,
}

impl Drop for Listed {
    fn drop(&mut self) {
        let is_empty = {
            let mut connections = self.worker.connections.borrow_mut();
            connections.remove(self.place);
            connections.is_empty()
        };
        self.worker.wake_waiting_for_room();
        if is_empty {
            self.worker.waiting_for_end.take().into_iter().for_each(Waker::wake);
        }
    }
}

/// The machine's name in lower case, as it was when it was first asked for: `$hostname`.
pub fn hostname() -> &'static [u8] {
    static HOSTNAME: OnceLock<Vec<u8>> = OnceLock::new();
    HOSTNAME.get_or_init(|| rustix::system::uname().nodename().to_bytes().to_ascii_lowercase())
}

/// How a listening socket is accepted from.
pub fn accept_options(is_shared: bool, multi_accept: bool) -> AcceptOptions {
    AcceptOptions {
        exclusive: is_shared,
        batch: if multi_accept { gale_runtime::MULTI_ACCEPT_BATCH } else { AcceptOptions::default().batch },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::pipeline;

    /// How many bytes the future of an asynchronous function takes, which need not be called for that.
    fn future_bytes<A, B, F: Future>(_function: impl FnOnce(A, B) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn a_connection_is_small_and_an_exchange_is_not_much_larger() {
        let connection = future_bytes(serve);
        let exchange = future_bytes(pipeline::finish_and_send);
        let state = size_of::<Http1>();
        println!("futures: connection {connection} bytes, exchange {exchange} bytes; Http1 {state} bytes");
        assert!(connection <= 512, "the connection's future has {connection} bytes");
        assert!(exchange <= 512, "the exchange's future has {exchange} bytes");
    }
}
