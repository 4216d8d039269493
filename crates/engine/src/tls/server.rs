//! A server's certificates, keys and rules, ready for handshakes.
//!
//! Built while a configuration is: files come through [`Resources`], so that only the master reads them. What several
//! servers have in common (a certificate, a list of suites) is made once.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use bstr::ByteSlice;
use gale_config::{Diagnostic, Word};
use gale_process::Resources;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::CertificateDer;
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert, StoresServerSessions};
use rustls::sign::CertifiedKey;
use rustls::version::{TLS12, TLS13};
use rustls::{CipherSuite, DistinguishedName, ServerConfig, SignatureAlgorithm};

use super::load;
use super::settings::{SessionCache, TlsSettings, VerifyClient};
use super::suites;
use super::tickets::{Identity, Sessions, TicketKeys, Tickets};
use super::verify::{self, ClientRules, TakesAny};

/// Largest contents of a record (RFC 8446, section 5.1).
const RECORD_BYTES_MAX: u64 = 16 * 1024;

/// Smallest contents of a record that make sense.
const RECORD_BYTES_MIN: u64 = 512;

/// What HTTP/1 is called in the negotiation of protocols, as nginx has it.
const HTTP1: [&[u8]; 3] = [b"http/1.1", b"http/1.0", b"http/0.9"];

/// See the file's head.
pub struct TlsServer {
    config: Arc<ServerConfig>,
    record_bytes: usize,
    client_rules: ClientRules,
    rejects: bool,
    identity: Identity,
}

impl TlsServer {
    /// A server of which only the library's configuration is of interest.
    #[cfg(test)]
    pub(super) fn of_config(config: ServerConfig) -> Arc<TlsServer> {
        let config = Arc::new(config);
        let (client_rules, identity) = (ClientRules::default(), Identity::default());
        Arc::new(TlsServer { config, record_bytes: RECORD_BYTES_MAX as usize, client_rules, rejects: false, identity })
    }

    /// The library's configuration.
    pub(super) fn config(&self) -> &Arc<ServerConfig> {
        &self.config
    }

    /// The most that a record holds: `ssl_buffer_size`.
    pub(super) fn record_bytes(&self) -> usize {
        self.record_bytes
    }

    /// What is asked of clients.
    pub(super) fn client_rules(&self) -> &ClientRules {
        &self.client_rules
    }

    /// Whether clients have to have a certificate, or may.
    pub fn verify_client(&self) -> VerifyClient {
        self.client_rules.mode
    }

    /// Whether a handshake with one is as good as one with the other: the certificates and the rules are the same.
    pub fn asks_the_same(&self, other: &TlsServer) -> bool {
        self.identity == other.identity
    }

    /// Whether it refuses every handshake: `ssl_reject_handshake`.
    pub fn rejects(&self) -> bool {
        self.rejects
    }
}

/// Makes servers, and keeps what they have in common.
#[derive(Default)]
pub struct TlsLoader {
    pairs: HashMap<(Vec<u8>, Vec<u8>), Arc<CertifiedKey>>,
    providers: HashMap<(Vec<u8>, Vec<u8>), Arc<CryptoProvider>>,
}

