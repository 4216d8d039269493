//! `listen`: addresses, their options, and the servers behind each.
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html#listen>)
//!
//! As in nginx, a specific address (`127.0.0.1:80`) beside a wildcard of the same port (`*:80`) has no socket of its
//! own unless `bind` or a socket option requires it; the connection's local address distinguishes them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bstr::{BStr, ByteSlice};
use gale_base::units;
use gale_config::{Diagnostic, Span, Statement, Word};

use crate::configuration::{Builder, ServerId};
use gale_process::{KeepAlive, ListenAddress, ListenSpec, ListenerHandle, Resources, SocketKind};

/// Default `backlog` of TCP sockets: the kernel's own default limit (net.core.somaxconn), because most queued
/// connections wait for their client's first data. nginx, whose sockets are not deferred, has 511.
const TCP_BACKLOG: i32 = 4096;

/// Placeholder for `reuseport` until the number of workers is known.
pub const REUSEPORT_PER_WORKER: usize = usize::MAX;

/// A protocol's defaults of `listen`.
#[derive(Clone, Copy, Debug)]
pub struct ListenDefaults {
    /// Default port; 0 if a port is required.
    pub port: u16,
    /// `true` if the kernel reports a connection only when its client has sent data. A protocol whose server speaks
    /// first would be delayed by a second.
    pub deferred: bool,
    /// `true` if `udp` is allowed.
    pub datagrams: bool,
}

/// An address that the configuration listens on.
pub struct Address {
    /// The address.
    pub address: ListenAddress,
    /// Its listening socket, or that of the wildcard that it shares.
    pub listener: ListenerHandle,
    /// `true` if other addresses share the socket, so the connection's local address has to be checked.
    pub shares_socket: bool,
    /// `true` if connections begin with a PROXY protocol header.
    pub proxy_protocol: bool,
    /// `true` if connections use TLS.
    pub ssl: bool,
    /// `true` if connections may use HTTP/2 whatever their server's setting: the old `listen … http2`.
    pub http2: bool,
}

/// A parsed `listen` of a server.
#[derive(Clone, Debug)]
pub struct Listen {
    /// The address; a name may have several.
    pub address: WrittenAddress,
    /// Last port of the range; `address` has the first.
    pub last_port: u16,
    /// Options of the socket.
    pub spec: ListenSpec,
    /// `true` if any option or `bind` was given; the address then has a socket of its own.
    pub has_options: bool,
    /// `default_server`
    pub is_default: bool,
    /// `proxy_protocol`
    pub proxy_protocol: bool,
    /// `ssl`
    pub ssl: bool,
    /// `http2`, set by the protocol that supports it.
    pub http2: bool,
    /// Place in the configuration.
    pub span: Span,
    /// The text as written, for messages.
    pub text: String,
}

/// An address as written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WrittenAddress {
    /// An address.
    Address(ListenAddress),
    /// A host name, to be resolved.
    Host(String, u16),
}

impl WrittenAddress {
    /// Its port; 0 if it has none.
    pub fn port(&self) -> u16 {
        match self {
            WrittenAddress::Address(ListenAddress::Inet(address)) => address.port(),
            WrittenAddress::Address(ListenAddress::Unix(_)) => 0,
            WrittenAddress::Host(_, port) => *port,
        }
    }

    fn with_port(&self, port: u16) -> WrittenAddress {
        match self {
            WrittenAddress::Address(ListenAddress::Inet(address)) => {
                WrittenAddress::Address(ListenAddress::Inet(SocketAddr::new(address.ip(), port)))
            }
            WrittenAddress::Address(unix) => WrittenAddress::Address(unix.clone()),
            WrittenAddress::Host(host, _) => WrittenAddress::Host(host.clone(), port),
        }
    }
}

