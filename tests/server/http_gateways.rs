//! SCGI, uwsgi and memcached over real sockets: the requests that a backend receives, and the handling of its
//! responses.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use crate::support::{self, Driver, Setup, with_each_driver};

with_each_driver!(
    an_scgi_application_gets_a_netstring_and_the_body,
    a_uwsgi_application_gets_a_packet_and_the_body,
    too_many_parameters_for_a_packet_are_refused,
    responses_have_a_status_line_or_a_status,
    a_short_response_breaks_off,
    uwsgi_and_scgi_have_caches_of_their_own,
    a_uwsgi_application_changes_to_websocket_when_it_is_asked_to,
    a_value_of_memcached_is_the_answer,
    a_missing_value_is_404_and_may_be_answered_elsewhere,
    memcached_connections_are_kept,
    wrong_replies_of_memcached_are_answered_with_502,
);

/// A backend that responds once the test considers the received request complete.
struct Backend {
    address: SocketAddr,
    received: Receiver<(usize, Vec<u8>)>,
}

impl Backend {
    /// `answer` receives all bytes read from a connection so far, until it returns the response and whether the
    /// connection stays open.
    fn start(answer: impl Fn(&[u8]) -> Option<(Vec<u8>, bool)> + Send + Sync + 'static) -> Backend {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let (sender, received) = channel();
        let answer = Arc::new(answer);
        std::thread::spawn(move || {
            for (number, stream) in listener.incoming().enumerate() {
                let (answer, sender) = (Arc::clone(&answer), sender.clone());
                let mut stream: TcpStream = stream.expect("a connection");
                std::thread::spawn(move || {
                    let (mut all, mut piece) = (Vec::new(), [0; 4096]);
                    while let Ok(count @ 1..) = stream.read(&mut piece) {
                        all.extend_from_slice(&piece[..count]);
                        let Some((bytes, stays)) = answer(&all) else { continue };
                        let _ = sender.send((number, std::mem::take(&mut all)));
                        if stream.write_all(&bytes).is_err() || !stays {
                            return;
                        }
                    }
                });
            }
        });
        Backend { address, received }
    }

    #[track_caller]
    fn received(&self) -> (usize, Vec<u8>) {
        self.received.recv_timeout(support::DEADLINE).expect("it was asked")
    }
}

/// Reads one of the packaged files that configurations include.
fn packaged(name: &str) -> Vec<u8> {
    std::fs::read(format!("{}/../../packaging/{name}", env!("CARGO_MANIFEST_DIR"))).expect("it is there")
}

fn setup(driver: Driver, backend: &Backend, text: &str) -> Setup {
    let text = format!("server {{ listen %UNIX%; server_name s; {text} }}");
    let setup = Setup::http(driver, &text.replace("%APP%", &backend.address.to_string()));
    ["scgi_params", "uwsgi_params"].into_iter().fold(setup, |setup, name| setup.file(name, packaged(name)))
}

/// Length and offset of a netstring's text, if all of it has been received.
fn netstring(bytes: &[u8]) -> Option<(usize, usize)> {
    let colon = bytes.iter().position(|&byte| byte == b':')?;
    let length: usize = std::str::from_utf8(&bytes[..colon]).ok()?.parse().ok()?;
    (bytes.len() > colon + 1 + length).then_some((length, colon + 1))
}

fn an_scgi_application_gets_a_netstring_and_the_body(driver: Driver) {
    let backend = Backend::start(|bytes| {
        let (length, start) = netstring(bytes)?;
        (bytes.len() >= start + length + 1 + 5).then(|| (b"Status: 201 Made\r\n\r\nbody".to_vec(), false))
    });
    let text = "location / { include scgi_params; scgi_param OWN $arg_own if_not_empty; scgi_pass %APP%; }";
    let server = setup(driver, &backend, text).start();
    let request = "POST /a?own=1 HTTP/1.1\r\nHost: h\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello";
    let response = server.connect().ask(request);
    assert_eq!((response.status, &response.reason[..], response.text()), (201, "Made", "body"));
    let (_, bytes) = backend.received();
    let (length, start) = netstring(&bytes).expect("a netstring");
    let (params, rest) = bytes[start..].split_at(length);
    assert_eq!(rest, b",hello");
    let words: Vec<String> = params.split(|&byte| byte == 0).map(|w| String::from_utf8_lossy(w).into()).collect();
    assert_eq!(words[..4], ["CONTENT_LENGTH", "5", "SCGI", "1"]);
    let pairs: Vec<(&str, &str)> = words.chunks(2).filter(|p| p.len() == 2).map(|p| (&p[0][..], &p[1][..])).collect();
    let expected = [("REQUEST_METHOD", "POST"), ("REQUEST_URI", "/a?own=1"), ("OWN", "1"), ("HTTP_X_Y", "z")];
    for pair in expected {
        assert!(pairs.contains(&pair), "{pair:?} in {pairs:?}");
    }
    // A chunked body is read to its end first, since SCGI needs its length.
    let chunked = "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n";
    assert_eq!(server.connect().ask(chunked).status, 201);
    let (_, bytes) = backend.received();
    assert!(bytes.windows(17).any(|window| window == b"CONTENT_LENGTH\x005\0"));
    server.stop();
}

