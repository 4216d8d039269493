//! Groups of a block such as `http` while it is read: declared by `upstream`, or referred to by other directives,
//! before or after the declaration.
//!
//! A reference to a host without an `upstream` block is a group of its own, with the addresses that the name has when
//! the configuration is built.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bstr::{BStr, BString, ByteSlice};
use gale_config::server_address::ServerAddress;
use gale_config::{Contexts, Diagnostic, Setting, Span};
use gale_engine::configuration::{BlockBuilder, Builder, ZoneSize};
use gale_engine::variables::subject::Subject;
use gale_engine::variables::template::Template;
use gale_process::Resources;
use gale_resolver::ResolverSettings;
use gale_runtime::SocketAddress;
use gale_worker::service::ServiceSpec;
use smallvec::SmallVec;

use super::health::{BeforeFirstCheck, CHECKS_MAX, Check, CheckId, HealthPlan};
use super::outliers::{OutlierSettings, OutlierWatch};
use super::peer::address_name;
use super::plan::{FixedServer, Plan, ResolvedServer};
use super::queue::Queue;
use super::resolving::Refresh;
use super::retry_budget::{RetryBudget, RetryBudgetSettings};
use super::state::GroupState;
use super::state_file;
use super::{
    Balance, Common, Group, KeepaliveSettings, Metric, QueueSettings, SLOW_WEIGHT_UNIT, ServerSettings, Sticky,
    Upstream,
};

/// A block with upstream groups for subjects `S`.
pub trait HasUpstreams<S>: BlockBuilder {
    /// Distinguishes its groups from other protocols' groups of the same name: `http upstream`.
    const KIND: &'static str;

    /// Context of its directives: inside `upstream`.
    const INSIDE: Contexts;

    /// Metrics of `least_time`, by name.
    const TIMES: &'static [(&'static str, Metric)];

    /// The groups so far.
    fn upstreams(&mut self) -> &mut Upstreams<S>;
}

/// The groups of the block whose subjects are `S`.
///
/// # Panics
/// Panics outside of such a block.
pub fn upstreams_of<S: Subject>(builder: &mut Builder) -> &mut Upstreams<S>
where
    S::Block: HasUpstreams<S>,
{
    builder.block::<S::Block>().expect("inside of the block").upstreams()
}

/// Index of a group that a directive refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UpstreamId(pub u32);

/// Target of a directive such as `proxy_pass`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UpstreamTarget {
    /// A group or a host, which may be an IP address (without brackets).
    Host {
        /// Name as written.
        host: BString,
        /// Port, if written.
        port: Option<u16>,
        /// Port of a host without one; 0 if a port is required.
        default_port: u16,
    },
    /// A Unix socket.
    Unix(PathBuf),
}

impl UpstreamTarget {
    /// Parses `HOST[:PORT]`, `ADDRESS[:PORT]`, `[IPv6][:PORT]` or `unix:PATH`.
    ///
    /// # Errors
    /// The fault in nginx's words, to be followed by `in upstream "…"`.
    pub fn parse(text: &[u8], default_port: u16) -> Result<UpstreamTarget, &'static str> {
        // The written port may equal the default one.
        let written = match (text.rfind_byte(b':'), text.rfind_byte(b']')) {
            (Some(colon), bracket) => bracket.is_none_or(|bracket| colon > bracket),
            (None, _) => false,
        };
        let port = |port: u16| written.then_some(port);
        Ok(match ServerAddress::parse(text, default_port)? {
            ServerAddress::Unix(path) => UpstreamTarget::Unix(path),
            ServerAddress::Inet(address) => {
                UpstreamTarget::Host { host: address.ip().to_string().into(), port: port(address.port()), default_port }
            }
            ServerAddress::Host(host, number) => {
                UpstreamTarget::Host { host: host.into(), port: port(number), default_port }
            }
        })
    }
}

/// Groups of a block while it is read.
pub struct Upstreams<S> {
    groups: Vec<GroupDraft<S>>,
    references: Vec<(UpstreamTarget, Span)>,
    checks: Vec<CheckDraft>,
    /// Index of the block that is being read.
    current: Option<usize>,
}

