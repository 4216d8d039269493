//! An HTTP/2 upstream server, played by hand on the server's side of Gale's codec.

use std::collections::BTreeMap;
use std::net::{Shutdown, TcpStream};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use gale_protocol::Range32;
use gale_protocol::http2::settings::id;
use gale_protocol::http2::{Connection, ErrorCode, Event, FieldsWriter, Limits, StreamId};

use super::http2::{Wire, shown, write_fields};
use super::{Backend, DEADLINE};

/// A request as received.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    pub stream: StreamId,
    pub method: String,
    pub path: String,
    /// In order; the codec gives `:authority` as `host`.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub trailers: Vec<(String, String)>,
    pub is_complete: bool,
    pub reset: Option<ErrorCode>,
}

impl Asked {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(own, _)| own == name).map(|(_, value)| &**value)
    }
}

/// A server's connection.
pub struct Http2Server {
    wire: Wire<TcpStream>,
    /// Requests by stream.
    pub asked: BTreeMap<StreamId, Asked>,
    /// Requests that no test has taken yet.
    unseen: Vec<StreamId>,
    pub pongs: usize,
    pub goaways: Vec<(StreamId, ErrorCode)>,
}

impl Deref for Http2Server {
    type Target = Wire<TcpStream>;

    fn deref(&self) -> &Self::Target {
        &self.wire
    }
}

impl DerefMut for Http2Server {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.wire
    }
}

/// Usual limits of a server.
pub fn limits() -> Limits {
    Limits { stream_window: 1 << 20, connection_window: 16 << 20, ..Limits::default() }
}

impl Http2Server {
    /// Accepts the next connection to a backend.
    #[track_caller]
    pub fn accept(backend: &Backend) -> Http2Server {
        Http2Server::accept_with(backend, limits())
    }

    /// Accepts a connection with these limits.
    #[track_caller]
    pub fn accept_with(backend: &Backend, limits: Limits) -> Http2Server {
        let stream = backend.accept_tcp();
        stream.set_read_timeout(Some(DEADLINE)).expect("an option");
        stream.set_write_timeout(Some(DEADLINE)).expect("an option");
        stream.set_nodelay(true).expect("an option");
        let wire = Wire::new(stream, Connection::server(Arc::new(limits)));
        let (asked, unseen, goaways) = (BTreeMap::new(), Vec::new(), Vec::new());
        let mut server = Http2Server { wire, asked, unseen, pongs: 0, goaways };
        server.flush();
        server
    }

    /// Sends these bytes past the codec.
    pub fn raw(&mut self, bytes: impl AsRef<[u8]>) {
        // A closed connection is noticed when reading.
        let _ = self.try_raw(bytes);
    }

    /// Reads the head of the next request.
    #[track_caller]
    pub fn request(&mut self) -> Asked {
        self.read_until(|server| !server.unseen.is_empty());
        let stream = self.unseen.remove(0);
        self.asked[&stream].clone()
    }

    /// Reads the next request with its body.
    #[track_caller]
    pub fn whole_request(&mut self) -> Asked {
        let stream = self.request().stream;
        self.read_until(|server| server.asked[&stream].is_complete);
        self.asked[&stream].clone()
    }

    /// Begins a response.
    #[track_caller]
    pub fn respond(&mut self, stream: StreamId, status: u16, fields: &[(&str, &str)], is_whole: bool) {
        let mut out = Vec::new();
        let write = |writer: &mut FieldsWriter<'_>| write_fields(fields, writer);
        self.connection.write_response(stream, status, is_whole, &mut out, write).expect("an open stream");
        self.raw(out);
    }

    /// Sends a piece of a body; waits for the windows.
    #[track_caller]
    pub fn send(&mut self, stream: StreamId, mut piece: &[u8], is_last: bool) {
        while let Some(rest) = self.send_allowed(stream, piece, is_last) {
            piece = rest;
            assert!(self.read(), "closed before the body was sent");
        }
    }

    /// Sends one frame of a body if a window is open. Returns the number of bytes sent.
    #[track_caller]
    pub fn send_some(&mut self, stream: StreamId, piece: &[u8], is_last: bool) -> usize {
        let mut out = Vec::new();
        let sent = self.connection.write_data(stream, piece.len(), is_last, &mut out).expect("an open stream");
        out.extend_from_slice(&piece[..sent.length]);
        self.raw(out);
        sent.length
    }

