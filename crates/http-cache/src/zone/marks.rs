//! Dependencies of responses besides their keys: the fields in `Vary` and the rules of `No-Vary-Search`. The index
//! stores row numbers of these tables. A *mark* is the entry with such a number, with its file.

use std::sync::Arc;

use super::CacheZone;
use super::text_table::TextTable;
use crate::format::{Meta, file_length};
use crate::index::{Entry, Evicted, Kind, ROWS_MAX};
use crate::key::Id;
use crate::policy::Verdict;
use crate::policy::{NotStored, SearchRules};

/// Lists of field names in `Vary`.
pub(super) type VaryLists = TextTable<()>;

/// Rules of `No-Vary-Search`, by their texts.
pub(super) type KnownRules = TextTable<Arc<SearchRules>>;

impl CacheZone {
    /// Records that the response of a key depends on these fields, in a mark whose file has this size, if that is
    /// known. Returns the number that the sums of variants are computed from.
    ///
    /// # Errors
    /// The mark was purged since, or the table is full.
    pub fn note_vary(
        self: &Arc<Self>,
        primary: &Id,
        names: &[u8],
        number: u64,
        size: Option<u64>,
        now: u64,
    ) -> Result<u64, NotStored> {
        if self.purges.judge_key(primary, number) == Verdict::Gone {
            return Err(NotStored::Purged);
        }
        let list = self.vary_lists.take(names, &(), self.index.vary_uses()).ok_or(NotStored::TooManyRules)?;
        let kind = Kind::Varies(list.row);
        let known = self.index.with(primary, |entry| match entry {
            Some(entry) if entry.kind == kind => Some(entry.number),
            _ => None,
        });
        if let Some(known) = known {
            self.note_mark_size(primary, known, size);
            return Ok(known);
        }
        if let Some(before) = self.index.remove(primary, |_| true) {
            self.remove_files(Evicted::of(&before).into_iter().collect(), None);
        }
        let size = self.room_for(size.unwrap_or_else(|| likely_mark_length(names)));
        self.put(Entry { number, size, ..Entry::new(*primary, kind, now) });
        Ok(number)
    }

    /// True if there may be marks of `No-Vary-Search`.
    pub fn has_searches(&self) -> bool {
        !self.search_rules.is_empty()
    }

    /// The rules and the number of a mark; counts a request for it.
    pub fn search(&self, mark: &Id, now: u64) -> Option<(Arc<SearchRules>, u64)> {
        // Held during the lookup, so that the row still has the rules of this mark.
        let known = self.search_rules.read();
        let entry = self.index.touch(mark, now)?;
        let Kind::Searches(row) = entry.kind else { return None };
        Some((Arc::clone(&known.get(row)?.1), entry.number))
    }

    /// Records the rules of a mark, whose file has this size, if that is known. Returns the number for the keys of its
    /// entries.
    ///
    /// # Errors
    /// The mark was purged since, has later rules, or the table is full.
    pub fn note_search(
        self: &Arc<Self>,
        mark: &Id,
        rules: &[u8],
        number: u64,
        size: Option<u64>,
        now: u64,
    ) -> Result<u64, NotStored> {
        if self.purges.judge_key(mark, number) == Verdict::Gone {
            return Err(NotStored::Purged);
        }
        let decoded = Arc::new(SearchRules::decode(rules).ok_or(NotStored::Invalid)?);
        let taken = self.search_rules.take(rules, &decoded, self.index.search_uses());
        let taken = taken.ok_or(NotStored::TooManyRules)?;
        let kind = Kind::Searches(taken.row);
        let known = self.index.with(mark, |entry| match entry {
            Some(entry) if entry.kind == kind => Some(Ok(entry.number)),
            Some(entry) if matches!(entry.kind, Kind::Searches(_)) && entry.number > number => {
                Some(Err(NotStored::Purged))
            }
            _ => None,
        });
        if let Some(known) = known {
            if let Ok(number) = known {
                self.note_mark_size(mark, number, size);
            }
            return known;
        }
        let size = self.room_for(size.unwrap_or_else(|| likely_mark_length(rules)));
        self.put(Entry { number, size, ..Entry::new(*mark, kind, now) });
        Ok(number)
    }

