//! Verification of client certificates. As in nginx the handshake succeeds whatever the verdict: the library only
//! checks that the client has its key, and requests without a valid certificate are answered with 495 or 496.
//!
//! The library's verifier is stricter than OpenSSL: it rejects certificates of version 1, leaf certificates that are
//! authorities, and CRLs of version 1. A certificate that it accepts is valid. One that it rejects is judged here as
//! OpenSSL does, as is every certificate where there are CRLs.

use std::fmt;
use std::sync::Arc;

use gale_worker::traffic::Unverified;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, SignatureVerificationAlgorithm, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::ParsedExtension;
use x509_parser::oid_registry;
use x509_parser::prelude::FromDer;
use x509_parser::revocation_list::CertificateRevocationList;
use x509_parser::time::ASN1Time;

use super::settings::VerifyClient;

/// Longest chain from a client's certificate to an authority, and most certificates of the client that are examined:
/// each pair of them may cost a signature check. (OpenSSL's limit is 100.)
const CHAIN_MAX: usize = 10;

/// Rules for client certificates.
#[derive(Default)]
pub struct ClientRules {
    /// Mode of `ssl_verify_client`.
    pub mode: VerifyClient,
    /// Trusted authorities.
    pub authorities: Vec<CertificateDer<'static>>,
    /// Certificate revocation lists.
    pub revoked: Vec<CertificateRevocationListDer<'static>>,
    /// The library's verifier with these authorities, if it accepts them.
    pub strict: Option<Arc<dyn ClientCertVerifier>>,
    /// Most certificates between the client's and the authority's.
    pub depth: u64,
}

/// Verdict on a client's certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// No certificate was sent.
    None,
    /// The certificate is valid.
    Good,
    /// Verification failed.
    Bad(Fault),
}

impl fmt::Display for Verdict {
    /// `$ssl_client_verify`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::None => f.write_str("NONE"),
            Verdict::Good => f.write_str("SUCCESS"),
            Verdict::Bad(fault) => write!(f, "FAILED:{}", fault.words()),
        }
    }
}

/// Fault of a certificate, by OpenSSL's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
#[expect(missing_docs, reason = "the words say it")]
pub enum Fault {
    NoCrl = 3,
    BadSignature = 7,
    NotYetValid = 9,
    Expired = 10,
    CrlExpired = 12,
    SelfSigned = 18,
    SelfSignedInChain = 19,
    NoIssuer = 20,
    NoIssuerOfFirst = 21,
    ChainTooLong = 22,
    Revoked = 23,
    PathTooLong = 25,
    WrongPurpose = 26,
    UnknownExtension = 34,
    TooWeak = 68,
    NoAuthority = 79,
    // Not OpenSSL's: results of OCSP.
    RevokedByResponder = 1000,
    NoStatus = 1001,
}

impl fmt::Display for Fault {
    /// Form in messages: `(10:certificate has expired)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::RevokedByResponder | Fault::NoStatus => f.write_str(self.words()),
            _ => write!(f, "({}:{})", self.number(), self.words()),
        }
    }
}

impl Fault {
    /// Reason for metrics.
    pub fn reason(self) -> Unverified {
        match self {
            Fault::Expired => Unverified::Expired,
            Fault::Revoked | Fault::RevokedByResponder => Unverified::Revoked,
            _ => Unverified::Other,
        }
    }

    /// OpenSSL's number.
    pub fn number(self) -> u16 {
        self as u16
    }

