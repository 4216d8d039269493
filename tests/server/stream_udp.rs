//! Sessions over UDP: the assignment of datagrams to sessions, and the end of a session.

use std::collections::HashSet;
use std::net::{SocketAddr, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;

use crate::support::{self, DEADLINE, Directory, Driver, Server, Setup, skip, stream_configuration, with_each_driver};

with_each_driver!(
    datagrams_pass_both_ways_and_are_counted,
    a_silent_session_ends_after_its_time,
    a_session_ends_with_its_last_answer,
    requests_beyond_a_sessions_own_begin_another,
    a_client_keeps_its_server_whichever_loop_hears_it,
    answers_come_from_the_address_that_was_asked,
    one_socket_serves_both_families,
    a_server_that_cannot_be_reached_is_a_failure,
    a_server_that_does_not_answer_is_a_failure,
    the_proxy_protocol_goes_before_the_first_datagram,
    return_answers_and_access_refuses,
    long_and_joined_datagrams_are_whole,
    answers_in_segments_are_whole_from_the_first_on,
    datagrams_that_arrive_together_leave_together_in_order,
    joined_datagrams_are_divided_for_a_unix_socket,
    a_flood_of_clients_takes_no_more_than_there_is,
    sessions_that_are_silent_longest_end_for_new_ones,
    lost_datagrams_are_counted_by_reason,
    a_flood_of_clients_closes_no_idle_connection_of_http,
    a_session_without_answers_ends_with_its_last_request,
    datagrams_that_wait_for_the_rate_reach_the_server_before_a_session_ends,
    an_address_to_send_from_that_is_not_there_is_no_failure_of_the_server,
    foreign_addresses_can_be_sent_from,
    a_datagram_that_is_too_long_is_no_failure_of_the_server,
    truncated_datagrams_are_told_and_not_passed_on,
    a_session_that_is_closed_from_outside_is_logged_with_its_bytes,
    clients_are_served_while_loops_leave,
    sessions_survive_a_reload,
    sessions_at_a_removed_address_end_with_worker_shutdown_timeout,
    tcp_and_udp_share_a_port,
    dnsmasq_is_served,
);

const FORMAT: &str = "log_format line '$status $bytes_received $bytes_sent $upstream_addr $upstream_bytes_sent \
                      $upstream_bytes_received $protocol';";

fn start(driver: Driver, text: &str) -> Server {
    Setup::stream(driver, &format!("{FORMAT}\n{text}")).start()
}

/// A socket with a receive timeout after which a test fails.
fn socket() -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
    socket.set_read_timeout(Some(DEADLINE)).expect("an option");
    socket
}

/// A client connected to the server's address of this number.
fn client(server: &Server, number: usize) -> UdpSocket {
    let socket = socket();
    socket.connect(server.directory.address(number)).expect("an address");
    socket
}

#[track_caller]
fn next(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    let mut bytes = vec![0; 65536];
    let (length, from) = socket.recv_from(&mut bytes).expect("a datagram");
    bytes.truncate(length);
    (bytes, from)
}

#[track_caller]
fn text(socket: &UdpSocket) -> String {
    String::from_utf8(next(socket).0).expect("text")
}

#[track_caller]
fn logged(server: &Server, text: &str) -> String {
    server.directory.wait_line("access.log", text)
}

fn datagrams_pass_both_ways_and_are_counted(driver: Driver) {
    let behind = socket();
    let address = behind.local_addr().unwrap();
    let server = start(
        driver,
        &format!("server {{ listen %TCP% udp; proxy_pass {address}; proxy_timeout 1h; proxy_responses 2; %LOG% }}"),
    );
    let client = client(&server, 1);
    client.send(b"one").unwrap();
    let (first, from) = next(&behind);
    assert_eq!(first, b"one");
    // One datagram at a time, since two loops read the socket.
    client.send(b"").unwrap();
    assert_eq!(next(&behind), (Vec::new(), from));
    client.send(b"three").unwrap();
    assert_eq!(next(&behind), (b"three".to_vec(), from));
    // Two answers to each datagram.
    for _ in 0..3 {
        behind.send_to(b"answer", from).unwrap();
        behind.send_to(b"more", from).unwrap();
        assert_eq!((text(&client), text(&client)), ("answer".to_owned(), "more".to_owned()));
    }
    assert_eq!(logged(&server, "200"), format!("200 8 30 {address} 8 30 UDP"));
    server.wait_logged("udp done, packets from/to client:3/6, bytes from/to client:8/30");
}

