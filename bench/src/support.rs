//! support: parts of the server's tests that the campaign uses: the file system in user space, the certificate
//! authority, and the names of the tests' support module that these need.

#[allow(dead_code, reason = "the campaign uses a part of it")]
#[path = "../../tests/server/support/authority.rs"]
pub mod authority;
#[allow(dead_code, reason = "the campaign uses a part of it")]
#[path = "../../tests/server/support/fuse/mod.rs"]
pub mod fuse;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

pub const DEADLINE: Duration = Duration::from_secs(120);

pub const NO_MOUNTS: &str = "no file system can be mounted here";

/// Reports the reason why there is no disk.
pub fn skip(reason: &str) {
    eprintln!("campaign: {reason}");
}

/// A folder, removed on drop.
pub struct Directory(PathBuf);

impl Directory {
    pub fn new() -> Directory {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("gale-bench-{}-disk-{number}", std::process::id()));
        fs::create_dir_all(&path).expect("a folder in the temporary one");
        Directory(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
