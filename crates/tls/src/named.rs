//! Certificates whose file names have variables, so that they are known only with the connection to a client or server.
//!
//! They are read in a thread pool by the worker process, whose user needs access to them. `ssl_certificate_cache`
//! caches them; without it each handshake reads them again, as in nginx.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bstr::{BStr, ByteSlice};
use gale_runtime::{Moment, default_pool};
use parking_lot::Mutex;
use rustls::pki_types::CertificateDer;
use rustls::sign::{CertifiedKey, SigningKey};

use super::{encrypted_key, load};

/// Longest file that is read for a handshake; a chain has some ten thousand bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Passwords of private keys.
pub(super) type Passwords = Arc<[Vec<u8>]>;

/// Loads certificates by name.
#[derive(Clone)]
pub(super) struct NamedLoader {
    /// Directory that relative names are below.
    pub prefix: PathBuf,
    pub passwords: Passwords,
    pub cache: Option<Arc<CertificateCache>>,
}

/// Why a certificate could not be loaded, in nginx's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedFailure(String);

impl fmt::Display for NamedFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl NamedFailure {
    pub(super) fn new(message: String) -> NamedFailure {
        NamedFailure(message)
    }
}

impl NamedLoader {
    /// Loads the certificate and the key of these names, or of `data:…`.
    pub async fn pair(&self, certificate: &[u8], key: &[u8]) -> Result<Arc<CertifiedKey>, NamedFailure> {
        let failed = |what: &str, name: &[u8], why: String| {
            NamedFailure(format!("cannot load {what} \"{}\": {why}", BStr::new(name)))
        };
        let chain = self.load(Kind::Chain, certificate).await.map_err(|why| failed("certificate", certificate, why))?;
        let private = self.load(Kind::Key, key).await.map_err(|why| failed("certificate key", key, why))?;
        // As in nginx a key with a password is not cached, nor is its certificate.
        if let Some(cache) = self.cache.as_ref().filter(|_| !private.has_password) {
            for (kind, name, read) in [(Kind::Chain, certificate, &chain), (Kind::Key, key, &private)] {
                if let Some(read_at) = read.read_at {
                    cache.insert((kind, name.to_vec()), read.loaded.clone(), read_at);
                }
            }
        }
        match (chain.loaded, private.loaded) {
            (Loaded::Chain(chain), Loaded::Key(key_of)) => {
                load::pair(chain.to_vec(), key_of, &key.to_str_lossy()).map_err(NamedFailure)
            }
            _ => unreachable!("a kind returns values of its own kind"),
        }
    }

    async fn load(&self, kind: Kind, name: &[u8]) -> Result<Read, String> {
        let inline = name.strip_prefix(b"data:").map(<[u8]>::to_vec);
        let path = match &inline {
            Some(_) => PathBuf::new(),
            None => self.prefix.join(name.to_path().map_err(|error| error.to_string())?),
        };
        let now = gale_runtime::now();
        if let Some(loaded) = self.cache.as_ref().and_then(|cache| cache.find(&(kind, name.to_vec()), now)) {
            return Ok(Read { loaded, has_password: false, read_at: None });
        }
        let passwords = Arc::clone(&self.passwords);
        let read = move || {
            let text = match inline {
                Some(text) => text,
                None => read(&path)?,
            };
            let loaded = match kind {
                Kind::Chain => Loaded::Chain(load::certificates(&text)?.into()),
                Kind::Key => Loaded::Key(load::private_key(&text, &passwords)?),
            };
            let has_password = kind == Kind::Key && encrypted_key::is_encrypted(&text);
            Ok(Read { loaded, has_password, read_at: Some(now) })
        };
        default_pool().run(read).await.map_err(|error| error.to_string())?
    }
}

