//! geoip: variables with the location of a request's client, from address databases. See
//! [`shared::geoip`](crate::shared::geoip).
//!   geoip_country FILE [utf8];  geoip_city FILE [utf8];  geoip_org FILE [utf8];       http
//!   geoip_proxy NETWORK;  geoip_proxy_recursive on | off;                             http
//! (<https://nginx.org/en/docs/http/ngx_http_geoip_module.html>)
//!
//! The client's address may come from a trusted proxy's `X-Forwarded-For`.

use std::net::IpAddr;

use gale_base::cidr::Cidr;
use gale_config::{Body, Contexts, Diagnostic, ManyWith, One, Reporter, Setting, Statement, Takes, slot, values};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;

use super::geo::forwarded_client;
use crate::shared::geoip::{self, Databases, Located};
use crate::shared::{geo, join};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_geoip",
    directives: &join::<5>(&[
        &geoip::directives::<Proxies>(Contexts::HTTP),
        &[
            Directive {
                name: "geoip_proxy",
                contexts: Contexts::HTTP,
                takes: Takes::Exactly(1),
                body: Body::None,
                default: "",
                about: "Defines trusted proxies, whose X-Forwarded-For gives the address to look up.",
                store: &ManyWith { parse: proxy, slot: slot!(Conf, own.networks) },
            },
            Directive {
                name: "geoip_proxy_recursive",
                contexts: Contexts::HTTP,
                takes: Takes::Flag,
                body: Body::None,
                default: "off",
                about: "Enables or disables recursive search: the last non-trusted address in X-Forwarded-For is used \
                        instead of the last one.",
                store: &One { parse: values::flag, slot: slot!(Conf, own.is_recursive) },
            },
        ],
    ]),
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart { variables: &geoip::variables::<Request>(), ..HttpPart::EMPTY }],
};

type Conf = Databases<Proxies>;

/// Proxies whose `X-Forwarded-For` is trusted.
#[derive(Default)]
pub struct Proxies {
    networks: Setting<Vec<Cidr>>,
    is_recursive: Setting<bool>,
}

fn proxy(builder: &mut Builder, statement: &Statement) -> Result<Cidr, Diagnostic> {
    let mut notes = Vec::new();
    let network = geo::parse_network(&statement.args[0], &mut notes);
    notes.into_iter().for_each(|note| builder.report(note));
    network
}

impl Located for Request {
    type Own = Proxies;

    fn databases(&self) -> Option<&Conf> {
        self.scope().conf_of()
    }

    fn address(&self) -> Option<IpAddr> {
        let address = self.remote().inet()?.ip().to_canonical();
        let proxies = &self.databases()?.own;
        let (networks, is_recursive) = (proxies.networks.get(), *proxies.is_recursive.get());
        forwarded_client(self, address, networks, is_recursive).or(Some(address))
    }
}
