//! Accepting: a loop's share of the listening sockets, and room for what comes.
//!
//! A connection is accepted only if it can be served: while there is no room, the memory for buffers is exhausted or the
//! process is out of descriptors, connections wait in the kernel. Once accepted, a connection is served. Those that wait at
//! a socket when this loop stops listening there are still accepted, if there is room for them within a short time.
//!
//! With `accept_mutex on` the workers take turns on the sockets that they share: one at a time listens. It gives its turn
//! back with the first connection and tries again when its loop's turn ends, as the others do at the ends of theirs and
//! after `accept_mutex_delay`; whoever is short of connections lets some of these pass. (nginx's way:
//! <https://nginx.org/en/docs/ngx_core_module.html#accept_mutex>)

use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use gale_base::os_error::OsErrorText;
use gale_runtime::{AcceptMutex, AcceptOptions, Listener, Moment, SocketAddress, Stream, TaskId, Timer, TurnEnd};

use super::reuse::{Places, Search};
use super::worker::{Configured, Entry, HttpWorker};
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

/// How long a client that has sent nothing is waited for at a deferred socket that is given up. The kernel tells of it after a
/// second, when it has asked the client once more; this is as much as a round trip longer.
const SILENT_WAIT: Duration = Duration::from_millis(1200);

/// How long connections are accepted at a Unix socket that is not in the configuration any more: the master removes its file, by
/// which clients come, at the same time.
const UNLINK_WAIT: Duration = Duration::from_millis(100);

/// How long accepting pauses when the worker's memory for buffers is exhausted.
const MEMORY_PAUSE: Duration = Duration::from_millis(50);

/// How many connections there may be above the limit, besides one for each socket: an idle connection is closed only when a
/// new one has been accepted, and by then it may be busy. Once there are so many, idle ones are closed before the next one
/// is accepted.
const ABOVE_LIMIT_MAX: usize = 32;

/// Whose turn it is among the loops of this process.
static ACCEPT_MUTEX: AcceptMutex = AcceptMutex::new();

/// Leaves accepting to the other workers: this one stops.
pub fn leave_accept_mutex() {
    ACCEPT_MUTEX.hand_over();
}

/// A listening socket that a loop accepts from no more, but for who has come already.
pub struct LeftSocket {
    /// It still is.
    pub listener: Rc<Listener>,
    /// Where it listens, as the configuration has it.
    pub address: Rc<ListenAddress>,
    /// The kernel tells of a connection when something was sent, or late (`deferred`).
    pub is_deferred: bool,
}

impl HttpWorker {
    /// Accepts connections from one listening socket until the task is aborted. With `accept_mutex_delay` the workers take
    /// turns.
    pub async fn accept_from(
        self: Rc<Self>,
        listener: Rc<Listener>,
        address: Rc<ListenAddress>,
        accept_mutex_delay: Option<Duration>,
    ) {
        let mut turns = accept_mutex_delay.map(|delay| Turns::new(&listener, delay));
        // A panic may cost a connection, and never the socket.
        while gale_runtime::catch_panic(self.accept_all(&listener, &address, turns.as_mut())).await.is_err() {
            self.pause(&listener);
            gale_runtime::sleep(ACCEPT_PAUSE).await;
        }
    }

