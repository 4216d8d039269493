//! OCSP messages (RFC 6960): a request for one certificate, and the status in a response.
//!
//! Refuses responses that neither the issuer nor a signer named by it has signed, and those outside their validity.
//! Invariant: any input bytes are parsed without panic.

use std::fmt;

use aws_lc_rs::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use x509_parser::asn1_rs::{Any, Class, Tag};
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;
use x509_parser::time::ASN1Time;
use x509_parser::verify::verify_signature;
use x509_parser::x509::AlgorithmIdentifier;

/// Tolerated clock skew in seconds, as in nginx.
const SKEW: i64 = 300;

/// SHA-1, which identifies certificates; every responder has to support it (RFC 6960, section 4.3).
const SHA1: &[u8] = b"\x30\x09\x06\x05\x2b\x0e\x03\x02\x1a\x05\x00";

/// `id-pkix-ocsp-basic`
const BASIC: &[u8] = b"\x2b\x06\x01\x05\x05\x07\x30\x01\x01";

/// Why a response is unusable, in nginx's and OpenSSL's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OcspFault {
    /// The response is malformed.
    Malformed,
    /// The responder refused with this response status.
    NotSuccessful(u8),
    /// It does not contain the certificate.
    NotFound,
    /// It is outside its validity.
    WrongTime,
    /// Its signature is wrong, or its signer is not authorised.
    WrongSignature,
}

impl fmt::Display for OcspFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OcspFault::Malformed => f.write_str("d2i_OCSP_RESPONSE() failed"),
            OcspFault::NotSuccessful(status) => {
                let words = match status {
                    1 => "malformedrequest",
                    2 => "internalerror",
                    3 => "trylater",
                    5 => "sigrequired",
                    6 => "unauthorized",
                    _ => "(UNKNOWN)",
                };
                write!(f, "OCSP response not successful ({status}: {words})")
            }
            OcspFault::NotFound => f.write_str("certificate status not found in the OCSP response"),
            OcspFault::WrongTime => f.write_str("OCSP_check_validity() failed"),
            OcspFault::WrongSignature => f.write_str("OCSP_basic_verify() failed"),
        }
    }
}

/// Status of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CertificateStatus {
    /// Not revoked.
    Good,
    /// Revoked.
    Revoked,
    /// Unknown to the responder.
    Unknown,
}

impl fmt::Display for CertificateStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CertificateStatus::Good => "good",
            CertificateStatus::Revoked => "revoked",
            CertificateStatus::Unknown => "unknown",
        })
    }
}

/// A status with the end of its validity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    /// The status.
    pub status: CertificateStatus,
    /// End of validity, in seconds since 1970; practically unlimited if the response has none.
    pub valid_until: u64,
}

/// Identifier of a certificate in requests and responses.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CertificateId {
    issuer_name: [u8; 20],
    issuer_key: [u8; 20],
    serial: Vec<u8>,
}

impl CertificateId {
    /// Identifier of a certificate that `issuer` has issued; `None` if either is malformed.
    pub fn of(certificate: &[u8], issuer: &[u8]) -> Option<CertificateId> {
        let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
        let (_, issuer) = X509Certificate::from_der(issuer).ok()?;
        Some(CertificateId {
            issuer_name: sha1(certificate.issuer().as_raw()),
            issuer_key: sha1(&issuer.public_key().subject_public_key.data),
            serial: certificate.raw_serial().to_vec(),
        })
    }

    /// The request for its status (RFC 6960, section 4.1.1).
    pub fn request(&self) -> Vec<u8> {
        let id = [
            SHA1.to_vec(),
            element(0x04, &self.issuer_name),
            element(0x04, &self.issuer_key),
            element(0x02, &self.serial),
        ];
        // Nesting, from the inside: certificate, request, list of requests, part that may be signed, whole message.
        (0..5).fold(id.concat(), |content, _| element(0x30, &content))
    }

    /// Checks that a `CertID` matches; one with another digest algorithm does not.
    fn is_named_by(&self, id: &[u8]) -> Option<()> {
        let mut rest = id;
        let algorithm = take(&mut rest)?;
        let [name, key, serial] = [take(&mut rest)?, take(&mut rest)?, take(&mut rest)?];
        let is_sha1 = algorithm.data.starts_with(&SHA1[2..9]);
        let is_ours = name.data == self.issuer_name && key.data == self.issuer_key && serial.data == self.serial;
        (is_sha1 && is_ours).then_some(())
    }
}

fn sha1(bytes: &[u8]) -> [u8; 20] {
    digest(&SHA1_FOR_LEGACY_USE_ONLY, bytes).as_ref().try_into().expect("a digest's length")
}

/// Encodes an element of DER.
fn element(tag: u8, content: &[u8]) -> Vec<u8> {
    let length = content.len();
    let header = match length {
        0..0x80 => vec![tag, length as u8],
        0x80..0x100 => vec![tag, 0x81, length as u8],
        _ => vec![tag, 0x82, (length >> 8) as u8, length as u8],
    };
    [&header, content].concat()
}

