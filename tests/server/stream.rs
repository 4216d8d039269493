//! Sessions over TCP: forwarded bytes, the choice of a server, and the end of a session.

use std::io::{BufRead, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use crate::support::authority;
use crate::support::authority::Authority;
use crate::support::tls::{Tls, old_hello};
use crate::support::{
    self, Backend, Client, Driver, Server, Setup, dead_address, skip, stream_configuration, turn_of_crowds,
    until_in_time, with_each_driver,
};

with_each_driver!(
    bytes_pass_both_ways_and_are_counted,
    large_pieces_are_whole_in_both_directions_at_once,
    a_rate_changes_nothing_but_the_pace,
    a_session_ends_with_its_first_end_unless_directions_end_alone,
    the_next_server_is_tried_and_variables_name_both,
    a_group_without_servers_ends_the_session,
    a_server_is_found_by_variables,
    servers_are_told_of_clients_by_the_proxy_protocol,
    clients_are_told_by_the_proxy_protocol_if_it_is_trusted,
    a_broken_header_of_the_proxy_protocol_ends_the_session,
    return_sends_a_text_with_variables,
    access_and_limits_refuse_sessions,
    new_sessions_are_limited_by_their_rate,
    tls_ends_here_and_names_choose_servers,
    certificates_are_found_by_the_name_that_a_client_asks_for,
    names_in_a_client_s_certificate_are_in_a_variable,
    garbage_before_tls_ends_the_session,
    a_client_that_speaks_nothing_newer_than_tls_1_1_is_told_so,
    servers_are_spoken_to_over_tls,
    servers_are_offered_protocols_above_tls,
    servers_are_shown_certificates_whose_names_have_variables,
    names_in_first_messages_choose_servers_without_ending_tls,
    a_client_that_says_nothing_is_not_waited_for,
    connections_are_passed_to_listeners_with_the_bytes_read,
    passed_connections_keep_their_variables_and_limits,
    a_silent_session_ends,
    a_session_goes_on_while_something_passes,
    an_idle_session_takes_little_memory,
    a_session_with_a_rate_ends_when_its_receiver_stalls,
    a_reset_reaches_the_other_end,
    a_client_that_goes_on_sending_gets_all_of_the_answer,
    sessions_survive_a_reload_and_those_of_removed_servers_drain,
    reuseport_serves_http_and_stream,
    impossible_configurations_are_refused,
    the_example_of_databases_runs,
    the_example_of_tls_by_name_runs,
    sessions_are_logged_at_their_start_where_that_is_wanted,
    redis_is_served,
);

const FORMAT: &str = "log_format line '$status $bytes_received $bytes_sent $upstream_addr $upstream_bytes_sent \
                      $upstream_bytes_received $protocol';";

fn start(driver: Driver, text: &str) -> Server {
    Setup::stream(driver, &format!("{FORMAT}\n{text}")).start()
}

/// Waits for the log line of a session that contains this text.
#[track_caller]
fn logged(server: &Server, text: &str) -> String {
    server.directory.wait_line("access.log", text)
}

fn bytes_pass_both_ways_and_are_counted(driver: Driver) {
    let backend = Backend::tcp();
    let address = backend.address();
    let server = start(driver, &format!("server {{ listen %UNIX%; proxy_pass {address}; %LOG% }}"));
    let mut client = server.connect();
    let mut behind = backend.accept();
    // The upstream server may send first.
    behind.send("220 hello\r\n");
    assert_eq!(client.take(11), b"220 hello\r\n");
    client.send("EHLO x\r\n");
    assert_eq!(behind.take(8), b"EHLO x\r\n");
    behind.send("250 ok\r\n");
    assert_eq!(client.take(8), b"250 ok\r\n");
    drop(client);
    behind.assert_closed();
    assert_eq!(logged(&server, "200"), format!("200 8 19 {address} 8 19 TCP"));
}

fn large_pieces_are_whole_in_both_directions_at_once(driver: Driver) {
    const LENGTH: usize = 6 << 20;
    let backend = Backend::tcp();
    let address = backend.address();
    let server = start(driver, &format!("server {{ listen %TCP%; proxy_pass {address}; proxy_half_close on; %LOG% }}"));
    let bytes: Vec<u8> = (0..LENGTH).map(|index| (index % 251) as u8).collect();
    let mut client = server.connect_tcp(1);
    let mut behind = backend.accept();
    let (mut up, mut down) = (client.sender(), behind.sender());
    let (to_server, to_client) = (bytes.clone(), bytes.clone());
    let senders = [
        std::thread::spawn(move || {
            up.send(&to_server);
            up.finish_sending();
        }),
        std::thread::spawn(move || {
            down.send(&to_client);
            down.finish_sending();
        }),
    ];
    let reader = std::thread::spawn(move || behind.read_to_end());
    assert!(client.read_to_end() == bytes, "the client has all of it");
    assert!(reader.join().unwrap() == bytes, "the server has all of it");
    senders.into_iter().for_each(|sender| sender.join().unwrap());
    assert_eq!(logged(&server, "200"), format!("200 {LENGTH} {LENGTH} {address} {LENGTH} {LENGTH} TCP"));
}

fn a_rate_changes_nothing_but_the_pace(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "server {{ listen %UNIX%; proxy_pass {}; proxy_upload_rate 1m; proxy_download_rate $rate; proxy_buffer_size 1k;
         set $rate 2m; %LOG% }}",
        backend.address()
    );
    let server = start(driver, &text);
    let bytes = vec![7; 100_000];
    let mut client = server.connect();
    let mut behind = backend.accept();
    client.send(&bytes);
    assert!(behind.take(bytes.len()) == bytes);
    behind.send(&bytes);
    assert!(client.take(bytes.len()) == bytes);
    drop(behind);
    client.assert_closed();
    logged(&server, "200 100000 100000");
}

