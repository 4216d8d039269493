//! try_files: the first existing file of several.
//!   try_files FILE ... URI;   try_files FILE ... =CODE;          server, location
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html#try_files>)
//!
//! A FILE is searched below `root` or `alias`. With `alias`, a FILE with variables may repeat the prefix of the
//! location, as `$uri` does, and the prefix is removed; a FILE without variables is used unchanged.

use std::io;

use bstr::BStr;
use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_base::units;
use gale_config::{Body, Contexts, Custom, Diagnostic, Statement, Takes};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_files::FileMetadata;
use gale_http::configuration::builder::InHttp;
use gale_http::configuration::settings::Alias;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::files::open_files;
use gale_http::request::files::{append_path, may_lead_out};
use gale_http::request::phases::{Flow, LocalBoxFuture, Phase, Wait};
use gale_http::variables::template::Template;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_try_files",
    directives: &[Directive {
        name: "try_files",
        contexts: Contexts::SERVER.or(Contexts::LOCATION),
        takes: Takes::AtLeast(2),
        body: Body::None,
        default: "",
        about: "Checks files in the given order and serves the first that exists; otherwise the last argument, a URI \
                or =CODE, applies.",
        store: &Custom(try_files),
    }],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart {
        handlers: &[(
            Phase::PreContent,
            &Wait {
                applies: |conf: &Conf| conf.fallback.is_some(),
                first: look_at_once,
                then: |request, conf| look(request, conf),
            },
        )],
        ..HttpPart::EMPTY
    }],
};

/// Not inherited: a location without `try_files` tests no files.
#[derive(Default)]
struct Conf {
    candidates: Vec<Candidate>,
    fallback: Option<Fallback>,
}

struct Candidate {
    name: Template,
    /// Written with a slash at the end: the file has to be a directory.
    is_directory: bool,
}

enum Fallback {
    Status(u16),
    /// A URI or a named location.
    Target(Template),
}

fn try_files(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if conf.fallback.is_some() {
        return Err(statement.directive_error("is duplicate"));
    }
    let (last, candidates) = statement.args.split_last().expect("two arguments at least");
    for word in candidates {
        if may_lead_out(&word.text) {
            let message = format!("file \"{}\" of \"try_files\" is never found", word.text);
            let hint = "its \"..\" may lead out of the directory set by \"root\" or \"alias\"";
            builder.note([Diagnostic::warn(message).at(word.span).hint(hint)]);
        }
        let mut word = word.clone();
        let is_directory = word.text.len() > 1 && word.text.ends_with(b"/");
        if is_directory {
            word.text.pop();
        }
        conf.candidates.push(Candidate { name: builder.http_mut().template(&word)?, is_directory });
    }
    conf.fallback = Some(match last.text.strip_prefix(b"=") {
        Some(code) => match units::parse_number(code).and_then(|code| u16::try_from(code).ok()) {
            Some(status @ (0 | 200..=999)) => Fallback::Status(status),
            _ => return Err(Diagnostic::emerg(format!("invalid code \"{}\"", last.text)).at(last.span)),
        },
        None => Fallback::Target(builder.http_mut().template(last)?),
    });
    Ok(())
}

/// Tests the files as far as the kernel can answer from its cache. Returns `None` if one has to wait.
fn look_at_once(request: &mut Request, conf: &Conf) -> Option<Flow> {
    let mut path = Vec::with_capacity(128);
    for candidate in &conf.candidates {
        let Some(name) = candidate.name_and_path(request, &mut path) else { continue };
        let found = match candidate.is_directory {
            true => open_files::try_stat_directory(request, &path)?,
            false => open_files::try_stat(request, &path)?,
        };
        if let Some(flow) = candidate.take(request, name, &path, found) {
            return Some(flow);
        }
    }
    Some(fall_back(request, conf.fallback.as_ref().expect("a location with this handler has the setting")))
}

