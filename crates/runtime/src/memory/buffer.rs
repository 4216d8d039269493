//! Leases and the input buffer: writable memory on loan from the worker's size classes (`blocks.rs`).
//!
//! A lease is taken when there are bytes and returned when they are consumed; an empty buffer holds no memory, so an
//! idle connection costs none. Leased bytes count towards a limit of the thread: at the limit callers pause
//! ([`leases_exhausted`](crate::leases_exhausted)), a quarter above it no more is leased
//! ([`io::ErrorKind::OutOfMemory`]). [`crate::LoopOptions`] sets the limit of a loop.
//!
//! [`Lease::freeze`] turns written bytes into [`Bytes`](crate::Bytes), which may have several readers.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut, Range};

use crate::memory::blocks::Block;

/// Owned bytes in leased memory. Dereferences to its bytes.
pub struct Lease {
    block: Block,
    start: u32,
    end: u32,
}

impl Lease {
    /// A lease of exactly `length` bytes with unspecified content (perhaps that of an earlier user).
    ///
    /// Errors: `OutOfMemory` at the hard limit.
    pub fn new(length: usize) -> io::Result<Lease> {
        let end = u32::try_from(length).map_err(|_| io::ErrorKind::OutOfMemory)?;
        Ok(Lease { block: Block::take(length)?, start: 0, end })
    }

    /// A lease with a copy of `bytes`. Errors: `OutOfMemory` at the hard limit.
    pub fn copy_of(bytes: &[u8]) -> io::Result<Lease> {
        let mut lease = Lease::new(bytes.len())?;
        lease.copy_from_slice(bytes);
        Ok(lease)
    }

    /// Keeps the first `length` bytes.
    pub fn truncate(&mut self, length: usize) {
        self.end = self.end.min(self.start.saturating_add(u32::try_from(length).unwrap_or(u32::MAX)));
    }

    /// Keeps the bytes in `range`, which must lie within the lease.
    pub fn slice(mut self, range: Range<usize>) -> Lease {
        assert!(range.start <= range.end && range.end <= self.len());
        self.end = self.start + range.end as u32;
        self.start += range.start as u32;
        self
    }

    /// Removes `count` bytes from the front.
    pub fn advance(&mut self, count: usize) {
        assert!(count <= self.len());
        self.start += count as u32;
    }

    /// Appends the part of `bytes` that fits behind the end, and returns its length.
    pub fn append(&mut self, bytes: &[u8]) -> usize {
        let room = &mut self.block.bytes_mut()[self.end as usize..];
        let count = room.len().min(bytes.len());
        room[..count].copy_from_slice(&bytes[..count]);
        self.end += count as u32;
        count
    }

    /// The block, and the range of the lease in it.
    #[inline]
    pub(crate) fn into_block(self) -> (Block, Range<usize>) {
        (self.block, self.start as usize..self.end as usize)
    }

    /// The lease of these bytes of a block.
    pub(crate) fn of_block(block: Block, range: Range<usize>) -> Lease {
        assert!(range.start <= range.end && range.end <= block.size());
        Lease { block, start: range.start as u32, end: range.end as u32 }
    }
}

impl Deref for Lease {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.block.bytes()[self.start as usize..self.end as usize]
    }
}

impl DerefMut for Lease {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.block.bytes_mut()[self.start as usize..self.end as usize]
    }
}

impl AsRef<[u8]> for Lease {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease({} bytes)", self.len())
    }
}

/// A growing input buffer: bytes are received or appended at the end and consumed at the front. Contiguous.
///
/// ```text
///   block:  | consumed | readable | spare |
///           0        start       end    capacity
/// ```
///
/// Holds no memory when it holds no bytes.
#[derive(Default)]
pub struct Buffer {
    block: Option<Block>,
    start: u32,
    end: u32,
}

impl Buffer {
    /// An empty buffer.
    pub const fn new() -> Self {
        Buffer { block: None, start: 0, end: 0 }
    }

    /// The bytes received and not consumed yet.
    #[inline]
    pub fn readable(&self) -> &[u8] {
        match &self.block {
            Some(block) => &block.bytes()[self.start as usize..self.end as usize],
            None => &[],
        }
    }

    /// As [`Buffer::readable`], to change the bytes in place.
    pub fn readable_mut(&mut self) -> &mut [u8] {
        match &mut self.block {
            Some(block) => &mut block.bytes_mut()[self.start as usize..self.end as usize],
            None => &mut [],
        }
    }