fn a_session_ends_with_its_first_end_unless_directions_end_alone(driver: Driver) {
    let (alone, together) = (Backend::tcp(), Backend::tcp());
    let text = format!(
        "server {{ listen %TCP%; proxy_pass {}; proxy_half_close on; }} server {{ listen %TCP2%; proxy_pass {}; }}",
        alone.address(),
        together.address()
    );
    let server = start(driver, &text);
    let mut client = server.connect_tcp(1);
    let mut behind = alone.accept();
    client.send("question");
    client.finish_sending();
    assert_eq!(behind.read_to_end(), b"question");
    behind.send("answer");
    drop(behind);
    assert_eq!(client.read_to_end(), b"answer");

    let mut client = server.connect_tcp(2);
    let mut behind = together.accept();
    client.send("question");
    client.finish_sending();
    assert_eq!(behind.read_to_end(), b"question");
    // The session ends, although the upstream server has sent nothing.
    client.assert_closed();
    server.wait_logged("client disconnected, bytes from/to client:8/0, bytes from/to upstream:0/8");
}

fn the_next_server_is_tried_and_variables_name_both(driver: Driver) {
    let backend = Backend::tcp();
    let (_bound, dead) = dead_address();
    let address = backend.address();
    let text = format!(
        "upstream group {{ server {dead}; server {address} backup; }}
         server {{ listen %UNIX%; proxy_pass group; %LOG% }}
         server {{ listen %TCP%; proxy_pass group2; proxy_next_upstream off; %LOG% }}
         upstream group2 {{ server {dead} max_fails=0; server {address} backup; }}"
    );
    let server = start(driver, &text);
    let mut client = server.connect();
    let mut behind = backend.accept();
    client.send("x");
    assert_eq!(behind.take(1), b"x");
    drop((client, behind));
    assert_eq!(logged(&server, "200 1"), format!("200 1 0 {dead}, {address} 0, 1 0, 0 TCP"));
    server.wait_logged("connect() failed (111: Connection refused) while connecting to upstream, client: unix:");
    server.wait_logged("upstream server temporarily disabled while connecting to upstream");
    server.connect_tcp(1).assert_closed();
    assert_eq!(logged(&server, "502 0"), format!("502 0 0 {dead} 0 0 TCP"));
}

fn a_group_without_servers_ends_the_session(driver: Driver) {
    let server = start(
        driver,
        "upstream group { server 127.0.0.1:1 down; server 127.0.0.1:2 down; }
         server { listen %UNIX%; proxy_pass group; %LOG% }",
    );
    server.connect().assert_closed();
    assert_eq!(logged(&server, "502"), "502 0 0 group 0 0 TCP");
    server.wait_logged("no live upstreams while connecting to upstream");
}

fn a_server_is_found_by_variables(driver: Driver) {
    let backend = Backend::tcp();
    let address = backend.address();
    let port = address.rsplit(':').next().unwrap();
    let text = format!(
        "upstream group {{ server {address}; }}
         map $server_addr:$server_port $target {{ %TCP% group; %TCP2% 127.0.0.1:$known; %TCP3% nobody.invalid:1; }}
         map $protocol $known {{ TCP {port}; }}
         server {{ listen %TCP%; listen %TCP2%; listen %TCP3%; proxy_pass $target; %LOG% }}"
    );
    let server = start(driver, &text);
    for number in [1, 2] {
        let mut client = server.connect_tcp(number);
        let mut behind = backend.accept();
        client.send("x");
        assert_eq!(behind.take(1), b"x");
    }
    server.connect_tcp(3).assert_closed();
    logged(&server, "500 0 0");
    server.wait_logged("no resolver defined to resolve nobody.invalid");
}

fn servers_are_told_of_clients_by_the_proxy_protocol(driver: Driver) {
    let backend = Backend::tcp();
    let address = backend.address();
    let text = format!(
        "server {{ listen %TCP%; proxy_pass {address}; proxy_protocol on; }}
         server {{ listen %TCP2%; proxy_pass {address}; proxy_protocol v2; }}"
    );
    let server = start(driver, &text);
    let mut client = server.connect_tcp(1);
    client.send("hello");
    let mut behind = backend.accept();
    let (own, ours) = addresses(&server, &client, 1);
    let line = format!("PROXY TCP4 {} {} {} {}\r\nhello", own.ip(), ours.ip(), own.port(), ours.port());
    assert_eq!(String::from_utf8_lossy(&behind.take(line.len())), line);

    let mut client = server.connect_tcp(2);
    client.send("hello");
    let mut behind = backend.accept();
    let header = behind.take(16 + 12 + 7);
    assert_eq!(&header[..14], b"\r\n\r\n\0\r\nQUIT\n\x21\x11");
    let (own, ours) = addresses(&server, &client, 2);
    assert_eq!(header[24..28], [own.port().to_be_bytes(), ours.port().to_be_bytes()].concat());
    assert_eq!(behind.take(5), b"hello");
}

/// Addresses of the client and the server.
fn addresses(server: &Server, client: &Client, number: usize) -> (SocketAddr, SocketAddr) {
    (client.local_address(), server.directory.address(number))
}

fn clients_are_told_by_the_proxy_protocol_if_it_is_trusted(driver: Driver) {
    let text = "set_real_ip_from unix:;
        server { listen %UNIX% proxy_protocol;
                 return '$remote_addr $remote_port $realip_remote_addr $proxy_protocol_server_port'; }
        server { listen %TCP% proxy_protocol; set_real_ip_from 192.0.2.0/24;
                 return '$remote_addr $proxy_protocol_addr'; }";
    let server = start(driver, text);
    let header = "PROXY TCP4 192.0.2.7 192.0.2.8 1234 5678\r\n";
    let mut client = server.connect();
    // In pieces, as a network may deliver it.
    client.send(&header[..20]);
    client.send(&header[20..]);
    assert_eq!(client.read_to_end(), b"192.0.2.7 1234 unix: 5678");
    let mut client = server.connect_tcp(1);
    client.send(header);
    let own = client.local_address().ip();
    let told = String::from_utf8(client.read_to_end()).unwrap();
    assert_eq!(told, format!("{own} 192.0.2.7"));
}

