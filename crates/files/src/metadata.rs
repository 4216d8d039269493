//! File metadata from stat(2).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{FileType, Stat};

/// The type of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A directory.
    Directory,
    /// A FIFO, socket, device or symbolic link.
    Other,
}

/// Metadata of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileMetadata {
    /// The file type.
    pub kind: FileKind,
    /// Size in bytes.
    pub size: u64,
    /// Last change of the content (`mtime`), seconds since the epoch.
    pub modified_seconds: i64,
    /// Nanoseconds of `modified_seconds`.
    pub modified_nanos: u32,
    /// Last change of the content or the metadata (`ctime`), seconds since the epoch.
    pub changed_seconds: i64,
    /// Nanoseconds of `changed_seconds`.
    pub changed_nanos: u32,
    /// The device that it lies on (`st_dev`).
    pub device: u64,
    /// The inode number.
    pub inode: u64,
    /// Type and permission bits as in `st_mode`.
    pub mode: u32,
    /// The owner's user id.
    pub owner: u32,
    /// Number of hard links.
    pub links: u64,
}

impl FileMetadata {
    /// Last change of the content.
    pub fn modified(&self) -> SystemTime {
        time(self.modified_seconds, self.modified_nanos)
    }

    /// Last change of the content or the metadata; programs cannot set it.
    pub fn changed(&self) -> SystemTime {
        time(self.changed_seconds, self.changed_nanos)
    }

    /// True if it is a regular file.
    pub fn is_regular(&self) -> bool {
        self.kind == FileKind::Regular
    }

    /// True if it is a directory.
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

/// A time from seconds and nanoseconds since the epoch.
fn time(seconds: i64, nanos: u32) -> SystemTime {
    let nanos = Duration::from_nanos(nanos.into());
    match u64::try_from(seconds) {
        Ok(seconds) => UNIX_EPOCH + Duration::from_secs(seconds) + nanos,
        Err(_) => UNIX_EPOCH - Duration::from_secs(seconds.unsigned_abs()) + nanos,
    }
}
