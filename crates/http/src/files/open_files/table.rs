//! The table of a cache of files: lookups take no lock, changes take one, and its size is bounded.
//!
//! ```text
//!   hash ─► chunk (allocated on first use) ─► bucket: 8 tags │ 8 entries
//! ```
//!
//! A lookup touches memory that is only read, and a slot of its own thread (`arc-swap`): no worker waits for another
//! one, and none writes to memory that all read. A change holds the one lock while it examines a few dozen entries, and
//! frees nothing under it.
//!
//! At the bound, the least recently used of some neighbouring entries is evicted. In a small table that is the least
//! recently used of all, in a large one a fair guess.

use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::{ArcSwapOption, Guard};
use parking_lot::Mutex;

/// Entries of a bucket: their tags fill half of a cache line.
const WAYS: usize = 8;

/// Buckets allocated at once: 6 KiB.
const CHUNK: usize = 64;

/// Entries compared for an eviction, and buckets searched for them.
const COMPARED_MAX: usize = 32;
const SEARCHED_MAX: usize = 64;

/// An entry of the table.
pub(super) trait Keyed {
    fn path(&self) -> &[u8];
    fn hash(&self) -> u64;
    /// Time of the last use, on any scale.
    fn last_use(&self) -> u64;
}

/// A table of at most `entries_max` entries.
pub(super) struct Table<E> {
    chunks: Box<[OnceLock<Chunk<E>>]>,
    bucket_mask: usize,
    entries_max: usize,
    count: AtomicUsize,
    /// The bucket at which the next search for an eviction begins.
    hand: Mutex<usize>,
}

type Chunk<E> = Box<[Bucket<E>]>;

struct Bucket<E> {
    /// Parts of the hashes; 0 for an empty place.
    tags: [AtomicU32; WAYS],
    entries: [ArcSwapOption<E>; WAYS],
}

/// An entry that was found.
pub(super) struct Found<E>(Guard<Option<Arc<E>>>);

impl<E> Found<E> {
    pub fn arc(&self) -> &Arc<E> {
        self.0.as_ref().expect("a found slot is occupied")
    }
}

impl<E> std::ops::Deref for Found<E> {
    type Target = E;

    fn deref(&self) -> &E {
        self.arc()
    }
}

/// The hash of a path, with a key of this process.
pub(super) fn hash_of(path: &[u8]) -> u64 {
    static KEY: OnceLock<hashbrown::DefaultHashBuilder> = OnceLock::new();
    KEY.get_or_init(Default::default).hash_one(path)
}

impl<E: Keyed> Table<E> {
    pub fn new(entries_max: usize) -> Self {
        // Half full at the bound, so that a bucket rarely overflows.
        let buckets = (entries_max.div_ceil(WAYS / 2)).next_power_of_two();
        let chunks = (0..buckets.div_ceil(CHUNK)).map(|_| OnceLock::new()).collect();
        Table { chunks, bucket_mask: buckets - 1, entries_max, count: AtomicUsize::new(0), hand: Mutex::new(0) }
    }

    pub fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    #[inline]
    pub fn find(&self, hash: u64, path: &[u8]) -> Option<Found<E>> {
        let bucket = self.bucket(self.place(hash))?;
        let tag = tag(hash);
        for (own, entry) in bucket.tags.iter().zip(&bucket.entries) {
            if own.load(Ordering::Relaxed) == tag {
                let entry = entry.load();
                if entry.as_ref().is_some_and(|entry| entry.path() == path) {
                    return Some(Found(entry));
                }
            }
        }
        None
    }

