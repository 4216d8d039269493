//! Life of connections: their time limits, their ends, and isolation of clients from each other.

use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use rustix::process::Signal;

use crate::support::{self, Client, Driver, Server, Setup, descriptor_limit, skip, turn_of_crowds, with_each_driver};

with_each_driver!(
    idle_connections_are_closed_after_their_time,
    keepalive_timeout_inherits_its_second_parameter_apart_from_the_first,
    a_connection_carries_as_many_requests_as_it_may,
    a_connection_gets_old,
    keep_alive_follows_the_location_that_answers,
    a_client_that_sends_on_gets_its_answer_first,
    lingering_ends,
    a_client_that_reads_nothing_is_dropped,
    a_client_that_times_out_is_reset_if_asked_for,
    a_status_of_444_closes_without_a_word,
    a_panic_ends_its_connection_alone,
    slow_clients_beside_fast_ones,
    a_flood_of_requests_does_not_hold_others_up,
    idle_connections_make_room_for_new_ones,
    a_full_worker_takes_as_many_new_ones_as_it_has_idle_ones,
    idle_connections_at_one_address_make_room_at_the_other,
    busy_connections_make_new_ones_wait,
    a_thousand_idle_connections_do_no_harm,
    descriptors_that_run_out_come_back,
    a_request_that_finds_no_descriptor_for_its_server_fails_alone,
    a_client_with_a_path_as_long_as_an_address_is_as_good_as_any,
    stopping_server_does_not_wait_for_silent_clients,
);

const HELLO: &str = "location / { return 200 hello; }";

/// One worker, so that each connection could disturb all others.
fn one_worker(driver: Driver, connections_max: usize, text: &str) -> Setup {
    let configuration =
        support::http_configuration(driver, &format!("server {{ listen %UNIX%; listen %TCP%; {text} }}"))
            .replace("worker_processes 2", "worker_processes 1")
            .replace("worker_connections 128", &format!("worker_connections {connections_max}"));
    Setup::configuration(&configuration)
}

#[track_caller]
fn assert_hello(client: &mut Client) {
    let response = client.get("/");
    assert_eq!((response.status, response.text()), (200, "hello"));
}

fn idle_connections_are_closed_after_their_time(driver: Driver) {
    let server = Server::start(
        driver,
        "keepalive_timeout 1h; location / { return 200 hello; }
         location /short { keepalive_timeout 200ms; return 200 hello; }
         location /told { keepalive_timeout 200ms 20s; return 200 hello; }
         location /off { keepalive_timeout 0; return 200 hello; }",
    );
    for (path, told) in [("/short", None), ("/told", Some("timeout=20"))] {
        let mut client = server.connect();
        assert_eq!(client.get("/").header("Keep-Alive"), None);
        assert_eq!(client.get(path).header("Keep-Alive"), told);
        client.assert_closed();
    }
    let mut client = server.connect();
    assert_eq!(client.get("/off").header("Connection"), Some("close"));
    client.assert_closed();
    server.stop();
}

fn keepalive_timeout_inherits_its_second_parameter_apart_from_the_first(driver: Driver) {
    let server = Setup::http(
        driver,
        "keepalive_timeout 60s 20s;
         server { listen %UNIX%; keepalive_timeout 30s; location /told { return 200; }
             location /other { keepalive_timeout 40s 7s; location /other/inner { keepalive_timeout 10s; return 200; } }
             location /none { keepalive_timeout 30s 0; location /none/inner { keepalive_timeout 10s; return 200; } } }",
    )
    .start();
    let mut client = server.connect();
    for (path, told) in [("/told", Some("timeout=20")), ("/other/inner", Some("timeout=7")), ("/none/inner", None)] {
        assert_eq!(client.get(path).header("Keep-Alive"), told, "{path}");
    }
    server.stop();
}

fn a_connection_carries_as_many_requests_as_it_may(driver: Driver) {
    let server = Server::start(driver, "keepalive_requests 3; location / { return 200 hello; }");
    let mut client = server.connect();
    client.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n".repeat(5));
    for connection in ["keep-alive", "keep-alive", "close"] {
        assert_eq!(client.response().header("Connection"), Some(connection));
    }
    client.assert_closed();
    server.stop();
    // Also for requests without a location.
    let server = Server::start(driver, "keepalive_requests 2; return 200 hello;");
    let mut client = server.connect();
    client.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n".repeat(3));
    for connection in ["keep-alive", "close"] {
        assert_eq!(client.response().header("Connection"), Some(connection));
    }
    client.assert_closed();
    server.stop();
}

