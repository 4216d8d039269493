//! Certificates for tests.

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertificateSigningRequestParams,
    DistinguishedName, DnType, IsCa, Issuer, KeyIdMethod, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_RSA_SHA256,
    SignatureAlgorithm, date_time_ymd,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

pub struct Authority {
    pub pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate with its key, both in PEM.
pub struct Pair {
    pub certificate: String,
    pub key: String,
}

impl Authority {
    pub fn new(name: &str) -> Authority {
        Authority::with(name, |_| {})
    }

    /// An authority whose certificate differs by `change`.
    pub fn with(name: &str, change: impl FnOnce(&mut CertificateParams)) -> Authority {
        let key = KeyPair::generate().expect("a key");
        let mut params = authority_params(name);
        change(&mut params);
        let certificate = params.self_signed(&key).expect("a certificate");
        Authority { pem: certificate.pem(), issuer: Issuer::new(params, key) }
    }

    /// Another certificate of the same name and key, in PEM.
    pub fn renewed(&self, name: &str, change: impl FnOnce(&mut CertificateParams)) -> String {
        let mut params = authority_params(name);
        change(&mut params);
        params.self_signed(self.issuer.key()).expect("a certificate").pem()
    }

    /// An empty list of revoked certificates, in PEM.
    pub fn revocations(&self) -> String {
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2001, 1, 1),
            next_update: date_time_ymd(2999, 1, 1),
            crl_number: 1.into(),
            issuing_distribution_point: None,
            revoked_certs: Vec::new(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        list.signed_by(&self.issuer).and_then(|list| list.pem()).expect("a list")
    }

    /// Issues a certificate for these names; the first one is its subject.
    pub fn issue(&self, names: &[&str], algorithm: &'static SignatureAlgorithm) -> Pair {
        self.sign(params(names), KeyPair::generate_for(algorithm).expect("a key"))
    }

    /// Signs a certificate with these parameters.
    pub fn sign(&self, params: CertificateParams, key: KeyPair) -> Pair {
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        Pair { certificate: certificate.pem(), key: key.serialize_pem() }
    }

    /// Signs the certificate of a request; returns it in PEM.
    pub fn sign_request(&self, request: &CertificateSigningRequestParams) -> String {
        request.signed_by(&self.issuer).expect("a certificate").pem()
    }

    pub fn ecdsa(&self, names: &[&str]) -> Pair {
        self.issue(names, &PKCS_ECDSA_P256_SHA256)
    }

    pub fn rsa(&self, names: &[&str]) -> Pair {
        self.issue(names, &PKCS_RSA_SHA256)
    }
}

/// Parameters of a certificate for these names.
pub fn params(names: &[&str]) -> CertificateParams {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names.clone()).expect("names");
    params.distinguished_name = named(&names[0]);
    params
}

fn authority_params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::new(Vec::new()).expect("no names");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name = named(name);
    params
}

fn named(name: &str) -> DistinguishedName {
    let mut names = DistinguishedName::new();
    names.push(DnType::CommonName, name);
    names
}

/// `true` if this is the certificate of the pair.
pub fn is_for(certificate: &CertificateDer<'_>, pair: &Pair) -> bool {
    CertificateDer::from_pem_slice(pair.certificate.as_bytes()).expect("PEM") == *certificate
}
