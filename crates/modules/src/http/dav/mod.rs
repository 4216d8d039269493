//! dav: changes of files by the methods of WebDAV (RFC 4918) that need no XML.
//!   dav_methods off | METHOD ...;              http, server, location     PUT, DELETE, MKCOL, COPY, MOVE
//!   create_full_put_path on|off;               http, server, location
//!   dav_access user:RIGHTS [group:RIGHTS] [all:RIGHTS];     http, server, location
//!   min_delete_depth NUMBER;                   http, server, location
//! (<https://nginx.org/en/docs/http/ngx_http_dav_module.html>)
//!
//! A thread of the pool makes all changes on disk (`work.rs`), in the queue of writes. A change that was started is
//! completed even if the client leaves. A file is replaced as a whole: concurrent readers get the old or the new one.

mod work;

use std::any::Any;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use bstr::BStr;
use gale_base::http_date;
use gale_base::log_level::Level;
use gale_config::{Body as Block, Contexts, Diagnostic, One, Setting, Statement, Takes, Updated, slot, values};
use gale_engine::configuration::{Builder, Reach};
use gale_engine::module::{ConfType, Directive, Module};
use gale_files::likely_device;
use gale_http::configuration::settings::Alias;
use gale_http::files::placing::{Content, Target, directory_permissions, parse_permissions};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::Body;
use gale_http::request::configuration::Scope;
use gale_http::request::files::find_path;
use gale_http::request::phases::{Decision, Flow, Handler, LocalBoxFuture, Phase};
use gale_http::request::request_body::read_body_to_file;
use gale_protocol::request::{Framing, KnownHeader, Method};
use gale_protocol::uri;
use gale_protocol::uri::escape::{Class, escape};
use gale_runtime::default_pool;

use work::{Refusal, Skipped, Transfer};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_dav",
    directives: &[
        Directive {
            name: "dav_methods",
            contexts: Contexts::ANYWHERE,
            takes: Takes::AtLeast(1),
            body: Block::None,
            default: "off",
            about: "Allows HTTP and WebDAV methods that change files: PUT, DELETE, MKCOL, COPY and MOVE; off denies \
                    all.",
            store: &Updated { parse: methods, slot: slot!(Conf, methods) },
        },
        Directive {
            name: "create_full_put_path",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Flag,
            body: Block::None,
            default: "off",
            about: "Enables or disables creation of missing intermediate directories by PUT.",
            store: &One { parse: values::flag, slot: slot!(Conf, create_full_put_path) },
        },
        Directive {
            name: "dav_access",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Between(1, 3),
            body: Block::None,
            default: "user:rw",
            about: "Sets access permissions for newly created files and directories.",
            store: &One { parse: parse_permissions, slot: slot!(Conf, access) },
        },
        Directive {
            name: "min_delete_depth",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Block::None,
            default: "0",
            about: "Sets the minimum number of elements in the path of a DELETE request.",
            store: &One { parse: values::number, slot: slot!(Conf, min_delete_depth) },
        },
    ],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart { handlers: &[(Phase::Content, &Dav)], reach: Some(note_reach), ..HttpPart::EMPTY }],
};

#[derive(Default)]
struct Conf {
    methods: Setting<u32>,
    create_full_put_path: Setting<bool>,
    access: Setting<u32>,
    min_delete_depth: Setting<u64>,
}

const OFF: u32 = 0x01;
const PUT: u32 = 0x02;
const DELETE: u32 = 0x04;
const MKCOL: u32 = 0x08;
const COPY: u32 = 0x10;
const MOVE: u32 = 0x20;

fn methods(builder: &mut Builder, statement: &Statement, earlier: Option<&u32>) -> Result<u32, Diagnostic> {
    let choices = [("off", OFF), ("put", PUT), ("delete", DELETE), ("mkcol", MKCOL), ("copy", COPY), ("move", MOVE)];
    values::bitmask(statement, &choices, earlier, builder)
}

fn note_reach(conf: &dyn Any, scope: &Scope, reach: &mut Reach) {
    if Dav.applies(conf) {
        reach.writes(scope.core.root.get().known_path(), "dav_methods");
    }
}

struct Dav;

fn settings(conf: &dyn Any) -> &Conf {
    conf.downcast_ref().expect("a handler's settings are of its module's type")
}

impl Handler for Dav {
    fn applies(&self, conf: &dyn Any) -> bool {
        settings(conf).methods.get() & !OFF != 0
    }

