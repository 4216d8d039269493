//! Requests of simulated clients, and the server's configuration.

use std::io::Write;
use std::rc::Rc;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use gale_files::SimulatedFiles;
use gale_runtime::Bytes;
use gale_runtime::simulation::{FileFaults, Sending, Simulation, Transcript};

use super::answer::Received;
use super::http2::Ask;

/// Every timeout is long compared with all delays in a simulated world, so that only intended timeouts expire.
const CONFIGURATION: &str = "
    error_log /log info;
    events { }
    http {
        access_log /log;
        client_header_timeout 60s; client_body_timeout 30s; send_timeout 30s; keepalive_timeout 75s;
        lingering_time 300s; lingering_timeout 30s;
        client_header_buffer_size 256; large_client_header_buffers 2 1k;
        client_body_buffer_size 2k; client_max_body_size 40k; client_body_temp_path %TEMP%;
        types { text/html html; text/plain txt; }
        limit_conn_zone $connection zone=simulated_places:1m;
        limit_req_zone $connection-$connection_requests zone=simulated_rates:1m rate=1r/s;
        server {
            listen %ADDRESS%;
            root /www;
            # Whoever does not give its place back keeps out the next one on its connection.
            limit_conn simulated_places 1; limit_req zone=simulated_rates;
            location /sendfile/ { alias /www/; sendfile on; tcp_nopush on; sendfile_max_chunk 70k; }
            location /pool/ { alias /www/; aio threads; sendfile on; output_buffers 1 128k; read_ahead 1m; }
            location /off/ { alias /www/; aio off; sendfile on; }
            location /direct/ { alias /www/; aio on; directio 2k; }
            location = /hello { return 200 hello; }
            location = /last { keepalive_requests 1; return 200 bye; }
            location = /moved { return 301 /hello; }
            location /tried/ { open_file_cache max=2 inactive=1s; open_file_cache_errors on;
            try_files $uri /small.txt; }
            location /secret/ {
                alias /www/; auth_basic secret; auth_basic_user_file /passwords; auth_delay 5ms;
            }
            location /nobody/ { deny all; }
            location /somebody/ { alias /www/; satisfy any; deny all; auth_basic some;
            auth_basic_user_file /passwords; }
            location /packed/ {
                alias /www/; gzip on; gzip_types *; sub_filter_types *; sub_filter_once off; sub_filter a bb;
            }
            location /inflated/ { alias /www/; gzip_static always; gunzip on; }
            location = /small-body { client_max_body_size 10; return 200 x; }
            location /ssi/ { alias /www/; ssi on; types { text/html html; text/plain txt; } }
            location /added/ { alias /www/; add_before_body /hello; add_after_body /large.bin; addition_types *; }
            location /asked/ { alias /www/; auth_request /hello; }
            location = /refused { auth_request /missing; alias /www/small.txt; }
            location /copied/ { alias /www/; mirror /sendfile/large.bin; mirror /ssi/nested.html; }
            %HOOKS%
        }
    }";

const HOOKS: &str = "location = /echo { test_echo; } location = /store { test_store_body; }
    location = /hints { early_hints 1; test_early_hints; alias /www/small.txt; }";

pub const CLIENT_HEADER_TIMEOUT: Duration = Duration::from_secs(60);
pub const CLIENT_BODY_TIMEOUT: Duration = Duration::from_secs(30);
pub const SEND_TIMEOUT: Duration = Duration::from_secs(30);
pub const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(75);

/// The configuration with the directives of test builds.
pub fn configuration() -> String {
    CONFIGURATION.replace("%HOOKS%", HOOKS)
}

const SSI_PAGE: &[u8] =
    b"1<!--#include virtual='/ssi/nested.html?a=b' -->2<!--#include virtual='/ssi/small.txt' wait='yes' -->\
    3<!--#include virtual='/hello' set='x' --><!--#echo var='x' -->4<!--#include virtual='/large.bin' -->5\
    <!--#include virtual='/missing' -->";
const NESTED_PAGE: &[u8] =
    b"(<!--#echo var='arg_a' --><!--#include virtual='/ssi/small.txt' --><!--#include virtual='/page.html' -->)";
const LARGE: usize = 200_000;
/// Offset at which broken files fail.
const BROKEN_AT: usize = 100_000;

