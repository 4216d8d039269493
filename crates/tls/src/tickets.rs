//! Session resumption: tickets, which the client keeps, and session stores of the server.
//!
//! A session is bound to the server that began it: to its certificates and its rules for client certificates. With
//! another server, or after a change of these, a full handshake takes place. (nginx's session identifier context does
//! the same with fewer of the rules.)
//!
//! Ticket keys come from the master, which gives them to every worker process and to the next binary at an upgrade. It
//! replaces them at the lifetime of sessions, at least once an hour (decision 0041). Alternatively they come from
//! `ssl_session_ticket_key`.
//!
//! The master makes and renews them: `gale_process::secrets`.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::digest;
use bstr::BString;
use gale_process::{Secret, SecretSeries};
use parking_lot::Mutex;
use rustls::server::{ProducesTickets, ServerSessionMemoryCache, StoresServerSessions};

/// Hash of the settings that a session is bound to.
pub type Identity = [u8; 32];

/// nginx's estimate of the size of a session in a shared cache.
const SESSION_BYTES: u64 = 256;

const NAME_BYTES: usize = 16;
const TIME_BYTES: usize = 8;

/// A ticket key, with the name that identifies it in tickets.
pub struct TicketKey {
    name: [u8; NAME_BYTES],
    key: LessSafeKey,
}

impl TicketKey {
    fn new(name: [u8; NAME_BYTES], key: &[u8]) -> TicketKey {
        let key = UnboundKey::new(&AES_256_GCM, key).expect("the key is as long as it has to be");
        TicketKey { name, key: LessSafeKey::new(key) }
    }
}

/// Keys for sessions of one lifetime.
struct KeySeries {
    /// Lifetime of the sessions, in seconds.
    lifetime: u32,
    /// Keys with the time from which they encrypt, in seconds since 1970; oldest first.
    keys: Vec<(u64, Arc<TicketKey>)>,
}

/// Keys shared by all worker processes, shortest lifetime first.
#[derive(Default)]
pub struct SharedKeys(Mutex<Vec<KeySeries>>);

static SHARED_KEYS: SharedKeys = SharedKeys(Mutex::new(Vec::new()));

/// Replaces the ticket keys.
pub fn use_ticket_keys(series: &[SecretSeries]) {
    SHARED_KEYS.replace(series);
}

impl SharedKeys {
    fn replace(&self, series: &[SecretSeries]) {
        let key = |secret: &Secret| (secret.from, Arc::new(TicketKey::new(secret.name, &secret.key)));
        let keys = |series: &SecretSeries| KeySeries {
            lifetime: series.lifetime,
            keys: series.secrets.iter().map(key).collect(),
        };
        let all = series.iter().map(keys).collect();
        *self.0.lock() = all;
    }

    /// The key that encrypts at `now` for sessions of this lifetime; `None` if the master could not make one.
    fn newest(&self, lifetime: u32, now: u64) -> Option<Arc<TicketKey>> {
        let all = self.0.lock();
        let keys = &all.iter().find(|series| series.lifetime >= lifetime).or(all.last())?.keys;
        // The first key if the clock was set back.
        let (_, key) = keys.iter().rev().find(|(from, _)| *from <= now).or(keys.first())?;
        Some(Arc::clone(key))
    }

    fn named(&self, name: &[u8]) -> Option<Arc<TicketKey>> {
        let all = self.0.lock();
        let mut keys = all.iter().flat_map(|series| &series.keys);
        keys.find(|(_, key)| key.name == name).map(|(_, key)| Arc::clone(key))
    }
}

/// Source of a server's ticket keys.
#[derive(Clone)]
pub enum TicketKeys {
    /// Keys from the master: see [`SharedKeys`].
    Own(&'static SharedKeys),
    /// Keys from files; the first one encrypts.
    OfFiles(Arc<[Arc<TicketKey>]>),
}

impl TicketKeys {
    /// The keys shared by all worker processes.
    pub fn own() -> TicketKeys {
        TicketKeys::Own(&SHARED_KEYS)
    }

    /// A key from a file.
    ///
    /// # Errors
    /// The file has the wrong size, in nginx's words.
    pub fn of_file(name: &str, content: &[u8]) -> Result<Arc<TicketKey>, String> {
        let (Some((key_name, secret)), 48 | 80) = (content.split_first_chunk(), content.len()) else {
            return Err(format!("\"{name}\" must be 48 or 80 bytes"));
        };
        Ok(Arc::new(TicketKey::new(*key_name, digest::digest(&digest::SHA256, secret).as_ref())))
    }

    fn newest(&self, lifetime: u32, now: u64) -> Option<Arc<TicketKey>> {
        match self {
            TicketKeys::Own(shared) => shared.newest(lifetime, now),
            TicketKeys::OfFiles(keys) => keys.first().cloned(),
        }
    }

