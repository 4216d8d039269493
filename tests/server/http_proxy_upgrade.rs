//! WebSockets and other protocols through the proxy: permitted upgrades, and tunnels until their end.

use rustix::process::Signal;

use crate::support::{
    self, Asked, Backend, Client, Driver, Response, Server, Setup, turn_of_crowds, until_in_time, with_each_driver,
};

with_each_driver!(
    websockets_need_no_configuration,
    websockets_work_with_the_lines_that_nginx_needs,
    other_protocols_are_for_those_that_the_configuration_names,
    unrequested_upgrade_is_refused,
    data_that_comes_with_the_agreement_is_not_lost,
    each_direction_ends_on_its_own,
    an_idle_tunnel_ends_after_the_read_timeout,
    a_tunnel_survives_a_reload,
    log_line_of_a_tunnel_has_the_request_and_the_bytes_passed,
    the_log_line_of_a_tunnel_has_the_values_that_its_response_had,
    a_tunnel_that_is_closed_under_it_is_logged_like_any_other,
    an_idle_tunnel_takes_little_memory,
    ends_that_write_without_reading_are_held_up_and_lose_nothing,
    a_reset_of_one_end_ends_the_other,
    connect_makes_a_tunnel_where_the_configuration_says_so,
    connect_is_refused_where_no_tunnels_are_made,
);

const KEY: &str = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n";

fn request(target: &str, upgrade: &str) -> String {
    let connection = "Connection: keep-alive, Upgrade\r\n";
    format!("GET {target} HTTP/1.1\r\nHost: h\r\nUpgrade: {upgrade}\r\n{connection}{KEY}\r\n")
}

fn agreement(upgrade: &str) -> String {
    format!("HTTP/1.1 101 Switching Protocols\r\nUpgrade: {upgrade}\r\nConnection: Upgrade\r\nX-Own: 1\r\n\r\n")
}

/// A backend, and a proxy server whose location contains `more`.
fn start(driver: Driver, more: &str) -> (Backend, Server) {
    let backend = Backend::tcp();
    let setup = Setup::server(driver, "location / { MORE proxy_pass http://ADDRESS; }").replace("MORE", more);
    let server = setup.replace("ADDRESS", backend.address()).start();
    (backend, server)
}

/// Opens a WebSocket that the backend accepts.
fn open(backend: &Backend, server: &Server) -> (Client, Client, Asked, Response) {
    let mut client = server.connect();
    client.send(request("/", "websocket"));
    let mut peer = backend.accept();
    let asked = peer.request();
    peer.send(agreement("websocket"));
    let response = client.response();
    assert_eq!(response.status, 101);
    (client, peer, asked, response)
}

/// Checks that both ends receive each other's bytes.
fn converse(client: &mut Client, peer: &mut Client) {
    for text in ["hello", "\0\x01\u{ff}\r\n\r\nGET / HTTP/1.1\r\n\r\n", "x"] {
        client.send(text);
        assert_eq!(peer.take(text.len()), text.as_bytes());
        peer.send(text);
        assert_eq!(client.take(text.len()), text.as_bytes());
    }
}

fn websockets_need_no_configuration(driver: Driver) {
    let (backend, server) = start(driver, "");
    let (mut client, mut peer, asked, response) = open(&backend, &server);
    let fields = format!("Host: {}\nUpgrade: websocket\nConnection: upgrade\n{KEY}", backend.address());
    assert_eq!(asked.fields(), fields.replace("\r\n", "\n"));
    let upgrade = response.header("Upgrade").map(str::to_ascii_lowercase);
    let connection = response.header("Connection").map(str::to_ascii_lowercase);
    assert_eq!((upgrade.as_deref(), connection.as_deref()), (Some("websocket"), Some("upgrade")));
    assert_eq!((response.header("X-Own"), response.header("Transfer-Encoding")), (Some("1"), None));
    converse(&mut client, &mut peer);
    client.close_both();
    peer.assert_closed();
    drop(peer);
    server.directory.wait_line("access.log", "\"GET / HTTP/1.1\" 101");
    server.stop();
}

