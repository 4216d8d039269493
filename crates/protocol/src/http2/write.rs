//! Output of a connection: heads, data, trailers.
//!
//! Windows are charged only when a frame is built, so a stream that waits for a disk or a peer holds no part of them.
//! Invariant: frames must be sent in the order in which they are written, since field blocks depend on each other.

use std::fmt;

use super::connection::{Connection, Side};
use super::frame::{self, FrameHeader, HEADER_LENGTH, MAX_31, StreamId, flag, frame_type};
use super::hpack::{Encoder, Indexing};
use super::stream::Stream;
use crate::http1::request_writer::{Unwritable, ends_line, is_token};
use crate::http1::response::write_decimal;
use crate::response::ResponseField;

/// Reason why a frame could not be sent on a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SendFault {
    /// The stream is gone: reset by either side, or closed.
    Gone,
    /// Our side has ended.
    Ended,
    /// A second head, or data or trailers before the head.
    OutOfOrder,
}

impl fmt::Display for SendFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gone => "stream is gone",
            Self::Ended => "message has ended",
            Self::OutOfOrder => "message is out of order",
        })
    }
}

impl std::error::Error for SendFault {}

/// Reason why a client cannot open a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CannotOpen {
    /// The maximum number of streams allowed by the server is open.
    Full,
    /// The server has sent GOAWAY.
    GoingAway,
    /// All stream ids are used.
    IdsUsedUp,
    /// A part of the request would be parsed as something else.
    Unwritable(Unwritable),
}

/// Result of writing a DATA frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SentData {
    /// Number of bytes that must follow the frame header.
    pub length: usize,
    /// `true` if the message is complete.
    pub end_stream: bool,
}

impl SentData {
    /// Returns `true` if no frame was written, since a window is closed. Try again after
    /// [`super::Event::WindowOpened`].
    pub fn is_blocked(self) -> bool {
        self == Self::default()
    }
}

/// The pseudo-headers of a request (RFC 9113 §8.3.1).
#[derive(Clone, Copy, Debug)]
pub struct RequestLine<'t> {
    /// Method.
    pub method: &'t [u8],
    /// `http` or `https`; not sent with a plain CONNECT.
    pub scheme: &'t [u8],
    /// Host and optional port; not sent if empty.
    pub authority: &'t [u8],
    /// Path and query, or `*`; not sent with a plain CONNECT.
    pub path: &'t [u8],
    /// Protocol of an extended CONNECT: RFC 8441.
    pub protocol: Option<&'t [u8]>,
}

impl RequestLine<'_> {
    /// Checks that the pseudo-headers can be written. [`Connection::write_request`] makes the same check.
    pub fn check(&self) -> Result<(), Unwritable> {
        check_line(self)
    }
}

/// Checks that a field can be written. [`FieldsWriter::field`] makes the same check.
pub fn check_field(name: &[u8], value: &[u8]) -> Result<(), Unwritable> {
    if !is_token(name) || is_of_connection(name) {
        return Err(Unwritable::Name);
    }
    checked_value(value).map(|_| ())
}

/// Writes the fields of a head or of trailers.
#[derive(Debug)]
pub struct FieldsWriter<'a> {
    encoder: &'a mut Encoder,
    out: &'a mut Vec<u8>,
}

impl FieldsWriter<'_> {
    /// Appends a field of a response. Connection-specific fields are refused: RFC 9113 §8.2.2.
    #[inline]
    pub fn known(&mut self, field: ResponseField, value: &[u8]) -> Result<(), Unwritable> {
        use ResponseField as F;
        if matches!(field, F::Connection | F::KeepAlive | F::ProxyConnection | F::TransferEncoding | F::Upgrade) {
            return Err(Unwritable::Name);
        }
        let value = checked_value(value)?;
        self.encoder.encode_known(field, value, self.out);
        Ok(())
    }

    /// Appends a numeric field of a response.
    pub fn known_number(&mut self, field: ResponseField, number: u64) -> Result<(), Unwritable> {
        let mut digits = Vec::with_capacity(20);
        write_decimal(&mut digits, number);
        self.known(field, &digits)
    }

    /// Appends any field; capitals in its name are converted to lower case. Connection-specific fields are refused: RFC
    /// 9113 §8.2.2.
    pub fn field(&mut self, name: &[u8], value: &[u8], indexing: Indexing) -> Result<(), Unwritable> {
        if !is_token(name) || is_of_connection(name) {
            return Err(Unwritable::Name);
        }
        self.encoder.encode(name, checked_value(value)?, indexing, self.out);
        Ok(())
    }
}

