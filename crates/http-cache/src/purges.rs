//! Purges by key, prefix and tag, each of which covers all entries older than itself. A purge is answered at once,
//! whatever the number of entries: an entry is judged when it is requested, and the purger removes the files later.
//!
//! A purge by key is kept for entries outside of the index: unknown files, variants, and responses in flight. It is
//! forgotten once none of these can exist ([`Purges::hard_keys_below`]).
//!
//! Bounded: beyond `PURGES_MAX` the oldest purges are merged into one that covers everything.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;

use super::journal::Record;
use super::key::Id;
use super::policy::Verdict;
use super::search::base_of;

/// Maximum number of purges.
const PURGES_MAX: usize = 10_000;

#[derive(Clone, Copy, Default)]
struct Purge {
    /// Entries up to this number are gone.
    gone: u64,
    /// Entries up to this number are stale.
    stale: u64,
}

/// The purges of a cache, see the head of the file.
#[derive(Default)]
pub struct Purges {
    state: RwLock<State>,
    /// True if there are purges. Each request reads it, and need not write to the lock if there are none.
    are_any: AtomicBool,
}

#[derive(Default)]
struct State {
    everything: Purge,
    keys: HashMap<Id, Purge>,
    tags: HashMap<u64, Purge>,
    /// Sorted, so that the prefixes of a key are found without a full search.
    prefixes: BTreeMap<Box<[u8]>, Purge>,
}

impl Purge {
    fn add(&mut self, number: u64, is_soft: bool) {
        let to = if is_soft { &mut self.stale } else { &mut self.gone };
        *to = number.max(*to);
    }

    fn judge(self, number: u64) -> Verdict {
        if number <= self.gone {
            Verdict::Gone
        } else if number <= self.stale {
            Verdict::Stale
        } else {
            Verdict::Valid
        }
    }

    fn join(&mut self, other: Purge) {
        self.gone = self.gone.max(other.gone);
        self.stale = self.stale.max(other.stale);
    }
}

impl Purges {
    /// Purges all entries up to this number with the key, including variants.
    pub fn add_key(&self, key: &Id, number: u64, is_soft: bool) {
        self.change(|state| {
            state.keys.entry(*key).or_default().add(number, is_soft);
            join_oldest(state);
        });
    }

    /// Purges all entries up to this number with the tag.
    pub fn add_tag(&self, tag: u64, number: u64, is_soft: bool) {
        self.change(|state| {
            state.tags.entry(tag).or_default().add(number, is_soft);
            join_oldest(state);
        });
    }

    /// Purges all entries up to this number whose keys begin with the prefix.
    pub fn add_prefix(&self, prefix: &[u8], number: u64, is_soft: bool) {
        self.change(|state| {
            state.prefixes.entry(prefix.into()).or_default().add(number, is_soft);
            join_oldest(state);
        });
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.write();
        change(&mut state);
        self.are_any.store(!state.is_empty(), Ordering::Release);
    }

    /// Effect on an entry. `primary` is the sum of its key.
    pub fn judge(&self, primary: &Id, key: &[u8], tags: &[u64], number: u64) -> Verdict {
        let state = self.state.read();
        let of_key = state.keys.get(primary).map_or(Verdict::Valid, |purge| purge.judge(number));
        let of_tags = tags.iter().filter_map(|tag| state.tags.get(tag)).map(|purge| purge.judge(number));
        let of_prefixes = state.prefixes_of(key).judge(number);
        of_tags.fold(of_key.max(of_prefixes).max(state.everything.judge(number)), Verdict::max)
    }

    /// Effect on an entry of which only the sum of the key is known.
    pub fn judge_key(&self, primary: &Id, number: u64) -> Verdict {
        let state = self.state.read();
        let of_key = state.keys.get(primary).map_or(Verdict::Valid, |purge| purge.judge(number));
        of_key.max(state.everything.judge(number))
    }

    /// True if there are no purges.
    pub fn is_empty(&self) -> bool {
        !self.are_any.load(Ordering::Acquire)
    }

