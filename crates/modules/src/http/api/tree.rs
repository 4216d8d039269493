//! The readable tree: directories and their objects.
//!
//! ```text
//!   nginx  processes  connections  slabs  resolvers  ssl  workers
//!   http   requests  server_zones  location_zones  caches  limit_conns  limit_reqs  upstreams
//!   stream server_zones  limit_conns  limit_sessions  upstreams     where there is a stream block
//!   gale   loops  stalls  listeners  pools  devices  memory  files  datagrams    Gale's own
//! ```
//!
//! Nothing here blocks or depends on a loop, so it may run in any thread.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gale_base::http_date::{Date, date_of};
use gale_base::tally::Tally;
use gale_engine::configuration::{Configuration, RESOLVERS};
use gale_engine::zone::Occupancy;
use gale_http::configuration::HttpConfiguration;
use gale_http_cache::zone::{CacheZone, UseFigures};
use gale_http_upstream::caching::CacheStatus;
use gale_resolver::ResolverZone;
use gale_runtime::Moment;
use gale_stream::session::configuration::StreamConfiguration;
use gale_upstream::Group;
use gale_worker::traffic::{
    ALL_HANDSHAKES, HandshakeFigures, ServerZone, Times, Traffic, TrafficFigures, UnverifiedFigures,
};
use gale_worker::{Totals, reset_connections, reset_requests, totals_by_worker, totals_since_reset};
use serde_json::{Map, Value, json};

use super::answer::Fault;
use super::{own, upstreams};
use crate::shared::figures::{
    HTTP_LIMIT_CONNS, HTTP_LIMIT_REQS, HTTP_LOCATIONS, HTTP_SERVERS, STREAM_LIMIT_CONNS, STREAM_LIMIT_SESSIONS,
    STREAM_SERVERS,
};
use crate::shared::{limit_conn, limit_req};

/// Version of nginx whose configuration language Gale implements; clients of the API compare it.
const NGINX_VERSION: &str = "1.31.5";

/// Size of the pages in which the use of zones is reported.
const PAGE_BYTES: usize = 4096;

/// The server's state at one moment.
pub(in crate::http) struct View {
    pub configuration: Arc<Configuration>,
    /// The moment, by the loops' clock.
    pub now: Moment,
    /// The same moment, by the wall clock.
    pub wall: SystemTime,
    /// Local address of the request.
    pub address: String,
}

/// `fields=`: the wanted fields of each object.
pub(super) enum Fields {
    All,
    /// No fields: in lists, only the names.
    None,
    Some(BTreeSet<String>),
}

impl Fields {
    /// Parses the argument.
    pub fn of(argument: Option<&[u8]>) -> Fields {
        let Some(argument) = argument else { return Fields::All };
        let names = argument.split(|&byte| byte == b',').filter(|name| !name.is_empty());
        let names: BTreeSet<String> = names.map(|name| String::from_utf8_lossy(name).into_owned()).collect();
        if names.is_empty() { Fields::None } else { Fields::Some(names) }
    }

    fn keep(&self, value: Value) -> Value {
        match (value, self) {
            (Value::Object(fields), Fields::Some(names)) => {
                Value::Object(fields.into_iter().filter(|(name, _)| names.contains(name)).collect())
            }
            (Value::Object(_), Fields::None) => json!({}),
            (value, _) => value,
        }
    }
}

/// Returns `true` if the object at this path may be long, so that it should be built in a thread.
pub(super) fn may_be_long(path: &[&str]) -> bool {
    match path {
        ["http", "requests"] => false,
        ["http" | "stream", _, ..] | ["resolvers" | "slabs", ..] | ["gale", "listeners", ..] => true,
        _ => false,
    }
}

