//! Purges of a cache: what they remove at once, and when they can be forgotten.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use gale_runtime::ThreadPool;

use super::CacheZone;
use crate::fill::Stage;
use crate::index::{Entry, Evicted};
use crate::journal::Record;
use crate::key::Id;
use crate::store;

/// Purges by key that are settled in one step.
const SETTLED_AT_ONCE: usize = 256;

/// Number of slots for the times of purges that concern marks with rules.
pub(super) const SEARCH_PURGES: usize = 1024;

/// Result of a purge by key.
pub struct Purged {
    /// True if an entry or a response in flight was purged.
    pub had_any: bool,
    /// True if the purge was noted for the journal: more responses of the key may be found or arrive.
    pub is_noted: bool,
}

impl Purged {
    /// Adds the result of another purge.
    pub fn join(&mut self, other: Purged) {
        self.had_any |= other.had_any;
        self.is_noted |= other.is_noted;
    }
}

impl CacheZone {
    /// Purges the stored response of a key, and those being fetched.
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
        // Everything in the index and the table of fills is gone by now. The number covers the rest: variants, requests
        // whose responses have not begun, files that are not in the index yet, and this file until it is removed.
        let is_noted = had_any || self.is_cold() || self.in_flight.lock().keys.contains_key(id);
        if is_noted {
            self.purges.add_key(id, number, is_soft);
            self.note_change(&Record::PurgedKey { id: *id, number, is_soft });
        }
        drop(fills);
        self.remove_files(removed.as_ref().and_then(Evicted::of).into_iter().collect(), pool);
        Purged { had_any, is_noted }
    }

    /// Purges all entries with a tag, or whose keys begin with a prefix.
    pub fn purge_all(self: &Arc<Self>, records: impl IntoIterator<Item = Record>) {
        for record in records {
            self.replay(record.clone(), 0);
            // In this order: a journal that is rewritten in between takes the record from the purges.
            self.note_change(&record);
        }
    }

    /// Checks the files of some purged keys; may block. Once no older response is in flight and the key's own file is
    /// gone, no older response can be found, variants included, and the purge is forgotten.
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

    /// Notes that a key of this mark is about to be purged. A response requested before that arrives with rules is not
    /// stored.
    pub fn note_search_purge(&self, mark: &Id) {
        self.search_purge_of(mark).fetch_max(self.next_number(), SeqCst);
    }

    /// True if a key of this mark was purged after the request with this number.
    pub fn is_search_purged(&self, mark: &Id, number: u64) -> bool {
        self.search_purge_of(mark).load(SeqCst) > number
    }

    fn search_purge_of(&self, mark: &Id) -> &AtomicU64 {
        &self.search_purges[usize::from(u16::from_le_bytes([mark[12], mark[13]])) % SEARCH_PURGES]
    }
}