fn a_broken_header_of_the_proxy_protocol_ends_the_session(driver: Driver) {
    let text = "server { listen %UNIX% proxy_protocol; proxy_protocol_timeout 1h; return x; %LOG% }
        server { listen %TCP% proxy_protocol; proxy_protocol_timeout 50ms; return x; %LOG% }";
    let server = start(driver, text);
    for wrong in ["PROXY NONSENSE", "GET / HTTP/1.0\r\n\r\n"] {
        let mut client = server.connect();
        client.send(wrong);
        client.assert_closed();
    }
    let cut = server.connect();
    cut.sender().send("PROXY TCP4 192.0.2.7");
    cut.finish_sending();
    server.wait_logged_times("broken header: ", 3);
    server.connect_tcp(1).assert_closed();
    server.wait_logged("client timed out (110: Connection timed out) while reading PROXY protocol");
    logged(&server, "200 0 0");
    logged(&server, "400 ");
}

fn return_sends_a_text_with_variables(driver: Driver) {
    let text = "geo $where { default far; 127.0.0.0/8 near; }
        split_clients $connection $part { * all; }
        map $protocol $known { TCP t; default d; }
        server { listen %TCP% bind; server_name first .example.com; set $own \"$known-$part\";
                 return '$where $own $server_name $remote_addr $pid$undefined'; set $undefined ''; }";
    let server = start(driver, text);
    let mut client = server.connect_tcp(1);
    let remote = client.local_address().ip();
    let text = String::from_utf8(client.read_to_end()).unwrap();
    assert_eq!(text, format!("near t-all first {remote} {}", server.worker().as_raw_nonzero()));
}

fn access_and_limits_refuse_sessions(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "limit_conn_zone $server_port zone=z:64k;
         server {{ listen %UNIX%; deny unix:; return never; %LOG% }}
         server {{ listen %TCP%; deny 192.0.2.1; allow 127.0.0.0/8; deny all; limit_conn z 1; proxy_pass {}; %LOG% }}",
        backend.address()
    );
    let server = start(driver, &text);
    server.connect().assert_closed();
    logged(&server, "403 0 0");
    server.wait_logged("access forbidden by rule, client: unix:, server: unix:");
    let first = server.connect_tcp(1);
    let behind = backend.accept();
    server.connect_tcp(1).assert_closed();
    logged(&server, "503 0 0");
    server.wait_logged("limiting connections by zone \"z\"");
    drop((first, behind));
    logged(&server, "200 0 0");
    // The place is free again.
    let _again = server.connect_tcp(1);
    backend.accept();
}

fn new_sessions_are_limited_by_their_rate(driver: Driver) {
    // One session leaks out in a minute: of a few sessions more than the burst allows, one is rejected even if the test
    // is slow.
    let text = "limit_session_zone $remote_addr zone=z:64k rate=1r/m;
        log_format line '$status $limit_session_status $protocol';
        limit_session zone=z burst=2;
        server { listen %TCP%; return x; %LOG% }
        server { listen %TCP2%; limit_session_dry_run on; return x; %LOG% }
        server { listen %TCP3% udp; return x; %LOG% }";
    let server = Setup::stream(driver, text).start();
    for _ in 0..3 {
        assert_eq!(server.connect_tcp(1).read_to_end(), b"x");
    }
    logged(&server, "200 PASSED");
    assert!((0..10).any(|_| server.connect_tcp(1).read_to_end().is_empty()));
    logged(&server, "503 REJECTED");
    server.wait_logged(" by zone \"z\", client: 127.0.0.1, server: ");
    for _ in 0..10 {
        assert_eq!(server.connect_tcp(2).read_to_end(), b"x");
    }
    logged(&server, "200 REJECTED_DRY_RUN");
    server.wait_logged("limiting sessions, dry run, excess: ");
    // Sessions over UDP count, too.
    for _ in 0..10 {
        let client = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        client.send_to(b"x", server.directory.address(3)).unwrap();
    }
    logged(&server, "503 REJECTED UDP");
}

fn tls_ends_here_and_names_choose_servers(driver: Driver) {
    let authority = Authority::new("The authority");
    let (one, other) = (authority.ecdsa(&["one.test"]), authority.ecdsa(&["other.test"]));
    let backend = Backend::tcp();
    let text = format!(
        "server {{ listen %UNIX% ssl; server_name one.test; ssl_certificate one.pem; ssl_certificate_key one.key;
                   return '$server_name $ssl_protocol $ssl_server_name $ssl_alpn_protocol'; ssl_alpn mqtt; %LOG% }}
         server {{ listen %UNIX% ssl; server_name ~^(?<who>other).test$; ssl_certificate other.pem;
                   ssl_certificate_key other.key; proxy_pass {}; proxy_half_close on; %LOG% }}",
        backend.address()
    );
    let text = text.replace(" one.pem", " %DIR%/one.pem").replace(" one.key", " %DIR%/one.key");
    let text = text.replace(" other.pem", " %DIR%/other.pem").replace(" other.key", " %DIR%/other.key");
    let setup = Setup::stream(driver, &format!("{FORMAT}\n{text}"));
    let setup = setup.file("one.pem", &one.certificate).file("one.key", &one.key);
    let server = setup.file("other.pem", &other.certificate).file("other.key", &other.key).start();
    let path = server.directory.path().join("gale.sock");
    let mut session = Tls::new(&authority).alpn(&["mqtt"]).client(&path, "one.test");
    assert_eq!(String::from_utf8_lossy(&session.read_to_end()), "one.test TLSv1.3 one.test mqtt");

    let mut session = Tls::tls12(&authority).client(&path, "other.test");
    let mut behind = backend.accept();
    let bytes: Vec<u8> = (0..300_000).map(|index| (index % 253) as u8).collect();
    session.send(&bytes);
    assert!(behind.take(bytes.len()) == bytes, "decrypted");
    behind.send(&bytes);
    drop(behind);
    assert!(session.read_to_end() == bytes, "encrypted");
    drop(session);
    logged(&server, "200 300000 300000");
}

fn certificates_are_found_by_the_name_that_a_client_asks_for(driver: Driver) {
    let authority = Authority::new("The authority");
    let (one, other) = (authority.ecdsa(&["one.test"]), authority.ecdsa(&["other.test"]));
    let text = "server { listen %UNIX% ssl; ssl_certificate %DIR%/$ssl_server_name.pem;
        ssl_certificate_key %DIR%/$ssl_server_name.key; return $ssl_server_name; %LOG% }";
    let setup = Setup::stream(driver, &format!("{FORMAT}\n{text}"));
    let setup = setup.file("one.test.pem", &one.certificate).file("one.test.key", &one.key);
    let server = setup.file("other.test.pem", &other.certificate).file("other.test.key", &other.key).start();
    let path = server.directory.path().join("gale.sock");
    for name in ["one.test", "other.test"] {
        assert_eq!(Tls::new(&authority).client(&path, name).read_to_end(), name.as_bytes());
    }
    // Without a certificate the client gets an alert.
    assert!(Tls::new(&authority).connect(&path, "none.test").is_err_and(|error| error.to_string().contains("alert")));
    server.wait_logged("cannot load certificate \"");
    logged(&server, "500 0 0");
}

