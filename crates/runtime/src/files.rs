//! Files: opened, looked at and read without blocking the loop.
//!
//! Everything is tried where it cannot wait and else done in a thread pool, which returns the result itself:
//!
//! | | first | else |
//! |---|---|---|
//! | open, stat | `openat2(RESOLVE_CACHED)`: answers from the kernel's cache of names | EAGAIN: pool |
//! | read | `preadv2(RWF_NOWAIT)`: answers from the page cache | EAGAIN: pool; EOPNOTSUPP: plain read on tmpfs and the like, else pool |
//! | file systems that wait for others (FUSE, NFS …) | pool | |
//! | last close of a file that was unlinked | pool | |
//!
//! Even a read that is refused may wait, when the device has much to do (`devices.rs`): then what is not known to be in memory
//! (`residency.rs`) goes to the pool without a look; so do the reads that write the file's time of access: with
//! `relatime` the first after a change, and one a day (`files/access_time.rs`). What a pool reads is
//! read once for all who want it (`reads.rs`).
//!
//! Opens are `O_NONBLOCK`: a FIFO or a device never holds anybody up. (Only a thread of the pool waits for a regular file
//! that is leased out.) Where `openat2` is missing (old kernels,
//! seccomp) the pool does it all. What goes to a pool says which device it will wait for, so that one that hangs does not
//! take the pool from the others.

mod access_time;
mod links;

use std::cell::RefCell;
use std::fmt;
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{Advice, AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat, StatxFlags};
use rustix::io::{Errno, ReadWriteFlags};

use crate::buffer::Lease;
use crate::bytes::Bytes;
use crate::devices::{Knowledge, Verdict, watch};
use crate::file_counters::{Event, Rung, count_event, count_piece};
use crate::mounts;
use crate::pool::{Device, ThreadPool, default_pool, on_a_pool_thread};
use crate::reads::{FileKey, Flights, PieceRead, ReadHow};
use crate::residency::{BELIEVED_TICKS, FileHash, GRANULE, PAGE, Residency, Run, WORTH_TRYING_TICKS};
use crate::simulation::{FileFaults, World};
use crate::time::{Moment, now_anywhere, wall_anywhere};
use access_time::AccessTime;

pub use links::{
    LinkCheck, RefusedLinks, open_checked, open_checked_blocking, stat_checked, try_open_checked, try_stat_checked,
};

/// Closing a file frees its blocks if it was unlinked meanwhile, and that is the pool's work. From this size on it is asked
/// whether it was, which costs a tenth of handing it over; smaller ones only if they were open for long enough.
const UNLINKED_MATTERS_BYTES: u64 = 1 << 20;

/// Until a smaller file was open for so long hardly anybody has had the time to unlink it, and little is lost.
const UNLINKED_SOON: Duration = Duration::from_millis(10);

/// What `O_DIRECT` demands of offsets, lengths and memory at least: the page, which serves every block size up to it.
const DIRECT_ALIGNMENT_MIN: usize = 4096;

/// Files from this size on are worth telling the kernel that they will be read from one end to the other; nginx's number.
const SEQUENTIAL_MIN_BYTES: u64 = 128 * 1024;

/// `openat2` with `RESOLVE_CACHED` does not exist or is forbidden here.
static OPENAT2_REFUSED: AtomicBool = AtomicBool::new(false);

/// How a file is opened. Always close-on-exec, non-blocking, and never as controlling terminal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenFlags {
    /// Open for writing.
    pub write: bool,
    /// Open for reading.
    pub read: bool,
    /// Create it when missing, with these permissions (less the umask).
    pub create: Option<u32>,
    /// With `create`: it must not exist yet (`O_EXCL`).
    pub exclusive: bool,
    /// Every write goes to the end (`O_APPEND`).
    pub append: bool,
    /// Empty it (`O_TRUNC`).
    pub truncate: bool,
    /// The last component must not be a symbolic link (`O_NOFOLLOW`).
    pub no_follow: bool,
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
    };

    fn kernel(self) -> OFlags {
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
        flags
    }

    fn mode(self) -> Mode {
        Mode::from_raw_mode(self.create.unwrap_or(0))
    }

    /// The kernel does not create or truncate without walking the disk.
    fn may_be_answered_from_cache(self) -> bool {
        self.create.is_none() && !self.truncate
    }
}

/// What a path names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A directory.
    Directory,
    /// A FIFO, socket, device or symbolic link.
    Other,
}

