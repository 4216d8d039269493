//! State shared by a spool's writer, its readers and the task that writes the file.
//!
//! All of it belongs to one loop. Wakers are called while nothing is borrowed.

use std::cell::{RefCell, RefMut};
use std::collections::VecDeque;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use gale_files::{File, FileError};
use gale_runtime::{Buffer, Bytes, Lease, PoolError, TaskId, ThreadPool, abort, default_pool, spawn};

use super::temp_file::{TempFile, TempName};
use super::{SpoolError, SpoolOptions, store};

/// Size of the leases that gather copies.
pub(super) const CHUNK_BYTES: usize = 16 * 1024;

/// Shorter pieces are copied, since they may refer to much larger memory.
pub(super) const COPIED_BELOW: usize = 4 * 1024;

/// Bytes for which a write begins, unless the spool has ended. Each write wakes a thread.
pub(super) const WRITE_BYTES_MIN: usize = 64 * 1024;

/// Bytes that may wait to be in the file, including the write in flight. While one half is being written the other one
/// fills.
pub(super) const QUEUED_BYTES_MAX: usize = 128 * 1024;

// Gathered bytes are not written yet, so they must not fill the queue alone.
const _: () = assert!(WRITE_BYTES_MIN + CHUNK_BYTES <= QUEUED_BYTES_MAX);

pub(super) enum Source {
    Open,
    Whole,
    Failed(SpoolError),
}

/// State of the file.
enum Storage {
    /// Memory has had room for everything.
    NotNeeded,
    /// This task writes it.
    Runs(TaskId),
    /// Everything was written, or nothing more is written because the source has failed.
    Ended,
    Failed(FileError),
}

/// Consecutive pieces in memory.
#[derive(Default)]
struct Pieces {
    /// Pieces with their offsets.
    pieces: VecDeque<(u64, Bytes)>,
}

impl Pieces {
    fn push(&mut self, offset: u64, piece: Bytes) {
        if !piece.is_empty() {
            self.pieces.push_back((offset, piece));
        }
    }

    /// The part of a piece from this offset on.
    fn find(&self, offset: u64) -> Option<Bytes> {
        let following = self.pieces.partition_point(|(begin, _)| *begin <= offset);
        let (begin, piece) = self.pieces.get(following.checked_sub(1)?)?;
        let skipped = usize::try_from(offset - begin).ok().filter(|&skipped| skipped < piece.len())?;
        Some(piece.slice(skipped..))
    }

    /// Removes the pieces that end before this offset.
    fn take_before(&mut self, offset: u64) -> VecDeque<(u64, Bytes)> {
        let is_before = |(begin, piece): &(u64, Bytes)| begin + piece.len() as u64 <= offset;
        let count = self.pieces.iter().take_while(|piece| is_before(piece)).count();
        let rest = self.pieces.split_off(count);
        std::mem::replace(&mut self.pieces, rest)
    }

    fn bytes(&self) -> usize {
        self.pieces.iter().map(|(_, piece)| piece.len()).sum()
    }

    fn to_vec(&self) -> Vec<Bytes> {
        self.pieces.iter().map(|(_, piece)| piece.clone()).collect()
    }
}

struct SpoolFile {
    /// `None` while it is being finished and there can be no reader.
    file: Option<File>,
    path: Arc<Path>,
    /// Present while the file has a name that is removed with it.
    name: Option<TempName>,
}

struct State {
    /// `true` while the write end exists, even if it only waits for the file.
    has_writer: bool,
    source: Source,
    storage: Storage,
    /// Bytes appended so far.
    length: u64,
    /// The beginning, which stays in memory; its last bytes may still be in `chunk`.
    kept: Pieces,
    kept_length: u64,
    /// Bytes after the kept part that are in the file.
    stored: u64,
    file: Option<SpoolFile>,
    /// The bytes after those; they include the write in flight.
    queued: Pieces,
    /// Bytes being gathered: the newest ones, to be kept or queued.
    chunk: Buffer,
    writer: Option<Waker>,
    store: Option<Waker>,
    /// Wakers of readers that wait for more, each once.
    readers: Vec<Waker>,
}

/// State shared by a spool's ends and its task.
pub(super) struct Shared {
    options: SpoolOptions,
    state: RefCell<State>,
}

/// Place of the bytes that a reader wants.
pub(super) enum Found {
    /// At least one byte.
    Memory(Bytes),
    /// Bytes in the file, at this offset of it.
    File { file: File, offset: u64, length: u64 },
    /// The end of the spool.
    End,
}

/// Next step of the task that writes the file.
pub(super) enum Next {
    Write(Vec<Bytes>),
    /// Everything is in the file.
    Complete,
    /// Nothing more needs to be in the file.
    GiveUp,
}

