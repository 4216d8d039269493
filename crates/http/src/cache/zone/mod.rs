//! A cache, by the name of its zone: the index, what is being fetched, what was purged, and how the disk is.
//!
//! It belongs to the process and goes on over reloads. Nothing here waits: files are the work of pools, whose tasks
//! tell by [`Disk`] how they fared. What the index has is checked against the file when that is opened, so that neither
//! a lost nor a foreign file is ever served.
//!
//! ```text
//!   fills      what is being fetched                      counters   what it has done
//!   storing    how entries come                           disk       how its disk is
//!   removing   how they go, and their files               marks      what responses depend on besides their keys
//!   purging    what purges do at once, and afterwards     text_table the tables of that
//!                                                         changes    what is to be written to the journal
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

use super::index::{Entry, Index, Kind, seconds};
use super::key::{Id, path_of};
use super::purges::Purges;
use super::settings::{CacheDirectory, PathOptions};
use super::store::{self, OpenError, Opened};
use changes::Journal;
use fills::{FILL_SHARDS, InFlight, Listed};
use marks::{KnownRules, VaryLists};
use purging::SEARCH_PURGES;

pub use counters::{Counters, UseFigures, Uses, WAYS};
pub use disk::Disk;
pub use fills::{FoundFill, Lead, Reserved, UNSTORED_BYTES_MAX, total};
pub use purging::Purged;

/// How many requests are told that the journal was read; the others wait as long as they may.
const WAITING_MAX: usize = 4096;

/// How many files may get their names at the same time, or lose them.
const NAMING_SHARDS: usize = 64;

/// In which units files take room of most disks, in bytes.
const BLOCK_SIZE: u64 = 4096;

/// The unit that holds for disks that say something of their blocks that cannot be: as in nginx.
const BLOCK_SIZE_LEAST: u64 = 512;

/// For how long nobody waits for what came and may not be stored.
const UNCACHEABLE_SECONDS: u64 = 10;

/// See the file's head.
pub struct CacheZone {
    /// The name of the zone.
    pub name: BString,
    /// Where its files are.
    pub directory: CacheDirectory,
    /// Its entries.
    pub index: Index,
    /// What was purged.
    pub purges: Purges,
    /// What it has done.
    pub counters: Counters,
    /// How its disk is.
    pub disk: Disk,
    options: RwLock<Arc<PathOptions>>,
    fills: [Mutex<HashMap<Id, Listed>>; FILL_SHARDS],
    in_flight: Mutex<InFlight>,
    /// Held by threads of pools while a file gets or loses its name, so that index and directory say the same.
    naming: [Mutex<()>; NAMING_SHARDS],
    vary_lists: VaryLists,
    search_rules: KnownRules,
    /// When something was purged by a key, by the mark that is for it: what was asked for before may come with rules,
    /// and be of that key, too.
    search_purges: Box<[AtomicU64]>,
    last_number: AtomicU64,
    unstored_bytes: AtomicU64,
    /// Bytes of files that are about to get their names: `max_size` has room for them.
    promised_bytes: AtomicU64,
    /// In which units files take room of the disk, in bytes.
    block_size: AtomicU64,
    /// The index does not know all files yet.
    is_cold: AtomicBool,
    /// A pool looks whether a file is still there.
    is_looked_at: AtomicBool,
    turn: AtomicU64,
    last_failure: Mutex<Option<String>>,
    /// What came last could not be stored.
    is_failing: AtomicBool,
    journal: Mutex<Journal>,
    journal_turn: Mutex<()>,
    is_ready: AtomicBool,
    /// A request has waited for the journal as long as it may.
    is_journal_late: AtomicBool,
    waiting: Mutex<Vec<Waker>>,
}

/// What there is under a name.
pub enum Lookup {
    /// It is coming, or was just here and is not in its file yet.
    Coming(FoundFill),
    /// There is a file.
    Entry(Entry),
    /// The server failed with this status a moment ago.
    Error(u16),
    /// It depends on the request: on these fields, with this number.
    Varies(Arc<[u8]>, u64),
    /// There is nothing. How often it was asked for; whether it is known that it may not be stored.
    Nothing {
        /// This time included.
        uses: u64,
        /// Nobody should wait for another's answer.
        is_uncacheable: bool,
    },
}

