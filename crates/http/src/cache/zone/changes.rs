//! What of a cache is to be written to its journal, and what that does when it is read.

use std::sync::Arc;

use parking_lot::MutexGuard;

use super::CacheZone;
use crate::cache::index::{Entry, Kind};
use crate::cache::journal::{Changes, Record};
use crate::cache::purges::Verdict;

/// Most bytes of changes that wait for the journal: beyond, it is written anew.
const CHANGES_MAX: usize = 16 << 20;

/// What is to be written to the journal.
#[derive(Default)]
pub(super) struct Journal {
    /// This process writes it.
    is_written: bool,
    changes: Changes,
    /// How many records it has.
    records: u64,
    /// Something could not be written: its end may be torn, and only all of it anew is right.
    is_torn: bool,
}

impl CacheZone {
    /// Whether this process manages the directory: it writes the journal.
    pub fn set_managed(&self, is_managed: bool) {
        self.journal.lock().is_written = is_managed;
    }

    /// Whether this process writes the journal.
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
            // What is appended from here on would lack it.
            journal.is_torn = true;
        }
    }

    /// The right to write the file of the journal: one after the other.
    pub fn journal_turn(&self) -> MutexGuard<'_, ()> {
        self.journal_turn.lock()
    }

    /// What is to be appended to the journal.
    pub fn take_changes(&self) -> Changes {
        std::mem::take(&mut self.journal.lock().changes)
    }

    /// A record could not be written, or not all of it.
    pub fn note_torn_journal(&self) {
        self.journal.lock().is_torn = true;
    }

    /// Whether the journal's end may be torn: nothing is to be appended to it.
    pub fn journal_is_torn(&self) -> bool {
        self.journal.lock().is_torn
    }

    /// Whether the journal has to be written anew: its end is torn, or it has much that counts no more.
    pub fn journal_is_long(&self) -> bool {
        let journal = self.journal.lock();
        journal.is_torn || journal.records > 2 * self.index.stored() + 10_000
    }

    /// The journal was written anew, with so many records.
    pub fn note_journal(&self, records: u64) {
        let mut journal = self.journal.lock();
        (journal.records, journal.is_torn) = (records, false);
    }

    /// An entry as the journal has it.
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

    /// Does again what the journal says.
    pub fn replay(self: &Arc<Self>, record: Record, now: u64) {
        match record {
            Record::Stored { id, number, size, times, must_revalidate } => {
                self.note_number(number);
                let known = self.index.with(&id, |entry| entry.is_some_and(|entry| entry.number >= number));
                if !known && self.purges.judge_key(&id, number) != Verdict::Gone {
                    let mut entry = Entry::new(id, Kind::Stored, now);
                    (entry.number, entry.size, entry.must_revalidate) = (number, self.room_for(size), must_revalidate);
                    [entry.fresh_until, entry.stale_while_revalidate, entry.stale_if_error, entry.received] = times;
                    // Hits are not in the journal, so it counts as asked for now: what nobody wants goes when it has
                    // been here for `inactive` again.
                    // What does not fit stays on disk for the loader.
                    self.index.insert(entry);
                }
            }
            Record::Varies { id, number, names } => {
                self.note_number(number);
                // Purged, or one too many: it is as if it were not there.
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
