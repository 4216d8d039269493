//! Request heads over real sockets: accepted forms, malformed ones, and requests hidden in others.

use rustix::process::Signal;

use crate::support::{Client, Driver, Response, Server, Setup, with_each_driver};

with_each_driver!(
    every_offence_is_answered_logged_and_closes,
    a_head_that_comes_byte_by_byte_means_the_same,
    other_protocols_get_400,
    a_request_in_a_broken_body_is_never_served,
    request_behind_a_broken_unread_body_is_never_served,
    chunk_larger_than_allowed_is_refused_before_its_bytes,
    a_hundred_requests_in_one_piece_are_answered_in_order,
    pipelined_requests_are_answered_with_one_call,
    pipelined_request_that_waits_lets_the_answers_before_it_leave,
    pipelined_request_that_closes_lets_the_answers_before_it_leave,
    pipelined_answers_that_the_client_does_not_take_are_all_kept,
    unread_pipelined_bodies_are_skipped,
    old_versions_are_spoken,
    connections_are_kept_as_the_version_and_the_client_say,
    the_target_may_be_absolute,
    paths_are_decoded_and_merged,
    odd_but_harmless_heads_are_understood,
    names_of_fields_follow_the_configuration,
    name_that_is_no_token_is_passed_over_or_refused,
    half_a_request_is_logged_when_the_client_leaves,
    a_client_that_does_not_finish_its_head_is_dropped,
    methods_without_meaning_here_are_refused,
);

/// A location that responds with the parsed parts of the request.
const ECHO: &str = "location / { return 200 \"$request_method|$uri|$args|$host|$server_protocol\"; }";

const LIMITS: &str = "client_header_buffer_size 256; large_client_header_buffers 2 512; max_headers 8;";

/// A head with a valid request line and Host, followed by `fields`.
fn get(fields: &str) -> String {
    format!("GET / HTTP/1.1\r\nHost: h\r\n{fields}\r\n")
}

