//! Datagrams that this process has lost, by reason. What is lost in a network, or in a socket's buffer, nobody knows.

use std::sync::atomic::{AtomicU64, Ordering};

/// Why a datagram was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// There was no room for it, or for its session.
    NoRoom,
    /// It was another event loop's, which had no room for it.
    HandedOver,
    /// It was longer than the memory for one.
    Truncated,
}

/// By the order of [`Loss::ALL`].
static COUNTS: [AtomicU64; Loss::ALL.len()] = [const { AtomicU64::new(0) }; _];

impl Loss {
    /// All reasons.
    pub const ALL: [Loss; 3] = [Loss::NoRoom, Loss::HandedOver, Loss::Truncated];

    /// As figures name it.
    pub fn name(self) -> &'static str {
        match self {
            Loss::NoRoom => "no_room",
            Loss::HandedOver => "handed_over",
            Loss::Truncated => "truncated",
        }
    }

    /// So many more are lost.
    pub fn note(self, datagrams: u64) {
        if datagrams > 0 {
            COUNTS[self as usize].fetch_add(datagrams, Ordering::Relaxed);
        }
    }

    /// How many were lost since the process began.
    pub fn count(self) -> u64 {
        COUNTS[self as usize].load(Ordering::Relaxed)
    }
}
