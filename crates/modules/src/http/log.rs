//! log: a line for every request.
//!   log_format NAME [escape=default|json|none] STRING ...;                         http
//!   access_log off;
//!   access_log PATH [FORMAT [buffer=SIZE] [gzip[=LEVEL]] [flush=TIME] [if=CONDITION]];
//!   access_log syslog:server=ADDRESS[,PARAMETER=VALUE] [FORMAT [if=CONDITION]];
//!                       http, server, location, if in location, limit_except
//!   open_log_file_cache max=N [inactive=TIME] [min_uses=N] [valid=TIME];           http, server, location
//!   open_log_file_cache off;
//! (<https://nginx.org/en/docs/http/ngx_http_log_module.html>)
//!
//! Lines are written into the worker's own buffer for the file and handed on by
//! `AccessBuffers`; nothing here opens, compresses or writes a file. A format must stand
//! before the logs that use it, as in nginx.

use std::any::Any;
use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bstr::BStr;
use gale_base::units;
use gale_config::{Body, Contexts, Custom, Diagnostic, One, Setting, Statement, Takes, Word, slot};
use gale_engine::configuration::{Builder, ScopeId, ScopeRef};
use gale_engine::log::{DeferredLog, DeferredSyslog, Hold, NamedLine, OpenLogs, append_named};
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::configuration::builder::InHttp;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::files::directory_of;
use gale_http::request::phases::{Decide, Flow, Phase};
use gale_http::variables::template::Template;

use crate::shared::log_format::{Escaping, Format, Formats, duplicate_name};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_log",
    directives: &[
        Directive {
            name: "log_format",
            contexts: Contexts::HTTP,
            takes: Takes::AtLeast(2),
            body: Body::None,
            default: "combined \"...\"",
            about: "What a line of an access log says.",
            store: &Custom(log_format),
        },
        Directive {
            name: "access_log",
            contexts: Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION).or(Contexts::LIMIT_EXCEPT),
            takes: Takes::AtLeast(1),
            body: Body::None,
            default: "",
            about: "Where requests are logged, in which format, and which of them; may be repeated. Else where -V says.",
            store: &Custom(access_log),
        },
        Directive {
            name: "open_log_file_cache",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Between(1, 4),
            body: Body::None,
            default: "off",
            about: "Which logs with variables in their names stay open between requests.",
            store: &One { parse: open_log_file_cache, slot: slot!(Conf, open) },
        },
    ],
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart {
        handlers: &[(Phase::Log, &Decide { applies: |conf: &Conf| !conf.logs().is_empty(), run: log })],
        ..HttpPart::EMPTY
    }],
};

/// The format that needs no definition.
const COMBINED: &str = "$remote_addr - $remote_user [$time_local] \"$request\" \
                        $status $body_bytes_sent \"$http_referer\" \"$http_user_agent\"";

/// The block that all others of the configuration stand in is the first scope.
const HTTP_BLOCK: ScopeId = ScopeId(0);

/// `buffer=` beyond this changes nothing: a file's queue must take what has gathered
/// in several workers at once.
const HOLD_BYTES_MAX: usize = 1024 * 1024;

/// nginx's buffer and level for `gzip` alone.
const GZIP_BUFFER_BYTES: usize = 64 * 1024;
const GZIP_LEVEL: u32 = 1;

#[derive(Default)]
struct Conf {
    /// `None` until something is said here or inherited.
    logs: Option<Arc<[Log]>>,
    /// `off`: no line is written, whatever else the block says.
    is_off: bool,
    /// The files that stay open.
    open: Setting<Option<Arc<OpenLogs>>>,
    /// Of the http block alone.
    shared: Shared,
}

/// What all logs of the http block share. It lives in the settings of that block.
#[derive(Default)]
struct Shared {
    formats: Formats<Request>,
    /// How lines for a file are gathered: a file has one buffer.
    holds: HashMap<PathBuf, Gathering>,
}

/// How the lines for a file are gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Gathering {
    hold: Hold,
    /// The level of compression; 0 for none.
    gzip: u32,
}

/// One `access_log`.
#[derive(Clone)]
struct Log {
    place: LogPlace,
    format: Arc<Format<Request>>,
    condition: Option<Template>,
}

/// Where lines go.
#[derive(Clone)]
enum LogPlace {
    /// To a file, with `buffer=` and `flush=`.
    File(DeferredLog, Option<Hold>),
    /// To a file whose name the request decides.
    Named(Template),
    Syslog(DeferredSyslog),
}

impl Conf {
    fn logs(&self) -> &[Log] {
        match &self.logs {
            Some(logs) if !self.is_off => logs,
            _ => &[],
        }
    }
}

