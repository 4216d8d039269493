//! proxy: forwarding of request bodies to upstream servers.

use crate::support::answers::{KEEPALIVE, mirror, post, respond, scripted};
use crate::support::{Backend, Driver, Setup, with_each_driver};

with_each_driver!(
    a_body_is_sent_with_its_length_when_it_is_whole,
    an_unbuffered_body_is_sent_as_it_comes,
    an_unbuffered_body_is_gone_for_another_server,
    replaced_body_and_method_are_framed_anew,
    body_and_fields_that_are_not_to_be_passed_stay_here,
    body_that_stays_here_is_in_the_variables_nevertheless,
    body_of_the_configuration_is_made_of_the_client_s,
    a_client_that_expects_100_is_told_to_continue,
    body_broken_off_by_the_client_reaches_no_upstream_or_ends_the_request,
    too_large_body_reaches_no_upstream,
);

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
        // An upstream server of HTTP/1.0 receives the length.
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
    // If the response comes before the end of the request, the rest of the request is still sent.
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
        // The body is neither announced, nor taken from the next request.
        let shown = post(&mut client, "/", "Content-Length: 4\r\n", "body").text().to_owned();
        assert!(shown.starts_with("POST /") && !shown.contains("Content-Length") && !shown.contains("body"), "{shown}");
    }
    server.stop();
}

fn replaced_body_and_method_are_framed_anew(driver: Driver) {
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
    // A method that would form another request line is rejected.
    assert_eq!(post(&mut server.connect(), "/wrong", "Content-Length: 0\r\n", "").status, 500);
    server.wait_logged("while preparing a request to an upstream");
    server.stop();
}

fn body_and_fields_that_are_not_to_be_passed_stay_here(driver: Driver) {
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

fn body_that_stays_here_is_in_the_variables_nevertheless(driver: Driver) {
    let backend = mirror();
    let setup = Setup::server(
        driver,
        "proxy_pass_request_body off; proxy_set_header X-Kept <$request_body>; location / { proxy_pass http://B; }
         location /streamed { proxy_request_buffering off; proxy_pass http://B; }
         location /long { client_max_body_size 2; proxy_pass http://B; }",
    );
    let server = setup.replace("B", &backend.address).start();
    let mut client = server.connect();
    for target in ["/", "/streamed"] {
        let expected = format!("POST {target} HTTP/1.1\nHost: {}\nX-Kept: <abc>\n\n", backend.address);
        for (fields, body) in
            [("Content-Length: 3\r\n", "abc"), ("Transfer-Encoding: chunked\r\n", "3\r\nabc\r\n0\r\n\r\n")]
        {
            assert_eq!(post(&mut client, target, fields, body).text(), expected, "{target}");
        }
    }
    assert_eq!(post(&mut server.connect(), "/long", "Content-Length: 3\r\n", "abc").status, 413);
    server.stop();
}

fn body_of_the_configuration_is_made_of_the_client_s(driver: Driver) {
    let backend = mirror();
    let setup = Setup::server(
        driver,
        "proxy_set_body \"<$request_body>\"; location / { proxy_pass http://B; }
         location /unbuffered { proxy_request_buffering off; proxy_pass http://B; }
         location /long { client_body_buffer_size 1k; proxy_pass http://B; }",
    );
    let server = setup.replace("B", &backend.address).start();
    let mut client = server.connect();
    let long = "x".repeat(2000);
    for (target, fields, body, expected) in [
        ("/", "Content-Length: 3\r\n", "abc", "<abc>"),
        ("/", "Transfer-Encoding: chunked\r\n", "3\r\nabc\r\n0\r\n\r\n", "<abc>"),
        ("/", "Content-Length: 0\r\n", "", "<>"),
        ("/unbuffered", "Content-Length: 3\r\n", "abc", "<abc>"),
        // As in nginx, a body stored in a file is not in the variable.
        ("/long", "Content-Length: 2000\r\n", &long, "<>"),
    ] {
        let length = expected.len();
        let expected =
            format!("POST {target} HTTP/1.1\nHost: {}\nContent-Length: {length}\n\n{expected}", backend.address);
        assert_eq!(post(&mut client, target, fields, body).text(), expected);
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

fn body_broken_off_by_the_client_reaches_no_upstream_or_ends_the_request(driver: Driver) {
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
    // A chunked body is broken off, too; no last chunk is invented.
    let mut client = server.connect();
    client.send("POST /streamed HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\n");
    let mut connection = backend.accept();
    connection.request_head();
    assert_eq!(connection.chunk().as_deref(), Some(&b"abc"[..]));
    client.close_both();
    connection.assert_closed();
    // The same for malformed chunks.
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

fn too_large_body_reaches_no_upstream(driver: Driver) {
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
    // The size of a streamed body may become known too late; the upstream server then never receives the request's end.
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
