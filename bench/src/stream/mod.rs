//! stream: what a session costs a server that passes it on: bytes over TCP both ways and one way, short connections,
//! questions and flows over UDP.
//!
//! The server has one worker on one core; client and the server behind it share the other one. What is told is the CPU
//! time of the server for an exchange, a connection, a GiB or a datagram that has arrived.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};
use serde::Serialize;

use crate::Measured;
use crate::case;
use crate::options::Options;
use crate::process::{CoreTime, Process};
use crate::report::{self, Document, Spread};
use crate::servers::{Program, Setting, free_port};

/// Connections that carry exchanges.
const CONNECTIONS: usize = 16;
const MESSAGE_BYTES: usize = 100;
const BULK_BYTES: usize = 1 << 30;
const DATAGRAM_BYTES: usize = 1200;
const BURST: usize = 32;
const TIME_LIMIT: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum Job {
    Exchanges,
    ShortConnections,
    Bulk,
    Questions,
    Flow,
    FlowInSegments,
}

impl Job {
    const ALL: [Job; 6] =
        [Job::Exchanges, Job::ShortConnections, Job::Bulk, Job::Questions, Job::Flow, Job::FlowInSegments];

    fn title(self) -> &'static str {
        match self {
            Job::Exchanges => "TCP, 100 bytes and 100 back, µs each",
            Job::ShortConnections => "TCP, a connection for each, µs each",
            Job::Bulk => "TCP, one way, ms per GiB",
            Job::Questions => "UDP, a session of one question and one answer, µs each",
            Job::Flow => "UDP, a flow of 1,200 bytes, µs per datagram",
            Job::FlowInSegments => "UDP, the same, sent in segments (GSO)",
        }
    }
}

#[derive(Clone, Debug, Serialize)]
struct Sample {
    job: Job,
    /// The server's CPU time, in the unit of the job's title.
    server: f64,
    /// Both cores', in the same unit.
    both: f64,
    per_second: f64,
}

#[derive(Debug, Serialize)]
struct Row {
    server: String,
    job: Job,
    cost: Spread,
    both: Spread,
    per_second: Spread,
}

/// Measures nginx and Gale with each driver.
pub fn measure(options: &Options) -> Measured {
    let programs = options.servers(Some(&["nginx", "gale"]))?;
    let samples = case::in_turn(options.rounds, &programs, |program, round| {
        eprintln!("stream: {} round {round}", program.label);
        measure_one(options, program)
    })?;
    let mut rows = Vec::new();
    for job in Job::ALL {
        for (program, samples) in programs.iter().zip(&samples) {
            let of_job = || samples.iter().flatten().filter(move |sample: &&Sample| sample.job == job);
            rows.push(Row {
                server: program.label.clone(),
                job,
                cost: Spread::of(of_job().map(|sample| sample.server)),
                both: Spread::of(of_job().map(|sample| sample.both)),
                per_second: Spread::of(of_job().map(|sample| sample.per_second)),
            });
        }
    }
    let table = report::table_of(
        &rows,
        &[
            ("what", &|row: &Row| row.job.title().to_owned()),
            ("server", &|row| row.server.clone()),
            ("CPU of the server", &|row| row.cost.to_string()),
            ("of both cores", &|row| format!("{:.2}", row.both.median)),
            ("a second", &|row| format!("{:.0}", row.per_second.median)),
        ],
    );
    let body = format!(
        "{} rounds of {} s for each; median (least – greatest). One worker on one core; client and server behind it on \
         the other.\n\n{table}",
        options.rounds,
        options.run_time.as_secs()
    );
    Ok((Document::new("stream", "Sessions over TCP and UDP", &programs, &body, &rows)?, true))
}

