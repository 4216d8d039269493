//! Accepting: a loop's share of the listening sockets, and room for what comes.
//!
//! A connection is accepted only if it can be served: while there is no room, the memory for buffers is exhausted or the
//! process is out of descriptors, connections wait in the kernel. Once accepted, a connection is served.

use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use gale_base::os_error::OsErrorText;
use gale_runtime::{AcceptOptions, Listener, Moment, TaskId};

use super::worker::{Configured, HttpWorker};
use crate::process::{Level, ListenAddress};

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

impl HttpWorker {
    /// Accepts connections from one listening socket until the task is aborted.
    pub async fn accept_from(self: Rc<Self>, listener: Rc<Listener>, address: ListenAddress) {
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
        listener: &Listener,
        address: &ListenAddress,
        configuration: &Rc<Configured>,
    ) {
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
}

/// How a listening socket is accepted from.
pub fn accept_options(is_shared: bool, multi_accept: bool) -> AcceptOptions {
    AcceptOptions {
        exclusive: is_shared,
        batch: if multi_accept { gale_runtime::MULTI_ACCEPT_BATCH } else { AcceptOptions::default().batch },
    }
}
