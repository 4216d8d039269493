//! A server's certificates, keys and rules, ready for handshakes.
//!
//! A server is built with its configuration. Files come through [`Resources`], so only the master reads them. Parts
//! that several servers have in common (a certificate, a list of suites) are built once.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use bstr::{BString, ByteSlice};
use gale_base::os_error::OsErrorText;
use gale_config::{Diagnostic, Setting, Word};
use gale_process::Resources;
use rustls::compress::CompressionCache;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, UnixTime};
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::version::{TLS12, TLS13};
use rustls::{CipherSuite, DistinguishedName, ServerConfig, SignatureAlgorithm};

use super::certificate::Certificate;
use super::commands::Commanded;
use super::compression::{self, Compressed, PREPARED};
use super::encrypted_key;
use super::load;
use super::managed::ManagedCertificate;
use super::named::{NamedFailure, NamedLoader, Passwords};
use super::ocsp::clients::{OcspCache, OcspRules};
use super::random;
use super::settings::{AsksAbout, SessionCache, TlsSettings, VerifyClient};
use super::staple::{Lookup, ManagedStaple, Responder, Staple, StapleLoader};
use super::suites;
use super::tickets::{self, Identity, SessionStore, Sessions, TicketKeys, Tickets};
use super::verify::{self, ClientRules, Purpose, TakesAny};

/// Largest contents of a record (RFC 8446, section 5.1).
const RECORD_BYTES_MAX: u64 = 16 * 1024;

/// Smallest useful contents of a record.
const RECORD_BYTES_MIN: u64 = 512;

/// Most early data that a client may send, as in OpenSSL.
const EARLY_DATA_BYTES_MAX: u32 = 16 * 1024;

/// Sessions kept for early data if `ssl_session_cache` gives no number; OpenSSL's default.
const EARLY_DATA_SESSIONS: u64 = 20 * 1024;

/// Most tickets sent for a session, whatever a command says; each is a record.
const TICKETS_MAX: usize = 16;

/// Names of HTTP/1 in ALPN, as in nginx.
const HTTP1: [&[u8]; 3] = [b"http/1.1", b"http/1.0", b"http/0.9"];

/// Name of HTTP/2 in ALPN (RFC 9113, section 3.1). It is preferred.
pub(super) const HTTP2: &[u8] = b"h2";

/// TLS settings of a server, ready for handshakes.
pub struct TlsServer {
    config: Arc<ServerConfig>,
    /// The same with HTTP/2 in ALPN.
    config_http2: Arc<ServerConfig>,
    record_bytes: usize,
    client_rules: Arc<ClientRules>,
    rejects: bool,
    identity: Identity,
    /// Loader of the certificates, if their names have variables.
    named: Option<Named>,
    /// Certificate that a service obtains for it.
    managed: Option<Arc<ManagedCertificate>>,
    ocsp: Option<Arc<OcspRules>>,
    /// `true` if a signature takes milliseconds.
    signs_slowly: bool,
    /// Its compressed chains, cached for handshakes while they are referenced.
    compressed: Vec<Compressed>,
    /// Lifetime of sessions in tickets with the server's own keys, in seconds.
    ticket_lifetime: Option<u32>,
}

/// Parts needed to complete a configuration once the names of its certificates are known.
struct Named {
    loader: NamedLoader,
    sessions: SessionSettings,
}

impl TlsServer {
    /// A server with default rules around a configuration of the library.
    pub(super) fn of_config(config: ServerConfig) -> Arc<TlsServer> {
        let config = Arc::new(config);
        let (client_rules, identity) = (Arc::default(), Identity::default());
        let record_bytes = RECORD_BYTES_MAX as usize;
        Arc::new(TlsServer {
            config_http2: Arc::clone(&config),
            config,
            record_bytes,
            client_rules,
            rejects: false,
            identity,
            named: None,
            managed: None,
            ocsp: None,
            signs_slowly: false,
            compressed: Vec::new(),
            ticket_lifetime: None,
        })
    }

