//! `proxy_pass https://…`: TLS handshakes with upstream servers, verification of their certificates, and requests over
//! TLS.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::version::{TLS12, TLS13};
use rustls::{HandshakeKind, RootCertStore, ServerConfig, ServerConnection, StreamOwned, SupportedProtocolVersion};

use crate::support::authority::{Authority, Pair, is_for, params};
use crate::support::{Backend, Client, Driver, Server, Setup, threads_named, with_each_driver};

with_each_driver!(
    requests_and_responses_of_any_size_are_whole,
    a_url_may_have_variables_and_a_usual_port,
    only_good_certificates_are_taken_where_they_are_verified,
    an_authority_that_was_renewed_with_the_same_key_is_trusted_beside_its_old_certificate,
    servers_are_told_the_name_only_if_that_is_asked_for,
    servers_that_ask_get_the_certificate,
    long_keys_sign_beside_the_event_loop,
    the_name_of_the_certificate_may_have_variables,
    the_name_that_is_told_may_be_that_of_the_server_that_was_chosen,
    a_health_check_tells_the_name_of_the_server_that_is_checked,
    a_connection_is_used_again_and_a_session_is_resumed,
    connections_are_told_apart_by_the_settings_for_servers,
    an_end_without_a_goodbye_is_no_end_of_a_body,
    a_handshake_that_stalls_times_out,
    a_server_that_speaks_no_tls_is_an_error,
    the_next_server_is_tried_after_a_failed_handshake,
    settings_that_cannot_be_are_errors,
);

/// A TLS upstream server.
struct Behind {
    backend: Backend,
    config: Arc<ServerConfig>,
}

/// Properties of the client as the upstream server sees them.
struct Met {
    name: Option<String>,
    is_resumed: bool,
    certificate: Option<CertificateDer<'static>>,
}

/// The upstream server's end of a connection.
struct End {
    stream: StreamOwned<ServerConnection, TcpStream>,
    says_goodbye: bool,
}

impl Read for End {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        self.stream.read(into)
    }
}

impl Write for End {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.stream.flush()
    }
}

impl Drop for End {
    fn drop(&mut self) {
        if self.says_goodbye {
            self.stream.conn.send_close_notify();
            let _ = self.stream.flush();
        }
    }
}

impl Behind {
    fn new(pair: &Pair) -> Behind {
        Behind::with(pair, &[&TLS13, &TLS12], None)
    }

    fn with(pair: &Pair, versions: &[&'static SupportedProtocolVersion], clients: Option<&Authority>) -> Behind {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let chain = CertificateDer::pem_slice_iter(pair.certificate.as_bytes()).collect::<Result<_, _>>().expect("PEM");
        let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).expect("PEM");
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_protocol_versions(versions).expect("versions");
        let builder = match clients {
            None => builder.with_no_client_auth(),
            Some(authority) => {
                let mut roots = RootCertStore::empty();
                roots
                    .add(CertificateDer::from_pem_slice(authority.pem.as_bytes()).expect("PEM"))
                    .expect("an authority");
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                builder.with_client_cert_verifier(verifier.allow_unauthenticated().build().expect("a verifier"))
            }
        };
        let config = Arc::new(builder.with_single_cert(chain, key).expect("a pair"));
        Behind { backend: Backend::tcp(), config }
    }

    fn address(&self) -> &str {
        self.backend.address()
    }

    /// Accepts the next connection and completes its handshake.
    fn try_accept(&self, says_goodbye: bool) -> std::io::Result<(Met, Client)> {
        let connection = ServerConnection::new(Arc::clone(&self.config)).expect("a configuration");
        let mut stream = StreamOwned::new(connection, self.backend.accept_tcp());
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock)?;
        }
        let met = Met {
            name: stream.conn.server_name().map(str::to_owned),
            is_resumed: stream.conn.handshake_kind() == Some(HandshakeKind::Resumed),
            certificate: stream.conn.peer_certificates().map(|chain| chain[0].clone().into_owned()),
        };
        Ok((met, Client::above(End { stream, says_goodbye })))
    }

    #[track_caller]
    fn accept(&self) -> (Met, Client) {
        self.try_accept(true).expect("a handshake")
    }
}

