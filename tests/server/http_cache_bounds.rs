//! Bounds of a cache: marks of variants, lists of fields in `Vary`, responses without readers, lifetimes after the
//! clock was set back; and reasons for not storing.

use std::path::Path;

use crate::support::{Backend, Client, Directory, Driver, Response, Server, Serving, Setup, with_each_driver};

with_each_driver!(
    marks_of_variants_count_for_max_size,
    a_place_of_a_list_in_vary_is_free_when_no_entry_has_it,
    a_response_of_unknown_length_is_stored_without_its_client_if_it_ends,
    a_response_without_end_is_given_up_when_its_client_has_left,
    parts_are_stored_where_the_key_has_their_range,
    response_stored_in_the_future_is_stale,
    empty_levels_are_none,
    cache_status_and_the_log_tell_why_nothing_was_stored,
    a_response_is_not_told_to_be_stored_where_the_disk_fails,
);

/// A server with a cache in this directory, limited by `parameters`, and `more` in its location.
fn caching(driver: Driver, directory: &Path, parameters: &str, backend: &str, more: &str) -> Setup {
    let text = "proxy_cache_path PATH keys_zone=one:2m PARAMETERS; proxy_cache_key $uri;
        proxy_cache_disk_timeout 60s; proxy_cache_lock_timeout 60s; proxy_cache_status edge;
        keepalive_requests 100000;
        server { listen %UNIX%; proxy_cache one; add_header X-Cache $upstream_cache_status always;
        location = /other { proxy_cache off; return 204; }
        location / { proxy_pass http://BACKEND; MORE } }";
    let text = text.replace("PATH", directory.to_str().unwrap()).replace("PARAMETERS", parameters);
    Setup::http(driver, &text.replace("BACKEND", backend).replace("MORE", more))
}

/// A server that answers with the request's `X-Fields` (separated by bars) and `X-Status`. The body is the request's
/// `Range` or `whole`, and `X-Length` dots.
fn origin() -> Serving {
    Backend::tcp().serve(|asked, client| {
        let fields = asked.header("X-Fields").unwrap_or_default();
        let fields: String = fields.split('|').map(|field| format!("{field}\r\n")).collect();
        let status = asked.header("X-Status").unwrap_or("200 OK");
        let length = asked.header("X-Length").map_or(0, |length| length.parse().unwrap());
        let body = asked.header("Range").unwrap_or("whole").to_owned() + &".".repeat(length);
        let fields = format!("Cache-Control: max-age=600\r\n{}", fields.trim_start_matches("\r\n"));
        client.try_send(format!("HTTP/1.1 {status}\r\n{fields}Content-Length: {}\r\n\r\n{body}", body.len())).is_ok()
    })
}

/// Requests a path with these fields, each ending in CR LF.
fn ask(client: &mut Client, path: &str, fields: &str) -> Response {
    client.ask(format!("GET {path} HTTP/1.1\r\nHost: a\r\n{fields}\r\n"))
}

fn used(response: &Response) -> &str {
    response.header("X-Cache").unwrap_or("-")
}

/// Reason in `Cache-Status` for not storing a response, or whether it was stored if there is none.
fn detail(response: &Response) -> &str {
    let status = response.header("Cache-Status").unwrap_or("-");
    status.split_once("detail=").map_or(if status.contains("stored") { "stored" } else { status }, |(_, why)| why)
}

/// Number of entries and marks in a directory, and the space of their files.
fn stored(directory: &Path) -> (usize, u64) {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let files = entries.filter(|entry| entry.file_name().len() == 32).filter_map(|entry| entry.metadata().ok());
    files.fold((0, 0), |(count, room), file| (count + 1, room + file.blocks() * 512))
}

fn marks_of_variants_count_for_max_size(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let server = caching(driver, directory.path(), "max_size=400k", &backend.address, "").start();
    let mut client = server.connect();
    for number in 0..300 {
        let fields = "X-Fields: Vary: X-A\r\nX-Length: 1000\r\n";
        assert_eq!(used(&ask(&mut client, &format!("/{number}"), fields)), "MISS");
    }
    server.stop();
    let (count, room) = stored(directory.path());
    assert!(room <= 400 * 1024 && count > 50, "{count} files take {room} bytes");
    // Also after a restart.
    let server = caching(driver, directory.path(), "max_size=200k", &backend.address, "").start();
    directory.wait_until("it is smaller", |_| stored(directory.path()).1 <= 200 * 1024);
    server.stop();
}

/// Most lists that a cache distinguishes.
const LISTS_MAX: usize = 4096;

fn a_place_of_a_list_in_vary_is_free_when_no_entry_has_it(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let more = "proxy_cache_purge $http_x_purge;";
    let server = caching(driver, directory.path(), "", &backend.address, more).start();
    let mut client = server.connect();
    let mut list = |number: usize| {
        let response = ask(&mut client, &format!("/{number}"), &format!("X-Fields: Vary: x-{number}\r\n"));
        detail(&response).to_owned()
    };
    for number in 0..LISTS_MAX {
        assert_eq!(list(number), "stored", "{number}");
    }
    assert_eq!(list(LISTS_MAX), "too-many-rules");
    server.wait_logged("4096 different \"Vary\" fields are in use");
    assert_eq!(ask(&mut server.connect(), "/7", "X-Purge: 1\r\n").status, 204);
    assert_eq!(list(LISTS_MAX), "stored");
    assert_eq!(list(7), "too-many-rules");
    let mut client = server.connect();
    let again = |client: &mut Client, number: usize| {
        used(&ask(client, &format!("/{number}"), &format!("X-Fields: Vary: x-{number}\r\n"))).to_owned()
    };
    assert_eq!([LISTS_MAX, 8, 7].map(|number| again(&mut client, number)), ["HIT", "HIT", "MISS"]);
    server.stop();
}

fn a_response_of_unknown_length_is_stored_without_its_client_if_it_ends(driver: Driver) {
    let (directory, backend) = (Directory::new(), Backend::tcp());
    let server = caching(driver, directory.path(), "", backend.address(), "proxy_read_timeout 60s;").start();
    let mut client = server.connect();
    client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    let mut behind = backend.accept();
    behind.request();
    let head = "HTTP/1.1 200 OK\r\nCache-Control: max-age=600\r\nTransfer-Encoding: chunked\r\n\r\n";
    behind.send(format!("{head}2\r\nab\r\n"));
    assert_eq!(client.head().status, 200);
    drop(client);
    // A second client reads along for a while.
    let mut second = server.connect();
    second.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(used(&second.head()), "HIT");
    drop(second);
    behind.send("2\r\ncd\r\n0\r\n\r\n");
    directory.wait_until("it is stored", |_| stored(directory.path()).0 == 1);
    let stored = server.get("/a");
    assert_eq!((used(&stored), stored.text()), ("HIT", "abcd"));
    assert!(backend.is_idle());
    server.stop();
}

fn a_response_without_end_is_given_up_when_its_client_has_left(driver: Driver) {
    let (directory, backend) = (Directory::new(), Backend::tcp());
    let server = caching(driver, directory.path(), "", backend.address(), "proxy_read_timeout 2s;").start();
    let mut client = server.connect();
    client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    let mut behind = backend.accept();
    behind.request();
    behind.send("HTTP/1.1 200 OK\r\nCache-Control: max-age=600\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n");
    assert_eq!(client.head().status, 200);
    drop(client);
    // As fast as the server answers others, so that it is never silent for long.
    let mut other = server.connect();
    let piece = format!("400\r\n{}\r\n", "x".repeat(0x400));
    while behind.try_send(&piece).is_ok() {
        assert_eq!(other.get("/other").status, 204);
    }
    server.wait_logged("no client reads a response of unknown length any longer");
    drop(behind);
    server.stop();
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().flatten().filter(|e| e.file_name().len() >= 32).count(), 0);
}

fn parts_are_stored_where_the_key_has_their_range(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let more = "proxy_cache_key $uri$http_range; proxy_set_header Range $http_range;";
    let server = caching(driver, directory.path(), "", &backend.address, more).start();
    let mut client = server.connect();
    // The body is the requested range, nine bytes.
    let part = "X-Status: 206 Partial Content\r\nX-Fields: Content-Range: bytes 0-8/20\r\n";
    let own = format!("{part}Range: bytes=0-8\r\n");
    assert_eq!(detail(&ask(&mut client, "/a", &own)), "stored");
    assert_eq!(used(&ask(&mut client, "/a", &own)), "HIT");
    // A part of another range, and one that answers a request for the whole.
    assert_eq!(used(&ask(&mut client, "/a", &format!("{part}Range: bytes=5-9\r\n"))), "MISS");
    let unasked = ask(&mut client, "/b", part);
    assert_eq!((unasked.status, detail(&unasked)), (206, "part"));
    assert_eq!(used(&ask(&mut client, "/b", "")), "MISS");
    server.stop();
    // The key lacks the range.
    let more = "proxy_set_header Range $http_range;";
    for (conformance, expected) in [("mixed", "part"), ("rfc9111", "part"), ("nginx", "stored")] {
        let directory = Directory::new();
        let more = format!("{more} proxy_cache_conformance {conformance};");
        let server = caching(driver, directory.path(), "", &backend.address, &more).start();
        assert_eq!(detail(&ask(&mut server.connect(), "/a", &own)), expected, "{conformance}");
        server.stop();
    }
}

/// Postpones the storing time of a file by some seconds, with all times that depend on it.
fn postpone(file: &Path, by: u64) {
    let mut bytes = std::fs::read(file).unwrap();
    let header_length = u32::from_le_bytes(bytes[12..16].try_into().unwrap()) as usize;
    for at in [32, 40] {
        let moment = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) + by;
        bytes[at..at + 8].copy_from_slice(&moment.to_le_bytes());
    }
    bytes[92..96].fill(0);
    let sum = crc32fast::hash(&bytes[..header_length]);
    bytes[92..96].copy_from_slice(&sum.to_le_bytes());
    std::fs::write(file, bytes).unwrap();
}

