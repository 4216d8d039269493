//! Private keys encrypted with a password, in both forms that OpenSSL writes: PKCS #8 (RFC 5958, section 3; RFC 8018),
//! and the older PEM form (`Proc-Type: 4,ENCRYPTED`, RFC 1421, section 4.6), which derives the key with MD5.
//!
//! As in nginx each password is tried in turn; the right one is the one that yields a key.

use bstr::ByteSlice;
use cbc::Decryptor;
use cbc::cipher::block_padding::Pkcs7;
use cbc::cipher::{BlockModeDecrypt, KeyIvInit};
use md5::{Digest, Md5};
use pkcs8::EncryptedPrivateKeyInfoRef;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

/// PEM labels of a PKCS #8 key, encrypted and in the clear.
const LABEL: &[u8] = b"ENCRYPTED PRIVATE KEY-----";
const LABEL_IN_THE_CLEAR: &[u8] = b"PRIVATE KEY-----";

/// Header of an encrypted PEM section.
const PROC_TYPE: &[u8] = b"Proc-Type: 4,ENCRYPTED";

/// Bytes of the initialisation vector that salt the password.
const SALT_BYTES: usize = 8;

/// `true` if the private key in a PEM text is encrypted.
pub fn is_encrypted(text: &[u8]) -> bool {
    text.find(LABEL).is_some() || text.find(PROC_TYPE).is_some()
}

/// Decrypts a key with each of these passwords. The result contains the right key if its password is among them;
/// rarely, a wrong password yields something well-formed, too. `None` if the text is malformed or the encryption
/// unknown.
pub fn decrypt<'p>(
    text: &[u8],
    passwords: &'p [Vec<u8>],
) -> Option<Box<dyn Iterator<Item = PrivateKeyDer<'static>> + 'p>> {
    match text.find(LABEL) {
        Some(_) => {
            let der = PrivateKeyDer::from_pem_slice(&text.replace(LABEL, LABEL_IN_THE_CLEAR)).ok()?;
            EncryptedPrivateKeyInfoRef::try_from(der.secret_der()).ok()?;
            Some(Box::new(passwords.iter().filter_map(move |password| {
                let encrypted = EncryptedPrivateKeyInfoRef::try_from(der.secret_der()).ok()?;
                let key = encrypted.decrypt(password).ok()?;
                Some(PrivatePkcs8KeyDer::from(key.as_bytes().to_vec()).into())
            })))
        }
        None => {
            let old = OldForm::read(text)?;
            Some(Box::new(passwords.iter().filter_map(move |password| old.decrypt(password))))
        }
    }
}

/// A key in the older form.
struct OldForm {
    /// Encrypted content, in the type of a key.
    content: PrivateKeyDer<'static>,
    cipher: Cipher,
    vector: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Cipher {
    Aes128,
    Aes192,
    Aes256,
    Des,
    TripleDes,
}

impl Cipher {
    /// The cipher of this name in `DEK-Info`.
    fn named(name: &[u8]) -> Option<Cipher> {
        Some(match name {
            b"AES-128-CBC" => Cipher::Aes128,
            b"AES-192-CBC" => Cipher::Aes192,
            b"AES-256-CBC" => Cipher::Aes256,
            b"DES-CBC" => Cipher::Des,
            b"DES-EDE3-CBC" => Cipher::TripleDes,
            _ => return None,
        })
    }

    fn key_bytes(self) -> usize {
        match self {
            Cipher::Des => 8,
            Cipher::Aes128 => 16,
            Cipher::Aes192 | Cipher::TripleDes => 24,
            Cipher::Aes256 => 32,
        }
    }

    /// Decrypts in CBC mode and removes the padding.
    fn decrypt(self, key: &[u8], vector: &[u8], content: &[u8]) -> Option<Vec<u8>> {
        fn run<D: BlockModeDecrypt + KeyIvInit>(key: &[u8], vector: &[u8], content: &[u8]) -> Option<Vec<u8>> {
            D::new_from_slices(key, vector).ok()?.decrypt_padded_vec::<Pkcs7>(content).ok()
        }
        match self {
            Cipher::Aes128 => run::<Decryptor<aes::Aes128>>(key, vector, content),
            Cipher::Aes192 => run::<Decryptor<aes::Aes192>>(key, vector, content),
            Cipher::Aes256 => run::<Decryptor<aes::Aes256>>(key, vector, content),
            Cipher::Des => run::<Decryptor<des::Des>>(key, vector, content),
            Cipher::TripleDes => run::<Decryptor<des::TdesEde3>>(key, vector, content),
        }
    }
}

impl OldForm {
    /// Reads the headers, which the PEM parser does not know.
    fn read(text: &[u8]) -> Option<OldForm> {
        const INFO: &[u8] = b"DEK-Info:";
        let start = text.find(PROC_TYPE)?;
        let info = start + text[start..].find(INFO)?;
        let end = text[info..].find_byte(b'\n').map_or(text.len(), |length| info + length);
        let (cipher, vector) = text[info + INFO.len()..end].trim().split_once_str(",")?;
        let clear = [&text[..start], &text[end..]].concat();
        let (cipher, vector) = (Cipher::named(cipher)?, from_hex(vector)?);
        (vector.len() >= SALT_BYTES).then_some(())?;
        Some(OldForm { content: PrivateKeyDer::from_pem_slice(&clear).ok()?, cipher, vector })
    }

