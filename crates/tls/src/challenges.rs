//! Answers to the challenges of certificate issuers, for every event loop and process that is asked.
//!
//! The service that obtains a certificate presents an [`Answer`] and keeps the guard while the issuer checks it. The
//! event loops of the same process find the answer in memory. While two processes serve at the same time (during an
//! upgrade, for example) only one of them obtains certificates. Answers are therefore also files in the issuer's state
//! directory, which the other process reads.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Weak};

use gale_runtime::{Device, default_pool};
use parking_lot::{Mutex, RwLock};

use super::keys;
use super::load;
use super::managed::write_atomically;
use super::server::TlsServer;

/// The protocol that an issuer asks for in the handshake (RFC 8737, section 6.2).
pub const ALPN: &[u8] = b"acme-tls/1";

/// Longest key of an answer; host names and tokens are shorter.
const KEY_BYTES_MAX: usize = 255;

/// Longest answer that is read from a file.
const ANSWER_BYTES_MAX: u64 = 4096;

/// Kind of challenge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AskedOver {
    /// A file of this name below `/.well-known/acme-challenge/` (RFC 8555, section 8.3).
    Http,
    /// A handshake with this name (RFC 8737).
    Tls,
}

impl AskedOver {
    fn prefix(self) -> &'static str {
        match self {
            AskedOver::Http => "http-",
            AskedOver::Tls => "tls-",
        }
    }
}

/// Answer to a challenge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Kind of challenge.
    pub over: AskedOver,
    /// The token, or the name of the server in lower case.
    pub key: String,
    /// The key authorization (RFC 8555, section 8.1).
    pub text: String,
}

/// Answers presented by this process.
static ANSWERS: LazyLock<RwLock<HashMap<(AskedOver, String), Ready>>> = LazyLock::new(RwLock::default);

/// The state directories of this process' configurations.
static DIRECTORIES: Mutex<Vec<Weak<AnswerDirectory>>> = Mutex::new(Vec::new());

/// `true` if another process may hold answers for one of the directories.
static HAS_OTHERS: AtomicBool = AtomicBool::new(false);

#[derive(Clone)]
enum Ready {
    Text(Arc<str>),
    Server(Arc<TlsServer>),
}

impl Ready {
    fn of(answer: &Answer) -> Result<Ready, String> {
        match answer.over {
            AskedOver::Http => Ok(Ready::Text(answer.text.as_str().into())),
            AskedOver::Tls => server(&answer.key, &answer.text).map(Ready::Server),
        }
    }
}

/// Directory with an issuer's challenge answers as files.
#[derive(Debug)]
pub struct AnswerDirectory {
    path: PathBuf,
    /// `true` if the service that obtains certificates runs in this process, so memory holds every answer.
    is_own: AtomicBool,
}

impl AnswerDirectory {
    /// The answer directory below a state directory. It is searched until the returned handle is dropped.
    pub fn of(state_directory: &Path) -> Arc<AnswerDirectory> {
        let path = state_directory.join("challenges");
        let mut directories = DIRECTORIES.lock();
        directories.retain(|known| known.strong_count() > 0);
        if let Some(known) = directories.iter().filter_map(Weak::upgrade).find(|known| known.path == path) {
            return known;
        }
        let made = Arc::new(AnswerDirectory { path, is_own: AtomicBool::new(false) });
        directories.push(Arc::downgrade(&made));
        note_others(&directories);
        made
    }

    /// Sets whether this process or another one obtains the certificates.
    pub fn set_own(&self, is_own: bool) {
        self.is_own.store(is_own, Ordering::Release);
        note_others(&DIRECTORIES.lock());
    }

    /// Creates the directory, and removes files left by an earlier process. Blocks.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn clear(&self) -> io::Result<()> {
        match fs::remove_dir_all(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        std::os::unix::fs::DirBuilderExt::mode(&mut fs::DirBuilder::new(), 0o700).create(&self.path)
    }

    fn file(&self, over: AskedOver, key: &str) -> PathBuf {
        self.path.join(format!("{}{key}", over.prefix()))
    }
}

fn note_others(directories: &[Weak<AnswerDirectory>]) {
    let is_other = |known: Arc<AnswerDirectory>| !known.is_own.load(Ordering::Acquire);
    HAS_OTHERS.store(directories.iter().filter_map(Weak::upgrade).any(is_other), Ordering::Release);
}

