//! Frames: RFC 9113 §4 and §6, and PRIORITY_UPDATE of RFC 9218 §7.
//!
//! The reader checks each frame by itself: length, padding, whether it needs a stream, and that no frame comes between
//! HEADERS and its CONTINUATIONs. It does not track streams. A control frame must be complete in the input, so its
//! length is bounded; DATA and the payload of unknown frames are processed in the pieces in which they arrive.
//! Invariant: the frames do not depend on how the input is split, except for the pieces of data.
//!
//! ```text
//! frame    length (3) | type | flags | reserved bit, stream (31 bits) | payload
//! padded   padding length | content | padding
//! ```

use std::ops::Range;

use super::error::{ErrorCode, FrameFault, StreamFault};

/// First bytes sent by a client: RFC 9113 §3.4.
pub const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Length of a frame header in bytes.
pub const HEADER_LENGTH: usize = 9;

/// Maximum payload that every endpoint must accept, in bytes: RFC 9113 §4.2.
pub const FRAME_SIZE_MIN: u32 = 16_384;

/// Maximum payload of the protocol, in bytes.
pub const FRAME_SIZE_MAX: u32 = 0xff_ffff;

/// Maximum of a window size and of a stream id: 31 bits.
pub const MAX_31: u32 = 0x7fff_ffff;

/// Id of a stream; 0 is the connection.
pub type StreamId = u32;

/// Frame types: RFC 9113 §6.
pub mod frame_type {
    #![allow(missing_docs)] // the names are those of the RFC
    pub const DATA: u8 = 0;
    pub const HEADERS: u8 = 1;
    pub const PRIORITY: u8 = 2;
    pub const RST_STREAM: u8 = 3;
    pub const SETTINGS: u8 = 4;
    pub const PUSH_PROMISE: u8 = 5;
    pub const PING: u8 = 6;
    pub const GOAWAY: u8 = 7;
    pub const WINDOW_UPDATE: u8 = 8;
    pub const CONTINUATION: u8 = 9;
    pub const PRIORITY_UPDATE: u8 = 16;
}

/// Frame flags: RFC 9113 §6.
pub mod flag {
    #![allow(missing_docs)] // the names are those of the RFC
    pub const END_STREAM: u8 = 0x1;
    pub const ACK: u8 = 0x1;
    pub const END_HEADERS: u8 = 0x4;
    pub const PADDED: u8 = 0x8;
    pub const PRIORITY: u8 = 0x20;
}

/// The header of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameHeader {
    /// Length of the payload in bytes.
    pub length: u32,
    /// Type, see [`frame_type`].
    pub frame_type: u8,
    /// Flags, see [`flag`].
    pub flags: u8,
    /// Stream id, or 0 for the connection.
    pub stream: StreamId,
}

impl FrameHeader {
    /// Parses the header at the beginning of the input, if it is complete. The reserved bit is ignored.
    #[inline]
    pub fn parse(input: &[u8]) -> Option<Self> {
        let &[high, middle, low, frame_type, flags, a, b, c, d] = input.first_chunk::<HEADER_LENGTH>()?;
        Some(Self {
            length: u32::from_be_bytes([0, high, middle, low]),
            frame_type,
            flags,
            stream: u32::from_be_bytes([a, b, c, d]) & MAX_31,
        })
    }

    /// Returns the encoded header.
    #[inline]
    pub const fn to_bytes(self) -> [u8; HEADER_LENGTH] {
        debug_assert!(self.length <= FRAME_SIZE_MAX && self.stream <= MAX_31);
        let [_, high, middle, low] = self.length.to_be_bytes();
        let [a, b, c, d] = self.stream.to_be_bytes();
        [high, middle, low, self.frame_type, self.flags, a, b, c, d]
    }

