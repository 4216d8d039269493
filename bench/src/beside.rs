//! beside: latency of clients while the server does a large task for others: a scrape of thousands of metrics every
//! second, a reload with thousands of locations, or the replacement of thousands of servers in a group.
//!
//! Requests are due at a fixed rate, as in `first-byte`. Each server is measured alternately without and with the task,
//! and asked for its stalls. A stall in which, according to the kernel, the loop had no core is the machine's and
//! listed separately. The others must not exceed a bound.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use crate::Measured;
use crate::burst::{pin, take_priority};
use crate::case::in_turn;
use crate::client::load;
use crate::first_byte::{self, Sample};
use crate::options::Options;
use crate::report::{self, Document, Spread};
use crate::servers::{Kind, POLL_INTERVAL, Program, Running, Setting};

/// Requests per second, far below the capacity of a worker.
const RATE: u32 = 2000;
const TIME_LIMIT: Duration = Duration::from_secs(60);

const ZONES: usize = 5000;
const PEERS: usize = 1000;
const SCRAPE_INTERVAL: Duration = Duration::from_secs(1);

const LOCATIONS: usize = 20_000;

/// The most that `PUT` accepts.
const REPLACED: usize = 10_000;

/// A task of the server beside answering.
struct Task {
    name: &'static str,
    title: &'static str,
    what: String,
    http: String,
    server: String,
    /// Limit for the server's own stalls.
    stall_max: Duration,
    /// Runs the task once and returns its duration in milliseconds.
    run: fn(&Running, u32) -> Result<f64, String>,
    /// Minimum interval between starts of the task.
    interval: Duration,
}

#[derive(Debug, Serialize)]
struct Row {
    server: String,
    rounds: Vec<Round>,
}

/// A period without the task, and one with it.
#[derive(Debug, Serialize)]
struct Round {
    without: Sample,
    with: Sample,
    /// Duration of each run of the task.
    task_ms: Vec<f64>,
    /// Stalls in the period with the task.
    stalls: Vec<Stall>,
}

/// A turn of a loop that took over 10 ms, as reported by the server.
#[derive(Clone, Debug, Serialize)]
struct Stall {
    worker: u64,
    began: String,
    kind: String,
    ms: f64,
    task: String,
}

impl Stall {
    /// Returns true if the loop was ready to run but had no core.
    fn is_of_machine(&self) -> bool {
        self.kind == "preempted"
    }
}

/// Measures a scrape of thousands of zones and peers every second.
pub fn measure_scrapes(options: &Options) -> Measured {
    let zones = (0..ZONES).map(|zone| format!("location = /z{zone} {{ status_zone z{zone}; return 200 ok; }}\n"));
    let peers = (0..PEERS).map(|peer| format!("server 127.1.{}.{}:1;\n", peer / 250, peer % 250 + 1));
    let task = Task {
        name: "scrapes",
        title: "A scrape every second",
        what: format!("a scrape of {ZONES} zones and {PEERS} peers every second"),
        http: format!("upstream peers {{ {} }}", peers.collect::<String>()),
        server: format!(
            "location = /metrics {{ prometheus; }} location /peers {{ proxy_pass http://peers; }} {}",
            zones.collect::<String>()
        ),
        // No stalls are allowed.
        stall_max: Duration::ZERO,
        run: |server, _| {
            let begun = Instant::now();
            let page = load::request_once(&server.address, "/metrics", TIME_LIMIT);
            let page = page.map_err(|failure| format!("scrape: {failure:?}"))?;
            let wanted = ["gale_http_location_zone_requests_total{zone=\"z4999\"} ", "gale_http_peer_requests_total{"];
            let text = String::from_utf8_lossy(&page);
            match wanted.iter().all(|wanted| text.contains(wanted)) {
                true => Ok(begun.elapsed().as_secs_f64() * 1e3),
                false => Err(format!("the scrape has {} bytes, and not what it should", page.len())),
            }
        },
        interval: SCRAPE_INTERVAL,
    };
    measure(options, &task)
}

/// Measures consecutive reloads of a large configuration.
pub fn measure_reloads(options: &Options) -> Measured {
    let locations = (0..LOCATIONS).map(|number| format!("location /p{number:05} {{ return 200 ok; }}\n"));
    let task = Task {
        name: "large-reload",
        title: "Reloads of a large configuration",
        what: format!("reloads of {LOCATIONS} locations, one after the other"),
        http: String::new(),
        server: locations.collect(),
        stall_max: Duration::from_millis(20),
        run: |server, generation| {
            let begun = Instant::now();
            server.reload(generation)?;
            loop {
                let answer = load::request_once(&server.address, "/generation", TIME_LIMIT);
                if answer.is_ok_and(|body| body == generation.to_string().as_bytes()) {
                    return Ok(begun.elapsed().as_secs_f64() * 1e3);
                }
                if begun.elapsed() >= TIME_LIMIT {
                    return Err(format!("reload {generation} has no effect\n{}", server.error_log_end()));
                }
                std::thread::sleep(POLL_INTERVAL);
            }
        },
        interval: Duration::ZERO,
    };
    measure(options, &task)
}