impl TlsLoader {
    /// The server of these settings; none where they name no certificate. What cannot be had, and does no harm, is
    /// noted.
    ///
    /// # Errors
    /// nginx's messages.
    pub fn server(
        &mut self,
        settings: &TlsSettings,
        resources: &mut dyn Resources,
        notes: &mut Vec<Diagnostic>,
    ) -> Result<Option<Arc<TlsServer>>, Diagnostic> {
        let rejects = *settings.rejects_handshake.get();
        let certificates = settings.certificates.get_opt().map_or(&[][..], Vec::as_slice);
        if certificates.is_empty() && !rejects {
            return Ok(None);
        }
        let pairs = self.pairs(settings, certificates, resources)?;
        let provider = self.provider(settings, notes)?;
        let (client_rules, hints) = client_rules(settings, &provider, resources)?;
        let identity = identity(&pairs, &client_rules);
        let versions = settings.versions.get();
        let versions: Vec<_> =
            [versions.tls13.then_some(&TLS13), versions.tls12.then_some(&TLS12)].into_iter().flatten().collect();
        let wrong = |error: rustls::Error| settings.versions.error(error.to_string());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&versions)
            .map_err(wrong)?;
        let builder = match client_rules.mode {
            VerifyClient::Off => builder.with_no_client_auth(),
            _ => builder.with_client_cert_verifier(Arc::new(TakesAny { hints, provider })),
        };
        let mut config = builder.with_cert_resolver(Arc::new(Pairs(pairs)));
        config.ignore_client_order = *settings.prefers_own_ciphers.get();
        config.alpn_protocols = HTTP1.iter().map(|name| name.to_vec()).collect();
        config.cert_compressors = Vec::new();
        config.cert_decompressors = Vec::new();
        set_sessions(&mut config, settings, identity, resources)?;
        let record_bytes = (*settings.buffer_size.get()).clamp(RECORD_BYTES_MIN, RECORD_BYTES_MAX) as usize;
        Ok(Some(Arc::new(TlsServer { config: Arc::new(config), record_bytes, client_rules, rejects, identity })))
    }

    /// The certificates with their keys.
    fn pairs(
        &mut self,
        settings: &TlsSettings,
        certificates: &[Word],
        resources: &mut dyn Resources,
    ) -> Result<Vec<Arc<CertifiedKey>>, Diagnostic> {
        let keys = settings.keys.get_opt().map_or(&[][..], Vec::as_slice);
        if let Some(without) = certificates.get(keys.len()) {
            let message = format!("no \"ssl_certificate_key\" is defined for certificate \"{}\"", without.text);
            return Err(Diagnostic::emerg(message).at(without.span));
        }
        let mut pairs = Vec::new();
        for (certificate, key) in certificates.iter().zip(keys) {
            let name = (certificate.text.to_vec(), key.text.to_vec());
            if let Some(pair) = self.pairs.get(&name) {
                pairs.push(Arc::clone(pair));
                continue;
            }
            let failed = |word: &Word, what: &str, why: String| {
                Diagnostic::emerg(format!("cannot load {what} \"{}\": {why}", word.text)).at(word.span)
            };
            let text = read(certificate, resources).map_err(|why| failed(certificate, "certificate", why))?;
            let chain = load::certificates(&text).map_err(|why| failed(certificate, "certificate", why))?;
            let text = read(key, resources).map_err(|why| failed(key, "certificate key", why))?;
            let private = load::private_key(&text).map_err(|why| failed(key, "certificate key", why))?;
            let pair = load::pair(chain, private, &key.text.to_str_lossy())
                .map_err(|message| Diagnostic::emerg(message).at(key.span))?;
            self.pairs.insert(name, Arc::clone(&pair));
            pairs.push(pair);
        }
        // Of several that a client can take it gets the first: those that sign quickly.
        pairs.sort_by_key(|pair| pair.key.algorithm() == SignatureAlgorithm::RSA);
        Ok(pairs)
    }

    /// The suites and groups that are spoken.
    fn provider(
        &mut self,
        settings: &TlsSettings,
        notes: &mut Vec<Diagnostic>,
    ) -> Result<Arc<CryptoProvider>, Diagnostic> {
        let (ciphers, curves) = (settings.ciphers.get(), settings.curves.get());
        let name = (ciphers.to_vec(), curves.to_vec());
        if let Some(provider) = self.providers.get(&name) {
            return Ok(Arc::clone(provider));
        }
        let found = suites::suites(&ciphers.to_str_lossy());
        if found.suites.is_empty() {
            let message = format!(
                "SSL_CTX_set_cipher_list(\"{ciphers}\") failed (SSL: error:0A0000B9:SSL routines::no cipher match)"
            );
            return Err(settings
                .ciphers
                .error(message)
                .hint("Gale speaks ECDHE with AES-GCM or ChaCha20-Poly1305, and none that lacks forward secrecy"));
        }
        if !found.missing.is_empty() && settings.ciphers.span().is_some() {
            let message = format!("cipher suites that Gale does not have are left out: {}", found.missing.join(":"));
            notes.push(Diagnostic::warn(message).at_opt(settings.ciphers.span()));
        }
        let (groups, missing) = suites::groups(&curves.to_str_lossy());
        if groups.is_empty() {
            return Err(settings.curves.error(format!("SSL_CTX_set1_curves_list(\"{curves}\") failed")));
        }
        if !missing.is_empty() {
            let message = format!("curves that Gale does not have are left out: {}", missing.join(":"));
            notes.push(Diagnostic::warn(message).at_opt(settings.curves.span()));
        }
        let provider = Arc::new(CryptoProvider {
            cipher_suites: suites::suites_13().chain(found.suites).collect(),
            kx_groups: groups,
            ..aws_lc_rs::default_provider()
        });
        self.providers.insert(name, Arc::clone(&provider));
        Ok(provider)
    }
}

/// The contents of a file that a directive names, or of `data:…`; or OpenSSL's words.
pub(super) fn read(word: &Word, resources: &mut dyn Resources) -> Result<Vec<u8>, String> {
    if let Some(text) = word.text.strip_prefix(b"data:") {
        return Ok(text.to_vec());
    }
    let path = word.text.to_path().map_err(|error| error.to_string())?;
    resources.secret(path).map_err(|error| load::unreadable(&word.text.to_str_lossy(), &error))
}

type Asked = (ClientRules, Vec<DistinguishedName>);