pub fn pattern(length: usize) -> Vec<u8> {
    (0..length as u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn gzipped(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).expect("memory for it");
    encoder.finish().expect("memory for it")
}

pub fn add_files(simulation: &Simulation) {
    let large = pattern(LARGE);
    let fails = FileFaults { fails_at: Some(BROKEN_AT as u64), ends_at: None };
    let ends = FileFaults { fails_at: None, ends_at: Some(BROKEN_AT as u64) };
    let packed = gzipped(&large);
    let files: [(&str, &[u8], FileFaults); 11] = [
        ("/passwords", b"anna:{PLAIN}secret\n", FileFaults::default()),
        ("/www/small.txt", b"a small file\n", FileFaults::default()),
        ("/www/page.html", &large[..3000], FileFaults::default()),
        ("/www/large.bin", &large, FileFaults::default()),
        ("/www/large.bin.gz", &packed, FileFaults::default()),
        ("/www/empty.txt", b"", FileFaults::default()),
        ("/www/directory/index.html", b"<p>index", FileFaults::default()),
        ("/www/ssi.html", SSI_PAGE, FileFaults::default()),
        ("/www/nested.html", NESTED_PAGE, FileFaults::default()),
        ("/www/fails.bin", &large, fails),
        ("/www/ends.bin", &large, ends),
    ];
    for (path, content, faults) in files {
        simulation.add_broken_file(path, content, faults).expect("memory for it");
    }
}

/// One request, or an attempt at one.
pub struct Item {
    pub name: &'static str,
    parts: Vec<Part>,
    /// Statuses of its answers, interim ones included.
    statuses: &'static [u16],
    /// State of the connection after it.
    pub after: After,
}

enum Part {
    Bytes(Vec<u8>),
    /// Waits for an interim answer.
    AwaitInterim,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum After {
    /// Another request may follow.
    Open,
    /// The server closes it.
    Closed,
    /// The server closes it in the middle of the answer: reading the file fails at this offset.
    BrokenOff(usize),
    /// The server closes it after this timeout: the client has stopped in the middle.
    TimedOut(Duration),
}

impl Item {
    /// Bytes of the request with this number on a connection. `heads`: see [`Received::new`].
    pub fn sends(&self, number: usize, heads: Rc<[bool]>) -> Vec<Sending> {
        let step = |part: &Part| match part {
            Part::Bytes(bytes) => Sending::Bytes(Bytes::copy_from_slice(bytes)),
            Part::AwaitInterim => {
                let heads = Rc::clone(&heads);
                Sending::Await(Rc::new(move |bytes| {
                    let received = Received::new(bytes, &heads);
                    received.complete > number || received.complete == number && received.has_interim
                }))
            }
        };
        self.parts.iter().map(step).collect()
    }

    /// Number of these bytes.
    pub fn length(&self) -> usize {
        let length = |part: &Part| if let Part::Bytes(bytes) = part { bytes.len() } else { 0 };
        self.parts.iter().map(length).sum()
    }

    /// `true` if the answer has no body whatever its head says.
    pub fn is_head(&self) -> bool {
        matches!(&self.parts[0], Part::Bytes(bytes) if bytes.starts_with(b"HEAD "))
    }

    /// `true` if the client waits for a part of the request's own answer.
    pub fn waits(&self) -> bool {
        self.parts.iter().any(|part| matches!(part, Part::AwaitInterim))
    }

    /// `true` if the server gives the answer up when the client half-closes.
    pub fn delays(&self) -> bool {
        let begins = |text: &[u8]| matches!(&self.parts[0], Part::Bytes(bytes) if bytes.starts_with(text));
        begins(b"GET /secret/") || begins(b"GET /somebody/")
    }

    /// `true` if the client itself announces the end of the connection.
    pub fn asks_for_the_end(&self) -> bool {
        let has = |text: &[u8]| {
            self.parts.iter().any(|part| match part {
                Part::Bytes(bytes) => bytes.windows(text.len()).any(|window| window == text),
                Part::AwaitInterim => false,
            })
        };
        has(b"Connection: close\r\n") || has(b" HTTP/1.0\r\n") && !has(b"Connection: keep-alive\r\n")
    }

    /// The request in either version of HTTP; `None` if it concerns an HTTP/1 connection or is not a request.
    pub fn ask(&self) -> Option<Ask> {
        let [Part::Bytes(bytes)] = &self.parts[..] else { return None };
        let end = bytes.windows(4).position(|end| end == b"\r\n\r\n")? + 4;
        let (head, rest) = bytes.split_at(end);
        let mut lines = std::str::from_utf8(head).ok()?.trim_end().lines();
        let mut words = lines.next()?.split(' ');
        let mut ask = Ask { method: words.next()?.to_owned(), target: words.next()?.to_owned(), ..Ask::default() };
        let stays = matches!(self.after, After::Open | After::BrokenOff(_)) && words.next() == Some("HTTP/1.1");
        for line in lines.filter(|_| stays) {
            let (name, value) = line.split_once(": ")?;
            match name {
                "Host" => {}
                "Content-Length" => ask.body = rest.to_vec(),
                "Transfer-Encoding" => ask.body = without_chunks(rest),
                "Connection" | "Expect" => return None,
                _ => ask.fields.push((name.to_ascii_lowercase(), value.to_owned())),
            }
        }
        stays.then_some(ask)
    }

    /// Statuses of its answers, interim ones included.
    pub fn statuses(&self) -> &'static [u16] {
        self.statuses
    }

    /// Checks the answer of a client that was alone against the item's expectations.
    pub fn check(&self, transcript: &Transcript) {
        let text = String::from_utf8_lossy(&transcript.received);
        let statuses: Vec<u16> = text
            .match_indices("HTTP/1.1 ")
            .map(|(at, _)| text[at + 9..at + 12].parse().expect("three digits"))
            .collect();
        let shown: String = text.chars().take(300).collect();
        assert_eq!(statuses, self.statuses, "{}: {shown}", self.name);
        let says_close = text.contains("\r\nConnection: close\r\n") || statuses.is_empty();
        let closes = self.after == After::Closed;
        if matches!(self.after, After::Open | After::Closed) {
            assert_eq!(says_close, closes, "{}: {shown}", self.name);
        }
    }

    /// The most that the client could receive: an answer may break off at any byte.
    pub fn whole_answer(&self, received: Vec<u8>) -> Vec<u8> {
        let After::BrokenOff(good) = self.after else { return received };
        let head = received.windows(4).position(|bytes| bytes == b"\r\n\r\n").expect("a head") + 4;
        assert!(received.len() <= head + good, "{}: more than can be read", self.name);
        [&received[..head], &pattern(LARGE)[..good]].concat()
    }
}

fn get(target: &str, fields: &str) -> Vec<u8> {
    format!("GET {target} HTTP/1.1\r\nHost: h\r\n{fields}\r\n").into_bytes()
}

fn post(target: &str, fields: &str, body: &[u8]) -> Vec<u8> {
    let head = format!("POST {target} HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n{fields}\r\n", body.len());
    [head.as_bytes(), body].concat()
}

fn post_chunked(target: &str, fields: &str, body: &[u8], size: usize) -> Vec<u8> {
    let head = format!("POST {target} HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n{fields}\r\n");
    let mut request = head.into_bytes();
    for chunk in body.chunks(size) {
        request.extend(format!("{:x}\r\n", chunk.len()).bytes());
        request.extend(chunk);
        request.extend(b"\r\n");
    }
    request.extend(b"0\r\n\r\n");
    request
}

/// Contents of the chunks of a body.
fn without_chunks(mut rest: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        let line = rest.iter().position(|&byte| byte == b'\r').expect("the size of a chunk");
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..line]).expect("text"), 16).expect("a number");
        body.extend_from_slice(&rest[line + 2..line + 2 + size]);
        if size == 0 {
            return body;
        }
        rest = &rest[line + 2 + size + 2..];
    }
}