/// Returns the object at this path.
pub(super) fn read(view: &View, path: &[&str], fields: &Fields) -> Result<Value, Fault> {
    let zones = &view.configuration.zones;
    let value = match path {
        [] => return Ok(view.roots()),
        ["http"] => {
            let names =
                ["requests", "server_zones", "location_zones", "caches", "limit_conns", "limit_reqs", "upstreams"];
            return Ok(json!(names));
        }
        ["stream"] if view.has_stream() => {
            return Ok(json!(["server_zones", "limit_conns", "limit_sessions", "upstreams"]));
        }
        ["gale"] => {
            return Ok(json!(["loops", "stalls", "listeners", "pools", "devices", "memory", "files", "datagrams"]));
        }
        ["nginx"] => view.nginx(),
        ["processes"] => json!({ "respawned": gale_process::respawned() }),
        ["connections"] => connections(&totals_since_reset()),
        ["http", "requests"] => requests(&totals_since_reset()),
        ["ssl"] => ssl(&ALL_HANDSHAKES.figures()),
        ["workers"] => {
            let workers = totals_by_worker().into_iter().map(|(id, totals)| fields.keep(worker(id, &totals)));
            return Ok(workers.collect());
        }
        ["workers", id] => {
            let found = totals_by_worker().into_iter().find(|(known, _)| known.to_string() == *id);
            let (id, totals) = found.ok_or_else(|| Fault::new(404, "worker not found", "WorkerNotFound"))?;
            worker(id, &totals)
        }
        ["slabs", name @ ..] => return list(zones.tables(), name, fields, "Slab", slab),
        ["resolvers", name @ ..] => {
            let figures = zones.figures_of::<ResolverZone>(RESOLVERS);
            return list(figures, name, fields, "ResolverZone", |zone| resolver(&zone));
        }
        ["http", "server_zones", name @ ..] => {
            let figures = zones.figures_of::<ServerZone>(HTTP_SERVERS);
            return list(figures, name, fields, "ServerZone", |zone| http_server(&zone));
        }
        ["http", "location_zones", name @ ..] => {
            let figures = zones.figures_of::<Traffic>(HTTP_LOCATIONS);
            return list(figures, name, fields, "LocationZone", |zone| location(&zone));
        }
        ["http", "caches", name @ ..] => {
            return list(zones.of_type::<CacheZone>(), name, fields, "Cache", |zone| cache(&zone));
        }
        ["http", "limit_conns", name @ ..] => {
            let figures = zones.figures_of::<limit_conn::Verdicts>(HTTP_LIMIT_CONNS);
            return list(figures, name, fields, "LimitConn", |verdicts| limit_conn_verdicts(&verdicts));
        }
        ["http", "limit_reqs", name @ ..] => {
            let figures = zones.figures_of::<limit_req::Verdicts>(HTTP_LIMIT_REQS);
            return list(figures, name, fields, "LimitReq", |verdicts| limit_req_verdicts(&verdicts));
        }
        ["stream", "server_zones", name @ ..] if view.has_stream() => {
            let figures = zones.figures_of::<ServerZone>(STREAM_SERVERS);
            return list(figures, name, fields, "ServerZone", |zone| stream_server(&zone));
        }
        ["stream", "limit_conns", name @ ..] if view.has_stream() => {
            let figures = zones.figures_of::<limit_conn::Verdicts>(STREAM_LIMIT_CONNS);
            return list(figures, name, fields, "LimitConn", |verdicts| limit_conn_verdicts(&verdicts));
        }
        ["stream", "limit_sessions", name @ ..] if view.has_stream() => {
            let figures = zones.figures_of::<limit_req::Verdicts>(STREAM_LIMIT_SESSIONS);
            return list(figures, name, fields, "LimitSession", |verdicts| limit_req_verdicts(&verdicts));
        }
        ["http", "upstreams", name @ ..] if name.len() < 2 => {
            let groups = view.http_groups();
            let groups = groups.iter().map(|group| (group.name().as_bytes(), group));
            return list(groups, name, fields, "Upstream", |group| upstreams::report(view, group, false));
        }
        ["stream", "upstreams", name @ ..] if view.has_stream() && name.len() < 2 => {
            let groups = view.stream_groups();
            let groups = groups.iter().map(|group| (group.name().as_bytes(), group));
            return list(groups, name, fields, "Upstream", |group| upstreams::report(view, group, true));
        }
        ["gale", "loops"] => return Ok(own::loops()),
        ["gale", "stalls"] => return Ok(own::stalls(view)),
        ["gale", "listeners"] => return Ok(own::listeners()),
        ["gale", "pools"] => return Ok(own::pools()),
        ["gale", "devices"] => return Ok(own::devices()),
        ["gale", "memory"] => own::memory(),
        ["gale", "files"] => own::files(),
        ["gale", "datagrams"] => own::datagrams(),
        _ => return Err(Fault::path()),
    };
    Ok(fields.keep(value))
}

