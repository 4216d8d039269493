//! The doorbell of a loop: how others learn whether it must be woken, and how it goes to sleep without missing anybody.
//!
//! It holds no messages and wakes nobody itself, which makes it small enough to be checked in every order of events
//! that the memory model allows (`tests/loom_doorbell.rs`).
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
//! Whoever writes a flag also reads what was there before, so all that is done to it stands in one order, and each sees
//! what was done before those that precede it. (A plain store would be no cheaper: it would have to be sequentially
//! consistent, which is the same instruction on x86.) If `2` comes before `a`, `a` has seen `1`, and `b` does not wait.
//! If it comes between `a` and `d`, somebody rings: the first one who does finds the flag set, and one ring wakes for
//! all. If it comes after that and before `d`, `d` has seen `1`, and `e` takes the message. (With a plain store in `d`
//! it might not: then a second sender, who has not rung because the first one did, would be forgotten.) In `e` the flag
//! is cleared before the queue is emptied, so a message that comes later sets it again.

// The module above chooses the atomics: the standard library's in the program, loom's in the test.
use super::{AtomicBool, Ordering};

pub(crate) struct Doorbell {
    /// There is a message, or was one a moment ago.
    pending: AtomicBool,
    /// The loop waits, or is about to, and nobody has rung yet.
    sleeping: AtomicBool,
}

impl Doorbell {
    pub fn new() -> Self {
        Doorbell { pending: AtomicBool::new(false), sleeping: AtomicBool::new(false) }
    }

    /// To be called when a message lies in the queue. True when the loop must be woken: for one caller per sleep.
    #[must_use]
    pub fn announce(&self) -> bool {
        self.pending.swap(true, Ordering::AcqRel);
        self.sleeping.swap(false, Ordering::AcqRel)
    }

    /// The loop is about to wait; false if there is a message and it must not. By the loop only, as all that follows.
    #[must_use]
    pub fn may_sleep(&self) -> bool {
        self.sleeping.swap(true, Ordering::AcqRel);
        if self.is_pending() {
            self.awake();
            return false;
        }
        true
    }

    /// The loop waits no more.
    pub fn awake(&self) {
        self.sleeping.swap(false, Ordering::AcqRel);
    }

    /// Whether there is a message.
    pub fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Whether the queue is to be emptied now.
    #[must_use]
    pub fn answer(&self) -> bool {
        // Most turns find nothing, and a load costs nothing.
        self.is_pending() && self.pending.swap(false, Ordering::AcqRel)
    }

    /// Something was left in the queue.
    pub fn answer_again(&self) {
        self.pending.swap(true, Ordering::AcqRel);
    }
}
