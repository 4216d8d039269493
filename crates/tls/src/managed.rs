//! Certificates that a service obtains and renews while servers use them (ACME).
//!
//! ```text
//!   first handshake ─► file of the state directory ─► an earlier one of the same name ─► self-signed
//!   service ─► `set` ─► every handshake that begins from then on, and the file
//! ```
//!
//! Each file has one object in the process, shared by all configurations, so a reload keeps the current certificate.
//! The file is read in a thread pool at the first use.

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Weak};
use std::time::SystemTime;

use arc_swap::ArcSwapOption;
use gale_base::os_error::OsErrorText;
use gale_runtime::default_pool;
use parking_lot::Mutex;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use super::certificate::{Certificate, pem_of};
use super::compression::{self, Compressed};
use super::keys::{self, KeyKind};
use super::load;
use super::staple::Stapled;
use super::verify_server::is_for;

/// Files of a state directory that are searched for an earlier certificate.
const EARLIER_FILES_MAX: usize = 10_000;

/// Parameters of the certificate; they also identify it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Wanted {
    /// The issuer's name in the configuration.
    pub issuer: String,
    /// Names and addresses, the first one for messages.
    pub names: Vec<String>,
    /// The kind of its key.
    pub key: KeyKind,
    /// Directory of certificates and keys; without one they are only kept in memory.
    pub directory: Option<PathBuf>,
}

/// Certificate that a service obtains and renews.
pub struct ManagedCertificate {
    wanted: Wanted,
    current: ArcSwapOption<Current>,
    /// Lock of the loading thread, with the last error that it noted.
    loading: Mutex<Option<String>>,
}

/// Certificate that clients get.
pub struct Current {
    pair: Arc<CertifiedKey>,
    /// Origin of the certificate.
    pub origin: Origin,
    /// Start of validity, in seconds since 1970.
    pub not_before: u64,
    /// End of validity, in seconds since 1970.
    pub not_after: u64,
    /// Identifier for renewal information (RFC 9773, section 4.1); empty if the certificate does not contain it.
    pub renewal_id: String,
    chain: String,
    key: String,
    /// The compressed chain, cached for handshakes while it is referenced.
    _compressed: Option<Compressed>,
    stapled: ArcSwapOption<Stapled>,
}

/// Origin of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Issued for exactly these names.
    Issuer,
    /// Issued earlier, for the first of the names.
    Earlier,
    /// Self-signed; no client trusts it.
    SelfSigned,
}

type Known = HashMap<Wanted, Weak<ManagedCertificate>>;

static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);

impl ManagedCertificate {
    /// Returns this process's object for these parameters, or a new one.
    pub fn of(wanted: Wanted) -> Arc<ManagedCertificate> {
        let mut known = KNOWN.lock();
        if let Some(known) = known.get(&wanted).and_then(Weak::upgrade) {
            return known;
        }
        known.retain(|_, certificate| certificate.strong_count() > 0);
        let (current, loading) = (ArcSwapOption::empty(), Mutex::default());
        let made = Arc::new(ManagedCertificate { wanted: wanted.clone(), current, loading });
        known.insert(wanted, Arc::downgrade(&made));
        made
    }

    /// Parameters of the certificate.
    pub fn wanted(&self) -> &Wanted {
        &self.wanted
    }

    /// Name for messages.
    pub fn name(&self) -> &str {
        self.wanted.names.first().map_or("", String::as_str)
    }

    /// Certificate that clients get; `None` before it is [loaded](ManagedCertificate::load).
    pub fn current(&self) -> Option<Arc<Current>> {
        self.current.load_full()
    }

    /// Certificate that clients get, read from disk at the first call.
    ///
    /// # Errors
    /// Not even a self-signed certificate can be made, or the thread pool is full.
    pub async fn load(self: &Arc<Self>) -> Result<Arc<Current>, String> {
        match self.current() {
            Some(current) => Ok(current),
            None => self.load_anew(false).await,
        }
    }

    /// Reads the certificate from disk again, because another process may have renewed it.
    ///
    /// # Errors
    /// As [`ManagedCertificate::load`].
    pub async fn reload(self: &Arc<Self>) -> Result<Arc<Current>, String> {
        self.load_anew(true).await
    }

    async fn load_anew(self: &Arc<Self>, is_forced: bool) -> Result<Arc<Current>, String> {
        let own = Arc::clone(self);
        let load = move || {
            let mut problem = own.loading.lock();
            let known = own.current();
            if !is_forced && let Some(current) = known {
                return Ok(current);
            }
            let issued = own.path().and_then(|path| match own.read(&path, Origin::Issuer) {
                Ok(issued) => Some(issued),
                Err(why) => {
                    *problem = path.exists().then(|| format!("cannot load certificate \"{}\": {why}", path.display()));
                    None
                }
            });
            let current = match (issued, known) {
                (Some(issued), Some(known)) if known.is_issued() && known.not_before >= issued.not_before => known,
                (Some(issued), _) => Arc::new(issued),
                (None, Some(known)) => known,
                (None, None) => Arc::new(own.stand_in()?),
            };
            own.current.store(Some(Arc::clone(&current)));
            Ok(current)
        };
        default_pool().run(load).await.map_err(|error| error.to_string())?
    }