/// All jobs with one server.
fn measure_one(options: &Options, program: &Program) -> Result<Vec<Sample>, String> {
    pin(options.client_core);
    let behind = Behind::start(options.client_core);
    let ports = [free_port()?, free_port()?, free_port()?, free_port()?];
    let [exchange, discard, question, flow] = ports;
    let blocks = format!(
        "stream {{\n    server {{ listen 127.0.0.1:{exchange}; proxy_pass {}; }}\n\
         \x20   server {{ listen 127.0.0.1:{discard}; proxy_pass {}; }}\n\
         \x20   server {{ listen 127.0.0.1:{question} udp; proxy_pass {}; proxy_responses 1; }}\n\
         \x20   server {{ listen 127.0.0.1:{flow} udp; proxy_pass {}; proxy_timeout 5s; }}\n}}",
        behind.echo, behind.sink, behind.answers, behind.counts
    );
    let setting = Setting { cores: Some(vec![options.server_core]), blocks, ..Setting::default() };
    let server = program.start(setting)?;
    let mut samples = Vec::new();
    for job in Job::ALL {
        let cores = [options.server_core, options.client_core];
        let (cpu, busy, begun) = (cpu_time(server.root), CoreTime::read(&cores), Instant::now());
        let end = begun + options.run_time;
        let address = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
        let fault = |error: std::io::Error| format!("{}: {}: {error}", program.label, job.title());
        let (count, unit) = match job {
            Job::Exchanges => (exchanges(address(exchange), end).map_err(fault)?, 1e6),
            Job::ShortConnections => (short_connections(address(exchange), end).map_err(fault)?, 1e6),
            Job::Bulk => (bulk(address(discard), &behind).map_err(fault)?, 1e3),
            Job::Questions => (questions(address(question), end).map_err(fault)?, 1e6),
            Job::Flow => (flow_of(address(flow), end, false, &behind).map_err(fault)?, 1e6),
            Job::FlowInSegments => (flow_of(address(flow), end, true, &behind).map_err(fault)?, 1e6),
        };
        let elapsed = begun.elapsed().as_secs_f64();
        let both = CoreTime::read(&cores).busy_since(busy).as_secs_f64();
        let own = cpu_time(server.root).saturating_sub(cpu).as_secs_f64();
        let count = count.max(1) as f64;
        samples.push(Sample {
            job,
            server: own * unit / count,
            both: both * unit / count,
            per_second: count / elapsed,
        });
    }
    Ok(samples)
}

fn cpu_time(root: Process) -> Duration {
    root.tree().into_iter().map(Process::cpu_time).sum()
}

fn pin(core: usize) {
    let mut only = CpuSet::new();
    only.set(core);
    // Elsewhere the figures are worse, not wrong.
    let _ = sched_setaffinity(None, &only);
}

/// The servers behind the server, on the client's core.
struct Behind {
    echo: SocketAddr,
    sink: SocketAddr,
    answers: SocketAddr,
    counts: SocketAddr,
    bytes: Arc<AtomicU64>,
    datagrams: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    _threads: Vec<JoinHandle<()>>,
}

impl Drop for Behind {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
    }
}

impl Behind {
    fn start(core: usize) -> Behind {
        let (bytes, datagrams, is_over) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default(), Arc::default());
        let listener = || TcpListener::bind("127.0.0.1:0").expect("a port");
        let (echo, sink) = (listener(), listener());
        let socket = || {
            let socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
            socket.set_read_timeout(Some(Duration::from_secs(1))).expect("an option");
            socket
        };
        let (answers, counts) = (socket(), socket());
        let (echo_at, sink_at) = (echo.local_addr().expect("bound"), sink.local_addr().expect("bound"));
        let (answers_at, counts_at) = (answers.local_addr().expect("bound"), counts.local_addr().expect("bound"));
        let spawn = |work: Box<dyn FnOnce() + Send>| {
            std::thread::spawn(move || {
                pin(core);
                work();
            })
        };
        let (sunk, counted) = (Arc::clone(&bytes), Arc::clone(&datagrams));
        let ends: [Arc<AtomicBool>; 2] = [Arc::clone(&is_over), Arc::clone(&is_over)];
        let [answers_end, counts_end] = ends;
        let threads = vec![
            spawn(Box::new(move || {
                for stream in echo.incoming().flatten() {
                    std::thread::spawn(move || {
                        let (mut stream, mut bytes) = (stream, [0; 4096]);
                        let _ = stream.set_nodelay(true);
                        while let Ok(count @ 1..) = stream.read(&mut bytes) {
                            if stream.write_all(&bytes[..count]).is_err() {
                                return;
                            }
                        }
                    });
                }
            })),
            spawn(Box::new(move || {
                for mut stream in sink.incoming().flatten() {
                    let mut bytes = vec![0; 1 << 20];
                    while let Ok(count @ 1..) = stream.read(&mut bytes) {
                        sunk.fetch_add(count as u64, Ordering::SeqCst);
                    }
                }
            })),
            spawn(Box::new(move || {
                let mut bytes = [0; 2048];
                while !answers_end.load(Ordering::SeqCst) {
                    if let Ok((count, from)) = answers.recv_from(&mut bytes) {
                        let _ = answers.send_to(&bytes[..count], from);
                    }
                }
            })),
            spawn(Box::new(move || {
                let mut bytes = vec![0; 65536];
                while !counts_end.load(Ordering::SeqCst) {
                    if let Ok(count) = counts.recv(&mut bytes) {
                        counted.fetch_add(count.div_ceil(DATAGRAM_BYTES) as u64, Ordering::SeqCst);
                    }
                }
            })),
        ];
        Behind {
            echo: echo_at,
            sink: sink_at,
            answers: answers_at,
            counts: counts_at,
            bytes,
            datagrams,
            is_over,
            _threads: threads,
        }
    }
}

