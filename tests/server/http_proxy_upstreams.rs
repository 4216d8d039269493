//! Upstream groups: choice of a server, retries on the next one, reuse of connections, and the cost of a dead server.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::{Backend, Client, Driver, Response, Server, Serving, Setup, until_in_time, with_each_driver};

with_each_driver!(
    servers_take_turns_by_weight,
    the_next_server_is_tried_as_configured,
    a_connection_whose_answer_is_replaced_is_used_again,
    non_idempotent_request_is_not_sent_twice,
    an_unbuffered_body_is_sent_once,
    tries_are_limited,
    a_server_that_fails_is_left_alone_until_its_time_is_over,
    connections_are_used_again_and_not_for_ever,
    a_worker_keeps_connections_that_the_other_one_does_not_need,
    connection_closed_while_idle_fails_no_request,
    a_post_is_not_sent_twice_over_a_connection_that_breaks,
    a_killed_server_under_load_loses_no_get,
    without_a_server_the_answer_comes_at_once,
    a_silent_server_is_given_up,
    without_connections_requests_are_refused_and_nothing_is_lost,
    idle_connections_to_servers_are_closed_before_those_of_clients,
    a_request_is_written_anew_for_each_server_where_the_location_says_so,
    applications_get_parameters_of_their_own_where_the_location_says_so,
);

/// A backend that always sends this response.
fn always(answer: &'static str) -> Serving {
    Backend::tcp().serve(move |_, client| client.try_send(answer).is_ok())
}