fn log(request: &mut Request, conf: &Conf) -> Flow {
    for log in conf.logs() {
        if log.condition.as_ref().is_some_and(|condition| is_false(&condition.evaluate(request))) {
            continue;
        }
        let access = &request.worker().common.access;
        match &log.place {
            LogPlace::File(file, hold) => access.append(file.writer(), *hold, |out| {
                log.format.append(request, out);
                out.push(b'\n');
            }),
            LogPlace::Syslog(server) => access.append(server.syslog().writer(), None, |out| {
                server.syslog().append_line(out, |out| log.format.append(request, out));
            }),
            LogPlace::Named(path) => named_line(request, conf, log, path).into_iter().for_each(append_named),
        }
    }
    Flow::Next
}

/// The line for a file whose name the request decides; none where the name leads out of its directory.
fn named_line(request: &Request, conf: &Conf, log: &Log, path: &Template) -> Option<NamedLine> {
    let mut name = Vec::with_capacity(128);
    if !path.append_path(request, &mut name) {
        return None;
    }
    let mut line = Vec::with_capacity(256);
    log.format.append(request, &mut line);
    line.push(b'\n');
    let mut root = Vec::with_capacity(128);
    if !directory_of(request, &mut root) {
        return None;
    }
    Some(NamedLine {
        path: OsString::from_vec(name).into(),
        root: OsString::from_vec(root).into(),
        line,
        connection: request.connection().number,
        errors: Arc::clone(request.configuration().error_log()),
        open: conf.open.get().clone(),
    })
}

fn is_false(value: &[u8]) -> bool {
    matches!(value, b"" | b"0")
}

fn log_format(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let name = &statement.args[0];
    if name.text == "combined" {
        return Err(duplicate_name(name));
    }
    conf.shared.formats.add(builder, statement)
}

fn access_log(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let path = &statement.args[0];
    if path.text == "off" {
        conf.is_off = true;
        return statement.args.get(1).map_or(Ok(()), |extra| Err(invalid_parameter(extra)));
    }
    let format = match statement.args.get(1) {
        Some(name) => named_format(conf, builder, name)?,
        None => combined(builder),
    };
    let Options { gathering, condition } = options(builder, statement)?;
    let refused = |message: &str| Diagnostic::emerg(message).at(statement.span);
    let place = if path.text.starts_with(b"syslog:") {
        let server = builder.syslog(path)?;
        match gathering {
            Some(_) => return Err(refused("logs to syslog cannot be buffered")),
            None => LogPlace::Syslog(server),
        }
    } else if path.text.contains(&b'$') {
        if gathering.is_some() {
            return Err(refused("buffered logs cannot have variables in name"));
        }
        let full = builder.full_path(&path.text).into_os_string().into_vec().into();
        LogPlace::Named(builder.http_mut().template(&Word { text: full, ..path.clone() })?)
    } else {
        let file = builder.log_file(&path.text, Some(path.span));
        if let Some(gathering) = gathering {
            if !shared(conf, builder).agrees(&file, gathering) {
                let message = format!("access_log \"{}\" already defined with conflicting parameters", path.text);
                return Err(Diagnostic::emerg(message).at(path.span));
            }
            file.compress(gathering.gzip);
        }
        let hold = gathering.map(|Gathering { hold, .. }| Hold { bytes: hold.bytes.min(HOLD_BYTES_MAX), ..hold });
        LogPlace::File(file, hold)
    };
    let log = Log { place, format, condition };
    let earlier = conf.logs.take().unwrap_or_default();
    conf.logs = Some(earlier.iter().cloned().chain([log]).collect());
    Ok(())
}

fn invalid_parameter(word: &Word) -> Diagnostic {
    Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span)
}

/// The block's `combined` comes first, and names are compared without their case:
/// only their definitions tell it apart.
fn named_format(conf: &mut Conf, builder: &mut Builder, name: &Word) -> Result<Arc<Format<Request>>, Diagnostic> {
    if name.text.eq_ignore_ascii_case(b"combined") {
        return Ok(combined(builder));
    }
    shared(conf, builder).formats.find(name)
}

fn combined(builder: &mut Builder) -> Arc<Format<Request>> {
    let text = Statement::synthetic(COMBINED, Vec::new()).name;
    let http = builder.http_mut();
    let format = Format::compile(Escaping::Default, &[text], |name, _| http.variable(name, None));
    Arc::new(format.expect("the built-in format is right"))
}

/// What follows the format in an `access_log`.
struct Options {
    gathering: Option<Gathering>,
    condition: Option<Template>,
}

