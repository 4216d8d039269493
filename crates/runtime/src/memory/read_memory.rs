//! Memory that pool threads or the ring read files into: taken on one thread, returned on another.
//!
//! An allocator keeps free memory for the thread that it was allocated on. A pool has dozens of threads that take
//! memory, and a loop returns all of it; so free memory would be scattered, a multiple of the memory in use, and no
//! page of it could return to the system. These blocks therefore belong to no thread:
//!
//! ```text
//!   system ──map──► cold ──take──► ReadMemory ──drop, on any thread──► warm (4 MiB) ──take──► …
//!                    ▲                                             │ beyond that
//!                    └──── its pages go back to the system ◄───────┘
//! ```
//!
//! Addresses stay mapped, pages do not: nothing is ever unmapped, so the number of mappings grows only with the maximum
//! in use. The content of a block is unspecified when it is taken.

use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;

use parking_lot::{Mutex, MutexGuard};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

use crate::memory::blocks::{LEASE_CLASSES, class_of};

/// Bytes of free blocks that keep their pages: what some dozens of threads read at once.
const WARM_BYTES_MAX: usize = 4 << 20;

/// Bytes that are mapped at once for blocks of a class; the largest class has this size.
const REGION_BYTES: usize = 1 << 20;

/// Address of a free block.
struct Start(NonNull<u8>);

// SAFETY: a free block has no references, and belongs to no thread.
unsafe impl Send for Start {}

/// The free blocks of all threads.
struct Free {
    /// Free blocks with pages, by class.
    warm: [Vec<Start>; LEASE_CLASSES.len()],
    /// Free blocks without pages, by class.
    cold: [Vec<Start>; LEASE_CLASSES.len()],
    warm_bytes: usize,
}

static FREE: Mutex<Free> = Mutex::new(Free::NONE);

impl Free {
    const NONE: Free = Free {
        warm: [const { Vec::new() }; LEASE_CLASSES.len()],
        cold: [const { Vec::new() }; LEASE_CLASSES.len()],
        warm_bytes: 0,
    };

    fn has_room(&self, class: usize) -> bool {
        self.warm_bytes + LEASE_CLASSES[class] <= WARM_BYTES_MAX
    }

    fn push_warm(&mut self, class: usize, start: Start) {
        self.warm_bytes += LEASE_CLASSES[class];
        self.warm[class].push(start);
    }

    fn pop_warm(&mut self, class: usize) -> Option<Start> {
        let start = self.warm[class].pop()?;
        self.warm_bytes -= LEASE_CLASSES[class];
        Some(start)
    }

    /// The class with the most pages in free blocks: if sizes have changed, one that is not in use any more.
    fn warmest_class(&self) -> usize {
        (0..LEASE_CLASSES.len()).max_by_key(|&class| self.warm[class].len() * LEASE_CLASSES[class]).expect("classes")
    }
}

/// Owned, writable bytes, on any thread.
pub struct ReadMemory {
    start: NonNull<u8>,
    length: usize,
    /// `None`: allocated by the allocator.
    class: Option<usize>,
}

// SAFETY: this value owns the bytes as a box does.
unsafe impl Send for ReadMemory {}
// SAFETY: as above.
unsafe impl Sync for ReadMemory {}

impl ReadMemory {
    /// Memory of `length` bytes, page-aligned if they are at least a page.
    pub fn new(length: usize) -> ReadMemory {
        let class = class_of(length).filter(|&class| LEASE_CLASSES[class].is_multiple_of(rustix::param::page_size()));
        match class.and_then(|class| Some((class, take(&FREE, class)?))) {
            Some((class, Start(start))) => ReadMemory { start, length, class: Some(class) },
            // Less than a page, more than the largest class, or the system maps no more.
            None => {
                let bytes = Box::into_raw(vec![0_u8; length].into_boxed_slice());
                let start = NonNull::new(bytes.cast::<u8>()).expect("a box has an address");
                ReadMemory { start, length, class: None }
            }
        }
    }
}

impl Default for ReadMemory {
    fn default() -> ReadMemory {
        ReadMemory::new(0)
    }
}

impl Deref for ReadMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: there are `length` initialized bytes, and this is the only reference.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl DerefMut for ReadMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

impl Drop for ReadMemory {
    fn drop(&mut self) {
        match self.class {
            Some(class) => give_back(&FREE, class, Start(self.start)),
            // SAFETY: `new` made it from a box of this length, and there are no references left.
            None => drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(self.start.as_ptr(), self.length)) }),
        }
    }
}