/// A certificate or a key that was loaded.
struct Read {
    loaded: Loaded,
    has_password: bool,
    /// `None` if it came from the cache.
    read_at: Option<Moment>,
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| file.take(FILE_BYTES_MAX).read_to_end(&mut text));
    read.map(|_| text).map_err(|error| load::unreadable(&path.to_string_lossy(), &error))
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    Chain,
    Key,
}

#[derive(Clone)]
enum Loaded {
    Chain(Arc<[CertificateDer<'static>]>),
    Key(Arc<dyn SigningKey>),
}

type Key = (Kind, Vec<u8>);

/// Cache of `ssl_certificate_cache`. Certificates and keys are counted separately. All levels that inherit the
/// directive, and all event loops, share it.
pub struct CertificateCache {
    items_max: usize,
    inactive: Duration,
    valid: Duration,
    items: Mutex<Items>,
}

#[derive(Default)]
struct Items {
    by_key: HashMap<Key, Item>,
    /// Keys in order of last use.
    by_use: BTreeMap<u64, Key>,
    uses: u64,
}

struct Item {
    loaded: Loaded,
    read_at: Moment,
    used_at: Moment,
    last_use: u64,
}

impl CertificateCache {
    /// Creates a cache for `items_max` items. An item is evicted when unused for `inactive`, and read again `valid`
    /// after it was read.
    pub fn new(items_max: usize, inactive: Duration, valid: Duration) -> CertificateCache {
        CertificateCache { items_max, inactive, valid, items: Mutex::default() }
    }

    fn find(&self, key: &Key, now: Moment) -> Option<Loaded> {
        let items = &mut *self.items.lock();
        let item = items.by_key.get_mut(key)?;
        if now.since(item.read_at) > self.valid || now.since(item.used_at) > self.inactive {
            return None;
        }
        items.uses += 1;
        if let Some(key) = items.by_use.remove(&item.last_use) {
            items.by_use.insert(items.uses, key);
        }
        (item.last_use, item.used_at) = (items.uses, now);
        Some(item.loaded.clone())
    }

    fn insert(&self, key: Key, loaded: Loaded, now: Moment) {
        let items = &mut *self.items.lock();
        items.uses += 1;
        let item = Item { loaded, read_at: now, used_at: now, last_use: items.uses };
        if let Some(replaced) = items.by_key.insert(key.clone(), item) {
            items.by_use.remove(&replaced.last_use);
        }
        items.by_use.insert(items.uses, key);
        while let Some((_, oldest)) = items.by_use.first_key_value() {
            let is_unused = items.by_key.get(oldest).is_none_or(|item| now.since(item.used_at) > self.inactive);
            if items.by_key.len() <= self.items_max && !is_unused {
                break;
            }
            if let Some((_, oldest)) = items.by_use.pop_first() {
                items.by_key.remove(&oldest);
            }
        }
    }
}

impl fmt::Debug for CertificateCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CertificateCache")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Key {
        (Kind::Chain, name.as_bytes().to_vec())
    }

    #[test]
    fn cache_evicts_old_unused_and_surplus_entries() {
        let cache = CertificateCache::new(2, Duration::from_secs(10), Duration::from_secs(60));
        let start = Moment::from_nanos(1);
        let at = |seconds| start + Duration::from_secs(seconds);
        let insert = |name, now| cache.insert(key(name), Loaded::Chain(Arc::new([])), now);
        let has = |name, now| cache.find(&key(name), now).is_some();
        insert("a", at(0));
        insert("b", at(1));
        assert!(has("a", at(2)));
        insert("c", at(3));
        assert_eq!([has("a", at(4)), has("b", at(4)), has("c", at(4))], [true, false, true]);
        // Frequent use does not prolong validity.
        for seconds in (4..60).step_by(8) {
            assert!(has("a", at(seconds)));
        }
        assert!(has("a", at(60)) && !has("a", at(61)));
        // "c" was not used meanwhile.
        assert!(!has("c", at(61)));
        insert("d", at(62));
        assert_eq!(cache.items.lock().by_key.len(), 2);
    }
}