    /// A server for one challenge: presents this certificate to clients of this protocol and requests none.
    pub(super) fn of_challenge(pair: Arc<CertifiedKey>, alpn: &[u8]) -> Result<Arc<TlsServer>, String> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13, &TLS12]);
        let builder = builder.map_err(|error| error.to_string())?.with_no_client_auth();
        let mut config = builder.with_cert_resolver(Arc::new(Pairs::new([(pair, None)])));
        config.alpn_protocols = vec![alpn.to_vec()];
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(TlsServer::of_config(config))
    }

    /// The library's configuration, with HTTP/2 in ALPN if `http2`.
    pub(super) fn config(&self, http2: bool) -> &Arc<ServerConfig> {
        if http2 { &self.config_http2 } else { &self.config }
    }

    /// Largest contents of a record: `ssl_buffer_size`.
    pub(super) fn record_bytes(&self) -> usize {
        self.record_bytes
    }

    pub(super) fn client_rules(&self) -> &ClientRules {
        &self.client_rules
    }

    /// `true` if signatures take too long for an event loop.
    pub(super) fn signs_slowly(&self) -> bool {
        self.signs_slowly
    }

    /// Settings of the revocation check of client certificates: `ssl_ocsp`.
    pub fn ocsp_rules(&self) -> Option<&OcspRules> {
        self.ocsp.as_deref()
    }

    /// Mode of `ssl_verify_client`.
    pub fn verify_client(&self) -> VerifyClient {
        self.client_rules.mode
    }

    /// `true` if certificates and rules are the same, so a handshake with one server is valid for the other.
    pub fn asks_the_same(&self, other: &TlsServer) -> bool {
        self.identity == other.identity
    }

    /// Lifetime in seconds of sessions in tickets with the server's own keys; `None` if there are no such tickets.
    pub fn ticket_lifetime(&self) -> Option<u32> {
        self.ticket_lifetime
    }

    /// `true` if it refuses every handshake: `ssl_reject_handshake`.
    pub fn rejects(&self) -> bool {
        self.rejects
    }

    /// `true` if handshakes have to load certificates first: with [`TlsServer::load_managed`], then
    /// [`TlsServer::with_certificates`].
    pub fn needs_certificates(&self) -> bool {
        self.named.is_some() || self.managed.as_ref().is_some_and(|managed| managed.current().is_none())
    }

    /// Certificate that a service obtains for it.
    pub fn managed(&self) -> Option<&Arc<ManagedCertificate>> {
        self.managed.as_ref()
    }

    /// Loads the managed certificate if that has not happened yet. Names of other certificates may refer to it.
    ///
    /// # Errors
    /// It cannot be loaded.
    pub async fn load_managed(&self) -> Result<(), NamedFailure> {
        match &self.managed {
            Some(managed) => managed
                .load()
                .await
                .map(drop)
                .map_err(|why| NamedFailure::new(format!("cannot load certificate \"{}\": {why}", managed.name()))),
            None => Ok(()),
        }
    }

    /// The server for one handshake, with the certificates and keys of these names, which are read in a thread pool.
    ///
    /// # Errors
    /// One of them cannot be loaded.
    pub async fn with_certificates(
        self: &Arc<Self>,
        names: &[(Vec<u8>, Vec<u8>)],
    ) -> Result<Arc<TlsServer>, NamedFailure> {
        if self.named.is_none() {
            return Ok(Arc::clone(self));
        }
        let mut config = ServerConfig::clone(&self.config);
        let mut signs_slowly = false;
        if let Some(named) = &self.named {
            let mut pairs = Vec::with_capacity(names.len());
            for (certificate, key) in names {
                pairs.push(named.loader.pair(certificate, key).await?);
            }
            signs_slowly = pairs.iter().any(|pair| load::signs_slowly(pair));
            // Sessions are bound to the certificates that they began with.
            named.sessions.apply(&mut config, identity(&pairs, &self.client_rules));
            config.cert_resolver = Arc::new(Pairs::new(pairs.into_iter().map(|pair| (pair, None))));
        }
        Ok(Arc::new(TlsServer {
            config_http2: Arc::new(with_http2(&config)),
            config: Arc::new(config),
            record_bytes: self.record_bytes,
            client_rules: Arc::clone(&self.client_rules),
            rejects: self.rejects,
            identity: self.identity,
            named: None,
            managed: self.managed.clone(),
            ocsp: self.ocsp.clone(),
            signs_slowly,
            compressed: self.compressed.clone(),
            ticket_lifetime: self.ticket_lifetime,
        }))
    }
}

/// The same configuration with HTTP/2 as the preferred protocol.
fn with_http2(config: &ServerConfig) -> ServerConfig {
    let mut config = config.clone();
    config.alpn_protocols.insert(0, HTTP2.to_vec());
    config
}

