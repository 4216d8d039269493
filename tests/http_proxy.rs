//! proxy: what servers are asked for, what of the request they get, and what of their answers the client gets.

mod support;

use support::{Asked, Backend, Client, Driver, Response, Serving, Setup, with_each_driver};

with_each_driver!(
    the_location_of_a_uri_is_replaced_as_documented,
    a_request_has_the_usual_fields_and_those_that_are_set,
    fields_that_are_set_are_inherited_all_or_none,
    fields_of_the_clients_connection_are_not_passed_on,
    a_body_is_sent_with_its_length_when_it_is_whole,
    an_unbuffered_body_is_sent_as_it_comes,
    an_unbuffered_body_is_gone_for_another_server,
    what_is_sent_in_place_of_the_clients_body_and_method_is_framed_anew,
    what_is_not_to_be_passed_stays_here,
    a_client_that_expects_100_is_told_to_continue,
    a_client_that_breaks_off_its_body_reaches_nobody_or_ends_the_request,
    a_body_that_is_too_large_reaches_nobody,
    a_response_is_passed_on_however_it_is_framed,
    a_response_without_a_body_has_none,
    a_connection_is_kept_only_where_the_response_leaves_it_clean,
    a_head_may_be_as_long_as_its_buffer,
    fields_of_a_response_are_hidden_and_passed_as_configured,
    the_server_has_a_say_with_x_accel_fields,
    an_internal_location_answers_what_x_accel_redirect_names,
    errors_of_the_server_are_intercepted_where_that_is_configured,
    redirects_lead_back_through_the_proxy,
    cookies_are_rewritten,
    parts_are_cut_out_where_they_are_forced,
    one_part_is_cut_out_of_a_body_as_it_comes,
    forwarded_names_the_client_the_host_and_the_protocol,
    a_request_has_no_more_time_than_its_whole_may_take,
    a_connection_that_stands_for_a_user_is_not_used_again,
    a_post_does_not_meet_a_connection_that_has_been_closed,
    x_accel_charset_names_the_charset_and_has_the_body_converted,
    trailers_and_early_hints_are_passed_on_where_they_may,
    a_unix_socket_is_a_server_too,
    variables_tell_of_every_server_that_was_tried,
    what_goes_wrong_is_logged_in_nginx_words,
);

