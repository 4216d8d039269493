//! Third-party clients over TLS: `openssl s_client`, curl and a browser, if installed. Accepted and rejected versions,
//! suites and groups, as scanners check them.

use std::io::Write;
use std::process::{Command, Stdio};

use crate::support::authority::{Authority, Pair};
use crate::support::browser::{browser, look};
use crate::support::{DEADLINE, Driver, Server, Setup, skip, with_each_driver};

with_each_driver!(
    suites_and_groups_are_spoken_that_keep_secrets_and_no_others,
    old_versions_are_refused_by_their_alert,
    openssl_negotiates_a_protocol_and_gets_the_ocsp_response,
    openssl_comes_back_to_its_session,
    openssl_sends_early_data,
    openssl_asks_in_vain_for_another_handshake,
    openssl_shows_its_certificate,
    curl_speaks_each_version_of_tls_and_http,
    a_browser_shows_a_page,
);

const OCSP_CHAIN: &str = include_str!("../../crates/tls/tests/ocsp/good.chain.crt");
const OCSP_KEY: &str = include_str!("../../crates/tls/tests/ocsp/good.key");
const OCSP_RESPONSE: &[u8] = include_bytes!("../../crates/tls/tests/ocsp/good.response.der");

const REQUEST: &str = "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";

/// Output of a program and whether it succeeded.
struct Outcome {
    text: String,
    success: bool,
}

impl Outcome {
    #[track_caller]
    fn assert_says(&self, words: &str) {
        assert!(self.text.contains(words), "{words:?} is not in {}", self.text);
    }

    fn count(&self, words: &str) -> usize {
        self.text.matches(words).count()
    }
}

/// True if a program is installed; else the test is skipped with a message.
fn is_installed(program: &str) -> bool {
    let is_there = Command::new(program).arg("--version").stdin(Stdio::null()).output().is_ok();
    if !is_there {
        skip(format!("{program} is not installed"));
    }
    is_there
}

/// Runs a program to its end, within a test's deadline.
fn run(program: &str, words: &[&str], input: &str) -> Outcome {
    let mut child = Command::new("timeout")
        .arg(DEADLINE.as_secs().to_string())
        .arg(program)
        .args(words)
        .env_remove("OPENSSL_CONF")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    // The write fails if the program has ended already.
    let _ = child.stdin.take().expect("a pipe").write_all(input.as_bytes());
    let output = child.wait_with_output().expect("it is ours");
    let text = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
    Outcome { text, success: output.status.success() }
}

/// A server with a certificate of each kind.
struct World {
    server: Server,
}

const OWN: &str = "ssl_certificate %DIR%/ecdsa.pem; ssl_certificate_key %DIR%/ecdsa.pem; \
                   ssl_certificate %DIR%/rsa.pem; ssl_certificate_key %DIR%/rsa.pem;";

fn both(pair: &Pair) -> String {
    pair.certificate.clone() + &pair.key
}

impl World {
    fn new(driver: Driver, text: &str) -> World {
        World::with(driver, text, |setup, _| setup)
    }

    fn with(driver: Driver, text: &str, change: impl FnOnce(Setup, &Authority) -> Setup) -> World {
        let authority = Authority::new("authority");
        let names = ["localhost", "127.0.0.1"];
        let setup = Setup::http(driver, &format!("server {{ listen %TCP% ssl; {OWN} {text} }}"))
            .file("ecdsa.pem", both(&authority.ecdsa(&names)))
            .file("rsa.pem", both(&authority.rsa(&names)))
            .file("ca.pem", &authority.pem);
        World { server: change(setup, &authority).start() }
    }

    fn path(&self, name: &str) -> String {
        self.server.directory.path().join(name).display().to_string()
    }

    fn address(&self) -> String {
        self.server.directory.address(1).to_string()
    }

    /// Runs `openssl s_client`, which sends a request and reads the response to its end.
    fn openssl(&self, words: &[&str]) -> Outcome {
        let (address, authority) = (self.address(), self.path("ca.pem"));
        let usual = ["s_client", "-connect", &address, "-servername", "localhost", "-CAfile", &authority, "-ign_eof"];
        run("openssl", &[&usual, words].concat(), REQUEST)
    }

    fn curl(&self, words: &[&str]) -> Outcome {
        let (address, authority) = (self.server.directory.address(1), self.path("ca.pem"));
        let to = format!("localhost:{}:{}", address.port(), address.ip());
        let url = format!("https://localhost:{}/", address.port());
        let usual = ["--silent", "--show-error", "--cacert", &authority, "--resolve", &to];
        run("curl", &[&usual, words, &[&url]].concat(), "")
    }
}

/// Makes OpenSSL offer ciphers that it considers weak, too.
fn weak(cipher: &str) -> String {
    format!("{cipher}:@SECLEVEL=0")
}

