//! The dynamic table for one direction: RFC 7541 §2.3.2 and §4.
//!
//! The text of all entries is stored contiguously, oldest first. When it has grown to twice the size of the table, it
//! is moved to the front of the buffer. So every entry is a slice, and each byte is moved at most once.
//!
//! ```text
//! text:    [ evicted | oldest name value | ... | newest name value ]
//! entries:             last                      first, index 0
//! ```

use std::collections::VecDeque;

use super::ENTRY_OVERHEAD;

/// A table whose entries carry a `T` in addition to their text. A table without entries owns no memory.
#[derive(Clone, Debug)]
pub(super) struct DynamicTable<T> {
    text: Vec<u8>,
    /// Newest first.
    entries: VecDeque<Entry<T>>,
    /// Size in bytes as defined by RFC 7541 §4.1.
    size: usize,
    size_max: usize,
}

#[derive(Clone, Copy, Debug)]
struct Entry<T> {
    start: u32,
    name_length: u32,
    value_length: u32,
    tag: T,
}

impl<T> Entry<T> {
    fn size(&self) -> usize {
        (self.name_length + self.value_length) as usize + ENTRY_OVERHEAD
    }
}

impl<T: Copy> DynamicTable<T> {
    pub(super) fn new(size_max: u32) -> Self {
        Self { text: Vec::new(), entries: VecDeque::new(), size: 0, size_max: size_max as usize }
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    pub(super) fn size_max(&self) -> u32 {
        self.size_max as u32
    }

    /// Changes the maximum size, and evicts entries that no longer fit.
    pub(super) fn set_size_max(&mut self, size_max: u32) {
        self.size_max = size_max as usize;
        self.evict_to(self.size_max);
    }

    /// Returns name, value and tag of an entry; index 0 is the newest one.
    pub(super) fn get(&self, index: usize) -> Option<(&[u8], &[u8], T)> {
        let entry = self.entries.get(index)?;
        let text = &self.text[entry.start as usize..][..(entry.name_length + entry.value_length) as usize];
        let (name, value) = text.split_at(entry.name_length as usize);
        Some((name, value, entry.tag))
    }

    /// Adds an entry. One that is larger than the table empties it (RFC 7541 §4.4). Returns `true` if the entry was
    /// added.
    pub(super) fn insert(&mut self, name: &[u8], value: &[u8], tag: T) -> bool {
        let length = name.len() + value.len();
        let size = length + ENTRY_OVERHEAD;
        if size > self.size_max {
            self.evict_to(0);
            return false;
        }
        self.evict_to(self.size_max - size);
        if self.text.len() + length > 2 * self.size_max {
            self.compact();
        }
        let start = self.text.len() as u32;
        self.text.extend_from_slice(name);
        self.text.extend_from_slice(value);
        let (name_length, value_length) = (name.len() as u32, value.len() as u32);
        self.entries.push_front(Entry { start, name_length, value_length, tag });
        self.size += size;
        true
    }

    fn evict_to(&mut self, size: usize) {
        while self.size > size {
            let Some(oldest) = self.entries.pop_back() else { break };
            self.size -= oldest.size();
        }
        if self.entries.is_empty() {
            self.text.clear();
        }
    }

    fn compact(&mut self) {
        let start = self.entries.back().map_or(self.text.len(), |oldest| oldest.start as usize);
        self.text.drain(..start);
        for entry in &mut self.entries {
            entry.start -= start as u32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_entries_leave_first_and_text_stays_bounded() {
        let mut table = DynamicTable::new(100);
        for number in 0..10_000u32 {
            let (name, value) = (format!("n{number}"), "v".repeat(number as usize % 7));
            assert!(table.insert(name.as_bytes(), value.as_bytes(), number));
            let (found_name, found_value, tag) = table.get(0).unwrap();
            assert_eq!((found_name, found_value, tag), (name.as_bytes(), value.as_bytes(), number));
            assert!(table.size() <= 100 && table.text.len() <= 200);
            assert_eq!(table.len(), 2.min(number as usize + 1));
            if number > 0 {
                assert_eq!(table.get(1).unwrap().2, number - 1);
            }
            assert!(table.get(2).is_none());
        }
    }

    #[test]
    fn an_entry_larger_than_the_table_empties_it() {
        let mut table = DynamicTable::new(64);
        assert!(table.insert(b"a", b"b", ()));
        assert!(!table.insert(&[b'x'; 33], b"", ()));
        assert_eq!((table.len(), table.size()), (0, 0));
        assert!(table.insert(&[b'x'; 32], b"", ()));
        table.set_size_max(63);
        assert_eq!(table.len(), 0);
        table.set_size_max(0);
        assert!(!table.insert(b"", b"", ()));
    }
}