/// A health check of a group.
struct CheckDraft {
    group: UpstreamId,
    before: BeforeFirstCheck,
    span: Span,
}

/// An `upstream` block.
pub struct GroupDraft<S> {
    name: BString,
    span: Span,
    /// `server` directives, in order.
    pub servers: Vec<ServerDraft>,
    /// `state`: the file that replaces them.
    pub state: Setting<PathBuf>,
    /// Balancing method; unset for round robin.
    pub balance: Setting<Balance>,
    /// Key of `hash`.
    pub key: Option<Template<S>>,
    /// `sticky`
    pub sticky: Setting<Sticky<S>>,
    /// `keepalive`: idle connections for each worker, 0 for none, and `local`.
    pub keepalive: Setting<(usize, bool)>,
    /// `keepalive_requests`
    pub keepalive_requests: Setting<u64>,
    /// `keepalive_time`
    pub keepalive_time: Setting<Duration>,
    /// `keepalive_timeout`
    pub keepalive_timeout: Setting<Duration>,
    /// `ntlm`
    pub ntlm: Setting<bool>,
    /// `queue`
    pub queue: Setting<QueueSettings>,
    /// `retry_budget`; `None` for no limit.
    pub retry_budget: Setting<Option<RetryBudgetSettings>>,
    /// `outlier_ejection`
    pub outlier_ejection: Setting<OutlierSettings>,
    /// `resolver`
    pub resolver: Setting<Arc<ResolverSettings>>,
    /// `resolver_timeout`
    pub resolver_timeout: Setting<Duration>,
}

/// A `server` of an `upstream` block.
#[derive(Clone, Debug)]
pub struct ServerDraft {
    /// Parameter as written.
    pub name: BString,
    /// Its place in the configuration.
    pub span: Span,
    /// Source of its addresses.
    pub source: ServerSource,
    /// Settings.
    pub settings: ServerSettings,
}

/// Source of a server's addresses.
#[derive(Clone, Debug)]
pub enum ServerSource {
    /// An address.
    Address(SocketAddress),
    /// A host name, resolved when the configuration is built.
    Host(String, u16),
    /// A host name, resolved repeatedly (`resolve`).
    Resolved {
        /// The name.
        host: String,
        /// `service`
        service: Option<String>,
        /// Port, used without `service`.
        port: u16,
    },
}

/// Resolver settings of the surrounding block, for groups without their own.
#[derive(Clone, Debug, Default)]
pub struct ResolverDefaults {
    /// `resolver`
    pub resolver: Option<Arc<ResolverSettings>>,
    /// `resolver_timeout`
    pub timeout: Option<Duration>,
}

/// Default timeout of a lookup.
const RESOLVER_TIMEOUT: Duration = Duration::from_secs(30);

impl<S> Default for Upstreams<S> {
    fn default() -> Upstreams<S> {
        Upstreams { groups: Vec::new(), references: Vec::new(), checks: Vec::new(), current: None }
    }
}

impl<S> GroupDraft<S> {
    fn new(name: BString, span: Span) -> GroupDraft<S> {
        GroupDraft {
            name,
            span,
            servers: Vec::new(),
            state: Setting::new(),
            balance: Setting::new(),
            key: None,
            sticky: Setting::new(),
            keepalive: Setting::new(),
            keepalive_requests: Setting::new(),
            keepalive_time: Setting::new(),
            keepalive_timeout: Setting::new(),
            ntlm: Setting::new(),
            queue: Setting::new(),
            retry_budget: Setting::new(),
            outlier_ejection: Setting::new(),
            resolver: Setting::new(),
            resolver_timeout: Setting::new(),
        }
    }
}

impl<S: Subject> Upstreams<S> {
    /// Adds a reference to a group or a host. Errors appear in [`Upstreams::complete`].
    pub fn reference(&mut self, target: UpstreamTarget, span: Span) -> UpstreamId {
        let known = self.references.iter().position(|(known, _)| *known == target);
        let index = known.unwrap_or_else(|| {
            self.references.push((target, span));
            self.references.len() - 1
        });
        UpstreamId(u32::try_from(index).expect("fewer references than 2^32"))
    }

