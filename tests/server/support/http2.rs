//! An HTTP/2 client on the client's side of Gale's codec; it can also send arbitrary frames.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::ops::{Deref, DerefMut};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use gale_protocol::Range32;
use gale_protocol::http2::frame::{self, FrameHeader};
use gale_protocol::http2::hpack::Indexing;
use gale_protocol::http2::{Connection, ErrorCode, Event, Fields, FieldsWriter, Limits, RequestLine, StreamId};

use super::{DEADLINE, Server};

/// A stream of bytes in both directions.
pub trait Carrier: Read + Write {}

impl<T: Read + Write> Carrier for T {}

/// Reads the next bytes; false at the end.
#[track_caller]
pub fn read_piece(carrier: &mut impl Read, buffer: &mut Vec<u8>) -> bool {
    let mut piece = [0; 16 * 1024];
    let count = match carrier.read(&mut piece) {
        Ok(count) => count,
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => panic!("nothing came in time"),
        Err(_) => 0,
    };
    buffer.extend_from_slice(&piece[..count]);
    count > 0
}

/// A socket from which a thread receives all the time.
struct Receiving {
    stream: UnixStream,
    pieces: Receiver<Vec<u8>>,
    /// Received bytes that were not read yet.
    rest: Vec<u8>,
}

impl Read for Receiving {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        if self.rest.is_empty() {
            self.rest = self.pieces.recv().unwrap_or_default();
        }
        let count = self.rest.len().min(into.len());
        into[..count].copy_from_slice(&self.rest[..count]);
        self.rest.drain(..count);
        Ok(count)
    }
}

impl Write for Receiving {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.stream.flush()
    }
}

/// Everything received on a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub trailers: Vec<(String, String)>,
    /// Statuses of interim responses, and their fields.
    pub interim: Vec<u16>,
    pub interim_fields: Vec<(String, String)>,
    pub is_complete: bool,
    pub reset: Option<ErrorCode>,
}

impl Answer {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("text")
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(own, _)| own == name).map(|(_, value)| &**value)
    }
}

/// A connection of either side: the codec above a carrier, with the operations that both sides share.
pub struct Wire<C> {
    carrier: C,
    pub connection: Connection,
    fields: Fields,
    buffer: Vec<u8>,
    /// Received data open the windows again.
    pub releases: bool,
    is_at_end: bool,
}

impl<C: Carrier> Wire<C> {
    pub fn new(carrier: C, connection: Connection) -> Wire<C> {
        Wire { carrier, connection, fields: Fields::new(), buffer: Vec::new(), releases: true, is_at_end: false }
    }

    pub fn carrier(&self) -> &C {
        &self.carrier
    }

    /// Sends these bytes past the codec.
    pub fn try_raw(&mut self, bytes: impl AsRef<[u8]>) -> std::io::Result<()> {
        self.carrier.write_all(bytes.as_ref())?;
        self.carrier.flush()
    }

    /// Sends the codec's pending output.
    pub fn flush(&mut self) {
        let mut out = Vec::new();
        self.connection.poll_control(&mut out);
        // A closed connection is noticed when reading.
        let _ = self.try_raw(out);
    }