/// Paths of the objects and lists that are read as a whole.
pub(in crate::http) const ROOTS: &[&[&str]] = &[
    &["nginx"],
    &["processes"],
    &["connections"],
    &["ssl"],
    &["workers"],
    &["slabs"],
    &["resolvers"],
    &["http", "requests"],
    &["http", "server_zones"],
    &["http", "location_zones"],
    &["http", "upstreams"],
    &["http", "caches"],
    &["http", "limit_reqs"],
    &["http", "limit_conns"],
    &["stream", "server_zones"],
    &["stream", "upstreams"],
    &["stream", "limit_conns"],
    &["stream", "limit_sessions"],
    &["gale", "loops"],
    &["gale", "stalls"],
    &["gale", "listeners"],
    &["gale", "pools"],
    &["gale", "devices"],
    &["gale", "memory"],
    &["gale", "files"],
    &["gale", "datagrams"],
];

/// Returns everything that the dashboard shows. Missing objects are left out, such as `stream` without such a block.
pub(super) fn dashboard(view: &View) -> Map<String, Value> {
    let told = ROOTS.iter().filter_map(|path| Some((path.join("/"), read(view, path, &Fields::All).ok()?)));
    told.collect()
}

/// Resets the counters at this path.
pub(super) fn reset(view: &View, path: &[&str]) -> Result<(), Fault> {
    let zones = &view.configuration.zones;
    match path {
        ["connections"] => reset_connections(),
        ["http", "requests"] => reset_requests(),
        ["ssl"] => ALL_HANDSHAKES.reset(),
        ["resolvers", name, rest @ ..] => {
            found(zones.figures_of::<ResolverZone>(RESOLVERS), name, rest, "ResolverZone")?.reset();
        }
        ["http", "server_zones", name, rest @ ..] => {
            let zone = found(zones.figures_of::<ServerZone>(HTTP_SERVERS), name, rest, "ServerZone")?;
            zone.traffic.reset();
            zone.handshakes.reset();
        }
        ["stream", "server_zones", name, rest @ ..] if view.has_stream() => {
            let zone = found(zones.figures_of::<ServerZone>(STREAM_SERVERS), name, rest, "ServerZone")?;
            zone.traffic.reset();
            zone.handshakes.reset();
        }
        ["http", "location_zones", name, rest @ ..] => {
            found(zones.figures_of::<Traffic>(HTTP_LOCATIONS), name, rest, "LocationZone")?.reset();
        }
        ["http", "caches", name, rest @ ..] => {
            found(zones.of_type::<CacheZone>(), name, rest, "Cache")?.counters.uses.reset();
        }
        ["http", "limit_conns", name, rest @ ..] => {
            found(zones.figures_of::<limit_conn::Verdicts>(HTTP_LIMIT_CONNS), name, rest, "LimitConn")?.reset();
        }
        ["http", "limit_reqs", name, rest @ ..] => {
            found(zones.figures_of::<limit_req::Verdicts>(HTTP_LIMIT_REQS), name, rest, "LimitReq")?.reset();
        }
        ["stream", "limit_conns", name, rest @ ..] if view.has_stream() => {
            found(zones.figures_of::<limit_conn::Verdicts>(STREAM_LIMIT_CONNS), name, rest, "LimitConn")?.reset();
        }
        ["stream", "limit_sessions", name, rest @ ..] if view.has_stream() => {
            found(zones.figures_of::<limit_req::Verdicts>(STREAM_LIMIT_SESSIONS), name, rest, "LimitSession")?.reset();
        }
        ["http", "upstreams", name] => view.group(name, false)?.reset_figures(),
        ["stream", "upstreams", name] if view.has_stream() => view.group(name, true)?.reset_figures(),
        // The object exists and has no counters to reset.
        _ => return read(view, path, &Fields::All).and(Err(Fault::method())),
    }
    Ok(())
}

