//! Builds the http block: scopes, servers, locations, addresses, variables.
//!
//! While the text is walked, blocks only gather what they say. When all of it
//! is known, every scope is completed from its parent, and what the workers
//! need is put together. Then, at the very end, the sockets are opened.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use bstr::{BString, ByteSlice};
use gale_config::{Contexts, Diagnostic, Setting, Span, Statement, Word};
use gale_protocol::request::{Method, Scheme};

use crate::configuration::location::{Locations, Pattern};
use crate::configuration::settings::{Alias, CoreSettings};
use crate::configuration::{
    Address, BoundFilter, BoundHandler, HttpConfiguration, LimitExcept, Scope, ScopeKind, Server, VirtualServers,
};
use crate::module::{HttpOrder, HttpPart};
use crate::request::Request;
use crate::request::filters::Filter;
use crate::request::phases::{Handler, Phase};
use crate::variables::VariableId;
use crate::variables::regex::Regex;
use crate::variables::template::Template;
use gale_engine::configuration::{BlockBuilder, BlockDraft, Builder, Confs, ScopeId, ScopeRef, ScopeTree, ServerId};
use gale_engine::listen::{AddressDraft, Listen, ListenDefaults, ListenPlan};
use gale_engine::log::ErrorLog;
use gale_engine::module::{Conf, Module};
use gale_engine::protocol::Protocol;
use gale_engine::server_name::{ServerName, ServerNames};
use gale_engine::spool::TempPath;
use gale_engine::tls::settings::{TlsClientSettings, TlsSettings, VerifyClient};
use gale_engine::tls::{TlsClient, TlsClientLoader, TlsLoader, TlsServer};
use gale_engine::upstream::{HasUpstreams, ResolverDefaults, Upstreams};
use gale_engine::variables::{HasVariables, VariablesDraft};
use gale_process::{Account, ListenSpec, ListenerHandle, Resources};

/// The port when `listen` names none.
const PORT_DEFAULT: u16 = Scheme::Http.default_port();

/// The port of a server without `listen` when the program does not run as root.
const PORT_UNPRIVILEGED: u16 = 8000;

/// HTTP clients speak first, so the kernel tells of a connection when its request is there: what would be an accept, a
/// wait and a receive becomes one step.
const DEFAULTS: ListenDefaults = ListenDefaults { port: PORT_DEFAULT, deferred: true };

/// The http block while it is being read.
#[derive(Default)]
pub struct HttpBuilder {
    /// The variables mentioned so far, and what refers to them.
    pub variables: VariablesDraft<Request>,
    /// The groups of servers that are declared or referred to so far.
    pub upstreams: Upstreams<Request>,
    /// Directories for temporary files that modules want.
    pub temp_paths: Vec<Setting<TempPath>>,
    /// What is asked of servers that are spoken to over TLS.
    pub tls_clients: Vec<TlsClientDraft>,
    tree: ScopeTree,
    /// What else there is to know of each scope.
    scopes: Vec<ScopeDraft>,
    servers: Vec<ServerDraft>,
}

/// Settings of TLS to servers whose files have not been read.
pub struct TlsClientDraft {
    /// The settings.
    pub settings: TlsClientSettings,
    /// What the directives of their module begin with.
    pub prefix: &'static str,
    /// Gets what they come to.
    pub client: Arc<OnceLock<Arc<TlsClient>>>,
}

struct ScopeDraft {
    kind: ScopeKind,
    server: Option<ServerId>,
    /// The location as written, for messages; empty for the others.
    name: BString,
    shape: LocationShape,
    /// Locations nested here, in order.
    locations: Vec<(Pattern, ScopeId)>,
    /// Their patterns, but for regular expressions: each may be there once.
    patterns: HashSet<(LocationShape, Box<[u8]>)>,
    limit_except: Option<LimitExcept>,
}

/// What kind of location a scope is: decides what may be nested in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum LocationShape {
    None,
    Exact,
    Prefix,
    Regex,
    Named,
}