    /// Why the existing file could not be used; returned once.
    pub fn take_problem(&self) -> Option<String> {
        self.loading.lock().take()
    }

    /// Replaces the certificate that clients get with this chain and key, and stores both. Blocks while it writes.
    ///
    /// # Errors
    /// The chain is malformed, is for other names or another key, or is not valid now. Clients keep the previous
    /// certificate.
    pub fn set(&self, chain: &[u8], key: &str) -> Result<(Arc<Current>, io::Result<()>), String> {
        let current = Arc::new(self.parse(chain, key.as_bytes(), Origin::Issuer)?);
        let now = wall_seconds();
        if current.not_after <= now {
            return Err("the certificate has expired".to_owned());
        }
        let written = match self.path() {
            None => Ok(()),
            Some(path) => write_atomically(&path, format!("{}{}", current.chain, current.key).as_bytes()),
        };
        let _one_at_a_time = self.loading.lock();
        self.current.store(Some(Arc::clone(&current)));
        Ok((current, written))
    }

    /// File in the state directory: a readable name and a hash that makes it unique.
    fn path(&self) -> Option<PathBuf> {
        use ::aws_lc_rs::digest::{SHA256, digest};
        let directory = self.wanted.directory.as_ref()?;
        let identity = format!("{} {}", self.wanted.names.join(" "), self.wanted.key);
        let identity = digest(&SHA256, identity.as_bytes());
        let digits: String = identity.as_ref()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        Some(directory.join(format!("{}{digits}.pem", self.file_beginning())))
    }

    fn file_beginning(&self) -> String {
        format!("{}-", self.name().replace('*', "_").replace(['/', '\0'], "-"))
    }

    fn read(&self, path: &Path, origin: Origin) -> Result<Current, String> {
        let text = fs::read(path).map_err(|error| OsErrorText(&error).to_string())?;
        self.parse(&text, &text, origin)
    }

    fn parse(&self, chain: &[u8], key: &[u8], origin: Origin) -> Result<Current, String> {
        let certificates = load::certificates(chain)?;
        let private = load::private_key(key, &[])?;
        let own = certificates.first().ok_or("no certificate")?;
        let needed = if origin == Origin::Issuer { &self.wanted.names[..] } else { &[] };
        if let Some(missing) = needed.iter().find(|name| !is_named(own, name)) {
            return Err(format!("the certificate is not for \"{missing}\""));
        }
        let parsed = Certificate::of(own).ok_or("the certificate cannot be read")?;
        let (not_before, not_after) = parsed.validity();
        let renewal_id = parsed.renewal_id().unwrap_or_default();
        let chain_text: String = certificates.iter().map(|certificate| pem_of(certificate)).collect();
        let key_text = key_part(key)?;
        let compressed = compression::compress(&certificates);
        let pair = load::pair(certificates, private, self.name())?;
        Ok(Current {
            pair,
            origin,
            not_before,
            not_after,
            renewal_id,
            chain: chain_text,
            key: key_text,
            _compressed: compressed,
            stapled: ArcSwapOption::empty(),
        })
    }

    /// Certificate until one is issued: a valid earlier one with the same first name, else a self-signed one.
    fn stand_in(&self) -> Result<Current, String> {
        if let Some(earlier) = self.earlier() {
            return Ok(earlier);
        }
        let text = keys::placeholder(&self.wanted.names)?;
        self.parse(text.as_bytes(), text.as_bytes(), Origin::SelfSigned)
    }

    fn earlier(&self) -> Option<Current> {
        let beginning = self.file_beginning();
        let entries = fs::read_dir(self.wanted.directory.as_ref()?).ok()?;
        let paths = entries.take(EARLIER_FILES_MAX).flatten().map(|entry| entry.path()).filter(|path| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.starts_with(&beginning) && name.ends_with(".pem")
        });
        let now = wall_seconds();
        let good =
            paths.filter_map(|path| self.read(&path, Origin::Earlier).ok()).filter(|earlier| earlier.not_after > now);
        good.max_by_key(|earlier| earlier.not_before)
    }
}

impl Current {
    /// `true` if it was issued for exactly the wanted names.
    pub fn is_issued(&self) -> bool {
        self.origin == Origin::Issuer
    }

    /// Sets the OCSP response for servers that staple, and the end of its validity.
    pub(super) fn staple(&self, response: Vec<u8>, valid_until: u64) {
        self.stapled.store(Some(Arc::new(Stapled::new(&self.pair, response, valid_until))));
    }

