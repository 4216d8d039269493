//! The accept mutex, as nginx's `accept_mutex`: of the loops of a process, only one listens at a time.
//!
//! It is a token and not a lock: a loop tries to take it, and listens or does not, but never waits. A stalled loop
//! cannot keep the others from accepting: its token may be taken away, so a holder checks before each use.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::environment::Environment;
use crate::inbox;
use crate::watchdog::is_stalled;

/// A token that one loop of this process may hold.
#[derive(Debug, Default)]
pub struct AcceptMutex {
    /// Number of the loop that holds it, from 1; 0 = free.
    holder: AtomicUsize,
}

impl AcceptMutex {
    /// A free token.
    pub const fn new() -> AcceptMutex {
        AcceptMutex { holder: AtomicUsize::new(0) }
    }

    /// Takes the token for the current loop; true if the loop holds it now. Succeeds if the token is free or its holder
    /// stalls or has ended.
    pub fn try_take(&self) -> bool {
        let own = own_number();
        let holder = self.holder.load(Ordering::Acquire);
        if holder == own {
            return true;
        }
        if holder != 0 && !is_stalled(holder - 1) {
            return false;
        }
        self.holder.compare_exchange(holder, own, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// True if the current loop holds the token.
    pub fn is_held(&self) -> bool {
        self.holder.load(Ordering::Acquire) == own_number()
    }

    /// Releases the token if the current loop holds it; true if it did.
    pub fn release(&self) -> bool {
        self.holder.compare_exchange(own_number(), 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Releases the token for a while. If the current loop held it, wakes all loops, so that another one takes it at
    /// once.
    pub fn hand_over(&self) {
        if self.release() {
            inbox::call_all(|| ());
        }
    }
}

fn own_number() -> usize {
    Environment::with(|environment| environment.executor.loop_index() + 1)
}