/// As after the clock was set back.
fn response_stored_in_the_future_is_stale(driver: Driver) {
    let backend = origin();
    for (by, first) in [(0, "HIT"), (3600, "EXPIRED")] {
        let directory = Directory::new();
        let more = "proxy_cache_conformance rfc9111;";
        let server = caching(driver, directory.path(), "", &backend.address, more).start();
        assert_eq!(used(&server.get("/a")), "MISS");
        directory.wait_until("it is stored", |_| stored(directory.path()).0 == 1);
        server.stop();
        let files =
            std::fs::read_dir(directory.path()).unwrap().flatten().filter(|entry| entry.file_name().len() == 32);
        files.for_each(|entry| postpone(&entry.path(), by));
        // There is no journal if the server was stopped before it had locked the directory.
        let _ = std::fs::remove_file(directory.path().join(".gale.journal"));
        let server = caching(driver, directory.path(), "", &backend.address, more).start();
        let mut client = server.connect();
        // A client that accepts stale responses gets entries from the future no more than others do.
        assert_eq!(used(&ask(&mut client, "/a", "Cache-Control: max-stale\r\n")), first, "{by}");
        assert_eq!(used(&ask(&mut client, "/a", "")), "HIT", "{by}");
        server.stop();
    }
}

fn empty_levels_are_none(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let server = caching(driver, directory.path(), "levels=", &backend.address, "").start();
    server.get("/a");
    directory.wait_until("it is stored", |_| stored(directory.path()).0 == 1);
    server.stop();
    for wrong in ["levels", "levels=1:", "levels=:1", "levels=3"] {
        let mut server = caching(driver, directory.path(), wrong, &backend.address, "").argument("-t").launch();
        assert!(!server.wait_exited().success(), "{wrong}");
    }
}

