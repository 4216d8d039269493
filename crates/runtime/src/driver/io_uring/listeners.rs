//! Listening sockets on the ring: a single-shot poll reports connections, which are accepted directly.
//!
//! As with connections, a wanted poll is only noted, and becomes an entry when the turn ends.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use io_uring::{opcode, types};
use rustix::io::Errno;

use super::operation::{KIND_LISTENER, push_cancel, user_data};
use super::ring::{Completion, Queues, Ring};
use super::sockets::Sockets;
use super::{IoUring, Kernel};
use crate::driver::ListenerDriver;
use crate::driver::listening::{Accepted, Listening};
use crate::executor::slots::{Key, Slots};
use crate::socket::AcceptOptions;
use crate::socket::SocketAddress;

pub(super) struct Listeners {
    table: RefCell<Slots<Listening<Polls>>>,
    /// Requests to carry out when the turn ends.
    requests: RefCell<Vec<Request>>,
}

enum Request {
    /// Arm the poll of a listener.
    Arm(Key),
    /// Cancel the operation with this user data.
    Cancel(u64),
}

/// The poll by which the kernel reports connections.
#[derive(Default)]
struct Polls {
    is_wanted: bool,
    is_in_flight: bool,
    /// Error to report to the acceptor.
    error: Option<Errno>,
}

impl Listeners {
    pub fn new() -> Self {
        Listeners { table: RefCell::new(Slots::new()), requests: RefCell::default() }
    }

    /// Makes the entries of all requests of this turn.
    pub fn make_entries(&self, ring: &mut Ring<impl Queues>) {
        let mut table = self.table.borrow_mut();
        for request in self.requests.borrow_mut().drain(..) {
            match request {
                Request::Arm(key) => {
                    if let Some(listener) = table.get_mut(key) {
                        listener.make_entry(key, ring);
                    }
                }
                Request::Cancel(operation) => push_cancel(ring, operation),
            }
        }
    }

    pub fn handle_completion(&self, key: Key, completion: &Completion) {
        let mut listeners = self.table.borrow_mut();
        let Some(listener) = listeners.get_mut(key) else {
            return;
        };
        listener.registration.is_in_flight = false;
        if completion.was_refused() {
            // The acceptor gets the error, and tries again later.
            let acceptor = listener.acceptor.take();
            listener.registration.error = acceptor.is_some().then_some(Errno::NOMEM);
            drop(listeners);
            return acceptor.into_iter().for_each(Waker::wake);
        }
        let acceptor = listener.handle_event();
        if acceptor.is_none() {
            listener.pass_on();
        } else if !std::mem::replace(&mut listener.registration.is_wanted, true) {
            // Imitates a level-triggered event: if connections are left when the turn ends, the event is repeated, and
            // if no task waits for them then, the other loops are told.
            self.requests.borrow_mut().push(Request::Arm(key));
        }
        drop(listeners);
        acceptor.into_iter().for_each(Waker::wake);
    }

    pub fn attach(&self, socket: Arc<OwnedFd>, options: AcceptOptions) -> Key {
        self.table.borrow_mut().insert(Listening::new(socket, options))
    }

    pub fn set_options(&self, key: Key, options: AcceptOptions) {
        let mut listeners = self.table.borrow_mut();
        let Some(listener) = listeners.get_mut(key) else {
            return;
        };
        // The next poll has the new options; the end of this one wakes the acceptor.
        if listener.set_options(options) {
            self.cancel(key, &listener.registration);
        }
    }

    pub fn detach(&self, key: Key) {
        self.pause(key);
        let listener = self.table.borrow_mut().remove(key);
        drop(listener);
    }

    pub fn pause(&self, key: Key) {
        let mut listeners = self.table.borrow_mut();
        let Some(listener) = listeners.get_mut(key) else {
            return;
        };
        let acceptor = listener.pause();
        self.cancel(key, &listener.registration);
        if std::mem::take(&mut listener.registration.is_wanted) || listener.registration.is_in_flight {
            listener.pass_on();
        }
        drop(listeners);
        drop(acceptor);
    }

    /// Listeners whose poll counts as in flight.
    pub fn in_flight(&self) -> Vec<Key> {
        let mut keys = Vec::new();
        self.table.borrow_mut().for_each(|key, listener| {
            if listener.registration.is_in_flight {
                keys.push(key);
            }
        });
        keys
    }