fn a_silent_session_ends_after_its_time(driver: Driver) {
    let behind = socket();
    let address = behind.local_addr().unwrap();
    let server =
        start(driver, &format!("server {{ listen %TCP% udp; proxy_pass {address}; proxy_timeout 50ms; %LOG% }}"));
    client(&server, 1).send(b"x").unwrap();
    assert_eq!(next(&behind).0, b"x");
    assert_eq!(logged(&server, "200"), format!("200 1 0 {address} 1 0 UDP"));
    server.wait_logged("udp timed out, packets from/to client:1/0, bytes from/to client:1/0");
}

fn a_session_ends_with_its_last_answer(driver: Driver) {
    let behind = socket();
    let address = behind.local_addr().unwrap();
    let server =
        start(driver, &format!("server {{ listen %TCP% udp; proxy_pass {address}; proxy_responses 1; %LOG% }}"));
    let mut ports = HashSet::new();
    for round in 0..3 {
        let client = client(&server, 1);
        client.send(b"question").unwrap();
        let (_, from) = next(&behind);
        ports.insert(from.port());
        behind.send_to(b"answer", from).unwrap();
        assert_eq!(text(&client), "answer");
        server.wait_logged_times("udp done, packets from/to client:1/1", round + 1);
    }
    assert_eq!(logged(&server, "200"), format!("200 8 6 {address} 8 6 UDP"));
    assert!(ports.len() > 1, "a port of its own for each session");
}

fn requests_beyond_a_sessions_own_begin_another(driver: Driver) {
    // One loop keeps the order of datagrams; two loops that read one socket need not.
    for (loops, is_in_order) in [("worker_processes 1", true), ("worker_processes 2", false)] {
        let behind = socket();
        let address = behind.local_addr().unwrap();
        let text = format!(
            "{FORMAT}
             server {{ listen %TCP% udp; proxy_pass {address}; proxy_requests 2; proxy_responses 1; %LOG% }}"
        );
        let text = stream_configuration(driver, &text).replace("worker_processes 2", loops);
        let server = Setup::configuration(&text).start();
        let client = client(&server, 1);
        for number in 0..6u8 {
            client.send(&[number]).unwrap();
        }
        let mut of_session: Vec<(SocketAddr, Vec<u8>)> = Vec::new();
        for _ in 0..6 {
            let (bytes, from) = next(&behind);
            match of_session.iter_mut().find(|(known, _)| *known == from) {
                Some((_, numbers)) => numbers.extend(bytes),
                None => of_session.push((from, bytes)),
            }
            behind.send_to(b"a", from).unwrap();
        }
        let mut numbers: Vec<Vec<u8>> = of_session.into_iter().map(|(_, numbers)| numbers).collect();
        if is_in_order {
            assert_eq!(numbers, [[0, 1], [2, 3], [4, 5]]);
        }
        assert_eq!(numbers.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2, 2]);
        let mut numbers: Vec<u8> = numbers.drain(..).flatten().collect();
        numbers.sort_unstable();
        assert_eq!(numbers, [0, 1, 2, 3, 4, 5]);
        server.wait_logged_times("udp done, packets from/to client:2/2", 3);
    }
}

fn a_client_keeps_its_server_whichever_loop_hears_it(driver: Driver) {
    let behind = socket();
    let address = behind.local_addr().unwrap();
    // Two loops read the one socket.
    let server = start(driver, &format!("server {{ listen %TCP% udp; proxy_pass {address}; }}"));
    let clients: Vec<UdpSocket> = (0..8).map(|_| client(&server, 1)).collect();
    let mut ports = HashSet::new();
    for round in 0..50u8 {
        for (number, client) in (0u8..).zip(&clients) {
            client.send(&[number, round]).unwrap();
            let (bytes, from) = next(&behind);
            assert_eq!(bytes, [number, round]);
            ports.insert((number, from.port()));
            behind.send_to(&bytes, from).unwrap();
            assert_eq!(next(client).0, [number, round]);
        }
    }
    assert_eq!(ports.len(), clients.len(), "one session for each client");
}

fn answers_come_from_the_address_that_was_asked(driver: Driver) {
    let behind = socket();
    let address = behind.local_addr().unwrap();
    let _turn = support::turn_of_wildcards();
    let server = start(driver, &format!("server {{ listen %PORT% udp; proxy_pass {address}; }}"));
    let own = server.directory.address(1);
    for host in [own.ip(), "127.0.0.1".parse().unwrap()] {
        // A connected socket receives from no other address.
        let client = socket();
        client.connect((host, own.port())).unwrap();
        client.send(b"x").unwrap();
        let (_, from) = next(&behind);
        behind.send_to(b"y", from).unwrap();
        assert_eq!(text(&client), "y");
    }
}

