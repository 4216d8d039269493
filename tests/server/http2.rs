//! HTTP/2: requests and answers, limits and ends of connections, and hostile clients.

use gale_protocol::http2::frame::MAX_31;
use gale_protocol::http2::{ErrorCode, Limits};
use rustix::process::Signal;

use crate::support::authority::Authority;
use crate::support::http2::{GET, Http2, block, flag, frame, frame_type};
use crate::support::tls::Tls;
use crate::support::{self, Backend, Driver, Server, Setup, descriptor_limit, skip, turn_of_crowds, with_each_driver};

with_each_driver!(
    requests_in_the_clear_are_answered_and_logged,
    server_named_by_a_handshake_decides_the_offered_protocols,
    a_preface_where_http2_is_off_is_a_bad_request,
    many_requests_at_once_get_their_own_answers,
    files_are_whole_with_any_windows,
    bodies_are_passed_on_with_their_trailers,
    a_client_that_expects_100_is_told_to_continue,
    unwanted_body_is_discarded_until_its_window_is_used_up,
    malformed_rest_of_an_answered_request_resets_its_stream,
    preface_in_the_clear_counts_at_a_socket_that_also_has_tls,
    requests_of_a_client_that_has_gone_reach_no_server,
    client_that_has_gone_is_noticed_behind_a_full_buffer,
    body_that_ends_with_its_connection_is_whole,
    location_with_line_ends_is_the_same_in_all_versions,
    status_that_was_sent_is_logged,
    a_closed_window_holds_one_stream_alone_and_not_for_ever,
    reset_stream_ends_its_request,
    a_client_that_leaves_in_the_middle_of_files_leaves_nothing_behind,
    urgent_responses_go_first,
    a_connection_ends_in_two_steps_and_loses_no_request,
    an_address_that_is_gone_ends_its_connections_in_two_steps,
    a_connection_ends_behind_its_last_request_or_when_it_is_idle,
    request_that_could_be_smuggled_reaches_no_upstream,
    websockets_are_upgrades_for_the_servers_behind,
    the_log_line_of_a_websocket_has_the_values_that_its_response_had,
    a_client_certificate_is_asked_for_by_name,
    floods_end_only_their_own_connection,
    a_window_of_one_byte_is_a_flood_when_it_lasts,
    thousands_of_connections_with_an_idle_stream_each_cost_little_memory,
    directives_are_checked_and_obsolete_ones_accepted,
);

/// A server on `%UNIX%` that speaks HTTP/2.
fn setup(driver: Driver, text: &str) -> Setup {
    Setup::server(driver, &format!("http2 on;\n{text}"))
}

/// A server that passes requests on to a backend over HTTP/1.
fn proxy(driver: Driver, backend: &Backend, text: &str) -> Server {
    setup(driver, &format!("location / {{ proxy_pass http://{}; {text} }}", backend.address())).start()
}

fn requests_in_the_clear_are_answered_and_logged(driver: Driver) {
    let server = Setup::http(
        driver,
        "log_format own '$request|$status|$server_protocol|$http2|$connection_requests|$request_length|$bytes_sent|\
         $body_bytes_sent|$request_completion|$sent_http_connection';
         access_log %DIR%/own.log own;
         server { listen %UNIX%; http2 on; root %DIR%; add_header X-Name $host;
                  location /text { return 200 \"hello $server_protocol $arg_a\"; }
                  location /moved { return 301 /x; } }",
    )
    .file("page.html", "a page")
    .start();
    let mut client = Http2::unix(&server);
    let answer = client.get("/text?a=b");
    assert_eq!((answer.status, answer.text()), (200, "hello HTTP/2.0 b"));
    assert_eq!((answer.header("content-length"), answer.header("x-name")), (Some("16"), Some("localhost")));
    assert!(answer.header("server").is_some() && answer.header("date").is_some());
    assert_eq!(answer.header("connection"), None);
    let page = client.get("/page.html");
    assert_eq!((page.status, page.text(), page.header("content-type")), (200, "a page", Some("text/html")));
    let stream = client.begin("HEAD", "/page.html", &[], true);
    let head = client.answer(stream);
    assert_eq!((head.status, head.header("content-length"), head.body.len()), (200, Some("6"), 0));
    let tag = page.header("etag").expect("a file has one").to_owned();
    let stream = client.begin("GET", "/page.html", &[("if-none-match", &tag)], true);
    assert_eq!(client.answer(stream).status, 304);
    let stream = client.begin("GET", "/page.html", &[("range", "bytes=2-3")], true);
    let part = client.answer(stream);
    assert_eq!((part.status, part.text()), (206, "pa"));
    assert_eq!(client.get("/moved").header("location"), Some("http://localhost/x"));
    assert_eq!(client.get("/missing").status, 404);
    let line = server.directory.wait_line("own.log", "/text");
    let fields: Vec<&str> = line.split('|').collect();
    assert_eq!(fields[..5], ["GET /text?a=b HTTP/2.0", "200", "HTTP/2.0", "h2c", "1"]);
    let numbers: Vec<u64> = fields[5..8].iter().map(|field| field.parse().unwrap()).collect();
    // Size of the compressed field block.
    assert!((16..40).contains(&numbers[0]) && numbers[1] > 16 + 9 && numbers[2] == 16, "{line}");
    assert_eq!(fields[8], "OK");
    server.directory.wait_line("own.log", "GET /missing HTTP/2.0|404|HTTP/2.0|h2c|7");
    // The port also speaks HTTP/1.
    assert_eq!(server.get("/text?a=1").text(), "hello HTTP/1.1 1");
    server.stop();
}

fn server_named_by_a_handshake_decides_the_offered_protocols(driver: Driver) {
    let authority = Authority::new("authority");
    let pair = authority.ecdsa(&["on.example", "off.example", "bare.example"]);
    let server = |name: &str, http2: &str, own: &str| {
        format!(
            "server {{ listen %UNIX% ssl; server_name {name}; {http2} {own}
             return 200 \"$server_name $http2 $ssl_alpn_protocol\"; }}\n"
        )
    };
    let own = "ssl_certificate %DIR%/own.crt; ssl_certificate_key %DIR%/own.key;";
    let text = [
        server("on.example", "http2 on;", own),
        server("off.example", "", own),
        // It shares the certificate of the first server, with a setting of its own for HTTP/2.
        server("bare.example", "http2 off;", ""),
    ]
    .concat();
    let server = Setup::http(driver, &text).file("own.crt", &pair.certificate).file("own.key", &pair.key).start();
    let socket = server.directory.path().join("gale.sock");
    let tls = || Tls::new(&authority).alpn(&["h2", "http/1.1"]);
    let agreed = |name: &str| {
        let session = tls().connect(&socket, name).unwrap();
        session.stream.conn.alpn_protocol().map(<[u8]>::to_vec)
    };
    assert_eq!(agreed("on.example").as_deref(), Some(&b"h2"[..]));
    assert_eq!(agreed("off.example").as_deref(), Some(&b"http/1.1"[..]));
    assert_eq!(agreed("bare.example").as_deref(), Some(&b"http/1.1"[..]));
    let mut client = Http2::above(tls().connect(&socket, "on.example").unwrap());
    let stream = client.begin_at("on.example", "GET", "/", &[], true);
    assert_eq!(client.answer(stream).text(), "on.example h2 h2");
    // One certificate is valid for both names: the connection may be used for the other, too.
    let stream = client.begin_at("off.example", "GET", "/", &[], true);
    assert_eq!(client.answer(stream).text(), "off.example h2 h2");
    assert_eq!(tls().client(&socket, "off.example").get("/").text(), "on.example  http/1.1");
    server.stop();
}

fn a_preface_where_http2_is_off_is_a_bad_request(driver: Driver) {
    let server = Setup::server(driver, "return 200 ok;").start();
    let mut client = server.connect();
    client.send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    assert_eq!(client.response().status, 400);
    server.stop();
    // A preface that arrives byte by byte is recognised where HTTP/2 is on.
    let server = setup(driver, "return 200 ok;").start();
    let mut client = server.connect();
    for byte in b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" {
        client.send([*byte]);
    }
    client.send(frame(frame_type::SETTINGS, 0, 0, []));
    let settings = client.take(9);
    assert_eq!(settings[3], frame_type::SETTINGS);
    server.stop();
}

