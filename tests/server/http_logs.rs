//! Access logs in every form, and error logs of single locations.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::process::Command;

use rustix::fs::{CWD, FileType, Mode};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::{self, DEADLINE, Directory, Driver, Server, Setup, with_each_driver};

with_each_driver!(
    line_describes_the_request,
    formats_escape_as_they_are_told,
    lines_may_depend_on_the_request,
    logs_are_inherited_repeated_and_turned_off,
    buffered_lines_come_in_time_or_at_the_end,
    offences_and_broken_connections_are_logged,
    errors_go_where_the_location_says,
    errors_as_json_have_fields,
    errors_as_json_are_objects_with_any_input,
    every_process_logs_json_where_the_main_context_says_so,
    errors_of_sessions_as_json_have_their_traffic,
    hostile_text_stays_on_its_line,
    compressed_log_is_readable_by_zcat,
    the_request_may_decide_which_file_it_is_logged_to,
    files_of_requests_may_stay_open,
    a_log_that_the_request_names_is_only_made_below_an_existing_root,
    a_full_disk_is_told_of_once_and_not_for_each_line,
    syslog_gets_each_line_as_a_datagram,
    missing_syslog_server_delays_no_requests,
    fifo_without_a_reader_keeps_its_lines_for_one,
    standard_error_stays_the_same_for_logs_that_use_it,
    logs_without_a_name_are_standard_error,
);

fn fifo_without_a_reader_keeps_its_lines_for_one(driver: Driver) {
    let directory = Directory::new();
    let fifo = directory.path().join("fifo");
    rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::from_raw_mode(0o600), 0).expect("a FIFO");
    let log = format!("log_format path $uri; access_log {} path;", fifo.display());
    let mut server = Setup::http(driver, &format!("{log} server {{ listen %UNIX%; return 200; }}")).start();
    assert_eq!(server.get("/first").status, 200);
    server.reload(&server.directory.read("gale.conf"));
    assert_eq!(server.get("/second").status, 200);
    server.signal(Signal::USR1);
    server.wait_logged("reopening logs");
    assert_eq!(server.get("/third").status, 200);
    let lines = BufReader::new(File::open(&fifo).expect("a FIFO")).lines();
    let mut lines: Vec<String> = lines.take(3).map(|line| line.expect("text")).collect();
    // Each worker writes its own lines, so their order is not fixed.
    lines.sort();
    assert_eq!(lines, ["/first", "/second", "/third"]);
    server.stop();
}

fn line_describes_the_request(driver: Driver) {
    let setup = Setup::http(
        driver,
        "log_format all '$status $body_bytes_sent $request_length $connection_requests $pipe $request_method $uri \
         $args '
                        '$sent_http_content_type $sent_http_x_own $http_x_asked $cookie_c $request_completion \
                        $server_protocol';
         server { listen %TCP%; add_header X-Own own; root %DIR%/files;
             location / { return 200 hello; } location /file { access_log %DIR%/all.log all; }
             location /all { access_log %DIR%/all.log all; return 200 hello; } }",
    );
    let server = setup.file("files/file.html", vec![b'x'; 100_000]).start();
    let mut client = server.connect_tcp(1);
    client.ask(
        "GET /a?b HTTP/1.1\r\nHost: h\r\nUser-Agent: agent\r\nReferer: http://r/\r\n\
        Authorization: Basic bWU6cHc=\r\n\r\n",
    );
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
    // The second of two requests in one segment is pipelined.
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
             location /off { access_log off; return 200 hello; location /off/on { access_log %DIR%/own.log uri;
             return 200 x; } }
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
    // The log of the location that answers the request is written.
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
        "log_format brief '$status \"$request\" $body_bytes_sent'; log_format method '$request_method \"$request\"';
         log_format uri '\"$uri\" $request';
         access_log %DIR%/brief.log brief; access_log %DIR%/method.log method; access_log %DIR%/uri.log uri;
         server { listen %UNIX%; client_header_timeout 1h; return 200 hello; }
         server { listen %TCP%; client_header_timeout 1s; return 200 hello; }",
    )
    .start();
    let broken = [
        "\x16\x03\x01\x02",
        "GET no-path HTTP/1.1\r\n\r\n",
        "GET /../bad HTTP/1.1\r\n\r\n",
        "GET / HTTP/3.0\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
    ];
    for request in broken {
        let mut client = server.connect();
        client.send(request);
        client.read_to_end();
    }
    let mut half = server.connect_tcp(1);
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
    // `$request_method` is empty if no method was received.
    server.directory.wait_line("method.log", "- \"\\x16\\x03");
    server.directory.wait_line("method.log", "GET \"GET / HTTP/1.1\"");
    // `$uri` is unset if no path was received, and empty if the path was rejected.
    for line in ["\"-\" \\x16", "\"-\" GET no-path", "\"\" GET /../bad", "\"/\" GET / HTTP/3.0", "\"-\" GET /half"] {
        server.directory.wait_line("uri.log", line);
    }
    server.stop();
}

