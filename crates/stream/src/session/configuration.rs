//! The `stream` block as sessions use it: built once, immutable, shared by all workers. `configuration/` builds it.

use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gale_config::Setting;
use gale_engine::configuration::{ScopeId, ServerId};
use gale_engine::listen;
use gale_engine::log::{Destination, ErrorLog};
use gale_engine::module::SharedConf;
use gale_engine::resolver::ResolverSettings;
use gale_engine::tls::TlsServer;
use gale_engine::tls::settings::VerifyClient;
use gale_engine::traffic::ServerZone;
use gale_engine::upstream::UpstreamTable;
use gale_engine::variables::VariableTable;
use gale_engine::virtual_servers::{CertificateNames, VirtualServers};

use super::Session;
use super::phases::{Content, Handler, PHASES};

/// Everything under `stream { }`.
pub struct StreamConfiguration {
    /// The levels of settings: the block itself, then its servers.
    pub scopes: Vec<Scope>,
    /// The servers in the order of the file.
    pub servers: Vec<Server>,
    /// The addresses to listen on, each with the servers that it chooses from.
    pub addresses: Vec<Address>,
    /// Every variable that the file mentions or a module stores.
    pub variables: VariableTable<Session>,
    /// The groups of servers that sessions may be passed to.
    pub upstreams: UpstreamTable<Session>,
    /// Counts the configurations of this process; the first one is 1.
    pub generation: u64,
}

impl StreamConfiguration {
    /// The scope with this index.
    pub fn scope(&self, id: ScopeId) -> &Scope {
        &self.scopes[id.0 as usize]
    }

    /// The server with this index.
    pub fn server(&self, id: ServerId) -> &Server {
        &self.servers[id.0 as usize]
    }

    /// The server with these settings; none for those of the block itself.
    pub fn server_of(&self, scope: ScopeId) -> Option<ServerId> {
        let place = self.servers.iter().position(|server| server.scope == scope)?;
        u32::try_from(place).ok().map(ServerId)
    }

    /// The settings of a server.
    pub fn scope_of(&self, server: ServerId) -> &Scope {
        self.scope(self.server(server).scope)
    }
}

/// An address that the configuration listens on, with its servers.
pub struct Address {
    /// The address.
    pub listening: listen::Address,
    /// The servers to choose from.
    pub servers: VirtualServers,
}

/// One `server { }`.
pub struct Server {
    /// Its settings.
    pub scope: ScopeId,
    /// `$server_name`: the first name as it was written.
    pub name: Box<[u8]>,
    /// Its certificates, and its rules for those of clients.
    pub tls: Option<Arc<TlsServer>>,
    /// Whether clients have to have a certificate; also where the server has none itself.
    pub verify_client: VerifyClient,
    /// The names of its certificates and keys, if they have variables.
    pub certificate_names: CertificateNames<Session>,
    /// `status_zone`: where its sessions are counted.
    pub zone: Option<Arc<ServerZone>>,
}

/// What the directives of the core module say.
#[derive(Default)]
#[allow(missing_docs, reason = "the fields are nginx's directives")]
pub struct CoreSettings {
    pub error_log: Setting<Vec<Destination>>,
    pub tcp_nodelay: Setting<bool>,
    pub preread_buffer_size: Setting<u64>,
    pub preread_timeout: Setting<Duration>,
    pub proxy_protocol_timeout: Setting<Duration>,
    pub resolver: Setting<Arc<ResolverSettings>>,
    pub resolver_timeout: Setting<Duration>,
}

/// One level of settings and what follows from them.
pub struct Scope {
    /// The settings that sessions themselves need.
    pub core: Arc<CoreSettings>,
    /// Where messages about sessions in this scope go.
    pub error_log: Arc<ErrorLog>,
    /// The settings of every module, by the module's index.
    pub confs: Box<[Option<SharedConf>]>,
    /// Per phase, the handlers that have something to do here, in order.
    pub handlers: [Vec<BoundHandler>; PHASES],
    /// Who serves sessions, with the index of its module.
    pub content: Option<(&'static dyn Content, usize)>,
}

/// A handler with the index of the module whose settings it is called with.
#[derive(Clone, Copy)]
pub struct BoundHandler {
    /// What to call.
    pub handler: &'static dyn Handler,
    /// The index of its module.
    pub module: usize,
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
        self.confs.iter().flatten().find_map(|conf| conf.downcast_ref())
    }
}

/// The block as the sessions of one worker hold it, counted without atomics. A session that lives on after a reload
/// holds this alone, and nothing else of the configuration that it began with.
pub struct Configured(Option<Arc<StreamConfiguration>>);

impl Configured {
    /// A handle on a block.
    pub fn new(stream: Arc<StreamConfiguration>) -> Rc<Configured> {
        Rc::new(Configured(Some(stream)))
    }

    /// The block.
    pub fn stream(&self) -> &Arc<StreamConfiguration> {
        self.0.as_ref().expect("there until it is dropped")
    }
}

impl Drop for Configured {
    fn drop(&mut self) {
        let Some(stream) = self.0.take() else { return };
        // A large block takes long to be freed; the loop of its last session must not wait for that.
        if let Some(stream) = Arc::into_inner(stream)
            && gale_runtime::try_now().is_some()
        {
            let freed = gale_runtime::default_pool().run(move || drop(stream));
            gale_runtime::spawn(async move { drop(freed.await) });
        }
    }
}
