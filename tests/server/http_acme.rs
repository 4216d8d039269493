//! `acme_issuer`, `acme_certificate`: certificates are obtained, kept and renewed, from an independent ACME server that
//! fails as a test asks.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use rustls::client::danger::ServerCertVerifier;
use serde_json::json;

use crate::support::authority::Authority;
use crate::support::issuer::{AcmeServer, Fault, Place};
use crate::support::scratch::Scratch;
use crate::support::tls::{AnyCertificate, Tls};
use crate::support::{self, Backend, DEADLINE, Driver, Server, Setup, http_configuration, skip, with_each_driver};

with_each_driver!(
    certificate_is_obtained_over_http_whatever_the_configuration_answers,
    certificate_is_obtained_over_tls_whatever_the_configuration_presents,
    a_certificate_is_obtained_over_an_address_of_stream,
    ocsp_response_is_stapled_to_an_obtained_certificate,
    restart_and_reload_keep_obtained_certificates,
    a_certificate_is_renewed_when_the_issuer_wants_it,
    a_name_that_cannot_be_verified_is_tried_again_after_a_reload,
    an_issuer_that_has_too_much_to_do_is_asked_later,
    an_issuer_that_fails_leaves_everything_as_it_is,
    an_account_is_bound_to_one_that_the_issuer_knows,
    challenge_is_answered_by_another_process,
    failure_to_obtain_a_certificate_is_logged,
    settings_that_cannot_be_are_errors,
    the_variables_may_be_used_beside_others,
    pebble_issues_over_both_challenges,
);

const ISSUED: &str = "certificate for \"a.example\" issued";

/// A server on `%UNIX%` with an ACME certificate; `issuer` and `rest` are added to the blocks.
fn text(acme: &AcmeServer, issuer: &str, rest: &str) -> String {
    format!(
        "acme_issuer one {{
             uri {};
             ssl_trusted_certificate %DIR%/root.pem;
             {issuer}
         }}
         server {{
             listen %UNIX% ssl;
             server_name a.example;
             acme_certificate one;
             ssl_certificate $acme_certificate;
             ssl_certificate_key $acme_certificate_key;
             location / {{ return 200 fine; }}
             {rest}
         }}
         server {{
             listen %TCP%;
             server_name elsewhere.example;
             deny all;
             return 301 https://elsewhere.example/;
         }}",
        acme.uri()
    )
}

/// Settings that most tests need.
const USUAL: &str = "accept_terms_of_service; state_path %DIR%/state;";

fn setup(driver: Driver, acme: &AcmeServer, issuer: &str, rest: &str) -> Setup {
    Setup::http(driver, &text(acme, issuer, rest)).file("root.pem", &acme.root_pem)
}

/// Starts the server and validates challenges at its addresses.
fn start(setup: Setup, acme: &AcmeServer) -> Server {
    let server = setup.start();
    acme.set_place(Place::Tcp(server.directory.address(1)));
    server
}

/// The certificate that clients get under this name.
#[track_caller]
fn shown(server: &Server, name: &str) -> Vec<u8> {
    let tls = Tls::new(&Authority::new("nobody")).verified_by(Arc::new(AnyCertificate::default()));
    let session = tls.connect(&server.directory.path().join("gale.sock"), name).expect("a handshake");
    session.stream.conn.peer_certificates().expect("a chain")[0].to_vec()
}

/// Asserts that a client which only trusts the issuer gets an answer.
#[track_caller]
fn assert_trusted(server: &Server, acme: &AcmeServer, name: &str) {
    let mut client = Tls::new(&acme.authority).client(&server.directory.path().join("gale.sock"), name);
    let answer = client.ask(format!("GET / HTTP/1.1\r\nHost: {name}\r\n\r\n"));
    assert_eq!((answer.status, answer.text()), (200, "fine"));
}

#[track_caller]
fn assert_not_trusted(server: &Server, acme: &AcmeServer, name: &str) {
    let session = Tls::new(&acme.authority).connect(&server.directory.path().join("gale.sock"), name);
    assert!(session.is_err(), "{server}");
}