fn a_connection_gets_old(driver: Driver) {
    let server = Server::start(driver, "keepalive_time 1ms; location / { return 200 hello; }");
    let mut client = server.connect();
    let start = Instant::now();
    // Until the connection is older than that.
    while client.get("/").header("Connection") == Some("keep-alive") {
        assert!(start.elapsed() < support::DEADLINE);
    }
    client.assert_closed();
    server.stop();
}

fn keep_alive_follows_the_location_that_answers(driver: Driver) {
    let setup = Setup::server(
        driver,
        "root %DIR%/files; location /moved { try_files /missing /kept/page; keepalive_timeout 0; } location /kept/ { }
         location /denied { return 403; error_page 403 /final; }
         location /final { keepalive_timeout 0; return 403 no; }",
    );
    let server = setup.file("files/kept/page", "kept").start();
    let mut client = server.connect();
    let response = client.get("/moved");
    assert_eq!((response.text(), response.header("Connection")), ("kept", Some("keep-alive")));
    let response = client.get("/denied");
    assert_eq!((response.status, response.text(), response.header("Connection")), (403, "no", Some("close")));
    client.assert_closed();
    server.stop();
}

fn a_client_that_sends_on_gets_its_answer_first(driver: Driver) {
    let server = one_worker(driver, 128, "client_max_body_size 1k; location / { return 200 hello; }").start();
    let request = format!("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n", 64 << 20);
    for mut client in [server.connect(), server.connect_tcp(1)] {
        client.send(&request);
        let mut sender = client.sender();
        let sending = std::thread::spawn(move || {
            let piece = [0; 65536];
            while sender.try_send(piece).is_ok() {}
        });
        // The answer is not lost to a reset, however much data is on its way.
        assert_eq!(client.response().status, 413);
        client.assert_closed();
        client.finish_sending();
        sending.join().expect("sent");
    }
    server.stop();
}

fn lingering_ends(driver: Driver) {
    let server = Server::start(
        driver,
        "client_max_body_size 1; location / { lingering_timeout 200ms; } location /off { lingering_close off; }
         location /always { lingering_close always; lingering_timeout 200ms; return 200 hello; }
         location /long { lingering_time 300ms; }",
    );
    let ask = |path: &str, fields: &str| {
        let mut client = server.connect();
        let response = client.ask(format!("POST {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n{fields}\r\n"));
        assert_eq!(response.status, if fields.is_empty() { 200 } else { 413 });
        client.assert_closed();
        client
    };
    ask("/", "Content-Length: 9\r\n").wait_hung_up();
    ask("/off", "Content-Length: 9\r\n").wait_hung_up();
    ask("/always", "").wait_hung_up();
    // A client that never stops sending is closed in the end.
    let mut client = ask("/long", "Content-Length: 9\r\n");
    while client.try_send([0; 1024]).is_ok() {}
    server.stop();
}

