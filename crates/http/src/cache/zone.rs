//! A cache, by the name of its zone: the index, what is being fetched, what was purged, and how the disk is.
//!
//! It belongs to the process and goes on over reloads. Nothing here waits: files are the work of pools, whose tasks
//! tell by [`Disk`] how they fared. What the index has is checked against the file when that is opened, so that neither
//! a lost nor a foreign file is ever served.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bstr::BString;
use gale_base::os_error::OsErrorText;
use gale_base::tally::Tally;
use gale_runtime::files::likely_device;
use gale_runtime::{Bytes, Moment, ThreadPool, default_pool};
use parking_lot::{Mutex, MutexGuard, RwLock};

use super::fill::{Fill, Stage};
use super::format::Meta;
use super::index::{Entry, Evicted, Index, Kind, seconds};
use super::journal::{Changes, Record};
use super::key::{Id, path_of};
use super::policy::{Lifetime, SearchRules};
use super::purges::{Purges, Verdict};
use super::settings::{CacheDirectory, Pace, PathOptions};
use super::store::{self, OpenError, Opened, Unnamed};

/// Most lists of field names in `Vary` that a cache tells apart.
const VARY_LISTS_MAX: usize = 4096;

/// Most bytes that wait in memory until they are in files: beyond, what comes is not stored.
const UNSTORED_BYTES_MAX: u64 = 128 << 20;

/// Most bytes of changes that wait for the journal: beyond, it is written anew.
const CHANGES_MAX: usize = 16 << 20;

/// How many entries go at most for one that comes: it may be large, and they small. The manager does the rest.
const SHRINK_AT_ONCE: u64 = 1024;

/// How many requests are told that the journal was read; the others wait as long as they may.
const WAITING_MAX: usize = 4096;

/// Parts of the table of fills.
const FILL_SHARDS: usize = 16;

/// How many purges by key are settled in a step.
const SETTLED_AT_ONCE: usize = 256;

/// How many files may get their names at the same time, or lose them.
const NAMING_SHARDS: usize = 64;

/// Most rules of `No-Vary-Search` that a cache tells apart.
const SEARCH_RULES_MAX: usize = 4096;

/// Rules by their text.
type KnownRules = (Box<[u8]>, Arc<SearchRules>);

/// In how many parts it is noted when something of what has rules was purged.
const SEARCH_PURGES: usize = 1024;

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
    vary_lists: RwLock<Vec<Arc<[u8]>>>,
    /// With their texts.
    search_rules: RwLock<Vec<KnownRules>>,
    /// When something was purged by a key, by the mark that is for it: what was asked for before may come with rules, and
    /// be of that key, too.
    search_purges: Box<[AtomicU64]>,
    last_number: AtomicU64,
    unstored_bytes: AtomicU64,
    /// Bytes of files that are about to get their names: `max_size` has room for them.
    promised_bytes: AtomicU64,
    /// In which units files take room of the disk, in bytes.
    block_size: AtomicU64,
    /// The index does not know all files yet.
    is_cold: AtomicBool,
    turn: AtomicU64,
    last_failure: Mutex<Option<String>>,
    journal: Mutex<Journal>,
    journal_turn: Mutex<()>,
    is_ready: AtomicBool,
    waiting: Mutex<Vec<Waker>>,
}

/// All fills that may still be stored, listed or not.
#[derive(Default)]
struct InFlight {
    numbers: BTreeSet<u64>,
    /// How many there are of each key.
    keys: HashMap<Id, usize>,
}

/// What a purge by key has come upon.
pub struct Purged {
    /// There was something.
    pub had_any: bool,
    /// The purge was noted for the journal: more of the key may be found or come.
    pub is_noted: bool,
}

impl Purged {
    /// What has come of another purge counts, too.
    pub fn join(&mut self, other: Purged) {
        self.had_any |= other.had_any;
        self.is_noted |= other.is_noted;
    }
}

/// What is being fetched under a name.
struct Listed {
    /// The latest.
    fill: Arc<Fill>,
    /// The one before it: it is read until it is in its file, or the latest can be read.
    before: Option<Arc<Fill>>,
}

/// What is to be written to the journal.
#[derive(Default)]
struct Journal {
    /// This process writes it.
    is_written: bool,
    changes: Changes,
    /// How many records it has.
    records: u64,
    /// Something could not be written: its end may be torn, and only all of it anew is right.
    is_torn: bool,
}

/// What a cache has done, since the process began.
#[derive(Default, Debug)]
pub struct Counters {
    /// Requests by what the cache has done for them, and what was stored because of them.
    pub uses: Uses,
    /// Read while somebody else fetched it.
    pub collapsed: AtomicU64,
    /// Taken out to make room.
    pub evicted: AtomicU64,
    /// What the disk could not do.
    pub disk_errors: AtomicU64,
    /// How often a request did not wait any longer for the disk.
    pub disk_timeouts: AtomicU64,
    /// Files that the loader has found.
    pub loaded: AtomicU64,
}

