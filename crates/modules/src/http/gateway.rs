//! Common part of fastcgi, scgi and uwsgi: the parameters of a request, and its body.
//! (<https://nginx.org/en/docs/http/ngx_http_fastcgi_module.html#fastcgi_param>)
//!
//! A request is a list of parameters: first the configured ones in their order, then `HTTP_NAME` for each header field
//! of the client, unless a parameter of that name is configured. As in nginx a repeated field is one parameter; fields
//! whose names differ only in `-` and `_` are separate parameters.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use gale_base::log_level::Level;
use gale_config::{Diagnostic, Statement};
use gale_engine::configuration::Builder;
use gale_http::configuration::builder::InHttp;
use gale_http::request::Request;
use gale_http::request::request_body::read_body;
use gale_http::variables::template::Template;
use gale_http_upstream::caching::{CacheNote, is_for_cache};
use gale_http_upstream::cgi::CgiReader;
use gale_http_upstream::receiving::ResponseReader;
use gale_http_upstream::sending::{RequestBody, Unframed};
use gale_http_upstream::settings::{RetryOn, UpstreamSettings};
use gale_http_upstream::{Alone, Caching, KeepHead, Passing, PassingTls, USUALLY_HIDDEN, Wire, WriteRequest};
use gale_protocol::gateway::{ParamsWriter, UnwritableParams, write_field_param};
use gale_protocol::http1::lists_token;
use gale_protocol::request::KnownHeader;
use gale_runtime::Bytes;
use gale_upstream::TlsTarget;
use smallvec::SmallVec;

use crate::http::upstream_pass::{BodySource, body_source};

/// `fastcgi_param NAME VALUE [if_not_empty];`, `scgi_param`, `uwsgi_param`.
#[derive(Clone)]
struct Param {
    name: Box<[u8]>,
    value: Template,
    /// `if_not_empty`: not sent if the value is empty.
    is_optional: bool,
}

/// The parameters of a scope.
#[derive(Default)]
pub(crate) struct Params {
    /// Parameters of this scope as written; when complete, those that are sent.
    list: Vec<Param>,
    /// The complete list with its lookup table.
    complete: Arc<Complete>,
}

#[derive(Default)]
struct Complete {
    list: Box<[Param]>,
    /// Header fields that a configured parameter replaces: in lower case, with `_` for `-`.
    replaced: HashSet<Box<[u8]>>,
    /// `true` if `Host` is the only such field, as in most configurations.
    replaces_only_host: bool,
}

/// Prefix of the parameters for header fields.
const FIELD_PREFIX: &[u8] = b"HTTP_";

/// The host as nginx passes it to applications: without any other part of the `Host` field.
const HOST: (&str, &str) = ("HTTP_HOST", "$host$is_request_port$request_port");

impl Params {
    /// Adds the parameter of a directive.
    ///
    /// # Errors
    /// A message in nginx's words.
    pub fn add(&mut self, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
        let value = builder.http_mut().template(&statement.args[1])?;
        let is_optional = match statement.args.get(2) {
            None => false,
            Some(word) if &**word.text == b"if_not_empty" => true,
            Some(word) => return Err(Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span)),
        };
        self.list.push(Param { name: statement.args[0].text.as_slice().into(), value, is_optional });
        Ok(())
    }

    /// Inherits the parent's parameters if there are none here, and completes the list.
    ///
    /// # Errors
    /// None: the texts are the program's own.
    pub fn complete(&mut self, parent: Option<&Params>, builder: &mut Builder) -> Result<(), Diagnostic> {
        match parent {
            Some(parent) if self.list.is_empty() => {
                self.list.clone_from(&parent.list);
                self.complete = Arc::clone(&parent.complete);
            }
            _ => self.complete = Arc::new(Complete::new(&self.list, builder)?),
        }
        Ok(())
    }

    /// Writes the parameters of a request.
    ///
    /// # Errors
    /// The protocol cannot represent them.
    pub fn write(
        &self,
        request: &Request,
        settings: &UpstreamSettings,
        out: &mut dyn ParamsWriter,
    ) -> Result<(), UnwritableParams> {
        request.worker().with_scratch(|scratch| self.write_own_and_fields(request, settings, scratch, out))?;
        let note = request.notes.get::<CacheNote>();
        let part = note.and_then(|note| note.part.as_ref());
        let conditions = [
            (&b"HTTP_IF_NONE_MATCH"[..], note.and_then(|note| note.etag.clone())),
            (b"HTTP_IF_MODIFIED_SINCE", note.and_then(|note| note.last_modified.clone())),
            (b"HTTP_RANGE", part.map(|part| part.range.clone())),
            (b"HTTP_IF_RANGE", part.map(|part| part.if_range.clone())),
        ];
        for (name, value) in conditions {
            if let Some(value) = value.filter(|_| !self.complete.replaces(&name[FIELD_PREFIX.len()..])) {
                out.push(name, &value)?;
            }
        }
        Ok(())
    }

    /// Writes the configured parameters and those of the header fields, each built in `scratch`.
    fn write_own_and_fields(
        &self,
        request: &Request,
        settings: &UpstreamSettings,
        scratch: &mut Vec<u8>,
        out: &mut dyn ParamsWriter,
    ) -> Result<(), UnwritableParams> {
        for param in &self.complete.list {
            scratch.clear();
            param.value.append(request, scratch);
            if !(param.is_optional && scratch.is_empty()) {
                out.push(&param.name, scratch)?;
            }
        }
        if *settings.request_body.pass_request_headers.get() {
            let note = request.notes.get::<CacheNote>();
            for field in joined_fields(request) {
                if !self.complete.replaces(field.name) && !is_for_cache(note, field.known) {
                    scratch.clear();
                    write_field_param(scratch, field.name);
                    out.push(scratch, &field.value)?;
                }
            }
        }
        Ok(())
    }
}