fn certificate_is_obtained_over_http_whatever_the_configuration_answers(driver: Driver) {
    let acme = AcmeServer::start();
    let contacts = "contact admin@a.example; contact mailto:b@a.example;";
    let server = setup(driver, &acme, &format!("{USUAL} {contacts}"), "").start();
    // Until validation clients get a self-signed certificate, which is logged.
    server.wait_logged("no certificate for \"a.example\" yet: clients get a self-signed one");
    assert_not_trusted(&server, &acme, "a.example");
    acme.set_place(Place::Tcp(server.directory.address(1)));
    server.wait_logged(ISSUED);
    assert_trusted(&server, &acme, "a.example");

    let account = &acme.seen("/account")[0];
    assert_eq!(account.2["contact"], json!(["mailto:admin@a.example", "mailto:b@a.example"]));
    let order = &acme.seen("/new-order")[0].2;
    assert_eq!(order, &json!({ "identifiers": [{ "type": "dns", "value": "a.example" }] }));
    // The challenge was answered before all rules; other requests are not.
    let answer = server.connect_tcp(1).get("/.well-known/acme-challenge/token-0_0");
    assert_eq!(answer.status, 301);
    let state = server.directory.path().join("state");
    let mode = |path: &std::path::Path| std::fs::metadata(path).expect("it is there").permissions().mode() & 0o777;
    assert_eq!(mode(&state), 0o700);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&state).expect("a directory") {
        let entry = entry.expect("an entry");
        names.push(entry.file_name().into_string().expect("text"));
        if entry.file_type().expect("a type").is_file() {
            assert_eq!(mode(&entry.path()), 0o600, "{names:?}");
        }
    }
    names.sort();
    let [account, key, challenges, lock] = ["account.json", "account.key", "challenges", "lock"].map(str::to_owned);
    let own = names.iter().position(|name| name.starts_with("a.example-")).map(|place| names.remove(place));
    assert!(own.is_some_and(|own| own.ends_with(".pem")));
    assert_eq!(names, [account, key, challenges, lock]);
    server.stop();
}

fn certificate_is_obtained_over_tls_whatever_the_configuration_presents(driver: Driver) {
    let acme = AcmeServer::start();
    let rest = "ssl_verify_client on; ssl_client_certificate %DIR%/root.pem;";
    let refusing = "server { listen %UNIX% ssl default_server; ssl_reject_handshake on; }";
    let server = setup(driver, &acme, &format!("{USUAL} challenge tls-alpn;"), rest);
    let server =
        server.replace("server {\n             listen %TCP%;", &format!("{refusing} server {{ listen %TCP%;")).start();
    let path = server.directory.path().join("gale.sock");
    acme.set_place(Place::Unix(path.clone()));
    server.wait_logged(ISSUED);
    assert_eq!(acme.seen("/challenge/0/0/tls-alpn-01").len(), 1);
    let mut client = Tls::new(&acme.authority).client(&path, "a.example");
    assert_eq!(client.ask("GET / HTTP/1.1\r\nHost: a.example\r\n\r\n").status, 400);
    // Challenges are no longer answered.
    let late = Tls::new(&acme.authority).verified_by(Arc::new(AnyCertificate::default())).alpn(&["acme-tls/1"]);
    assert!(late.connect(&path, "a.example").is_err());
    server.stop();
}

fn a_certificate_is_obtained_over_an_address_of_stream(driver: Driver) {
    let acme = AcmeServer::start();
    let http = text(&acme, &format!("{USUAL} challenge tls-alpn;"), "");
    let own = "ssl_certificate %DIR%/own.pem; ssl_certificate_key %DIR%/own.pem;";
    let blocks = format!(
        "http {{ client_body_temp_path %DIR%/body; access_log off; {http} }}
         stream {{
             log_format line '$status $protocol';
             server {{
                 listen %TCP2% ssl default_server; server_name elsewhere.example; {own} ssl_alpn none;
                 ssl_verify_client on; ssl_client_certificate %DIR%/root.pem;
                 return hello; access_log %DIR%/access.log line;
             }}
             server {{ listen %TCP2% ssl; server_name a.example; ssl_reject_handshake on; }}
         }}"
    );
    let pair = acme.authority.ecdsa(&["elsewhere.example"]);
    let setup = Setup::configuration(&support::configuration(driver, &blocks)).file("root.pem", &acme.root_pem);
    let server = setup.file("own.pem", pair.certificate + &pair.key).start();
    acme.set_place(Place::Tcp(server.directory.address(2)));
    server.wait_logged(ISSUED);
    assert_trusted(&server, &acme, "a.example");
    server.directory.wait_line("access.log", "200 TCP");
    server.stop();
}

