//! All rules that a client can violate, each with its section (of RFC 9113 unless stated otherwise) and the error code
//! sent.

use std::sync::Arc;

use gale_protocol::http2::frame::frame_type::*;
use gale_protocol::http2::{Connection, ErrorCode, Event, Fields, Limits};

use crate::peer::*;

/// Expected reaction of a server.
#[derive(Debug)]
enum Expect {
    /// GOAWAY with that code.
    Connection(ErrorCode),
    /// RST_STREAM with that code, or a refusal that leads to it.
    Stream(ErrorCode),
    /// A response with that status, and no reset.
    Answer(u16),
    Fine,
}

use Expect::{Answer, Connection as Conn, Fine, Stream};

const PROTOCOL: ErrorCode = ErrorCode::PROTOCOL_ERROR;
const SIZE: ErrorCode = ErrorCode::FRAME_SIZE_ERROR;
const FLOW: ErrorCode = ErrorCode::FLOW_CONTROL_ERROR;
const CLOSED: ErrorCode = ErrorCode::STREAM_CLOSED;
const CALM: ErrorCode = ErrorCode::ENHANCE_YOUR_CALM;
const COMPRESSION: ErrorCode = ErrorCode::COMPRESSION_ERROR;

fn limits() -> Limits {
    Limits { concurrent_streams_max: 4, ..Limits::default() }
}

/// Sends frames to a server that answers every complete request at once, and checks its last reaction.
fn check(rule: &str, frames: Frames, expect: Expect) {
    check_with(limits(), rule, frames, expect);
}

