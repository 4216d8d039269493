//! One shard of a zone: a hash table with a list in order of use and a strict bound in bytes.
//!
//! ```text
//! bytes of the shard = blocks_max × 68
//!
//! blocks   [ entry | entry | more key | entry | never used … ]      64 bytes each
//!              └───────────────┘ continuation of a long key
//! buckets  [ · | · | · | · … ]                                        4 bytes for each block
//! ```
//!
//! An entry takes one block, with room for the value and the first bytes of the key, and one more for each further
//! `KEY_MORE_BYTES` of the key. All blocks are allocated when the shard is created, and never grow; unused ones are
//! never touched, so the system provides no memory for them. The caller maintains the order of use: finding an entry
//! does not move it.

use super::{Key, Occupancy};

/// Index in `blocks` plus one; 0 means none, so fresh memory needs no initialisation.
type Link = u32;

const NONE: Link = 0;

/// Bytes of a key in an entry's own block: an IPv6 address.
const KEY_BYTES: usize = 16;

/// Bytes of a key in each further block.
const KEY_MORE_BYTES: usize = 56;

/// Bytes of a zone for each block: the block itself, and its share of the buckets.
const BLOCK_COST: usize = 64 + size_of::<Link>();

/// Handle of an entry, valid until it is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryId(Link);

/// Error: no room for another entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// One shard of a zone.
pub struct Table<V> {
    blocks: Vec<Block<V>>,
    blocks_max: usize,
    /// List of freed blocks.
    free: Link,
    free_count: usize,
    buckets: Box<[Link]>,
    newest: Link,
    oldest: Link,
    entries: usize,
    /// Number of times that the table was emptied because its contents were unreliable.
    pub(super) rebuilds: u32,
}

/// With the fields in this order; the compiler's own order would need 72 bytes.
#[repr(u8)]
enum Block<V> {
    Entry { key: [u8; KEY_BYTES], key_length: u16, links: Links, value: V },
    Key { next: Link, bytes: [u8; KEY_MORE_BYTES] },
    Free { next: Link },
}

struct Links {
    hash: u32,
    /// The next entry in the same bucket.
    chained: Link,
    newer: Link,
    older: Link,
    more_key: Link,
}

const NO_ENTRY: &str = "a link leads to an occupied slot";
const NO_KEY: &str = "a key goes on in keys";

/// Longest key of an entry.
pub const KEY_LENGTH_MAX: usize = u16::MAX as usize;

fn place(link: Link) -> usize {
    link as usize - 1
}

impl<V> Table<V> {
    /// Creates a table with this limit of memory.
    pub fn new(bytes: usize) -> Table<V> {
        const { assert!(size_of::<Block<V>>() <= 64, "a value of a zone has at most 24 bytes") };
        let blocks_max = (bytes / BLOCK_COST).clamp(1, Link::MAX as usize - 1);
        Table {
            blocks: Vec::with_capacity(blocks_max),
            blocks_max,
            free: NONE,
            free_count: 0,
            buckets: vec![NONE; blocks_max].into(),
            newest: NONE,
            oldest: NONE,
            entries: 0,
            rebuilds: 0,
        }
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries
    }

    /// `true` if there is no entry.
    pub fn is_empty(&self) -> bool {
        self.entries == 0
    }

    /// Current occupancy.
    pub fn occupancy(&self) -> Occupancy {
        let bytes = self.blocks_max * BLOCK_COST;
        Occupancy { entries: self.entries, bytes_used: bytes - self.room() * BLOCK_COST, bytes }
    }

    /// The entry with this key.
    pub fn find(&self, key: &Key<'_>) -> Option<EntryId> {
        let mut link = self.buckets[self.bucket(key.hash)];
        while link != NONE {
            let links = self.links(link);
            if links.hash == key.hash && self.has_key(link, key.bytes) {
                return Some(EntryId(link));
            }
            link = links.chained;
        }
        None
    }

    /// Adds an entry as the newest. The key must not exist yet.
    ///
    /// # Errors
    /// There is no room. Removing entries may help.
    pub fn insert(&mut self, key: &Key<'_>, value: V) -> Result<EntryId, Full> {
        assert!(key.bytes.len() <= KEY_LENGTH_MAX, "a key is longer than an entry can have");
        let (first, rest) = key.bytes.split_at(key.bytes.len().min(KEY_BYTES));
        if self.room() < Self::blocks_for(key.bytes) {
            return Err(Full);
        }
        let mut more_key = NONE;
        // Last piece first, so that each can refer to the next.
        for piece in rest.chunks(KEY_MORE_BYTES).rev() {
            let mut bytes = [0; KEY_MORE_BYTES];
            bytes[..piece.len()].copy_from_slice(piece);
            more_key = self.take_block(Block::Key { next: more_key, bytes });
        }
        let mut inline = [0; KEY_BYTES];
        inline[..first.len()].copy_from_slice(first);
        let bucket = self.bucket(key.hash);
        let links = Links { hash: key.hash, chained: self.buckets[bucket], newer: NONE, older: NONE, more_key };
        let key_length = key.bytes.len() as u16;
        let link = self.take_block(Block::Entry { key: inline, key_length, links, value });
        self.buckets[bucket] = link;
        self.link_newest(link);
        self.entries += 1;
        Ok(EntryId(link))
    }

