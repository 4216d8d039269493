//! The `stream` block as sessions use it: immutable and shared by all workers. `configuration/` builds it.

use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gale_config::Setting;
use gale_engine::configuration::{ScopeId, ServerId};
use gale_engine::listen;
use gale_engine::module::SharedConf;
use gale_engine::variables::VariableTable;
use gale_engine::virtual_servers::{CertificateNames, VirtualServers};
use gale_log::{Destination, ErrorLog};
use gale_resolver::ResolverSettings;
use gale_tls::TlsServer;
use gale_tls::settings::VerifyClient;
use gale_upstream::UpstreamTable;
use gale_worker::traffic::ServerZone;

use super::Session;
use super::phases::{Content, Handler, PHASES};

/// A complete `stream` block.
pub struct StreamConfiguration {
    /// Levels of settings: the block itself, then its servers.
    pub scopes: Vec<Scope>,
    /// Servers in the order of the file.
    pub servers: Vec<Server>,
    /// Listening addresses, each with its servers.
    pub addresses: Vec<Address>,
    /// All variables that are mentioned in the file or set by a module.
    pub variables: VariableTable<Session>,
    /// Groups of servers.
    pub upstreams: UpstreamTable<Session>,
    /// Number of this configuration in the process; the first one is 1.
    pub generation: u64,
}

impl StreamConfiguration {
    /// Returns the scope with this index.
    pub fn scope(&self, id: ScopeId) -> &Scope {
        &self.scopes[id.0 as usize]
    }

    /// Returns the server with this index.
    pub fn server(&self, id: ServerId) -> &Server {
        &self.servers[id.0 as usize]
    }

    /// Returns the server that owns this scope, or `None` for the scope of the block itself.
    pub fn server_of(&self, scope: ScopeId) -> Option<ServerId> {
        let place = self.servers.iter().position(|server| server.scope == scope)?;
        u32::try_from(place).ok().map(ServerId)
    }

    /// Returns the scope of a server.
    pub fn scope_of(&self, server: ServerId) -> &Scope {
        self.scope(self.server(server).scope)
    }
}

/// A listening address with its servers.
pub struct Address {
    /// The address and its socket.
    pub listening: listen::Address,
    /// Virtual servers at this address.
    pub servers: VirtualServers,
}

/// A `server { }` block.
pub struct Server {
    /// Index of its settings.
    pub scope: ScopeId,
    /// Value of `$server_name`: the first name as it is written.
    pub name: Box<[u8]>,
    /// Its certificates and its settings for client certificates.
    pub tls: Option<Arc<TlsServer>>,
    /// Client certificate mode. It applies even if the server has no certificate of its own.
    pub verify_client: VerifyClient,
    /// Names of certificates and keys that contain variables.
    pub certificate_names: CertificateNames<Session>,
    /// Zone of `status_zone`, which counts the server's sessions.
    pub zone: Option<Arc<ServerZone>>,
}

/// Settings of the core module.
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

/// Complete settings of one level.
pub struct Scope {
    /// Settings of the core module.
    pub core: Arc<CoreSettings>,
    /// Error log for sessions in this scope.
    pub error_log: Arc<ErrorLog>,
    /// Settings of every module, by the module's index.
    pub confs: Box<[Option<SharedConf>]>,
    /// Handlers that apply in this scope, by phase and in order.
    pub handlers: [Vec<BoundHandler>; PHASES],
    /// Content handler, with the index of its module.
    pub content: Option<(&'static dyn Content, usize)>,
}

/// A handler with the index of the module whose settings it is called with.
#[derive(Clone, Copy)]
pub struct BoundHandler {
    /// The handler.
    pub handler: &'static dyn Handler,
    /// Index of the module.
    pub module: usize,
}

impl Scope {
    /// Returns the settings of the module with this index.
    pub fn conf(&self, module: usize) -> &dyn Any {
        match &self.confs[module] {
            Some(conf) => conf.as_ref(),
            None => &(),
        }
    }

    /// Returns the settings of this type. For access to another module's settings; a handler gets its own as an
    /// argument.
    pub fn conf_of<C: 'static>(&self) -> Option<&C> {
        self.confs.iter().flatten().find_map(|conf| conf.downcast_ref())
    }
}

/// A worker's handle on the stream block, counted without atomics. A session that continues after a reload holds only
/// this part of its old configuration.
pub struct Configured(Option<Arc<StreamConfiguration>>);

impl Configured {
    /// Returns a handle on a block.
    pub fn new(stream: Arc<StreamConfiguration>) -> Rc<Configured> {
        Rc::new(Configured(Some(stream)))
    }

    /// Returns the block.
    pub fn stream(&self) -> &Arc<StreamConfiguration> {
        self.0.as_ref().expect("there until it is dropped")
    }
}

impl Drop for Configured {
    fn drop(&mut self) {
        let Some(stream) = self.0.take() else { return };
        // Freeing a large block takes long, so the thread pool does it. The loop of its last session does not wait.
        if let Some(stream) = Arc::into_inner(stream)
            && gale_runtime::try_now().is_some()
        {
            let freed = gale_runtime::default_pool().run(move || drop(stream));
            gale_runtime::spawn(async move { drop(freed.await) });
        }
    }
}
