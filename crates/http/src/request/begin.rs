//! Where a request begins, whichever version of HTTP brought it: its host, the server for that, its path, and what is
//! refused before any module is asked.

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

/// Why a request is answered without asking any module.
pub(crate) enum Refusal {
    /// The worker's memory for buffers is exhausted.
    NoMemory,
    /// Which server is meant could not be found out.
    UnknownServer,
    /// TRACE means nothing to a server without a module for it, and neither does CONNECT where no location makes
    /// tunnels.
    Method,
    /// The head cannot be understood, and so neither can what follows it.
    Head(Offence),
}

/// Prepares a request whose head has come: whole, or to the offence that is wrong with it.
///
/// # Errors
/// Why no module is asked. The server that the head names is settled in any case, if it has come so far: it has its
/// error pages and its log.
pub(crate) fn prepare(request: &mut Request, offence: Option<Offence>) -> Result<(), Refusal> {
    let configuration = Rc::clone(request.configuration());
    let http = configuration.http();
    let host_is_known = request.parsed.authority.is_some() || matches!(offence, None | Some(Offence::MissingHost));
    let chosen = if host_is_known { choose_server(request, http) } else { Ok(()) };
    counting::begin(request, http);
    let core = &http.scope(request.scope).core;
    let reading = if offence.is_some() { part_read(request) } else { REQUEST_LINE };
    if let Err(offence) = offence.map_or_else(|| set_path(request, core), Err) {
        // The path is for the log, if one has come; an offence in it was told already.
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
    /// The answer.
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

/// The path and the arguments.
fn set_path(request: &mut Request, core: &CoreSettings) -> Result<(), Offence> {
    let Request { parsed, head, uri, args, routing, .. } = request;
    let input = head.readable();
    if parsed.target.form == Form::Authority {
        // As in nginx: there is no path in it.
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

/// Puts the request into the server for the host that it asks for, which may be none.
///
/// # Errors
/// A regular expression could not be run to its end: which server is meant is unknown, and no other one may answer
/// instead.
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
            // The name of a TLS handshake may have chosen another server: it counts only while the request's head is
            // incomplete. As in nginx, a request that names no host is for the default one.
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

/// Which server is meant could not be found out.
pub(crate) struct UnknownServer;

/// Only the first line of a broken head is relied on from now on.
pub(crate) fn keep_first_line(request: &mut Request) {
    let head = Rc::clone(&request.head);
    request.parsed_mut().keep_first_line(head.readable());
}

/// nginx's words for what was read of a head that was not understood to its end.
pub(crate) fn part_read(request: &Request) -> &'static str {
    if request.parsed.line.is_empty() { REQUEST_LINE } else { "request headers" }
}

const REQUEST_LINE: &str = "request line";