/// Malformed requests, the status sent to the client, and the log message in nginx's words.
fn offences() -> Vec<(String, u16, &'static str)> {
    let long = "a".repeat(600);
    let line = |line: &str| format!("{line}\r\nHost: h\r\n\r\n");
    let many: String = (0..9).map(|number| format!("X-{number}: 1\r\n")).collect();
    let large: String = (0..6).map(|number| format!("X-{number}: {}\r\n", &long[..300])).collect();
    const METHOD: &str = "client sent invalid method while reading client request line";
    const REQUEST: &str = "client sent invalid request while reading client request line";
    const VERSION: &str = "client sent invalid version while reading client request line";
    const FIELD: &str = "client sent invalid header line: ";
    const LENGTH: &str = "client sent invalid \"Content-Length\" header";
    const CODING: &str = "client sent invalid \"Transfer-Encoding\" header";
    const CODING_UNKNOWN: &str = "client sent unknown \"Transfer-Encoding\": ";
    const HOST: &str = "client sent invalid host header";
    const TWICE: &str = "client sent duplicate header line: ";
    vec![
        // Request lines.
        (line("get / HTTP/1.1"), 400, METHOD),
        (line("GE\tT / HTTP/1.1"), 400, METHOD),
        (line("G@T / HTTP/1.1"), 400, METHOD),
        (line("GET"), 400, METHOD),
        (line(" GET / HTTP/1.1"), 400, METHOD),
        (line("GET / HTTP/1.12"), 400, REQUEST),
        (line("GET / HTTP/1.1x"), 400, REQUEST),
        (line("GET / HTTP/01.1"), 400, REQUEST),
        (line("GET / HTTP/1"), 400, REQUEST),
        (line("GET / HTTQ/1.1"), 400, REQUEST),
        (line("GET / http/1.1"), 400, REQUEST),
        (line("GET / x HTTP/1.1"), 400, REQUEST),
        (line("GET foo HTTP/1.1"), 400, REQUEST),
        (line("GET * HTTP/1.1"), 400, REQUEST),
        (line("GET /\0 HTTP/1.1"), 400, REQUEST),
        (line("GET /a\tb HTTP/1.1"), 400, REQUEST),
        (line("GET /a\rb HTTP/1.1"), 400, REQUEST),
        (line("GET /%00 HTTP/1.1"), 400, REQUEST),
        (line("GET /%zz HTTP/1.1"), 400, REQUEST),
        (line("GET /a% HTTP/1.1"), 400, REQUEST),
        (line("GET /.. HTTP/1.1"), 400, REQUEST),
        (line("GET /a/../../b HTTP/1.1"), 400, REQUEST),
        (line("GET /a/%2e%2e/%2E./b HTTP/1.1"), 400, REQUEST),
        (line("GET / HTTP/2.0"), 505, VERSION),
        (line("GET / HTTP/10.1"), 505, VERSION),
        (line(&format!("GET /{long} HTTP/1.1")), 414, "client sent too long URI"),
        (line(&long.to_uppercase()), 414, "client sent too long URI"),
        (line("GET http://h..st/ HTTP/1.1"), 400, "client sent invalid host in request line"),
        (line("GET http://host:65536/ HTTP/1.1"), 400, "client sent invalid host in request line"),
        // Fields.
        (get("no colon\r\n"), 400, FIELD),
        (get(": no name\r\n"), 400, FIELD),
        (get("Name : value\r\n"), 400, FIELD),
        (get("X: 1\r\n folded\r\n"), 400, FIELD),
        (get("X: a\0b\r\n"), 400, FIELD),
        (get("X: a\rb\r\n"), 400, FIELD),
        (get("X: \x1b[31m\r\n"), 400, FIELD),
        (get("Content_Length: 5\r\n"), 400, FIELD),
        (get("Transfer_Encoding: chunked\r\n"), 400, FIELD),
        (get("Transfer-Encoding\x0b: chunked\r\n"), 400, FIELD),
        (get(&format!("X: {long}\r\n")), 400, "client sent too long header line: "),
        (get(&large), 400, "client sent too large request"),
        (get(&many), 400, "client sent too many header lines"),
        // Hosts.
        ("GET / HTTP/1.1\r\n\r\n".into(), 400, "client sent HTTP/1.1 request without \"Host\" header"),
        (get("Host: h\r\n"), 400, "client sent duplicate host header: "),
        ("GET / HTTP/1.1\r\nHost:\r\n\r\n".into(), 400, HOST),
        ("GET / HTTP/1.1\r\nHost: a/b\r\n\r\n".into(), 400, HOST),
        ("GET / HTTP/1.1\r\nHost: a b\r\n\r\n".into(), 400, HOST),
        ("GET / HTTP/1.1\r\nHost: a:x\r\n\r\n".into(), 400, HOST),
        ("GET / HTTP/1.1\r\nHost: a..b\r\n\r\n".into(), 400, HOST),
        ("GET / HTTP/1.0\r\nHost: a@b\r\n\r\n".into(), 400, HOST),
        // Framing.
        (get("Content-Length: 1, 1\r\n"), 400, LENGTH),
        (get("Content-Length: +1\r\n"), 400, LENGTH),
        (get("Content-Length: -1\r\n"), 400, LENGTH),
        (get("Content-Length: 0x1\r\n"), 400, LENGTH),
        (get("Content-Length: 1 1\r\n"), 400, LENGTH),
        (get("Content-Length:\r\n"), 400, LENGTH),
        (get("Content-Length: 9223372036854775808\r\n"), 400, LENGTH),
        (get("Content-Length: 1\r\nContent-Length: 1\r\n"), 400, TWICE),
        (get("Content-Length: 1\r\ncontent-length: 2\r\n"), 400, TWICE),
        (get("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"), 400, TWICE),
        (get("Transfer-Encoding: chunked, chunked\r\n"), 400, CODING),
        (get("Transfer-Encoding: chunked, gzip\r\n"), 400, CODING),
        (get("Transfer-Encoding:\r\n"), 400, CODING),
        (get("Transfer-Encoding: ,chunked\r\n"), 400, CODING),
        (get("Transfer-Encoding: \"chunked\"\r\n"), 400, CODING),
        (get("Transfer-Encoding: gzip\r\n"), 501, CODING_UNKNOWN),
        (get("Transfer-Encoding: gzip, chunked\r\n"), 501, CODING_UNKNOWN),
        (get("Transfer-Encoding: xchunked\r\n"), 501, CODING_UNKNOWN),
        (get("Transfer-Encoding: identity\r\n"), 501, CODING_UNKNOWN),
        (
            get("Transfer-Encoding: chunked\r\nContent-Length: 5\r\n"),
            400,
            "client sent \"Content-Length\" and \"Transfer-Encoding\" headers at the same time",
        ),
        (
            "GET / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n".into(),
            400,
            "client sent HTTP/1.0 request with \"Transfer-Encoding\" header",
        ),
        (
            "CONNECT h:1 HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\n".into(),
            400,
            "client sent CONNECT request with body",
        ),
    ]
}

