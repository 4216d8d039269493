//! Reads of pieces that are not in memory, each done once for all that want it at the same time
//! ([`super::single_flight`]).
//!
//! ```text
//!   helper asked ──► in memory: read here         only for pieces of which nothing is known
//!     └─────► read by the pool (or an io_uring)     stands in its device's queue; counts as in flight there
//! ```
//!
//! All waiters get the same memory, and each is charged for it. Pieces are the same if device, inode, size and times of
//! change of the open file (a replaced file has another content), offset, length and pool are: so no request waits in a
//! pool that it did not choose. A file on a file system that waits for others is only the same as itself, because many
//! of those number files as they like. Later requests find the piece in the page cache.
//!
//! If the pool is full, the read fails: the loop never does it instead.

use std::future::Future;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use gale_runtime::{Charge, FileRead, PoolError, ReadMemory, ReadSource, ThreadPool, begin_file_read, watch_waiting};
use rustix::io::Errno;

use super::File;
use super::counters::{Event, Rung, count_event, count_piece};
use super::file_system::file_system;
use super::page_cache::{Condition, InFlight, PageCache, Residency};
use super::read::Blocks;
use super::single_flight::{Joined, SingleFlight};

/// Options of a read.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct ReadHow {
    /// True if the piece may be in memory, because it was not checked.
    pub unlooked: bool,
    /// True if pages behind the piece are to be held in memory for `sendfile`, as far as they are there.
    pub for_sendfile: bool,
    /// Use `O_DIRECT`, with this alignment.
    pub direct: Option<u32>,
    /// Read with the loop's io_uring if it has one; otherwise with the pool.
    pub by_ring: bool,
}

/// Identifies a piece of a file to be read.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Key {
    file: FileKey,
    offset: u64,
    length: usize,
    pool: usize,
    how: ReadHow,
}

/// Identity of an open file.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum FileKey {
    Content { device: u64, inode: u64, size: u64, modified: (i64, u32), changed: (i64, u32) },
    Itself(usize),
}

/// Memory that was read into, the range of the piece in it, and how it was read.
#[derive(Clone)]
pub(crate) struct Bytes {
    memory: Arc<ReadMemory>,
    piece: Range<usize>,
    rung: Rung,
    /// The piece was in memory after all.
    was_resident: bool,
}

/// An error for several recipients.
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

pub(crate) type Reads = SingleFlight<Key, Result<Bytes, Failure>>;

/// A read of a piece. Dropping it leaves the shared read.
#[must_use = "the read is given up when this is dropped"]
pub struct PieceRead {
    read: Joined<Key, Result<Bytes, Failure>>,
    /// The charge for the memory, from the beginning; moved to the result.
    charge: Option<Charge>,
}

impl PieceRead {
    /// Joins the read of this piece: one in flight, or a new one. Errors: `OutOfMemory` at the hard limit of leases.
    pub(super) fn begin(
        page_cache: &Arc<PageCache>,
        file: &File,
        pool: &ThreadPool,
        (offset, length): (u64, usize),
        how: ReadHow,
    ) -> io::Result<PieceRead> {
        // The pool thread allocates when it begins.
        let charge = Charge::for_length(length)?;
        let key = Key { file: file.key(), offset, length, pool: pool.identity(), how };
        let (read, was_in_flight) = page_cache.reads.join(key, || {
            let piece = Piece { file: file.clone(), offset, length };
            Box::pin(read(piece, pool.clone(), Arc::clone(page_cache), how))
        });
        if was_in_flight {
            count_event(Event::Shared);
        }
        Ok(PieceRead { read, charge: Some(charge) })
    }
}

impl Future for PieceRead {
    type Output = io::Result<gale_runtime::Bytes>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<gale_runtime::Bytes>> {
        let Poll::Ready(result) = Pin::new(&mut self.read).poll(cx) else { return Poll::Pending };
        Poll::Ready(result.map_err(io::Error::from).map(|bytes| {
            let charge = self.charge.take().expect("polled until it is ready");
            gale_runtime::Bytes::of_read(bytes.memory, bytes.piece, charge)
        }))
    }
}

#[derive(Clone)]
struct Piece {
    file: File,
    offset: u64,
    length: usize,
}

