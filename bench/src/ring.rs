//! ring: the io_uring operations shared by the floor and the lean client.
//!
//! Receiving is multishot into provided buffers, sending is queued, and one `io_uring_enter` submits the queue and
//! waits. The received bytes are never read, so all provided buffers share the same memory, just as the epoll floor
//! receives everything into one buffer. Kernels without these operations (before 6.1) are not supported. (Deferred task
//! work was compared with cooperative task work: 3.5 to 3.9 µs per request against 3.8 to 4.0.)
//!
//! Invariant: every submitted entry points to memory that is never freed (`&'static`).

use std::io;
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::atomic::{AtomicU16, Ordering};

use io_uring::types::{BufRingEntry, DestinationSlot, Fd, Fixed};
use io_uring::{IoUring, cqueue, opcode, squeue};

/// Longer than a request. A longer answer is received in pieces.
const BUFFER_BYTES: usize = 2048;
/// More than the completions of a turn, so that no receive ends for lack of a buffer.
const BUFFERS: u16 = 4096;
const GROUP: u16 = 0;
const SUBMISSIONS: u32 = 4096;
const COMPLETIONS: u32 = 16384;

/// Kind of a completion: 32 bits of the user data, beside the number of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Accept,
    Receive,
    Send,
    Close,
}

/// A completion, without unused fields.
#[derive(Debug, Clone, Copy)]
pub struct Completion {
    pub kind: Kind,
    pub connection: u32,
    /// Result of the system call; negative values are error numbers.
    pub result: i32,
    /// A multishot operation continues.
    pub goes_on: bool,
}

pub struct Ring {
    ring: IoUring,
    buffers: Buffers,
    /// Memory that received bytes overwrite when no buffer is provided.
    scratch: *mut u8,
}

impl Ring {
    /// Creates a ring for the calling thread, with a table of this many direct descriptors.
    pub fn new(direct_descriptors: u32) -> io::Result<Ring> {
        let mut builder = IoUring::builder();
        builder.setup_single_issuer().setup_defer_taskrun().setup_submit_all().setup_cqsize(COMPLETIONS);
        let ring = builder.build(SUBMISSIONS)?;
        ring.submitter().register_files_sparse(direct_descriptors)?;
        let buffers = Buffers::register(&ring)?;
        let scratch = buffers.scratch;
        Ok(Ring { ring, buffers, scratch })
    }

    /// Installs direct descriptors from 0 on.
    pub fn use_descriptors(&mut self, descriptors: &[RawFd]) -> io::Result<()> {
        self.ring.submitter().register_files_update(0, descriptors).map(|_| ())
    }

    /// Installs a descriptor in the table, which keeps it open.
    pub fn use_descriptor(&mut self, place: u32, descriptor: RawFd) -> io::Result<()> {
        self.ring.submitter().register_files_update(place, &[descriptor]).map(|_| ())
    }

    /// Limits accepted connections to the first `places` of the table.
    pub fn accept_into_first(&mut self, places: u32) -> io::Result<()> {
        /// `struct io_uring_file_index_range` of the kernel.
        #[repr(C)]
        struct Range {
            offset: u32,
            length: u32,
            reserved: u64,
        }
        /// `IORING_REGISTER_FILE_ALLOC_RANGE`, which the crate lacks.
        const REGISTER_FILE_ALLOC_RANGE: libc::c_uint = 25;
        let range = Range { offset: 0, length: places, reserved: 0 };
        let (ring, none): (libc::c_int, libc::c_uint) = (self.ring.as_raw_fd(), 0);
        // SAFETY: the kernel reads the range, which is live, during the call.
        let result = unsafe {
            libc::syscall(libc::SYS_io_uring_register, ring, REGISTER_FILE_ALLOC_RANGE, &raw const range, none)
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Accepts connections into direct descriptors, whose numbers are the results.
    pub fn accept_all(&mut self, listener: Fd) -> io::Result<()> {
        let accept = opcode::AcceptMulti::new(listener).allocate_file_index(true).build();
        self.push(accept, Kind::Accept, 0)
    }

    /// Receives until the peer closes. Every piece is a completion.
    pub fn receive_all(&mut self, connection: u32) -> io::Result<()> {
        let receive = opcode::RecvMulti::new(Fixed(connection), GROUP).build();
        self.push(receive, Kind::Receive, connection)
    }

    /// Sends. Only a failure has a completion.
    pub fn send(&mut self, connection: u32, bytes: &'static [u8]) -> io::Result<()> {
        let send = opcode::Send::new(Fixed(connection), bytes.as_ptr(), bytes.len() as u32);
        let send = send.flags(no_signal()).build().flags(squeue::Flags::SKIP_SUCCESS);
        self.push(send, Kind::Send, connection)
    }

    /// Receives once, sends, closes, in this order and without completions. If one fails, the following ones are
    /// cancelled and have completions.
    pub fn receive_send_close(&mut self, connection: u32, bytes: &'static [u8]) -> io::Result<()> {
        let quiet_link = squeue::Flags::SKIP_SUCCESS | squeue::Flags::IO_LINK;
        let receive = opcode::Recv::new(Fixed(connection), self.scratch, BUFFER_BYTES as u32);
        self.push(receive.build().flags(quiet_link), Kind::Receive, connection)?;
        let send = opcode::Send::new(Fixed(connection), bytes.as_ptr(), bytes.len() as u32);
        self.push(send.flags(no_signal()).build().flags(quiet_link), Kind::Send, connection)?;
        self.close(connection)
    }

    /// Connects at this place of the table, sends, receives once, closes, in this order. Only the receive has a
    /// completion. If one fails, the following ones are cancelled and have completions.
    pub fn exchange_once(
        &mut self,
        place: u32,
        address: &'static libc::sockaddr_un,
        request: &'static [u8],
    ) -> io::Result<()> {
        let quiet_link = squeue::Flags::SKIP_SUCCESS | squeue::Flags::IO_LINK;
        let slot = DestinationSlot::try_from_slot_target(place).map_err(|_| io::Error::other("no such place"))?;
        let socket = opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).file_index(Some(slot));
        self.push(socket.build().flags(quiet_link), Kind::Send, place)?;
        let length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
        let connect = opcode::Connect::new(Fixed(place), std::ptr::from_ref(address).cast(), length);
        self.push(connect.build().flags(quiet_link), Kind::Send, place)?;
        let send = opcode::Send::new(Fixed(place), request.as_ptr(), request.len() as u32);
        self.push(send.flags(no_signal()).build().flags(quiet_link), Kind::Send, place)?;
        let receive = opcode::Recv::new(Fixed(place), self.scratch, BUFFER_BYTES as u32);
        self.push(receive.build().flags(squeue::Flags::IO_LINK), Kind::Receive, place)?;
        self.close(place)
    }

    pub fn close(&mut self, connection: u32) -> io::Result<()> {
        let close = opcode::Close::new(Fixed(connection)).build().flags(squeue::Flags::SKIP_SUCCESS);
        self.push(close, Kind::Close, connection)
    }

    fn push(&mut self, entry: squeue::Entry, kind: Kind, connection: u32) -> io::Result<()> {
        let entry = entry.user_data((kind as u64) << 32 | u64::from(connection));
        // SAFETY: entries of this module point to `'static` memory only, and the scratch memory that the kernel writes
        // to is never read.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.ring.submit()?;
        }
        Ok(())
    }