/// In how many ways a request may use a cache: as many as nginx has words for.
pub const WAYS: usize = 7;

/// Uses of a cache, by their way: how many, and their bytes; then what was stored because of them, the same.
#[derive(Debug, Default)]
pub struct Uses(Tally<{ 4 * WAYS }>);

/// How often a cache was used in one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UseFigures {
    /// Responses to clients.
    pub responses: u64,
    /// Bytes of their bodies.
    pub bytes: u64,
    /// Responses that were stored.
    pub written: u64,
    /// Bytes of their files.
    pub bytes_written: u64,
}

impl Uses {
    /// A client has its response.
    pub fn count(&self, way: usize, bytes: u64) {
        let own = self.0.own();
        own.add(4 * way + 1, bytes);
        own.add(4 * way, 1);
    }

    /// A response was stored.
    pub fn count_written(&self, way: usize, bytes: u64) {
        let own = self.0.own();
        own.add(4 * way + 3, bytes);
        own.add(4 * way + 2, 1);
    }

    /// The figures by way.
    pub fn figures(&self) -> [UseFigures; WAYS] {
        let counters = self.0.since_reset();
        std::array::from_fn(|way| UseFigures {
            responses: counters[4 * way],
            bytes: counters[4 * way + 1],
            written: counters[4 * way + 2],
            bytes_written: counters[4 * way + 3],
        })
    }

    /// What was counted so far counts no more.
    pub fn reset(&self) {
        self.0.reset();
    }
}

/// How a cache's disk is: whether requests should wait for it at all.
#[derive(Default)]
pub struct Disk {
    /// Since when nothing has come back from it, as nanoseconds; 0 if it is well.
    silent_since: AtomicU64,
    next_try: AtomicU64,
}

/// How often a disk that does not answer is tried.
const TRY_EVERY: Duration = Duration::from_secs(1);

impl Disk {
    /// Whether a request may wait for it. While it does not answer, one in a second tries.
    pub fn may_try(&self, now: Moment) -> bool {
        if self.silent_since.load(Relaxed) == 0 {
            return true;
        }
        let (now, next) = (now.as_nanos(), self.next_try.load(Relaxed));
        let then = now + TRY_EVERY.as_nanos() as u64;
        now >= next && self.next_try.compare_exchange(next, then, Relaxed, Relaxed).is_ok()
    }

    /// It has answered.
    pub fn note_alive(&self) {
        if self.silent_since.load(Relaxed) != 0 {
            self.silent_since.store(0, Relaxed);
        }
    }

    /// A request has waited as long as it may. True if that is news.
    pub fn note_silent(&self, now: Moment) -> bool {
        let now = now.as_nanos().max(1);
        self.next_try.store(now + TRY_EVERY.as_nanos() as u64, Relaxed);
        self.silent_since.compare_exchange(0, now, Relaxed, Relaxed).is_ok()
    }

    /// Whether it answers.
    pub fn is_well(&self) -> bool {
        self.silent_since.load(Relaxed) == 0
    }
}

