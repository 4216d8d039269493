//! Opens and stats files through a cache, as `open_file_cache` configures it.
//!   open_file_cache off | max=N [inactive=TIME];       http, server, location
//!   open_file_cache_valid TIME;  open_file_cache_min_uses N;  open_file_cache_errors on|off;  open_file_cache_events
//!   on|off;
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html#open_file_cache>)
//!
//! - `max=N` caches descriptors, sizes and times, directories, small bodies, and with `errors` errors. They are trusted
//!   for `valid`, or until the kernel reports a change.
//! - Without the directive, small bodies of files that are requested often are cached, and descriptors of larger ones.
//!   They are exact: each request checks that the kernel has reported no change.
//! - `off` caches nothing.
//!
//! A size, a time and a body that are sent together were read from one descriptor, and the file was the same before and
//! after. With `max=N`, a file sent from its descriptor is checked at each request, so an old head does not meet a
//! newer body. On file systems where that check may block (NFS, FUSE and similar) the entry is trusted for `valid`, as
//! in nginx, and a mismatch is possible. Modules pass a path (`request/files/open_files.rs`) and get the same result
//! with any setting. Nothing here blocks the loop.
//!
//! With `disable_symlinks` nothing is cached: each request walks the path anew.

mod entry;
mod exact;
mod handles;
mod store;
mod table;

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use gale_files::{self as files, File, FileMetadata, LinkCheck, OpenFlags, watch};
use gale_runtime::Bytes;
use rustix::time::{ClockId, clock_gettime};

use store::Missed;
pub use store::{Store, StoreRules};

/// Value of `open_file_cache`.
#[derive(Clone)]
pub enum OpenFileCache {
    /// `off`
    Off,
    /// `max=N [inactive=TIME]`
    Store(Arc<Store>),
}

/// A file, directory or other target of a path, ready to be sent.
pub struct Opened {
    /// Its metadata.
    pub metadata: FileMetadata,
    contents: Contents,
}

/// The content to send.
pub(crate) enum Contents {
    Memory(Bytes),
    File(File),
    /// A directory, which is never opened for reading here.
    Directory,
}

impl Opened {
    fn of(file: File) -> Opened {
        Opened { metadata: *file.metadata(), contents: Contents::File(file) }
    }

    pub(crate) fn into_contents(self) -> Contents {
        self.contents
    }
}

/// A requested path with the settings for files there.
pub struct Lookup<'r> {
    /// The path.
    pub path: &'r [u8],
    /// `disable_symlinks`
    pub link_check: Option<LinkCheck>,
    /// `open_file_cache`
    pub cache: Cache<'r>,
}

/// The cache that a location uses.
#[derive(Clone, Copy)]
pub enum Cache<'r> {
    /// `off`
    Off,
    /// Not set: only the exact cache.
    Exact,
    /// `max=N`
    Store(&'r Store, StoreRules),
}

impl<'r> Lookup<'r> {
    /// Opens a file if that is possible without blocking. `None` means that [`Lookup::open`] has to be used. Errors:
    /// those of open(2).
    pub fn try_open(self) -> Option<io::Result<Opened>> {
        if let Some(check) = self.link_check {
            let opened = files::try_open_checked(as_path(self.path), OpenFlags::READ, check)?;
            return Some(opened.map(Opened::of));
        }
        let destination = match self.look(Wanted::Open) {
            Looked::Found(result) => return Some(result),
            Looked::Missed(destination) => destination,
        };
        let opened = files::try_open(as_path(self.path), OpenFlags::READ)?;
        Some(destination.settle(opened))
    }

    /// Opens a file. Errors: those of open(2) and of the pool.
    pub async fn open(self) -> io::Result<Opened> {
        if let Some(check) = self.link_check {
            return files::open_checked(as_path(self.path), OpenFlags::READ, check).await.map(Opened::of);
        }
        let destination = match self.look(Wanted::Open) {
            Looked::Found(result) => return result,
            Looked::Missed(destination) => destination,
        };
        let opened = files::open(as_path(self.path), OpenFlags::READ).await;
        destination.settle(opened)
    }

    /// Like [`Lookup::stat`], if that is possible without blocking.
    pub fn try_stat(self) -> Option<io::Result<FileMetadata>> {
        if let Some(check) = self.link_check {
            return files::try_stat_checked(as_path(self.path), check);
        }
        match self.look(Wanted::Metadata) {
            Looked::Found(result) => Some(result.map(|opened| opened.metadata)),
            Looked::Missed(destination @ Destination::Store(_)) => {
                let opened = files::try_open(as_path(self.path), OpenFlags::READ)?;
                Some(destination.settle(opened).map(|opened| opened.metadata))
            }
            Looked::Missed(_) => files::try_stat(as_path(self.path)),
        }
    }

