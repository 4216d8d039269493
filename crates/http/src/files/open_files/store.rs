//! `open_file_cache max=N`: the cache of one directive, shared by all workers.
//!
//! As in nginx, an entry is trusted for `open_file_cache_valid`; then the path is opened again, and the entry stays if
//! the same, unchanged file is found. An entry that is not requested for `inactive` is removed, and the least recently
//! used one is removed at `max`. A descriptor is kept after `open_file_cache_min_uses`; directories and, with
//! `open_file_cache_errors`, errors at once.
//!
//! Beyond nginx: an entry in use is watched, so a change shows at once and not after `valid` (with
//! `open_file_cache_events on` a watched entry is trusted until then). The body of a small file is kept with its
//! descriptor. Only errors that are about the path are kept, and not that descriptors ran out.
//!
//! `max` is for all workers together, since they share one cache.

use std::io;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use gale_engine::budget::BudgetShare;
use gale_files::watch::PathWatch;
use gale_files::{self as files, File, FileMetadata};
use gale_runtime::{Device, default_pool};
use parking_lot::Mutex;

use super::entry::{BODY_MAX, Body, Entry, Found, Kept, TOUCHED_AT_MOST_EVERY, target_of};
use super::handles::counted_here;
use super::table::{Found as Guarded, Keyed, Table};
use super::{Contents, Opened, Wanted, as_path, milliseconds, note_work};

/// An entry with this many uses is watched, and its body is read.
const ATTENDED_USES: u32 = 3;

/// Upper bound of `max`.
const ENTRIES_MAX: usize = 1 << 24;

/// Without a watch, a body is trusted only if its file had not been changed for this long when it was read: a change
/// within one tick of the file system's clock leaves the time as it was.
const SETTLED: Duration = Duration::from_secs(3);

/// The entries of one `open_file_cache`.
pub struct Store {
    entries_max: usize,
    inactive: Duration,
    /// Created for the first entry: a configuration that is only tested needs none.
    table: OnceLock<Table<Entry>>,
    own: Weak<Store>,
}

/// Stores that have a table, for the sweep.
static STORES: Mutex<Vec<Weak<Store>>> = Mutex::new(Vec::new());

/// Settings of a location for the entries that it uses.
#[derive(Clone, Copy)]
pub struct StoreRules {
    /// `open_file_cache_valid`
    pub valid_ms: u64,
    /// `open_file_cache_min_uses`
    pub min_uses: u32,
    /// `open_file_cache_errors`
    pub keeps_errors: bool,
    /// `open_file_cache_events`
    pub believes_events: bool,
}

impl StoreRules {
    fn attended_uses(self) -> u32 {
        self.min_uses.max(ATTENDED_USES)
    }
}

/// A miss: the data needed to store the kernel's answer.
pub(super) struct Missed<'r> {
    store: &'r Store,
    path: &'r [u8],
    hash: u64,
    now: u64,
    rules: StoreRules,
    previous: Option<Arc<Entry>>,
}

impl Store {
    /// Creates a store of at most `entries_max` entries, each of which is removed after it was not requested for
    /// `inactive`.
    pub fn new(entries_max: u64, inactive: Duration) -> Arc<Store> {
        let entries_max = usize::try_from(entries_max).unwrap_or(ENTRIES_MAX).clamp(1, ENTRIES_MAX);
        Arc::new_cyclic(|own| Store { entries_max, inactive, table: OnceLock::new(), own: Weak::clone(own) })
    }