    /// Removes an entry.
    pub fn remove(&mut self, id: EntryId) {
        let EntryId(link) = id;
        self.unlink(link);
        let &Links { hash, chained, mut more_key, .. } = self.links(link);
        let bucket = self.bucket(hash);
        if self.buckets[bucket] == link {
            self.buckets[bucket] = chained;
        } else {
            let mut before = self.buckets[bucket];
            while self.links(before).chained != link {
                before = self.links(before).chained;
            }
            self.links_mut(before).chained = chained;
        }
        while more_key != NONE {
            let Block::Key { next, .. } = self.blocks[place(more_key)] else { unreachable!("{NO_KEY}") };
            self.give_block_back(more_key);
            more_key = next;
        }
        self.give_block_back(link);
        self.entries -= 1;
    }

    /// Makes an entry the newest.
    pub fn bump(&mut self, id: EntryId) {
        if self.newest != id.0 {
            self.unlink(id.0);
            self.link_newest(id.0);
        }
    }

    /// The entry that was added or bumped longest ago.
    pub fn oldest(&self) -> Option<EntryId> {
        (self.oldest != NONE).then_some(EntryId(self.oldest))
    }

    /// Value of an entry.
    pub fn value(&self, id: EntryId) -> &V {
        match &self.blocks[place(id.0)] {
            Block::Entry { value, .. } => value,
            _ => unreachable!("{NO_ENTRY}"),
        }
    }

    /// Mutable value of an entry.
    pub fn value_mut(&mut self, id: EntryId) -> &mut V {
        match &mut self.blocks[place(id.0)] {
            Block::Entry { value, .. } => value,
            _ => unreachable!("{NO_ENTRY}"),
        }
    }

    /// Number of blocks of an entry with this key.
    pub fn blocks_for(key: &[u8]) -> usize {
        1 + key.len().saturating_sub(KEY_BYTES).div_ceil(KEY_MORE_BYTES)
    }

    /// `true` if an entry with this key fits into an empty table.
    pub fn could_hold(&self, key: &Key<'_>) -> bool {
        Self::blocks_for(key.bytes) <= self.blocks_max
    }

    /// Empties the table, whatever its state.
    pub(super) fn rebuild(&mut self) {
        self.blocks.clear();
        self.buckets.fill(NONE);
        (self.free, self.free_count, self.newest, self.oldest, self.entries) = (NONE, 0, NONE, NONE, 0);
        self.rebuilds = self.rebuilds.wrapping_add(1);
    }

    fn bucket(&self, hash: u32) -> usize {
        // Scaling instead of a division: the upper bits choose the bucket.
        ((u64::from(hash) * self.buckets.len() as u64) >> 32) as usize
    }

    fn has_key(&self, link: Link, wanted: &[u8]) -> bool {
        let Block::Entry { key, key_length, links, .. } = &self.blocks[place(link)] else { unreachable!("{NO_ENTRY}") };
        if usize::from(*key_length) != wanted.len() {
            return false;
        }
        let (first, rest) = wanted.split_at(wanted.len().min(KEY_BYTES));
        let mut more_key = links.more_key;
        let is_rest_equal = |piece: &[u8]| {
            let Block::Key { next, bytes } = &self.blocks[place(more_key)] else { unreachable!("{NO_KEY}") };
            more_key = *next;
            bytes[..piece.len()] == *piece
        };
        key[..first.len()] == *first && rest.chunks(KEY_MORE_BYTES).all(is_rest_equal)
    }

    fn links(&self, link: Link) -> &Links {
        match &self.blocks[place(link)] {
            Block::Entry { links, .. } => links,
            _ => unreachable!("{NO_ENTRY}"),
        }
    }

    fn links_mut(&mut self, link: Link) -> &mut Links {
        match &mut self.blocks[place(link)] {
            Block::Entry { links, .. } => links,
            _ => unreachable!("{NO_ENTRY}"),
        }
    }

    fn link_newest(&mut self, link: Link) {
        let before = std::mem::replace(&mut self.newest, link);
        let links = self.links_mut(link);
        (links.newer, links.older) = (NONE, before);
        match before {
            NONE => self.oldest = link,
            before => self.links_mut(before).newer = link,
        }
    }

    fn unlink(&mut self, link: Link) {
        let &Links { newer, older, .. } = self.links(link);
        match newer {
            NONE => self.newest = older,
            newer => self.links_mut(newer).older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.links_mut(older).newer = newer,
        }
    }

    /// Number of available blocks.
    fn room(&self) -> usize {
        self.free_count + (self.blocks_max - self.blocks.len())
    }

