//! The allocator of the whole program: mimalloc with one setting changed.
//!
//! mimalloc keeps freed pages for a second, and afterwards returns them only on further allocator activity. An idle
//! server has none: after 15,000 connections all of their memory stayed with the process. If pages are returned at
//! once, a sixth of it stays. The cost is two system calls per thousand short connections, and none per request of a
//! kept-alive connection.

use std::alloc::{GlobalAlloc, Layout};
use std::ffi::{c_int, c_void};

use libmimalloc_sys::{
    mi_free, mi_malloc, mi_malloc_aligned, mi_option_set, mi_realloc, mi_realloc_aligned, mi_zalloc, mi_zalloc_aligned,
};

#[global_allocator]
static ALLOCATOR: Mimalloc = Mimalloc;

/// mimalloc, with the aligned functions used only for alignments that it does not guarantee anyway: they are slower,
/// and above one kilobyte they allocate more memory than requested to find an aligned address in it.
struct Mimalloc;

/// Alignment in bytes of every block of at least this size (`MI_MAX_ALIGN_SIZE` in mimalloc's types.h). Smaller blocks
/// are aligned to a word.
const ALIGNED_ANYWAY: usize = 16;

fn is_aligned_anyway(layout: Layout) -> bool {
    layout.align() <= size_of::<usize>() || layout.align() <= ALIGNED_ANYWAY && layout.size() >= ALIGNED_ANYWAY
}

// SAFETY: mimalloc's functions return memory of the requested size, or null. It has the requested alignment, or that of
// `is_aligned_anyway`. `mi_free` and both realloc functions accept memory from any of them. A layout's size and
// alignment are valid for mimalloc: the alignment is a power of two.
unsafe impl GlobalAlloc for Mimalloc {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the functions accept any size and any power of two.
        unsafe {
            if is_aligned_anyway(layout) {
                mi_malloc(layout.size()).cast()
            } else {
                mi_malloc_aligned(layout.size(), layout.align()).cast()
            }
        }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        unsafe {
            if is_aligned_anyway(layout) {
                mi_zalloc(layout.size()).cast()
            } else {
                mi_zalloc_aligned(layout.size(), layout.align()).cast()
            }
        }
    }

    #[inline]
    unsafe fn dealloc(&self, memory: *mut u8, _: Layout) {
        // SAFETY: the memory was allocated by this allocator, and is not used any more.
        unsafe { mi_free(memory.cast::<c_void>()) }
    }

    #[inline]
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let memory = memory.cast::<c_void>();
        let is_aligned = size >= ALIGNED_ANYWAY && is_aligned_anyway(layout);
        // SAFETY: the memory was allocated by this allocator, and is not used any more if it moves.
        unsafe {
            if is_aligned || layout.align() <= size_of::<usize>() {
                mi_realloc(memory, size).cast()
            } else {
                mi_realloc_aligned(memory, size, layout.align()).cast()
            }
        }
    }
}

/// `mi_option_purge_delay` of mimalloc.h, in versions 2 and 3 alike. The bindings have no name for it.
const PURGE_DELAY: c_int = 15;

/// Makes mimalloc return memory to the system as soon as a page is free. Must be called before threads are started.
pub fn give_back_at_once() {
    // SAFETY: mimalloc has this option, and no other thread reads options at the same time.
    unsafe { mi_option_set(PURGE_DELAY, 0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_as_it_was_asked_for() {
        for align in [1, 2, 4, 8, 16, 32, 64, 4096] {
            for size in (1..200).chain([1000, 1024, 1025, 1300, 5000, 70_000]) {
                let layout = Layout::from_size_align(size, align).expect("a layout");
                // SAFETY: the layout has a non-zero size, and the memory is freed with its own layout.
                unsafe {
                    let memory = ALLOCATOR.alloc(layout);
                    let zeroed = ALLOCATOR.alloc_zeroed(layout);
                    assert!(!memory.is_null() && !zeroed.is_null());
                    assert!(memory.addr().is_multiple_of(align) && zeroed.addr().is_multiple_of(align), "{layout:?}");
                    let grown = ALLOCATOR.realloc(memory, layout, size + 17);
                    assert!(grown.addr().is_multiple_of(align), "{layout:?}");
                    ALLOCATOR.dealloc(grown, Layout::from_size_align(size + 17, align).expect("a layout"));
                    ALLOCATOR.dealloc(zeroed, layout);
                }
            }
        }
    }
}
