//! State of a connection and its streams: RFC 9113 §5, §6 and §8, for both sides.
//!
//! Converts frames to events. Frames that the protocol itself requires (SETTINGS, PING, WINDOW_UPDATE, RST_STREAM,
//! GOAWAY) are collected in a small buffer until the caller writes something or asks for them. Reads no clock.
//! Invariants: whatever the peer sends, memory is bounded by [`Limits`]; the events do not depend on how the input is
//! split, except for the pieces of data; after a connection fault there are no more events.

use std::ops::Range;
use std::sync::Arc;

use super::error::{ConnectionFault, ErrorCode, Flood, FrameFault, StateFault, StreamFault};
use super::fields::{BlockKind, Fields, Refusal};
use super::frame::{self, Frame, FrameReader, MAX_31, PREFACE, StreamId};
use super::hpack::{Decoder, Encoder};
use super::limits::{Budgets, Limits};
use super::priority::Priority;
use super::settings::{PeerSettings, id};
use super::stream::{Past, State, Stream, Streams};
use super::window::{ReceiveWindow, SendWindow, WINDOW_DEFAULT};

/// Gale's role on the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// Gale is the server.
    Server,
    /// Gale is the client.
    Client,
}

/// An event caused by the peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// A request begins; its head is in [`Fields::request`]. With `end_stream` it has no body.
    Request {
        /// Stream of the request.
        stream: StreamId,
        /// The request is complete.
        end_stream: bool,
    },
    /// An invalid request. It may be answered with [`Refusal::status`]; its body is discarded. A malformed one must be
    /// reset, either after the response or at once ([`Connection::reset_refused`]).
    BadRequest {
        /// Stream of the request.
        stream: StreamId,
        /// The request is complete.
        end_stream: bool,
        /// Reason for the refusal.
        refusal: Refusal,
    },
    /// The head of a response, final or interim, is in [`Fields::response`].
    Response {
        /// Stream of the response.
        stream: StreamId,
        /// The response is complete.
        end_stream: bool,
    },
    /// A piece of a body. It counts against the receive windows until it is released ([`Connection::release`]).
    Data {
        /// Stream of the body.
        stream: StreamId,
        /// A range of the input; empty only at the end of the message.
        piece: Range<usize>,
        /// The message is complete.
        end_stream: bool,
    },
    /// Trailers, in [`Fields::trailers`], which end the message.
    Trailers {
        /// Stream of the trailers.
        stream: StreamId,
    },
    /// The peer reset the stream. A request with REFUSED_STREAM was not processed (RFC 9113 §8.7).
    Reset {
        /// The removed stream.
        stream: StreamId,
        /// Error code sent by the peer.
        code: ErrorCode,
    },
    /// The peer violated a rule, and the stream was reset. The caller may not know the stream.
    Fault {
        /// The removed stream.
        stream: StreamId,
        /// The violated rule.
        fault: StreamFault,
    },
    /// A closed send window was opened.
    WindowOpened {
        /// The stream, or `None` if it is the window of the connection.
        stream: Option<StreamId>,
    },
    /// The peer's settings changed, and possibly all send windows.
    SettingsReceived,
    /// The peer acknowledged our settings, which are in effect from now on.
    SettingsAcknowledged,
    /// The client changed the priority of a response: RFC 9218 §7.
    PriorityChanged {
        /// Stream of the response.
        stream: StreamId,
        /// New priority.
        priority: Priority,
    },
    /// The peer accepts no new streams, and did not process streams above `last_stream` (RFC 9113 §6.8).
    GoAway {
        /// The last stream that may have been processed.
        last_stream: StreamId,
        /// Error code sent by the peer.
        code: ErrorCode,
        /// Debug text: a range of the input.
        debug: Range<usize>,
    },
    /// The response to [`Connection::ping`].
    Pong {
        /// Payload of the PING.
        payload: [u8; 8],
    },
}

/// Result of processing input.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Handled {
    /// Number of input bytes processed, including those of the event.
    pub consumed: usize,
    /// The first event; `None` if more input is needed.
    pub event: Option<Event>,
}

/// One HTTP/2 connection.
#[derive(Debug)]
pub struct Connection {
    pub(super) side: Side,
    pub(super) limits: Arc<Limits>,
    reader: FrameReader,
    decoder: Decoder,
    pub(super) encoder: Encoder,
    pub(super) peer: PeerSettings,
    /// Our SETTINGS frame is not acknowledged yet.
    awaits_settings_ack: bool,
    /// Receive window of new streams as known to the peer.
    receive_initial: u32,
    pub(super) send: SendWindow,
    receive: ReceiveWindow,
    pub(super) streams: Streams,
    /// The last stream opened by the peer.
    last_stream: StreamId,
    /// First and last of the ids skipped most recently by the peer: these streams are closed, but never were open.
    skipped: (StreamId, StreamId),
    /// Id of the next stream that we open; above 2³¹ if none is left.
    pub(super) next_stream: StreamId,
    /// HEADERS whose CONTINUATION frames are still missing.
    block: Option<Box<PartialBlock>>,
    /// Destination of the data of the current frame.
    data: DataTarget,
    /// Priorities of requests that have not arrived yet: RFC 9218 §7.
    early_priorities: Vec<(StreamId, Priority)>,
    pub(super) budgets: Budgets,
    /// Number of unanswered PINGs.
    pings_sent: u32,
    /// Number of streams that we reset after sending our complete message: the peer may have reset them as well at the
    /// same time, or may still do so.
    crossing_resets: u32,
    /// Control frames that the caller has not taken yet.
    pub(super) control: Vec<u8>,
    /// Last stream named in our final GOAWAY.
    goaway_sent: Option<StreamId>,
    /// Last stream that the peer opened in spite of that GOAWAY.
    ignored_up_to: StreamId,
    goaway_received: Option<StreamId>,
    fault: Option<ConnectionFault>,
}