impl Complete {
    fn new(written: &[Param], builder: &mut Builder) -> Result<Complete, Diagnostic> {
        let mut list = written.to_vec();
        if !list.iter().any(|param| param.name.eq_ignore_ascii_case(HOST.0.as_bytes())) {
            let value = builder.http_mut().template(&Statement::synthetic(HOST.1, Vec::new()).name)?;
            list.push(Param { name: HOST.0.as_bytes().into(), value, is_optional: true });
        }
        let carries_field =
            |param: &Param| param.name.len() > FIELD_PREFIX.len() && param.name.starts_with(FIELD_PREFIX);
        let fields = list.iter().filter(|param| carries_field(param));
        let replaced: HashSet<_> = fields.map(|param| folded(&param.name[FIELD_PREFIX.len()..])).collect();
        let replaces_only_host = replaced.len() == 1 && replaced.contains(&b"host"[..]);
        // As in nginx a parameter with an empty text only suppresses the header field.
        list.retain(|param| !(carries_field(param) && param.value.is_empty()));
        Ok(Complete { list: list.into(), replaced, replaces_only_host })
    }

    fn replaces(&self, field_name: &[u8]) -> bool {
        match self.replaces_only_host {
            true => field_name.eq_ignore_ascii_case(b"Host"),
            false => self.replaced.contains(&folded(field_name)),
        }
    }
}

/// Returns the part of the parameter's name that stands for this field, in lower case.
fn folded(name: &[u8]) -> Box<[u8]> {
    name.iter().map(|byte| if *byte == b'-' { b'_' } else { byte.to_ascii_lowercase() }).collect()
}

/// A header field of the client, with the values of its repetitions joined.
struct JoinedField<'r> {
    name: &'r [u8],
    known: Option<KnownHeader>,
    value: Cow<'r, [u8]>,
}

/// Up to this number of fields, duplicates are found by a linear search.
const FEW: usize = 24;

/// Up to this number of fields, no memory is allocated.
const USUAL: usize = 16;