    /// Enables health checks of a group: requests go to its healthy peers only. The caller adds a service that runs the
    /// checks, with the [`Check`] from [`UpstreamTable::check`].
    pub fn add_check(&mut self, group: UpstreamId, before: BeforeFirstCheck, span: Span) -> CheckId {
        self.checks.push(CheckDraft { group, before, span });
        CheckId(u32::try_from(self.checks.len() - 1).expect("fewer checks than 2^32"))
    }

    /// Begins an `upstream` block.
    ///
    /// # Errors
    /// The name is already taken; in nginx's words.
    pub fn open(&mut self, name: &[u8], span: Span) -> Result<(), Diagnostic> {
        if let Some(first) = self.groups.iter().find(|group| group.name.eq_ignore_ascii_case(name)) {
            let message = format!("duplicate upstream \"{}\"", name.as_bstr());
            return Err(Diagnostic::emerg(message).at(span).related("first declared", first.span));
        }
        self.current = Some(self.groups.len());
        self.groups.push(GroupDraft::new(name.into(), span));
        Ok(())
    }

    /// The block that is being read.
    ///
    /// # Panics
    /// Panics outside of a block.
    pub fn current(&mut self) -> &mut GroupDraft<S> {
        &mut self.groups[self.current.expect("inside of an upstream block")]
    }

    /// Groups with a state file: index, path, and place of the directive.
    pub(super) fn with_state(&self) -> Vec<(usize, PathBuf, Span)> {
        let file = |(index, group): (usize, &GroupDraft<S>)| {
            Some((index, group.state.get_opt()?.clone(), group.state.span().unwrap_or(group.span)))
        };
        self.groups.iter().enumerate().filter_map(file).collect()
    }

    /// Continues with a block; returns its number of servers so far.
    pub(super) fn enter(&mut self, group: usize) -> usize {
        self.current = Some(group);
        self.groups[group].servers.len()
    }

    /// Builds the groups of a block after the whole text was read.
    ///
    /// # Errors
    /// In nginx's words: a name without addresses, a port with a group's name.
    pub fn complete(
        defaults: &ResolverDefaults,
        builder: &mut Builder,
        resources: &mut dyn Resources,
    ) -> Result<UpstreamTable<S>, Diagnostic>
    where
        S::Block: HasUpstreams<S>,
    {
        state_file::read::<S>(builder, resources)?;
        let Upstreams { groups, references, checks, .. } = std::mem::take(upstreams_of::<S>(builder));
        let mut table = UpstreamTable::default();
        for group in groups {
            let key = Key { host: group.name.to_ascii_lowercase(), port: None };
            let upstream = Arc::new(group.finish(defaults, builder, resources)?);
            table.named.insert(key, upstream);
        }
        let references = references.iter();
        let by_id = references.map(|(target, span)| table.resolve(target, *span, builder, resources));
        let by_id: Vec<Arc<Upstream<S>>> = by_id.collect::<Result<_, _>>()?;
        table.by_id = by_id.into();
        table.complete_checks(&checks)?;
        Ok(table)
    }
}

impl<S: Subject> GroupDraft<S> {
    /// The group's name.
    pub fn name(&self) -> &BStr {
        self.name.as_bstr()
    }

    fn finish(
        self,
        defaults: &ResolverDefaults,
        builder: &mut Builder,
        resources: &mut dyn Resources,
    ) -> Result<Upstream<S>, Diagnostic>
    where
        S::Block: HasUpstreams<S>,
    {
        let workers = builder.workers();
        let state = group_state::<S>(builder, &self.name, self.span)?;
        let balance = self.balance.get_opt().copied().unwrap_or_default();
        let plan = self.plan(balance, resources)?;
        self.note_ports(&plan, builder);
        if !self.state.is_set() && self.servers.iter().all(|server| server.settings.is_backup) {
            return Err(Diagnostic::emerg(format!("no servers in upstream \"{}\"", self.name)).at(self.span));
        }
        let common = Common {
            name: self.name.to_str_lossy().into(),
            balance,
            // A server with `slow_start` may be added at run time.
            weight_unit: SLOW_WEIGHT_UNIT,
            pool: self.keepalive_settings().map(|settings| state.pool(settings, workers)),
            queue: self.queue.get_opt().map(|&settings| Queue::new(settings)),
            retry_budget: self.retry_budget().map(|settings| RetryBudget::new(settings, workers)),
            ejects: self.outlier_ejection.is_set(),
            health: OnceLock::new(),
            state,
            state_file: self.state.get_opt().map(|path| Arc::from(path.as_path())),
            workers,
        };
        let group = Group::new(common, plan);
        self.add_services(&group, defaults, builder)?;
        let GroupDraft { key, mut sticky, .. } = self;
        Ok(Upstream { group, key, sticky: sticky.take() })
    }

