//! Removes entries and their files: to make room, because they are unusable, or because they were purged.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use gale_files::likely_device;
use gale_runtime::{ThreadPool, default_pool};

use super::CacheZone;
use crate::directory::Pace;
use crate::index::{Evicted, Kind};
use crate::journal::Record;
use crate::key::Id;
use crate::store;

/// Maximum number of entries removed for a new one, which may be large while they are small. The manager does the rest.
const SHRINK_AT_ONCE: u64 = 1024;

impl CacheZone {
    /// Enforces `max_size`: removes at most `pace.files` files, for about `pace.threshold`. True if there is more to
    /// do.
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

    /// Removes files until there is room for `size` bytes; may block. `None` if there never is.
    pub(super) fn make_room(self: &Arc<Self>, size: u64) -> Option<Room<'_>> {
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

    /// `min_free`: removes at most `most` files while less than `least` is free; may block. True if there is more to
    /// do. The space of a file that is still being read becomes free when that ends.
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

    /// Evicts one entry and removes its file in a pool. False if there is none.
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

    /// Removes an unusable entry and its file. False if it was not there.
    pub fn discard(self: &Arc<Self>, id: &Id, number: u64) -> bool {
        let fills = self.fills_of(id).lock();
        for fill in fills.get(id).into_iter().flat_map(|listed| std::iter::once(&listed.fill).chain(&listed.before)) {
            if fill.number == number {
                // It is complete, and about to be renamed into place.
                fill.purge();
            }
        }
        let gone = self.index.remove(id, |entry| entry.kind == Kind::Stored && entry.number == number);
        drop(fills);
        self.remove_files(gone.as_ref().and_then(Evicted::of).into_iter().collect(), None);
        gone.is_some()
    }

    /// Removes a damaged entry and its file. False if it was not there.
    pub fn discard_damaged(self: &Arc<Self>, id: &Id, number: u64) -> bool {
        let was_there = self.discard(id, number);
        self.counters.damaged.fetch_add(u64::from(was_there), Relaxed);
        was_there
    }

    /// Removes the files of entries that a service has removed.
    pub fn remove_evicted(self: &Arc<Self>, gone: Vec<Evicted>) {
        self.remove_files(gone, None);
    }

    /// Removes files of entries that are no longer in the index, in a pool.
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
        // If the pool refuses, the files stay until the loader finds them or others replace them.
        let _ = pool.detach(likely_device(&self.directory.path).writes(), move || {
            for evicted in &gone {
                zone.remove_file(evicted);
            }
        });
    }

    /// Removes the file of a removed entry, unless a newer one is in its place; may block. False if the disk fails.
    pub fn remove_file(&self, gone: &Evicted) -> bool {
        let _naming = self.naming_of(&gone.id).lock();
        self.has_file(&gone.id, gone.number) || store::remove(&self.path_of(&gone.id)).is_ok()
    }

    /// Removes an unusable file if it still is unusable once no thread is writing to it; may block.
    pub fn remove_damaged(&self, id: &Id, is_damaged: impl FnOnce() -> bool) {
        let _naming = self.naming_of(id).lock();
        if is_damaged() {
            self.counters.damaged.fetch_add(1, Relaxed);
            self.index.remove(id, |entry| entry.kind.has_file());
            let _ = store::remove(&self.path_of(id));
        }
    }
}

/// Space reserved for a file that is about to be renamed into place.
pub(super) struct Room<'z> {
    zone: &'z CacheZone,
    size: u64,
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.zone.promised_bytes.fetch_sub(self.size, Relaxed);
    }
}
