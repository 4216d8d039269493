//! What is asked of servers, and how: the client's side of handshakes.
//!
//! Built while a configuration is, as [`TlsServer`](super::TlsServer) is. Locations with the same settings share one,
//! and with it the sessions that it may resume.

use std::collections::HashMap;
use std::sync::Arc;

use bstr::ByteSlice;
use gale_config::{Diagnostic, Setting, Word};
use gale_process::Resources;
use rustls::ClientConfig;
use rustls::client::{Resumption, UnbufferedClientConnection};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::ServerName;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::{TLS12, TLS13};

use super::failure::TlsFailure;
use super::load;
use super::server::read;
use super::settings::TlsClientSettings;
use super::suites;
use super::verify_server::Verifier;

/// How many servers' sessions are kept for each set of settings.
const SESSIONS_MAX: usize = 256;

/// See the file's head.
pub struct TlsClient {
    config: Arc<ClientConfig>,
    /// For names that no certificate can have: nothing is resumed that another name was good for.
    config_alone: Arc<ClientConfig>,
    identity: [u8; 32],
}

impl TlsClient {
    /// A connection to the server of this name.
    pub(super) fn connection(&self, name: &[u8]) -> Result<UnbufferedClientConnection, TlsFailure> {
        let text = name.to_str().unwrap_or_default();
        let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
        let (config, name) = match ServerName::try_from(bare.to_owned()) {
            Ok(name) => (&self.config, name),
            // Servers are told no addresses (RFC 6066, section 3), and no certificate is for this one.
            Err(_) => (&self.config_alone, no_name()),
        };
        UnbufferedClientConnection::new(Arc::clone(config), name).map_err(TlsFailure::of)
    }

    /// Differs from that of every client that asks for something else.
    pub fn identity(&self) -> &[u8; 32] {
        &self.identity
    }
}

/// Stands for a name that is none.
pub(super) fn no_name() -> ServerName<'static> {
    ServerName::from(std::net::IpAddr::from([0; 4]))
}

/// What clients are told apart by.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    versions: (bool, bool),
    ciphers: Vec<u8>,
    flags: [bool; 3],
    verify_depth: u64,
    files: [Vec<u8>; 4],
}

/// Makes clients, one for each set of settings.
#[derive(Default)]
pub struct TlsClientLoader {
    clients: HashMap<Key, Arc<TlsClient>>,
}

impl TlsClientLoader {
    /// The client of these settings, which are those of a module whose directives begin with `prefix`. What cannot be
    /// had, and does no harm, is noted.
    ///
    /// # Errors
    /// nginx's messages.
    pub fn client(
        &mut self,
        settings: &TlsClientSettings,
        prefix: &str,
        resources: &mut dyn Resources,
        notes: &mut Vec<Diagnostic>,
    ) -> Result<Arc<TlsClient>, Diagnostic> {
        let versions = *settings.versions.get();
        let text = |setting: &Setting<Word>| named(setting).map_or(Vec::new(), |word| word.text.to_vec());
        let verifies = *settings.verifies.get();
        let key = Key {
            versions: (versions.tls12, versions.tls13),
            ciphers: settings.ciphers.get().to_vec(),
            flags: [*settings.tells_name.get(), verifies, *settings.reuses_sessions.get()],
            verify_depth: *settings.verify_depth.get(),
            files: [&settings.trusted_certificate, &settings.crl, &settings.certificate, &settings.key].map(text),
        };
        if let Some(client) = self.clients.get(&key) {
            return Ok(Arc::clone(client));
        }
        let client = Arc::new(make(settings, prefix, &key, resources, notes)?);
        self.clients.insert(key, Arc::clone(&client));
        Ok(client)
    }
}

fn named(setting: &Setting<Word>) -> Option<&Word> {
    setting.get_opt().filter(|word| !word.text.is_empty())
}

