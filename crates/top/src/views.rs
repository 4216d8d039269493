//! The views and their tables. Rates are relative to the previous response, percentiles cover the last 15 to 30
//! seconds, and all other figures count from the start of the worker process.

use std::collections::BTreeMap;

use super::figures::{Bound, Cache, Device, Figures, Group, Loop, Peer, Pool, Times, Zone};
use super::history::History;
use super::number::{NONE, bound, bytes, count, micros, percent, rate};
use super::table::{Cell, Table, Tone, visible};

/// A view: the tables shown at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    Totals,
    Zones,
    Peers,
    Caches,
    Loops,
}

impl View {
    /// All views, in the order of their keys.
    pub const ALL: [View; 5] = [View::Totals, View::Zones, View::Peers, View::Caches, View::Loops];

    pub fn name(self) -> &'static str {
        match self {
            View::Totals => "totals",
            View::Zones => "servers",
            View::Peers => "upstreams",
            View::Caches => "caches",
            View::Loops => "loops",
        }
    }

    /// Returns the tables of the view.
    pub fn tables(self, history: &History) -> Vec<Table> {
        match self {
            View::Totals => vec![totals(history)],
            View::Zones => vec![zones(history)],
            View::Peers => vec![peers(history)],
            View::Caches => vec![caches(history)],
            View::Loops => vec![loops(history), pools(history), devices(history)],
        }
    }
}

/// Returns the lines above every view.
pub fn head(history: &History) -> [String; 2] {
    let figures = history.figures();
    let Some(program) = &figures.nginx else { return [String::new(), String::new()] };
    let name = match &program.build {
        Some(build) => format!("{} (nginx {})", visible(build), visible(&program.version)),
        None => format!("nginx {}", visible(&program.version)),
    };
    [
        format!("{name}, process {}, configuration {}", program.pid, program.generation),
        format!(
            "{}/s requests, {} in progress; {} connections active, {} idle, {}/s new; {} stalls",
            rate(history.rate(|figures| Some(figures.requests.total))),
            count(figures.requests.current),
            count(figures.connections.active),
            count(figures.connections.idle),
            rate(history.rate(|figures| Some(figures.connections.accepted))),
            count(figures.stalls()),
        ),
    ]
}

fn number(value: u64) -> Cell {
    Cell::number(count(value), value as f64)
}

fn per_second(value: Option<f64>) -> Cell {
    Cell::number(rate(value), value.unwrap_or(-1.0))
}

fn bytes_per_second(value: Option<f64>) -> Cell {
    Cell::number(value.map_or_else(|| NONE.to_owned(), bytes), value.unwrap_or(-1.0))
}

fn quantile(times: Option<&Times>, part: f64) -> Cell {
    let found = times.and_then(|times| times.quantile(part));
    Cell::number(bound(found), found.map_or(-1.0, |Bound(millis)| millis as f64))
}

fn time(value: u64) -> Cell {
    Cell::number(micros(value), value as f64)
}

fn share(part: u64, whole: u64) -> Cell {
    Cell::number(percent(part, whole), if whole == 0 { -1.0 } else { part as f64 / whole as f64 })
}

fn totals(history: &History) -> Table {
    let figures = history.figures();
    let mut rows = Vec::new();
    let mut counter = |name: &str, find: &dyn Fn(&Figures) -> u64, is_fault: bool| {
        let recent = history.recent(|figures| Some(find(figures))).unwrap_or_default();
        let total = number(find(figures)).bad_if(is_fault && recent > 0);
        rows.push(vec![Cell::name(name), total, per_second(history.rate(|figures| Some(find(figures))))]);
    };
    let zones = |figures: &Figures, find: fn(&Zone) -> u64| figures.http_servers.values().map(find).sum::<u64>();
    counter("connections", &|figures| figures.connections.accepted, false);
    counter("requests", &|figures| figures.requests.total, false);
    counter("responses 2xx", &|figures| zones(figures, |zone| zone.responses.successful), false);
    counter("responses 3xx", &|figures| zones(figures, |zone| zone.responses.redirecting), false);
    counter("responses 4xx", &|figures| zones(figures, |zone| zone.responses.of_client), false);
    counter("responses 5xx", &|figures| zones(figures, |zone| zone.responses.of_server), true);
    counter("TLS handshakes", &|figures| figures.ssl.handshakes, false);
    counter("TLS handshakes failed", &|figures| figures.ssl.handshakes_failed, false);
    counter("event loop stalls", &Figures::stalls, true);
    counter("worker processes replaced", &|figures| figures.processes.respawned, true);
    let mut now = |name: &str, cell: Cell| rows.push(vec![Cell::name(name), cell, Cell::name("")]);
    let mut first_byte = Times::default();
    for name in figures.http_servers.keys() {
        let times = history.times(|figures| figures.http_servers.get(name).map(|zone| &zone.first_byte_times));
        times.iter().for_each(|times| first_byte.add(times));
    }
    now("time to first byte p50", quantile(Some(&first_byte), 0.5));
    now("time to first byte p99", quantile(Some(&first_byte), 0.99));
    let groups = || figures.http_groups.values().chain(figures.stream_groups.values());
    let all = groups().map(|group| group.peers.len()).sum::<usize>() as u64;
    let up = groups().flat_map(|group| &group.peers).filter(|peer| peer.state == "up").count() as u64;
    now("upstream servers up", Cell::number(format!("{up} of {all}"), up as f64));
    let cached = figures.caches.values().map(Cache::answered).sum();
    now("from caches", share(cached, figures.caches.values().map(Cache::responses).sum()));
    now(
        "memory shared by event loops",
        Cell::number(bytes(figures.memory.shared as f64), figures.memory.shared as f64),
    );
    Table { title: "totals", columns: &["metric", "total", "per second"], rows }
}

