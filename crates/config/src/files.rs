//! How the parser reaches files: the disk, a bundle, or a test's map.
//!
//! Decides nothing: which files are read, and how errors are worded, is the parser's.
//! Invariant: `glob` answers in the order of bytes, so that includes have one order everywhere.

use crate::glob;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Reads files and lists those that a pattern names.
pub trait Files {
    /// The bytes of a file.
    ///
    /// # Errors
    /// Whatever opening or reading says.
    fn read(&mut self, path: &Path) -> io::Result<Vec<u8>>;

    /// The paths that match a pattern with `*`, `?` and `[…]`, sorted by their bytes. None is no error.
    ///
    /// # Errors
    /// If the list cannot be made; a directory that cannot be read counts as empty.
    fn glob(&mut self, pattern: &Path) -> io::Result<Vec<PathBuf>>;
}

/// The files of this machine.
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

/// Files that exist only in memory.
#[derive(Clone, Debug, Default)]
pub struct MemoryFiles {
    files: BTreeMap<PathBuf, Vec<u8>>,
}

impl MemoryFiles {
    /// No files.
    pub fn new() -> Self {
        Self::default()
    }

    /// With one more file.
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

/// ENOENT, the same on every Linux.
const NO_SUCH_FILE: i32 = 2;

fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}
