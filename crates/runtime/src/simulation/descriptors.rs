//! Faults of files by their descriptors. The kernel's part of a simulated file system: a descriptor is that of a real
//! file, often one in memory, and reads from it fail as the test wants.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use rustix::io::Errno;

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
    ///
    /// # Errors
    /// pread(2)'s, and those of the faults.
    pub fn read(self, file: BorrowedFd<'_>, offset: u64, into: &mut [u8]) -> Result<usize, Errno> {
        let length = self.bound(offset, into.len())?;
        if length == 0 {
            return Ok(0);
        }
        rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut into[..length], offset))
    }
}

/// Faults of open files, by descriptor. The entry of a closed one is replaced when its number is reused.
#[derive(Default)]
pub(crate) struct Descriptors(BTreeMap<RawFd, FileFaults>);

impl Descriptors {
    pub fn set_faults(&mut self, descriptor: RawFd, faults: FileFaults) {
        self.0.insert(descriptor, faults);
    }

    pub fn faults_of(&self, descriptor: BorrowedFd<'_>) -> FileFaults {
        self.0.get(&descriptor.as_raw_fd()).copied().unwrap_or_default()
    }
}
