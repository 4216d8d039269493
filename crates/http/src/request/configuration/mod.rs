//! The `http` block as requests use it: built once, immutable, shared by all
//! workers. `configuration/` builds it.
//!
//! A scope is one level of settings (the http block, a server, a location). All
//! settings of a scope are complete: what it did not say itself it took from
//! its parent when the configuration was built, so that a request looks into
//! one scope only. The settings of modules that a scope does not mention it
//! shares with its siblings: thousands of locations take little memory.

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
    /// The addresses to listen on, each with the servers that it chooses from.
    pub addresses: Vec<Address>,
    /// Every variable that the file mentions or a module stores.
    pub variables: VariableTable,
    /// The groups of servers that requests may be passed to.
    pub upstreams: UpstreamTable<Request>,
    /// Whether any of the addresses has TLS.
    pub speaks_tls: bool,
    /// Whether connections keep the first message of TLS, because a variable is about it.
    pub keeps_client_hello: bool,
    /// Whether any scope has [`Scope::redirects_to_slash`].
    pub redirects_to_slash: bool,
    /// Counts the configurations of this process; the first one is 1.
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
    /// How HTTP/2 is spoken there, where it is.
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
    /// Its locations that only redirects reach: `location @name`.
    pub named: HashMap<Box<[u8]>, ScopeId>,
    /// Its certificates, and its rules for those of clients.
    pub tls: Option<Arc<TlsServer>>,
    /// The names of its certificates and keys, if they have variables: each handshake asks for them.
    pub certificate_names: CertificateNames<Request>,
    /// Whether clients have to have a certificate; also where the server has none itself.
    pub verify_client: VerifyClient,
    /// Whether clients may ask for tunnels (CONNECT): a location of it makes some.
    pub allows_connect: bool,
    /// Whether clients that name it are offered HTTP/2: `http2`.
    pub http2: bool,
    /// `status_zone`: where what it serves is counted.
    pub zone: Option<Arc<ServerZone>>,
}

/// What kind of place a scope belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScopeKind {
    /// The http block itself.
    Http,
    /// A server block.
    Server,
    /// A location.
    Location,
    /// A block inside of one of the others that has settings of its own: `if`.
    Nameless,
}

/// One level of settings and what follows from them.
pub struct Scope {
    /// Where the scope stands.
    pub kind: ScopeKind,
    /// The location's name as written (`/images/`, `@fallback`), empty otherwise.
    pub name: Box<[u8]>,
    /// The settings that the engine itself needs.
    pub core: Arc<CoreSettings>,
    /// Another scope for some requests.
    pub limit_except: Option<LimitExcept>,
    /// Where messages about requests in this scope go.
    pub error_log: ErrorLog,
    /// The settings of every module, by the module's index.
    pub confs: Box<[Option<SharedConf>]>,
    /// At which index they stand, by their type.
    pub conf_indexes: Arc<ConfIndexes>,
    /// The most that a frame of a body holds in HTTP/2: `http2_chunk_size`.
    pub http2_chunk_size: usize,
    /// Its URI without the slash at the end of its name is answered by a redirect.
    pub redirects_to_slash: bool,
    /// Per phase, the handlers that have something to do here, in order.
    pub handlers: [Vec<BoundHandler>; PHASES],
    /// The response filters that have something to do here, in order.
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

    /// The settings of this type, for modules that decide something together. (A module's own come with the call.)
    pub fn conf_of<C: 'static>(&self) -> Option<&C> {
        let index = self.conf_indexes.index(TypeId::of::<C>())?;
        self.confs.get(index)?.as_ref()?.downcast_ref()
    }
}

/// Where the settings of each type stand among those of a scope, which is the same in all scopes: requests ask for
/// them, and to look through the settings of every module costs a thousand instructions.
#[derive(Debug, Default)]
pub struct ConfIndexes(hashbrown::HashMap<TypeId, usize>);

impl ConfIndexes {
    /// As these settings of a scope stand.
    pub fn of(confs: &[Option<SharedConf>]) -> ConfIndexes {
        let there = confs.iter().enumerate().filter_map(|(index, conf)| Some((index, conf.as_deref()?)));
        ConfIndexes(there.map(|(index, conf)| (conf.type_id(), index)).collect())
    }

    fn index(&self, wanted: TypeId) -> Option<usize> {
        self.0.get(&wanted).copied()
    }
}

/// `limit_except METHOD … { }`: a location of its own for requests with other methods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitExcept {
    /// The methods that stay outside of it.
    pub methods: Box<[Method]>,
    /// The block's settings.
    pub scope: ScopeId,
}

/// A handler with the module whose settings it is called with.
#[derive(Clone, Copy)]
pub struct BoundHandler {
    /// What to call.
    pub handler: &'static dyn Handler,
    /// The index of its module.
    pub module: usize,
    /// The location whose content a block without a name keeps: the handler is called with the settings of that.
    pub kept_from: Option<ScopeId>,
}

/// A filter with the module whose settings it is called with.
#[derive(Clone, Copy)]
pub struct BoundFilter {
    /// What to call.
    pub filter: &'static dyn Filter,
    /// The index of its module.
    pub module: usize,
}
