//! Builder of a configuration: walks the statements, passes each to its directive's row, stores the settings of each
//! block, and assembles the result.
//!
//! It continues after an error, so that one run reports all of them. Nothing is opened before the whole text was
//! checked.

use std::any::{Any, TypeId};
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use gale_config::server_address::HostAddresses;
use gale_config::{Contexts, Diagnostic, Diagnostics, Reporter, Setting, Span, Statement, Tables, Word};
use gale_log::{DeferredLog, DeferredSyslog, ErrorLog, SyslogServer, SyslogSettings, Writers};
use gale_process::{
    Account, BuildRequest, DataMapping, ListenSpec, ProcessSettings, ResourceError, Resources, SERIES_MAX,
};
use gale_runtime::DriverChoice;
use gale_tls::syslog_tls;
use gale_worker::service::{ConfiguredService, ServiceSpec};

use super::blocks::{BlockBuilder, BlockDraft, Complete, OpenBlock};
use super::data_files::DataFiles;
use super::hosts::Hosts;
use super::module::{Conf, Module, Order};
use super::protocol::Protocol;
use super::reach::Reach;
use super::scopes::ScopeId;
use super::zones::{ZoneRef, ZoneSize, Zones};
use super::{Configuration, MainSettings, ThreadPoolSettings, ThreadPools};
use crate::nginx_names;

/// Scope that settings are written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScopeRef {
    /// Outside of all blocks, or in `events`.
    Main,
    /// A scope of the current block.
    Block(ScopeId),
}

/// The `events` block.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs, reason = "the fields are nginx's directives")]
pub struct EventsSettings {
    pub worker_connections: Setting<usize>,
    /// `use`
    pub driver: Setting<DriverChoice>,
    pub multi_accept: Setting<bool>,
    pub accept_mutex: Setting<bool>,
    pub accept_mutex_delay: Setting<Duration>,
}

struct LogRequest {
    span: Option<Span>,
    log: DeferredLog,
}

/// State while a configuration is built; directives are applied to it.
pub struct Builder {
    /// Errors, warnings and notices so far.
    pub diagnostics: Diagnostics,
    /// `true` if there is an `events` block.
    pub has_events: bool,
    /// Scope that settings are written to.
    pub scope: ScopeRef,
    /// Kind of the current block.
    pub context: Contexts,
    /// Base of relative paths (`-p`).
    pub prefix: PathBuf,
    /// Base of relative paths of configuration files.
    pub configuration_directory: PathBuf,
    /// Name under which the program was started: `gale` or `nginx`.
    pub program: String,
    /// `true` if the configuration is built for root; decides the default port.
    pub is_privileged: bool,
    /// `true` for a test (`-t`), whose output is read by a person.
    pub is_test: bool,
    /// Error log given with `-e`.
    pub error_log_path: Option<PathBuf>,
    /// `true` if an `error_log` of any block is standard error.
    pub logs_to_stderr: bool,
    /// `true` if connections to servers use addresses that this machine does not have (`proxy_bind … transparent`).
    /// Workers then keep CAP_NET_RAW.
    pub binds_transparently: bool,
    /// Files and ports that the worker process needs.
    pub reach: Reach,
    /// Lifetimes of TLS sessions in tickets, in seconds.
    pub ticket_lifetimes: BTreeSet<u32>,
    /// All modules, by index.
    pub order: &'static Order,

    tables: Rc<Tables<Builder>>,
    /// Blocks of protocols, in the order of the text; the last one is the current one.
    blocks: Vec<OpenBlock>,
    main_confs: Vec<Option<Conf>>,
    /// In the order of opening.
    logs: Vec<LogRequest>,
    logs_by_path: HashMap<PathBuf, DeferredLog>,
    syslogs: Vec<(Span, DeferredSyslog)>,
    needed_pools: Vec<(String, Span)>,
    pub(super) zones: Zones,
    services: Vec<(Span, ServiceSpec)>,
    hosts: Hosts,
    data_files: DataFiles,
}

impl Reporter for Builder {
    fn report(&mut self, diagnostic: Diagnostic) {
        self.diagnostics.report(diagnostic);
    }
}

