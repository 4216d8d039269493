//! Hostile TLS handshakes: none of them affects other clients, and all of them end.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use rustls::HandshakeKind;
use rustls::version::{TLS12, TLS13};

use crate::support::authority::Authority;
use crate::support::tls::Tls;
use crate::support::{
    DEADLINE, Driver, Server, Setup, anonymous_memory, descriptor_limit, skip, turn_of_crowds, with_each_driver,
};

with_each_driver!(
    every_alert_ends_a_handshake,
    records_that_cannot_be_end_a_handshake,
    a_first_message_that_is_cut_off_or_changed_comes_to_nothing,
    tickets_of_another_server_are_not_taken,
    many_handshakes_that_stop_half_way_end_and_cost_little,
    ten_thousand_handshakes_that_stop_half_way_cost_little,
);

/// Number of clients that stop half-way at the same time.
const HALF_OPEN: usize = 1000;

/// Maximum memory for each of them, in bytes: its session and the received bytes.
const HALF_OPEN_BYTES_MAX: u64 = 64 * 1024;

fn socket(server: &Server) -> PathBuf {
    server.directory.path().join("gale.sock")
}

fn setup(driver: Driver, authority: &Authority, text: &str) -> Setup {
    let pair = authority.ecdsa(&["a.example"]);
    let text = format!(
        "server {{
             listen %UNIX% ssl;
             server_name a.example;
             ssl_certificate %DIR%/own.pem;
             ssl_certificate_key %DIR%/own.pem;
             {text}
             location / {{ return 200 fine; }}
         }}"
    );
    Setup::http(driver, &text).file("own.pem", pair.certificate + &pair.key)
}

/// Checks that a well-behaved client is served.
#[track_caller]
fn assert_serves(server: &Server, tls: &Tls) {
    let answer = tls.client(&socket(server), "a.example").ask("GET / HTTP/1.1\r\nHost: a.example\r\n\r\n");
    assert_eq!(answer.text(), "fine");
}

fn connect(server: &Server) -> UnixStream {
    let stream = UnixStream::connect(socket(server)).expect("it listens");
    stream.set_read_timeout(Some(DEADLINE)).expect("an option");
    stream.set_write_timeout(Some(DEADLINE)).expect("an option");
    stream
}

fn hello(tls: &Tls) -> Vec<u8> {
    let mut bytes = Vec::new();
    tls.session("a.example").write_tls(&mut bytes).expect("memory");
    bytes
}

/// Sends all pieces, closes the sending side, and reads until the server has closed the connection.
#[track_caller]
fn say(server: &Server, pieces: &[&[u8]]) -> Vec<u8> {
    let mut stream = connect(server);
    let mut answer = Vec::new();
    for piece in pieces {
        if stream.write_all(piece).is_err() {
            break;
        }
    }
    let _ = stream.shutdown(Shutdown::Write);
    match stream.read_to_end(&mut answer) {
        // The server closed the connection with unread bytes.
        Err(error) if error.kind() != std::io::ErrorKind::ConnectionReset => panic!("{error}\n{server}"),
        _ => answer,
    }
}

fn record(kind: u8, contents: &[u8]) -> Vec<u8> {
    let length = u16::try_from(contents.len()).expect("short").to_be_bytes();
    [&[kind, 3, 3], &length[..], contents].concat()
}

fn every_alert_ends_a_handshake(driver: Driver) {
    let authority = Authority::new("authority");
    let server = setup(driver, &authority, "").start();
    for tls in [Tls::with(&authority, &[&TLS13], None), Tls::tls12(&authority)] {
        let hello = hello(&tls);
        for level in 0..=3 {
            for description in 0..=255 {
                let alert = record(21, &[level, description]);
                say(&server, &[&hello, &alert]);
            }
        }
        // As the first record, and malformed.
        say(&server, &[&record(21, &[2, 40])]);
        say(&server, &[&hello, &record(21, &[2])]);
        say(&server, &[&hello, &record(21, &[1; 100])]);
        assert_serves(&server, &tls);
    }
    server.stop();
}