/// Checks for an error response that is the last on its connection.
#[track_caller]
fn assert_refused(client: &mut Client, request: &str, status: u16) {
    let response = client.response();
    assert_eq!(response.status, status, "{request:?}");
    assert_eq!(response.header("Connection"), Some("close"), "{request:?}");
    assert_eq!(response.header("Content-Type"), Some("text/html"), "{request:?}");
    client.assert_closed();
}

fn every_offence_is_answered_logged_and_closes(driver: Driver) {
    let server = Server::start(driver, &format!("{LIMITS} {ECHO}"));
    let offences = offences();
    for (request, status, _) in &offences {
        let mut client = server.connect();
        // A valid request follows each malformed one and must not be served.
        client.send(format!("{request}GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n"));
        assert_refused(&mut client, request, *status);
    }
    for (request, _, message) in &offences {
        let times = offences.iter().filter(|(_, _, other)| other == message).count();
        server.wait_logged_times(message, times);
        let log = server.log();
        assert_eq!(log.matches(message).count(), times, "{request:?}\n{log}");
    }
    assert!(!server.log().contains("/smuggled"));
    // A malformed request line is logged as received.
    server.wait_logged("reading client request line, client: unix:, server: , request: \"get / HTTP/1.1\"");
    server.directory.wait_line("access.log", "\"get / HTTP/1.1\" 400");
    server.stop();
}

fn a_head_that_comes_byte_by_byte_means_the_same(driver: Driver) {
    let server = Server::start(driver, &format!("{LIMITS} {ECHO}"));
    for (request, status, _) in offences() {
        let mut client = server.connect();
        // The server may have closed the connection long before the last byte.
        let _ = request.bytes().try_for_each(|byte| client.try_send([byte]));
        assert_refused(&mut client, &request, status);
    }
    let mut client = server.connect();
    let request = "POST /a%20b?c HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nhiGET / HTTP/1.1\r\nHost: h\r\n\r\n";
    request.bytes().for_each(|byte| client.send([byte]));
    assert_eq!(client.response().text(), "POST|/a b|c|h|HTTP/1.1");
    assert_eq!(client.response().text(), "GET|/||h|HTTP/1.1");
    server.stop();
}

