//! Leases and the input buffer: memory on loan from the worker's size classes.
//!
//! A lease is taken when bytes are there and returned when they are consumed; what holds no bytes holds no memory, so
//! an idle connection costs none. Each thread has its own free lists. The bytes on lease are counted against a limit:
//! at the limit callers pause ([`leases_exhausted`]), a quarter above it nothing more is given out
//! ([`io::ErrorKind::OutOfMemory`]). A loop sets the limit: [`crate::LoopOptions`].
//!
//! Blocks are zeroed when they are first allocated and not between uses.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::rc::Rc;
use std::sync::Arc;

const KIB: usize = 1024;

/// The size classes, in bytes. A larger request is served by an allocation of its own.
pub const LEASE_CLASSES: [usize; 6] = [KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB];

/// How many free blocks of each class a thread keeps (5 MiB in all); the rest goes back to the allocator.
const KEPT_MAX: [usize; LEASE_CLASSES.len()] = [256, 128, 64, 16, 4, 1];

/// The limit on a thread that sets none.
const LEASED_MAX_DEFAULT: usize = 64 * KIB * KIB;

thread_local! {
    /// The bytes on lease.
    static LEASED: Cell<usize> = const { Cell::new(0) };
    static LEASED_MAX: Cell<usize> = const { Cell::new(LEASED_MAX_DEFAULT) };
    /// Free blocks by class.
    static FREE: RefCell<[Vec<Box<[u8]>>; LEASE_CLASSES.len()]> =
        const { RefCell::new([const { Vec::new() }; LEASE_CLASSES.len()]) };
}

/// The bytes on lease on this thread now.
pub fn leased_bytes() -> usize {
    LEASED.get()
}

/// Whether the limit of bytes on lease is reached: time to stop accepting and to refuse new requests.
pub fn leases_exhausted() -> bool {
    LEASED.get() >= LEASED_MAX.get()
}

/// The limit of bytes on lease on this thread.
pub fn leased_bytes_max() -> usize {
    LEASED_MAX.get()
}

/// Sets the limit of bytes on lease on this thread.
pub fn set_leased_bytes_max(bytes: usize) {
    LEASED_MAX.set(bytes);
}

/// The smallest class for that many bytes. By arithmetic, because every request asks: class n has 4^n KiB.
#[inline]
fn class_of(size: usize) -> Option<usize> {
    let above_first = size.div_ceil(KIB).saturating_sub(1);
    let class = (usize::BITS - above_first.leading_zeros()).div_ceil(2) as usize;
    (class < LEASE_CLASSES.len()).then_some(class)
}

/// One block of memory, charged to its thread.
struct Block {
    memory: Memory,
    charged: usize,
    /// It stays on the thread whose account it is in.
    _not_send: PhantomData<Rc<()>>,
}

/// A block's memory: its own, or shared with others who only read. Whoever writes to what is shared gets a copy.
enum Memory {
    Own(Box<[u8]>),
    Shared(Arc<Box<[u8]>>),
}

impl Memory {
    /// None; allocates nothing.
    fn none() -> Memory {
        Memory::Own(Box::default())
    }

    /// The memory as a block that can be used again, if nobody else has it.
    fn into_own(self) -> Option<Box<[u8]>> {
        match self {
            Memory::Own(memory) => Some(memory),
            Memory::Shared(memory) => Arc::into_inner(memory),
        }
    }
}

impl Deref for Memory {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match self {
            Memory::Own(memory) => memory,
            Memory::Shared(memory) => memory,
        }
    }
}

impl DerefMut for Memory {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        if let Memory::Shared(memory) = self {
            *self = Memory::Own(Box::clone(memory));
        }
        match self {
            Memory::Own(memory) => memory,
            Memory::Shared(_) => unreachable!("replaced above"),
        }
    }
}

impl Block {
    fn take(size: usize) -> io::Result<Block> {
        Block::take_below(size, LEASED_MAX.get().saturating_add(LEASED_MAX.get() / 4))
    }

    /// Without a look at the limit.
    fn take_past_limit(size: usize) -> Block {
        Block::take_below(size, usize::MAX).expect("there is no limit")
    }

    #[inline]
    fn take_below(size: usize, leased_max: usize) -> io::Result<Block> {
        let class = class_of(size);
        let charged = class.map_or_else(|| size.next_power_of_two(), |class| LEASE_CLASSES[class]);
        let leased = LEASED.get().saturating_add(charged);
        if leased > leased_max {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        // A thread that ends has no free blocks any more.
        let kept = class.and_then(|class| FREE.try_with(|free| free.borrow_mut()[class].pop()).ok().flatten());
        let memory = kept.unwrap_or_else(|| vec![0; charged].into_boxed_slice());
        LEASED.set(leased);
        Ok(Block { memory: Memory::Own(memory), charged, _not_send: PhantomData })
    }
}

impl Block {
    fn return_memory(&mut self) {
        let Some(memory) = std::mem::replace(&mut self.memory, Memory::none()).into_own() else { return };
        // Nothing when the memory is away (see `Lease::return_memory`); of no class when it is too large for any, or comes from
        // elsewhere.
        if let Some(class) = class_of(memory.len()).filter(|&class| memory.len() == LEASE_CLASSES[class]) {
            let _ = FREE.try_with(|free| {
                let list = &mut free.borrow_mut()[class];
                if list.len() < KEPT_MAX[class] {
                    list.push(memory);
                }
            });
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        LEASED.set(LEASED.get() - self.charged);
        self.return_memory();
    }
}

/// Owned bytes in memory on loan. Dereferences to its bytes.
pub struct Lease {
    block: Block,
    start: u32,
    end: u32,
}

impl Lease {
    /// A lease of exactly `length` bytes; what they contain is unspecified (it may be what an earlier user left).
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

