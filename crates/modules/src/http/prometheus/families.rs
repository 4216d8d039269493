//! Table of all metric families: the objects of each, and a function that writes the samples of one object.
//!
//! The samples of a family must be contiguous, so each family iterates over all of its objects. One row per family
//! keeps that simple, and lets a scrape be made in pieces.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use gale_base::histogram::Snapshot;
use gale_base::tally::Tally;
use gale_engine::configuration::RESOLVERS;
use gale_engine::zone::NamedZones;
use gale_files::{DeviceStatus, FileCounters, Rung};
use gale_http::configuration::HttpConfiguration;
use gale_http_cache::zone::{CacheZone, Counters};
use gale_http_upstream::caching::CacheStatus;
use gale_resolver::{ResolverFigures, ResolverZone};
use gale_runtime::stall::StallKind;
use gale_runtime::watchdog::ListenerStatus;
use gale_runtime::{Moment, PoolStatus, Remote};
use gale_stream::session::configuration::StreamConfiguration;
use gale_stream::session::loss::Loss;
use gale_upstream::{Group, PeerReport, ReportedPeers};
use gale_worker::traffic::{
    ALL_HANDSHAKES, CLASSES, HandshakeFigures, ServerZone, Traffic, TrafficFigures, UnverifiedFigures,
};
use gale_worker::{Totals, totals, totals_by_worker};

use super::text::{Kind, Out, label, seconds};
use crate::http::api::View;
use crate::http::otel::SPANS;
use crate::shared::figures::{
    HTTP_LIMIT_CONNS, HTTP_LIMIT_REQS, HTTP_LOCATIONS, HTTP_SERVERS, STREAM_LIMIT_CONNS, STREAM_LIMIT_SESSIONS,
    STREAM_SERVERS,
};
use crate::shared::{limit_conn, limit_req};

/// Objects of a kind, each with its name as a label.
type Named<F> = Vec<(Box<str>, Arc<F>)>;

/// All objects at the time of the scrape. Objects removed by a reload meanwhile are reported to the end.
pub(super) struct Sources {
    now: Moment,
    totals: Totals,
    workers: Vec<(usize, Totals)>,
    loops: Vec<(usize, Remote)>,
    listeners: Vec<ListenerStatus>,
    pools: Vec<PoolStatus>,
    devices: Vec<DeviceStatus>,
    files: FileCounters,
    http_servers: Named<ServerZone>,
    http_locations: Named<Traffic>,
    stream_servers: Named<ServerZone>,
    caches: Named<CacheZone>,
    resolvers: Named<ResolverZone>,
    http_limit_conns: Named<limit_conn::Verdicts>,
    stream_limit_conns: Named<limit_conn::Verdicts>,
    http_limit_reqs: Named<limit_req::Verdicts>,
    stream_limit_sessions: Named<limit_req::Verdicts>,
    http_groups: Groups,
    stream_groups: Groups,
}

impl Sources {
    /// Collects the objects. That takes some system calls for each listening socket and memory for each name, so it
    /// must not run on a loop.
    pub fn of(view: &View) -> Sources {
        let configuration = &*view.configuration;
        let zones = &*configuration.zones;
        let mut workers = totals_by_worker();
        workers.dedup_by_key(|(worker, _)| *worker);
        let http = configuration.protocol::<HttpConfiguration>();
        let stream = configuration.protocol::<StreamConfiguration>();
        let http_groups = http.iter().flat_map(|http| http.upstreams.declared());
        let http_groups = Groups::of(http_groups.map(|upstream| Arc::clone(upstream.group())));
        let stream_groups = stream.iter().flat_map(|stream| stream.upstreams.declared());
        let stream_groups = Groups::of(stream_groups.map(|upstream| Arc::clone(upstream.group())));
        Sources {
            now: view.now,
            totals: totals(),
            workers,
            loops: gale_runtime::watchdog::workers(),
            listeners: gale_runtime::watchdog::listeners(),
            pools: gale_runtime::pools(),
            devices: gale_files::devices(),
            files: gale_files::file_counters(),
            http_servers: named(zones, HTTP_SERVERS),
            http_locations: named(zones, HTTP_LOCATIONS),
            stream_servers: named(zones, STREAM_SERVERS),
            caches: zones.of_type().map(|(name, cache)| (label(name), cache)).collect(),
            resolvers: named(zones, RESOLVERS),
            http_limit_conns: named(zones, HTTP_LIMIT_CONNS),
            stream_limit_conns: named(zones, STREAM_LIMIT_CONNS),
            http_limit_reqs: named(zones, HTTP_LIMIT_REQS),
            stream_limit_sessions: named(zones, STREAM_LIMIT_SESSIONS),
            http_groups,
            stream_groups,
        }
    }
}

#[cfg(test)]
impl Sources {
    /// Returns sources that have only location zones with these names.
    pub fn of_locations(names: impl Iterator<Item = String>) -> Sources {
        let none = || Groups::of(std::iter::empty());
        Sources {
            now: Moment::from_nanos(0),
            totals: Totals::default(),
            workers: Vec::new(),
            loops: Vec::new(),
            listeners: Vec::new(),
            pools: Vec::new(),
            devices: Vec::new(),
            files: FileCounters::default(),
            http_servers: Vec::new(),
            http_locations: names.map(|name| (label(name.as_bytes()), Arc::default())).collect(),
            stream_servers: Vec::new(),
            caches: Vec::new(),
            resolvers: Vec::new(),
            http_limit_conns: Vec::new(),
            stream_limit_conns: Vec::new(),
            http_limit_reqs: Vec::new(),
            stream_limit_sessions: Vec::new(),
            http_groups: none(),
            stream_groups: none(),
        }
    }
}