fn zones(history: &History) -> Table {
    let mut rows = Vec::new();
    for (kind, of_kind) in KINDS {
        for (name, zone) in of_kind(history.figures()) {
            rows.push(zone_row(history, kind, *of_kind, name, zone));
        }
    }
    let columns =
        &["zone", "kind", "req/s", "2xx/s", "4xx/s", "5xx/s", "p50", "p99", "now", "out/s", "in/s", "requests", "5xx"];
    Table { title: "servers, locations", columns, rows }
}

type Zones = fn(&Figures) -> &BTreeMap<String, Zone>;

const KINDS: &[(&str, Zones)] = &[
    ("server", |figures| &figures.http_servers),
    ("location", |figures| &figures.http_locations),
    ("stream", |figures| &figures.stream_servers),
];

fn zone_row(history: &History, kind: &str, of_kind: Zones, name: &str, zone: &Zone) -> Vec<Cell> {
    let grown = |find: fn(&Zone) -> u64| history.rate(|figures| of_kind(figures).get(name).map(find));
    let whole = history.times(|figures| of_kind(figures).get(name).map(|zone| &zone.response_times));
    let faults = grown(|zone| zone.responses.of_server);
    vec![
        Cell::name(name),
        Cell::name(kind),
        per_second(grown(|zone| zone.requests)),
        per_second(grown(|zone| zone.responses.successful)),
        per_second(grown(|zone| zone.responses.of_client)),
        per_second(faults).bad_if(faults.is_some_and(|rate| rate > 0.0)),
        quantile(whole.as_ref(), 0.5),
        quantile(whole.as_ref(), 0.99),
        zone.processing.map_or_else(|| Cell::number(NONE.to_owned(), -1.0), number),
        bytes_per_second(grown(|zone| zone.sent)),
        bytes_per_second(grown(|zone| zone.received)),
        number(zone.requests),
        number(zone.responses.of_server),
    ]
}

type Groups = fn(&Figures) -> &BTreeMap<String, Group>;

fn peers(history: &History) -> Table {
    let mut rows = Vec::new();
    let kinds: [Groups; 2] = [|figures| &figures.http_groups, |figures| &figures.stream_groups];
    for of_kind in kinds {
        for (name, group) in of_kind(history.figures()) {
            for (place, peer) in group.peers.iter().enumerate() {
                rows.push(peer_row(history, of_kind, name, place, peer));
            }
        }
    }
    let columns = &[
        "server", "state", "group", "now", "req/s", "5xx/s", "fails/s", "p50", "p99", "weight", "requests", "5xx",
        "fails", "downs",
    ];
    Table { title: "upstream servers", columns, rows }
}

fn peer_row(history: &History, of_kind: Groups, name: &str, place: usize, peer: &Peer) -> Vec<Cell> {
    // Finds the peer at the same position in another response, if it is the same server: the order rarely changes.
    fn same<'f>(of_kind: Groups, figures: &'f Figures, name: &str, place: usize, peer: &Peer) -> Option<&'f Peer> {
        let found = of_kind(figures).get(name)?.peers.get(place)?;
        (found.server == peer.server && found.id == peer.id).then_some(found)
    }
    let grown = |find: fn(&Peer) -> u64| history.rate(|figures| same(of_kind, figures, name, place, peer).map(find));
    let whole = history.times(|figures| same(of_kind, figures, name, place, peer).map(|peer| &peer.response_times));
    let (faults, fails) = (grown(|peer| peer.responses.of_server), grown(|peer| peer.fails));
    let tone = match peer.state.as_str() {
        "up" => Tone::Good,
        "draining" | "checking" => Tone::Doubtful,
        _ => Tone::Bad,
    };
    let address = if peer.backup { format!("{} backup", peer.server) } else { peer.server.clone() };
    vec![
        Cell::name(&address),
        Cell::name(&peer.state).toned(tone),
        Cell::name(name),
        number(peer.active),
        per_second(grown(|peer| peer.requests)),
        per_second(faults).bad_if(faults.is_some_and(|rate| rate > 0.0)),
        per_second(fails).bad_if(fails.is_some_and(|rate| rate > 0.0)),
        quantile(whole.as_ref(), 0.5),
        quantile(whole.as_ref(), 0.99),
        number(peer.weight),
        number(peer.requests),
        number(peer.responses.of_server),
        number(peer.fails),
        number(peer.unavail),
    ]
}