fn exchanges(address: SocketAddr, end: Instant) -> std::io::Result<u64> {
    let mut streams = Vec::new();
    for _ in 0..CONNECTIONS {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TIME_LIMIT))?;
        streams.push(stream);
    }
    let (message, mut answer, mut count) = ([7; MESSAGE_BYTES], [0; MESSAGE_BYTES], 0);
    while Instant::now() < end {
        for stream in &mut streams {
            stream.write_all(&message)?;
        }
        for stream in &mut streams {
            stream.read_exact(&mut answer)?;
            count += 1;
        }
    }
    Ok(count)
}

fn short_connections(address: SocketAddr, end: Instant) -> std::io::Result<u64> {
    let (message, mut answer, mut count) = ([7; MESSAGE_BYTES], [0; MESSAGE_BYTES], 0);
    while Instant::now() < end {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(TIME_LIMIT))?;
        stream.write_all(&message)?;
        stream.read_exact(&mut answer)?;
        count += 1;
    }
    Ok(count)
}

/// A GiB, and until all of it has arrived.
fn bulk(address: SocketAddr, behind: &Behind) -> std::io::Result<u64> {
    let before = behind.bytes.load(Ordering::SeqCst);
    let mut stream = TcpStream::connect(address)?;
    let piece = vec![7; 1 << 20];
    for _ in 0..BULK_BYTES / piece.len() {
        stream.write_all(&piece)?;
    }
    stream.shutdown(std::net::Shutdown::Write)?;
    let end = Instant::now() + TIME_LIMIT;
    while behind.bytes.load(Ordering::SeqCst) - before < BULK_BYTES as u64 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(1)
}

fn questions(address: SocketAddr, end: Instant) -> std::io::Result<u64> {
    let (message, mut answer, mut count) = ([7; 64], [0; 2048], 0);
    while Instant::now() < end {
        let mut sockets = Vec::with_capacity(CONNECTIONS);
        for _ in 0..CONNECTIONS {
            let socket = UdpSocket::bind("127.0.0.1:0")?;
            socket.set_read_timeout(Some(Duration::from_secs(1)))?;
            socket.connect(address)?;
            socket.send(&message)?;
            sockets.push(socket);
        }
        count += sockets.iter().filter(|socket| socket.recv(&mut answer).is_ok()).count() as u64;
    }
    Ok(count)
}

/// A flow, so fast as the other end counts it.
fn flow_of(address: SocketAddr, end: Instant, in_segments: bool, behind: &Behind) -> std::io::Result<u64> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.connect(address)?;
    let bytes = vec![7; DATAGRAM_BYTES * BURST];
    if in_segments {
        let segment = DATAGRAM_BYTES as libc::c_int;
        // SAFETY: the kernel reads an integer that is there.
        let result = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_UDP,
                libc::UDP_SEGMENT,
                (&raw const segment).cast(),
                size_of_val(&segment) as libc::socklen_t,
            )
        };
        if result != 0 {
            return Err(std::io::Error::last_os_error());
        }
    }
    let before = behind.datagrams.load(Ordering::SeqCst);
    let mut sent = 0u64;
    while Instant::now() < end {
        if in_segments {
            socket.send(&bytes)?;
        } else {
            for piece in bytes.chunks(DATAGRAM_BYTES) {
                socket.send(piece)?;
            }
        }
        sent += BURST as u64;
        // No more than four bursts are under way, so that hardly any is lost.
        let window = Instant::now() + Duration::from_millis(20);
        while sent - (behind.datagrams.load(Ordering::SeqCst) - before) > 4 * BURST as u64 && Instant::now() < window {
            std::thread::yield_now();
        }
        if Instant::now() >= window {
            sent = behind.datagrams.load(Ordering::SeqCst) - before;
        }
    }
    Ok(behind.datagrams.load(Ordering::SeqCst) - before)
}
