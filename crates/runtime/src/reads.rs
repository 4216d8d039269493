//! Reads of pieces that are not in memory, each done once for all who want it at the same time, on whatever loop.
//!
//! ```text
//!   look ──► in memory after all: done             only for pieces of which nothing is known, few at a time
//!    └─────► read by the pool (or an io_uring)     stands in its device's line; counts as outstanding there
//! ```
//!
//! The first who wants a piece begins the read, everybody else waits for the same one, and all get the same memory, each
//! charged with it. The read belongs to those who wait: it goes on when the first one leaves, and is cancelled with the last
//! (a task that has not begun never does). The result is handed out for as long as somebody waits for it, and is no cache:
//! who comes later finds the piece in the page cache.
//!
//! What is the same piece: device, inode, size and times of change as the file was opened with (a file that was replaced has
//! another content), offset and length, and the pool, so that nobody waits in a pool that is not his. Files on file systems
//! that wait for others are only the same as themselves, because many of those number their files as they like.

use std::collections::HashMap;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use parking_lot::Mutex;
use rustix::io::Errno;

use crate::blocks::Charge;
use crate::devices::{Knowledge, Outstanding};
use crate::driver::file_read::FileRead;
use crate::environment::Environment;
use crate::file_counters::{Event, Rung, count_event, count_piece};
use crate::files::{Blocks, File};
use crate::mounts;
use crate::pool::{PoolError, ThreadPool};
use crate::time::now_anywhere;

/// Reads in flight are found in one of so many tables.
const SHARDS: usize = 16;

/// How a piece is read.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct ReadHow {
    /// Whether it may be in memory: nobody has looked.
    pub unlooked: bool,
    /// Past the page cache (`O_DIRECT`), aligned to so many bytes.
    pub direct: Option<u32>,
    /// By the loop's io_uring, if it has one; the pool is for the others.
    pub by_ring: bool,
}

/// A piece of a file to be read.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Key {
    file: FileKey,
    offset: u64,
    length: usize,
    pool: usize,
    how: ReadHow,
}

/// What makes two open files the same.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum FileKey {
    Content { device: u64, inode: u64, size: u64, modified: (i64, u32), changed: (i64, u32) },
    Itself(usize),
}

/// The reads in flight.
pub(crate) struct Flights {
    shards: [Mutex<HashMap<Key, Arc<Flight>>>; SHARDS],
    hasher: RandomState,
}

/// The memory that was read into, in which part of it the piece is, and how it was read.
#[derive(Clone)]
struct Bytes {
    memory: Arc<Box<[u8]>>,
    piece: Range<usize>,
    rung: Rung,
    /// It was in memory after all.
    was_resident: bool,
}

type Reading = Pin<Box<dyn Future<Output = Result<Bytes, Failure>> + Send>>;

struct Flight {
    key: Key,
    state: Mutex<State>,
}

struct State {
    stage: Stage,
    /// Those who wait, by their place.
    waiting: Vec<Option<Waker>>,
    /// The places of those who have left.
    free: Vec<usize>,
    /// How many have not left.
    interested: usize,
}

enum Stage {
    Reading(Reading),
    Done(Result<Bytes, Failure>),
    /// The last one has left.
    Cancelled,
}

/// An error that several may be told.
#[derive(Clone)]
pub(crate) enum Failure {
    Os(i32),
    Kind(io::ErrorKind),
    Pool(PoolError),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(number) => Failure::Os(number),
            None => Failure::Kind(error.kind()),
        }
    }
}

impl From<PoolError> for Failure {
    fn from(error: PoolError) -> Self {
        Failure::Pool(error)
    }
}

impl From<Failure> for io::Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Os(number) => io::Error::from_raw_os_error(number),
            Failure::Kind(kind) => kind.into(),
            Failure::Pool(error) => error.into(),
        }
    }
}

