//! `resolver` and `resolver_timeout` over real sockets, with a name server in the test.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use crate::support::{self, Driver, Setup, with_each_driver};

with_each_driver!(
    names_are_resolved_where_name_servers_are_configured,
    an_inner_resolver_takes_the_place_of_an_outer_one,
    unanswered_lookup_delays_no_others,
    resolved_names_outlive_a_reload,
    answers_that_are_none_are_logged,
);

/// A name server: `www.test` has two addresses, `silent.test` gets no answer, `forged.test` gets one with a wrong ID
/// before the right one, and all other names do not exist.
struct NameServer {
    address: SocketAddr,
    queries: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl NameServer {
    fn start() -> NameServer {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a free port");
        let address = socket.local_addr().expect("an address");
        let queries = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&queries);
        let thread = std::thread::spawn(move || {
            let mut query = [0; 512];
            // An empty datagram ends the thread.
            while let Ok((length @ 1.., from)) = socket.recv_from(&mut query) {
                count.fetch_add(1, Ordering::Relaxed);
                for answer in answers(&query[..length]) {
                    socket.send_to(&answer, from).expect("loopback takes it");
                }
            }
        });
        NameServer { address, queries, thread: Some(thread) }
    }

    fn query_count(&self) -> usize {
        self.queries.load(Ordering::Relaxed)
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a free port");
        socket.send_to(&[], self.address).expect("loopback takes it");
        self.thread.take().expect("joined once").join().expect("the name server did not panic");
    }
}

const NAME_ERROR: u8 = 3;

/// The answers to a query, by RFC 1035 §4.
fn answers(query: &[u8]) -> Vec<Vec<u8>> {
    let (name, rest) = read_name(&query[12..]);
    let is_a = rest[..2] == [0, 1];
    let answer = |code: u8, data: &[&[u8]]| {
        let mut bytes = query.to_vec();
        (bytes[2], bytes[3], bytes[7]) = (0x81, 0x80 | code, data.len() as u8);
        for data in data {
            // Name of the question, type and class, a TTL of one hour, length.
            bytes.extend([0xc0, 12, 0, if is_a { 1 } else { 28 }, 0, 1, 0, 0, 14, 16, 0, data.len() as u8]);
            bytes.extend_from_slice(data);
        }
        bytes
    };
    let address: &[u8] = if is_a { &[192, 0, 2, 1] } else { &[0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1] };
    match &*name {
        "www.test" => vec![answer(0, &[address])],
        "forged.test" => {
            let mut forged = answer(0, &[address]);
            forged[0] ^= 0xff;
            vec![forged, answer(0, &[address])]
        }
        "silent.test" => Vec::new(),
        _ => vec![answer(NAME_ERROR, &[])],
    }
}

fn read_name(mut bytes: &[u8]) -> (String, &[u8]) {
    let mut labels = Vec::new();
    while let (&length @ 1.., rest) = bytes.split_first().expect("a name ends") {
        let (label, rest) = rest.split_at(length.into());
        labels.push(String::from_utf8_lossy(label).into_owned());
        bytes = rest;
    }
    (labels.join("."), &bytes[1..])
}

const WWW: &str = "192.0.2.1 2001:db8::1";

fn names_are_resolved_where_name_servers_are_configured(driver: Driver) {
    let names = NameServer::start();
    let text = format!(
        "resolver {0};
         server {{
             listen %UNIX%;
             location / {{ test_resolve $arg_n; }}
             location /v4 {{ resolver {0} ipv6=off; test_resolve $arg_n; }}
             location /v6 {{ resolver {0} ipv4=off; test_resolve $arg_n; }}
             location /named {{ resolver localhost:{port}; test_resolve $arg_n; }}
         }}",
        names.address,
        port = names.address.port(),
    );
    let server = Setup::http(driver, &text).start();
    let cases = [
        ("/?n=www.test", WWW),
        ("/?n=WWW.Test.", WWW),
        ("/v4?n=www.test", "192.0.2.1"),
        ("/v6?n=www.test", "2001:db8::1"),
        ("/named?n=www.test", WWW),
        ("/?n=none.test", "3: Host not found"),
        ("/?n=", "3: Host not found"),
        ("/?n=192.0.2.7", "192.0.2.7"),
    ];
    for (path, expected) in cases {
        assert_eq!(server.get(path).text(), expected, "{path}");
    }
    server.stop();
}

fn an_inner_resolver_takes_the_place_of_an_outer_one(driver: Driver) {
    let (outer, inner) = (NameServer::start(), NameServer::start());
    let text = format!(
        "server {{ listen %UNIX%; resolver {}; location / {{ resolver {}; test_resolve www.test; }} }}
         server {{ listen %TCP%; location / {{ test_resolve www.test; }} }}",
        outer.address, inner.address,
    );
    let server = Setup::http(driver, &text).start();
    assert_eq!(server.get("/").text(), WWW);
    assert_eq!((outer.query_count(), inner.query_count()), (0, 2));
    assert_eq!(server.connect_tcp(1).get("/").text(), "no resolver defined");
    server.stop();
}

fn unanswered_lookup_delays_no_others(driver: Driver) {
    let names = NameServer::start();
    let text = format!(
        "resolver {};
         location / {{ test_resolve $arg_n; }}
         location /short {{ resolver_timeout 50ms; test_resolve silent.test; }}",
        names.address,
    );
    let server = Setup::server(driver, &text).replace("worker_processes 2", "worker_processes 1").start();
    let mut waiting = server.connect();
    waiting.send("GET /?n=silent.test HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_eq!(server.get("/short").text(), "110: Operation timed out");
    assert_eq!(server.get("/?n=www.test").text(), WWW);
    assert!(!waiting.is_closed());
    waiting.close_both();
    server.stop();
}

fn resolved_names_outlive_a_reload(driver: Driver) {
    let names = NameServer::start();
    let text = |parameters: &str| {
        let configuration = support::http_configuration(
            driver,
            &format!(
                "server {{ listen %UNIX%; resolver {}{parameters}; location / {{ test_resolve www.test; }} }}",
                names.address
            ),
        );
        configuration.replace("worker_processes 2", "worker_processes 1")
    };
    let mut server = Setup::configuration(&text("")).start();
    assert_eq!(server.get("/").text(), WWW);
    server.reload(&text(""));
    assert_eq!(server.get("/").text(), WWW);
    assert_eq!(names.query_count(), 2);
    server.reload(&text(" valid=1h"));
    assert_eq!(server.get("/").text(), WWW);
    assert_eq!(names.query_count(), 4);
    server.stop();
}

fn answers_that_are_none_are_logged(driver: Driver) {
    let names = NameServer::start();
    let text = format!("resolver {} ipv6=off; location / {{ test_resolve forged.test; }}", names.address);
    let server = Setup::server(driver, &text).start();
    assert_eq!(server.get("/").text(), "192.0.2.1");
    let line = server.wait_logged("wrong ident");
    assert!(line.contains("in DNS response for forged.test, expect"), "{line}");
    assert!(line.ends_with(&format!(", resolver: {}", names.address)), "{line}");
    server.stop();
}
