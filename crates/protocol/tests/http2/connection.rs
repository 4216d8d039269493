//! A client and a server of this crate connected to each other.

use std::sync::Arc;

use gale_protocol::http2::frame::frame_type::*;
use gale_protocol::http2::frame::{FrameHeader, HEADER_LENGTH};
use gale_protocol::http2::hpack::Indexing;
use gale_protocol::http2::{
    CannotOpen, Connection, ErrorCode, Event, Fields, Limits, Priority, RequestLine, SendFault, SentData, StreamId,
};
use gale_protocol::request::{Framing, KnownHeader, Method, Version};
use gale_protocol::response::ResponseField;
use gale_protocol::uri::Form;
use proptest::prelude::*;

use crate::peer::*;

const LINE: RequestLine<'_> =
    RequestLine { method: b"GET", scheme: b"https", authority: b"example.com", path: b"/a?b", protocol: None };

struct Pair {
    client: Reader,
    server: Reader,
    /// Output of the client other than control frames; `from_server` is that of the server.
    from_client: Vec<u8>,
    from_server: Vec<u8>,
}

impl Pair {
    fn new() -> Self {
        Self::with(Limits::default(), Limits::default())
    }

    fn with(client: Limits, server: Limits) -> Self {
        let mut pair = Self {
            client: Reader::of(Connection::client(Arc::new(client))),
            server: Reader::of(Connection::server(Arc::new(server))),
            from_client: Vec::new(),
            from_server: Vec::new(),
        };
        pair.exchange();
        pair.client.seen.clear();
        pair.server.seen.clear();
        pair
    }

    /// Transfers bytes until neither side has more to send.
    fn exchange(&mut self) {
        loop {
            self.client.connection.poll_control(&mut self.from_client);
            self.server.connection.poll_control(&mut self.from_server);
            if self.from_client.is_empty() && self.from_server.is_empty() {
                return;
            }
            self.server.read(&std::mem::take(&mut self.from_client)).unwrap();
            self.client.read(&std::mem::take(&mut self.from_server)).unwrap();
        }
    }

    fn request(&mut self, line: RequestLine<'_>, end_stream: bool) -> StreamId {
        self.client.connection.write_request(line, end_stream, &mut self.from_client, |_| {}).unwrap()
    }

    fn respond(&mut self, stream: StreamId, end_stream: bool) {
        self.server.connection.write_response(stream, 200, end_stream, &mut self.from_server, |_| {}).unwrap();
    }

    /// Sends as much data from the server as the windows allow.
    fn send(&mut self, stream: StreamId, data: &[u8], is_rest: bool) -> SentData {
        let sent = self.server.connection.write_data(stream, data.len(), is_rest, &mut self.from_server).unwrap();
        self.from_server.extend_from_slice(&data[..sent.length]);
        sent
    }
}

