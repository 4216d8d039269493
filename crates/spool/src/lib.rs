//! Bodies that are written and read at the same time, in memory and in a file: spools and spill queues.
//!
//! A spool holds a body's beginning in memory and the rest in a file.
//!
//! ```text
//!   append ──►  kept, in memory  │  stored, in the file  │  queued for the file (bounded)
//!               0 … memory_max   │                       │                           … length
//!                                             ▲ one write in flight
//!   readers     each at its own offset, in any of the three; at the end a reader waits for more
//! ```
//!
//! A spool keeps all its bytes, so it can be read again from its start, until its last owner is dropped: its writer,
//! its readers, or the finished [`Spooled`]. Then its memory is freed, and a pool thread closes and removes its file,
//! unless a named file is kept. A write in flight is not awaited.
//!
//! It belongs to one loop and does not interpret the bytes. The loop never blocks on the file: a pool creates, writes
//! and closes it, and reads come from the page cache or from a thread. A disk error is reported to both ends with its
//! cause; bytes in memory or stored before remain readable.

mod reader;
#[cfg(test)]
#[path = "../../../tests/shared/scratch.rs"]
mod scratch;
mod spill;
mod state;
mod store;
mod temp_file;

use std::error::Error;
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use gale_files::{self as files, File, FileError};
use gale_runtime::{Bytes, ThreadPool};

use self::state::{Shared, Source};

pub use self::reader::SpoolReader;
pub use self::spill::{SpillItem, SpillOptions, SpillQueue, SpillReader};
pub use self::temp_file::{SpoolPath, TempPath};

/// Options of a spool.
#[derive(Clone, Debug)]
pub struct SpoolOptions {
    /// Bytes at the beginning that stay in memory. The rest goes to the file; with 0 all of it does.
    pub memory_max: usize,
    /// Longest length, in bytes.
    pub length_max: Option<u64>,
    /// Place of the file, which is created when it is first needed.
    pub place: SpoolPath,
    /// Pool for file operations; `None` for the pool `default`.
    pub pool: Option<ThreadPool>,
}

/// Reason why a spool cannot be written, or not be read to its end. Cloned for each end that is told.
#[derive(Clone, Debug)]
pub enum SpoolError {
    /// The spool would exceed its longest length.
    TooLong,
    /// The loop's memory for buffers is exhausted. A read may be retried; after a failed write the spool accepts
    /// nothing more.
    NoMemory,
    /// The file could not be created, written or read. A read may be retried.
    File(FileError),
    /// The writer broke off, for this reason.
    BrokenOff(Arc<io::Error>),
}

impl fmt::Display for SpoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SpoolError::TooLong => f.write_str("the maximum size is exceeded"),
            SpoolError::NoMemory => f.write_str("the memory for buffers is exhausted"),
            SpoolError::File(error) => error.fmt(f),
            SpoolError::BrokenOff(cause) => write!(f, "the source ended prematurely: {cause}"),
        }
    }
}

impl Error for SpoolError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            SpoolError::TooLong | SpoolError::NoMemory => None,
            SpoolError::File(error) => Some(error),
            SpoolError::BrokenOff(cause) => Some(&**cause),
        }
    }
}

/// Write end of a spool. If dropped before [`Spool::finish`], it breaks off, and readers get an error.
pub struct Spool {
    shared: Rc<Shared>,
}

impl Spool {
    /// An empty spool, without a file yet.
    pub fn new(options: SpoolOptions) -> Spool {
        Spool { shared: Rc::new(Shared::new(options)) }
    }

    /// Current length in bytes.
    pub fn length(&self) -> u64 {
        self.shared.length()
    }

    /// Bytes waiting to be written to the file.
    pub fn queued_bytes(&self) -> usize {
        self.shared.queued_bytes()
    }

    /// Path at which the file was created, even if that name was removed; `None` before.
    pub fn path(&self) -> Option<Arc<Path>> {
        self.shared.path()
    }

    /// Waits for room for a piece: at most 128 KiB wait to be written. Returns an error if the spool accepts nothing
    /// more, also at each later call.
    pub fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SpoolError>> {
        self.shared.poll_ready(cx)
    }

    /// As [`Spool::poll_ready`].
    pub async fn ready(&mut self) -> Result<(), SpoolError> {
        poll_fn(|cx| self.poll_ready(cx)).await
    }

