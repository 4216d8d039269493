//! Builds the stream block: its servers, their addresses, variables.
//!
//! Directives only record their values while the file is parsed. After that, every scope inherits from its parent, and
//! the tables that workers need are built. Sockets are opened last.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gale_config::{Contexts, Diagnostic, Statement};
use gale_engine::configuration::{BlockBuilder, BlockDraft, Builder, Confs, ScopeId, ScopeRef, ScopeTree};
use gale_engine::listen::{Listen, ListenDefaults, ListenPlan};
use gale_engine::module::Module;
use gale_engine::protocol::Protocol;
use gale_engine::variables::{HasVariables, VariablesDraft};
use gale_engine::virtual_servers::{
    CertificateNames, ServerDraft, ServerTls, TlsBlock, TlsClientDraft, VirtualServers, certificate_names,
    gather_addresses, parse_names, tls_servers,
};
use gale_log::ErrorLog;
use gale_process::{Account, ListenSpec, ListenerHandle, Resources};
use gale_tls::staple::Lookup;
use gale_upstream::{HasUpstreams, Metric, ResolverDefaults, UpstreamId, Upstreams};
use gale_worker::traffic::ServerZone;

use crate::configuration::{Address, BoundHandler, CoreSettings, Scope, Server, StreamConfiguration};
use crate::module::{StreamOrder, StreamPart};
use crate::session::Session;
use crate::session::phases::{PHASES, Phase};

/// `listen` requires a port. Accepting is never deferred, because in many protocols the server speaks first.
const DEFAULTS: ListenDefaults = ListenDefaults { port: 0, deferred: false, datagrams: true };

/// The stream block while the configuration is parsed.
#[derive(Default)]
pub struct StreamBuilder {
    /// Variables mentioned so far, and the places that refer to them.
    pub variables: VariablesDraft<Session>,
    /// Groups of servers declared or referred to so far.
    pub upstreams: Upstreams<Session>,
    /// TLS settings for connections to servers.
    pub tls_clients: Vec<TlsClientDraft>,
    /// Target of `proxy_pass` by scope; `None` if the target has variables.
    passes: Vec<(ScopeId, Option<UpstreamId>)>,
    tree: ScopeTree,
    servers: Vec<ServerDraft>,
}

impl BlockBuilder for StreamBuilder {
    fn scopes(&mut self) -> &mut ScopeTree {
        &mut self.tree
    }
}

impl HasVariables<Session> for StreamBuilder {
    fn variables(&mut self) -> &mut VariablesDraft<Session> {
        &mut self.variables
    }
}

impl HasUpstreams<Session> for StreamBuilder {
    const KIND: &'static str = "stream upstream";
    const INSIDE: Contexts = Contexts::STREAM_UPSTREAM;
    const TIMES: &'static [(&'static str, Metric)] =
        &[("connect", Metric::Connect), ("first_byte", Metric::Header), ("last_byte", Metric::LastByte)];

    fn upstreams(&mut self) -> &mut Upstreams<Session> {
        &mut self.upstreams
    }
}

/// Access to the stream block for directives inside of it.
pub trait InStream {
    /// The stream block.
    fn stream_mut(&mut self) -> &mut StreamBuilder;
}

impl InStream for Builder {
    fn stream_mut(&mut self) -> &mut StreamBuilder {
        self.block().expect("inside of the stream block")
    }
}

impl StreamBuilder {
    /// Records that a server passes sessions to this group; `None` if the target has variables.
    pub fn note_pass(&mut self, scope: ScopeRef, group: Option<UpstreamId>) {
        if let ScopeRef::Block(scope) = scope {
            self.passes.push((scope, group));
        }
    }

    /// Returns the group that a server passes sessions to: `None` if it passes none, `Some(None)` if the target has
    /// variables.
    pub fn pass_of(&self, scope: ScopeId) -> Option<Option<UpstreamId>> {
        self.passes.iter().find(|(known, _)| *known == scope).map(|(_, group)| *group)
    }

    fn current_server(&mut self, scope: ScopeRef) -> &mut ServerDraft {
        let server = self.servers.iter_mut().find(|server| ScopeRef::Block(server.scope) == scope);
        server.expect("inside of a server block")
    }
}