    /// Submits the queue, waits for a completion, and appends all available ones to `into`. Their buffers are returned
    /// at once.
    pub fn wait(&mut self, into: &mut Vec<Completion>) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        for entry in self.ring.completion() {
            if let Some(buffer) = cqueue::buffer_select(entry.flags()) {
                self.buffers.add(buffer);
            }
            let kind = match entry.user_data() >> 32 {
                0 => Kind::Accept,
                1 => Kind::Receive,
                2 => Kind::Send,
                _ => Kind::Close,
            };
            let (connection, goes_on) = (entry.user_data() as u32, cqueue::more(entry.flags()));
            into.push(Completion { kind, connection, result: entry.result(), goes_on });
        }
        self.buffers.publish();
        Ok(())
    }
}

fn no_signal() -> i32 {
    rustix::net::SendFlags::NOSIGNAL.bits() as i32
}

/// Ring of provided buffers, which all share the same memory.
struct Buffers {
    entries: &'static mut [Page],
    scratch: *mut u8,
    tail: u16,
}

/// The kernel requires the ring to be aligned to a page.
#[repr(C, align(4096))]
struct Page([u8; 4096]);

impl Buffers {
    fn register(ring: &IoUring) -> io::Result<Buffers> {
        let pages = usize::from(BUFFERS) * size_of::<BufRingEntry>() / size_of::<Page>();
        let entries: &'static mut [Page] = Vec::from_iter((0..pages).map(|_| Page([0; 4096]))).leak();
        // SAFETY: the memory holds `BUFFERS` entries, is aligned to a page, and is never freed.
        unsafe { ring.submitter().register_buf_ring_with_flags(entries.as_mut_ptr() as u64, BUFFERS, GROUP, 0) }?;
        let mut buffers = Buffers { entries, scratch: vec![0; BUFFER_BYTES].leak().as_mut_ptr(), tail: 0 };
        (0..BUFFERS).for_each(|number| buffers.add(number));
        buffers.publish();
        Ok(buffers)
    }

    fn add(&mut self, number: u16) {
        let place = usize::from(self.tail % BUFFERS);
        // SAFETY: `place` is within the ring, and the kernel does not read entries from the tail on. Only the three
        // fields are written: the tail is stored in the fourth field of the first entry.
        let entry = unsafe { &mut *self.entries.as_mut_ptr().cast::<BufRingEntry>().add(place) };
        entry.set_addr(self.scratch as u64);
        entry.set_len(BUFFER_BYTES as u32);
        entry.set_bid(number);
        self.tail = self.tail.wrapping_add(1);
    }

    fn publish(&mut self) {
        let first = self.entries.as_mut_ptr().cast::<BufRingEntry>();
        // SAFETY: the tail is an aligned `u16` within the first entry, which is initialised. It is shared with the
        // kernel, so it is written atomically.
        let tail = unsafe { AtomicU16::from_ptr(BufRingEntry::tail(first).cast_mut()) };
        tail.store(self.tail, Ordering::Release);
    }
}