    const fn has(self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// A frame, or a part of one.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs)] // the names are those of RFC 9113 §6
pub enum Frame {
    /// A DATA frame begins: `length` bytes count for flow control; exactly `content` of them follow as [`Frame::Data`].
    DataBegin {
        stream: StreamId,
        length: u32,
        content: u32,
        end_stream: bool,
    },
    /// A piece of data of the current frame: a non-empty range of the input. `is_last` marks the last piece.
    Data {
        piece: Range<usize>,
        is_last: bool,
    },
    /// HEADERS: `dependency` is the stream named in the priority of RFC 7540.
    Headers {
        stream: StreamId,
        fragment: Range<usize>,
        end_headers: bool,
        end_stream: bool,
        dependency: Option<StreamId>,
    },
    /// CONTINUATION, always after a frame of the same stream.
    Continuation {
        stream: StreamId,
        fragment: Range<usize>,
        end_headers: bool,
    },
    /// PRIORITY, which is deprecated (RFC 9113 §5.3.2).
    Priority {
        stream: StreamId,
        dependency: StreamId,
    },
    RstStream {
        stream: StreamId,
        code: ErrorCode,
    },
    /// SETTINGS without the ACK flag: the payload is a range of the input whose length is a multiple of six bytes.
    Settings {
        payload: Range<usize>,
    },
    SettingsAck,
    Ping {
        payload: [u8; 8],
    },
    PingAck {
        payload: [u8; 8],
    },
    GoAway {
        last_stream: StreamId,
        code: ErrorCode,
        debug: Range<usize>,
    },
    WindowUpdate {
        stream: StreamId,
        increment: u32,
    },
    /// PRIORITY_UPDATE for a request: the priority field value is a range of the input.
    PriorityUpdate {
        stream: StreamId,
        value: Range<usize>,
    },
    /// Header of a frame of unknown type, whose payload is ignored: RFC 9113 §5.5.
    Unknown {
        frame_type: u8,
    },
    /// A malformed frame that affects only one stream.
    Malformed {
        stream: StreamId,
        fault: StreamFault,
    },
}

/// Result of one reading step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReadFrame {
    /// Number of input bytes processed, including those of the frame.
    pub consumed: usize,
    /// The frame; `None` if more input is needed, or only padding was read.
    pub frame: Option<Frame>,
}

/// Reads frames from a buffer filled by the caller.
#[derive(Clone, Debug)]
pub struct FrameReader {
    state: ReadState,
    /// Maximum payload accepted.
    length_max: u32,
    /// Stream whose HEADERS frame is not complete.
    continues: Option<StreamId>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ReadState {
    /// In the client's preface, after `matched` bytes.
    Preface { matched: u8 },
    /// Before the first frame.
    First,
    /// Before a frame.
    Header,
    /// In the data of a frame.
    Data { left: u32, padding: u32 },
    /// In bytes to be ignored.
    Skip { left: u32 },
}

impl FrameReader {
    /// Creates a reader for the input from a client, which begins with the preface.
    pub fn of_client(length_max: u32) -> Self {
        Self { state: ReadState::Preface { matched: 0 }, length_max, continues: None }
    }

    /// Creates a reader for the input from a server.
    pub fn of_server(length_max: u32) -> Self {
        Self { state: ReadState::First, length_max, continues: None }
    }

    /// Number of input bytes that the next step may need at once: a control frame must be complete.
    pub fn input_max(&self) -> usize {
        HEADER_LENGTH + self.length_max as usize
    }

    /// Returns `true` if the input may end here.
    pub fn is_between_frames(&self) -> bool {
        self.state == ReadState::Header && self.continues.is_none()
    }

    /// Reads the next frame or piece. The input begins at the end of the previously processed bytes.
    pub fn read(&mut self, input: &[u8]) -> Result<ReadFrame, FrameFault> {
        match self.state {
            ReadState::Preface { matched } => self.read_preface(input, matched as usize),
            ReadState::First | ReadState::Header => self.read_frame(input),
            ReadState::Data { left, padding } => {
                let length = input.len().min(left as usize);
                if length == 0 {
                    return Ok(ReadFrame { consumed: 0, frame: None });
                }
                self.pass_data(left - length as u32, padding);
                let is_last = length == left as usize;
                Ok(ReadFrame { consumed: length, frame: Some(Frame::Data { piece: 0..length, is_last }) })
            }
            ReadState::Skip { left } => {
                let length = input.len().min(left as usize);
                self.skip(left - length as u32);
                Ok(ReadFrame { consumed: length, frame: None })
            }
        }
    }

