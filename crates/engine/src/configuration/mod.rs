//! Configuration: builds the objects that workers run on from the text.
//!
//! Building has no side effects: files are read and opened through [`Resources`]; first the texts, and at the very end,
//! after all checks, logs and listening sockets. The starting process, the reload helper and the worker process run the
//! same code with the same result.

mod blocks;
mod builder;
mod cpu_affinity;
mod data_files;
mod hosts;
mod main_settings;
pub mod module;
pub mod protocol;
mod reach;
mod resolver;
mod scopes;
mod thread_pools;
mod zones;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use gale_base::log_level::LineForm;
use gale_config::{
    Diagnostic, Diagnostics, DiskFiles, Files, Parsed, Sources, Statement, parse, parse_parameter, parse_text,
};
use gale_log::ErrorLog;
use gale_process::{BuildRequest, Built, ErrorLogDestination, ProcessSettings, Report, Resources};
use gale_worker::service::ConfiguredService;

pub use blocks::{BlockBuilder, BlockDraft, Complete};
pub use builder::{Builder, EventsSettings, ScopeRef, tables};
pub use cpu_affinity::CpuAffinity;
pub use main_settings::{MainSettings, SandboxSettings, ThreadPoolSettings};
pub use reach::{KnownPath, Reach};
pub use resolver::{RESOLVERS, parse_resolver};
pub use scopes::{Confs, ScopeId, ScopeTree, ServerId};
pub use thread_pools::ThreadPools;
pub use zones::{ZONE_BYTES_MIN, ZoneRef, ZoneSize};

use crate::zone::NamedZones;
use module::Order;
use protocol::Protocol;

/// A complete, immutable configuration.
pub struct Configuration {
    /// Settings for the process layer.
    pub process: ProcessSettings,
    /// The `events` block.
    pub events: EventsSettings,
    /// `worker_cpu_affinity`, if set.
    pub cpu_affinity: Option<CpuAffinity>,
    /// Thread pools, including `default`.
    pub thread_pools: ThreadPools,
    /// Error log for messages outside of requests.
    pub error_log: Arc<ErrorLog>,
    /// Declared zones.
    pub zones: Arc<NamedZones>,
    /// Services.
    pub services: Vec<Arc<ConfiguredService>>,
    /// Protocols, one for each block such as `http`.
    pub protocols: Vec<Arc<dyn Protocol>>,
    /// Time when it was built.
    pub built: SystemTime,
}

impl Configuration {
    /// The protocol of this type, if the configuration has its block.
    pub fn protocol<P: Protocol>(&self) -> Option<Arc<P>> {
        self.protocols.iter().find_map(|protocol| Arc::clone(protocol).downcast())
    }
}

/// Texts of a configuration, in order, for `-T`.
pub type Texts = Vec<(PathBuf, Arc<[u8]>)>;

/// Reads, checks and builds a configuration. The error reports all faults with their places. The texts are returned in
/// any case.
pub fn build(
    order: &'static Order,
    request: &BuildRequest,
    resources: &mut dyn Resources,
) -> (Result<Built<Configuration>, Report>, Texts) {
    let mut sources = Sources::new();
    let mut builder = Builder::new(order, request);
    let configuration = read_and_build(&mut builder, &mut sources, request, resources);
    let diagnostics = std::mem::take(&mut builder.diagnostics);
    let report = report(&diagnostics, &sources);
    let texts = sources.iter().filter_map(|(_, source)| Some((source.path()?.to_owned(), Arc::clone(source.text()))));
    let texts = texts.collect();
    match configuration {
        Some(configuration) if !diagnostics.has_errors() => (Ok(Built { configuration, warnings: report }), texts),
        _ => (Err(report), texts),
    }
}

/// Reads only the main settings, for `-s`, which needs the path of the pid file. Opens nothing.
///
/// # Errors
/// Faults of the configuration.
pub fn main_settings(
    order: &'static Order,
    request: &BuildRequest,
    files: &mut dyn Files,
) -> Result<ProcessSettings, Report> {
    let mut sources = Sources::new();
    let mut builder = Builder::new(order, request);
    let read = read(&mut builder, &mut sources, request, files);
    let settings = read.and_then(|(statements, syntax_errors)| builder.main_settings(&statements, syntax_errors));
    let diagnostics = std::mem::take(&mut builder.diagnostics);
    settings.ok_or_else(|| report(&diagnostics, &sources))
}

/// File and form for the error of a failed start: those of the configuration if they can be determined, else those used
/// until then.
pub fn failure_log_path(order: &'static Order, request: &BuildRequest) -> Option<(PathBuf, LineForm)> {
    let Ok(settings) = main_settings(order, request, &mut DiskFiles) else {
        return match &request.error_log_path {
            Some(path) if path.as_os_str() == "stderr" => None,
            Some(path) => Some((request.prefix.join(path), LineForm::Text)),
            None => Some((Builder::new(order, request).default_error_log_path(), LineForm::Text)),
        };
    };
    settings.error_log.into_iter().find_map(|log| match log.destination {
        ErrorLogDestination::File(path) => Some((path, log.form)),
        ErrorLogDestination::Stderr | ErrorLogDestination::Syslog(_) => None,
    })
}

fn report(diagnostics: &Diagnostics, sources: &Sources) -> Report {
    let mut report = Report::default();
    for diagnostic in diagnostics.iter() {
        report.push_diagnostic(diagnostic, sources);
    }
    report
}

fn read_and_build(
    builder: &mut Builder,
    sources: &mut Sources,
    request: &BuildRequest,
    resources: &mut dyn Resources,
) -> Option<Configuration> {
    let (statements, syntax_errors) = read(builder, sources, request, resources)?;
    builder.build(&statements, syntax_errors, resources)
}

/// Statements of the command line and of the file, and their syntax errors.
fn read(
    builder: &mut Builder,
    sources: &mut Sources,
    request: &BuildRequest,
    resources: &mut dyn Files,
) -> Option<(Vec<Statement>, Vec<Diagnostic>)> {
    let directory = request.configuration_path.parent().unwrap_or(Path::new("/"));
    let mut statements = Vec::new();
    // Syntax errors are part of the statements and are reported in order by the walk; this list is for those that it
    // never reaches.
    let mut syntax_errors = Vec::new();
    let mut take = |parsed: Parsed| {
        statements.extend(parsed.statements);
        syntax_errors.extend(parsed.errors.iter().cloned());
    };
    if !request.global_directives.is_empty() {
        take(parse_parameter(sources, resources, request.global_directives.clone().into_bytes(), directory));
    }
    match &request.configuration_text {
        Some(text) => take(parse_text(sources, resources, "gale serve", text.clone().into_bytes(), directory)),
        None => match parse(sources, resources, &request.configuration_path, directory) {
            Ok(parsed) => take(parsed),
            Err(error) => {
                builder.note([error]);
                return None;
            }
        },
    }
    Some((statements, syntax_errors))
}
