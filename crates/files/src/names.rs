//! Names of files and directories: changed by the pool `default`, or created where the caller may block.
//!
//! A change of a directory waits for the file system's journal, so it stands in the queue of its device's writes.
//! Dropping the future cancels a change that has not begun; one that has begun is completed.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use gale_runtime::default_pool;

use super::{FileError, likely_device};

/// Renames a file within its file system and replaces an existing one. Errors: rename(2)'s, EXDEV among them, and the
/// pool's.
pub async fn rename(from: &Path, to: &Path) -> Result<(), FileError> {
    let paths = (PathBuf::from(from), PathBuf::from(to));
    let renamed = in_pool(to, move || std::fs::rename(&paths.0, &paths.1)).await;
    renamed.map_err(|error| FileError::new("rename", from, error).with_target(to))
}

/// Creates a directory and its missing parents, each with these permissions (less the umask). Existing ones are
/// unchanged. Blocks. Errors: mkdir(2)'s.
pub fn create_directories_blocking(path: &Path, mode: u32) -> Result<(), FileError> {
    let created = DirBuilder::new().recursive(true).mode(mode).create(path);
    created.map_err(|error| FileError::new("mkdir", path, error))
}

/// Runs a change of the directory of this path in the pool.
async fn in_pool(path: &Path, change: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<()> {
    default_pool().run_for(likely_device(path).writes(), change).await?
}
