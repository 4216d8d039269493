//! Adds entries: renames a fetched file into place and adds it to the index, or renews its header.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use gale_base::os_error::OsErrorText;

use super::CacheZone;
use super::fills::{unlist, unlist_until};
use crate::fill::Fill;
use crate::format::Meta;
use crate::index::{Entry, Kind, seconds};
use crate::key::{Id, id_of};
use crate::policy::Lifetime;
use crate::policy::Verdict;
use crate::store::{self, Unnamed};

impl CacheZone {
    /// Adds an entry to the index, evicting others if necessary.
    pub fn put(self: &Arc<Self>, entry: Entry) {
        let record = self.record_of(&entry);
        let gone = self.index.insert(entry);
        if let Some(record) = record {
            self.note_change(&record);
        }
        self.counters.evicted.fetch_add(gone.len() as u64, Relaxed);
        self.remove_files(gone, None);
    }

    /// Adds an entry whose file was found, unless there is one of the same id.
    pub fn put_found(self: &Arc<Self>, entry: Entry) {
        let _naming = self.naming_of(&entry.id).lock();
        if !self.has_file(&entry.id, 0) {
            self.put(entry);
        }
    }

    /// Renames the file of a fetched response into place and adds it to the index; may block. Does nothing if the
    /// response was purged or a later one exists.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn commit(self: &Arc<Self>, fill: &Fill, id: &Id, meta: &Meta, file: Unnamed, now: u64) -> std::io::Result<()> {
        let (size, room) = (file.size(), self.room_for(file.size()));
        // `max_size` is enforced at once, not by the manager later.
        let Some(_room) = self.make_room(room) else { return Ok(()) };
        {
            let _naming = self.naming_of(id).lock();
            if !self.is_wanted(fill, id, meta) {
                return Ok(());
            }
            file.publish(&self.path_of(id))?;
            // A purge by key holds this lock: it either came before and is seen here, or finds the entry.
            let mut fills = self.fills_of(id).lock();
            let is_wanted = self.is_wanted(fill, id, meta);
            if is_wanted {
                let mut entry = Entry::new(*id, Kind::Stored, now);
                (entry.number, entry.size) = (meta.number, room);
                entry.set_lifetime(&meta.lifetime);
                self.put(entry);
                // An older fill may take longer, and would hide this entry.
                unlist_until(&mut fills, id, meta.number);
            } else {
                unlist(&mut fills, fill, id);
            }
            drop(fills);
            if !is_wanted && !self.has_file(id, meta.number) {
                let _ = store::remove(&self.path_of(id));
                return Ok(());
            }
        }
        self.is_failing.store(false, Relaxed);
        self.counters.uses.count_written(fill.way(), size);
        Ok(())
    }

    /// True if the response was neither purged nor replaced by a later one.
    fn is_wanted(&self, fill: &Fill, id: &Id, meta: &Meta) -> bool {
        !fill.is_purged()
            && self.purges.judge(&fill.primary, &meta.key, &meta.tags, meta.number) != Verdict::Gone
            && self.is_variant_valid(meta)
            && !self.has_file(id, meta.number)
    }

    /// Renames the file of a mark into place, unless the mark is obsolete; may block.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn commit_mark(self: &Arc<Self>, primary: &Id, mark: &Meta, file: Unnamed) -> std::io::Result<()> {
        // The index has counted its size already.
        let _room = self.make_room(0);
        let _naming = self.naming_of(primary).lock();
        let is_mark = |entry: &Entry| {
            matches!(entry.kind, Kind::Varies(_) | Kind::Searches(_)) && entry.number == mark.variant_number
        };
        match self.index.with(primary, |entry| entry.is_some_and(|entry| is_mark(entry))) {
            true => file.publish(&self.path_of(primary)),
            false => Ok(()),
        }
    }

    /// True if the key of a variant still has variants of this number.
    fn is_variant_valid(&self, meta: &Meta) -> bool {
        meta.variant.is_empty() || {
            let primary = id_of(&meta.key);
            let number = meta.variant_number;
            self.index
                .with(&primary, |entry| entry.is_some_and(|e| matches!(e.kind, Kind::Varies(_)) && e.number == number))
        }
    }

    /// Sets another lifetime of an entry, before its file has it.
    pub fn renew(&self, id: &Id, number: u64, lifetime: &Lifetime) {
        self.index.with(id, |entry| {
            if let Some(entry) = entry.filter(|entry| entry.kind == Kind::Stored && entry.number == number) {
                entry.set_lifetime(lifetime);
            }
        });
    }

    /// Makes an entry stale, before its file has it.
    pub fn make_stale(&self, id: &Id, number: u64, now: u64) {
        self.index.with(id, |entry| {
            if let Some(entry) = entry.filter(|entry| entry.kind == Kind::Stored && entry.number == number) {
                entry.fresh_until = seconds(now.saturating_sub(1)).min(entry.fresh_until);
            }
        });
    }

    /// Replaces the header of the file with this number by `meta`, which has another number; may block. The file stays
    /// as it is if it was removed or replaced.
    ///
    /// # Errors
    /// Those of the disk. A damaged entry is removed.
    pub fn renew_file(self: &Arc<Self>, id: &Id, number: u64, meta: &Meta) -> std::io::Result<()> {
        let path = self.path_of(id);
        let Ok(opened) = self.open(id) else { return Ok(()) };
        if opened.header.meta.number != number {
            return Ok(());
        }
        // The copy is made before the lock is taken, because it may be large.
        let renewal = store::prepare_renewal(&path, &opened, meta, store::new_number()).inspect_err(|error| {
            if error.kind() == std::io::ErrorKind::InvalidData {
                self.discard_damaged(id, number);
            }
        })?;
        let _naming = self.naming_of(id).lock();
        let known = self.index.with(id, |entry| entry.filter(|entry| entry.number == number).cloned());
        let primary = id_of(&meta.key);
        let Some(known) = known.filter(|entry| entry.kind == Kind::Stored) else { return Ok(()) };
        if self.purges.judge(&primary, &meta.key, &meta.tags, meta.number) == Verdict::Gone {
            return Ok(());
        }
        let Some(length) = renewal.publish(&path, &opened)? else { return Ok(()) };
        let size = self.room_for(length);
        let mut entry = Entry { number: meta.number, size, ..known };
        entry.set_lifetime(&meta.lifetime);
        self.put(entry);
        Ok(())
    }

    /// Notes that a response could not be stored. If the reason is that the old file was damaged, the disk is not at
    /// fault: the next response will be stored.
    pub fn note_store_failure(&self, path: &Path, error: &std::io::Error) {
        if error.kind() != std::io::ErrorKind::InvalidData {
            self.counters.disk_errors.fetch_add(1, Relaxed);
            self.is_failing.store(true, Relaxed);
        }
        let mut last = self.last_failure.lock();
        *last = Some(format!("\"{}\" could not be stored {}", path.display(), OsErrorText(error)));
    }

    /// True if the last response could not be stored.
    pub fn is_failing(&self) -> bool {
        self.is_failing.load(Relaxed)
    }

    /// The last failure to store a response since the previous call.
    pub fn take_store_failure(&self) -> Option<String> {
        self.last_failure.lock().take()
    }
}
