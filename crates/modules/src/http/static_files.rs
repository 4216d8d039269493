//! static: serves files.
//!
//! There are no directives: `root` and `alias` map a URI to a file, and `sendfile` and others decide its delivery; all
//! of them belong to the core module.

use std::io;

use bstr::BStr;
use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_engine::module::Module;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::files::open_files::{self, Opened};
use gale_http::request::files::{find_path, set_content_type};
use gale_http::request::phases::{Flow, LocalBoxFuture, Phase, Wait};
use gale_protocol::request::Method;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_static",
    parts: &[&HttpPart {
        handlers: &[(
            Phase::Content,
            &Wait { applies: |_: &()| true, first: at_once, then: |request, _| serve(request) },
        )],
        ..HttpPart::EMPTY
    }],
    ..Module::EMPTY
};

/// Answers without waiting: refuses other methods, and opens a file that the kernel has in its cache.
fn at_once(request: &mut Request, _: &()) -> Option<Flow> {
    match request.method() {
        Method::Get | Method::Head | Method::Post if request.uri.ends_with(b"/") => return Some(Flow::Next),
        Method::Get | Method::Head | Method::Post => {}
        _ => return Some(Flow::Respond(405)),
    }
    let mut path = Vec::with_capacity(128);
    if let Err(status) = find_path(request, &mut path) {
        return Some(Flow::Respond(status));
    }
    let opened = open_files::try_open(request, &path)?;
    Some(opened_or_not(request, &path, opened))
}

fn serve(request: &mut Request) -> LocalBoxFuture<'_, Flow> {
    Box::pin(async move {
        let mut path = Vec::with_capacity(128);
        if let Err(status) = find_path(request, &mut path) {
            return Flow::Respond(status);
        }
        let opened = open_files::open(request, &path).await;
        opened_or_not(request, &path, opened)
    })
}

fn opened_or_not(request: &mut Request, path: &[u8], opened: io::Result<Opened>) -> Flow {
    match opened {
        Ok(file) => answer(request, file, path),
        Err(error) => Flow::Respond(refusal(request, path, &error)),
    }
}

/// Logs an error of `open` and returns nginx's status for it.
pub(super) fn refusal(request: &Request, path: &[u8], error: &io::Error) -> u16 {
    let (level, status) = match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR | libc::ENAMETOOLONG) => (Level::Error, 404),
        Some(libc::EACCES | libc::EMLINK | libc::ELOOP) => (Level::Error, 403),
        _ => (Level::Crit, 500),
    };
    if status != 404 || *request.scope().core.log_not_found.get() {
        request.log(level, format_args!("open() \"{}\" failed {}", BStr::new(path), OsErrorText(error)));
    }
    status
}

fn answer(request: &mut Request, file: Opened, path: &[u8]) -> Flow {
    if file.metadata.is_directory() {
        // A directory's own URI ends with a slash.
        return Flow::Respond(request.redirect_to_slash());
    }
    send(request, file, path)
}

/// Answers with this file, which is not a directory, under the requested name.
pub(super) fn send(request: &mut Request, file: Opened, path: &[u8]) -> Flow {
    let metadata = file.metadata;
    if !metadata.is_regular() {
        request.log(Level::Crit, format_args!("\"{}\" is not a regular file", BStr::new(path)));
        return Flow::Respond(404);
    }
    if request.method() == Method::Post {
        return Flow::Respond(405);
    }
    let modified = u64::try_from(metadata.modified_seconds).unwrap_or(0);
    request.response.status = 200;
    request.response.last_modified = Some(modified);
    request.response.content_length = Some(metadata.size);
    if *request.scope().core.etag.get() {
        request.response.set_etag(metadata.modified_seconds, metadata.size);
    }
    set_content_type(request);
    request.response.allows_ranges = true;
    Flow::Answer(file.into_body())
}