fn one_socket_serves_both_families(driver: Driver) {
    if UdpSocket::bind("[::1]:0").is_err() {
        return skip("there is no IPv6");
    }
    let behind = socket();
    let address = behind.local_addr().unwrap();
    let _turn = support::turn_of_wildcards();
    let text = format!(
        "log_format line '$remote_addr $server_addr';
         server {{ listen [::]:%PORT% udp ipv6only=off; proxy_pass {address}; proxy_responses 1; %LOG% }}"
    );
    let server = Setup::stream(driver, &text).start();
    let own = server.directory.address(1);
    for (host, seen) in [
        (own.ip(), format!("::ffff:127.0.0.1 ::ffff:{}", own.ip())),
        ("127.0.0.1".parse().unwrap(), "::ffff:127.0.0.1 ::ffff:127.0.0.1".to_owned()),
        ("::1".parse().unwrap(), "::1 ::1".to_owned()),
    ] {
        let client = if host.is_ipv4() { socket() } else { UdpSocket::bind("[::1]:0").unwrap() };
        client.set_read_timeout(Some(DEADLINE)).unwrap();
        // A connected socket receives from no other address.
        client.connect((host, own.port())).unwrap();
        client.send(b"x").unwrap();
        let (_, from) = next(&behind);
        behind.send_to(b"y", from).unwrap();
        assert_eq!(self::text(&client), "y");
        logged(&server, &seen);
    }
}

fn a_server_that_cannot_be_reached_is_a_failure(driver: Driver) {
    let behind = socket();
    let (dead, address) = (socket().local_addr().unwrap(), behind.local_addr().unwrap());
    let text_of = format!(
        "upstream group {{ server {dead}; server {address} backup; }}
         server {{ listen %TCP% udp; proxy_pass group; proxy_timeout 10s; %LOG% }}"
    );
    let server = start(driver, &text_of);
    client(&server, 1).send(b"lost").unwrap();
    logged(&server, "502 4 0");
    server.wait_logged("(111: Connection refused) while proxying connection, udp client: 127.0.0.1, server: ");
    server.wait_logged("upstream server temporarily disabled while proxying connection");
    client(&server, 1).send(b"found").unwrap();
    assert_eq!(next(&behind).0, b"found");
}

fn a_server_that_does_not_answer_is_a_failure(driver: Driver) {
    let behind = socket();
    let address = behind.local_addr().unwrap();
    let text =
        format!("server {{ listen %TCP% udp; proxy_pass {address}; proxy_timeout 50ms; proxy_responses 1; %LOG% }}");
    let server = start(driver, &text);
    client(&server, 1).send(b"x").unwrap();
    logged(&server, "502 1 0");
    server.wait_logged("upstream timed out (110: Connection timed out) while proxying connection, udp client: ");
}

fn the_proxy_protocol_goes_before_the_first_datagram(driver: Driver) {
    let behind = socket();
    let address = behind.local_addr().unwrap();
    let server = start(driver, &format!("server {{ listen %TCP% udp; proxy_pass {address}; proxy_protocol on; }}"));
    let client = client(&server, 1);
    client.send(b"one").unwrap();
    let (own, ours) = (client.local_addr().unwrap(), server.directory.address(1));
    let header = format!("PROXY TCP4 {} {} {} {}\r\n", own.ip(), ours.ip(), own.port(), ours.port());
    assert_eq!(text(&behind), format!("{header}one"));
    client.send(b"two").unwrap();
    assert_eq!(text(&behind), "two");
}

fn return_answers_and_access_refuses(driver: Driver) {
    let text_of = "server { listen %TCP% udp; return '$protocol $server_port'; %LOG% }
        server { listen %TCP2% udp; deny all; return x; %LOG% }";
    let server = start(driver, text_of);
    let own = client(&server, 1);
    own.send(b"x").unwrap();
    assert_eq!(text(&own), format!("UDP {}", server.directory.address(1).port()));
    client(&server, 2).send(b"x").unwrap();
    logged(&server, "403 ");
}

fn long_and_joined_datagrams_are_whole(driver: Driver) {
    let behind = socket();
    let address = behind.local_addr().unwrap();
    let server = start(driver, &format!("server {{ listen %TCP% udp; proxy_pass {address}; }}"));
    let client = client(&server, 1);
    for length in [1, 1200, 9000, 40_000, 65_507] {
        let bytes: Vec<u8> = (0..length).map(|index| (index % 251) as u8).collect();
        client.send(&bytes).unwrap();
        let (got, from) = next(&behind);
        assert!(got == bytes, "{length} bytes to the server");
        behind.send_to(&bytes, from).unwrap();
        assert!(next(&client).0 == bytes, "{length} bytes to the client");
    }
    // One call sends nine full segments and a shorter one; the kernel may join them again.
    const SEGMENT: usize = 1200;
    let bytes: Vec<u8> = (0..9 * SEGMENT + 7).map(|index| (index % 249) as u8).collect();
    send_segments(&client, &bytes, SEGMENT as u16);
    for piece in bytes.chunks(SEGMENT) {
        assert!(next(&behind).0 == piece, "each by itself");
    }
}

