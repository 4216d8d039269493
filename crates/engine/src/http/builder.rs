//! Builds the http block: scopes, servers, locations, addresses, variables.
//!
//! While the text is walked, blocks only gather what they say. When all of it
//! is known, every scope is completed from its parent, and what the workers
//! need is put together. Then, at the very end, the sockets are opened.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bstr::{BString, ByteSlice};
use gale_config::{Diagnostic, Place, Span, Statement, Word};
use gale_protocol::http1::Method;

use super::addresses::{self, Address, AddressDraft, Listen, ListenPlace, PORT_DEFAULT, PORT_UNPRIVILEGED, Protocols};
use super::configuration::{
    BoundFilter, BoundHandler, HttpConfiguration, LimitExcept, Scope, ScopeId, ScopeKind, Server, ServerId,
    VirtualServers,
};
use super::filters::Filter;
use super::location::{Locations, Pattern};
use super::phases::{Handler, Phase};
use super::regex::Regex;
use super::server_name::{ServerName, ServerNames};
use super::settings::{Alias, CoreSettings};
use super::template::Template;
use super::variables::{VariableId, VariableTable};
use crate::configuration::{Builder, Level};
use crate::log::ErrorLog;
use crate::module::{Conf, ConfType, Directive, Module, SharedConf};
use crate::process::{Account, ListenAddress, ListenSpec, Resources};

/// The http block while it is being read.
#[derive(Default)]
pub struct HttpBuilder {
    /// The variables mentioned so far.
    pub variables: VariableTable,
    scopes: Vec<ScopeDraft>,
    servers: Vec<ServerDraft>,
    /// The regular expressions so far, by text and whether case matters not: many servers have the same ones.
    regexes: HashMap<(Box<[u8]>, bool), Regex>,
}

struct ScopeDraft {
    kind: ScopeKind,
    parent: Option<ScopeId>,
    server: Option<ServerId>,
    /// The location as written, for messages; empty for the others.
    name: BString,
    shape: LocationShape,
    /// The settings of the modules that are mentioned, until all are complete.
    confs: Vec<Option<Conf>>,
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

impl HttpBuilder {
    /// The settings of a scope, by module.
    pub fn confs(&mut self, scope: ScopeId) -> &mut Vec<Option<Conf>> {
        &mut self.scopes[scope.0 as usize].confs
    }

    fn add_scope(&mut self, draft: ScopeDraft) -> ScopeId {
        let id = ScopeId(u32::try_from(self.scopes.len()).expect("fewer scopes than 2^32"));
        self.scopes.push(draft);
        id
    }

    fn scope(&self, id: ScopeId) -> &ScopeDraft {
        &self.scopes[id.0 as usize]
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

    /// The settings of this type in a scope.
    pub fn conf_mut<C: 'static>(&mut self, scope: ScopeId) -> Option<&mut C> {
        self.confs(scope).iter_mut().flatten().find_map(|conf| conf.downcast_mut())
    }

    /// The variable of this name.
    pub fn variable(&mut self, name: &[u8], span: Option<Span>) -> VariableId {
        self.variables.mention(name, span)
    }

    /// Compiles a text with variables.
    pub fn template(&mut self, word: &Word) -> Result<Template, Diagnostic> {
        let span = word.span;
        Template::compile(&word.text, |name| self.variables.mention(name, Some(span)))
            .map_err(|message| Diagnostic::emerg(message).at(span))
    }

