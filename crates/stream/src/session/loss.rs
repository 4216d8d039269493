//! Counts datagrams lost in this process, by reason. Losses in the network or in a socket's buffer are not visible
//! here.

use std::sync::atomic::{AtomicU64, Ordering};

/// Reason of a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// No room for the datagram or for its session.
    NoRoom,
    /// No room in the queue of the loop that owns the session.
    HandedOver,
    /// Longer than the receive buffer.
    Truncated,
}

/// Indexed by the discriminant of [`Loss`].
static COUNTS: [AtomicU64; Loss::ALL.len()] = [const { AtomicU64::new(0) }; _];

impl Loss {
    /// All reasons.
    pub const ALL: [Loss; 3] = [Loss::NoRoom, Loss::HandedOver, Loss::Truncated];

    /// Name in the statistics.
    pub fn name(self) -> &'static str {
        match self {
            Loss::NoRoom => "no_room",
            Loss::HandedOver => "handed_over",
            Loss::Truncated => "truncated",
        }
    }

    /// Adds to the count.
    pub fn note(self, datagrams: u64) {
        if datagrams > 0 {
            COUNTS[self as usize].fetch_add(datagrams, Ordering::Relaxed);
        }
    }

    /// Returns the number lost since the process started.
    pub fn count(self) -> u64 {
        COUNTS[self as usize].load(Ordering::Relaxed)
    }
}