    /// Sends as much of a body as the windows allow. Returns the rest, if there is one.
    #[track_caller]
    pub fn send_allowed<'p>(&mut self, stream: StreamId, mut piece: &'p [u8], is_last: bool) -> Option<&'p [u8]> {
        loop {
            let mut out = Vec::new();
            let sent = self.connection.write_data(stream, piece.len(), is_last, &mut out).expect("an open stream");
            if sent.is_blocked() && !piece.is_empty() {
                return Some(piece);
            }
            out.extend_from_slice(&piece[..sent.length]);
            // As in `flush`.
            let _ = self.try_raw(out);
            piece = &piece[sent.length..];
            if piece.is_empty() {
                return None;
            }
        }
    }

    #[track_caller]
    pub fn trailers(&mut self, stream: StreamId, fields: &[(&str, &str)]) {
        let mut out = Vec::new();
        let write = |writer: &mut FieldsWriter<'_>| write_fields(fields, writer);
        self.connection.write_trailers(stream, &mut out, write).expect("an open stream");
        // As in `flush`.
        let _ = self.try_raw(out);
    }

    /// Resets a stream.
    pub fn reset(&mut self, stream: StreamId, code: ErrorCode) {
        self.connection.reset(stream, code);
        self.flush();
    }

    /// Reads the next bytes and passes on their events, each with its input; false at the end.
    #[track_caller]
    pub fn read(&mut self, mut take: impl FnMut(&Fields, &Event, &[u8])) -> bool {
        if self.is_at_end {
            return false;
        }
        if !read_piece(&mut self.carrier, &mut self.buffer) {
            self.is_at_end = true;
            return false;
        }
        let buffer = std::mem::take(&mut self.buffer);
        let mut at = 0;
        loop {
            let handled = self.connection.handle_input(&buffer[at..], &mut self.fields);
            let handled = handled.unwrap_or_else(|fault| panic!("Gale broke a rule: {fault}"));
            let Some(event) = handled.event else {
                at += handled.consumed;
                break;
            };
            take(&self.fields, &event, &buffer[at..]);
            if let Event::Data { stream, piece, .. } = event
                && self.releases
            {
                self.connection.release(stream, piece.len());
            }
            at += handled.consumed;
        }
        self.buffer = buffer[at..].to_vec();
        self.flush();
        true
    }
}

/// A client's connection.
pub struct Http2 {
    wire: Wire<Box<dyn Carrier>>,
    pub answers: BTreeMap<StreamId, Answer>,
    /// Streams in the order in which pieces of bodies arrived.
    pub order: Vec<StreamId>,
    /// Every GOAWAY received.
    pub goaways: Vec<(StreamId, ErrorCode)>,
}

impl Deref for Http2 {
    type Target = Wire<Box<dyn Carrier>>;

    fn deref(&self) -> &Self::Target {
        &self.wire
    }
}

impl DerefMut for Http2 {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.wire
    }
}

impl Http2 {
    /// A connection above a stream of bytes.
    pub fn above(carrier: impl Carrier + 'static) -> Http2 {
        Http2::with(carrier, Limits { stream_window: 1 << 20, connection_window: 16 << 20, ..Limits::default() })
    }

    /// A connection that allows its server no more than these limits.
    pub fn with(carrier: impl Carrier + 'static, limits: Limits) -> Http2 {
        let carrier: Box<dyn Carrier> = Box::new(carrier);
        let wire = Wire::new(carrier, Connection::client(Arc::new(limits)));
        let mut client = Http2 { wire, answers: BTreeMap::new(), order: Vec::new(), goaways: Vec::new() };
        client.flush();
        client
    }

    /// A cleartext connection to `%UNIX%`.
    pub fn unix(server: &Server) -> Http2 {
        Http2::above(connect(&server.directory.path().join("gale.sock")))
    }

    /// A connection that also receives while it sends, so that the server can always send.
    pub fn unix_receiving(server: &Server) -> Http2 {
        let stream = connect(&server.directory.path().join("gale.sock"));
        let (mut reader, (sender, pieces)) = (stream.try_clone().expect("a descriptor"), channel());
        std::thread::spawn(move || {
            let mut piece = Vec::new();
            while read_piece(&mut reader, &mut piece) && sender.send(std::mem::take(&mut piece)).is_ok() {}
        });
        Http2::above(Receiving { stream, pieces, rest: Vec::new() })
    }

    pub fn unix_with(server: &Server, limits: Limits) -> Http2 {
        Http2::with(connect(&server.directory.path().join("gale.sock")), limits)
    }

    /// Sends these bytes past the codec.
    #[track_caller]
    pub fn raw(&mut self, bytes: impl AsRef<[u8]>) {
        self.try_raw(bytes).expect("sending");
    }

    /// Begins a request.
    #[track_caller]
    pub fn begin(&mut self, method: &str, path: &str, fields: &[(&str, &str)], is_whole: bool) -> StreamId {
        self.begin_at("localhost", method, path, fields, is_whole)
    }

