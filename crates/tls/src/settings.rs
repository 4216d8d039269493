//! `ssl_…` directives of a server (<https://nginx.org/en/docs/http/ngx_http_ssl_module.html>). The module with the
//! directives fills these structs.

use std::sync::Arc;
use std::time::Duration;

use bstr::BString;
use gale_config::{Setting, Word};

use super::commands::Command;
use super::named::CertificateCache;

/// Values of the `ssl_…` directives.
#[derive(Default)]
pub struct TlsSettings {
    /// `ssl_certificate`
    pub certificates: Setting<Vec<Word>>,
    /// `ssl_certificate_key`
    pub keys: Setting<Vec<Word>>,
    /// `ssl_certificate_cache`, for certificates whose names have variables.
    pub certificate_cache: Setting<Option<Arc<CertificateCache>>>,
    /// `ssl_password_file`
    pub password_file: Setting<Word>,
    /// `ssl_conf_command`
    pub commands: Setting<Vec<Command>>,
    /// `ssl_protocols`
    pub versions: Setting<Versions>,
    /// `ssl_ciphers`
    pub ciphers: Setting<BString>,
    /// `ssl_prefer_server_ciphers`
    pub prefers_own_ciphers: Setting<bool>,
    /// `ssl_ecdh_curve`
    pub curves: Setting<BString>,
    /// `ssl_buffer_size`
    pub buffer_size: Setting<u64>,
    /// `ssl_session_cache`
    pub session_cache: Setting<SessionCache>,
    /// `ssl_session_tickets`
    pub session_tickets: Setting<bool>,
    /// `ssl_session_ticket_key`
    pub ticket_keys: Setting<Vec<Word>>,
    /// `ssl_session_timeout`
    pub session_timeout: Setting<Duration>,
    /// `ssl_verify_client`
    pub verify_client: Setting<VerifyClient>,
    /// `ssl_verify_depth`
    pub verify_depth: Setting<u64>,
    /// `ssl_client_certificate`
    pub client_certificate: Setting<Word>,
    /// `ssl_trusted_certificate`
    pub trusted_certificate: Setting<Word>,
    /// `ssl_crl`
    pub crl: Setting<Word>,
    /// `ssl_dhparam`; not used.
    pub dh_parameters: Setting<Word>,
    /// `ssl_reject_handshake`
    pub rejects_handshake: Setting<bool>,
    /// `ssl_alpn`: protocols to negotiate; unset for those of HTTP.
    pub alpn: Setting<Vec<BString>>,
    /// `ssl_handshake_timeout`
    pub handshake_timeout: Setting<Duration>,
    /// `ssl_early_data`: accepts TLSv1.3 early data.
    pub early_data: Setting<bool>,
    /// `ssl_certificate_compression`
    pub compresses_certificates: Setting<bool>,
    /// `ssl_stapling`: staples OCSP responses.
    pub staples: Setting<bool>,
    /// `ssl_stapling_file`
    pub stapling_file: Setting<Word>,
    /// `ssl_stapling_responder`
    pub stapling_responder: Setting<Word>,
    /// `ssl_stapling_verify`
    pub verifies_stapling: Setting<bool>,
    /// `ssl_ocsp`: client certificates that are checked.
    pub ocsp: Setting<AsksAbout>,
    /// `ssl_ocsp_responder`
    pub ocsp_responder: Setting<Word>,
    /// `ssl_ocsp_cache`: name and size.
    pub ocsp_cache: Setting<Option<(BString, u64)>>,
}

/// Client certificates that are checked with OCSP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsksAbout {
    /// None.
    Nothing,
    /// Only the client's own.
    Leaf,
    /// All but the root authority's.
    Chain,
}

impl TlsClientSettings {
    /// `true` if the name of the certificate or of the key has variables; both are then treated so.
    pub fn names_certificate(&self) -> bool {
        self.certificate.get_opt().into_iter().chain(self.key.get_opt()).any(has_variables)
    }
}

/// Variables of the module that obtains certificates: certificate and key.
const MANAGED: [&[u8]; 2] = [b"$acme_certificate", b"$acme_certificate_key"];

impl TlsSettings {
    /// `true` if the only certificate is a managed one.
    pub(super) fn is_managed(&self) -> bool {
        let is = |setting: &Setting<Vec<Word>>, name: &[u8]| match setting.get_opt().map_or(&[][..], Vec::as_slice) {
            [] => true,
            [word] => word.text == name,
            _ => false,
        };
        is(&self.certificates, MANAGED[0]) && is(&self.keys, MANAGED[1])
    }

    /// `true` if any name of a certificate or key has variables; all are then treated so.
    pub fn names_certificates(&self) -> bool {
        let words = self.certificates.get_opt().into_iter().chain(self.keys.get_opt()).flatten();
        words.into_iter().any(has_variables)
    }
}

fn has_variables(word: &Word) -> bool {
    word.text.contains(&b'$')
}

/// `proxy_ssl_…` directives (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html>). The modules' tables of
/// directives supply the defaults. An empty file name means none.
#[derive(Clone, Default)]
pub struct TlsClientSettings {
    /// `proxy_ssl_protocols`
    pub versions: Setting<Versions>,
    /// `proxy_ssl_ciphers`
    pub ciphers: Setting<BString>,
    /// `proxy_ssl_server_name`: sends the server name (SNI).
    pub tells_name: Setting<bool>,
    /// `proxy_ssl_verify`
    pub verifies: Setting<bool>,
    /// `proxy_ssl_verify_depth`
    pub verify_depth: Setting<u64>,
    /// `proxy_ssl_trusted_certificate`
    pub trusted_certificate: Setting<Word>,
    /// `true` if the system's CA store is trusted where no file is given.
    pub trusts_system: bool,
    /// `proxy_ssl_crl`
    pub crl: Setting<Word>,
    /// `proxy_ssl_certificate`
    pub certificate: Setting<Word>,
    /// `proxy_ssl_certificate_key`
    pub key: Setting<Word>,
    /// `proxy_ssl_certificate_cache`
    pub certificate_cache: Setting<Option<Arc<CertificateCache>>>,
    /// `proxy_ssl_password_file`
    pub password_file: Setting<Word>,
    /// `proxy_ssl_conf_command`
    pub commands: Setting<Vec<Command>>,
    /// `proxy_ssl_session_reuse`
    pub reuses_sessions: Setting<bool>,
    /// `true` for upstreams that speak HTTP/2: ALPN then offers only that.
    pub offers_http2: bool,
}

/// Enabled versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// TLSv1.2
    pub tls12: bool,
    /// TLSv1.3
    pub tls13: bool,
}

/// Server-side session cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionCache {
    /// No cache; clients are told so.
    Off,
    /// No cache; clients are told that sessions may be resumed.
    None,
    /// Shared by all workers, with this name and size in bytes.
    Shared(BString, u64),
    /// For this many sessions of this server alone.
    Builtin(u64),
}

/// Mode of `ssl_verify_client`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VerifyClient {
    /// No certificate is requested.
    #[default]
    Off,
    /// A valid certificate is required.
    On,
    /// A certificate is optional, but has to be valid.
    Optional,
    /// A certificate is optional, and its issuer may be unknown.
    OptionalNoCa,
}