/// For the writer.
impl Shared {
    pub fn new(options: SpoolOptions) -> Shared {
        let state = State {
            has_writer: true,
            source: Source::Open,
            storage: Storage::NotNeeded,
            length: 0,
            kept: Pieces::default(),
            kept_length: 0,
            stored: 0,
            file: None,
            queued: Pieces::default(),
            chunk: Buffer::new(),
            writer: None,
            store: None,
            readers: Vec::new(),
        };
        Shared { options, state: RefCell::new(state) }
    }

    pub fn poll_ready(&self, cx: &mut Context<'_>) -> Poll<Result<(), SpoolError>> {
        let mut state = self.state.borrow_mut();
        if let Source::Failed(error) = &state.source {
            return Poll::Ready(Err(error.clone()));
        }
        if state.has_room() {
            return Poll::Ready(Ok(()));
        }
        state.writer = Some(cx.waker().clone());
        Poll::Pending
    }

    pub fn append(self: &Rc<Self>, mut piece: Bytes) -> Result<(), SpoolError> {
        if piece.len() < COPIED_BELOW {
            return self.append_copy(&piece);
        }
        self.admit(piece.len())?;
        let mut state = self.state.borrow_mut();
        state.close_chunk();
        let kept = piece.split_to(piece.len().min(state.memory_room(self.options.memory_max)));
        state.kept_length += kept.len() as u64;
        state.push(kept);
        if !piece.is_empty() {
            self.begin_storage(&mut state);
            state.push(piece);
        }
        self.wake_for_more(state);
        Ok(())
    }

    pub fn append_copy(self: &Rc<Self>, bytes: &[u8]) -> Result<(), SpoolError> {
        self.admit(bytes.len())?;
        let mut state = self.state.borrow_mut();
        let (kept, queued) = bytes.split_at(bytes.len().min(state.memory_room(self.options.memory_max)));
        let mut copied = state.copy(kept);
        if copied.is_ok() && !queued.is_empty() {
            self.begin_storage(&mut state);
            copied = state.copy(queued);
        }
        self.wake_for_more(state);
        // The only possible error is a refused lease.
        copied.map_err(|_| self.refuse(SpoolError::NoMemory))
    }

    /// Checks that this many bytes may be appended.
    fn admit(&self, length: usize) -> Result<(), SpoolError> {
        let state = self.state.borrow();
        if let Source::Failed(error) = &state.source {
            return Err(error.clone());
        }
        assert!(state.has_room(), "a piece is appended without room for it");
        let length = state.length + length as u64;
        drop(state);
        if self.options.length_max.is_some_and(|length_max| length > length_max) {
            return Err(self.refuse(SpoolError::TooLong));
        }
        Ok(())
    }

    fn refuse(&self, error: SpoolError) -> SpoolError {
        self.end(Source::Failed(error.clone()));
        error
    }

    pub fn begin_file(self: &Rc<Self>) {
        self.begin_storage(&mut self.state.borrow_mut());
    }

    /// Directs later bytes to the file.
    fn begin_storage(self: &Rc<Self>, state: &mut State) {
        if matches!(state.storage, Storage::NotNeeded) {
            state.close_chunk();
            state.storage = Storage::Runs(spawn(store::store(Rc::downgrade(self))));
        }
    }

    /// Wakes the readers, and the writing task if a write is due.
    fn wake_for_more(&self, mut state: RefMut<'_, State>) {
        let readers = std::mem::take(&mut state.readers);
        let store = if state.is_write_due() { state.store.take() } else { None };
        drop(state);
        readers.into_iter().chain(store).for_each(Waker::wake);
    }

    /// `true` while the write end exists, even if it only waits for the file.
    pub fn has_writer(&self) -> bool {
        self.state.borrow().has_writer
    }

    pub fn note_writer_gone(&self) {
        self.state.borrow_mut().has_writer = false;
    }

    /// `true` if more may come.
    pub fn is_open(&self) -> bool {
        matches!(self.state.borrow().source, Source::Open)
    }

    /// Marks the end, unless it was marked before.
    pub fn end(&self, source: Source) {
        let mut state = self.state.borrow_mut();
        if !matches!(state.source, Source::Open) {
            return;
        }
        if matches!(source, Source::Whole) {
            state.close_chunk();
        }
        state.source = source;
        self.wake_all(state);
    }

    fn wake_all(&self, mut state: RefMut<'_, State>) {
        let readers = std::mem::take(&mut state.readers);
        let others = [state.store.take(), state.writer.take()];
        drop(state);
        readers.into_iter().chain(others.into_iter().flatten()).for_each(Waker::wake);
    }

