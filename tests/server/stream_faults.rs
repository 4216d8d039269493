//! Faults in a session of stream: peers that reset, stall, die or send malformed data, at every point.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use crate::support::authority::Authority;
use crate::support::tls::Tls;
use crate::support::{Backend, DEADLINE, Driver, Server, Setup, with_each_driver};

with_each_driver!(
    a_reset_at_any_point_ends_both_sides,
    a_side_that_stalls_ends_the_session,
    a_server_that_dies_before_its_handshake_is_over_is_a_failure,
    a_server_that_dies_in_the_middle_ends_the_session_and_no_other,
    a_client_that_leaves_while_a_server_is_looked_for_costs_nothing,
    first_messages_that_are_cut_or_malformed_hold_nothing_up,
    headers_that_are_cut_or_forged_are_refused,
    a_server_over_udp_that_dies_in_the_middle_ends_the_session,
    datagrams_that_wait_for_a_name_are_bounded,
);

const FORMAT: &str = "log_format line '$status $bytes_received $bytes_sent $upstream_addr';";

fn start(driver: Driver, text: &str) -> Server {
    Setup::stream(driver, &format!("{FORMAT}\n{text}")).start()
}

/// Waits until this many sessions are logged.
#[track_caller]
fn wait_sessions(server: &Server, count: usize) {
    server.directory.wait_until("the sessions are logged", |directory| {
        directory.try_read("access.log").is_some_and(|text| text.lines().count() >= count)
    });
}

fn connect(server: &Server, number: usize) -> TcpStream {
    patient(TcpStream::connect(server.directory.address(number)).expect("it listens"))
}

/// Sets timeouts after which a test fails.
fn patient(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(DEADLINE)).expect("an option");
    stream.set_write_timeout(Some(DEADLINE)).expect("an option");
    stream
}

fn reset(stream: TcpStream) {
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).expect("an option");
}

/// Reads to the end of the connection, or to a reset; drops the data.
#[track_caller]
fn assert_ended(mut stream: TcpStream) {
    let mut bytes = vec![0; 1 << 16];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return,
            Err(error) => panic!("no end: {error}"),
        }
    }
}

/// Sends data until the connection ends.
fn send_without_end(mut stream: TcpStream) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || while stream.write_all(&[b'x'; 1 << 16]).is_ok() {})
}

/// Sends data until all buffers are full.
fn send_much(mut stream: &TcpStream) {
    stream.set_nonblocking(true).expect("an option");
    while stream.write(&[b'x'; 1 << 16]).is_ok() {}
    stream.set_nonblocking(false).expect("an option");
}

/// The data that has passed when one side is reset.
#[derive(Clone, Copy, Debug)]
enum Point {
    Nothing,
    Question,
    Answer,
    /// The client has filled all buffers, and the upstream server reads nothing.
    Upload,
    /// The upstream server has filled all buffers, and the client reads nothing.
    Download,
}

fn a_reset_at_any_point_ends_both_sides(driver: Driver) {
    let backend = Backend::tcp();
    // A reset that cannot be seen, because earlier data is not read, ends the session by its timeout.
    let text = format!(
        "proxy_timeout 2s; server {{ listen %TCP%; proxy_pass {0}; %LOG% }}
         server {{ listen %TCP2%; proxy_pass {0}; proxy_half_close on; %LOG% }}
         server {{ listen %TCP3%; proxy_pass {0}; proxy_upload_rate 100m; proxy_download_rate 100m; %LOG% }}",
        backend.address()
    );
    let server = start(driver, &text);
    let mut count = 0;
    for number in [1, 2, 3] {
        for point in [Point::Nothing, Point::Question, Point::Answer, Point::Upload, Point::Download] {
            for of_client in [true, false] {
                let mut client = connect(&server, number);
                let mut behind = patient(backend.accept_tcp());
                if !matches!(point, Point::Nothing) {
                    client.write_all(b"question").unwrap();
                    behind.read_exact(&mut [0; 8]).unwrap();
                }
                if matches!(point, Point::Answer) {
                    behind.write_all(b"answer").unwrap();
                    client.read_exact(&mut [0; 6]).unwrap();
                }
                match point {
                    Point::Upload => send_much(&client),
                    Point::Download => send_much(&behind),
                    Point::Nothing | Point::Question | Point::Answer => {}
                }
                let (lost, other) = if of_client { (client, behind) } else { (behind, client) };
                reset(lost);
                assert_ended(other);
                count += 1;
                wait_sessions(&server, count);
            }
        }
    }
    // The connection to a server that resets at once may not have been established yet.
    let log = server.directory.read("access.log");
    assert!(log.lines().all(|line| line.starts_with("200 ") || line.starts_with("502 0 0")), "{log}");
}

