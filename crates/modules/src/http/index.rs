//! index: the file that is served for a directory.
//!   index FILE ...;          http, server, location
//! (<https://nginx.org/en/docs/http/ngx_http_index_module.html>)

use std::io;

use bstr::BStr;
use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_config::{Body, Contexts, Custom, Diagnostic, Setting, Statement, Takes};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::configuration::builder::InHttp;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::files::find_path;
use gale_http::request::files::open_files;
use gale_http::request::phases::{Flow, LocalBoxFuture, Phase, Wait};
use gale_http::variables::template::Template;
use gale_protocol::request::Method;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_index",
    directives: &[Directive {
        name: "index",
        contexts: Contexts::ANYWHERE,
        takes: Takes::AtLeast(1),
        body: Body::None,
        default: "",
        about: "Defines the files that are used as an index; index.html by default.",
        store: &Custom(index),
    }],
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart {
        handlers: &[(
            Phase::Content,
            &Wait { applies: |_: &Conf| true, first: only_directories, then: |request, conf| look(request, conf) },
        )],
        ..HttpPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    names: Setting<Vec<Template>>,
}

fn index(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let mut names = conf.names.take().unwrap_or_default();
    let last = statement.args.len() - 1;
    for (position, word) in statement.args.iter().enumerate() {
        if word.text.is_empty() {
            let message = format!("index \"{}\" in \"index\" directive is invalid", word.text);
            return Err(Diagnostic::emerg(message).at(word.span));
        }
        if word.text.starts_with(b"/") && position != last {
            let message = "only the last index in \"index\" directive should be absolute";
            builder.note([Diagnostic::warn(message).at(word.span)]);
        }
        names.push(builder.http_mut().template(word)?);
    }
    conf.names.set(names, Some(statement.span));
    Ok(())
}

fn merge(conf: &mut dyn std::any::Any, parent: Option<&dyn std::any::Any>, _: &mut Builder) -> Result<(), Diagnostic> {
    let conf: &mut Conf = conf.downcast_mut().expect("the index module's settings");
    if let Some(parent) = parent.and_then(|parent| parent.downcast_ref::<Conf>()) {
        conf.names.inherit(&parent.names);
    } else if !conf.names.is_set() {
        conf.names.set(vec![Template::constant(b"index.html")], None);
    }
    Ok(())
}

/// Passes on requests of other handlers than those for directories.
pub(super) fn only_directories<C>(request: &mut Request, _: &C) -> Option<Flow> {
    let asks_for_directory = request.uri.ends_with(b"/");
    let fits = matches!(request.method(), Method::Get | Method::Head | Method::Post);
    if asks_for_directory && fits { None } else { Some(Flow::Next) }
}

fn look<'a>(request: &'a mut Request, conf: &'a Conf) -> LocalBoxFuture<'a, Flow> {
    Box::pin(async move {
        let mut directory = Vec::with_capacity(128);
        if let Err(status) = find_path(request, &mut directory) {
            return Flow::Respond(status);
        }
        let mut directory_is_there = false;
        for name in conf.names.get() {
            let name = name.evaluate(request);
            if name.is_empty() {
                continue;
            }
            if name.starts_with(b"/") {
                return Flow::Redirect { uri: name, args: None };
            }
            let path = [&directory[..], &name].concat();
            match open_files::stat(request, &path).await {
                // As in nginx, a directory with the name of an index file leads to a redirect, too.
                Ok(_) => return Flow::Redirect { uri: [&request.uri[..], &name].concat(), args: None },
                Err(error) if is_absent(&error) => {
                    if !directory_is_there {
                        if let Some(status) = check_directory(request, &directory, &path).await {
                            return Flow::Respond(status);
                        }
                        directory_is_there = true;
                    }
                }
                Err(error) => return Flow::Respond(refusal(request, "stat", &path, &error)),
            }
        }
        Flow::Next
    })
}

/// Returns the status of the request if the directory itself does not exist; `path` is the index file in it.
async fn check_directory(request: &Request, directory: &[u8], path: &[u8]) -> Option<u16> {
    match open_files::stat_directory(request, directory).await {
        Ok(metadata) if metadata.is_directory() => None,
        Ok(_) => {
            request.log(Level::Alert, format_args!("\"{}\" is not a directory", BStr::new(directory)));
            Some(500)
        }
        Err(error) => Some(refusal(request, "stat", path, &error)),
    }
}

fn refusal(request: &Request, call: &str, path: &[u8], error: &io::Error) -> u16 {
    let (level, status) = match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR | libc::ENAMETOOLONG) => (Level::Error, 404),
        Some(libc::EACCES | libc::ELOOP) => (Level::Error, 403),
        _ => (Level::Crit, 500),
    };
    let (what, reason) = match status {
        404 => ("is not found", OsErrorText(error)),
        403 => ("is forbidden", OsErrorText(error)),
        _ => ("failed", OsErrorText(error)),
    };
    if status == 500 {
        request.log(level, format_args!("{call}() \"{}\" {what} {reason}", BStr::new(path)));
    } else if status != 404 || *request.scope().core.log_not_found.get() {
        request.log(level, format_args!("\"{}\" {what} {reason}", BStr::new(path)));
    }
    status
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT))
}
