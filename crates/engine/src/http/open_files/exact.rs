//! What is kept where no cache is configured: of files that are asked for often the bodies, if they are small, and else the
//! descriptors, exactly as they are on disk.
//!
//! An entry is used only while the kernel has told of no change to anything on its path, and the kernel is asked whether it
//! has told everything at each use. For a body in memory that is one short call (how much is unread of what it tells) instead
//! of open, fstat, read and close. A descriptor is looked at as well before anything is sent from it, so it saves opening and
//! closing; and since it keeps a file system busy, and a deleted file's blocks, few are held, of no very large files, and those
//! for a second at most after the file has changed and for [`BELIEVED`] after the last request. What cannot be watched is not
//! kept. (Changes of which the kernel does not tell, writes through a mapping that stays, show in a body after [`BELIEVED`] at
//! the latest, and in what is sent from a descriptor at once.)

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gale_runtime::watch::{self, PathWatch};
use gale_runtime::{Device, File, FileMetadata, OpenFlags, default_pool, files};

use super::entry::{BODY_MAX, Body, DESCRIPTORS, Entry, Found, Kept, target_of};
use super::table::{Keyed, Table};
use super::{Contents, Opened, as_path, note_work};

/// Most files that are kept. Each takes some kernel memory for its watch, beside the body.
const ENTRIES_MAX: usize = 2048;

/// Largest file whose descriptor is held: of sending more, opening is a hundredth, and streams that have descriptors of their
/// own do not mix up what the kernel knows about each one's reading ahead.
const HELD_SIZE_MAX: u64 = 16 << 20;

/// A file that is asked for so often within a few seconds is worth a dozen system calls in the pool.
const WORTH_USES: u64 = 8;
const WORTH_WINDOW: u64 = 4_000;

/// How long an entry is believed, in milliseconds, and when it is read again so that one in use never gets so old.
const BELIEVED: u64 = 5_000;
const READ_AGAIN_AFTER: u64 = 4_000;

/// What could not be watched is left alone for so long.
const LEFT_ALONE: Duration = Duration::from_secs(60);

static TABLE: OnceLock<Table<Entry>> = OnceLock::new();

/// The file of this path, if it is kept.
#[inline]
pub(super) fn find(path: &[u8], hash: u64, now: u64) -> Option<Opened> {
    let entry = TABLE.get()?.find(hash, path)?;
    let kept = entry.kept()?;
    let age = now.saturating_sub(entry.checked());
    let is_told = kept.watch.as_ref().is_some_and(PathWatch::is_intact) && age < BELIEVED;
    // Only now: whatever is unread may be about this file.
    if !is_told || !watch::nothing_unread() || !kept.watch.as_ref().is_some_and(PathWatch::is_intact) {
        return None;
    }
    let Found::File { file, metadata } = &entry.found else { return None };
    let contents = match (&kept.body, file) {
        (Some(body), _) => Contents::Memory(body.bytes().clone()),
        // What is written through a mapping is not told of: the head has to be that of what is sent.
        (None, Some(file)) if file.look_again().is_ok_and(|now| now == *metadata) => Contents::File(file.clone()),
        (None, Some(_)) => return None,
        (None, None) => return None,
    };
    entry.touch(now);
    if age >= READ_AGAIN_AFTER && entry.claim() {
        let (entry, device) = (Arc::clone(entry.arc()), Device::number(metadata.device));
        // Refused, the entry gets too old and is made anew.
        let _ = default_pool().detach(device, move || read_again(&entry, now));
    }
    Some(Opened { metadata: *metadata, contents })
}

/// Notes that a file was opened. When that happens often, it is kept from then on.
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
            // When it has changed, it is to be worth it again.
            RECENT.forget(hash);
        }
        None => RECENT.leave_alone(hash, now),
    };
    // A pool that is full has better things to do.
    let _ = default_pool().detach(file.device(), task);
}

/// Opens and reads what is watched already: whatever happens from then on is told.
fn keep(path: &[u8], hash: u64, now: u64, watch: PathWatch) {
    let Some((file, metadata)) = open(path).filter(|(_, metadata)| watch.target() == target_of(metadata)) else {
        return;
    };
    let (file, body, held) = if metadata.size <= BODY_MAX {
        let Some(body) = read(&file, &metadata) else { return };
        (None, Some(body), None)
    } else {
        let Some(held) = DESCRIPTORS.take(1).filter(|_| metadata.size <= HELD_SIZE_MAX) else { return };
        (Some(file), None, Some(held))
    };
    let entry = Entry::new(path, hash, Found::File { file, metadata }, 0, now);
    entry.keep(Kept { watch: Some(watch), body, _held: held });
    TABLE.get_or_init(|| Table::new(ENTRIES_MAX)).insert(entry.into());
    note_work();
}

fn open(path: &[u8]) -> Option<(File, FileMetadata)> {
    let file = files::open_blocking(as_path(path), OpenFlags::READ).ok()?;
    let metadata = *file.metadata();
    metadata.is_regular().then_some((file, metadata))
}

/// The body, in place of another one if there is no room.
fn read(file: &File, metadata: &FileMetadata) -> Option<Body> {
    let body = Body::read(file, metadata).ok()?;
    if body.is_none() && metadata.size <= BODY_MAX && TABLE.get().is_some_and(Table::remove_one) {
        return Body::read(file, metadata).ok()?;
    }
    body
}

/// The same file with the same content is believed again.
fn read_again(entry: &Arc<Entry>, now: u64) {
    let body = entry.kept().and_then(|kept| kept.body.as_ref());
    let is_same = match (&entry.found, open(entry.path())) {
        (Found::File { metadata, .. }, Some((file, new))) => {
            // What is sent from its descriptor is as new as it can be.
            let has_same_body = |body: &Body| read(&file, &new).is_some_and(|new| body.bytes() == new.bytes());
            *metadata == new && body.is_none_or(has_same_body)
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

/// Frees what is not believed any more. False when nothing is left.
pub(super) fn keep_house(now: u64) -> bool {
    let Some(table) = TABLE.get() else { return false };
    table.retain(|entry| {
        let is_intact = entry.kept().and_then(|kept| kept.watch.as_ref()).is_some_and(PathWatch::is_intact);
        is_intact && now.saturating_sub(entry.checked()) < BELIEVED
    });
    table.len() > 0
}

static RECENT: Recent = Recent { slots: [const { AtomicU64::new(0) }; RECENT_SLOTS] };

/// Files of which it is counted how often they were opened lately; a power of two.
const RECENT_SLOTS: usize = 1024;

/// How often files were opened lately. It is no matter if a count is lost: nobody waits for another one.
struct Recent {
    /// Part of the hash (32 bits), the window of time (24), the count (8).
    slots: [AtomicU64; RECENT_SLOTS],
}

impl Recent {
    /// Counts; true when it has become often.
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
    use super::*;

    #[test]
    fn what_is_opened_often_within_a_window_is_worth_keeping_once() {
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
}
