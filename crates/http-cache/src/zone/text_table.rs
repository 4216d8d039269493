//! A table of texts, such as lists of fields in `Vary`, that entries of the index refer to by row.
//!
//! The index counts the entries of each row. When the table is full, an unused row gets another text; if there is none,
//! new texts are refused until entries are removed.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use parking_lot::{RwLock, RwLockReadGuard};

use crate::index::{ROWS_MAX, RowUses};

/// The table, see the head of the file. Each text has a value of type `T`, its meaning.
pub(super) struct TextTable<T> {
    known: RwLock<Known<T>>,
    /// True if the table ever had a text. Each request reads it, and need not write to the lock if it is false.
    has_any: AtomicBool,
    /// True if a text was refused and that was not reported yet.
    is_news: AtomicBool,
    /// True if a text was refused and none was accepted since.
    is_full: AtomicBool,
}

/// The contents of a table.
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
    /// True if the table never had a text.
    pub fn is_empty(&self) -> bool {
        !self.has_any.load(Acquire)
    }

    /// Locks the contents for reading. No row gets another text meanwhile.
    pub fn read(&self) -> RwLockReadGuard<'_, Known<T>> {
        self.known.read()
    }

    /// The row of a text with this meaning; `None` if all rows are in use. The row keeps the text as long as the result
    /// is held, or an entry uses it.
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

    /// True if a text was refused for the first time since the last call.
    pub fn take_news(&self) -> bool {
        self.is_news.swap(false, Relaxed)
    }
}

impl<T> Known<T> {
    /// The text of a row and its meaning.
    pub fn get(&self, row: u32) -> Option<&(Arc<[u8]>, T)> {
        self.rows.get(row as usize)
    }
}

/// A use of a row before an entry uses it. Created under the table's lock.
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