    /// Number of hard purges, which a walk over all files carries out.
    pub fn count_hard(&self) -> usize {
        let state = self.state.read();
        let named = state.keys.values().chain(state.tags.values()).chain(state.prefixes.values());
        named.chain([&state.everything]).filter(|purge| purge.gone > 0).count()
    }

    /// All purges, as records for the journal.
    pub fn records(&self) -> Vec<Record> {
        let state = self.state.read();
        let mut records = Vec::new();
        for (id, purge) in &state.keys {
            for (number, is_soft) in [(purge.gone, false), (purge.stale, true)].into_iter().filter(|(n, _)| *n > 0) {
                records.push(Record::PurgedKey { id: *id, number, is_soft });
            }
        }
        let tags = state.tags.iter().map(|(tag, purge)| (Some(*tag), &b""[..], *purge));
        let prefixes = state.prefixes.iter().map(|(prefix, purge)| (None, &**prefix, *purge));
        let everything = std::iter::once((None, &b""[..], state.everything));
        for (tag, prefix, purge) in tags.chain(prefixes).chain(everything) {
            for (number, is_soft) in [(purge.gone, false), (purge.stale, true)].into_iter().filter(|(n, _)| *n > 0) {
                records.push(match tag {
                    Some(tag) => Record::PurgedTag { tag, number, is_soft },
                    None => Record::PurgedPrefix { prefix: prefix.into(), number, is_soft },
                });
            }
        }
        records
    }

    /// At most `most` keys with a hard purge below this number, with the numbers of these purges.
    pub fn hard_keys_below(&self, number: u64, most: usize) -> Vec<(Id, u64)> {
        let state = self.state.read();
        let below = state.keys.iter().filter(|(_, purge)| purge.gone > 0 && purge.gone < number && purge.stale == 0);
        below.map(|(id, purge)| (*id, purge.gone)).take(most).collect()
    }

    /// Forgets a purge: no file of the key is older than this number, and none will be.
    pub fn forget_key(&self, key: &Id, number: u64) {
        self.change(|state| {
            if state.keys.get(key).is_some_and(|purge| purge.gone.max(purge.stale) <= number) {
                state.keys.remove(key);
            }
        });
    }

    /// Forgets the hard purges up to this number: all files were checked since, and no older response is in flight.
    /// Soft purges stay, because stale entries stay as long as they are requested.
    pub fn forget_hard_until(&self, number: u64) {
        let stays = |purge: &mut Purge| {
            if purge.gone <= number {
                purge.gone = 0;
            }
            purge.gone > 0 || purge.stale > 0
        };
        self.change(|state| {
            state.keys.retain(|_, purge| stays(purge));
            state.tags.retain(|_, purge| stays(purge));
            state.prefixes.retain(|_, purge| stays(purge));
            stays(&mut state.everything);
        });
    }
}

impl State {
    /// All purges of prefixes of a key, merged. There may be ten thousand, of which only a few match: each step goes to
    /// the next shorter matching prefix, or to the common part.
    fn prefixes_of(&self, key: &[u8]) -> Purge {
        let mut all = Purge::default();
        let mut most = key.len();
        while let Some((prefix, purge)) = self.up_to(&key[..most]) {
            let shared = prefix.iter().zip(key).take_while(|(one, other)| one == other).count();
            if shared == prefix.len() {
                all.join(purge);
                let Some(shorter) = shared.checked_sub(1) else { break };
                most = shorter;
            } else {
                most = shared;
            }
        }
        // An entry with rules stands for many queries, so all prefixes that begin with its path cover it too.
        if let Some(base) = base_of(key) {
            let from_base = (Bound::Included(base), Bound::Unbounded);
            let below = self.prefixes.range::<[u8], _>(from_base).take_while(|(prefix, _)| prefix.starts_with(base));
            below.for_each(|(_, purge)| all.join(*purge));
        }
        all
    }

    /// The last prefix that does not sort behind this text.
    fn up_to(&self, text: &[u8]) -> Option<(&[u8], Purge)> {
        let (prefix, purge) = self.prefixes.range::<[u8], _>((Bound::Unbounded, Bound::Included(text))).next_back()?;
        Some((prefix, *purge))
    }

