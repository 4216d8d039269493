//! A directory that is removed with the test. The crates' unit tests include this file by its path.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A temporary directory; removed when dropped.
pub struct Scratch(PathBuf);

impl Scratch {
    /// Makes an empty directory. Its path contains no symbolic link.
    pub fn new() -> Scratch {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let parent = std::env::temp_dir().canonicalize().expect("a directory for temporary files");
        let path = parent.join(format!("gale-{}-{}-{number}", env!("CARGO_PKG_NAME"), std::process::id()));
        std::fs::create_dir(&path).expect("a directory of this name is new");
        Scratch(path)
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A failed test may have left it in any state.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
