//! The client's end of a session over UDP.
//!
//! ```text
//!   socket ──► listener's task ──► DatagramClient ──► server's socket     directly, once it is open
//!                                        │ queue ──► session's task       before that, or with a rate limit
//!   socket ◄───────────────────────────── session's task ◄── server's socket
//! ```
//!
//! The listener's task forwards the client's datagrams to the server without waking the session's task, unless a rate
//! limit applies. Datagrams that arrived in one batch are sent together at its end ([`Forwarding`]). The session's
//! task, which decides when the session ends, is in `upstream/datagrams.rs`.

use std::cell::{Cell, RefCell};
use std::io;
use std::iter;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use gale_runtime::{Datagram, Moment, ReceiveBatch, SocketAddress, Transmit};
use smallvec::SmallVec;

/// Maximum number of entries queued for the server of one client, and of their bytes. Further datagrams are lost, as in
/// a full socket buffer.
const WAITING_MAX: usize = 64;
const WAITING_BYTES_MAX: usize = 256 * 1024;

/// Maximum number of bytes queued by all clients of a loop. Without this limit a flood of forged clients could queue
/// 256 KiB each.
const WAITING_BYTES_OF_LOOP_MAX: usize = 16 * 1024 * 1024;

thread_local! {
    static WAITING_BYTES: Cell<usize> = const { Cell::new(0) };
}

/// Number of receive buffers: as many as fit into the largest lease. Each may hold many datagrams that the kernel has
/// joined.
const BATCH_COUNT: usize = 16;

/// Size of the buffer for one datagram. UDP datagrams are never longer; longer ones of Unix sockets are lost.
pub const PLACE_BYTES: usize = 64 * 1024;

/// A client as its session's task sees it.
pub struct DatagramClient(Rc<Shared>);

/// A client as the listener's task sees it.
#[derive(Clone)]
pub struct DatagramInlet(Rc<Shared>);

struct Shared {
    /// Socket that the client sends to.
    socket: Rc<Datagram>,
    remote: SocketAddress,
    /// Local address that the client sends to.
    local: SocketAddress,
    /// The socket has several addresses, so answers must name the source.
    says_source: bool,
    /// The first element is stored inline. Most sessions have no second.
    waiting: RefCell<SmallVec<[Arrived; 1]>>,
    waiting_bytes: Cell<usize>,
    outlet: RefCell<Option<Rc<Outlet>>>,
    /// The kernel splits long sends to the client into datagrams.
    divides: Cell<bool>,
    /// Error of sending to the server.
    failure: Cell<Option<io::Error>>,
    waker: Cell<Option<Waker>>,
    /// Datagrams received, and their bytes.
    datagrams: Cell<u64>,
    bytes: Cell<u64>,
    /// Bytes that the listener's task has sent to the server.
    forwarded: Cell<u64>,
    /// Time of the last datagram from the client.
    last: Cell<Moment>,
    /// The session accepts no more datagrams. The next one opens another session.
    is_closed: Cell<bool>,
    /// Datagrams that belong to the session; 0 for no limit.
    datagrams_max: Cell<u64>,
}

/// A session's socket to its server.
pub struct Outlet {
    socket: Datagram,
    /// The kernel splits long sends to the server into datagrams.
    divides: Cell<bool>,
}

/// One datagram, or several of equal length in a row.
#[derive(Debug)]
pub struct Arrived {
    /// Contents of all datagrams.
    pub bytes: Box<[u8]>,
    /// Length of each datagram but the last, which may be shorter.
    pub stride: usize,
}

impl Arrived {
    /// Returns the number of datagrams in `length` bytes, if each but the last has `stride` bytes.
    pub fn count_of(length: usize, stride: usize) -> u64 {
        if length <= stride { 1 } else { length.div_ceil(stride) as u64 }
    }
}

/// Calls `receive` with the loop's buffers for datagrams. Memory is on lease only while they hold datagrams, so
/// `receive` must clear them.
pub fn with_batch<T>(receive: impl FnOnce(&mut ReceiveBatch) -> T) -> T {
    thread_local! {
        static BATCH: RefCell<ReceiveBatch> = RefCell::new(ReceiveBatch::new(BATCH_COUNT, PLACE_BYTES));
    }
    BATCH.with_borrow_mut(receive)
}

impl DatagramClient {
    /// Returns a client that sends from `remote` to `local`.
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

    /// Returns the listener's handle of this client.
    pub fn inlet(&self) -> DatagramInlet {
        DatagramInlet(Rc::clone(&self.0))
    }

    /// Returns the local address that the client sends to.
    pub fn local_address(&self) -> SocketAddress {
        self.0.local.clone()
    }

    /// Datagrams received.
    pub fn datagrams(&self) -> u64 {
        self.0.datagrams.get()
    }

    /// Bytes received.
    pub fn bytes(&self) -> u64 {
        self.0.bytes.get()
    }

    /// Bytes that the listener's task has sent to the server.
    pub fn forwarded(&self) -> u64 {
        self.0.forwarded.get()
    }

    /// Time of the last datagram from the client.
    pub fn last(&self) -> Moment {
        self.0.last.get()
    }

