//! load: clients that check every byte of each response and count failures by kind.
//!
//! They use threads with blocking sockets, and favour correctness over speed. Nothing is retried: a request either gets
//! its complete correct response or counts as one failure of one kind. A server may announce the end of a keep-alive
//! connection in a response (`Connection: close`); this is counted, but is not a failure. Closing without announcement
//! while a request is in flight is one.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use flate2::read::GzDecoder;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;

use super::Headers;
use crate::servers::{SMALL_BODY, file_body};

/// Longer than any pause of a working server.
pub const ANSWER_TIME_LIMIT: Duration = Duration::from_secs(10);
const HEADER_BYTES_MAX: usize = 16 * 1024;
/// The longest body is a scrape of thousands of zones.
const BODY_BYTES_MAX: usize = 64 << 20;
/// Pause after a failed connect. Without it a dead server would be tried a million times.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Failure {
    ConnectRefused,
    ConnectFailed,
    SendFailed,
    /// The connection was closed (FIN) before the first byte of the response.
    ClosedBeforeAnswer,
    /// The connection was reset before the first byte of the response.
    ResetBeforeAnswer,
    /// The connection ended within the response.
    Truncated,
    TimedOut,
    Malformed,
    WrongStatus,
    WrongBody,
    /// Bytes follow the end of the response.
    Surplus,
}

/// A connection for consecutive requests.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    /// Bytes received and not yet used.
    pending: Vec<u8>,
    received_bytes: usize,
}

/// A response with valid framing.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    /// As received, possibly compressed.
    pub body: Vec<u8>,
    pub is_gzip: bool,
    pub closes: bool,
}

impl Connection {
    pub fn open(address: &str) -> Result<Connection, Failure> {
        Connection::open_within(address, ANSWER_TIME_LIMIT)
    }

    fn open_within(address: &str, time_limit: Duration) -> Result<Connection, Failure> {
        let address: SocketAddr = address.parse().map_err(|_| Failure::ConnectFailed)?;
        let stream = TcpStream::connect_timeout(&address, time_limit).map_err(|error| match error.kind() {
            ErrorKind::ConnectionRefused => Failure::ConnectRefused,
            _ => Failure::ConnectFailed,
        })?;
        Connection::over(stream, time_limit)
    }

    pub fn over(stream: TcpStream, time_limit: Duration) -> Result<Connection, Failure> {
        let configured = stream
            .set_nodelay(true)
            .and_then(|()| stream.set_read_timeout(Some(time_limit)))
            .and_then(|()| stream.set_write_timeout(Some(time_limit)));
        configured.map_err(|_| Failure::ConnectFailed)?;
        Ok(Connection { stream, pending: Vec::new(), received_bytes: 0 })
    }

    /// Returns the stream and the number of bytes received from it.
    pub fn into_stream(self) -> (TcpStream, usize) {
        (self.stream, self.received_bytes)
    }

    /// Sends a GET and reads the response. After a failure the connection cannot be used again.
    pub fn request(&mut self, path: &str, is_last: bool) -> Result<Answer, Failure> {
        self.ask(&get(path, &[], is_last))
    }

    /// Sends a request and reads the response. After a failure the connection cannot be used again.
    pub fn ask(&mut self, request: &str) -> Result<Answer, Failure> {
        // Writing to a closed peer fails with a reset. The result of the read below takes precedence, so a failed write
        // is reported only if the read reports nothing more precise.
        let written = self.stream.write_all(request.as_bytes());
        let answer = self.receive();
        match (written, answer) {
            (Err(_), Err(Failure::ClosedBeforeAnswer)) => Err(Failure::ClosedBeforeAnswer),
            (Err(_), Err(Failure::ResetBeforeAnswer)) => Err(Failure::ResetBeforeAnswer),
            (Err(_), _) => Err(Failure::SendFailed),
            (Ok(()), answer) => answer,
        }
    }

