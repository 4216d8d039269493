//! A table of texts that entries of the index have by their places, such as lists of fields in `Vary`.
//!
//! The index counts how many entries have a place. When the table is full, a place that no entry has gets another text;
//! if there is none, nothing more is told apart until entries have gone.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use parking_lot::{RwLock, RwLockReadGuard};

use crate::cache::index::{PLACES_MAX, PlaceUses};

/// See the file's head. What a text means is beside it.
pub(super) struct Places<T> {
    known: RwLock<Known<T>>,
    /// Whether there was ever anything in it: read by each request, which then need not write to the lock.
    has_any: AtomicBool,
    /// Something found no place, and nobody was told of it.
    is_news: AtomicBool,
    /// Something found no place, and nothing has got one since.
    is_full: AtomicBool,
}

/// What is in a table.
pub(super) struct Known<T> {
    rows: Vec<(Arc<[u8]>, T)>,
    by_text: HashMap<Arc<[u8]>, u32>,
}

impl<T> Default for Places<T> {
    fn default() -> Places<T> {
        let known = RwLock::new(Known { rows: Vec::new(), by_text: HashMap::new() });
        Places {
            known,
            has_any: AtomicBool::new(false),
            is_news: AtomicBool::new(false),
            is_full: AtomicBool::new(false),
        }
    }
}

impl<T: Clone> Places<T> {
    /// Whether there was never anything in it.
    pub fn is_empty(&self) -> bool {
        !self.has_any.load(Acquire)
    }

    /// What is in it. As long as this is held, no place gets another text.
    pub fn read(&self) -> RwLockReadGuard<'_, Known<T>> {
        self.known.read()
    }

    /// The place of a text that means this; `None` if all places are in use. It stays that of the text as long as what
    /// is returned is held, or an entry has it.
    pub fn take<'u>(&self, text: &[u8], value: &T, uses: &'u PlaceUses) -> Option<Taken<'u>> {
        if let Some(&place) = self.known.read().by_text.get(text) {
            return Some(Taken::new(place, uses));
        }
        let mut known = self.known.write();
        if let Some(&place) = known.by_text.get(text) {
            return Some(Taken::new(place, uses));
        }
        let row = (Arc::from(text), value.clone());
        let place = if known.rows.len() < PLACES_MAX {
            known.rows.push(row.clone());
            known.rows.len() as u32 - 1
        } else {
            let Some(place) = (0..PLACES_MAX as u32).find(|&place| uses.is_free(place)) else {
                if !self.is_full.swap(true, Relaxed) {
                    self.is_news.store(true, Relaxed);
                }
                return None;
            };
            let (before, _) = std::mem::replace(&mut known.rows[place as usize], row.clone());
            known.by_text.remove(&before);
            place
        };
        known.by_text.insert(row.0, place);
        self.has_any.store(true, Release);
        self.is_full.store(false, Relaxed);
        Some(Taken::new(place, uses))
    }

    /// Whether it has become full since this was asked before.
    pub fn take_news(&self) -> bool {
        self.is_news.swap(false, Relaxed)
    }
}

impl<T> Known<T> {
    /// The text of a place, and what it means.
    pub fn get(&self, place: u32) -> Option<&(Arc<[u8]>, T)> {
        self.rows.get(place as usize)
    }
}

/// A place that is used although no entry may have it yet. It is made under the table's lock.
pub(super) struct Taken<'u> {
    /// The place.
    pub place: u32,
    uses: &'u PlaceUses,
}

impl<'u> Taken<'u> {
    fn new(place: u32, uses: &'u PlaceUses) -> Taken<'u> {
        uses.count(place, 1);
        Taken { place, uses }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.uses.count(self.place, -1);
    }
}
