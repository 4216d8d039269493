//! A file that is written sequentially by threads of a pool.
//!
//! ```text
//!   push ──► queue (bounded) ──► one write in flight, of all queued ──► written: readers may follow (growing.rs)
//! ```
//!
//! After each write the next one of the same file goes to the end of the pool's queue, so that a fast writer does not
//! starve others. Written pieces return to the loop, which reuses their memory.
//!
//! Accepted pieces are written as long as the writer exists, even if no future waits for them; futures may be dropped
//! at any time. The loop never touches the file, and the pool closes it. A write that a full pool refuses is retried
//! for some seconds; meanwhile the queue stays bounded.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::mem;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use gale_runtime::waiters::Waiters;
use gale_runtime::{Bytes, Device, PoolError, ThreadPool, default_pool, spawn, try_now};
use parking_lot::Mutex;

use super::file_system::file_system;
use super::growing::{GrowingEnd, GrowingFile};
use super::{File, FileError, OpenFlags, likely_device, open_blocking};

/// Default limit of queued bytes: while a write is in flight, the next one gathers.
const QUEUED_BYTES_MAX: usize = 256 * 1024;

/// Limit of queued pieces, however small. One call writes them all; the kernel takes up to 1024.
const QUEUED_PIECES_MAX: usize = 256;

/// Writes a file from its beginning. If it is dropped before [`Writer::finish`], the rest is not written, and readers
/// get [`GrowingEnd::Failed`].
pub struct Writer {
    growing: Arc<Growing>,
    queued_bytes_max: usize,
}

impl Writer {
    /// Opens a file to write it from its beginning, in the pool `default`. The flags say whether it is created or
    /// truncated, and must include `read` if it is to be read. Reads through it do not update its access time. Errors:
    /// open(2)'s and the pool's.
    pub async fn open(path: &Path, flags: OpenFlags) -> Result<Writer, FileError> {
        let flags = OpenFlags { write: true, no_access_time: true, ..flags };
        let path: Arc<Path> = path.into();
        let opened = {
            let path = Arc::clone(&path);
            default_pool().run_for(likely_device(&path).writes(), move || open_blocking(&path, flags))
        };
        let opened = opened.await.unwrap_or_else(|refused| Err(refused.into()));
        opened.map(|file| Writer::new(file, Arc::clone(&path))).map_err(|error| FileError::new("open", path, error))
    }

    /// Writes to a file that is open for writing, from its beginning, in the pool `default`. The path is for messages.
    pub fn new(file: File, path: impl Into<Arc<Path>>) -> Writer {
        file.note_writer();
        let state = Mutex::new(State::default());
        let queue = file.device().writes();
        let growing = Growing { path: path.into(), queue, pool: default_pool(), state, file };
        Writer { growing: Arc::new(growing), queued_bytes_max: QUEUED_BYTES_MAX }
    }

    /// Uses another pool; only before anything is written or read.
    pub fn in_pool(mut self, pool: &ThreadPool) -> Writer {
        Arc::get_mut(&mut self.growing).expect("an unused writer has one owner").pool = pool.clone();
        self
    }

    /// Sets the limit of queued bytes; the last piece may exceed it.
    pub fn with_queued_bytes_max(mut self, bytes: usize) -> Writer {
        self.queued_bytes_max = bytes.max(1);
        self
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.growing.path
    }

    /// Number of bytes in the file.
    pub fn written(&self) -> u64 {
        self.growing.state.lock().written
    }

    /// A handle to read the file while it grows.
    pub fn follow(&self) -> GrowingFile {
        GrowingFile::of(&self.growing)
    }