    fn named(&self, name: &[u8]) -> Option<Arc<TicketKey>> {
        match self {
            TicketKeys::Own(shared) => shared.named(name),
            TicketKeys::OfFiles(keys) => keys.iter().find(|key| key.name == name).cloned(),
        }
    }
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

/// Encrypts and decrypts the tickets of a server.
///
/// ```text
///   name of the key (16) | nonce (12) | encrypted: seconds (8), session | tag (16)
/// ```
pub struct Tickets {
    /// Keys of the tickets.
    pub keys: TicketKeys,
    /// Identity of the server.
    pub identity: Identity,
    /// Lifetime of sessions, in seconds.
    pub lifetime: u32,
}

impl fmt::Debug for Tickets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tickets")
    }
}

impl Tickets {
    fn encrypt_at(&self, now: u64, plain: &[u8]) -> Option<Vec<u8>> {
        let key = self.keys.newest(self.lifetime, now)?;
        let mut nonce = [0; NONCE_LEN];
        aws_lc_rs::rand::fill(&mut nonce).ok()?;
        let mut content = [&now.to_be_bytes()[..], plain].concat();
        let aad = Aad::from(&self.identity[..]);
        key.key.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), aad, &mut content).ok()?;
        Some([&key.name[..], &nonce, &content].concat())
    }

    fn decrypt_at(&self, now: u64, ticket: &[u8]) -> Option<Vec<u8>> {
        let (name, rest) = ticket.split_at_checked(NAME_BYTES)?;
        let (nonce, content) = rest.split_first_chunk::<NONCE_LEN>()?;
        let key = self.keys.named(name)?;
        let mut content = content.to_vec();
        let aad = Aad::from(&self.identity[..]);
        let plain = key.key.open_in_place(Nonce::assume_unique_for_key(*nonce), aad, &mut content).ok()?;
        let (made, session) = plain.split_first_chunk::<TIME_BYTES>()?;
        let age = now.saturating_sub(u64::from_be_bytes(*made));
        (age <= u64::from(self.lifetime)).then(|| session.to_vec())
    }
}

impl ProducesTickets for Tickets {
    fn enabled(&self) -> bool {
        true
    }

    fn lifetime(&self) -> u32 {
        self.lifetime
    }

    fn encrypt(&self, plain: &[u8]) -> Option<Vec<u8>> {
        self.encrypt_at(unix_seconds(), plain)
    }

    fn decrypt(&self, ticket: &[u8]) -> Option<Vec<u8>> {
        self.decrypt_at(unix_seconds(), ticket)
    }
}

/// A server's sessions within a session store.
pub struct Sessions {
    store: SessionStore,
    identity: Identity,
    lifetime: u32,
}

/// Session store, shared by several servers.
pub type SessionStore = Arc<ServerSessionMemoryCache>;

/// The store of this name, which persists over reloads unless its size changes.
pub fn shared_store(name: &BString, bytes: u64) -> SessionStore {
    static STORES: Mutex<Vec<(BString, u64, SessionStore)>> = Mutex::new(Vec::new());
    let mut stores = STORES.lock();
    if let Some((_, _, store)) = stores.iter().find(|(own, size, _)| own == name && *size == bytes) {
        return Arc::clone(store);
    }
    stores.retain(|(own, _, _)| own != name);
    let store = store_of(bytes / SESSION_BYTES);
    stores.push((name.clone(), bytes, Arc::clone(&store)));
    store
}

/// A store for this many sessions.
pub fn store_of(sessions: u64) -> SessionStore {
    ServerSessionMemoryCache::new(usize::try_from(sessions).unwrap_or(usize::MAX).clamp(1, 1 << 22))
}

impl Sessions {
    /// The sessions of the server with this identity.
    pub fn new(store: &SessionStore, identity: Identity, lifetime: u32) -> Sessions {
        Sessions { store: Arc::clone(store), identity, lifetime }
    }

    fn key(&self, key: &[u8]) -> Vec<u8> {
        [&self.identity[..], key].concat()
    }

    fn current(&self, value: Option<Vec<u8>>) -> Option<Vec<u8>> {
        let value = value?;
        let (made, session) = value.split_first_chunk::<TIME_BYTES>()?;
        let age = unix_seconds().saturating_sub(u64::from_be_bytes(*made));
        (age <= u64::from(self.lifetime)).then(|| session.to_vec())
    }
}

impl fmt::Debug for Sessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sessions")
    }
}

impl StoresServerSessions for Sessions {
    fn put(&self, key: Vec<u8>, value: Vec<u8>) -> bool {
        self.store.put(self.key(&key), [&unix_seconds().to_be_bytes()[..], &value].concat())
    }

    fn get(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.current(self.store.get(&self.key(key)))
    }