/// Parses the parameters of a uwsgi packet; also returns the bytes after it.
fn packet(bytes: &[u8]) -> (Vec<(String, String)>, &[u8]) {
    let size = |at: &[u8]| usize::from(u16::from_le_bytes([at[0], at[1]]));
    let (mut rest, behind) = bytes[4..].split_at(size(&bytes[1..3]));
    let mut params = Vec::new();
    while !rest.is_empty() {
        let mut take = || {
            let (text, after) = rest[2..].split_at(size(rest));
            rest = after;
            String::from_utf8_lossy(text).into_owned()
        };
        params.push((take(), take()));
    }
    (params, behind)
}

/// True if a whole packet and `body` bytes after it have been received.
fn has_packet(bytes: &[u8], body: usize) -> bool {
    bytes.len() >= 4 && bytes.len() >= 4 + usize::from(u16::from_le_bytes([bytes[1], bytes[2]])) + body
}

fn a_uwsgi_application_gets_a_packet_and_the_body(driver: Driver) {
    let backend = Backend::start(|bytes| {
        has_packet(bytes, 5).then(|| (b"HTTP/1.1 202 Fine\r\nX: y\r\n\r\nbody".to_vec(), false))
    });
    let text = "uwsgi_modifier1 7; location / { include uwsgi_params; uwsgi_modifier2 9; uwsgi_pass uwsgi://%APP%; }
        location /raw { uwsgi_string 'as it is'; uwsgi_pass %APP%; }";
    let server = setup(driver, &backend, text).start();
    let request = "POST /a%20b HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello";
    let response = server.connect().ask(request);
    assert_eq!((response.status, &response.reason[..], response.text()), (202, "Fine", "body"));
    let (_, bytes) = backend.received();
    assert_eq!((bytes[0], bytes[3]), (7, 9));
    let (params, body) = packet(&bytes);
    assert_eq!(body, b"hello");
    let value = |name: &str| params.iter().find(|(own, _)| own == name).map(|(_, value)| &value[..]);
    assert_eq!((value("PATH_INFO"), value("CONTENT_LENGTH")), (Some("/a b"), Some("5")));
    assert_eq!((value("HTTP_HOST"), value("SERVER_NAME"), value("HTTPS")), (Some("h"), Some("s"), None));
    server.connect().ask("POST /raw HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello");
    assert!(backend.received().1.ends_with(b"as it ishello"));
    server.stop();
}

fn too_many_parameters_for_a_packet_are_refused(driver: Driver) {
    let backend = Backend::start(|_| None);
    let text = "large_client_header_buffers 4 64k; location / { uwsgi_param A $arg_a$arg_a; uwsgi_pass %APP%; }";
    let server = setup(driver, &backend, text).start();
    let mut client = server.connect();
    client.send(format!("GET /?a={} HTTP/1.1\r\nHost: h\r\n\r\n", "x".repeat(40_000)));
    assert_eq!(client.response().status, 500);
    server.wait_logged("uwsgi request is too big: 80");
    // `drop`, not `stop`: as in nginx, this is logged as an alert.
    drop(server);
}

