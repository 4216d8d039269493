//! The files of a simulated world: in memory, read-only, and as slow, cold and broken as the test wants.
//!
//! A path that was not added does not exist. Each file is backed by a descriptor of its own, so calls that take a
//! descriptor (`sendfile`) work; the machine's file systems are not visible. Files that are adopted
//! ([`File::from_std`]), or opened for writing (temporary files of the tested program), are real: chance decides
//! whether they can be read without waiting, and whether writes are short or fail.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use gale_runtime::Device;
use gale_runtime::simulation::{FileFaults, Simulation};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;

use super::access_time::AccessTime;
use super::file::ReadAccess;
use super::file_system::FileSystem;
use super::page_cache::{FileHash, PageCache};
use super::{File, FileKind, FileMetadata, OpenFlags, open};

/// Windows of files for which a world keeps facts: few, so that they evict each other.
const FACT_SLOTS: usize = 4;

/// Last change of all files: a day before virtual time begins.
const MODIFIED_SECONDS: i64 = 1_000_000_000 - 86_400;

/// The device of all simulated files.
const DEVICE: Device = Device::number(1);

/// The device of real files, in their hashes.
const DEVICE_OF_REAL_FILES: u64 = 2;

/// The files of a world.
struct Files {
    tree: RefCell<Tree>,
    /// Facts about these files, and their reads in flight.
    page_cache: Arc<PageCache>,
}

impl Default for Files {
    fn default() -> Self {
        Files { tree: RefCell::default(), page_cache: PageCache::with_slots(FACT_SLOTS) }
    }
}

/// Adds files to a simulated world.
pub trait SimulatedFiles {
    /// Adds a file, which [`open`](super::open) finds, and the directories above it.
    ///
    /// # Errors
    /// No memory.
    fn add_file(&self, path: impl AsRef<Path>, content: &[u8]) -> io::Result<()> {
        self.add_broken_file(path, content, FileFaults::default())
    }

    /// As [`SimulatedFiles::add_file`], with faults.
    ///
    /// # Errors
    /// No memory.
    fn add_broken_file(&self, path: impl AsRef<Path>, content: &[u8], faults: FileFaults) -> io::Result<()>;
}

impl SimulatedFiles for Simulation {
    fn add_broken_file(&self, path: impl AsRef<Path>, content: &[u8], faults: FileFaults) -> io::Result<()> {
        self.part::<Files>().tree.borrow_mut().add(path.as_ref(), content, faults)
    }
}

/// The file system of a simulated world. Link checks and files that are written use the real one.
pub(super) struct SimulatedFileSystem {
    simulation: Simulation,
    files: Rc<Files>,
}

impl SimulatedFileSystem {
    pub fn of(simulation: Simulation) -> Self {
        let files = simulation.part::<Files>();
        SimulatedFileSystem { simulation, files }
    }

    /// Opens or inspects a file, unless a pool has to do it; then the error is the device.
    fn attempt<T>(&self, attempt: impl FnOnce(&Self) -> T) -> Result<T, Device> {
        if self.simulation.strikes(|faults| faults.cold_files) { Err(DEVICE) } else { Ok(attempt(self)) }
    }
}

impl FileSystem for SimulatedFileSystem {
    fn open_blocking(&self, path: &Path, flags: OpenFlags) -> io::Result<File> {
        if flags.writes() {
            return self.adopt(open::kernel_open(path, flags)?);
        }
        let opened = self.files.tree.borrow().open(path);
        self.simulation.note("open", 0, usize::from(opened.is_ok()));
        let (descriptor, metadata, faults) = opened?;
        self.simulation.set_file_faults(descriptor.as_raw_fd(), faults);
        Ok(File::new(descriptor, metadata, ReadAccess::Simulated(faults), AccessTime::of_no_concern()))
    }

    fn attempt_open(&self, path: &Path, flags: OpenFlags) -> Result<io::Result<File>, Device> {
        self.attempt(|files| files.open_blocking(path, flags))
    }

    fn stat_blocking(&self, path: &Path) -> io::Result<FileMetadata> {
        let found = self.files.tree.borrow().stat(path);
        self.simulation.note("stat", 0, usize::from(found.is_ok()));
        Ok(found?)
    }

    fn attempt_stat(&self, path: &Path) -> Result<io::Result<FileMetadata>, Device> {
        self.attempt(|files| files.stat_blocking(path))
    }

    fn try_real_path(&self, path: &Path) -> Option<io::Result<PathBuf>> {
        Some(std::fs::canonicalize(path))
    }

    fn can_check_links(&self) -> bool {
        false
    }

    fn adopt(&self, descriptor: OwnedFd) -> io::Result<File> {
        let metadata = FileMetadata::from_kernel(&rustix::fs::fstat(&descriptor)?);
        let faults = FileFaults::default();
        self.simulation.set_file_faults(descriptor.as_raw_fd(), faults);
        let hash = self.files.tree.borrow_mut().adopt();
        Ok(File::with_hash(descriptor, metadata, ReadAccess::Simulated(faults), AccessTime::of_no_concern(), hash))
    }