fn suites_and_groups_are_spoken_that_keep_secrets_and_no_others(driver: Driver) {
    if !is_installed("openssl") {
        return;
    }
    let world = World::new(driver, "return 200 fine;");
    let good = ["AES128-GCM-SHA256", "AES256-GCM-SHA384", "CHACHA20-POLY1305"];
    for cipher in ["ECDSA", "RSA"].iter().flat_map(|key| good.map(|cipher| format!("ECDHE-{key}-{cipher}"))) {
        let said = world.openssl(&["-tls1_2", "-cipher", &cipher]);
        said.assert_says(&format!("New, TLSv1.2, Cipher is {cipher}"));
        for words in ["Verify return code: 0 (ok)", "Compression: NONE", "Secure Renegotiation IS supported", "fine"] {
            said.assert_says(words);
        }
    }
    for cipher in ["TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"] {
        let said = world.openssl(&["-tls1_3", "-ciphersuites", cipher]);
        said.assert_says(&format!("New, TLSv1.3, Cipher is {cipher}"));
    }
    for cipher in [
        "AES128-SHA",
        "AES256-GCM-SHA384",
        "DHE-RSA-AES128-GCM-SHA256",
        "DHE-RSA-CHACHA20-POLY1305",
        "ECDHE-RSA-AES128-SHA",
        "ECDHE-RSA-AES256-SHA384",
        "ECDHE-ECDSA-AES128-SHA256",
        "ECDHE-ECDSA-AES128-CCM8",
        "ECDHE-ECDSA-CAMELLIA128-SHA256",
        "ECDHE-RSA-NULL-SHA",
        "AECDH-AES128-SHA",
        "ADH-AES128-GCM-SHA256",
    ] {
        let said = world.openssl(&["-tls1_2", "-cipher", &weak(cipher)]);
        assert!(!said.success && said.text.contains("alert handshake failure"), "{cipher}: {}", said.text);
    }
    world.server.wait_logged("SSL routines::no shared cipher) while SSL handshaking");
    for (group, is_spoken) in [("X25519", true), ("P-256", true), ("P-384", true), ("P-521", false), ("X448", false)] {
        let said = world.openssl(&["-tls1_3", "-groups", group]);
        assert_eq!(said.text.contains("fine"), is_spoken, "{group}: {}", said.text);
    }
    world.server.stop();
}

fn old_versions_are_refused_by_their_alert(driver: Driver) {
    if !is_installed("openssl") {
        return;
    }
    let world = World::new(driver, "return 200 fine;");
    for version in ["-tls1", "-tls1_1"] {
        let said = world.openssl(&[version, "-cipher", &weak("ALL")]);
        assert!(!said.success);
        said.assert_says("alert protocol version");
    }
    world.server.wait_logged("SSL routines::unsupported protocol) while SSL handshaking");
    world.server.stop();
}

fn openssl_negotiates_a_protocol_and_gets_the_ocsp_response(driver: Driver) {
    if !is_installed("openssl") {
        return;
    }
    let world = World::new(driver, "http2 on; return 200 $ssl_alpn_protocol;");
    world.openssl(&["-alpn", "http/1.1"]).assert_says("ALPN protocol: http/1.1");
    world.openssl(&["-alpn", "none,http/1.1"]).assert_says("ALPN protocol: http/1.1");
    let chosen = world.openssl(&["-alpn", "h2,http/1.1"]);
    chosen.assert_says("ALPN protocol: h2");
    let refused = world.openssl(&["-alpn", "none"]);
    assert!(!refused.success);
    refused.assert_says("alert no application protocol");
    world.openssl(&["-status"]).assert_says("OCSP response: no response sent");
    world.server.stop();
    let text = "server { listen %TCP% ssl; ssl_certificate %DIR%/good.crt; ssl_certificate_key %DIR%/good.key;
                ssl_stapling on; ssl_stapling_file %DIR%/response.der; return 200 fine; }";
    let setup = Setup::http(driver, text).file("good.crt", OCSP_CHAIN).file("good.key", OCSP_KEY);
    let server = setup.file("response.der", OCSP_RESPONSE).start();
    let address = server.directory.address(1).to_string();
    let said = run("openssl", &["s_client", "-connect", &address, "-status", "-ign_eof"], REQUEST);
    said.assert_says("OCSP Response Status: successful");
    said.assert_says("Cert Status: good");
    server.stop();
}

fn openssl_comes_back_to_its_session(driver: Driver) {
    if !is_installed("openssl") {
        return;
    }
    let world = World::new(driver, "return 200 [$ssl_session_reused];");
    let said = world.openssl(&["-tls1_2", "-reconnect"]);
    assert_eq!((said.count("New, TLSv1.2"), said.count("Reused, TLSv1.2")), (1, 5), "{}", said.text);
    let session = world.path("session.pem");
    for version in ["-tls1_2", "-tls1_3"] {
        world.openssl(&[version, "-sess_out", &session]).assert_says("[.]");
        let said = world.openssl(&[version, "-sess_in", &session]);
        said.assert_says("[r]");
        said.assert_says("Reused, TLSv1.");
    }
    world.server.stop();
}