    /// OpenSSL's words.
    pub fn words(self) -> &'static str {
        match self {
            Fault::NoCrl => "unable to get certificate CRL",
            Fault::BadSignature => "certificate signature failure",
            Fault::NotYetValid => "certificate is not yet valid",
            Fault::Expired => "certificate has expired",
            Fault::CrlExpired => "CRL has expired",
            Fault::SelfSigned => "self-signed certificate",
            Fault::SelfSignedInChain => "self-signed certificate in certificate chain",
            Fault::NoIssuer => "unable to get local issuer certificate",
            Fault::NoIssuerOfFirst => "unable to verify the first certificate",
            Fault::ChainTooLong => "certificate chain too long",
            Fault::Revoked => "certificate revoked",
            Fault::PathTooLong => "path length constraint exceeded",
            Fault::WrongPurpose => "unsuitable certificate purpose",
            Fault::UnknownExtension => "unhandled critical extension",
            Fault::TooWeak => "CA signature digest algorithm too weak",
            Fault::NoAuthority => "invalid CA certificate",
            Fault::RevokedByResponder => "certificate revoked",
            Fault::NoStatus => "certificate status request failed",
        }
    }

    /// `true` if the only fault is an unknown issuer, which `optional_no_ca` accepts.
    pub fn is_unknown_issuer(self) -> bool {
        matches!(self, Fault::SelfSigned | Fault::SelfSignedInChain | Fault::NoIssuer | Fault::NoIssuerOfFirst)
    }
}

/// The library's verifier; `None` if it rejects the authorities.
pub fn strict(
    authorities: &[CertificateDer<'static>],
    provider: &Arc<CryptoProvider>,
) -> Option<Arc<dyn ClientCertVerifier>> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(authorities.iter().cloned());
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider));
    builder.build().ok().map(|verifier| verifier as Arc<dyn ClientCertVerifier>)
}

/// Judges the chain that a client has sent.
pub fn judge(rules: &ClientRules, chain: &[CertificateDer<'static>]) -> Verdict {
    let Some((own, others)) = chain.split_first() else { return Verdict::None };
    let now = UnixTime::now();
    let is_strictly_good = || {
        let strict = rules.strict.as_ref();
        let others = &others[..others.len().min(CHAIN_MAX)];
        strict.is_some_and(|strict| strict.verify_client_cert(own, others, now).is_ok())
    };
    match judge_chain(rules, Purpose::Client, own, others, now, is_strictly_good) {
        Ok(()) => Verdict::Good,
        Err(fault) => Verdict::Bad(fault),
    }
}

/// Purpose that a chain is verified for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Client,
    Server,
}

