//! The thread "idle streams" closes parked streams when their peer closes them or sends data, and when they expire.
//!
//! The process has one, started with the first parked stream and never ended. It waits on an epoll set to which any
//! loop adds and removes sockets. While there are shards it looks for expired streams once a second.

use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, Timespec, epoll};
use rustix::io::Errno;

/// Interval between looks for expired streams.
const EXPIRY_EVERY: Duration = Duration::from_secs(1);

const EVENTS_MAX: usize = 64;

/// Bits of a socket's number in its shard, in the data of an event; the shard's bits are above. A loop that parks a
/// hundred thousand streams a second exhausts them after five years; then only the thread would not find its streams.
const NUMBER_BITS: u32 = 44;
const NUMBER_MASK: u64 = (1 << NUMBER_BITS) - 1;

/// Identifies a shard; 0 is the bell.
pub(super) type ShardId = u32;
const SHARD_ID_MAX: ShardId = (1 << (u64::BITS - NUMBER_BITS)) - 1;
const BELL: u64 = 0;

/// A set of idle streams, in shards.
pub(super) trait Watched: Send + Sync {
    /// Closes a stream that is not idle any more.
    fn close(&self, shard: usize, number: u64);

    /// Closes the expired streams of a shard.
    fn close_expired(&self, shard: usize);
}

pub(super) struct Watch {
    epoll: OwnedFd,
    /// Wakes the thread when the first shard is enrolled.
    bell: OwnedFd,
    shards: Mutex<Shards>,
}

#[derive(Default)]
struct Shards {
    known: HashMap<ShardId, (Weak<dyn Watched>, usize)>,
    last: ShardId,
}

impl Watch {
    /// The watch of the process, started if necessary; `None` if that fails.
    pub fn started() -> Option<&'static Watch> {
        static WATCH: OnceLock<Option<Watch>> = OnceLock::new();
        static THREAD: OnceLock<bool> = OnceLock::new();
        let watch = WATCH.get_or_init(|| Watch::new().ok()).as_ref()?;
        let run = || {
            crate::affinity::leave_processors();
            watch.run();
        };
        let start = || thread::Builder::new().name("idle streams".into()).spawn(run).is_ok();
        THREAD.get_or_init(start).then_some(watch)
    }

    fn new() -> io::Result<Watch> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, &bell, epoll::EventData::new_u64(BELL), flags)?;
        Ok(Watch { epoll, bell, shards: Mutex::default() })
    }

    /// The shard's name, which is kept in `name`; enrolls the shard if it has none.
    pub fn enroll<W: Watched + 'static>(&self, name: &mut Option<ShardId>, set: &Weak<W>, shard: usize) -> ShardId {
        *name.get_or_insert_with(|| {
            let mut shards = self.shards.lock();
            let is_first = shards.known.is_empty();
            let id = shards.free_id();
            let set: Weak<dyn Watched> = Weak::<W>::clone(set);
            shards.known.insert(id, (set, shard));
            drop(shards);
            if is_first {
                // A full counter wakes the thread too.
                let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
            }
            id
        })
    }

    /// Adds a socket: the thread gets one event when it has data or ends. Errors: no memory in the kernel.
    pub fn add(&self, socket: BorrowedFd<'_>, shard: ShardId, number: u64) -> io::Result<()> {
        let data = epoll::EventData::new_u64(u64::from(shard) << NUMBER_BITS | number & NUMBER_MASK);
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ONESHOT;
        Ok(epoll::add(&self.epoll, socket, data, flags)?)
    }

    /// Removes a socket. An event that was reported already finds no stream.
    pub fn remove(&self, socket: BorrowedFd<'_>) {
        // The socket was added and is open, so this cannot fail.
        let _ = epoll::delete(&self.epoll, socket);
    }

    fn run(&self) {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        let mut next_expiry = Instant::now() + EXPIRY_EVERY;
        loop {
            let rest = next_expiry.saturating_duration_since(Instant::now());
            let rest = Timespec::try_from(rest).expect("a second at most");
            let timeout = (!self.shards.lock().known.is_empty()).then_some(&rest);
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout) {
                Ok(_) | Err(Errno::INTR) => {}
                // The set is open and the arguments are valid.
                Err(errno) => unreachable!("epoll_wait: {errno}"),
            }
            for event in events.iter().map(|event| event.data.u64()).filter(|&data| data != BELL) {
                // A shard that was dropped has closed its sockets.
                if let Some((set, shard)) = self.find((event >> NUMBER_BITS) as ShardId) {
                    set.close(shard, event & NUMBER_MASK);
                }
            }
            if next_expiry <= Instant::now() {
                next_expiry = Instant::now() + EXPIRY_EVERY;
                self.close_expired();
            }
        }
    }

    fn find(&self, id: ShardId) -> Option<(Arc<dyn Watched>, usize)> {
        let shards = self.shards.lock();
        let (set, shard) = shards.known.get(&id)?;
        Some((set.upgrade()?, *shard))
    }

    fn close_expired(&self) {
        let mut sets = Vec::new();
        self.shards.lock().known.retain(|_, (set, shard)| {
            let set = set.upgrade().map(|set| (set, *shard));
            let is_there = set.is_some();
            sets.extend(set);
            is_there
        });
        for (set, shard) in sets {
            set.close_expired(shard);
        }
    }
}

impl Shards {
    fn free_id(&mut self) -> ShardId {
        loop {
            self.last = if self.last == SHARD_ID_MAX { 1 } else { self.last + 1 };
            if !self.known.contains_key(&self.last) {
                return self.last;
            }
        }
    }
}
