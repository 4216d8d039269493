//! Files that are asked for: opened and looked at through a cache, as `open_file_cache` says.
//!   open_file_cache off | max=N [inactive=TIME];       http, server, location
//!   open_file_cache_valid TIME;  open_file_cache_min_uses N;  open_file_cache_errors on|off;  open_file_cache_events
//!   on|off;
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html#open_file_cache>)
//!
//! | `open_file_cache` | what is kept | how long it is believed |
//! |---|---|---|
//! | `max=N` | descriptors, sizes and times, directories, with `errors` errors; small bodies | `valid`, or until the kernel tells of a change |
//! | not set | of files that are asked for often the bodies, if small, or else the descriptors | as long as the kernel has told of no change, asked at each request: exact |
//! | `off` | nothing | |
//!
//! A size, a time and a body that are sent together were read from one descriptor, and the file was the same before and
//! after. A file that `max=N` keeps is looked at again at each request that sends from its descriptor, so an old head
//! does not meet a newer body; but where that look may wait for others (NFS, FUSE and their kind) it believes what it
//! knows for `valid`, as nginx does, and there it may. Modules ask with a path (`request/files/open_files.rs`) and get
//! the same whatever is set; nothing here waits on the loop.
//!
//! Where `disable_symlinks` checks the way to a file, nothing is kept: every request goes it anew.

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

use gale_runtime::files::LinkCheck;
use gale_runtime::{Bytes, File, FileMetadata, OpenFlags, files, watch};
use rustix::time::{ClockId, clock_gettime};

use store::Missed;
pub use store::{Store, StoreRules};

/// `open_file_cache`, where it is written.
#[derive(Clone)]
pub enum OpenFileCache {
    /// `off`
    Off,
    /// `max=N [inactive=TIME]`
    Store(Arc<Store>),
}

/// A file, or what else a path led to, ready to be sent.
pub struct Opened {
    /// What is known of it.
    pub metadata: FileMetadata,
    contents: Contents,
}

/// What of a file is sent.
pub(crate) enum Contents {
    Memory(Bytes),
    File(File),
    /// Nobody opens a directory to read from it here.
    Directory,
}

impl Opened {
    fn of(file: File) -> Opened {
        Opened { metadata: *file.metadata(), contents: Contents::File(file) }
    }

    /// What is sent.
    pub(crate) fn into_contents(self) -> Contents {
        self.contents
    }
}

/// A path that is asked for, and what the configuration says of files there.
pub struct Lookup<'r> {
    /// The path.
    pub path: &'r [u8],
    /// `disable_symlinks`
    pub link_check: Option<LinkCheck>,
    /// `open_file_cache`
    pub cache: Cache<'r>,
}

/// What is kept of the files that a location has.
#[derive(Clone, Copy)]
pub enum Cache<'r> {
    /// `off`
    Off,
    /// It is not set: only what is exact.
    Exact,
    /// `max=N`
    Store(&'r Store, StoreRules),
}

impl<'r> Lookup<'r> {
    /// Opens a file if that can be done without waiting; `None` = not: then [`Lookup::open`] does it. Errors:
    /// open(2)'s.
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

    /// Opens a file. Errors: open(2)'s, and those of the pool.
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

    /// As [`Lookup::stat`], if that can be done without waiting.
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

    /// As [`Lookup::stat_directory`], if that can be done without waiting.
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

    /// Looks at what a path leads to. Errors: stat(2)'s, those of open(2) where a cache is configured, and those of the
    /// pool.
    pub async fn stat(self) -> io::Result<FileMetadata> {
        if let Some(check) = self.link_check {
            return files::stat_checked(as_path(self.path), check).await;
        }
        match self.look(Wanted::Metadata) {
            Looked::Found(result) => result.map(|opened| opened.metadata),
            // As nginx: what is looked at will be asked for.
            Looked::Missed(destination @ Destination::Store(_)) => {
                let opened = files::open(as_path(self.path), OpenFlags::READ).await;
                destination.settle(opened).map(|opened| opened.metadata)
            }
            Looked::Missed(_) => files::stat(as_path(self.path)).await,
        }
    }

    /// Looks at what most likely is a directory: as [`Lookup::stat`], but it need not be readable.
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

/// Where it shall be noted what the kernel says.
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

/// Takes out of all caches what nobody asks for, and closes it; for the thread of the watches. False when they are
/// empty.
fn evict_unused() -> bool {
    let clock = clock_gettime(ClockId::Monotonic);
    let now = milliseconds(clock.tv_sec as u64 * 1_000_000_000 + clock.tv_nsec as u64);
    // Both, whatever the first says.
    let (exact, stores) = (exact::evict_unused(now), store::evict_unused(now));
    exact || stores
}

/// Something is in a cache: the sweep runs again. Without it things go when others take their place.
fn note_work() {
    let _ = watch::run_every_second(evict_unused);
}

fn milliseconds(nanos: u64) -> u64 {
    nanos / 1_000_000
}

fn as_path(path: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(path))
}
