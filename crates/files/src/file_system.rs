//! The file system of a thread: the kernel's, or a simulated world's. No other code distinguishes the two.

use std::io::{self, IoSlice};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use gale_runtime::Device;
use gale_runtime::simulation::Simulation;
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::page_cache::PageCache;
use super::simulated::SimulatedFileSystem;
use super::{File, FileMetadata, OpenFlags, mounts, open};

pub(super) trait FileSystem {
    /// Opens a file where the caller may block.
    fn open_blocking(&self, path: &Path, flags: OpenFlags) -> io::Result<File>;

    /// Opens a file if that cannot wait; the error is the device that a pool will wait for.
    fn attempt_open(&self, path: &Path, flags: OpenFlags) -> Result<io::Result<File>, Device>;

    /// Metadata of a path, following links; may block.
    fn stat_blocking(&self, path: &Path) -> io::Result<FileMetadata>;

    /// As [`FileSystem::attempt_open`].
    fn attempt_stat(&self, path: &Path) -> Result<io::Result<FileMetadata>, Device>;

    /// The path without symbolic links, if that cannot wait; `None` = not without waiting.
    fn try_real_path(&self, path: &Path) -> Option<io::Result<PathBuf>>;

    /// True if opens with checked links can be done without waiting.
    fn can_check_links(&self) -> bool;

    /// Adopts a file that was opened otherwise. May block.
    fn adopt(&self, descriptor: OwnedFd) -> io::Result<File>;

    /// True if the ring can read files of this device without a kernel thread that waits, as far as is known.
    fn reads_asynchronously(&self, device: u64) -> bool;

    /// Writes pieces, perhaps only the first bytes of them; may block.
    fn write(&self, file: BorrowedFd<'_>, pieces: &[IoSlice<'_>], offset: u64) -> Result<usize, Errno>;

    /// Facts about pages in memory.
    fn page_cache(&self) -> &Arc<PageCache>;
}

/// Calls `f` with the file system of this thread's loop; the kernel's on other threads.
#[inline]
pub(super) fn file_system<R>(f: impl FnOnce(&dyn FileSystem) -> R) -> R {
    match Simulation::current() {
        None => f(&*KERNEL),
        Some(simulation) => f(&SimulatedFileSystem::of(simulation)),
    }
}

/// Reads the mount table, if that is due, and tests calls that old kernels do not have. To be called before an event
/// loop is set up; otherwise the first operation does it, which then takes longer.
pub fn prepare() {
    LazyLock::force(&KERNEL);
    refresh_mounts();
}

fn refresh_mounts() {
    if mounts::refresh_due() {
        mounts::refresh();
        open::probe();
    }
}

/// The kernel's file system.
struct Kernel;

/// Made when everything that its calls rely on is known.
static KERNEL: LazyLock<Kernel> = LazyLock::new(|| {
    refresh_mounts();
    Kernel
});

/// Facts that all loops of the process share.
pub(super) static PAGE_CACHE: LazyLock<Arc<PageCache>> = LazyLock::new(PageCache::new);

impl FileSystem for Kernel {
    fn open_blocking(&self, path: &Path, flags: OpenFlags) -> io::Result<File> {
        open::kernel_open_blocking(path, flags)
    }

    fn attempt_open(&self, path: &Path, flags: OpenFlags) -> Result<io::Result<File>, Device> {
        open::kernel_attempt_open(path, flags)
    }

    fn stat_blocking(&self, path: &Path) -> io::Result<FileMetadata> {
        open::kernel_stat_blocking(path)
    }

    fn attempt_stat(&self, path: &Path) -> Result<io::Result<FileMetadata>, Device> {
        open::kernel_attempt_stat(path)
    }

    fn try_real_path(&self, path: &Path) -> Option<io::Result<PathBuf>> {
        open::kernel_try_real_path(path)
    }

    fn can_check_links(&self) -> bool {
        !open::is_openat2_refused()
    }

    fn adopt(&self, descriptor: OwnedFd) -> io::Result<File> {
        let no_access_time = rustix::fs::fcntl_getfl(&descriptor)?.contains(OFlags::NOATIME);
        File::inspect_blocking(descriptor, no_access_time)
    }

    fn reads_asynchronously(&self, device: u64) -> bool {
        mounts::reads_asynchronously(device)
    }

    fn write(&self, file: BorrowedFd<'_>, pieces: &[IoSlice<'_>], offset: u64) -> Result<usize, Errno> {
        rustix::io::retry_on_intr(|| rustix::io::pwritev(file, pieces, offset))
    }

    #[inline]
    fn page_cache(&self) -> &Arc<PageCache> {
        &PAGE_CACHE
    }
}