fn answers_in_segments_are_whole_from_the_first_on(driver: Driver) {
    let behind = socket();
    let address = behind.local_addr().unwrap();
    let server =
        start(driver, &format!("server {{ listen %TCP% udp; proxy_pass {address}; proxy_responses 9; %LOG% }}"));
    let client = client(&server, 1);
    client.send(b"question").unwrap();
    behind.connect(next(&behind).1).unwrap();
    // The first segments arrive before the kernel is asked to join answers, the others after.
    for _ in 0..3 {
        send_segments(&behind, &[7; 250], 100);
        assert_eq!([(); 3].map(|()| next(&client).0.len()), [100, 100, 50]);
    }
    assert_eq!(logged(&server, "200"), format!("200 8 750 {address} 8 750 UDP"));
    server.wait_logged("udp done, packets from/to client:1/9, bytes from/to client:8/750");
}

fn datagrams_that_arrive_together_leave_together_in_order(driver: Driver) {
    const COUNT: u8 = 30;
    let behind = socket();
    let address = behind.local_addr().unwrap();
    let configuration = stream_configuration(driver, &format!("server {{ listen %TCP% udp; proxy_pass {address}; }}"));
    let server = Setup::configuration(&configuration.replace("worker_processes 2", "worker_processes 1")).start();
    let clients = [client(&server, 1), client(&server, 1)];
    let mut sessions = Vec::new();
    for client in &clients {
        client.send(b"first").unwrap();
        let (_, from) = next(&behind);
        behind.send_to(b"answer", from).unwrap();
        assert_eq!(text(client), "answer");
        sessions.push(from);
    }
    // Datagrams joined by Gale stay joined; the kernel itself joins none over the loopback device.
    [&behind, &clients[0], &clients[1]].into_iter().for_each(|socket| set_option(socket, libc::UDP_GRO, 1));
    server.with_worker_stopped(|| {
        for number in 0..COUNT {
            (0u8..).zip(&clients).for_each(|(client, socket)| {
                socket.send(&numbered(client, number)).unwrap();
            });
        }
    });
    let (arrived, pieces) = received_numbers(&behind, 2 * usize::from(COUNT));
    for client in 0..2 {
        let numbers = arrived.iter().filter(|(of, _)| *of == client).map(|(_, number)| *number);
        assert!(numbers.eq(0..COUNT), "{arrived:?}");
    }
    assert!(pieces <= usize::from(COUNT), "{pieces} pieces");
    // The same with answers.
    server.with_worker_stopped(|| {
        for number in 0..COUNT {
            let sessions = (0u8..).zip(&sessions);
            sessions.for_each(|(client, to)| {
                behind.send_to(&numbered(client, number), to).unwrap();
            });
        }
    });
    for (own, client) in (0u8..).zip(&clients) {
        let (arrived, pieces) = received_numbers(client, usize::from(COUNT));
        assert!(arrived.into_iter().eq((0..COUNT).map(|number| (own, number))));
        assert!(pieces <= usize::from(COUNT) / 2, "{pieces} pieces");
    }
}

/// A datagram of this client with this number. Lengths differ between some of its datagrams.
fn numbered(client: u8, number: u8) -> Vec<u8> {
    let mut bytes = vec![client; if number == 20 { 700 } else { 1200 }];
    bytes[1] = number;
    bytes
}

/// Receives `count` datagrams; returns them by client and number, and the number of pieces in which they arrived.
fn received_numbers(socket: &UdpSocket, count: usize) -> (Vec<(u8, u8)>, usize) {
    let (mut numbers, mut pieces) = (Vec::new(), 0);
    while numbers.len() < count {
        let (bytes, _) = next(socket);
        let mut rest = &bytes[..];
        while let &[client, number, ..] = rest {
            rest = rest.strip_prefix(&numbered(client, number)[..]).expect("a whole datagram");
            numbers.push((client, number));
        }
        pieces += 1;
    }
    (numbers, pieces)
}

fn joined_datagrams_are_divided_for_a_unix_socket(driver: Driver) {
    let own = Directory::new();
    let path = own.path().join("behind");
    let behind = UnixDatagram::bind(&path).expect("a socket");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).expect("ours");
    behind.set_read_timeout(Some(DEADLINE)).expect("an option");
    let server = start(driver, &format!("server {{ listen %TCP% udp; proxy_pass unix:{}; }}", path.display()));
    let client = client(&server, 1);
    // The first datagrams wait for the upstream server, the others are sent at once.
    for _ in 0..3 {
        send_segments(&client, &[7; 250], 100);
        let lengths = [(); 3].map(|()| behind.recv(&mut [0; 1000]).expect("a datagram"));
        assert_eq!(lengths, [100, 100, 50]);
    }
}

