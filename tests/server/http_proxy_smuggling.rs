//! Request smuggling: the bytes that an upstream server receives, compared with those that the client has sent. A
//! malformed request is rejected, or passed on in a form that can be read in one way only; how the bytes are split into
//! segments makes no difference.

#[path = "../../crates/protocol/tests/shared/requests.rs"]
mod requests;

use std::sync::{Arc, Mutex};

use gale_protocol::http1::{ChunkedDecoder, HeadParser, Limits, Status};
use gale_protocol::request::{Framing, RequestHead};
use requests::{
    BROKEN_LINES, DANGEROUS_LINES, RIGHT_CHUNKS, UNKNOWN_CODINGS, WRONG_CHUNKS, WRONG_CODINGS, WRONG_HOSTS,
    WRONG_LENGTHS, WRONG_TARGET_HOSTS, WRONG_TRAILERS, WRONG_VERSIONS,
};

use crate::support::{Backend, Client, Driver, Server, Serving, Setup, with_each_driver};

with_each_driver!(
    malformed_requests_are_refused_or_passed_on_in_one_form,
    odd_chunks_are_passed_on_in_the_usual_form,
    a_change_to_h2c_is_not_passed_on,
    one_host_is_passed_on_with_any_fields_of_the_client,
);

/// A request inside a body, which must never be treated as one.
const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n";
/// Follows the request under test and closes the connection.
const LAST: &str = "GET /last HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";

/// Ways to split the bytes that are sent.
#[derive(Clone, Copy, Debug)]
enum Split {
    Whole,
    Bytes,
    /// In pieces of random sizes from this seed.
    Random(u64),
}

const SPLITS: [Split; 4] = [Split::Whole, Split::Bytes, Split::Random(1), Split::Random(2)];

/// A backend that records the bytes it receives, and responds with the target.
struct Recorder {
    serving: Serving,
    records: Arc<Mutex<Vec<u8>>>,
}

impl Recorder {
    /// Each connection ends after one request, so that the records are in the order of the requests.
    fn start() -> Recorder {
        let records = Arc::<Mutex<Vec<u8>>>::default();
        let own = Arc::clone(&records);
        let serving = Backend::tcp().serve(move |asked, client| {
            own.lock().expect("no panic").extend_from_slice(client.record());
            let (head, body) = ("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length:", &asked.target);
            client.send(format!("{head} {}\r\n\r\n{body}", body.len()));
            false
        });
        Recorder { serving, records }
    }

    fn take(&self) -> Vec<u8> {
        std::mem::take(&mut *self.records.lock().expect("no panic"))
    }
}

/// A request as the strict parser reads it.
#[derive(Debug, PartialEq, Eq)]
struct Read {
    target: String,
    body: Vec<u8>,
}

/// Parses a record; each of its bytes has to belong to one request.
#[track_caller]
fn read_strictly(mut record: &[u8]) -> Vec<Read> {
    let mut all = Vec::new();
    while !record.is_empty() {
        let shown = || record.escape_ascii().to_string();
        let mut head = RequestHead::default();
        // Names with underscores are passed on if the configuration allows them.
        let limits = Limits { underscores_in_headers: true, ignore_invalid_headers: false, ..Limits::default() };
        let parsed = HeadParser::new().parse(record, &limits, &mut head);
        let Ok(Status::Complete { consumed }) = parsed else { panic!("{parsed:?}: {}", shown()) };
        assert!(!record[..consumed].windows(2).any(|pair| pair[1] == b'\n' && pair[0] != b'\r'), "{}", shown());
        let target = String::from_utf8_lossy(head.target_range.of(record)).into_owned();
        let (mut body, mut rest) = (Vec::new(), &record[consumed..]);
        match head.framing {
            Framing::None => {}
            Framing::Length(length) => {
                let (own, next) = rest.split_at(usize::try_from(length).expect("little"));
                (body, rest) = (own.to_vec(), next);
            }
            Framing::Chunked => {
                let mut decoder = ChunkedDecoder::default();
                while !decoder.is_finished() {
                    let decoded = decoder.decode(rest).unwrap_or_else(|error| panic!("{error}: {}", shown()));
                    assert!(decoded.consumed > 0, "{}", shown());
                    body.extend_from_slice(decoded.data.map_or(&[][..], |range| &rest[range]));
                    rest = &rest[decoded.consumed..];
                }
                let trailers = decoder.take_trailers();
                assert!(trailers.fields.is_empty(), "{}", shown());
            }
        }
        all.push(Read { target, body });
        record = rest;
    }
    all
}

/// Sends the bytes in pieces until the server stops reading, and returns the statuses and bodies of its responses.
fn exchange(server: &Server, bytes: &[u8], split: Split) -> Vec<(u16, String)> {
    let mut client = server.connect();
    let mut rest = bytes;
    let mut state = match split {
        Split::Random(seed) => seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ bytes.len() as u64,
        _ => 0,
    };
    while !rest.is_empty() {
        let length = match split {
            Split::Whole => rest.len(),
            Split::Bytes => 1,
            Split::Random(_) => {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                1 + (state >> 33) as usize % 40
            }
        };
        let (piece, next) = rest.split_at(length.min(rest.len()));
        if client.try_send(piece).is_err() {
            break;
        }
        rest = next;
    }
    answers(&mut client)
}

