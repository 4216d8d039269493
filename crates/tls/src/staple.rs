//! A certificate with its stapled OCSP response (`ssl_stapling`).
//!
//! A service ([`super::ocsp`]) fetches the responses; a handshake uses the current one, or none. A fetched response
//! persists over reloads while it is valid.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwapOption;
use bstr::ByteSlice;
use gale_config::server_address::ServerAddress;
use gale_config::{Diagnostic, Word};
use gale_process::Resources;
use gale_resolver::ResolverSettings;
use parking_lot::Mutex;
use rustls::pki_types::CertificateDer;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use x509_parser::asn1_rs::Any;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::oid_registry::OID_PKIX_ACCESS_DESCRIPTOR_OCSP;
use x509_parser::prelude::FromDer;

use super::managed::{Current, ManagedCertificate, Origin};
use super::server::read;
use super::settings::TlsSettings;
use super::verify;

/// OCSP responder: the parts of its URL.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Responder {
    /// Host name or address.
    pub host: Box<str>,
    /// The port.
    pub port: u16,
    /// The path, with a slash at its end.
    pub path: Box<str>,
    /// Addresses of the name, resolved when the configuration was read; used without a resolver.
    pub addresses: Arc<[SocketAddr]>,
}

impl Responder {
    /// Parses the URL of a responder, without addresses.
    ///
    /// # Errors
    /// The fault in the URL, in nginx's words.
    pub fn parse(url: &str) -> Result<Responder, &'static str> {
        const SCHEME: &str = "http://";
        let rest = match url.split_at_checked(SCHEME.len()) {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case(SCHEME) => rest,
            _ => return Err("invalid URL prefix"),
        };
        let (server, path) = rest.find('/').map_or((rest, "/"), |place| rest.split_at(place));
        let (host, port) = match ServerAddress::parse(server.as_bytes(), 80)? {
            ServerAddress::Inet(address) => (address.ip().to_string(), address.port()),
            ServerAddress::Host(host, port) => (host, port),
            ServerAddress::Unix(_) => return Err("invalid host"),
        };
        let is_plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
        if host.is_empty() || !is_plain(&host) || !is_plain(path) {
            return Err("invalid host");
        }
        let path = if path.ends_with('/') { path.into() } else { format!("{path}/").into() };
        Ok(Responder { host: host.into(), port, path, addresses: Arc::new([]) })
    }

    /// Adds the addresses of the host name.
    ///
    /// # Errors
    /// The name has no address.
    fn looked_up(self, resources: &mut dyn Resources) -> Result<Responder, &'static str> {
        if self.host.parse::<IpAddr>().is_ok() {
            return Ok(self);
        }
        let found = resources.resolve(&self.host).map_err(|_| "host not found")?;
        let addresses = found.into_iter().map(|address| SocketAddr::new(address, self.port)).collect();
        Ok(Responder { addresses, ..self })
    }

    /// The responder that a directive names.
    pub(super) fn of_setting(
        word: &Word,
        lookup: &Lookup,
        resources: &mut dyn Resources,
    ) -> Result<Responder, &'static str> {
        let responder = Responder::parse(&word.text.to_str_lossy())?;
        if lookup.is_some() { Ok(responder) } else { responder.looked_up(resources) }
    }
}

/// URL of the responder in a certificate (RFC 5280, section 4.2.2.1).
pub fn responder_of(certificate: &[u8]) -> Option<String> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    certificate.extensions().iter().find_map(|extension| match extension.parsed_extension() {
        ParsedExtension::AuthorityInfoAccess(access) => {
            access.accessdescs.iter().find_map(|description| match &description.access_location {
                GeneralName::URI(url) if description.access_method == OID_PKIX_ACCESS_DESCRIPTOR_OCSP => {
                    Some((*url).to_owned())
                }
                _ => None,
            })
        }
        _ => None,
    })
}

/// Creates staples, each once.
#[derive(Default)]
pub(super) struct StapleLoader {
    known: HashMap<(Vec<u8>, Responder, bool), Arc<Staple>>,
    managed: Vec<Arc<ManagedStaple>>,
    files: HashMap<Vec<u8>, Vec<u8>>,
}

impl StapleLoader {
    /// Staples that a service has to fetch.
    pub fn fetched(&mut self) -> Vec<Arc<Staple>> {
        self.known.drain().map(|(_, staple)| staple).collect()
    }

    /// The same for managed certificates.
    pub fn managed(&mut self) -> Vec<Arc<ManagedStaple>> {
        std::mem::take(&mut self.managed)
    }

