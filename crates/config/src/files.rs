//! Access to configuration files: on disk, in a bundle, or in memory for tests.
//!
//! Decides nothing: the parser chooses which files to read and words the errors.
//! Invariant: `glob` returns paths in byte order, so that the order of includes is the same everywhere.

use crate::glob;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Reads files and expands patterns.
pub trait Files {
    /// Reads a file.
    ///
    /// # Errors
    /// Any error of opening or reading it.
    fn read(&mut self, path: &Path) -> io::Result<Vec<u8>>;

    /// Returns the paths that match a pattern with `*`, `?` and `[…]`, in byte order. No match is not an error.
    ///
    /// # Errors
    /// If the list cannot be built. An unreadable directory counts as empty.
    fn glob(&mut self, pattern: &Path) -> io::Result<Vec<PathBuf>>;
}

/// Files on the disk of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiskFiles;

impl Files for DiskFiles {
    fn read(&mut self, path: &Path) -> io::Result<Vec<u8>> {
        fs::read(path)
    }

    fn glob(&mut self, pattern: &Path) -> io::Result<Vec<PathBuf>> {
        glob::expand(pattern)
    }
}

/// Files in memory.
#[derive(Clone, Debug, Default)]
pub struct MemoryFiles {
    files: BTreeMap<PathBuf, Vec<u8>>,
}

impl MemoryFiles {
    /// Creates an empty set of files.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a file.
    pub fn with(mut self, path: impl Into<PathBuf>, text: impl Into<Vec<u8>>) -> Self {
        self.files.insert(path.into(), text.into());
        self
    }
}

impl Files for MemoryFiles {
    fn read(&mut self, path: &Path) -> io::Result<Vec<u8>> {
        self.files.get(path).cloned().ok_or_else(|| io::Error::from_raw_os_error(NO_SUCH_FILE))
    }

    fn glob(&mut self, pattern: &Path) -> io::Result<Vec<PathBuf>> {
        let pattern = pattern.as_os_str().as_bytes();
        let mut found: Vec<_> =
            self.files.keys().filter(|path| glob::matches_path(pattern, bytes(path))).cloned().collect();
        found.sort_by(|one, two| bytes(one).cmp(bytes(two)));
        Ok(found)
    }
}

/// ENOENT, which is 2 on every Linux architecture.
const NO_SUCH_FILE: i32 = 2;

fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}
