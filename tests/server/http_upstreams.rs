//! Upstream groups over real sockets: state of the servers across reloads, names resolved at run time, state files. The
//! order of choices is tested in the engine, against nginx's.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::support::{DEADLINE, Directory, Driver, Server, Setup, http_configuration, with_each_driver};

with_each_driver!(
    group_may_be_declared_behind_its_references,
    a_peer_that_has_failed_is_left_out_also_after_a_reload,
    idle_connections_are_used_again_after_a_reload,
    addresses_of_a_name_are_there_at_once_after_a_reload,
    a_state_file_has_the_servers_and_need_not_be_there,
    requests_wait_in_the_queue_until_a_server_is_free,
    a_session_stays_with_its_server,
    a_learned_session_stays_with_its_server_over_a_reload,
);

/// Two servers that respond with their name and the number of requests on the connection.
const SERVERS: &str = "
server { listen unix:%DIR%/one; location / { return 200 \"one $connection_requests\"; } }
server { listen unix:%DIR%/two; location / { return 200 \"two $connection_requests\"; } }
";

/// A server that proxies every request to the group `app`, and `text` in front of it.
fn proxy(text: &str) -> String {
    format!(
        "{SERVERS}{text}
         server {{ listen %UNIX%; location / {{ proxy_pass http://app; add_header X-Tried $upstream_addr always; }} }}"
    )
}

/// With one worker, so that servers are chosen in one order.
fn one_worker(driver: Driver, text: &str) -> String {
    http_configuration(driver, text).replace("worker_processes 2", "worker_processes 1")
}

/// Name of the server that responds.
fn asked(server: &Server) -> String {
    server.get("/").text().split(' ').next().expect("a word").to_owned()
}

fn tried(server: &Server) -> String {
    let response = server.get("/");
    let tried = response.header("x-tried").expect("a field").to_owned();
    tried.replace(&format!("unix:{}/", server.directory.path().display()), "")
}

fn group_may_be_declared_behind_its_references(driver: Driver) {
    let group = "upstream App { server unix:%DIR%/one; server unix:%DIR%/two weight=2; }";
    let behind = "server { listen %UNIX%; location / { proxy_pass http://aPP; } }";
    let server = Setup::configuration(&one_worker(driver, &format!("{SERVERS}{behind}{group}"))).start();
    assert_eq!([(); 6].map(|()| asked(&server)), ["two", "one", "two", "two", "one", "two"]);
    server.stop();
}

fn a_peer_that_has_failed_is_left_out_also_after_a_reload(driver: Driver) {
    let group = |name: &str| {
        let text = "upstream app { server unix:%DIR%/dead fail_timeout=1h; server unix:%DIR%/two; }";
        one_worker(driver, &proxy(text)).replace("app", name)
    };
    let mut server = Setup::configuration(&group("app")).start();
    assert_eq!([(); 3].map(|()| tried(&server)), ["dead, two", "two", "two"]);
    server.reload(&group("app"));
    assert_eq!([(); 3].map(|()| tried(&server)), ["two", "two", "two"]);
    // Another group does not share the state.
    server.reload(&group("other"));
    assert_eq!(tried(&server), "dead, two");
    server.stop();
}

fn idle_connections_are_used_again_after_a_reload(driver: Driver) {
    let group = |keepalive: &str| {
        one_worker(driver, &proxy(&format!("upstream app {{ server unix:%DIR%/one; keepalive {keepalive}; }}")))
    };
    let mut server = Setup::configuration(&group("4")).start();
    assert_eq!([(); 2].map(|()| server.get("/").text().to_owned()), ["one 1", "one 2"]);
    server.reload(&group("4"));
    assert_eq!(server.get("/").text(), "one 3");
    server.reload(&group("0"));
    assert_eq!([(); 2].map(|()| server.get("/").text().to_owned()), ["one 1", "one 1"]);
    server.stop();
}

/// A name server with one address for every name and a TTL of one hour.
struct NameServer {
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

impl NameServer {
    fn start(ip: Ipv4Addr) -> NameServer {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a free port");
        let address = socket.local_addr().expect("an address");
        let thread = std::thread::spawn(move || {
            let mut query = [0; 512];
            // An empty datagram ends the thread.
            while let Ok((length @ 1.., from)) = socket.recv_from(&mut query) {
                let mut answer = query[..length].to_vec();
                (answer[2], answer[3], answer[7]) = (0x81, 0x80, 1);
                // Name of the question, type and class, a TTL of one hour, an address (RFC 1035 §4).
                answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 14, 16, 0, 4]);
                answer.extend(ip.octets());
                socket.send_to(&answer, from).expect("loopback takes it");
            }
        });
        NameServer { address, thread: Some(thread) }
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a free port");
        socket.send_to(&[], self.address).expect("loopback takes it");
        self.thread.take().expect("joined once").join().expect("the name server did not panic");
    }
}

fn addresses_of_a_name_are_there_at_once_after_a_reload(driver: Driver) {
    let directory = Directory::new();
    let IpAddr::V4(host) = directory.address(1).ip() else { unreachable!("%TCP% is of IPv4") };
    let names = NameServer::start(host);
    let text = |valid: &str| {
        let group = format!(
            "upstream app {{ resolver {} ipv6=off {valid}; server app.test:%PORT% resolve; }}
             server {{ listen %TCP%; location / {{ return 200 three; }} }}",
            names.address
        );
        http_configuration(driver, &proxy(&group))
    };
    let mut server = Setup::configuration(&text("")).launch_in(directory, &[]);
    server.wait_notified("READY=1");
    let end = Instant::now() + DEADLINE;
    while server.get("/").status != 200 {
        assert!(Instant::now() < end, "{server}");
        std::thread::yield_now();
    }
    // Another resolver, whose name server is gone.
    let other = text("valid=1h");
    drop(names);
    server.reload(&other);
    assert_eq!(asked(&server), "three");
    server.stop();
}

fn a_state_file_has_the_servers_and_need_not_be_there(driver: Driver) {
    let text = http_configuration(driver, &proxy("upstream app { state app.servers; }"));
    let mut server = Setup::configuration(&text).argument("-p").argument("%DIR%").start();
    assert_eq!(server.get("/").status, 502);
    server.wait_logged("no live upstreams while connecting to upstream");
    server.directory.write("app.servers", server.directory.replaced("server unix:%DIR%/two max_fails=3;\n"));
    server.reload(&text);
    assert_eq!(asked(&server), "two");
    server.stop();
}

/// Accepts the next proxied request, to be answered.
fn accept(listener: &UnixListener) -> UnixStream {
    let timeout = Timespec { tv_sec: DEADLINE.as_secs() as i64, tv_nsec: 0 };
    rustix::event::poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&timeout)).expect("a descriptor");
    listener.set_nonblocking(true).expect("a socket");
    let (mut stream, _) = listener.accept().expect("a connection in time");
    stream.set_nonblocking(false).expect("a socket");
    stream.set_read_timeout(Some(DEADLINE)).expect("a socket");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("a request");
        head.extend(byte);
    }
    stream
}

fn answer(mut stream: UnixStream, text: &str) {
    let length = text.len();
    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{text}");
    stream.write_all(answer.as_bytes()).expect("it is read");
}

fn requests_wait_in_the_queue_until_a_server_is_free(driver: Driver) {
    let group = "upstream app { server unix:%DIR%/slow max_conns=1; queue 1 timeout=1h; }";
    let proxy = proxy(group).replace("proxy_pass", "add_header X-Queued $upstream_queue_time always; proxy_pass");
    let server = Setup::configuration(&one_worker(driver, &proxy)).start();
    let path = server.directory.path().join("slow");
    let slow = UnixListener::bind(&path).expect("ours");
    // The workers may run as another user.
    rustix::fs::chmod(&path, 0o777.into()).expect("ours");
    let clients = ["first", "second", "third"].map(|name| {
        let mut client = server.connect();
        client.send(format!("GET /{name} HTTP/1.1\r\nHost: x\r\n\r\n"));
        client
    });
    let [mut first, mut second, mut third] = clients;
    let held = accept(&slow);
    // The queue is full.
    assert_eq!(third.response().status, 502);
    server.wait_logged("the queue is full while connecting to upstream");
    answer(held, "one");
    answer(accept(&slow), "two");
    let [first, second] = [first.response(), second.response()];
    assert_eq!([first.text(), second.text()], ["one", "two"]);
    assert_eq!(first.header("x-queued"), Some("-"));
    let waited: f64 = second.header("x-queued").expect("it waited").parse().expect("seconds");
    assert!(waited >= 0.0);
    server.stop();
}

fn a_session_stays_with_its_server(driver: Driver) {
    let group = "upstream app { server unix:%DIR%/one route=a; server unix:%DIR%/two route=b; sticky cookie id; }";
    let server = Setup::configuration(&one_worker(driver, &proxy(group))).start();
    let first = server.get("/");
    assert_eq!((first.text(), first.header("set-cookie")), ("one 1", Some("id=a")));
    let ask = |cookie: &str| {
        let request = format!("GET / HTTP/1.1\r\nHost: x\r\nCookie: id={cookie}\r\nConnection: close\r\n\r\n");
        server.connect().ask(request).text().split(' ').next().expect("a word").to_owned()
    };
    assert_eq!(["b", "b", "b", "a", "a"].map(ask), ["two", "two", "two", "one", "one"]);
    server.stop();
}

fn a_learned_session_stays_with_its_server_over_a_reload(driver: Driver) {
    let group = |more: &str| {
        let sticky = "sticky learn create=$upstream_cookie_id lookup=$cookie_id zone=sessions:64k timeout=1h;";
        let text = format!("upstream app {{ server unix:%DIR%/one; server unix:%DIR%/two; {sticky} {more} }}");
        one_worker(driver, &proxy(&text))
            .replace("return 200 \"one", "add_header Set-Cookie id=1; return 200 \"one")
            .replace("return 200 \"two", "add_header Set-Cookie id=2; return 200 \"two")
    };
    let mut server = Setup::configuration(&group("")).start();
    assert_eq!([(); 2].map(|()| asked(&server)), ["one", "two"]);
    let ask = |server: &Server, id: &str| {
        let request = format!("GET / HTTP/1.1\r\nHost: x\r\nCookie: id={id}\r\nConnection: close\r\n\r\n");
        server.connect().ask(request).text().split(' ').next().expect("a word").to_owned()
    };
    // The first reload changes the group, the second does not.
    for more in ["keepalive 1;", "keepalive 1;"] {
        server.reload(&group(more));
        assert_eq!(
            ["2", "2", "2", "1", "1", "1"].map(|id| ask(&server, id)),
            ["two", "two", "two", "one", "one", "one"]
        );
    }
    // Another zone does not share the sessions.
    server.reload(&group("").replace("sessions", "others"));
    assert_eq!(["2", "2"].map(|id| ask(&server, id)).iter().filter(|name| *name == "one").count(), 1);
    server.stop();
}
