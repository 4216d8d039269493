//! A directory that goes away with the test: for the unit tests of the crates, too, which include this file by its
//! path.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// See the file's head.
pub struct Scratch(PathBuf);

impl Scratch {
    /// A new one, empty, with no symbolic link on the way to it.
    pub fn new() -> Scratch {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let parent = std::env::temp_dir().canonicalize().expect("a directory for temporary files");
        let path = parent.join(format!("gale-{}-{}-{number}", env!("CARGO_PKG_NAME"), std::process::id()));
        std::fs::create_dir(&path).expect("a directory of this name is new");
        Scratch(path)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A test that failed may have left it in whatever state.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
