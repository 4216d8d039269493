//! A response that a filter or a check of the body refuses is not stored: the next request goes to the server again.

use std::collections::HashMap;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::support::{Asked, Backend, Client, Driver, Response, Server, Serving, Setup, with_each_driver};

with_each_driver!(
    slice_that_does_not_fit_is_not_kept,
    slices_of_changed_file_are_fetched_anew,
    first_slice_goes_with_the_file_that_it_was_of,
    slice_that_is_longer_than_its_range_is_not_sent,
    slice_updated_in_background_is_asked_for_by_its_own_range,
    changed_slice_fetched_in_background_takes_no_place_of_another_file,
    part_with_wrong_range_is_not_stored,
    gzip_that_cannot_be_inflated_is_not_kept,
);

const LETTERS: &str = "abcdefghijklmnopqrstuvwxyz";

fn start(driver: Driver, backend: &Serving, more: &str) -> Server {
    let text = "proxy_cache_path %DIR%/cache keys_zone=one:1m; proxy_cache_disk_timeout 60s;
        proxy_cache_lock_timeout 60s;
        server { listen %UNIX%; proxy_cache one; add_header X-Cache $upstream_cache_status always;
        location / { proxy_pass http://BACKEND; MORE } }";
    Setup::http(driver, &text.replace("BACKEND", &backend.address).replace("MORE", more)).start()
}

const SLICES: &str = "slice 10; proxy_cache_key $uri$slice_range; proxy_set_header Range $slice_range;";

/// The range that a request asks for, of a body of `length` bytes.
fn range_of(asked: &Asked, length: usize) -> std::ops::Range<usize> {
    let range = asked.header("Range").expect("a range").strip_prefix("bytes=").expect("of bytes");
    let (first, last) = range.split_once('-').expect("from and to");
    first.parse().unwrap()..(last.parse::<usize>().unwrap() + 1).min(length)
}

fn part(text: &str, range: std::ops::Range<usize>, fields: &str) -> String {
    let (first, last, total) = (range.start, range.end - 1, text.len());
    let body = &text[range];
    let range = format!("Content-Range: bytes {first}-{last}/{total}\r\nContent-Length: {}\r\n", body.len());
    format!("HTTP/1.1 206 Partial Content\r\n{fields}{range}\r\n{body}")
}

/// All bytes of a response until the connection ends, early or as requested.
fn read(server: &Server, path: &str) -> Vec<u8> {
    let mut client = server.connect();
    client.send(format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"));
    client.read_to_end()
}

fn slice_that_does_not_fit_is_not_kept(driver: Driver) {
    // Path and faulty response.
    let cases = [
        ("/range", 1, "unexpected range"),
        ("/first-short", 1, "a slice has 3 bytes, its range 10"),
        ("/etag", 2, "etag mismatch"),
        ("/whole", 2, "unexpected status code 200"),
        ("/missing", 2, "unexpected status code 404"),
        ("/short", 2, "a slice has 3 bytes, its range 10"),
        ("/length", 3, "different complete length"),
        ("/no-range", 3, "invalid range"),
    ];
    let counts = Mutex::new(HashMap::new());
    let backend = Backend::tcp().serve(move |asked, client| {
        let mut counts = counts.lock().unwrap();
        let count = counts.entry(asked.target.clone()).or_insert(0);
        *count += 1;
        let is_wrong = cases.iter().any(|(path, number, _)| asked.target == *path && *count == *number);
        let range = range_of(asked, 26);
        let right = part(LETTERS, range.clone(), "ETag: \"1\"\r\n");
        let body = &LETTERS[range.clone()];
        client.send(match &*asked.target {
            _ if !is_wrong => right,
            "/range" => part(LETTERS, range.start..range.end - 5, "ETag: \"1\"\r\n"),
            "/etag" => right.replace("\"1\"", "\"2\""),
            "/whole" => format!("HTTP/1.1 200 OK\r\nETag: \"1\"\r\nContent-Length: 26\r\n\r\n{LETTERS}"),
            "/missing" => "HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone".to_owned(),
            "/length" => right.replace("/26", "/27").replace("20-25", "20-26").replace(": 6", ": 7") + "!",
            "/no-range" => right.replace("Content-Range", "X-Range"),
            _ => right.replace(&format!(": {}\r\n\r\n{body}", body.len()), ": 3\r\n\r\nabc"),
        });
        true
    });
    let server = start(driver, &backend, &(SLICES.to_owned() + "proxy_cache_valid any 1h;"));
    for (path, number, why) in cases {
        let first = read(&server, path);
        assert!(!first.ends_with(LETTERS.as_bytes()), "{path}");
        server.wait_logged(why);
        let asked = backend.asked().len();
        let second = server.get(path);
        assert_eq!((second.status, second.text()), (200, LETTERS), "{path}");
        assert!(backend.asked().len() > asked, "{path} {number}");
        let asked = backend.asked().len();
        assert_eq!(server.get(path).text(), LETTERS, "{path}");
        assert_eq!(backend.asked().len(), asked, "{path}: all of it is stored");
    }
    server.stop();
}

/// A file whose version the test sets; each version has other bytes and another entity tag.
fn versions(fields: &'static str) -> (Arc<AtomicU64>, Serving) {
    let version = Arc::new(AtomicU64::new(0));
    let told = Arc::clone(&version);
    let backend = Backend::tcp().serve(move |asked, client| {
        let version = told.load(Ordering::SeqCst);
        let text = text_of(version);
        client.send(part(&text, range_of(asked, 26), &format!("{fields}ETag: \"{version}\"\r\n")));
        true
    });
    (version, backend)
}

fn text_of(version: u64) -> String {
    if version == 0 { LETTERS.to_owned() } else { LETTERS.to_uppercase() }
}

fn slices_of_changed_file_are_fetched_anew(driver: Driver) {
    let (version, backend) = versions("Cache-Control: max-age=60\r\n");
    let server = start(driver, &backend, SLICES);
    let ask = |range: &str| {
        server.connect().ask(format!("GET /a HTTP/1.1\r\nHost: a\r\nRange: bytes={range}\r\n\r\n")).text().to_owned()
    };
    // The first and the last slice are of the file before its change.
    assert_eq!((&*ask("0-4"), &*ask("20-24")), ("abcde", "uvwxy"));
    version.store(1, Ordering::SeqCst);
    // The length from the first slice is sent before the second slice arrives.
    assert!(!read(&server, "/a").ends_with(b"z"));
    server.wait_logged("etag mismatch in slice response");
    // Now the first slice is fetched again, and the last one, which is still stored, as well.
    assert_eq!(server.get("/a").text(), text_of(1));
    let asked = backend.asked().len();
    assert_eq!(server.get("/a").text(), text_of(1));
    assert_eq!(backend.asked().len(), asked);
    server.stop();
}

fn first_slice_goes_with_the_file_that_it_was_of(driver: Driver) {
    let short = &LETTERS[..5];
    // Answers of the server after the file's change, to requests for later slices and for the first one; and the
    // client's answer then.
    let gone = ["HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone"; 2].map(str::to_owned);
    let whole = format!("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{short}");
    let behind_end = "HTTP/1.1 416 Range Not Satisfiable\r\nContent-Range: bytes */5\r\nContent-Length: 0\r\n\r\n";
    let fails = ["HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy"; 2].map(str::to_owned);
    let cases = [
        ("/deleted", gone, (404, "gone")),
        ("/without-ranges", [whole.clone(), whole], (200, short)),
        ("/shorter", [behind_end.to_owned(), part(short, 0..5, "")], (200, short)),
        // The first slice stays, and the second one is requested again.
        ("/fails", fails, (200, LETTERS)),
    ];
    let is_changed = Arc::new(AtomicU64::new(0));
    let told = Arc::clone(&is_changed);
    let answers = cases.clone();
    let backend = Backend::tcp().serve(move |asked, client| {
        let range = range_of(asked, 26);
        let answer = answers.iter().find(|(path, ..)| *path == asked.target).map(|(_, answers, _)| answers);
        match answer.filter(|_| told.load(Ordering::SeqCst) == 1) {
            Some([later, _]) if range.start > 0 => client.send(later),
            Some([_, first]) => client.send(first),
            None => client.send(part(LETTERS, range, "")),
        }
        true
    });
    let server = start(driver, &backend, &(SLICES.to_owned() + "proxy_cache_valid 200 206 1h;"));
    for (path, _, (status, body)) in cases {
        is_changed.store(0, Ordering::SeqCst);
        let range = "Range: bytes=0-4\r\n";
        let first = server.connect().ask(format!("GET {path} HTTP/1.1\r\nHost: a\r\n{range}\r\n"));
        assert_eq!((first.status, first.text()), (206, "abcde"), "{path}");
        is_changed.store(1, Ordering::SeqCst);
        assert!(read(&server, path).ends_with(&LETTERS.as_bytes()[..10]), "{path}: the first piece, and no more");
        if path == "/fails" {
            is_changed.store(0, Ordering::SeqCst);
        }
        let next = server.get(path);
        assert_eq!((next.status, next.text()), (status, body), "{path}");
    }
    server.stop();
}

fn slice_that_is_longer_than_its_range_is_not_sent(driver: Driver) {
    // The second slice is longer than announced: with a length, and without.
    let backend = Backend::tcp().serve(move |asked, client| {
        let range = range_of(asked, 26);
        let right = part(LETTERS, range.clone(), "");
        client.send(match &*asked.target {
            _ if range.start != 10 => right,
            "/length" => right.replace(": 10\r\n\r\n", ": 13\r\n\r\n") + "XYZ",
            _ => right.replace("Content-Length: 10\r\n", "Connection: close\r\n") + "XYZ",
        });
        asked.target == "/length" || range.start != 10
    });
    let server = start(driver, &backend, &(SLICES.to_owned() + "proxy_cache_valid any 1h;"));
    for _ in 0..2 {
        assert!(read(&server, "/length").ends_with(b"abcdefghij"));
        assert_eq!(server.get("/none").text(), LETTERS);
    }
    server.stop();
}

const UPDATING: &str = "proxy_cache_use_stale updating; proxy_cache_background_update on;";

fn slice_updated_in_background_is_asked_for_by_its_own_range(driver: Driver) {
    let is_fresh = Arc::new(AtomicU64::new(0));
    let told = Arc::clone(&is_fresh);
    let backend = Backend::tcp().serve(move |asked, client| {
        let lifetime = if told.load(Ordering::SeqCst) == 0 { "max-age=5\r\nAge: 6" } else { "max-age=60" };
        match asked.header("Range") {
            Some(_) => client.send(part(LETTERS, range_of(asked, 26), &format!("Cache-Control: {lifetime}\r\n"))),
            None => client.send("HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 5\r\n\r\nwhole"),
        }
        true
    });
    let server = start(driver, &backend, &(SLICES.to_owned() + UPDATING));
    assert_eq!(server.get("/a").text(), LETTERS);
    assert_eq!(backend.asked().len(), 3);
    is_fresh.store(1, Ordering::SeqCst);
    assert_eq!(server.get("/a").text(), LETTERS);
    server.look_until("three pieces are fetched anew", || backend.asked().len() >= 6);
    let mut ranges: Vec<_> =
        backend.asked()[3..6].iter().map(|(_, asked)| asked.header("Range").map(str::to_owned)).collect();
    ranges.sort();
    assert_eq!(
        ranges.iter().map(Option::as_deref).collect::<Vec<_>>(),
        [Some("bytes=0-9"), Some("bytes=10-19"), Some("bytes=20-29")]
    );
    // Stored by now or not.
    for _ in 0..4 {
        assert_eq!(server.get("/a").text(), LETTERS);
    }
    server.stop();
}

fn changed_slice_fetched_in_background_takes_no_place_of_another_file(driver: Driver) {
    let (version, backend) = versions("Cache-Control: max-age=5\r\nAge: 6\r\n");
    let server = start(driver, &backend, &(SLICES.to_owned() + UPDATING));
    assert_eq!(server.get("/a").text(), text_of(0));
    version.store(1, Ordering::SeqCst);
    server.look_until("the new file comes", || {
        let response = read(&server, "/a");
        let body = response.windows(4).position(|end| end == b"\r\n\r\n").map(|end| &response[end + 4..]).unwrap();
        // Each of these is all of one version, or ends early: never a mixture.
        assert!(text_of(0).as_bytes().starts_with(body) || text_of(1).as_bytes().starts_with(body), "{body:?}");
        body == text_of(1).as_bytes()
    });
    server.stop();
}

fn outcome(response: &Response) -> (u16, &str, &str) {
    (response.status, response.header("X-Cache").unwrap_or("-"), response.text())
}

fn part_with_wrong_range_is_not_stored(driver: Driver) {
    let backend = Backend::tcp().serve(|asked, client| {
        let fields = "Cache-Control: max-age=60\r\n";
        let right = part(LETTERS, range_of(asked, 26), fields);
        client.send(match &*asked.target {
            "/none" => right.replace("Content-Range", "X-Range"),
            "/longer" => right.replace(" 3-5/", " 3-6/"),
            "/several" => right.replace("Content-Range", "Content-Type: multipart/byteranges; boundary=x\r\nX-Range"),
            _ => right,
        });
        true
    });
    let server = start(driver, &backend, "proxy_cache_key $uri$http_range; proxy_set_header Range $http_range;");
    let ask = |client: &mut Client, path: &str| {
        client.ask(format!("GET {path} HTTP/1.1\r\nHost: a\r\nRange: bytes=3-5\r\n\r\n"))
    };
    let mut client = server.connect();
    for (path, then) in [("/none", "MISS"), ("/longer", "MISS"), ("/several", "HIT"), ("/right", "HIT")] {
        assert_eq!(outcome(&ask(&mut client, path)), (206, "MISS", "def"), "{path}");
        assert_eq!(outcome(&ask(&mut client, path)), (206, then, "def"), "{path}");
    }
    server.stop();
}

fn gzip_that_cannot_be_inflated_is_not_kept(driver: Driver) {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    packed.write_all(LETTERS.as_bytes()).unwrap();
    let packed = packed.finish().unwrap();
    let count = AtomicU64::new(0);
    let backend = Backend::tcp().serve(move |_, client| {
        let mut packed = packed.clone();
        if count.fetch_add(1, Ordering::SeqCst) == 0 {
            packed.truncate(packed.len() - 4);
        }
        let fields = "Cache-Control: max-age=60\r\nContent-Encoding: gzip\r\n";
        client.send(format!("HTTP/1.1 200 OK\r\n{fields}Content-Length: {}\r\n\r\n", packed.len()));
        client.send(&packed);
        true
    });
    let server = start(driver, &backend, "proxy_cache_key $uri; gunzip on;");
    let mut client = server.connect();
    client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    client.read_to_end();
    server.wait_logged("inflate() has no end");
    let mut client = server.connect();
    assert_eq!(outcome(&client.get("/a")), (200, "MISS", LETTERS));
    assert_eq!(outcome(&client.get("/a")), (200, "HIT", LETTERS));
    server.stop();
}
