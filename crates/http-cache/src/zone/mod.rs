//! A cache, by the name of its zone: the index, responses in flight, purges, and the health of the disk.
//!
//! It belongs to the process and continues over reloads. Nothing here blocks: files are handled in pools, whose tasks
//! report to [`Disk`]. An entry of the index is checked against its file when that is opened, so a missing or foreign
//! file is never served.
//!
//! ```text
//!   fills      responses in flight                        counters   its counters
//!   storing    adding and renewing entries                disk       health of its disk
//!   removing   removing entries and their files           marks      dependencies of responses besides their keys
//!   purging    purges, at once and afterwards             text_table the tables of marks
//!                                                         changes    pending changes for the journal
//! ```

mod changes;
mod counters;
mod disk;
mod fills;
mod marks;
mod purging;
mod removing;
mod storing;
mod text_table;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::task::{Context, Poll, Waker};

use bstr::BString;
use parking_lot::{Mutex, RwLock};

use super::directory::{CacheDirectory, PathOptions};
use super::index::{Entry, Index, Kind, seconds};
use super::key::{Id, path_of};
use super::purges::Purges;
use super::store::{self, OpenError, Opened};
use changes::Journal;
use fills::{FILL_SHARDS, InFlight, Listed};
use marks::{KnownRules, VaryLists};
use purging::SEARCH_PURGES;

pub use counters::{Counters, UseFigures, Uses, WAYS};
pub use disk::Disk;
pub use fills::{FoundFill, Lead, Reserved, UNSTORED_BYTES_MAX, total};
pub use purging::Purged;

/// Maximum number of requests woken when the journal was read; others wait until their timeout.
const WAITING_MAX: usize = 4096;

/// Number of locks for renaming and removing files.
const NAMING_SHARDS: usize = 64;

/// Allocation unit of most file systems, in bytes.
const BLOCK_SIZE: u64 = 4096;

/// Allocation unit if the file system reports an implausible one, as in nginx.
const BLOCK_SIZE_LEAST: u64 = 512;

/// Time for which requests do not wait for each other after a response that must not be stored.
const UNCACHEABLE_SECONDS: u64 = 10;

/// A cache, see the head of the file.
pub struct CacheZone {
    /// The name of the zone.
    pub name: BString,
    /// The directory of its files.
    pub directory: CacheDirectory,
    /// Its entries.
    pub index: Index,
    /// Its purges.
    pub purges: Purges,
    /// Counters since the process began.
    pub counters: Counters,
    /// Health of its disk.
    pub disk: Disk,
    options: RwLock<Arc<PathOptions>>,
    fills: [Mutex<HashMap<Id, Listed>>; FILL_SHARDS],
    in_flight: Mutex<InFlight>,
    /// Locks held by pool threads while they rename or remove a file, so that index and directory agree.
    naming: [Mutex<()>; NAMING_SHARDS],
    vary_lists: VaryLists,
    search_rules: KnownRules,
    /// Number of the last purge by key, by the mark for that key: a response requested before may arrive with rules,
    /// and belong to that key too.
    search_purges: Box<[AtomicU64]>,
    last_number: AtomicU64,
    unstored_bytes: AtomicU64,
    /// Bytes of files about to be renamed into place, counted against `max_size`.
    promised_bytes: AtomicU64,
    /// Allocation unit of the file system, in bytes.
    block_size: AtomicU64,
    /// True until the index knows all files.
    is_cold: AtomicBool,
    /// True while a pool checks whether a file still exists.
    is_looked_at: AtomicBool,
    turn: AtomicU64,
    last_failure: Mutex<Option<String>>,
    /// True if the last response could not be stored.
    is_failing: AtomicBool,
    journal: Mutex<Journal>,
    journal_turn: Mutex<()>,
    is_ready: AtomicBool,
    /// True if a request has timed out waiting for the journal.
    is_journal_late: AtomicBool,
    waiting: Mutex<Vec<Waker>>,
}

/// Result of a lookup.
pub enum Lookup {
    /// A response that is arriving, or has arrived and is not in its file yet.
    Coming(FoundFill),
    /// An entry with a file.
    Entry(Entry),
    /// The server failed with this status recently.
    Error(u16),
    /// The response depends on these request fields; with the number of the mark.
    Varies(Arc<[u8]>, u64),
    /// Nothing can be used.
    Nothing {
        /// Number of requests, including this one.
        uses: u64,
        /// True if the last response must not be stored: requests do not wait for each other.
        is_uncacheable: bool,
    },
}

/// A check whether a file still exists; ends when it is dropped.
pub struct Look(Arc<CacheZone>);

impl Look {
    /// The cache.
    pub fn zone(&self) -> &CacheZone {
        &self.0
    }
}