    fn note_mark_size(&self, mark: &Id, number: u64, size: Option<u64>) {
        if let Some(size) = size {
            self.index.set_size(mark, number, self.room_for(size));
        }
    }

    /// The tables that became full since the last call, with their number of rows.
    pub fn take_full_tables(&self) -> impl Iterator<Item = (&'static str, usize)> {
        let lists = self.vary_lists.take_news().then_some(("different \"Vary\" fields", ROWS_MAX));
        let rules = self.search_rules.take_news().then_some(("different \"No-Vary-Search\" rules", ROWS_MAX));
        lists.into_iter().chain(rules)
    }
}

/// Length of a mark's file with this text, if its key is short. The loader finds the exact length.
fn likely_mark_length(text: &[u8]) -> u64 {
    file_length(&Meta { variant: text.into(), ..Meta::default() }, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::{CacheDirectory, PathOptions};
    use crate::key::id_of;
    use crate::zone::Lookup;

    /// A cache with room in its index for more marks than there are rows.
    fn zone() -> Arc<CacheZone> {
        let directory = CacheDirectory { path: "/nonexistent".into(), levels: Default::default() };
        Arc::new(CacheZone::new("one".into(), directory, PathOptions::default(), 2 << 20))
    }

    #[test]
    fn a_row_that_no_mark_has_is_used_again_and_no_other() {
        let zone = zone();
        type Note = fn(&Arc<CacheZone>, &Id, usize, u64) -> Result<u64, NotStored>;
        let vary: Note =
            |zone, id, text, number| zone.note_vary(id, format!("x-{text}").as_bytes(), number, Some(500), 0);
        let search: Note = |zone, id, text, number| {
            let rules = SearchRules::parse([format!("params=(\"{text}\")").as_bytes()]).unwrap().encode();
            zone.note_search(id, &rules, number, Some(500), 0)
        };
        for (note, prefix) in [(vary, "vary"), (search, "search")] {
            let id = |number: usize| id_of(format!("{prefix}{number}").as_bytes());
            for text in 0..ROWS_MAX {
                assert_eq!(note(&zone, &id(text), text, 7), Ok(7));
            }
            let new = ROWS_MAX;
            assert_eq!(note(&zone, &id(new), new, 8), Err(NotStored::TooManyRules));
            // A known list can still be used.
            assert_eq!(note(&zone, &id(new + 1), 5, 9), Ok(9));
            assert_eq!(zone.take_full_tables().count(), 1);
            assert_eq!(note(&zone, &id(new), new, 8), Err(NotStored::TooManyRules));
            assert_eq!(zone.take_full_tables().count(), 0, "it is told once");
            // Two marks use the first of these rows.
            for gone in [5, 6] {
                assert!(zone.index.remove(&id(gone), |_| true).is_some());
            }
            assert_eq!(note(&zone, &id(new), new, 8), Ok(8));
            assert_eq!(note(&zone, &id(new + 2), 6, 10), Err(NotStored::TooManyRules));
            assert_eq!(note(&zone, &id(new + 3), 5, 11), Ok(11));
            assert_eq!(zone.take_full_tables().count(), 1);
        }
        let Lookup::Varies(names, 8) = zone.look(&id_of(format!("vary{ROWS_MAX}").as_bytes()), 0) else { panic!() };
        assert_eq!(*names, *format!("x-{ROWS_MAX}").as_bytes());
        let (rules, number) = zone.search(&id_of(format!("search{ROWS_MAX}").as_bytes()), 0).unwrap();
        let expected = SearchRules::parse([format!("params=(\"{ROWS_MAX}\")").as_bytes()]).unwrap();
        assert_eq!((&*rules, number), (&expected, 8));
        assert_eq!((zone.index.stored(), zone.index.bytes()), (0, 2 * 4097 * 4096));
    }
}
