//! The interface to the kernel: waiting for events, streams, listeners, datagrams and files.
//!
//! The interface is shaped for completions. The state of an operation lives in a slot that belongs to the socket, never
//! in the caller's future: a caller that stops polling loses nothing, and the memory of an operation in flight stays in
//! its slot. A caller therefore polls an operation again with the same intent until it is ready, or closes the socket.
//! A socket has one reader, one writer, and one waiter for the peer's hang-up at a time; the last one that polled is
//! woken.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};

use self::file_read::{FileRead, FileReading};
use crate::executor::slots::Key;
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
pub(crate) mod file_read;
pub(crate) mod io_uring;
pub(crate) mod listening;
pub(crate) mod shortage;
pub(crate) mod simulated;

/// Parameters of an io_uring. The defaults suit every server, by the figures in `docs/decisions/0009-io-uring.md`;
/// other values are for tests and measurements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingOptions {
    /// Entries of the submission queue. When it is full, an extra call submits them.
    pub submissions: u32,
    /// Entries of the completion queue, which the kernel fills without allocating memory.
    pub completions: u32,
    /// Number of provided buffers, for data that arrives while no reader waits. A power of two, or 0 for none: then
    /// connections wait by polls.
    pub buffers: u16,
    /// Bytes of each buffer: enough for nearly every request head. A reader that wants more at once waits by a poll and
    /// receives directly into its own memory.
    pub buffer_bytes: u32,
    /// Use one multishot receive for all requests of a keep-alive connection instead of one receive for each.
    pub multishot: bool,
    /// Time without data after which a receive is replaced by a poll, which takes less kernel memory; it may take up to
    /// twice as long. `None` = never.
    pub idle_after: Option<Duration>,
    /// Restrict the ring to the operations of the driver.
    pub is_restricted: bool,
    /// Newest kernel (major, minor) whose features are used. `None` = no limit. In debug builds the environment
    /// variable `GALE_TEST_KERNEL_MAX` ("6.0") sets the default.
    pub kernel_max: Option<(u16, u16)>,
    /// Error number with which setting up the ring fails, for tests.
    pub refusal: Option<i32>,
}

/// From this kernel on, one call completes about 20 receives (`IO_LOCAL_TW_DEFAULT_MAX`), so their buffers are free
/// again before the next batch. Older kernels complete all of them in one call.
const KERNEL_WITH_SMALL_BATCHES: (u16, u16) = (6, 13);
const BUFFERS_OF_SMALL_BATCHES: u16 = 128;
/// As many buffers as completions are handled in a turn: 2 MiB of memory. With 500 busy connections and 128 buffers, a
/// fifth of all receives on Linux 6.12 would find no buffer.
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
            // Buffers are returned within the turn, so these serve any number of connections.
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

/// The limit for whole programs (tests and servers), which then use a ring as on an older kernel.
fn kernel_max_of_tests() -> Option<(u16, u16)> {
    let version = std::env::var("GALE_TEST_KERNEL_MAX").ok()?;
    let (major, minor) = version.split_once('.').expect("major.minor");
    Some((major.parse().expect("a number"), minor.parse().expect("a number")))
}

impl RingOptions {
    /// True if features of this kernel version may be used; the running kernel may still lack them.
    pub(crate) fn allows(&self, major: u16, minor: u16) -> bool {
        self.kernel_max.is_none_or(|max| (major, minor) <= max)
    }
}

/// Counters of a loop's io_uring since it was set up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RingCounters {
    /// System calls that submit, wait, or both.
    pub calls: u64,
    /// Operations submitted.
    pub operations: u64,
    /// Receives submitted; a multishot receive serves any number of requests.
    pub receives: u64,
    /// Receives that failed because no buffer was free.
    pub buffers_missed: u64,
    /// Times that completions overflowed their queue and the kernel kept them.
    pub overflows: u64,
    /// Receives of idle connections that were replaced by a poll.
    pub idle: u64,
    /// Operations that the kernel had no memory to accept. Each has failed with ENOMEM.
    pub refused: u64,
    /// Completions that the kernel had no memory to keep. Each time, everything in flight was cancelled, and operations
    /// whose result is unknown have failed with ENOMEM.
    pub lost: u64,
    /// File reads that were in flight when completions were lost and have not completed since: a thread pool repeated
    /// them, and their buffers cannot be freed.
    pub reads_kept: u64,
}

/// A socket that was detached from its driver.
pub(crate) struct Released {
    pub socket: OwnedFd,
    /// Bytes that precede those still in the kernel.
    pub received: Buffer,
    /// Error to report after `received`: the kernel reports it only once.
    pub error: Option<Errno>,
}

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

