//! Access logs: a line for each request or session.
//!   log_format NAME [escape=default|json|none] STRING ...;                         http, stream
//!   access_log off;
//!   access_log PATH [FORMAT [buffer=SIZE] [gzip[=LEVEL]] [flush=TIME] [if=CONDITION]];
//!   access_log syslog:server=ADDRESS[,PARAMETER=VALUE] [FORMAT [if=CONDITION]];
//!   open_log_file_cache max=N [inactive=TIME] [min_uses=N] [valid=TIME];
//!   open_log_file_cache off;
//! (<https://nginx.org/en/docs/http/ngx_http_log_module.html>)
//!
//! Lines go into the worker's own buffer for the file, and `AccessBuffers` passes them on; this file opens, compresses
//! and writes nothing. As in nginx, a format must be defined before the logs that use it.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bstr::BStr;
use gale_base::units;
use gale_config::{Body, Contexts, Custom, Diagnostic, One, Setting, Statement, Takes, Word, slot};
use gale_engine::configuration::{BlockBuilder, Builder, ScopeId, ScopeRef};
use gale_engine::module::Directive;
use gale_engine::variables::HasVariables;
use gale_engine::variables::subject::Subject;
use gale_engine::variables::template::Template;
use gale_log::{AccessBuffers, DeferredLog, DeferredSyslog, Hold, NamedLine, OpenLogs, append_named};

use super::log_format::{Escaping, Format, Formats, duplicate_name};

/// Properties of a protocol whose subjects are logged.
pub trait Logged: Subject
where
    Self::Block: HasVariables<Self>,
{
    /// Text of the format `combined`, the default format, or `None` if every log has to name its format.
    const COMBINED: Option<&'static str>;

    /// `true` if `at=start` may log subjects at their beginning, for protocols whose subjects may last for days.
    const HAS_START: bool = false;

    /// Description of `access_log` in the reference.
    const ABOUT: &'static str;

    /// Log buffers of the subject's worker.
    fn access(&self) -> &Rc<AccessBuffers>;

    /// Appends the directory that has to exist for a file whose name has variables. Returns `false` if there is none.
    fn append_log_root(&self, out: &mut Vec<u8>) -> bool;
}

/// Returns the directives: formats in the contexts `formats`, logs in `logs`, and logs without formats in `conditions`.
pub const fn directives<S: Logged>(formats: Contexts, logs: Contexts, conditions: Contexts) -> [Directive; 3] {
    [
        Directive {
            name: "log_format",
            contexts: formats,
            takes: Takes::AtLeast(2),
            body: Body::None,
            default: if S::COMBINED.is_some() { "combined \"...\"" } else { "" },
            about: "Defines a format of access logs.",
            store: const { &Custom(log_format::<S>) },
        },
        Directive {
            name: "access_log",
            contexts: logs.or(conditions),
            takes: Takes::AtLeast(1),
            body: Body::None,
            default: "",
            about: S::ABOUT,
            store: const { &Custom(access_log::<S>) },
        },
        Directive {
            name: "open_log_file_cache",
            contexts: logs,
            takes: Takes::Between(1, 4),
            body: Body::None,
            default: "off",
            about: "Configures the cache of open log files whose names contain variables.",
            store: const { &One { parse: open_log_file_cache, slot: slot!(AccessLogs<S>, open) } },
        },
    ]
}

/// The outermost block of a protocol is its first scope.
const BLOCK: ScopeId = ScopeId(0);

/// Upper bound of the effective `buffer=`: a file's queue must hold the buffers of several workers at once.
const HOLD_BYTES_MAX: usize = 1024 * 1024;

/// nginx's buffer size and level for a plain `gzip`.
const GZIP_BUFFER_BYTES: usize = 64 * 1024;
const GZIP_LEVEL: u32 = 1;

/// Log settings of a scope: the settings of the module that has the directives.
pub struct AccessLogs<S: 'static> {
    /// `None` until it is set here or inherited.
    pub(crate) logs: Option<Arc<[Log<S>]>>,
    /// Set by `off`: no line is written, whatever other logs the block has.
    pub(crate) is_off: bool,
    /// Cache of open files.
    open: Setting<Option<Arc<OpenLogs>>>,
    /// Used in the outermost block only.
    shared: Shared<S>,
}

/// State that all logs of a protocol share, in the settings of the outermost block.
struct Shared<S: 'static> {
    formats: Formats<S>,
    /// Buffering of the lines for each file: a file has one buffer.
    holds: HashMap<PathBuf, Gathering>,
}

/// Buffering of the lines for a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Gathering {
    hold: Hold,
    /// Compression level; 0 for none.
    gzip: u32,
}