fn a_side_that_stalls_ends_the_session(driver: Driver) {
    let authority = Authority::new("The authority");
    let pair = authority.ecdsa(&["one.test"]);
    let backend = Backend::tcp();
    let text = format!(
        "{FORMAT}\nproxy_timeout 100ms; ssl_certificate %DIR%/one.pem; ssl_certificate_key %DIR%/one.key;
         server {{ listen %TCP%; proxy_pass {0}; %LOG% }}
         server {{ listen %TCP2%; proxy_pass {0}; proxy_half_close on; %LOG% }}
         server {{ listen %UNIX% ssl; proxy_pass {0}; %LOG% }}",
        backend.address()
    );
    let setup = Setup::stream(driver, &text);
    let server = setup.file("one.pem", &pair.certificate).file("one.key", &pair.key).start();
    for number in [1, 2] {
        // The client does not read; the server does not read; the server has ended while the client sends nothing.
        let client = connect(&server, number);
        send_without_end(backend.accept_tcp()).join().unwrap();
        assert_ended(client);
        let client = connect(&server, number);
        let behind = backend.accept_tcp();
        send_without_end(client).join().unwrap();
        assert_ended(patient(behind));
        let client = connect(&server, number);
        backend.accept_tcp().shutdown(std::net::Shutdown::Write).unwrap();
        assert_ended(client);
    }
    let client = Tls::new(&authority).connect(&server.directory.path().join("gale.sock"), "one.test").unwrap();
    send_without_end(backend.accept_tcp()).join().unwrap();
    wait_sessions(&server, 7);
    drop(client);
    server.wait_logged("connection timed out (110: Connection timed out) while proxying connection");
}

fn a_server_that_dies_before_its_handshake_is_over_is_a_failure(driver: Driver) {
    let (first, second) = (Backend::tcp(), Backend::tcp());
    let text = format!(
        "upstream group {{ server {} max_fails=0; server {} backup max_fails=0; }}
         proxy_ssl on; proxy_connect_timeout 10s;
         server {{ listen %TCP%; proxy_pass group; %LOG% }}
         server {{ listen %TCP2%; proxy_pass {0}; proxy_connect_timeout 100ms; %LOG% }}",
        first.address(),
        second.address()
    );
    let server = start(driver, &text);
    let ways: [fn(TcpStream); 4] = [
        drop,
        reset,
        |mut stream| stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap(),
        // The head of a message that never arrives.
        |mut stream| stream.write_all(&[22, 3, 3, 0x40, 0, 2, 0, 0, 100]).unwrap(),
    ];
    for (index, fail) in ways.into_iter().enumerate() {
        let client = connect(&server, 1);
        let mut stream = patient(first.accept_tcp());
        stream.read_exact(&mut [0; 5]).unwrap();
        fail(stream);
        // The next server is tried with a new handshake.
        let mut other = patient(second.accept_tcp());
        let mut head = [0; 5];
        other.read_exact(&mut head).unwrap();
        assert_eq!(head[..2], [22, 3]);
        drop(other);
        assert_ended(client);
        wait_sessions(&server, index + 1);
    }
    let client = connect(&server, 2);
    let silent = first.accept_tcp();
    assert_ended(client);
    server.wait_logged("upstream timed out (110: Connection timed out) while SSL handshaking to upstream");
    drop(silent);
    let log = server.directory.read("access.log");
    assert!(log.lines().all(|line| line.starts_with("502 0 0 ")), "{log}");
}

fn a_server_that_dies_in_the_middle_ends_the_session_and_no_other(driver: Driver) {
    let lives = Backend::tcp();
    let text = format!(
        "server {{ listen %TCP%; proxy_pass %TCP3%; %LOG% }} server {{ listen %TCP2%; proxy_pass {}; %LOG% }}",
        lives.address()
    );
    let server = start(driver, &text);
    // No other test uses this address while it is free.
    let dies = TcpListener::bind(server.directory.address(3)).unwrap();
    let mut other = connect(&server, 2);
    let mut behind_other = lives.accept_tcp();
    let mut client = connect(&server, 1);
    let mut behind = dies.accept().unwrap().0;
    behind.write_all(b"half of an ans").unwrap();
    let mut half = [0; 14];
    client.read_exact(&mut half).unwrap();
    reset(behind);
    drop(dies);
    // The data sent before the reset arrives, then the end.
    assert_eq!(&half, b"half of an ans");
    assert_ended(client);
    server.wait_logged("recv() failed (104: Connection reset by peer) while proxying and reading from upstream");
    // A new client is disconnected at once.
    assert_ended(connect(&server, 1));
    server.wait_logged("connect() failed (111: Connection refused) while connecting to upstream");
    other.write_all(b"question").unwrap();
    behind_other.read_exact(&mut [0; 8]).unwrap();
    behind_other.write_all(b"answer").unwrap();
    other.read_exact(&mut [0; 6]).unwrap();
}

