//! burst: many clients ask for much data at once; how long does another client wait for two bytes?
//!
//! One worker has its own core. The greedy clients use keep-alive connections that have served one request, or new ones
//! that begin a handshake. They send at the same moment and discard the answers without copying. The probe sends one
//! request after another over its own connection, with real-time priority, so that it does not wait for the greedy
//! clients on their core. The result is its longest wait in a burst: the median of ten, or of five for computation.
//!
//! A burst is invalid, and counted separately, if other processes held the core for much of it while the server was
//! ready to run. The server's own threads, and the kernel's packet thread, which receives what it sends, do not count.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_setaffinity};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use serde::Serialize;

use crate::Measured;
use crate::certificate::Certificate;
use crate::client::load::Connection;
use crate::client::swarm::discard;
use crate::options::Options;
use crate::process;
use crate::report::{self, Document, Spread};
use crate::servers::{Kind, Program, Running, Setting, letters};

/// Time limit of a row for each burst that it needs, counting invalid ones. All rows together end within four minutes,
/// also on a busy machine.
const TIME_FOR_BURST: Duration = Duration::from_millis(1200);

/// Time limit of a burst. It ends earlier if all greedy clients have received everything.
const BURST_TIME: Duration = Duration::from_millis(500);

/// Time before each burst in which only the probe runs.
const PEACE: Duration = Duration::from_millis(50);

/// Pause of the probe between an answer and the next request.
const PROBE_PAUSE: Duration = Duration::from_micros(100);

/// Share of a burst in which the server was ready but others had its core. Above this limit the burst is invalid.
const PREEMPTED_MAX: f64 = 0.1;

const FILE_BYTES: usize = 16 << 20;
const TEXT_BYTES: usize = 1 << 20;
const NAMES: usize = 100_000;
const INCLUDES: usize = 5_000;

/// Bytes received from one connection before the next one is served.
const TAKEN_AT_ONCE: usize = 1 << 20;

/// The requests of the greedy clients.
struct Case {
    name: &'static str,
    wants: Wants,
    greedy: usize,
    /// Limit for the probe's longest wait, as the median of bursts.
    target_ms: f64,
    /// Twice the bursts: for cases about sending to many clients, as opposed to computing.
    is_main: bool,
}

impl Case {
    fn bursts(&self, options: &Options) -> usize {
        if self.is_main { options.bursts } else { options.bursts.div_ceil(2) }
    }
}

