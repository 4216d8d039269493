//! The client's end of a session over UDP.
//!
//! ```text
//!   socket ──► listener's task ──► DatagramClient ──► server's socket     at once, once that is there
//!                                        │ waiting ──► session's task     before, or where there is a rate
//!   socket ◄───────────────────────────── session's task ◄── server's socket
//! ```
//!
//! What a client sends goes on to the server without waking the session's task, as long as nothing holds it back. What
//! arrived together leaves together, at the end of the batch ([`Forwarding`]).

use std::cell::{Cell, RefCell};
use std::io;
use std::iter;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use gale_runtime::{Datagram, Moment, ReceiveBatch, SocketAddress, Transmit};
use smallvec::SmallVec;

/// How many datagrams of a client wait for its server at most, and how many bytes. What comes beyond that is lost, as
/// it would be in a socket's buffer.
const WAITING_MAX: usize = 64;
const WAITING_BYTES_MAX: usize = 256 * 1024;

/// How many bytes wait on a loop, those of all clients together: a flood of forged clients must not have 256 KiB each.
const WAITING_BYTES_OF_LOOP_MAX: usize = 16 * 1024 * 1024;

thread_local! {
    static WAITING_BYTES: Cell<usize> = const { Cell::new(0) };
}

/// How many datagrams are received at once: as many as have room in the largest lease, since each may be many that the
/// kernel has joined.
const BATCH_COUNT: usize = 16;

/// The memory for one datagram. No datagram of UDP is longer; those between Unix sockets may be, and are lost.
pub const PLACE_BYTES: usize = 64 * 1024;

/// See the file's head.
pub struct DatagramClient(Rc<Shared>);

/// What the listener's task knows a session by.
#[derive(Clone)]
pub struct DatagramInlet(Rc<Shared>);

struct Shared {
    /// The socket that the client sends to.
    socket: Rc<Datagram>,
    remote: SocketAddress,
    /// Our address, as the client has it.
    local: SocketAddress,
    /// The socket hears several addresses: answers have to say which one they come from.
    says_source: bool,
    /// The first one needs no memory of its own; most sessions have no second.
    waiting: RefCell<SmallVec<[Arrived; 1]>>,
    waiting_bytes: Cell<usize>,
    outlet: RefCell<Option<Rc<Outlet>>>,
    /// The kernel divides on the way to the client.
    divides: Cell<bool>,
    /// Why the server could not be sent to.
    failure: Cell<Option<io::Error>>,
    waker: Cell<Option<Waker>>,
    /// How many datagrams have come, and how many bytes.
    datagrams: Cell<u64>,
    bytes: Cell<u64>,
    /// How many bytes have gone to the server without the session's task.
    forwarded: Cell<u64>,
    /// When something came last.
    last: Cell<Moment>,
    /// Takes no more: what comes begins another session.
    is_closed: Cell<bool>,
    /// So many datagrams are the session's; 0 for all.
    datagrams_max: Cell<u64>,
}

/// A session's socket to its server.
pub struct Outlet {
    socket: Datagram,
    /// The kernel divides on the way to the server.
    divides: Cell<bool>,
}

/// One datagram, or several of the same length one behind the other.
#[derive(Debug)]
pub struct Arrived {
    /// The bytes.
    pub bytes: Box<[u8]>,
    /// How long each is but the last one, which may be shorter.
    pub stride: usize,
}

impl Arrived {
    /// How many datagrams so many bytes are, of which each but the last one has `stride`.
    pub fn count_of(length: usize, stride: usize) -> u64 {
        if length <= stride { 1 } else { length.div_ceil(stride) as u64 }
    }
}

/// Calls `receive` with the loop's memory for datagrams, which is taken only while there are some. They are to be done
/// with when it returns.
pub fn with_batch<T>(receive: impl FnOnce(&mut ReceiveBatch) -> T) -> T {
    thread_local! {
        static BATCH: RefCell<ReceiveBatch> = RefCell::new(ReceiveBatch::new(BATCH_COUNT, PLACE_BYTES));
    }
    BATCH.with_borrow_mut(receive)
}

