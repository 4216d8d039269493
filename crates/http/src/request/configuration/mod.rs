//! The `http` block as requests use it: built once, immutable, shared by all
//! workers. `configuration/` builds it.
//!
//! A scope is one level of settings (the http block, a server, a location). All
//! settings of a scope are complete: missing ones were inherited from its parent
//! when the configuration was built, so a request reads one scope only. A scope
//! shares the settings of modules that it does not mention with its siblings:
//! thousands of locations take little memory.

pub mod http2;
pub mod location;
pub mod settings;

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::Arc;

use gale_engine::configuration::{ScopeId, ServerId};
use gale_engine::listen;
use gale_engine::module::SharedConf;
use gale_engine::virtual_servers::{CertificateNames, VirtualServers};
use gale_log::ErrorLog;
use gale_protocol::request::Method;
use gale_tls::TlsServer;
use gale_tls::settings::VerifyClient;
use gale_upstream::{Upstream, UpstreamId, UpstreamTable};
use gale_worker::traffic::ServerZone;

use crate::request::Request;
use crate::request::configuration::http2::Http2Address;
use crate::request::configuration::location::Locations;
use crate::request::configuration::settings::CoreSettings;
use crate::request::filters::Filter;
use crate::request::phases::{Handler, PHASES};
use crate::request::variables::VariableTable;

/// Everything under `http { }`.
pub struct HttpConfiguration {
    /// The levels of settings.
    pub scopes: Vec<Scope>,
    /// The servers in the order of the file.
    pub servers: Vec<Server>,
    /// The addresses to listen on, each with its servers.
    pub addresses: Vec<Address>,
    /// Every variable that the file mentions or a module stores.
    pub variables: VariableTable,
    /// The groups of servers that requests may be passed to.
    pub upstreams: UpstreamTable<Request>,
    /// `true` if any address has TLS.
    pub speaks_tls: bool,
    /// `true` if connections keep the ClientHello, because a variable needs it.
    pub keeps_client_hello: bool,
    /// `true` if any scope has [`Scope::redirects_to_slash`].
    pub redirects_to_slash: bool,
    /// Number of this configuration in the process; the first one is 1.
    pub generation: u64,
}

impl HttpConfiguration {
    /// The scope with this index.
    pub fn scope(&self, id: ScopeId) -> &Scope {
        &self.scopes[id.0 as usize]
    }

    /// The scope for a request with this method, when its location is this one.
    pub fn scope_for(&self, location: ScopeId, method: Method) -> ScopeId {
        match &self.scope(location).limit_except {
            Some(block) if !block.methods.contains(&method) => block.scope,
            _ => location,
        }
    }

    /// The settings that a handler is called with, for a request in this scope.
    pub fn conf(&self, bound: &BoundHandler, scope: ScopeId) -> &dyn Any {
        self.scope(bound.kept_from.unwrap_or(scope)).conf(bound.module)
    }

    /// The group that a directive refers to.
    pub fn upstream(&self, id: UpstreamId) -> &Arc<Upstream<Request>> {
        self.upstreams.get(id)
    }

    /// The server with this index.
    pub fn server(&self, id: ServerId) -> &Server {
        &self.servers[id.0 as usize]
    }
}

/// An address that the configuration listens on, with its servers.
pub struct Address {
    /// The address.
    pub listening: listen::Address,
    /// The servers to choose from.
    pub servers: VirtualServers,
    /// Settings of HTTP/2 on this address; unused without it.
    pub http2: Http2Address,
}

/// One `server { }`.
pub struct Server {
    /// The settings at the server's own level.
    pub scope: ScopeId,
    /// `$server_name`: the first name as it was written.
    pub name: Box<[u8]>,
    /// Its locations.
    pub locations: Locations,
    /// Its named locations (`location @name`), reached by internal redirects only.
    pub named: HashMap<Box<[u8]>, ScopeId>,
    /// Its certificates, and its rules for client certificates.
    pub tls: Option<Arc<TlsServer>>,
    /// The names of its certificates and keys, if they contain variables: each handshake evaluates them.
    pub certificate_names: CertificateNames<Request>,
    /// Requirement of a client certificate; also set if the server has no certificate itself.
    pub verify_client: VerifyClient,
    /// `true` if CONNECT is allowed: a location of the server makes tunnels.
    pub allows_connect: bool,
    /// `http2`: clients that name this server are offered HTTP/2.
    pub http2: bool,
    /// `status_zone`: counters of the server.
    pub zone: Option<Arc<ServerZone>>,
}