struct ServerDraft {
    scope: ScopeId,
    span: Span,
    names: Vec<(Word, ServerName)>,
    listens: Vec<Listen>,
}

impl BlockBuilder for HttpBuilder {
    fn scopes(&mut self) -> &mut ScopeTree {
        &mut self.tree
    }
}

impl HasVariables<Request> for HttpBuilder {
    fn variables(&mut self) -> &mut VariablesDraft<Request> {
        &mut self.variables
    }
}

impl HasUpstreams<Request> for HttpBuilder {
    const KIND: &'static str = "http upstream";
    const INSIDE: Contexts = Contexts::UPSTREAM;

    fn upstreams(&mut self) -> &mut Upstreams<Request> {
        &mut self.upstreams
    }
}

/// What a directive of the http block, or inside of it, may take for granted.
pub trait InHttp {
    /// The http block.
    fn http_mut(&mut self) -> &mut HttpBuilder;

    /// The scope that the directive stands in.
    fn http_scope(&self) -> ScopeId;
}

impl InHttp for Builder {
    fn http_mut(&mut self) -> &mut HttpBuilder {
        self.block().expect("inside of the http block")
    }

    fn http_scope(&self) -> ScopeId {
        match self.scope {
            ScopeRef::Block(scope) => scope,
            ScopeRef::Main => unreachable!("a directive of the http block outside of it"),
        }
    }
}

impl ScopeDraft {
    /// A scope that is no location.
    fn new(kind: ScopeKind, server: Option<ServerId>) -> ScopeDraft {
        ScopeDraft {
            kind,
            server,
            name: BString::default(),
            shape: LocationShape::None,
            locations: Vec::new(),
            patterns: HashSet::new(),
            limit_except: None,
        }
    }
}

impl HttpBuilder {
    /// The settings of a scope, by module.
    pub fn confs(&mut self, scope: ScopeId) -> &mut Vec<Option<Conf>> {
        self.tree.confs(scope)
    }

    fn scope(&self, id: ScopeId) -> &ScopeDraft {
        &self.scopes[id.0 as usize]
    }

    fn scope_mut(&mut self, id: ScopeId) -> &mut ScopeDraft {
        &mut self.scopes[id.0 as usize]
    }

    /// What an `alias` in this scope replaces; `None` outside of a location.
    pub fn alias_of(&self, scope: ScopeId) -> Option<Alias> {
        let draft = self.scope(scope);
        match draft.shape {
            LocationShape::Exact | LocationShape::Prefix => Some(Alias::Prefix(draft.name.as_slice().into())),
            LocationShape::Regex => Some(Alias::Whole),
            LocationShape::None | LocationShape::Named => None,
        }
    }

    /// The part of URIs that a path of `proxy_pass` takes the place of in this scope; `None` where there is none: in a
    /// location given by an expression, a named one, or a block without a name.
    pub fn replaceable_part(&self, scope: ScopeId) -> Option<Box<[u8]>> {
        let draft = self.scope(scope);
        let is_plain = matches!(draft.shape, LocationShape::Exact | LocationShape::Prefix);
        (draft.kind == ScopeKind::Location && is_plain).then(|| draft.name.as_slice().into())
    }

    /// The server that a scope is in, if it is in one.
    pub fn server_of(&self, scope: ScopeId) -> Option<ServerId> {
        self.scope(scope).server
    }

    /// What `server_name` says in a server: all of it when the settings are completed.
    pub fn names_of(&self, server: ServerId) -> impl Iterator<Item = &(Word, ServerName)> {
        self.servers[server.0 as usize].names.iter()
    }

    /// The settings of this type in a scope.
    pub fn conf_mut<C: 'static>(&mut self, scope: ScopeId) -> Option<&mut C> {
        self.confs(scope).iter_mut().flatten().find_map(|conf| conf.downcast_mut())
    }

    /// The variable of this name.
    pub fn variable(&mut self, name: &[u8], span: Option<Span>) -> VariableId {
        self.variables.variable(name, span)
    }

    /// Compiles a text with variables.
    pub fn template(&mut self, word: &Word) -> Result<Template, Diagnostic> {
        self.variables.template(word)
    }

    /// Compiles a regular expression whose named groups become variables.
    pub fn regex(&mut self, word: &Word, expression: &[u8], caseless: bool) -> Result<Regex, Diagnostic> {
        self.variables.regex(word, expression, caseless)
    }
}