#[test]
fn a_request_and_its_response_with_bodies_and_trailers() {
    let mut pair = Pair::new();
    let stream = pair
        .client
        .connection
        .write_request(RequestLine { method: b"POST", ..LINE }, false, &mut pair.from_client, |fields| {
            fields.field(b"Accept", b" */*\t", Indexing::IfRepeated).unwrap();
            fields.field(b"te", b"trailers", Indexing::Always).unwrap();
        })
        .unwrap();
    let client = &mut pair.client.connection;
    assert_eq!(
        client.write_data(stream, 4, false, &mut pair.from_client),
        Ok(SentData { length: 4, end_stream: false })
    );
    pair.from_client.extend_from_slice(b"body");
    client
        .write_trailers(stream, &mut pair.from_client, |fields| {
            fields.field(b"x-sum", b"1", Indexing::Not).unwrap();
        })
        .unwrap();
    pair.exchange();
    let head = "POST /a?b HTTP/2.0\naccept: */*\nte: trailers\nhost: example.com\n".to_string();
    assert_eq!(
        std::mem::take(&mut pair.server.seen),
        [Seen::Request(1, head, false), Seen::Data(1, b"body".to_vec(), false), Seen::Trailers(1, "x-sum: 1\n".into())]
    );
    let (server, out) = (&mut pair.server.connection, &mut pair.from_server);
    server
        .write_response(stream, 103, false, out, |fields| fields.known(ResponseField::Link, b"</a>").unwrap())
        .unwrap();
    server
        .write_response(stream, 200, false, out, |fields| {
            fields.known(ResponseField::ContentType, b"text/plain").unwrap();
            fields.known_number(ResponseField::ContentLength, 5).unwrap();
        })
        .unwrap();
    assert_eq!(pair.send(stream, b"hello", false).length, 5);
    let (server, out) = (&mut pair.server.connection, &mut pair.from_server);
    server
        .write_trailers(stream, out, |fields| fields.field(b"Grpc-Status", b"0", Indexing::IfRepeated).unwrap())
        .unwrap();
    assert_eq!(server.open_streams(), 0);
    pair.exchange();
    assert_eq!(
        pair.client.seen,
        [
            Seen::Response(1, "103\nlink: </a>\n".into(), false),
            Seen::Response(1, "200\ncontent-type: text/plain\ncontent-length: 5\n".into(), false),
            Seen::Data(1, b"hello".to_vec(), false),
            Seen::Trailers(1, "grpc-status: 0\n".into()),
        ]
    );
    assert_eq!(pair.client.connection.open_streams(), 0);
    assert!(pair.client.connection.handle_end() && pair.server.connection.handle_end());
}

/// The head that a server builds from these fields.
fn head_of(fields: &[(&str, &str)], end_stream: bool, limits: Limits) -> Fields {
    let mut reader = Reader::of(Connection::server(Arc::new(limits)));
    let flags = END_HEADERS | if end_stream { END_STREAM } else { 0 };
    reader.read(&Frames::client().headers(1, flags, fields).0).unwrap();
    assert!(matches!(reader.seen[..], [_, Seen::Request(1, ..)]) || reader.seen.len() == 2, "{:?}", reader.seen);
    reader.fields
}

#[test]
fn a_head_is_like_one_of_http_1() {
    let more = [
        ("cookie", "a=1"),
        ("user-agent", "x"),
        ("cookie", "b=2"),
        ("x_y", "z"),
        ("cookie", "c=3"),
        ("content-length", "7"),
    ];
    let fields = head_of(&[POST, &more].concat(), false, Limits::default());
    let (head, text) = (&fields.request, &fields.text[..]);
    assert_eq!((head.method, head.version, head.framing), (Method::Post, Version::Http2, Framing::Length(7)));
    assert_eq!(head.line.of(text), b"POST /p HTTP/2.0");
    assert_eq!((head.method_name(text), head.version_text(text)), (&b"POST"[..], &b"HTTP/2.0"[..]));
    assert_eq!((head.target.form, head.target.raw_path(text), head.target.plain), (Form::Origin, &b"/p"[..], true));
    assert_eq!(head.authority.unwrap().name.of(text), b"a");
    assert_eq!(head.value(text, KnownHeader::Host), Some(&b"a"[..]));
    assert_eq!(head.values(text, KnownHeader::Cookie).collect::<Vec<_>>(), [b"a=1; b=2; c=3"]);
    assert_eq!((head.headers.len(), head.ignored_count), (4, 1));
    assert_eq!(head.ignored_first.unwrap().of(text), b"x_y: z");
    for field in &head.headers {
        assert!(text[field.name.start()..field.value.end()].starts_with(field.name.of(text)));
    }
    let mut lenient = Limits::default();
    lenient.head.underscores_in_headers = true;
    let fields = head_of(&[GET, &[("x_y", "z")]].concat(), true, lenient);
    assert_eq!(fields.request.value_by_name(&fields.text, b"X_Y"), Some(&b"z"[..]));
    assert_eq!(fields.request.framing, Framing::None);
    assert_eq!(head_of(GET, false, Limits::default()).request.framing, Framing::Chunked);
}

