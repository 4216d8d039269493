//! Request bodies over real sockets: with a length and chunked, read, stored, echoed, or left unread.
//! Nearly all tests need handlers of `test_hooks.rs`.

use crate::support::{self, Backend, Client, Driver, Response, Server, Setup, SmallDisk, with_each_driver};

with_each_driver!(
    bodies_are_stored_in_memory_or_in_a_file,
    bodies_are_in_a_file_where_no_memory_is_for_them,
    a_client_that_expects_100_is_told_to_go_on,
    no_100_is_sent_for_an_unwanted_body,
    bodies_larger_than_allowed_are_refused_by_their_length,
    bodies_larger_than_allowed_are_refused_while_they_come,
    a_client_that_stops_sending_gets_408,
    a_client_that_leaves_in_its_body_is_logged,
    unread_bodies_are_skipped,
    an_unread_body_that_does_not_come_closes_the_connection,
    a_body_is_sent_back_while_it_is_still_coming,
    trailers_of_a_request_reach_the_handler,
    much_passes_both_ways_at_once,
    an_answer_breaks_off_when_the_body_does,
    early_hints_come_before_the_answer,
    early_hints_do_not_stand_in_for_100,
    a_body_that_cannot_be_kept_gets_500,
    a_body_that_the_disk_has_no_room_for_gets_500_and_leaves_nothing,
    bodies_may_be_kept_in_files_with_names,
    a_body_may_be_read_before_anything_else,
    a_body_that_was_read_is_there_for_variables,
    body_that_is_passed_on_as_it_comes_is_there_for_variables,
    levels_of_directories_hold_the_files_of_bodies,
    behind_a_broken_head_is_no_body,
);

/// FNV-1a of 64 bits, as reported by `test_store_body`.
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

/// A chunked request with chunks of `size` bytes.
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
    // Body files are unlinked.
    let left: Vec<_> = std::fs::read_dir(server.directory.path().join("body")).expect("made").collect();
    assert!(left.is_empty(), "{left:?}");
    server.stop();
}

fn bodies_are_in_a_file_where_no_memory_is_for_them(driver: Driver) {
    let server = Server::start(driver, "client_body_buffer_size 0; location / { test_store_body; }");
    let mut client = server.connect();
    for length in [1, 4096, 100_000] {
        let body = pattern(length);
        let expected = format!("{length} file {:016x}", checksum(&body));
        assert_eq!(client.ask(counted("/", &body)).text(), expected, "counted");
        assert_eq!(client.ask(chunked("/", &body, 1000)).text(), expected, "in chunks");
    }
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
    // HTTP/1.0 has no 100, and a request without a body has nothing to continue with.
    let old = "POST / HTTP/1.0\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\nhello";
    assert_eq!(server.connect().ask(old).status, 200);
    assert_eq!(client.ask(post("/", "Expect: 100-continue\r\n")).status, 200);
    server.stop();
}