/// Kind of a scope's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScopeKind {
    /// The http block itself.
    Http,
    /// A server block.
    Server,
    /// A location.
    Location,
    /// A block inside another one with settings of its own: `if`.
    Nameless,
}

/// One level of settings, with the handlers and filters that they enable.
pub struct Scope {
    /// Kind of the scope's block.
    pub kind: ScopeKind,
    /// The location's name as written (`/images/`, `@fallback`), empty otherwise.
    pub name: Box<[u8]>,
    /// The settings that the engine needs.
    pub core: Arc<CoreSettings>,
    /// `limit_except`: another scope for requests with other methods.
    pub limit_except: Option<LimitExcept>,
    /// Error log for requests in this scope.
    pub error_log: ErrorLog,
    /// The settings of every module, by the module's index.
    pub confs: Box<[Option<SharedConf>]>,
    /// Indexes into `confs`, by the type of the settings.
    pub conf_indexes: Arc<ConfIndexes>,
    /// `http2_chunk_size`: maximum size of a DATA frame's payload in HTTP/2.
    pub http2_chunk_size: usize,
    /// The location's name without its final slash is answered by a redirect.
    pub redirects_to_slash: bool,
    /// Per phase, the handlers that apply here, in order.
    pub handlers: [Vec<BoundHandler>; PHASES],
    /// The response filters that apply here, in order.
    pub filters: Vec<BoundFilter>,
}

impl Scope {
    /// The settings of the module with this index.
    pub fn conf(&self, module: usize) -> &dyn Any {
        match &self.confs[module] {
            Some(conf) => conf.as_ref(),
            None => &(),
        }
    }

    /// Returns the settings of this type, for a module that needs those of another one. (Its own come with the call.)
    pub fn conf_of<C: 'static>(&self) -> Option<&C> {
        let index = self.conf_indexes.index(TypeId::of::<C>())?;
        self.confs.get(index)?.as_ref()?.downcast_ref()
    }
}

/// Index of each type of settings among those of a scope; the same in all scopes. Requests look settings up by type,
/// and a search through every module costs a thousand instructions.
#[derive(Debug, Default)]
pub struct ConfIndexes(hashbrown::HashMap<TypeId, usize>);

impl ConfIndexes {
    /// Builds the indexes from the settings of one scope.
    pub fn of(confs: &[Option<SharedConf>]) -> ConfIndexes {
        let there = confs.iter().enumerate().filter_map(|(index, conf)| Some((index, conf.as_deref()?)));
        ConfIndexes(there.map(|(index, conf)| (conf.type_id(), index)).collect())
    }

    fn index(&self, wanted: TypeId) -> Option<usize> {
        self.0.get(&wanted).copied()
    }
}

/// `limit_except METHOD … { }`: a scope of its own for requests with other methods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitExcept {
    /// The methods that the block does not apply to.
    pub methods: Box<[Method]>,
    /// The block's settings.
    pub scope: ScopeId,
}

/// A handler with the module whose settings it is called with.
#[derive(Clone, Copy)]
pub struct BoundHandler {
    /// The handler.
    pub handler: &'static dyn Handler,
    /// The index of its module.
    pub module: usize,
    /// The location whose content handler an `if` block keeps: the handler runs with that location's settings.
    pub kept_from: Option<ScopeId>,
}

/// A filter with the module whose settings it is called with.
#[derive(Clone, Copy)]
pub struct BoundFilter {
    /// The filter.
    pub filter: &'static dyn Filter,
    /// The index of its module.
    pub module: usize,
}
