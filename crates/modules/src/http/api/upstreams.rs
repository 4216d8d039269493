//! `http/upstreams`, `stream/upstreams`: groups of servers, and their servers.
//!
//! ```text
//!   GET    http/upstreams                     all groups
//!   GET    http/upstreams/NAME                one group
//!   DELETE http/upstreams/NAME                resets the counters
//!   GET    http/upstreams/NAME/servers        the servers of a group
//!   POST   http/upstreams/NAME/servers        adds one
//!   PUT    http/upstreams/NAME/servers        replaces all of them (Gale's own)
//!   GET    http/upstreams/NAME/servers/ID
//!   PATCH  http/upstreams/NAME/servers/ID     changes its parameters
//!   DELETE http/upstreams/NAME/servers/ID
//! ```

use std::sync::Arc;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_base::units;
use gale_config::server_address::ServerAddress;
use gale_http::request::Request;
use gale_http::request::phases::Flow;
use gale_protocol::request::Method;
use gale_runtime::{SocketAddress, default_pool};
use gale_upstream::{
    EditError, Group, GroupServer, HealthFigures, PeerReport, QueueFigures, ROUTE_LENGTH_MAX, ServerSettings, Standing,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::answer::{Fault, send, send_text};
use super::tree::{View, millis, responses, ssl, times};
use super::{body, path_as_sent};

/// Port of a server that names none.
const PORT_DEFAULT: u16 = 80;

/// Answers requests for the servers of a group; `path` follows the group's name and `servers`.
pub(super) async fn answer_servers(request: &mut Request, group: &Arc<Group>, path: &[&str]) -> Result<Flow, Fault> {
    match path {
        [] => servers(request, group).await,
        [id] => {
            let id = id.parse().map_err(|_| Fault::new(400, "invalid server ID", "UpstreamBadServerId"))?;
            server(request, group, id).await
        }
        _ => Err(Fault::path()),
    }
}

async fn servers(request: &mut Request, group: &Arc<Group>) -> Result<Flow, Fault> {
    match request.method() {
        Method::Get | Method::Head => send_list(request, group.servers()).await,
        Method::Post => {
            let wanted: Wanted = parse(body(request).await?).await?;
            let (address, name, settings) = wanted.server(group)?;
            let added = edit(request, group, move |editing| editing.add(address, name, settings)).await?;
            let path = path_as_sent(request);
            let location = [path, format!("/{}", added.id).as_bytes()].concat();
            let flow = send(request, 201, &describe(&added));
            request.response.location = location;
            Ok(flow)
        }
        Method::Put => {
            let wanted: Vec<Wanted> = parse(body(request).await?).await?;
            let group_of_task = Arc::clone(group);
            let read = move || wanted.into_iter().map(|wanted| wanted.server(&group_of_task)).collect();
            let servers: Result<Vec<_>, Fault> = default_pool().run(read).await.map_err(|error| overloaded(&error))?;
            let servers = servers?;
            let now = edit(request, group, move |editing| editing.replace(servers)).await?;
            send_list(request, now).await
        }
        _ => Err(Fault::method()),
    }
}

async fn server(request: &mut Request, group: &Arc<Group>, id: u64) -> Result<Flow, Fault> {
    match request.method() {
        Method::Get | Method::Head => {
            let servers = group.servers();
            let found =
                servers.iter().find(|server| server.id == id).ok_or_else(|| refused(EditError::NotFound(id)))?;
            Ok(send(request, 200, &describe(found)))
        }
        Method::Patch => {
            let wanted: Wanted = parse(body(request).await?).await?;
            if wanted.server.is_some() || wanted.backup.is_some() {
                return Err(Fault::format("\"server\" and \"backup\" cannot be changed"));
            }
            wanted.check(group)?;
            let changed = edit(request, group, move |editing| editing.change(id, |settings| wanted.apply(settings)));
            let changed = changed.await?;
            Ok(send(request, 200, &describe(&changed)))
        }
        Method::Delete => {
            edit(request, group, move |editing| editing.remove(id)).await?;
            send_list(request, group.servers()).await
        }
        _ => Err(Fault::method()),
    }
}

/// Sends these servers. The text is built in a thread, since there may be ten thousand of them.
async fn send_list(request: &mut Request, servers: impl AsRef<[GroupServer]> + Send + 'static) -> Result<Flow, Fault> {
    let tell = move || servers.as_ref().iter().map(describe).collect::<Value>().to_string();
    let text = default_pool().run(tell).await.map_err(|error| overloaded(&error))?;
    Ok(send_text(request, 200, text))
}

/// Changes a group, and logs that in the error log.
async fn edit<T: Send + 'static>(
    request: &Request,
    group: &Arc<Group>,
    change: impl FnOnce(&mut gale_upstream::Editing) -> Result<T, EditError> + Send + 'static,
) -> Result<T, Fault> {
    let result = group.edit(change).await;
    match &result {
        Ok(_) => {
            request
                .log(Level::Notice, format_args!("servers of upstream \"{}\" were changed by the API", group.name()));
        }
        Err(error @ (EditError::NotWritten(_) | EditError::Overloaded(_) | EditError::Busy)) => {
            let name = group.name();
            request.log(Level::Error, format_args!("servers of upstream \"{name}\" are not changed: {error}"));
        }
        Err(_) => {}
    }
    result.map_err(refused)
}