fn ok() -> Serving {
    always("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
}

/// An address without a listener.
fn address_without_listener() -> String {
    Backend::tcp().address().to_owned()
}

/// A server with a group of these servers, and locations that proxy to it.
fn start(driver: Driver, servers: &str, locations: &str) -> Server {
    let configuration = format!("upstream u {{ {servers} }} server {{ listen %UNIX%; {locations} }}");
    Setup::http(driver, &configuration).start()
}

fn post(client: &mut Client, target: &str) -> Response {
    client.ask(format!("POST {target} HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"))
}

fn servers_take_turns_by_weight(driver: Driver) {
    let (one, two, spare) = (ok(), ok(), ok());
    let servers = format!(
        "server {} weight=2; server {}; server {} backup; server {} down; keepalive 0;",
        one.address,
        two.address,
        spare.address,
        address_without_listener()
    );
    let server = start(driver, &servers, "location / { proxy_pass http://u; }");
    let mut client = server.connect();
    for _ in 0..12 {
        assert_eq!(client.get("/").text(), "ok");
    }
    // Each worker begins with the first server; one connection belongs to one worker.
    let counts = [one.asked().len(), two.asked().len(), spare.asked().len()];
    assert_eq!(counts, [8, 4, 0]);
    server.stop();
}

fn the_next_server_is_tried_as_configured(driver: Driver) {
    for (condition, answer, status) in [
        ("error", "", 502),
        ("invalid_header", "garbage\r\n\r\n", 502),
        ("http_500", "HTTP/1.1 500 x\r\nContent-Length: 0\r\n\r\n", 500),
        ("http_502", "HTTP/1.1 502 x\r\nContent-Length: 0\r\n\r\n", 502),
        ("http_503", "HTTP/1.1 503 x\r\nContent-Length: 0\r\n\r\n", 503),
        ("http_504", "HTTP/1.1 504 x\r\nContent-Length: 0\r\n\r\n", 504),
        ("http_403", "HTTP/1.1 403 x\r\nContent-Length: 0\r\n\r\n", 403),
        ("http_404", "HTTP/1.1 404 x\r\nContent-Length: 0\r\n\r\n", 404),
        ("http_429", "HTTP/1.1 429 x\r\nContent-Length: 0\r\n\r\n", 429),
    ] {
        let bad = Backend::tcp().serve(move |_, client| client.try_send(answer).is_ok() && answer.starts_with("HTTP"));
        let good = ok();
        let servers = format!("server {} max_fails=0; server {} backup;", bad.address, good.address);
        let locations = format!(
            "location /on {{ proxy_next_upstream {condition}; proxy_pass http://u; }}
             location /off {{ proxy_next_upstream off; proxy_pass http://u; }}
             location /post {{ proxy_next_upstream {condition} non_idempotent; proxy_pass http://u; }}"
        );
        let server = start(driver, &servers, &locations);
        let mut client = server.connect();
        assert_eq!(client.get("/on").status, 200, "{condition}");
        assert_eq!(server.get("/off").status, status, "{condition}");
        assert_eq!(post(&mut server.connect(), "/on").status, status, "{condition}");
        assert_eq!(post(&mut server.connect(), "/post").status, 200, "{condition}");
        let bodies: Vec<Vec<u8>> = good.asked().into_iter().map(|(_, asked)| asked.body).collect();
        assert_eq!(bodies, [&b""[..], b"abc"], "{condition}");
        server.stop();
    }
}

fn a_connection_whose_answer_is_replaced_is_used_again(driver: Driver) {
    let whole = "HTTP/1.1 404 x\r\nContent-Length: 4\r\n\r\ngone";
    let unfinished = "HTTP/1.1 404 x\r\nContent-Length: 5\r\n\r\ngone";
    let closing = "HTTP/1.1 404 x\r\nContent-Length: 4\r\nConnection: close\r\n\r\ngone";
    let of_a_user = "HTTP/1.1 404 x\r\nWWW-Authenticate: Negotiate abc\r\nContent-Length: 4\r\n\r\ngone";
    for (answer, connections) in [(whole, 1), (unfinished, 4), (closing, 4), (of_a_user, 4)] {
        let (first, second) = (always(answer), ok());
        let servers = format!("server {}; server {} backup;", first.address, second.address);
        let location = "location / { proxy_next_upstream http_404; proxy_pass http://u; }";
        let server = start(driver, &servers, location);
        let mut client = server.connect();
        for _ in 0..4 {
            assert_eq!(client.get("/").text(), "ok");
        }
        assert_eq!((first.asked().len(), first.connection_count()), (4, connections), "{answer}");
        server.stop();
    }
}

fn non_idempotent_request_is_not_sent_twice(driver: Driver) {
    let closes = Backend::tcp().serve(|_, _| false);
    let good = ok();
    let servers = format!("server {} max_fails=0; server {} backup;", closes.address, good.address);
    let server = start(driver, &servers, "location / { proxy_pass http://u; }");
    for (method, status) in [
        ("GET", 200),
        ("HEAD", 200),
        ("PUT", 200),
        ("DELETE", 200),
        ("OPTIONS", 200),
        ("PROPFIND", 200),
        ("POST", 502),
        ("PATCH", 502),
        ("LOCK", 502),
    ] {
        let request = format!("{method} / HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!(server.connect().ask(request).status, status, "{method}");
    }
    server.stop();
    // A request that was never sent may be retried.
    let servers = format!("server {} max_fails=0; server {} backup;", address_without_listener(), good.address);
    let server = start(driver, &servers, "location / { proxy_pass http://u; }");
    assert_eq!(post(&mut server.connect(), "/").status, 200);
    server.stop();
}

fn an_unbuffered_body_is_sent_once(driver: Driver) {
    let closes = Backend::tcp().serve(|_, _| false);
    let good = ok();
    let servers = format!("server {} max_fails=0; server {} backup;", closes.address, good.address);
    let locations = "location / { proxy_request_buffering off; proxy_next_upstream error non_idempotent;
        proxy_pass http://u; }";
    let server = start(driver, &servers, locations);
    let put = "PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc";
    assert_eq!(server.connect().ask(put).status, 502);
    assert!(good.asked().is_empty());
    server.stop();
}

fn tries_are_limited(driver: Driver) {
    let bad: Vec<Serving> = (0..4).map(|_| Backend::tcp().serve(|_, _| false)).collect();
    let servers: String = bad.iter().map(|bad| format!("server {} max_fails=0;", bad.address)).collect();
    let locations =
        "location / { proxy_pass http://u; } location /two { proxy_next_upstream_tries 2; proxy_pass http://u; }
        location /one { proxy_next_upstream_tries 1; proxy_pass http://u; }";
    let server = start(driver, &servers, locations);
    let mut before = 0;
    for (target, tries) in [("/", 4), ("/two", 2), ("/one", 1)] {
        assert_eq!(server.get(target).status, 502);
        let count = bad.iter().map(|bad| bad.asked().len()).sum::<usize>();
        assert_eq!(count - before, tries, "{target}");
        before = count;
    }
    server.stop();
}

fn a_server_that_fails_is_left_alone_until_its_time_is_over(driver: Driver) {
    let bad = Backend::tcp().serve(|_, _| false);
    let good = ok();
    let servers = format!("server {} max_fails=2 fail_timeout=1h; server {};", bad.address, good.address);
    let mut server = start(driver, &servers, "location / { proxy_pass http://u; }");
    let mut client = server.connect();
    for _ in 0..10 {
        assert_eq!(client.get("/").status, 200);
    }
    // Two failures were enough.
    assert_eq!(bad.asked().len(), 2);
    // A reload that changes the server resets its state.
    let servers = format!("server {} max_fails=0; server {};", bad.address, good.address);
    let configuration =
        format!("upstream u {{ {servers} }} server {{ listen %UNIX%; location / {{ proxy_pass http://u; }} }}");
    server.reload_http(driver, &configuration);
    let mut client = server.connect();
    for _ in 0..4 {
        assert_eq!(client.get("/").status, 200);
    }
    assert!(bad.asked().len() > 2);
    server.stop();
}

fn connections_are_used_again_and_not_for_ever(driver: Driver) {
    for (keepalive, requests, expected) in
        [("", 20, 1), ("keepalive 1;", 20, 1), ("keepalive 0;", 5, 5), ("keepalive_requests 5;", 20, 4)]
    {
        let backend = ok();
        let servers = format!("server {}; {keepalive}", backend.address);
        let server = start(driver, &servers, "location / { proxy_pass http://u; }");
        let mut client = server.connect();
        for _ in 0..requests {
            assert_eq!(client.get("/").text(), "ok");
        }
        assert_eq!(backend.connection_count(), expected, "{keepalive}");
        // Each of the two workers needs at most one connection of its own.
        if keepalive.is_empty() {
            for _ in 0..requests {
                assert_eq!(server.get("/").text(), "ok");
            }
            assert!(backend.connection_count() <= 2, "{}", backend.connection_count());
        }
        server.stop();
    }
}

/// Two simultaneous requests need two connections of one worker. `keepalive 1` lets two workers keep as many.
fn a_worker_keeps_connections_that_the_other_one_does_not_need(driver: Driver) {
    let backend = Backend::tcp();
    let servers = format!("server {}; keepalive 1;", backend.address());
    let locations = "location / { mirror /mirror; proxy_pass http://u; }
        location = /mirror { internal; proxy_pass http://u; }";
    let server = start(driver, &servers, locations);
    let mut client = server.connect();
    let mut peers: Vec<_> = Vec::new();
    for _ in 0..3 {
        client.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
        if peers.is_empty() {
            peers.extend([backend.accept(), backend.accept()]);
        }
        for peer in &mut peers {
            peer.request();
        }
        for peer in &mut peers {
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        }
        assert_eq!(client.response().text(), "ok");
    }
    server.stop();
}

fn connection_closed_while_idle_fails_no_request(driver: Driver) {
    let backend = Backend::tcp();
    let servers = format!("server {};", backend.address());
    let server = start(driver, &servers, "location / { proxy_pass http://u; }");
    for method in ["GET", "POST"] {
        let mut client = server.connect();
        let request = format!("{method} / HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n");
        client.send(&request);
        let mut peer = backend.accept();
        peer.request();
        peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        assert_eq!(client.response().text(), "ok");
        peer.close_both();
        drop(peer);
        client.send(&request);
        let mut peer = backend.accept();
        peer.request();
        peer.send("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok");
        assert_eq!(client.response().text(), "ok", "{method}");
    }
    // The server closes the connection when it has received the next request.
    let mut client = server.connect();
    client.send("GET /1 HTTP/1.1\r\nHost: h\r\n\r\n");
    let mut peer = backend.accept();
    peer.request();
    peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    assert_eq!(client.response().text(), "ok");
    client.send("GET /2 HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(peer.request().target, "/2");
    peer.close_both();
    drop(peer);
    let mut peer = backend.accept();
    assert_eq!(peer.request().target, "/2");
    peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    assert_eq!(client.response().text(), "ok");
    assert!(!server.log().contains("prematurely"), "{}", server.log());
    server.stop();
}

fn a_post_is_not_sent_twice_over_a_connection_that_breaks(driver: Driver) {
    let backend = Backend::tcp();
    let servers = format!("server {};", backend.address());
    let server = start(driver, &servers, "location / { proxy_pass http://u; }");
    let mut client = server.connect();
    client.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
    let mut peer = backend.accept();
    peer.request();
    peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    assert_eq!(client.response().text(), "ok");
    client.send("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc");
    assert_eq!(peer.request().text(), "abc");
    peer.close_both();
    drop(peer);
    assert_eq!(client.response().status, 502);
    assert!(backend.is_idle());
    server.stop();
}

fn a_killed_server_under_load_loses_no_get(driver: Driver) {
    let (one, two) = (ok(), ok());
    let servers = format!("server {}; server {};", one.address, two.address);
    let server = start(driver, &servers, "location / { proxy_pass http://u; }");
    let done = Arc::new(AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            let (server, done) = (&server, Arc::clone(&done));
            scope.spawn(move || {
                let mut client = server.connect();
                for _ in 0..100 {
                    let response = client.get("/");
                    assert_eq!((response.status, response.text()), (200, "ok"));
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        while done.load(Ordering::Relaxed) < 200 {
            std::thread::yield_now();
        }
        one.kill();
    });
    assert_eq!(done.load(Ordering::Relaxed), 800);
    server.stop();
}

fn without_a_server_the_answer_comes_at_once(driver: Driver) {
    let bad = Backend::tcp().serve(|_, _| false);
    let servers =
        format!("server {} fail_timeout=1h; server {} fail_timeout=1h;", bad.address, address_without_listener());
    let server = start(driver, &servers, "location / { proxy_pass http://u; }");
    let mut client = server.connect();
    assert_eq!(client.get("/").status, 502);
    let asked = bad.asked().len();
    assert_eq!(client.get("/").status, 502);
    let line = server.wait_logged("no live upstreams while connecting to upstream");
    assert!(line.contains("upstream: \"http://u/\""), "{line}");
    assert_eq!(bad.asked().len(), asked);
    server.stop();
}

fn a_silent_server_is_given_up(driver: Driver) {
    let silent = Backend::tcp();
    let good = ok();
    let servers = format!("server {} max_fails=0; server {} backup;", silent.address(), good.address);
    let locations = "proxy_read_timeout 1s; location / { proxy_pass http://u; }
        location /error { proxy_next_upstream error; proxy_pass http://u; }
        location /half { proxy_pass http://u; }";
    let server = start(driver, &servers, locations);
    assert_eq!(server.get("/error").status, 504);
    server.wait_logged("upstream timed out (110: Connection timed out) while reading response header from upstream");
    assert_eq!(server.get("/").text(), "ok");
    // A response that stops in the middle of its body is not retried.
    let _first = (silent.accept(), silent.accept());
    until_in_time("the head of a response", || {
        let mut client = server.connect();
        client.send("GET /half HTTP/1.1\r\nHost: h\r\n\r\n");
        let mut peer = silent.accept();
        peer.request();
        let _ = peer.try_send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf");
        if client.head().header("Content-Length") != Some("10") {
            return None;
        }
        assert_eq!(client.read_to_end(), b"half");
        Some(())
    });
    server.wait_logged("upstream timed out (110: Connection timed out) while reading upstream");
    server.stop();
}

fn without_connections_requests_are_refused_and_nothing_is_lost(driver: Driver) {
    let backend = Backend::tcp();
    let configuration =
        format!("server {{ listen %UNIX%; location / {{ proxy_pass http://{}; }} }}", backend.address());
    let setup = Setup::http(driver, &configuration).replace("worker_connections 128", "worker_connections 16");
    let server = setup.replace("worker_processes 2", "worker_processes 1").start();
    let mut clients: Vec<Client> = (0..14).map(|_| server.connect()).collect();
    for client in &mut clients {
        client.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
    }
    server.wait_logged("worker_connections are not enough");
    let serving = backend.serve(|_, client| client.try_send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").is_ok());
    for mut client in clients {
        if client.is_at_end() {
            continue;
        }
        let status = client.response().status;
        assert!([200, 500, 502, 503].contains(&status), "{status}");
    }
    assert_eq!(server.get("/").text(), "ok");
    server.stop();
    drop(serving);
}

fn idle_connections_to_servers_are_closed_before_those_of_clients(driver: Driver) {
    let backend = Backend::tcp();
    let configuration = format!(
        "server {{ listen %UNIX%; location / {{ proxy_pass http://{}; }} location /own {{ return 200 own; }} }}",
        backend.address()
    );
    let setup = Setup::http(driver, &configuration).replace("worker_connections 128", "worker_connections 16");
    let server = setup.replace("worker_processes 2", "worker_processes 1").start();
    let mut clients: Vec<Client> = (0..8).map(|_| server.connect()).collect();
    clients.iter_mut().for_each(|client| client.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n"));
    let mut peers: Vec<Client> = (0..8).map(|_| backend.accept()).collect();
    for peer in &mut peers {
        peer.request();
        peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    }
    clients.iter_mut().for_each(|client| assert_eq!(client.response().text(), "ok"));
    // Eight connections of clients and eight to the server are the maximum, but the latter are idle.
    clients.extend((0..8).map(|_| server.connect()));
    for client in &mut clients {
        client.send("GET /own HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!(client.response().text(), "own");
    }
    peers.iter_mut().for_each(|peer| assert!(peer.is_at_end()));
    server.stop();
}

fn a_request_is_written_anew_for_each_server_where_the_location_says_so(driver: Driver) {
    let (one, other) = (Backend::tcp_at("127.0.0.5"), Backend::tcp_at("127.0.0.6"));
    let servers = format!("server {} max_fails=0; server {} backup; keepalive 0;", one.address(), other.address());
    let locations = "proxy_set_header Host at-$upstream_last_addr; proxy_set_body <$upstream_addr>;
        location / { proxy_request_dynamic on; proxy_pass http://u/new/; }
        location /once { proxy_pass http://u; }";
    let server = start(driver, servers.as_str(), locations);
    let addresses = [one.address(), other.address()];
    for (target, hosts, bodies) in [
        (
            "/a",
            ["at-127.0.0.5", "at-127.0.0.6"],
            [format!("<{}>", addresses[0]), format!("<{}>", addresses.join(", "))],
        ),
        ("/once", ["at-", "at-"], ["<>".to_owned(), "<>".to_owned()]),
    ] {
        let mut client = server.connect();
        client.send(format!("GET {target} HTTP/1.1\r\nHost: h\r\n\r\n"));
        for (number, backend) in [&one, &other].into_iter().enumerate() {
            let mut peer = backend.accept();
            let asked = peer.request();
            assert_eq!((asked.header("host"), asked.text()), (Some(hosts[number]), &*bodies[number]));
            assert_eq!(asked.target, if target == "/a" { "/new/a" } else { target });
            // The first server disconnects without a response.
            if number == 1 {
                peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
            }
        }
        assert_eq!(client.response().text(), "ok", "{target}");
    }
    server.stop();
    // A request that cannot be written for one server is not sent to the next one either.
    let locations = "proxy_set_header Host \"a$upstream_last_addr\n\"; proxy_request_dynamic on; proxy_pass http://u;";
    let server = start(driver, &servers, &format!("location / {{ {locations} }}"));
    assert_eq!(server.get("/").status, 500);
    server.wait_logged("while preparing a request to an upstream");
    assert!(one.is_idle() && other.is_idle());
    server.stop();
}

fn applications_get_parameters_of_their_own_where_the_location_says_so(driver: Driver) {
    let (one, other) = (Backend::tcp_at("127.0.0.5"), Backend::tcp_at("127.0.0.6"));
    let servers = format!(
        "server {} max_fails=0; server {} max_fails=0 backup;
        keepalive 0;",
        one.address(),
        other.address()
    );
    for protocol in ["fastcgi", "uwsgi", "scgi"] {
        let location = |target: &str, says: &str| {
            format!(
                "location {target} {{ {protocol}_request_dynamic {says}; {protocol}_pass u;
                     {protocol}_param SERVER at-$upstream_last_addr-; }}"
            )
        };
        let server = start(driver, &servers, &[location("/each", "on"), location("/once", "off")].concat());
        for (target, seen) in [("/each", ["at-127.0.0.5-", "at-127.0.0.6-"]), ("/once", ["at--", "at--"])] {
            let mut client = server.connect();
            client.send(format!("GET {target} HTTP/1.1\r\nHost: h\r\n\r\n"));
            for (backend, seen) in [&one, &other].into_iter().zip(seen) {
                let (mut peer, mut asked) = (backend.accept(), Vec::new());
                while !asked.windows(seen.len()).any(|part| part == seen.as_bytes()) {
                    let more = peer.read_some_or_end();
                    assert!(!more.is_empty(), "{protocol} {target}: {}", String::from_utf8_lossy(&asked));
                    asked.extend(more);
                }
            }
            assert_eq!(client.response().status, 502);
        }
        server.stop();
    }
}
