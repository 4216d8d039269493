//! Taking turns in accepting, as nginx's `accept_mutex` has it: of the loops of a process, one at a time listens.
//!
//! A token and no lock: nobody waits for it, a loop tries and listens or does not. It refuses to let a loop that is
//! held up keep the others from accepting: its token may be taken away, so whoever holds it looks before each use.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::environment::Environment;
use crate::inbox;
use crate::watchdog::is_stalled;

/// The token that one loop of this process may have.
#[derive(Debug, Default)]
pub struct AcceptMutex {
    /// The number of the loop that has it, from 1; 0 = nobody.
    holder: AtomicUsize,
}

impl AcceptMutex {
    /// Nobody has it.
    pub const fn new() -> AcceptMutex {
        AcceptMutex { holder: AtomicUsize::new(0) }
    }

    /// Takes the token for the current loop; true if it has it now. Succeeds when nobody has it, and when the loop that
    /// has it stalls or has ended.
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

    /// Whether the current loop has it.
    pub fn is_held(&self) -> bool {
        self.holder.load(Ordering::Acquire) == own_number()
    }

    /// Gives the token back if the current loop has it; true if it had.
    pub fn release(&self) -> bool {
        self.holder.compare_exchange(own_number(), 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Gives the token back for a while, and if the current loop had it, has the others try at once: every loop makes a
    /// turn.
    pub fn hand_over(&self) {
        if self.release() {
            inbox::call_all(|| ());
        }
    }
}

fn own_number() -> usize {
    Environment::with(|environment| environment.executor.loop_index() + 1)
}