/// Directive tables of all modules, by index of the module.
pub fn tables(order: &'static Order) -> Tables<Builder> {
    let rows = order.modules.iter().enumerate().map(|(index, module)| (index, module.directives));
    Tables::new(rows, nginx_names::directives())
}

impl Builder {
    /// Creates an empty builder.
    pub fn new(order: &'static Order, request: &BuildRequest) -> Builder {
        Builder {
            diagnostics: Diagnostics::new(),
            has_events: false,
            scope: ScopeRef::Main,
            context: Contexts::MAIN,
            prefix: request.prefix.clone(),
            configuration_directory: request.configuration_path.parent().unwrap_or(Path::new("/")).to_owned(),
            program: request.program.clone(),
            is_privileged: request.privileged,
            is_test: request.test,
            error_log_path: request.error_log_path.clone(),
            logs_to_stderr: false,
            binds_transparently: false,
            reach: Reach::default(),
            ticket_lifetimes: BTreeSet::new(),
            order,
            tables: Rc::new(tables(order)),
            blocks: Vec::new(),
            main_confs: make_confs(order.modules),
            logs: Vec::new(),
            logs_by_path: HashMap::new(),
            syslogs: Vec::new(),
            needed_pools: Vec::new(),
            zones: Zones::default(),
            services: Vec::new(),
            hosts: Hosts::default(),
            data_files: DataFiles::default(),
        }
    }

    /// Adds diagnostics from elsewhere.
    pub fn note(&mut self, diagnostics: impl IntoIterator<Item = Diagnostic>) {
        diagnostics.into_iter().for_each(|diagnostic| self.diagnostics.report(diagnostic));
    }

    /// Empty settings of all modules.
    pub fn fresh_confs(&self) -> Vec<Option<Conf>> {
        make_confs(self.order.modules)
    }

    /// Slots for the settings of all modules, which are created when a directive writes to them.
    pub fn no_confs(&self) -> Vec<Option<Conf>> {
        self.order.modules.iter().map(|_| None).collect()
    }

    /// Directive tables of all modules.
    pub fn tables(&self) -> Rc<Tables<Builder>> {
        Rc::clone(&self.tables)
    }

    /// Applies all statements of a block; an error is noted, and the walk continues.
    pub fn walk(&mut self, statements: &[Statement], context: Contexts, scope: ScopeRef) {
        let outer = std::mem::replace(&mut self.scope, scope);
        let outer_context = std::mem::replace(&mut self.context, context);
        let tables = self.tables();
        for statement in statements {
            let applied = tables.find(statement, context).and_then(|found| {
                let store = found.directive.store;
                if store.conf_type() == TypeId::of::<()>() {
                    return store.apply(&mut (), self, statement);
                }
                // Moved out of the builder, so that the row can use the builder as well.
                let conf = self.confs(scope)[found.owner].take();
                let mut conf = conf.unwrap_or_else(|| self.make_conf(found.owner));
                let applied = store.apply(conf.as_mut(), self, statement);
                self.confs(scope)[found.owner] = Some(conf);
                applied
            });
            if let Err(error) = applied {
                self.diagnostics.report(tables.explain(statement, error));
            }
        }
        self.scope = outer;
        self.context = outer_context;
    }

    fn make_conf(&self, owner: usize) -> Conf {
        (self.order.modules[owner].conf.expect("a module with such rows has settings").make)()
    }

    fn confs(&mut self, scope: ScopeRef) -> &mut Vec<Option<Conf>> {
        match scope {
            ScopeRef::Main => &mut self.main_confs,
            ScopeRef::Block(scope) => {
                let block = self.blocks.last_mut().expect("a scope is in a block");
                block.builder.scopes().confs(scope)
            }
        }
    }

    /// Begins a protocol's block. `complete` is called after the whole text was read.
    pub fn open_block(&mut self, block: impl BlockBuilder, complete: Complete) {
        self.blocks.push(OpenBlock { builder: Box::new(block), complete });
    }

    /// The block builder of this type, if the text has such a block.
    pub fn block<B: BlockBuilder>(&mut self) -> Option<&mut B> {
        self.blocks.iter_mut().find_map(|block| {
            let builder: &mut dyn Any = block.builder.as_mut();
            builder.downcast_mut()
        })
    }

