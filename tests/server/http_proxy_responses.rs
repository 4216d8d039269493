//! proxy: forwarding of upstream responses to the client.

use crate::support::answers::{KEEPALIVE, LENGTH, own_fields, post, scripted};
use crate::support::http2::Http2;
use crate::support::{Backend, Driver, Setup, with_each_driver};

with_each_driver!(
    a_response_is_passed_on_however_it_is_framed,
    a_response_without_a_body_has_none,
    a_head_may_be_as_long_as_its_buffer,
    fields_of_a_response_are_hidden_and_passed_as_configured,
    the_server_field_is_left_to_the_server_where_it_is_passed,
    the_server_has_a_say_with_x_accel_fields,
    internal_location_answers_the_path_of_x_accel_redirect,
    errors_of_the_server_are_intercepted_where_that_is_configured,
    the_page_of_an_error_keeps_the_last_modified_of_its_server,
    redirects_lead_back_through_the_proxy,
    cookies_are_rewritten,
    parts_are_cut_out_where_they_are_forced,
    one_part_is_cut_out_of_a_body_as_it_comes,
    x_accel_charset_names_the_charset_and_has_the_body_converted,
    trailers_and_early_hints_are_passed_on_where_they_may,
    interim_responses_and_trailers_hide_the_same_fields_as_responses,
);

