//! `listen … ssl`: handshakes, the choice of a server, and requests over TLS.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rcgen::{CertificateParams, IsCa, SanType, date_time_ymd};
use rustix::process::Signal;
use rustls::client::danger::ServerCertVerifier;
use rustls::compress::{CertDecompressor, DecompressionFailed};
use rustls::version::{TLS12, TLS13};
use rustls::{CertificateCompressionAlgorithm, HandshakeKind, ProtocolVersion, StreamOwned};

use crate::support::authority;
use crate::support::authority::{Authority, Pair, is_for};
use crate::support::tls::{AnyCertificate, Session, Tls, old_hello};
use crate::support::{self, Backend, Client, Driver, Server, Setup, with_each_driver};

with_each_driver!(
    both_versions_answer_and_name_themselves,
    the_name_of_the_handshake_chooses_the_server,
    a_client_gets_the_certificate_that_it_can_check,
    a_client_comes_back_to_its_session_also_after_a_reload,
    a_client_comes_back_to_its_session_after_a_death_and_an_upgrade,
    a_reload_brings_another_certificate,
    plain_http_is_answered_with_400_and_garbage_with_an_alert,
    a_handshake_may_come_byte_by_byte_and_after_a_proxy_header,
    servers_are_told_of_the_clients_session_by_the_proxy_protocol,
    large_answers_and_large_requests_are_whole,
    records_are_small_first_and_then_as_large_as_the_configuration_says,
    pipelined_requests_and_closed_connections_end_in_order,
    a_handshake_that_is_refused_says_so,
    a_client_that_speaks_nothing_newer_than_tls_1_1_is_told_so,
    certificates_of_clients_are_judged,
    authorities_of_clients_are_judged_too,
    an_authority_that_was_renewed_with_the_same_key_is_trusted_beside_its_old_certificate,
    a_slow_client_gets_all_of_a_file,
    unacceptable_certificates_are_warned_of_with_their_line,
    names_in_a_client_s_certificate_are_in_a_variable,
    keys_may_have_passwords,
    certificates_may_have_names_with_variables,
    certificates_are_kept_as_long_as_the_cache_says,
    commands_for_openssl_count_after_directives,
    settings_that_cannot_be_are_errors,
    offers_of_a_client_are_in_variables,
    clients_get_the_ocsp_response,
    clients_are_asked_about_at_a_responder,
    long_keys_sign_beside_the_event_loop,
    certificates_are_sent_compressed_to_clients_that_can_have_it,
    early_data_is_answered_at_once_unless_the_method_is_unsafe,
);

/// A certificate for example.com and its authority.
struct World {
    authority: Authority,
    pair: Pair,
}

impl World {
    fn new() -> World {
        let authority = Authority::new("authority");
        let pair = authority.ecdsa(&["example.com", "*.example.com"]);
        World { authority, pair }
    }

    /// A server with `text` in the http block, and the files of the certificate.
    fn http(&self, driver: Driver, text: &str) -> Setup {
        Setup::http(driver, text).file("own.crt", &self.pair.certificate).file("own.key", &self.pair.key)
    }

    fn server(&self, driver: Driver, text: &str) -> Server {
        self.http(driver, &format!("server {{ listen %UNIX% ssl; {OWN} {text} }}")).start()
    }

    fn tls(&self) -> Tls {
        Tls::new(&self.authority)
    }
}

const OWN: &str = "ssl_certificate %DIR%/own.crt; ssl_certificate_key %DIR%/own.key;";

const LONG_KEY: &str = include_str!("../../crates/tls/tests/keys/rsa3072.key");

/// The same key without a password, and with the password `secret`.
const PLAIN_KEY: &str = include_str!("../../crates/tls/tests/keys/plain.key");
const OLD_KEY: &str = include_str!("../../crates/tls/tests/keys/old-aes128.key");
const PKCS8_KEY: &str = include_str!("../../crates/tls/tests/keys/pbes2-sha256.key");

fn socket(server: &Server) -> PathBuf {
    server.directory.path().join("gale.sock")
}

fn both_versions_answer_and_name_themselves(driver: Driver) {
    let world = World::new();
    let server = world.server(
        driver,
        "ssl_protocols SSLv3; ssl_protocols TLSv1.2; ssl_protocols TLSv1.3;
         location / { return 200 \"$scheme $https $ssl_protocol $ssl_cipher $ssl_server_name $ssl_session_reused \
         $ssl_alpn_protocol\"; } location /moved { return 301 /there; }",
    );
    let expect = |tls: Tls, version: &str, alpn: &str| {
        let mut client = tls.client(&socket(&server), "example.com");
        let answer = client.get("/");
        assert_eq!(answer.status, 200);
        let cipher = match version {
            "TLSv1.3" => "TLS_AES_256_GCM_SHA384",
            _ => "ECDHE-ECDSA-AES256-GCM-SHA384",
        };
        assert_eq!(answer.text(), format!("https on {version} {cipher} example.com . {alpn}"));
        assert_eq!(client.get("/moved").header("Location"), Some("https://localhost/there"));
    };
    expect(world.tls(), "TLSv1.3", "");
    expect(Tls::tls12(&world.authority), "TLSv1.2", "");
    expect(world.tls().alpn(&["h2", "http/1.1"]), "TLSv1.3", "http/1.1");
    let error = world.tls().alpn(&["h2"]).connect(&socket(&server), "example.com").err().unwrap();
    assert!(error.to_string().contains("NoApplicationProtocol"), "{error}");
    server.wait_logged("no application protocol");
    server.stop();
}

fn the_name_of_the_handshake_chooses_the_server(driver: Driver) {
    let world = World::new();
    let (other, wild, by_regex) = (
        world.authority.ecdsa(&["other.net"]),
        world.authority.ecdsa(&["a.wild.net"]),
        world.authority.ecdsa(&["r7.net"]),
    );
    let server = |pair: &str, name: &str| {
        format!(
            "server {{ listen %UNIX% ssl; server_name {name}; ssl_certificate %DIR%/{pair}.crt;
             ssl_certificate_key %DIR%/{pair}.key; return 200 \"{pair} $host\"; }}\n"
        )
    };
    let text = [
        server("own", "example.com"),
        server("other", "other.net"),
        server("wild", "*.wild.net"),
        server("regex", r#""~^r\d\.net$""#),
        "server { listen %UNIX% ssl; server_name without.net; return 200 without; }".to_owned(),
    ]
    .concat();
    let mut setup = world.http(driver, &text);
    for (name, pair) in [("other", &other), ("wild", &wild), ("regex", &by_regex)] {
        setup = setup.file(&format!("{name}.crt"), &pair.certificate).file(&format!("{name}.key"), &pair.key);
    }
    let server = setup.start();
    let names = [
        ("example.com", &world.pair, "own"),
        ("other.net", &other, "other"),
        ("a.wild.net", &wild, "wild"),
        ("r7.net", &by_regex, "regex"),
        // A name that no server has.
        ("x.example.com", &world.pair, "own"),
    ];
    for tls in [world.tls(), Tls::tls12(&world.authority)] {
        for (name, pair, answer) in names {
            let session = tls.connect(&socket(&server), name).unwrap();
            let certificates = session.stream.conn.peer_certificates().unwrap();
            assert!(is_for(&certificates[0], pair), "{name}");
            let mut client = Client::above(session);
            let text = client.ask(format!("GET / HTTP/1.1\r\nHost: {name}\r\n\r\n"));
            assert_eq!(text.text(), format!("{answer} {name}"));
            // Requests for another host are answered on the same connection.
            let text = client.ask("GET / HTTP/1.1\r\nHost: other.net\r\nConnection: close\r\n\r\n");
            assert_eq!(text.text(), "other other.net");
            // As in nginx, a request without a host goes to the default server, and a request that ends within its head
            // to the server of the handshake.
            let mut client = tls.client(&socket(&server), name);
            client.send("GET / HTTP/1.0\r\n\r\n");
            assert_eq!(client.response().text(), "own example.com", "{name}");
        }
    }
    server.stop();
}

fn a_client_gets_the_certificate_that_it_can_check(driver: Driver) {
    let world = World::new();
    let rsa = world.authority.rsa(&["example.com"]);
    let text = format!(
        "server {{ listen %UNIX% ssl; ssl_certificate %DIR%/rsa.crt; ssl_certificate_key %DIR%/rsa.key; {OWN}
         return 200 $ssl_cipher; }}"
    );
    let server = world.http(driver, &text).file("rsa.crt", &rsa.certificate).file("rsa.key", &rsa.key).start();
    let mut client = Tls::tls12(&world.authority).client(&socket(&server), "example.com");
    assert_eq!(client.get("/").text(), "ECDHE-ECDSA-AES256-GCM-SHA384");
    let of_rsa = Tls::rsa_only(&world.authority);
    assert_eq!(of_rsa.client(&socket(&server), "example.com").get("/").text(), "ECDHE-RSA-AES256-GCM-SHA384");
    server.stop();
}