#[derive(Clone, Copy)]
enum Wants {
    /// A request for this path, on a connection that has had an answer before.
    Path(&'static str),
    /// A full handshake on a new connection, up to the server's answer.
    Handshake,
}

const CASES: &[Case] = &[
    Case { name: "file-50", wants: Wants::Path("/burst/file"), greedy: 50, target_ms: 3.0, is_main: true },
    Case { name: "file-200", wants: Wants::Path("/burst/file"), greedy: 200, target_ms: 3.0, is_main: true },
    Case { name: "file-1000", wants: Wants::Path("/burst/file"), greedy: 1000, target_ms: 8.0, is_main: true },
    Case { name: "read-200", wants: Wants::Path("/burst/read/file"), greedy: 200, target_ms: 3.0, is_main: true },
    Case { name: "gzip-50", wants: Wants::Path("/burst/text.html"), greedy: 50, target_ms: 3.0, is_main: false },
    Case { name: "ssi-50", wants: Wants::Path("/burst/page.shtml"), greedy: 50, target_ms: 3.0, is_main: false },
    Case { name: "autoindex-20", wants: Wants::Path("/burst/names/"), greedy: 20, target_ms: 3.0, is_main: false },
    Case { name: "handshakes-1000", wants: Wants::Handshake, greedy: 1000, target_ms: 3.0, is_main: false },
];

#[derive(Debug, Serialize)]
struct Row {
    server: String,
    case: &'static str,
    /// Longest wait of the probe in each burst, in milliseconds.
    worst_ms: Spread,
    /// 99th percentile of the probe's waits.
    p99_ms: Spread,
    /// Throughput of the greedy clients in MiB/s.
    mib_per_second: Spread,
    /// Time that the server's busiest thread was ready but had no core, in milliseconds.
    run_delay_ms: Spread,
    /// CPU time of the kernel's packet thread.
    packets_ms: Spread,
    counted: usize,
    preempted: usize,
    target_ms: f64,
}

impl Row {
    fn of_counted(&self, figure: String) -> String {
        if self.counted == 0 { "–".to_owned() } else { figure }
    }
}

/// Result of one burst.
struct Burst {
    worst: Duration,
    p99: Duration,
    bytes_per_second: f64,
    run_delay: Duration,
    packets: Duration,
    was_preempted: bool,
}

pub fn measure(options: &Options) -> Measured {
    let programs = options.servers(Some(&["nginx", "gale"]))?;
    let chosen = |case: &&Case| options.cases.as_ref().is_none_or(|names| names.iter().any(|name| name == case.name));
    let cases: Vec<&Case> = CASES.iter().filter(chosen).collect();
    if cases.is_empty() {
        return Err(format!(
            "burst: the cases are {}",
            CASES.iter().map(|case| case.name).collect::<Vec<_>>().join(", ")
        ));
    }
    let site = Site::write()?;
    let certificate = Certificate::make(&["localhost".to_owned()])?;
    pin(options.client_core)?;
    let mut rows = Vec::new();
    for case in cases {
        for program in programs.iter().filter(|program| matches!(program.kind, Kind::Nginx | Kind::Gale)) {
            let row = measure_case(options, program, &site, &certificate, case)?;
            eprintln!("  {} {}: {} ms, {} preempted", row.server, row.case, row.worst_ms, row.preempted);
            rows.push(row);
        }
    }
    let table = report::table_of(
        &rows,
        &[
            ("case", &|row: &Row| row.case.to_owned()),
            ("server", &|row| row.server.clone()),
            ("worst wait ms", &|row| row.of_counted(row.worst_ms.to_string())),
            ("goal", &|row| format!("{:.0}", row.target_ms)),
            ("p99 ms", &|row| row.of_counted(row.p99_ms.to_string())),
            ("the others' MiB/s", &|row| row.of_counted(format!("{:.0}", row.mib_per_second.median))),
            ("waited for the core ms", &|row| row.of_counted(row.run_delay_ms.to_string())),
            ("ksoftirqd ms", &|row| row.of_counted(row.packets_ms.to_string())),
            ("bursts", &|row| row.counted.to_string()),
            ("not counted", &|row| row.preempted.to_string()),
        ],
    );
    let body = format!(
        "Longest wait of a probe for two bytes during a burst of large requests: median (least – greatest) of {} \
         bursts, of half as many where the server computes. One worker on core {}, all clients on core {}. `file`: {} \
         MiB by `sendfile`; `read`: the same with `sendfile off`; `gzip`: {} MiB of text; `ssi`: a page of {INCLUDES} \
         commands; `autoindex`: {NAMES} names; `handshakes`: the server's part of a full handshake. The number is the \
         number of clients. Waited for the core: the busiest thread of the server; ksoftirqd: the part of that wait in \
         which the kernel's packet thread ran. A burst in which other programs had the server's core for over {} of \
         the time is discarded; a case that takes too long ends with fewer bursts.\n\n{table}",
        options.bursts,
        options.server_core,
        options.client_core,
        FILE_BYTES >> 20,
        TEXT_BYTES >> 20,
        report::percent(PREEMPTED_MAX),
    );
    Ok((Document::new("burst", "Two bytes beside a burst", &programs, &body, &rows)?, true))
}

fn measure_case(
    options: &Options,
    program: &Program,
    site: &Site,
    certificate: &Arc<Certificate>,
    case: &Case,
) -> Result<Row, String> {
    let setting = site.setting(options.server_core);
    let server = program.start(match case.wants {
        Wants::Path(_) => setting,
        Wants::Handshake => Setting { certificate: Some(Arc::clone(certificate)), ..setting },
    })?;
    let mut bursts = Vec::new();
    let mut preempted = 0;
    let bursts_wanted = case.bursts(options);
    let deadline = Instant::now() + TIME_FOR_BURST * bursts_wanted as u32;
    while bursts.len() < bursts_wanted && Instant::now() < deadline {
        let burst = run_burst(&server, options.server_core, case)?;
        if burst.was_preempted {
            preempted += 1;
        } else {
            bursts.push(burst);
        }
    }
    let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
    Ok(Row {
        server: server.label.clone(),
        case: case.name,
        worst_ms: Spread::of(bursts.iter().map(|burst| ms(burst.worst))),
        p99_ms: Spread::of(bursts.iter().map(|burst| ms(burst.p99))),
        mib_per_second: Spread::of(bursts.iter().map(|burst| burst.bytes_per_second / f64::from(1 << 20))),
        run_delay_ms: Spread::of(bursts.iter().map(|burst| ms(burst.run_delay))),
        packets_ms: Spread::of(bursts.iter().map(|burst| ms(burst.packets))),
        counted: bursts.len(),
        preempted,
        target_ms: case.target_ms,
    })
}

fn run_burst(server: &Running, core: usize, case: &Case) -> Result<Burst, String> {
    let mut greedy = match case.wants {
        Wants::Path(path) => Greedy::connect(&server.address, case.greedy, path)?,
        Wants::Handshake => {
            let address = server.tls_address.as_deref().ok_or("no address for TLS")?;
            Greedy::connect_for_handshakes(address, case.greedy)?
        }
    };
    let tree = server.root.tree();
    let packet_thread = process::packet_thread(core);
    let packet_time = || packet_thread.map_or(Duration::ZERO, process::Process::cpu_time);
    std::thread::scope(|scope| {
        let (over, is_over) = std::sync::mpsc::channel::<()>();
        let (ready, is_ready) = std::sync::mpsc::channel();
        let probe = scope.spawn(move || probe(&server.address, &ready, &is_over));
        // An error of the probe ends its side of the channel.
        let _ = is_ready.recv();
        std::thread::sleep(PEACE);
        let (before, packets_before) = (process::threads(&tree), packet_time());
        let begun = Instant::now();
        let taken = greedy.ask_and_take(begun + BURST_TIME);
        let time = begun.elapsed();
        drop(over);
        let after = process::threads(&tree);
        let mut waits = probe.join().expect("the probe does not panic")?;
        // Includes a request sent before the burst and answered after it began.
        waits.retain(|(asked, wait)| *asked + *wait >= begun);
        let mut lengths: Vec<Duration> = waits.into_iter().map(|(_, wait)| wait).collect();
        lengths.sort();
        let nothing = || "the probe had no answer during a burst".to_owned();
        let worst = *lengths.last().ok_or_else(nothing)?;
        let p99 = lengths[lengths.len() * 99 / 100];
        // Threads of a pool may have been started since.
        let threads = after.iter().map(|(id, thread)| thread.since(before.get(id).copied().unwrap_or_default()));
        let threads: Vec<process::Thread> = threads.collect();
        let packets = packet_time().saturating_sub(packets_before);
        let run_delay =
            threads.iter().max_by_key(|thread| thread.cpu_time).map_or(Duration::ZERO, |busiest| busiest.run_delay);
        let was_preempted = others_had_the_core(&threads, packets) > time.mul_f64(PREEMPTED_MAX);
        Ok(Burst {
            worst,
            p99,
            bytes_per_second: taken? as f64 / time.as_secs_f64(),
            run_delay,
            packets,
            was_preempted,
        })
    })
}

/// Returns a lower bound for the time that other processes had the core while one of these threads was ready: its run
/// delay, minus the CPU time of the server's other threads and of the kernel's packet thread.
fn others_had_the_core(threads: &[process::Thread], packets: Duration) -> Duration {
    let all: Duration = threads.iter().map(|thread| thread.cpu_time).sum();
    let of = |thread: &process::Thread| thread.run_delay.saturating_sub(all - thread.cpu_time + packets);
    threads.iter().map(of).max().unwrap_or_default()
}

/// Asks for two bytes repeatedly until told to end. Returns the time of each request and the wait for its answer.
fn probe(
    address: &str,
    ready: &std::sync::mpsc::Sender<()>,
    is_over: &std::sync::mpsc::Receiver<()>,
) -> Result<Vec<(Instant, Duration)>, String> {
    take_priority();
    let failed = |failure: crate::client::load::Failure| format!("probe: {failure:?}");
    let mut connection = Connection::open(address).map_err(failed)?;
    connection.request("/return", false).map_err(failed)?;
    // A failure means that the receiver has gone.
    let _ = ready.send(());
    let mut waits = Vec::new();
    while matches!(is_over.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty)) {
        let asked = Instant::now();
        connection.request("/return", false).map_err(failed)?;
        waits.push((asked, asked.elapsed()));
        std::thread::sleep(PROBE_PAUSE);
    }
    Ok(waits)
}

