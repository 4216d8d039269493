//! Opening files and inspecting paths, without blocking the loop.
//!
//! The kernel answers from its cache of names (`openat2` with `RESOLVE_CACHED`), or a pool does it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use gale_runtime::{Device, ThreadPool, default_pool};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::io::Errno;

use super::file_system::file_system;
use super::{File, FileMetadata, mounts};

/// `openat2` with `RESOLVE_CACHED` does not exist or is forbidden here.
static OPENAT2_REFUSED: AtomicBool = AtomicBool::new(false);

/// Flags for opening a file. Always close-on-exec, non-blocking, and never as controlling terminal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenFlags {
    /// Open for writing.
    pub write: bool,
    /// Open for reading.
    pub read: bool,
    /// Create the file if it is missing, with these permissions (less the umask).
    pub create: Option<u32>,
    /// With `create`: fail if the file exists (`O_EXCL`).
    pub exclusive: bool,
    /// Write always at the end (`O_APPEND`).
    pub append: bool,
    /// Truncate the file (`O_TRUNC`).
    pub truncate: bool,
    /// The last component must not be a symbolic link (`O_NOFOLLOW`).
    pub no_follow: bool,
    /// Reads do not update the file's access time (`O_NOATIME`), where the kernel permits that: on own files. Not with
    /// link checks.
    pub no_access_time: bool,
}

impl OpenFlags {
    /// For reading.
    pub const READ: OpenFlags = OpenFlags {
        write: false,
        read: true,
        create: None,
        exclusive: false,
        append: false,
        truncate: false,
        no_follow: false,
        no_access_time: false,
    };

    pub(super) fn kernel(self) -> OFlags {
        let access = match (self.read, self.write || self.append) {
            (true, true) => OFlags::RDWR,
            (false, true) => OFlags::WRONLY,
            _ => OFlags::RDONLY,
        };
        let mut flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        flags.set(OFlags::CREATE, self.create.is_some());
        flags.set(OFlags::EXCL, self.exclusive);
        flags.set(OFlags::APPEND, self.append);
        flags.set(OFlags::TRUNC, self.truncate);
        flags.set(OFlags::NOFOLLOW, self.no_follow);
        flags.set(OFlags::NOATIME, self.no_access_time);
        flags
    }

    pub(super) fn mode(self) -> Mode {
        Mode::from_raw_mode(self.create.unwrap_or(0))
    }

    /// True if the file may be changed through the descriptor.
    pub(super) fn writes(self) -> bool {
        self.write || self.append || self.truncate || self.create.is_some()
    }

    /// These flags without those that only the owner may use.
    pub(super) fn without_privilege(self) -> OpenFlags {
        OpenFlags { no_access_time: false, ..self }
    }

    /// The kernel does not create or truncate without accessing the disk.
    fn may_be_answered_from_cache(self) -> bool {
        self.create.is_none() && !self.truncate
    }
}

/// Opens a file, in the pool `default` if that cannot be done at once. Errors: open(2)'s, and the pool's.
pub async fn open(path: &Path, flags: OpenFlags) -> io::Result<File> {
    match attempt_open(path, flags) {
        Ok(result) => result,
        Err(device) => open_in_pool(&default_pool(), device, path, flags).await,
    }
}

/// Opens a file, in the given pool if that cannot be done at once.
pub async fn open_in(pool: &ThreadPool, path: &Path, flags: OpenFlags) -> io::Result<File> {
    match attempt_open(path, flags) {
        Ok(result) => result,
        Err(device) => open_in_pool(pool, device, path, flags).await,
    }
}

/// Metadata of a path, following links, in the pool `default` if that cannot be done at once.
pub async fn stat(path: &Path) -> io::Result<FileMetadata> {
    match attempt_stat(path) {
        Ok(result) => result,
        Err(device) => stat_in_pool(&default_pool(), device, path).await,
    }
}

/// Metadata of a path, following links, in the given pool if that cannot be done at once.
pub async fn stat_in(pool: &ThreadPool, path: &Path) -> io::Result<FileMetadata> {
    match attempt_stat(path) {
        Ok(result) => result,
        Err(device) => stat_in_pool(pool, device, path).await,
    }
}

