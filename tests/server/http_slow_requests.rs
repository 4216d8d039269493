//! `slow_request_log`: the phases in which a slow request spent its time. In each test something waits longer than a
//! limit that ends the wait, so no test sleeps.

use serde_json::Value;

use crate::support::fuse;
use crate::support::http2::Http2;
use crate::support::{Backend, Client, Driver, Server, Setup, has_own_mounts, with_each_driver};

with_each_driver!(
    slow_backend_shows_as_the_first_byte_of_the_upstream,
    delay_by_limit_req_shows_as_a_delay,
    client_that_sends_slowly_shows_as_head_or_body,
    client_that_reads_slowly_shows_as_sending,
    response_that_limit_rate_slows_down_shows_as_a_delay,
    wait_in_the_queue_of_a_group_shows_as_queue,
    slow_disk_shows_as_disk,
    only_slower_requests_are_logged_and_to_the_log_of_their_server,
);

/// Minimum length of each wait, in ms.
const LEAST: u64 = 150;

/// Checks that the request waited for `cause`, and for none of `not`.
#[track_caller]
fn assert_cause(told: &Value, cause: &str, not: &[&str]) {
    let of = |name: &str| told[name].as_u64().expect("a number");
    assert!(of(cause) >= LEAST && of("whole_ms") >= of(cause), "{cause}: {told}");
    for name in not {
        assert_eq!(of(name), 0, "{name}: {told}");
    }
}

const UPSTREAM: [&str; 3] = ["connect_ms", "first_byte_ms", "upstream_ms"];

fn setup(driver: Driver, text: &str) -> Setup {
    let log = "error_log %DIR%/slow.log warn json; slow_request_log 100ms;";
    Setup::http(driver, &format!("{log} {text}"))
}

/// Requests the path over HTTP/1 and over HTTP/2.
fn ask_both(server: &Server, path: &str) -> [String; 2] {
    server.get(&format!("{path}1"));
    let mut client = Http2::unix(server);
    let stream = client.begin("GET", &format!("{path}2"), &[], true);
    client.answer(stream);
    [format!("{path}1"), format!("{path}2")]
}

fn slow_backend_shows_as_the_first_byte_of_the_upstream(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "server {{ listen %UNIX%; http2 on; proxy_read_timeout 200ms; location / {{ proxy_pass http://{}; }} }}",
        backend.address()
    );
    let server = setup(driver, &text).start();
    for path in ask_both(&server, "/slow") {
        let told = told_of(&server, &path);
        assert_cause(&told, "upstream_ms", &["head_ms", "body_ms", "delays_ms", "queue_ms", "disk_ms"]);
        assert_eq!(told["status"], 504);
    }
    server.stop();
}

/// Waits for the line about the request for this path, and parses it.
#[track_caller]
fn told_of(server: &Server, path: &str) -> Value {
    let mut found = None;
    server.directory.wait_until(&format!("a line about {path}"), |directory| {
        let text = directory.try_read("slow.log").unwrap_or_default();
        let objects = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let mut slow = objects.filter(|object| object["message"] == "slow request");
        found = slow.find(|object| object["request"].as_str().is_some_and(|request| request.contains(path)));
        found.is_some()
    });
    let told = found.expect("it was found");
    assert_eq!(told["level"], "warn");
    told
}

fn delay_by_limit_req_shows_as_a_delay(driver: Driver) {
    let text = "limit_req_zone $request_method zone=one:1m rate=2r/s;
        server { listen %UNIX%; http2 on; limit_req zone=one burst=5; root %DIR%/files; }";
    let server = setup(driver, text).start();
    server.get("/first");
    for path in ask_both(&server, "/delayed") {
        let told = told_of(&server, &path);
        assert_cause(&told, "delays_ms", &["head_ms", "body_ms", "queue_ms"]);
        assert_cause(&told, "whole_ms", &UPSTREAM);
    }
    server.stop();
}