    /// Waits until everything that does not stay in memory is in the file.
    pub fn poll_stored(&self, cx: &mut Context<'_>) -> Poll<Result<(), SpoolError>> {
        let mut state = self.state.borrow_mut();
        match (&state.source, &state.storage) {
            (Source::Failed(error), _) => Poll::Ready(Err(error.clone())),
            (_, Storage::Failed(error)) => Poll::Ready(Err(SpoolError::File(error.clone()))),
            (_, Storage::NotNeeded | Storage::Ended) => Poll::Ready(Ok(())),
            (_, Storage::Runs(_)) => {
                state.writer = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

/// For inspection.
impl Shared {
    pub fn length(&self) -> u64 {
        self.state.borrow().length
    }

    pub fn queued_bytes(&self) -> usize {
        self.state.borrow().queued_bytes()
    }

    pub fn stored(&self) -> u64 {
        self.state.borrow().stored
    }

    pub fn memory(&self) -> Vec<Bytes> {
        self.state.borrow().kept.to_vec()
    }

    pub fn join_memory(&self) -> Result<(), SpoolError> {
        let mut state = self.state.borrow_mut();
        if state.kept.pieces.len() < 2 {
            return Ok(());
        }
        let mut whole = Buffer::new();
        // The only possible error is a refused lease.
        whole.spare(state.kept.bytes()).map_err(|_| SpoolError::NoMemory)?;
        for (_, piece) in &state.kept.pieces {
            whole.append(piece).map_err(|_| SpoolError::NoMemory)?;
        }
        let mut joined = Pieces::default();
        joined.push(0, whole.take_lease().map(Bytes::from).unwrap_or_default());
        let pieces = std::mem::replace(&mut state.kept, joined);
        drop(state);
        drop(pieces);
        Ok(())
    }

    pub fn file(&self) -> Option<File> {
        self.state.borrow().file.as_ref().and_then(|file| file.file.clone())
    }

    pub fn path(&self) -> Option<Arc<Path>> {
        self.state.borrow().file.as_ref().map(|file| Arc::clone(&file.path))
    }

    pub fn name(&self) -> Option<Arc<Path>> {
        let state = self.state.borrow();
        let file = state.file.as_ref().filter(|file| file.name.is_some() && state.kept_length == 0);
        file.map(|file| Arc::clone(&file.path))
    }

    pub fn keep_name(&self) {
        let name = self.state.borrow_mut().file.as_mut().and_then(|file| file.name.take());
        name.into_iter().for_each(TempName::keep);
    }

    /// Notes the file's new name, which it keeps.
    pub fn note_renamed(&self, to: &Path) {
        self.keep_name();
        if let Some(file) = &mut self.state.borrow_mut().file {
            file.path = to.into();
        }
    }

    /// Pool for file operations.
    pub fn pool(&self) -> ThreadPool {
        self.options.pool.clone().unwrap_or_else(default_pool)
    }

    pub fn options(&self) -> &SpoolOptions {
        &self.options
    }
}

/// For readers.
impl Shared {
    /// Finds up to `wanted` bytes at this offset; waits for them. Errors: the source failed before them; `NoMemory`.
    pub fn poll_find(&self, cx: &mut Context<'_>, offset: u64, wanted: usize) -> Poll<Result<Found, SpoolError>> {
        let mut state = self.state.borrow_mut();
        if let Some(found) = state.find(offset, wanted)? {
            return Poll::Ready(Ok(found));
        }
        match &state.source {
            Source::Whole => return Poll::Ready(Ok(Found::End)),
            Source::Failed(error) => return Poll::Ready(Err(error.clone())),
            Source::Open => {}
        }
        if !state.readers.iter().any(|reader| reader.will_wake(cx.waker())) {
            state.readers.push(cx.waker().clone());
        }
        Poll::Pending
    }
}

/// For the task that writes the file.
impl Shared {
    pub fn set_file(&self, file: TempFile) {
        let TempFile { file, path, name } = file;
        let mut state = self.state.borrow_mut();
        state.file = Some(SpoolFile { file: Some(file), path, name });
    }

    /// Next step when nothing is in flight.
    pub fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Next> {
        let mut state = self.state.borrow_mut();
        let next = match state.source {
            Source::Failed(_) => {
                state.storage = Storage::Ended;
                Next::GiveUp
            }
            Source::Whole if state.queued.pieces.is_empty() => Next::Complete,
            _ if state.is_write_due() => Next::Write(state.queued.to_vec()),
            _ => {
                state.store = Some(cx.waker().clone());
                return Poll::Pending;
            }
        };
        Poll::Ready(next)
    }

    /// Notes the bytes that are in the file.
    pub fn note_stored(&self, stored: u64) {
        let mut state = self.state.borrow_mut();
        state.stored = stored;
        let end = state.kept_length + stored;
        let spent = state.queued.take_before(end);
        let writer = if state.has_room() { state.writer.take() } else { None };
        drop(state);
        writer.into_iter().for_each(Waker::wake);
        drop(spent);
    }

    /// Leaves the file to its writer until the writer has finished.
    pub fn release_file(&self) {
        let released = self.state.borrow_mut().file.as_mut().and_then(|own| own.file.take());
        drop(released);
    }

    /// Notes that everything is in the file, which now has its final size.
    pub fn complete(&self, file: File) {
        let mut state = self.state.borrow_mut();
        state.storage = Storage::Ended;
        let growing = state.file.as_mut().map(|own| own.file.replace(file));
        self.wake_all(state);
        drop(growing);
    }

    /// Stops using the file after an error. Unwritten bytes stay in memory to be read.
    pub fn storage_failed(&self, error: FileError) {
        let mut state = self.state.borrow_mut();
        if matches!(state.source, Source::Open) {
            state.source = Source::Failed(SpoolError::File(error.clone()));
        }
        state.storage = Storage::Failed(error);
        self.wake_all(state);
    }

    /// Handles a task that ended without reporting an outcome.
    pub fn storage_is_gone(&self) {
        if matches!(self.state.borrow().storage, Storage::Runs(_)) {
            let path = self.path().unwrap_or_else(|| self.options.place.directory().into());
            self.storage_failed(FileError::new("pwrite", path, PoolError::Panicked));
        }
    }
}

impl State {
    /// Room left in the part that is kept in memory.
    fn memory_room(&self, memory_max: usize) -> usize {
        match self.storage {
            // `kept_length` fits a `usize`.
            Storage::NotNeeded => memory_max - self.kept_length as usize,
            Storage::Runs(_) | Storage::Ended | Storage::Failed(_) => 0,
        }
    }

    fn queued_bytes(&self) -> usize {
        // Bounded, or all of it in memory.
        (self.length - self.kept_length - self.stored) as usize
    }

    fn has_room(&self) -> bool {
        self.queued_bytes() < QUEUED_BYTES_MAX
    }

    /// `true` if there are enough bytes for a write, or any at the end.
    fn is_write_due(&self) -> bool {
        let bytes_min = if matches!(self.source, Source::Whole) { 1 } else { WRITE_BYTES_MIN };
        self.queued.bytes() >= bytes_min
    }

    /// Copies bytes to be kept, or queued once the file is needed. Errors: `OutOfMemory` at the hard limit of leases.
    fn copy(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let (part, later) = rest.split_at(rest.len().min(CHUNK_BYTES - self.chunk.len()));
            self.chunk.append(part)?;
            self.length += part.len() as u64;
            if matches!(self.storage, Storage::NotNeeded) {
                self.kept_length += part.len() as u64;
            }
            if self.chunk.len() == CHUNK_BYTES {
                self.close_chunk();
            }
            rest = later;
        }
        Ok(())
    }

    /// Turns the gathered bytes into a piece.
    fn close_chunk(&mut self) {
        if let Some(lease) = self.chunk.take_lease() {
            let begin = self.length - lease.len() as u64;
            self.enter(begin, lease.freeze());
        }
    }

    fn push(&mut self, piece: Bytes) {
        let begin = self.length;
        self.length += piece.len() as u64;
        self.enter(begin, piece);
    }

    fn enter(&mut self, begin: u64, piece: Bytes) {
        match self.storage {
            Storage::NotNeeded => self.kept.push(begin, piece),
            Storage::Runs(_) | Storage::Ended | Storage::Failed(_) => self.queued.push(begin, piece),
        }
    }

    fn find(&self, offset: u64, wanted: usize) -> Result<Option<Found>, SpoolError> {
        let in_pieces = self.kept.find(offset).or_else(|| self.queued.find(offset));
        if let Some(piece) = in_pieces {
            return Ok(Some(Found::Memory(piece)));
        }
        let chunk_begin = self.length - self.chunk.len() as u64;
        if (chunk_begin..self.length).contains(&offset) {
            // Copied, because more is written to the same memory.
            let bytes = &self.chunk.readable()[(offset - chunk_begin) as usize..];
            let copy = Lease::copy_of(&bytes[..bytes.len().min(wanted)]).map_err(|_| SpoolError::NoMemory)?;
            return Ok(Some(Found::Memory(copy.freeze())));
        }
        if let Some(SpoolFile { file: Some(file), .. }) = &self.file
            && let Some(offset) = offset.checked_sub(self.kept_length)
            && offset < self.stored
        {
            return Ok(Some(Found::File { file: file.clone(), offset, length: self.stored - offset }));
        }
        Ok(None)
    }
}

impl Drop for State {
    fn drop(&mut self) {
        // A write that a thread has begun is completed; everything else is dropped.
        if let Storage::Runs(task) = self.storage {
            abort(task);
        }
    }
}