/// Takes the next element from the input.
fn take<'i>(rest: &mut &'i [u8]) -> Option<Any<'i>> {
    let (behind, element) = Any::from_der(rest).ok()?;
    *rest = behind;
    Some(element)
}

/// Takes the next element if it has this context-specific tag.
fn take_tagged<'i>(rest: &mut &'i [u8], tag: u32) -> Option<Any<'i>> {
    let (behind, element) = Any::from_der(rest).ok()?;
    let is_wanted = element.class() == Class::ContextSpecific && element.tag() == Tag(tag);
    is_wanted.then(|| *rest = behind)?;
    Some(element)
}

fn time(element: &[u8]) -> Option<i64> {
    ASN1Time::from_der(element).ok().map(|(_, time)| time.timestamp())
}

/// Reads the status of a certificate from a response. The signature has to be by `issuer` or a signer it has
/// authorised; without an `issuer` no signature is checked (`ssl_stapling_verify off`).
///
/// # Errors
/// The response is unusable.
pub fn read_response(response: &[u8], id: &CertificateId, issuer: Option<&[u8]>, now: u64) -> Result<Told, OcspFault> {
    let basic = basic_response(response)?;
    let parts = Parts::of(basic).ok_or(OcspFault::Malformed)?;
    if let Some(issuer) = issuer {
        parts.check_signature(issuer, now).ok_or(OcspFault::WrongSignature)?;
    }
    let mut responses = parts.responses;
    while !responses.is_empty() {
        let mut single = take(&mut responses).ok_or(OcspFault::Malformed)?.data;
        let named = take(&mut single).ok_or(OcspFault::Malformed)?;
        if id.is_named_by(named.data).is_some() {
            return read_single(single, now);
        }
    }
    Err(OcspFault::NotFound)
}

/// Reads the status that follows the certificate's identifier in a response.
fn read_single(mut rest: &[u8], now: u64) -> Result<Told, OcspFault> {
    let status = take(&mut rest).ok_or(OcspFault::Malformed)?;
    let status = match (status.class(), status.tag()) {
        (Class::ContextSpecific, Tag(0)) => CertificateStatus::Good,
        (Class::ContextSpecific, Tag(1)) => CertificateStatus::Revoked,
        (Class::ContextSpecific, Tag(2)) => CertificateStatus::Unknown,
        _ => return Err(OcspFault::Malformed),
    };
    let this_update = time(rest).ok_or(OcspFault::Malformed)?;
    take(&mut rest).ok_or(OcspFault::Malformed)?;
    let next_update = match take_tagged(&mut rest, 0) {
        Some(next) => Some(time(next.data).ok_or(OcspFault::Malformed)?),
        None => None,
    };
    let now = i64::try_from(now).unwrap_or(i64::MAX);
    let is_over = next_update.is_some_and(|next| next < this_update || next < now.saturating_sub(SKEW));
    if this_update > now.saturating_add(SKEW) || is_over {
        return Err(OcspFault::WrongTime);
    }
    let valid_until = next_update.map_or(u64::MAX, |next| u64::try_from(next).unwrap_or(0));
    Ok(Told { status, valid_until })
}

/// The basic response inside a successful one.
fn basic_response(response: &[u8]) -> Result<&[u8], OcspFault> {
    let find = || {
        let mut rest = Any::from_der(response).ok().filter(|(behind, _)| behind.is_empty())?.1.data;
        let &[status] = take(&mut rest)?.data else { return None };
        if status != 0 {
            return Some(Err(OcspFault::NotSuccessful(status)));
        }
        let mut typed = Any::from_der(take_tagged(&mut rest, 0)?.data).ok()?.1.data;
        let kind = take(&mut typed)?;
        (kind.data == BASIC).then_some(())?;
        Some(Ok(take(&mut typed)?.data))
    };
    find().unwrap_or(Err(OcspFault::Malformed))
}

/// Parts of a basic response.
struct Parts<'r> {
    /// The bytes that are signed.
    signed: &'r [u8],
    responses: &'r [u8],
    algorithm: AlgorithmIdentifier<'r>,
    signature: x509_parser::asn1_rs::BitString<'r>,
    certificates: Vec<X509Certificate<'r>>,
}

/// Certificates of a response that are examined; each may cost a signature check.
const CERTIFICATES_MAX: usize = 4;