fn ocsp_response_is_stapled_to_an_obtained_certificate(driver: Driver) {
    let acme = AcmeServer::start();
    let later = ("2080-01-01T00:00:00Z", "2080-01-02T00:00:00Z");
    acme.set_windows(&[("2025-01-01T00:00:00Z", "2025-01-02T00:00:00Z"), later]);
    let responder = Backend::tcp();
    let rest = format!(
        "ssl_stapling on; ssl_stapling_responder http://{}/ocsp; ssl_trusted_certificate %DIR%/authority.pem;
         ssl_stapling_file %DIR%/none;",
        responder.address()
    );
    let setup = setup(driver, &acme, USUAL, &rest).file("authority.pem", &acme.authority.pem);
    let mut server = start(setup, &acme);
    server.wait_logged(ISSUED);
    assert!(server.stderr().contains("\"ssl_stapling_file\" has no effect with a certificate from an ACME issuer"));
    let stapled = |server: &Server| {
        let verifier = Arc::new(AnyCertificate::default());
        let tls = Tls::new(&acme.authority).verified_by(Arc::clone(&verifier) as Arc<dyn ServerCertVerifier>);
        tls.connect(&server.directory.path().join("gale.sock"), "a.example").expect("a handshake");
        verifier.stapled()
    };
    let wait_stapled = |server: &Server, expected: &[u8]| {
        let deadline = Instant::now() + DEADLINE;
        while stapled(server) != expected {
            assert!(Instant::now() < deadline, "{server}");
            std::thread::yield_now();
        }
    };
    let first = answer_ocsp(&responder);
    wait_stapled(&server, &first);
    // Another certificate does not inherit the first one's OCSP response, and its own is requested at once.
    server.reload_http(driver, &text(&acme, USUAL, &rest));
    server.wait_logged("certificate for \"a.example\" renewed");
    let second = answer_ocsp(&responder);
    assert_ne!(first, second);
    wait_stapled(&server, &second);
    server.reload_http(driver, &text(&acme, USUAL, ""));
    assert!(stapled(&server).is_empty(), "this server does not staple");
    server.stop();
}

/// Answers a responder's next OCSP request: the certificate is good. Returns the answer.
#[track_caller]
fn answer_ocsp(responder: &Backend) -> Vec<u8> {
    let mut asked = responder.accept();
    let target = asked.request().target;
    let text = target.strip_prefix("/ocsp/").expect("the path of the directive");
    let text = text.replace("%2B", "-").replace("%2F", "_").replace("%3D", "");
    let request = gale_tls::from_base64_url(text.as_bytes()).expect("base64");
    // The request, its signed part, the list, one request: then the certificate's identifier.
    let id = (0..4).fold(&request[..], |element, _| &element[2..]);
    let times = [&b"20250101000000Z"[..], b"20900101000000Z"].map(|time| element(0x18, &[time]));
    let single = element(0x30, &[id, b"\x80\x00", &times[0], &element(0xa0, &[&times[1]])]);
    let by = element(0xa2, &[&element(0x04, &[&[1; 20]])]);
    let told = element(0x30, &[&by, &times[0], &element(0x30, &[&single])]);
    // ecdsa-with-SHA256, and a signature that is not verified.
    let algorithm = element(0x30, &[b"\x06\x08\x2a\x86\x48\xce\x3d\x04\x03\x02"]);
    let basic = element(0x30, &[&told, &algorithm, &element(0x03, &[b"\0signed"])]);
    let kind = b"\x06\x09\x2b\x06\x01\x05\x05\x07\x30\x01\x01";
    let typed = element(0x30, &[kind, &element(0x04, &[&basic])]);
    let response = element(0x30, &[b"\x0a\x01\x00", &element(0xa0, &[&typed])]);
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/ocsp-response\r\nContent-Length: {}\r\n\r\n",
        response.len()
    );
    asked.send([head.as_bytes(), &response].concat());
    asked.finish_sending();
    response
}

/// A DER element.
fn element(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let content = parts.concat();
    let length = u8::try_from(content.len()).expect("short");
    let head: &[u8] = if length < 0x80 { &[tag, length] } else { &[tag, 0x81, length] };
    [head, &content].concat()
}

