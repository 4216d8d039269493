//! Receives datagrams and finds the session of each.
//!
//! A session is identified by the client's address and port together with the local address and port. It belongs to the
//! loop that opened it. Several loops may receive from the same address, and the kernel's choice among them changes
//! with their number, so a loop hands the datagrams of another loop's sessions over to it (`handover.rs`).
//!
//! Sessions count as connections. If the limit is reached, the UDP sessions that have been idle longest end. If there
//! are none, the datagram is dropped. A flood of forged addresses therefore closes no TCP connection.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_engine::connections::ConnectionInfo;
use gale_engine::protocol::DatagramReceiver;
use gale_engine::variables::subject::Subject;
use gale_process::{ListenAddress, SocketKind};
use gale_runtime::{Datagram, DatagramOptions, Received, SocketAddress};
use gale_worker::CountedConnection;
use hashbrown::HashMap;

use super::advance;
use super::handover::{Handed, Inbox, Owner, Owners, TIMES_MAX};
use super::listed::Listed;
use super::worker::{StreamWorker, place_of};
use crate::session::datagrams::{Arrived, DatagramClient, DatagramInlet, Forwarding, PLACE_BYTES, with_batch};
use crate::session::loss::Loss;
use crate::session::{Client, Session};
use crate::upstream::settings::ProxySettings;

/// Maximum number of batches received from a socket before other tasks run.
const ROUNDS_MAX: usize = 8;

/// Interval at which a draining socket checks if its sessions have ended.
const LEAVING_LOOK_EVERY: Duration = Duration::from_secs(1);

/// Pause of receiving after the worker's buffer memory was exhausted.
const MEMORY_PAUSE: Duration = Duration::from_millis(50);

/// Pause of receiving after a socket error.
const ERROR_PAUSE: Duration = Duration::from_millis(50);

/// Minimum interval between messages about lost datagrams.
const TELL_PAUSE: Duration = Duration::from_secs(1);

/// Identity of a session: the client's address and the local address.
pub(super) type Key = (SocketAddress, SocketAddress);

pub(super) struct Receiver {
    worker: Rc<StreamWorker>,
    socket: Rc<Datagram>,
    address: Rc<ListenAddress>,
    bound: SocketAddress,
    /// The socket is bound to the wildcard address.
    is_wildcard: bool,
    sessions: RefCell<HashMap<Key, DatagramInlet>>,
    owners: Owners,
    /// No new sessions are opened.
    is_leaving: Cell<bool>,
    /// Receiving is left to other loops that have the same address.
    is_left: Cell<bool>,
    /// `stop` was called, and the receiving task has not seen it yet.
    has_news: Cell<bool>,
    /// Waker of the receiving task.
    waker: Cell<Option<Waker>>,
    lost: Cell<u64>,
    /// Datagrams lost because they were longer than their buffer.
    truncated: Cell<u64>,
    /// A task that reports lost datagrams is running.
    is_telling: Cell<bool>,
    itself: Weak<Receiver>,
}

/// Entry of a session in the table. Dropping it removes the entry.
struct Opened {
    receiver: Weak<Receiver>,
    key: Key,
    inlet: DatagramInlet,
    /// Connection slot of the session's server. It is reserved now, so that no other connection takes it before the
    /// session's task needs it.
    _server: CountedConnection,
}

impl Drop for Opened {
    fn drop(&mut self) {
        let Some(receiver) = self.receiver.upgrade() else { return };
        let mut sessions = receiver.sessions.borrow_mut();
        // The client may have a new session by now.
        if sessions.get(&self.key).is_some_and(|inlet| inlet.is_of(&self.inlet)) {
            sessions.remove(&self.key);
            receiver.owners.release(&self.key);
        }
    }
}

/// The engine's handle. After [`DatagramReceiver::stop`] the receiver ends with its last session.
struct Handle(Rc<Receiver>);

impl DatagramReceiver for Handle {
    fn stop(&self, others_hear_it: bool) {
        self.0.is_leaving.set(true);
        self.0.is_left.set(others_hear_it);
        self.0.owners.leave();
        self.0.has_news.set(true);
        self.0.waker.take().into_iter().for_each(Waker::wake);
    }
}

impl Receiver {
    /// Starts receiving from a socket.
    ///
    /// # Errors
    /// The kernel's.
    pub fn start(
        worker: Rc<StreamWorker>,
        socket: OwnedFd,
        address: &Rc<ListenAddress>,
    ) -> io::Result<Rc<dyn DatagramReceiver>> {
        let bound = SocketAddress::bound_to(&socket)?;
        let is_wildcard = bound.inet().is_some_and(|address| address.ip().is_unspecified());
        let options = DatagramOptions { local_address: is_wildcard, gro: true, ..DatagramOptions::default() };
        let socket = Rc::new(options.adopt(socket)?);
        let (owners, inbox) = Owners::join(address);
        let receiver = Rc::new_cyclic(|itself| Receiver {
            worker,
            socket,
            address: Rc::clone(address),
            bound,
            is_wildcard,
            sessions: RefCell::default(),
            owners,
            is_leaving: Cell::new(false),
            is_left: Cell::new(false),
            has_news: Cell::new(false),
            waker: Cell::new(None),
            lost: Cell::new(0),
            truncated: Cell::new(0),
            is_telling: Cell::new(false),
            itself: itself.clone(),
        });
        gale_runtime::spawn(Rc::clone(&receiver).run(inbox));
        Ok(Rc::new(Handle(receiver)))
    }

