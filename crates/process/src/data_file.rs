//! Data files: possibly large files that a configuration reads as a whole, such as a database of addresses.
//!
//! A data file is copied once, where blocking is allowed, into memory that cannot be changed or truncated any more: a
//! sealed memfd. Its descriptor is sent with the bundle, so that master and worker process share the memory; it is not
//! among the bundle's contents, which are copied. [`DataFile::map`] gives access to it. The file on disk itself is
//! never mapped, so reading the data waits for no disk, and truncating the file does no harm.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};

/// Shared by all users of the data in this process.
pub type DataHandle = Arc<DataFile>;

/// Maximum size of a data file in bytes: several times as much as the largest databases of addresses.
const SIZE_MAX: u64 = 2 << 30;

/// Seals required on the memory of every data file: neither contents nor size can change.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::WRITE);

/// A copy of a file in sealed memory. See the head of the file.
#[derive(Debug)]
pub struct DataFile {
    path: PathBuf,
    origin: Origin,
    memory: Arc<OwnedFd>,
    /// The mapping in this process, if there is one.
    region: Mutex<Weak<Region>>,
}

/// Identity and state of the file that was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Origin {
    device: u64,
    inode: u64,
    length: u64,
    /// Seconds and nanoseconds of the last change of the contents and of the last change of the inode.
    times: [(i64, i64); 2],
}

impl DataFile {
    /// Copies the file.
    ///
    /// # Errors
    /// Errors of `open` and `read`; EINVAL if it is no regular file, EFBIG if it is too large.
    pub(super) fn copy(path: &Path) -> io::Result<DataFile> {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let memory = rustix::fs::memfd_create("gale data", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let mut memory = File::from(memory);
        if io::copy(&mut file.take(SIZE_MAX + 1), &mut memory)? > SIZE_MAX {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        rustix::fs::fcntl_add_seals(&memory, SEALS | SealFlags::SEAL)?;
        let origin = Origin {
            device: metadata.dev(),
            inode: metadata.ino(),
            length: metadata.len(),
            times: [(metadata.mtime(), metadata.mtime_nsec()), (metadata.ctime(), metadata.ctime_nsec())],
        };
        Ok(DataFile { path: path.to_owned(), origin, memory: Arc::new(memory.into()), region: Mutex::default() })
    }

    /// Wraps a copy that was made by another process.
    ///
    /// # Errors
    /// The memory can still be changed.
    pub(super) fn received(path: PathBuf, origin: Origin, memory: Arc<OwnedFd>) -> io::Result<DataFile> {
        if !rustix::fs::fcntl_get_seals(&memory)?.contains(SEALS) {
            return Err(io::Error::from_raw_os_error(libc::EPERM));
        }
        Ok(DataFile { path, origin, memory, region: Mutex::default() })
    }

    /// Returns the path that it was copied from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn origin(&self) -> &Origin {
        &self.origin
    }

    pub(super) fn memory(&self) -> &Arc<OwnedFd> {
        &self.memory
    }

    /// True if `other` is a copy of the same file in the same state.
    pub(super) fn is_same_copy(&self, other: &DataFile) -> bool {
        self.path == other.path && self.origin == other.origin
    }

    /// Maps the data. The mapping stays valid while it is held, whatever happens to the data file, and is shared by all
    /// callers.
    ///
    /// # Errors
    /// The kernel has no memory for it.
    pub fn map(&self) -> io::Result<DataMapping> {
        let mut known = self.region.lock();
        if let Some(region) = known.upgrade() {
            return Ok(DataMapping(region));
        }
        let region = Arc::new(self.map_anew()?);
        *known = Arc::downgrade(&region);
        Ok(DataMapping(region))
    }

    fn map_anew(&self) -> io::Result<Region> {
        let length = usize::try_from(rustix::fs::fstat(&self.memory)?.st_size).expect("bounded when it was copied");
        if length == 0 {
            return Ok(Region { start: NonNull::dangling(), length });
        }
        // Private, because older kernels do not map sealed memory as shared; nothing is written, so nothing is copied.
        // The data is in memory already; MAP_POPULATE fills all page table entries here, where blocking is allowed.
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing that exists.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, ProtFlags::READ, flags, self.memory.as_fd(), 0) }?;
        Ok(Region { start: NonNull::new(start.cast()).expect("no mapping is at address 0"), length })
    }
}

/// The contents of a data file, in memory.
#[derive(Clone, Debug)]
pub struct DataMapping(Arc<Region>);

impl AsRef<[u8]> for DataMapping {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

#[derive(Debug)]
struct Region {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the memory is read-only, through this mapping and, because of its seals, everywhere; so any thread may read
// it.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is `length` bytes long and stays until this is dropped. The seals, which were set or
        // checked before, keep size and contents of the memory unchanged. An empty one is a dangling pointer, which is
        // aligned.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.length > 0 {
            // SAFETY: exactly this mapping, to which no reference is left: they borrow `self`.
            let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
            debug_assert!(unmapped.is_ok(), "a mapping that was made can be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str, contents: &[u8]) -> Scratch {
            let path = std::env::temp_dir().join(format!("gale-data-{name}-{}", std::process::id()));
            std::fs::write(&path, contents).expect("a file");
            Scratch(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn copy_stays_as_it_was_when_the_file_is_cut_off() {
        let contents: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
        let file = Scratch::new("cut", &contents);
        let data = DataFile::copy(&file.0).expect("a copy");
        let mapping = data.map().expect("a mapping");
        assert_eq!(mapping.as_ref().as_ptr(), data.map().expect("the same").as_ref().as_ptr());
        File::create(&file.0).expect("cut off").write_all(b"short").expect("written");
        assert_eq!(mapping.as_ref(), contents);
        assert!(!DataFile::copy(&file.0).expect("another copy").is_same_copy(&data));
        drop(data);
        assert_eq!(mapping.as_ref(), contents);
    }

    #[test]
    fn copy_of_an_empty_file_is_empty() {
        let file = Scratch::new("empty", b"");
        let data = DataFile::copy(&file.0).expect("a copy");
        assert!(data.map().expect("a mapping").as_ref().is_empty());
        assert!(data.is_same_copy(&DataFile::copy(&file.0).expect("another copy")));
    }

    #[test]
    fn only_regular_files_are_copied() {
        for (path, code) in [("/", libc::EINVAL), ("/dev/zero", libc::EINVAL), ("/does/not/exist", libc::ENOENT)] {
            let error = DataFile::copy(Path::new(path)).expect_err("no data file");
            assert_eq!(error.raw_os_error(), Some(code), "{path}");
        }
    }

    #[test]
    fn memory_that_may_change_is_refused() {
        let file = Scratch::new("received", b"data");
        let origin = *DataFile::copy(&file.0).expect("a copy").origin();
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let open = Arc::new(rustix::fs::memfd_create("test", flags).expect("a memfd"));
        let received = DataFile::received(file.0.clone(), origin, Arc::clone(&open));
        assert_eq!(received.expect_err("not sealed").raw_os_error(), Some(libc::EPERM));
        rustix::fs::fcntl_add_seals(&open, SEALS).expect("sealed");
        assert!(DataFile::received(file.0.clone(), origin, open).is_ok());
    }
}