/// Trims spaces and tabs, which HTTP/2 does not allow at the ends of a value (RFC 9113 §8.2.1).
#[inline]
fn checked_value(value: &[u8]) -> Result<&[u8], Unwritable> {
    if ends_line(value) {
        return Err(Unwritable::Value);
    }
    let (mut value, is_space) = (value, |byte: u8| byte == b' ' || byte == b'\t');
    while let [first, rest @ ..] = value
        && is_space(*first)
    {
        value = rest;
    }
    while let [rest @ .., last] = value
        && is_space(*last)
    {
        value = rest;
    }
    Ok(value)
}

fn is_of_connection(name: &[u8]) -> bool {
    const NAMES: &[&[u8]] = &[b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"];
    NAMES.iter().any(|other| name.eq_ignore_ascii_case(other))
}

/// Writing of frames on streams. All functions append to `out`, after the pending control frames.
impl Connection {
    /// Writes the head of a response; with a status of 1xx it is an interim response. `write` writes the fields.
    pub fn write_response(
        &mut self,
        id: StreamId,
        status: u16,
        end_stream: bool,
        out: &mut Vec<u8>,
        write: impl FnOnce(&mut FieldsWriter<'_>),
    ) -> Result<(), SendFault> {
        let stream = self.sending_stream(id)?;
        let is_interim = status < 200;
        if stream.has_sent_head || is_interim && end_stream {
            return Err(SendFault::OutOfOrder);
        }
        stream.has_sent_head = !is_interim;
        let start = self.begin_block(out);
        self.encoder.encode_status(status, out);
        write(&mut FieldsWriter { encoder: &mut self.encoder, out });
        self.finish_block(id, end_stream, start, out);
        Ok(())
    }

    /// Opens a stream and writes the head of a request.
    pub fn write_request(
        &mut self,
        line: RequestLine<'_>,
        end_stream: bool,
        out: &mut Vec<u8>,
        write: impl FnOnce(&mut FieldsWriter<'_>),
    ) -> Result<StreamId, CannotOpen> {
        debug_assert_eq!(self.side, Side::Client);
        self.check_can_open()?;
        check_line(&line).map_err(CannotOpen::Unwritable)?;
        let id = self.next_stream;
        self.next_stream += 2;
        let mut stream = self.new_stream(id);
        stream.has_sent_head = true;
        // RFC 9110 §9.3.2 and §9.3.6.
        stream.ignores_length = line.method == b"HEAD" || line.method == b"CONNECT";
        self.streams.push(stream);
        let start = self.begin_block(out);
        let encoder = &mut self.encoder;
        encoder.encode_method(line.method, out);
        if line.method != b"CONNECT" || line.protocol.is_some() {
            encoder.encode_scheme(line.scheme, out);
            encoder.encode_path(line.path, out);
        }
        if !line.authority.is_empty() {
            encoder.encode_authority(line.authority, out);
        }
        if let Some(protocol) = line.protocol {
            encoder.encode(b":protocol", protocol, Indexing::Always, out);
        }
        write(&mut FieldsWriter { encoder, out });
        self.finish_block(id, end_stream, start, out);
        Ok(id)
    }

    /// Checks that a stream can be opened now.
    pub fn check_can_open(&self) -> Result<(), CannotOpen> {
        if self.goaway_received().is_some() {
            Err(CannotOpen::GoingAway)
        } else if self.next_stream > MAX_31 {
            Err(CannotOpen::IdsUsedUp)
        } else if self.open_streams() >= self.peer.concurrent_streams_max as usize {
            Err(CannotOpen::Full)
        } else {
            Ok(())
        }
    }

    /// Writes the header of a DATA frame for as many of `available` bytes as the windows and the peer's frame size
    /// allow, and charges the windows. The caller appends exactly [`SentData::length`] bytes. If `is_rest`, these are
    /// the last bytes of the body: the frame with the last of them ends the stream; it may be empty.
    #[inline]
    pub fn write_data(
        &mut self,
        id: StreamId,
        available: usize,
        is_rest: bool,
        out: &mut Vec<u8>,
    ) -> Result<SentData, SendFault> {
        let length_max = self.send.available().min(self.peer.frame_size_max as usize);
        let stream = self.sending_stream(id)?;
        if !stream.has_sent_head {
            return Err(SendFault::OutOfOrder);
        }
        let length = available.min(length_max).min(stream.send.available());
        let end_stream = is_rest && length == available;
        if length == 0 && !end_stream {
            return Ok(SentData::default());
        }
        stream.send.charge(length);
        self.send.charge(length);
        self.budgets.earn_by_data(length, available, &self.limits.floods);
        self.poll_control(out);
        let flags = if end_stream { flag::END_STREAM } else { 0 };
        let header = FrameHeader { length: length as u32, frame_type: frame_type::DATA, flags, stream: id };
        out.extend_from_slice(&header.to_bytes());
        if end_stream {
            self.end_local(id);
        }
        Ok(SentData { length, end_stream })
    }

    /// Writes trailers, which end the message; `write` writes the fields.
    pub fn write_trailers(
        &mut self,
        id: StreamId,
        out: &mut Vec<u8>,
        write: impl FnOnce(&mut FieldsWriter<'_>),
    ) -> Result<(), SendFault> {
        if !self.sending_stream(id)?.has_sent_head {
            return Err(SendFault::OutOfOrder);
        }
        let start = self.begin_block(out);
        write(&mut FieldsWriter { encoder: &mut self.encoder, out });
        self.finish_block(id, true, start, out);
        Ok(())
    }

    /// Number of bytes of data that can be sent on a stream at once; 0 if it is gone.
    pub fn send_window(&self, id: StreamId) -> usize {
        match self.streams.get(id) {
            Some(stream) if stream.state.may_send() => stream.send.available().min(self.send.available()),
            _ => 0,
        }
    }

    fn sending_stream(&mut self, id: StreamId) -> Result<&mut Stream, SendFault> {
        match self.streams.get_mut(id) {
            None => Err(SendFault::Gone),
            Some(stream) if !stream.state.may_send() => Err(SendFault::Ended),
            Some(stream) => Ok(stream),
        }
    }

    fn begin_block(&mut self, out: &mut Vec<u8>) -> usize {
        self.poll_control(out);
        let start = out.len();
        out.extend_from_slice(&[0; HEADER_LENGTH]);
        self.encoder.begin_block(out);
        start
    }

    fn finish_block(&mut self, id: StreamId, end_stream: bool, start: usize, out: &mut Vec<u8>) {
        frame::finish_headers(out, start, id, end_stream, self.peer.frame_size_max);
        self.budgets.earn_by_fields(&self.limits.floods);
        if end_stream {
            self.end_local(id);
        }
    }

    fn end_local(&mut self, id: StreamId) {
        let closed = self.streams.end_local(id);
        self.forget(closed);
    }
}

fn check_line(line: &RequestLine<'_>) -> Result<(), Unwritable> {
    if !is_token(line.method) {
        return Err(Unwritable::Method);
    }
    let is_wrong = |text: &[u8]| text.iter().any(|&byte| byte <= b' ' || byte == 0x7f);
    let is_plain_connect = line.method == b"CONNECT" && line.protocol.is_none();
    if is_wrong(line.path) || line.path.is_empty() && !is_plain_connect || is_wrong(line.scheme) {
        return Err(Unwritable::Target);
    }
    let is_wrong_protocol = line.protocol.is_some_and(|protocol| !is_token(protocol));
    if is_wrong(line.authority) || is_wrong_protocol { Err(Unwritable::Value) } else { Ok(()) }
}
