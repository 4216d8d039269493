//! Generational slots: a table whose keys may outlive their values.
//!
//! Tasks, sockets and timers are identified by a key (index and generation) that may pass through the kernel or another
//! thread. The key of a removed value matches nothing, even when its index is reused.

use std::ops::Range;

/// Width of a generation, which wraps around, so that a key fits in a waker's data word.
pub(crate) const GENERATION_BITS: u32 = 28;
const GENERATION_MASK: u32 = (1 << GENERATION_BITS) - 1;
const NONE: u32 = u32::MAX;

/// The key of one value in [`Slots`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Key {
    pub index: u32,
    pub generation: u32,
}

impl Key {
    /// The key as one word, for the kernel's user data.
    pub fn pack(self) -> u64 {
        u64::from(self.index) << 32 | u64::from(self.generation)
    }

    /// The inverse of [`Key::pack`].
    pub fn unpack(word: u64) -> Self {
        Key { index: (word >> 32) as u32, generation: word as u32 }
    }
}

/// Entries per chunk: a few pages.
const CHUNK: u32 = 1 << CHUNK_BITS;
const CHUNK_BITS: u32 = 8;

/// A table of values with [`Key`]s. It grows by chunks, so nothing is ever copied (with a hundred thousand connections
/// that would delay the loop), and frees empty chunks except one. Insertion reuses the entry freed last in the chunk
/// that had room last (its cache lines are warm).
pub(crate) struct Slots<T> {
    chunks: Vec<Chunk<T>>,
    /// Chunks that may have room, each once; the last is used next.
    open: Vec<u32>,
    /// Number of chunks that hold memory.
    allocated: usize,
    occupied: usize,
}

struct Chunk<T> {
    /// Entries that were used since the chunk was allocated.
    entries: Vec<Entry<T>>,
    /// The first vacant entry.
    free: u32,
    occupied: u32,
    is_open: bool,
    /// Generation of new entries: later than all that were used before the memory was freed.
    first_generation: u32,
}

struct Entry<T> {
    generation: u32,
    content: Content<T>,
}

enum Content<T> {
    Vacant { next: u32 },
    Occupied(T),
}

impl<T> Slots<T> {
    /// Size of a value's entry, for memory accounting.
    #[cfg(test)]
    pub const BYTES: usize = size_of::<Entry<T>>();

    pub const fn new() -> Self {
        Slots { chunks: Vec::new(), open: Vec::new(), allocated: 0, occupied: 0 }
    }

    pub fn len(&self) -> usize {
        self.occupied
    }

    pub fn insert(&mut self, value: T) -> Key {
        let number = self.chunk_with_room();
        let chunk = &mut self.chunks[number as usize];
        if chunk.entries.capacity() == 0 {
            chunk.entries.reserve_exact(CHUNK as usize);
            self.allocated += 1;
        }
        self.occupied += 1;
        chunk.occupied += 1;
        let (offset, generation) = chunk.occupy(value);
        Key { index: number << CHUNK_BITS | offset, generation }
    }

    fn chunk_with_room(&mut self) -> u32 {
        while let Some(&number) = self.open.last() {
            let chunk = &mut self.chunks[number as usize];
            if chunk.occupied < CHUNK {
                return number;
            }
            chunk.is_open = false;
            self.open.pop();
        }
        let number = u32::try_from(self.chunks.len()).expect("fewer than 2^32 slots");
        assert!(number < u32::MAX >> CHUNK_BITS, "fewer than 2^32 slots");
        self.chunks.push(Chunk { entries: Vec::new(), free: NONE, occupied: 0, is_open: true, first_generation: 0 });
        self.open.push(number);
        number
    }

    #[inline]
    fn entry(&mut self, index: u32) -> Option<&mut Entry<T>> {
        self.chunks.get_mut((index >> CHUNK_BITS) as usize)?.entries.get_mut((index % CHUNK) as usize)
    }

