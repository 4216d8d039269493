//! swarm: many connections in one thread, for responses of megabytes; and a probe that requests two bytes at fixed
//! times.
//!
//! A connection of a swarm sends its next request when a response is complete. Bodies are discarded without copying
//! (`MSG_TRUNC`), so that the client leaves the CPU to the server. Over TLS bodies must be decrypted, and so are
//! copied; the probe uses no TLS even then. A response that is incomplete at the end counts with the time waited so
//! far, if that is more than a second: a server that answers nothing must not look fast.
//!
//! The probe's requests are due at fixed times, and latency counts from those times: a response that takes a second
//! delays the fifty requests due meanwhile, and all of them count.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gale_base::histogram::{FineHistogram, FineSnapshot};
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv, sockopt};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};
use serde::{Deserialize, Serialize};

use super::load::{ANSWER_TIME_LIMIT, Answer, Connection, Failure};
use super::tls;
use crate::burst::take_priority;
use crate::process::{ThreadId, run_delay_of_this_thread};

pub(super) const HEAD_MAX: usize = 16 * 1024;
/// Bytes received from one connection before the next one is served.
pub(super) const TURN_MAX: usize = 1 << 20;
const UNFINISHED_MIN: Duration = Duration::from_secs(1);

pub struct Swarm<'a> {
    pub address: &'a str,
    pub connections: usize,
    /// Returns the next request, given the number of the connection.
    pub request: &'a mut (dyn FnMut(usize) -> String + Send),
    /// Initial time that is not counted.
    pub warm_up: Duration,
    pub run_time: Duration,
    /// Ends the run earlier.
    pub ends: &'a AtomicBool,
    /// Rate limit of each connection for receiving. Its buffer is then small, so that the server notices.
    pub bytes_per_second: Option<u64>,
    /// Minimum interval between requests on a connection, so that clients with quick responses leave the CPU to others.
    pub asks_every: Duration,
    /// Certificate of the server; `None` for no TLS.
    pub certificate: Option<&'a Path>,
}

/// Results of a swarm or a probe.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Got {
    pub requests_per_second: f64,
    pub bytes_per_second: f64,
    pub mean_ms: f64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
    pub errors: u64,
    /// Longest time to the first response on a connection of a swarm, including the warm-up. A connection without a
    /// response at the end counts with the time waited.
    #[serde(default)]
    pub first_max_ms: f64,
    /// For a probe: during its longest wait.
    #[serde(default)]
    pub without_core: WithoutCore,
}

/// Time that threads were ready but had no core.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct WithoutCore {
    /// Of the probe's own thread.
    pub probe_ms: f64,
    /// Of the event loop with the longest wait; zero if the event loops are not known.
    pub loop_ms: f64,
}

impl Got {
    fn of(latency: &FineSnapshot, requests: u64, bytes: u64, errors: u64, seconds: f64) -> Got {
        Got {
            requests_per_second: requests as f64 / seconds,
            bytes_per_second: bytes as f64 / seconds,
            mean_ms: ms(latency.mean()),
            p50_ms: ms(latency.quantile(0.5)),
            p99_ms: ms(latency.quantile(0.99)),
            max_ms: ms(latency.max()),
            errors,
            first_max_ms: 0.0,
            without_core: WithoutCore::default(),
        }
    }
}

pub(super) fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// A connection that sends requests repeatedly.
pub(super) struct Peer {
    pub(super) stream: TcpStream,
    session: Option<Box<ClientConnection>>,
    head: Vec<u8>,
    /// Bytes missing of the body; `None` while the head is incomplete.
    missing: Option<u64>,
    /// Start of the current response's latency.
    pub(super) asked: Instant,
    /// No request is in flight.
    pub(super) is_idle: bool,
    has_answered: bool,
    pub(super) has_ended: bool,
}

pub(super) struct Whole;