    #[inline]
    pub(super) fn find<'r>(
        &'r self,
        path: &'r [u8],
        hash: u64,
        now: u64,
        rules: StoreRules,
        wanted: Wanted,
    ) -> Result<io::Result<Opened>, Missed<'r>> {
        let entry = self.table.get().and_then(|table| table.find(hash, path));
        match entry.as_ref().and_then(|entry| self.use_entry(entry, now, rules, wanted)) {
            Some(result) => Ok(result),
            None => {
                let previous = entry.map(|entry| Arc::clone(entry.arc()));
                Err(Missed { store: self, path, hash, now, rules, previous })
            }
        }
    }

    /// The result of an entry, if it can be trusted.
    #[inline]
    fn use_entry(
        &self,
        entry: &Guarded<Entry>,
        now: u64,
        rules: StoreRules,
        wanted: Wanted,
    ) -> Option<io::Result<Opened>> {
        entry.touch(now);
        let kept = entry.kept();
        let watch = kept.and_then(|kept| kept.watch.as_ref());
        let is_believed = match watch {
            Some(watch) if !watch.is_intact() => false,
            Some(_) if rules.believes_events => true,
            _ => now.saturating_sub(entry.checked()) < rules.valid_ms,
        };
        if !is_believed {
            return None;
        }
        let opened = match &entry.found {
            Found::Seen => return None,
            Found::Error(error) => Err(io::Error::from_raw_os_error(*error)),
            Found::Directory(metadata) => Ok(Opened { metadata: *metadata, contents: Contents::Directory }),
            Found::File { file, metadata } => {
                let file = file.as_ref()?;
                let body = kept.and_then(|kept| kept.body.get());
                let is_told = body.is_some() && watch.is_some();
                if wanted == Wanted::Open && !is_told && !is_unchanged(file, metadata) {
                    return None;
                }
                let contents = match body {
                    Some(body) => Contents::Memory(counted_here(body.bytes(), entry.hash())),
                    None => Contents::File(file.clone()),
                };
                Ok(Opened { metadata: *metadata, contents })
            }
        };
        if entry.count_use(rules.attended_uses()) {
            self.attend(entry.arc());
        } else if let Some(room) = entry.room_at_last() {
            read_at_last(entry.arc(), room);
        }
        Some(opened)
    }

    /// Watches an entry and reads its body, in a thread of the pool.
    fn attend(&self, entry: &Arc<Entry>) {
        if matches!(entry.found, Found::Seen) || entry.kept().is_some() || !entry.claim() {
            return;
        }
        let device = match &entry.found {
            Found::File { metadata, .. } | Found::Directory(metadata) => Device::number(metadata.device),
            Found::Seen | Found::Error(_) => files::likely_device(as_path(entry.path())),
        };
        let (attended, store) = (Arc::clone(entry), Weak::clone(&self.own));
        let task = move || {
            // A file that has changed is opened again by the next request.
            if !attend_blocking(&attended)
                && let Some(table) = store.upgrade().as_ref().and_then(|store| store.table.get())
            {
                table.remove(&attended);
            }
        };
        if default_pool().detach(device, task).is_err() {
            // A later use tries again; the entry works without.
            entry.unclaim();
        }
    }

    fn table(&self) -> &Table<Entry> {
        self.table.get_or_init(|| {
            let mut stores = STORES.lock();
            stores.retain(|store| store.strong_count() > 0);
            stores.push(Weak::clone(&self.own));
            Table::new(self.entries_max)
        })
    }
}

/// Reads the body of an entry for which there was no room before.
fn read_at_last(entry: &Arc<Entry>, room: BudgetShare) {
    let (Found::File { file: Some(file), metadata }, true) = (&entry.found, entry.claim()) else { return };
    let (attended, file, metadata) = (Arc::clone(entry), file.clone(), *metadata);
    let task = move || {
        if let (Some(kept), Ok(Some(body))) = (attended.kept(), Body::read(&file, &metadata, room)) {
            let _ = kept.body.set(body);
        }
        attended.unclaim();
    };
    if default_pool().detach(Device::number(metadata.device), task).is_err() {
        entry.unclaim();
    }
}

/// True if a file has not changed. Does not block: file systems that may are not asked.
fn is_unchanged(file: &File, metadata: &FileMetadata) -> bool {
    file.waits_for_others() || file.look_again().is_ok_and(|seen| seen == *metadata)
}

