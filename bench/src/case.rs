//! case: a workload for the servers, and one run of it, which yields a sample for the tables.
//!
//! The main figure is the CPU time of all processes of the server divided by the number of answered requests. It is
//! valid whether or not the server's core is saturated. The utilisation of each side's core shows which side was the
//! limit, and the load of all cores is recorded, too.

use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use crate::backend::Backend;
use crate::certificate::Certificate;
use crate::client::{self, ClientKind, Figures, Headers};
use crate::grpc::Grpc;
use crate::interpreter::{Interpreter, Language, OneRequest};
use crate::location::{self, Page};
use crate::options::Options;
use crate::process::{self, CoreTime, Process, Thread, Threads};
use crate::report::Spread;
use crate::servers::{Accepting, FILE_BYTES, Handshakes, Kind, Program, Running, SMALL_BODY, Setting};

/// Duration of the first run, which fills caches and is not counted.
pub const WARM_UP_TIME: Duration = Duration::from_secs(1);

/// Longest body that the io_uring floor sends at once.
const FLOOR_RING_BODY_MAX: usize = 16 * 1024;

/// Connections to an application in PHP or Python, which has fewer processes.
const APPLICATION_CONNECTIONS: u32 = 16;

/// Path that is answered from a cache.
const FOUND_PATH: &str = "/cached";

/// A cache in the server's own folder. `max_size` evicts the responses of `/stored`, which are never read.
const CACHE: &str = "proxy_cache_path cache levels=1:2 keys_zone=cache:64m max_size=256m inactive=1h;";
const CACHED_LOCATIONS: &str = "\
    location = /cached { proxy_pass http://backend; proxy_http_version 1.1; proxy_set_header Connection \"\"; \
    proxy_cache cache; proxy_cache_valid 200 1h; }\n        \
    location = /stored { proxy_pass http://backend; proxy_http_version 1.1; proxy_set_header Connection \"\"; \
    proxy_cache cache; proxy_cache_valid 200 1h; proxy_cache_key $request_id; }";

#[derive(Debug, Clone)]
pub struct Directives {
    pub http: String,
    pub server: String,
}

/// A workload.
#[derive(Debug, Clone)]
pub struct Case {
    pub name: &'static str,
    pub title: String,
    pub path: &'static str,
    pub headers: Headers,
    pub connections: u32,
    pub is_short: bool,
    pub body_bytes: usize,
    /// One of [`location::PAGES`], which only nginx and Gale support.
    pub is_page: bool,
    /// nginx directives for the http block and the server block, for nginx and Gale.
    pub directives: Option<Directives>,
    /// Request of the floor to the backend, over a new connection each time.
    pub floor_request: Option<OneRequest>,
    /// TLS certificate; without one the requests are in the clear.
    pub certificate: Option<Arc<Certificate>>,
    pub handshakes: Handshakes,
    /// Backend of proxied requests.
    pub backend: Option<Rc<Backend>>,
    /// Keeps the application running while a case needs it.
    pub _interpreter: Option<Rc<Interpreter>>,
    pub grpc: Option<Rc<Grpc>>,
    pub client: ClientKind,
    /// Event loops of the server.
    pub workers: usize,
    pub clients: usize,
    pub server_cores: Vec<usize>,
    pub client_cores: Vec<usize>,
}

impl Case {
    /// `return 200` over keep-alive connections.
    pub fn keepalive(options: &Options, client: ClientKind, connections: u32) -> Case {
        let asked_by = if client == ClientKind::Lean { ", lean client" } else { "" };
        Case {
            name: "return",
            title: format!("2-byte answer, {connections} keep-alive connections{asked_by}"),
            path: "/return",
            headers: &[],
            connections,
            is_short: false,
            body_bytes: SMALL_BODY.len(),
            is_page: false,
            directives: None,
            floor_request: None,
            certificate: None,
            handshakes: Handshakes::default(),
            backend: None,
            _interpreter: None,
            grpc: None,
            client,
            workers: 1,
            clients: 1,
            server_cores: vec![options.server_core],
            client_cores: vec![options.client_core],
        }
    }

    /// A file of 1 KiB over keep-alive connections.
    pub fn file(options: &Options, client: ClientKind, connections: u32) -> Case {
        let mut case = Case::keepalive(options, client, connections);
        case.title = case.title.replace("2-byte answer", "1 KiB file");
        Case { name: "file", path: "/file", body_bytes: FILE_BYTES, ..case }
    }