fn response(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

const LONG_KEY: &str = include_str!("../../crates/tls/tests/keys/rsa3072.key");

/// The name of the threads of the default pool.
const POOL: &str = "pool default";

const GET: &str = "GET / HTTP/1.1\r\nHost: a.example\r\n\r\n";

/// One worker, so that connections are reused.
fn one_worker(setup: Setup) -> Setup {
    setup.replace("worker_processes 2", "worker_processes 1")
}

/// A server that proxies every request to `behind`.
fn proxy(driver: Driver, behind: &Behind, text: &str) -> Setup {
    Setup::server(driver, &format!("location / {{ proxy_pass https://{}; {text} }}", behind.address()))
}

/// Sends a request and answers it.
#[track_caller]
fn exchange(server: &Server, behind: &Behind) -> (Met, Client) {
    let mut client = server.connect();
    client.send(GET);
    let (met, mut end) = behind.accept();
    end.request();
    end.send(response("fine"));
    assert_eq!(client.response().text(), "fine", "{server}");
    (met, end)
}

fn requests_and_responses_of_any_size_are_whole(driver: Driver) {
    let authority = Authority::new("authority");
    for versions in [&[&TLS13], &[&TLS12]] {
        for pair in [authority.ecdsa(&["example.com"]), authority.rsa(&["example.com"])] {
            let behind = Behind::with(&pair, versions, None);
            let server = proxy(driver, &behind, "client_max_body_size 0;").start();
            exchange(&server, &behind);
            let body: String = (0..40_000).map(|number| format!("{number} ")).collect();
            let mut client = server.connect();
            client.send(format!("POST /there?a=b HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n{body}", body.len()));
            let (_, mut end) = behind.accept();
            let asked = end.request();
            assert_eq!((asked.method.as_str(), asked.target.as_str()), ("POST", "/there?a=b"));
            assert_eq!(asked.header("Host"), Some(behind.address()));
            assert!(asked.text() == body);
            end.send(response(&body));
            assert!(client.response().text() == body);
            server.stop();
        }
    }
}

fn a_url_may_have_variables_and_a_usual_port(driver: Driver) {
    let authority = Authority::new("authority");
    let behind = Behind::new(&authority.ecdsa(&["example.com"]));
    let text = format!(
        "location / {{ set $there https://{}; proxy_pass $there; }}
         location /usual {{ add_header X-To \"$proxy_host $proxy_port\" always; proxy_pass https://127.0.0.1;
                            proxy_bind 127.0.0.1; proxy_connect_timeout 1; }}",
        behind.address()
    );
    let server = Setup::server(driver, &text).start();
    exchange(&server, &behind);
    let answer = server.get("/usual");
    assert_eq!((answer.status, answer.header("X-To")), (502, Some("127.0.0.1 443")));
    server.directory.wait_line("error.log", "upstream: \"https://127.0.0.1:443/usual\"");
    server.stop();
}

fn only_good_certificates_are_taken_where_they_are_verified(driver: Driver) {
    let (authority, stranger) = (Authority::new("authority"), Authority::new("stranger"));
    let good = authority.ecdsa(&["example.com", "*.sub.example.com", "127.0.0.1"]);
    let named = "proxy_ssl_name example.com;";
    let cases = [
        (&good, named, None),
        (&good, "proxy_ssl_name a.sub.EXAMPLE.com:443;", None),
        (&good, "", None),
        (&good, "proxy_ssl_name $arg_no;", Some("upstream SSL certificate does not match \"\"")),
        (
            &good,
            "proxy_ssl_name example.org;",
            Some("upstream SSL certificate does not match \"example.org\" while SSL handshaking to upstream"),
        ),
        (&stranger.ecdsa(&["example.com"]), named, Some("upstream SSL certificate verify error: (2")),
        (
            &expired(&authority, "example.com"),
            named,
            Some("upstream SSL certificate verify error: (10:certificate has expired) while SSL handshaking"),
        ),
    ];
    for versions in [&[&TLS13], &[&TLS12]] {
        for (pair, text, error) in &cases {
            let behind = Behind::with(pair, versions, None);
            let text = format!("proxy_ssl_verify on; proxy_ssl_trusted_certificate %DIR%/ca.crt; {text}");
            let server = proxy(driver, &behind, &text).file("ca.crt", &authority.pem).start();
            let Some(error) = error else {
                exchange(&server, &behind);
                continue;
            };
            let mut client = server.connect();
            client.send(GET);
            // With TLS 1.3 the handshake may end before the client rejects the certificate; no request follows.
            if let Ok((_, mut end)) = behind.try_accept(false) {
                assert_eq!(end.read_to_end(), b"");
            }
            assert_eq!(client.response().status, 502);
            server.directory.wait_line("error.log", error);
            server.stop();
        }
    }
}

fn an_authority_that_was_renewed_with_the_same_key_is_trusted_beside_its_old_certificate(driver: Driver) {
    let authority = Authority::new("authority");
    let expired = authority.renewed("authority", |params| params.not_after = rcgen::date_time_ymd(2002, 1, 1));
    let behind = Behind::new(&authority.ecdsa(&["example.com"]));
    let text = "proxy_ssl_verify on; proxy_ssl_name example.com; proxy_ssl_trusted_certificate %DIR%/ca.crt; \
        proxy_ssl_crl %DIR%/crl.pem;";
    for trusted in [[expired.as_str(), &authority.pem], [&authority.pem, expired.as_str()]] {
        let setup = proxy(driver, &behind, text).file("ca.crt", trusted.concat());
        let server = setup.file("crl.pem", authority.revocations()).start();
        exchange(&server, &behind);
        server.stop();
    }
}

fn servers_are_told_the_name_only_if_that_is_asked_for(driver: Driver) {
    let authority = Authority::new("authority");
    let behind = Behind::new(&authority.ecdsa(&["example.com"]));
    for (text, name) in [
        ("", None),
        ("proxy_ssl_name example.com;", None),
        ("proxy_ssl_server_name on;", None),
        ("proxy_ssl_server_name on; proxy_ssl_name $host:8443;", Some("a.example")),
        ("proxy_ssl_server_name on; proxy_ssl_name \"not a name\";", None),
    ] {
        let server = proxy(driver, &behind, text).start();
        assert_eq!(exchange(&server, &behind).0.name.as_deref(), name, "{text}");
        server.stop();
    }
}

fn servers_that_ask_get_the_certificate(driver: Driver) {
    let authority = Authority::new("authority");
    let own = authority.ecdsa(&["a client"]);
    for versions in [&[&TLS13], &[&TLS12]] {
        let behind = Behind::with(&authority.ecdsa(&["example.com"]), versions, Some(&authority));
        let pair = "proxy_ssl_certificate %DIR%/own.crt; proxy_ssl_certificate_key %DIR%/own.key;";
        for (text, is_shown) in [(pair, true), ("", false)] {
            let setup = proxy(driver, &behind, text).file("own.crt", &own.certificate).file("own.key", &own.key);
            let server = setup.start();
            let shown = exchange(&server, &behind).0.certificate;
            assert_eq!(shown.map(|shown| is_for(&shown, &own)), is_shown.then_some(true));
            server.stop();
        }
    }
}

fn long_keys_sign_beside_the_event_loop(driver: Driver) {
    let authority = Authority::new("authority");
    let key = rcgen::KeyPair::from_pem_and_sign_algo(LONG_KEY, &rcgen::PKCS_RSA_SHA256).expect("a key");
    let own = authority.sign(params(&["a client"]), key);
    let text = "proxy_ssl_certificate %DIR%/own.crt; proxy_ssl_certificate_key %DIR%/own.key;";
    for versions in [&[&TLS13], &[&TLS12]] {
        let behind = Behind::with(&authority.ecdsa(&["example.com"]), versions, Some(&authority));
        let server = proxy(driver, &behind, text).file("own.crt", &own.certificate).file("own.key", &own.key).start();
        assert_eq!(threads_named(server.worker(), POOL), 0);
        let shown = exchange(&server, &behind).0.certificate;
        assert!(shown.is_some_and(|shown| is_for(&shown, &own)));
        assert!(threads_named(server.worker(), POOL) > 0);
        server.stop();
    }
}

fn the_name_of_the_certificate_may_have_variables(driver: Driver) {
    let authority = Authority::new("authority");
    let (first, second) = (authority.ecdsa(&["first"]), authority.ecdsa(&["second"]));
    let behind = Behind::with(&authority.ecdsa(&["example.com"]), &[&TLS13], Some(&authority));
    let text = format!(
        "upstream behind {{ server {}; keepalive 4; }} server {{ listen %UNIX%; location / {{
         proxy_pass https://behind; proxy_http_version 1.1; proxy_set_header Connection '';
         proxy_ssl_certificate %DIR%/$arg_own.crt; proxy_ssl_certificate_key %DIR%/$arg_own.key; }}
         location /none {{ proxy_pass https://behind; proxy_ssl_certificate $arg_own;
         proxy_ssl_certificate_key $arg_own; }} }}",
        behind.address()
    );
    let setup = one_worker(Setup::http(driver, &text));
    let setup = setup.file("1.crt", &first.certificate).file("1.key", &first.key);
    let server = setup.file("2.crt", &second.certificate).file("2.key", &second.key).start();
    let ask = |target: &str| {
        let mut client = server.connect();
        client.send(format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n"));
        client
    };
    let mut kept = Vec::new();
    for (target, shown) in [("/?own=1", Some(&first)), ("/?own=2", Some(&second)), ("/none", None)] {
        let mut client = ask(target);
        let (met, mut end) = behind.accept();
        assert_eq!(met.certificate.is_some(), shown.is_some());
        assert!(met.certificate.zip(shown).is_none_or(|(certificate, pair)| is_for(&certificate, pair)), "{target}");
        assert!(!met.is_resumed, "{target}");
        end.request();
        end.send(response("fine"));
        assert_eq!(client.response().text(), "fine");
        kept.push(end);
    }
    // The connection with the same certificate is reused.
    let mut client = ask("/?own=1");
    kept[0].request();
    kept[0].send(response("again"));
    assert_eq!(client.response().text(), "again");
    // A certificate that cannot be read is a configuration error.
    assert_eq!(ask("/?own=3").response().status, 500);
    server.wait_logged("3.crt\": BIO_new_file() failed");
    drop(kept);
}

