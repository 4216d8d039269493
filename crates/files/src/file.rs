//! An open file: its descriptor, and its metadata when it was opened.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gale_runtime::simulation::FileFaults;
use gale_runtime::{Device, Moment, default_pool, now_anywhere, on_a_pool_thread, wall_anywhere};
use rustix::fs::{Advice, Stat};

use super::access_time::AccessTime;
use super::file_system::file_system;
use super::page_cache::FileHash;
use super::shared_reads::FileKey;
use super::{FileMetadata, mounts};

/// Closing a file that was unlinked meanwhile frees its blocks, which is work for a pool. From this size on each close
/// checks for that, which costs a tenth of handing the file over; for smaller ones only if they were open for long
/// enough.
const UNLINKED_MATTERS_BYTES: u64 = 1 << 20;

/// Smaller files that were open for less than this are hardly ever unlinked meanwhile, and little is lost if they are.
const UNLINKED_SOON: Duration = Duration::from_millis(10);

/// Size from which on the kernel is told that a file will be read sequentially; nginx's value.
const SEQUENTIAL_MIN_BYTES: u64 = 128 * 1024;

/// An open file: descriptor and metadata when it was opened. Clones are the same file.
#[derive(Clone)]
pub struct File {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    /// `None` only while it is being dropped.
    descriptor: Option<OwnedFd>,
    pub(super) metadata: FileMetadata,
    pub(super) access: ReadAccess,
    pub(super) access_time: AccessTime,
    pub(super) hash: FileHash,
    opened: Moment,
    /// Its file system was found to be in memory.
    pub(super) lies_in_memory: AtomicBool,
    pub(super) was_advised: AtomicBool,
    /// Closing may take long: the file is or was written through this descriptor, or is unlinked by others.
    closes_in_pool: AtomicBool,
    /// A [`super::Writer`] uses it.
    is_written: AtomicBool,
    /// The kernel does not tell this process which pages of the file are in memory.
    pub(super) is_foreign: AtomicBool,
    /// The same file opened with `O_DIRECT`; `None` where that is impossible.
    pub(super) direct: OnceLock<Option<OwnedFd>>,
}

/// Ways of reading the file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadAccess {
    /// On the loop, if it is in memory.
    Local,
    /// Its file system may wait for others: only in a pool.
    Waits,
    /// Simulated, with these faults.
    Simulated(FileFaults),
}

impl File {
    pub(super) fn new(
        descriptor: OwnedFd,
        metadata: FileMetadata,
        access: ReadAccess,
        access_time: AccessTime,
    ) -> Self {
        let hash = FileHash::new(metadata.device, metadata.inode);
        File::with_hash(descriptor, metadata, access, access_time, hash)
    }

    /// As `new`, with another hash in the table of facts.
    pub(super) fn with_hash(
        descriptor: OwnedFd,
        metadata: FileMetadata,
        access: ReadAccess,
        access_time: AccessTime,
        hash: FileHash,
    ) -> Self {
        let shared = Shared {
            descriptor: Some(descriptor),
            metadata,
            access,
            access_time,
            hash,
            opened: now_anywhere(),
            lies_in_memory: AtomicBool::new(false),
            was_advised: AtomicBool::new(false),
            closes_in_pool: AtomicBool::new(false),
            is_written: AtomicBool::new(false),
            is_foreign: AtomicBool::new(false),
            direct: OnceLock::new(),
        };
        File { shared: Arc::new(shared) }
    }

    /// A file that was opened where that may block, perhaps so that reads do not update its access time.
    pub(super) fn inspect_blocking(descriptor: OwnedFd, no_access_time: bool) -> io::Result<File> {
        let stat = rustix::fs::fstat(&descriptor)?;
        let metadata = FileMetadata::from_kernel(&stat);
        if mounts::classify(metadata.device, descriptor.as_fd()) {
            return Ok(File::new(descriptor, metadata, ReadAccess::Waits, AccessTime::of_no_concern()));
        }
        Ok(File::local(descriptor, &stat, no_access_time))
    }

    /// A file that was opened without waiting, so its file system does not wait for others.
    pub(super) fn inspect_local(descriptor: OwnedFd, no_access_time: bool) -> io::Result<File> {
        let stat = rustix::fs::fstat(&descriptor)?;
        Ok(File::local(descriptor, &stat, no_access_time))
    }

    fn local(descriptor: OwnedFd, stat: &Stat, no_access_time: bool) -> File {
        let access_time = match no_access_time {
            true => AccessTime::of_no_concern(),
            false => AccessTime::new(descriptor.as_fd(), stat, wall_anywhere()),
        };
        File::new(descriptor, FileMetadata::from_kernel(stat), ReadAccess::Local, access_time)
    }

    /// Adopts a file that was opened otherwise. May block on file systems that wait for others. Errors: fstat(2)'s.
    pub fn from_std(file: std::fs::File) -> io::Result<Self> {
        file_system(|file_system| file_system.adopt(file.into()))
    }

    /// Metadata when the file was opened.
    pub fn metadata(&self) -> &FileMetadata {
        &self.shared.metadata
    }

    /// Current metadata. May block for files that wait for others; see [`File::waits_for_others`]. Errors: fstat(2)'s.
    pub fn look_again(&self) -> io::Result<FileMetadata> {
        match self.shared.access {
            ReadAccess::Simulated(_) => Ok(self.shared.metadata),
            ReadAccess::Local | ReadAccess::Waits => Ok(FileMetadata::from_kernel(&rustix::fs::fstat(self.as_fd())?)),
        }
    }

