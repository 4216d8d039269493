//! A spool: bytes that one end writes and others read meanwhile, the beginning in memory, the rest in a file.
//!
//! ```text
//!   append ──►  kept, in memory  │  stored, in the file  │  queued for the file (bounded)
//!               0 … memory_max   │                       │                           … length
//!                                             ▲ one write in flight
//!   readers     each at an offset of its own, in any of the three; who has read all waits for more
//! ```
//!
//! A spool keeps all that it was given, so that it can be read again from its start, until the last who has it goes:
//! its writer, its readers, or what it has become ([`Spooled`]). Then its memory is free, and its file is closed and
//! removed by a thread of the pool, unless the file has a name that was kept. A write that is in flight is not waited
//! for.
//!
//! It belongs to one loop and knows nothing of what it holds. The loop never waits for the file: a pool creates, writes
//! and closes it, and what is read of it comes from the page cache or by a thread. A disk that fails is told to both
//! ends, with the reason; what is in memory or was stored before can still be read.

mod reader;
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

use gale_runtime::files::{self, FileError};
use gale_runtime::{Bytes, File, ThreadPool};

use self::state::{Shared, Source};

pub use self::reader::SpoolReader;
pub use self::spill::{SpillItem, SpillOptions, SpillQueue, SpillReader};
pub use self::temp_file::{SpoolPath, TempPath};

/// How a spool is set up.
#[derive(Clone, Debug)]
pub struct SpoolOptions {
    /// How many bytes of the beginning are kept in memory. What follows them goes to the file; with 0 all of it does.
    pub memory_max: usize,
    /// How long all of it may become, in bytes.
    pub length_max: Option<u64>,
    /// Where the file comes to be when it is needed first.
    pub place: SpoolPath,
    /// Whose threads do what has to be done with the file; without one those of the pool `default` do.
    pub pool: Option<ThreadPool>,
}

/// Why a spool cannot be written to, or not be read to an end. Clones are for several who have to be told.
#[derive(Clone, Debug)]
pub enum SpoolError {
    /// It would become longer than it may.
    TooLong,
    /// The loop's memory for buffers is exhausted. A read may be tried again; a spool that could not be written to
    /// takes nothing more.
    NoMemory,
    /// The file could not be created, written or read. A read may be tried again.
    File(FileError),
    /// Its writer broke off, for this reason.
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

/// The end of a spool that is written to. Dropped before [`Spool::finish`], it has broken off, and readers are told so.
pub struct Spool {
    shared: Rc<Shared>,
}

impl Spool {
    /// An empty one. It creates no file yet.
    pub fn new(options: SpoolOptions) -> Spool {
        Spool { shared: Rc::new(Shared::new(options)) }
    }

    /// How long it is by now, in bytes.
    pub fn length(&self) -> u64 {
        self.shared.length()
    }

    /// How many bytes wait to be in the file.
    pub fn queued_bytes(&self) -> usize {
        self.shared.queued_bytes()
    }

    /// The path of its file, once that was created, whether it still has the name or not.
    pub fn path(&self) -> Option<Arc<Path>> {
        self.shared.path()
    }

    /// Waits until there is room for a piece: no more than 128 KiB wait to be in the file. Errors: why it takes nothing
    /// more; each later call says the same.
    pub fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SpoolError>> {
        self.shared.poll_ready(cx)
    }

    /// As [`Spool::poll_ready`].
    pub async fn ready(&mut self) -> Result<(), SpoolError> {
        poll_fn(|cx| self.poll_ready(cx)).await
    }

    /// Takes a piece as it is, for which there must be room: once after [`Spool::poll_ready`] has said so. The memory
    /// that it is a piece of should not be much larger than the piece; a short one is copied. Errors end the spool;
    /// nothing is taken then.
    pub fn append(&mut self, piece: Bytes) -> Result<(), SpoolError> {
        self.shared.append(piece)
    }

    /// Takes a copy of these bytes, as [`Spool::append`] takes a piece. Copies are gathered: many short ones take no
    /// more memory than their bytes. Errors, `NoMemory` among them, end the spool; some of the bytes may have been
    /// taken then.
    pub fn append_copy(&mut self, bytes: &[u8]) -> Result<(), SpoolError> {
        self.shared.append_copy(bytes)
    }

    /// Creates the file now and has all that follows go there, even if memory had room for it.
    pub fn begin_file(&mut self) {
        self.shared.begin_file();
    }

    /// Reads these bytes, also those that are still to come.
    pub fn read(&self, range: impl RangeBounds<u64>) -> SpoolReader {
        SpoolReader::new(&self.shared, range)
    }

    /// Breaks off: readers get what there is, and then this reason.
    pub fn fail(self, cause: io::Error) {
        self.shared.end(Source::Failed(SpoolError::BrokenOff(Arc::new(cause))));
    }

    /// Nothing more comes. Waits until what does not stay in memory is in the file; readers get the end before that.
    /// Dropped before it is ready, this keeps nobody from reading all of it. Errors: the file could not be written, or
    /// the spool has ended before.
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

/// What a spool has become when all of it is there: some in memory, the rest in a file. Clones are the same.
#[derive(Clone)]
pub struct Spooled {
    shared: Rc<Shared>,
}

impl Spooled {
    /// How long it is, in bytes.
    pub fn length(&self) -> u64 {
        self.shared.length()
    }

    /// The beginning, as far as it is in memory.
    pub fn memory(&self) -> Vec<Bytes> {
        self.shared.memory()
    }

    /// Makes one piece of what is in memory. Errors: `NoMemory`; nothing has changed then.
    pub fn join_memory(&self) -> Result<(), SpoolError> {
        self.shared.join_memory()
    }

    /// What follows the memory: a file of which every byte belongs to it.
    pub fn file(&self) -> Option<File> {
        self.shared.file()
    }

    /// How much of it is in the file, in bytes.
    pub fn file_length(&self) -> u64 {
        self.shared.stored()
    }

    /// The path that the file was created at, whether it still has the name or not; where it was renamed to.
    pub fn path(&self) -> Option<Arc<Path>> {
        self.shared.path()
    }

    /// The name of the file that holds all of it, if it has one that goes with the spool: whoever renames it has it
    /// [kept](Spooled::keep) then.
    pub fn name(&self) -> Option<Arc<Path>> {
        self.shared.name()
    }

    /// Lets the file keep its name, if it has one.
    pub fn keep(&self) {
        self.shared.keep_name();
    }

    /// Gives the file, which must have a name, another one on the same file system, to keep. Errors: rename(2)'s and
    /// the pool's; the file goes with the spool then.
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

/// Where a range begins and ends; `u64::MAX` for one that is open to its end.
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