/// Takes a block of this class; `None` if the system maps no more.
fn take(free: &Mutex<Free>, class: usize) -> Option<Start> {
    let size = LEASE_CLASSES[class];
    {
        let mut free = free.lock();
        let warm = free.pop_warm(class);
        if let Some(start) = warm.or_else(|| free.cold[class].pop()) {
            return Some(start);
        }
    }
    let blocks = REGION_BYTES / size;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address that the system chooses touches no other memory.
    let region = unsafe { mmap_anonymous(ptr::null_mut(), blocks * size, protection, MapFlags::PRIVATE) }.ok()?;
    // SAFETY: the mapping is ours. A huge page would take memory for unused blocks; an error means that there are none.
    let _ = unsafe { madvise(region, blocks * size, Advice::LinuxNoHugepage) };
    let region = NonNull::new(region.cast::<u8>())?;
    // SAFETY: each block lies within the region.
    let mut starts = (0..blocks).map(|block| Start(unsafe { region.add(block * size) }));
    let first = starts.next();
    free.lock().cold[class].extend(starts);
    first
}

/// Blocks of another size that give up their pages for one: each costs a system call.
const DISPLACED_MAX: usize = 4;

/// Returns a block. It keeps its pages if there is room, which blocks of another class with more pages make.
fn give_back(free: &Mutex<Free>, class: usize, start: Start) {
    let mut free = free.lock();
    for _ in 0..DISPLACED_MAX {
        let warmest = free.warmest_class();
        if free.has_room(class) || warmest == class {
            break;
        }
        let Some(other) = free.pop_warm(warmest) else { break };
        MutexGuard::unlocked(&mut free, || release_pages(warmest, &other));
        free.cold[warmest].push(other);
    }
    if free.has_room(class) {
        return free.push_warm(class, start);
    }
    MutexGuard::unlocked(&mut free, || release_pages(class, &start));
    free.cold[class].push(start);
}

/// Returns the pages of a free block to the system.
fn release_pages(class: usize, start: &Start) {
    // SAFETY: the block consists of whole pages of a private mapping, without references: they may be zero from now on.
    // An error leaves them as they are.
    let _ = unsafe { madvise(start.0.as_ptr().cast(), LEASE_CLASSES[class], Advice::LinuxDontNeed) };
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: usize = 1 << 20;

    #[test]
    fn memory_of_any_length_is_ones_own() {
        let lengths = [0, 1, 1000, 4096, 4097, 16 << 10, 70_000, LARGE, LARGE + 1];
        let mut all: Vec<ReadMemory> = lengths.into_iter().map(ReadMemory::new).collect();
        for (number, memory) in all.iter_mut().enumerate() {
            memory.fill(number as u8);
        }
        for (number, (memory, length)) in all.iter().zip(lengths).enumerate() {
            assert_eq!(memory.len(), length);
            assert!(memory.iter().all(|&byte| byte == number as u8), "{length}");
        }
    }

    #[test]
    fn free_blocks_keep_their_pages_up_to_a_bound_for_all_sizes_together() {
        let free = Mutex::new(Free::NONE);
        let take_all = |class: usize| -> Vec<Start> {
            let count = 2 * WARM_BYTES_MAX / LEASE_CLASSES[class];
            (0..count).map(|_| take(&free, class).expect("there is memory")).collect()
        };
        // For twice as many blocks as are kept: number of those that still have the bytes written to them, times their
        // size.
        let kept_bytes = |class: usize| -> usize {
            let blocks = take_all(class);
            // SAFETY: the test owns the block, which has at least a byte.
            let kept = blocks.iter().filter(|block| unsafe { block.0.replace(1) } == 1).count();
            blocks.into_iter().for_each(|block| give_back(&free, class, block));
            kept * LEASE_CLASSES[class]
        };
        let [large, small] = [LARGE, 16 << 10].map(|length| class_of(length).expect("a class"));
        assert_eq!([large, large].map(kept_bytes), [0, WARM_BYTES_MAX]);
        // Of the room of an unused size, another one gets more than half, and never more than all.
        assert_eq!(kept_bytes(small), 0);
        assert!((WARM_BYTES_MAX / 2..WARM_BYTES_MAX).contains(&kept_bytes(small)));
        assert_eq!(free.lock().warm_bytes, WARM_BYTES_MAX);
    }
}