/// What there is under a name.
pub enum Lookup {
    /// It is coming, or was just here and is not in its file yet.
    Coming(Arc<Fill>),
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
            vary_lists: RwLock::default(),
            search_rules: RwLock::default(),
            search_purges: (0..SEARCH_PURGES).map(|_| AtomicU64::new(0)).collect(),
            last_number: AtomicU64::new(0),
            unstored_bytes: AtomicU64::new(0),
            promised_bytes: AtomicU64::new(0),
            block_size: AtomicU64::new(BLOCK_SIZE),
            is_cold: AtomicBool::new(true),
            turn: AtomicU64::new(0),
            last_failure: Mutex::default(),
            journal: Mutex::default(),
            journal_turn: Mutex::default(),
            is_ready: AtomicBool::new(false),
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
        self.disk.note_alive();
        self.is_ready.store(true, Release);
        let wakers = std::mem::take(&mut *self.waiting.lock());
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Whether files may be served.
    pub fn is_ready(&self) -> bool {
        self.is_ready.load(Acquire)
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

    /// A fill of a key, with a number of its own: what is purged from now on wins over it.
    fn new_fill(&self, primary: Id, now: Moment) -> Arc<Fill> {
        let mut in_flight = self.in_flight.lock();
        // Under the lock: whoever has a later number, and looks, sees this one.
        let number = self.next_number();
        in_flight.numbers.insert(number);
        *in_flight.keys.entry(primary).or_default() += 1;
        Arc::new(Fill::new(primary, number, now))
    }

    /// Every fill that may still be stored has this number or a later one.
    pub fn oldest_in_flight(&self) -> u64 {
        self.in_flight.lock().numbers.first().copied().unwrap_or(u64::MAX)
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
                Kind::Varies(list) => match self.vary_lists.read().get(list as usize) {
                    Some(names) => Lookup::Varies(Arc::clone(names), entry.number),
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

    /// What is being fetched under this name, or was and is not in its file yet, and can be read.
    fn readable_fill(&self, id: &Id) -> Option<Arc<Fill>> {
        let fills = self.fills_of(id).lock();
        let listed = fills.get(id)?;
        let mut both = std::iter::once(&listed.fill).chain(&listed.before);
        both.find(|fill| fill.can_be_read() && !fill.is_purged()).cloned()
    }

    /// Begins to fetch something, unless somebody does who has not taken longer than `age_max` yet: that one is
    /// returned.
    ///
    /// # Errors
    /// Somebody fetches it.
    pub fn begin(self: &Arc<Self>, primary: &Id, id: Id, now: Moment, age_max: Duration) -> Result<Lead, Arc<Fill>> {
        let mut fills = self.fills_of(&id).lock();
        if let Some(Listed { fill, .. }) = fills.get(&id)
            && now.since(fill.began) < age_max
            && !fill.is_purged()
            && match fill.stage() {
                Stage::Asking | Stage::Coming(..) => true,
                Stage::Whole(meta) => meta.lifetime.is_fresh(gale_runtime::wall_seconds()),
                Stage::Broken | Stage::Nothing => false,
            }
        {
            return Err(Arc::clone(fill));
        }
        let fill = self.new_fill(*primary, now);
        list(&mut fills, id, &fill);
        drop(fills);
        Ok(Lead { zone: Arc::clone(self), fill, id, is_listed: true, has_begun: false })
    }

    /// Begins to fetch something that others may be fetching, too.
    pub fn begin_beside(self: &Arc<Self>, primary: &Id, id: Id, now: Moment) -> Lead {
        match self.begin(primary, id, now, Duration::MAX) {
            Ok(lead) => lead,
            Err(_) => {
                let fill = self.new_fill(*primary, now);
                Lead { zone: Arc::clone(self), fill, id, is_listed: false, has_begun: false }
            }
        }
    }

    /// Whether there is a file, and fresh, of another number than this one: what somebody else has fetched a moment
    /// ago.
    pub fn has_fresh(&self, id: &Id, seen: Option<u64>, now: u64) -> bool {
        let is_new = |entry: &Entry| entry.kind == Kind::Stored && entry.is_fresh(now) && Some(entry.number) != seen;
        self.index.with(id, |entry| entry.is_some_and(|entry| is_new(entry)))
    }

    /// Whether this process manages the directory: it writes the journal.
    pub fn set_managed(&self, is_managed: bool) {
        self.journal.lock().is_written = is_managed;
    }

    /// Whether this process writes the journal.
    pub fn is_managed(&self) -> bool {
        self.journal.lock().is_written
    }

    /// Notes a change for the journal.
    fn note_change(&self, record: &Record) {
        let mut journal = self.journal.lock();
        if journal.is_written && journal.changes.bytes.len() < CHANGES_MAX {
            journal.changes.add(record);
            journal.records += 1;
        } else if journal.is_written {
            // What is appended from here on would lack it.
            journal.is_torn = true;
        }
    }

    /// The right to write the file of the journal: one after the other.
    pub fn journal_turn(&self) -> MutexGuard<'_, ()> {
        self.journal_turn.lock()
    }

    /// What is to be appended to the journal.
    pub fn take_changes(&self) -> Changes {
        std::mem::take(&mut self.journal.lock().changes)
    }

    /// A record could not be written, or not all of it.
    pub fn note_torn_journal(&self) {
        self.journal.lock().is_torn = true;
    }

    /// Whether the journal's end may be torn: nothing is to be appended to it.
    pub fn journal_is_torn(&self) -> bool {
        self.journal.lock().is_torn
    }

    /// Whether the journal has to be written anew: its end is torn, or it has much that counts no more.
    pub fn journal_is_long(&self) -> bool {
        let journal = self.journal.lock();
        journal.is_torn || journal.records > 2 * self.index.stored() + 10_000
    }

    /// The journal was written anew, with so many records.
    pub fn note_journal(&self, records: u64) {
        let mut journal = self.journal.lock();
        (journal.records, journal.is_torn) = (records, false);
    }

    /// An entry as the journal has it.
    pub fn record_of(&self, entry: &Entry) -> Option<Record> {
        match entry.kind {
            Kind::Varies(list) => {
                let names = self.vary_lists.read().get(list as usize)?.to_vec();
                Some(Record::Varies { id: entry.id, number: entry.number, names })
            }
            Kind::Searches(place) => {
                let rules = self.search_rules.read().get(place as usize)?.0.to_vec();
                Some(Record::Searches { id: entry.id, number: entry.number, rules })
            }
            _ => Record::of_entry(entry),
        }
    }

    /// Does again what the journal says.
    pub fn replay(self: &Arc<Self>, record: Record, now: u64) {
        match record {
            Record::Stored { id, number, size, times, must_revalidate } => {
                self.note_number(number);
                let known = self.index.with(&id, |entry| entry.is_some_and(|entry| entry.number >= number));
                if !known && self.purges.judge_key(&id, number) != Verdict::Gone {
                    let mut entry = Entry::new(id, Kind::Stored, now);
                    (entry.number, entry.size, entry.must_revalidate) = (number, self.room_for(size), must_revalidate);
                    [entry.fresh_until, entry.stale_while_revalidate, entry.stale_if_error, _] = times;
                    // Hits are not in the journal, so it counts as asked for now: what nobody wants goes when it has
                    // been here for `inactive` again.
                    // What does not fit stays on disk for the loader.
                    self.index.insert(entry);
                }
            }
            Record::Varies { id, number, names } => {
                self.note_number(number);
                self.note_vary(&id, &names, number, now);
            }
            Record::Searches { id, number, rules } => {
                self.note_number(number);
                self.note_search(&id, &rules, number, now);
            }
            Record::Gone { id, number } => _ = self.index.remove(&id, |entry| entry.number <= number),
            Record::PurgedKey { id, number, is_soft } => {
                self.note_number(number);
                self.purges.add_key(&id, number, is_soft);
                if !is_soft {
                    self.index.remove(&id, |entry| entry.number <= number);
                }
            }
            Record::PurgedTag { tag, number, is_soft } => {
                self.note_number(number);
                self.purges.add_tag(tag, number, is_soft);
            }
            Record::PurgedPrefix { prefix, number, is_soft } => {
                self.note_number(number);
                self.purges.add_prefix(&prefix, number, is_soft);
            }
        }
    }

    /// Purges all that has a tag, or whose key begins so.
    pub fn purge_all(self: &Arc<Self>, records: impl IntoIterator<Item = Record>) {
        for record in records {
            self.replay(record.clone(), 0);
            // Afterwards: a journal that is written anew in between has it from the purges.
            self.note_change(&record);
        }
    }

    /// Has the files of entries removed that a service has taken out.
    pub fn remove_evicted(self: &Arc<Self>, gone: Vec<Evicted>) {
        self.remove_files(gone, None);
    }

    /// Puts an entry into the index; what has to make room goes.
    pub fn put(self: &Arc<Self>, entry: Entry) {
        let record = self.record_of(&entry);
        let gone = self.index.insert(entry);
        if let Some(record) = record {
            self.note_change(&record);
        }
        self.counters.evicted.fetch_add(gone.len() as u64, Relaxed);
        self.remove_files(gone, None);
    }

    /// Gives what was fetched its name, and puts it into the index, where this may block; not if it was purged or a
    /// later one has come meanwhile.
    ///
    /// # Errors
    /// The disk's.
    pub fn commit(self: &Arc<Self>, fill: &Fill, id: &Id, meta: &Meta, file: Unnamed, now: u64) -> std::io::Result<()> {
        let (size, room) = (file.size(), self.room_for(file.size()));
        // `max_size` holds at once, not when the manager comes.
        let Some(_room) = self.make_room(room) else { return Ok(()) };
        {
            let _naming = self.naming_of(id).lock();
            if !self.is_wanted(fill, id, meta) {
                return Ok(());
            }
            file.publish(&self.path_of(id))?;
            // A purge by key goes through the table of fills: it comes before this, and is seen, or finds the entry.
            let mut fills = self.fills_of(id).lock();
            let is_wanted = self.is_wanted(fill, id, meta);
            if is_wanted {
                let mut entry = Entry::new(*id, Kind::Stored, now);
                (entry.number, entry.size) = (meta.number, room);
                entry.set_lifetime(&meta.lifetime);
                self.put(entry);
            }
            unlist(&mut fills, fill, id);
            drop(fills);
            if !is_wanted && !self.has_file(id, meta.number) {
                let _ = store::remove(&self.path_of(id));
                return Ok(());
            }
        }
        self.counters.uses.count_written(fill.way(), size);
        Ok(())
    }

    /// Whether what was fetched was neither purged nor overtaken.
    fn is_wanted(&self, fill: &Fill, id: &Id, meta: &Meta) -> bool {
        !fill.is_purged()
            && self.purges.judge(&fill.primary, &meta.key, &meta.tags, meta.number) != Verdict::Gone
            && self.is_variant_valid(meta)
            && !self.has_file(id, meta.number)
    }

    /// Gives a mark its name, where this may block, unless what it says holds no more.
    ///
    /// # Errors
    /// The disk's.
    pub fn commit_mark(&self, primary: &Id, mark: &Meta, file: Unnamed) -> std::io::Result<()> {
        let _naming = self.naming_of(primary).lock();
        let is_mark = |entry: &Entry| {
            matches!(entry.kind, Kind::Varies(_) | Kind::Searches(_)) && entry.number == mark.variant_number
        };
        match self.index.with(primary, |entry| entry.is_some_and(|entry| is_mark(entry))) {
            true => file.publish(&self.path_of(primary)),
            false => Ok(()),
        }
    }

    /// Whether the key that a variant belongs to still has variants of this number.
    fn is_variant_valid(&self, meta: &Meta) -> bool {
        meta.variant.is_empty() || {
            let primary = super::key::id_of(&meta.key);
            let number = meta.variant_number;
            self.index
                .with(&primary, |entry| entry.is_some_and(|e| matches!(e.kind, Kind::Varies(_)) && e.number == number))
        }
    }

    /// Something could not be stored.
    pub fn note_store_failure(&self, path: &Path, error: &std::io::Error) {
        self.counters.disk_errors.fetch_add(1, Relaxed);
        let mut last = self.last_failure.lock();
        *last = Some(format!("\"{}\" could not be stored {}", path.display(), OsErrorText(error)));
    }

    /// What could not be stored last, since this was asked before.
    pub fn take_store_failure(&self) -> Option<String> {
        self.last_failure.lock().take()
    }

    /// A fill is over: it is looked for no more, and nothing of it is stored from now on.
    pub fn end(&self, fill: &Fill, id: &Id) {
        unlist(&mut self.fills_of(id).lock(), fill, id);
        let mut in_flight = self.in_flight.lock();
        if in_flight.numbers.remove(&fill.number)
            && let Some(count) = in_flight.keys.get_mut(&fill.primary)
        {
            *count -= 1;
            if *count == 0 {
                in_flight.keys.remove(&fill.primary);
            }
        }
    }

    /// The number of a list of field names in `Vary`; `None` if there are too many.
    pub fn vary_list(&self, names: &[u8]) -> Option<u32> {
        let find = |lists: &[Arc<[u8]>]| lists.iter().position(|list| **list == *names).map(|place| place as u32);
        if let Some(place) = find(&self.vary_lists.read()) {
            return Some(place);
        }
        let mut lists = self.vary_lists.write();
        find(&lists).or_else(|| {
            (lists.len() < VARY_LISTS_MAX).then(|| {
                lists.push(names.into());
                (lists.len() - 1) as u32
            })
        })
    }

    /// Notes that what a key stands for depends on these fields. Returns the number that variants' names are made of;
    /// `None` if that was purged since, or nothing more can be noted.
    pub fn note_vary(self: &Arc<Self>, primary: &Id, names: &[u8], number: u64, now: u64) -> Option<u64> {
        if self.purges.judge_key(primary, number) == Verdict::Gone {
            return None;
        }
        let list = self.vary_list(names)?;
        let known = self.index.with(primary, |entry| match entry {
            Some(entry) if entry.kind == Kind::Varies(list) => Some(entry.number),
            _ => None,
        });
        if known.is_some() {
            return known;
        }
        if let Some(before) = self.index.remove(primary, |_| true) {
            self.remove_files(Evicted::of(&before).into_iter().collect(), None);
        }
        let mut entry = Entry::new(*primary, Kind::Varies(list), now);
        entry.number = number;
        self.put(entry);
        Some(number)
    }

    /// Whether there may be marks of `No-Vary-Search`.
    pub fn has_searches(&self) -> bool {
        !self.search_rules.read().is_empty()
    }

    /// The rules of a mark, which counts as asked for, and its number.
    pub fn search(&self, mark: &Id, now: u64) -> Option<(Arc<SearchRules>, u64)> {
        let entry = self.index.touch(mark, now)?;
        let Kind::Searches(place) = entry.kind else { return None };
        Some((Arc::clone(&self.search_rules.read().get(place as usize)?.1), entry.number))
    }

    /// Notes which differences between queries matter in what has this mark, by the text of the rules. Returns the number
    /// that is in the keys of entries; `None` if that was purged since, later rules hold, or nothing more can be noted.
    pub fn note_search(self: &Arc<Self>, mark: &Id, rules: &[u8], number: u64, now: u64) -> Option<u64> {
        if self.purges.judge_key(mark, number) == Verdict::Gone {
            return None;
        }
        let kind = Kind::Searches(self.search_place(rules)?);
        let known = self.index.with(mark, |entry| match entry {
            Some(entry) if entry.kind == kind => Some(Some(entry.number)),
            Some(entry) if matches!(entry.kind, Kind::Searches(_)) && entry.number > number => Some(None),
            _ => None,
        });
        if let Some(known) = known {
            return known;
        }
        self.put(Entry { number, ..Entry::new(*mark, kind, now) });
        Some(number)
    }

    /// The place of rules in the table; `None` if there are too many, or these are none.
    fn search_place(&self, text: &[u8]) -> Option<u32> {
        let find = |known: &[KnownRules]| known.iter().position(|(own, _)| **own == *text);
        if let Some(place) = find(&self.search_rules.read()) {
            return Some(place as u32);
        }
        let rules = Arc::new(SearchRules::decode(text)?);
        let mut known = self.search_rules.write();
        let place = find(&known).or_else(|| {
            (known.len() < SEARCH_RULES_MAX).then(|| {
                known.push((text.into(), rules));
                known.len() - 1
            })
        });
        place.map(|place| place as u32)
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

    /// Something that this mark is for is about to be purged by its key. What was asked for before, and comes with rules
    /// later, is not stored.
    pub fn note_search_purge(&self, mark: &Id) {
        self.search_purge_of(mark).fetch_max(self.next_number(), SeqCst);
    }

    /// Whether what has this number was asked for before something was purged that this mark is for.
    pub fn is_search_purged(&self, mark: &Id, number: u64) -> bool {
        self.search_purge_of(mark).load(SeqCst) > number
    }

    fn search_purge_of(&self, mark: &Id) -> &AtomicU64 {
        &self.search_purges[usize::from(u16::from_le_bytes([mark[12], mark[13]])) % SEARCH_PURGES]
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
        let is_kept = self.index.with(id, |entry| match entry {
            Some(entry) if entry.kind.has_file() => true,
            Some(entry) => {
                (entry.kind, entry.fresh_until) = (kind, seconds(until));
                true
            }
            None => false,
        });
        if !is_kept {
            self.put(Entry { fresh_until: seconds(until), ..Entry::new(*id, kind, now) });
        }
    }

    /// An entry has another lifetime from now on, before its file says so.
    pub fn renew(&self, id: &Id, number: u64, lifetime: &Lifetime) {
        self.index.with(id, |entry| {
            if let Some(entry) = entry.filter(|entry| entry.kind == Kind::Stored && entry.number == number) {
                entry.set_lifetime(lifetime);
            }
        });
    }

    /// Has the file of an entry with this number say what `meta` does, which has another one, where this may block. It
    /// stays as it is if it has gone, or another one has come.
    ///
    /// # Errors
    /// The disk's.
    pub fn renew_file(self: &Arc<Self>, id: &Id, number: u64, meta: &Meta) -> std::io::Result<()> {
        let path = self.path_of(id);
        let Ok(opened) = self.open(id) else { return Ok(()) };
        if opened.header.meta.number != number {
            return Ok(());
        }
        // The copy is made before the lock is taken: it may be large.
        let renewal = store::prepare_renewal(&path, &opened, meta, store::new_number())?;
        let _naming = self.naming_of(id).lock();
        let known = self.index.with(id, |entry| entry.filter(|entry| entry.number == number).cloned());
        let primary = super::key::id_of(&meta.key);
        let Some(known) = known.filter(|entry| entry.kind == Kind::Stored) else { return Ok(()) };
        if self.purges.judge(&primary, &meta.key, &meta.tags, meta.number) == Verdict::Gone {
            return Ok(());
        }
        let size = self.room_for(renewal.publish(&path, &opened)?);
        let mut entry = Entry { number: meta.number, size, ..known };
        entry.set_lifetime(&meta.lifetime);
        self.put(entry);
        Ok(())
    }

    /// A file is not there, or none to be used: the entry goes. The file is nobody's to remove.
    pub fn forget(&self, id: &Id, number: u64) {
        self.index.remove(id, |entry| entry.kind == Kind::Stored && entry.number == number);
    }

    /// An entry is of no use any more: it goes, with its file.
    pub fn discard(self: &Arc<Self>, id: &Id, number: u64) {
        let fills = self.fills_of(id).lock();
        for fill in fills.get(id).into_iter().flat_map(|listed| std::iter::once(&listed.fill).chain(&listed.before)) {
            if fill.number == number {
                // It is whole, and about to get its name.
                fill.purge();
            }
        }
        let gone = self.index.remove(id, |entry| entry.kind == Kind::Stored && entry.number == number);
        drop(fills);
        self.remove_files(gone.as_ref().and_then(Evicted::of).into_iter().collect(), None);
    }

    /// Purges what is stored under a key, and what is being fetched.
    pub fn purge_key(self: &Arc<Self>, id: &Id, is_soft: bool, pool: Option<&ThreadPool>) -> Purged {
        let fills = self.fills_of(id).lock();
        let number = self.next_number();
        let mut was_coming = false;
        for fill in fills.get(id).into_iter().flat_map(|listed| std::iter::once(&listed.fill).chain(&listed.before)) {
            let is_news = is_soft || fill.purge();
            was_coming |= is_news && !matches!(fill.stage(), Stage::Nothing | Stage::Broken);
        }
        let has_file = |entry: &Entry| entry.kind.has_file();
        let removed = if is_soft { None } else { self.index.remove(id, has_file) };
        let had_any = was_coming || removed.is_some() || is_soft && self.has_file(id, 0);
        // What the index and the table know has gone by now. The number is for the rest: variants, requests whose
        // answers have not begun, files that nobody knows yet, and this file until it is gone.
        let is_noted = had_any || self.is_cold() || self.in_flight.lock().keys.contains_key(id);
        if is_noted {
            self.purges.add_key(id, number, is_soft);
            self.note_change(&Record::PurgedKey { id: *id, number, is_soft });
        }
        drop(fills);
        self.remove_files(removed.as_ref().and_then(Evicted::of).into_iter().collect(), pool);
        Purged { had_any, is_noted }
    }

    /// Makes room for what is too much for `max_size`: at most so many files, for about so long. True if there is more
    /// to do.
    pub fn shrink(self: &Arc<Self>, pace: Pace) -> bool {
        let max_size = self.options().max_size;
        let began = std::time::Instant::now();
        let mut count = 0;
        while self.index.bytes() > max_size {
            if count >= pace.files.max(1) || count > 0 && began.elapsed() >= pace.threshold {
                return true;
            }
            if !self.evict_one() {
                return false;
            }
            count += 1;
        }
        false
    }

    /// Removes files, where this may block, until there is so much room; `None` if there never is.
    fn make_room(self: &Arc<Self>, size: u64) -> Option<Room<'_>> {
        let max_size = self.options().max_size;
        if size > max_size {
            return None;
        }
        let promised = self.promised_bytes.fetch_add(size, Relaxed) + size;
        let room = Room { zone: self, size };
        let is_full = || self.index.bytes().saturating_add(promised) > max_size;
        let mut count = 0;
        while count < SHRINK_AT_ONCE && is_full() && self.take_victim().is_some_and(|gone| self.remove_file(&gone)) {
            count += 1;
        }
        Some(room)
    }

    /// `min_free`, where this may block: removes files as long as less is free, at most so many. True if there is more
    /// to do; what was removed and is still being read is free when that ends.
    pub fn free_space(&self, least: u64, most: u64) -> std::io::Result<bool> {
        let stat = rustix::fs::statvfs(&self.directory.path)?;
        let needed = least.saturating_sub(stat.f_bavail * stat.f_frsize);
        let (mut count, mut removed) = (0, 0);
        while removed < needed {
            if count == most {
                return Ok(true);
            }
            let Some(gone) = self.take_victim() else { return Ok(false) };
            if !self.remove_file(&gone) {
                return Ok(false);
            }
            (count, removed) = (count + 1, removed + gone.size);
        }
        Ok(false)
    }

    /// Takes one entry out, and has a pool remove its file. False if there is none.
    pub fn evict_one(self: &Arc<Self>) -> bool {
        let gone = self.take_victim();
        let had_any = gone.is_some();
        self.send_to_be_removed(gone.into_iter().collect(), None);
        had_any
    }

    fn take_victim(&self) -> Option<Evicted> {
        let turn = self.turn.fetch_add(1, Relaxed) as usize;
        let gone = self.index.evict(turn)?;
        self.counters.evicted.fetch_add(1, Relaxed);
        self.note_change(&Record::Gone { id: gone.id, number: gone.number });
        Some(gone)
    }

    /// Has a pool remove files of entries that are in the index no more.
    pub fn remove_files(self: &Arc<Self>, gone: Vec<Evicted>, pool: Option<&ThreadPool>) {
        if gone.is_empty() {
            return;
        }
        for evicted in &gone {
            self.note_change(&Record::Gone { id: evicted.id, number: evicted.number });
        }
        self.send_to_be_removed(gone, pool);
    }

    fn send_to_be_removed(self: &Arc<Self>, gone: Vec<Evicted>, pool: Option<&ThreadPool>) {
        let pool = pool.cloned().unwrap_or_else(default_pool);
        let zone = Arc::clone(self);
        // Refused, the files stay until the loader finds them or others take their places.
        let _ = pool.detach(likely_device(&self.directory.path).writes(), move || {
            for evicted in &gone {
                zone.remove_file(evicted);
            }
        });
    }

    /// Removes the file of an entry that has gone, unless another one has come in its place, where this may block.
    /// False if the disk says no.
    pub fn remove_file(&self, gone: &Evicted) -> bool {
        let _naming = self.naming_of(&gone.id).lock();
        self.has_file(&gone.id, gone.number) || store::remove(&self.path_of(&gone.id)).is_ok()
    }

    /// Whether the index has a file of this name, of this number or a later one.
    fn has_file(&self, id: &Id, number: u64) -> bool {
        let has_file = |entry: &Entry| entry.kind.has_file() && entry.number >= number;
        self.index.with(id, |entry| entry.is_some_and(|entry| has_file(entry)))
    }

    /// Removes a file that cannot be used, where this may block, if it still is so when nobody is writing to it.
    pub fn remove_damaged(&self, id: &Id, is_damaged: impl FnOnce() -> bool) {
        let _naming = self.naming_of(id).lock();
        if is_damaged() {
            self.index.remove(id, |entry| entry.kind.has_file());
            let _ = store::remove(&self.path_of(id));
        }
    }

    /// Opens the file of an entry, where this may block.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(&self, id: &Id) -> Result<Opened, OpenError> {
        let path = self.path_of(id);
        match store::open(&path) {
            Err(OpenError::Unusable(_)) => {
                // Perhaps its header was being renewed. Nobody does that now.
                let _naming = self.naming_of(id).lock();
                store::open(&path)
            }
            opened => opened,
        }
    }

    /// Puts an entry into the index whose file was found, unless there is one of the name already.
    pub fn put_found(self: &Arc<Self>, entry: Entry) {
        let _naming = self.naming_of(&entry.id).lock();
        if !self.has_file(&entry.id, 0) {
            self.put(entry);
        }
    }

    /// Looks at the files of keys that were purged, a few at a time, where that may block: when nothing older is coming
    /// and the key's own file is gone, nothing finds what is older, variants included, and the purge is forgotten.
    pub fn settle_purges(&self) {
        for (id, number) in self.purges.hard_keys_below(self.oldest_in_flight(), SETTLED_AT_ONCE) {
            let _naming = self.naming_of(&id).lock();
            let path = self.path_of(&id);
            let is_gone = match store::number_of(&path) {
                Ok(Some(found)) if found <= number => {
                    self.index.remove(&id, |entry| entry.number <= number);
                    store::remove(&path).is_ok()
                }
                Ok(_) => true,
                Err(_) => false,
            };
            if is_gone {
                self.purges.forget_key(&id, number);
            }
        }
    }

    fn naming_of(&self, id: &Id) -> &Mutex<()> {
        &self.naming[usize::from(id[14]) % NAMING_SHARDS]
    }

    /// Takes so many bytes of what may wait in memory to be stored. `None`: there is too much of it.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Option<Reserved> {
        let before = self.unstored_bytes.fetch_add(bytes, Relaxed);
        let reserved = Reserved { zone: Arc::clone(self), bytes };
        (before + bytes <= UNSTORED_BYTES_MAX).then_some(reserved)
    }

