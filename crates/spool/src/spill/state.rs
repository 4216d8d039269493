//! State shared by a spill queue's writer, its reader and the task that writes the file.
//!
//! All of it belongs to one loop. Wakers are called while nothing is borrowed.

use std::cell::{RefCell, RefMut};
use std::collections::VecDeque;
use std::ops::Range;
use std::path::Path;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use gale_files::FileError;
use gale_runtime::{Buffer, Bytes, PoolError, TaskId, ThreadPool, abort, default_pool, spawn};

use super::backlog::{self, Part};
use super::{SpillItem, SpillOptions, store};
use crate::SpoolError;
use crate::state::{CHUNK_BYTES, COPIED_BELOW, QUEUED_BYTES_MAX, Source, WRITE_BYTES_MIN};
use crate::temp_file::TempFile;

/// Handles of a file that is not being sent or read: the queue's and its writer's.
const OWN_HANDLES: usize = 2;

/// State of the file.
enum Storage {
    /// Memory has had room for everything.
    NotNeeded,
    /// This task writes it.
    Runs(TaskId),
    /// Nothing more is written: the disk has failed, or everything needed was written.
    Ended,
}

/// Consecutive pieces in memory.
#[derive(Default)]
struct Pieces {
    pieces: VecDeque<Bytes>,
    bytes: usize,
}

impl Pieces {
    fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.bytes += piece.len();
            self.pieces.push_back(piece);
        }
    }

    fn pop(&mut self) -> Option<Bytes> {
        let piece = self.pieces.pop_front()?;
        self.bytes -= piece.len();
        Some(piece)
    }

    /// Removes `count` bytes from the beginning.
    fn take(&mut self, mut count: usize) -> Vec<Bytes> {
        let mut taken = Vec::new();
        while let Some(first) = self.pieces.front_mut().filter(|_| count > 0) {
            let part = first.split_to(first.len().min(count));
            count -= part.len();
            self.bytes -= part.len();
            if first.is_empty() {
                self.pieces.pop_front();
            }
            taken.push(part);
        }
        taken
    }

    fn copy_of(&self, mut count: usize) -> Vec<Bytes> {
        let mut copies = Vec::new();
        for piece in &self.pieces {
            let length = piece.len().min(count);
            if length == 0 {
                break;
            }
            copies.push(piece.slice(..length));
            count -= length;
        }
        copies
    }
}

#[derive(Clone, Copy)]
struct Writing {
    /// `true` if it first empties the file.
    from_start: bool,
    /// Bytes of its beginning that were meanwhile read from memory.
    read: usize,
}

struct State {
    source: Source,
    storage: Storage,
    has_reader: bool,
    /// The oldest bytes.
    head: Pieces,
    /// The next bytes: their range in the file. Writes continue at its end.
    stored: Range<u64>,
    /// The newest bytes; they include those of the write in flight.
    tail: Pieces,
    /// End of the tail, which is still being gathered.
    chunk: Buffer,
    writing: Option<Writing>,
    file: Option<TempFile>,
    /// The reason why the file is no longer used, until it was reported.
    failure: Option<FileError>,
    /// The queue's share of the loop's backlog.
    backlog: Part,
    /// `true` if it is registered to be woken when the backlog has room.
    is_refused: bool,
    /// `true` if it is registered to be written when the backlog is full, because too few bytes wait for a regular
    /// write.
    is_listed: bool,
    writer: Option<Waker>,
    store: Option<Waker>,
    reader: Option<Waker>,
}

/// State shared by a spill queue's ends and its task.
pub(super) struct Shared {
    options: SpillOptions,
    state: RefCell<State>,
}

/// Next step of the task that writes the file.
pub(super) enum Next {
    /// Write these pieces, at the start of the emptied file or at its end.
    Write { pieces: Vec<Bytes>, from_start: bool },
    /// Nothing is to be written any more.
    GiveUp,
}

/// For the writer.
impl Shared {
    pub fn new(options: SpillOptions) -> Shared {
        let state = State {
            source: Source::Open,
            storage: Storage::NotNeeded,
            has_reader: true,
            head: Pieces::default(),
            stored: 0..0,
            tail: Pieces::default(),
            chunk: Buffer::new(),
            writing: None,
            file: None,
            failure: None,
            backlog: Part::default(),
            is_refused: false,
            is_listed: false,
            writer: None,
            store: None,
            reader: None,
        };
        Shared { options, state: RefCell::new(state) }
    }

