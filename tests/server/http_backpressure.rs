//! Peers that are slower than the server: every byte still arrives in order, and buffers stay bounded. The stalling
//! consumers are handlers of `test_hooks.rs`.

use crate::support::{self, Client, Driver, Server, Setup, with_each_driver};

with_each_driver!(
    slow_readers_get_every_byte_in_its_order,
    a_consumer_that_stalls_stops_its_sender,
    stalled_reader_stops_its_echo,
    a_tunnel_goes_on_in_one_direction_when_the_other_has_ended,
    discarded_upload_takes_no_memory,
);

/// Most bytes that the server may take of an unread body: its own buffers and those of two sockets, which the kernel
/// lets grow to some megabytes.
const TAKEN_MAX: usize = 64 << 20;
/// Most bytes by which the worker process may grow for one connection: leases, and memory kept by the allocator.
const GROWTH_MAX: u64 = 2 << 20;
/// Much more than all bounds together.
const UPLOAD: usize = 1 << 30;

/// Bytes without repetition, so that lost, doubled or moved pieces are noticed.
fn pattern(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_u32;
    let next = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state.to_le_bytes()
    });
    next.flatten().take(length).collect()
}

fn one_worker(driver: Driver, text: &str) -> Setup {
    let servers =
        format!("client_max_body_size 0; keepalive_requests 1000000; server {{ listen %UNIX%; listen %TCP%; {text} }}");
    Setup::http(driver, &servers).replace("worker_processes 2", "worker_processes 1")
}

