//! Background work for each cache: its lock, its journal, the loader, the manager and the purger.
//!
//! ```text
//!   read the journal ─► lock the directory ─► visit every file (loader) ─► periodically: make room, remove inactive
//!                                                                          entries, write the journal, purge files
//! ```
//!
//! All of it runs in steps in a pool, with the sizes and pauses that the path's parameters give. A process without the
//! lock (during an upgrade, or a second server by mistake) only uses the files.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, Permissions, ReadDir};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant, SystemTime};

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_files::{likely_device, note_directory};
use gale_runtime::{default_pool, sleep, timeout};
use gale_worker::service::{Context, Service};
use rustix::fs::{FlockOperation, flock};

use super::CacheZone;
use super::directory::{Pace, PathOptions};
use super::format::{self, Unreadable};
use super::index::{Entry, Evicted, Kind};
use super::journal::{self, ACCOUNT_AT, Account, Changes, HEADER_LENGTH, Outcome, Record, Scan};
use super::key::{id_of, parse_hex};
use super::policy::Verdict;
use super::store;

/// Interval of the manager.
const MANAGER_PERIOD: Duration = Duration::from_millis(500);

/// Interval of attempts to get a lock that another process holds.
const LOCK_TRY_PAUSE: Duration = Duration::from_secs(1);

/// The lock file and the journal, in the directory of the cache.
const LOCK_FILE: &str = ".gale.lock";
const JOURNAL_FILE: &str = ".gale.journal";

/// Bytes of a journal read at once.
const JOURNAL_STEP: usize = 4 << 20;

/// Pause before an incomplete journal is read again: another process may be writing to it.
const JOURNAL_READ_AGAIN: Duration = Duration::from_millis(100);

/// Entries of the index visited under one lock.
const SWEEP_STEP: usize = 512;

/// An incomplete file that was not written to for this long is abandoned, whichever process began it.
const ABANDONED_AFTER: Duration = Duration::from_secs(300);

/// Number of hard purges that cause a walk over all files even with `purger=off`, after which they can be forgotten.
/// Soft purges do not count: a walk does nothing for them and would be repeated for ever.
const PURGES_MANY: usize = 5000;

/// Bytes of a file that the loader reads first.
const HEADER_READ: usize = 4096;

/// The background service of a cache.
pub struct CacheService {
    /// The cache.
    pub zone: Arc<CacheZone>,
    /// The parameters of its path.
    pub options: PathOptions,
}

impl Service for CacheService {
    async fn run(context: Context<Self>) {
        let zone = Arc::clone(&context.settings().zone);
        zone.set_options(context.settings().options.clone());
        // Sets the time at which this process began.
        store::begun();
        let own = Arc::clone(&zone);
        // If the disk does not tell, the usual block size is assumed.
        let asked = in_pool(&zone, move || {
            let noted = File::open(&own.directory.path).and_then(|open| note_directory(&own.directory.path, open));
            noted.and_then(|()| own.learn_block_size())
        });
        if context.unless_stopping(asked).await.is_none() {
            return;
        }
        // Before anything is served, because the journal has the purges.
        let Some(seen) = context.unless_stopping(read_journal(&context, &zone, None)).await else { return };
        zone.set_ready();
        while let Some(lock) = context.unless_stopping(lock(&context, &zone)).await {
            zone.set_managed(true);
            let has_loaded = context.unless_stopping(load(&context, &zone, seen)).await.is_some();
            let is_lost = has_loaded && manage(&context, &zone, &lock).await;
            zone.set_managed(false);
            if !is_lost {
                // The next process finds the complete journal.
                flush_journal(&context, &zone, false).await;
                return;
            }
            let (name, path) = (&zone.name, zone.directory.path.display());
            context.log(Level::Warn, format_args!("the directory \"{path}\" of cache \"{name}\" was removed"));
        }
    }

    fn continues(&self, earlier: &Self) -> bool {
        Arc::ptr_eq(&self.zone, &earlier.zone)
    }
}

