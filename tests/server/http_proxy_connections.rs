//! proxy: reuse of connections to upstream servers, timeouts of requests, and log messages and variables about the
//! servers that were tried.

use crate::support::answers::{KEEPALIVE, scripted};
use crate::support::http2::Http2;
use crate::support::{Backend, Client, Driver, Setup, until_in_time, with_each_driver};

with_each_driver!(
    a_connection_is_kept_only_where_the_response_leaves_it_clean,
    on_a_connection_that_is_used_again_each_request_has_its_own_time,
    a_request_has_no_more_time_than_its_whole_may_take,
    a_connection_that_stands_for_a_user_is_not_used_again,
    a_connection_that_stands_for_a_user_goes_on_as_its_client_s_own_with_ntlm,
    response_over_an_ntlm_connection_is_not_stored,
    a_connection_of_a_client_s_own_is_left_when_its_server_has_ended_it,
    a_client_with_http2_has_no_connection_of_its_own,
    a_post_does_not_meet_a_connection_that_has_been_closed,
    variables_tell_of_every_server_that_was_tried,
    upstream_failures_are_logged_in_nginx_s_words,
);

fn a_connection_is_kept_only_where_the_response_leaves_it_clean(driver: Driver) {
    let backend = scripted(&[
        ("/close-field", "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"),
        ("/1.0", "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"),
        ("/more", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong"),
        (
            "/more-chunked",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n\
             Content-Length: 5\r\n\r\nwrong",
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

fn on_a_connection_that_is_used_again_each_request_has_its_own_time(driver: Driver) {
    const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    let backend = Backend::tcp();
    let configuration = format!(
        "upstream u {{ server {}; keepalive 4; }} server {{ listen %UNIX%; proxy_next_upstream off;
             location /patient {{ proxy_pass http://u; }}
             location /hasty {{ proxy_read_timeout 300ms; proxy_pass http://u; }} }}",
        backend.address()
    );
    let server = Setup::http(driver, &configuration).replace("worker_processes 2", "worker_processes 1").start();
    let (mut client, mut peer) = until_in_time("the answer to the first request", || {
        let mut client = server.connect();
        client.send("GET /hasty HTTP/1.1\r\nHost: h\r\n\r\n");
        let mut peer = backend.accept();
        peer.request();
        let _ = peer.try_send(OK);
        (client.response().text() == "ok").then_some((client, peer))
    });
    let mut other = server.connect();
    // The first request's timeout does not end the second, which is still alive after a third has timed out.
    client.send("GET /patient HTTP/1.1\r\nHost: h\r\n\r\n");
    peer.request();
    other.send("GET /hasty HTTP/1.1\r\nHost: h\r\n\r\n");
    let mut silent = backend.accept();
    silent.request();
    assert_eq!(other.response().status, 504);
    peer.send(OK);
    assert_eq!(client.response().text(), "ok");
    // The longer timeout of the second request does not apply to a fourth one, which another client makes.
    other.send("GET /hasty HTTP/1.1\r\nHost: h\r\n\r\n");
    peer.request();
    assert_eq!(other.response().status, 504);
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

fn upstream_failures_are_logged_in_nginx_s_words(driver: Driver) {
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
            ", client: unix:, server: , request: \"GET {target} HTTP/1.1\", upstream: \"http://{}{target}\", host: \
             \"localhost\"",
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
    // An upstream server that is down.
    let (mut server, nobody) = (server, Backend::tcp());
    let address = nobody.address().to_owned();
    drop(nobody);
    server.reload_http(driver, &format!("server {{ listen %UNIX%; location / {{ proxy_pass http://{address}; }} }}"));
    assert_eq!(server.get("/refused").status, 502);
    let line = server.wait_logged("\"GET /refused HTTP/1.1\"");
    assert!(line.contains("connect() failed (111: Connection refused) while connecting to upstream"), "{line}");
    server.stop();
}

fn a_request_has_no_more_time_than_its_whole_may_take(driver: Driver) {
    let backend = Backend::tcp();
    let text = "location / { proxy_request_timeout 1s; proxy_pass http://ADDRESS; }";
    let setup = Setup::server(driver, text);
    let server = setup.replace("ADDRESS", backend.address()).start();
    // The time ends before a response head.
    let mut client = server.connect();
    client.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
    let mut peer = backend.accept();
    peer.request();
    assert_eq!(client.response().status, 504);
    assert!(peer.is_at_end());
    server.wait_logged("upstream timed out (110: Connection timed out) while passing the request on");
    // The time ends in the middle of a body, though the read timeout is longer.
    until_in_time("the head of a response", || {
        let mut client = server.connect();
        client.send("GET /half HTTP/1.1\r\nHost: h\r\n\r\n");
        let mut peer = backend.accept();
        peer.request();
        let _ = peer.try_send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf");
        if client.head().status != 200 {
            return None;
        }
        assert_eq!(client.read_to_end(), b"half");
        assert!(peer.is_at_end());
        Some(())
    });
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

const CHALLENGE: &str = "HTTP/1.1 401 x\r\nWWW-Authenticate: NTLM TlRMTVNTUAAC\r\nContent-Length: 2\r\n\r\nno";
const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

fn send(client: &mut Client, target: &str, fields: &str) {
    client.send(format!("GET {target} HTTP/1.1\r\nHost: h\r\n{fields}\r\n"));
}

fn a_connection_that_stands_for_a_user_goes_on_as_its_client_s_own_with_ntlm(driver: Driver) {
    let (one, other) = (Backend::tcp(), Backend::tcp());
    let configuration = format!(
        "upstream u {{ server {}; server {}; ntlm; }}
         server {{ listen %UNIX%; location / {{ proxy_pass http://u; }} location /two {{ proxy_pass http://u; }} }}",
        one.address(),
        other.address()
    );
    let server = Setup::http(driver, &configuration).replace("worker_processes 2", "worker_processes 1").start();
    let mut first = server.connect();
    send(&mut first, "/1", "Authorization: NTLM TlRMTVNTUAAB\r\n");
    let mut own = one.accept();
    assert_eq!(own.request().target, "/1");
    own.send(CHALLENGE);
    assert_eq!(first.response().status, 401);
    // Further requests use the same connection, with credentials and without, in any order.
    for (target, fields) in [("/2", "Authorization: NTLM TlRMTVNTUAAD\r\n"), ("/two", ""), ("/2", "")] {
        send(&mut first, target, fields);
        assert_eq!(own.request().target, target, "{fields}");
        own.send(OK);
        assert_eq!(first.response().text(), "ok");
    }
    // Other clients do not use this connection; they share another.
    let exchange = |client: &mut Client, peer: &mut Client, target: &str| {
        assert_eq!(peer.request().target, target);
        peer.send(OK);
        assert_eq!(client.response().text(), "ok");
    };
    let mut shared = Vec::new();
    for backend in [&other, &one] {
        let mut client = server.connect();
        send(&mut client, "/3", "");
        let mut peer = backend.accept();
        exchange(&mut client, &mut peer, "/3");
        shared.push(peer);
    }
    for peer in &mut shared {
        let mut client = server.connect();
        send(&mut client, "/4", "");
        exchange(&mut client, peer, "/4");
    }
    // The connection is closed with its client's.
    drop(first);
    assert!(own.is_at_end());
    server.stop();
}

fn response_over_an_ntlm_connection_is_not_stored(driver: Driver) {
    let backend = Backend::tcp();
    let configuration = "proxy_cache_path %DIR%/cache keys_zone=one:1m; upstream u { server ADDRESS; ntlm; }
        server { listen %UNIX%; proxy_cache one; proxy_cache_valid 1h; location / { proxy_pass http://u; } }";
    let server = Setup::http(driver, configuration).replace("ADDRESS", backend.address()).start();
    let mut first = server.connect();
    send(&mut first, "/login", "Authorization: NTLM TlRMTVNTUAAD\r\n");
    let mut own = backend.accept();
    own.request();
    own.send(OK);
    assert_eq!(first.response().text(), "ok");
    // These requests carry no credentials any more. A body that comes after its head would otherwise fill the cache.
    for fields in ["Cache-Control: max-age=600", "Cache-Control: public, max-age=600"] {
        send(&mut first, "/", "");
        assert_eq!(own.request().target, "/");
        own.send(format!("HTTP/1.1 200 OK\r\n{fields}\r\nContent-Length: 6\r\n\r\n"));
        assert_eq!(first.head().status, 200);
        own.send("secret");
        assert_eq!(first.take(6), b"secret");
    }
    let mut other = server.connect();
    send(&mut other, "/", "");
    let mut peer = backend.accept();
    assert_eq!(peer.request().target, "/");
    peer.send(CHALLENGE);
    assert_eq!(other.response().status, 401);
    server.stop();
}

fn a_connection_of_a_client_s_own_is_left_when_its_server_has_ended_it(driver: Driver) {
    let backend = Backend::tcp();
    let configuration = "upstream u { server ADDRESS; ntlm; keepalive_requests 2; }
        server { listen %UNIX%; location / { proxy_pass http://u; } }";
    let server = Setup::http(driver, configuration).replace("ADDRESS", backend.address()).start();
    let mut client = server.connect();
    let credentials = "Authorization: Negotiate YII=\r\n";
    send(&mut client, "/1", credentials);
    let mut own = backend.accept();
    own.request();
    own.send(CHALLENGE);
    assert_eq!(client.response().status, 401);
    drop(own);
    send(&mut client, "/2", credentials);
    let mut own = backend.accept();
    for target in ["/2", "/3"] {
        assert_eq!(own.request().target, target);
        own.send(OK);
        assert_eq!(client.response().text(), "ok");
        if target == "/2" {
            send(&mut client, "/3", "");
        }
    }
    // The connection has reached its maximum of requests.
    assert!(own.is_at_end());
    server.stop();
}

fn a_client_with_http2_has_no_connection_of_its_own(driver: Driver) {
    let backend = Backend::tcp();
    let configuration = "upstream u { server ADDRESS; ntlm; }
        server { listen %UNIX%; http2 on; location / { proxy_pass http://u; } }";
    let server = Setup::http(driver, configuration).replace("ADDRESS", backend.address()).start();
    let mut client = Http2::unix(&server);
    let stream = client.begin("GET", "/1", &[("authorization", "NTLM TlRMTVNTUAAB")], true);
    let mut peer = backend.accept();
    assert_eq!(peer.request().target, "/1");
    peer.send(OK);
    assert_eq!(client.answer(stream).text(), "ok");
    assert!(peer.is_at_end());
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
        // The worker's driver may not know of the close yet when the next request comes.
        peer.close_both();
        client.send("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nbody");
        let mut peer = backend.accept();
        assert_eq!(peer.request().body, b"body");
        peer.send("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok");
        assert_eq!(client.response().text(), "ok");
    }
    server.stop();
}
