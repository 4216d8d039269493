//! The public weaknesses of 2025 and 2026 in web servers and proxies, each tried against the real binary.
//!
//! The list below has a line for each: its test, its ID, the input, and the right reaction. The comment of each test
//! says what a vulnerable server does. A worker process that dies logs an alert, which `Server::stop` finds.

use std::fs;
use std::io::Read;
use std::net::UdpSocket;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gale_protocol::http1;
use gale_protocol::http2::{ErrorCode, Limits, settings};
use rcgen::{CustomExtension, ExtendedKeyUsagePurpose, KeyPair, SigningKey};
use rustix::process::Signal;
use rustls::client::{
    ClientSessionMemoryCache, ClientSessionStore, Resumption, Tls12ClientSessionValue, Tls13ClientSessionValue,
};
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, ClientConnection, NamedGroup, RootCertStore, StreamOwned, SupportedProtocolVersion};

use crate::support::authority::{Authority, Pair, params};
use crate::support::http2::{GET, Http2, block, flag, frame, frame_type};
use crate::support::http2_server::{self, Http2Server};
use crate::support::tls::Tls;
use crate::support::{self, Backend, Client, DEADLINE, Driver, Server, Setup, anonymous_memory, is_root};

/// Makes a test for each line and driver; a failed test names its weakness.
macro_rules! weaknesses {
    ($($test:ident: $id:literal, $sent:literal => $right:literal;)*) => {
        mod epoll {
            $(#[test] fn $test() { super::tried($id, $sent, $right, super::$test, super::Driver::Epoll) })*
        }
        mod io_uring {
            $(#[test] fn $test() { super::tried($id, $sent, $right, super::$test, super::Driver::IoUring) })*
        }
    };
}

fn tried(id: &str, sent: &str, right: &str, test: fn(Driver), driver: Driver) {
    eprintln!("{id}: {sent}; right: {right}");
    test(driver);
}

#[rustfmt::skip]
weaknesses! {
    // nginx
    capture_behind_rewrite: "CVE-2026-42945", "`set` of a capture behind a rewrite with arguments" => "as it came";
    overlapping_captures: "CVE-2026-9256", "captures within captures in a redirect" => "both, whole";
    captures_beside_map: "CVE-2026-42533", "a map with an expression between two captures" => "each of its place";
    captures_in_slices: "CVE-2026-60005", "a map that does not match, then a capture, in slices" => "as it was";
    quick_include_behind_slow: "CVE-2026-56434", "unbuffered: a quick SSI include behind a slow one" => "in order";
    characters_in_pieces: "CVE-2026-42934, CVE-2026-48142", "UTF-8 cut in characters, to be converted" => "as if whole";
    long_body_over_http2: "CVE-2026-42926", "`proxy_set_body` of more than 16 MiB over HTTP/2" => "one body";
    long_field_over_http2: "CVE-2026-42055", "a field of 2.5 MiB, passed on over HTTP/2 and gRPC" => "whole";
    nearly_a_status_line: "CVE-2026-42946", "uwsgi and SCGI: a first line that begins as a status line" => "a field";
    copy_under_alias: "CVE-2026-27654", "COPY and MOVE under an alias to a shorter path" => "nothing is written";
    films_without_chunks: "CVE-2026-32647", "mp4 with empty and too long tables" => "an error or the film";
    revoked_in_stream: "CVE-2026-28755", "stream: a client certificate that OCSP says is revoked" => "closed";
    gone_before_responder: "CVE-2026-40701", "a client that leaves while its responder is resolved" => "nothing";
    plaintext_before_tls: "CVE-2026-1642", "a response in the clear from a server behind TLS" => "502";
    session_of_another_server: "CVE-2025-23419", "a session of a server that wants no certificate" => "of no other";
    alias_behind_rewrite: "CVE-2026-15176", "`$request_filename` behind a rewrite out of an alias" => "500, no name";
    hundreds_of_includes: "CVE-2026-97205", "a page of 300 includes whose files are read in a pool" => "all of them";
    // Apache
    reset_at_once: "CVE-2026-23918", "HTTP/2: RST_STREAM right behind HEADERS" => "served on";
    header_bomb: "CVE-2026-49975", "HPACK: thousands of references to a field, no window" => "little memory";
    // Pingora
    request_behind_upgrade: "CVE-2026-2833", "a request behind one whose Upgrade is refused" => "judged on its own";
    odd_transfer_codings: "CVE-2026-2835", "HTTP/1.0 and odd values of Transfer-Encoding" => "refused";
    hosts_in_cache_key: "CVE-2026-2836", "the same path at two hosts with one cache" => "an entry for each";
    body_of_a_hit: "CVE-2025-4366", "a request with a body that a cache answers" => "the body is no request";
    nominated_fields: "CVE-2026-105299", "`Connection` that names fields which the proxy sets" => "they are sent";
    // ASP.NET, Netty
    line_ends_in_chunks: "CVE-2025-55315, CVE-2025-58056", "bare CR and LF in chunk extensions" => "400";
    // Traefik
    aliases_of_fields: "CVE-2026-39858, CVE-2026-88011", "X_Forwarded_Proto, X.Forwarded.Proto" => "do not reach auth";
    prefixes_for_auth: "CVE-2026-35051", "X-Forwarded-Prefix, which the configuration removes" => "does not reach auth";
    // HAProxy
    tlvs_beyond_header: "CVE-2026-47692", "PROXY v2: TLVs longer than their header" => "no value of what follows";
    padded_records: "CVE-2026-55203", "FastCGI: a record of 65,535 bytes with padding" => "the body, no records in it";
    // All servers with HTTP/2
    made_resets: "CVE-2025-8671", "HTTP/2: faults that make the server reset streams" => "the connection ends";
}

/// `GET path` with further fields.
fn get(path: &str, fields: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: h\r\n{fields}\r\n")
}

/// With one worker, which processes requests in their order.
fn with_one_worker(setup: Setup) -> Setup {
    setup.replace("worker_processes 2;", "worker_processes 1;")
}

/// Returns when all earlier bytes have been processed: the only worker answers a later request.
#[track_caller]
fn look(server: &Server) {
    assert_eq!(server.get("/look").text(), "seen");
}

const LOOK: &str = "location = /look { return 200 seen; }";

fn socket(server: &Server) -> PathBuf {
    server.directory.path().join("gale.sock")
}

/// Vulnerable: the flag "in arguments" stays set, and the escaped capture is written into memory measured without
/// escaping.
fn capture_behind_rewrite(driver: Driver) {
    let server = Server::start(
        driver,
        "location / { rewrite ^(.*) /new?c=1; set $own $1; return 200 $own; }
         location /if/ { rewrite ^/if/(.*) /new?c=1; if ($arg_c) { return 200 $1; } return 200 no; }",
    );
    let long = format!("/{}", "+".repeat(4000));
    assert_eq!(server.get(&long).text(), long);
    assert_eq!(server.get("/%2b%25%20%3f").text(), "/+% ?");
    assert_eq!(server.get("/if/++%20%25").text(), "++ %");
    server.stop();
}

/// Vulnerable: memory is measured with the escaping of one capture, and two are written.
fn overlapping_captures(driver: Driver) {
    let server = Server::start(
        driver,
        "location / { rewrite ^/((.*))$ http://127.0.0.1:8080/$1$2 redirect; return 200 foo; }
         location /q/ { rewrite ^/q/((.*))$ http://127.0.0.1:8080/?$1$2; return 200 foo; }",
    );
    let many = "+".repeat(1000);
    for (path, place) in [("/", ""), ("/q/", "?")] {
        let response = server.get(&format!("{path}{many}"));
        let location = response.header("Location").expect("a redirect").replace("%2B", "+");
        assert_eq!((response.status, location), (302, format!("http://127.0.0.1:8080/{place}{many}{many}")));
    }
    server.stop();
}

/// Vulnerable: the map changes the captures between measuring and writing. Here each use has the captures of its place.
fn captures_beside_map(driver: Driver) {
    let server = Setup::http(
        driver,
        "map $uri $mapped { ~(?<all>.+) \"<$1>\"; }
         map $uri $volatile { volatile; ~^(.)(.+)$ $2; }
         server { listen %UNIX%; location ~ ^/c/(.).*$ { return 200 \"$1|$mapped|$1|$volatile|$1\"; } }",
    )
    .start();
    let path = format!("/c/x{}", "y".repeat(3000));
    let right = format!("x|<{path}>|{path}|{}|/", &path[1..]);
    assert!(server.get(&path).text() == right);
    server.stop();
}

const LETTERS: &str = "abcdefghijklmnopqrstuvwxyz";

/// Vulnerable: `$1` reads uninitialized memory in the requests for slices.
fn captures_in_slices(driver: Driver) {
    let backend = Backend::tcp().serve(|asked, client| {
        let range = asked.header("Range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
        let (first, last) = range.expect("a range");
        let (first, last): (usize, usize) = (first.parse().expect("from"), last.parse().expect("to"));
        let body = &LETTERS[first..=last.min(25)];
        let fields = format!("Content-Range: bytes {first}-{}/26\r\nETag: \"1\"\r\n", first + body.len() - 1);
        client.send(format!("HTTP/1.1 206 Part\r\n{fields}Content-Length: {}\r\n\r\n{body}", body.len()));
        true
    });
    let text = "map test $mine { volatile; ~mismatch(.*) 1; default \"\"; }
        server { listen %UNIX%; location ~ (.*) { slice 10; proxy_set_header Range $slice_range;
        proxy_set_header X-Own \"<$mine$1>\"; proxy_pass http://BACKEND; } }";
    let server = Setup::http(driver, &text.replace("BACKEND", &backend.address)).start();
    assert_eq!(server.get("/file").text(), LETTERS);
    let own: Vec<_> = backend.asked().iter().map(|(_, asked)| asked.header("X-Own").map(str::to_owned)).collect();
    assert_eq!(own, vec![Some("</file>".to_owned()); 3]);
    server.stop();
}

/// Vulnerable: the quick include is finished twice, and its request freed while the page is still sent.
fn quick_include_behind_slow(driver: Driver) {
    let (page, slow) = (Backend::tcp(), Backend::tcp());
    let text = format!(
        "{LOOK} location /page {{ ssi on; proxy_buffering off; proxy_pass http://{}; }}
         location /slow {{ proxy_pass http://{}; }} location /quick {{ return 200 quick; }}",
        page.address(),
        slow.address()
    );
    let server = with_one_worker(Setup::server(driver, &text)).start();
    for _ in 0..20 {
        let mut client = server.connect();
        client.send(get("/page", ""));
        let mut upstream = page.accept();
        upstream.request();
        upstream.send("HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n");
        upstream.send("1<!--#include virtual=\"/slow\" -->2");
        let mut included = slow.accept();
        included.request();
        let quick = "<!--#include virtual=\"/quick\" -->";
        upstream.send(format!("{quick}3{quick}{quick}4"));
        look(&server);
        drop(upstream);
        included.send("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 4\r\n\r\nslow");
        assert_eq!(client.response().text(), "1slow2quick3quickquick4");
    }
    server.stop();
}

/// Vulnerable: bytes after a piece are read as the rest of its last character.
fn characters_in_pieces(driver: Driver) {
    /// Texts in UTF-8 and the same in KOI8-R; a question mark stands for broken bytes.
    const TEXTS: [(&[u8], &[u8]); 3] = [
        ("aЖ€я\u{1d11e}z".as_bytes(), b"a\xf6\xa4&#1103;&#119070;z"),
        (b"a\xd0<b>\xff\xe2\x82", b"a?<b>??"),
        (b"\xf0\x9d\x84a\xe2\xe2\x82\xac\xf0\x9d", b"?a?\xa4?"),
    ];
    let backend = Backend::tcp().serve(|asked, client| {
        let (number, length) = asked.target[1..].split_once('/').expect("a text and a length");
        let text = TEXTS[number.parse::<usize>().expect("a number")].0;
        client.send("HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nTransfer-Encoding: chunked\r\n\r\n");
        for piece in text.chunks(length.parse().expect("a length")) {
            client.send([format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat());
        }
        client.send("0\r\n\r\n");
        true
    });
    let text = "charset_map koi8-r utf-8 { F6 D096; A4 E282AC; }
        server { listen %UNIX%; proxy_buffering BUFFERING; source_charset utf-8; charset koi8-r;
        location / { proxy_pass http://BACKEND; } }";
    for buffering in ["off", "on"] {
        let text = text.replace("BACKEND", &backend.address).replace("BUFFERING", buffering);
        let server = Setup::http(driver, &text).start();
        for (number, (_, right)) in TEXTS.iter().enumerate() {
            for length in [1, 2, 3, 100] {
                let body = server.get(&format!("/{number}/{length}")).body;
                assert_eq!(body.escape_ascii().to_string(), right.escape_ascii().to_string(), "{length}");
            }
        }
        server.stop();
    }
}

/// Vulnerable: the length overflows the 24 bits of a frame, and the bytes after 16 MiB are read as frames.
fn long_body_over_http2(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "client_max_body_size 20m; client_body_buffer_size 20m;
         location / {{ proxy_http_version 2; proxy_set_body $request_body; proxy_pass http://{}; }}",
        backend.address()
    );
    let server = Server::start(driver, &text);
    let request = frame(frame_type::HEADERS, flag::END_STREAM | flag::END_HEADERS, 3, block(&GET));
    let body = [vec![b'x'; 1 << 24], request, vec![b'y'; 1000]].concat();
    let mut client = server.connect();
    client.send(format!("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n", body.len()));
    client.send(&body);
    // The peer rejects frames that are longer than 16 KiB.
    let mut upstream = Http2Server::accept(&backend);
    let asked = upstream.whole_request();
    assert!(asked.body == body, "{} bytes", asked.body.len());
    upstream.answer(asked.stream, "one");
    assert_eq!(client.response().text(), "one");
    assert_eq!(upstream.asked.len(), 1);
    server.stop();
}

/// Vulnerable: the encoded length of the field takes more bytes than were measured for it.
fn long_field_over_http2(driver: Driver) {
    let head = http1::Limits { line_max: 8 << 20, head_max: 8 << 20, ..http1::Limits::default() };
    let limits = Limits { head, continuations_max: 1000, block_max: 8 << 20, ..http2_server::limits() };
    for (fields, pass) in [("", "proxy_http_version 2; proxy_pass http:"), ("Te: trailers\r\n", "grpc_pass grpc:")] {
        let backend = Backend::tcp();
        let text = format!(
            "ignore_invalid_headers off; large_client_header_buffers 4 4m; {LOOK}
             location / {{ {pass}//{}; }}",
            backend.address()
        );
        let server = Server::start(driver, &text);
        for length in [100_000, 2_500_000] {
            let long = "a".repeat(length);
            let mut client = server.connect();
            client.send(get("/", &format!("{fields}X-Long: {long}\r\n")));
            let mut upstream = Http2Server::accept_with(&backend, limits.clone());
            let asked = upstream.request();
            assert!(asked.header("x-long") == Some(&*long), "{length}");
            upstream.answer(asked.stream, "whole");
            assert_eq!(client.response().text(), "whole");
            upstream.close();
        }
        look(&server);
        server.stop();
    }
}

/// Vulnerable: the fields are parsed from where the status line broke off, in the state of another parser.
fn nearly_a_status_line(driver: Driver) {
    for pass in ["uwsgi_pass", "scgi_pass"] {
        let backend = Backend::tcp();
        let text = format!("{LOOK} location / {{ {pass} {}; }}", backend.address());
        let server = with_one_worker(Setup::server(driver, &text)).start();
        for name in ["H", "HT", "HTT", "HTTP", "HTTP-1"] {
            for at in 1..name.len() + 3 {
                let answer = format!("{name}: one\r\nStatus: 201 Made\r\n\r\nbody");
                let mut client = server.connect();
                client.send(get("/", ""));
                let mut upstream = backend.accept();
                assert!(!upstream.read_some_or_end().is_empty());
                let (first, rest) = answer.split_at(at);
                upstream.send(first);
                look(&server);
                upstream.send(rest);
                drop(upstream);
                let response = client.response();
                assert_eq!((response.status, response.header(name), response.text()), (201, Some("one"), "body"));
            }
        }
        server.stop();
    }
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).expect("a directory").map(|entry| entry.expect("an entry").path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// Vulnerable: the length after the alias is negative, and the destination's path is written out of bounds.
fn copy_under_alias(driver: Driver) {
    let text = "location /a/long/prefix/ { alias %DIR%/html/; dav_methods PUT DELETE MKCOL COPY MOVE;
        create_full_put_path on; }";
    let setup = Setup::server(driver, text).file("html/file", "the only one").file("html/other", "");
    // The test owns the directory.
    let setup = if is_root() { setup.replace("daemon off;", "daemon off; user root;") } else { setup };
    let server = setup.start();
    let destinations =
        ["/", "/x", "/a", "/a/long", "/a/long/prefix", "/a/long/prefixed/file", "/a/long/prefix/../../../up", "//x"];
    for method in ["COPY", "MOVE"] {
        for destination in destinations {
            for destination in [destination.to_owned(), format!("http://h{destination}")] {
                let fields = format!("Destination: {destination}\r\nOverwrite: T\r\n");
                let request = get("/a/long/prefix/file", &fields).replace("GET", method);
                let status = server.connect().ask(request).status;
                assert!(matches!(status, 400 | 409), "{method} {destination}: {status}");
            }
        }
    }
    let is_copy = |path: &PathBuf| fs::read(path).is_ok_and(|text| text == b"the only one");
    assert_eq!(files(server.directory.path()).iter().filter(|path| is_copy(path)).count(), 1);
    let request = get("/a/long/prefix/file", "Destination: /a/long/prefix/new\r\n").replace("GET", "COPY");
    assert_eq!(server.connect().ask(request).status, 204);
    server.stop();
}

fn atom(name: &[u8; 4], parts: &[&[u8]]) -> Vec<u8> {
    let data = parts.concat();
    [&(data.len() as u32 + 8).to_be_bytes()[..], name, &data].concat()
}

fn numbers(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_be_bytes()).collect()
}

/// A film of four samples a second, with one of its tables replaced.
fn film(replaced: &[u8; 4], name: &[u8; 4], table: &[u32]) -> Vec<u8> {
    let usual: [(&[u8; 4], &[u32]); 4] =
        [(b"stts", &[0, 1, 40, 250]), (b"stsc", &[0, 1, 1, 40, 1]), (b"stsz", &[0, 10, 40]), (b"stco", &[0, 1, 500])];
    let tables = usual.map(|(own, usual)| {
        let (name, table) = if own == replaced { (name, table) } else { (own, usual) };
        atom(name, &[&numbers(table)])
    });
    let media_head = atom(b"mdhd", &[&numbers(&[0, 0, 0, 1_000, 10_000, 0])]);
    let media = atom(b"mdia", &[&media_head, &atom(b"minf", &[&atom(b"stbl", &[&tables.concat()])])]);
    let head = atom(b"mvhd", &[&numbers(&[0, 0, 0, 1_000, 10_000]), &[0; 80]]);
    let mut film = atom(b"moov", &[&head, &atom(b"trak", &[&media])]);
    film.extend(atom(b"free", &[&vec![0; 484 - film.len()]]));
    film.extend(atom(b"mdat", &[&[b'm'; 400]]));
    film
}

/// The replaced table, the name of the replacement, and its numbers.
type Replaced = (&'static [u8; 4], &'static [u8; 4], &'static [u32]);

/// Vulnerable: the first entry of an empty table is read and written.
fn films_without_chunks(driver: Driver) {
    let tables: [Replaced; 14] = [
        (b"none", b"none", &[]),
        (b"stco", b"stco", &[0, 0]),
        (b"stco", b"stco", &[0, 1]),
        (b"stco", b"stco", &[0]),
        (b"stco", b"stco", &[0, u32::MAX, 500]),
        (b"stco", b"stco", &[0, 1, u32::MAX]),
        (b"stco", b"co64", &[0, 0]),
        (b"stco", b"co64", &[0, 1, 0]),
        (b"stco", b"co64", &[0, u32::MAX / 8 + 1, 0, 500]),
        (b"stco", b"co64", &[0, 1, u32::MAX, u32::MAX]),
        (b"stsc", b"stsc", &[0, 0]),
        (b"stsc", b"stsc", &[0, 1, 0, 0, 1]),
        (b"stsz", b"stsz", &[0, 0, 0]),
        (b"stts", b"stts", &[0, 0]),
    ];
    let setup = Setup::server(driver, "types { video/mp4 mp4; } root %DIR%/html; location / { mp4; }");
    let make = |setup: Setup, (index, table): (usize, &Replaced)| {
        setup.file(&format!("html/{index}.mp4"), film(table.0, table.1, table.2))
    };
    let server = tables.iter().enumerate().fold(setup, make).start();
    assert_eq!(server.get("/0.mp4?start=1").status, 200);
    for index in 0..tables.len() {
        for part in ["start=1", "end=1", "start=0.5&end=0.7", "start=9.99", "start=0", "start=5&end=100"] {
            let response = server.get(&format!("/{index}.mp4?{part}"));
            assert!(matches!(response.status, 200 | 500), "{index} {part}: {}", response.status);
            // The media are the file's own bytes.
            let at = response.body.windows(4).position(|window| window == b"mdat");
            let media = at.map_or(&b""[..], |at| &response.body[at + 4..]);
            let is_own = media.len() <= 400 && media.iter().all(|&byte| byte == b'm');
            assert!(is_own || response.status == 500, "{index} {part}");
        }
    }
    server.stop();
}

/// A DER element.
fn element(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let content = parts.concat();
    let [high, low] = u16::try_from(content.len()).expect("short").to_be_bytes();
    let head: &[u8] = match content.len() {
        0..0x80 => &[tag, low],
        0x80..0x100 => &[tag, 0x81, low],
        _ => &[tag, 0x82, high, low],
    };
    [head, &content].concat()
}

/// An OCSP responder authorized by the authority.
fn signer_of_statuses(authority: &Authority) -> Pair {
    let mut params = params(&["responder"]);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::OcspSigning];
    authority.sign(params, KeyPair::generate().expect("a key"))
}

const GENERALIZED_TIME: u8 = 0x18;

/// The status `good` in an OCSP response (RFC 6960, section 4.2.1); [`revoked`] is that of a revoked certificate.
fn good() -> Vec<u8> {
    b"\x80\x00".to_vec()
}

fn revoked() -> Vec<u8> {
    element(0xa1, &[&element(GENERALIZED_TIME, &[b"20250101000000Z"])])
}

/// Answers the next OCSP request with this status.
#[track_caller]
fn answer_ocsp(responder: &Backend, signer: &Pair, status: &[u8]) {
    let mut asked = responder.accept();
    let target = asked.request().target;
    let text = target.rsplit('/').next().expect("a path").replace("%2B", "-").replace("%2F", "_").replace("%3D", "");
    let request = gale_tls::from_base64_url(text.as_bytes()).expect("base64");
    // Unwraps the request, its signed part, the list and one entry, down to the certificate's ID.
    let id = (0..4).fold(&request[..], |element, _| &element[2..]);
    let times = [&b"20250101000000Z"[..], b"20900101000000Z"].map(|time| element(GENERALIZED_TIME, &[time]));
    let single = element(0x30, &[id, status, &times[0], &element(0xa0, &[&times[1]])]);
    let by = element(0xa2, &[&element(0x04, &[&[1; 20]])]);
    let told = element(0x30, &[&by, &times[0], &element(0x30, &[&single])]);
    let key = KeyPair::from_pem(&signer.key).expect("a key");
    let signature = element(0x03, &[&[0], &key.sign(&told).expect("a signature")]);
    let ecdsa_with_sha256 = element(0x30, &[b"\x06\x08\x2a\x86\x48\xce\x3d\x04\x03\x02"]);
    let own = CertificateDer::from_pem_slice(signer.certificate.as_bytes()).expect("PEM");
    let certificates = element(0xa0, &[&element(0x30, &[&own])]);
    let basic = element(0x30, &[&told, &ecdsa_with_sha256, &signature, &certificates]);
    let kind = b"\x06\x09\x2b\x06\x01\x05\x05\x07\x30\x01\x01";
    let typed = element(0x30, &[kind, &element(0x04, &[&basic])]);
    let response = element(0x30, &[b"\x0a\x01\x00", &element(0xa0, &[&typed])]);
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/ocsp-response\r\nContent-Length:";
    asked.send([format!("{head} {}\r\n\r\n", response.len()).as_bytes(), &response].concat());
    asked.finish_sending();
}

const OWN: &str = "ssl_certificate %DIR%/own.crt; ssl_certificate_key %DIR%/own.key;";

/// Adds a certificate for these names, and its authority, which also signs client certificates.
fn with_certificate(setup: Setup, authority: &Authority, names: &[&str]) -> Setup {
    let own = authority.ecdsa(names);
    setup.file("own.crt", own.certificate).file("own.key", own.key).file("authority.crt", &authority.pem)
}

/// Vulnerable: the responder is asked, and its answer is ignored.
fn revoked_in_stream(driver: Driver) {
    let authority = Authority::new("authority");
    let (signer, responder) = (signer_of_statuses(&authority), Backend::tcp());
    let client = authority.ecdsa(&["client"]);
    let text = format!(
        "server {{ listen %UNIX% ssl; {OWN} ssl_verify_client on; ssl_client_certificate %DIR%/authority.crt;
         ssl_ocsp on; ssl_ocsp_responder http://{}/ocsp; return secret; }}",
        responder.address()
    );
    let server = with_certificate(Setup::stream(driver, &text), &authority, &["own.test"]).start();
    for versions in [[&TLS13], [&TLS12]] {
        for (status, right) in [(good(), "secret"), (revoked(), ""), (good(), "secret")] {
            let tls = Tls::with(&authority, &versions, Some(&client));
            let path = socket(&server);
            let session = std::thread::spawn(move || {
                let mut text = Vec::new();
                // The session may also end with an alert.
                let _ = tls.connect(&path, "own.test").and_then(|mut session| session.read_to_end(&mut text));
                text
            });
            answer_ocsp(&responder, &signer, &status);
            assert_eq!(session.join().expect("no panic"), right.as_bytes(), "{versions:?}");
        }
    }
    server.stop();
}

/// A client certificate with this URL of a responder.
fn certificate_with_responder(authority: &Authority, url: &str) -> Pair {
    let mut params = params(&["client"]);
    let ocsp = b"\x06\x08\x2b\x06\x01\x05\x05\x07\x30\x01";
    let access = element(0x30, &[&element(0x30, &[ocsp, &element(0x86, &[url.as_bytes()])])]);
    params.custom_extensions = vec![CustomExtension::from_oid_content(&[1, 3, 6, 1, 5, 5, 7, 1, 1], access)];
    authority.sign(params, KeyPair::generate().expect("a key"))
}

/// Vulnerable: the name server's answer is delivered to a connection that was freed.
fn gone_before_responder(driver: Driver) {
    let authority = Authority::new("authority");
    let (signer, responder) = (signer_of_statuses(&authority), Backend::tcp());
    let port = responder.address().rsplit(':').next().expect("a port").to_owned();
    let names = UdpSocket::bind("127.0.0.1:0").expect("a port");
    names.set_read_timeout(Some(DEADLINE)).expect("an option");
    let text = format!(
        "server {{ listen %TCP%; {LOOK} }}
         server {{ listen %UNIX% ssl; {OWN} ssl_verify_client on; ssl_client_certificate %DIR%/authority.crt;
         ssl_ocsp on; resolver {} ipv6=off; return 200 $ssl_client_verify; }}",
        names.local_addr().expect("an address")
    );
    let setup = with_certificate(Setup::http(driver, &text), &authority, &["own.test"]);
    let server = with_one_worker(setup).start();
    for number in 0..6 {
        let leaves = number % 2 == 0;
        // Port 1 has no listener.
        let port = if leaves { "1" } else { &port };
        let url = format!("http://responder{number}.test:{port}/ocsp");
        let own = certificate_with_responder(&authority, &url);
        let mut client = Tls::with(&authority, &[&TLS13], Some(&own)).client(&socket(&server), "own.test");
        client.send(get("/", ""));
        let mut query = [0; 512];
        let (length, from) = names.recv_from(&mut query).expect("a query");
        let staying = (!leaves).then_some(client);
        assert_eq!(server.connect_tcp(1).get("/look").text(), "seen");
        let mut answer = query[..length].to_vec();
        (answer[2], answer[3], answer[7]) = (0x81, 0x80, 1);
        // Name of the question, type A, class, a TTL of one hour, the address.
        answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 14, 16, 0, 4, 127, 0, 0, 1]);
        names.send_to(&answer, from).expect("loopback takes it");
        let Some(mut client) = staying else { continue };
        answer_ocsp(&responder, &signer, &good());
        assert_eq!(client.response().text(), "SUCCESS");
    }
    server.stop();
}

/// Vulnerable: plaintext before the handshake is taken for the response.
fn plaintext_before_tls(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "http {{ access_log %DIR%/access.log; server {{ listen %UNIX%; location / {{ proxy_pass https://{0}; }} }} }}
         stream {{ server {{ listen %TCP%; proxy_ssl on; proxy_pass {0}; }} }}",
        backend.address()
    );
    let server = Setup::configuration(&support::configuration(driver, &text)).start();
    let injected = "HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\ninjected";
    let mut client = server.connect();
    client.send(get("/", ""));
    let mut peer = backend.accept();
    peer.send(injected);
    let response = client.response();
    assert_eq!((response.status, response.text().contains("injected")), (502, false));
    let mut session = server.connect_tcp(1);
    let mut peer = backend.accept();
    peer.send(injected);
    session.assert_closed();
    server.stop();
}

/// A client's session store that offers each session to every server.
#[derive(Debug)]
struct Sessions(ClientSessionMemoryCache);

fn everywhere() -> ServerName<'static> {
    ServerName::try_from("everywhere").expect("a name")
}

impl ClientSessionStore for Sessions {
    fn set_kx_hint(&self, _: ServerName<'static>, group: NamedGroup) {
        self.0.set_kx_hint(everywhere(), group);
    }

    fn kx_hint(&self, _: &ServerName<'_>) -> Option<NamedGroup> {
        self.0.kx_hint(&everywhere())
    }

    fn set_tls12_session(&self, _: ServerName<'static>, value: Tls12ClientSessionValue) {
        self.0.set_tls12_session(everywhere(), value);
    }

    fn tls12_session(&self, _: &ServerName<'_>) -> Option<Tls12ClientSessionValue> {
        self.0.tls12_session(&everywhere())
    }

    fn remove_tls12_session(&self, _: &ServerName<'static>) {
        self.0.remove_tls12_session(&everywhere());
    }

    fn insert_tls13_ticket(&self, _: ServerName<'static>, value: Tls13ClientSessionValue) {
        self.0.insert_tls13_ticket(everywhere(), value);
    }

    fn take_tls13_ticket(&self, _: &ServerName<'static>) -> Option<Tls13ClientSessionValue> {
        self.0.take_tls13_ticket(&everywhere())
    }
}

/// A client that offers its sessions to all servers.
struct Wanderer(Arc<ClientConfig>);

impl Wanderer {
    fn new(authority: &Authority, version: &'static SupportedProtocolVersion, own: Option<&Pair>) -> Wanderer {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(authority.pem.as_bytes()).expect("PEM")).expect("an authority");
        let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_protocol_versions(&[version])
            .expect("versions")
            .with_root_certificates(roots);
        let mut config = match own {
            None => builder.with_no_client_auth(),
            Some(own) => {
                let chain = vec![CertificateDer::from_pem_slice(own.certificate.as_bytes()).expect("PEM")];
                let key = PrivateKeyDer::from_pem_slice(own.key.as_bytes()).expect("PEM");
                builder.with_client_auth_cert(chain, key).expect("a pair")
            }
        };
        config.resumption = Resumption::store(Arc::new(Sessions(ClientSessionMemoryCache::new(8))));
        Wanderer(Arc::new(config))
    }

    /// Connects to the server of this name and requests a host; returns the status, the text, and whether the session
    /// was resumed.
    #[track_caller]
    fn ask(&self, server: &Server, name: &str, host: &str) -> (u16, String, bool) {
        let stream = UnixStream::connect(socket(server)).expect("it listens");
        stream.set_read_timeout(Some(DEADLINE)).expect("an option");
        let name = ServerName::try_from(name.to_owned()).expect("a name");
        let session = ClientConnection::new(Arc::clone(&self.0), name).expect("a session");
        let mut stream = StreamOwned::new(session, stream);
        stream.conn.complete_io(&mut stream.sock).expect("a handshake");
        let is_resumed = stream.conn.handshake_kind() == Some(rustls::HandshakeKind::Resumed);
        let response = Client::above(stream).ask(format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        (response.status, response.text().to_owned(), is_resumed)
    }
}

/// Vulnerable: one server's session is resumed with another, without verification by that server's client authority.
fn session_of_another_server(driver: Driver) {
    let (authority, other) = (Authority::new("authority"), Authority::new("other"));
    let server = |name: &str, more: &str| {
        format!("server {{ listen %UNIX% ssl; server_name {name}.test; {OWN} {more} return 200 {name}; }}\n")
    };
    let text = server("open", "")
        + &server("one", "ssl_verify_client on; ssl_client_certificate %DIR%/authority.crt;")
        + &server("other", "ssl_verify_client on; ssl_client_certificate %DIR%/other.crt;");
    let names = ["open.test", "one.test", "other.test"];
    let setup = with_certificate(Setup::http(driver, &text), &authority, &names).file("other.crt", &other.pem);
    let server = setup.start();
    let own = authority.ecdsa(&["client"]);
    for version in [&TLS13, &TLS12] {
        let without = Wanderer::new(&authority, version, None);
        assert_eq!(without.ask(&server, "open.test", "open.test"), (200, "open".to_owned(), false));
        assert_eq!(without.ask(&server, "open.test", "open.test"), (200, "open".to_owned(), true));
        let (status, text, is_resumed) = without.ask(&server, "one.test", "one.test");
        assert_eq!((status, text.contains("one"), is_resumed), (400, false, false), "{text}");
        assert_eq!(without.ask(&server, "open.test", "one.test").0, 421);
        let with = Wanderer::new(&authority, version, Some(&own));
        assert_eq!(with.ask(&server, "one.test", "one.test"), (200, "one".to_owned(), false));
        assert_eq!(with.ask(&server, "one.test", "one.test"), (200, "one".to_owned(), true));
        let (status, text, is_resumed) = with.ask(&server, "other.test", "other.test");
        assert_eq!((status, text.contains("other"), is_resumed), (400, false, false), "{text}");
        assert_eq!(with.ask(&server, "one.test", "other.test").0, 421);
    }
    server.stop();
}

/// Vulnerable: the rest of the URI after the alias has a negative length.
fn alias_behind_rewrite(driver: Driver) {
    let mut server = Setup::server(
        driver,
        "location /a/long/prefix/ { alias %DIR%/html/; rewrite ^/a/long/prefix/(.*)$ /$1 break;
         add_header X-Name \"<$request_filename>\" always; }",
    )
    .file("html/file", "content")
    .start();
    let worker = server.worker();
    for path in ["", "x", "file", "a/long/prefix/file"] {
        let response = server.get(&format!("/a/long/prefix/{path}"));
        // Logged in nginx's words, as an alert.
        server.wait_logged("\"alias\" cannot be used in location \"/a/long/prefix/\" where URI was rewritten");
        assert_eq!((response.status, response.header("X-Name")), (500, Some("<>")), "{path}");
    }
    assert_eq!(server.worker(), worker);
    server.end(Signal::TERM);
}

/// Vulnerable: the eight bits that count a request's pending operations overflow, and the request is freed too early.
fn hundreds_of_includes(driver: Driver) {
    let include = |number| format!("<!--#include virtual=\"/part{}.txt\" -->", number % 10);
    let page: String = (0..300).map(include).collect();
    let text = "root %DIR%/html; types { text/html html; text/plain txt; } ssi on; aio threads; sendfile off;";
    let setup = Setup::server(driver, text).file("html/page.html", page);
    let part = |number: usize| format!("{number}").repeat(3000);
    let setup = (0..10).fold(setup, |setup, number| setup.file(&format!("html/part{number}.txt"), part(number)));
    let server = setup.start();
    let right: String = (0..300).map(|number| part(number % 10)).collect();
    assert!(server.get("/page.html").text() == right);
    server.stop();
}

/// Vulnerable: the stream is freed by the reset, and again at its end.
fn reset_at_once(driver: Driver) {
    let backend = Backend::tcp().serve(|_, client| {
        client.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        true
    });
    let text = format!(
        "http2 on; root %DIR%/html; location /return {{ return 200 text; }} location /pass {{ proxy_pass http://{}; }}",
        backend.address
    );
    let server = Setup::server(driver, &text).file("html/file", "x".repeat(100_000)).start();
    for _ in 0..10 {
        let mut client = Http2::unix(&server);
        let mut frames = Vec::new();
        for number in 0..90 {
            let (stream, path) = (2 * number + 1, ["/return", "/file", "/pass"][number as usize % 3]);
            let fields = [GET[0], GET[1], (":path", path), GET[3]];
            let flags = flag::END_HEADERS | if number % 2 == 0 { flag::END_STREAM } else { 0 };
            frames.extend(frame(frame_type::HEADERS, flags, stream, block(&fields)));
            frames.extend(frame(frame_type::RST_STREAM, 0, stream, [0, 0, 0, number as u8 % 14]));
        }
        client.raw(frames);
        // The connection is still parsed: DATA on stream 0 is an error.
        client.raw(frame(frame_type::DATA, 0, 0, "data"));
        assert_eq!(client.raw_goaway(), Some(ErrorCode::PROTOCOL_ERROR));
        assert_eq!(Http2::unix(&server).get("/return").text(), "text");
    }
    server.stop();
}

/// Maximum memory in bytes for 200 requests of nearly the largest size, whose responses have no window.
const MEMORY_MAX: u64 = 16 << 20;

/// Vulnerable: each byte becomes a field with memory of its own, held as long as the client opens no window.
fn header_bomb(driver: Driver) {
    let text = "http2 on; http2_max_concurrent_streams 128; root %DIR%/html; location /return { return 200 text; }";
    let setup = with_one_worker(Setup::server(driver, text)).file("html/file", "x".repeat(1 << 20));
    let server = setup.start();
    let request = |stream: u32, value: &str, references: usize| {
        // A literal that is added to the table (RFC 7541, section 6.2.1), and then its index, 62.
        let literal = [&[0x40, 6][..], b"cookie", &[value.len() as u8], value.as_bytes()].concat();
        let fields = [GET[0], GET[1], (":path", "/file"), GET[3]];
        let block = [block(&fields), literal, vec![0x80 | 62; references]].concat();
        frame(frame_type::HEADERS, flag::END_STREAM | flag::END_HEADERS, stream, block)
    };
    for (value, references) in [("", 16_000), ("", 4_000), (&*"a".repeat(100), 8_000), (&*"a".repeat(100), 1_000)] {
        let mut client = Http2::unix(&server);
        client.raw(request(1, value, references));
        let (status, code) = client.raw_answer();
        assert!(code.is_some() || status.is_some_and(|status| status >= 400), "{references}: {status:?} {code:?}");
    }
    let before = anonymous_memory(server.worker());
    let mut clients: Vec<Http2> = Vec::new();
    for _ in 0..2 {
        let mut client = Http2::unix(&server);
        let settings = [&settings::id::INITIAL_WINDOW_SIZE.to_be_bytes()[..], &[0; 4]].concat();
        client.raw(frame(frame_type::SETTINGS, 0, 0, settings));
        for number in 0..100 {
            client.raw(request(2 * number + 1, &"a".repeat(100), 150));
        }
        clients.push(client);
    }
    assert_eq!(Http2::unix(&server).get("/return").text(), "text");
    let more = anonymous_memory(server.worker()).saturating_sub(before);
    assert!(more < MEMORY_MAX, "{more} bytes");
    drop(clients);
    server.stop();
}

/// Vulnerable: all bytes after the request are passed on, before the upstream server agrees to the upgrade, or if it
/// does not.
fn request_behind_upgrade(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "location / {{ proxy_pass http://{0}; }}
         location /any/ {{ proxy_pass http://{0}; proxy_set_header Upgrade $http_upgrade;
             proxy_set_header Connection upgrade; }}
         location /admin {{ deny all; }}",
        backend.address()
    );
    let server = Server::start(driver, &text);
    for path in ["/", "/any/"] {
        for upgrade in ["websocket", "other"] {
            let key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n";
            let first = get(path, &format!("Upgrade: {upgrade}\r\nConnection: Upgrade\r\n{key}"));
            let mut client = server.connect();
            client.send(first + &get("/admin", ""));
            let mut peer = backend.accept();
            peer.keep_record();
            assert_eq!(peer.request().target, path);
            peer.send("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno");
            assert_eq!(client.response().text(), "no", "{path} {upgrade}");
            assert_eq!(client.response().status, 403, "{path} {upgrade}");
            peer.assert_closed();
            assert!(!String::from_utf8_lossy(peer.record()).contains("/admin"), "{path} {upgrade}");
        }
    }
    server.stop();
}

/// Vulnerable: proxy and upstream server disagree on the end of the body, and the rest is taken for a request.
fn odd_transfer_codings(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!("location / {{ proxy_pass http://{}; }} location /admin {{ deny all; }}", backend.address());
    let server = Server::start(driver, &text);
    for (version, fields) in [
        ("1.0", "Transfer-Encoding: chunked\r\n"),
        ("1.0", "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n"),
        ("1.1", "Transfer-Encoding: chunked, identity\r\n"),
        ("1.1", "Transfer-Encoding: identity, chunked\r\n"),
        ("1.1", "Transfer-Encoding: chunked, chunked\r\n"),
        ("1.1", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"),
        ("1.1", "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n"),
        ("1.1", "Transfer-Encoding: xchunked\r\n"),
        ("1.1", "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n"),
        ("1.1", "Transfer-Encoding: identity\r\nContent-Length: 5\r\n"),
        ("1.1", "Transfer-Encoding:\r\nContent-Length: 5\r\n"),
    ] {
        let mut client = server.connect();
        client.send(format!("POST / HTTP/{version}\r\nHost: h\r\n{fields}\r\n0\r\n\r\n{}", get("/admin", "")));
        let response = client.response();
        assert!(matches!(response.status, 400 | 501), "{fields}: {}", response.status);
        client.assert_closed();
    }
    assert!(backend.is_idle());
    // Without a length there is no body.
    let mut client = server.connect();
    client.send(format!("POST /none HTTP/1.0\r\nHost: h\r\nConnection: keep-alive\r\n\r\n{}", get("/admin", "")));
    let mut peer = backend.accept();
    let asked = peer.request();
    assert_eq!((asked.target.as_str(), asked.body.len()), ("/none", 0));
    peer.send("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok");
    assert_eq!((client.response().text(), client.response().status), ("ok", 403));
    peer.assert_closed();
    server.stop();
}

/// A backend that responds with its name, to be cached.
fn named(name: &'static str) -> support::Serving {
    Backend::tcp().serve(move |_, client| {
        let fields = "Cache-Control: max-age=3600\r\n";
        client.send(format!("HTTP/1.1 200 OK\r\n{fields}Content-Length: {}\r\n\r\n{name}", name.len()));
        true
    })
}

/// Vulnerable: the key is the path alone, and one host gets the response stored for another.
fn hosts_in_cache_key(driver: Driver) {
    let (one, other) = (named("one"), named("other"));
    let host = |name: &str, backend: &support::Serving| {
        let location = format!("location / {{ proxy_pass http://{}; }}", backend.address);
        format!("server {{ listen %UNIX%; server_name {name}.test; proxy_cache all; {location} }}\n")
    };
    let text = "proxy_cache_path %DIR%/cache keys_zone=all:1m; add_header X-Cache $upstream_cache_status;\n".to_owned()
        + &host("one", &one)
        + &host("other", &other);
    let server = Setup::http(driver, &text).start();
    for right in ["MISS", "HIT"] {
        for name in ["one", "other"] {
            let response = server.connect().ask(format!("GET /path HTTP/1.1\r\nHost: {name}.test\r\n\r\n"));
            assert_eq!((response.text(), response.header("X-Cache")), (name, Some(right)));
        }
    }
    server.stop();
}

/// Vulnerable: the response comes from the cache, the body stays on the connection, and is read as the next request.
fn body_of_a_hit(driver: Driver) {
    let backend = named("stored");
    let text = format!(
        "proxy_cache_path %DIR%/cache keys_zone=all:1m; add_header X-Cache $upstream_cache_status;
         server {{ listen %UNIX%; proxy_cache all; location / {{ proxy_pass http://{}; }}
             location /admin {{ return 200 admin; }} }}",
        backend.address
    );
    let server = Setup::http(driver, &text).start();
    assert_eq!(server.get("/path").header("X-Cache"), Some("MISS"));
    let inner = get("/admin", "");
    let chunked = format!("{:x}\r\n{inner}\r\n0\r\n\r\n", inner.len());
    for (fields, body) in [
        (format!("Content-Length: {}\r\n", inner.len()), &inner),
        ("Transfer-Encoding: chunked\r\n".to_owned(), &chunked),
    ] {
        let mut client = server.connect();
        client.send(get("/path", &fields) + body + &get("/path?next", "Connection: close\r\n"));
        assert_eq!(client.response().header("X-Cache"), Some("HIT"));
        assert_eq!(client.response().text(), "stored");
        client.assert_closed();
    }
    server.stop();
}

/// Vulnerable: all fields that a client lists in Connection are removed, even those set by the configuration.
fn nominated_fields(driver: Driver) {
    let backend = Backend::tcp();
    for version in ["1.1", "2"] {
        let text = format!(
            "location / {{ proxy_http_version {version}; proxy_set_header X-Real-IP 192.0.2.1;
             proxy_pass http://{}; }}",
            backend.address()
        );
        let server = Server::start(driver, &text);
        let mut client = server.connect();
        client.send(get("/", "Connection: keep-alive, X-Real-IP, Host\r\nX-Real-IP: 203.0.113.9\r\n"));
        if version == "2" {
            let mut upstream = Http2Server::accept(&backend);
            let asked = upstream.request();
            let own: Vec<_> = asked.headers.iter().filter(|(name, _)| name == "x-real-ip").collect();
            assert_eq!((own.len(), own[0].1.as_str(), asked.header("connection")), (1, "192.0.2.1", None));
            upstream.answer(asked.stream, "ok");
        } else {
            let mut upstream = backend.accept();
            let asked = upstream.request();
            assert_eq!((asked.header("X-Real-IP"), asked.header("Host")), (Some("192.0.2.1"), Some(backend.address())));
            upstream.send("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok");
        }
        assert_eq!(client.response().text(), "ok");
        server.stop();
    }
}

/// Vulnerable: proxy and upstream server disagree on the end of the extension, which hides a request from one of them.
fn line_ends_in_chunks(driver: Driver) {
    let backend = Backend::tcp();
    for buffering in ["on", "off"] {
        let text =
            format!("location / {{ proxy_request_buffering {buffering}; proxy_pass http://{}; }}", backend.address());
        let server = Server::start(driver, &text);
        for wrong in ["5;\n", "5;a\n", "5;a=\"\n\"\r\n", "5;a\rb\r\n", "5;a\r", "5\n", "5\rx\r\n", "5;a=\"\r\"\r\n"] {
            let mut client = server.connect();
            let body = format!("{wrong}hello\r\n0\r\n\r\n{}", get("/smuggled", ""));
            client.send(format!("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n{body}"));
            let mut peer = (buffering == "off").then(|| backend.accept());
            assert_eq!(client.response().status, 400, "{wrong:?}");
            client.assert_closed();
            let Some(peer) = &mut peer else { continue };
            let passed = peer.read_to_end();
            let passed = String::from_utf8_lossy(&passed);
            assert!(!passed.contains("smuggled") && !passed.contains("\r\n0\r\n"), "{wrong:?}: {passed}");
        }
        assert!(buffering == "off" || backend.is_idle());
        server.stop();
    }
}

/// Values of a field that reach the location of `auth_request`, from a client of HTTP/1 and one of HTTP/2.
fn asked_by_auth(driver: Driver, own: &str, fields: &[(&str, &str)], name: &str) -> Vec<Vec<String>> {
    let auth = Backend::tcp().serve(|_, client| {
        client.send("HTTP/1.1 204 No Content\r\n\r\n");
        true
    });
    let text = format!(
        "http2 on; location / {{ auth_request /auth; return 200 text; }}
         location /static {{ auth_request /auth; alias %DIR%/file; }}
         location = /auth {{ internal; {own} proxy_pass http://{}; proxy_pass_request_body off; }}",
        auth.address
    );
    let server = Setup::server(driver, &text).file("file", "text").start();
    let lines: String = fields.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    assert_eq!(server.connect().ask(get("/static", &lines)).text(), "text");
    let mut client = Http2::unix(&server);
    let lower: Vec<(String, &str)> = fields.iter().map(|(name, value)| (name.to_ascii_lowercase(), *value)).collect();
    let lower: Vec<(&str, &str)> = lower.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    let stream = client.begin("GET", "/static", &lower, true);
    assert_eq!(client.answer(stream).text(), "text");
    server.stop();
    // Compares names as applications see them: CGI's variables do not distinguish these characters.
    let is_it = |other: &str| other.replace(['_', '.'], "-").eq_ignore_ascii_case(name);
    let told = auth.asked();
    let values = |asked: &support::Asked| {
        asked.headers.iter().filter(|(name, _)| is_it(name)).map(|(_, value)| value.clone()).collect()
    };
    told.iter().map(|(_, asked)| values(asked)).collect()
}

/// Vulnerable: a name that applications treat as the same is passed on, beside the proxy's field or instead of it.
fn aliases_of_fields(driver: Driver) {
    let fields = [
        ("X_Forwarded_Proto", "spoofed"),
        ("X-Forwarded_Proto", "spoofed"),
        ("X.Forwarded.Proto", "spoofed"),
        ("x-forwarded-PROTO", "spoofed"),
    ];
    let told = asked_by_auth(driver, "proxy_set_header X-Forwarded-Proto $scheme;", &fields, "X-Forwarded-Proto");
    assert_eq!(told, [["http"], ["http"]]);
}

/// Vulnerable: one of the fields about a request's origin is passed on as the client has sent it.
fn prefixes_for_auth(driver: Driver) {
    let fields = [("X-Forwarded-Prefix", "/trusted"), ("X_Forwarded_Prefix", "/trusted")];
    let told = asked_by_auth(driver, "proxy_set_header X-Forwarded-Prefix '';", &fields, "X-Forwarded-Prefix");
    assert_eq!(told, [[""; 0]; 2]);
}

/// Vulnerable: a TLV's length reaches beyond the header, and its value contains bytes of the request or of other
/// memory.
fn tlvs_beyond_header(driver: Driver) {
    let text = "listen %UNIX% proxy_protocol; return 200 \"$proxy_protocol_addr<$proxy_protocol_tlv_alpn>\
                <$proxy_protocol_tlv_authority><$proxy_protocol_tlv_ssl_version><$proxy_protocol_tlv_ssl_verify>\";";
    let server = Setup::http(driver, &format!("server {{ {text} }}")).start();
    let addresses = [192, 0, 2, 1, 192, 0, 2, 2, 0, 7, 0, 8];
    for (tlvs, right) in [
        (&[1, 0, 2, b'h', b'2'][..], "<h2><><><>"),
        (&[1, 0xff, 0xff], "<><><><>"),
        (&[1, 0, 3, b'h', b'2'], "<><><><>"),
        (&[1, 0], "<><><><>"),
        (&[1], "<><><><>"),
        (&[1, 0, 1, b'h', 2, 0xff, 0xff, b'x'], "<h><><><>"),
        (&[0x20, 0, 4, 1, 0, 0, 0], "<><><><>"),
        (&[0x20, 0, 0], "<><><><>"),
        (&[0x20, 0, 9, 1, 0, 0, 0, 7, 0x21, 0, 9, b'T'], "<><><><7>"),
        (&[0x20, 0, 9, 1, 0, 0, 0, 7, 0x21, 0, 1, b'T'], "<><><T><7>"),
    ] {
        let length = (addresses.len() + tlvs.len()) as u16;
        let head = [&b"\r\n\r\n\0\r\nQUIT\n\x21\x11"[..], &length.to_be_bytes(), &addresses, tlvs].concat();
        let response = server.connect().ask([head, get("/", "").into_bytes()].concat());
        assert_eq!(response.text(), format!("192.0.2.1{right}"), "{tlvs:?}");
    }
    server.stop();
}

/// Vulnerable: the length with the padding overflows 16 bits, and the content is read as records.
fn padded_records(driver: Driver) {
    let record = |kind: u8, content: &[u8], padding: u8| {
        let [high, low] = u16::try_from(content.len()).expect("short").to_be_bytes();
        [&[1, kind, 0, 1, high, low, padding, 0][..], content, &vec![b'p'; padding.into()]].concat()
    };
    let (stdout, end_request) = (6, 3);
    let end = record(end_request, &[0; 8], 0);
    let backend = Backend::tcp();
    let server = Server::start(driver, &format!("location / {{ fastcgi_pass {}; }}", backend.address()));
    for padding in [1, 7, 255] {
        let mut client = server.connect();
        client.send(get("/", ""));
        let mut application = backend.accept();
        assert!(!application.read_some_or_end().is_empty());
        let head = "Content-Type: text/plain\r\n\r\n";
        // The body consists of END_REQUEST records. A server that took it for records would end the response early.
        let text: String = end.repeat(5000).into_iter().map(char::from).collect();
        let body = &text.as_bytes()[..65_535];
        application.send([record(stdout, head.as_bytes(), 0), record(stdout, body, padding)].concat());
        application.send([record(stdout, b"more", padding), record(stdout, b"", 0), end.clone()].concat());
        let response = client.response();
        assert!(response.body == [body, b"more"].concat(), "{padding}: {} bytes", response.body.len());
    }
    server.stop();
}

/// Vulnerable: streams reset by the server are not counted, and the work for them continues.
fn made_resets(driver: Driver) {
    /// A malformed frame on this stream.
    type Fault = fn(u32) -> Vec<u8>;
    let faults: [(&str, Fault); 4] = [
        ("an increment of zero", |stream| frame(frame_type::WINDOW_UPDATE, 0, stream, [0; 4])),
        ("a window beyond its maximum", |stream| frame(frame_type::WINDOW_UPDATE, 0, stream, [0x7f, 255, 255, 255])),
        ("a length that is none", |stream| frame(frame_type::PRIORITY, 0, stream, [0; 4])),
        ("data behind the end", |stream| frame(frame_type::DATA, 0, stream, "data")),
    ];
    for (what, fault) in faults {
        let backend = Backend::tcp();
        let text = format!("http2 on; location / {{ proxy_pass http://{}; }}", backend.address());
        let server = Server::start(driver, &text);
        let mut client = Http2::unix_receiving(&server);
        let mut begun = 0;
        for number in 0..5000 {
            let stream = 2 * number + 1;
            let request = frame(frame_type::HEADERS, flag::END_STREAM | flag::END_HEADERS, stream, block(&GET));
            if client.try_raw([request, fault(stream)].concat()).is_err() {
                break;
            }
            begun = number;
        }
        let code = client.raw_goaway();
        assert!(code.is_some_and(|code| code != ErrorCode::NO_ERROR), "{what}: {code:?} after {begun}");
        server.stop();
    }
}
