//! gzip_static: sends a precompressed file in place of the requested one.
//!   gzip_static on|off|always;                               http, server, location
//! (<https://nginx.org/en/docs/http/ngx_http_gzip_static_module.html>)
//!
//! Sends `FILE.gz` if it exists. FILE itself is not looked at: it may be missing or newer.

use std::io;

use gale_config::{Body as BlockBody, Contexts, Diagnostic, One, Setting, Statement, Takes, slot, values};
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::files::find_path;
use gale_http::request::files::open_files::{self, Opened};
use gale_http::request::phases::{Flow, LocalBoxFuture, Phase, Wait};
use gale_protocol::request::Method;
use gale_protocol::response::ResponseField;

use super::{gzip, static_files};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_gzip_static",
    directives: &[Directive {
        name: "gzip_static",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: BlockBody::None,
        default: "off",
        about: "Enables (on, always) or disables sending FILE.gz instead of FILE; on only to clients that support \
                gzip.",
        store: &One { parse: which, slot: slot!(Conf, gzip_static) },
    }],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart {
        handlers: &[(
            Phase::Content,
            &Wait { applies: |conf: &Conf| *conf.gzip_static.get() != For::Nobody, first: at_once, then: serve },
        )],
        ..HttpPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    gzip_static: Setting<For>,
}

/// Clients that get the compressed file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum For {
    Nobody,
    Accepting,
    Everybody,
}

fn which(statement: &Statement) -> Result<For, Diagnostic> {
    values::enumeration(statement, &[("off", For::Nobody), ("on", For::Accepting), ("always", For::Everybody)])
}

/// Answers without waiting: passes on requests of other handlers, and opens a file that the kernel has in its cache.
fn at_once(request: &mut Request, conf: &Conf) -> Option<Flow> {
    let path = match path_of_compressed(request, conf) {
        Ok(path) => path,
        Err(flow) => return Some(flow),
    };
    let opened = open_files::try_open(request, &path)?;
    Some(opened_or_not(request, conf, &path, opened))
}

fn serve<'a>(request: &'a mut Request, conf: &'a Conf) -> LocalBoxFuture<'a, Flow> {
    Box::pin(async move {
        match path_of_compressed(request, conf) {
            Ok(path) => {
                let opened = open_files::open(request, &path).await;
                opened_or_not(request, conf, &path, opened)
            }
            Err(flow) => flow,
        }
    })
}

fn path_of_compressed(request: &mut Request, conf: &Conf) -> Result<Vec<u8>, Flow> {
    if !matches!(request.method(), Method::Get | Method::Head) || request.uri.ends_with(b"/") {
        return Err(Flow::Next);
    }
    // A client that does not accept gzip may still need `Vary`.
    if !is_for(request, conf) && !gzip::has_vary(request) {
        return Err(Flow::Next);
    }
    let mut path = Vec::with_capacity(128);
    if let Err(status) = find_path(request, &mut path) {
        return Err(Flow::Respond(status));
    }
    path.extend_from_slice(b".gz");
    Ok(path)
}

fn is_for(request: &Request, conf: &Conf) -> bool {
    *conf.gzip_static.get() == For::Everybody || gzip::is_accepted(request)
}

/// Answers with the opened file. A missing or unreadable file leaves the request to later modules.
fn opened_or_not(request: &mut Request, conf: &Conf, path: &[u8], opened: io::Result<Opened>) -> Flow {
    let file = match opened {
        Ok(file) => file,
        Err(error) => {
            let is_missing = matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::ENAMETOOLONG));
            if !is_missing {
                static_files::refusal(request, path, &error);
            }
            return Flow::Next;
        }
    };
    if *conf.gzip_static.get() == For::Accepting {
        gzip::note_vary(request);
        if !is_for(request, conf) {
            return Flow::Next;
        }
    }
    if file.metadata.is_directory() {
        return Flow::Next;
    }
    let flow = static_files::send(request, file, path);
    if matches!(flow, Flow::Answer(_)) {
        request.response.add(ResponseField::ContentEncoding, b"gzip");
    }
    flow
}