fn a_client_comes_back_to_its_session_also_after_a_reload(driver: Driver) {
    let world = World::new();
    let text = |more: &str| format!("server {{ listen %UNIX% ssl; {OWN} {more} return 200 $ssl_session_reused; }}");
    let kinds = [
        "",
        "ssl_session_tickets off; ssl_session_cache shared:s:1m;",
        // The last directive applies.
        "ssl_session_tickets off; ssl_session_cache builtin:1; ssl_session_cache shared:t:1m;",
    ];
    for more in kinds {
        let mut server = world.http(driver, &text(more)).start();
        for tls in [world.tls(), Tls::tls12(&world.authority)] {
            assert_eq!(tls.client(&socket(&server), "example.com").get("/").text(), ".");
            assert_eq!(tls.client(&socket(&server), "example.com").get("/").text(), "r", "{more}");
            server.reload_http(driver, &text(more));
            assert_eq!(tls.client(&socket(&server), "example.com").get("/").text(), "r", "{more}");
            // A change of client certificate verification ends all sessions.
            server.reload_http(driver, &text(&format!("{more} ssl_verify_client optional_no_ca;")));
            assert_eq!(tls.client(&socket(&server), "example.com").get("/").text(), ".", "{more}");
            server.reload_http(driver, &text(more));
        }
        server.stop();
    }
    let server = world.server(driver, "ssl_session_tickets off; return 200 $ssl_session_reused;");
    for tls in [world.tls(), Tls::tls12(&world.authority)] {
        for _ in 0..2 {
            let mut session = tls.connect(&socket(&server), "example.com").unwrap();
            assert_eq!(session.stream.conn.handshake_kind(), Some(HandshakeKind::Full));
            session.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
            session.read_to_end(&mut Vec::new()).unwrap();
        }
    }
    server.stop();
}

fn a_client_comes_back_to_its_session_after_a_death_and_an_upgrade(driver: Driver) {
    let world = World::new();
    let text = format!(
        "server {{ listen %UNIX% ssl; {OWN} return 200 $ssl_session_reused; }}
         server {{ listen %TCP% ssl; {OWN} ssl_session_timeout 1d; return 200 $ssl_session_reused; }}"
    );
    let mut server = world.http(driver, &text).start();
    let clients = [world.tls(), Tls::tls12(&world.authority)];
    let ask = |server: &Server| {
        let own = socket(server);
        clients.each_ref().map(|tls| tls.client(&own, "example.com").get("/").text().to_owned())
    };
    assert_eq!(ask(&server), [".", "."]);
    for _ in 0..2 {
        let worker = server.worker();
        rustix::process::kill_process(worker, Signal::KILL).expect("it runs");
        assert!(support::wait_ended(worker));
        // The master holds the socket, so connections wait in its queue for the next process.
        assert_eq!(ask(&server), ["r", "r"], "{server}");
    }
    // This reload needs another process.
    server.reload(&support::http_configuration(driver, &text).replace("events {", "worker_priority 1; events {"));
    assert_eq!(ask(&server), ["r", "r"], "{server}");
    let old = server.pid();
    rustix::process::kill_process(old, Signal::USR2).expect("it runs");
    server.wait_notified("READY=1");
    let new = server.pid_in_file();
    assert_ne!(new, old);
    rustix::process::kill_process(old, Signal::QUIT).expect("it runs");
    assert!(server.wait_exited().success(), "{server}");
    assert_eq!(ask(&server), ["r", "r"], "{server}");
    assert!(!server.log().contains("cannot be used"), "{server}");
    // The file with the secrets is closed, and no process started later has inherited it.
    for process in support::in_directory(server.directory.path()) {
        let descriptors = std::fs::read_dir(format!("/proc/{process}/fd")).expect("it runs").flatten();
        let mut names = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        assert!(names.all(|name| !name.to_string_lossy().contains("gale secrets")), "{process}");
    }
    rustix::process::kill_process(new, Signal::QUIT).expect("it runs");
    assert!(support::wait_ended(new));
    server.assert_nothing_left();
    let text = support::http_configuration(driver, &text);
    let alone = Setup::configuration(&text.replace("daemon off;", "daemon off; master_process off;"));
    let alone = alone.file("own.crt", &world.pair.certificate).file("own.key", &world.pair.key).start();
    assert_eq!(ask(&alone), [".", "."]);
    assert_eq!(ask(&alone), ["r", "r"]);
}

fn a_reload_brings_another_certificate(driver: Driver) {
    let world = World::new();
    let text = format!("server {{ listen %UNIX% ssl; {OWN} return 200 ok; }}");
    let mut server = world.http(driver, &text).start();
    let tls = world.tls();
    let mut before = tls.client(&socket(&server), "example.com");
    assert_eq!(before.get("/").text(), "ok");
    let new = world.authority.ecdsa(&["example.com"]);
    server.directory.write("own.crt", &new.certificate);
    // The key belongs to another certificate: the old certificate stays.
    server.reload_http(driver, &text);
    assert!(server.log().contains("key values mismatch"), "{server}");
    let session = tls.connect(&socket(&server), "example.com").unwrap();
    assert!(is_for(&session.stream.conn.peer_certificates().unwrap()[0], &world.pair));
    server.directory.write("own.key", &new.key);
    server.reload_http(driver, &text);
    let session = world.tls().connect(&socket(&server), "example.com").unwrap();
    assert!(is_for(&session.stream.conn.peer_certificates().unwrap()[0], &new));
    assert_eq!(before.get("/").text(), "ok");
    // The address no longer uses TLS.
    server.reload_http(driver, "server { listen %UNIX%; return 200 plain; }");
    assert_eq!(server.get("/").text(), "plain");
    before.assert_closed();
    // `end`, not `stop`: the log has an error about the wrong key.
    server.end(Signal::TERM);
}