fn client_that_sends_slowly_shows_as_head_or_body(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "server {{ listen %UNIX%; http2 on; client_header_timeout 200ms; client_body_timeout 200ms;
             location / {{ proxy_pass http://{}; }} }}",
        backend.address()
    );
    let server = setup(driver, &text).start();
    let mut client = server.connect();
    client.send("GET /head HTTP/1.1\r\nHost:");
    client.read_to_end();
    let told = told_of(&server, "/head");
    assert_cause(&told, "head_ms", &["body_ms", "delays_ms", "queue_ms", "disk_ms", "sending_ms"]);
    let mut client = server.connect();
    client.send("POST /body1 HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\nsome");
    client.read_to_end();
    let mut client = Http2::unix(&server);
    let stream = client.begin("POST", "/body2", &[], false);
    client.answer(stream);
    for path in ["/body1", "/body2"] {
        let told = told_of(&server, path);
        assert_cause(&told, "body_ms", &["head_ms", "delays_ms", "queue_ms"]);
        assert_cause(&told, "whole_ms", &UPSTREAM);
    }
    server.stop();
}

fn client_that_reads_slowly_shows_as_sending(driver: Driver) {
    let text = "server { listen %TCP%; listen %UNIX%; http2 on; send_timeout 200ms; root %DIR%/files; }";
    let server = setup(driver, text).file("files/large", vec![b'x'; 32 << 20]).start();
    let mut client = Client::tcp_with_small_buffer(server.directory.address(1));
    client.send("GET /large?1 HTTP/1.1\r\nHost: h\r\n\r\n");
    // The server closes the connection after its timeout.
    let told = told_of(&server, "/large?1");
    assert_cause(&told, "sending_ms", &["head_ms", "body_ms", "delays_ms", "queue_ms"]);
    assert_cause(&told, "whole_ms", &UPSTREAM);
    let mut client = Http2::unix(&server);
    client.releases = false;
    let stream = client.begin("GET", "/large?2", &[], true);
    client.answer(stream);
    let told = told_of(&server, "/large?2");
    assert_cause(&told, "sending_ms", &["head_ms", "body_ms", "delays_ms", "queue_ms"]);
    server.stop();
}

fn response_that_limit_rate_slows_down_shows_as_a_delay(driver: Driver) {
    let text = "server { listen %UNIX%; http2 on; root %DIR%/files; limit_rate 1k; limit_rate_after 9k; }";
    let server = setup(driver, text).file("files/limited1", [b'x'; 10_500]).file("files/limited2", [b'x'; 10_500]);
    let server = server.start();
    for path in ask_both(&server, "/limited") {
        let told = told_of(&server, &path);
        assert_cause(&told, "delays_ms", &["head_ms", "body_ms", "queue_ms"]);
    }
    server.stop();
}

fn wait_in_the_queue_of_a_group_shows_as_queue(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "upstream group {{ zone group 1m; server {} max_conns=1; queue 5 timeout=200ms; }}
         server {{ listen %UNIX%; http2 on; location / {{ proxy_pass http://group; }} }}",
        backend.address()
    );
    let server = setup(driver, &text).start();
    let mut first = server.connect();
    first.send("GET /first HTTP/1.1\r\nHost: h\r\n\r\n");
    let mut peer = backend.accept();
    peer.request();
    for path in ask_both(&server, "/queued") {
        assert_cause(&told_of(&server, &path), "queue_ms", &["head_ms", "body_ms", "delays_ms"]);
    }
    peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    assert_eq!(first.response().status, 200);
    server.stop();
}

/// The file system hangs until the clients have left, since a wait for the disk has no limit of its own. It hangs at
/// least as long as the request for `/limit` takes, which ends with its timeout.
fn slow_disk_shows_as_disk(driver: Driver) {
    if !has_own_mounts() {
        return;
    }
    let Some(mounted) = fuse::FileSystem::mount() else { return };
    let text = format!(
        "server {{ listen %UNIX%; http2 on; root {}; send_timeout 200ms; lingering_close off;
             location /limit {{ proxy_read_timeout 300ms; proxy_pass http://%ADDRESS%; }} }}",
        mounted.point().display()
    );
    let backend = Backend::tcp();
    let server = setup(driver, &text.replace("%ADDRESS%", backend.address())).start();
    let mut client = server.connect();
    client.send("GET /hangs1 HTTP/1.1\r\nHost: h\r\n\r\n");
    mounted.wait_hanging();
    let mut multiplexed = Http2::unix(&server);
    multiplexed.begin("GET", "/hangs2", &[], true);
    mounted.wait_hanging();
    // This request takes longer than the asserted time.
    assert_eq!(server.get("/limit").status, 504);
    drop((client, multiplexed));
    for path in ["/hangs1", "/hangs2"] {
        let told = told_of(&server, path);
        assert_cause(&told, "disk_ms", &["head_ms", "body_ms", "delays_ms", "queue_ms"]);
        assert_cause(&told, "whole_ms", &UPSTREAM);
    }
    drop(mounted);
    server.stop();
}

fn only_slower_requests_are_logged_and_to_the_log_of_their_server(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "slow_request_log 1ms notice;
         server {{ listen %UNIX%; proxy_read_timeout 200ms; error_log %DIR%/slow.log info;
             location /slow {{ proxy_pass http://{0}; }}
             location /patient {{ slow_request_log 1h; proxy_pass http://{0}; }}
             location /off {{ slow_request_log off; proxy_pass http://{0}; }} }}",
        backend.address()
    );
    let server = Setup::http(driver, &text).start();
    for path in ["/off", "/patient", "/slow"] {
        assert_eq!(server.get(path).status, 504);
    }
    let line = server.directory.wait_line("slow.log", "slow request");
    assert!(line.contains("[notice]") && line.contains("slow request, in ms: whole "), "{line}");
    assert!(line.contains(", head 0, body 0, delays 0, queue 0, disk 0, connect "), "{line}");
    assert!(line.contains(", status 504, client: unix:, server: , request: \"GET /slow HTTP/1.1\""), "{line}");
    assert!(line.contains(", upstream: \"http://"), "{line}");
    assert_eq!(server.directory.read("slow.log").matches("slow request").count(), 1);
    server.stop();
}
