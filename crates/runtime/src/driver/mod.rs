//! The interface behind which the kernel sits: waiting for events, streams, listeners, datagrams and files.
//!
//! Shaped for completion: the state of an operation lives in a slot that belongs to the socket, never in the caller's
//! future, so a caller that stops polling loses nothing, and a driver that has an operation in flight keeps its memory
//! there. A caller therefore polls an operation again with the same intent until it is ready, or closes the socket.
//! One reader, one writer, and one waiter for the peer's leaving at a time per socket; the last to poll is woken.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};

use crate::executor::slots::Key;
use crate::files::file_read::{FileRead, FileReading};
use crate::memory::buffer::Buffer;
use crate::memory::output::Output;
use crate::socket::AcceptOptions;
pub(crate) use crate::socket::Fresh;
use crate::socket::SocketAddress;
use crate::socket::connect::{ConnectError, ConnectOptions, begin_connect};
use crate::socket::datagram::{DatagramOptions, Received, Room, Transmit};

mod datagrams;
pub(crate) mod direct;
pub(crate) mod epoll;
pub(crate) mod io_uring;
pub(crate) mod listening;
pub(crate) mod shortage;
pub(crate) mod simulated;

/// How an io_uring is set up. The defaults suit every server, by the figures in `docs/decisions/0009-io-uring.md`;
/// other values are for tests and measurements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingOptions {
    /// Operations queued before a call of their own submits them.
    pub submissions: u32,
    /// Completions that the kernel keeps without allocating.
    pub completions: u32,
    /// Buffers for what arrives while nobody reads; a power of two, or 0 for none: then connections wait by polls.
    pub buffers: u16,
    /// The bytes of each buffer. Holds nearly every request head; who wants more at once waits by a poll and receives
    /// into memory of its own.
    pub buffer_bytes: u32,
    /// One receive serves all requests of a connection that is kept alive, instead of one each.
    pub multishot: bool,
    /// A receive that has got nothing for this long, at most twice as long, gives way to a poll, which costs the kernel
    /// less memory. `None` = never.
    pub idle_after: Option<Duration>,
    /// The kernel carries out no other operations in the ring than those of the driver.
    pub is_restricted: bool,
    /// Uses nothing that came with kernels after this one (major, minor). By default everything; in debug builds what
    /// the environment variable `GALE_TEST_KERNEL_MAX` says ("6.0").
    pub kernel_max: Option<(u16, u16)>,
    /// Pretends that the kernel refuses with this error number.
    pub refusal: Option<i32>,
}

/// From this kernel on a call brings about 20 receives (`IO_LOCAL_TW_DEFAULT_MAX`), and their buffers are free again
/// before the next. Before, it brings all that there are.
const KERNEL_WITH_SMALL_BATCHES: (u16, u16) = (6, 13);
const BUFFERS_OF_SMALL_BATCHES: u16 = 128;
/// As many as a turn has completions: 2 MiB of memory. With 500 busy connections and 128 buffers a fifth of all
/// receives on Linux 6.12 would find none.
const BUFFERS_OF_ANY_BATCH: u16 = 512;

/// The kernel's version (major, minor); 0.0 if it has an unusual name.
fn kernel_version() -> (u16, u16) {
    static VERSION: OnceLock<(u16, u16)> = OnceLock::new();
    *VERSION.get_or_init(|| parse_version(&rustix::system::uname().release().to_string_lossy()))
}

