//! The index of a cache: all entries, in memory, in shards with a lock each.
//!
//! ```text
//!   shard   slots  [ 80 bytes | 80 bytes | … never used … ]     allocated at once, touched when used
//!           table  sum ──► slot                                  5 bytes for each slot, and a seventh
//!           queues (eviction.rs) over the slots
//! ```
//!
//! An entry takes at most [`ENTRY_COST`] bytes of the zone, whatever its key: keys are in the files. A section under a
//! lock is a few steps of arithmetic and never blocks.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed},
};

use hashbrown::HashTable;
use parking_lot::{Mutex, MutexGuard};

use super::eviction::{Linked, Links, Queues, Slot};
use super::key::Id;
use super::policy::{Lifetime, is_of_later};

/// Bytes of the zone for an entry: a slot and its share of the table.
pub const ENTRY_COST: usize = 88;

/// Minimum size of a shard.
const SHARD_BYTES_MIN: usize = 64 * 1024;

const SHARDS_MAX: usize = 32;

/// Maximum number of different lists of field names in `Vary`, and of rules of `No-Vary-Search`. A free row is found by
/// a linear search of the table.
pub const ROWS_MAX: usize = 4096;

/// The kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Requests are counted; there is no file.
    Counted,
    /// There is a file.
    Stored,
    /// The response depends on the request; the number is the row of the field names.
    Varies(u32),
    /// Some differences between queries do not matter; the number is the row of the rules.
    Searches(u32),
    /// The server failed with this status.
    Error(u16),
    /// The last response must not be stored: requests do not wait for each other.
    Uncacheable,
}

impl Kind {
    /// True if there is a file, of a response or of a mark.
    pub fn has_file(self) -> bool {
        matches!(self, Kind::Stored | Kind::Varies(_) | Kind::Searches(_))
    }
}

/// An entry of the index.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The sum that identifies it.
    pub id: Id,
    /// The kind of the entry.
    pub kind: Kind,
    /// See `Meta::number`.
    pub number: u64,
    /// Space that its file takes, in bytes.
    pub size: u64,
    /// The last second in which it is fresh.
    pub fresh_until: u32,
    /// Time at which it arrived.
    pub received: u32,
    /// See [`Lifetime`].
    pub stale_while_revalidate: u32,
    /// See [`Lifetime`].
    pub stale_if_error: u32,
    /// Time of the last request for it.
    pub accessed: u32,
    /// Number of requests for it.
    pub uses: u16,
    /// True if it must not be used stale.
    pub must_revalidate: bool,
    pub(super) links: Links,
}

impl Linked for Entry {
    fn links(&mut self) -> &mut Links {
        &mut self.links
    }
}

impl Entry {
    /// Creates an entry that was just requested or inserted.
    pub fn new(id: Id, kind: Kind, now: u64) -> Entry {
        Entry {
            id,
            kind,
            number: 0,
            size: 0,
            fresh_until: 0,
            received: 0,
            stale_while_revalidate: 0,
            stale_if_error: 0,
            accessed: seconds(now),
            uses: 0,
            must_revalidate: false,
            links: Links::default(),
        }
    }

    /// Copies the parts of a lifetime that the index keeps.
    pub fn set_lifetime(&mut self, lifetime: &Lifetime) {
        self.fresh_until = seconds(lifetime.fresh_until);
        self.received = seconds(lifetime.received);
        self.stale_while_revalidate = lifetime.stale_while_revalidate;
        self.stale_if_error = lifetime.stale_if_error;
        self.must_revalidate = lifetime.must_revalidate;
    }

    /// True if it is fresh.
    pub fn is_fresh(&self, now: u64) -> bool {
        u64::from(self.fresh_until) >= now && !is_of_later(self.received.into(), now)
    }
}

/// A time in the index's format, valid until 2106.
pub fn seconds(moment: u64) -> u32 {
    u32::try_from(moment).unwrap_or(u32::MAX)
}