    /// End of validity of the OCSP response, if there is one.
    pub(super) fn stapled_until(&self) -> Option<u64> {
        self.stapled.load().as_ref().map(|stapled| stapled.valid_until)
    }

    /// The certificate, with the OCSP response while that is valid.
    pub(super) fn stapled_pair(&self) -> Arc<CertifiedKey> {
        self.stapled.load().as_ref().and_then(|stapled| stapled.pair()).unwrap_or_else(|| Arc::clone(&self.pair))
    }

    /// The chain, the leaf certificate first.
    pub(super) fn certificates(&self) -> &[CertificateDer<'static>] {
        &self.pair.cert
    }

    /// The chain, in PEM.
    pub fn chain(&self) -> &str {
        &self.chain
    }

    /// The key, in PEM.
    pub fn key(&self) -> &str {
        &self.key
    }
}

impl fmt::Debug for ManagedCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ManagedCertificate({:?})", self.wanted)
    }
}

impl ResolvesServerCert for ManagedCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.current.load().as_ref().map(|current| Arc::clone(&current.pair))
    }
}

/// `true` if a certificate has this name or address.
fn is_named(certificate: &CertificateDer<'_>, name: &str) -> bool {
    // Any label matches a wildcard.
    let name = name.replacen('*', "any", 1);
    ServerName::try_from(name).is_ok_and(|name| is_for(certificate, &name))
}

/// The key from a text that may also contain certificates.
fn key_part(text: &[u8]) -> Result<String, String> {
    let text = std::str::from_utf8(text).map_err(|error| error.to_string())?;
    let is_key = |line: &str| line.contains("PRIVATE KEY-----");
    let mut part = String::new();
    for line in text.lines() {
        let is_edge = is_key(line);
        if is_edge || !part.is_empty() {
            part.push_str(line);
            part.push('\n');
        }
        if is_edge && line.starts_with("-----END") {
            break;
        }
    }
    Ok(part)
}

/// Writes a file that only its owner may read. The write is atomic: readers see the earlier contents or the new ones,
/// also after a crash.
///
/// # Errors
/// Errors of the file system; the earlier file is unchanged.
pub fn write_atomically(path: &Path, contents: &[u8]) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let new = PathBuf::from(new);
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(contents)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    path.parent().map_or(Ok(()), |directory| File::open(directory)?.sync_all())
}

fn wall_seconds() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(directory: &Path, names: &[&str]) -> Wanted {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        Wanted { issuer: "one".to_owned(), names, key: KeyKind::Ecdsa256, directory: Some(directory.to_owned()) }
    }

    /// A certificate that is valid until this year, and its key.
    fn issued(names: &[&str], until: i32) -> (String, String) {
        let key = rcgen::KeyPair::generate().unwrap();
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = rcgen::CertificateParams::new(names).unwrap();
        params.not_before = rcgen::date_time_ymd(2020, 1, 1);
        params.not_after = rcgen::date_time_ymd(until, 1, 1);
        (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
    }

    #[test]
    fn certificate_that_fits_is_taken_and_found_again() {
        let directory = std::env::temp_dir().join(format!("gale-managed-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let own = ManagedCertificate::of(wanted(&directory, &["a.example", "192.0.2.1"]));
        assert!(Arc::ptr_eq(&own, &ManagedCertificate::of(own.wanted.clone())));
        let stand_in = own.stand_in().unwrap();
        assert_eq!(stand_in.origin, Origin::SelfSigned);

        let (chain, key) = issued(&["a.example"], 2090);
        let why = own.set(chain.as_bytes(), &key).err();
        assert_eq!(why.as_deref(), Some("the certificate is not for \"192.0.2.1\""));
        let (chain, key) = issued(&["a.example", "192.0.2.1"], 2021);
        assert_eq!(own.set(chain.as_bytes(), &key).err().as_deref(), Some("the certificate has expired"));
        let (chain, key) = issued(&["a.example", "192.0.2.1"], 2090);
        let (_, other) = issued(&["a.example"], 2090);
        assert!(own.set(chain.as_bytes(), &other).is_err() && own.set(b"<html>", &key).is_err());
        assert!(own.current().is_none());

        let (current, written) = own.set(chain.as_bytes(), &key).unwrap();
        written.unwrap();
        assert!(current.is_issued() && current.chain() == chain.replace("\r\n", "\n"));
        let path = own.path().unwrap();
        let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&path).unwrap().permissions());
        assert_eq!(mode & 0o777, 0o600);
        let again = own.read(&path, Origin::Issuer).unwrap();
        assert_eq!((again.chain(), again.key()), (current.chain(), current.key()));

        // With one more name the earlier certificate is better than none.
        let more = ManagedCertificate::of(wanted(&directory, &["a.example", "b.example"]));
        let stand_in = more.stand_in().unwrap();
        assert!(stand_in.origin == Origin::Earlier && stand_in.chain() == current.chain());
        fs::remove_dir_all(&directory).unwrap();
    }
}