    /// Inserts an entry. It replaces the entry of the same path or, at the bound, another one.
    pub fn insert(&self, entry: Arc<E>) {
        let hash = entry.hash();
        let bucket = self.make_bucket(self.place(hash));
        let mut hand = self.hand.lock();
        let same = bucket.position(|old| old.path() == entry.path());
        let displaced = match same {
            Some(way) => bucket.set(way, Some(entry)),
            None => {
                let displaced = if self.len() >= self.entries_max { self.displace(&mut hand) } else { None };
                let free = bucket.tags.iter().position(|tag| tag.load(Ordering::Relaxed) == 0);
                let way = free.unwrap_or_else(|| bucket.least_recently_used().expect("a full bucket").0);
                let neighbour = bucket.set(way, Some(entry));
                if neighbour.is_none() {
                    self.count.fetch_add(1, Ordering::Relaxed);
                }
                drop(hand);
                drop(neighbour);
                return drop(displaced);
            }
        };
        drop(hand);
        drop(displaced);
    }

    /// Removes this very entry, if it is still there.
    pub fn remove(&self, entry: &Arc<E>) {
        let Some(bucket) = self.bucket(self.place(entry.hash())) else { return };
        let hand = self.hand.lock();
        let way = bucket.position(|own| std::ptr::eq(own, &**entry));
        let removed = way.and_then(|way| self.empty(bucket, way));
        drop(hand);
        drop(removed);
    }

    /// Removes one of the least recently used entries; false if there is none.
    pub fn remove_one(&self) -> bool {
        // Few entries may be far apart. The lock is held for one search at a time.
        let searches = (self.bucket_mask + 1).div_ceil(SEARCHED_MAX);
        (0..searches).any(|_| {
            let displaced = self.displace(&mut self.hand.lock());
            displaced.is_some()
        })
    }

    /// Removes unwanted entries. The lock is held for one bucket at a time.
    pub fn retain(&self, is_wanted: impl Fn(&E) -> bool) {
        for bucket in self.chunks.iter().filter_map(OnceLock::get).flat_map(|chunk| chunk.iter()) {
            if bucket.tags.iter().all(|tag| tag.load(Ordering::Relaxed) == 0) {
                continue;
            }
            let mut removed: [Option<Arc<E>>; WAYS] = Default::default();
            let hand = self.hand.lock();
            for (way, place) in removed.iter_mut().enumerate() {
                if bucket.entries[way].load().as_ref().is_some_and(|entry| !is_wanted(entry)) {
                    *place = self.empty(bucket, way);
                }
            }
            drop(hand);
        }
    }

    fn place(&self, hash: u64) -> usize {
        hash as usize & self.bucket_mask
    }

    fn bucket(&self, place: usize) -> Option<&Bucket<E>> {
        Some(&self.chunks[place / CHUNK].get()?[place % CHUNK])
    }

    fn make_bucket(&self, place: usize) -> &Bucket<E> {
        let size = CHUNK.min(self.bucket_mask + 1);
        let chunk = self.chunks[place / CHUNK].get_or_init(|| (0..size).map(|_| Bucket::new()).collect());
        &chunk[place % CHUNK]
    }

    fn empty(&self, bucket: &Bucket<E>, way: usize) -> Option<Arc<E>> {
        let removed = bucket.set(way, None)?;
        self.count.fetch_sub(1, Ordering::Relaxed);
        Some(removed)
    }

    /// Removes the least recently used of the next entries.
    fn displace(&self, hand: &mut usize) -> Option<Arc<E>> {
        let (mut compared, mut oldest) = (0, None::<(u64, usize, usize)>);
        for _ in 0..SEARCHED_MAX.min(self.bucket_mask + 1) {
            *hand = (*hand + 1) & self.bucket_mask;
            let Some(bucket) = self.bucket(*hand) else { continue };
            let Some((way, last_use)) = bucket.least_recently_used() else { continue };
            if oldest.is_none_or(|(least, ..)| last_use < least) {
                oldest = Some((last_use, *hand, way));
            }
            compared += bucket.len();
            if compared >= COMPARED_MAX {
                break;
            }
        }
        let (_, place, way) = oldest?;
        self.empty(self.bucket(place)?, way)
    }
}

impl<E: Keyed> Bucket<E> {
    fn new() -> Self {
        Bucket { tags: Default::default(), entries: Default::default() }
    }

    fn len(&self) -> usize {
        self.tags.iter().filter(|tag| tag.load(Ordering::Relaxed) != 0).count()
    }

