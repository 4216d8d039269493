//! Names of files: given, changed and taken away by threads of the pool `default`.
//!
//! A change of a directory waits for the file system's journal, so it stands in the line of its device's writes.
//! Whoever drops one of these futures takes back what no thread has begun; what has begun is done.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::{FileError, likely_device};
use crate::pool::default_pool;

/// Gives a file another name on the same file system, in place of any file that has it. Errors: rename(2)'s, EXDEV
/// among them, and the pool's.
pub async fn rename(from: &Path, to: &Path) -> Result<(), FileError> {
    let paths = (PathBuf::from(from), PathBuf::from(to));
    let renamed = in_pool(to, move || std::fs::rename(&paths.0, &paths.1)).await;
    renamed.map_err(|error| FileError::new("rename", from, error).with_target(to))
}

/// Takes a file's name away. Its content goes with the last one who has it open; the thread frees it if that is nobody.
/// Errors: unlink(2)'s and the pool's.
pub async fn unlink(path: &Path) -> Result<(), FileError> {
    let own = PathBuf::from(path);
    in_pool(path, move || std::fs::remove_file(own)).await.map_err(|error| FileError::new("unlink", path, error))
}

/// Creates a directory and those above it that are missing, each with these permissions (less the umask). One that is
/// there is left as it is. Errors: mkdir(2)'s and the pool's.
pub async fn create_directories(path: &Path, mode: u32) -> Result<(), FileError> {
    let own = PathBuf::from(path);
    let created = in_pool(path, move || create(&own, mode)).await;
    created.map_err(|error| FileError::new("mkdir", path, error))
}

/// As [`create_directories`], where the caller may block.
pub fn create_directories_blocking(path: &Path, mode: u32) -> Result<(), FileError> {
    create(path, mode).map_err(|error| FileError::new("mkdir", path, error))
}

fn create(path: &Path, mode: u32) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(mode).create(path)
}

/// Has something done that changes the directory of this path.
async fn in_pool(path: &Path, change: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<()> {
    default_pool().run_for(likely_device(path).writes(), change).await?
}