async fn read(piece: Piece, pool: ThreadPool, page_cache: Arc<PageCache>, how: ReadHow) -> Result<Bytes, Failure> {
    let (file, offset, length) = (piece.file.clone(), piece.offset, piece.length);
    let bytes = read_somehow(piece, pool, &page_cache, how).await?;
    if bytes.was_resident {
        count_event(Event::PoolHit);
        file.note_found(&page_cache, offset, length, bytes.piece.len());
    }
    count_piece(bytes.rung, bytes.piece.len() as u64);
    Ok(bytes)
}

async fn read_somehow(
    piece: Piece,
    pool: ThreadPool,
    page_cache: &Arc<PageCache>,
    how: ReadHow,
) -> Result<Bytes, Failure> {
    let (device, queue) = (piece.file.metadata().device, piece.file.device());
    let mut looks_first = false;
    if how.unlooked {
        count_event(Event::Unlooked);
        let writes_access_time = piece.file.writes_access_time();
        let residency = match writes_access_time {
            true => Residency::Unknown,
            false => piece.file.ask(page_cache, piece.offset, piece.length as u64, how.for_sendfile).await,
        };
        if residency == Residency::InMemory {
            if let Some(found) = piece.file.watched(|| piece.look(Rung::Read)) {
                return Ok(found);
            }
            piece.file.note_missing(page_cache, piece.offset);
        }
        let is_worth_a_look = match residency {
            Residency::InMemory | Residency::Missing => false,
            Residency::NearMissing => true,
            Residency::Unknown => writes_access_time || piece.file.is_worth_a_look(page_cache, piece.offset),
        };
        let look = if is_worth_a_look { page_cache.begin_look(device, writes_access_time) } else { None };
        if look.is_some() || writes_access_time {
            // A check that updates the access time precedes the read in any case.
            let look_queue = if look.is_some() { queue.looks() } else { queue };
            let wanted = piece.clone();
            let look = move || {
                // Owned by the task, and not by the waiters, who may leave before it ends.
                let _look = look;
                wanted.look(Rung::Pool)
            };
            if let Some(found) = pool.run_for(look_queue, look).await? {
                return Ok(found);
            }
        } else {
            looks_first = matches!(residency, Residency::NearMissing | Residency::Unknown);
        }
    }
    if how.by_ring
        && page_cache.condition(device) < Condition::NotAnswering
        && !piece.file.writes_access_time()
        && let Some(result) = piece.read_by_ring(how.direct, &pool, page_cache.begin_read(device)).await?
    {
        return Ok(result);
    }
    // Counted while it waits for a thread too.
    let in_flight = page_cache.begin_read(device);
    let reading = move || {
        let (result, has_waited) = watch_waiting(|| piece.read(how.direct, looks_first));
        let was_resident = result.as_ref().is_ok_and(|found| found.was_resident);
        in_flight.end(has_waited && !was_resident);
        result
    };
    Ok(pool.run_for(queue, reading).await??)
}

impl Piece {
    /// Reads the beginning of the piece, if it is in memory.
    fn look(&self, rung: Rung) -> Option<Bytes> {
        let mut memory = self.memory();
        let read = self.file.read_nowait(self.offset, &mut memory);
        // A read that was refused has updated the access time too.
        self.file.note_accessed();
        match read {
            Some(Ok(count)) => {
                let count = self.file.still_there(self.offset, count);
                Some(Bytes { memory: Arc::new(memory), piece: 0..count, rung, was_resident: true })
            }
            // The real read will fail in the same way.
            Some(Err(_)) | None => None,
        }
    }

    /// Reads all of the piece; may block.
    fn read(&self, direct: Option<u32>, looks_first: bool) -> io::Result<Bytes> {
        if looks_first && let Some(found) = self.look(Rung::Pool) {
            return Ok(found);
        }
        let (memory, piece) = match direct {
            Some(alignment) => self.file.read_direct(self.offset, self.length, alignment)?,
            None => {
                let mut memory = self.memory();
                let count = self.file.read_blocking(self.offset, &mut memory)?;
                (memory, 0..self.file.still_there(self.offset, count))
            }
        };
        Ok(Bytes { memory: Arc::new(memory), piece, rung: Rung::Pool, was_resident: false })
    }