    fn position(&self, is_it: impl Fn(&E) -> bool) -> Option<usize> {
        self.entries.iter().position(|entry| entry.load().as_ref().is_some_and(|entry| is_it(entry)))
    }

    fn least_recently_used(&self) -> Option<(usize, u64)> {
        let uses = self.entries.iter().enumerate();
        let uses = uses.filter_map(|(way, entry)| Some((way, entry.load().as_ref()?.last_use())));
        uses.min_by_key(|&(_, last_use)| last_use)
    }

    /// Sets or empties a place, and returns the previous entry.
    fn set(&self, way: usize, entry: Option<Arc<E>>) -> Option<Arc<E>> {
        // A reader that sees a tag without its entry, or the reverse, finds nothing: it compares the path.
        self.tags[way].store(entry.as_ref().map_or(0, |entry| tag(entry.hash())), Ordering::Relaxed);
        self.entries[way].swap(entry)
    }
}

/// The part of a hash that does not choose the bucket; never 0.
fn tag(hash: u64) -> u32 {
    (hash >> 32) as u32 | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Named(&'static str, u64);

    impl Keyed for Named {
        fn path(&self) -> &[u8] {
            self.0.as_bytes()
        }

        fn hash(&self) -> u64 {
            hash_of(self.path())
        }

        fn last_use(&self) -> u64 {
            self.1
        }
    }

    fn has(table: &Table<Named>, name: &str) -> bool {
        table.find(hash_of(name.as_bytes()), name.as_bytes()).is_some_and(|found| found.0.as_ref().unwrap().0 == name)
    }

    #[test]
    fn the_least_recently_used_gives_way() {
        let table = Table::new(3);
        for (name, last_use) in [("/a", 5), ("/b", 2), ("/c", 3), ("/d", 4), ("/e", 6)] {
            table.insert(Arc::new(Named(name, last_use)));
        }
        assert_eq!(table.len(), 3);
        assert_eq!(["/a", "/b", "/c", "/d", "/e"].map(|name| has(&table, name)), [true, false, false, true, true]);
    }

    #[test]
    fn one_entry_in_a_large_table_is_found_when_room_is_wanted() {
        let table = Table::new(10_000);
        for name in ["/a", "/b", "/c"] {
            table.insert(Arc::new(Named(name, 1)));
            assert!(table.remove_one() && !has(&table, name) && !table.remove_one());
        }
    }

    #[test]
    fn one_path_has_one_entry_and_the_newest_stays() {
        let table = Table::new(3);
        let first = Arc::new(Named("/a", 1));
        table.insert(Arc::clone(&first));
        table.insert(Arc::new(Named("/a", 2)));
        assert_eq!(Arc::strong_count(&first), 1, "the replaced file has no other owner");
        table.remove(&first);
        assert!(has(&table, "/a"), "another entry than the one that was to go");
        let newest = Arc::clone(table.find(hash_of(b"/a"), b"/a").unwrap().arc());
        table.remove(&newest);
        assert_eq!((table.len(), has(&table, "/a")), (0, false));
        assert_eq!(Arc::strong_count(&newest), 1);
    }

    #[test]
    fn large_table_keeps_its_bound_and_evicts_unused_entries() {
        static NAMES: OnceLock<Vec<String>> = OnceLock::new();
        let names = NAMES.get_or_init(|| (0..5000).map(|number| format!("/file/{number}")).collect());
        let table = Table::new(1000);
        for (last_use, name) in names.iter().enumerate() {
            table.insert(Arc::new(Named(name, last_use as u64)));
            assert!(table.len() <= 1000);
        }
        let kept = names.iter().filter(|name| has(&table, name)).count();
        assert_eq!(kept, table.len());
        let recent = names[4500..].iter().filter(|name| has(&table, name)).count();
        assert!(recent > 400, "{recent} of the last 500");
        table.retain(|named| named.1 >= 4500);
        assert_eq!(table.len(), recent);
    }
}