    /// Sends a GET. Its response is read by [`Connection::receive`].
    pub fn send(&mut self, path: &str, headers: Headers, is_last: bool) -> Result<(), Failure> {
        self.stream.write_all(get(path, headers, is_last).as_bytes()).map_err(|_| Failure::SendFailed)
    }

    /// Like [`Connection::request`], but sleeps until `bytes` bytes of the response have arrived. A client that wakes
    /// up for each piece takes the core from the server, which then waits for it behind all other threads.
    pub fn request_whole(&mut self, path: &str, bytes: usize) -> Result<Answer, Failure> {
        self.wake_from(bytes)?;
        self.send(path, &[], false)?;
        let mut sockets = [PollFd::new(&self.stream, PollFlags::IN)];
        let limit = Timespec { tv_sec: ANSWER_TIME_LIMIT.as_secs() as i64, tv_nsec: 0 };
        match poll(&mut sockets, Some(&limit)) {
            Ok(1..) => {
                self.wake_from(1)?;
                self.receive()
            }
            _ => Err(Failure::TimedOut),
        }
    }

    /// Makes the socket readable only with this many bytes (`SO_RCVLOWAT`).
    fn wake_from(&self, bytes: usize) -> Result<(), Failure> {
        let value = bytes as libc::c_int;
        // SAFETY: the descriptor is open, and the pointer is to an int of the given length.
        let result = unsafe {
            let (value, length) = ((&raw const value).cast(), size_of::<libc::c_int>() as libc::socklen_t);
            libc::setsockopt(self.stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, value, length)
        };
        if result == 0 { Ok(()) } else { Err(Failure::SendFailed) }
    }

    /// Expects the connection to end without further bytes, after a response with `Connection: close`.
    fn expect_end(&mut self) -> Result<(), Failure> {
        if !self.pending.is_empty() || self.fill(Failure::Truncated)? > 0 {
            return Err(Failure::Surplus);
        }
        Ok(())
    }

    pub fn receive(&mut self) -> Result<Answer, Failure> {
        let header_end = loop {
            if let Some(at) = self.pending.windows(4).position(|window| window == b"\r\n\r\n") {
                break at + 4;
            }
            if self.pending.len() > HEADER_BYTES_MAX {
                return Err(Failure::Malformed);
            }
            let nothing_yet = self.pending.is_empty();
            let when_reset = if nothing_yet { Failure::ResetBeforeAnswer } else { Failure::Truncated };
            if self.fill(when_reset)? == 0 {
                return Err(if nothing_yet { Failure::ClosedBeforeAnswer } else { Failure::Truncated });
            }
        };
        let head = parse_head(&self.pending[..header_end])?;
        self.pending.drain(..header_end);
        let body = match head.body_bytes {
            Some(length) => self.take(length)?,
            None => self.take_chunks()?,
        };
        Ok(Answer { status: head.status, body, is_gzip: head.is_gzip, closes: head.closes })
    }

    fn take(&mut self, length: usize) -> Result<Vec<u8>, Failure> {
        while self.pending.len() < length {
            if self.fill(Failure::Truncated)? == 0 {
                return Err(Failure::Truncated);
            }
        }
        Ok(self.pending.drain(..length).collect())
    }

    /// Reads a chunked body without extensions and trailers. (RFC 9112 §7.1)
    fn take_chunks(&mut self) -> Result<Vec<u8>, Failure> {
        const SIZE_LINE_BYTES_MAX: usize = 10;
        let mut body = Vec::new();
        loop {
            let mut line = Vec::new();
            while !line.ends_with(b"\r\n") && line.len() <= SIZE_LINE_BYTES_MAX {
                line.extend(self.take(1)?);
            }
            let size = std::str::from_utf8(&line).ok().and_then(|line| usize::from_str_radix(line.trim_end(), 16).ok());
            let size = size.filter(|size| body.len() + size <= BODY_BYTES_MAX).ok_or(Failure::Malformed)?;
            body.extend(self.take(size)?);
            if self.take(2)? != b"\r\n" {
                return Err(Failure::Malformed);
            }
            if size == 0 {
                return Ok(body);
            }
        }
    }