/// The path without symbolic links, if the kernel can tell from memory; `None` = not without waiting.
pub fn try_real_path(path: &Path) -> Option<io::Result<PathBuf>> {
    file_system(|file_system| file_system.try_real_path(path))
}

pub(super) fn kernel_try_real_path(path: &Path) -> Option<io::Result<PathBuf>> {
    check_nothing_waits(path, false).ok()?;
    match resolve_cached(path, OFlags::PATH | OFlags::CLOEXEC)? {
        // Without /proc a pool walks the path.
        Ok(descriptor) => std::fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd())).ok().map(Ok),
        Err(errno) => Some(Err(errno.into())),
    }
}

/// As [`try_real_path`], in the pool `default` if that cannot be done at once.
pub async fn real_path(path: &Path) -> io::Result<PathBuf> {
    if let Some(found) = try_real_path(path) {
        return found;
    }
    let own = PathBuf::from(path);
    default_pool().run_for(likely_device(path), move || std::fs::canonicalize(own)).await?
}

/// Opens a file where the caller may block: at start, in a helper process, in a pool.
pub fn open_blocking(path: &Path, flags: OpenFlags) -> io::Result<File> {
    file_system(|file_system| file_system.open_blocking(path, flags))
}

pub(super) fn kernel_open_blocking(path: &Path, flags: OpenFlags) -> io::Result<File> {
    let descriptor = kernel_open(path, flags)?;
    // Set after the open: `O_NOATIME` fails for files of other users, after the open has created the file if owners are
    // changed.
    let kept = flags.kernel() & (OFlags::NONBLOCK | OFlags::APPEND) | OFlags::NOATIME;
    let no_access_time = flags.no_access_time && rustix::fs::fcntl_setfl(&descriptor, kept).is_ok();
    File::inspect_blocking(descriptor, no_access_time)
}

/// Opens a file without flags that only the owner may use.
pub(super) fn kernel_open(path: &Path, flags: OpenFlags) -> Result<OwnedFd, Errno> {
    let flags = flags.without_privilege();
    match rustix::fs::openat(CWD, path, flags.kernel(), flags.mode()) {
        // Another process holds a lease on it (fcntl(2)) that the kernel has asked it to release: that is worth waiting
        // for.
        Err(Errno::AGAIN) if is_regular(path) => {
            rustix::fs::openat(CWD, path, flags.kernel() - OFlags::NONBLOCK, flags.mode())
        }
        result => result,
    }
}

fn is_regular(path: &Path) -> bool {
    rustix::fs::stat(path).is_ok_and(|stat| FileMetadata::from_kernel(&stat).is_regular())
}

/// Opens a file if the kernel can do it from memory; `None` = not without waiting: then [`open`] uses the pool. Always
/// `None` for flags that create or truncate.
pub fn try_open(path: &Path, flags: OpenFlags) -> Option<io::Result<File>> {
    attempt_open(path, flags).ok()
}

/// Metadata of a path, following links, if the kernel can tell from memory; `None` = not without waiting.
pub fn try_stat(path: &Path) -> Option<io::Result<FileMetadata>> {
    attempt_stat(path).ok()
}

/// Opens a file if that cannot wait; the error is the device that a pool will wait for.
fn attempt_open(path: &Path, flags: OpenFlags) -> Result<io::Result<File>, Device> {
    file_system(|file_system| file_system.attempt_open(path, flags))
}

/// As [`attempt_open`].
fn attempt_stat(path: &Path) -> Result<io::Result<FileMetadata>, Device> {
    file_system(|file_system| file_system.attempt_stat(path))
}

/// Opens a file from the kernel's cache of names.
pub(super) fn kernel_attempt_open(path: &Path, flags: OpenFlags) -> Result<io::Result<File>, Device> {
    if !flags.may_be_answered_from_cache() {
        return Err(likely_device(path));
    }
    check_nothing_waits(path, flags.no_follow)?;
    Ok(match resolve_cached(path, flags.kernel()).ok_or_else(|| likely_device(path))? {
        Ok(descriptor) => File::inspect_local(descriptor, flags.no_access_time),
        Err(Errno::PERM) if flags.no_access_time => return kernel_attempt_open(path, flags.without_privilege()),
        Err(errno) => Err(errno.into()),
    })
}

