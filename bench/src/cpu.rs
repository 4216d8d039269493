//! cpu: CPU time per request of every server, and its distance from the floor.
//!
//! All servers run from the beginning and are measured in turn, the floors first. Ratios are computed within a round,
//! because a disturbance affects all of a round.

use std::rc::Rc;

use serde::Serialize;

use crate::Measured;
use crate::backend::Backend;
use crate::case::{self, Case, Row, Subject};
use crate::certificate::Certificate;
use crate::client::ClientKind;
use crate::grpc::Grpc;
use crate::interpreter::Language;
use crate::location;
use crate::options::Options;
use crate::report::{self, Column, Document, Spread, percent};
use crate::servers::{FILES, Handshakes, Kind, Program, SMALL_BODY};

/// Connections of clients with a handshake for each request.
const TLS_SHORT_CONNECTIONS: u32 = 10;
/// Connections of clients that receive 4 MiB at a time through a proxy.
const PROXIED_LARGE_CONNECTIONS: u32 = 16;

#[derive(Debug, Serialize)]
struct Table {
    case: &'static str,
    title: String,
    rows: Vec<Row>,
    comparisons: Vec<Comparison>,
    #[serde(skip)]
    on_cores_of_their_own: bool,
}

#[derive(Debug, Serialize)]
struct Comparison {
    gale: String,
    nginx: String,
    ratio: Spread,
    /// (Gale − floor) / (nginx − floor) with the epoll floor; `None` if it was not measured.
    above_floor: Option<Spread>,
    /// The same, with the floor of each server's own driver.
    above_own_floor: Option<Spread>,
}

pub fn measure(options: &Options) -> Measured {
    measure_cases(options, "cpu", "CPU time per request", cases(options)?)
}

/// Files of several sizes in the page cache.
pub fn measure_files(options: &Options) -> Measured {
    let client = options.client.unwrap_or(ClientKind::Wrk);
    let of = |(name, path, bytes): &(&'static str, &'static str, usize)| {
        [false, true].map(|is_short| Case::sized_file(options, client, name, path, *bytes, is_short))
    };
    let cases = options.chosen_cases(FILES.iter().flat_map(of).collect())?;
    measure_cases(options, "files", "CPU time per request: files in memory", cases)
}

/// HTTP/2 in the clear, since TLS costs the same for all; and gRPC, which only nginx and Gale support.
pub fn measure_http2(options: &Options) -> Measured {
    let mut cases = vec![
        Case::http2(options, "h2-small", "/return", SMALL_BODY.len(), 32),
        Case::http2(options, "h2-one", "/return", SMALL_BODY.len(), 1),
    ];
    let of_size =
        |(_, path, bytes): &(&'static str, &'static str, usize)| Case::http2(options, "h2-file", path, *bytes, 32);
    cases.extend(FILES.iter().filter(|(_, _, bytes)| *bytes == 64 << 10).map(of_size));
    if let Some(grpc) = Grpc::start(options)? {
        cases.push(Case::grpc(options, grpc, 32));
    }
    let cases = options.chosen_cases(cases)?;
    measure_cases(options, "http2", "CPU time per request: HTTP/2", cases)
}

