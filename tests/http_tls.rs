//! `listen … ssl`: handshakes, who answers them, and requests over TLS.

#[path = "support/authority.rs"]
mod authority;
mod support;
#[path = "support/tls.rs"]
mod tls;

use std::io::{Read, Write};
use std::path::PathBuf;

use authority::{Authority, Pair, is_for};
use rcgen::{IsCa, date_time_ymd};
use rustix::process::Signal;
use rustls::{HandshakeKind, ProtocolVersion};
use support::{Client, Driver, Server, Setup, with_each_driver};
use tls::Tls;

with_each_driver!(
    both_versions_answer_and_say_what_they_are,
    the_name_of_the_handshake_chooses_the_server,
    a_client_gets_the_certificate_that_it_can_check,
    a_client_comes_back_to_its_session_also_after_a_reload,
    a_reload_brings_another_certificate,
    plain_http_is_answered_with_400_and_garbage_with_an_alert,
    a_handshake_may_come_byte_by_byte_and_after_a_proxy_header,
    large_answers_and_large_requests_are_whole,
    pipelined_requests_and_closed_connections_end_in_order,
    a_handshake_that_is_refused_says_so,
    certificates_of_clients_are_judged,
    authorities_of_clients_are_judged_too,
    a_slow_client_gets_all_of_a_file,
);

/// A server with a certificate for example.com, and its authority.
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

    /// The http block's contents, beside the files of the certificate.
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

fn socket(server: &Server) -> PathBuf {
    server.directory.path().join("gale.sock")
}

