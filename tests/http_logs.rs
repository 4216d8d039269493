//! What is written down of requests: access logs in every form, and the errors of one location.

mod support;

use support::{Driver, Setup, with_each_driver};

with_each_driver!(
    a_line_says_what_happened,
    formats_escape_as_they_are_told,
    lines_may_depend_on_the_request,
    logs_are_inherited_repeated_and_turned_off,
    buffered_lines_come_in_time_or_at_the_end,
    offences_and_broken_connections_are_logged,
    errors_go_where_the_location_says,
    hostile_text_stays_on_its_line,
);

fn a_line_says_what_happened(driver: Driver) {
    let setup = Setup::http(
        driver,
        "log_format all '$status $body_bytes_sent $request_length $connection_requests $pipe $request_method $uri $args '
                        '$sent_http_content_type $sent_http_x_own $http_x_asked $cookie_c $request_completion $server_protocol';
         server { listen %TCP%; add_header X-Own own; root %DIR%/files;
             location / { return 200 hello; } location /file { access_log %DIR%/all.log all; }
             location /all { access_log %DIR%/all.log all; return 200 hello; } }",
    );
    let server = setup.file("files/file.html", vec![b'x'; 100_000]).start();
    let mut client = server.connect_tcp(1);
    client.ask("GET /a?b HTTP/1.1\r\nHost: h\r\nUser-Agent: agent\r\nReferer: http://r/\r\nAuthorization: Basic bWU6cHc=\r\n\r\n");
    let line = server.directory.wait_line("access.log", "GET /a?b");
    let (address, rest) = line.split_once(" - me [").expect("the combined format");
    let (time, rest) = rest.split_once("] ").expect("a time");
    assert_eq!((address, rest), ("127.0.0.1", "\"GET /a?b HTTP/1.1\" 200 5 \"http://r/\" \"agent\""));
    assert_eq!(time.len(), "10/Oct/2000:13:55:36 -0700".len());
    let first = "GET /all?x HTTP/1.1\r\nHost: h\r\nX-Asked: asked\r\nCookie: a=b; c=d\r\n\r\n";
    client.ask(first);
    let expected = format!("200 5 {} 2 . GET /all x text/plain own asked d OK HTTP/1.1", first.len());
    assert_eq!(server.directory.wait_line("all.log", "/all"), expected);
    client.get("/file.html");
    server.directory.wait_line("all.log", "200 100000 ");
    // Of two requests in one piece the second one was pipelined.
    client.send("GET /all/1 HTTP/1.1\r\nHost: h\r\n\r\nGET /all/2 HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!((client.response().status, client.response().status), (200, 200));
    server.directory.wait_line("all.log", " 4 . GET /all/1");
    server.directory.wait_line("all.log", " 5 p GET /all/2");
    server.stop();
}

fn formats_escape_as_they_are_told(driver: Driver) {
    let server = Setup::http(
        driver,
        "log_format usual '[$http_x|$http_none]';
         log_format json escape=json '{\"x\":\"$http_x\",\"none\":\"$http_none\"}';
         log_format raw escape=none '$http_x|$http_none';
         server { listen %UNIX%; access_log %DIR%/usual.log usual; access_log %DIR%/json.log json;
             access_log %DIR%/raw.log raw; return 200 hello; }",
    )
    .start();
    server.connect().ask("GET / HTTP/1.1\r\nHost: h\r\nX: a\"b\\c\td\u{fc}\r\n\r\n");
    let line = |name: &str| server.directory.wait_line(name, "a");
    assert_eq!(line("usual.log"), "[a\\x22b\\x5Cc\\x09d\\xC3\\xBC|-]");
    assert_eq!(line("json.log"), "{\"x\":\"a\\\"b\\\\c\\td\u{fc}\",\"none\":\"\"}");
    assert_eq!(line("raw.log"), "a\"b\\c\td\u{fc}|");
    server.stop();
}

fn lines_may_depend_on_the_request(driver: Driver) {
    let server = Setup::http(
        driver,
        "log_format uri '$request_uri';
         server { listen %UNIX%; access_log %DIR%/some.log uri if=$arg_log; return 200 hello; }",
    )
    .start();
    let mut client = server.connect();
    for target in ["/none", "/empty?log=", "/zero?log=0", "/yes?log=1", "/no", "/other?log=00"] {
        assert_eq!(client.get(target).status, 200);
    }
    server.directory.wait_line("some.log", "/other");
    assert_eq!(server.directory.read("some.log"), "/yes?log=1\n/other?log=00\n");
    server.stop();
}

fn logs_are_inherited_repeated_and_turned_off(driver: Driver) {
    let server = Setup::http(
        driver,
        "log_format uri '$uri'; access_log %DIR%/http.log uri;
         server { listen %UNIX%;
             location / { return 200 hello; }
             location /own { access_log %DIR%/own.log uri; access_log %DIR%/second.log uri; return 200 hello; }
             location /off { access_log off; return 200 hello; location /off/on { access_log %DIR%/own.log uri; return 200 x; } }
             location /moved { try_files /missing /own/moved; } }",
    )
    .start();
    let mut client = server.connect();
    for path in ["/a", "/own", "/off", "/moved", "/off/on", "/end"] {
        assert_eq!(client.get(path).status, 200, "{path}");
    }
    server.directory.wait_line("http.log", "/end");
    server.directory.wait_line("own.log", "/off/on");
    server.directory.wait_line("second.log", "/own/moved");
    assert_eq!(server.directory.read("http.log"), "/a\n/end\n");
    // The location that answers logs.
    assert_eq!(server.directory.read("own.log"), "/own\n/own/moved\n/off/on\n");
    assert_eq!(server.directory.read("second.log"), "/own\n/own/moved\n");
    server.stop();
}

fn buffered_lines_come_in_time_or_at_the_end(driver: Driver) {
    let mut server = Setup::http(
        driver,
        "log_format uri '$uri';
         server { listen %UNIX%; return 200 hello;
             access_log %DIR%/held.log uri buffer=64k; access_log %DIR%/timed.log uri buffer=64k flush=100ms;
             access_log %DIR%/small.log uri buffer=16; }",
    )
    .start();
    let mut client = server.connect();
    (0..10).for_each(|number| assert_eq!(client.get(&format!("/line/{number}")).status, 200));
    server.directory.wait_line("timed.log", "/line/9");
    server.directory.wait_line("small.log", "/line/7");
    assert_eq!(server.directory.read("held.log"), "");
    drop(client);
    server.end(rustix::process::Signal::QUIT);
    let expected: String = (0..10).map(|number| format!("/line/{number}\n")).collect();
    for name in ["held.log", "timed.log", "small.log"] {
        assert_eq!(server.directory.read(name), expected, "{name}");
    }
}

fn offences_and_broken_connections_are_logged(driver: Driver) {
    let server = Setup::http(
        driver,
        "log_format brief '$status \"$request\" $body_bytes_sent';
         server { listen %UNIX%; access_log %DIR%/brief.log brief; client_header_timeout 200ms; return 200 hello; }",
    )
    .start();
    let broken = ["\x16\x03\x01\x02", "GET / HTTP/3.0\r\n\r\n", "GET / HTTP/1.1\r\n\r\n"];
    for request in broken {
        let mut client = server.connect();
        client.send(request);
        client.read_to_end();
    }
    let mut half = server.connect();
    half.send("GET /half HT");
    half.assert_closed();
    for line in [
        "400 \"\\x16\\x03\\x01\\x02\" ",
        "505 \"GET / HTTP/3.0\" ",
        "400 \"GET / HTTP/1.1\" ",
        "408 \"GET /half HT\" 0",
    ] {
        server.directory.wait_line("brief.log", line);
    }
    server.stop();
}

fn errors_go_where_the_location_says(driver: Driver) {
    let server = Setup::server(
        driver,
        "root %DIR%/files; location /own/ { error_log %DIR%/own.log; }
         location /crit/ { error_log %DIR%/crit.log crit; } location /two/ { error_log %DIR%/own.log; error_log %DIR%/two.log info; }",
    )
    .start();
    let mut client = server.connect();
    for path in ["/a", "/own/b", "/crit/c", "/two/d"] {
        assert_eq!(client.get(path).status, 404);
    }
    let line = server.wait_logged("/files/a\" failed (2: No such file or directory)");
    let end = ", client: unix:, server: , request: \"GET /a HTTP/1.1\", host: \"localhost\"";
    assert!(line.contains(" [error] ") && line.ends_with(end), "{line}");
    server.directory.wait_line("own.log", "/files/own/b");
    server.directory.wait_line("own.log", "/files/two/d");
    server.directory.wait_line("two.log", "/files/two/d");
    assert_eq!(server.directory.read("crit.log"), "");
    assert!(!server.log().contains("/own/b"));
    server.stop();
}

fn hostile_text_stays_on_its_line(driver: Driver) {
    let server = Setup::server(driver, "root %DIR%/files;").start();
    let forged = "GET /NAME%0a1999/01/01%20[info]%20forged HTTP/1.1\r\nHost: h\r\n";
    let mut client = server.connect();
    client.send(forged.replace("NAME", "file") + "Referer: \"quoted\"\r\n\r\n");
    assert_eq!(client.response().status, 404);
    client.send(forged.replace("NAME", "offence") + "X: \x1b[31m\r\n\r\n");
    assert_eq!(client.response().status, 400);
    client.assert_closed();
    let line = server.directory.wait_line("access.log", "/file");
    assert!(line.contains("\"GET /file%0a1999") && line.contains("\\x22quoted\\x22"), "{line}");
    server.wait_logged("forged\" failed (2: No such file or directory)");
    assert!(server.wait_logged("/offence").contains("\"X: \\x1b...\""));
    assert!(!server.log().lines().any(|line| line.starts_with("1999")), "{}", server.log());
    server.stop();
}
