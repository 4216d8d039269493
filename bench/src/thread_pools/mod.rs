//! thread-pools: the well-known experiment with thread pools, in a more difficult form.
//!
//! There is more data than memory, and a slow disk. Client 1 requests random files of 4 MiB over 200 connections,
//! mostly from disk. Client 2 requests one file in memory over 50 connections. A probe requests two bytes every 20 ms.
//! A server that waits for the disk on its event loop starves client 2 and the probe; one that uses a pool for all
//! reads lets client 2 wait behind client 1. Each server runs in a control group, and a reload changes `aio`, as in the
//! article (nginx.com, "Thread Pools in NGINX Boost Performance 9x!").
//!
//! `slow-ranges` and `cold-tree` use the same tools for slow clients of a large file and for a tree of small cold
//! files. `rare-files` and `late` request files in memory beside client 1, rarely or after seconds.

mod chart;
pub mod confine;
pub mod data_set;
pub mod files;
pub mod late;
pub mod rare;
mod rounds;
pub mod waits;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::Measured;
use crate::certificate::Certificate;
use crate::client::load;
use crate::client::swarm::{self, Got, Swarm};
use crate::options::Options;
use crate::process::{Process, ThreadId};
use crate::report::{self, Document, Spread};
use crate::servers::{Kind, Program, Running, Setting};
use chart::{Bars, Chart, Panel};
use confine::{Cage, SmallDisk};
use data_set::{DataSet, Random};

/// As in the article.
const CLIENT_1_CONNECTIONS: usize = 200;
const CLIENT_2_CONNECTIONS: usize = 50;

/// Time before counting in each run, in which caches and queues fill.
const WARM_UP: Duration = Duration::from_secs(3);

const RELOAD_TIME_LIMIT: Duration = Duration::from_secs(10);

/// Targets for Gale's default.
const CLIENT_2_SHARE_MIN: f64 = 0.8;
const CLIENT_2_P99_MAX: f64 = 1.5;
const PROBE_P99_GROWTH_MAX_MS: f64 = 10.0;
const DISK_SHARE_MIN: f64 = 0.95;

/// Size and options of the experiment.
#[derive(Debug, Clone)]
pub struct Experiment {
    pub data_mib: u64,
    /// Memory of the server with its page cache; three eighths of the data by default.
    pub memory_mib: Option<u64>,
    pub disk_mib_per_second: u64,
    /// Use a disk with a tiny queue in place of the directory's own.
    pub on_small_disk: bool,
    pub is_over_tls: bool,
    pub directory: PathBuf,
    pub workers: usize,
    pub tree_files: usize,
    pub cache_entries: usize,
    pub slow_clients: usize,
    pub range_file_mib: u64,
}

impl Default for Experiment {
    fn default() -> Self {
        Experiment {
            data_mib: 4096,
            memory_mib: None,
            disk_mib_per_second: 100,
            on_small_disk: false,
            is_over_tls: false,
            directory: std::env::temp_dir(),
            workers: 2,
            tree_files: 200_000,
            cache_entries: 1_000_000,
            slow_clients: 1000,
            range_file_mib: 2048,
        }
    }
}

/// Names of the results: on the directory's own disk, on the one with a tiny queue, and over TLS.
const NAMES: [&str; 3] = ["thread-pools", "thread-pools-small-disk", "thread-pools-tls"];

impl Experiment {
    fn name(&self) -> &'static str {
        NAMES[if self.is_over_tls { 2 } else { usize::from(self.on_small_disk) }]
    }

    fn memory_bytes(&self) -> u64 {
        self.memory_mib.unwrap_or(self.data_mib * 3 / 8) << 20
    }

    fn disk_bytes_per_second(&self) -> u64 {
        self.disk_mib_per_second << 20
    }
}

/// Files and control group of the experiment; dropped in this order.
struct Site {
    cage: Cage,
    disk: Option<SmallDisk>,
    directory: PathBuf,
}