    async fn run(self: Rc<Self>, mut inbox: Inbox) {
        let receiver = Rc::downgrade(&self);
        let handed = gale_runtime::spawn(async move {
            let mut take_all = async || {
                while let Some(batch) = inbox.next().await {
                    let Some(receiver) = receiver.upgrade() else { return };
                    receiver.take_handed(batch);
                }
            };
            while gale_runtime::catch_panic(take_all()).await.is_err() {
                gale_runtime::yield_now().await;
            }
        });
        // A panic may lose datagrams, but never the socket.
        while gale_runtime::catch_panic(self.receive_all()).await.is_err() {
            gale_runtime::yield_now().await;
        }
        gale_runtime::abort(handed);
    }

    /// Receives until the socket is left and its last session has ended.
    async fn receive_all(&self) {
        loop {
            if self.is_leaving.get() && self.sessions.borrow().is_empty() {
                return;
            }
            if self.is_left.get() {
                // A datagram received here would be missing at the loops that stay. They hand over those that belong to
                // sessions of this loop.
                gale_runtime::sleep(LEAVING_LOOK_EVERY).await;
                continue;
            }
            let next = poll_fn(|context| self.poll_batches(context));
            let received = if self.is_leaving.get() {
                gale_runtime::timeout(LEAVING_LOOK_EVERY, next).await
            } else {
                Ok(next.await)
            };
            match received {
                Ok(Ok(())) => gale_runtime::yield_now().await,
                Ok(Err(error)) if error.kind() == io::ErrorKind::OutOfMemory => {
                    self.worker.common.complain(&"the memory for buffers is exhausted, datagrams wait");
                    gale_runtime::sleep(MEMORY_PAUSE).await;
                }
                // The error may occur again and again.
                Ok(Err(error)) => {
                    self.worker.common.complain(&format_args!("recvmsg() failed {}", OsErrorText(&error)));
                    gale_runtime::sleep(ERROR_PAUSE).await;
                }
                Err(_) => {}
            }
        }
    }

    /// Receives some batches. Ready if there may be more.
    fn poll_batches(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.has_news.take() {
            return Poll::Ready(Ok(()));
        }
        self.waker.set(Some(context.waker().clone()));
        for _ in 0..ROUNDS_MAX {
            let polled = with_batch(|batch| {
                let polled = self.socket.poll_recv_batch(context, batch);
                if let Poll::Ready(Ok(_)) = polled {
                    let mut forwarding = Forwarding::default();
                    batch.iter().for_each(|(received, bytes)| self.take(received, bytes, &mut forwarding));
                    self.count_lost(forwarding.flush());
                    batch.clear();
                }
                polled
            });
            match polled {
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => {
                    self.owners.flush();
                    self.tell_lost();
                    return Poll::Pending;
                }
            }
        }
        self.owners.flush();
        self.tell_lost();
        Poll::Ready(Ok(()))
    }

