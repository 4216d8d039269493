//! How much a peer may send of a body before it is read, on a connection that is long and fast: the window grows to
//! the product of bandwidth and delay.
//!
//! A window that is used up within a few round trips keeps its peer waiting; one that is larger costs memory when
//! whoever reads becomes slow. So it doubles when half of it was *read* in less than [`ROUND_TRIPS`] round trips, and
//! only then; a peer alone cannot make it grow.

use std::time::Duration;

/// Half of the window in less than so many round trips: it is what limits the peer.
const ROUND_TRIPS: u32 = 2;

/// The largest window of a stream, in bytes: 640 Mbit/s at 50 ms.
const STREAM_WINDOW_MAX: u32 = 4 << 20;

/// A stream's window as it grows. Times are those of the caller's clock, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct WindowGrowth {
    window: u32,
    /// What was read of it since then.
    read: u32,
    since: u64,
}

impl WindowGrowth {
    /// The window that a stream begins with, in bytes.
    pub fn new(window: u32, now: u64) -> WindowGrowth {
        WindowGrowth { window, read: 0, since: now }
    }

    /// Its size, in bytes.
    pub fn window(self) -> u32 {
        self.window
    }

    /// So many bytes were read. `round_trip` is asked for when it matters ([`super::RoundTrip`]). Returns the larger
    /// window, if it grows.
    pub fn note_read(&mut self, count: usize, now: u64, round_trip: impl FnOnce() -> Option<Duration>) -> Option<u32> {
        self.read = self.read.saturating_add(u32::try_from(count).unwrap_or(u32::MAX));
        if self.read < self.window / 2 || self.window >= STREAM_WINDOW_MAX {
            return None;
        }
        let elapsed = Duration::from_nanos(now.saturating_sub(self.since));
        (self.read, self.since) = (0, now);
        if elapsed >= round_trip()? * ROUND_TRIPS {
            return None;
        }
        self.window = self.window.saturating_mul(2).clamp(1, STREAM_WINDOW_MAX);
        Some(self.window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_grows_while_it_is_what_limits_the_peer() {
        let at = |milliseconds: u64| milliseconds * 1_000_000;
        let far = || Some(Duration::from_millis(50));
        let mut growth = WindowGrowth::new(64 * 1024, at(0));
        assert_eq!(growth.note_read(30_000, at(40), far), None, "less than half");
        assert_eq!(growth.note_read(30_000, at(60), far), Some(128 * 1024));
        assert_eq!(growth.note_read(64 * 1024, at(159), far), Some(256 * 1024));
        // Slow readers, or slow peers, need no more.
        assert_eq!(growth.note_read(128 * 1024, at(300), far), None);
        assert_eq!(growth.note_read(128 * 1024, at(310), || None), None, "the round trip is unknown");
        let mut last = 0;
        for time in 311..400 {
            last = growth.note_read(4 << 20, at(time), far).unwrap_or(last);
        }
        assert_eq!(last, STREAM_WINDOW_MAX);
    }
}
