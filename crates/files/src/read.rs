//! Reading from files: on the loop if the bytes are in memory, otherwise where the caller may block.

use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use gale_runtime::{Bytes, Lease, ReadMemory, ThreadPool, default_pool};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::{Errno, ReadWriteFlags};

use super::file::ReadAccess;
use super::simulated::read_resident;
use super::{CachedRead, File, Rung, count_piece, mounts};

/// Alignment of offsets, lengths and memory that `O_DIRECT` may demand: the page size covers every smaller block size.
const DIRECT_ALIGNMENT_MIN: usize = 4096;

impl File {
    /// Reads at most `length` bytes from `offset` on: fewer when the rest is not in memory, none at the end of the
    /// file. If no byte is in memory, the pool `default` reads. Errors: pread(2)'s, the pool's, `OutOfMemory` at the
    /// hard limit of leases.
    pub async fn read_at(&self, offset: u64, length: usize) -> io::Result<Bytes> {
        match self.look(offset, length)? {
            CachedRead::Found(bytes) => Ok(bytes),
            missed => self.begin_read(&default_pool(), offset, length, missed.how())?.await,
        }
    }

    /// Reads as [`File::read_at`], with the given pool.
    pub async fn read_at_in(&self, pool: &ThreadPool, offset: u64, length: usize) -> io::Result<Bytes> {
        match self.look(offset, length)? {
            CachedRead::Found(bytes) => Ok(bytes),
            missed => self.begin_read(pool, offset, length, missed.how())?.await,
        }
    }

    /// Reads bytes that are in memory, at most `length` from `offset` on; `None` if the first byte is not in memory, or
    /// the check might wait.
    pub fn try_read_at(&self, offset: u64, length: usize) -> io::Result<Option<Bytes>> {
        match self.look(offset, length)? {
            CachedRead::Found(bytes) => Ok(Some(bytes)),
            CachedRead::NotInMemory | CachedRead::NotLooked => Ok(None),
        }
    }

    /// Reads bytes that are in memory; `None` = not without waiting.
    pub(crate) fn read_nowait(&self, offset: u64, into: &mut [u8]) -> Option<io::Result<usize>> {
        match self.shared.access {
            ReadAccess::Local => {}
            ReadAccess::Waits => return None,
            ReadAccess::Simulated(faults) => {
                let read = read_resident(self.as_fd(), faults, offset, into);
                return read.map(|result| result.map_err(io::Error::from));
            }
        }
        loop {
            let result = if self.shared.lies_in_memory.load(Ordering::Relaxed) {
                rustix::io::pread(self.as_fd(), &mut *into, offset)
            } else {
                let slices = &mut [IoSliceMut::new(into)];
                rustix::io::preadv2(self.as_fd(), slices, offset, ReadWriteFlags::NOWAIT)
            };
            return match result {
                Err(Errno::INTR) => continue,
                // File systems in memory do not support the flag and need not wait. Others without support may
                // (overlayfs).
                Err(Errno::OPNOTSUPP) if mounts::lies_in_memory(self.metadata().device) => {
                    self.shared.lies_in_memory.store(true, Ordering::Relaxed);
                    continue;
                }
                Err(Errno::AGAIN | Errno::NOSYS | Errno::OPNOTSUPP) => None,
                result => Some(result.map_err(io::Error::from)),
            };
        }
    }

    /// Reads a piece on the calling thread, even if that blocks (`aio off`); with `O_DIRECT` if there is an alignment.
    /// Errors: pread(2)'s, `OutOfMemory` at the hard limit of leases.
    pub fn read_in_place(&self, offset: u64, length: usize, direct: Option<u32>) -> io::Result<Bytes> {
        let mut lease = Lease::new(length)?;
        let count = match direct {
            Some(alignment) => {
                let (memory, piece) = self.read_direct(offset, length, alignment)?;
                lease[..piece.len()].copy_from_slice(&memory[piece.clone()]);
                piece.len()
            }
            None => self.read_blocking(offset, &mut lease)?,
        };
        lease.truncate(count);
        count_piece(Rung::Blocking, count as u64);
        Ok(lease.freeze())
    }