/// `http { }`
pub fn http_block(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if builder.block::<HttpBuilder>().is_some() {
        return Err(statement.directive_error("is duplicate"));
    }
    let mut http = HttpBuilder::default();
    let scope = http.tree.add_root(builder);
    http.scopes.push(ScopeDraft::new(ScopeKind::Http, None));
    builder.open_block(http, complete);
    builder.walk(statement.body(), Contexts::HTTP, ScopeRef::Block(scope));
    Ok(())
}

/// Adds a scope inside of the one that is being read.
fn add_scope(builder: &mut Builder, draft: ScopeDraft) -> ScopeId {
    let parent = builder.http_scope();
    let confs = builder.no_confs();
    let http = builder.http_mut();
    http.scopes.push(draft);
    http.tree.add(parent, confs)
}

/// `server { }`
pub fn server_block(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let server = ServerId(u32::try_from(builder.http_mut().servers.len()).expect("fewer servers than 2^32"));
    let scope = add_scope(builder, ScopeDraft::new(ScopeKind::Server, Some(server)));
    let draft = ServerDraft { scope, span: statement.name.span, names: Vec::new(), listens: Vec::new() };
    builder.http_mut().servers.push(draft);
    builder.walk(statement.body(), Contexts::SERVER, ScopeRef::Block(scope));
    Ok(())
}

/// `location [=|~|~*|^~] URI { }` and `location @NAME { }`
pub fn location_block(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let parent = builder.http_scope();
    let http = builder.http_mut();
    let (pattern, shape) = location_pattern(http, statement)?;
    let name = statement.args.last().map(|word| word.text.clone()).unwrap_or_default();
    check_nesting(http.scope(parent), &name, shape).map_err(|message| statement.error(message))?;
    let stored_name = stored_name(&pattern, &name);
    let parent = http.scope_mut(parent);
    if let Pattern::Exact(text) | Pattern::Prefix { prefix: text, .. } | Pattern::Named(text) = &pattern
        && !parent.patterns.insert((shape, text.clone()))
    {
        return Err(statement.error(format!("duplicate location \"{stored_name}\"")));
    }
    let draft = ScopeDraft { name: stored_name, shape, ..ScopeDraft::new(ScopeKind::Location, parent.server) };
    let outer = builder.http_scope();
    let scope = add_scope(builder, draft);
    builder.http_mut().scope_mut(outer).locations.push((pattern, scope));
    builder.walk(statement.body(), Contexts::LOCATION, ScopeRef::Block(scope));
    Ok(())
}

/// `limit_except METHOD … { }`: the block for every other method.
pub fn limit_except(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let location = builder.http_scope();
    if builder.http_mut().scope(location).limit_except.is_some() {
        return Err(statement.directive_error("is duplicate"));
    }
    let mut methods = statement.args.iter().map(limited_method).collect::<Result<Vec<Method>, _>>()?;
    if methods.contains(&Method::Get) {
        methods.push(Method::Head);
    }
    let scope = nameless_block(builder, statement, Contexts::LIMIT_EXCEPT);
    let block = LimitExcept { methods: methods.into(), scope };
    builder.http_mut().scope_mut(location).limit_except = Some(block);
    Ok(())
}

fn limited_method(word: &Word) -> Result<Method, Diagnostic> {
    match Method::from_name(&word.text.to_ascii_uppercase()) {
        Method::Other | Method::Connect | Method::Trace => {
            Err(Diagnostic::emerg(format!("invalid method \"{}\"", word.text)).at(word.span))
        }
        method => Ok(method),
    }
}