#[test]
fn connect_and_extended_connect() {
    let fields = head_of(&[(":method", "CONNECT"), (":authority", "a:443")], false, Limits::default());
    let (head, text) = (&fields.request, &fields.text[..]);
    assert_eq!((head.method, head.target.form), (Method::Connect, Form::Authority));
    assert_eq!((head.line.of(text), head.authority.unwrap().port), (&b"CONNECT a:443 HTTP/2.0"[..], Some(443)));
    assert_eq!((head.connect_protocol, head.framing), (None, Framing::Chunked));
    let mut pair = Pair::with(Limits::default(), Limits { extended_connect: true, ..Limits::default() });
    assert!(pair.client.connection.peer_settings().extended_connect);
    pair.request(RequestLine { method: b"CONNECT", protocol: Some(b"websocket"), ..LINE }, false);
    pair.exchange();
    let (head, text) = (&pair.server.fields.request, &pair.server.fields.text[..]);
    assert_eq!((head.method, head.target.form), (Method::Connect, Form::Origin));
    assert_eq!(head.connect_protocol.unwrap().of(text), b"websocket");
    assert_eq!(head.line.of(text), b"CONNECT /a?b HTTP/2.0");
}

#[test]
fn data_stop_at_a_closed_window_and_go_on_when_it_opens() {
    let mut pair = Pair::with(Limits { stream_window: 20_000, ..Limits::default() }, Limits::default());
    pair.client.releases = false;
    let stream = pair.request(LINE, true);
    pair.exchange();
    pair.respond(stream, false);
    let data = [b'x'; 30_000];
    assert_eq!(pair.send(stream, &data, true), SentData { length: 16_384, end_stream: false });
    assert_eq!(pair.send(stream, &data[16_384..], true), SentData { length: 3616, end_stream: false });
    assert!(pair.send(stream, &data[20_000..], true).is_blocked());
    assert_eq!(pair.server.connection.send_window(stream), 0);
    pair.exchange();
    pair.server.seen.clear();
    pair.client.connection.release(stream, 9_999);
    pair.exchange();
    assert!(pair.server.seen.is_empty(), "updates come by halves");
    pair.client.connection.release(stream, 1);
    pair.exchange();
    assert_eq!(pair.server.seen, [Seen::Other(Event::WindowOpened { stream: Some(stream) })]);
    assert_eq!(pair.send(stream, &data[20_000..], true), SentData { length: 10_000, end_stream: true });
    pair.exchange();
    assert_eq!(pair.client.seen.last(), Some(&Seen::Data(stream, data.to_vec(), true)));
    assert_eq!(pair.server.connection.write_data(stream, 0, true, &mut Vec::new()), Err(SendFault::Gone));
}

#[test]
fn the_end_needs_no_window() {
    let mut pair = Pair::with(Limits { stream_window: 0, ..Limits::default() }, Limits::default());
    let stream = pair.request(LINE, true);
    pair.exchange();
    pair.respond(stream, false);
    assert!(pair.send(stream, b"x", true).is_blocked());
    assert_eq!(pair.send(stream, b"", true), SentData { length: 0, end_stream: true });
    pair.exchange();
    assert_eq!(pair.client.seen.last(), Some(&Seen::Data(stream, vec![], true)));
}