#[derive(Clone, Copy, Debug)]
struct BlockInfo {
    stream: StreamId,
    end_stream: bool,
    is_self_dependent: bool,
}

#[derive(Debug)]
struct PartialBlock {
    info: BlockInfo,
    bytes: Vec<u8>,
    continuations: u32,
}

#[derive(Clone, Copy, Debug)]
enum DataTarget {
    /// No stream of interest.
    Nobody,
    /// Discarded, but END_STREAM still counts.
    Discarded {
        stream: StreamId,
        end_stream: bool,
    },
    Stream {
        stream: StreamId,
        end_stream: bool,
    },
}

/// Capacity that a connection keeps for control frames, in bytes.
const CONTROL_KEPT: usize = 64;

/// Maximum number of answered streams that stay open while the client still sends, and at most half of the streams that
/// it may open.
const DISCARDED_MAX: usize = 16;

/// Bytes that a client may still send of an answered request, beyond its previous window. Most bodies end within them,
/// and the client then needs no reset.
const DISCARDED_BYTES: u32 = 1024 * 1024;

/// Maximum number of priorities kept for requests that have not arrived yet.
const EARLY_PRIORITIES_MAX: usize = 32;

impl Connection {
    /// Creates the server side, which expects the client's preface first. Our SETTINGS frame is ready to be sent.
    pub fn server(limits: Arc<Limits>) -> Self {
        let mut connection = Self::new(Side::Server, limits);
        let limits = &connection.limits;
        let mut settings = vec![
            (id::MAX_CONCURRENT_STREAMS, limits.concurrent_streams_max),
            (id::INITIAL_WINDOW_SIZE, limits.stream_window.min(MAX_31)),
            (id::MAX_FRAME_SIZE, limits.frame_size_max),
            (id::MAX_HEADER_LIST_SIZE, u32::try_from(limits.head.head_max).unwrap_or(u32::MAX)),
            (id::NO_RFC7540_PRIORITIES, 1),
        ];
        if limits.decoder_table_size != super::hpack::TABLE_SIZE_DEFAULT {
            settings.push((id::HEADER_TABLE_SIZE, limits.decoder_table_size));
        }
        if limits.extended_connect {
            settings.push((id::ENABLE_CONNECT_PROTOCOL, 1));
        }
        connection.begin(&settings);
        connection
    }

    /// Creates the client side. The preface and our SETTINGS frame are ready to be sent.
    pub fn client(limits: Arc<Limits>) -> Self {
        let mut connection = Self::new(Side::Client, limits);
        connection.control.extend_from_slice(PREFACE);
        let limits = &connection.limits;
        let mut settings = vec![
            (id::ENABLE_PUSH, 0),
            (id::INITIAL_WINDOW_SIZE, limits.stream_window.min(MAX_31)),
            (id::MAX_FRAME_SIZE, limits.frame_size_max),
            (id::MAX_HEADER_LIST_SIZE, u32::try_from(limits.head.head_max).unwrap_or(u32::MAX)),
        ];
        if limits.decoder_table_size != super::hpack::TABLE_SIZE_DEFAULT {
            settings.push((id::HEADER_TABLE_SIZE, limits.decoder_table_size));
        }
        connection.begin(&settings);
        connection
    }

    fn new(side: Side, limits: Arc<Limits>) -> Self {
        let reader = match side {
            Side::Server => FrameReader::of_client(limits.frame_size_max),
            Side::Client => FrameReader::of_server(limits.frame_size_max),
        };
        Self {
            side,
            reader,
            decoder: Decoder::new(limits.decoder_table_size),
            encoder: Encoder::new(limits.encoder_table_size),
            peer: PeerSettings::default(),
            awaits_settings_ack: true,
            receive_initial: WINDOW_DEFAULT,
            send: SendWindow::new(WINDOW_DEFAULT),
            receive: ReceiveWindow::new(WINDOW_DEFAULT),
            streams: Streams::default(),
            last_stream: 0,
            skipped: (1, 0),
            next_stream: 1,
            block: None,
            data: DataTarget::Nobody,
            early_priorities: Vec::new(),
            budgets: Budgets::new(&limits.floods),
            pings_sent: 0,
            crossing_resets: 0,
            control: Vec::new(),
            goaway_sent: None,
            ignored_up_to: 0,
            goaway_received: None,
            fault: None,
            limits,
        }
    }