    /// Settings of a managed certificate that has not been loaded yet.
    pub fn staple_managed(
        &mut self,
        settings: &TlsSettings,
        certificate: &Arc<ManagedCertificate>,
        authorities: &[CertificateDer<'static>],
        lookup: &Lookup,
        resources: &mut dyn Resources,
        notes: &mut Vec<Diagnostic>,
    ) -> Arc<ManagedStaple> {
        if let Some(file) = settings.stapling_file.get_opt() {
            let message = "\"ssl_stapling_file\" has no effect with a certificate from an ACME issuer";
            notes.push(Diagnostic::warn(message).at(file.span));
        }
        let responder = settings.stapling_responder.get_opt().and_then(|word| {
            let found = Responder::of_setting(word, lookup, resources);
            let ignored = |why| Diagnostic::warn(format!("{why} in OCSP responder \"{}\"", word.text)).at(word.span);
            found.map_err(|why| notes.push(ignored(why))).ok()
        });
        let staple = Arc::new(ManagedStaple {
            certificate: Arc::clone(certificate),
            responder,
            authorities: authorities.to_vec(),
            lookup: lookup.clone(),
            verifies: *settings.verifies_stapling.get(),
        });
        self.managed.push(Arc::clone(&staple));
        staple
    }

    /// The staple of a certificate; `None`, with a note, if there can be none. The issuer is looked for in the chain
    /// and among `authorities`.
    pub fn staple(
        &mut self,
        settings: &TlsSettings,
        (pair, name): (&Arc<CertifiedKey>, &Word),
        authorities: &[CertificateDer<'static>],
        lookup: &Lookup,
        resources: &mut dyn Resources,
        notes: &mut Vec<Diagnostic>,
    ) -> Result<Option<Arc<Staple>>, Diagnostic> {
        if !*settings.staples.get() {
            return Ok(None);
        }
        if let Some(file) = settings.stapling_file.get_opt() {
            let response = self.file(file, resources)?;
            return Ok(Some(Arc::new(Staple::fixed(pair, response))));
        }
        let name = name.text.to_str_lossy();
        let mut ignore = |why: String| {
            let message = format!("\"ssl_stapling\" ignored, {why}");
            notes.push(Diagnostic::warn(message).at_opt(settings.staples.span()));
            Ok(None)
        };
        let Some((own, others)) = pair.cert.split_first() else { return Ok(None) };
        let Some(issuer) = issuer_of(own, others, authorities) else {
            return ignore(format!("issuer certificate not found for certificate \"{name}\""));
        };
        let found = match settings.stapling_responder.get_opt() {
            Some(word) => Responder::of_setting(word, lookup, resources).map_err(|why| (why, word.text.to_string())),
            None => match responder_of(own) {
                None => return ignore(format!("no OCSP responder URL in the certificate \"{name}\"")),
                Some(url) => {
                    let parsed = Responder::parse(&url);
                    let parsed = match lookup {
                        Some(_) => parsed,
                        None => parsed.and_then(|responder| responder.looked_up(resources)),
                    };
                    parsed.map_err(|why| (why, url))
                }
            },
        };
        let responder = match found {
            Ok(responder) => responder,
            Err((why, url)) => {
                return ignore(format!("{why} in OCSP responder \"{url}\" in the certificate \"{name}\""));
            }
        };
        let verifies = *settings.verifies_stapling.get();
        let staple = self.known.entry((own.to_vec(), responder.clone(), verifies)).or_insert_with(|| {
            let (certificate, issuer, lookup) = (own.to_vec(), issuer.to_vec(), lookup.clone());
            let source = StapleSource { certificate, issuer, responder, lookup, verifies, name: name.into() };
            Arc::new(Staple::fetched(pair, source))
        });
        Ok(Some(Arc::clone(staple)))
    }

    fn file(&mut self, word: &Word, resources: &mut dyn Resources) -> Result<Vec<u8>, Diagnostic> {
        if let Some(known) = self.files.get(word.text.as_slice()) {
            return Ok(known.clone());
        }
        let response = read(word, resources).map_err(|why| {
            let why = why.trim_start_matches("BIO_new_file() failed ");
            Diagnostic::emerg(format!("BIO_new_file(\"{}\") failed {why}", word.text)).at(word.span)
        })?;
        if Any::from_der(&response).is_err() {
            let message = format!("d2i_OCSP_RESPONSE_bio(\"{}\") failed", word.text);
            return Err(Diagnostic::emerg(message).at(word.span));
        }
        self.files.insert(word.text.to_vec(), response.clone());
        Ok(response)
    }
}

/// Issuer of a certificate, from its chain or from the authorities.
fn issuer_of<'c>(
    own: &CertificateDer<'_>,
    others: &'c [CertificateDer<'static>],
    authorities: &'c [CertificateDer<'static>],
) -> Option<&'c CertificateDer<'static>> {
    others.iter().chain(authorities).find(|candidate| verify::has_issued(candidate, own))
}

/// Staple settings of a managed certificate; each new certificate gets a new response.
pub struct ManagedStaple {
    certificate: Arc<ManagedCertificate>,
    /// Responder to use instead of the one that certificates name.
    responder: Option<Responder>,
    authorities: Vec<CertificateDer<'static>>,
    lookup: Lookup,
    verifies: bool,
}

impl ManagedStaple {
    /// The current certificate, once an issuer has issued one.
    pub fn current(&self) -> Option<Arc<Current>> {
        self.certificate.current().filter(|current| current.origin != Origin::SelfSigned)
    }