/// What is known of a file without opening it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileMetadata {
    /// What it is.
    pub kind: FileKind,
    /// Its size in bytes.
    pub size: u64,
    /// Last change of its content, seconds since the epoch.
    pub modified_seconds: i64,
    /// And nanoseconds.
    pub modified_nanos: u32,
    /// Last change of its content or of anything else that is known of it.
    pub changed_seconds: i64,
    /// And nanoseconds.
    pub changed_nanos: u32,
    /// The device that it lies on.
    pub device: u64,
    /// Its number there.
    pub inode: u64,
    /// Type and permission bits as in `st_mode`.
    pub mode: u32,
    /// The owner's user id.
    pub owner: u32,
    /// How many names it has.
    pub links: u64,
}

impl FileMetadata {
    /// Last change of its content.
    pub fn modified(&self) -> SystemTime {
        time(self.modified_seconds, self.modified_nanos)
    }

    /// Last change of its content or of anything else that is known of it; unlike the other one nobody can set it.
    pub fn changed(&self) -> SystemTime {
        time(self.changed_seconds, self.changed_nanos)
    }

    /// Whether it is a regular file.
    pub fn is_regular(&self) -> bool {
        self.kind == FileKind::Regular
    }

    /// Whether it is a directory.
    pub fn is_directory(&self) -> bool {
        self.kind == FileKind::Directory
    }

    #[allow(clippy::unnecessary_cast)] // The types of these fields differ between architectures.
    fn from_kernel(stat: &Stat) -> Self {
        FileMetadata {
            kind: match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile => FileKind::Regular,
                FileType::Directory => FileKind::Directory,
                _ => FileKind::Other,
            },
            size: u64::try_from(stat.st_size).unwrap_or(0),
            modified_seconds: stat.st_mtime as i64,
            modified_nanos: stat.st_mtime_nsec as u32,
            changed_seconds: stat.st_ctime as i64,
            changed_nanos: stat.st_ctime_nsec as u32,
            device: stat.st_dev as u64,
            inode: stat.st_ino as u64,
            mode: stat.st_mode as u32,
            owner: stat.st_uid as u32,
            links: stat.st_nlink as u64,
        }
    }
}