    /// A page from a typical location, or a compressed one.
    pub fn page(options: &Options, client: ClientKind, page: Page) -> Case {
        let case = Case::keepalive(options, client, options.connections[0]);
        let title = case.title.replace("2-byte answer", page.title);
        Case {
            name: page.name,
            path: page.path,
            headers: page.headers,
            body_bytes: page.bytes,
            title,
            is_page: true,
            ..case
        }
    }

    /// A file of this size. Only wrk supports short connections.
    pub fn sized_file(
        options: &Options,
        client: ClientKind,
        name: &'static str,
        path: &'static str,
        body_bytes: usize,
        is_short: bool,
    ) -> Case {
        let case =
            if is_short { Case::short(options) } else { Case::keepalive(options, client, options.connections[0]) };
        let size = if body_bytes < 1 << 20 {
            format!("{} KiB", body_bytes >> 10)
        } else {
            format!("{} MiB", body_bytes >> 20)
        };
        Case { name, path, body_bytes, title: case.title.replace("2-byte answer", &format!("{size} file")), ..case }
    }

    /// `return 200`, one request per connection. Only wrk supports that.
    pub fn short(options: &Options) -> Case {
        let connections = options.short_connections;
        Case {
            name: "short",
            title: format!("2-byte answer, short connections, {connections} at a time"),
            connections,
            is_short: true,
            ..Case::keepalive(options, ClientKind::Wrk, connections)
        }
    }

    /// A path over HTTP/2 in the clear, with this many concurrent streams on each of 16 connections.
    pub fn http2(options: &Options, name: &'static str, path: &'static str, body_bytes: usize, streams: u32) -> Case {
        let title = format!("HTTP/2, {body_bytes} bytes, 16 connections × {streams} streams");
        let client = ClientKind::H2load(streams);
        Case { name, title, path, body_bytes, ..Case::keepalive(options, client, 16) }
    }

    /// Unary gRPC calls proxied to an HTTP/2 server, with many concurrent streams on each of 16 connections.
    pub fn grpc(options: &Options, grpc: Rc<Grpc>, streams: u32) -> Case {
        let title = format!("gRPC, unary calls, 16 connections × {streams} streams");
        let headers = &["content-type: application/grpc", "te: trailers"];
        let case = Case::http2(options, "grpc", "/grpc", Grpc::ANSWER.len(), streams);
        Case { title, headers, directives: Some(grpc.directives()), grpc: Some(grpc), ..case }
    }

    /// A request proxied to `backend`, which always sends the same answer.
    pub fn proxied(
        options: &Options,
        client: ClientKind,
        name: &'static str,
        path: &'static str,
        backend: Rc<Backend>,
        connections: u32,
    ) -> Case {
        let body_bytes = backend.body_bytes;
        let case = Case::keepalive(options, client, connections);
        let how = if path == "/unbuffered" { "proxied unbuffered" } else { "proxied" };
        let title = case.title.replace("2-byte answer", &format!("{how}, {body_bytes} bytes"));
        Case { name, title, path, body_bytes, backend: Some(backend), ..case }
    }

    /// 2 bytes from an application, over a new connection to it for each request, as is common. Returns `None` if it is
    /// not installed.
    pub fn application(options: &Options, client: ClientKind, language: Language) -> Result<Option<Case>, String> {
        let (name, path, what) = match language {
            Language::Php => ("fastcgi", "/fastcgi", "PHP-FPM by FastCGI"),
            Language::Python => ("uwsgi", "/uwsgi", "uWSGI by uwsgi"),
        };
        let Some(interpreter) = Interpreter::start(language, options.client_core)? else { return Ok(None) };
        let case = Case::keepalive(options, client, APPLICATION_CONNECTIONS);
        Ok(Some(Case {
            name,
            path,
            title: case.title.replace("2-byte answer", &format!("2-byte answer of {what}")),
            directives: Some(Directives { http: String::new(), server: interpreter.location(path) }),
            floor_request: Some(interpreter.for_floor()?),
            _interpreter: Some(Rc::new(interpreter)),
            ..case
        }))
    }

    /// 2 bytes from a backend, for those of these cases that are requested by name.
    pub fn passed_on_if_chosen(options: &Options, client: ClientKind, connections: u32) -> Result<Vec<Case>, String> {
        let is_chosen = |name: &str| options.cases.iter().flatten().any(|case| case == name);
        let mut cases = Vec::new();
        if is_chosen("proxied") {
            let backend = Backend::start(options.client_core, SMALL_BODY.len())?;
            cases.push(Case::proxied(options, client, "proxied", "/proxied", backend, connections));
        }
        for (name, language) in [("fastcgi", Language::Php), ("uwsgi", Language::Python)] {
            if is_chosen(name) {
                let case = Case::application(options, client, language)?;
                cases.push(case.ok_or_else(|| format!("{language:?} is not installed"))?);
            }
        }
        Ok(cases)
    }