/// A block without a name that a request may come into while it is in the one around it: `if`, `limit_except`. Returns
/// its scope.
///
/// It has all settings of the block around it but those that are for a location alone, and the content of the
/// location stays what it is unless the block has content of its own.
pub fn nameless_block(builder: &mut Builder, statement: &Statement, place: Contexts) -> ScopeId {
    let outer = builder.http_scope();
    let outer = builder.http_mut().scope(outer);
    let (name, shape) = (outer.name.clone(), outer.shape);
    let draft = ScopeDraft { name, shape, ..ScopeDraft::new(ScopeKind::Nameless, outer.server) };
    let scope = add_scope(builder, draft);
    builder.walk(statement.body(), place, ScopeRef::Block(scope));
    scope
}

/// The location's name without the modifier that may be written together with it.
fn stored_name(pattern: &Pattern, written: &BString) -> BString {
    match pattern {
        Pattern::Exact(uri) => BString::from(&**uri),
        Pattern::Prefix { prefix, .. } => BString::from(&**prefix),
        Pattern::Named(_) | Pattern::Regex(_) => written.clone(),
    }
}

/// `listen …`
pub fn listen(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let (listen, warnings) = Listen::parse(statement, DEFAULTS)?;
    builder.note(warnings);
    let server = current_server(builder);
    if let Some(address) = server.listens.iter().find_map(|other| listen.shared_with(other)) {
        return Err(statement.error(format!("a duplicate listen {address}")));
    }
    server.listens.push(listen);
    Ok(())
}

/// `server_name NAME …`
pub fn server_name(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    for word in &statement.args {
        if word.text.contains(&b'/') {
            let warning =
                Diagnostic::warn(format!("server name \"{}\" has suspicious symbols", word.text)).at(word.span);
            builder.note([warning]);
        }
        let mut word = word.clone();
        if word.text == "$hostname" {
            word.text = gale_engine::hostname::hostname().into();
        }
        let mut name = ServerName::parse(&word.text).map_err(|message| Diagnostic::emerg(message).at(word.span))?;
        if let ServerName::Regex(regex) = &mut name {
            regex.bind(|group| builder.http_mut().variables.table.stored(group, Some(word.span)));
        }
        current_server(builder).names.push((word, name));
    }
    Ok(())
}

fn current_server(builder: &mut Builder) -> &mut ServerDraft {
    let scope = builder.http_scope();
    let http = builder.http_mut();
    let server = http.scope(scope).server.expect("inside of a server block");
    &mut http.servers[server.0 as usize]
}

fn location_pattern(http: &mut HttpBuilder, statement: &Statement) -> Result<(Pattern, LocationShape), Diagnostic> {
    let exact = |text: &[u8]| (Pattern::Exact(text.into()), LocationShape::Exact);
    let prefix =
        |text: &[u8], final_prefix| (Pattern::Prefix { prefix: text.into(), final_prefix }, LocationShape::Prefix);
    match statement.args.as_slice() {
        [modifier, word] => match &**modifier.text {
            b"=" => Ok(exact(&word.text)),
            b"^~" => Ok(prefix(&word.text, true)),
            b"~" => Ok((Pattern::Regex(http.regex(word, &word.text, false)?), LocationShape::Regex)),
            b"~*" => Ok((Pattern::Regex(http.regex(word, &word.text, true)?), LocationShape::Regex)),
            _ => Err(Diagnostic::emerg(format!("invalid location modifier \"{}\"", modifier.text)).at(modifier.span)),
        },
        [word] => {
            let text: &[u8] = &word.text;
            if let Some(text) = text.strip_prefix(b"=") {
                Ok(exact(text))
            } else if let Some(text) = text.strip_prefix(b"^~") {
                Ok(prefix(text, true))
            } else if let Some(text) = text.strip_prefix(b"~*") {
                Ok((Pattern::Regex(http.regex(word, text, true)?), LocationShape::Regex))
            } else if let Some(text) = text.strip_prefix(b"~") {
                Ok((Pattern::Regex(http.regex(word, text, false)?), LocationShape::Regex))
            } else if let Some(name) = text.strip_prefix(b"@") {
                Ok((Pattern::Named(name.into()), LocationShape::Named))
            } else {
                Ok(prefix(text, false))
            }
        }
        _ => Err(statement.error("invalid number of arguments in \"location\" directive")),
    }
}