    fn fills_of(&self, id: &Id) -> &Mutex<HashMap<Id, Listed>> {
        &self.fills[usize::from(id[15]) % FILL_SHARDS]
    }
}

/// Lists a fill as the latest of its name.
fn list(fills: &mut HashMap<Id, Listed>, id: Id, fill: &Arc<Fill>) {
    let before = fills.remove(&id).and_then(|listed| match listed.fill.can_be_read() {
        true => Some(listed.fill),
        false => listed.before,
    });
    let before = before.filter(|before| !Arc::ptr_eq(before, fill));
    fills.insert(id, Listed { fill: Arc::clone(fill), before });
}

fn unlist(fills: &mut HashMap<Id, Listed>, fill: &Fill, id: &Id) {
    let Some(listed) = fills.get_mut(id) else { return };
    if std::ptr::eq(&*listed.fill, fill) {
        match listed.before.take() {
            Some(before) => listed.fill = before,
            None => _ = fills.remove(id),
        }
    } else if listed.before.as_deref().is_some_and(|before| std::ptr::eq(before, fill)) {
        listed.before = None;
    }
}

/// Bytes that wait in memory to be stored.
pub struct Reserved {
    zone: Arc<CacheZone>,
    bytes: u64,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.zone.unstored_bytes.fetch_sub(self.bytes, Relaxed);
    }
}

