//! Builds the http block: scopes, servers, locations, addresses, variables.
//!
//! While the text is walked, blocks only collect their directives. Then every scope is completed from its parent, and
//! the tables for the workers are built. The sockets are opened last.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use bstr::{BString, ByteSlice};
use gale_base::os_error::OsErrorText;
use gale_config::{Contexts, Diagnostic, Setting, Span, Statement, Word};
use gale_engine::configuration::{BlockBuilder, BlockDraft, Builder, Confs, ScopeId, ScopeRef, ScopeTree, ServerId};
use gale_engine::listen::{self, Listen, ListenDefaults, ListenPlan};
use gale_engine::module::{Conf, Module};
use gale_engine::protocol::Protocol;
use gale_engine::server_name::ServerName;
use gale_engine::variables::{HasVariables, VariablesDraft};
use gale_engine::virtual_servers::{
    CertificateNames, ServerDraft, ServerTls, TlsBlock, TlsClientDraft, VirtualServers, certificate_names,
    gather_addresses, parse_names, tls_servers,
};
use gale_log::ErrorLog;
use gale_process::{Account, ListenSpec, ListenerHandle, Resources};
use gale_protocol::request::{Method, Scheme};
use gale_spool::TempPath;
use gale_tls::managed::ManagedCertificate;
use gale_tls::offered;
use gale_tls::staple::Lookup;
use gale_upstream::{HasUpstreams, Metric, ResolverDefaults, Upstreams};
use gale_worker::traffic::ServerZone;

use crate::configuration::http2::{Http2Address, Http2Settings};
use crate::configuration::location::{Locations, Pattern};
use crate::configuration::settings::{Alias, CoreSettings};
use crate::configuration::{
    Address, BoundFilter, BoundHandler, ConfIndexes, HttpConfiguration, LimitExcept, Scope, ScopeKind, Server,
};
use crate::module::{HttpOrder, HttpPart};
use crate::request::Request;
use crate::request::filters::Filter;
use crate::request::phases::{Handler, Phase};
use crate::variables::VariableId;
use crate::variables::regex::Regex;
use crate::variables::template::Template;

/// Port of a `listen` that names none.
const PORT_DEFAULT: u16 = Scheme::Http.default_port();

/// Port of a server without `listen` when the program does not run as root.
const PORT_UNPRIVILEGED: u16 = 8000;

/// `http2_chunk_size` if no module sets it.
const HTTP2_CHUNK_DEFAULT: u64 = 8 * 1024;

/// HTTP clients speak first, so the kernel reports a connection only when its request has arrived: an accept, a wait
/// and a receive become one step.
const DEFAULTS: ListenDefaults = ListenDefaults { port: PORT_DEFAULT, deferred: true, datagrams: false };

/// The http block while it is being read.
#[derive(Default)]
pub struct HttpBuilder {
    /// Variables mentioned so far, with the places that refer to them.
    pub variables: VariablesDraft<Request>,
    /// Groups of servers that are declared or referred to so far.
    pub upstreams: Upstreams<Request>,
    /// Directories for temporary files of modules.
    pub temp_paths: Vec<Setting<TempPath>>,
    /// Cache directories with their zones: a directory may belong to one zone only.
    pub cache_directories: Vec<(std::path::PathBuf, bstr::BString)>,
    /// TLS settings for connections to upstream servers.
    pub tls_clients: Vec<TlsClientDraft>,
    /// Key files of modules.
    pub secrets: Vec<SecretDraft>,
    /// Servers that allow CONNECT.
    connect_servers: Vec<ServerId>,
    tree: ScopeTree,
    /// The remaining data of each scope.
    scopes: Vec<ScopeDraft>,
    servers: Vec<ServerDraft>,
}

/// A file that only the master may be able to read, and that has not been read yet.
pub struct SecretDraft {
    /// The file.
    pub path: PathBuf,
    /// The place that names it.
    pub span: Span,
    /// Receives its contents.
    pub contents: Arc<OnceLock<Vec<u8>>>,
}

struct ScopeDraft {
    kind: ScopeKind,
    server: Option<ServerId>,
    /// The location as written, for messages; empty for other scopes.
    name: BString,
    shape: LocationShape,
    /// Locations nested here, in order.
    locations: Vec<(Pattern, ScopeId)>,
    /// Patterns of those locations, except regular expressions, to reject duplicates.
    patterns: HashSet<(LocationShape, Box<[u8]>)>,
    limit_except: Option<LimitExcept>,
}

/// The kind of location, which decides what may be nested in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum LocationShape {
    None,
    Exact,
    Prefix,
    Regex,
    Named,
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
    const TIMES: &'static [(&'static str, Metric)] = &[("header", Metric::Header), ("last_byte", Metric::LastByte)];

    fn upstreams(&mut self) -> &mut Upstreams<Request> {
        &mut self.upstreams
    }
}