/// nginx's rules on what may stand in what.
fn check_nesting(parent: &ScopeDraft, name: &BString, shape: LocationShape) -> Result<(), String> {
    if parent.kind != ScopeKind::Location {
        return Ok(());
    }
    let outer = &parent.name;
    match parent.shape {
        LocationShape::Exact => {
            return Err(format!("location \"{name}\" cannot be inside the exact location \"{outer}\""));
        }
        LocationShape::Named => {
            return Err(format!("location \"{name}\" cannot be inside the named location \"{outer}\""));
        }
        _ => {}
    }
    if shape == LocationShape::Named {
        return Err(format!("named location \"{name}\" can be on the server level only"));
    }
    let is_within = name.trim_start_with(|byte| matches!(byte, '=' | '^' | '~')).starts_with(outer.as_slice());
    if parent.shape == LocationShape::Prefix && shape != LocationShape::Regex && !is_within {
        return Err(format!("location \"{name}\" is outside location \"{outer}\""));
    }
    Ok(())
}

/// The http block, complete but for its sockets.
struct HttpDraft {
    configuration: HttpConfiguration,
    /// By address.
    servers: Vec<VirtualServers>,
    plan: ListenPlan,
    /// Directories for temporary files that modules want, besides those for bodies.
    temp_paths: Vec<Setting<TempPath>>,
}

/// Completes every scope and puts the configuration together.
fn complete(builder: &mut Builder, resources: &mut dyn Resources) -> Result<Box<dyn BlockDraft>, Diagnostic> {
    // The variables stay with the builder: defaults may mention some.
    let mut tree = std::mem::take(&mut builder.http_mut().tree);
    let mut scopes = std::mem::take(&mut builder.http_mut().scopes);
    let confs = tree.complete(builder, Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION))?;
    let servers = std::mem::take(&mut builder.http_mut().servers);
    let (addresses, virtual_servers) = gather_addresses(&servers, builder, resources)?;
    let resolver = resolver_defaults(&confs);
    let upstreams = Upstreams::complete(&resolver, builder, resources)?;
    let variables = std::mem::take(&mut builder.http_mut().variables);
    let modules = builder.order.modules.iter();
    let definitions = modules.filter_map(|module| module.part::<HttpPart>()).flat_map(|part| part.variables);
    let variables = variables.complete(definitions)?;
    let tls = tls_servers(&servers, &confs, &addresses, &virtual_servers, builder, resources)?;
    complete_tls_clients(builder, resources)?;
    let servers = finish_servers(&mut scopes, servers, tls);
    let scopes = finish_scopes(scopes, confs, &tree, builder);
    static GENERATIONS: AtomicU64 = AtomicU64::new(0);
    let generation = GENERATIONS.fetch_add(1, Ordering::Relaxed) + 1;
    let speaks_tls = addresses.iter().any(|address| address.ssl);
    let addresses_later = Vec::new();
    let redirects_to_slash = scopes.iter().any(|scope| scope.redirects_to_slash);
    let configuration = HttpConfiguration {
        scopes,
        redirects_to_slash,
        servers,
        addresses: addresses_later,
        variables,
        upstreams,
        speaks_tls,
        generation,
    };
    let temp_paths = std::mem::take(&mut builder.http_mut().temp_paths);
    let plan = ListenPlan::new(addresses);
    Ok(Box::new(HttpDraft { configuration, servers: virtual_servers, plan, temp_paths }))
}

/// What the http block itself says of name servers.
fn resolver_defaults(confs: &[Confs]) -> ResolverDefaults {
    let core = confs.first().into_iter().flatten().flatten().find_map(|conf| conf.downcast_ref::<CoreSettings>());
    ResolverDefaults {
        resolver: core.and_then(|core| core.resolver.get_opt().cloned()),
        timeout: core.and_then(|core| core.resolver_timeout.get_opt().copied()),
    }
}

