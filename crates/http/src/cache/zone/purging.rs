//! Purges of a cache: what they take out at once, and what is left of them until all that they mean is gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use gale_runtime::ThreadPool;

use super::CacheZone;
use crate::cache::fill::Stage;
use crate::cache::index::{Entry, Evicted};
use crate::cache::journal::Record;
use crate::cache::key::Id;
use crate::cache::store;

/// How many purges by key are settled in a step.
const SETTLED_AT_ONCE: usize = 256;

/// In how many parts it is noted when something of what has rules was purged.
pub(super) const SEARCH_PURGES: usize = 1024;

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

impl CacheZone {
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

    /// Purges all that has a tag, or whose key begins so.
    pub fn purge_all(self: &Arc<Self>, records: impl IntoIterator<Item = Record>) {
        for record in records {
            self.replay(record.clone(), 0);
            // Afterwards: a journal that is written anew in between has it from the purges.
            self.note_change(&record);
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

    /// Something that this mark is for is about to be purged by its key. What was asked for before, and comes with
    /// rules later, is not stored.
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
}