impl Swarm<'_> {
    pub fn run(mut self) -> Result<Got, String> {
        let fault = |error: std::io::Error| format!("swarm: {error}");
        let address: SocketAddr = self.address.parse().map_err(|_| "swarm: no address".to_owned())?;
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| fault(error.into()))?;
        let config =
            self.certificate.map(|path| tls::configuration(default_provider(), path, Some("http/1.1"))).transpose()?;
        let mut peers = Vec::with_capacity(self.connections);
        for number in 0..self.connections {
            let peer = Peer::connect(&address, config.as_ref(), self.bytes_per_second.is_some()).map_err(fault)?;
            let data = epoll::EventData::new_u64(number as u64);
            epoll::add(&poll, &peer.stream, data, epoll::EventFlags::IN).map_err(|error| fault(error.into()))?;
            peers.push(peer);
        }
        let begun = Instant::now();
        let counts_from = begun + self.warm_up;
        let mut tally = Tally::from(counts_from);
        let mut first_max = Duration::ZERO;
        for (number, peer) in peers.iter_mut().enumerate() {
            peer.ask(&(self.request)(number), Instant::now());
        }
        let end = begun + self.warm_up + self.run_time;
        let mut events = Vec::with_capacity(256);
        let mut scratch = vec![0; HEAD_MAX];
        while Instant::now() < end && !self.ends.load(Ordering::Relaxed) {
            let patience = self.ask_again(&mut peers);
            let share = self.bytes_per_second.map(|rate| (rate / u64::from(SLICES)) as usize);
            let ready: Vec<usize> = match share {
                // In slices, each connection with its share.
                Some(_) => {
                    std::thread::sleep(Duration::from_secs(1) / SLICES);
                    (0..peers.len()).collect()
                }
                None => {
                    match epoll::wait(&poll, spare_capacity(&mut events), Some(&patience)) {
                        Ok(_) | Err(Errno::INTR) => {}
                        Err(error) => return Err(fault(error.into())),
                    }
                    events.drain(..).map(|event: epoll::Event| event.data.u64() as usize).collect()
                }
            };
            for number in ready {
                let peer = &mut peers[number];
                match peer.receive(&mut scratch, share.unwrap_or(TURN_MAX), &mut tally) {
                    Ok(Some(Whole)) => {
                        let took = peer.asked.elapsed();
                        tally.note_answer(took);
                        if !std::mem::replace(&mut peer.has_answered, true) {
                            first_max = first_max.max(took);
                        }
                    }
                    Ok(None) => {}
                    Err(()) => {
                        tally.errors += 1;
                        peer.has_ended = true;
                        // It may be unregistered already.
                        let _ = epoll::delete(&poll, &peer.stream);
                    }
                }
            }
        }
        let now = Instant::now();
        for peer in peers
            .iter()
            .filter(|peer| !peer.has_ended && !peer.is_idle && now.duration_since(peer.asked) >= UNFINISHED_MIN)
        {
            tally.latency.record(now.duration_since(peer.asked));
        }
        for peer in peers.iter().filter(|peer| !peer.has_ended && !peer.has_answered) {
            first_max = first_max.max(now.duration_since(peer.asked));
        }
        let seconds = now.saturating_duration_since(tally.counts_from).as_secs_f64().max(f64::MIN_POSITIVE);
        Ok(Got { first_max_ms: ms(first_max), ..tally.got(seconds) })
    }

    /// Sends the requests that are due. Returns the time until the next one.
    fn ask_again(&mut self, peers: &mut [Peer]) -> Timespec {
        let now = Instant::now();
        let mut patience = Duration::from_millis(50);
        for (number, peer) in peers.iter_mut().enumerate().filter(|(_, peer)| peer.is_idle && !peer.has_ended) {
            match (peer.asked + self.asks_every).checked_duration_since(now) {
                Some(left) if !left.is_zero() => patience = patience.min(left),
                _ => peer.ask(&(self.request)(number), Instant::now()),
            }
        }
        Timespec { tv_sec: 0, tv_nsec: patience.subsec_nanos().into() }
    }
}

/// Slices per second, in which rate-limited connections receive their shares.
const SLICES: u32 = 20;

/// Counts of responses from a given time on.
pub(super) struct Tally {
    counts_from: Instant,
    latency: FineHistogram,
    pub(super) requests: u64,
    bytes: u64,
    pub(super) errors: u64,
}

impl Peer {
    /// Connects, over TLS if `config` is given. A slow connection has a small buffer, so that the server notices.
    pub(super) fn connect(
        address: &SocketAddr,
        config: Option<&Arc<ClientConfig>>,
        is_slow: bool,
    ) -> std::io::Result<Peer> {
        let mut stream = TcpStream::connect_timeout(address, ANSWER_TIME_LIMIT)?;
        if is_slow {
            sockopt::set_socket_recv_buffer_size(&stream, 16 * 1024)?;
        }
        stream.set_nodelay(true)?;
        let session = match config {
            Some(config) => {
                let name = ServerName::try_from("localhost").map_err(std::io::Error::other)?;
                let mut session = ClientConnection::new(Arc::clone(config), name).map_err(std::io::Error::other)?;
                stream.set_read_timeout(Some(ANSWER_TIME_LIMIT))?;
                while session.is_handshaking() {
                    session.complete_io(&mut stream)?;
                }
                Some(Box::new(session))
            }
            None => None,
        };
        stream.set_nonblocking(true)?;
        let (head, asked) = (Vec::new(), Instant::now());
        let is_idle = false;
        Ok(Peer { stream, session, head, missing: None, asked, is_idle, has_answered: false, has_ended: false })
    }