    /// Settings of the main level, by type.
    pub fn main_conf<C: 'static>(&self) -> Option<&C> {
        self.main_confs.iter().flatten().find_map(|conf| conf.downcast_ref())
    }

    /// Makes a path absolute with the prefix.
    pub fn full_path(&self, path: &[u8]) -> PathBuf {
        use std::os::unix::ffi::OsStrExt;
        self.prefix.join(Path::new(std::ffi::OsStr::from_bytes(path)))
    }

    /// Requests a log file, which is opened later. As in nginx an empty name means standard error.
    pub fn log_file(&mut self, path: &[u8], span: Option<Span>) -> DeferredLog {
        if path.is_empty() {
            self.logs_to_stderr = true;
            let log = DeferredLog::new(PathBuf::new());
            log.set(Arc::clone(Writers::of_process().stderr()));
            return log;
        }
        let path = self.full_path(path);
        if let Some(known) = self.logs_by_path.get(&path) {
            return known.clone();
        }
        let log = DeferredLog::new(path.clone());
        self.logs_by_path.insert(path, log.clone());
        self.logs.push(LogRequest { span, log: log.clone() });
        log
    }

    /// A syslog server from its parameter `syslog:…`; its name is resolved later.
    pub fn syslog(&mut self, word: &Word) -> Result<DeferredSyslog, Diagnostic> {
        let text = word.text.strip_prefix(b"syslog:").unwrap_or(&word.text);
        let settings = SyslogSettings::parse(text, &self.program);
        let mut settings = settings.map_err(|message| Diagnostic::emerg(message).at(word.span))?;
        settings.trusted = settings.trusted.map(|path| self.configuration_directory.join(path));
        let server = DeferredSyslog::new(settings);
        self.syslogs.push((word.span, server.clone()));
        Ok(server)
    }

    /// Resolves the names of syslog servers.
    fn find_syslogs(&mut self, resources: &mut dyn Resources) {
        for (span, server) in std::mem::take(&mut self.syslogs) {
            let address = match &server.settings().server {
                SyslogServer::Host(host, port) => {
                    self.reach.connects(*port);
                    let found = resources.resolve(host).ok().and_then(|found| found.first().copied());
                    let Some(address) = found else {
                        let message = format!("host not found in syslog server \"{host}\"");
                        self.note([Diagnostic::emerg(message).at(span)]);
                        continue;
                    };
                    Some((address, *port).into())
                }
                SyslogServer::Inet(address) => {
                    self.reach.connects(address.port());
                    None
                }
                SyslogServer::Unix(_) => None,
            };
            match syslog_tls::of(server.settings(), resources) {
                Ok(secure) => server.complete(address, secure),
                Err(message) => self.note([Diagnostic::emerg(message).at(span)]),
            }
        }
    }

    /// Notes that a directive names this thread pool, which may be declared later.
    pub fn need_thread_pool(&mut self, name: &[u8], span: Span) {
        self.needed_pools.push((String::from_utf8_lossy(name).into_owned(), span));
    }

    /// Requests a data file of any size. After the whole text was read, `take` gets its contents or an error; it
    /// returns a fault of the contents.
    pub fn data_file(
        &mut self,
        path: &[u8],
        take: impl FnOnce(io::Result<DataMapping>) -> Result<(), Diagnostic> + 'static,
    ) {
        let path = self.full_path(path);
        self.data_files.want(path, Box::new(take));
    }

    /// The addresses of a host name in `directive`, resolved after the whole text was read.
    pub fn host_addresses(&mut self, host: &Word, directive: &'static str) -> HostAddresses {
        // Invalid UTF-8 is not found.
        self.hosts.want(String::from_utf8_lossy(&host.text).into_owned(), host, directive)
    }

    /// As [`Builder::host_addresses`], for a name that is part of a word.
    pub fn host_addresses_of(&mut self, host: String, word: &Word, directive: &'static str) -> HostAddresses {
        self.hosts.want(host, word, directive)
    }

    /// The zone of this name, which the directive `kind` declares before or after.
    ///
    /// # Errors
    /// The name belongs to a zone of another kind.
    pub fn zone<Z: Send + Sync + 'static>(
        &mut self,
        kind: &'static str,
        name: &[u8],
        span: Span,
    ) -> Result<ZoneRef<Z>, Diagnostic> {
        self.zones.find(kind, name, None, span)
    }

    /// The zone that the directive `kind` declares at `span`. The caller sets its value with [`ZoneRef::declare`].
    ///
    /// # Errors
    /// The name belongs to a zone of another kind or size.
    pub fn declare_zone<Z: Send + Sync + 'static>(
        &mut self,
        kind: &'static str,
        size: &ZoneSize,
        span: Span,
    ) -> Result<ZoneRef<Z>, Diagnostic> {
        self.zones.find(kind, &size.name, Some(size.bytes), span)
    }

    /// Counters with this kind and name, kept over reloads.
    pub fn figures<F: Any + Default + Send + Sync>(&mut self, kind: &'static str, name: &[u8]) -> Arc<F> {
        self.zones.named.figures(kind, name)
    }

    /// Adds a service for the directive at `span`. It starts once all event loops use the configuration.
    ///
    /// # Errors
    /// A service with this name, or an exclusive one with this lock file, exists.
    pub fn add_service(&mut self, service: ServiceSpec, span: Span) -> Result<(), Diagnostic> {
        if let Some((first, _)) = self.services.iter().find(|(_, known)| known.name() == service.name()) {
            let message = format!("duplicate service \"{}\"", service.name());
            return Err(Diagnostic::emerg(message).at(span).related("first added", *first));
        }
        if let Some(path) = service.lock_path()
            && let Some((first, known)) = self.services.iter().find(|(_, known)| known.lock_path() == Some(path))
        {
            let message = format!("the lock file \"{}\" belongs to service \"{}\"", path.display(), known.name());
            return Err(Diagnostic::emerg(message).at(span).related("first added", *first));
        }
        self.services.push((span, service));
        Ok(())
    }

    /// Default path of the pid file, as in Debian.
    pub fn default_pid_path(&self) -> PathBuf {
        self.prefix.join(format!("/run/{}.pid", self.program))
    }

    /// Default path of the error log, as in Debian.
    pub fn default_error_log_path(&self) -> PathBuf {
        self.prefix.join(format!("/var/log/{}/error.log", self.program))
    }

    /// Default path of the access log, as in Debian.
    pub fn default_access_log_path(&self) -> PathBuf {
        self.prefix.join(format!("/var/log/{}/access.log", self.program))
    }

    /// Default directory of request bodies, as in Debian.
    pub fn default_body_temp_path(&self) -> PathBuf {
        self.default_temp_path("body")
    }

    /// Default directory of temporary files of this kind, as in Debian.
    pub fn default_temp_path(&self, kind: &str) -> PathBuf {
        self.prefix.join(format!("/var/lib/{}/{kind}", self.program))
    }

    /// The settings for the process layer, without accounts.
    pub fn main_settings(
        &mut self,
        statements: &[Statement],
        syntax_errors: Vec<Diagnostic>,
    ) -> Option<ProcessSettings> {
        self.understand(statements, syntax_errors)?;
        self.main_conf::<MainSettings>().map(MainSettings::to_process_settings)
    }

    /// Applies all statements and completes the main level.
    fn understand(&mut self, statements: &[Statement], syntax_errors: Vec<Diagnostic>) -> Option<()> {
        self.walk(statements, Contexts::MAIN, ScopeRef::Main);
        if !self.diagnostics.has_errors() {
            self.note(syntax_errors);
        }
        if self.diagnostics.has_errors() {
            return None;
        }
        self.complete_main();
        (!self.diagnostics.has_errors()).then_some(())
    }

    /// Builds the configuration. `syntax_errors` are also in the statements; they are reported here only if the walk
    /// reached none of them.
    pub fn build(
        &mut self,
        statements: &[Statement],
        syntax_errors: Vec<Diagnostic>,
        resources: &mut dyn Resources,
    ) -> Option<Configuration> {
        self.understand(statements, syntax_errors)?;
        self.find_syslogs(resources);
        let mut process = self.process_settings(resources);
        let events = self.main_conf::<EventsSettings>().cloned().unwrap_or_default();
        let unknown_hosts = self.hosts.resolve(resources);
        self.note(unknown_hosts);
        let completes: Vec<Complete> = self.blocks.iter().map(|block| block.complete).collect();
        let drafts = completes.into_iter().map(|complete| complete(self, resources)).collect::<Result<Vec<_>, _>>();
        let drafts = drafts.map_err(|error| self.diagnostics.report(error)).ok()?;
        // If there are too many lifetimes, sessions with shorter ones use the keys of longer ones.
        process.secret_lifetimes = self.ticket_lifetimes.iter().rev().take(SERIES_MAX).rev().copied().collect();
        let unbounded = std::mem::take(&mut self.reach).complete(&mut process.sandbox);
        self.note(unbounded);
        let unfit_files = self.data_files.read(resources);
        self.note(unfit_files);
        if self.diagnostics.has_errors() {
            return None;
        }
        self.open_logs(resources);
        if self.diagnostics.has_errors() {
            return None;
        }
        let owner = process.account.as_ref();
        let prepared = drafts.iter().try_for_each(|draft| draft.prepare(resources, owner));
        let services = prepared.and_then(|()| self.open_services(resources));
        let services = services.map_err(|error| self.diagnostics.report(error)).ok()?;
        let protocols = open_blocks(drafts, resources);
        let protocols = protocols.map_err(|error| self.diagnostics.report(error)).ok()?;
        let main = self.main_conf::<MainSettings>().expect("the core module is among the modules");
        let error_log = Arc::new(ErrorLog::new(main.error_log.get().clone()));
        let thread_pools = ThreadPools::new(main.thread_pool.get(), process.workers);
        let cpu_affinity = main.worker_cpu_affinity.get_opt().cloned();
        let zones = Arc::new(std::mem::take(&mut self.zones.named));
        let built = SystemTime::now();
        Some(Configuration {
            process,
            events,
            cpu_affinity,
            thread_pools,
            error_log,
            zones,
            services,
            protocols,
            built,
        })
    }

    fn complete_main(&mut self) {
        let tables = self.tables();
        let mut confs = std::mem::take(&mut self.main_confs);
        for row in tables.iter().filter(|row| row.directive.contexts.overlaps(Contexts::MAIN | Contexts::EVENTS)) {
            if let Some(conf) = &mut confs[row.owner] {
                row.directive.store.finish(conf.as_mut(), self, row.directive.name, row.directive.default);
            }
        }
        for (owner, module) in self.order.modules.iter().enumerate() {
            if let (Some(conf), Some(conf_type)) = (&mut confs[owner], &module.conf)
                && let Err(error) = (conf_type.complete_main)(conf.as_mut(), self)
            {
                self.diagnostics.report(error);
            }
        }
        self.main_confs = confs;
        self.check_needed_pools();
        let undeclared: Vec<Diagnostic> = self.zones.undeclared().collect();
        self.note(undeclared);
        if !self.has_events {
            self.diagnostics.report(Diagnostic::emerg("no \"events\" section in configuration"));
        }
    }

    fn check_needed_pools(&mut self) {
        let needed = std::mem::take(&mut self.needed_pools);
        let pools = self.main_conf::<MainSettings>().and_then(|main| main.thread_pool.get_opt()).into_iter().flatten();
        let known: Vec<&str> = pools.map(|pool| &*pool.name).chain([ThreadPoolSettings::DEFAULT_NAME]).collect();
        let missing = needed.iter().filter(|(name, _)| !known.contains(&&**name)).map(|(name, span)| {
            let hint = "a pool is defined by the \"thread_pool\" directive in the main context";
            Diagnostic::emerg(format!("unknown thread pool \"{name}\"")).at(*span).hint(hint)
        });
        let missing: Vec<Diagnostic> = missing.collect();
        self.note(missing);
    }

    fn process_settings(&mut self, resources: &mut dyn Resources) -> ProcessSettings {
        let main = self.main_conf::<MainSettings>().expect("the core module is among the modules");
        let mut process = main.to_process_settings();
        let driver = self.main_conf::<EventsSettings>().and_then(|events| events.driver.get_opt().copied());
        process.event_method = driver.unwrap_or_default().name().to_owned();
        process.keeps_standard_error = self.logs_to_stderr;
        process.keep_net_raw = self.binds_transparently;
        let user = main.user.clone();
        match user.get_opt() {
            Some((name, group)) => match resources.account(name, group.as_deref()) {
                Ok(Some(account)) => process.account = Some(account),
                Ok(None) => self.note([Diagnostic::warn(gale_process::USER_IGNORED).at_opt(user.span())]),
                Err(error) => self.note([user.error(error.to_string())]),
            },
            None => match default_account(resources) {
                Ok(account) => process.account = account,
                Err(error) => {
                    let hint = "set the user of the worker process with the \"user\" directive";
                    self.note([Diagnostic::emerg(error.to_string()).hint(hint)]);
                }
            },
        }
        process
    }

    /// Number of event loops.
    pub fn workers(&self) -> usize {
        self.main_conf::<MainSettings>().and_then(|main| main.worker_processes.get_opt().copied()).unwrap_or(1)
    }

    fn open_services(&mut self, resources: &mut dyn Resources) -> Result<Vec<Arc<ConfiguredService>>, Diagnostic> {
        let services = std::mem::take(&mut self.services).into_iter();
        let open = |(span, service): (Span, ServiceSpec)| {
            service.open(resources).map_err(|error| Diagnostic::from(error).at(span))
        };
        services.map(open).collect()
    }

    fn open_logs(&mut self, resources: &mut dyn Resources) {
        for request in std::mem::take(&mut self.logs) {
            let path = request.log.path();
            let is_default = path == self.default_error_log_path() || path == self.default_access_log_path();
            if is_default && let Some(directory) = path.parent() {
                // Creates a missing default directory. If that fails, the error for the file says so.
                let _ = resources.directory(directory, None);
            }
            match resources.log_file(request.log.path()) {
                Ok(handle) => {
                    let writer = Writers::of_process().writer(&handle);
                    request.log.set(writer);
                }
                // Unlike nginx, names the place in the configuration.
                Err(error) => self.diagnostics.report(Diagnostic::emerg(error.to_string()).at_opt(request.span)),
            }
        }
    }
}