    #[inline]
    pub fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        match self.entry(key.index) {
            Some(Entry { generation, content: Content::Occupied(value) }) if *generation == key.generation => {
                Some(value)
            }
            _ => None,
        }
    }

    /// The value at an index that is known to be occupied, whatever its generation (intrusive lists).
    #[inline]
    pub fn at(&mut self, index: u32) -> &mut T {
        match self.entry(index) {
            Some(Entry { content: Content::Occupied(value), .. }) => value,
            _ => unreachable!("a list links occupied slots only"),
        }
    }

    pub fn remove(&mut self, key: Key) -> Option<T> {
        self.get_mut(key)?;
        let number = key.index >> CHUNK_BITS;
        let chunk = &mut self.chunks[number as usize];
        let value = chunk.vacate(key.index % CHUNK);
        self.occupied -= 1;
        if !std::mem::replace(&mut chunk.is_open, true) {
            self.open.push(number);
        }
        // Room for two more chunks of values exceeds usual fluctuation.
        if chunk.occupied == 0 && self.allocated * CHUNK as usize - self.occupied >= 2 * CHUNK as usize {
            chunk.give_memory_back();
            self.allocated -= 1;
        }
        Some(value)
    }

    pub fn for_each(&mut self, f: impl FnMut(Key, &mut T)) {
        self.for_each_in(0..self.end(), f);
    }

    /// Upper bound of all indices ever used, exclusive.
    pub fn end(&self) -> u32 {
        (self.chunks.len() as u32) << CHUNK_BITS
    }

    /// Calls `f` for the values at these indices: visits a large table piece by piece.
    pub fn for_each_in(&mut self, indices: Range<u32>, mut f: impl FnMut(Key, &mut T)) {
        for index in indices.start..indices.end.min(self.end()) {
            if let Some(Entry { generation, content: Content::Occupied(value) }) = self.entry(index) {
                f(Key { index, generation: *generation }, value);
            }
        }
    }

    /// The key of the first value at or after an index. For emptying a table whose values run code on drop.
    pub fn first_from(&self, index: u32) -> Option<Key> {
        let first = index >> CHUNK_BITS;
        let chunks = (first..).zip(self.chunks.get(first as usize..)?);
        chunks.filter(|(_, chunk)| chunk.occupied > 0).find_map(|(number, chunk)| {
            let skipped = if number == first { index % CHUNK } else { 0 };
            let mut entries = (0..).zip(&chunk.entries).skip(skipped as usize);
            let (offset, entry) = entries.find(|(_, entry)| matches!(entry.content, Content::Occupied(_)))?;
            Some(Key { index: number << CHUNK_BITS | offset, generation: entry.generation })
        })
    }
}

impl<T> Chunk<T> {
    /// Puts a value into a vacant entry; returns the entry's offset in the chunk and its generation.
    fn occupy(&mut self, value: T) -> (u32, u32) {
        if self.free == NONE {
            let offset = self.entries.len() as u32;
            self.entries.push(Entry { generation: self.first_generation, content: Content::Occupied(value) });
            return (offset, self.first_generation);
        }
        let offset = self.free;
        let entry = &mut self.entries[offset as usize];
        match std::mem::replace(&mut entry.content, Content::Occupied(value)) {
            Content::Vacant { next } => self.free = next,
            Content::Occupied(_) => unreachable!("the free list names vacant entries only"),
        }
        (offset, entry.generation)
    }

    /// Takes the value of an occupied entry.
    fn vacate(&mut self, offset: u32) -> T {
        let entry = &mut self.entries[offset as usize];
        entry.generation = (entry.generation + 1) & GENERATION_MASK;
        let content = std::mem::replace(&mut entry.content, Content::Vacant { next: self.free });
        self.free = offset;
        self.occupied -= 1;
        match content {
            Content::Occupied(value) => value,
            Content::Vacant { .. } => unreachable!("only occupied slots are freed"),
        }
    }

