//! stream: cost of a session that is relayed: bytes over TCP in both directions and in one, short connections, TLS
//! termination, questions and flows over UDP; memory of idle tunnels; distribution of connections to two workers.
//!
//! The server has one worker on one core; clients and backends share the other. The results are the server's CPU time
//! per exchange, connection, GiB, or delivered datagram. The floor is a bare relay (`floor/relay.rs`,
//! `floor/datagrams.rs`): any cost above it is the server's own work.

mod backend;
mod clients;

use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use gale_base::histogram::FineHistogram;
use rustix::thread::{CpuSet, sched_setaffinity};
use serde::Serialize;

use self::backend::Backend;
use self::clients::Tls;
use crate::Measured;
use crate::case;
use crate::certificate::Certificate;
use crate::memory::Memory;
use crate::options::Options;
use crate::process::{self, CoreTime, Process};
use crate::report::{self, Document, Spread};
use crate::servers::{Accepting, Kind, POLL_INTERVAL, Program, Setting, free_port};

const MESSAGE_BYTES: usize = 100;
const DATAGRAM_BYTES: usize = 1200;
/// Tunnels for the reading of memory, and tunnels before it, which trigger one-time allocations.
const TUNNELS: usize = 1000;
const WARM_UP_TUNNELS: usize = 50;
const TUNNELS_MAX: usize = 8192;
const ACCEPTING_MODES: [Accepting; 3] = [Accepting::Shared, Accepting::Reuseport, Accepting::Mutex];
const START_TIME_LIMIT: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum Job {
    Exchanges,
    ShortConnections,
    Bulk,
    TlsExchanges,
    TlsBulk,
    Tunnels,
    Questions,
    Flow,
    FlowInSegments,
}

impl Job {
    const ALL: [Job; 9] = [
        Job::Exchanges,
        Job::ShortConnections,
        Job::Bulk,
        Job::TlsExchanges,
        Job::TlsBulk,
        Job::Tunnels,
        Job::Questions,
        Job::Flow,
        Job::FlowInSegments,
    ];

    fn title(self) -> &'static str {
        match self {
            Job::Exchanges => "TCP, 100 bytes and 100 back, µs each",
            Job::ShortConnections => "TCP, a connection for each, µs each",
            Job::Bulk => "TCP, one way, ms per GiB",
            Job::TlsExchanges => "TLS ends here, 100 bytes and 100 back, µs each",
            Job::TlsBulk => "TLS ends here, one way, ms per GiB",
            Job::Tunnels => "TCP, memory of an idle tunnel, KiB",
            Job::Questions => "UDP, a session of one question and one answer, µs each",
            Job::Flow => "UDP, a flow of 1,200 bytes, µs per datagram",
            Job::FlowInSegments => "UDP, the same, sent in segments (GSO)",
        }
    }

    /// Returns true if the program supports this job. The io_uring relay sends only recorded bytes, only one of the
    /// relays splices, and datagrams are received by readiness with every driver.
    fn is_for(self, program: &Program) -> bool {
        let is_udp = matches!(self, Job::Questions | Job::Flow | Job::FlowInSegments);
        match (program.kind, program.driver.as_deref()) {
            (Kind::Floor, Some("splice")) => self == Job::Bulk,
            (Kind::Floor, Some("io_uring")) => matches!(self, Job::Exchanges | Job::ShortConnections),
            (Kind::Floor, _) => is_udp || matches!(self, Job::Exchanges | Job::ShortConnections | Job::Bulk),
            (Kind::Haproxy, _) => !is_udp,
            _ => true,
        }
    }
}

#[derive(Clone, Debug, Serialize)]
struct Sample {
    job: Job,
    /// CPU time of the server, in the unit of the job's title; or its memory.
    server: f64,
    /// CPU time of both cores, in the same unit.
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
    /// (server - floor) / (nginx - floor), each with the floor of its own driver.
    above_floor: Option<f64>,
}

#[derive(Clone, Debug)]
struct WaySample {
    way: Accepting,
    server_us: f64,
    per_second: f64,
    p99_us: f64,
}

