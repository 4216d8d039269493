//! Seeds the random number generator before it is needed. The library gathers its first seed at the first use, which
//! takes some hundred milliseconds and would delay a handshake.

use std::sync::atomic::{AtomicBool, Ordering};

/// This process has read a configuration with TLS.
static IS_WANTED: AtomicBool = AtomicBool::new(false);

/// This process runs event loops.
static HAS_LOOPS: AtomicBool = AtomicBool::new(false);

/// Called when a configuration with TLS is built.
pub(super) fn want() {
    let was_wanted = IS_WANTED.swap(true, Ordering::AcqRel);
    if !was_wanted && HAS_LOOPS.load(Ordering::Acquire) {
        gather();
    }
}

/// Called on the thread of an event loop before it serves.
pub fn prepare() {
    HAS_LOOPS.store(true, Ordering::Release);
    if IS_WANTED.load(Ordering::Acquire) {
        gather();
    }
}

fn gather() {
    // A failure is reported at the next use.
    let _ = ::aws_lc_rs::rand::fill(&mut [0; 32]);
}
