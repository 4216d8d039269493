//! Listening sockets on the ring: the kernel tells of connections by a poll at a time, and they are accepted directly. Or it
//! accepts them itself, ahead of us (multishot accept), from sockets that no other loop has, if that was asked for.
//!
//! As with connections, what is wanted is only noted, and becomes an entry when the turn ends. No connection that the
//! kernel has accepted is lost: it waits to be taken also after a pause, and after the end of its listener it is closed.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use io_uring::{cqueue, opcode, types};
use rustix::io::Errno;

use super::operation::{KIND_ACCEPT, KIND_LISTENER, push_cancel, user_data};
use super::ring::{Completion, Ring};
use crate::driver::End;
use crate::driver::listening::{Accepted, Listening, accept, concerns_one_connection};
use crate::executor::slots::{Key, Slots};
use crate::net::AcceptOptions;
use crate::net::SocketAddress;

/// When so many connections wait that the kernel has accepted ahead, it is to stop. One call may bring more of them, as many
/// as its queue holds.
const AHEAD_MAX: usize = 64;

pub(super) struct Listeners {
    table: RefCell<Slots<Listening<Polls>>>,
    /// What to look at when the turn ends.
    requests: RefCell<Vec<Request>>,
    /// The kernel can accept ahead.
    has_multishot: Cell<bool>,
    /// Multishot accepts in flight, also of listeners that have gone.
    accepts_in_flight: Cell<usize>,
}

enum Request {
    /// A listener wants its poll.
    Arm(Key),
    /// The operation of this user data is not wanted any more.
    Cancel(u64),
}

/// How the kernel tells of connections.
#[derive(Default)]
struct Polls {
    /// A poll, or a multishot accept.
    is_wanted: bool,
    /// A poll is in flight.
    is_in_flight: bool,
    /// A multishot accept is in flight.
    is_accepting: bool,
    accepted: VecDeque<OwnedFd>,
    /// What ended the multishot accept.
    error: Option<Errno>,
}

impl Listeners {
    pub fn new(has_multishot: bool) -> Self {
        Listeners {
            table: RefCell::new(Slots::new()),
            requests: RefCell::default(),
            has_multishot: Cell::new(has_multishot),
            accepts_in_flight: Cell::new(0),
        }
    }

    /// Makes the entries of everything that was requested in this turn.
    pub fn make_entries(&self, ring: &mut Ring) {
        let mut table = self.table.borrow_mut();
        for request in self.requests.borrow_mut().drain(..) {
            match request {
                Request::Arm(key) => {
                    if let Some(listener) = table.get_mut(key) {
                        let was_accepting = listener.registration.is_accepting;
                        listener.make_entry(key, ring, self.has_multishot.get());
                        let has_begun = listener.registration.is_accepting && !was_accepting;
                        self.accepts_in_flight.set(self.accepts_in_flight.get() + usize::from(has_begun));
                    }
                }
                Request::Cancel(operation) => push_cancel(ring, operation),
            }
        }
    }

    pub fn handle_completion(&self, key: Key) {
        let mut listeners = self.table.borrow_mut();
        let Some(listener) = listeners.get_mut(key) else {
            return;
        };
        listener.registration.is_in_flight = false;
        let acceptor = listener.handle_event();
        if acceptor.is_none() {
            listener.pass_on();
        } else if !std::mem::replace(&mut listener.registration.is_wanted, true) {
            // As if it was level-triggered: when the turn ends and connections are left, this is told again, and if then
            // nobody waits for them here, the others are told.
            self.requests.borrow_mut().push(Request::Arm(key));
        }
        drop(listeners);
        acceptor.into_iter().for_each(Waker::wake);
    }

    /// Whether the kernel may still accept ahead for any listener, one that has gone included.
    pub fn is_any_accepting(&self) -> bool {
        self.accepts_in_flight.get() > 0
    }