fn named<F: Send + Sync + 'static>(zones: &NamedZones, kind: &'static str) -> Named<F> {
    zones.figures_of(kind).map(|(name, figures)| (label(name), figures)).collect()
}

/// Groups of servers, whose peers are numbered consecutively.
struct Groups {
    groups: Vec<(Box<str>, Arc<Group>, ReportedPeers)>,
    /// Number of peers before each group.
    before: Vec<usize>,
    peers: usize,
}

impl Groups {
    fn of(groups: impl Iterator<Item = Arc<Group>>) -> Groups {
        let groups: Vec<_> = groups
            .map(|group| {
                let peers = group.reported();
                (label(group.name().as_bytes()), group, peers)
            })
            .collect();
        let mut peers = 0;
        let count = |(.., own): &(_, _, ReportedPeers)| {
            peers += own.len();
            peers - own.len()
        };
        let before = groups.iter().map(count).collect();
        Groups { groups, before, peers }
    }

    /// Calls `write` with the peer of this number and its labels.
    fn with_peer(&self, number: usize, now: Moment, write: impl FnOnce(&PeerReport, &[(&str, &str)])) {
        let place = self.before.partition_point(|&before| before <= number) - 1;
        let (group, _, peers) = &self.groups[place];
        let peer = peers.report(number - self.before[place], now);
        let (address, server) = (label(peer.address.as_bytes()), label(&peer.server));
        let id = peer.id.map(|id| id.to_string()).unwrap_or_default();
        write(&peer, &[("upstream", group), ("peer", &address), ("server", &server), ("id", &id)]);
    }
}

/// A metric family.
pub(super) struct Family {
    /// Name, without the `_total` of a counter.
    pub name: &'static str,
    pub kind: Kind,
    /// Description.
    pub help: &'static str,
    /// Returns the number of objects.
    pub items: fn(&Sources) -> usize,
    /// Writes the samples of the object with this number.
    pub write: fn(&Sources, usize, &mut Out),
}

const fn row(
    name: &'static str,
    kind: Kind,
    help: &'static str,
    items: fn(&Sources) -> usize,
    write: fn(&Sources, usize, &mut Out),
) -> Family {
    Family { name, kind, help, items, write }
}

fn once(_: &Sources) -> usize {
    1
}

const CLASS_NAMES: [&str; CLASSES] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

fn classes(figures: &TrafficFigures, name: (&str, &str), out: &mut Out) {
    for (class, count) in CLASS_NAMES.iter().zip(figures.classes()) {
        out.sample(&[name, ("code", class)], count);
    }
}

/// Writes the responses by code, for http servers.
fn codes(figures: &TrafficFigures, name: (&str, &str), out: &mut Out) {
    for (code, count) in figures.codes() {
        out.sample(&[name, ("code", &code.to_string())], count);
    }
}

fn verdicts<const N: usize>(named: &(Box<str>, Arc<Tally<N>>), names: [&str; N], out: &mut Out) {
    let (zone, tally) = named;
    for (verdict, count) in names.iter().zip(tally.since_reset()) {
        out.sample(&[("zone", zone), ("verdict", verdict)], count);
    }
}

const CONN_VERDICTS: [&str; 3] = ["passed", "rejected", "rejected_dry_run"];
const REQ_VERDICTS: [&str; 5] = ["passed", "delayed", "rejected", "delayed_dry_run", "rejected_dry_run"];

fn handshakes(figures: &HandshakeFigures, labels: &[(&str, &str)], out: &mut Out) {
    let HandshakeFigures { done, reused, failed, timed_out, .. } = *figures;
    let HandshakeFigures { no_common_protocol, no_common_cipher, certificate_rejected, .. } = *figures;
    let other = failed - timed_out - no_common_protocol - no_common_cipher - certificate_rejected;
    for (result, count) in [
        ("full", done - reused),
        ("resumed", reused),
        ("failed", other),
        ("timed_out", timed_out),
        ("no_common_protocol", no_common_protocol),
        ("no_common_cipher", no_common_cipher),
        ("peer_rejected_cert", certificate_rejected),
    ] {
        out.sample(&[labels, &[("result", result)]].concat(), count);
    }
}

fn verify_failures(figures: &HandshakeFigures, labels: &[(&str, &str)], out: &mut Out) {
    let UnverifiedFigures { missing, expired, revoked, wrong_name, other } = figures.unverified;
    for (reason, count) in [
        ("no_cert", missing),
        ("expired_cert", expired),
        ("revoked_cert", revoked),
        ("hostname_mismatch", wrong_name),
        ("other", other),
    ] {
        out.sample(&[labels, &[("reason", reason)]].concat(), count);
    }
}

fn http_server(sources: &Sources, item: usize) -> (&str, TrafficFigures) {
    let (name, zone) = &sources.http_servers[item];
    (name, zone.traffic.figures())
}