#[derive(Debug, Serialize)]
struct WayRow {
    server: String,
    way: &'static str,
    cost: Spread,
    per_second: Spread,
    p99_us: Spread,
}

#[derive(Debug, Serialize)]
struct Rows {
    jobs: Vec<Row>,
    ways: Vec<WayRow>,
}

/// Measures the floors, nginx, haproxy, and Gale with each driver.
pub fn measure(options: &Options) -> Measured {
    let mut programs = options.servers(None)?;
    programs.retain(|program| program.kind != Kind::H2o);
    if let Some(floor) = programs.iter().find(|program| program.kind == Kind::Floor) {
        let splice = Program { label: "floor".to_owned(), ..floor.clone() }.with_driver("splice").resolve()?;
        let place = programs.iter().take_while(|program| program.kind == Kind::Floor).count();
        programs.insert(place, splice);
    }
    let samples = case::in_turn(options.rounds, &programs, |program, round| {
        eprintln!("stream: {} round {round}", program.label);
        measure_one(options, program)
    })?;
    let has_ways = |program: &&Program| matches!(program.kind, Kind::Nginx | Kind::Gale);
    let with_ways: Vec<Program> = programs.iter().filter(has_ways).cloned().collect();
    let way_samples = case::in_turn(options.rounds, &with_ways, |program, round| {
        eprintln!("stream, two workers: {} round {round}", program.label);
        ACCEPTING_MODES.into_iter().map(|way| measure_way(options, program, way)).collect::<Result<Vec<_>, String>>()
    })?;
    let rows = Rows { jobs: job_rows(&programs, &samples), ways: way_rows(&with_ways, &way_samples) };
    let body = markdown(options, &rows);
    Ok((Document::new("stream", "Sessions over TCP and UDP", &programs, &body, &rows)?, true))
}

fn job_rows(programs: &[Program], samples: &[Vec<Vec<Sample>>]) -> Vec<Row> {
    let mut rows = Vec::new();
    for job in Job::ALL {
        let costs: Vec<Option<Spread>> = (programs.iter().zip(samples))
            .map(|(program, samples)| {
                let of_job = samples.iter().flatten().filter(|sample| sample.job == job);
                job.is_for(program).then(|| Spread::of(of_job.map(|sample| sample.server)))
            })
            .collect();
        let cost_of = |is_it: &dyn Fn(&Program) -> bool| {
            let place = programs.iter().position(is_it)?;
            costs[place].as_ref().map(|cost| cost.median)
        };
        let floor_of =
            |driver: &str| cost_of(&|program| program.kind == Kind::Floor && program.driver.as_deref() == Some(driver));
        let above_floor = |program: &Program, cost: f64| {
            let floor = program.driver.as_deref().and_then(floor_of).or_else(|| floor_of("epoll"))?;
            let nginx = cost_of(&|program| program.kind == Kind::Nginx)? - floor_of("epoll")?;
            (program.kind != Kind::Floor).then(|| (cost - floor) / nginx)
        };
        for ((program, samples), cost) in programs.iter().zip(samples).zip(&costs) {
            let Some(cost) = cost else { continue };
            let of_job = || samples.iter().flatten().filter(|sample| sample.job == job);
            rows.push(Row {
                server: program.label.clone(),
                job,
                both: Spread::of(of_job().map(|sample| sample.both)),
                per_second: Spread::of(of_job().map(|sample| sample.per_second)),
                above_floor: above_floor(program, cost.median),
                cost: *cost,
            });
        }
    }
    rows
}

fn way_rows(programs: &[Program], samples: &[Vec<Vec<WaySample>>]) -> Vec<WayRow> {
    let mut rows = Vec::new();
    for (program, samples) in programs.iter().zip(samples) {
        for way in ACCEPTING_MODES {
            let of_way = || samples.iter().flatten().filter(move |sample| sample.way == way);
            rows.push(WayRow {
                server: program.label.clone(),
                way: way.name(),
                cost: Spread::of(of_way().map(|sample| sample.server_us)),
                per_second: Spread::of(of_way().map(|sample| sample.per_second)),
                p99_us: Spread::of(of_way().map(|sample| sample.p99_us)),
            });
        }
    }
    rows
}

