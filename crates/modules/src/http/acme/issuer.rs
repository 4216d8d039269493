//! `acme_issuer NAME { … }`: an issuer of certificates and its settings.
//!   uri URL;
//!   account_key ALG[:SIZE] | FILE;
//!   challenge http-01 | http | tls-alpn-01 | tls-alpn;
//!   common_name_in_csr on | off;
//!   contact URL;
//!   external_account_key KID FILE | data:KEY;
//!   preferred_chain NAME;
//!   profile NAME [require];
//!   ssl_trusted_certificate FILE;
//!   ssl_verify on | off;
//!   state_path PATH | off;
//!   accept_terms_of_service;
//! (<https://nginx.org/en/docs/http/ngx_http_acme_module.html#acme_issuer>)

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use bstr::{BString, ByteSlice};
use gale_config::{Diagnostic, Setting, Span, Statement, Word, values};
use gale_engine::configuration::Builder;
use gale_engine::virtual_servers::TlsClientDraft;
use gale_http::configuration::builder::{InHttp, SecretDraft};
use gale_spool::TempPath;
use gale_tls::challenges::AnswerDirectory;
use gale_tls::keys::KeyKind;
use gale_tls::managed::ManagedCertificate;
use gale_tls::settings::{TlsClientSettings, Versions};
use gale_tls::{TlsClient, from_base64_url};
use gale_worker::service::ServiceSpec;
use parking_lot::Mutex;

use super::challenge::{Challenge, Http01, TlsAlpn01};
use super::client::AcmeError;
use super::service::AcmeService;
use super::url::Url;
use crate::shared::check_row;

/// Maximum number of certificates between that of the issuer's server and a trusted one.
const VERIFY_DEPTH: u64 = 10;

/// Contents of a file, read together with the configuration.
pub(super) type Secret = Arc<OnceLock<Vec<u8>>>;

/// An issuer and its settings.
pub(super) struct Issuer {
    pub name: String,
    pub uri: Url,
    pub account_key: AccountKeySource,
    pub challenge: &'static dyn Challenge,
    pub has_common_name: bool,
    pub contacts: Vec<String>,
    pub external_account: Option<ExternalAccount>,
    pub preferred_chain: Option<String>,
    /// The profile's name, and `true` if it is required.
    pub profile: Option<(String, bool)>,
    /// Directory of all state; `None` keeps the state in memory only.
    pub state_path: Option<PathBuf>,
    pub accepts_terms: bool,
    /// TLS settings for connections to the issuer, once their files have been read.
    pub tls: Arc<OnceLock<Arc<TlsClient>>>,
    /// Directory where other processes find responses to challenges.
    pub answers: Option<Arc<AnswerDirectory>>,
    pub span: Span,
    /// Certificates to obtain from the issuer: complete when the configuration is.
    certificates: Mutex<Vec<Arc<ManagedCertificate>>>,
    tls_identity: (bool, BString),
}

/// Source of the account's key.
pub(super) enum AccountKeySource {
    /// Generated, and kept in the state directory.
    Made(KeyKind),
    /// Read from a file.
    File(Secret),
}

/// An account that the issuer knows by other means (RFC 8555, section 7.3.4).
pub(super) struct ExternalAccount {
    pub kid: String,
    source: Secret,
}

impl ExternalAccount {
    pub fn key(&self) -> Result<Vec<u8>, AcmeError> {
        let text = self.source.get().map_or(&[][..], |text| text.trim());
        let key = from_base64_url(text).filter(|key| !key.is_empty());
        key.ok_or_else(|| AcmeError::Configuration("\"external_account_key\" is no base64url text".to_owned()))
    }
}

impl Issuer {
    /// Returns the certificates to obtain.
    pub fn certificates(&self) -> Vec<Arc<ManagedCertificate>> {
        self.certificates.lock().clone()
    }

    /// Adds a certificate to obtain, unless it is in the list already.
    pub fn add(&self, certificate: &Arc<ManagedCertificate>) {
        let mut certificates = self.certificates.lock();
        if !certificates.iter().any(|known| Arc::ptr_eq(known, certificate)) {
            certificates.push(Arc::clone(certificate));
        }
    }

    /// Returns `true` if a service that was started with `earlier` may continue with these settings.
    pub fn continues(&self, earlier: &Issuer) -> bool {
        let settings = |issuer: &Issuer| {
            let key = match &issuer.account_key {
                AccountKeySource::Made(kind) => (Some(*kind), None),
                AccountKeySource::File(file) => (None, file.get().cloned()),
            };
            let external = issuer.external_account.as_ref();
            let external = external.map(|external| (external.kid.clone(), external.source.get().cloned()));
            let texts = (issuer.contacts.clone(), issuer.preferred_chain.clone(), issuer.profile.clone());
            let flags = (issuer.has_common_name, issuer.accepts_terms, issuer.tls_identity.clone());
            (issuer.uri.clone(), issuer.state_path.clone(), issuer.challenge.kind(), key, external, texts, flags)
        };
        let (own, others) = (self.certificates(), earlier.certificates());
        let same = own.len() == others.len() && own.iter().zip(&others).all(|(own, other)| Arc::ptr_eq(own, other));
        same && settings(self) == settings(earlier)
    }
}

