//! Sessions over UDP: which datagram is whose.
//!
//! A session is a client's address and port with the address and port that it sends to. It belongs to the loop that
//! opened it. Several loops may hear the same address, and which of them the kernel gives a client's next datagram to
//! changes with their number: what is another loop's goes there (`handover.rs`).
//!
//! Sessions count as connections. Where there is no room for one more, those over UDP that have been silent longest end,
//! and if there are none the datagram is lost: a flood of forged addresses takes no connection from anybody else.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_engine::connections::ConnectionInfo;
use gale_engine::protocol::DatagramReceiver;
use gale_engine::variables::subject::Subject;
use gale_process::{ListenAddress, SocketKind};
use gale_runtime::{Datagram, DatagramOptions, Received, SocketAddress};
use hashbrown::HashMap;

use super::advance;
use super::handover::{Handed, Inbox, Owner, Owners, TIMES_MAX};
use super::listed::Listed;
use super::worker::{StreamWorker, place_of};
use crate::session::datagrams::{DatagramClient, DatagramInlet, with_batch};
use crate::session::{Client, Session};
use crate::upstream::settings::ProxySettings;

/// How many datagrams are taken from a socket before others have their turn.
const ROUNDS_MAX: usize = 8;

/// How often a socket that is being left looks whether its sessions are over.
const LEAVING_LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long receiving pauses when the worker's memory for buffers is exhausted.
const MEMORY_PAUSE: Duration = Duration::from_millis(50);

/// Whose datagram it is: the client and the address that it was sent to.
pub(super) type Key = (SocketAddress, SocketAddress);

/// One socket of this loop.
pub(super) struct Receiver {
    worker: Rc<StreamWorker>,
    socket: Rc<Datagram>,
    address: Rc<ListenAddress>,
    /// The socket's own address.
    bound: SocketAddress,
    /// It hears every address of the machine.
    is_wildcard: bool,
    sessions: RefCell<HashMap<Key, DatagramInlet>>,
    owners: Owners,
    is_stopped: Cell<bool>,
    lost: Cell<u64>,
    itself: Weak<Receiver>,
}

/// A session's place in the table, until it is over.
struct Opened {
    receiver: Weak<Receiver>,
    key: Key,
    inlet: DatagramInlet,
}

impl Drop for Opened {
    fn drop(&mut self) {
        let Some(receiver) = self.receiver.upgrade() else { return };
        let mut sessions = receiver.sessions.borrow_mut();
        // The client may have another one by now.
        if sessions.get(&self.key).is_some_and(|inlet| inlet.is_of(&self.inlet)) {
            sessions.remove(&self.key);
            receiver.owners.release(&self.key);
        }
    }
}

/// What the engine has of it: dropped, the receiver ends with its last session.
struct Handle(Rc<Receiver>);

impl DatagramReceiver for Handle {
    fn stop(&self) {
        self.0.is_stopped.set(true);
    }
}

impl Receiver {
    /// Receives from a socket.
    ///
    /// # Errors
    /// The kernel's.
    pub fn start(
        worker: Rc<StreamWorker>,
        socket: OwnedFd,
        address: &Rc<ListenAddress>,
    ) -> io::Result<Rc<dyn DatagramReceiver>> {
        let options = DatagramOptions { local_address: true, gro: true, ..DatagramOptions::default() };
        let socket = Rc::new(options.adopt(socket)?);
        let bound = socket.local_address()?;
        let is_wildcard = bound.inet().is_some_and(|address| address.ip().is_unspecified());
        let (owners, inbox) = Owners::join(address);
        let receiver = Rc::new_cyclic(|itself| Receiver {
            worker,
            socket,
            address: Rc::clone(address),
            bound,
            is_wildcard,
            sessions: RefCell::default(),
            owners,
            is_stopped: Cell::new(false),
            lost: Cell::new(0),
            itself: itself.clone(),
        });
        gale_runtime::spawn(Rc::clone(&receiver).run(inbox));
        Ok(Rc::new(Handle(receiver)))
    }

    async fn run(self: Rc<Self>, mut inbox: Inbox) {
        let receiver = Rc::downgrade(&self);
        let handed = gale_runtime::spawn(async move {
            while let Some(batch) = inbox.next().await {
                let Some(receiver) = receiver.upgrade() else { return };
                receiver.take_handed(batch);
            }
        });
        // A panic may cost datagrams, and never the socket.
        while gale_runtime::catch_panic(self.receive_all()).await.is_err() {
            gale_runtime::yield_now().await;
        }
        gale_runtime::abort(handed);
    }