impl Site {
    fn build(experiment: &Experiment, bytes: u64) -> Result<Site, String> {
        let directory = experiment.directory.join(format!("gale-bench-site-{}", std::process::id()));
        std::fs::create_dir_all(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
        let mut site = Site { cage: Cage::default(), disk: None, directory };
        let mut left_out = Vec::new();
        if experiment.on_small_disk {
            match SmallDisk::make(&site.directory, bytes + bytes / 8 + (64 << 20)) {
                Ok(disk) => site.disk = Some(disk),
                Err(error) => {
                    left_out.push(format!("No disk with a tiny queue ({error}): the directory's own is used."))
                }
            }
        }
        let device = confine::device_of(site.root());
        site.cage = Cage::build(experiment.memory_bytes(), device.as_slice(), experiment.disk_bytes_per_second());
        site.cage.left_out.extend(left_out);
        for sentence in &site.cage.left_out {
            eprintln!("note: {sentence}");
        }
        Ok(site)
    }

    /// Returns the folder for files.
    fn root(&self) -> &Path {
        self.disk.as_ref().map_or(&self.directory, |disk| &disk.mount_point)
    }

    /// Returns the settings of a server in the control group, with these directives in its `http` block and the files
    /// below `/files/`.
    fn setting(&self, workers: usize, http: String) -> Setting {
        Setting {
            workers,
            under: Some(self.cage.words()),
            http,
            server: format!("location /files/ {{ alias {}/; }}", self.root().display()),
            ..Setting::default()
        }
    }

    fn memory(&self, experiment: &Experiment) -> String {
        match self.cage.limits_memory {
            true => format!("{} MiB of memory for server and page cache", experiment.memory_bytes() >> 20),
            false => "all of the machine's memory".to_owned(),
        }
    }

    fn disk(&self, experiment: &Experiment) -> String {
        let read_ahead = confine::device_of(self.root()).and_then(confine::read_ahead_kib);
        let read_ahead = read_ahead.map_or(String::new(), |kib| format!(", the kernel reads {kib} KiB ahead"));
        let queue = if self.disk.is_some() { ", a disk of its own behind a queue of 4 requests" } else { "" };
        let speed = match self.cage.limits_disk {
            true => format!("reads held to {} MiB/s", experiment.disk_mib_per_second),
            false => "reads as quick as the disk".to_owned(),
        };
        format!("{speed}{queue}{read_ahead}")
    }

    fn notes(&self) -> String {
        let sentences: String =
            self.cage.left_out.iter().map(|sentence| format!("**Left out.** {sentence}\n\n")).collect();
        sentences
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        drop(self.disk.take());
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Run {
    client_2: Got,
    client_1: Option<Got>,
    probe: Got,
    /// Share of samples in which an event loop's thread waited for a disk (state D).
    waits_for_disk: f64,
}

/// A server with one value of `aio`.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    server: String,
    aio: String,
    #[serde(skip)]
    kind: Option<Kind>,
    without_client_1: Vec<Run>,
    with_client_1: Vec<Run>,
    /// Error log lines about stalls of over 20 ms that are the server's fault.
    stalls: Vec<String>,
    /// The server has reported that it does not support `aio`: its rows differ only by chance.
    ignores_aio: bool,
}

fn aio_values(kind: Kind) -> &'static [&'static str] {
    match kind {
        Kind::Nginx => &["off", "threads"],
        _ => &["off", "threads", "auto"],
    }
}

pub fn measure(options: &Options) -> Measured {
    let experiment = &options.experiment;
    let programs = with_aio(options.servers(Some(&["nginx", "gale"]))?)?;
    let site = Site::build(experiment, experiment.data_mib << 20)?;
    eprintln!("writing {} MiB to {}", experiment.data_mib, site.root().display());
    let data = DataSet::write(site.root(), experiment.data_mib << 20)?;
    let certificate = experiment.is_over_tls.then(|| Certificate::make(&["localhost".to_owned()])).transpose()?;
    let mut rows: Vec<Row> = Vec::new();
    for round in 1..=options.rounds {
        for program in &programs {
            measure_program(options, &site, &data, certificate.as_ref(), program, round, &mut rows)?;
        }
    }
    let document = document(experiment, &site, &programs, &rows)?;
    Ok((document.with_charts(charts(experiment.name(), &rows)), true))
}

fn with_aio(programs: Vec<Program>) -> Result<Vec<Program>, String> {
    let programs: Vec<Program> =
        programs.into_iter().filter(|program| matches!(program.kind, Kind::Nginx | Kind::Gale)).collect();
    if programs.is_empty() { Err("only nginx and Gale know aio".to_owned()) } else { Ok(programs) }
}

const HTTP: &str = "sendfile_max_chunk 512k;";

/// A server with its default `aio`, or with one named in its label.
#[derive(Debug)]
struct Subject {
    program: Program,
    http: String,
}

impl Subject {
    /// Returns the servers with their defaults, and nginx with a thread pool as well, since its default is to wait for
    /// the disk.
    fn by_default(programs: &[Program]) -> Vec<Subject> {
        let of_program = |program: &Program| {
            let mut subjects = vec![Subject { program: program.clone(), http: HTTP.to_owned() }];
            if program.kind == Kind::Nginx {
                let label = format!("{}, aio threads", program.label);
                let program = Program { label, ..program.clone() };
                subjects.push(Subject { program, http: format!("{HTTP} aio threads;") });
            }
            subjects
        };
        programs.iter().flat_map(of_program).collect()
    }