fn open_blocks(
    drafts: Vec<Box<dyn BlockDraft>>,
    resources: &mut dyn Resources,
) -> Result<Vec<Arc<dyn Protocol>>, Diagnostic> {
    let listens: Vec<Vec<ListenSpec>> = drafts.iter().map(|draft| draft.listens()).collect();
    if listens.is_empty() {
        return Ok(Vec::new());
    }
    for (index, own) in listens.iter().enumerate() {
        let is_same = |one: &ListenSpec, other: &ListenSpec| (&one.address, one.kind) == (&other.address, other.kind);
        let is_taken = |spec: &&ListenSpec| listens[..index].iter().flatten().any(|other| is_same(other, spec));
        if let Some(spec) = own.iter().find(is_taken) {
            let hint = "an address belongs to one protocol only";
            return Err(Diagnostic::emerg(format!("a duplicate listen {}", spec.address)).hint(hint));
        }
    }
    let listeners = resources.listeners(&listens.concat()).map_err(|error| Diagnostic::emerg(error.to_string()))?;
    let mut listeners = listeners.into_iter();
    let drafts = drafts.into_iter().zip(listens);
    Ok(drafts.map(|(draft, listens)| draft.finish(listeners.by_ref().take(listens.len()).collect())).collect())
}

/// Default account of a worker process started by root: the unprivileged user and its group, which has one of two
/// names; nginx chooses between them when it is built.
fn default_account(resources: &mut dyn Resources) -> Result<Option<Account>, ResourceError> {
    resources.account("nobody", None).or_else(|_| resources.account("nobody", Some("nogroup")))
}

fn make_confs(modules: &[&Module]) -> Vec<Option<Conf>> {
    modules.iter().map(|module| module.conf.map(|conf| (conf.make)())).collect()
}
