//! Reading from files: what is in memory on the loop, everything else where the caller may block.

use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::{Errno, ReadWriteFlags};

use super::file::ReadAccess;
use super::{CachedRead, File, Rung, count_piece, mounts};
use crate::memory::buffer::Lease;
use crate::memory::bytes::Bytes;
use crate::memory::read_memory::ReadMemory;
use crate::pool::{ThreadPool, default_pool};
use crate::simulation::World;

/// What `O_DIRECT` demands of offsets, lengths and memory at least: the page, which serves every block size up to it.
const DIRECT_ALIGNMENT_MIN: usize = 4096;

impl File {
    /// Reads at most `length` bytes from `offset` on: fewer when the rest is not in memory, none at the end of the
    /// file. In the pool `default` if nothing is in memory. Errors: pread(2)'s, the pool's, `OutOfMemory` at the hard
    /// limit of leases.
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

    /// Reads what is in memory now, at most `length` bytes from `offset` on; `None` when the first byte is not, or when
    /// the look might wait.
    pub fn try_read_at(&self, offset: u64, length: usize) -> io::Result<Option<Bytes>> {
        match self.look(offset, length)? {
            CachedRead::Found(bytes) => Ok(Some(bytes)),
            CachedRead::NotInMemory | CachedRead::NotLooked => Ok(None),
        }
    }

    /// Reads what is in memory now; `None` = not without waiting.
    pub(crate) fn read_nowait(&self, offset: u64, into: &mut [u8]) -> Option<io::Result<usize>> {
        match self.shared.access {
            ReadAccess::Local => {}
            ReadAccess::Waits => return None,
            ReadAccess::Simulated(faults) => {
                let read = World::current().map(|world| world.read_resident(self, faults, offset, into));
                return read.flatten().map(|result| result.map_err(io::Error::from));
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
                // File systems in memory do not know the flag and need not wait. Others that do not know it may
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

    /// Reads a piece where it is, however long that takes (`aio off`); past the page cache where an alignment says so.
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

    /// Reads past the page cache, where the caller may block; through it where the file system has no other way.
    /// Returns the memory and where the piece is in it.
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
                // Larger blocks than anybody said.
                Err(Errno::INVAL) => return through_cache(),
                Err(errno) => return Err(errno.into()),
            }
            // Only the end of the file is not aligned.
            if !done.is_multiple_of(DIRECT_ALIGNMENT_MIN) {
                break;
            }
        }
        self.note_accessed();
        let piece = blocks.piece(done);
        if piece.is_empty() && offset < self.metadata().size {
            // Not the end that was known: what it is shows without the detour over blocks.
            return through_cache();
        }
        Ok((blocks.memory, piece))
    }

    /// The descriptor of [`File::direct`] if that has been asked for, without blocking; within, none if there cannot be
    /// one.
    pub(crate) fn opened_directly(&self) -> Option<Option<BorrowedFd<'_>>> {
        self.shared.direct.get().map(|direct| direct.as_ref().map(AsFd::as_fd))
    }

    /// A descriptor of its own, since the flag belongs to the descriptor, and others may read from this one. None where
    /// the file system has no such thing, which is remembered, or if it could not be opened just now. May block.
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
            // No free descriptor, say, or no right to read it any more.
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
                // What was read before the error is good; the error comes again.
                Err(_) if done > 0 => break,
                Err(errno) => return Err(errno.into()),
            }
        }
        // The kernel has not been asked for anything where there is no room for it.
        if !into.is_empty() {
            self.note_accessed();
        }
        Ok(done)
    }
}

/// The blocks around a piece of a file, and memory that is aligned as they are: what `O_DIRECT` demands.
pub(crate) struct Blocks {
    pub memory: ReadMemory,
    /// The part of the memory that the blocks go into.
    pub into: Range<usize>,
    /// Where the first block begins in the file.
    pub offset: u64,
    /// How far behind that the piece begins.
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

    /// Where the piece is in the memory, when so many bytes of the blocks have been read.
    pub fn piece(&self, read: usize) -> Range<usize> {
        let begin = self.into.start + self.before;
        begin..begin + read.saturating_sub(self.before).min(self.length)
    }
}