    fn decrypt(&self, password: &[u8]) -> Option<PrivateKeyDer<'static>> {
        let key = self.key(password);
        let plain = self.cipher.decrypt(&key, &self.vector, self.content.secret_der())?;
        Some(match self.content {
            PrivateKeyDer::Pkcs1(_) => PrivateKeyDer::Pkcs1(plain.into()),
            PrivateKeyDer::Sec1(_) => PrivateKeyDer::Sec1(plain.into()),
            _ => PrivateKeyDer::Pkcs8(plain.into()),
        })
    }

    /// OpenSSL's key derivation (`EVP_BytesToKey` with MD5, one round).
    fn key(&self, password: &[u8]) -> Vec<u8> {
        let (mut key, mut block) = (Vec::new(), Vec::new());
        while key.len() < self.cipher.key_bytes() {
            let mut hash = Md5::new();
            hash.update(&block);
            hash.update(password);
            hash.update(&self.vector[..SALT_BYTES]);
            block = hash.finalize().to_vec();
            key.extend_from_slice(&block);
        }
        key.truncate(self.cipher.key_bytes());
        key
    }
}

fn from_hex(text: &[u8]) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    text.chunks(2).map(|pair| Some(digit(pair[0])? << 4 | digit(*pair.get(1)?)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    // P-256 keys with the password `secret`, written by `openssl ec -aes128 | -des3` and `openssl pkcs8 -topk8`.
    const OLD_AES: &str = include_str!("../tests/keys/old-aes128.key");
    const OLD_DES: &str = include_str!("../tests/keys/old-des3.key");
    const PBES2: &str = include_str!("../tests/keys/pbes2-sha256.key");
    const PBES2_DES: &str = include_str!("../tests/keys/pbes2-des3-sha1.key");
    const SCRYPT: &str = include_str!("../tests/keys/scrypt.key");

    fn keys(text: &str, passwords: &[&str]) -> Option<usize> {
        let passwords: Vec<Vec<u8>> = passwords.iter().map(|password| password.as_bytes().to_vec()).collect();
        let is_key = |der: &PrivateKeyDer<'_>| rustls::crypto::aws_lc_rs::sign::any_supported_type(der).is_ok();
        decrypt(text.as_bytes(), &passwords).map(|keys| keys.filter(is_key).count())
    }

    #[test]
    fn every_form_opens_with_its_password_alone() {
        for text in [OLD_AES, OLD_DES, PBES2, PBES2_DES, SCRYPT] {
            assert!(is_encrypted(text.as_bytes()), "{text}");
            assert_eq!(keys(text, &["wrong", "", "secret"]), Some(1), "{text}");
            assert_eq!(keys(text, &["wrong", "Secret", "secret "]), Some(0), "{text}");
            assert_eq!(keys(text, &[]), Some(0), "{text}");
        }
    }

    #[test]
    fn malformed_or_unknown_key_is_refused() {
        let unknown = OLD_AES.replace("AES-128-CBC", "CAMELLIA-128-CBC");
        let short = OLD_AES.replacen("AES-128-CBC,", "AES-128-CBC,0A#", 1);
        for text in [unknown.as_str(), &short, &OLD_AES[..60], "Proc-Type: 4,ENCRYPTED", "ENCRYPTED PRIVATE KEY-----"] {
            assert_eq!(keys(text, &["secret"]), None, "{text}");
        }
        // Vector too short for the cipher.
        let short = OLD_AES.replace("AES-128-CBC,", "AES-128-CBC,00112233445566\nX: ");
        assert_eq!(keys(&short, &["secret"]), None);
        for length in 0..PBES2.len() {
            let _ = keys(&PBES2[..length], &["secret"]);
            let _ = keys(&OLD_DES[..length.min(OLD_DES.len())], &["secret"]);
        }
    }
}