    /// Number of readable bytes.
    #[inline]
    pub fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// True if there are no readable bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Size of the memory held, 0 when empty.
    pub fn capacity(&self) -> usize {
        self.block.as_ref().map_or(0, |block| block.size())
    }

    /// Removes `count` bytes from the front. The memory is returned with the last one.
    #[inline]
    pub fn consume(&mut self, count: usize) {
        assert!(count <= self.len(), "consumed more than there was");
        self.start += count as u32;
        if self.is_empty() {
            self.clear();
        }
    }

    /// Removes everything and returns the memory.
    pub fn clear(&mut self) {
        self.block = None;
        self.start = 0;
        self.end = 0;
    }

    /// Appends a copy of `bytes`. Errors: `OutOfMemory` at the hard limit; nothing is appended then.
    pub fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.spare(bytes.len())?.copy_from_slice(bytes);
        self.commit(bytes.len());
        Ok(())
    }

    /// Exactly `size` writable bytes behind the readable ones; moves or enlarges the memory if necessary.
    /// [`Buffer::commit`] makes the written bytes readable. Errors: `OutOfMemory` at the hard limit.
    pub fn spare(&mut self, size: usize) -> io::Result<&mut [u8]> {
        self.make_room(size, Block::take)
    }

    /// Appends a copy of `bytes`, above the limits if necessary; the caller has a limit of its own. They are charged,
    /// so no other lease succeeds until they are gone.
    pub fn append_past_limit(&mut self, bytes: &[u8]) {
        let room = self.make_room(bytes.len(), |size| Ok(Block::take_past_limit(size)));
        room.expect("the size is in bounds").copy_from_slice(bytes);
        self.commit(bytes.len());
    }

    fn make_room(&mut self, size: usize, take: impl FnOnce(usize) -> io::Result<Block>) -> io::Result<&mut [u8]> {
        let length = self.len();
        let wanted = length.checked_add(size).filter(|&wanted| wanted <= u32::MAX as usize / 2);
        let wanted = wanted.ok_or(io::ErrorKind::OutOfMemory)?;
        match &mut self.block {
            Some(block) if block.size() - self.end as usize >= size => {}
            Some(block) if block.size() >= wanted => {
                block.bytes_mut().copy_within(self.start as usize..self.end as usize, 0);
                (self.start, self.end) = (0, length as u32);
            }
            held => {
                let mut block = take(wanted)?;
                if let Some(old) = held {
                    block.bytes_mut()[..length].copy_from_slice(&old.bytes()[self.start as usize..self.end as usize]);
                }
                *held = Some(block);
                (self.start, self.end) = (0, length as u32);
            }
        }
        let block = self.block.as_mut().expect("a block was just taken");
        Ok(&mut block.bytes_mut()[self.end as usize..self.end as usize + size])
    }

    /// Makes the first `count` bytes of the last [`Buffer::spare`] readable; with 0 an empty buffer returns its memory.
    pub fn commit(&mut self, count: usize) {
        assert!(self.end as usize + count <= self.capacity());
        self.end += count as u32;
        if self.is_empty() {
            self.clear();
        }
    }

    /// Moves the readable bytes to memory of exactly their size if that is at most half as much: for bytes that are
    /// kept for long.
    pub fn shrink(&mut self) {
        let readable = self.readable();
        if readable.is_empty() || 2 * readable.len() > self.capacity() {
            return;
        }
        let mut exact = Block::exact(readable.len());
        exact.bytes_mut().copy_from_slice(readable);
        (self.start, self.end) = (0, readable.len() as u32);
        self.block = Some(exact);
    }

    /// The readable bytes as a lease, without a copy; `None` when empty.
    pub fn into_lease(self) -> Option<Lease> {
        let Buffer { block, start, end } = self;
        block.map(|block| Lease { block, start, end })
    }

    /// Takes the first `count` bytes as a lease; the rest stays. Copies the shorter of the two parts, and nothing if
    /// that is empty. Errors: `OutOfMemory` at the hard limit; nothing is taken then.
    pub fn split_to(&mut self, count: usize) -> io::Result<Lease> {
        assert!(count <= self.len(), "more is taken than there is");
        let (front, rest) = self.readable().split_at(count);
        if front.len() <= rest.len() {
            let front = Lease::copy_of(front)?;
            self.consume(count);
            return Ok(front);
        }
        let kept = if rest.is_empty() { Buffer::new() } else { Buffer::from(Lease::copy_of(rest)?) };
        let mut front = std::mem::replace(self, kept).into_lease().expect("longer than the rest");
        front.truncate(count);
        Ok(front)
    }

    /// Takes the readable bytes as a lease, without a copy, and leaves the buffer empty.
    pub fn take_lease(&mut self) -> Option<Lease> {
        std::mem::take(self).into_lease()
    }
}