    /// Waits until there is room for a piece. Errors: a write has failed; each later call returns the same.
    pub fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), FileError>> {
        let bytes_max = self.queued_bytes_max;
        self.growing.poll(cx, |state| state.has_room(bytes_max))
    }

    /// Queues a piece, for which there must be room: once after each [`Writer::poll_ready`]. After a failure it is
    /// dropped.
    pub fn push(&mut self, piece: Bytes) {
        self.push_all([piece]);
    }

    /// Queues pieces, as [`Writer::push`] queues one: unless a write is in flight, one call writes them all.
    pub fn push_all(&mut self, pieces: impl IntoIterator<Item = Bytes>) {
        let mut state = self.growing.state.lock();
        let spent = mem::take(&mut state.spent);
        if state.end.is_none() {
            assert!(state.has_room(self.queued_bytes_max), "a piece is pushed without room for it");
            for piece in pieces.into_iter().filter(|piece| !piece.is_empty()) {
                state.queued_bytes += piece.len();
                state.queue.push_back(piece);
            }
        }
        drop(state);
        drop(spent);
        self.growing.begin();
    }

    /// Waits for room and queues a piece. If the future is dropped before, nothing was queued. Errors: a write has
    /// failed.
    pub async fn append(&mut self, piece: Bytes) -> Result<(), FileError> {
        poll_fn(|cx| self.poll_ready(cx)).await?;
        self.push(piece);
        Ok(())
    }

    /// Waits until everything queued is in the file. Errors: a write has failed.
    pub async fn flush(&mut self) -> Result<(), FileError> {
        poll_fn(|cx| self.growing.poll(cx, State::is_settled)).await
    }

    /// Writes what is queued, truncates the file, and writes it from its beginning again. There must be no readers.
    /// Pages of it that a socket still sends (`sendfile`) keep their content: they leave the file. Errors: a write has
    /// failed; ftruncate(2)'s and the pool's.
    pub async fn restart(&mut self) -> Result<(), FileError> {
        self.flush().await?;
        let (pool, queue, file) = (&self.growing.pool, self.growing.queue, self.growing.file.clone());
        let emptied = pool.run_when_there_is_room(queue, move || rustix::fs::ftruncate(&file, 0)).await;
        emptied
            .map_err(io::Error::from)
            .and_then(|result| result.map_err(io::Error::from))
            .map_err(|error| FileError::new("ftruncate", Arc::clone(&self.growing.path), error))?;
        self.growing.state.lock().written = 0;
        Ok(())
    }

    /// Writes what is queued; then the file is complete. Returns it for reading, with its current metadata. If the
    /// future is dropped before it is ready, the file is given up. Errors: a write has failed; fstat(2)'s.
    pub async fn finish(mut self) -> Result<File, FileError> {
        self.flush().await?;
        self.growing.end(GrowingEnd::Complete);
        let (path, pool, queue) = (Arc::clone(&self.growing.path), self.growing.pool.clone(), self.growing.queue);
        let growing = Arc::clone(&self.growing);
        drop(self);
        // Without readers this is the only handle.
        let file = Arc::try_unwrap(growing).map_or_else(|growing| growing.file.clone(), |growing| growing.file);
        // The metadata is in memory, unless the file system asks others.
        let refreshed = match file.waits_for_others() {
            true => {
                let renewed = pool.run_when_there_is_room(queue, move || file.renewed()).await;
                renewed.unwrap_or_else(|refused| Err(refused.into()))
            }
            false => file.renewed(),
        };
        refreshed.map_err(|error| FileError::new("fstat", path, error))
    }

    /// Stops writing although the source goes on, because the file is not wanted any more. Readers are told so.
    pub fn stop_storing(self) {
        self.growing.end(GrowingEnd::NoLongerStored(None));
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.growing.end(GrowingEnd::Failed);
    }
}

impl fmt::Debug for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Writer({:?}, {} bytes)", self.growing.path, self.written())
    }
}

/// State shared by the writer, the thread that writes and the readers.
pub(super) struct Growing {
    pub file: File,
    pub path: Arc<Path>,
    pub pool: ThreadPool,
    queue: Device,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Bytes>,
    /// Bytes of the queue and of the write in flight.
    queued_bytes: usize,
    /// A write is in flight or in the pool's queue.
    is_busy: bool,
    /// Written pieces, to be returned to the loop when it next waits.
    spent: Vec<Bytes>,
    written: u64,
    end: Option<GrowingEnd>,
    owner: Option<Waker>,
    readers: Waiters,
}

impl State {
    fn has_room(&self, bytes_max: usize) -> bool {
        self.queued_bytes < bytes_max && self.queue.len() < QUEUED_PIECES_MAX
    }

    fn is_settled(&self) -> bool {
        self.queue.is_empty() && !self.is_busy
    }

    /// Takes the wakers of all waiters, to be woken when the state is unlocked.
    fn take_wakers(&mut self) -> Vec<Waker> {
        let readers = self.readers.choose_all().into_iter().map(|(_, waker)| waker);
        self.owner.take().into_iter().chain(readers).collect()
    }
}

/// The growth of a file, for a reader.
pub(super) struct Growth {
    pub written: u64,
    pub end: Option<GrowingEnd>,
}

impl Growing {
    pub fn growth(&self) -> Growth {
        let state = self.state.lock();
        Growth { written: state.written, end: state.end.clone() }
    }

