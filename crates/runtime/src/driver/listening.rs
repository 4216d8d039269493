//! Listening sockets as all drivers have them: what is accepted in a turn, who waits for it, and passing on what this
//! loop was told of and does not take.
//!
//! How the kernel is asked to tell of connections is the driver's matter (`R`). Whatever it is, an event that nobody
//! waits for must not be told again and again, and on a socket that loops share it is told to the others. A listener
//! that its loop alone accepts from also takes what waits on sockets of the same address whose loops are held up.

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

/// Accept calls that fail for one connection (ECONNABORTED and the like) before the rest waits for the next turn.
const ACCEPT_FAILURES_MAX: u32 = 16;

/// Connections accepted per turn from a socket that no other loop waits for, even if the batch is smaller. Nobody else
/// could take them earlier, and each saves a wait; their first answers come within a few hundred microseconds.
const UNSHARED_BATCH: u32 = 8;

/// Events for which no accept beyond the batch is tried, at most, after such tries have found nothing.
const CAUTION_MAX: u32 = 64;

/// An accepted connection and its peer.
pub(crate) type Accepted = (OwnedFd, SocketAddress);

/// A listening socket in a driver's table.
pub(super) struct Listening<R> {
    pub socket: Arc<OwnedFd>,
    pub options: AcceptOptions,
    /// How the kernel tells of connections.
    pub registration: R,
    /// As far as is known, there is a connection.
    pub readable: bool,
    pub acceptor: Parked,
    accepts: Accepts,
    /// Where it listens, if only this loop accepts from it.
    own_address: Option<SocketAddress>,
    /// Sockets of loops that are held up, until nothing waits there. At most one for each other loop.
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
    /// A connection that the kernel has told of, by `accept` within this turn's bounds. After `None` it has to be
    /// waited for.
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

    /// Accepts in another way from now on. True if whoever waits has to have the socket registered anew.
    pub fn set_options(&mut self, options: AcceptOptions) -> bool {
        let is_other = self.options.exclusive != options.exclusive;
        self.options = options;
        if is_other {
            self.own_address = own_address(&self.socket, options);
            self.others.clear();
        }
        is_other
    }

    /// Whether there is more than this turn may take, of which the kernel will not tell.
    pub fn has_more(&self) -> bool {
        !self.others.is_empty()
    }

    /// Takes what waits on the socket of another loop, if this is the place for it; returns who has to look.
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

    /// Accepts no more until it is polled again. Returns who waited, to be dropped when nothing is borrowed.
    pub fn pause(&mut self) -> Option<Waker> {
        self.readable = false;
        self.others.clear();
        self.acceptor.take()
    }

    /// Notes that the kernel has told of connections, and returns who waits for that. If nobody does, the driver sees
    /// to it that it is not told again. (Who was woken by an earlier event may not have had his turn yet.)
    pub fn handle_event(&mut self) -> Option<Waker> {
        let acceptor = self.acceptor.take();
        self.readable |= acceptor.is_some();
        self.accepts.note_event();
        acceptor
    }

    /// Of what waits the kernel may have told this loop alone, which does not listen any more: the others look.
    pub fn pass_on(&self) {
        if self.options.exclusive && has_connection(&self.socket) {
            look_for_connections();
        }
    }
}

/// How much is accepted in a turn.
#[derive(Default)]
struct Accepts {
    share: Share,
    /// For how many more events the batch will do, and for how many after the next try in vain.
    cautious_events: u32,
    caution: u32,
}

impl Accepts {
    /// Notes that the kernel has told of connections.
    fn note_event(&mut self) {
        self.cautious_events = self.cautious_events.saturating_sub(1);
    }

    fn may_accept_more(&mut self, turn: u32) -> bool {
        self.share.take(turn, UNSHARED_BATCH)
    }

    /// The next connection, within this turn's bounds; `None` if there is none or not in this turn.
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

/// Errors of accept(2) that belong to the connection being accepted and not to the listening socket.
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

/// Has every loop of this process look whether connections wait at sockets that it shares with others, of which the
/// kernel may have told somebody who does not take them.
pub fn look_for_connections() {
    inbox::call_all(|| Environment::with(|environment| environment.driver.rearm_shared_listeners()));
}