/// Runs a task that may block, for this cache.
async fn in_pool<T: Send + 'static>(zone: &CacheZone, task: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    Ok(default_pool().run_for(likely_device(&zone.directory.path), task).await?)
}

/// Waits for the lock of the directory.
async fn lock(context: &Context<CacheService>, zone: &Arc<CacheZone>) -> Arc<File> {
    let mut is_told = false;
    loop {
        let directory = zone.directory.path.clone();
        let locked = in_pool(zone, move || {
            let mut options = own_file();
            options.read(true).truncate(false);
            let path = directory.join(LOCK_FILE);
            let mut file = match options.open(&path) {
                // The directory was removed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    fs::DirBuilder::new().mode(0o700).create(&directory)?;
                    options.open(&path)?
                }
                file => file?,
            };
            note_directory(&directory, &file)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {
                    take_from_others(&file);
                    file.set_len(0)?;
                    write!(file, "{}", std::process::id())?;
                    Ok(Ok(file))
                }
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    let mut owner = String::new();
                    file.read_to_string(&mut owner)?;
                    Ok(Err(owner))
                }
                Err(error) => Err(io::Error::from(error)),
            }
        });
        let message = match locked.await.and_then(|locked| locked) {
            Ok(Ok(file)) => return Arc::new(file),
            Ok(Err(owner)) => format!("is in use by process {owner}, which manages it until it exits"),
            Err(error) => format!("cannot be locked {}", OsErrorText(&error)),
        };
        if !std::mem::replace(&mut is_told, true) {
            let (name, path) = (&zone.name, zone.directory.path.display());
            context.log(Level::Warn, format_args!("the directory \"{path}\" of cache \"{name}\" {message}"));
        }
        sleep(LOCK_TRY_PAUSE).await;
    }
}

/// Loads the index from disk: first the journal, then every file.
async fn load(context: &Context<CacheService>, zone: &Arc<CacheZone>, seen: Option<Seen>) {
    // Another process may have written to it until now.
    read_journal(context, zone, seen).await;
    flush_journal(context, zone, true).await;
    let mut walk = Walk::new(zone.directory.path.clone());
    while !walk.is_done {
        let pace = zone.options().loader;
        let own = Arc::clone(zone);
        let Ok(went) = in_pool(zone, move || {
            walk.step(&own, pace, false);
            walk
        })
        .await
        else {
            return;
        };
        walk = went;
        if !walk.is_done {
            sleep(pace.sleep).await;
        }
    }
    zone.set_cold(false);
    if walk.foreign > 0 {
        let (count, name) = (walk.foreign, &zone.name);
        let message = format_args!("cache \"{name}\": {count} files were not written by Gale and are left alone");
        context.log(Level::Warn, message);
    }
    let message =
        format_args!("cache \"{}\": {} entries, {} bytes", zone.name, zone.index.stored(), zone.index.bytes());
    context.log(Level::Notice, message);
}

/// Inode and length of a journal that was read to its end. A writer changes one of them.
type Seen = (u64, u64);

/// Reads the journal, unless it still is as `seen`. The loader finds missing entries; for missing purges everything is
/// purged.
async fn read_journal(context: &Context<CacheService>, zone: &Arc<CacheZone>, seen: Option<Seen>) -> Option<Seen> {
    let name = &zone.name;
    for is_last in [false, true] {
        let lost = match read_whole_journal(zone, seen).await {
            Ok(None) => return seen,
            Ok(Some((read, Outcome::Whole))) => return Some(read),
            Ok(Some((read, Outcome::Damaged(bytes)))) => {
                let message =
                    format_args!("the journal of cache \"{name}\" is damaged: {bytes} bytes are lost, but no purge");
                context.log(Level::Warn, message);
                return Some(read);
            }
            Ok(Some((read, Outcome::Lost(until)))) => Ok((read, until)),
            Err(error) => Err(error),
        };
        if !is_last {
            sleep(JOURNAL_READ_AGAIN).await;
            continue;
        }
        let (read, until) = match lost {
            Ok((read, until)) => {
                let what = "is damaged and has lost purges";
                let message = format_args!(
                    "the journal of cache \"{name}\" {what}: all entries older than these count as purged"
                );
                context.log(Level::Error, message);
                (Some(read), until)
            }
            Err(error) => {
                let error = OsErrorText(&error);
                let message =
                    format_args!("the journal of cache \"{name}\" cannot be read, all entries count as purged {error}");
                context.log(Level::Error, message);
                (None, None)
            }
        };
        let number = until.unwrap_or_else(|| zone.next_number());
        zone.purge_all([Record::PurgedPrefix { prefix: Vec::new(), number, is_soft: false }]);
        return read;
    }
    None
}

