//! Accepting: a loop's share of the listening sockets, and room for what comes.
//!
//! A connection is accepted only if it can be served: while there is no room, the memory for buffers is exhausted or
//! the process is out of descriptors, connections wait in the kernel. Once accepted, a connection is served. Those that
//! wait at a socket when this loop stops listening there are still accepted, if there is room for them within a short
//! time.
//!
//! With `accept_mutex on` the workers take turns on the sockets that they share: one at a time listens. It gives its
//! turn back with the first connection and tries again when its loop's turn ends, as the others do at the ends of
//! theirs and after `accept_mutex_delay`; whoever is short of connections lets some of these pass. (nginx's way:
//! <https://nginx.org/en/docs/ngx_core_module.html#accept_mutex>)

use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use gale_base::os_error::OsErrorText;
use gale_runtime::{AcceptMutex, AcceptOptions, Listener, Moment, SocketAddress, Stream, Timer, TurnEnd};

use crate::configuration::Configuration;
use crate::configuration::protocol::ProtocolWorker;
use crate::transport::Transport;
use crate::worker::{Search, Worker};
use gale_base::log_level::Level;
use gale_process::ListenAddress;

/// How long accepting pauses when the process is out of descriptors, as in nginx.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);

/// Most connections that are accepted from a socket before it is closed: the
/// kernel's own bound on a queue, usually.
const QUEUED_MAX: usize = 65536;

/// How many of them are accepted before the loop's other work has its turn.
const QUEUED_PER_TURN: usize = 64;

/// How long room is waited for, for connections at a socket that this loop listens to no more: as long as a reload may
/// take for that without seeming stuck. What is not accepted then is reset with its socket, as nginx does with all that
/// wait at a removed address.
pub const QUEUED_WAIT_MAX: Duration = Duration::from_secs(2);

/// How long a client that has sent nothing is waited for at a deferred socket that is given up. The kernel tells of it
/// after a second, when it has asked the client once more; this is as much as a round trip longer.
const SILENT_WAIT: Duration = Duration::from_millis(1200);

/// How long connections are accepted at a Unix socket that is not in the configuration any more: the master removes its
/// file, by which clients come, at the same time.
const UNLINK_WAIT: Duration = Duration::from_millis(100);

/// How long accepting pauses when the worker's memory for buffers is exhausted.
const MEMORY_PAUSE: Duration = Duration::from_millis(50);

/// Whose turn it is among the loops of this process.
static ACCEPT_MUTEX: AcceptMutex = AcceptMutex::new();

/// Leaves accepting to the other workers: this one stops.
pub fn leave_accept_mutex() {
    ACCEPT_MUTEX.hand_over();
}

/// Accepts from one listening socket for a protocol.
pub struct Acceptor {
    /// What the protocols of this loop share.
    pub worker: Rc<Worker>,
    /// Who serves the connections.
    pub protocol: Rc<dyn ProtocolWorker>,
    /// The socket.
    pub listener: Rc<Listener>,
    /// Where it listens, as the configuration has it.
    pub address: Rc<ListenAddress>,
    /// The workers take turns (`accept_mutex`), and try again after this time.
    pub accept_mutex_delay: Option<Duration>,
}

impl Acceptor {
    /// Accepts until the task is aborted.
    pub async fn run(self) {
        let mut turns = self.accept_mutex_delay.map(|delay| Turns::new(&self.listener, delay));
        // A panic may cost a connection, and never the socket.
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
                    // Once accepted it is served, even one above the limit: sent away it would be lost.
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

/// A listening socket that a loop accepts from no more, but for who has come already.
pub struct DrainingListener {
    /// It still is.
    pub listener: Rc<Listener>,
    /// Where it listens, as the configuration has it.
    pub address: Rc<ListenAddress>,
    /// The kernel tells of a connection when something was sent, or late (`deferred`).
    pub is_deferred: bool,
    /// Who serves the connections.
    pub protocol: Rc<dyn ProtocolWorker>,
}

fn tell_of_failure(worker: &Worker, error: &io::Error) {
    let message = format!("accept4() failed {}", OsErrorText(error));
    worker.error_log().write(Level::Crit, None, &message);
}

/// Pauses the socket, and lets another worker take its turn.
fn pause(listener: &Listener) {
    listener.pause();
    ACCEPT_MUTEX.hand_over();
}

/// Accepts from sockets that this loop is about to leave for good until those have come of whom the kernel tells late,
/// and whom it would reset with the socket: at deferred ones who has connected already, as his side sees it, and sent
/// nothing; at Unix sockets who finds their files. `configuration` as in [`accept_queued`], which is to follow.
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
            // Out of descriptors, say; told of by who takes what is left, if it goes on.
            Ok((_, Err(_))) => gale_runtime::sleep(MEMORY_PAUSE).await,
            Err(_) => break,
        }
    }
}

/// Accepts what the kernel has queued on sockets that this loop listens to no more. The first requests of these
/// connections are answered as `configuration` says, which still knew the address, else by the current one. As with all
/// others there has to be room, which idle connections make; it is waited for until `until` at most, and so are
/// descriptors.
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
            // Descriptors become free again when connections end.
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

/// Whether a connection may be accepted now: there is memory, and there is room, or it can be made once somebody has
/// come. Before that no idle connection is closed for it.
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

/// One listening socket's part in taking turns.
struct Turns<'a> {
    listener: &'a Listener,
    delay: Duration,
    /// The next time to try if the loop makes no turn before.
    retry: Timer,
    turn_end: TurnEnd,
    /// It listens, or did until the turn was given back.
    is_listening: bool,
    /// Something was accepted in this turn.
    has_accepted: bool,
    /// How many turns of the loop are still let pass.
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
            // The next is waited for in any case: what the task of another socket did decides about this one, too.
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
                // Until the end of this turn others may have it.
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
            // Has the task woken by it.
            let _ = self.retry.poll_expired(context);
        }
        Poll::Pending
    }

    /// Even a loop that lets turns pass takes one that was free for the whole delay: all loops might let it pass.
    fn try_take(&mut self, is_overdue: bool) -> bool {
        if self.passes > 0 && !is_overdue {
            self.passes -= 1;
            return false;
        }
        ACCEPT_MUTEX.try_take()
    }
}

/// How a listening socket is accepted from.
pub fn accept_options(is_shared: bool, multi_accept: bool) -> AcceptOptions {
    AcceptOptions {
        exclusive: is_shared,
        batch: if multi_accept { gale_runtime::MULTI_ACCEPT_BATCH } else { AcceptOptions::default().batch },
    }
}