impl DatagramClient {
    /// A client that sends from `remote` to `local`.
    pub fn new(socket: Rc<Datagram>, remote: SocketAddress, local: SocketAddress, says_source: bool) -> DatagramClient {
        let divides = Cell::new(remote.inet().is_some());
        DatagramClient(Rc::new(Shared {
            socket,
            divides,
            remote,
            local,
            says_source,
            waiting: RefCell::default(),
            waiting_bytes: Cell::new(0),
            outlet: RefCell::default(),
            failure: Cell::new(None),
            waker: Cell::new(None),
            datagrams: Cell::new(0),
            bytes: Cell::new(0),
            forwarded: Cell::new(0),
            last: Cell::new(gale_runtime::now()),
            is_closed: Cell::new(false),
            datagrams_max: Cell::new(0),
        }))
    }

    /// Where what the client sends comes in.
    pub fn inlet(&self) -> DatagramInlet {
        DatagramInlet(Rc::clone(&self.0))
    }

    /// Our address, as the client has it.
    pub fn local_address(&self) -> SocketAddress {
        self.0.local.clone()
    }

    /// How many datagrams have come.
    pub fn datagrams(&self) -> u64 {
        self.0.datagrams.get()
    }

    /// How many bytes have come.
    pub fn bytes(&self) -> u64 {
        self.0.bytes.get()
    }

    /// How many bytes have gone to the server without the session's task.
    pub fn forwarded(&self) -> u64 {
        self.0.forwarded.get()
    }

    /// When something came last.
    pub fn last(&self) -> Moment {
        self.0.last.get()
    }

    /// The session has so many datagrams: what comes after them begins another one.
    pub fn limit(&self, datagrams_max: u64) {
        self.0.datagrams_max.set(datagrams_max);
        self.0.close_if_full();
    }

    /// From now on what comes goes to this socket at once.
    pub fn forward_to(&self, outlet: Rc<Outlet>) {
        self.0.outlet.replace(Some(outlet));
    }

    /// Whether datagrams wait.
    pub fn has_waiting(&self) -> bool {
        !self.0.waiting.borrow().is_empty()
    }

    /// The next datagram that waits.
    pub fn take(&self) -> Option<Arrived> {
        let arrived = {
            let mut waiting = self.0.waiting.borrow_mut();
            if waiting.is_empty() {
                return None;
            }
            waiting.remove(0)
        };
        let length = arrived.bytes.len();
        self.0.waiting_bytes.set(self.0.waiting_bytes.get() - length);
        WAITING_BYTES.set(WAITING_BYTES.get() - length);
        Some(arrived)
    }

    /// Ready when a datagram waits, or the server could not be sent to.
    pub fn poll_arrived(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(error) = self.0.failure.take() {
            return Poll::Ready(Err(error));
        }
        if !self.0.waiting.borrow().is_empty() {
            return Poll::Ready(Ok(()));
        }
        self.0.waker.set(Some(context.waker().clone()));
        Poll::Pending
    }

    /// Sends a datagram to the client.
    ///
    /// # Errors
    /// The kernel's. What cannot leave is lost.
    pub fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let mut result = Ok(());
        self.send_all(iter::once((bytes, usize::MAX)), |_, sent| result = sent);
        result
    }

    /// Sends datagrams to the client, each with the stride of those that it is, and tells what became of them. What
    /// cannot leave is lost.
    pub fn send_all<'b>(
        &self,
        datagrams: impl Iterator<Item = (&'b [u8], usize)>,
        tell: impl FnMut(&Transmit<'_>, io::Result<()>),
    ) {
        let Shared { socket, remote, local, says_source, divides, .. } = &*self.0;
        let source = local.inet().filter(|_| *says_source).map(|address| address.ip());
        let transmit = |(bytes, stride)| Transmit { source, ..segments(Transmit::to(remote, bytes), stride) };
        send_all(socket, divides, datagrams.map(transmit).collect(), tell);
    }
}

