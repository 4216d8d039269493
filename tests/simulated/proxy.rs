//! Proxying in a simulated world: the upstream server stops at every byte of its response, in every way; clients leave
//! at every byte; disks fail. A client's response is complete or recognisably incomplete, and nothing is left behind.
//! Servers speak HTTP/1, or HTTP/2: those stop, reset and go away at every byte and every frame.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use gale_engine::serve::Serving;
use gale_process::Worker;
use gale_protocol::http2::ErrorCode;
use gale_protocol::http2::frame::{self, FrameHeader, PREFACE, flag, frame_type};
use gale_runtime::simulation::{Faults, Peer, PeerEnd, Random, Reading, Sending, Simulation, Transcript, each_seed};
use gale_runtime::{
    AcceptOptions, Bytes, Listener, SocketAddress, Stream, leased_bytes, now, sleep, spawn, task_count,
};

use crate::support::{Task, address, run, unexpected_panics};

const SEEDS: u64 = 10;

const CONFIGURATION: &str = "error_log /log info;
    events { }
    http {
        access_log off; client_body_temp_path %TEMP%; proxy_temp_path %TEMP%; send_timeout 60s;
        proxy_read_timeout 20s; proxy_send_timeout 20s; proxy_connect_timeout 20s; lingering_time 1s;
        fastcgi_temp_path %TEMP%; scgi_temp_path %TEMP%; uwsgi_temp_path %TEMP%;
        fastcgi_read_timeout 20s; scgi_read_timeout 20s; uwsgi_read_timeout 20s; memcached_read_timeout 20s;
        upstream u { server 192.0.2.2:80 max_fails=0; keepalive 0; }
        upstream kept { server 192.0.2.2:80 max_fails=0; }
        server {
            listen %ADDRESS%;
            location / { proxy_pass http://u; }
            location /off { proxy_buffering off; proxy_pass http://u; }
            location /kept { proxy_pass http://kept; }
            location /upload { proxy_request_buffering off; proxy_pass http://u; }
            location /upload-off { proxy_request_buffering off; proxy_buffering off; proxy_pass http://u; }
            location /socket { keepalive_timeout 0; proxy_pass http://u; }
            location /2/ { proxy_http_version 2; proxy_pass http://u; }
            location /2/off {
                proxy_http_version 2; proxy_buffering off; proxy_request_buffering off; proxy_pass http://u;
            }
            location /fastcgi { fastcgi_pass u; }
            location /fastcgi-off { fastcgi_buffering off; fastcgi_pass u; }
            location /scgi { scgi_pass u; scgi_param SCGI 1; }
            location /uwsgi { uwsgi_pass u; }
            location /memcached { set $memcached_key key; memcached_pass u; }
        }
        server { listen %ADDRESS%; server_name tunnel; tunnel_read_timeout 20s; tunnel_pass u; }
    }";

const TARGETS: [&str; 2] = ["/", "/off"];

/// An upstream server with a script for each connection, which begins when a request has arrived.
#[derive(Clone, Default)]
struct Backend {
    script: Rc<RefCell<Vec<Sending>>>,
    /// Transcripts of connections that have ended.
    transcripts: Rc<RefCell<Vec<Transcript>>>,
    open: Rc<Cell<usize>>,
}

impl Backend {
    fn start() -> Backend {
        let backend = Backend::default();
        let address = SocketAddress::Inet("192.0.2.2:80".parse().expect("an address"));
        let listener = Listener::bind(&address, 64, AcceptOptions::default()).expect("nobody else is there");
        let own = backend.clone();
        spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else {
                    sleep(Duration::from_millis(1)).await;
                    continue;
                };
                let (own, script) = (own.clone(), own.script.borrow().clone());
                own.open.set(own.open.get() + 1);
                spawn(async move {
                    let peer = Peer { patience: Duration::from_secs(2000), ..Peer::new(script) };
                    let transcript = peer.play(stream, &Random::new(1)).await;
                    own.open.set(own.open.get() - 1);
                    own.transcripts.borrow_mut().push(transcript);
                });
            }
        });
        backend
    }

    /// Sets the script of the next connections; it begins at the end of a request's head.
    fn does(&self, steps: impl IntoIterator<Item = Sending>) {
        self.does_when(|bytes| bytes.windows(4).any(|end| end == b"\r\n\r\n"), steps);
    }

    /// Sets the script of the next HTTP/2 connections; it begins after the head of a request.
    fn does_over_http2(&self, steps: impl IntoIterator<Item = Sending>) {
        self.does_when(has_request_of_http2, steps);
    }

    fn does_when(&self, has_come: fn(&[u8]) -> bool, steps: impl IntoIterator<Item = Sending>) {
        *self.script.borrow_mut() = std::iter::once(Sending::Await(Rc::new(has_come))).chain(steps).collect();
    }
}

/// Plays a client that begins with this request.
async fn play(sends: Vec<Sending>, reads: Reading) -> Transcript {
    let stream = Stream::connect(&address()).await.expect("somebody listens");
    let peer = Peer { reads, patience: Duration::from_secs(20_000), ..Peer::new(sends) };
    peer.play(stream, &Random::new(2)).await
}

fn request(target: &str) -> Sending {
    Sending::Bytes(format!("GET {target} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").into_bytes().into())
}

fn bytes(text: &[u8]) -> Sending {
    Sending::Bytes(Bytes::copy_from_slice(text))
}

/// Framing of the response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Framed {
    Length,
    Chunked,
    UntilClose,
}

const RESPONSES: [(Framed, &str); 4] = [
    (Framed::Length, "HTTP/1.1 200 OK\r\nContent-Length: 12\r\nX: y\r\n\r\nhello, world"),
    (
        Framed::Chunked,
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;e=f\r\nhello\r\n7\r\n, world\r\n0\r\nT: u\r\n\r\n",
    ),
    (Framed::UntilClose, "HTTP/1.1 200 OK\r\nX: y\r\n\r\nhello, world"),
    (Framed::UntilClose, "HTTP/1.0 200 OK\r\nX: y\r\n\r\nhello, world"),
];

const BODY: &[u8] = b"hello, world";

/// How the server stops.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stop {
    Close,
    Reset,
    Stall,
}

impl Stop {
    const ALL: [Stop; 3] = [Stop::Close, Stop::Reset, Stop::Stall];

    fn sending(self) -> Sending {
        match self {
            Stop::Close => Sending::Close,
            Stop::Reset => Sending::Reset,
            Stop::Stall => Sending::Pause(Duration::from_secs(100)),
        }
    }
}

/// A server that stops after this many bytes of a response.
#[derive(Clone, Copy, Debug)]
struct Stopped {
    framed: Framed,
    text: &'static str,
    cut: usize,
    stop: Stop,
}

impl Stopped {
    /// Every way at every byte of every response.
    fn all() -> impl Iterator<Item = Stopped> {
        RESPONSES.into_iter().flat_map(|(framed, text)| {
            let cuts = (0..=text.len()).flat_map(|cut| Stop::ALL.map(|stop| (cut, stop)));
            cuts.map(move |(cut, stop)| Stopped { framed, text, cut, stop })
        })
    }

    fn script(self) -> [Sending; 3] {
        let sent = &self.text.as_bytes()[..self.cut];
        [bytes(sent), Sending::Pause(Duration::from_millis(5)), self.stop.sending()]
    }

    fn has_sent_head(self) -> bool {
        self.cut >= self.text.find("\r\n\r\n").expect("an end") + 4
    }

    /// Status that the client gets, and whether its response is complete.
    fn outcome(self) -> (u16, bool) {
        match self.framed {
            _ if !self.has_sent_head() => (if self.stop == Stop::Stall { 504 } else { 502 }, true),
            Framed::UntilClose => (200, self.stop == Stop::Close),
            Framed::Length | Framed::Chunked => (200, self.cut == self.text.len()),
        }
    }
}

/// The client's response: its status, and its body if complete.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    status: u16,
    body: Vec<u8>,
    is_whole: bool,
}

fn see(transcript: &Transcript) -> Option<Seen> {
    let received = &transcript.received[..];
    let end = received.windows(4).position(|end| end == b"\r\n\r\n")? + 4;
    let head = std::str::from_utf8(&received[..end]).expect("text");
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let field = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
    let mut rest = &received[end..];
    if let Some(length) = field("Content-Length: ") {
        let length: usize = length.parse().expect("a length");
        assert!(rest.len() <= length, "{head}");
        return Some(Seen { status, body: rest.to_vec(), is_whole: rest.len() == length });
    }
    let mut body = Vec::new();
    if field("Transfer-Encoding: ").is_none() {
        return Some(Seen { status, body: rest.to_vec(), is_whole: transcript.end == PeerEnd::Closed });
    }
    loop {
        let line = rest.windows(2).position(|end| end == b"\r\n");
        let Some(line) = line else { return Some(Seen { status, body, is_whole: false }) };
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..line]).expect("a size"), 16).expect("a size");
        rest = &rest[line + 2..];
        if size == 0 {
            assert_eq!(rest, b"\r\n");
            return Some(Seen { status, body, is_whole: true });
        }
        if rest.len() < size + 2 {
            body.extend_from_slice(&rest[..size.min(rest.len())]);
            return Some(Seen { status, body, is_whole: false });
        }
        body.extend_from_slice(&rest[..size]);
        rest = &rest[size + 2..];
    }
}