/// Gives this thread real-time priority, so that it runs as soon as its answer is there. Without the permission waits
/// are slightly longer.
pub fn take_priority() {
    let parameter = libc::sched_param { sched_priority: 1 };
    // SAFETY: the parameter is a live value of the kernel's layout; 0 names the calling thread.
    if unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameter) } != 0 {
        eprintln!("note: no real-time priority for the probe: waits include those for the client's core");
    }
}

pub fn pin(core: usize) -> Result<(), String> {
    let mut only = CpuSet::new();
    only.set(core);
    sched_setaffinity(None, &only).map_err(|error| format!("core {core}: {error}"))
}

/// Connections that send their requests at the same moment.
struct Greedy {
    poll: std::os::fd::OwnedFd,
    /// Each with a flag, true while its answer is incomplete.
    streams: Vec<(TcpStream, bool)>,
    request: Vec<u8>,
    /// The first bytes complete the answer: the client does not continue.
    is_answered_at_once: bool,
}

impl Greedy {
    /// Opens connections and has one request answered on each.
    fn connect(address: &str, count: usize, path: &str) -> Result<Greedy, String> {
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: bench\r\nAccept-Encoding: gzip\r\nConnection: close\r\n\r\n");
        Greedy::of(count, request.into_bytes(), false, || {
            let mut connection = Connection::open(address).map_err(|failure| format!("burst: {failure:?}"))?;
            connection.request("/return", false).map_err(|failure| format!("burst: {failure:?}"))?;
            Ok(connection.into_stream().0)
        })
    }