fn the_name_that_is_told_may_be_that_of_the_server_that_was_chosen(driver: Driver) {
    let authority = Authority::new("authority");
    let behind = Behind::new(&authority.ecdsa(&["localhost", "two.example"]));
    let port = behind.address().rsplit(':').next().expect("a port");
    let text = format!(
        "map $upstream_last_server_name $name {{ volatile; ~^localhost: $upstream_last_server_name;
             127.0.0.1:{port} two.example; }}
         upstream behind {{ server localhost:{port} max_fails=0; server 127.0.0.1:{port} max_fails=0 backup;
             keepalive 4; }}
         server {{ listen %UNIX%; location / {{ proxy_pass https://behind; proxy_next_upstream error http_503;
             proxy_ssl_server_name on; proxy_ssl_name $name; proxy_ssl_verify on;
             proxy_ssl_trusted_certificate %DIR%/ca.crt;
             add_header X-Last $upstream_last_server_name; }} }}"
    );
    let server = one_worker(Setup::http(driver, &text).file("ca.crt", &authority.pem)).start();
    let mut client = server.connect();
    client.send(GET);
    let (met, mut first) = behind.accept();
    assert_eq!(met.name.as_deref(), Some("localhost"));
    first.request();
    first.send("HTTP/1.1 503 x\r\nContent-Length: 0\r\n\r\n");
    let (met, mut second) = behind.accept();
    assert_eq!(met.name.as_deref(), Some("two.example"));
    second.request();
    second.send(response("fine"));
    let answer = client.response();
    assert_eq!((answer.text(), answer.header("x-last")), ("fine", Some(&*format!("127.0.0.1:{port}"))));
    // Both connections to the same address are idle: each is reused for its own name only.
    client.send(GET);
    first.request();
    first.send(response("again"));
    let answer = client.response();
    assert_eq!((answer.text(), answer.header("x-last")), ("again", Some(&*format!("localhost:{port}"))));
    server.stop();
}