/// `stream { }`
pub fn stream_block(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if builder.block::<StreamBuilder>().is_some() {
        return Err(statement.directive_error("is duplicate"));
    }
    let mut stream = StreamBuilder::default();
    let scope = stream.tree.add_root(builder);
    builder.open_block(stream, complete);
    builder.walk(statement.body(), Contexts::STREAM, ScopeRef::Block(scope));
    Ok(())
}

/// `server { }`
pub fn server_block(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let confs = builder.no_confs();
    let stream = builder.stream_mut();
    let scope = stream.tree.add(ScopeId(0), confs);
    stream.servers.push(ServerDraft::new(scope, statement.name.span));
    builder.walk(statement.body(), Contexts::STREAM_SERVER, ScopeRef::Block(scope));
    Ok(())
}

/// `listen …`
pub fn listen(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let (listen, warnings) = Listen::parse(statement, DEFAULTS)?;
    builder.note(warnings);
    let scope = builder.scope;
    builder.stream_mut().current_server(scope).add_listen(listen, statement)
}

/// Sets `status_zone ZONE`. Returns false if the server has one already.
pub fn set_server_zone(builder: &mut Builder, zone: Arc<ServerZone>) -> bool {
    let scope = builder.scope;
    builder.stream_mut().current_server(scope).zone.replace(zone).is_none()
}

/// `server_name NAME …`
pub fn server_name(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let names = parse_names::<Session>(builder, statement)?;
    let scope = builder.scope;
    builder.stream_mut().current_server(scope).names.extend(names);
    Ok(())
}

/// The stream block, complete but for its sockets.
struct StreamDraft {
    configuration: StreamConfiguration,
    /// Virtual servers by address.
    servers: Vec<VirtualServers>,
    plan: ListenPlan,
}

/// Completes every scope and puts the configuration together.
fn complete(builder: &mut Builder, resources: &mut dyn Resources) -> Result<Box<dyn BlockDraft>, Diagnostic> {
    // The variables stay with the builder, because default values may mention some.
    let mut tree = std::mem::take(&mut builder.stream_mut().tree);
    let has_part = |module: &Module| module.part::<StreamPart>().is_some();
    let confs = tree.complete(builder, Contexts::STREAM.or(Contexts::STREAM_SERVER), has_part)?;
    let servers = std::mem::take(&mut builder.stream_mut().servers);
    if let Some(silent) = servers.iter().find(|server| server.listens.is_empty()) {
        return Err(Diagnostic::emerg("no \"listen\" is defined for server").at(silent.span));
    }
    let (addresses, virtual_servers) = gather_addresses(&servers, |_| None, builder, resources)?;
    let upstreams = Upstreams::complete(&resolver_defaults(&confs), builder, resources)?;
    let certificate_names = certificate_names(&servers, &confs, builder)?;
    let variables = std::mem::take(&mut builder.stream_mut().variables);
    let modules = builder.order.modules.iter();
    let definitions = modules.filter_map(|module| module.part::<StreamPart>()).flat_map(|part| part.variables);
    let variables = variables.complete(definitions)?;
    let tls = {
        let block = TlsBlock { name: "stream", lookup: &lookup };
        tls_servers(&servers, &confs, &addresses, &virtual_servers, block, builder, resources)?
    };
    let tls_clients = std::mem::take(&mut builder.stream_mut().tls_clients);
    builder.load_tls_clients(tls_clients, resources)?;
    type Completed<'d> = ((&'d ServerDraft, ServerTls), CertificateNames<Session>);
    let finish = |((draft, (tls, verify_client)), certificate_names): Completed<'_>| Server {
        scope: draft.scope,
        name: draft.name(),
        tls,
        verify_client,
        certificate_names,
        zone: draft.zone.clone(),
    };
    let servers = servers.iter().zip(tls).zip(certificate_names).map(finish).collect();
    let parts = Parts::in_order(builder);
    let scopes = confs.into_iter().map(|confs| parts.finish_scope(confs)).collect();
    static GENERATIONS: AtomicU64 = AtomicU64::new(0);
    let generation = GENERATIONS.fetch_add(1, Ordering::Relaxed) + 1;
    let addresses_later = Vec::new();
    let configuration =
        StreamConfiguration { scopes, servers, addresses: addresses_later, variables, upstreams, generation };
    Ok(Box::new(StreamDraft { configuration, servers: virtual_servers, plan: ListenPlan::new(addresses) }))
}