/// Creates servers and shares their common parts.
pub struct TlsLoader {
    prefix: PathBuf,
    pairs: HashMap<PairName, Arc<CertifiedKey>>,
    passwords: HashMap<Vec<u8>, Passwords>,
    providers: HashMap<[Vec<u8>; 3], Arc<CryptoProvider>>,
    staples: StapleLoader,
    /// Sizes of session stores, by name.
    stores: HashMap<BString, u64>,
    /// Unused files that were checked.
    checked: HashSet<(Unused, BString)>,
}

/// Kind of an unused file.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Unused {
    Authorities,
    Revocations,
    DhParameters,
}

/// Names of a certificate file, a key file and a password file.
type PairName = [Vec<u8>; 3];

impl TlsLoader {
    /// `prefix` is the directory that relative file names with variables are below.
    pub fn new(prefix: PathBuf) -> TlsLoader {
        TlsLoader {
            prefix,
            pairs: HashMap::new(),
            passwords: HashMap::new(),
            providers: HashMap::new(),
            staples: StapleLoader::default(),
            stores: HashMap::new(),
            checked: HashSet::new(),
        }
    }

    /// The server of these settings; `None` if they name no certificate. Harmless faults are noted as warnings.
    ///
    /// # Errors
    /// Errors with nginx's messages.
    pub fn server(
        &mut self,
        settings: &TlsSettings,
        resources: &mut dyn Resources,
        notes: &mut Vec<Diagnostic>,
    ) -> Result<Option<Arc<TlsServer>>, Diagnostic> {
        self.server_with(settings, None, &None, resources, notes)
    }

    /// Certificates whose OCSP status a service has to fetch ([`super::ocsp::stapling`]), once all servers are built.
    pub fn staples(&mut self) -> Vec<Arc<Staple>> {
        self.staples.fetched()
    }

    /// The same for managed certificates.
    pub fn managed_staples(&mut self) -> Vec<Arc<ManagedStaple>> {
        self.staples.managed()
    }

