//! realip: the client behind servers that are trusted to say who it is.
//!   set_real_ip_from ADDRESS | CIDR | HOST | unix:;              http, server, location
//!   real_ip_header FIELD | X-Real-IP | X-Forwarded-For | proxy_protocol;
//!   real_ip_recursive on | off;                                  http, server, location
//!   $realip_remote_addr, $realip_remote_port
//! (<https://nginx.org/en/docs/http/ngx_http_realip_module.html>)
//!
//! Happens once for a request: as soon as its head is read, if the server says so, else when its location is known. What
//! is no address, or comes from somebody who is not trusted, changes nothing.

use std::cell::Cell;
use std::net::{IpAddr, SocketAddr};

use gale_base::cidr::Cidr;
use gale_base::units;
use gale_config::{Body, Diagnostic, ManyWith, One, Place, Reporter, Setting, Statement, Takes, slot, values};
use gale_engine::configuration::{Builder, HostAddresses};
use gale_engine::http::phases::{Decide, Flow, Handler, Phase};
use gale_engine::http::request::Request;
use gale_engine::http::variables::Variable;
use gale_engine::module::{ConfType, Directive, Module};
use gale_runtime::SocketAddress;

use super::variables::{append_address, append_port};

/// See the file's head.
pub const MODULE: Module = Module {
    name: "http_realip",
    directives: &[
        Directive {
            name: "set_real_ip_from",
            place: Place::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "",
            about: "Who is trusted to say where a request comes from.",
            store: &ManyWith { parse: trusted, slot: slot!(Conf, from) },
        },
        Directive {
            name: "real_ip_header",
            place: Place::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "X-Real-IP",
            about: "The field that says where a request comes from.",
            store: &One { parse: header, slot: slot!(Conf, header) },
        },
        Directive {
            name: "real_ip_recursive",
            place: Place::ANYWHERE,
            takes: Takes::Flag,
            body: Body::None,
            default: "off",
            about: "Whether the last address counts that is not trusted, or simply the last.",
            store: &One { parse: values::flag, slot: slot!(Conf, recursive) },
        },
    ],
    conf: Some(ConfType::of::<Conf>()),
    variables: &[
        Variable::named("realip_remote_addr", |request, _, out| append_address(out, &request.connection().remote)),
        Variable::named("realip_remote_port", |request, _, out| {
            append_port(out, super::variables::port(&request.connection().remote))
        }),
    ],
    handlers: &[(Phase::PostRead, HANDLER), (Phase::PreAccess, HANDLER)],
    ..Module::EMPTY
};

const HANDLER: &dyn Handler = &Decide { applies: |conf: &Conf| !conf.from.get().is_empty(), run };

#[derive(Default)]
struct Conf {
    from: Setting<Vec<Trusted>>,
    header: Setting<Header>,
    recursive: Setting<bool>,
}