/// The index of a cache, see the head of the file.
pub struct Index {
    hasher: RandomState,
    shards: Box<[Mutex<Shard>]>,
    bytes: AtomicU64,
    stored: AtomicU64,
    vary_uses: RowUses,
    search_uses: RowUses,
}

/// Number of entries that use each row of a table.
pub struct RowUses(Box<[AtomicU32]>);

impl RowUses {
    fn new() -> RowUses {
        RowUses((0..ROWS_MAX).map(|_| AtomicU32::new(0)).collect())
    }

    /// Adds or subtracts a use.
    pub fn count(&self, row: u32, sign: i32) {
        self.0[row as usize].fetch_add(sign as u32, AcqRel);
    }

    /// True if no entry uses the row.
    pub fn is_free(&self, row: u32) -> bool {
        self.0[row as usize].load(Acquire) == 0
    }
}

/// A part of the index. Aligned, because requests write to it and its lock.
#[repr(align(128))]
pub struct Shard {
    slots: Vec<Entry>,
    slots_max: usize,
    free: Vec<Slot>,
    table: HashTable<Slot>,
    queues: Queues,
}

/// An entry that was removed from the index, and whose file is to be removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evicted {
    /// The sum that identifies the entry.
    pub id: Id,
    /// Size of its file, in bytes.
    pub size: u64,
    /// See `Meta::number`.
    pub number: u64,
}

impl Index {
    /// Creates an index that takes at most `bytes`.
    pub fn new(bytes: usize) -> Index {
        let count = (bytes / SHARD_BYTES_MIN).clamp(1, SHARDS_MAX).next_power_of_two();
        let slots_max = (bytes / count / ENTRY_COST).max(4);
        let shards = (0..count).map(|_| Mutex::new(Shard::new(slots_max))).collect();
        Index {
            hasher: RandomState::new(),
            shards,
            bytes: AtomicU64::new(0),
            stored: AtomicU64::new(0),
            vary_uses: RowUses::new(),
            search_uses: RowUses::new(),
        }
    }

    /// Space that all files take, including those of marks, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Number of stored responses.
    pub fn stored(&self) -> u64 {
        self.stored.load(Relaxed)
    }

    /// Number of entries for each list of field names in `Vary`.
    pub fn vary_uses(&self) -> &RowUses {
        &self.vary_uses
    }

    /// Number of entries for each text of rules in `No-Vary-Search`.
    pub fn search_uses(&self) -> &RowUses {
        &self.search_uses
    }