    /// Sends a request; its latency counts from `asked`. The request must fit into the socket's buffer; otherwise the
    /// response never comes and counts as incomplete.
    pub(super) fn ask(&mut self, request: &str, asked: Instant) {
        self.head.clear();
        self.is_idle = false;
        self.missing = None;
        self.asked = asked;
        let _ = match &mut self.session {
            Some(session) => rustls::Stream::new(&mut **session, &mut self.stream).write_all(request.as_bytes()),
            None => self.stream.write_all(request.as_bytes()),
        };
    }

    /// Receives some bytes of the response. Those of its head are stored in `scratch`.
    fn receive_some(&mut self, scratch: &mut [u8], most: usize) -> rustix::io::Result<usize> {
        let most_missing = self.missing.map_or(HEAD_MAX, |missing| usize::try_from(missing).unwrap_or(usize::MAX));
        let most = most.min(most_missing);
        if let Some(session) = &mut self.session {
            let most = most.min(scratch.len());
            let mut stream = rustls::Stream::new(&mut **session, &mut self.stream);
            return stream.read(&mut scratch[..most]).map_err(|error| match error.kind() {
                ErrorKind::WouldBlock => Errno::AGAIN,
                _ => Errno::from_io_error(&error).unwrap_or(Errno::IO),
            });
        }
        match self.missing {
            None => recv(&self.stream, &mut scratch[..most], RecvFlags::DONTWAIT).map(|(received, _)| received),
            Some(_) => discard(&self.stream, most),
        }
    }

    /// Receives at most `most` bytes. Returns an error if the connection or the response is broken. After a complete
    /// response the connection is idle.
    pub(super) fn receive(&mut self, scratch: &mut [u8], most: usize, tally: &mut Tally) -> Result<Option<Whole>, ()> {
        let mut left = most;
        // No event reports bytes that the TLS session has decrypted already.
        while (left > 0 || self.session.is_some()) && !self.has_ended {
            let received = match self.receive_some(scratch, left.max(1)) {
                Ok(0) => return Err(()),
                Ok(received) => received,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
                Err(_) => return Err(()),
            };
            left = left.saturating_sub(received);
            tally.note_bytes(received);
            let missing = match self.missing {
                Some(missing) => missing - received as u64,
                None => {
                    self.head.extend_from_slice(&scratch[..received]);
                    match body_missing(&self.head)? {
                        None => continue,
                        Some(missing) => missing,
                    }
                }
            };
            self.missing = Some(missing);
            if missing == 0 {
                self.is_idle = true;
                return Ok(Some(Whole));
            }
        }
        Ok(None)
    }
}

impl Tally {
    pub(super) fn from(counts_from: Instant) -> Tally {
        Tally { counts_from, latency: FineHistogram::default(), requests: 0, bytes: 0, errors: 0 }
    }

    /// Returns the figures for a run of this many seconds.
    pub(super) fn got(&self, seconds: f64) -> Got {
        Got::of(&self.latency.snapshot(), self.requests, self.bytes, self.errors, seconds)
    }

    fn counts(&self) -> bool {
        Instant::now() >= self.counts_from
    }

    fn note_bytes(&mut self, bytes: usize) {
        if self.counts() {
            self.bytes += bytes as u64;
        }
    }

    fn note_answer(&mut self, latency: Duration) {
        if self.counts() {
            self.record(latency);
        }
    }

    pub(super) fn record(&mut self, latency: Duration) {
        self.requests += 1;
        self.latency.record(latency);
    }
}

/// Discards bytes from the socket without copying them.
pub fn discard(stream: &TcpStream, length: usize) -> rustix::io::Result<usize> {
    // SAFETY: with MSG_TRUNC a TCP socket writes nothing to the buffer, which may therefore be null (tcp(7)).
    let result =
        unsafe { libc::recv(stream.as_raw_fd(), std::ptr::null_mut(), length, libc::MSG_TRUNC | libc::MSG_DONTWAIT) };
    usize::try_from(result).map_err(|_| Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}

/// Returns the number of bytes missing of the body, or `None` if the head is incomplete. Statuses other than 200 and
/// 206 are errors.
pub fn body_missing(received: &[u8]) -> Result<Option<u64>, ()> {
    let Some(end) = received.windows(4).position(|window| window == b"\r\n\r\n") else {
        return if received.len() < HEAD_MAX { Ok(None) } else { Err(()) };
    };
    let head = std::str::from_utf8(&received[..end]).map_err(|_| ())?;
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.split(' ').nth(1));
    if !matches!(status, Some("200" | "206")) {
        return Err(());
    }
    let length = lines.find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<u64>().ok())?
    });
    length.ok_or(())?.checked_sub((received.len() - end - 4) as u64).ok_or(()).map(Some)
}

