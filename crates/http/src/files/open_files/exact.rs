//! The cache of files where no `open_file_cache` is configured. It keeps the bodies of small files that are requested
//! often, and the descriptors of larger ones, exactly as they are on disk.
//!
//! An entry is used only while the kernel has reported no change on its path; each use asks the kernel whether reports
//! are unread. For a body in memory that is one short call instead of open, fstat, read and close. A file sent from a
//! descriptor is also checked with fstat first, so this saves opening and closing. A held descriptor keeps a file
//! system busy and a deleted file's blocks allocated, so few are held, none of very large files, for at most a second
//! after a change and [`BELIEVED`] after the last request. A file that cannot be watched is not kept. (The kernel does
//! not report writes through a mapping: they show in a body after at most [`BELIEVED`], and at once in a file sent from
//! a descriptor.)

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gale_files::watch::{self, PathWatch};
use gale_files::{self as files, File, FileMetadata, OpenFlags};
use gale_runtime::{Device, default_pool};

use super::entry::{BODY_MAX, Body, DESCRIPTORS, Entry, Found, Kept, target_of};
use super::handles::counted_here;
use super::table::{Keyed, Table};
use super::{Contents, Opened, as_path, note_work};

/// Maximum number of files. Each takes some kernel memory for its watch, besides the body.
const ENTRIES_MAX: usize = 2048;

/// Largest file whose descriptor is held. Opening costs a hundredth of sending a larger file, and streams with
/// descriptors of their own do not disturb each other's read-ahead state in the kernel.
const HELD_SIZE_MAX: u64 = 16 << 20;

/// A file requested this often within a few seconds is worth a dozen system calls in the pool.
const WORTH_USES: u64 = 8;
const WORTH_WINDOW: u64 = 4_000;

/// Time for which an entry is trusted, in milliseconds, and the earlier time at which an entry in use is read again.
const BELIEVED: u64 = 5_000;
const READ_AGAIN_AFTER: u64 = 4_000;

/// Time for which a file that could not be watched is not tried again.
const LEFT_ALONE: Duration = Duration::from_secs(60);

static TABLE: OnceLock<Table<Entry>> = OnceLock::new();

/// The file of this path, if it is cached.
#[inline]
pub(super) fn find(path: &[u8], hash: u64, now: u64) -> Option<Opened> {
    let entry = TABLE.get()?.find(hash, path)?;
    let kept = entry.kept()?;
    let age = now.saturating_sub(entry.checked());
    let is_told = kept.watch.as_ref().is_some_and(PathWatch::is_intact) && age < BELIEVED;
    // The order matters: an unread report may be about this file.
    if !is_told || !watch::nothing_unread() || !kept.watch.as_ref().is_some_and(PathWatch::is_intact) {
        return None;
    }
    let Found::File { file, metadata } = &entry.found else { return None };
    let contents = match (kept.body.get(), file) {
        (Some(body), _) => Contents::Memory(counted_here(body.bytes(), hash)),
        // The kernel does not report writes through a mapping: the head must match the content that is sent.
        (None, Some(file)) if file.look_again().is_ok_and(|now| now == *metadata) => Contents::File(file.clone()),
        (None, Some(_)) => return None,
        (None, None) => return None,
    };
    entry.touch(now);
    if age >= READ_AGAIN_AFTER && entry.claim() {
        let (entry, device) = (Arc::clone(entry.arc()), Device::number(metadata.device));
        // If the pool refuses, the entry expires and is made anew.
        let _ = default_pool().detach(device, move || read_again(&entry, now));
    }
    Some(Opened { metadata: *metadata, contents })
}

/// Counts an open of a file, and keeps the file if it is opened often.
pub(super) fn note(path: &[u8], hash: u64, now: u64, file: &File) {
    let metadata = file.metadata();
    let has_room = metadata.size <= BODY_MAX || metadata.size <= HELD_SIZE_MAX && !DESCRIPTORS.is_full();
    let may_be_kept = metadata.is_regular() && has_room && !file.waits_for_others();
    if !may_be_kept || !watch::is_possible() || !RECENT.note(hash, now) {
        return;
    }
    let path = Box::from(path);
    let task = move || match PathWatch::begin(as_path(&path)) {
        Some(watch) => {
            keep(&path, hash, now, watch);
            // After a change the file has to qualify again.
            RECENT.forget(hash);
        }
        None => RECENT.leave_alone(hash, now),
    };
    // A full pool has more important work.
    let _ = default_pool().detach(file.device(), task);
}