fn errors_go_where_the_location_says(driver: Driver) {
    let server = Setup::server(
        driver,
        "root %DIR%/files; location /own/ { error_log %DIR%/own.log; }
         location /crit/ { error_log %DIR%/crit.log crit; }
         location /two/ { error_log %DIR%/own.log; error_log %DIR%/two.log info; }",
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

/// Parses a log of JSON objects, one a line.
#[track_caller]
fn objects(text: &str) -> Vec<Value> {
    let object = |line: &str| match serde_json::from_str(line) {
        Ok(Value::Object(object)) => Value::Object(object),
        other => panic!("{other:?}: {line}"),
    };
    text.lines().map(object).collect()
}

fn errors_as_json_have_fields(driver: Driver) {
    let server = Setup::http(
        driver,
        "upstream group { server unix:%DIR%/nobody; }
         server { listen %TCP%; listen %UNIX%; server_name own.test; root %DIR%/files;
             error_log %DIR%/json.log info json; error_log %DIR%/text.log info; error_log %DIR%/crit.log json crit;
             location /pass { proxy_pass http://group; } }",
    )
    .start();
    let mut client = server.connect_tcp(1);
    client.ask("GET /missing?x HTTP/1.1\r\nHost: own.test\r\nReferer: http://r/\r\n\r\n");
    client.ask("GET /pass/x HTTP/1.1\r\nHost: own.test\r\n\r\n");
    server.directory.wait_line("json.log", "connect() to");
    let text = server.directory.wait_line("text.log", "/missing");
    let found = objects(&server.directory.read("json.log"));
    let missing = &found[0];
    let path = server.directory.path().join("files/missing");
    let message = format!("open() \"{}\" failed (2: No such file or directory)", path.display());
    assert_eq!(missing["message"], *message);
    assert_eq!((&missing["level"], &missing["errno"]), (&json!("error"), &json!(2)));
    assert_eq!((&missing["client"], &missing["server"]), (&json!("127.0.0.1"), &json!("own.test")));
    assert_eq!((&missing["host"], &missing["referrer"]), (&json!("own.test"), &json!("http://r/")));
    assert_eq!((&missing["request"], &missing["upstream"]), (&json!("GET /missing?x HTTP/1.1"), &Value::Null));
    // The text log has the same line.
    let who = format!("[error] {}#{}: *{} {message}", missing["pid"], missing["tid"], missing["connection"]);
    assert!(text.contains(&who), "{text}\n{who}");
    let time = missing["time"].as_str().expect("text");
    assert_eq!(time.len(), "2026-11-24T02:47:35.123+00:00".len(), "{time}");
    let passed = &found[1];
    let upstream = format!("http://unix:{}:/pass/x", server.directory.path().join("nobody").display());
    assert_eq!((&passed["upstream"], &passed["errno"]), (&json!(upstream), &json!(2)));
    server.directory.wait_line("crit.log", "connect() to");
    let severe = objects(&server.directory.read("crit.log"));
    assert_eq!((severe.len(), &severe[0]["level"]), (1, &json!("crit")));
    server.stop();
}

fn errors_as_json_are_objects_with_any_input(driver: Driver) {
    let server = Setup::http(
        driver,
        "log_format uri '$uri';
         server { listen %UNIX%; root %DIR%/files; error_log %DIR%/json.log info json;
             error_log syslog:server=unix:%DIR%/syslog info json; }",
    )
    .start();
    let socket = UnixDatagram::bind(server.directory.path().join("syslog")).expect("a free name");
    std::fs::set_permissions(server.directory.path().join("syslog"), std::fs::Permissions::from_mode(0o777))
        .expect("own");
    socket.set_read_timeout(Some(DEADLINE)).expect("it is a socket");
    let mut client = server.connect();
    let long = "%01%22%5c%c3%28%f0%9f%98%80".repeat(200);
    for path in ["%00%01%1f%7f%c2%85", "%ff%fe%22%5c", "%22,%22level%22:%22forged%22%7d%0a%7b", "%e2%80%a8", &long] {
        client.send(format!("GET /{path} HTTP/1.1\r\nHost: h\r\nReferer: a\"b\\c\t"));
        client.send(b"\xff\xfe\x80\r\n\r\n");
        let status = client.response().status;
        assert!(matches!(status, 400 | 404), "{status}");
        if status == 400 {
            client = server.connect();
        }
    }
    client.send("GET /last HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(client.response().status, 404);
    server.directory.wait_line("json.log", "GET /last");
    let text = server.directory.read("json.log");
    assert!(text.lines().all(|line| line.len() < 2048 && !line.contains(|c: char| c.is_control())), "{text}");
    let lines = objects(&text);
    assert!(lines.iter().all(|line| line["level"] != "forged" && line["time"].is_string()), "{text}");
    let is_cut = |line: &Value| line["truncated"] == true && line["referrer"].is_string();
    assert!(lines.iter().any(is_cut), "{text}");
    // After the syslog header the line is cut shorter, and is still an object.
    for _ in &lines {
        let line = receive(&socket);
        let (_, object) = line.split_once(": ").expect("a header");
        assert_eq!(objects(object).len(), 1, "{line}");
        assert!(line.len() <= 2048, "{line}");
    }
    server.stop();
}

fn every_process_logs_json_where_the_main_context_says_so(driver: Driver) {
    let text = support::http_configuration(driver, "server { listen %UNIX%; root %DIR%/files; }");
    let text = text.replace("error.log info", "error.log info json");
    let mut server = Setup::configuration(&text).start();
    assert_eq!(server.get("/missing").status, 404);
    server.reload(&text);
    server.reload("a wrong configuration;");
    server.signal(Signal::USR1);
    server.wait_logged("reopening logs");
    let master = server.pid().as_raw_nonzero().get();
    server.end(Signal::TERM);
    let lines = objects(&server.log());
    let has = |what: &str| lines.iter().any(|line| line["message"].as_str().expect("text").contains(what));
    for what in ["event method", "/missing", "reconfiguring", "unknown directive", "reopening logs", "exit"] {
        assert!(has(what), "{what}\n{}", server.log());
    }
    assert!(lines.iter().any(|line| line["pid"] == master) && lines.iter().any(|line| line["pid"] != master));
    assert_eq!(lines.iter().filter(|line| line["connection"].is_number()).count(), 1);
}

fn errors_of_sessions_as_json_have_their_traffic(driver: Driver) {
    let text = support::stream_configuration(
        driver,
        "server { listen %TCP%; error_log %DIR%/json.log info json; proxy_pass unix:%DIR%/nobody; }",
    );
    let server = Setup::configuration(&text).start();
    server.connect_tcp(1).read_to_end();
    server.directory.wait_line("json.log", "connect() to");
    let lines = objects(&server.directory.read("json.log"));
    let failed = lines.iter().find(|line| line["errno"] == 2).expect("nobody listens there");
    assert_eq!((&failed["client"], &failed["bytes_from_client"]), (&json!("127.0.0.1"), &json!(0)));
    assert_eq!((&failed["bytes_to_upstream"], &failed["level"]), (&json!(0), &json!("crit")));
    assert!(failed["server"].is_string() && failed["upstream"].as_str().is_some_and(|peer| peer.contains("nobody")));
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

fn compressed_log_is_readable_by_zcat(driver: Driver) {
    let mut server = Setup::http(
        driver,
        "log_format uri '$uri';
         server { listen %UNIX%; access_log %DIR%/lines.gz uri gzip=9 buffer=1m flush=1m; return 200 hello; }
         server { listen %TCP%; access_log %DIR%/lines.gz uri; access_log %DIR%/own.gz uri gzip flush=10ms;
         return 200 hello; }",
    )
    .start();
    for number in 0..100 {
        server.get(&format!("/buffered/{number}"));
    }
    // This log without a buffer shares the file, and so its compression.
    server.connect_tcp(1).get("/at/once");
    server.directory.wait_until("a compressed file", |directory| {
        std::fs::read(directory.path().join("own.gz")).is_ok_and(|bytes| bytes.starts_with(&[0x1f, 0x8b]))
    });
    server.end(rustix::process::Signal::QUIT);
    let read = |name: &str| {
        let output = Command::new("zcat").arg(server.directory.path().join(name)).output().expect("zcat is there");
        assert!(output.status.success(), "{output:?}");
        let mut lines: Vec<String> =
            String::from_utf8(output.stdout).expect("text").lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let mut expected: Vec<String> = (0..100).map(|number| format!("/buffered/{number}")).collect();
    expected.push("/at/once".to_owned());
    expected.sort();
    assert_eq!(read("lines.gz"), expected);
    assert_eq!(read("own.gz"), ["/at/once"]);
}

fn the_request_may_decide_which_file_it_is_logged_to(driver: Driver) {
    let server = Setup::http(
        driver,
        "log_format uri '$uri'; server { listen %UNIX%; root %DIR%; access_log %DIR%/to-$arg_name.log uri;
             access_log logs-below-the-prefix/$arg_name uri if=$arg_prefix; return 200 hello; }",
    )
    .start();
    let mut client = server.connect();
    for (path, name) in [("/1", "a"), ("/2", "b"), ("/3", "a"), ("/4", "a%2Fb")] {
        client.get(&format!("{path}?name={name}"));
    }
    server.directory.wait_line("to-a.log", "/3");
    server.directory.wait_line("to-a%2Fb.log", "/4");
    assert_eq!(server.directory.read("to-a.log"), "/1\n/3\n");
    assert_eq!(server.directory.read("to-b.log"), "/2\n");
    client.get("/5?name=missing/directory");
    server.wait_logged("/to-missing/directory.log\" failed (2: No such file or directory) while logging request");
    server.stop();
}

fn files_of_requests_may_stay_open(driver: Driver) {
    let server = Setup::http(
        driver,
        "log_format uri '$uri'; open_log_file_cache max=2 inactive=1m min_uses=2 valid=1m;
         server { listen %UNIX%; root %DIR%; access_log %DIR%/to-$arg_name.log uri; return 200 hello; }",
    )
    .start();
    let path = |name: &str| server.directory.path().join(name);
    let mut client = server.connect();
    let mut log = |uri: &str, name: &str, file: &str| {
        client.get(&format!("{uri}?name={name}"));
        server.directory.wait_line(file, uri);
    };
    log("/1", "a", "to-a.log");
    log("/2", "a", "to-a.log");
    // The file is open now, and written after it was renamed.
    std::fs::rename(path("to-a.log"), path("moved")).expect("it is there");
    log("/3", "a", "moved");
    // Other files evict it.
    log("/4", "b", "to-b.log");
    log("/5", "c", "to-c.log");
    log("/6", "a", "to-a.log");
    assert_eq!(server.directory.read("moved"), "/1\n/2\n/3\n");
    server.stop();
}

fn a_log_that_the_request_names_is_only_made_below_an_existing_root(driver: Driver) {
    let server = Setup::http(
        driver,
        "server { listen %UNIX%; root %DIR%/sites/$arg_site; access_log %DIR%/site-$arg_site.log; return 200 hello; }",
    )
    .file("sites/real/index.html", "")
    .file("sites/file", "")
    .start();
    let mut client = server.connect();
    for site in ["made-up", "file", "real"] {
        client.get(&format!("/?site={site}"));
    }
    server.directory.wait_line("site-real.log", "GET /?site=real");
    server.wait_logged("sites/made-up\" existence failed (2: No such file or directory)");
    server.wait_logged("sites/file\" existence failed (20: Not a directory)");
    for name in ["site-made-up.log", "site-file.log"] {
        assert!(!server.directory.path().join(name).exists(), "{name}");
    }
    server.stop();
}

fn a_full_disk_is_told_of_once_and_not_for_each_line(driver: Driver) {
    let text = "server { listen %UNIX%; root %DIR%; access_log /dev/$arg_name; return 200 hello; }";
    let mut server = Setup::http(driver, text).start();
    for _ in 0..3 {
        assert_eq!(server.get("/?name=full").text(), "hello");
        server.wait_logged("write() to \"/dev/full\" failed (28: No space left on device) while logging request");
    }
    // This line comes after the failed ones; the writer thread keeps their order.
    assert_eq!(server.get("/?name=none/such").text(), "hello");
    server.wait_logged("open() \"/dev/none/such\" failed");
    assert_eq!(server.log().matches("write() to").count(), 1, "{server}");
    server.end(rustix::process::Signal::TERM);
}

/// Receives the next datagram as text.
#[track_caller]
fn receive(socket: &UnixDatagram) -> String {
    let mut bytes = [0; 4096];
    let length = socket.recv(&mut bytes).expect("a datagram in time");
    String::from_utf8(bytes[..length].to_vec()).expect("text")
}

fn syslog_gets_each_line_as_a_datagram(driver: Driver) {
    let text = support::http_configuration(
        driver,
        "log_format uri '$uri'; server { listen %UNIX%; root %DIR%/nothing; access_log off;
             location /a { access_log syslog:server=unix:%DIR%/syslog,facility=user,tag=access,nohostname uri;
             return 200 ok; }
             location /as { access_log syslog:severity=alert,server=unix:%DIR%/syslog uri if=$arg_log; return 200 ok; }
             location /e { error_log syslog:server=unix:%DIR%/syslog,severity=debug; } }",
    );
    // The sockets have to exist before anything is logged to them; their directory is created when the server starts.
    let mut server = Setup::configuration(&text).start();
    let bind = |name: &str| {
        let socket = UnixDatagram::bind(server.directory.path().join(name)).expect("a free name");
        socket.set_read_timeout(Some(DEADLINE)).expect("it is a socket");
        // The worker process may run as another user.
        std::fs::set_permissions(server.directory.path().join(name), std::fs::Permissions::from_mode(0o777))
            .expect("own");
        socket
    };
    let (main, socket) = (bind("main"), bind("syslog"));
    server.reload(&text.replace("events {", "error_log syslog:server=unix:%DIR%/main,tag=main notice; events {"));
    server.get("/a/one");
    let line = receive(&socket);
    assert!(line.starts_with("<14>") && line.ends_with(" access: /a/one"), "{line}");
    assert_eq!(line.len(), "<14>Nov 21 20:00:00 access: /a/one".len());
    let mut client = server.connect();
    client.get("/as");
    client.get("/as?log=1");
    let line = receive(&socket);
    assert!(line.starts_with("<185>") && line.ends_with(" gale: /as"), "{line}");
    assert_eq!(client.get("/e").status, 404);
    // The severity of an error is its level.
    let line = receive(&socket);
    assert!(line.starts_with("<187>") && line.contains(" gale: 20") && line.contains(" [error] "), "{line}");
    assert!(line.contains("/nothing/e\" failed (2: No such file or directory)") && !line.ends_with('\n'), "{line}");
    // The master process logs there, too.
    server.signal(rustix::process::Signal::USR1);
    let of_master = format!(" [notice] {}#", server.pid());
    let is_wanted = |line: &String| line.contains("reopening logs") && line.contains(&of_master);
    let line = std::iter::repeat_with(|| receive(&main)).find(is_wanted).expect("it comes");
    assert!(line.starts_with("<189>"), "{line}");
    assert!(line.contains(" main: "), "{line}");
    server.stop();
}

fn missing_syslog_server_delays_no_requests(driver: Driver) {
    let server = Server::start(driver, "access_log syslog:server=unix:%DIR%/nobody; return 200 ok;");
    let mut client = server.connect();
    for _ in 0..1000 {
        assert_eq!(client.get("/").status, 200);
    }
    // Ends the server without the check for [alert] lines, since this test expects one.
    server.wait_logged("write() to \"syslog:server=unix:");
    let mut server = server;
    server.end(rustix::process::Signal::TERM);
}

fn standard_error_stays_the_same_for_logs_that_use_it(driver: Driver) {
    let server = Server::start(driver, "root %DIR%; location /here { error_log stderr; } location /there { }");
    assert_eq!((server.get("/here").status, server.get("/there").status), (404, 404));
    server.directory.wait_line("stderr", "/here\" failed (2: No such file or directory)");
    server.wait_logged("/there\" failed (2: No such file or directory)");
    assert!(!server.log().contains("/here\" failed"));
    server.stop();
}

fn logs_without_a_name_are_standard_error(driver: Driver) {
    let text = "log_format path 'to $uri'; server { listen %UNIX%; root %DIR%; access_log '' path; error_log ''; }";
    let server = Setup::http(driver, text).start();
    assert_eq!(server.get("/here").status, 404);
    server.directory.wait_line("stderr", "to /here");
    server.directory.wait_line("stderr", "/here\" failed (2: No such file or directory)");
    server.stop();
}