fn look<'a>(request: &'a mut Request, conf: &'a Conf) -> LocalBoxFuture<'a, Flow> {
    Box::pin(async move {
        let mut path = Vec::with_capacity(128);
        for candidate in &conf.candidates {
            let Some(name) = candidate.name_and_path(request, &mut path) else { continue };
            let found = match candidate.is_directory {
                true => open_files::stat_directory(request, &path).await,
                false => open_files::stat(request, &path).await,
            };
            if let Some(flow) = candidate.take(request, name, &path, found) {
                return flow;
            }
        }
        fall_back(request, conf.fallback.as_ref().expect("a location with this handler has the setting"))
    })
}

impl Candidate {
    /// Returns the name below the directory, and appends its path. Returns `None` for a name that no file can have.
    fn name_and_path(&self, request: &Request, path: &mut Vec<u8>) -> Option<Vec<u8>> {
        let mut name = Vec::with_capacity(64);
        path.clear();
        if !self.name.append_path(request, &mut name) {
            return None;
        }
        if let Some(Alias::Prefix(prefix)) = &request.scope().core.root.get().alias
            && self.name.as_constant().is_none()
            && name.starts_with(prefix)
        {
            name.drain(..prefix.len());
        }
        (append_path(request, &name, path) && !name.contains(&0)).then_some(name)
    }

    /// Continues with this file if it is of the wanted kind. Returns `None` if the next one has to be tested.
    fn take(&self, request: &mut Request, name: Vec<u8>, path: &[u8], found: io::Result<FileMetadata>) -> Option<Flow> {
        let metadata = match found {
            Ok(metadata) => metadata,
            Err(error) => return refusal(request, path, &error),
        };
        if metadata.is_directory() != self.is_directory {
            return None;
        }
        // The path of the directory is the alias itself then, whatever the name.
        if !self.is_directory || request.scope().core.root.get().alias != Some(Alias::Whole) {
            request.uri = found_uri(request, name);
            request.routing.adds_uri_to_alias = true;
        }
        Some(Flow::Next)
    }
}

/// Handles an error. An error of the kernel counts as "not found", and is logged unless it means just that. If the
/// kernel was not asked, since a pool is full, nothing is known about the path, and the request fails.
fn refusal(request: &Request, path: &[u8], error: &io::Error) -> Option<Flow> {
    let number = error.raw_os_error();
    if !matches!(number, Some(libc::ENOENT | libc::ENOTDIR | libc::ENAMETOOLONG)) {
        request.log(Level::Crit, format_args!("stat() \"{}\" failed {}", BStr::new(path), OsErrorText(error)));
    }
    number.is_none().then_some(Flow::Respond(500))
}

/// Returns the URI of the file. With `alias` the name replaces the part behind the location's prefix.
fn found_uri(request: &Request, name: Vec<u8>) -> Vec<u8> {
    match &request.scope().core.root.get().alias {
        Some(Alias::Prefix(prefix)) => [&prefix[..], &name].concat(),
        _ => name,
    }
}

/// Removes the location's prefix from the last parameter. With `alias`, nginx does so for a parameter with variables,
/// as it does for names. Configurations therefore write the prefix twice (`/app//app/index.php?$args`) and rely on
/// that. A prefix that is written once stays, since no file could be found by the rest.
fn take_off_repeated_prefix(request: &Request, target: &mut Vec<u8>) {
    let Some(Alias::Prefix(prefix)) = &request.scope().core.root.get().alias else { return };
    let is_repeated = target.strip_prefix(&**prefix).is_some_and(|rest| {
        let is_uri = |text: &[u8]| text.starts_with(b"/");
        is_uri(rest) && (prefix.ends_with(b"/") || rest.strip_prefix(&**prefix).is_some_and(is_uri))
    });
    if is_repeated {
        target.drain(..prefix.len());
    }
}

fn fall_back(request: &Request, fallback: &Fallback) -> Flow {
    match fallback {
        Fallback::Status(status) => Flow::Respond(*status),
        Fallback::Target(target) => {
            let has_variables = target.as_constant().is_none();
            let mut target = target.evaluate(request);
            if has_variables {
                take_off_repeated_prefix(request, &mut target);
            }
            if let Some(name) = target.strip_prefix(b"@") {
                return Flow::Named(name.into());
            }
            Flow::redirect_to(target)
        }
    }
}