    fn read_preface(&mut self, input: &[u8], matched: usize) -> Result<ReadFrame, FrameFault> {
        let expected = &PREFACE[matched..];
        let length = input.len().min(expected.len());
        if input[..length] != expected[..length] {
            return Err(FrameFault::InvalidPreface);
        }
        let matched = matched + length;
        self.state =
            if matched == PREFACE.len() { ReadState::First } else { ReadState::Preface { matched: matched as u8 } };
        Ok(ReadFrame { consumed: length, frame: None })
    }

    fn read_frame(&mut self, input: &[u8]) -> Result<ReadFrame, FrameFault> {
        let nothing = ReadFrame { consumed: 0, frame: None };
        let Some(header) = FrameHeader::parse(input) else {
            return Ok(nothing);
        };
        self.check_header(header)?;
        let payload = HEADER_LENGTH..HEADER_LENGTH + header.length as usize;
        match header.frame_type {
            frame_type::DATA => {
                let Some((content, padding)) = self.padded(input, header)? else {
                    return Ok(nothing);
                };
                self.pass_data(content.len() as u32, padding);
                let (stream, length) = (header.stream, header.length);
                let end_stream = header.has(flag::END_STREAM);
                let frame = Frame::DataBegin { stream, length, content: content.len() as u32, end_stream };
                Ok(ReadFrame { consumed: content.start, frame: Some(frame) })
            }
            frame_type if is_known(frame_type) => {
                if input.len() < payload.end {
                    return Ok(nothing);
                }
                let frame = self.parse_control(input, header, payload.clone())?;
                self.state = ReadState::Header;
                Ok(ReadFrame { consumed: payload.end, frame: Some(frame) })
            }
            frame_type => {
                self.skip(header.length);
                Ok(ReadFrame { consumed: HEADER_LENGTH, frame: Some(Frame::Unknown { frame_type }) })
            }
        }
    }

    /// Checks that do not need the payload.
    fn check_header(&self, header: FrameHeader) -> Result<(), FrameFault> {
        // Some clients acknowledge our SETTINGS before they send their own; that frame has the same type (RFC 9113
        // §3.4).
        if self.state == ReadState::First && header.frame_type != frame_type::SETTINGS {
            return Err(FrameFault::SettingsExpected);
        }
        match (self.continues, header.frame_type) {
            (Some(stream), frame_type::CONTINUATION) if stream == header.stream => {}
            (Some(_), _) => return Err(FrameFault::ContinuationExpected),
            (None, frame_type::CONTINUATION) => return Err(FrameFault::ContinuationUnexpected),
            (None, _) => {}
        }
        if header.length > self.length_max {
            return Err(FrameFault::FrameTooLong);
        }
        match header.frame_type {
            frame_type::PUSH_PROMISE => return Err(FrameFault::PushPromise),
            frame_type::DATA | frame_type::HEADERS | frame_type::PRIORITY | frame_type::RST_STREAM
                if header.stream == 0 =>
            {
                return Err(FrameFault::StreamIdExpected);
            }
            frame_type::SETTINGS | frame_type::PING | frame_type::GOAWAY | frame_type::PRIORITY_UPDATE
                if header.stream != 0 =>
            {
                return Err(FrameFault::StreamIdUnexpected);
            }
            _ => {}
        }
        let is_right = match header.frame_type {
            frame_type::RST_STREAM | frame_type::WINDOW_UPDATE => header.length == 4,
            frame_type::SETTINGS if header.has(flag::ACK) => {
                return if header.length == 0 { Ok(()) } else { Err(FrameFault::SettingsAckWithPayload) };
            }
            frame_type::SETTINGS => header.length.is_multiple_of(6),
            frame_type::PING => header.length == 8,
            frame_type::GOAWAY => header.length >= 8,
            frame_type::PRIORITY_UPDATE => header.length >= 4,
            _ => true,
        };
        if is_right { Ok(()) } else { Err(FrameFault::IncorrectLength) }
    }

