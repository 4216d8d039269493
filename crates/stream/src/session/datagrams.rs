//! The client's end of a session over UDP.
//!
//! ```text
//!   socket ──► listener's task ──► DatagramClient ──► server's socket     at once, once that is there
//!                                        │ waiting ──► session's task     before, or where there is a rate
//!   socket ◄───────────────────────────── session's task ◄── server's socket
//! ```
//!
//! What a client sends goes on to the server without waking the session's task, as long as nothing holds it back.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use gale_runtime::{Bytes, Datagram, Moment, ReceiveBatch, SocketAddress, Transmit};

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
    waiting: RefCell<VecDeque<Arrived>>,
    waiting_bytes: Cell<usize>,
    outlet: RefCell<Option<Rc<Datagram>>>,
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

/// One datagram, or several of the same length one behind the other.
#[derive(Debug)]
pub struct Arrived {
    /// The bytes.
    pub bytes: Bytes,
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
        DatagramClient(Rc::new(Shared {
            socket,
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
    pub fn forward_to(&self, outlet: Rc<Datagram>) {
        self.0.outlet.replace(Some(outlet));
    }

    /// Whether datagrams wait.
    pub fn has_waiting(&self) -> bool {
        !self.0.waiting.borrow().is_empty()
    }

    /// The next datagram that waits.
    pub fn take(&self) -> Option<Arrived> {
        let arrived = self.0.waiting.borrow_mut().pop_front()?;
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

    /// Sends datagrams to the client, of which each has `stride` bytes but the last one.
    ///
    /// # Errors
    /// The kernel's. What cannot leave is lost.
    pub fn send(&self, bytes: &[u8], stride: usize) -> io::Result<()> {
        let Shared { socket, remote, local, says_source, .. } = &*self.0;
        let source = local.inet().filter(|_| *says_source).map(|address| address.ip());
        send_segments(socket, Transmit { source, ..Transmit::to(remote, bytes) }, stride)
    }
}

impl Drop for DatagramClient {
    fn drop(&mut self) {
        self.0.is_closed.set(true);
    }
}

/// Sends datagrams one behind the other: as segments that the kernel divides, or each by itself where it cannot.
///
/// # Errors
/// The kernel's, of the first one that could not leave.
pub fn send_segments(socket: &Datagram, transmit: Transmit<'_>, stride: usize) -> io::Result<()> {
    if transmit.contents.len() <= stride {
        return socket.try_send_batch(&[transmit]).map(drop);
    }
    let segment_bytes = u16::try_from(stride).ok();
    if segment_bytes.is_some() {
        match socket.try_send_batch(&[Transmit { segment_bytes, ..transmit }]) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EIO | libc::EINVAL | libc::EMSGSIZE)) => {}
            sent => return sent.map(drop),
        }
    }
    for contents in transmit.contents.chunks(stride) {
        socket.try_send_batch(&[Transmit { contents, ..transmit }])?;
    }
    Ok(())
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

    /// What the client has sent: goes on to the server, or waits. False if it is lost, for lack of room or memory.
    pub fn take(&self, bytes: &[u8], stride: usize) -> bool {
        let shared = &*self.0;
        let stride = stride.max(1);
        shared.datagrams.set(shared.datagrams.get() + Arrived::count_of(bytes.len(), stride));
        shared.bytes.set(shared.bytes.get() + bytes.len() as u64);
        shared.last.set(gale_runtime::now());
        shared.close_if_full();
        if let Some(outlet) = &*shared.outlet.borrow() {
            match send_segments(outlet, Transmit::to_peer(bytes), stride) {
                Ok(()) => shared.forwarded.set(shared.forwarded.get() + bytes.len() as u64),
                Err(error) if is_lost(&error) => return false,
                Err(error) => {
                    shared.failure.set(Some(error));
                    shared.wake();
                }
            }
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
        waiting.push_back(Arrived { bytes: Bytes::copy_from_slice(bytes), stride });
        drop(waiting);
        shared.waiting_bytes.set(waiting_bytes);
        shared.wake();
        true
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