fn plain_http_is_answered_with_400_and_garbage_with_an_alert(driver: Driver) {
    let world = World::new();
    let server = world.server(driver, "return 200 ok; location /page { return 200 $request_uri; }");
    let answer = server.get("/");
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("The plain HTTP request was sent to HTTPS port"));
    server.wait_logged("client sent plain HTTP request to HTTPS port, client: unix:");
    // A record of a wrong type, an unknown version, wrong lengths, a message that cannot be the first.
    for garbage in [
        &b"\x16\x03\x01\x00\x05\x02\x00\x00\x01\x00"[..],
        b"\x16\x02\x01\x00\x05\x01\x00\x00\x01\x00",
        b"\x16\x03\x01\xff\xff\x01\x00\x00\x01\x00",
        b"\x16\x03\x01\x00\x00",
        b"\x80\x2e\x01\x00\x02\x00\x15\x00\x00\x00\x10",
        // A first message that would be too long.
        b"\x16\x03\x01\x00\x04\x01\x01\x00\x00",
    ] {
        let mut client = server.connect();
        client.send(garbage);
        let rest = client.read_to_end();
        assert!(rest.is_empty() || rest.starts_with(&[21, 3]) && rest.len() == 7, "{garbage:?}: {rest:?}");
    }
    server.wait_logged("SSL_do_handshake() failed");
    // The client closes in the middle of a record.
    let mut client = server.connect();
    client.send(b"\x16\x03\x01");
    client.finish_sending();
    client.assert_closed();
    // After the handshake: a malformed record.
    let mut session = world.tls().connect(&socket(&server), "example.com").unwrap();
    session.stream.sock.write_all(&[23, 3, 3, 0, 20]).unwrap();
    session.stream.sock.write_all(&[7; 20]).unwrap();
    let mut rest = Vec::new();
    let error = session.read_to_end(&mut rest).unwrap_err();
    assert!(error.to_string().contains("BadRecordMac"), "{error}");
    let page = world.server(driver, "error_page 497 =200 /page; location /page { return 200 \"page $request_uri\"; }");
    assert_eq!(page.get("/here").text(), "page /here");
    page.stop();
    server.stop();
}

fn servers_are_told_of_the_clients_session_by_the_proxy_protocol(driver: Driver) {
    let world = World::new();
    let told = "$proxy_protocol_addr $proxy_protocol_tlv_authority $proxy_protocol_tlv_alpn \
                $proxy_protocol_tlv_ssl_version $proxy_protocol_tlv_ssl_verify";
    let text = format!(
        "server {{ listen %TCP% ssl; {OWN} location / {{ proxy_protocol v2; proxy_pass http://%TCP2%; }} }}
         server {{ listen %TCP2% proxy_protocol; return 200 \"{told}\"; }}"
    );
    let server = world.http(driver, &text).start();
    let session = world.tls().alpn(&["http/1.1"]).session("example.com");
    let socket = std::net::TcpStream::connect(server.directory.address(1)).unwrap();
    let own = socket.local_addr().unwrap().ip();
    let mut client = Client::above(rustls::StreamOwned::new(session, socket));
    // No certificate was sent, so none is verified.
    assert_eq!(client.get("/").text(), format!("{own} example.com http/1.1 TLSv1.3 1"));
    server.stop();
}

fn a_handshake_may_come_byte_by_byte_and_after_a_proxy_header(driver: Driver) {
    let world = World::new();
    let text = format!(
        "server {{ listen %UNIX% ssl proxy_protocol; {OWN} return 200 \"$proxy_protocol_addr $ssl_protocol\"; }}"
    );
    let server = world.http(driver, &text).start();
    for (tls, version) in [(world.tls(), "TLSv1.3"), (Tls::tls12(&world.authority), "TLSv1.2")] {
        let mut session = tls.session("example.com");
        let mut socket = std::os::unix::net::UnixStream::connect(socket(&server)).unwrap();
        for &byte in b"PROXY TCP4 192.0.2.1 192.0.2.2 1234 5678\r\n" {
            socket.write_all(&[byte]).unwrap();
        }
        while session.is_handshaking() || session.wants_write() {
            let mut out = Vec::new();
            while session.wants_write() {
                session.write_tls(&mut out).unwrap();
            }
            for byte in out {
                socket.write_all(&[byte]).unwrap();
            }
            if session.is_handshaking() {
                assert!(session.read_tls(&mut socket).unwrap() > 0);
                session.process_new_packets().unwrap();
            }
        }
        let mut stream = rustls::StreamOwned::new(session, socket);
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.ends_with(&format!("192.0.2.1 {version}")), "{answer}");
    }
    server.stop();
}

fn content(length: usize) -> Vec<u8> {
    (0..length).map(|index| (index / 5 % 251) as u8).collect()
}

fn large_answers_and_large_requests_are_whole(driver: Driver) {
    let world = World::new();
    let text = format!(
        "client_max_body_size 0;
         server {{ listen %UNIX% ssl; {OWN} root %DIR%; location /echo {{ test_echo; }}
                   location /direct/ {{ alias %DIR%/; directio 512; }} }}"
    );
    let large = content(3_000_000);
    let server = world.http(driver, &text.replace("location /echo { test_echo; }", "")).file("large", &large).start();
    for tls in [world.tls(), Tls::tls12(&world.authority)] {
        let mut client = tls.client(&socket(&server), "example.com");
        for path in ["/large", "/direct/large", "/large"] {
            let answer = client.get(path);
            assert!(answer.status == 200 && answer.body == large, "{path}");
        }
        let request = "GET /large HTTP/1.1\r\nHost: h\r\nRange: bytes=100000-299999\r\n\r\n";
        assert!(client.ask(request).body == large[100_000..300_000]);
        // An unread body before the next request.
        let mut request = format!("POST /large HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n", large.len());
        request.push_str(&"x".repeat(large.len()));
        assert_eq!(client.ask(request).status, 405);
        assert!(client.get("/large").body == large);
    }
    server.stop();
}

/// A socket that records the bytes it receives.
struct Tapped {
    socket: UnixStream,
    received: Vec<u8>,
}

impl Read for Tapped {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let count = self.socket.read(into)?;
        self.received.extend_from_slice(&into[..count]);
        Ok(count)
    }
}

impl Write for Tapped {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.socket.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.socket.flush()
    }
}

/// Plaintext lengths of the records with data (RFC 5246, section 6.2.1; RFC 5288, section 3).
fn contents_of_records(mut bytes: &[u8]) -> Vec<usize> {
    const DATA: u8 = 23;
    /// Nonce and tag.
    const OVERHEAD: usize = 8 + 16;
    let mut lengths = Vec::new();
    while let [kind, _, _, high, low, rest @ ..] = bytes {
        let length = usize::from(u16::from_be_bytes([*high, *low]));
        if *kind == DATA {
            lengths.push(length - OVERHEAD);
        }
        bytes = &rest[length..];
    }
    lengths
}

fn records_are_small_first_and_then_as_large_as_the_configuration_says(driver: Driver) {
    /// Plaintext that fits into three packets, and the number of bytes sent in such records.
    const SMALL: usize = 4096 - 64;
    const SMALL_UNTIL: usize = 16 * 1024;
    let world = World::new();
    for (text, largest) in [("", 16 * 1024), ("ssl_buffer_size 8k;", 8 * 1024), ("ssl_buffer_size 1k;", 1024)] {
        let server = world.http(driver, &format!("server {{ listen %UNIX% ssl; {OWN} {text} root %DIR%; }}"));
        let server = server.file("large", content(600_000)).start();
        let socket = UnixStream::connect(socket(&server)).unwrap();
        let session = Tls::tls12(&world.authority).session("example.com");
        let mut session = StreamOwned::new(session, Tapped { socket, received: Vec::new() });
        session.write_all(b"GET /large HTTP/1.1\r\nHost: example.com\r\nConnection: close\r\n\r\n").unwrap();
        session.read_to_end(&mut Vec::new()).unwrap();
        let lengths = contents_of_records(&session.sock.received);
        let mut sent = 0;
        for length in &lengths {
            let most = if sent < SMALL_UNTIL { SMALL.min(largest) } else { largest };
            assert!(*length <= most, "{length} behind {sent}: {lengths:?}");
            sent += length;
        }
        assert!(sent > 600_000);
        // A piece of a file need not end at the end of a record.
        let full = lengths.iter().filter(|length| **length == largest).count();
        assert!(full * largest > 300_000, "{lengths:?}");
        server.stop();
    }
}

