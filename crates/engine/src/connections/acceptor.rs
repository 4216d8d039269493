//! Accepting connections: a loop's part of the listening sockets, and room for new connections.
//!
//! A connection is only accepted if it can be served: without room, buffer memory or descriptors, connections wait in
//! the kernel. An accepted connection is always served. When a loop stops listening on a socket, queued connections are
//! still accepted if there is room within a short time.
//!
//! With `accept_mutex on` the workers take turns on shared sockets: one at a time listens. It releases the mutex with
//! the first connection and tries again at the end of its loop's turn, as the others do at the ends of theirs and after
//! `accept_mutex_delay`; a worker short of connections skips some of these attempts. (As in nginx:
//! <https://nginx.org/en/docs/ngx_core_module.html#accept_mutex>)

use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_process::ListenAddress;
use gale_runtime::{AcceptMutex, AcceptOptions, Listener, Moment, SocketAddress, Stream, Timer, TurnEnd};
use gale_tls::Transport;
use gale_worker::{Search, Worker};

use crate::configuration::Configuration;
use crate::configuration::protocol::ProtocolWorker;

/// Pause of accepting when the process is out of descriptors, as in nginx.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);

/// Most connections that are accepted from a socket before it is closed; usually the kernel's own limit of a queue.
const QUEUED_MAX: usize = 65536;

/// Connections accepted from it in each turn of the loop.
const QUEUED_PER_TURN: usize = 64;

/// Longest wait for room for connections on a socket that this loop no longer listens on; a reload may take that long
/// without seeming stuck. Connections not accepted by then are reset with the socket, as nginx does with all that are
/// queued at a removed address.
pub const QUEUED_WAIT_MAX: Duration = Duration::from_secs(2);

/// Wait for silent clients on a deferred socket that is given up. The kernel reports such a connection after a second,
/// when it has asked the client again; this allows a round trip more.
const SILENT_WAIT: Duration = Duration::from_millis(1200);

/// Time during which connections are accepted on a Unix socket that was removed from the configuration; the master
/// unlinks its file at the same time.
const UNLINK_WAIT: Duration = Duration::from_millis(100);

/// Pause of accepting when the worker's buffer memory is exhausted.
const MEMORY_PAUSE: Duration = Duration::from_millis(50);

/// Mutex of accepting among the loops of this process.
static ACCEPT_MUTEX: AcceptMutex = AcceptMutex::new();

/// Releases the mutex for other workers, because this one stops.
pub fn leave_accept_mutex() {
    ACCEPT_MUTEX.hand_over();
}

/// Accepts connections from one listening socket for a protocol.
pub struct Acceptor {
    /// State shared by the protocols of this loop.
    pub worker: Rc<Worker>,
    /// Protocol that serves the connections.
    pub protocol: Rc<dyn ProtocolWorker>,
    /// The socket.
    pub listener: Rc<Listener>,
    /// Address as configured.
    pub address: Rc<ListenAddress>,
    /// Interval of attempts with `accept_mutex`; `None` without it.
    pub accept_mutex_delay: Option<Duration>,
}

impl Acceptor {
    /// Accepts until the task is aborted.
    pub async fn run(self) {
        let mut turns = self.accept_mutex_delay.map(|delay| Turns::new(&self.listener, delay));
        // A panic may cost a connection, but never the socket.
        while gale_runtime::catch_panic(self.accept_all(turns.as_mut())).await.is_err() {
            pause(&self.listener);
            gale_runtime::sleep(ACCEPT_PAUSE).await;
        }
    }

