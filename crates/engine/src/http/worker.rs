//! One worker's share of http: its connections, its handle on the configuration,
//! and what its requests use again and again.
//!
//! Everything here belongs to one event loop. What a request touches is never
//! shared with another worker.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use gale_base::http_date;
use gale_runtime::{Moment, SocketAddress, Stream, TaskId};
use slab::Slab;

use super::configuration::HttpConfiguration;
use super::connection::ConnectionInfo;
use super::counters::OwnCounters;
use super::http1::{Http1, Transfer};
use super::notes::Notes;
use super::request::Request;
use super::reuse::Hand;
use crate::configuration::{Configuration, ThreadPools};
use crate::log::{AccessBuffers, ErrorLog};
use crate::resolver::{Resolver, ResolverSettings, Resolvers};
use gale_base::log_level::Level;
use gale_process::ListenAddress;

/// Requests kept for their memory when they are done.
const SPARE_REQUESTS_MAX: usize = 64;

/// The `Date` field before a date is filled in, and where that goes.
const DATE_LINE: [u8; DATE_LINE_BYTES] = *b"Date: Thu, 01 Jan 1970 00:00:00 GMT\r\n";
const DATE_VALUE: std::ops::Range<usize> = 6..35;
const DATE_LINE_BYTES: usize = 37;

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
    pub fn error_log(&self) -> &Arc<ErrorLog> {
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
    /// What this worker counts.
    pub(crate) counters: OwnCounters,
    pub(super) connections: RefCell<Slab<Entry>>,
    pub(super) connections_max: Cell<usize>,
    is_draining: Cell<bool>,
    #[expect(clippy::vec_box, reason = "a request stays where it is: a kilobyte that is not moved")]
    spare_requests: RefCell<Vec<Box<Request>>>,
    #[expect(clippy::vec_box, reason = "as the requests")]
    spare_transfers: RefCell<Vec<Box<Transfer>>>,
    pub(super) waiting_for_room: RefCell<Vec<Waker>>,
    /// Finds idle connections to close when there is no room.
    pub(super) hand: Hand,
    waiting_for_end: RefCell<Vec<Waker>>,
    background: RefCell<Slab<Background>>,
    /// The second that the line was made for, and the line.
    date_line: RefCell<(u64, [u8; DATE_LINE_BYTES])>,
    resolvers: RefCell<Resolvers>,
    /// What modules keep from request to request.
    notes: RefCell<Notes>,
    /// A response head is put together here before it is queued.
    pub(crate) scratch: RefCell<Vec<u8>>,
    last_complaint: Cell<Option<Moment>>,
    /// The task that will wake those that wait for room, and when.
    pub(super) room_alarm: Cell<Option<(Moment, TaskId)>>,
}

/// Between two looks at the idle connections of a worker that ends.
const CLOSE_PAUSE: Duration = Duration::from_millis(1);

/// A task that no connection waits for.
struct Background {
    task: Option<TaskId>,
    /// The configuration that it began with.
    generation: u64,
}

pub(super) struct Entry {
    pub(super) task: Option<TaskId>,
    connection: Weak<Http1>,
}

impl Entry {
    /// From when on the connection may be closed to make room; none while it is busy, or something has just come.
    pub(super) fn may_close_at(&self) -> Option<Moment> {
        let time = self.connection.upgrade()?.may_close_at()?;
        if self.is_awake() { None } else { Some(time) }
    }

