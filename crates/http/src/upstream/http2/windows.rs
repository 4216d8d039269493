//! How much servers may send on a connection before clients take it: the windows of streams grow to the product of
//! bandwidth and delay, out of an allowance of their connection.
//!
//! Invariant: the connection's window has room for those of all streams together, so none keeps another one waiting.

use std::time::Duration;

use gale_protocol::http2::WindowGrowth;

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
    /// How long the way to the server and back takes, when that was last looked at.
    round_trip: Option<Duration>,
    /// Somebody wants to know that anew.
    is_outdated: bool,
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
            self.is_outdated = true;
            self.round_trip
        })?;
        self.grown += window - before;
        Some((window, CONNECTION_WINDOW + self.grown))
    }

    /// A stream is gone, whose window was this.
    pub fn forget(&mut self, growth: WindowGrowth) {
        self.grown -= growth.window() - STREAM_WINDOW;
    }

    /// Looks how long the way takes, if somebody wants to know.
    pub fn measure(&mut self, round_trip: impl FnOnce() -> Option<Duration>) {
        if std::mem::take(&mut self.is_outdated) {
            self.round_trip = round_trip();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAR: Duration = Duration::from_millis(50);

    /// Takes from a stream as quickly as can be, until its window grows no more; its size then.
    fn take_all(windows: &mut Windows, growth: &mut WindowGrowth) -> u32 {
        let mut last = growth.window();
        for now in 0..64 {
            if let Some((window, connection)) = windows.note_read(growth, 8 << 20, now) {
                assert!(window > last && connection == CONNECTION_WINDOW + windows.grown);
                last = window;
            }
            windows.measure(|| Some(FAR));
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
            assert_eq!(windows.note_read(&mut growth, 256 * 1024, now), None, "nobody has measured");
        }
        windows.measure(|| Some(Duration::from_micros(50)));
        for now in 1..100 {
            assert_eq!(windows.note_read(&mut growth, 256 * 1024, now * 1_000_000), None);
        }
    }
}
