//! Which servers a `*_pass` directive means: a group of the configuration, an address, or what name servers say.
//! (<https://nginx.org/en/docs/http/ngx_http_fastcgi_module.html#fastcgi_pass>)

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bstr::ByteSlice;
use gale_base::log_level::Level;
use gale_config::{Diagnostic, Statement, Word};
use gale_runtime::SocketAddress;

use super::{Group, HasUpstreams, Selection, Upstream, UpstreamId, UpstreamTable, UpstreamTarget};
use crate::configuration::Builder;
use crate::resolver::Resolver;
use crate::variables::subject::Subject;
use crate::variables::template::Template;

/// A subject that may be passed on to servers.
pub trait PassedOn: Subject {
    /// The groups of its configuration.
    fn upstreams(&self) -> &UpstreamTable<Self>;

    /// Who finds names for it, and how long that may take; none where no name server is named.
    fn resolver(&self) -> Option<(Rc<Resolver>, Duration)>;
}

/// The servers that one subject may be passed to.
#[derive(Clone, Debug)]
pub enum PassTarget {
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
    /// Addresses, looked up for this subject.
    Addresses(Arc<Group>),
}

/// Why no servers were found. The error log knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookUpError {
    /// What the variables say is no address.
    NoAddress,
    /// Nobody knows the name.
    NotResolved,
}

impl PassTarget {
    /// Finds the servers behind an address that came from variables.
    ///
    /// # Errors
    /// There are none.
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

    /// The group that the configuration has, unless the addresses were looked up.
    fn upstream<'s, S: PassedOn>(&self, subject: &'s S) -> Option<&'s Arc<Upstream<S>>> {
        match self {
            PassTarget::Referred(upstream) => Some(subject.upstreams().get(*upstream)),
            PassTarget::Named { host, port, default_port } => subject.upstreams().by_name(host, *port, *default_port),
            PassTarget::Addresses(_) => None,
        }
    }

    /// The group that the configuration has, if sessions stick to its servers: whoever answers tells it. A group
    /// without them is shared by all workers, and not counted for each request.
    pub fn sticky_upstream<S: PassedOn>(&self, subject: &S) -> Option<Arc<Upstream<S>>> {
        self.upstream(subject).filter(|upstream| upstream.is_sticky()).cloned()
    }

    /// The peers for this subject.
    pub fn select<S: PassedOn>(&self, subject: &S) -> Selection {
        match self {
            PassTarget::Addresses(group) => group.select(),
            PassTarget::Referred(_) | PassTarget::Named { .. } => {
                self.upstream(subject).expect("it was found in this configuration").select(subject)
            }
        }
    }

    /// What messages and handshakes call the servers: the group's name.
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

/// What a `*_pass` says that takes an address without a path: all but `proxy_pass` of http.
pub enum AddressPass<S: 'static> {
    /// An address without variables.
    Fixed(TlsTarget),
    /// One with variables, and what may stand before it.
    Evaluated(Template<S>, Check),
}

/// The servers of an address, and how they are spoken to.
#[derive(Clone, Debug)]
pub struct TlsTarget {
    /// The servers.
    pub servers: PassTarget,
    /// Over TLS: the host that the address names.
    pub tls_host: Option<Arc<[u8]>>,
    /// The host that the address names, with its port if it has one: what a request may call the server.
    pub authority: Arc<[u8]>,
}

/// An address without what may stand before it.
pub struct BareAddress<'t> {
    /// The address.
    pub text: &'t [u8],
    /// Whether TLS is spoken there.
    pub is_tls: bool,
}

/// Takes away what may stand before the address, or says in nginx's words why nothing can be passed there.
pub type Check = fn(&[u8]) -> Result<BareAddress<'_>, &'static str>;

/// Directives that take an address have no port of their own: it has to be written, unless a group is meant.
const NO_PORT: u16 = 0;

impl<S: PassedOn> AddressPass<S>
where
    S::Block: HasUpstreams<S>,
{
    /// Reads the one argument of a directive. `was_set` says that the scope has such a directive already.
    ///
    /// # Errors
    /// In nginx's words.
    pub fn read(
        builder: &mut Builder,
        statement: &Statement,
        was_set: bool,
        check: Check,
    ) -> Result<AddressPass<S>, Diagnostic> {
        AddressPass::of_word(builder, statement, &statement.args[0], was_set, check)
    }

    /// The same for an address that need not be an argument of the directive.
    ///
    /// # Errors
    /// In nginx's words.
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
        let servers = PassTarget::Referred(builder.upstreams::<S>().reference(server, word.span));
        Ok(AddressPass::Fixed(TlsTarget { servers, tls_host, authority }))
    }

    /// Whether TLS may be spoken.
    pub fn may_be_tls(&self) -> bool {
        match self {
            AddressPass::Fixed(target) => target.tls_host.is_some(),
            AddressPass::Evaluated(..) => true,
        }
    }

    /// The servers for this subject.
    ///
    /// # Errors
    /// There are none.
    pub async fn resolve(&self, subject: &S) -> Result<PassTarget, LookUpError> {
        self.resolve_tls(subject).await.map(|target| target.servers)
    }

    /// The servers for this subject, where they may speak TLS.
    ///
    /// # Errors
    /// There are none.
    pub async fn resolve_tls(&self, subject: &S) -> Result<TlsTarget, LookUpError> {
        match self {
            AddressPass::Fixed(target) => Ok(target.clone()),
            // Hardly any subject has to pay for it.
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

/// What a request may call the server.
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

/// What messages call the servers when none of them can be named.
fn group_name(server: &UpstreamTarget) -> Box<str> {
    match server {
        UpstreamTarget::Unix(path) => format!("unix:{}", path.display()).into(),
        UpstreamTarget::Host { host, .. } => host.to_str_lossy().into(),
    }
}

/// Nothing stands before the address.
///
/// # Errors
/// None.
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

/// A host without the port behind it, as nginx finds it.
pub fn without_port(host: &[u8]) -> &[u8] {
    let behind_address = if host.starts_with(b"[") { host.find_byte(b']').unwrap_or(0) } else { 0 };
    let colon = host[behind_address..].find_byte(b':').map(|colon| behind_address + colon);
    &host[..colon.unwrap_or(host.len())]
}
