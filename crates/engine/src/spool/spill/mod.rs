//! A spill queue: bytes pass from one writer to one reader, in order, through memory of a fixed size, and through a
//! file when the reader is slow.
//!
//! ```text
//!            oldest                                                      newest
//!   reader ◄── head, in memory │ stored, in the file │ tail, in memory ◄── append
//!              … memory_max                              … 128 KiB beyond, waits for the file
//! ```
//!
//! The queue forgets what was read: its memory is used again, and so is the file, from its start, when the reader has
//! all of it and nobody sends or reads a piece of it any more. While memory has room nothing is written. When memory is
//! full, the newest bytes go to the file, up to `file_max`; when that is full, too, the writer waits for the reader.
//!
//! All queues of a loop share a bound for the bytes that wait for their files (`backlog.rs`). Beyond it a queue has its
//! own memory alone.
//!
//! A disk that fails loses nothing and stops nobody: what could not be written is still in memory, and the queue goes
//! on without the file. A slow disk delays the writer, and the reader only if it wants what is in the file.
//!
//! It belongs to one loop, which never waits for the file. A [`Spool`](super::Spool) is for what is read again, or by
//! several.

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

use gale_runtime::files::FileError;
use gale_runtime::{Bytes, File, ThreadPool};

use self::state::Shared;
use super::state::Source;
use super::{SpoolError, SpoolPath};

/// How a spill queue is set up.
#[derive(Clone, Debug)]
pub struct SpillOptions {
    /// How many bytes are in memory before the file is used; with a file up to 128 KiB and one piece more, which wait
    /// to be written.
    pub memory_max: usize,
    /// How long the file may become, in bytes; 0 for none: the queue is in memory alone.
    pub file_max: u64,
    /// Where the file comes to be when it is needed first.
    pub place: SpoolPath,
    /// Whose threads do what has to be done with the file; without one those of the pool `default` do.
    pub pool: Option<ThreadPool>,
}

/// A piece that a reader of a spill queue gets: at least one byte.
#[derive(Clone, Debug)]
pub enum SpillItem {
    /// Bytes in memory.
    Bytes(Bytes),
    /// A piece of the file: to be sent, or read through a pool. The file is not written over before each of these and
    /// its clones is gone.
    File {
        /// The file. Its metadata are those of an empty one.
        file: File,
        /// Where the piece begins, in bytes.
        offset: u64,
        /// How long it is, in bytes.
        length: u64,
    },
}

impl SpillItem {
    /// How long it is, in bytes.
    pub fn length(&self) -> u64 {
        match self {
            SpillItem::Bytes(bytes) => bytes.len() as u64,
            SpillItem::File { length, .. } => *length,
        }
    }
}

/// The end that is written to. Dropped before [`SpillQueue::finish`], it has broken off, and the reader is told so.
pub struct SpillQueue {
    shared: Rc<Shared>,
}

impl SpillQueue {
    /// An empty queue and its reader. It creates no file yet.
    pub fn new(options: SpillOptions) -> (SpillQueue, SpillReader) {
        let shared = Rc::new(Shared::new(options));
        (SpillQueue { shared: Rc::clone(&shared) }, SpillReader { shared })
    }

    /// Waits until there is room for a piece. There always is when the reader has all, and when it has gone.
    pub fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.shared.poll_ready(cx)
    }

    /// As [`SpillQueue::poll_ready`].
    pub async fn ready(&mut self) {
        poll_fn(|cx| self.poll_ready(cx)).await
    }

    /// Free room in bytes. A longer piece is taken, too, if there is any room.
    pub fn room_bytes(&self) -> usize {
        self.shared.room_bytes()
    }

    /// Takes a piece, for which there must be room: once after [`SpillQueue::poll_ready`] has said so. The memory that
    /// it is a piece of should not be much larger than the piece; short ones are gathered in copies. What comes after
    /// the reader has gone is dropped.
    pub fn append(&mut self, piece: Bytes) {
        self.shared.append(piece);
    }

    /// How many bytes of it are in memory.
    pub fn memory_bytes(&self) -> usize {
        self.shared.memory_bytes()
    }

    /// How many bytes of it are in the file.
    pub fn file_bytes(&self) -> u64 {
        self.shared.file_bytes()
    }

    /// The path of its file, once that was created, whether it still has the name or not.
    pub fn path(&self) -> Option<Arc<Path>> {
        self.shared.path()
    }

    /// Why the file is not used any more, once: to be logged. The queue goes on without it.
    pub fn take_failure(&mut self) -> Option<FileError> {
        self.shared.take_failure()
    }

    /// Breaks off: the reader gets what there is, and then this reason.
    pub fn fail(self, cause: io::Error) {
        self.shared.end(Source::Failed(SpoolError::BrokenOff(Arc::new(cause))));
    }

    /// Nothing more comes. What is more than memory may hold still goes to the file.
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

/// The end that is read from. Dropped, it lets the writer write to nobody.
pub struct SpillReader {
    shared: Rc<Shared>,
}

impl SpillReader {
    /// The next item; `None` at the end. Waits for one if there is none yet. Errors: the writer has broken off, and all
    /// that came before was read.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<SpillItem>, SpoolError>> {
        self.shared.poll_next(cx)
    }

    /// As [`SpillReader::poll_next`].
    pub async fn next(&mut self) -> Result<Option<SpillItem>, SpoolError> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// Whether nothing is left, and nothing more comes.
    pub fn is_at_end(&self) -> bool {
        self.shared.is_at_end()
    }

    /// How many bytes wait to be read.
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
