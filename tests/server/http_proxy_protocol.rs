//! The PROXY protocol: received on connections from a proxy (`listen … proxy_protocol`), and sent to upstream servers
//! (`proxy_protocol`).

use crate::support::{Backend, Client, Driver, Server, Setup, with_each_driver};

with_each_driver!(
    line_or_binary_header_has_the_client_address,
    a_header_may_come_in_pieces_and_with_the_request,
    a_connection_without_a_header_is_closed_unanswered,
    a_connection_whose_address_changes_its_mind_is_closed,
    an_address_has_the_protocol_for_all_its_servers,
    trusted_peer_sets_the_client_address,
    servers_are_told_of_each_client_on_connections_of_its_own,
    proxy_protocol_to_an_upstream_has_the_client_address,
    a_header_goes_before_the_handshake_and_before_http2,
    every_server_that_is_tried_is_told,
    checks_introduce_themselves,
    unknown_versions_are_errors,
);

const ANSWER: &str = "return 200 \"$proxy_protocol_addr $proxy_protocol_port $proxy_protocol_server_addr \
                      $proxy_protocol_server_port $proxy_protocol_tlv_alpn $proxy_protocol_tlv_ssl_version\";";

fn server(driver: Driver) -> Server {
    Setup::http(driver, &format!("server {{ listen %UNIX% proxy_protocol; {ANSWER} }}")).start()
}

const REQUEST: &str = "GET / HTTP/1.1\r\nHost: h\r\n\r\n";
const LINE: &str = "PROXY TCP4 192.0.2.1 192.0.2.2 1234 5678\r\n";

/// A header of version 2 with `rest` after its fixed part.
fn binary(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
    [b"\r\n\r\n\0\r\nQUIT\n", &[command, family][..], &(rest.len() as u16).to_be_bytes(), rest].concat()
}

fn line_or_binary_header_has_the_client_address(driver: Driver) {
    let server = server(driver);
    let ipv6 =
        [&[0x20, 1, 0xd, 0xb8][..], &[0; 11], &[1], &[0x20, 1, 0xd, 0xb8], &[0; 11], &[2], &[0, 9, 1, 0]].concat();
    let ssl = [&[1, 0, 2, b'h', b'2', 0x20, 0, 12, 1, 0, 0, 0, 0, 0x21, 0, 4][..], b"TLSx"].concat();
    let expect = |header: &[u8], expected: &str| {
        let mut client = server.connect();
        let request = [header, REQUEST.as_bytes()].concat();
        assert_eq!(client.ask(request).text(), expected);
        // The header is expected only at the beginning of a connection.
        assert_eq!(client.ask(REQUEST).text(), expected);
    };
    expect(LINE.as_bytes(), "192.0.2.1 1234 192.0.2.2 5678  ");
    expect(b"PROXY TCP6 2001:db8::1 2001:db8::2 9 256\r\n", "2001:db8::1 9 2001:db8::2 256  ");
    expect(b"PROXY UNKNOWN\r\n", "     ");
    expect(&binary(0x21, 0x11, &[192, 0, 2, 1, 192, 0, 2, 2, 0, 7, 0, 8]), "192.0.2.1 7 192.0.2.2 8  ");
    expect(&binary(0x21, 0x21, &[&ipv6[..], &ssl].concat()), "2001:db8::1 9 2001:db8::2 256 h2 TLSx");
    expect(&binary(0x20, 0, &[]), "     ");
    server.stop();
}

fn a_header_may_come_in_pieces_and_with_the_request(driver: Driver) {
    let server = server(driver);
    // A large header, which does not fit into a single read of a head.
    let large =
        binary(0x21, 0x11, &[&[192, 0, 2, 1, 192, 0, 2, 2, 0, 7, 0, 8, 0xee, 0x0e, 0x00][..], &[7; 0xe00]].concat());
    for header in [LINE.as_bytes(), &large] {
        let mut client = server.connect();
        let request = [header, REQUEST.as_bytes()].concat();
        for (number, piece) in request.chunks(header.len() / 5).enumerate() {
            client.send(piece);
            // A response on another connection: the worker has processed the piece.
            assert_eq!(server.connect().ask(format!("{LINE}{REQUEST}")).status, 200, "{number}");
        }
        assert!(client.response().text().starts_with("192.0.2.1 "));
    }
    server.stop();
}

