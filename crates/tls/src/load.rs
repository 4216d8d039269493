//! Certificates and keys from PEM. Messages are nginx's, with OpenSSL's words inside.

use std::io;
use std::sync::Arc;

use bstr::ByteSlice;
use gale_base::os_error::OsErrorText;
use rustls::crypto::aws_lc_rs::sign;
use rustls::pki_types::pem::{self, PemObject, SectionKind};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::sign::{CertifiedKey, SigningKey};
use x509_parser::asn1_rs::{Any, Tag};
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::public_key::PublicKey;

use super::encrypted_key;
use super::verify::Purpose;

/// OpenSSL's error for a text without a PEM section of the wanted kind.
const NO_START_LINE: &str = "error:0480006C:PEM routines::no start line";

/// `anyExtendedKeyUsage`
const ANY_PURPOSE: &[u8] = b"\x06\x04\x55\x1d\x25\x00";

const UNSUPPORTED: &str = "error:1E08010C:DECODER routines::unsupported";

/// Longest RSA key that signs in less than a millisecond.
const QUICK_RSA_BITS_MAX: usize = 2048;

/// Longest line of a password file, as in nginx.
const PASSWORD_BYTES_MAX: usize = 4096;

/// Error of a file that cannot be read, in OpenSSL's words.
pub fn unreadable(path: &str, error: &io::Error) -> String {
    let (code, text) = match error.raw_os_error() {
        Some(code) => (code as u32, OsErrorText(error).to_string()),
        None => (0, error.to_string()),
    };
    // `(2: No such file or directory)`
    let text = text.trim_start_matches('(').trim_end_matches(')');
    let text = text.split_once(": ").map_or(text, |(_, text)| text);
    let reason = match error.kind() {
        io::ErrorKind::NotFound => "error:10000080:BIO routines::no such file",
        _ => "error:10080002:BIO routines::system lib",
    };
    format!("BIO_new_file() failed (SSL: error:8{code:07X}:system library::{text}:calling fopen({path}, r) {reason})")
}

/// Reads a certificate chain, the server's own certificate first.
pub fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let wrong = |why: &str| format!("PEM_read_bio_X509_AUX() failed (SSL: {why})");
    let mut found = Vec::new();
    for item in sections(text) {
        match item {
            Ok((SectionKind::Certificate, der)) => found.push(CertificateDer::from(split_trusted(&der).0.to_vec())),
            // Keys may be in the same file.
            Ok(_) => {}
            Err(error) => return Err(wrong(&error)),
        }
    }
    match found.is_empty() {
        true => Err(wrong(&format!("{NO_START_LINE}:Expecting: TRUSTED CERTIFICATE"))),
        false => Ok(found),
    }
}

/// Reads CA certificates that are trusted for this purpose.
pub fn authorities(text: &[u8], purpose: Purpose) -> Result<Vec<CertificateDer<'static>>, String> {
    let wrong = |why: &str| format!("PEM_read_bio_X509_AUX() failed (SSL: {why})");
    let mut found = Vec::new();
    for item in sections(text) {
        match item {
            Ok((SectionKind::Certificate, der)) => {
                let (own, trust) = split_trusted(&der);
                if is_trusted_for(trust, purpose) {
                    found.push(CertificateDer::from(own.to_vec()));
                }
            }
            Ok(_) => {}
            Err(error) => return Err(wrong(&error)),
        }
    }
    match found.is_empty() {
        true => Err(wrong(&format!("{NO_START_LINE}:Expecting: TRUSTED CERTIFICATE"))),
        false => Ok(found),
    }
}

/// Reads certificate revocation lists.
pub fn revocations(text: &[u8]) -> Result<Vec<CertificateRevocationListDer<'static>>, String> {
    let wrong = |why: &str| format!("PEM_read_bio_X509_CRL() failed (SSL: {why})");
    let mut found = Vec::new();
    for item in sections(text) {
        match item {
            Ok((SectionKind::Crl, der)) => found.push(CertificateRevocationListDer::from(der)),
            Ok(_) => {}
            Err(error) => return Err(wrong(&error)),
        }
    }
    match found.is_empty() {
        true => Err(wrong(&format!("{NO_START_LINE}:Expecting: X509 CRL"))),
        false => Ok(found),
    }
}

/// Checks that a file contains DHE parameters.
///
/// # Errors
/// It does not; in OpenSSL's words.
pub fn dh_parameters(text: &[u8]) -> Result<(), String> {
    match text.contains_str("DH PARAMETERS-----") {
        true => Ok(()),
        false => Err(format!("SSL: {NO_START_LINE}:Expecting: DH PARAMETERS")),
    }
}

fn sections(text: &[u8]) -> impl Iterator<Item = Result<(SectionKind, Vec<u8>), String>> {
    // OpenSSL's older labels.
    let plain = text.replace("TRUSTED CERTIFICATE-----", "CERTIFICATE-----");
    let plain = plain.replace("X509 CERTIFICATE-----", "CERTIFICATE-----");
    let items: Vec<_> = <(SectionKind, Vec<u8>)>::pem_slice_iter(&plain).collect();
    items.into_iter().map(|item| item.map_err(|error| pem_words(&error)))
}

