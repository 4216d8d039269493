//! Bodies of requests over real sockets: counted and in chunks, read, stored, sent back, or left unread.
//! Nearly all of it needs handlers that only debug builds have.
#![cfg(debug_assertions)]

mod support;

use support::{Client, Driver, Response, Server, Setup, with_each_driver};

with_each_driver!(
    bodies_are_stored_in_memory_or_in_a_file,
    a_client_that_expects_100_is_told_to_go_on,
    a_client_that_expects_100_is_not_told_when_nobody_wants_the_body,
    bodies_larger_than_allowed_are_refused_by_their_length,
    bodies_larger_than_allowed_are_refused_while_they_come,
    a_client_that_stops_sending_gets_408,
    a_client_that_leaves_in_its_body_is_logged,
    bodies_that_nobody_reads_are_passed_over,
    an_unread_body_that_does_not_come_closes_the_connection,
    a_body_is_sent_back_while_it_is_still_coming,
    much_passes_both_ways_at_once,
    an_answer_breaks_off_when_the_body_does,
    early_hints_come_before_the_answer,
    early_hints_do_not_stand_in_for_100,
    a_body_that_cannot_be_kept_gets_500,
    behind_a_broken_head_is_no_body,
);

/// 64 bits of FNV-1a, as `test_store_body` tells.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length as u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn post(path: &str, fields: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nHost: h\r\n{fields}\r\n")
}

fn counted(path: &str, body: &[u8]) -> Vec<u8> {
    [post(path, &format!("Content-Length: {}\r\n", body.len())).as_bytes(), body].concat()
}

/// In chunks of `size` bytes.
fn chunked(path: &str, body: &[u8], size: usize) -> Vec<u8> {
    let mut request = post(path, "Transfer-Encoding: chunked\r\n").into_bytes();
    for chunk in body.chunks(size) {
        request.extend(format!("{:X}\r\n", chunk.len()).bytes());
        request.extend(chunk);
        request.extend(b"\r\n");
    }
    request.extend(b"0\r\n\r\n");
    request
}

fn bodies_are_stored_in_memory_or_in_a_file(driver: Driver) {
    let server =
        Server::start(driver, "client_max_body_size 0; client_body_buffer_size 10k; location / { test_store_body; }");
    let mut client = server.connect();
    for length in [0, 1, 4095, 10 * 1024, 10 * 1024 + 1, 100_000, 3 << 20] {
        let body = pattern(length);
        let place = if length > 10 * 1024 { "file" } else { "memory" };
        let expected = format!("{length} {place} {:016x}", checksum(&body));
        assert_eq!(client.ask(counted("/", &body)).text(), expected, "counted");
        assert_eq!(client.ask(chunked("/", &body, 7 + length / 100)).text(), expected, "in chunks of some size");
        if length <= 4095 {
            assert_eq!(client.ask(chunked("/", &body, 1)).text(), expected, "in chunks of one byte");
        }
    }
    server.wait_logged("a client request body is buffered to a temporary file");
    // Files of bodies have no name any more.
    let left: Vec<_> = std::fs::read_dir(server.directory.path().join("body")).expect("made").collect();
    assert!(left.is_empty(), "{left:?}");
    server.stop();
}

fn a_client_that_expects_100_is_told_to_go_on(driver: Driver) {
    let server = Server::start(driver, "location / { test_store_body; }");
    let mut client = server.connect();
    for fields in ["Content-Length: 5\r\n", "Transfer-Encoding: chunked\r\n"] {
        client.send(post("/", &format!("{fields}Expect: 100-Continue\r\n")));
        let response = client.response();
        assert_eq!((response.status, response.headers.len()), (100, 0));
        client.send(if fields.contains("chunked") { "5\r\nhello\r\n0\r\n\r\n" } else { "hello" });
        let response = client.response();
        assert_eq!((response.status, response.header("Connection")), (200, Some("keep-alive")));
        assert!(response.text().starts_with("5 memory"));
    }
    // HTTP/1.0 knows no 100, and without a body there is nothing to go on with.
    let old = "POST / HTTP/1.0\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\nhello";
    assert_eq!(server.connect().ask(old).status, 200);
    assert_eq!(client.ask(post("/", "Expect: 100-continue\r\n")).status, 200);
    server.stop();
}

fn a_client_that_expects_100_is_not_told_when_nobody_wants_the_body(driver: Driver) {
    let server = Server::start(driver, "location / { return 200 hello; } location /small { client_max_body_size 1; }");
    for (path, status) in [("/", 200), ("/small", 413)] {
        let mut client = server.connect();
        let response = client.ask(post(path, "Content-Length: 5\r\nExpect: 100-continue\r\n"));
        // It may send the body or not: the connection is of no further use.
        assert_eq!((response.status, response.header("Connection")), (status, Some("close")));
        client.assert_closed();
    }
    server.stop();
}

#[track_caller]
fn assert_too_large(client: &mut Client) {
    let response = client.response();
    assert_eq!((response.status, response.header("Connection")), (413, Some("close")));
    client.assert_closed();
}