fn a_response_is_passed_on_however_it_is_framed(driver: Driver) {
    let backend = scripted(&[
        ("/length", "HTTP/1.1 200 Fine\r\nContent-Length: 5\r\nX-Own: 1\r\n\r\nhello"),
        (
            "/chunked",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nhel\r\n2\r\nlo\r\n0\r\nX: y\r\n\r\n",
        ),
        ("/close", "HTTP/1.1 200 OK\r\n\r\nhelloCLOSE"),
        ("/1.0", "HTTP/1.0 200 OK\r\n\r\nhelloCLOSE"),
        ("/1.0/length", "HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhelloCLOSE"),
        ("/empty", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
        ("/nothing", "HTTP/1.1 200 OK\r\n\r\nCLOSE"),
        ("/no-chunks", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        ("/lines", "HTTP/1.1 200\nContent-Length: 5\n\nhello"),
        ("/status", "HTTP/1.1 299 \r\nContent-Length: 5\r\n\r\nhello"),
    ]);
    for buffering in ["on", "off"] {
        let setup = Setup::server(driver, "proxy_buffering MODE; location / { proxy_pass http://ADDRESS; }");
        let server = setup.replace("MODE", buffering).replace("ADDRESS", &backend.address).start();
        let mut client = server.connect();
        for (target, status, reason, body, length) in [
            ("/length", 200, "Fine", "hello", Some("5")),
            ("/chunked", 200, "OK", "hello", None),
            ("/close", 200, "OK", "hello", None),
            ("/1.0", 200, "OK", "hello", None),
            ("/1.0/length", 200, "OK", "hello", Some("5")),
            ("/empty", 200, "OK", "", Some("0")),
            ("/nothing", 200, "OK", "", None),
            ("/no-chunks", 200, "OK", "", None),
            ("/lines", 200, "", "hello", Some("5")),
            ("/status", 299, "", "hello", Some("5")),
        ] {
            let response = client.get(target);
            assert_eq!((response.status, response.text()), (status, body), "{target} {buffering}");
            assert_eq!(response.reason, reason, "{target} {buffering}");
            if length.is_some() {
                assert_eq!(response.header("Content-Length"), length, "{target} {buffering}");
            }
            assert!(response.trailers.is_empty(), "{target} {buffering}");
            // A client of HTTP/1.0 receives it without chunks.
            let response = server.connect().ask(format!("GET {target} HTTP/1.0\r\n\r\n"));
            assert_eq!((response.status, response.text()), (status, body), "{target} {buffering}");
            assert_eq!(response.header("Transfer-Encoding"), None, "{target} {buffering}");
        }
        server.stop();
    }
}

fn a_response_without_a_body_has_none(driver: Driver) {
    let backend = scripted(&[
        ("/204", "HTTP/1.1 204 No Content\r\nX-Own: 1\r\n\r\n"),
        ("/304", "HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\nContent-Length: 100\r\n\r\n"),
        ("/head", "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"),
        ("/head-chunked", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
        ("/next", LENGTH),
    ]);
    let setup = Setup::http(driver, KEEPALIVE);
    let server = setup.replace("ADDRESS", &backend.address).start();
    let mut client = server.connect();
    for _ in 0..2 {
        let response = client.get("/204");
        assert_eq!((response.status, own_fields(&response)), (204, vec!["X-Own: 1".to_owned()]));
        assert_eq!(client.get("/304").status, 304);
        let response = client.ask("HEAD /head HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!((response.status, response.header("Content-Length")), (200, Some("100")));
        let response = client.ask("HEAD /head-chunked HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!((response.status, response.header("Content-Length")), (200, None));
        assert_eq!(client.get("/next").text(), "ok");
    }
    // None of these responses left unread bytes on the connection.
    assert_eq!(backend.connection_count(), 1);
    server.stop();
}

fn a_head_may_be_as_long_as_its_buffer(driver: Driver) {
    let backend = Backend::tcp().serve(|asked, client| {
        let length: usize = asked.target[1..].parse().expect("a number");
        let head = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Long: ";
        let padding = "x".repeat(length - head.len() - 4);
        client.try_send(format!("{head}{padding}\r\n\r\nok")).is_ok()
    });
    let setup = Setup::server(driver, "location / { proxy_buffer_size 4k; proxy_pass http://ADDRESS; }");
    let server = setup.replace("ADDRESS", &backend.address).start();
    let mut client = server.connect();
    assert_eq!(client.get("/4000").text(), "ok");
    assert_eq!(client.get("/4200").status, 502);
    server.wait_logged("upstream sent too big header while reading response header from upstream");
    assert_eq!(client.get("/1000000").status, 502);
    assert_eq!(client.get("/100").text(), "ok");
    server.stop();
}

fn fields_of_a_response_are_hidden_and_passed_as_configured(driver: Driver) {
    let backend = scripted(&[(
        "/",
        "HTTP/1.1 200 OK\r\nDate: d\r\nServer: s\r\nX-Pad: p\r\nX-Accel-Expires: 5\r\nX-Accel-Own: o\r\n\
         Connection: X-Listed\r\nX-Listed: l\r\nX-Own: 1\r\nx-oWN: 2\r\nCache-Control: no-store\r\n\
         Vary: Accept\r\nContent-Type: a/b; c=d\r\nContent-Length: 2\r\n\r\nok",
    )]);
    let setup = Setup::server(
        driver,
        "rewrite ^ / break;
         location / { proxy_pass http://ADDRESS; }
         location /hide { proxy_hide_header x-own; proxy_hide_header Vary; proxy_pass http://ADDRESS; }
         location /pass { proxy_pass_header X-Pad; proxy_pass_header Server; proxy_pass_header date;
             proxy_pass_header X-Accel-Expires; proxy_pass http://ADDRESS; }",
    );
    let setup = setup.replace("rewrite ^ / break;", "");
    let setup = setup.replace("proxy_pass http://ADDRESS;", "rewrite ^ / break; proxy_pass http://ADDRESS;");
    let server = setup.replace("ADDRESS", &backend.address).start();
    let fields = |target| {
        let response = server.get(target);
        let mut fields: Vec<String> = response.headers.iter().map(|(name, value)| format!("{name}: {value}")).collect();
        fields.retain(|field| !field.starts_with("Connection") && !field.starts_with("Content-"));
        fields.retain(|field| !field.starts_with("Date: ") || field == "Date: d");
        fields.retain(|field| !field.starts_with("Server: ") || field == "Server: s");
        fields
    };
    let usual = ["X-Accel-Own: o", "X-Own: 1", "x-oWN: 2", "Cache-Control: no-store", "Vary: Accept"];
    assert_eq!(fields("/"), usual);
    assert_eq!(fields("/hide"), ["X-Accel-Own: o", "Cache-Control: no-store"]);
    let all = ["Date: d", "Server: s", "X-Pad: p", "X-Accel-Expires: 5"];
    let mut passed = fields("/pass");
    let mut expected: Vec<&str> = all.iter().chain(&usual).copied().collect();
    passed.sort();
    expected.sort_unstable();
    assert_eq!(passed, expected);
    server.stop();
}

fn the_server_field_is_left_to_the_server_where_it_is_passed(driver: Driver) {
    let backend = scripted(&[
        ("/with", "HTTP/1.1 200 OK\r\nServer: its own\r\nContent-Length: 2\r\n\r\nok"),
        ("/without", LENGTH),
        ("/failing", "HTTP/1.1 500 Error\r\nContent-Length: 0\r\n\r\n"),
    ]);
    let setup = Setup::server(
        driver,
        "http2 on; proxy_intercept_errors on; error_page 500 /500; location /500 { return 500 ours; }
         location / { proxy_pass http://ADDRESS; }
         location /pass/ { proxy_pass_header server; proxy_pass http://ADDRESS/;
             location /pass/in/ { proxy_pass http://ADDRESS/; } }",
    );
    let server = setup.replace("ADDRESS", &backend.address).start();
    for (target, expected) in [
        ("/with", Some("gale")),
        ("/without", Some("gale")),
        ("/pass/with", Some("its own")),
        ("/pass/without", None),
        ("/pass/in/without", None),
        ("/pass/failing", Some("gale")),
    ] {
        let response = server.get(target);
        let is_as_expected = |found: Option<&str>| match (found, expected) {
            (Some(found), Some(expected)) => found.starts_with(expected),
            (found, expected) => found == expected,
        };
        assert!(is_as_expected(response.header("Server")), "{target}: {response:?}");
        assert!(response.header("Date").is_some(), "{target}: whoever forwards adds one (RFC 9110 6.6.1)");
        let answer = Http2::unix(&server).get(target);
        assert!(is_as_expected(answer.header("server")), "{target}: {answer:?}");
    }
    server.stop();
}

fn the_server_has_a_say_with_x_accel_fields(driver: Driver) {
    let backend = scripted(&[
        (
            "/charset",
            "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nX-Accel-Charset: koi8-r\r\nContent-Length: 2\r\n\r\nok",
        ),
        ("/buffering", "HTTP/1.1 200 OK\r\nX-Accel-Buffering: no\r\nContent-Length: 2\r\n\r\nok"),
        ("/rate", "HTTP/1.1 200 OK\r\nX-Accel-Limit-Rate: 1000000\r\nContent-Length: 2\r\n\r\nok"),
        (
            "/bad",
            "HTTP/1.1 200 OK\r\nX-Accel-Limit-Rate: -1\r\nX-Accel-Buffering: maybe\r\nContent-Length: 2\r\n\r\nok",
        ),
        ("/redirect", "HTTP/1.1 200 OK\r\nX-Accel-Redirect: /elsewhere\r\nContent-Length: 2\r\n\r\nok"),
    ]);
    let setup = Setup::server(
        driver,
        "charset utf-8; location / { proxy_pass http://ADDRESS; }
         location /redirect { proxy_ignore_headers X-Accel-Redirect; proxy_pass http://ADDRESS; }
         location /ignores/ { proxy_ignore_headers X-Accel-Charset; proxy_pass http://ADDRESS/; }",
    );
    let server = setup.replace("ADDRESS", &backend.address).start();
    let mut client = server.connect();
    for target in ["/charset", "/buffering", "/rate", "/bad", "/redirect"] {
        let response = client.get(target);
        assert_eq!((response.status, response.text()), (200, "ok"), "{target}");
        assert!(!response.headers.iter().any(|(name, _)| name.starts_with("X-Accel")), "{target}: {response:?}");
    }
    assert_eq!(client.get("/ignores/charset").header("Content-Type"), Some("text/html; charset=utf-8"));
    server.stop();
}

fn the_page_of_an_error_keeps_the_last_modified_of_its_server(driver: Driver) {
    const PAGE: &str = "HTTP/1.1 200 OK\r\nLast-Modified: Tue, 01 Jan 2019 00:00:00 GMT\r\nCache-Control: max-age=9\r\n\
        Content-Type: text/html\r\nContent-Length: 4\r\n\r\npage";
    let backend = scripted(&[("/page", PAGE), ("/cached", PAGE), ("/changed", PAGE), ("/replaced", PAGE)]);
    let setup = Setup::http(
        driver,
        "proxy_cache_path %DIR%/cache keys_zone=pages:1m;
         server { listen %UNIX%; error_page 404 /page; error_page 403 =200 /page; error_page 405 /cached;
         error_page 406 /changed; error_page 409 /replaced;
         location / { proxy_pass http://ADDRESS; }
         location /cached { proxy_cache pages; proxy_pass http://ADDRESS; }
         location /changed { sub_filter x y; proxy_pass http://ADDRESS; }
         location /replaced { add_header Last-Modified own always; proxy_pass http://ADDRESS; }
         location ~ ^/return/(?<code>.*) { if ($code = 404) { return 404; } if ($code = 403) { return 403; }
             if ($code = 405) { return 405; } if ($code = 406) { return 406; } return 409; } }",
    );
    let server = setup.replace("ADDRESS", &backend.address).start();
    let mut client = server.connect();
    let date = Some("Tue, 01 Jan 2019 00:00:00 GMT");
    for (code, status, expected) in [
        (404, 404, date),
        (403, 200, date),
        (405, 405, date),
        (405, 405, date),
        (406, 406, None),
        (409, 409, Some("own")),
    ] {
        let response = client.get(&format!("/return/{code}"));
        assert_eq!((response.status, response.text()), (status, "page"));
        assert_eq!(response.header("Last-Modified"), expected, "{code}");
    }
    server.stop();
}

fn internal_location_answers_the_path_of_x_accel_redirect(driver: Driver) {
    let backend = scripted(&[
        (
            "/file",
            "HTTP/1.1 200 OK\r\nX-Accel-Redirect: /inner/file.txt?a=b\r\nContent-Type: x/y\r\n\
            Set-Cookie: c=1\r\nX-Other: z\r\nContent-Length: 4\r\n\r\nbody",
        ),
        ("/status", "HTTP/1.1 404 Not Found\r\nX-Accel-Redirect: /inner/file.txt\r\nContent-Length: 0\r\n\r\n"),
        ("/named", "HTTP/1.1 200 OK\r\nX-Accel-Redirect: @named\r\nContent-Length: 0\r\n\r\n"),
        ("/again", "HTTP/1.1 200 OK\r\nX-Accel-Redirect: /second/x%20y?q\r\nContent-Length: 0\r\n\r\n"),
        ("/second/x%20y", LENGTH),
        ("/typed", "HTTP/1.1 200 OK\r\nX-Accel-Redirect: /its\r\nContent-Type: x/y\r\nContent-Length: 0\r\n\r\n"),
        ("/its", "HTTP/1.1 200 OK\r\nContent-Type: its/own\r\nContent-Length: 2\r\n\r\nok"),
        ("/untyped", "HTTP/1.1 200 OK\r\nX-Accel-Redirect: /none\r\nContent-Type: x/y\r\nContent-Length: 0\r\n\r\n"),
        ("/none", LENGTH),
        ("/loop", "HTTP/1.1 200 OK\r\nX-Accel-Redirect: /loop\r\nContent-Length: 0\r\n\r\n"),
        ("/unsafe", "HTTP/1.1 200 OK\r\nX-Accel-Redirect: /inner/../../gale.conf\r\nContent-Length: 0\r\n\r\n"),
        ("/encoded", "HTTP/1.1 200 OK\r\nX-Accel-Redirect: /inner/%66ile.txt\r\nContent-Length: 0\r\n\r\n"),
        ("/endless", "HTTP/1.1 200 OK\r\nX-Accel-Redirect: /inner/file.txt\r\n\r\n"),
    ]);
    let setup = Setup::server(
        driver,
        "location / { proxy_pass http://ADDRESS; }
         location /inner/ { internal; root %DIR%; add_header X-Args $args; add_header X-Was $upstream_http_x_other; }
         location @named { return 200 named; }",
    );
    let server = setup.replace("ADDRESS", &backend.address).file("inner/file.txt", "a file").start();
    let mut client = server.connect();
    let response = client.get("/file");
    assert_eq!((response.status, response.text()), (200, "a file"));
    assert_eq!((response.header("Content-Type"), response.header("Set-Cookie")), (Some("x/y"), Some("c=1")));
    assert_eq!((response.header("X-Args"), response.header("X-Other")), (Some("a=b"), None));
    assert_eq!(response.header("X-Was"), Some("z"));
    assert_eq!((client.get("/inner/file.txt").status, client.get("/named").text()), (404, "named"));
    // The upstream's own Content-Type overrides the file's.
    assert_eq!(client.get("/typed").header("Content-Type"), Some("its/own"));
    assert_eq!(client.get("/untyped").header("Content-Type"), Some("x/y"));
    for (target, status, text) in
        [("/status", 200, "a file"), ("/again", 200, "ok"), ("/encoded", 200, "a file"), ("/endless", 200, "a file")]
    {
        let response = client.get(target);
        assert_eq!((response.status, response.text()), (status, text), "{target}");
    }
    // The request becomes a GET; as in nginx its body is still sent.
    assert_eq!(post(&mut client, "/again", "Content-Length: 3\r\n", "abc").text(), "ok");
    let (_, last) = backend.asked().pop().expect("asked");
    assert_eq!((&*last.method, &*last.target), ("GET", "/second/x%20y?q"));
    assert_eq!(client.get("/loop").status, 500);
    server.wait_logged("rewrite or internal redirection cycle while internally redirecting to \"/loop\"");
    assert_eq!(server.get("/unsafe").status, 404);
    server.wait_logged("unsafe URI \"/inner/../../gale.conf\" was detected");
    server.stop();
}

fn errors_of_the_server_are_intercepted_where_that_is_configured(driver: Driver) {
    let backend = scripted(&[
        ("/404", "HTTP/1.1 404 Not Found\r\nX-Own: 1\r\nContent-Length: 5\r\n\r\ntheir"),
        ("/401", "HTTP/1.1 401 No\r\nWWW-Authenticate: Basic realm=x\r\nContent-Length: 0\r\n\r\n"),
        ("/503", "HTTP/1.1 503 No\r\nContent-Length: 5\r\n\r\ntheir"),
    ]);
    let setup = Setup::server(
        driver,
        "error_page 404 401 /own; location /own { return 200 own; } location / { proxy_pass http://ADDRESS; }
         location /on/ { proxy_intercept_errors on; proxy_pass http://ADDRESS/; }",
    );
    let server = setup.replace("ADDRESS", &backend.address).start();
    let mut client = server.connect();
    let response = client.get("/404");
    assert_eq!((response.status, response.text(), response.header("X-Own")), (404, "their", Some("1")));
    let response = client.get("/on/404");
    assert_eq!((response.status, response.text(), response.header("X-Own")), (404, "own", None));
    let response = client.get("/on/401");
    assert_eq!((response.status, response.header("WWW-Authenticate")), (401, Some("Basic realm=x")));
    // No `error_page` is configured for this status.
    assert_eq!(client.get("/on/503").text(), "their");
    server.stop();
}

fn redirects_lead_back_through_the_proxy(driver: Driver) {
    let backend = Backend::tcp().serve(|asked, client| {
        let (_, value) = asked.target.split_once('?').expect("a value");
        let value = value.replace("ADDRESS", asked.header("Host").expect("a host"));
        let name = if value.starts_with('0') { "Refresh" } else { "Location" };
        client.send(format!("HTTP/1.1 302 Found\r\n{name}: {value}\r\nContent-Length: 0\r\n\r\n"));
        true
    });
    let setup = Setup::server(
        driver,
        "location /one/ { proxy_pass http://ADDRESS/two/; } location /plain/ { proxy_pass http://ADDRESS; }
         location /off/ { proxy_redirect off; proxy_pass http://ADDRESS/two/; }
         location /rules/ { proxy_pass http://ADDRESS/two/; proxy_redirect http://a/x/ /y/; proxy_redirect default;
             proxy_redirect ~^http://b/(\\d+)$ http://$host/n$1; proxy_redirect ~*^HTTP://c/ /c/;
             proxy_redirect http://$arg_h/ /h/; }",
    );
    let server = setup.replace("ADDRESS", &backend.address).start();
    let mut client = server.connect();
    for (target, expected) in [
        ("/one?x=1", "http://localhost/one/?x=1"),
        ("/one/?http://ADDRESS/two/x?y", "http://localhost/one/x?y"),
        ("/one/?http://ADDRESS/other/x", "http://ADDRESS/other/x"),
        ("/one/?/two/x", "/two/x"),
        ("/one/?https://ADDRESS/two/x", "https://ADDRESS/two/x"),
        ("/plain/?http://ADDRESS/x", "http://localhost/x"),
        ("/one/?0;url=http://ADDRESS/two/x", "0;url=/one/x"),
        ("/one/?0", "0"),
        ("/off/?http://ADDRESS/two/x", "http://ADDRESS/two/x"),
        ("/rules/?http://a/x/z", "http://localhost/y/z"),
        ("/rules/?http://ADDRESS/two/x", "http://localhost/rules/x"),
        ("/rules/?http://b/12", "http://localhost/n12"),
        ("/rules/?http://b/x12", "http://b/x12"),
        ("/rules/?http://C/x", "http://localhost/c/"),
    ] {
        let response = client.get(target);
        let name = if target.contains("?0") { "Refresh" } else { "Location" };
        let value = response.header(name).expect("there").replace(&backend.address, "ADDRESS");
        assert_eq!(value, expected, "{target}");
    }
    server.stop();
}

fn cookies_are_rewritten(driver: Driver) {
    let backend = scripted(&[(
        "/",
        "HTTP/1.1 200 OK\r\nSet-Cookie: a=1; Domain=inner.example; Path=/in/x; HttpOnly\r\n\
         Set-Cookie: b=2; path=/other\r\nSet-Cookie: c=3\r\nContent-Length: 0\r\n\r\n",
    )]);
    let setup = Setup::server(
        driver,
        "location / { proxy_pass http://ADDRESS; }
         location = /rewritten { proxy_cookie_domain inner.example outer.example; proxy_cookie_path /in/ /out/;
             proxy_cookie_flags a nohttponly foo secure; proxy_cookie_flags ~^c samesite=strict;
             proxy_pass http://ADDRESS/; }",
    );
    let server = setup.replace("ADDRESS", &backend.address).start();
    let cookies = |target| -> Vec<String> {
        let fields = server.get(target).headers;
        fields.into_iter().filter(|(name, _)| name == "Set-Cookie").map(|(_, value)| value).collect()
    };
    let usual = ["a=1; Domain=inner.example; Path=/in/x; HttpOnly", "b=2; path=/other", "c=3"];
    assert_eq!(cookies("/"), usual);
    let changed = ["a=1; Domain=outer.example; Path=/out/x; Secure", "b=2; path=/other", "c=3; SameSite=Strict"];
    assert_eq!(cookies("/rewritten"), changed);
    assert!(server.stderr().contains("unknown cookie flag \"foo\" is ignored"), "{}", server.stderr());
    server.stop();
}

fn parts_are_cut_out_where_they_are_forced(driver: Driver) {
    let backend = scripted(&[
        ("/", "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0123456789"),
        ("/own", "HTTP/1.1 206 Part\r\nContent-Range: bytes 2-3/10\r\nContent-Length: 2\r\n\r\n23"),
    ]);
    let setup = Setup::server(
        driver,
        "location / { proxy_pass http://ADDRESS; } location = /force \
         { proxy_force_ranges on; proxy_pass http://ADDRESS/; }",
    );
    let server = setup.replace("ADDRESS", &backend.address).start();
    let mut client = server.connect();
    let mut part = |target| client.ask(format!("GET {target} HTTP/1.1\r\nHost: h\r\nRange: bytes=2-3\r\n\r\n"));
    assert_eq!((part("/").status, part("/own").text()), (200, "23"));
    let response = part("/force");
    assert_eq!((response.status, response.text()), (206, "23"));
    assert_eq!(response.header("Content-Range"), Some("bytes 2-3/10"));
    assert_eq!(part("/own").header("Content-Range"), Some("bytes 2-3/10"));
    server.stop();
}

fn x_accel_charset_names_the_charset_and_has_the_body_converted(driver: Driver) {
    let backend = Backend::tcp().serve(|asked, client| {
        let fields = match &*asked.target {
            "/redirect" => "X-Accel-Charset: koi8-r\r\nX-Accel-Redirect: /own\r\n",
            "/wrong" => "X-Accel-Charset: a b; c\r\n",
            _ => "X-Accel-Charset: utf-8\r\n",
        };
        let head = format!("HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n{fields}Content-Length: 1\r\n\r\n");
        client.try_send([head.as_bytes(), &[0x41]].concat()).is_ok()
    });
    let setup = Setup::http(
        driver,
        "charset_map x-test utf-8 { 41 C3A9; }
         server { listen %UNIX%;
         location / { proxy_pass http://ADDRESS; }
         location /ignored { proxy_ignore_headers X-Accel-Charset; proxy_pass http://ADDRESS/; }
         location /from { source_charset x-test; proxy_pass http://ADDRESS/; }
         location /own { return 200 own; } }",
    );
    let server = setup.replace("ADDRESS", &backend.address).start();
    let mut client = server.connect();
    for (target, content_type) in [
        ("/", "text/html; charset=utf-8"),
        ("/wrong", "text/html"),
        ("/ignored", "text/html"),
        ("/from", "text/html; charset=utf-8"),
        ("/redirect", "text/html; charset=koi8-r"),
    ] {
        let response = client.get(target);
        assert_eq!(response.header("Content-Type"), Some(content_type), "{target}");
        assert_eq!(response.header("X-Accel-Charset"), None, "{target}");
        let body: &[u8] = match target {
            "/from" => "\u{e9}".as_bytes(),
            "/redirect" => b"own",
            _ => b"A",
        };
        assert_eq!(response.body, body, "{target}");
    }
    server.stop();
}

fn one_part_is_cut_out_of_a_body_as_it_comes(driver: Driver) {
    let backend = Backend::tcp();
    let setup = Setup::server(
        driver,
        "proxy_force_ranges on; location / { proxy_pass http://ADDRESS; }
         location /unbuffered { proxy_buffering off; proxy_pass http://ADDRESS; }",
    );
    let server = setup.replace("ADDRESS", backend.address()).start();
    for target in ["/", "/unbuffered"] {
        for (range, expected) in [
            ("2-3", Some("23")),
            ("0-1", Some("01")),
            ("4-", Some("456789")),
            ("-1", Some("9")),
            ("3-6", Some("3456")),
            ("0-1,5-6", None),
        ] {
            let mut client = server.connect();
            client.send(format!("GET {target} HTTP/1.1\r\nHost: h\r\nRange: bytes={range}\r\n\r\n"));
            let mut peer = backend.accept();
            peer.request();
            peer.send("HTTP/1.1 200 OK\r\nAccept-Ranges: bytes\r\nContent-Length: 10\r\n\r\n012");
            let head = client.response_to_head();
            let offers = head.headers.iter().filter(|(name, _)| name == "Accept-Ranges").count();
            assert_eq!(offers, usize::from(expected.is_none()), "{range}");
            let whole = "0123456789";
            assert_eq!(head.status, if expected.is_some() { 206 } else { 200 }, "{range}");
            let length = expected.unwrap_or(whole).len();
            assert_eq!(head.header("Content-Length"), Some(&*length.to_string()), "{range}");
            // Writes may fail: the client needs no more of the body.
            let _ = peer.try_send("34");
            let _ = peer.try_send("56789");
            assert_eq!(client.take(length), expected.unwrap_or(whole).as_bytes(), "{range}");
            assert_eq!(client.get("/missing/../..").status, 400, "the connection goes on");
        }
    }
    server.stop();
}

fn interim_responses_and_trailers_hide_the_same_fields_as_responses(driver: Driver) {
    const HIDDEN: &str = "X-Hidden: 1\r\nX-Accel-Redirect: /secret\r\nX-Accel-Expires: 5\r\nServer: inner\r\n";
    let interim = format!("HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nContent-Length: 0\r\n{HIDDEN}\r\n");
    let many = "HTTP/1.1 102 Processing\r\n\r\n".repeat(100);
    let last = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n";
    let answer = format!("{many}{interim}{last}X-Sum: 1\r\n{HIDDEN}\r\n");
    // Interim responses that are together larger than a head may be.
    let large = format!("HTTP/1.1 103 Early Hints\r\nLink: <{}>\r\n\r\n", "a".repeat(900)).repeat(3);
    let large = format!("{large}HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    let backend = scripted(vec![("/", &*answer.leak()), ("/large", &*large.leak())].leak());
    let setup = Setup::server(
        driver,
        "early_hints 1; proxy_pass_trailers on; proxy_hide_header X-Hidden; http2 on;
         location / { proxy_pass http://ADDRESS; }
         location /large { proxy_buffer_size 1k; proxy_buffers 4 1k; proxy_pass http://ADDRESS; }",
    );
    let server = setup.replace("ADDRESS", &backend.address).start();
    let mut client = server.connect();
    let hints = client.ask("GET / HTTP/1.1\r\nHost: h\r\nTE: trailers\r\nConnection: TE\r\n\r\n");
    assert_eq!(hints.status, 103);
    assert_eq!(hints.headers, [("Link".to_owned(), "</a>".to_owned())]);
    let response = client.response();
    assert_eq!(response.text(), "ok");
    assert_eq!(response.trailers, [("X-Sum".to_owned(), "1".to_owned())]);
    let mut client = server.connect();
    assert_eq!(client.get("/large").status, 103);
    server.wait_logged("upstream sent too big early hints");
    assert_eq!(client.response().text(), "ok");
    server.stop();
}

fn trailers_and_early_hints_are_passed_on_where_they_may(driver: Driver) {
    let backend = scripted(&[
        (
            "/trailers",
            "HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n\
            2\r\nok\r\n0\r\nX-Sum: 1\r\nContent-Length: 7\r\n\r\n",
        ),
        (
            "/hints",
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n\
            HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        ),
    ]);
    let setup = Setup::server(
        driver,
        "location / { proxy_pass http://ADDRESS; }
         location /on/ { early_hints 1; proxy_pass_trailers on; proxy_pass http://ADDRESS/; }",
    );
    let server = setup.replace("ADDRESS", &backend.address).start();
    let mut client = server.connect();
    assert_eq!((client.get("/trailers").trailers, client.get("/hints").text()), (vec![], "ok"));
    let response = client.ask("GET /on/trailers HTTP/1.1\r\nHost: h\r\nTE: trailers\r\nConnection: TE\r\n\r\n");
    assert_eq!(response.text(), "ok");
    let is_sum = |(name, value): &&(String, String)| name == "X-Sum" && value == "1";
    assert_eq!(response.trailers.iter().filter(is_sum).count(), 1, "{response:?}");
    assert!(!response.trailers.iter().any(|(name, _)| name == "Content-Length"), "{response:?}");
    let hints = client.get("/on/hints");
    assert_eq!((hints.status, hints.header("Link")), (103, Some("</a>")));
    assert_eq!(client.response().text(), "ok");
    server.stop();
}