fn restart_and_reload_keep_obtained_certificates(driver: Driver) {
    let acme = AcmeServer::start();
    let scratch = Scratch::new();
    std::fs::set_permissions(scratch.path(), PermissionsExt::from_mode(0o755)).expect("ours");
    let issuer = format!("accept_terms_of_service; state_path {}/state;", scratch.path().display());
    let mut server = start(setup(driver, &acme, &issuer, ""), &acme);
    server.wait_logged(ISSUED);
    let own = shown(&server, "a.example");
    // An additional name requires another certificate; until it arrives the present one is used.
    let more = text(&acme, &issuer, "").replace("server_name a.example", "server_name a.example b.example");
    acme.fail("/new-order", Fault::Refused { status: 503, kind: "serverInternal", retry_after: None });
    server.reload_http(driver, &more);
    server.wait_logged("no certificate for \"a.example, b.example\" yet: clients get an earlier one");
    server.wait_logged("certificate for \"a.example, b.example\": the issuer rejected the request with status 503");
    assert_eq!(shown(&server, "a.example"), own);
    server.reload_http(driver, &text(&acme, &issuer, ""));
    assert_eq!(shown(&server, "a.example"), own);
    server.stop();

    // A valid stored certificate needs no issuer.
    let (again, accounts) = (setup(driver, &acme, &issuer, ""), acme.seen("/account").len());
    let uri = acme.uri();
    let authority = Arc::clone(&acme.authority);
    acme.stop();
    let server = again.start();
    assert_eq!(shown(&server, "a.example"), own);
    let mut client = Tls::new(&authority).client(&server.directory.path().join("gale.sock"), "a.example");
    assert_eq!(client.ask("GET / HTTP/1.1\r\nHost: a.example\r\n\r\n").text(), "fine");
    server.wait_logged("no renewal information for \"a.example\"");
    server.stop();
    assert!(accounts == 1 && uri.starts_with("https://"));
}

fn a_certificate_is_renewed_when_the_issuer_wants_it(driver: Driver) {
    let acme = AcmeServer::start();
    // The first window has passed, so the certificate is due for renewal; the second one is in the future.
    let later = ("2080-01-01T00:00:00Z", "2080-01-02T00:00:00Z");
    acme.set_windows(&[("2025-01-01T00:00:00Z", "2025-01-02T00:00:00Z"), later]);
    let mut server = start(setup(driver, &acme, USUAL, ""), &acme);
    server.wait_logged(ISSUED);
    let first = shown(&server, "a.example");
    // A reload asks at once; otherwise a minute would pass.
    server.reload_http(driver, &text(&acme, USUAL, ""));
    server.wait_logged("certificate for \"a.example\" renewed");
    assert_ne!(shown(&server, "a.example"), first);
    assert_trusted(&server, &acme, "a.example");
    let asked = acme.seen("/info/")[0].0.clone();
    let replaces = &acme.seen("/new-order")[1].2["replaces"];
    assert_eq!(Some(asked.as_str()), replaces.as_str().map(|id| format!("/info/{id}")).as_deref());
    // The account is the same.
    assert_eq!(acme.seen("/account").len(), 1);
    server.stop();
}

fn a_name_that_cannot_be_verified_is_tried_again_after_a_reload(driver: Driver) {
    let acme = AcmeServer::start();
    let nobody = Scratch::new();
    let socket = std::os::unix::net::UnixListener::bind(nobody.path().join("s")).expect("a socket");
    let refusing = std::thread::spawn(move || {
        let mut client = support::Client::of(socket.accept().expect("the issuer").0);
        client.request();
        client.send("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n");
    });
    let mut server = setup(driver, &acme, USUAL, "").start();
    acme.set_place(Place::Unix(nobody.path().join("s")));
    let line = server.wait_logged("the issuer could not validate it");
    assert!(line.contains("http-01 for \"a.example\": incorrectResponse: status 404 for a.example"), "{line}");
    assert!(line.contains("next try in "), "{line}");
    refusing.join().expect("somebody has asked");
    assert_not_trusted(&server, &acme, "a.example");
    acme.set_place(Place::Tcp(server.directory.address(1)));
    server.reload_http(driver, &text(&acme, USUAL, ""));
    server.wait_logged(ISSUED);
    assert_trusted(&server, &acme, "a.example");
    server.stop();
}