#[test]
fn settings_change_the_windows_of_open_streams_6_9_2() {
    let mut reader = Reader::server();
    reader.read(&Frames::client().settings(&[(4, 10)]).get(1).0).unwrap();
    let mut out = Vec::new();
    reader.connection.write_response(1, 200, false, &mut out, |_| {}).unwrap();
    let mut write = |reader: &mut Reader| reader.connection.write_data(1, 100, false, &mut out).unwrap().length;
    assert_eq!(write(&mut reader), 10);
    reader.read(&Frames::default().settings(&[(4, 4)]).0).unwrap();
    assert_eq!(write(&mut reader), 0, "the window is −6");
    reader.read(&Frames::default().frame(WINDOW_UPDATE, 0, 1, [0, 0, 0, 6]).0).unwrap();
    assert_eq!(write(&mut reader), 0);
    reader.read(&Frames::default().frame(WINDOW_UPDATE, 0, 1, [0, 0, 0, 1]).0).unwrap();
    assert_eq!(write(&mut reader), 1);
    reader.read(&Frames::default().settings(&[(4, 1), (4, 9)]).0).unwrap();
    assert_eq!(write(&mut reader), 5, "the last value counts");
}

#[test]
fn the_connection_window_bounds_all_streams() {
    let mut reader = Reader::server();
    reader.read(&Frames::client().settings(&[(4, 0x7fff_ffff)]).get(1).get(3).0).unwrap();
    let mut out = Vec::new();
    for stream in [1, 3] {
        reader.connection.write_response(stream, 200, false, &mut out, |_| {}).unwrap();
    }
    let sent: usize = (0..9)
        .map(|turn| reader.connection.write_data(1 + turn % 2 * 2, 20_000, false, &mut out).unwrap().length)
        .sum();
    assert_eq!(sent, 65_535);
    reader.seen.clear();
    reader.read(&Frames::default().frame(WINDOW_UPDATE, 0, 0, [0, 0, 1, 0]).0).unwrap();
    assert_eq!(reader.seen, [Seen::Other(Event::WindowOpened { stream: None })]);
    assert_eq!(reader.connection.write_data(3, 20_000, false, &mut out).unwrap().length, 256);
}

#[test]
fn window_held_by_a_reset_stream_is_given_back() {
    let limits = Limits { connection_window: 65_535, ..Limits::default() };
    let mut reader = Reader::of(Connection::server(Arc::new(limits)));
    reader.releases = false;
    reader.read(&Frames::client().0).unwrap();
    reader.sent();
    for number in 0..20 {
        let stream = 1 + 2 * number;
        reader
            .read(&Frames::default().post(stream).data(stream, 0, [0; 16_000]).data(stream, 0, [0; 16_000]).0)
            .unwrap();
        match number % 3 {
            0 => reader.connection.reset(stream, ErrorCode::CANCEL),
            1 => reader.read(&Frames::default().frame(RST_STREAM, 0, stream, [0; 4]).0).unwrap(),
            _ => {
                reader.read(&Frames::default().data(stream, END_STREAM, "").0).unwrap();
                reader.connection.write_response(stream, 200, true, &mut Vec::new(), |_| {}).unwrap();
            }
        }
        reader.connection.release(stream, 16_000);
    }
    assert_eq!(reader.connection.open_streams(), 0);
}

#[test]
fn data_of_a_stream_that_we_reset_are_ignored() {
    let mut reader = Reader::server();
    reader.read(&Frames::client().post(1).0).unwrap();
    let frame = Frames::default().data(1, 0, "0123456789").0;
    reader.read(&frame[..HEADER_LENGTH + 4]).unwrap();
    reader.connection.reset(1, ErrorCode::NO_ERROR);
    let seen = reader.seen.len();
    reader.read(&frame[HEADER_LENGTH + 4..]).unwrap();
    reader.read(&Frames::default().data(1, 0, "x").headers(1, 5, &[("x", "y")]).data(1, 1, "").0).unwrap();
    assert_eq!(reader.seen.len(), seen);
    assert_eq!(reader.connection.write_response(1, 200, true, &mut Vec::new(), |_| {}), Err(SendFault::Gone));
}