    pub fn poll_ready(self: &Rc<Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.state.borrow_mut();
        if state.has_room(&self.options) {
            return Poll::Ready(());
        }
        state.writer = Some(cx.waker().clone());
        let is_refused = !backlog::has_room() && !std::mem::replace(&mut state.is_refused, true);
        // Its share may have become smaller since its last bytes came.
        self.begin_write(state);
        if is_refused {
            backlog::refuse(Rc::downgrade(self));
        }
        Poll::Pending
    }

    /// Wakes the writer, because the backlog has room again.
    pub fn wake_writer(&self) {
        let mut state = self.state.borrow_mut();
        state.is_refused = false;
        let writer = state.writer.take();
        drop(state);
        writer.into_iter().for_each(Waker::wake);
    }

    /// Writes all waiting bytes, however few, because the backlog is full.
    pub fn write_now(self: &Rc<Self>) {
        let mut state = self.state.borrow_mut();
        state.is_listed = false;
        self.begin_write(state);
    }

    pub fn room_bytes(&self) -> usize {
        self.state.borrow().room_bytes(&self.options)
    }

    pub fn append(self: &Rc<Self>, piece: Bytes) {
        let mut state = self.state.borrow_mut();
        if !state.has_reader || piece.is_empty() {
            drop(state);
            return;
        }
        // Checked without the backlog and the queue's share of it, which other queues may have used up since.
        assert!(state.has_room_beside(&self.options), "a piece is appended without room for it");
        state.push(piece);
        // The backlog has grown, so no queue has to check again.
        let _ = state.count_backlog(&self.options);
        self.list_if_small(&mut state);
        self.begin_write(state);
    }

    /// Marks the end, unless it was marked before.
    pub fn end(self: &Rc<Self>, source: Source) {
        let mut state = self.state.borrow_mut();
        if matches!(state.source, Source::Open) {
            state.source = source;
            self.begin_write(state);
        }
    }

    /// Wakes the writing task if a write is due, and the reader if there are new bytes.
    fn begin_write(self: &Rc<Self>, mut state: RefMut<'_, State>) {
        let is_due = state.write_length(&self.options).is_some();
        if is_due && matches!(state.storage, Storage::NotNeeded) {
            state.storage = Storage::Runs(spawn(store::store(Rc::downgrade(self))));
        }
        let is_over = !matches!(state.source, Source::Open);
        let store = if is_due || is_over { state.store.take() } else { None };
        let reader = state.reader.take();
        drop(state);
        store.into_iter().chain(reader).for_each(Waker::wake);
    }

    pub fn take_failure(&self) -> Option<FileError> {
        self.state.borrow_mut().failure.take()
    }
}

/// For inspection.
impl Shared {
    pub fn memory_bytes(&self) -> usize {
        self.state.borrow().memory_bytes()
    }

    pub fn file_bytes(&self) -> u64 {
        let stored = &self.state.borrow().stored;
        stored.end - stored.start
    }

    pub fn path(&self) -> Option<Arc<Path>> {
        self.state.borrow().file.as_ref().map(|file| Arc::clone(&file.path))
    }

    /// Pool for file operations.
    pub fn pool(&self) -> ThreadPool {
        self.options.pool.clone().unwrap_or_else(default_pool)
    }

    pub fn options(&self) -> &SpillOptions {
        &self.options
    }
}