fn an_issuer_that_has_too_much_to_do_is_asked_later(driver: Driver) {
    let acme = AcmeServer::start();
    for path in ["/account", "/new-order", "/new-order", "/authorization", "/finalize"] {
        acme.fail(path, Fault::BadNonce);
    }
    acme.fail("/directory", Fault::Refused { status: 429, kind: "rateLimited", retry_after: Some("1") });
    acme.fail("/new-order", Fault::Refused { status: 429, kind: "rateLimited", retry_after: Some("1") });
    let server = start(setup(driver, &acme, USUAL, ""), &acme);
    server.wait_logged_times("rejected the request with status 429 (rateLimited: because); next try in 2 s", 2);
    server.wait_logged(ISSUED);
    assert_trusted(&server, &acme, "a.example");
    server.stop();
}

fn an_issuer_that_fails_leaves_everything_as_it_is(driver: Driver) {
    let acme = AcmeServer::start();
    let stranger = Authority::new("stranger").ecdsa(&["a.example"]);
    let mut server = start(setup(driver, &acme, USUAL, ""), &acme);
    server.wait_logged(ISSUED);
    let own = shown(&server, "a.example");
    // Another name repeats the whole procedure, each time with another fault.
    let answer = |text: &str| Fault::Answer(text.as_bytes().to_vec());
    let faults = [
        ("/directory", answer("<html>"), "the issuer sent an invalid response: expected value"),
        ("/directory", answer("{}"), "the issuer sent an invalid response: not an ACME directory"),
        ("/directory", Fault::Answer(vec![b' '; 300 * 1024]), "the issuer sent an invalid response: response too long"),
        ("/new-order", Fault::Closed, "issuer prematurely closed connection"),
        ("/new-order", answer("[1"), "the issuer sent an invalid response"),
        ("/new-order", answer("{}"), "the issuer sent an invalid response: no URL in \"Location\""),
        ("/certificate", answer("-----BEGIN CERTIFICATE-----\nAAAA"), "the issuer sent an invalid response"),
        ("/certificate", answer(&stranger.certificate), "the certificate is not for \"b0.example\""),
    ];
    let named = |number: usize| {
        text(&acme, USUAL, "").replace("server_name a.example", &format!("server_name a.example b{number}.example"))
    };
    for (number, (path, fault, message)) in faults.into_iter().enumerate() {
        if matches!(fault, Fault::Closed) {
            // The server may have closed the connection that was kept open.
            acme.fail(path, Fault::Closed);
        }
        acme.fail(path, fault);
        server.reload_http(driver, &named(number));
        let line = server.wait_logged(&format!("certificate for \"a.example, b{number}.example\": "));
        assert!(line.contains(&message.replace("b0", &format!("b{number}"))), "{line}");
        assert_eq!(shown(&server, "a.example"), own);
    }
    let (address, uri) = (acme.address(), acme.uri());
    acme.stop();
    let down = http_configuration(driver, &named_with(&uri, "c.example"));
    server.reload(&down);
    let line = server.wait_logged("certificate for \"a.example, c.example\": ");
    assert!(
        line.contains(&format!(
            "connect() failed (111: Connection refused) while connecting to issuer, issuer: {address}"
        )),
        "{line}"
    );
    server.stop();
}

fn named_with(uri: &str, name: &str) -> String {
    format!(
        "acme_issuer one {{ uri {uri}; ssl_trusted_certificate %DIR%/root.pem; {USUAL} }}
         server {{ listen %UNIX% ssl; server_name a.example {name}; acme_certificate one; return 200 fine; }}"
    )
}

fn an_account_is_bound_to_one_that_the_issuer_knows(driver: Driver) {
    let acme = AcmeServer::start();
    acme.require_external_key(b"a secret of both");
    // "a secret of both" in base64url
    let server = setup(driver, &acme, &format!("{USUAL} external_account_key kid-1 %DIR%/mac;"), "");
    let server = start(server.file("mac", "YSBzZWNyZXQgb2YgYm90aA\n"), &acme);
    server.wait_logged(ISSUED);
    assert_trusted(&server, &acme, "a.example");
    server.stop();
}