impl Parts<'_> {
    fn of(basic: &[u8]) -> Option<Parts<'_>> {
        let mut rest = Any::from_der(basic).ok()?.1.data;
        let start = rest;
        let mut data = take(&mut rest)?.data;
        let signed = &start[..start.len() - rest.len()];
        let (behind, algorithm) = AlgorithmIdentifier::from_der(rest).ok()?;
        let (mut rest, signature) = x509_parser::asn1_rs::BitString::from_der(behind).ok()?;
        let mut certificates = Vec::new();
        if let Some(list) = take_tagged(&mut rest, 0) {
            let mut list = Any::from_der(list.data).ok()?.1.data;
            while !list.is_empty() && certificates.len() < CERTIFICATES_MAX {
                let (behind, certificate) = X509Certificate::from_der(list).ok()?;
                certificates.push(certificate);
                list = behind;
            }
        }
        // Version, responder and time.
        take_tagged(&mut data, 0);
        take(&mut data)?;
        take(&mut data)?;
        Some(Parts { signed, responses: take(&mut data)?.data, algorithm, signature, certificates })
    }

    /// RFC 6960, section 4.2.2.2: signed by the issuer, or by a signer whose certificate from the issuer allows it.
    fn check_signature(&self, issuer: &[u8], now: u64) -> Option<()> {
        let (_, issuer) = X509Certificate::from_der(issuer).ok()?;
        let has_signed = |certificate: &X509Certificate<'_>| {
            verify_signature(certificate.public_key(), &self.algorithm, &self.signature, self.signed).is_ok()
        };
        if has_signed(&issuer) {
            return Some(());
        }
        let now = ASN1Time::from_timestamp(i64::try_from(now).ok()?).ok()?;
        let may_sign = |certificate: &&X509Certificate<'_>| {
            let usage = certificate.extended_key_usage().ok().flatten();
            usage.is_some_and(|usage| usage.value.ocsp_signing)
                && certificate.issuer().as_raw() == issuer.subject().as_raw()
                && certificate.validity().is_valid_at(now)
                && certificate.verify_signature(Some(issuer.public_key())).is_ok()
        };
        self.certificates.iter().filter(may_sign).any(has_signed).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Responses of `openssl ocsp` with a delegated responder, for a good and a revoked certificate; see
    /// `tests/ocsp/README`.
    const ISSUER: &[u8] = include_bytes!("../../tests/ocsp/issuer.der");
    const GOOD: &[u8] = include_bytes!("../../tests/ocsp/good.der");
    const REVOKED: &[u8] = include_bytes!("../../tests/ocsp/revoked.der");
    const OF_GOOD: &[u8] = include_bytes!("../../tests/ocsp/good.response.der");
    const OF_REVOKED: &[u8] = include_bytes!("../../tests/ocsp/revoked.response.der");
    const OF_DELEGATE: &[u8] = include_bytes!("../../tests/ocsp/good.delegate.response.der");
    const OF_STRANGER: &[u8] = include_bytes!("../../tests/ocsp/good.stranger.response.der");
    const REQUEST: &[u8] = include_bytes!("../../tests/ocsp/good.request.der");

    fn now() -> u64 {
        let (_, basic) = (0, basic_response(OF_GOOD).unwrap());
        let mut single = Parts::of(basic).unwrap().responses;
        let mut single = take(&mut single).unwrap().data;
        take(&mut single).unwrap();
        take(&mut single).unwrap();
        time(single).unwrap() as u64
    }

    fn read(response: &[u8], certificate: &[u8]) -> Result<CertificateStatus, OcspFault> {
        let id = CertificateId::of(certificate, ISSUER).unwrap();
        read_response(response, &id, Some(ISSUER), now() + 60).map(|told| told.status)
    }

    #[test]
    fn request_is_openssl_s() {
        assert_eq!(CertificateId::of(GOOD, ISSUER).unwrap().request(), REQUEST);
    }

    #[test]
    fn status_is_accepted_from_signers_of_the_issuer() {
        assert_eq!(read(OF_GOOD, GOOD), Ok(CertificateStatus::Good));
        assert_eq!(read(OF_REVOKED, REVOKED), Ok(CertificateStatus::Revoked));
        assert_eq!(read(OF_DELEGATE, GOOD), Ok(CertificateStatus::Good));
        assert_eq!(read(OF_STRANGER, GOOD), Err(OcspFault::WrongSignature));
        assert_eq!(read(OF_GOOD, REVOKED), Err(OcspFault::NotFound));
        let id = CertificateId::of(GOOD, ISSUER).unwrap();
        assert!(read_response(OF_STRANGER, &id, None, now()).is_ok());
        for (when, expected) in [(now() - 301, true), (now() - 299, false), (now() + 400 * 86_400, true)] {
            let told = read_response(OF_GOOD, &id, Some(ISSUER), when);
            assert_eq!(told == Err(OcspFault::WrongTime), expected, "{when}");
        }
        // A refusal: a response of three bytes inside.
        assert_eq!(read(b"\x30\x03\x0a\x01\x06", GOOD), Err(OcspFault::NotSuccessful(6)));
        assert_eq!(OcspFault::NotSuccessful(6).to_string(), "OCSP response not successful (6: unauthorized)");
    }

    #[test]
    fn changed_signed_bytes_are_refused() {
        let signed = Parts::of(basic_response(OF_GOOD).unwrap()).unwrap().signed;
        let start = OF_GOOD.windows(signed.len()).position(|window| window == signed).unwrap();
        for place in 0..OF_GOOD.len() {
            let mut changed = OF_GOOD.to_vec();
            changed[place] ^= 1 << (place % 8);
            let told = read(&changed, GOOD);
            assert!(told.is_err() || !(start..start + signed.len()).contains(&place), "{place}");
            assert!(read(&OF_GOOD[..place], GOOD).is_err(), "{place}");
        }
    }
}