    fn take_block(&mut self, block: Block<V>) -> Link {
        if self.free == NONE {
            self.blocks.push(block);
            return self.blocks.len() as Link;
        }
        let link = self.free;
        let taken = std::mem::replace(&mut self.blocks[place(link)], block);
        let Block::Free { next } = taken else { unreachable!("the list of free blocks has free blocks") };
        self.free = next;
        self.free_count -= 1;
        link
    }

    fn give_block_back(&mut self, link: Link) {
        self.blocks[place(link)] = Block::Free { next: self.free };
        self.free = link;
        self.free_count += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    type Value = [u64; 3];

    fn key(bytes: &[u8]) -> Key<'_> {
        // Few distinct hashes, so that buckets have several entries.
        Key { bytes, hash: bytes.iter().fold(0, |sum: u32, &byte| sum.wrapping_add(byte.into())) << 28 }
    }

    #[test]
    fn a_block_is_as_large_as_the_account_says() {
        assert_eq!(size_of::<Block<Value>>() + size_of::<Link>(), BLOCK_COST);
        assert_eq!(size_of::<Block<u32>>() + size_of::<Link>(), BLOCK_COST);
        let table = Table::<Value>::new(100 * BLOCK_COST + 1);
        assert_eq!((table.blocks.capacity(), table.buckets.len()), (100, 100));
    }

    #[test]
    fn entries_are_found_by_keys_of_every_length() {
        let mut table = Table::<Value>::new(1 << 20);
        let keys: Vec<Vec<u8>> = (0..300).map(|length: usize| vec![length as u8; length]).collect();
        let ids: Vec<EntryId> = keys.iter().map(|bytes| table.insert(&key(bytes), [7; 3]).unwrap()).collect();
        for (bytes, &id) in keys.iter().zip(&ids) {
            assert_eq!(table.find(&key(bytes)), Some(id), "{}", bytes.len());
        }
        assert_eq!(table.find(&key(&[255; 300])), None);
        let mut other = keys[200].clone();
        other[199] = 1;
        assert_eq!(table.find(&Key { bytes: &other, hash: key(&keys[200]).hash }), None);
    }

    #[test]
    fn full_table_refuses_and_takes_entries_that_fit_again() {
        let mut table = Table::<Value>::new(4 * BLOCK_COST);
        let long = [1; KEY_BYTES + 2 * KEY_MORE_BYTES];
        table.insert(&key(&long), [0; 3]).unwrap();
        table.insert(&key(b"b"), [0; 3]).unwrap();
        assert_eq!(table.insert(&key(b"c"), [0; 3]), Err(Full));
        table.remove(table.oldest().unwrap());
        assert_eq!(table.find(&key(&long)), None);
        for name in [b"c", b"d", b"e"] {
            table.insert(&key(name), [0; 3]).unwrap();
        }
        assert_eq!(table.insert(&key(b"f"), [0; 3]), Err(Full));
        assert_eq!(table.blocks.capacity(), 4);
    }

    #[test]
    fn the_order_is_that_of_use() {
        let mut table = Table::<Value>::new(1 << 16);
        let [a, b, c] = [b"a", b"b", b"c"].map(|name| table.insert(&key(name), [0; 3]).unwrap());
        table.bump(a);
        assert_eq!(table.oldest(), Some(b));
        table.bump(b);
        table.bump(b);
        assert_eq!(table.oldest(), Some(c));
        table.remove(c);
        table.remove(a);
        assert_eq!(table.oldest(), Some(b));
        table.remove(b);
        assert_eq!((table.oldest(), table.len()), (None, 0));
    }

    #[test]
    fn table_behaves_as_a_map_after_any_operations() {
        let mut table = Table::<u32>::new(64 * BLOCK_COST);
        let mut model: HashMap<Vec<u8>, u32> = HashMap::new();
        let mut random = 1_u32;
        for step in 0..20_000 {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let length = (random >> 8) as usize % 90;
            let bytes = vec![(random >> 20) as u8 % 7; length];
            match table.find(&key(&bytes)) {
                Some(id) if random & 1 == 0 => {
                    table.remove(id);
                    model.remove(&bytes);
                }
                Some(id) => {
                    *table.value_mut(id) = step;
                    table.bump(id);
                    model.insert(bytes, step);
                }
                None => match table.insert(&key(&bytes), step) {
                    Ok(_) => assert_eq!(model.insert(bytes, step), None),
                    Err(Full) => {
                        let used: usize = model.keys().map(|bytes| Table::<u32>::blocks_for(bytes)).sum();
                        assert!(used + Table::<u32>::blocks_for(&bytes) > 64);
                        if step % 100 == 0 {
                            table.rebuild();
                            model.clear();
                        }
                    }
                },
            }
            assert_eq!(table.len(), model.len());
        }
        for (bytes, value) in &model {
            let id = table.find(&key(bytes)).expect("it was put in");
            assert_eq!(table.value(id), value);
        }
    }
}