/// A look at a file, until it is dropped.
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
    /// An empty one, whose index takes at most `bytes`.
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

    /// The parameters now.
    pub fn options(&self) -> Arc<PathOptions> {
        Arc::clone(&self.options.read())
    }

    /// From now on these are the parameters.
    pub fn set_options(&self, options: PathOptions) {
        *self.options.write() = Arc::new(options);
    }

    /// Asks the disk in which units files take room, where that may block.
    ///
    /// # Errors
    /// The disk's.
    pub fn learn_block_size(&self) -> std::io::Result<()> {
        let size = rustix::fs::statvfs(&self.directory.path)?.f_bsize;
        let is_likely = (BLOCK_SIZE_LEAST..=BLOCK_SIZE).contains(&size) && size.is_power_of_two();
        self.block_size.store(if is_likely { size } else { BLOCK_SIZE_LEAST }, Relaxed);
        Ok(())
    }

    /// How much room a file of this length takes: what `max_size` is about.
    pub fn room_for(&self, size: u64) -> u64 {
        let rest = self.block_size.load(Relaxed) - 1;
        size.saturating_add(rest) & !rest
    }

    /// Tells caches apart.
    pub fn identity(self: &Arc<Self>) -> usize {
        Arc::as_ptr(self) as usize
    }

    /// Whether there may be files that the index does not know.
    pub fn is_cold(&self) -> bool {
        self.is_cold.load(Relaxed)
    }

    /// Whether the index knows all files.
    pub fn set_cold(&self, is_cold: bool) {
        self.is_cold.store(is_cold, Relaxed);
    }

    /// The journal was read: what was purged is known.
    pub fn set_ready(&self) {
        self.disk.note_alive(gale_runtime::now_anywhere());
        self.is_ready.store(true, Release);
        let wakers = std::mem::take(&mut *self.waiting.lock());
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Whether files may be served.
    pub fn is_ready(&self) -> bool {
        self.is_ready.load(Acquire)
    }

    /// Whether a request should wait until files may be served. Once one has done so in vain the others do not, however
    /// the disk is: a long journal on a slow disk would hold up each of them.
    pub fn is_ready_soon(&self) -> bool {
        !self.is_ready() && !self.is_journal_late.load(Relaxed) && self.disk.is_well()
    }

    /// A request has waited for that as long as it may. True if that is news.
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

    /// A number that is larger than those before, also than those of earlier processes unless the clock was set back
    /// while none ran.
    pub fn next_number(&self) -> u64 {
        let now = gale_runtime::wall().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_micros() as u64;
        let next = |last: u64| Some(now.max(last + 1));
        self.last_number.fetch_update(Relaxed, Relaxed, next).map_or(now, |last| now.max(last + 1))
    }

    /// There is an entry with this number.
    pub fn note_number(&self, number: u64) {
        self.last_number.fetch_max(number, Relaxed);
    }

    /// The file of an entry.
    pub fn path_of(&self, id: &Id) -> PathBuf {
        path_of(&self.directory.path, &self.directory.levels, id)
    }

    /// What there is under this name. It counts as asked for.
    pub fn look(self: &Arc<Self>, id: &Id, now: u64) -> Lookup {
        if let Some(fill) = self.readable_fill(id) {
            return Lookup::Coming(fill);
        }
        match self.index.touch(id, now) {
            None => {
                // As nginx: whoever asks is counted.
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
                // A key of a request is no mark's.
                kind => {
                    let is_uncacheable = kind == Kind::Uncacheable && entry.is_fresh(now);
                    Lookup::Nothing { uses: entry.uses.into(), is_uncacheable }
                }
            },
        }
    }

    /// Whether there is a file, and fresh, of another number than this one: what somebody else has fetched a moment
    /// ago.
    pub fn has_fresh(&self, id: &Id, seen: Option<u64>, now: u64) -> bool {
        let is_new = |entry: &Entry| entry.kind == Kind::Stored && entry.is_fresh(now) && Some(entry.number) != seen;
        self.index.with(id, |entry| entry.is_some_and(|entry| is_new(entry)))
    }

    /// How new what is found under a name is; `None` if it is nothing.
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

    /// The server failed with this status, which holds for so many seconds.
    pub fn note_error(self: &Arc<Self>, id: &Id, status: u16, valid: u32, now: u64) {
        self.note(id, Kind::Error(status), now + u64::from(valid), now);
    }

    /// What came may not be stored.
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

    /// A file is not there, or none to be used: the entry goes. The file is nobody's to remove.
    pub fn forget(&self, id: &Id, number: u64) {
        self.index.remove(id, |entry| entry.kind == Kind::Stored && entry.number == number);
    }

    /// For a look whether a file is still there: one at a time, so that a disk that hangs is waited for by one thread.
    pub fn begin_look(self: &Arc<Self>) -> Option<Look> {
        let may_look = self.disk.is_well() && !self.is_looked_at.swap(true, Relaxed);
        may_look.then(|| Look(Arc::clone(self)))
    }

    /// Whether the index has a file of this name, of this number or a later one.
    fn has_file(&self, id: &Id, number: u64) -> bool {
        let has_file = |entry: &Entry| entry.kind.has_file() && entry.number >= number;
        self.index.with(id, |entry| entry.is_some_and(|entry| has_file(entry)))
    }

    /// Opens the file of an entry, where this may block.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(&self, id: &Id) -> Result<Opened, OpenError> {
        let path = self.path_of(id);
        match store::open(&path) {
            Err(OpenError::Foreign | OpenError::Damaged(_)) => {
                // Perhaps its header was being renewed. Nobody does that now.
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