fn many_requests_at_once_get_their_own_answers(driver: Driver) {
    let backend = Backend::tcp();
    let address = backend.address().to_owned();
    let serving = backend.serve(|asked, client| {
        client.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{}", asked.target.len(), asked.target));
        true
    });
    let server = setup(
        driver,
        &format!(
            "location /text {{ return 200 $uri; }} location /file {{ root %DIR%; }}
             location /up {{ proxy_pass http://{address}; }}"
        ),
    )
    .file("file", "x".repeat(40_000))
    .start();
    let mut client = Http2::unix(&server);
    for _ in 0..3 {
        let streams: Vec<_> = (0..100)
            .map(|number| match number % 3 {
                0 => (client.begin("GET", &format!("/text{number}"), &[], true), format!("/text{number}")),
                1 => (client.begin("GET", "/file", &[], true), "x".repeat(40_000)),
                _ => (client.begin("GET", &format!("/up{number}"), &[], true), format!("/up{number}")),
            })
            .collect();
        for (stream, expected) in streams {
            let answer = client.answer(stream);
            assert!(answer.status == 200 && answer.text() == expected, "{stream}: {}", answer.status);
        }
    }
    drop(serving);
    server.stop();
}

fn files_are_whole_with_any_windows(driver: Driver) {
    let contents: Vec<u8> = (0..700_000u32).flat_map(|number| (number * 7).to_le_bytes()).take(700_001).collect();
    let server = setup(
        driver,
        "root %DIR%; location /small { alias %DIR%/file; http2_chunk_size 100; }
         location /paced { alias %DIR%/file; limit_rate 10m; }",
    )
    .file("file", &contents)
    .file("empty", "")
    .start();
    for (stream_window, connection_window) in [(70_000, 70_000), (1, 65_535), (1 << 20, 1 << 24)] {
        // Windows of one byte are slow; here only the first one is.
        let limits = Limits { stream_window, connection_window, ..Limits::default() };
        let mut client = Http2::unix_with(&server, limits);
        let streams = ["/file", "/small", "/paced"].map(|path| client.begin("GET", path, &[], true));
        if stream_window == 1 {
            client.read_until(|client| streams.iter().all(|stream| client.answers.contains_key(stream)));
            streams.iter().for_each(|&stream| client.connection.grow_stream_window(stream, 1 << 20));
            client.flush();
        }
        for stream in streams {
            let answer = client.answer(stream);
            assert!(answer.status == 200 && answer.body == contents && answer.reset.is_none());
        }
        assert_eq!(client.get("/empty").body, b"");
    }
    server.stop();
}

fn bodies_are_passed_on_with_their_trailers(driver: Driver) {
    let backend = Backend::tcp();
    let address = backend.address().to_owned();
    let serving = backend.serve(|asked, client| {
        let text = format!(
            "{} {} {:?} {:?} {:?}",
            asked.method,
            asked.body.len(),
            asked.header("Content-Length"),
            asked.header("Transfer-Encoding"),
            asked.trailers
        );
        client.send(format!(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n{:x}\r\n{text}\r\n0\r\nX-Sum: 7\r\n\
             \r\n",
            text.len()
        ));
        true
    });
    let text = format!(
        "client_max_body_size 10m; location / {{ proxy_pass http://{address}; }}
         location /stream {{ proxy_pass http://{address}; proxy_http_version 1.1; proxy_request_buffering off;
         proxy_pass_trailers on; }} location /limited {{ client_max_body_size 1000; proxy_pass http://{address}; }}"
    );
    let server = setup(driver, &text).start();
    let mut client = Http2::unix(&server);
    let body = vec![b'b'; 1_000_000];
    let whole = client.post("/", &[], &body);
    assert_eq!(whole.text(), "POST 1000000 Some(\"1000000\") None []");
    let streamed = client.post("/stream", &[], &body);
    assert_eq!(streamed.text(), "POST 1000000 None Some(\"chunked\") []");
    assert_eq!(streamed.trailers, [("x-sum".to_owned(), "7".to_owned())]);
    let streamed = client.post("/stream", &[("content-length", "1000000")], &body);
    assert_eq!(streamed.text(), "POST 1000000 Some(\"1000000\") None []");
    assert_eq!(client.post("/limited", &[("content-length", "1000000")], &body[..1]).status, 413);
    let stream = client.begin("POST", "/limited", &[], false);
    client.send(stream, &body[..2000], true);
    assert_eq!(client.answer(stream).status, 413);
    // A wrong Content-Length.
    let stream = client.begin("POST", "/", &[("content-length", "3")], false);
    client.send(stream, b"four", true);
    assert_eq!(client.answer(stream).reset, Some(ErrorCode::PROTOCOL_ERROR));
    drop(serving);
    server.stop();
}

fn a_client_that_expects_100_is_told_to_continue(driver: Driver) {
    let backend = Backend::tcp();
    // The client may not send anything before the server asks, either.
    let text = format!("http2_body_preread_size 0; location / {{ proxy_pass http://{}; }}", backend.address());
    let server = setup(driver, &text).start();
    let mut client = Http2::unix(&server);
    let stream = client.begin("POST", "/", &[("expect", "100-continue")], false);
    client.read_until(|client| client.answers.get(&stream).is_some_and(|answer| answer.interim == [100]));
    client.send(stream, b"body", true);
    let mut at = backend.accept();
    assert_eq!(at.request().body, b"body");
    at.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    assert_eq!(client.answer(stream).text(), "ok");
    server.stop();
}

fn unwanted_body_is_discarded_until_its_window_is_used_up(driver: Driver) {
    let server = setup(driver, "location / { return 200 early; }").start();
    let mut client = Http2::unix(&server);
    let answered = |client: &mut Http2| {
        let stream = client.begin("POST", "/", &[], false);
        client.read_until(|client| client.answers.get(&stream).is_some_and(|answer| answer.is_complete));
        stream
    };
    let short = answered(&mut client);
    client.send(short, b"rest", true);
    // Most bodies end within the window that is opened for that.
    let longer = answered(&mut client);
    client.send(longer, &vec![b'r'; 1 << 20], true);
    let long = answered(&mut client);
    let piece = vec![b'r'; 16 * 1024];
    while client.answers[&long].reset.is_none() {
        client.send(long, &piece[..client.connection.send_window(long).min(piece.len())], false);
        if client.connection.send_window(long) == 0 {
            assert!(client.read());
        }
    }
    let of = |stream: u32| {
        let answer = &client.answers[&stream];
        (answer.status, answer.text().to_owned(), answer.reset)
    };
    assert_eq!(of(short), (200, "early".to_owned(), None));
    assert_eq!(of(longer), (200, "early".to_owned(), None));
    assert_eq!(of(long), (200, "early".to_owned(), Some(ErrorCode::NO_ERROR)));
    // Unfinished bodies of a client that never continues them are not kept for ever.
    let first = answered(&mut client);
    for _ in 0..16 {
        answered(&mut client);
    }
    client.read_until(|client| client.answers[&first].reset.is_some());
    assert_eq!(client.get("/").status, 200);
    server.stop();
}

/// The four cases of h2spec with a malformed rest: 8.1/1, 8.1.2.1/3, 8.1.2.6/1 and 2.
fn malformed_rest_of_an_answered_request_resets_its_stream(driver: Driver) {
    let server = setup(driver, "location / { return 200 early; }").start();
    let second_head = block(&[("x", "y")]);
    let pseudo = block(&[(":method", "GET")]);
    let cases = [
        frame(frame_type::HEADERS, flag::END_HEADERS, 1, second_head),
        frame(frame_type::HEADERS, flag::END_HEADERS | flag::END_STREAM, 1, pseudo),
        frame(frame_type::DATA, flag::END_STREAM, 1, b"test"),
        [frame(frame_type::DATA, 0, 1, b"t"), frame(frame_type::DATA, flag::END_STREAM, 1, b"est")].concat(),
    ];
    for rest in cases {
        let mut client = Http2::unix(&server);
        let stream = client.begin("POST", "/", &[("content-length", "1")], false);
        client.read_until(|client| client.answers.get(&stream).is_some_and(|answer| answer.is_complete));
        client.raw(rest);
        client.read_until(|client| client.answers[&stream].reset.is_some());
        let answer = &client.answers[&stream];
        assert_eq!((answer.status, answer.text(), answer.reset), (200, "early", Some(ErrorCode::PROTOCOL_ERROR)));
        assert_eq!(client.get("/").text(), "early");
    }
    server.stop();
}

fn preface_in_the_clear_counts_at_a_socket_that_also_has_tls(driver: Driver) {
    let pair = Authority::new("authority").ecdsa(&["localhost"]);
    // One socket for both: the request's address decides.
    let text = "http2 on; server { listen 0.0.0.0:%PORT%; return 200 clear; }
                server { listen 127.0.0.1:%PORT% ssl; ssl_certificate %DIR%/own.crt;
                         ssl_certificate_key %DIR%/own.key; return 200 encrypted; }";
    let server = Setup::http(driver, text).file("own.crt", &pair.certificate).file("own.key", &pair.key).start();
    for pieces in [&["PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"][..], &["P", "RI * HTTP/2.0\r\n\r\nSM", "\r\n\r\n"]] {
        let mut client = server.connect_tcp(1);
        pieces.iter().for_each(|piece| client.send(piece));
        client.send(frame(frame_type::SETTINGS, 0, 0, []));
        assert_eq!(client.take(9)[3], frame_type::SETTINGS);
    }
    assert_eq!(server.connect_tcp(1).get("/").text(), "clear");
    server.stop();
}

fn requests_of_a_client_that_has_gone_reach_no_server(driver: Driver) {
    let authority = Authority::new("authority");
    let pair = authority.ecdsa(&["localhost"]);
    let backend = Backend::tcp();
    let text = format!(
        "log_format own '$server_protocol $status'; access_log %DIR%/own.log own;
         server {{ listen %UNIX%; listen %ADDRESS% ssl; http2 on; ssl_certificate %DIR%/own.crt;
                   ssl_certificate_key %DIR%/own.key; location / {{ proxy_pass http://{}; }}
                   location = /status {{ stub_status; }} }}",
        backend.address()
    )
    .replace("%ADDRESS%", "unix:%DIR%/tls.sock");
    let server = Setup::http(driver, &text).file("own.crt", &pair.certificate).file("own.key", &pair.key).start();
    let tls = Tls::new(&authority).alpn(&["h2"]).connect(&server.directory.path().join("tls.sock"), "localhost");
    let mut encrypted = Http2::above(tls.expect("a session"));
    server.with_worker_stopped(|| {
        let mut clear = Http2::unix(&server);
        for _ in 0..20 {
            clear.begin("GET", "/gone", &[], true);
            encrypted.begin("GET", "/gone", &[], true);
        }
        drop((clear, encrypted));
        server.connect().send("GET /gone HTTP/1.1\r\nHost: h\r\n\r\n".repeat(20));
    });
    let mut client = server.connect();
    client.send("GET /here HTTP/1.1\r\nHost: h\r\n\r\n");
    let mut at = backend.accept();
    assert_eq!(at.request().target, "/here");
    at.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    assert_eq!(client.response().text(), "ok");
    wait_for_two_connections(&server);
    assert!(backend.is_idle());
    server.directory.wait_line("own.log", "HTTP/1.1 499");
    server.stop();
}

/// Waits until only the test's connection and the asking one are open.
fn wait_for_two_connections(server: &Server) {
    server.look_until("the clients that have gone are closed", || {
        server.get("/status").text().starts_with("Active connections: 2 ")
    });
}

fn client_that_has_gone_is_noticed_behind_a_full_buffer(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "http2_recv_buffer_size 1k;
         server {{ listen %UNIX%; http2 on; location / {{ proxy_pass http://{}; }}
                   location = /status {{ stub_status; }} location = /text {{ return 200 text; }} }}",
        backend.address()
    );
    let server = Setup::http(driver, &text).start();
    let mut client = Http2::unix(&server);
    assert_eq!(client.get("/text").text(), "text");
    let stays = server.connect();
    server.with_worker_stopped(|| {
        for number in 0..100 {
            client.begin("GET", &format!("/{number}/{}", "a".repeat(50)), &[], true);
        }
        drop(client);
    });
    wait_for_two_connections(&server);
    assert!(backend.is_idle());
    drop(stays);
    server.stop();
}

fn body_that_ends_with_its_connection_is_whole(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "location / {{ proxy_ignore_client_abort on; proxy_pass http://{}; }} location = /text {{ return 200 text; }}",
        backend.address()
    );
    let server = setup(driver, &text).start();
    let mut client = Http2::unix(&server);
    let stream = client.begin("POST", "/a", &[("content-length", "10")], false);
    client.send(stream, b"first", false);
    // The request before this one has begun when this is answered.
    assert_eq!(client.get("/text").text(), "text");
    server.with_worker_stopped(|| {
        client.send(stream, b" last", true);
        drop(client);
    });
    let mut at = backend.accept();
    assert_eq!(at.request().body, b"first last");
    at.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    server.stop();
}

fn location_with_line_ends_is_the_same_in_all_versions(driver: Driver) {
    let text = "location /moved { return 302 http://x$uri; } location / { add_header X-Own $uri; return 200; }";
    let server = setup(driver, text).start();
    let mut client = Http2::unix(&server);
    for (path, name, value) in
        [("/moved/a%0d%0aSet-Cookie:b", "Location", "http://x/moved/a  Set-Cookie:b"), ("/c%0ad", "X-Own", "/c d")]
    {
        let (old, new) = (server.get(path), client.get(path));
        assert_eq!(old.header(name).map(str::trim_end), Some(value));
        assert_eq!(new.header(&name.to_lowercase()), Some(value));
        assert_eq!((old.status, old.header("Set-Cookie")), (new.status, new.header("set-cookie")));
    }
    server.wait_logged_times("line ends in values of the response header are sent as spaces", 2);
    server.stop();
}

fn status_that_was_sent_is_logged(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "log_format own '$uri $status'; server {{ listen %UNIX%; http2 on; access_log %DIR%/own.log own;
         error_page 501 /none; location = /none {{ internal; return 501 \"no socket\"; }}
         location /text {{ return 200 text; }}
         location /slow {{ client_body_timeout 50ms; proxy_pass http://{0}; }}
         location / {{ proxy_pass http://{0}; }} }}",
        backend.address()
    );
    let server = Setup::http(driver, &text).start();
    let mut client = Http2::unix(&server);
    // An answer that would look like a tunnel is replaced, also by a configured error page.
    let stream = client.connect("websocket", "/text", &[]);
    let answer = client.answer(stream);
    assert_eq!((answer.status, answer.text()), (501, "no socket"));
    server.directory.wait_line("own.log", "/none 501");
    let stream = client.connect("websocket", "/passed", &[]);
    let mut at = backend.accept();
    at.request_head();
    at.send("HTTP/1.1 204 No Content\r\n\r\n");
    assert_eq!(client.answer(stream).status, 501);
    let slow = client.begin("POST", "/slow", &[], false);
    client.send(slow, b"a", false);
    assert_eq!(client.answer(slow).status, 408);
    server.directory.wait_line("own.log", "/slow 408");
    assert!(!server.directory.read("own.log").contains(" 20"), "{}", server.directory.read("own.log"));
    server.stop();
}

fn a_closed_window_holds_one_stream_alone_and_not_for_ever(driver: Driver) {
    let server = setup(driver, "root %DIR%; location /hurry { alias %DIR%/file; send_timeout 100ms; }")
        .file("file", vec![b'f'; 200_000])
        .start();
    let mut client = Http2::unix_with(&server, Limits { connection_window: 1 << 20, ..Limits::default() });
    client.releases = false;
    let held = client.begin("GET", "/file", &[], true);
    client.read_until(|client| client.answers.get(&held).is_some_and(|answer| answer.body.len() == 65_536));
    client.releases = true;
    let other = client.begin("GET", "/file", &[], true);
    assert_eq!(client.answer(other).body.len(), 200_000);
    client.connection.release(held, 65_536);
    client.flush();
    assert_eq!(client.answer(held).body.len(), 200_000);
    // Without a window only the stream ends.
    client.releases = false;
    let late = client.begin("GET", "/hurry", &[], true);
    assert_eq!(client.answer(late).reset, Some(ErrorCode::CANCEL));
    assert_eq!(client.get("/nothing").status, 404);
    server.stop();
}

fn reset_stream_ends_its_request(driver: Driver) {
    let backend = Backend::tcp();
    let server = proxy(driver, &backend, "");
    let mut client = Http2::unix(&server);
    let stream = client.begin("GET", "/wait", &[], true);
    let mut at = backend.accept();
    assert_eq!(at.request().target, "/wait");
    client.reset(stream, ErrorCode::CANCEL);
    assert!(at.is_at_end(), "nobody waits for it any more");
    server.directory.wait_line("access.log", "\"GET /wait HTTP/2.0\" 499");
    // The end of a connection ends its streams.
    client.begin("GET", "/gone", &[], true);
    let mut at = backend.accept();
    assert_eq!(at.request().target, "/gone");
    drop(client);
    assert!(at.is_at_end());
    server.directory.wait_line("access.log", "\"GET /gone HTTP/2.0\" 499");
    server.stop();
}

fn a_client_that_leaves_in_the_middle_of_files_leaves_nothing_behind(driver: Driver) {
    let server = setup(driver, "root %DIR%; location = /status { stub_status; }")
        .file("file", vec![b'f'; 3_000_000])
        .replace("worker_processes 2", "worker_processes 1")
        .replace("worker_connections 128", "worker_connections 16")
        .start();
    // More in total than the worker may have.
    for _ in 0..40 {
        let mut client = Http2::unix(&server);
        client.releases = false;
        let streams = [client.begin("GET", "/file", &[], true), client.begin("GET", "/file", &[], true)];
        client.read_until(|client| streams.iter().all(|stream| client.answers.contains_key(stream)));
    }
    server.directory.wait_until("every request has ended", |directory| {
        directory.read("access.log").matches("GET /file HTTP/2.0").count() == 80
    });
    let status = server.get("/status");
    assert!(status.text().starts_with("Active connections: 1 \n"), "{}", status.text());
    server.stop();
}

fn urgent_responses_go_first(driver: Driver) {
    // Answered from memory: data read from a disk may arrive later, however urgent they are.
    let text = format!("set $text {}; return 200 {};", "t".repeat(3000), "$text".repeat(10));
    let server = setup(driver, &text).start();
    let mut client = Http2::unix_with(&server, Limits { stream_window: 0, ..Limits::default() });
    let begin = |client: &mut Http2, priority: &str| client.begin("GET", "/", &[("priority", priority)], true);
    let late = begin(&mut client, "u=7");
    let (first, second) = (begin(&mut client, "u=3"), begin(&mut client, "u=3"));
    let (mixed, too) = (begin(&mut client, "u=5, i"), begin(&mut client, "u=5, i"));
    let soon = begin(&mut client, "u=6");
    let all = [late, first, second, mixed, too, soon];
    client.read_until(|client| all.iter().all(|stream| client.answers.contains_key(stream)));
    // RFC 9218, section 7.1.
    client.raw(frame(frame_type::PRIORITY_UPDATE, 0, 0, [&soon.to_be_bytes()[..], b"u=0"].concat()));
    // All windows open at once.
    all.iter().for_each(|&stream| client.connection.grow_stream_window(stream, 60_000));
    client.flush();
    client.read_until(|client| all.iter().all(|stream| client.answers[stream].is_complete));
    let ends = |stream: u32| client.order.iter().rposition(|&other| other == stream).unwrap();
    let begins = |stream: u32| client.order.iter().position(|&other| other == stream).unwrap();
    assert!(ends(soon) < begins(first) && ends(first) < begins(second), "{:?}", client.order);
    assert!(ends(second) < begins(mixed) && ends(too) < begins(late), "{:?}", client.order);
    assert!(begins(too) < ends(mixed), "they take turns: {:?}", client.order);
    server.stop();
}

/// The server announces its end and waits until the client has seen that; then it names the last stream.
#[track_caller]
fn assert_ends_in_two_steps(client: &mut Http2, last_stream: u32) {
    assert_eq!(client.goaways, [(MAX_31, ErrorCode::NO_ERROR), (last_stream, ErrorCode::NO_ERROR)]);
}

fn a_connection_ends_in_two_steps_and_loses_no_request(driver: Driver) {
    let backend = Backend::tcp();
    let mut server = proxy(driver, &backend, "");
    let (mut client, mut idle) = (Http2::unix(&server), Http2::unix(&server));
    let stream = client.begin("GET", "/last", &[], true);
    let mut at = backend.accept();
    at.request();
    idle.begin("GET", "/idle", &[], true);
    let mut beside = backend.accept();
    beside.request();
    beside.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    idle.read_until(|client| client.answers.values().any(|answer| answer.is_complete));
    server.signal(Signal::QUIT);
    idle.read_to_end();
    assert_ends_in_two_steps(&mut idle, 1);
    client.read_until(|client| client.goaways.len() == 2);
    at.send("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwhole");
    assert_eq!(client.answer(stream).text(), "whole");
    client.read_to_end();
    assert_ends_in_two_steps(&mut client, 1);
    server.wait_exited();
}

fn an_address_that_is_gone_ends_its_connections_in_two_steps(driver: Driver) {
    let own = |text: &str| {
        format!(
            "server {{ listen %UNIX%; return 200 old; http2 on; }} server {{ listen %DIR%/{text}; return 200 other; }}"
        )
        .replace("%DIR%/", "unix:%DIR%/")
    };
    let mut server = Setup::http(driver, &own("one.sock")).start();
    let mut client = Http2::unix(&server);
    assert_eq!(client.get("/").text(), "old");
    // A different spelling of the same address does not affect open connections.
    server.reload_http(driver, &own("two.sock").replace("return 200 old", "return 200 new"));
    assert_eq!(client.get("/").text(), "new");
    server.reload_http(driver, "server { listen unix:%DIR%/three.sock; return 200 x; }");
    client.read_to_end();
    assert_ends_in_two_steps(&mut client, 3);
    server.end(Signal::QUIT);
}

fn a_connection_ends_behind_its_last_request_or_when_it_is_idle(driver: Driver) {
    let server = Setup::http(
        driver,
        "server { listen %UNIX%; http2 on; keepalive_requests 3; return 200 ok; }
         server { listen unix:%DIR%/idle.sock; http2 on; keepalive_timeout 1ms; client_header_timeout 1h;
                  return 200 ok; }
         server { listen unix:%DIR%/slow.sock; http2 on; keepalive_timeout 1h; client_header_timeout 1s;
                  return 200 ok; }
         server { listen unix:%DIR%/silent.sock; http2 on; keepalive_timeout 1h; client_header_timeout 50ms;
                  return 200 ok; }",
    )
    .start();
    let mut client = Http2::unix(&server);
    for _ in 0..3 {
        assert_eq!(client.get("/").text(), "ok");
    }
    client.read_to_end();
    assert_ends_in_two_steps(&mut client, 5);
    let connect = |name: &str| {
        let stream = std::os::unix::net::UnixStream::connect(server.directory.path().join(name)).unwrap();
        stream.set_read_timeout(Some(support::DEADLINE)).unwrap();
        stream
    };
    let mut client = Http2::above(connect("idle.sock"));
    assert_eq!(client.get("/").text(), "ok");
    client.read_to_end();
    assert_eq!(client.goaways.last(), Some(&(1, ErrorCode::NO_ERROR)));
    // An incomplete head, on a connection with a longer idle timeout; and a connection without any request.
    let mut client = Http2::above(connect("slow.sock"));
    assert_eq!(client.get("/").text(), "ok");
    client.raw(&frame(frame_type::HEADERS, flag::END_HEADERS, 3, block(&GET))[..12]);
    client.read_to_end();
    server.wait_logged("client timed out (110: Connection timed out)");
    Http2::above(connect("silent.sock")).read_to_end();
    server.stop();
}

/// Fields of a request beside the usual ones, or in their place.
const SMUGGLING: &[&[(&str, &str)]] = &[
    &[("x-one", "a\r\nX-Two: b")],
    &[("x-one", "a\nX-Two: b")],
    &[("x-one", "a\0b")],
    &[("x-one\r\nx-two", "a")],
    &[("x-one: y", "a")],
    &[("X-Upper", "a")],
    &[("x one", "a")],
    &[("", "a")],
    &[("transfer-encoding", "chunked")],
    &[("connection", "close")],
    &[("upgrade", "websocket")],
    &[("te", "gzip")],
    &[("content-length", "1"), ("content-length", "2")],
    &[("content-length", "-1")],
    &[("content-length", "1,1")],
    &[("host", "other")],
    &[("host", "localhost"), ("host", "localhost")],
    &[(":path", "/second")],
    &[(":unknown", "x")],
];

/// Complete heads.
const SMUGGLING_HEADS: &[&[(&str, &str)]] = &[
    &[(":method", "GET / HTTP/1.1\r\nHost: x\r\n\r\nGET"), (":scheme", "http"), (":path", "/"), (":authority", "a")],
    &[(":method", "GET"), (":scheme", "http"), (":path", "/ HTTP/1.1\r\nx: y"), (":authority", "a")],
    &[(":method", "GET"), (":scheme", "http"), (":path", "/a b"), (":authority", "a")],
    &[(":method", "GET"), (":scheme", "http"), (":path", "http://other/"), (":authority", "a")],
    &[(":method", "GET"), (":scheme", "http"), (":path", "x"), (":authority", "a")],
    &[(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "a\r\nx: y")],
    &[(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "user@a")],
    &[(":method", "GET"), (":scheme", "ht tp"), (":path", "/"), (":authority", "a")],
    &[(":method", "GET"), (":scheme", "http"), (":path", "/")],
    &[(":method", "GET"), (":scheme", "http"), (":authority", "a")],
    &[(":scheme", "http"), (":path", "/"), (":authority", "a")],
    &[("x", "y"), (":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "a")],
    &[(":method", "CONNECT"), (":authority", "a:1")],
    &[(":method", "CONNECT"), (":protocol", "other"), (":scheme", "http"), (":path", "/"), (":authority", "a")],
];

fn request_that_could_be_smuggled_reaches_no_upstream(driver: Driver) {
    let backend = Backend::tcp();
    let address = backend.address().to_owned();
    let serving = backend.serve(|_, client| {
        client.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        true
    });
    let text = format!("http2_flood_limits resets=10000; location / {{ proxy_pass http://{address}; }}");
    let server = setup(driver, &text).start();
    let heads = SMUGGLING.iter().map(|fields| [&GET[..], fields].concat());
    for head in heads.chain(SMUGGLING_HEADS.iter().map(|head| head.to_vec())) {
        // The client's codec would refuse to write it.
        let mut client = Http2::unix(&server);
        client.raw(frame(frame_type::HEADERS, flag::END_HEADERS | flag::END_STREAM, 1, block(&head)));
        let (status, code) = client.raw_answer();
        let is_refused = matches!(status, Some(400 | 405 | 414)) || code == Some(ErrorCode::PROTOCOL_ERROR);
        assert!(is_refused, "{head:?}: {status:?} {code:?}");
    }
    assert_eq!(serving.asked().len(), 0, "{:?}", serving.asked());
    // Permitted values are passed on unchanged.
    let mut client = Http2::unix(&server);
    let fields = [("cookie", "a=1"), ("cookie", "b=2"), ("te", "trailers"), ("x-fine", "a:b")];
    let stream = client.begin("GET", "/x?y", &fields, true);
    assert_eq!(client.answer(stream).text(), "ok");
    let (_, asked) = serving.asked().pop().expect("it was passed on");
    assert_eq!(
        (&*asked.target, asked.header("Cookie"), asked.header("X-Fine")),
        ("/x?y", Some("a=1; b=2"), Some("a:b"))
    );
    assert_eq!((asked.header("TE"), asked.header("Transfer-Encoding")), (None, None));
    server.stop();
}

fn websockets_are_upgrades_for_the_servers_behind(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "location / {{ proxy_pass http://{0}; }}
         location /nginx {{ proxy_pass http://{0}; proxy_http_version 1.1; proxy_set_header Upgrade $http_upgrade;
                            proxy_set_header Connection \"upgrade\"; }}
         location /text {{ return 200 text; }}",
        backend.address()
    );
    let server = setup(driver, &text).start();
    let mut client = Http2::unix(&server);
    assert_eq!(client.get("/text").status, 200);
    assert!(client.connection.peer_settings().extended_connect);
    for path in ["/socket?a", "/nginx"] {
        let fields = [("sec-websocket-version", "13"), ("origin", "http://localhost")];
        let stream = client.connect("websocket", path, &fields);
        let mut at = backend.accept();
        let asked = at.request_head();
        assert_eq!((&*asked.method, &*asked.target), ("GET", path));
        assert_eq!((asked.header("Upgrade"), asked.header("Connection")), (Some("websocket"), Some("upgrade")));
        assert_eq!(asked.header("Sec-WebSocket-Version"), Some("13"));
        assert!(asked.header("Sec-WebSocket-Key").is_some_and(|key| key.len() == 24 && key.ends_with("==")));
        at.send(
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
             Sec-WebSocket-Accept: x\r\nSec-WebSocket-Protocol: chat\r\n\r\nhello",
        );
        client.read_until(|client| client.answers.get(&stream).is_some_and(|answer| answer.body == b"hello"));
        let answer = &client.answers[&stream];
        assert_eq!((answer.status, answer.header("sec-websocket-protocol")), (200, Some("chat")));
        assert_eq!((answer.header("upgrade"), answer.header("sec-websocket-accept")), (None, None));
        client.send(stream, b"to the server", false);
        assert_eq!(at.take(13), b"to the server");
        // Other requests go on beside it; either side may end its own direction first.
        assert_eq!(client.get("/text").text(), "text");
        client.send(stream, b"", true);
        assert!(at.is_at_end());
        at.send("bye");
        drop(at);
        assert_eq!(client.answer(stream).body, b"hellobye");
    }
    // Other responses do not look like a tunnel.
    let stream = client.connect("websocket", "/text", &[]);
    assert_eq!(client.answer(stream).status, 501);
    let stream = client.connect("websocket", "/refused", &[]);
    let mut at = backend.accept();
    at.request_head();
    at.send("HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno");
    let answer = client.answer(stream);
    assert_eq!((answer.status, answer.text()), (403, "no"));
    let stream = client.connect("something", "/", &[]);
    assert_eq!(client.answer(stream).status, 405);
    server.stop();
}

fn the_log_line_of_a_websocket_has_the_values_that_its_response_had(driver: Driver) {
    const VALUES: &str = "$request_id|$request|$uri $args|$http_origin|$http_upgrade|$server_protocol|$connection";
    let backend = Backend::tcp();
    let text = "log_format values 'VALUES|$sent_http_x_own $upstream_http_x_own|$status $upstream_status';
        server { listen %UNIX%; http2 on; access_log %DIR%/values.log values; add_header X-Values \"VALUES\" always;
                 location / { proxy_pass http://ADDRESS; } }";
    let text = text.replace("VALUES", VALUES).replace("ADDRESS", backend.address());
    let server = Setup::http(driver, &text).start();
    let mut client = Http2::unix(&server);
    let stream = client.connect("websocket", "/socket?a=b", &[("origin", "http://localhost")]);
    let mut at = backend.accept();
    at.request_head();
    at.send("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nX-Own: 1\r\n\r\nhello");
    client.read_until(|client| client.answers.get(&stream).is_some_and(|answer| answer.body == b"hello"));
    let values = client.answers[&stream].header("x-values").expect("the values").to_owned();
    client.send(stream, b"", true);
    assert!(at.is_at_end());
    drop(at);
    client.answer(stream);
    let line = server.directory.wait_line("values.log", "/socket");
    assert!(values.contains("|/socket a=b|http://localhost|websocket|HTTP/2.0|"), "{values}");
    assert_eq!(line, format!("{values}|1 1|101 101"));
    server.stop();
}

fn a_client_certificate_is_asked_for_by_name(driver: Driver) {
    let authority = Authority::new("authority");
    let pair = authority.ecdsa(&["open.example", "closed.example"]);
    let text = "ssl_certificate %DIR%/own.crt; ssl_certificate_key %DIR%/own.key; http2 on;
        server { listen %UNIX% ssl; server_name open.example; return 200 open; }
        server { listen %UNIX% ssl; server_name closed.example; ssl_verify_client on;
                 ssl_client_certificate %DIR%/own.crt; return 200 closed; }";
    let server = Setup::http(driver, text).file("own.crt", &pair.certificate).file("own.key", &pair.key).start();
    let socket = server.directory.path().join("gale.sock");
    let tls = Tls::new(&authority).alpn(&["h2"]);
    let mut client = Http2::above(tls.connect(&socket, "open.example").unwrap());
    let ask = |client: &mut Http2, name: &str| {
        let stream = client.begin_at(name, "GET", "/", &[], true);
        client.answer(stream).status
    };
    assert_eq!(ask(&mut client, "open.example"), 200);
    // RFC 9113, section 9.1.2: the client may ask on another connection.
    assert_eq!(ask(&mut client, "closed.example"), 421);
    assert_eq!(ask(&mut client, "open.example"), 200);
    let mut client = Http2::above(tls.connect(&socket, "closed.example").unwrap());
    assert_eq!(ask(&mut client, "closed.example"), 400);
    server.stop();
}

/// Name, frames for each round, error code and log message of an attack.
type Attack = (&'static str, fn(u32) -> Vec<u8>, ErrorCode, &'static str);

/// A request for an upstream server that does not answer.
const HELD: [(&str, &str); 4] = [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "hold")];

/// Number of the next stream in an attack's round.
fn odd(round: u32) -> u32 {
    2 * round + 1
}

const ATTACKS: &[Attack] = &[
    (
        "rapid reset",
        |round| {
            let head = frame(frame_type::HEADERS, flag::END_HEADERS | flag::END_STREAM, odd(round), block(&GET));
            [head, frame(frame_type::RST_STREAM, 0, odd(round), 8u32.to_be_bytes())].concat()
        },
        ErrorCode::ENHANCE_YOUR_CALM,
        "too many reset streams",
    ),
    (
        "resets that we are made to send",
        |round| {
            let head = frame(frame_type::HEADERS, flag::END_HEADERS, odd(round), block(&HELD));
            [head, frame(frame_type::WINDOW_UPDATE, 0, odd(round), 0u32.to_be_bytes())].concat()
        },
        ErrorCode::ENHANCE_YOUR_CALM,
        "too many reset streams",
    ),
    (
        "malformed requests",
        |round| {
            let head = [&GET[..], &[("transfer-encoding", "chunked")]].concat();
            frame(frame_type::HEADERS, flag::END_HEADERS | flag::END_STREAM, odd(round), block(&head))
        },
        ErrorCode::ENHANCE_YOUR_CALM,
        "too many reset streams",
    ),
    ("PING flood", |_| frame(frame_type::PING, 0, 0, [0; 8]), ErrorCode::ENHANCE_YOUR_CALM, "too many PING frames"),
    (
        "SETTINGS flood",
        |_| frame(frame_type::SETTINGS, 0, 0, []),
        ErrorCode::ENHANCE_YOUR_CALM,
        "too many SETTINGS frames",
    ),
    (
        "WINDOW_UPDATE flood",
        |_| frame(frame_type::WINDOW_UPDATE, 0, 0, 1u32.to_be_bytes()).repeat(100),
        ErrorCode::ENHANCE_YOUR_CALM,
        "too many WINDOW_UPDATE frames",
    ),
    (
        "PRIORITY flood",
        |_| frame(frame_type::PRIORITY, 0, 1, [0, 0, 0, 0, 7]).repeat(50),
        ErrorCode::ENHANCE_YOUR_CALM,
        "too many PRIORITY frames",
    ),
    (
        "unknown frames",
        |_| frame(0xba, 0, 0, b"whatever"),
        ErrorCode::ENHANCE_YOUR_CALM,
        "too many frames of unknown types",
    ),
    (
        "empty DATA",
        |round| match round {
            0 => frame(frame_type::HEADERS, flag::END_HEADERS, 1, block(&HELD)),
            _ => frame(frame_type::DATA, 0, 1, []),
        },
        ErrorCode::ENHANCE_YOUR_CALM,
        "too many empty frames",
    ),
    (
        "CONTINUATION flood",
        |round| match round {
            0 => frame(frame_type::HEADERS, 0, 1, block(&GET)),
            _ => frame(frame_type::CONTINUATION, 0, 1, block(&[("x", "y")])),
        },
        ErrorCode::ENHANCE_YOUR_CALM,
        "CONTINUATION",
    ),
    (
        "large blocks",
        |round| match round {
            0 => frame(frame_type::HEADERS, 0, 1, block(&GET)),
            _ => frame(frame_type::CONTINUATION, 0, 1, block(&[("x", "y")]).repeat(3000)),
        },
        ErrorCode::ENHANCE_YOUR_CALM,
        "header",
    ),
    (
        "a bomb of the table",
        |_| frame(frame_type::HEADERS, flag::END_HEADERS | flag::END_STREAM, 1, bomb(&"v".repeat(3000))),
        ErrorCode::ENHANCE_YOUR_CALM,
        "header",
    ),
];

/// A block of a few kilobytes that expands to megabytes.
fn bomb(large: &str) -> Vec<u8> {
    let mut block = block(&GET);
    // A literal that is added to the table; its index is 62 from then on (RFC 7541, section 2.3.3).
    block.extend([0x40, 1, b'x', 0x7f]);
    let mut length = large.len() - 127;
    while length >= 128 {
        block.push((length % 128) as u8 | 0x80);
        length /= 128;
    }
    block.push(length as u8);
    block.extend(large.as_bytes());
    block.extend(std::iter::repeat_n(0x80 | 62, 2000));
    block
}

fn floods_end_only_their_own_connection(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "server {{ listen %UNIX%; http2 on; return 200 ok; }}
         server {{ listen %UNIX%; server_name hold; location / {{ proxy_pass http://{}; }} }}
         server {{ listen unix:%DIR%/strict.sock; http2 on; http2_flood_limits resets=2; return 200 ok; }}",
        backend.address()
    );
    let server = Setup::http(driver, &text).start();
    let mut bystander = Http2::unix(&server);
    for (what, next, code, words) in ATTACKS {
        let mut client = Http2::unix_receiving(&server);
        let mut round = 0;
        // The connection ends long before that.
        while round < 20_000 && client.try_raw(next(round)).is_ok() {
            round += 1;
        }
        assert_eq!(client.raw_goaway(), Some(*code), "{what}, {round} rounds");
        server.wait_logged(words);
        assert_eq!(bystander.get("/").text(), "ok", "{what}");
    }
    let strict = std::os::unix::net::UnixStream::connect(server.directory.path().join("strict.sock")).unwrap();
    strict.set_read_timeout(Some(support::DEADLINE)).unwrap();
    let mut client = Http2::above(strict);
    // All at once, because the counters decay with time.
    let (_, reset, ..) = ATTACKS[0];
    client.raw((0..10).flat_map(reset).collect::<Vec<u8>>());
    assert_eq!(client.raw_goaway(), Some(ErrorCode::ENHANCE_YOUR_CALM));
    server.stop();
}

fn a_window_of_one_byte_is_a_flood_when_it_lasts(driver: Driver) {
    let server =
        setup(driver, "root %DIR%; http2_flood_limits window_updates=300;").file("file", [b'f'; 50_000]).start();
    let mut bystander = Http2::unix(&server);
    let mut client = Http2::unix_with(&server, Limits { stream_window: 1, ..Limits::default() });
    let stream = client.begin("GET", "/file", &[], true);
    client.read_to_end();
    let length = client.answers[&stream].body.len();
    assert!((200..5000).contains(&length), "{length} bytes");
    assert_eq!(client.goaways.last().map(|(_, code)| *code), Some(ErrorCode::ENHANCE_YOUR_CALM));
    server.wait_logged("too many WINDOW_UPDATE frames");
    assert_eq!(bystander.get("/file").body.len(), 50_000);
    server.stop();
}

/// As many as most systems permit for a process.
const CROWD: usize = 3000;

/// Memory of each in the worker, in bytes: the connection, the request, and the received byte of its body.
const CROWD_BYTES_MAX: u64 = 20 * 1024;

fn thousands_of_connections_with_an_idle_stream_each_cost_little_memory(driver: Driver) {
    let _turn = turn_of_crowds();
    if descriptor_limit() < CROWD + 2000 {
        return skip("a process can have too few descriptors here");
    }
    // The body is read before the upstream server is asked.
    let text = "access_log off; client_body_timeout 1h; keepalive_timeout 1h;
                location / { proxy_pass http://unix:%DIR%/nobody; } location /text { return 200 text; }";
    let server = setup(driver, text)
        .replace("worker_processes 2", "worker_processes 1")
        .replace("worker_connections 128", &format!("worker_connections {}", CROWD + 100))
        .start();
    let begin = || {
        let mut client = Http2::unix(&server);
        let stream = client.begin("POST", "/", &[], false);
        client.send(stream, b"x", false);
        // The requests before were processed, too.
        assert_eq!(client.get("/text").text(), "text");
        client
    };
    // One-time allocations are made before the measurement.
    drop((0..300).map(|_| begin()).collect::<Vec<_>>());
    let worker = server.worker();
    let before = support::anonymous_memory(worker);
    let mut clients: Vec<Http2> = (0..CROWD).map(|_| begin()).collect();
    let each = support::anonymous_memory(worker).saturating_sub(before) / CROWD as u64;
    eprintln!("{each} bytes each");
    assert!(each < CROWD_BYTES_MAX, "{each} bytes each");
    assert!(clients.iter_mut().step_by(100).all(|client| client.get("/text").text() == "text"));
    drop(clients);
    server.stop();
}

fn directives_are_checked_and_obsolete_ones_accepted(driver: Driver) {
    let text = "http2_max_concurrent_streams 2; http2_body_preread_size 100; http2_recv_buffer_size 64k;
        http2_push_preload on; http2_max_requests 5; http2_pool_size 4k; http2_flood_limits pings=7 resets=3;
        server { listen unix:%DIR%/old.sock http2; return 200 $http2; }
        server { listen %UNIX%; http2 on; return 200 $http2; }";
    let server = Setup::http(driver, text).start();
    for message in [
        "the \"http2_push_preload\" directive is obsolete, ignored",
        "the \"http2_max_requests\" directive is obsolete, use the \"keepalive_requests\" directive instead",
        "the \"listen ... http2\" directive is deprecated, use the \"http2\" directive instead",
    ] {
        assert!(server.stderr().contains(message), "{}", server.stderr());
    }
    let mut client = Http2::unix(&server);
    assert_eq!(client.get("/").text(), "h2c");
    assert_eq!(client.connection.peer_settings().concurrent_streams_max, 2);
    assert_eq!(client.connection.peer_settings().initial_window, 100);
    let old = std::os::unix::net::UnixStream::connect(server.directory.path().join("old.sock")).unwrap();
    assert_eq!(Http2::above(old).get("/").text(), "h2c");
    server.stop();
    for (text, message) in [
        ("http2 yes;", "invalid value \"yes\" in \"http2\" directive"),
        ("http2_max_concurrent_streams 0;", "http2_max_concurrent_streams"),
        ("http2_body_preread_size 3g;", "http2_body_preread_size"),
        ("http2_flood_limits resets;", "invalid parameter \"resets\""),
        ("http2_flood_limits sneezes=3;", "unknown kind \"sneezes\""),
        ("server { http2_recv_buffer_size 1k; }", "\"http2_recv_buffer_size\" directive is not allowed here"),
    ] {
        let mut server = Setup::http(driver, text).launch();
        assert!(!server.wait_exited().success());
        assert!(server.stderr().contains(message), "{text}: {}", server.stderr());
    }
}