#[test]
fn data_behind_the_answer_are_thrown_away_until_the_window_is_used_up() {
    let mut reader = Reader::server();
    reader.read(&Frames::client().post(1).0).unwrap();
    let frame = Frames::default().data(1, 0, "0123456789").0;
    reader.read(&frame[..HEADER_LENGTH + 4]).unwrap();
    reader.connection.write_response(1, 200, true, &mut Vec::new(), |_| {}).unwrap();
    reader.connection.discard(1);
    let seen = reader.seen.len();
    reader.read(&frame[HEADER_LENGTH + 4..]).unwrap();
    assert_eq!(reader.connection.open_streams(), 1);
    // The window with the four bytes that were read, and 1 MiB more.
    let allowed = 65_535 + 1024 * 1024 - 10 + 4;
    for length in std::iter::repeat_n(16_000, allowed / 16_000).chain([allowed % 16_000]) {
        assert_eq!(reader.connection.open_streams(), 1);
        reader.read(&Frames::default().data(1, 0, "x".repeat(length)).0).unwrap();
    }
    assert_eq!(reader.seen.len(), seen);
    assert_eq!(reader.connection.open_streams(), 0);
    let sent = reader.sent();
    let reset: Vec<_> = sent.chunks(13).filter(|frame| frame[3] == RST_STREAM).collect();
    assert!(matches!(reset[..], [[.., 0, 0, 0, 1, 0, 0, 0, 0]]), "{sent:?}");
    // A client blocked by flow control gets a window before it is told to stop.
    let opened: Vec<_> = sent.chunks(13).filter(|frame| frame[3] == WINDOW_UPDATE && frame[8] == 1).collect();
    let increments: Vec<_> = opened.iter().map(|frame| u32::from_be_bytes(frame[9..].try_into().unwrap())).collect();
    assert_eq!(increments, [1024 * 1024 + 4, 0x7fff_ffff]);
    // Another request, which ends normally.
    reader.read(&Frames::default().post(3).0).unwrap();
    reader.connection.write_response(3, 200, true, &mut Vec::new(), |_| {}).unwrap();
    reader.connection.discard(3);
    reader.read(&Frames::default().data(3, END_STREAM, "x").0).unwrap();
    assert_eq!((reader.seen.len(), reader.connection.open_streams()), (seen + 1, 0));
}

#[test]
fn malformed_rest_of_an_answered_request_resets_the_stream() {
    let rest = |frames: Frames| {
        let mut reader = Reader::server();
        let head =
            [(":method", "POST"), (":scheme", "http"), (":path", "/"), (":authority", "h"), ("content-length", "2")];
        reader.read(&Frames::client().headers(1, END_HEADERS, &head).0).unwrap();
        reader.connection.write_response(1, 200, true, &mut Vec::new(), |_| {}).unwrap();
        reader.connection.discard(1);
        let seen = reader.seen.len();
        reader.read(&frames.0).unwrap();
        reader.seen.split_off(seen)
    };
    let none = Frames::default;
    for (rule, frames) in [
        ("8.1 a second head", none().headers(1, END_HEADERS, &[("x", "y")])),
        ("8.1 a pseudo-header in trailers", none().data(1, 0, "xy").headers(1, 5, &[(":method", "GET")])),
        ("8.1.1 too much", none().data(1, 0, "xyz")),
        ("8.1.1 too little", none().data(1, 1, "x")),
        ("8.1.1 too little before trailers", none().data(1, 0, "x").headers(1, 5, &[("x", "y")])),
        ("8.2.1 capital", none().data(1, 0, "xy").headers(1, 5, &[("X", "y")])),
    ] {
        let seen = rest(frames);
        assert!(
            matches!(&seen[..], [Seen::Other(Event::Fault { stream: 1, fault })]
            if fault.code() == ErrorCode::PROTOCOL_ERROR),
            "{rule}: {seen:?}"
        );
    }
    // A valid rest of the request is discarded.
    assert!(rest(none().data(1, 0, "xy").headers(1, 5, &[("x", "y")])).is_empty());
    assert!(rest(none().data(1, 1, "xy")).is_empty());
}