/// Access to the http block, for directives inside of it.
pub trait InHttp {
    /// The http block.
    fn http_mut(&mut self) -> &mut HttpBuilder;

    /// The scope that contains the directive.
    fn http_scope(&self) -> ScopeId;
    /// Allows CONNECT in the current server.
    fn allow_connect(&mut self);
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

    fn allow_connect(&mut self) {
        let scope = self.http_scope();
        let http = self.http_mut();
        let server = http.scope(scope).server.expect("inside of a server block");
        http.connect_servers.push(server);
    }
}

impl ScopeDraft {
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

    /// The part that an `alias` in this scope replaces; `None` outside of a location.
    pub fn alias_of(&self, scope: ScopeId) -> Option<Alias> {
        let draft = self.scope(scope);
        match draft.shape {
            LocationShape::Exact | LocationShape::Prefix => Some(Alias::Prefix(draft.name.as_slice().into())),
            LocationShape::Regex => Some(Alias::Whole),
            LocationShape::None | LocationShape::Named => None,
        }
    }

    /// The part of a URI that the path of `proxy_pass` replaces in this scope. `None` in a location given by a regular
    /// expression, in a named location, and in a block without a name.
    pub fn replaceable_part(&self, scope: ScopeId) -> Option<Box<[u8]>> {
        let draft = self.scope(scope);
        let is_plain = matches!(draft.shape, LocationShape::Exact | LocationShape::Prefix);
        (draft.kind == ScopeKind::Location && is_plain).then(|| draft.name.as_slice().into())
    }

    /// The name of a location that matches all paths below its name.
    pub fn location_prefix(&self, scope: ScopeId) -> Option<&[u8]> {
        let draft = self.scope(scope);
        let is_prefix = draft.kind == ScopeKind::Location && matches!(draft.shape, LocationShape::Prefix);
        is_prefix.then_some(draft.name.as_slice())
    }

    /// The server that contains the scope, if any.
    pub fn server_of(&self, scope: ScopeId) -> Option<ServerId> {
        self.scope(scope).server
    }

    /// The names of a server. Complete only once the settings are being completed.
    pub fn names_of(&self, server: ServerId) -> impl Iterator<Item = &(Word, ServerName)> {
        self.servers[server.0 as usize].names.iter()
    }