impl BlockDraft for HttpDraft {
    fn listens(&self) -> Vec<ListenSpec> {
        self.plan.specs()
    }

    fn prepare(&self, resources: &mut dyn Resources, owner: Option<&Account>) -> Result<(), Diagnostic> {
        let of_bodies = self.configuration.scopes.iter().map(|scope| &scope.core.client_body_temp_path);
        prepare_temp_paths(of_bodies.chain(&self.temp_paths), resources, owner)
    }

    fn finish(self: Box<Self>, listeners: Vec<ListenerHandle>) -> Arc<dyn Protocol> {
        let HttpDraft { mut configuration, servers, plan, .. } = *self;
        let addresses = plan.addresses(&listeners).into_iter().zip(servers);
        configuration.addresses = addresses.map(|(listening, servers)| Address { listening, servers }).collect();
        Arc::new(configuration)
    }
}

/// Directories for temporary files have to be there before they are needed. A default one may be missing where nobody
/// stores anything.
fn prepare_temp_paths<'s>(
    settings: impl Iterator<Item = &'s Setting<TempPath>>,
    resources: &mut dyn Resources,
    owner: Option<&Account>,
) -> Result<(), Diagnostic> {
    let mut prepared: Vec<&std::path::Path> = Vec::new();
    for setting in settings {
        let path = &*setting.get().path;
        if prepared.contains(&path) {
            continue;
        }
        prepared.push(path);
        if setting.span().is_none()
            && let Some(parent) = path.parent()
        {
            // A default place that no package has made.
            let _ = resources.directory(parent, None);
        }
        match resources.directory(path, owner) {
            Err(error) if setting.span().is_some() => return Err(setting.error(error.to_string())),
            _ => {}
        }
    }
    Ok(())
}

/// The addresses of all servers, and the servers of each.
fn gather_addresses(
    servers: &[ServerDraft],
    builder: &mut Builder,
    resources: &mut dyn Resources,
) -> Result<(Vec<AddressDraft>, Vec<VirtualServers>), Diagnostic> {
    let mut addresses = Vec::new();
    for (index, server) in servers.iter().enumerate() {
        let id = ServerId(u32::try_from(index).expect("fewer servers than 2^32"));
        let implicit;
        let listens = if server.listens.is_empty() {
            let port = if builder.is_privileged { PORT_DEFAULT } else { PORT_UNPRIVILEGED };
            implicit = [Listen::implicit(port, server.span, DEFAULTS)];
            &implicit[..]
        } else {
            &server.listens
        };
        for listen in listens {
            listen.add_to(&mut addresses, id, builder, resources)?;
        }
    }
    let mut virtual_servers = Vec::with_capacity(addresses.len());
    for draft in &mut addresses {
        draft.spec.reuseport = draft.spec.reuseport.min(builder.workers());
        let names = names_of(draft, servers, builder);
        let default = draft.default.map_or(draft.servers[0], |(server, _)| server);
        virtual_servers.push(VirtualServers { default, names });
    }
    Ok((addresses, virtual_servers))
}

/// The names of all servers of one address. A name that two of them claim goes
/// to the first, with nginx's warning.
fn names_of(draft: &AddressDraft, servers: &[ServerDraft], builder: &mut Builder) -> ServerNames {
    let mut names = ServerNames::default();
    for &id in &draft.servers {
        let is_unnamed = servers[id.0 as usize].names.is_empty();
        // A lone server is the default, whatever the host.
        if is_unnamed && draft.servers.len() > 1 && names.insert(ServerName::Exact(Box::default()), id).is_err() {
            let message = format!("conflicting server name \"\" on {}, ignored", draft.spec.address);
            builder.note([Diagnostic::warn(message).at(servers[id.0 as usize].span)]);
        }
        for (word, name) in &servers[id.0 as usize].names {
            if names.insert(name.clone(), id).is_err() {
                let message = format!("conflicting server name \"{}\" on {}, ignored", word.text, draft.spec.address);
                builder.note([Diagnostic::warn(message).at(word.span)]);
            }
        }
    }
    names
}