fn openssl_sends_early_data(driver: Driver) {
    if !is_installed("openssl") {
        return;
    }
    let world = World::new(driver, "ssl_early_data on; return 200 [$ssl_early_data];");
    let (session, early) = (world.path("session.pem"), world.path("early"));
    world.server.directory.write("early", "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    world.openssl(&["-tls1_3", "-sess_out", &session]).assert_says("[]");
    let said = world.openssl(&["-tls1_3", "-sess_in", &session, "-early_data", &early]);
    said.assert_says("Early data was accepted");
    said.assert_says("[1]");
    // Early data is accepted once for a session.
    let said = world.openssl(&["-tls1_3", "-sess_in", &session, "-early_data", &early]);
    said.assert_says("Early data was rejected");
    world.server.stop();
}

fn openssl_asks_in_vain_for_another_handshake(driver: Driver) {
    if !is_installed("openssl") {
        return;
    }
    let world = World::new(driver, "return 200 fine;");
    let (address, authority) = (world.address(), world.path("ca.pem"));
    let said = run("openssl", &["s_client", "-connect", &address, "-CAfile", &authority, "-tls1_2"], "R\n");
    said.assert_says("RENEGOTIATING");
    said.assert_says("no renegotiation");
    world.openssl(&["-tls1_2"]).assert_says("fine");
    world.server.stop();
}

fn openssl_shows_its_certificate(driver: Driver) {
    if !is_installed("openssl") {
        return;
    }
    let text = "ssl_client_certificate %DIR%/ca.pem; ssl_verify_client on; return 200 \"$ssl_client_verify \
        $ssl_client_s_dn\";";
    let world = World::with(driver, text, |setup, authority| {
        setup.file("good.pem", both(&authority.ecdsa(&["good"]))).file("bad.pem", {
            let stranger = Authority::new("stranger");
            both(&stranger.rsa(&["bad"]))
        })
    });
    for version in ["-tls1_2", "-tls1_3"] {
        let show = |name: &str| {
            let pair = world.path(name);
            world.openssl(&[version, "-cert", &pair, "-key", &pair])
        };
        show("good.pem").assert_says("SUCCESS CN=good");
        show("bad.pem").assert_says("The SSL certificate error");
        world.openssl(&[version]).assert_says("No required SSL certificate was sent");
    }
    world.server.stop();
}

fn curl_speaks_each_version_of_tls_and_http(driver: Driver) {
    if !is_installed("curl") {
        return;
    }
    let text = "http2 on; ssl_client_certificate %DIR%/ca.pem; ssl_verify_client optional;
                return 200 \"$ssl_protocol $server_protocol $ssl_client_verify\";";
    let world =
        World::with(driver, text, |setup, authority| setup.file("own.pem", both(&authority.ecdsa(&["client"]))));
    let own = world.path("own.pem");
    for (words, expected) in [
        (vec!["--http1.1", "--tls-max", "1.2"], "TLSv1.2 HTTP/1.1 NONE"),
        (vec!["--http1.1", "--tlsv1.3"], "TLSv1.3 HTTP/1.1 NONE"),
        (vec!["--http2", "--tlsv1.3"], "TLSv1.3 HTTP/2.0 NONE"),
        (vec!["--http2", "--tls-max", "1.2"], "TLSv1.2 HTTP/2.0 NONE"),
        (vec!["--cert", &own, "--tlsv1.3"], "TLSv1.3 HTTP/2.0 SUCCESS"),
        (vec!["--cert", &own, "--tls-max", "1.2"], "TLSv1.2 HTTP/2.0 SUCCESS"),
    ] {
        let said = world.curl(&words);
        assert_eq!((said.text.as_str(), said.success), (expected, true), "{words:?}");
    }
    let old = world.curl(&["--tls-max", "1.1", "--ciphers", &weak("ALL")]);
    assert!(!old.success, "{}", old.text);
    // The server's certificate is not signed by the authority that curl trusts.
    world.server.directory.write("ca.pem", &Authority::new("stranger").pem);
    let untrusted = world.curl(&[]);
    assert!(!untrusted.success, "{}", untrusted.text);
    world.server.wait_logged("unknown ca:SSL alert number 48) while SSL handshaking");
    world.server.stop();
}

fn a_browser_shows_a_page(driver: Driver) {
    let Some(browser) = browser() else {
        return skip("no Chromium that works is installed");
    };
    let text = "http2 on; default_type text/html; return 200 \"<p id=said>$ssl_protocol $server_protocol $ssl_curve\";";
    let world = World::new(driver, text);
    let url = format!("https://{}/", world.address());
    let (page, console) =
        look(browser, &url, &["--ignore-certificate-errors"]).unwrap_or_else(|error| panic!("{error}"));
    assert!(page.contains("TLSv1.3 HTTP/2.0 X25519"), "{page} {console}");
    world.server.stop();
}