fn names_in_a_client_s_certificate_are_in_a_variable(driver: Driver) {
    let authority = Authority::new("tests");
    let (pair, own) = (authority.ecdsa(&["one.test"]), authority.ecdsa(&["client.test", "192.0.2.1"]));
    let text = "server { listen %UNIX% ssl; ssl_certificate %DIR%/one.pem; ssl_certificate_key %DIR%/one.key;
                ssl_client_certificate %DIR%/ca.pem; ssl_verify_client on; return $ssl_client_san; }";
    let setup = Setup::stream(driver, text).file("ca.pem", &authority.pem);
    let server = setup.file("one.pem", &pair.certificate).file("one.key", &pair.key).start();
    let tls = Tls::with(&authority, &[&rustls::version::TLS13], Some(&own));
    let path = server.directory.path().join("gale.sock");
    assert_eq!(tls.client(&path, "one.test").read_to_end(), b"DNS:client.test,IP:192.0.2.1");
    server.stop();
}

fn a_client_that_speaks_nothing_newer_than_tls_1_1_is_told_so(driver: Driver) {
    let pair = Authority::new("tests").ecdsa(&["one.test"]);
    let text = "server { listen %UNIX% ssl; ssl_certificate %DIR%/one.pem; ssl_certificate_key %DIR%/one.key;
                return x; %LOG% }";
    let setup = Setup::stream(driver, &format!("{FORMAT}\n{text}"));
    let server = setup.file("one.pem", &pair.certificate).file("one.key", &pair.key).start();
    let mut client = server.connect();
    client.send(old_hello(0x0302));
    assert_eq!(client.read_to_end(), [21, 3, 2, 0, 2, 2, 70]);
    logged(&server, "500 0 0");
    server.wait_logged("SSL routines::unsupported protocol) while SSL handshaking");
    server.stop();
}

fn garbage_before_tls_ends_the_session(driver: Driver) {
    let authority = Authority::new("The authority");
    let pair = authority.ecdsa(&["one.test"]);
    let text = "ssl_certificate %DIR%/one.pem; ssl_certificate_key %DIR%/one.key;
        server { listen %UNIX% ssl; ssl_handshake_timeout 1h; return x; %LOG% }
        server { listen %TCP% ssl; ssl_handshake_timeout 50ms; return x; %LOG% }";
    let setup = Setup::stream(driver, &format!("{FORMAT}\n{text}"));
    let server = setup.file("one.pem", &pair.certificate).file("one.key", &pair.key).start();
    let mut client = server.connect();
    client.send("GET / HTTP/1.0\r\n\r\n");
    let _alert = client.read_to_end();
    server.wait_logged("while SSL handshaking, client: unix:");
    server.connect_tcp(1).assert_closed();
    server.wait_logged("client timed out (110: Connection timed out) while SSL handshaking");
    logged(&server, "500 0 0");
}

fn servers_are_spoken_to_over_tls(driver: Driver) {
    let authority = Authority::new("The authority");
    let pair = authority.ecdsa(&["behind.test"]);
    let backend = Backend::tcp();
    let address = backend.address();
    let text = format!(
        "proxy_ssl on; proxy_ssl_verify on; proxy_ssl_trusted_certificate %DIR%/authority.pem;
         server {{ listen %UNIX%; proxy_pass {address}; proxy_ssl_name behind.test; proxy_ssl_server_name on;
                   proxy_half_close on; %LOG% }}
         server {{ listen %TCP%; proxy_pass {address}; proxy_ssl_name wrong.test; %LOG% }}"
    );
    let setup = Setup::stream(driver, &format!("{FORMAT}\n{text}")).file("authority.pem", &authority.pem);
    let server = setup.start();
    let config = server_config(&pair);
    let serve = |stream: TcpStream| {
        let mut stream = StreamOwned::new(ServerConnection::new(Arc::clone(&config)).unwrap(), stream);
        let mut question = [0; 8];
        let result = stream.read_exact(&mut question).map(|()| question);
        if result.is_ok() {
            assert_eq!(stream.conn.server_name(), Some("behind.test"));
            stream.write_all(b"answer").unwrap();
            stream.conn.send_close_notify();
            stream.flush().unwrap();
        }
        result
    };
    let mut client = server.connect();
    client.send("question");
    assert_eq!(&serve(backend.accept_tcp()).unwrap(), b"question");
    client.finish_sending();
    assert_eq!(client.read_to_end(), b"answer");
    logged(&server, "200 8 6");

    let mut client = server.connect_tcp(1);
    serve(backend.accept_tcp()).unwrap_err();
    client.assert_closed();
    server.wait_logged("upstream SSL certificate does not match \"wrong.test\" while SSL handshaking to upstream");
    logged(&server, "502 0 0");
}