/// Checks that only the accepting tasks are left. Idle connections of groups close at their timeout.
async fn check_nothing_is_left(simulation: &Simulation, serving: &Serving, backend: &Backend, tasks: usize) {
    let deadline = now() + Duration::from_secs(5000);
    while (serving.connections() > 0 || backend.open.get() > 0) && now() < deadline {
        sleep(Duration::from_secs(1)).await;
    }
    sleep(simulation.faults().task_max * 2 + Duration::from_secs(100)).await;
    assert_eq!((serving.connections(), backend.open.get()), (0, 0), "connections");
    assert_eq!(simulation.open_ends(), 0, "sockets");
    assert_eq!(simulation.pool_tasks(), 0, "tasks in pools");
    assert_eq!((task_count(), leased_bytes(), unexpected_panics()), (tasks, 0, 0), "tasks, bytes on lease, panics");
}

/// Runs `main` beside a server and its upstream server.
fn with_backend(simulation: &Simulation, main: impl AsyncFnOnce(&Backend)) {
    run(simulation, CONFIGURATION, async |serving| {
        let backend = Backend::start();
        sleep(Duration::from_millis(1)).await;
        let tasks = task_count();
        main(&backend).await;
        check_nothing_is_left(simulation, serving, &backend, tasks).await;
    });
}