fn options(builder: &mut Builder, statement: &Statement) -> Result<Options, Diagnostic> {
    let (mut bytes, mut time, mut gzip, mut condition) = (None, None, 0, None);
    for word in statement.args.iter().skip(2) {
        if let Some(text) = word.text.strip_prefix(b"buffer=") {
            let size = units::parse_size(text).and_then(|size| usize::try_from(size).ok());
            bytes = Some(size.filter(|&size| size > 0).ok_or_else(|| invalid(word, "buffer size", text))?);
        } else if let Some(text) = word.text.strip_prefix(b"flush=") {
            let flush = units::parse_time(text).filter(|flush| !flush.is_zero());
            time = Some(flush.ok_or_else(|| invalid(word, "flush time", text))?);
        } else if let Some(text) = word.text.strip_prefix(b"if=") {
            condition = Some(builder.http_mut().template(&Word { text: text.into(), ..word.clone() })?);
        } else if let Some(level) = word.text.strip_prefix(b"gzip=") {
            let number = units::parse_number(level).and_then(|number| u32::try_from(number).ok());
            let number = number.filter(|number| (1..=9).contains(number));
            gzip = number.ok_or_else(|| invalid(word, "compression level", level))?;
            bytes.get_or_insert(GZIP_BUFFER_BYTES);
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
    Ok(Options { gathering: bytes.map(|bytes| Gathering { hold: Hold { bytes, time }, gzip }), condition })
}

fn invalid(word: &Word, what: &str, text: &[u8]) -> Diagnostic {
    Diagnostic::emerg(format!("invalid {what} \"{}\"", BStr::new(text))).at(word.span)
}

/// What all logs share, from wherever in the http block.
fn shared<'c>(conf: &'c mut Conf, builder: &'c mut Builder) -> &'c mut Shared {
    // While a directive is applied, the settings of its own block are not with the builder.
    if builder.scope == ScopeRef::Block(HTTP_BLOCK) {
        return &mut conf.shared;
    }
    let confs = builder.http_mut().confs(HTTP_BLOCK);
    let found = confs.iter_mut().flatten().find_map(|conf| conf.downcast_mut::<Conf>());
    &mut found.expect("the http block has settings of every module").shared
}

impl Shared {
    /// Notes how lines for this file are gathered; `false` if it was said otherwise before.
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

/// A block without an `access_log` does what the block around it does, and a server
/// logs to the default file if nobody says anything. The http block itself serves
/// nothing: it must not make that file where every server has one of its own.
fn merge(conf: &mut dyn Any, parent: Option<&dyn Any>, builder: &mut Builder) -> Result<(), Diagnostic> {
    const OURS: &str = "settings of this module";
    let conf: &mut Conf = conf.downcast_mut().expect(OURS);
    let Some(parent) = parent else { return Ok(()) };
    let parent: &Conf = parent.downcast_ref().expect(OURS);
    if conf.logs.is_none() && !conf.is_off {
        conf.logs.clone_from(&parent.logs);
        conf.is_off = parent.is_off;
    }
    if conf.logs.is_none() && !conf.is_off {
        let path = builder.default_access_log_path();
        let file = builder.log_file(path.as_os_str().as_bytes(), None);
        let log = Log { place: LogPlace::File(file, None), format: combined(builder), condition: None };
        conf.logs = Some(Arc::new([log]));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::Path;

    use gale_config::{Files, Sources, parse_text};
    use gale_engine::module::Order;
    use gale_process::BuildRequest;

    use super::*;

    /// The settings of each block below `http`, in the order of the text, or the errors.
    fn read(text: &str) -> Result<Builder, Vec<String>> {
        let request = BuildRequest {
            program: "gale".to_owned(),
            configuration_path: "/etc/gale/gale.conf".into(),
            prefix: "/srv".into(),
            test: true,
            ..BuildRequest::default()
        };
        let mut builder = Builder::new(&ORDER, &request);
        let parsed = parse_text(&mut Sources::new(), &mut NoFiles, "test", text.into(), Path::new("/"));
        builder.walk(&parsed.statements, Contexts::MAIN, ScopeRef::Main);
        let errors: Vec<String> = builder.diagnostics.iter().map(|error| error.message.clone()).collect();
        if errors.is_empty() { Ok(builder) } else { Err(errors) }
    }

    /// The settings of a scope after `merge` with that of its parent.
    fn merged(builder: &mut Builder, scope: u32, parent: Option<&Conf>) -> Conf {
        let confs = builder.http_mut().confs(ScopeId(scope));
        let conf = confs.iter_mut().flatten().find_map(|conf| conf.downcast_mut::<Conf>());
        let mut conf = conf.map(std::mem::take).unwrap_or_default();
        merge(&mut conf, parent.map(|parent| parent as &dyn Any), builder).unwrap();
        conf
    }

    fn file(log: &Log) -> &DeferredLog {
        match &log.place {
            LogPlace::File(file, _) => file,
            LogPlace::Named(_) | LogPlace::Syslog(_) => panic!("no file"),
        }
    }

    fn paths(conf: &Conf) -> Vec<&str> {
        conf.logs().iter().map(|log| file(log).path().to_str().unwrap()).collect()
    }

    fn error(text: &str) -> String {
        match read(text) {
            Ok(_) => panic!("accepted: {text}"),
            Err(errors) => errors.join("; "),
        }
    }

    static ORDER: Order = Order { modules: &[&crate::http::core::MODULE, &MODULE], protocols: &[] };

    struct NoFiles;

    impl Files for NoFiles {
        fn read(&mut self, _: &Path) -> io::Result<Vec<u8>> {
            Err(io::ErrorKind::NotFound.into())
        }

        fn glob(&mut self, _: &Path) -> io::Result<Vec<PathBuf>> {
            Ok(Vec::new())
        }
    }

    #[test]
    fn wrong_formats_are_refused_in_nginx_s_words() {
        assert_eq!(error("http { log_format a escape=xml $uri; }"), "unknown log format escaping \"xml\"");
        assert_eq!(error("http { log_format a x; log_format a x; }"), "duplicate \"log_format\" name \"a\"");
        assert_eq!(error("http { log_format combined x; }"), "duplicate \"log_format\" name \"combined\"");
    }

    #[test]
    fn a_format_must_be_known_where_it_is_used() {
        assert!(read("http { log_format a x; server { access_log l A; location / { access_log l a; } } }").is_ok());
        assert_eq!(error("http { access_log l a; log_format a x; }"), "unknown log format \"a\"");
    }

    #[test]
    fn parameters_are_judged_in_nginx_s_words() {
        let message = |parameters: &str| error(&format!("http {{ access_log {parameters}; }}"));
        assert_eq!(message("off x"), "invalid parameter \"x\"");
        assert_eq!(message("l combined x=1"), "invalid parameter \"x=1\"");
        assert_eq!(message("l combined buffer=0"), "invalid buffer size \"0\"");
        assert_eq!(message("l combined buffer=4k flush=x"), "invalid flush time \"x\"");
        assert_eq!(message("l combined flush=1m"), "no buffer is defined for access_log \"l\"");
        assert_eq!(message("l combined gzip=0"), "invalid compression level \"0\"");
        assert_eq!(message("l combined gzip=10"), "invalid compression level \"10\"");
        assert_eq!(message("syslog:x"), "unknown syslog parameter \"x\"");
        assert_eq!(message("syslog:server=127.0.0.1 combined buffer=1k"), "logs to syslog cannot be buffered");
        assert_eq!(message("l$uri combined gzip"), "buffered logs cannot have variables in name");
    }

    #[test]
    fn a_file_has_one_buffer() {
        let twice = |one: &str, other: &str| {
            read(&format!("http {{ access_log l combined {one}; server {{ access_log /srv/l combined {other}; }} }}"))
        };
        assert!(twice("buffer=4k flush=1s", "flush=1s buffer=4096").is_ok());
        assert!(twice("buffer=4k", "").is_ok());
        let errors = twice("buffer=4k", "buffer=8k").err().unwrap();
        assert_eq!(errors, ["access_log \"/srv/l\" already defined with conflicting parameters"]);
    }

    #[test]
    fn what_a_block_says_takes_the_place_of_what_is_around_it() {
        let text = "http { access_log a; access_log b combined buffer=1m if=$uri;
                    server { location / { access_log c; } }
                    server { access_log off; access_log c; location / { } } }";
        let mut builder = read(text).unwrap();
        let http = merged(&mut builder, 0, None);
        assert_eq!(paths(&http), ["/srv/a", "/srv/b"]);
        let server = merged(&mut builder, 1, Some(&http));
        assert_eq!(paths(&server), ["/srv/a", "/srv/b"]);
        assert_eq!(paths(&merged(&mut builder, 2, Some(&server))), ["/srv/c"]);
        let off = merged(&mut builder, 3, Some(&http));
        assert!(off.logs().is_empty());
        assert!(merged(&mut builder, 4, Some(&off)).logs().is_empty());
    }

    #[test]
    fn the_default_log_is_that_of_a_server_that_says_nothing() {
        let mut builder = read("http { server { } server { access_log off; } }").unwrap();
        let http = merged(&mut builder, 0, None);
        assert!(http.logs.is_none());
        let server = merged(&mut builder, 1, Some(&http));
        assert_eq!(file(&server.logs()[0]).path(), builder.default_access_log_path());
        assert_eq!(server.logs()[0].format, combined(&mut builder));
        assert!(merged(&mut builder, 2, Some(&http)).logs().is_empty());
    }

    #[test]
    fn conditions_are_false_when_empty_or_zero() {
        assert!(is_false(b"") && is_false(b"0"));
        assert!(!is_false(b"00") && !is_false(b"1") && !is_false(b" "));
    }
}
