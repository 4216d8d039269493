//! The header of the PROXY protocol that a server gets: who the client is.
//! (<https://nginx.org/en/docs/stream/ngx_stream_proxy_module.html#proxy_protocol>)

use gale_engine::tls::Verdict;
use gale_engine::variables::subject::Subject;
use gale_protocol::proxy_protocol::{CertificateTold, TlsTold, Transport, write_version_1, write_version_2};

use super::settings::ProxyVersion;
use crate::session::Session;

/// The header for this session; empty for none.
pub(super) fn header(session: &Session, version: ProxyVersion) -> Vec<u8> {
    let mut header = Vec::new();
    let source = session.remote().inet();
    let destination = session.local_address().and_then(|address| address.inet());
    match version {
        ProxyVersion::Off => {}
        ProxyVersion::Version1 => write_version_1(source, destination, &mut header),
        ProxyVersion::Version2 => {
            let transport = if session.datagrams().is_some() { Transport::Datagram } else { Transport::Stream };
            let tls = told(session);
            write_version_2(source, destination, transport, tls.as_ref(), &mut header);
        }
    }
    header
}

/// What there is to tell of the client's TLS.
fn told(session: &Session) -> Option<TlsTold> {
    session.tls()?.details(|details| {
        let certificate = details.client_certificate();
        TlsTold {
            authority: details.server_name().map(<[u8]>::to_vec),
            alpn: details.alpn().map(<[u8]>::to_vec),
            version: details.version(),
            cipher: details.cipher(),
            common_name: certificate.as_ref().and_then(|certificate| certificate.common_name()),
            certificate: certificate.map(|_| CertificateTold {
                is_fresh: !details.is_resumed(),
                is_good: matches!(details.verdict(), Verdict::Good),
            }),
        }
    })
}
