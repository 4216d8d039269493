//! api: the server's state as JSON over HTTP, in the form of nginx's commercial edition.
//!   api [write=on|off];          location
//! (<https://nginx.org/en/docs/http/ngx_http_api_module.html>, version 9; docs/api.yaml has it as OpenAPI)
//!
//! `tree` has everything that can be read and reset, `upstreams` the servers of groups, which can be changed. The
//! location's access rules control access.

mod answer;
mod own;
mod tree;
mod upstreams;

use std::future::poll_fn;
use std::sync::Arc;
use std::time::SystemTime;

use bstr::ByteSlice;
use gale_base::log_level::Level;
use gale_config::{Body as BlockBody, Contexts, Custom, Diagnostic, Statement, Takes};
use gale_engine::configuration::{Builder, Configuration};
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::phases::{Decision, Flow, Handler, LocalBoxFuture, Phase};
use gale_http::request::request_body::read_body;
use gale_protocol::request::Method;
use gale_runtime::default_pool;
use serde_json::{Value, json};

use answer::{Fault, send, send_nothing, send_text};
use tree::Fields;
pub(super) use tree::{ROOTS, View};

use crate::shared::limits::invalid_parameter;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_api",
    directives: &[Directive {
        name: "api",
        contexts: Contexts::LOCATION,
        takes: Takes::Between(0, 1),
        body: BlockBody::None,
        default: "",
        about: "Enables the REST API in the surrounding location; write=on allows changes.",
        store: &Custom(api),
    }],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart { handlers: &[(Phase::Content, &Api)], ..HttpPart::EMPTY }],
};

/// Supported versions of nginx's API; all have the same form.
const VERSIONS: std::ops::RangeInclusive<u32> = 1..=9;

/// Maximum length of a request's body, in bytes: a list of ten thousand servers has about one megabyte.
const BODY_MAX: u64 = 8 << 20;

/// Not inherited, as in nginx: a location's content handler is its own.
#[derive(Default)]
struct Conf {
    is_on: bool,
    is_writable: bool,
}

fn api(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if conf.is_on {
        return Err(statement.directive_error("is duplicate"));
    }
    conf.is_on = true;
    conf.is_writable = match statement.args.first() {
        None => false,
        Some(word) => match &**word.text {
            b"write=on" => true,
            b"write=off" => false,
            _ => return Err(invalid_parameter(word)),
        },
    };
    if conf.is_writable {
        // Servers may be added with any port.
        builder.reach.connects_to_any_port("api write=on");
    }
    Ok(())
}

struct Api;

fn conf_of(conf: &dyn std::any::Any) -> &Conf {
    conf.downcast_ref().expect("a handler's settings are of its module's type")
}

impl Handler for Api {
    fn applies(&self, conf: &dyn std::any::Any) -> bool {
        conf_of(conf).is_on
    }

    fn decide(&self, _: &mut Request, _: &dyn std::any::Any) -> Decision {
        Decision::MustWait
    }

    fn outlives_client(&self, _: &Request, _: &dyn std::any::Any) -> bool {
        // A change that was started must be completed.
        true
    }

    fn wait<'a>(&'a self, request: &'a mut Request, conf: &'a dyn std::any::Any) -> LocalBoxFuture<'a, Flow> {
        let is_writable = conf_of(conf).is_writable;
        Box::pin(async move {
            let behind = behind_location(request).to_vec();
            answer(request, &behind, is_writable).await
        })
    }
}

/// Returns the path behind the location's name.
pub(super) fn behind_location(request: &Request) -> &[u8] {
    request.uri.strip_prefix(&*request.scope().name).unwrap_or(&request.uri)
}

/// Sends the API's response for the path that continues with `behind`.
pub(super) async fn answer(request: &mut Request, behind: &[u8], is_writable: bool) -> Flow {
    match find(request, behind, is_writable).await {
        Ok(flow) => flow,
        Err(fault) => fault.send(request),
    }
}

/// Sends everything that the dashboard shows, as one object whose names are the API's paths, and `write`: whether the
/// API at the dashboard accepts changes.
pub(super) async fn answer_all(request: &mut Request, is_writable: bool) -> Flow {
    if !matches!(request.method(), Method::Get | Method::Head) {
        return Fault::method().send(request);
    }
    let view = view(request);
    let tell = move || {
        let mut all = tree::dashboard(&view);
        all.insert("write".to_owned(), is_writable.into());
        Value::Object(all).to_string()
    };
    match default_pool().run(tell).await {
        Ok(text) => send_text(request, 200, text),
        Err(error) => upstreams::overloaded(&error).send(request),
    }
}