    /// Makes a server use a certificate that a service obtains.
    pub fn set_managed_certificate(&mut self, server: ServerId, certificate: Arc<ManagedCertificate>) {
        self.servers[server.0 as usize].managed = Some(certificate);
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

/// Adds a scope inside of the current one.
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
    builder.http_mut().servers.push(ServerDraft::new(scope, statement.name.span));
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
    // Of named locations with the same name the first one is used, as in nginx.
    if let Pattern::Exact(text) | Pattern::Prefix { prefix: text, .. } = &pattern
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

/// `limit_except METHOD … { }`: the block applies to all other methods.
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

/// Adds a block without a name, `if` or `limit_except`, which a request may enter from the block around it. Returns its
/// scope.
///
/// The block inherits all settings except those of a location alone. It keeps the location's content handler unless it
/// has one of its own.
pub fn nameless_block(builder: &mut Builder, statement: &Statement, place: Contexts) -> ScopeId {
    let outer = builder.http_scope();
    let outer = builder.http_mut().scope(outer);
    let (name, shape) = (outer.name.clone(), outer.shape);
    let draft = ScopeDraft { name, shape, ..ScopeDraft::new(ScopeKind::Nameless, outer.server) };
    let scope = add_scope(builder, draft);
    builder.walk(statement.body(), place, ScopeRef::Block(scope));
    scope
}

/// The location's name without a modifier that is written together with it.
fn stored_name(pattern: &Pattern, written: &BString) -> BString {
    match pattern {
        Pattern::Exact(uri) => BString::from(&**uri),
        Pattern::Prefix { prefix, .. } => BString::from(&**prefix),
        Pattern::Named(_) | Pattern::Regex(_) => written.clone(),
    }
}

/// `listen …`
pub fn listen(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let mut statement = statement.clone();
    let http2 = statement.args.iter().position(|word| word.text == "http2").filter(|&place| place > 0);
    let http2 = http2.map(|place| statement.args.remove(place));
    let (mut listen, warnings) = Listen::parse(&statement, DEFAULTS)?;
    listen.http2 = http2.is_some();
    builder.note(warnings);
    if let Some(word) = http2 {
        let message = "the \"listen ... http2\" directive is deprecated, use the \"http2\" directive instead";
        builder.note([Diagnostic::warn(message).at(word.span)]);
    }
    current_server(builder).add_listen(listen, &statement)
}

/// `status_zone ZONE` of a server. Returns false if the server has one already.
pub fn set_server_zone(builder: &mut Builder, zone: Arc<ServerZone>) -> bool {
    current_server(builder).zone.replace(zone).is_none()
}

/// `server_name NAME …`
pub fn server_name(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let names = parse_names::<Request>(builder, statement)?;
    current_server(builder).names.extend(names);
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

/// nginx's rules for nested locations.
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
    /// Virtual servers, by address.
    servers: Vec<VirtualServers>,
    plan: ListenPlan,
    /// Directories for temporary files of modules, besides those for request bodies.
    temp_paths: Vec<Setting<TempPath>>,
}

/// Completes every scope and puts the configuration together.
fn complete(builder: &mut Builder, resources: &mut dyn Resources) -> Result<Box<dyn BlockDraft>, Diagnostic> {
    // The variables stay with the builder: defaults may mention some.
    let mut tree = std::mem::take(&mut builder.http_mut().tree);
    let mut scopes = std::mem::take(&mut builder.http_mut().scopes);
    let has_part = |module: &Module| module.part::<HttpPart>().is_some();
    let confs = tree.complete(builder, Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION), has_part)?;
    let servers = std::mem::take(&mut builder.http_mut().servers);
    let port = if builder.is_privileged { PORT_DEFAULT } else { PORT_UNPRIVILEGED };
    let implicit = |server: &ServerDraft| Some(Listen::implicit(port, server.span, DEFAULTS));
    let (addresses, virtual_servers) = gather_addresses(&servers, implicit, builder, resources)?;
    let resolver = resolver_defaults(&confs);
    let upstreams = Upstreams::complete(&resolver, builder, resources)?;
    let certificate_names = certificate_names(&servers, &confs, builder)?;
    let variables = std::mem::take(&mut builder.http_mut().variables);
    let modules = builder.order.modules.iter();
    let definitions = modules.filter_map(|module| module.part::<HttpPart>()).flat_map(|part| part.variables);
    let variables = variables.complete(definitions)?;
    let tls = {
        let block = TlsBlock { name: "http", lookup: &lookup };
        tls_servers(&servers, &confs, &addresses, &virtual_servers, block, builder, resources)?
    };
    let tls_clients = std::mem::take(&mut builder.http_mut().tls_clients);
    builder.load_tls_clients(tls_clients, resources)?;
    for secret in std::mem::take(&mut builder.http_mut().secrets) {
        let contents = resources.secret(&secret.path).map_err(|error| {
            let message = format!("open() \"{}\" failed {}", secret.path.display(), OsErrorText(&error));
            Diagnostic::emerg(message).at(secret.span)
        })?;
        secret.contents.get_or_init(|| contents);
    }
    let mut servers = finish_servers(&mut scopes, servers, tls, &confs, certificate_names);
    for server in &builder.http_mut().connect_servers {
        servers[server.0 as usize].allows_connect = true;
    }
    let scopes = finish_scopes(scopes, confs, &tree, builder);
    static GENERATIONS: AtomicU64 = AtomicU64::new(0);
    let generation = GENERATIONS.fetch_add(1, Ordering::Relaxed) + 1;
    let speaks_tls = addresses.iter().any(|address| address.ssl);
    let keeps_client_hello = speaks_tls && offered::VARIABLES.iter().any(|name| variables.mentions(name));
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
        keeps_client_hello,
        generation,
    };
    let temp_paths = std::mem::take(&mut builder.http_mut().temp_paths);
    note_reach(&configuration.scopes, &temp_paths, builder);
    let plan = ListenPlan::new(addresses);
    Ok(Box::new(HttpDraft { configuration, servers: virtual_servers, plan, temp_paths }))
}

/// Notes the files that requests reach, scope by scope.
fn note_reach(scopes: &[Scope], temp_paths: &[Setting<TempPath>], builder: &mut Builder) {
    let of_bodies = scopes.iter().map(|scope| &scope.core.client_body_temp_path);
    of_bodies.chain(temp_paths).for_each(|setting| builder.reach.keeps_in(&setting.get().path));
    for scope in scopes {
        let root = scope.core.root.get();
        let directive = if root.alias.is_some() { "alias" } else { "root" };
        builder.reach.reads(root.known_path(), directive);
    }
    let modules = builder.order.modules.iter().enumerate();
    let notes = modules.filter_map(|(index, module)| Some((index, module.part::<HttpPart>()?.reach?)));
    for (index, note) in notes {
        for scope in scopes {
            note(scope.conf(index), scope, &mut builder.reach);
        }
    }
}

/// The settings of this type.
fn conf<C: 'static>(confs: &Confs) -> Option<&C> {
    confs.iter().flatten().find_map(|conf| conf.downcast_ref())
}

