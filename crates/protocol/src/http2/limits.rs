//! What a connection allows its peer: sizes, numbers, and how often a peer may do what costs us more than it.
//!
//! There is no clock here. Each kind of nuisance has a budget for an interval, whose length the caller decides: it
//! calls [`super::Connection::handle_interval`] when the interval is over, and the budgets are full again. A connection
//! that is idle needs no such call.

use super::error::Flood;
use super::frame::FRAME_SIZE_MIN;
use super::hpack::TABLE_SIZE_DEFAULT;
use crate::http1;

/// Bounds of a connection. Those of its heads are the same as in HTTP/1, in the measure of RFC 9113 §10.5.1 (names,
/// values, and 32 bytes for each field).
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bounds of request heads, and how lenient we are with names. `head_max` also bounds responses and trailers.
    pub head: http1::Limits,
    /// Streams that the peer may have open: nginx's `http2_max_concurrent_streams`.
    pub concurrent_streams_max: u32,
    /// How much of a message a peer may send before anybody has taken it, in bytes; at most 2³¹−1.
    pub stream_window: u32,
    /// The same for all streams together; at least 65535, since no connection has less.
    pub connection_window: u32,
    /// The longest frame that is taken, in bytes: 16384 to 2²⁴−1.
    pub frame_size_max: u32,
    /// The table of our decoder, in bytes.
    pub decoder_table_size: u32,
    /// The largest table of our encoder, in bytes.
    pub encoder_table_size: u32,
    /// CONTINUATION frames in one block of fields.
    pub continuations_max: u32,
    /// Bytes of a block of fields as it is encoded.
    pub block_max: usize,
    /// Bytes of answers to control frames that may wait to be written.
    pub control_max: usize,
    /// Whether requests may be extended CONNECTs: RFC 8441.
    pub extended_connect: bool,
    /// What may happen in an interval.
    pub floods: FloodLimits,
}

impl Default for Limits {
    /// nginx's defaults where it has any.
    fn default() -> Self {
        Self {
            head: http1::Limits::default(),
            concurrent_streams_max: 128,
            stream_window: 65_536,
            connection_window: 1 << 20,
            frame_size_max: FRAME_SIZE_MIN,
            decoder_table_size: TABLE_SIZE_DEFAULT,
            encoder_table_size: TABLE_SIZE_DEFAULT,
            continuations_max: 16,
            block_max: 64 * 1024,
            control_max: 16 * 1024,
            extended_connect: false,
            floods: FloodLimits::default(),
        }
    }
}

/// How often a peer may do something in an interval.
#[derive(Clone, Debug)]
pub struct FloodLimits {
    /// RST_STREAM frames for streams that we have not ended, and faults for which we send one.
    pub resets: u32,
    /// PING frames; each HEADERS and each DATA frame of ours allows a further one, since peers measure with it what
    /// they receive.
    pub pings: u32,
    /// SETTINGS frames.
    pub settings: u32,
    /// DATA frames without data and end, CONTINUATION frames without a fragment.
    pub empty_frames: u32,
    /// WINDOW_UPDATE frames; each DATA frame of ours that the windows have not cut below 512 bytes allows two further
    /// ones.
    pub window_updates: u32,
    /// PRIORITY and PRIORITY_UPDATE frames.
    pub priorities: u32,
    /// Frames of unknown types.
    pub unknown_frames: u32,
    /// Requests beyond the number of streams.
    pub refused_streams: u32,
}

impl Default for FloodLimits {
    /// Meant for an interval of some ten seconds.
    fn default() -> Self {
        Self {
            resets: 500,
            pings: 100,
            settings: 50,
            empty_frames: 200,
            window_updates: 5000,
            priorities: 1000,
            unknown_frames: 200,
            refused_streams: 500,
        }
    }
}

/// What is left of the budgets.
#[derive(Clone, Debug)]
pub(super) struct Budgets {
    left: FloodLimits,
}

/// A DATA frame that the windows cut shorter than this earns nothing: a peer with a window of one byte could otherwise
/// go on for ever.
const CUT_LENGTH_MIN: usize = 512;

impl Budgets {
    pub(super) fn new(limits: &FloodLimits) -> Self {
        Self { left: limits.clone() }
    }

    pub(super) fn refill(&mut self, limits: &FloodLimits) {
        self.left.clone_from(limits);
    }

    pub(super) fn charge(&mut self, flood: Flood) -> Result<(), Flood> {
        let left = match flood {
            Flood::Resets => &mut self.left.resets,
            Flood::Pings => &mut self.left.pings,
            Flood::Settings => &mut self.left.settings,
            Flood::EmptyFrames => &mut self.left.empty_frames,
            Flood::WindowUpdates => &mut self.left.window_updates,
            Flood::Priorities => &mut self.left.priorities,
            Flood::UnknownFrames => &mut self.left.unknown_frames,
            Flood::RefusedStreams => &mut self.left.refused_streams,
            Flood::Unread => return Err(flood),
        };
        *left = left.checked_sub(1).ok_or(flood)?;
        Ok(())
    }

    /// A DATA frame of ours with `length` of `available` bytes goes out.
    pub(super) fn earn_by_data(&mut self, length: usize, available: usize, limits: &FloodLimits) {
        if length == available || length >= CUT_LENGTH_MIN {
            self.left.window_updates = self.left.window_updates.saturating_add(2).min(limits.window_updates);
            self.earn_ping(limits);
        }
    }

    /// A block of fields of ours goes out.
    pub(super) fn earn_by_fields(&mut self, limits: &FloodLimits) {
        self.earn_ping(limits);
    }

    fn earn_ping(&mut self, limits: &FloodLimits) {
        self.left.pings = self.left.pings.saturating_add(1).min(limits.pings);
    }
}