fn a_health_check_tells_the_name_of_the_server_that_is_checked(driver: Driver) {
    let authority = Authority::new("authority");
    let behind = Behind::new(&authority.ecdsa(&["localhost"]));
    let port = behind.address().rsplit(':').next().expect("a port");
    let text = format!(
        "upstream behind {{ server localhost:{port}; }}
         server {{ listen %UNIX%; location / {{ proxy_pass https://behind; health_check interval=1h mandatory;
             proxy_set_header Host $upstream_last_server_name;
             proxy_ssl_server_name on; proxy_ssl_name $upstream_last_server_name; }} }}"
    );
    let server = one_worker(Setup::http(driver, &text)).start();
    let (met, mut end) = behind.accept();
    assert_eq!(met.name.as_deref(), Some("localhost"));
    assert_eq!(end.request().header("host"), Some(&*format!("localhost:{port}")));
    server.stop();
}

fn a_connection_is_used_again_and_a_session_is_resumed(driver: Driver) {
    let authority = Authority::new("authority");
    for (versions, reuse) in [(&[&TLS13], "on"), (&[&TLS12], "on"), (&[&TLS13], "off")] {
        let behind = Behind::with(&authority.ecdsa(&["example.com"]), versions, None);
        let group = format!(
            "upstream behind {{ server {}; keepalive 4; }} server {{ listen %UNIX%; location / {{
             proxy_pass https://behind; proxy_http_version 1.1; proxy_set_header Connection ''; 
             proxy_ssl_name example.com; proxy_ssl_session_reuse {reuse}; }} }}",
            behind.address()
        );
        let server = one_worker(Setup::http(driver, &group)).start();
        let (met, mut end) = exchange(&server, &behind);
        assert!(!met.is_resumed);
        for _ in 0..3 {
            let mut client = server.connect();
            client.send(GET);
            end.request();
            end.send(response("again"));
            assert_eq!(client.response().text(), "again");
        }
        assert!(behind.backend.is_idle());
        // The server has closed the connection: another is opened and resumes the session.
        drop(end);
        assert_eq!(exchange(&server, &behind).0.is_resumed, reuse == "on");
        server.stop();
    }
}