fn both_versions_answer_and_say_what_they_are(driver: Driver) {
    let world = World::new();
    let server = world.server(
        driver,
        "location / { return 200 \"$scheme $https $ssl_protocol $ssl_cipher $ssl_server_name $ssl_session_reused \
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
        // A name that nobody has, and an address, which is no name.
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
            // Another host of the same connection is answered, too; without one it is the handshake's.
            let text = client.ask("GET / HTTP/1.1\r\nHost: other.net\r\nConnection: close\r\n\r\n");
            assert_eq!(text.text(), "other other.net");
            let mut client = tls.client(&socket(&server), name);
            client.send("GET / HTTP/1.0\r\n\r\n");
            assert!(client.response().text().starts_with(answer), "{name}");
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
    let kinds = ["", "ssl_session_tickets off; ssl_session_cache shared:s:1m;"];
    for more in kinds {
        let mut server = world.http(driver, &text(more)).start();
        for tls in [world.tls(), Tls::tls12(&world.authority)] {
            assert_eq!(tls.client(&socket(&server), "example.com").get("/").text(), ".");
            assert_eq!(tls.client(&socket(&server), "example.com").get("/").text(), "r", "{more}");
            server.reload_http(driver, &text(more));
            assert_eq!(tls.client(&socket(&server), "example.com").get("/").text(), "r", "{more}");
            // Another rule for certificates of clients ends all sessions.
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

fn a_reload_brings_another_certificate(driver: Driver) {
    let world = World::new();
    let text = format!("server {{ listen %UNIX% ssl; {OWN} return 200 ok; }}");
    let mut server = world.http(driver, &text).start();
    let tls = world.tls();
    let mut before = tls.client(&socket(&server), "example.com");
    assert_eq!(before.get("/").text(), "ok");
    let new = world.authority.ecdsa(&["example.com"]);
    server.directory.write("own.crt", &new.certificate);
    // The key of another certificate: the old one stays.
    server.reload_http(driver, &text);
    assert!(server.log().contains("key values mismatch"), "{server}");
    let session = tls.connect(&socket(&server), "example.com").unwrap();
    assert!(is_for(&session.stream.conn.peer_certificates().unwrap()[0], &world.pair));
    server.directory.write("own.key", &new.key);
    server.reload_http(driver, &text);
    let session = world.tls().connect(&socket(&server), "example.com").unwrap();
    assert!(is_for(&session.stream.conn.peer_certificates().unwrap()[0], &new));
    assert_eq!(before.get("/").text(), "ok");
    // An address that speaks TLS no more.
    server.reload_http(driver, "server { listen %UNIX%; return 200 plain; }");
    assert_eq!(server.get("/").text(), "plain");
    before.assert_closed();
    // The log has told of the wrong key.
    server.end(Signal::TERM);
}

fn plain_http_is_answered_with_400_and_garbage_with_an_alert(driver: Driver) {
    let world = World::new();
    let server = world.server(driver, "return 200 ok; location /page { return 200 $request_uri; }");
    let answer = server.get("/");
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("The plain HTTP request was sent to HTTPS port"));
    server.wait_logged("client sent plain HTTP request to HTTPS port, client: unix:");
    // A record of a wrong type, a version that nobody has, lengths that lie, a message that is no first one.
    for garbage in [
        &b"\x16\x03\x01\x00\x05\x02\x00\x00\x01\x00"[..],
        b"\x16\x02\x01\x00\x05\x01\x00\x00\x01\x00",
        b"\x16\x03\x01\xff\xff\x01\x00\x00\x01\x00",
        b"\x16\x03\x01\x00\x00",
        b"\x80\x2e\x01\x00\x02\x00\x15\x00\x00\x00\x10",
        // A first message that would be longer than any.
        b"\x16\x03\x01\x00\x04\x01\x01\x00\x00",
    ] {
        let mut client = server.connect();
        client.send(garbage);
        let rest = client.read_to_end();
        assert!(rest.is_empty() || rest.starts_with(&[21, 3]) && rest.len() == 7, "{garbage:?}: {rest:?}");
    }
    server.wait_logged("SSL_do_handshake() failed");
    // A client that leaves in the middle.
    let mut client = server.connect();
    client.send(b"\x16\x03\x01");
    client.finish_sending();
    client.assert_closed();
    // After the handshake: a record that is none.
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
        // A body that nobody reads, in front of another request.
        let mut request = format!("POST /large HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n", large.len());
        request.push_str(&"x".repeat(large.len()));
        assert_eq!(client.ask(request).status, 405);
        assert!(client.get("/large").body == large);
    }
    server.stop();
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
        // The end of the session is told, or the client's library would fail.
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
    // Another name is another server's, whoever has the handshake.
    assert_eq!(client.get("/").status, 404);
    server.wait_logged("callback failed) while SSL handshaking, client: unix:");
    server.wait_logged("unsupported protocol) while SSL handshaking");
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
        // Without a certificate of its own: the default server's is shown, and its rules hold.
        server("bare", "ssl_verify_client on;").replace(OWN, ""),
    ]
    .concat();
    let server = world.http(driver, &text).file("ca.crt", &authority.pem).start();
    let versions: [&[_]; 2] = [&[&rustls::version::TLS13], &[&rustls::version::TLS12]];
    for versions in versions {
        let expect = |own: Option<&Pair>, name: &str, host: &str, status: u16, text: &str| {
            let tls = Tls::with(&world.authority, versions, own);
            // The second time the session goes on.
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
        // Nobody gets around the rules by another name.
        expect(None, "off", "on", 421, "");
        expect(Some(&good), "any", "on", 421, "");
        expect(None, "bare", "bare", 400, "No required SSL certificate was sent");
        expect(Some(&good), "bare", "bare", 400, "No required SSL certificate was sent");
        expect(None, "on", "off", 200, "NONE");
        // A name that nobody has is the default server's.
        expect(None, "optional", "unknown", 200, "NONE");
    }
    server.stop();
}

/// What a configuration trusts is no authority for that alone.
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

fn a_slow_client_gets_all_of_a_file(driver: Driver) {
    let world = World::new();
    let large = content(8_000_000);
    let text = format!("server {{ listen %UNIX% ssl; {OWN} root %DIR%; }}");
    let server = world.http(driver, &text).file("large", &large).start();
    let mut session = world.tls().connect(&socket(&server), "example.com").unwrap();
    assert_eq!(session.stream.conn.protocol_version(), Some(ProtocolVersion::TLSv1_3));
    session.write_all(b"GET /large HTTP/1.0\r\n\r\n").unwrap();
    // The server is done with everything else meanwhile.
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
        "PEM_read_bio_X509_AUX() failed (SSL: error:0480006C:PEM routines::no start line:Expecting: TRUSTED CERTIFICATE)",
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
    expect(&server(&format!("{OWN} ssl_protocols TLSv1;")), "no version is left in \"ssl_protocols\"");
    expect(&server(&format!("{OWN} ssl_ecdh_curve none;")), "SSL_CTX_set1_curves_list(\"none\") failed");
    expect(&server(&format!("{OWN} ssl_verify_client on;")), "for ssl_verify_client");
    expect(&server("ssl_certificate_key engine:x:y; ssl_certificate %DIR%/own.crt;"), "\"engine:\" is not supported");
    expect(&server(&format!("{OWN} ssl_session_cache shared:x:1k;")), "session cache \"shared:x:1k\" is too small");
    expect(&server(&format!("{OWN} ssl on;")), "unknown directive \"ssl\"");
}
