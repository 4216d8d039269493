//! Certificates of servers. The library's rules are stricter than OpenSSL's in what private servers like to have: what
//! is refused for that alone is looked at again here.
//!
//! | the certificate | is good if |
//! |---|---|
//! | is one of those that are trusted | it has not expired |
//! | has no extensions (X.509 v1), or could be an authority's | one of those that are trusted has signed it |
//! | every other | the library finds a chain to one that is trusted, and no revoked one in it |
//!
//! Names are compared as OpenSSL does (`X509_check_host`), so that the subject's name counts where there is no other;
//! and addresses of the certificate count, too.

use std::fmt;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::{CertificateError, DigitallySignedStruct, Error, PeerMisbehaved, RootCertStore, SignatureScheme};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::x509::X509Version;

use super::client::no_name;
use super::failure::TlsFailure;

/// See the file's head.
pub struct Verifier {
    provider: Arc<CryptoProvider>,
    /// `None` where any certificate will do.
    trusted: Option<Trusted>,
}

struct Trusted {
    certificates: Vec<CertificateDer<'static>>,
    /// `None` where nothing that is trusted can be an authority to the library.
    judge: Option<Arc<WebPkiServerVerifier>>,
    has_revoked: bool,
    depth: u64,
}

const EXPIRED: TlsFailure = TlsFailure::BadCertificate(10, "certificate has expired");
const NOT_YET_VALID: TlsFailure = TlsFailure::BadCertificate(9, "certificate is not yet valid");
const BAD_SIGNATURE: TlsFailure = TlsFailure::BadCertificate(7, "certificate signature failure");
const TOO_LONG: TlsFailure = TlsFailure::BadCertificate(22, "certificate chain too long");

impl Verifier {
    /// Of these authorities; of nobody in particular without any.
    ///
    /// # Errors
    /// What the library does not like about them.
    pub fn new(
        trusted: Option<Vec<CertificateDer<'static>>>,
        revoked: Vec<CertificateRevocationListDer<'static>>,
        depth: u64,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Verifier, String> {
        let provider = Arc::clone(provider);
        let Some(certificates) = trusted else { return Ok(Verifier { provider, trusted: None }) };
        let mut roots = RootCertStore::empty();
        for certificate in &certificates {
            // What is none is trusted by itself.
            let _ = roots.add(certificate.clone());
        }
        let has_revoked = !revoked.is_empty();
        let judge = match roots.is_empty() {
            true => None,
            false => {
                let builder = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
                let builder = builder.with_crls(revoked).enforce_revocation_expiration();
                Some(builder.build().map_err(|error| error.to_string())?)
            }
        };
        Ok(Verifier { provider, trusted: Some(Trusted { certificates, judge, has_revoked, depth }) })
    }

    fn verify_chain(
        &self,
        trusted: &Trusted,
        der: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), TlsFailure> {
        let Ok((_, own)) = X509Certificate::from_der(der) else {
            return Err(TlsFailure::BadCertificate(50, "application verification failure"));
        };
        if trusted.certificates.iter().any(|certificate| **certificate == **der) {
            return check_dates(&own, now);
        }
        let is_authority = |other: &CertificateDer<'_>| trusted.certificates.iter().any(|own| **own == **other);
        if others.iter().filter(|other| !is_authority(other) && !is_self_issued(other)).count() as u64 > trusted.depth {
            return Err(TOO_LONG);
        }
        let error = match &trusted.judge {
            None => Error::InvalidCertificate(CertificateError::UnknownIssuer),
            Some(judge) => {
                match judge.verify_server_cert(der, others, &no_name(), &[], now) {
                    Ok(_) => return Ok(()),
                    // Names are looked at afterwards.
                    Err(Error::InvalidCertificate(
                        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
                    )) => return Ok(()),
                    Err(error) => error,
                }
            }
        };
        let unknown = || match (is_self_issued(der), others.is_empty()) {
            (true, _) => TlsFailure::BadCertificate(18, "self-signed certificate"),
            (false, true) => TlsFailure::BadCertificate(21, "unable to verify the first certificate"),
            (false, false) if others.iter().any(is_self_issued) => {
                TlsFailure::BadCertificate(19, "self-signed certificate in certificate chain")
            }
            (false, false) => TlsFailure::BadCertificate(20, "unable to get local issuer certificate"),
        };
        let Error::InvalidCertificate(error) = error else { return Err(unknown()) };
        Err(match error {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => EXPIRED,
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => NOT_YET_VALID,
            CertificateError::Revoked => TlsFailure::BadCertificate(23, "certificate revoked"),
            CertificateError::UnknownRevocationStatus => TlsFailure::BadCertificate(3, "unable to get certificate CRL"),
            CertificateError::ExpiredRevocationList | CertificateError::ExpiredRevocationListContext { .. } => {
                TlsFailure::BadCertificate(12, "CRL has expired")
            }
            CertificateError::BadSignature => BAD_SIGNATURE,
            CertificateError::UnknownIssuer => unknown(),
            CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
                TlsFailure::BadCertificate(26, "unsuitable certificate purpose")
            }
            // Nobody can say whether this one was revoked.
            _ if trusted.has_revoked => TlsFailure::BadCertificate(3, "unable to get certificate CRL"),
            _ if own.version() != X509Version::V3 || own.is_ca() => {
                return match self.is_issued_by_trusted(trusted, der, &own) {
                    true => check_dates(&own, now),
                    false => Err(unknown()),
                };
            }
            _ => TlsFailure::BadCertificate(50, "application verification failure"),
        })
    }

