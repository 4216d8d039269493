//! Lock files: mutual exclusion among processes.
//!
//! Processes overlap in an upgrade, in a change of `user`, and while an old worker process drains. The lock is that of
//! flock(2): it belongs to the open file description, and the kernel releases it when the last descriptor of that is
//! closed, however the process ends. So each process needs an open file description of its own; an inherited descriptor
//! would share the lock with the other process. The sender of a lock file therefore reopens it for the receiver, which
//! needs no permission to open it. A file that cannot be reopened is sent without a descriptor: its lock cannot be
//! taken, but everything else works.
//!
//! A lock file belongs on a local disk: the master opens it, and would block on a file server that does not respond.
//!
//! The file stays empty and is never removed: one process might hold the lock of a removed file, and another that of
//! the new one.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

/// Shared by all users of the lock in this process.
pub type LockHandle = Arc<LockFile>;

/// An open lock file.
#[derive(Debug)]
pub struct LockFile {
    path: PathBuf,
    /// The descriptor, or the error number of reopening it for this process.
    descriptor: Result<Arc<OwnedFd>, i32>,
    /// True if a thread of this process holds the lock: the kernel distinguishes processes, not threads.
    is_held: AtomicBool,
}

impl LockFile {
    /// Opens `path`, created with mode 0600 if it does not exist. Nothing is locked yet.
    ///
    /// # Errors
    /// Errors of `open`; a symbolic link is never followed, because others may own the directory.
    pub fn open(path: &Path) -> io::Result<LockFile> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let file = options.open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        Ok(LockFile::received(path.to_owned(), Ok(Arc::new(file.into()))))
    }

    /// Wraps a descriptor that is not shared with another process, or the error of the sender.
    pub(super) fn received(path: PathBuf, descriptor: Result<Arc<OwnedFd>, i32>) -> LockFile {
        LockFile { path, descriptor, is_held: AtomicBool::new(false) }
    }

    /// Returns the path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes the lock unless it is held. The file system may have to ask a server, so do not call this on an event
    /// loop.
    ///
    /// # Errors
    /// The lock is held, the file system has no locks, or the file could not be reopened for this process.
    pub fn try_lock(self: &Arc<Self>) -> Result<LockGuard, TryLockError> {
        let descriptor = self.descriptor.as_ref().map_err(|code| TryLockError::Failed(*code))?;
        if self.is_held.swap(true, Ordering::Acquire) {
            return Err(TryLockError::HeldHere);
        }
        match rustix::fs::flock(descriptor, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(LockGuard(Arc::clone(self))),
            Err(errno) => {
                self.is_held.store(false, Ordering::Release);
                Err(match errno {
                    Errno::WOULDBLOCK => TryLockError::HeldElsewhere,
                    errno => TryLockError::Failed(errno.raw_os_error()),
                })
            }
        }
    }

    /// Reopens the file for another process, with a lock separate from ours.
    ///
    /// # Errors
    /// The file system has become read-only, or the file server has forgotten the file.
    pub(super) fn open_anew(&self) -> io::Result<OwnedFd> {
        // By the descriptor: the path may lead elsewhere by now.
        let path = format!("/proc/self/fd/{}", self.descriptor()?.as_raw_fd());
        Ok(OpenOptions::new().read(true).write(true).open(path)?.into())
    }

    /// True if `other` is the same file on disk, with the same path.
    pub(super) fn is_same_file(&self, other: &LockFile) -> bool {
        let identity = |file: &LockFile| {
            let stat = rustix::fs::fstat(file.descriptor().ok()?).ok()?;
            Some((stat.st_dev, stat.st_ino))
        };
        self.path == other.path && identity(self).is_some_and(|mine| identity(other) == Some(mine))
    }

    fn descriptor(&self) -> io::Result<&OwnedFd> {
        self.descriptor.as_deref().map_err(|code| io::Error::from_raw_os_error(*code))
    }
}

/// Reason why a lock was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TryLockError {
    /// Held in this process.
    HeldHere,
    /// Held by another process, or through another open file description of this one.
    HeldElsewhere,
    /// The lock cannot be taken, with this error number.
    Failed(i32),
}

/// Holds the lock until it is dropped. Dropping may block like [`LockFile::try_lock`].
#[derive(Debug)]
pub struct LockGuard(LockHandle);

impl Drop for LockGuard {
    fn drop(&mut self) {
        if let Ok(descriptor) = self.0.descriptor() {
            // On failure, the kernel releases the lock when the process ends.
            let _ = rustix::fs::flock(descriptor, FlockOperation::Unlock);
        }
        self.0.is_held.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("gale-lock-{name}-{}", std::process::id()))
    }

    #[test]
    fn one_holder_at_a_time_in_this_process_and_among_open_files() {
        let path = path("holder");
        let first = Arc::new(LockFile::open(&path).expect("created"));
        let sent = first.open_anew().expect("opened anew");
        let second = Arc::new(LockFile::received(path.clone(), Ok(Arc::new(sent))));
        assert!(first.is_same_file(&second));
        let guard = first.try_lock().expect("free");
        assert_eq!(first.try_lock().err(), Some(TryLockError::HeldHere));
        assert_eq!(second.try_lock().err(), Some(TryLockError::HeldElsewhere));
        drop(guard);
        let guard = second.try_lock().expect("free again");
        assert_eq!(first.try_lock().err(), Some(TryLockError::HeldElsewhere));
        // As at the end of a process: the lock is not released, and the descriptors are closed.
        let end: OwnedFd = std::fs::File::open("/dev/null").expect("it is there").into();
        // SAFETY: both are open; only the file that the number of `second` refers to changes.
        assert!(unsafe { libc::dup2(end.as_raw_fd(), second.descriptor().expect("open").as_raw_fd()) } >= 0);
        assert!(first.try_lock().is_ok());
        drop(guard);
        std::fs::remove_file(path).expect("ours");
    }

    #[test]
    fn symbolic_link_is_refused_and_nothing_is_created_behind_it() {
        let (link, target) = (path("link"), path("target"));
        std::os::unix::fs::symlink(&target, &link).expect("free");
        let error = LockFile::open(&link).expect_err("a link");
        assert_eq!(error.raw_os_error(), Some(libc::ELOOP));
        assert!(!target.exists());
        std::fs::remove_file(link).expect("ours");
    }
}