    fn plan(&self, balance: Balance, resources: &mut dyn Resources) -> Result<Plan, Diagnostic> {
        let mut plan = Plan { balance, is_sticky: self.sticky.is_set(), fixed: Vec::new(), resolved: Vec::new() };
        for server in &self.servers {
            let (name, settings) = (Arc::from(server.name.as_slice()), Arc::new(server.settings.clone()));
            let addresses = match &server.source {
                ServerSource::Address(address) => vec![address.clone()],
                ServerSource::Host(host, port) => look_up(host, *port, &server.name, server.span, resources)?,
                ServerSource::Resolved { host, service, port } => {
                    let (host, service) = (Arc::from(&**host), service.as_deref().map(Arc::from));
                    plan.resolved.push(ResolvedServer { host, service, port: *port, name, settings });
                    continue;
                }
            };
            plan.fixed.push(FixedServer { addresses, name, settings });
        }
        Ok(plan)
    }

    /// Registers the ports of its servers, including those in its state file.
    fn note_ports(&self, plan: &Plan, builder: &mut Builder) {
        let addresses = plan.fixed.iter().flat_map(|server| &server.addresses);
        addresses.filter_map(SocketAddress::inet).for_each(|address| builder.reach.connects(address.port()));
        for server in &plan.resolved {
            match server.service {
                None => builder.reach.connects(server.port),
                // The ports come from name servers.
                Some(_) => builder.reach.connects_to_any_port("service="),
            }
        }
    }

    fn retry_budget(&self) -> Option<RetryBudgetSettings> {
        self.retry_budget.get_opt().copied().unwrap_or(Some(RetryBudgetSettings::default()))
    }

    fn keepalive_settings(&self) -> Option<KeepaliveSettings> {
        let default = KeepaliveSettings::default();
        let (connections, is_local) = *self.keepalive.get_opt().unwrap_or(&(default.connections, default.is_local));
        (connections > 0).then(|| KeepaliveSettings {
            connections,
            is_local,
            requests_max: self.keepalive_requests.get_opt().copied().unwrap_or(default.requests_max),
            time_max: self.keepalive_time.get_opt().copied().unwrap_or(default.time_max),
            timeout: self.keepalive_timeout.get_opt().copied().unwrap_or(default.timeout),
            binds_clients: self.ntlm.is_set(),
        })
    }

    /// Adds the services that resolve the group's names and compare its peers.
    fn add_services(
        &self,
        group: &Arc<Group>,
        defaults: &ResolverDefaults,
        builder: &mut Builder,
    ) -> Result<(), Diagnostic>
    where
        S::Block: HasUpstreams<S>,
    {
        if let Some(&settings) = self.outlier_ejection.get_opt() {
            let name = format!("{} {} outlier ejection", S::Block::KIND, self.name);
            let watch = OutlierWatch { group: Arc::clone(group), settings };
            builder.add_service(ServiceSpec::per_process(name, watch), self.span)?;
        }
        let resolved = self.servers.iter().filter(|server| matches!(server.source, ServerSource::Resolved { .. }));
        for (index, server) in resolved.enumerate() {
            let resolver = self.resolver.get_opt().or(defaults.resolver.as_ref()).ok_or_else(|| {
                let message = format!("no resolver defined to resolve names at run time in upstream \"{}\"", self.name);
                let hint = "set name servers with the \"resolver\" directive, in the upstream block or outside of it";
                Diagnostic::emerg(message).at(self.span).related("a name to be resolved", server.span).hint(hint)
            })?;
            let timeout = self.resolver_timeout.get_opt().copied().or(defaults.timeout).unwrap_or(RESOLVER_TIMEOUT);
            let refresh = Refresh { group: Arc::clone(group), index, resolver: Arc::clone(resolver), timeout };
            // The same server may occur more than once.
            let name = format!("{} {} resolve {} {}", S::Block::KIND, self.name, index + 1, server.name);
            builder.add_service(ServiceSpec::per_process(name, refresh), server.span)?;
        }
        Ok(())
    }
}