/// Sends bytes that the kernel divides into segments (`UDP_SEGMENT`).
fn send_segments(socket: &UdpSocket, bytes: &[u8], segment: u16) {
    set_option(socket, libc::UDP_SEGMENT, segment.into());
    socket.send(bytes).expect("sent");
}

fn set_option(socket: &UdpSocket, option: libc::c_int, value: libc::c_int) {
    use std::os::fd::AsRawFd;
    // SAFETY: the kernel reads an integer that is alive during the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_UDP,
            option,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

fn a_flood_of_clients_takes_no_more_than_there_is(driver: Driver) {
    let behind = socket();
    let address = behind.local_addr().unwrap();
    let text_of = format!(
        "{FORMAT}\nserver {{ listen %TCP% udp; proxy_pass {address}; }} server {{ listen %UNIX%; return ok; }}"
    );
    let text_of = stream_configuration(driver, &text_of).replace("worker_connections 128", "worker_connections 20");
    let server = Setup::configuration(&text_of).start();
    let clients: Vec<UdpSocket> = (0..100).map(|_| client(&server, 1)).collect();
    for client in &clients {
        client.send(b"x").unwrap();
    }
    server.wait_logged("20 worker_connections are not enough");
    // Existing sessions continue.
    let (_, from) = next(&behind);
    behind.send_to(b"y", from).unwrap();
    clients.iter().for_each(|client| client.set_nonblocking(true).unwrap());
    let answered = || clients.iter().any(|client| client.recv(&mut [0; 8]).is_ok());
    let end = std::time::Instant::now() + DEADLINE;
    while !answered() {
        assert!(std::time::Instant::now() < end, "nobody was answered");
        std::thread::yield_now();
    }
}

fn sessions_that_are_silent_longest_end_for_new_ones(driver: Driver) {
    let behind = socket();
    let address = behind.local_addr().unwrap();
    let text = format!("{FORMAT}\nserver {{ listen %TCP% udp; proxy_pass {address}; %LOG% }}");
    let text = stream_configuration(driver, &text).replace("worker_connections 128", "worker_connections 20");
    let server = Setup::configuration(&text.replace("worker_processes 2", "worker_processes 1")).start();
    // Each session takes two connections. Its datagram's length identifies the client.
    let clients: Vec<UdpSocket> = (0..10).map(|_| client(&server, 1)).collect();
    for (number, client) in clients.iter().enumerate() {
        client.send(&vec![b'x'; number + 1]).unwrap();
        assert_eq!(next(&behind).0.len(), number + 1);
    }
    // The first session stays active; the others become idle for long enough in the end.
    let newcomer = client(&server, 1);
    behind.set_read_timeout(Some(std::time::Duration::from_millis(10))).unwrap();
    let end = std::time::Instant::now() + DEADLINE;
    let mut bytes = [0; 100];
    while !behind.recv(&mut bytes).is_ok_and(|count| &bytes[..count] == b"new") {
        assert!(std::time::Instant::now() < end, "no room came free");
        clients[0].send(b"x").unwrap();
        newcomer.send(b"new").unwrap();
    }
    server.wait_logged("20 worker_connections are not enough");
    logged(&server, "200 2 0");
    assert!(server.directory.read("access.log").starts_with("200 2 0 "), "the second one was silent longest");
    clients[0].send(b"still").unwrap();
    while !behind.recv(&mut bytes).is_ok_and(|count| &bytes[..count] == b"still") {
        assert!(std::time::Instant::now() < end, "the first session is gone");
    }
}

fn lost_datagrams_are_counted_by_reason(driver: Driver) {
    let behind = socket();
    let address = behind.local_addr().unwrap();
    let blocks = format!(
        "http {{ access_log off; client_body_temp_path %DIR%/body;
             server {{ listen %UNIX%; location /api {{ api; }} location /metrics {{ prometheus; }} }} }}
         stream {{ server {{ listen %TCP% udp; listen unix:%DIR%/own.sock udp; proxy_pass {address}; }} }}"
    );
    let text = support::configuration(driver, &blocks).replace("worker_connections 128", "worker_connections 20");
    let server = Setup::configuration(&text.replace("worker_processes 2", "worker_processes 1")).start();
    let lost = |reason: &str| {
        let text = server.get("/api/9/gale/datagrams").text().to_owned();
        let number = text.split(&format!("\"{reason}\":")).nth(1).expect("a figure").trim_start().to_owned();
        number.split([',', '}']).next().expect("a number").trim().parse::<u64>().expect("a number")
    };
    assert_eq!(["no_room", "handed_over", "truncated"].map(lost), [0; 3]);
    let own = UnixDatagram::unbound().expect("a socket");
    own.send_to(&[b'x'; 100_000], server.directory.path().join("own.sock")).unwrap();
    server.wait_logged("recvmsg() truncated data: 1 datagrams to unix:");
    let clients: Vec<UdpSocket> = (0..30).map(|_| client(&server, 1)).collect();
    clients.iter().for_each(|client| {
        client.send(b"x").unwrap();
    });
    server.wait_logged("datagrams to 127.");
    assert!((15..=30).contains(&lost("no_room")), "{}", lost("no_room"));
    assert_eq!(["handed_over", "truncated"].map(lost), [0, 1]);
    let metrics = server.get("/metrics").text().to_owned();
    assert!(metrics.contains("gale_stream_datagrams_lost_total{reason=\"truncated\"} 1\n"), "{metrics}");
}

