//! Zones: named state shared by all workers (`zone=NAME:SIZE`).
//!
//! A zone belongs to the process. One with the same name, kind and size is kept over a reload, and ends with the last
//! configuration that has it. Unlike nginx's, whose workers are processes, it does not outlive the process. Its size
//! limits its memory ([`table`]). Keys are spread over shards by a hash that clients cannot predict. An entry is
//! accessed under the lock of its shard, for a few steps of arithmetic only: no waiting, no I/O and no calls of other
//! code. If such a section panics, its shard is emptied, because losing counters is better than using wrong ones.

mod names;
pub mod table;

use std::hash::{BuildHasher, RandomState};

use parking_lot::Mutex;

pub use names::{NamedZones, Occupancy, Occupied, ZoneError};
pub use table::{EntryId, Full, Table};

/// Smallest size of a shard. With smaller ones, some would be full long before others.
const SHARD_BYTES_MIN: usize = 64 * 1024;

/// Most shards: more than the workers of most machines, so lock contention is rare.
const SHARDS_MAX: usize = 16;

/// Named state shared by all workers.
pub struct Zone<V> {
    hasher: RandomState,
    shards: Box<[Shard<V>]>,
}

/// A shard on cache lines of its own, to avoid false sharing.
#[repr(align(64))]
struct Shard<V>(Mutex<Table<V>>);

/// A key with its hash in a zone.
#[derive(Clone, Copy, Debug)]
pub struct Key<'k> {
    bytes: &'k [u8],
    hash: u32,
}

/// Handle that finds an entry again in a later section. Its holder ensures that the entry is not removed meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Ticket {
    shard: usize,
    rebuilds: u32,
    entry: EntryId,
}

impl<V> Zone<V> {
    /// Creates a zone with this limit of memory.
    pub fn new(bytes: usize) -> Zone<V> {
        let count = (bytes / SHARD_BYTES_MIN).clamp(1, SHARDS_MAX);
        let shards = (0..count).map(|_| Shard(Mutex::new(Table::new(bytes / count))));
        Zone { hasher: RandomState::new(), shards: shards.collect() }
    }

    /// Makes a key from these bytes, at most [`table::KEY_LENGTH_MAX`].
    pub fn key<'k>(&self, bytes: &'k [u8]) -> Key<'k> {
        Key { bytes, hash: self.hasher.hash_one(bytes) as u32 }
    }

    /// Runs `section` with the key's shard locked. It must be short, because other workers wait.
    pub fn with<R>(&self, key: &Key<'_>, section: impl FnOnce(&mut Table<V>) -> R) -> R {
        self.in_shard(self.shard_of(key), section)
    }

    /// Handle of an entry in the key's shard.
    pub fn ticket(&self, key: &Key<'_>, table: &Table<V>, entry: EntryId) -> Ticket {
        Ticket { shard: self.shard_of(key), rebuilds: table.rebuilds, entry }
    }

    /// Runs `section` with the entry and its shard locked; `None` if the shard was emptied since.
    pub fn with_entry<R>(&self, ticket: &Ticket, section: impl FnOnce(&mut Table<V>, EntryId) -> R) -> Option<R> {
        self.in_shard(ticket.shard, |table| (table.rebuilds == ticket.rebuilds).then(|| section(table, ticket.entry)))
    }

    fn shard_of(&self, key: &Key<'_>) -> usize {
        // The upper bits choose the bucket.
        key.hash as usize % self.shards.len()
    }

    fn in_shard<R>(&self, shard: usize, section: impl FnOnce(&mut Table<V>) -> R) -> R {
        let mut table = self.shards[shard].0.lock();
        let mut guard = Section { table: &mut table, is_done: false };
        let result = section(guard.table);
        guard.is_done = true;
        result
    }
}

impl<V: Send> Occupied for Zone<V> {
    fn occupancy(&self) -> Occupancy {
        self.shards.iter().fold(Occupancy::default(), |sum, shard| {
            let own = shard.0.lock().occupancy();
            Occupancy {
                entries: sum.entries + own.entries,
                bytes_used: sum.bytes_used + own.bytes_used,
                bytes: sum.bytes + own.bytes,
            }
        })
    }
}

/// Guard that empties the table if the section panics.
struct Section<'t, V> {
    table: &'t mut Table<V>,
    is_done: bool,
}

impl<V> Drop for Section<'_, V> {
    fn drop(&mut self) {
        if !self.is_done {
            self.table.rebuild();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    fn count(zone: &Zone<u32>, name: &[u8]) -> Option<u32> {
        let key = zone.key(name);
        zone.with(&key, |table| table.find(&key).map(|entry| *table.value(entry)))
    }

    #[test]
    fn all_threads_see_one_state() {
        let zone = Zone::<u32>::new(1 << 20);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for number in 0..1000_u32 {
                        let name = (number % 50).to_string();
                        let key = zone.key(name.as_bytes());
                        zone.with(&key, |table| match table.find(&key) {
                            Some(entry) => *table.value_mut(entry) += 1,
                            None => assert!(table.insert(&key, 1).is_ok()),
                        });
                    }
                });
            }
        });
        assert!((0..50).all(|number| count(&zone, number.to_string().as_bytes()) == Some(80)));
    }

    #[test]
    fn a_panic_in_a_section_empties_its_shard_and_the_zone_goes_on() {
        let zone = Zone::<u32>::new(1 << 16);
        let key = zone.key(b"one");
        let ticket = zone.with(&key, |table| {
            let entry = table.insert(&key, 5).unwrap();
            zone.ticket(&key, table, entry)
        });
        assert_eq!(zone.with_entry(&ticket, |table, entry| *table.value(entry)), Some(5));
        let panicked = catch_unwind(AssertUnwindSafe(|| zone.with(&key, |_| panic!("in a section"))));
        assert!(panicked.is_err());
        assert_eq!(count(&zone, b"one"), None);
        zone.with(&key, |table| table.insert(&key, 6)).unwrap();
        // A different entry, even if it has the same place.
        assert_eq!(zone.with_entry(&ticket, |table, entry| *table.value(entry)), None);
        assert_eq!(count(&zone, b"one"), Some(6));
    }

    #[test]
    fn a_small_zone_has_one_shard_and_a_large_one_several() {
        assert_eq!(Zone::<u32>::new(32 * 1024).shards.len(), 1);
        assert_eq!(Zone::<u32>::new(10 << 20).shards.len(), SHARDS_MAX);
    }
}