/// Replays the journal. `None` if there is none, or it still is as `seen`.
async fn read_whole_journal(zone: &Arc<CacheZone>, seen: Option<Seen>) -> io::Result<Option<(Seen, Outcome)>> {
    let own = Arc::clone(zone);
    let Some(mut reading) = in_pool(zone, move || Reading::open(&own.directory.path, seen)).await?? else {
        return Ok(None);
    };
    // Keeps one file open: another process may put a new one in its place.
    loop {
        let own = Arc::clone(zone);
        let is_end;
        (reading, is_end) = in_pool(zone, move || reading.step(&own).map(|is_end| (reading, is_end))).await??;
        if is_end {
            return Ok(Some(((reading.inode, reading.length), reading.scan.outcome())));
        }
    }
}

/// A journal being read.
struct Reading {
    file: File,
    inode: u64,
    length: u64,
    scan: Scan,
}

impl Reading {
    fn open(directory: &Path, seen: Option<Seen>) -> io::Result<Option<Reading>> {
        let file = match File::open(directory.join(JOURNAL_FILE)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let (inode, length) = (file.metadata()?.ino(), file.metadata()?.len());
        let is_seen = seen == Some((inode, length));
        Ok((!is_seen).then(|| Reading { file, inode, length: 0, scan: Scan::default() }))
    }

    /// Reads a part. Returns true at the end.
    fn step(&mut self, zone: &Arc<CacheZone>) -> io::Result<bool> {
        let mut bytes = Vec::with_capacity(JOURNAL_STEP);
        (&self.file).take(JOURNAL_STEP as u64).read_to_end(&mut bytes)?;
        self.length += bytes.len() as u64;
        let now = unix_now();
        self.scan.push(&bytes, |record| zone.replay(record, now));
        Ok(bytes.is_empty())
    }
}

fn unix_now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Writes pending changes to the journal, or the whole index to a new one if that is due.
async fn flush_journal(context: &Context<CacheService>, zone: &Arc<CacheZone>, is_anew: bool) {
    let is_anew = is_anew || zone.journal_is_long();
    let own = Arc::clone(zone);
    let written = in_pool(zone, move || if is_anew { write_journal(&own) } else { append_journal(&own) }).await;
    if let Err(error) = written.and_then(|written| written) {
        zone.counters.disk_errors.fetch_add(1, Relaxed);
        let message = format_args!("the journal of cache \"{}\" cannot be written {}", zone.name, OsErrorText(&error));
        context.log(Level::Error, message);
    }
}

/// Appends pending changes to the journal; may block. If that fails the manager rewrites the journal from memory,
/// because records behind a torn one cannot be read.
///
/// # Errors
/// Those of the disk.
pub fn append_journal(zone: &CacheZone) -> io::Result<()> {
    let _turn = zone.journal_turn();
    if zone.journal_is_torn() {
        return Err(io::Error::other("the journal must be rewritten"));
    }
    let changes = zone.take_changes();
    if changes.bytes.is_empty() {
        return Ok(());
    }
    let path = zone.directory.path.join(JOURNAL_FILE);
    let written = append(&path, &changes);
    if written.is_err() {
        zone.note_torn_journal();
    }
    written
}

/// Options to create Gale's own files in the directory. They are private to the user: an old journal could bring purged
/// responses back.
fn own_file() -> OpenOptions {
    let mut options = File::options();
    options.write(true).create(true).mode(0o600);
    options
}

/// Makes a file private that an earlier version created readable and writable for all.
fn take_from_others(file: &File) {
    let mode = file.metadata().map_or(0, |metadata| metadata.permissions().mode());
    if mode & 0o077 != 0 {
        // Fails if the file has another owner.
        let _ = file.set_permissions(Permissions::from_mode(mode & 0o700));
    }
}

/// Appends to the journal. The account is written before the purges, so that a missing purge is always detected.
fn append(path: &Path, changes: &Changes) -> io::Result<()> {
    let file = own_file().truncate(false).open(path)?;
    take_from_others(&file);
    let mut end = file.metadata()?.len();
    if end == 0 {
        end = HEADER_LENGTH as u64;
        file.write_all_at(&journal::header(changes.purges), 0)?;
    } else if !changes.purges.is_empty() {
        let mut header = [0; HEADER_LENGTH];
        File::open(path)?.read_exact_at(&mut header, 0)?;
        let mut purges = Account::of_header(&header).ok_or(io::ErrorKind::InvalidData)?;
        purges.join(changes.purges);
        file.write_all_at(&purges.encode(), ACCOUNT_AT as u64)?;
    }
    file.write_all_at(&changes.bytes, end).inspect_err(|_| _ = file.set_len(end))
}

/// Writes pending changes in a pool, so that they survive the end of this process.
pub fn write_soon(zone: &Arc<CacheZone>) {
    let own = Arc::clone(zone);
    // If the pool refuses or the write fails, the manager writes them.
    let _ = default_pool().detach(likely_device(&zone.directory.path).writes(), move || drop(append_journal(&own)));
}

/// Like [`write_soon`], but waits for the write for at most `patience`, because the disk may hang. False if it has not
/// been written by then; the manager writes it in any case.
pub async fn write_now(zone: &Arc<CacheZone>, patience: Duration) -> bool {
    if !zone.disk.may_try(gale_runtime::now()) {
        return false;
    }
    let own = Arc::clone(zone);
    let task = default_pool()
        .run_for(likely_device(&zone.directory.path).writes(), move || own.disk.watch(|| append_journal(&own)));
    // A timeout may be due to the pool or to a rewrite of the journal, so it tells nothing about the disk.
    matches!(timeout(patience, task).await, Ok(Ok(Ok(()))))
}

fn write_journal(zone: &CacheZone) -> io::Result<()> {
    let path = zone.directory.path.join(JOURNAL_FILE);
    let new = zone.directory.path.join(format!("{JOURNAL_FILE}.new"));
    let _turn = zone.journal_turn();
    // Until the new journal is in place, the pending changes are only in memory.
    zone.note_torn_journal();
    // The new journal is written from the present state, which has the pending changes. Later ones are appended to it.
    drop(zone.take_changes());
    let new_file = own_file().truncate(true).open(&new)?;
    // The file may be left from a process that was killed.
    take_from_others(&new_file);
    let mut file = io::BufWriter::with_capacity(1 << 20, new_file);
    let mut count = 0;
    let mut purges = Changes::default();
    zone.purges.records().iter().for_each(|record| purges.add(record));
    file.write_all(&journal::header(purges.purges))?;
    file.write_all(&purges.bytes)?;
    let mut bytes = Vec::new();
    for shard in 0..zone.index.shards() {
        let mut from = Some(0);
        while let Some(at) = from {
            let (entries, next) = zone.index.entries(shard, at, SWEEP_STEP);
            for record in entries.iter().filter_map(|entry| zone.record_of(entry)) {
                record.write(&mut bytes);
                count += 1;
            }
            file.write_all(&bytes)?;
            bytes.clear();
            from = next;
        }
    }
    file.flush()?;
    drop(file);
    fs::rename(new, path)?;
    zone.note_journal(count);
    Ok(())
}

/// True if the directory's lock is still the file that this process has locked, or the disk cannot tell.
async fn is_locked(zone: &Arc<CacheZone>, lock: &Arc<File>) -> bool {
    let (path, lock) = (zone.directory.path.join(LOCK_FILE), Arc::clone(lock));
    let is_same = in_pool(zone, move || match (fs::metadata(path), lock.metadata()) {
        (Ok(named), Ok(own)) => (named.dev(), named.ino()) == (own.dev(), own.ino()),
        (Err(error), _) => error.kind() != io::ErrorKind::NotFound,
        _ => true,
    });
    is_same.await.unwrap_or(true)
}

/// Keeps the cache within its bounds until the service stops. Returns true if the lock was removed before, and the
/// directory with it.
async fn manage(context: &Context<CacheService>, zone: &Arc<CacheZone>, lock: &Arc<File>) -> bool {
    let mut swept = Instant::now();
    while !context.is_stopping() {
        if !is_locked(zone, lock).await {
            return true;
        }
        keep_within_bounds(context, zone, &mut swept).await;
        context.unless_stopping(sleep(MANAGER_PERIOD)).await;
    }
    false
}

async fn keep_within_bounds(context: &Context<CacheService>, zone: &Arc<CacheZone>, swept: &mut Instant) {
    zone.set_options(context.settings().options.clone());
    let options = zone.options();
    while zone.shrink(options.manager) && !context.is_stopping() {
        sleep(options.manager.sleep).await;
    }
    let period = (options.inactive / 10).clamp(MANAGER_PERIOD, Duration::from_secs(60));
    if swept.elapsed() >= period {
        *swept = Instant::now();
        sweep_inactive(context, zone, &options).await;
    }
    if store::has_left(&zone.directory.path) {
        let directory = zone.directory.path.clone();
        // If the pool refuses, the next round tries again.
        let _ = in_pool(zone, move || store::remove_left(&directory)).await;
    }
    if options.min_free > 0 {
        keep_free(zone, &options).await;
    }
    let own = Arc::clone(zone);
    _ = in_pool(zone, move || own.settle_purges()).await;
    let hard = zone.purges.count_hard();
    if options.purger && hard > 0 || hard >= PURGES_MANY {
        purge_files(context, zone, options.purging).await;
    }
    flush_journal(context, zone, false).await;
    for (what, count) in zone.take_full_tables() {
        let message = format_args!(
            "cache \"{}\": {count} {what} are in use, responses with further ones are not stored",
            zone.name
        );
        context.log(Level::Warn, message);
    }
    if let Some(failure) = zone.take_store_failure() {
        context.log(Level::Crit, format_args!("cache \"{}\": {failure}", zone.name));
    }
}

/// Removes entries that were not requested for `inactive`.
async fn sweep_inactive(context: &Context<CacheService>, zone: &Arc<CacheZone>, options: &PathOptions) {
    let now = unix_now();
    let oldest = now.saturating_sub(options.inactive.as_secs());
    for shard in 0..zone.index.shards() {
        let mut from = Some(0);
        while let Some(at) = from {
            let is_old = |entry: &Entry| u64::from(entry.accessed) < oldest;
            let (gone, next) = zone.index.sweep(shard, at, SWEEP_STEP, is_old);
            let had_any = !gone.is_empty();
            zone.counters.evicted.fetch_add(gone.len() as u64, Relaxed);
            zone.remove_evicted(gone);
            from = next;
            if context.is_stopping() {
                return;
            }
            if had_any {
                sleep(options.manager.sleep).await;
            }
        }
        gale_runtime::yield_now().await;
    }
}

/// `min_free`: removes as many files as needed, up to the manager's limit for one run.
async fn keep_free(zone: &Arc<CacheZone>, options: &PathOptions) {
    let (least, most) = (options.min_free, options.manager.files);
    loop {
        let own = Arc::clone(zone);
        match in_pool(zone, move || own.free_space(least, most)).await {
            Ok(Ok(true)) => sleep(options.manager.sleep).await,
            _ => return,
        }
    }
}

/// Visits every file and removes purged ones.
async fn purge_files(context: &Context<CacheService>, zone: &Arc<CacheZone>, pace: Pace) {
    // Later purges may cover files that the walk has already passed.
    let number = zone.next_number();
    let mut walk = Walk::new(zone.directory.path.clone());
    while !walk.is_done {
        let own = Arc::clone(zone);
        let Ok(went) = in_pool(zone, move || {
            walk.step(&own, pace, true);
            walk
        })
        .await
        else {
            return;
        };
        walk = went;
        if context.unless_stopping(sleep(pace.sleep)).await.is_none() {
            return;
        }
    }
    // Responses requested before the purge may still arrive, and are judged by it.
    zone.purges.forget_hard_until(number.min(zone.oldest_in_flight() - 1));
}

/// A walk through a directory and those below it.
struct Walk {
    waiting: Vec<PathBuf>,
    current: Option<ReadDir>,
    foreign: u64,
    is_done: bool,
}

impl Walk {
    fn new(root: PathBuf) -> Walk {
        Walk { waiting: vec![root], current: None, foreign: 0, is_done: false }
    }

