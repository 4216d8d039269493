//! Reads the body of an entry from its file, and returns no byte of a block whose sum was not verified.
//!
//! A block is verified when it is read: the first time that a worker reads it after it has opened the file, and
//! whenever it comes from the disk. A verified block that is in memory is sent in the connection's best way, possibly
//! by `sendfile`, without another check.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use crc32fast::Hasher;
use gale_http::files::FilePiece;
use gale_http::files::delivery::FileOptions;
use gale_http::files::reader::{FileReader, READ_PIECE};
use gale_http_cache::sums::Blocks;
use gale_runtime::Bytes;

/// Reader of a body, see the head of the file.
pub(super) struct CheckedReader {
    reader: FileReader,
    /// `None` for a file without sums of blocks, which is read without checks.
    blocks: Option<Rc<Blocks>>,
    reading: Option<Reading>,
    /// Verified bytes that were not returned yet, and their offset in the file.
    ready: VecDeque<Bytes>,
    ready_at: u64,
    /// End of the part that was just verified, but could not be kept in memory.
    trusted_to: u64,
}

/// A block being read.
struct Reading {
    block: Range<u64>,
    rest: FilePiece,
    is_summed: bool,
    sum: Hasher,
    pieces: VecDeque<Bytes>,
    /// True if there was no memory for the whole block: it is read for its sum, and again to be sent.
    is_for_sum_alone: bool,
}

/// Reason for which a read fails.
#[derive(Debug)]
pub(super) enum ReadError {
    /// An error of the disk or the pool, or no memory.
    Io(io::Error),
    /// A block is damaged, or the file has become shorter.
    Damaged,
}

/// True if the error is the limit of leases, and not one of the disk.
fn is_memory_short(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::OutOfMemory && error.raw_os_error().is_none()
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> ReadError {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => ReadError::Damaged,
            _ => ReadError::Io(error),
        }
    }
}

impl CheckedReader {
    /// Creates a reader for a file with these sums.
    pub fn new(options: FileOptions, blocks: Option<Rc<Blocks>>) -> CheckedReader {
        let (ready, ready_at) = (VecDeque::new(), 0);
        CheckedReader { reader: FileReader::new(options), blocks, reading: None, ready, ready_at, trusted_to: 0 }
    }

    /// True if a read is in progress.
    pub fn is_reading(&self) -> bool {
        self.reading.is_some() || self.reader.is_reading()
    }

    /// Number of verified bytes at the beginning of the piece; at most `most`.
    pub fn checked_length(&self, piece: &FilePiece, most: u64) -> u64 {
        let most = piece.length.min(most);
        self.blocks.as_ref().map_or(most, |blocks| blocks.checked_length(piece.offset, most))
    }

    /// True if the first block of the piece is in constant use, so that it can be read even while the disk hangs.
    pub fn is_in_use(&self, piece: &FilePiece) -> bool {
        let (block, _) = self.next_block(piece);
        piece.file.is_in_use(block.start, block.end - block.start)
    }

    /// The first range to read for the piece, and whether it has a sum.
    fn next_block(&self, piece: &FilePiece) -> (Range<u64>, bool) {
        match &self.blocks {
            Some(blocks) if piece.offset >= self.trusted_to => (blocks.block_at(piece.offset), true),
            // The range of a single read, as for any file.
            blocks => {
                let one = piece.length.min(READ_PIECE - piece.offset % READ_PIECE);
                let most = blocks.as_ref().map_or(u64::MAX, |_| self.trusted_to - piece.offset);
                (piece.offset..piece.offset + one.min(most), false)
            }
        }
    }

    /// Reads the first bytes of the piece, which is not changed. Ready when [`CheckedReader::take_ready`] has bytes.
    pub fn poll_begin(&mut self, piece: &FilePiece, context: &mut Context<'_>) -> Poll<Result<(), ReadError>> {
        let next = self.next_block(piece);
        let reading = self.reading.get_or_insert_with(|| {
            let (block, is_summed) = next;
            let rest = FilePiece { file: piece.file.clone(), offset: block.start, length: block.end - block.start };
            Reading { block, rest, is_summed, sum: Hasher::new(), pieces: VecDeque::new(), is_for_sum_alone: false }
        });
        while reading.rest.length > 0 {
            let bytes = match ready!(self.reader.poll_read(&mut reading.rest, context)) {
                Ok(bytes) => bytes,
                Err(error) if is_memory_short(&error) && !reading.pieces.is_empty() => {
                    if !reading.is_summed {
                        // The bytes read so far can be sent.
                        break;
                    }
                    reading.pieces.clear();
                    reading.is_for_sum_alone = true;
                    continue;
                }
                Err(error) => return Poll::Ready(Err(error.into())),
            };
            if reading.is_summed {
                reading.sum.update(&bytes);
            }
            if !reading.is_for_sum_alone {
                reading.pieces.push_back(bytes);
            }
        }
        let Reading { block, is_summed, sum, pieces, is_for_sum_alone, .. } =
            self.reading.take().expect("a read is in flight");
        if is_summed && self.blocks.as_ref().is_some_and(|blocks| !blocks.check(block.start, sum.finalize())) {
            return Poll::Ready(Err(ReadError::Damaged));
        }
        if is_for_sum_alone {
            self.trusted_to = block.end;
        }
        (self.ready, self.ready_at) = (pieces, block.start);
        Poll::Ready(Ok(()))
    }

    /// Takes bytes that were read from the beginning of the piece.
    pub fn take_ready(&mut self, piece: &mut FilePiece) -> Option<Bytes> {
        while let Some(bytes) = self.ready.pop_front() {
            let start = self.ready_at;
            self.ready_at += bytes.len() as u64;
            let wanted = start.max(piece.offset)..self.ready_at.min(piece.offset + piece.length);
            // Bytes outside of the range were read only for the sum.
            if wanted.start == piece.offset && !wanted.is_empty() && piece.advance(wanted.end - wanted.start).is_ok() {
                return Some(bytes.slice((wanted.start - start) as usize..(wanted.end - start) as usize));
            }
        }
        None
    }
}
