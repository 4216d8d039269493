//! realip: the client address that a trusted server sends. See [`shared::realip`](crate::shared::realip).
//!   set_real_ip_from ADDRESS | CIDR | HOST | unix:;              http, server, location
//!   real_ip_header FIELD | X-Real-IP | X-Forwarded-For | proxy_protocol;     http, server, location
//!   real_ip_recursive on | off;                                  http, server, location
//!   $realip_remote_addr, $realip_remote_port
//! (<https://nginx.org/en/docs/http/ngx_http_realip_module.html>)
//!
//! The address is replaced once per request: when its head was read, if the server configures it, else when its
//! location is known. An invalid address, or one from an untrusted sender, changes nothing.

use std::net::SocketAddr;

use gale_config::{Body, Contexts, Diagnostic, ManyWith, One, Setting, Statement, Takes, slot, values};
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::forwarded;
use gale_http::request::phases::{Decide, Flow, Handler, Phase};
use gale_runtime::SocketAddress;

use crate::shared::realip::{Trusted, proxied_client, trusted, trusts, trusts_address, variables};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_realip",
    directives: &[
        Directive {
            name: "set_real_ip_from",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "",
            about: "Defines trusted addresses that are known to send correct replacement addresses.",
            store: &ManyWith { parse: trusted, slot: slot!(Conf, from) },
        },
        Directive {
            name: "real_ip_header",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "X-Real-IP",
            about: "Sets the request header field whose value replaces the client address.",
            store: &One { parse: header, slot: slot!(Conf, header) },
        },
        Directive {
            name: "real_ip_recursive",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Flag,
            body: Body::None,
            default: "off",
            about: "Enables or disables recursive search: the last non-trusted address is used instead of the last \
                    one.",
            store: &One { parse: values::flag, slot: slot!(Conf, recursive) },
        },
    ],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart {
        variables: &variables::<Request>(),
        handlers: &[(Phase::PostRead, HANDLER), (Phase::PreAccess, HANDLER)],
        ..HttpPart::EMPTY
    }],
};

const HANDLER: &dyn Handler = &Decide { applies: |conf: &Conf| !conf.from.get().is_empty(), run };

#[derive(Default)]
struct Conf {
    from: Setting<Vec<Trusted>>,
    header: Setting<Header>,
    recursive: Setting<bool>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Header {
    /// A field with one address; the first one of its name.
    Single(Box<[u8]>),
    /// `X-Forwarded-For`: all fields of this name are one list.
    ForwardedFor,
    /// The PROXY protocol's header: `listen … proxy_protocol`.
    ProxyProtocol,
}

fn header(statement: &Statement) -> Result<Header, Diagnostic> {
    Ok(match &**statement.args[0].text {
        b"X-Forwarded-For" => Header::ForwardedFor,
        b"proxy_protocol" => Header::ProxyProtocol,
        name => Header::Single(name.into()),
    })
}

fn run(request: &mut Request, conf: &Conf) -> Flow {
    // Subrequests share the client's address, which is replaced once.
    if request.is_remote_set() {
        return Flow::Next;
    }
    let chain = Chain { trusted: conf.from.get(), is_recursive: *conf.recursive.get() };
    let client = match conf.header.get() {
        Header::Single(name) => {
            let values: Vec<&[u8]> = values_of(request, name).take(1).collect();
            chain.client(request.remote(), &values)
        }
        Header::ForwardedFor => {
            let values: Vec<&[u8]> = values_of(request, b"X-Forwarded-For").collect();
            chain.client(request.remote(), &values)
        }
        Header::ProxyProtocol => proxied_client(request, chain.trusted),
    };
    if let Some(client) = client {
        request.set_remote(SocketAddress::Inet(client));
    }
    Flow::Next
}

fn values_of<'r>(request: &'r Request, name: &'r [u8]) -> impl Iterator<Item = &'r [u8]> {
    request.fields().filter(|(_, field, _)| field.eq_ignore_ascii_case(name)).map(|(_, _, value)| value)
}

/// The trusted servers that a request has passed.
struct Chain<'c> {
    trusted: &'c [Trusted],
    is_recursive: bool,
}

impl Chain<'_> {
    /// Returns the client's address from lists of addresses whose last one is the nearest. Returns `None` if no server
    /// is trusted or the lists are empty.
    fn client(&self, nearest: &SocketAddress, values: &[&[u8]]) -> Option<SocketAddr> {
        if !trusts(self.trusted, nearest) {
            return None;
        }
        forwarded::client(values, self.is_recursive, |address| trusts_address(self.trusted, Some(address)))
    }
}

#[cfg(test)]
mod tests {
    use gale_base::cidr::Cidr;

    use super::*;

    fn client(is_recursive: bool, values: &[&str]) -> Option<String> {
        let trusted = ["127.0.0.1", "10.0.0.0/8"].map(|text| Trusted::Network(Cidr::parse(text.as_bytes()).unwrap().0));
        let values: Vec<&[u8]> = values.iter().map(|value| value.as_bytes()).collect();
        let nearest = SocketAddress::Inet("127.0.0.1:1".parse().unwrap());
        let found = Chain { trusted: &trusted, is_recursive }.client(&nearest, &values);
        found.map(|address| address.ip().to_string())
    }

    #[test]
    fn the_last_address_counts_or_the_last_that_is_not_trusted() {
        let list = ["192.0.2.1, 192.0.2.2, 10.1.1.1"];
        assert_eq!(client(false, &list).as_deref(), Some("10.1.1.1"));
        assert_eq!(client(true, &list).as_deref(), Some("192.0.2.2"));
        assert_eq!(client(true, &[]), None);
    }

    #[test]
    fn untrusted_peers_are_not_believed() {
        let nearest = SocketAddress::Inet("192.0.2.7:1".parse().unwrap());
        let chain = Chain { trusted: &[Trusted::Unix], is_recursive: true };
        assert_eq!(chain.client(&nearest, &[b"192.0.2.1"]), None);
        assert!(chain.client(&SocketAddress::Unix(None), &[b"192.0.2.1"]).is_some());
    }
}
