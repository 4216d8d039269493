//! How much servers may send on a connection before clients take it: the windows of streams grow to the product of
//! bandwidth and delay, out of an allowance of their connection.
//!
//! Invariant: the connection's window has room for those of all streams together, so none keeps another one waiting.

use gale_protocol::http2::{RoundTrip, WindowGrowth};

/// Most streams of a connection at once, whatever its server allows: their windows bound what it may send.
pub(super) const STREAMS_MAX: usize = 128;

/// How much of a response a server may send before its client takes it, in bytes, until that turns out to be too
/// little.
pub(super) const STREAM_WINDOW: u32 = 256 * 1024;

/// The same for all streams together, before any has grown.
pub(super) const CONNECTION_WINDOW: u32 = STREAM_WINDOW * STREAMS_MAX as u32;

/// By how much the windows of all streams together grow, in bytes: eight at their largest. Only what clients take
/// quickly has them grow, so there is little in them.
const GROWN_MAX: u32 = 32 << 20;

/// The windows of a connection.
#[derive(Default)]
pub(super) struct Windows {
    /// By how much those of its streams have grown.
    grown: u32,
    round_trip: RoundTrip,
    /// A PING is to be sent, for the sake of that.
    wants_ping: bool,
}

impl Windows {
    /// A window as a stream begins with it.
    pub fn begin(now: u64) -> WindowGrowth {
        WindowGrowth::new(STREAM_WINDOW, now)
    }

    /// So many bytes of a stream were taken. The sizes of its window and of the connection's, if they grow.
    pub fn note_read(&mut self, growth: &mut WindowGrowth, count: usize, now: u64) -> Option<(u32, u32)> {
        let before = growth.window();
        // It would double.
        if self.grown + before > GROWN_MAX {
            return None;
        }
        let window = growth.note_read(count, now, || {
            self.wants_ping |= self.round_trip.begin(now);
            self.round_trip.time()
        })?;
        self.grown += window - before;
        Some((window, CONNECTION_WINDOW + self.grown))
    }

    /// A stream is gone, whose window was this.
    pub fn forget(&mut self, growth: WindowGrowth) {
        self.grown -= growth.window() - STREAM_WINDOW;
    }

    /// Whether a PING with [`RoundTrip::PAYLOAD`] is to be sent now, so that it is known how long the way takes.
    pub fn take_ping(&mut self) -> bool {
        std::mem::take(&mut self.wants_ping)
    }

    /// A PING is answered with this.
    pub fn note_answer_to_ping(&mut self, payload: [u8; 8], now: u64) {
        self.round_trip.note_answer(payload, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How long the way takes, in nanoseconds.
    const FAR: u64 = 50_000_000;

    /// Answers a PING, if there is one, so that the way takes that long.
    fn answer(windows: &mut Windows, now: u64, time: u64) {
        if windows.take_ping() {
            windows.note_answer_to_ping(RoundTrip::PAYLOAD, now + time);
        }
    }

    /// Takes from a stream as quickly as can be, until its window grows no more; its size then.
    fn take_all(windows: &mut Windows, growth: &mut WindowGrowth) -> u32 {
        let mut last = growth.window();
        for now in 0..64 {
            answer(windows, now, FAR);
            if let Some((window, connection)) = windows.note_read(growth, 8 << 20, now) {
                assert!(window > last && connection == CONNECTION_WINDOW + windows.grown);
                last = window;
            }
        }
        last
    }

    #[test]
    fn windows_grow_out_of_an_allowance_that_comes_back() {
        let mut windows = Windows::default();
        let mut streams = [(); 20].map(|()| Windows::begin(0));
        let sizes = streams.each_mut().map(|stream| take_all(&mut windows, stream));
        assert_eq!(sizes[..8], [4 << 20; 8]);
        assert!(windows.grown <= GROWN_MAX && sizes[19] == STREAM_WINDOW, "{sizes:?}");
        streams.iter().for_each(|stream| windows.forget(*stream));
        assert_eq!(windows.grown, 0);
        assert_eq!(take_all(&mut windows, &mut Windows::begin(0)), 4 << 20);
    }

    #[test]
    fn nothing_grows_where_the_way_is_short_or_not_known() {
        let mut windows = Windows::default();
        let mut growth = Windows::begin(0);
        for now in 1..100 {
            assert_eq!(windows.note_read(&mut growth, 256 * 1024, now), None, "no round trip has been measured");
        }
        answer(&mut windows, 1, 50_000);
        for now in 1..100 {
            assert_eq!(windows.note_read(&mut growth, 256 * 1024, now * 1_000_000), None);
        }
    }
}