/// The event source of a loop, and all socket and file operations of its tasks.
pub(crate) trait Driver: StreamDriver + ListenerDriver + DatagramDriver + FileDriver {
    /// The name in the configuration (`use`).
    fn name(&self) -> &'static str;

    /// Waits for events until `timeout` (for ever if `None`), wakes their waiters, and returns the number of events.
    fn wait(&self, timeout: Option<Duration>) -> io::Result<usize>;

    /// True if the kernel is known to have more events than the last [`Driver::wait`] returned. No system call.
    fn has_events(&self) -> bool {
        false
    }

    /// Time of the next event, in nanoseconds of the clock. Known only in a simulation, where the events are virtual
    /// too.
    fn next_event(&self) -> Option<u64> {
        None
    }

    /// Counters of the io_uring; zeros for other drivers.
    fn ring_counters(&self) -> RingCounters {
        RingCounters::default()
    }
}

/// Connected sockets.
pub(crate) trait StreamDriver {
    /// Opens a socket and connects it, or begins to; the caller attaches it.
    fn connect(&self, address: &SocketAddress, options: &ConnectOptions) -> Result<(OwnedFd, Fresh), ConnectError> {
        begin_connect(address, options)
    }

    /// Adds a connected or connecting socket, which must be non-blocking. No system call.
    fn attach(&self, socket: OwnedFd, fresh: Fresh) -> Key;

    /// Removes the socket from the driver and returns it, with the bytes that were received ahead of the reader.
    /// Errors: if those bytes are unknown or a send is in flight; then the socket stays in the driver, to be closed.
    fn release(&self, key: Key) -> io::Result<Released>;

    fn close(&self, key: Key);

    /// Ready when the driver has sent all data of closed sockets that it still held (the kernel's own queues do not
    /// count). One waiter at a time.
    fn poll_all_sent(&self, cx: &mut Context<'_>) -> Poll<()> {
        let _ = cx;
        Poll::Ready(())
    }