    /// Opens new connections. All send the same client hello, which the server treats as different clients.
    fn connect_for_handshakes(address: &str, count: usize) -> Result<Greedy, String> {
        let config = ClientConfig::builder().with_root_certificates(RootCertStore::empty()).with_no_client_auth();
        let name = ServerName::try_from("localhost").map_err(|error| format!("burst: {error}"))?;
        let client = ClientConnection::new(Arc::new(config), name);
        let mut hello = Vec::new();
        let written = client.map_err(|error| format!("burst: {error}"))?.write_tls(&mut hello);
        written.map_err(|error| format!("burst: {error}"))?;
        Greedy::of(count, hello, true, || TcpStream::connect(address).map_err(|error| format!("burst: {error}")))
    }

    fn of(
        count: usize,
        request: Vec<u8>,
        is_answered_at_once: bool,
        connect: impl Fn() -> Result<TcpStream, String>,
    ) -> Result<Greedy, String> {
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| format!("burst: {error}"))?;
        let mut streams = Vec::with_capacity(count);
        for number in 0..count {
            let stream = connect()?;
            stream.set_nonblocking(true).map_err(|error| format!("burst: {error}"))?;
            let data = epoll::EventData::new_u64(number as u64);
            epoll::add(&poll, &stream, data, epoll::EventFlags::IN).map_err(|error| format!("burst: {error}"))?;
            streams.push((stream, true));
        }
        Ok(Greedy { poll, streams, request, is_answered_at_once })
    }

    /// Sends all requests and receives until everything has arrived or the time is over. Returns the number of bytes
    /// received.
    fn ask_and_take(&mut self, until: Instant) -> Result<u64, String> {
        for (stream, _) in &mut self.streams {
            stream.write_all(&self.request).map_err(|error| format!("burst: {error}"))?;
        }
        let mut open = self.streams.len();
        let mut taken = 0;
        let mut events = Vec::with_capacity(256);
        while open > 0 && Instant::now() < until {
            let patience = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
            match epoll::wait(&self.poll, spare_capacity(&mut events), Some(&patience)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(format!("burst: {error}")),
            }
            for event in events.drain(..) {
                let event: epoll::Event = event;
                let (stream, is_open) = &mut self.streams[event.data.u64() as usize];
                match discard(stream, TAKEN_AT_ONCE) {
                    Ok(bytes) => {
                        taken += bytes as u64;
                        if bytes == 0 || self.is_answered_at_once {
                            *is_open = false;
                            open -= 1;
                            // The socket is closed with the others.
                            let _ = epoll::delete(&self.poll, &*stream);
                        }
                    }
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    Err(error) => return Err(format!("burst: a greedy client: {error}")),
                }
            }
        }
        Ok(taken)
    }
}