fn a_connection_without_a_header_is_closed_unanswered(driver: Driver) {
    let server = server(driver);
    for beginning in [REQUEST, "PROXY TCP4 192.0.2.1 nonsense\r\n", "PROXY HTTP\r\n"] {
        let mut client = server.connect();
        client.send(beginning);
        client.assert_closed();
    }
    server.connect().send(binary(0x31, 0x11, &[]));
    server.wait_logged("broken header: \"GET / HTTP/1.1\" while reading PROXY protocol, client: unix:, server: unix:");
    server.wait_logged("broken header: \"PROXY HTTP\" while reading PROXY protocol");
    server.wait_logged("unknown PROXY protocol version: 3 while reading PROXY protocol");
    server.stop();
}

fn a_connection_whose_address_changes_its_mind_is_closed(driver: Driver) {
    let mut server = server(driver);
    let mut with = server.connect();
    assert_eq!(with.ask(format!("{LINE}{REQUEST}")).status, 200);
    server.reload_http(driver, &format!("server {{ listen %UNIX%; {ANSWER} }}"));
    with.assert_closed();
    let mut without = server.connect();
    assert_eq!(without.ask(REQUEST).text(), "     ");
    server.reload_http(driver, &format!("server {{ listen %UNIX% proxy_protocol; {ANSWER} }}"));
    without.assert_closed();
    server.stop();
}

fn an_address_has_the_protocol_for_all_its_servers(driver: Driver) {
    let text = format!(
        "server {{ listen %TCP%; server_name one; {ANSWER} }}
         server {{ listen %TCP% proxy_protocol; server_name two; {ANSWER} }}
         server {{ listen %UNIX%; {ANSWER} }}"
    );
    let server = Setup::http(driver, &text).start();
    for host in ["one", "two", "other"] {
        let request = format!("{LINE}GET / HTTP/1.1\r\nHost: {host}\r\n\r\n");
        assert!(server.connect_tcp(1).ask(request).text().starts_with("192.0.2.1 1234"));
    }
    assert_eq!(server.connect().ask(REQUEST).text(), "     ");
    server.stop();
}

