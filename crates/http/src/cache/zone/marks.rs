//! What responses depend on besides their keys: the fields that `Vary` names, and the rules of `No-Vary-Search`. The
//! index has numbers for them, which are places in these tables.

use std::sync::Arc;

use super::CacheZone;
use crate::cache::index::{Entry, Evicted, Kind};
use crate::cache::key::Id;
use crate::cache::policy::SearchRules;
use crate::cache::purges::Verdict;

/// Most lists of field names in `Vary` that a cache tells apart.
const VARY_LISTS_MAX: usize = 4096;

/// Most rules of `No-Vary-Search` that a cache tells apart.
const SEARCH_RULES_MAX: usize = 4096;

/// Rules by their text.
pub(super) type KnownRules = (Box<[u8]>, Arc<SearchRules>);

impl CacheZone {
    /// The number of a list of field names in `Vary`; `None` if there are too many.
    pub fn vary_list(&self, names: &[u8]) -> Option<u32> {
        let find = |lists: &[Arc<[u8]>]| lists.iter().position(|list| **list == *names).map(|place| place as u32);
        if let Some(place) = find(&self.vary_lists.read()) {
            return Some(place);
        }
        let mut lists = self.vary_lists.write();
        find(&lists).or_else(|| {
            (lists.len() < VARY_LISTS_MAX).then(|| {
                lists.push(names.into());
                (lists.len() - 1) as u32
            })
        })
    }

    /// Notes that what a key stands for depends on these fields. Returns the number that variants' names are made of;
    /// `None` if that was purged since, or nothing more can be noted.
    pub fn note_vary(self: &Arc<Self>, primary: &Id, names: &[u8], number: u64, now: u64) -> Option<u64> {
        if self.purges.judge_key(primary, number) == Verdict::Gone {
            return None;
        }
        let list = self.vary_list(names)?;
        let known = self.index.with(primary, |entry| match entry {
            Some(entry) if entry.kind == Kind::Varies(list) => Some(entry.number),
            _ => None,
        });
        if known.is_some() {
            return known;
        }
        if let Some(before) = self.index.remove(primary, |_| true) {
            self.remove_files(Evicted::of(&before).into_iter().collect(), None);
        }
        let mut entry = Entry::new(*primary, Kind::Varies(list), now);
        entry.number = number;
        self.put(entry);
        Some(number)
    }

    /// Whether there may be marks of `No-Vary-Search`.
    pub fn has_searches(&self) -> bool {
        !self.search_rules.read().is_empty()
    }

    /// The rules of a mark, which counts as asked for, and its number.
    pub fn search(&self, mark: &Id, now: u64) -> Option<(Arc<SearchRules>, u64)> {
        let entry = self.index.touch(mark, now)?;
        let Kind::Searches(place) = entry.kind else { return None };
        Some((Arc::clone(&self.search_rules.read().get(place as usize)?.1), entry.number))
    }

    /// Notes which differences between queries matter in what has this mark, by the text of the rules. Returns the
    /// number that is in the keys of entries; `None` if that was purged since, later rules hold, or nothing more can be
    /// noted.
    pub fn note_search(self: &Arc<Self>, mark: &Id, rules: &[u8], number: u64, now: u64) -> Option<u64> {
        if self.purges.judge_key(mark, number) == Verdict::Gone {
            return None;
        }
        let kind = Kind::Searches(self.search_place(rules)?);
        let known = self.index.with(mark, |entry| match entry {
            Some(entry) if entry.kind == kind => Some(Some(entry.number)),
            Some(entry) if matches!(entry.kind, Kind::Searches(_)) && entry.number > number => Some(None),
            _ => None,
        });
        if let Some(known) = known {
            return known;
        }
        self.put(Entry { number, ..Entry::new(*mark, kind, now) });
        Some(number)
    }

    /// The place of rules in the table; `None` if there are too many, or these are none.
    fn search_place(&self, text: &[u8]) -> Option<u32> {
        let find = |known: &[KnownRules]| known.iter().position(|(own, _)| **own == *text);
        if let Some(place) = find(&self.search_rules.read()) {
            return Some(place as u32);
        }
        let rules = Arc::new(SearchRules::decode(text)?);
        let mut known = self.search_rules.write();
        let place = find(&known).or_else(|| {
            (known.len() < SEARCH_RULES_MAX).then(|| {
                known.push((text.into(), rules));
                known.len() - 1
            })
        });
        place.map(|place| place as u32)
    }
}
