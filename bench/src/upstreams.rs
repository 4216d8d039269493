//! upstreams: two workers with a common group of servers: number of new connections, and latency if half of the servers
//! answer late.
//!
//! nginx keeps idle connections per worker and has no `least_time` (it is in the commercial edition). haproxy shares
//! them among its threads and has no equivalent of `least_time` either.

use std::time::Duration;

use serde::Serialize;

use crate::Measured;
use crate::application::{Application, Job as Work};
use crate::case::in_turn;
use crate::client::{self, ClientKind, Run};
use crate::options::Options;
use crate::report::{self, Document, Spread};
use crate::servers::{Kind, Program, Setting, free_port};

const WORKERS: usize = 2;
const CONNECTIONS: u32 = 64;
/// Delay of half of the servers.
const DELAY: Duration = Duration::from_millis(20);
const SERVERS: usize = 4;

/// Test of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum Job {
    /// One server, with the default of `keepalive`: 32 for each worker.
    Connections,
    InTurn,
    LeastTime,
}

impl Job {
    const ALL: [Job; 3] = [Job::Connections, Job::InTurn, Job::LeastTime];

    fn title(self) -> &'static str {
        match self {
            Job::Connections => "one server, keepalive 32 (default)",
            Job::InTurn => "four servers, two answer 20 ms later, in turn",
            Job::LeastTime => "the same, least_time header",
        }
    }

    fn is_for(self, program: &Program) -> bool {
        self != Job::LeastTime || program.kind == Kind::Gale
    }
}

#[derive(Clone, Debug, Serialize)]
struct Sample {
    job: Job,
    /// New connections to the servers per 1,000 requests.
    connections: f64,
    p50_us: f64,
    p99_us: f64,
    per_second: f64,
    errors: u64,
}

#[derive(Debug, Serialize)]
struct Row {
    server: String,
    job: Job,
    connections: Spread,
    p50_us: Spread,
    p99_us: Spread,
    per_second: Spread,
    errors: u64,
}

/// Measures nginx, haproxy, and Gale with each driver.
pub fn measure(options: &Options) -> Measured {
    let programs = options.servers(Some(&["nginx", "haproxy", "gale"]))?;
    let samples = in_turn(options.rounds, &programs, |program, round| {
        eprintln!("upstreams: {} round {round}", program.label);
        Job::ALL.into_iter().filter(|job| job.is_for(program)).map(|job| measure_one(options, program, job)).collect()
    })?;
    let samples: Vec<Vec<Vec<Sample>>> = samples;
    let mut rows = Vec::new();
    for job in Job::ALL {
        for (program, rounds) in programs.iter().zip(&samples).filter(|(program, _)| job.is_for(program)) {
            let own = || rounds.iter().flatten().filter(move |sample| sample.job == job);
            let spread = |figure: fn(&Sample) -> f64| Spread::of(own().map(figure));
            rows.push(Row {
                server: program.label.clone(),
                job,
                connections: spread(|sample| sample.connections),
                p50_us: spread(|sample| sample.p50_us),
                p99_us: spread(|sample| sample.p99_us),
                per_second: spread(|sample| sample.per_second),
                errors: own().map(|sample| sample.errors).sum(),
            });
        }
    }
    let table = report::table_of(
        &rows,
        &[
            ("group", &|row: &Row| row.job.title().to_owned()),
            ("server", &|row| row.server.clone()),
            ("new connections per 1,000", &|row| row.connections.to_string()),
            ("p50 µs", &|row| row.p50_us.to_string()),
            ("p99 µs", &|row| row.p99_us.to_string()),
            ("requests/s", &|row| format!("{:.0}", row.per_second.median)),
            ("errors", &|row| row.errors.to_string()),
        ],
    );
    let body = format!(
        "{} rounds of {} s; median (least – greatest). {WORKERS} workers, {CONNECTIONS} clients, all on both cores.\n\n\
         {table}",
        options.rounds,
        options.run_time.as_secs()
    );
    let holds = rows.iter().all(|row| row.errors == 0);
    Ok((Document::new("upstreams", "Two workers and a group of servers", &programs, &body, &rows)?, holds))
}

fn measure_one(options: &Options, program: &Program, job: Job) -> Result<Sample, String> {
    let fault = |error: std::io::Error| format!("servers: {error}");
    let count = if job == Job::Connections { 1 } else { SERVERS };
    let delay = |number: usize| if number % 2 == 1 { DELAY } else { Duration::ZERO };
    let servers: Vec<Application> = (0..count)
        .map(|number| Application::start(Work::Answer(delay(number))))
        .collect::<Result<_, _>>()
        .map_err(fault)?;
    let lines: String = servers.iter().map(|server| format!("server {}; ", server.address)).collect();
    let method = if job == Job::LeastTime { "least_time header; " } else { "" };
    let idle = if job == Job::Connections { 32 } else { 64 };
    let cores = vec![options.server_core, options.client_core];
    let is_haproxy = program.kind == Kind::Haproxy;
    let own_port = free_port()?;
    let setting = Setting {
        workers: WORKERS,
        cores: Some(cores.clone()),
        blocks: if is_haproxy { haproxy_blocks(own_port, &servers) } else { String::new() },
        http: format!("upstream group {{ zone group 1m; {method}{lines} keepalive {idle}; }}"),
        server:
            "location = /group { proxy_pass http://group; proxy_http_version 1.1; proxy_set_header Connection \"\"; }"
                .to_owned(),
        ..Setting::default()
    };
    let running = program.start(setting)?;
    let address = if is_haproxy { format!("127.0.0.1:{own_port}") } else { running.address.clone() };
    let before: u64 = servers.iter().map(Application::accepted).sum();
    let run = Run {
        kind: ClientKind::Wrk,
        addresses: vec![&address],
        path: "/group",
        headers: &[],
        body: None,
        connections: CONNECTIONS,
        is_short: false,
        certificate: None,
        run_time: options.run_time,
        clients: 1,
        cores: &cores[1..],
    };
    let (figures, _) = client::run(&run, None)?;
    let opened = servers.iter().map(Application::accepted).sum::<u64>() - before;
    Ok(Sample {
        job,
        connections: opened as f64 * 1000.0 / figures.requests as f64,
        p50_us: figures.latency_p50_us,
        p99_us: figures.latency_p99_us,
        per_second: figures.requests_per_second,
        errors: figures.errors,
    })
}

/// Returns the same group in haproxy's syntax, on its own port.
fn haproxy_blocks(port: u16, servers: &[Application]) -> String {
    let line = |(number, server): (usize, &Application)| format!("    server s{number} {}\n", server.address);
    let lines: String = servers.iter().enumerate().map(line).collect();
    format!(
        "frontend group\n    bind 127.0.0.1:{port}\n    default_backend group\n\
         backend group\n    balance roundrobin\n    http-reuse always\n{lines}"
    )
}