#[test]
fn windows_grow() {
    let mut reader = Reader::server();
    reader.read(&Frames::client().post(1).0).unwrap();
    reader.sent();
    reader.connection.grow_stream_window(1, 1 << 20);
    reader.connection.grow_connection_window(8 << 20);
    let sent = reader.sent();
    let updates: Vec<_> =
        sent.chunks(13).map(|frame| (frame[8], u32::from_be_bytes(frame[9..].try_into().unwrap()))).collect();
    assert_eq!(updates, [(1, (1 << 20) - 65_535), (0, 7 << 20)]);
}

#[test]
fn shutdown_in_two_steps_6_8() {
    let mut pair = Pair::new();
    let first = pair.request(LINE, true);
    pair.server.connection.announce_shutdown();
    pair.server.connection.poll_control(&mut pair.from_server);
    pair.exchange();
    assert!(matches!(
        pair.client.seen[..],
        [Seen::Other(Event::GoAway { last_stream: 0x7fff_ffff, code: ErrorCode::NO_ERROR, .. })]
    ));
    let line = RequestLine { path: b"/", ..LINE };
    let late = pair.client.connection.write_request(line, true, &mut Vec::new(), |_| {});
    assert_eq!(late, Err(CannotOpen::GoingAway));
    pair.server.connection.shutdown();
    pair.server.connection.shutdown();
    pair.exchange();
    assert_eq!(pair.client.connection.goaway_received(), Some(first));
    pair.server.seen.clear();
    pair.server.read(&Frames::default().get(first + 2).0).unwrap();
    assert_eq!((pair.server.seen.len(), pair.server.sent().len()), (0, 0), "streams behind GOAWAY are ignored");
    assert_eq!(pair.server.connection.open_streams(), 1);
    pair.respond(first, true);
    assert_eq!(pair.server.connection.open_streams(), 0);
}

#[test]
fn priorities_rfc_9218() {
    let update = |stream: u8, value: &str| [&[0, 0, 0, stream], value.as_bytes()].concat();
    let mut reader = Reader::server();
    reader.read(&Frames::client().frame(PRIORITY_UPDATE, 0, 0, update(3, "u=1")).get(1).0).unwrap();
    assert_eq!(reader.connection.priority(1), Priority::default());
    let fields = [GET, &[("priority", "u=6, i")]].concat();
    reader.read(&Frames::default().headers(3, 5, &fields).headers(5, 5, &fields).0).unwrap();
    assert_eq!(reader.connection.priority(3), Priority { urgency: 1, incremental: false });
    assert_eq!(reader.connection.priority(5), Priority { urgency: 6, incremental: true });
    reader.seen.clear();
    reader.read(&Frames::default().frame(PRIORITY_UPDATE, 0, 0, update(5, "i")).0).unwrap();
    let priority = Priority { urgency: 3, incremental: true };
    assert_eq!(reader.seen, [Seen::Other(Event::PriorityChanged { stream: 5, priority })]);
    assert_eq!(reader.connection.priority(5), priority);
}

#[test]
fn a_large_head_takes_continuations() {
    let large = "x".repeat(7000);
    let mut pair = Pair::new();
    let stream = pair.request(LINE, true);
    pair.exchange();
    let write = |fields: &mut gale_protocol::http2::FieldsWriter<'_>| {
        (0..4).for_each(|_| fields.field(b"X", large.as_bytes(), Indexing::Not).unwrap());
    };
    pair.server.connection.write_response(stream, 200, true, &mut pair.from_server, write).unwrap();
    let first = FrameHeader::parse(&pair.from_server).unwrap();
    assert_eq!((first.frame_type, first.flags, first.length), (HEADERS, END_STREAM, 16_384));
    pair.exchange();
    let expected = format!("200\n{}", format!("x: {large}\n").repeat(4));
    assert_eq!(pair.client.seen, [Seen::Response(stream, expected, true)]);
}