impl fmt::Debug for Issuer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Issuer({})", self.name)
    }
}

/// The block while it is parsed.
#[derive(Default)]
struct Draft {
    uri: Setting<Url>,
    account_key: Setting<AccountKeySource>,
    challenge: Setting<&'static dyn Challenge>,
    has_common_name: Setting<bool>,
    contacts: Vec<String>,
    external_account: Setting<ExternalAccount>,
    preferred_chain: Setting<String>,
    profile: Setting<(String, bool)>,
    trusted_certificate: Setting<Word>,
    verifies: Setting<bool>,
    state_path: Setting<Option<PathBuf>>,
    accepts_terms: Setting<bool>,
}

/// Parses `acme_issuer NAME { … }`.
pub(super) fn issuer_block(builder: &mut Builder, statement: &Statement) -> Result<Arc<Issuer>, Diagnostic> {
    let word = &statement.args[0];
    let name = text(word)?;
    if name.is_empty() || name.contains(['/', '\0']) {
        return Err(Diagnostic::emerg(format!("invalid issuer name \"{name}\"")).at(word.span));
    }
    let mut draft = Draft::default();
    for row in statement.body() {
        draft.take(builder, row)?;
    }
    let Some(uri) = draft.uri.take() else { return Err(statement.error("\"uri\" is missing")) };
    if !uri.is_tls {
        let message = format!("the issuer \"{name}\" is used over plain HTTP: its responses can be changed on the way");
        builder.note([Diagnostic::warn(message).at(word.span)]);
    }
    builder.reach.connects(uri.port);
    let (state_path, state_span) = match draft.state_path.take() {
        Some(path) => (path, Some(statement.span)),
        None => (Some(builder.default_temp_path(&format!("acme_{name}"))), None),
    };
    if let Some(path) = &state_path {
        let mut directory = Setting::new();
        directory.set(TempPath { path: path.as_path().into(), levels: Default::default() }, state_span);
        builder.http_mut().temp_paths.push(directory);
    }
    let trusted = draft.trusted_certificate.take();
    let verifies = draft.verifies.take().unwrap_or(true);
    let tls_identity = (verifies, trusted.as_ref().map(|word| word.text.clone()).unwrap_or_default());
    let tls = Arc::default();
    if uri.is_tls {
        let settings = tls_settings(verifies, trusted);
        builder.http_mut().tls_clients.push(TlsClientDraft { settings, prefix: "acme", client: Arc::clone(&tls) });
    }
    let issuer = Arc::new(Issuer {
        uri,
        account_key: draft.account_key.take().unwrap_or(AccountKeySource::Made(KeyKind::default())),
        challenge: draft.challenge.take().unwrap_or(&Http01),
        has_common_name: draft.has_common_name.take().unwrap_or(false),
        contacts: draft.contacts,
        external_account: draft.external_account.take(),
        preferred_chain: draft.preferred_chain.take(),
        profile: draft.profile.take(),
        accepts_terms: draft.accepts_terms.take().unwrap_or(false),
        tls,
        answers: state_path.as_deref().map(AnswerDirectory::of),
        span: statement.span,
        certificates: Mutex::default(),
        tls_identity,
        state_path,
        name,
    });
    let service = AcmeService { issuer: Arc::clone(&issuer) };
    let service_name = format!("acme issuer \"{}\"", issuer.name);
    let service = match &issuer.state_path {
        Some(path) => ServiceSpec::exclusive(service_name, path.join("lock"), service),
        None => ServiceSpec::per_process(service_name, service),
    };
    builder.add_service(service, statement.span)?;
    Ok(issuer)
}

/// Returns the TLS settings for the issuer's server. There are no directives for others.
fn tls_settings(verifies: bool, trusted_certificate: Option<Word>) -> TlsClientSettings {
    TlsClientSettings {
        versions: Setting::of(Versions { tls12: true, tls13: true }),
        ciphers: Setting::of(BString::from("DEFAULT")),
        tells_name: Setting::of(true),
        verifies: Setting::of(verifies),
        verify_depth: Setting::of(VERIFY_DEPTH),
        trusted_certificate: trusted_certificate.map_or_else(Setting::new, Setting::of),
        trusts_system: true,
        reuses_sessions: Setting::of(true),
        ..TlsClientSettings::default()
    }
}