/// TLS with one worker: a handshake for each request, full or resumed, and requests on keep-alive connections, with
/// HTTP/1 and HTTP/2.
pub fn measure_tls(options: &Options) -> Measured {
    let certificate = Certificate::make(&["localhost".to_owned()])?;
    let client = options.client.unwrap_or(ClientKind::Wrk);
    let backend = Backend::start(options.client_core, SMALL_BODY.len())?;
    let (_, file, file_bytes) = FILES[2];
    let (_, large, large_bytes) = FILES[3];
    let proxied = |streams| Case {
        client: ClientKind::H2load(streams),
        title: format!("HTTP/2, proxied, 2 bytes, 16 connections × {streams} streams"),
        ..Case::proxied(options, client, "h2-proxied", "/proxied", Rc::clone(&backend), 16)
    };
    let handshake = |name, handshakes: Handshakes| {
        let Handshakes { are_full, are_of_12, are_hybrid } = handshakes;
        let how = if are_full { "a full handshake" } else { "a handshake that resumes a session" };
        let version = if are_of_12 { "1.2" } else { "1.3" };
        let keys = if are_hybrid { " with X25519MLKEM768" } else { "" };
        let case = Case {
            connections: TLS_SHORT_CONNECTIONS,
            title: format!(
                "2-byte answer, {how} of version {version}{keys} for each, {TLS_SHORT_CONNECTIONS} at a time"
            ),
            client: if are_hybrid { ClientKind::Handshakes } else { ClientKind::Wrk },
            handshakes,
            ..Case::short(options)
        };
        case.over_tls(name, &certificate)
    };
    let cases = vec![
        handshake("handshake", Handshakes { are_full: true, ..Handshakes::default() }),
        handshake("resumed", Handshakes::default()),
        handshake("handshake-12", Handshakes { are_full: true, are_of_12: true, ..Handshakes::default() }),
        handshake("resumed-12", Handshakes { are_of_12: true, ..Handshakes::default() }),
        handshake("handshake-hybrid", Handshakes { are_full: true, are_hybrid: true, ..Handshakes::default() }),
        Case::keepalive(options, client, options.connections[0]).over_tls("return", &certificate),
        Case::sized_file(options, client, "64k", file, file_bytes, false).over_tls("64k", &certificate),
        Case {
            connections: PROXIED_LARGE_CONNECTIONS,
            ..Case::sized_file(options, client, "4m", large, large_bytes, false)
        }
        .over_tls("4m", &certificate),
        Case::http2(options, "h2-small", "/return", SMALL_BODY.len(), 32).over_tls("h2-small", &certificate),
        Case::http2(options, "h2-one", "/return", SMALL_BODY.len(), 1).over_tls("h2-one", &certificate),
        Case::http2(options, "h2-file", file, file_bytes, 32).over_tls("h2-file", &certificate),
        proxied(32).over_tls("h2-proxied", &certificate),
    ];
    measure_cases(options, "tls", "CPU time per request: TLS", options.chosen_cases(cases)?)
}

/// Cache: hits of several sizes, and responses that are fetched and stored each time.
pub fn measure_cache(options: &Options) -> Measured {
    let client = options.client.unwrap_or(ClientKind::Wrk);
    let backend = |bytes: usize| Backend::start(options.client_core, bytes);
    let (small, file, large) = (backend(1 << 10)?, backend(64 << 10)?, backend(4 << 20)?);
    let connections = options.connections[0];
    let cached = |name, path, backend: &Rc<Backend>, connections| {
        Case::cached(options, client, name, path, Rc::clone(backend), connections)
    };
    let cases = vec![
        cached("hit-1k", "/cached", &small, connections),
        cached("hit-64k", "/cached", &file, connections),
        cached("hit-4m", "/cached", &large, PROXIED_LARGE_CONNECTIONS),
        cached("stored", "/stored", &small, connections),
    ];
    let programs = options.servers(Some(&["floor", "nginx", "gale", "haproxy", "varnish"]))?;
    measure_programs(options, &programs, "cache", "CPU time per request: cached", options.chosen_cases(cases)?)
}

/// Proxy to a backend with constant responses: small ones, 64 KiB, 4 MiB with and without buffering, and a client
/// connection for each request.
pub fn measure_proxy(options: &Options) -> Measured {
    let client = options.client.unwrap_or(ClientKind::Wrk);
    let small = Backend::start(options.client_core, SMALL_BODY.len())?;
    let (file, large) = (Backend::start(options.client_core, 64 << 10)?, Backend::start(options.client_core, 4 << 20)?);
    let connections = options.connections[0];
    let proxied = |name, path, backend: &Rc<Backend>, connections| {
        Case::proxied(options, client, name, path, Rc::clone(backend), connections)
    };
    let short = proxied("short", "/proxied", &small, options.short_connections);
    let cases = vec![
        proxied("small", "/proxied", &small, connections),
        proxied("64k", "/proxied", &file, connections),
        proxied("4m", "/proxied", &large, PROXIED_LARGE_CONNECTIONS),
        proxied("4m-unbuffered", "/unbuffered", &large, PROXIED_LARGE_CONNECTIONS),
        Case {
            is_short: true,
            client: ClientKind::Wrk,
            title: format!("{}, short connections", short.title.replace("keep-alive ", "")),
            ..short
        },
    ];
    measure_cases(options, "proxy", "CPU time per request: proxied", options.chosen_cases(cases)?)
}