    fn decide(&self, request: &mut Request, conf: &dyn Any) -> Decision {
        let method = match request.method() {
            Method::Put => PUT,
            Method::Delete => DELETE,
            Method::Mkcol => MKCOL,
            Method::Copy => COPY,
            Method::Move => MOVE,
            _ => 0,
        };
        if settings(conf).methods.get() & method == 0 { Decision::Flow(Flow::Next) } else { Decision::MustWait }
    }

    /// Keeps a change running without its client: half of a change is worse than one that the client does not see.
    fn outlives_client(&self, _: &Request, _: &dyn Any) -> bool {
        true
    }

    fn wait<'a>(&'a self, request: &'a mut Request, conf: &'a dyn Any) -> LocalBoxFuture<'a, Flow> {
        let conf = settings(conf);
        Box::pin(async move {
            let done = match request.method() {
                Method::Put => put(request, conf).await,
                Method::Delete => delete(request, conf).await,
                Method::Mkcol => make_collection(request, conf).await,
                _ => copy_or_move(request, conf).await,
            };
            match done {
                Ok(Done::Created { location }) => {
                    if location {
                        let mut location = Vec::with_capacity(request.uri.len());
                        escape(Class::Uri, &request.uri, &mut location);
                        request.response.location = location;
                    }
                    request.response.status = 201;
                    request.response.content_length = Some(0);
                    Flow::Answer(Body::Empty)
                }
                Ok(Done::Changed) => {
                    request.response.status = 204;
                    Flow::Answer(Body::Empty)
                }
                Err(status) => Flow::Respond(status),
            }
        })
    }
}

/// A successful result.
enum Done {
    /// 201, with a `Location` if `location` is set: the URI names the new resource.
    Created { location: bool },
    /// 204.
    Changed,
}

/// The error is a status; its reason has been logged.
type Answer<T> = Result<T, u16>;

/// Runs this in the pool, and logs an error.
async fn perform<T: Send + 'static>(
    request: &Request,
    path: PathBuf,
    task: impl FnOnce(&mut Skipped) -> Result<T, Refusal> + Send + 'static,
) -> Answer<T> {
    let running = default_pool().run_for(likely_device(&path).writes(), move || {
        let mut skipped = Skipped::default();
        let result = task(&mut skipped);
        (result, skipped)
    });
    let (result, skipped) = running.await.map_err(|refused| {
        request.log(Level::Error, format_args!("{refused}"));
        503_u16
    })?;
    for error in &skipped.errors {
        let (level, _) = work::judge(error.error(), 0);
        request.log(level, format_args!("{error}"));
    }
    if skipped.more > 0 {
        request.log(Level::Error, format_args!("{} more files failed", skipped.more));
    }
    result.map_err(|refusal| {
        request.log(refusal.level, format_args!("{}", refusal.text));
        refusal.status
    })
}

fn path_of(request: &Request) -> Answer<Vec<u8>> {
    let mut path = Vec::with_capacity(128);
    find_path(request, &mut path)?;
    // Slashes at the end mark a collection; the path of the file does not need them.
    while path.len() > 1 && path.ends_with(b"/") {
        path.pop();
    }
    Ok(path)
}

fn to_path(path: Vec<u8>) -> PathBuf {
    OsString::from_vec(path).into()
}

fn is_collection(uri: &[u8]) -> bool {
    uri.ends_with(b"/")
}

/// Logs the reason of a refusal and returns its status.
fn refuse<T>(request: &Request, status: u16, message: std::fmt::Arguments<'_>) -> Answer<T> {
    request.log(Level::Error, message);
    Err(status)
}

fn refuse_body(request: &Request, what: &str) -> Answer<()> {
    match request.parsed.framing {
        Framing::None | Framing::Length(0) => Ok(()),
        _ => refuse(request, 415, format_args!("{what} unsupported")),
    }
}

async fn put(request: &mut Request, conf: &Conf) -> Answer<Done> {
    if is_collection(&request.uri) {
        return refuse(request, 409, format_args!("cannot PUT to a collection"));
    }
    if request.header(KnownHeader::ContentRange).is_some() {
        return refuse(request, 501, format_args!("PUT with range is unsupported"));
    }
    // Checked first, so that no body is stored in vain.
    let path = to_path(path_of(request)?);
    let stored = read_body_to_file(request).await.map_err(|error| error.status())?;
    let modified = request.header(KnownHeader::Date).and_then(http_date::parse);
    let target = Target {
        path: path.clone(),
        access: *conf.access.get(),
        parents: conf.create_full_put_path.get().then_some(directory_permissions(*conf.access.get())),
        modified: modified.map(|seconds| UNIX_EPOCH + Duration::from_secs(seconds)),
        number: number(),
    };
    let upload = Content {
        name: stored.name().map(|name| name.to_path_buf()),
        memory: stored.memory(),
        file: stored.file().map(|file| (file, stored.file_length())),
    };
    let placed = perform(request, path, move |_| work::put(&upload, &target)).await?;
    if placed.has_taken_name {
        stored.keep();
    }
    Ok(if placed.is_new { Done::Created { location: true } } else { Done::Changed })
}