#[derive(Clone, Debug)]
enum Trusted {
    Unix,
    Network(Cidr),
    Host(HostAddresses),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Header {
    /// A field with one address; the first one of its name.
    Single(Box<[u8]>),
    /// `X-Forwarded-For`: all fields of this name are one list.
    ForwardedFor,
    /// The PROXY protocol.
    ProxyProtocol,
}

fn trusted(builder: &mut Builder, statement: &Statement) -> Result<Trusted, Diagnostic> {
    let word = &statement.args[0];
    if word.text == "unix:" {
        return Ok(Trusted::Unix);
    }
    let Some((network, has_low_bits)) = Cidr::parse(&word.text) else {
        return Ok(Trusted::Host(builder.host_addresses(word, "set_real_ip_from")));
    };
    if has_low_bits {
        let message = format!("low address bits of {} are meaningless", word.text);
        builder.report(Diagnostic::warn(message).at(word.span));
    }
    Ok(Trusted::Network(network))
}

fn header(statement: &Statement) -> Result<Header, Diagnostic> {
    Ok(match &**statement.args[0].text {
        b"X-Forwarded-For" => Header::ForwardedFor,
        b"proxy_protocol" => Header::ProxyProtocol,
        name => Header::Single(name.into()),
    })
}

/// Whether it has been found out who the client is; subrequests have the same one.
#[derive(Default)]
struct IsKnown(Cell<bool>);

fn run(request: &mut Request, conf: &Conf) -> Flow {
    let is_known = request.shared_note::<IsKnown>();
    if is_known.0.get() {
        return Flow::Next;
    }
    let values: Vec<&[u8]> = match conf.header.get() {
        Header::Single(name) => values_of(request, name).take(1).collect(),
        Header::ForwardedFor => values_of(request, b"X-Forwarded-For").collect(),
        Header::ProxyProtocol => Vec::new(),
    };
    let list = Chain { trusted: conf.from.get(), is_recursive: *conf.recursive.get() };
    if *conf.header.get() == Header::ProxyProtocol {
        let source = request.connection().proxied().map(|header| header.source);
        if let Some(source) = source.filter(|_| list.trusts(request.remote())) {
            request.set_remote(SocketAddress::Inet(source));
            request.notes.put(IsKnown);
        }
        return Flow::Next;
    }
    if let Some(client) = list.client(request.remote(), &values) {
        request.set_remote(SocketAddress::Inet(client));
        is_known.0.set(true);
    }
    Flow::Next
}

fn values_of<'r>(request: &'r Request, name: &'r [u8]) -> impl Iterator<Item = &'r [u8]> {
    request.fields().filter(|(_, field, _)| field.eq_ignore_ascii_case(name)).map(|(_, _, value)| value)
}

/// The servers that a request has passed, as far as they can be believed.
struct Chain<'c> {
    trusted: &'c [Trusted],
    is_recursive: bool,
}

impl Chain<'_> {
    /// The client's address, from lists of addresses of which the last one is nearest to us; none when nobody is trusted
    /// or nothing is said.
    fn client(&self, nearest: &SocketAddress, values: &[&[u8]]) -> Option<SocketAddr> {
        if !self.trusts(nearest) {
            return None;
        }
        let mut client = None;
        for value in values.iter().rev() {
            let mut rest: &[u8] = value;
            let mut says_anything = false;
            while let Some(address) = take_last(&mut rest) {
                client = Some(address);
                says_anything = true;
                if !self.is_recursive || !self.trusts(&SocketAddress::Inet(address)) {
                    return client;
                }
            }
            // What is left cannot be understood: nothing before it can be believed.
            if !says_anything || rest.iter().any(|byte| !is_separator(byte)) {
                return client;
            }
        }
        client
    }

    fn trusts(&self, address: &SocketAddress) -> bool {
        let address = address.inet().map(|address| address.ip().to_canonical());
        self.trusted.iter().any(|trusted| match (trusted, address) {
            (Trusted::Unix, None) => true,
            (Trusted::Network(network), Some(address)) => network.contains(address),
            (Trusted::Host(addresses), Some(address)) => addresses.get().contains(&address),
            _ => false,
        })
    }
}

fn is_separator(byte: &u8) -> bool {
    matches!(byte, b' ' | b',')
}

/// The last address of a list, which is taken off it; none, with the list as it is, when there is none or it cannot be
/// understood.
fn take_last(list: &mut &[u8]) -> Option<SocketAddr> {
    let end = list.iter().rposition(|byte| !is_separator(byte))? + 1;
    let start = list[..end].iter().rposition(is_separator).map_or(0, |before| before + 1);
    let address = parse_address(&list[start..end])?;
    *list = &list[..start];
    Some(address)
}