fn connections_are_told_apart_by_the_settings_for_servers(driver: Driver) {
    let authority = Authority::new("authority");
    let behind = Behind::new(&authority.ecdsa(&["example.com"]));
    let group = format!(
        "upstream behind {{ server {}; keepalive 4; }} server {{ listen %UNIX%; 
         proxy_http_version 1.1; proxy_set_header Connection ''; proxy_ssl_name $arg_name;
         location / {{ proxy_pass https://behind; }}
         location /verified {{ proxy_pass https://behind; proxy_ssl_verify on;
         proxy_ssl_trusted_certificate %DIR%/ca.crt; }} }}",
        behind.address()
    );

    let server = one_worker(Setup::http(driver, &group).file("ca.crt", &authority.pem)).start();
    let mut ends = Vec::new();
    for path in ["/?name=example.com", "/?name=example.org", "/verified?name=example.com"] {
        let mut client = server.connect();
        client.send(format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n"));
        let (_, mut end) = behind.accept();
        end.request();
        end.send(response("fine"));
        assert_eq!(client.response().text(), "fine");
        ends.push(end);
    }
    server.stop();
}

fn an_end_without_a_goodbye_is_no_end_of_a_body(driver: Driver) {
    let authority = Authority::new("authority");
    for versions in [&[&TLS13], &[&TLS12]] {
        let behind = Behind::with(&authority.ecdsa(&["example.com"]), versions, None);
        let server = proxy(driver, &behind, "").start();
        for says_goodbye in [true, false] {
            let mut client = server.connect();
            client.send("GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
            let (_, mut end) = behind.try_accept(says_goodbye).expect("a handshake");
            end.request();
            end.send("HTTP/1.1 200 OK\r\n\r\nall of it, or not");
            drop(end);
            let received = client.read_to_end();
            assert_eq!(received.ends_with(b"0\r\n\r\n"), says_goodbye, "{}", String::from_utf8_lossy(&received));
        }
        let message = "upstream prematurely closed connection without close_notify while reading upstream";
        server.directory.wait_line("error.log", message);
        // A body with a known length is complete without a close_notify.
        let mut client = server.connect();
        client.send(GET);
        let (_, mut end) = behind.try_accept(false).expect("a handshake");
        end.request();
        end.send(response("whole"));
        drop(end);
        assert_eq!(client.response().text(), "whole");
        server.stop();
    }
}

fn a_handshake_that_stalls_times_out(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!("location / {{ proxy_pass https://{}; proxy_connect_timeout 1s; }}", backend.address());
    let server = Setup::server(driver, &text).start();
    let mut client = server.connect();
    client.send(GET);
    let silent = backend.accept_tcp();
    assert_eq!(client.response().status, 504);
    drop(silent);
    let message = "upstream timed out (110: Connection timed out) while SSL handshaking to upstream";
    server.directory.wait_line("error.log", message);
    server.stop();
}

fn a_server_that_speaks_no_tls_is_an_error(driver: Driver) {
    let backend = Backend::tcp();
    let server = Setup::server(driver, &format!("location / {{ proxy_pass https://{}; }}", backend.address())).start();
    for (answer, message) in [
        ("", "peer closed connection in SSL handshake while SSL handshaking to upstream"),
        ("HTTP/1.1 400 Bad Request\r\n\r\n", "wrong version number) while SSL handshaking to upstream"),
    ] {
        let mut client = server.connect();
        client.send(GET);
        let mut plain = backend.accept_tcp();
        let mut hello = [0; 5];
        plain.read_exact(&mut hello).expect("the first record");
        assert_eq!(hello[0], 22);
        plain.write_all(answer.as_bytes()).expect("room");
        plain.shutdown(std::net::Shutdown::Write).expect("open");
        assert_eq!(client.response().status, 502);
        server.directory.wait_line("error.log", message);
    }
    server.stop();
}

fn the_next_server_is_tried_after_a_failed_handshake(driver: Driver) {
    let (authority, stranger) = (Authority::new("authority"), Authority::new("stranger"));
    let good = Behind::new(&authority.ecdsa(&["example.com"]));
    let bad = Behind::new(&stranger.ecdsa(&["example.com"]));
    let group = format!(
        "upstream both {{ server {}; server {} backup; }} server {{ listen %UNIX%; location / {{
         proxy_pass https://both; proxy_ssl_verify on; proxy_ssl_trusted_certificate %DIR%/ca.crt;
         proxy_ssl_name example.com; }} }}",
        bad.address(),
        good.address()
    );
    let server = Setup::http(driver, &group).file("ca.crt", &authority.pem).start();
    let mut client = server.connect();
    client.send(GET);
    if let Ok((_, mut end)) = bad.try_accept(false) {
        assert_eq!(end.read_to_end(), b"");
    }
    let (_, mut end) = good.accept();
    end.request();
    end.send(response("the next one"));
    assert_eq!(client.response().text(), "the next one");
    server.stop();
}