/// State of the group of this name, kept over reloads.
fn group_state<S: Subject>(builder: &mut Builder, name: &[u8], span: Span) -> Result<Arc<GroupState>, Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    let zone = ZoneSize { name: name.into(), bytes: 0 };
    zone.hold(builder, S::Block::KIND, span, |_| GroupState::default())
}

/// Addresses of a host name; `written` is its form in messages.
fn look_up(
    host: &str,
    port: u16,
    written: &[u8],
    span: Span,
    resources: &mut dyn Resources,
) -> Result<Vec<SocketAddress>, Diagnostic> {
    let found = resources.resolve(host).unwrap_or_default();
    if found.is_empty() {
        let message = format!("host not found in upstream \"{}\"", written.as_bstr());
        return Err(Diagnostic::emerg(message).at(span));
    }
    Ok(found.into_iter().map(|ip| SocketAddress::Inet(SocketAddr::new(ip, port))).collect())
}

/// Upstream groups of a configuration.
pub struct UpstreamTable<S> {
    by_id: Box<[Arc<Upstream<S>>]>,
    named: HashMap<Key, Arc<Upstream<S>>>,
    checks: Box<[Check]>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    /// Host in lower case.
    host: Vec<u8>,
    /// `None` for an `upstream` block.
    port: Option<u16>,
}

impl<S> Default for UpstreamTable<S> {
    /// No groups.
    fn default() -> UpstreamTable<S> {
        UpstreamTable { by_id: Box::default(), named: HashMap::new(), checks: Box::default() }
    }
}

impl<S> UpstreamTable<S> {
    /// The group that a directive refers to.
    pub fn get(&self, id: UpstreamId) -> &Arc<Upstream<S>> {
        &self.by_id[id.0 as usize]
    }

    /// Groups declared by blocks, sorted by name.
    pub fn declared(&self) -> Vec<&Arc<Upstream<S>>> {
        let blocks = self.named.iter().filter(|(key, _)| key.port.is_none());
        let mut declared: Vec<&Arc<Upstream<S>>> = blocks.map(|(_, upstream)| upstream).collect();
        declared.sort_by_key(|upstream| upstream.group().name());
        declared
    }

    /// A health check.
    pub fn check(&self, id: CheckId) -> &Check {
        &self.checks[id.0 as usize]
    }

    /// Looks up a group by a name known at run time (`proxy_pass http://$name`): the declared group if no port is
    /// given, or a host that a directive refers to with this port.
    pub fn by_name(&self, host: &[u8], port: Option<u16>, default_port: u16) -> Option<&Arc<Upstream<S>>> {
        let mut key = Key { host: host.to_ascii_lowercase(), port: None };
        if port.is_none()
            && let Some(group) = self.named.get(&key)
        {
            return Some(group);
        }
        key.port = Some(port.unwrap_or(default_port));
        self.named.get(&key)
    }
}

impl<S: Subject> UpstreamTable<S> {
    /// Passes the checks to their groups.
    fn complete_checks(&mut self, drafts: &[CheckDraft]) -> Result<(), Diagnostic> {
        let mut of_groups: Vec<(&Arc<Group>, SmallVec<[BeforeFirstCheck; 1]>)> = Vec::new();
        let mut checks = Vec::with_capacity(drafts.len());
        for draft in drafts {
            let group = self.by_id[draft.group.0 as usize].group();
            let known = of_groups.iter().position(|(known, _)| Arc::ptr_eq(known, group));
            let known = known.unwrap_or_else(|| {
                of_groups.push((group, SmallVec::new()));
                of_groups.len() - 1
            });
            let places = &mut of_groups[known].1;
            if places.len() == CHECKS_MAX {
                let message = format!("too many health checks of upstream \"{}\"", group.name());
                return Err(Diagnostic::emerg(message).at(draft.span));
            }
            checks.push(Check::new(group, places.len()));
            places.push(draft.before);
        }
        for (group, places) in of_groups {
            let set = group.common.health.set(HealthPlan::new(places));
            debug_assert!(set.is_ok(), "a group is completed once");
        }
        self.checks = checks.into();
        Ok(())
    }