fn challenge_is_answered_by_another_process(driver: Driver) {
    for challenge in ["http-01", "tls-alpn-01"] {
        let acme = AcmeServer::start();
        let scratch = Scratch::new();
        std::fs::set_permissions(scratch.path(), PermissionsExt::from_mode(0o755)).expect("ours");
        let state = scratch.path().display();
        let issuer = format!("accept_terms_of_service; challenge {challenge}; state_path {state}/state;");
        // Like an old and a new process during an upgrade, both servers have the same directory, and one has its lock.
        let owner = setup(driver, &acme, &issuer, "").start();
        owner.wait_logged("no certificate for \"a.example\" yet");
        let other = setup(driver, &acme, &issuer, "").start();
        acme.set_place(match challenge {
            "http-01" => Place::Tcp(other.directory.address(1)),
            _ => Place::Unix(other.directory.path().join("gale.sock")),
        });
        owner.wait_logged(ISSUED);
        assert_trusted(&owner, &acme, "a.example");
        owner.stop();
        // Now the other server gets the lock and finds the certificate.
        other.wait_logged("certificate for \"a.example\" found, valid until");
        assert_trusted(&other, &acme, "a.example");
        assert!(!other.log().contains(ISSUED), "{other}");
        other.stop();
    }
}

fn failure_to_obtain_a_certificate_is_logged(driver: Driver) {
    let acme = AcmeServer::start();
    let mut server = start(setup(driver, &acme, "state_path %DIR%/state;", ""), &acme);
    server.wait_logged("terms of service, https://issuer.example/terms: accept them with \"accept_terms_of_service\"");
    server.reload_http(driver, &text(&acme, &format!("{USUAL} profile long require;"), ""));
    server.wait_logged("the issuer has no profile \"long\"");
    acme.require_external_key(b"x");
    server.reload_http(driver, &text(&acme, "accept_terms_of_service; state_path %DIR%/other;", ""));
    server.wait_logged("the issuer requires an external account: set it with \"external_account_key\"");
    // No certificate of another authority is trusted.
    server.directory.write("root.pem", &acme.authority.pem);
    server.reload_http(driver, &text(&acme, "accept_terms_of_service; state_path %DIR%/third;", ""));
    server.wait_logged("while SSL handshaking to issuer");
    server.stop();
}

fn settings_that_cannot_be_are_errors(driver: Driver) {
    let issuer = "acme_issuer one { uri http://127.0.0.1:1/; state_path off; }";
    let server = |text: &str| format!("{issuer} server {{ listen %UNIX%; {text} }}");
    for (text, message) in [
        ("acme_issuer one { }".to_owned(), "\"uri\" is missing"),
        ("acme_issuer one { uri ftp://x/; }".to_owned(), "invalid URL prefix in \"ftp://x/\""),
        ("acme_issuer one { url http://x/; }".to_owned(), "unknown directive \"url\""),
        ("acme_issuer one { uri http://x/; uri http://y/; }".to_owned(), "\"uri\" directive is duplicate"),
        ("acme_issuer one { uri http://x/; challenge dns-01; }".to_owned(), "unsupported challenge: dns-01"),
        ("acme_issuer one { uri http://x/; account_key rsa:1024; }".to_owned(), "unsupported key size in \"rsa:1024\""),
        ("acme_issuer one { uri http://x/; account_key none.key; }".to_owned(), "none.key\" failed (2: No such file"),
        (
            "acme_issuer one { uri http://x/; external_account_key a data:+; }".to_owned(),
            "invalid base64url encoded value",
        ),
        (format!("{issuer} {issuer}"), "\"acme_issuer\" directive is duplicate"),
        ("acme_shared_zone size=1m;".to_owned(), "\"acme_shared_zone\" must have \"zone\" parameter"),
        (server("server_name a.example; acme_certificate two;"), "issuer \"two\" is missing"),
        (server("acme_certificate one;"), "\"acme_certificate\": no identifiers found in \"server_name\""),
        (server("server_name ~a; acme_certificate one;"), "\"acme_certificate\": no identifiers found"),
        (
            server("acme_certificate one *.a.example;"),
            "a certificate for \"*.a.example\" cannot be obtained with the challenge \"http-01\"",
        ),
        (server("acme_certificate one a..example;"), "invalid server name: not a host name in \"a..example\""),
        (server("acme_certificate one a.example key=dsa;"), "invalid \"key\" value in \"key=dsa\""),
    ] {
        let mut server = Setup::http(driver, &text).launch();
        assert!(!server.wait_exited().success(), "{text}");
        let said = server.stderr();
        assert!(said.contains(message), "{message}: {said}");
    }
}