    /// Source of the OCSP response for this certificate.
    ///
    /// # Errors
    /// Why there is none, in nginx's words.
    pub fn source(&self, current: &Current) -> Result<StapleSource, String> {
        let name = self.certificate.name();
        let (own, others) = current.certificates().split_first().ok_or("no certificate")?;
        let Some(issuer) = issuer_of(own, others, &self.authorities) else {
            return Err(format!("issuer certificate not found for certificate \"{name}\""));
        };
        let responder = match (&self.responder, responder_of(own)) {
            (Some(responder), _) => responder.clone(),
            (None, None) => return Err(format!("no OCSP responder URL in the certificate \"{name}\"")),
            (None, Some(url)) => Responder::parse(&url)
                .map_err(|why| format!("{why} in OCSP responder \"{url}\" in the certificate \"{name}\""))?,
        };
        let (certificate, issuer, lookup) = (own.to_vec(), issuer.to_vec(), self.lookup.clone());
        Ok(StapleSource { certificate, issuer, responder, lookup, verifies: self.verifies, name: name.into() })
    }
}

impl fmt::Debug for ManagedStaple {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ManagedStaple({:?})", self.certificate)
    }
}

impl ResolvesServerCert for ManagedStaple {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.certificate.current().map(|current| current.stapled_pair())
    }
}

/// Resolver for the names of responders: the server's `resolver`, if it has one.
pub type Lookup = Option<(Arc<ResolverSettings>, Duration)>;

/// A certificate with its stapled OCSP response.
pub struct Staple {
    bare: Arc<CertifiedKey>,
    stapled: ArcSwapOption<Stapled>,
    /// Source of the response; `None` if it came from a file.
    pub source: Option<StapleSource>,
}

/// Source of a certificate's OCSP response.
pub struct StapleSource {
    /// The certificate, in DER.
    pub certificate: Vec<u8>,
    /// The issuer's certificate, in DER.
    pub issuer: Vec<u8>,
    /// The responder.
    pub responder: Responder,
    /// Resolver for the responder's name.
    pub lookup: Lookup,
    /// `true` if the response's signature is verified.
    pub verifies: bool,
    /// Name of the certificate in messages.
    pub name: Box<str>,
}

/// A certificate with its response.
pub(super) struct Stapled {
    pair: Arc<CertifiedKey>,
    /// End of the response's validity, in seconds since 1970.
    pub valid_until: u64,
}

impl Stapled {
    /// Combines a certificate and a response.
    pub fn new(bare: &Arc<CertifiedKey>, response: Vec<u8>, valid_until: u64) -> Stapled {
        let pair = Arc::new(CertifiedKey { ocsp: Some(response), ..CertifiedKey::clone(bare) });
        Stapled { pair, valid_until }
    }

    /// The certificate with its response, while that is valid.
    pub fn pair(&self) -> Option<Arc<CertifiedKey>> {
        (self.valid_until >= wall_seconds()).then(|| Arc::clone(&self.pair))
    }
}

/// Responses fetched by this process, by certificate and responder, with the end of their validity.
static FETCHED: LazyLock<Mutex<Fetched>> = LazyLock::new(Mutex::default);

type Fetched = HashMap<(Vec<u8>, Responder), (Vec<u8>, u64)>;

fn wall_seconds() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

impl Staple {
    /// A staple with a response of unlimited validity: `ssl_stapling_file`.
    pub(super) fn fixed(bare: &Arc<CertifiedKey>, response: Vec<u8>) -> Staple {
        let staple = Staple { bare: Arc::clone(bare), stapled: ArcSwapOption::empty(), source: None };
        staple.put(response, u64::MAX);
        staple
    }

    /// A staple whose response a service fetches.
    pub(super) fn fetched(bare: &Arc<CertifiedKey>, source: StapleSource) -> Staple {
        let key = (source.certificate.clone(), source.responder.clone());
        let known = FETCHED.lock().get(&key).cloned();
        let staple = Staple { bare: Arc::clone(bare), stapled: ArcSwapOption::empty(), source: Some(source) };
        if let Some((response, valid_until)) = known {
            staple.put(response, valid_until);
        }
        staple
    }

    /// Sets the response and the end of its validity.
    pub fn set(&self, response: Vec<u8>, valid_until: u64) {
        if let Some(source) = &self.source {
            let mut fetched = FETCHED.lock();
            let now = wall_seconds();
            fetched.retain(|_, (_, valid_until)| *valid_until >= now);
            fetched.insert((source.certificate.clone(), source.responder.clone()), (response.clone(), valid_until));
        }
        self.put(response, valid_until);
    }

    fn put(&self, response: Vec<u8>, valid_until: u64) {
        self.stapled.store(Some(Arc::new(Stapled::new(&self.bare, response, valid_until))));
    }

    /// End of validity of the response, if there is one.
    pub fn valid_until(&self) -> Option<u64> {
        self.stapled.load().as_ref().map(|stapled| stapled.valid_until)
    }

    /// The certificate, with the response while that is valid.
    pub(super) fn pair(&self) -> Arc<CertifiedKey> {
        self.stapled.load().as_ref().and_then(|stapled| stapled.pair()).unwrap_or_else(|| Arc::clone(&self.bare))
    }
}