fn refused(error: EditError) -> Fault {
    match &error {
        EditError::NotFound(_) => Fault::new(404, error.to_string(), "UpstreamServerNotFound"),
        EditError::Exists(_) => Fault::new(409, error.to_string(), "EntryExists"),
        EditError::TooMany => Fault::new(400, error.to_string(), "UpstreamTooManyServers"),
        EditError::NotWritten(_) => Fault::new(500, "the state file cannot be written", "StateNotWritten"),
        EditError::Overloaded(error) => overloaded(error),
        EditError::Busy => Fault::new(503, error.to_string(), "Overloaded"),
    }
}

pub(super) fn overloaded(error: &gale_runtime::PoolError) -> Fault {
    Fault::new(503, error.to_string(), "Overloaded")
}

/// Parses JSON in a thread, since a long list takes some time.
async fn parse<T: for<'a> Deserialize<'a> + Send + 'static>(text: Vec<u8>) -> Result<T, Fault> {
    let parsed = default_pool().run(move || serde_json::from_slice(&text)).await;
    let parsed = parsed.map_err(|error| overloaded(&error))?;
    parsed.map_err(|error| Fault::new(415, format!("json error: {error}"), "JsonError"))
}

/// A server in a request. A missing field keeps its value, or gets nginx's default.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    /// Accepted because responses contain it; servers are identified by their addresses.
    #[serde(rename = "id")]
    _id: Option<u64>,
    server: Option<String>,
    weight: Option<u32>,
    max_conns: Option<u32>,
    max_fails: Option<u32>,
    fail_timeout: Option<Time>,
    slow_start: Option<Time>,
    route: Option<String>,
    backup: Option<bool>,
    down: Option<bool>,
    drain: Option<bool>,
}

/// A time in the configuration's syntax, or a number of seconds.
#[derive(Deserialize)]
#[serde(untagged)]
enum Time {
    Seconds(u64),
    Text(String),
}

impl Time {
    fn parse(&self) -> Option<Duration> {
        match self {
            Time::Seconds(seconds) => Some(Duration::from_secs(*seconds)),
            Time::Text(text) => units::parse_time(text.as_bytes()),
        }
    }
}

impl Wanted {
    /// Returns the settings of a new server of the group.
    fn server(self, group: &Group) -> Result<(SocketAddress, Arc<[u8]>, ServerSettings), Fault> {
        self.check(group)?;
        let name = self.server.as_deref().ok_or_else(|| Fault::format("no \"server\" argument"))?;
        let wrong = |what: &str| Fault::new(400, format!("{what} in upstream \"{name}\""), "UpstreamBadAddress");
        let address = match ServerAddress::parse(name.as_bytes(), PORT_DEFAULT).map_err(wrong)? {
            ServerAddress::Inet(address) => SocketAddress::Inet(address),
            ServerAddress::Unix(path) => SocketAddress::unix(&path),
            ServerAddress::Host(..) => return Err(wrong("a name instead of an address")),
        };
        let name = Arc::from(name.as_bytes());
        let mut settings = ServerSettings { is_backup: self.backup.unwrap_or_default(), ..ServerSettings::default() };
        self.apply(&mut settings);
        Ok((address, name, settings))
    }

    /// Checks that the values are valid in this group.
    fn check(&self, group: &Group) -> Result<(), Fault> {
        if self.weight == Some(0) {
            return Err(Fault::format("invalid weight"));
        }
        // Only times that the configuration, and so a state file, can express.
        let is_whole = |time: Duration| {
            time.subsec_nanos() == 0 && units::parse_time_seconds(time.as_secs().to_string().as_bytes()).is_some()
        };
        let is_time = |time: Duration| units::parse_time(format!("{}ms", time.as_millis()).as_bytes()).is_some();
        let is_wrong = |time: &Option<Time>, fits: &dyn Fn(Duration) -> bool| {
            time.as_ref().is_some_and(|time| !time.parse().is_some_and(fits))
        };
        if is_wrong(&self.fail_timeout, &is_whole) {
            return Err(Fault::format("invalid fail_timeout"));
        }
        if is_wrong(&self.slow_start, &is_time) {
            return Err(Fault::format("invalid slow_start"));
        }
        if self.route.as_ref().is_some_and(|route| route.len() > ROUTE_LENGTH_MAX) {
            return Err(Fault::format(format!("route is longer than {ROUTE_LENGTH_MAX}")));
        }
        // Zero is reported for every server without `slow_start`, so it is always accepted.
        let is_slow = self.slow_start.as_ref().and_then(Time::parse).is_some_and(|time| !time.is_zero());
        for (name, is_wanted) in [("backup", self.backup == Some(true)), ("slow_start", is_slow)] {
            if is_wanted && !group.has_backups() {
                return Err(Fault::format(format!("balancing method does not support parameter \"{name}\"")));
            }
        }
        Ok(())
    }