    /// Starts the server with workers that do not own the files, as on most sites.
    fn start(&self, site: &Site, workers: usize) -> Result<Running, String> {
        self.program.start(Setting { user: WORKER_USER, ..site.setting(workers, self.http.clone()) })
    }
}

/// User of the workers in `rare-files` and `late`; the files belong to root.
const WORKER_USER: &str = "www-data";

fn measure_program(
    options: &Options,
    site: &Site,
    data: &DataSet,
    certificate: Option<&Arc<Certificate>>,
    program: &Program,
    round: u32,
    rows: &mut Vec<Row>,
) -> Result<(), String> {
    let aio_values = aio_values(program.kind);
    let http = |aio: &str| format!("{HTTP} aio {aio};");
    let setting = site.setting(options.experiment.workers, http(aio_values[0]));
    let mut server = program.start(Setting { certificate: certificate.cloned(), ..setting })?;
    for (generation, aio) in (0..).zip(aio_values) {
        if generation > 0
            && let Err(error) = change(&mut server, http(aio), generation)
        {
            eprintln!("note: {}, aio {aio}: {error}", program.label);
            continue;
        }
        let logged = server.error_log().len();
        let [without, with] = [false, true].map(|with_client_1| run(options, &server, data, with_client_1));
        let (without, with) = (without?, with?);
        eprintln!(
            "  round {round}, {}, aio {aio}: client 2 {:.1} of {:.1} requests/s, probe p99 {:.1} of {:.1} ms",
            program.label,
            with.client_2.requests_per_second,
            without.client_2.requests_per_second,
            with.probe.p99_ms,
            without.probe.p99_ms
        );
        let log = server.error_log();
        let stalls = stalls(&log[logged..]);
        let ignores_aio = log.contains("\"aio\" directive is accepted but has no effect");
        let same = |row: &&mut Row| row.server == program.label && row.aio == *aio;
        match rows.iter_mut().find(same) {
            Some(row) => {
                row.without_client_1.push(without);
                row.with_client_1.push(with);
                row.stalls.extend(stalls);
            }
            None => rows.push(Row {
                server: program.label.clone(),
                aio: (*aio).to_owned(),
                kind: Some(program.kind),
                without_client_1: vec![without],
                with_client_1: vec![with],
                stalls,
                ignores_aio,
            }),
        }
    }
    Ok(())
}

/// Reloads, and waits until the new configuration is in effect.
fn change(server: &mut Running, http: String, generation: u32) -> Result<(), String> {
    server.set_http(http);
    server.reload(generation)?;
    let deadline = Instant::now() + RELOAD_TIME_LIMIT;
    loop {
        let answer = load::request_once(&server.address, "/generation", RELOAD_TIME_LIMIT);
        if answer.is_ok_and(|body| body == generation.to_string().as_bytes()) {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(format!("the reload has no effect\n{}", server.error_log_end()));
        }
        std::thread::sleep(crate::servers::POLL_INTERVAL);
    }
}

fn run(options: &Options, server: &Running, data: &DataSet, with_client_1: bool) -> Result<Run, String> {
    data.forget();
    let clients = Clients::of(server);
    clients.warm()?;
    let ends = AtomicBool::new(false);
    let run_time = options.run_time;
    std::thread::scope(|scope| {
        let client_1 = with_client_1.then(|| scope.spawn(|| clients.client_1(data, run_time, &ends)));
        let probe = scope.spawn(|| swarm::probe(&server.address, "/return", WARM_UP, &ends));
        let looks = scope.spawn(|| share_in_state_d(server.root, &ends));
        let client_2 = clients.client_2(WARM_UP, run_time, &ends);
        ends.store(true, Ordering::Relaxed);
        let ended = "a client does not panic";
        Ok(Run {
            client_2: client_2?,
            client_1: client_1.map(|client| client.join().expect(ended)).transpose()?,
            probe: probe.join().expect(ended)?,
            waits_for_disk: looks.join().expect(ended),
        })
    })
}

struct Clients<'a> {
    address: &'a str,
    certificate: Option<&'a Path>,
}

