//! Pending changes for the journal of a cache, and the replay of its records.

use std::sync::Arc;

use parking_lot::MutexGuard;

use super::CacheZone;
use crate::index::{Entry, Kind};
use crate::journal::{Changes, Record};
use crate::policy::Verdict;

/// Maximum size of pending changes, in bytes: beyond it the journal is rewritten.
const CHANGES_MAX: usize = 16 << 20;

/// State of the journal.
#[derive(Default)]
pub(super) struct Journal {
    /// True if this process writes it.
    is_written: bool,
    changes: Changes,
    /// Number of records in it.
    records: u64,
    /// True if a write failed: the end may be torn, and the journal must be rewritten.
    is_torn: bool,
}

impl CacheZone {
    /// Sets whether this process manages the directory, and so writes the journal.
    pub fn set_managed(&self, is_managed: bool) {
        self.journal.lock().is_written = is_managed;
    }

    /// True if this process writes the journal.
    pub fn is_managed(&self) -> bool {
        self.journal.lock().is_written
    }

    /// Notes a change for the journal.
    pub(super) fn note_change(&self, record: &Record) {
        let mut journal = self.journal.lock();
        if journal.is_written && journal.changes.bytes.len() < CHANGES_MAX {
            journal.changes.add(record);
            journal.records += 1;
        } else if journal.is_written {
            // The file would lack this record.
            journal.is_torn = true;
        }
    }

    /// Locks the file of the journal for a writer.
    pub fn journal_turn(&self) -> MutexGuard<'_, ()> {
        self.journal_turn.lock()
    }

    /// Takes the pending changes.
    pub fn take_changes(&self) -> Changes {
        std::mem::take(&mut self.journal.lock().changes)
    }

    /// Notes that a record was not or only partly written.
    pub fn note_torn_journal(&self) {
        self.journal.lock().is_torn = true;
    }

    /// True if the end of the journal may be torn, so that nothing can be appended.
    pub fn journal_is_torn(&self) -> bool {
        self.journal.lock().is_torn
    }

    /// True if the journal must be rewritten: its end is torn, or it has many obsolete records.
    pub fn journal_is_long(&self) -> bool {
        let journal = self.journal.lock();
        journal.is_torn || journal.records > 2 * self.index.stored() + 10_000
    }

    /// Notes that the journal was rewritten with this many records.
    pub fn note_journal(&self, records: u64) {
        let mut journal = self.journal.lock();
        (journal.records, journal.is_torn) = (records, false);
    }

    /// The record of an entry.
    pub fn record_of(&self, entry: &Entry) -> Option<Record> {
        match entry.kind {
            Kind::Varies(list) => {
                let names = self.vary_lists.read().get(list)?.0.to_vec();
                Some(Record::Varies { id: entry.id, number: entry.number, names })
            }
            Kind::Searches(row) => {
                let rules = self.search_rules.read().get(row)?.0.to_vec();
                Some(Record::Searches { id: entry.id, number: entry.number, rules })
            }
            _ => Record::of_entry(entry),
        }
    }

    /// Applies a record of the journal.
    pub fn replay(self: &Arc<Self>, record: Record, now: u64) {
        match record {
            Record::Stored { id, number, size, times, must_revalidate } => {
                self.note_number(number);
                let known = self.index.with(&id, |entry| entry.is_some_and(|entry| entry.number >= number));
                if !known && self.purges.judge_key(&id, number) != Verdict::Gone {
                    let mut entry = Entry::new(id, Kind::Stored, now);
                    (entry.number, entry.size, entry.must_revalidate) = (number, self.room_for(size), must_revalidate);
                    [entry.fresh_until, entry.stale_while_revalidate, entry.stale_if_error, entry.received] = times;
                    // Requests are not in the journal, so the entry is treated as requested now: an unused one is
                    // removed after another `inactive`. An entry that does not fit stays on disk for the loader.
                    self.index.insert(entry);
                }
            }
            Record::Varies { id, number, names } => {
                self.note_number(number);
                // Purged, or the table is full: the record is ignored.
                let _ = self.note_vary(&id, &names, number, None, now);
            }
            Record::Searches { id, number, rules } => {
                self.note_number(number);
                let _ = self.note_search(&id, &rules, number, None, now);
            }
            Record::Gone { id, number } => _ = self.index.remove(&id, |entry| entry.number <= number),
            Record::PurgedKey { id, number, is_soft } => {
                self.note_number(number);
                self.purges.add_key(&id, number, is_soft);
                if !is_soft {
                    self.index.remove(&id, |entry| entry.number <= number);
                }
            }
            Record::PurgedTag { tag, number, is_soft } => {
                self.note_number(number);
                self.purges.add_tag(tag, number, is_soft);
            }
            Record::PurgedPrefix { prefix, number, is_soft } => {
                self.note_number(number);
                self.purges.add_prefix(&prefix, number, is_soft);
            }
        }
    }
}