/// A request for `target` of the server named so.
fn ask(client: &mut Client, host: &str, target: &str) -> Response {
    client.ask(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n"))
}

/// Sends one response with these fields, each with its line's end, and this body.
fn respond(client: &mut Client, fields: &str, body: &str) {
    client.send(format!("HTTP/1.1 200 OK\r\n{fields}Content-Length: {}\r\n\r\n{body}", body.len()));
}

/// A backend that answers with the target that it was asked for.
fn echo() -> Serving {
    Backend::tcp().serve(|asked, client| {
        respond(client, "", &asked.target);
        true
    })
}

/// What a server says, and what comes out of which targets.
type Row = (&'static str, &'static [(&'static str, &'static str)]);

/// `B` is the server.
const URIS: &[Row] = &[
    // Without a URI: as the client sent it.
    (
        "location / { proxy_pass http://B; }",
        &[
            ("/a/b?x=1", "/a/b?x=1"),
            ("/a%20b//%2e%2E/c/../d?x=%20", "/a%20b//%2e%2E/c/../d?x=%20"),
            ("/?", "/?"),
            ("/\u{e4}%e4", "/\u{e4}%e4"),
            ("http://h/abs/x%20y?z", "/abs/x%20y?z"),
            ("http://h?x=1", "/?x=1"),
            ("http://h", "/"),
        ],
    ),
    (
        "location /name/ { proxy_pass http://B; } location ~ ^/re { proxy_pass http://B; }",
        &[("/name/x%2fy", "/name/x%2fy"), ("/other/../name/z", "/other/../name/z"), ("/re%20a/b", "/re%20a/b")],
    ),
    // With one: in place of the location.
    (
        "location /name/ { proxy_pass http://B/remote/; }",
        &[
            ("/name/x", "/remote/x"),
            ("/name/", "/remote/"),
            ("/name/?a=b&c", "/remote/?a=b&c"),
            ("/name//x/./y/../z", "/remote/x/z"),
            ("/%6eame/x", "/remote/x"),
            ("/name/x%20y", "/remote/x%20y"),
            ("/name/x%3fy%23z", "/remote/x%3Fy%23z"),
            ("/name/x%25y", "/remote/x%25y"),
            ("/name/a%2fb", "/remote/a/b"),
            ("/name/a%2Fb%2e%2e", "/remote/a/b.."),
            ("/name/%0d%0aX:y", "/remote/%0D%0AX:y"),
            ("/name/\u{e4}", "/remote/\u{e4}"),
            ("/name/%c3%a4", "/remote/%C3%A4"),
            ("http://h/name/x?y", "/remote/x?y"),
        ],
    ),
    ("merge_slashes off; location /name/ { proxy_pass http://B/remote/; }", &[("/name//x", "/remote//x")]),
    ("location /name/ { proxy_pass http://B/remote; }", &[("/name/x", "/remotex"), ("/name/", "/remote")]),
    ("location /name { proxy_pass http://B/remote/; }", &[("/name/x", "/remote//x"), ("/names", "/remote/s")]),
    ("location / { proxy_pass http://B/; }", &[("/a%20b/./c?d", "/a%20b/c?d"), ("/", "/")]),
    ("location / { proxy_pass http://B?x=1; }", &[("/a", "/?x=1a"), ("/?b", "/?x=1?b")]),
    (
        "location = /exact { proxy_pass http://B/other?z=1; } location ^~ /first/ { proxy_pass http://B/1/; }",
        &[("/exact", "/other?z=1"), ("/exact?q", "/other?z=1?q"), ("/first/x", "/1/x")],
    ),
    (
        "location /outer/ { proxy_pass http://B/o/; location /outer/inner/ { proxy_pass http://B/i/; } }",
        &[("/outer/x", "/o/x"), ("/outer/inner/x", "/i/x")],
    ),
    // Changed by `rewrite ... break`: the whole changed URI, and that of `proxy_pass` is ignored.
    (
        "location /name/ { rewrite /name/([^/]+) /users?name=$1 break; proxy_pass http://B/ignored/; }
         location /plain/ { rewrite ^/plain/(.*)$ /changed/$1 break; proxy_pass http://B; }",
        &[
            ("/name/bob", "/users?name=bob"),
            ("/name/bob?a=1", "/users?name=bob&a=1"),
            ("/plain/a%20b?x", "/changed/a%20b?x"),
            ("/plain/a%3Fb", "/changed/a%3Fb"),
        ],
    ),
    // With variables: exactly what they say, or the request's where they say no URI.
    (
        "set $b B; location /uri/ { proxy_pass http://B$request_uri; }
         location /fixed/ { proxy_pass http://$b/fixed; }
         location /args/ { proxy_pass http://$b/with$is_args$args; }
         location /none/ { proxy_pass http://$b; }
         location /query/ { proxy_pass http://$b?q=$arg_q; }
         location ~ ^/re/(.*)$ { proxy_pass http://$b/$1; }
         location /changed/ { rewrite ^/changed/(.*)$ /to/$1 break; proxy_pass http://$b; }
         location /decoded/ { proxy_pass http://$b$uri; }",
        &[
            ("/uri/x%20y//?z", "/uri/x%20y//?z"),
            ("http://h/uri/x?z", "/uri/x?z"),
            ("/fixed/x?y", "/fixed"),
            ("/args/x?y=1", "/with?y=1"),
            ("/args/x", "/with"),
            ("/none/x%20y?z", "/none/x%20y?z"),
            ("/query/?q=7", "/?q=7"),
            ("/re/x/y", "/x/y"),
            ("/changed/x%20y?z", "/to/x%20y?z"),
            ("/decoded/xy", "/decoded/xy"),
        ],
    ),
    // Where nothing can be replaced.
    (
        "location / { try_files /nothing @there; } location @there { proxy_pass http://B; }
         location /changed/ { rewrite ^/changed/(.*)$ /to/$1 break; try_files /nothing @there; }
         location /error { error_page 404 =200 @there; return 404; }",
        &[("/a%20b//c?d", "/a%20b//c?d"), ("/changed/x%20y?z", "/to/x%20y?z"), ("/error%20?x", "/error%20?x")],
    ),
    (
        "location / { if ($arg_a) { proxy_pass http://B; } }
         location /set/ { proxy_pass http://B/main/; if ($arg_a) { set $x y; } if ($arg_b) { proxy_pass http://B; } }",
        &[("/x%20?a=1", "/x%20?a=1"), ("/set/x?a=1", "/main/x?a=1"), ("/set/x?b=1", "/set/x?b=1")],
    ),
    // Elsewhere: as the redirect has left it, encoded again.
    (
        "location /start { rewrite ^/start(.*)$ /out/new$1 last; }
         location /error { error_page 404 =200 /out/e?f=$arg_x; return 404; }
         location /try/ { try_files /nothing /out/t$is_args$args; }
         location /out/ { proxy_pass http://B; } location /replaced/ { proxy_pass http://B/r/; }
         location /second { rewrite ^/second(.*)$ /replaced$1 last; }",
        &[
            ("/start/a%20b?x=%20", "/out/new/a%20b?x=%20"),
            ("/error?x=1", "/out/e?f=1"),
            ("/try/x?y=1", "/out/t?y=1"),
            ("/second/a%20b%3f?x", "/r/a%20b%3F?x"),
        ],
    ),
    ("location / { limit_except POST { proxy_pass http://B; } return 404; }", &[("/x%20?a=1", "/x%20?a=1")]),
];

fn the_location_of_a_uri_is_replaced_as_documented(driver: Driver) {
    let backend = echo();
    let server = |(number, (conf, _)): (usize, &Row)| {
        format!("server {{ listen %UNIX%; server_name h{number}; {conf} }}\n").replace('B', &backend.address)
    };
    let configuration: String = URIS.iter().enumerate().map(server).collect();
    let server = Setup::http(driver, &configuration).start();
    let mut client = server.connect();
    let mut wrong = Vec::new();
    for (number, (conf, targets)) in URIS.iter().enumerate() {
        for (target, expected) in *targets {
            let target = target.replace("http://h", &format!("http://h{number}"));
            let response = ask(&mut client, &format!("h{number}"), &target);
            let shown = String::from_utf8_lossy(&response.body);
            if (response.status, &*shown) != (200, *expected) {
                wrong.push(format!("{target} with {conf}: {} {shown}, not {expected}", response.status));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    server.stop();
}

/// A backend that answers with all that it was asked: the request line, the fields, an empty line and the body.
fn mirror() -> Serving {
    Backend::tcp().serve(|asked, client| {
        respond(client, "", &shown(asked));
        true
    })
}

fn shown(asked: &Asked) -> String {
    let Asked { method, target, version, .. } = asked;
    format!("{method} {target} {version}\n{}\n{}", asked.fields(), asked.text())
}

fn a_request_has_the_usual_fields_and_those_that_are_set(driver: Driver) {
    let backend = mirror();
    let setup = Setup::server(
        driver,
        "location / { proxy_pass http://B; }
         location /1.0 { proxy_http_version 1.0; proxy_pass http://B; }
         location /set { proxy_pass http://B;
             proxy_set_header Host $http_host; proxy_set_header X-One 1; proxy_set_header X-One 2;
             proxy_set_header X-Own \"\"; proxy_set_header X-None $arg_none; proxy_set_header x-ADDED \"<$remote_addr>\";
             proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for; }
         location /empty { proxy_pass http://B; proxy_set_header Host \"\"; proxy_set_header Connection close;
             proxy_set_header Content-Length 7; proxy_set_header Transfer-Encoding chunked; }
         location /variables { return 200 $proxy_host,$proxy_port; }
         location /named/ { proxy_set_header X-Host $proxy_host; proxy_set_header X-Port $proxy_port;
             proxy_pass http://B; }",
    );
    let server = setup.replace("B", &backend.address).start();
    let mut client = server.connect();
    let mut get = |target: &str| {
        let fields = "X-Own: a\r\nX-Own: b\r\nx_under: c\r\nAccept: */*\r\nX-Forwarded-For: 1.1.1.1\r\n";
        let response = client.ask(format!("GET {target} HTTP/1.1\r\nHost: h:81\r\n{fields}\r\n"));
        response.text().replace(&backend.address, "B")
    };
    let own = "X-Own: a\nX-Own: b\n";
    let rest = "Accept: */*\nX-Forwarded-For: 1.1.1.1\n";
    assert_eq!(get("/a"), format!("GET /a HTTP/1.1\nHost: B\n{own}{rest}\n"));
    assert_eq!(get("/1.0"), format!("GET /1.0 HTTP/1.0\nHost: B\n{own}{rest}\n"));
    let set = "X-One: 1\nX-One: 2\nx-ADDED: <unix:>\nX-Forwarded-For: 1.1.1.1, unix:\n";
    assert_eq!(get("/set"), format!("GET /set HTTP/1.1\nHost: h:81\n{set}Accept: */*\n\n"));
    // A request in HTTP/1.1 has a Host, and the length is never the configuration's to tell.
    assert_eq!(get("/empty"), format!("GET /empty HTTP/1.1\nHost: B\nConnection: close\n{own}{rest}\n"));
    assert_eq!(get("/variables"), ",");
    let port = backend.address.rsplit(':').next().expect("a port");
    assert_eq!(get("/named/"), format!("GET /named/ HTTP/1.1\nHost: B\nX-Host: B\nX-Port: {port}\n{own}{rest}\n"));
    server.stop();
}

fn fields_that_are_set_are_inherited_all_or_none(driver: Driver) {
    let backend = mirror();
    let setup = Setup::server(
        driver,
        "proxy_set_header X-Outer 1; proxy_set_header X-More 2;
         location /inherits { proxy_pass http://B; }
         location /own { proxy_set_header X-Own 3; proxy_pass http://B; }
         location /more { proxy_pass http://B; location /more/inner { proxy_pass http://B; } }",
    );
    let server = setup.replace("B", &backend.address).start();
    for (target, expected) in
        [("/inherits", "X-Outer: 1\nX-More: 2\n"), ("/own", "X-Own: 3\n"), ("/more/inner", "X-Outer: 1\nX-More: 2\n")]
    {
        let text = server.connect().ask(format!("GET {target} HTTP/1.0\r\n\r\n")).text().to_owned();
        assert_eq!(text, format!("GET {target} HTTP/1.1\nHost: {}\n{expected}\n", backend.address));
    }
    server.stop();
}

fn fields_of_the_clients_connection_are_not_passed_on(driver: Driver) {
    let backend = mirror();
    let server = Setup::server(driver, "location / { proxy_pass http://B; }").replace("B", &backend.address).start();
    let fields = "Connection: keep-alive, X-Listed , Authorization,Cookie, Content-Length, Host, HTTP2-Settings\r\n\
        Connection: x-ALSO\r\nKeep-Alive: timeout=5\r\nProxy-Connection: keep-alive\r\nTE: trailers\r\n\
        Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nX-Listed: 1\r\nX-Also: 2\r\nX-Stays: 3\r\n\
        Authorization: Basic x\r\nCookie: a=b\r\nContent-Length: 2\r\n";
    let response = server.connect().ask(format!("POST / HTTP/1.1\r\nHost: h\r\n{fields}\r\nab"));
    assert_eq!(
        response.text().replace(&backend.address, "B"),
        "POST / HTTP/1.1\nHost: B\nContent-Length: 2\nX-Stays: 3\nAuthorization: Basic x\nCookie: a=b\n\nab"
    );
    server.stop();
}

fn post(client: &mut Client, target: &str, fields: &str, body: &str) -> Response {
    client.ask(format!("POST {target} HTTP/1.1\r\nHost: h\r\n{fields}\r\n{body}"))
}

fn a_body_is_sent_with_its_length_when_it_is_whole(driver: Driver) {
    let backend = mirror();
    let setup = Setup::server(
        driver,
        "client_body_buffer_size 1k; location / { proxy_pass http://B; }
         location /old { proxy_http_version 1.0; proxy_request_buffering off; proxy_pass http://B; }",
    );
    let server = setup.replace("B", &backend.address).start();
    let mut client = server.connect();
    let long = "0123456789abcdef".repeat(20_000);
    let long_chunks = format!("4e200;x=\"y\"\r\n{long}\r\n0\r\nX-Trailer: z\r\n\r\n");
    let (length, chunked) = ("Content-Length: 5\r\n", "Transfer-Encoding: chunked\r\n");
    for (target, fields, body, expected) in [
        ("/", length, "hello", "hello"),
        ("/", "Content-Length: 0\r\n", "", ""),
        ("/", chunked, "2;ext=1\r\nhe\r\n3\r\nllo\r\n0\r\nX-Trailer: y\r\n\r\n", "hello"),
        ("/", chunked, "0\r\n\r\n", ""),
        ("/", "Content-Length: 320000\r\n", &long, &long),
        ("/", chunked, &long_chunks, &long),
        // A server that knows only HTTP/1.0 is told the length.
        ("/old", chunked, "5\r\nhello\r\n0\r\n\r\n", "hello"),
    ] {
        let response = post(&mut client, target, fields, body);
        let head = format!("Host: {}\nContent-Length: {}\n\n", backend.address, expected.len());
        let text = response.text();
        let (line, rest) = text.split_once('\n').expect("a line");
        let version = if target == "/old" { "1.0" } else { "1.1" };
        assert_eq!(line, format!("POST {target} HTTP/{version}"));
        assert!(rest == head + expected, "{fields}: {}", &rest[..rest.len().min(200)]);
    }
    server.stop();
}

fn an_unbuffered_body_is_sent_as_it_comes(driver: Driver) {
    let backend = Backend::tcp();
    let setup = Setup::http(driver, KEEPALIVE).replace("listen", "proxy_request_buffering off; listen");
    let server = setup.replace("ADDRESS", backend.address()).start();
    let mut client = server.connect();
    client.send("POST /1 HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nfirst\r\n");
    let mut connection = backend.accept();
    let head = connection.request_head();
    assert_eq!((head.header("Transfer-Encoding"), head.header("Content-Length")), (Some("chunked"), None));
    assert_eq!(connection.chunk().as_deref(), Some(&b"first"[..]));
    client.send("6\r\nsecond\r\n");
    assert_eq!(connection.chunk().as_deref(), Some(&b"second"[..]));
    client.send("0\r\nX-Trailer: y\r\nContent-Length: 3\r\n\r\n");
    assert_eq!(connection.chunk(), None);
    assert_eq!(connection.take_fields(), []);
    respond(&mut connection, "", "one");
    assert_eq!(client.response().text(), "one");
    client.send("POST /2 HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nab");
    let head = connection.request_head();
    assert_eq!((head.header("Transfer-Encoding"), head.header("Content-Length")), (None, Some("4")));
    assert_eq!(connection.take(2), b"ab");
    client.send("cd");
    assert_eq!(connection.take(2), b"cd");
    respond(&mut connection, "", "two");
    assert_eq!(client.response().text(), "two");
    // The answer may come before the end of the request, whose rest is still the server's.
    client.send("POST /3 HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nab");
    connection.request_head();
    assert_eq!(connection.take(2), b"ab");
    respond(&mut connection, "", "early");
    assert_eq!(client.response().text(), "early");
    client.close_both();
    server.stop();
}

fn an_unbuffered_body_is_gone_for_another_server(driver: Driver) {
    let (first, second) = (scripted(&[("/", "HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")]), mirror());
    let setup = Setup::server(
        driver,
        "proxy_request_buffering off; proxy_intercept_errors on; error_page 503 = @second;
         location / { proxy_pass http://FIRST; } location @second { proxy_pass http://SECOND; }",
    );
    let server = setup.replace("FIRST", &first.address).replace("SECOND", &second.address).start();
    let mut client = server.connect();
    for _ in 0..3 {
        // Neither is it announced, nor is it taken from the next request.
        let shown = post(&mut client, "/", "Content-Length: 4\r\n", "body").text().to_owned();
        assert!(shown.starts_with("POST /") && !shown.contains("Content-Length") && !shown.contains("body"), "{shown}");
    }
    server.stop();
}

fn what_is_sent_in_place_of_the_clients_body_and_method_is_framed_anew(driver: Driver) {
    let backend = mirror();
    let setup = Setup::server(
        driver,
        "location /body { proxy_set_body \"<$arg_a>\"; proxy_pass http://B; }
         location /host { proxy_set_body \"<$proxy_host>\"; proxy_pass http://B; }
         location /method { proxy_method PUT; proxy_pass http://B; }
         location /variable { proxy_method $arg_m; proxy_pass http://B; }
         location /wrong { set $m \"A /\"; proxy_method $m; proxy_pass http://B; }
         location /both { proxy_method PATCH; proxy_set_body x; proxy_pass http://B; }",
    );
    let server = setup.replace("B", &backend.address).start();
    let mut client = server.connect();
    let host = format!("Host: {}\n", backend.address);
    let named = format!("<{}>", backend.address);
    for (target, expected) in [
        ("/host", format!("POST /host HTTP/1.1\n{host}Content-Length: {}\n\n{named}", named.len())),
        ("/body?a=123", format!("POST /body?a=123 HTTP/1.1\n{host}Content-Length: 5\n\n<123>")),
        ("/method", format!("PUT /method HTTP/1.1\n{host}Content-Length: 3\n\nabc")),
        ("/variable?m=REPORT", format!("REPORT /variable?m=REPORT HTTP/1.1\n{host}Content-Length: 3\n\nabc")),
        ("/both", format!("PATCH /both HTTP/1.1\n{host}Content-Length: 1\n\nx")),
    ] {
        for (fields, body) in
            [("Content-Length: 3\r\n", "abc"), ("Transfer-Encoding: chunked\r\n", "3\r\nabc\r\n0\r\n\r\n")]
        {
            assert_eq!(post(&mut client, target, fields, body).text(), expected, "{target}");
        }
    }
    // What would be another request line is none.
    assert_eq!(post(&mut server.connect(), "/wrong", "Content-Length: 0\r\n", "").status, 500);
    server.wait_logged("while preparing a request to an upstream");
    server.stop();
}

fn what_is_not_to_be_passed_stays_here(driver: Driver) {
    let backend = mirror();
    let setup = Setup::server(
        driver,
        "location /body { proxy_pass_request_body off; proxy_pass http://B; }
         location /fields { proxy_pass_request_headers off; proxy_set_header X-Own 1; proxy_pass http://B; }",
    );
    let server = setup.replace("B", &backend.address).start();
    let mut client = server.connect();
    let host = format!("Host: {}\n", backend.address);
    for (target, expected) in [
        ("/body", format!("POST /body HTTP/1.1\n{host}X-Client: 1\n\n")),
        ("/fields", format!("POST /fields HTTP/1.1\n{host}Content-Length: 3\nX-Own: 1\n\nabc")),
    ] {
        for _ in 0..2 {
            let response = post(&mut client, target, "X-Client: 1\r\nContent-Length: 3\r\n", "abc");
            assert_eq!(response.text(), expected);
        }
    }
    server.stop();
}

fn a_client_that_expects_100_is_told_to_continue(driver: Driver) {
    let backend = mirror();
    let setup = Setup::server(
        driver,
        "location / { proxy_pass http://B; } location /streamed { proxy_request_buffering off; proxy_pass http://B; }",
    );
    let server = setup.replace("B", &backend.address).start();
    let mut client = server.connect();
    for target in ["/", "/streamed"] {
        client.send(format!("POST {target} HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"));
        assert_eq!(client.response().status, 100);
        client.send("abc");
        let text = client.response().text().to_owned();
        let expected = format!("POST {target} HTTP/1.1\nHost: {}\nContent-Length: 3\n\nabc", backend.address);
        assert_eq!(text, expected);
    }
    server.stop();
}

fn a_client_that_breaks_off_its_body_reaches_nobody_or_ends_the_request(driver: Driver) {
    let backend = Backend::tcp();
    let setup = Setup::server(
        driver,
        "location / { proxy_pass http://B; } location /streamed { proxy_request_buffering off; proxy_pass http://B; }",
    );
    let server = setup.replace("B", backend.address()).start();
    let request = |target| format!("POST {target} HTTP/1.1\r\nHost: h\r\nContent-Length: 30\r\n\r\nabc");
    let mut client = server.connect();
    client.send(request("/"));
    client.close_both();
    server.directory.wait_line("access.log", "\"POST / HTTP/1.1\" 400");
    assert!(backend.is_idle());
    let mut client = server.connect();
    client.send(request("/streamed"));
    let mut connection = backend.accept();
    connection.request_head();
    assert_eq!(connection.take(3), b"abc");
    client.close_both();
    connection.assert_closed();
    // Also with chunks, of which no last one is made up.
    let mut client = server.connect();
    client.send("POST /streamed HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\n");
    let mut connection = backend.accept();
    connection.request_head();
    assert_eq!(connection.chunk().as_deref(), Some(&b"abc"[..]));
    client.close_both();
    connection.assert_closed();
    // Nor for chunks that are none.
    let mut client = server.connect();
    client.send("POST /streamed HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n");
    let mut connection = backend.accept();
    connection.request_head();
    assert_eq!(connection.chunk().as_deref(), Some(&b"abc"[..]));
    client.send("x\r\n");
    assert_eq!(client.response().status, 400);
    connection.assert_closed();
    server.stop();
}

fn a_body_that_is_too_large_reaches_nobody(driver: Driver) {
    let backend = Backend::tcp();
    let setup = Setup::server(
        driver,
        "client_max_body_size 4; location / { proxy_pass http://B; }
         location /streamed { proxy_request_buffering off; proxy_pass http://B; }",
    );
    let server = setup.replace("B", backend.address()).start();
    for target in ["/", "/streamed"] {
        assert_eq!(post(&mut server.connect(), target, "Content-Length: 5\r\n", "").status, 413, "{target}");
    }
    let chunks = "5\r\nhello\r\n0\r\n\r\n";
    assert_eq!(post(&mut server.connect(), "/", "Transfer-Encoding: chunked\r\n", chunks).status, 413);
    assert!(backend.is_idle());
    // Where it is streamed it may be known too late, and the server never sees the request's end.
    let mut client = server.connect();
    client.send("POST /streamed HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n");
    let mut connection = backend.accept();
    connection.request_head();
    assert_eq!(connection.chunk().as_deref(), Some(&b"abc"[..]));
    client.send("3\r\ndef\r\n0\r\n\r\n");
    assert_eq!(client.response().status, 413);
    connection.assert_closed();
    server.stop();
}

/// A backend that answers each target with these bytes, and then closes the connection if they end with `CLOSE`.
fn scripted(answers: &'static [(&'static str, &'static str)]) -> Serving {
    Backend::tcp().serve(move |asked, client| {
        let path = asked.target.split('?').next();
        let (_, answer) = answers.iter().find(|(target, _)| Some(*target) == path).expect("a target of the script");
        let (answer, closes) = answer.strip_suffix("CLOSE").map_or((*answer, false), |answer| (answer, true));
        client.send(answer);
        !closes
    })
}

/// All fields but those of every response.
fn own_fields(response: &Response) -> Vec<String> {
    let is_own = |name: &str| !["Server", "Date", "Connection"].contains(&name);
    response.headers.iter().filter(|(name, _)| is_own(name)).map(|(name, value)| format!("{name}: {value}")).collect()
}

/// A group, whose connections are used again.
const KEEPALIVE: &str = "upstream u { server ADDRESS; } server { listen %UNIX%; location / { proxy_pass http://u; } }";

const LENGTH: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

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
            // To a client of the past it is passed on without chunks.
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
    // All of them left the connection as it should be.
    assert_eq!(backend.connection_count(), 1);
    server.stop();
}

fn a_connection_is_kept_only_where_the_response_leaves_it_clean(driver: Driver) {
    let backend = scripted(&[
        ("/close-field", "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"),
        ("/1.0", "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"),
        ("/more", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong"),
        (
            "/more-chunked",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong",
        ),
        ("/more-204", "HTTP/1.1 204 OK\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong"),
        ("/more-304", "HTTP/1.1 304 OK\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong"),
        ("/kept", "HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nKeep-Alive: timeout=60\r\nContent-Length: 2\r\n\r\nok"),
        ("/near", "HTTP/1.1 200 OK\r\nKeep-Alive: timeout=1\r\nContent-Length: 2\r\n\r\nok"),
    ]);
    let setup = Setup::http(driver, KEEPALIVE);
    let server = setup.replace("ADDRESS", &backend.address).start();
    let mut client = server.connect();
    let mut connections = 1;
    for target in ["/close-field", "/1.0", "/more", "/more-chunked", "/more-204", "/more-304", "/near"] {
        let response = client.get(target);
        assert!([200, 204, 304].contains(&response.status) && ["ok", ""].contains(&response.text()), "{target}");
        connections += 1;
        let response = client.get("/kept");
        assert_eq!((response.status, response.text()), (200, "ok"), "{target}");
        assert_eq!(response.header("Keep-Alive"), None);
        assert_eq!(client.get("/kept").text(), "ok", "{target}");
        assert_eq!(backend.connection_count(), connections, "{target}");
        assert_eq!(client.get("/kept").text(), "ok", "{target}");
    }
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

fn an_internal_location_answers_what_x_accel_redirect_names(driver: Driver) {
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
    for (target, status, text) in
        [("/status", 200, "a file"), ("/again", 200, "ok"), ("/encoded", 200, "a file"), ("/endless", 200, "a file")]
    {
        let response = client.get(target);
        assert_eq!((response.status, response.text()), (status, text), "{target}");
    }
    // Whatever it was, it is a GET now; as with nginx its body goes on.
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
    // There is no page for it.
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
             proxy_cookie_flags a nohttponly secure; proxy_cookie_flags ~^c samesite=strict;
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
    server.stop();
}

fn parts_are_cut_out_where_they_are_forced(driver: Driver) {
    let backend = scripted(&[
        ("/", "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0123456789"),
        ("/own", "HTTP/1.1 206 Part\r\nContent-Range: bytes 2-3/10\r\nContent-Length: 2\r\n\r\n23"),
    ]);
    let setup = Setup::server(
        driver,
        "location / { proxy_pass http://ADDRESS; } location = /force { proxy_force_ranges on; proxy_pass http://ADDRESS/; }",
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
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n012");
            let head = client.response_to_head();
            let whole = "0123456789";
            assert_eq!(head.status, if expected.is_some() { 206 } else { 200 }, "{range}");
            let length = expected.unwrap_or(whole).len();
            assert_eq!(head.header("Content-Length"), Some(&*length.to_string()), "{range}");
            // What nobody wants any more may be refused.
            let _ = peer.try_send("34");
            let _ = peer.try_send("56789");
            assert_eq!(client.take(length), expected.unwrap_or(whole).as_bytes(), "{range}");
            assert_eq!(client.get("/missing/../..").status, 400, "the connection goes on");
        }
    }
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

fn a_unix_socket_is_a_server_too(driver: Driver) {
    let setup = Setup::server(
        driver,
        "location / { proxy_pass http://unix:%DIR%/backend; } location /uri/ { proxy_pass http://unix:%DIR%/backend:/to/; }
         location /variable/ { set $b unix:%DIR%/backend; proxy_pass http://$b:/v$request_uri; }
         location /missing { proxy_pass http://unix:%DIR%/missing; }",
    );
    let server = setup.start();
    let backend = Backend::unix(&server.directory.path().join("backend")).serve(|asked, client| {
        respond(client, "", &format!("{} {}", asked.header("Host").expect("a host"), asked.target));
        true
    });
    let mut client = server.connect();
    assert_eq!(client.get("/a?b").text(), "localhost /a?b");
    assert_eq!(client.get("/uri/a").text(), "localhost /to/a");
    assert_eq!(client.get("/variable/a").text(), "localhost /v/variable/a");
    assert_eq!(client.get("/missing").status, 502);
    server.wait_logged("connect() to unix:");
    server.wait_logged("failed (2: No such file or directory) while connecting to upstream");
    drop(backend);
    server.stop();
}

fn variables_tell_of_every_server_that_was_tried(driver: Driver) {
    let backend = scripted(&[
        (
            "/",
            "HTTP/1.1 200 OK\r\nX-Own: o\r\nSet-Cookie: a=1; Path=/\r\nSet-Cookie: b=2\r\nContent-Length: 2\r\n\r\nok",
        ),
        ("/503", "HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\nno"),
        ("/accel", "HTTP/1.1 200 OK\r\nX-Accel-Redirect: /\r\nContent-Length: 0\r\n\r\n"),
        ("/chunked", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 7\r\n\r\n"),
    ]);
    let setup = Setup::http(
        driver,
        "log_format v '$uri|$upstream_addr|$upstream_status|$upstream_response_length|$upstream_http_x_own|'
             '$upstream_cookie_a|$upstream_cookie_b|$upstream_trailer_x_sum|$upstream_bytes_received|'
             '$upstream_connect_time|$upstream_header_time|$upstream_response_time|$upstream_bytes_sent';
         access_log %DIR%/v.log v;
         upstream two { server unix:%DIR%/none; server ADDRESS; } upstream none { server unix:%DIR%/none; }
         server { listen %UNIX%; location / { proxy_pass http://ADDRESS; } location /two/ { proxy_pass http://two/; }
             location /none/ { error_page 502 /; proxy_pass http://none/; } location /local { return 200 ok; } }",
    );
    let server = setup.replace("ADDRESS", &backend.address).start();
    let mut client = server.connect();
    let own = format!("{}/none", server.directory.path().display());
    let address = &backend.address;
    for (target, uri, addresses, statuses, lengths, rest) in [
        ("/", "/", address.clone(), "200", "2", "|o|1|2|-|92|"),
        ("/503", "/503", address.clone(), "503", "2", "|-|-|-|-|"),
        ("/chunked", "/chunked", address.clone(), "200", "2", "|-|-|-|7|"),
        ("/two/", "/two/", format!("unix:{own}, {address}"), "502, 200", "0, 2", "|o|1|2|-|0, 92|"),
        ("/none/", "/", format!("unix:{own} : {address}"), "502 : 200", "0 : 2", "|o|1|2|-|"),
        ("/accel", "/", format!("{address} : {address}"), "200 : 200", "0 : 2", "|o|1|2|-|"),
        ("/local", "/local", "-".into(), "-", "-", "|-|-|-|-|-|-|-|-|-"),
    ] {
        client.get(target);
        let line = server.directory.wait_line("v.log", &format!("{uri}|{addresses}|{statuses}|"));
        let expected = format!("{uri}|{addresses}|{statuses}|{lengths}{rest}");
        assert!(line.starts_with(&expected) || rest.contains("|-|"), "{target}: {line} for {expected}");
        server.directory.write("v.log", "");
        let times: Vec<&str> = line.split('|').skip(9).take(3).collect();
        let count = statuses.split([',', ':']).count();
        for time in times {
            let parts: Vec<&str> = time.split([',', ':']).map(str::trim).collect();
            assert_eq!(parts.len(), count, "{target}: {line}");
            let is_time = |part: &&str| *part == "-" || part.parse::<f64>().is_ok_and(|time| time < 30.0);
            assert!(parts.iter().all(is_time), "{target}: {line}");
        }
    }
    server.stop();
}

fn what_goes_wrong_is_logged_in_nginx_words(driver: Driver) {
    let backend = scripted(&[
        ("/closed", "CLOSE"),
        ("/head", "HTTP/1.1 200 OK\r\nX: yCLOSE"),
        ("/none", "garbage\r\n\r\nCLOSE"),
        ("/field", "HTTP/1.1 200 OK\r\nX y\r\n\r\nCLOSE"),
        ("/lengths", "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nabCLOSE"),
        ("/length", "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nabCLOSE"),
        ("/both", "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nCLOSE"),
        ("/coding", "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nCLOSE"),
        ("/status", "HTTP/1.1 20 OK\r\n\r\nCLOSE"),
        ("/101", "HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\nCLOSE"),
        ("/short", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nheCLOSE"),
        ("/chunk", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhelXXXXCLOSE"),
        ("/no-last", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\nCLOSE"),
    ]);
    let setup = Setup::server(driver, "location / { proxy_pass http://ADDRESS; }");
    let server = setup.replace("ADDRESS", &backend.address).start();
    const READING: &str = "while reading response header from upstream";
    for (target, message) in [
        ("/closed", format!("upstream prematurely closed connection {READING}")),
        ("/head", format!("upstream prematurely closed connection {READING}")),
        ("/none", format!("upstream sent no valid HTTP/1.0 header {READING}")),
        ("/field", format!("upstream sent invalid header: \"X\\x20...\" {READING}")),
        (
            "/lengths",
            format!(
                "upstream sent duplicate header line: \"Content-Length: 2\", previous value: \
            \"Content-Length: 1\" {READING}"
            ),
        ),
        ("/length", format!("upstream sent invalid \"Content-Length\" header: \"Content-Length: x\" {READING}")),
        (
            "/both",
            format!("upstream sent \"Content-Length\" and \"Transfer-Encoding\" headers at the same time {READING}"),
        ),
        ("/coding", format!("upstream sent unknown \"Transfer-Encoding\": \"gzip\" {READING}")),
        ("/status", String::new()),
        ("/101", format!("upstream sent unexpected \"101 Switching Protocols\" {READING}")),
    ] {
        let response = server.get(target);
        assert_eq!(response.status, 502, "{target}");
        let tail = format!(
            ", client: unix:, server: , request: \"GET {target} HTTP/1.1\", upstream: \"http://{}{target}\", host: \"localhost\"",
            backend.address
        );
        let line = server.wait_logged(&tail);
        assert!(line.contains(&message), "{target}: {line}");
        assert!(line.contains("[error]"), "{target}: {line}");
    }
    for (target, message) in [
        ("/short", "upstream prematurely closed connection while reading upstream"),
        ("/chunk", "upstream sent invalid chunked response while reading upstream"),
        ("/no-last", "upstream prematurely closed connection while reading upstream"),
    ] {
        let mut client = server.connect();
        client.send(format!("GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n"));
        let rest = client.read_to_end();
        let text = String::from_utf8_lossy(&rest);
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && !text.ends_with("0\r\n\r\n"), "{target}: {text}");
        let line = server.wait_logged(&format!("\"GET {target} HTTP/1.1\", upstream: \"http://"));
        assert!(line.contains(message), "{target}: {line}");
    }
    // A server that is not there.
    let (mut server, nobody) = (server, Backend::tcp());
    let address = nobody.address().to_owned();
    drop(nobody);
    server.reload_http(driver, &format!("server {{ listen %UNIX%; location / {{ proxy_pass http://{address}; }} }}"));
    assert_eq!(server.get("/refused").status, 502);
    let line = server.wait_logged("\"GET /refused HTTP/1.1\"");
    assert!(line.contains("connect() failed (111: Connection refused) while connecting to upstream"), "{line}");
    server.stop();
}

fn forwarded_names_the_client_the_host_and_the_protocol(driver: Driver) {
    let backend = mirror();
    let setup = Setup::http(
        driver,
        "server { listen %UNIX%; set_real_ip_from unix:; real_ip_header X-Client;
             proxy_set_header Forwarded $proxy_add_forwarded; proxy_pass_request_headers off;
             location / { proxy_pass http://ADDRESS; } }",
    );
    let server = setup.replace("ADDRESS", &backend.address).start();
    for (fields, expected) in [
        ("Host: a.example:81\r\nX-Client: 192.0.2.7\r\n", "for=192.0.2.7;host=\"a.example:81\";proto=http"),
        ("Host: h\r\nX-Client: 2001:db8::7\r\n", "for=\"[2001:db8::7]\";host=\"h\";proto=http"),
        ("Host: h\r\n", "for=unknown;host=\"h\";proto=http"),
        (
            "Host: h\r\nX-Client: 192.0.2.7\r\nForwarded: for=a\r\nforwarded: for=b;by=c, for=d\r\n",
            "for=a, for=b;by=c, for=d, for=192.0.2.7;host=\"h\";proto=http",
        ),
    ] {
        let shown = server.connect().ask(format!("GET / HTTP/1.1\r\n{fields}\r\n")).text().to_owned();
        assert!(shown.contains(&format!("\nForwarded: {expected}\n")), "{shown}");
    }
    server.stop();
}

fn a_request_has_no_more_time_than_its_whole_may_take(driver: Driver) {
    let backend = Backend::tcp();
    let setup = Setup::server(driver, "location / { proxy_request_timeout 1s; proxy_pass http://ADDRESS; }");
    let server = setup.replace("ADDRESS", backend.address()).start();
    // Without a head.
    let mut client = server.connect();
    client.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
    let mut peer = backend.accept();
    peer.request();
    assert_eq!(client.response().status, 504);
    assert!(peer.is_at_end());
    server.wait_logged("upstream timed out (110: Connection timed out) while passing the request on");
    // In the middle of a body, though it might be silent for longer.
    client.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
    let mut peer = backend.accept();
    peer.request();
    peer.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf");
    client.head();
    assert_eq!(client.read_to_end(), b"half");
    assert!(peer.is_at_end());
    server.wait_logged("upstream timed out (110: Connection timed out) while reading upstream");
    server.stop();
}

fn a_connection_that_stands_for_a_user_is_not_used_again(driver: Driver) {
    let backend = Backend::tcp();
    let setup = Setup::http(
        driver,
        "upstream u { server ADDRESS; } server { listen %UNIX%; location / { proxy_pass http://u; } }",
    );
    let server = setup.replace("ADDRESS", backend.address()).start();
    for (credentials, challenge, is_kept) in [
        ("", "", true),
        ("Authorization: Basic eDp5\r\n", "WWW-Authenticate: Basic realm=NTLM\r\n", true),
        ("Authorization: ntlm TlRMTVNTUAAB\r\n", "", false),
        ("Authorization: Negotiate YII=\r\n", "", false),
        ("", "WWW-Authenticate: Basic realm=x\r\nWWW-Authenticate: NTLM TlRMTVNTUAAC\r\n", false),
        ("", "WWW-Authenticate: Negotiate\r\n", false),
    ] {
        let mut client = server.connect();
        client.send(format!("GET / HTTP/1.1\r\nHost: h\r\n{credentials}\r\n"));
        let mut peer = backend.accept();
        peer.request();
        peer.send(format!("HTTP/1.1 200 OK\r\n{challenge}Content-Length: 2\r\n\r\nok"));
        assert_eq!(client.response().text(), "ok");
        if is_kept {
            client.send("GET /again HTTP/1.1\r\nHost: h\r\n\r\n");
            assert_eq!(peer.request().target, "/again", "{credentials}{challenge}");
            peer.send("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok");
            assert_eq!(client.response().text(), "ok");
        }
        assert!(peer.is_at_end(), "{credentials}{challenge}");
    }
    server.stop();
}

fn a_post_does_not_meet_a_connection_that_has_been_closed(driver: Driver) {
    let backend = Backend::tcp();
    let setup = Setup::http(
        driver,
        "upstream u { server ADDRESS; } server { listen %UNIX%; location / { proxy_pass http://u; } }",
    );
    let server = setup.replace("ADDRESS", backend.address()).start();
    let mut client = server.connect();
    for _ in 0..20 {
        client.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
        let mut peer = backend.accept();
        peer.request();
        peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        assert_eq!(client.response().text(), "ok");
        // The worker's driver need not have heard of it when the next request comes.
        peer.close_both();
        client.send("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nbody");
        let mut peer = backend.accept();
        assert_eq!(peer.request().body, b"body");
        peer.send("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok");
        assert_eq!(client.response().text(), "ok");
    }
    server.stop();
}
