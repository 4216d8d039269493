//! Opens and stats files with the settings of a request's location: `open_file_cache` and `disable_symlinks`.

use std::future::Future;
use std::io;

use gale_files::{FileMetadata, Rung, count_piece};

use super::link_check;
use crate::files::FilePiece;
use crate::files::open_files::{Cache, Contents, Lookup, StoreRules};
use crate::request::Request;
use crate::request::body::Body;

pub use crate::files::open_files::{OpenFileCache, Opened, Store};

/// Opens a file if that is possible without blocking. `None` means that [`open`] has to be used. Errors: those of
/// open(2).
pub fn try_open(request: &Request, path: &[u8]) -> Option<io::Result<Opened>> {
    lookup(request, path).try_open()
}

/// Opens a file. Errors: those of open(2) and of the pool.
pub fn open<'r>(request: &'r Request, path: &'r [u8]) -> impl Future<Output = io::Result<Opened>> {
    lookup(request, path).open()
}

/// Like [`stat`], if that is possible without blocking.
pub fn try_stat(request: &Request, path: &[u8]) -> Option<io::Result<FileMetadata>> {
    lookup(request, path).try_stat()
}

/// Like [`stat_directory`], if that is possible without blocking.
pub fn try_stat_directory(request: &Request, path: &[u8]) -> Option<io::Result<FileMetadata>> {
    lookup(request, path).try_stat_directory()
}

/// Returns the metadata of a path's target. Errors: those of stat(2), of open(2) where a cache is configured, and of
/// the pool.
pub fn stat<'r>(request: &'r Request, path: &'r [u8]) -> impl Future<Output = io::Result<FileMetadata>> {
    lookup(request, path).stat()
}

/// Like [`stat`] for a path that is probably a directory, which need not be readable.
pub fn stat_directory<'r>(request: &'r Request, path: &'r [u8]) -> impl Future<Output = io::Result<FileMetadata>> {
    lookup(request, path).stat_directory()
}

fn lookup<'r>(request: &'r Request, path: &'r [u8]) -> Lookup<'r> {
    let core = &request.scope().core;
    let cache = match core.open_file_cache.get_opt() {
        Some(OpenFileCache::Off) => Cache::Off,
        None => Cache::Exact,
        Some(OpenFileCache::Store(store)) => {
            let rules = StoreRules {
                valid_ms: core.open_file_cache_valid.get().as_millis() as u64,
                min_uses: u32::try_from(*core.open_file_cache_min_uses.get()).unwrap_or(u32::MAX),
                keeps_errors: *core.open_file_cache_errors.get(),
                believes_events: *core.open_file_cache_events.get(),
            };
            Cache::Store(store, rules)
        }
    };
    Lookup { path, link_check: link_check(request, path), cache }
}

impl Opened {
    /// The whole file as a body.
    pub fn into_body(self) -> Body {
        let size = self.metadata.size;
        match self.into_contents() {
            _ if size == 0 => Body::Empty,
            Contents::Memory(bytes) => {
                count_piece(Rung::Memory, bytes.len() as u64);
                Body::Bytes(bytes)
            }
            Contents::File(file) => Body::File(FilePiece { file, offset: 0, length: size }),
            Contents::Directory => Body::Empty,
        }
    }
}
