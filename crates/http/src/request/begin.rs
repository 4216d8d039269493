//! Beginning of a request in every version of HTTP: its host, the server for it, its path, and the refusals that need
//! no module.

use std::rc::Rc;

use gale_base::log_level::Level;
use gale_protocol::Offence;
use gale_protocol::request::Version;
use gale_protocol::uri::{Form, Target};

use crate::request::Request;
use crate::request::advance::{self, Step};
use crate::request::configuration::HttpConfiguration;
use crate::request::configuration::settings::CoreSettings;
use crate::request::counting;
use crate::request::routing::UriOrigin;
use gale_engine::variables::subject::Subject;

/// Reason why a request is answered without a module.
pub(crate) enum Refusal {
    /// The worker's memory for buffers is exhausted.
    NoMemory,
    /// The server for the host could not be found.
    UnknownServer,
    /// No module serves TRACE, and no location of the server makes tunnels for CONNECT.
    Method,
    /// The head is invalid, and so is everything after it.
    Head(Offence),
}

/// Prepares a request with a complete head, or with one that is invalid from the offence on.
///
/// # Errors
/// The reason why no module is asked. The server that the head names is chosen even then, if the name has come: its
/// error pages and its log apply.
pub(crate) fn prepare(request: &mut Request, offence: Option<Offence>) -> Result<(), Refusal> {
    let configuration = Rc::clone(request.configuration());
    let http = configuration.http();
    let host_is_known = request.parsed.authority.is_some() || matches!(offence, None | Some(Offence::MissingHost));
    let chosen = if host_is_known { choose_server(request, http) } else { Ok(()) };
    counting::begin(request, http);
    let core = &http.scope(request.scope).core;
    let reading = if offence.is_some() { part_read(request) } else { REQUEST_LINE };
    if let Err(offence) = offence.map_or_else(|| set_path(request, core), Err) {
        // The log shows the path if one has come. An offence in it was reported above.
        if request.parsed.target != Target::default() {
            let _ = set_path(request, core);
        }
        keep_first_line(request);
        let input = request.head.readable();
        request.log(Level::Info, format_args!("{} while reading client {reading}", offence.describe(input)));
        if request.parsed.method_range.is_empty() {
            request.answer_as_get();
        }
        return Err(Refusal::Head(offence));
    }
    if gale_runtime::leases_exhausted() {
        request.log(Level::Alert, format_args!("the worker's memory for buffers is exhausted"));
        return Err(Refusal::NoMemory);
    }
    chosen.map_err(|UnknownServer| Refusal::UnknownServer)?;
    let name = request.method_name();
    let allows_connect = request.version() == Version::Http11 && request.server().allows_connect;
    if name == b"TRACE" || (name == b"CONNECT" && !allows_connect) {
        let name = String::from_utf8_lossy(name).into_owned();
        request.log(Level::Info, format_args!("client sent {name} method"));
        return Err(Refusal::Method);
    }
    Ok(())
}

impl Refusal {
    /// Returns the response.
    pub fn answer(self, request: &mut Request) -> Step {
        let status = match self {
            Refusal::NoMemory => 503,
            Refusal::UnknownServer => 500,
            Refusal::Method => 405,
            Refusal::Head(offence) => offence.status(),
        };
        if matches!(self, Refusal::UnknownServer | Refusal::Method) {
            request.close_after_response();
        }
        advance::fail(request, status)
    }
}

/// Sets the path and the arguments.
fn set_path(request: &mut Request, core: &CoreSettings) -> Result<(), Offence> {
    let Request { parsed, head, uri, args, routing, .. } = request;
    let input = head.readable();
    if parsed.target.form == Form::Authority {
        // As in nginx: the target has no path.
        uri.clear();
        uri.push(b'/');
        return Ok(());
    }
    let mut scratch = std::mem::take(args);
    routing.origin = UriOrigin::Client;
    uri.clear();
    uri.extend_from_slice(parsed.target.normalized_path(input, *core.merge_slashes.get(), &mut scratch)?);
    scratch.clear();
    if let Some(query) = parsed.target.query {
        scratch.extend_from_slice(query.of(input));
    }
    *args = scratch;
    if let Some(first) = parsed.ignored_first {
        let text = bstr::BStr::new(first.of_lenient(input)).to_owned();
        request.log(Level::Info, format_args!("client sent invalid header line: \"{text}\""));
    }
    Ok(())
}

/// Puts the request into the server for its host, if it has one.
///
/// # Errors
/// A regular expression could not be run to its end. The server is unknown, and no other one may answer instead.
pub(crate) fn choose_server(request: &mut Request, http: &HttpConfiguration) -> Result<(), UnknownServer> {
    if let Some(authority) = request.parsed.authority {
        let mut scratch = Vec::new();
        let name = authority.lowercase_name(request.head.readable(), &mut scratch);
        request.host.clear();
        request.host.extend_from_slice(name);
    }
    let servers = &http.addresses[request.arrival.place].servers;
    if servers.names.is_empty() {
        return Ok(());
    }
    let host = std::mem::take(&mut request.host);
    let found = match servers.names.find(&host) {
        Ok(Some((server, matched))) => {
            request.server = server;
            request.scope = http.server(server).scope;
            if let Some(matched) = matched {
                request.take_match(matched, &host);
            }
            Ok(())
        }
        Ok(None) => {
            // The name of a TLS handshake may have chosen another server, which counts only while the head is
            // incomplete. As
            // in nginx, a request without a host is for the default server.
            request.server = servers.default;
            request.scope = http.server(servers.default).scope;
            Ok(())
        }
        Err(error) => {
            request.log(Level::Alert, format_args!("{error}"));
            Err(UnknownServer)
        }
    };
    request.host = host;
    found
}

/// The server for the host could not be found.
pub(crate) struct UnknownServer;

/// Keeps only the first line of a broken head.
pub(crate) fn keep_first_line(request: &mut Request) {
    let head = Rc::clone(&request.head);
    request.parsed_mut().keep_first_line(head.readable());
}

/// Names the part of an incomplete head in nginx's words.
pub(crate) fn part_read(request: &Request) -> &'static str {
    if request.parsed.line.is_empty() { REQUEST_LINE } else { "request headers" }
}

const REQUEST_LINE: &str = "request line";