fn http_location(sources: &Sources, item: usize) -> (&str, TrafficFigures) {
    let (name, zone) = &sources.http_locations[item];
    (name, zone.figures())
}

fn stream_server(sources: &Sources, item: usize) -> (&str, TrafficFigures) {
    let (name, zone) = &sources.stream_servers[item];
    (name, zone.traffic.figures())
}

fn http_servers(sources: &Sources) -> usize {
    sources.http_servers.len()
}

fn http_locations(sources: &Sources) -> usize {
    sources.http_locations.len()
}

fn stream_servers(sources: &Sources) -> usize {
    sources.stream_servers.len()
}

fn http_peers(sources: &Sources) -> usize {
    sources.http_groups.peers
}

fn stream_peers(sources: &Sources) -> usize {
    sources.stream_groups.peers
}

fn http_peer(sources: &Sources, item: usize, write: impl FnOnce(&PeerReport, &[(&str, &str)])) {
    sources.http_groups.with_peer(item, sources.now, write);
}

fn stream_peer(sources: &Sources, item: usize, write: impl FnOnce(&PeerReport, &[(&str, &str)])) {
    sources.stream_groups.with_peer(item, sources.now, write);
}

fn state(peer: &PeerReport, labels: &[(&str, &str)], out: &mut Out) {
    for state in ["up", "draining", "down", "unavail", "unhealthy"] {
        out.sample(&[labels, &[("state", state)]].concat(), u8::from(peer.state == state));
    }
}

use Kind::{Counter, Gauge, Histogram};