    /// Number of shards.
    pub fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Maximum number of entries.
    pub fn capacity(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().slots_max).sum()
    }

    /// Calls `section` with the entry of this id, if there is one.
    pub fn with<R>(&self, id: &Id, section: impl FnOnce(Option<&mut Entry>) -> R) -> R {
        let hash = self.hasher.hash_one(id);
        let mut shard = self.shard(hash);
        let found = shard.find(hash, id);
        section(found.map(|slot| &mut shard.slots[slot as usize]))
    }

    /// Returns the entry of this id and counts a request for it.
    pub fn touch(&self, id: &Id, now: u64) -> Option<Entry> {
        let hash = self.hasher.hash_one(id);
        let mut shard = self.shard(hash);
        let slot = shard.find(hash, id)?;
        let shard = &mut *shard;
        let entry = &mut shard.slots[slot as usize];
        entry.accessed = seconds(now);
        entry.uses = entry.uses.saturating_add(1);
        entry.links.note_hit();
        Some(entry.clone())
    }

    /// Inserts an entry, in place of one with the same id. Returns the evicted entries, and the replaced one if it has
    /// a file.
    pub fn insert(&self, mut entry: Entry) -> Vec<Evicted> {
        let hash = self.hasher.hash_one(entry.id);
        let mut shard = self.shard(hash);
        let mut gone = Vec::new();
        if let Some(slot) = shard.find(hash, &entry.id) {
            let before = &mut shard.slots[slot as usize];
            entry.links = before.links;
            entry.uses = entry.uses.max(before.uses);
            let before = std::mem::replace(before, entry);
            self.count(&shard.slots[slot as usize], 1);
            self.count(&before, -1);
            return gone;
        }
        while shard.free.is_empty() && shard.slots.len() >= shard.slots_max {
            let Some(victim) = shard.evict(&self.hasher) else { return gone };
            self.count(&victim, -1);
            gone.extend(Evicted::of(&victim));
        }
        self.count(&entry, 1);
        shard.add(entry, hash, &self.hasher);
        gone
    }

    /// Sets the space that the file of the entry with this number takes.
    pub fn set_size(&self, id: &Id, number: u64, size: u64) {
        self.with(id, |entry| {
            if let Some(entry) = entry.filter(|entry| entry.number == number && entry.kind.has_file()) {
                self.bytes.fetch_add(size.wrapping_sub(entry.size), Relaxed);
                entry.size = size;
            }
        });
    }

    /// Removes an entry if `is_meant` returns true for it.
    pub fn remove(&self, id: &Id, is_meant: impl FnOnce(&Entry) -> bool) -> Option<Entry> {
        let hash = self.hasher.hash_one(id);
        let mut shard = self.shard(hash);
        let slot = shard.find(hash, id)?;
        if !is_meant(&shard.slots[slot as usize]) {
            return None;
        }
        let entry = shard.take(slot, hash);
        self.count(&entry, -1);
        Some(entry)
    }

    /// Evicts an entry from one of the shards, starting with shard `turn`.
    pub fn evict(&self, turn: usize) -> Option<Evicted> {
        for offset in 0..self.shards.len() {
            let mut shard = self.shards[(turn + offset) % self.shards.len()].lock();
            while let Some(victim) = shard.evict(&self.hasher) {
                self.count(&victim, -1);
                if let Some(evicted) = Evicted::of(&victim) {
                    return Some(evicted);
                }
            }
        }
        None
    }

    /// Visits at most `count` slots of a shard, beginning with `from`, and removes the entries for which `is_meant`
    /// returns true. Returns them and the next slot; `None` at the end of the shard.
    pub fn sweep(
        &self,
        shard: usize,
        from: usize,
        count: usize,
        mut is_meant: impl FnMut(&Entry) -> bool,
    ) -> (Vec<Evicted>, Option<usize>) {
        let mut shard = self.shards[shard].lock();
        let end = (from + count).min(shard.slots.len());
        let mut gone = Vec::new();
        for slot in from..end {
            let entry = &shard.slots[slot];
            if entry.links.is_queued() && is_meant(entry) {
                let hash = self.hasher.hash_one(entry.id);
                let entry = shard.take(slot as Slot, hash);
                self.count(&entry, -1);
                gone.extend(Evicted::of(&entry));
            }
        }
        let next = (end < shard.slots.len()).then_some(end);
        (gone, next)
    }

    /// Returns entries from at most `count` slots of a shard, beginning with `from`, and the next slot.
    pub fn entries(&self, shard: usize, from: usize, count: usize) -> (Vec<Entry>, Option<usize>) {
        let shard = self.shards[shard].lock();
        let end = (from + count).min(shard.slots.len());
        let entries = shard.slots[from.min(end)..end].iter().filter(|entry| entry.links.is_queued()).cloned().collect();
        (entries, (end < shard.slots.len()).then_some(end))
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard> {
        // Other bits than the table's, which uses the upper and the lower ones.
        self.shards[(hash >> 24) as usize & (self.shards.len() - 1)].lock()
    }

    fn count(&self, entry: &Entry, sign: i64) {
        if entry.kind.has_file() {
            self.bytes.fetch_add((entry.size as i64 * sign) as u64, Relaxed);
        }
        match entry.kind {
            Kind::Stored => _ = self.stored.fetch_add(sign as u64, Relaxed),
            Kind::Varies(row) => self.vary_uses.count(row, sign as i32),
            Kind::Searches(row) => self.search_uses.count(row, sign as i32),
            Kind::Counted | Kind::Error(_) | Kind::Uncacheable => {}
        }
    }
}

