//! realip: the client behind servers that are trusted to say who it is.
//!   set_real_ip_from ADDRESS | CIDR | HOST | unix:;              http, stream
//!   $realip_remote_addr, $realip_remote_port
//! (<https://nginx.org/en/docs/http/ngx_http_realip_module.html>)
//!
//! Who tells it is the PROXY protocol, or what a protocol has besides (the fields of a request).

use std::net::{IpAddr, SocketAddr};

use gale_base::cidr::Cidr;
use gale_config::{Diagnostic, Reporter, Statement};
use gale_engine::configuration::{Builder, HostAddresses};
use gale_engine::variables::Variable;
use gale_engine::variables::subject::Subject;
use gale_runtime::SocketAddress;

use super::append::{append_address, append_port, port};

/// Who is trusted: a `set_real_ip_from`.
#[derive(Clone, Debug)]
pub enum Trusted {
    /// Whoever comes by a UNIX-domain socket.
    Unix,
    /// The servers of a network.
    Network(Cidr),
    /// The servers of a name.
    Host(HostAddresses),
}

/// What a `set_real_ip_from` says; a name is looked up when all of the text is known. No argument is refused.
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

/// Whether one of these is who has this address.
pub fn trusts(trusted: &[Trusted], address: &SocketAddress) -> bool {
    trusts_address(trusted, address.inet().map(|address| address.ip().to_canonical()))
}

/// As [`trusts`]. Without an address it came on a UNIX-domain socket.
pub fn trusts_address(trusted: &[Trusted], address: Option<IpAddr>) -> bool {
    trusted.iter().any(|trusted| match (trusted, address) {
        (Trusted::Unix, None) => true,
        (Trusted::Network(network), Some(address)) => network.contains(address),
        (Trusted::Host(addresses), Some(address)) => addresses.get().contains(&address),
        _ => false,
    })
}

/// The client by the PROXY protocol (`listen … proxy_protocol`); none if nothing was told, or by somebody who is not
/// trusted.
pub fn proxied_client<S: Subject>(subject: &S, trusted: &[Trusted]) -> Option<SocketAddr> {
    let told = subject.connection().proxied()?.source;
    trusts(trusted, subject.remote()).then_some(told)
}

/// The other end of the connection, whoever the client is.
pub const fn variables<S: Subject>() -> [Variable<S>; 2] {
    [
        Variable::named("realip_remote_addr", |subject: &S, _, out| append_address(out, &subject.connection().remote)),
        Variable::named("realip_remote_port", |subject: &S, _, out| {
            append_port(out, port(&subject.connection().remote))
        }),
    ]
}
