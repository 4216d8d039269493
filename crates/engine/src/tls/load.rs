//! Certificates and keys out of PEM. Messages are nginx's with OpenSSL's words inside.

use std::io;
use std::sync::Arc;

use gale_base::os_error::OsErrorText;
use rustls::crypto::aws_lc_rs::sign;
use rustls::pki_types::pem::{self, PemObject, SectionKind};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::sign::{CertifiedKey, SigningKey};
use x509_parser::prelude::{FromDer, X509Certificate};

/// Where PEM comes from: nginx's words for where an error was found.
const NO_START_LINE: &str = "error:0480006C:PEM routines::no start line";

/// Why a file could not be read, as OpenSSL says it.
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

/// The certificates of a chain, the server's own first.
pub fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let wrong = |why: &str| format!("PEM_read_bio_X509_AUX() failed (SSL: {why})");
    let mut found = Vec::new();
    for item in sections(text) {
        match item {
            Ok((SectionKind::Certificate, der)) => found.push(CertificateDer::from(der)),
            // Keys stand in the same file, sometimes.
            Ok(_) => {}
            Err(error) => return Err(wrong(&error)),
        }
    }
    match found.is_empty() {
        true => Err(wrong(&format!("{NO_START_LINE}:Expecting: TRUSTED CERTIFICATE"))),
        false => Ok(found),
    }
}

/// Certificates of authorities.
pub fn authorities(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let mut found = Vec::new();
    for item in sections(text) {
        match item {
            Ok((SectionKind::Certificate, der)) => found.push(CertificateDer::from(der)),
            Ok(_) => {}
            Err(error) => return Err(format!("SSL: {error}")),
        }
    }
    match found.is_empty() {
        true => Err("SSL: error:05880088:x509 certificate routines::no certificate or crl found".to_owned()),
        false => Ok(found),
    }
}

/// Lists of revoked certificates.
pub fn revocations(text: &[u8]) -> Result<Vec<CertificateRevocationListDer<'static>>, String> {
    let mut found = Vec::new();
    for item in sections(text) {
        match item {
            Ok((SectionKind::Crl, der)) => found.push(CertificateRevocationListDer::from(der)),
            Ok(_) => {}
            Err(error) => return Err(format!("SSL: {error}")),
        }
    }
    match found.is_empty() {
        true => Err("SSL: error:05880088:x509 certificate routines::no certificate or crl found".to_owned()),
        false => Ok(found),
    }
}

fn sections(text: &[u8]) -> impl Iterator<Item = Result<(SectionKind, Vec<u8>), String>> {
    <(SectionKind, Vec<u8>)>::pem_slice_iter(text).map(|item| item.map_err(|error| pem_words(&error)))
}

fn pem_words(error: &pem::Error) -> String {
    match error {
        pem::Error::MissingSectionEnd { .. } => "error:04800066:PEM routines::bad end line".to_owned(),
        pem::Error::Base64Decode(_) => "error:04800064:PEM routines::bad base64 decode".to_owned(),
        _ => NO_START_LINE.to_owned(),
    }
}

/// A private key.
pub fn private_key(text: &[u8]) -> Result<Arc<dyn SigningKey>, String> {
    let wrong = |why: &str| format!("PEM_read_bio_PrivateKey() failed (SSL: {why})");
    if is_encrypted(text) {
        return Err(wrong(
            "error:1E08010C:DECODER routines::unsupported), keys with a password are not supported yet (ssl_password_file",
        ));
    }
    let der = match PrivateKeyDer::from_pem_slice(text) {
        Ok(der) => der,
        Err(pem::Error::NoItemsFound) => return Err(wrong(&format!("{NO_START_LINE}:Expecting: ANY PRIVATE KEY"))),
        Err(error) => return Err(wrong(&pem_words(&error))),
    };
    sign::any_supported_type(&der).map_err(|_| wrong("error:1E08010C:DECODER routines::unsupported"))
}

fn is_encrypted(text: &[u8]) -> bool {
    memchr::memmem::find(text, b"-----BEGIN ENCRYPTED PRIVATE KEY-----").is_some()
        || memchr::memmem::find(text, b"Proc-Type: 4,ENCRYPTED").is_some()
}

/// A chain with the key of its first certificate.
///
/// # Errors
/// The key is another one's.
pub fn pair(
    chain: Vec<CertificateDer<'static>>,
    key: Arc<dyn SigningKey>,
    name: &str,
) -> Result<Arc<CertifiedKey>, String> {
    let wrong = |why: &str| format!("SSL_CTX_use_certificate(\"{name}\") failed (SSL: {why})");
    let own = chain.first().ok_or_else(|| wrong(NO_START_LINE))?;
    // The library's own check takes certificates of version 3 alone.
    let (_, parsed) = X509Certificate::from_der(own)
        .map_err(|_| wrong("error:0688010A:asn1 encoding routines::nested asn1 error"))?;
    match key.public_key() {
        Some(public) if *public != *parsed.public_key().raw => Err(format!(
            "SSL_CTX_use_PrivateKey(\"{name}\") failed (SSL: error:05800074:x509 certificate routines::key values mismatch)"
        )),
        _ => Ok(Arc::new(CertifiedKey::new(chain, key))),
    }
}