fn a_flood_of_clients_closes_no_idle_connection_of_http(driver: Driver) {
    let behind = socket();
    let address = behind.local_addr().unwrap();
    let blocks = format!(
        "http {{ access_log off; client_body_temp_path %DIR%/body;
             server {{ listen %UNIX%; location / {{ return 200 $connection_requests; }} }} }}
         stream {{ server {{ listen %TCP% udp; proxy_pass {address}; }} }}"
    );
    let text = support::configuration(driver, &blocks);
    let text = text.replace("worker_connections 128", "worker_connections 20");
    let server = Setup::configuration(&text.replace("worker_processes 2", "worker_processes 1")).start();
    let mut idle: Vec<support::Client> = (0..4).map(|_| server.connect()).collect();
    idle.iter_mut().for_each(|client| assert_eq!(client.get("/").text(), "1"));
    let clients: Vec<UdpSocket> = (0..100).map(|_| client(&server, 1)).collect();
    for client in &clients {
        client.send(b"x").unwrap();
    }
    // One socket for each session that could begin.
    let served = |count: usize| (0..count).map(|_| next(&behind).1.port()).collect::<HashSet<u16>>().len();
    assert_eq!(served(8), 8);
    server.wait_logged("datagrams to");
    idle.iter_mut().for_each(|client| assert_eq!(client.get("/").text(), "2"));
}

fn a_session_without_answers_ends_with_its_last_request(driver: Driver) {
    let behind = socket();
    let address = behind.local_addr().unwrap();
    let server = start(
        driver,
        &format!("server {{ listen %TCP% udp; proxy_pass {address}; proxy_requests 2; proxy_responses 0; %LOG% }}"),
    );
    let client = client(&server, 1);
    client.send(b"one").unwrap();
    assert_eq!(next(&behind).0, b"one");
    client.send(b"two").unwrap();
    assert_eq!(next(&behind).0, b"two");
    logged(&server, "200 6 0");
}

fn datagrams_that_wait_for_the_rate_reach_the_server_before_a_session_ends(driver: Driver) {
    let behind = socket();
    let address = behind.local_addr().unwrap();
    // A datagram waits for longer than the session's timeout.
    let text = format!(
        "server {{ listen %TCP% udp; proxy_pass {address}; proxy_requests 3; proxy_responses 0; %LOG%
             proxy_upload_rate 1000; proxy_timeout 20ms; }}"
    );
    let server =
        Setup::stream(driver, &format!("{FORMAT}\n{text}")).replace("worker_processes 2", "worker_processes 1");
    let server = server.start();
    let client = client(&server, 1);
    // All datagrams have arrived before the session's timeout starts.
    server.with_worker_stopped(|| (0..3).for_each(|_| _ = client.send(&[7; 100]).unwrap()));
    let ports: HashSet<u16> = (0..3).map(|_| next(&behind).1.port()).collect();
    assert_eq!(ports.len(), 1, "one session");
    assert_eq!(logged(&server, "200"), format!("200 300 0 {address} 300 0 UDP"));
}

fn an_address_to_send_from_that_is_not_there_is_no_failure_of_the_server(driver: Driver) {
    let behind = socket();
    let address = behind.local_addr().unwrap();
    let text = format!(
        "upstream group {{ server {address}; server {address} backup; }}
         server {{ listen %TCP% udp; proxy_pass group; proxy_bind 192.0.2.1; %LOG% }}
         server {{ listen %TCP2% udp; proxy_pass group; }}"
    );
    let server = start(driver, &text);
    client(&server, 1).send(b"x").unwrap();
    assert_eq!(logged(&server, "500 1 0"), format!("500 1 0 {address} 0 0 UDP"));
    server.wait_logged("bind() failed (99: Cannot assign requested address) while connecting to upstream");
    client(&server, 2).send(b"y").unwrap();
    assert_eq!(next(&behind).0, b"y");
    assert!(!server.log().contains("temporarily disabled"));
}