impl Missed<'_> {
    /// Stores the result of an open.
    pub(super) fn settle(self, opened: io::Result<File>) -> io::Result<Opened> {
        let file = match opened {
            Ok(file) => file,
            Err(error) => {
                match error.raw_os_error().filter(|&error| tells_of_the_path(error)) {
                    Some(number) if self.rules.keeps_errors => self.insert(Found::Error(number)),
                    _ => self.remove(),
                }
                return Err(error);
            }
        };
        let metadata = *file.metadata();
        if metadata.is_directory() {
            self.insert(Found::Directory(metadata));
            return Ok(Opened { metadata, contents: Contents::Directory });
        }
        if !metadata.is_regular() {
            self.remove();
            return Ok(Opened::of(file));
        }
        if let Some(previous) = &self.previous
            && let Found::File { metadata: known, .. } = &previous.found
            && *known == metadata
            && previous.kept().and_then(|kept| kept.watch.as_ref()).is_none_or(PathWatch::is_intact)
        {
            previous.set_checked(self.now);
            return Ok(Opened::of(file));
        }
        let is_kept = self.uses() >= self.rules.min_uses;
        self.insert(if is_kept { Found::File { file: Some(file.clone()), metadata } } else { Found::Seen });
        Ok(Opened::of(file))
    }

    /// Stores the result of a stat if it is a directory.
    pub(super) fn settle_directory(self, metadata: &FileMetadata) {
        if metadata.is_directory() {
            self.insert(Found::Directory(*metadata));
        }
    }

    /// Number of uses, including this one.
    fn uses(&self) -> u32 {
        self.previous.as_ref().map_or(0, |previous| previous.uses()).saturating_add(1)
    }

    fn insert(mut self, found: Found) {
        let entry = Arc::new(Entry::new(self.path, self.hash, found, self.uses(), self.now));
        // Frees the memory of the old entry for the new one.
        self.previous = None;
        self.store.table().insert(Arc::clone(&entry));
        // A file that was used often before its change is likely to be used again.
        if entry.uses() >= self.rules.attended_uses() {
            self.store.attend(&entry);
        }
        note_work();
    }

    fn remove(&self) {
        if let (Some(previous), Some(table)) = (&self.previous, self.store.table.get()) {
            table.remove(previous);
        }
    }
}

/// True if an error is caused by the path on disk, and not by exhausted resources.
fn tells_of_the_path(error: i32) -> bool {
    matches!(error, libc::ENOENT | libc::ENOTDIR | libc::ENAMETOOLONG | libc::EACCES | libc::ELOOP)
}

/// Watches an entry and reads its body. False if the file has changed.
fn attend_blocking(entry: &Entry) -> bool {
    let mut watch = PathWatch::begin(as_path(entry.path()));
    let (mut body, mut lacks_room) = (None, false);
    // The file is checked again now that it is watched.
    let still_is = match &entry.found {
        Found::Error(libc::ENOENT) => watch.as_ref().is_none_or(|watch| watch.target().is_none()),
        Found::Error(_) | Found::Seen => {
            watch = None;
            true
        }
        Found::Directory(metadata) => leads_to(watch.as_ref(), metadata),
        Found::File { file: Some(file), metadata } => {
            if metadata.size <= BODY_MAX && !file.waits_for_others() && (watch.is_some() || is_settled(metadata)) {
                // Without a body the file is sent from its descriptor.
                let room = Body::room(metadata);
                lacks_room = room.is_none();
                body = room.and_then(|room| Body::read(file, metadata, room).ok()?);
            }
            leads_to(watch.as_ref(), metadata) && is_unchanged(file, metadata)
        }
        Found::File { file: None, .. } => true,
    };
    if still_is {
        entry.keep(Kept { watch, body: body.map_or_else(OnceLock::new, OnceLock::from), lacks_room, _held: None });
    }
    if lacks_room {
        entry.unclaim();
    }
    still_is
}

fn leads_to(watch: Option<&PathWatch>, metadata: &FileMetadata) -> bool {
    watch.is_none_or(|watch| watch.target() == target_of(metadata))
}

fn is_settled(metadata: &FileMetadata) -> bool {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let changed = u64::try_from(metadata.changed_seconds).unwrap_or(0);
    now.as_secs().saturating_sub(changed) >= SETTLED.as_secs()
}

/// Removes entries that are unused or have changed. False if none is left.
pub(super) fn evict_unused(now: u64) -> bool {
    let stores: Vec<Arc<Store>> = STORES.lock().iter().filter_map(Weak::upgrade).collect();
    let mut has_more = false;
    for (store, table) in stores.iter().filter_map(|store| Some((store, store.table.get()?))) {
        let inactive = milliseconds(store.inactive.as_nanos() as u64) + TOUCHED_AT_MOST_EVERY;
        table.retain(|entry| {
            let has_changed = entry.kept().and_then(|kept| kept.watch.as_ref()).is_some_and(|w| !w.is_intact());
            !has_changed && now.saturating_sub(entry.last_use()) <= inactive
        });
        has_more |= table.len() > 0;
    }
    has_more
}
