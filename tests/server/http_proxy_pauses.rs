//! proxy: the received part of a response is sent to the client while the upstream server pauses, through any filter,
//! and when the response breaks off.

use std::io::Write;

use flate2::Compression;
use flate2::write::{GzDecoder, GzEncoder};

use crate::support::http2::Http2;
use crate::support::http2_server::Http2Server;
use crate::support::{Backend, Client, Driver, Server, Setup, with_each_driver};

with_each_driver!(
    filters_pass_on_received_bytes_at_a_pause,
    sub_filter_holds_back_a_possible_beginning_alone,
    gzip_passes_on_received_bytes_of_an_unbuffered_response,
    events_are_passed_on_at_once,
    events_are_passed_on_at_once_over_http2,
    events_on_their_way_to_a_cache_are_passed_on_at_once,
    other_protocols_pass_on_received_bytes,
    received_part_of_a_response_that_breaks_off_is_passed_on,
    a_compressed_response_is_read_ahead_of_a_slow_client,
);

const CHUNKED: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n";

fn chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n", text.len())
}

fn ask(client: &mut Client, target: &str) {
    client.send(format!("GET {target} HTTP/1.1\r\nHost: h\r\nAccept-Encoding: gzip\r\n\r\n"));
}

/// Reads chunks until the expected text is complete.
#[track_caller]
fn take_text(client: &mut Client, expected: &str) {
    let mut text = Vec::new();
    while text.len() < expected.len() {
        text.extend(client.chunk().expect("more of the body"));
    }
    assert_eq!(String::from_utf8_lossy(&text), expected);
}

/// The decompressed part of a gzip body.
struct Inflated(GzDecoder<Vec<u8>>);

impl Inflated {
    fn new() -> Inflated {
        Inflated(GzDecoder::new(Vec::new()))
    }

    /// Reads pieces until the expected text is complete.
    #[track_caller]
    fn take_text(&mut self, mut next: impl FnMut() -> Vec<u8>, expected: &str) {
        while self.0.get_ref().len() < expected.len() {
            self.0.write_all(&next()).expect("gzip");
            self.0.flush().expect("gzip");
        }
        assert_eq!(String::from_utf8_lossy(self.0.get_ref()), expected);
        self.0.get_mut().clear();
    }
}