/// A server's certificates and rules, and whether it asks for those of clients.
type ServerTls = (Option<Arc<TlsServer>>, VerifyClient);

/// The certificates and rules of each server that has some. The addresses that speak TLS have to have them.
fn tls_servers(
    servers: &[ServerDraft],
    confs: &[Confs],
    addresses: &[AddressDraft],
    virtual_servers: &[VirtualServers],
    builder: &mut Builder,
    resources: &mut dyn Resources,
) -> Result<Vec<ServerTls>, Diagnostic> {
    let (mut loader, mut notes) = (TlsLoader::default(), Vec::new());
    let mut found = Vec::with_capacity(servers.len());
    for server in servers {
        let of_scope = confs[server.scope.0 as usize].iter().flatten();
        let settings = of_scope.filter_map(|conf| conf.downcast_ref::<TlsSettings>()).next();
        found.push(match settings {
            Some(settings) => (loader.server(settings, resources, &mut notes)?, *settings.verify_client.get()),
            None => ServerTls::default(),
        });
    }
    builder.note(notes);
    for (address, virtual_servers) in addresses.iter().zip(virtual_servers).filter(|(address, _)| address.ssl) {
        // What the default server has is for those that have none, unless that only refuses.
        let default = found[virtual_servers.default.0 as usize].0.as_ref();
        let needs = match default {
            None => std::slice::from_ref(&virtual_servers.default),
            Some(default) if default.rejects() => &address.servers[..],
            Some(_) => continue,
        };
        if let Some(without) = needs.iter().find(|server| found[server.0 as usize].0.is_none()) {
            let message = "no \"ssl_certificate\" is defined for the \"listen ... ssl\" directive";
            return Err(Diagnostic::emerg(message).at(servers[without.0 as usize].span));
        }
    }
    Ok(found)
}

/// Reads certificates and keys for connections to servers.
fn complete_tls_clients(builder: &mut Builder, resources: &mut dyn Resources) -> Result<(), Diagnostic> {
    let (mut loader, mut notes) = (TlsClientLoader::default(), Vec::new());
    for draft in std::mem::take(&mut builder.http_mut().tls_clients) {
        let client = loader.client(&draft.settings, draft.prefix, resources, &mut notes)?;
        draft.client.get_or_init(|| client);
    }
    builder.note(notes);
    Ok(())
}

fn finish_servers(scopes: &mut [ScopeDraft], servers: Vec<ServerDraft>, tls: Vec<ServerTls>) -> Vec<Server> {
    let finish = |(draft, (tls, verify_client)): (ServerDraft, ServerTls)| {
        let mut named = HashMap::new();
        let locations = take_locations(scopes, draft.scope, &mut named);
        let name = draft.names.first().map_or(Box::default(), |(word, _)| {
            // `.example.com` is called example.com.
            let text: &[u8] = &word.text;
            text.strip_prefix(b".").unwrap_or(text).into()
        });
        Server { scope: draft.scope, name, locations, named, tls, verify_client }
    };
    servers.into_iter().zip(tls).map(finish).collect()
}

fn take_locations(scopes: &mut [ScopeDraft], scope: ScopeId, named: &mut HashMap<Box<[u8]>, ScopeId>) -> Locations {
    let mut locations = Locations::default();
    for (pattern, child) in std::mem::take(&mut scopes[scope.0 as usize].locations) {
        let nested = take_locations(scopes, child, named);
        if let Pattern::Named(name) = &pattern {
            named.insert(name.clone(), child);
        }
        locations.insert(pattern, child, nested);
    }
    locations
}

fn finish_scopes(drafts: Vec<ScopeDraft>, confs: Vec<Confs>, tree: &ScopeTree, builder: &Builder) -> Vec<Scope> {
    let parts = parts_in_order(builder);
    let mut scopes: Vec<Scope> = Vec::with_capacity(drafts.len());
    for (index, (draft, confs)) in (0..).zip(drafts.into_iter().zip(confs)) {
        let location = tree.parent(ScopeId(index)).filter(|_| draft.kind == ScopeKind::Nameless);
        let mut scope = finish_scope(draft, confs, &parts);
        if let Some(location) = location {
            keep_content(&mut scope, &scopes[location.0 as usize], location);
        }
        scopes.push(scope);
    }
    scopes
}