    /// Limits the number of datagrams in this session. Later ones open another session.
    pub fn limit(&self, datagrams_max: u64) {
        self.0.datagrams_max.set(datagrams_max);
        self.0.close_if_full();
    }

    /// From now on datagrams are forwarded to this socket directly.
    pub fn forward_to(&self, outlet: Rc<Outlet>) {
        self.0.outlet.replace(Some(outlet));
    }

    /// Returns true if datagrams are queued.
    pub fn has_waiting(&self) -> bool {
        !self.0.waiting.borrow().is_empty()
    }

    /// Removes the first datagram from the queue.
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

    /// Ready if a datagram is queued, or if sending to the server has failed.
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

    /// Sends a datagram to the client. If it cannot be sent, it is lost.
    ///
    /// # Errors
    /// The kernel's.
    pub fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let mut result = Ok(());
        self.send_all(iter::once((bytes, usize::MAX)), |_, sent| result = sent);
        result
    }

    /// Sends datagrams to the client, each element with its stride, and reports the result of each. Those that cannot
    /// be sent are lost.
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
    /// Returns an outlet on a socket that is connected to this server.
    pub fn new(socket: Datagram, server: &SocketAddress) -> Outlet {
        Outlet { socket, divides: Cell::new(server.inet().is_some()) }
    }

    /// Returns the socket, which also receives the server's answers.
    pub fn socket(&self) -> &Datagram {
        &self.socket
    }

    /// Sends datagrams to the server. Each but the last has `stride` bytes.
    ///
    /// # Errors
    /// The kernel's.
    pub fn send(&self, bytes: &[u8], stride: usize) -> io::Result<()> {
        let mut result = Ok(());
        self.send_all(iter::once((bytes, stride)), |_, sent| result = sent);
        result
    }

    /// Sends datagrams to the server and reports the result of each.
    fn send_all<'b>(
        &self,
        datagrams: impl Iterator<Item = (&'b [u8], usize)>,
        tell: impl FnMut(&Transmit<'_>, io::Result<()>),
    ) {
        let transmits = datagrams.map(|(bytes, stride)| segments(Transmit::to_peer(bytes), stride)).collect();
        send_all(&self.socket, &self.divides, transmits, tell);
    }
}

/// Datagrams to send with few system calls; mostly there is one.
type Transmits<'b> = SmallVec<[Transmit<'b>; 2]>;

/// Marks the contents as datagrams of `stride` bytes each; the last may be shorter.
fn segments(transmit: Transmit<'_>, stride: usize) -> Transmit<'_> {
    let is_one = transmit.contents.len() <= stride;
    Transmit { segment_bytes: u16::try_from(stride).ok().filter(|_| !is_one), ..transmit }
}

/// Returns the number of datagrams in a transmit.
pub fn count_of(transmit: &Transmit<'_>) -> u64 {
    Arrived::count_of(transmit.contents.len(), transmit.segment_bytes.map_or(usize::MAX, usize::from))
}

/// Sends datagrams in order, with few system calls, and reports the result of each.
///
/// Neighbours of equal length are given to the kernel as one buffer, until it refuses to split one: the device may not
/// support it, or the length may exceed the path's MTU. After that `divides` is false, and each datagram is sent by
/// itself.
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

/// Sends the first of these, split into its datagrams if it has several. Returns how many elements were sent.
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

/// Returns true if the kernel refused to split a buffer.
fn is_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EIO | libc::EINVAL | libc::EMSGSIZE))
}

/// Datagrams to send to servers at the end of a batch, in order of arrival.
#[derive(Default)]
pub struct Forwarding<'b> {
    entries: Vec<(DatagramInlet, &'b [u8], usize)>,
}

impl Forwarding<'_> {
    /// Sends all of them. Returns the number lost for lack of room or memory.
    pub fn flush(&mut self) -> u64 {
        let session = |inlet: &DatagramInlet| Rc::as_ptr(&inlet.0);
        // The sort is stable, so each session's datagrams keep their order.
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
    /// Returns true if both belong to the same session.
    pub fn is_of(&self, other: &DatagramInlet) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// Returns true if the session accepts no more datagrams.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed.get()
    }

    /// Time of the last datagram from the client.
    pub fn last(&self) -> Moment {
        self.0.last.get()
    }

    /// Accepts datagrams from the client: forwards them to the server at the end of the batch, or queues them. Returns
    /// false if they are lost for lack of room.
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

    /// Sends datagrams to the server. Returns the number lost.
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
            // The session may be over now, if all answers have arrived or none are expected.
            self.wake();
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // When the thread exits, the counter may be destroyed before a session.
        let _ = WAITING_BYTES.try_with(|all| all.set(all.get() - self.waiting_bytes.get()));
    }
}

/// Returns true if the datagram that could not be sent counts as lost, as in a network: there was no room for it, or it
/// was too long. The destination may still be reachable.
pub fn is_lost(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::OutOfMemory)
        || matches!(error.raw_os_error(), Some(libc::EMSGSIZE | libc::ENOBUFS | libc::ENOMEM))
}