fn foreign_addresses_can_be_sent_from(driver: Driver) {
    if !support::is_root() {
        return skip("only root may send from foreign addresses");
    }
    let behind = socket();
    let address = behind.local_addr().unwrap();
    let text = format!(
        "user root; stream {{ server {{ listen %TCP% udp; proxy_pass {address}; proxy_bind 192.0.2.1 transparent; }} }}"
    );
    let server = Setup::configuration(&support::configuration(driver, &text)).start();
    client(&server, 1).send(b"x").unwrap();
    // The message comes whether or not the network delivers the datagram.
    server.wait_logged("udp proxy 192.0.2.1:");
}

fn a_datagram_that_is_too_long_is_no_failure_of_the_server(driver: Driver) {
    let behind = socket();
    let address = behind.local_addr().unwrap();
    let server =
        start(driver, &format!("server {{ listen %TCP% udp; proxy_pass {address}; proxy_protocol v2; %LOG% }}"));
    let client = client(&server, 1);
    // With the header it is longer than the maximum of a datagram.
    client.send(&vec![7; 65_507]).unwrap();
    client.send(b"two").unwrap();
    let (bytes, from) = next(&behind);
    assert!(bytes.starts_with(b"\r\n\r\n\0\r\nQUIT\n") && bytes.ends_with(b"two"), "the header goes first");
    behind.send_to(b"answer", from).unwrap();
    assert_eq!(text(&client), "answer");
}

/// Datagrams between Unix sockets may be longer than any of UDP.
fn truncated_datagrams_are_told_and_not_passed_on(driver: Driver) {
    let own = Directory::new();
    let bind = |name: &str| {
        let path = own.path().join(name);
        let socket = UnixDatagram::bind(&path).expect("a socket");
        // The worker may run as another user.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).expect("ours");
        socket.set_read_timeout(Some(DEADLINE)).expect("an option");
        socket
    };
    let (behind, client) = (bind("behind"), bind("client"));
    let path = own.path().join("behind");
    let text = format!("server {{ listen unix:%DIR%/own.sock udp; proxy_pass unix:{}; }}", path.display());
    let server = start(driver, &text);
    client.connect(server.directory.path().join("own.sock")).unwrap();
    client.send(&[b'x'; 100_000]).unwrap();
    server.wait_logged("recvmsg() truncated data: 1 datagrams to unix:");
    client.send(b"whole").unwrap();
    let mut bytes = [0; 100];
    let count = behind.recv(&mut bytes).expect("a datagram");
    assert_eq!(&bytes[..count], b"whole");
    // Truncated datagrams belong to no session.
    server.wait_logged("udp client unix:");
    server.stop();
}

fn a_session_that_is_closed_from_outside_is_logged_with_its_bytes(driver: Driver) {
    let behind = socket();
    let address = behind.local_addr().unwrap();
    let mut server = start(driver, &format!("server {{ listen %TCP% udp; proxy_pass {address}; %LOG% }}"));
    let client = client(&server, 1);
    client.send(b"one").unwrap();
    let (_, from) = next(&behind);
    behind.send_to(b"answer", from).unwrap();
    assert_eq!(text(&client), "answer");
    server.end(rustix::process::Signal::QUIT);
    assert_eq!(logged(&server, "200"), format!("200 3 6 {address} 3 6 UDP"));
}

fn clients_are_served_while_loops_leave(driver: Driver) {
    let behind = socket();
    let address = behind.local_addr().unwrap();
    let text = stream_configuration(driver, &format!("server {{ listen %TCP% udp; proxy_pass {address}; }}"));
    let mut server = Setup::configuration(&text.replace("worker_processes 2", "worker_processes 4")).start();
    let talk = |number: u8| {
        let client = client(&server, 1);
        client.send(&[number]).unwrap();
        let (bytes, from) = next(&behind);
        assert_eq!(bytes, [number]);
        behind.send_to(&[number], from).unwrap();
        assert_eq!(next(&client).0, [number]);
        client
    };
    // The sessions keep the removed loops at the address.
    let _old: Vec<UdpSocket> = (0..24).map(talk).collect();
    server.reload(&text.replace("worker_processes 2", "worker_processes 1"));
    let talk = |number: u8| {
        let client = client(&server, 1);
        client.send(&[number]).unwrap();
        assert_eq!(next(&behind).0, [number]);
    };
    (24..48).for_each(talk);
}