    /// Makes a pool close the file when the last handle is dropped. Closing may take long after writes, because the
    /// file system has work to finish, and always for files that will be unlinked, which can only be found out by
    /// asking.
    pub fn close_in_pool(&self) {
        self.shared.closes_in_pool.store(true, Ordering::Relaxed);
    }

    /// Notes that a [`super::Writer`] uses the file. It counts as being written until it is [renewed](File::renewed).
    pub(super) fn note_writer(&self) {
        self.shared.is_written.store(true, Ordering::Relaxed);
        self.close_in_pool();
    }

    /// True if the file is being written, as far as is known.
    #[inline]
    pub(super) fn is_written(&self) -> bool {
        self.shared.is_written.load(Ordering::Relaxed)
    }

    /// The same file with its current metadata and a descriptor of its own, where the caller may block. Errors:
    /// fstat(2)'s, and fcntl(2)'s if other handles exist.
    pub(super) fn renewed(mut self) -> io::Result<File> {
        let descriptor = match Arc::get_mut(&mut self.shared).and_then(|shared| shared.descriptor.take()) {
            Some(descriptor) => descriptor,
            None => rustix::io::fcntl_dupfd_cloexec(&self, 0)?,
        };
        file_system(|file_system| file_system.adopt(descriptor))
    }

    /// Number of handles, this one and those of reads in flight included.
    pub fn handles(&self) -> usize {
        Arc::strong_count(&self.shared)
    }

    /// The current path, for messages: the kernel knows the names of open files, and waits for no disk. `None` without
    /// procfs.
    pub fn path(&self) -> Option<PathBuf> {
        std::fs::read_link(format!("/proc/self/fd/{}", self.as_fd().as_raw_fd())).ok()
    }

    /// The device that operations on the file wait for.
    pub fn device(&self) -> Device {
        Device::number(self.shared.metadata.device)
    }

    /// True if operations on it may wait for another machine or process, so that all of them belong in a pool.
    pub fn waits_for_others(&self) -> bool {
        self.shared.access == ReadAccess::Waits
    }

    /// True if a read now updates the access time, and so may wait for the file system.
    #[inline]
    pub(crate) fn writes_access_time(&self) -> bool {
        let (time, wall) = (&self.shared.access_time, wall_anywhere());
        time.may_be_due(wall) && time.is_written(self.as_fd(), self.metadata().device, wall)
    }

    /// Notes a read that was allowed to block: it may have updated the access time, so that the next one does not.
    pub(crate) fn note_accessed(&self) {
        if self.writes_access_time()
            && let Ok(stat) = rustix::fs::fstat(self.as_fd())
        {
            self.shared.access_time.note(&stat, wall_anywhere());
        }
    }

    /// Number of bytes read that belong to the file; may block. If a file is truncated during a read, the read may
    /// return zeros for the lost part: the kernel clears pages that are still being copied from.
    pub(crate) fn still_there(&self, offset: u64, count: usize) -> usize {
        if self.shared.access != ReadAccess::Local {
            return count;
        }
        match self.look_again() {
            Ok(now) if now.size < self.metadata().size => {
                usize::try_from(now.size.saturating_sub(offset)).map_or(count, |rest| rest.min(count))
            }
            _ => count,
        }
    }

    pub(crate) fn key(&self) -> FileKey {
        let metadata = self.metadata();
        match self.waits_for_others() {
            true => FileKey::Itself(Arc::as_ptr(&self.shared) as usize),
            false => FileKey::Content {
                device: metadata.device,
                inode: metadata.inode,
                size: metadata.size,
                modified: (metadata.modified_seconds, metadata.modified_nanos),
                changed: (metadata.changed_seconds, metadata.changed_nanos),
            },
        }
    }

    /// Advises the kernel, once, that the file will be read sequentially (`read_ahead`), which doubles the read-ahead.
    /// Small files are not worth the call.
    pub fn advise_sequential(&self) {
        let is_worth_it = self.metadata().size > SEQUENTIAL_MIN_BYTES && self.shared.access == ReadAccess::Local;
        if is_worth_it && !self.shared.was_advised.swap(true, Ordering::Relaxed) {
            // It is only a hint.
            let _ = rustix::fs::fadvise(self.as_fd(), 0, None, Advice::Sequential);
        }
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.descriptor.as_ref().expect("the descriptor is open until the last owner is dropped").as_fd()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let descriptors = (self.descriptor.take(), self.direct.take());
        // On other threads too: the last handle may be dropped where waiting for a device is no good.
        if descriptors.0.is_some() && !on_a_pool_thread() && self.is_close_costly(&descriptors.0) {
            // Never refused: there are no more of these than descriptors.
            default_pool().dispose(Device::number(self.metadata.device), descriptors);
        }
    }
}

impl Shared {
    /// True if closing may wait.
    fn is_close_costly(&self, descriptor: &Option<OwnedFd>) -> bool {
        let is_unlinked = || {
            let stat = descriptor.as_ref().map(rustix::fs::fstat);
            stat.is_some_and(|stat| stat.is_ok_and(|stat| stat.st_nlink == 0))
        };
        let matters = || {
            self.metadata.size >= UNLINKED_MATTERS_BYTES
                || self.access == ReadAccess::Local && now_anywhere() - self.opened > UNLINKED_SOON
        };
        self.access == ReadAccess::Waits || self.closes_in_pool.load(Ordering::Relaxed) || matters() && is_unlinked()
    }
}

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "File({:?}, {} bytes)", self.as_fd(), self.shared.metadata.size)
    }
}