fn check_with(limits: Limits, rule: &str, frames: Frames, expect: Expect) {
    let mut connection = Connection::server(Arc::new(limits));
    let mut fields = Fields::new();
    let (mut at, mut out, mut last_fault, mut answer) = (0, Vec::new(), None, None);
    let result = loop {
        match connection.handle_input(&frames.0[at..], &mut fields) {
            Err(fault) => break Err(fault),
            Ok(handled) => {
                at += handled.consumed;
                let Some(event) = handled.event else { break Ok(()) };
                match event {
                    Event::Request { stream, end_stream: true }
                    | Event::Data { stream, end_stream: true, .. }
                    | Event::Trailers { stream } => {
                        let _ = connection.write_response(stream, 200, true, &mut out, |_| {});
                    }
                    Event::BadRequest { stream, refusal, .. } => {
                        let is_malformed = matches!(refusal, gale_protocol::http2::Refusal::Malformed(_));
                        answer = Some(refusal.status());
                        if is_malformed {
                            connection.write_response(stream, refusal.status(), false, &mut out, |_| {}).unwrap();
                            connection.reset_refused(stream, refusal);
                            last_fault = Some(PROTOCOL);
                        } else {
                            connection.write_response(stream, refusal.status(), true, &mut out, |_| {}).unwrap();
                        }
                    }
                    Event::Fault { fault, .. } => {
                        assert!(fault.section().contains("§") && !fault.to_string().is_empty());
                        last_fault = Some(fault.code());
                    }
                    _ => {}
                }
            }
        }
    };
    connection.poll_control(&mut out);
    match (expect, result) {
        (Conn(code), Err(fault)) => {
            assert_eq!(fault.code(), code, "{rule}: {fault}");
            assert!(fault.section().starts_with("RFC"));
            let goaway = out.windows(13).rev().find(|frame| frame[3] == GOAWAY && frame[4..9] == [0; 5]);
            assert!(goaway.is_some() && contains(&out, &code.0.to_be_bytes()), "{rule}");
            assert_eq!(connection.handle_input(b"", &mut fields), Err(fault));
        }
        (Stream(code), Ok(())) => {
            assert_eq!(last_fault, Some(code), "{rule}");
            let reset = |frame: &[u8]| frame[..5] == [0, 0, 4, RST_STREAM, 0] && frame[9..] == code.0.to_be_bytes();
            assert!(out.windows(13).any(reset), "{rule}");
        }
        (Answer(status), Ok(())) => assert_eq!((answer, last_fault), (Some(status), None), "{rule}"),
        (Fine, Ok(())) => assert_eq!((answer, last_fault), (None, None), "{rule}"),
        (expect, result) => panic!("{rule}: expected {expect:?}, got {result:?}"),
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

fn client() -> Frames {
    Frames::client()
}

fn request(fields: &[(&str, &str)]) -> Frames {
    client().headers(1, END_STREAM | END_HEADERS, fields)
}

fn get_with(fields: &[(&str, &str)]) -> Frames {
    request(&[GET, fields].concat())
}

#[test]
fn preface_3_4() {
    check("3.4 invalid preface", Frames(b"GET / HTTP/1.1\r\n".to_vec()), Conn(PROTOCOL));
    check("3.4 wrong last byte", Frames(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\r".to_vec()), Conn(PROTOCOL));
    let preface = || Frames(gale_protocol::http2::frame::PREFACE.to_vec());
    check("3.4 another frame than SETTINGS", preface().frame(PING, 0, 0, [0; 8]), Conn(PROTOCOL));
    // Some clients do so; nginx accepts it too.
    check("3.4 an acknowledgement at first", preface().frame(SETTINGS, ACK, 0, "").settings(&[]).get(1), Fine);
    check("3.4 nothing else", preface().settings(&[]), Fine);
}

#[test]
fn frames_4() {
    check("4.1 unknown type", client().frame(0xee, 0xff, 0, [0; 9]).frame(0xef, 0, 77, "").get(1), Fine);
    check("4.1 undefined flags", client().frame(PING, 0xfe, 0, [0; 8]).get(1), Fine);
    check("4.1 reserved bit", client().frame(PING, 0, 0, [0; 8]).frame(WINDOW_UPDATE, 0, 0, [0x80, 0, 0, 1]), Fine);
    let long = vec![0; 16_385];
    check("4.2 DATA too long", client().post(1).data(1, 0, &long), Conn(SIZE));
    check("4.2 HEADERS too long", client().frame(HEADERS, END_HEADERS, 1, &long), Conn(SIZE));
    check("4.2 unknown frame too long", client().frame(0xee, 0, 0, &long), Conn(SIZE));
    check("4.2 the longest", client().post(1).data(1, END_STREAM, &long[1..]), Fine);
    check("4.3 wrong block", client().frame(HEADERS, END_HEADERS | END_STREAM, 1, [0xff; 9]), Conn(COMPRESSION));
    check("4.3 wrong block of a trailer", client().post(1).frame(HEADERS, 5, 1, [0x80]), Conn(COMPRESSION));
    check(
        "4.3 wrong block of a refused stream",
        client().repeat(5, |frames, number| frames.post(1 + 2 * number as u32)).frame(HEADERS, 5, 11, [0x80]),
        Conn(COMPRESSION),
    );
}

#[test]
fn stream_states_5_1() {
    for (rule, frames) in [
        ("5.1 idle: DATA", client().data(1, END_STREAM, "x")),
        ("5.1 idle: RST_STREAM", client().frame(RST_STREAM, 0, 1, [0; 4])),
        ("5.1 idle: WINDOW_UPDATE", client().frame(WINDOW_UPDATE, 0, 1, [0, 0, 0, 9])),
        ("5.1 idle: WINDOW_UPDATE of 0", client().frame(WINDOW_UPDATE, 0, 1, [0; 4])),
        ("5.1 idle: CONTINUATION", client().frame(CONTINUATION, END_HEADERS, 1, block(GET))),
        ("5.1.1 even id", client().get(2)),
        ("5.1.1 even id of DATA", client().get(1).data(2, 0, "x")),
        ("5.1.1 smaller id", client().get(5).get(3)),
    ] {
        check(rule, frames, Conn(PROTOCOL));
    }
    check("5.1 idle: PRIORITY", client().frame(frame_priority().0, 0, 9, frame_priority().1).get(1), Fine);
    // The response is held back: the server sends no END_STREAM, so the stream stays half-closed.
    let open = || client().post(1);
    check("5.1 half-closed (remote): RST_STREAM", open().frame(RST_STREAM, 0, 1, [0; 4]), Fine);
    for (rule, frames) in [
        ("5.1 closed: DATA", client().get(1).data(1, END_STREAM, "x")),
        ("5.1 closed: HEADERS", client().get(1).get(1)),
        ("5.1 closed: HEADERS, later", client().get(1).get(3).get(1)),
    ] {
        check(rule, frames, Conn(CLOSED));
    }
    check("5.1 closed: CONTINUATION", client().get(1).frame(CONTINUATION, END_HEADERS, 1, ""), Conn(PROTOCOL));
    let reset = || client().post(1).frame(RST_STREAM, 0, 1, [0, 0, 0, 8]);
    check("5.1 reset: DATA", reset().data(1, END_STREAM, "x"), Stream(CLOSED));
    check("5.1 reset: HEADERS", reset().get(1), Stream(CLOSED));
    check("5.1 reset: RST_STREAM", reset().frame(RST_STREAM, 0, 1, [0; 4]), Fine);
    check("5.1 reset: WINDOW_UPDATE", reset().frame(WINDOW_UPDATE, 0, 1, [0, 0, 0, 1]), Fine);
    check("5.1 closed: WINDOW_UPDATE", client().get(1).frame(WINDOW_UPDATE, 0, 1, [0, 0, 0, 1]), Fine);
    check("5.1 closed: PRIORITY", client().get(1).frame(frame_priority().0, 0, 1, frame_priority().1), Fine);
    let five = client().repeat(5, |frames, number| frames.post(1 + 2 * number as u32));
    check("5.1.2 too many streams", five, Stream(ErrorCode::REFUSED_STREAM));
}

/// The type of PRIORITY, and a payload.
fn frame_priority() -> (u8, [u8; 5]) {
    (PRIORITY, [0, 0, 0, 0, 15])
}

const HAS_PRIORITY: u8 = gale_protocol::http2::frame::flag::PRIORITY;

#[test]
fn half_closed_streams_take_no_more_5_1() {
    for (rule, last) in [
        ("DATA", Frames::default().data(1, 0, "x")),
        ("HEADERS", Frames::default().headers(1, END_STREAM | END_HEADERS, &[("x", "y")])),
    ] {
        let mut reader = Reader::server();
        reader.read(&client().headers(1, END_STREAM | END_HEADERS, POST).0).unwrap();
        reader.sent();
        reader.read(&last.0).unwrap();
        assert!(
            matches!(reader.seen.last(), Some(Seen::Other(Event::Fault { stream: 1, fault }))
            if fault.code() == CLOSED),
            "{rule}"
        );
    }
}

#[test]
fn dependencies_rfc_7540_5_3_1() {
    let on_itself = [0, 0, 0, 1, 15];
    let headers = [&on_itself[..], &block(GET)].concat();
    check("HEADERS", client().frame(HEADERS, END_STREAM | END_HEADERS | HAS_PRIORITY, 1, headers), Stream(PROTOCOL));
    check("PRIORITY", client().post(1).frame(frame_priority().0, 0, 1, on_itself), Stream(PROTOCOL));
    check("PRIORITY, idle", client().frame(frame_priority().0, 0, 1, on_itself), Conn(PROTOCOL));
}

#[test]
fn forms_of_frames_6() {
    let priority = frame_priority().0;
    for (rule, frames, code) in [
        ("6.1 DATA without stream", client().data(0, 0, "x"), PROTOCOL),
        ("6.1 DATA with too much padding", client().post(1).data(1, PADDED, [4, 0, 0, 0]), PROTOCOL),
        ("6.1 DATA without its padding's length", client().post(1).data(1, PADDED, ""), SIZE),
        ("6.2 HEADERS without stream", client().headers(0, 5, GET), PROTOCOL),
        ("6.2 HEADERS with too much padding", client().frame(HEADERS, 5 | PADDED, 1, [9, 1]), PROTOCOL),
        ("6.2 HEADERS without room for a priority", client().frame(HEADERS, 5 | HAS_PRIORITY, 1, [0; 4]), SIZE),
        ("6.3 PRIORITY without stream", client().frame(priority, 0, 0, [0; 5]), PROTOCOL),
        ("6.3 PRIORITY with a wrong length", client().frame(priority, 0, 1, [0; 4]), SIZE),
        ("6.4 RST_STREAM without stream", client().frame(RST_STREAM, 0, 0, [0; 4]), PROTOCOL),
        ("6.4 RST_STREAM with a wrong length", client().post(1).frame(RST_STREAM, 0, 1, [0; 3]), SIZE),
        ("6.5 SETTINGS of a stream", client().frame(SETTINGS, 0, 1, ""), PROTOCOL),
        ("6.5 SETTINGS with a wrong length", client().frame(SETTINGS, 0, 0, [0; 5]), SIZE),
        ("6.5 acknowledgement with settings", client().frame(SETTINGS, ACK, 0, [0; 6]), SIZE),
        ("6.5.2 ENABLE_PUSH", client().settings(&[(2, 2)]), PROTOCOL),
        ("6.5.2 INITIAL_WINDOW_SIZE", client().settings(&[(4, 0x8000_0000)]), FLOW),
        ("6.5.2 MAX_FRAME_SIZE, small", client().settings(&[(5, 16_383)]), PROTOCOL),
        ("6.5.2 MAX_FRAME_SIZE, large", client().settings(&[(5, 0x100_0000)]), PROTOCOL),
        ("RFC 8441 3 ENABLE_CONNECT_PROTOCOL", client().settings(&[(8, 2)]), PROTOCOL),
        ("RFC 8441 3 taken back", client().settings(&[(8, 1)]).settings(&[(8, 0)]), PROTOCOL),
        ("RFC 9218 2.1 NO_RFC7540_PRIORITIES", client().settings(&[(9, 2)]), PROTOCOL),
        ("6.6 PUSH_PROMISE", client().get(1).frame(PUSH_PROMISE, END_HEADERS, 1, [0, 0, 0, 2]), PROTOCOL),
        ("6.7 PING of a stream", client().frame(PING, 0, 1, [0; 8]), PROTOCOL),
        ("6.7 PING with a wrong length", client().frame(PING, 0, 0, [0; 7]), SIZE),
        ("6.8 GOAWAY of a stream", client().frame(GOAWAY, 0, 1, [0; 8]), PROTOCOL),
        ("6.8 GOAWAY with a wrong length", client().frame(GOAWAY, 0, 0, [0; 7]), SIZE),
        (
            "6.8 GOAWAY that takes more",
            client().frame(GOAWAY, 0, 0, [0; 8]).frame(GOAWAY, 0, 0, [0, 0, 0, 1, 0, 0, 0, 0]),
            PROTOCOL,
        ),
        ("6.9 WINDOW_UPDATE of 0", client().frame(WINDOW_UPDATE, 0, 0, [0; 4]), PROTOCOL),
        ("6.9 WINDOW_UPDATE with a wrong length", client().frame(WINDOW_UPDATE, 0, 0, [0; 3]), SIZE),
        ("6.9.1 too large a window", client().frame(WINDOW_UPDATE, 0, 0, [0x7f, 0xff, 0xff, 0xff]), FLOW),
        (
            "6.9.2 a window that SETTINGS overflow",
            client().post(1).frame(WINDOW_UPDATE, 0, 1, [0x7f, 0xff, 0, 0]).settings(&[(4, 0x7fff_ffff)]),
            FLOW,
        ),
        ("6.10 CONTINUATION of another stream", client().headers(1, 0, GET).frame(CONTINUATION, 4, 3, ""), PROTOCOL),
        ("6.10 CONTINUATION without stream", client().headers(1, 0, GET).frame(CONTINUATION, 4, 0, ""), PROTOCOL),
        ("6.10 PING before CONTINUATION", client().headers(1, 0, GET).frame(PING, 0, 0, [0; 8]), PROTOCOL),
        ("6.10 unknown before CONTINUATION", client().headers(1, 0, GET).frame(0xee, 0, 0, ""), PROTOCOL),
        ("6.10 DATA before CONTINUATION", client().headers(1, 0, GET).data(1, 0, "x"), PROTOCOL),
        ("6.10 CONTINUATION behind END_HEADERS", client().get(1).frame(CONTINUATION, 4, 1, ""), PROTOCOL),
        ("RFC 9218 7.1 PRIORITY_UPDATE of a stream", client().frame(PRIORITY_UPDATE, 0, 1, [0; 4]), PROTOCOL),
        ("RFC 9218 7.1 without a stream's id", client().frame(PRIORITY_UPDATE, 0, 0, [0; 4]), PROTOCOL),
        ("RFC 9218 7.1 of a push", client().frame(PRIORITY_UPDATE, 0, 0, [0, 0, 0, 2]), PROTOCOL),
        ("RFC 9218 7.1 too short", client().frame(PRIORITY_UPDATE, 0, 0, [0; 3]), SIZE),
    ] {
        check(rule, frames, Conn(code));
    }
    check("6.3 PRIORITY with a wrong length", client().post(1).frame(priority, 0, 1, [0; 4]), Stream(SIZE));
    check("6.9 WINDOW_UPDATE of 0", client().post(1).frame(WINDOW_UPDATE, 0, 1, [0; 4]), Stream(PROTOCOL));
    let overflow = client().post(1).frame(WINDOW_UPDATE, 0, 1, [0x7f, 0xff, 0xff, 0xff]);
    check("6.9.1 too large a window", overflow, Stream(FLOW));
    check("6.5.2 unknown settings", client().settings(&[(0xeeee, 1), (3, 0), (6, 0)]), Fine);
    check("6.7 an answer that nobody waits for", client().frame(PING, ACK, 0, [0; 8]), Fine);
    check("6.4 unknown code", client().post(1).frame(RST_STREAM, 0, 1, [0xff; 4]), Fine);
    check("6.1 all padding", client().post(1).data(1, PADDED | END_STREAM, [3, 0, 0, 0]), Fine);
}

#[test]
fn windows_6_9_1() {
    let frames = |stream| Frames::default().data(stream, 0, [0; 16_384]);
    let mut reader = Reader::server();
    reader.releases = false;
    reader.read(&client().post(1).post(3).0).unwrap();
    (0..3).for_each(|_| reader.read(&frames(1).0).unwrap());
    reader.read(&frames(1).0).unwrap();
    assert!(
        matches!(reader.seen.last(), Some(Seen::Other(Event::Fault { stream: 1, fault })) if fault.code() == FLOW),
        "the stream's window of 65535 bytes is exceeded by one"
    );
    let limits = Limits { connection_window: 65_535, ..Limits::default() };
    let mut reader = Reader::of(Connection::server(Arc::new(limits)));
    reader.releases = false;
    reader.read(&client().post(1).post(3).0).unwrap();
    (0..3).for_each(|_| reader.read(&frames(1).0).unwrap());
    assert_eq!(reader.read(&frames(3).0).unwrap_err().code(), FLOW);
}

#[test]
fn fields_8_2() {
    for (rule, fields) in [
        ("8.2.1 capital", ("X-Test", "a")),
        ("8.2.1 no name", ("", "a")),
        ("8.2.1 space in a name", ("x test", "a")),
        ("8.2.1 colon in a name", ("x:", "a")),
        ("8.2.1 LF in a name", ("x\n", "a")),
        ("8.2.1 NUL", ("x", "a\0b")),
        ("8.2.1 CR", ("x", "a\rb")),
        ("8.2.1 LF", ("x", "a\nb")),
        ("8.2.1 space before a value", ("x", " a")),
        ("8.2.1 tab behind a value", ("x", "a\t")),
        ("8.2.2 connection", ("connection", "close")),
        ("8.2.2 keep-alive", ("keep-alive", "timeout=5")),
        ("8.2.2 proxy-connection", ("proxy-connection", "keep-alive")),
        ("8.2.2 transfer-encoding", ("transfer-encoding", "chunked")),
        ("8.2.2 upgrade", ("upgrade", "h2c")),
        ("8.2.2 te", ("te", "trailers, deflate")),
        ("a name that another program takes for content-length", ("content_length", "5")),
    ] {
        check(rule, get_with(&[fields]), Stream(PROTOCOL));
        if fields.0 != "te" {
            let trailers = client().post(1).headers(1, END_STREAM | END_HEADERS, &[fields]);
            check(rule, trailers, Stream(PROTOCOL));
        }
    }
    check("8.2.2 te: trailers", get_with(&[("te", "trailers"), ("x", ""), ("x_y", "ignored")]), Fine);
}

#[test]
fn pseudo_headers_8_3() {
    let [method, scheme, path, authority] = GET else { unreachable!() };
    for (rule, fields) in [
        ("8.3 unknown", vec![*method, *scheme, *path, *authority, (":test", "a")]),
        ("8.3 of a response", vec![*method, *scheme, *path, *authority, (":status", "200")]),
        ("8.3 behind a field", vec![*method, *scheme, *path, ("x", "y"), *authority]),
        ("8.3.1 no :method", vec![*scheme, *path, *authority]),
        ("8.3.1 no :scheme", vec![*method, *path, *authority]),
        ("8.3.1 no :path", vec![*method, *scheme, *authority]),
        ("8.3.1 empty :path", vec![*method, *scheme, (":path", ""), *authority]),
        ("8.3.1 :method twice", vec![*method, *method, *scheme, *path, *authority]),
        ("8.3.1 :scheme twice", vec![*method, *scheme, *scheme, *path, *authority]),
        ("8.3.1 :path twice", vec![*method, *scheme, *path, *path, *authority]),
        ("8.3.1 :authority twice", vec![*method, *scheme, *path, *authority, *authority]),
        ("8.3.1 invalid :scheme", vec![*method, (":scheme", "ht tp"), *path, *authority]),
        ("8.3.1 empty :scheme", vec![*method, (":scheme", ""), *path, *authority]),
        ("8.2.1 LF in :path", vec![*method, *scheme, (":path", "/\n"), *authority]),
        ("8.5 CONNECT with :path", vec![(":method", "CONNECT"), (":path", "/"), *authority]),
        ("8.5 CONNECT with :scheme", vec![(":method", "CONNECT"), *scheme, *authority]),
        ("8.5 CONNECT without :authority", vec![(":method", "CONNECT"), ("host", "a:1")]),
        (
            "RFC 8441 4 not offered",
            vec![(":method", "CONNECT"), *scheme, *path, *authority, (":protocol", "websocket")],
        ),
        ("RFC 8441 4 without CONNECT", vec![*method, *scheme, *path, *authority, (":protocol", "websocket")]),
    ] {
        check(rule, request(&fields), Stream(PROTOCOL));
    }
    for (rule, fields) in [
        ("9110 9.1 method", vec![(":method", "g e"), *scheme, *path, *authority]),
        ("9112 3.2.4 asterisk", vec![*method, *scheme, (":path", "*"), *authority]),
        ("an absolute path", vec![*method, *scheme, (":path", "http://b/"), *authority]),
        ("a relative path", vec![*method, *scheme, (":path", "x"), *authority]),
        ("a path with a space", vec![*method, *scheme, (":path", "/a b"), *authority]),
        ("8.3.1 no host", vec![*method, *scheme, *path]),
        ("8.3.1 empty host", vec![*method, *scheme, *path, (":authority", "")]),
        ("8.3.1 userinfo", vec![*method, *scheme, *path, (":authority", "u@a")]),
        ("8.3.1 two hosts", vec![*method, *scheme, *path, *authority, ("host", "b")]),
        ("two Hosts", vec![*method, *scheme, *path, ("host", "a"), ("host", "a")]),
        ("two Hosts and an authority", vec![*method, *scheme, *path, *authority, ("host", "a"), ("host", "a")]),
        (
            "9110 8.6 two lengths",
            vec![*method, *scheme, *path, *authority, ("content-length", "0"), ("content-length", "0")],
        ),
        ("9110 8.6 no length", vec![*method, *scheme, *path, *authority, ("content-length", "+1")]),
        ("9110 9.3.6 CONNECT without port", vec![(":method", "CONNECT"), *authority]),
    ] {
        check(rule, request(&fields), Answer(400));
    }
    check("8.3.1 host alone", request(&[*method, *scheme, *path, ("host", "a")]), Fine);
    check("8.3.1 host and authority", request(&[*method, *scheme, *path, *authority, ("host", "a")]), Fine);
    check("8.3.1 OPTIONS *", request(&[(":method", "OPTIONS"), *scheme, (":path", "*"), *authority]), Fine);
    check("8.5 CONNECT", request(&[(":method", "CONNECT"), (":authority", "a:1")]), Fine);
    let offered = || Limits { extended_connect: true, ..limits() };
    let websocket = [(":method", "CONNECT"), *scheme, *path, *authority, (":protocol", "websocket")];
    check_with(offered(), "RFC 8441 4", request(&websocket), Fine);
    let without_path = [websocket[0], websocket[1], websocket[3], websocket[4]];
    check_with(offered(), "RFC 8441 4 without :path", request(&without_path), Stream(PROTOCOL));
}

#[test]
fn messages_8_1() {
    let post = |length: &'static str| client().headers(1, END_HEADERS, &[POST, &[("content-length", length)]].concat());
    check("8.1 trailers without end", client().post(1).headers(1, END_HEADERS, &[("x", "y")]), Stream(PROTOCOL));
    check("8.1 pseudo-header in trailers", client().post(1).headers(1, 5, &[(":path", "/")]), Stream(PROTOCOL));
    check("8.1 trailers", client().post(1).data(1, 0, "x").headers(1, 5, &[("x", "y")]), Fine);
    check("8.1.1 length and no body", get_with(&[("content-length", "1")]), Stream(PROTOCOL));
    check("8.1.1 less than announced", post("2").data(1, END_STREAM, "x"), Stream(PROTOCOL));
    check("8.1.1 less than announced, in pieces", post("4").data(1, 0, "x").data(1, END_STREAM, ""), Stream(PROTOCOL));
    check("8.1.1 more than announced", post("1").data(1, 0, "xy"), Stream(PROTOCOL));
    check("8.1.1 more than announced, in pieces", post("1").data(1, 0, "x").data(1, 0, "y"), Stream(PROTOCOL));
    check("8.1.1 less, with trailers", post("2").data(1, 0, "x").headers(1, 5, &[("x", "y")]), Stream(PROTOCOL));
    check("8.1.1 as announced", post("2").data(1, 0, "x").data(1, END_STREAM, "y"), Fine);
    check("8.1.1 padding is no content", post("1").data(1, PADDED | END_STREAM, [2, b'x', 0, 0]), Fine);
    check("8.1.1 nothing announced and nothing sent", get_with(&[("content-length", "0")]), Fine);
}

#[test]
fn sizes_10_5_1() {
    let long = "x".repeat(9000);
    check("line", get_with(&[("x", &long)]), Answer(494));
    check("path", request(&[GET[0], GET[1], (":path", &format!("/{long}")), GET[3]]), Answer(414));
    let many: Vec<_> = std::iter::repeat_n(("x", "y"), 1000).collect();
    check("fields", get_with(&many), Answer(494));
    let three = Limits { head: gale_protocol::http1::Limits { headers_max: 3, ..Default::default() }, ..limits() };
    // `:authority` is not counted, although the request exposes it as a field.
    check_with(three.clone(), "as many fields as may be", get_with(&[("a", "b"), ("c", "d"), ("e", "f")]), Fine);
    let four = [("a", "b"), ("c", "d"), ("e", "f"), ("g", "h")];
    check_with(three, "one field too many", get_with(&four), Answer(494));
    let crumbs: Vec<_> = std::iter::repeat_n(("cookie", "y"), 800).collect();
    let few = Limits { head: gale_protocol::http1::Limits { headers_max: 700, ..Default::default() }, ..limits() };
    check_with(few, "cookies", get_with(&crumbs), Answer(494));
    let large = [("x", &long[..8000]); 5];
    let block = block(&[GET, &large[..]].concat());
    let in_pieces = |flags| {
        let mut pieces = block.chunks(9000);
        let frames = client().frame(HEADERS, flags, 1, pieces.next().unwrap());
        pieces.fold(frames, |frames, piece| frames.frame(CONTINUATION, 0, 1, piece)).frame(CONTINUATION, 4, 1, "")
    };
    check("list", in_pieces(END_STREAM), Answer(494));
    let small = Limits { block_max: 10_000, ..limits() };
    check_with(small, "10.5.1 block", in_pieces(END_STREAM), Conn(CALM));
    // The same table entry many times: two bytes on the wire, four thousand in memory.
    let mut bomb = super::peer::block(GET);
    bomb.extend([0x40, 1, b'x', 0x7f, 0x81, 0x1e]);
    bomb.extend([b'y'; 4000]);
    bomb.extend([0xbe; 10_000]);
    check("10.5.1 bomb", client().frame(HEADERS, 5, 1, bomb), Conn(CALM));
    let continuations = client().headers(1, 0, GET).repeat(17, |frames, _| frames.frame(CONTINUATION, 0, 1, [0x82]));
    check("10.5.1 CONTINUATION flood", continuations, Conn(CALM));
}

#[test]
fn floods_10_5() {
    for (what, frames) in [
        ("PING", client().repeat(101, |frames, _| frames.frame(PING, 0, 0, [0; 8]))),
        ("PING answers", client().repeat(101, |frames, _| frames.frame(PING, ACK, 0, [0; 8]))),
        ("SETTINGS", client().repeat(51, |frames, _| frames.settings(&[]))),
        ("empty DATA", client().post(1).repeat(201, |frames, _| frames.data(1, 0, ""))),
        ("padding", client().post(1).repeat(201, |frames, _| frames.data(1, PADDED, [1, 0]))),
        ("WINDOW_UPDATE", client().repeat(5001, |frames, _| frames.frame(WINDOW_UPDATE, 0, 0, [0, 0, 0, 1]))),
        ("PRIORITY", client().repeat(1001, |frames, _| frames.frame(frame_priority().0, 0, 9, [0; 5]))),
        ("PRIORITY_UPDATE", client().repeat(1001, |frames, n| frames.frame(PRIORITY_UPDATE, 0, 0, [0, 0, n as u8, 1]))),
        ("unknown", client().repeat(201, |frames, _| frames.frame(0xee, 0, 0, ""))),
        (
            "rapid reset",
            client()
                .repeat(501, |frames, n| frames.post(1 + 2 * n as u32).frame(RST_STREAM, 0, 1 + 2 * n as u32, [0; 4])),
        ),
        (
            "resets of ours, by wrong updates",
            client().repeat(501, |frames, n| {
                frames.post(1 + 2 * n as u32).frame(WINDOW_UPDATE, 0, 1 + 2 * n as u32, [0; 4])
            }),
        ),
        ("malformed requests", client().repeat(501, |frames, n| frames.headers(1 + 2 * n as u32, 5, &GET[1..]))),
        ("too many streams", client().repeat(505, |frames, n| frames.post(1 + 2 * n as u32))),
    ] {
        check(what, frames, Conn(CALM));
    }
}

/// Behaviour of gRPC clients that receive small responses, thousands of times in an interval.
#[test]
fn pings_updates_and_late_resets_of_a_client_that_is_answered_are_no_floods() {
    let mut server = Reader::server();
    server.read(&client().0).unwrap();
    for number in 0..20_000 {
        let stream = 1 + 2 * number;
        server.read(&Frames::default().post(stream).0).unwrap();
        server.connection.write_response(stream, 200, false, &mut Vec::new(), |_| {}).unwrap();
        server.connection.write_data(stream, 5, true, &mut Vec::new()).unwrap();
        // Both sides cancel the rest of every other request.
        if number % 2 == 0 {
            server.connection.reset(stream, ErrorCode::NO_ERROR);
        }
        let measured = Frames::default().frame(PING, 0, 0, [0; 8]).frame(WINDOW_UPDATE, 0, 0, [0, 0, 0, 5]);
        server.read(&measured.frame(RST_STREAM, 0, stream, [0; 4]).0).unwrap();
        server.sent();
    }
}

#[test]
fn a_window_of_one_byte_earns_nothing() {
    let mut server = Reader::server();
    let tiny = Frames(gale_protocol::http2::frame::PREFACE.to_vec()).settings(&[(4, 1)]);
    server.read(&tiny.get(1).0).unwrap();
    server.connection.write_response(1, 200, false, &mut Vec::new(), |_| {}).unwrap();
    let mut updates = 0;
    let fault = loop {
        server.connection.write_data(1, 1000, false, &mut Vec::new()).unwrap();
        match server.read(&Frames::default().frame(WINDOW_UPDATE, 0, 1, [0, 0, 0, 1]).0) {
            Ok(()) => updates += 1,
            Err(fault) => break fault,
        }
    };
    assert_eq!((fault.code(), updates), (CALM, 5000));
}

#[test]
fn a_new_interval_has_new_budgets() {
    let mut reader = Reader::server();
    reader.read(&client().0).unwrap();
    for _ in 0..10 {
        reader.read(&Frames::default().repeat(100, |frames, _| frames.frame(PING, 0, 0, [0; 8])).0).unwrap();
        assert_eq!(reader.sent().windows(17).filter(|frame| frame[3] == PING && frame[4] == ACK).count(), 100);
        reader.connection.handle_interval();
    }
}

#[test]
fn unread_answers_end_the_connection() {
    let limits = Limits { control_max: 1000, ..Limits::default() };
    let frames = client().repeat(100, |frames, _| frames.frame(PING, 0, 0, [0; 8]));
    check_with(limits, "unread", frames, Conn(CALM));
}