    /// True for all: a loop with a ring reads with it.
    fn reads_asynchronously(&self, _device: u64) -> bool {
        true
    }

    /// Writes to a real file: everything, the beginning of the first piece, or nothing because the disk is full.
    fn write(&self, file: BorrowedFd<'_>, pieces: &[IoSlice<'_>], offset: u64) -> Result<usize, Errno> {
        let simulation = &self.simulation;
        let result = match pieces.first() {
            _ if simulation.strikes(|faults| faults.disk_full) => Err(Errno::NOSPC),
            Some(piece) if piece.len() > 1 && simulation.strikes(|faults| faults.short_writes) => {
                let length = simulation.up_to(piece.len());
                rustix::io::retry_on_intr(|| rustix::io::pwrite(file, &piece[..length], offset))
            }
            _ => rustix::io::retry_on_intr(|| rustix::io::pwritev(file, pieces, offset)),
        };
        simulation.note("write", 0, result.unwrap_or(0));
        result
    }

    fn page_cache(&self) -> &Arc<PageCache> {
        &self.files.page_cache
    }
}

/// Reads bytes that are in memory into `into`, perhaps not all, and returns their number; `None` if none are.
pub(super) fn read_resident(
    file: BorrowedFd<'_>,
    faults: FileFaults,
    offset: u64,
    into: &mut [u8],
) -> Option<Result<usize, Errno>> {
    let simulation = Simulation::current()?;
    if simulation.strikes(|faults| faults.cold_files) {
        return None;
    }
    let is_short = into.len() > 1 && simulation.strikes(|faults| faults.short_reads);
    let length = if is_short { simulation.up_to(into.len()) } else { into.len() };
    let result = faults.read(file, offset, &mut into[..length]);
    simulation.note("read", 0, result.unwrap_or(0));
    Some(result)
}

struct Entry {
    /// `None` for a directory.
    content: Option<OwnedFd>,
    size: u64,
    faults: FileFaults,
}

#[derive(Default)]
struct Tree {
    entries: BTreeMap<PathBuf, Entry>,
    /// Number of real files so far.
    adopted: u64,
}

impl Tree {
    fn add(&mut self, path: &Path, content: &[u8], faults: FileFaults) -> io::Result<()> {
        let memory = memfd_create("simulated file", MemfdFlags::CLOEXEC)?;
        let mut rest = content;
        while !rest.is_empty() {
            let written = rustix::io::write(&memory, rest)?;
            rest = &rest[written..];
        }
        let entry = Entry { content: Some(memory), size: content.len() as u64, faults };
        self.entries.insert(path.to_path_buf(), entry);
        for directory in path.ancestors().skip(1) {
            let entry = Entry { content: None, size: 0, faults: FileFaults::default() };
            self.entries.entry(directory.to_path_buf()).or_insert(entry);
        }
        Ok(())
    }

    fn find(&self, path: &Path) -> Result<(FileMetadata, &Entry), Errno> {
        // Normalized like the kernel does: no empty components, and no slash at the end of a file's name.
        let path: PathBuf = path.components().collect();
        if let Some((position, entry)) = self.entries.iter().enumerate().find(|(_, (own, _))| **own == path) {
            return Ok((metadata(position as u64 + 1, entry.1), entry.1));
        }
        let below_a_file = path.ancestors().any(|parent| self.entries.get(parent).is_some_and(|e| e.content.is_some()));
        Err(if below_a_file { Errno::NOTDIR } else { Errno::NOENT })
    }

    fn stat(&self, path: &Path) -> Result<FileMetadata, Errno> {
        self.find(path).map(|(metadata, _)| metadata)
    }

    fn open(&self, path: &Path) -> Result<(OwnedFd, FileMetadata, FileFaults), Errno> {
        let (metadata, entry) = self.find(path)?;
        let faults = entry.faults;
        let descriptor = match &entry.content {
            Some(content) => rustix::io::fcntl_dupfd_cloexec(content.as_fd(), 0)?,
            None => memfd_create("simulated directory", MemfdFlags::CLOEXEC)?,
        };
        Ok((descriptor, metadata, faults))
    }

    /// Adopts a real file, and returns its hash in the table of facts. That uses a number of this world, not the
    /// inode's, which depends on what else the machine does, as would the eviction of facts.
    fn adopt(&mut self) -> FileHash {
        self.adopted += 1;
        FileHash::new(DEVICE_OF_REAL_FILES, self.adopted)
    }
}

fn metadata(inode: u64, entry: &Entry) -> FileMetadata {
    let (kind, mode) = match &entry.content {
        Some(_) => (FileKind::Regular, 0o100_644),
        None => (FileKind::Directory, 0o040_755),
    };
    FileMetadata {
        kind,
        size: entry.size,
        modified_seconds: MODIFIED_SECONDS,
        modified_nanos: 0,
        changed_seconds: MODIFIED_SECONDS,
        changed_nanos: 0,
        device: 1,
        inode,
        mode,
        owner: 0,
        links: 1,
    }
}
