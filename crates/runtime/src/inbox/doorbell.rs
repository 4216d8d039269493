//! The doorbell of a loop: tells senders whether the loop must be woken, and the loop whether it may sleep, so that no
//! message is missed.
//!
//! It holds no messages and wakes nothing itself, so it is small enough to be checked in every order of events that the
//! memory model allows (`tests/loom_doorbell.rs`).
//!
//! ```text
//!   sender, when its message lies in the queue       loop
//!   1  pending.swap(true)                              a  sleeping.swap(true)          before it waits
//!   2  if sleeping.swap(false): ring                 b  if pending: do not wait
//!                                                    c  wait for the bell
//!                                                    d  sleeping.swap(false)         when it is awake again
//!                                                    e  if pending.swap(false): take everything from the queue
//! ```
//!
//! Each write of a flag also reads its previous value, so all accesses of a flag have one order, and each sees
//! everything done before the preceding ones. (A plain store would be no cheaper: it would have to be sequentially
//! consistent, which is the same instruction on x86.) If `2` comes before `a`, `a` has seen `1`, and `b` does not wait.
//! If it comes between `a` and `d`, the first sender to reach `2` finds the flag set and rings, and one ring wakes the
//! loop for all. If it comes after that and before `d`, `d` has seen `1`, and `e` takes the message. (With a plain
//! store in `d` it might not: then the message of a second sender, which did not ring because the first one did, would
//! be missed.) In `e` the flag is cleared before the queue is emptied, so a later message sets it again.

// The parent module chooses the atomics: the standard library's in the program, loom's in the test.
use super::{AtomicBool, Ordering};

pub(crate) struct Doorbell {
    /// There is a message, or was one a moment ago.
    pending: AtomicBool,
    /// The loop waits, or is about to, and no sender has rung yet.
    sleeping: AtomicBool,
}

impl Doorbell {
    pub fn new() -> Self {
        Doorbell { pending: AtomicBool::new(false), sleeping: AtomicBool::new(false) }
    }

    /// Announces a message that is in the queue. True if the loop must be woken: for one caller per sleep.
    #[must_use]
    pub fn announce(&self) -> bool {
        self.pending.swap(true, Ordering::AcqRel);
        self.sleeping.swap(false, Ordering::AcqRel)
    }

    /// Announces that the loop is about to wait; false if there is a message and it must not. Only for the loop, like
    /// all methods below.
    #[must_use]
    pub fn may_sleep(&self) -> bool {
        self.sleeping.swap(true, Ordering::AcqRel);
        if self.is_pending() {
            self.awake();
            return false;
        }
        true
    }

    /// Notes that the loop does not wait any more.
    pub fn awake(&self) {
        self.sleeping.swap(false, Ordering::AcqRel);
    }

    /// True if there is a message.
    pub fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// True if the queue must be emptied now.
    #[must_use]
    pub fn answer(&self) -> bool {
        // Most turns find no message, and a load costs nothing.
        self.is_pending() && self.pending.swap(false, Ordering::AcqRel)
    }

    /// Notes that messages were left in the queue.
    pub fn answer_again(&self) {
        self.pending.swap(true, Ordering::AcqRel);
    }
}
