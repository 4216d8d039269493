//! cpu: CPU time per request of every server, in turn and again in turn, so that drift of the machine hits them alike.
//!
//! The judged figure is the CPU time of all processes of the server, divided by the requests that it answered: it
//! holds whether or not the server's core is saturated. Beside it stand the utilisation of both cores, which say
//! whether the client was the limit, and how busy the server's core was with anything else.

use std::time::Duration;

use serde::Serialize;

use crate::Measured;
use crate::options::Options;
use crate::process::{self, CoreTime};
use crate::report::{self, Document, Spread};
use crate::servers::{FILE_BYTES, Kind, Program, Running, SMALL_BODY, Setting};
use crate::wrk::{self, Figures};

/// What is asked for, and how.
#[derive(Debug, Clone)]
pub struct Case {
    pub name: &'static str,
    pub title: String,
    pub path: &'static str,
    pub connections: u32,
    pub is_short: bool,
    pub body_bytes: usize,
}

/// The cases that the options ask for.
pub fn cases(options: &Options) -> Result<Vec<Case>, String> {
    let mut cases = Vec::new();
    for &connections in &options.connections {
        let keepalive = |name, path, body_bytes, what: &str| Case {
            name,
            title: format!("{what}, {connections} keep-alive connections"),
            path,
            connections,
            is_short: false,
            body_bytes,
        };
        cases.push(keepalive("return", "/return", SMALL_BODY.len(), "2-byte answer"));
        cases.push(keepalive("file", "/file", FILE_BYTES, "1 KiB file"));
    }
    cases.push(Case {
        name: "short",
        title: format!("2-byte answer, short connections, {} at a time", options.short_connections),
        path: "/return",
        connections: options.short_connections,
        is_short: true,
        body_bytes: SMALL_BODY.len(),
    });
    cases.retain(|case| options.has_case(case.name));
    if cases.is_empty() { Err("there is no such case: return, file, short".to_owned()) } else { Ok(cases) }
}

impl Case {
    /// The servers that this case compares. nginx's cache of open files changes only files, and is not its default:
    /// both ways are measured.
    pub fn programs(&self, programs: &[Program]) -> Vec<Program> {
        let mut all = Vec::new();
        for program in programs {
            all.push(program.clone());
            if self.name == "file" && program.kind == Kind::Nginx {
                let label = format!("{} + open_file_cache", program.label);
                all.push(Program { label, open_file_cache: true, ..program.clone() });
            }
        }
        all
    }

    pub fn setting(&self, options: &Options) -> Setting {
        Setting { is_short: self.is_short, core: Some(options.server_core), floor_body_bytes: self.body_bytes }
    }

    pub fn run<'a>(&self, url: &'a str, run_time: Duration, options: &Options) -> wrk::Run<'a> {
        let core = options.client_core;
        wrk::Run { url, connections: self.connections, is_short: self.is_short, run_time, core }
    }
}

/// One run against one server.
#[derive(Debug, Clone, Copy, Serialize)]
struct Sample {
    round: u32,
    /// CPU time of the server per request, in microseconds.
    server_us: f64,
    client_us: f64,
    /// CPU time of the server in the time of the run: 1.0 is a saturated core.
    server_utilisation: f64,
    client_utilisation: f64,
    /// How busy the two cores were altogether.
    server_core_busy: f64,
    client_core_busy: f64,
    #[serde(flatten)]
    figures: Figures,
}

#[derive(Debug, Serialize)]
struct Row {
    server: String,
    server_us: Spread,
    client_us: f64,
    requests_per_second: f64,
    server_utilisation: f64,
    client_utilisation: f64,
    other_load_of_server_core: f64,
    limit: &'static str,
    latency_p50_us: f64,
    latency_p99_us: f64,
    errors: u64,
    samples: Vec<Sample>,
    #[serde(skip)]
    kind: Kind,
}

#[derive(Debug, Serialize)]
struct Table {
    case: &'static str,
    title: String,
    rows: Vec<Row>,
}

/// Measures every case with every server.
pub fn measure(options: &Options) -> Measured {
    let programs = options.servers(None)?;
    let mut tables = Vec::new();
    for case in cases(options)? {
        eprintln!("{}:", case.title);
        tables.push(measure_case(options, &programs, &case)?);
    }
    let body: String = tables.iter().map(|table| table.markdown(options)).collect();
    let holds = tables.iter().all(|table| table.rows.iter().all(|row| row.errors == 0));
    Ok((Document::new("cpu", "CPU time per request", &programs, &(body + NOTES), &tables)?, holds))
}

const NOTES: &str = "\
Server µs: CPU time of all processes of the server per request, median (least – greatest) of the rounds. \
Server, client: share of its core that each used; other: what else kept the server's core busy. \
Limit: \"server\" where the server used at least 95 % of its core; \"client\" where the client did so instead (compare CPU time there, not requests per second), \"others\" where other \
programs took the server's core: measure again.\n";

fn measure_case(options: &Options, programs: &[Program], case: &Case) -> Result<Table, String> {
    let programs = case.programs(programs);
    // All run from the beginning; those that are not asked stay asleep.
    let servers: Vec<Running> =
        programs.iter().map(|program| program.start(case.setting(options))).collect::<Result<_, _>>()?;
    let mut samples: Vec<Vec<Sample>> = vec![Vec::new(); servers.len()];
    for round in 0..=options.rounds {
        for (server, samples) in servers.iter().zip(&mut samples) {
            // The first round fills caches and is not counted.
            let run_time = if round == 0 { Duration::from_secs(1) } else { options.run_time };
            let sample = measure_once(options, case, server, round, run_time)?;
            if round > 0 {
                eprintln!("  round {round}, {}: {:.2} µs", server.label, sample.server_us);
                samples.push(sample);
            }
        }
    }
    let rows = programs.iter().zip(samples).map(|(program, samples)| Row::new(program, samples)).collect();
    Ok(Table { case: case.name, title: case.title.clone(), rows })
}