    /// Sends a complete response.
    #[track_caller]
    pub fn answer(&mut self, stream: StreamId, text: &str) {
        self.respond(stream, 200, &[], false);
        self.send(stream, text.as_bytes(), true);
    }

    /// Sends a complete gRPC response.
    #[track_caller]
    pub fn answer_grpc(&mut self, stream: StreamId, message: &[u8]) {
        self.respond(stream, 200, &[("content-type", "application/grpc")], false);
        self.send(stream, message, false);
        self.trailers(stream, &[("grpc-status", "0"), ("grpc-message", "fine")]);
    }

    /// Sends a GOAWAY: no stream after this one was processed.
    pub fn goaway(&mut self, last_stream: StreamId, code: ErrorCode) {
        let mut out = Vec::new();
        gale_protocol::http2::frame::write_goaway(&mut out, last_stream, code, b"");
        self.raw(out);
    }

    /// Changes the client's window for streams.
    pub fn set_window(&mut self, size: u32) {
        let mut out = Vec::new();
        gale_protocol::http2::frame::write_settings(&mut out, &[(id::INITIAL_WINDOW_SIZE, size)]);
        self.raw(out);
    }

    /// Opens a window further than the codec knows.
    pub fn open_window(&mut self, stream: StreamId, by: u32) {
        let mut out = Vec::new();
        gale_protocol::http2::frame::write_window_update(&mut out, stream, by);
        self.raw(out);
    }

    /// Waits until the peer has processed everything sent so far.
    #[track_caller]
    pub fn sync(&mut self) {
        let before = self.pongs;
        self.connection.ping(*b"a barrier"[..8].first_chunk().expect("eight bytes"));
        self.flush();
        self.read_until(|server| server.pongs > before);
    }

    /// Reads until the condition is true.
    #[track_caller]
    pub fn read_until(&mut self, mut is_so: impl FnMut(&Http2Server) -> bool) {
        while !is_so(self) {
            assert!(self.read(), "the connection ended before: {:?}", self.asked);
        }
    }

    /// Reads to the end of the connection.
    #[track_caller]
    pub fn read_to_end(&mut self) {
        while self.read() {}
    }

    /// Ends the connection.
    pub fn close(self) {
        let _ = self.carrier().shutdown(Shutdown::Both);
    }

    /// Reads the next bytes; false at the end.
    #[track_caller]
    pub fn read(&mut self) -> bool {
        let Http2Server { wire, asked, unseen, pongs, goaways } = self;
        wire.read(|fields, event, input| match event {
            Event::Request { stream, end_stream } => {
                let head = &fields.request;
                let show = |range: Range32| String::from_utf8_lossy(range.of(&fields.text)).into_owned();
                let (method, path) = (show(head.method_range), show(head.target_range));
                let headers = shown(head.headers.iter().map(|field| (field.name, field.value)), &fields.text);
                let is_complete = *end_stream;
                let request = Asked { stream: *stream, method, path, headers, is_complete, ..Asked::default() };
                asked.insert(*stream, request);
                unseen.push(*stream);
            }
            Event::BadRequest { refusal, .. } => panic!("Gale sent a bad request: {refusal:?}"),
            Event::Data { stream, piece, end_stream } => {
                let asked = asked.get_mut(stream).expect("a request");
                asked.body.extend_from_slice(&input[piece.clone()]);
                asked.is_complete = *end_stream;
            }
            Event::Trailers { stream } => {
                let asked = asked.get_mut(stream).expect("a request");
                asked.trailers = shown(fields.trailers.iter().map(|field| (field.name, field.value)), &fields.text);
                asked.is_complete = true;
            }
            Event::Reset { stream, code } => asked.get_mut(stream).expect("a request").reset = Some(*code),
            Event::GoAway { last_stream, code, .. } => goaways.push((*last_stream, *code)),
            Event::Pong { .. } => *pongs += 1,
            Event::Fault { stream, fault } => panic!("Gale broke a rule on stream {stream}: {fault}"),
            _ => {}
        })
    }
}