fn markdown(options: &Options, rows: &Rows) -> String {
    let jobs = report::table_of(
        &rows.jobs,
        &[
            ("what", &|row: &Row| row.job.title().to_owned()),
            ("server", &|row| row.server.clone()),
            ("the server", &|row| row.cost.to_string()),
            ("above the floor, of nginx's", &|row| row.above_floor.map_or_else(String::new, |of| format!("{of:.2}"))),
            ("of both cores", &|row| format!("{:.2}", row.both.median)),
            ("a second", &|row| format!("{:.0}", row.per_second.median)),
        ],
    );
    let ways = report::table_of(
        &rows.ways,
        &[
            ("server", &|row: &WayRow| row.server.clone()),
            ("sockets", &|row| row.way.to_owned()),
            ("CPU of the server, µs", &|row| row.cost.to_string()),
            ("a second", &|row| format!("{:.0}", row.per_second.median)),
            ("p99, µs", &|row| format!("{:.0}", row.p99_us.median)),
        ],
    );
    format!(
        "{} rounds of {} s for each; median (least – greatest). One worker on one core; client and backend on \
         the other. The server: its CPU time, or the growth of the PSS of its processes.\n\n{jobs}\n\
         ## Ways of accepting\n\nA connection for each message, two workers and two clients, everything on both \
         cores.\n\n{ways}",
        options.rounds,
        options.run_time.as_secs()
    )
}

fn measure_one(options: &Options, program: &Program) -> Result<Vec<Sample>, String> {
    pin(&[options.client_core]);
    let backend = Backend::start(options.client_core);
    let certificate = Certificate::make(&["localhost".to_owned()])?;
    let tls = Tls::trusting(certificate.chain())?;
    let server = Measurable::start(options, program, &backend, &certificate)?;
    let mut samples = Vec::new();
    for job in Job::ALL.into_iter().filter(|job| job.is_for(program)) {
        let fault = |error: std::io::Error| format!("{}: {}: {error}", program.label, job.title());
        let address = server.address(job);
        if job == Job::Tunnels {
            let kib = tunnel_kib(server.root(job), address).map_err(fault)?;
            samples.push(Sample { job, server: kib, both: 0.0, per_second: 0.0 });
            continue;
        }
        let cores = [options.server_core, options.client_core];
        let (cpu, busy, begun) = (cpu_time(server.root(job)), CoreTime::read(&cores), Instant::now());
        let end = begun + options.run_time;
        let counted = match job {
            Job::Exchanges => clients::exchanges(address, end),
            Job::ShortConnections => clients::short_connections(address, end, &FineHistogram::default()),
            Job::Bulk => clients::bulk(address, &backend),
            Job::TlsExchanges => clients::tls_exchanges(address, end, &tls),
            Job::TlsBulk => clients::tls_bulk(address, &backend, &tls),
            Job::Questions => clients::questions(address, end),
            Job::Flow => clients::flow_of(address, end, false, &backend),
            Job::FlowInSegments => clients::flow_of(address, end, true, &backend),
            Job::Tunnels => unreachable!("it has been measured above"),
        };
        let unit = if matches!(job, Job::Bulk | Job::TlsBulk) { 1e3 } else { 1e6 };
        let count = counted.map_err(fault)?.max(1) as f64;
        let elapsed = begun.elapsed().as_secs_f64();
        let both = CoreTime::read(&cores).busy_since(busy).as_secs_f64();
        let own = cpu_time(server.root(job)).saturating_sub(cpu).as_secs_f64();
        samples.push(Sample {
            job,
            server: own * unit / count,
            both: both * unit / count,
            per_second: count / elapsed,
        });
    }
    Ok(samples)
}

