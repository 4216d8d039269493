//! Limits on the peer of a connection: sizes, numbers, and the frequency of actions that cost us more than the peer.
//!
//! No clock is read here. Each kind of excessive behaviour has a budget per interval. The caller decides on the length
//! of the interval and calls [`super::Connection::handle_interval`] at its end, which refills the budgets. An idle
//! connection does not need that call.

use super::error::Flood;
use super::frame::FRAME_SIZE_MIN;
use super::hpack::TABLE_SIZE_DEFAULT;
use crate::http1;

/// Limits of a connection. Those on heads are the same as in HTTP/1, with sizes as defined by RFC 9113 §10.5.1 (names,
/// values, and 32 bytes for each field).
#[derive(Clone, Debug)]
pub struct Limits {
    /// Limits on request heads, and leniency with names. `head_max` also bounds responses and trailers.
    pub head: http1::Limits,
    /// Maximum number of streams opened by the peer: nginx's `http2_max_concurrent_streams`.
    pub concurrent_streams_max: u32,
    /// Receive window of a stream in bytes, at most 2³¹−1.
    pub stream_window: u32,
    /// Receive window of the connection in bytes; at least 65535, the minimum of the protocol.
    pub connection_window: u32,
    /// Maximum payload of a frame in bytes: 16384 to 2²⁴−1.
    pub frame_size_max: u32,
    /// Table size of the decoder in bytes.
    pub decoder_table_size: u32,
    /// Maximum table size of the encoder in bytes.
    pub encoder_table_size: u32,
    /// Maximum number of CONTINUATION frames in one field block.
    pub continuations_max: u32,
    /// Maximum size of an encoded field block in bytes.
    pub block_max: usize,
    /// Maximum size of pending responses to control frames in bytes.
    pub control_max: usize,
    /// Allow extended CONNECT: RFC 8441.
    pub extended_connect: bool,
    /// Limits per interval.
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

/// Maximum number of actions of a peer per interval.
#[derive(Clone, Debug)]
pub struct FloodLimits {
    /// RST_STREAM frames for streams that we have not ended, and faults for which we send one.
    pub resets: u32,
    /// PING frames. Each HEADERS and DATA frame that we send permits one more, since peers use PING to measure their
    /// bandwidth.
    pub pings: u32,
    /// SETTINGS frames.
    pub settings: u32,
    /// DATA frames without data and end, CONTINUATION frames without a fragment.
    pub empty_frames: u32,
    /// WINDOW_UPDATE frames. Each DATA frame that we send permits two more, unless the windows cut it below 512 bytes.
    pub window_updates: u32,
    /// PRIORITY and PRIORITY_UPDATE frames.
    pub priorities: u32,
    /// Frames of unknown types.
    pub unknown_frames: u32,
    /// Requests above the stream limit.
    pub refused_streams: u32,
}

impl Default for FloodLimits {
    /// Intended for an interval of some ten seconds.
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

/// Remaining budgets of the interval.
#[derive(Clone, Debug)]
pub(super) struct Budgets {
    left: FloodLimits,
}

/// A DATA frame cut shorter than this by the windows adds nothing to the budgets: otherwise a peer with a window of one
/// byte could go on forever.
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

    /// Adds to the budgets for a DATA frame that we send: `length` of `available` bytes.
    pub(super) fn earn_by_data(&mut self, length: usize, available: usize, limits: &FloodLimits) {
        if length == available || length >= CUT_LENGTH_MIN {
            self.left.window_updates = self.left.window_updates.saturating_add(2).min(limits.window_updates);
            self.earn_ping(limits);
        }
    }

    /// Adds to the budgets for a field block that we send.
    pub(super) fn earn_by_fields(&mut self, limits: &FloodLimits) {
        self.earn_ping(limits);
    }

    fn earn_ping(&mut self, limits: &FloodLimits) {
        self.left.pings = self.left.pings.saturating_add(1).min(limits.pings);
    }
}