    /// Proxied responses with a cache: `/cached` is a hit except the first time, `/stored` is always a miss.
    pub fn cached(
        options: &Options,
        client: ClientKind,
        name: &'static str,
        path: &'static str,
        backend: Rc<Backend>,
        connections: u32,
    ) -> Case {
        let how = if path == "/stored" { "stored" } else { "found" };
        let case = Case::proxied(options, client, name, path, backend, connections);
        let directives = Some(Directives { http: CACHE.to_owned(), server: CACHED_LOCATIONS.to_owned() });
        Case { title: format!("{}, {how}", case.title.replace("proxied", "cached")), directives, ..case }
    }

    pub fn over_tls(self, name: &'static str, certificate: &Arc<Certificate>) -> Case {
        let title = format!("{}, TLS", self.title);
        Case { name, title, certificate: Some(Arc::clone(certificate)), ..self }
    }

    /// Returns the case with this many workers and two clients, all on both cores.
    pub fn on_all_cores(self, options: &Options, workers: usize) -> Case {
        let cores = vec![options.server_core, options.client_core];
        let plural = if workers == 1 { "" } else { "s" };
        Case {
            title: format!("{}, {workers} worker{plural}, 2 clients, together on both cores", self.title),
            workers,
            clients: 2,
            server_cores: cores.clone(),
            client_cores: cores,
            ..self
        }
    }

    /// Returns the servers that this case compares. Features with a large effect that are not a server's default are
    /// measured with and without: the cache of open files, and deferred accept, which is the default of h2o.
    pub fn programs(&self, programs: &[Program]) -> Vec<Program> {
        let mut all = Vec::new();
        for program in programs {
            let is_floor = program.kind == Kind::Floor && self.floor_request.is_some();
            // Cache hits need no directives for the other servers. Their floor is that of servers with directives.
            let may_find = self.is_found() && matches!(program.kind, Kind::Floor | Kind::Haproxy | Kind::Varnish);
            let is_configured = is_floor || matches!(program.kind, Kind::Nginx | Kind::Gale) || may_find;
            if (self.is_page || self.directives.is_some()) && !is_configured {
                continue;
            }
            if self.certificate.is_some() && program.kind == Kind::Floor {
                continue; // no TLS
            }
            if self.handshakes.are_hybrid && !program.has_hybrid_keys {
                continue;
            }
            let is_http2 = matches!(self.client, ClientKind::H2load(_));
            if is_http2 && matches!(program.kind, Kind::Floor | Kind::Haproxy) {
                continue; // HTTP/1 only
            }
            if program.kind == Kind::Floor && self.is_short && self.backend.is_some() {
                continue; // a relay cannot detect the end of a response
            }
            if program.kind == Kind::Floor && self.workers > 1 {
                continue; // it has one thread
            }
            let is_ring = program.driver.as_deref() == Some("io_uring");
            if program.kind == Kind::Floor && is_ring && self.body_bytes > FLOOR_RING_BODY_MAX {
                continue; // it sends once, and a socket holds no more
            }
            if program.kind == Kind::Haproxy && self.body_bytes > FILE_BYTES && self.backend.is_none() {
                continue; // it has only that file in memory
            }
            all.push(program.clone());
            let may_cache = program.kind == Kind::Nginx || (program.kind == Kind::Gale && self.name != "file");
            if self.backend.is_some() {
                continue; // no file, and no reason to defer
            }
            if self.path.starts_with("/file") && may_cache {
                let label = format!("{} + open_file_cache", program.label);
                all.push(Program { label, open_file_cache: true, ..program.clone() });
            }
            let may_wait = self.is_short && self.path == "/return" && self.certificate.is_none();
            if may_wait && matches!(program.kind, Kind::Floor | Kind::Nginx | Kind::Gale) {
                let label = format!("{} + deferred", program.label);
                all.push(Program { label, deferred: true, ..program.clone() });
            }
        }
        all
    }

    fn is_found(&self) -> bool {
        self.path == FOUND_PATH
    }