    /// As [`TlsLoader::server`], with a resolver for the names of responders and optionally a managed certificate.
    ///
    /// # Errors
    /// Errors with nginx's messages.
    pub fn server_with(
        &mut self,
        settings: &TlsSettings,
        managed: Option<&Arc<ManagedCertificate>>,
        lookup: &Lookup,
        resources: &mut dyn Resources,
        notes: &mut Vec<Diagnostic>,
    ) -> Result<Option<Arc<TlsServer>>, Diagnostic> {
        self.check_store(settings)?;
        let rejects = *settings.rejects_handshake.get();
        let mut certificates = settings.certificates.get_opt().map_or(&[][..], Vec::as_slice);
        let mut keys = settings.keys.get_opt().map_or(&[][..], Vec::as_slice);
        if certificates.is_empty() && !rejects && managed.is_none() {
            return Ok(None);
        }
        random::want();
        let commanded = commanded(settings, notes)?;
        let alone = managed.filter(|_| commanded.certificate.is_none() && settings.is_managed());
        if alone.is_some() {
            (certificates, keys) = (&[], &[]);
        }
        certificates = commanded.certificate.as_ref().map_or(certificates, std::slice::from_ref);
        keys = commanded.key.as_ref().map_or(keys, std::slice::from_ref);
        if let Some(without) = certificates.get(keys.len()) {
            let message = format!("no \"ssl_certificate_key\" is defined for certificate \"{}\"", without.text);
            return Err(Diagnostic::emerg(message).at(without.span));
        }
        let provider = self.provider(&commanded, notes)?;
        self.check_unused(settings, resources)?;
        let (client_rules, hints) = client_rules(settings, &provider, resources)?;
        let has_names = settings.names_certificates() && commanded.certificate.is_none() && alone.is_none();
        let (pairs, identity) = if let Some(managed) = alone {
            // Sessions stay valid with the next certificate for the same names.
            let names = managed.wanted().names.iter().map(String::as_bytes);
            (Vec::new(), identity_of(names, &client_rules))
        } else if has_names {
            let texts = certificates.iter().chain(keys).map(|word| word.text.as_slice());
            (Vec::new(), identity_of(texts, &client_rules))
        } else {
            let pairs = self.pairs(settings, certificates, keys, resources, notes)?;
            let identity = identity(&pairs, &client_rules);
            (pairs, identity)
        };
        let sessions = SessionSettings::read(settings, &commanded, resources)?;
        let versions = commanded.versions.get();
        let versions: Vec<_> =
            [versions.tls13.then_some(&TLS13), versions.tls12.then_some(&TLS12)].into_iter().flatten().collect();
        let wrong = |error: rustls::Error| commanded.versions.error(error.to_string());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&versions)
            .map_err(wrong)?;
        let builder = match client_rules.mode {
            VerifyClient::Off => builder.with_no_client_auth(),
            _ => builder.with_client_cert_verifier(Arc::new(TakesAny { hints, provider })),
        };
        let ocsp = ocsp_rules(settings, &client_rules, lookup, resources)?.map(Arc::new);
        let authorities = match named_file(&settings.trusted_certificate) {
            Some(word) if *settings.staples.get() && client_rules.authorities.is_empty() => {
                read_authorities(word, resources)?
            }
            _ => client_rules.authorities.clone(),
        };
        let mut choices = Vec::with_capacity(pairs.len());
        for (pair, name) in pairs.into_iter().zip(certificates) {
            let own = (&pair, name);
            let staple = self.staples.staple(settings, own, &authorities, lookup, resources, notes)?;
            choices.push((pair, staple));
        }
        let config_pairs: Vec<_> = choices.iter().map(|(pair, _)| Arc::clone(pair)).collect();
        let mut config = builder.with_cert_resolver(match alone {
            Some(managed) if *settings.staples.get() => {
                self.staples.staple_managed(settings, managed, &authorities, lookup, resources, notes)
            }
            Some(managed) => Arc::clone(managed) as Arc<dyn ResolvesServerCert>,
            None => Arc::new(Pairs::new(choices)),
        });
        config.ignore_client_order = commanded.prefers_own_ciphers;
        config.alpn_protocols = match settings.alpn.get_opt() {
            Some(names) => names.iter().map(|name| name.to_vec()).collect(),
            None => HTTP1.iter().map(|name| name.to_vec()).collect(),
        };
        let compressed = compressed(settings, &config_pairs)?;
        let signs_slowly = config_pairs.iter().any(|pair| load::signs_slowly(pair))
            || alone.is_some_and(|managed| managed.wanted().key.signs_slowly());
        // Managed certificates are compressed when they are loaded.
        let is_compressed = !compressed.is_empty() || alone.is_some() && *settings.compresses_certificates.get();
        config.cert_compressors = if is_compressed { vec![PREPARED] } else { Vec::new() };
        config.cert_compression_cache = Arc::new(CompressionCache::Disabled);
        config.cert_decompressors = Vec::new();
        sessions.apply(&mut config, identity);
        let ticket_lifetime = sessions.ticket_lifetime();
        if *settings.early_data.get() {
            config.max_early_data_size = EARLY_DATA_BYTES_MAX;
            // Early requests are answered before the client's last handshake message.
            config.send_half_rtt_data = true;
            if let Some(words) = settings.ticket_keys.get_opt().filter(|words| !words.is_empty()) {
                let message = "\"ssl_session_ticket_key\" has no effect with \"ssl_early_data\": sessions with early \
                               data can be used once and end with the process";
                notes.push(Diagnostic::warn(message).at(words[0].span));
            }
        }
        let record_bytes = (*settings.buffer_size.get()).clamp(RECORD_BYTES_MIN, RECORD_BYTES_MAX) as usize;
        let named = match has_names {
            true => Some(Named { loader: self.named_loader(settings, resources)?, sessions }),
            false => None,
        };
        let config_http2 = Arc::new(with_http2(&config));
        let (config, client_rules) = (Arc::new(config), Arc::new(client_rules));
        Ok(Some(Arc::new(TlsServer {
            config,
            config_http2,
            record_bytes,
            client_rules,
            rejects,
            identity,
            named,
            managed: managed.cloned(),
            ocsp,
            signs_slowly,
            compressed,
            ticket_lifetime,
        })))
    }

    /// Checks that a named store has the same size in all places.
    fn check_store(&mut self, settings: &TlsSettings) -> Result<(), Diagnostic> {
        let SessionCache::Shared(name, bytes) = settings.session_cache.get() else { return Ok(()) };
        let known = *self.stores.entry(name.clone()).or_insert(*bytes);
        match known == *bytes {
            true => Ok(()),
            false => Err(settings.session_cache.error(format!(
                "the size {bytes} of shared memory zone \"{name}\" conflicts with already declared size {known}"
            ))),
        }
    }

    /// Checks unused files, as nginx does: they must exist and have the right contents.
    fn check_unused(&mut self, settings: &TlsSettings, resources: &mut dyn Resources) -> Result<(), Diagnostic> {
        let is_used = *settings.verify_client.get() != VerifyClient::Off;
        let unused = |setting| named_file(setting).filter(|_| !is_used);
        let mut is_new = |what, word: &Word| self.checked.insert((what, word.text.clone()));
        if let Some(word) = unused(&settings.trusted_certificate).filter(|word| is_new(Unused::Authorities, word)) {
            read_authorities(word, resources)?;
        }
        if let Some(word) = unused(&settings.crl).filter(|word| is_new(Unused::Revocations, word)) {
            read_revocations(word, resources)?;
        }
        if let Some(word) = named_file(&settings.dh_parameters).filter(|word| is_new(Unused::DhParameters, word)) {
            check_dh_parameters(word, resources)?;
        }
        Ok(())
    }

    fn named_loader(
        &mut self,
        settings: &TlsSettings,
        resources: &mut dyn Resources,
    ) -> Result<NamedLoader, Diagnostic> {
        let passwords = self.passwords(settings.password_file.get_opt(), resources)?;
        let cache = settings.certificate_cache.get_opt().cloned().flatten();
        Ok(NamedLoader { prefix: self.prefix.clone(), passwords, cache })
    }

    /// The passwords of a file, which is read only once because it may be a pipe.
    fn passwords(&mut self, file: Option<&Word>, resources: &mut dyn Resources) -> Result<Passwords, Diagnostic> {
        let Some(word) = file else { return Ok(Passwords::default()) };
        if let Some(known) = self.passwords.get(word.text.as_slice()) {
            return Ok(Arc::clone(known));
        }
        let passwords = read_passwords(word, resources)?;
        self.passwords.insert(word.text.to_vec(), Arc::clone(&passwords));
        Ok(passwords)
    }

    /// The certificates with their keys.
    fn pairs(
        &mut self,
        settings: &TlsSettings,
        certificates: &[Word],
        keys: &[Word],
        resources: &mut dyn Resources,
        notes: &mut Vec<Diagnostic>,
    ) -> Result<Vec<Arc<CertifiedKey>>, Diagnostic> {
        let file = settings.password_file.get_opt();
        let passwords = self.passwords(file, resources)?;
        let mut pairs = Vec::new();
        for (certificate, key) in certificates.iter().zip(keys) {
            let file = file.map_or(Vec::new(), |file| file.text.to_vec());
            let name = [certificate.text.to_vec(), key.text.to_vec(), file];
            if let Some(pair) = self.pairs.get(&name) {
                pairs.push(Arc::clone(pair));
                continue;
            }
            let pair = read_pair(certificate, key, &passwords, resources, notes)?;
            self.pairs.insert(name, Arc::clone(&pair));
            pairs.push(pair);
        }
        Ok(pairs)
    }

    /// The enabled suites and groups.
    fn provider(
        &mut self,
        commanded: &Commanded,
        notes: &mut Vec<Diagnostic>,
    ) -> Result<Arc<CryptoProvider>, Diagnostic> {
        let of_13 = commanded.suites_13.get_opt().map_or(b"-".to_vec(), |list| list.to_vec());
        let name = [commanded.ciphers.get().to_vec(), of_13, commanded.curves.get().to_vec()];
        if let Some(provider) = self.providers.get(&name) {
            return Ok(Arc::clone(provider));
        }
        let provider = suites::provider(commanded, notes)?;
        self.providers.insert(name, Arc::clone(&provider));
        Ok(provider)
    }
}