fn records_that_cannot_be_end_a_handshake(driver: Driver) {
    let authority = Authority::new("authority");
    let server = setup(driver, &authority, "").start();
    let tls = Tls::new(&authority);
    let hello = hello(&tls);
    let message = &hello[5..];
    let mut in_pieces = Vec::new();
    for byte in message {
        in_pieces.extend(record(22, &[*byte]));
    }
    let with_length = |length: [u8; 3]| record(22, &[&[1], &length[..], &message[4..]].concat());
    let oversized = [&[22, 3, 3, 0xff, 0xff][..], &vec![1; 70_000]].concat();
    let just_too_long = [&[22, 3, 3, 0x48, 0x01][..], &vec![1; 0x4801]].concat();
    let no_versions = [&[22, 9, 9][..], &hello[3..]].concat();
    let change = record(20, &[1]).repeat(1000);
    let plain_data = [&hello[..], &record(23, b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n")].concat();
    for (what, bytes) in [
        ("an oversized record", oversized),
        ("a record one byte too long", just_too_long),
        ("an empty record", record(22, &[])),
        ("empty records", record(22, &[]).repeat(1000)),
        ("no version that there is", no_versions),
        ("a record of no type", [&hello[..], &record(99, &[0; 10])].concat()),
        ("many changes of the cipher", [&hello[..], &change].concat()),
        ("a change of the cipher first", change.clone()),
        ("data before the end", plain_data),
        ("data first", record(23, &[0; 100])),
        ("a heartbeat", record(24, &[1, 0xff, 0xff])),
        ("a message of 16 MiB", with_length([0xff; 3])),
        ("a message that is shorter than it", with_length([0, 0, 4])),
        ("a message of another kind", record(22, &[20, 0, 0, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])),
        ("a hello of SSLv2", [&[0x80, 0x2e, 1, 3, 1][..], &[0; 41]].concat()),
        ("the same message twice", hello.repeat(2)),
        ("a flood of messages", hello.repeat(200)),
    ] {
        let answer = say(&server, &[&bytes]);
        assert!(!answer.windows(4).any(|part| part == b"fine"), "{what}");
        assert_serves(&server, &tls);
    }
    // One byte in each record is unusual but valid: the server responds with a handshake message or an alert.
    let answer = say(&server, &[&in_pieces]);
    assert!(answer.first() == Some(&22) || answer.first() == Some(&21), "{answer:?}");
    server.stop();
}

fn a_first_message_that_is_cut_off_or_changed_comes_to_nothing(driver: Driver) {
    let authority = Authority::new("authority");
    let server = setup(driver, &authority, "").start();
    for versions in [&[&TLS13], &[&TLS12]] {
        let tls = Tls::with(&authority, versions, None);
        // The client now has a ticket, so that the changes include it.
        assert_serves(&server, &tls);
        let whole = hello(&tls);
        for length in (0..whole.len()).step_by(13) {
            say(&server, &[&whole[..length]]);
        }
        for place in (5..whole.len()).step_by(7) {
            let mut session = tls.session("a.example");
            let mut bytes = Vec::new();
            session.write_tls(&mut bytes).expect("memory");
            let place = place.min(bytes.len() - 1);
            bytes[place] ^= 1 << (place % 8);
            let mut stream = connect(&server);
            stream.write_all(&bytes).expect("it listens");
            // The two sides have seen different handshakes.
            let shaken = session.complete_io(&mut stream);
            let is_over = shaken.is_err() || session.is_handshaking();
            assert!(is_over, "{versions:?} {place} of {}", bytes.len());
        }
        assert_serves(&server, &tls);
    }
    server.stop();
}

fn tickets_of_another_server_are_not_taken(driver: Driver) {
    let authority = Authority::new("authority");
    for versions in [&[&TLS13], &[&TLS12]] {
        let tls = Tls::with(&authority, versions, None);
        let kind = |server: &Server| {
            let mut session = tls.connect(&socket(server), "a.example").expect("a handshake");
            session.write_all(b"GET / HTTP/1.1\r\nHost: a.example\r\nConnection: close\r\n\r\n").expect("it listens");
            session.read_to_end(&mut Vec::new()).expect("an answer");
            session.stream.conn.handshake_kind()
        };
        let (one, other) = (setup(driver, &authority, "").start(), setup(driver, &authority, "").start());
        let whole = |found| matches!(found, Some(HandshakeKind::Full | HandshakeKind::FullWithHelloRetryRequest));
        assert!(whole(kind(&one)));
        assert_eq!(kind(&one), Some(HandshakeKind::Resumed));
        assert!(whole(kind(&other)));
        assert_eq!(kind(&other), Some(HandshakeKind::Resumed));
        assert!(whole(kind(&one)));
        one.stop();
        other.stop();
    }
}

/// Connections that have sent half, all, or all but one byte of the ClientHello.
fn half_open(server: &Server, tls: &Tls, count: usize) -> Vec<UnixStream> {
    let hello = hello(tls);
    let lengths = [hello.len() / 2, hello.len(), hello.len() - 1];
    let open = |number: usize| {
        let mut stream = connect(server);
        stream.write_all(&hello[..lengths[number % 3]]).expect("it listens");
        stream
    };
    (0..count).map(open).collect()
}

fn many_handshakes_that_stop_half_way_end_and_cost_little(driver: Driver) {
    let _turn = turn_of_crowds();
    let authority = Authority::new("authority");
    let server = setup(driver, &authority, "client_header_timeout 5s;");
    let server = server.replace("worker_connections 128", "worker_connections 2048").start();
    let tls = Tls::new(&authority);
    assert_serves(&server, &tls);
    let before = anonymous_memory(server.worker());
    let streams = half_open(&server, &tls, HALF_OPEN);
    assert_serves(&server, &tls);
    let grown = anonymous_memory(server.worker()).saturating_sub(before);
    assert!(grown < HALF_OPEN as u64 * HALF_OPEN_BYTES_MAX, "{grown} bytes");
    for mut stream in streams {
        // The server's messages so far, then the end of the stream.
        let ended = stream.read_to_end(&mut Vec::new());
        assert!(ended.is_ok_and(|_| true), "{server}");
    }
    assert_serves(&server, &tls);
    server.stop();
}

fn ten_thousand_handshakes_that_stop_half_way_cost_little(driver: Driver) {
    let _turn = turn_of_crowds();
    // Other tests need descriptors, too.
    let count = descriptor_limit().saturating_sub(4096).min(10_000);
    if count < 10_000 {
        skip("a part: a process can have too few descriptors here for 10,000 handshakes");
    }
    let authority = Authority::new("authority");
    let server = setup(driver, &authority, "client_header_timeout 1h;");
    let server = server.replace("worker_connections 128", "worker_connections 16384").start();
    let tls = Tls::new(&authority);
    assert_serves(&server, &tls);
    let before = anonymous_memory(server.worker());
    let mut streams = half_open(&server, &tls, count);
    // Every third client has sent the whole ClientHello and gets a response, so its session exists.
    for stream in streams.iter_mut().skip(1).step_by(3) {
        stream.read_exact(&mut [0; 5]).expect("the head of a record");
    }
    assert_serves(&server, &tls);
    let grown = anonymous_memory(server.worker()).saturating_sub(before);
    assert!(grown < count as u64 * HALF_OPEN_BYTES_MAX, "{grown} bytes");
    drop(streams);
    assert_serves(&server, &tls);
    server.stop();
}
