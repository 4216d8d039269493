//! Client side: settings for handshakes with servers.
//!
//! A client is built together with its configuration, as [`TlsServer`](super::TlsServer) is. Locations with the same
//! settings share one client, and with it the sessions that can be resumed.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bstr::{BString, ByteSlice};
use gale_config::{Diagnostic, Setting, Word};
use gale_process::Resources;
use parking_lot::Mutex;
use rustls::ClientConfig;
use rustls::client::{Resumption, UnbufferedClientConnection};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::{TLS12, TLS13};

use super::commands::Commanded;
use super::failure::TlsFailure;
use super::load;
use super::named::{NamedFailure, NamedLoader};
use super::random;
use super::server::{HTTP2, named_file, read_list, read_pair, read_passwords};
use super::settings::TlsClientSettings;
use super::suites;
use super::verify::Purpose;
use super::verify_server::Verifier;

/// Servers whose sessions are kept, for each set of settings.
const SESSIONS_MAX: usize = 256;

/// Client certificates for which sessions are kept.
const CERTIFICATES_MAX: usize = 32;

/// Settings for handshakes with servers.
pub struct TlsClient {
    config: Arc<ClientConfig>,
    /// Used when the server name cannot be in a certificate. It resumes no sessions, since they may be another name's.
    config_alone: Arc<ClientConfig>,
    identity: [u8; 32],
    /// `true` if a signature with its key takes milliseconds.
    signs_slowly: bool,
    /// Loader of the certificate, if its name has variables.
    named: Option<Named>,
}

/// Parts needed to complete a client once the name of its certificate is known.
struct Named {
    loader: NamedLoader,
    reuses_sessions: bool,
    /// Sessions by client certificate, the most recently used last.
    sessions: Mutex<Vec<(Box<[u8]>, Resumption)>>,
}

impl TlsClient {
    pub(super) fn connection(&self, name: &[u8]) -> Result<UnbufferedClientConnection, TlsFailure> {
        let text = name.to_str().unwrap_or_default();
        let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
        let (config, name) = match ServerName::try_from(bare.to_owned()) {
            Ok(name) => (&self.config, name),
            // Addresses are not sent as server names (RFC 6066, section 3), and no certificate matches this one.
            Err(_) => (&self.config_alone, no_name()),
        };
        UnbufferedClientConnection::new(Arc::clone(config), name).map_err(TlsFailure::of)
    }

    /// `true` if the name of its certificate has variables: handshakes then need [`TlsClient::with_certificate`].
    pub fn needs_certificate(&self) -> bool {
        self.named.is_some()
    }

    /// The client for one handshake, with the certificate and key of these names, which are read in a thread pool. An
    /// empty name means no certificate, as in nginx.
    ///
    /// # Errors
    /// The certificate or the key cannot be loaded.
    pub async fn with_certificate(&self, certificate: &[u8], key: &[u8]) -> Result<Arc<TlsClient>, NamedFailure> {
        let (mut config, mut config_alone) =
            (ClientConfig::clone(&self.config), ClientConfig::clone(&self.config_alone));
        let mut signs_slowly = self.signs_slowly;
        if let Some(named) = self.named.as_ref().filter(|_| !certificate.is_empty()) {
            let pair = named.loader.pair(certificate, key).await?;
            signs_slowly = load::signs_slowly(&pair);
            config.resumption = named.resumption(pair.cert.first().map_or(&[], |own| own));
            config.client_auth_cert_resolver = Arc::new(SingleCertAndKey::from(CertifiedKey::clone(&pair)));
            config_alone.client_auth_cert_resolver = Arc::clone(&config.client_auth_cert_resolver);
        }
        let (config, config_alone) = (Arc::new(config), Arc::new(config_alone));
        Ok(Arc::new(TlsClient { config, config_alone, identity: self.identity, signs_slowly, named: None }))
    }

    /// The client for one handshake that offers these application protocols (ALPN). If a certificate is needed, call
    /// this on the result of [`TlsClient::with_certificate`].
    pub fn offering(&self, protocols: Vec<Vec<u8>>) -> Arc<TlsClient> {
        let (mut config, mut config_alone) =
            (ClientConfig::clone(&self.config), ClientConfig::clone(&self.config_alone));
        config.alpn_protocols.clone_from(&protocols);
        config_alone.alpn_protocols = protocols;
        let (config, config_alone) = (Arc::new(config), Arc::new(config_alone));
        let (identity, signs_slowly) = (self.identity, self.signs_slowly);
        Arc::new(TlsClient { config, config_alone, identity, signs_slowly, named: None })
    }

    /// `true` if signatures take too long for an event loop.
    pub(super) fn signs_slowly(&self) -> bool {
        self.signs_slowly
    }

    /// Digest of the settings: differs between clients with different settings.
    pub fn identity(&self) -> &[u8; 32] {
        &self.identity
    }
}