/// As [`kernel_attempt_open`].
pub(super) fn kernel_attempt_stat(path: &Path) -> Result<io::Result<FileMetadata>, Device> {
    check_nothing_waits(path, false)?;
    Ok(match resolve_cached(path, OFlags::PATH | OFlags::CLOEXEC).ok_or_else(|| likely_device(path))? {
        Ok(descriptor) => {
            let metadata = rustix::fs::fstat(&descriptor).map(|stat| FileMetadata::from_kernel(&stat));
            if let Ok(FileMetadata { links: 0, device, .. }) = metadata {
                // It was unlinked at this moment: closing it may free its blocks.
                default_pool().dispose(Device::number(device), descriptor);
            }
            metadata.map_err(io::Error::from)
        }
        Err(errno) => Err(errno.into()),
    })
}

/// Succeeds if an open of this path waits for no other machine or process. If it may, or that is unknown without
/// waiting, the error is the device that a pool will wait for.
pub(super) fn check_nothing_waits(path: &Path, no_follow: bool) -> Result<(), Device> {
    if mounts::refresh_due() {
        // If the pool refuses this, it is repeated a few seconds later.
        let _ = default_pool().detach(Device::NONE, mounts::refresh);
    }
    if !mounts::any_waiting() {
        return Ok(());
    }
    let mut flags = OFlags::PATH | OFlags::CLOEXEC;
    flags.set(OFlags::NOFOLLOW, no_follow);
    let descriptor = match resolve_cached(path, flags).ok_or_else(|| likely_device(path))? {
        Ok(descriptor) => descriptor,
        // The real open will fail in the same way.
        Err(_) => return Ok(()),
    };
    // DONT_SYNC: cached metadata, without asking a server.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let Ok(stat) = rustix::fs::statx(&descriptor, c"", flags, StatxFlags::empty()) else {
        return Err(likely_device(path));
    };
    let device = rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor);
    if mounts::may_wait(device) == Some(false) { Ok(()) } else { Err(Device::number(device)) }
}

/// The device that walking a path will wait for, as far as its text tells: the one mounted above it. For pool tasks.
pub fn likely_device(path: &Path) -> Device {
    mounts::device_of_path(path).map_or(Device::NONE, Device::number)
}

/// Opens from the kernel's cache of names; `None` if it is not there, or the kernel cannot do this.
pub(super) fn resolve_cached(path: &Path, flags: OFlags) -> Option<Result<OwnedFd, Errno>> {
    if is_openat2_refused() {
        return None;
    }
    match rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::CACHED) {
        Err(Errno::AGAIN | Errno::INTR) => None,
        result => Some(result),
    }
}

/// Tests whether `openat2` with `RESOLVE_CACHED` works: not in kernels before 5.12, nor where seccomp forbids it. The
/// root directory is always in the cache. Called before the first open.
pub(crate) fn probe() {
    let result = rustix::fs::openat2(CWD, c"/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), ResolveFlags::CACHED);
    // Other errors are temporary: a mount under way, no free descriptor.
    let is_refused = matches!(result, Err(Errno::NOSYS | Errno::INVAL | Errno::PERM | Errno::ACCESS));
    OPENAT2_REFUSED.store(is_refused, Ordering::Relaxed);
}

pub(super) fn is_openat2_refused() -> bool {
    OPENAT2_REFUSED.load(Ordering::Relaxed)
}

async fn open_in_pool(pool: &ThreadPool, device: Device, path: &Path, flags: OpenFlags) -> io::Result<File> {
    let path = PathBuf::from(path);
    pool.run_for(device, move || open_blocking(&path, flags)).await?
}

async fn stat_in_pool(pool: &ThreadPool, device: Device, path: &Path) -> io::Result<FileMetadata> {
    let path = PathBuf::from(path);
    pool.run_for(device, move || file_system(|file_system| file_system.stat_blocking(&path))).await?
}

pub(super) fn kernel_stat_blocking(path: &Path) -> io::Result<FileMetadata> {
    let descriptor = rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let stat = rustix::fs::fstat(&descriptor)?;
    let metadata = FileMetadata::from_kernel(&stat);
    mounts::classify(metadata.device, descriptor.as_fd());
    Ok(metadata)
}
