//! Growth of receive windows for request bodies on long, fast connections: a window grows to the product of bandwidth
//! and delay.
//!
//! A window that is used up within a few round trips makes the peer wait; a larger one costs memory when the reader is
//! slow. So the window doubles only if half of it was *read* in less than [`ROUND_TRIPS`] round trips. A peer alone
//! cannot make it grow.

use std::time::Duration;

/// If half of the window is read in fewer round trips, the window limits the peer.
const ROUND_TRIPS: u32 = 2;

/// Maximum window of a stream in bytes: 640 Mbit/s at 50 ms.
const STREAM_WINDOW_MAX: u32 = 4 << 20;

/// The growing window of a stream. Times are in nanoseconds of the caller's clock.
#[derive(Clone, Copy, Debug)]
pub struct WindowGrowth {
    window: u32,
    /// Bytes read since the time `since`.
    read: u32,
    since: u64,
}

impl WindowGrowth {
    /// Creates the state for a stream whose initial window has this size in bytes.
    pub fn new(window: u32, now: u64) -> WindowGrowth {
        WindowGrowth { window, read: 0, since: now }
    }

    /// Current size in bytes.
    pub fn window(self) -> u32 {
        self.window
    }

    /// Notes that `count` bytes were read. `round_trip` is called only if needed ([`super::RoundTrip`]). Returns the
    /// larger window if it grows.
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
    fn window_grows_while_it_limits_the_peer() {
        let at = |milliseconds: u64| milliseconds * 1_000_000;
        let far = || Some(Duration::from_millis(50));
        let mut growth = WindowGrowth::new(64 * 1024, at(0));
        assert_eq!(growth.note_read(30_000, at(40), far), None, "less than half");
        assert_eq!(growth.note_read(30_000, at(60), far), Some(128 * 1024));
        assert_eq!(growth.note_read(64 * 1024, at(159), far), Some(256 * 1024));
        // A slow reader or peer needs no larger window.
        assert_eq!(growth.note_read(128 * 1024, at(300), far), None);
        assert_eq!(growth.note_read(128 * 1024, at(310), || None), None, "the round trip is unknown");
        let mut last = 0;
        for time in 311..400 {
            last = growth.note_read(4 << 20, at(time), far).unwrap_or(last);
        }
        assert_eq!(last, STREAM_WINDOW_MAX);
    }
}