    /// Receives until the socket is left and its last session has ended.
    async fn receive_all(&self) {
        loop {
            if self.is_stopped.get() && self.sessions.borrow().is_empty() {
                return;
            }
            let next = poll_fn(|context| self.poll_batches(context));
            let received = if self.is_stopped.get() {
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
                // What an answer has met with: nothing that concerns the socket.
                Ok(Err(error)) => {
                    let error = OsErrorText(&error);
                    self.worker.common.error_log().write(Level::Info, None, &format_args!("recvmsg() failed {error}"));
                    gale_runtime::yield_now().await;
                }
                Err(_) => {}
            }
        }
    }

    /// Takes what has come, some batches of it. Ready when there may be more.
    fn poll_batches(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        for _ in 0..ROUNDS_MAX {
            let polled = with_batch(|batch| {
                let polled = self.socket.poll_recv_batch(context, batch);
                if let Poll::Ready(Ok(_)) = polled {
                    batch.iter().for_each(|(received, bytes)| self.take(received, bytes));
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

    /// Takes one datagram, or several of one sender.
    fn take(&self, received: &Received, bytes: &[u8]) {
        if received.is_truncated {
            return self.lost.set(self.lost.get() + 1);
        }
        let key = (received.source.clone(), self.local(received));
        self.take_for(key, bytes, received.stride, 0);
    }

    /// Our address, as the client has it.
    fn local(&self, received: &Received) -> SocketAddress {
        match (self.bound.inet(), received.local) {
            (Some(mut bound), Some(local)) if self.is_wildcard => {
                bound.set_ip(local);
                SocketAddress::Inet(bound)
            }
            _ => self.bound.clone(),
        }
    }

    /// Takes what a client has sent, which was handed over so often.
    fn take_for(&self, key: Key, bytes: &[u8], stride: usize, times: u8) {
        if let Some(inlet) = self.sessions.borrow().get(&key)
            && !inlet.is_closed()
        {
            if !inlet.take(bytes, stride) {
                self.lost.set(self.lost.get() + 1);
            }
            return;
        }
        match self.owners.claim(&key) {
            Owner::Other(_) if times >= TIMES_MAX => self.lost.set(self.lost.get() + 1),
            Owner::Other(seat) => {
                self.owners.hand_over(seat, Handed { key, bytes: bytes.to_vec(), stride, times: times + 1 });
            }
            Owner::Own if self.is_stopped.get() || self.worker.is_draining.get() => self.release_unused(&key),
            Owner::Own => {
                if !self.begin(&key, bytes, stride) {
                    self.release_unused(&key);
                }
            }
        }
    }

    /// Gives a client up that has no session here.
    fn release_unused(&self, key: &Key) {
        if !self.sessions.borrow().contains_key(key) {
            self.owners.release(key);
        }
    }

    fn take_handed(&self, batch: Vec<Handed>) {
        for Handed { key, bytes, stride, times } in batch {
            self.take_for(key, &bytes, stride, times);
        }
        self.owners.flush();
        self.tell_lost();
    }

    /// Begins a session of a client of this loop with its first datagram. One that came with it, of several, may begin
    /// the next. False if there is none.
    fn begin(&self, key: &Key, bytes: &[u8], stride: usize) -> bool {
        let configured = self.worker.configuration();
        let stream = configured.stream();
        let local = || Some(key.1.clone());
        let Some(place) = place_of(stream, &self.address, SocketKind::Datagram, local) else { return false };
        if !self.make_room() {
            self.lost.set(self.lost.get() + 1);
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
        inlet.take(first, stride);
        let info = ConnectionInfo::accepted(key.0.clone(), Rc::clone(&self.address));
        let generation = stream.generation;
        let listed = Listed::new(&self.worker.table, generation, Rc::clone(&self.address), Some(inlet.clone()));
        let common = Rc::clone(&self.worker.common);
        let mut session = Box::new(Session::new(configured, common, place, info, Client::Datagrams(client)));
        session.log_connected();
        self.sessions.borrow_mut().insert(key.clone(), inlet.clone());
        session.hold(Opened { receiver: self.itself.clone(), key: key.clone(), inlet });
        listed.set_task(gale_runtime::spawn(advance::run(session, Rc::clone(&listed))));
        if !rest.is_empty() {
            self.take_for(key.clone(), rest, stride, 0);
        }
        true
    }

    /// Whether one more session may begin: those over UDP that have been silent longest end for it.
    fn make_room(&self) -> bool {
        let connections = &self.worker.common.connections;
        // A client and its server.
        let has_room = || connections.open() + 2 <= connections.max();
        if !has_room() {
            self.worker.common.complain_of_connections();
            self.worker.close_silent();
        }
        has_room()
    }

    /// Says how many datagrams were lost, at most once a second.
    fn tell_lost(&self) {
        let lost = self.lost.get() + self.owners.take_dropped();
        if lost == 0 {
            return;
        }
        self.lost.set(lost);
        let address = &self.address;
        if self.worker.common.complain(&format_args!("{lost} datagrams to {address} were lost, there was no room")) {
            self.lost.set(0);
        }
    }
}
