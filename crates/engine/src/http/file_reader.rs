//! Pieces of files as bytes in memory, read without holding the loop.
//!
//! What the kernel has in memory is read at once, the rest in a pool. No more than [`READ_PIECE`] bytes are held for one
//! reader at a time; dropped, it cancels a read that has not begun.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use gale_runtime::Lease;

use super::body::FilePiece;

/// How much of a file is read into memory at once, in bytes.
pub const READ_PIECE: u64 = 64 * 1024;

type Reading = Pin<Box<dyn Future<Output = io::Result<Lease>>>>;

/// Reads pieces of files from their beginnings to their ends.
#[derive(Default)]
pub struct FileReader {
    /// A read that is under way in a pool.
    reading: Option<Reading>,
}

impl FileReader {
    /// The next bytes of the piece, which is shorter by them afterwards. Until they are there, the piece must stay the
    /// same. Errors: the kernel's and the pool's; `UnexpectedEof` when the file has become shorter than it was.
    pub fn poll_read(&mut self, piece: &mut FilePiece, context: &mut Context<'_>) -> Poll<io::Result<Lease>> {
        if self.reading.is_none()
            && let Some(read) = self.try_read(piece).transpose()
        {
            return Poll::Ready(read);
        }
        let reading = self.reading.get_or_insert_with(|| {
            let FilePiece { file, offset, .. } = piece.clone();
            let length = next_length(piece);
            Box::pin(async move { file.read_at(offset, length).await })
        });
        let lease = ready!(reading.as_mut().poll(context));
        self.reading = None;
        Poll::Ready(lease.and_then(|lease| piece.advance(lease.len() as u64).map(|()| lease)))
    }

    /// As [`FileReader::poll_read`], of what is in memory now; `None` when that is nothing, or while a read is under way.
    pub fn try_read(&self, piece: &mut FilePiece) -> io::Result<Option<Lease>> {
        if self.reading.is_some() {
            return Ok(None);
        }
        let Some(lease) = piece.file.try_read_at(piece.offset, next_length(piece))? else { return Ok(None) };
        piece.advance(lease.len() as u64)?;
        Ok(Some(lease))
    }

    /// Whether a read is under way.
    pub fn is_reading(&self) -> bool {
        self.reading.is_some()
    }
}

/// Bounded, so that it can be counted with a usize.
fn next_length(piece: &FilePiece) -> usize {
    piece.length.min(READ_PIECE) as usize
}