fn sessions_survive_a_reload(driver: Driver) {
    let behind = socket();
    let address = behind.local_addr().unwrap();
    // With a sandbox, more loops with io_uring would need another process.
    let text_of = |listen: &str| {
        let text = format!("{FORMAT}\nserver {{ {listen} proxy_pass {address}; %LOG% }}");
        format!("sandbox off;\n{}", stream_configuration(driver, &text))
    };
    let mut server = Setup::configuration(&text_of("listen %TCP% udp reuseport; listen %TCP2% udp;")).start();
    let (one, other) = (client(&server, 1), client(&server, 2));
    one.send(b"1").unwrap();
    let (_, from_one) = next(&behind);
    other.send(b"2").unwrap();
    let (_, from_other) = next(&behind);
    // Another number of loops changes the targets of the kernel's hash.
    let reloaded = text_of("listen %TCP% udp reuseport;").replace("worker_processes 2", "worker_processes 3");
    server.reload(&reloaded);
    for round in 0..10u8 {
        one.send(&[round]).unwrap();
        assert_eq!(next(&behind), (vec![round], from_one));
        behind.send_to(&[round], from_one).unwrap();
        assert_eq!(next(&one).0, [round]);
    }
    // A session at a removed address continues, and none begins there.
    other.send(b"3").unwrap();
    assert_eq!(next(&behind), (b"3".to_vec(), from_other));
    behind.send_to(b"4", from_other).unwrap();
    assert_eq!(next(&other).0, b"4");
}

fn sessions_at_a_removed_address_end_with_worker_shutdown_timeout(driver: Driver) {
    let behind = socket();
    let address = behind.local_addr().unwrap();
    let text = |addresses: &str| {
        let text = format!("{FORMAT}\nserver {{ {addresses} proxy_pass {address}; %LOG% }}");
        format!("worker_shutdown_timeout 50ms;\n{}", stream_configuration(driver, &text))
    };
    let mut server = Setup::configuration(&text("listen %TCP% udp; listen %TCP2% udp;")).start();
    let (stays, goes) = (client(&server, 1), client(&server, 2));
    stays.send(b"stays").unwrap();
    let (_, from_stays) = next(&behind);
    goes.send(b"go").unwrap();
    next(&behind);
    server.reload(&text("listen %TCP% udp;"));
    assert_eq!(logged(&server, "200"), format!("200 2 0 {address} 2 0 UDP"));
    stays.send(b"on").unwrap();
    assert_eq!(next(&behind), (b"on".to_vec(), from_stays));
}

fn tcp_and_udp_share_a_port(driver: Driver) {
    let server = start(driver, "server { listen %TCP% udp; return udp; } server { listen %TCP%; return tcp; }");
    let own = client(&server, 1);
    own.send(b"x").unwrap();
    assert_eq!(text(&own), "udp");
    assert_eq!(server.connect_tcp(1).read_to_end(), b"tcp");
}

/// A server program, if it is installed; killed when the test ends.
struct Daemon(std::process::Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn dnsmasq_is_served(driver: Driver) {
    use std::io::BufRead;
    let server = start(
        driver,
        "server { listen %TCP% udp; proxy_pass %TCP2%; proxy_responses 1; %LOG% }
         server { listen %TCP%; proxy_pass %TCP2%; %LOG% }",
    );
    let own = server.directory.address(2);
    let daemon = std::process::Command::new("dnsmasq")
        .args(["--keep-in-foreground", "--log-facility=-", "--no-resolv", "--no-hosts", "--bind-interfaces"])
        .args(["--conf-file=/dev/null", "--pid-file=", "--user=", "--address=/known.test/192.0.2.9"])
        .args([format!("--listen-address={}", own.ip()), format!("--port={}", own.port())])
        .stderr(std::process::Stdio::piped())
        .spawn();
    let Ok(mut daemon) = daemon else {
        return skip("dnsmasq is not installed");
    };
    let log = daemon.stderr.take().expect("a pipe");
    let _daemon = Daemon(daemon);
    let mut lines = std::io::BufReader::new(log).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("started, version")), "dnsmasq did not start");
    let question = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x05known\x04test\x00\x00\x01\x00\x01";
    let client = client(&server, 1);
    client.send(question).unwrap();
    let (answer, _) = next(&client);
    assert!(answer.starts_with(b"\x12\x34") && answer.ends_with(&[192, 0, 2, 9]), "{answer:?}");
    // The same over TCP, with the length in front.
    let mut client = server.connect_tcp(1);
    client.send([&(question.len() as u16).to_be_bytes()[..], question].concat());
    let length = client.take(2);
    let answer = client.take(usize::from(u16::from_be_bytes([length[0], length[1]])));
    assert!(answer.ends_with(&[192, 0, 2, 9]), "{answer:?}");
}