/// A block without a name keeps the content of the location around it, unless it has some of its own.
fn keep_content(block: &mut Scope, location: &Scope, id: ScopeId) {
    const CONTENT: usize = Phase::Content as usize;
    let outer = &location.handlers[CONTENT];
    let own = &block.handlers[CONTENT];
    if own.iter().any(|own| outer.iter().all(|outer| outer.module != own.module)) {
        return;
    }
    let keep = |outer: &BoundHandler| match own.iter().find(|own| own.module == outer.module) {
        Some(own) => *own,
        None => BoundHandler { kept_from: outer.kept_from.or(Some(id)), ..*outer },
    };
    block.handlers[CONTENT] = outer.iter().map(keep).collect();
}

/// What modules do to requests and to responses, in order.
struct Parts {
    handlers: Vec<(Phase, BoundHandler)>,
    filters: Vec<BoundFilter>,
}

fn parts_in_order(builder: &Builder) -> Parts {
    let modules = builder.order.modules;
    let index_of = |module: &'static Module| {
        let found = modules.iter().position(|candidate| std::ptr::eq(*candidate, module));
        found.expect("the order names only modules of its list")
    };
    let mut parts = Parts { handlers: Vec::new(), filters: Vec::new() };
    let order: &HttpOrder = builder.order.of().expect("whoever has the http block has its order");
    let part_of = |module: &Module| module.part::<HttpPart>().unwrap_or(&HttpPart::EMPTY);
    for (phase, of_phase) in order.phases {
        for module in *of_phase {
            let of_phase = part_of(module).handlers.iter().filter(|(own, _)| own == phase);
            let bind = |(_, handler): &(Phase, &'static dyn Handler)| BoundHandler {
                handler: *handler,
                module: index_of(module),
                kept_from: None,
            };
            parts.handlers.extend(of_phase.map(|row| (*phase, bind(row))));
        }
    }
    for module in order.filters {
        let bind = |filter: &&'static dyn Filter| BoundFilter { filter: *filter, module: index_of(module) };
        parts.filters.extend(part_of(module).filters.iter().map(bind));
    }
    parts
}

fn finish_scope(draft: ScopeDraft, confs: Confs, parts: &Parts) -> Scope {
    let conf_of = |index: usize| confs[index].as_deref().map_or(&() as &dyn std::any::Any, |conf| conf);
    let mut handlers: [Vec<BoundHandler>; crate::request::phases::PHASES] = Default::default();
    for (phase, bound) in &parts.handlers {
        if bound.handler.applies(conf_of(bound.module)) {
            handlers[*phase as usize].push(*bound);
        }
    }
    let applies = |bound: &&BoundFilter| bound.filter.applies(conf_of(bound.module));
    let filters = parts.filters.iter().filter(applies).copied().collect();
    let core = confs.iter().flatten().find(|conf| conf.is::<CoreSettings>());
    let core = core.and_then(|conf| Arc::clone(conf).downcast::<CoreSettings>().ok());
    let core = core.expect("the http core module is among the modules");
    let is_slashed = draft.kind == ScopeKind::Location
        && matches!(draft.shape, LocationShape::Exact | LocationShape::Prefix)
        && draft.name.len() > 1
        && draft.name.ends_with(b"/");
    let passes_on = handlers[Phase::Content as usize].iter().any(|bound| bound.handler.redirects_to_slash());
    Scope {
        redirects_to_slash: is_slashed && passes_on,
        kind: draft.kind,
        name: draft.name.as_slice().into(),
        error_log: ErrorLog::new(core.error_log.get().clone()),
        core,
        limit_except: draft.limit_except,
        confs: confs.into(),
        handlers,
        filters,
    }
}

const _: () = assert!(Phase::ALL.len() == crate::request::phases::PHASES);