/// FastCGI to PHP-FPM and uwsgi to uWSGI. The application runs on the client's core and is the limit, so the servers
/// are compared by CPU time.
pub fn measure_applications(options: &Options) -> Measured {
    let mut cases = Vec::new();
    for language in [Language::Php, Language::Python] {
        match Case::application(options, ClientKind::Wrk, language)? {
            Some(case) => cases.push(case),
            None => eprintln!("note: {language:?} is not installed; left out"),
        }
    }
    measure_cases(options, "applications", "CPU time per request: applications", options.chosen_cases(cases)?)
}

fn measure_cases(options: &Options, name: &'static str, title: &str, cases: Vec<Case>) -> Measured {
    measure_programs(options, &options.servers(None)?, name, title, cases)
}

fn measure_programs(
    options: &Options,
    programs: &[Program],
    name: &'static str,
    title: &str,
    cases: Vec<Case>,
) -> Measured {
    let mut tables = Vec::new();
    for case in cases {
        let setting = case.setting();
        let with_setting = |program| Subject::new(program, setting.clone());
        let servers: Vec<Subject> = case.programs(programs).iter().map(with_setting).collect();
        let rows = case::measure_in_turn(options, &case, &servers)?;
        tables.push(Table {
            case: case.name,
            comparisons: comparisons(&rows),
            rows,
            title: case.title,
            on_cores_of_their_own: case.workers == 1,
        });
    }
    let body: String = tables.iter().map(|table| table.markdown(options)).collect();
    let holds = tables.iter().all(|table| table.rows.iter().all(|row| row.errors() == 0));
    Ok((Document::new(name, title, programs, &(body + NOTES), &tables)?, holds))
}

const NOTES: &str = "\
Server µs: CPU time of all processes of the server per request, median (least – greatest) of the rounds. Both: with \
the client's; cores: the time that both cores were busy, with whatever. \
Server, client: share of a core that each used; other: what else kept the server's core busy. \
Limit: \"server\" where the server used at least 95 % of its core; \"client\" where the client did so instead (compare \
CPU time there, not requests per second), \"others\" where other programs took the server's core: measure again. \
Of nginx the better row is compared. Above the floor: (Gale − floor) / (nginx − floor), round by round; the floor of \
epoll for both, or that of its own driver for each.\n";

fn cases(options: &Options) -> Result<Vec<Case>, String> {
    let client = options.client.unwrap_or(ClientKind::Wrk);
    let mut cases: Vec<Case> =
        options.connections.iter().map(|&connections| Case::keepalive(options, client, connections)).collect();
    cases.push(Case::file(options, client, options.connections[0]));
    cases.push(Case::short(options));
    cases.push(Case { name: "short-pair", ..Case::short(options).on_all_cores(options, 2) });
    cases.extend(location::PAGES.map(|page| Case::page(options, client, page)));
    options.chosen_cases(cases)
}

/// Returns the side that limited the throughput.
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

fn comparisons(rows: &[Row]) -> Vec<Comparison> {
    let floor = |driver: &str, deferred: bool| {
        let is_it = |row: &&Row| {
            let Program { kind, driver: own, deferred: own_deferred, .. } = &row.program;
            *kind == Kind::Floor && own.as_deref() == Some(driver) && *own_deferred == deferred
        };
        rows.iter().find(is_it)
    };
    let compare = |gale: &Row| {
        let deferred = gale.program.deferred;
        let is_like = |row: &&Row| row.program.kind == Kind::Nginx && row.program.deferred == deferred;
        // The better of its results with and without the cache of open files.
        let cpu_time = |row: &&Row| row.median(|sample| sample.server_us);
        let nginx = rows.iter().filter(is_like).min_by(|a, b| cpu_time(a).total_cmp(&cpu_time(b)))?;
        let epoll_floor = floor("epoll", deferred);
        Some(Comparison {
            gale: gale.server.clone(),
            nginx: nginx.server.clone(),
            ratio: by_round(gale, nginx, None),
            above_floor: epoll_floor.map(|floor| by_round(gale, nginx, Some((floor, floor)))),
            above_own_floor: floor(gale.program.driver.as_deref().unwrap_or("epoll"), deferred)
                .zip(epoll_floor)
                .map(|floors| by_round(gale, nginx, Some(floors))),
        })
    };
    rows.iter().filter(|row| row.program.kind == Kind::Gale).filter_map(compare).collect()
}