/// Returns all objects of a list by name, or the one with this name, which may contain slashes.
fn list<'n, F>(
    items: impl Iterator<Item = (&'n [u8], F)>,
    name: &[&str],
    fields: &Fields,
    kind: &str,
    describe: impl Fn(F) -> Value,
) -> Result<Value, Fault> {
    let text = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
    match name {
        [] if matches!(fields, Fields::None) => Ok(items.map(|(name, _)| Value::from(text(name))).collect()),
        [] => {
            let all: Map<String, Value> = items.map(|(name, item)| (text(name), fields.keep(describe(item)))).collect();
            Ok(Value::Object(all))
        }
        [name, rest @ ..] => Ok(fields.keep(describe(found(items, name, rest, kind)?))),
    }
}

/// Returns the object with this name.
fn found<'n, F>(
    mut items: impl Iterator<Item = (&'n [u8], F)>,
    name: &str,
    rest: &[&str],
    kind: &str,
) -> Result<F, Fault> {
    let wanted = [&[name], rest].concat().join("/");
    let item = items.find(|(name, _)| String::from_utf8_lossy(name) == wanted).map(|(_, item)| item);
    item.ok_or_else(|| {
        let words: String = kind.chars().fold(String::new(), |mut words, letter| {
            if letter.is_ascii_uppercase() && !words.is_empty() {
                words.push(' ');
            }
            words.push(letter.to_ascii_lowercase());
            words
        });
        Fault::new(404, format!("{words} not found"), format!("{kind}NotFound"))
    })
}

impl View {
    pub fn has_stream(&self) -> bool {
        self.configuration.protocol::<StreamConfiguration>().is_some()
    }

    pub fn http_groups(&self) -> Vec<Arc<Group>> {
        let http = self.configuration.protocol::<HttpConfiguration>();
        let groups = |http: &Arc<HttpConfiguration>| -> Vec<Arc<Group>> {
            http.upstreams.declared().iter().map(|upstream| Arc::clone(upstream.group())).collect()
        };
        http.as_ref().map(groups).unwrap_or_default()
    }

    pub fn stream_groups(&self) -> Vec<Arc<Group>> {
        let stream = self.configuration.protocol::<StreamConfiguration>();
        let groups = |stream: &Arc<StreamConfiguration>| -> Vec<Arc<Group>> {
            stream.upstreams.declared().iter().map(|upstream| Arc::clone(upstream.group())).collect()
        };
        stream.as_ref().map(groups).unwrap_or_default()
    }

    /// Returns the group with this name.
    pub(super) fn group(&self, name: &str, is_stream: bool) -> Result<Arc<Group>, Fault> {
        let groups = if is_stream { self.stream_groups() } else { self.http_groups() };
        let found = groups.into_iter().find(|group| group.name() == name);
        found.ok_or_else(|| Fault::new(404, "upstream not found", "UpstreamNotFound"))
    }

    fn roots(&self) -> Value {
        let all =
            ["nginx", "processes", "connections", "slabs", "http", "stream", "resolvers", "ssl", "workers", "gale"];
        all.iter().filter(|name| **name != "stream" || self.has_stream()).copied().collect()
    }

    fn nginx(&self) -> Value {
        let http = self.configuration.protocol::<HttpConfiguration>();
        json!({
            "version": NGINX_VERSION,
            "build": concat!("gale-", env!("CARGO_PKG_VERSION")),
            "address": self.address,
            "generation": http.map_or(1, |http| http.generation),
            "load_timestamp": timestamp(self.configuration.built),
            "timestamp": timestamp(self.wall),
            "pid": std::process::id(),
            "ppid": std::os::unix::process::parent_id(),
        })
    }

    /// Converts a moment of the loops' clock to a timestamp.
    pub fn wall_of(&self, moment: Moment) -> String {
        timestamp(self.wall.checked_sub(self.now.since(moment)).unwrap_or(UNIX_EPOCH))
    }
}