impl Listen {
    /// The `listen *:PORT` of a server without `listen`.
    pub fn implicit(port: u16, span: Span, defaults: ListenDefaults) -> Listen {
        let address = ListenAddress::Inet(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)));
        Listen {
            address: WrittenAddress::Address(address.clone()),
            last_port: port,
            spec: spec(address, defaults),
            has_options: false,
            is_default: false,
            proxy_protocol: false,
            ssl: false,
            http2: false,
            span,
            text: format!("*:{port}"),
        }
    }

    /// Parses a `listen` statement.
    pub fn parse(statement: &Statement, defaults: ListenDefaults) -> Result<(Listen, Vec<Diagnostic>), Diagnostic> {
        let word = &statement.args[0];
        let (written, last_port) = parse_address(word, defaults.port)?;
        let address = match &written {
            WrittenAddress::Address(address) => address.clone(),
            WrittenAddress::Host(..) => ListenAddress::Inet(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))),
        };
        let mut listen = Listen {
            address: written,
            last_port,
            spec: spec(address, defaults),
            has_options: false,
            is_default: false,
            proxy_protocol: false,
            ssl: false,
            http2: false,
            span: statement.span,
            text: word.text.to_string(),
        };
        let mut warnings = Vec::new();
        let options = &statement.args[1..];
        if defaults.datagrams && options.iter().any(|option| option.text == "udp") {
            listen.spec.kind = SocketKind::Datagram;
        }
        for option in options {
            listen.apply(option, &mut warnings)?;
            if listen.spec.kind == SocketKind::Datagram {
                check_datagram_option(statement, option)?;
            }
        }
        Ok((listen, warnings))
    }

    /// The first address that `other` listens on as well, as far as known before names are resolved.
    pub fn shared_with(&self, other: &Listen) -> Option<ListenAddress> {
        let port = self.address.port().max(other.address.port());
        let overlap = port <= self.last_port.min(other.last_port);
        (overlap && self.spec.kind == other.spec.kind && self.address.with_port(port) == other.address.with_port(port))
            .then(|| match self.address.with_port(port) {
                WrittenAddress::Address(address) => address,
                WrittenAddress::Host(..) => self.spec.address.clone(),
            })
    }

    fn apply(&mut self, option: &Word, warnings: &mut Vec<Diagnostic>) -> Result<(), Diagnostic> {
        let invalid = |what: &str| Diagnostic::emerg(format!("invalid {what} \"{}\"", option.text)).at(option.span);
        let text: &[u8] = &option.text;
        let (name, value) = text.split_once_str("=").map_or((text, None), |(name, value)| (name, Some(value)));
        let is_unix = matches!(self.spec.address, ListenAddress::Unix(_));
        let positive =
            |what| value.and_then(units::parse_number).filter(|&number| number > 0).ok_or_else(|| invalid(what));
        let size = |what| {
            let size = value.and_then(units::parse_size).and_then(|size| u32::try_from(size).ok());
            size.ok_or_else(|| invalid(what))
        };
        match (name, value) {
            (b"default_server" | b"default", None) => {
                self.is_default = true;
                return Ok(());
            }
            (b"proxy_protocol", None) => {
                self.proxy_protocol = true;
                return Ok(());
            }
            (b"ssl", None) => {
                self.ssl = true;
                return Ok(());
            }
            (b"udp", None) if self.spec.kind == SocketKind::Datagram => return Ok(()),
            (b"bind", None) => {}
            (b"backlog", Some(_)) => {
                self.spec.backlog = i32::try_from(positive("backlog")?).unwrap_or(i32::MAX);
            }
            (b"rcvbuf", Some(_)) => self.spec.receive_buffer = Some(size("rcvbuf")?),
            (b"sndbuf", Some(_)) => self.spec.send_buffer = Some(size("sndbuf")?),
            (b"fastopen", Some(_)) => {
                self.spec.fastopen = Some(u32::try_from(positive("fastopen")?).unwrap_or(u32::MAX));
            }
            (b"deferred", None | Some(b"on")) => self.spec.deferred = true,
            // Not in nginx, whose sockets are not deferred by default.
            (b"deferred", Some(b"off")) => self.spec.deferred = false,
            // The number of sockets depends on the number of workers.
            (b"reuseport", None) => self.spec.reuseport = REUSEPORT_PER_WORKER,
            (b"ipv6only", Some(value)) => {
                // As in nginx it is allowed, without effect, with an IPv4 address.
                self.spec.ipv6only = match value {
                    b"on" => true,
                    b"off" => false,
                    _ => return Err(invalid("parameter").hint("ipv6only is \"on\" or \"off\"")),
                };
            }
            (b"so_keepalive", Some(value)) => {
                let keep_alive = parse_keep_alive(value);
                self.spec.keep_alive = Some(keep_alive.ok_or_else(|| {
                    Diagnostic::emerg(format!("invalid so_keepalive value: \"{}\"", BStr::new(value))).at(option.span)
                })?);
            }
            (b"setfib" | b"accept_filter", Some(_)) => {
                let text = format!("\"{}\" is not supported on this platform, ignored", option.text);
                warnings.push(Diagnostic::warn(text).at(option.span));
                return Ok(());
            }
            (b"multipath", None) => self.spec.multipath = true,
            (b"quic", None) => {
                let hint = format!("nginx supports \"{}\" here, Gale does not yet", option.text);
                return Err(invalid("parameter").hint(hint));
            }
            _ => return Err(invalid("parameter")),
        }
        if is_unix && matches!(name, b"deferred" | b"fastopen" | b"so_keepalive") {
            return Err(invalid("parameter").hint("this option is for TCP sockets"));
        }
        self.has_options = true;
        Ok(())
    }
}

