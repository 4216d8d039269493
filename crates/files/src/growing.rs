//! A file that is read while it is written: its readers have offsets of their own and wait for new data.
//!
//! Recently written data is read from the page cache on the loop. The file belongs to this process, so access times do
//! not matter, and it changes all the time, so reads are not shared. Data that is not in memory any more is read by a
//! pool. Handles and readers may move to other loops.

use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use gale_runtime::waiters::Ticket;
use gale_runtime::{Bytes, Charge, PoolTask, ReadMemory, watch_waiting};

use super::writer::{Growing, Growth};
use super::{CachedRead, File, FileError, Rung, count_piece};

/// The end of a file's growth.
#[derive(Clone, Debug)]
pub enum GrowingEnd {
    /// The file is complete.
    Complete,
    /// The source failed: the rest exists nowhere.
    Failed,
    /// Writing has stopped, but the source may have the rest: because of this error, or because the file is not wanted
    /// any more.
    NoLongerStored(Option<FileError>),
}

/// The result of a read from a growing file.
#[derive(Clone, Debug)]
pub enum Grown {
    /// Bytes that follow those read so far; at least one.
    Piece(Bytes),
    /// Everything that was written has been read, and no more will be written.
    Ended(GrowingEnd),
}

/// A file that is being written. Clones are the same file.
#[derive(Clone)]
pub struct GrowingFile {
    growing: Arc<Growing>,
}

impl GrowingFile {
    pub(super) fn of(growing: &Arc<Growing>) -> Self {
        GrowingFile { growing: Arc::clone(growing) }
    }

    /// Number of bytes that can be read.
    pub fn written(&self) -> u64 {
        self.growing.growth().written
    }

    /// The end of its growth; `None` while it grows.
    pub fn end(&self) -> Option<GrowingEnd> {
        self.growing.growth().end
    }

    /// The file. Its metadata is from before the first write.
    pub fn file(&self) -> &File {
        &self.growing.file
    }

    /// A reader from `offset` on, which may be beyond the bytes written so far.
    pub fn read_from(&self, offset: u64) -> GrowingReader {
        GrowingReader { growing: Arc::clone(&self.growing), offset, ticket: None, read: None }
    }
}

impl fmt::Debug for GrowingFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let growth = self.growing.growth();
        write!(f, "GrowingFile({:?}, {} bytes, {:?})", self.growing.path, growth.written, growth.end)
    }
}

/// A reader of a file that is being written. It may move to another loop before and between reads.
pub struct GrowingReader {
    growing: Arc<Growing>,
    offset: u64,
    /// Its place among the readers that wait for growth.
    ticket: Option<Ticket>,
    read: Option<PoolRead>,
}

struct PoolRead {
    task: PoolTask<io::Result<(ReadMemory, usize)>>,
    charge: Charge,
}

impl GrowingReader {
    /// Offset of the next byte to read.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Reads at most `length` bytes of those written, fewer when the rest is not in memory. Waits for more if there are
    /// none. Errors: pread(2)'s, the pool's, `OutOfMemory` at the hard limit of leases; none of them moves the reader.
    ///
    /// `length` must not be 0. If a read in a pool is pending, the result is for the length that started it.
    pub fn poll_read(&mut self, cx: &mut Context<'_>, length: usize) -> Poll<Result<Grown, FileError>> {
        assert!(length > 0, "a read of no bytes");
        loop {
            if let Some(read) = &mut self.read {
                let Poll::Ready(result) = Pin::new(&mut read.task).poll(cx) else { return Poll::Pending };
                let charge = self.read.take().expect("it was polled just now").charge;
                let bytes = result.unwrap_or_else(|refused| Err(refused.into())).map(|(memory, count)| {
                    count_piece(Rung::Pool, count as u64);
                    Bytes::of_read(Arc::new(memory), 0..count, charge)
                });
                return Poll::Ready(self.take(bytes));
            }
            let Growth { written, end } = match self.poll_growth(cx) {
                Poll::Ready(growth) => growth,
                Poll::Pending => return Poll::Pending,
            };
            if written <= self.offset {
                let end = end.expect("it has grown or ended");
                return Poll::Ready(Ok(Grown::Ended(end)));
            }
            let length = usize::try_from(written - self.offset).map_or(length, |rest| rest.min(length));
            match self.growing.file.look_at_own(self.offset, length) {
                Ok(CachedRead::Found(bytes)) => return Poll::Ready(self.take(Ok(bytes))),
                Ok(CachedRead::NotInMemory | CachedRead::NotLooked) => {}
                Err(error) => return Poll::Ready(self.take(Err(error))),
            }
            match Charge::for_length(length) {
                Ok(charge) => self.read = Some(PoolRead { task: self.begin_read(length), charge }),
                Err(error) => return Poll::Ready(self.take(Err(error))),
            }
        }
    }

    /// As [`GrowingReader::poll_read`]. Dropped before it is ready, it has read nothing.
    pub async fn read(&mut self, length: usize) -> Result<Grown, FileError> {
        poll_fn(|cx| self.poll_read(cx, length)).await
    }

    /// Waits until there are unread bytes, or no more will come.
    fn poll_growth(&mut self, cx: &mut Context<'_>) -> Poll<Growth> {
        let ticket = self.ticket.take();
        let waiting = self.growing.wait_beyond(self.offset, |readers| {
            let renewed = ticket.and_then(|ticket| Some((ticket, readers.renew(ticket, cx.waker())?)));
            match renewed {
                Some((ticket, displaced)) => (ticket, Some(displaced)),
                None => (readers.join(cx.waker()), None),
            }
        });
        match waiting {
            // The displaced waker is dropped here, without the lock.
            Ok((ticket, _displaced)) => {
                self.ticket = Some(ticket);
                Poll::Pending
            }
            // The growth or end has taken the ticket too.
            Err(growth) => Poll::Ready(growth),
        }
    }

    fn begin_read(&self, length: usize) -> PoolTask<io::Result<(ReadMemory, usize)>> {
        let (file, offset) = (self.growing.file.clone(), self.offset);
        let in_flight = file.begin_counted_read();
        self.growing.pool.run_for(file.device(), move || {
            let mut memory = ReadMemory::new(length);
            let (read, has_waited) = watch_waiting(|| file.read_blocking(offset, &mut memory));
            in_flight.end(has_waited);
            Ok((memory, read?))
        })
    }

    /// Takes the result of a read. It cannot be empty, since its bytes had been written.
    fn take(&mut self, read: io::Result<Bytes>) -> Result<Grown, FileError> {
        let failed = |error| FileError::new("pread", Arc::clone(&self.growing.path), error);
        match read {
            // The file was truncated by another process.
            Ok(bytes) if bytes.is_empty() => Err(failed(io::ErrorKind::UnexpectedEof.into())),
            Ok(bytes) => {
                self.offset += bytes.len() as u64;
                Ok(Grown::Piece(bytes))
            }
            Err(error) => Err(failed(error)),
        }
    }
}

impl Drop for GrowingReader {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            // The waker is dropped without the lock.
            let _left = self.growing.with_readers(|readers| readers.leave(ticket));
        }
    }
}

impl fmt::Debug for GrowingReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GrowingReader({:?}, at {})", self.growing.path, self.offset)
    }
}