fn trusted_peer_sets_the_client_address(driver: Driver) {
    let server = Setup::http(
        driver,
        "real_ip_header proxy_protocol;
         server { listen %UNIX% proxy_protocol; set_real_ip_from unix:;
             return 200 \"$remote_addr $remote_port $realip_remote_addr\"; }
         server { listen %TCP% proxy_protocol; set_real_ip_from 192.0.2.1; return 200 $remote_addr; }",
    )
    .start();
    let request = format!("{LINE}{REQUEST}");
    assert_eq!(server.connect().ask(&request).text(), "192.0.2.1 1234 unix:");
    assert_eq!(server.connect().ask(format!("PROXY UNKNOWN\r\n{REQUEST}")).text(), "unix:  unix:");
    assert_eq!(server.connect_tcp(1).ask(&request).text(), "127.0.0.1");
    server.stop();
}

/// Answers a request and keeps the connection.
fn answer(peer: &mut Client) {
    peer.request();
    peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
}

/// The PROXY line for a client that has connected over TCP.
fn line_of(server: &Server, client: &Client) -> String {
    let (own, ours) = (client.local_address(), server.directory.address(1));
    format!("PROXY TCP4 {} {} {} {}", own.ip(), ours.ip(), own.port(), ours.port())
}

fn servers_are_told_of_each_client_on_connections_of_its_own(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "upstream u {{ server {}; keepalive 8; }}
         server {{ listen %TCP%; proxy_protocol on;
             location / {{ proxy_pass http://u; }}
             location /none {{ proxy_protocol off; proxy_pass http://u; }} }}",
        backend.address()
    );
    let server = Setup::http(driver, &text).start();
    let mut clients = [server.connect_tcp(1), server.connect_tcp(1)];
    let mut peers = Vec::new();
    for client in &mut clients {
        client.send(REQUEST);
        let mut peer = backend.accept();
        assert_eq!(peer.take_line(), line_of(&server, client));
        answer(&mut peer);
        assert_eq!(client.response().text(), "ok");
        peers.push(peer);
    }
    // Both connections are idle now, and each client's next request uses its own again.
    for (client, peer) in clients.iter_mut().zip(&mut peers) {
        client.send(REQUEST);
        answer(peer);
        assert_eq!(client.response().text(), "ok");
    }
    clients[0].send("GET /none HTTP/1.1\r\nHost: h\r\n\r\n");
    let mut peer = backend.accept();
    answer(&mut peer);
    assert_eq!(clients[0].response().text(), "ok");
    // No other connection was opened: the next one is for another client.
    let mut other = server.connect_tcp(1);
    other.send(REQUEST);
    let mut peer = backend.accept();
    assert_eq!(peer.take_line(), line_of(&server, &other));
    answer(&mut peer);
    assert_eq!(other.response().text(), "ok");
    server.stop();
}

fn proxy_protocol_to_an_upstream_has_the_client_address(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "proxy_protocol on; set_real_ip_from unix:; real_ip_header X-Real;
         server {{ listen %UNIX%; listen %TCP%;
             location / {{ proxy_pass http://{0}; }}
             location /binary {{ proxy_protocol v2; proxy_pass http://{0}; }} }}",
        backend.address()
    );
    let server = Setup::http(driver, &text).start();
    let mut client = server.connect();
    client.send(REQUEST);
    let mut peer = backend.accept();
    assert_eq!(peer.take_line(), "PROXY UNKNOWN");
    answer(&mut peer);
    assert_eq!(client.response().status, 200);
    // Version 2 marks such a connection as LOCAL.
    client.send("GET /binary HTTP/1.1\r\nHost: h\r\n\r\n");
    let mut peer = backend.accept();
    assert_eq!(peer.take(16 + 7)[..16], binary(0x20, 0, &[0; 7])[..16]);
    answer(&mut peer);
    assert_eq!(client.response().status, 200);

    let mut client = server.connect_tcp(1);
    client.send("GET /binary HTTP/1.1\r\nHost: h\r\n\r\n");
    let mut peer = backend.accept();
    let header = peer.take(16 + 12 + 7);
    assert_eq!(header[..14], *b"\r\n\r\n\0\r\nQUIT\n\x21\x11");
    let ports = [client.local_address().port(), server.directory.address(1).port()].map(u16::to_be_bytes).concat();
    assert_eq!(header[24..28], ports);
    answer(&mut peer);
    assert_eq!(client.response().status, 200);
    server.stop();
}

fn a_header_goes_before_the_handshake_and_before_http2(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "upstream u {{ server {}; keepalive 8; }} proxy_protocol on;
         server {{ listen %TCP%;
             location /tls {{ proxy_pass https://u; }}
             location / {{ proxy_http_version 2; proxy_pass http://u; }} }}",
        backend.address()
    );
    let server = Setup::http(driver, &text).start();
    let mut client = server.connect_tcp(1);
    client.send("GET /tls HTTP/1.1\r\nHost: h\r\n\r\n");
    let mut peer = backend.accept();
    assert_eq!(peer.take_line(), line_of(&server, &client));
    // A TLS handshake.
    assert_eq!(peer.take(2), [22, 3]);
    drop(peer);
    assert_eq!(client.response().status, 502);
    // An HTTP/2 connection that is being opened for one client is not shared with another.
    let clients = [server.connect_tcp(1), server.connect_tcp(1)];
    for mut client in clients {
        client.send(REQUEST);
        let mut peer = backend.accept();
        assert_eq!(peer.take_line(), line_of(&server, &client));
        assert_eq!(peer.take(24), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    }
    server.stop();
}

fn every_server_that_is_tried_is_told(driver: Driver) {
    let [first, second] = [Backend::tcp(), Backend::tcp()];
    let text = format!(
        "upstream u {{ server {}; server {} backup; }}
         server {{ listen %TCP%; location / {{ proxy_pass http://u; proxy_protocol on; }} }}",
        first.address(),
        second.address()
    );
    let server = Setup::http(driver, &text).start();
    let mut client = server.connect_tcp(1);
    client.send(REQUEST);
    let mut peer = first.accept();
    assert_eq!(peer.take_line(), line_of(&server, &client));
    peer.request();
    peer.close_both();
    let mut peer = second.accept();
    assert_eq!(peer.take_line(), line_of(&server, &client));
    answer(&mut peer);
    assert_eq!(client.response().text(), "ok");
    server.stop();
}

fn checks_introduce_themselves(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "upstream u {{ server {}; }}
         server {{ listen %TCP%; location / {{ proxy_pass http://u; proxy_protocol on; health_check uri=/check; }} }}",
        backend.address()
    );
    let server = Setup::http(driver, &text).start();
    let mut peer = backend.accept();
    assert_eq!(peer.take_line(), "PROXY UNKNOWN");
    assert_eq!(peer.request().target, "/check");
    drop(peer);
    server.stop();
}

fn unknown_versions_are_errors(driver: Driver) {
    for (value, expected) in [
        ("v3", "invalid value \"v3\""),
        ("on v2", "invalid number of arguments in \"proxy_protocol\" directive"),
        ("on; proxy_protocol off", "\"proxy_protocol\" directive is duplicate"),
    ] {
        let text = format!("server {{ listen %TCP%; proxy_protocol {value}; }}");
        let mut server = Setup::http(driver, &text).argument("-t").launch();
        assert!(!server.wait_exited().success(), "{value}");
        assert!(server.stderr().contains(expected), "{value}: {}", server.stderr());
    }
}
