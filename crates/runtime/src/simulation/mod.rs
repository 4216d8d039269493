//! A simulated world: the environment of a loop in which nothing is real.
//!
//! [`EventLoop::simulated`](crate::EventLoop::simulated) runs in it. Time is virtual; connections, files and thread
//! pools are in memory and on the loop's own thread; chance decides how long things take, in which order they happen
//! and which of them fail ([`Faults`]). The same seed gives the same run to the last byte, which
//! [`Simulation::trace_hash`] verifies.
//!
//! It never touches the machine: no sockets, threads or files of the system. (The descriptors that it returns are
//! names: empty files in memory, so that the owner of a socket has a descriptor here too.) Nothing outside of the
//! loop's thread may wake the loop, or the run is not deterministic any more.
//!
//! Client ends are ordinary [`Stream`](crate::Stream)s on the same loop, connected by
//! [`Stream::connect`](crate::Stream::connect); [`Peer`] plays a script on one.

mod datagrams;
mod fate;
mod faults;
mod files;
mod network;
mod peer;
mod random;
mod ring;
mod seeds;
mod trace;

use std::cell::{Cell, RefCell};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;

use crate::environment::Environment;
use crate::files::page_cache::{FileHash, PageCache};
use crate::files::{File, FileMetadata};
use crate::pool::{Device, SimulatedPools, SimulatedThread};
use crate::socket::SocketAddress;
use crate::time::{Moment, VIRTUAL_START_NANOS};

pub(crate) use self::fate::{Event, Fate, Side};
pub use self::faults::Faults;
pub use self::files::FileFaults;
pub(crate) use self::network::{Named, Network, storm};
pub use self::peer::{Expectation, Peer, PeerEnd, Reading, Sending, Transcript};
pub use self::random::Random;
pub use self::ring::RingFaults;
pub(crate) use self::ring::SimulatedKernel;
pub use self::seeds::each_seed;

/// Limit of connections waiting at a listener, as in nginx.
const BACKLOG: usize = 511;

/// Windows of files for which a world keeps facts: few, so that they evict each other.
const FACT_SLOTS: usize = 4;

/// Number of last events that a failure shows.
const TAIL: usize = 60;

/// A simulated world. Clones are the same world.
#[derive(Clone)]
pub struct Simulation {
    world: Rc<World>,
}

impl Simulation {
    /// A world with this seed and these faults.
    pub fn new(seed: u64, faults: Faults) -> Simulation {
        let clock = Rc::new(Cell::new(VIRTUAL_START_NANOS));
        let world = World {
            seed,
            fate: Fate::new(seed, faults, clock),
            network: RefCell::new(Network::new()),
            datagrams: RefCell::new(datagrams::Datagrams::new()),
            files: RefCell::new(files::Files::new()),
            pools: SimulatedPools::default(),
            page_cache: PageCache::with_slots(FACT_SLOTS),
            ring_faults: Cell::default(),
            ring_buffers_taken: Cell::default(),
        };
        Simulation { world: Rc::new(world) }
    }

    pub(crate) fn world(&self) -> &Rc<World> {
        &self.world
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.world.seed
    }

    /// The current virtual time.
    pub fn now(&self) -> Moment {
        Moment::from_nanos(self.world.fate.now())
    }

    /// Changes the faults.
    pub fn set_faults(&self, faults: Faults) {
        self.world.fate.set_faults(faults);
    }

    /// The current faults.
    pub fn faults(&self) -> Faults {
        self.world.fate.faults()
    }

    /// A listening socket for [`Listener::from_fd`](crate::Listener::from_fd). Errors: EADDRINUSE, or no descriptor.
    pub fn listen(&self, address: &SocketAddress) -> io::Result<OwnedFd> {
        self.world.listen(address, BACKLOG)
    }

    /// Closes a listening socket although it has owners, as if the last one closed it: waiting connections are reset
    /// (and count as cut), later ones are refused.
    pub fn stop_listening(&self, address: &SocketAddress) {
        self.world.network.borrow_mut().stop_listening(&self.world.fate, address);
    }

    /// Adds a file, which [`files::open`](crate::files::open) finds, and the directories above it. Errors: no memory.
    pub fn add_file(&self, path: impl AsRef<Path>, content: &[u8]) -> io::Result<()> {
        self.add_broken_file(path, content, FileFaults::default())
    }

