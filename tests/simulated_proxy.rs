//! Proxying in a simulated world: the server behind it stops at every byte of its response, in every way; clients leave
//! at every byte; disks fail. What a client gets is whole, or it can see that it is not; and nothing is left behind.

mod simulated;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use gale_engine::serve::Serving;
use gale_process::Worker;
use gale_runtime::simulation::{Faults, Peer, PeerEnd, Random, Reading, Sending, Simulation, Transcript, each_seed};
use gale_runtime::{
    AcceptOptions, Bytes, Listener, SocketAddress, Stream, leased_bytes, now, panic_count, sleep, spawn, task_count,
};
use simulated::{Task, address, run};

const SEEDS: u64 = 10;

const CONFIGURATION: &str = "error_log /log info;
    events { }
    http {
        access_log off; client_body_temp_path %TEMP%; proxy_temp_path %TEMP%; send_timeout 60s;
        proxy_read_timeout 20s; proxy_send_timeout 20s; proxy_connect_timeout 20s; lingering_time 1s;
        upstream u { server 192.0.2.2:80 max_fails=0; keepalive 0; }
        upstream kept { server 192.0.2.2:80 max_fails=0; }
        server {
            listen %ADDRESS%;
            location / { proxy_pass http://u; }
            location /off { proxy_buffering off; proxy_pass http://u; }
            location /kept { proxy_pass http://kept; }
        }
    }";

const TARGETS: [&str; 2] = ["/", "/off"];

/// What the server behind the proxy does on one connection after the other, once a request has come.
#[derive(Clone, Default)]
struct Backend {
    script: Rc<RefCell<Vec<Sending>>>,
    /// What it has seen on connections that have ended.
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

    /// What it does with the next connections when the end of a request's head has come.
    fn does(&self, steps: impl IntoIterator<Item = Sending>) {
        let request = Sending::Await(Rc::new(|bytes| bytes.windows(4).any(|end| end == b"\r\n\r\n")));
        *self.script.borrow_mut() = std::iter::once(request).chain(steps).collect();
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

/// How the server frames its response.
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

/// How it stops.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stop {
    Close,
    Reset,
    Stall,
}

/// What a client has received: the status, and the body if it is whole.
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

/// Nothing is left but what waits for new connections. The idle connections of groups close when their time is over.
async fn check_nothing_is_left(simulation: &Simulation, serving: &Serving, backend: &Backend, tasks: usize) {
    let deadline = now() + Duration::from_secs(5000);
    while (serving.connections() > 0 || backend.open.get() > 0) && now() < deadline {
        sleep(Duration::from_secs(1)).await;
    }
    sleep(simulation.faults().task_max * 2 + Duration::from_secs(100)).await;
    assert_eq!((serving.connections(), backend.open.get()), (0, 0), "connections");
    assert_eq!(simulation.open_ends(), 0, "sockets");
    assert_eq!(simulation.pool_tasks(), 0, "tasks in pools");
    assert_eq!((task_count(), leased_bytes(), panic_count()), (tasks, 0, 0), "tasks, bytes on lease, panics");
}

/// Runs `main` beside a server and the one behind it.
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
            for (framed, text) in RESPONSES {
                let head_end = text.find("\r\n\r\n").expect("an end") + 4;
                for cut in 0..=text.len() {
                    for (stop, last) in [
                        (Stop::Close, Sending::Close),
                        (Stop::Reset, Sending::Reset),
                        (Stop::Stall, Sending::Pause(Duration::from_secs(100))),
                    ] {
                        backend.does([bytes(&text.as_bytes()[..cut]), Sending::Pause(Duration::from_millis(5)), last]);
                        for target in TARGETS {
                            let begun = now();
                            let transcript = play(vec![request(target)], Reading::Eagerly).await;
                            let seen = see(&transcript);
                            let shown = || format!("{framed:?} {target} {stop:?} at {cut}: {seen:?} {transcript:?}");
                            let Some(seen) = &seen else { panic!("{}", shown()) };
                            assert!(now().since(begun) < Duration::from_secs(30), "{}", shown());
                            if cut < head_end {
                                let status = if stop == Stop::Stall { 504 } else { 502 };
                                assert_eq!((seen.status, seen.is_whole), (status, true), "{}", shown());
                                continue;
                            }
                            let is_whole = match framed {
                                Framed::UntilClose => stop == Stop::Close,
                                Framed::Length | Framed::Chunked => cut == text.len(),
                            };
                            assert_eq!((seen.status, seen.is_whole), (200, is_whole), "{}", shown());
                            assert!(BODY.starts_with(&seen.body), "{}", shown());
                            assert!(!is_whole || framed == Framed::UntilClose || seen.body == BODY, "{}", shown());
                        }
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

/// Longer than all buffers.
const LONG: usize = 2 << 20;
/// What may be held of it: buffers, what is written to a file at once, and what is on its way to the client.
const HELD_MAX: usize = 512 * 1024;

/// A slow client of a fast server; returns when the server was done, and what the most was that was held in memory.
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