    async fn accept_all(
        self: &Rc<Self>,
        listener: &Listener,
        address: &Rc<ListenAddress>,
        mut turns: Option<&mut Turns<'_>>,
    ) {
        loop {
            self.welcome(listener).await;
            let accepted = match &mut turns {
                None => listener.accept().await,
                Some(turns) => poll_fn(|context| turns.poll_accept(self, context)).await,
            };
            match accepted {
                Ok((stream, remote)) => {
                    self.make_room();
                    // Once accepted it is served, even one above the limit: sent away it would be lost.
                    self.start_connection(stream, remote, address, None);
                }
                Err(error) => {
                    self.tell_of_failure(&error);
                    self.pause(listener);
                    gale_runtime::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn tell_of_failure(&self, error: &io::Error) {
        let message = format!("accept4() failed {}", OsErrorText(error));
        self.configuration().error_log().write(Level::Crit, None, &message);
    }

    /// Accepts nothing more for now, and lets another worker take its turn.
    fn pause(&self, listener: &Listener) {
        listener.pause();
        ACCEPT_MUTEX.hand_over();
    }

    /// How many connections there are above seven eighths of those that there may be. (nginx's accept_disabled)
    fn connections_above_comfort(&self) -> usize {
        let max = self.connections_max.get();
        self.connection_count().saturating_sub(max - max / 8)
    }

    /// Accepts from sockets that this loop is about to leave for good until those have come of whom the kernel tells late, and
    /// whom it would reset with the socket: at deferred ones who has connected already, as his side sees it, and sent nothing;
    /// at Unix sockets who finds their files. `configuration` as in [`HttpWorker::accept_what_is_queued`], which is to follow.
    pub async fn accept_late(self: &Rc<Self>, sockets: &[LeftSocket], configuration: Option<&Rc<Configured>>) {
        let is_unix = |left: &LeftSocket| matches!(*left.address, ListenAddress::Unix(_));
        let wait = if sockets.iter().any(|left| left.is_deferred) {
            SILENT_WAIT
        } else if configuration.is_some() && sockets.iter().any(is_unix) {
            UNLINK_WAIT
        } else {
            return;
        };
        let until = gale_runtime::now() + wait;
        let poll_all = |context: &mut Context<'_>| {
            let mut polled =
                sockets.iter().map(|left| left.listener.poll_accept(context).map(|accepted| (left, accepted)));
            polled.find(Poll::is_ready).unwrap_or(Poll::Pending)
        };
        while gale_runtime::now() < until {
            if !self.is_welcome() {
                gale_runtime::sleep(MEMORY_PAUSE).await;
                continue;
            }
            let next = poll_fn(poll_all);
            match gale_runtime::timeout(until.since(gale_runtime::now()), next).await {
                Ok((left, Ok((stream, remote)))) => {
                    self.make_room();
                    self.start_connection(stream, remote, &left.address, configuration.cloned());
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
    pub async fn accept_what_is_queued(
        self: &Rc<Self>,
        sockets: &[LeftSocket],
        configuration: Option<&Rc<Configured>>,
        until: Moment,
    ) {
        for socket in sockets {
            self.accept_queue(socket, configuration, until).await;
        }
    }

    async fn accept_queue(
        self: &Rc<Self>,
        LeftSocket { listener, address, .. }: &LeftSocket,
        configuration: Option<&Rc<Configured>>,
        until: Moment,
    ) {
        for count in 1..=QUEUED_MAX {
            if !self.is_welcome() {
                if !listener.has_waiting() {
                    return;
                }
                if gale_runtime::timeout(until.since(gale_runtime::now()), self.welcome(listener)).await.is_err() {
                    let connections = self.connection_count();
                    let message = format!("connections that wait at {address} are given up, {connections} are open");
                    self.configuration().error_log().write(Level::Warn, None, &message);
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
                Err(error) => return self.tell_of_failure(&error),
            };
            self.make_room();
            self.start_connection(stream, remote, address, configuration.cloned());
            if count % QUEUED_PER_TURN == 0 {
                gale_runtime::yield_now().await;
            }
        }
    }

    /// Whether a connection may be accepted now: there is memory, and there is room, or it can be made once somebody has
    /// come. Before that no idle connection is closed for it.
    fn is_welcome(&self) -> bool {
        !gale_runtime::leases_exhausted() && self.look_for_room() == Search::Found
    }

    /// Waits until a connection may be accepted.
    async fn welcome(self: &Rc<Self>, listener: &Listener) {
        loop {
            if gale_runtime::leases_exhausted() {
                self.complain("the memory for buffers is exhausted, accepting pauses");
                self.pause(listener);
                gale_runtime::sleep(MEMORY_PAUSE).await;
                continue;
            }
            match self.look_for_room() {
                Search::Found => return,
                Search::GoesOn => gale_runtime::yield_now().await,
                Search::InVain(later) => self.room(listener, later).await,
            }
        }
    }

    /// Looks for room, with bounded work: there is some, or an idle connection can be closed for a new one.
    fn look_for_room(&self) -> Search {
        if self.has_room() {
            return Search::Found;
        }
        let search = self.with_places(|places| self.hand.find(places));
        if search == Search::Found && self.connections_above_limit() >= ABOVE_LIMIT_MAX {
            self.close_longest_idle();
            return Search::GoesOn;
        }
        search
    }

    fn connections_above_limit(&self) -> usize {
        self.connection_count().saturating_sub(self.connections_max.get())
    }

    /// Closes idle connections if there is no room for the one that was just accepted.
    fn make_room(&self) {
        if !self.has_room() {
            self.complain_of_connections();
            self.close_longest_idle();
        }
    }

    /// Waits until somebody says that there may be room.
    async fn room(self: &Rc<Self>, listener: &Listener, later: Option<Moment>) {
        let mut has_waited = false;
        poll_fn(|context| {
            if std::mem::replace(&mut has_waited, true) {
                return Poll::Ready(());
            }
            self.wait_for_room(context, listener, later);
            Poll::Pending
        })
        .await;
    }

    fn wait_for_room(self: &Rc<Self>, context: &mut Context<'_>, listener: &Listener, later: Option<Moment>) {
        self.complain_of_connections();
        self.pause(listener);
        self.waiting_for_room.borrow_mut().push(context.waker().clone());
        if let Some(later) = later {
            self.wake_when_one_may_close(later);
        }
    }

    /// An idle connection may be protected for a while (`keepalive_min_timeout`): whoever
    /// waits for room looks again when that is over.
    fn wake_when_one_may_close(self: &Rc<Self>, time: Moment) {
        match self.room_alarm.get() {
            Some((earlier, _)) if earlier <= time => return,
            Some((_, task)) => gale_runtime::abort(task),
            None => {}
        }
        let worker = Rc::downgrade(self);
        let task = gale_runtime::spawn(async move {
            gale_runtime::sleep_until(time).await;
            if let Some(worker) = worker.upgrade() {
                worker.room_alarm.set(None);
                worker.wake_waiting_for_room();
            }
        });
        self.room_alarm.set(Some((time, task)));
    }

    pub(super) fn has_room(&self) -> bool {
        self.connection_count() < self.connections_max.get()
    }

    /// Closes connections that have been idle longest, of those that are looked at for it.
    fn close_longest_idle(&self) {
        let wanted = self.connections_above_limit() + 1;
        let places = self.with_places(|places| self.hand.longest_idle(places, wanted));
        let tasks: Vec<TaskId> = {
            let connections = self.connections.borrow();
            places.into_iter().filter_map(|place| connections.get(place)?.task).collect()
        };
        tasks.into_iter().for_each(gale_runtime::abort);
    }

    /// Calls `act` with a view of the connections.
    fn with_places<T>(&self, act: impl FnOnce(&Places<'_>) -> T) -> T {
        let connections = self.connections.borrow();
        let may_close_at = |place: usize| connections.get(place).and_then(Entry::may_close_at);
        let (now, turn) = (gale_runtime::now(), gale_runtime::turn());
        act(&Places { count: connections.capacity(), now, turn, may_close_at: &may_close_at })
    }

    fn complain_of_connections(&self) {
        self.complain(&format!("{} worker_connections are not enough", self.connections_max.get()));
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

    fn poll_accept(
        &mut self,
        worker: &HttpWorker,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<(Stream, SocketAddress)>> {
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
                self.passes = worker.connections_above_comfort();
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

    /// What nobody has taken for the whole delay is taken even by a loop that lets turns pass: all of them might.
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
