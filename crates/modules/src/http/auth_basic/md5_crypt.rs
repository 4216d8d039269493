//! The MD5 forms of crypt(3), by Poul-Henning Kamp: `$1$SALT$HASH`, and Apache's `$apr1$`, which differs only in that
//! word.
//!
//! No maintained library implements them; a library computes the digest itself.

use md5::{Digest, Md5};

use super::des_crypt::CRYPT_DIGITS;

/// Maximum length of the effective salt.
const SALT_BYTES_MAX: usize = 8;

/// Number of additional rounds.
const ROUNDS: usize = 1000;

/// Returns the stored form of a password; `salt` ends at a dollar sign.
pub(super) fn md5_crypt(password: &[u8], magic: &[u8], salt: &[u8]) -> Vec<u8> {
    let salt_length = salt.iter().take(SALT_BYTES_MAX).position(|&byte| byte == b'$');
    let salt = &salt[..salt_length.unwrap_or(salt.len().min(SALT_BYTES_MAX))];
    let hash = hash(password, magic, salt);
    let mut stored = [magic, salt, b"$"].concat();
    // Bytes of the hash that make four digits each; the last byte makes two.
    for [high, middle, low] in [[0, 6, 12], [1, 7, 13], [2, 8, 14], [3, 9, 15], [4, 10, 5]] {
        let bits = u32::from(hash[high]) << 16 | u32::from(hash[middle]) << 8 | u32::from(hash[low]);
        push_digits(&mut stored, bits, 4);
    }
    push_digits(&mut stored, hash[11].into(), 2);
    stored
}

fn hash(password: &[u8], magic: &[u8], salt: &[u8]) -> [u8; 16] {
    let mixed = Md5::new().chain_update(password).chain_update(salt).chain_update(password).finalize();
    let mut digest = Md5::new().chain_update(password).chain_update(magic).chain_update(salt);
    let mut left = password.len();
    while left > 0 {
        let part = left.min(mixed.len());
        digest.update(&mixed[..part]);
        left -= part;
    }
    let mut bits = password.len();
    while bits > 0 {
        digest.update(if bits & 1 == 1 { &[0] } else { &password[..1] });
        bits >>= 1;
    }
    let mut hash: [u8; 16] = digest.finalize().into();
    for round in 0..ROUNDS {
        let (first, last) = if round % 2 == 1 { (password, &hash[..]) } else { (&hash[..], password) };
        let mut digest = Md5::new().chain_update(first);
        if round % 3 != 0 {
            digest.update(salt);
        }
        if round % 7 != 0 {
            digest.update(password);
        }
        hash = digest.chain_update(last).finalize().into();
    }
    hash
}

/// Appends digits of six bits each, the lowest first.
fn push_digits(text: &mut Vec<u8>, mut bits: u32, count: usize) {
    for _ in 0..count {
        text.push(CRYPT_DIGITS[(bits & 63) as usize]);
        bits >>= 6;
    }
}
