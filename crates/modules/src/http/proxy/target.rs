//! `proxy_pass`: the server, and the URI of the request to it.
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_pass>)
//!
//! | `proxy_pass` | URI of the request to the server |
//! |---|---|
//! | without a path | the URI as the client sent it, or as redirects and rewrites have left it |
//! | with a path | the path in place of the location's part of the URI |
//! | with variables, and a path | that path |

use std::sync::Arc;

use bstr::ByteSlice;
use gale_base::log_level::Level;
use gale_config::{Diagnostic, Statement};
use gale_engine::configuration::Builder;
use gale_http::configuration::builder::InHttp;
use gale_http::request::Request;
use gale_http::variables::template::Template;
use gale_http_upstream::{ReplacedPath, ServerNames};
use gale_protocol::request::Scheme;
use gale_protocol::uri::escape::{Class, escape};
use gale_upstream::{PassTarget, Selection, Upstream, UpstreamTarget};

use super::Conf;
use crate::http::upstream_head::{append_changed_uri, append_uri};
use crate::http::upstream_pass::look_up_status;

/// Argument of `proxy_pass`.
pub(super) enum Pass {
    Fixed {
        target: Arc<Target>,
        /// URL as written, for `proxy_redirect default`.
        url: Box<[u8]>,
    },
    /// A URL with variables.
    Evaluated(Template),
}

/// A server, and the URI of requests to it.
#[derive(Debug)]
pub(super) struct Target {
    /// `true` for TLS.
    pub is_tls: bool,
    /// `$proxy_host`: the host, with its port unless that is the default.
    pub host: Arc<[u8]>,
    /// `$proxy_port`.
    pub port: Box<[u8]>,
    /// Path and arguments; empty to use those of the request.
    pub uri: Box<[u8]>,
    /// Part of the request's URI that is replaced by `uri`.
    replaced: Replaced,
    pub found: PassTarget,
}

/// Part of the request's URI that is replaced by the path of the URL.
#[derive(Debug)]
enum Replaced {
    /// All of it: the URL has variables.
    Whole,
    /// The part that matches the location; `None` if there is none.
    Location(Option<Box<[u8]>>),
}

impl Target {
    /// Returns the peers for this request.
    pub fn select(&self, request: &Request) -> Selection {
        self.found.select(request)
    }

    /// Returns the configured group, if it has sticky sessions.
    pub fn sticky_upstream(&self, request: &Request) -> Option<Arc<Upstream<Request>>> {
        self.found.sticky_upstream(request)
    }

    /// Appends the URI of the request to the server.
    pub fn append_uri(&self, request: &Request, uri: &mut Vec<u8>) {
        let location = match &self.replaced {
            Replaced::Whole if !self.uri.is_empty() => return uri.extend_from_slice(&self.uri),
            _ if self.uri.is_empty() && request.has_sent_uri() => return append_uri(request, uri),
            Replaced::Location(Some(location)) if !self.uri.is_empty() && request.is_in_its_location() => {
                location.len().min(request.uri.len())
            }
            _ => 0,
        };
        if request.is_in_its_location() {
            uri.extend_from_slice(&self.uri);
        }
        append_changed_uri(request, location, uri);
    }

    /// Returns the server's names for the requests of clients.
    pub fn names(&self, request: &Request) -> ServerNames {
        let replaced = match &self.replaced {
            Replaced::Location(Some(location)) if !self.uri.is_empty() && request.is_in_its_location() => {
                let mut escaped = Vec::new();
                escape(Class::Uri, location, &mut escaped);
                Some(ReplacedPath { client: escaped.into(), server: self.uri.clone() })
            }
            Replaced::Location(_) | Replaced::Whole => None,
        };
        let scheme = if self.is_tls { Scheme::Https } else { Scheme::Http };
        ServerNames { scheme, host: Arc::clone(&self.host), replaced }
    }
}

/// Parses `proxy_pass URL;`.
pub(super) fn proxy_pass(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if conf.pass.is_some() {
        return Err(statement.directive_error("is duplicate"));
    }
    let word = &statement.args[0];
    let scope = builder.http_scope();
    if word.text.contains(&b'$') {
        let template = builder.http_mut().template(word)?;
        builder.reach.connects_to_any_port("proxy_pass");
        conf.pass = Some(Pass::Evaluated(template));
        return Ok(());
    }
    let url = Url::parse(&word.text).map_err(|error| match error {
        WrongUrl::Prefix => Diagnostic::emerg("invalid URL prefix").at(word.span),
        WrongUrl::Address(what) => Diagnostic::emerg(format!("{what} in upstream \"{}\"", word.text)).at(word.span),
    })?;
    let location = builder.http_mut().replaceable_part(scope);
    if location.is_none() && !url.uri.is_empty() {
        return Err(Diagnostic::emerg(
            "\"proxy_pass\" cannot have URI part in location given by regular expression, or inside named location, or \
             inside \"if\" statement, or inside \"limit_except\" block",
        )
        .at(word.span));
    }
    let found = PassTarget::Referred(builder.http_mut().upstreams.reference(url.server.clone(), word.span));
    let target = Arc::new(url.target(found, Replaced::Location(location)));
    conf.pass = Some(Pass::Fixed { target, url: word.text.as_slice().into() });
    Ok(())
}

