//! geo: a request variable whose value depends on the client's address. See [`shared::geo`](crate::shared::geo).
//!   geo [$ADDRESS] $VARIABLE { [proxy NETWORK;] [proxy_recursive;] ... }          http
//! (<https://nginx.org/en/docs/http/ngx_http_geo_module.html>)
//!
//! The client's address may come from a trusted proxy's `X-Forwarded-For`.

use std::net::IpAddr;

use gale_base::cidr::Cidr;
use gale_config::{Contexts, Diagnostic, Statement};
use gale_engine::module::Module;
use gale_http::request::{Request, forwarded};

use crate::shared::geo::{self, Forwarding};

/// See the file's head.
pub static MODULE: Module =
    Module { name: "http_geo", directives: &[geo::directive::<Request, Proxies>(Contexts::HTTP)], ..Module::EMPTY };

/// Proxies whose `X-Forwarded-For` is trusted.
#[derive(Default)]
struct Proxies {
    networks: Vec<Cidr>,
    is_recursive: bool,
}

impl Forwarding<Request> for Proxies {
    fn add(&mut self, row: &Statement, notes: &mut Vec<Diagnostic>) -> Result<bool, Diagnostic> {
        match (&**row.name.text, row.args.as_slice()) {
            (b"proxy", [network]) => self.networks.push(geo::parse_network(network, notes)?),
            (b"proxy_recursive", []) => self.is_recursive = true,
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn client(&self, request: &Request, address: IpAddr) -> Option<IpAddr> {
        forwarded_client(request, address, &self.networks, self.is_recursive)
    }
}

/// Returns the client's address from `X-Forwarded-For` if `address` belongs to these networks; with `is_recursive` the
/// last address in the field that does not belong to them.
pub(super) fn forwarded_client(
    request: &Request,
    address: IpAddr,
    networks: &[Cidr],
    is_recursive: bool,
) -> Option<IpAddr> {
    let trusts = |address| networks.iter().any(|network| network.contains(address));
    if !trusts(address) {
        return None;
    }
    let fields = request.fields().filter(|(_, name, _)| name.eq_ignore_ascii_case(b"X-Forwarded-For"));
    let values: Vec<&[u8]> = fields.map(|(_, _, value)| value).collect();
    forwarded::client(&values, is_recursive, trusts).map(|client| client.ip().to_canonical())
}
