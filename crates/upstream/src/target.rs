//! Target of a `*_pass` directive: a group of the configuration, an address, or addresses from name servers.
//! (<https://nginx.org/en/docs/http/ngx_http_fastcgi_module.html#fastcgi_pass>)

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bstr::ByteSlice;
use gale_base::log_level::Level;
use gale_config::{Diagnostic, Statement, Word};
use gale_engine::configuration::Builder;
use gale_engine::variables::subject::Subject;
use gale_engine::variables::template::Template;
use gale_resolver::Resolver;
use gale_runtime::SocketAddress;

use super::{Group, HasUpstreams, Selection, Upstream, UpstreamId, UpstreamTable, UpstreamTarget, upstreams_of};

/// A subject that can be passed to servers.
pub trait PassedOn: Subject {
    /// Groups of its configuration.
    fn upstreams(&self) -> &UpstreamTable<Self>;

    /// Resolver and timeout for its names; `None` without a `resolver`.
    fn resolver(&self) -> Option<(Rc<Resolver>, Duration)>;
}

/// Servers for one subject.
#[derive(Clone, Debug)]
pub enum PassTarget {
    /// Group of a directive without variables.
    Referred(UpstreamId),
    /// Group found by name.
    Named {
        /// The name.
        host: Box<[u8]>,
        /// Port, if one is written.
        port: Option<u16>,
        /// Port of a host without one.
        default_port: u16,
    },
    /// Addresses resolved for this subject.
    Addresses(Arc<Group>),
}

/// Reason why no servers were found; already logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookUpError {
    /// The evaluated text is no address.
    NoAddress,
    /// The name cannot be resolved.
    NotResolved,
}

impl PassTarget {
    /// Finds the servers of an address that was made from variables.
    ///
    /// # Errors
    /// No servers were found.
    pub async fn look_up<S: PassedOn>(
        subject: &S,
        server: &UpstreamTarget,
        group_name: &str,
    ) -> Result<PassTarget, LookUpError> {
        match server {
            UpstreamTarget::Unix(path) => {
                Ok(PassTarget::Addresses(Group::of_addresses(group_name, &[SocketAddress::unix(path)])))
            }
            UpstreamTarget::Host { host, port, default_port } => {
                look_up_host(subject, host, *port, *default_port, group_name).await
            }
        }
    }

    /// The configuration's group, unless the addresses were resolved.
    fn upstream<'s, S: PassedOn>(&self, subject: &'s S) -> Option<&'s Arc<Upstream<S>>> {
        match self {
            PassTarget::Referred(upstream) => Some(subject.upstreams().get(*upstream)),
            PassTarget::Named { host, port, default_port } => subject.upstreams().by_name(host, *port, *default_port),
            PassTarget::Addresses(_) => None,
        }
    }

    /// The configuration's group, if it has `sticky`; responses may then bind sessions. Groups without it are not
    /// reference-counted for each request, since all workers share them.
    pub fn sticky_upstream<S: PassedOn>(&self, subject: &S) -> Option<Arc<Upstream<S>>> {
        self.upstream(subject).filter(|upstream| upstream.is_sticky()).cloned()
    }

    /// Peers for this subject.
    pub fn select<S: PassedOn>(&self, subject: &S) -> Selection {
        match self {
            PassTarget::Addresses(group) => group.select(),
            PassTarget::Referred(_) | PassTarget::Named { .. } => {
                self.upstream(subject).expect("it was found in this configuration").select(subject)
            }
        }
    }

    /// Name of the servers in messages and handshakes: the group's name.
    pub fn name<'s, S: PassedOn>(&'s self, subject: &'s S) -> &'s str {
        match self {
            PassTarget::Addresses(group) => group.name(),
            PassTarget::Referred(_) | PassTarget::Named { .. } => {
                self.upstream(subject).expect("it was found in this configuration").group().name()
            }
        }
    }
}