/// Finds and performs the requested operation.
async fn find(request: &mut Request, behind: &[u8], is_writable: bool) -> Result<Flow, Fault> {
    let changes = match request.method() {
        Method::Get | Method::Head => false,
        Method::Post | Method::Put | Method::Patch | Method::Delete if is_writable => true,
        _ => return Err(Fault::method()),
    };
    if changes {
        check_origin(request)?;
    }
    let parts = parts(request, behind);
    let [version, path @ ..] = parts.as_slice() else {
        return only_read(changes).map(|()| send(request, 200, &json!(VERSIONS.collect::<Vec<_>>())));
    };
    let is_known = version.parse().is_ok_and(|number: u32| VERSIONS.contains(&number));
    if !is_known {
        return Err(Fault::new(404, "unknown version", "UnknownVersion"));
    }
    let view = view(request);
    let names: Vec<&str> = path.iter().map(String::as_str).collect();
    if let [protocol @ ("http" | "stream"), "upstreams", name, "servers", rest @ ..] = names.as_slice() {
        let is_stream = *protocol == "stream";
        if is_stream && !view.has_stream() {
            return Err(Fault::path());
        }
        let group = view.group(name, is_stream)?;
        return upstreams::answer_servers(request, &group, rest).await;
    }
    match request.method() {
        Method::Get | Method::Head => read(request, view, path).await,
        Method::Delete => tree::reset(&view, &names).map(|()| send_nothing(request)),
        _ => tree::read(&view, &names, &Fields::All).and(Err(Fault::method())),
    }
}

/// Refuses requests that a page of another site has caused: a browser sends such a POST without asking the user, and
/// with the user's credentials for this site. (<https://www.w3.org/TR/fetch-metadata/>; RFC 6454, section 7)
fn check_origin(request: &Request) -> Result<(), Fault> {
    let field = |name: &[u8]| {
        let mut found = request.fields().filter(|(_, found, _)| found.eq_ignore_ascii_case(name));
        found.next().map(|(_, _, value)| value)
    };
    let is_own = match (field(b"sec-fetch-site"), field(b"origin")) {
        (Some(site), _) => matches!(site, b"same-origin" | b"none"),
        (None, Some(origin)) => {
            let authority = origin.split_once_str("://").map(|(_, authority)| authority);
            authority.zip(field(b"host")).is_some_and(|(origin, host)| origin.eq_ignore_ascii_case(host))
        }
        // The client is not a browser.
        (None, None) => true,
    };
    if is_own { Ok(()) } else { Err(Fault::new(403, "the request comes from another site", "CrossSite")) }
}

/// Returns the parts of the path behind the location's name. An escaped slash in the request is part of a name; in a
/// rewritten path, the difference is lost.
fn parts(request: &Request, behind: &[u8]) -> Vec<String> {
    let sent = as_sent(request.target(), behind);
    let parts = sent.unwrap_or_else(|| behind.split(|&byte| byte == b'/').map(<[u8]>::to_vec).collect());
    parts.iter().filter(|part| !part.is_empty()).map(|part| part.to_str_lossy().into_owned()).collect()
}

/// Returns the segments of the request's target, decoded, that correspond to `behind`, the end of the decoded path with
/// merged slashes. Returns `None` if the target does not end with it.
///
/// ```text
///   target   /api/9/http/upstreams/a%2Fb/servers?x     compared from the end: a percent sign shows an escape,
///   behind        9/http/upstreams/a/b/servers         since it occurs nowhere else
/// ```
fn as_sent(target: &[u8], behind: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut target = target.split(|byte| matches!(byte, b'?' | b'#')).next().unwrap_or_default();
    let mut behind = behind;
    let (mut parts, mut part, mut last) = (Vec::new(), Vec::new(), None);
    while let [before @ .., wanted] = behind {
        let (byte, is_escaped) = match target {
            [rest @ .., b'%', high, low] => {
                target = rest;
                (u8::from_str_radix(std::str::from_utf8(&[*high, *low]).ok()?, 16).ok()?, true)
            }
            [rest @ .., byte] => {
                target = rest;
                (*byte, false)
            }
            [] => return None,
        };
        if byte == *wanted {
            behind = before;
        } else if (byte, last) != (b'/', Some(b'/')) {
            return None;
        }
        if byte == b'/' && !is_escaped {
            parts.push(std::mem::take(&mut part));
        } else {
            part.push(byte);
        }
        last = Some(byte);
    }
    parts.push(part);
    parts.iter_mut().for_each(|part| part.reverse());
    parts.reverse();
    Some(parts)
}

/// Returns the path as sent, with its escapes, and without a slash at its end.
fn path_as_sent(request: &Request) -> &[u8] {
    let target = request.target_in_origin_form();
    let path = target.split(|byte| matches!(byte, b'?' | b'#')).next().unwrap_or_default();
    let path = if as_sent(path, &request.uri).is_some() { path } else { &request.uri };
    path.strip_suffix(b"/").unwrap_or(path)
}