    /// Reads with `O_DIRECT`, where the caller may block; through the page cache if the file system does not support
    /// it. Returns the memory and the range of the piece in it.
    pub(crate) fn read_direct(
        &self,
        offset: u64,
        length: usize,
        alignment: u32,
    ) -> io::Result<(ReadMemory, Range<usize>)> {
        let through_cache = || {
            let mut memory = ReadMemory::new(length);
            let count = self.read_blocking(offset, &mut memory)?;
            Ok((memory, 0..count))
        };
        let Some(direct) = self.direct() else { return through_cache() };
        let mut blocks = Blocks::around(offset, length, alignment);
        let mut done = 0;
        while done < blocks.into.len() {
            let begin = blocks.offset + done as u64;
            let rest = blocks.into.start + done..blocks.into.end;
            match rustix::io::pread(direct, &mut blocks.memory[rest], begin) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(Errno::INTR) => continue,
                // The file system needs larger blocks than it has reported.
                Err(Errno::INVAL) => return through_cache(),
                Err(errno) => return Err(errno.into()),
            }
            // Only the end of the file is unaligned.
            if !done.is_multiple_of(DIRECT_ALIGNMENT_MIN) {
                break;
            }
        }
        self.note_accessed();
        let piece = blocks.piece(done);
        if piece.is_empty() && offset < self.metadata().size {
            // The file ends earlier than its metadata said: read it without the rounding to blocks.
            return through_cache();
        }
        Ok((blocks.memory, piece))
    }

    /// The descriptor of [`File::direct`] if it was opened before; never blocks. The inner `None` means that there
    /// cannot be one.
    pub(crate) fn opened_directly(&self) -> Option<Option<BorrowedFd<'_>>> {
        self.shared.direct.get().map(|direct| direct.as_ref().map(AsFd::as_fd))
    }

    /// A descriptor of its own, since `O_DIRECT` belongs to the descriptor, which others read from too. `None` if the
    /// file system does not support it, which is remembered, or if the open failed this time. May block.
    pub(crate) fn direct(&self) -> Option<BorrowedFd<'_>> {
        if matches!(self.shared.access, ReadAccess::Simulated(_)) {
            return None;
        }
        let open = || {
            let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&self.as_fd()));
            let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC | OFlags::NONBLOCK;
            rustix::fs::openat(CWD, path, flags, Mode::empty())
        };
        if let Some(opened) = self.opened_directly() {
            return opened;
        }
        match open() {
            Err(Errno::INVAL) => self.shared.direct.get_or_init(|| None),
            // For example no free descriptor, or no permission to read any more.
            Err(_) => &None,
            Ok(direct) => self.shared.direct.get_or_init(|| Some(direct)),
        }
        .as_ref()
        .map(AsFd::as_fd)
    }

    /// Reads until `into` is full or the file ends, where the caller may block.
    pub fn read_blocking(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let faults = match self.shared.access {
            ReadAccess::Simulated(faults) => Some(faults),
            ReadAccess::Local | ReadAccess::Waits => None,
        };
        let mut done = 0;
        while done < into.len() {
            let (rest, at) = (&mut into[done..], offset + done as u64);
            let read = match faults {
                None => rustix::io::pread(self.as_fd(), rest, at),
                Some(faults) => faults.read(self.as_fd(), at, rest),
            };
            match read {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                // Bytes read before the error are good; the next read gets the error again.
                Err(_) if done > 0 => break,
                Err(errno) => return Err(errno.into()),
            }
        }
        // An empty `into` made no system call.
        if !into.is_empty() {
            self.note_accessed();
        }
        Ok(done)
    }
}

/// The blocks around a piece of a file, and memory aligned like them, as `O_DIRECT` demands.
pub(crate) struct Blocks {
    pub memory: ReadMemory,
    /// The range of the memory that the blocks are read into.
    pub into: Range<usize>,
    /// File offset of the first block.
    pub offset: u64,
    /// Distance of the piece from that offset.
    before: usize,
    length: usize,
}

impl Blocks {
    pub fn around(offset: u64, length: usize, alignment: u32) -> Blocks {
        let alignment = (alignment as usize).next_power_of_two().max(DIRECT_ALIGNMENT_MIN);
        let before = (offset % alignment as u64) as usize;
        let wanted = (before + length).next_multiple_of(alignment);
        let memory = ReadMemory::new(wanted + alignment);
        let skipped = memory.as_ptr().align_offset(alignment);
        Blocks { memory, into: skipped..skipped + wanted, offset: offset - before as u64, before, length }
    }

    /// The range of the piece in the memory, if `read` bytes of the blocks were read.
    pub fn piece(&self, read: usize) -> Range<usize> {
        let begin = self.into.start + self.before;
        begin..begin + read.saturating_sub(self.before).min(self.length)
    }
}