    /// Visits some files.
    fn step(&mut self, zone: &Arc<CacheZone>, pace: Pace, purges: bool) {
        let began = Instant::now();
        let mut files = 0;
        while files < pace.files.max(1) && began.elapsed() < pace.threshold.max(Duration::from_millis(1)) {
            let Some(entries) = &mut self.current else {
                match self.waiting.pop() {
                    Some(directory) => self.current = fs::read_dir(directory).ok(),
                    None => {
                        self.is_done = true;
                        return;
                    }
                }
                continue;
            };
            let Some(entry) = entries.next() else {
                self.current = None;
                continue;
            };
            let Ok(entry) = entry else { continue };
            match entry.file_type() {
                // Levels have names of one or two digits.
                Ok(kind) if kind.is_dir() && entry.file_name().len() <= 2 => self.waiting.push(entry.path()),
                Ok(kind) if kind.is_file() => {
                    files += 1;
                    self.foreign += u64::from(!visit(zone, &entry.path(), &entry.file_name(), purges));
                }
                _ => {}
            }
        }
    }
}

/// Visits a file. False if it is not Gale's.
fn visit(zone: &Arc<CacheZone>, path: &Path, name: &OsStr, purges: bool) -> bool {
    let name = name.as_bytes();
    if name.starts_with(b".gale.") {
        return true;
    }
    let Some(id) = name.get(..32).and_then(parse_hex) else { return false };
    if name.len() > 32 {
        return remove_abandoned(path, &name[32..]);
    }
    if zone.path_of(&id) != path {
        // With other levels: it is never found at this path.
        return false;
    }
    if !purges && zone.index.with(&id, |entry| entry.is_some_and(|entry| entry.kind == Kind::Stored)) {
        return true;
    }
    let Ok((header, size)) = read_header(path) else { return true };
    let header = match header {
        Ok(header) if is_whole(&header, size) => header,
        Err(Unreadable::Foreign) => return false,
        _ => {
            zone.remove_damaged(
                &id,
                || !matches!(read_header(path), Ok((Ok(header), size)) if is_whole(&header, size)),
            );
            return true;
        }
    };
    let meta = header.meta;
    zone.note_number(meta.number);
    if zone.purges.judge(&id_of(&meta.key), &meta.key, &meta.tags, meta.number) == Verdict::Gone {
        zone.index.remove(&id, |entry| entry.number <= meta.number);
        zone.remove_file(&Evicted { id, size, number: meta.number });
        return true;
    }
    if purges {
        return true;
    }
    zone.counters.loaded.fetch_add(1, Relaxed);
    let now = unix_now();
    if meta.status == format::SEARCHES {
        // Purged, or the table is full: the file stays until it is found again.
        let _ = zone.note_search(&id, &meta.variant, meta.variant_number, Some(size), now);
        return true;
    }
    if meta.status == format::VARIES {
        let _ = zone.note_vary(&id, &meta.variant, meta.variant_number, Some(size), now);
        return true;
    }
    let mut entry = Entry::new(id, Kind::Stored, now);
    (entry.number, entry.size) = (meta.number, zone.room_for(size));
    entry.set_lifetime(&meta.lifetime);
    zone.put_found(entry);
    true
}

/// True if a file has the length that its header gives.
fn is_whole(header: &format::Header, size: u64) -> bool {
    size == header.file_length()
}

type HeaderRead = (Result<format::Header, Unreadable>, u64);

fn read_header(path: &Path) -> io::Result<HeaderRead> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    let mut bytes = vec![0; HEADER_READ.min(size as usize)];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(match format::decode(&bytes) {
        Err(Unreadable::Longer(length)) if length as u64 <= size => {
            bytes.resize(length, 0);
            file.read_exact_at(&mut bytes, 0)?;
            (format::decode(&bytes), size)
        }
        read => (read, size),
    })
}