/// The file of the data set that client 2 requests, and client 1 does not.
const HOT_FILE: &str = "0";

impl Clients<'_> {
    /// Uses TLS if the server does.
    fn of(server: &Running) -> Clients<'_> {
        let address = server.tls_address.as_ref().unwrap_or(&server.address);
        Clients { address, certificate: server.certificate() }
    }

    /// Loads client 2's file into memory, charged to the server's control group.
    fn warm(&self) -> Result<(), String> {
        let goes_on = AtomicBool::new(false);
        self.swarm(2, &mut hot, Duration::ZERO, Duration::from_secs(1), &goes_on).run().map(drop)
    }

    /// Requests random files over 200 connections.
    fn client_1(&self, data: &DataSet, run_time: Duration, ends: &AtomicBool) -> Result<Got, String> {
        let mut random = Random(0x2545_f491_4f6c_dd1d);
        let mut any = |_: usize| get(&format!("/files/data/{}", 1 + random.below(data.files - 1)));
        self.swarm(CLIENT_1_CONNECTIONS, &mut any, WARM_UP, run_time, ends).run()
    }

    /// Requests one file, which is in memory, over 50 connections.
    fn client_2(&self, warm_up: Duration, run_time: Duration, ends: &AtomicBool) -> Result<Got, String> {
        self.swarm(CLIENT_2_CONNECTIONS, &mut hot, warm_up, run_time, ends).run()
    }

    fn swarm<'s>(
        &'s self,
        connections: usize,
        request: &'s mut (dyn FnMut(usize) -> String + Send),
        warm_up: Duration,
        run_time: Duration,
        ends: &'s AtomicBool,
    ) -> Swarm<'s> {
        Swarm {
            address: self.address,
            connections,
            request,
            warm_up,
            run_time,
            ends,
            bytes_per_second: None,
            asks_every: Duration::ZERO,
            certificate: self.certificate,
        }
    }
}

fn hot(_: usize) -> String {
    get(&format!("/files/data/{HOT_FILE}"))
}

pub fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n")
}