fn caches(history: &History) -> Table {
    let row = |(name, cache): (&String, &Cache)| {
        let grown = |find: fn(&Cache) -> u64| history.rate(|figures| figures.caches.get(name).map(find));
        let recent = |find: fn(&Cache) -> u64| history.recent(|figures| figures.caches.get(name).map(find));
        let full = match cache.max_size {
            Some(size) => share(cache.size, size),
            None => Cell::number(NONE.to_owned(), -1.0),
        };
        vec![
            Cell::name(name),
            Cell::number(bytes(cache.size as f64), cache.size as f64),
            full,
            per_second(grown(Cache::responses)),
            share(recent(Cache::answered).unwrap_or_default(), recent(Cache::responses).unwrap_or_default()),
            share(cache.answered(), cache.responses()),
            per_second(grown(|cache| cache.miss.responses)),
            per_second(grown(|cache| cache.bypass.responses)),
            number(cache.responses()),
            Cell::name(if cache.cold { "loading" } else { "" }),
        ]
    };
    let columns = &["cache", "size", "full", "resp/s", "hits now", "hits", "miss/s", "bypass/s", "responses", "index"];
    Table { title: "caches", columns, rows: history.figures().caches.iter().map(row).collect() }
}

fn loops(history: &History) -> Table {
    let row = |(place, each): (usize, &Loop)| {
        let of_worker = |figures: &Figures, find: fn(&Loop) -> u64| {
            figures.loops.get(place).filter(|found| found.worker == each.worker).map(find)
        };
        let turns = history.rate(|figures| of_worker(figures, |each| each.turns));
        let busy = history.rate(|figures| of_worker(figures, |each| each.busy));
        let stalls = history.recent(|figures| of_worker(figures, |each| each.stalls)).unwrap_or_default();
        let busy_part = busy.map_or_else(|| NONE.to_owned(), |millis| format!("{:.0} %", millis / 10.0));
        vec![
            Cell::name(&each.worker.to_string()),
            per_second(turns),
            Cell::number(busy_part, busy.unwrap_or(-1.0)),
            time(each.turn_times.p50),
            time(each.turn_times.p99),
            time(each.longest),
            number(each.stalls).bad_if(stalls > 0),
        ]
    };
    let columns = &["loop", "turns/s", "busy", "turn p50", "turn p99", "longest", "stalls"];
    Table { title: "event loops", columns, rows: history.figures().loops.iter().enumerate().map(row).collect() }
}

fn pools(history: &History) -> Table {
    let row = |(place, pool): (usize, &Pool)| {
        let of_pool = |figures: &Figures, find: fn(&Pool) -> u64| {
            figures.pools.get(place).filter(|found| found.name == pool.name).map(find)
        };
        let done = history.rate(|figures| of_pool(figures, |pool| pool.completed));
        let refused = history.recent(|figures| of_pool(figures, |pool| pool.refused)).unwrap_or_default();
        vec![
            Cell::name(&pool.name),
            per_second(done),
            number(pool.running),
            number(pool.waiting),
            Cell::number(format!("{} of {}", pool.threads, pool.threads_max), pool.threads as f64),
            time(pool.wait_times.p99),
            time(pool.run_times.p99),
            number(pool.refused).bad_if(refused > 0),
        ]
    };
    let columns = &["pool", "tasks/s", "running", "waiting", "threads", "wait p99", "run p99", "refused"];
    Table { title: "thread pools", columns, rows: history.figures().pools.iter().enumerate().map(row).collect() }
}

fn devices(history: &History) -> Table {
    let row = |(place, device): (usize, &Device)| {
        let of_device = |figures: &Figures, find: fn(&Device) -> u64| {
            figures.devices.get(place).filter(|found| found.device == device.device).map(find)
        };
        let reads = history.recent(|figures| of_device(figures, |device| device.reads.total)).unwrap_or_default();
        let waited = history.recent(|figures| of_device(figures, |device| device.reads.time)).unwrap_or_default();
        let mean = waited.saturating_mul(1000).checked_div(reads);
        vec![
            Cell::name(&format!("{} {}", device.device, device.name)),
            Cell::name(&device.condition).bad_if(&*device.condition == "not answering"),
            per_second(history.rate(|figures| of_device(figures, |device| device.reads.total))),
            number(device.reads.in_flight),
            mean.map_or_else(|| Cell::number(NONE.to_owned(), -1.0), time),
            number(device.tasks.running),
            number(device.tasks.waiting),
        ]
    };
    let columns = &["device", "condition", "reads/s", "in flight", "mean read", "tasks", "waiting"];
    Table { title: "devices", columns, rows: history.figures().devices.iter().enumerate().map(row).collect() }
}