/// The moment at which a line is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Moment {
    /// At the subject's beginning.
    Start,
    /// At its end.
    #[default]
    End,
}

/// One `access_log`.
pub(crate) struct Log<S: 'static> {
    pub target: LogTarget<S>,
    pub format: Arc<Format<S>>,
    pub condition: Option<Template<S>>,
    pub moment: Moment,
}

/// Destination of lines.
pub(crate) enum LogTarget<S: 'static> {
    /// A file, with `buffer=` and `flush=`.
    File(DeferredLog, Option<Hold>),
    /// A file whose name depends on the subject.
    Named(Template<S>),
    Syslog(DeferredSyslog),
}

impl<S> Default for AccessLogs<S> {
    fn default() -> AccessLogs<S> {
        let shared = Shared { formats: Formats::default(), holds: HashMap::new() };
        AccessLogs { logs: None, is_off: false, open: Setting::new(), shared }
    }
}

impl<S> Clone for Log<S> {
    fn clone(&self) -> Log<S> {
        let Log { target, format, condition, moment } = self;
        Log { target: target.clone(), format: Arc::clone(format), condition: condition.clone(), moment: *moment }
    }
}

impl<S> Clone for LogTarget<S> {
    fn clone(&self) -> LogTarget<S> {
        match self {
            LogTarget::File(file, hold) => LogTarget::File(file.clone(), *hold),
            LogTarget::Named(path) => LogTarget::Named(path.clone()),
            LogTarget::Syslog(server) => LogTarget::Syslog(server.clone()),
        }
    }
}

impl<S> AccessLogs<S> {
    /// Returns the logs that lines are written to.
    pub(crate) fn logs(&self) -> &[Log<S>] {
        match &self.logs {
            Some(logs) if !self.is_off => logs,
            _ => &[],
        }
    }

    /// Returns `true` if a log writes lines at this moment.
    pub fn has(&self, moment: Moment) -> bool {
        self.logs().iter().any(|log| log.moment == moment)
    }

    /// Inherits the parent's logs if the block has no `access_log`. Returns `true` if there are any.
    pub fn inherit(&mut self, parent: &AccessLogs<S>) -> bool {
        if self.logs.is_none() && !self.is_off {
            self.logs.clone_from(&parent.logs);
            self.is_off = parent.is_off;
        }
        self.logs.is_some() || self.is_off
    }
}

impl<S: Logged> AccessLogs<S> {
    /// Writes the lines of a subject at its beginning or end.
    pub fn write(&self, subject: &S, moment: Moment) {
        for log in self.logs().iter().filter(|log| log.moment == moment) {
            if log.condition.as_ref().is_some_and(|condition| is_false(&condition.evaluate(subject))) {
                continue;
            }
            let access = subject.access();
            match &log.target {
                LogTarget::File(file, hold) => access.append(file.writer(), *hold, |out| {
                    log.format.append(subject, out);
                    out.push(b'\n');
                }),
                LogTarget::Syslog(server) => access.append(server.syslog().writer(), None, |out| {
                    server.syslog().append_line(out, |out| log.format.append(subject, out));
                }),
                LogTarget::Named(path) => self.named_line(subject, log, path).into_iter().for_each(append_named),
            }
        }
    }

    /// Returns the line for a file whose name depends on the subject, or `None` if the name leads out of its directory.
    fn named_line(&self, subject: &S, log: &Log<S>, path: &Template<S>) -> Option<NamedLine> {
        let mut name = Vec::with_capacity(128);
        if !path.append_path(subject, &mut name) {
            return None;
        }
        let mut line = Vec::with_capacity(256);
        log.format.append(subject, &mut line);
        line.push(b'\n');
        let mut root = Vec::with_capacity(128);
        if !subject.append_log_root(&mut root) {
            return None;
        }
        Some(NamedLine {
            path: OsString::from_vec(name).into(),
            root: OsString::from_vec(root).into(),
            line,
            connection: subject.connection().number,
            errors: Arc::clone(subject.error_log()),
            open: self.open.get().clone(),
        })
    }

    /// Sets the default log: this file, in the format `combined`.
    pub fn set_default(&mut self, builder: &mut Builder, path: &[u8]) {
        let Some(format) = combined::<S>(builder) else { return };
        let file = builder.log_file(path, None);
        let target = LogTarget::File(file, None);
        self.logs = Some(Arc::new([Log { target, format, condition: None, moment: Moment::End }]));
    }
}

pub(crate) fn is_false(value: &[u8]) -> bool {
    matches!(value, b"" | b"0")
}