fn settings_that_cannot_be_are_errors(driver: Driver) {
    for (text, message) in [
        ("proxy_ssl_verify on;", "no proxy_ssl_trusted_certificate for proxy_ssl_verify"),
        (
            "proxy_ssl_certificate %DIR%/none.crt;",
            "no \"proxy_ssl_certificate_key\" is defined for certificate \"%DIR%/none.crt\"",
        ),
        (
            "proxy_ssl_certificate %DIR%/none.crt; proxy_ssl_certificate_key %DIR%/none.key;",
            "cannot load certificate \"%DIR%/none.crt\"",
        ),
        (
            "proxy_ssl_verify on; proxy_ssl_trusted_certificate %DIR%/none.crt;",
            "cannot load certificate \"%DIR%/none.crt\": BIO_new_file() failed",
        ),
        ("proxy_ssl_conf_command Nothing x;", "SSL_CONF_cmd(\"Nothing\", \"x\") failed"),
        ("proxy_ssl_certificate_cache valid=1s;", "\"proxy_ssl_certificate_cache\" must have the \"max\" parameter"),
        ("proxy_ssl_ciphers RC4;", "SSL_CTX_set_cipher_list(\"RC4\") failed"),
        ("proxy_ssl_protocols SSLv3;", "no supported protocol version is left in"),
    ] {
        let text = format!("location / {{ proxy_pass https://127.0.0.1:1; {text} }}");
        let setup = Setup::server(driver, &text);
        let mut server = setup.launch();
        assert!(!server.wait_exited().success(), "{text}");
        let said = server.stderr();
        let message = message.replace("%DIR%", &server.directory.path().display().to_string());
        assert!(said.contains(&message), "{message}: {said}");
    }
}

fn expired(authority: &Authority, name: &str) -> Pair {
    let mut params = params(&[name]);
    params.not_before = rcgen::date_time_ymd(2001, 1, 1);
    params.not_after = rcgen::date_time_ymd(2002, 1, 1);
    authority.sign(params, rcgen::KeyPair::generate().expect("a key"))
}
