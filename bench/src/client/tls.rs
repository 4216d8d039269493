//! tls: configuration of our own TLS clients.

use std::path::Path;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};

/// Returns a configuration that trusts only this certificate. All handshakes are full, because sessions are not stored.
pub fn configuration(
    provider: CryptoProvider,
    certificate: &Path,
    protocol: Option<&str>,
) -> Result<Arc<ClientConfig>, String> {
    let mut roots = RootCertStore::empty();
    let der = CertificateDer::from_pem_file(certificate).map_err(|error| format!("certificate: {error}"))?;
    roots.add(der).map_err(|error| format!("certificate: {error}"))?;
    let builder = ClientConfig::builder_with_provider(Arc::new(provider)).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| format!("TLS: {error}"))?;
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols.extend(protocol.map(|protocol| protocol.as_bytes().to_vec()));
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Arc::new(config))
}
