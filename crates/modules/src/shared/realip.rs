//! realip: the client address that a trusted server sends.
//!   set_real_ip_from ADDRESS | CIDR | HOST | unix:;              http, stream
//!   $realip_remote_addr, $realip_remote_port
//! (<https://nginx.org/en/docs/http/ngx_http_realip_module.html>)
//!
//! The address comes from the PROXY protocol, or from the protocol itself, such as a request's header fields.

use std::net::{IpAddr, SocketAddr};

use gale_base::cidr::Cidr;
use gale_config::server_address::HostAddresses;
use gale_config::{Diagnostic, Reporter, Statement};
use gale_engine::configuration::Builder;
use gale_engine::variables::Variable;
use gale_engine::variables::subject::Subject;
use gale_runtime::SocketAddress;

use super::append::{append_address, append_port, port};

/// A trusted server: the argument of `set_real_ip_from`.
#[derive(Clone, Debug)]
pub enum Trusted {
    /// All clients on UNIX-domain sockets.
    Unix,
    /// A network.
    Network(Cidr),
    /// The addresses of a host name.
    Host(HostAddresses),
}

/// Parses a `set_real_ip_from`. A name is resolved when the whole configuration is known. Any other text counts as a
/// host name.
pub fn trusted(builder: &mut Builder, statement: &Statement) -> Result<Trusted, Diagnostic> {
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

/// Returns `true` if this address is trusted.
pub fn trusts(trusted: &[Trusted], address: &SocketAddress) -> bool {
    trusts_address(trusted, address.inet().map(|address| address.ip().to_canonical()))
}

/// As [`trusts`]. `None` stands for a UNIX-domain socket.
pub fn trusts_address(trusted: &[Trusted], address: Option<IpAddr>) -> bool {
    trusted.iter().any(|trusted| match (trusted, address) {
        (Trusted::Unix, None) => true,
        (Trusted::Network(network), Some(address)) => network.contains(address),
        (Trusted::Host(addresses), Some(address)) => addresses.get().contains(&address),
        _ => false,
    })
}

/// Returns the client's address from the PROXY protocol (`listen … proxy_protocol`), or `None` if there is none or the
/// sender is not trusted.
pub fn proxied_client<S: Subject>(subject: &S, trusted: &[Trusted]) -> Option<SocketAddr> {
    let told = subject.connection().proxied()?.source;
    trusts(trusted, subject.remote()).then_some(told)
}

/// Returns variables with the connection's own remote address and port.
pub const fn variables<S: Subject>() -> [Variable<S>; 2] {
    [
        Variable::named("realip_remote_addr", |subject: &S, _, out| append_address(out, &subject.connection().remote)),
        Variable::named("realip_remote_port", |subject: &S, _, out| {
            append_port(out, port(&subject.connection().remote))
        }),
    ]
}