fn measure_once(
    options: &Options,
    case: &Case,
    server: &Running,
    round: u32,
    run_time: Duration,
) -> Result<Sample, String> {
    let processes = server.root.tree();
    let cores = || (CoreTime::read(options.server_core), CoreTime::read(options.client_core));
    let before = (process::cpu_time(&processes), cores());
    let (figures, client) = wrk::run(&case.run(&server.url(case.path), run_time, options))?;
    let after = (process::cpu_time(&processes), cores());
    if server.root.tree() != processes {
        return Err(format!("{}: its processes changed during the run", server.label));
    }
    let server_time = after.0 - before.0;
    let per_request = |time: Duration| time.as_secs_f64() * 1e6 / figures.requests as f64;
    let share = |time: Duration| time.as_secs_f64() / figures.duration().as_secs_f64();
    Ok(Sample {
        round,
        server_us: per_request(server_time),
        client_us: per_request(client),
        server_utilisation: share(server_time),
        client_utilisation: share(client),
        server_core_busy: after.1.0.utilisation_since(before.1.0),
        client_core_busy: after.1.1.utilisation_since(before.1.1),
        figures,
    })
}

impl Row {
    fn new(program: &Program, samples: Vec<Sample>) -> Row {
        let median = |figure: fn(&Sample) -> f64| Spread::of(samples.iter().map(figure)).median;
        let server_utilisation = median(|sample| sample.server_utilisation);
        let client_utilisation = median(|sample| sample.client_utilisation);
        let other_load = median(|sample| sample.server_core_busy - sample.server_utilisation).max(0.0);
        Row {
            server: program.label.clone(),
            kind: program.kind,
            server_us: Spread::of(samples.iter().map(|sample| sample.server_us)),
            client_us: median(|sample| sample.client_us),
            requests_per_second: median(|sample| sample.figures.requests_per_second),
            server_utilisation,
            client_utilisation,
            other_load_of_server_core: other_load,
            limit: limit(server_utilisation, client_utilisation, other_load),
            latency_p50_us: median(|sample| sample.figures.latency_p50_us),
            latency_p99_us: median(|sample| sample.figures.latency_p99_us),
            errors: samples.iter().map(|sample| sample.figures.errors).sum(),
            samples,
        }
    }
}

/// Who could not do more.
fn limit(server_utilisation: f64, client_utilisation: f64, other_load: f64) -> &'static str {
    if server_utilisation >= 0.95 {
        "server"
    } else if client_utilisation >= 0.95 {
        "client"
    } else if other_load >= 0.10 {
        "others"
    } else {
        "neither"
    }
}

impl Table {
    fn markdown(&self, options: &Options) -> String {
        let seconds = options.run_time.as_secs();
        let mut text = format!("## {}\n\n{} rounds of {seconds} s\n\n", self.title, options.rounds);
        let header = [
            "server",
            "server µs",
            "client µs",
            "both µs",
            "requests/s",
            "server",
            "client",
            "other",
            "limit",
            "p50 µs",
            "p99 µs",
            "errors",
        ];
        let rows: Vec<Vec<String>> = self.rows.iter().map(Row::cells).collect();
        text.push_str(&report::table(&header, &rows));
        text.push_str(&self.ratios());
        text.push('\n');
        text
    }

    /// Gale above the floor, compared with nginx above the floor.
    fn ratios(&self) -> String {
        let of = |kind: Kind| self.rows.iter().find(move |row| row.kind == kind);
        let Some(nginx) = of(Kind::Nginx) else {
            return String::new();
        };
        let mut text = String::new();
        for gale in self.rows.iter().filter(|row| row.kind == Kind::Gale) {
            let (gale_us, nginx_us) = (gale.server_us.median, nginx.server_us.median);
            // Round by round, because what disturbs a round disturbs both.
            let rounds = gale.samples.iter().zip(&nginx.samples);
            let ratio = Spread::of(rounds.map(|(gale, nginx)| gale.server_us / nginx.server_us));
            text.push_str(&format!(
                "\n{} / {}, round by round: {:.2} ({:.2} – {:.2})",
                gale.server, nginx.server, ratio.median, ratio.least, ratio.greatest
            ));
            if let Some(floor) = of(Kind::Floor) {
                let above = |us: f64| us - floor.server_us.median;
                text.push_str(&format!("; above the floor {:.2} µs / {:.2} µs", above(gale_us), above(nginx_us)));
            }
            text.push('\n');
        }
        text
    }
}

impl Row {
    fn cells(&self) -> Vec<String> {
        let percent = |share: f64| format!("{:.0} %", share * 100.0);
        let Spread { median, least, greatest } = self.server_us;
        vec![
            self.server.clone(),
            format!("{median:.2} ({least:.2} – {greatest:.2})"),
            format!("{:.2}", self.client_us),
            format!("{:.2}", median + self.client_us),
            format!("{:.0}", self.requests_per_second),
            percent(self.server_utilisation),
            percent(self.client_utilisation),
            percent(self.other_load_of_server_core),
            self.limit.to_owned(),
            format!("{:.0}", self.latency_p50_us),
            format!("{:.0}", self.latency_p99_us),
            self.errors.to_string(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_who_is_full() {
        assert_eq!(limit(0.99, 0.99, 0.0), "server");
        assert_eq!(limit(0.80, 0.99, 0.2), "client");
        assert_eq!(limit(0.50, 0.45, 0.5), "others");
        assert_eq!(limit(0.80, 0.70, 0.0), "neither");
    }
}
