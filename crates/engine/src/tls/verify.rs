//! Certificates of clients. As in nginx the handshake succeeds whatever a certificate is worth: the library checks only
//! that the client has its key, and requests are answered with 495 and 496 afterwards.

use std::fmt;
use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme};

use super::settings::VerifyClient;

/// What is asked of clients.
#[derive(Default)]
pub struct ClientRules {
    /// Whether they have to have a certificate.
    pub mode: VerifyClient,
    /// Who judges them; nobody without authorities.
    pub judge: Option<Arc<dyn ClientCertVerifier>>,
    /// How many certificates may stand between theirs and an authority's.
    pub depth: u64,
}

/// What a client's certificate is worth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// There is none.
    None,
    /// It is good.
    Good,
    /// It is not, in OpenSSL's words.
    Bad {
        /// Why.
        reason: String,
        /// Only because nobody knows who issued it.
        is_unknown: bool,
    },
}

impl fmt::Display for Verdict {
    /// `$ssl_client_verify`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::None => f.write_str("NONE"),
            Verdict::Good => f.write_str("SUCCESS"),
            Verdict::Bad { reason, .. } => write!(f, "FAILED:{reason}"),
        }
    }
}

/// Judges by these authorities and lists of revoked certificates.
pub fn judge_of(
    authorities: &[CertificateDer<'static>],
    revoked: Vec<CertificateRevocationListDer<'static>>,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, String> {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(authority.clone()).map_err(|error| error.to_string())?;
    }
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider));
    let judge: Arc<dyn ClientCertVerifier> = builder.with_crls(revoked).build().map_err(|error| error.to_string())?;
    Ok(judge)
}

/// What a chain is worth that a client has sent.
pub fn judge(rules: &ClientRules, chain: &[CertificateDer<'static>]) -> Verdict {
    let Some((own, others)) = chain.split_first() else { return Verdict::None };
    let bad = |reason: &str, is_unknown| Verdict::Bad { reason: reason.to_owned(), is_unknown };
    let Some(judge) = &rules.judge else { return bad("unable to get local issuer certificate", true) };
    if others.len() as u64 > rules.depth {
        return bad("certificate chain too long", false);
    }
    match judge.verify_client_cert(own, others, UnixTime::now()) {
        Ok(_) => Verdict::Good,
        Err(Error::InvalidCertificate(error)) => match error {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                bad("certificate has expired", false)
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                bad("certificate is not yet valid", false)
            }
            CertificateError::Revoked => bad("certificate revoked", false),
            CertificateError::UnknownIssuer if others.is_empty() && is_self_issued(own) => {
                bad("self-signed certificate", true)
            }
            CertificateError::UnknownIssuer => bad("unable to get local issuer certificate", true),
            CertificateError::UnknownRevocationStatus => bad("unable to get certificate CRL", false),
            CertificateError::ExpiredRevocationList | CertificateError::ExpiredRevocationListContext { .. } => {
                bad("CRL has expired", false)
            }
            CertificateError::BadSignature => bad("certificate signature failure", false),
            CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
                bad("unsuitable certificate purpose", false)
            }
            other => bad(&other.to_string(), false),
        },
        Err(error) => bad(&error.to_string(), false),
    }
}

/// Whether a certificate names itself as its issuer.
fn is_self_issued(certificate: &CertificateDer<'_>) -> bool {
    use x509_parser::prelude::{FromDer, X509Certificate};
    X509Certificate::from_der(certificate)
        .is_ok_and(|(_, certificate)| certificate.subject().as_raw() == certificate.issuer().as_raw())
}

/// Asks for a certificate and takes any.
#[derive(Debug)]
pub struct TakesAny {
    /// The authorities that clients are told of.
    pub hints: Vec<DistinguishedName>,
    /// How signatures are checked.
    pub provider: Arc<CryptoProvider>,
}

impl ClientCertVerifier for TakesAny {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.hints
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