/// Returns the share of samples in which event loops waited for a disk.
fn share_in_state_d(root: Process, ends: &AtomicBool) -> f64 {
    const LOOK_EVERY: Duration = Duration::from_millis(5);
    let (mut looks, mut waiting) = (0u64, 0u64);
    // Listed once: to search for others each time would keep a core busy.
    let processes = root.tree();
    while !ends.load(Ordering::Relaxed) {
        for &process in &processes {
            for (_, name, state) in process.thread_states() {
                if is_event_loop(process, root, &name) {
                    looks += 1;
                    waiting += u64::from(state == 'D');
                }
            }
        }
        std::thread::sleep(LOOK_EVERY);
    }
    waiting as f64 / looks.max(1) as f64
}

/// Returns true if the thread is an event loop: Gale's are threads called "worker N", nginx's are processes.
pub fn is_event_loop(process: Process, root: Process, thread_name: &str) -> bool {
    thread_name.starts_with("worker ") || (thread_name == "nginx" && process != root)
}

pub fn event_loops(root: Process) -> Vec<ThreadId> {
    let of_process = |process: Process| {
        let threads = process.thread_states().into_iter();
        threads
            .filter(move |(_, name, _)| is_event_loop(process, root, name))
            .map(move |(thread, ..)| ThreadId { process, thread })
    };
    root.tree().into_iter().flat_map(of_process).collect()
}

/// Returns log lines about stalls of over 20 ms that were not the machine's fault.
pub fn stalls(log: &str) -> Vec<String> {
    const WORTH_MS: u64 = 20;
    let is_worth = |line: &&str| {
        let milliseconds = line.split_once(" stalled for ").and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
        milliseconds.is_some_and(|ms: u64| ms > WORTH_MS) && !line.contains(": preempted")
    };
    let text = |line: &str| line.split_once(": worker").map_or(line, |(_, text)| text).trim().to_owned();
    log.lines().filter(is_worth).map(text).collect()
}

impl Row {
    fn spread(runs: &[Run], figure: impl Fn(&Run) -> f64) -> Spread {
        Spread::of(runs.iter().map(figure))
    }

    fn with(&self, figure: impl Fn(&Run) -> f64) -> f64 {
        Row::spread(&self.with_client_1, figure).median
    }

    fn without(&self, figure: impl Fn(&Run) -> f64) -> f64 {
        Row::spread(&self.without_client_1, figure).median
    }

    fn label(&self) -> String {
        format!("{}, aio {}", self.server, self.aio)
    }

    /// Returns client 1's throughput in bytes per second.
    fn client_1_bytes(&self) -> f64 {
        self.with(|run| run.client_1.map_or(0.0, |got| got.bytes_per_second))
    }

    fn network_bytes(&self) -> f64 {
        self.client_1_bytes() + self.with(|run| run.client_2.bytes_per_second)
    }

    /// Returns the targets, each with whether it is met.
    fn targets(&self, disk_bytes_per_second: u64) -> Vec<(&'static str, bool)> {
        let requests = |run: &Run| run.client_2.requests_per_second;
        let p99 = |run: &Run| run.client_2.p99_ms;
        let probe = |run: &Run| run.probe.p99_ms;
        vec![
            ("client 2 ≥ 0.8 ×", self.with(requests) >= CLIENT_2_SHARE_MIN * self.without(requests)),
            ("its p99 ≤ 1.5 ×", self.with(p99) <= CLIENT_2_P99_MAX * self.without(p99)),
            ("probe p99 ≤ + 10 ms", self.with(probe) <= self.without(probe) + PROBE_P99_GROWTH_MAX_MS),
            ("client 1 ≥ 0.95 × disk", self.client_1_bytes() >= DISK_SHARE_MIN * disk_bytes_per_second as f64),
            ("no stall > 20 ms", self.stalls.is_empty()),
        ]
    }
}