/// Returns Gale's CPU time divided by nginx's for each round, with their floors subtracted.
fn by_round(gale: &Row, nginx: &Row, floors: Option<(&Row, &Row)>) -> Spread {
    let rounds = 0..gale.samples.len().min(nginx.samples.len());
    Spread::of(rounds.map(|round| {
        let of = |row: &Row| row.samples[round].server_us;
        let (gale_floor, nginx_floor) = floors.map_or((0.0, 0.0), |(gale, nginx)| (of(gale), of(nginx)));
        (of(gale) - gale_floor) / (of(nginx) - nginx_floor)
    }))
}

impl Table {
    fn markdown(&self, options: &Options) -> String {
        let seconds = options.run_time.as_secs();
        let mut text = format!("## {}\n\n{} rounds of {seconds} s\n\n", self.title, options.rounds);
        let other_load = |row: &Row| row.median(|sample| sample.server_cores_busy - sample.server_utilisation).max(0.0);
        let limit = |row: &Row| {
            let server = row.median(|sample| sample.server_utilisation);
            limit(server, row.median(|sample| sample.client_utilisation), other_load(row)).to_owned()
        };
        let other = |row: &Row| percent(other_load(row));
        let mut columns: Vec<Column<Row>> = vec![
            ("server", &|row| row.server.clone()),
            ("server µs", &|row| row.spread(|sample| sample.server_us).to_string()),
            ("client µs", &|row| format!("{:.2}", row.median(|sample| sample.client_us))),
            ("both µs", &|row| format!("{:.2}", row.median(|sample| sample.server_us + sample.client_us))),
            ("cores µs", &|row| format!("{:.2}", row.median(|sample| sample.cores_us))),
            ("requests/s", &|row| format!("{:.0}", row.median(|sample| sample.figures.requests_per_second))),
            ("server", &|row| percent(row.median(|sample| sample.server_utilisation))),
            ("client", &|row| percent(row.median(|sample| sample.client_utilisation))),
        ];
        if self.on_cores_of_their_own {
            columns.push(("other", &other));
            columns.push(("limit", &limit));
        }
        columns.push(("p50 µs", &|row| format!("{:.0}", row.median(|sample| sample.figures.latency_p50_us))));
        columns.push(("p99 µs", &|row| format!("{:.0}", row.median(|sample| sample.figures.latency_p99_us))));
        columns.push(("errors", &|row| row.errors().to_string()));
        text.push_str(&report::table_of(&self.rows, &columns));
        if !self.comparisons.is_empty() {
            let or_dash = |spread: &Option<Spread>| spread.map_or("–".to_owned(), |spread| spread.to_string());
            text.push('\n');
            text.push_str(&report::table_of(
                &self.comparisons,
                &[
                    ("round by round", &|one| format!("{} / {}", one.gale, one.nginx)),
                    ("ratio", &|one| one.ratio.to_string()),
                    ("above the floor of epoll", &|one| or_dash(&one.above_floor)),
                    ("above their own floors", &|one| or_dash(&one.above_own_floor)),
                ],
            ));
        }
        text.push('\n');
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_names_the_side_that_is_fully_busy() {
        assert_eq!(limit(0.99, 0.99, 0.0), "server");
        assert_eq!(limit(0.80, 0.99, 0.2), "client");
        assert_eq!(limit(0.50, 0.45, 0.5), "others");
        assert_eq!(limit(0.80, 0.70, 0.0), "neither");
    }
}