    /// The declared group, or an implicit one.
    fn resolve(
        &mut self,
        target: &UpstreamTarget,
        span: Span,
        builder: &mut Builder,
        resources: &mut dyn Resources,
    ) -> Result<Arc<Upstream<S>>, Diagnostic>
    where
        S::Block: HasUpstreams<S>,
    {
        let (host, port, default_port) = match target {
            UpstreamTarget::Unix(path) => {
                let address = SocketAddress::unix(path);
                let name = address_name(&address);
                let addresses = vec![address];
                return Ok(Arc::new(implicit(builder, name.as_bytes(), &name, addresses, span)?));
            }
            UpstreamTarget::Host { host, port, default_port } => (host, *port, *default_port),
        };
        let mut key = Key { host: host.to_ascii_lowercase(), port: None };
        if let Some(group) = self.named.get(&key) {
            return match port {
                None => Ok(Arc::clone(group)),
                Some(port) => {
                    let message = format!("upstream \"{host}\" may not have port {port}");
                    Err(Diagnostic::emerg(message).at(span))
                }
            };
        }
        let port = port.unwrap_or(default_port);
        if port == 0 {
            return Err(Diagnostic::emerg(format!("no port in upstream \"{host}\"")).at(span));
        }
        builder.reach.connects(port);
        key.port = Some(port);
        if let Some(known) = self.named.get(&key) {
            return Ok(Arc::clone(known));
        }
        let text = host.to_str_lossy();
        let addresses = match text.parse::<IpAddr>() {
            Ok(ip) => vec![SocketAddress::Inet(SocketAddr::new(ip, port))],
            Err(_) => look_up(&text, port, host, span, resources)?,
        };
        // No block can have such a name.
        let state_name = format!("\0{text}:{port}");
        let upstream = Arc::new(implicit(builder, state_name.as_bytes(), &text, addresses, span)?);
        self.named.insert(key, Arc::clone(&upstream));
        Ok(upstream)
    }
}

/// A group without a block. As in nginx it keeps no idle connections.
fn implicit<S: Subject>(
    builder: &mut Builder,
    state_name: &[u8],
    name: &str,
    addresses: Vec<SocketAddress>,
    span: Span,
) -> Result<Upstream<S>, Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    let state = group_state::<S>(builder, state_name, span)?;
    let server = FixedServer { addresses, name: name.as_bytes().into(), settings: Arc::default() };
    let balance = Balance::RoundRobin;
    let plan = Plan { balance, is_sticky: false, fixed: vec![server], resolved: Vec::new() };
    let workers = builder.workers();
    let retry_budget = Some(RetryBudget::new(RetryBudgetSettings::default(), workers));
    let common = Common { retry_budget, ..Common::in_turn(name, state, workers) };
    let group = Group::new(common, plan);
    Ok(Upstream { group, key: None, sticky: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_told_from_one_that_is_only_meant() {
        let parse = |text: &str| match UpstreamTarget::parse(text.as_bytes(), 80) {
            Ok(UpstreamTarget::Host { host, port, default_port: 80 }) => format!("{host} {port:?}"),
            Ok(UpstreamTarget::Unix(path)) => format!("unix {}", path.display()),
            other => format!("{other:?}"),
        };
        let cases = [
            ("app", "app None"),
            ("app:80", "app Some(80)"),
            ("127.0.0.1", "127.0.0.1 None"),
            ("127.0.0.1:8080", "127.0.0.1 Some(8080)"),
            ("[::1]", "::1 None"),
            ("[::1]:80", "::1 Some(80)"),
            ("unix:/run/app", "unix /run/app"),
            ("app:", "Err(\"invalid port\")"),
            (":80", "Err(\"no host\")"),
        ];
        for (text, expected) in cases {
            assert_eq!(parse(text), expected, "{text}");
        }
    }
}