    pub fn setting(&self) -> Setting {
        Setting {
            is_short: self.is_short,
            cores: Some(self.server_cores.clone()),
            floor_body_bytes: self.body_bytes,
            workers: self.workers,
            accepting: Accepting::Shared,
            backend: self.backend.as_ref().map(|backend| backend.port),
            floor_request: self.floor_request.clone(),
            caches: self.is_found(),
            certificate: self.certificate.clone(),
            handshakes: self.handshakes,
            ..match (&self.directives, self.client) {
                _ if self.is_page => location::setting(),
                (Some(Directives { http, server }), _) => {
                    Setting { http: http.clone(), server: server.clone(), ..Setting::default() }
                }
                (None, ClientKind::H2load(_)) => Setting { http: "http2 on;".to_owned(), ..Setting::default() },
                (None, ClientKind::Wrk | ClientKind::Lean | ClientKind::Handshakes) => Setting::default(),
            }
        }
    }

    fn run<'a>(&'a self, servers: &'a [Running], run_time: Duration) -> client::Run<'a> {
        client::Run {
            kind: self.client,
            addresses: servers
                .iter()
                .map(|server| server.tls_address.as_ref().unwrap_or(&server.address))
                .map(String::as_str)
                .collect(),
            path: self.path,
            headers: self.headers,
            body: self.grpc.as_ref().map(|grpc| grpc.body.as_path()),
            connections: self.connections,
            is_short: self.is_short,
            certificate: self.certificate.as_ref().map(|certificate| certificate.chain()),
            run_time,
            clients: self.clients,
            cores: &self.client_cores,
        }
    }
}

/// One run against one server.
#[derive(Debug, Clone, Serialize)]
pub struct Sample {
    /// CPU time of the server per request, in microseconds.
    pub server_us: f64,
    pub client_us: f64,
    /// Busy time of the cores of both sides, whatever ran on them, per request.
    pub cores_us: f64,
    /// CPU time of each side as a share of one core: 1.0 is a saturated core.
    pub server_utilisation: f64,
    pub client_utilisation: f64,
    /// Load of the server's cores, whatever ran on them.
    pub server_cores_busy: f64,
    /// Voluntary and involuntary context switches of the server's threads per 1,000 requests.
    pub voluntary_switches: f64,
    pub involuntary_switches: f64,
    /// Share of the busiest worker in the workers' CPU time; an even distribution is 1 / workers.
    pub busiest_worker: f64,
    #[serde(flatten)]
    pub figures: Figures,
}

/// Runs the clients for `run_time`. If `under` is given, that command starts the first of them.
pub fn measure_once(
    case: &Case,
    server: &Running,
    run_time: Duration,
    under: Option<Command>,
) -> Result<Sample, String> {
    measure_together(case, std::slice::from_ref(server), run_time, under)
}

/// Measures several servers that share the clients, as if they were one.
fn measure_together(
    case: &Case,
    servers: &[Running],
    run_time: Duration,
    under: Option<Command>,
) -> Result<Sample, String> {
    let trees = || servers.iter().flat_map(|server| server.root.tree()).collect::<Vec<Process>>();
    let processes = trees();
    let before = Reading::take(case, &processes);
    let (figures, client) = client::run(&case.run(servers, run_time), under)?;
    let after = Reading::take(case, &processes);
    if trees() != processes {
        return Err(format!("{}: its processes changed during the run", servers[0].label));
    }
    let threads = after.threads_since(&before);
    let server_time: Duration = threads.iter().map(|thread| thread.cpu_time).sum();
    let per_request = |time: Duration| time.as_secs_f64() * 1e6 / figures.requests as f64;
    let share = |time: Duration| time.as_secs_f64() / figures.duration().as_secs_f64();
    let per_thousand =
        |count: fn(&Thread) -> u64| threads.iter().map(count).sum::<u64>() as f64 * 1000.0 / figures.requests as f64;
    let workers = busiest(&threads, case.workers);
    Ok(Sample {
        server_us: per_request(server_time),
        client_us: per_request(client),
        cores_us: per_request(after.all_cores.busy_since(before.all_cores)),
        server_utilisation: share(server_time),
        client_utilisation: share(client),
        server_cores_busy: after.server_cores.utilisation_since(before.server_cores),
        voluntary_switches: per_thousand(|thread| thread.voluntary_switches),
        involuntary_switches: per_thousand(|thread| thread.involuntary_switches),
        busiest_worker: workers[0] / workers.iter().sum::<f64>().max(f64::MIN_POSITIVE),
        figures,
    })
}

struct Reading {
    threads: Threads,
    server_cores: CoreTime,
    all_cores: CoreTime,
}