fn log_format<S: Logged>(
    conf: &mut AccessLogs<S>,
    builder: &mut Builder,
    statement: &Statement,
) -> Result<(), Diagnostic> {
    let name = &statement.args[0];
    if S::COMBINED.is_some() && name.text == "combined" {
        return Err(duplicate_name(name));
    }
    conf.shared.formats.add(builder, statement)
}

fn access_log<S: Logged>(
    conf: &mut AccessLogs<S>,
    builder: &mut Builder,
    statement: &Statement,
) -> Result<(), Diagnostic> {
    let path = &statement.args[0];
    if path.text == "off" {
        conf.is_off = true;
        return statement.args.get(1).map_or(Ok(()), |extra| Err(invalid_parameter(extra)));
    }
    let format = match statement.args.get(1) {
        Some(name) => named_format(conf, builder, name)?,
        None => combined::<S>(builder).ok_or_else(|| statement.error("log format is not specified"))?,
    };
    let Options { gathering, condition, moment } = options::<S>(builder, statement)?;
    let refused = |message: &str| Diagnostic::emerg(message).at(statement.span);
    let target = if path.text.starts_with(b"syslog:") {
        let server = builder.syslog(path)?;
        match gathering {
            Some(_) => return Err(refused("logs to syslog cannot be buffered")),
            None => LogTarget::Syslog(server),
        }
    } else if path.text.contains(&b'$') {
        if gathering.is_some() {
            return Err(refused("buffered logs cannot have variables in name"));
        }
        let full = builder.full_path(&path.text).into_os_string().into_vec().into();
        let template = builder.variables::<S>().template(&Word { text: full, ..path.clone() })?;
        builder.reach.writes(template.known_path(), "access_log");
        LogTarget::Named(template)
    } else {
        let file = builder.log_file(&path.text, Some(path.span));
        if let Some(gathering) = gathering {
            if path.text.is_empty() {
                // As in nginx, each statement decides the buffering of lines to standard error.
                if gathering.gzip > 0 {
                    let message = "\"gzip\" has no effect on standard error, which is shared with other logs";
                    builder.note([Diagnostic::warn(message).at(statement.span)]);
                }
            } else if shared(conf, builder).agrees(&file, gathering) {
                file.compress(gathering.gzip);
            } else {
                let message = format!("access_log \"{}\" already defined with conflicting parameters", path.text);
                return Err(Diagnostic::emerg(message).at(path.span));
            }
        }
        let hold = gathering.map(|Gathering { hold, .. }| Hold { bytes: hold.bytes.min(HOLD_BYTES_MAX), ..hold });
        LogTarget::File(file, hold)
    };
    let log = Log { target, format, condition, moment };
    let earlier = conf.logs.take().unwrap_or_default();
    conf.logs = Some(earlier.iter().cloned().chain([log]).collect());
    Ok(())
}

fn invalid_parameter(word: &Word) -> Diagnostic {
    Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span)
}

/// Finds a format by name. The block's own `combined` takes precedence over the predefined one; since names ignore
/// case, only the definitions tell the two apart.
fn named_format<S: Logged>(
    conf: &mut AccessLogs<S>,
    builder: &mut Builder,
    name: &Word,
) -> Result<Arc<Format<S>>, Diagnostic> {
    if name.text.eq_ignore_ascii_case(b"combined")
        && let Some(combined) = combined::<S>(builder)
    {
        return Ok(combined);
    }
    shared(conf, builder).formats.find(name)
}

/// Returns the predefined format, if the protocol has one.
pub(crate) fn combined<S: Logged>(builder: &mut Builder) -> Option<Arc<Format<S>>> {
    let text = Statement::synthetic(S::COMBINED?, Vec::new()).name;
    let variables = builder.variables::<S>();
    let format = Format::compile(Escaping::Default, &[text], |name, _| variables.variable(name, None));
    Some(Arc::new(format.expect("the built-in format is right")))
}

/// Parameters that follow the format in an `access_log`.
struct Options<S: 'static> {
    gathering: Option<Gathering>,
    condition: Option<Template<S>>,
    moment: Moment,
}