fn make(
    settings: &TlsClientSettings,
    prefix: &str,
    key: &Key,
    resources: &mut dyn Resources,
    notes: &mut Vec<Diagnostic>,
) -> Result<TlsClient, Diagnostic> {
    let provider = provider(settings, notes)?;
    let mut identity = Identity::of(key);
    let (trusted, revoked) = match *settings.verifies.get() {
        false => (None, Vec::new()),
        true => {
            let Some(word) = named(&settings.trusted_certificate) else {
                let message = format!("no {prefix}_ssl_trusted_certificate for {prefix}_ssl_verify");
                return Err(settings.verifies.error(message));
            };
            let trusted = read_list(word, resources, load::authorities)?;
            identity.add(&trusted);
            let revoked = named(&settings.crl).map(|word| read_list(word, resources, load::revocations)).transpose()?;
            let revoked = revoked.unwrap_or_default();
            identity.add(&revoked);
            (Some(trusted), revoked)
        }
    };
    let verifier = Verifier::new(trusted, revoked, *settings.verify_depth.get(), &provider);
    let versions = settings.versions.get();
    let versions: Vec<_> =
        [versions.tls13.then_some(&TLS13), versions.tls12.then_some(&TLS12)].into_iter().flatten().collect();
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&versions)
        .map_err(|error| settings.versions.error(error.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = match pair(settings, prefix, resources)? {
        None => builder.with_no_client_auth(),
        Some(pair) => {
            identity.add(&pair.cert);
            builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(pair)))
        }
    };
    config.enable_sni = *settings.tells_name.get();
    config.resumption = Resumption::disabled();
    config.cert_compressors = Vec::new();
    config.cert_decompressors = Vec::new();
    let config_alone = Arc::new(config.clone());
    if *settings.reuses_sessions.get() {
        config.resumption = Resumption::in_memory_sessions(SESSIONS_MAX);
    }
    Ok(TlsClient { config: Arc::new(config), config_alone, identity: identity.finish() })
}

/// The suites and groups that are spoken.
fn provider(settings: &TlsClientSettings, notes: &mut Vec<Diagnostic>) -> Result<Arc<CryptoProvider>, Diagnostic> {
    let ciphers = settings.ciphers.get();
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
    Ok(Arc::new(CryptoProvider {
        cipher_suites: suites::suites_13().chain(found.suites).collect(),
        kx_groups: suites::groups("auto").0,
        ..aws_lc_rs::default_provider()
    }))
}

/// What of a kind is in a file of PEM.
fn read_list<T>(
    word: &Word,
    resources: &mut dyn Resources,
    parse: impl Fn(&[u8]) -> Result<Vec<T>, String>,
) -> Result<Vec<T>, Diagnostic> {
    let failed = |why: String| {
        let message = format!("SSL_CTX_load_verify_locations(\"{}\") failed ({why})", word.text);
        Diagnostic::emerg(message).at(word.span)
    };
    let text = read(word, resources).map_err(failed)?;
    parse(&text).map_err(failed)
}

/// The certificate that is shown to servers which ask for one, with its key.
fn pair(
    settings: &TlsClientSettings,
    prefix: &str,
    resources: &mut dyn Resources,
) -> Result<Option<CertifiedKey>, Diagnostic> {
    let Some(certificate) = named(&settings.certificate) else { return Ok(None) };
    let Some(key) = named(&settings.key) else {
        let message =
            format!("no \"{prefix}_ssl_certificate_key\" is defined for certificate \"{}\"", certificate.text);
        return Err(settings.certificate.error(message));
    };
    let failed = |word: &Word, what: &str, why: String| {
        Diagnostic::emerg(format!("cannot load {what} \"{}\": {why}", word.text)).at(word.span)
    };
    let text = read(certificate, resources).map_err(|why| failed(certificate, "certificate", why))?;
    let chain = load::certificates(&text).map_err(|why| failed(certificate, "certificate", why))?;
    let text = read(key, resources).map_err(|why| failed(key, "certificate key", why))?;
    let private = load::private_key(&text).map_err(|why| failed(key, "certificate key", why))?;
    let pair = load::pair(chain, private, &key.text.to_str_lossy())
        .map_err(|message| Diagnostic::emerg(message).at(key.span))?;
    Ok(Some(CertifiedKey::clone(&pair)))
}

/// What tells connections apart that were made by different settings, or by the same ones with other files behind
/// them.
struct Identity(::aws_lc_rs::digest::Context);

impl Identity {
    fn of(key: &Key) -> Identity {
        let mut identity = Identity(::aws_lc_rs::digest::Context::new(&::aws_lc_rs::digest::SHA256));
        let (tls12, tls13) = key.versions;
        let flags = [&key.flags[..], &[tls12, tls13]].concat().into_iter().map(u8::from).collect::<Vec<_>>();
        identity.add(&[&flags[..], &key.verify_depth.to_be_bytes(), &key.ciphers]);
        identity.add(&key.files);
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
