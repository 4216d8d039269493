//! Reads pieces of files into memory, for filters, TLS and HTTP/2: the delivery ladder without `sendfile`.
//!
//! A reader holds at most one piece at a time. Dropping it abandons a read that has not begun.

use std::io;
use std::task::{Context, Poll};

use gale_runtime::Bytes;

use crate::files::FilePiece;
use crate::files::delivery::{Delivery, FileOptions, Next};

pub use crate::files::delivery::READ_PIECE;

/// Reads pieces of files from their beginnings to their ends.
#[derive(Default)]
pub struct FileReader {
    delivery: Delivery,
}

impl FileReader {
    /// A reader with the options of a location; the default has the defaults of all directives.
    pub fn new(options: FileOptions) -> FileReader {
        FileReader { delivery: Delivery::new(FileOptions { sendfile: false, ..options }) }
    }

    /// Returns the next bytes of the piece and takes them from the piece. Until they are there, the same piece must be
    /// passed. Errors: the kernel's and the pool's; `UnexpectedEof` if the file has become shorter.
    pub fn poll_read(&mut self, piece: &mut FilePiece, context: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        match self.try_read(piece) {
            Ok(Some(bytes)) => Poll::Ready(Ok(bytes)),
            // It is not known here whether the client waits for the disk, or is slow itself.
            Ok(None) => self.delivery.poll_read(piece, false, context),
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    /// Like [`FileReader::poll_read`], for bytes available without blocking. `None` means that a read has begun.
    pub fn try_read(&mut self, piece: &mut FilePiece) -> io::Result<Option<Bytes>> {
        match self.delivery.next(piece)? {
            Next::Bytes(bytes) => Ok(Some(bytes)),
            Next::Reading => Ok(None),
            Next::Sendfile(_) => unreachable!("it is off"),
        }
    }

    /// True if a read is in progress.
    pub fn is_reading(&self) -> bool {
        self.delivery.is_reading()
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use gale_files::{self as files, OpenFlags, SimulatedFiles};
    use gale_runtime::simulation::{Faults, Simulation, each_seed};
    use gale_runtime::{EventLoop, Lease, LoopOptions, leased_bytes};

    use super::*;

    #[test]
    fn a_reader_gets_every_byte_of_a_piece_wherever_it_lies() {
        each_seed(30, |simulation: &Simulation| {
            let content: Vec<u8> = (0..400_000_u32).map(|number| (number / 7) as u8).collect();
            simulation.add_file("/file", &content).unwrap();
            let cold_files = [0, 300, 1000][simulation.seed() as usize % 3];
            simulation.set_faults(Faults { cold_files, short_reads: 200, slow_calls: 100, ..Faults::NONE });
            EventLoop::simulated(simulation, LoopOptions::default()).unwrap().run(async {
                let file = files::open(std::path::Path::new("/file"), OpenFlags::READ).await.unwrap();
                let mut piece = FilePiece { file, offset: 1234, length: 390_000 };
                let (mut reader, mut read) = (FileReader::default(), Vec::new());
                while piece.length > 0 {
                    let bytes = poll_fn(|context| reader.poll_read(&mut piece, context)).await.unwrap();
                    read.extend_from_slice(&bytes);
                }
                assert!(read == content[1234..391_234] && !reader.is_reading());
                // Beyond the end, as if the file had become shorter.
                piece.offset = 400_000;
                piece.length = 1;
                let error = poll_fn(|context| reader.poll_read(&mut piece, context)).await.unwrap_err();
                assert_eq!((error.kind(), leased_bytes()), (io::ErrorKind::UnexpectedEof, 0));
            });
        });
    }
    #[test]
    fn file_is_sent_whole_in_smaller_pieces_when_memory_is_short() {
        each_seed(20, |simulation: &Simulation| {
            let content: Vec<u8> = (0..700_000_u32).map(|number| (number / 7) as u8).collect();
            simulation.add_file("/file", &content).unwrap();
            let cold_files = [0, 500, 1000, 1000][simulation.seed() as usize % 4];
            simulation.set_faults(Faults { cold_files, ..Faults::NONE });
            // Up to a quarter more: room for 64 KiB, but not for the 256 KiB read for a client that waits.
            let options = LoopOptions { leased_bytes_max: Some(160 * 1024), ..LoopOptions::default() };
            EventLoop::simulated(simulation, options).unwrap().run(async {
                let file = files::open(std::path::Path::new("/file"), OpenFlags::READ).await.unwrap();
                // Other leases hold most of the memory, or nearly all.
                let others = [0, 100 * 1024, 190 * 1024][simulation.seed() as usize % 3];
                let others: Vec<Lease> = (0..others / 1024).map(|_| Lease::new(1024).unwrap()).collect();
                let mut piece = FilePiece { file, offset: 0, length: content.len() as u64 };
                let (mut reader, mut read) = (FileReader::default(), Vec::new());
                while piece.length > 0 {
                    let bytes = poll_fn(|context| reader.poll_read(&mut piece, context)).await.unwrap();
                    read.extend_from_slice(&bytes);
                }
                assert!(read == content);
                drop(others);
            });
        });
    }
}