/// Opens and reads a file that is already watched, so that every later change is reported.
fn keep(path: &[u8], hash: u64, now: u64, watch: PathWatch) {
    // The path may lead to another file by now.
    let is_watched =
        |(file, metadata): &(File, FileMetadata)| watch.target() == target_of(metadata) && !file.waits_for_others();
    let Some((file, metadata)) = open(path).filter(is_watched) else { return };
    let (file, body, held) = if metadata.size <= BODY_MAX {
        let Some(body) = read(&file, &metadata) else { return };
        (None, Some(body), None)
    } else {
        let Some(held) = DESCRIPTORS.take(1).filter(|_| metadata.size <= HELD_SIZE_MAX) else { return };
        (Some(file), None, Some(held))
    };
    let entry = Entry::new(path, hash, Found::File { file, metadata }, 0, now);
    let body = body.map_or_else(OnceLock::new, OnceLock::from);
    entry.keep(Kept { watch: Some(watch), body, lacks_room: false, _held: held });
    TABLE.get_or_init(|| Table::new(ENTRIES_MAX)).insert(entry.into());
    note_work();
}

fn open(path: &[u8]) -> Option<(File, FileMetadata)> {
    let file = files::open_blocking(as_path(path), OpenFlags::READ).ok()?;
    let metadata = *file.metadata();
    metadata.is_regular().then_some((file, metadata))
}

/// Reads the body. If there is no room, another body is removed.
fn read(file: &File, metadata: &FileMetadata) -> Option<Body> {
    let room = Body::room(metadata).or_else(|| {
        let has_made_room = TABLE.get().is_some_and(Table::remove_one);
        has_made_room.then(|| Body::room(metadata))?
    })?;
    Body::read(file, metadata, room).ok()?
}

/// Renews an entry if the same file still has the same content.
fn read_again(entry: &Arc<Entry>, now: u64) {
    let body = entry.kept().and_then(|kept| kept.body.get());
    let is_same = match (&entry.found, open(entry.path())) {
        (Found::File { metadata, .. }, Some((file, new))) => {
            // Data sent from a descriptor is always current.
            *metadata == new && body.is_none_or(|body| body.is_content_of(&file, &new).unwrap_or(false))
        }
        _ => false,
    };
    if is_same {
        entry.set_checked(now);
        entry.unclaim();
    } else if let Some(table) = TABLE.get() {
        table.remove(entry);
    }
}

/// Removes entries that are not trusted any more. False if none is left.
pub(super) fn evict_unused(now: u64) -> bool {
    let Some(table) = TABLE.get() else { return false };
    table.retain(|entry| {
        let is_intact = entry.kept().and_then(|kept| kept.watch.as_ref()).is_some_and(PathWatch::is_intact);
        is_intact && now.saturating_sub(entry.checked()) < BELIEVED
    });
    table.len() > 0
}

static RECENT: Recent = Recent { slots: [const { AtomicU64::new(0) }; RECENT_SLOTS] };

/// Number of files whose opens are counted; a power of two.
const RECENT_SLOTS: usize = 1024;

/// Counts of recent opens. A lost update is harmless.
struct Recent {
    /// Part of the hash (32 bits), time window (24), count (8).
    slots: [AtomicU64; RECENT_SLOTS],
}

impl Recent {
    /// Counts an open; true when the file has just become worth keeping.
    fn note(&self, hash: u64, now: u64) -> bool {
        let slot = self.slot(hash);
        let (tag, window) = ((hash >> 32) << 32, window(now));
        let old = slot.load(Ordering::Relaxed);
        let (old_tag, old_window, old_count) = ((old >> 32) << 32, (old >> 8) & 0xff_ffff, old & 0xff);
        if old_tag == tag && old_window > window {
            return false;
        }
        let count = if (old_tag, old_window) == (tag, window) { old_count + 1 } else { 1 };
        if count <= WORTH_USES {
            slot.store(tag | (window << 8) | count, Ordering::Relaxed);
        }
        count == WORTH_USES
    }

    fn forget(&self, hash: u64) {
        self.slot(hash).store(0, Ordering::Relaxed);
    }

    fn leave_alone(&self, hash: u64, now: u64) {
        let until = window(now + LEFT_ALONE.as_millis() as u64);
        self.slot(hash).store(((hash >> 32) << 32) | (until << 8), Ordering::Relaxed);
    }