fn no_100_is_sent_for_an_unwanted_body(driver: Driver) {
    let server = Server::start(driver, "location / { return 200 hello; } location /small { client_max_body_size 1; }");
    for (path, status) in [("/", 200), ("/small", 413)] {
        let mut client = server.connect();
        let response = client.ask(post(path, "Content-Length: 5\r\nExpect: 100-continue\r\n"));
        // The client may send the body or not: the connection is not used again.
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
        // A location's limit applies before its handler runs, but not before the location is found.
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
        "client_max_body_size 1k; location / { test_store_body; } \
         location /page { test_store_body; error_page 413 /too; }
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
    // The late rest of the body is not taken for the next request.
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

fn unread_bodies_are_skipped(driver: Driver) {
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
    // A body with a GET, and one with a method that static files do not support.
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
        "location / { lingering_timeout 200ms; return 200 text; } \
         location /long { lingering_time 200ms; return 200 text; }",
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
        // The head arrives before any of the body.
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
    // In HTTP/1.0 the end of the connection ends the body.
    let mut client = server.connect();
    let response = client.ask("POST / HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 5\r\n\r\nhello");
    assert_eq!((response.text(), response.header("Connection")), ("hello", Some("close")));
    client.assert_closed();
    server.stop();
}

fn trailers_of_a_request_reach_the_handler(driver: Driver) {
    let locations = "location / { test_echo; } location /slow { limit_rate 1m; test_echo; }
        location /more { add_trailer X-Own own; test_echo; } location /stored { test_store_body; }";
    let server = Server::start(driver, locations);
    let mut client = server.connect();
    let trailers = "x-SUM: 1\r\nContent-Length: 7\r\nX-Sum:\t2 3 \r\n";
    let request = |path| post(path, "Transfer-Encoding: chunked\r\n") + "5\r\nhello\r\n0\r\n" + trailers + "\r\n";
    let sent =
        [("x-SUM", "1"), ("Content-Length", "7"), ("X-Sum", "2 3")].map(|(name, value)| (name.into(), value.into()));
    for path in ["/", "/slow", "/more"] {
        client.send(request(path));
        let head = client.head();
        // Trailers are not merged into the head.
        assert_eq!((head.status, head.header("Content-Length"), head.header("X-Sum")), (200, None, None), "{path}");
        assert_eq!((client.chunk().as_deref(), client.chunk()), (Some(&b"hello"[..]), None), "{path}");
        let mut expected: Vec<(String, String)> = sent.to_vec();
        expected.extend((path == "/more").then(|| ("X-Own".to_owned(), "own".to_owned())));
        assert_eq!(client.take_fields(), expected, "{path}");
    }
    // A handler without use for trailers gets the body, and the next request is found after them.
    assert!(client.ask(request("/stored")).text().starts_with("5 memory "));
    assert_eq!(client.ask(counted("/", b"again")).text(), "again");
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
        // Without the last chunk the client sees that the answer is incomplete.
        let rest = client.read_to_end();
        assert!(!rest.ends_with(b"0\r\n\r\n"), "{body:?}: {}", String::from_utf8_lossy(&rest));
    }
    server.wait_logged_times("the response ended prematurely", broken.len());
    server.stop();
}

#[track_caller]
fn assert_hints(response: &Response) {
    assert_eq!((response.status, response.header("Link")), (103, Some("</style.css>; rel=preload")));
}

fn early_hints_come_before_the_answer(driver: Driver) {
    let setup = Setup::server(
        driver,
        "root %DIR%/files; early_hints $arg_none 0 $http_host; location /file { test_early_hints; }
         location /echo { test_early_hints; test_echo; } location /off { early_hints 0 $arg_none; test_early_hints; }",
    );
    let server = setup.file("files/file", "contents").start();
    let mut client = server.connect();
    client.send("GET /file HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_hints(&client.response());
    assert_eq!(client.response().text(), "contents");
    client.send(counted("/echo", b"hello"));
    assert_hints(&client.response());
    assert_eq!(client.response().text(), "hello");
    assert_eq!(client.get("/off").status, 404);
    // HTTP/1.0 has no interim responses.
    assert_eq!(server.connect().ask("GET /file HTTP/1.0\r\n\r\n").text(), "contents");
    server.stop();
}

fn early_hints_do_not_stand_in_for_100(driver: Driver) {
    let server = Server::start(driver, "early_hints 1; location / { test_early_hints; test_store_body; }");
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

fn a_body_that_the_disk_has_no_room_for_gets_500_and_leaves_nothing(driver: Driver) {
    let server = Server::start(
        driver,
        "client_max_body_size 0; client_body_buffer_size 1k; client_body_temp_path %DIR%/bodies;
         location / { test_store_body; } location /named { client_body_in_file_only on; test_store_body; }",
    );
    let path = server.directory.path().join("bodies");
    let Some(disk) = SmallDisk::mount(&path, 256) else { return server.stop() };
    for location in ["/", "/named"] {
        let mut client = server.connect();
        let mut sender = client.sender();
        // The server may close before it has received everything.
        let sending = std::thread::spawn(move || sender.try_send(counted(location, &pattern(1 << 20))));
        let response = client.response();
        assert_eq!((response.status, response.header("Connection")), (500, Some("close")), "{location}");
        client.read_to_end();
        let _ = sending.join().expect("no panic");
    }
    server.wait_logged_times("failed (28: No space left on device)", 2);
    let files = || std::fs::read_dir(&path).expect("still mounted").count();
    server.directory.wait_until("the files are removed", |_| files() == 0);
    // There is room again.
    assert_eq!(server.connect().ask(counted("/", &pattern(100_000))).status, 200);
    drop(disk);
    server.stop();
}

fn bodies_may_be_kept_in_files_with_names(driver: Driver) {
    let server = Setup::server(
        driver,
        "location / { client_body_in_file_only on; test_store_body; }
         location /clean { client_body_in_file_only clean; test_store_body; }",
    )
    .replace(
        "client_body_temp_path",
        "log_format file $request_body_file; access_log %DIR%/files file; client_body_temp_path",
    )
    .start();
    let mut client = server.connect();
    let expected = |body: &[u8]| format!("{} file {:016x}", body.len(), checksum(body));
    for body in [&b"hello"[..], &pattern(100_000), b""] {
        for path in ["/", "/clean"] {
            assert_eq!(client.ask(counted(path, body)).text(), expected(body));
        }
    }
    assert_eq!(client.ask(chunked("/", b"chunks", 2)).text(), expected(b"chunks"));
    // Without a body there is no file.
    assert_eq!(client.get("/").text(), format!("0 memory {:016x}", checksum(b"")));
    let has_all =
        |directory: &support::Directory| directory.try_read("files").is_some_and(|log| log.lines().count() == 8);
    server.directory.wait_until("eight lines", has_all);
    let log = server.directory.read("files");
    let names: Vec<&str> = log.lines().collect();
    assert_eq!((names.len(), names[7]), (8, "-"));
    for (name, body) in
        [(names[0], &b"hello"[..]), (names[2], &pattern(100_000)), (names[4], b""), (names[6], b"chunks")]
    {
        assert!(std::fs::read(name).expect("it stays") == body, "{name}");
    }
    let is_gone = |name: &str| !std::path::Path::new(name).exists();
    server.directory.wait_until("the others are removed", |_| [1, 3, 5].iter().all(|&index| is_gone(names[index])));
    // A requested temporary file causes no warning.
    let (log, told) = (server.log(), "is buffered to a temporary file");
    assert_eq!(log.matches(told).count(), 7, "{log}");
    assert!(log.lines().filter(|line| line.contains(told)).all(|line| line.contains("[notice]")), "{log}");
    server.stop();
}

fn a_body_may_be_read_before_anything_else(driver: Driver) {
    let server = Setup::http(
        driver,
        "log_format body '$uri <$request_body>';
         server { listen %UNIX%; access_log %DIR%/bodies.log body; client_body_early_read 0 $arg_early;
                  client_max_body_size 100; client_body_buffer_size 10; root %DIR%;
                  location /file { } location /answer { return 200 ok; } location /stored { test_store_body; } }",
    )
    .start();
    let mut client = server.connect();
    assert_eq!(client.ask(counted("/answer?early=1", b"hello")).text(), "ok");
    assert_eq!(
        client.ask(counted("/stored?early=1", b"stored")).text(),
        format!("6 memory {:016x}", checksum(b"stored"))
    );
    assert_eq!(client.ask(counted("/answer?early=0", b"unread")).text(), "ok");
    assert_eq!(client.ask(counted("/answer?early=1", &pattern(50))).text(), "ok");
    let log = |number: usize| server.directory.read("bodies.log").lines().nth(number).unwrap_or_default().to_owned();
    server.directory.wait_until("four lines", |_| !log(3).is_empty());
    let expected = ["/answer <hello>", "/stored <stored>", "/answer <->", "/answer <->"];
    assert_eq!([log(0), log(1), log(2), log(3)], expected);
    // The first is refused by its length, the other one during reading.
    for request in [counted("/answer?early=1", &pattern(101)), chunked("/answer?early=1", &pattern(101), 50)] {
        assert_eq!(server.connect().ask(request).status, 413);
    }
    server.wait_logged("client intended to send too large body: 101 bytes");
    server.wait_logged("client intended to send too large chunked body");
    server.stop();
}

fn a_body_that_was_read_is_there_for_variables(driver: Driver) {
    let server = Server::start(
        driver,
        "client_body_early_read 1; client_body_buffer_size 64k; error_page 404 =200 /page;
         location = /page { return 200 <$request_body>; } location = /length { return 200 <$content_length>; }
         location /single { client_body_in_single_buffer on; return 404; }",
    );
    let mut client = server.connect();
    let body = vec![b'x'; 40_000];
    let expected = [b"<", &body[..], b">"].concat();
    for request in [counted("/missing", &body), chunked("/missing", &body, 1000), counted("/single", &body)] {
        assert!(client.ask(request).body == expected);
    }
    assert_eq!(client.get("/missing").text(), "<>");
    for request in [counted("/length", &body), chunked("/length", &body, 1000)] {
        assert_eq!(client.ask(request).text(), "<40000>");
    }
    assert_eq!(client.get("/length").text(), "<>");
    server.stop();
}

fn body_that_is_passed_on_as_it_comes_is_there_for_variables(driver: Driver) {
    let backend = Backend::tcp().serve(|asked, client| {
        let status = if asked.target == "/missing" { "404 Not Found" } else { "200 OK" };
        client.send(format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n"));
        true
    });
    let text = format!(
        "log_format body '$uri <$request_body>';
         server {{ listen %UNIX%; access_log %DIR%/bodies.log body; client_body_buffer_size 10;
                   proxy_request_buffering off; proxy_intercept_errors on; error_page 404 =200 /page;
                   location / {{ proxy_pass http://{}; add_header X-Body <$request_body>; }}
                   location = /page {{ return 200 <$request_body>; }} }}",
        backend.address
    );
    let server = Setup::http(driver, &text).start();
    let mut client = server.connect();
    let body = |response: &Response| response.header("X-Body").map(str::to_owned);
    assert_eq!(body(&client.ask(counted("/a", b"0123456789"))).as_deref(), Some("<0123456789>"));
    assert_eq!(body(&client.ask(chunked("/a", b"01234567", 3))).as_deref(), Some("<01234567>"));
    // The variable is empty if the body exceeds the buffer or is in a file; each request has its own.
    assert_eq!(body(&client.ask(counted("/a", b"0123456789a"))).as_deref(), Some("<>"));
    assert_eq!(body(&client.ask(counted("/a", b""))).as_deref(), Some("<>"));
    assert_eq!(client.ask(counted("/missing", b"hello")).text(), "<hello>");
    server.directory.wait_line("bodies.log", "/page <hello>");
    server.stop();
}

fn levels_of_directories_hold_the_files_of_bodies(driver: Driver) {
    let server = Server::start(
        driver,
        "client_body_temp_path %DIR%/levels 1 2; client_body_in_file_only on; location / { test_store_body; }",
    );
    assert_eq!(server.connect().ask(counted("/", b"hello")).status, 200);
    let log = server.wait_logged("a client request body is buffered to a temporary file");
    let path = log.split("temporary file ").nth(1).and_then(|rest| rest.split(',').next()).expect("a path");
    let root = server.directory.path().join("levels");
    let digits = path.rsplit('/').next().expect("a name");
    assert_eq!(digits.len(), 10, "{path}");
    let expected = root.join(&digits[9..]).join(&digits[7..9]).join(digits);
    assert_eq!(std::path::Path::new(path), expected);
    assert_eq!(std::fs::read(path).expect("it is kept"), b"hello");
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