    /// Reads the piece with the loop's ring. `None` if there is no ring, or the ring would only use kernel threads.
    async fn read_by_ring(
        &self,
        direct: Option<u32>,
        pool: &ThreadPool,
        in_flight: InFlight,
    ) -> Result<Option<Bytes>, Failure> {
        let device = self.file.metadata().device;
        if !file_system(|file_system| file_system.reads_asynchronously(device)) {
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
        let source = RingRead { file: self.file.clone(), is_direct, in_flight: Some(in_flight) };
        let read = FileRead { source: Box::new(source), memory, into, offset };
        let Some(reading) = begin_file_read(read) else { return Ok(None) };
        let (memory, result) = reading.await;
        let count = match result {
            Ok(count) => count,
            // The loop that began the read has ended, or the kernel refuses: the pool reads instead.
            Err(Errno::CANCELED | Errno::AGAIN | Errno::INTR | Errno::INVAL | Errno::OPNOTSUPP) => return Ok(None),
            Err(errno) => return Err(io::Error::from(errno).into()),
        };
        // With `O_DIRECT` a read and a truncation of the file are serialized.
        let piece = match blocks {
            Some(blocks) => blocks.piece(count),
            None => 0..self.file.still_there(self.offset, count),
        };
        // Empty although the file does not end here.
        if piece.is_empty() && self.offset < self.file.metadata().size {
            return Ok(None);
        }
        Ok(Some(Bytes { memory: Arc::new(memory), piece, rung: Rung::Ring, was_resident: false }))
    }

    fn memory(&self) -> ReadMemory {
        ReadMemory::new(self.length)
    }
}

/// The file of a read that the loop's ring does.
struct RingRead {
    file: File,
    /// Use the `O_DIRECT` descriptor, which has been opened.
    is_direct: bool,
    /// Counts the read on its device until it has ended, even if its waiter has left.
    in_flight: Option<InFlight>,
}

impl ReadSource for RingRead {
    fn descriptor(&self) -> BorrowedFd<'_> {
        let direct = if self.is_direct { self.file.opened_directly().flatten() } else { None };
        direct.unwrap_or_else(|| self.file.as_fd())
    }

    fn handle_end(&mut self, is_done: bool) {
        match self.in_flight.take() {
            Some(in_flight) if is_done => in_flight.end(true),
            in_flight => drop(in_flight),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use parking_lot::Mutex;

    use super::*;
    use gale_runtime::{Device, EventLoop, LoopOptions};

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
            return crate::skips::skip("reads write no times of access here");
        }
        let page_cache = PageCache::with_slots(8);
        let (pool, device) = (ThreadPool::new("test", 8, 100), file.metadata().device);
        let gate = Arc::new(Mutex::new(()));
        let closed = gate.lock();
        let hang = |device: Device| {
            let gate = Arc::clone(&gate);
            pool.detach(device, move || drop(gate.lock())).expect("room");
        };
        (0..4).for_each(|_| hang(file.device()));
        let looks: Vec<_> = std::iter::from_fn(|| page_cache.begin_look(device, true)).collect();
        looks.iter().for_each(|_| hang(file.device().looks()));
        (4 + looks.len()..8).for_each(|_| hang(file.device().writes()));
        // Now all threads are used; further ones start only for other devices.
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while pool.counters().running < 8 {
            assert!(std::time::Instant::now() < end, "the threads do not come");
            std::thread::yield_now();
        }
        assert_eq!(pool.counters().running, 8);
        let how = ReadHow { unlooked: true, ..ReadHow::default() };
        let join = |number: u64| PieceRead::begin(&page_cache, &file, &pool, (number * 100, 100), how).expect("memory");
        let mut reads: Vec<PieceRead> = (0..10).map(join).collect();
        EventLoop::new(LoopOptions::default()).expect("a loop").run(async {
            for _ in 0..2 {
                for read in &mut reads {
                    let is_pending = poll_fn(|cx| Poll::Ready(Pin::new(&mut *read).poll(cx).is_pending())).await;
                    assert!(is_pending);
                }
                pool.run_for(Device::key(7), || ()).await.expect("a thread for another device");
            }
            // The loop does not read in place of a pool thread, since it would have to wait.
            let full = ThreadPool::new("full", 1, 0);
            let held = Arc::clone(&gate);
            full.detach(Device::NONE, move || drop(held.lock())).expect("room");
            let refused = PieceRead::begin(&page_cache, &file, &full, (0, 100), how).expect("memory").await;
            assert!(refused.is_err_and(|error| error.to_string().contains("queue overflow")));
            drop((closed, looks));
            for read in reads {
                assert_eq!(read.await.expect("read")[..], [b'x'; 100]);
            }
        });
    }
}