    /// Whether something has come for its task, which has not run since.
    fn is_awake(&self) -> bool {
        self.task.is_some_and(gale_runtime::is_awake)
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
            counters: OwnCounters::take(),
            connections: RefCell::default(),
            connections_max: Cell::new(connections_max),
            is_draining: Cell::new(false),
            spare_requests: RefCell::default(),
            spare_transfers: RefCell::default(),
            waiting_for_room: RefCell::default(),
            hand: Hand::default(),
            waiting_for_end: RefCell::default(),
            background: RefCell::default(),
            date_line: RefCell::new((u64::MAX, DATE_LINE)),
            resolvers: RefCell::default(),
            notes: RefCell::default(),
            scratch: RefCell::default(),
            last_complaint: Cell::new(None),
            room_alarm: Cell::new(None),
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

    /// From now on new exchanges use `configuration`.
    pub fn commit(&self, configuration: Rc<Configured>, connections_max: usize) {
        let old = self.configuration.replace(configuration);
        self.access.forget_unused();
        self.connections_max.set(connections_max);
        // Nobody will answer these any more: better closed now than under a request.
        let configuration = self.configuration();
        self.close_some(|entry, connection| {
            if connection.has_place(&configuration) {
                return false;
            }
            // What has begun, or may have, the old one answers; also if the task has not run yet.
            let may_have_begun = connection.may_have_begun() || entry.is_awake();
            if may_have_begun {
                connection.begin_with(&old);
            }
            !may_have_begun
        });
        self.hand.begin_again();
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
                // Those that something has come for have their turn, and others their end.
                gale_runtime::sleep(CLOSE_PAUSE).await;
            }
        });
    }

    /// When the next idle connection may be closed.
    fn next_close(&self) -> Option<Moment> {
        let connections = self.connections.borrow();
        connections.iter().filter_map(|(_, entry)| entry.connection.upgrade()?.may_close_at()).min()
    }

    /// Ready when no connection is open any more, and nothing is done in the background.
    pub async fn all_closed(&self) {
        poll_fn(|context: &mut Context<'_>| {
            if self.connection_count() == 0 && self.background.borrow().is_empty() {
                return Poll::Ready(());
            }
            self.waiting_for_end.borrow_mut().push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Closes the connections whose exchange began with this configuration or an
    /// older one, and ends what is done in the background for such; without one, all of them.
    pub fn expire(&self, configuration: Option<&HttpConfiguration>) {
        let newest = configuration.map_or(u64::MAX, |http| http.generation);
        let is_last_call = configuration.is_none();
        let is_expired = |generation: Option<u64>| generation.is_some_and(|generation| generation <= newest);
        self.close_some(|_, connection| {
            is_last_call || is_expired(connection.exchange_generation()) || is_expired(connection.next_generation())
        });
        let expired = |background: &Background| background.generation <= newest;
        let tasks: Vec<TaskId> = {
            let background = self.background.borrow();
            background.iter().filter(|(_, entry)| expired(entry)).filter_map(|(_, entry)| entry.task).collect()
        };
        tasks.into_iter().for_each(gale_runtime::abort);
    }

    /// Closes idle connections that may be closed now.
    fn close_idle(&self) {
        let now = gale_runtime::now();
        self.close_some(|entry, _| entry.may_close_at().is_some_and(|time| time <= now));
    }

    fn close_some(&self, chosen: impl Fn(&Entry, &Http1) -> bool) {
        let is_chosen = |entry: &Entry| entry.connection.upgrade().is_some_and(|connection| chosen(entry, &connection));
        let chosen_task = |entry: &Entry| entry.task.filter(|_| is_chosen(entry));
        let tasks: Vec<TaskId> = self.connections.borrow().iter().filter_map(|(_, entry)| chosen_task(entry)).collect();
        // Each abort drops a connection, which takes itself off the list.
        for &task in &tasks {
            gale_runtime::abort(task);
        }
    }

    /// The connection of this number has become idle: one that waits for room may take its place.
    pub(crate) fn note_idle(&self, number: usize) {
        self.hand.note(number);
        if !self.has_room() {
            self.wake_waiting_for_room();
        }
    }

    /// At most once a second, as nginx does.
    pub(super) fn complain(&self, message: &str) {
        let now = gale_runtime::now();
        let is_recent = |last: Moment| now.since(last) < Duration::from_secs(1);
        if !self.last_complaint.get().is_some_and(is_recent) {
            self.last_complaint.set(Some(now));
            self.configuration().error_log().write(Level::Warn, None, &message);
        }
    }

    #[inline]
    pub(super) fn wake_waiting_for_room(&self) {
        if !self.waiting_for_room.borrow().is_empty() {
            self.waiting_for_room.take().into_iter().for_each(Waker::wake);
        }
    }

    pub(super) fn start_connection(
        self: &Rc<Self>,
        stream: Stream,
        remote: SocketAddress,
        address: &Rc<ListenAddress>,
        first: Option<Rc<Configured>>,
    ) {
        let number = CONNECTION_NUMBERS.fetch_add(1, Ordering::Relaxed);
        self.counters.count_accepted();
        let info = ConnectionInfo::new(number, remote, Rc::clone(address), gale_runtime::now());
        let connection = Rc::new(Http1::new(info, stream, Rc::clone(self), first));
        let entry = Entry { task: None, connection: Rc::downgrade(&connection) };
        let number = self.connections.borrow_mut().insert(entry);
        connection.set_listed(number);
        let task = gale_runtime::spawn(connection.serve());
        // The task has not run yet: it is there to be found.
        self.connections.borrow_mut()[number].task = Some(task);
    }

    /// How many tasks there may be in the background: as many as connections.
    pub fn background_max(&self) -> usize {
        self.connections_max.get()
    }

    /// Does something that no connection waits for, for an exchange that began with the configuration of that generation.
    /// `false` when there is too much of that already.
    pub fn spawn_background(self: &Rc<Self>, generation: u64, work: impl Future<Output = ()> + 'static) -> bool {
        if self.background.borrow().len() >= self.background_max() {
            return false;
        }
        let number = self.background.borrow_mut().insert(Background { task: None, generation });
        let listed = ListedBackground { worker: Rc::clone(self), number };
        let task = gale_runtime::spawn(async move {
            let _listed = listed;
            work.await;
        });
        // The task has not run yet: it is there to be found.
        if let Some(entry) = self.background.borrow_mut().get_mut(number) {
            entry.task = Some(task);
        }
        true
    }

    fn forget_background(&self, number: usize) {
        self.background.borrow_mut().remove(number);
        self.waiting_for_end.take().into_iter().for_each(Waker::wake);
    }

    /// This worker's resolver of a `resolver` directive.
    pub fn resolver(&self, settings: &Arc<ResolverSettings>) -> Rc<Resolver> {
        let configuration = self.configuration();
        self.resolvers.borrow_mut().get(settings, configuration.error_log())
    }

    /// Calls `f` with what a module keeps on this worker from request to request: a type of its own. It must not wait or
    /// ask for another's.
    pub fn with_note<T: Default + 'static, R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        let mut notes = self.notes.borrow_mut();
        if !notes.has::<T>() {
            notes.put(T::default());
        }
        f(notes.get_mut().expect("it was put there"))
    }

    /// Takes a connection that has ended off the list.
    pub(super) fn forget_connection(&self, number: usize) {
        self.counters.count_closed();
        let is_empty = {
            let mut connections = self.connections.borrow_mut();
            connections.remove(number);
            connections.is_empty()
        };
        self.wake_waiting_for_room();
        if is_empty {
            self.waiting_for_end.take().into_iter().for_each(Waker::wake);
        }
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
    pub(super) fn take_transfer(&self) -> Box<Transfer> {
        self.spare_transfers.borrow_mut().pop().unwrap_or_default()
    }

    /// Takes a transfer back of which nothing is left.
    pub(super) fn give_transfer_back(&self, transfer: Box<Transfer>) {
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

/// The place of a background task in its worker's list, from which it is taken however the task ends.
struct ListedBackground {
    worker: Rc<HttpWorker>,
    number: usize,
}

impl Drop for ListedBackground {
    fn drop(&mut self) {
        self.worker.forget_background(self.number);
    }
}

/// The machine's name in lower case, as it was when it was first asked for: `$hostname`.
pub fn hostname() -> &'static [u8] {
    static HOSTNAME: OnceLock<Vec<u8>> = OnceLock::new();
    HOSTNAME.get_or_init(|| rustix::system::uname().nodename().to_bytes().to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::pipeline;

    /// How many bytes the future of an asynchronous function takes, which need not be called for that.
    fn future_bytes<A, F: Future>(_function: impl FnOnce(A) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn a_connection_is_small_and_an_exchange_is_not_much_larger() {
        let connection = future_bytes(Http1::serve);
        let exchange = future_bytes(|(request, step)| pipeline::finish_and_send(request, step));
        let state = size_of::<Http1>();
        println!("futures: connection {connection} bytes, exchange {exchange} bytes; Http1 {state} bytes");
        // What is allocated for each idle connection: just within the allocator's classes of 64 and 192 bytes.
        assert!(connection <= 64, "the connection's future has {connection} bytes");
        assert!(state + 2 * size_of::<usize>() <= 192, "the connection has {state} bytes");
        // And its place in the worker's list, where all ones, which no task has, stand for none.
        assert_eq!(size_of::<Option<Entry>>(), 16);
        assert!(exchange <= 512, "the exchange's future has {exchange} bytes");
    }
}