    /// As [`Simulation::add_file`], with faults.
    pub fn add_broken_file(&self, path: impl AsRef<Path>, content: &[u8], faults: FileFaults) -> io::Result<()> {
        self.world.files.borrow_mut().add(path.as_ref(), content, faults)
    }

    /// True if the network has broken the connection of the client with this address, or aborted it before it was
    /// accepted.
    pub fn was_cut(&self, client: &SocketAddress) -> bool {
        self.world.network.borrow().was_cut(client)
    }

    /// Number of open ends of connections: two for each.
    pub fn open_ends(&self) -> usize {
        self.world.network.borrow_mut().open_ends()
    }

    /// Counters of the faults of the ring so far, if the loop has one.
    pub fn ring_faults(&self) -> RingFaults {
        self.world.ring_faults.get()
    }

    /// Number of provided buffers of the ring that hold unread data.
    pub fn ring_buffers_taken(&self) -> usize {
        self.world.ring_buffers_taken.get()
    }

    /// Number of waiting and running pool tasks.
    pub fn pool_tasks(&self) -> usize {
        self.world.pools.tasks()
    }

    /// A hash of everything that has happened: every event with its time, every byte with its place.
    pub fn trace_hash(&self) -> u64 {
        self.world.fate.trace_hash()
    }

    /// The last events, as text.
    pub fn trace_tail(&self) -> String {
        self.world.fate.trace_tail(TAIL)
    }

    /// Records an event of the test.
    pub fn note(&self, what: &'static str, number: u64, amount: usize) {
        self.world.fate.note(what, number, amount);
    }
}

/// The world behind the handle; a simulated loop's environment refers to it.
pub(crate) struct World {
    pub seed: u64,
    pub fate: Fate,
    pub network: RefCell<Network>,
    pub datagrams: RefCell<datagrams::Datagrams>,
    files: RefCell<files::Files>,
    pub pools: SimulatedPools,
    /// Facts about this world's files, and their reads in flight.
    pub page_cache: Arc<PageCache>,
    pub ring_faults: Cell<RingFaults>,
    /// Buffers that the ring's driver had not returned at its last call.
    pub ring_buffers_taken: Cell<usize>,
}

impl World {
    /// The world of the loop on this thread, if that is simulated.
    pub fn current() -> Option<Rc<World>> {
        Environment::try_with(|environment| environment.simulation.clone()).flatten()
    }

    pub fn listen(&self, address: &SocketAddress, backlog: usize) -> io::Result<OwnedFd> {
        let listener = self.network.borrow_mut().listen(address, backlog)?;
        self.descriptor(Named::Listener(listener))
    }

    /// A descriptor that stands for an end or a listener.
    pub fn descriptor(&self, named: Named) -> io::Result<OwnedFd> {
        let descriptor = memfd_create("simulated socket", MemfdFlags::CLOEXEC)?;
        self.network.borrow_mut().name(identity(&descriptor)?, named);
        Ok(descriptor)
    }

    /// The end or listener of a descriptor. Panics if the descriptor is not of this world.
    pub fn named(&self, descriptor: impl AsFd) -> Named {
        self.find_named(descriptor).expect("a simulated loop is given simulated sockets")
    }

    /// The end or listener of a descriptor, if it is of this world. Panics if the descriptor is not open.
    pub fn find_named(&self, descriptor: impl AsFd) -> Option<Named> {
        let identity = identity(descriptor).expect("an open descriptor has a number");
        self.network.borrow().named(identity)
    }

    pub fn stat(&self, path: &Path) -> io::Result<FileMetadata> {
        let found = self.files.borrow().stat(path);
        self.fate.note("stat", 0, usize::from(found.is_ok()));
        Ok(found?)
    }

    pub fn open(&self, path: &Path) -> io::Result<(OwnedFd, FileMetadata, FileFaults)> {
        let opened = self.files.borrow_mut().open(path);
        self.fate.note("open", 0, usize::from(opened.is_ok()));
        Ok(opened?)
    }

    /// Opens or inspects a file, unless a pool has to do it; then the error is the device.
    pub fn attempt<T>(&self, attempt: impl FnOnce(&World) -> T) -> Result<T, Device> {
        if self.fate.strikes(|faults| faults.cold_files) { Err(files::DEVICE) } else { Ok(attempt(self)) }
    }