impl Drop for DatagramClient {
    fn drop(&mut self) {
        self.0.is_closed.set(true);
    }
}

impl Outlet {
    /// A socket that is connected to this server.
    pub fn new(socket: Datagram, server: &SocketAddress) -> Outlet {
        Outlet { socket, divides: Cell::new(server.inet().is_some()) }
    }

    /// What the server sends comes here.
    pub fn socket(&self) -> &Datagram {
        &self.socket
    }

    /// Sends datagrams to the server, of which each has `stride` bytes but the last one.
    ///
    /// # Errors
    /// The kernel's.
    pub fn send(&self, bytes: &[u8], stride: usize) -> io::Result<()> {
        let mut result = Ok(());
        self.send_all(iter::once((bytes, stride)), |_, sent| result = sent);
        result
    }

    /// Sends datagrams to the server, and tells what became of each.
    fn send_all<'b>(
        &self,
        datagrams: impl Iterator<Item = (&'b [u8], usize)>,
        tell: impl FnMut(&Transmit<'_>, io::Result<()>),
    ) {
        let transmits = datagrams.map(|(bytes, stride)| segments(Transmit::to_peer(bytes), stride)).collect();
        send_all(&self.socket, &self.divides, transmits, tell);
    }
}

/// What leaves in few calls. Mostly it is one.
type Transmits<'b> = SmallVec<[Transmit<'b>; 2]>;

/// The contents are datagrams of `stride` bytes, the last one perhaps shorter.
fn segments(transmit: Transmit<'_>, stride: usize) -> Transmit<'_> {
    let is_one = transmit.contents.len() <= stride;
    Transmit { segment_bytes: u16::try_from(stride).ok().filter(|_| !is_one), ..transmit }
}

/// How many datagrams it is.
pub fn count_of(transmit: &Transmit<'_>) -> u64 {
    Arrived::count_of(transmit.contents.len(), transmit.segment_bytes.map_or(usize::MAX, usize::from))
}

/// Sends these in order, in few calls, and tells what became of each.
///
/// Neighbours of one length go to the kernel in one piece, until it refuses to divide one: a device may be unable to,
/// or the length too much for the way. From then on `divides` is false, and each leaves by itself.
fn send_all(
    socket: &Datagram,
    divides: &Cell<bool>,
    mut transmits: Transmits<'_>,
    mut tell: impl FnMut(&Transmit<'_>, io::Result<()>),
) {
    let mut next = 0;
    while next < transmits.len() {
        let rest = &mut transmits[next..];
        rest.iter_mut().for_each(|transmit| transmit.may_join = divides.get());
        let has_several = rest.len() > 1 || rest[0].segment_bytes.is_some();
        let sent = if divides.get() { socket.try_send_batch(rest) } else { send_divided(socket, rest) };
        match sent {
            Ok(count) => {
                rest[..count].iter().for_each(|transmit| tell(transmit, Ok(())));
                next += count;
            }
            Err(error) if divides.get() && has_several && is_refusal(&error) => divides.set(false),
            Err(error) => {
                tell(&rest[0], Err(error));
                next += 1;
            }
        }
    }
}

/// Sends the first of these, and divides it if it is several; returns how many have left.
fn send_divided(socket: &Datagram, transmits: &[Transmit<'_>]) -> io::Result<usize> {
    let single = transmits.iter().take_while(|transmit| transmit.segment_bytes.is_none()).count();
    if single > 0 {
        return socket.try_send_batch(&transmits[..single]);
    }
    let transmit = transmits[0];
    let stride = transmit.segment_bytes.map_or(usize::MAX, usize::from);
    for contents in transmit.contents.chunks(stride) {
        socket.try_send_batch(&[Transmit { contents, segment_bytes: None, ..transmit }])?;
    }
    Ok(1)
}

/// Whether the kernel cannot divide what it was given.
fn is_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EIO | libc::EINVAL | libc::EMSGSIZE))
}