/// Splits a certificate from the trust settings that OpenSSL appends (`openssl x509 -trustout`).
fn split_trusted(der: &[u8]) -> (&[u8], &[u8]) {
    match X509Certificate::from_der(der) {
        Ok((trust, _)) => der.split_at(der.len() - trust.len()),
        Err(_) => (der, &[]),
    }
}

/// `true` if a certificate is trusted for this purpose; without trust settings it is trusted for all.
fn is_trusted_for(trust: &[u8], purpose: Purpose) -> bool {
    const SEQUENCE: Tag = Tag::Sequence;
    const REJECTED: Tag = Tag(0);
    let Ok((_, lists)) = Any::from_der(trust) else { return trust.is_empty() };
    let purposes: [&[u8]; 2] = match purpose {
        Purpose::Client => [b"\x06\x08\x2b\x06\x01\x05\x05\x07\x03\x02", ANY_PURPOSE],
        Purpose::Server => [b"\x06\x08\x2b\x06\x01\x05\x05\x07\x03\x01", ANY_PURPOSE],
    };
    let names = |list: &[u8]| purposes.iter().any(|purpose| list.find(purpose).is_some());
    let mut rest = lists.data;
    let (mut is_trusted, mut is_rejected) = (None, false);
    while let Ok((behind, list)) = Any::from_der(rest) {
        match list.tag() {
            SEQUENCE => is_trusted = Some(names(list.data)),
            REJECTED => is_rejected = names(list.data),
            _ => {}
        }
        rest = behind;
    }
    is_trusted.unwrap_or(true) && !is_rejected
}

fn pem_words(error: &pem::Error) -> String {
    match error {
        pem::Error::MissingSectionEnd { .. } => "error:04800066:PEM routines::bad end line".to_owned(),
        pem::Error::Base64Decode(_) => "error:04800064:PEM routines::bad base64 decode".to_owned(),
        _ => NO_START_LINE.to_owned(),
    }
}

/// Reads a private key, decrypting it with one of these passwords if needed.
pub fn private_key(text: &[u8], passwords: &[Vec<u8>]) -> Result<Arc<dyn SigningKey>, String> {
    let wrong = |why: &str| format!("PEM_read_bio_PrivateKey() failed (SSL: {why})");
    if encrypted_key::is_encrypted(text) {
        if passwords.is_empty() {
            return Err(wrong("error:04800068:PEM routines::bad password read"));
        }
        let mut keys = encrypted_key::decrypt(text, passwords).ok_or_else(|| wrong(UNSUPPORTED))?;
        let found = keys.find_map(|key| sign::any_supported_type(&key).ok());
        return found.ok_or_else(|| wrong("error:1C800064:Provider routines::bad decrypt"));
    }
    let der = match PrivateKeyDer::from_pem_slice(text) {
        Ok(der) => der,
        Err(pem::Error::NoItemsFound) => return Err(wrong(&format!("{NO_START_LINE}:Expecting: ANY PRIVATE KEY"))),
        Err(error) => return Err(wrong(&pem_words(&error))),
    };
    sign::any_supported_type(&der).map_err(|_| wrong(UNSUPPORTED))
}

/// Reads a password file, one password a line. As in nginx an empty file means the empty password.
///
/// # Errors
/// A line is too long, in nginx's words.
pub fn passwords(text: &[u8]) -> Result<Vec<Vec<u8>>, &'static str> {
    let lines = text.split_str("\n").map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    let mut passwords: Vec<Vec<u8>> = lines.filter(|line| !line.is_empty()).map(<[u8]>::to_vec).collect();
    if passwords.iter().any(|password| password.len() >= PASSWORD_BYTES_MAX) {
        return Err("too long line");
    }
    if passwords.is_empty() {
        passwords.push(Vec::new());
    }
    Ok(passwords)
}

/// `true` if signing with the key of a certificate takes milliseconds: RSA with more than 2048 bits.
pub fn signs_slowly(pair: &CertifiedKey) -> bool {
    let Some(own) = pair.cert.first() else { return false };
    let Ok((_, parsed)) = X509Certificate::from_der(own) else { return false };
    matches!(parsed.public_key().parsed(), Ok(PublicKey::RSA(key)) if key.key_size() > QUICK_RSA_BITS_MAX)
}

/// Combines a chain with the key of its first certificate.
///
/// # Errors
/// The key does not match the certificate.
pub fn pair(
    chain: Vec<CertificateDer<'static>>,
    key: Arc<dyn SigningKey>,
    name: &str,
) -> Result<Arc<CertifiedKey>, String> {
    let wrong = |why: &str| format!("SSL_CTX_use_certificate(\"{name}\") failed (SSL: {why})");
    let own = chain.first().ok_or_else(|| wrong(NO_START_LINE))?;
    // The library's own check only accepts certificates of version 3.
    let (_, parsed) = X509Certificate::from_der(own)
        .map_err(|_| wrong("error:0688010A:asn1 encoding routines::nested asn1 error"))?;
    match key.public_key() {
        Some(public) if *public != *parsed.public_key().raw => Err(format!(
            "SSL_CTX_use_PrivateKey(\"{name}\") failed (SSL: error:05800074:x509 certificate routines::key values \
             mismatch)"
        )),
        _ => Ok(Arc::new(CertifiedKey::new(chain, key))),
    }
}