/// Seconds and nanoseconds since the epoch.
fn time(seconds: i64, nanos: u32) -> SystemTime {
    let nanos = Duration::from_nanos(nanos.into());
    match u64::try_from(seconds) {
        Ok(seconds) => UNIX_EPOCH + Duration::from_secs(seconds) + nanos,
        Err(_) => UNIX_EPOCH - Duration::from_secs(seconds.unsigned_abs()) + nanos,
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

/// Looks at what a path names, following links, in the pool `default` if that cannot be done at once.
pub async fn stat(path: &Path) -> io::Result<FileMetadata> {
    match attempt_stat(path) {
        Ok(result) => result,
        Err(device) => stat_in_pool(&default_pool(), device, path).await,
    }
}

/// Looks at what a path names, in the given pool if that cannot be done at once.
pub async fn stat_in(pool: &ThreadPool, path: &Path) -> io::Result<FileMetadata> {
    match attempt_stat(path) {
        Ok(result) => result,
        Err(device) => stat_in_pool(pool, device, path).await,
    }
}

/// The path without symbolic links that a path leads to, if the kernel can tell from memory; `None` = not without waiting.
pub fn try_real_path(path: &Path) -> Option<io::Result<PathBuf>> {
    if World::current().is_some() {
        return Some(std::fs::canonicalize(path));
    }
    check_nothing_waits(path, false).ok()?;
    match resolve_cached(path, OFlags::PATH | OFlags::CLOEXEC)? {
        // Where /proc is not mounted, a pool walks along the path.
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

/// Opens a file where the caller may block: at start, in a helper, in a pool.
pub fn open_blocking(path: &Path, flags: OpenFlags) -> io::Result<File> {
    if let Some(world) = World::current() {
        return File::open_simulated(&world, path, flags);
    }
    let descriptor = match rustix::fs::openat(CWD, path, flags.kernel(), flags.mode()) {
        // Somebody holds a lease on it (fcntl(2)), and the kernel has asked for its return: that is worth waiting for.
        Err(Errno::AGAIN) if is_regular(path) => {
            rustix::fs::openat(CWD, path, flags.kernel() - OFlags::NONBLOCK, flags.mode())?
        }
        result => result?,
    };
    File::inspect_blocking(descriptor)
}

fn is_regular(path: &Path) -> bool {
    rustix::fs::stat(path).is_ok_and(|stat| FileMetadata::from_kernel(&stat).is_regular())
}

/// Opens a file if the kernel can do it from memory; `None` = not without waiting: then [`open`] uses the pool. Always
/// `None` for flags that create or truncate.
pub fn try_open(path: &Path, flags: OpenFlags) -> Option<io::Result<File>> {
    attempt_open(path, flags).ok()
}

/// Looks at what a path names, following links, if the kernel can do it from memory; `None` = not without waiting.
pub fn try_stat(path: &Path) -> Option<io::Result<FileMetadata>> {
    attempt_stat(path).ok()
}

/// Opens a file if the kernel can do it from memory; else the error is the device that a pool will wait for.
fn attempt_open(path: &Path, flags: OpenFlags) -> Result<io::Result<File>, Device> {
    if let Some(world) = World::current() {
        return world.attempt(|world| File::open_simulated(world, path, flags));
    }
    if !flags.may_be_answered_from_cache() {
        return Err(likely_device(path));
    }
    check_nothing_waits(path, flags.no_follow)?;
    Ok(match resolve_cached(path, flags.kernel()).ok_or_else(|| likely_device(path))? {
        Ok(descriptor) => File::inspect_local(descriptor),
        Err(errno) => Err(errno.into()),
    })
}

/// As [`attempt_open`].
fn attempt_stat(path: &Path) -> Result<io::Result<FileMetadata>, Device> {
    if let Some(world) = World::current() {
        return world.attempt(|world| world.stat(path));
    }
    check_nothing_waits(path, false)?;
    Ok(match resolve_cached(path, OFlags::PATH | OFlags::CLOEXEC).ok_or_else(|| likely_device(path))? {
        Ok(descriptor) => {
            rustix::fs::fstat(descriptor).map(|stat| FileMetadata::from_kernel(&stat)).map_err(io::Error::from)
        }
        Err(errno) => Err(errno.into()),
    })
}

/// Whether an open of this path is the kernel's work alone. If not, or where that cannot be known without waiting, the
/// error is the device that a pool will wait for.
fn check_nothing_waits(path: &Path, no_follow: bool) -> Result<(), Device> {
    if mounts::refresh_due() {
        // Refused, it is done a few seconds later.
        let _ = default_pool().detach(Device::NONE, mounts::refresh);
    }
    if !mounts::any_waiting() {
        return Ok(());
    }
    let mut flags = OFlags::PATH | OFlags::CLOEXEC;
    flags.set(OFlags::NOFOLLOW, no_follow);
    let descriptor = match resolve_cached(path, flags).ok_or_else(|| likely_device(path))? {
        Ok(descriptor) => descriptor,
        // The open proper will say the same.
        Err(_) => return Ok(()),
    };
    // DONT_SYNC: what is cached, without asking a server.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let Ok(stat) = rustix::fs::statx(&descriptor, c"", flags, StatxFlags::empty()) else {
        return Err(likely_device(path));
    };
    let device = rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor);
    if mounts::may_wait(device) == Some(false) { Ok(()) } else { Err(Device::number(device)) }
}

/// What walking along a path will wait for, as far as its text tells: the device mounted above it. For tasks in a pool.
pub fn likely_device(path: &Path) -> Device {
    mounts::device_of_path(path).map_or(Device::NONE, Device::number)
}

/// Opens from the kernel's cache of names; `None` when it is not there, or when the kernel cannot do this.
fn resolve_cached(path: &Path, flags: OFlags) -> Option<Result<OwnedFd, Errno>> {
    if is_openat2_refused() {
        return None;
    }
    match rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::CACHED) {
        Err(Errno::AGAIN | Errno::INTR) => None,
        result => Some(result),
    }
}

thread_local! {
    /// Where [`File::is_resident`] reads what it only wants to know of.
    static PROBED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Finds out whether `openat2` with `RESOLVE_CACHED` works here: not in kernels before 5.12, nor where seccomp forbids it.
/// The root directory is always in the cache. To be called before the first open.
pub(crate) fn probe() {
    let result = rustix::fs::openat2(CWD, c"/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), ResolveFlags::CACHED);
    // Other errors are the moment's: a mount under way, no free descriptor.
    let is_refused = matches!(result, Err(Errno::NOSYS | Errno::INVAL | Errno::PERM | Errno::ACCESS));
    OPENAT2_REFUSED.store(is_refused, Ordering::Relaxed);
}

fn is_openat2_refused() -> bool {
    OPENAT2_REFUSED.load(Ordering::Relaxed)
}

async fn open_in_pool(pool: &ThreadPool, device: Device, path: &Path, flags: OpenFlags) -> io::Result<File> {
    let path = PathBuf::from(path);
    pool.run_for(device, move || open_blocking(&path, flags)).await?
}

async fn stat_in_pool(pool: &ThreadPool, device: Device, path: &Path) -> io::Result<FileMetadata> {
    let path = PathBuf::from(path);
    pool.run_for(device, move || stat_blocking(&path)).await?
}

fn stat_blocking(path: &Path) -> io::Result<FileMetadata> {
    if let Some(world) = World::current() {
        return world.stat(path);
    }
    let descriptor = rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let stat = rustix::fs::fstat(&descriptor)?;
    let metadata = FileMetadata::from_kernel(&stat);
    mounts::classify(metadata.device, descriptor.as_fd());
    Ok(metadata)
}

/// An open file: descriptor and what was known when it was opened. Clones are the same file.
#[derive(Clone)]
pub struct File {
    shared: Arc<Shared>,
}

struct Shared {
    /// `None` only while it is being dropped.
    descriptor: Option<OwnedFd>,
    metadata: FileMetadata,
    access: Access,
    access_time: AccessTime,
    hash: FileHash,
    /// What of it was seen in memory lately.
    seen: Run,
    /// All of it, when that was seen within one tick.
    whole: Run,
    opened: Moment,
    /// Its file system was found to be in memory.
    lies_in_memory: AtomicBool,
    was_advised: AtomicBool,
    /// The same file, opened past the page cache; `None` where that cannot be.
    direct: OnceLock<Option<OwnedFd>>,
}

/// What a look at a piece of a file found.
#[derive(Debug)]
pub enum Look {
    /// This much of the piece from its beginning; nothing at the end of the file.
    Found(Bytes),
    /// It is not in memory; the kernel has begun to read it.
    NotInMemory,
    /// The look itself might have waited.
    NotLooked,
}

impl Look {
    /// How the piece is read when it was not found.
    pub fn how(&self) -> ReadHow {
        ReadHow { unlooked: matches!(self, Look::NotLooked), ..ReadHow::default() }
    }
}

/// What all loops of the process know together.
static KNOWLEDGE: LazyLock<Arc<Knowledge>> = LazyLock::new(|| Knowledge::new(Residency::new()));
static FLIGHTS: LazyLock<Arc<Flights>> = LazyLock::new(Flights::new);

/// Where it can be read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    /// On the loop, what is in memory.
    Local,
    /// Its file system may wait for others: nothing is done on the loop.
    Waits,
    /// It belongs to a simulated world, and this is wrong with it.
    Simulated(FileFaults),
}

impl File {
    fn new(descriptor: OwnedFd, metadata: FileMetadata, access: Access, access_time: AccessTime) -> Self {
        let shared = Shared {
            descriptor: Some(descriptor),
            metadata,
            access,
            access_time,
            hash: FileHash::new(metadata.device, metadata.inode),
            seen: Run::default(),
            whole: Run::default(),
            opened: now_anywhere(),
            lies_in_memory: AtomicBool::new(false),
            was_advised: AtomicBool::new(false),
            direct: OnceLock::new(),
        };
        File { shared: Arc::new(shared) }
    }

    fn open_simulated(world: &World, path: &Path, flags: OpenFlags) -> io::Result<File> {
        let (descriptor, metadata, faults) = world.open(path, flags)?;
        Ok(File::new(descriptor, metadata, Access::Simulated(faults), AccessTime::of_no_concern()))
    }

    fn inspect_blocking(descriptor: OwnedFd) -> io::Result<File> {
        let stat = rustix::fs::fstat(&descriptor)?;
        let metadata = FileMetadata::from_kernel(&stat);
        if let Some(world) = World::current() {
            let access = Access::Simulated(world.adopt(&descriptor));
            return Ok(File::new(descriptor, metadata, access, AccessTime::of_no_concern()));
        }
        if mounts::classify(metadata.device, descriptor.as_fd()) {
            return Ok(File::new(descriptor, metadata, Access::Waits, AccessTime::of_no_concern()));
        }
        Ok(File::local(descriptor, &stat))
    }

    /// Of one that was opened without waiting, so it lies on a file system that does not wait for others.
    fn inspect_local(descriptor: OwnedFd) -> io::Result<File> {
        let stat = rustix::fs::fstat(&descriptor)?;
        Ok(File::local(descriptor, &stat))
    }

    fn local(descriptor: OwnedFd, stat: &Stat) -> File {
        let access_time = AccessTime::new(descriptor.as_fd(), stat, wall_anywhere());
        File::new(descriptor, FileMetadata::from_kernel(stat), Access::Local, access_time)
    }

    /// Takes a file that was opened otherwise. May block on file systems that wait for others. Errors: fstat(2)'s.
    pub fn from_std(file: std::fs::File) -> io::Result<Self> {
        File::inspect_blocking(file.into())
    }

    /// What was known when it was opened.
    pub fn metadata(&self) -> &FileMetadata {
        &self.shared.metadata
    }

    /// Looks at it again. For files that wait for others this may block; see [`File::waits_for_others`]. Errors: fstat(2)'s.
    pub fn look_again(&self) -> io::Result<FileMetadata> {
        match self.shared.access {
            Access::Simulated(_) => Ok(self.shared.metadata),
            Access::Local | Access::Waits => Ok(FileMetadata::from_kernel(&rustix::fs::fstat(self.as_fd())?)),
        }
    }

    /// Where it is by now, for messages: the kernel knows the names of what is open, and waits for no disk to tell. `None`
    /// without procfs.
    pub fn path(&self) -> Option<PathBuf> {
        std::fs::read_link(format!("/proc/self/fd/{}", self.as_fd().as_raw_fd())).ok()
    }

    /// The device that operations on it wait for.
    pub fn device(&self) -> Device {
        Device::number(self.shared.metadata.device)
    }

    /// Whether operations on it may wait for another machine or process, so that all of them belong in a pool.
    pub fn waits_for_others(&self) -> bool {
        self.shared.access == Access::Waits
    }

    /// Reads at most `length` bytes from `offset` on: fewer when the rest is not in memory, none at the end of the file. In
    /// the pool `default` if nothing is in memory. Errors: pread(2)'s, the pool's, `OutOfMemory` at the hard limit of leases.
    pub async fn read_at(&self, offset: u64, length: usize) -> io::Result<Bytes> {
        match self.look(offset, length)? {
            Look::Found(bytes) => Ok(bytes),
            missed => self.begin_read(&default_pool(), offset, length, missed.how())?.await,
        }
    }

    /// Reads as [`File::read_at`], with the given pool.
    pub async fn read_at_in(&self, pool: &ThreadPool, offset: u64, length: usize) -> io::Result<Bytes> {
        match self.look(offset, length)? {
            Look::Found(bytes) => Ok(bytes),
            missed => self.begin_read(pool, offset, length, missed.how())?.await,
        }
    }

    /// Reads what is in memory now, at most `length` bytes from `offset` on; `None` when the first byte is not, or when the
    /// look might wait.
    pub fn try_read_at(&self, offset: u64, length: usize) -> io::Result<Option<Bytes>> {
        match self.look(offset, length)? {
            Look::Found(bytes) => Ok(Some(bytes)),
            Look::NotInMemory | Look::NotLooked => Ok(None),
        }
    }

    /// Reads what is in memory now, at most `length` bytes from `offset` on, if that cannot wait. Errors: pread(2)'s,
    /// `OutOfMemory` at the hard limit of leases.
    pub fn look(&self, offset: u64, length: usize) -> io::Result<Look> {
        if self.waits_for_others() {
            return Ok(Look::NotLooked);
        }
        self.with_knowledge(|knowledge| {
            let now = now_anywhere();
            let is_crowded = knowledge.device(self.metadata().device).is_crowded(now);
            if is_crowded && !self.is_known(knowledge, offset, length as u64, now, WORTH_TRYING_TICKS)
                || self.writes_access_time()
            {
                return Ok(Look::NotLooked);
            }
            let mut lease = Lease::new(length)?;
            match self.watched(|| self.read_nowait(offset, &mut lease)).0 {
                Some(Ok(count)) => {
                    lease.truncate(count);
                    self.note_found(knowledge, offset, length, count);
                    count_event(Event::Hit);
                    count_piece(Rung::Read, count as u64);
                    Ok(Look::Found(lease.freeze()))
                }
                Some(Err(error)) => Err(error),
                None => {
                    self.forget(knowledge, offset);
                    count_event(Event::Miss);
                    Ok(Look::NotInMemory)
                }
            }
        })
    }

    /// Whether a piece seems to be in memory, so that `sendfile` will not wait: every part of it was seen there a moment ago,
    /// or a page of it is now. False, too, where a look might wait, and for a while after calls that should not have waited
    /// did. Errors: pread(2)'s.
    pub fn is_resident(&self, offset: u64, length: u64) -> io::Result<bool> {
        if self.waits_for_others() {
            return Ok(false);
        }
        self.with_knowledge(|knowledge| {
            let now = now_anywhere();
            let device = knowledge.device(self.metadata().device);
            if device.is_distrusted(now) || self.writes_access_time() {
                return Ok(false);
            }
            // Each read takes memory for what is read ahead as well, so what was there a moment ago may have gone, all but
            // what is used again and again: a file that was sent as a whole just now.
            if device.is_crowded(now) {
                return Ok(self.shared.whole.covers(&self.all_pages(), now, BELIEVED_TICKS));
            }
            let pages = pages_of(offset, length);
            if self.shared.seen.covers(&pages, now, BELIEVED_TICKS) {
                return Ok(true);
            }
            let end = offset + length;
            let (mut at, mut oldest) = (offset, 0);
            while at < end {
                let granule = at / GRANULE;
                let part_end = ((granule + 1) * GRANULE).min(end);
                let age = knowledge.residency.age(self.shared.hash, granule, now);
                if let Some(age) = age.filter(|&age| age <= BELIEVED_TICKS) {
                    oldest = oldest.max(age);
                } else {
                    // A byte at either end, for as long as memory holds everything: what is asked is whether the part has
                    // been read at all. When pages have to go, they go in runs of whatever length they were read in, and
                    // what lies between two that are there may be gone. Then only reading all of it tells.
                    let is_there = match device.is_memory_short(now) {
                        true => self.probe_whole(at, part_end)?,
                        false => self.probe(at)? && self.probe(part_end - 1)?,
                    };
                    count_event(if is_there { Event::Hit } else { Event::Miss });
                    if !is_there {
                        return Ok(false);
                    }
                    // The ends are those of what the piece has of the part: of the rest nothing was learned, so only a
                    // whole part is noted.
                    if self.is_whole_part(granule, &pages_of(at, part_end - at)) {
                        knowledge.residency.note(self.shared.hash, granule, now);
                    }
                }
                at = part_end;
            }
            self.shared.seen.note(pages, oldest, now);
            Ok(true)
        })
    }

    /// Whether a read now writes the time of access, and so may wait for the file system.
    #[inline]
    pub(crate) fn writes_access_time(&self) -> bool {
        let (time, wall) = (&self.shared.access_time, wall_anywhere());
        time.may_be_due(wall) && time.is_written(self.as_fd(), self.metadata().device, wall)
    }

    /// It was read where that may block: the next read may be one that writes no time of access.
    pub(crate) fn note_accessed(&self) {
        if self.writes_access_time()
            && let Ok(stat) = rustix::fs::fstat(self.as_fd())
        {
            self.shared.access_time.note(&stat, wall_anywhere());
        }
    }

    /// How much of what was read is the file's own, where that may block. A file that is cut off while it is read may give
    /// zeros for what it has lost: the kernel clears pages that somebody is still copying from.
    pub(crate) fn still_there(&self, offset: u64, count: usize) -> usize {
        if self.shared.access != Access::Local {
            return count;
        }
        match self.look_again() {
            Ok(now) if now.size < self.metadata().size => {
                usize::try_from(now.size.saturating_sub(offset)).map_or(count, |rest| rest.min(count))
            }
            _ => count,
        }
    }

    fn all_pages(&self) -> Range<u64> {
        0..self.metadata().size.div_ceil(PAGE)
    }

    /// Whether the pages are all that the file has in a part.
    fn is_whole_part(&self, granule: u64, pages: &Range<u64>) -> bool {
        let begin = granule * GRANULE;
        let end = (begin + GRANULE).min(self.metadata().size);
        begin < end && pages.start <= begin / PAGE && end.div_ceil(PAGE) <= pages.end
    }

    fn probe(&self, offset: u64) -> io::Result<bool> {
        self.probe_into(offset, &mut [0])
    }

    /// Reads a part and forgets it: some 5 µs for 64 KiB, half of what it takes to send it by a copy.
    fn probe_whole(&self, begin: u64, end: u64) -> io::Result<bool> {
        PROBED.with_borrow_mut(|memory| {
            memory.resize(GRANULE as usize, 0);
            self.probe_into(begin, &mut memory[..(end - begin) as usize])
        })
    }

    fn probe_into(&self, offset: u64, memory: &mut [u8]) -> io::Result<bool> {
        let found = self.watched(|| self.read_nowait(offset, memory)).0;
        found.transpose().map(|count| count == Some(memory.len()))
    }

    /// Calls something that should not wait for this file, and says whether it was quick. If it waited, that is counted, and
    /// the device is distrusted for a while.
    pub fn watched<T>(&self, call: impl FnOnce() -> T) -> (T, bool) {
        let (result, mut verdict) = watch(call);
        if matches!(self.shared.access, Access::Simulated(_)) {
            let is_slow = World::current().is_some_and(|world| world.call_was_slow());
            verdict = if is_slow { Verdict::Waited } else { Verdict::Quick };
        }
        if verdict != Verdict::Quick {
            count_event(Event::LongCall);
            self.with_knowledge(|knowledge| knowledge.device(self.metadata().device).note_miss(now_anywhere()));
        }
        if verdict == Verdict::Waited {
            count_event(Event::Misprediction);
            self.with_knowledge(|knowledge| knowledge.device(self.metadata().device).distrust(now_anywhere()));
        }
        (result, verdict == Verdict::Quick)
    }

    /// A piece has been sent, and that was so quick that it must have been in memory.
    pub fn note_sent(&self, offset: u64, length: usize) {
        if let Some((pages, now)) = self.not_noted(offset, length) {
            self.with_knowledge(|knowledge| self.note_resident(knowledge, pages, now));
        }
    }

    /// So many bytes of those that were asked for were found in memory; the part where the rest begins is not.
    pub(crate) fn note_found(&self, knowledge: &Knowledge, offset: u64, asked: usize, found: usize) {
        if let Some((pages, now)) = self.not_noted(offset, found) {
            self.note_resident(knowledge, pages, now);
        }
        let end = offset + found as u64;
        if found < asked && end < self.metadata().size {
            self.forget(knowledge, end);
        }
    }

    /// The part at this place is not in memory.
    fn forget(&self, knowledge: &Knowledge, offset: u64) {
        knowledge.residency.forget(self.shared.hash, offset / GRANULE);
        self.shared.seen.forget();
        self.shared.whole.forget();
    }

    /// The pages of a piece that was found in memory, and the time, unless that was noted in this very tick.
    #[inline]
    fn not_noted(&self, offset: u64, length: usize) -> Option<(Range<u64>, Moment)> {
        if length == 0 {
            return None;
        }
        let (pages, now) = (pages_of(offset, length as u64), now_anywhere());
        (!self.shared.seen.covers(&pages, now, 0)).then_some((pages, now))
    }

    fn note_resident(&self, knowledge: &Knowledge, pages: Range<u64>, now: Moment) {
        let parts = pages.start * PAGE / GRANULE..(pages.end * PAGE).div_ceil(GRANULE);
        // With what was sent before, a part may be whole.
        let seen = self.shared.seen.note(pages, 0, now);
        let all = self.all_pages();
        if seen.start == 0 && all.end <= seen.end {
            self.shared.whole.note(all, 0, now);
        }
        for granule in parts.filter(|&granule| self.is_whole_part(granule, &seen)) {
            knowledge.residency.note(self.shared.hash, granule, now);
        }
    }

    fn is_known(&self, knowledge: &Knowledge, offset: u64, length: u64, now: Moment, ticks: u16) -> bool {
        let last = (offset + length).saturating_sub(1).min(self.metadata().size.saturating_sub(1)) / GRANULE;
        (offset / GRANULE..=last)
            .all(|granule| knowledge.residency.age(self.shared.hash, granule, now).is_some_and(|age| age <= ticks))
    }

    fn with_knowledge<R>(&self, f: impl FnOnce(&Arc<Knowledge>) -> R) -> R {
        match World::current() {
            Some(world) => f(&world.knowledge),
            None => f(&KNOWLEDGE),
        }
    }

    /// Begins to read a piece that is not in memory in a pool, or takes part in such a read that is under way; not beyond
    /// the end of the piece, fewer bytes at the end of the file, none behind it. Errors: `OutOfMemory` at the hard limit of
    /// leases.
    pub fn begin_read(&self, pool: &ThreadPool, offset: u64, length: usize, how: ReadHow) -> io::Result<PieceRead> {
        // No look is of use there.
        let how = ReadHow { unlooked: how.unlooked && !self.waits_for_others() && how.direct.is_none(), ..how };
        match World::current() {
            Some(world) => world.flights.join(&world.knowledge, self, pool, (offset, length), how),
            None => FLIGHTS.join(&KNOWLEDGE, self, pool, (offset, length), how),
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

    /// Tells the kernel, once, that the file will be read from one end to the other (`read_ahead`): it reads ahead twice as
    /// far then. Small files are not worth the call.
    pub fn advise_sequential(&self) {
        let is_worth_it = self.metadata().size > SEQUENTIAL_MIN_BYTES && self.shared.access == Access::Local;
        if is_worth_it && !self.shared.was_advised.swap(true, Ordering::Relaxed) {
            // It is only a hint.
            let _ = rustix::fs::fadvise(self.as_fd(), 0, None, Advice::Sequential);
        }
    }

    /// Reads what is in memory now; `None` = not without waiting.
    pub(crate) fn read_nowait(&self, offset: u64, into: &mut [u8]) -> Option<io::Result<usize>> {
        match self.shared.access {
            Access::Local => {}
            Access::Waits => return None,
            Access::Simulated(faults) => {
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
                // File systems in memory do not know the flag and need not wait. Others that do not know it may (overlayfs).
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

    /// Reads past the page cache, where the caller may block; through it where the file system has no other way. Returns the
    /// memory and where the piece is in it.
    pub(crate) fn read_direct(
        &self,
        offset: u64,
        length: usize,
        alignment: u32,
    ) -> io::Result<(Box<[u8]>, Range<usize>)> {
        let through_cache = || {
            let mut memory = vec![0; length].into_boxed_slice();
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

    /// The descriptor of [`File::direct`] if that has been asked for, without blocking; within, none if there cannot be one.
    pub(crate) fn opened_directly(&self) -> Option<Option<BorrowedFd<'_>>> {
        self.shared.direct.get().map(|direct| direct.as_ref().map(AsFd::as_fd))
    }

    /// A descriptor of its own, since the flag belongs to the descriptor, and others may read from this one. None where the file
    /// system has no such thing, which is remembered, or if it could not be opened just now. May block.
    pub(crate) fn direct(&self) -> Option<BorrowedFd<'_>> {
        if matches!(self.shared.access, Access::Simulated(_)) {
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
            Access::Simulated(faults) => Some(faults),
            Access::Local | Access::Waits => None,
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

/// The pages that a piece lies in, which is not empty.
fn pages_of(offset: u64, length: u64) -> Range<u64> {
    offset / PAGE..(offset + length).div_ceil(PAGE)
}

/// The blocks around a piece of a file, and memory that is aligned as they are: what `O_DIRECT` demands.
pub(crate) struct Blocks {
    pub memory: Box<[u8]>,
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
        let memory = vec![0; wanted + alignment].into_boxed_slice();
        let skipped = memory.as_ptr().align_offset(alignment);
        Blocks { memory, into: skipped..skipped + wanted, offset: offset - before as u64, before, length }
    }

    /// Where the piece is in the memory, when so many bytes of the blocks have been read.
    pub fn piece(&self, read: usize) -> Range<usize> {
        let begin = self.into.start + self.before;
        begin..begin + read.saturating_sub(self.before).min(self.length)
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.descriptor.as_ref().expect("open while somebody has it").as_fd()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let descriptors = (self.descriptor.take(), self.direct.take());
        // Not only loops: whoever closes the last one may have better to do than to wait for a device.
        if !on_a_pool_thread() && self.is_close_costly(&descriptors.0) {
            // Never refused: there are no more of these than descriptors.
            default_pool().dispose(Device::number(self.metadata.device), descriptors);
        }
    }
}

impl Shared {
    /// Whether closing may wait.
    fn is_close_costly(&self, descriptor: &Option<OwnedFd>) -> bool {
        let is_unlinked = || {
            let stat = descriptor.as_ref().map(rustix::fs::fstat);
            stat.is_some_and(|stat| stat.is_ok_and(|stat| stat.st_nlink == 0))
        };
        let matters = || {
            self.metadata.size >= UNLINKED_MATTERS_BYTES
                || self.access == Access::Local && now_anywhere() - self.opened > UNLINKED_SOON
        };
        self.access == Access::Waits || matters() && is_unlinked()
    }
}

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "File({:?}, {} bytes)", self.as_fd(), self.shared.metadata.size)
    }
}