/// Judges the chain that a server has sent, without its names. Of `rules` only the trust settings are used, not the
/// mode.
pub(super) fn judge_server(
    rules: &ClientRules,
    own: &CertificateDer<'_>,
    others: &[CertificateDer<'_>],
    now: UnixTime,
    is_strictly_good: impl FnOnce() -> bool,
) -> Result<(), Fault> {
    judge_chain(rules, Purpose::Server, own, others, now, is_strictly_good)
}

/// Judges a chain as OpenSSL does, including its authority, of which the library's verifier only uses name and key. The
/// library is consulted for name constraints, which are not judged here.
fn judge_chain(
    rules: &ClientRules,
    purpose: Purpose,
    own: &CertificateDer<'_>,
    others: &[CertificateDer<'_>],
    now: UnixTime,
    is_strictly_good: impl FnOnce() -> bool,
) -> Result<(), Fault> {
    let now = asn1(now)?;
    match judge_by_hand(rules, purpose, own, others, now, false) {
        Err(Fault::UnknownExtension) if is_strictly_good() => judge_by_hand(rules, purpose, own, others, now, true),
        judged => judged,
    }
}

fn asn1(time: UnixTime) -> Result<ASN1Time, Fault> {
    let time = i64::try_from(time.as_secs()).ok().and_then(|time| ASN1Time::from_timestamp(time).ok());
    time.ok_or(Fault::BadSignature)
}

/// The certificates from a client's to the authority's, for a chain that was found valid.
pub fn verified_chain(rules: &ClientRules, chain: &[CertificateDer<'static>]) -> Vec<Vec<u8>> {
    let Some((own, others)) = chain.split_first() else { return Vec::new() };
    let trusted = parse_all(&rules.authorities, usize::MAX);
    let others = parse_all(others, CHAIN_MAX);
    let Ok((_, own)) = X509Certificate::from_der(own) else { return Vec::new() };
    let Ok(now) = asn1(UnixTime::now()) else { return Vec::new() };
    let chain = find_chain(&own, &trusted, &others, now);
    chain.map_or_else(|_| Vec::new(), |chain| chain.iter().map(|certificate| certificate.as_raw().to_vec()).collect())
}

/// `true` if the first certificate has signed the second; both in DER.
pub fn has_issued(issuer: &[u8], certificate: &[u8]) -> bool {
    let (Ok((_, issuer)), Ok((_, certificate))) =
        (X509Certificate::from_der(issuer), X509Certificate::from_der(certificate))
    else {
        return false;
    };
    issuer.subject().as_raw() == certificate.issuer().as_raw() && has_signed(&issuer, &certificate)
}

fn parse_all<'c>(certificates: &'c [CertificateDer<'_>], count_max: usize) -> Vec<X509Certificate<'c>> {
    let parse = |der: &'c CertificateDer<'_>| X509Certificate::from_der(der).ok().map(|(_, parsed)| parsed);
    certificates.iter().take(count_max).filter_map(parse).collect()
}

fn judge_by_hand(
    rules: &ClientRules,
    purpose: Purpose,
    own: &CertificateDer<'_>,
    others: &[CertificateDer<'_>],
    now: ASN1Time,
    names_are_checked: bool,
) -> Result<(), Fault> {
    let (trusted, others) = (parse_all(&rules.authorities, usize::MAX), parse_all(others, CHAIN_MAX));
    let (_, own) = X509Certificate::from_der(own).map_err(|_| Fault::BadSignature)?;
    let chain = find_chain(&own, &trusted, &others, now)?;
    // Neither the client's certificate nor the last one counts.
    if chain.len().saturating_sub(2) as u64 > rules.depth {
        return Err(Fault::ChainTooLong);
    }
    // Of several faults the last one is reported, as in nginx with OpenSSL.
    let mut result = Ok(());
    let places = || chain.iter().enumerate();
    for (place, certificate) in places() {
        result = check_extensions(certificate, purpose, place, place + 1 == chain.len(), names_are_checked).and(result);
    }
    for (place, certificate) in places() {
        let is_trusted = place + 1 == chain.len();
        if !is_trusted && certificate.signature_algorithm.algorithm == oid_registry::OID_PKCS1_SHA1WITHRSA {
            result = Err(Fault::TooWeak);
        }
    }
    for (place, certificate) in places() {
        let issuer = chain.get(place + 1).unwrap_or(certificate);
        result = check_revocation(rules, certificate, issuer, now).and(result);
    }
    for (_, certificate) in places().rev() {
        let validity = certificate.validity();
        if now < validity.not_before {
            result = Err(Fault::NotYetValid);
        }
        if now > validity.not_after {
            result = Err(Fault::Expired);
        }
    }
    result
}

/// Builds the chain from a client's certificate to a self-signed authority.
fn find_chain<'c, 'd>(
    own: &'c X509Certificate<'d>,
    trusted: &'c [X509Certificate<'d>],
    others: &'c [X509Certificate<'d>],
    now: ASN1Time,
) -> Result<Vec<&'c X509Certificate<'d>>, Fault> {
    let mut chain = vec![own];
    loop {
        let last = *chain.last().expect("a chain has at least one certificate");
        let is_trusted = trusted.iter().any(|trusted| trusted.as_raw() == last.as_raw());
        if is_self_issued(last) {
            match (is_trusted, chain.len()) {
                (true, _) => return Ok(chain),
                (false, 1) => return Err(Fault::SelfSigned),
                (false, _) => return Err(Fault::SelfSignedInChain),
            }
        }
        let found = find_issuer(last, trusted, now).or_else(|| find_issuer(last, others, now));
        match found {
            Some(issuer) if chain.len() < CHAIN_MAX => chain.push(issuer),
            Some(_) => return Err(Fault::ChainTooLong),
            None if chain.len() == 1 => return Err(Fault::NoIssuerOfFirst),
            None => return Err(Fault::NoIssuer),
        }
    }
}

/// Finds the issuer of a certificate. An authority renewed with the same key has several matching certificates: as in
/// OpenSSL a currently valid one is preferred, then the one that is valid longest. Signatures are checked in this
/// order, so more certificates of the same name cost no more checks.
fn find_issuer<'c, 'd>(
    certificate: &X509Certificate<'_>,
    candidates: &'c [X509Certificate<'d>],
    now: ASN1Time,
) -> Option<&'c X509Certificate<'d>> {
    let is_named = |candidate: &&X509Certificate<'_>| candidate.subject().as_raw() == certificate.issuer().as_raw();
    let mut named: Vec<_> = candidates.iter().filter(is_named).collect();
    named.sort_by_key(|candidate| {
        let validity = candidate.validity();
        let is_valid = validity.not_before <= now && now <= validity.not_after;
        std::cmp::Reverse((is_valid, validity.not_after))
    });
    named.into_iter().find(|candidate| has_signed(candidate, certificate))
}

fn is_self_issued(certificate: &X509Certificate<'_>) -> bool {
    certificate.subject().as_raw() == certificate.issuer().as_raw()
}

fn has_signed(issuer: &X509Certificate<'_>, certificate: &X509Certificate<'_>) -> bool {
    certificate.verify_signature(Some(issuer.public_key())).is_ok()
}

/// Checks that a certificate's extensions allow its place in a chain; the client's place is 0.
fn check_extensions(
    certificate: &X509Certificate<'_>,
    purpose: Purpose,
    place: usize,
    is_last: bool,
    names_are_checked: bool,
) -> Result<(), Fault> {
    let (mut is_authority, mut path_length, mut may_sign) = (None, None, true);
    for extension in certificate.extensions() {
        match extension.parsed_extension() {
            ParsedExtension::BasicConstraints(constraints) => {
                is_authority = Some(constraints.ca);
                path_length = constraints.path_len_constraint;
            }
            ParsedExtension::KeyUsage(usage) => may_sign = usage.key_cert_sign(),
            ParsedExtension::ExtendedKeyUsage(usage) => {
                let is_allowed = match purpose {
                    Purpose::Client => usage.client_auth,
                    Purpose::Server => usage.server_auth,
                };
                let is_wrong = !usage.any && !is_allowed;
                if is_wrong {
                    return Err(Fault::WrongPurpose);
                }
            }
            // Name constraints are checked elsewhere.
            ParsedExtension::NameConstraints(_) if names_are_checked => {}
            ParsedExtension::NameConstraints(_) => return Err(Fault::UnknownExtension),
            ParsedExtension::SubjectAlternativeName(_)
            | ParsedExtension::CertificatePolicies(_)
            | ParsedExtension::SubjectKeyIdentifier(_)
            | ParsedExtension::AuthorityKeyIdentifier(_)
            | ParsedExtension::CRLDistributionPoints(_)
            | ParsedExtension::NSCertType(_) => {}
            _ if extension.critical => return Err(Fault::UnknownExtension),
            _ => {}
        }
    }
    if place == 0 {
        return Ok(());
    }
    // A certificate of version 1 has no extensions; as an authority it has to be trusted itself.
    if !is_authority.unwrap_or(is_last && certificate.extensions().is_empty()) || !may_sign {
        return Err(Fault::NoAuthority);
    }
    if path_length.is_some_and(|most| place - 1 > most as usize) {
        return Err(Fault::PathTooLong);
    }
    Ok(())
}

/// Checks that a certificate is not revoked. If there are CRLs, each issuer needs one.
fn check_revocation(
    rules: &ClientRules,
    certificate: &X509Certificate<'_>,
    issuer: &X509Certificate<'_>,
    now: ASN1Time,
) -> Result<(), Fault> {
    if rules.revoked.is_empty() {
        return Ok(());
    }
    let (mut fault, mut is_listed) = (Fault::NoCrl, false);
    for list in &rules.revoked {
        let Ok((_, list)) = CertificateRevocationList::from_der(list) else { continue };
        if list.issuer().as_raw() != certificate.issuer().as_raw() {
            continue;
        }
        if list.verify_signature(issuer.public_key()).is_err()
            || list.extensions().iter().any(|extension| extension.critical)
        {
            continue;
        }
        if list.next_update().is_some_and(|next| next < now) {
            fault = Fault::CrlExpired;
            continue;
        }
        if list.iter_revoked_certificates().any(|revoked| *revoked.serial() == certificate.serial) {
            return Err(Fault::Revoked);
        }
        // A newer list of the same issuer may follow.
        is_listed = true;
    }
    if is_listed { Ok(()) } else { Err(fault) }
}

/// Requests a certificate and accepts any.
#[derive(Debug)]
pub struct TakesAny {
    /// Names of the authorities sent to clients.
    pub hints: Vec<DistinguishedName>,
    /// Provider of the signature checks.
    pub provider: Arc<CryptoProvider>,
}

impl TakesAny {
    /// Checks a signature with the key of a certificate that the library does not parse, with up to this many of the
    /// scheme's algorithms.
    fn check(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
        algorithms_max: usize,
    ) -> Option<HandshakeSignatureValid> {
        let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
        let key = &certificate.public_key().subject_public_key.data;
        let mapping = self.provider.signature_verification_algorithms.mapping;
        let (_, algorithms) = mapping.iter().find(|(scheme, _)| *scheme == signed.scheme)?;
        let is_good = |algorithm: &&dyn SignatureVerificationAlgorithm| {
            algorithm.verify_signature(key, message, signed.signature()).is_ok()
        };
        algorithms.iter().take(algorithms_max).any(is_good).then(HandshakeSignatureValid::assertion)
    }
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
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
            .or_else(|error| self.check(message, certificate, signed, usize::MAX).ok_or(error))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms).or_else(|error| {
            let is_of_12 = matches!(
                signed.scheme,
                SignatureScheme::RSA_PKCS1_SHA256
                    | SignatureScheme::RSA_PKCS1_SHA384
                    | SignatureScheme::RSA_PKCS1_SHA512
            );
            // In TLSv1.3 the scheme fixes the curve, which is that of the first algorithm.
            let checked = if is_of_12 { None } else { self.check(message, certificate, signed, 1) };
            checked.ok_or(error)
        })
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd};

    use super::*;

    #[test]
    fn among_certificates_of_the_same_key_one_that_is_valid_leads_to_the_authority() {
        let params = |name: &str, years: (i32, i32)| {
            let mut params = CertificateParams::new(Vec::new()).unwrap();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.distinguished_name.push(DnType::CommonName, name);
            (params.not_before, params.not_after) = (date_time_ymd(years.0, 1, 1), date_time_ymd(years.1, 1, 1));
            params
        };
        let (old, usual) = ((2000, 2001), (2002, 2999));
        let [root_key, between_key, own_key] = [(); 3].map(|()| KeyPair::generate().unwrap());
        let root = params("root", usual).self_signed(&root_key).unwrap();
        let by_root = Issuer::new(params("root", usual), root_key);
        let between = [old, usual].map(|years| params("between", years).signed_by(&between_key, &by_root).unwrap());
        let by_between = Issuer::new(params("between", usual), between_key);
        let mut own = params("own", usual);
        own.is_ca = IsCa::NoCa;
        let own = own.signed_by(&own_key, &by_between).unwrap();
        let rules = ClientRules { authorities: vec![root.der().clone()], depth: 5, ..ClientRules::default() };
        let [old, new] = between.map(|between| between.der().clone());
        let judged = |others: &[&CertificateDer<'static>]| {
            let chain: Vec<_> = [&[own.der()], others].concat().into_iter().cloned().collect();
            judge(&rules, &chain)
        };
        assert_eq!(judged(&[&old, &new]), Verdict::Good);
        assert_eq!(judged(&[&new, &old]), Verdict::Good);
        assert_eq!(judged(&[&old]), Verdict::Bad(Fault::Expired));
    }
}