fn a_client_that_leaves_while_a_server_is_looked_for_costs_nothing(driver: Driver) {
    // A name server that never answers.
    let names = UdpSocket::bind("127.0.0.1:0").unwrap();
    names.set_read_timeout(Some(DEADLINE)).unwrap();
    let text = format!(
        "resolver {} ipv6=off; resolver_timeout 1s;
         server {{ listen %TCP%; proxy_pass nowhere$connection.test:1; %LOG% }}",
        names.local_addr().unwrap()
    );
    let server = start(driver, &text);
    let ends: [fn(TcpStream); 3] = [drop, reset, |mut stream| stream.write_all(b"question").unwrap()];
    for (index, end) in ends.into_iter().enumerate() {
        let client = connect(&server, 1);
        names.recv(&mut [0; 512]).expect("a question");
        end(client);
        wait_sessions(&server, index + 1);
    }
    server.wait_logged(".test could not be resolved");
}

fn first_messages_that_are_cut_or_malformed_hold_nothing_up(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "ssl_preread on; preread_timeout 100ms;
         server {{ listen %TCP%; proxy_pass {}; %LOG% }}
         server {{ listen %TCP2%; preread_timeout 1h; proxy_pass {0}; %LOG% }}",
        backend.address()
    );
    let server = start(driver, &text);
    let authority = Authority::new("The authority");
    let mut hello = Vec::new();
    Tls::new(&authority).session("one.test").write_tls(&mut hello).unwrap();
    let mut count = 0;
    // If the hello stops at any point, the preread times out; if the connection ends there, so does the session.
    for length in [1, 3, 5, 6, 9, 40, 60, hello.len() - 1] {
        let mut silent = connect(&server, 1);
        silent.write_all(&hello[..length]).unwrap();
        assert_ended(silent);
        let mut cut = connect(&server, 2);
        cut.write_all(&hello[..length]).unwrap();
        cut.shutdown(std::net::Shutdown::Write).unwrap();
        assert_ended(cut);
        let mut lost = connect(&server, 2);
        lost.write_all(&hello[..length]).unwrap();
        reset(lost);
        count += 3;
        wait_sessions(&server, count);
    }
    // Anything but a ClientHello is passed on unchanged for the server to judge.
    let with = |change: fn(&mut Vec<u8>)| {
        let mut changed = hello.clone();
        change(&mut changed);
        changed
    };
    let malformed = [
        // An alert, another message, and contradictory lengths.
        with(|bytes| bytes[0] = 21),
        with(|bytes| bytes[5] = 2),
        with(|bytes| bytes[43] = 0xff),
        with(|bytes| bytes[1] = 9),
        with(|bytes| bytes[3..5].fill(0)),
    ];
    for bytes in malformed {
        let mut client = connect(&server, 2);
        client.write_all(&bytes).unwrap();
        let mut behind = patient(backend.accept_tcp());
        let mut passed = vec![0; bytes.len()];
        behind.read_exact(&mut passed).unwrap();
        assert!(passed == bytes, "it is passed on as it is");
    }
}