impl From<Lease> for Buffer {
    fn from(lease: Lease) -> Self {
        let Lease { block, start, end } = lease;
        let mut buffer = Buffer { block: Some(block), start, end };
        buffer.commit(0);
        buffer
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} of {} bytes)", self.len(), self.capacity())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{leased_bytes, leases_exhausted, set_leased_bytes_max};

    #[test]
    fn an_empty_buffer_holds_no_memory() {
        let before = leased_bytes();
        let mut buffer = Buffer::new();
        buffer.append(b"hello").unwrap();
        assert_eq!(leased_bytes(), before + 1024);
        buffer.consume(5);
        assert_eq!((buffer.capacity(), leased_bytes()), (0, before));
        buffer.spare(100).unwrap();
        buffer.commit(0);
        assert_eq!(leased_bytes(), before);
    }

    #[test]
    fn a_buffer_that_is_shrunk_holds_its_bytes_alone_and_grows_again() {
        let before = leased_bytes();
        let mut buffer = Buffer::new();
        buffer.append(&[1; 200]).unwrap();
        buffer.consume(100);
        buffer.shrink();
        assert_eq!((buffer.readable(), buffer.capacity(), leased_bytes()), (&[1; 100][..], 100, before + 100));
        buffer.append(&[2; 50]).unwrap();
        assert_eq!(buffer.readable(), [vec![1; 100], vec![2; 50]].concat());
        buffer.append(&[3; 800]).unwrap();
        // That would save too little.
        buffer.shrink();
        assert_eq!(buffer.capacity(), 1024);
        buffer.consume(950);
        buffer.shrink();
        assert_eq!((buffer.capacity(), leased_bytes()), (0, before));
    }

    #[test]
    fn bytes_survive_moving_and_growing() {
        let mut buffer = Buffer::new();
        buffer.append(&[1; 1000]).unwrap();
        buffer.consume(900);
        buffer.append(&[2; 500]).unwrap();
        assert_eq!(buffer.capacity(), 1024);
        buffer.append(&[3; 5000]).unwrap();
        assert_eq!(buffer.capacity(), 16 * 1024);
        let expected: Vec<u8> = [vec![1; 100], vec![2; 500], vec![3; 5000]].concat();
        assert_eq!(buffer.readable(), expected);
        let lease = buffer.take_lease().unwrap();
        assert!(buffer.is_empty());
        assert_eq!(&lease.slice(99..101)[..], [1, 2]);
    }

    #[test]
    fn split_buffer_keeps_both_parts_and_copies_the_shorter() {
        for (taken, is_copied) in [(100, true), (400, true), (900, false), (1000, false)] {
            let all: Vec<u8> = (0..1000_u32).map(|number| (number % 251) as u8).collect();
            let mut buffer = Buffer::new();
            buffer.append(&all).unwrap();
            let memory = buffer.readable().as_ptr();
            let front = buffer.split_to(taken).unwrap();
            assert_eq!((&front[..], buffer.readable()), all.split_at(taken));
            assert_eq!(front.as_ptr() != memory, is_copied, "{taken}");
            assert_eq!(buffer.capacity() == 0, taken == 1000);
        }
    }

    #[test]
    fn at_the_limit_callers_are_told_and_above_it_nothing_is_given() {
        // The limit is per thread: a thread of its own keeps other tests out of it.
        let work = || {
            set_leased_bytes_max(4096);
            let four = Lease::new(4000).unwrap();
            assert!(leases_exhausted());
            let last = Lease::new(10).unwrap();
            assert_eq!(Lease::new(10).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
            let mut buffer = Buffer::new();
            assert_eq!(buffer.append(b"x").unwrap_err().kind(), io::ErrorKind::OutOfMemory);
            drop((four, last));
            assert_eq!((leased_bytes(), leases_exhausted()), (0, false));
            buffer.append(b"x").unwrap();
            buffer.append_past_limit(&[b'y'; 10_000]);
            assert_eq!((buffer.len(), leased_bytes()), (10_001, 16 * 1024));
            assert_eq!(Lease::new(1).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
        };
        std::thread::spawn(work).join().unwrap();
    }
}