fn bodies_larger_than_allowed_are_refused_by_their_length(driver: Driver) {
    let server = Server::start(
        driver,
        "client_max_body_size 1k; location / { return 200 unread; } location /file { }
         location /large { client_max_body_size 2k; test_store_body; }
         location /any { client_max_body_size 0; test_store_body; }",
    );
    for length in ["1025", "9223372036854775807"] {
        let mut client = server.connect();
        client.send(post("/", &format!("Content-Length: {length}\r\n")));
        // What is said of a location holds before it answers, but not before it is found.
        assert_too_large(&mut client);
        server.wait_logged(&format!("client intended to send too large body: {length} bytes"));
    }
    // A client that sends all of it before it reads gets its answer, too.
    let mut client = server.connect();
    client.send(counted("/file", &pattern(1 << 20)));
    assert_too_large(&mut client);
    let mut client = server.connect();
    assert_eq!(client.ask(counted("/", &pattern(1024))).status, 200);
    assert_eq!(client.ask(counted("/large", &pattern(2048))).status, 200);
    assert_eq!(client.ask(counted("/any", &pattern(1 << 20))).status, 200);
    server.stop();
}

fn bodies_larger_than_allowed_are_refused_while_they_come(driver: Driver) {
    let server = Server::start(
        driver,
        "client_max_body_size 1k; location / { test_store_body; } location /page { test_store_body; error_page 413 /too; }
         location /too { return 413 sorry; }",
    );
    let mut client = server.connect();
    assert_eq!(client.ask(chunked("/", &pattern(1024), 100)).status, 200);
    client.send(chunked("/", &pattern(100_000), 100));
    assert_too_large(&mut client);
    server.wait_logged("client intended to send too large chunked body: over");
    let mut client = server.connect();
    client.send(chunked("/page", &pattern(2000), 2000));
    let response = client.response();
    assert_eq!((response.status, response.text(), response.header("Connection")), (413, "sorry", Some("close")));
    client.assert_closed();
    server.stop();
}

fn a_client_that_stops_sending_gets_408(driver: Driver) {
    let server = Server::start(driver, "client_body_timeout 200ms; location / { test_store_body; }");
    let mut client = server.connect();
    client.send(post("/", "Content-Length: 5\r\n") + "hel");
    let response = client.response();
    assert_eq!((response.status, response.header("Connection")), (408, Some("close")));
    // What comes too late is not the next request.
    client.send("loGET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n");
    client.assert_closed();
    server.wait_logged("client timed out");
    assert!(!server.directory.read("access.log").contains("smuggled"));
    server.stop();
}

fn a_client_that_leaves_in_its_body_is_logged(driver: Driver) {
    let server = Server::start(driver, "location / { test_store_body; }");
    let beginnings =
        [post("/", "Content-Length: 5\r\n") + "hel", post("/", "Transfer-Encoding: chunked\r\n") + "5\r\nhel"];
    for beginning in &beginnings {
        let mut client = server.connect();
        client.send(beginning);
        client.finish_sending();
        client.read_to_end();
    }
    server.wait_logged_times("client prematurely closed connection", beginnings.len());
    server.stop();
}

fn bodies_that_nobody_reads_are_passed_over(driver: Driver) {
    let setup = Setup::server(
        driver,
        "client_max_body_size 0; root %DIR%/files; location /text { return 200 text; } error_page 405 /page;",
    );
    let server = setup.file("files/page", "a page").start();
    let mut client = server.connect();
    let body = pattern(2 << 20);
    for request in [counted("/text", &body), chunked("/text", &body, 5000)] {
        assert_eq!(client.ask(request).text(), "text");
        assert_eq!(client.get("/page").text(), "a page");
    }
    // A body with a GET, and one with a method that the file does not know.
    let length = format!("GET /page HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n", body.len());
    assert_eq!(client.ask([length.as_bytes(), &body].concat()).text(), "a page");
    let response = client.ask(counted("/page", &body));
    assert_eq!((response.status, response.text()), (405, "a page"));
    assert_eq!(client.get("/page").text(), "a page");
    server.stop();
}

fn an_unread_body_that_does_not_come_closes_the_connection(driver: Driver) {
    let server = Server::start(
        driver,
        "location / { lingering_timeout 200ms; return 200 text; } location /long { lingering_time 200ms; return 200 text; }",
    );
    for path in ["/", "/long"] {
        let mut client = server.connect();
        client.send(post(path, "Content-Length: 5\r\n") + "hel");
        assert_eq!(client.response().text(), "text");
        client.assert_closed();
    }
    server.stop();
}

