//! Flow control for data from servers: the windows of streams grow to the product of bandwidth and delay, within an
//! allowance of their connection.
//!
//! Invariant: the connection's window has room for the windows of all its streams, so no stream delays another one.

use gale_protocol::http2::{RoundTrip, WindowGrowth};

/// Maximum number of streams of a connection, whatever its server allows: their windows bound the data that it may
/// send.
pub(super) const STREAMS_MAX: usize = 128;

/// Initial window of a stream, in bytes: data that a server may send before its client takes it.
pub(super) const STREAM_WINDOW: u32 = 256 * 1024;

/// Initial window of a connection, in bytes.
pub(super) const CONNECTION_WINDOW: u32 = STREAM_WINDOW * STREAMS_MAX as u32;

/// Maximum growth of all windows of a connection together, in bytes: eight windows at their largest. They grow only for
/// clients that take data quickly, so they hold little.
const GROWN_MAX: u32 = 32 << 20;

/// The windows of a connection.
#[derive(Default)]
pub(super) struct Windows {
    /// Growth of its streams' windows together.
    grown: u32,
    round_trip: RoundTrip,
    /// True if a PING is to be sent to measure the round trip.
    wants_ping: bool,
}

impl Windows {
    /// The initial window of a stream.
    pub fn begin(now: u64) -> WindowGrowth {
        WindowGrowth::new(STREAM_WINDOW, now)
    }

    /// Notes that bytes of a stream were taken. Returns the new sizes of its window and the connection's if they grow.
    pub fn note_read(&mut self, growth: &mut WindowGrowth, count: usize, now: u64) -> Option<(u32, u32)> {
        let before = growth.window();
        // The window would double.
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

    /// Forgets the window of a stream that has ended.
    pub fn forget(&mut self, growth: WindowGrowth) {
        self.grown -= growth.window() - STREAM_WINDOW;
    }

    /// True if a PING with [`RoundTrip::PAYLOAD`] is to be sent now, to measure the round trip.
    pub fn take_ping(&mut self) -> bool {
        std::mem::take(&mut self.wants_ping)
    }

    /// Notes the answer to a PING.
    pub fn note_answer_to_ping(&mut self, payload: [u8; 8], now: u64) {
        self.round_trip.note_answer(payload, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Round trip in nanoseconds.
    const FAR: u64 = 50_000_000;

    /// Answers a pending PING after a round trip of this time.
    fn answer(windows: &mut Windows, now: u64, time: u64) {
        if windows.take_ping() {
            windows.note_answer_to_ping(RoundTrip::PAYLOAD, now + time);
        }
    }

    /// Takes data from a stream at maximum speed until its window stops growing. Returns its size.
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
