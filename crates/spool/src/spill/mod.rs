//! A spill queue: passes bytes from one writer to one reader, in order, through a fixed amount of memory, and through a
//! file if the reader is slow.
//!
//! ```text
//!            oldest                                                      newest
//!   reader ◄── head, in memory │ stored, in the file │ tail, in memory ◄── append
//!              … memory_max                              … 128 KiB beyond, waits for the file
//! ```
//!
//! The queue forgets what was read: memory is reused, and so is the file, from its start, once the reader has all of it
//! and no piece of it is being sent or read. Nothing is written while memory has room. When memory is full, the newest
//! bytes go to the file, up to `file_max`; when that is full as well, the writer waits for the reader.
//!
//! All queues of a loop share a bound for bytes that wait for their files (`backlog.rs`): from 64 queues on each has
//! less than 128 KiB, 16 KiB at least, and beyond the bound only its own memory. A failing disk loses no data:
//! unwritten bytes are still in memory, and the queue continues without the file. A slow disk delays the writer, and
//! the reader only if it needs bytes from the file.
//!
//! It belongs to one loop, which never blocks on the file. For data that is read again or by several readers, see
//! [`Spool`](super::Spool).

mod backlog;
mod state;
mod store;

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use gale_files::{File, FileError};
use gale_runtime::{Bytes, ThreadPool};

use self::state::Shared;
use super::state::Source;
use super::{SpoolError, SpoolPath};

/// Options of a spill queue.
#[derive(Clone, Debug)]
pub struct SpillOptions {
    /// Bytes in memory before the file is used. With a file, up to 128 KiB (16 KiB with many
    /// queues) and one more piece may wait to be written.
    pub memory_max: usize,
    /// Largest size of the file in bytes; 0 for a queue in memory only.
    pub file_max: u64,
    /// Place of the file, which is created when it is first needed.
    pub place: SpoolPath,
    /// Pool for file operations; `None` for the pool `default`.
    pub pool: Option<ThreadPool>,
}

/// A piece of a spill queue: at least one byte.
#[derive(Clone, Debug)]
pub enum SpillItem {
    /// Bytes in memory.
    Bytes(Bytes),
    /// A piece of the file, to be sent, or read through a pool. The file is not overwritten before all of these pieces
    /// and their clones are dropped.
    File {
        /// The file. Its metadata are those of an empty file.
        file: File,
        /// Offset of the piece in bytes.
        offset: u64,
        /// Length in bytes.
        length: u64,
    },
}

impl SpillItem {
    /// Length in bytes.
    pub fn length(&self) -> u64 {
        match self {
            SpillItem::Bytes(bytes) => bytes.len() as u64,
            SpillItem::File { length, .. } => *length,
        }
    }
}

/// Write end. If dropped before [`SpillQueue::finish`], it breaks off, and the reader gets an error.
pub struct SpillQueue {
    shared: Rc<Shared>,
}

impl SpillQueue {
    /// An empty queue with its reader, without a file yet.
    pub fn new(options: SpillOptions) -> (SpillQueue, SpillReader) {
        let shared = Rc::new(Shared::new(options));
        (SpillQueue { shared: Rc::clone(&shared) }, SpillReader { shared })
    }

    /// Waits for room for a piece. There always is room once the reader has everything, or has been dropped.
    pub fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.shared.poll_ready(cx)
    }

    /// As [`SpillQueue::poll_ready`].
    pub async fn ready(&mut self) {
        poll_fn(|cx| self.poll_ready(cx)).await
    }

    /// Free room in bytes. Any room suffices for a longer piece, too.
    pub fn room_bytes(&self) -> usize {
        self.shared.room_bytes()
    }

    /// Appends a piece. There must be room: call it once after each [`SpillQueue::poll_ready`]. The memory behind the
    /// piece should not be much larger than the piece; short ones are copied together. After the reader was dropped,
    /// pieces are discarded.
    pub fn append(&mut self, piece: Bytes) {
        self.shared.append(piece);
    }

    /// Bytes in memory.
    pub fn memory_bytes(&self) -> usize {
        self.shared.memory_bytes()
    }

    /// Bytes in the file.
    pub fn file_bytes(&self) -> u64 {
        self.shared.file_bytes()
    }

    /// Path at which the file was created, even if that name was removed; `None` before.
    pub fn path(&self) -> Option<Arc<Path>> {
        self.shared.path()
    }

    /// The reason why the file is no longer used, once, for the log. The queue continues without it.
    pub fn take_failure(&mut self) -> Option<FileError> {
        self.shared.take_failure()
    }

    /// Breaks off: the reader gets the existing bytes, then this error.
    pub fn fail(self, cause: io::Error) {
        self.shared.end(Source::Failed(SpoolError::BrokenOff(Arc::new(cause))));
    }

    /// Marks the end. Bytes beyond the memory still go to the file.
    pub fn finish(self) {
        self.shared.end(Source::Whole);
    }
}

impl Drop for SpillQueue {
    fn drop(&mut self) {
        let cause = io::Error::from(io::ErrorKind::UnexpectedEof);
        self.shared.end(Source::Failed(SpoolError::BrokenOff(Arc::new(cause))));
    }
}

impl fmt::Debug for SpillQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SpillQueue({} bytes, {} in {:?})", self.memory_bytes(), self.file_bytes(), self.path())
    }
}

/// Read end. Once it is dropped, written bytes are discarded.
pub struct SpillReader {
    shared: Rc<Shared>,
}

impl SpillReader {
    /// The next item; `None` at the end. Waits if there is none yet. Returns an error if the writer broke off and
    /// everything before was read.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<SpillItem>, SpoolError>> {
        self.shared.poll_next(cx)
    }

    /// As [`SpillReader::poll_next`].
    pub async fn next(&mut self) -> Result<Option<SpillItem>, SpoolError> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// `true` if everything was read and nothing more comes.
    pub fn is_at_end(&self) -> bool {
        self.shared.is_at_end()
    }

    /// Bytes waiting to be read.
    pub fn queued_bytes(&self) -> u64 {
        self.shared.memory_bytes() as u64 + self.shared.file_bytes()
    }
}

impl Drop for SpillReader {
    fn drop(&mut self) {
        self.shared.note_reader_gone();
    }
}

impl fmt::Debug for SpillReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SpillReader({} bytes)", self.queued_bytes())
    }
}
