//! SETTINGS: RFC 9113 §6.5, RFC 8441 §3, RFC 9218 §2.1.

use super::error::StateFault;
use super::frame::{FRAME_SIZE_MAX, FRAME_SIZE_MIN, MAX_31};
use super::hpack::TABLE_SIZE_DEFAULT;
use super::window::WINDOW_DEFAULT;

/// Identifiers of the settings.
pub mod id {
    #![allow(missing_docs)] // the names are those of the RFCs
    pub const HEADER_TABLE_SIZE: u16 = 1;
    pub const ENABLE_PUSH: u16 = 2;
    pub const MAX_CONCURRENT_STREAMS: u16 = 3;
    pub const INITIAL_WINDOW_SIZE: u16 = 4;
    pub const MAX_FRAME_SIZE: u16 = 5;
    pub const MAX_HEADER_LIST_SIZE: u16 = 6;
    pub const ENABLE_CONNECT_PROTOCOL: u16 = 8;
    pub const NO_RFC7540_PRIORITIES: u16 = 9;
}

/// The peer's settings that affect us.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerSettings {
    /// Table size of its decoder in bytes.
    pub header_table_size: u32,
    /// Maximum number of streams that we may open.
    pub concurrent_streams_max: u32,
    /// Send window of new streams in bytes.
    pub initial_window: u32,
    /// Maximum payload of a frame in bytes.
    pub frame_size_max: u32,
    /// Maximum size of a field list in bytes; advisory.
    pub header_list_max: u32,
    /// `true` if it supports extended CONNECT.
    pub extended_connect: bool,
}

impl Default for PeerSettings {
    /// Values before the first SETTINGS frame: RFC 9113 §6.5.2.
    fn default() -> Self {
        Self {
            header_table_size: TABLE_SIZE_DEFAULT,
            concurrent_streams_max: u32::MAX,
            initial_window: WINDOW_DEFAULT,
            frame_size_max: FRAME_SIZE_MIN,
            header_list_max: u32::MAX,
            extended_connect: false,
        }
    }
}

impl PeerSettings {
    /// Applies the payload of a SETTINGS frame, in order; unknown settings are ignored. `is_client` is `true` if the
    /// peer is a client. Returns the smallest table size in the payload, since the table must be reduced to it (RFC
    /// 7541 §4.2).
    pub(super) fn apply(&mut self, payload: &[u8], is_client: bool) -> Result<u32, StateFault> {
        let mut smallest_table = u32::MAX;
        for setting in payload.chunks_exact(6) {
            let value = u32::from_be_bytes([setting[2], setting[3], setting[4], setting[5]]);
            match u16::from_be_bytes([setting[0], setting[1]]) {
                id::HEADER_TABLE_SIZE => {
                    self.header_table_size = value;
                    smallest_table = smallest_table.min(value);
                }
                // A server must not enable push: RFC 9113 §6.5.2.
                id::ENABLE_PUSH if value > u32::from(is_client) => return Err(StateFault::InvalidEnablePush),
                id::MAX_CONCURRENT_STREAMS => self.concurrent_streams_max = value,
                id::INITIAL_WINDOW_SIZE if value > MAX_31 => return Err(StateFault::InvalidInitialWindow),
                id::INITIAL_WINDOW_SIZE => self.initial_window = value,
                id::MAX_FRAME_SIZE if !(FRAME_SIZE_MIN..=FRAME_SIZE_MAX).contains(&value) => {
                    return Err(StateFault::InvalidMaxFrameSize);
                }
                id::MAX_FRAME_SIZE => self.frame_size_max = value,
                id::MAX_HEADER_LIST_SIZE => self.header_list_max = value,
                id::ENABLE_CONNECT_PROTOCOL => match value {
                    0 if !self.extended_connect => {}
                    1 => self.extended_connect = true,
                    _ => return Err(StateFault::InvalidEnableConnect),
                },
                id::NO_RFC7540_PRIORITIES if value > 1 => return Err(StateFault::InvalidNoPriorities),
                _ => {}
            }
        }
        Ok(smallest_table)
    }
}