#[test]
fn a_server_that_stops_at_any_byte_breaks_off_that_response_and_nothing_else() {
    each_seed(1, |simulation| {
        with_backend(simulation, async |backend| {
            for stopped in Stopped::all() {
                backend.does(stopped.script());
                for target in TARGETS {
                    let begun = now();
                    let transcript = play(vec![request(target)], Reading::Eagerly).await;
                    let seen = see(&transcript);
                    let shown = || format!("{stopped:?} {target}: {seen:?} {transcript:?}");
                    let Some(seen) = &seen else { panic!("{}", shown()) };
                    assert!(now().since(begun) < Duration::from_secs(30), "{}", shown());
                    let (status, is_whole) = stopped.outcome();
                    assert_eq!((seen.status, seen.is_whole), (status, is_whole), "{}", shown());
                    if stopped.has_sent_head() {
                        assert!(BODY.starts_with(&seen.body), "{}", shown());
                        let must_have_all = is_whole && stopped.framed != Framed::UntilClose;
                        assert!(!must_have_all || seen.body == BODY, "{}", shown());
                    }
                }
            }
        });
    });
}

/// A response of another protocol, the offset at which its head ends, and the end of a request for it.
fn responses_of_gateways() -> Vec<(&'static str, Vec<u8>, usize, &'static [u8])> {
    let record = |kind: u8, padding: u8, content: &[u8]| {
        let header = [1, kind, 0, 1, 0, content.len() as u8, padding, 0];
        [&header, content, &vec![b'p'; padding.into()][..]].concat()
    };
    // Without a length, closing the connection ends a response, as with nginx.
    let with_status = b"Status: 200 OK\r\nContent-Length: 12\r\n\r\nhello";
    let fastcgi = [
        record(6, 3, with_status),
        record(7, 0, b"a message"),
        record(6, 0, b", world"),
        record(6, 0, b""),
        record(3, 2, &[0; 8]),
    ]
    .concat();
    let cgi = b"Status: 200 OK\r\nContent-Length: 12\r\n\r\nhello, world".to_vec();
    let http = b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\nhello, world".to_vec();
    let memcached = b"VALUE key 0 12\r\nhello, world\r\nEND\r\n".to_vec();
    let behind =
        |text: &[u8], end: &[u8]| text.windows(end.len()).position(|part| part == end).expect("an end") + end.len();
    let all: [(_, _, &[u8], &'static [u8]); 5] = [
        ("/fastcgi", fastcgi.clone(), b"\r\n\r\n", &[1, 5, 0, 1, 0, 0, 0, 0]),
        ("/fastcgi-off", fastcgi, b"\r\n\r\n", &[1, 5, 0, 1, 0, 0, 0, 0]),
        ("/scgi", cgi, b"\r\n\r\n", b","),
        ("/uwsgi", http, b"\r\n\r\n", b""),
        ("/memcached", memcached, b"\r\n", b"\r\n"),
    ];
    all.map(|(target, text, head_end, asked)| (target, text.clone(), behind(&text, head_end), asked)).into()
}

#[test]
fn an_application_that_stops_at_any_byte_breaks_off_that_response_and_nothing_else() {
    each_seed(1, |simulation| {
        with_backend(simulation, async |backend| {
            for (target, text, head_end, asked) in responses_of_gateways() {
                for cut in 0..=text.len() {
                    for stop in Stop::ALL {
                        let has_asked = Rc::new(move |bytes: &[u8]| !bytes.is_empty() && bytes.ends_with(asked));
                        *backend.script.borrow_mut() = vec![
                            Sending::Await(has_asked),
                            bytes(&text[..cut]),
                            Sending::Pause(Duration::from_millis(5)),
                            stop.sending(),
                        ];
                        let begun = now();
                        let transcript = play(vec![request(target)], Reading::Eagerly).await;
                        let seen = see(&transcript);
                        let shown = || format!("{target} {stop:?} at {cut}: {seen:?} {transcript:?}");
                        let Some(seen) = &seen else { panic!("{}", shown()) };
                        assert!(now().since(begun) < Duration::from_secs(30), "{}", shown());
                        if cut < head_end {
                            let status = if stop == Stop::Stall { 504 } else { 502 };
                            assert_eq!((seen.status, seen.is_whole), (status, true), "{}", shown());
                            continue;
                        }
                        assert_eq!(seen.status, 200, "{}", shown());
                        assert!(BODY.starts_with(&seen.body), "{}", shown());
                        assert!(!seen.is_whole || seen.body == BODY, "{}", shown());
                        assert!(seen.is_whole || cut < text.len(), "{}", shown());
                    }
                }
            }
        });
    });
}

#[test]
fn a_server_that_sends_more_than_it_announced_is_not_asked_again_on_that_connection() {
    each_seed(SEEDS, |simulation| {
        let random = Random::new(simulation.seed());
        simulation.set_faults(Faults::swarm(&random));
        with_backend(simulation, async |backend| {
            for (framed, text) in RESPONSES {
                if framed == Framed::UntilClose {
                    continue;
                }
                let more = [text, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong"].concat();
                backend.does([bytes(more.as_bytes())]);
                for target in ["/kept"; 5] {
                    let transcript = play(vec![request(target)], Reading::Eagerly).await;
                    let seen = see(&transcript).expect("an answer");
                    assert_eq!((seen.status, &*seen.body, seen.is_whole), (200, BODY, true), "{framed:?} {target}");
                }
                for transcript in backend.transcripts.take() {
                    let count = transcript.received.windows(6).filter(|text| text == b"GET / ").count();
                    assert!(count <= 1, "{framed:?}: {}", transcript.received.escape_ascii());
                }
            }
        });
    });
}

#[test]
fn a_client_may_leave_at_any_byte() {
    each_seed(1, |simulation| {
        with_backend(simulation, async |backend| {
            let post = "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n";
            for (_, text) in RESPONSES {
                let slow = Sending::Pieces(Bytes::copy_from_slice(text.as_bytes()), 3, Duration::from_millis(2));
                backend.does([slow, Sending::Close]);
                for end in [Sending::Close, Sending::Reset] {
                    for cut in 0..post.len() {
                        play(vec![bytes(&post.as_bytes()[..cut]), end.clone()], Reading::Eagerly).await;
                    }
                    for cut in 0..180 {
                        for target in TARGETS {
                            let came = Sending::Await(Rc::new(move |received| received.len() >= cut));
                            play(vec![request(target), came, end.clone()], Reading::Eagerly).await;
                        }
                    }
                }
            }
        });
    });
}

/// Waits until no connection to the upstream server is held for a client that has left.
async fn wait_until_server_is_free(backend: &Backend, what: &dyn std::fmt::Debug) {
    let deadline = now() + Duration::from_secs(60);
    while backend.open.get() > 0 {
        assert!(now() < deadline, "{what:?}: the server's connection is open");
        sleep(Duration::from_millis(1)).await;
    }
}

const UPLOADS: [&str; 2] = ["/upload", "/upload-off"];

/// Head of an upload, and its body as sent: [`BODY`] with a length or in chunks.
fn upload(target: &str, is_chunked: bool) -> (String, &'static str) {
    let (framing, body) = match is_chunked {
        false => ("Content-Length: 12", "hello, world"),
        true => ("Transfer-Encoding: chunked", "5\r\nhello\r\n7\r\n, world\r\n0\r\n\r\n"),
    };
    (format!("POST {target} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n{framing}\r\n\r\n"), body)
}

/// `true` if the server has received the complete body of an upload, by its framing.
fn has_whole_upload(received: &[u8]) -> bool {
    let Some(end) = received.windows(4).position(|end| end == b"\r\n\r\n") else { return false };
    let (head, body) = received.split_at(end + 4);
    match head.windows(b"chunked".len()).any(|part| part == b"chunked") {
        true => body.ends_with(b"0\r\n\r\n"),
        false => body.len() >= BODY.len(),
    }
}

#[test]
fn a_server_that_stops_at_any_byte_while_it_is_sent_a_body_breaks_off_that_response_and_nothing_else() {
    each_seed(1, |simulation| {
        with_backend(simulation, async |backend| {
            for stopped in Stopped::all() {
                backend.does(stopped.script());
                // The rest of the body arrives after the server has stopped.
                for (target, is_chunked) in UPLOADS.into_iter().zip([false, true]) {
                    let (head, body) = upload(target, is_chunked);
                    let begun = now();
                    let sends = vec![
                        bytes(head.as_bytes()),
                        bytes(&body.as_bytes()[..5]),
                        Sending::Pause(Duration::from_secs(1)),
                        bytes(&body.as_bytes()[5..]),
                    ];
                    let transcript = play(sends, Reading::Eagerly).await;
                    let what = (stopped, target);
                    assert!(now().since(begun) < Duration::from_secs(30), "{what:?}: {transcript:?}");
                    let Some(seen) = see(&transcript) else { panic!("{what:?}: {transcript:?}") };
                    assert_eq!((seen.status, seen.is_whole), stopped.outcome(), "{what:?}: {seen:?}");
                    assert!(!stopped.has_sent_head() || BODY.starts_with(&seen.body), "{what:?}: {seen:?}");
                }
            }
        });
    });
}

#[test]
fn a_client_may_leave_at_any_byte_of_an_upload_and_the_server_never_takes_it_for_whole() {
    each_seed(1, |simulation| {
        with_backend(simulation, async |backend| {
            backend.does_when(has_whole_upload, [bytes(RESPONSES[0].1.as_bytes())]);
            for (target, is_chunked) in UPLOADS.into_iter().flat_map(|target| [(target, false), (target, true)]) {
                let (head, body) = upload(target, is_chunked);
                let post = [head, body.to_owned()].concat();
                for end in [Sending::Close, Sending::Reset] {
                    for cut in 0..post.len() {
                        let what = (target, is_chunked, cut);
                        // The bytes sent arrive and are passed on before the client leaves.
                        let pause = Sending::Pause(Duration::from_millis(20));
                        play(vec![bytes(&post.as_bytes()[..cut]), pause, end.clone()], Reading::Eagerly).await;
                        sleep(Duration::from_millis(20)).await;
                        wait_until_server_is_free(backend, &what).await;
                        for transcript in backend.transcripts.take() {
                            let received = transcript.received.escape_ascii();
                            assert!(!has_whole_upload(&transcript.received), "{what:?}: {received}");
                        }
                    }
                }
                let seen = see(&play(vec![bytes(post.as_bytes())], Reading::Eagerly).await).expect("an answer");
                assert_eq!((seen.status, &*seen.body), (200, BODY));
                assert!(backend.transcripts.take().iter().all(|whole| has_whole_upload(&whole.received)));
            }
        });
    });
}

/// A client's request for a tunnel, and the head with which the server agrees: to a WebSocket, or to none because it is
/// only connected to.
const TUNNELS: [(&str, &str); 2] = [
    (
        "GET /socket HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    ),
    ("CONNECT tunnel:80 HTTP/1.1\r\nHost: tunnel:80\r\n\r\n", ""),
];

impl Backend {
    /// Sets the script of connections that become tunnels with this head.
    fn does_in_tunnel(&self, head: &str, steps: impl IntoIterator<Item = Sending>) {
        if head.is_empty() { self.does_when(|_| true, steps) } else { self.does(steps) }
    }
}

#[test]
fn a_server_that_stops_at_any_byte_of_a_tunnel_ends_it_for_the_client() {
    each_seed(1, |simulation| {
        with_backend(simulation, async |backend| {
            for (asked, head) in TUNNELS {
                let text = [head.as_bytes(), BODY].concat();
                for cut in 0..=text.len() {
                    for stop in Stop::ALL {
                        let what = (asked, stop, cut);
                        let pause = Sending::Pause(Duration::from_millis(5));
                        backend.does_in_tunnel(head, [bytes(&text[..cut]), pause, stop.sending()]);
                        let begun = now();
                        let transcript = play(vec![bytes(asked.as_bytes())], Reading::Eagerly).await;
                        assert!(now().since(begun) < Duration::from_secs(30), "{what:?}: {transcript:?}");
                        let Some(seen) = see(&transcript) else { panic!("{what:?}: {transcript:?}") };
                        if cut < head.len() {
                            let status = if stop == Stop::Stall { 504 } else { 502 };
                            assert_eq!((seen.status, seen.is_whole), (status, true), "{what:?}: {seen:?}");
                            continue;
                        }
                        let status = if head.is_empty() { 200 } else { 101 };
                        assert_eq!(seen.status, status, "{what:?}: {seen:?}");
                        // A reset may overtake data sent before it.
                        let is_all = seen.body == text[head.len()..cut];
                        assert!(is_all || stop == Stop::Reset && BODY.starts_with(&seen.body), "{what:?}: {seen:?}");
                        wait_until_server_is_free(backend, &what).await;
                    }
                }
            }
        });
    });
}

#[test]
fn a_client_may_leave_a_tunnel_at_any_byte_and_the_server_is_told() {
    each_seed(1, |simulation| {
        with_backend(simulation, async |backend| {
            for (asked, head) in TUNNELS {
                let answer = Bytes::from([head.as_bytes(), BODY].concat());
                let said = [asked.as_bytes(), BODY].concat();
                backend.does_in_tunnel(head, [Sending::Pieces(answer, 3, Duration::from_millis(2))]);
                for end in [Sending::Close, Sending::Reset] {
                    // After every prefix of the client's bytes.
                    for cut in 0..said.len() {
                        let pause = Sending::Pause(Duration::from_millis(20));
                        play(vec![bytes(&said[..cut]), pause, end.clone()], Reading::Eagerly).await;
                        wait_until_server_is_free(backend, &(asked, "said", cut)).await;
                        for transcript in backend.transcripts.take() {
                            let received = &transcript.received;
                            let at = if head.is_empty() { 0 } else { received.len().min(asked.len()) };
                            let behind = &said[cut.min(asked.len())..cut];
                            let shown = received.escape_ascii();
                            // In order, and without loss on the way to a server that reads.
                            assert!(received.ends_with(behind) || at == 0 && received.is_empty(), "{cut}: {shown}");
                        }
                    }
                    // After every prefix of the server's bytes.
                    for cut in 0..head.len() + BODY.len() + 40 {
                        let came = Sending::Await(Rc::new(move |received| received.len() >= cut));
                        let patience = Sending::Pause(Duration::from_millis(1));
                        let client = play(vec![bytes(&said), came, patience, end.clone()], Reading::Eagerly);
                        // More than the server sends: the tunnel reaches its idle timeout.
                        client.await;
                        wait_until_server_is_free(backend, &(asked, "heard", cut)).await;
                    }
                    backend.transcripts.take();
                }
            }
        });
    });
}

const TARGETS_OF_HTTP2: [&str; 2] = ["/2/", "/2/off"];

/// `true` if a HEADERS frame follows the preface.
fn has_request_of_http2(bytes: &[u8]) -> bool {
    let mut rest = bytes.get(PREFACE.len()..).unwrap_or_default();
    while let Some(header) = FrameHeader::parse(rest) {
        let Some(next) = rest.get(frame::HEADER_LENGTH + header.length as usize..) else { return false };
        if header.frame_type == frame_type::HEADERS {
            return true;
        }
        rest = next;
    }
    false
}

/// A frame of the first request's stream, or of the connection (0).
fn frame_of(frame_type: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let header = FrameHeader { length: payload.len() as u32, frame_type, flags, stream };
    [&header.to_bytes()[..], payload].concat()
}

/// Encodes fields as literals that leave the dynamic table unchanged.
fn fields(list: &[(&str, &str)]) -> Vec<u8> {
    let field = |(name, value): &(&str, &str)| {
        [&[0, name.len() as u8], name.as_bytes(), &[value.len() as u8], value.as_bytes()].concat()
    };
    list.iter().flat_map(field).collect()
}

/// A response with every kind of frame; its body is [`BODY`].
fn frames() -> Vec<Vec<u8>> {
    let head =
        |list: &[(&str, &str)], flags| frame_of(frame_type::HEADERS, flag::END_HEADERS | flags, 1, &fields(list));
    vec![
        frame_of(frame_type::SETTINGS, 0, 0, &[]),
        frame_of(frame_type::SETTINGS, flag::ACK, 0, &[]),
        head(&[(":status", "103"), ("x", "interim")], 0),
        head(&[(":status", "200"), ("x", "y")], 0),
        frame_of(frame_type::DATA, 0, 1, &BODY[..5]),
        frame_of(frame_type::DATA, 0, 1, &BODY[5..]),
        head(&[("x", "behind")], flag::END_STREAM),
    ]
}

/// Number of frames up to the end of the head.
const HEAD_FRAMES: usize = 4;

/// Checks a client's part of a response that the server ended after some frames.
fn check_cut(seen: Option<Seen>, has_head: bool, is_whole: bool, status_without: u16, what: &dyn std::fmt::Debug) {
    let Some(seen) = seen else { panic!("{what:?}: no answer") };
    if !has_head {
        assert_eq!((seen.status, seen.is_whole), (status_without, true), "{what:?}: {seen:?}");
        return;
    }
    assert_eq!((seen.status, seen.is_whole), (200, is_whole), "{what:?}: {seen:?}");
    assert!(BODY.starts_with(&seen.body) && (!is_whole || seen.body == BODY), "{what:?}: {seen:?}");
}

#[test]
fn a_server_of_http2_that_stops_at_any_byte_breaks_off_that_response_and_nothing_else() {
    each_seed(1, |simulation| {
        with_backend(simulation, async |backend| {
            let (frames, all) = (frames(), frames().concat());
            let head_end = frames[..HEAD_FRAMES].concat().len();
            for cut in 0..=all.len() {
                for stop in Stop::ALL {
                    backend.does_over_http2([
                        bytes(&all[..cut]),
                        Sending::Pause(Duration::from_millis(5)),
                        stop.sending(),
                    ]);
                    for target in TARGETS_OF_HTTP2 {
                        let begun = now();
                        let transcript = play(vec![request(target)], Reading::Eagerly).await;
                        assert!(now().since(begun) < Duration::from_secs(30), "{target} {stop:?} at {cut}");
                        let status = if stop == Stop::Stall { 504 } else { 502 };
                        let what = (target, stop, cut);
                        check_cut(see(&transcript), cut >= head_end, cut == all.len(), status, &what);
                    }
                }
            }
        });
    });
}

#[test]
fn a_server_that_resets_or_goes_away_at_any_frame_breaks_off_that_response_and_nothing_else() {
    each_seed(1, |simulation| {
        with_backend(simulation, async |backend| {
            let frames = frames();
            let resets = [ErrorCode::NO_ERROR, ErrorCode::PROTOCOL_ERROR, ErrorCode::CANCEL, ErrorCode::REFUSED_STREAM];
            let reset = |code: ErrorCode| frame_of(frame_type::RST_STREAM, 0, 1, &code.0.to_be_bytes());
            let goaway = |last: u32| frame_of(frame_type::GOAWAY, 0, 0, &[&last.to_be_bytes()[..], &[0; 4]].concat());
            // Begins after the settings: frames before them are not understood.
            for count in 1..=frames.len() {
                let (before, rest) = (frames[..count].concat(), frames[count..].concat());
                let endings =
                    resets.map(|code| (reset(code), false)).into_iter().chain([(goaway(0), false), (goaway(1), true)]);
                for (ending, goes_on) in endings {
                    let rest = if goes_on { &rest[..] } else { &[] };
                    let pause = Sending::Pause(Duration::from_millis(5));
                    backend.does_over_http2([bytes(&before), bytes(&ending), pause.clone(), bytes(rest), pause]);
                    for target in TARGETS_OF_HTTP2 {
                        let transcript = play(vec![request(target)], Reading::Eagerly).await;
                        let is_whole = goes_on || count == frames.len();
                        let what = (target, count, &ending);
                        check_cut(see(&transcript), goes_on || count >= HEAD_FRAMES, is_whole, 502, &what);
                    }
                }
            }
        });
    });
}

#[test]
fn a_server_of_http2_that_takes_no_body_is_not_waited_for_for_ever() {
    each_seed(1, |simulation| {
        with_backend(simulation, async |backend| {
            let post = |target: &str, length: usize| {
                let head = format!(
                    "POST {target} HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
                );
                bytes(&[head.as_bytes(), &vec![b'b'; length]].concat())
            };
            let closed = frame_of(frame_type::SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0]);
            let answer = [frames()[0].clone(), frames()[2..].concat()].concat();
            let reset = |code: ErrorCode| frame_of(frame_type::RST_STREAM, 0, 1, &code.0.to_be_bytes());
            for target in TARGETS_OF_HTTP2 {
                // A window that never opens, or only opens by one byte.
                for opened in [0, 1] {
                    let mut said = closed.clone();
                    if opened > 0 {
                        said.extend(frame_of(frame_type::WINDOW_UPDATE, 0, 1, &[0, 0, 0, 1]));
                    }
                    backend.does_over_http2([bytes(&said)]);
                    let begun = now();
                    let seen = see(&play(vec![post(target, 5)], Reading::Eagerly).await).expect("an answer");
                    assert_eq!(seen.status, 504, "{target}");
                    assert!(now().since(begun) < Duration::from_secs(60), "{target}: {:?}", now().since(begun));
                }
                // Far more than the window: the stream is reset in the middle of the body, or the answer is not read.
                backend.does_over_http2([
                    bytes(&frames()[0]),
                    Sending::Pause(Duration::from_millis(50)),
                    bytes(&reset(ErrorCode::INTERNAL_ERROR)),
                ]);
                let seen = see(&play(vec![post(target, 900_000)], Reading::Eagerly).await).expect("an answer");
                assert_eq!(seen.status, 502, "{target}");
                backend.does_over_http2([bytes(&answer), bytes(&reset(ErrorCode::NO_ERROR))]);
                let seen = see(&play(vec![post(target, 900_000)], Reading::Eagerly).await).expect("an answer");
                assert_eq!((seen.status, &*seen.body, seen.is_whole), (200, BODY, true), "{target}");
            }
        });
    });
}

/// Longer than all buffers.
const LONG: usize = 2 << 20;
/// Limit of memory for it: buffers, data being written to a file, and data on the way to the client.
const HELD_MAX: usize = 512 * 1024;

/// A slow client of a fast server. Returns when the server was done, and the most memory held.
fn slow_client(simulation: &Simulation, target: &'static str) -> (Duration, Duration, usize) {
    let body: Vec<u8> = (0..LONG as u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let mut result = None;
    with_backend(simulation, async |backend| {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {LONG}\r\n\r\n");
        backend.does([bytes(head.as_bytes()), bytes(&body), Sending::Close]);
        let begun = now();
        let client = Task::spawn(play(vec![request(target)], Reading::Slowly(20_000, Duration::from_secs(1))));
        let (mut held_max, mut freed) = (0, None);
        for _ in 0..1500 {
            sleep(Duration::from_millis(100)).await;
            held_max = held_max.max(leased_bytes());
            if freed.is_none() && !backend.transcripts.borrow().is_empty() {
                freed = Some(now().since(begun));
            }
        }
        let transcript = client.take().await;
        let seen = see(&transcript).expect("an answer");
        assert!((seen.status, seen.is_whole) == (200, true) && seen.body == body, "{}", seen.body.len());
        result = Some((freed.expect("it was done"), transcript.last_received.since(begun), held_max));
    });
    result.expect("it has ended")
}

#[test]
fn a_slow_client_holds_up_neither_the_server_nor_memory() {
    each_seed(3, |simulation| {
        let (freed, received, held_max) = slow_client(simulation, "/");
        assert!(freed < Duration::from_secs(20) && received > Duration::from_secs(60), "{freed:?} {received:?}");
        assert!(held_max <= HELD_MAX, "{held_max}");
    });
}

#[test]
fn without_buffering_a_slow_client_holds_the_server_up_and_no_memory() {
    each_seed(3, |simulation| {
        let (freed, received, held_max) = slow_client(simulation, "/off");
        assert!(freed > Duration::from_secs(60) && received >= freed, "{freed:?} {received:?}");
        assert!(held_max <= HELD_MAX, "{held_max}");
    });
}

#[test]
fn a_disk_that_is_full_costs_only_the_reading_ahead() {
    each_seed(SEEDS, |simulation| {
        let random = Random::new(simulation.seed());
        let disk_full = *random.pick(&[100, 1000]);
        simulation.set_faults(Faults { disk_full, task_max: Duration::from_millis(50), ..Faults::NONE });
        let (_, _, held_max) = slow_client(simulation, "/");
        assert!(held_max <= HELD_MAX, "{held_max}");
    });
}