impl Named {
    /// Session store for this client certificate.
    fn resumption(&self, certificate: &[u8]) -> Resumption {
        if !self.reuses_sessions {
            return Resumption::disabled();
        }
        let mut sessions = self.sessions.lock();
        let known = sessions.iter().position(|(own, _)| **own == *certificate);
        let own = match known {
            Some(place) => sessions.remove(place),
            None => (certificate.into(), Resumption::in_memory_sessions(SESSIONS_MAX)),
        };
        let resumption = own.1.clone();
        sessions.push(own);
        if sessions.len() > CERTIFICATES_MAX {
            sessions.remove(0);
        }
        resumption
    }
}

/// Placeholder for a server name that is not a valid one.
pub(super) fn no_name() -> ServerName<'static> {
    ServerName::from(std::net::IpAddr::from([0; 4]))
}

/// Settings that distinguish clients.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    versions: (bool, bool),
    ciphers: Vec<u8>,
    flags: [bool; 5],
    verify_depth: u64,
    files: [Vec<u8>; 5],
    /// Names and values, alternately.
    commands: Vec<Vec<u8>>,
    /// Address of the certificate cache, which two directives never share.
    cache: usize,
}

/// Creates clients, one for each set of settings.
pub struct TlsClientLoader {
    prefix: PathBuf,
    clients: HashMap<Key, Arc<TlsClient>>,
}

impl TlsClientLoader {
    /// `prefix` is the directory that relative file names with variables are below.
    pub fn new(prefix: PathBuf) -> TlsClientLoader {
        TlsClientLoader { prefix, clients: HashMap::new() }
    }

    /// The client of these settings; `prefix` begins the directives of the module they belong to. Harmless faults are
    /// noted as warnings.
    ///
    /// # Errors
    /// Errors with nginx's messages.
    pub fn client(
        &mut self,
        settings: &TlsClientSettings,
        prefix: &str,
        resources: &mut dyn Resources,
        notes: &mut Vec<Diagnostic>,
    ) -> Result<Arc<TlsClient>, Diagnostic> {
        let versions = *settings.versions.get();
        let text = |setting: &Setting<Word>| named_file(setting).map_or(Vec::new(), |word| word.text.to_vec());
        let verifies = *settings.verifies.get();
        let files = [
            &settings.trusted_certificate,
            &settings.crl,
            &settings.certificate,
            &settings.key,
            &settings.password_file,
        ];
        let commands = settings.commands.get_opt().into_iter().flatten();
        let cache = settings.certificate_cache.get_opt().and_then(Option::as_ref);
        let key = Key {
            versions: (versions.tls12, versions.tls13),
            ciphers: settings.ciphers.get().to_vec(),
            flags: [
                *settings.tells_name.get(),
                verifies,
                *settings.reuses_sessions.get(),
                settings.offers_http2,
                settings.trusts_system,
            ],
            verify_depth: *settings.verify_depth.get(),
            files: files.map(text),
            commands: commands.flat_map(|command| [command.name.text.to_vec(), command.value.text.to_vec()]).collect(),
            cache: cache.map_or(0, |cache| Arc::as_ptr(cache).addr()),
        };
        if let Some(client) = self.clients.get(&key) {
            return Ok(Arc::clone(client));
        }
        let client = Arc::new(make(settings, prefix, &key, &self.prefix, resources, notes)?);
        self.clients.insert(key, Arc::clone(&client));
        Ok(client)
    }
}

fn make(
    settings: &TlsClientSettings,
    prefix: &str,
    key: &Key,
    files_prefix: &Path,
    resources: &mut dyn Resources,
    notes: &mut Vec<Diagnostic>,
) -> Result<TlsClient, Diagnostic> {
    random::want();
    let commanded = commanded(settings, notes)?;
    let provider = suites::provider(&commanded, notes)?;
    let mut identity = Identity::of(key);
    let (trusted, revoked) = match *settings.verifies.get() {
        false => (None, Vec::new()),
        true => {
            let authorities = |text: &[u8]| load::authorities(text, Purpose::Server);
            let trusted = match named_file(&settings.trusted_certificate) {
                Some(word) => read_list("certificate", word, resources, authorities)?,
                None if settings.trusts_system => authorities_of_system(resources)?,
                None => {
                    let message = format!("no {prefix}_ssl_trusted_certificate for {prefix}_ssl_verify");
                    return Err(settings.verifies.error(message));
                }
            };
            identity.add(&trusted);
            let revoked = named_file(&settings.crl)
                .map(|word| read_list("CRL", word, resources, load::revocations))
                .transpose()?;
            let revoked = revoked.unwrap_or_default();
            identity.add(&revoked);
            (Some(trusted), revoked)
        }
    };
    let verifier = Verifier::new(trusted, revoked, *settings.verify_depth.get(), &provider);
    let versions = commanded.versions.get();
    let versions: Vec<_> =
        [versions.tls13.then_some(&TLS13), versions.tls12.then_some(&TLS12)].into_iter().flatten().collect();
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&versions)
        .map_err(|error| commanded.versions.error(error.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let passwords = named_file(&settings.password_file).map(|word| read_passwords(word, resources)).transpose()?;
    let passwords = passwords.unwrap_or_default();
    let has_name = settings.names_certificate() && commanded.certificate.is_none();
    let pair = if has_name { None } else { pair(settings, &commanded, prefix, &passwords, resources, notes)? };
    let signs_slowly = pair.as_ref().is_some_and(load::signs_slowly);
    let mut config = match pair {
        None => builder.with_no_client_auth(),
        Some(pair) => {
            identity.add(&pair.cert);
            builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(pair)))
        }
    };
    config.enable_sni = *settings.tells_name.get();
    if settings.offers_http2 {
        config.alpn_protocols = vec![HTTP2.to_vec()];
    }
    config.resumption = Resumption::disabled();
    config.cert_compressors = Vec::new();
    config.cert_decompressors = Vec::new();
    let config_alone = Arc::new(config.clone());
    if *settings.reuses_sessions.get() {
        config.resumption = Resumption::in_memory_sessions(SESSIONS_MAX);
    }
    let named = has_name.then(|| Named {
        loader: NamedLoader {
            prefix: files_prefix.to_owned(),
            passwords,
            cache: settings.certificate_cache.get_opt().cloned().flatten(),
        },
        reuses_sessions: *settings.reuses_sessions.get(),
        sessions: Mutex::default(),
    });
    Ok(TlsClient { config: Arc::new(config), config_alone, identity: identity.finish(), signs_slowly, named })
}