fn slow_readers_get_every_byte_in_its_order(driver: Driver) {
    let contents = pattern(1_500_007);
    let text = "root %DIR%/files; location /sendfile/ { alias %DIR%/files/; sendfile on; } location / { }
         location /pieces { alias %DIR%/files/file; sendfile on; sendfile_max_chunk 70k; }";
    let server = one_worker(driver, text).file("files/file", &contents).start();
    let mut readers = Vec::new();
    for path in ["/file", "/sendfile/file", "/pieces"] {
        for mut client in [server.connect(), Client::tcp_with_small_buffer(server.directory.address(1))] {
            // The second answer waits behind the first.
            client.send(format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n"));
            client.send(format!("GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"));
            readers.push((path, client, Vec::new()));
        }
    }
    // The readers take turns; each time the others wait with full buffers.
    let mut reading: Vec<_> = readers.iter_mut().collect();
    while !reading.is_empty() {
        reading.retain_mut(|(_, client, received)| {
            let piece = client.read_some_or_end();
            received.extend_from_slice(&piece);
            !piece.is_empty()
        });
    }
    for (path, _, received) in &readers {
        let mut rest = &received[..];
        for number in 1..=2 {
            let head = rest.windows(4).position(|window| window == b"\r\n\r\n").expect("a head") + 4;
            assert!(rest.starts_with(b"HTTP/1.1 200 "), "{path} {number}");
            rest = &rest[head..];
            assert!(rest.len() >= contents.len(), "{path} {number}: {} bytes", rest.len());
            let wrong = rest.iter().zip(&contents).position(|(received, sent)| received != sent);
            assert_eq!(wrong, None, "{path} {number}");
            rest = &rest[contents.len()..];
        }
        assert!(rest.is_empty(), "{path}: {} bytes too many", rest.len());
    }
    server.stop();
}

/// Body of an upload: repetitions of a megabyte less one byte, so that no two begin at the same offset in a page.
struct Upload {
    piece: Vec<u8>,
    sent: usize,
}

impl Upload {
    fn new() -> Upload {
        Upload { piece: pattern((1 << 20) - 1), sent: 0 }
    }

    /// The next bytes, up to offset `end`.
    fn next(&self, end: usize) -> &[u8] {
        let at = self.sent % self.piece.len();
        let length = (self.piece.len() - at).min(end - self.sent);
        &self.piece[at..at + length]
    }

    /// Sends until the server has stopped reading, even when it is given time.
    #[track_caller]
    fn send_until_stuck(&mut self, client: &mut Client, other: &mut Client) {
        loop {
            let before = self.sent;
            loop {
                let sent = client.send_some(self.next(UPLOAD));
                if sent == 0 {
                    break;
                }
                self.sent += sent;
                assert!(self.sent <= TAKEN_MAX, "taken without a bound");
            }
            // In these turns the only worker reads everything that it wants of the stuck connection.
            (0..20).for_each(|_| assert_eq!(other.get("/hello").text(), "hello"));
            if self.sent == before {
                return;
            }
        }
    }

    /// Sends the rest.
    fn send_rest(&mut self, client: &mut Client) {
        while self.sent < UPLOAD {
            let piece = self.next(UPLOAD);
            client.send(piece);
            self.sent += piece.len();
        }
    }

    /// Answer of `test_count_body` for the whole body.
    fn counted(&self) -> String {
        let bytes = (0..UPLOAD).step_by(61).map(|at| self.piece[at % self.piece.len()]);
        let fnv = |sum: u64, byte: u8| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        format!("{UPLOAD} {:016x}", bytes.fold(0xcbf2_9ce4_8422_2325, fnv))
    }
}

fn post(path: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {UPLOAD}\r\n\r\n")
}

/// Asserts that the worker process hardly grows in `during`.
#[track_caller]
fn assert_memory_bounded(server: &Server, during: impl FnOnce()) {
    let worker = server.worker();
    support::forget_peak_memory(worker);
    let (before, _) = support::resident_memory(worker);
    during();
    let (_, most) = support::resident_memory(worker);
    assert!(most <= before + GROWTH_MAX, "from {before} to {most} bytes");
}

fn a_consumer_that_stalls_stops_its_sender(driver: Driver) {
    let text = "location /hello { return 200 hello; } location /held { test_count_body held; } \
        location /release { test_release; }";
    let server = one_worker(driver, text).start();
    let mut other = server.connect();
    for mut client in [server.connect(), server.connect_tcp(1)] {
        assert_eq!(other.get("/hello").text(), "hello");
        let mut upload = Upload::new();
        assert_memory_bounded(&server, || {
            client.send(post("/held"));
            upload.send_until_stuck(&mut client, &mut other);
            assert_eq!(other.get("/release").text(), "1 released");
            upload.send_rest(&mut client);
            assert_eq!(client.response().text(), upload.counted());
        });
        assert_eq!(client.get("/hello").text(), "hello");
    }
    server.stop();
}

fn stalled_reader_stops_its_echo(driver: Driver) {
    let server = one_worker(driver, "location /hello { return 200 hello; } location /echo { test_echo; }").start();
    let mut other = server.connect();
    for mut client in [server.connect(), server.connect_tcp(1)] {
        assert_eq!(other.get("/hello").text(), "hello");
        let mut upload = Upload::new();
        assert_memory_bounded(&server, || {
            client.send(post("/echo"));
            upload.send_until_stuck(&mut client, &mut other);
        });
        // The bytes taken return on request, which makes room for more.
        assert_eq!(client.head().status, 200);
        let mut returned = 0;
        let end = upload.sent + upload.piece.len();
        let mut sender = client.sender();
        std::thread::scope(|scope| {
            let first = upload.sent;
            let upload = &upload;
            scope.spawn(move || {
                let at = first % upload.piece.len();
                sender.send(&upload.piece[at..]);
                sender.send(&upload.piece[..at]);
            });
            while returned < end {
                let chunk = client.chunk().expect("more is to come");
                for piece in chunk.chunks(4096) {
                    let at = returned % upload.piece.len();
                    let length = piece.len().min(upload.piece.len() - at);
                    assert!(piece[..length] == upload.piece[at..at + length], "at {returned}");
                    assert!(piece[length..] == upload.piece[..piece.len() - length], "at {returned}");
                    returned += piece.len();
                }
            }
        });
        assert_eq!(returned, end);
    }
    server.stop();
}

fn a_tunnel_goes_on_in_one_direction_when_the_other_has_ended(driver: Driver) {
    let server = one_worker(driver, "location / { limit_rate 1k; add_trailer X-A b always; test_tunnel; }").start();
    let sent = pattern(8_000_003);
    for mut client in [server.connect(), server.connect_tcp(1)] {
        client.send("GET / HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n");
        let head = client.head();
        assert_eq!(
            (head.status, head.header("connection"), head.header("upgrade")),
            (101, Some("upgrade"), Some("echo"))
        );
        let mut sender = client.sender();
        let received = std::thread::scope(|scope| {
            // More than all buffers on the way hold: the response arrives while the request is still being sent.
            scope.spawn(|| {
                sender.send(&sent);
                sender.finish_sending();
            });
            client.read_to_end()
        });
        assert!(received == sent, "{} of {} bytes came back", received.len(), sent.len());
    }
    server.stop();
}

fn discarded_upload_takes_no_memory(driver: Driver) {
    let server =
        one_worker(driver, "location /count { test_count_body; } location /unread { return 200 unread; }").start();
    let mut client = server.connect();
    assert_memory_bounded(&server, || {
        let mut upload = Upload::new();
        client.send(post("/count"));
        upload.send_rest(&mut client);
        assert_eq!(client.response().text(), upload.counted());
        let mut upload = Upload::new();
        client.send(post("/unread"));
        upload.send_rest(&mut client);
        assert_eq!(client.response().text(), "unread");
    });
    server.stop();
}