fn options<S: Logged>(builder: &mut Builder, statement: &Statement) -> Result<Options<S>, Diagnostic> {
    let (mut bytes, mut time, mut gzip, mut condition) = (None, None, 0, None);
    let mut moment = Moment::End;
    for word in statement.args.iter().skip(2) {
        if let Some(text) = word.text.strip_prefix(b"buffer=") {
            let size = units::parse_size(text).and_then(|size| usize::try_from(size).ok());
            bytes = Some(size.filter(|&size| size > 0).ok_or_else(|| invalid(word, "buffer size", text))?);
        } else if let Some(text) = word.text.strip_prefix(b"flush=") {
            let flush = units::parse_time(text).filter(|flush| !flush.is_zero());
            time = Some(flush.ok_or_else(|| invalid(word, "flush time", text))?);
        } else if let Some(text) = word.text.strip_prefix(b"if=") {
            condition = Some(builder.variables::<S>().template(&Word { text: text.into(), ..word.clone() })?);
        } else if let Some(level) = word.text.strip_prefix(b"gzip=") {
            let number = units::parse_number(level).and_then(|number| u32::try_from(number).ok());
            let number = number.filter(|number| (1..=9).contains(number));
            gzip = number.ok_or_else(|| invalid(word, "compression level", level))?;
            bytes.get_or_insert(GZIP_BUFFER_BYTES);
        } else if S::HAS_START && word.text == "at=start" {
            moment = Moment::Start;
        } else if S::HAS_START && word.text == "at=end" {
            moment = Moment::End;
        } else if word.text == "gzip" {
            gzip = GZIP_LEVEL;
            bytes.get_or_insert(GZIP_BUFFER_BYTES);
        } else {
            return Err(invalid_parameter(word));
        }
    }
    if time.is_some() && bytes.is_none() {
        let path = &statement.args[0];
        let message = format!("no buffer is defined for access_log \"{}\"", path.text);
        return Err(Diagnostic::emerg(message).at(path.span));
    }
    let gathering = bytes.map(|bytes| Gathering { hold: Hold { bytes, time }, gzip });
    Ok(Options { gathering, condition, moment })
}

fn invalid(word: &Word, what: &str, text: &[u8]) -> Diagnostic {
    Diagnostic::emerg(format!("invalid {what} \"{}\"", BStr::new(text))).at(word.span)
}

/// Returns the state that all logs share, from any scope of the protocol's block.
fn shared<'c, S: Logged>(conf: &'c mut AccessLogs<S>, builder: &'c mut Builder) -> &'c mut Shared<S> {
    // While a directive is applied, the builder does not hold the settings of the directive's own block.
    if builder.scope == ScopeRef::Block(BLOCK) {
        return &mut conf.shared;
    }
    let confs = builder.block::<S::Block>().expect("inside of the block").scopes().confs(BLOCK);
    let found = confs.iter_mut().flatten().find_map(|conf| conf.downcast_mut::<AccessLogs<S>>());
    &mut found.expect("the outermost block has settings of every module").shared
}

impl<S> Shared<S> {
    /// Records the buffering of this file's lines. Returns `false` if an earlier log set it differently.
    fn agrees(&mut self, file: &DeferredLog, gathering: Gathering) -> bool {
        match self.holds.get(file.path()) {
            Some(known) => *known == gathering,
            None => {
                self.holds.insert(file.path().to_owned(), gathering);
                true
            }
        }
    }
}

fn open_log_file_cache(statement: &Statement) -> Result<Option<Arc<OpenLogs>>, Diagnostic> {
    const NAME: &str = "open_log_file_cache";
    let (mut files_max, mut inactive, mut uses_min, mut valid) = (None, 10, 1, 60);
    for word in &statement.args {
        let wrong = || Diagnostic::emerg(format!("invalid \"{NAME}\" parameter \"{}\"", word.text)).at(word.span);
        let positive = |text: &[u8]| units::parse_number(text).filter(|&number| number > 0).ok_or_else(wrong);
        let seconds = |text| units::parse_time_seconds(text).map(|time| time.as_secs()).ok_or_else(wrong);
        if let Some(text) = word.text.strip_prefix(b"max=") {
            files_max = Some(positive(text)?);
        } else if let Some(text) = word.text.strip_prefix(b"inactive=") {
            inactive = seconds(text)?;
        } else if let Some(text) = word.text.strip_prefix(b"min_uses=") {
            uses_min = positive(text)?;
        } else if let Some(text) = word.text.strip_prefix(b"valid=") {
            valid = seconds(text)?;
        } else if word.text == "off" {
            return Ok(None);
        } else {
            return Err(wrong());
        }
    }
    let files_max = files_max.ok_or_else(|| statement.error(format!("\"{NAME}\" must have \"max\" parameter")))?;
    let files_max = usize::try_from(files_max).unwrap_or(usize::MAX);
    let uses_min = u32::try_from(uses_min).unwrap_or(u32::MAX);
    let (inactive, valid) = (Duration::from_secs(inactive), Duration::from_secs(valid));
    Ok(Some(Arc::new(OpenLogs::new(files_max, inactive, uses_min, valid))))
}