fn pipelined_requests_and_closed_connections_end_in_order(driver: Driver) {
    let world = World::new();
    let server = world.server(driver, "root %DIR%; location /s { return 200 $request_uri; }");
    for tls in [world.tls(), Tls::tls12(&world.authority)] {
        let mut client = tls.client(&socket(&server), "example.com");
        let requests: String = (0..100).map(|number| format!("GET /s{number} HTTP/1.1\r\nHost: h\r\n\r\n")).collect();
        client.send(requests);
        for number in 0..100 {
            assert_eq!(client.response().text(), format!("/s{number}"));
        }
        client.send("GET /s HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
        assert_eq!(client.response().text(), "/s");
        // The server sends a close_notify, or rustls would return an error.
        client.assert_closed();
        let mut session = tls.connect(&socket(&server), "example.com").unwrap();
        session.stream.conn.send_close_notify();
        session.flush().unwrap();
        assert_eq!(session.read_to_end(&mut Vec::new()).unwrap(), 0);
    }
    server.stop();
}

fn a_handshake_that_is_refused_says_so(driver: Driver) {
    let world = World::new();
    let text = format!(
        "server {{ listen %UNIX% ssl default_server; ssl_reject_handshake on; }}
         server {{ listen %UNIX% ssl; server_name example.com; {OWN} ssl_protocols TLSv1.3; return 200 ok; }}"
    );
    let server = world.http(driver, &text).start();
    let refusal = |tls: Tls, name: &str| tls.connect(&socket(&server), name).err().unwrap().to_string();
    let told = refusal(world.tls(), "b.example.com");
    assert!(told.contains("UnrecognisedName"), "{told}");
    assert!(refusal(Tls::tls12(&world.authority), "example.com").contains("ProtocolVersion"));
    let mut client = world.tls().client(&socket(&server), "example.com");
    assert_eq!(client.ask("GET / HTTP/1.1\r\nHost: example.com\r\n\r\n").text(), "ok");
    // A request for another name goes to that name's server, not to the handshake's.
    assert_eq!(client.get("/").status, 404);
    server.wait_logged("callback failed) while SSL handshaking, client: unix:");
    server.wait_logged("unsupported protocol) while SSL handshaking");
    server.stop();
}

fn a_client_that_speaks_nothing_newer_than_tls_1_1_is_told_so(driver: Driver) {
    let world = World::new();
    let server = world.server(driver, "return 200 ok;");
    for (version, low) in [(0x0300, 0), (0x0301, 1), (0x0302, 2)] {
        let mut client = server.connect();
        client.send(old_hello(version));
        // A fatal alert `protocol_version`, in the version that the client uses.
        assert_eq!(client.read_to_end(), [21, 3, low, 0, 2, 2, 70]);
    }
    let words =
        "SSL_do_handshake() failed (SSL: error:0A000102:SSL routines::unsupported protocol) while SSL handshaking";
    server.wait_logged(words);
    server.stop();
}

fn certificates_of_clients_are_judged(driver: Driver) {
    let world = World::new();
    let (authority, stranger) = (Authority::new("clients"), Authority::new("nobody"));
    let (good, bad) = (authority.ecdsa(&["a client"]), stranger.ecdsa(&["a stranger"]));
    let server = |name: &str, rules: &str| {
        format!(
            "server {{ listen %UNIX% ssl; server_name {name}.example.com; {OWN} {rules}
             ssl_client_certificate %DIR%/ca.crt; return 200 $ssl_client_verify; }}\n"
        )
    };
    let text = [
        server("off", ""),
        server("on", "ssl_verify_client on;"),
        server("optional", "ssl_verify_client optional;"),
        server("any", "ssl_verify_client optional_no_ca;"),
        // Without a certificate of its own: the default server's certificate and rules apply.
        server("bare", "ssl_verify_client on;").replace(OWN, ""),
    ]
    .concat();
    let server = world.http(driver, &text).file("ca.crt", &authority.pem).start();
    let versions: [&[_]; 2] = [&[&rustls::version::TLS13], &[&rustls::version::TLS12]];
    for versions in versions {
        let expect = |own: Option<&Pair>, name: &str, host: &str, status: u16, text: &str| {
            let tls = Tls::with(&world.authority, versions, own);
            // The second connection resumes the session.
            for _ in 0..2 {
                let mut client = tls.client(&socket(&server), &format!("{name}.example.com"));
                let answer = client.ask(format!("GET / HTTP/1.1\r\nHost: {host}.example.com\r\n\r\n"));
                assert_eq!(answer.status, status, "{name} {host}: {}", answer.text());
                assert!(answer.text().contains(text), "{name} {host}: {}", answer.text());
            }
        };
        expect(None, "off", "off", 200, "NONE");
        expect(None, "on", "on", 400, "No required SSL certificate was sent");
        expect(Some(&good), "on", "on", 200, "SUCCESS");
        expect(Some(&bad), "on", "on", 400, "The SSL certificate error");
        expect(None, "optional", "optional", 200, "NONE");
        expect(Some(&good), "optional", "optional", 200, "SUCCESS");
        expect(Some(&bad), "optional", "optional", 400, "The SSL certificate error");
        expect(Some(&bad), "any", "any", 200, "FAILED:");
        // The rules cannot be bypassed with another name.
        expect(None, "off", "on", 421, "");
        expect(Some(&good), "any", "on", 421, "");
        expect(None, "bare", "bare", 400, "No required SSL certificate was sent");
        expect(Some(&good), "bare", "bare", 400, "No required SSL certificate was sent");
        expect(None, "on", "off", 200, "NONE");
        // An unknown name goes to the default server.
        expect(None, "optional", "unknown", 200, "NONE");
    }
    server.stop();
}

/// A certificate does not become an authority just because `ssl_client_certificate` lists it.
fn authorities_of_clients_are_judged_too(driver: Driver) {
    let world = World::new();
    let authorities = [
        (Authority::new("good"), 200),
        (Authority::with("leaf", |params| params.is_ca = IsCa::ExplicitNoCa), 400),
        (Authority::with("expired", |params| params.not_after = date_time_ymd(2002, 1, 1)), 400),
    ];
    for (authority, status) in authorities {
        let text = format!(
            "server {{ listen %UNIX% ssl; {OWN} ssl_client_certificate %DIR%/ca.crt; ssl_verify_client on;
             return 200 $ssl_client_verify; }}"
        );
        let server = world.http(driver, &text).file("ca.crt", &authority.pem).start();
        let own = authority.ecdsa(&["client"]);
        let tls = Tls::with(&world.authority, &[&rustls::version::TLS13], Some(&own));
        let mut client = tls.client(&socket(&server), "example.com");
        let answer = client.ask("GET / HTTP/1.1\r\nHost: example.com\r\n\r\n");
        assert_eq!(answer.status, status, "{}", answer.text());
        server.stop();
    }
}

fn an_authority_that_was_renewed_with_the_same_key_is_trusted_beside_its_old_certificate(driver: Driver) {
    let world = World::new();
    let clients = Authority::new("clients");
    let expired = clients.renewed("clients", |params| params.not_after = date_time_ymd(2002, 1, 1));
    let future = clients.renewed("clients", |params| params.not_before = date_time_ymd(2999, 1, 1));
    let own = clients.ecdsa(&["client"]);
    let text = format!(
        "server {{ listen %UNIX% ssl; {OWN} ssl_client_certificate %DIR%/ca.crt; ssl_verify_client on;
         error_page 495 =200 /failed; location / {{ return 200 $ssl_client_verify; }} }}"
    );
    for (trusted, verdict) in [
        ([&expired, &future, &clients.pem].map(String::as_str).concat(), "SUCCESS"),
        ([&clients.pem, &expired].map(String::as_str).concat(), "SUCCESS"),
        // As with OpenSSL, the certificate that expires last is checked.
        ([&expired, &future].map(String::as_str).concat(), "FAILED:certificate is not yet valid"),
    ] {
        let server = world.http(driver, &text).file("ca.crt", trusted).start();
        let tls = Tls::with(&world.authority, &[&TLS13], Some(&own));
        let answer = tls.client(&socket(&server), "example.com").get("/");
        assert_eq!(answer.text(), verdict);
        server.stop();
    }
}