fn servers_are_offered_protocols_above_tls(driver: Driver) {
    let authority = Authority::new("The authority");
    let pair = authority.ecdsa(&["one.test"]);
    let long = "x".repeat(256);
    let text = format!(
        "ssl_certificate %DIR%/one.pem; ssl_certificate_key %DIR%/one.key; proxy_ssl on;
         map $protocol $long {{ default {long}; }}
         server {{ listen %TCP%; proxy_pass %TCP3%; proxy_ssl_alpn two one; }}
         server {{ listen %TCP2%; proxy_pass %TCP3%; }}
         server {{ listen %UNIX% ssl; ssl_alpn one two; proxy_pass %TCP3%;
         proxy_ssl_alpn $long $ssl_alpn_protocol two; }}
         server {{ listen %TCP3% ssl; ssl_alpn one two; return '[$ssl_alpn_protocol]'; }}"
    );
    let setup = Setup::stream(driver, &text);
    let server = setup.file("one.pem", &pair.certificate).file("one.key", &pair.key).start();
    let path = server.directory.path().join("gale.sock");
    assert_eq!(server.connect_tcp(1).read_to_end(), b"[one]");
    assert_eq!(server.connect_tcp(2).read_to_end(), b"[]");
    // From variables; a name that is too long for a handshake is left out.
    assert_eq!(Tls::new(&authority).alpn(&["one"]).client(&path, "one.test").read_to_end(), b"[one]");
    assert_eq!(Tls::new(&authority).client(&path, "one.test").read_to_end(), b"[two]");
    let text = format!("server {{ listen 127.0.0.1:1; proxy_pass 127.0.0.1:1; proxy_ssl_alpn {long}; }}");
    let mut refused = Setup::stream(driver, &text).launch();
    assert!(!refused.wait_exited().success());
    assert!(refused.stderr().contains("\"proxy_ssl_alpn\" directive protocol too long"), "{}", refused.stderr());
}

fn servers_are_shown_certificates_whose_names_have_variables(driver: Driver) {
    let authority = Authority::new("The authority");
    let (one, two) = (authority.ecdsa(&["one.test"]), authority.ecdsa(&["two.test"]));
    let text = "ssl_certificate %DIR%/one.pem; ssl_certificate_key %DIR%/one.key;
        map $server_addr:$server_port $own { %TCP% one; %TCP2% two; default none; }
        server { listen %TCP%; listen %TCP2%; listen %UNIX%; proxy_ssl on; proxy_pass %TCP3%;
                 proxy_ssl_certificate %DIR%/$own.pem; proxy_ssl_certificate_key %DIR%/$own.key; %LOG% }
        server { listen %TCP3% ssl; ssl_verify_client on; ssl_client_certificate %DIR%/authority.pem;
                 return $ssl_client_fingerprint; }";
    let text = format!("{FORMAT}\n{text}");
    let setup = Setup::stream(driver, &text).file("authority.pem", &authority.pem);
    let setup = setup.file("one.pem", &one.certificate).file("one.key", &one.key);
    let server = setup.file("two.pem", &two.certificate).file("two.key", &two.key).start();
    let [first, second] = [1, 2].map(|number| server.connect_tcp(number).read_to_end());
    assert_eq!((first.len(), second.len()), (40, 40));
    assert_ne!(first, second);
    server.connect().assert_closed();
    server.wait_logged("cannot load certificate \"");
    logged(&server, "500 0 0");
}

fn server_config(pair: &authority::Pair) -> Arc<ServerConfig> {
    let chain = CertificateDer::pem_slice_iter(pair.certificate.as_bytes()).collect::<Result<_, _>>().expect("PEM");
    let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).expect("PEM");
    let builder = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().expect("versions").with_no_client_auth();
    Arc::new(builder.with_single_cert(chain, key).expect("a pair"))
}

fn names_in_first_messages_choose_servers_without_ending_tls(driver: Driver) {
    let authority = Authority::new("The authority");
    let pair = authority.ecdsa(&["one.test"]);
    let (one, other) = (Backend::tcp(), Backend::tcp());
    let text = format!(
        "ssl_preread on;
         map $ssl_preread_server_name $target {{ one.test {}; default {}; }}
         server {{ listen %UNIX%; proxy_pass $target; proxy_half_close on;
                   access_log %DIR%/access.log told; }}
         log_format told '$ssl_preread_protocol $ssl_preread_server_name $ssl_preread_alpn_protocols';",
        one.address(),
        other.address()
    );
    // A format is defined before its logs.
    let (before, format) = text.rsplit_once("         log_format").unwrap();
    let server = start(driver, &format!("log_format{format}\n{before}"));
    let path = server.directory.path().join("gale.sock");
    let config = server_config(&pair);
    let serving = std::thread::spawn(move || {
        let mut stream = StreamOwned::new(ServerConnection::new(config).unwrap(), one.accept_tcp());
        let mut question = [0; 8];
        stream.read_exact(&mut question).unwrap();
        stream.write_all(b"answer").unwrap();
        stream.conn.send_close_notify();
        stream.flush().unwrap();
        question
    });
    let mut session = Tls::new(&authority).alpn(&["h2", "http/1.1"]).client(&path, "one.test");
    session.send("question");
    assert_eq!(session.read_to_end(), b"answer");
    drop(session);
    assert_eq!(&serving.join().unwrap(), b"question");
    assert_eq!(logged(&server, "TLSv1"), "TLSv1.3 one.test h2,http/1.1");

    // In the smallest pieces and records, as a hostile network may deliver it.
    let mut hello = Vec::new();
    Tls::new(&authority).session("elsewhere.test").write_tls(&mut hello).unwrap();
    let message = &hello[5..];
    let records: Vec<u8> =
        message.chunks(100).flat_map(|piece| [&[22, 3, 1, 0, piece.len() as u8][..], piece].concat()).collect();
    let mut client = server.connect();
    for piece in records.chunks(37) {
        client.send(piece);
    }
    let mut behind = other.accept();
    assert!(behind.take(records.len()) == records, "what was read ahead comes first, and whole");
    // Bytes that are not TLS are passed on at once.
    let mut client = server.connect();
    client.send("SSH-2.0-x\r\n");
    assert_eq!(other.accept().take(11), b"SSH-2.0-x\r\n");
}

fn a_client_that_says_nothing_is_not_waited_for(driver: Driver) {
    let text = "ssl_preread on; preread_buffer_size 64;
        server { listen %UNIX%; preread_timeout 50ms; return x; %LOG% }
        server { listen %TCP%; preread_timeout 1h; return x; %LOG% }";
    let server = start(driver, text);
    server.connect().assert_closed();
    logged(&server, "200 0 0");
    let mut client = server.connect_tcp(1);
    let mut hello = vec![22, 3, 1, 1, 0, 1, 0, 0, 252];
    hello.extend([0; 100]);
    client.send(&hello);
    client.assert_closed();
    server.wait_logged("preread buffer full while prereading client data");
    logged(&server, "400 64 0");
}

