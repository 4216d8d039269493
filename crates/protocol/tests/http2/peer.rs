//! A peer that sends arbitrary frames, and a connection that records the resulting events.

use std::sync::Arc;

use gale_protocol::http2::frame::{self, FrameHeader, PREFACE};
use gale_protocol::http2::hpack::{Encoder, Indexing};
use gale_protocol::http2::{Connection, ConnectionFault, Event, Fields, Limits, StreamId};
use gale_protocol::request::HeaderField;

/// Frames in the order in which they are sent.
#[derive(Clone, Default, Debug)]
pub struct Frames(pub Vec<u8>);

impl Frames {
    /// The first frames of a client: preface and SETTINGS.
    pub fn client() -> Self {
        Self(PREFACE.to_vec()).settings(&[])
    }

    /// The first frame of a server.
    pub fn server() -> Self {
        Self::default().settings(&[])
    }

    pub fn settings(mut self, settings: &[(u16, u32)]) -> Self {
        frame::write_settings(&mut self.0, settings);
        self
    }

    pub fn frame(mut self, frame_type: u8, flags: u8, stream: StreamId, payload: impl AsRef<[u8]>) -> Self {
        let payload = payload.as_ref();
        let header = FrameHeader { length: payload.len() as u32, frame_type, flags, stream };
        self.0.extend_from_slice(&header.to_bytes());
        self.0.extend_from_slice(payload);
        self
    }

    pub fn headers(self, stream: StreamId, flags: u8, fields: &[(&str, &str)]) -> Self {
        self.frame(frame::frame_type::HEADERS, flags, stream, block(fields))
    }

    /// A complete GET request.
    pub fn get(self, stream: StreamId) -> Self {
        self.headers(stream, END_STREAM | END_HEADERS, GET)
    }

    /// The head of a POST request; the body follows.
    pub fn post(self, stream: StreamId) -> Self {
        self.headers(stream, END_HEADERS, POST)
    }

    pub fn data(self, stream: StreamId, flags: u8, data: impl AsRef<[u8]>) -> Self {
        self.frame(frame::frame_type::DATA, flags, stream, data)
    }

    pub fn repeat(mut self, count: usize, add: impl Fn(Self, usize) -> Self) -> Self {
        for number in 0..count {
            self = add(self, number);
        }
        self
    }
}

pub use frame::flag::{ACK, END_HEADERS, END_STREAM, PADDED};

pub const GET: &[(&str, &str)] = &[(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "a")];
pub const POST: &[(&str, &str)] = &[(":method", "POST"), (":scheme", "http"), (":path", "/p"), (":authority", "a")];

/// A header block without entries for the dynamic table.
pub fn block(fields: &[(&str, &str)]) -> Vec<u8> {
    let (mut encoder, mut out) = (Encoder::default(), Vec::new());
    for (name, value) in fields {
        // Written by hand, because the encoder would convert the name to lower case.
        if name.bytes().any(|byte| byte.is_ascii_uppercase()) {
            out.extend([&[0, name.len() as u8], name.as_bytes(), &[value.len() as u8], value.as_bytes()].concat());
        } else {
            encoder.encode(name.as_bytes(), value.as_bytes(), Indexing::Not, &mut out);
        }
    }
    out
}

/// An event with its own copy of the data.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Seen {
    /// Request line, fields, and `true` if there is no body.
    Request(StreamId, String, bool),
    /// Status, fields, and `true` if there is no body.
    Response(StreamId, String, bool),
    /// Consecutive DATA frames, joined.
    Data(StreamId, Vec<u8>, bool),
    Trailers(StreamId, String),
    Other(Event),
}

/// A connection that records its events.
pub struct Reader {
    pub connection: Connection,
    pub fields: Fields,
    pub seen: Vec<Seen>,
    buffer: Vec<u8>,
    /// Release data as soon as they arrive.
    pub releases: bool,
}

impl Reader {
    pub fn server() -> Self {
        Self::of(Connection::server(Arc::new(Limits::default())))
    }

    pub fn of(connection: Connection) -> Self {
        Self { connection, fields: Fields::new(), seen: Vec::new(), buffer: Vec::new(), releases: true }
    }

    pub fn read(&mut self, input: &[u8]) -> Result<(), ConnectionFault> {
        self.buffer.extend_from_slice(input);
        let mut at = 0;
        loop {
            let handled = self.connection.handle_input(&self.buffer[at..], &mut self.fields)?;
            let shown = &self.buffer[at..at + handled.consumed];
            let Some(event) = handled.event else {
                at += handled.consumed;
                break;
            };
            if let Event::Data { stream, piece, .. } = &event
                && self.releases
            {
                self.connection.release(*stream, piece.len());
            }
            note(&mut self.seen, event, shown, &self.fields);
            at += handled.consumed;
        }
        self.buffer.drain(..at);
        assert!(self.buffer.len() < self.connection.input_max());
        Ok(())
    }

    /// Output since the last call.
    pub fn sent(&mut self) -> Vec<u8> {
        let mut out = Vec::new();
        self.connection.poll_control(&mut out);
        out
    }
}

fn lines(fields: &[HeaderField], text: &[u8]) -> String {
    let line = |field: &HeaderField| format!("{}: {}\n", show(field.name.of(text)), show(field.value.of(text)));
    fields.iter().map(line).collect()
}

fn show(text: &[u8]) -> String {
    String::from_utf8_lossy(text).into_owned()
}

fn note(seen: &mut Vec<Seen>, event: Event, input: &[u8], fields: &Fields) {
    let text = &fields.text;
    let event = match event {
        Event::Request { stream, end_stream } => {
            let head = &fields.request;
            let head = format!("{}\n{}", show(head.line.of(text)), lines(&head.headers, text));
            Seen::Request(stream, head, end_stream)
        }
        Event::Response { stream, end_stream } => {
            let parts = &fields.response;
            let line = |field: &gale_protocol::http1::ReceivedField| {
                format!("{}: {}\n", show(field.name.of(text)), show(field.value.of(text)))
            };
            let head = format!("{}\n{}", parts.status, parts.fields.iter().map(line).collect::<String>());
            Seen::Response(stream, head, end_stream)
        }
        Event::Data { stream, piece, end_stream } => {
            let piece = &input[piece];
            assert!(!piece.is_empty() || end_stream);
            match seen.last_mut() {
                Some(Seen::Data(last, data, end)) if *last == stream && !*end => {
                    data.extend_from_slice(piece);
                    *end = end_stream;
                    return;
                }
                _ => Seen::Data(stream, piece.to_vec(), end_stream),
            }
        }
        Event::Trailers { stream } => Seen::Trailers(stream, lines(&fields.trailers, text)),
        // The range depends on how the input was split, so only its length is kept.
        Event::GoAway { last_stream, code, debug } => {
            Seen::Other(Event::GoAway { last_stream, code, debug: 0..debug.len() })
        }
        event => Seen::Other(event),
    };
    seen.push(event);
}