/// Merges directives and commands.
fn commanded(settings: &TlsSettings, notes: &mut Vec<Diagnostic>) -> Result<Commanded, Diagnostic> {
    let mut commanded = Commanded {
        versions: settings.versions.clone(),
        ciphers: settings.ciphers.clone(),
        curves: settings.curves.clone(),
        prefers_own_ciphers: *settings.prefers_own_ciphers.get(),
        session_tickets: *settings.session_tickets.get(),
        ..Commanded::default()
    };
    commanded.carry_out(settings.commands.get_opt().map_or(&[][..], Vec::as_slice), notes)?;
    Ok(commanded)
}

pub(super) fn read_passwords(word: &Word, resources: &mut dyn Resources) -> Result<Passwords, Diagnostic> {
    let wrong = |message: String| Diagnostic::emerg(message).at(word.span);
    let path = word.text.to_path().map_err(|error| wrong(error.to_string()))?;
    let text = resources
        .secret(path)
        .map_err(|error| wrong(format!("open() \"{}\" failed {}", word.text, OsErrorText(&error))))?;
    let passwords = load::passwords(&text).map_err(|why| wrong(format!("{why} in \"{}\"", word.text)))?;
    Ok(passwords.into())
}

/// Reads a certificate and its key from files. A certificate outside its validity is noted.
pub(super) fn read_pair(
    certificate: &Word,
    key: &Word,
    passwords: &[Vec<u8>],
    resources: &mut dyn Resources,
    notes: &mut Vec<Diagnostic>,
) -> Result<Arc<CertifiedKey>, Diagnostic> {
    let failed = |word: &Word, what: &str, why: String| {
        Diagnostic::emerg(format!("cannot load {what} \"{}\": {why}", word.text)).at(word.span)
    };
    let text = read(certificate, resources).map_err(|why| failed(certificate, "certificate", why))?;
    let chain = load::certificates(&text).map_err(|why| failed(certificate, "certificate", why))?;
    let text = read(key, resources).map_err(|why| failed(key, "certificate key", why))?;
    let private = load::private_key(&text, passwords).map_err(|why| {
        let failed = failed(key, "certificate key", why);
        let needs_password = passwords.is_empty() && encrypted_key::is_encrypted(&text);
        if needs_password {
            failed.hint("the key is encrypted: set its password file with \"ssl_password_file\"")
        } else {
            failed
        }
    })?;
    if let Some(why) = chain.first().and_then(|own| Certificate::of(own)).and_then(|own| own.why_invalid_at(now())) {
        let message = format!("certificate \"{}\" {why}", certificate.text);
        notes.push(Diagnostic::warn(message).at(certificate.span));
    }
    load::pair(chain, private, &key.text.to_str_lossy()).map_err(|message| Diagnostic::emerg(message).at(key.span))
}