    /// Calls `f` with the waiting readers, if the file has not grown beyond `offset` and has not ended; otherwise
    /// returns its growth.
    pub fn wait_beyond<T>(&self, offset: u64, f: impl FnOnce(&mut Waiters) -> T) -> Result<T, Growth> {
        let mut state = self.state.lock();
        if state.written > offset || state.end.is_some() {
            return Err(Growth { written: state.written, end: state.end.clone() });
        }
        Ok(f(&mut state.readers))
    }

    /// Calls `f` with the waiting readers.
    pub fn with_readers<T>(&self, f: impl FnOnce(&mut Waiters) -> T) -> T {
        f(&mut self.state.lock().readers)
    }

    /// Waits until `is_so` for the writer.
    fn poll(self: &Arc<Self>, cx: &mut Context<'_>, is_so: impl Fn(&State) -> bool) -> Poll<Result<(), FileError>> {
        // Unless the pool was stopped, a write is queued then.
        self.begin();
        let mut state = self.state.lock();
        let spent = mem::take(&mut state.spent);
        let polled = match &state.end {
            Some(GrowingEnd::NoLongerStored(Some(error))) => Poll::Ready(Err(error.clone())),
            _ if is_so(&state) => Poll::Ready(Ok(())),
            _ => Poll::Pending,
        };
        let displaced = if polled.is_pending() { state.owner.replace(cx.waker().clone()) } else { state.owner.take() };
        drop(state);
        drop((spent, displaced));
        polled
    }

    /// Ends the growth, unless it has ended: nothing more is written.
    fn end(&self, end: GrowingEnd) {
        let mut state = self.state.lock();
        let is_first = state.end.is_none();
        state.end.get_or_insert(end);
        let wakers = if is_first { state.take_wakers() } else { Vec::new() };
        let (queue, spent) = (mem::take(&mut state.queue), mem::take(&mut state.spent));
        drop(state);
        drop((queue, spent));
        wakers.into_iter().for_each(Waker::wake);
    }

    fn failure(&self, error: impl Into<io::Error>) -> GrowingEnd {
        GrowingEnd::NoLongerStored(Some(FileError::new("pwrite", Arc::clone(&self.path), error)))
    }

    /// Starts a write of the queued pieces, unless one is in flight or in the pool's queue.
    fn begin(self: &Arc<Self>) {
        let mut state = self.state.lock();
        if state.is_busy || state.queue.is_empty() {
            return;
        }
        state.is_busy = true;
        drop(state);
        let write = Write { growing: Arc::clone(self), stage: Stage::Waits };
        if let Err(refused) = self.pool.detach(self.queue, move || write.run()) {
            self.begin_later(refused);
        }
    }

    /// Retries a write that the pool has refused. A thread that has just written is refused too if the pool has no
    /// queue, since it still counts as running.
    #[cold]
    fn begin_later(self: &Arc<Self>, refused: PoolError) {
        if refused == PoolError::Stopped || try_now().is_none() {
            return self.end(self.failure(refused));
        }
        // The refused write has marked itself as not busy.
        self.state.lock().is_busy = true;
        let write = Write { growing: Arc::clone(self), stage: Stage::Waits };
        let (pool, queue) = (self.pool.clone(), self.queue);
        // Only the write keeps it alive: when everything is written, the writer is the only owner of the file.
        let growing = Arc::downgrade(self);
        spawn(async move {
            let result = pool.run_when_there_is_room(queue, move || write.run()).await;
            // After a panic it has ended already.
            if let (Err(refused), Some(growing)) = (result, growing.upgrade()) {
                growing.end(growing.failure(refused));
            }
        });
    }

    /// Writes all pieces, even if the kernel takes only a part at a time. Returns the number of bytes written, and the
    /// error that stopped it.
    fn write_all(&self, pieces: &[Bytes], offset: u64) -> (u64, io::Result<()>) {
        let mut slices: Vec<IoSlice<'_>> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
        let (mut rest, mut written) = (&mut slices[..], 0);
        while !rest.is_empty() {
            match file_system(|file_system| file_system.write(self.file.as_fd(), rest, offset + written)) {
                Ok(0) => return (written, Err(io::ErrorKind::WriteZero.into())),
                Ok(count) => {
                    written += count as u64;
                    IoSlice::advance_slices(&mut rest, count);
                }
                Err(errno) => return (written, Err(errno.into())),
            }
        }
        (written, Ok(()))
    }
}

/// A write in flight or in the pool's queue; there is at most one. If it is dropped before it is done, the file is no
/// longer written.
struct Write {
    growing: Arc<Growing>,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Waits,
    Runs,
    Done,
}

impl Write {
    /// Writes what is queued, and passes on to the next write as long as there is more.
    fn run(self) {
        let mut write = self;
        while let Some(next) = write.write_batch() {
            match next.hand_on() {
                Ok(()) => return,
                Err(next) => write = next,
            }
        }
    }