/// Removes an incomplete file of a process that has ended. The process that holds the lock may conclude that if another
/// process began the file and has not written to it since this one started. False if the file is not Gale's.
fn remove_abandoned(path: &Path, suffix: &[u8]) -> bool {
    let digits = suffix.strip_prefix(b".").filter(|digits| digits.len() == 10);
    let number = digits.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
    let Some(number) = number.filter(|_| store::is_ours(path).unwrap_or(false)) else { return false };
    let Ok(modified) = fs::metadata(path).and_then(|metadata| metadata.modified()) else { return true };
    let is_of_another = !store::is_own_number(number) && modified < store::begun();
    let age = SystemTime::now().duration_since(modified).unwrap_or_default();
    if is_of_another || age >= ABANDONED_AFTER {
        store::remove_temporary(path);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::CacheDirectory;

    fn zone(directory: &Path) -> Arc<CacheZone> {
        let place = CacheDirectory { path: directory.into(), levels: Default::default() };
        Arc::new(CacheZone::new("one".into(), place, PathOptions::default(), 64 * 1024))
    }

    /// Replays the journal of a zone's directory.
    fn read(zone: &Arc<CacheZone>) -> Outcome {
        let mut reading = Reading::open(&zone.directory.path, None).unwrap().unwrap();
        while !reading.step(zone).unwrap() {}
        reading.scan.outcome()
    }

    #[test]
    fn purges_that_are_appended_are_in_the_account() {
        let directory = std::env::temp_dir().join(format!("gale-journal-account-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let first = zone(&directory);
        first.set_managed(true);
        let purge = |tag| first.purge_all([Record::PurgedTag { tag, number: 100 + tag, is_soft: false }]);
        let journal = directory.join(JOURNAL_FILE);
        // Appends to a missing file, to an existing one, and to a rewritten one.
        purge(1);
        append_journal(&first).unwrap();
        purge(2);
        append_journal(&first).unwrap();
        assert_eq!(read(&zone(&directory)), Outcome::Whole);
        write_journal(&first).unwrap();
        purge(3);
        append_journal(&first).unwrap();
        assert_eq!(read(&zone(&directory)), Outcome::Whole);
        let whole = fs::read(&journal).unwrap();
        fs::write(&journal, &whole[..whole.len() - 1]).unwrap();
        assert_eq!(read(&zone(&directory)), Outcome::Lost(Some(103)));
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_purge_that_could_not_be_written_is_in_the_journal_that_is_written_next() {
        let directory = std::env::temp_dir().join(format!("gale-journal-{}", std::process::id()));
        let journal = directory.join(JOURNAL_FILE);
        // A directory in place of the file.
        fs::create_dir_all(&journal).unwrap();
        let first = zone(&directory);
        first.set_managed(true);
        let purge = |tag| first.purge_all([Record::PurgedTag { tag, number: 100, is_soft: false }]);
        purge(1);
        assert!(append_journal(&first).is_err() && first.journal_is_long());
        fs::remove_dir(&journal).unwrap();
        // No record is appended to a torn journal.
        purge(2);
        assert!(append_journal(&first).is_err() && !journal.exists());
        write_journal(&first).unwrap();
        purge(3);
        append_journal(&first).unwrap();
        let second = zone(&directory);
        assert_eq!(read(&second), Outcome::Whole);
        let judge = |tag| second.purges.judge(&[0; 16], b"/", &[tag], 100);
        assert_eq!([1, 2, 3, 4].map(judge), [Verdict::Gone, Verdict::Gone, Verdict::Gone, Verdict::Valid]);
        fs::remove_dir_all(&directory).unwrap();
    }
}