impl Evicted {
    /// For an entry that was removed; `None` if it had no file.
    pub fn of(entry: &Entry) -> Option<Evicted> {
        entry.kind.has_file().then_some(Evicted { id: entry.id, size: entry.size, number: entry.number })
    }
}

impl Shard {
    fn new(slots_max: usize) -> Shard {
        Shard {
            slots: Vec::with_capacity(slots_max),
            slots_max,
            free: Vec::new(),
            table: HashTable::new(),
            queues: Queues::default(),
        }
    }

    fn find(&self, hash: u64, id: &Id) -> Option<Slot> {
        self.table.find(hash, |&slot| self.slots[slot as usize].id == *id).copied()
    }

    fn add(&mut self, entry: Entry, hash: u64, hasher: &RandomState) {
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = entry;
                slot
            }
            None => {
                self.slots.push(entry);
                (self.slots.len() - 1) as Slot
            }
        };
        let slots = &self.slots;
        self.table.insert_unique(hash, slot, |&slot| hasher.hash_one(slots[slot as usize].id));
        self.queues.add(&mut self.slots, slot);
    }

    fn take(&mut self, slot: Slot, hash: u64) -> Entry {
        self.queues.remove(&mut self.slots, slot);
        if let Ok(found) = self.table.find_entry(hash, |&other| other == slot) {
            found.remove();
        }
        self.free.push(slot);
        self.slots[slot as usize].clone()
    }

    fn evict(&mut self, hasher: &RandomState) -> Option<Entry> {
        let slot = self.queues.victim(&mut self.slots)?;
        let hash = hasher.hash_one(self.slots[slot as usize].id);
        Some(self.take(slot, hash))
    }
}