    /// Returns the range of the content and the length of the padding of a frame that may be padded, or `None` if the
    /// padding length has not arrived.
    fn padded(&self, input: &[u8], header: FrameHeader) -> Result<Option<(Range<usize>, u32)>, FrameFault> {
        let end = HEADER_LENGTH + header.length as usize;
        if !header.has(flag::PADDED) {
            return Ok(Some((HEADER_LENGTH..end, 0)));
        }
        if header.length == 0 {
            return Err(FrameFault::IncorrectLength);
        }
        let Some(&padding) = input.get(HEADER_LENGTH) else {
            return Ok(None);
        };
        if u32::from(padding) >= header.length {
            return Err(FrameFault::PaddingTooLong);
        }
        Ok(Some((HEADER_LENGTH + 1..end - usize::from(padding), u32::from(padding))))
    }

    fn parse_control(&mut self, input: &[u8], header: FrameHeader, payload: Range<usize>) -> Result<Frame, FrameFault> {
        let stream = header.stream;
        let word = |at: usize| {
            let bytes = input[payload.start + at..].first_chunk().expect("the length was checked");
            u32::from_be_bytes(*bytes)
        };
        Ok(match header.frame_type {
            frame_type::HEADERS => return self.parse_headers(input, header),
            frame_type::CONTINUATION => {
                let end_headers = header.has(flag::END_HEADERS);
                if end_headers {
                    self.continues = None;
                }
                Frame::Continuation { stream, fragment: payload, end_headers }
            }
            frame_type::PRIORITY if header.length != 5 => {
                Frame::Malformed { stream, fault: StreamFault::PriorityLength }
            }
            frame_type::PRIORITY => Frame::Priority { stream, dependency: word(0) & MAX_31 },
            frame_type::RST_STREAM => Frame::RstStream { stream, code: ErrorCode(word(0)) },
            frame_type::SETTINGS if header.has(flag::ACK) => Frame::SettingsAck,
            frame_type::SETTINGS => Frame::Settings { payload },
            frame_type::PING => {
                let payload = *input[payload.start..].first_chunk().expect("the length was checked");
                if header.has(flag::ACK) { Frame::PingAck { payload } } else { Frame::Ping { payload } }
            }
            frame_type::GOAWAY => Frame::GoAway {
                last_stream: word(0) & MAX_31,
                code: ErrorCode(word(4)),
                debug: payload.start + 8..payload.end,
            },
            frame_type::WINDOW_UPDATE => match (word(0) & MAX_31, stream) {
                (0, 0) => return Err(FrameFault::WindowIncrementZero),
                (0, stream) => Frame::Malformed { stream, fault: StreamFault::StreamIncrementZero },
                (increment, stream) => Frame::WindowUpdate { stream, increment },
            },
            frame_type::PRIORITY_UPDATE => match word(0) & MAX_31 {
                0 => return Err(FrameFault::InvalidPriorityUpdate),
                stream => Frame::PriorityUpdate { stream, value: payload.start + 4..payload.end },
            },
            _ => unreachable!("types are checked before"),
        })
    }

    fn parse_headers(&mut self, input: &[u8], header: FrameHeader) -> Result<Frame, FrameFault> {
        let (mut fragment, _) = self.padded(input, header)?.expect("the payload is there");
        let mut dependency = None;
        if header.has(flag::PRIORITY) {
            let Some((bytes, _)) = input[fragment.clone()].split_first_chunk::<5>() else {
                return Err(FrameFault::IncorrectLength);
            };
            dependency = Some(u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) & MAX_31);
            fragment.start += 5;
        }
        let end_headers = header.has(flag::END_HEADERS);
        if !end_headers {
            self.continues = Some(header.stream);
        }
        let (stream, end_stream) = (header.stream, header.has(flag::END_STREAM));
        Ok(Frame::Headers { stream, fragment, end_headers, end_stream, dependency })
    }

    fn pass_data(&mut self, left: u32, padding: u32) {
        if left > 0 {
            self.state = ReadState::Data { left, padding };
        } else {
            self.skip(padding);
        }
    }