    /// Appends a piece without copying. There must be room: call it once after each [`Spool::poll_ready`]. The memory
    /// behind the piece should not be much larger than the piece; a short one is copied. An error ends the spool, and
    /// nothing is appended.
    pub fn append(&mut self, piece: Bytes) -> Result<(), SpoolError> {
        self.shared.append(piece)
    }

    /// Appends a copy of these bytes, as [`Spool::append`] does with a piece. Copies are gathered, so many short ones
    /// take no more memory than their bytes. An error, including `NoMemory`, ends the spool; some of the bytes may have
    /// been appended.
    pub fn append_copy(&mut self, bytes: &[u8]) -> Result<(), SpoolError> {
        self.shared.append_copy(bytes)
    }

    /// Creates the file now. Later bytes go there even if memory has room for them.
    pub fn begin_file(&mut self) {
        self.shared.begin_file();
    }

    /// Reads these bytes, including those to come.
    pub fn read(&self, range: impl RangeBounds<u64>) -> SpoolReader {
        SpoolReader::new(&self.shared, range)
    }

    /// Breaks off: readers get the existing bytes, then this error.
    pub fn fail(self, cause: io::Error) {
        self.shared.end(Source::Failed(SpoolError::BrokenOff(Arc::new(cause))));
    }

    /// Marks the end. Waits until everything that does not stay in memory is in the file; readers see the end earlier.
    /// If this future is dropped before it is ready, readers can still read everything. Errors: the file could not be
    /// written, or the spool has ended before.
    pub async fn finish(self) -> Result<Spooled, SpoolError> {
        self.shared.end(Source::Whole);
        poll_fn(|cx| self.shared.poll_stored(cx)).await?;
        Ok(Spooled { shared: Rc::clone(&self.shared) })
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        self.shared.note_writer_gone();
        if self.shared.is_open() {
            let cause = io::Error::from(io::ErrorKind::UnexpectedEof);
            self.shared.end(Source::Failed(SpoolError::BrokenOff(Arc::new(cause))));
        }
    }
}

impl fmt::Debug for Spool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Spool({} bytes, {:?})", self.length(), self.path())
    }
}

/// A finished spool: its beginning in memory, the rest in a file. Clones share it.
#[derive(Clone)]
pub struct Spooled {
    shared: Rc<Shared>,
}

impl Spooled {
    /// Length in bytes.
    pub fn length(&self) -> u64 {
        self.shared.length()
    }

    /// The part in memory.
    pub fn memory(&self) -> Vec<Bytes> {
        self.shared.memory()
    }

    /// Joins the part in memory into one piece. Errors: `NoMemory`; nothing has changed then.
    pub fn join_memory(&self) -> Result<(), SpoolError> {
        self.shared.join_memory()
    }

    /// The rest: a file with no other contents.
    pub fn file(&self) -> Option<File> {
        self.shared.file()
    }

    /// Bytes in the file.
    pub fn file_length(&self) -> u64 {
        self.shared.stored()
    }

    /// Path at which the file was created, even if that name was removed, or the path that it was renamed to.
    pub fn path(&self) -> Option<Arc<Path>> {
        self.shared.path()
    }

    /// Name of the file if it contains the whole spool and the name is removed with the spool. After renaming it, call
    /// [`keep`](Spooled::keep).
    pub fn name(&self) -> Option<Arc<Path>> {
        self.shared.name()
    }

    /// Keeps the file's name, if it has one.
    pub fn keep(&self) {
        self.shared.keep_name();
    }

    /// Renames the file, which must have a name, within its file system, and keeps it. Errors are those of rename(2)
    /// and of the pool; the file is then removed with the spool.
    pub async fn rename(&self, to: &Path) -> Result<(), FileError> {
        let path = self.path().expect("only a file can be renamed");
        files::rename(&path, to).await?;
        self.shared.note_renamed(to);
        Ok(())
    }

    /// Reads these bytes.
    pub fn read(&self, range: impl RangeBounds<u64>) -> SpoolReader {
        SpoolReader::new(&self.shared, range)
    }
}

impl fmt::Debug for Spooled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Spooled({} bytes, {:?})", self.length(), self.path())
    }
}

/// Begin and end of a range; `u64::MAX` if the end is open.
fn bounds(range: impl RangeBounds<u64>) -> (u64, u64) {
    let begin = match range.start_bound() {
        Bound::Included(&begin) => begin,
        Bound::Excluded(&before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&last) => last.saturating_add(1),
        Bound::Excluded(&end) => end,
        Bound::Unbounded => u64::MAX,
    };
    (begin, end)
}
