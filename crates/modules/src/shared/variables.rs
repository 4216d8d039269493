//! Variables that every protocol has: of the connection, the time and the host.
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html#variables>,
//! <https://nginx.org/en/docs/stream/ngx_stream_core_module.html#variables>)

use std::time::UNIX_EPOCH;

use gale_engine::variables::Variable;
use gale_engine::variables::subject::Subject;
use gale_process::hostname;
use gale_protocol::proxy_protocol::ProxyHeader;

use super::append::{
    append, append_address, append_binary_address, append_number, append_port, append_seconds, append_text,
    append_time_iso8601, append_time_local, port,
};

/// See the file's head.
pub const fn variables<S: Subject>() -> [Variable<S>; 17] {
    [
        Variable::named("remote_port", |subject: &S, _, out| append_port(out, port(subject.remote()))),
        Variable::named("binary_remote_addr", |subject: &S, _, out| append_binary_address(out, subject.remote())),
        Variable::named("server_addr", |subject: &S, _, out| {
            subject.local().is_some_and(|address| append_address(out, address))
        }),
        Variable::named("server_port", |subject: &S, _, out| {
            subject.local().is_some_and(|address| append_port(out, port(address)))
        }),
        Variable::named("connection", |subject: &S, _, out| append_number(out, subject.connection().number)),
        Variable::named("proxy_protocol_addr", |subject: &S, _, out| {
            proxied(subject).is_some_and(|header| append_text(out, header.source.ip()))
        }),
        Variable::named("proxy_protocol_port", |subject: &S, _, out| {
            proxied(subject).is_some_and(|header| append_proxy_port(out, header.source.port()))
        }),
        Variable::named("proxy_protocol_server_addr", |subject: &S, _, out| {
            proxied(subject).is_some_and(|header| append_text(out, header.destination.ip()))
        }),
        Variable::named("proxy_protocol_server_port", |subject: &S, _, out| {
            proxied(subject).is_some_and(|header| append_proxy_port(out, header.destination.port()))
        }),
        Variable::family("proxy_protocol_tlv_", |subject: &S, name, out| {
            proxied(subject).is_some_and(|header| header.append_tlv(name, out))
        }),
        // The time and the host.
        Variable::named("msec", |_: &S, _, out| {
            append_seconds(out, gale_runtime::wall().duration_since(UNIX_EPOCH).unwrap_or_default())
        }),
        Variable::named("time_local", |_: &S, _, out| append_time_local(out, gale_runtime::wall_seconds())),
        Variable::named("time_iso8601", |_: &S, _, out| append_time_iso8601(out, gale_runtime::wall_seconds())),
        Variable::named("hostname", |_: &S, _, out| append(out, hostname())),
        Variable::named("pid", |_: &S, _, out| append_number(out, std::process::id().into())),
        // Gale's own version in both: logs show which program wrote them, and nginx's version would promise behaviour
        // that Gale does not have.
        Variable::named("nginx_version", |_: &S, _, out| append(out, VERSION)),
        Variable::named("gale_version", |_: &S, _, out| append(out, VERSION)),
    ]
}

const VERSION: &[u8] = env!("CARGO_PKG_VERSION").as_bytes();

fn proxied<S: Subject>(subject: &S) -> Option<&ProxyHeader> {
    subject.connection().proxied()
}

fn append_proxy_port(out: &mut Vec<u8>, port: u16) -> bool {
    append_port(out, Some(port).filter(|&port| port != 0))
}