/// The resolver settings of the http block itself.
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
        let finish = |(listening, servers): (listen::Address, VirtualServers)| {
            let scope = configuration.scope(configuration.server(servers.default).scope);
            let settings = scope.conf_of::<Http2Settings>();
            let http2 = settings.map(|settings| Http2Address::of(&scope.core, settings)).unwrap_or_default();
            Address { listening, servers, http2 }
        };
        let addresses = addresses.map(finish).collect();
        configuration.addresses = addresses;
        Arc::new(configuration)
    }
}

/// Directories for temporary files must exist before they are needed. A default one may be missing if no location
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
            // A default directory that the package did not create.
            let _ = resources.directory(parent, None);
        }
        match resources.directory(path, owner) {
            Err(error) if setting.span().is_some() => return Err(setting.error(error.to_string())),
            _ => {}
        }
    }
    Ok(())
}

/// The resolver of a scope, and its timeout.
fn lookup(confs: &Confs) -> Lookup {
    let core = confs.iter().flatten().find_map(|conf| conf.downcast_ref::<CoreSettings>())?;
    Some((core.resolver.get_opt().cloned()?, *core.resolver_timeout.get()))
}

fn finish_servers(
    scopes: &mut [ScopeDraft],
    servers: Vec<ServerDraft>,
    tls: Vec<ServerTls>,
    confs: &[Confs],
    certificate_names: Vec<CertificateNames<Request>>,
) -> Vec<Server> {
    type Parts = ((ServerDraft, ServerTls), CertificateNames<Request>);
    let finish = |((draft, (tls, verify_client)), certificate_names): Parts| {
        let mut named = HashMap::new();
        let locations = take_locations(scopes, draft.scope, &mut named);
        let http2 = conf::<Http2Settings>(&confs[draft.scope.0 as usize]).is_some_and(|conf| *conf.enabled.get());
        Server {
            scope: draft.scope,
            name: draft.name(),
            locations,
            named,
            tls,
            verify_client,
            allows_connect: false,
            http2,
            certificate_names,
            zone: draft.zone,
        }
    };
    servers.into_iter().zip(tls).zip(certificate_names).map(finish).collect()
}

fn take_locations(scopes: &mut [ScopeDraft], scope: ScopeId, named: &mut HashMap<Box<[u8]>, ScopeId>) -> Locations {
    let mut locations = Locations::default();
    for (pattern, child) in std::mem::take(&mut scopes[scope.0 as usize].locations) {
        let nested = take_locations(scopes, child, named);
        if let Pattern::Named(name) = &pattern {
            named.entry(name.clone()).or_insert(child);
        }
        locations.insert(pattern, child, nested);
    }
    locations
}

fn finish_scopes(drafts: Vec<ScopeDraft>, confs: Vec<Confs>, tree: &ScopeTree, builder: &Builder) -> Vec<Scope> {
    let parts = parts_in_order(builder);
    let conf_indexes = Arc::new(ConfIndexes::of(confs.first().map(Vec::as_slice).unwrap_or_default()));
    let mut scopes: Vec<Scope> = Vec::with_capacity(drafts.len());
    for (index, (draft, confs)) in (0..).zip(drafts.into_iter().zip(confs)) {
        let location = tree.parent(ScopeId(index)).filter(|_| draft.kind == ScopeKind::Nameless);
        let mut scope = finish_scope(draft, confs, &parts, &conf_indexes);
        if let Some(location) = location {
            keep_content(&mut scope, &scopes[location.0 as usize], location);
        }
        scopes.push(scope);
    }
    scopes
}

/// A block without a name keeps the content handlers of the location around it, unless it has a different one.
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

/// Handlers and filters of all modules, in order.
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
    let order: &HttpOrder = builder.order.of().expect("the order comes with the http block");
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

fn finish_scope(draft: ScopeDraft, confs: Confs, parts: &Parts, conf_indexes: &Arc<ConfIndexes>) -> Scope {
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
    let http2_chunk_size = conf::<Http2Settings>(&confs).map_or(HTTP2_CHUNK_DEFAULT, |conf| *conf.chunk_size.get());
    let is_slashed = draft.kind == ScopeKind::Location
        && matches!(draft.shape, LocationShape::Exact | LocationShape::Prefix)
        && draft.name.len() > 1
        && draft.name.ends_with(b"/");
    let passes_on = handlers[Phase::Content as usize].iter().any(|bound| bound.handler.redirects_to_slash());
    Scope {
        http2_chunk_size: usize::try_from(http2_chunk_size).unwrap_or(usize::MAX),
        redirects_to_slash: is_slashed && passes_on,
        kind: draft.kind,
        name: draft.name.as_slice().into(),
        error_log: ErrorLog::new(core.error_log.get().clone()),
        core,
        limit_except: draft.limit_except,
        confs: confs.into(),
        conf_indexes: Arc::clone(conf_indexes),
        handlers,
        filters,
    }
}

const _: () = assert!(Phase::ALL.len() == crate::request::phases::PHASES);