/// What goes to servers at the end of a batch, in the order in which it has come.
#[derive(Default)]
pub struct Forwarding<'b> {
    entries: Vec<(DatagramInlet, &'b [u8], usize)>,
}

impl Forwarding<'_> {
    /// Sends it; returns how many were lost, for lack of room or memory.
    pub fn flush(&mut self) -> u64 {
        let session = |inlet: &DatagramInlet| Rc::as_ptr(&inlet.0);
        // Equal ones keep their order.
        self.entries.sort_by_key(|(inlet, ..)| session(inlet));
        let of_session = self.entries.chunk_by(|(one, ..), (other, ..)| one.is_of(other));
        let lost = of_session.map(|entries| {
            let datagrams = entries.iter().map(|&(_, bytes, stride)| (bytes, stride));
            entries[0].0.forward(datagrams)
        });
        let lost = lost.sum();
        self.entries.clear();
        lost
    }
}

impl DatagramInlet {
    /// Whether both are of one session.
    pub fn is_of(&self, other: &DatagramInlet) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// Whether the session takes no more.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed.get()
    }

    /// When something came last.
    pub fn last(&self) -> Moment {
        self.0.last.get()
    }

    /// What the client has sent: goes on to the server at the end of the batch, or waits. False if it is lost, for lack
    /// of room.
    pub fn take<'b>(&self, bytes: &'b [u8], stride: usize, forwarding: &mut Forwarding<'b>) -> bool {
        let shared = &*self.0;
        let stride = stride.max(1);
        shared.datagrams.set(shared.datagrams.get() + Arrived::count_of(bytes.len(), stride));
        shared.bytes.set(shared.bytes.get() + bytes.len() as u64);
        shared.last.set(gale_runtime::now());
        shared.close_if_full();
        if shared.outlet.borrow().is_some() {
            forwarding.entries.push((self.clone(), bytes, stride));
            return true;
        }
        let mut waiting = shared.waiting.borrow_mut();
        let waiting_bytes = shared.waiting_bytes.get() + bytes.len();
        let of_loop = WAITING_BYTES.get() + bytes.len();
        let is_full = waiting.len() >= WAITING_MAX || waiting_bytes > WAITING_BYTES_MAX;
        if is_full || of_loop > WAITING_BYTES_OF_LOOP_MAX {
            return false;
        }
        WAITING_BYTES.set(of_loop);
        waiting.push(Arrived { bytes: bytes.into(), stride });
        drop(waiting);
        shared.waiting_bytes.set(waiting_bytes);
        shared.wake();
        true
    }

    /// Sends on to the server; returns how many were lost.
    fn forward<'b>(&self, datagrams: impl Iterator<Item = (&'b [u8], usize)>) -> u64 {
        let shared = &*self.0;
        let Some(outlet) = shared.outlet.borrow().clone() else { return 0 };
        let mut lost = 0;
        outlet.send_all(datagrams, |transmit, sent| match sent {
            Ok(()) => shared.forwarded.set(shared.forwarded.get() + transmit.contents.len() as u64),
            Err(error) if is_lost(&error) => lost += count_of(transmit),
            Err(error) => {
                shared.failure.set(Some(error));
                shared.wake();
            }
        });
        lost
    }
}

impl Shared {
    fn wake(&self) {
        self.waker.take().into_iter().for_each(Waker::wake);
    }

    fn close_if_full(&self) {
        let max = self.datagrams_max.get();
        if max > 0 && self.datagrams.get() >= max {
            self.is_closed.set(true);
            // It may be over with that: all answers have come, or none are expected.
            self.wake();
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // At the end of the thread the count may be gone before a session.
        let _ = WAITING_BYTES.try_with(|all| all.set(all.get() - self.waiting_bytes.get()));
    }
}

/// Whether a datagram that could not be sent is lost as it would be in a network: there is no room for it, or it is too
/// long. That says nothing about whom it was for.
pub fn is_lost(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::OutOfMemory)
        || matches!(error.raw_os_error(), Some(libc::EMSGSIZE | libc::ENOBUFS | libc::ENOMEM))
}