impl Reading {
    fn take(case: &Case, processes: &[Process]) -> Reading {
        let mut all_cores = [case.server_cores.clone(), case.client_cores.clone()].concat();
        all_cores.sort_unstable();
        all_cores.dedup();
        Reading {
            threads: process::threads(processes),
            server_cores: CoreTime::read(&case.server_cores),
            all_cores: CoreTime::read(&all_cores),
        }
    }

    fn threads_since(&self, earlier: &Reading) -> Vec<Thread> {
        let before = |id: &u32| earlier.threads.get(id).copied().unwrap_or_default();
        self.threads.iter().map(|(id, thread)| thread.since(before(id))).collect()
    }
}

/// Returns the CPU seconds of the busiest threads, one per worker.
fn busiest(threads: &[Thread], workers: usize) -> Vec<f64> {
    let mut seconds: Vec<f64> = threads.iter().map(|thread| thread.cpu_time.as_secs_f64()).collect();
    seconds.sort_by(|a, b| b.total_cmp(a));
    seconds.resize(workers, 0.0);
    seconds
}

#[derive(Debug, Clone)]
pub struct Subject {
    pub program: Program,
    pub setting: Setting,
    /// Instances of the server; the clients use them in turn.
    pub servers: usize,
}

impl Subject {
    pub fn new(program: &Program, setting: Setting) -> Subject {
        Subject { program: program.clone(), setting, servers: 1 }
    }

    fn start(&self) -> Result<Vec<Running>, String> {
        (0..self.servers).map(|_| self.program.start(self.setting.clone())).collect()
    }
}

/// All samples of a server.
#[derive(Debug, Serialize)]
pub struct Row {
    pub server: String,
    pub samples: Vec<Sample>,
    #[serde(skip)]
    pub program: Program,
}

impl Row {
    pub fn spread(&self, figure: impl Fn(&Sample) -> f64) -> Spread {
        Spread::of(self.samples.iter().map(figure))
    }

    pub fn median(&self, figure: impl Fn(&Sample) -> f64) -> f64 {
        self.spread(figure).median
    }

    pub fn errors(&self) -> u64 {
        self.samples.iter().map(|sample| sample.figures.errors).sum()
    }
}

/// Measures the servers of a case in turn, repeatedly, so that drift of the machine affects all alike.
pub fn measure_in_turn(options: &Options, case: &Case, subjects: &[Subject]) -> Result<Vec<Row>, String> {
    // All run from the beginning; those without clients are asleep.
    let running: Vec<Vec<Running>> = subjects.iter().map(Subject::start).collect::<Result<_, _>>()?;
    eprintln!("{}:", case.title);
    // The first, short round fills caches and is not counted.
    for servers in &running {
        measure_together(case, servers, WARM_UP_TIME, None)?;
    }
    let samples = in_turn(options.rounds, &running, |servers, round| {
        let sample = measure_together(case, servers, options.run_time, None)?;
        eprintln!("  round {round}, {}: {:.2} µs", servers[0].label, sample.server_us);
        Ok(sample)
    })?;
    let row = |(subject, samples): (&Subject, Vec<Sample>)| Row {
        server: subject.program.label.clone(),
        samples,
        program: subject.program.clone(),
    };
    Ok(subjects.iter().zip(samples).map(row).collect())
}

/// Calls `measure` for A B C A B C … and returns the results by item and round.
pub fn in_turn<T, S>(
    rounds: u32,
    items: &[T],
    mut measure: impl FnMut(&T, u32) -> Result<S, String>,
) -> Result<Vec<Vec<S>>, String> {
    let mut samples: Vec<Vec<S>> = items.iter().map(|_| Vec::new()).collect();
    for round in 1..=rounds {
        for (item, samples) in items.iter().zip(&mut samples) {
            samples.push(measure(item, round)?);
        }
    }
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_go_in_turn() {
        let mut order = Vec::new();
        let samples = in_turn(2, &['a', 'b'], |&item, round| {
            order.push((round, item));
            Ok(round)
        });
        assert_eq!(samples.unwrap(), [[1, 2], [1, 2]]);
        assert_eq!(order, [(1, 'a'), (1, 'b'), (2, 'a'), (2, 'b')]);
    }

    #[test]
    fn the_workers_are_the_threads_that_work() {
        let thread = |ms| Thread { cpu_time: Duration::from_millis(ms), ..Thread::default() };
        assert_eq!(busiest(&[thread(1), thread(300), thread(100)], 2), [0.3, 0.1]);
        assert_eq!(busiest(&[thread(300)], 2), [0.3, 0.0]);
    }
}