#[test]
fn pings_and_settings_are_answered() {
    let mut pair = Pair::new();
    assert!(!pair.client.connection.awaits_settings_ack() && !pair.server.connection.awaits_settings_ack());
    pair.server.connection.ping(*b"01234567");
    pair.exchange();
    assert_eq!(pair.server.seen, [Seen::Other(Event::Pong { payload: *b"01234567" })]);
}

#[test]
fn fields_that_cannot_be_sent_are_refused() {
    let mut pair = Pair::new();
    let stream = pair.request(LINE, true);
    pair.exchange();
    let (server, out) = (&mut pair.server.connection, &mut pair.from_server);
    server
        .write_response(stream, 200, false, out, |fields| {
            for (name, value) in
                [("Connection", "x"), ("upgrade", "x"), ("a b", "x"), ("", "x"), ("x", "a\nb"), ("x", "a\0")]
            {
                assert!(fields.field(name.as_bytes(), value.as_bytes(), Indexing::Not).is_err(), "{name}");
            }
            assert!(fields.known(ResponseField::TransferEncoding, b"chunked").is_err());
            assert!(fields.known(ResponseField::Location, b"/\r\nx: y").is_err());
        })
        .unwrap();
    assert_eq!(server.write_response(stream, 200, true, out, |_| {}), Err(SendFault::OutOfOrder));
    for line in [
        RequestLine { path: b"/a b", ..LINE },
        RequestLine { path: b"", ..LINE },
        RequestLine { method: b"G T", ..LINE },
        RequestLine { authority: b"a\nb", ..LINE },
    ] {
        let result = pair.client.connection.write_request(line, true, &mut pair.from_client, |_| {});
        assert!(matches!(result, Err(CannotOpen::Unwritable(_))));
    }
    pair.exchange();
    assert_eq!(pair.client.seen, [Seen::Response(stream, "200\n".into(), false)]);
}

#[test]
fn a_client_opens_no_more_streams_than_allowed() {
    let mut pair = Pair::with(Limits::default(), Limits { concurrent_streams_max: 1, ..Limits::default() });
    let stream = pair.request(LINE, true);
    assert_eq!(pair.client.connection.check_can_open(), Err(CannotOpen::Full));
    pair.exchange();
    pair.server.connection.reset(stream, ErrorCode::REFUSED_STREAM);
    pair.exchange();
    let reset = Event::Reset { stream, code: ErrorCode::REFUSED_STREAM };
    assert_eq!(pair.client.seen, [Seen::Other(reset)]);
    assert_eq!(pair.client.connection.check_can_open(), Ok(()));
}

/// A client with one request in flight (two for HEAD), and the result of reading these response frames.
fn answered(frames: Frames) -> (Reader, Result<(), gale_protocol::http2::ConnectionFault>) {
    let mut client = Reader::of(Connection::client(Arc::new(Limits::default())));
    for method in [&b"GET"[..], b"HEAD"] {
        client.connection.write_request(RequestLine { method, ..LINE }, true, &mut Vec::new(), |_| {}).unwrap();
    }
    let result = client.read(&Frames([Frames::server().0, frames.0].concat()).0);
    (client, result)
}