fn parse_version(release: &str) -> (u16, u16) {
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

impl Default for RingOptions {
    fn default() -> Self {
        let kernel_max = if cfg!(debug_assertions) { kernel_max_of_tests() } else { None };
        let version = kernel_max.map_or(kernel_version(), |max| max.min(kernel_version()));
        RingOptions {
            submissions: 512,
            completions: 4096,
            // They are free again within the turn, so these serve any number of connections.
            buffers: if version >= KERNEL_WITH_SMALL_BATCHES { BUFFERS_OF_SMALL_BATCHES } else { BUFFERS_OF_ANY_BATCH },
            buffer_bytes: 4096,
            multishot: true,
            idle_after: Some(Duration::from_secs(2)),
            is_restricted: true,
            kernel_max,
            refusal: None,
        }
    }
}

/// Has whole programs, tests and servers, use a ring as on an older kernel.
fn kernel_max_of_tests() -> Option<(u16, u16)> {
    let version = std::env::var("GALE_TEST_KERNEL_MAX").ok()?;
    let (major, minor) = version.split_once('.').expect("major.minor");
    Some((major.parse().expect("a number"), minor.parse().expect("a number")))
}

impl RingOptions {
    /// Whether what came with this kernel may be used. (Whether it can be is for the kernel to say.)
    pub(crate) fn allows(&self, major: u16, minor: u16) -> bool {
        self.kernel_max.is_none_or(|max| (major, minor) <= max)
    }
}

/// What the io_uring of a loop has done since it was set up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RingCounters {
    /// System calls that submit, wait, or both.
    pub calls: u64,
    /// Operations submitted.
    pub operations: u64,
    /// Of these, receives; a multishot one serves any number of requests.
    pub receives: u64,
    /// Receives that found no buffer.
    pub buffers_missed: u64,
    /// Times that completions did not fit their queue and the kernel kept them.
    pub overflows: u64,
    /// Receives of idle connections that gave way to a poll.
    pub idle: u64,
    /// Operations that the kernel had no memory to take: each has failed with ENOMEM for whoever wanted it.
    pub refused: u64,
    /// Completions that the kernel had no memory to keep: everything in flight was cancelled each time, and what ended
    /// without a word has failed with ENOMEM for whoever wanted it.
    pub lost: u64,
    /// Reads of files that were in flight at such a moment, and of whose end nothing was heard yet: a pool has done
    /// them, and their buffers stay.
    pub reads_kept: u64,
}

/// A socket that has left its driver.
pub(crate) struct Released {
    pub socket: OwnedFd,
    /// What comes before the bytes in the kernel.
    pub received: Buffer,
    /// What comes after `received`: the kernel tells an error only once.
    pub error: Option<Errno>,
}

/// Which end of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    Local,
    Peer,
}

impl End {
    /// The address of this end of a connected socket; a system call.
    pub fn address_of(self, socket: BorrowedFd<'_>) -> io::Result<SocketAddress> {
        match self {
            End::Local => SocketAddress::bound_to(socket),
            End::Peer => SocketAddress::from_kernel(rustix::net::getpeername(socket)?),
        }
    }
}

/// What a loop waits with, and everything that tasks do with sockets and files through it.
pub(crate) trait Driver: StreamDriver + ListenerDriver + DatagramDriver + FileDriver {
    /// As `use` in the configuration names it.
    fn name(&self) -> &'static str;

    /// Waits for events until `timeout` (for ever if `None`), wakes who waits for them, and returns how many there
    /// were.
    fn wait(&self, timeout: Option<Duration>) -> io::Result<usize>;

    /// Whether the kernel is known to have more events than the last [`Driver::wait`] has brought. Costs no call.
    fn has_events(&self) -> bool {
        false
    }

    /// When the next event comes, in nanoseconds of the clock: known only where time is virtual and so are the events.
    fn next_event(&self) -> Option<u64> {
        None
    }

    /// What an io_uring has done so far; nothing for other drivers.
    fn ring_counters(&self) -> RingCounters {
        RingCounters::default()
    }
}

/// Connected sockets.
pub(crate) trait StreamDriver {
    /// A socket that is connected or connecting, to be attached.
    fn connect(&self, address: &SocketAddress, options: &ConnectOptions) -> Result<(OwnedFd, Fresh), ConnectError> {
        begin_connect(address, options)
    }

    /// Takes a connected or connecting socket, which must be non-blocking. Costs no system call.
    fn attach(&self, socket: OwnedFd, fresh: Fresh) -> Key;

    /// Gives the socket back, unregistered, with what has been received ahead of the reader, for an owner who goes on.
    /// Errors: when that cannot be told, or a send is under way; then the socket stays, to be closed.
    fn release(&self, key: Key) -> io::Result<Released>;

    /// Closes a socket.
    fn close(&self, key: Key);

    /// Ready when closed sockets have nothing left that this driver, and not the kernel, still has to send for them.
    /// One waits for that at a time.
    fn poll_all_sent(&self, cx: &mut Context<'_>) -> Poll<()> {
        let _ = cx;
        Poll::Ready(())
    }