impl Drop for Look {
    fn drop(&mut self) {
        self.0.is_looked_at.store(false, Relaxed);
    }
}

impl CacheZone {
    /// Creates an empty cache whose index takes at most `bytes`.
    pub fn new(name: BString, directory: CacheDirectory, options: PathOptions, bytes: usize) -> CacheZone {
        CacheZone {
            name,
            directory,
            index: Index::new(bytes),
            purges: Purges::default(),
            counters: Counters::default(),
            disk: Disk::default(),
            options: RwLock::new(Arc::new(options)),
            fills: Default::default(),
            in_flight: Mutex::default(),
            naming: [const { Mutex::new(()) }; NAMING_SHARDS],
            vary_lists: VaryLists::default(),
            search_rules: KnownRules::default(),
            search_purges: (0..SEARCH_PURGES).map(|_| AtomicU64::new(0)).collect(),
            last_number: AtomicU64::new(0),
            unstored_bytes: AtomicU64::new(0),
            promised_bytes: AtomicU64::new(0),
            block_size: AtomicU64::new(BLOCK_SIZE),
            is_cold: AtomicBool::new(true),
            is_looked_at: AtomicBool::new(false),
            turn: AtomicU64::new(0),
            last_failure: Mutex::default(),
            is_failing: AtomicBool::new(false),
            journal: Mutex::default(),
            journal_turn: Mutex::default(),
            is_ready: AtomicBool::new(false),
            is_journal_late: AtomicBool::new(false),
            waiting: Mutex::default(),
        }
    }

    /// The current parameters.
    pub fn options(&self) -> Arc<PathOptions> {
        Arc::clone(&self.options.read())
    }

    /// Replaces the parameters.
    pub fn set_options(&self, options: PathOptions) {
        *self.options.write() = Arc::new(options);
    }