/// Returns a number for the name of a temporary file.
fn number() -> u32 {
    gale_runtime::random_u64() as u32
}

async fn delete(request: &mut Request, conf: &Conf) -> Answer<Done> {
    refuse_body(request, "DELETE with body is")?;
    if elements(&request.uri) < *conf.min_delete_depth.get() {
        let slashes = slashes(&request.uri);
        return refuse(request, 409, format_args!("insufficient URI depth:{slashes} to DELETE"));
    }
    let path = to_path(path_of(request)?);
    let depth = Depth::read(request);
    let is_collection = is_collection(&request.uri);
    if is_collection && depth.unwrap_or(Depth::Infinity) != Depth::Infinity {
        return refuse(request, 400, format_args!("\"Depth\" header must be infinity"));
    }
    if !is_collection && matches!(depth, Some(Depth::One | Depth::Invalid)) {
        return refuse(request, 400, format_args!("\"Depth\" header must be 0 or infinity"));
    }
    let own = path.clone();
    perform(request, path, move |skipped| work::delete(&own, is_collection, skipped)).await?;
    Ok(Done::Changed)
}

fn slashes(uri: &[u8]) -> u64 {
    uri.iter().filter(|&&byte| byte == b'/').count() as u64
}

/// Returns the number of elements of a path; a slash at its end begins none.
fn elements(uri: &[u8]) -> u64 {
    slashes(uri) - u64::from(is_collection(uri))
}

async fn make_collection(request: &mut Request, conf: &Conf) -> Answer<Done> {
    refuse_body(request, "MKCOL with body is")?;
    if !is_collection(&request.uri) {
        return refuse(request, 409, format_args!("MKCOL can create a collection only"));
    }
    let path = to_path(path_of(request)?);
    let (own, access) = (path.clone(), directory_permissions(*conf.access.get()));
    perform(request, path, move |_| work::make_collection(&own, access)).await?;
    Ok(Done::Created { location: true })
}

async fn copy_or_move(request: &mut Request, conf: &Conf) -> Answer<Done> {
    refuse_body(request, "COPY and MOVE with body are")?;
    let (given, uri) = destination(request)?;
    let is_collection = is_collection(&request.uri);
    let (own_uri, given) = (request.uri.clone(), BStr::new(&given));
    if is_collection != uri.ends_with(b"/") {
        let message = "should be either collections or non-collections";
        let own_uri = BStr::new(&own_uri);
        return refuse(
            request,
            409,
            format_args!("both URI \"{own_uri}\" and \"Destination\" URI \"{given}\" {message}"),
        );
    }
    if let Some(Alias::Prefix(prefix)) = &request.scope().core.root.get().alias
        && !uri.starts_with(prefix)
    {
        return refuse(request, 400, format_args!("client sent invalid \"Destination\" header: \"{given}\""));
    }
    let is_move = request.method() == Method::Move;
    let has_members = match Depth::read(request).unwrap_or(Depth::Infinity) {
        Depth::Infinity => true,
        Depth::Zero if !is_move => false,
        _ => {
            let wanted = if is_move { "infinity" } else { "0 or infinity" };
            return refuse(request, 400, format_args!("\"Depth\" header must be {wanted}"));
        }
    };
    let overwrites = overwrites(request)?;
    let from = path_of(request)?;
    request.uri = uri;
    let to = path_of(request);
    request.uri = own_uri;
    let to = to?;
    check_paths(request, &from, &to, given)?;
    let transfer = Transfer {
        from: to_path(from),
        to: to_path(to),
        is_move,
        is_collection,
        has_members,
        overwrites,
        parents: directory_permissions(*conf.access.get()),
        number: number(),
        is_collection_text: format!("\"{}\" is collection", BStr::new(&request.uri)),
        to_collection_text: to_collection_text(request, given),
    };
    perform(request, transfer.to.clone(), move |skipped| work::transfer(&transfer, skipped)).await?;
    Ok(if is_collection { Done::Created { location: false } } else { Done::Changed })
}

fn to_collection_text(request: &Request, given: &BStr) -> String {
    let (uri, method) = (BStr::new(&request.uri), BStr::new(request.method_name()));
    format!("\"{uri}\" could not be {method}ed to collection \"{given}\"")
}