/// What is asked of clients, and the authorities that they are told of.
fn client_rules(
    settings: &TlsSettings,
    provider: &Arc<CryptoProvider>,
    resources: &mut dyn Resources,
) -> Result<Asked, Diagnostic> {
    let mode = *settings.verify_client.get();
    if mode == VerifyClient::Off {
        return Ok(Asked::default());
    }
    let named = settings.client_certificate.get_opt();
    let trusted = settings.trusted_certificate.get_opt();
    if mode != VerifyClient::OptionalNoCa && named.is_none() && trusted.is_none() {
        let message = "no ssl_client_certificate or ssl_trusted_certificate for ssl_verify_client";
        return Err(settings.verify_client.error(message));
    }
    let mut load = |word: &Word| {
        let failed = |why: String| {
            let message = format!("SSL_CTX_load_verify_locations(\"{}\") failed ({why})", word.text);
            Diagnostic::emerg(message).at(word.span)
        };
        let text = read(word, resources).map_err(failed)?;
        load::authorities(&text).map_err(failed)
    };
    let told = named.map(&mut load).transpose()?.unwrap_or_default();
    let mut authorities = told.clone();
    authorities.extend(trusted.map(&mut load).transpose()?.unwrap_or_default());
    let revoked = match settings.crl.get_opt() {
        None => Vec::new(),
        Some(word) => {
            let failed = |why: String| {
                let message = format!("SSL_CTX_load_verify_locations(\"{}\") failed ({why})", word.text);
                Diagnostic::emerg(message).at(word.span)
            };
            let text = read(word, resources).map_err(failed)?;
            load::revocations(&text).map_err(failed)?
        }
    };
    let mut hints: Vec<DistinguishedName> = Vec::new();
    for hint in told.iter().filter_map(subject) {
        if !hints.iter().any(|known| known.as_ref() == hint.as_ref()) {
            hints.push(hint);
        }
    }
    let strict = verify::strict(&authorities, provider);
    let depth = *settings.verify_depth.get();
    Ok((ClientRules { mode, authorities, revoked, strict, depth }, hints))
}

/// The subject of a certificate, as clients are told of it.
fn subject(certificate: &CertificateDer<'_>) -> Option<DistinguishedName> {
    use x509_parser::prelude::{FromDer, X509Certificate};
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    Some(certificate.subject().as_raw().to_vec().into())
}

/// What sessions belong to.
fn identity(pairs: &[Arc<CertifiedKey>], rules: &ClientRules) -> Identity {
    use ::aws_lc_rs::digest::{Context, SHA256};
    let mut hash = Context::new(&SHA256);
    let own = pairs.iter().filter_map(|pair| pair.cert.first());
    let revoked = rules.revoked.iter().map(|list| &**list);
    for der in own.chain(&rules.authorities).map(|certificate| &**certificate).chain(revoked) {
        hash.update(&(der.len() as u64).to_be_bytes());
        hash.update(der);
    }
    hash.update(&[rules.mode as u8]);
    hash.update(&rules.depth.to_be_bytes());
    let mut identity = Identity::default();
    identity.copy_from_slice(hash.finish().as_ref());
    identity
}

/// How clients come back to their sessions.
fn set_sessions(
    config: &mut ServerConfig,
    settings: &TlsSettings,
    identity: Identity,
    resources: &mut dyn Resources,
) -> Result<(), Diagnostic> {
    let lifetime = u32::try_from(settings.session_timeout.get().as_secs()).unwrap_or(u32::MAX);
    let storage: Arc<dyn StoresServerSessions> = match settings.session_cache.get() {
        SessionCache::Off | SessionCache::None => Arc::new(NoServerSessionStorage {}),
        SessionCache::Shared(name, bytes) => Arc::new(Sessions::shared(name, *bytes, identity, lifetime)),
        SessionCache::Builtin(sessions) => Arc::new(Sessions::own(*sessions, identity, lifetime)),
    };
    let has_storage = storage.can_cache();
    config.session_storage = storage;
    if !settings.session_tickets.get() {
        if !has_storage {
            config.send_tls13_tickets = 0;
        }
        return Ok(());
    }
    let mut files = Vec::new();
    for word in settings.ticket_keys.get_opt().into_iter().flatten() {
        let failed = |message: String| Diagnostic::emerg(message).at(word.span);
        let text = read(word, resources).map_err(|why| failed(format!("open() \"{}\" failed: {why}", word.text)))?;
        files.push(TicketKeys::of_file(&word.text.to_str_lossy(), &text).map_err(failed)?);
    }
    let keys = if files.is_empty() { TicketKeys::Own } else { TicketKeys::OfFiles(files.into()) };
    config.ticketer = Arc::new(Tickets { keys, identity, lifetime });
    Ok(())
}

/// Chooses among a server's certificates.
struct Pairs(Vec<Arc<CertifiedKey>>);

impl fmt::Debug for Pairs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pairs")
    }
}

impl ResolvesServerCert for Pairs {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let fits = |pair: &&Arc<CertifiedKey>| {
            pair.key.choose_scheme(hello.signature_schemes()).is_some()
                && hello.cipher_suites().iter().any(|suite| fits_suite(*suite, pair.key.algorithm()))
        };
        // Nobody's fault here if it fits none: the library says so.
        self.0.iter().find(fits).or(self.0.first()).cloned()
    }
}

/// Whether a suite goes with such a key.
fn fits_suite(suite: CipherSuite, algorithm: SignatureAlgorithm) -> bool {
    match suite.as_str() {
        Some(name) if name.contains("_ECDHE_ECDSA_") => algorithm != SignatureAlgorithm::RSA,
        Some(name) if name.contains("_ECDHE_RSA_") => algorithm == SignatureAlgorithm::RSA,
        Some(name) => name.starts_with("TLS13_"),
        None => false,
    }
}