    fn begin(&mut self, settings: &[(u16, u32)]) {
        frame::write_settings(&mut self.control, settings);
        self.grow_connection_window(self.limits.connection_window);
    }

    /// Maximum number of input bytes needed for the next event: a control frame must be complete in the input.
    pub fn input_max(&self) -> usize {
        self.reader.input_max()
    }

    /// Processes input up to the first event. The input begins at the end of the previously processed bytes, and may
    /// have grown. After an error GOAWAY is ready to be sent; then the connection ends.
    pub fn handle_input(&mut self, input: &[u8], fields: &mut Fields) -> Result<Handled, ConnectionFault> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        self.advance(input, fields).inspect_err(|&fault| self.fail(fault))
    }

    fn advance(&mut self, input: &[u8], fields: &mut Fields) -> Result<Handled, ConnectionFault> {
        let mut at = 0;
        loop {
            let step = self.reader.read(&input[at..])?;
            let Some(frame) = step.frame else {
                if step.consumed == 0 {
                    return Ok(Handled { consumed: at, event: None });
                }
                at += step.consumed;
                continue;
            };
            let mut event = self.handle_frame(frame, &input[at..], fields)?;
            if self.control.len() > self.limits.control_max {
                return Err(Flood::Unread.into());
            }
            if let Some(Event::Data { piece: range, .. } | Event::GoAway { debug: range, .. }) = &mut event {
                *range = range.start + at..range.end + at;
            }
            at += step.consumed;
            if event.is_some() {
                return Ok(Handled { consumed: at, event });
            }
        }
    }

    /// Refills the budgets of [`super::FloodLimits`] at the end of an interval.
    pub fn handle_interval(&mut self) {
        self.budgets.refill(&self.limits.floods);
    }

    /// Handles the end of the peer's input. Returns `false` if a frame or message is incomplete.
    pub fn handle_end(&self) -> bool {
        self.reader.is_between_frames() && self.streams.iter().all(Stream::is_answered)
    }

    /// Handles one frame. Ranges in the event refer to `input`, which begins with the frame.
    fn handle_frame(
        &mut self,
        frame: Frame,
        input: &[u8],
        fields: &mut Fields,
    ) -> Result<Option<Event>, ConnectionFault> {
        match frame {
            Frame::DataBegin { stream, length, content, end_stream } => {
                self.handle_data_begin(stream, length, content, end_stream)
            }
            Frame::Data { piece, is_last } => Ok(self.handle_data(piece, is_last)),
            Frame::Headers { stream, fragment, end_headers, end_stream, dependency } => {
                let info = BlockInfo { stream, end_stream, is_self_dependent: dependency == Some(stream) };
                let fragment = &input[fragment];
                if fragment.len() > self.limits.block_max {
                    return Err(StateFault::HeaderBlockTooLong.into());
                }
                if end_headers {
                    return self.handle_block(info, fragment, fields);
                }
                self.block = Some(Box::new(PartialBlock { info, bytes: fragment.to_vec(), continuations: 0 }));
                Ok(None)
            }
            Frame::Continuation { fragment, end_headers, .. } => {
                self.handle_continuation(&input[fragment], end_headers, fields)
            }
            Frame::Priority { stream, dependency } => {
                self.budgets.charge(Flood::Priorities)?;
                match (stream == dependency, self.streams.get(stream)) {
                    (false, _) => Ok(None),
                    (true, Some(_)) => self.fail_stream(stream, StreamFault::SelfDependency),
                    (true, None) => Err(StateFault::SelfDependency.into()),
                }
            }
            Frame::RstStream { stream, code } => self.handle_reset(stream, code),
            Frame::Settings { payload } => self.handle_settings(&input[payload]),
            Frame::SettingsAck => self.handle_settings_ack(),
            Frame::Ping { payload } => {
                self.budgets.charge(Flood::Pings)?;
                frame::write_ping(&mut self.control, true, payload);
                Ok(None)
            }
            Frame::PingAck { payload } => {
                if self.pings_sent == 0 {
                    self.budgets.charge(Flood::Pings)?;
                    return Ok(None);
                }
                self.pings_sent -= 1;
                Ok(Some(Event::Pong { payload }))
            }
            Frame::GoAway { last_stream, code, debug } => self.handle_goaway(last_stream, code, debug),
            Frame::WindowUpdate { stream, increment } => self.handle_window_update(stream, increment),
            Frame::PriorityUpdate { stream, value } => self.handle_priority_update(stream, &input[value]),
            Frame::Unknown { .. } => {
                self.budgets.charge(Flood::UnknownFrames)?;
                Ok(None)
            }
            Frame::Malformed { stream, fault } => self.handle_malformed(stream, fault),
        }
    }

    /// The length counted against the windows includes the padding (RFC 9113 §6.1), which is released at once.
    fn handle_data_begin(
        &mut self,
        id: StreamId,
        length: u32,
        content: u32,
        end_stream: bool,
    ) -> Result<Option<Event>, ConnectionFault> {
        self.data = DataTarget::Nobody;
        if content == 0 && !end_stream {
            self.budgets.charge(Flood::EmptyFrames)?;
        }
        if !self.receive.charge(length) {
            return Err(StateFault::WindowExceeded.into());
        }
        let Some(stream) = self.streams.get_mut(id) else {
            self.return_connection_window(length);
            return match self.check_past(id)? {
                Past::ResetByUs => Ok(None),
                Past::ResetByPeer => self.fail_stream(id, StreamFault::StreamClosed),
                Past::Ended => Err(StateFault::ClosedStream.into()),
            };
        };
        if let Err(fault) = take_data(stream, length, content, end_stream) {
            self.return_connection_window(length);
            return self.fail_stream(id, fault);
        }
        let is_discarded = stream.is_discarded;
        if is_discarded {
            let is_to_stop = !end_stream && stream.is_used_up();
            self.data = DataTarget::Discarded { stream: id, end_stream };
            self.return_connection_window(length);
            if is_to_stop {
                self.stop(id);
            }
        } else {
            stream.unreleased += content;
            stream.receive.give_back(length - content);
            self.data = DataTarget::Stream { stream: id, end_stream };
            self.return_connection_window(length - content);
        }
        if content > 0 || !end_stream {
            return Ok(None);
        }
        self.end_remote(id);
        Ok((!is_discarded).then_some(Event::Data { stream: id, piece: 0..0, end_stream: true }))
    }

    fn handle_data(&mut self, piece: Range<usize>, is_last: bool) -> Option<Event> {
        match self.data {
            DataTarget::Nobody => None,
            DataTarget::Discarded { stream, end_stream } => {
                if end_stream && is_last {
                    self.end_remote(stream);
                }
                None
            }
            DataTarget::Stream { stream, end_stream } => {
                // The caller may have reset the stream between two pieces.
                self.streams.get(stream)?;
                let end_stream = end_stream && is_last;
                if end_stream {
                    self.end_remote(stream);
                }
                Some(Event::Data { stream, piece, end_stream })
            }
        }
    }

    fn handle_continuation(
        &mut self,
        fragment: &[u8],
        end_headers: bool,
        fields: &mut Fields,
    ) -> Result<Option<Event>, ConnectionFault> {
        let mut block = self.block.take().expect("the reader checks the order of frames");
        block.continuations += 1;
        if block.continuations > self.limits.continuations_max {
            return Err(StateFault::TooManyContinuations.into());
        }
        if fragment.is_empty() && !end_headers {
            self.budgets.charge(Flood::EmptyFrames)?;
        }
        if block.bytes.len() + fragment.len() > self.limits.block_max {
            return Err(StateFault::HeaderBlockTooLong.into());
        }
        block.bytes.extend_from_slice(fragment);
        if end_headers {
            return self.handle_block(block.info, &block.bytes, fields);
        }
        self.block = Some(block);
        Ok(None)
    }

    /// Handles a complete field block. It passes through the decoder whatever the state of its stream.
    fn handle_block(
        &mut self,
        info: BlockInfo,
        block: &[u8],
        fields: &mut Fields,
    ) -> Result<Option<Event>, ConnectionFault> {
        let id = info.stream;
        if let Some(stream) = self.streams.get(id) {
            let kind = match (self.side, stream.state.may_receive(), stream.is_refused()) {
                (_, false, _) | (_, _, true) => BlockKind::Discarded,
                (Side::Client, ..) if !stream.has_head => BlockKind::Response,
                _ => BlockKind::Trailers,
            };
            let may_receive = stream.state.may_receive();
            let decoded = fields.decode(&mut self.decoder, block, kind, &self.limits)?;
            return match (kind, decoded) {
                (_, Err(refusal)) => self.fail_stream(id, fault_of(refusal)),
                (BlockKind::Response, Ok(())) => self.handle_response(info, fields),
                (BlockKind::Trailers, Ok(())) => self.handle_trailers(info),
                _ if !may_receive => self.fail_stream(id, StreamFault::StreamClosed),
                _ => {
                    if info.end_stream {
                        self.end_remote(id);
                    }
                    Ok(None)
                }
            };
        }
        if self.side == Side::Server && id > self.last_stream {
            return self.handle_request(info, block, fields);
        }
        let past = self.check_past(id)?;
        if past == Past::Ended {
            // Skipped ids are closed streams too, but using them is a different error (RFC 9113 §5.1.1).
            let was_skipped = (self.skipped.0..=self.skipped.1).contains(&id);
            return Err(if was_skipped { StateFault::InvalidStreamId } else { StateFault::ClosedStream }.into());
        }
        let _ = fields.decode(&mut self.decoder, block, BlockKind::Discarded, &self.limits)?;
        match past {
            Past::ResetByPeer => self.fail_stream(id, StreamFault::StreamClosed),
            _ => Ok(None),
        }
    }

    fn handle_request(
        &mut self,
        info: BlockInfo,
        block: &[u8],
        fields: &mut Fields,
    ) -> Result<Option<Event>, ConnectionFault> {
        let BlockInfo { stream: id, end_stream, is_self_dependent } = info;
        if id.is_multiple_of(2) {
            return Err(StateFault::InvalidStreamId.into());
        }
        let is_behind_goaway = self.goaway_sent.is_some_and(|last| id > last);
        let is_full = self.streams.len() >= self.limits.concurrent_streams_max as usize;
        let kind = if is_behind_goaway || is_full || is_self_dependent {
            BlockKind::Discarded
        } else {
            BlockKind::Request { end_stream }
        };
        let decoded = fields.decode(&mut self.decoder, block, kind, &self.limits)?;
        if is_behind_goaway {
            // A request above the last stream of our GOAWAY is ignored; the client may have sent it before reading the
            // GOAWAY (RFC 9113 §6.8).
            self.ignored_up_to = self.ignored_up_to.max(id);
            self.budgets.charge(Flood::RefusedStreams)?;
            return Ok(None);
        }
        if id > self.last_stream + 2 {
            self.skipped = (self.last_stream + 1, id - 1);
        }
        self.last_stream = id;
        let early_priority = self.take_early_priority(id);
        if is_self_dependent {
            return self.fail_stream(id, StreamFault::SelfDependency);
        }
        if is_full {
            return self.fail_stream(id, StreamFault::TooManyStreams);
        }
        let mut stream = self.new_stream(id);
        stream.state = if end_stream { State::HalfClosedRemote } else { State::Open };
        stream.has_head = true;
        stream.length_left = fields.content_length();
        stream.priority = early_priority.or_else(|| fields.priority()).unwrap_or_default();
        stream.is_discarded = decoded.is_err();
        self.streams.push(stream);
        match decoded {
            Ok(()) => Ok(Some(Event::Request { stream: id, end_stream })),
            Err(refusal) => {
                if let Refusal::Malformed(_) = refusal {
                    self.budgets.charge(Flood::Resets)?;
                }
                Ok(Some(Event::BadRequest { stream: id, end_stream, refusal }))
            }
        }
    }

    fn handle_response(&mut self, info: BlockInfo, fields: &Fields) -> Result<Option<Event>, ConnectionFault> {
        let BlockInfo { stream: id, end_stream, .. } = info;
        if fields.response.is_interim() {
            if end_stream {
                return self.fail_stream(id, StreamFault::InterimEndsStream);
            }
            return Ok(Some(Event::Response { stream: id, end_stream: false }));
        }
        let stream = self.streams.get_mut(id).expect("the block is of an open stream");
        stream.has_head = true;
        // RFC 9110 §6.4.1.
        if !stream.ignores_length && !matches!(fields.response.status, 204 | 304) {
            stream.length_left = fields.content_length();
        }
        if end_stream {
            if stream.length_left.is_some_and(|left| left > 0) {
                return self.fail_stream(id, StreamFault::ContentLengthMismatch);
            }
            self.end_remote(id);
        }
        Ok(Some(Event::Response { stream: id, end_stream }))
    }

    fn handle_trailers(&mut self, info: BlockInfo) -> Result<Option<Event>, ConnectionFault> {
        let BlockInfo { stream: id, end_stream, .. } = info;
        if !end_stream {
            return self.fail_stream(id, StreamFault::TrailersWithoutEnd);
        }
        if self.streams.get(id).and_then(|stream| stream.length_left).is_some_and(|left| left > 0) {
            return self.fail_stream(id, StreamFault::ContentLengthMismatch);
        }
        let is_discarded = self.streams.get(id).is_some_and(|stream| stream.is_discarded);
        self.end_remote(id);
        Ok((!is_discarded).then_some(Event::Trailers { stream: id }))
    }

    fn handle_reset(&mut self, id: StreamId, code: ErrorCode) -> Result<Option<Event>, ConnectionFault> {
        self.check_not_idle(id)?;
        let stream = self.streams.get(id);
        match stream {
            // The peer has our complete message and cancels only the rest of its own.
            Some(stream) if !stream.state.may_send() => {}
            None if self.crossing_resets > 0 => self.crossing_resets -= 1,
            _ => self.budgets.charge(Flood::Resets)?,
        }
        if stream.is_none() {
            return Ok(None);
        }
        let stream = self.streams.remove_reset(id, false);
        self.forget(stream);
        Ok(Some(Event::Reset { stream: id, code }))
    }

    fn handle_settings(&mut self, payload: &[u8]) -> Result<Option<Event>, ConnectionFault> {
        self.budgets.charge(Flood::Settings)?;
        let initial_before = i64::from(self.peer.initial_window);
        let smallest_table = self.peer.apply(payload, self.side == Side::Server)?;
        if smallest_table < u32::MAX {
            self.encoder.handle_size_allowed(smallest_table);
            self.encoder.handle_size_allowed(self.peer.header_table_size);
        }
        let change = i64::from(self.peer.initial_window) - initial_before;
        if change != 0 {
            for stream in self.streams.iter_mut() {
                stream.send.change(change).map_err(|_| StateFault::InitialWindowOverflow)?;
            }
        }
        frame::write_settings_ack(&mut self.control);
        Ok(Some(Event::SettingsReceived))
    }

    fn handle_settings_ack(&mut self) -> Result<Option<Event>, ConnectionFault> {
        if !self.awaits_settings_ack {
            self.budgets.charge(Flood::Settings)?;
            return Ok(None);
        }
        self.awaits_settings_ack = false;
        self.decoder.handle_size_acknowledged(self.limits.decoder_table_size);
        let (from, to) = (self.receive_initial, self.limits.stream_window.min(MAX_31));
        self.streams.iter_mut().for_each(|stream| stream.receive.change_initial(from, to));
        self.receive_initial = to;
        Ok(Some(Event::SettingsAcknowledged))
    }

    fn handle_goaway(
        &mut self,
        last_stream: StreamId,
        code: ErrorCode,
        debug: Range<usize>,
    ) -> Result<Option<Event>, ConnectionFault> {
        if self.goaway_received.is_some_and(|before| last_stream > before) {
            return Err(StateFault::GoAwayIdIncreased.into());
        }
        self.budgets.charge(Flood::Settings)?;
        self.goaway_received = Some(last_stream);
        Ok(Some(Event::GoAway { last_stream, code, debug }))
    }

    fn handle_window_update(&mut self, id: StreamId, increment: u32) -> Result<Option<Event>, ConnectionFault> {
        self.budgets.charge(Flood::WindowUpdates)?;
        if id == 0 {
            let is_open = self.send.change(i64::from(increment)).map_err(|_| StateFault::WindowOverflow)?;
            return Ok(is_open.then_some(Event::WindowOpened { stream: None }));
        }
        let Some(stream) = self.streams.get_mut(id) else {
            self.check_not_idle(id)?;
            return Ok(None);
        };
        match stream.send.change(i64::from(increment)) {
            Ok(is_open) => Ok(is_open.then_some(Event::WindowOpened { stream: Some(id) })),
            Err(_) => self.fail_stream(id, StreamFault::StreamWindowOverflow),
        }
    }

    fn handle_priority_update(&mut self, id: StreamId, value: &[u8]) -> Result<Option<Event>, ConnectionFault> {
        // Only clients send it, for requests; we push no responses: RFC 9218 §7.1.
        if self.side == Side::Client || id.is_multiple_of(2) {
            return Err(FrameFault::InvalidPriorityUpdate.into());
        }
        self.budgets.charge(Flood::Priorities)?;
        let priority = Priority::parse(value);
        if let Some(stream) = self.streams.get_mut(id) {
            stream.priority = priority;
            return Ok(Some(Event::PriorityChanged { stream: id, priority }));
        }
        if id > self.last_stream {
            self.take_early_priority(id);
            if self.early_priorities.len() < EARLY_PRIORITIES_MAX {
                self.early_priorities.push((id, priority));
            }
        }
        Ok(None)
    }

    /// Returns the priority that arrived before its request. Priorities for older streams are dropped: these requests
    /// will not arrive any more.
    fn take_early_priority(&mut self, id: StreamId) -> Option<Priority> {
        if self.early_priorities.is_empty() {
            return None;
        }
        let found = self.early_priorities.iter().find(|early| early.0 == id).map(|early| early.1);
        let last_stream = self.last_stream;
        self.early_priorities.retain(|early| early.0 != id && early.0 > last_stream);
        found
    }

    fn handle_malformed(&mut self, id: StreamId, fault: StreamFault) -> Result<Option<Event>, ConnectionFault> {
        if self.streams.get(id).is_some() {
            return self.fail_stream(id, fault);
        }
        // A stream that is not open cannot be reset.
        match fault {
            StreamFault::PriorityLength => Err(FrameFault::IncorrectLength.into()),
            _ => {
                self.check_not_idle(id)?;
                Err(FrameFault::WindowIncrementZero.into())
            }
        }
    }

    /// Resets a stream on which the peer violated a rule.
    fn fail_stream(&mut self, id: StreamId, fault: StreamFault) -> Result<Option<Event>, ConnectionFault> {
        let flood = if fault == StreamFault::TooManyStreams { Flood::RefusedStreams } else { Flood::Resets };
        self.budgets.charge(flood)?;
        frame::write_rst_stream(&mut self.control, id, fault.code());
        let stream = self.streams.remove_reset(id, true);
        self.forget(stream);
        Ok(Some(Event::Fault { stream: id, fault }))
    }

    fn fail(&mut self, fault: ConnectionFault) {
        self.fault = Some(fault);
        self.block = None;
        // Responses to control frames that the peer does not read are dropped to free their memory.
        if fault == ConnectionFault::Flood(Flood::Unread) {
            self.control.clear();
        }
        let last_stream = if self.side == Side::Server { self.last_stream } else { 0 };
        frame::write_goaway(&mut self.control, last_stream, fault.code(), fault.to_string().as_bytes());
    }

    fn is_idle(&self, id: StreamId) -> bool {
        match self.side {
            Side::Server => id.is_multiple_of(2) || id > self.last_stream.max(self.ignored_up_to),
            Side::Client => id.is_multiple_of(2) || id >= self.next_stream,
        }
    }

    fn check_not_idle(&self, id: StreamId) -> Result<(), ConnectionFault> {
        if self.is_idle(id) { Err(StateFault::IdleStream.into()) } else { Ok(()) }
    }

    /// Returns how a stream that is no longer in the table ended.
    fn check_past(&self, id: StreamId) -> Result<Past, ConnectionFault> {
        self.check_not_idle(id)?;
        if id > self.last_stream && self.side == Side::Server {
            return Ok(Past::ResetByUs);
        }
        Ok(self.streams.past(id))
    }

    pub(super) fn new_stream(&self, id: StreamId) -> Stream {
        Stream {
            id,
            state: State::Open,
            send: SendWindow::new(self.peer.initial_window),
            receive: ReceiveWindow::new(self.receive_initial),
            unreleased: 0,
            length_left: None,
            priority: Priority::default(),
            has_head: false,
            has_sent_head: false,
            is_discarded: false,
            ignores_length: false,
        }
    }

    fn end_remote(&mut self, id: StreamId) {
        let closed = self.streams.end_remote(id);
        self.forget(closed);
    }

    /// Returns the unreleased bytes of a removed stream to the connection's window.
    pub(super) fn forget(&mut self, stream: Option<Stream>) {
        if let Some(stream) = stream {
            self.return_connection_window(stream.unreleased);
        }
    }

    fn return_connection_window(&mut self, length: u32) {
        self.receive.give_back(length);
        if let Some(increment) = self.receive.take_update() {
            frame::write_window_update(&mut self.control, 0, increment);
        }
    }

    /// Releases bytes of a stream's data: the peer may send the same number again.
    pub fn release(&mut self, id: StreamId, length: usize) {
        let Some(stream) = self.streams.get_mut(id) else {
            return; // its unreleased bytes were returned when it was removed
        };
        let length = stream.unreleased.min(u32::try_from(length).unwrap_or(u32::MAX));
        stream.unreleased -= length;
        stream.receive.give_back(length);
        if stream.state.may_receive()
            && let Some(increment) = stream.receive.take_update()
        {
            frame::write_window_update(&mut self.control, id, increment);
        }
        self.return_connection_window(length);
    }

    /// Enlarges the receive window of a stream, for a peer with a long round trip.
    pub fn grow_stream_window(&mut self, id: StreamId, size: u32) {
        if let Some(stream) = self.streams.get_mut(id) {
            stream.receive.grow_to(size);
        }
        self.release(id, 0);
    }

    /// Enlarges the receive window of the connection.
    pub fn grow_connection_window(&mut self, size: u32) {
        self.receive.grow_to(size);
        self.return_connection_window(0);
    }

    /// Resets a stream: nothing more is sent on it, and its input is ignored. `NO_ERROR` asks a client that has
    /// received its response to stop sending (RFC 9113 §8.1).
    pub fn reset(&mut self, id: StreamId, code: ErrorCode) {
        if self.streams.get(id).is_none() {
            return;
        }
        frame::write_rst_stream(&mut self.control, id, code);
        let stream = self.streams.remove_reset(id, true);
        if stream.as_ref().is_some_and(|stream| stream.state == State::HalfClosedLocal) {
            self.crossing_resets = self.crossing_resets.saturating_add(1);
        }
        self.forget(stream);
    }

    /// Discards the rest of the request after our response has ended the stream on our side. If the peer has not ended
    /// its side, it may send 1 MiB more and is told to stop only after that: most clients finish at once, and some
    /// treat even `NO_ERROR` as a failure if it arrives together with the response (RFC 9113 §8.1; curl before 8.0).
    pub fn discard(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(id).filter(|stream| !stream.state.may_send()) else { return };
        stream.is_discarded = true;
        let unreleased = std::mem::take(&mut stream.unreleased);
        let increment = stream.receive.widen(DISCARDED_BYTES);
        if increment > 0 {
            frame::write_window_update(&mut self.control, id, increment);
        }
        self.return_connection_window(unreleased);
        if let DataTarget::Stream { stream, end_stream } = self.data
            && stream == id
        {
            self.data = DataTarget::Discarded { stream, end_stream };
        }
        let mut discarded = self.streams.iter().filter(|stream| stream.is_answered());
        // A client with many unfinished requests is unlikely to finish them.
        let most = DISCARDED_MAX.min(self.limits.concurrent_streams_max as usize / 2);
        let first = discarded.next().filter(|_| discarded.count() >= most).map(|stream| stream.id);
        if let Some(id) = first {
            self.stop(id);
        }
    }

    /// Asks a peer that has received its response to stop sending. As in nginx, the window is opened first: a client
    /// may be blocked by flow control, and Node.js then never ends the stream.
    fn stop(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(id) else { return };
        let increment = stream.receive.widen(MAX_31);
        if increment > 0 {
            frame::write_window_update(&mut self.control, id, increment);
        }
        self.reset(id, ErrorCode::NO_ERROR);
    }

    /// Resets the stream of [`Event::BadRequest`], whether it was answered or not. A response must not have ended the
    /// stream.
    pub fn reset_refused(&mut self, id: StreamId, refusal: Refusal) {
        match refusal {
            Refusal::Malformed(fault) => self.reset(id, fault.code()),
            Refusal::Offence(_) => self.reset(id, ErrorCode::NO_ERROR),
        }
    }

    /// Sends PING; the response arrives as [`Event::Pong`].
    pub fn ping(&mut self, payload: [u8; 8]) {
        self.pings_sent += 1;
        frame::write_ping(&mut self.control, false, payload);
    }

    /// First step of a graceful shutdown: the peer should open no more streams, and open ones are served. The second
    /// step, [`Connection::shutdown`], follows after at least one round trip: RFC 9113 §6.8.
    pub fn announce_shutdown(&mut self) {
        frame::write_goaway(&mut self.control, MAX_31, ErrorCode::NO_ERROR, b"");
    }

    /// Second step: streams that the peer opens from now on are ignored. The connection is finished when
    /// [`Connection::open_streams`] is 0.
    pub fn shutdown(&mut self) {
        if self.goaway_sent.is_none() {
            self.goaway_sent = Some(self.last_stream);
            frame::write_goaway(&mut self.control, self.last_stream, ErrorCode::NO_ERROR, b"");
        }
    }

    /// Closes the connection with an error code of our own.
    pub fn close(&mut self, code: ErrorCode, debug: &[u8]) {
        self.goaway_sent.get_or_insert(self.last_stream);
        frame::write_goaway(&mut self.control, self.last_stream, code, debug);
    }

    /// Appends the pending control frames. Call it regularly after handling input; all write functions call it first.
    /// Do not call it while the transport is blocked: the bound of the buffer then stops a peer that does not read.
    pub fn poll_control(&mut self, out: &mut Vec<u8>) {
        if !self.control.is_empty() {
            out.extend_from_slice(&self.control);
            self.control.clear();
            // Frees the buffer of an idle connection.
            self.control.shrink_to(CONTROL_KEPT);
        }
    }

    /// Returns `true` if control frames are pending.
    pub fn has_control(&self) -> bool {
        !self.control.is_empty()
    }

    /// Returns `true` if a field block is incomplete.
    pub fn is_in_head(&self) -> bool {
        self.block.is_some()
    }

    /// Our role on the connection.
    pub fn side(&self) -> Side {
        self.side
    }

    /// The peer's settings.
    pub fn peer_settings(&self) -> &PeerSettings {
        &self.peer
    }

    /// Returns `true` if the peer has not acknowledged our settings yet. After a timeout this is a reason to close the
    /// connection with SETTINGS_TIMEOUT.
    pub fn awaits_settings_ack(&self) -> bool {
        self.awaits_settings_ack
    }

    /// Number of streams that are open in at least one direction.
    pub fn open_streams(&self) -> usize {
        self.streams.len()
    }

    /// Iterates over the streams that are open in at least one direction, oldest first.
    pub fn stream_ids(&self) -> impl Iterator<Item = StreamId> {
        self.streams.iter().map(|stream| stream.id)
    }

    /// The last stream opened by the peer; 0 if there is none.
    pub fn last_stream(&self) -> StreamId {
        self.last_stream
    }

    /// The last stream that the peer processes, if it has sent GOAWAY.
    pub fn goaway_received(&self) -> Option<StreamId> {
        self.goaway_received
    }

    /// The priority of a stream's response; the default one if the stream is gone.
    pub fn priority(&self, id: StreamId) -> Priority {
        self.streams.get(id).map(|stream| stream.priority).unwrap_or_default()
    }
}

/// Checks the data received on a stream, and charges its window.
fn take_data(stream: &mut Stream, length: u32, content: u32, end_stream: bool) -> Result<(), StreamFault> {
    if !stream.state.may_receive() {
        return Err(StreamFault::StreamClosed);
    }
    if !stream.has_head {
        return Err(StreamFault::DataBeforeHead);
    }
    if !stream.receive.charge(length) {
        return Err(StreamFault::StreamWindowExceeded);
    }
    if stream.is_refused() {
        return Ok(());
    }
    if let Some(left) = &mut stream.length_left {
        *left = left.checked_sub(u64::from(content)).ok_or(StreamFault::ContentLengthMismatch)?;
        if end_stream && *left > 0 {
            return Err(StreamFault::ContentLengthMismatch);
        }
    }
    Ok(())
}

/// Returns the fault of a block that is not a request. Such blocks are never refused for an offence.
fn fault_of(refusal: Refusal) -> StreamFault {
    match refusal {
        Refusal::Malformed(fault) => fault,
        Refusal::Offence(_) => StreamFault::InvalidFieldValue,
    }
}