/// All families, in the order of the output.
pub(super) static FAMILIES: &[Family] = &[
    row("gale_build_info", Gauge, "Version of the running program.", once, |_, _, out| {
        out.sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);
    }),
    row(
        "gale_worker_processes_respawned",
        Counter,
        "Worker processes restarted after they had died.",
        once,
        |_, _, out| {
            out.sample(&[], gale_process::respawned());
        },
    ),
    row("gale_connections_accepted", Counter, "Accepted client connections.", once, |sources, _, out| {
        out.sample(&[], sources.totals.accepted);
    }),
    row("gale_connections", Gauge, "Open client connections by state.", once, |sources, _, out| {
        let totals = &sources.totals;
        let states = [("reading", totals.reading), ("writing", totals.writing), ("waiting", totals.waiting())];
        states.into_iter().for_each(|(state, count)| out.sample(&[("state", state)], count));
    }),
    row("gale_http_requests", Counter, "Client requests.", once, |sources, _, out| {
        out.sample(&[], sources.totals.requests);
    }),
    row(
        "gale_worker_http_requests",
        Counter,
        "Client requests by worker.",
        |sources| sources.workers.len(),
        |sources, item, out| {
            let (worker, totals) = &sources.workers[item];
            out.sample(&[("worker", &worker.to_string())], totals.requests);
        },
    ),
    row("gale_ssl_handshakes", Counter, "TLS handshakes with clients.", once, |_, _, out| {
        handshakes(&ALL_HANDSHAKES.figures(), &[], out);
    }),
    row("gale_ssl_verify_failures", Counter, "Client certificates that failed verification.", once, |_, _, out| {
        verify_failures(&ALL_HANDSHAKES.figures(), &[], out);
    }),
    row("gale_otel_spans", Counter, "OpenTelemetry spans by export result.", once, |_, _, out| {
        for (result, count) in ["exported", "dropped"].iter().zip(SPANS.sums()) {
            out.sample(&[("result", result)], count);
        }
    }),
    // Server zones.
    row("gale_http_server_zone_requests", Counter, "Client requests.", http_servers, |sources, item, out| {
        let (zone, figures) = http_server(sources, item);
        out.sample(&[("zone", zone)], figures.begun());
    }),
    row(
        "gale_http_server_zone_processing",
        Gauge,
        "Client requests being processed.",
        http_servers,
        |sources, item, out| {
            let (zone, figures) = http_server(sources, item);
            out.sample(&[("zone", zone)], figures.processing());
        },
    ),
    row(
        "gale_http_server_zone_responses",
        Counter,
        "Responses to clients by status class.",
        http_servers,
        |sources, item, out| {
            let (zone, figures) = http_server(sources, item);
            classes(&figures, ("zone", zone), out);
        },
    ),
    row(
        "gale_http_server_zone_responses_by_code",
        Counter,
        "Responses to clients by status code.",
        http_servers,
        |sources, item, out| {
            let (zone, figures) = http_server(sources, item);
            codes(&figures, ("zone", zone), out);
        },
    ),
    row(
        "gale_http_server_zone_discarded",
        Counter,
        "Requests completed without a response.",
        http_servers,
        |sources, item, out| {
            let (zone, figures) = http_server(sources, item);
            out.sample(&[("zone", zone)], figures.discarded());
        },
    ),
    row(
        "gale_http_server_zone_received_bytes",
        Counter,
        "Bytes received from clients.",
        http_servers,
        |sources, item, out| {
            let (zone, figures) = http_server(sources, item);
            out.sample(&[("zone", zone)], figures.received());
        },
    ),
    row("gale_http_server_zone_sent_bytes", Counter, "Bytes sent to clients.", http_servers, |sources, item, out| {
        let (zone, figures) = http_server(sources, item);
        out.sample(&[("zone", zone)], figures.sent());
    }),
    row(
        "gale_http_server_zone_first_byte_seconds",
        Histogram,
        "Time from the first byte of a request to the first byte of its response.",
        http_servers,
        |sources, item, out| {
            let (zone, figures) = http_server(sources, item);
            out.times(&[("zone", zone)], figures.first_byte());
        },
    ),
    row(
        "gale_http_server_zone_request_seconds",
        Histogram,
        "Time from the first byte of a request to the last byte of its response.",
        http_servers,
        |sources, item, out| {
            let (zone, figures) = http_server(sources, item);
            out.times(&[("zone", zone)], figures.whole());
        },
    ),
    row(
        "gale_http_server_zone_ssl_handshakes",
        Counter,
        "TLS handshakes with clients.",
        http_servers,
        |sources, item, out| {
            let (name, zone) = &sources.http_servers[item];
            handshakes(&zone.handshakes.figures(), &[("zone", name)], out);
        },
    ),
    row(
        "gale_http_server_zone_ssl_verify_failures",
        Counter,
        "Client certificates that failed verification.",
        http_servers,
        |sources, item, out| {
            let (name, zone) = &sources.http_servers[item];
            verify_failures(&zone.handshakes.figures(), &[("zone", name)], out);
        },
    ),
    // Location zones.
    row("gale_http_location_zone_requests", Counter, "Client requests.", http_locations, |sources, item, out| {
        let (zone, figures) = http_location(sources, item);
        out.sample(&[("zone", zone)], figures.begun());
    }),
    row(
        "gale_http_location_zone_responses",
        Counter,
        "Responses to clients by status class.",
        http_locations,
        |sources, item, out| {
            let (zone, figures) = http_location(sources, item);
            classes(&figures, ("zone", zone), out);
        },
    ),
    row(
        "gale_http_location_zone_discarded",
        Counter,
        "Requests completed without a response.",
        http_locations,
        |sources, item, out| {
            let (zone, figures) = http_location(sources, item);
            out.sample(&[("zone", zone)], figures.discarded());
        },
    ),
    row(
        "gale_http_location_zone_received_bytes",
        Counter,
        "Bytes received from clients.",
        http_locations,
        |sources, item, out| {
            let (zone, figures) = http_location(sources, item);
            out.sample(&[("zone", zone)], figures.received());
        },
    ),
    row(
        "gale_http_location_zone_sent_bytes",
        Counter,
        "Bytes sent to clients.",
        http_locations,
        |sources, item, out| {
            let (zone, figures) = http_location(sources, item);
            out.sample(&[("zone", zone)], figures.sent());
        },
    ),
    row(
        "gale_http_location_zone_first_byte_seconds",
        Histogram,
        "Time from the first byte of a request to the first byte of its response.",
        http_locations,
        |sources, item, out| {
            let (zone, figures) = http_location(sources, item);
            out.times(&[("zone", zone)], figures.first_byte());
        },
    ),
    row(
        "gale_http_location_zone_request_seconds",
        Histogram,
        "Time from the first byte of a request to the last byte of its response.",
        http_locations,
        |sources, item, out| {
            let (zone, figures) = http_location(sources, item);
            out.times(&[("zone", zone)], figures.whole());
        },
    ),
    // Peers.
    row(
        "gale_http_peer_state",
        Gauge,
        "State of the peer: 1 for the current state, 0 for the others.",
        http_peers,
        |sources, item, out| {
            http_peer(sources, item, |peer, labels| state(peer, labels, out));
        },
    ),
    row("gale_http_peer_active", Gauge, "Requests in progress.", http_peers, |sources, item, out| {
        http_peer(sources, item, |peer, labels| out.sample(labels, peer.traffic.processing()));
    }),
    row("gale_http_peer_requests", Counter, "Requests passed to the peer.", http_peers, |sources, item, out| {
        http_peer(sources, item, |peer, labels| out.sample(labels, peer.traffic.begun()));
    }),
    row(
        "gale_http_peer_responses",
        Counter,
        "Responses of the peer by status class.",
        http_peers,
        |sources, item, out| {
            http_peer(sources, item, |peer, labels| {
                for (class, count) in CLASS_NAMES.iter().zip(peer.traffic.classes()) {
                    out.sample(&[labels, &[("code", class)]].concat(), count);
                }
            });
        },
    ),
    row("gale_http_peer_received_bytes", Counter, "Bytes received from the peer.", http_peers, |sources, item, out| {
        http_peer(sources, item, |peer, labels| out.sample(labels, peer.traffic.received()));
    }),
    row("gale_http_peer_sent_bytes", Counter, "Bytes sent to the peer.", http_peers, |sources, item, out| {
        http_peer(sources, item, |peer, labels| out.sample(labels, peer.traffic.sent()));
    }),
    row(
        "gale_http_peer_fails",
        Counter,
        "Failed attempts to communicate with the peer.",
        http_peers,
        |sources, item, out| {
            http_peer(sources, item, |peer, labels| out.sample(labels, peer.fails));
        },
    ),
    row(
        "gale_http_peer_unavailable",
        Counter,
        "Times the peer became unavailable because of failed attempts.",
        http_peers,
        |sources, item, out| {
            http_peer(sources, item, |peer, labels| out.sample(labels, peer.downs));
        },
    ),
    row(
        "gale_http_peer_down_seconds",
        Counter,
        "Time during which the peer was unavailable because of failed attempts.",
        http_peers,
        |sources, item, out| {
            http_peer(sources, item, |peer, labels| out.sample(labels, seconds(peer.downtime)));
        },
    ),
    row("gale_http_peer_health_checks", Counter, "Health checks by result.", http_peers, |sources, item, out| {
        http_peer(sources, item, |peer, labels| {
            let (failed, passed) = (peer.health.fails, peer.health.checks - peer.health.fails.min(peer.health.checks));
            for (result, count) in [("passed", passed), ("failed", failed)] {
                out.sample(&[labels, &[("result", result)]].concat(), count);
            }
        });
    }),
    row(
        "gale_http_peer_first_byte_seconds",
        Histogram,
        "Time to receive the response header.",
        http_peers,
        |sources, item, out| http_peer(sources, item, |peer, labels| out.times(labels, peer.traffic.first_byte())),
    ),
    row(
        "gale_http_peer_response_seconds",
        Histogram,
        "Time to receive the whole response.",
        http_peers,
        |sources, item, out| http_peer(sources, item, |peer, labels| out.times(labels, peer.traffic.whole())),
    ),
    // Groups.
    row(
        "gale_http_upstream_keepalive",
        Gauge,
        "Idle keepalive connections.",
        |sources| sources.http_groups.groups.len(),
        |sources, item, out| {
            let (name, group, _) = &sources.http_groups.groups[item];
            out.sample(&[("upstream", name)], group.idle_connections());
        },
    ),
    row(
        "gale_http_upstream_queue",
        Gauge,
        "Requests waiting in the queue.",
        |sources| sources.http_groups.groups.len(),
        |sources, item, out| {
            let (name, group, _) = &sources.http_groups.groups[item];
            group.queue().into_iter().for_each(|queue| out.sample(&[("upstream", name)], queue.waiting));
        },
    ),
    row(
        "gale_http_upstream_queue_overflows",
        Counter,
        "Requests rejected because the queue was full.",
        |sources| sources.http_groups.groups.len(),
        |sources, item, out| {
            let (name, group, _) = &sources.http_groups.groups[item];
            group.queue().into_iter().for_each(|queue| out.sample(&[("upstream", name)], queue.overflows));
        },
    ),
    // Limits, caches, name servers.
    row(
        "gale_http_limit_req",
        Counter,
        "Requests by limit_req result.",
        |sources| sources.http_limit_reqs.len(),
        |sources, item, out| verdicts(&sources.http_limit_reqs[item], REQ_VERDICTS, out),
    ),
    row(
        "gale_http_limit_conn",
        Counter,
        "Requests by limit_conn result.",
        |sources| sources.http_limit_conns.len(),
        |sources, item, out| verdicts(&sources.http_limit_conns[item], CONN_VERDICTS, out),
    ),
    row(
        "gale_http_cache_bytes",
        Gauge,
        "Size of the files in the cache.",
        |sources| sources.caches.len(),
        |sources, item, out| {
            let (name, cache) = &sources.caches[item];
            out.sample(&[("cache", name)], cache.index.bytes());
        },
    ),
    row(
        "gale_http_cache_responses",
        Counter,
        "Responses by cache status.",
        |sources| sources.caches.len(),
        |sources, item, out| cache_uses(sources, item, out, |figures| figures.responses),
    ),
    row(
        "gale_http_cache_response_bytes",
        Counter,
        "Bytes of response bodies by cache status.",
        |sources| sources.caches.len(),
        |sources, item, out| cache_uses(sources, item, out, |figures| figures.bytes),
    ),
    row(
        "gale_http_cache_written",
        Counter,
        "Responses written to the cache, by cache status.",
        |sources| sources.caches.len(),
        |sources, item, out| cache_uses(sources, item, out, |figures| figures.written),
    ),
    row(
        "gale_http_cache_written_bytes",
        Counter,
        "Bytes written to the cache, by cache status.",
        |sources| sources.caches.len(),
        |sources, item, out| cache_uses(sources, item, out, |figures| figures.bytes_written),
    ),
    row(
        "gale_http_cache_evicted",
        Counter,
        "Entries evicted to make room.",
        |sources| sources.caches.len(),
        |sources, item, out| cache_counter(sources, item, out, |counters| &counters.evicted),
    ),
    row(
        "gale_http_cache_entries",
        Gauge,
        "Responses stored in the cache.",
        |sources| sources.caches.len(),
        |sources, item, out| {
            let (name, cache) = &sources.caches[item];
            out.sample(&[("cache", name)], cache.index.stored());
        },
    ),
    row(
        "gale_http_cache_collapsed",
        Counter,
        "Requests served from a response that was being fetched for another request.",
        |sources| sources.caches.len(),
        |sources, item, out| cache_counter(sources, item, out, |counters| &counters.collapsed),
    ),
    row(
        "gale_http_cache_loaded",
        Counter,
        "Files loaded by the cache loader.",
        |sources| sources.caches.len(),
        |sources, item, out| cache_counter(sources, item, out, |counters| &counters.loaded),
    ),
    row(
        "gale_http_cache_damaged",
        Counter,
        "Damaged files that were found in the cache.",
        |sources| sources.caches.len(),
        |sources, item, out| cache_counter(sources, item, out, |counters| &counters.damaged),
    ),
    row(
        "gale_http_cache_disk_errors",
        Counter,
        "Disk operations that failed.",
        |sources| sources.caches.len(),
        |sources, item, out| cache_counter(sources, item, out, |counters| &counters.disk_errors),
    ),
    row(
        "gale_http_cache_disk_timeouts",
        Counter,
        "Requests that stopped waiting for the disk.",
        |sources| sources.caches.len(),
        |sources, item, out| cache_counter(sources, item, out, |counters| &counters.disk_timeouts),
    ),
    row(
        "gale_http_cache_disk_answers",
        Gauge,
        "State of the disk: 1 if it responds, 0 while requests bypass it.",
        |sources| sources.caches.len(),
        |sources, item, out| {
            let (name, cache) = &sources.caches[item];
            out.sample(&[("cache", name)], u64::from(cache.disk.is_well()));
        },
    ),
    row(
        "gale_resolver_questions",
        Counter,
        "DNS queries by type.",
        |sources| sources.resolvers.len(),
        |sources, item, out| {
            let (zone, ResolverFigures { names, services, addresses, .. }) = resolver(sources, item);
            for (kind, count) in [("name", names), ("srv", services), ("addr", addresses)] {
                out.sample(&[("zone", zone), ("kind", kind)], count);
            }
        },
    ),
    row(
        "gale_resolver_answers",
        Counter,
        "DNS responses by result.",
        |sources| sources.resolvers.len(),
        |sources, item, out| {
            let (zone, figures) = resolver(sources, item);
            for (result, count) in [
                ("noerror", figures.no_error),
                ("servfail", figures.server_failure),
                ("nxdomain", figures.not_found),
                ("notimp", figures.unimplemented),
                ("refused", figures.refused),
                ("timedout", figures.timed_out),
            ] {
                out.sample(&[("zone", zone), ("result", result)], count);
            }
        },
    ),
    // Stream.
    row(
        "gale_stream_server_zone_connections",
        Counter,
        "Accepted client connections.",
        stream_servers,
        |sources, item, out| {
            let (zone, figures) = stream_server(sources, item);
            out.sample(&[("zone", zone)], figures.begun());
        },
    ),
    row("gale_stream_server_zone_processing", Gauge, "Sessions in progress.", stream_servers, |sources, item, out| {
        let (zone, figures) = stream_server(sources, item);
        out.sample(&[("zone", zone)], figures.processing());
    }),
    row(
        "gale_stream_server_zone_sessions",
        Counter,
        "Completed sessions by status class.",
        stream_servers,
        |sources, item, out| {
            let (zone, figures) = stream_server(sources, item);
            classes(&figures, ("zone", zone), out);
        },
    ),
    row(
        "gale_stream_server_zone_received_bytes",
        Counter,
        "Bytes received from clients.",
        stream_servers,
        |sources, item, out| {
            let (zone, figures) = stream_server(sources, item);
            out.sample(&[("zone", zone)], figures.received());
        },
    ),
    row(
        "gale_stream_server_zone_sent_bytes",
        Counter,
        "Bytes sent to clients.",
        stream_servers,
        |sources, item, out| {
            let (zone, figures) = stream_server(sources, item);
            out.sample(&[("zone", zone)], figures.sent());
        },
    ),
    row(
        "gale_stream_server_zone_session_seconds",
        Histogram,
        "Duration of sessions.",
        stream_servers,
        |sources, item, out| {
            let (zone, figures) = stream_server(sources, item);
            out.times(&[("zone", zone)], figures.whole());
        },
    ),
    row(
        "gale_stream_peer_state",
        Gauge,
        "State of the peer: 1 for the current state, 0 for the others.",
        stream_peers,
        |sources, item, out| {
            stream_peer(sources, item, |peer, labels| state(peer, labels, out));
        },
    ),
    row("gale_stream_peer_active", Gauge, "Sessions in progress.", stream_peers, |sources, item, out| {
        stream_peer(sources, item, |peer, labels| out.sample(labels, peer.traffic.processing()));
    }),
    row("gale_stream_peer_connections", Counter, "Sessions passed to the peer.", stream_peers, |sources, item, out| {
        stream_peer(sources, item, |peer, labels| out.sample(labels, peer.traffic.begun()));
    }),
    row(
        "gale_stream_peer_received_bytes",
        Counter,
        "Bytes received from the peer.",
        stream_peers,
        |sources, item, out| {
            stream_peer(sources, item, |peer, labels| out.sample(labels, peer.traffic.received()));
        },
    ),
    row("gale_stream_peer_sent_bytes", Counter, "Bytes sent to the peer.", stream_peers, |sources, item, out| {
        stream_peer(sources, item, |peer, labels| out.sample(labels, peer.traffic.sent()));
    }),
    row(
        "gale_stream_peer_fails",
        Counter,
        "Failed attempts to communicate with the peer.",
        stream_peers,
        |sources, item, out| {
            stream_peer(sources, item, |peer, labels| out.sample(labels, peer.fails));
        },
    ),
    row(
        "gale_stream_peer_unavailable",
        Counter,
        "Times the peer became unavailable because of failed attempts.",
        stream_peers,
        |sources, item, out| {
            stream_peer(sources, item, |peer, labels| out.sample(labels, peer.downs));
        },
    ),
    row(
        "gale_stream_peer_first_byte_seconds",
        Histogram,
        "Time to receive the first byte.",
        stream_peers,
        |sources, item, out| stream_peer(sources, item, |peer, labels| out.times(labels, peer.traffic.first_byte())),
    ),
    row("gale_stream_peer_session_seconds", Histogram, "Duration of sessions.", stream_peers, |sources, item, out| {
        stream_peer(sources, item, |peer, labels| out.times(labels, peer.traffic.whole()))
    }),
    row(
        "gale_stream_limit_conn",
        Counter,
        "Sessions by limit_conn result.",
        |sources| sources.stream_limit_conns.len(),
        |sources, item, out| verdicts(&sources.stream_limit_conns[item], CONN_VERDICTS, out),
    ),
    row(
        "gale_stream_limit_session",
        Counter,
        "Sessions by limit_session result.",
        |sources| sources.stream_limit_sessions.len(),
        |sources, item, out| verdicts(&sources.stream_limit_sessions[item], REQ_VERDICTS, out),
    ),
    // Gale's own.
    row("gale_loop_turn_seconds", Histogram, "Duration of event loop turns.", loops, |sources, item, out| {
        let (worker, remote) = &sources.loops[item];
        out.own_times(&[("worker", &worker.to_string())], &remote.turns().times());
    }),
    row("gale_loop_leased_bytes", Gauge, "Buffer memory leased by the event loop.", loops, |sources, item, out| {
        let (worker, remote) = &sources.loops[item];
        out.sample(&[("worker", &worker.to_string())], remote.leased_bytes());
    }),
    row(
        "gale_loop_leased_max_bytes",
        Gauge,
        "Limit on the buffer memory leased by the event loop.",
        loops,
        |sources, item, out| {
            let (worker, remote) = &sources.loops[item];
            out.sample(&[("worker", &worker.to_string())], remote.leased_bytes_max());
        },
    ),
    row(
        "gale_loop_stalls",
        Counter,
        "Event loop turns longer than 10 ms, by cause if known.",
        loops,
        |sources, item, out| {
            let (worker, remote) = &sources.loops[item];
            let (worker, turns) = (worker.to_string(), remote.turns());
            for kind in StallKind::ALL {
                out.sample(&[("worker", &worker), ("kind", &kind.to_string())], turns.filed(kind).count);
            }
        },
    ),
    row(
        "gale_loop_longest_turn_seconds",
        Gauge,
        "Duration of the longest event loop turn.",
        loops,
        |sources, item, out| {
            let (worker, remote) = &sources.loops[item];
            out.sample(&[("worker", &worker.to_string())], seconds(remote.turns().longest()));
        },
    ),
    row("gale_pool_running", Gauge, "Tasks being executed by threads of the pool.", pools, |sources, item, out| {
        pool(sources, item, out, |pool| pool.counters.running as u64);
    }),
    row("gale_pool_waiting", Gauge, "Tasks waiting in the queue of the pool.", pools, |sources, item, out| {
        pool(sources, item, out, |pool| pool.counters.waiting as u64);
    }),
    row("gale_pool_completed", Counter, "Completed tasks.", pools, |sources, item, out| {
        pool(sources, item, out, |pool| pool.counters.completed);
    }),
    row("gale_pool_refused", Counter, "Tasks rejected because the queue was full.", pools, |sources, item, out| {
        pool(sources, item, out, |pool| pool.counters.refused);
    }),
    row("gale_pool_wait_seconds", Histogram, "Time tasks spent in the queue.", pools, |sources, item, out| {
        pool_times(sources, item, out, |pool| &pool.wait_times);
    }),
    row("gale_pool_run_seconds", Histogram, "Execution time of tasks.", pools, |sources, item, out| {
        pool_times(sources, item, out, |pool| &pool.run_times);
    }),
    row("gale_listener_waiting", Gauge, "Connections waiting to be accepted.", listeners, |sources, item, out| {
        listener(sources, item, out, |listener| listener.waiting);
    }),
    row(
        "gale_listener_waiting_max",
        Gauge,
        "Maximum number of connections waiting to be accepted.",
        listeners,
        |sources, item, out| {
            listener(sources, item, out, |listener| listener.waiting_max);
        },
    ),
    row(
        "gale_device_condition",
        Gauge,
        "Condition of the device: 1 for the current condition, 0 for the others.",
        devices,
        |sources, item, out| {
            let (device, labels) = device(sources, item);
            for condition in DeviceStatus::CONDITIONS {
                let is_so = u8::from(device.condition == condition);
                out.sample(&[("device", &labels[0]), ("name", &labels[1]), ("condition", condition)], is_so);
            }
        },
    ),
    row(
        "gale_device_reads_in_flight",
        Gauge,
        "File reads in progress on the device.",
        devices,
        |sources, item, out| {
            device_sample(sources, item, out, |device| f64::from(device.reads_in_flight));
        },
    ),
    row(
        "gale_device_reads",
        Counter,
        "File reads that were not served from the page cache.",
        devices,
        |sources, item, out| {
            device_sample(sources, item, out, |device| device.reads as f64);
        },
    ),
    row(
        "gale_device_read_seconds",
        Counter,
        "Total duration of file reads that were not served from the page cache.",
        devices,
        |sources, item, out| {
            device_sample(sources, item, out, |device| seconds(device.read_time));
        },
    ),
    row("gale_device_tasks", Gauge, "Thread pool tasks for the device, by state.", devices, |sources, item, out| {
        let (device, labels) = device(sources, item);
        for (state, count) in [("running", device.running), ("waiting", device.waiting)] {
            out.sample(&[("device", &labels[0]), ("name", &labels[1]), ("state", state)], count);
        }
    }),
    row("gale_stream_datagrams_lost", Counter, "Datagrams dropped by stream, by reason.", once, |_, _, out| {
        Loss::ALL.iter().for_each(|loss| out.sample(&[("reason", loss.name())], loss.count()));
    }),
    row("gale_shared_bytes", Gauge, "Memory that event loops have passed to each other.", once, |_, _, out| {
        out.sample(&[], gale_runtime::shared_bytes());
    }),
    row("gale_file_pieces", Counter, "File pieces sent, by method.", once, |sources, _, out| {
        for (rung, pieces) in Rung::ALL.iter().zip(sources.files.pieces) {
            out.sample(&[("way", rung.name())], pieces);
        }
    }),
    row("gale_file_bytes", Counter, "File bytes sent, by method.", once, |sources, _, out| {
        for (rung, bytes) in Rung::ALL.iter().zip(sources.files.bytes) {
            out.sample(&[("way", rung.name())], bytes);
        }
    }),
    row("gale_page_cache_looks", Counter, "Page cache lookups by result.", once, |sources, _, out| {
        let files = &sources.files;
        for (result, count) in [("hit", files.probe_hits), ("miss", files.probe_misses), ("unlooked", files.unlooked)] {
            out.sample(&[("result", result)], count);
        }
    }),
    row("gale_page_cache_questions", Counter, "Queries to the page cache helper.", once, |sources, _, out| {
        out.sample(&[], sources.files.questions);
    }),
    row(
        "gale_page_cache_resident_answers",
        Counter,
        "Queries to the page cache helper that found the data in memory.",
        once,
        |sources, _, out| {
            out.sample(&[], sources.files.resident_answers);
        },
    ),
];