fn connections_are_passed_to_listeners_with_the_bytes_read(driver: Driver) {
    let authority = Authority::new("The authority");
    let pair = authority.ecdsa(&["one.test"]);
    let blocks = "http { access_log off; client_body_temp_path %DIR%/body;
            server { listen %TCP%; location / { return 200 '$scheme $remote_addr'; } } }
        stream { ssl_certificate %DIR%/one.pem; ssl_certificate_key %DIR%/one.key;
            server { listen %TCP2%; ssl_preread on; pass $to; set $to %TCP%; }
            server { listen %UNIX% ssl; pass %TCP%; }
            server { listen %TCP3%; pass %TCP3%; } }";
    let setup = Setup::configuration(&support::configuration(driver, blocks));
    let server = setup.file("one.pem", &pair.certificate).file("one.key", &pair.key).start();
    // The preread has consumed the first bytes, which are a request.
    let mut client = server.connect_tcp(2);
    let response = client.get("/");
    let remote = client.local_address().ip();
    assert_eq!((response.status, response.text()), (200, &*format!("http {remote}")));
    // Later requests go to the other listener, too.
    assert_eq!(client.get("/again").status, 200);
    // A connection whose TLS was terminated is passed on with its session.
    let mut client = Tls::new(&authority).client(&server.directory.path().join("gale.sock"), "one.test");
    assert_eq!(client.get("/").text(), "https unix:");
    // A cycle ends.
    server.connect_tcp(3).assert_closed();
    server.wait_logged("stream pass cycle while passing connection to port");
}

fn passed_connections_keep_their_variables_and_limits(driver: Driver) {
    let blocks = "http { access_log off; client_body_temp_path %DIR%/body;
            server { listen %TCP%; location / { return 200 '$proxy_protocol_addr $server_addr:$server_port'; } } }
        stream { limit_conn_zone $server_port zone=z:64k;
            server { listen %TCP2% proxy_protocol; limit_conn z 1; pass %TCP%; } }";
    let server = Setup::configuration(&support::configuration(driver, blocks)).start();
    let header = "PROXY TCP4 192.0.2.7 192.0.2.8 1 2\r\n";
    let mut client = server.connect_tcp(2);
    let response = client.ask(format!("{header}GET / HTTP/1.1\r\nHost: a\r\n\r\n"));
    assert_eq!(response.text(), format!("192.0.2.7 {}", server.directory.address(1)));
    // The connection holds its place in the zone until it is closed, whichever listener serves it.
    let mut other = server.connect_tcp(2);
    other.send(header);
    other.assert_closed();
    server.wait_logged("limiting connections by zone \"z\"");
    assert_eq!(client.get("/").status, 200);
}

fn a_session_with_a_rate_ends_when_its_receiver_stalls(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "server {{ listen %UNIX%; proxy_pass {}; proxy_timeout 200ms; proxy_download_rate 1000m; }}",
        backend.address()
    );
    let server = start(driver, &text);
    let _client = server.connect();
    let mut behind = backend.accept_tcp();
    // Writes as much as the server reads, until the server closes the connection.
    let sender = std::thread::spawn(move || while behind.write_all(&[0; 65536]).is_ok() {});
    server.wait_logged("connection timed out (110: Connection timed out) while proxying connection");
    sender.join().unwrap();
}

fn a_silent_session_ends(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!("server {{ listen %UNIX%; proxy_pass {}; proxy_timeout 50ms; %LOG% }}", backend.address());
    let server = start(driver, &text);
    let mut client = server.connect();
    let mut behind = backend.accept();
    client.assert_closed();
    behind.assert_closed();
    server.wait_logged("connection timed out (110: Connection timed out) while proxying connection");
    logged(&server, "200 0 0");
}

fn a_session_goes_on_while_something_passes(driver: Driver) {
    const TIMEOUT: Duration = Duration::from_millis(200);
    let backend = Backend::tcp();
    let text = format!("server {{ listen %UNIX%; proxy_pass {}; proxy_timeout 200ms; %LOG% }}", backend.address());
    let server = start(driver, &text);
    // On a busy machine a message may come too late.
    until_in_time("every message of a session", || {
        let (mut client, mut behind) = (server.connect(), backend.accept());
        let (began, mut last) = (Instant::now(), Instant::now());
        while began.elapsed() < 2 * TIMEOUT {
            let now = Instant::now();
            if client.try_send("x").is_err() || behind.read_some_or_end().is_empty() {
                assert!(last.elapsed() >= TIMEOUT, "it has ended {:?} after a message", last.elapsed());
                return None;
            }
            last = now;
        }
        Some(())
    });
}

fn an_idle_session_takes_little_memory(driver: Driver) {
    const COUNT: usize = 400;
    const BYTES_MAX: u64 = 1792;
    let _turn = turn_of_crowds();
    let backend = Backend::tcp();
    let setup = Setup::stream(driver, &format!("server {{ listen %UNIX%; proxy_pass {}; }}", backend.address()));
    let setup = setup.replace("worker_processes 2", "worker_processes 1");
    let server = setup.replace("worker_connections 128", "worker_connections 2000").start();
    let open_some = |count: usize| -> Vec<_> {
        let open = |_| {
            let (mut client, mut behind) = (server.connect(), backend.accept());
            client.send("ping");
            assert_eq!(behind.take(4), b"ping");
            behind.send("pong");
            assert_eq!(client.take(4), b"pong");
            (client, behind)
        };
        (0..count).map(open).collect()
    };
    // The first sessions pay for structures that are allocated once, and for tables that grow in steps.
    let before = open_some(COUNT / 2);
    let begin = support::anonymous_memory(server.worker());
    let sessions = open_some(COUNT);
    let each = support::anonymous_memory(server.worker()).saturating_sub(begin) / COUNT as u64;
    assert!(each <= BYTES_MAX, "{each} bytes for a session");
    drop((before, sessions));
    server.stop();
}

fn a_reset_reaches_the_other_end(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!("server {{ listen %UNIX%; proxy_pass {}; %LOG% }}", backend.address());
    let server = start(driver, &text);
    let mut client = server.connect();
    let mut behind = backend.accept_tcp();
    client.send("x");
    behind.read_exact(&mut [0]).unwrap();
    rustix::net::sockopt::set_socket_linger(&behind, Some(std::time::Duration::ZERO)).unwrap();
    drop(behind);
    client.assert_closed();
    logged(&server, "200 1 0");
}