    fn fill(&mut self, when_reset: Failure) -> Result<usize, Failure> {
        let mut buffer = [0u8; 4096];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(received) => {
                    self.received_bytes += received;
                    self.pending.extend_from_slice(&buffer[..received]);
                    return Ok(received);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if is_timeout(&error) => return Err(Failure::TimedOut),
                Err(_) => return Err(when_reset),
            }
        }
    }
}

impl Answer {
    /// Returns the uncompressed body.
    pub fn content(&self) -> Result<Vec<u8>, Failure> {
        if !self.is_gzip {
            return Ok(self.body.clone());
        }
        let mut content = Vec::new();
        let unpacked = GzDecoder::new(&self.body[..]).take(BODY_BYTES_MAX as u64).read_to_end(&mut content);
        unpacked.map(|_| content).map_err(|_| Failure::Malformed)
    }
}

fn get(path: &str, headers: Headers, is_last: bool) -> String {
    let connection = if is_last { "close" } else { "keep-alive" };
    let headers: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
    format!("GET {path} HTTP/1.1\r\nHost: bench\r\nConnection: {connection}\r\n{headers}\r\n")
}

/// Sends one request on a new connection. Returns the body of the response, which must have status 200.
pub fn request_once(address: &str, path: &str, time_limit: Duration) -> Result<Vec<u8>, Failure> {
    let mut connection = Connection::open_within(address, time_limit)?;
    let answer = connection.request(path, true)?;
    if answer.status == 200 { Ok(answer.body) } else { Err(Failure::WrongStatus) }
}

struct Head {
    status: u16,
    /// Length of the body; `None` if it is chunked.
    body_bytes: Option<usize>,
    is_gzip: bool,
    closes: bool,
}