fn cache_counter(sources: &Sources, item: usize, out: &mut Out, of: fn(&Counters) -> &AtomicU64) {
    let (name, cache) = &sources.caches[item];
    out.sample(&[("cache", name)], of(&cache.counters).load(Relaxed));
}

fn cache_uses(sources: &Sources, item: usize, out: &mut Out, of: fn(&gale_http_cache::zone::UseFigures) -> u64) {
    let (name, cache) = &sources.caches[item];
    for (status, figures) in CacheStatus::ALL.iter().zip(cache.counters.uses.figures()) {
        out.sample(&[("cache", name), ("status", &status.name().to_ascii_lowercase())], of(&figures));
    }
}

fn resolver(sources: &Sources, item: usize) -> (&str, ResolverFigures) {
    let (name, zone) = &sources.resolvers[item];
    (name, zone.figures())
}

fn loops(sources: &Sources) -> usize {
    sources.loops.len()
}

fn listeners(sources: &Sources) -> usize {
    sources.listeners.len()
}

fn listener(sources: &Sources, item: usize, out: &mut Out, of: fn(&ListenerStatus) -> u32) {
    let listener = &sources.listeners[item];
    let address = label(listener.address.to_string().as_bytes());
    let worker = listener.worker.map(|worker| worker.to_string()).unwrap_or_default();
    out.sample(&[("address", &address), ("worker", &worker)], of(listener));
}