/// Guard of a presented answer, which is withdrawn when the guard is dropped.
#[must_use]
pub struct Presented {
    over: AskedOver,
    key: String,
    file: Option<PathBuf>,
}

impl Drop for Presented {
    fn drop(&mut self) {
        ANSWERS.write().remove(&(self.over, std::mem::take(&mut self.key)));
        if let Some(file) = self.file.take() {
            // A file that cannot be removed here is removed when the service starts again.
            let _ = default_pool().detach(Device::NONE, move || drop(fs::remove_file(file)));
        }
    }
}

/// Presents an answer to issuers. Blocks while it makes a certificate and writes a file.
///
/// # Errors
/// The key is invalid, or a certificate for it cannot be made. A file that cannot be written is no error, because this
/// process still answers.
pub fn present(answer: &Answer, directory: Option<&AnswerDirectory>) -> Result<Presented, String> {
    if !is_key(answer.over, answer.key.as_bytes()) {
        return Err(format!("\"{}\" is not a token or a name", answer.key.escape_default()));
    }
    let ready = Ready::of(answer)?;
    let file = directory.map(|directory| directory.file(answer.over, &answer.key));
    let file = file.filter(|path| write_atomically(path, answer.text.as_bytes()).is_ok());
    ANSWERS.write().insert((answer.over, answer.key.clone()), ready);
    Ok(Presented { over: answer.over, key: answer.key.clone(), file })
}

/// Result of a look-up that does not block.
pub enum Found<T> {
    /// The answer.
    Known(T),
    /// No answer exists.
    Nothing,
    /// Another process may have the answer.
    Ask,
}

impl<T> Found<T> {
    fn of(known: Option<T>, over: AskedOver, key: &[u8]) -> Found<T> {
        match known {
            Some(known) => Found::Known(known),
            None if HAS_OTHERS.load(Ordering::Acquire) && is_key(over, key) => Found::Ask,
            None => Found::Nothing,
        }
    }
}

/// Looks up the answer to an HTTP challenge with this token.
pub fn text(token: &[u8]) -> Found<Arc<str>> {
    let known = match find(AskedOver::Http, token) {
        Some(Ready::Text(text)) => Some(text),
        _ => None,
    };
    Found::of(known, AskedOver::Http, token)
}

/// Reads another process's answer to an HTTP challenge with this token.
pub async fn text_elsewhere(token: &[u8]) -> Option<Arc<str>> {
    match find_elsewhere(AskedOver::Http, token).await? {
        Ready::Text(text) => Some(text),
        Ready::Server(_) => None,
    }
}

/// Looks up the TLS server that answers a challenge for this name.
pub fn tls_server(name: &[u8]) -> Found<Arc<TlsServer>> {
    let known = match find(AskedOver::Tls, name) {
        Some(Ready::Server(server)) => Some(server),
        _ => None,
    };
    Found::of(known, AskedOver::Tls, name)
}

/// Builds the TLS server that answers a challenge for this name from another process's answer.
pub async fn tls_server_elsewhere(name: &[u8]) -> Option<Arc<TlsServer>> {
    match find_elsewhere(AskedOver::Tls, name).await? {
        Ready::Server(server) => Some(server),
        Ready::Text(_) => None,
    }
}

fn find(over: AskedOver, key: &[u8]) -> Option<Ready> {
    let key = std::str::from_utf8(key).ok()?;
    let answers = ANSWERS.read();
    if answers.is_empty() { None } else { answers.get(&(over, normal(over, key))).cloned() }
}

/// Normalised key: names are case-insensitive, tokens are not.
fn normal(over: AskedOver, key: &str) -> String {
    match over {
        AskedOver::Http => key.to_owned(),
        AskedOver::Tls => key.to_ascii_lowercase(),
    }
}

async fn find_elsewhere(over: AskedOver, key: &[u8]) -> Option<Ready> {
    let key = std::str::from_utf8(key).ok().filter(|key| is_key(over, key.as_bytes()))?;
    let key = normal(over, key);
    let directories: Vec<Arc<AnswerDirectory>> = {
        let known = DIRECTORIES.lock();
        let is_other = |known: &Arc<AnswerDirectory>| !known.is_own.load(Ordering::Acquire);
        known.iter().filter_map(Weak::upgrade).filter(is_other).collect()
    };
    let look = move || {
        let text = directories.iter().find_map(|directory| read(&directory.file(over, &key)))?;
        Ready::of(&Answer { over, key, text }).ok()
    };
    default_pool().run(look).await.ok().flatten()
}

