//! Readers of a spool: each at its own offset, in the kept, stored or queued part.

use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::ops::RangeBounds;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use gale_files::{CachedRead, File, FileError, PieceRead};
use gale_runtime::Bytes;

use super::state::{Found, Shared};
use super::{SpoolError, bounds};

/// Reader of a spool, usable while it is written. It holds no memory but the piece that it returns next.
pub struct SpoolReader {
    shared: Rc<Shared>,
    offset: u64,
    end: u64,
    /// A read on a thread, from `offset` on.
    read: Option<PieceRead>,
}

impl SpoolReader {
    pub(super) fn new(shared: &Rc<Shared>, range: impl RangeBounds<u64>) -> SpoolReader {
        let (offset, end) = bounds(range);
        SpoolReader { shared: Rc::clone(shared), offset, end, read: None }
    }

    /// Offset of the next read.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Another reader of the same spool, for this range.
    pub fn again(&self, range: impl RangeBounds<u64>) -> SpoolReader {
        SpoolReader::new(&self.shared, range)
    }

    /// Reads at most `length` bytes, fewer where the rest is in another place; `None` at the end of the spool or of the
    /// range. Waits if there are no bytes yet. While a thread reads, the result is that of its read.
    ///
    /// Errors: the spool ended before the range did; `NoMemory`; the file could not be read. None of them moves the
    /// reader. `length` must not be 0.
    pub fn poll_read(&mut self, cx: &mut Context<'_>, length: usize) -> Poll<Result<Option<Bytes>, SpoolError>> {
        assert!(length > 0, "a read of no bytes");
        loop {
            if let Some(read) = &mut self.read {
                let result = ready!(Pin::new(read).poll(cx));
                self.read = None;
                return Poll::Ready(self.take(result));
            }
            let rest = usize::try_from(self.end.saturating_sub(self.offset)).unwrap_or(usize::MAX);
            let wanted = length.min(rest);
            if wanted == 0 {
                return Poll::Ready(Ok(None));
            }
            match ready!(self.shared.poll_find(cx, self.offset, wanted))? {
                Found::End => return Poll::Ready(Ok(None)),
                Found::Memory(mut piece) => {
                    piece.truncate(wanted);
                    return Poll::Ready(self.take(Ok(piece)));
                }
                Found::File { file, offset, length } => {
                    let wanted = usize::try_from(length).map_or(wanted, |length| length.min(wanted));
                    if let Some(result) = self.read_file(&file, offset, wanted) {
                        return Poll::Ready(self.take(result));
                    }
                }
            }
        }
    }

    /// As [`SpoolReader::poll_read`]. If dropped before it is ready, it has read nothing.
    pub async fn read(&mut self, length: usize) -> Result<Option<Bytes>, SpoolError> {
        poll_fn(|cx| self.poll_read(cx, length)).await
    }

    /// Reads the part of the file's piece that is in the page cache; `None` if a thread reads it now.
    fn read_file(&mut self, file: &File, offset: u64, length: usize) -> Option<io::Result<Bytes>> {
        let missed = match file.look(offset, length) {
            Ok(CachedRead::Found(bytes)) => return Some(Ok(bytes)),
            Ok(missed) => missed,
            Err(error) => return Some(Err(error)),
        };
        match file.begin_read(&self.shared.pool(), offset, length, missed.how()) {
            Ok(read) => {
                self.read = Some(read);
                None
            }
            Err(error) => Some(Err(error)),
        }
    }

    /// Accepts the result of a read, which must not be empty.
    fn take(&mut self, read: io::Result<Bytes>) -> Result<Option<Bytes>, SpoolError> {
        let error = match read {
            Ok(bytes) if !bytes.is_empty() => {
                self.offset += bytes.len() as u64;
                return Ok(Some(bytes));
            }
            // The file was truncated by another program.
            Ok(_) => io::ErrorKind::UnexpectedEof.into(),
            Err(error) if error.kind() == io::ErrorKind::OutOfMemory => return Err(SpoolError::NoMemory),
            Err(error) => error,
        };
        let path = self.shared.path().expect("something was stored");
        Err(SpoolError::File(FileError::new("pread", path, error)))
    }
}

impl fmt::Debug for SpoolReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SpoolReader(at {} of {})", self.offset, self.shared.length())
    }
}