fn a_client_that_goes_on_sending_gets_all_of_the_answer(driver: Driver) {
    // More than can be in transit, sent slowly: some bytes are unread when the upstream server has ended.
    const BYTES: usize = 64 << 20;
    let backend = Backend::tcp();
    let text = format!("server {{ listen %TCP%; proxy_pass {}; proxy_upload_rate 1; }}", backend.address());
    let server = start(driver, &text);
    let mut client = TcpStream::connect(server.directory.address(1)).unwrap();
    let mut behind = backend.accept_tcp();
    let mut sender = client.try_clone().unwrap();
    let sending = std::thread::spawn(move || {
        sender.write_all(&vec![b'x'; BYTES])?;
        sender.shutdown(std::net::Shutdown::Write)
    });
    behind.read_exact(&mut [0]).unwrap();
    // The upstream server responds without reading on, like one that rejects an upload.
    behind.write_all(b"answer").unwrap();
    behind.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).expect("no reset");
    assert_eq!(answer, b"answer");
    sending.join().unwrap().expect("no reset");
    server.wait_logged("upstream disconnected, bytes from/to client:");
}

fn sessions_are_logged_at_their_start_where_that_is_wanted(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "{FORMAT}
         log_format start 'start $remote_addr $status $bytes_received $ssl_preread_server_name.';
         access_log %DIR%/start.log start at=start;
         server {{ listen %UNIX%; ssl_preread on; proxy_pass {0}; access_log %DIR%/both.log start at=start;
                   access_log %DIR%/both.log line at=end; }}
         server {{ listen %TCP%; deny all; return x; }}
         server {{ listen %TCP2%; return x; }}
         server {{ listen %TCP3% udp; return x; access_log %DIR%/udp.log start at=start if=$remote_addr; }}",
        backend.address()
    );
    let server = Setup::stream(driver, &text).start();
    let authority = Authority::new("The authority");
    let mut hello = Vec::new();
    Tls::new(&authority).session("one.test").write_tls(&mut hello).unwrap();
    let mut client = server.connect();
    client.send(&hello);
    // While the session lasts only its first line is there, which includes the preread bytes.
    let mut behind = backend.accept();
    behind.take(hello.len());
    let line = server.directory.wait_line("both.log", "start ");
    assert_eq!(line, format!("start unix: 000 {} one.test.", hello.len()));
    assert_eq!(server.directory.read("both.log").lines().count(), 1);
    drop(client);
    behind.assert_closed();
    server.directory.wait_line("both.log", &format!("200 {} 0 ", hello.len()));
    // A rejected session has no start line.
    server.connect_tcp(1).assert_closed();
    server.wait_logged("access forbidden by rule");
    assert_eq!(server.connect_tcp(2).read_to_end(), b"x");
    server.directory.wait_line("start.log", "start 127.0.0.1 000 0 -.");
    assert_eq!(server.directory.read("start.log").lines().count(), 1);
    let client = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    client.send_to(b"x", server.directory.address(3)).unwrap();
    server.directory.wait_line("udp.log", "start 127.0.0.1 000 1 -.");
}

fn sessions_survive_a_reload_and_those_of_removed_servers_drain(driver: Driver) {
    let backend = Backend::tcp();
    let address = backend.address();
    let text = |addresses: &str| {
        let text = format!("{FORMAT}\nserver {{ {addresses} proxy_pass {address}; %LOG% }}");
        format!("worker_shutdown_timeout 50ms;\n{}", stream_configuration(driver, &text))
    };
    let mut server = Setup::configuration(&text("listen %TCP%; listen %TCP2%;")).start();
    let (mut stays, mut goes) = (server.connect_tcp(1), server.connect_tcp(2));
    let (mut behind_stays, mut behind_goes) = (backend.accept(), backend.accept());
    // Upstream connections are told apart by their first bytes.
    stays.send("stays");
    goes.send("goes!");
    if behind_stays.take(5) == b"goes!" {
        std::mem::swap(&mut behind_stays, &mut behind_goes);
        assert_eq!(behind_stays.take(5), b"stays");
    } else {
        assert_eq!(behind_goes.take(5), b"goes!");
    }
    server.reload(&text("listen %TCP%;"));
    goes.assert_closed();
    behind_goes.assert_closed();
    stays.send("on");
    assert_eq!(behind_stays.take(2), b"on");
    server.reload(&text("listen %TCP%;"));
    behind_stays.send("and on");
    assert_eq!(stays.take(6), b"and on");
    drop(stays);
    behind_stays.assert_closed();
    logged(&server, "200 7 6");
}

fn reuseport_serves_http_and_stream(driver: Driver) {
    let text = include_str!("../configs/reuseport.conf").replace("8003", "%TCP%").replace("8004", "%TCP2%");
    let text =
        text.replace("127.0.0.1:%TCP%", "%TCP%").replace("events {", &format!("events {{ use {};", driver.name()));
    let text = format!("daemon off; pid %DIR%/pid; error_log %DIR%/error.log info;\n{text}");
    let text = text.replace("access_log off;", "access_log off; client_body_temp_path %DIR%/body;");
    let server = Setup::configuration(&text).start();
    for _ in 0..20 {
        assert_eq!(server.connect_tcp(1).get("/").text(), "OK");
        assert_eq!(server.connect_tcp(2).get("/").text(), "OK");
    }
}