    #[track_caller]
    pub fn begin_at(
        &mut self,
        authority: &str,
        method: &str,
        path: &str,
        fields: &[(&str, &str)],
        is_whole: bool,
    ) -> StreamId {
        let line = RequestLine {
            method: method.as_bytes(),
            scheme: b"http",
            authority: authority.as_bytes(),
            path: path.as_bytes(),
            protocol: None,
        };
        self.begin_line(line, fields, is_whole)
    }

    /// Requests a tunnel for a protocol (RFC 8441).
    #[track_caller]
    pub fn connect(&mut self, protocol: &str, path: &str, fields: &[(&str, &str)]) -> StreamId {
        let protocol = Some(protocol.as_bytes());
        let path = path.as_bytes();
        let line = RequestLine { method: b"CONNECT", scheme: b"http", authority: b"localhost", path, protocol };
        self.begin_line(line, fields, false)
    }

    #[track_caller]
    fn begin_line(&mut self, line: RequestLine<'_>, fields: &[(&str, &str)], is_whole: bool) -> StreamId {
        let mut out = Vec::new();
        let stream = self
            .connection
            .write_request(line, is_whole, &mut out, |writer| write_fields(fields, writer))
            .expect("a stream");
        self.raw(out);
        stream
    }

    /// Sends a piece of a body; waits for the windows.
    #[track_caller]
    pub fn send(&mut self, stream: StreamId, mut piece: &[u8], is_last: bool) {
        while let Some(rest) = self.send_allowed(stream, piece, is_last) {
            piece = rest;
            assert!(self.read(), "closed before the body was sent");
        }
    }

    #[track_caller]
    pub fn get(&mut self, path: &str) -> Answer {
        let stream = self.begin("GET", path, &[], true);
        self.answer(stream)
    }

    #[track_caller]
    pub fn post(&mut self, path: &str, fields: &[(&str, &str)], body: &[u8]) -> Answer {
        let stream = self.begin("POST", path, fields, false);
        self.send(stream, body, true);
        self.answer(stream)
    }

    /// Reads until the stream has its answer or was reset.
    #[track_caller]
    pub fn answer(&mut self, stream: StreamId) -> Answer {
        self.read_until(|client| {
            client.answers.get(&stream).is_some_and(|answer| answer.is_complete || answer.reset.is_some())
        });
        self.answers.remove(&stream).expect("it is there")
    }

    /// Reads until the condition is true.
    #[track_caller]
    pub fn read_until(&mut self, mut is_so: impl FnMut(&Http2) -> bool) {
        while !is_so(self) {
            assert!(self.read(), "the connection ended before: {:?} {:?}", self.answers, self.goaways);
        }
    }

    /// Reads to the end of the connection.
    #[track_caller]
    pub fn read_to_end(&mut self) {
        while self.read() {}
    }

    /// Reads the answer to a request on stream 1 that was sent past the codec: its status, if any, and the error code
    /// with which the stream or the connection ended.
    #[track_caller]
    pub fn raw_answer(&mut self) -> (Option<u16>, Option<ErrorCode>) {
        let mut status = None;
        while let Some((frame_type, flags, stream, payload)) = self.raw_frame() {
            match frame_type {
                frame_type::HEADERS if stream == 1 => {
                    let mut decoder = gale_protocol::http2::hpack::Decoder::new(4096);
                    let mut text = Vec::new();
                    decoder.begin_block();
                    let field = decoder.next_field(&payload, &mut 0, &mut text).expect("a block").expect("a field");
                    status = std::str::from_utf8(field.value.of(&text)).expect("a status").parse().ok();
                    if flags & flag::END_STREAM != 0 {
                        return (status, None);
                    }
                }
                frame_type::DATA if flags & flag::END_STREAM != 0 => return (status, None),
                frame_type::RST_STREAM => return (status, Some(code(&payload))),
                frame_type::GOAWAY => return (status, Some(code(&payload[4..]))),
                _ => {}
            }
        }
        (status, None)
    }

    /// Reads to the end of the connection past the codec; returns the error code of the last GOAWAY.
    #[track_caller]
    pub fn raw_goaway(&mut self) -> Option<ErrorCode> {
        let mut found = None;
        while let Some((frame_type, _, _, payload)) = self.raw_frame() {
            if frame_type == frame_type::GOAWAY {
                found = Some(code(&payload[4..]));
            }
        }
        found
    }