fn other_protocols_get_400(driver: Driver) {
    let server = Server::start(driver, ECHO);
    let tls_hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03";
    let http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let ssh = b"SSH-2.0-OpenSSH_9.6\r\n";
    let noise: Vec<u8> = (0..2000_u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for garbage in [&tls_hello[..], http2, ssh, b"\0\0\0\0", b"\xff\xfe", &noise] {
        let mut client = server.connect();
        client.send(garbage);
        assert_refused(&mut client, &String::from_utf8_lossy(garbage), 400);
    }
    assert_eq!(server.get("/").status, 200);
    server.stop();
}

/// Bodies whose end is ambiguous between programs. Each is followed by a request that must not be served.
const BROKEN_CHUNKS: &[&str] = &[
    "5\nhello\r\n0\r\n\r\n",
    "5\r\nhello\n0\r\n\r\n",
    "5\r\nhello0\r\n\r\n",
    "5\r\nhelloX\r\n0\r\n\r\n",
    "5\r\nhello\r\n0\n\r\n",
    "5\r\nhello\r\n0\r\nX: y\n\r\n",
    "5\r\nhello\r\n0\r\nX y\r\n\r\n",
    "5\r\nhello\r\n0\r\nX: \0\r\n\r\n",
    "+5\r\nhello\r\n0\r\n\r\n",
    "-1\r\nhello\r\n0\r\n\r\n",
    "0x5\r\nhello\r\n0\r\n\r\n",
    " 5\r\nhello\r\n0\r\n\r\n",
    "5_\r\nhello\r\n0\r\n\r\n",
    "5;\nhello\r\n0\r\n\r\n",
    "5 \r\nhello\r\n0\r\n\r\n",
    "5\t;a=b\r\nhello\r\n0\r\n\r\n",
    "5;\r\nhello\r\n0\r\n\r\n",
    "5; \r\nhello\r\n0\r\n\r\n",
    "5;=b\r\nhello\r\n0\r\n\r\n",
    "5;a=\0\r\nhello\r\n0\r\n\r\n",
    "5\r\r\nhello\r\n0\r\n\r\n",
    "\r\n5\r\nhello\r\n0\r\n\r\n",
    ";\r\nhello\r\n0\r\n\r\n",
    "ffffffffffffffff\r\nhello\r\n0\r\n\r\n",
    "00000000000000005\r\nhello\r\n0\r\n\r\n",
    "g\r\nhello\r\n0\r\n\r\n",
];

fn chunked(path: &str, body: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n{body}")
}

const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n";

fn a_request_in_a_broken_body_is_never_served(driver: Driver) {
    let server = Server::start(driver, "location / { test_store_body; }");
    let long_extension = format!("5;{}\r\nhello\r\n0\r\n\r\n", "x".repeat(20_000));
    let long_trailer = format!("5\r\nhello\r\n0\r\nX: {}\r\n\r\n", "x".repeat(20_000));
    let extensions = "1;abcdefgh\r\nx\r\n".repeat(2_000) + "0\r\n\r\n";
    let bounded = [&*long_extension, &long_trailer, &extensions];
    for body in BROKEN_CHUNKS.iter().chain(&bounded) {
        let mut client = server.connect();
        client.send(chunked("/", body) + SMUGGLED);
        assert_refused(&mut client, &body[..body.len().min(40)], 400);
    }
    server.wait_logged_times("client sent invalid chunked body", BROKEN_CHUNKS.len() + bounded.len());
    assert!(!server.directory.read("access.log").contains("smuggled"));
    server.stop();
}

fn request_behind_a_broken_unread_body_is_never_served(driver: Driver) {
    let server = Server::start(driver, ECHO);
    for body in BROKEN_CHUNKS {
        let mut client = server.connect();
        client.send(chunked("/", body) + SMUGGLED);
        assert_eq!(client.response().status, 200, "{body:?}");
        client.assert_closed();
    }
    // The same with valid bodies: the next request is served.
    for body in ["0\r\n\r\n", "5\r\nhello\r\n0\r\n\r\n", "A;x=\"y\"\t\r\n0123456789\r\n000\r\nX: y\r\nZ:\r\n\r\n"] {
        let mut client = server.connect();
        client.send(chunked("/", body) + &get(""));
        assert_eq!(client.response().text(), "POST|/||h|HTTP/1.1", "{body:?}");
        assert_eq!(client.response().text(), "GET|/||h|HTTP/1.1", "{body:?}");
    }
    server.stop();
}

fn chunk_larger_than_allowed_is_refused_before_its_bytes(driver: Driver) {
    let server = Server::start(driver, "client_max_body_size 1k; location / { test_store_body; }");
    for body in ["401\r\n", "100000000\r\n", "7fffffffffffffff\r\n", "400\r\n"] {
        let mut client = server.connect();
        client.send(chunked("/", body));
        if body == "400\r\n" {
            // As many bytes as are allowed.
            client.send("x".repeat(1024) + "\r\n1\r\n");
        }
        assert_eq!(client.response().status, 413, "{body}");
    }
    server.stop();
}

fn a_hundred_requests_in_one_piece_are_answered_in_order(driver: Driver) {
    let setup = Setup::server(driver, "location / { return 200 $uri; } location /file/ { alias %DIR%/files/; }");
    let server = setup.file("files/a", "from a file").start();
    let paths: Vec<String> =
        (0..100).map(|number| if number % 3 == 0 { "/file/a".to_owned() } else { format!("/{number}") }).collect();
    let requests: String = paths.iter().map(|path| format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n")).collect();
    let mut client = server.connect();
    client.send(requests);
    for path in &paths {
        let response = client.response();
        let expected = if path == "/file/a" { "from a file" } else { path };
        assert_eq!((response.status, response.text()), (200, expected));
    }
    assert_eq!(client.get("/still").text(), "/still");
    server.stop();
}

fn pipelined_requests_are_answered_with_one_call(driver: Driver) {
    let text = "listen %TCP%; location / { return 200 $uri; } location /file/ { alias %DIR%/files/; }";
    let server = Setup::server(driver, text).file("files/a", "from a file").start();
    let mut client = server.connect_tcp(1);
    // From the second request on each call sends its own packet (`tcp_nodelay`).
    assert_eq!(client.get("/first").text(), "/first");
    for count in [2, 5, 15] {
        let before = client.packets_received();
        let paths: Vec<String> = (0..count).map(|number| format!("/{number}")).collect();
        client.send(paths.iter().map(|path| format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n")).collect::<String>());
        paths.iter().for_each(|path| assert_eq!(client.response().text(), path));
        // At most sixteen responses are sent together; earlier requests of the connection decide where a batch ends.
        let packets = client.packets_received() - before;
        assert!(packets <= 2, "{packets} packets for {count} answers");
        assert_eq!(client.get("/between").text(), "/between");
    }
    // Responses that cannot be part of a batch keep their place.
    client.send(
        "/a /file/a /b /file/missing /c"
            .split(' ')
            .map(|path| format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n"))
            .collect::<String>(),
    );
    for (status, text) in [(200, "/a"), (200, "from a file"), (200, "/b"), (404, ""), (200, "/c")] {
        let response = client.response();
        assert!(response.status == status && response.text().starts_with(text), "{response:?}");
    }
    server.stop();
}

fn pipelined_request_that_waits_lets_the_answers_before_it_leave(driver: Driver) {
    let text =
        "location / { return 200 $uri; } location /held { test_count_body held; } location /release { test_release; }";
    let server = Setup::server(driver, text).replace("worker_processes 2;", "worker_processes 1;").start();
    let mut client = server.connect();
    // The third request waits for the rest of its head.
    client.send(get("") + &get("") + "GET /third HTTP/1.1\r\n");
    (0..2).for_each(|_| assert_eq!(client.response().text(), "/"));
    client.send("Host: h\r\n\r\n");
    assert_eq!(client.response().text(), "/third");
    // The third request waits for its body.
    client.send(get("") + &get("") + "POST /held HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n");
    (0..2).for_each(|_| assert_eq!(client.response().text(), "/"));
    client.send("01234".to_owned() + &get(""));
    while server.get("/release").text() != "1 released" {}
    assert_eq!(client.response().status, 200);
    assert_eq!(client.response().text(), "/");
    server.stop();
}

fn pipelined_request_that_closes_lets_the_answers_before_it_leave(driver: Driver) {
    let text = "location / { return 200 $uri; } location /nothing { return 444; } location /panic { test_panic; }
                location /last { keepalive_timeout 0; return 200 last; }";
    let mut server = Server::start(driver, text);
    let closing = ["GET /nothing HTTP/1.1\r\nHost: h\r\n\r\n", "GET /panic HTTP/1.1\r\nHost: h\r\n\r\n"];
    for last in closing {
        let mut client = server.connect();
        client.send(get("") + &get("") + last + &get(""));
        (0..2).for_each(|_| assert_eq!(client.response().text(), "/", "{last}"));
        client.assert_closed();
    }
    for (last, status) in [("GET /last HTTP/1.1\r\nHost: h\r\n\r\n", 200), ("broken\r\n\r\n", 400)] {
        let mut client = server.connect();
        client.send(get("") + &get("") + last);
        (0..2).for_each(|_| assert_eq!(client.response().text(), "/", "{last}"));
        assert_eq!(client.response().status, status, "{last}");
        client.assert_closed();
    }
    // The client closes its side in the middle of a head.
    let mut client = server.connect();
    client.send(get("") + &get("") + "GET /half");
    client.finish_sending();
    (0..2).for_each(|_| assert_eq!(client.response().text(), "/"));
    client.assert_closed();
    // `stop` would complain about the alert that a panic logs.
    server.end(Signal::TERM);
}

fn pipelined_answers_that_the_client_does_not_take_are_all_kept(driver: Driver) {
    const ANSWERS: usize = 3000;
    let server = Server::start(
        driver,
        &format!("keepalive_requests 10000; listen %TCP%; location / {{ return 200 \"$uri {}\"; }}", "x".repeat(1000)),
    );
    for mut client in [server.connect(), server.connect_tcp(1)] {
        let requests: String =
            (0..ANSWERS).map(|number| format!("GET /{number} HTTP/1.1\r\nHost: h\r\n\r\n")).collect();
        let mut sender = client.sender();
        std::thread::scope(|scope| {
            scope.spawn(move || sender.send(requests));
            for number in 0..ANSWERS {
                let response = client.response();
                assert!(response.text().starts_with(&format!("/{number} x")), "{number}: {response:?}");
                assert_eq!(response.body.len(), 1002 + number.to_string().len());
                // Responses to other clients do not wait for the full sockets.
                if number % 1000 == 0 {
                    (0..20).for_each(|_| assert_eq!(server.get("/other").status, 200));
                }
            }
        });
    }
    server.stop();
}

fn unread_pipelined_bodies_are_skipped(driver: Driver) {
    let server = Server::start(driver, &format!("client_max_body_size 0; {ECHO}"));
    let body = "GET /smuggled HTTP/1.1\r\n\r\n".repeat(3000);
    let mut client = server.connect();
    let length = body.len();
    let counted = format!("POST /counted HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n\r\n{body}");
    client.send(counted + &chunked("/chunked", &format!("{length:x}\r\n{body}\r\n0\r\n\r\n")) + &get(""));
    assert_eq!(client.response().text(), "POST|/counted||h|HTTP/1.1");
    assert_eq!(client.response().text(), "POST|/chunked||h|HTTP/1.1");
    assert_eq!(client.response().text(), "GET|/||h|HTTP/1.1");
    server.stop();
}

fn old_versions_are_spoken(driver: Driver) {
    let server = Server::start(driver, ECHO);
    // HTTP/0.9: no head; the response ends with the connection.
    let mut client = server.connect();
    client.send("GET /a?b\r\n");
    assert_eq!(client.read_to_end(), b"GET|/a|b||");
    let mut client = server.connect();
    client.send("POST /a\r\n");
    let page = String::from_utf8(client.read_to_end()).expect("a page");
    assert!(page.starts_with("<html>") && page.contains("400 Bad Request"), "{page}");
    server.wait_logged("client sent invalid method in HTTP/0.9 request");

    let mut client = server.connect();
    let response = client.ask("GET /a HTTP/1.0\r\n\r\n");
    assert_eq!((response.status, response.text()), (200, "GET|/a|||HTTP/1.0"));
    client.assert_closed();
    // A request line without a version is the whole request, whatever follows it and however it is split.
    let request = "GET /a?b\r\nHost: h\r\n\r\nGET /second HTTP/1.1\r\nHost: h\r\n\r\n";
    let mut whole = server.connect();
    whole.send(request);
    assert_eq!(whole.read_to_end(), b"GET|/a|b||");
    let mut pieces = server.connect();
    for byte in request.bytes() {
        if pieces.try_send([byte]).is_err() {
            break;
        }
    }
    assert_eq!(pieces.read_to_end(), b"GET|/a|b||");
    // Later minor versions are treated as HTTP/1.1 (RFC 9110 §2.5).
    assert_eq!(server.connect().ask("GET /a HTTP/1.9\r\nHost: h\r\n\r\n").status, 200);
    server.stop();
}

fn connections_are_kept_as_the_version_and_the_client_say(driver: Driver) {
    let server = Server::start(driver, ECHO);
    let cases = [
        ("HTTP/1.0", "", false),
        ("HTTP/1.0", "Connection: keep-alive\r\n", true),
        ("HTTP/1.0", "Connection: Keep-Alive, TE\r\n", true),
        ("HTTP/1.0", "Connection: keep-alive\r\nConnection: close\r\n", false),
        ("HTTP/1.1", "", true),
        ("HTTP/1.1", "Connection: keep-alive\r\n", true),
        ("HTTP/1.1", "Connection: close\r\n", false),
        ("HTTP/1.1", "Connection: CLOSE\r\n", false),
        ("HTTP/1.1", "Connection: keep-alive, close\r\n", false),
        ("HTTP/1.1", "Connection: x-close\r\n", true),
    ];
    for (version, fields, is_kept) in cases {
        let mut client = server.connect();
        let request = format!("GET / {version}\r\nHost: h\r\n{fields}\r\n");
        let response = client.ask(&request);
        let connection = if is_kept { "keep-alive" } else { "close" };
        assert_eq!(response.header("Connection"), Some(connection), "{request:?}");
        match is_kept {
            true => assert_eq!(client.ask(&request).status, 200, "{request:?}"),
            false => client.assert_closed(),
        }
    }
    server.stop();
}

fn the_target_may_be_absolute(driver: Driver) {
    let server = Server::start(driver, ECHO);
    let ask = |line: &str| server.connect().ask(format!("{line}\r\nHost: other\r\n\r\n"));
    let text = |line: &str| ask(line).text().to_owned();
    // The target takes precedence over Host (RFC 9112 §3.2.2).
    assert_eq!(text("GET http://Name.Example:80/a/b?c=d HTTP/1.1"), "GET|/a/b|c=d|name.example|HTTP/1.1");
    assert_eq!(text("GET http://name.example HTTP/1.1"), "GET|/||name.example|HTTP/1.1");
    assert_eq!(text("GET HTTPS://name.example/ HTTP/1.1"), "GET|/||name.example|HTTP/1.1");
    assert_eq!(text("GET http://name.example?q HTTP/1.1"), "GET|/|q|name.example|HTTP/1.1");
    assert_eq!(text("GET http://[::1]:8080/ HTTP/1.1"), "GET|/||[::1]|HTTP/1.1");
    // HTTP/1.1 requires Host even then.
    assert_eq!(server.connect().ask("GET http://a/ HTTP/1.1\r\n\r\n").status, 400);
    server.stop();
}

fn paths_are_decoded_and_merged(driver: Driver) {
    let server = Server::start(driver, "location / { return 200 $uri|$request_uri; }");
    let cases = [
        ("/a%2Fb%41", "/a/bA"),
        ("//a///b", "/a/b"),
        ("/a/./b/../c", "/a/c"),
        ("/a/b/..", "/a/"),
        ("/a/.", "/a/"),
        ("/%2e%2e%2fa/../b", ""),
        ("/a+b%20c?d%20e", "/a+b c"),
        ("/a;b=c", "/a;b=c"),
        // A fragment is rejected: servers disagree on whether it is part of the path.
        ("/a#b", ""),
        ("/a?b#c", ""),
    ];
    for (target, uri) in cases {
        let response = server.get(target);
        match uri {
            "" => assert_eq!(response.status, 400, "{target}"),
            _ => assert_eq!(response.text(), format!("{uri}|{target}")),
        }
    }
    server.stop();
    let server = Server::start(driver, "merge_slashes off; location / { return 200 $uri; }");
    assert_eq!(server.get("//a///b").text(), "//a///b");
    server.stop();
}

fn odd_but_harmless_heads_are_understood(driver: Driver) {
    let server = Server::start(driver, ECHO);
    let ask = |request: &str| server.connect().ask(request).text().to_owned();
    assert_eq!(ask("\r\n\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n"), "GET|/||h|HTTP/1.1");
    assert_eq!(ask("\nGET / HTTP/1.1\nHost: h\n\n"), "GET|/||h|HTTP/1.1");
    assert_eq!(ask("GET   /   HTTP/1.1  \r\nHost: h\r\n\r\n"), "GET|/||h|HTTP/1.1");
    assert_eq!(ask("GET / HTTP/1.1\r\nhOsT:\t h.Example.:81 \t\r\n\r\n"), "GET|/||h.example|HTTP/1.1");
    assert_eq!(ask("M-SEARCH / HTTP/1.1\r\nHost: h\r\n\r\n"), "M-SEARCH|/||h|HTTP/1.1");
    assert_eq!(ask("GET /\u{fc} HTTP/1.1\r\nHost: h\r\nX: \u{fc}\r\n\r\n"), "GET|/\u{fc}||h|HTTP/1.1");
    // One extra line end after a body is skipped, a flood of them is not.
    let mut client = server.connect();
    client.send("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nhi\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!((client.response().status, client.response().status), (200, 200));
    let mut client = server.connect();
    client.send("\r\n".repeat(100));
    assert_refused(&mut client, "empty lines", 400);
    server.stop();
}

fn names_of_fields_follow_the_configuration(driver: Driver) {
    let location = "location / { return 200 \"$http_x_a|$http_x_b\"; }";
    let request = "GET / HTTP/1.1\r\nHost: h\r\nX_A: 1\r\nX.B: 2\r\nX-B: 3\r\n\r\n";
    let cases = [
        ("", Ok("|3")),
        ("underscores_in_headers on;", Ok("1|3")),
        ("ignore_invalid_headers off;", Ok("1|3")),
        ("ignore_invalid_headers off; underscores_in_headers on;", Ok("1|3")),
    ];
    for (settings, expected) in cases {
        let server = Server::start(driver, &format!("{settings} {location}"));
        let response = server.connect().ask(request);
        let answer: Result<&str, u16> = if response.status == 200 { Ok(response.text()) } else { Err(response.status) };
        assert_eq!(answer, expected, "{settings}");
        if settings.is_empty() {
            server.wait_logged("client sent invalid header line: \"X_A: 1\"");
        }
        server.stop();
    }
}

fn name_that_is_no_token_is_passed_over_or_refused(driver: Driver) {
    for (settings, status) in [("", 200), ("ignore_invalid_headers off;", 400)] {
        let server = Server::start(driver, &format!("{settings} return 200;"));
        for name in ["X-Bad{", "X/y", "X\u{e4}", "{"] {
            let response = server.connect().ask(format!("GET / HTTP/1.1\r\nHost: h\r\n{name}: 1\r\n\r\n"));
            assert_eq!(response.status, status, "{settings} {name}");
        }
        server.stop();
    }
}

fn half_a_request_is_logged_when_the_client_leaves(driver: Driver) {
    let server = Server::start(driver, ECHO);
    let cases = [
        ("GET /half", "client prematurely closed connection while reading client request line"),
        ("GET /half HTTP/1.1\r\nHost:", "client prematurely closed connection while reading client request headers"),
    ];
    for (half, message) in cases {
        let mut client = server.connect();
        client.send(half);
        client.finish_sending();
        client.assert_closed();
        server.wait_logged(message);
    }
    // A client that sends nothing, or whose requests were answered, is not logged.
    let mut client = server.connect();
    assert_eq!(client.get("/").status, 200);
    client.finish_sending();
    client.assert_closed();
    drop(server.connect());
    assert_eq!(server.get("/").status, 200);
    assert_eq!(server.log().matches("prematurely").count(), cases.len());
    server.stop();
}

fn a_client_that_does_not_finish_its_head_is_dropped(driver: Driver) {
    let server = Server::start(driver, &format!("client_header_timeout 1s; {ECHO}"));
    let mut silent = server.connect();
    // The timeout runs from the time the connection was accepted.
    let connect_with = |half: &str| {
        let mut client = server.connect();
        client.send(half);
        client
    };
    let mut clients = ["GET /", "GET / HTTP/1.1\r\nHost: h\r\n", "\r\n"].map(connect_with);
    clients.iter_mut().for_each(Client::assert_closed);
    silent.assert_closed();
    server.wait_logged("client timed out (110: Connection timed out) while reading client request line, client:");
    server.directory.wait_line("access.log", "\"GET /\" 408 0");
    server.wait_logged("client timed out (110: Connection timed out) while reading client request headers");
    server.directory.wait_line("access.log", "\"GET / HTTP/1.1\" 408 0");
    server.stop();
}

fn methods_without_meaning_here_are_refused(driver: Driver) {
    let server = Server::start(driver, ECHO);
    let cases = ["TRACE / HTTP/1.1", "CONNECT h:443 HTTP/1.1"];
    for line in cases {
        let mut client = server.connect();
        let response: Response = client.ask(format!("{line}\r\nHost: h\r\n\r\n"));
        assert_eq!((response.status, response.header("Connection")), (405, Some("close")), "{line}");
        client.assert_closed();
    }
    server.wait_logged("client sent TRACE method");
    server.wait_logged("client sent CONNECT method");
    // `OPTIONS *` asks for options of the whole server, which has none.
    assert_eq!(server.connect().ask("OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n").status, 405);
    server.stop();
}