/// Seconds since 1970. Configurations are built on threads without an event loop's clock.
fn now() -> u64 {
    UnixTime::now().as_secs()
}

/// Contents of a file that a directive names, or of `data:…`. Errors are in OpenSSL's words.
pub(super) fn read(word: &Word, resources: &mut dyn Resources) -> Result<Vec<u8>, String> {
    if let Some(text) = word.text.strip_prefix(b"data:") {
        return Ok(text.to_vec());
    }
    let path = word.text.to_path().map_err(|error| error.to_string())?;
    resources.secret(path).map_err(|error| load::unreadable(&word.text.to_str_lossy(), &error))
}

/// File that a directive names; an empty name means none.
pub(super) fn named_file(setting: &Setting<Word>) -> Option<&Word> {
    setting.get_opt().filter(|word| !word.text.is_empty())
}

fn read_authorities(word: &Word, resources: &mut dyn Resources) -> Result<Vec<CertificateDer<'static>>, Diagnostic> {
    read_list("certificate", word, resources, |text| load::authorities(text, Purpose::Client))
}

fn read_revocations(
    word: &Word,
    resources: &mut dyn Resources,
) -> Result<Vec<CertificateRevocationListDer<'static>>, Diagnostic> {
    read_list("CRL", word, resources, load::revocations)
}

/// Reads all sections of a kind from a PEM file; `what` is nginx's word for the kind.
pub(super) fn read_list<T>(
    what: &str,
    word: &Word,
    resources: &mut dyn Resources,
    parse: impl Fn(&[u8]) -> Result<Vec<T>, String>,
) -> Result<Vec<T>, Diagnostic> {
    let failed = |why: String| Diagnostic::emerg(format!("cannot load {what} \"{}\": {why}", word.text)).at(word.span);
    let text = read(word, resources).map_err(failed)?;
    parse(&text).map_err(failed)
}

fn check_dh_parameters(word: &Word, resources: &mut dyn Resources) -> Result<(), Diagnostic> {
    let failed = |why: String| Diagnostic::emerg(why).at(word.span);
    let named = |function: &str| format!("{function}(\"{}\")", word.text);
    let unreadable = |why: String| failed(why.replacen("BIO_new_file()", &named("BIO_new_file"), 1));
    let text = read(word, resources).map_err(unreadable)?;
    load::dh_parameters(&text).map_err(|why| failed(format!("{} failed ({why})", named("PEM_read_bio_DHparams"))))
}