fn websockets_work_with_the_lines_that_nginx_needs(driver: Driver) {
    let (backend, server) = start(
        driver,
        "proxy_http_version 1.1; proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection \"upgrade\";",
    );
    let (mut client, mut peer, asked, _) = open(&backend, &server);
    assert_eq!((asked.header("Upgrade"), asked.header("Connection")), (Some("websocket"), Some("upgrade")));
    converse(&mut client, &mut peer);
    // A request without `Upgrade` does not get one.
    let mut client = server.connect();
    client.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
    let mut peer = backend.accept();
    let asked = peer.request();
    assert_eq!((asked.header("Upgrade"), asked.header("Connection")), (None, None));
    peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    assert_eq!(client.response().status, 200);
    server.stop();
}

/// The `Upgrade` field that the backend receives if the client asks for this protocol.
fn heard(driver: Driver, more: &str, upgrade: &str) -> Option<String> {
    let (backend, server) = start(driver, more);
    let mut client = server.connect();
    client.send(request("/", upgrade));
    let mut peer = backend.accept();
    let asked = peer.request();
    peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno");
    assert_eq!(client.response().text(), "no");
    server.stop();
    assert_eq!(asked.header("Connection").is_some(), asked.header("Upgrade").is_some(), "{asked:?}");
    asked.header("Upgrade").map(str::to_owned)
}

fn other_protocols_are_for_those_that_the_configuration_names(driver: Driver) {
    let set = "proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection upgrade;";
    for (more, upgrade, expected) in [
        ("", "WebSocket", Some("WebSocket")),
        ("", "foo", None),
        ("", "websocket, foo", Some("websocket")),
        ("", "foo ,WebSocket", Some("WebSocket")),
        ("", "websocket, h2c", None),
        ("proxy_set_header Connection \"\";", "websocket", Some("websocket")),
        ("proxy_upgrade foo;", "foo", Some("foo")),
        ("proxy_upgrade foo;", "websocket", None),
        ("proxy_upgrade foo websocket;", "websocket", Some("websocket")),
        ("proxy_upgrade off;", "websocket", None),
        ("proxy_http_version 1.0;", "websocket", None),
        (set, "foo", Some("foo")),
        (set, "h2c", None),
        ("proxy_upgrade foo;", "h2c", None),
    ] {
        assert_eq!(heard(driver, more, upgrade).as_deref(), expected, "{more} {upgrade}");
    }
}

fn unrequested_upgrade_is_refused(driver: Driver) {
    let (backend, server) = start(driver, "");
    for (number, (asked, given)) in
        [("websocket", "foo"), ("foo", "foo"), ("h2c", "h2c"), ("websocket", "websocket, foo"), ("foo", "websocket")]
            .into_iter()
            .enumerate()
    {
        let mut client = server.connect();
        client.send(request(&format!("/{number}"), asked));
        let mut peer = backend.accept();
        peer.request();
        peer.send(agreement(given));
        assert_eq!(client.response().status, 502, "{asked} {given}");
        peer.assert_closed();
        let line = server.wait_logged(&format!("\"GET /{number} HTTP/1.1\""));
        assert!(line.contains("upstream sent unexpected \"101 Switching Protocols\""), "{line}");
    }
    // A 101 without an `Upgrade` field.
    let mut client = server.connect();
    client.send(request("/none", "websocket"));
    let mut peer = backend.accept();
    peer.request();
    peer.send("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n\r\n");
    assert_eq!(client.response().status, 502);
    server.stop();
}

fn data_that_comes_with_the_agreement_is_not_lost(driver: Driver) {
    let (backend, server) = start(driver, "");
    let mut client = server.connect();
    client.send(format!("{}early", request("/", "websocket")));
    let mut peer = backend.accept();
    peer.request();
    peer.send(format!("{}first", agreement("websocket")));
    assert_eq!(client.response().status, 101);
    assert_eq!(client.take(5), b"first");
    assert_eq!(peer.take(5), b"early");
    converse(&mut client, &mut peer);
    server.stop();
}

fn each_direction_ends_on_its_own(driver: Driver) {
    let (backend, server) = start(driver, "");
    let (mut client, mut peer, ..) = open(&backend, &server);
    client.send("last");
    client.finish_sending();
    assert_eq!(peer.read_to_end(), b"last");
    peer.send("answer");
    assert_eq!(client.take(6), b"answer");
    peer.close_both();
    client.assert_closed();
    let (mut client, mut peer, ..) = open(&backend, &server);
    peer.send("last");
    peer.finish_sending();
    assert_eq!(client.read_to_end(), b"last");
    client.send("answer");
    assert_eq!(peer.take(6), b"answer");
    client.close_both();
    peer.assert_closed();
    server.stop();
}

