//! The thread "idle streams": closes what its peer has closed, or has sent something on, and what has been idle for too
//! long.
//!
//! One for the process, started with the first stream that is parked, and there for life. It waits on an epoll set that
//! any loop adds sockets to and removes them from. While anybody may have streams parked it looks once a second for
//! those that have waited too long.

use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, Timespec, epoll};
use rustix::io::Errno;

/// How often the thread looks for streams that have been idle for too long.
const EXPIRY_EVERY: Duration = Duration::from_secs(1);

const EVENTS_MAX: usize = 64;

/// Bits of a socket's number in its shard, in the data of an event; the shard's are above. A loop that parks a hundred
/// thousand a second comes to their end after five years; then only the thread would not find its streams.
const NUMBER_BITS: u32 = 44;
const NUMBER_MASK: u64 = (1 << NUMBER_BITS) - 1;

/// Names a shard; 0 is the bell.
pub(super) type ShardId = u32;
const SHARD_ID_MAX: ShardId = (1 << (u64::BITS - NUMBER_BITS)) - 1;
const BELL: u64 = 0;

/// A set of idle streams, in shards.
pub(super) trait Watched: Send + Sync {
    /// A stream of the shard is not idle any more.
    fn close(&self, shard: usize, number: u64);

    /// Closes those of the shard that have been idle for too long.
    fn close_expired(&self, shard: usize);
}

pub(super) struct Watch {
    epoll: OwnedFd,
    /// Rung when the first shard comes.
    bell: OwnedFd,
    shards: Mutex<Shards>,
}

#[derive(Default)]
struct Shards {
    known: HashMap<ShardId, (Weak<dyn Watched>, usize)>,
    last: ShardId,
}

impl Watch {
    /// The process's, if there can be one.
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

    /// What this shard is called here, where the name is kept.
    pub fn enroll<W: Watched + 'static>(&self, name: &mut Option<ShardId>, set: &Weak<W>, shard: usize) -> ShardId {
        *name.get_or_insert_with(|| {
            let mut shards = self.shards.lock();
            let is_first = shards.known.is_empty();
            let id = shards.free_id();
            let set: Weak<dyn Watched> = Weak::<W>::clone(set);
            shards.known.insert(id, (set, shard));
            drop(shards);
            if is_first {
                // A counter that is full wakes the thread, too.
                let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
            }
            id
        })
    }

    /// Has the thread told when the socket has something to read or ends, once. Errors: no memory in the kernel.
    pub fn add(&self, socket: BorrowedFd<'_>, shard: ShardId, number: u64) -> io::Result<()> {
        let data = epoll::EventData::new_u64(u64::from(shard) << NUMBER_BITS | number & NUMBER_MASK);
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ONESHOT;
        Ok(epoll::add(&self.epoll, socket, data, flags)?)
    }

    /// The thread is told nothing more of the socket, but for what is on its way already, which finds nothing.
    pub fn remove(&self, socket: BorrowedFd<'_>) {
        // It was added and is open, so this cannot fail.
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
                // The set is open and the arguments are right.
                Err(errno) => unreachable!("epoll_wait: {errno}"),
            }
            for event in events.iter().map(|event| event.data.u64()).filter(|&data| data != BELL) {
                // A shard that has gone has closed its sockets.
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