/// Returns the resolver of a scope and its timeout.
fn lookup(confs: &Confs) -> Lookup {
    let core = confs.iter().flatten().find_map(|conf| conf.downcast_ref::<CoreSettings>())?;
    Some((core.resolver.get_opt().cloned()?, *core.resolver_timeout.get()))
}

/// Returns the resolver settings of the stream block itself.
fn resolver_defaults(confs: &[Confs]) -> ResolverDefaults {
    let core = confs.first().into_iter().flatten().flatten().find_map(|conf| conf.downcast_ref::<CoreSettings>());
    ResolverDefaults {
        resolver: core.and_then(|core| core.resolver.get_opt().cloned()),
        timeout: core.and_then(|core| core.resolver_timeout.get_opt().copied()),
    }
}

impl BlockDraft for StreamDraft {
    fn listens(&self) -> Vec<ListenSpec> {
        self.plan.specs()
    }

    fn prepare(&self, _: &mut dyn Resources, _: Option<&Account>) -> Result<(), Diagnostic> {
        Ok(())
    }

    fn finish(self: Box<Self>, listeners: Vec<ListenerHandle>) -> Arc<dyn Protocol> {
        let StreamDraft { mut configuration, servers, plan } = *self;
        let addresses = plan.addresses(&listeners).into_iter().zip(servers);
        configuration.addresses = addresses.map(|(listening, servers)| Address { listening, servers }).collect();
        Arc::new(configuration)
    }
}

/// Handlers and content of all modules, in order.
struct Parts {
    handlers: Vec<(Phase, BoundHandler)>,
    content: Vec<usize>,
    modules: &'static [&'static Module],
}

impl Parts {
    fn in_order(builder: &Builder) -> Parts {
        let modules = builder.order.modules;
        let index_of = |module: &'static Module| {
            let found = modules.iter().position(|candidate| std::ptr::eq(*candidate, module));
            found.expect("the order names only modules of its list")
        };
        let order: &StreamOrder = builder.order.of().expect("the order comes with the stream block");
        let mut handlers = Vec::new();
        for (phase, of_phase) in order.phases {
            for module in *of_phase {
                let own = part_of(module).handlers.iter().filter(|(own, _)| own == phase);
                let module = index_of(module);
                handlers.extend(own.map(|(_, handler)| (*phase, BoundHandler { handler: *handler, module })));
            }
        }
        Parts { handlers, content: order.content.iter().map(|module| index_of(module)).collect(), modules }
    }

    fn finish_scope(&self, confs: Confs) -> Scope {
        let conf_of = |index: usize| confs[index].as_deref().map_or(&() as &dyn std::any::Any, |conf| conf);
        let mut handlers: [Vec<BoundHandler>; PHASES] = Default::default();
        for (phase, bound) in &self.handlers {
            if bound.handler.applies(conf_of(bound.module)) {
                handlers[*phase as usize].push(*bound);
            }
        }
        let content = self.content.iter().find_map(|&module| {
            let content = part_of(self.modules[module]).content?;
            content.applies(conf_of(module)).then_some((content, module))
        });
        let core = confs.iter().flatten().find(|conf| conf.is::<CoreSettings>());
        let core = core.and_then(|conf| Arc::clone(conf).downcast::<CoreSettings>().ok());
        let core = core.expect("the stream core module is among the modules");
        let error_log = Arc::new(ErrorLog::new(core.error_log.get().clone()));
        Scope { core, error_log, confs: confs.into(), handlers, content }
    }
}

fn part_of(module: &Module) -> &'static StreamPart {
    module.part::<StreamPart>().unwrap_or(&StreamPart::EMPTY)
}