fn cache_status_and_the_log_tell_why_nothing_was_stored(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let more = "proxy_no_cache $arg_no; proxy_cache_max_range_offset 10; }
        location /min/ { proxy_pass http://BACKEND; proxy_cache_min_uses 2; }
        location /unbuffered/ { proxy_pass http://BACKEND; proxy_buffering off;"
        .replace("BACKEND", &backend.address);
    let server = caching(driver, directory.path(), "max_size=100k", &backend.address, &more).start();
    let mut client = server.connect();
    let rows = [
        ("/min/a", "", "min-uses"),
        ("/min/a", "", "stored"),
        ("/a?no=1", "", "excluded"),
        ("/b", "X-Length: 200000\r\n", "too-large"),
        ("/unbuffered/a", "", "unbuffered"),
        ("/c", "Range: bytes=100-\r\n", "range-offset"),
        ("/d", "X-Status: 206 Partial Content\r\nX-Fields: Content-Range: bytes 0-4/9\r\n", "part"),
        ("/e", "X-Fields: X-Accel-Expires: 0\r\n", "x-accel-expires"),
        ("/f", "X-Fields: Vary: *\r\n", "vary"),
    ];
    for (path, fields, expected) in rows {
        assert_eq!(detail(&ask(&mut client, path, fields)), expected, "{path}");
        if expected != "stored" {
            server.wait_logged(&format!("the response is not stored: {expected}"));
        }
    }
    server.stop();

    let (directory, backend) = (Directory::new(), Backend::tcp());
    let more = "proxy_cache_lock on; proxy_cache_lock_timeout 1ms;";
    let server = caching(driver, directory.path(), "", backend.address(), more).start();
    let mut clients = [server.connect(), server.connect()];
    let mut behind = clients.each_mut().map(|client| {
        client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
        let mut behind = backend.accept();
        behind.request();
        behind
    });
    for (number, expected) in [(1, "lock-timeout"), (0, "stored")] {
        behind[number].send("HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 2\r\n\r\nab");
        assert_eq!(detail(&clients[number].response()), expected);
    }
    server.stop();
}

fn a_response_is_not_told_to_be_stored_where_the_disk_fails(driver: Driver) {
    let (directory, backend) = (Directory::new(), origin());
    let cache = directory.path().join("cache");
    let server: Server = caching(driver, &cache, "levels=1", &backend.address, "").start();
    server.wait_logged("0 entries");
    // Files are in the place of directories.
    for digit in "0123456789abcdef".chars() {
        std::fs::write(cache.join(digit.to_string()), "").unwrap();
    }
    assert_eq!(detail(&server.get("/a")), "stored");
    server.wait_logged("could not be stored");
    assert_eq!(detail(&server.get("/b")), "disk");
    server.wait_logged("the response is not stored: disk");
    server.stop();
}
