//! The part of listening sockets that all drivers share: the limits of accepting in a turn, the waiting task, and
//! events that this loop does not use.
//!
//! Each driver has its own registration with the kernel (`R`). With any of them, an event without a waiting task must
//! not be reported again and again, and on a socket that loops share it must be passed to the others. A listener from
//! which its loop alone accepts also takes pending connections of sockets at the same address whose loops are stalled.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::task::Waker;

use rustix::io::Errno;
use rustix::net::{self, SocketFlags};

use super::direct::Share;
use crate::environment::Environment;
use crate::executor::parked::Parked;
use crate::inbox;
use crate::socket::SocketAddress;
use crate::socket::{AcceptOptions, own_address};
use crate::stall::watched::has_connection;

/// Accept calls in a row that may fail for one connection (ECONNABORTED and the like); then the rest waits for the next
/// turn.
const ACCEPT_FAILURES_MAX: u32 = 16;

/// Connections accepted per turn from a socket that no other loop waits for, even if the batch is smaller. No other
/// loop could take them earlier, and each one saves a wait; their first responses are ready within a few hundred
/// microseconds.
const UNSHARED_BATCH: u32 = 8;

/// Upper bound of the events for which no accept beyond the batch is tried after such tries have found nothing.
const CAUTION_MAX: u32 = 64;

/// An accepted socket and its peer's address.
pub(crate) type Accepted = (OwnedFd, SocketAddress);

/// A listening socket in a driver's table.
pub(super) struct Listening<R> {
    pub socket: Arc<OwnedFd>,
    pub options: AcceptOptions,
    /// The driver's registration with the kernel.
    pub registration: R,
    /// True if a connection is pending, as far as is known.
    pub readable: bool,
    pub acceptor: Parked,
    accepts: Accepts,
    /// The local address, if only this loop accepts from this socket.
    own_address: Option<SocketAddress>,
    /// Sockets of stalled loops, until nothing is pending there. At most one for each other loop.
    others: Vec<Arc<OwnedFd>>,
}

impl<R: Default> Listening<R> {
    pub fn new(socket: Arc<OwnedFd>, options: AcceptOptions) -> Self {
        Listening {
            own_address: own_address(&socket, options),
            others: Vec::new(),
            socket,
            options,
            registration: R::default(),
            readable: false,
            acceptor: Parked::new(),
            accepts: Accepts::default(),
        }
    }
}

impl<R> Listening<R> {
    /// Accepts the next pending connection with `accept`, within the limits of this turn. After `None` the caller has
    /// to wait.
    pub fn next(
        &mut self,
        turn: u32,
        accept: impl Fn(&OwnedFd) -> io::Result<Option<Accepted>>,
    ) -> io::Result<Option<Accepted>> {
        if self.readable
            && let Some(accepted) = self.accepts.accept(self.options, turn, || accept(&self.socket))?
        {
            return Ok(Some(accepted));
        }
        self.readable = false;
        while let Some(socket) = self.others.last() {
            if !self.accepts.may_accept_more(turn) {
                break;
            }
            match accept(socket) {
                Ok(Some(accepted)) => return Ok(Some(accepted)),
                Ok(None) => drop(self.others.pop()),
                Err(error) => {
                    self.others.clear();
                    return Err(error);
                }
            }
        }
        Ok(None)
    }

    /// Changes the accept options. True if a waiting task needs the socket to be registered anew.
    pub fn set_options(&mut self, options: AcceptOptions) -> bool {
        let is_other = self.options.exclusive != options.exclusive;
        self.options = options;
        if is_other {
            self.own_address = own_address(&self.socket, options);
            self.others.clear();
        }
        is_other
    }

    /// True if there is more than this turn may accept and the kernel will send no event for it.
    pub fn has_more(&self) -> bool {
        !self.others.is_empty()
    }