fn a_slow_client_gets_all_of_a_file(driver: Driver) {
    let world = World::new();
    let large = content(8_000_000);
    let text = format!("server {{ listen %UNIX% ssl; {OWN} root %DIR%; }}");
    let server = world.http(driver, &text).file("large", &large).start();
    let mut session = world.tls().connect(&socket(&server), "example.com").unwrap();
    assert_eq!(session.stream.conn.protocol_version(), Some(ProtocolVersion::TLSv1_3));
    session.write_all(b"GET /large HTTP/1.0\r\n\r\n").unwrap();
    // The server completes other requests meanwhile.
    for _ in 0..20 {
        assert!(world.tls().client(&socket(&server), "example.com").get("/large").body == large);
        let mut some = vec![0; 100_000];
        session.read_exact(&mut some).unwrap();
    }
    let mut rest = Vec::new();
    session.read_to_end(&mut rest).unwrap();
    assert!(large.ends_with(&rest) && rest.len() + 2_000_000 < large.len() + 1000);
    server.stop();
}

#[test]
fn wrong_settings_are_refused_in_nginx_s_words() {
    let world = World::new();
    let other = world.authority.ecdsa(&["other.net"]);
    let expect = |text: &str, words: &str| {
        let mut server = world.http(Driver::Epoll, text).file("other.key", &other.key).file("empty", "").launch();
        assert!(!server.wait_exited().success(), "{text}");
        let told = server.stderr();
        assert!(told.contains(words), "{text}: {told}");
    };
    let server = |text: &str| format!("server {{ listen %UNIX% ssl; {text} }}");
    expect(&server(""), "no \"ssl_certificate\" is defined for the \"listen ... ssl\" directive in ");
    expect(&server("ssl_certificate %DIR%/own.crt;"), "no \"ssl_certificate_key\" is defined for certificate \"");
    expect(
        &server("ssl_certificate %DIR%/none; ssl_certificate_key %DIR%/own.key;"),
        "BIO_new_file() failed (SSL: error:80000002:system library::No such file or directory:calling fopen(",
    );
    expect(
        &server("ssl_certificate %DIR%/empty; ssl_certificate_key %DIR%/own.key;"),
        "PEM_read_bio_X509_AUX() failed (SSL: error:0480006C:PEM routines::no start line:Expecting: TRUSTED \
         CERTIFICATE)",
    );
    expect(
        &server("ssl_certificate %DIR%/own.crt; ssl_certificate_key %DIR%/empty;"),
        "PEM_read_bio_PrivateKey() failed",
    );
    expect(
        &server("ssl_certificate %DIR%/own.crt; ssl_certificate_key %DIR%/other.key;"),
        "failed (SSL: error:05800074:x509 certificate routines::key values mismatch)",
    );
    expect(&server(&format!("{OWN} ssl_ciphers AES128-SHA;")), "no cipher match");
    expect(&server(&format!("{OWN} ssl_protocols TLSv1;")), "no supported protocol version is left in");
    expect(&server(&format!("{OWN} ssl_ecdh_curve none;")), "SSL_CTX_set1_curves_list(\"none\") failed");
    expect(&server(&format!("{OWN} ssl_verify_client on;")), "for ssl_verify_client");
    expect(&server("ssl_certificate_key engine:x:y; ssl_certificate %DIR%/own.crt;"), "\"engine:\" is not supported");
    expect(&server(&format!("{OWN} ssl_session_cache shared:x:1k;")), "session cache \"shared:x:1k\" is too small");
    let no_file = "BIO_new_file() failed (SSL: error:80000002:system library::No such file or directory:calling fopen(";
    let no_start = "error:0480006C:PEM routines::no start line:Expecting:";
    let unused = |text: &str, words: &str| expect(&server(&format!("{OWN} {text}")), words);
    unused("ssl_trusted_certificate %DIR%/none;", &format!("none\": {no_file}"));
    unused("ssl_crl %DIR%/none;", &format!("none\": {no_file}"));
    unused("ssl_dhparam %DIR%/none;", "none\") failed (SSL: error:80000002:system library::No such file or directory");
    unused("ssl_trusted_certificate %DIR%/own.key;", &format!("PEM_read_bio_X509_AUX() failed (SSL: {no_start}"));
    unused("ssl_crl %DIR%/own.crt;", &format!("PEM_read_bio_X509_CRL() failed (SSL: {no_start} X509 CRL)"));
    unused("ssl_dhparam %DIR%/own.crt;", &format!("own.crt\") failed (SSL: {no_start} DH PARAMETERS)"));
    unused("ssl_dhparam ''; ssl_dhparam '';", "\"ssl_dhparam\" directive is duplicate");
    unused("ssl_ciphers 'HIGH:!';", "(SSL: error:0A000118:SSL routines::invalid command)");
    expect(&server(&format!("{OWN} ssl on;")), "unknown directive \"ssl\"");
}