impl Draft {
    fn take(&mut self, builder: &mut Builder, row: &Statement) -> Result<(), Diagnostic> {
        check_row(row)?;
        let wrong_count = || row.error(format!("invalid number of arguments in \"{}\" directive", row.name.text));
        let invalid = |word: &Word| Diagnostic::emerg(format!("invalid value \"{}\"", word.text)).at(word.span);
        match (&**row.name.text, row.args.as_slice()) {
            (b"uri", [word]) => {
                let url = Url::parse(&text(word)?);
                let url = url.map_err(|why| Diagnostic::emerg(format!("{why} in \"{}\"", word.text)).at(word.span))?;
                set(&mut self.uri, url, row)
            }
            (b"account_key", [word]) => {
                let source = match KeyKind::parse(&word.text) {
                    Some(Ok(kind)) => AccountKeySource::Made(kind),
                    Some(Err(why)) => {
                        return Err(Diagnostic::emerg(format!("{why} in \"{}\"", word.text)).at(word.span));
                    }
                    None => AccountKeySource::File(secret(builder, word)?),
                };
                set(&mut self.account_key, source, row)
            }
            (b"challenge", [word]) => {
                let challenge: &'static dyn Challenge = match &**word.text {
                    b"http" | b"http-01" => &Http01,
                    b"tls-alpn" | b"tls-alpn-01" => &TlsAlpn01,
                    _ => {
                        let error = Diagnostic::emerg(format!("unsupported challenge: {}", word.text)).at(word.span);
                        return Err(error.hint("\"http-01\" and \"tls-alpn-01\" are supported"));
                    }
                };
                set(&mut self.challenge, challenge, row)
            }
            (b"common_name_in_csr", [_]) => set(&mut self.has_common_name, values::flag(row)?, row),
            (b"contact", [word]) => {
                let contact = text(word)?;
                if contact.is_empty() {
                    return Err(invalid(word));
                }
                self.contacts.push(if has_scheme(&contact) { contact } else { format!("mailto:{contact}") });
                Ok(())
            }
            (b"external_account_key", [kid, key]) => {
                let kid_text = text(kid)?;
                if kid_text.is_empty() || key.text.is_empty() {
                    return Err(invalid(if kid_text.is_empty() { kid } else { key }));
                }
                let source = match key.text.strip_prefix(b"data:") {
                    None => secret(builder, key)?,
                    Some(inline) if from_base64_url(inline).is_none_or(|key| key.is_empty()) => {
                        return Err(Diagnostic::emerg("invalid base64url encoded value").at(key.span));
                    }
                    Some(inline) => Arc::new(OnceLock::from(inline.to_vec())),
                };
                set(&mut self.external_account, ExternalAccount { kid: kid_text, source }, row)
            }
            (b"preferred_chain", [word]) => set(&mut self.preferred_chain, text(word)?, row),
            (b"profile", [word]) => set(&mut self.profile, (text(word)?, false), row),
            (b"profile", [word, required]) if required.text == "require" => {
                set(&mut self.profile, (text(word)?, true), row)
            }
            (b"profile", [_, other]) => Err(invalid(other)),
            (b"ssl_trusted_certificate", [_]) => {
                let path = crate::shared::ssl::path(builder, row)?;
                set(&mut self.trusted_certificate, path, row)
            }
            (b"ssl_verify", [_]) => set(&mut self.verifies, values::flag(row)?, row),
            (b"state_path", [word]) => {
                let path = (word.text != "off").then(|| builder.full_path(&word.text));
                set(&mut self.state_path, path, row)
            }
            (b"accept_terms_of_service", []) => set(&mut self.accepts_terms, true, row),
            (
                b"uri"
                | b"account_key"
                | b"challenge"
                | b"common_name_in_csr"
                | b"contact"
                | b"external_account_key"
                | b"preferred_chain"
                | b"profile"
                | b"ssl_trusted_certificate"
                | b"ssl_verify"
                | b"state_path"
                | b"accept_terms_of_service",
                _,
            ) => Err(wrong_count()),
            _ => Err(row.error(format!("unknown directive \"{}\"", row.name.text))),
        }
    }
}

fn set<T>(setting: &mut Setting<T>, value: T, row: &Statement) -> Result<(), Diagnostic> {
    if setting.is_set() {
        return Err(row.directive_error("is duplicate"));
    }
    setting.set(value, Some(row.span));
    Ok(())
}

pub(super) fn text(word: &Word) -> Result<String, Diagnostic> {
    let text = word.text.to_str().map(str::to_owned);
    text.map_err(|_| Diagnostic::emerg(format!("invalid UTF-8 in \"{}\"", word.text)).at(word.span))
}

/// Reads a file in the master process; a relative name is taken from the directory of the configuration file.
fn secret(builder: &mut Builder, word: &Word) -> Result<Secret, Diagnostic> {
    let path = word.text.to_path().map_err(|error| Diagnostic::emerg(error.to_string()).at(word.span))?;
    let contents = Secret::default();
    let draft = SecretDraft {
        path: builder.configuration_directory.join(path),
        span: word.span,
        contents: Arc::clone(&contents),
    };
    builder.http_mut().secrets.push(draft);
    Ok(contents)
}

/// Returns `true` if a text begins with a URL's scheme (RFC 3986, section 3.1).
fn has_scheme(text: &str) -> bool {
    let Some((scheme, _)) = text.split_once(':') else { return false };
    scheme.starts_with(|first: char| first.is_ascii_alphabetic())
        && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.'))
}