fn parse_head(head: &[u8]) -> Result<Head, Failure> {
    let head = std::str::from_utf8(head).map_err(|_| Failure::Malformed)?;
    let mut lines = head.split("\r\n");
    let status_line = lines.next().unwrap_or("");
    let status = status_line.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok());
    let mut body_bytes = None;
    let (mut is_chunked, mut is_gzip, mut closes) = (false, false, false);
    for line in lines.filter(|line| !line.is_empty()) {
        let (name, value) = line.split_once(':').ok_or(Failure::Malformed)?;
        if name.eq_ignore_ascii_case("content-length") {
            body_bytes = value.trim().parse().ok().filter(|bytes| *bytes <= BODY_BYTES_MAX);
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            is_chunked = value.trim() == "chunked";
        } else if name.eq_ignore_ascii_case("content-encoding") {
            is_gzip = value.trim() == "gzip";
        } else if name.eq_ignore_ascii_case("connection") {
            closes = value.trim().eq_ignore_ascii_case("close");
        }
    }
    match (status, body_bytes) {
        (Some(status), Some(_)) if !is_chunked => Ok(Head { status, body_bytes, is_gzip, closes }),
        (Some(status), None) if is_chunked => Ok(Head { status, body_bytes, is_gzip, closes }),
        _ => Err(Failure::Malformed),
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// Clients that run until they are stopped.
#[derive(Debug)]
pub struct Load {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// Counts of all clients.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Totals {
    pub keepalive_requests: u64,
    pub short_requests: u64,
    /// Keep-alive connections that the server closed after announcing it.
    pub announced_closes: u64,
    pub failed: u64,
    /// Failures by `keepalive` or `short` and kind.
    pub failures: BTreeMap<String, u64>,
    /// Time of the first failures in seconds since the load began, and their kinds.
    pub first_failures: Vec<(f64, String)>,
    /// Longest time of a correct response. For short connections it includes connecting.
    pub longest_ms: f64,
}

#[derive(Debug)]
struct Shared {
    stop: AtomicBool,
    begun: Instant,
    keepalive_requests: AtomicU64,
    short_requests: AtomicU64,
    announced_closes: AtomicU64,
    longest_us: AtomicU64,
    failures: Mutex<Failures>,
}

#[derive(Debug, Default)]
struct Failures {
    counts: BTreeMap<String, u64>,
    first: Vec<(f64, String)>,
}

impl Load {
    pub fn start(address: &str, keepalive_clients: usize, short_clients: usize) -> Load {
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            begun: Instant::now(),
            keepalive_requests: AtomicU64::new(0),
            short_requests: AtomicU64::new(0),
            announced_closes: AtomicU64::new(0),
            longest_us: AtomicU64::new(0),
            failures: Mutex::new(Failures::default()),
        });
        let start = |client: fn(&Shared, &str)| {
            let (shared, address) = (Arc::clone(&shared), address.to_owned());
            std::thread::spawn(move || client(&shared, &address))
        };
        let keepalive = (0..keepalive_clients).map(|_| start(keepalive_client));
        let mut threads: Vec<JoinHandle<()>> = keepalive.collect();
        threads.extend((0..short_clients).map(|_| start(short_client)));
        Load { shared, threads }
    }

    pub fn answered(&self) -> u64 {
        self.shared.keepalive_requests.load(Ordering::Relaxed) + self.shared.short_requests.load(Ordering::Relaxed)
    }

    pub fn totals(&self) -> Totals {
        let failures = self.shared.failures.lock().expect("no client panics while it counts");
        Totals {
            keepalive_requests: self.shared.keepalive_requests.load(Ordering::Relaxed),
            short_requests: self.shared.short_requests.load(Ordering::Relaxed),
            announced_closes: self.shared.announced_closes.load(Ordering::Relaxed),
            failed: failures.counts.values().sum(),
            failures: failures.counts.clone(),
            first_failures: failures.first.clone(),
            longest_ms: self.shared.longest_us.load(Ordering::Relaxed) as f64 / 1000.0,
        }
    }

    /// Lets every client finish its request, then returns the totals.
    pub fn stop(mut self) -> Totals {
        self.end();
        self.totals()
    }

    fn end(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().expect("a client does not panic");
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn succeeded(&self, counter: &AtomicU64, since: Instant) {
        counter.fetch_add(1, Ordering::Relaxed);
        self.longest_us.fetch_max(since.elapsed().as_micros() as u64, Ordering::Relaxed);
    }

    fn failed(&self, client: &str, failure: Failure) {
        const FIRST_MAX: usize = 20;
        let name = format!("{client} {}", name_of(failure));
        let mut failures = self.failures.lock().expect("no client panics while it counts");
        if failures.first.len() < FIRST_MAX {
            failures.first.push((self.begun.elapsed().as_secs_f64(), name.clone()));
        }
        *failures.counts.entry(name).or_default() += 1;
    }
}

fn name_of(failure: Failure) -> String {
    serde_json::to_value(failure).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()
}

fn keepalive_client(shared: &Shared, address: &str) {
    let mut targets = Targets::new();
    let mut connection: Option<Connection> = None;
    while !shared.is_stopped() {
        let since = Instant::now();
        let (path, body) = targets.next();
        let current = match connection.take() {
            Some(current) => Ok(current),
            None => Connection::open(address),
        };
        let outcome = current.and_then(|mut current| {
            let answer = current.request(path, false)?;
            check(&answer, body)?;
            if answer.closes {
                current.expect_end()?;
                return Ok(None);
            }
            Ok(Some(current))
        });
        match outcome {
            Ok(next) => {
                shared.succeeded(&shared.keepalive_requests, since);
                shared.announced_closes.fetch_add(u64::from(next.is_none()), Ordering::Relaxed);
                connection = next;
            }
            Err(failure) => {
                shared.failed("keepalive", failure);
                std::thread::sleep(PAUSE_AFTER_FAILURE);
            }
        }
    }
}

