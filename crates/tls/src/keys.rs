//! Private keys that Gale generates, and requests and self-signed certificates made with them. Generating an RSA key
//! takes seconds, so none of this may run on an event loop.

use std::fmt;

use rcgen::{
    CertificateParams, CustomExtension, DistinguishedName, DnType, KeyPair, PKCS_ECDSA_P256_SHA256,
    PKCS_ECDSA_P384_SHA384, PKCS_ECDSA_P521_SHA512, PKCS_RSA_SHA256, RsaKeySize,
};
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;

/// Key type and size, with names such as `ecdsa:256`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names say it")]
pub enum KeyKind {
    #[default]
    Ecdsa256,
    Ecdsa384,
    Ecdsa521,
    Rsa2048,
    Rsa3072,
    Rsa4096,
}

const KINDS: &[(&str, KeyKind)] = &[
    ("ecdsa:256", KeyKind::Ecdsa256),
    ("ecdsa:384", KeyKind::Ecdsa384),
    ("ecdsa:521", KeyKind::Ecdsa521),
    ("rsa:2048", KeyKind::Rsa2048),
    ("rsa:3072", KeyKind::Rsa3072),
    ("rsa:4096", KeyKind::Rsa4096),
];

impl KeyKind {
    /// Parses a kind; a name without size means the smallest. `None` if the name is no key type at all.
    ///
    /// # Errors
    /// nginx's words for an unsupported size.
    pub fn parse(text: &[u8]) -> Option<Result<KeyKind, &'static str>> {
        let unsupported = match text.split(|&byte| byte == b':').next() {
            Some(b"ecdsa") => "unsupported curve",
            Some(b"rsa") => "unsupported key size",
            _ => return None,
        };
        match text {
            b"ecdsa" => Some(Ok(KeyKind::Ecdsa256)),
            b"rsa" => Some(Ok(KeyKind::Rsa2048)),
            text => {
                let known = KINDS.iter().find(|(name, _)| name.as_bytes() == text);
                Some(known.map(|(_, kind)| *kind).ok_or(unsupported))
            }
        }
    }

    /// `true` if a signature takes milliseconds.
    pub(super) fn signs_slowly(self) -> bool {
        matches!(self, KeyKind::Rsa3072 | KeyKind::Rsa4096)
    }

    fn generate(self) -> Result<KeyPair, rcgen::Error> {
        match self {
            KeyKind::Ecdsa256 => KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256),
            KeyKind::Ecdsa384 => KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384),
            KeyKind::Ecdsa521 => KeyPair::generate_for(&PKCS_ECDSA_P521_SHA512),
            KeyKind::Rsa2048 => KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048),
            KeyKind::Rsa3072 => KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_3072),
            KeyKind::Rsa4096 => KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_4096),
        }
    }
}

impl fmt::Display for KeyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = KINDS.iter().find(|(_, kind)| kind == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

/// Generates a key, in PEM (PKCS #8).
///
/// # Errors
/// Errors of the library.
pub fn generate_key(kind: KeyKind) -> Result<String, String> {
    kind.generate().map(|key| key.serialize_pem()).map_err(|error| error.to_string())
}

/// Reads the private key of a PEM text in any format, as DER.
///
/// # Errors
/// The text has no private key.
pub fn private_key_der(pem: &[u8]) -> Result<Vec<u8>, String> {
    let key = PrivateKeyDer::from_pem_slice(pem).map_err(|error| format!("no private key in PEM: {error:?}"))?;
    Ok(key.secret_der().to_vec())
}

/// Creates a request (RFC 2986, in DER) for a certificate with these names and addresses and this key. With
/// `has_common_name` the first name is also the subject's common name; otherwise the subject is empty.
///
/// # Errors
/// A name cannot be in a certificate, or the key is invalid.
pub fn certificate_request(names: &[String], key_pem: &str, has_common_name: bool) -> Result<Vec<u8>, String> {
    let request = || {
        let key = KeyPair::from_pem(key_pem)?;
        Ok(params(names, has_common_name)?.serialize_request(&key)?.der().to_vec())
    };
    request().map_err(|error: rcgen::Error| error.to_string())
}

/// A self-signed certificate for these names, followed by its key, in PEM. Clients get it until there is a better one.
///
/// # Errors
/// A name cannot be in a certificate.
pub(super) fn placeholder(names: &[String]) -> Result<String, String> {
    self_signed(names, None).map_err(|error| error.to_string())
}

/// The certificate for the challenge `tls-alpn-01` of a name (RFC 8737, section 3), with its key. `digest` is that of
/// the key authorization.
///
/// # Errors
/// The name cannot be in a certificate.
pub(super) fn challenge_certificate(name: &str, digest: [u8; 32]) -> Result<String, String> {
    self_signed(&[name.to_owned()], Some(digest)).map_err(|error| error.to_string())
}

fn self_signed(names: &[String], challenge: Option<[u8; 32]>) -> Result<String, rcgen::Error> {
    let key = KeyPair::generate()?;
    let mut params = params(names, true)?;
    params.custom_extensions = challenge.iter().map(|digest| CustomExtension::new_acme_identifier(digest)).collect();
    Ok(params.self_signed(&key)?.pem() + &key.serialize_pem())
}

fn params(names: &[String], has_common_name: bool) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name = DistinguishedName::new();
    // A common name has at most 64 characters (RFC 5280, appendix A.1).
    if let (true, Some(first)) = (has_common_name, names.iter().find(|name| name.len() <= 64)) {
        params.distinguished_name.push(DnType::CommonName, first.as_str());
    }
    Ok(params)
}

#[cfg(test)]
mod tests {
    use x509_parser::certification_request::X509CertificationRequest;
    use x509_parser::prelude::FromDer;

    use super::*;

    #[test]
    fn kinds_have_nginx_s_names() {
        assert_eq!(KeyKind::parse(b"ecdsa"), Some(Ok(KeyKind::Ecdsa256)));
        assert_eq!(KeyKind::parse(b"rsa:4096"), Some(Ok(KeyKind::Rsa4096)));
        assert_eq!(KeyKind::parse(b"rsa:1024"), Some(Err("unsupported key size")));
        assert_eq!(KeyKind::parse(b"ecdsa:25519"), Some(Err("unsupported curve")));
        assert_eq!(KeyKind::parse(b"account.key"), None);
        assert!(KINDS.iter().all(|(name, kind)| kind.to_string() == *name));
    }

    #[test]
    fn requests_have_the_wanted_names_and_key() {
        let names = ["example.com".to_owned(), "192.0.2.1".to_owned()];
        for kind in [KeyKind::Ecdsa256, KeyKind::Ecdsa384, KeyKind::Ecdsa521, KeyKind::Rsa2048] {
            let key = generate_key(kind).unwrap();
            assert!(private_key_der(key.as_bytes()).is_ok());
            for (has_common_name, subject) in [(false, ""), (true, "CN=example.com")] {
                let request = certificate_request(&names, &key, has_common_name).unwrap();
                let (_, request) = X509CertificationRequest::from_der(&request).unwrap();
                assert_eq!(request.certification_request_info.subject.to_string(), subject);
                // The parser does not support signatures with P-521.
                assert!(kind == KeyKind::Ecdsa521 || request.verify_signature().is_ok());
            }
        }
        assert!(private_key_der(b"nothing").is_err());
    }
}