fn responses_have_a_status_line_or_a_status(driver: Driver) {
    let backend = Backend::start(|bytes| {
        if !has_packet(bytes, 0) {
            return None;
        }
        let uri = packet(bytes).0.into_iter().find(|(name, _)| name == "URI").expect("it is sent").1;
        let answer = match &uri[..] {
            "/line" => "HTTP/1.0 404 Gone Fishing\r\nContent-Length: 4\r\n\r\nbodymore",
            "/status" => "Status: 403 No\r\n\r\nbody",
            "/location" => "Location: http://other/\n\n",
            "/wrong" => "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n",
            _ => "Content-Type: text/plain\r\n\r\nbody",
        };
        Some((answer.as_bytes().to_vec(), false))
    });
    let text = "location / { uwsgi_param URI $uri; uwsgi_pass %APP%; }";
    let server = setup(driver, &backend, text).start();
    let mut client = server.connect();
    let line = client.get("/line");
    assert_eq!((line.status, &line.reason[..], line.text()), (404, "Gone Fishing", "body"));
    let status = client.get("/status");
    assert_eq!((status.status, status.text(), status.header("Status")), (403, "body", None));
    assert_eq!(client.get("/location").status, 302);
    assert_eq!(client.get("/else").text(), "body");
    assert_eq!(client.get("/wrong").status, 502);
    server.stop();
}

fn uwsgi_and_scgi_have_caches_of_their_own(driver: Driver) {
    for (protocol, key) in [("uwsgi", "u$uri"), ("scgi", "s$uri")] {
        let backend = Backend::start(|bytes| {
            let is_whole = if bytes[0] == 0 { has_packet(bytes, 0) } else { netstring(bytes).is_some() };
            let is_asked_again = bytes.windows(18).any(|text| text == b"HTTP_IF_NONE_MATCH");
            let answer = match is_asked_again {
                true => "Status: 304 Not Modified\r\nCache-Control: max-age=60\r\n\r\n",
                false => "Cache-Control: max-age=60\r\nAge: 90\r\nETag: \"1\"\r\nContent-Length: 4\r\n\r\nbody",
            };
            is_whole.then(|| (answer.as_bytes().to_vec(), false))
        });
        let text = format!(
            "location / {{ {protocol}_pass %APP%; {protocol}_cache one; {protocol}_cache_key {key};
             {protocol}_cache_revalidate on; {protocol}_cache_disk_timeout 60s;
             add_header X-Cache $upstream_cache_status; }}"
        );
        let setup = setup(driver, &backend, &text);
        let path = format!("http {{ {protocol}_cache_path %DIR%/cache keys_zone=one:1m;");
        let server = setup.replace("http {", &path).start();
        let mut client = server.connect();
        for expected in ["MISS", "REVALIDATED", "HIT"] {
            let response = client.get("/a");
            assert_eq!((response.header("X-Cache"), response.text()), (Some(expected), "body"), "{protocol}");
        }
        server.stop();
        backend.received();
        backend.received();
        assert!(backend.received.try_recv().is_err(), "{protocol}: asked twice");
    }
}

fn a_short_response_breaks_off(driver: Driver) {
    let backend =
        Backend::start(|bytes| netstring(bytes).map(|_| (b"Content-Length: 10\r\n\r\n12345".to_vec(), false)));
    let server = setup(driver, &backend, "location / { scgi_pass %APP%; }").start();
    let mut client = server.connect();
    client.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(client.head().header("Content-Length"), Some("10"));
    assert!(b"12345".starts_with(&client.read_to_end()[..]));
    server.wait_logged("upstream prematurely closed connection while reading upstream");
    server.stop();
}

fn a_uwsgi_application_changes_to_websocket_when_it_is_asked_to(driver: Driver) {
    const CHANGES: &[u8] = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n";
    let backend = Backend::start(|bytes| match bytes {
        b"ping" => Some((b"pong".to_vec(), true)),
        _ => (bytes.first() == Some(&0) && has_packet(bytes, 0)).then(|| (CHANGES.to_vec(), true)),
    });
    let server = setup(driver, &backend, "location / { uwsgi_pass %APP%; }").start();
    let mut client = server.connect();
    client.send("GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n");
    let head = client.head();
    assert_eq!((head.status, head.header("Upgrade")), (101, Some("websocket")));
    client.send("ping");
    assert_eq!(client.take(4), b"pong");
    client.close_both();
    // The request has no `Upgrade` field.
    assert_eq!(server.get("/").status, 502);
    let mut client = server.connect();
    client.send("GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n");
    assert_eq!(client.response().status, 502);
    server.stop();
}

/// A memcached server with a few values: each key is also its value.
fn memcached() -> Backend {
    Backend::start(|bytes| {
        let key = String::from_utf8(bytes.strip_suffix(b"\r\n")?.strip_prefix(b"get ")?.to_vec()).expect("a key");
        let reply = match &key[..] {
            "/missing" | "/missing.html" => "END\r\n".to_owned(),
            "/other" => "VALUE /wrong 0 1\r\nx\r\nEND\r\n".to_owned(),
            "/length" => format!("VALUE {key} 0 x\r\nx\r\nEND\r\n"),
            "/error" => "SERVER_ERROR out of memory\r\n".to_owned(),
            "/short" => format!("VALUE {key} 0 100\r\nx"),
            _ => format!("VALUE {key} 2 {}\r\n{key}\r\nEND\r\n", key.len()),
        };
        Some((reply.into_bytes(), key != "/short"))
    })
}