fn short_client(shared: &Shared, address: &str) {
    let mut targets = Targets::new();
    while !shared.is_stopped() {
        let since = Instant::now();
        let (path, body) = targets.next();
        let outcome = Connection::open(address).and_then(|mut connection| {
            let answer = connection.request(path, true)?;
            check(&answer, body)?;
            connection.expect_end()
        });
        match outcome {
            Ok(()) => shared.succeeded(&shared.short_requests, since),
            Err(failure) => {
                shared.failed("short", failure);
                std::thread::sleep(PAUSE_AFTER_FAILURE);
            }
        }
    }
}

fn check(answer: &Answer, body: &[u8]) -> Result<(), Failure> {
    if answer.status != 200 {
        Err(Failure::WrongStatus)
    } else if answer.body != body {
        Err(Failure::WrongBody)
    } else {
        Ok(())
    }
}

/// Requests that are sent in turn, and the expected responses.
struct Targets {
    file: Vec<u8>,
    count: usize,
}

impl Targets {
    fn new() -> Targets {
        Targets { file: file_body(), count: 0 }
    }

    fn next(&mut self) -> (&'static str, &[u8]) {
        self.count += 1;
        if self.count.is_multiple_of(2) { ("/return", SMALL_BODY) } else { ("/file", &self.file) }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Starts a peer that reads a request's header, then sends these bytes and closes.
    fn peer(bytes: &'static [u8]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            let mut byte = [0u8; 1];
            while !request.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() > 0 {
                request.push(byte[0]);
            }
            stream.write_all(bytes).unwrap();
        });
        address
    }

    fn ask(bytes: &'static [u8]) -> Result<Answer, Failure> {
        Connection::open(&peer(bytes)).unwrap().request("/", false)
    }

    #[test]
    fn a_whole_answer_is_taken_and_its_announcement_seen() {
        let answer = ask(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok").unwrap();
        assert_eq!(answer, Answer { status: 200, body: b"ok".to_vec(), is_gzip: false, closes: true });
    }

    #[test]
    fn every_fault_has_its_kind() {
        assert_eq!(ask(b""), Err(Failure::ClosedBeforeAnswer));
        assert_eq!(ask(b"HTTP/1.1 200 OK\r\nContent-"), Err(Failure::Truncated));
        assert_eq!(ask(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok"), Err(Failure::Truncated));
        assert_eq!(ask(b"HTTP/1.1 200 OK\r\n\r\n"), Err(Failure::Malformed));
        assert_eq!(ask(b"ICY 200 OK\r\nContent-Length: 0\r\n\r\n"), Err(Failure::Malformed));
        let unused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        assert_eq!(Connection::open(&unused).unwrap_err(), Failure::ConnectRefused);
    }

    #[test]
    fn a_byte_too_many_is_noticed() {
        let address = peer(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok!");
        let mut connection = Connection::open(&address).unwrap();
        assert_eq!(connection.request("/", true).unwrap().body, b"ok");
        assert_eq!(connection.expect_end(), Err(Failure::Surplus));
    }

    #[test]
    fn wrong_answers_are_failures() {
        let answer = |status, body: &[u8]| Answer { status, body: body.to_vec(), is_gzip: false, closes: false };
        assert_eq!(check(&answer(200, b"ok"), b"ok"), Ok(()));
        assert_eq!(check(&answer(503, b"ok"), b"ok"), Err(Failure::WrongStatus));
        assert_eq!(check(&answer(200, b"no"), b"ok"), Err(Failure::WrongBody));
    }

    #[test]
    fn totals_count_failures_by_client_and_kind() {
        let unused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let load = Load::start(&unused, 1, 1);
        while load.totals().failures.len() < 2 {
            std::thread::yield_now();
        }
        let totals = load.stop();
        assert_eq!(totals.failures.keys().collect::<Vec<_>>(), ["keepalive connect_refused", "short connect_refused"]);
        assert_eq!(totals.failed, totals.failures.values().sum::<u64>());
        assert_eq!(totals.keepalive_requests + totals.short_requests, 0);
    }
}