fn a_body_is_sent_back_while_it_is_still_coming(driver: Driver) {
    let server = Server::start(driver, "location / { test_echo; }");
    let mut client = server.connect();
    for fields in ["Transfer-Encoding: chunked\r\n", "Content-Length: 50\r\n"] {
        let is_chunked = fields.starts_with("Transfer");
        client.send(post("/", fields));
        // The head comes before any of the body.
        let head = client.head();
        assert_eq!((head.status, head.header("Transfer-Encoding")), (200, Some("chunked")));
        for number in 0..10 {
            let piece = format!("{number:05}");
            client.send(if is_chunked { format!("5\r\n{piece}\r\n") } else { piece.clone() });
            assert_eq!(client.chunk().as_deref(), Some(piece.as_bytes()));
        }
        if is_chunked {
            client.send("0\r\n\r\n");
        }
        assert_eq!(client.chunk(), None);
        assert!(client.take_fields().is_empty());
    }
    // HTTP/1.0 sees the end of the body by the end of the connection.
    let mut client = server.connect();
    let response = client.ask("POST / HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 5\r\n\r\nhello");
    assert_eq!((response.text(), response.header("Connection")), ("hello", Some("close")));
    client.assert_closed();
    server.stop();
}

fn much_passes_both_ways_at_once(driver: Driver) {
    let server = Server::start(driver, "client_max_body_size 0; location / { test_echo; }");
    let body = pattern(4 << 20);
    for request in [counted("/", &body), chunked("/", &body, 1000)] {
        let mut client = server.connect();
        let mut sender = client.sender();
        let sending = std::thread::spawn(move || sender.send(request));
        assert!(client.response().body == body);
        sending.join().expect("sent");
        assert_eq!(client.ask(counted("/", b"again")).text(), "again");
    }
    server.stop();
}

fn an_answer_breaks_off_when_the_body_does(driver: Driver) {
    let server = Server::start(driver, "client_max_body_size 10; client_body_timeout 200ms; location / { test_echo; }");
    let broken = ["5\r\nhelloX", "5\r\nhello\r\nx", "5\r\nhello\r\n", "5\r\nhello\r\n6\r\nabcdef\r\n0\r\n\r\n"];
    for body in broken {
        let mut client = server.connect();
        client.send(post("/", "Transfer-Encoding: chunked\r\n") + body);
        assert_eq!(client.head().status, 200, "{body:?}");
        assert_eq!(client.chunk().as_deref(), Some(&b"hello"[..]), "{body:?}");
        // No last chunk: the client sees that the answer is not whole.
        let rest = client.read_to_end();
        assert!(!rest.ends_with(b"0\r\n\r\n"), "{body:?}: {}", String::from_utf8_lossy(&rest));
    }
    server.wait_logged_times("the response broke off", broken.len());
    server.stop();
}

#[track_caller]
fn assert_hints(response: &Response) {
    assert_eq!((response.status, response.header("Link")), (103, Some("</style.css>; rel=preload")));
}

fn early_hints_come_before_the_answer(driver: Driver) {
    let setup = Setup::server(
        driver,
        "root %DIR%/files; location /file { test_early_hints; } location /echo { test_early_hints; test_echo; }",
    );
    let server = setup.file("files/file", "contents").start();
    let mut client = server.connect();
    client.send("GET /file HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_hints(&client.response());
    assert_eq!(client.response().text(), "contents");
    client.send(counted("/echo", b"hello"));
    assert_hints(&client.response());
    assert_eq!(client.response().text(), "hello");
    // HTTP/1.0 knows no interim responses.
    assert_eq!(server.connect().ask("GET /file HTTP/1.0\r\n\r\n").text(), "contents");
    server.stop();
}

fn early_hints_do_not_stand_in_for_100(driver: Driver) {
    let server = Server::start(driver, "location / { test_early_hints; test_store_body; }");
    let mut client = server.connect();
    client.send(post("/", "Content-Length: 5\r\nExpect: 100-continue\r\n"));
    assert_hints(&client.response());
    assert_eq!(client.response().status, 100);
    client.send("hello");
    assert_eq!(client.response().status, 200);
    server.stop();
}

fn a_body_that_cannot_be_kept_gets_500(driver: Driver) {
    let server = Server::start(
        driver,
        "client_body_buffer_size 1k; client_body_temp_path %DIR%/bodies; location / { test_store_body; }",
    );
    std::fs::remove_dir(server.directory.path().join("bodies")).expect("made at the start");
    server.directory.write("bodies", "a file, not a directory");
    let mut client = server.connect();
    client.send(counted("/", &pattern(100_000)));
    let response = client.response();
    assert_eq!((response.status, response.header("Connection")), (500, Some("close")));
    client.assert_closed();
    server.wait_logged("[crit]");
    assert_eq!(server.connect().ask(counted("/", b"small")).status, 200);
    server.stop();
}

fn behind_a_broken_head_is_no_body(driver: Driver) {
    let server = Server::start(driver, "error_page 400 /stored; location /stored { test_store_body; }");
    let mut client = server.connect();
    client.send(post("/", "Content-Length: 5\r\nContent-Length: 5\r\n") + "hello");
    let response = client.response();
    assert_eq!((response.status, response.text()), (400, &*format!("0 memory {:016x}", checksum(b""))));
    client.assert_closed();
    server.stop();
}