async fn look_up_host<S: PassedOn>(
    subject: &S,
    host: &[u8],
    port: Option<u16>,
    default_port: u16,
    group_name: &str,
) -> Result<PassTarget, LookUpError> {
    if subject.upstreams().by_name(host, port, default_port).is_some() {
        return Ok(PassTarget::Named { host: host.into(), port, default_port });
    }
    let port = port.unwrap_or(default_port);
    if port == 0 {
        subject.log(Level::Error, format_args!("no port in upstream \"{}\"", host.as_bstr()));
        return Err(LookUpError::NoAddress);
    }
    let group = |addresses: &[IpAddr]| {
        let addresses: Vec<SocketAddress> =
            addresses.iter().map(|&ip| SocketAddress::Inet(SocketAddr::new(ip, port))).collect();
        PassTarget::Addresses(Group::of_addresses(group_name, &addresses))
    };
    if let Some(ip) = std::str::from_utf8(host).ok().and_then(|text| text.parse::<IpAddr>().ok()) {
        return Ok(group(&[ip]));
    }
    let Some((resolver, time_max)) = subject.resolver() else {
        subject.log(Level::Error, format_args!("no resolver defined to resolve {}", host.as_bstr()));
        return Err(LookUpError::NotResolved);
    };
    match resolver.resolve(host, time_max).await {
        Ok(resolved) => Ok(group(&resolved.found)),
        Err(error) => {
            subject.log(Level::Error, format_args!("{} could not be resolved ({error})", host.as_bstr()));
            Err(LookUpError::NotResolved)
        }
    }
}

/// Argument of a `*_pass` directive that takes an address without a path: all but `proxy_pass` of http.
pub enum AddressPass<S: 'static> {
    /// An address without variables.
    Fixed(TlsTarget),
    /// An address with variables, and the check of its prefix.
    Evaluated(Template<S>, Check),
}

/// Servers of an address, and whether TLS is used.
#[derive(Clone, Debug)]
pub struct TlsTarget {
    /// The servers.
    pub servers: PassTarget,
    /// Host in the address, if TLS is used.
    pub tls_host: Option<Arc<[u8]>>,
    /// Host in the address with its port, for the request's authority.
    pub authority: Arc<[u8]>,
}

/// An address without its prefix.
pub struct BareAddress<'t> {
    /// The address.
    pub text: &'t [u8],
    /// `true` if TLS is used.
    pub is_tls: bool,
}

/// Removes a prefix from the address. Errors are nginx's words.
pub type Check = fn(&[u8]) -> Result<BareAddress<'_>, &'static str>;

/// Directives that take an address have no default port: a port is required unless a group is named.
const NO_PORT: u16 = 0;

impl<S: PassedOn> AddressPass<S>
where
    S::Block: HasUpstreams<S>,
{
    /// Parses the directive's only argument. `was_set` means that the scope already has such a directive.
    ///
    /// # Errors
    /// Errors with nginx's messages.
    pub fn read(
        builder: &mut Builder,
        statement: &Statement,
        was_set: bool,
        check: Check,
    ) -> Result<AddressPass<S>, Diagnostic> {
        AddressPass::of_word(builder, statement, &statement.args[0], was_set, check)
    }

    /// The same for any word.
    ///
    /// # Errors
    /// Errors with nginx's messages.
    pub fn of_word(
        builder: &mut Builder,
        statement: &Statement,
        word: &Word,
        was_set: bool,
        check: Check,
    ) -> Result<AddressPass<S>, Diagnostic> {
        if was_set {
            return Err(statement.directive_error("is duplicate"));
        }
        if word.text.contains(&b'$') {
            builder.reach.connects_to_any_port(&statement.name.text.to_str_lossy());
            return Ok(AddressPass::Evaluated(builder.variables::<S>().template(word)?, check));
        }
        let address = check(&word.text).map_err(|message| Diagnostic::emerg(message).at(word.span))?;
        let server = UpstreamTarget::parse(address.text, NO_PORT).map_err(|what| {
            Diagnostic::emerg(format!("{what} in upstream \"{}\"", address.text.as_bstr())).at(word.span)
        })?;
        let (tls_host, authority) = (address.tls_host(&server), authority(&server));
        let servers = PassTarget::Referred(upstreams_of::<S>(builder).reference(server, word.span));
        Ok(AddressPass::Fixed(TlsTarget { servers, tls_host, authority }))
    }

    /// `true` if TLS may be used.
    pub fn may_be_tls(&self) -> bool {
        match self {
            AddressPass::Fixed(target) => target.tls_host.is_some(),
            AddressPass::Evaluated(..) => true,
        }
    }

    /// Servers for this subject.
    ///
    /// # Errors
    /// No servers were found.
    pub async fn resolve(&self, subject: &S) -> Result<PassTarget, LookUpError> {
        self.resolve_tls(subject).await.map(|target| target.servers)
    }

    /// Servers for this subject, where they may use TLS.
    ///
    /// # Errors
    /// No servers were found.
    pub async fn resolve_tls(&self, subject: &S) -> Result<TlsTarget, LookUpError> {
        match self {
            AddressPass::Fixed(target) => Ok(target.clone()),
            // Boxed because it is rare, so that other subjects do not pay for its size.
            AddressPass::Evaluated(template, check) => Box::pin(evaluate(subject, template, *check)).await,
        }
    }
}