/// Common locations of the system's CA store.
pub(super) const SYSTEM_STORES: &[&str] = &[
    // Debian, Ubuntu, Arch, Gentoo, Alpine
    "/etc/ssl/certs/ca-certificates.crt",
    // Fedora, RHEL
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    // SUSE
    "/var/lib/ca-certificates/ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

fn authorities_of_system(resources: &mut dyn Resources) -> Result<Vec<CertificateDer<'static>>, Diagnostic> {
    for path in SYSTEM_STORES {
        if let Ok(text) = resources.secret(Path::new(path)) {
            return load::authorities(&text, Purpose::Server)
                .map_err(|why| Diagnostic::emerg(format!("cannot load certificates \"{path}\": {why}")));
        }
    }
    let message = "no file with trusted CA certificates was found on this system";
    Err(Diagnostic::emerg(message).hint("install ca-certificates, or name a file by \"ssl_trusted_certificate\""))
}

/// Merges directives and commands.
fn commanded(settings: &TlsClientSettings, notes: &mut Vec<Diagnostic>) -> Result<Commanded, Diagnostic> {
    let mut curves = Setting::default();
    curves.set(BString::from("auto"), None);
    let (versions, ciphers) = (settings.versions.clone(), settings.ciphers.clone());
    let mut commanded = Commanded { versions, ciphers, curves, ..Commanded::default() };
    commanded.carry_out(settings.commands.get_opt().map_or(&[][..], Vec::as_slice), notes)?;
    Ok(commanded)
}

/// Certificate and key that are presented to servers on request.
fn pair(
    settings: &TlsClientSettings,
    commanded: &Commanded,
    prefix: &str,
    passwords: &[Vec<u8>],
    resources: &mut dyn Resources,
    notes: &mut Vec<Diagnostic>,
) -> Result<Option<CertifiedKey>, Diagnostic> {
    let certificate = commanded.certificate.as_ref().or(named_file(&settings.certificate));
    let Some(certificate) = certificate else { return Ok(None) };
    let Some(key) = commanded.key.as_ref().or(named_file(&settings.key)) else {
        let message =
            format!("no \"{prefix}_ssl_certificate_key\" is defined for certificate \"{}\"", certificate.text);
        return Err(Diagnostic::emerg(message).at(certificate.span));
    };
    let pair = read_pair(certificate, key, passwords, resources, notes)?;
    Ok(Some(CertifiedKey::clone(&pair)))
}

/// Hash over settings and the files they name. It keeps apart connections that were made with different settings, or
/// with the same settings after a file changed.
struct Identity(::aws_lc_rs::digest::Context);

impl Identity {
    fn of(key: &Key) -> Identity {
        let mut identity = Identity(::aws_lc_rs::digest::Context::new(&::aws_lc_rs::digest::SHA256));
        let (tls12, tls13) = key.versions;
        let flags = [&key.flags[..], &[tls12, tls13]].concat().into_iter().map(u8::from).collect::<Vec<_>>();
        identity.add(&[&flags[..], &key.verify_depth.to_be_bytes(), &key.ciphers]);
        identity.add(&key.files);
        identity.add(&key.commands);
        identity
    }

    fn add(&mut self, items: &[impl AsRef<[u8]>]) {
        self.0.update(&(items.len() as u64).to_be_bytes());
        for item in items {
            let item = item.as_ref();
            self.0.update(&(item.len() as u64).to_be_bytes());
            self.0.update(item);
        }
    }

    fn finish(self) -> [u8; 32] {
        self.0.finish().as_ref().try_into().expect("a digest's length")
    }
}