    /// Whether a trusted one has signed it.
    fn is_issued_by_trusted(&self, trusted: &Trusted, der: &[u8], own: &X509Certificate<'_>) -> bool {
        let Some((tbs, algorithm, signature)) = signed_parts(der) else { return false };
        trusted.certificates.iter().any(|certificate| {
            X509Certificate::from_der(certificate).is_ok_and(|(_, authority)| {
                authority.subject().as_raw() == own.issuer().as_raw()
                    && key_parts(authority.public_key().raw).is_some_and(|(key_algorithm, key)| {
                        self.provider.signature_verification_algorithms.all.iter().any(|known| {
                            known.signature_alg_id().as_ref() == algorithm
                                && known.public_key_alg_id().as_ref() == key_algorithm
                                && known.verify_signature(key, tbs, signature).is_ok()
                        })
                    })
            })
        })
    }
}

impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Verifier")
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        own: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if let Some(trusted) = &self.trusted {
            self.verify_chain(trusted, own, others, now).map_err(TlsFailure::of_certificate)?;
            if !is_for(own, name) {
                return Err(TlsFailure::WrongName.of_certificate());
            }
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        // By hand, for the library's function wants more of a certificate than its key.
        let invalid = || Error::InvalidCertificate(CertificateError::BadEncoding);
        let (_, certificate) = X509Certificate::from_der(certificate).map_err(|_| invalid())?;
        let (key_algorithm, key) = key_parts(certificate.public_key().raw).ok_or_else(invalid)?;
        let known = self.provider.signature_verification_algorithms.mapping;
        let of_scheme = known.iter().find(|(scheme, _)| *scheme == signed.scheme).map_or(&[][..], |(_, known)| known);
        let mut of_key =
            of_scheme.iter().filter(|known| known.public_key_alg_id().as_ref() == key_algorithm).peekable();
        if of_key.peek().is_none() {
            return Err(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme.into());
        }
        match of_key.any(|known| known.verify_signature(key, message, signed.signature()).is_ok()) {
            true => Ok(HandshakeSignatureValid::assertion()),
            false => Err(Error::InvalidCertificate(CertificateError::BadSignature)),
        }
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let parsed = X509Certificate::from_der(certificate);
        let (_, parsed) = parsed.map_err(|_| Error::InvalidCertificate(CertificateError::BadEncoding))?;
        let key = SubjectPublicKeyInfoDer::from(parsed.public_key().raw);
        verify_tls13_signature_with_raw_key(message, &key, signed, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

fn check_dates(certificate: &X509Certificate<'_>, now: UnixTime) -> Result<(), TlsFailure> {
    let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
    let validity = certificate.validity();
    match (validity.not_before.timestamp() <= now, now <= validity.not_after.timestamp()) {
        (false, _) => Err(NOT_YET_VALID),
        (_, false) => Err(EXPIRED),
        _ => Ok(()),
    }
}

fn is_self_issued(certificate: &CertificateDer<'_>) -> bool {
    X509Certificate::from_der(certificate)
        .is_ok_and(|(_, certificate)| certificate.subject().as_raw() == certificate.issuer().as_raw())
}

/// Whether a certificate is for the server of this name.
fn is_for(certificate: &CertificateDer<'_>, name: &ServerName<'_>) -> bool {
    let Ok((_, certificate)) = X509Certificate::from_der(certificate) else { return false };
    let names = certificate.subject_alternative_name().ok().flatten();
    let names = names.as_ref().map_or(&[][..], |names| &names.value.general_names);
    let (text, address) = match name {
        name if *name == no_name() => return false,
        ServerName::DnsName(name) => (name.as_ref().to_owned(), None),
        ServerName::IpAddress(address) => {
            let address = std::net::IpAddr::from(*address);
            (address.to_string(), Some(address))
        }
        _ => return false,
    };
    let octets = address.map(|address| match address {
        std::net::IpAddr::V4(address) => address.octets().to_vec(),
        std::net::IpAddr::V6(address) => address.octets().to_vec(),
    });
    let mut has_names = false;
    for name in names {
        match name {
            GeneralName::DNSName(pattern) => {
                has_names = true;
                if matches(pattern, &text) {
                    return true;
                }
            }
            GeneralName::IPAddress(own) if octets.as_deref() == Some(*own) => return true,
            _ => {}
        }
    }
    !has_names && certificate.subject().iter_common_name().any(|own| own.as_str().is_ok_and(|own| matches(own, &text)))
}

/// Whether a name of a certificate, perhaps with a wildcard for its first label, is this one. As with OpenSSL at least
/// two labels stand behind a wildcard.
fn matches(pattern: &str, name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    let pattern = pattern.strip_suffix('.').unwrap_or(pattern);
    match pattern.strip_prefix("*.") {
        Some(parent) if parent.contains('.') && !parent.contains('*') => {
            name.split_once('.').is_some_and(|(first, behind)| !first.is_empty() && behind.eq_ignore_ascii_case(parent))
        }
        Some(_) => false,
        None => pattern.eq_ignore_ascii_case(name),
    }
}

/// Tag, contents, the whole element, and what follows it.
type Element<'d> = (u8, &'d [u8], &'d [u8], &'d [u8]);

/// The first element of DER: its tag, its contents, all of it, and what is behind it.
fn element(der: &[u8]) -> Option<Element<'_>> {
    let (&tag, rest) = der.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        0x81..=0x84 => {
            let (digits, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
            (digits.iter().fold(0, |length, &digit| length << 8 | usize::from(digit)), rest)
        }
        _ => return None,
    };
    let (contents, behind) = rest.split_at_checked(length)?;
    Some((tag, contents, &der[..der.len() - behind.len()], behind))
}

