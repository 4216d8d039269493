//! What was purged by prefix and by tag: everything older than the purge. A purge is answered at once, whatever the
//! number of entries; they are found out when they are asked for, and the purger takes their files away.
//!
//! Bounded: beyond `PURGES_MAX` the oldest ones are joined into one of everything.

use std::collections::HashMap;

use parking_lot::RwLock;

use super::journal::Record;

/// Most purges that are remembered.
const PURGES_MAX: usize = 10_000;

/// What becomes of what was purged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// It was not.
    Valid,
    /// It counts as stale.
    Stale,
    /// It is gone.
    Gone,
}

#[derive(Clone, Copy, Default)]
struct Purge {
    /// Entries up to this number are gone.
    gone: u64,
    /// Entries up to this number are stale.
    stale: u64,
}

/// See the file's head.
#[derive(Default)]
pub struct Purges(RwLock<State>);

#[derive(Default)]
struct State {
    everything: Purge,
    tags: HashMap<u64, Purge>,
    prefixes: Vec<(Box<[u8]>, Purge)>,
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
    /// All entries up to this number that have the tag are purged.
    pub fn add_tag(&self, tag: u64, number: u64, is_soft: bool) {
        let mut state = self.0.write();
        state.tags.entry(tag).or_default().add(number, is_soft);
        if state.tags.len() > PURGES_MAX {
            let all = std::mem::take(&mut state.tags);
            all.into_values().for_each(|purge| state.everything.join(purge));
        }
    }

    /// All entries up to this number whose keys begin so are purged.
    pub fn add_prefix(&self, prefix: &[u8], number: u64, is_soft: bool) {
        let mut state = self.0.write();
        let same = state.prefixes.iter().position(|(known, _)| **known == *prefix);
        let place = same.unwrap_or_else(|| {
            state.prefixes.push((prefix.into(), Purge::default()));
            state.prefixes.len() - 1
        });
        state.prefixes[place].1.add(number, is_soft);
        if state.prefixes.len() > PURGES_MAX {
            let all = std::mem::take(&mut state.prefixes);
            all.into_iter().for_each(|(_, purge)| state.everything.join(purge));
        }
    }

    /// What became of an entry.
    pub fn judge(&self, key: &[u8], tags: &[u64], number: u64) -> Verdict {
        let state = self.0.read();
        let of_tags = tags.iter().filter_map(|tag| state.tags.get(tag)).map(|purge| purge.judge(number));
        let of_prefixes = state.prefixes.iter().filter(|(prefix, _)| key.starts_with(prefix));
        let of_prefixes = of_prefixes.map(|(_, purge)| purge.judge(number));
        of_tags.chain(of_prefixes).fold(state.everything.judge(number), Verdict::max)
    }

    /// Whether there are any.
    pub fn is_empty(&self) -> bool {
        let state = self.0.read();
        state.everything.gone == 0 && state.everything.stale == 0 && state.tags.is_empty() && state.prefixes.is_empty()
    }

    /// All of them, for the journal.
    pub fn records(&self) -> Vec<Record> {
        let state = self.0.read();
        let mut records = Vec::new();
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

    /// All files have been looked at since this number: what was purged before is gone.
    pub fn forget_hard_until(&self, number: u64) {
        let mut state = self.0.write();
        let is_done = |purge: &Purge| purge.gone <= number && purge.stale == 0;
        state.tags.retain(|_, purge| !is_done(purge));
        state.prefixes.retain(|(_, purge)| !is_done(purge));
        if is_done(&state.everything) {
            state.everything = Purge::default();
        }
    }
}

/// A tag as it is kept.
pub fn tag_hash(tag: &[u8]) -> u64 {
    // Stored in files: the same in every process, whatever the machine.
    let sum = super::key::id_of(tag);
    u64::from_le_bytes(sum[..8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn purges_are_about_what_is_older() {
        let purges = Purges::default();
        assert!(purges.is_empty());
        purges.add_tag(7, 100, false);
        purges.add_tag(8, 100, true);
        purges.add_prefix(b"/a", 50, false);
        let judge = |key: &str, tags: &[u64], number| purges.judge(key.as_bytes(), tags, number);
        assert_eq!((judge("/", &[7], 100), judge("/", &[7], 101)), (Verdict::Gone, Verdict::Valid));
        assert_eq!((judge("/", &[8], 100), judge("/", &[8, 7], 100)), (Verdict::Stale, Verdict::Gone));
        assert_eq!((judge("/ab", &[], 50), judge("/b", &[], 50)), (Verdict::Gone, Verdict::Valid));
        purges.forget_hard_until(100);
        assert_eq!((judge("/", &[7], 100), judge("/", &[8], 100)), (Verdict::Valid, Verdict::Stale));
    }

    #[test]
    fn too_many_purges_become_one_of_everything() {
        let purges = Purges::default();
        for tag in 0..=PURGES_MAX as u64 {
            purges.add_tag(tag, 5, false);
        }
        assert_eq!(purges.judge(b"any", &[], 5), Verdict::Gone);
        assert_eq!(purges.judge(b"any", &[], 6), Verdict::Valid);
    }
}
