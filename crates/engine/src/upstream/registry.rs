//! The groups of a block such as `http` while it is read: those that `upstream` declares, and those that other
//! directives refer to, before or after.
//!
//! A reference to a host without an `upstream` block of that name is a group of its own, of the addresses that the name
//! stands for when the configuration is built.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use bstr::{BString, ByteSlice};
use gale_config::{Contexts, Diagnostic, Span};
use gale_process::Resources;
use gale_runtime::SocketAddress;

use super::peer::{Peer, PeerId, address_name};
use super::peers::Peers;
use super::state::GroupState;
use super::{Balance, Common, Group, KeepaliveSettings, Pool, ServerSettings, Upstream};
use crate::configuration::{BlockBuilder, Builder, ZoneSize};
use crate::server_address::ServerAddress;
use crate::variables::subject::Subject;

/// A block that has upstreams for subjects `S`.
pub trait HasUpstreams<S>: BlockBuilder {
    /// Tells its groups from those of other protocols that have the same names: `http upstream`.
    const KIND: &'static str;

    /// Where its directives stand: the inside of `upstream`.
    const INSIDE: Contexts;

    /// Those so far.
    fn upstreams(&mut self) -> &mut Upstreams<S>;
}

impl Builder {
    /// The upstreams of the block whose subjects are `S`.
    ///
    /// # Panics
    /// Outside of such a block.
    pub fn upstreams<S: Subject>(&mut self) -> &mut Upstreams<S>
    where
        S::Block: HasUpstreams<S>,
    {
        self.block::<S::Block>().expect("inside of the block").upstreams()
    }
}

/// A group that a directive refers to, as an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UpstreamId(pub u32);

/// What a directive such as `proxy_pass` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UpstreamTarget {
    /// A group, or a host, which may be an address (without brackets).
    Host {
        /// Its name as written.
        host: BString,
        /// The port, if one is written.
        port: Option<u16>,
        /// The port of a host without one.
        default_port: u16,
    },
    /// A socket in the file system.
    Unix(PathBuf),
}

impl UpstreamTarget {
    /// Reads `HOST[:PORT]`, `ADDRESS[:PORT]`, `[IPv6][:PORT]` or `unix:PATH`.
    ///
    /// # Errors
    /// What is wrong with it, in nginx's words, to be followed by `in upstream "…"`.
    pub fn parse(text: &[u8], default_port: u16) -> Result<UpstreamTarget, &'static str> {
        // The port that stands there and the one that is meant may be the same.
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

/// See the file's head.
pub struct Upstreams<S> {
    groups: Vec<GroupDraft<S>>,
    references: Vec<(UpstreamTarget, Span)>,
    /// The block that is being read.
    current: Option<usize>,
}

/// An `upstream` block.
pub struct GroupDraft<S> {
    name: BString,
    span: Span,
    /// `server`, in order.
    pub servers: Vec<ServerDraft>,
    /// How its peers are chosen.
    pub balance: Balance,
    /// `keepalive` and its family; `None` to keep no idle connections.
    pub keepalive: Option<KeepaliveSettings>,
    of: PhantomData<fn(&S)>,
}

/// A `server` of an `upstream` block.
#[derive(Clone, Debug)]
pub struct ServerDraft {
    /// As it is written.
    pub name: BString,
    /// Where it is written.
    pub span: Span,
    /// Its address.
    pub source: ServerSource,
    /// Its parameters.
    pub settings: ServerSettings,
}

/// Where the addresses of a server come from.
#[derive(Clone, Debug)]
pub enum ServerSource {
    /// It is one.
    Address(SocketAddress),
    /// They are looked up when the configuration is built.
    Host(String, u16),
}

impl<S> Default for Upstreams<S> {
    fn default() -> Upstreams<S> {
        Upstreams { groups: Vec::new(), references: Vec::new(), current: None }
    }
}

impl<S> GroupDraft<S> {
    fn new(name: BString, span: Span) -> GroupDraft<S> {
        GroupDraft {
            name,
            span,
            servers: Vec::new(),
            balance: Balance::default(),
            keepalive: Some(KeepaliveSettings::default()),
            of: PhantomData,
        }
    }
}

impl<S: Subject> Upstreams<S> {
    /// Refers to a group or a host. There is no error before [`Upstreams::finish`].
    pub fn reference(&mut self, target: UpstreamTarget, span: Span) -> UpstreamId {
        let known = self.references.iter().position(|(known, _)| *known == target);
        let index = known.unwrap_or_else(|| {
            self.references.push((target, span));
            self.references.len() - 1
        });
        UpstreamId(u32::try_from(index).expect("fewer references than 2^32"))
    }

    /// An `upstream` block begins.
    ///
    /// # Errors
    /// In nginx's words: there is one of this name.
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
    /// None is.
    pub fn current(&mut self) -> &mut GroupDraft<S> {
        &mut self.groups[self.current.expect("inside of an upstream block")]
    }