/// Settings of the revocation check of client certificates.
fn ocsp_rules(
    settings: &TlsSettings,
    client_rules: &ClientRules,
    lookup: &Lookup,
    resources: &mut dyn Resources,
) -> Result<Option<OcspRules>, Diagnostic> {
    let leaf_only = match settings.ocsp.get() {
        AsksAbout::Nothing => return Ok(None),
        AsksAbout::Leaf => true,
        AsksAbout::Chain => false,
    };
    if client_rules.mode == VerifyClient::OptionalNoCa {
        let message = "\"ssl_ocsp\" is incompatible with \"ssl_verify_client optional_no_ca\"";
        return Err(settings.ocsp.error(message));
    }
    let responder = settings.ocsp_responder.get_opt().map(|word| {
        Responder::of_setting(word, lookup, resources).map_err(|why| {
            let message = format!("{why} in OCSP responder \"{}\" in \"ssl_ocsp_responder\"", word.text);
            Diagnostic::emerg(message).at(word.span)
        })
    });
    let cache = settings.ocsp_cache.get_opt().and_then(Option::as_ref);
    let cache = cache.map(|(name, bytes)| OcspCache::shared(name, *bytes));
    Ok(Some(OcspRules { leaf_only, responder: responder.transpose()?, lookup: lookup.clone(), cache }))
}

/// The compressed chains of a server, if compression is on.
fn compressed(settings: &TlsSettings, pairs: &[Arc<CertifiedKey>]) -> Result<Vec<Compressed>, Diagnostic> {
    if !*settings.compresses_certificates.get() {
        return Ok(Vec::new());
    }
    if *settings.staples.get() {
        let message = "\"ssl_stapling\" is incompatible with \"ssl_certificate_compression\"";
        return Err(settings.compresses_certificates.error(message));
    }
    Ok(pairs.iter().filter_map(|pair| compression::compress(&pair.cert)).collect())
}

type Asked = (ClientRules, Vec<DistinguishedName>);

/// Rules for client certificates, with the verifier that sends the names of the authorities.
fn client_rules(
    settings: &TlsSettings,
    provider: &Arc<CryptoProvider>,
    resources: &mut dyn Resources,
) -> Result<Asked, Diagnostic> {
    let mode = *settings.verify_client.get();
    if mode == VerifyClient::Off {
        return Ok(Asked::default());
    }
    let named = named_file(&settings.client_certificate);
    let trusted = named_file(&settings.trusted_certificate);
    if mode != VerifyClient::OptionalNoCa && named.is_none() && trusted.is_none() {
        let message = "no ssl_client_certificate or ssl_trusted_certificate for ssl_verify_client";
        return Err(settings.verify_client.error(message));
    }
    let mut load = |word: &Word| read_authorities(word, resources);
    let told = named.map(&mut load).transpose()?.unwrap_or_default();
    let mut authorities = told.clone();
    authorities.extend(trusted.map(&mut load).transpose()?.unwrap_or_default());
    let revoked =
        named_file(&settings.crl).map(|word| read_revocations(word, resources)).transpose()?.unwrap_or_default();
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

/// Subject of a certificate, as sent in the list of authorities.
fn subject(certificate: &CertificateDer<'_>) -> Option<DistinguishedName> {
    use x509_parser::prelude::{FromDer, X509Certificate};
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    Some(certificate.subject().as_raw().to_vec().into())
}

/// Identity that sessions are bound to.
fn identity(pairs: &[Arc<CertifiedKey>], rules: &ClientRules) -> Identity {
    identity_of(pairs.iter().filter_map(|pair| pair.cert.first()).map(|own| &**own), rules)
}

fn identity_of<'c>(certificates: impl Iterator<Item = &'c [u8]>, rules: &'c ClientRules) -> Identity {
    use ::aws_lc_rs::digest::{Context, SHA256};
    let mut hash = Context::new(&SHA256);
    let authorities = rules.authorities.iter().map(|authority| &**authority);
    for der in certificates.chain(authorities).chain(rules.revoked.iter().map(|list| &**list)) {
        hash.update(&(der.len() as u64).to_be_bytes());
        hash.update(der);
    }
    hash.update(&[rules.mode as u8]);
    hash.update(&rules.depth.to_be_bytes());
    let mut identity = Identity::default();
    identity.copy_from_slice(hash.finish().as_ref());
    identity
}

struct SessionSettings {
    store: Option<SessionStore>,
    lifetime: u32,
    /// `None` if there are no tickets.
    keys: Option<TicketKeys>,
    tickets: Option<usize>,
}