pub(super) fn view(request: &Request) -> View {
    View {
        configuration: Arc::clone(request.configuration().whole()),
        now: gale_runtime::now(),
        wall: gale_runtime::wall(),
        address: request.exchange().local_address().map(ToString::to_string).unwrap_or_default(),
    }
}

/// Returns the object at one of [`ROOTS`], if there is one.
pub(super) fn read_root(view: &View, root: &[&str]) -> Option<Value> {
    tree::read(view, root, &Fields::All).ok()
}

/// Returns everything that the dashboard shows, for the control socket: it runs in a thread of its own, not on a loop.
pub(crate) fn figures(configuration: &Arc<Configuration>) -> String {
    let view = View {
        configuration: Arc::clone(configuration),
        now: gale_runtime::now_anywhere(),
        wall: SystemTime::now(),
        address: String::new(),
    };
    Value::Object(tree::dashboard(&view)).to_string()
}

/// Sends the object at a path. A long one is built in a thread, so that no loop is blocked.
async fn read(request: &mut Request, view: View, path: &[String]) -> Result<Flow, Fault> {
    let fields = Fields::of(argument(&request.args, b"fields").as_deref());
    let is_long = tree::may_be_long(&path.iter().map(String::as_str).collect::<Vec<_>>());
    let path = path.to_vec();
    let tell = move || {
        let path: Vec<&str> = path.iter().map(String::as_str).collect();
        tree::read(&view, &path, &fields).map(|value| value.to_string())
    };
    let text = match is_long {
        true => default_pool().run(tell).await.map_err(|error| upstreams::overloaded(&error))?,
        false => tell(),
    };
    text.map(|text| send_text(request, 200, text))
}

/// Returns the decoded value of an argument of the request.
fn argument(args: &[u8], name: &[u8]) -> Option<Vec<u8>> {
    let value = args.split(|&byte| byte == b'&').find_map(|pair| {
        let (found, value) = pair.split_once_str("=").unwrap_or((pair, b""));
        (found == name).then_some(value)
    })?;
    let mut decoded = Vec::with_capacity(value.len());
    let mut rest = value;
    while let [first, behind @ ..] = rest {
        let digits = behind.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = digits.filter(|_| *first == b'%').and_then(|digits| u8::from_str_radix(digits, 16).ok());
        decoded.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &behind[2..] } else { behind };
    }
    Some(decoded)
}

fn only_read(changes: bool) -> Result<(), Fault> {
    if changes { Err(Fault::method()) } else { Ok(()) }
}

async fn body(request: &mut Request) -> Result<Vec<u8>, Fault> {
    let stored = read_body(request).await.map_err(|error| Fault::new(error.status(), "no body", "BodyError"))?;
    if stored.length() > BODY_MAX {
        return Err(Fault::new(413, "body too large", "BodyTooLarge"));
    }
    let mut body = Vec::new();
    let Some(mut reader) = stored.read(..) else { return Ok(body) };
    loop {
        match poll_fn(|context| reader.poll_read(context, 64 * 1024)).await {
            Ok(Some(bytes)) => body.extend_from_slice(&bytes),
            Ok(None) => return Ok(body),
            Err(error) => {
                request.log(Level::Crit, format_args!("{error} while reading the request's body"));
                return Err(Fault::new(500, "internal error", "InternalError"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::as_sent;

    #[test]
    fn a_slash_that_came_escaped_is_part_of_a_name() {
        let parts = |target: &str, behind: &str| -> Option<Vec<String>> {
            let parts = as_sent(target.as_bytes(), behind.as_bytes())?;
            Some(parts.into_iter().map(|part| String::from_utf8(part).expect("text")).collect())
        };
        for (target, behind, expected) in [
            ("/api/9/http?fields=a/b", "9/http", Some(vec!["9", "http"])),
            ("/api/9/a%2fb/servers", "9/a/b/servers", Some(vec!["9", "a/b", "servers"])),
            ("/api/9/a%2F%2Fb/", "9/a/b/", Some(vec!["9", "a//b", ""])),
            ("/api//9///x", "9/x", Some(vec!["9", "", "", "x"])),
            ("/api/9/%2541", "9/%41", Some(vec!["9", "%41"])),
            ("/api/", "", Some(vec![""])),
            ("http://host/api/9/a%2Fb", "9/a/b", Some(vec!["9", "a/b"])),
            // Rewritten, or normalized in another way.
            ("/other/nginx", "9/nginx", None),
            ("/api/9/x/../y", "9/y", None),
            ("9", "/api/9", None),
            ("*", "9", None),
            ("/%zz", "zz", None),
        ] {
            let found = parts(target, behind);
            let expected = expected.map(|parts| parts.into_iter().map(str::to_owned).collect());
            assert_eq!(found, expected, "{target}");
        }
    }
}