#[test]
fn malformed_responses_reset_their_stream() {
    let none = Frames::default;
    let ok = || none().headers(1, END_HEADERS, &[(":status", "200"), ("content-length", "2")]);
    for (rule, frames) in [
        ("8.3.2 no :status", none().headers(1, 5, &[("x", "y")])),
        ("8.3.2 nothing", none().headers(1, 5, &[])),
        ("8.3.2 two", none().headers(1, 5, &[(":status", "200"), (":status", "200")])),
        ("8.3.2 late", none().headers(1, 5, &[("x", "y"), (":status", "200")])),
        ("8.3.2 no number", none().headers(1, 5, &[(":status", "20x")])),
        ("8.3 of a request", none().headers(1, 5, &[(":status", "200"), (":path", "/")])),
        ("8.6 101", none().headers(1, END_HEADERS, &[(":status", "101")])),
        ("8.2.1 capital", none().headers(1, 5, &[(":status", "200"), ("X", "y")])),
        ("8.1 interim that ends", none().headers(1, 5, &[(":status", "103")])),
        ("8.1 data first", none().data(1, 1, "x")),
        ("8.1.1 too little", ok().data(1, 1, "x")),
        ("8.1.1 too much", ok().data(1, 1, "xyz")),
        ("8.1.1 nothing", none().headers(1, 5, &[(":status", "200"), ("content-length", "2")])),
        (
            "8.1.1 two lengths",
            none().headers(1, 5, &[(":status", "200"), ("content-length", "0"), ("content-length", "0")]),
        ),
        ("8.1 a second head", ok().headers(1, 4, &[("x", "y")])),
    ] {
        let (client, result) = answered(frames);
        assert_eq!(result, Ok(()), "{rule}");
        assert!(
            matches!(client.seen.last(), Some(Seen::Other(Event::Fault { stream: 1, fault }))
            if fault.code() == ErrorCode::PROTOCOL_ERROR),
            "{rule}: {:?}",
            client.seen
        );
    }
    for (rule, frames) in [
        ("5.1.1 a stream that was not begun", none().headers(5, 5, &[(":status", "200")])),
        ("5.1.1 a stream of the server", none().headers(2, 5, &[(":status", "200")])),
        ("8.4 push", none().frame(PUSH_PROMISE, 4, 1, [0, 0, 0, 2])),
        ("6.5.2 ENABLE_PUSH", none().settings(&[(2, 1)])),
        ("9218 7 PRIORITY_UPDATE", none().frame(PRIORITY_UPDATE, 0, 0, [0, 0, 0, 1])),
    ] {
        let (_, result) = answered(frames);
        assert_eq!(result.unwrap_err().code(), ErrorCode::PROTOCOL_ERROR, "{rule}");
    }
}

#[test]
fn responses_without_content_may_have_a_length() {
    let (client, result) = answered(Frames::default().headers(3, 5, &[(":status", "200"), ("content-length", "9")]));
    assert_eq!(result, Ok(()));
    assert_eq!(client.seen.last(), Some(&Seen::Response(3, "200\ncontent-length: 9\n".into(), true)));
    let (client, _) = answered(Frames::default().headers(1, 5, &[(":status", "304"), ("content-length", "9")]));
    assert_eq!(client.seen.last(), Some(&Seen::Response(1, "304\ncontent-length: 9\n".into(), true)));
}

proptest! {
    #[test]
    fn messages_arrive_as_they_were_sent(
        requests in prop::collection::vec(
            (
                prop::collection::vec(("[a-z][a-z0-9-]{0,9}", "[!-~]{0,30}"), 0..8),
                prop::collection::vec(any::<u8>(), 0..3000),
            ),
            1..12,
        ),
    ) {
        let mut pair = Pair::new();
        for (fields, body) in requests {
            let refused = ["connection", "te", "upgrade", "host", "priority", "cookie"];
            let fields: Vec<_> = fields.into_iter().filter(|field| !refused.contains(&field.0.as_str())).collect();
            let stream = pair.request(LINE, true);
            pair.exchange();
            let written: String = fields.iter().map(|(name, value)| format!("{name}: {value}\n")).collect();
            let (server, out) = (&mut pair.server.connection, &mut pair.from_server);
            server.write_response(stream, 207, false, out, |writer| {
                for (name, value) in &fields {
                    writer.field(name.as_bytes(), value.as_bytes(), Indexing::IfRepeated).unwrap();
                }
            }).unwrap();
            pair.send(stream, &body, true);
            pair.exchange();
            prop_assert_eq!(
                std::mem::take(&mut pair.client.seen),
                [Seen::Response(stream, format!("207\n{written}"), false), Seen::Data(stream, body, true)]
            );
        }
        prop_assert_eq!(pair.client.connection.open_streams() + pair.server.connection.open_streams(), 0);
    }
}
