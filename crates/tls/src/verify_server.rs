//! Verification of server certificates. A certificate that the library accepts is good; one that it refuses is judged
//! again as OpenSSL would ([`super::verify`]), because private servers often use certificates that the library refuses.
//!
//! Names are compared as OpenSSL does (`X509_check_host`): the subject's common name counts if there is no other name.
//! IP addresses in the certificate count as well.

use std::fmt;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::{CertificateError, DigitallySignedStruct, Error, PeerMisbehaved, RootCertStore, SignatureScheme};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::client::no_name;
use super::failure::TlsFailure;
use super::verify::{self, ClientRules, Fault};

/// Verifier of server certificates.
pub struct Verifier {
    provider: Arc<CryptoProvider>,
    /// `None` if any certificate is accepted.
    trusted: Option<Trusted>,
}

struct Trusted {
    rules: ClientRules,
    /// The library's verifier with these authorities, if it accepts them.
    strict: Option<Arc<WebPkiServerVerifier>>,
}

impl Verifier {
    /// A verifier that trusts these authorities; with `None` any certificate is accepted.
    pub fn new(
        trusted: Option<Vec<CertificateDer<'static>>>,
        revoked: Vec<CertificateRevocationListDer<'static>>,
        depth: u64,
        provider: &Arc<CryptoProvider>,
    ) -> Verifier {
        let trusted = trusted.map(|authorities| {
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(authorities.iter().cloned());
            let builder = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider));
            let strict = builder.build().ok();
            Trusted { rules: ClientRules { authorities, revoked, depth, ..ClientRules::default() }, strict }
        });
        Verifier { provider: Arc::clone(provider), trusted }
    }
}

impl Trusted {
    fn judge(&self, own: &CertificateDer<'_>, others: &[CertificateDer<'_>], now: UnixTime) -> Result<(), Fault> {
        let is_strictly_good = || {
            let Some(strict) = &self.strict else { return false };
            match strict.verify_server_cert(own, others, &no_name(), &[], now) {
                // The name is checked afterwards.
                Ok(_)
                | Err(Error::InvalidCertificate(
                    CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
                )) => true,
                Err(_) => false,
            }
        };
        verify::judge_server(&self.rules, own, others, now, is_strictly_good)
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
            let judged = trusted.judge(own, others, now);
            judged.map_err(|fault| TlsFailure::BadCertificate(fault).of_certificate())?;
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
        // Checked by hand, because the library's function needs more of the certificate than its key.
        let invalid = |error| Error::InvalidCertificate(error);
        let parsed = X509Certificate::from_der(certificate);
        let (_, certificate) = parsed.map_err(|_| invalid(CertificateError::BadEncoding))?;
        let key = &certificate.public_key().subject_public_key.data;
        let mapping = self.provider.signature_verification_algorithms.mapping;
        let (_, algorithms) = mapping
            .iter()
            .find(|(scheme, _)| *scheme == signed.scheme)
            .ok_or(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme)?;
        match algorithms.iter().any(|algorithm| algorithm.verify_signature(key, message, signed.signature()).is_ok()) {
            true => Ok(HandshakeSignatureValid::assertion()),
            false => Err(invalid(CertificateError::BadSignature)),
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

/// `true` if a certificate matches this server name.
pub(super) fn is_for(certificate: &CertificateDer<'_>, name: &ServerName<'_>) -> bool {
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

/// `true` if a name in a certificate, possibly with a wildcard as its first label, matches. As in OpenSSL a wildcard
/// must be followed by at least two labels.
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
}
