//! A log file: its path, and one descriptor number for life.
//!
//! Reopening atomically puts the new file under the same descriptor number, so that writers need no lock and no notice:
//! a write in progress ends in the old file, the next one goes to the new one. Writing and buffering are done
//! elsewhere.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Shared by all writers of the file.
pub type LogHandle = Arc<LogFile>;

/// An open log file.
#[derive(Debug)]
pub struct LogFile {
    path: PathBuf,
    descriptor: Arc<OwnedFd>,
}

impl LogFile {
    /// Opens `path` for appending, created with mode 0644 if it does not exist.
    ///
    /// # Errors
    /// Errors of `open`. A FIFO without a reader is no error and does not block.
    pub fn open(path: &Path) -> io::Result<LogFile> {
        Ok(LogFile::shared(path.to_owned(), Arc::new(open(path)?)))
    }

    pub(super) fn shared(path: PathBuf, descriptor: Arc<OwnedFd>) -> LogFile {
        LogFile { path, descriptor }
    }

    /// Returns the path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Replaces the open file under the descriptor by `replacement`.
    pub(super) fn replace(&self, replacement: &OwnedFd) -> io::Result<()> {
        // SAFETY: both descriptors are open, held by the references; dup3 touches no memory. The number stays owned by
        // `self.descriptor`; only the file that it refers to changes, which is the purpose.
        let code = unsafe { libc::dup3(replacement.as_raw_fd(), self.descriptor.as_raw_fd(), libc::O_CLOEXEC) };
        if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// True if `other` is the same file on disk, with the same path.
    pub(super) fn is_same_file(&self, other: &LogFile) -> bool {
        let identity = |file: &LogFile| {
            let stat = rustix::fs::fstat(&file.descriptor).ok()?;
            Some((stat.st_dev, stat.st_ino))
        };
        self.path == other.path && identity(self).is_some_and(|mine| identity(other) == Some(mine))
    }

    pub(super) fn descriptor(&self) -> &Arc<OwnedFd> {
        &self.descriptor
    }
}

impl AsFd for LogFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Opens `path` as a log and makes `owner` its owner, if the writer is another user, as nginx does when it reopens
/// logs.
///
/// # Errors
/// nginx's text: `open() "x" failed (…)`, `chown("x", 33) failed (…)`.
pub(super) fn reopen(path: &Path, owner: Option<u32>) -> Result<OwnedFd, String> {
    let failed = |call: String| move |error: io::Error| format!("{call} failed{}", super::errors::errno_text(&error));
    let name = path.display();
    let file = File::from(open(path).map_err(failed(format!("open() \"{name}\"")))?);
    let Some(owner) = owner else {
        return Ok(file.into());
    };
    let metadata = file.metadata().map_err(failed(format!("fstat() \"{name}\"")))?;
    // Only a regular file changes its owner: a terminal, pipe or /dev/null belongs to others.
    if !metadata.is_file() {
        return Ok(file.into());
    }
    if metadata.uid() != owner {
        let user = rustix::fs::Uid::from_raw(owner);
        rustix::fs::fchown(&file, Some(user), None)
            .map_err(|error| failed(format!("chown(\"{name}\", {owner})"))(error.into()))?;
    }
    let mode = metadata.mode();
    if mode & 0o600 != 0o600 {
        rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode((mode | 0o600) & 0o7777))
            .map_err(|error| failed(format!("chmod() \"{name}\""))(error.into()))?;
    }
    Ok(file.into())
}

fn open(path: &Path) -> io::Result<OwnedFd> {
    let mut options = std::fs::OpenOptions::new();
    options.append(true).create(true).mode(0o644).custom_flags(libc::O_NONBLOCK);
    let file = match options.open(path) {
        Ok(file) if !file.metadata()?.file_type().is_fifo() => file,
        Err(error) if error.raw_os_error() != Some(libc::ENXIO) => return Err(error),
        // Opens a FIFO for reading, too: otherwise opening it fails without a reader, and lines written while there is
        // no other reader are lost. Lines are buffered in the FIFO, and then in the writer.
        _ => options.read(true).open(path)?,
    };
    rustix::fs::fcntl_setfl(&file, rustix::fs::OFlags::APPEND)?;
    Ok(file.into())
}
