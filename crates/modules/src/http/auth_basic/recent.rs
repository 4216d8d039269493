//! Cache of recently verified credentials, so that not every image of a page costs a slow hash.
//!
//! Each worker keeps keyed digests (HMAC-SHA-256, with a key that never leaves the process) of the user, the password
//! and the state of the password file; it keeps neither names nor passwords. Another or a changed file leads to another
//! digest. Only right passwords are kept.

use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use gale_files::FileMetadata;
use gale_http::request::worker::HttpWorker;
use gale_runtime::Moment;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::credentials::Credentials;

/// Time for which a password need not be hashed again.
const KEPT_FOR: Duration = Duration::from_secs(300);

/// Maximum number of digests: 40 KiB for each worker.
const KEPT_MAX: usize = 1024;

/// A file changed more recently than this may change again without a new timestamp.
const SETTLED_AFTER: Duration = Duration::from_secs(2);

/// Credentials together with the state of the file that they were checked against.
pub(super) struct Proof {
    digest: Digest,
    is_settled: bool,
}

type Digest = [u8; 32];

impl Proof {
    /// Creates the digest of these credentials and this file.
    pub fn new(file: &FileMetadata, credentials: &Credentials) -> Proof {
        Proof::at(gale_runtime::wall(), file, credentials)
    }

    fn at(now: SystemTime, file: &FileMetadata, credentials: &Credentials) -> Proof {
        let mut mac = Hmac::<Sha256>::new_from_slice(key()).expect("a key may have any length");
        let user_bytes = credentials.user().len() as u64;
        for number in [file.device, file.inode, file.size, user_bytes] {
            mac.update(&number.to_ne_bytes());
        }
        // The owner of a file can set its modification time at will, but not its change time.
        let times = [(file.modified_seconds, file.modified_nanos), (file.changed_seconds, file.changed_nanos)];
        for (seconds, nanos) in times {
            mac.update(&seconds.to_ne_bytes());
            mac.update(&nanos.to_ne_bytes());
        }
        mac.update(credentials.user());
        mac.update(credentials.password());
        let age = now.duration_since(file.modified().max(file.changed()));
        Proof { digest: mac.finalize().into_bytes().into(), is_settled: age.is_ok_and(|age| age >= SETTLED_AFTER) }
    }
}

/// Returns `true` if the credentials were right a short time ago.
pub(super) fn knows(worker: &HttpWorker, proof: &Proof) -> bool {
    worker.common.with_note(|recent: &mut Recent| recent.knows(&proof.digest, gale_runtime::now()))
}

/// Records that the credentials were right.
pub(super) fn remember(worker: &HttpWorker, proof: Proof) {
    if proof.is_settled {
        worker.common.with_note(|recent: &mut Recent| recent.remember(proof.digest, gale_runtime::now()));
    }
}

/// Digests of a worker.
#[derive(Default)]
struct Recent {
    known: HashSet<Digest>,
    /// The digests in the order of their expiry.
    ends: VecDeque<(Moment, Digest)>,
}

impl Recent {
    fn knows(&mut self, digest: &Digest, now: Moment) -> bool {
        while self.ends.front().is_some_and(|(end, _)| *end <= now) {
            self.forget_first();
        }
        self.known.contains(digest)
    }

    fn remember(&mut self, digest: Digest, now: Moment) {
        if self.ends.len() == KEPT_MAX {
            self.forget_first();
        }
        if self.known.insert(digest) {
            self.ends.push_back((now + KEPT_FOR, digest));
        }
    }

    fn forget_first(&mut self) {
        if let Some((_, digest)) = self.ends.pop_front() {
            self.known.remove(&digest);
        }
    }
}

/// Returns the process's key, derived from the system's random seed of the standard library's hash maps.
fn key() -> &'static [u8; 32] {
    static KEY: OnceLock<[u8; 32]> = OnceLock::new();
    KEY.get_or_init(|| {
        let (one, other) = (RandomState::new(), RandomState::new());
        let words = [one.hash_one(0), one.hash_one(1), other.hash_one(2), other.hash_one(3)];
        let mut key = [0; 32];
        for (place, word) in key.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        key
    })
}

#[cfg(test)]
mod tests {
    use gale_files::FileKind;

    use super::*;

    #[test]
    fn the_right_ones_are_known_for_a_while() {
        let mut recent = Recent::default();
        let start = Moment::from_nanos(5);
        recent.remember([1; 32], start);
        assert!(recent.knows(&[1; 32], start) && !recent.knows(&[2; 32], start));
        assert!(recent.knows(&[1; 32], start + (KEPT_FOR - Duration::from_nanos(1))));
        assert!(!recent.knows(&[1; 32], start + KEPT_FOR));
        assert!(recent.known.is_empty() && recent.ends.is_empty());
    }

    #[test]
    fn a_file_that_only_seems_unchanged_is_another_one() {
        let old = FileMetadata {
            kind: FileKind::Regular,
            size: 10,
            modified_seconds: 1_000_000_000,
            modified_nanos: 0,
            changed_seconds: 1_000_000_000,
            changed_nanos: 0,
            device: 1,
            inode: 2,
            mode: 0o644,
            owner: 0,
            links: 1,
        };
        let now = old.modified() + SETTLED_AFTER;
        let proof = |file: &FileMetadata| Proof::at(now, file, &Credentials::parse(b"Basic YTpi").expect("a user"));
        let first = proof(&old);
        assert!(first.is_settled && proof(&old).digest == first.digest);
        assert!(proof(&FileMetadata { changed_nanos: 1, ..old }).digest != first.digest);
        assert!(proof(&FileMetadata { modified_nanos: 1, ..old }).digest != first.digest);
        assert!(!proof(&FileMetadata { changed_seconds: 1_000_000_001, ..old }).is_settled);
        assert!(!proof(&FileMetadata { modified_seconds: 1_000_000_001, ..old }).is_settled);
    }

    #[test]
    fn no_more_than_so_many_are_kept() {
        let mut recent = Recent::default();
        let digest = |number: u16| {
            let mut digest = [0; 32];
            digest[..2].copy_from_slice(&number.to_ne_bytes());
            digest
        };
        let now = Moment::from_nanos(0);
        (0..KEPT_MAX as u16 + 1).for_each(|number| recent.remember(digest(number), now));
        assert_eq!((recent.known.len(), recent.ends.len()), (KEPT_MAX, KEPT_MAX));
        assert!(!recent.knows(&digest(0), now) && recent.knows(&digest(1), now));
    }
}