fn the_variables_may_be_used_beside_others(driver: Driver) {
    let acme = AcmeServer::start();
    let rest = "ssl_certificate %DIR%/rsa.pem; ssl_certificate_key %DIR%/rsa.pem;";
    let pair = acme.authority.rsa(&["a.example"]);
    let setup = setup(driver, &acme, "accept_terms_of_service; state_path off;", rest);
    let server = start(setup.file("rsa.pem", pair.certificate.clone() + &pair.key), &acme);
    server.wait_logged(ISSUED);
    assert_trusted(&server, &acme, "a.example");
    let path = server.directory.path().join("gale.sock");
    let mut client = Tls::rsa_only(&acme.authority).client(&path, "a.example");
    assert_eq!(client.ask("GET / HTTP/1.1\r\nHost: a.example\r\n\r\n").text(), "fine");
    server.stop();
}

/// An independent ACME server, where it is installed: Pebble (<https://github.com/letsencrypt/pebble>), which is strict
/// about the standard. Its random faults are off: it neither waits nor rejects nonces on purpose.
struct Pebble(Child);

impl Pebble {
    /// Starts it at `%TCP3%`; it validates challenges at the ports of `%TCP%` and `%TCP2%`. `None` where it is not
    /// installed.
    fn start(server: &Server) -> Option<Pebble> {
        let [http, tls, own] = [1, 2, 3].map(|number| server.directory.address(number));
        let authority = Authority::new("pebble's authority");
        let pair = authority.ecdsa(&[&own.ip().to_string()]);
        server.directory.write("root.pem", &authority.pem);
        server.directory.write("pebble.pem", &pair.certificate);
        server.directory.write("pebble.key", &pair.key);
        let path = |name: &str| server.directory.path().join(name).display().to_string();
        let configuration = json!({ "pebble": {
            "listenAddress": own.to_string(), "managementListenAddress": "",
            "certificate": path("pebble.pem"), "privateKey": path("pebble.key"),
            "httpPort": http.port(), "tlsPort": tls.port(),
        }});
        server.directory.write("pebble.json", configuration.to_string());
        let mut command = Command::new("pebble");
        command.arg("-config").arg(path("pebble.json")).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.env("PEBBLE_VA_NOSLEEP", "1").env("PEBBLE_WFE_NONCEREJECT", "0").spawn();
        let mut child = child.ok()?;
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        lines.by_ref().map_while(Result::ok).find(|line| line.contains("ACME directory available"))?;
        // Its output is drained, so that it never blocks.
        std::thread::spawn(move || lines.for_each(drop));
        Some(Pebble(child))
    }
}

impl Drop for Pebble {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn pebble_issues_over_both_challenges(driver: Driver) {
    // The addresses are known after the start.
    let empty = "server { listen %TCP%; } server { listen %TCP2%; }";
    let mut server = Setup::http(driver, empty).start();
    let Some(_pebble) = Pebble::start(&server) else {
        server.stop();
        return skip("pebble is not installed");
    };
    let ip = server.directory.address(1).ip().to_string();
    let issuer = |name: &str, rest: &str| {
        format!(
            "acme_issuer {name} {{ uri https://%TCP3%/dir; ssl_trusted_certificate %DIR%/root.pem; {rest}
                                   accept_terms_of_service; state_path %DIR%/{name}; }}"
        )
    };
    let first = issuer("first", "account_key rsa:2048; contact a@b.example;");
    let second = issuer("second", "account_key ecdsa:384; challenge tls-alpn-01;");
    let text = format!(
        "{first} {second}
         server {{ listen %TCP%; return 301 https://elsewhere.example/; }}
         server {{ listen %TCP2% ssl default_server; ssl_reject_handshake on; }}
         server {{ listen %UNIX% ssl; server_name one; acme_certificate first {ip} key=ecdsa:384; return 200 one; }}
         server {{ listen %UNIX% ssl; server_name two; acme_certificate second {ip}; return 200 two; }}"
    );
    server.reload_http(driver, &text);
    for name in ["first", "second"] {
        server.wait_logged(&format!("acme issuer \"{name}\": certificate for \"{ip}\" issued"));
    }
    for name in ["one", "two"] {
        let own = shown(&server, name);
        assert!(own.windows(6).any(|part| part == b"Pebble"), "{name}");
    }
    server.stop();
}