    async fn accept_all(&self, mut turns: Option<&mut Turns<'_>>) {
        loop {
            welcome(&self.worker, &self.listener).await;
            let accepted = match &mut turns {
                None => self.listener.accept().await,
                Some(turns) => poll_fn(|context| turns.poll_accept(&self.worker, context)).await,
            };
            match accepted {
                Ok((stream, remote)) => {
                    make_room(&self.worker);
                    // Served even if it exceeds the limit, because closing it would lose it.
                    Rc::clone(&self.protocol).serve(Transport::Plain(stream), remote, &self.address, None);
                }
                Err(error) => {
                    tell_of_failure(&self.worker, &error);
                    pause(&self.listener);
                    gale_runtime::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

/// A listening socket that a loop stops using, except for connections already queued.
pub struct DrainingListener {
    /// The socket.
    pub listener: Rc<Listener>,
    /// Address as configured.
    pub address: Rc<ListenAddress>,
    /// `true` if the kernel reports connections when data has arrived, or late (`deferred`).
    pub is_deferred: bool,
    /// Protocol that serves the connections.
    pub protocol: Rc<dyn ProtocolWorker>,
}

fn tell_of_failure(worker: &Worker, error: &io::Error) {
    let message = format!("accept4() failed {}", OsErrorText(error));
    worker.error_log().write(Level::Crit, None, &message);
}

/// Pauses the socket and releases the mutex to another worker.
fn pause(listener: &Listener) {
    listener.pause();
    ACCEPT_MUTEX.hand_over();
}

/// Accepts from sockets that this loop is about to leave, until the connections have arrived that the kernel reports
/// late and would reset with the socket: on deferred sockets those of silent clients, on Unix sockets those of clients
/// that still find the file. `configuration` is as in [`accept_queued`], which has to follow.
pub async fn accept_late(
    worker: &Rc<Worker>,
    sockets: &[DrainingListener],
    configuration: Option<&Arc<Configuration>>,
) {
    let is_unix = |socket: &DrainingListener| matches!(*socket.address, ListenAddress::Unix(_));
    let wait = if sockets.iter().any(|socket| socket.is_deferred) {
        SILENT_WAIT
    } else if configuration.is_some() && sockets.iter().any(is_unix) {
        UNLINK_WAIT
    } else {
        return;
    };
    let until = gale_runtime::now() + wait;
    let poll_all = |context: &mut Context<'_>| {
        let mut polled =
            sockets.iter().map(|socket| socket.listener.poll_accept(context).map(|accepted| (socket, accepted)));
        polled.find(Poll::is_ready).unwrap_or(Poll::Pending)
    };
    while gale_runtime::now() < until {
        if !is_welcome(worker) {
            gale_runtime::sleep(MEMORY_PAUSE).await;
            continue;
        }
        let next = poll_fn(poll_all);
        match gale_runtime::timeout(until.since(gale_runtime::now()), next).await {
            Ok((socket, Ok((stream, remote)))) => {
                make_room(worker);
                Rc::clone(&socket.protocol).serve(Transport::Plain(stream), remote, &socket.address, configuration);
            }
            // Out of descriptors, for example; reported by [`accept_queued`] if it persists.
            Ok((_, Err(_))) => gale_runtime::sleep(MEMORY_PAUSE).await,
            Err(_) => break,
        }
    }
}

/// Accepts connections queued by the kernel on sockets that this loop no longer listens on. Their first requests use
/// `configuration`, which still has the address, if given, else the current one. Room is made by closing idle
/// connections; room and descriptors are awaited until `until` at most.
pub async fn accept_queued(
    worker: &Rc<Worker>,
    sockets: &[DrainingListener],
    configuration: Option<&Arc<Configuration>>,
    until: Moment,
) {
    for socket in sockets {
        accept_queue(worker, socket, configuration, until).await;
    }
}

async fn accept_queue(
    worker: &Rc<Worker>,
    DrainingListener { listener, address, protocol, .. }: &DrainingListener,
    configuration: Option<&Arc<Configuration>>,
    until: Moment,
) {
    for count in 1..=QUEUED_MAX {
        if !is_welcome(worker) {
            if !listener.has_waiting() {
                return;
            }
            if gale_runtime::timeout(until.since(gale_runtime::now()), welcome(worker, listener)).await.is_err() {
                let connections = worker.connections.open();
                let message = format!("connections waiting at {address} are dropped, {connections} are open");
                worker.error_log().write(Level::Warn, None, &message);
                return;
            }
        }
        let (stream, remote) = match listener.try_accept() {
            Ok(Some(accepted)) => accepted,
            Ok(None) => return,
            // Descriptors are freed when connections end.
            Err(_) if gale_runtime::now() < until => {
                gale_runtime::sleep(MEMORY_PAUSE).await;
                continue;
            }
            Err(error) => return tell_of_failure(worker, &error),
        };
        make_room(worker);
        Rc::clone(protocol).serve(Transport::Plain(stream), remote, address, configuration);
        if count % QUEUED_PER_TURN == 0 {
            gale_runtime::yield_now().await;
        }
    }
}

/// `true` if a connection may be accepted: there is memory, and there is room or idle connections that can be closed.
/// None is closed before a client has arrived.
fn is_welcome(worker: &Worker) -> bool {
    !gale_runtime::leases_exhausted() && worker.connections.look_for_room() == Search::Found
}

/// Waits until a connection may be accepted.
async fn welcome(worker: &Rc<Worker>, listener: &Listener) {
    loop {
        if gale_runtime::leases_exhausted() {
            worker.complain(&"the memory for buffers is exhausted, accepting pauses");
            pause(listener);
            gale_runtime::sleep(MEMORY_PAUSE).await;
            continue;
        }
        match worker.connections.look_for_room() {
            Search::Found => return,
            Search::GoesOn => gale_runtime::yield_now().await,
            Search::InVain(later) => {
                worker.complain_of_connections();
                pause(listener);
                worker.room(later).await;
            }
        }
    }
}

/// Closes idle connections if there is no room for the one that was just accepted.
pub(super) fn make_room(worker: &Worker) {
    if !worker.connections.has_room() {
        worker.complain_of_connections();
        worker.connections.close_longest_idle();
    }
}

/// One listening socket's part in the turns of `accept_mutex`.
struct Turns<'a> {
    listener: &'a Listener,
    delay: Duration,
    /// Next attempt if the loop makes no turn before.
    retry: Timer,
    turn_end: TurnEnd,
    /// `true` if it listens, or did until the mutex was released.
    is_listening: bool,
    /// `true` if a connection was accepted in this turn.
    has_accepted: bool,
    /// Turns of the loop that are still skipped.
    passes: usize,
}

impl<'a> Turns<'a> {
    fn new(listener: &'a Listener, delay: Duration) -> Turns<'a> {
        Turns {
            listener,
            delay,
            retry: Timer::new(),
            turn_end: TurnEnd::default(),
            is_listening: false,
            has_accepted: false,
            passes: 0,
        }
    }

    fn poll_accept(&mut self, worker: &Worker, context: &mut Context<'_>) -> Poll<io::Result<(Stream, SocketAddress)>> {
        let is_overdue = self.retry.poll_expired(context).is_ready();
        let is_at_end = self.turn_end.poll(context).is_ready();
        if is_at_end {
            // The next turn end is always awaited, because another socket's task may decide for this one, too.
            let _ = self.turn_end.poll(context);
        }
        let has_turn = ACCEPT_MUTEX.is_held() || (is_at_end || is_overdue) && self.try_take(is_overdue);
        if has_turn {
            self.retry.clear();
            self.is_listening = true;
            let accepted = self.listener.poll_accept(context);
            if accepted.is_ready() {
                self.has_accepted = true;
            } else if std::mem::take(&mut self.has_accepted) {
                // Available to others until the end of this turn.
                self.passes = worker.connections.above_comfort();
                if self.passes == 0 {
                    ACCEPT_MUTEX.release();
                } else {
                    ACCEPT_MUTEX.hand_over();
                }
            }
            return accepted;
        }
        if is_at_end || is_overdue {
            if std::mem::take(&mut self.is_listening) {
                self.listener.pause();
            }
            self.retry.set(gale_runtime::now() + self.delay);
            // Registers the task with the timer.
            let _ = self.retry.poll_expired(context);
        }
        Poll::Pending
    }

    /// A loop that skips turns still takes a mutex that was free for the whole delay; otherwise all loops might skip.
    fn try_take(&mut self, is_overdue: bool) -> bool {
        if self.passes > 0 && !is_overdue {
            self.passes -= 1;
            return false;
        }
        ACCEPT_MUTEX.try_take()
    }
}

/// Options for accepting from a listening socket.
pub fn accept_options(is_shared: bool, multi_accept: bool) -> AcceptOptions {
    AcceptOptions {
        exclusive: is_shared,
        batch: if multi_accept { gale_runtime::MULTI_ACCEPT_BATCH } else { AcceptOptions::default().batch },
    }
}