/// Interval of the probe's requests.
pub const PROBE_EVERY: Duration = Duration::from_millis(20);
/// Connections that the probe uses in turn, so that every worker is likely to have one.
const PROBE_CONNECTIONS: u32 = 4;

/// Requests `path` every 20 ms until told to end.
pub fn probe(address: &str, path: &str, warm_up: Duration, ends: &AtomicBool) -> Result<Got, String> {
    probe_loops(&[], address, path, warm_up, ends)
}

/// Like [`probe`], but also reports the time that these threads and the probe itself had no core during the longest
/// wait.
pub fn probe_loops(
    loops: &[ThreadId],
    address: &str,
    path: &str,
    warm_up: Duration,
    ends: &AtomicBool,
) -> Result<Got, String> {
    probe_by(&|connection| connection.request(path, false), || (), loops, address, warm_up, ends)
}

/// Like [`probe`] for a body of `bytes` bytes, with real-time priority: where clients and server share cores, the
/// client's own wait for a core must not count.
pub fn prompt_probe(
    address: &str,
    path: &str,
    bytes: usize,
    warm_up: Duration,
    ends: &AtomicBool,
) -> Result<Got, String> {
    probe_by(&|connection| connection.request_whole(path, bytes), take_priority, &[], address, warm_up, ends)
}

type Ask<'a> = &'a (dyn Fn(&mut Connection) -> Result<Answer, Failure> + Sync);

/// Probes by calling `ask`. Each thread calls `begin` first.
fn probe_by(
    ask: Ask<'_>,
    begin: fn(),
    loops: &[ThreadId],
    address: &str,
    warm_up: Duration,
    ends: &AtomicBool,
) -> Result<Got, String> {
    let begun = Instant::now();
    let counts_from = begun + warm_up;
    let latency = FineHistogram::default();
    let errors = std::sync::atomic::AtomicU64::new(0);
    let longest = Mutex::new((Duration::ZERO, WithoutCore::default()));
    std::thread::scope(|scope| {
        for number in 0..PROBE_CONNECTIONS {
            let (latency, errors, longest) = (&latency, &errors, &longest);
            scope.spawn(move || {
                begin();
                let interval = PROBE_EVERY * PROBE_CONNECTIONS;
                let mut due = begun + PROBE_EVERY * number;
                let mut connection = Connection::open(address).ok();
                while !ends.load(Ordering::Relaxed) {
                    let own_before = run_delay_of_this_thread();
                    std::thread::sleep(due.saturating_duration_since(Instant::now()));
                    let loops_before: Vec<Duration> = loops.iter().map(|each| each.run_delay()).collect();
                    let answer = connection.as_mut().map(ask);
                    if !matches!(answer, Some(Ok(ref answer)) if answer.status == 200) {
                        errors.fetch_add(1, Ordering::Relaxed);
                        connection = Connection::open(address).ok();
                    }
                    let took = due.elapsed();
                    if Instant::now() >= counts_from {
                        latency.record(took);
                        let mut longest = longest.lock().expect("the lock is never poisoned");
                        if took > longest.0 {
                            let ms = |since: Duration, until: Duration| until.saturating_sub(since).as_secs_f64() * 1e3;
                            let of_loops =
                                loops.iter().zip(&loops_before).map(|(each, &since)| ms(since, each.run_delay()));
                            let without_core = WithoutCore {
                                probe_ms: ms(own_before, run_delay_of_this_thread()),
                                loop_ms: of_loops.fold(0.0, f64::max),
                            };
                            *longest = (took, without_core);
                        }
                    }
                    due += interval;
                }
                // Requests that were due while a response was late count, too.
                while due < Instant::now() {
                    latency.record(due.elapsed());
                    due += interval;
                }
            });
        }
    });
    let seconds = Instant::now().saturating_duration_since(counts_from).as_secs_f64().max(f64::MIN_POSITIVE);
    let snapshot = latency.snapshot();
    if snapshot.count() == 0 {
        return Err("the probe had no answer".to_owned());
    }
    let (_, without_core) = longest.into_inner().expect("the lock is never poisoned");
    let got = Got::of(&snapshot, snapshot.count(), 0, errors.load(Ordering::Relaxed), seconds);
    Ok(Got { without_core, ..got })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_missing_until_all_of_it_has_come() {
        let head = "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n";
        assert_eq!(body_missing(&head.as_bytes()[..20]), Ok(None));
        assert_eq!(body_missing(head.as_bytes()), Ok(Some(10)));
        assert_eq!(body_missing(format!("{head}0123456789").as_bytes()), Ok(Some(0)));
        assert_eq!(body_missing(format!("{head}0123456789x").as_bytes()), Err(()), "more than there is");
        assert_eq!(body_missing(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"), Err(()));
        assert_eq!(body_missing(b"HTTP/1.1 200 OK\r\n\r\n"), Err(()), "no length");
    }
}
