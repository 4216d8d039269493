//! Cache of DNS answers within their time to live.
//!
//! It holds a bounded number of entries. At the bound, expired entries are evicted, and if that is not enough, the
//! least recently used quarter. So the amortised cost of an entry is constant, even if an attacker chooses the names.

use std::collections::HashMap;
use std::hash::Hash;

use gale_runtime::Moment;

pub(super) struct Cache<K, V> {
    /// The standard library's map, whose hash is safe for untrusted keys.
    entries: HashMap<K, Entry<V>>,
    entries_max: usize,
    /// Counter of look-ups, which orders entries by last use.
    clock: u64,
}

struct Entry<V> {
    value: V,
    until: Moment,
    used: u64,
}

impl<K: Hash + Eq, V> Cache<K, V> {
    pub fn new(entries_max: usize) -> Self {
        Cache { entries: HashMap::new(), entries_max, clock: 0 }
    }

    /// A cached value that has not expired.
    pub fn get(&mut self, key: &K, now: Moment) -> Option<(&V, Moment)> {
        self.clock += 1;
        let entry = self.entries.get_mut(key).filter(|entry| entry.until > now)?;
        entry.used = self.clock;
        Some((&entry.value, entry.until))
    }

    pub fn insert(&mut self, key: K, value: V, until: Moment, now: Moment) {
        if self.entries.len() >= self.entries_max && !self.entries.contains_key(&key) {
            self.make_room(now);
        }
        self.clock += 1;
        self.entries.insert(key, Entry { value, until, used: self.clock });
    }

    fn make_room(&mut self, now: Moment) {
        self.entries.retain(|_, entry| entry.until > now);
        let kept = self.entries_max - self.entries_max / 4 - 1;
        if self.entries.len() <= kept {
            return;
        }
        let mut uses: Vec<u64> = self.entries.values().map(|entry| entry.used).collect();
        let surplus = uses.len() - kept;
        let (_, last_gone, _) = uses.select_nth_unstable(surplus - 1);
        let last_gone = *last_gone;
        self.entries.retain(|_, entry| entry.used > last_gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Moment = Moment::from_nanos(1_000);
    const LATER: Moment = Moment::from_nanos(2_000);

    #[test]
    fn expired_entry_is_not_found() {
        let mut cache = Cache::new(8);
        cache.insert("a", 1, LATER, NOW);
        assert_eq!(cache.get(&"a", NOW), Some((&1, LATER)));
        assert_eq!(cache.get(&"a", LATER), None);
        cache.insert("a", 2, Moment::from_nanos(3_000), LATER);
        assert_eq!(cache.get(&"a", LATER).map(|found| *found.0), Some(2));
    }

    #[test]
    fn however_many_come_few_stay_and_the_used_ones_do() {
        let mut cache = Cache::new(100);
        for number in 0..10_000 {
            cache.insert(number, number, LATER, NOW);
            assert!(cache.entries.len() <= 100);
            assert!(cache.get(&0, NOW).is_some(), "used all the time, and gone at {number}");
            assert!(cache.get(&number, NOW).is_some());
        }
    }

    #[test]
    fn expired_entries_are_evicted_first() {
        let mut cache = Cache::new(4);
        cache.insert(0, 0, LATER, NOW);
        (1..4).for_each(|number| cache.insert(number, number, Moment::from_nanos(1_500), NOW));
        cache.insert(4, 4, Moment::from_nanos(3_000), Moment::from_nanos(1_600));
        assert_eq!(cache.entries.len(), 2);
        assert!(cache.get(&0, NOW).is_some());
    }
}