    /// Like [`Lookup::stat_directory`], if that is possible without blocking.
    pub fn try_stat_directory(self) -> Option<io::Result<FileMetadata>> {
        if let Some(check) = self.link_check {
            return files::try_stat_checked(as_path(self.path), check);
        }
        match self.look(Wanted::Metadata) {
            Looked::Found(result) => Some(result.map(|opened| opened.metadata)),
            Looked::Missed(destination) => {
                let result = files::try_stat(as_path(self.path))?;
                destination.settle_directory(&result);
                Some(result)
            }
        }
    }

    /// Returns the metadata of a path's target. Errors: those of stat(2), of open(2) where a cache is configured, and
    /// of the pool.
    pub async fn stat(self) -> io::Result<FileMetadata> {
        if let Some(check) = self.link_check {
            return files::stat_checked(as_path(self.path), check).await;
        }
        match self.look(Wanted::Metadata) {
            Looked::Found(result) => result.map(|opened| opened.metadata),
            // As in nginx, the file is opened: it will be requested next.
            Looked::Missed(destination @ Destination::Store(_)) => {
                let opened = files::open(as_path(self.path), OpenFlags::READ).await;
                destination.settle(opened).map(|opened| opened.metadata)
            }
            Looked::Missed(_) => files::stat(as_path(self.path)).await,
        }
    }

    /// Like [`Lookup::stat`] for a path that is probably a directory, which need not be readable.
    pub async fn stat_directory(self) -> io::Result<FileMetadata> {
        if let Some(check) = self.link_check {
            return files::stat_checked(as_path(self.path), check).await;
        }
        match self.look(Wanted::Metadata) {
            Looked::Found(result) => result.map(|opened| opened.metadata),
            Looked::Missed(destination) => {
                let result = files::stat(as_path(self.path)).await;
                destination.settle_directory(&result);
                result
            }
        }
    }

    fn look(&self, wanted: Wanted) -> Looked<'r> {
        let path = self.path;
        let (hash, now) = match self.cache {
            Cache::Off => return Looked::Missed(Destination::Nowhere),
            Cache::Exact | Cache::Store(..) => (table::hash_of(path), milliseconds(gale_runtime::now().as_nanos())),
        };
        match self.cache {
            Cache::Store(store, rules) => match store.find(path, hash, now, rules, wanted) {
                Ok(found) => Looked::Found(found),
                Err(missed) => Looked::Missed(Destination::Store(missed)),
            },
            _ => match exact::find(path, hash, now) {
                Some(opened) => Looked::Found(Ok(opened)),
                None => Looked::Missed(Destination::Exact { path, hash, now }),
            },
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Open,
    Metadata,
}

enum Looked<'r> {
    Found(io::Result<Opened>),
    Missed(Destination<'r>),
}

/// The cache that stores the kernel's answer.
enum Destination<'r> {
    Nowhere,
    Exact { path: &'r [u8], hash: u64, now: u64 },
    Store(Missed<'r>),
}

impl Destination<'_> {
    fn settle(self, opened: io::Result<File>) -> io::Result<Opened> {
        match self {
            Destination::Nowhere => opened.map(Opened::of),
            Destination::Exact { path, hash, now } => {
                let file = opened?;
                exact::note(path, hash, now, &file);
                Ok(Opened::of(file))
            }
            Destination::Store(missed) => missed.settle(opened),
        }
    }

    fn settle_directory(self, seen: &io::Result<FileMetadata>) {
        if let (Ok(metadata), Destination::Store(missed)) = (seen, self) {
            missed.settle_directory(metadata);
        }
    }
}

/// Removes unused entries from all caches and closes their files; runs on the thread of the watches. False if the
/// caches are empty.
fn evict_unused() -> bool {
    let clock = clock_gettime(ClockId::Monotonic);
    let now = milliseconds(clock.tv_sec as u64 * 1_000_000_000 + clock.tv_nsec as u64);
    // Both must run, so no `||` on the calls.
    let (exact, stores) = (exact::evict_unused(now), store::evict_unused(now));
    exact || stores
}

/// Makes the sweep run again because a cache has an entry. Without a sweep, entries go only when others replace them.
fn note_work() {
    let _ = watch::run_every_second(evict_unused);
}

fn milliseconds(nanos: u64) -> u64 {
    nanos / 1_000_000
}

fn as_path(path: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(path))
}