fn answers(client: &mut Client) -> Vec<(u16, String)> {
    let mut answers = Vec::new();
    while !client.is_at_end() {
        let response = client.response();
        if response.status >= 200 {
            let text = if response.status == 200 { response.text().to_owned() } else { String::new() };
            answers.push((response.status, text));
        }
    }
    answers
}

/// A backend and a proxy server whose block contains `more`.
fn start(driver: Driver, more: &str) -> (Recorder, Server) {
    let recorder = Recorder::start();
    let setup = Setup::server(
        driver,
        "MORE client_max_body_size 100k; client_header_timeout 20s; client_body_timeout 20s; lingering_timeout 100ms;
         location / { proxy_pass http://ADDRESS; }",
    );
    let server = setup.replace("MORE", more).replace("ADDRESS", &recorder.serving.address).start();
    (recorder, server)
}

const CONFIGURATIONS: [&str; 3] =
    ["", "proxy_request_buffering off;", "underscores_in_headers on; ignore_invalid_headers off;"];

/// Malformed requests of every kind.
fn malformed() -> Vec<String> {
    let mut all = Vec::new();
    for line in BROKEN_LINES.iter().chain(WRONG_VERSIONS).chain(WRONG_TARGET_HOSTS) {
        all.push(format!("{line}\r\nHost: a\r\n\r\n"));
    }
    all.extend(WRONG_HOSTS.iter().map(|host| format!("GET /first HTTP/1.1\r\nHost: {host}\r\n\r\n")));
    let lengths = WRONG_LENGTHS.iter().map(|value| format!("Content-Length: {value}"));
    let codings = UNKNOWN_CODINGS.iter().chain(WRONG_CODINGS).map(|value| format!("Transfer-Encoding: {value}"));
    let others = [
        "X: a\r\n b",
        "X: a\r\n\tTransfer-Encoding: chunked",
        "Content-Length: 5\r\nContent-Length: 5",
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 5",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        "Host: b",
        "Connection: Content-Length",
        "Connection: Transfer-Encoding, close\r\nX: y",
        "Connection: keep-alive, Host",
        "Trailer: Content-Length",
        "TE: trailers, chunked",
        "Expect: 100-continue, x",
        "X-Foo_Bar: 1",
        "x.y: 1",
        "Transfer_Encoding: chunked",
        "content_length: 3",
        "Transfer-Encoding:\tchunked",
        "Content-Length:\t0003",
        "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nConnection: Upgrade, HTTP2-Settings",
        "X: \u{e9}\u{85}\u{a0}",
        "Content-Length: \u{ff15}",
    ];
    let lines = DANGEROUS_LINES.iter().map(|line| (*line).to_owned());
    for line in lines.chain(lengths).chain(codings).chain(others.map(str::to_owned)) {
        let head = format!("POST /first HTTP/1.1\r\nHost: a\r\n{line}\r\n");
        let (length, chunk) = (SMUGGLED.len(), format!("{:x}\r\n{SMUGGLED}\r\n0\r\n\r\n", SMUGGLED.len()));
        all.push(format!("{head}Content-Length: {length}\r\n\r\n{SMUGGLED}"));
        all.push(format!("{head}Transfer-Encoding: chunked\r\n\r\n{chunk}"));
        all.push(format!("POST /first HTTP/1.1\r\nContent-Length: {length}\r\n{line}\r\nHost: a\r\n\r\n{SMUGGLED}"));
        all.push(format!("POST /first HTTP/1.0\r\nHost: a\r\n{line}\r\nContent-Length: {length}\r\n\r\n{SMUGGLED}"));
        all.push(format!("GET /first HTTP/1.1\r\nHost: a\r\n{line}\r\n\r\n"));
    }
    let head = "POST /first HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
    all.extend(WRONG_CHUNKS.iter().map(|body| format!("{head}{body}")));
    all.extend(WRONG_CHUNKS.iter().map(|body| format!("{head}3\r\nabc\r\n{body}")));
    all.extend(WRONG_TRAILERS.iter().map(|trailers| format!("{head}3\r\nabc\r\n0\r\n{trailers}\r\n\r\n")));
    all
}

fn malformed_requests_are_refused_or_passed_on_in_one_form(driver: Driver) {
    let malformed = malformed();
    for more in CONFIGURATIONS {
        let (recorder, server) = start(driver, more);
        let streams = more.contains("buffering off");
        for request in &malformed {
            let bytes = format!("{request}{LAST}");
            let mut first = None;
            for split in SPLITS {
                let answers = exchange(&server, bytes.as_bytes(), split);
                let shown = || format!("{request:?} {split:?} with {more:?}: {answers:?}");
                assert!(!answers.is_empty(), "{}", shown());
                // No response follows an error after which the end of the request is uncertain.
                let statuses: Vec<u16> = answers.iter().map(|(status, _)| *status).collect();
                let refused = statuses.iter().position(|status| *status != 200);
                let is_last = refused.is_none_or(|at| at + 1 == statuses.len() || statuses[at] == 502);
                assert!(is_last, "{}", shown());
                let record = recorder.take();
                let read = read_strictly(&record);
                let targets: Vec<&str> = read.iter().map(|read| &*read.target).collect();
                let answered: Vec<&str> =
                    answers.iter().filter(|(status, _)| *status == 200).map(|(_, text)| &**text).collect();
                assert_eq!(targets, answered, "{}", shown());
                assert!(!targets.contains(&"/smuggled"), "{}", shown());
                // A streamed body that is rejected in its middle may have been sent in part.
                let seen = (statuses, record);
                match &first {
                    None => first = Some(seen),
                    Some(first) if !streams => assert_eq!(&seen, first, "{}", shown()),
                    Some((first, _)) => assert_eq!(&seen.0, first, "{}", shown()),
                }
            }
        }
        server.stop();
    }
}

fn odd_chunks_are_passed_on_in_the_usual_form(driver: Driver) {
    for more in CONFIGURATIONS {
        let (recorder, server) = start(driver, more);
        for (body, data) in RIGHT_CHUNKS {
            let fields = "Transfer-Encoding: chunked\r\nTrailer: X-Trailer\r\nTE: trailers\r\n";
            let request = format!("POST /first HTTP/1.1\r\nHost: a\r\n{fields}\r\n{body}{LAST}");
            for split in SPLITS {
                let answers = exchange(&server, request.as_bytes(), split);
                assert_eq!(answers, [(200, "/first".to_owned()), (200, "/last".to_owned())], "{body:?} {split:?}");
                let record = recorder.take();
                let read = read_strictly(&record);
                assert_eq!(read.len(), 2, "{body:?} {split:?}");
                assert_eq!(read[0].body, data.as_bytes(), "{body:?} {split:?}");
                // Neither extensions nor trailers are passed on.
                assert!(!record.contains(&b';') && !record.windows(9).any(|text| text == b"Trailer: "), "{body:?}");
            }
        }
        server.stop();
    }
}

fn a_change_to_h2c_is_not_passed_on(driver: Driver) {
    let three = "proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection $http_connection;
        proxy_set_header HTTP2-Settings $http_http2_settings;";
    for more in ["", "proxy_request_buffering off;", three] {
        let (recorder, server) = start(driver, more);
        for (upgrade, connection) in [
            ("h2c", "Upgrade, HTTP2-Settings"),
            ("H2C", "upgrade"),
            ("websocket, h2c", "Upgrade"),
            ("h2c,websocket", "HTTP2-Settings, Upgrade"),
            (" \th2c\t", "Upgrade"),
            ("h2c", "keep-alive"),
        ] {
            let fields = format!("Upgrade: {upgrade}\r\nHTTP2-Settings: AAMAAABk\r\nConnection: {connection}\r\n");
            let preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
            let request = format!("GET /first HTTP/1.1\r\nHost: a\r\n{fields}\r\n{preface}");
            for split in SPLITS {
                let answers = exchange(&server, request.as_bytes(), split);
                let refused = answers.get(1).is_some_and(|(status, _)| (400..600).contains(status));
                assert!(answers[0] == (200, "/first".to_owned()) && refused, "{fields:?}: {answers:?}");
                let record = String::from_utf8(recorder.take()).expect("text").to_ascii_lowercase();
                assert!(!record.contains("h2c") && !record.contains("http2-settings:"), "{record:?}");
                assert!(!record.contains("\r\nupgrade:") && !record.contains("pri *"), "{record:?}");
                assert!(!record.contains("connection: upgrade"), "{record:?}");
            }
        }
        server.stop();
    }
}

fn one_host_is_passed_on_with_any_fields_of_the_client(driver: Driver) {
    let set = ["", "proxy_set_header Host $host;", "proxy_set_header Host $http_host;"];
    for more in set {
        let (recorder, server) = start(driver, more);
        for (request, host, http_host) in [
            ("GET /first HTTP/1.1\r\nHost: A.example:81\r\n\r\n", "a.example", "A.example:81"),
            ("GET http://b.example/first HTTP/1.1\r\nHost: a.example\r\n\r\n", "b.example", "a.example"),
            ("GET /first HTTP/1.0\r\n\r\n", "", ""),
        ] {
            let answers = exchange(&server, format!("{request}{LAST}").as_bytes(), Split::Whole);
            assert_eq!(answers[0], (200, "/first".to_owned()), "{request:?}");
            let record = String::from_utf8(recorder.take()).expect("text");
            let read = read_strictly(record.as_bytes());
            assert_eq!(read.len(), answers.len());
            let first = &record[..record.find("\r\n\r\n").expect("an end")];
            let hosts: Vec<&str> = first.lines().filter_map(|line| line.strip_prefix("Host: ")).collect();
            let expected = if more.contains("$host") {
                host
            } else if more.contains("$http_host") {
                http_host
            } else {
                ""
            };
            let expected = if expected.is_empty() { &*recorder.serving.address } else { expected };
            assert_eq!(hosts, [expected], "{request:?} {more}");
        }
        server.stop();
    }
}