fn an_idle_tunnel_ends_after_the_read_timeout(driver: Driver) {
    // The same timeout applies to the backend's response.
    let (backend, server) = start(driver, "proxy_read_timeout 1s;");
    until_in_time("the backend's agreement", || {
        let mut client = server.connect();
        client.send(request("/", "websocket"));
        let mut peer = backend.accept();
        peer.request();
        let _ = peer.try_send(format!("{}hello", agreement("websocket")));
        if client.response().status != 101 {
            return None;
        }
        assert_eq!(client.take(5), b"hello");
        client.assert_closed();
        peer.assert_closed();
        Some(())
    });
    server.wait_logged("upstream timed out (110: Connection timed out) while proxying upgraded connection");
    server.stop();
}

fn a_tunnel_survives_a_reload(driver: Driver) {
    let (backend, mut server) = start(driver, "");
    let (mut client, mut peer, ..) = open(&backend, &server);
    for _ in 0..3 {
        server.reload_http(driver, "server { listen %UNIX%; return 200 new; }");
        converse(&mut client, &mut peer);
    }
    assert_eq!(server.get("/").text(), "new");
    client.close_both();
    peer.assert_closed();
    server.stop();
}

fn log_line_of_a_tunnel_has_the_request_and_the_bytes_passed(driver: Driver) {
    let backend = Backend::tcp();
    let text = "log_format tunnel '$request|$http_upgrade|$http_x_asked|$sent_http_x_own|$upstream_http_x_own|$status \
        $upstream_status|$upstream_addr|$upstream_bytes_sent $upstream_bytes_received $upstream_response_length|\
        $bytes_sent $body_bytes_sent|$upstream_response_time';
        server { listen %UNIX%; access_log %DIR%/tunnel.log tunnel; location / { proxy_pass http://ADDRESS; } }";
    let server = Setup::http(driver, &text.replace("ADDRESS", backend.address())).start();
    let mut client = server.connect();
    client.send(request("/?a=b", "websocket").replace("Host: h", "Host: h\r\nX-Asked: yes"));
    let mut peer = backend.accept();
    let asked = peer.request();
    let agreement = agreement("websocket");
    peer.send(&agreement);
    assert_eq!(client.response().status, 101);
    converse(&mut client, &mut peer);
    client.close_both();
    peer.assert_closed();
    drop(peer);
    let line = server.directory.wait_line("tunnel.log", "101");
    let parts: Vec<&str> = line.trim_end().split('|').collect();
    let passed = "hello".len() + "\0\x01\u{ff}\r\n\r\nGET / HTTP/1.1\r\n\r\n".len() + "x".len();
    let received = agreement.len() + passed;
    assert_eq!(parts[..5], ["GET /?a=b HTTP/1.1", "websocket", "yes", "1", "1"], "{line}");
    assert_eq!(parts[5..7], ["101 101", backend.address()], "{line}");
    let fields: usize = asked.headers.iter().map(|(name, value)| format!("{name}: {value}\r\n").len()).sum();
    let head = format!("{} {} {}\r\n\r\n", asked.method, asked.target, asked.version).len() + fields;
    assert_eq!(parts[7], format!("{} {received} {passed}", head + passed), "{line}");
    assert!(parts[8].ends_with(&format!(" {passed}")), "{line}");
    assert!(parts[9].parse::<f64>().is_ok(), "{line}");
    server.stop();
}

/// Variables of every kind, which have the same values in a tunnel's response and in its log line.
const VALUES: &str = "$request_id|$request_method $scheme $host $uri $args $request_uri|$named|$kept $mapped|\
    $cookie_a $cookie_b $arg_c|$remote_addr $realip_remote_addr $connection $connection_requests|$http_user_agent|\
    $server_name $server_protocol $document_root|$proxy_host $proxy_port";

/// A server whose location writes [`VALUES`] into the response, and after `log=` into the log line.
fn start_with_values(driver: Driver, backend: &Backend, main: &str) -> Server {
    let text = "set_real_ip_from unix:; real_ip_header X-Real-IP;
        log_format values 'log=VALUES|$upstream_http_x_own $sent_http_x_own $sent_http_x_long|$status';
        map $http_upgrade $mapped { default close; websocket upgrade; }
        server { listen %UNIX%; server_name values.example; access_log %DIR%/values.log values;
                 rewrite ^/old/(.*)$ /new/$1;
                 location ~ ^/(?<named>[a-z]+)/([a-z]+)$ {
                     set $kept \"$1-$2\";
                     add_header X-Values \"VALUES\" always;
                     add_header X-Long 0123456789012345678901234567890123456789012345678901234567890123 always;
                     proxy_pass http://ADDRESS; } }";
    let text = text.replace("VALUES", VALUES).replace("ADDRESS", backend.address());
    let setup = Setup::http(driver, &text);
    setup.replace("daemon off;", &format!("daemon off; {main}")).start()
}

/// Opens a tunnel; also returns the expected log line.
fn open_with_values(backend: &Backend, server: &Server, agent: &str) -> (Client, Client, String) {
    let mut client = server.connect();
    let fields = format!("Host: values.example\r\nCookie: a=1; b=2\r\nX-Real-IP: 192.0.2.7\r\nUser-Agent: {agent}");
    client.send(request("/old/path?c=d", "websocket").replace("Host: h", &fields));
    let mut peer = backend.accept();
    peer.request();
    peer.send(agreement("websocket"));
    let response = client.response();
    let values = response.header("X-Values").expect("the values").to_owned();
    assert!(values.contains("|GET http values.example /new/path c=d /old/path?c=d|new|"), "{values}");
    assert!(values.contains("|new-path upgrade|1 2 d|192.0.2.7 unix: "), "{values}");
    converse(&mut client, &mut peer);
    let long = response.header("X-Long").expect("a long field");
    (client, peer, format!("log={values}|1 1 {long}|101"))
}

fn the_log_line_of_a_tunnel_has_the_values_that_its_response_had(driver: Driver) {
    let backend = Backend::tcp();
    let server = start_with_values(driver, &backend, "");
    // A long request head stays in its buffer.
    for agent in ["short".to_owned(), "long".repeat(1200)] {
        let (client, mut peer, line) = open_with_values(&backend, &server, &agent);
        client.close_both();
        peer.assert_closed();
        drop(peer);
        assert_eq!(server.directory.wait_line("values.log", &agent), line);
    }
    server.stop();
}

fn a_tunnel_that_is_closed_under_it_is_logged_like_any_other(driver: Driver) {
    let backend = Backend::tcp();
    let mut server = start_with_values(driver, &backend, "worker_shutdown_timeout 50ms;");
    let opened = ["one", "two"].map(|agent| open_with_values(&backend, &server, agent));
    server.end(Signal::QUIT);
    for (agent, (mut client, mut peer, line)) in ["one", "two"].into_iter().zip(opened) {
        client.assert_closed();
        peer.assert_closed();
        assert_eq!(server.directory.wait_line("values.log", agent), line);
    }
}

fn an_idle_tunnel_takes_little_memory(driver: Driver) {
    const COUNT: usize = 200;
    /// A quarter of it is for the request and the response head, which the log line may need.
    const BYTES_MAX: u64 = 2304;
    let _turn = turn_of_crowds();
    let backend = Backend::tcp();
    let setup =
        Setup::server(driver, "location / { proxy_pass http://ADDRESS; }").replace("ADDRESS", backend.address());
    let setup = setup.replace("worker_processes 2", "worker_processes 1");
    let server = setup.replace("worker_connections 128", "worker_connections 2000").start();
    let open_some = |count: usize| -> Vec<_> {
        let open = |_| {
            let (mut client, mut peer, ..) = open(&backend, &server);
            converse(&mut client, &mut peer);
            (client, peer)
        };
        (0..count).map(open).collect()
    };
    // The first tunnels pay for structures that are allocated once, and for tables that grow in steps.
    let before = open_some(COUNT);
    let begin = support::anonymous_memory(server.worker());
    let tunnels = open_some(COUNT);
    let each = support::anonymous_memory(server.worker()).saturating_sub(begin) / COUNT as u64;
    assert!(each <= BYTES_MAX, "{each} bytes for a tunnel");
    drop((before, tunnels));
    server.stop();
}

fn ends_that_write_without_reading_are_held_up_and_lose_nothing(driver: Driver) {
    let (backend, server) = start(driver, "");
    let (mut client, mut peer, ..) = open(&backend, &server);
    let bytes: Vec<u8> = (0..8_000_000_u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let (mut from_client, mut from_peer) = (client.sender(), peer.sender());
    std::thread::scope(|scope| {
        let sent = scope.spawn(|| from_client.send(&bytes));
        let returned = scope.spawn(|| from_peer.send(&bytes));
        // Both writers block or will block, since neither end reads yet.
        let taken = scope.spawn(|| peer.take(bytes.len()));
        assert!(client.take(bytes.len()) == bytes);
        assert!(taken.join().expect("read") == bytes);
        sent.join().expect("sent");
        returned.join().expect("sent");
    });
    converse(&mut client, &mut peer);
    server.stop();
}

fn a_reset_of_one_end_ends_the_other(driver: Driver) {
    let (backend, server) = start(driver, "");
    let (mut client, peer, ..) = open(&backend, &server);
    // Closing a socket with unread bytes sends a reset.
    client.send("unread");
    peer.wait_readable();
    drop(peer);
    assert!(client.read_to_end().is_empty());
    server.wait_logged(" while proxying upgraded connection");
    let (client, mut peer, ..) = open(&backend, &server);
    drop(client);
    peer.assert_closed();
    server.stop();
}

fn connect(target: &str) -> String {
    format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n")
}

fn connect_makes_a_tunnel_where_the_configuration_says_so(driver: Driver) {
    let backend = Backend::tcp();
    let setup = Setup::http(
        driver,
        "log_format tunnel '$request $status $upstream_addr $upstream_bytes_sent $upstream_bytes_received';
         access_log %DIR%/tunnel.log tunnel;
         server { listen %UNIX%; server_name 127.0.0.1;
             location / {
                 if ($request_method = CONNECT) { tunnel_pass; error_page 502 504 /error; break; }
                 return 200 plain;
             }
             location = /error { return 200 error; } }
         server { listen %UNIX%; server_name fixed; tunnel_pass ADDRESS; }
         server { listen %UNIX%; server_name denied; deny all; tunnel_pass ADDRESS; }",
    );
    let server = setup.replace("ADDRESS", backend.address()).start();
    for target in [backend.address(), "fixed:1"] {
        let mut client = server.connect();
        // Bytes sent before the response are not lost, and the server may send first.
        client.send(connect(target) + "early");
        let mut peer = backend.accept();
        assert_eq!(peer.take(5), b"early");
        peer.send("first");
        let response = client.response_to_head();
        assert_eq!((response.status, response.reason.as_str()), (200, "OK"), "{target}");
        for field in ["Content-Length", "Transfer-Encoding", "Connection", "Upgrade"] {
            assert_eq!(response.header(field), None, "{field}");
        }
        assert_eq!(client.take(5), b"first");
        converse(&mut client, &mut peer);
        client.finish_sending();
        assert!(peer.is_at_end());
        peer.send("last");
        peer.close_both();
        assert_eq!(client.read_to_end(), b"last");
        let address = backend.address();
        server.directory.wait_line("tunnel.log", &format!("CONNECT {target} HTTP/1.1 200 {address} 37 41"));
    }
    assert_eq!(server.connect().ask("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").text(), "plain");
    assert_eq!(server.connect().ask("GET / HTTP/1.1\r\nHost: fixed\r\n\r\n").status, 405);
    assert_eq!(server.connect().ask(connect("denied:1")).status, 403);
    let gone = Backend::tcp().address().to_owned();
    assert_eq!(server.connect().ask(connect(&gone)).text(), "error");
    server.stop();
}

fn connect_is_refused_where_no_tunnels_are_made(driver: Driver) {
    let setup = Setup::http(
        driver,
        "server { listen %UNIX%; server_name none; location / { return 200 own; } }
         server { listen %UNIX%; server_name some; location / { tunnel_pass; } }",
    );
    let server = setup.start();
    for (request, status) in [
        (connect("none:1"), 405),
        (connect("some:1").replace("1.1", "1.0"), 405),
        (connect("some:1").replace("\r\n\r\n", "\r\nContent-Length: 1\r\n\r\n"), 400),
        (connect("some"), 400),
        (connect("some:"), 400),
        (connect("some:65536"), 400),
        (connect("some:1/"), 400),
        (connect("http://some:1"), 400),
        (connect("user@some:1"), 400),
        (connect(":1"), 400),
        // Names need a resolver.
        (connect("some:1"), 502),
    ] {
        assert_eq!(server.connect().ask(&request).status, status, "{request}");
    }
    server.wait_logged("no resolver defined to resolve some");
    server.stop();
}