/// Refuses options that are not for datagrams, in nginx's words.
fn check_datagram_option(statement: &Statement, option: &Word) -> Result<(), Diagnostic> {
    let name = option.text.split(|&byte| byte == b'=').next().unwrap_or_default();
    let names: [&[u8]; 8] = [
        b"fastopen",
        b"backlog",
        b"accept_filter",
        b"deferred",
        b"multipath",
        b"ssl",
        b"so_keepalive",
        b"proxy_protocol",
    ];
    if !names.contains(&name) {
        return Ok(());
    }
    let name = BStr::new(name);
    Err(statement.directive_error(&format!("\"{name}\" parameter is incompatible with \"udp\"")))
}

/// Default options of an address. Clients of a deferred socket wait in the kernel until they send data, which requires
/// a larger backlog.
fn spec(address: ListenAddress, defaults: ListenDefaults) -> ListenSpec {
    match address {
        ListenAddress::Inet(_) if defaults.deferred => {
            ListenSpec { deferred: true, backlog: TCP_BACKLOG, ..ListenSpec::new(address) }
        }
        address => ListenSpec::new(address),
    }
}

/// Parses the address, and the last of its ports.
fn parse_address(word: &Word, port_default: u16) -> Result<(WrittenAddress, u16), Diagnostic> {
    let failed = |what: &str| {
        let message = format!("{what} in \"{}\" of the \"listen\" directive", word.text);
        Diagnostic::emerg(message).at(word.span)
    };
    let text: &[u8] = &word.text;
    if let Some(path) = text.strip_prefix(b"unix:") {
        return match path.first() {
            Some(b'/') => {
                let path = path.to_os_str().map_err(|_| failed("invalid path"))?;
                Ok((WrittenAddress::Address(ListenAddress::Unix(PathBuf::from(path))), 0))
            }
            None => {
                Err(failed("no path in the unix domain socket").hint("a Unix socket is given as unix:/absolute/path"))
            }
            Some(_) => Err(failed("no absolute path in the unix domain socket")
                .hint("a Unix socket is given as unix:/absolute/path")),
        };
    }
    let text = text.to_str().map_err(|_| failed("invalid host"))?;
    let port = |text: &str| {
        let number = text.parse::<u16>().ok().filter(|&port| port > 0 && is_number(text));
        number.ok_or_else(|| failed("invalid port"))
    };
    // A port, or a range of ports.
    let ports = |text: &str| {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        match (port(first)?, port(last)?) {
            (first, last) if first > last => Err(failed("invalid port range")),
            range => Ok(range),
        }
    };
    let inet = |ip: IpAddr, (port, last): (u16, u16)| {
        (WrittenAddress::Address(ListenAddress::Inet(SocketAddr::new(ip, port))), last)
    };
    let default = (port_default, port_default);
    let has_port = |(port, last): (u16, u16)| if port > 0 { Ok((port, last)) } else { Err(failed("no port")) };
    if let Some(rest) = text.strip_prefix('[') {
        let (ip, rest) = rest.split_once(']').ok_or_else(|| failed("invalid host"))?;
        let ip: Ipv6Addr = ip.parse().map_err(|_| failed("invalid IPv6 address"))?;
        let ports = match rest.strip_prefix(':') {
            Some(text) => ports(text)?,
            None if rest.is_empty() => has_port(default)?,
            None => return Err(failed("invalid port")),
        };
        return Ok(inet(ip.into(), ports));
    }
    if text.split_once('-').map_or(is_number(text), |(first, last)| is_number(first) && is_number(last)) {
        return Ok(inet(Ipv4Addr::UNSPECIFIED.into(), ports(text)?));
    }
    let (host, ports) = match text.split_once(':') {
        Some((host, text)) => (host, ports(text)?),
        None => (text, has_port(default)?),
    };
    match host {
        "" => Err(failed("no host")),
        "*" => Ok(inet(Ipv4Addr::UNSPECIFIED.into(), ports)),
        _ => match host.parse::<Ipv4Addr>() {
            Ok(ip) => Ok(inet(ip.into(), ports)),
            Err(_) if host.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') => Err(failed("host not found")),
            Err(_) => Ok((WrittenAddress::Host(host.to_owned(), ports.0), ports.1)),
        },
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// `on`, `off` or `[idle]:[interval]:[count]`.
fn parse_keep_alive(value: &[u8]) -> Option<KeepAlive> {
    let plain = |on| KeepAlive { on, idle: None, interval: None, count: None };
    match value {
        b"on" => return Some(plain(true)),
        b"off" => return Some(plain(false)),
        _ => {}
    }
    let parts: Vec<&[u8]> = value.split_str(":").collect();
    let [idle, interval, count] = parts.as_slice() else { return None };
    let time = |text: &[u8]| -> Option<Option<Duration>> {
        if text.is_empty() {
            Some(None)
        } else {
            units::parse_time_seconds(text).filter(|time| !time.is_zero()).map(Some)
        }
    };
    let (idle, interval) = (time(idle)?, time(interval)?);
    let count = match *count {
        b"" => None,
        text => Some(u32::try_from(units::parse_number(text)?).ok().filter(|&count| count > 0)?),
    };
    if idle.is_none() && interval.is_none() && count.is_none() {
        return None;
    }
    Some(KeepAlive { on: true, idle, interval, count })
}

impl Listen {
    /// Adds `server` to the addresses of this `listen`; new addresses are created.
    ///
    /// # Errors
    /// A host is not found; or another `listen` of the address has already given options or a default server.
    pub fn add_to(
        &self,
        addresses: &mut Vec<AddressDraft>,
        server: ServerId,
        builder: &mut Builder,
        resources: &mut dyn Resources,
    ) -> Result<(), Diagnostic> {
        self.resolve(resources)?.into_iter().try_for_each(|address| self.add(addresses, server, address, builder))
    }

    fn resolve(&self, resources: &mut dyn Resources) -> Result<Vec<ListenAddress>, Diagnostic> {
        let ips = match &self.address {
            WrittenAddress::Address(ListenAddress::Inet(address)) => vec![address.ip()],
            WrittenAddress::Address(unix) => return Ok(vec![unix.clone()]),
            WrittenAddress::Host(host, _) => {
                resources.resolve(host).ok().filter(|found| !found.is_empty()).ok_or_else(|| {
                    let message = format!("host not found in \"{}\" of the \"listen\" directive", self.text);
                    Diagnostic::emerg(message).at(self.span)
                })?
            }
        };
        let ports = self.address.port()..=self.last_port;
        Ok(ports.flat_map(|port| ips.iter().map(move |ip| ListenAddress::Inet((*ip, port).into()))).collect())
    }

    fn add(
        &self,
        drafts: &mut Vec<AddressDraft>,
        server: ServerId,
        address: ListenAddress,
        builder: &mut Builder,
    ) -> Result<(), Diagnostic> {
        let spec = ListenSpec { address, ..self.spec.clone() };
        let is_same = |draft: &&mut AddressDraft| (&draft.spec.address, draft.spec.kind) == (&spec.address, spec.kind);
        let Some(draft) = drafts.iter_mut().find(is_same) else {
            drafts.push(AddressDraft {
                spec,
                has_options: self.has_options,
                proxy_protocol: self.proxy_protocol,
                ssl: self.ssl,
                http2: self.http2,
                protocols: Protocols::default(),
                options_span: self.has_options.then_some(self.span),
                default: self.is_default.then_some((server, self.span)),
                servers: vec![server],
            });
            return Ok(());
        };
        let wanted = Protocols::mask(self.proxy_protocol, self.ssl, self.http2);
        let before = Protocols::mask(draft.proxy_protocol, draft.ssl, draft.http2);
        let is_redefined = draft.protocols.add(wanted, before, self.has_options, draft.has_options);
        draft.proxy_protocol |= self.proxy_protocol;
        draft.ssl |= self.ssl;
        draft.http2 |= self.http2;
        if self.has_options {
            // As in nginx also if both are the same: options of an address must be in one place.
            if let Some(first) = draft.options_span {
                let message = format!("duplicate listen options for {}", spec.address);
                return Err(Diagnostic::emerg(message).at(self.span).related("first given", first));
            }
            draft.spec = spec.clone();
            draft.has_options = true;
            draft.options_span = Some(self.span);
        }
        if self.is_default {
            if let Some((_, first)) = draft.default {
                let message = format!("a duplicate default server for {}", spec.address);
                return Err(Diagnostic::emerg(message).at(self.span).related("first named", first));
            }
            draft.default = Some((server, self.span));
        }
        if is_redefined {
            let message = format!("protocol options redefined for {}", draft.spec.address);
            builder.note([Diagnostic::warn(message).at(self.span)]);
        }
        draft.servers.push(server);
        Ok(())
    }
}

/// `true` if connections to `specific` arrive at a socket bound to `wildcard`.
pub fn covers(wildcard: &ListenAddress, specific: &ListenAddress) -> bool {
    match (wildcard, specific) {
        (ListenAddress::Inet(wildcard), ListenAddress::Inet(specific)) => {
            wildcard.ip().is_unspecified()
                && wildcard.port() == specific.port()
                && wildcard.is_ipv4() == specific.is_ipv4()
                && wildcard != specific
        }
        _ => false,
    }
}

/// An address with its servers, while the configuration is read.
pub struct AddressDraft {
    /// Socket to open.
    pub spec: ListenSpec,
    /// `true` if the address requires a socket of its own.
    pub has_options: bool,
    /// `true` if any of its servers uses the PROXY protocol; then all do.
    pub proxy_protocol: bool,
    /// `true` if any of its servers uses TLS; then all do.
    pub ssl: bool,
    /// `true` if any of them has `http2`; then all may use it.
    pub http2: bool,
    /// Protocols in its `listen` directives.
    pub protocols: Protocols,
    /// Place of the options.
    pub options_span: Option<Span>,
    /// The server with `default_server`, and its place.
    pub default: Option<(ServerId, Span)>,
    /// All servers that listen here, in order.
    pub servers: Vec<ServerId>,
}

/// Protocols named by the `listen` directives of one address. Not all have to name them, but, as in nginx, some
/// omissions look like a mistake and cause a warning.
#[derive(Default)]
pub struct Protocols {
    /// The protocols of directives that add nothing new.
    usual: Option<u8>,
    has_changed: bool,
}

impl Protocols {
    /// Encodes PROXY protocol, TLS and HTTP/2 for [`Protocols::add`].
    pub fn mask(proxy_protocol: bool, ssl: bool, http2: bool) -> u8 {
        u8::from(proxy_protocol) | u8::from(ssl) << 1 | u8::from(http2) << 2
    }

    /// Adds another `listen` of the address with the protocols `wanted`; `before` are those of earlier ones, and
    /// `has_options` and `had_options` tell the same of socket options. Returns `true` if a warning is due.
    pub fn add(&mut self, wanted: u8, before: u8, has_options: bool, had_options: bool) -> bool {
        let is_unusual = self.usual.is_some_and(|usual| usual != wanted);
        let all = wanted | before;
        let (is_redefined, usual) = if all != before {
            ((had_options && !has_options) || self.has_changed || all != wanted, before)
        } else if all != wanted {
            (has_options || is_unusual, wanted)
        } else {
            ((has_options && self.has_changed) || is_unusual, wanted)
        };
        self.has_changed |= before != wanted;
        self.usual = Some(usual);
        is_redefined
    }
}

/// Assignment of sockets to the addresses of a block.
///
/// A specific address shares the socket of a wildcard that covers it.
pub struct ListenPlan {
    drafts: Vec<AddressDraft>,
    /// Addresses with sockets of their own.
    own: Vec<usize>,
    /// Index in `own` of the address whose socket each address uses.
    holders: Vec<usize>,
}

impl ListenPlan {
    /// The assignment for these addresses.
    pub fn new(drafts: Vec<AddressDraft>) -> ListenPlan {
        let covers = |one: usize, other: usize| {
            let (one, other) = (&drafts[one].spec, &drafts[other].spec);
            one.kind == other.kind && covers(&one.address, &other.address)
        };
        let all = 0..drafts.len();
        let has_own = |&index: &usize| drafts[index].has_options || !all.clone().any(|other| covers(other, index));
        let own: Vec<usize> = all.clone().filter(has_own).collect();
        let holder_of = |index: usize| {
            let itself = own.iter().position(|&candidate| candidate == index);
            let holder = itself.or_else(|| own.iter().position(|&candidate| covers(candidate, index)));
            holder.expect("an address without a socket is covered by one that has")
        };
        let holders = all.clone().map(holder_of).collect();
        ListenPlan { drafts, own, holders }
    }

    /// Sockets to open.
    pub fn specs(&self) -> Vec<ListenSpec> {
        self.own.iter().map(|&index| self.drafts[index].spec.clone()).collect()
    }

    /// Addresses with their sockets, which are in the order of [`ListenPlan::specs`].
    pub fn addresses(self, listeners: &[ListenerHandle]) -> Vec<Address> {
        let ListenPlan { drafts, holders, .. } = self;
        let finish = |(draft, &holder): (AddressDraft, &usize)| Address {
            address: draft.spec.address,
            listener: Arc::clone(&listeners[holder]),
            proxy_protocol: draft.proxy_protocol,
            ssl: draft.ssl,
            http2: draft.http2,
            shares_socket: holders.iter().filter(|&&other| other == holder).count() > 1,
        };
        drafts.into_iter().zip(&holders).map(finish).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Listen, String> {
        let mut sources = gale_config::Sources::new();
        let mut files = gale_config::MemoryFiles::new();
        let text = format!("listen {text};");
        let parsed = gale_config::parse_text(&mut sources, &mut files, "test", text.into_bytes(), "/".as_ref());
        let defaults = ListenDefaults { port: 80, deferred: true, datagrams: false };
        Listen::parse(&parsed.statements[0], defaults).map(|(listen, _)| listen).map_err(|error| error.message)
    }

    fn address(text: &str) -> String {
        let listen = parse(text).unwrap();
        let mut written = match &listen.address {
            WrittenAddress::Address(address) => address.to_string(),
            WrittenAddress::Host(host, port) => format!("{host} {port}"),
        };
        if listen.last_port != listen.address.port() {
            written.push_str(&format!(" to {}", listen.last_port));
        }
        written
    }

    #[test]
    fn every_form_of_an_address() {
        assert_eq!(address("8080"), "0.0.0.0:8080");
        assert_eq!(address("*:81"), "0.0.0.0:81");
        assert_eq!(address("127.0.0.1"), "127.0.0.1:80");
        assert_eq!(address("[::]:82"), "[::]:82");
        assert_eq!(address("[::1]"), "[::1]:80");
        assert_eq!(address("unix:/run/x.sock"), "unix:/run/x.sock");
        assert_eq!(address("localhost:83"), "localhost 83");
        assert_eq!(address("80-89"), "0.0.0.0:80 to 89");
        assert_eq!(address("[::1]:80-81"), "[::1]:80 to 81");
        assert_eq!(address("my-host:80-80"), "my-host 80");
        assert_eq!(address("80-host"), "80-host 80");
    }

    #[test]
    fn ranges_of_ports_share_the_first_port_that_is_in_both() {
        let shared = |one: &str, other: &str| parse(one).unwrap().shared_with(&parse(other).unwrap());
        let text = |one, other| shared(one, other).map(|address| address.to_string());
        assert_eq!(text("80-89", "*:85-99").as_deref(), Some("0.0.0.0:85"));
        assert_eq!(text("85", "80-89").as_deref(), Some("0.0.0.0:85"));
        assert_eq!(text("80-84", "85-89"), None);
        assert_eq!(text("127.0.0.1:80", "80"), None);
        assert!(shared("a:80-85", "a:85").is_some() && shared("a:80", "b:80").is_none());
        assert!(shared("unix:/a", "unix:/a").is_some() && shared("unix:/a", "unix:/b").is_none());
    }

    #[test]
    fn wrong_addresses_are_refused_in_nginx_s_words() {
        let cases = [
            ("70000", "invalid port in \"70000\" of the \"listen\" directive"),
            ("127.0.0.1:x", "invalid port in \"127.0.0.1:x\" of the \"listen\" directive"),
            ("127.0.0.1:0", "invalid port in \"127.0.0.1:0\" of the \"listen\" directive"),
            ("89-80", "invalid port range in \"89-80\" of the \"listen\" directive"),
            ("*:80-", "invalid port in \"*:80-\" of the \"listen\" directive"),
            ("*:1-2-3", "invalid port in \"*:1-2-3\" of the \"listen\" directive"),
            ("[::1]:80-70000", "invalid port in \"[::1]:80-70000\" of the \"listen\" directive"),
            (":80", "no host in \":80\" of the \"listen\" directive"),
            ("[::1", "invalid host in \"[::1\" of the \"listen\" directive"),
            ("1.2.3.400", "host not found in \"1.2.3.400\" of the \"listen\" directive"),
            ("unix:", "no path in the unix domain socket in \"unix:\" of the \"listen\" directive"),
            ("80 nonsense", "invalid parameter \"nonsense\""),
            ("80 backlog=x", "invalid backlog \"backlog=x\""),
            ("80 backlog=0", "invalid backlog \"backlog=0\""),
            ("80 rcvbuf=x", "invalid rcvbuf \"rcvbuf=x\""),
            ("[::]:80 ipv6only=x", "invalid parameter \"ipv6only=x\""),
            ("80 so_keepalive=::", "invalid so_keepalive value: \"::\""),
            ("80 deferred=maybe", "invalid parameter \"deferred=maybe\""),
            ("80 so_keepalive=x", "invalid so_keepalive value: \"x\""),
        ];
        for (text, message) in cases {
            assert_eq!(parse(text).unwrap_err(), message, "{text}");
        }
    }

    #[test]
    fn options_reach_the_socket() {
        let listen = parse("80 default_server backlog=9 rcvbuf=8k so_keepalive=30m::10 deferred reuseport").unwrap();
        assert!(listen.is_default && listen.has_options && listen.spec.deferred);
        assert_eq!(
            (listen.spec.backlog, listen.spec.receive_buffer, listen.spec.reuseport),
            (9, Some(8192), REUSEPORT_PER_WORKER)
        );
        let keep_alive = listen.spec.keep_alive.unwrap();
        assert_eq!(
            (keep_alive.idle, keep_alive.interval, keep_alive.count),
            (Some(Duration::from_secs(1800)), None, Some(10))
        );
        assert!(!parse("80").unwrap().has_options && parse("80").unwrap().spec.deferred);
        assert!(!parse("80 deferred=off").unwrap().spec.deferred);
        assert!(!parse("unix:/run/s").unwrap().spec.deferred);
        assert!(!parse("[::]:80 ipv6only=off").unwrap().spec.ipv6only);
        assert!(parse("80 multipath").unwrap().spec.multipath && !parse("80").unwrap().spec.multipath);
    }

    #[test]
    fn a_wildcard_covers_addresses_of_its_port_and_family() {
        let inet = |text: &str| ListenAddress::Inet(text.parse().unwrap());
        assert!(covers(&inet("0.0.0.0:80"), &inet("127.0.0.1:80")));
        assert!(!covers(&inet("0.0.0.0:80"), &inet("127.0.0.1:81")));
        assert!(!covers(&inet("0.0.0.0:80"), &inet("[::1]:80")));
        assert!(!covers(&inet("0.0.0.0:80"), &inet("0.0.0.0:80")));
        assert!(!covers(&inet("127.0.0.1:80"), &inet("127.0.0.2:80")));
    }
}