/// For the reader.
impl Shared {
    pub fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Result<Option<SpillItem>, SpoolError>> {
        let mut state = self.state.borrow_mut();
        if let Some(item) = state.take_next() {
            let refused = state.count_backlog(&self.options);
            let writer = if state.has_room(&self.options) { state.writer.take() } else { None };
            drop(state);
            writer.into_iter().for_each(Waker::wake);
            backlog::wake(refused);
            return Poll::Ready(Ok(Some(item)));
        }
        match &state.source {
            Source::Whole => Poll::Ready(Ok(None)),
            Source::Failed(error) => Poll::Ready(Err(error.clone())),
            Source::Open => {
                state.reader = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    pub fn is_at_end(&self) -> bool {
        let state = self.state.borrow();
        matches!(state.source, Source::Whole) && state.memory_bytes() == 0 && state.stored.is_empty()
    }

    pub fn note_reader_gone(&self) {
        let mut state = self.state.borrow_mut();
        state.has_reader = false;
        let (head, tail) = (std::mem::take(&mut state.head), std::mem::take(&mut state.tail));
        let chunk = std::mem::take(&mut state.chunk);
        state.stored = 0..0;
        let file = state.file.take();
        let wakers = [state.writer.take(), state.store.take()];
        let refused = state.count_backlog(&self.options);
        drop(state);
        drop((head, tail, chunk, file));
        wakers.into_iter().flatten().for_each(Waker::wake);
        backlog::wake(refused);
    }
}

/// For the task that writes the file.
impl Shared {
    pub fn set_file(&self, file: TempFile) {
        let mut state = self.state.borrow_mut();
        if state.has_reader {
            state.file = Some(file);
        }
    }

    /// Next step when nothing is in flight.
    pub fn poll_write(self: &Rc<Self>, cx: &mut Context<'_>) -> Poll<Next> {
        let mut state = self.state.borrow_mut();
        if let Some(length) = state.write_length(&self.options) {
            let from_start = state.is_file_free() && state.stored.end > 0;
            state.close_chunk();
            state.writing = Some(Writing { from_start, read: 0 });
            return Poll::Ready(Next::Write { pieces: state.tail.copy_of(length), from_start });
        }
        if !state.has_reader || !matches!(state.source, Source::Open) {
            return Poll::Ready(Next::GiveUp);
        }
        state.store = Some(cx.waker().clone());
        self.list_if_small(&mut state);
        // The share of a queue that had no room may have grown.
        let writer = if state.has_room(&self.options) { state.writer.take() } else { None };
        drop(state);
        writer.into_iter().for_each(Waker::wake);
        Poll::Pending
    }

    /// Registers the queue for a full backlog if too few bytes wait for a regular write.
    fn list_if_small(self: &Rc<Self>, state: &mut State) {
        let is_small = state.backlog.is_some() && state.write_length(&self.options).is_none();
        if is_small && !std::mem::replace(&mut state.is_listed, true) {
            backlog::list_small(Rc::downgrade(self));
        }
    }

    /// Notes that bytes of the write in flight are in the file.
    pub fn note_stored(&self, stored: u64) {
        let mut state = self.state.borrow_mut();
        let Some(writing) = state.writing.take().filter(|_| state.has_reader) else { return };
        let begin = if writing.from_start { 0 } else { state.stored.end };
        let end = begin + stored;
        // Bytes that the reader meanwhile got from memory come before all unread bytes.
        let unread = stored.saturating_sub(writing.read as u64);
        state.stored = if state.stored.is_empty() { end - unread..end } else { state.stored.start..end };
        // These bytes were in memory as well.
        let spent = state.tail.take(unread as usize);
        let refused = state.count_backlog(&self.options);
        let writer = if state.has_room(&self.options) { state.writer.take() } else { None };
        drop(state);
        writer.into_iter().for_each(Waker::wake);
        backlog::wake(refused);
        drop(spent);
    }

    /// Stops using the file after an error. Unwritten bytes stay in memory to be read.
    pub fn storage_failed(&self, error: FileError) {
        let mut state = self.state.borrow_mut();
        state.storage = Storage::Ended;
        state.writing = None;
        state.failure = Some(error);
        let refused = state.count_backlog(&self.options);
        let writer = state.writer.take();
        drop(state);
        writer.into_iter().for_each(Waker::wake);
        backlog::wake(refused);
    }

    pub fn storage_ended(&self) {
        let mut state = self.state.borrow_mut();
        state.storage = Storage::Ended;
        let refused = state.count_backlog(&self.options);
        drop(state);
        backlog::wake(refused);
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
    fn memory_bytes(&self) -> usize {
        self.head.bytes + self.tail.bytes + self.chunk.len()
    }

    /// `true` if the reader has all of the file, and no piece of it is being sent or read.
    fn is_file_free(&self) -> bool {
        let is_held = |file: &TempFile| file.file.handles() > OWN_HANDLES;
        self.stored.is_empty() && self.writing.is_none() && !self.file.as_ref().is_some_and(is_held)
    }

    /// Room left in the file, after the write in flight.
    fn file_room(&self, file_max: u64) -> u64 {
        match (&self.storage, &self.writing) {
            (Storage::Ended, _) => 0,
            (_, Some(Writing { from_start: true, .. })) => file_max,
            _ if self.is_file_free() => file_max,
            _ => file_max.saturating_sub(self.stored.end),
        }
    }

    /// Updates the bytes beyond the queue's own memory. Returns the queues that should check again.
    fn count_backlog(&mut self, options: &SpillOptions) -> Vec<Weak<Shared>> {
        let has_file = options.file_max > 0 && !matches!(self.storage, Storage::Ended);
        let waits = if has_file { self.memory_bytes().saturating_sub(options.memory_max) } else { 0 };
        self.backlog.set(waits)
    }

    fn has_room(&self, options: &SpillOptions) -> bool {
        self.room_bytes(options) > 0
    }

    /// `true` if the queue has room by its own bounds, regardless of the backlog.
    fn has_room_beside(&self, options: &SpillOptions) -> bool {
        self.room_with(options, self.may_wait(options, QUEUED_BYTES_MAX)) > 0
    }

    fn room_bytes(&self, options: &SpillOptions) -> usize {
        let may_wait = if backlog::has_room() { self.may_wait(options, backlog::share()) } else { 0 };
        self.room_with(options, may_wait)
    }

    /// Bytes that may wait for the file, `most` of them at most.
    fn may_wait(&self, options: &SpillOptions, most: usize) -> usize {
        self.file_room(options.file_max).min(most as u64) as usize
    }

    fn room_with(&self, options: &SpillOptions, may_wait: usize) -> usize {
        match self.has_reader {
            true => options.memory_max.max(1).saturating_add(may_wait).saturating_sub(self.memory_bytes()),
            // Appended pieces are discarded.
            false => usize::MAX,
        }
    }

    /// Bytes of the tail that are due to be written: those beyond the memory, if they suffice for a write or nothing
    /// more comes.
    fn write_length(&mut self, options: &SpillOptions) -> Option<usize> {
        let file_room = self.file_room(options.file_max);
        let has_surplus = self.memory_bytes() > options.memory_max;
        if self.writing.is_some() || !has_surplus || file_room == 0 || matches!(self.source, Source::Failed(_)) {
            return None;
        }
        if self.stored.is_empty() {
            // The oldest bytes stay in memory.
            while let Some(first) = self.tail.pieces.front()
                && self.head.bytes + first.len() <= options.memory_max
            {
                let first = self.tail.pop();
                first.into_iter().for_each(|first| self.head.push(first));
            }
        }
        let length = (self.tail.bytes + self.chunk.len()).min(usize::try_from(file_room).unwrap_or(usize::MAX));
        let length_min = match self.source {
            Source::Whole => 1,
            // Other queues wait for the backlog.
            Source::Open if !backlog::has_room() => 1,
            // No more come once the queue's share waits.
            Source::Open | Source::Failed(_) => (WRITE_BYTES_MIN.min(backlog::share()) as u64).min(file_room) as usize,
        };
        (length >= length_min).then_some(length)
    }

    fn push(&mut self, piece: Bytes) {
        // A piece that the reader waits for is not delayed.
        let is_gathered = piece.len() < COPIED_BELOW && !(self.reader.is_some() && self.memory_bytes() == 0);
        // Without memory for a copy the piece itself is kept.
        if is_gathered && self.gather(&piece).is_ok() {
            return;
        }
        self.close_chunk();
        self.tail.push(piece);
    }

    /// Copies a short piece behind others. Errors: `OutOfMemory` at the hard limit of leases; nothing is copied then.
    fn gather(&mut self, piece: &[u8]) -> std::io::Result<()> {
        if self.chunk.len() + piece.len() > CHUNK_BYTES {
            self.close_chunk();
        }
        self.chunk.append(piece)
    }

    /// Turns the gathered bytes into a piece.
    fn close_chunk(&mut self) {
        if let Some(lease) = self.chunk.take_lease() {
            self.tail.push(lease.freeze());
        }
    }

    fn take_next(&mut self) -> Option<SpillItem> {
        if let Some(piece) = self.head.pop() {
            return Some(SpillItem::Bytes(piece));
        }
        if let Some(file) = self.file.as_ref().filter(|_| !self.stored.is_empty()) {
            let Range { start, end } = self.stored;
            let item = SpillItem::File { file: file.file.clone(), offset: start, length: end - start };
            self.stored.start = end;
            return Some(item);
        }
        if self.tail.pieces.is_empty() {
            self.close_chunk();
        }
        let piece = self.tail.pop()?;
        if let Some(writing) = &mut self.writing {
            writing.read += piece.len();
        }
        Some(SpillItem::Bytes(piece))
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