    /// Returns the memory but stays charged, and tells its size: for work on another thread, which allocates as much when
    /// it begins. The lease is empty until `restore_memory`.
    pub(crate) fn return_memory(&mut self) -> usize {
        (self.start, self.end) = (0, 0);
        self.block.return_memory();
        self.block.charged
    }

    /// Takes memory of at least the size that `return_memory` told, which holds the lease's bytes in this part. Others may have
    /// it, too.
    pub(crate) fn restore_memory(&mut self, memory: Arc<Box<[u8]>>, bytes: Range<usize>) {
        assert!(bytes.end <= memory.len() && bytes.len() <= self.block.charged);
        self.block.memory = Memory::Shared(memory);
        (self.start, self.end) = (bytes.start as u32, bytes.end as u32);
    }

    /// Appends as much of `bytes` as there is room behind the end and returns how much that was.
    pub(crate) fn append(&mut self, bytes: &[u8]) -> usize {
        if matches!(self.block.memory, Memory::Shared(_)) {
            return 0;
        }
        let room = &mut self.block.memory[self.end as usize..];
        let count = room.len().min(bytes.len());
        room[..count].copy_from_slice(&bytes[..count]);
        self.end += count as u32;
        count
    }
}

impl Deref for Lease {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.block.memory[self.start as usize..self.end as usize]
    }
}

impl DerefMut for Lease {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.block.memory[self.start as usize..self.end as usize]
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
            Some(block) => &block.memory[self.start as usize..self.end as usize],
            None => &[],
        }
    }

    /// How many bytes are readable.
    #[inline]
    pub fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// Whether nothing is readable.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// The size of the memory held, 0 when empty.
    pub fn capacity(&self) -> usize {
        self.block.as_ref().map_or(0, |block| block.memory.len())
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

    /// Exactly `size` writable bytes behind the readable ones, moving or growing the memory if need be; what is written
    /// there becomes readable with [`Buffer::commit`]. Errors: `OutOfMemory` at the hard limit.
    pub fn spare(&mut self, size: usize) -> io::Result<&mut [u8]> {
        self.make_room(size, Block::take)
    }

    /// Appends a copy of `bytes`, above the limits if need be, where the caller has a bound of its own: they are charged,
    /// so nobody else gets more until they are gone.
    pub(crate) fn append_past_limit(&mut self, bytes: &[u8]) {
        let room = self.make_room(bytes.len(), |size| Ok(Block::take_past_limit(size)));
        room.expect("the size is in bounds").copy_from_slice(bytes);
        self.commit(bytes.len());
    }

    fn make_room(&mut self, size: usize, take: impl FnOnce(usize) -> io::Result<Block>) -> io::Result<&mut [u8]> {
        let length = self.len();
        let wanted = length.checked_add(size).filter(|&wanted| wanted <= u32::MAX as usize / 2);
        let wanted = wanted.ok_or(io::ErrorKind::OutOfMemory)?;
        match &mut self.block {
            Some(block) if block.memory.len() - self.end as usize >= size => {}
            Some(block) if block.memory.len() >= wanted => {
                block.memory.copy_within(self.start as usize..self.end as usize, 0);
                (self.start, self.end) = (0, length as u32);
            }
            held => {
                let mut block = take(wanted)?;
                if let Some(old) = held {
                    block.memory[..length].copy_from_slice(&old.memory[self.start as usize..self.end as usize]);
                }
                *held = Some(block);
                (self.start, self.end) = (0, length as u32);
            }
        }
        let block = self.block.as_mut().expect("one was just taken");
        Ok(&mut block.memory[self.end as usize..self.end as usize + size])
    }

    /// Makes the first `count` bytes of the last [`Buffer::spare`] readable; with 0 an empty buffer returns its memory.
    pub fn commit(&mut self, count: usize) {
        assert!(self.end as usize + count <= self.capacity());
        self.end += count as u32;
        if self.is_empty() {
            self.clear();
        }
    }

    /// The readable bytes as a lease, without a copy; `None` when empty.
    pub fn into_lease(self) -> Option<Lease> {
        let Buffer { block, start, end } = self;
        block.map(|block| Lease { block, start, end })
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

    #[test]
    fn a_size_gets_the_smallest_class_that_holds_it() {
        assert_eq!(class_of(0), Some(0));
        for (class, &bytes) in LEASE_CLASSES.iter().enumerate() {
            assert_eq!(class_of(bytes), Some(class));
            assert_eq!(class_of(bytes + 1), Some(class + 1).filter(|&class| class < LEASE_CLASSES.len()));
        }
        assert_eq!(class_of(usize::MAX), None);
    }

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
    fn shared_memory_is_charged_to_everybody_and_copied_for_whoever_writes() {
        let before = leased_bytes();
        let (mut one, mut other) = (Lease::new(1000).unwrap(), Lease::new(1000).unwrap());
        assert_eq!((one.return_memory(), other.return_memory(), leased_bytes()), (1024, 1024, before + 2048));
        let memory = Arc::new(vec![7; 1024].into_boxed_slice());
        one.restore_memory(Arc::clone(&memory), 0..5);
        other.restore_memory(memory, 0..5);
        one[0] = 1;
        assert_eq!((&one[..], &other[..]), (&[1, 7, 7, 7, 7][..], &[7; 5][..]));
        let mut buffer = Buffer::from(other);
        buffer.append(&[8]).unwrap();
        assert_eq!(buffer.readable(), [7, 7, 7, 7, 7, 8]);
        drop((one, buffer));
        assert_eq!(leased_bytes(), before);
        assert_eq!(size_of::<Lease>(), 32);
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