fn document(experiment: &Experiment, site: &Site, programs: &[Program], rows: &[Row]) -> Result<Document, String> {
    let ms = |value: f64| if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.1}") };
    let pair =
        |row: &Row, figure: &dyn Fn(&Run) -> f64| format!("{} / {}", ms(row.with(figure)), ms(row.without(figure)));
    let mib = |bytes: f64| format!("{:.0}", bytes / f64::from(1 << 20));
    let table = report::table_of(
        rows,
        &[
            ("server", &|row: &Row| row.label()),
            ("network MiB/s", &|row| mib(row.network_bytes())),
            ("client 1 MiB/s", &|row| mib(row.client_1_bytes())),
            ("client 2 requests/s", &|row| pair(row, &|run| run.client_2.requests_per_second)),
            ("mean ms", &|row| pair(row, &|run| run.client_2.mean_ms)),
            ("p99 ms", &|row| pair(row, &|run| run.client_2.p99_ms)),
            ("max ms", &|row| pair(row, &|run| run.client_2.max_ms)),
            ("probe p50 ms", &|row| pair(row, &|run| run.probe.p50_ms)),
            ("probe p99 ms", &|row| pair(row, &|run| run.probe.p99_ms)),
            ("loops in D", &|row| report::percent(row.with(|run| run.waits_for_disk))),
            ("stalls logged", &|row| {
                if row.kind == Some(Kind::Gale) { row.stalls.len().to_string() } else { "–".into() }
            }),
        ],
    );
    let by_default = rows.iter().filter(|row| row.kind == Some(Kind::Gale) && row.aio == "auto");
    let targets: Vec<(String, &str, bool)> = by_default
        .flat_map(|row| {
            row.targets(experiment.disk_bytes_per_second()).into_iter().map(|(what, met)| (row.label(), what, met))
        })
        .collect();
    let targets = match site.cage.limits_memory && site.cage.limits_disk {
        true => report::table_of(
            &targets,
            &[
                ("by default", &|(server, _, _): &(String, &str, bool)| server.clone()),
                ("target", &|(_, what, _)| (*what).to_owned()),
                ("met", &|(_, _, is_met)| if *is_met { "yes" } else { "no" }.to_owned()),
            ],
        ),
        false => "The targets say something only with little memory and a slow disk: not judged.\n".to_owned(),
    };
    let ignoring = match rows.iter().find(|row| row.ignores_aio) {
        Some(row) => format!("**Left out.** This build of {} does not know `aio`: its rows are one.\n\n", row.server),
        None => String::new(),
    };
    let name = experiment.name();
    let body = format!(
        "{}{ignoring}{} MiB of random files of 4 MiB, {}, {}, {} workers, `sendfile on`, `sendfile_max_chunk 512k`, no \
         access log.{} Client 1: {CLIENT_1_CONNECTIONS} connections, random files. Client 2: {CLIENT_2_CONNECTIONS} \
         connections, one file. Probe: two bytes every 20 ms. Of two figures in a cell, the first is with client 1, \
         the second without it. Medians of {} rounds. `aio` was changed by reloads.\n\n{table}\n{targets}\n![By \
         default]({name}.svg)\n\n![Every value of aio]({name}-all.svg)\n\n{NOTES}",
        site.notes(),
        experiment.data_mib,
        site.memory(experiment),
        site.disk(experiment),
        experiment.workers,
        if experiment.is_over_tls { " Clients 1 and 2 over TLS, the probe in the clear." } else { "" },
        rows.iter().map(|row| row.with_client_1.len()).max().unwrap_or(0),
    );
    Document::new(name, "Thread pools: a slow disk beside a file in memory", programs, &body, rows)
}

const NOTES: &str = "\
Network: both clients together. An answer that was incomplete when the run ended counts with its time until then, if \
that was over a second. The probe sends each request on time, even if the previous one has no answer yet. Loops in D: \
how often an event loop was found waiting for a disk. Stalls: lines of Gale's error log, at most one of each kind a \
minute, over 20 ms and not the machine's fault.\n";

