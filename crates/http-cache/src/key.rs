//! Identifies an entry by the MD5 sum of its key, as in nginx, and maps it to a file.
//!
//! The sum only locates: two keys with the same sum never share an entry, because the file holds the key and it is
//! compared. A response that depends on request fields (`Vary`) has an entry for each variant. Its sum is computed from
//! the key's sum, a number that changes when the key is purged, and the fields.

use std::path::{Path, PathBuf};

use md5::{Digest, Md5};
use smallvec::SmallVec;

use super::format::Meta;

/// The sum that identifies an entry.
pub type Id = [u8; 16];

/// `levels=1:2`: number of digits in the name of each directory level.
pub type Levels = SmallVec<[u8; 3]>;

/// Maximum length of a key; a longer one is not looked up.
pub const KEY_BYTES_MAX: usize = 16 * 1024;

/// The sum of a key's text.
pub fn id_of(key: &[u8]) -> Id {
    Md5::digest(key).into()
}

/// The sum of a variant; for `number` see the head of the file.
pub fn variant_id(primary: &Id, number: u64, variant: &[u8]) -> Id {
    let mut digest = Md5::new();
    digest.update(primary);
    digest.update(number.to_le_bytes());
    digest.update(variant);
    digest.finalize().into()
}

/// The id of the entry with this head.
pub fn name_of(meta: &Meta) -> Id {
    let primary = id_of(&meta.key);
    match meta.variant.is_empty() {
        true => primary,
        false => variant_id(&primary, meta.variant_number, &meta.variant),
    }
}

/// The sum in hexadecimal digits, which is the name of the file.
pub fn hex(id: &Id) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    id.iter()
        .flat_map(|byte| [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]])
        .map(char::from)
        .collect()
}

/// Parses the name of a file.
pub fn parse_hex(name: &[u8]) -> Option<Id> {
    let digits: &[u8; 32] = name.try_into().ok()?;
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let mut id = Id::default();
    for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(id)
}

/// The file of an entry: `DIRECTORY/c/29/b7f54b2df7773722d382f4809d65029c` with `levels=1:2`.
pub fn path_of(directory: &Path, levels: &[u8], id: &Id) -> PathBuf {
    let name = hex(id);
    let mut path = PathBuf::with_capacity(directory.as_os_str().len() + name.len() + 16);
    path.push(directory);
    let mut end = name.len();
    for &level in levels {
        let start = end - usize::from(level);
        path.push(&name[start..end]);
        end = start;
    }
    path.push(name);
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_named_as_nginx_names_them() {
        let id = parse_hex(b"b7f54b2df7773722d382f4809d65029c").unwrap();
        assert_eq!(path_of(Path::new("/c"), &[1, 2], &id), Path::new("/c/c/29/b7f54b2df7773722d382f4809d65029c"));
        assert_eq!(path_of(Path::new("/c"), &[], &id), Path::new("/c/b7f54b2df7773722d382f4809d65029c"));
        assert_eq!(hex(&id_of(b"")), "d41d8cd98f00b204e9800998ecf8427e");
        assert_eq!((parse_hex(b"xyz"), parse_hex(b"B7f54b2df7773722d382f4809d65029c")), (None, None));
    }

    #[test]
    fn variants_have_sums_of_their_own() {
        let id = id_of(b"key");
        let all = [variant_id(&id, 1, b"a"), variant_id(&id, 1, b"b"), variant_id(&id, 2, b"a"), id];
        assert!(all.iter().enumerate().all(|(at, one)| !all[..at].contains(one)));
    }
}