impl Wake for Flight {
    /// The read has got on: everybody looks, and the first one drives it.
    fn wake(self: Arc<Self>) {
        let waiting: Vec<Waker> = self.state.lock().waiting.iter_mut().filter_map(Option::take).collect();
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// A piece that is being read. Dropped, it leaves those who wait for it.
#[must_use = "the read is given up when this is dropped"]
pub struct PieceRead {
    flights: Arc<Flights>,
    flight: Arc<Flight>,
    place: usize,
    knowledge: Arc<Knowledge>,
    file: File,
    /// What is read is charged from the beginning; taken when it is there.
    charge: Option<Charge>,
}

impl Flights {
    pub fn new() -> Arc<Self> {
        Arc::new(Flights { shards: std::array::from_fn(|_| Mutex::default()), hasher: RandomState::new() })
    }

    fn shard(&self, key: &Key) -> &Mutex<HashMap<Key, Arc<Flight>>> {
        &self.shards[self.hasher.hash_one(key) as usize % SHARDS]
    }

    /// Takes part in the read of this piece: one that is in flight, or a new one. Errors: `OutOfMemory` at the hard limit of
    /// leases.
    pub fn join(
        self: &Arc<Self>,
        knowledge: &Arc<Knowledge>,
        file: &File,
        pool: &ThreadPool,
        (offset, length): (u64, usize),
        how: ReadHow,
    ) -> io::Result<PieceRead> {
        // The thread that reads allocates when it begins.
        let charge = Charge::for_length(length)?;
        let size = charge.bytes();
        let key = Key { file: file.key(), offset, length, pool: pool.identity(), how };
        let mut flights = self.shard(&key).lock();
        let known = flights.get(&key).cloned();
        let flight = known.unwrap_or_else(|| {
            let piece = Piece { file: file.clone(), offset, length, size };
            let reading = Box::pin(read(piece, pool.clone(), Arc::clone(knowledge), how));
            let state = State { stage: Stage::Reading(reading), waiting: Vec::new(), free: Vec::new(), interested: 0 };
            let flight = Arc::new(Flight { key: key.clone(), state: Mutex::new(state) });
            flights.insert(key, Arc::clone(&flight));
            flight
        });
        let mut state = flight.state.lock();
        if state.interested > 0 {
            count_event(Event::Shared);
        }
        state.interested += 1;
        let place = state.free.pop().unwrap_or_else(|| {
            state.waiting.push(None);
            state.waiting.len() - 1
        });
        drop(state);
        drop(flights);
        let (flights, knowledge) = (Arc::clone(self), Arc::clone(knowledge));
        Ok(PieceRead { flights, flight, place, knowledge, file: file.clone(), charge: Some(charge) })
    }

    /// Nobody else takes part any more.
    fn remove(&self, flight: &Arc<Flight>) {
        let mut flights = self.shard(&flight.key).lock();
        if flights.get(&flight.key).is_some_and(|found| Arc::ptr_eq(found, flight)) {
            flights.remove(&flight.key);
        }
    }
}

impl PieceRead {
    fn poll_bytes(&self, cx: &mut Context<'_>) -> Poll<Result<Bytes, Failure>> {
        let mut state = self.flight.state.lock();
        let state_now = &mut *state;
        let reading = match &mut state_now.stage {
            Stage::Done(result) => return Poll::Ready(result.clone()),
            Stage::Reading(reading) => reading,
            Stage::Cancelled => unreachable!("polled by one who has left"),
        };
        let waiting = &mut state_now.waiting[self.place];
        if !waiting.as_ref().is_some_and(|waiting| waiting.will_wake(cx.waker())) {
            *waiting = Some(cx.waker().clone());
        }
        // What is polled takes locks of its own and submits tasks, and wakes nobody: its wakers are called by others.
        let relay = Waker::from(Arc::clone(&self.flight));
        let Poll::Ready(result) = reading.as_mut().poll(&mut Context::from_waker(&relay)) else {
            return Poll::Pending;
        };
        state_now.stage = Stage::Done(result.clone());
        state_now.waiting[self.place] = None;
        drop(state);
        self.flights.remove(&self.flight);
        if let Ok(bytes) = &result {
            count_piece(bytes.rung, bytes.piece.len() as u64);
        }
        Arc::clone(&self.flight).wake();
        Poll::Ready(result)
    }
}

impl Future for PieceRead {
    type Output = io::Result<crate::Bytes>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<crate::Bytes>> {
        let Poll::Ready(result) = self.poll_bytes(cx) else { return Poll::Pending };
        let bytes = match result {
            Ok(bytes) => bytes,
            Err(failure) => return Poll::Ready(Err(failure.into())),
        };
        if bytes.was_resident {
            let key = &self.flight.key;
            self.file.note_found(&self.knowledge, key.offset, key.length, bytes.piece.len());
        }
        let charge = self.charge.take().expect("polled until it is ready");
        Poll::Ready(Ok(crate::Bytes::of_read(bytes.memory, bytes.piece, charge)))
    }
}

impl Drop for PieceRead {
    fn drop(&mut self) {
        // In the order in which others take the locks.
        let mut flights = self.flights.shard(&self.flight.key).lock();
        let mut state = self.flight.state.lock();
        state.waiting[self.place] = None;
        state.free.push(self.place);
        state.interested -= 1;
        if state.interested > 0 {
            let is_reading = matches!(state.stage, Stage::Reading(_));
            drop(state);
            drop(flights);
            // This one may have been woken instead of those who still wait.
            if is_reading {
                Arc::clone(&self.flight).wake();
            }
            return;
        }
        let stage = std::mem::replace(&mut state.stage, Stage::Cancelled);
        let is_current = flights.get(&self.flight.key).is_some_and(|found| Arc::ptr_eq(found, &self.flight));
        let removed = is_current.then(|| flights.remove(&self.flight.key));
        drop(state);
        drop(flights);
        drop((stage, removed));
    }
}

/// What is to be read, into memory of so many bytes.
#[derive(Clone)]
struct Piece {
    file: File,
    offset: u64,
    length: usize,
    size: usize,
}

async fn read(piece: Piece, pool: ThreadPool, knowledge: Arc<Knowledge>, mut how: ReadHow) -> Result<Bytes, Failure> {
    let device = piece.file.metadata().device;
    if how.unlooked {
        count_event(Event::Unlooked);
        let wanted = piece.clone();
        let is_due = piece.file.writes_access_time();
        let found = if is_due {
            how.unlooked = false;
            let access = knowledge.begin_access(device);
            let own = piece.file.device();
            let line = if access.is_some() { own.accesses() } else { own };
            let look = move || {
                let _access = access;
                wanted.look()
            };
            match pool.run_for(line, look).await {
                // A wait that is seldom is better than to refuse what is in memory; but not while others do wait.
                Err(PoolError::Overflow { .. }) if !knowledge.device(device).are_accesses_stuck(now_anywhere()) => {
                    piece.look()
                }
                found => found?,
            }
        } else if let Some(look) = knowledge.begin_look(device) {
            let look = move || {
                // The thread's, and not that of those who wait: they may leave before it is done.
                let _look = look;
                wanted.look()
            };
            pool.run_for(piece.file.device().looks(), look).await?
        } else {
            None
        };
        if let Some(found) = found {
            count_event(Event::PoolHit);
            return Ok(found);
        }
    }
    let is_trusted = !knowledge.device(device).is_distrusted(now_anywhere());
    if how.by_ring
        && is_trusted
        && !piece.file.writes_access_time()
        && let Some(result) = piece.read_by_ring(how.direct, &pool, knowledge.begin_read(device)).await?
    {
        return Ok(result);
    }
    let line = piece.file.device();
    let outstanding = knowledge.begin_read(device);
    let reading = move || {
        let _outstanding = outstanding;
        piece.read(how.direct, how.unlooked)
    };
    let bytes = pool.run_for(line, reading).await??;
    if bytes.was_resident {
        count_event(Event::PoolHit);
    }
    Ok(bytes)
}

impl Piece {
    /// What is in memory now, if that is the beginning.
    fn look(&self) -> Option<Bytes> {
        let mut memory = self.memory();
        let read = self.file.read_nowait(self.offset, &mut memory[..self.length]);
        // Also one that was refused has written it.
        self.file.note_accessed();
        match read {
            Some(Ok(count)) => {
                let count = self.file.still_there(self.offset, count);
                Some(Bytes { memory: Arc::new(memory), piece: 0..count, rung: Rung::Pool, was_resident: true })
            }
            // The read proper will say the same.
            Some(Err(_)) | None => None,
        }
    }

    /// All of it, however long that takes.
    fn read(&self, direct: Option<u32>, looks_first: bool) -> io::Result<Bytes> {
        if looks_first && let Some(found) = self.look() {
            return Ok(found);
        }
        let (memory, piece) = match direct {
            Some(alignment) => self.file.read_direct(self.offset, self.length, alignment)?,
            None => {
                let mut memory = self.memory();
                let count = self.file.read_blocking(self.offset, &mut memory[..self.length])?;
                (memory, 0..self.file.still_there(self.offset, count))
            }
        };
        Ok(Bytes { memory: Arc::new(memory), piece, rung: Rung::Pool, was_resident: false })
    }

    /// Has the loop's ring read it. `None` where that would only be another kind of threads, or is not to be had.
    async fn read_by_ring(
        &self,
        direct: Option<u32>,
        pool: &ThreadPool,
        outstanding: Outstanding,
    ) -> Result<Option<Bytes>, Failure> {
        if !mounts::reads_asynchronously(self.file.metadata().device) {
            return Ok(None);
        }
        let is_direct = match self.file.opened_directly() {
            _ if direct.is_none() => false,
            Some(opened) => opened.is_some(),
            None => {
                let file = self.file.clone();
                pool.run_for(self.file.device(), move || file.direct().is_some()).await?
            }
        };
        let blocks = direct.filter(|_| is_direct).map(|alignment| Blocks::around(self.offset, self.length, alignment));
        let (memory, into, offset, blocks) = match blocks {
            Some(mut blocks) => (std::mem::take(&mut blocks.memory), blocks.into.clone(), blocks.offset, Some(blocks)),
            None => (self.memory(), 0..self.length, self.offset, None),
        };
        let read = FileRead { file: self.file.clone(), is_direct, memory, into, offset, outstanding };
        let begun = Environment::try_with(|environment| environment.driver.read_file(read).ok()).flatten();
        let Some(reading) = begun else { return Ok(None) };
        let (memory, result) = reading.await;
        let count = match result {
            Ok(count) => count,
            // The loop has ended on which it was begun, or the kernel does not want to: the pool does it.
            Err(Errno::CANCELED | Errno::AGAIN | Errno::INTR | Errno::INVAL | Errno::OPNOTSUPP) => return Ok(None),
            Err(errno) => return Err(io::Error::from(errno).into()),
        };
        // Past the page cache a read and the cutting off of its file come one after the other.
        let piece = match blocks {
            Some(blocks) => blocks.piece(count),
            None => 0..self.file.still_there(self.offset, count),
        };
        // Short for another reason than the end of the file.
        if piece.is_empty() && self.offset < self.file.metadata().size {
            return Ok(None);
        }
        Ok(Some(Bytes { memory: Arc::new(memory), piece, rung: Rung::Ring, was_resident: false }))
    }

    fn memory(&self) -> Box<[u8]> {
        vec![0; self.size].into_boxed_slice()
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;
    use crate::pool::Device;
    use crate::residency::{FileHash, GRANULE, Residency};
    use crate::{EventLoop, LoopOptions};

    #[test]
    fn a_short_look_says_that_the_rest_is_not_in_memory() {
        let file = std::fs::File::open("/proc/self/exe").and_then(File::from_std).expect("it runs");
        let metadata = file.metadata();
        let (knowledge, hash) =
            (Knowledge::new(Residency::with_slots(64)), FileHash::new(metadata.device, metadata.inode));
        let is_known = |granule: u64| knowledge.residency.age(hash, granule, now_anywhere()).is_some();
        let length = 2 * GRANULE as usize;
        file.note_found(&knowledge, 0, length, length);
        assert!(is_known(0) && is_known(1) && !is_known(2));
        file.note_found(&knowledge, 0, length, length - 4096);
        assert!(is_known(0) && !is_known(1));
        // At its end nothing is missing.
        let last = (metadata.size - 1) / GRANULE;
        let rest = (metadata.size - last * GRANULE) as usize;
        file.note_found(&knowledge, last * GRANULE, length, rest);
        assert!(is_known(last));
    }

    #[test]
    fn the_places_of_those_who_have_left_are_given_to_others() {
        let file = std::fs::File::open("/proc/self/exe").and_then(File::from_std).expect("it runs");
        let (flights, knowledge) = (Flights::new(), Knowledge::new(Residency::with_slots(2)));
        let pool = ThreadPool::new("test", 1, 1);
        let join = || flights.join(&knowledge, &file, &pool, (0, 1000), ReadHow::default()).expect("memory");
        let (_first, mut second) = (join(), join());
        for _ in 0..100 {
            second = join();
        }
        let state = second.flight.state.lock();
        assert!(state.interested == 2 && state.waiting.len() <= 3, "{}", state.waiting.len());
    }

    #[test]
    fn a_file_whose_content_was_changed_is_another_one_even_if_its_time_was_set_back() {
        let path = std::env::temp_dir().join(format!("gale-reads-{}", std::process::id()));
        std::fs::write(&path, "one").expect("ours");
        let open = || std::fs::File::open(&path).expect("ours");
        let modified = open().metadata().and_then(|metadata| metadata.modified()).expect("a time");
        let key = || File::from_std(open()).expect("a file").key();
        let before = key();
        assert_eq!(before, key());
        let changed = rustix::fs::fstat(open()).map(|stat| (stat.st_ctime, stat.st_ctime_nsec)).expect("ours");
        // The clock of file systems is coarse.
        while rustix::fs::fstat(open()).map(|stat| (stat.st_ctime, stat.st_ctime_nsec)) == Ok(changed) {
            std::fs::write(&path, "two").expect("ours");
            let file = std::fs::File::options().write(true).open(&path).expect("ours");
            file.set_modified(modified).expect("ours");
        }
        let after = key();
        std::fs::remove_file(&path).expect("ours");
        assert!(before != after || matches!(before, FileKey::Itself(_)));
    }

    #[test]
    fn while_looks_wait_that_write_times_of_access_others_stand_in_the_devices_line() {
        let path = std::env::temp_dir().join(format!("gale-reads-due-{}", std::process::id()));
        std::fs::write(&path, [b'x'; 1000]).expect("ours");
        let file = std::fs::File::open(&path).expect("ours");
        std::fs::remove_file(&path).expect("ours");
        file.set_times(std::fs::FileTimes::new().set_accessed(std::time::SystemTime::UNIX_EPOCH)).expect("ours");
        let file = File::from_std(file).expect("a file");
        if !file.writes_access_time() {
            return eprintln!("skipped: reads write no times of access here");
        }
        let (flights, knowledge) = (Flights::new(), Knowledge::new(Residency::with_slots(2)));
        let (pool, device) = (ThreadPool::new("test", 8, 100), file.metadata().device);
        let gate = Arc::new(Mutex::new(()));
        let closed = gate.lock();
        let hang = |device: Device| {
            let gate = Arc::clone(&gate);
            pool.detach(device, move || drop(gate.lock())).expect("room");
        };
        (0..4).for_each(|_| hang(file.device()));
        let looks: Vec<_> = std::iter::from_fn(|| knowledge.begin_access(device)).collect();
        looks.iter().for_each(|_| hang(file.device().accesses()));
        // All threads; there are others only for other devices now.
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while pool.counters().running < 4 + looks.len() {
            assert!(std::time::Instant::now() < end, "the threads do not come");
            std::thread::yield_now();
        }
        assert_eq!(pool.counters().running, 8);
        let how = ReadHow { unlooked: true, ..ReadHow::default() };
        let join = |number: u64| flights.join(&knowledge, &file, &pool, (number * 100, 100), how).expect("memory");
        let mut reads: Vec<PieceRead> = (0..10).map(join).collect();
        EventLoop::new(LoopOptions::default()).expect("a loop").run(async {
            for _ in 0..2 {
                for read in &mut reads {
                    let is_pending = poll_fn(|cx| Poll::Ready(Pin::new(&mut *read).poll(cx).is_pending())).await;
                    assert!(is_pending);
                }
                pool.run_for(Device::key(7), || ()).await.expect("a thread for another device");
            }
            // Nobody waits on the loop for what threads wait for.
            let full = ThreadPool::new("full", 1, 0);
            let held = Arc::clone(&gate);
            full.detach(Device::NONE, move || drop(held.lock())).expect("room");
            while !knowledge.device(device).are_accesses_stuck(now_anywhere()) {
                crate::yield_now().await;
            }
            let refused = flights.join(&knowledge, &file, &full, (0, 100), how).expect("memory").await;
            assert!(refused.is_err_and(|error| error.to_string().contains("queue overflow")));
            drop((closed, looks));
            for read in reads {
                assert_eq!(read.await.expect("read")[..], [b'x'; 100]);
            }
        });
    }
}