    /// The groups, when all of the text was read.
    ///
    /// # Errors
    /// In nginx's words: a name that stands for nothing, a port where a group is meant.
    pub fn finish(self, builder: &mut Builder, resources: &mut dyn Resources) -> Result<UpstreamTable<S>, Diagnostic>
    where
        S::Block: HasUpstreams<S>,
    {
        let mut table = UpstreamTable::default();
        for group in self.groups {
            let key = Key { host: group.name.to_ascii_lowercase(), port: None };
            let upstream = Arc::new(group.finish(builder, resources)?);
            table.named.insert(key, upstream);
        }
        let references = self.references.iter();
        let by_id = references.map(|(target, span)| table.resolve(target, *span, builder, resources));
        let by_id: Vec<Arc<Upstream<S>>> = by_id.collect::<Result<_, _>>()?;
        table.by_id = by_id.into();
        Ok(table)
    }
}

impl<S: Subject> GroupDraft<S> {
    fn finish(self, builder: &mut Builder, resources: &mut dyn Resources) -> Result<Upstream<S>, Diagnostic>
    where
        S::Block: HasUpstreams<S>,
    {
        let workers = builder.workers();
        let state = group_state::<S>(builder, &self.name, self.span)?;
        let mut list = ListDraft::new(&state, workers);
        for server in &self.servers {
            let server_name: Arc<[u8]> = server.name.as_slice().into();
            let settings = Arc::new(server.settings.clone());
            for address in server.addresses(resources)? {
                list.add(address, &server_name, &settings);
            }
        }
        if list.primary.is_empty() {
            return Err(Diagnostic::emerg(format!("no servers in upstream \"{}\"", self.name)).at(self.span));
        }
        let peers = list.finish();
        let common = Common {
            name: self.name.to_str_lossy().into(),
            balance: self.balance,
            weight_unit: 1,
            pool: self.keepalive.map(|settings| Pool::new(settings, workers)),
            state,
            workers,
        };
        Ok(Upstream::new(Group::new(common, peers)))
    }
}

/// What is known of the group of this name, also from before a reload.
fn group_state<S: Subject>(builder: &mut Builder, name: &[u8], span: Span) -> Result<Arc<GroupState>, Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    let zone = ZoneSize { name: name.into(), bytes: 0 };
    zone.hold(builder, S::Block::KIND, span, |_| GroupState::default())
}

/// A list of peers that is put together.
struct ListDraft<'s> {
    state: &'s GroupState,
    workers: usize,
    primary: Vec<Peer>,
    backup: Vec<Peer>,
    occurrences: HashMap<SocketAddress, u32>,
}

impl<'s> ListDraft<'s> {
    fn new(state: &'s GroupState, workers: usize) -> ListDraft<'s> {
        ListDraft { state, workers, primary: Vec::new(), backup: Vec::new(), occurrences: HashMap::new() }
    }

    fn add(&mut self, address: SocketAddress, server: &Arc<[u8]>, settings: &Arc<ServerSettings>) {
        let occurrence = self.occurrences.entry(address.clone()).or_insert(0);
        let id = PeerId { address: address.clone(), occurrence: *occurrence };
        *occurrence += 1;
        let peer = Peer {
            name: address_name(&address),
            address,
            server: Arc::clone(server),
            settings: Arc::clone(settings),
            state: self.state.peer(id, self.workers),
        };
        if settings.is_backup { &mut self.backup } else { &mut self.primary }.push(peer);
    }

    fn finish(self) -> Peers {
        self.state.forget_gone();
        Peers::new(self.primary, self.backup)
    }
}

impl ServerDraft {
    fn addresses(&self, resources: &mut dyn Resources) -> Result<Vec<SocketAddress>, Diagnostic> {
        match &self.source {
            ServerSource::Address(address) => Ok(vec![address.clone()]),
            ServerSource::Host(host, port) => look_up(host, *port, &self.name, self.span, resources),
        }
    }
}

/// The addresses of a host name; `written` is what the message has.
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

/// The upstreams of a configuration.
pub struct UpstreamTable<S> {
    by_id: Box<[Arc<Upstream<S>>]>,
    named: HashMap<Key, Arc<Upstream<S>>>,
}

impl<S> Default for UpstreamTable<S> {
    fn default() -> Self {
        UpstreamTable { by_id: Box::default(), named: HashMap::new() }
    }
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    /// In lower case.
    host: Vec<u8>,
    /// `None` for an `upstream` block.
    port: Option<u16>,
}

impl<S> UpstreamTable<S> {
    /// The one that a directive refers to.
    pub fn get(&self, id: UpstreamId) -> &Arc<Upstream<S>> {
        &self.by_id[id.0 as usize]
    }

    /// The one that a name stands for at run time (`proxy_pass http://$name`): the group of this name if no port is
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
    /// The group of a block, or an implicit one.
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
        key.port = Some(port);
        if let Some(known) = self.named.get(&key) {
            return Ok(Arc::clone(known));
        }
        let text = host.to_str_lossy();
        let addresses = match text.parse::<IpAddr>() {
            Ok(ip) => vec![SocketAddress::Inet(SocketAddr::new(ip, port))],
            Err(_) => look_up(&text, port, host, span, resources)?,
        };
        // No block has such a name.
        let state_name = format!("\0{text}:{port}");
        let upstream = Arc::new(implicit(builder, state_name.as_bytes(), &text, addresses, span)?);
        self.named.insert(key, Arc::clone(&upstream));
        Ok(upstream)
    }
}

/// A group that no block declares. As in nginx it keeps no idle connections.
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
    let workers = builder.workers();
    let state = group_state::<S>(builder, state_name, span)?;
    let mut list = ListDraft::new(&state, workers);
    let (server, settings) = (Arc::from(name.as_bytes()), Arc::new(ServerSettings::default()));
    for address in addresses {
        list.add(address, &server, &settings);
    }
    let peers = list.finish();
    let common = Common { name: name.into(), balance: Balance::RoundRobin, weight_unit: 1, pool: None, state, workers };
    Ok(Upstream::new(Group::new(common, peers)))
}