/// Room for a file that is about to get its name.
struct Room<'z> {
    zone: &'z CacheZone,
    size: u64,
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.zone.promised_bytes.fetch_sub(self.size, Relaxed);
    }
}

/// Whoever asks the server for what is to be stored. Dropped before the head has come, it leaves others to ask.
pub struct Lead {
    zone: Arc<CacheZone>,
    fill: Arc<Fill>,
    id: Id,
    is_listed: bool,
    has_begun: bool,
}

impl Lead {
    /// The cache.
    pub fn zone(&self) -> &Arc<CacheZone> {
        &self.zone
    }

    /// The fill.
    pub fn fill(&self) -> &Arc<Fill> {
        &self.fill
    }

    /// The head has come, of what will be stored under this name: whoever waits, and asks for the same, reads it from
    /// now on.
    pub fn begin(mut self, id: Id, meta: Arc<Meta>, length: Option<u64>) -> Arc<Fill> {
        self.has_begun = true;
        if self.is_listed && id != self.id {
            unlist(&mut self.zone.fills_of(&self.id).lock(), &self.fill, &self.id);
        }
        // The latest counts.
        list(&mut self.zone.fills_of(&id).lock(), id, &self.fill);
        self.fill.begin(meta, length);
        Arc::clone(&self.fill)
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        if !self.has_begun {
            self.zone.end(&self.fill, &self.id);
            self.fill.give_up();
        }
    }
}

/// The bytes of pieces.
pub fn total(pieces: &[Bytes]) -> u64 {
    pieces.iter().map(|piece| piece.len() as u64).sum()
}