    /// A connection that the kernel has accepted, or why it does so no more.
    pub fn handle_accepted(&self, key: Key, completion: &Completion) {
        // Closed if the listener has gone.
        let accepted = take_accepted(completion);
        if !cqueue::more(completion.flags) {
            self.accepts_in_flight.set(self.accepts_in_flight.get() - 1);
        }
        let mut listeners = self.table.borrow_mut();
        let Some(listener) = listeners.get_mut(key) else {
            return;
        };
        let polls = &mut listener.registration;
        polls.is_accepting = cqueue::more(completion.flags);
        match accepted {
            Ok(socket) => polls.accepted.push_back(socket),
            // An older kernel.
            Err(Errno::INVAL) => self.has_multishot.set(false),
            Err(Errno::CANCELED) => {}
            Err(errno) if concerns_one_connection(errno) => {}
            Err(errno) => polls.error = Some(errno),
        }
        if polls.is_accepting && polls.accepted.len() == AHEAD_MAX {
            self.requests.borrow_mut().push(Request::Cancel(user_data(KIND_ACCEPT, key)));
        }
        let acceptor = listener.acceptor.take();
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
        // What is armed next will be another; the end of this wakes the acceptor.
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

    fn cancel(&self, key: Key, polls: &Polls) {
        let kinds = [(polls.is_in_flight, KIND_LISTENER), (polls.is_accepting, KIND_ACCEPT)];
        let in_flight = kinds.into_iter().filter(|(is_in_flight, _)| *is_in_flight);
        self.requests.borrow_mut().extend(in_flight.map(|(_, kind)| Request::Cancel(user_data(kind, key))));
    }

    /// Whether the kernel may still accept ahead.
    pub fn is_accepting(&self, key: Key) -> bool {
        self.table.borrow_mut().get_mut(key).is_some_and(|listener| listener.registration.is_accepting)
    }

    /// What the kernel has accepted ahead and nobody took.
    pub fn take_accepted(&self, key: Key) -> Vec<Accepted> {
        let mut table = self.table.borrow_mut();
        let Some(listener) = table.get_mut(key) else {
            return Vec::new();
        };
        std::iter::from_fn(|| listener.next_accepted()).collect()
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

    pub fn try_accept(&self, key: Key) -> io::Result<Option<(OwnedFd, SocketAddress)>> {
        let mut listeners = self.table.borrow_mut();
        let listener = listeners.get_mut(key).expect("an open listener owns its slot");
        match listener.next_accepted() {
            None => accept(&listener.socket),
            accepted => Ok(accepted),
        }
    }

    pub fn poll_accept(&self, key: Key, cx: &mut Context<'_>, turn: u32) -> Poll<io::Result<(OwnedFd, SocketAddress)>> {
        let mut listeners = self.table.borrow_mut();
        let listener = listeners.get_mut(key).expect("an open listener owns its slot");
        if !listener.registration.accepted.is_empty()
            && listener.may_take_accepted(turn)
            && let Some(accepted) = listener.next_accepted()
        {
            return Poll::Ready(Ok(accepted));
        }
        if let Some(errno) = listener.registration.error.take() {
            return Poll::Ready(Err(errno.into()));
        }
        if let Some(accepted) = listener.next(turn).transpose() {
            return Poll::Ready(accepted);
        }
        if !listener.registration.is_in_flight
            && !listener.registration.is_accepting
            && !std::mem::replace(&mut listener.registration.is_wanted, true)
        {
            self.requests.borrow_mut().push(Request::Arm(key));
        }
        let displaced = listener.acceptor.park(cx.waker());
        let has_more = listener.has_more() || !listener.registration.accepted.is_empty();
        drop(listeners);
        if has_more {
            cx.waker().wake_by_ref();
        }
        drop(displaced);
        Poll::Pending
    }
}

impl Listening<Polls> {
    /// The next connection that the kernel has accepted ahead.
    fn next_accepted(&mut self) -> Option<Accepted> {
        // Of one that has been reset since, there is no address.
        std::iter::from_fn(|| self.registration.accepted.pop_front())
            .find_map(|socket| End::Peer.address_of(&socket).ok().map(|peer| (socket, peer)))
    }

    fn make_entry(&mut self, key: Key, ring: &mut Ring, has_multishot: bool) {
        let polls = &self.registration;
        let is_armed = polls.is_in_flight || polls.is_accepting;
        if !std::mem::take(&mut self.registration.is_wanted) || is_armed {
            return;
        }
        if self.options.ahead && !self.options.exclusive && has_multishot {
            self.registration.is_accepting = true;
            let accept = opcode::AcceptMulti::new(types::Fd(self.socket.as_raw_fd()));
            let accept = accept.flags(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC);
            // SAFETY: the slot owns a share of the descriptor, and is there when this is submitted right afterwards.
            unsafe { ring.push(&accept.build().user_data(user_data(KIND_ACCEPT, key))) };
            return;
        }
        let exclusive = if self.options.exclusive { libc::EPOLLEXCLUSIVE as u32 } else { 0 };
        let poll = opcode::PollAdd::new(types::Fd(self.socket.as_raw_fd()), libc::POLLIN as u32 | exclusive);
        self.registration.is_in_flight = true;
        // SAFETY: the slot owns a share of the descriptor, and is there when this is submitted right afterwards.
        unsafe { ring.push(&poll.build().user_data(user_data(KIND_LISTENER, key))) };
    }
}

/// The connection of a multishot accept's completion.
pub(super) fn take_accepted(completion: &Completion) -> Result<OwnedFd, Errno> {
    match completion.result {
        // SAFETY: a completed accept gives its new descriptor to whoever takes the completion, and each is taken once.
        descriptor @ 0.. => Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }),
        negative => Err(Errno::from_raw_os_error(-negative)),
    }
}