/// Files for the greedy clients. Removed on drop.
struct Site {
    directory: PathBuf,
}

impl Site {
    fn write() -> Result<Site, String> {
        let directory = std::env::temp_dir().join(format!("gale-bench-burst-{}", std::process::id()));
        let site = Site { directory };
        site.write_files().map_err(|error| format!("{}: {error}", site.directory.display()))?;
        Ok(site)
    }

    fn write_files(&self) -> std::io::Result<()> {
        let names = self.directory.join("names");
        fs::create_dir_all(&names)?;
        fs::write(self.directory.join("file"), letters(FILE_BYTES))?;
        fs::write(self.directory.join("text.html"), crate::location::html(TEXT_BYTES))?;
        let page: String = (0..INCLUDES).map(|n| format!("<p>{n} <!--#echo var=\"request_uri\" --></p>\n")).collect();
        fs::write(self.directory.join("page.shtml"), page)?;
        for number in 0..NAMES {
            fs::write(names.join(format!("a-file-with-the-number-{number}")), b"")?;
        }
        // Read once, so that the page cache has the files, and their access times are up to date.
        let mut sink = Vec::new();
        for name in ["file", "text.html", "page.shtml"] {
            fs::File::open(self.directory.join(name))?.read_to_end(&mut sink)?;
        }
        Ok(())
    }

    fn setting(&self, core: usize) -> Setting {
        let directory = self.directory.display();
        Setting {
            cores: Some(vec![core]),
            server: format!(
                "location = /burst/text.html {{ alias {directory}/text.html; default_type text/html; gzip on; }}\n\
                 \x20       location = /burst/page.shtml {{ alias {directory}/page.shtml; default_type text/html; \
                 ssi on; }}\n\
                 \x20       location = /burst/file {{ alias {directory}/file; open_file_cache max=100; }}\n\
                 \x20       location /burst/read/ {{ alias {directory}/; sendfile off; open_file_cache max=100; }}\n\
                 \x20       location /burst/names/ {{ alias {directory}/names/; autoindex on; }}"
            ),
            ..Setting::default()
        }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(Path::new(&self.directory));
    }
}