/// Returns the `Destination` field as sent, and the path in it.
fn destination(request: &Request) -> Answer<(Vec<u8>, Vec<u8>)> {
    let Some(given) = request.header(KnownHeader::Destination) else {
        return refuse(request, 400, format_args!("client sent no \"Destination\" header"));
    };
    let shown = BStr::new(given);
    let target = if given.starts_with(b"/") {
        Some(given)
    } else if request.host.is_empty() {
        return refuse(request, 400, format_args!("client sent no \"Host\" header"));
    } else {
        match split_url(given, request.exchange().scheme().name(), &request.host) {
            Url::Path(path) => Some(path),
            Url::Invalid => None,
            Url::Elsewhere => {
                let message = "is handled by different repository than the source URI";
                return refuse(request, 400, format_args!("\"Destination\" URI \"{shown}\" {message}"));
            }
        }
    };
    match target.and_then(uri::split_unsafe) {
        Some((path, _)) => Ok((given.to_vec(), without_empty_segments(&path))),
        None => refuse(request, 400, format_args!("client sent invalid \"Destination\" header: \"{shown}\"")),
    }
}

#[derive(PartialEq, Eq, Debug)]
enum Url<'u> {
    Path(&'u [u8]),
    Elsewhere,
    Invalid,
}

/// Returns the path of a URL of this host. The port is not compared, as a proxy may have another one.
fn split_url<'u>(url: &'u [u8], scheme: &str, host: &[u8]) -> Url<'u> {
    let Some(rest) = url.strip_prefix(scheme.as_bytes()).and_then(|rest| rest.strip_prefix(b"://")) else {
        return Url::Invalid;
    };
    let slash = rest.iter().position(|&byte| byte == b'/');
    let (authority, path) = rest.split_at(slash.unwrap_or(rest.len()));
    let port = match authority.split_at_checked(host.len()) {
        Some((own, port)) if own.eq_ignore_ascii_case(host) => port,
        _ => return Url::Elsewhere,
    };
    match port {
        [] => {}
        [b':', digits @ ..] if digits.iter().all(u8::is_ascii_digit) => {}
        _ => return Url::Elsewhere,
    }
    if path.is_empty() { Url::Invalid } else { Url::Path(path) }
}

/// Removes empty segments and segments `.`. The path begins with a slash.
fn without_empty_segments(path: &[u8]) -> Vec<u8> {
    let mut clean = Vec::with_capacity(path.len());
    let segments = path.split(|&byte| byte == b'/').filter(|segment| !matches!(segment, [] | [b'.']));
    for segment in segments {
        clean.push(b'/');
        clean.extend_from_slice(segment);
    }
    if path.ends_with(b"/") || path.ends_with(b"/.") {
        clean.push(b'/');
    }
    clean
}

/// Checks by the texts of the paths that neither is, or lies in, the other one; the thread checks the file system, too.
fn check_paths(request: &Request, from: &[u8], to: &[u8], given: &BStr) -> Answer<()> {
    let lies_in = |inner: &[u8], outer: &[u8]| inner.strip_prefix(outer).is_some_and(|rest| rest.starts_with(b"/"));
    if from == to {
        let uri = BStr::new(&request.uri);
        let message = "point to the same location";
        return refuse(request, 403, format_args!("both URI \"{uri}\" and \"Destination\" URI \"{given}\" {message}"));
    }
    if is_collection(&request.uri) && (lies_in(from, to) || lies_in(to, from)) {
        return refuse(request, 403, format_args!("{}", to_collection_text(request, given)));
    }
    Ok(())
}

/// Depth of a request for a collection (RFC 4918 §10.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Depth {
    Zero,
    One,
    Infinity,
    Invalid,
}

impl Depth {
    fn read(request: &Request) -> Option<Depth> {
        let value = request.header(KnownHeader::Depth)?;
        Some(match value {
            b"0" => Depth::Zero,
            b"1" => Depth::One,
            b"infinity" => Depth::Infinity,
            _ => {
                let shown = BStr::new(value);
                request.log(Level::Error, format_args!("client sent invalid \"Depth\" header: \"{shown}\""));
                Depth::Invalid
            }
        })
    }
}

/// Returns `true` if the destination may be overwritten (RFC 4918 §10.6).
fn overwrites(request: &Request) -> Answer<bool> {
    let mut fields = request.fields().filter(|(_, name, _)| name.eq_ignore_ascii_case(b"Overwrite"));
    match fields.next().map(|(_, _, value)| value) {
        None | Some(b"T" | b"t") => Ok(true),
        Some(b"F" | b"f") => Ok(false),
        Some(value) => {
            let shown = BStr::new(value);
            refuse(request, 400, format_args!("client sent invalid \"Overwrite\" header: \"{shown}\""))
        }
    }
}