    fn take(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.current(self.store.take(&self.key(key)))
    }

    fn can_cache(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tickets(keys: TicketKeys, identity: u8) -> Tickets {
        Tickets { keys, identity: [identity; 32], lifetime: 300 }
    }

    #[test]
    fn a_ticket_is_good_for_its_server_until_it_is_too_old() {
        let keys = shared(&[(300, &[0])]);
        let (one, other) = (tickets(keys.clone(), 1), tickets(keys, 2));
        let now = unix_seconds();
        let ticket = one.encrypt_at(now, b"session").unwrap();
        assert_eq!(one.decrypt_at(now + 300, &ticket).as_deref(), Some(&b"session"[..]));
        assert_eq!(one.decrypt_at(now + 301, &ticket), None);
        assert_eq!(other.decrypt_at(now, &ticket), None);
        for index in 0..ticket.len() {
            let mut forged = ticket.clone();
            forged[index] ^= 1;
            assert_eq!(one.decrypt_at(now, &forged), None);
            assert_eq!(one.decrypt_at(now, &ticket[..index]), None);
        }
    }

    /// Keys for these lifetimes, each with the times from which they encrypt.
    fn shared(all: &[(u32, &[u64])]) -> TicketKeys {
        let keys: &'static SharedKeys = Box::leak(Box::default());
        keys.replace(&all.iter().map(|(lifetime, froms)| series(*lifetime, froms)).collect::<Vec<_>>());
        TicketKeys::Own(keys)
    }

    fn series(lifetime: u32, froms: &[u64]) -> SecretSeries {
        let secret = |&from: &u64| Secret { from, name: [lifetime as u8 ^ from as u8; 16], key: [from as u8; 32] };
        SecretSeries { lifetime, secrets: froms.iter().map(secret).collect() }
    }

    #[test]
    fn the_key_of_the_time_encrypts_and_all_decrypt() {
        let of = |keys: &TicketKeys, lifetime| Tickets { keys: keys.clone(), identity: [9; 32], lifetime };
        let key_of = |ticket: &[u8]| ticket[..NAME_BYTES].to_vec();
        let keys = shared(&[(60, &[10, 70]), (300, &[5, 100, 200])]);
        let (short, long) = (of(&keys, 60), of(&keys, 300));
        let first = long.encrypt_at(99, b"x").unwrap();
        assert_eq!(key_of(&first), [44 ^ 5; NAME_BYTES]);
        assert_eq!(key_of(&long.encrypt_at(100, b"x").unwrap()), [44 ^ 100; NAME_BYTES]);
        assert!(long.decrypt_at(250, &first).is_some());
        assert_eq!(key_of(&short.encrypt_at(69, b"x").unwrap()), [60 ^ 10; NAME_BYTES]);
        // Before the first key's time, as after the clock was set back.
        assert_eq!(key_of(&short.encrypt_at(1, b"x").unwrap()), [60 ^ 10; NAME_BYTES]);
        // A lifetime without keys uses those of the next longer one.
        assert_eq!(key_of(&of(&keys, 61).encrypt_at(99, b"x").unwrap()), [44 ^ 5; NAME_BYTES]);
        let TicketKeys::Own(own) = keys else { unreachable!() };
        own.replace(&[series(300, &[100, 200])]);
        assert!(long.decrypt_at(250, &first).is_none(), "the key is forgotten");
        own.replace(&[]);
        assert!(long.encrypt_at(250, b"x").is_none());
    }

    #[test]
    fn every_key_of_a_list_of_files_opens_and_the_first_one_encrypts() {
        let key = |byte: u8| TicketKeys::of_file("f", &[byte; 48]).unwrap();
        let old = tickets(TicketKeys::OfFiles([key(1)].into()), 0);
        let new = tickets(TicketKeys::OfFiles([key(2), key(1)].into()), 0);
        assert!(new.decrypt_at(5, &old.encrypt_at(5, b"x").unwrap()).is_some());
        assert!(old.decrypt_at(5, &new.encrypt_at(5, b"x").unwrap()).is_none());
        assert_eq!(TicketKeys::of_file("f", &[0; 47]).err().unwrap(), "\"f\" must be 48 or 80 bytes");
    }

    #[test]
    fn sessions_of_servers_in_one_store_are_kept_apart() {
        let name = BString::from("a test");
        let of = |identity| Sessions::new(&shared_store(&name, 100_000), [identity; 32], 300);
        assert!(of(1).put(b"key".to_vec(), b"value".to_vec()));
        assert_eq!(of(1).get(b"key").as_deref(), Some(&b"value"[..]));
        assert_eq!((of(2).get(b"key"), of(2).take(b"key")), (None, None));
        assert!(of(1).take(b"key").is_some() && of(1).get(b"key").is_none());
    }
}