fn a_client_that_reads_nothing_is_dropped(driver: Driver) {
    let text =
        "send_timeout 200ms; root %DIR%/files; location /on/ { alias %DIR%/files/; sendfile on; } location / { }";
    let server = one_worker(driver, 128, text).file("files/big", vec![b'x'; 32 << 20]).start();
    for path in ["/big", "/on/big"] {
        for mut client in [server.connect(), server.connect_tcp(1)] {
            client.send(format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n"));
            // Nothing is read before the server has given up.
            server.directory.wait_line("access.log", &format!("\"GET {path} HTTP/1.1\" 200"));
            assert!(client.read_to_end().len() < 32 << 20);
            fs_truncate(&server, "access.log");
        }
    }
    server.stop();
}

/// Truncates a log, which is open for appending.
fn fs_truncate(server: &Server, name: &str) {
    let file = std::fs::File::options().write(true).open(server.directory.path().join(name));
    file.and_then(|file| file.set_len(0)).expect("emptied");
}

fn a_client_that_times_out_is_reset_if_asked_for(driver: Driver) {
    let text = "send_timeout 200ms; client_header_timeout 1s; root %DIR%/files;";
    for (settings, is_reset) in [("reset_timedout_connection on;", true), ("", false)] {
        let setup = one_worker(driver, 128, &format!("{text} {settings}")).file("files/big", vec![b'x'; 32 << 20]);
        let server = setup.start();
        let mut reader = server.connect_tcp(1);
        reader.send("GET /big HTTP/1.1\r\nHost: h\r\n\r\n");
        server.directory.wait_line("access.log", "\"GET /big HTTP/1.1\" 200");
        reader.read_to_end();
        assert_eq!(reader.was_reset(), is_reset, "{settings} reading");
        let mut sender = server.connect_tcp(1);
        sender.send("GET /half");
        sender.read_to_end();
        assert_eq!(sender.was_reset(), is_reset, "{settings} sending");
        server.stop();
    }
}

fn a_status_of_444_closes_without_a_word(driver: Driver) {
    let server = Server::start(driver, "location / { return 444; } location /text { return 444 text; }");
    let mut client = server.connect();
    client.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
    client.assert_closed();
    server.directory.wait_line("access.log", "\"GET / HTTP/1.1\" 444 0");
    server.stop();
}

fn a_panic_ends_its_connection_alone(driver: Driver) {
    let text =
        "location /panic { test_panic; } location /later { test_panic waiting; } location / { return 200 hello; }";
    let mut server = one_worker(driver, 16, text).start();
    let worker = server.worker();
    let mut other = server.connect();
    assert_hello(&mut other);
    // More often than there are connections: their slots are freed.
    for number in 1..=20 {
        for path in ["/panic", "/later"] {
            let mut client = server.connect();
            assert_hello(&mut client);
            client.send(format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n"));
            client.assert_closed();
        }
        assert_hello(&mut other);
        server.wait_logged_times("a test wanted it", 2 * number);
    }
    assert!(server.wait_logged("a test wanted it later").contains("[alert]"));
    assert!(server.wait_logged("a test wanted it").contains("test_hooks.rs"));
    assert_eq!(server.worker(), worker);
    server.end(Signal::TERM);
}

fn slow_clients_beside_fast_ones(driver: Driver) {
    let server = one_worker(driver, 128, &format!("keepalive_requests 100000; {HELLO}")).start();
    let request = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut slow: Vec<Client> = (0..20).map(|_| server.connect()).collect();
    // One byte of every slow client for a hundred requests of a fast one.
    let mut fast = server.connect();
    for byte in request.bytes() {
        slow.iter_mut().for_each(|client| client.send([byte]));
        (0..100).for_each(|_| assert_hello(&mut fast));
    }
    slow.iter_mut().for_each(|client| assert_eq!(client.response().text(), "hello"));
    server.stop();
}

fn a_flood_of_requests_does_not_hold_others_up(driver: Driver) {
    let server = one_worker(driver, 128, &format!("keepalive_requests 1000000000; access_log off; {HELLO}")).start();
    let flood = server.connect();
    let (mut sender, mut receiver) = (flood.sender(), flood.sender());
    let sending = std::thread::spawn(move || {
        let piece = "GET / HTTP/1.1\r\nHost: h\r\n\r\n".repeat(1000);
        while sender.try_send(&piece).is_ok() {}
    });
    let receiving = std::thread::spawn(move || while receiver.take_some() {});
    let mut other = server.connect();
    (0..100).for_each(|_| assert_hello(&mut other));
    assert_hello(&mut server.connect());
    flood.close_both();
    sending.join().expect("ended");
    receiving.join().expect("ended");
    server.stop();
}

fn idle_connections_make_room_for_new_ones(driver: Driver) {
    let server = one_worker(driver, 40, HELLO).start();
    let mut kept: Vec<Client> = (0..40).map(|_| server.connect()).collect();
    kept.iter_mut().for_each(assert_hello);
    let mut newcomer = server.connect();
    // The second answer belongs to a later turn of the loop: evicted connections are closed by then.
    (0..2).for_each(|_| assert_hello(&mut newcomer));
    server.wait_logged("40 worker_connections are not enough");
    // An eighth of the connections is closed, those that were idle longest.
    let closed: Vec<usize> = (0..40).filter(|&number| kept[number].is_closed()).collect();
    assert_eq!(closed, [0, 1, 2, 3, 4]);
    kept[5..].iter_mut().for_each(assert_hello);
    server.stop();
}

fn a_full_worker_takes_as_many_new_ones_as_it_has_idle_ones(driver: Driver) {
    const COUNT: usize = 600;
    let _turn = turn_of_crowds();
    if descriptor_limit() < 4 * COUNT {
        return skip("a process can have too few descriptors here");
    }
    let server = one_worker(driver, COUNT, HELLO).start();
    let mut busy: Vec<Client> = (0..COUNT / 3).map(|_| server.connect()).collect();
    for client in &mut busy {
        // Once the first request is answered, half of the second was read too: the connection is never idle.
        assert_eq!(client.ask(format!("{HALF}\r\n{HALF}")).text(), "hello");
    }
    let mut kept: Vec<Client> = (busy.len()..COUNT).map(|_| server.connect()).collect();
    kept.iter_mut().for_each(assert_hello);
    let mut newcomers: Vec<Client> = Vec::new();
    for _ in 0..kept.len() {
        let mut client = server.connect();
        assert_eq!(client.ask(format!("{HALF}\r\n{HALF}")).text(), "hello");
        newcomers.push(client);
    }
    kept.iter_mut().for_each(|client| client.assert_closed());
    // Now no connection is idle.
    let mut waiting = server.connect();
    waiting.send(format!("{HALF}\r\n"));
    for client in busy.iter_mut().chain(&mut newcomers) {
        client.send("\r\n");
        assert_eq!(client.response().text(), "hello");
    }
    assert_eq!(waiting.response().text(), "hello");
    server.stop();
}

fn idle_connections_at_one_address_make_room_at_the_other(driver: Driver) {
    const COUNT: usize = 100;
    let server = one_worker(driver, COUNT, HELLO).start();
    let mut kept: Vec<Client> = (0..COUNT).map(|_| server.connect()).collect();
    kept.iter_mut().for_each(assert_hello);
    let newcomers: Vec<Client> = (0..COUNT)
        .map(|_| {
            let mut client = server.connect_tcp(1);
            assert_eq!(client.ask(format!("{HALF}\r\n{HALF}")).text(), "hello");
            client
        })
        .collect();
    // Each socket may accept one above the limit.
    let start = Instant::now();
    while kept.iter().filter(|client| !client.is_closed()).count() > 2 {
        assert!(start.elapsed() < support::DEADLINE, "{server}");
    }
    drop(newcomers);
    server.stop();
}

/// An incomplete request head.
const HALF: &str = "GET / HTTP/1.1\r\nHost: localhost\r\n";

fn busy_connections_make_new_ones_wait(driver: Driver) {
    let server = one_worker(driver, 10, "location / { return 200 hello; } location /echo { test_echo; }").start();
    let mut busy: Vec<Client> = (0..10).map(|_| server.connect()).collect();
    for client in &mut busy {
        client.send("POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhel");
        assert_eq!(client.head().status, 200);
        assert_eq!(client.chunk().as_deref(), Some(&b"hel"[..]));
    }
    let mut waiting: Vec<Client> = (0..10).map(|_| server.connect()).collect();
    waiting.iter_mut().for_each(|client| client.send("GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"));
    server.wait_logged("10 worker_connections are not enough");
    // Each end of a connection admits another one.
    let mut first = busy.pop().expect("ten");
    first.send("lo");
    assert_eq!((first.chunk().as_deref(), first.chunk()), (Some(&b"lo"[..]), None));
    drop(first);
    waiting.iter_mut().for_each(|client| assert_eq!(client.response().text(), "hello"));
    for client in &mut busy {
        client.send("lo");
        assert_eq!(client.chunk().as_deref(), Some(&b"lo"[..]));
    }
    server.stop();
}

fn a_thousand_idle_connections_do_no_harm(driver: Driver) {
    const COUNT: usize = 1000;
    let _turn = turn_of_crowds();
    if descriptor_limit() < 4 * COUNT {
        return skip("a process can have too few descriptors here");
    }
    let server = one_worker(driver, 2 * COUNT, HELLO).start();
    let mut idle: Vec<Client> = (0..COUNT).map(|_| server.connect()).collect();
    // Half of the connections have had one answer, the others have sent nothing yet.
    idle[..COUNT / 2].iter_mut().for_each(assert_hello);
    let time = support::cpu_time(server.worker());
    let mut other = server.connect();
    (0..10).for_each(|_| assert_hello(&mut other));
    assert!((support::cpu_time(server.worker()) - time).as_millis() < 1000, "idle connections cost nothing");
    // All connections are open. (The number of descriptors before is not known: some are closed shortly after the
    // start.)
    assert!(support::descriptors_of(server.worker()) > COUNT);
    idle.iter_mut().for_each(assert_hello);
    drop(idle);
    server.stop();
}

fn descriptors_that_run_out_come_back(driver: Driver) {
    let configuration = support::http_configuration(driver, &format!("server {{ listen %UNIX%; {HELLO} }}"))
        .replace("worker_processes 2", "worker_processes 1; worker_rlimit_nofile 40");
    let server = Setup::configuration(&configuration).start();
    let mut clients: Vec<Client> = (0..60).map(|_| server.connect()).collect();
    let message = server.wait_logged("accept4() failed (24: Too many open files)");
    assert!(message.contains("[crit]"), "{message}");
    // Accepted connections are served; the others are when descriptors are free again.
    assert_hello(&mut clients[0]);
    let mut last = clients.pop().expect("sixty");
    drop(clients);
    assert_hello(&mut last);
    server.stop();
}

fn a_request_that_finds_no_descriptor_for_its_server_fails_alone(driver: Driver) {
    let backends: [_; 2] = std::array::from_fn(|_| {
        support::Backend::tcp()
            .serve(|_, client| client.try_send("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nbehind").is_ok())
    });
    let servers: String =
        backends.iter().map(|backend| format!("server {} fail_timeout=1h;", backend.address)).collect();
    let text = format!(
        "upstream two {{ {servers} keepalive 0; }}
         server {{ listen %UNIX%; {HELLO} location /behind {{ proxy_pass http://two; }} }}",
    );
    let configuration = support::http_configuration(driver, &text)
        .replace("worker_processes 2", "worker_processes 1; worker_rlimit_nofile 40");
    let server = Setup::configuration(&configuration).start();
    let mut clients: Vec<Client> = (0..60).map(|_| server.connect()).collect();
    server.wait_logged("accept4() failed (24: Too many open files)");
    assert_eq!(clients[0].get("/behind").status, 500);
    server.wait_logged("socket() failed (24: Too many open files) while connecting to upstream");
    assert_hello(&mut clients[1]);
    clients.truncate(10);
    // The clients that waited to be accepted have left.
    assert_hello(&mut server.connect());
    // The shortage was the worker's: neither upstream server counts as failed, which would last an hour.
    (0..4).for_each(|_| assert_eq!(clients[1].get("/behind").text(), "behind"));
    backends.iter().for_each(|backend| assert_eq!(backend.connection_count(), 2));
    server.stop();
}

fn a_client_with_a_path_as_long_as_an_address_is_as_good_as_any(driver: Driver) {
    const PATH_BYTES_MAX: usize = 108;
    let server = Server::start(driver, HELLO);
    let scratch = server.directory.path().join("x");
    let padding = PATH_BYTES_MAX - scratch.as_os_str().len();
    let path = format!("{}{}", scratch.display(), "x".repeat(padding));
    // At least as many as there are workers.
    for _ in 0..4 {
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("a socket");
        rustix::net::bind(&socket, &SocketAddrUnix::new(&*path).expect("as long as it may be")).expect("a free path");
        let listening = SocketAddrUnix::new(server.directory.path().join("gale.sock")).expect("a short path");
        rustix::net::connect(&socket, &listening).expect("the server listens");
        assert_hello(&mut Client::of(UnixStream::from(socket)));
        std::fs::remove_file(&path).expect("it was bound");
    }
    server.stop();
}

fn stopping_server_does_not_wait_for_silent_clients(driver: Driver) {
    let mut server = one_worker(driver, 1000, HELLO).start();
    let mut clients: Vec<Client> = (0..10).map(|_| server.connect()).collect();
    clients.iter_mut().for_each(assert_hello);
    // Some of these are accepted before the worker gets the signal, the others are in the queue then.
    clients.extend((0..100).map(|_| server.connect()));
    server.end(Signal::QUIT);
    clients.iter_mut().for_each(Client::assert_closed);
}