/// Returns the growth of the PSS per tunnel that has carried a message.
fn tunnel_kib(root: Process, address: SocketAddr) -> std::io::Result<f64> {
    let open = |count: usize| (0..count).map(|_| clients::tunnel(address)).collect::<std::io::Result<Vec<_>>>();
    let pss = || Memory::read(&root.tree()).pss_kib as f64;
    drop(open(WARM_UP_TUNNELS)?);
    let before = pss();
    let tunnels = open(TUNNELS)?;
    Ok((pss() - before) / tunnels.len() as f64)
}

/// Measures two workers with this distribution of connections, and two clients.
fn measure_way(options: &Options, program: &Program, way: Accepting) -> Result<WaySample, String> {
    let cores = vec![options.server_core, options.client_core];
    pin(&cores);
    let backend = Backend::start(options.client_core);
    let port = free_port()?;
    let reuseport = if way == Accepting::Reuseport { " reuseport" } else { "" };
    let blocks = format!("stream {{ server {{ listen 127.0.0.1:{port}{reuseport}; proxy_pass {}; }} }}", backend.echo);
    let setting = Setting { cores: Some(cores), blocks, workers: 2, accepting: way, ..Setting::default() };
    let server = program.start(setting)?;
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let times = FineHistogram::default();
    let (cpu, begun) = (cpu_time(server.root), Instant::now());
    let end = begun + options.run_time;
    let counted = std::thread::scope(|scope| {
        let clients = [(); 2].map(|()| scope.spawn(|| clients::short_connections(address, end, &times)));
        clients.into_iter().map(|client| client.join().expect("it does not panic")).sum::<std::io::Result<u64>>()
    });
    let count = counted.map_err(|error| format!("{}: {}: {error}", program.label, way.name()))?.max(1) as f64;
    Ok(WaySample {
        way,
        server_us: cpu_time(server.root).saturating_sub(cpu).as_secs_f64() * 1e6 / count,
        per_second: count / begun.elapsed().as_secs_f64(),
        p99_us: times.snapshot().quantile(0.99).as_secs_f64() * 1e6,
    })
}

fn cpu_time(root: Process) -> Duration {
    root.tree().into_iter().map(Process::cpu_time).sum()
}

fn pin(cores: &[usize]) {
    let mut only = CpuSet::new();
    cores.iter().for_each(|core| only.set(*core));
    // Without pinning the figures are worse, but not wrong.
    let _ = sched_setaffinity(None, &only);
}

struct Ports {
    exchange: u16,
    discard: u16,
    tls_exchange: u16,
    tls_discard: u16,
    question: u16,
    flow: u16,
}

/// The measured server, or the relays of the floor. They are stopped on drop.
enum Measurable {
    Server(Box<crate::servers::Running>, Ports),
    Floor { exchange: Relay, discard: Relay, question: Relay, flow: Relay },
}

impl Measurable {
    fn start(
        options: &Options,
        program: &Program,
        backend: &Backend,
        certificate: &Certificate,
    ) -> Result<Measurable, String> {
        if program.kind == Kind::Floor {
            let driver = program.driver.as_deref().unwrap_or("epoll");
            let start = |way: &str, backend: SocketAddr, bytes: usize| {
                Relay::start(options.server_core, program, way, backend.port(), bytes)
            };
            return Ok(Measurable::Floor {
                exchange: start(driver, backend.echo, MESSAGE_BYTES)?,
                discard: start(driver, backend.sink, MESSAGE_BYTES)?,
                question: start("questions", backend.answers, MESSAGE_BYTES)?,
                flow: start("flow", backend.counts, DATAGRAM_BYTES)?,
            });
        }
        let ports = Ports {
            exchange: free_port()?,
            discard: free_port()?,
            tls_exchange: free_port()?,
            tls_discard: free_port()?,
            question: free_port()?,
            flow: free_port()?,
        };
        let blocks = match program.kind {
            Kind::Haproxy => haproxy_blocks(&ports, backend, certificate),
            _ => nginx_blocks(&ports, backend, certificate),
        };
        let cores = Some(vec![options.server_core]);
        let setting = Setting { cores, blocks, connections_max: TUNNELS_MAX, ..Setting::default() };
        Ok(Measurable::Server(Box::new(program.start(setting)?), ports))
    }