/// Every kind of request.
pub fn items() -> Vec<Item> {
    let mut items = Vec::new();
    let mut add = |name, bytes: Vec<u8>, statuses, after| {
        items.push(Item { name, parts: vec![Part::Bytes(bytes)], statuses, after });
    };
    let (open, closed) = (After::Open, After::Closed);
    // Files and ranges of files.
    add("a small file", get("/small.txt", ""), &[200], open);
    add("a page", get("/page.html", ""), &[200], open);
    add("an empty file", get("/empty.txt", ""), &[200], open);
    add("a large file", get("/large.bin", ""), &[200], open);
    add("a large file by sendfile", get("/sendfile/large.bin", ""), &[200], open);
    add("a large file by a pool", get("/pool/large.bin", ""), &[200], open);
    add("a large file as nginx does it", get("/off/large.bin", ""), &[200], open);
    add("a large file past the page cache", get("/direct/large.bin", ""), &[200], open);
    add("several parts past the page cache", get("/direct/large.bin", "Range: bytes=7-7,500-70000\r\n"), &[206], open);
    add("a part", get("/large.bin", "Range: bytes=1000-99999\r\n"), &[206], open);
    add("a part by sendfile", get("/sendfile/large.bin", "Range: bytes=1000-\r\n"), &[206], open);
    add("several parts", get("/large.bin", "Range: bytes=0-9,500-70000,-5\r\n"), &[206], open);
    add("no part of it", get("/small.txt", "Range: bytes=100-\r\n"), &[416], open);
    add("a head", b"HEAD /large.bin HTTP/1.1\r\nHost: h\r\n\r\n".to_vec(), &[200], open);
    add("an index", get("/directory/", ""), &[200], open);
    add("a directory", get("/directory", ""), &[301], open);
    add("nothing there", get("/missing", ""), &[404], open);
    add("tried files", get("/tried/missing", ""), &[200], open);
    let unchanged = "If-Modified-Since: Sat, 08 Sep 2001 01:46:40 GMT\r\n";
    add("an unchanged file", get("/small.txt", unchanged), &[304], open);
    // Pages made by subrequests.
    add("a page of several", get("/ssi/ssi.html", ""), &[200], open);
    add("something added", get("/added/page.html", ""), &[200], open);
    add("something added to a large file", get("/added/large.bin", ""), &[200], open);
    add("asked and let in", get("/asked/small.txt", ""), &[200], open);
    add("asked and refused", get("/refused", ""), &[500], closed);
    add("copied", get("/copied/small.txt", ""), &[200], open);
    // Bodies changed by filters.
    let gzip = "Accept-Encoding: gzip\r\n";
    add("a file to compress", get("/packed/large.bin", gzip), &[200], open);
    add("a small file to compress", get("/packed/page.html", gzip), &[200], open);
    add("a file to change", get("/packed/large.bin", ""), &[200], open);
    add("a file to inflate", get("/inflated/large.bin", ""), &[200], open);
    // Answers without files.
    add("a text", get("/hello", ""), &[200], open);
    add("a redirect", get("/moved", ""), &[301], open);
    add("a long head", get("/hello", &format!("X-Long: {}\r\n", "x".repeat(900))), &[200], open);
    add("arguments", get("/hello?a=b&c=%20", "Accept: */*\r\n"), &[200], open);
    // Access rules.
    let (right, wrong) = ("Authorization: Basic YW5uYTpzZWNyZXQ=\r\n", "Authorization: Basic YW5uYTpvdGhlcg==\r\n");
    add("a password", get("/secret/small.txt", right), &[200], open);
    add("a wrong password", get("/secret/small.txt", wrong), &[401], open);
    add("no password", get("/secret/large.bin", ""), &[401], open);
    add("nobody may", get("/nobody/", ""), &[403], open);
    add("a password or an address", get("/somebody/large.bin", right), &[200], open);
    add("neither", get("/somebody/small.txt", wrong), &[401], open);
    // The end of a connection.
    add("a text and no more", get("/hello", "Connection: close\r\n"), &[200], closed);
    add("the server's last", get("/last", ""), &[200], closed);
    add("an old request", b"GET /page.html HTTP/1.0\r\n\r\n".to_vec(), &[200], closed);
    add("an old one that stays", b"GET /hello HTTP/1.0\r\nConnection: keep-alive\r\n\r\n".to_vec(), &[200], open);
    // Request bodies that no handler reads.
    let body = pattern(9000);
    add("a body for a file", post("/small.txt", "", &body), &[405], open);
    add("chunks for a file", post_chunked("/small.txt", "", &body, 1000), &[405], open);
    add("a body for a text", post("/hello", "", &body), &[200], open);
    add("chunks for a text", post_chunked("/hello", "", &body, 7), &[200], open);
    add("too large a body", post("/small-body", "", &body), &[413], closed);
    // Offences.
    add("no request", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n".to_vec(), &[400], closed);
    add("no host", b"GET /hello HTTP/1.1\r\n\r\n".to_vec(), &[400], closed);
    add("two hosts", get("/hello", "Host: i\r\n"), &[400], closed);
    add("two lengths", get("/hello", "Content-Length: 1\r\nContent-Length: 2\r\n"), &[400], closed);
    let both = "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n";
    add("length and chunks", get("/hello", both), &[400], closed);
    add("an unknown coding", get("/hello", "Transfer-Encoding: gzip\r\n"), &[501], closed);
    add("a field without a name", get("/hello", ": x\r\n"), &[400], closed);
    add("a field too long", get("/hello", &format!("X: {}\r\n", "x".repeat(3000))), &[400], closed);
    add("a target too long", get(&format!("/{}", "x".repeat(3000)), ""), &[414], closed);
    add("a version to come", b"GET / HTTP/2.0\r\nHost: h\r\n\r\n".to_vec(), &[505], closed);
    add("a path upwards", get("/../etc/passwd", ""), &[400], closed);
    add("a connect", b"CONNECT h:80 HTTP/1.1\r\nHost: h:80\r\n\r\n".to_vec(), &[405], closed);
    // Disks that fail.
    for (name, target) in [
        ("a file that fails", "/fails.bin"),
        ("a file that fails by sendfile", "/sendfile/fails.bin"),
        ("a file that fails past the page cache", "/direct/fails.bin"),
        ("a file that has become shorter", "/ends.bin"),
        ("a file that has become shorter in a pool", "/pool/ends.bin"),
        ("a file that has become shorter by sendfile", "/sendfile/ends.bin"),
    ] {
        add(name, get(target, ""), &[200], After::BrokenOff(BROKEN_AT));
    }
    // Incomplete requests.
    add("half a head", b"GET /hello HTT".to_vec(), &[], After::TimedOut(CLIENT_HEADER_TIMEOUT));
    add("half a field", b"GET /hello HTTP/1.1\r\nHo".to_vec(), &[], After::TimedOut(CLIENT_HEADER_TIMEOUT));
    add_hooks(&mut items);
    items
}

/// Adds requests for handlers of test builds.
fn add_hooks(items: &mut Vec<Item>) {
    let mut add = |name, parts, statuses, after| items.push(Item { name, parts, statuses, after });
    let one = |bytes| vec![Part::Bytes(bytes)];
    let open = After::Open;
    let body = pattern(30_000);
    add("a body in memory", one(post("/store", "", &body[..1500])), &[200], open);
    add("a body in a file", one(post("/store", "", &body)), &[200], open);
    add("chunks in a file", one(post_chunked("/store", "", &body, 999)), &[200], open);
    add("chunks of a byte", one(post_chunked("/store", "", &body[..300], 1)), &[200], open);
    add("too many chunks", one(post_chunked("/store", "", &pattern(41_000), 4000)), &[413], After::Closed);
    let broken = b"POST /store HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nx\r\n".to_vec();
    add("a broken chunk", one(broken), &[400], After::Closed);
    add("an echo", one(post("/echo", "", &body)), &[200], open);
    add("an echo of chunks", one(post_chunked("/echo", "", &body, 5000)), &[200], open);
    add("an early hint", one(get("/hints", "")), &[103, 200], open);
    let expecting = post("/store", "Expect: 100-continue\r\n", &body[..5000]);
    let (head, rest) = expecting.split_at(expecting.len() - 5000);
    let parts = vec![Part::Bytes(head.to_vec()), Part::AwaitInterim, Part::Bytes(rest.to_vec())];
    add("a body when told to go on", parts, &[100, 200], open);
    add("a body without being told", one(expecting), &[100, 200], open);
    let stalls = After::TimedOut(CLIENT_BODY_TIMEOUT);
    let half = post("/store", "", &body);
    add("half a body", one(half[..half.len() - 10_000].to_vec()), &[408], stalls);
    let half = post_chunked("/store", "", &body, 1000);
    add("half of the chunks", one(half[..half.len() / 2].to_vec()), &[408], stalls);
}