impl SessionSettings {
    fn read(
        settings: &TlsSettings,
        commanded: &Commanded,
        resources: &mut dyn Resources,
    ) -> Result<SessionSettings, Diagnostic> {
        let mut files = Vec::new();
        for word in settings.ticket_keys.get_opt().into_iter().flatten() {
            let failed = |message: String| Diagnostic::emerg(message).at(word.span);
            let text =
                read(word, resources).map_err(|why| failed(format!("open() \"{}\" failed: {why}", word.text)))?;
            files.push(TicketKeys::of_file(&word.text.to_str_lossy(), &text).map_err(failed)?);
        }
        let keys = if files.is_empty() { TicketKeys::own() } else { TicketKeys::OfFiles(files.into()) };
        let has_early_data = *settings.early_data.get();
        Ok(SessionSettings {
            store: match settings.session_cache.get() {
                // Early data needs a store from which each session can be taken once.
                SessionCache::Off | SessionCache::None if has_early_data && commanded.session_tickets => {
                    Some(tickets::store_of(EARLY_DATA_SESSIONS))
                }
                SessionCache::Off | SessionCache::None => None,
                SessionCache::Shared(name, bytes) => Some(tickets::shared_store(name, *bytes)),
                SessionCache::Builtin(sessions) => Some(tickets::store_of(*sessions)),
            },
            lifetime: u32::try_from(settings.session_timeout.get().as_secs()).unwrap_or(u32::MAX),
            keys: (commanded.session_tickets && !has_early_data).then_some(keys),
            tickets: commanded.tickets,
        })
    }

    /// See [`TlsServer::ticket_lifetime`].
    fn ticket_lifetime(&self) -> Option<u32> {
        matches!(self.keys, Some(TicketKeys::Own(_))).then_some(self.lifetime)
    }

    fn apply(&self, config: &mut ServerConfig, identity: Identity) {
        let lifetime = self.lifetime;
        config.session_storage = match &self.store {
            None => Arc::new(NoServerSessionStorage {}),
            Some(store) => Arc::new(Sessions::new(store, identity, lifetime)),
        };
        if let Some(tickets) = self.tickets {
            config.send_tls13_tickets = tickets.min(TICKETS_MAX);
        }
        match &self.keys {
            Some(keys) => config.ticketer = Arc::new(Tickets { keys: keys.clone(), identity, lifetime }),
            None if self.store.is_none() => config.send_tls13_tickets = 0,
            None => {}
        }
    }
}

/// Chooses among a server's certificates.
struct Pairs(Vec<Choice>);

type Choice = (Arc<CertifiedKey>, Option<Arc<Staple>>);

impl Pairs {
    fn new(pairs: impl IntoIterator<Item = Choice>) -> Pairs {
        let mut pairs: Vec<Choice> = pairs.into_iter().collect();
        // As in OpenSSL the last certificate of a key type replaces earlier ones.
        let kinds: Vec<SignatureAlgorithm> = pairs.iter().map(|(pair, _)| pair.key.algorithm()).collect();
        let mut place = 0;
        pairs.retain(|_| {
            place += 1;
            !kinds[place..].contains(&kinds[place - 1])
        });
        // Certificates that sign quickly are preferred.
        pairs.sort_by_key(|(pair, _)| pair.key.algorithm() == SignatureAlgorithm::RSA);
        Pairs(pairs)
    }
}

impl fmt::Debug for Pairs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pairs")
    }
}

impl ResolvesServerCert for Pairs {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let fits = |(pair, _): &&Choice| {
            pair.key.choose_scheme(hello.signature_schemes()).is_some()
                && hello.cipher_suites().iter().any(|suite| fits_suite(*suite, pair.key.algorithm()))
        };
        // If none fits, the first is used and the library reports the fault.
        let (pair, staple) = self.0.iter().find(fits).or(self.0.first())?;
        Some(staple.as_ref().map_or_else(|| Arc::clone(pair), |staple| staple.pair()))
    }
}

/// `true` if a suite works with this type of key.
fn fits_suite(suite: CipherSuite, algorithm: SignatureAlgorithm) -> bool {
    match suite.as_str() {
        Some(name) if name.contains("_ECDHE_ECDSA_") => algorithm != SignatureAlgorithm::RSA,
        Some(name) if name.contains("_ECDHE_RSA_") => algorithm == SignatureAlgorithm::RSA,
        Some(name) => name.starts_with("TLS13_"),
        None => false,
    }
}