fn impossible_configurations_are_refused(driver: Driver) {
    let cases = [
        ("server { listen 127.0.0.1; return x; }", "no port in \"127.0.0.1\" of the \"listen\" directive"),
        ("server { return x; }", "no \"listen\" is defined for server"),
        (
            "server { listen 127.0.0.1:1 ssl; return x; }",
            "no \"ssl_certificate\" is defined for the \"listen ... ssl\"",
        ),
        (
            "server { listen 127.0.0.1:1 udp ssl; return x; }",
            "\"listen\" directive \"ssl\" parameter is incompatible with \"udp\"",
        ),
        ("server { listen 127.0.0.1:1; proxy_pass nobody; }", "no port in upstream \"nobody\""),
        ("server { listen 127.0.0.1:1; pass nobody; }", "\"pass\" directive has no addresses"),
        ("server { listen 127.0.0.1:1; access_log x; return x; }", "log format is not specified"),
        ("server { listen 127.0.0.1:1; return x; location / { } }", "\"location\" directive is not allowed here"),
        ("limit_session_zone $remote_addr rate=1r/s;", "invalid number of arguments in \"limit_session_zone\""),
        ("server { listen 127.0.0.1:1; limit_session burst=1; return x; }", "must have \"zone\" parameter"),
        (
            "limit_session_zone $remote_addr zone=z:64k rate=1r/s;
             server { listen 127.0.0.1:1; limit_session zone=z nodelay; return x; }",
            "invalid parameter \"nodelay\"",
        ),
        ("log_format f x; access_log x f at=noon;", "invalid parameter \"at=noon\""),
        ("upstream u { ip_hash; server 127.0.0.1:1; sticky route $x; }", "\"sticky\" directive is not allowed here"),
    ];
    for (text, message) in cases {
        let text = stream_configuration(driver, text);
        let mut refused = Setup::configuration(&text).launch();
        assert!(!refused.wait_exited().success(), "{text}");
        assert!(refused.stderr().contains(message), "{text}: {}", refused.stderr());
    }
}

/// Starts an example; `own` lists its addresses and their replacements.
fn example(name: &str, driver: Driver, own: &[(&str, &str)]) -> Server {
    let path = format!("{}/../../examples/{name}/nginx.conf", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).expect("a configuration");
    let text = text.replace("error_log stderr", "error_log %DIR%/error.log");
    let text = text.replace(&format!("/tmp/{name}.pid"), "%DIR%/pid").replace(&format!("/tmp/{name}"), "%DIR%/own");
    let text = text.replace("events {", &format!("events {{\n    use {};", driver.name()));
    let text = own.iter().fold(text, |text, (from, to)| text.replace(from, to));
    Setup::configuration(&text).start()
}

fn the_example_of_databases_runs(driver: Driver) {
    let (postgresql, redis) = (Backend::tcp(), Backend::tcp());
    let dns = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
    dns.set_read_timeout(Some(support::DEADLINE)).expect("an option");
    let (_bound, dead) = dead_address();
    let (dead, dns_address) = (dead.to_string(), dns.local_addr().unwrap().to_string());
    let own = [
        ("127.0.0.1:5432", "%TCP%"),
        ("127.0.0.1:6379", "%TCP2%"),
        ("127.0.0.1:5353", "%TCP3%"),
        ("127.0.0.1:5433", &dead),
        ("127.0.0.1:5434", postgresql.address()),
        ("server 127.0.0.1:6380;", ""),
        ("127.0.0.1:6381", redis.address()),
        ("127.0.0.1:5300", &dns_address),
    ];
    let server = example("databases", driver, &own);
    for (number, backend) in [(1, &postgresql), (2, &redis)] {
        let mut client = server.connect_tcp(number);
        client.send("hello");
        let mut behind = backend.accept();
        assert_eq!(behind.take(5), b"hello");
        behind.send("welcome");
        assert_eq!(client.take(7), b"welcome");
    }
    let client = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
    client.set_read_timeout(Some(support::DEADLINE)).expect("an option");
    client.send_to(b"who", server.directory.address(3)).unwrap();
    let mut bytes = [0; 100];
    let (count, from) = dns.recv_from(&mut bytes).expect("a question");
    assert_eq!(&bytes[..count], b"who");
    dns.send_to(b"me", from).unwrap();
    let count = client.recv(&mut bytes).expect("an answer");
    assert_eq!(&bytes[..count], b"me");
    server.directory.wait_line("own.log", " UDP 200 2 3 ");
}

fn the_example_of_tls_by_name_runs(driver: Driver) {
    let authority = Authority::new("The authority");
    let (shop, intranet, fallback) = (Backend::tcp(), Backend::tcp(), Backend::tcp());
    let own = [
        ("127.0.0.1:8443", "%TCP%"),
        ("127.0.0.1:8444", intranet.address()),
        ("127.0.0.1:8445", shop.address()),
        ("127.0.0.1:8447", fallback.address()),
    ];
    // A name with a leading dot needs the map's `hostnames`.
    let server = example("tls-by-name", driver, &own);
    for (name, backend) in
        [("shop.example.com", &shop), ("a.intranet.example", &intranet), ("elsewhere.example", &fallback)]
    {
        let mut hello = Vec::new();
        Tls::new(&authority).session(name).write_tls(&mut hello).unwrap();
        let mut client = server.connect_tcp(1);
        client.send(&hello);
        assert!(backend.accept().take(hello.len()) == hello, "{name}");
    }
    let mut client = server.connect_tcp(1);
    client.send("no TLS at all");
    assert_eq!(fallback.accept().take(13), b"no TLS at all");
}

/// A server program, if it is installed; killed when the test ends.
struct Daemon(std::process::Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn redis_is_served(driver: Driver) {
    let server = start(driver, "server { listen %UNIX%; proxy_pass unix:%DIR%/redis.sock; %LOG% }");
    let path = server.directory.path().join("redis.sock");
    let daemon = std::process::Command::new("redis-server")
        .args(["--port", "0", "--save", "", "--daemonize", "no", "--unixsocketperm", "777", "--unixsocket"])
        .arg(&path)
        .current_dir(server.directory.path())
        .stdout(std::process::Stdio::piped())
        .spawn();
    let Ok(mut daemon) = daemon else {
        return skip("redis-server is not installed");
    };
    let log = daemon.stdout.take().expect("a pipe");
    let _daemon = Daemon(daemon);
    let mut lines = std::io::BufReader::new(log).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.to_lowercase().contains("ready to accept connections")), "redis did not start");
    let mut client = server.connect();
    client.send("PING\r\n");
    assert_eq!(client.take(7), b"+PONG\r\n");
    let value = "x".repeat(1_000_000);
    client.send(format!("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n${}\r\n{value}\r\n", value.len()));
    assert_eq!(client.take(5), b"+OK\r\n");
    client.send("GET k\r\nQUIT\r\n");
    let answer = format!("${}\r\n{value}\r\n+OK\r\n", value.len());
    assert!(client.take(answer.len()) == answer.as_bytes());
    client.assert_closed();
    logged(&server, "200 ");
}