    /// Applies the given fields, which were checked before.
    fn apply(self, settings: &mut ServerSettings) {
        let Wanted { weight, max_conns, max_fails, fail_timeout, slow_start, route, down, drain, .. } = self;
        fn set<T>(to: &mut T, value: Option<T>) {
            if let Some(value) = value {
                *to = value;
            }
        }
        set(&mut settings.weight, weight);
        set(&mut settings.max_conns, max_conns);
        set(&mut settings.max_fails, max_fails);
        set(&mut settings.fail_timeout, fail_timeout.and_then(|time| time.parse()));
        set(&mut settings.slow_start, slow_start.and_then(|time| time.parse()));
        if let Some(route) = route {
            settings.route = (!route.is_empty()).then(|| route.into());
        }
        settings.standing = match (down, drain, settings.standing) {
            (Some(true), ..) => Standing::Down,
            (_, Some(true), _) => Standing::Draining,
            (Some(false), _, Standing::Down) | (_, Some(false), Standing::Draining) => Standing::Up,
            (.., standing) => standing,
        };
    }
}

fn describe(server: &GroupServer) -> Value {
    let GroupServer { id, address, name, settings } = server;
    let ServerSettings { weight, max_conns, max_fails, fail_timeout, slow_start, is_backup, standing, route } =
        &**settings;
    let address = match address {
        SocketAddress::Inet(address) => address.to_string(),
        SocketAddress::Unix(_) => String::from_utf8_lossy(name).into_owned(),
    };
    let mut described = json!({
        "id": id,
        "server": address,
        "weight": weight,
        "max_conns": max_conns,
        "max_fails": max_fails,
        "fail_timeout": seconds(*fail_timeout),
        "slow_start": seconds(*slow_start),
        "route": route.as_deref().unwrap_or_default(),
        "backup": is_backup,
        "down": *standing == Standing::Down,
    });
    if *standing == Standing::Draining {
        described["drain"] = true.into();
    }
    described
}

/// Formats a time as nginx's API does.
fn seconds(time: Duration) -> String {
    match time.subsec_millis() {
        0 => format!("{}s", time.as_secs()),
        _ => format!("{}ms", time.as_millis()),
    }
}

pub(super) fn report(view: &View, group: &Group, is_stream: bool) -> Value {
    let peers = group.reported();
    let peers: Value =
        (0..peers.len()).map(|index| describe_peer(view, &peers.report(index, view.now), is_stream)).collect();
    let mut described = json!({ "peers": peers, "zombies": 0, "zone": group.name() });
    if !is_stream {
        described["keepalive"] = group.idle_connections().into();
    }
    if let Some(QueueFigures { waiting, requests_max, overflows }) = group.queue() {
        described["queue"] = json!({ "size": waiting, "max_size": requests_max, "overflows": overflows });
    }
    described
}

fn describe_peer(view: &View, peer: &PeerReport, is_stream: bool) -> Value {
    let figures = &peer.traffic;
    let HealthFigures { checks, fails, unhealthy, last_passed } = peer.health;
    let mut described = json!({
        "server": &*peer.address,
        "name": String::from_utf8_lossy(&peer.server),
        "backup": peer.is_backup,
        "weight": peer.settings.weight,
        "state": peer.state,
        "active": figures.processing(),
        "sent": figures.sent(),
        "received": figures.received(),
        "fails": peer.fails,
        "unavail": peer.downs,
        "health_checks": { "checks": checks, "fails": fails, "unhealthy": unhealthy },
        "downtime": millis(peer.downtime),
        "first_byte_times": times(figures.first_byte()),
        "response_times": times(figures.whole()),
    });
    let mut set = |name: &str, value: Value| described[name] = value;
    let mean_first_byte = figures.first_byte().mean().map(millis);
    if is_stream {
        set("connections", figures.begun().into());
        figures.mean_connect().into_iter().for_each(|mean| set("connect_time", millis(mean).into()));
        mean_first_byte.into_iter().for_each(|mean| set("first_byte_time", mean.into()));
    } else {
        set("requests", figures.begun().into());
        set("responses", responses(figures));
        mean_first_byte.into_iter().for_each(|mean| set("header_time", mean.into()));
    }
    figures.whole().mean().into_iter().for_each(|mean| set("response_time", millis(mean).into()));
    peer.handshakes.iter().for_each(|handshakes| set("ssl", ssl(handshakes)));
    peer.id.into_iter().for_each(|id| set("id", id.into()));
    peer.down_since.into_iter().for_each(|since| set("downstart", view.wall_of(since).into()));
    peer.chosen.into_iter().for_each(|chosen| set("selected", view.wall_of(chosen).into()));
    if peer.settings.max_conns > 0 {
        set("max_conns", peer.settings.max_conns.into());
    }
    if let Some(last_passed) = last_passed {
        described["health_checks"]["last_passed"] = last_passed.into();
    }
    described
}