fn read(path: &Path) -> Option<String> {
    let mut text = String::new();
    io::Read::read_to_string(&mut io::Read::take(fs::File::open(path).ok()?, ANSWER_BYTES_MAX), &mut text).ok()?;
    Some(text)
}

/// `true` if this is a valid token (RFC 8555, section 8.3) or name, and thus safe as part of a file name.
fn is_key(over: AskedOver, key: &[u8]) -> bool {
    let is_good = |byte: &u8| match over {
        AskedOver::Http => byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'),
        AskedOver::Tls => byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'),
    };
    !key.is_empty() && key.len() <= KEY_BYTES_MAX && key.iter().all(is_good)
}

/// TLS server for one challenge: its certificate contains the digest of the key authorization.
fn server(name: &str, key_authorization: &str) -> Result<Arc<TlsServer>, String> {
    use ::aws_lc_rs::digest::{SHA256, digest};
    let digest = digest(&SHA256, key_authorization.as_bytes());
    let digest: [u8; 32] = digest.as_ref().try_into().map_err(|_| "not SHA-256")?;
    let subject = address_of(name).unwrap_or_else(|| name.to_owned());
    let text = keys::challenge_certificate(&subject, digest)?;
    let chain = load::certificates(text.as_bytes())?;
    let pair = load::pair(chain, load::private_key(text.as_bytes(), &[])?, name)?;
    TlsServer::of_challenge(pair, ALPN)
}

/// Name by which an issuer asks for an IP address in a handshake (RFC 8738, section 6).
pub fn name_of_address(address: std::net::IpAddr) -> String {
    match address {
        std::net::IpAddr::V4(address) => {
            let [a, b, c, d] = address.octets();
            format!("{d}.{c}.{b}.{a}.in-addr.arpa")
        }
        std::net::IpAddr::V6(address) => {
            let digits = address.octets().into_iter().rev().flat_map(|byte| [byte & 0xf, byte >> 4]);
            let digits: String = digits.map(|digit| format!("{digit:x}.")).collect();
            format!("{digits}ip6.arpa")
        }
    }
}

/// Inverse of [`name_of_address`].
fn address_of(name: &str) -> Option<String> {
    if let Some(digits) = name.strip_suffix(".in-addr.arpa") {
        let octets: Vec<&str> = digits.rsplit('.').collect();
        return octets.join(".").parse::<std::net::Ipv4Addr>().ok().map(|address| address.to_string());
    }
    let digits: String = name.strip_suffix(".ip6.arpa")?.split('.').rev().collect();
    let bits = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32)?;
    Some(std::net::Ipv6Addr::from(bits).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_there_as_long_as_they_are_presented() {
        let of = |over, key: &str| Answer { over, key: key.to_owned(), text: format!("{key}.thumb") };
        let known = |found: Found<Arc<str>>| if let Found::Known(text) = found { Some(text.to_string()) } else { None };
        let presented = present(&of(AskedOver::Http, "Token_1"), None).unwrap();
        assert_eq!(known(text(b"Token_1")).as_deref(), Some("Token_1.thumb"));
        assert!(known(text(b"token_1")).is_none() && known(text(b"\xff")).is_none());
        drop(presented);
        assert!(known(text(b"Token_1")).is_none());

        let presented = present(&of(AskedOver::Tls, "a.example"), None).unwrap();
        assert!(matches!(tls_server(b"A.example"), Found::Known(_)));
        assert!(!matches!(tls_server(b"b.example"), Found::Known(_)));
        drop(presented);
        for key in ["", "../account.key", "a b", "\u{e4}"] {
            assert!(present(&of(AskedOver::Http, key), None).is_err(), "{key}");
        }
    }

    #[test]
    fn addresses_have_names_and_back() {
        for (address, name) in [
            ("192.0.2.1", "1.2.0.192.in-addr.arpa".to_owned()),
            ("2001:db8::1", format!("1.{}8.b.d.0.1.0.0.2.ip6.arpa", "0.".repeat(23))),
        ] {
            assert_eq!(name_of_address(address.parse().unwrap()), name);
            assert_eq!(address_of(&name).as_deref(), Some(address));
        }
        assert_eq!([address_of("a.example"), address_of("x.ip6.arpa")], [None, None]);
    }
}