    fn root(&self, job: Job) -> Process {
        match self {
            Measurable::Server(server, _) => server.root,
            Measurable::Floor { .. } => self.relay(job).expect("it is a floor").process,
        }
    }

    fn relay(&self, job: Job) -> Option<&Relay> {
        let Measurable::Floor { exchange, discard, question, flow } = self else { return None };
        Some(match job {
            Job::Bulk => discard,
            Job::Questions => question,
            Job::Flow | Job::FlowInSegments => flow,
            _ => exchange,
        })
    }

    fn address(&self, job: Job) -> SocketAddr {
        let port = match self {
            Measurable::Floor { .. } => self.relay(job).expect("it is a floor").port,
            Measurable::Server(_, ports) => match job {
                Job::Exchanges | Job::ShortConnections | Job::Tunnels => ports.exchange,
                Job::Bulk => ports.discard,
                Job::TlsExchanges => ports.tls_exchange,
                Job::TlsBulk => ports.tls_discard,
                Job::Questions => ports.question,
                Job::Flow | Job::FlowInSegments => ports.flow,
            },
        };
        SocketAddr::from(([127, 0, 0, 1], port))
    }
}

fn nginx_blocks(ports: &Ports, backend: &Backend, certificate: &Certificate) -> String {
    let server = |port: u16, parameter: &str, to: SocketAddr, more: &str| {
        format!("    server {{ listen 127.0.0.1:{port}{parameter}; proxy_pass {to}; {more} }}\n")
    };
    // One group for all servers, so that all do the same work.
    let tls = format!(
        "ssl_ecdh_curve X25519; ssl_certificate {}; ssl_certificate_key {};",
        certificate.chain().display(),
        certificate.key().display()
    );
    [
        "stream {\n".to_owned(),
        server(ports.exchange, "", backend.echo, ""),
        server(ports.discard, "", backend.sink, ""),
        server(ports.tls_exchange, " ssl", backend.echo, &tls),
        server(ports.tls_discard, " ssl", backend.sink, &tls),
        server(ports.question, " udp", backend.answers, "proxy_responses 1;"),
        server(ports.flow, " udp", backend.counts, "proxy_timeout 5s;"),
        "}\n".to_owned(),
    ]
    .concat()
}

/// haproxy does not proxy UDP.
fn haproxy_blocks(ports: &Ports, backend: &Backend, certificate: &Certificate) -> String {
    let listen = |name: &str, port: u16, parameters: &str, to: SocketAddr| {
        format!("listen {name}\n    bind 127.0.0.1:{port}{parameters}\n    server one {to}\n")
    };
    let tls = format!(" ssl crt {} curves X25519", certificate.both().display());
    [
        "defaults\n    mode tcp\n    timeout client 3600s\n    timeout server 3600s\n    timeout connect 5s\n"
            .to_owned(),
        listen("exchange", ports.exchange, "", backend.echo),
        listen("discard", ports.discard, "", backend.sink),
        listen("tls-exchange", ports.tls_exchange, &tls, backend.echo),
        listen("tls-discard", ports.tls_discard, &tls, backend.sink),
    ]
    .concat()
}

/// A floor. It is stopped on drop.
struct Relay {
    port: u16,
    process: Process,
    child: Child,
}

impl Relay {
    /// Starts the relay and waits until it listens.
    fn start(core: usize, program: &Program, way: &str, backend: u16, bytes: usize) -> Result<Relay, String> {
        let port = free_port()?;
        let mut command = Command::new(&program.binary);
        command.args(["relay", &port.to_string(), way, &backend.to_string(), &bytes.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let mut child = process::spawn_pinned(&mut command, &[core])?;
        let deadline = Instant::now() + START_TIME_LIMIT;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            if Instant::now() >= deadline || child.try_wait().ok().flatten().is_some() {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("{} does not listen", program.label));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        let process = Process::find(child.id()).ok_or_else(|| format!("{} ended at once", program.label))?;
        Ok(Relay { port, process, child })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