/// The contents of a bit string of whole bytes.
fn bits(der: &[u8]) -> Option<&[u8]> {
    match element(der)? {
        (3, contents, _, _) => contents.strip_prefix(&[0]),
        _ => None,
    }
}

/// Of a certificate: what is signed, the algorithm, the signature.
fn signed_parts(certificate: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (_, contents, _, _) = element(certificate)?;
    let (_, _, tbs, behind) = element(contents)?;
    let (_, algorithm, _, behind) = element(behind)?;
    Some((tbs, algorithm, bits(behind)?))
}

/// Of a public key: its algorithm and itself.
fn key_parts(key: &[u8]) -> Option<(&[u8], &[u8])> {
    let (_, contents, _, _) = element(key)?;
    let (_, algorithm, _, behind) = element(contents)?;
    Some((algorithm, bits(behind)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_match_as_with_openssl() {
        assert!(matches("example.com", "EXAMPLE.com") && matches("*.example.com", "a.example.com"));
        assert!(matches("example.com", "example.com.") && matches("127.0.0.1", "127.0.0.1"));
        for (pattern, name) in [
            ("*.example.com", "example.com"),
            ("*.example.com", "a.b.example.com"),
            ("*.com", "example.com"),
            ("*", "localhost"),
            ("*.*.com", "a.b.com"),
            ("example.com", "example.org"),
            ("", "example.com"),
        ] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn der_that_is_none_has_no_parts() {
        for der in [&b""[..], b"\x30", b"\x30\x05\x00", b"\x30\x85\0\0\0\0\0", b"\x30\x84\xff\xff\xff\xff", b"\x30\x80"]
        {
            assert!(element(der).is_none() && signed_parts(der).is_none() && key_parts(der).is_none());
        }
        assert_eq!(element(b"\x04\x81\x01ab"), Some((4, &b"a"[..], &b"\x04\x81\x01a"[..], &b"b"[..])));
    }
}
