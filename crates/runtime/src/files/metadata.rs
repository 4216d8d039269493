//! What is known of a file without opening it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{FileType, Stat};

/// What a path names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A directory.
    Directory,
    /// A FIFO, socket, device or symbolic link.
    Other,
}

/// What is known of a file without opening it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileMetadata {
    /// What it is.
    pub kind: FileKind,
    /// Its size in bytes.
    pub size: u64,
    /// Last change of its content, seconds since the epoch.
    pub modified_seconds: i64,
    /// And nanoseconds.
    pub modified_nanos: u32,
    /// Last change of its content or of anything else that is known of it.
    pub changed_seconds: i64,
    /// And nanoseconds.
    pub changed_nanos: u32,
    /// The device that it lies on.
    pub device: u64,
    /// Its number there.
    pub inode: u64,
    /// Type and permission bits as in `st_mode`.
    pub mode: u32,
    /// The owner's user id.
    pub owner: u32,
    /// How many names it has.
    pub links: u64,
}

impl FileMetadata {
    /// Last change of its content.
    pub fn modified(&self) -> SystemTime {
        time(self.modified_seconds, self.modified_nanos)
    }

    /// Last change of its content or of anything else that is known of it; unlike the other one nobody can set it.
    pub fn changed(&self) -> SystemTime {
        time(self.changed_seconds, self.changed_nanos)
    }

    /// Whether it is a regular file.
    pub fn is_regular(&self) -> bool {
        self.kind == FileKind::Regular
    }

    /// Whether it is a directory.
    pub fn is_directory(&self) -> bool {
        self.kind == FileKind::Directory
    }

    #[allow(clippy::unnecessary_cast)] // The types of these fields differ between architectures.
    pub(super) fn from_kernel(stat: &Stat) -> Self {
        FileMetadata {
            kind: match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile => FileKind::Regular,
                FileType::Directory => FileKind::Directory,
                _ => FileKind::Other,
            },
            size: u64::try_from(stat.st_size).unwrap_or(0),
            modified_seconds: stat.st_mtime as i64,
            modified_nanos: stat.st_mtime_nsec as u32,
            changed_seconds: stat.st_ctime as i64,
            changed_nanos: stat.st_ctime_nsec as u32,
            device: stat.st_dev as u64,
            inode: stat.st_ino as u64,
            mode: stat.st_mode as u32,
            owner: stat.st_uid as u32,
            links: stat.st_nlink as u64,
        }
    }
}

/// Seconds and nanoseconds since the epoch.
fn time(seconds: i64, nanos: u32) -> SystemTime {
    let nanos = Duration::from_nanos(nanos.into());
    match u64::try_from(seconds) {
        Ok(seconds) => UNIX_EPOCH + Duration::from_secs(seconds) + nanos,
        Err(_) => UNIX_EPOCH - Duration::from_secs(seconds.unsigned_abs()) + nanos,
    }
}