/// Formats a time as `2017-07-07T14:09:15.001Z`.
fn timestamp(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = since.as_secs();
    let (Date { year, month, day }, second) = (date_of(seconds / 86_400), seconds % 86_400);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let millis = since.subsec_millis();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

/// Returns milliseconds.
pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Returns the connections; as in nginx, idle ones are not active.
fn connections(totals: &Totals) -> Value {
    let idle = totals.waiting();
    json!({ "accepted": totals.accepted, "dropped": 0, "active": totals.active - idle, "idle": idle })
}

fn requests(totals: &Totals) -> Value {
    json!({ "total": totals.requests, "current": totals.reading + totals.writing })
}

fn worker(id: usize, totals: &Totals) -> Value {
    let (connections, requests) = (connections(totals), requests(totals));
    json!({ "id": id, "pid": std::process::id(), "connections": connections, "http": { "requests": requests } })
}

pub(super) fn ssl(figures: &HandshakeFigures) -> Value {
    let UnverifiedFigures { missing, expired, revoked, wrong_name, other } = figures.unverified;
    json!({
        "handshakes": figures.done,
        "handshakes_failed": figures.failed,
        "session_reuses": figures.reused,
        "no_common_protocol": figures.no_common_protocol,
        "no_common_cipher": figures.no_common_cipher,
        "handshake_timeout": figures.timed_out,
        "peer_rejected_cert": figures.certificate_rejected,
        "verify_failures": {
            "no_cert": missing,
            "expired_cert": expired,
            "revoked_cert": revoked,
            "hostname_mismatch": wrong_name,
            "other": other,
        },
    })
}

fn slab(occupancy: Occupancy) -> Value {
    let used = occupancy.bytes_used.div_ceil(PAGE_BYTES);
    let free = (occupancy.bytes / PAGE_BYTES).saturating_sub(used);
    json!({ "pages": { "used": used, "free": free }, "slots": {}, "entries": occupancy.entries })
}

fn resolver(zone: &ResolverZone) -> Value {
    let figures = zone.figures();
    json!({
        "requests": { "name": figures.names, "srv": figures.services, "addr": figures.addresses },
        "responses": {
            "noerror": figures.no_error,
            "formerr": 0,
            "servfail": figures.server_failure,
            "nxdomain": figures.not_found,
            "notimp": figures.unimplemented,
            "refused": figures.refused,
            "timedout": figures.timed_out,
            "unknown": 0,
        },
    })
}

/// Returns the responses by class and by code.
pub(super) fn responses(figures: &TrafficFigures) -> Value {
    let [informational, successful, redirecting, of_client, of_server] = figures.classes();
    let codes: Map<String, Value> = figures.codes().map(|(code, count)| (code.to_string(), count.into())).collect();
    json!({
        "1xx": informational,
        "2xx": successful,
        "3xx": redirecting,
        "4xx": of_client,
        "5xx": of_server,
        "codes": codes,
        "total": figures.responses(),
    })
}

/// Returns a histogram: the number of times up to each bound, in milliseconds.
pub(super) fn times(times: Times<'_>) -> Value {
    let name = |bound: Option<Duration>| bound.map_or("inf".to_owned(), |bound| millis(bound).to_string());
    let buckets: Map<String, Value> = times.cumulative().map(|(bound, count)| (name(bound), count.into())).collect();
    json!({ "count": times.count(), "sum": millis(times.sum()), "buckets": buckets })
}

fn http_server(zone: &ServerZone) -> Value {
    let figures = zone.traffic.figures();
    let mut described = location_of(&figures);
    described["processing"] = figures.processing().into();
    described["ssl"] = ssl(&zone.handshakes.figures());
    described
}

fn location(traffic: &Traffic) -> Value {
    location_of(&traffic.figures())
}

fn location_of(figures: &TrafficFigures) -> Value {
    json!({
        "requests": figures.begun(),
        "responses": responses(figures),
        "discarded": figures.discarded(),
        "received": figures.received(),
        "sent": figures.sent(),
        "first_byte_times": times(figures.first_byte()),
        "response_times": times(figures.whole()),
    })
}

fn stream_server(zone: &ServerZone) -> Value {
    let figures = zone.traffic.figures();
    let [_, successful, _, of_client, of_server] = figures.classes();
    json!({
        "processing": figures.processing(),
        "connections": figures.begun(),
        "sessions": { "2xx": successful, "4xx": of_client, "5xx": of_server, "total": figures.responses() },
        "discarded": figures.discarded(),
        "received": figures.received(),
        "sent": figures.sent(),
        "ssl": ssl(&zone.handshakes.figures()),
        "session_times": times(figures.whole()),
    })
}

fn cache(zone: &CacheZone) -> Value {
    let mut described = json!({
        "size": zone.index.bytes(),
        "entries": zone.index.stored(),
        "cold": zone.is_cold(),
        "disk_answers": zone.disk.is_well(),
    });
    let counters = &zone.counters;
    for (name, counter) in [
        ("collapsed", &counters.collapsed),
        ("evicted", &counters.evicted),
        ("loaded", &counters.loaded),
        ("damaged", &counters.damaged),
        ("disk_errors", &counters.disk_errors),
        ("disk_timeouts", &counters.disk_timeouts),
    ] {
        described[name] = counter.load(std::sync::atomic::Ordering::Relaxed).into();
    }
    let max_size = zone.options().max_size;
    if max_size < i64::MAX as u64 {
        described["max_size"] = max_size.into();
    }
    for (status, figures) in CacheStatus::ALL.into_iter().zip(zone.counters.uses.figures()) {
        let UseFigures { responses, bytes, written, bytes_written } = figures;
        let mut uses = json!({ "responses": responses, "bytes": bytes });
        if matches!(status, CacheStatus::Miss | CacheStatus::Expired | CacheStatus::Bypass) {
            uses["responses_written"] = written.into();
            uses["bytes_written"] = bytes_written.into();
        }
        described[status.name().to_ascii_lowercase()] = uses;
    }
    described
}

fn limit_conn_verdicts(verdicts: &limit_conn::Verdicts) -> Value {
    use limit_conn::Verdict::{Passed, Rejected, RejectedDryRun};
    let count = count_of(verdicts);
    json!({
        "passed": count(Passed as usize),
        "rejected": count(Rejected as usize),
        "rejected_dry_run": count(RejectedDryRun as usize),
    })
}

fn limit_req_verdicts(verdicts: &limit_req::Verdicts) -> Value {
    use limit_req::Verdict::{Delayed, DelayedDryRun, Passed, Rejected, RejectedDryRun};
    let count = count_of(verdicts);
    json!({
        "passed": count(Passed as usize),
        "delayed": count(Delayed as usize),
        "rejected": count(Rejected as usize),
        "delayed_dry_run": count(DelayedDryRun as usize),
        "rejected_dry_run": count(RejectedDryRun as usize),
    })
}

fn count_of<const N: usize>(tally: &Tally<N>) -> impl Fn(usize) -> u64 {
    let counters = tally.since_reset();
    move |counter| counters[counter]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_are_in_utc_with_milliseconds() {
        let time = UNIX_EPOCH + Duration::from_millis(1_499_436_555_001);
        assert_eq!(timestamp(time), "2017-07-07T14:09:15.001Z");
        assert_eq!(timestamp(UNIX_EPOCH - Duration::from_secs(1)), "1970-01-01T00:00:00.000Z");
    }

    #[test]
    fn unnamed_fields_are_left_out() {
        let value = || json!({ "a": 1, "b": { "c": 2 } });
        assert_eq!(Fields::of(None).keep(value()), value());
        assert_eq!(Fields::of(Some(b"b,x")).keep(value()), json!({ "b": { "c": 2 } }));
        assert_eq!(Fields::of(Some(b",")).keep(value()), json!({}));
    }

    #[test]
    fn names_alone_are_told_when_no_field_is_wanted() {
        let items = || [(&b"a\"\\\xff"[..], 1), (b"b/c", 2)].into_iter();
        let read =
            |name: &[&str], fields| list(items(), name, &Fields::of(fields), "Thing", |n: i32| json!({ "n": n }));
        assert_eq!(read(&[], Some(b"")).unwrap(), json!(["a\"\\\u{fffd}", "b/c"]));
        assert_eq!(read(&[], None).unwrap(), json!({ "a\"\\\u{fffd}": { "n": 1 }, "b/c": { "n": 2 } }));
        assert_eq!(read(&["b", "c"], None).unwrap(), json!({ "n": 2 }));
        assert!(read(&["b"], None).is_err());
    }
}