    fn is_empty(&self) -> bool {
        self.everything.gone == 0 && self.everything.stale == 0 && self.count() == 0
    }

    fn count(&self) -> usize {
        self.keys.len() + self.tags.len() + self.prefixes.len()
    }
}

/// Enforces the bound: the older half of the purges is merged into one that covers everything as old.
fn join_oldest(state: &mut State) {
    if state.count() <= PURGES_MAX {
        return;
    }
    let latest = |purge: &Purge| purge.gone.max(purge.stale);
    let all = state.keys.values().chain(state.tags.values()).chain(state.prefixes.values());
    let mut numbers: Vec<u64> = all.map(latest).collect();
    let middle = numbers.len() / 2;
    let bound = *numbers.select_nth_unstable(middle).1;
    let everything = &mut state.everything;
    let mut stays = |purge: &Purge| {
        let is_old = latest(purge) <= bound;
        if is_old {
            everything.join(*purge);
        }
        !is_old
    };
    state.keys.retain(|_, purge| stays(purge));
    state.tags.retain(|_, purge| stays(purge));
    state.prefixes.retain(|_, purge| stays(purge));
}

/// The hash of a tag.
pub fn tag_hash(tag: &[u8]) -> u64 {
    // It is stored in files, so it must be the same in every process and on every machine.
    let sum = super::key::id_of(tag);
    u64::from_le_bytes(sum[..8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::SearchRules;
    use crate::search::SearchKey;

    #[test]
    fn purges_apply_to_older_responses() {
        let purges = Purges::default();
        purges.add_tag(7, 100, false);
        purges.add_tag(8, 100, true);
        purges.add_prefix(b"/a", 50, false);
        let judge = |key: &str, tags: &[u64], number| purges.judge(&[0; 16], key.as_bytes(), tags, number);
        assert_eq!((judge("/", &[7], 100), judge("/", &[7], 101)), (Verdict::Gone, Verdict::Valid));
        assert_eq!((judge("/", &[8], 100), judge("/", &[8, 7], 100)), (Verdict::Stale, Verdict::Gone));
        assert_eq!((judge("/ab", &[], 50), judge("/b", &[], 50)), (Verdict::Gone, Verdict::Valid));
        purges.forget_hard_until(100);
        assert_eq!((judge("/", &[7], 100), judge("/", &[8], 100)), (Verdict::Valid, Verdict::Stale));
    }

    #[test]
    fn a_key_has_every_prefix_that_it_begins_with_and_no_other() {
        let purges = Purges::default();
        let prefixes = ["/a", "/a/", "/a/b", "/a/bc", "/a/b/d", "/ab", "/b", "/a/b/c/e", "/a/b/c", "/a/a"];
        for (at, prefix) in prefixes.iter().enumerate() {
            purges.add_prefix(prefix.as_bytes(), at as u64 + 1, false);
        }
        for key in ["", "/", "/a", "/a/b", "/a/b/c", "/a/b/c/d", "/a/b/ce", "/ab/c", "/b/a", "/c", "/a/b/", "\u{7f}"] {
            let latest = (1..).zip(prefixes).filter(|(_, prefix)| key.starts_with(prefix)).map(|(at, _)| at).max();
            for number in 1..=11 {
                let is_gone = purges.judge(&[0; 16], key.as_bytes(), &[], number) == Verdict::Gone;
                assert_eq!(is_gone, latest.is_some_and(|latest| number <= latest), "{key} {number}");
            }
        }
        purges.add_prefix(b"", 20, true);
        assert_eq!(purges.judge(&[0; 16], b"/c", &[], 20), Verdict::Stale);
    }

    #[test]
    fn prefix_purges_match_entries_with_rules() {
        let rules = SearchRules::parse([&b"params=(\"utm\")"[..]]).unwrap();
        let entry = SearchKey::of_target(b"http://a", b"/x?utm=1&b=2").unwrap().entry(&rules, 7).unwrap();
        let judge = |prefix: &str, key: &[u8]| {
            let purges = Purges::default();
            purges.add_prefix(prefix.as_bytes(), 5, false);
            purges.judge(&[0; 16], key, &[], 5) == Verdict::Gone
        };
        for (prefix, is_meant) in [
            ("", true),
            ("http://a/", true),
            ("http://a/x", true),
            ("http://a/x?", true),
            ("http://a/x?utm=1", true),
            ("http://a/xy", false),
            ("http://a/y", false),
            ("http://b", false),
        ] {
            assert_eq!(judge(prefix, &entry), is_meant, "{prefix}");
        }
        assert!(!judge("/x?a", b"/x") && !judge("a", b"") && !judge("a", &[0; 40]));
    }

    #[test]
    fn check_of_every_file_leaves_only_soft_purges() {
        let purges = Purges::default();
        purges.add_tag(7, 100, false);
        purges.add_tag(7, 90, true);
        purges.add_tag(8, 100, true);
        purges.add_prefix(b"/a", 120, false);
        assert_eq!(purges.count_hard(), 2);
        purges.forget_hard_until(110);
        // Only the purge that is younger than the last walk is left.
        assert_eq!(purges.count_hard(), 1);
        let judge = |key: &str, tags: &[u64], number| purges.judge(&[0; 16], key.as_bytes(), tags, number);
        assert_eq!((judge("/", &[7], 90), judge("/", &[7], 91)), (Verdict::Stale, Verdict::Valid));
        assert_eq!((judge("/", &[8], 100), judge("/a", &[], 120)), (Verdict::Stale, Verdict::Gone));
        purges.forget_hard_until(120);
        assert_eq!((purges.count_hard(), purges.records().len()), (0, 2));
    }

    #[test]
    fn too_many_purges_become_one_of_everything() {
        let purges = Purges::default();
        for tag in 0..=PURGES_MAX as u64 {
            purges.add_tag(tag, 5, false);
        }
        assert_eq!(purges.judge(&[0; 16], b"any", &[], 5), Verdict::Gone);
        assert_eq!(purges.judge(&[0; 16], b"any", &[], 6), Verdict::Valid);
    }

    #[test]
    fn purges_beyond_the_bound_purge_only_entries_as_old_as_their_older_half() {
        let purges = Purges::default();
        for tag in 1..=PURGES_MAX as u64 + 1 {
            purges.add_tag(tag, tag, false);
        }
        let count = purges.state.read().count();
        assert!((PURGES_MAX / 2 - 1..PURGES_MAX).contains(&count), "{count}");
        assert_eq!(purges.judge(&[0; 16], b"any", &[], PURGES_MAX as u64 / 4), Verdict::Gone);
        assert_eq!(purges.judge(&[0; 16], b"any", &[], PURGES_MAX as u64 - 10), Verdict::Valid);
    }

    #[test]
    fn purges_by_key_are_about_its_variants_too_and_are_forgotten() {
        let purges = Purges::default();
        purges.add_key(&[1; 16], 100, false);
        purges.add_key(&[2; 16], 100, true);
        let judge = |id: u8, number| purges.judge(&[id; 16], b"/", &[], number);
        assert_eq!((judge(1, 100), judge(1, 101), judge(3, 1)), (Verdict::Gone, Verdict::Valid, Verdict::Valid));
        assert_eq!((judge(2, 100), judge(2, 101)), (Verdict::Stale, Verdict::Valid));
        assert_eq!(purges.records().len(), 2);
        purges.forget_key(&[1; 16], 99);
        assert_eq!(judge(1, 100), Verdict::Gone);
        assert_eq!(purges.hard_keys_below(101, 9), [([1; 16], 100)]);
        assert!(purges.hard_keys_below(100, 9).is_empty());
        purges.forget_key(&[1; 16], 100);
        assert_eq!((judge(1, 100), judge(2, 100)), (Verdict::Valid, Verdict::Stale));
        purges.forget_key(&[2; 16], 100);
        assert!(purges.records().is_empty());
    }
}