    /// The faults of a real file, and its hash in the table of facts. That uses a number of this world, not the
    /// inode's, which depends on what else the machine does, as would the eviction of facts.
    pub fn adopted(&self, descriptor: &OwnedFd) -> (FileFaults, FileHash) {
        let faults = FileFaults::default();
        (faults, self.files.borrow_mut().adopt(descriptor.as_raw_fd(), faults))
    }

    /// Reads bytes that are in memory into `into`, perhaps not all, and returns their number; `None` if none are.
    pub fn read_resident(
        &self,
        file: &File,
        faults: FileFaults,
        offset: u64,
        into: &mut [u8],
    ) -> Option<Result<usize, Errno>> {
        let length = files::resident(&self.fate, into.len())?;
        let result = faults.read(file.as_fd(), offset, &mut into[..length]);
        self.fate.note("read", 0, result.unwrap_or(0));
        Some(result)
    }

    /// Writes to a real file: everything, the beginning of the first piece, or nothing because the disk is full.
    pub fn write_to(&self, file: BorrowedFd<'_>, pieces: &[IoSlice<'_>], offset: u64) -> Result<usize, Errno> {
        let result = match pieces.first() {
            _ if self.fate.strikes(|faults| faults.disk_full) => Err(Errno::NOSPC),
            Some(piece) if piece.len() > 1 && self.fate.strikes(|faults| faults.short_writes) => {
                let length = self.fate.random.up_to(piece.len());
                rustix::io::retry_on_intr(|| rustix::io::pwrite(file, &piece[..length], offset))
            }
            _ => rustix::io::retry_on_intr(|| rustix::io::pwritev(file, pieces, offset)),
        };
        self.fate.note("write", 0, result.unwrap_or(0));
        result
    }

    /// True if a call that should not have waited did.
    pub fn call_was_slow(&self) -> bool {
        self.fate.strikes(|faults| faults.slow_calls)
    }

    /// Reads a piece of a file for `sendfile`.
    pub fn read_to_send(&self, file: BorrowedFd<'_>, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
        let faults = self.files.borrow().faults_of(file.as_raw_fd());
        let mut bytes = vec![0; length];
        let count = faults.read(file, offset, &mut bytes)?;
        bytes.truncate(count);
        Ok(bytes)
    }

    /// True if a pool refuses a task as if it were full.
    pub fn refuses_task(&self) -> bool {
        self.fate.strikes(|faults| faults.pool_refusals)
    }

    /// Continues a pool's thread after a random time.
    pub fn plan_thread(&self, thread: SimulatedThread) {
        self.fate.plan(self.fate.within(self.fate.faults().task_max), Event::Thread(thread));
    }

    /// Handles an event, or gives it back if it is for the driver.
    pub fn handle(&self, event: Event) -> Option<Event> {
        let World { fate, network, .. } = self;
        match event {
            Event::Arrival { end, arrival } => network.borrow_mut().handle_arrival(fate, end, arrival),
            Event::Room { end, bytes } => network.borrow_mut().handle_room(fate, end, bytes),
            Event::Datagram(datagram) => {
                let reader = self.datagrams.borrow_mut().handle_arrival(fate, datagram);
                reader.into_iter().for_each(Waker::wake);
            }
            Event::Incoming { listener, end } => network.borrow_mut().handle_incoming(fate, listener, end),
            Event::Cut { end } => network.borrow_mut().cut(fate, end),
            Event::Thread(thread) => self.handle_thread(thread),
            Event::Ready { .. } | Event::ListenerReady { .. } | Event::Release { .. } | Event::Operation(_) => {
                return Some(event);
            }
        }
        None
    }

    /// Continues a pool's thread.
    fn handle_thread(&self, thread: SimulatedThread) {
        self.fate.note("thread", 0, thread.has_task().into());
        if let Some(thread) = thread.step() {
            self.plan_thread(thread);
        }
    }
}

/// Identifies a descriptor's file: files in memory are all on one device.
fn identity(descriptor: impl AsFd) -> io::Result<u64> {
    Ok(rustix::fs::fstat(descriptor)?.st_ino)
}