/// In the order of `NAMES`: title of the chart of the defaults, and of the one with every value of `aio`.
const TITLES: [[&str; 2]; 3] = [
    [
        "A file in memory beside a slow disk: nginx and Gale by default",
        "A file in memory beside a slow disk: every value of aio (times: logarithmic)",
    ],
    [
        "A file in memory beside a slow disk (queue of 4): nginx and Gale by default",
        "A file in memory beside a slow disk (queue of 4): every aio (times: logarithmic)",
    ],
    [
        "A file in memory beside a slow disk, over TLS: nginx and Gale by default",
        "A file in memory beside a slow disk, over TLS: every aio (times: logarithmic)",
    ],
];
const PANEL_TITLES: [&str; 3] = [
    "Requests per second for the file in memory (more is better)",
    "99 % of these answers came within, in ms (less is better)",
    "99 % of the answers of two bytes came within, in ms (less is better)",
];
const STATES: [&str; 2] = ["alone", "beside clients of the slow disk"];

/// Returns the charts with their file names: the defaults on a linear scale, and every row with logarithmic times.
fn charts(name: &str, rows: &[Row]) -> Vec<(String, String)> {
    let titles = TITLES[NAMES.iter().position(|known| *known == name).unwrap_or(0)];
    let all: Vec<(&Row, String)> = rows.iter().map(|row| (row, row.label())).collect();
    let defaults = defaults(rows);
    vec![
        (format!("{name}.svg"), draw(titles[0], false, &defaults)),
        (format!("{name}-all.svg"), draw(titles[1], true, &all)),
    ]
}

/// Returns the rows of nginx and Gale without `aio` or `use` in the configuration.
fn defaults(rows: &[Row]) -> Vec<(&Row, String)> {
    let nginx = rows.iter().find(|row| row.server == "nginx" && row.aio == "off");
    let mut gale = rows.iter().filter(|row| row.aio == "auto");
    // io_uring is the default where the kernel permits it.
    let gale = gale.clone().find(|row| row.server.ends_with("io_uring")).or_else(|| gale.next());
    [(nginx, "nginx"), (gale, "Gale")].into_iter().filter_map(|(row, label)| Some((row?, label.to_owned()))).collect()
}

fn draw(title: &str, are_times_logarithmic: bool, rows: &[(&Row, String)]) -> String {
    let panel = |index: usize, is_logarithmic: bool, figure: &dyn Fn(&Run) -> f64| {
        let bars = rows
            .iter()
            .map(|(row, label)| Bars { label: label.clone(), values: [row.without(figure), row.with(figure)] });
        Panel { title: PANEL_TITLES[index], is_logarithmic, bars: bars.collect() }
    };
    let panels = vec![
        panel(0, false, &|run| run.client_2.requests_per_second),
        panel(1, are_times_logarithmic, &|run| run.client_2.p99_ms),
        panel(2, are_times_logarithmic, &|run| run.probe.p99_ms),
    ];
    Chart { title, states: STATES, panels }.draw()
}

/// Draws the charts again from the existing results in JSON.
pub fn draw_charts(results: &Path) -> Result<(), String> {
    #[derive(Deserialize)]
    struct Results {
        data: Vec<Row>,
    }
    for name in NAMES {
        let path = results.join(format!("{name}.json"));
        let fault = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let text = match std::fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            read => read.map_err(|error| fault(&error))?,
        };
        let Results { data } = serde_json::from_slice(&text).map_err(|error| fault(&error))?;
        for (file, svg) in charts(name, &data) {
            std::fs::write(results.join(&file), svg).map_err(|error| format!("{file}: {error}"))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stalls_that_count_are_long_and_our_own() {
        let log = "2026/01/01 00:00:00 [warn] 1#2: worker 1 stalled for 25 ms: blocked, in x\n\
                   2026/01/01 00:00:00 [warn] 1#2: worker 1 stalled for 12 ms: blocked\n\
                   2026/01/01 00:00:00 [info] 1#2: worker 0 stalled for 90 ms: preempted\n";
        assert_eq!(stalls(log), ["1 stalled for 25 ms: blocked, in x"]);
    }
}