    fn skip(&mut self, left: u32) {
        self.state = if left > 0 { ReadState::Skip { left } } else { ReadState::Header };
    }
}

/// Returns `true` if the frame type is supported.
fn is_known(frame_type: u8) -> bool {
    frame_type <= frame_type::CONTINUATION || frame_type == frame_type::PRIORITY_UPDATE
}

/// Appends a frame and its payload.
fn write(out: &mut Vec<u8>, frame_type: u8, flags: u8, stream: StreamId, payload: &[u8]) {
    let header = FrameHeader { length: payload.len() as u32, frame_type, flags, stream };
    out.extend_from_slice(&header.to_bytes());
    out.extend_from_slice(payload);
}

/// Appends SETTINGS: pairs of identifier and value.
pub fn write_settings(out: &mut Vec<u8>, settings: &[(u16, u32)]) {
    let length = settings.len() as u32 * 6;
    out.extend_from_slice(&FrameHeader { length, frame_type: frame_type::SETTINGS, flags: 0, stream: 0 }.to_bytes());
    for (id, value) in settings {
        out.extend_from_slice(&id.to_be_bytes());
        out.extend_from_slice(&value.to_be_bytes());
    }
}

/// Appends the acknowledgement of SETTINGS.
pub fn write_settings_ack(out: &mut Vec<u8>) {
    write(out, frame_type::SETTINGS, flag::ACK, 0, b"");
}

/// Appends PING, or its acknowledgement.
pub fn write_ping(out: &mut Vec<u8>, is_ack: bool, payload: [u8; 8]) {
    write(out, frame_type::PING, if is_ack { flag::ACK } else { 0 }, 0, &payload);
}

/// Appends RST_STREAM.
pub fn write_rst_stream(out: &mut Vec<u8>, stream: StreamId, code: ErrorCode) {
    write(out, frame_type::RST_STREAM, 0, stream, &code.0.to_be_bytes());
}

/// Appends WINDOW_UPDATE, for the connection if `stream` is 0. The increment must be 1 to 2³¹−1.
pub fn write_window_update(out: &mut Vec<u8>, stream: StreamId, increment: u32) {
    debug_assert!((1..=MAX_31).contains(&increment));
    write(out, frame_type::WINDOW_UPDATE, 0, stream, &increment.to_be_bytes());
}

/// Appends GOAWAY with a debug text.
pub fn write_goaway(out: &mut Vec<u8>, last_stream: StreamId, code: ErrorCode, debug: &[u8]) {
    let length = 8 + debug.len() as u32;
    out.extend_from_slice(&FrameHeader { length, frame_type: frame_type::GOAWAY, flags: 0, stream: 0 }.to_bytes());
    out.extend_from_slice(&last_stream.to_be_bytes());
    out.extend_from_slice(&code.0.to_be_bytes());
    out.extend_from_slice(debug);
}

/// Appends PRIORITY_UPDATE: RFC 9218 §7.1.
pub fn write_priority_update(out: &mut Vec<u8>, stream: StreamId, value: &[u8]) {
    let length = 4 + value.len() as u32;
    let header = FrameHeader { length, frame_type: frame_type::PRIORITY_UPDATE, flags: 0, stream: 0 };
    out.extend_from_slice(&header.to_bytes());
    out.extend_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(value);
}

/// Completes the field block at the end of `out`: at `start` there is room for a frame header, followed by the block.
/// The result is HEADERS and, if the block is longer than `length_max`, CONTINUATIONs.
pub fn finish_headers(out: &mut Vec<u8>, start: usize, stream: StreamId, end_stream: bool, length_max: u32) {
    let end_stream = if end_stream { flag::END_STREAM } else { 0 };
    let length = out.len() - start - HEADER_LENGTH;
    if length <= length_max as usize {
        let flags = end_stream | flag::END_HEADERS;
        let header = FrameHeader { length: length as u32, frame_type: frame_type::HEADERS, flags, stream };
        out[start..start + HEADER_LENGTH].copy_from_slice(&header.to_bytes());
        return;
    }
    let block = out.split_off(start + HEADER_LENGTH);
    out.truncate(start);
    let mut fragments = block.chunks(length_max as usize).peekable();
    let (mut frame_type, mut flags) = (frame_type::HEADERS, end_stream);
    while let Some(fragment) = fragments.next() {
        if fragments.peek().is_none() {
            flags |= flag::END_HEADERS;
        }
        write(out, frame_type, flags, stream, fragment);
        (frame_type, flags) = (frame_type::CONTINUATION, 0);
    }
}