fn devices(sources: &Sources) -> usize {
    sources.devices.len()
}

/// Returns a device and its labels: its number, and its name in the mount table.
fn device(sources: &Sources, item: usize) -> (&DeviceStatus, [Box<str>; 2]) {
    let device = &sources.devices[item];
    let name = device.mounted.as_ref().map_or("", |mounted| &mounted.source);
    (device, [label(device.number.as_bytes()), label(name.as_bytes())])
}

fn device_sample(sources: &Sources, item: usize, out: &mut Out, of: fn(&DeviceStatus) -> f64) {
    let (device, [number, name]) = device(sources, item);
    out.sample(&[("device", &number), ("name", &name)], of(device));
}

fn pools(sources: &Sources) -> usize {
    sources.pools.len()
}

fn pool(sources: &Sources, item: usize, out: &mut Out, of: fn(&PoolStatus) -> u64) {
    let pool = &sources.pools[item];
    // A replaced pool may still exist under the same name.
    if !pool.is_ending {
        out.sample(&[("pool", &label(pool.name.as_bytes()))], of(pool));
    }
}

fn pool_times(sources: &Sources, item: usize, out: &mut Out, of: fn(&PoolStatus) -> &Snapshot) {
    let pool = &sources.pools[item];
    if !pool.is_ending {
        out.own_times(&[("pool", &label(pool.name.as_bytes()))], of(pool));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_have_unique_names_and_help() {
        let mut names: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
        assert!(names.iter().all(|name| name.starts_with("gale_") && !name.ends_with("_total")));
        assert!(FAMILIES.iter().all(|family| family.help.ends_with('.')));
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
