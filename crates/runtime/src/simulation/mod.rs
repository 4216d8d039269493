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
mod descriptors;
mod fate;
mod faults;
mod network;
mod peer;
mod random;
mod ring;
mod seeds;
mod trace;

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::task::Waker;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;

use crate::environment::Environment;
use crate::pool::{SimulatedPools, SimulatedThread};
use crate::socket::SocketAddress;
use crate::time::{Moment, VIRTUAL_START_NANOS};

pub use self::descriptors::FileFaults;
pub(crate) use self::fate::{Event, Fate, Side};
pub use self::faults::Faults;
pub(crate) use self::network::{Named, Network, storm};
pub use self::peer::{Expectation, Peer, PeerEnd, Reading, Sending, Transcript};
pub use self::random::Random;
pub use self::ring::RingFaults;
pub(crate) use self::ring::SimulatedKernel;
pub use self::seeds::each_seed;

/// Limit of connections waiting at a listener, as in nginx.
const BACKLOG: usize = 511;

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
            descriptors: RefCell::default(),
            parts: RefCell::default(),
            pools: SimulatedPools::default(),
            ring_faults: Cell::default(),
            ring_buffers_taken: Cell::default(),
        };
        Simulation { world: Rc::new(world) }
    }

    /// The world of the loop on this thread, if that is simulated.
    #[inline]
    pub fn current() -> Option<Simulation> {
        World::current().map(|world| Simulation { world })
    }

    /// State that a layer above the loop keeps for this world: one value of each type, made at the first call.
    pub fn part<T: Default + 'static>(&self) -> Rc<T> {
        let mut parts = self.world.parts.borrow_mut();
        let found = parts.iter().find_map(|part| Rc::clone(part).downcast::<T>().ok());
        found.unwrap_or_else(|| {
            let part = Rc::new(T::default());
            parts.push(Rc::clone(&part) as Rc<dyn Any>);
            part
        })
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

    /// Draws whether a fault strikes, which has this chance in a thousand.
    pub fn strikes(&self, fault: impl FnOnce(&Faults) -> u16) -> bool {
        self.world.fate.strikes(fault)
    }

    /// A random length from 1 to `max`, which must not be 0.
    pub fn up_to(&self, max: usize) -> usize {
        self.world.fate.random.up_to(max)
    }

    /// Sets the faults of the file with this descriptor, for reads by the loop's driver.
    pub fn set_file_faults(&self, descriptor: RawFd, faults: FileFaults) {
        self.world.descriptors.borrow_mut().set_faults(descriptor, faults);
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
    descriptors: RefCell<descriptors::Descriptors>,
    pub pools: SimulatedPools,
    /// See [`Simulation::part`].
    parts: RefCell<Vec<Rc<dyn Any>>>,
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

    /// Reads a piece of a file for `sendfile`.
    pub fn read_to_send(&self, file: BorrowedFd<'_>, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
        let faults = self.descriptors.borrow().faults_of(file);
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