/// An address, possibly with a port; one of IPv6 possibly in brackets, and with a port always.
fn parse_address(text: &[u8]) -> Option<SocketAddr> {
    let text = std::str::from_utf8(text).ok()?;
    if let Ok(address) = text.parse::<IpAddr>() {
        return Some(SocketAddr::new(address, 0));
    }
    if let Some(address) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) {
        return Some(SocketAddr::new(address.parse().ok()?, 0));
    }
    let (address, port) = text.rsplit_once(':')?;
    let address = match address.strip_prefix('[') {
        Some(address) => IpAddr::V6(address.strip_suffix(']')?.parse().ok()?),
        None => IpAddr::V4(address.parse().ok()?),
    };
    let port =
        units::parse_number(port.as_bytes()).and_then(|port| u16::try_from(port).ok()).filter(|&port| port > 0)?;
    Some(SocketAddr::new(address, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(is_recursive: bool, values: &[&str]) -> Option<String> {
        let trusted = ["127.0.0.1", "10.0.0.0/8"].map(|text| Trusted::Network(Cidr::parse(text.as_bytes()).unwrap().0));
        let values: Vec<&[u8]> = values.iter().map(|value| value.as_bytes()).collect();
        let nearest = SocketAddress::Inet("127.0.0.1:1".parse().unwrap());
        let found = Chain { trusted: &trusted, is_recursive }.client(&nearest, &values);
        found.map(|address| if address.port() == 0 { address.ip().to_string() } else { address.to_string() })
    }

    #[track_caller]
    fn is(is_recursive: bool, values: &[&str], expected: &str) {
        assert_eq!(client(is_recursive, values).as_deref(), Some(expected), "{values:?}");
    }

    #[test]
    fn the_last_address_counts() {
        is(false, &["192.0.2.1"], "192.0.2.1");
        is(false, &["192.0.2.1, 10.1.1.1"], "10.1.1.1");
        is(false, &["192.0.2.1", "192.0.2.2 ,, "], "192.0.2.2");
        is(false, &["2001:db8::1"], "2001:db8::1");
    }

    #[test]
    fn the_last_address_counts_that_is_not_trusted() {
        is(true, &["192.0.2.1, 192.0.2.2, 10.1.1.1"], "192.0.2.2");
        is(true, &["192.0.2.1, 10.1.1.1", "10.1.1.2"], "192.0.2.1");
        is(true, &["10.1.1.1,10.1.1.2"], "10.1.1.1");
    }

    #[test]
    fn what_cannot_be_understood_ends_the_list() {
        assert_eq!(client(false, &["x"]), None);
        assert_eq!(client(true, &["192.0.2.1, x"]), None);
        assert_eq!(client(true, &[""]), None);
        assert_eq!(client(true, &[]), None);
        is(true, &["192.0.2.1, unknown, 10.1.1.1"], "10.1.1.1");
        is(true, &["192.0.2.1", "x, 10.1.1.1"], "10.1.1.1");
        is(true, &["192.0.2.1", "", "10.1.1.1"], "10.1.1.1");
    }

    #[test]
    fn addresses_may_have_ports() {
        is(false, &["192.0.2.1:80"], "192.0.2.1:80");
        is(false, &["[2001:db8::1]:80"], "[2001:db8::1]:80");
        is(false, &["[2001:db8::1]"], "2001:db8::1");
        for wrong in
            ["192.0.2.1:0", "192.0.2.1:65536", "192.0.2.1:", "[192.0.2.1]:1x", "[2001:db8::1", "[::1]x:1", ":80"]
        {
            assert_eq!(client(false, &[wrong]), None, "{wrong}");
        }
    }

    #[test]
    fn nobody_else_is_believed() {
        let nearest = SocketAddress::Inet("192.0.2.7:1".parse().unwrap());
        let chain = Chain { trusted: &[Trusted::Unix], is_recursive: true };
        assert_eq!(chain.client(&nearest, &[b"192.0.2.1"]), None);
        assert!(chain.client(&SocketAddress::Unix(None), &[b"192.0.2.1"]).is_some());
    }
}
