//! Random numbers are ready before anybody waits for them: the library gathers its first seed when it is first asked,
//! which takes some hundred milliseconds, and a handshake asks.

use std::sync::atomic::{AtomicBool, Ordering};

/// This process has read a configuration that speaks TLS.
static IS_WANTED: AtomicBool = AtomicBool::new(false);

/// Event loops of this process run.
static HAS_LOOPS: AtomicBool = AtomicBool::new(false);

/// A configuration that is being built speaks TLS.
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
    // Whoever needs one later is told if there are none.
    let _ = ::aws_lc_rs::rand::fill(&mut [0; 32]);
}