    /// Ready when a `Fresh::Connecting` socket is connected or has failed.
    fn poll_connected(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Ready when a receive would not wait: there is data, the end of the stream, or an error. Reads nothing.
    fn poll_readable(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// True if a receive would not wait now.
    fn has_input(&self, key: Key) -> bool {
        // SAFETY: the slot owns the descriptor, which is not closed during this call.
        direct::has_input(unsafe { BorrowedFd::borrow_raw(self.descriptor(key)) })
    }

    /// True if a receive might succeed now. Asks the kernel only if no event would have told.
    fn may_have_input(&self, key: Key) -> bool {
        self.has_input(key)
    }

    /// Ready when a send would not wait: there is room, or an error.
    fn poll_writable(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// True if the last send was short and the kernel has not announced room since. No system call.
    fn is_full(&self, key: Key) -> bool;

    /// Receives at most `max` bytes (> 0) at the end of `into`; 0 is the end of the stream.
    fn poll_recv(&self, key: Key, cx: &mut Context<'_>, into: &mut Buffer, max: usize) -> Poll<io::Result<usize>>;

    /// Sends from the front of `out` and removes the bytes sent; ready with more than 0 unless `out` is empty.
    fn poll_send(&self, key: Key, cx: &mut Context<'_>, out: &mut Output) -> Poll<io::Result<usize>>;

    /// Sends bytes from the front of `out`, or takes them over to send them later, if that is possible without waiting;
    /// removes them and returns their number. 0 is no error: use `poll_send` for the rest. No other data may be waiting
    /// to be sent. `is_last` = the socket is closed right after this, so the end of the stream goes with the data, in
    /// one packet.
    fn try_send(&self, key: Key, out: &mut Output, is_last: bool) -> io::Result<usize>;

    /// As `try_send`, for a few borrowed bytes: they are sent or copied.
    fn try_send_copy(&self, key: Key, bytes: &[u8], is_last: bool) -> io::Result<usize>;

    /// Submits the data that `try_send` took over, before the socket is changed in a way that affects it.
    fn flush(&self, key: Key) {
        let _ = key;
    }

    /// Sends at most `length` bytes of `file` from `offset` on, and advances `offset`; 0 is the end of the file.
    fn poll_sendfile(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        file: BorrowedFd<'_>,
        offset: &mut u64,
        length: usize,
    ) -> Poll<io::Result<usize>>;

    /// Moves at most `max` bytes from the socket into an empty pipe; 0 is the end of the stream. Not for sockets that
    /// receive ahead, nor for simulated ones.
    fn poll_splice_in(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        pipe: BorrowedFd<'_>,
        max: usize,
    ) -> Poll<io::Result<usize>>;

    /// Moves at most `max` bytes from a pipe, which holds them, to the socket.
    fn poll_splice_out(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        pipe: BorrowedFd<'_>,
        max: usize,
    ) -> Poll<io::Result<usize>>;

    /// True if the driver holds, or may come to hold, bytes that the reader has not asked for.
    fn receives_ahead(&self, key: Key) -> bool {
        let _ = key;
        false
    }

    /// Shuts down the write side; the peer sees the end of the stream after all data sent before.
    fn shutdown_write(&self, key: Key) -> io::Result<()>;

    /// Makes close send a reset and drop queued data.
    fn set_linger_reset(&self, key: Key) -> io::Result<()>;

    /// Ready when the peer has closed or reset the connection, whether or not its data has been read.
    fn poll_peer_closed(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// True if the connection is reset, or closed in both directions. A peer that has only shut down its write side may
    /// still read.
    fn is_broken(&self, key: Key) -> bool;

    /// True if the peer has shut down its write side, or the connection is broken. A system call, unless an event has
    /// told already.
    fn has_hung_up(&self, key: Key) -> bool;

    /// The socket's descriptor; the driver owns it.
    fn descriptor(&self, key: Key) -> RawFd;

    /// The descriptor, if it is a kernel socket, which has options ([`crate::socket::options`]).
    fn kernel_socket(&self, key: Key) -> Option<RawFd> {
        Some(self.descriptor(key))
    }

    fn address(&self, key: Key, end: End) -> io::Result<SocketAddress> {
        // SAFETY: the slot owns the descriptor, which is not closed during this call.
        end.address_of(unsafe { BorrowedFd::borrow_raw(self.descriptor(key)) })
    }
}

/// Listening sockets.
pub(crate) trait ListenerDriver {
    /// Opens a listening socket; the caller attaches it.
    fn listen(&self, address: &SocketAddress, backlog: i32) -> io::Result<OwnedFd> {
        listen(address, backlog)
    }

    /// The local address of a listening socket.
    fn listener_address(&self, socket: &OwnedFd) -> io::Result<SocketAddress> {
        End::Local.address_of(socket.as_fd())
    }

    /// Adds a listening socket, which other loops may share.
    fn attach_listener(&self, socket: Arc<OwnedFd>, options: AcceptOptions) -> Key;

    /// Removes a listening socket; it is closed with its last owner.
    fn detach_listener(&self, key: Key);

    fn set_accept_options(&self, key: Key, options: AcceptOptions);

    /// Stops listening for events of the socket until the next `poll_accept`.
    fn pause_listener(&self, key: Key);

    /// Makes the kernel report pending connections of shared sockets to this loop again.
    fn rearm_shared_listeners(&self);

    /// Accepts pending connections from the socket of another loop, which is stalled, on the exclusive listener of this
    /// loop at the same address, if there is one and a task waits for it.
    fn accept_for_another(&self, address: &SocketAddress, socket: Arc<OwnedFd>) {
        let _ = (address, socket);
    }

    /// The next connection if one is pending, else `None`. Neither waits nor registers a waker.
    fn try_accept(&self, key: Key) -> io::Result<Option<(OwnedFd, SocketAddress)>>;

    fn poll_accept(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<(OwnedFd, SocketAddress)>>;
}

pub(crate) trait DatagramDriver {
    /// Opens a socket with these options, bound and connected as they say.
    fn open_datagram(&self, options: &DatagramOptions) -> io::Result<Key>;

    /// Adds a socket that is bound already.
    fn adopt_datagram(&self, socket: OwnedFd, options: &DatagramOptions) -> io::Result<Key>;

    fn close_datagram(&self, key: Key);

    /// Receives the datagrams that have arrived, at least one, into the buffers of `room`, and appends their metadata
    /// to `received`.
    fn poll_recv_datagrams(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        room: Room<'_>,
        received: &mut Vec<Received>,
    ) -> Poll<io::Result<()>>;

    /// Sends the first of these and returns how many. Never waits: no room for the first one is an error.
    fn send_datagrams(&self, key: Key, transmits: &[Transmit<'_>]) -> io::Result<usize>;

    /// Ready when there is room to send.
    fn poll_send_ready(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Turns on generic receive offload for datagrams that arrive from now on, see [`DatagramOptions::gro`].
    fn set_datagram_gro(&self, key: Key) -> io::Result<()>;

    fn datagram_address(&self, key: Key) -> io::Result<SocketAddress>;
}

/// File operations that a driver can do itself.
pub(crate) trait FileDriver {
    /// Begins a read; gives it back if this driver does not read files or too many reads are in flight.
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
    fn kernel_versions_are_read_with_any_suffix() {
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
