//! Provided buffers: the kernel chooses one when data arrives, so a waiting connection needs no memory.
//!
//! A buffer never outlives the handling of its completion: its bytes are copied to a lease and it is returned at once.
//! Otherwise slow clients would starve the others.
//!
//! ```text
//!   ring:   | entry 0 | entry 1 | …      each names a buffer; the kernel takes at its head, we add at `tail`
//!   memory: | buffer 0 | buffer 1 | …    `size` bytes each
//! ```

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, Ordering};

use io_uring::types::BufRingEntry;

use super::ring::{Queues, Ring};

/// The only group of a ring.
pub(super) const GROUP: u16 = 0;

const PAGE: usize = 4096;

pub(super) struct Buffers {
    entries: NonNull<BufRingEntry>,
    layout: Layout,
    memory: Box<[u8]>,
    size: usize,
    count: u16,
    tail: u16,
}

impl Buffers {
    /// Registers `count` buffers, a power of two, of `size` bytes. Errors: the kernel's (EINVAL before 5.19).
    pub fn register(ring: &mut Ring<impl Queues>, count: u16, size: u32) -> io::Result<Buffers> {
        assert!(count.is_power_of_two());
        let layout = Layout::array::<BufRingEntry>(count.into()).and_then(|layout| layout.align_to(PAGE));
        let layout = layout.expect("at most 65,535 entries of 16 bytes");
        // SAFETY: the layout is not empty, as a power of two is not 0.
        let entries = NonNull::new(unsafe { alloc_zeroed(layout) }.cast::<BufRingEntry>());
        let entries = entries.unwrap_or_else(|| handle_alloc_error(layout));
        let size = size as usize;
        let memory = vec![0; size * usize::from(count)].into_boxed_slice();
        let mut buffers = Buffers { entries, layout, memory, size, count, tail: 0 };
        // SAFETY: the memory is `count` entries long, aligned to a page, and freed only after the ring is closed (the
        // driver's fields are dropped in this order).
        unsafe { ring.queues().register_buffers(entries, count, GROUP) }?;
        for number in 0..count {
            buffers.add(number);
        }
        buffers.publish();
        Ok(buffers)
    }

    pub fn count(&self) -> u16 {
        self.count
    }

    pub fn size(&self) -> usize {
        self.size
    }

    /// The first `length` bytes of a buffer that a completion named.
    pub fn bytes(&self, number: u16, length: usize) -> &[u8] {
        let start = usize::from(number) * self.size;
        &self.memory[start..start + length.min(self.size)]
    }

    pub fn give_back(&mut self, number: u16) {
        self.add(number);
        self.publish();
    }

    fn add(&mut self, number: u16) {
        assert!(number < self.count);
        let index = usize::from(self.tail & (self.count - 1));
        let address = self.memory[usize::from(number) * self.size..].as_mut_ptr() as u64;
        // SAFETY: `index` is within the ring, and the kernel does not read entries from the tail on. Only these three
        // fields are written: the tail is the fourth field of the first entry.
        let entry = unsafe { &mut *self.entries.as_ptr().add(index) };
        entry.set_addr(address);
        entry.set_len(self.size as u32);
        entry.set_bid(number);
        self.tail = self.tail.wrapping_add(1);
    }

    fn publish(&self) {
        // SAFETY: the pointer is to the first entry, initialised with zeros; the tail is a `u16` within it, aligned,
        // and shared with the kernel, so it is written atomically.
        let tail = unsafe { AtomicU16::from_ptr(BufRingEntry::tail(self.entries.as_ptr()).cast_mut()) };
        tail.store(self.tail, Ordering::Release);
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `register`; the ring that used it is closed.
        unsafe { dealloc(self.entries.as_ptr().cast(), self.layout) };
    }
}
