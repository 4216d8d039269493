//! Generational slots: a table whose keys outlive their values harmlessly.
//!
//! Tasks, sockets and timers are named by a key (index and generation) that may travel through the kernel or another
//! thread. A key of a removed value finds nothing, even when its index serves a new value. Never shrinks.

use std::ops::Range;

/// The bits of a generation; it wraps within them so that a key packs into a waker's data word.
pub(crate) const GENERATION_BITS: u32 = 28;
const GENERATION_MASK: u32 = (1 << GENERATION_BITS) - 1;
const NONE: u32 = u32::MAX;

/// The name of one value in [`Slots`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Key {
    pub index: u32,
    pub generation: u32,
}

impl Key {
    /// As one word, for the kernel's user data.
    pub fn pack(self) -> u64 {
        u64::from(self.index) << 32 | u64::from(self.generation)
    }

    /// The inverse of [`Key::pack`].
    pub fn unpack(word: u64) -> Self {
        Key { index: (word >> 32) as u32, generation: word as u32 }
    }
}

/// A table of values named by [`Key`]s. Insertion reuses the place freed last (its cache lines are warm). It grows by
/// chunks, so that nothing is ever copied: at a hundred thousand connections that would hold up the loop.
pub(crate) struct Slots<T> {
    chunks: Vec<Vec<Entry<T>>>,
    /// How many entries there are in all chunks.
    length: usize,
    free: u32,
    occupied: usize,
}

/// Entries per chunk: a few pages.
const CHUNK: usize = 1 << CHUNK_BITS;
const CHUNK_BITS: u32 = 8;

struct Entry<T> {
    generation: u32,
    content: Content<T>,
}

enum Content<T> {
    Vacant { next: u32 },
    Occupied(T),
}

impl<T> Slots<T> {
    pub const fn new() -> Self {
        Slots { chunks: Vec::new(), length: 0, free: NONE, occupied: 0 }
    }

    pub fn len(&self) -> usize {
        self.occupied
    }

    pub fn insert(&mut self, value: T) -> Key {
        self.occupied += 1;
        if self.free == NONE {
            let index = u32::try_from(self.length).expect("fewer than 2^32 slots");
            if self.length.is_multiple_of(CHUNK) {
                self.chunks.push(Vec::with_capacity(CHUNK));
            }
            let last = self.chunks.last_mut().expect("one with room is there");
            last.push(Entry { generation: 0, content: Content::Occupied(value) });
            self.length += 1;
            return Key { index, generation: 0 };
        }
        let index = self.free;
        let entry = self.entry(index).expect("the free list names entries");
        let generation = entry.generation;
        match std::mem::replace(&mut entry.content, Content::Occupied(value)) {
            Content::Vacant { next } => self.free = next,
            Content::Occupied(_) => unreachable!("the free list names vacant entries only"),
        }
        Key { index, generation }
    }

    #[inline]
    fn entry(&mut self, index: u32) -> Option<&mut Entry<T>> {
        self.chunks.get_mut(index as usize >> CHUNK_BITS)?.get_mut(index as usize % CHUNK)
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

    /// The value at an index that the caller knows to be occupied, whatever its generation (intrusive lists).
    #[inline]
    pub fn at(&mut self, index: u32) -> &mut T {
        match self.entry(index) {
            Some(Entry { content: Content::Occupied(value), .. }) => value,
            _ => unreachable!("a list links occupied slots only"),
        }
    }

    pub fn remove(&mut self, key: Key) -> Option<T> {
        self.get_mut(key)?;
        let next = self.free;
        let entry = self.entry(key.index)?;
        entry.generation = (entry.generation + 1) & GENERATION_MASK;
        let content = std::mem::replace(&mut entry.content, Content::Vacant { next });
        self.free = key.index;
        self.occupied -= 1;
        match content {
            Content::Occupied(value) => Some(value),
            Content::Vacant { .. } => unreachable!("get_mut found a value"),
        }
    }

    pub fn for_each(&mut self, mut f: impl FnMut(Key, &mut T)) {
        for (index, entry) in self.chunks.iter_mut().flatten().enumerate() {
            if let Content::Occupied(value) = &mut entry.content {
                f(Key { index: index as u32, generation: entry.generation }, value);
            }
        }
    }

    /// One more than the highest index that was ever in use.
    pub fn end(&self) -> u32 {
        self.length as u32
    }

    /// The values at these indices, as far as there are any: for looking at a large table piece by piece.
    pub fn for_each_in(&mut self, indices: Range<u32>, mut f: impl FnMut(Key, &mut T)) {
        for index in indices.start..indices.end.min(self.end()) {
            if let Some(Entry { generation, content: Content::Occupied(value) }) = self.entry(index) {
                f(Key { index, generation: *generation }, value);
            }
        }
    }

    /// The key of the first value at or behind an index. For emptying a table whose values run code on drop.
    pub fn first_from(&self, index: u32) -> Option<Key> {
        let chunks = self.chunks.get(index as usize >> CHUNK_BITS..)?;
        let first = index as usize % CHUNK;
        let entries = chunks.iter().flatten().skip(first);
        (index..).zip(entries).find_map(|(index, entry)| match entry.content {
            Content::Occupied(_) => Some(Key { index, generation: entry.generation }),
            Content::Vacant { .. } => None,
        })
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
        assert_eq!((pieces, slots.end()), (vec![vec![0, 1], vec![2], vec![4], vec![]], 5));
    }

    #[test]
    fn a_key_survives_packing() {
        let key = Key { index: 7, generation: 9 };
        assert_eq!(Key::unpack(key.pack()), key);
    }
}