    /// Handles one datagram, or several of one sender.
    fn take<'b>(&self, received: &Received, bytes: &'b [u8], forwarding: &mut Forwarding<'b>) {
        if received.is_truncated {
            // A truncated datagram is dropped: a part of it would be a different message.
            Loss::Truncated.note(1);
            return self.truncated.set(self.truncated.get() + 1);
        }
        let key = (received.source.clone(), self.local(received));
        self.take_for(key, bytes, received.stride, 0, forwarding);
    }

    /// Returns the local address that the client sent to.
    fn local(&self, received: &Received) -> SocketAddress {
        match (self.bound.inet(), received.local) {
            (Some(mut bound), Some(local)) if self.is_wildcard => {
                bound.set_ip(local);
                SocketAddress::Inet(bound)
            }
            _ => self.bound.clone(),
        }
    }

    /// Handles the datagrams of a client. `times` counts the handovers so far.
    fn take_for<'b>(&self, key: Key, bytes: &'b [u8], stride: usize, times: u8, forwarding: &mut Forwarding<'b>) {
        if let Some(inlet) = self.sessions.borrow().get(&key)
            && !inlet.is_closed()
        {
            if !inlet.take(bytes, stride, forwarding) {
                self.count_lost(Arrived::count_of(bytes.len(), stride));
            }
            return;
        }
        match self.owners.claim(&key) {
            Owner::Other(_) if times >= TIMES_MAX => {
                let datagrams = Arrived::count_of(bytes.len(), stride);
                Loss::HandedOver.note(datagrams);
                self.lost.set(self.lost.get() + datagrams);
            }
            Owner::Other(owner) => {
                self.owners.hand_over(owner, Handed { key, bytes: bytes.to_vec(), stride, times: times + 1 });
            }
            // No loop opens sessions at this address any more.
            Owner::Nobody => {}
            Owner::Own => {
                if !self.begin(&key, bytes, stride, forwarding) {
                    self.release_unused(&key);
                }
            }
        }
    }

    /// Gives up the claim on a client that has no session here.
    fn release_unused(&self, key: &Key) {
        if !self.sessions.borrow().contains_key(key) {
            self.owners.release(key);
        }
    }

    fn take_handed(&self, batch: Vec<Handed>) {
        let mut forwarding = Forwarding::default();
        for Handed { key, bytes, stride, times } in &batch {
            self.take_for(key.clone(), bytes, *stride, *times, &mut forwarding);
        }
        self.count_lost(forwarding.flush());
        self.owners.flush();
        self.tell_lost();
    }

    /// Opens a session with the client's first datagram. Further datagrams received with it may belong to the next
    /// session. Returns false if no session was opened.
    fn begin<'b>(&self, key: &Key, bytes: &'b [u8], stride: usize, forwarding: &mut Forwarding<'b>) -> bool {
        let configured = self.worker.configuration();
        let stream = configured.stream();
        let local = || Some(key.1.clone());
        let Some(place) = place_of(stream, &self.address, SocketKind::Datagram, local) else { return false };
        if !self.make_room() {
            self.count_lost(Arrived::count_of(bytes.len(), stride));
            return false;
        }
        let server = stream.addresses[place].servers.default;
        let requests = stream.scope_of(server).conf_of::<ProxySettings>().map_or(0, |proxy| *proxy.requests.get());
        let says_source = self.is_wildcard;
        let client = DatagramClient::new(Rc::clone(&self.socket), key.0.clone(), key.1.clone(), says_source);
        client.limit(requests);
        let inlet = client.inlet();
        let (first, rest) = match usize::try_from(requests) {
            Ok(requests @ 1..) => bytes.split_at(bytes.len().min(stride.max(1).saturating_mul(requests))),
            _ => (bytes, &[][..]),
        };
        if !inlet.take(first, stride, forwarding) {
            self.count_lost(Arrived::count_of(first.len(), stride));
        }
        let info = ConnectionInfo::accepted(key.0.clone(), Rc::clone(&self.address));
        let generation = stream.generation;
        let listed = Listed::new(&self.worker.table, generation, Rc::clone(&self.address), Some(inlet.clone()));
        let common = Rc::clone(&self.worker.common);
        let server = CountedConnection::taken(&common);
        let mut session = Box::new(Session::new(configured, common, place, info, Client::Datagrams(client)));
        session.log_connected();
        self.sessions.borrow_mut().insert(key.clone(), inlet.clone());
        session.hold(Opened { receiver: self.itself.clone(), key: key.clone(), inlet, _server: server });
        listed.set_task(gale_runtime::spawn(advance::run(session, Rc::clone(&listed))));
        if !rest.is_empty() {
            self.take_for(key.clone(), rest, stride, 0, forwarding);
        }
        true
    }

    /// Returns true if one more session may begin. May close the UDP sessions that have been idle longest.
    fn make_room(&self) -> bool {
        let connections = &self.worker.common.connections;
        // One connection for the client and one for its server.
        let has_room = || connections.open() + 2 <= connections.max();
        if !has_room() {
            self.worker.common.complain_of_connections();
            self.worker.close_silent();
        }
        has_room()
    }

    fn count_lost(&self, datagrams: u64) {
        Loss::NoRoom.note(datagrams);
        self.lost.set(self.lost.get() + datagrams);
    }

    /// Reports lost datagrams: the first at once, then at most once a second.
    fn tell_lost(&self) {
        let dropped = self.owners.take_dropped();
        Loss::HandedOver.note(dropped);
        self.lost.set(self.lost.get() + dropped);
        let has_news = self.lost.get() > 0 || self.truncated.get() > 0;
        if !has_news || self.is_telling.replace(true) {
            return;
        }
        let receiver = self.itself.clone();
        gale_runtime::spawn(async move {
            while let Some(receiver) = receiver.upgrade() {
                let (lost, truncated, address) = (receiver.lost.take(), receiver.truncated.take(), &receiver.address);
                if lost == 0 && truncated == 0 {
                    receiver.is_telling.set(false);
                    return;
                }
                let warn = |message: fmt::Arguments<'_>| {
                    receiver.worker.common.error_log().write(Level::Warn, None, &message);
                };
                if lost > 0 {
                    warn(format_args!("{lost} datagrams to {address} were lost, there was no room"));
                }
                if truncated > 0 {
                    warn(format_args!(
                        "recvmsg() truncated data: {truncated} datagrams to {address} were lost, longer than \
                         {PLACE_BYTES} bytes"
                    ));
                }
                drop(receiver);
                gale_runtime::sleep(TELL_PAUSE).await;
            }
        });
    }
}