const BY_URI: &str = "set $memcached_key $uri;";

fn a_value_of_memcached_is_the_answer(driver: Driver) {
    let backend = memcached();
    let text = "types { text/html html; } default_type text/plain; set $memcached_key $uri;
        location / { memcached_pass %APP%; }
        location /zip { memcached_gzip_flag 2; memcached_pass %APP%; }
        location /none { set $memcached_key ''; memcached_pass %APP%; }";
    let server = setup(driver, &backend, text).start();
    let mut client = server.connect();
    let value = client.get("/a.html");
    assert_eq!((value.status, value.text(), value.header("Content-Type")), (200, "/a.html", Some("text/html")));
    assert_eq!((value.header("Content-Length"), value.header("Content-Encoding")), (Some("7"), None));
    let head = client.ask("HEAD /a.html HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!((head.status, head.header("Content-Length")), (200, Some("7")));
    assert_eq!(client.get("/a%20b").text(), "/a%20b");
    let part = client.ask("GET /abcdef HTTP/1.1\r\nHost: h\r\nRange: bytes=1-3\r\n\r\n");
    assert_eq!((part.status, part.text()), (206, "abc"));
    let zipped = client.get("/zip");
    assert_eq!((zipped.header("Content-Encoding"), zipped.text()), (Some("gzip"), "/zip"));
    assert_eq!(client.ask("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\nx").status, 405);
    assert_eq!(server.get("/none").status, 500);
    server.wait_logged("the \"$memcached_key\" variable is not set");
    server.stop();
}

fn a_missing_value_is_404_and_may_be_answered_elsewhere(driver: Driver) {
    let (backend, other) =
        (memcached(), Backend::start(|_| Some((b"VALUE /missing 0 5\r\nfound\r\nEND\r\n".to_vec(), true))));
    let text = "set $memcached_key $uri; location / { memcached_pass %APP%; }
        location /missing.html { memcached_pass %APP%; error_page 404 = /made; }
        location /made { return 200 made; }
        location = /missing { memcached_next_upstream not_found; memcached_pass both; }";
    let both = format!("upstream both {{ server {}; server {} backup; }}", backend.address, other.address);
    let text = format!("{both} server {{ listen %UNIX%; {text} }}").replace("%APP%", &backend.address.to_string());
    let server = Setup::http(driver, &text).start();
    let mut client = server.connect();
    assert_eq!(client.get("/missing.html").text(), "made");
    server.wait_logged("key: \"/missing.html\" was not found by memcached while reading response header");
    assert_eq!(client.get("/missing").text(), "found");
    server.stop();
}

fn memcached_connections_are_kept(driver: Driver) {
    let backend = memcached();
    let text = format!(
        "upstream values {{ server {}; keepalive 4; }}
         server {{ listen %UNIX%; {BY_URI} location / {{ memcached_pass values; }} }}",
        backend.address
    );
    let server = Setup::http(driver, &text).start();
    let mut client = server.connect();
    for (path, status) in [("/a", 200), ("/missing", 404), ("/b", 200), ("/c", 200)] {
        assert_eq!(client.get(path).status, status, "{path}");
        assert_eq!(backend.received().0, 0, "{path}");
    }
    server.stop();
}

fn wrong_replies_of_memcached_are_answered_with_502(driver: Driver) {
    let backend = memcached();
    let server = setup(driver, &backend, &format!("{BY_URI} location / {{ memcached_pass %APP%; }}")).start();
    let mut client = server.connect();
    for (path, message) in [
        ("/other", "memcached sent invalid key in response \"VALUE /wrong 0 1\" for key \"/other\""),
        ("/length", "memcached sent invalid length in response \"VALUE /length 0 x\" for key \"/length\""),
        ("/error", "memcached sent invalid response: \"SERVER_ERROR out of memory\""),
    ] {
        assert_eq!(client.get(path).status, 502, "{path}");
        server.wait_logged(&format!("{message} while reading response header from upstream"));
    }
    client.send("GET /short HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(client.head().header("Content-Length"), Some("100"));
    assert!(client.read_to_end().len() < 100);
    server.wait_logged("upstream prematurely closed connection while reading upstream");
    server.stop();
}