    /// Adds the socket of another loop to accept from, if it belongs to this address; returns the task to wake.
    pub fn accept_for_another(&mut self, address: &SocketAddress, socket: &Arc<OwnedFd>) -> Option<Waker> {
        if self.own_address.as_ref() != Some(address) || Arc::ptr_eq(&self.socket, socket) {
            return None;
        }
        let acceptor = self.acceptor.take()?;
        if !self.others.iter().any(|known| Arc::ptr_eq(known, socket)) {
            self.others.push(Arc::clone(socket));
        }
        Some(acceptor)
    }

    /// Stops accepting until the next poll. Returns the waiter, which the caller drops when nothing is borrowed.
    pub fn pause(&mut self) -> Option<Waker> {
        self.readable = false;
        self.others.clear();
        self.acceptor.take()
    }

    /// Notes an event of the socket and returns the waiting task. Without one the driver must prevent that the event is
    /// reported again. (A task that was woken by an earlier event may not have run yet.)
    pub fn handle_event(&mut self) -> Option<Waker> {
        let acceptor = self.acceptor.take();
        self.readable |= acceptor.is_some();
        self.accepts.note_event();
        acceptor
    }

    /// Makes the other loops look for pending connections: the kernel may have reported them only to this loop, which
    /// has stopped listening.
    pub fn pass_on(&self) {
        if self.options.exclusive && has_connection(&self.socket) {
            look_for_connections();
        }
    }
}

/// Accepts of the current turn, and when more than the batch is tried.
#[derive(Default)]
struct Accepts {
    share: Share,
    /// Number of further events for which the batch suffices, and the number to use after the next try in vain.
    cautious_events: u32,
    caution: u32,
}

impl Accepts {
    fn note_event(&mut self) {
        self.cautious_events = self.cautious_events.saturating_sub(1);
    }

    fn may_accept_more(&mut self, turn: u32) -> bool {
        self.share.take(turn, UNSHARED_BATCH)
    }

    /// The next connection, within the limits of this turn; `None` if there is none or the limit is reached.
    fn accept(
        &mut self,
        options: AcceptOptions,
        turn: u32,
        accept: impl FnOnce() -> io::Result<Option<Accepted>>,
    ) -> io::Result<Option<Accepted>> {
        let batch = options.batch.max(1);
        let may_exceed = !options.exclusive && self.cautious_events == 0;
        let batch_max = if may_exceed { batch.max(UNSHARED_BATCH) } else { batch };
        if !self.share.take(turn, batch_max) {
            return Ok(None);
        }
        let accepted = accept()?;
        if self.share.used() > batch {
            self.caution = if accepted.is_some() { 0 } else { (2 * self.caution).clamp(1, CAUTION_MAX) };
            self.cautious_events = self.caution;
        }
        Ok(accepted)
    }
}

/// The next connection; `None` if there is none, or after a row of connections that failed before they were accepted.
pub(super) fn accept(socket: &OwnedFd) -> io::Result<Option<Accepted>> {
    for _ in 0..ACCEPT_FAILURES_MAX {
        match net::acceptfrom_with(socket, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
            Ok((socket, peer)) => return Ok(Some((socket, SocketAddress::from_kernel(peer)?))),
            Err(Errno::AGAIN) => return Ok(None),
            Err(errno) if concerns_one_connection(errno) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(None)
}

/// Errors of accept(2) that concern the connection and not the listening socket.
fn concerns_one_connection(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::INTR
            | Errno::CONNABORTED
            | Errno::PROTO
            | Errno::PERM
            | Errno::NETDOWN
            | Errno::NOPROTOOPT
            | Errno::HOSTDOWN
            | Errno::NONET
            | Errno::HOSTUNREACH
            | Errno::OPNOTSUPP
            | Errno::NETUNREACH
    )
}

/// Makes every loop of this process look for pending connections on shared sockets: the kernel may have reported them
/// to a loop that does not accept them.
pub fn look_for_connections() {
    inbox::call_all(|| Environment::with(|environment| environment.driver.rearm_shared_listeners()));
}