fn filters_pass_on_received_bytes_at_a_pause(driver: Driver) {
    let backend = Backend::tcp();
    let setup = Setup::http(
        driver,
        "charset_map windows-1251 utf-8 { 41 41; } proxy_set_header Accept-Encoding \"\";
         server { listen %UNIX%;
         location / { proxy_pass http://ADDRESS; }
         location /sub { sub_filter a A; sub_filter_once off; proxy_pass http://ADDRESS; }
         location /charset { charset utf-8; override_charset on; proxy_pass http://ADDRESS; }
         location /ssi { ssi on; proxy_pass http://ADDRESS; }
         location /all { ssi on; sub_filter a A; sub_filter_once off; charset utf-8; override_charset on;
             add_after_body /after; proxy_pass http://ADDRESS; }
         location /after { return 200 after; } }",
    );
    let server = setup.replace("ADDRESS", backend.address()).start();
    for buffering in ["yes", "no"] {
        for (target, first, second) in [
            ("/", "one banana,", " two"),
            ("/sub", "one bAnAnA,", " two"),
            ("/charset", "one banana,", " two"),
            ("/ssi", "one banana,", " two"),
            ("/all", "one bAnAnA,", " two"),
        ] {
            let mut client = server.connect();
            ask(&mut client, target);
            let mut peer = backend.accept();
            peer.request();
            peer.send(format!(
                "{CHUNKED}Content-Type: text/html; charset=windows-1251\r\nX-Accel-Buffering: {buffering}\r\n\r\n{}",
                chunk("one banana,")
            ));
            assert_eq!(client.head().status, 200);
            take_text(&mut client, first);
            peer.send(chunk(" two"));
            take_text(&mut client, second);
            peer.send("0\r\n\r\n");
        }
    }
    server.stop();
}

fn sub_filter_holds_back_a_possible_beginning_alone(driver: Driver) {
    let backend = Backend::tcp();
    let setup = Setup::server(
        driver,
        "sub_filter abcd <1>; sub_filter cdefgh <2>; sub_filter_once off; location / { proxy_pass http://ADDRESS; }",
    );
    let server = setup.replace("ADDRESS", backend.address()).start();
    let mut client = server.connect();
    ask(&mut client, "/");
    let mut peer = backend.accept();
    peer.request();
    peer.send(format!("{CHUNKED}Content-Type: text/html\r\n\r\n"));
    client.head();
    for (piece, passed) in [
        ("xyz", "xyz"),
        ("xab", "x"),
        ("x", "abx"),
        ("abc", ""),
        ("dd", "<1>d"),
        ("xcdefg", "x"),
        ("h.", "<2>."),
        ("cdef", ""),
        ("!", "cdef!"),
    ] {
        peer.send(chunk(piece));
        if !passed.is_empty() {
            take_text(&mut client, passed);
        }
    }
    server.stop();
}

fn gzip_passes_on_received_bytes_of_an_unbuffered_response(driver: Driver) {
    let backend = Backend::tcp();
    let setup = Setup::server(
        driver,
        "gzip on; gzip_types *; gzip_min_length 0; gzip_proxied any;
         location /header { proxy_pass http://ADDRESS; }
         location /off { proxy_buffering off; proxy_pass http://ADDRESS; }",
    );
    let server = setup.replace("ADDRESS", backend.address()).start();
    for (target, fields) in [("/header", "X-Accel-Buffering: no\r\n"), ("/off", "")] {
        let mut client = server.connect();
        ask(&mut client, target);
        let mut peer = backend.accept();
        peer.request();
        peer.send(format!("{CHUNKED}{fields}\r\n{}", chunk("first")));
        assert_eq!(client.head().header("Content-Encoding"), Some("gzip"), "{target}");
        let mut inflated = Inflated::new();
        inflated.take_text(|| client.chunk().expect("more"), "first");
        peer.send(chunk("second"));
        inflated.take_text(|| client.chunk().expect("more"), "second");
        peer.send("0\r\n\r\n");
        while let Some(piece) = client.chunk() {
            inflated.0.write_all(&piece).expect("gzip");
        }
        inflated.0.try_finish().expect("a whole gzip stream");
    }
    server.stop();
}

const EVENTS: &str = "gzip on; gzip_types text/event-stream; gzip_min_length 0;
    location / { proxy_pass http://ADDRESS; }
    location /plain { gzip off; proxy_pass http://ADDRESS; }";

const TWO_EVENTS: [&str; 2] = ["event: a\ndata: 1\n\n", "data: 2\n\n"];

/// Begins a stream of events with the first one.
fn begin_events(peer: &mut Client, fields: &str) {
    peer.request();
    let type_ = "Content-Type: Text/Event-Stream; charset=utf-8\r\n";
    peer.send(format!("{CHUNKED}{type_}{fields}\r\n{}", chunk(TWO_EVENTS[0])));
}

fn events_are_passed_on_at_once(driver: Driver) {
    let backend = Backend::tcp();
    let server = Setup::server(driver, EVENTS).replace("ADDRESS", backend.address()).start();
    let mut client = server.connect();
    ask(&mut client, "/plain");
    let mut peer = backend.accept();
    begin_events(&mut peer, "");
    client.head();
    take_text(&mut client, TWO_EVENTS[0]);
    peer.send(chunk(TWO_EVENTS[1]));
    take_text(&mut client, TWO_EVENTS[1]);
    let mut client = server.connect();
    take_compressed_events(&mut client, &backend, "");
    server.stop();
}

#[track_caller]
fn take_compressed_events(client: &mut Client, backend: &Backend, fields: &str) {
    ask(client, "/");
    let mut peer = backend.accept();
    begin_events(&mut peer, fields);
    assert_eq!(client.head().header("Content-Encoding"), Some("gzip"));
    let mut inflated = Inflated::new();
    inflated.take_text(|| client.chunk().expect("more"), TWO_EVENTS[0]);
    peer.send(chunk(TWO_EVENTS[1]));
    inflated.take_text(|| client.chunk().expect("more"), TWO_EVENTS[1]);
}

fn events_are_passed_on_at_once_over_http2(driver: Driver) {
    let backend = Backend::tcp();
    let setup = Setup::server(driver, &format!("http2 on; {EVENTS}"));
    let server = setup.replace("ADDRESS", backend.address()).start();
    for target in ["/plain", "/"] {
        let mut client = Http2::unix(&server);
        let stream = client.begin("GET", target, &[("accept-encoding", "gzip")], true);
        let mut peer = backend.accept();
        begin_events(&mut peer, "");
        let mut inflated = Inflated::new();
        for event in TWO_EVENTS {
            if target == "/plain" {
                client.read_until(|client| client.answers.get(&stream).is_some_and(|answer| !answer.body.is_empty()));
                let body = std::mem::take(&mut client.answers.get_mut(&stream).expect("it has begun").body);
                assert_eq!(body, event.as_bytes());
            } else {
                let mut next = || {
                    client
                        .read_until(|client| client.answers.get(&stream).is_some_and(|answer| !answer.body.is_empty()));
                    std::mem::take(&mut client.answers.get_mut(&stream).expect("it has begun").body)
                };
                inflated.take_text(&mut next, event);
            }
            if event == TWO_EVENTS[0] {
                peer.send(chunk(TWO_EVENTS[1]));
            }
        }
    }
    server.stop();
}

fn events_on_their_way_to_a_cache_are_passed_on_at_once(driver: Driver) {
    let backend = Backend::tcp();
    let text = "proxy_cache_path %DIR%/cache keys_zone=zone:1m;
        server { listen %UNIX%; proxy_cache zone; add_header X-Cache $upstream_cache_status; EVENTS }";
    let setup = Setup::http(driver, &text.replace("EVENTS", EVENTS));
    let server = setup.replace("ADDRESS", backend.address()).start();
    let mut client = server.connect();
    take_compressed_events(&mut client, &backend, "Cache-Control: max-age=60\r\n");
    server.stop();
}

fn other_protocols_pass_on_received_bytes(driver: Driver) {
    let backend = Backend::tcp();
    let setup = Setup::server(
        driver,
        "gzip on; gzip_types text/event-stream; gzip_min_length 0;
         location /fastcgi { fastcgi_pass ADDRESS; }
         location /scgi { scgi_pass ADDRESS; }
         location /uwsgi { uwsgi_pass ADDRESS; }
         location /http2 { proxy_http_version 2; proxy_pass http://ADDRESS; }
         location /grpc { grpc_pass ADDRESS; }",
    );
    let server = setup.replace("ADDRESS", backend.address()).start();
    let head = "Status: 200 OK\r\nContent-Type: text/event-stream\r\n\r\n";
    let record = |text: &str| [&[1, 6, 0, 1, 0, text.len() as u8, 0, 0], text.as_bytes()].concat();
    for target in ["/fastcgi", "/scgi", "/uwsgi"] {
        let framed = |text: &str| if target == "/fastcgi" { record(text) } else { text.as_bytes().to_vec() };
        let mut client = server.connect();
        ask(&mut client, target);
        let mut peer = backend.accept();
        // Part of the request has arrived: the server need not read all of it to respond.
        peer.take(8);
        peer.send([framed(head), framed(TWO_EVENTS[0])].concat());
        expect_events(&mut client, target, || peer.send(framed(TWO_EVENTS[1])));
    }
    for target in ["/http2", "/grpc"] {
        let mut client = server.connect();
        ask(&mut client, target);
        let mut peer = Http2Server::accept(&backend);
        let stream = peer.request().stream;
        peer.respond(stream, 200, &[("content-type", "text/event-stream")], false);
        peer.send(stream, TWO_EVENTS[0].as_bytes(), false);
        expect_events(&mut client, target, || peer.send(stream, TWO_EVENTS[1].as_bytes(), false));
    }
    server.stop();
}

/// Checks that the client receives the first event, and the second one once it is sent.
#[track_caller]
fn expect_events(client: &mut Client, target: &str, send_second: impl FnOnce()) {
    assert_eq!(client.head().header("Content-Encoding"), Some("gzip"), "{target}");
    let mut inflated = Inflated::new();
    inflated.take_text(|| client.chunk().expect("more"), TWO_EVENTS[0]);
    send_second();
    inflated.take_text(|| client.chunk().expect("more"), TWO_EVENTS[1]);
}

fn received_part_of_a_response_that_breaks_off_is_passed_on(driver: Driver) {
    let backend = Backend::tcp();
    let setup = Setup::server(
        driver,
        "gzip_types *; gzip_min_length 0; sub_filter_types *; gunzip on;
         location /sub { sub_filter a A; sub_filter_once off; proxy_pass http://ADDRESS; }
         location /gzip { gzip on; proxy_pass http://ADDRESS; }
         location /gunzip { proxy_pass http://ADDRESS; }",
    );
    let server = setup.replace("ADDRESS", backend.address()).start();
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(b"unfinished").expect("memory");
    encoder.flush().expect("memory");
    let packed = encoder.get_ref();
    for (target, fields, sent, expected) in [
        ("/sub", "", &b"unfinished banana"[..], "unfinished bAnAnA"),
        ("/gzip", "", b"unfinished", "unfinished"),
        ("/gunzip", "Content-Encoding: gzip\r\n", packed, "unfinished"),
    ] {
        for framing in ["Content-Length: 1000\r\n", "Transfer-Encoding: chunked\r\n"] {
            let mut client = server.connect();
            let accepts = if target == "/gzip" { "Accept-Encoding: gzip\r\n" } else { "" };
            client.send(format!("GET {target} HTTP/1.1\r\nHost: h\r\n{accepts}\r\n"));
            let mut peer = backend.accept();
            peer.request();
            let beginning = if framing.starts_with('T') { "ff\r\n" } else { "" };
            let head = format!("HTTP/1.1 200 OK\r\nConnection: close\r\n{fields}{framing}\r\n{beginning}");
            // The whole response is there before the filter runs.
            peer.send([head.as_bytes(), sent].concat());
            peer.close_both();
            assert_eq!(client.head().status, 200, "{target}");
            if target == "/gzip" {
                Inflated::new().take_text(|| client.chunk().expect("more"), expected);
            } else {
                take_text(&mut client, expected);
            }
            let rest = client.read_to_end();
            assert_eq!(rest, b"", "{target}: no end of the body");
        }
    }
    server.stop();
}

fn a_compressed_response_is_read_ahead_of_a_slow_client(driver: Driver) {
    let length = 8 << 20;
    let backend = Backend::tcp();
    let text = "proxy_temp_path %DIR%/proxy; gzip on; gzip_types *; gzip_comp_level 1;
        server { listen %TCP%; location / { proxy_pass http://ADDRESS; } }";
    let server: Server = Setup::http(driver, text).replace("ADDRESS", backend.address()).start();
    let mut client = Client::tcp_with_small_buffer(server.directory.address(1));
    ask(&mut client, "/");
    let mut peer = backend.accept();
    peer.request();
    // Random bytes, which do not compress.
    let mut number = 1_u32;
    let mut next = || {
        number = number.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (number >> 24) as u8
    };
    let body: Vec<u8> = (0..length).map(|_| next()).collect();
    peer.send(format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"));
    peer.send(&body);
    // The whole response was read although the client reads nothing.
    peer.assert_closed();
    let response = client.response();
    let mut decoder = GzDecoder::new(Vec::new());
    decoder.write_all(&response.body).expect("gzip");
    assert!(decoder.finish().expect("gzip") == body);
    server.stop();
}