impl BareAddress<'_> {
    fn tls_host(&self, server: &UpstreamTarget) -> Option<Arc<[u8]>> {
        match server {
            _ if !self.is_tls => None,
            UpstreamTarget::Host { host, .. } => Some(host.to_vec().into()),
            UpstreamTarget::Unix(_) => Some(Arc::from(&b"localhost"[..])),
        }
    }
}

async fn evaluate<S: PassedOn>(subject: &S, template: &Template<S>, check: Check) -> Result<TlsTarget, LookUpError> {
    let text = template.evaluate(subject);
    let address = check(&text).map_err(|message| {
        subject.log(Level::Error, format_args!("{message}"));
        LookUpError::NoAddress
    })?;
    let server = UpstreamTarget::parse(address.text, NO_PORT).map_err(|what| {
        subject.log(Level::Error, format_args!("{what} in upstream \"{}\"", address.text.as_bstr()));
        LookUpError::NoAddress
    })?;
    let tls_host = address.tls_host(&server);
    let authority = authority(&server);
    let servers = PassTarget::look_up(subject, &server, &group_name(&server)).await?;
    Ok(TlsTarget { servers, tls_host, authority })
}

/// Authority of requests to the server.
fn authority(server: &UpstreamTarget) -> Arc<[u8]> {
    let UpstreamTarget::Host { host, port, .. } = server else { return Arc::from(&b"localhost"[..]) };
    let mut text = Vec::with_capacity(host.len() + 8);
    let is_ipv6 = host.contains(&b':');
    text.extend_from_slice(if is_ipv6 { b"[" } else { b"" });
    text.extend_from_slice(host);
    text.extend_from_slice(if is_ipv6 { b"]" } else { b"" });
    if let Some(port) = port {
        text.extend_from_slice(format!(":{port}").as_bytes());
    }
    text.into()
}

/// Name of the servers in messages when no server can be named.
fn group_name(server: &UpstreamTarget) -> Box<str> {
    match server {
        UpstreamTarget::Unix(path) => format!("unix:{}", path.display()).into(),
        UpstreamTarget::Host { host, .. } => host.to_str_lossy().into(),
    }
}

/// Check that allows no prefix.
///
/// # Errors
/// Never fails.
pub fn plain(text: &[u8]) -> Result<BareAddress<'_>, &'static str> {
    Ok(BareAddress { text, is_tls: false })
}

impl<S> fmt::Debug for AddressPass<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AddressPass::Fixed(found) => f.debug_tuple("Fixed").field(found).finish(),
            AddressPass::Evaluated(..) => f.write_str("Evaluated"),
        }
    }
}

/// A host without its port, split as in nginx.
pub fn without_port(host: &[u8]) -> &[u8] {
    let behind_address = if host.starts_with(b"[") { host.find_byte(b']').unwrap_or(0) } else { 0 };
    let colon = host[behind_address..].find_byte(b':').map(|colon| behind_address + colon);
    &host[..colon.unwrap_or(host.len())]
}