const _: () = assert!(size_of::<Entry>() <= 80, "an entry is as small as the head of this file says");

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::zipf::Zipf;

    fn id(number: u64) -> Id {
        super::super::key::id_of(&number.to_le_bytes())
    }

    fn stored(number: u64, size: u64) -> Entry {
        Entry { size, number, ..Entry::new(id(number), Kind::Stored, 100) }
    }

    #[test]
    fn the_index_is_a_map_with_an_account_and_a_bound() {
        let index = Index::new(64 * 1024);
        let capacity = index.capacity();
        let mut model: HashMap<u64, u64> = HashMap::new();
        let mut random = 1_u64;
        for _ in 0..20_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let number = (random >> 33) % 2000;
            match (random >> 20) % 4 {
                0 => {
                    let removed = index.remove(&id(number), |_| true);
                    assert_eq!(removed.map(|entry| entry.size), model.remove(&number));
                }
                1 => assert_eq!(index.touch(&id(number), 5).map(|entry| entry.size), model.get(&number).copied()),
                _ => {
                    let size = random % 1000;
                    for gone in index.insert(stored(number, size)) {
                        assert_eq!(model.remove(&gone.number), Some(gone.size));
                    }
                    model.insert(number, size);
                }
            }
            assert_eq!((index.stored(), index.bytes()), (model.len() as u64, model.values().sum::<u64>()));
            assert!(model.len() <= capacity);
        }
        assert_eq!(model.len(), capacity, "the test filled it");
        let mut turn = 0;
        while let Some(gone) = index.evict(turn) {
            assert_eq!(model.remove(&gone.number), Some(gone.size));
            turn += 1;
        }
        assert!(model.is_empty());
    }

    #[test]
    fn a_sweep_comes_to_every_entry_in_bounded_steps() {
        let index = Index::new(256 * 1024);
        for number in 0..1000 {
            index.insert(stored(number, 1));
        }
        let (mut gone, mut steps) = (0, 0);
        for shard in 0..index.shards() {
            let mut from = Some(0);
            while let Some(at) = from {
                let (evicted, next) = index.sweep(shard, at, 100, |entry| entry.number % 2 == 0);
                (gone, steps, from) = (gone + evicted.len(), steps + 1, next);
            }
        }
        assert_eq!((gone, index.stored()), (500, 500));
        assert!(steps >= 10);
    }

    #[test]
    fn an_entry_takes_no_more_of_the_zone_than_said() {
        let table_per_slot = 8 * (size_of::<Slot>() + 1) / 7;
        assert!(size_of::<Entry>() + table_per_slot <= ENTRY_COST);
        const { assert!(ENTRY_COST <= 120) };
    }

    /// nginx's policy: evicts the least recently used entry.
    #[derive(Default)]
    struct Lru {
        by_key: HashMap<u64, (u64, u64)>,
        by_time: std::collections::BTreeMap<u64, u64>,
        bytes: u64,
    }

    impl Lru {
        fn ask(&mut self, now: u64, key: u64, size: u64, bytes_max: u64) -> bool {
            let known = self.by_key.insert(key, (now, size));
            self.by_time.insert(now, key);
            if let Some((before, _)) = known {
                self.by_time.remove(&before);
                return true;
            }
            self.bytes += size;
            while self.bytes > bytes_max {
                let (_, oldest) = self.by_time.pop_first().expect("it has bytes");
                let (_, size) = self.by_key.remove(&oldest).expect("it is in both");
                self.bytes -= size;
            }
            false
        }
    }

    fn ask(index: &Index, key: u64, size: u64, bytes_max: u64) -> bool {
        if index.touch(&id(key), 100).is_some() {
            return true;
        }
        index.insert(stored(key, size));
        let mut turn = 0;
        while index.bytes() > bytes_max {
            index.evict(turn);
            turn += 1;
        }
        false
    }

    /// Length of a trace, without the requests of scans.
    const REQUESTS: u64 = 100_000;

    /// Hits per thousand requests, here and with LRU, in a trace of [`REQUESTS`] requests for 50,000 keys. After each
    /// 2,000 of them follow `scan` requests for keys that are not requested again.
    fn hits(exponent: f64, scan: u64, has_sizes: bool, bytes_max: u64) -> (u64, u64) {
        let mut zipf = Zipf::new(50_000, exponent);
        // Large enough for the bytes to be the limit, in one shard.
        let (index, mut lru) = (Index::new(120 * 1024), Lru::default());
        let (mut ours, mut theirs, mut now, mut once) = (0, 0, 0, 1 << 40);
        let size = |key: u64| if has_sizes { 1 << (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 61) } else { 1 };
        for number in 0..REQUESTS {
            let scanned = if number % 2000 == 1999 { scan } else { 0 };
            let key = zipf.next();
            now += 1;
            ours += u64::from(ask(&index, key, size(key), bytes_max));
            theirs += u64::from(lru.ask(now, key, size(key), bytes_max));
            for _ in 0..scanned {
                (now, once) = (now + 1, once + 1);
                ask(&index, once, size(once), bytes_max);
                lru.ask(now, once, size(once), bytes_max);
            }
        }
        (ours * 1000 / REQUESTS, theirs * 1000 / REQUESTS)
    }

    /// The figures are in docs/decisions/0029-cache-storage.md.
    #[test]
    fn more_is_found_than_with_lru_also_beside_scans_and_with_sizes() {
        let rows = [(1.0, 2000, false, 1000), (0.8, 0, true, 8000)];
        for (exponent, scan, has_sizes, bytes_max) in rows {
            let (ours, lru) = hits(exponent, scan, has_sizes, bytes_max);
            assert!(ours > lru + 50, "{exponent} {scan} {has_sizes}: {ours} {lru}");
        }
    }
}
