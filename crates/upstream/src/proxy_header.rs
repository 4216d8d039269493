//! PROXY protocol header, sent to a server before anything else; it names the client.
//! (<https://www.haproxy.org/download/3.2/doc/proxy-protocol.txt>)

use gale_config::{Diagnostic, Statement, values};
use gale_protocol::proxy_protocol::{CertificateTold, TlsTold, Transport, write_version_1, write_version_2};
use gale_runtime::SocketAddress;
use gale_tls::{TlsStream, Verdict};

/// `proxy_protocol`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProxyVersion {
    /// No header.
    #[default]
    Off,
    /// Version 1: a line of text.
    Version1,
    /// Version 2: binary.
    Version2,
}

impl ProxyVersion {
    /// Parses the directive: `off`, `on` for version 1, `v2`.
    ///
    /// # Errors
    /// Any other word.
    pub fn parse(statement: &Statement) -> Result<ProxyVersion, Diagnostic> {
        let versions = [("off", ProxyVersion::Off), ("on", ProxyVersion::Version1), ("v2", ProxyVersion::Version2)];
        values::enumeration(statement, &versions)
    }

    /// The header for a client's connection from `source` to `destination`, over TCP or UDP; empty for `Off`. Without
    /// two IP addresses it says UNKNOWN (version 1) or LOCAL (version 2).
    pub fn header(
        self,
        transport: Transport,
        source: &SocketAddress,
        destination: Option<&SocketAddress>,
        tls: Option<&TlsStream>,
    ) -> Vec<u8> {
        let mut header = Vec::new();
        let source = source.inet();
        let destination = destination.and_then(SocketAddress::inet);
        match self {
            ProxyVersion::Off => {}
            ProxyVersion::Version1 => write_version_1(source, destination, &mut header),
            ProxyVersion::Version2 => {
                let tls = tls.and_then(told);
                write_version_2(source, destination, transport, tls.as_ref(), &mut header);
            }
        }
        header
    }
}

/// Properties of the client's TLS session for the header.
fn told(tls: &TlsStream) -> Option<TlsTold> {
    tls.details(|details| {
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