pub(super) struct Written<'p> {
    /// URL as written in the configuration.
    pub url: &'p [u8],
    /// Part of URIs that matches the location, if there is one.
    pub location: Option<&'p [u8]>,
    /// `true` if the URL has a path.
    pub has_uri: bool,
}

/// The parts of a URL.
struct Url {
    scheme: Scheme,
    server: UpstreamTarget,
    /// Begins with a slash, or is empty.
    uri: Box<[u8]>,
}

enum WrongUrl {
    Prefix,
    /// A message in nginx's words.
    Address(&'static str),
}

impl Url {
    fn parse(text: &[u8]) -> Result<Url, WrongUrl> {
        let has = |prefix: &[u8]| text.len() >= prefix.len() && text[..prefix.len()].eq_ignore_ascii_case(prefix);
        let (scheme, rest) = if has(b"https://") {
            (Scheme::Https, &text[8..])
        } else if has(b"http://") {
            (Scheme::Http, &text[7..])
        } else {
            return Err(WrongUrl::Prefix);
        };
        let is_unix = rest.len() >= 5 && rest[..5].eq_ignore_ascii_case(b"unix:");
        let (server, uri) = if is_unix {
            match rest[5..].find_byte(b':') {
                Some(colon) => (&rest[..5 + colon], &rest[5 + colon + 1..]),
                None => (rest, &b""[..]),
            }
        } else {
            rest.split_at(rest.find_byteset(b"/?").unwrap_or(rest.len()))
        };
        let server = UpstreamTarget::parse(server, scheme.default_port()).map_err(WrongUrl::Address)?;
        let uri = match uri.first() {
            None | Some(b'/') => uri.into(),
            Some(_) => [b"/", uri].concat().into(),
        };
        Ok(Url { scheme, server, uri })
    }

    /// Returns the host as variables show it, with its port unless that is the default; and the port.
    fn host(&self) -> (Vec<u8>, Vec<u8>) {
        let (host, port, default_port) = match &self.server {
            UpstreamTarget::Unix(_) => return (b"localhost".to_vec(), Vec::new()),
            UpstreamTarget::Host { host, port, default_port } => (host, *port, *default_port),
        };
        let mut text = Vec::new();
        let is_ipv6 = host.contains(&b':');
        if is_ipv6 {
            text.push(b'[');
        }
        text.extend_from_slice(host);
        if is_ipv6 {
            text.push(b']');
        }
        if let Some(port) = port.filter(|&port| port != default_port) {
            text.extend_from_slice(format!(":{port}").as_bytes());
        }
        (text, port.unwrap_or(default_port).to_string().into_bytes())
    }

    /// Returns the target with the servers of this URL.
    fn target(self, found: PassTarget, replaced: Replaced) -> Target {
        let (host, port) = self.host();
        let is_tls = self.scheme == Scheme::Https;
        Target { is_tls, host: host.into(), port: port.into(), uri: self.uri, replaced, found }
    }
}

impl Pass {
    /// Returns the server, if it is the same for all requests.
    pub fn known(&self) -> Option<&Arc<Target>> {
        match self {
            Pass::Fixed { target, .. } => Some(target),
            Pass::Evaluated(_) => None,
        }
    }

    /// Returns the server for this request. The error is the status of the response.
    pub async fn resolve(&self, request: &mut Request) -> Result<Arc<Target>, u16> {
        let template = match self {
            Pass::Fixed { target, .. } => return Ok(Arc::clone(target)),
            Pass::Evaluated(template) => template,
        };
        let text = template.evaluate(request);
        let shown = text.as_bstr();
        let url = match Url::parse(&text) {
            Ok(url) => url,
            Err(error) => {
                match error {
                    WrongUrl::Prefix => request.log(Level::Error, format_args!("invalid URL prefix in \"{shown}\"")),
                    WrongUrl::Address(what) => {
                        request.log(Level::Error, format_args!("{what} in upstream \"{shown}\""));
                    }
                }
                return Err(500);
            }
        };
        let (host, _) = url.host();
        let found = PassTarget::look_up(request, &url.server, &host.to_str_lossy()).await.map_err(look_up_status)?;
        Ok(Arc::new(url.target(found, Replaced::Whole)))
    }

    /// Returns `true` if a server may be reached over TLS.
    pub fn may_be_tls(&self) -> bool {
        self.known().is_none_or(|target| target.is_tls)
    }

    /// Returns the URL as written, if it has no variables.
    pub fn written(&self) -> Option<Written<'_>> {
        match self {
            Pass::Fixed { url, target } => {
                let location = match &target.replaced {
                    Replaced::Location(location) => location.as_deref(),
                    Replaced::Whole => None,
                };
                Some(Written { url, location, has_uri: !target.uri.is_empty() })
            }
            Pass::Evaluated(_) => None,
        }
    }
}