fn unacceptable_certificates_are_warned_of_with_their_line(driver: Driver) {
    let world = World::new();
    let pair = |change: &dyn Fn(&mut CertificateParams)| {
        let mut params = authority::params(&["example.com"]);
        change(&mut params);
        world.authority.sign(params, rcgen::KeyPair::generate().unwrap())
    };
    let old = pair(&|params| params.not_after = date_time_ymd(2002, 1, 1));
    let future = pair(&|params| params.not_before = date_time_ymd(2999, 12, 1));
    let text = "proxy_ssl_certificate %DIR%/old.pem; proxy_ssl_certificate_key %DIR%/old.pem;
        server { listen %UNIX% ssl; return 200 ok;
        ssl_certificate %DIR%/future.pem; ssl_certificate_key %DIR%/future.pem;
        ssl_certificate %DIR%/own.crt; ssl_certificate_key %DIR%/own.key; }
        server { listen %TCP%; location / { proxy_pass https://127.0.0.1:1; } }";
    let setup = world.http(driver, text).file("old.pem", old.certificate + &old.key);
    let setup = setup.file("future.pem", future.certificate + &future.key);
    let server = setup.clone().start();
    let messages = [
        "old.pem\" expired on Jan  1 00:00:00 2002 GMT in ",
        "future.pem\" is not valid before Dec  1 00:00:00 2999 GMT in ",
    ];
    let assert_warned = |said: &str| {
        for message in messages {
            let line = said.lines().find(|line| line.contains(message)).unwrap_or_else(|| panic!("{message}: {said}"));
            assert!(line.contains("[warn]") && line.contains("gale.conf:"), "{line}");
        }
    };
    assert_warned(&server.stderr());
    assert!(!server.stderr().contains("own.crt"), "{}", server.stderr());
    server.stop();
    let mut test = setup.argument("-t").launch();
    assert!(test.wait_exited().success());
    assert_warned(&test.stderr());
}

fn names_in_a_client_s_certificate_are_in_a_variable(driver: Driver) {
    let world = World::new();
    let clients = Authority::new("clients");
    let mut params = authority::params(&["client.example", "192.0.2.1"]);
    let uri = "spiffe://example/a,b".to_owned();
    params.subject_alt_names.push(SanType::URI(uri.try_into().unwrap()));
    let own = clients.sign(params, rcgen::KeyPair::generate().unwrap());
    let text = "ssl_client_certificate %DIR%/ca.crt; ssl_verify_client optional; return 200 [$ssl_client_san];";
    let text = format!("server {{ listen %UNIX% ssl; {OWN} {text} }}");
    let server = world.http(driver, &text).file("ca.crt", &clients.pem).start();
    for (own, names) in [(Some(&own), "DNS:client.example,IP:192.0.2.1,URI:spiffe://example/a\\2Cb"), (None, "")] {
        let tls = Tls::with(&world.authority, &[&TLS13], own);
        assert_eq!(tls.client(&socket(&server), "example.com").get("/").text(), format!("[{names}]"));
    }
    server.stop();
}

fn certificate_of_plain_key(world: &World) -> String {
    let key = rcgen::KeyPair::from_pem(PLAIN_KEY).unwrap();
    world.authority.sign(authority::params(&["example.com"]), key).certificate
}

fn keys_may_have_passwords(driver: Driver) {
    let world = World::new();
    let certificate = certificate_of_plain_key(&world);
    let start = |key: &str, passwords: &str, text: &str| {
        let text = format!("{text} server {{ listen %UNIX% ssl; {OWN} return 200 ok; }}");
        let setup = Setup::http(driver, &text).file("own.crt", &certificate).file("own.key", key);
        setup.file("passwords", passwords)
    };
    for key in [OLD_KEY, PKCS8_KEY] {
        let named = "ssl_password_file %DIR%/passwords;";
        for passwords in ["secret", "wrong\r\n\r\nsecret\r\n", "secret\nwrong\n"] {
            let server = start(key, passwords, named).start();
            assert_eq!(world.tls().client(&socket(&server), "example.com").get("/").text(), "ok");
            server.stop();
        }
        for (passwords, text, why) in [
            ("wrong\n", named, "bad decrypt"),
            ("", named, "bad decrypt"),
            ("", "", "bad password read"),
            (&"x".repeat(4096), named, "too long line in \""),
        ] {
            let mut server = start(key, passwords, text).launch();
            assert!(!server.wait_exited().success());
            let said = server.stderr();
            assert!(said.contains(why), "{why}: {said}");
            assert_eq!(said.contains("set its password file with"), text.is_empty(), "{said}");
        }
    }
}

fn certificates_may_have_names_with_variables(driver: Driver) {
    let world = World::new();
    let other = world.authority.ecdsa(&["other.net"]);
    let certificate = certificate_of_plain_key(&world);
    let inline = world.authority.ecdsa(&["inline.net"]);
    let text = format!(
        "map $ssl_server_name $certificate {{ default \"{}\"; }} map $ssl_server_name $key {{ default \"{}\"; }}
         server {{ listen %UNIX% ssl; ssl_certificate %DIR%/$ssl_server_name.crt;
             ssl_certificate_key %DIR%/$ssl_server_name.key; ssl_password_file %DIR%/passwords;
             return 200 \"$ssl_server_name $ssl_session_reused\"; }}
         server {{ listen %UNIX% ssl; server_name inline.net; ssl_certificate data:$certificate;
             ssl_certificate_key data:$key; return 200 inline; }}",
        inline.certificate, inline.key
    );
    let mut server = Setup::http(driver, &text)
        .file("example.com.crt", &certificate)
        .file("example.com.key", PKCS8_KEY)
        .file("other.net.crt", &other.certificate)
        .file("other.net.key", &other.key)
        .file("mismatch.crt", &other.certificate)
        .file("mismatch.key", &world.pair.key)
        .file("own.crt", &world.pair.certificate)
        .file("own.key", &world.pair.key)
        .file("passwords", "secret")
        .start();
    for tls in [world.tls(), Tls::tls12(&world.authority)] {
        let client = |name: &str| tls.client(&socket(&server), name);
        assert_eq!(client("example.com").get("/").text(), "example.com .");
        assert_eq!(client("other.net").get("/").text(), "other.net .");
        let session = tls.connect(&socket(&server), "other.net").unwrap();
        assert!(is_for(&session.stream.conn.peer_certificates().unwrap()[0], &other));
        let session = tls.connect(&socket(&server), "inline.net").unwrap();
        assert!(is_for(&session.stream.conn.peer_certificates().unwrap()[0], &inline));
        assert_eq!(client("example.com").get("/").status, 200);
        // A session is resumed with the same certificate, not with another.
        assert_eq!(client("other.net").get("/").text(), "other.net r");
    }
    for (name, why) in [
        ("none.net", "cannot load certificate \"%DIR%/none.net.crt\": BIO_new_file() failed"),
        ("mismatch", "key values mismatch"),
    ] {
        let error = world.tls().connect(&socket(&server), name).err().unwrap();
        assert!(error.to_string().contains("InternalError"), "{error}");
        let path = server.directory.path().display().to_string();
        server.wait_logged(&why.replace("%DIR%", &path));
    }
    // Certificates loaded for earlier handshakes are not used after a reload.
    server.reload_http(driver, &format!("server {{ listen %UNIX% ssl; {OWN} return 200 now; }}"));
    assert_eq!(world.tls().client(&socket(&server), "example.com").get("/").text(), "now");
    server.end(Signal::TERM);
}

fn certificates_are_kept_as_long_as_the_cache_says(driver: Driver) {
    let world = World::new();
    let (first, second) = (world.authority.ecdsa(&["a.net"]), world.authority.ecdsa(&["a.net"]));
    for (cache, is_kept) in [("ssl_certificate_cache max=2;", true), ("ssl_certificate_cache off;", false), ("", false)]
    {
        let text = format!(
            "server {{ listen %UNIX% ssl; ssl_certificate %DIR%/$ssl_server_name.crt;
             ssl_certificate_key %DIR%/$ssl_server_name.key; {cache} return 200 ok; }}"
        );
        let mut server =
            Setup::http(driver, &text).file("a.net.crt", &first.certificate).file("a.net.key", &first.key).start();
        let gets = |pair: &Pair| {
            let session = world.tls().connect(&socket(&server), "a.net").unwrap();
            is_for(&session.stream.conn.peer_certificates().unwrap()[0], pair)
        };
        assert!(gets(&first));
        let replace = |name: &str, text: &str| std::fs::write(server.directory.path().join(name), text).unwrap();
        replace("a.net.crt", &second.certificate);
        replace("a.net.key", &second.key);
        assert!(gets(if is_kept { &first } else { &second }), "{cache}");
        assert!(world.tls().connect(&socket(&server), "b.net").is_err());
        assert!(gets(if is_kept { &first } else { &second }), "{cache}");
        server.end(Signal::TERM);
    }
}

fn commands_for_openssl_count_after_directives(driver: Driver) {
    let world = World::new();
    let other = world.authority.ecdsa(&["example.com"]);
    let text = format!(
        "ssl_session_tickets off; server {{ listen %UNIX% ssl; {OWN} ssl_protocols TLSv1.2 TLSv1.3;
         ssl_conf_command Options SessionTicket; ssl_conf_command options -ServerPreference,PrioritizeChaCha;
         ssl_conf_command Ciphersuites TLS_CHACHA20_POLY1305_SHA256:TLS_AES_128_CCM_SHA256;
         ssl_conf_command CipherString ECDHE-ECDSA-AES128-GCM-SHA256; ssl_conf_command Groups P-384;
         ssl_conf_command Certificate %DIR%/other.crt; ssl_conf_command PrivateKey %DIR%/other.key;
         return 200 \"$ssl_cipher $ssl_curve $ssl_session_reused\"; }}"
    );
    let server = world.http(driver, &text).file("other.crt", &other.certificate).file("other.key", &other.key).start();
    let said = server.stderr();
    assert!(said.contains("OpenSSL command \"PrioritizeChaCha\" is accepted but has no effect"), "{said}");
    assert!(said.contains("unsupported cipher suites are ignored: TLS_AES_128_CCM_SHA256"), "{said}");
    let tls = world.tls();
    let mut client = tls.client(&socket(&server), "example.com");
    assert_eq!(client.get("/").text(), "TLS_CHACHA20_POLY1305_SHA256 secp384r1 .");
    assert!(tls.client(&socket(&server), "example.com").get("/").text().ends_with(" r"));
    let mut client = Tls::tls12(&world.authority).client(&socket(&server), "example.com");
    assert_eq!(client.get("/").text(), "ECDHE-ECDSA-AES128-GCM-SHA256 secp384r1 .");
    let session = world.tls().connect(&socket(&server), "example.com").unwrap();
    assert!(is_for(&session.stream.conn.peer_certificates().unwrap()[0], &other));
    server.stop();
    for (command, reached) in
        [("MinProtocol TLSv1.3", "TLSv1.3"), ("MaxProtocol TLSv1.2", "TLSv1.2"), ("Protocol -TLSv1.3", "TLSv1.2")]
    {
        let server = world.server(driver, &format!("ssl_conf_command {command}; return 200 $ssl_protocol;"));
        assert_eq!(world.tls().client(&socket(&server), "example.com").get("/").text(), reached, "{command}");
        let of_12 = Tls::tls12(&world.authority).connect(&socket(&server), "example.com");
        assert_eq!(of_12.is_ok(), reached == "TLSv1.2", "{command}");
        server.stop();
    }
}

fn settings_that_cannot_be_are_errors(driver: Driver) {
    let world = World::new();
    for (text, message) in [
        ("ssl_certificate_cache inactive=1s;", "\"ssl_certificate_cache\" must have the \"max\" parameter"),
        ("ssl_certificate_cache max=0;", "invalid parameter \"max=0\""),
        ("ssl_certificate_cache max=1 valid=x;", "invalid parameter \"valid=x\""),
        ("ssl_password_file %DIR%/none;", "open() \"%DIR%/none\" failed (2: No such file or directory)"),
        ("ssl_conf_command Nothing x;", "SSL_CONF_cmd(\"Nothing\", \"x\") failed (SSL: error:0A000182:"),
        ("ssl_conf_command Options x;", "SSL_CONF_cmd(\"Options\", \"x\") failed (SSL: error:0A000180:"),
        ("ssl_conf_command Protocol TLSv9;", "bad value:cmd=Protocol, value=TLSv9"),
        ("ssl_conf_command MaxProtocol TLSv1.1;", "no supported protocol version is left"),
        ("ssl_conf_command Certificate none.crt;", "cannot load certificate \"%DIR%/none.crt\""),
    ] {
        let text = format!("server {{ listen %UNIX% ssl; {OWN} {text} }}");
        let mut server = world.http(driver, &text).launch();
        assert!(!server.wait_exited().success(), "{text}");
        let said = server.stderr();
        let message = message.replace("%DIR%", &server.directory.path().display().to_string());
        assert!(said.contains(&message), "{message}: {said}");
    }
}

fn offers_of_a_client_are_in_variables(driver: Driver) {
    let world = World::new();
    let text = "return 200 \"$ssl_ciphers $ssl_curves $ssl_sigalgs $ssl_ja4\";";
    let server = world.server(driver, text);
    let mut client = Tls::tls12(&world.authority).alpn(&["http/1.1"]).client(&socket(&server), "example.com");
    let answer = client.get("/").text().to_owned();
    let words: Vec<&str> = answer.split(' ').collect();
    let [ciphers, curves, schemes, ja4] = words[..] else { panic!("{answer}") };
    assert!(ciphers.contains(":ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-ECDSA-AES128-GCM-SHA256:"), "{answer}");
    assert!(curves.split(':').any(|curve| curve == "X25519"), "{answer}");
    assert!(schemes.split(':').any(|scheme| scheme == "ecdsa_secp256r1_sha256"), "{answer}");
    assert!(ja4.starts_with("t12d") && ja4.len() == 36 && &ja4[8..11] == "h1_", "{answer}");
    // The fingerprint depends on the offered values and versions, not on their order or the server name.
    let other = Tls::tls12(&world.authority).alpn(&["http/1.1"]).client(&socket(&server), "a.example.com").get("/");
    assert_eq!(other.text().rsplit(' ').next(), Some(ja4));
    let newer = world.tls().client(&socket(&server), "example.com").get("/");
    assert!(newer.text().rsplit(' ').next().is_some_and(|ja4| ja4.starts_with("t13d")), "{}", newer.text());
    server.stop();
}

/// A certificate with its chain, its key, and an OCSP response that never expires; also used as a client's certificate.
const OCSP_CHAIN: &str = include_str!("../../crates/tls/tests/ocsp/good.chain.crt");
const OCSP_KEY: &str = include_str!("../../crates/tls/tests/ocsp/good.key");
const OCSP_RESPONSE: &[u8] = include_bytes!("../../crates/tls/tests/ocsp/good.forever.response.der");
const OCSP_REQUEST: &[u8] = include_bytes!("../../crates/tls/tests/ocsp/good.request.der");

/// The OCSP response stapled to the certificate that a new client receives.
fn stapled(world: &World, server: &Server) -> Vec<u8> {
    let verifier = Arc::new(AnyCertificate::default());
    world
        .tls()
        .verified_by(Arc::clone(&verifier) as Arc<dyn ServerCertVerifier>)
        .connect(&socket(server), "good")
        .unwrap();
    verifier.stapled()
}

/// Answers the next OCSP request that the responder receives.
fn answer_ocsp(responder: &Backend, status: &str, kind: &str, body: &[u8]) {
    let mut asked = responder.accept();
    let request = asked.request();
    let expected = base64(OCSP_REQUEST).replace('+', "%2B").replace('/', "%2F").replace('=', "%3D");
    assert_eq!((request.method.as_str(), request.target.as_str()), ("GET", format!("/ocsp/{expected}").as_str()));
    asked.send(format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n", body.len()));
    asked.send(body);
    asked.finish_sending();
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digit = |bits: u32, place: u32| char::from(DIGITS[(bits >> (18 - 6 * place) & 63) as usize]);
    let encode = |group: &[u8]| -> String {
        let bits = (0..3).fold(0, |bits, index| bits << 8 | u32::from(group.get(index).copied().unwrap_or(0)));
        (0..4).map(|place| if place as usize <= group.len() { digit(bits, place) } else { '=' }).collect()
    };
    bytes.chunks(3).map(encode).collect()
}

fn clients_get_the_ocsp_response(driver: Driver) {
    let world = World::new();
    let setup = |text: &str| {
        let text = format!("server {{ listen %UNIX% ssl; {OWN} ssl_stapling on; {text} return 200 ok; }}");
        let setup = Setup::http(driver, &text).file("own.crt", OCSP_CHAIN).file("own.key", OCSP_KEY);
        setup.file("response.der", OCSP_RESPONSE)
    };
    let server = setup("ssl_stapling_file %DIR%/response.der;").start();
    assert_eq!(stapled(&world, &server), OCSP_RESPONSE);
    server.stop();
    // A certificate that names no responder.
    let server = setup("").start();
    assert!(server.stderr().contains("\"ssl_stapling\" ignored, no OCSP responder URL in the certificate \""));
    assert!(stapled(&world, &server).is_empty());
    server.stop();
    let responder = Backend::tcp();
    let text = format!("ssl_stapling_responder http://{}/ocsp; ssl_stapling_verify on;", responder.address());
    let mut server = setup(&text).start();
    // The handshake does not wait for the responder.
    assert!(stapled(&world, &server).is_empty());
    answer_ocsp(&responder, "200 OK", "application/ocsp-response", OCSP_RESPONSE);
    while stapled(&world, &server) != OCSP_RESPONSE {}
    // After a reload the response is there at once, without a request.
    let reloaded = format!("server {{ listen %UNIX% ssl; {OWN} ssl_stapling on; {text} return 200 ok; }}");
    server.reload_http(driver, &reloaded);
    assert_eq!(stapled(&world, &server), OCSP_RESPONSE);
    server.stop();
    for (status, kind, body, why) in [
        ("200 OK", "text/html", OCSP_RESPONSE, "sent invalid \"Content-Type\" header: \"text/html\""),
        ("404 Not Found", "application/ocsp-response", b"", "OCSP responder sent status 404"),
        ("200 OK", "application/ocsp-response", b"0", "d2i_OCSP_RESPONSE() failed"),
        ("200 OK", "application/ocsp-response", b"\x30\x03\x0a\x01\x06", "not successful (6: unauthorized)"),
    ] {
        let server = setup(&text).start();
        answer_ocsp(&responder, status, kind, body);
        let line = server.wait_logged(why);
        assert!(line.contains("while requesting certificate status, responder: 127.0.0.1, certificate: \""), "{line}");
        assert!(stapled(&world, &server).is_empty());
        server.stop();
    }
}

fn clients_are_asked_about_at_a_responder(driver: Driver) {
    let world = World::new();
    let responder = Backend::tcp();
    let text = format!(
        "server {{ listen %UNIX% ssl; {OWN} ssl_verify_client on; ssl_client_certificate %DIR%/issuer.crt;
         ssl_ocsp on; ssl_ocsp_responder http://{}/ocsp; ssl_ocsp_cache shared:ocsp:1m;
         return 200 $ssl_client_verify; }}",
        responder.address()
    );
    let issuer = &OCSP_CHAIN[OCSP_CHAIN.rfind("-----BEGIN").unwrap()..];
    let own = Pair { certificate: OCSP_CHAIN.to_owned(), key: OCSP_KEY.to_owned() };
    let server = world.http(driver, &text).file("issuer.crt", issuer).start();
    let tls = Tls::with(&world.authority, &[&rustls::version::TLS13], Some(&own));
    // If the responder fails, the certificate's status is unknown; the failure is not cached.
    let mut client = tls.client(&socket(&server), "example.com");
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    answer_ocsp(&responder, "500 No", "text/plain", b"");
    assert_eq!(client.response().status, 400);
    server.wait_logged("client SSL certificate verify error: certificate status request failed");
    let mut client = tls.client(&socket(&server), "example.com");
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    answer_ocsp(&responder, "200 OK", "application/ocsp-response", OCSP_RESPONSE);
    assert_eq!(client.response().text(), "SUCCESS");
    // From the cache.
    assert_eq!(tls.client(&socket(&server), "example.com").get("/").text(), "SUCCESS");
    server.stop();
}

fn early_data_is_answered_at_once_unless_the_method_is_unsafe(driver: Driver) {
    let world = World::new();
    let text = "ssl_early_data on; return 200 \"early=$ssl_early_data $ssl_session_reused $ssl_protocol\";";
    let server = world.server(driver, text);
    let tls = world.tls().with_early_data();
    assert_eq!(tls.client(&socket(&server), "example.com").get("/").text(), "early= . TLSv1.3");
    let early = |request: &str| {
        let mut session = tls.session("example.com");
        session.early_data().expect("a session that allows it").write_all(request.as_bytes()).unwrap();
        let mut stream =
            rustls::StreamOwned::new(session, std::os::unix::net::UnixStream::connect(socket(&server)).unwrap());
        stream.conn.complete_io(&mut stream.sock).unwrap();
        assert!(stream.conn.is_early_data_accepted());
        Client::above(Session { stream })
    };
    let mut client = early("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(client.response().text(), "early=1 r TLSv1.3");
    // The handshake is complete now.
    assert_eq!(client.get("/").text(), "early= r TLSv1.3");
    let mut client = early("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n");
    assert_eq!(client.response().status, 425);
    server.wait_logged("client sent a request with an unsafe method as early data");
    // A request that does not fit into the early data, in two parts.
    let mut session = tls.session("example.com");
    session.early_data().unwrap().write_all(b"GET / HTTP/1.1\r\nHost:").unwrap();
    let mut stream =
        rustls::StreamOwned::new(session, std::os::unix::net::UnixStream::connect(socket(&server)).unwrap());
    stream.conn.complete_io(&mut stream.sock).unwrap();
    stream.write_all(b" a\r\n\r\n").unwrap();
    assert_eq!(Client::above(Session { stream }).response().text(), "early= r TLSv1.3");
    server.stop();
    // Early data is not offered if it is off, or if a client certificate may be required.
    let server = world.server(driver, "return 200 ok;");
    let tls = world.tls().with_early_data();
    assert_eq!(tls.client(&socket(&server), "example.com").get("/").text(), "ok");
    assert!(tls.session("example.com").early_data().is_none());
    server.stop();
}

fn long_keys_sign_beside_the_event_loop(driver: Driver) {
    let world = World::new();
    let key = rcgen::KeyPair::from_pem_and_sign_algo(LONG_KEY, &rcgen::PKCS_RSA_SHA256).unwrap();
    let pair = world.authority.sign(authority::params(&["example.com"]), key);
    let text = format!("server {{ listen %UNIX% ssl; {OWN} return 200 \"$ssl_cipher $ssl_session_reused\"; }}");
    let server = Setup::http(driver, &text).file("own.crt", &pair.certificate).file("own.key", &pair.key).start();
    for tls in [world.tls(), Tls::tls12(&world.authority), Tls::rsa_only(&world.authority)] {
        let mut client = tls.client(&socket(&server), "example.com");
        assert!(client.get("/").text().ends_with(" ."));
        assert!(tls.client(&socket(&server), "example.com").get("/").text().ends_with(" r"));
    }
    // A malformed message, and a client that disconnects while its session is on another thread.
    let mut client = server.connect();
    client.send(b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00");
    assert!(client.read_to_end().starts_with(&[21, 3]));
    let mut hello = Vec::new();
    world.tls().session("example.com").write_tls(&mut hello).unwrap();
    let mut client = server.connect();
    client.send(&hello);
    drop(client);
    assert_eq!(world.tls().client(&socket(&server), "example.com").get("/").status, 200);
    server.stop();
}

/// Counts decompressions.
#[derive(Debug)]
struct Zlib(AtomicUsize);

impl CertDecompressor for Zlib {
    fn decompress(&self, input: &[u8], output: &mut [u8]) -> Result<(), DecompressionFailed> {
        self.0.fetch_add(1, Ordering::SeqCst);
        let mut decoder = flate2::read::ZlibDecoder::new(input);
        let whole = decoder.read_exact(output).is_ok() && decoder.read(&mut [0]).is_ok_and(|more| more == 0);
        if whole { Ok(()) } else { Err(DecompressionFailed) }
    }

    fn algorithm(&self) -> CertificateCompressionAlgorithm {
        CertificateCompressionAlgorithm::Zlib
    }
}

fn certificates_are_sent_compressed_to_clients_that_can_have_it(driver: Driver) {
    let world = World::new();
    for (setting, versions, times) in
        [("on", &[&TLS13], 1), ("off", &[&TLS13], 0), ("on", &[&TLS12], 0), ("off", &[&TLS12], 0)]
    {
        let text = format!("ssl_certificate_compression {setting}; location / {{ return 200 fine; }}");
        let server = world.server(driver, &text);
        let zlib: &'static Zlib = Box::leak(Box::new(Zlib(AtomicUsize::new(0))));
        let tls = Tls::with(&world.authority, versions, None).decompressing(zlib);
        let get = "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n";
        assert_eq!(tls.client(&socket(&server), "example.com").ask(get).text(), "fine");
        assert_eq!(zlib.0.load(Ordering::SeqCst), times, "{setting} {versions:?}");
        // Other clients receive it uncompressed.
        assert_eq!(world.tls().client(&socket(&server), "example.com").ask(get).text(), "fine");
        server.stop();
    }
}