    fn slot(&self, hash: u64) -> &AtomicU64 {
        &self.slots[hash as usize % RECENT_SLOTS]
    }
}

fn window(now: u64) -> u64 {
    (now / WORTH_WINDOW) & 0xff_ffff
}

#[cfg(test)]
mod tests {
    use super::super::entry::{ALONE, BODIES, BODIES_MAX};
    use super::super::table::hash_of;
    use super::*;

    #[test]
    fn file_opened_often_within_a_window_is_a_candidate_once() {
        let recent = Recent { slots: [const { AtomicU64::new(0) }; RECENT_SLOTS] };
        let hash = (7 << 32) | 3;
        let noted = |now: u64, times: usize| (0..times).filter(|_| recent.note(hash, now)).count();
        assert_eq!(noted(WORTH_WINDOW, 7), 0);
        assert_eq!(noted(2 * WORTH_WINDOW, 7), 0, "another window");
        assert_eq!(noted(2 * WORTH_WINDOW, 10), 1, "once");
        recent.forget(hash);
        assert_eq!(noted(2 * WORTH_WINDOW, 10), 1, "and again");
        recent.leave_alone(hash, 2 * WORTH_WINDOW);
        assert_eq!(noted(3 * WORTH_WINDOW, 20), 0);
        assert_eq!(noted(3 * WORTH_WINDOW + LEFT_ALONE.as_millis() as u64, 20), 1);
    }
    #[test]
    fn a_body_without_room_takes_that_of_one_that_has_not_been_used_for_longer() {
        const SIZE: usize = 60_000;
        let _alone = ALONE.lock();
        let directory = std::env::temp_dir().join(format!("gale-exact-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let path = |name: &str| directory.join(name).into_os_string().into_encoded_bytes();
        let write = |name: &str| std::fs::write(directory.join(name), name.repeat(SIZE)).unwrap();
        ["a", "b"].into_iter().for_each(write);
        // The sweep regards no entry of the future as old.
        let now = u64::MAX / 2;
        let keep = |name: &str| {
            let watch = PathWatch::begin(as_path(&path(name)))?;
            super::keep(&path(name), hash_of(&path(name)), now, watch);
            Some(())
        };
        let find = |name: &str| {
            let opened = find(&path(name), hash_of(&path(name)), now)?;
            match opened.contents {
                Contents::Memory(bytes) => Some(bytes),
                _ => panic!("a body"),
            }
        };
        // A report from before the file was kept may be taken for a change.
        let keep_until_found = |name: &str| {
            let end = std::time::Instant::now() + Duration::from_secs(20);
            while std::time::Instant::now() < end {
                keep(name);
                if let Some(bytes) = find(name) {
                    return bytes;
                }
                std::thread::yield_now();
            }
            panic!("{name} is not kept");
        };
        let is_kept = |name: &str| TABLE.get().unwrap().find(hash_of(&path(name)), &path(name)).is_some();
        // Leaves room for one body.
        let others = BODIES.take(BODIES_MAX - 2 * SIZE + 1).expect("none is taken yet");
        let own = || BODIES.taken() + 2 * SIZE - 1 - BODIES_MAX;
        if keep("a").is_none() {
            std::fs::remove_dir_all(&directory).unwrap();
            return crate::skips::skip("nothing can be watched here");
        }
        assert_eq!((keep_until_found("a")[0], own()), (b'a', SIZE));
        let sent = keep_until_found("b");
        assert_eq!((is_kept("a"), own()), (false, SIZE), "in its place");
        // A renewed entry needs no additional room.
        let entry = Arc::clone(TABLE.get().unwrap().find(hash_of(&path("b")), &path("b")).unwrap().arc());
        read_again(&entry, now);
        assert!(is_kept("b"));
        drop(entry);
        // The room stays taken as long as a client receives the body.
        keep("a");
        assert_eq!((is_kept("a"), is_kept("b"), own()), (false, false, SIZE));
        drop(sent);
        assert_eq!(own(), 0);
        // After a file is replaced, the new entry takes the place of the old one.
        keep_until_found("a");
        write("c");
        std::fs::rename(directory.join("c"), directory.join("a")).unwrap();
        assert!(find("a").is_none(), "at once");
        assert_eq!((keep_until_found("a")[0], own()), (b'c', SIZE));
        std::fs::remove_dir_all(&directory).unwrap();
        assert!(find("a").is_none());
        TABLE.get().unwrap().retain(|_| false);
        drop(others);
        assert_eq!(BODIES.taken(), 0);
    }
}
