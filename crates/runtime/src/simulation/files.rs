//! The files of a simulated world: in memory, read-only, and as slow, cold and broken as the test wants.
//!
//! A path that was not added does not exist. Each file is backed by a descriptor of its own, so calls that take a
//! descriptor (`sendfile`) work; the machine's file systems are not visible. Files that are adopted
//! ([`File::from_std`]), or opened for writing (temporary files of the tested program), are real: chance decides
//! whether they can be read without waiting, and whether writes are short or fail.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;

use super::fate::Fate;
use crate::files::page_cache::FileHash;
use crate::files::{FileKind, FileMetadata};
use crate::pool::Device;

/// Last change of all files: a day before virtual time begins.
const MODIFIED_SECONDS: i64 = 1_000_000_000 - 86_400;

/// The device of all simulated files.
pub(super) const DEVICE: Device = Device::number(1);

/// The device of real files, in their hashes.
const DEVICE_OF_REAL_FILES: u64 = 2;

/// Faults of a file's content.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FileFaults {
    /// Offset from which on reads fail with EIO.
    pub fails_at: Option<u64>,
    /// Offset at which the file ends now: it was truncated after the open.
    pub ends_at: Option<u64>,
}

impl FileFaults {
    /// Number of bytes that can be read from `offset` on, at most `length`.
    fn bound(self, offset: u64, length: usize) -> Result<usize, Errno> {
        if self.fails_at.is_some_and(|at| offset >= at) {
            return Err(Errno::IO);
        }
        let ends = [self.fails_at, self.ends_at].into_iter().flatten();
        let left = ends.map(|end| end.saturating_sub(offset)).min().unwrap_or(u64::MAX);
        Ok(usize::try_from(left).map_or(length, |left| left.min(length)))
    }

    /// Reads from a descriptor as if the file had these faults.
    pub(crate) fn read(self, file: BorrowedFd<'_>, offset: u64, into: &mut [u8]) -> Result<usize, Errno> {
        let length = self.bound(offset, into.len())?;
        if length == 0 {
            return Ok(0);
        }
        rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut into[..length], offset))
    }
}

struct Entry {
    /// `None` for a directory.
    content: Option<OwnedFd>,
    size: u64,
    faults: FileFaults,
}

pub(crate) struct Files {
    entries: BTreeMap<PathBuf, Entry>,
    /// Faults of open files, by descriptor. The entry of a closed one is replaced when its number is reused.
    open: BTreeMap<RawFd, FileFaults>,
    /// Number of real files so far.
    adopted: u64,
}

impl Files {
    pub fn new() -> Self {
        Files { entries: BTreeMap::new(), open: BTreeMap::new(), adopted: 0 }
    }

    pub fn add(&mut self, path: &Path, content: &[u8], faults: FileFaults) -> io::Result<()> {
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

    pub fn stat(&self, path: &Path) -> Result<FileMetadata, Errno> {
        self.find(path).map(|(metadata, _)| metadata)
    }

    pub fn open(&mut self, path: &Path) -> Result<(OwnedFd, FileMetadata, FileFaults), Errno> {
        let (metadata, entry) = self.find(path)?;
        let faults = entry.faults;
        let descriptor = match &entry.content {
            Some(content) => rustix::io::fcntl_dupfd_cloexec(content.as_fd(), 0)?,
            None => memfd_create("simulated directory", MemfdFlags::CLOEXEC)?,
        };
        self.note_open(descriptor.as_raw_fd(), faults);
        Ok((descriptor, metadata, faults))
    }

    pub fn note_open(&mut self, descriptor: RawFd, faults: FileFaults) {
        self.open.insert(descriptor, faults);
    }

    /// Adopts a real file, and returns its hash.
    pub fn adopt(&mut self, descriptor: RawFd, faults: FileFaults) -> FileHash {
        self.note_open(descriptor, faults);
        self.adopted += 1;
        FileHash::new(DEVICE_OF_REAL_FILES, self.adopted)
    }

    pub fn faults_of(&self, descriptor: RawFd) -> FileFaults {
        self.open.get(&descriptor).copied().unwrap_or_default()
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

/// Number of bytes that a read from memory returns; `None` if none are in memory.
pub(super) fn resident(fate: &Fate, length: usize) -> Option<usize> {
    if fate.strikes(|faults| faults.cold_files) {
        return None;
    }
    if length > 1 && fate.strikes(|faults| faults.short_reads) {
        return Some(fate.random.up_to(length));
    }
    Some(length)
}