fn headers_that_are_cut_or_forged_are_refused(driver: Driver) {
    let server = start(
        driver,
        "proxy_protocol_timeout 10s; server { listen %TCP% proxy_protocol; return '$proxy_protocol_addr.'; %LOG% }
         server { listen %TCP2% proxy_protocol; proxy_protocol_timeout 100ms; return never; %LOG% }",
    );
    let signature = b"\r\n\r\n\0\r\nQUIT\n";
    let binary = |command: u8, family: u8, length: u16, rest: &[u8]| {
        [&signature[..], &[command, family], &length.to_be_bytes(), rest].concat()
    };
    let inet = [192, 0, 2, 1, 192, 0, 2, 2, 0, 7, 0, 8];
    let answer = |bytes: &[u8]| {
        let mut client = connect(&server, 1);
        client.write_all(bytes).unwrap();
        // The header may have been rejected already.
        let _ = client.shutdown(std::net::Shutdown::Write);
        let mut text = String::new();
        client.read_to_string(&mut text).map(|_| text)
    };
    // Complete headers: with an address, for the proxy itself, with values of wrong lengths, which are ignored.
    assert_eq!(answer(&binary(0x21, 0x11, 12, &inet)).unwrap(), "192.0.2.1.");
    assert_eq!(answer(&binary(0x20, 0x11, 12, &inet)).unwrap(), ".");
    assert_eq!(answer(&binary(0x21, 0x11, 15, &[&inet[..], &[1, 0xff, 0xff]].concat())).unwrap(), "192.0.2.1.");
    wait_sessions(&server, 3);
    let refused = [
        binary(0x11, 0x11, 12, &inet),
        binary(0x31, 0x11, 12, &inet),
        binary(0x2f, 0x11, 12, &inet),
        // Shorter than the addresses of the family, and longer than allowed.
        binary(0x21, 0x11, 11, &inet[..11]),
        binary(0x21, 0x21, 12, &inet),
        binary(0x21, 0x11, 0xffff, &inet),
        // Cut by the end of the connection.
        binary(0x21, 0x11, 12, &inet[..5]),
        signature[..7].to_vec(),
        b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2".to_vec(),
        b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\n".to_vec(),
        b"PROXY TCP4 2001:db8::1 192.0.2.2 1 2\r\n".to_vec(),
        b"PROXY TCP4 192.0.2.1 192.0.2.2 1 65536\r\n".to_vec(),
        b"PROXY TCP4 192.0.2.1 192.0.2.2 1\r\n".to_vec(),
        b"proxy TCP4 192.0.2.1 192.0.2.2 1 2\r\n".to_vec(),
        [&b"PROXY TCP4 "[..], &[b'1'; 200], b"\r\n"].concat(),
    ];
    for bytes in &refused {
        assert!(answer(bytes).map_or(true, |text| text.is_empty()), "{:?}", String::from_utf8_lossy(bytes));
    }
    wait_sessions(&server, 3 + refused.len());
    let log = server.directory.read("access.log");
    assert_eq!(log.lines().filter(|line| line.starts_with("400 ")).count(), refused.len(), "{log}");
    // Cut without an end: the timeout applies.
    let mut silent = connect(&server, 2);
    silent.write_all(&binary(0x21, 0x11, 12, &inet[..5])).unwrap();
    assert_ended(silent);
    server.wait_logged("client timed out (110: Connection timed out) while reading PROXY protocol");
}

fn a_server_over_udp_that_dies_in_the_middle_ends_the_session(driver: Driver) {
    let server = start(driver, "server { listen %TCP% udp; proxy_pass %TCP3%; %LOG% }");
    // No other test uses this address while it is free.
    let address = server.directory.address(3);
    let behind = UdpSocket::bind(address).unwrap();
    behind.set_read_timeout(Some(DEADLINE)).unwrap();
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.set_read_timeout(Some(DEADLINE)).unwrap();
    client.connect(server.directory.address(1)).unwrap();
    client.send(b"one").unwrap();
    let (_, from) = behind.recv_from(&mut [0; 8]).unwrap();
    behind.send_to(b"answer", from).unwrap();
    client.recv(&mut [0; 8]).unwrap();
    drop(behind);
    client.send(b"two").unwrap();
    server.wait_logged("(111: Connection refused) while proxying connection, udp client: 127.0.0.1, server: ");
    wait_sessions(&server, 1);
    // Once the server is back, the client gets a new session.
    let behind = UdpSocket::bind(address).unwrap();
    behind.set_read_timeout(Some(DEADLINE)).unwrap();
    client.send(b"three").unwrap();
    let mut bytes = [0; 8];
    let (length, from) = behind.recv_from(&mut bytes).unwrap();
    assert_eq!(&bytes[..length], b"three");
    behind.send_to(b"back", from).unwrap();
    assert_eq!(client.recv(&mut bytes).unwrap(), 4);
}

fn datagrams_that_wait_for_a_name_are_bounded(driver: Driver) {
    // A name server that never answers.
    let names = UdpSocket::bind("127.0.0.1:0").unwrap();
    names.set_read_timeout(Some(DEADLINE)).unwrap();
    let text = format!(
        "resolver {} ipv6=off; resolver_timeout 5s; map $protocol $host {{ default nowhere.test; }}
         server {{ listen %TCP% udp; proxy_pass $host:1; %LOG% }} server {{ listen %UNIX%; return ok; }}",
        names.local_addr().unwrap()
    );
    let server = start(driver, &text);
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.connect(server.directory.address(1)).unwrap();
    client.send(b"x").unwrap();
    names.recv(&mut [0; 512]).expect("a question");
    for _ in 0..100 {
        client.send(b"x").unwrap();
    }
    server.wait_logged(" were lost, there was no room");
    assert_eq!(server.connect().read_to_end(), b"ok");
    wait_sessions(&server, 1);
}