/// Measures consecutive `PUT` requests, each of which replaces half of a group's servers.
pub fn measure_replacements(options: &Options) -> Measured {
    let task = Task {
        name: "large-put",
        title: "All servers of a large group replaced",
        what: format!(
            "{REPLACED} servers of a group replaced by `PUT`, half of them by others, one request after the other"
        ),
        http: "upstream large { zone large 64m; server 127.1.0.1:1; }".to_owned(),
        server: "location /write/ { api write=on; client_max_body_size 8m; }".to_owned(),
        // No stalls are allowed.
        stall_max: Duration::ZERO,
        run: |server, number| {
            let address = |n: usize| {
                let network = if n.is_multiple_of(2) { 1 } else { 2 + number % 2 };
                format!("{{\"server\":\"127.{network}.{}.{}:1\"}}", n / 250, n % 250 + 1)
            };
            let list = format!("[{}]", (0..REPLACED).map(address).collect::<Vec<_>>().join(","));
            let head = format!(
                "PUT /write/9/http/upstreams/large/servers HTTP/1.1\r\nHost: bench\r\nContent-Length: {}\r\n\r\n",
                list.len()
            );
            let begun = Instant::now();
            let mut connection = load::Connection::open(&server.address).map_err(|failure| format!("{failure:?}"))?;
            match connection.ask(&(head + &list)) {
                Ok(answer) if answer.status == 200 => Ok(begun.elapsed().as_secs_f64() * 1e3),
                other => Err(format!("PUT: {:?}\n{}", other.map(|answer| answer.status), server.error_log_end())),
            }
        },
        interval: Duration::ZERO,
    };
    measure(options, &task)
}

fn measure(options: &Options, task: &Task) -> Measured {
    let programs = options.servers(Some(&["gale"]))?;
    if let Some(other) = programs.iter().find(|program| program.kind != Kind::Gale) {
        return Err(format!("{} does not tell of its stalls", other.label));
    }
    let rounds = in_turn(options.rounds, &programs, |program, round| {
        let readings = measure_one(options, program, task).map_err(|error| format!("{}: {error}", program.label))?;
        eprintln!("{}: {} round {round}: {readings:?}", task.name, program.label);
        Ok(readings)
    })?;
    let rows: Vec<Row> =
        programs.iter().zip(rounds).map(|(program, rounds)| Row { server: program.label.clone(), rounds }).collect();
    let body = format!(
        "{} rounds of {} s without and with {}; median (least – greatest). One worker; {RATE} requests a second for \
         two bytes, at a fixed rate over kept-alive connections, whose times count from when they were due. Stalls are \
         turns of the event loop over 10 ms, as the server tells them, \"preempted\" ones beside: then the machine had \
         no core for it.\n\n{}",
        options.rounds,
        options.run_time.as_secs(),
        task.what,
        table(&rows)
    );
    let holds = rows.iter().flat_map(|row| &row.rounds).all(|round| round.holds(task.stall_max));
    Ok((Document::new(task.name, task.title, &programs, &body, &rows)?, holds))
}

impl Round {
    fn holds(&self, stall_max: Duration) -> bool {
        let own_ms = self.stalls.iter().filter(|stall| !stall.is_of_machine()).map(|stall| stall.ms);
        let is_short = own_ms.fold(0.0, f64::max) <= stall_max.as_secs_f64() * 1e3;
        is_short && self.without.errors + self.with.errors == 0
    }
}