    /// Compiles a regular expression whose named groups become variables.
    pub fn regex(&mut self, word: &Word, expression: &[u8], caseless: bool) -> Result<Regex, Diagnostic> {
        let mut regex = match self.regexes.entry((expression.into(), caseless)) {
            Entry::Occupied(known) => known.get().clone(),
            Entry::Vacant(place) => {
                let compiled = Regex::compile(expression, caseless);
                place.insert(compiled.map_err(|error| Diagnostic::emerg(error).at(word.span))?).clone()
            }
        };
        regex.bind(|name| self.variables.stored(name, Some(word.span)));
        Ok(regex)
    }
}

/// `http { }`
pub fn http_block(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if builder.http.is_some() {
        return Err(statement.directive_error("is duplicate"));
    }
    let mut http = HttpBuilder::default();
    let scope = http.add_scope(ScopeDraft {
        kind: ScopeKind::Http,
        parent: None,
        server: None,
        name: BString::default(),
        shape: LocationShape::None,
        confs: builder.fresh_confs(),
        locations: Vec::new(),
        patterns: HashSet::new(),
        limit_except: None,
    });
    builder.http = Some(http);
    builder.walk(statement.body(), Place::HTTP, Level::Scope(scope));
    Ok(())
}

/// `server { }`
pub fn server_block(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let confs = builder.no_confs();
    let parent = current_scope(builder);
    let http = builder.http_mut();
    let server = ServerId(u32::try_from(http.servers.len()).expect("fewer servers than 2^32"));
    let scope = http.add_scope(ScopeDraft {
        kind: ScopeKind::Server,
        parent: Some(parent),
        server: Some(server),
        name: BString::default(),
        shape: LocationShape::None,
        confs,
        locations: Vec::new(),
        patterns: HashSet::new(),
        limit_except: None,
    });
    http.servers.push(ServerDraft { scope, span: statement.name.span, names: Vec::new(), listens: Vec::new() });
    builder.walk(statement.body(), Place::SERVER, Level::Scope(scope));
    Ok(())
}

/// `location [=|~|~*|^~] URI { }` and `location @NAME { }`
pub fn location_block(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let confs = builder.no_confs();
    let parent = current_scope(builder);
    let http = builder.http_mut();
    let (pattern, shape) = location_pattern(http, statement)?;
    let name = statement.args.last().map(|word| word.text.clone()).unwrap_or_default();
    check_nesting(http.scope(parent), &name, shape).map_err(|message| statement.error(message))?;
    let server = http.scope(parent).server;
    let scope = http.add_scope(ScopeDraft {
        kind: ScopeKind::Location,
        parent: Some(parent),
        server,
        name: stored_name(&pattern, &name),
        shape,
        confs,
        locations: Vec::new(),
        patterns: HashSet::new(),
        limit_except: None,
    });
    let parent = &mut http.scopes[parent.0 as usize];
    if let Pattern::Exact(text) | Pattern::Prefix { prefix: text, .. } | Pattern::Named(text) = &pattern
        && !parent.patterns.insert((shape, text.clone()))
    {
        let message = format!("duplicate location \"{}\"", stored_name(&pattern, &name));
        return Err(statement.error(message));
    }
    parent.locations.push((pattern, scope));
    builder.walk(statement.body(), Place::LOCATION, Level::Scope(scope));
    Ok(())
}

/// `limit_except METHOD … { }`: the block for every other method.
pub fn limit_except(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let location = current_scope(builder);
    if builder.http_mut().scope(location).limit_except.is_some() {
        return Err(statement.directive_error("is duplicate"));
    }
    let mut methods = statement.args.iter().map(limited_method).collect::<Result<Vec<Method>, _>>()?;
    if methods.contains(&Method::Get) {
        methods.push(Method::Head);
    }
    let scope = nameless_block(builder, statement, Place::LIMIT_EXCEPT);
    let block = LimitExcept { methods: methods.into(), scope };
    builder.http_mut().scopes[location.0 as usize].limit_except = Some(block);
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
pub fn nameless_block(builder: &mut Builder, statement: &Statement, place: Place) -> ScopeId {
    let confs = builder.no_confs();
    let parent = current_scope(builder);
    let http = builder.http_mut();
    let outer = http.scope(parent);
    let draft = ScopeDraft {
        kind: ScopeKind::Nameless,
        parent: Some(parent),
        server: outer.server,
        name: outer.name.clone(),
        shape: outer.shape,
        confs,
        locations: Vec::new(),
        patterns: HashSet::new(),
        limit_except: None,
    };
    let scope = http.add_scope(draft);
    builder.walk(statement.body(), place, Level::Scope(scope));
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
    let (listen, warnings) = Listen::parse(statement)?;
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
            word.text = super::worker::hostname().into();
        }
        let mut name = ServerName::parse(&word.text).map_err(|message| Diagnostic::emerg(message).at(word.span))?;
        if let ServerName::Regex(regex) = &mut name {
            regex.bind(|group| builder.http_mut().variables.stored(group, Some(word.span)));
        }
        current_server(builder).names.push((word, name));
    }
    Ok(())
}

fn current_scope(builder: &Builder) -> ScopeId {
    match builder.level {
        Level::Scope(scope) => scope,
        Level::Main => unreachable!("a directive of the http block outside of it"),
    }
}

