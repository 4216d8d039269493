//! The allocator of the whole program, mimalloc, and the one setting of it that is not its default.
//!
//! mimalloc keeps freed pages for a second and then looks at them again only when it has some reason to, which a server
//! that has become idle never gives it: after 15,000 connections all of their memory stayed with the process. Given
//! back at once, a sixth stays. That costs two system calls per thousand short connections, and none per request
//! of a kept one.

use std::alloc::{GlobalAlloc, Layout};
use std::ffi::{c_int, c_void};

use libmimalloc_sys::{
    mi_free, mi_malloc, mi_malloc_aligned, mi_option_set, mi_realloc, mi_realloc_aligned, mi_zalloc, mi_zalloc_aligned,
};

#[global_allocator]
static ALLOCATOR: Mimalloc = Mimalloc;

/// mimalloc, asked for aligned memory only where that is more than it gives anyway: its way to aligned memory is
/// longer, and above a kilobyte it takes more memory than is asked for and looks for an aligned place in it.
struct Mimalloc;

/// Every block is aligned to this many bytes if it has as many (`MI_MAX_ALIGN_SIZE` of mimalloc's types.h), and to a
/// word if it is smaller.
const ALIGNED_ANYWAY: usize = 16;

fn is_aligned_anyway(layout: Layout) -> bool {
    layout.align() <= size_of::<usize>() || layout.align() <= ALIGNED_ANYWAY && layout.size() >= ALIGNED_ANYWAY
}

// SAFETY: what mimalloc's functions return is memory of the size that was asked for, or null; it is aligned as the
// function was told, or as `is_aligned_anyway` says. `mi_free` and both ways to grow take what any of them has
// returned. A layout's size and alignment are valid for mimalloc: the alignment is a power of two.
unsafe impl GlobalAlloc for Mimalloc {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: any size and any power of two will do.
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
        // SAFETY: the memory is this allocator's, and nobody uses it any more.
        unsafe { mi_free(memory.cast::<c_void>()) }
    }

    #[inline]
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let memory = memory.cast::<c_void>();
        let is_aligned = size >= ALIGNED_ANYWAY && is_aligned_anyway(layout);
        // SAFETY: the memory is this allocator's, and nobody uses it any more if it moves.
        unsafe {
            if is_aligned || layout.align() <= size_of::<usize>() {
                mi_realloc(memory, size).cast()
            } else {
                mi_realloc_aligned(memory, size, layout.align()).cast()
            }
        }
    }
}

/// `mi_option_purge_delay` of mimalloc.h, for which the bindings have no name; in versions 2 and 3 alike.
const PURGE_DELAY: c_int = 15;

/// From now on memory goes back to the system as soon as a page of it is free. To be called before there are threads.
pub fn give_back_at_once() {
    // SAFETY: the option is one that mimalloc has, and no other thread reads options meanwhile.
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
                // SAFETY: the layout has a size, and the memory is given back with the layout that it has.
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
