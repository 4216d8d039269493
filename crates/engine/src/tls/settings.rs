//! What `ssl_…` directives say of a server
//! (<https://nginx.org/en/docs/http/ngx_http_ssl_module.html>). The module that has the directives fills it.

use std::sync::Arc;
use std::time::Duration;

use bstr::BString;
use gale_config::{Setting, Word};

use super::commands::Command;
use super::named::CertificateCache;

/// See the file's head.
#[derive(Default)]
pub struct TlsSettings {
    /// `ssl_certificate`
    pub certificates: Setting<Vec<Word>>,
    /// `ssl_certificate_key`
    pub keys: Setting<Vec<Word>>,
    /// `ssl_certificate_cache`: what keeps certificates whose names have variables.
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
    /// `ssl_dhparam`, of which nothing is used.
    pub dh_parameters: Setting<Word>,
    /// `ssl_reject_handshake`
    pub rejects_handshake: Setting<bool>,
    /// `ssl_alpn`: the protocols that may be agreed upon; unset for those of HTTP.
    pub alpn: Setting<Vec<BString>>,
    /// `ssl_handshake_timeout`
    pub handshake_timeout: Setting<Duration>,
    /// `ssl_early_data`: whether clients that come back may send requests with their first message.
    pub early_data: Setting<bool>,
    /// `ssl_certificate_compression`
    pub compresses_certificates: Setting<bool>,
    /// `ssl_stapling`: whether clients are told what the issuer's responder says of the certificate.
    pub staples: Setting<bool>,
    /// `ssl_stapling_file`
    pub stapling_file: Setting<Word>,
    /// `ssl_stapling_responder`
    pub stapling_responder: Setting<Word>,
    /// `ssl_stapling_verify`
    pub verifies_stapling: Setting<bool>,
    /// `ssl_ocsp`: which certificates of clients a responder is asked about.
    pub ocsp: Setting<AsksAbout>,
    /// `ssl_ocsp_responder`
    pub ocsp_responder: Setting<Word>,
    /// `ssl_ocsp_cache`: a name and a size.
    pub ocsp_cache: Setting<Option<(BString, u64)>>,
}

/// Which certificates of clients a responder is asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsksAbout {
    /// None.
    Nothing,
    /// The client's own.
    Leaf,
    /// All but the authority's.
    Chain,
}

impl TlsClientSettings {
    /// Whether the name of the certificate or of the key has variables: then both count as such.
    pub fn names_certificate(&self) -> bool {
        self.certificate.get_opt().into_iter().chain(self.key.get_opt()).any(has_variables)
    }
}

/// What the module that obtains certificates calls one, and its key.
const MANAGED: [&[u8]; 2] = [b"$acme_certificate", b"$acme_certificate_key"];

impl TlsSettings {
    /// Whether a certificate that a service manages is all that is wanted.
    pub(super) fn is_managed(&self) -> bool {
        let is = |setting: &Setting<Vec<Word>>, name: &[u8]| match setting.get_opt().map_or(&[][..], Vec::as_slice) {
            [] => true,
            [word] => word.text == name,
            _ => false,
        };
        is(&self.certificates, MANAGED[0]) && is(&self.keys, MANAGED[1])
    }

    /// Whether the names of certificates or keys have variables: then all of them count as such.
    pub fn names_certificates(&self) -> bool {
        let words = self.certificates.get_opt().into_iter().chain(self.keys.get_opt()).flatten();
        words.into_iter().any(has_variables)
    }
}

/// Whether a text has variables.
fn has_variables(word: &Word) -> bool {
    word.text.contains(&b'$')
}

/// What `proxy_ssl_…` directives say of connections to servers
/// (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html>). Rows in tables, as of every module that has them,
/// give it its defaults. An empty file's name is none.
#[derive(Clone, Default)]
pub struct TlsClientSettings {
    /// `proxy_ssl_protocols`
    pub versions: Setting<Versions>,
    /// `proxy_ssl_ciphers`
    pub ciphers: Setting<BString>,
    /// `proxy_ssl_server_name`: whether servers are told the name.
    pub tells_name: Setting<bool>,
    /// `proxy_ssl_verify`
    pub verifies: Setting<bool>,
    /// `proxy_ssl_verify_depth`
    pub verify_depth: Setting<u64>,
    /// `proxy_ssl_trusted_certificate`
    pub trusted_certificate: Setting<Word>,
    /// Without such a file the authorities of the system are trusted.
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
    /// HTTP/2 is spoken there, and nothing else is offered (ALPN).
    pub offers_http2: bool,
}

/// The versions that are spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// TLSv1.2
    pub tls12: bool,
    /// TLSv1.3
    pub tls13: bool,
}

/// Where sessions are kept that are no tickets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionCache {
    /// Clients are told that there is none.
    Off,
    /// Clients are told that there may be one, and there is none.
    None,
    /// For all workers, under a name, in so many bytes.
    Shared(BString, u64),
    /// For so many sessions, of this server alone.
    Builtin(u64),
}

/// Whether clients are asked for a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VerifyClient {
    /// They are not.
    #[default]
    Off,
    /// They have to have one.
    On,
    /// It has to be a good one if they have one.
    Optional,
    /// It may be anybody's.
    OptionalNoCa,
}
