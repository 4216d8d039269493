//! HTTP/2 with other implementations: h2spec's cases, curl, h2load and Chromium, each where it is installed.
//!
//! A missing tool is named, and the test is skipped: `h2spec is not installed`. The clients and servers of gRPC are in
//! `grpc.rs`.

use std::process::{Command, Stdio};

use crate::support::authority::Authority;
use crate::support::browser::{browser, look};
use crate::support::{Backend, Client, Driver, Server, Setup, skip, with_each_driver};

with_each_driver!(
    h2spec_finds_nothing_in_the_clear_but_an_answer_of_http1,
    h2spec_finds_nothing_over_tls,
    curl_gets_and_posts_in_the_clear_and_over_tls,
    h2load_gets_every_answer,
    a_browser_speaks_http2_and_opens_a_websocket_over_it,
);

/// Static files, a text and an upstream server, in the clear on `%TCP%` and over TLS on `%TCP2%`.
fn site(driver: Driver, backend: &Backend) -> Server {
    let pair = Authority::new("authority").ecdsa(&["127.0.0.1", "site.example"]);
    let text = format!(
        "keepalive_timeout 75s; keepalive_requests 100000;
         server {{ listen %TCP%; listen %TCP2% ssl; http2 on; root %DIR%/www; client_max_body_size 10m;
                   ssl_certificate %DIR%/own.crt; ssl_certificate_key %DIR%/own.key;
                   location /text {{ return 200 \"$http2 $server_protocol\"; }}
                   location /late {{ proxy_pass http://unix:%DIR%/late.sock; }}
                   location /behind/ {{ proxy_pass http://{}; }} }}
         server {{ listen unix:%DIR%/late.sock; return 200 \"behind the request\"; }}",
        backend.address()
    );
    Setup::http(driver, &text)
        .file("own.crt", &pair.certificate)
        .file("own.key", &pair.key)
        .file("www/index.html", "<!doctype html><title>a page</title>".repeat(10))
        .file("www/browser.html", BROWSER)
        .file("www/large", vec![b'l'; 1_000_000])
        .start()
}

/// A program that may not be installed.
fn tool(name: &str) -> Option<Command> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&folders).map(|folder| folder.join(name)).find(|path| path.is_file());
    if found.is_none() {
        skip(format!("{name} is not installed"));
    }
    found.map(|path| {
        let mut command = Command::new(path);
        command.stdin(Stdio::null());
        command
    })
}

/// Output of a successful command.
#[track_caller]
fn said(command: &mut Command) -> String {
    let output = command.output().expect("it is there");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// Runs every case of h2spec and returns the names of those that fail. The target is answered after the whole request:
/// some cases break a rule in the body, and the error would go unnoticed after the answer.
fn h2spec(driver: Driver, number: usize, options: &[&str]) -> Option<Vec<String>> {
    let mut h2spec = tool("h2spec")?;
    let backend = Backend::tcp();
    let server = site(driver, &backend);
    let address = server.directory.address(number);
    // Each case waits this long for a frame or the connection's end, because the machine may be busy.
    h2spec.args(["--strict", "--timeout", "30", "--path", "/late"]).args(options);
    h2spec.args(["--host", &address.ip().to_string(), "--port", &address.port().to_string()]);
    let output = h2spec.output().expect("it is there");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains(" passed, 0 skipped, "), "{text}");
    let failed = text.split("Failures:").nth(1).unwrap_or_default();
    let failed = failed.lines().filter_map(|line| line.split_once("× ")).map(|(_, name)| name.to_owned()).collect();
    server.stop();
    Some(failed)
}

fn h2spec_finds_nothing_in_the_clear_but_an_answer_of_http1(driver: Driver) {
    let Some(failed) = h2spec(driver, 1, &[]) else { return };
    // Input that is neither preface nor request is answered with 400 in HTTP/1, as nginx's own tests want it, and the
    // connection is closed (RFC 9113, section 3.4). h2spec reports that the answer is not a frame.
    assert_eq!(failed, ["2: Sends invalid connection preface"]);
}

fn h2spec_finds_nothing_over_tls(driver: Driver) {
    let Some(failed) = h2spec(driver, 2, &["--tls", "--insecure"]) else { return };
    assert!(failed.is_empty(), "{failed:?}");
}

fn curl_gets_and_posts_in_the_clear_and_over_tls(driver: Driver) {
    let Some(curl) = tool("curl") else { return };
    let backend = Backend::tcp();
    let server = site(driver, &backend);
    let _serving = backend.serve(|asked, client| {
        let text = format!("{} bytes", asked.body.len());
        client.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{text}", text.len()));
        true
    });
    let large = server.directory.path().join("www/large");
    let upload = format!("@{}", large.display());
    for (number, scheme, own) in [(1, "http", "h2c"), (2, "https", "h2")] {
        let url = |path: &str| format!("{scheme}://{}{path}", server.directory.address(number));
        let ask = |options: &[&str]| {
            let mut command = Command::new(curl.get_program());
            command.args(["--silent", "--show-error", "--fail", "--insecure", "--max-time", "100"]);
            command.arg(if number == 1 { "--http2-prior-knowledge" } else { "--http2" });
            said(command.args(options))
        };
        assert_eq!(ask(&[&url("/text")]), format!("{own} HTTP/2.0"));
        let answer = ask(&["--data-binary", &upload, "--write-out", " %{http_version}", &url("/behind/")]);
        assert_eq!(answer, "1000000 bytes 2");
        // Several at once on one connection; curl 7.88 fails at that with prior knowledge, whatever the server.
        if number == 2 {
            let several = url("/large?[1-20]");
            let sizes = ask(&["--parallel", "--write-out", "%{size_download}\n", "--output", "/dev/null", &several]);
            assert_eq!(sizes, "1000000\n".repeat(20));
        }
        assert!(ask(&["--head", &url("/large")]).starts_with("HTTP/2 200"));
    }
    server.stop();
}

fn h2load_gets_every_answer(driver: Driver) {
    let Some(h2load) = tool("h2load") else { return };
    let backend = Backend::tcp();
    let server = site(driver, &backend);
    for (number, scheme) in [(1, "http"), (2, "https")] {
        for (path, count) in [("/text", 5000), ("/", 5000), ("/large", 200)] {
            let mut command = Command::new(h2load.get_program());
            command.args(["-n", &count.to_string(), "-c", "8", "-m", "32", "-t", "2"]);
            let text = said(command.arg(format!("{scheme}://{}{path}", server.directory.address(number))));
            let wanted = format!("{count} done, {count} succeeded, 0 failed, 0 errored, 0 timeout");
            assert!(text.contains(&wanted), "{text}");
        }
    }
    server.stop();
}

/// Shows the results of a request, of many at once, of an upload, and of a WebSocket to an echo server. The browser's
/// virtual time stands still during requests, so all of them finish.
const BROWSER: &str = r#"<!doctype html><title>waits</title><body><script>
let heard = "";
const socket = new WebSocket(`wss://${location.host}/behind/socket`);
socket.onopen = () => socket.send("hello");
socket.onmessage = event => { heard = event.data; socket.close(); };
socket.onerror = () => { heard = "an error"; };
const text = async (path, options) => (await fetch(path, options)).text();
(async () => {
    const own = await text("/text");
    const sizes = await Promise.all([...Array(50).keys()].map(async i => (await text("/large?" + i)).length));
    const upload = await text("/behind/", { method: "POST", body: "u".repeat(500000) });
    for (let i = 0; i < 1000 && !heard; i++) await text("/text?" + i);
    const right = sizes.filter(size => size == 1000000).length;
    document.body.textContent = `[${own}, ${right} of 50, ${upload}, ${heard}]`;
})();
</script>"#;

/// Accepts a WebSocket handshake and echoes its first, short message.
fn repeat(client: &mut Client) {
    // Gale needs no `Sec-WebSocket-Accept` from its server; a browser would.
    client.send("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n");
    let head = client.take(2);
    let length = usize::from(head[1] & 0x7f);
    let (mask, mut text) = (client.take(4), client.take(length));
    text.iter_mut().zip(mask.iter().cycle()).for_each(|(byte, mask)| *byte ^= mask);
    client.send([&[0x81, length as u8], &text[..]].concat());
    // The browser closes and gets a reply.
    let end = client.take(6);
    client.send([0x88, 0]);
    assert_eq!(end[0], 0x88);
}

fn a_browser_speaks_http2_and_opens_a_websocket_over_it(driver: Driver) {
    let Some(browser) = browser() else {
        return skip("no Chromium that works is installed");
    };
    let backend = Backend::tcp();
    let server = site(driver, &backend);
    let serving = backend.serve(|asked, client| {
        if asked.header("Upgrade") == Some("websocket") {
            repeat(client);
            return false;
        }
        let text = format!("{} bytes", asked.body.len());
        client.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{text}", text.len()));
        true
    });
    let url = format!("https://{}/browser.html", server.directory.address(2));
    let (page, console) =
        look(browser, &url, &["--ignore-certificate-errors"]).unwrap_or_else(|error| panic!("{error}"));
    assert!(page.contains("[h2 HTTP/2.0, 50 of 50, 500000 bytes, hello]"), "{page}\n{console}");
    // RFC 8441: the WebSocket is a stream of the browser's existing connection.
    server.directory.wait_line("access.log", "\"CONNECT /behind/socket HTTP/2.0\" 101");
    drop(serving);
    server.stop();
}