    /// Ready when a `Fresh::Connecting` socket is connected or has failed.
    fn poll_connected(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Ready when a receive would not wait: there are bytes, the end, or an error. Takes nothing.
    fn poll_readable(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Whether a receive would not wait now.
    fn has_input(&self, key: Key) -> bool {
        // SAFETY: the slot owns the descriptor, and nobody closes it during this call.
        direct::has_input(unsafe { BorrowedFd::borrow_raw(self.descriptor(key)) })
    }

    /// Whether a receive might not wait now, as far as is known without asking the kernel; asks where nothing is known.
    fn may_have_input(&self, key: Key) -> bool {
        self.has_input(key)
    }

    /// Ready when a send would not wait: there is room, or an error.
    fn poll_writable(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Whether the kernel took less than it was offered when it was asked last, and has not announced room since. No
    /// system call.
    fn is_full(&self, key: Key) -> bool;

    /// Receives at most `max` bytes (> 0) at the end of `into`; 0 is the end of the stream.
    fn poll_recv(&self, key: Key, cx: &mut Context<'_>, into: &mut Buffer, max: usize) -> Poll<io::Result<usize>>;

    /// Sends from the front of `out` and removes what was sent; ready with more than 0 unless `out` is empty.
    fn poll_send(&self, key: Key, cx: &mut Context<'_>, out: &mut Output) -> Poll<io::Result<usize>>;

    /// Sends the first of `out` and removes it, or takes it over to be sent, if that takes no waiting, and returns how
    /// many bytes that were. 0 says nothing: what is left goes by `poll_send`. Nothing else may be waiting to be sent.
    /// `is_last` says that the socket is closed right after this: then the end goes with the data, in one packet.
    fn try_send(&self, key: Key, out: &mut Output, is_last: bool) -> io::Result<usize>;

    /// As `try_send`, of a few bytes that nobody owns: they are sent or copied.
    fn try_send_copy(&self, key: Key, bytes: &[u8], is_last: bool) -> io::Result<usize>;

    /// Gives the kernel what `try_send` has taken over, before the socket is changed in a way that matters to it.
    fn flush(&self, key: Key) {
        let _ = key;
    }

    /// Sends at most `length` bytes of `file` from `offset` on, which is moved; 0 is the end of the file.
    fn poll_sendfile(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        file: BorrowedFd<'_>,
        offset: &mut u64,
        length: usize,
    ) -> Poll<io::Result<usize>>;

    /// Moves at most `max` bytes from the socket into a pipe, which is empty; 0 is the end of the stream. Not for a
    /// socket that receives ahead, nor for one that is not the kernel's.
    fn poll_splice_in(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        pipe: BorrowedFd<'_>,
        max: usize,
    ) -> Poll<io::Result<usize>>;

    /// Moves at most `max` bytes, which are there, from a pipe to the socket.
    fn poll_splice_out(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        pipe: BorrowedFd<'_>,
        max: usize,
    ) -> Poll<io::Result<usize>>;

    /// Whether bytes of the socket are, or may come to be, with the driver, ahead of the reader.
    fn receives_ahead(&self, key: Key) -> bool {
        let _ = key;
        false
    }

    /// Ends our data; the peer sees the end of the stream behind all that has been sent.
    fn shutdown_write(&self, key: Key) -> io::Result<()>;

    /// Has closing send a reset and drop what is queued.
    fn set_linger_reset(&self, key: Key) -> io::Result<()>;

    /// Ready when the peer has closed or reset the connection, whether its data has been read or not.
    fn poll_peer_closed(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Whether the connection is reset, or closed in both directions. A peer that has only ended its own data may still
    /// read.
    fn is_broken(&self, key: Key) -> bool;

    /// Whether the peer has ended its direction, or the connection is broken. A system call, unless an event has told.
    fn has_hung_up(&self, key: Key) -> bool;

    /// The socket's descriptor, which is the driver's.
    fn descriptor(&self, key: Key) -> RawFd;

    /// The descriptor, if it is a socket of the kernel's that has options ([`crate::socket::options`]).
    fn kernel_socket(&self, key: Key) -> Option<RawFd> {
        Some(self.descriptor(key))
    }

    /// The address of one end.
    fn address(&self, key: Key, end: End) -> io::Result<SocketAddress> {
        // SAFETY: the slot owns the descriptor, and nobody closes it during this call.
        end.address_of(unsafe { BorrowedFd::borrow_raw(self.descriptor(key)) })
    }
}

/// Listening sockets.
pub(crate) trait ListenerDriver {
    /// A socket that listens, to be attached.
    fn listen(&self, address: &SocketAddress, backlog: i32) -> io::Result<OwnedFd> {
        listen(address, backlog)
    }

    /// The address that a socket listens on.
    fn listener_address(&self, socket: &OwnedFd) -> io::Result<SocketAddress> {
        End::Local.address_of(socket.as_fd())
    }

    /// Takes a listening socket, which other loops may share.
    fn attach_listener(&self, socket: Arc<OwnedFd>, options: AcceptOptions) -> Key;

    /// Forgets a listening socket; it is closed with its last owner.
    fn detach_listener(&self, key: Key);

    /// Accepts in another way from now on.
    fn set_accept_options(&self, key: Key, options: AcceptOptions);

    /// Stops being told of connections until the next `poll_accept`.
    fn pause_listener(&self, key: Key);

    /// Has the kernel tell this loop of what waits on sockets that it shares with others.
    fn rearm_shared_listeners(&self);

    /// Accepts what waits now on a socket of another loop, which is held up, as if it had come to the listener that
    /// this loop alone accepts from at the same address; if there is one, and it is waited for.
    fn accept_for_another(&self, address: &SocketAddress, socket: Arc<OwnedFd>) {
        let _ = (address, socket);
    }

    /// The next connection if there is one now; `None` if not. Waits for nothing and registers nothing.
    fn try_accept(&self, key: Key) -> io::Result<Option<(OwnedFd, SocketAddress)>>;

    fn poll_accept(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<(OwnedFd, SocketAddress)>>;
}

/// Datagram sockets.
pub(crate) trait DatagramDriver {
    /// A socket with these options, bound and connected as they say.
    fn open_datagram(&self, options: &DatagramOptions) -> io::Result<Key>;

    /// Takes a socket that is bound already.
    fn adopt_datagram(&self, socket: OwnedFd, options: &DatagramOptions) -> io::Result<Key>;

    fn close_datagram(&self, key: Key);

    /// Receives what has arrived, at least one datagram, into the buffers of `room`, and appends what is known of each
    /// to `received`.
    fn poll_recv_datagrams(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        room: Room<'_>,
        received: &mut Vec<Received>,
    ) -> Poll<io::Result<()>>;

    /// Sends the first of these, and returns how many. Never waits: when there is no room for the first one, that is an
    /// error.
    fn send_datagrams(&self, key: Key, transmits: &[Transmit<'_>]) -> io::Result<usize>;

    /// Ready when there is room to send.
    fn poll_send_ready(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Has the kernel join what arrives from now on, see [`DatagramOptions::gro`].
    fn set_datagram_gro(&self, key: Key) -> io::Result<()>;

    /// The local address.
    fn datagram_address(&self, key: Key) -> io::Result<SocketAddress>;
}

/// Files, where the driver itself can do something for them.
pub(crate) trait FileDriver {
    /// Begins to read; gives the read back if this driver cannot do that, or has too many.
    fn read_file(&self, read: FileRead) -> Result<FileReading, FileRead> {
        Err(read)
    }
}

fn listen(address: &SocketAddress, backlog: i32) -> io::Result<OwnedFd> {
    let kernel_address = address.to_kernel()?;
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = net::socket_with(kernel_address.address_family(), SocketType::STREAM, flags, None)?;
    if kernel_address.address_family() != AddressFamily::UNIX {
        sockopt::set_socket_reuseaddr(&socket, true)?;
    }
    net::bind(&socket, &kernel_address)?;
    net::listen(&socket, backlog)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_kernels_are_read_whatever_follows_them() {
        assert_eq!(parse_version("6.1.0-50-cloud-amd64"), (6, 1));
        assert_eq!(parse_version("6.13-rc2"), (6, 13));
        assert_eq!(parse_version("5.4+"), (5, 4));
        assert_eq!(parse_version("unknown"), (0, 0));
    }

    #[test]
    fn kernels_that_bring_all_at_once_get_as_many_buffers_as_a_turn_has_completions() {
        let has_small_batches = kernel_version() >= KERNEL_WITH_SMALL_BATCHES && kernel_max_of_tests().is_none();
        assert_eq!(RingOptions::default().buffers, if has_small_batches { 128 } else { 512 });
    }
}