    /// Asks the file system for its allocation unit; may block.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn learn_block_size(&self) -> std::io::Result<()> {
        let size = rustix::fs::statvfs(&self.directory.path)?.f_bsize;
        let is_likely = (BLOCK_SIZE_LEAST..=BLOCK_SIZE).contains(&size) && size.is_power_of_two();
        self.block_size.store(if is_likely { size } else { BLOCK_SIZE_LEAST }, Relaxed);
        Ok(())
    }

    /// Space that a file of this length takes, as counted against `max_size`.
    pub fn room_for(&self, size: u64) -> u64 {
        let rest = self.block_size.load(Relaxed) - 1;
        size.saturating_add(rest) & !rest
    }

    /// A number that identifies the cache.
    pub fn identity(self: &Arc<Self>) -> usize {
        Arc::as_ptr(self) as usize
    }

    /// True if there may be files that the index does not know.
    pub fn is_cold(&self) -> bool {
        self.is_cold.load(Relaxed)
    }

    /// Sets whether there may be files that the index does not know.
    pub fn set_cold(&self, is_cold: bool) {
        self.is_cold.store(is_cold, Relaxed);
    }

    /// Notes that the journal was read, so all purges are known.
    pub fn set_ready(&self) {
        self.disk.note_alive(gale_runtime::now_anywhere());
        self.is_ready.store(true, Release);
        let wakers = std::mem::take(&mut *self.waiting.lock());
        wakers.into_iter().for_each(Waker::wake);
    }

    /// True if files may be served.
    pub fn is_ready(&self) -> bool {
        self.is_ready.load(Acquire)
    }

    /// True if a request should wait until files may be served. After one has timed out, the others do not wait,
    /// whatever the health of the disk: a long journal on a slow disk would delay each of them.
    pub fn is_ready_soon(&self) -> bool {
        !self.is_ready() && !self.is_journal_late.load(Relaxed) && self.disk.is_well()
    }

    /// Notes that a request has timed out waiting for the journal. True for the first one.
    pub fn note_journal_late(&self) -> bool {
        !self.is_journal_late.swap(true, Relaxed)
    }

    /// Ready when files may be served.
    pub fn poll_ready(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut waiting = self.waiting.lock();
        if self.is_ready() {
            return Poll::Ready(());
        }
        if waiting.len() < WAITING_MAX {
            waiting.push(context.waker().clone());
        }
        Poll::Pending
    }

    /// Returns a number larger than all before, including those of earlier processes, unless the clock was set back
    /// while none ran.
    pub fn next_number(&self) -> u64 {
        let now = gale_runtime::wall().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_micros() as u64;
        let next = |last: u64| Some(now.max(last + 1));
        self.last_number.fetch_update(Relaxed, Relaxed, next).map_or(now, |last| now.max(last + 1))
    }

    /// Notes the number of an existing entry.
    pub fn note_number(&self, number: u64) {
        self.last_number.fetch_max(number, Relaxed);
    }

    /// The path of an entry's file.
    pub fn path_of(&self, id: &Id) -> PathBuf {
        path_of(&self.directory.path, &self.directory.levels, id)
    }

    /// Looks an id up and counts the request.
    pub fn look(self: &Arc<Self>, id: &Id, now: u64) -> Lookup {
        if let Some(fill) = self.readable_fill(id) {
            return Lookup::Coming(fill);
        }
        match self.index.touch(id, now) {
            None => {
                // As in nginx, each request is counted.
                self.put(Entry { uses: 1, ..Entry::new(*id, Kind::Counted, now) });
                Lookup::Nothing { uses: 1, is_uncacheable: false }
            }
            Some(entry) => match entry.kind {
                Kind::Stored => Lookup::Entry(entry),
                Kind::Error(status) if entry.is_fresh(now) => Lookup::Error(status),
                Kind::Varies(list) => match self.vary_lists.read().get(list) {
                    Some((names, ())) => Lookup::Varies(Arc::clone(names), entry.number),
                    None => Lookup::Nothing { uses: entry.uses.into(), is_uncacheable: false },
                },
                // A key of a request is never that of a mark.
                kind => {
                    let is_uncacheable = kind == Kind::Uncacheable && entry.is_fresh(now);
                    Lookup::Nothing { uses: entry.uses.into(), is_uncacheable }
                }
            },
        }
    }

    /// True if a fresh file with another number than `seen` exists: another request has just fetched it.
    pub fn has_fresh(&self, id: &Id, seen: Option<u64>, now: u64) -> bool {
        let is_new = |entry: &Entry| entry.kind == Kind::Stored && entry.is_fresh(now) && Some(entry.number) != seen;
        self.index.with(id, |entry| entry.is_some_and(|entry| is_new(entry)))
    }

    /// Number of the newest response under this id, or `None` if there is none.
    pub fn newest(&self, id: &Id, now: u64) -> Option<u64> {
        if let Some(fill) = self.readable_fill(id) {
            return Some(fill.number);
        }
        self.index.with(id, |entry| match entry {
            Some(entry) if matches!(entry.kind, Kind::Stored | Kind::Varies(_)) => Some(entry.number),
            Some(entry) if matches!(entry.kind, Kind::Error(_)) && entry.is_fresh(now) => Some(0),
            _ => None,
        })
    }

    /// Notes that the server failed with this status, for `valid` seconds.
    pub fn note_error(self: &Arc<Self>, id: &Id, status: u16, valid: u32, now: u64) {
        self.note(id, Kind::Error(status), now + u64::from(valid), now);
    }

    /// Notes that the last response must not be stored.
    pub fn note_uncacheable(self: &Arc<Self>, id: &Id, now: u64) {
        self.note(id, Kind::Uncacheable, now + UNCACHEABLE_SECONDS, now);
    }

    fn note(self: &Arc<Self>, id: &Id, kind: Kind, until: u64, now: u64) {
        let (until, now_seconds) = (seconds(until), seconds(now));
        let is_kept = self.index.with(id, |entry| match entry {
            Some(entry) if entry.kind.has_file() => true,
            Some(entry) => {
                (entry.kind, entry.fresh_until, entry.received) = (kind, until, now_seconds);
                true
            }
            None => false,
        });
        if !is_kept {
            self.put(Entry { fresh_until: until, received: now_seconds, ..Entry::new(*id, kind, now) });
        }
    }

    /// Removes an entry whose file is missing or unusable. The file itself stays.
    pub fn forget(&self, id: &Id, number: u64) {
        self.index.remove(id, |entry| entry.kind == Kind::Stored && entry.number == number);
    }

    /// Begins a check whether a file still exists. Only one runs at a time, so that a hanging disk blocks one thread.
    pub fn begin_look(self: &Arc<Self>) -> Option<Look> {
        let may_look = self.disk.is_well() && !self.is_looked_at.swap(true, Relaxed);
        may_look.then(|| Look(Arc::clone(self)))
    }

    /// True if the index has a file of this id with this number or a later one.
    fn has_file(&self, id: &Id, number: u64) -> bool {
        let has_file = |entry: &Entry| entry.kind.has_file() && entry.number >= number;
        self.index.with(id, |entry| entry.is_some_and(|entry| has_file(entry)))
    }

    /// Opens the file of an entry; may block.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(&self, id: &Id) -> Result<Opened, OpenError> {
        let path = self.path_of(id);
        match store::open(&path) {
            Err(OpenError::Foreign | OpenError::Damaged(_)) => {
                // Its header may have been rewritten meanwhile. The lock excludes that.
                let _naming = self.naming_of(id).lock();
                store::open(&path)
            }
            opened => opened,
        }
    }

    fn naming_of(&self, id: &Id) -> &Mutex<()> {
        &self.naming[usize::from(id[14]) % NAMING_SHARDS]
    }
}