    fn give_memory_back(&mut self) {
        // Generations continue from the highest one.
        self.first_generation =
            self.entries.iter().map(|entry| entry.generation).max().unwrap_or(self.first_generation);
        self.entries = Vec::new();
        self.free = NONE;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_of_a_removed_value_does_not_find_its_successor() {
        let mut slots = Slots::new();
        let first = slots.insert("first");
        assert_eq!(slots.remove(first), Some("first"));
        let second = slots.insert("second");
        assert_eq!(first.index, second.index);
        assert_eq!(slots.get_mut(first), None);
        assert_eq!(slots.remove(first), None);
        assert_eq!(slots.get_mut(second), Some(&mut "second"));
        assert_eq!(slots.len(), 1);
    }

    #[test]
    fn a_table_is_emptied_in_one_pass() {
        let mut slots = Slots::new();
        const CHUNK: usize = super::CHUNK as usize;
        let count = 2 * CHUNK + 5;
        let keys: Vec<Key> = (0..count).map(|value| slots.insert(value)).collect();
        for gone in [0, 3, CHUNK, CHUNK + 1] {
            slots.remove(keys[gone]);
        }
        let (mut found, mut next) = (Vec::new(), 0);
        while let Some(key) = slots.first_from(next) {
            found.extend(slots.remove(key));
            next = key.index + 1;
        }
        let expected: Vec<usize> = (0..count).filter(|value| ![0, 3, CHUNK, CHUNK + 1].contains(value)).collect();
        assert_eq!((found, slots.len()), (expected, 0));
        assert_eq!(slots.first_from(100 * CHUNK as u32), None);
    }

    #[test]
    fn a_table_is_looked_at_piece_by_piece() {
        let mut slots = Slots::new();
        let keys: Vec<Key> = (0..5).map(|value| slots.insert(value)).collect();
        slots.remove(keys[3]);
        let mut pieces = Vec::new();
        for begin in [0, 2, 4, 6] {
            let mut piece = Vec::new();
            slots.for_each_in(begin..begin + 2, |key, value| {
                assert_eq!(key, keys[*value]);
                piece.push(*value);
            });
            pieces.push(piece);
        }
        assert_eq!(pieces, [vec![0, 1], vec![2], vec![4], vec![]]);
        assert!(slots.end() >= 5);
    }

    #[test]
    fn memory_is_returned_and_old_keys_find_no_new_entries() {
        let mut slots = Slots::new();
        let old: Vec<Key> = (0..10 * CHUNK).map(|value| slots.insert(value)).collect();
        assert_eq!(slots.allocated, 10);
        for (value, &key) in old.iter().enumerate() {
            assert_eq!(slots.remove(key), Some(value as u32));
        }
        assert_eq!((slots.allocated, slots.len()), (1, 0));
        let new: Vec<Key> = (0..10 * CHUNK).map(|value| slots.insert(value)).collect();
        assert!(old.iter().all(|&key| slots.get_mut(key).is_none()));
        assert!(new.iter().zip(0..).all(|(&key, value)| slots.get_mut(key) == Some(&mut { value })));
    }

    #[test]
    fn one_that_comes_and_goes_allocates_once() {
        let mut slots = Slots::new();
        let kept: Vec<Key> = (0..CHUNK).map(|value| slots.insert(value)).collect();
        for value in 0..1000 {
            let key = slots.insert(value);
            assert_eq!((slots.allocated, slots.remove(key)), (2, Some(value)));
        }
        assert_eq!(slots.allocated, 2);
        assert!(kept.iter().zip(0..).all(|(&key, value)| slots.get_mut(key) == Some(&mut { value })));
    }

    #[test]
    fn a_key_survives_packing() {
        let key = Key { index: 7, generation: 9 };
        assert_eq!(Key::unpack(key.pack()), key);
    }
}
