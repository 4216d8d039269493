//! Which servers a `*_pass` directive means: a group of the configuration, an address, or what name servers say.
//! (<https://nginx.org/en/docs/http/ngx_http_fastcgi_module.html#fastcgi_pass>)

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use bstr::ByteSlice;
use gale_base::log_level::Level;
use gale_config::{Diagnostic, Statement, Word};
use gale_engine::configuration::Builder;
use gale_engine::upstream::{Group, Selection, Upstream, UpstreamId, UpstreamTarget};
use gale_http::configuration::builder::InHttp;
use gale_http::request::Request;
use gale_http::variables::template::Template;
use gale_runtime::SocketAddress;

/// The servers that one request may be passed to.
#[derive(Clone, Debug)]
pub(crate) enum Found {
    /// Those that a directive without variables refers to.
    Referred(UpstreamId),
    /// A group that the configuration has under the name.
    Named {
        /// The name.
        host: Box<[u8]>,
        /// The port behind it, if one is written.
        port: Option<u16>,
        /// The port of a host without one.
        default_port: u16,
    },
    /// Addresses, looked up for this request.
    Addresses(Arc<Group>),
}

impl Found {
    /// Finds the servers behind an address that came from variables. An error is the status that answers the request,
    /// and the error log knows.
    pub async fn look_up(request: &Request, server: &UpstreamTarget, group_name: &str) -> Result<Found, u16> {
        match server {
            UpstreamTarget::Unix(path) => {
                Ok(Found::Addresses(Group::of_addresses(group_name, &[SocketAddress::unix(path)])))
            }
            UpstreamTarget::Host { host, port, default_port } => {
                look_up_host(request, host, *port, *default_port, group_name).await
            }
        }
    }

    /// The group that the configuration has, unless the addresses were looked up.
    pub fn upstream<'r>(&self, request: &'r Request) -> Option<&'r Arc<Upstream<Request>>> {
        match self {
            Found::Referred(upstream) => Some(request.http().upstream(*upstream)),
            Found::Named { host, port, default_port } => request.http().upstreams.by_name(host, *port, *default_port),
            Found::Addresses(_) => None,
        }
    }

    /// The peers for this request.
    pub fn select(&self, request: &Request) -> Selection {
        match self {
            Found::Addresses(group) => group.select(),
            Found::Referred(_) | Found::Named { .. } => {
                self.upstream(request).expect("it was found in this configuration").select(request)
            }
        }
    }
}

async fn look_up_host(
    request: &Request,
    host: &[u8],
    port: Option<u16>,
    default_port: u16,
    group_name: &str,
) -> Result<Found, u16> {
    if request.http().upstreams.by_name(host, port, default_port).is_some() {
        return Ok(Found::Named { host: host.into(), port, default_port });
    }
    let port = port.unwrap_or(default_port);
    if port == 0 {
        request.log(Level::Error, format_args!("no port in upstream \"{}\"", host.as_bstr()));
        return Err(500);
    }
    let group = |addresses: &[IpAddr]| {
        let addresses: Vec<SocketAddress> =
            addresses.iter().map(|&ip| SocketAddress::Inet(SocketAddr::new(ip, port))).collect();
        Found::Addresses(Group::of_addresses(group_name, &addresses))
    };
    if let Some(ip) = std::str::from_utf8(host).ok().and_then(|text| text.parse::<IpAddr>().ok()) {
        return Ok(group(&[ip]));
    }
    let Some((resolver, time_max)) = request.resolver() else {
        request.log(Level::Error, format_args!("no resolver defined to resolve {}", host.as_bstr()));
        return Err(502);
    };
    match resolver.resolve(host, time_max).await {
        Ok(resolved) => Ok(group(&resolved.found)),
        Err(error) => {
            request.log(Level::Error, format_args!("{} could not be resolved ({error})", host.as_bstr()));
            Err(502)
        }
    }
}

/// What a `*_pass` says that takes an address without a path: all but `proxy_pass`.
pub(crate) enum AddressPass {
    /// An address without variables.
    Fixed(Found),
    /// One with variables, and what may stand before it.
    Evaluated(Template, Check),
}

/// Takes away what may stand before the address, or says in nginx's words why nothing can be passed there.
pub(crate) type Check = fn(&[u8]) -> Result<&[u8], &'static str>;

/// Directives that take an address have no port of their own: it has to be written, unless a group is meant.
const NO_PORT: u16 = 0;

impl AddressPass {
    /// Reads the one argument of a directive. `was_set` says that the scope has such a directive already.
    ///
    /// # Errors
    /// In nginx's words.
    pub fn read(
        builder: &mut Builder,
        statement: &Statement,
        was_set: bool,
        check: Check,
    ) -> Result<AddressPass, Diagnostic> {
        if was_set {
            return Err(statement.directive_error("is duplicate"));
        }
        let word: &Word = &statement.args[0];
        if word.text.contains(&b'$') {
            return Ok(AddressPass::Evaluated(builder.http_mut().template(word)?, check));
        }
        let address = check(&word.text).map_err(|message| Diagnostic::emerg(message).at(word.span))?;
        let server = UpstreamTarget::parse(address, NO_PORT)
            .map_err(|what| Diagnostic::emerg(format!("{what} in upstream \"{}\"", address.as_bstr())).at(word.span))?;
        Ok(AddressPass::Fixed(Found::Referred(builder.http_mut().upstreams.reference(server, word.span))))
    }

    /// The servers for this request. An error is the status that answers it.
    pub async fn resolve(&self, request: &Request) -> Result<Found, u16> {
        match self {
            AddressPass::Fixed(found) => Ok(found.clone()),
            // Hardly any request has to pay for it.
            AddressPass::Evaluated(template, check) => Box::pin(evaluate(request, template, *check)).await,
        }
    }
}

async fn evaluate(request: &Request, template: &Template, check: Check) -> Result<Found, u16> {
    let text = template.evaluate(request);
    let address = check(&text).map_err(|message| {
        request.log(Level::Error, format_args!("{message}"));
        500_u16
    })?;
    let server = UpstreamTarget::parse(address, NO_PORT).map_err(|what| {
        request.log(Level::Error, format_args!("{what} in upstream \"{}\"", address.as_bstr()));
        500_u16
    })?;
    Found::look_up(request, &server, &group_name(&server)).await
}

/// What messages call the servers when none of them can be named.
fn group_name(server: &UpstreamTarget) -> Box<str> {
    match server {
        UpstreamTarget::Unix(path) => format!("unix:{}", path.display()).into(),
        UpstreamTarget::Host { host, .. } => host.to_str_lossy().into(),
    }
}

/// Nothing stands before the address.
pub(crate) fn plain(text: &[u8]) -> Result<&[u8], &'static str> {
    Ok(text)
}