    /// Queues the next batch in the pool, for any thread. If the pool has no room, returns it, and this thread writes
    /// it.
    fn hand_on(self) -> Result<(), Write> {
        let growing = Arc::clone(&self.growing);
        let next = Arc::new(Mutex::new(Some(self)));
        let own = Arc::clone(&next);
        let run = move || {
            let write = next.lock().take();
            write.into_iter().for_each(Write::run);
        };
        let Err(_refused) = growing.pool.detach(growing.queue, run) else { return Ok(()) };
        let refused = own.lock().take();
        refused.map_or(Ok(()), Err)
    }

    /// Writes what is queued now. Returns the next write if more was queued meanwhile.
    fn write_batch(mut self) -> Option<Write> {
        self.stage = Stage::Runs;
        let growing = Arc::clone(&self.growing);
        let (pieces, offset) = {
            let mut state = growing.state.lock();
            (Vec::from(mem::take(&mut state.queue)), state.written)
        };
        let (written, result) = growing.write_all(&pieces, offset);
        if written > 0 {
            // The bytes are in memory now, for readers.
            growing.file.note_sent(offset, written as usize);
        }
        let failure = result.err().map(|error| growing.failure(error));
        let mut state = growing.state.lock();
        state.written += written;
        state.queued_bytes -= pieces.iter().map(|piece| piece.len()).sum::<usize>();
        if let Some(failure) = failure {
            state.end.get_or_insert(failure);
        }
        // Drops pieces that will not be written any more, and written ones that no writer is waiting to reuse.
        let left = if state.end.is_some() { mem::take(&mut state.queue) } else { VecDeque::new() };
        let spent = if state.owner.is_some() { mem::replace(&mut state.spent, pieces) } else { pieces };
        state.is_busy = !state.queue.is_empty();
        self.stage = if state.is_busy { Stage::Waits } else { Stage::Done };
        let wakers = state.take_wakers();
        drop(state);
        drop((left, spent, growing));
        // Before any task is woken: the last owner then has the file alone.
        let next = Some(self).filter(|write| write.stage == Stage::Waits);
        wakers.into_iter().for_each(Waker::wake);
        next
    }
}

impl Drop for Write {
    fn drop(&mut self) {
        match self.stage {
            Stage::Done => {}
            Stage::Waits => {
                let mut state = self.growing.state.lock();
                state.is_busy = false;
                let owner = state.owner.take();
                drop(state);
                owner.into_iter().for_each(Waker::wake);
            }
            Stage::Runs => {
                self.growing.end(self.growing.failure(PoolError::Panicked));
                self.growing.state.lock().is_busy = false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use gale_runtime::{EventLoop, LoopOptions};

    #[test]
    fn write_that_finds_no_room_in_the_pool_is_done_by_the_thread_that_has_it() {
        let directory = Scratch::new();
        let path = directory.path().join("file");
        let file = std::fs::File::create(&path).unwrap();
        let pool = ThreadPool::new("test", 1, 0);
        let mut writer = Writer::new(File::from_std(file).unwrap(), path.clone()).in_pool(&pool);
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        pool.detach(Device::NONE, move || _ = receiver.recv()).unwrap();
        // As if a thread has written and found more to write.
        writer.growing.state.lock().is_busy = true;
        writer.push("all of it".into());
        let write = Write { growing: Arc::clone(&writer.growing), stage: Stage::Waits };
        let write = write.hand_on().expect_err("the only thread is busy");
        write.run();
        drop(sender);
        assert_eq!((writer.written(), &std::fs::read(&path).unwrap()[..]), (9, &b"all of it"[..]));
    }

    #[test]
    fn write_that_a_stopped_pool_drops_is_an_error() {
        let directory = Scratch::new();
        let path = directory.path().join("file");
        let file = File::from_std(std::fs::File::create(&path).unwrap()).unwrap();
        EventLoop::new(LoopOptions::default()).unwrap().run(async {
            let pool = ThreadPool::new("test", 1, 10);
            let mut writer = Writer::new(file, path).in_pool(&pool);
            let (sender, receiver) = std::sync::mpsc::channel::<()>();
            pool.detach(Device::NONE, move || _ = receiver.recv()).unwrap();
            writer.push("never written".into());
            assert!(!pool.stop(std::time::Duration::ZERO), "a thread hangs");
            let error = writer.flush().await.unwrap_err();
            assert!(error.to_string().ends_with("failed (the thread pool has stopped)"), "{error}");
            drop(sender);
        });
    }
}
