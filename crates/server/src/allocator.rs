//! The allocator of the whole program, and the one setting of it that is not its default.
//!
//! mimalloc keeps freed pages for a second and then looks at them again only when it has some reason to, which a server
//! that has become idle never gives it: after 15,000 connections all of their memory stayed with the process. Given
//! back at once, a sixth stays. That costs two system calls per thousand short connections, and none per request
//! of a kept one.

use std::ffi::c_int;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `mi_option_purge_delay` of mimalloc.h, for which the bindings have no name; in versions 2 and 3 alike.
const PURGE_DELAY: c_int = 15;

/// From now on memory goes back to the system as soon as a page of it is free. To be called before there are threads.
pub fn give_back_at_once() {
    // SAFETY: the option is one that mimalloc has, and no other thread reads options meanwhile.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, 0) };
}