fn current_server(builder: &mut Builder) -> &mut ServerDraft {
    let scope = current_scope(builder);
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
pub struct HttpDraft {
    configuration: HttpConfiguration,
    addresses: Vec<(AddressDraft, VirtualServers)>,
}

/// Completes every scope and puts the configuration together.
pub fn finish(builder: &mut Builder, resources: &mut dyn Resources) -> Result<HttpDraft, Diagnostic> {
    // The variables stay with the builder: defaults may mention some.
    let mut scopes = std::mem::take(&mut builder.http_mut().scopes);
    let mut servers = std::mem::take(&mut builder.http_mut().servers);
    let confs = complete_scopes(&mut scopes, builder)?;
    let addresses = gather_addresses(&mut servers, builder, resources)?;
    let mut variables = std::mem::take(&mut builder.http_mut().variables);
    let definitions = builder.order.modules.iter().flat_map(|module| module.variables);
    variables.resolve(definitions).map_err(|error| {
        let diagnostic = Diagnostic::emerg(error.message).at_opt(error.span);
        error.hint.into_iter().fold(diagnostic, Diagnostic::hint)
    })?;
    variables.keep_definitions(builder.order.modules.iter().flat_map(|module| module.variables));
    let servers = finish_servers(&mut scopes, servers);
    let scopes = finish_scopes(scopes, confs, builder);
    static GENERATIONS: AtomicU64 = AtomicU64::new(0);
    let generation = GENERATIONS.fetch_add(1, Ordering::Relaxed) + 1;
    let configuration = HttpConfiguration { scopes, servers, addresses: Vec::new(), variables, generation };
    Ok(HttpDraft { configuration, addresses })
}

impl HttpDraft {
    /// Makes sure of the directories and opens the sockets. `owner` is the user that
    /// the worker process runs as.
    pub fn open(self, resources: &mut dyn Resources, owner: Option<&Account>) -> Result<HttpConfiguration, Diagnostic> {
        let HttpDraft { mut configuration, addresses } = self;
        prepare_temp_paths(&configuration, resources, owner)?;
        let has_own_socket = |index: usize| {
            let (draft, _) = &addresses[index];
            draft.has_options
                || !addresses.iter().any(|(other, _)| addresses::covers(&other.spec.address, &draft.spec.address))
        };
        let own: Vec<usize> = (0..addresses.len()).filter(|&index| has_own_socket(index)).collect();
        let specs: Vec<ListenSpec> = own.iter().map(|&index| addresses[index].0.spec.clone()).collect();
        let listeners = resources.listeners(&specs).map_err(|error| Diagnostic::emerg(error.to_string()))?;
        let holder_of = |index: usize| match own.iter().position(|&candidate| candidate == index) {
            Some(place) => place,
            None => own
                .iter()
                .position(|&candidate| {
                    addresses::covers(&addresses[candidate].0.spec.address, &addresses[index].0.spec.address)
                })
                .expect("an address without a socket is covered by one that has"),
        };
        let holders: Vec<usize> = (0..addresses.len()).map(holder_of).collect();
        for (index, (draft, servers)) in addresses.into_iter().enumerate() {
            let holder = holders[index];
            configuration.addresses.push(Address {
                address: draft.spec.address,
                listener: Arc::clone(&listeners[holder]),
                servers,
                proxy_protocol: draft.proxy_protocol,
                shares_socket: holders.iter().filter(|&&other| other == holder).count() > 1,
            });
        }
        Ok(configuration)
    }
}

/// The directories for bodies have to be there before they are needed. The default
/// one may be missing where nobody stores a body.
fn prepare_temp_paths(
    http: &HttpConfiguration,
    resources: &mut dyn Resources,
    owner: Option<&Account>,
) -> Result<(), Diagnostic> {
    let mut prepared: Vec<&std::path::Path> = Vec::new();
    for scope in &http.scopes {
        let setting = &scope.core.client_body_temp_path;
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

/// The settings of every module in one scope.
type Confs = Vec<Option<SharedConf>>;

/// Parents first: what a scope did not say it takes from its parent, and the
/// http block from the defaults.
fn complete_scopes(drafts: &mut [ScopeDraft], builder: &mut Builder) -> Result<Vec<Confs>, Diagnostic> {
    let mut rows: Vec<Vec<&'static Directive>> = vec![Vec::new(); builder.order.modules.len()];
    for row in builder.tables().iter() {
        if row.directive.place.overlaps(Place::ANYWHERE.or(Place::IF_IN_LOCATION)) {
            rows[row.owner].push(row.directive);
        }
    }
    let scopes = Vec::with_capacity(drafts.len());
    let mut completion = Completion { builder, rows, scopes, of_silent: vec![Confs::new(); drafts.len()] };
    for draft in drafts {
        completion.complete_scope(std::mem::take(&mut draft.confs), draft.parent)?;
    }
    Ok(completion.scopes)
}

/// Completes scope after scope.
struct Completion<'b> {
    builder: &'b mut Builder,
    /// Of each module, the directives that a scope may say.
    rows: Vec<Vec<&'static Directive>>,
    /// The scopes that are complete.
    scopes: Vec<Confs>,
    /// By parent, what those of its children share that say nothing of a module: it follows from the parent alone.
    of_silent: Vec<Confs>,
}

impl Completion<'_> {
    fn complete_scope(&mut self, own: Vec<Option<Conf>>, parent: Option<ScopeId>) -> Result<(), Diagnostic> {
        let modules = self.builder.order.modules;
        let mut confs = Confs::with_capacity(modules.len());
        for ((owner, own), module) in own.into_iter().enumerate().zip(modules) {
            let conf = module.conf.as_ref().map(|conf_type| match (own, parent) {
                (None, Some(parent)) => self.conf_of_silent(owner, conf_type, parent),
                (own, parent) => self.complete_conf(own.unwrap_or_else(conf_type.make), owner, conf_type, parent),
            });
            confs.push(conf.transpose()?);
        }
        self.scopes.push(confs);
        Ok(())
    }

    /// The settings of a module in a child of `parent` that says nothing of it.
    fn conf_of_silent(
        &mut self,
        owner: usize,
        conf_type: &ConfType,
        parent: ScopeId,
    ) -> Result<SharedConf, Diagnostic> {
        let place = parent.0 as usize;
        if let Some(Some(known)) = self.of_silent[place].get(owner) {
            return Ok(Arc::clone(known));
        }
        let conf = self.complete_conf((conf_type.make)(), owner, conf_type, Some(parent))?;
        self.of_silent[place].resize(self.rows.len(), None);
        self.of_silent[place][owner] = Some(Arc::clone(&conf));
        Ok(conf)
    }

    fn complete_conf(
        &mut self,
        mut conf: Conf,
        owner: usize,
        conf_type: &ConfType,
        parent: Option<ScopeId>,
    ) -> Result<SharedConf, Diagnostic> {
        let outer = parent.and_then(|parent| self.scopes[parent.0 as usize][owner].as_deref());
        let outer = outer.map(|conf| conf as &dyn std::any::Any);
        for row in &self.rows[owner] {
            if let Some(outer) = outer {
                row.store.inherit(conf.as_mut(), outer);
            }
            row.store.finish(conf.as_mut(), self.builder, row.name, row.default);
        }
        (conf_type.merge)(conf.as_mut(), outer, self.builder)?;
        Ok(conf.into())
    }
}

fn gather_addresses(
    servers: &mut [ServerDraft],
    builder: &mut Builder,
    resources: &mut dyn Resources,
) -> Result<Vec<(AddressDraft, VirtualServers)>, Diagnostic> {
    let mut drafts: Vec<AddressDraft> = Vec::new();
    for (index, server) in servers.iter_mut().enumerate() {
        let id = ServerId(u32::try_from(index).expect("fewer servers than 2^32"));
        if server.listens.is_empty() {
            let port = if builder.is_privileged { PORT_DEFAULT } else { PORT_UNPRIVILEGED };
            server.listens.push(Listen::implicit(port, server.span));
        }
        for listen in &server.listens {
            for address in resolve(listen, resources)? {
                add_listen(&mut drafts, id, listen, address, builder)?;
            }
        }
    }
    let mut addresses = Vec::with_capacity(drafts.len());
    for mut draft in drafts {
        draft.spec.reuseport = draft.spec.reuseport.min(builder.workers());
        let names = names_of(&draft, servers, builder);
        let default = draft.default.map_or(draft.servers[0], |(server, _)| server);
        addresses.push((draft, VirtualServers { default, names }));
    }
    Ok(addresses)
}

fn resolve(listen: &Listen, resources: &mut dyn Resources) -> Result<Vec<ListenAddress>, Diagnostic> {
    let ips = match &listen.place {
        ListenPlace::Address(ListenAddress::Inet(address)) => vec![address.ip()],
        ListenPlace::Address(unix) => return Ok(vec![unix.clone()]),
        ListenPlace::Host(host, _) => {
            resources.resolve(host).ok().filter(|found| !found.is_empty()).ok_or_else(|| {
                let message = format!("host not found in \"{}\" of the \"listen\" directive", listen.text);
                Diagnostic::emerg(message).at(listen.span)
            })?
        }
    };
    let ports = listen.place.port()..=listen.last_port;
    Ok(ports.flat_map(|port| ips.iter().map(move |ip| ListenAddress::Inet((*ip, port).into()))).collect())
}

fn add_listen(
    drafts: &mut Vec<AddressDraft>,
    server: ServerId,
    listen: &Listen,
    address: ListenAddress,
    builder: &mut Builder,
) -> Result<(), Diagnostic> {
    let spec = ListenSpec { address, ..listen.spec.clone() };
    let Some(draft) = drafts.iter_mut().find(|draft| draft.spec.address == spec.address) else {
        drafts.push(AddressDraft {
            spec,
            has_options: listen.has_options,
            proxy_protocol: listen.proxy_protocol,
            protocols: Protocols::default(),
            options_span: listen.has_options.then_some(listen.span),
            default: listen.is_default.then_some((server, listen.span)),
            servers: vec![server],
        });
        return Ok(());
    };
    let (wanted, before) = (listen.proxy_protocol, draft.proxy_protocol);
    let is_redefined = draft.protocols.add(wanted, before, listen.has_options, draft.has_options);
    draft.proxy_protocol |= wanted;
    if listen.has_options {
        if let Some(first) = draft.options_span {
            if draft.spec != spec {
                let message = format!("duplicate listen options for {}", spec.address);
                return Err(Diagnostic::emerg(message).at(listen.span).related("first given", first));
            }
        } else {
            draft.spec = spec.clone();
            draft.has_options = true;
            draft.options_span = Some(listen.span);
        }
    }
    if listen.is_default {
        if let Some((_, first)) = draft.default {
            let message = format!("a duplicate default server for {}", spec.address);
            return Err(Diagnostic::emerg(message).at(listen.span).related("first named", first));
        }
        draft.default = Some((server, listen.span));
    }
    if is_redefined {
        let message = format!("protocol options redefined for {}", draft.spec.address);
        builder.note([Diagnostic::warn(message).at(listen.span)]);
    }
    draft.servers.push(server);
    Ok(())
}

/// The names of all servers of one address. A name that two of them claim goes
/// to the first, with nginx's warning.
fn names_of(draft: &AddressDraft, servers: &mut [ServerDraft], builder: &mut Builder) -> ServerNames {
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

fn finish_servers(scopes: &mut [ScopeDraft], servers: Vec<ServerDraft>) -> Vec<Server> {
    let finish = |draft: ServerDraft| {
        let mut named = HashMap::new();
        let locations = take_locations(scopes, draft.scope, &mut named);
        let name = draft.names.first().map_or(Box::default(), |(word, _)| {
            // `.example.com` is called example.com.
            let text: &[u8] = &word.text;
            text.strip_prefix(b".").unwrap_or(text).into()
        });
        Server { scope: draft.scope, name, locations, named }
    };
    servers.into_iter().map(finish).collect()
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

fn finish_scopes(drafts: Vec<ScopeDraft>, confs: Vec<Confs>, builder: &Builder) -> Vec<Scope> {
    let parts = parts_in_order(builder);
    let mut scopes: Vec<Scope> = Vec::with_capacity(drafts.len());
    for (draft, confs) in drafts.into_iter().zip(confs) {
        let location = draft.parent.filter(|_| draft.kind == ScopeKind::Nameless);
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
    for (phase, order) in builder.order.phases {
        for module in *order {
            let of_phase = module.handlers.iter().filter(|(own, _)| own == phase);
            let bind = |(_, handler): &(Phase, &'static dyn Handler)| BoundHandler {
                handler: *handler,
                module: index_of(module),
                kept_from: None,
            };
            parts.handlers.extend(of_phase.map(|row| (*phase, bind(row))));
        }
    }
    for module in builder.order.filters {
        let bind = |filter: &&'static dyn Filter| BoundFilter { filter: *filter, module: index_of(module) };
        parts.filters.extend(module.filters.iter().map(bind));
    }
    parts
}

fn finish_scope(draft: ScopeDraft, confs: Confs, parts: &Parts) -> Scope {
    let conf_of = |index: usize| confs[index].as_deref().map_or(&() as &dyn std::any::Any, |conf| conf);
    let mut handlers: [Vec<BoundHandler>; super::phases::PHASES] = Default::default();
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
    Scope {
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

const _: () = assert!(Phase::ALL.len() == super::phases::PHASES);