    /// Reads the next frame past the codec: type, flags, stream and payload.
    #[track_caller]
    fn raw_frame(&mut self) -> Option<(u8, u8, StreamId, Vec<u8>)> {
        loop {
            if let Some(header) = FrameHeader::parse(&self.wire.buffer)
                && self.wire.buffer.len() >= frame::HEADER_LENGTH + header.length as usize
            {
                let rest = self.wire.buffer.split_off(frame::HEADER_LENGTH + header.length as usize);
                let payload = std::mem::replace(&mut self.wire.buffer, rest).split_off(frame::HEADER_LENGTH);
                return Some((header.frame_type, header.flags, header.stream, payload));
            }
            if !read_piece(&mut self.wire.carrier, &mut self.wire.buffer) {
                return None;
            }
        }
    }

    /// Reads the next bytes; false at the end.
    #[track_caller]
    pub fn read(&mut self) -> bool {
        let Http2 { wire, answers, order, goaways } = self;
        wire.read(|fields, event, input| match event {
            Event::Response { stream, end_stream } => {
                let parts = &fields.response;
                let headers = shown(parts.fields.iter().map(|field| (field.name, field.value)), &fields.text);
                let answer = answers.entry(*stream).or_default();
                if parts.is_interim() {
                    answer.interim.push(parts.status);
                    answer.interim_fields.extend(headers);
                    return;
                }
                answer.status = parts.status;
                answer.headers = headers;
                answer.is_complete = *end_stream;
            }
            Event::Data { stream, piece, end_stream } => {
                let answer = answers.entry(*stream).or_default();
                answer.body.extend_from_slice(&input[piece.clone()]);
                answer.is_complete = *end_stream;
                order.push(*stream);
            }
            Event::Trailers { stream } => {
                let answer = answers.entry(*stream).or_default();
                answer.trailers = shown(fields.trailers.iter().map(|field| (field.name, field.value)), &fields.text);
                answer.is_complete = true;
            }
            Event::Reset { stream, code } => answers.entry(*stream).or_default().reset = Some(*code),
            Event::GoAway { last_stream, code, .. } => goaways.push((*last_stream, *code)),
            _ => {}
        })
    }
}

fn connect(path: &Path) -> UnixStream {
    let stream = UnixStream::connect(path).expect("it listens");
    stream.set_read_timeout(Some(DEADLINE)).expect("an option");
    stream.set_write_timeout(Some(DEADLINE)).expect("an option");
    stream
}

/// Names and values of decoded fields.
pub fn shown(fields: impl Iterator<Item = (Range32, Range32)>, text: &[u8]) -> Vec<(String, String)> {
    let show = |range: Range32| String::from_utf8_lossy(range.of(text)).into_owned();
    fields.map(|(name, value)| (show(name), show(value))).collect()
}

pub fn write_fields(fields: &[(&str, &str)], writer: &mut FieldsWriter<'_>) {
    for (name, value) in fields {
        writer.field(name.as_bytes(), value.as_bytes(), Indexing::Not).expect("a field");
    }
}

/// Error code at the beginning of a payload.
fn code(payload: &[u8]) -> ErrorCode {
    ErrorCode(u32::from_be_bytes(*payload.first_chunk().expect("a code")))
}

/// Encodes a frame of any type.
pub fn frame(frame_type: u8, flags: u8, stream: StreamId, payload: impl AsRef<[u8]>) -> Vec<u8> {
    let payload = payload.as_ref();
    let header = FrameHeader { length: payload.len() as u32, frame_type, flags, stream };
    [&header.to_bytes()[..], payload].concat()
}

/// Encodes a field block that leaves the dynamic table unchanged; names and values are literals.
pub fn block(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, value) in fields {
        assert!(name.len() < 127 && value.len() < 127);
        out.extend([&[0, name.len() as u8], name.as_bytes(), &[value.len() as u8], value.as_bytes()].concat());
    }
    out
}

pub use frame::{flag, frame_type};

/// Pseudo-header fields of a GET request.
pub const GET: [(&str, &str); 4] =
    [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "localhost")];