fn table(rows: &[Row]) -> String {
    let spread = |row: &Row, figure: fn(&Round) -> f64| Spread::of(row.rounds.iter().map(figure)).to_string();
    let stalls = |row: &Row, is_of_machine: bool| {
        let all = row.rounds.iter().flat_map(|round| &round.stalls);
        let own: Vec<f64> = all.filter(|stall| stall.is_of_machine() == is_of_machine).map(|stall| stall.ms).collect();
        match own.is_empty() {
            true => "none".to_owned(),
            false => format!("{}, up to {:.0} ms", own.len(), own.iter().copied().fold(0.0, f64::max)),
        }
    };
    report::table_of(
        rows,
        &[
            ("server", &|row: &Row| row.server.clone()),
            ("p50 µs without", &|row| spread(row, |round| round.without.p50_us)),
            ("with", &|row| spread(row, |round| round.with.p50_us)),
            ("p99 µs without", &|row| spread(row, |round| round.without.p99_us)),
            ("with", &|row| spread(row, |round| round.with.p99_us)),
            ("longest µs without", &|row| spread(row, |round| round.without.max_us)),
            ("with", &|row| spread(row, |round| round.with.max_us)),
            ("it takes, ms", &|row| Spread::of(row.rounds.iter().flat_map(|round| round.task_ms.clone())).to_string()),
            ("stalls", &|row| stalls(row, false)),
            ("preempted", &|row| stalls(row, true)),
            ("errors", &|row| {
                row.rounds.iter().map(|round| round.without.errors + round.with.errors).sum::<u64>().to_string()
            }),
        ],
    )
}

fn measure_one(options: &Options, program: &Program, task: &Task) -> Result<Round, String> {
    let setting = Setting {
        cores: Some(vec![options.server_core, options.client_core]),
        http: task.http.clone(),
        server: format!("location /api/ {{ api; }} {}", task.server),
        ..Setting::default()
    };
    let server = program.start(setting)?;
    let without = ask(options, &server)?;
    let before = stalls(&server)?;
    let is_over = AtomicBool::new(false);
    let (with, task_ms) = std::thread::scope(|scope| {
        let doing = scope.spawn(|| repeat(task, &server, &is_over));
        let with = ask(options, &server);
        is_over.store(true, Ordering::Release);
        (with, doing.join().expect("it does not panic"))
    });
    let is_new = |stall: &Stall| !before.iter().any(|old| (old.worker, &old.began) == (stall.worker, &stall.began));
    let stalls = stalls(&server)?.into_iter().filter(is_new).collect();
    Ok(Round { without, with: with?, task_ms: task_ms?, stalls })
}

/// Repeats the task until `is_over`. Returns the duration of each run in milliseconds.
fn repeat(task: &Task, server: &Running, is_over: &AtomicBool) -> Result<Vec<f64>, String> {
    let mut times = Vec::new();
    for number in 1.. {
        let begun = Instant::now();
        times.push((task.run)(server, number)?);
        std::thread::sleep(task.interval.saturating_sub(begun.elapsed()));
        if is_over.load(Ordering::Acquire) {
            break;
        }
    }
    Ok(times)
}

fn ask(options: &Options, server: &Running) -> Result<Sample, String> {
    let (address, core, run_time) = (server.address.clone(), options.client_core, options.run_time);
    let client = std::thread::spawn(move || {
        pin(core)?;
        take_priority();
        first_byte::ask(&address, "/return", RATE, run_time).map_err(|error| format!("client: {error}"))
    });
    client.join().map_err(|_| "the client panicked".to_owned())?
}

/// Returns the server's list of recent stalls.
fn stalls(server: &Running) -> Result<Vec<Stall>, String> {
    let told = load::request_once(&server.address, "/api/9/gale/stalls", TIME_LIMIT);
    let told = told.map_err(|failure| format!("stalls: {failure:?}"))?;
    parse_stalls(&told).ok_or_else(|| format!("stalls: {}", String::from_utf8_lossy(&told)))
}

fn parse_stalls(told: &[u8]) -> Option<Vec<Stall>> {
    let told: Value = serde_json::from_slice(told).ok()?;
    let stall = |told: &Value| {
        Some(Stall {
            worker: told["worker"].as_u64()?,
            began: told["began"].as_str()?.to_owned(),
            kind: told["kind"].as_str()?.to_owned(),
            ms: told["time"].as_f64()?,
            task: told["task"].as_str()?.to_owned(),
        })
    };
    told.as_array()?.iter().map(stall).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_stalls_of_the_server_are_judged() {
        let told =
            br#"[{"worker": 0, "began": "2026-01-01T00:00:00.000Z", "kind": "preempted", "time": 90, "task": ""},
            {"worker": 0, "began": "2026-01-01T00:00:01.000Z", "kind": "computing", "time": 15, "task": "x"}]"#;
        let stalls = parse_stalls(told).unwrap();
        assert_eq!((stalls[0].ms, stalls[1].kind.as_str()), (90.0, "computing"));
        let sample = Sample { p50_us: 1.0, p99_us: 1.0, max_us: 1.0, errors: 0 };
        let round = Round { without: sample, with: sample, task_ms: vec![1.0], stalls };
        assert!(round.holds(Duration::from_millis(20)) && !round.holds(Duration::ZERO));
        assert!(parse_stalls(b"{}").is_none());
    }
}