fn joined_fields(request: &Request) -> SmallVec<[JoinedField<'_>; USUAL]> {
    let mut fields = SmallVec::<[JoinedField<'_>; USUAL]>::new();
    let mut places: HashMap<Vec<u8>, usize> = HashMap::new();
    for (field, name, value) in request.fields() {
        let place = if fields.len() < FEW {
            fields.iter().position(|before| match (before.known, field.known) {
                (None, None) => before.name.eq_ignore_ascii_case(name),
                (one, other) => one == other,
            })
        } else {
            if places.is_empty() {
                places = (0..).zip(&fields).map(|(place, field)| (field.name.to_ascii_lowercase(), place)).collect();
            }
            let place = places.get(&name.to_ascii_lowercase()).copied();
            if place.is_none() {
                places.insert(name.to_ascii_lowercase(), fields.len());
            }
            place
        };
        match place {
            None => fields.push(JoinedField { name, known: field.known, value: Cow::Borrowed(value) }),
            Some(place) => {
                let before = &mut fields[place];
                let separator: &[u8] = if before.known == Some(KnownHeader::Cookie) { b"; " } else { b", " };
                let joined = before.value.to_mut();
                joined.extend_from_slice(separator);
                joined.extend_from_slice(value);
            }
        }
    }
    fields
}

/// The conditions of `fastcgi_next_upstream` and so on. As in nginx, 502 and 504 are not among them.
pub(crate) const RETRY_CONDITIONS: &[(&str, u32)] = &[
    ("error", RetryOn::ERROR.bits()),
    ("timeout", RetryOn::TIMEOUT.bits()),
    ("invalid_header", RetryOn::INVALID_HEADER.bits()),
    ("non_idempotent", RetryOn::NON_IDEMPOTENT.bits()),
    ("http_500", RetryOn::HTTP_500.bits()),
    ("http_503", RetryOn::HTTP_503.bits()),
    ("http_403", RetryOn::HTTP_403.bits()),
    ("http_404", RetryOn::HTTP_404.bits()),
    ("http_429", RetryOn::HTTP_429.bits()),
    ("updating", RetryOn::UPDATING.bits()),
    ("off", RetryOn::OFF.bits()),
    ("denied", RetryOn::DENIED.bits()),
];

/// Returns the header fields of responses that are not passed to clients by default.
pub(crate) fn hidden() -> Vec<&'static str> {
    ["Status"].iter().chain(USUALLY_HIDDEN).copied().collect()
}

/// Returns a maker of readers for CGI responses that end with the connection.
pub(crate) fn cgi_reader(settings: &UpstreamSettings) -> impl Fn() -> Box<dyn ResponseReader> {
    let head_max = settings.head_max();
    move || Box::new(CgiReader::new(head_max))
}

/// Returns a request to a CGI-like application: `write` makes the head, and the body follows.
pub(crate) fn passing_of_cgi<'p>(
    request: &Request,
    settings: &'p UpstreamSettings,
    target: &TlsTarget,
    scheme: &'static str,
    (write, body): (&'p WriteRequest<'p>, RequestBody),
    reader: &'p dyn Fn() -> Box<dyn ResponseReader>,
    caching: Option<Box<Caching>>,
) -> Passing<'p> {
    Passing {
        selection: target.servers.select(request),
        upstream: target.servers.sticky_upstream(request),
        scheme,
        tls: target.tls_host.as_ref().map(|host| Box::new(PassingTls::new(settings, host))),
        write,
        uri: Bytes::new(),
        wire: Wire::Alone(Alone { head: Bytes::new(), framing: &Unframed, reader, reuses_connections: false }),
        body,
        settings,
        time_max: None,
        rewriter: &KeepHead,
        upgrade: upgrade(request),
        caching,
    }
}

/// Returns the protocol that the application may switch to: WebSocket, if the client asks for it.
fn upgrade(request: &Request) -> Option<Bytes> {
    const WEBSOCKET: &[u8] = b"websocket";
    let is_asked_for = lists_token(request.asked_upgrade()?, WEBSOCKET);
    (is_asked_for && request.is_main()).then(|| Bytes::from_static(WEBSOCKET))
}

/// Logs the reason why a request cannot be written and returns the status.
pub(crate) fn refuse(request: &Request, protocol: &str, fault: UnwritableParams) -> u16 {
    request.log(Level::Alert, format_args!("{protocol} {fault}"));
    500
}

/// Returns the body to send, and its length if known. The error is the status of the response.
pub(crate) async fn take_body(
    request: &mut Request,
    settings: &UpstreamSettings,
    streams_chunked: bool,
) -> Result<(RequestBody, Option<u64>), u16> {
    Ok(match body_source(request, settings, streams_chunked) {
        BodySource::None => (RequestBody::None, Some(0)),
        BodySource::Client => (RequestBody::Client, request.declared_body_length()),
        BodySource::Stored => {
            // Boxed, because few requests need it.
            let stored = Box::pin(read_body(request)).await.map_err(|error| error.status())?;
            let length = stored.length();
            (RequestBody::Stored(stored), Some(length))
        }
        BodySource::Kept => {
            Box::pin(read_body(request)).await.map_err(|error| error.status())?;
            (RequestBody::None, Some(0))
        }
    })
}