    /// Repeats a cancellation that was not submitted.
    pub fn cancel_again(&self, key: Key) {
        if let Some(listener) = self.table.borrow_mut().get_mut(key) {
            self.cancel(key, &listener.registration);
        }
    }

    fn cancel(&self, key: Key, polls: &Polls) {
        if polls.is_in_flight {
            self.requests.borrow_mut().push(Request::Cancel(user_data(KIND_LISTENER, key)));
        }
    }

    pub fn rearm_shared(&self) {
        let mut wakers = Vec::new();
        self.table.borrow_mut().for_each(|_, listener| {
            if listener.options.exclusive
                && let Some(acceptor) = listener.acceptor.take()
            {
                listener.readable = true;
                wakers.push(acceptor);
            }
        });
        wakers.into_iter().for_each(Waker::wake);
    }

    pub fn accept_for_another(&self, address: &SocketAddress, socket: &Arc<OwnedFd>) {
        let mut wakers = Vec::new();
        self.table.borrow_mut().for_each(|_, listener| wakers.extend(listener.accept_for_another(address, socket)));
        wakers.into_iter().for_each(Waker::wake);
    }

    pub fn try_accept(&self, key: Key, sockets: &impl Sockets) -> io::Result<Option<Accepted>> {
        let mut listeners = self.table.borrow_mut();
        let listener = listeners.get_mut(key).expect("an open listener owns its slot");
        sockets.accept(&listener.socket)
    }

    pub fn poll_accept(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        turn: u32,
        sockets: &impl Sockets,
    ) -> Poll<io::Result<Accepted>> {
        let mut listeners = self.table.borrow_mut();
        let listener = listeners.get_mut(key).expect("an open listener owns its slot");
        if let Some(errno) = listener.registration.error.take() {
            return Poll::Ready(Err(errno.into()));
        }
        if let Some(accepted) = listener.next(turn, |socket| sockets.accept(socket)).transpose() {
            return Poll::Ready(accepted);
        }
        if !listener.registration.is_in_flight && !std::mem::replace(&mut listener.registration.is_wanted, true) {
            self.requests.borrow_mut().push(Request::Arm(key));
        }
        let displaced = listener.acceptor.park(cx.waker());
        let has_more = listener.has_more();
        drop(listeners);
        if has_more {
            cx.waker().wake_by_ref();
        }
        drop(displaced);
        Poll::Pending
    }
}

impl Listening<Polls> {
    fn make_entry(&mut self, key: Key, ring: &mut Ring<impl Queues>) {
        if !std::mem::take(&mut self.registration.is_wanted) || self.registration.is_in_flight {
            return;
        }
        let exclusive = if self.options.exclusive { libc::EPOLLEXCLUSIVE as u32 } else { 0 };
        let poll = opcode::PollAdd::new(types::Fd(self.socket.as_raw_fd()), libc::POLLIN as u32 | exclusive);
        self.registration.is_in_flight = true;
        // SAFETY: the slot shares ownership of the descriptor, and the entry is submitted right afterwards.
        unsafe { ring.push(&poll.build().user_data(user_data(KIND_LISTENER, key))) };
    }
}

impl<K: Kernel> ListenerDriver for IoUring<K> {
    fn listen(&self, address: &SocketAddress, backlog: i32) -> io::Result<OwnedFd> {
        self.sockets.listen(address, backlog)
    }

    fn listener_address(&self, socket: &OwnedFd) -> io::Result<SocketAddress> {
        self.sockets.listener_address(socket)
    }

    fn attach_listener(&self, socket: Arc<OwnedFd>, options: AcceptOptions) -> Key {
        self.listeners.attach(socket, options)
    }

    fn set_accept_options(&self, key: Key, options: AcceptOptions) {
        self.listeners.set_options(key, options);
    }

    fn detach_listener(&self, key: Key) {
        self.listeners.detach(key);
    }

    fn pause_listener(&self, key: Key) {
        self.listeners.pause(key);
    }

    fn rearm_shared_listeners(&self) {
        self.listeners.rearm_shared();
    }

    fn accept_for_another(&self, address: &SocketAddress, socket: Arc<OwnedFd>) {
        self.listeners.accept_for_another(address, &socket);
    }

    fn try_accept(&self, key: Key) -> io::Result<Option<(OwnedFd, SocketAddress)>> {
        self.listeners.try_accept(key, &self.sockets)
    }

    fn poll_accept(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<(OwnedFd, SocketAddress)>> {
        self.listeners.poll_accept(key, cx, self.turn.get(), &self.sockets)
    }
}
