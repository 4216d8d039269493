//! A table of texts that entries of the index have by their rows, such as lists of fields in `Vary`.
//!
//! The index counts how many entries have a row. When the table is full, a row that no entry has gets another text;
//! if there is none, nothing more is told apart until entries have gone.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use parking_lot::{RwLock, RwLockReadGuard};

use crate::cache::index::{ROWS_MAX, RowUses};

/// See the file's head. What a text means is beside it.
pub(super) struct TextTable<T> {
    known: RwLock<Known<T>>,
    /// Whether there was ever anything in it: read by each request, which then need not write to the lock.
    has_any: AtomicBool,
    /// Something found no row, and nobody was told of it.
    is_news: AtomicBool,
    /// Something found no row, and nothing has got one since.
    is_full: AtomicBool,
}

/// What is in a table.
pub(super) struct Known<T> {
    rows: Vec<(Arc<[u8]>, T)>,
    by_text: HashMap<Arc<[u8]>, u32>,
}

impl<T> Default for TextTable<T> {
    fn default() -> TextTable<T> {
        let known = RwLock::new(Known { rows: Vec::new(), by_text: HashMap::new() });
        TextTable {
            known,
            has_any: AtomicBool::new(false),
            is_news: AtomicBool::new(false),
            is_full: AtomicBool::new(false),
        }
    }
}

impl<T: Clone> TextTable<T> {
    /// Whether there was never anything in it.
    pub fn is_empty(&self) -> bool {
        !self.has_any.load(Acquire)
    }

    /// Its text. As long as this is held, no row gets another text.
    pub fn read(&self) -> RwLockReadGuard<'_, Known<T>> {
        self.known.read()
    }

    /// The row of a text that means this; `None` if all rows are in use. It stays that of the text as long as what
    /// is returned is held, or an entry has it.
    pub fn take<'u>(&self, text: &[u8], value: &T, uses: &'u RowUses) -> Option<Taken<'u>> {
        if let Some(&row) = self.known.read().by_text.get(text) {
            return Some(Taken::new(row, uses));
        }
        let mut known = self.known.write();
        if let Some(&row) = known.by_text.get(text) {
            return Some(Taken::new(row, uses));
        }
        let content = (Arc::from(text), value.clone());
        let row = if known.rows.len() < ROWS_MAX {
            known.rows.push(content.clone());
            known.rows.len() as u32 - 1
        } else {
            let Some(row) = (0..ROWS_MAX as u32).find(|&row| uses.is_free(row)) else {
                if !self.is_full.swap(true, Relaxed) {
                    self.is_news.store(true, Relaxed);
                }
                return None;
            };
            let (before, _) = std::mem::replace(&mut known.rows[row as usize], content.clone());
            known.by_text.remove(&before);
            row
        };
        known.by_text.insert(content.0, row);
        self.has_any.store(true, Release);
        self.is_full.store(false, Relaxed);
        Some(Taken::new(row, uses))
    }

    /// Whether it has become full since this was asked before.
    pub fn take_news(&self) -> bool {
        self.is_news.swap(false, Relaxed)
    }
}

impl<T> Known<T> {
    /// The text of a row, and what it means.
    pub fn get(&self, row: u32) -> Option<&(Arc<[u8]>, T)> {
        self.rows.get(row as usize)
    }
}

/// A row that is used although no entry may have it yet. It is made under the table's lock.
pub(super) struct Taken<'u> {
    /// The row.
    pub row: u32,
    uses: &'u RowUses,
}

impl<'u> Taken<'u> {
    fn new(row: u32, uses: &'u RowUses) -> Taken<'u> {
        uses.count(row, 1);
        Taken { row, uses }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.uses.count(self.row, -1);
    }
}
