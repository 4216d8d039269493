//! What a connection sends: heads, data, trailers.
//!
//! Windows are charged when a frame is built, never before: whoever waits for a disk or a peer holds none. Invariant:
//! frames reach the wire in the order in which they are written, since blocks of fields build on each other.

use std::fmt;

use super::connection::{Connection, Side};
use super::frame::{self, FrameHeader, HEADER_LENGTH, MAX_31, StreamId, flag, frame_type};
use super::hpack::{Encoder, Indexing};
use super::stream::Stream;
use crate::http1::request_writer::{Unwritable, ends_line, is_token};
use crate::http1::response::write_decimal;
use crate::response::ResponseField;

/// Why nothing could be sent on a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SendFault {
    /// The stream is gone: reset by either side, or closed.
    Gone,
    /// Our side of it has ended.
    Ended,
    /// A head where there was one, or data and trailers before it.
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

/// Why a client cannot begin a request on a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CannotOpen {
    /// As many streams are open as the server allows.
    Full,
    /// The server has sent GOAWAY.
    GoingAway,
    /// All ids were used.
    IdsUsedUp,
    /// A part of the request would be read as something else.
    Unwritable(Unwritable),
}

/// How much of a body went into a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SentData {
    /// That many bytes must follow the frame's header.
    pub length: usize,
    /// The message is complete.
    pub end_stream: bool,
}

impl SentData {
    /// No frame was written: a window is closed. [`super::Event::WindowOpened`] says when to try again.
    pub fn is_blocked(self) -> bool {
        self == Self::default()
    }
}

/// What a client asks for: the pseudo-headers of a request (RFC 9113 §8.3.1).
#[derive(Clone, Copy, Debug)]
pub struct RequestLine<'t> {
    /// The method.
    pub method: &'t [u8],
    /// `http` or `https`; not sent with a plain CONNECT.
    pub scheme: &'t [u8],
    /// Host and perhaps port; not sent if empty.
    pub authority: &'t [u8],
    /// Path and query, or `*`; not sent with a plain CONNECT.
    pub path: &'t [u8],
    /// What an extended CONNECT asks for: RFC 8441.
    pub protocol: Option<&'t [u8]>,
}

impl RequestLine<'_> {
    /// Whether it can be written: [`Connection::write_request`] asks, too.
    pub fn check(&self) -> Result<(), Unwritable> {
        check_line(self)
    }
}

/// Whether a field can be written: [`FieldsWriter::field`] asks, too.
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
    /// Appends a field of a response. Fields of the connection are refused: RFC 9113 §8.2.2.
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

    /// Appends a field of a response that is a number.
    pub fn known_number(&mut self, field: ResponseField, number: u64) -> Result<(), Unwritable> {
        let mut digits = Vec::with_capacity(20);
        write_decimal(&mut digits, number);
        self.known(field, &digits)
    }

    /// Appends any field; capitals in its name are written small. Fields of the connection are refused: RFC 9113
    /// §8.2.2.
    pub fn field(&mut self, name: &[u8], value: &[u8], indexing: Indexing) -> Result<(), Unwritable> {
        if !is_token(name) || is_of_connection(name) {
            return Err(Unwritable::Name);
        }
        self.encoder.encode(name, checked_value(value)?, indexing, self.out);
        Ok(())
    }
}

/// Without spaces and tabs at its ends, which HTTP/2 does not allow: RFC 9113 §8.2.1.
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

/// The frames that go out on streams. Everything is appended to `out`, behind the frames of control that wait.
impl Connection {
    /// Writes the head of a response, which with a status of 1xx is an interim one. `write` writes its fields.
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

    /// Begins a request, on a stream of its own.
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

    /// Whether a request can begin now.
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

    /// Writes the header of a DATA frame that takes as much of `available` bytes as the windows and the peer's frames
    /// allow, and charges the windows; the caller appends exactly [`SentData::length`] bytes. If `is_rest`, nothing
    /// follows those bytes: the frame that takes the last of them ends the stream, and an empty one may.
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

    /// How many bytes of data could be sent on a stream at once; 0 if it is gone.
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
