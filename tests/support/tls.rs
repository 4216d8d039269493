//! Certificates for tests, and clients that speak TLS.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair, PKCS_ECDSA_P256_SHA256,
    PKCS_RSA_SHA256, SignatureAlgorithm,
};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned, SupportedProtocolVersion};

use super::support::{Client, DEADLINE};

/// An authority.
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
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name = named(name);
        let certificate = params.self_signed(&key).expect("a certificate");
        Authority { pem: certificate.pem(), issuer: Issuer::new(params, key) }
    }

    /// A certificate for these names; the first one is its subject's.
    pub fn issue(&self, names: &[&str], algorithm: &'static SignatureAlgorithm) -> Pair {
        let key = KeyPair::generate_for(algorithm).expect("a key");
        let mut params =
            CertificateParams::new(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()).expect("names");
        params.distinguished_name = named(names[0]);
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        Pair { certificate: certificate.pem(), key: key.serialize_pem() }
    }

    /// A certificate that nobody takes any more.
    #[allow(dead_code, reason = "only some of the tests that have authorities want one")]
    pub fn expired(&self, names: &[&str]) -> Pair {
        let key = KeyPair::generate().expect("a key");
        let mut params =
            CertificateParams::new(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()).expect("names");
        params.not_before = rcgen::date_time_ymd(2001, 1, 1);
        params.not_after = rcgen::date_time_ymd(2002, 1, 1);
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        Pair { certificate: certificate.pem(), key: key.serialize_pem() }
    }

    pub fn ecdsa(&self, names: &[&str]) -> Pair {
        self.issue(names, &PKCS_ECDSA_P256_SHA256)
    }

    pub fn rsa(&self, names: &[&str]) -> Pair {
        self.issue(names, &PKCS_RSA_SHA256)
    }
}

fn named(name: &str) -> DistinguishedName {
    let mut names = DistinguishedName::new();
    names.push(DnType::CommonName, name);
    names
}

/// How clients speak TLS.
pub struct Tls {
    config: ClientConfig,
}

impl Tls {
    /// With any version, and this authority's certificates.
    pub fn new(authority: &Authority) -> Tls {
        Tls::with(authority, &[&TLS13, &TLS12], None)
    }

    pub fn tls12(authority: &Authority) -> Tls {
        Tls::with(authority, &[&TLS12], None)
    }

    pub fn with(authority: &Authority, versions: &[&'static SupportedProtocolVersion], own: Option<&Pair>) -> Tls {
        Tls::of(aws_lc_rs::default_provider(), authority, versions, own)
    }

    fn of(
        provider: CryptoProvider,
        authority: &Authority,
        versions: &[&'static SupportedProtocolVersion],
        own: Option<&Pair>,
    ) -> Tls {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(authority.pem.as_bytes()).expect("PEM")).expect("an authority");
        let builder = ClientConfig::builder_with_provider(Arc::new(provider))
            .with_protocol_versions(versions)
            .expect("versions")
            .with_root_certificates(roots);
        let config = match own {
            None => builder.with_no_client_auth(),
            Some(own) => {
                let chain =
                    CertificateDer::pem_slice_iter(own.certificate.as_bytes()).collect::<Result<_, _>>().expect("PEM");
                let key = PrivateKeyDer::from_pem_slice(own.key.as_bytes()).expect("PEM");
                builder.with_client_auth_cert(chain, key).expect("a pair")
            }
        };
        Tls { config }
    }

    pub fn alpn(mut self, names: &[&str]) -> Tls {
        self.config.alpn_protocols = names.iter().map(|name| name.as_bytes().to_vec()).collect();
        self
    }

    /// With suites of TLSv1.2 for keys of this kind alone.
    pub fn rsa_only(authority: &Authority) -> Tls {
        let mut provider = aws_lc_rs::default_provider();
        provider.cipher_suites.retain(|suite| suite.suite().as_str().is_some_and(|name| name.contains("_RSA_")));
        Tls::of(provider, authority, &[&TLS12], None)
    }

    /// The client's side of a session with the server of this name.
    pub fn session(&self, name: &str) -> ClientConnection {
        let name = ServerName::try_from(name.to_owned()).expect("a name");
        ClientConnection::new(Arc::new(self.config.clone()), name).expect("a session")
    }

    /// A connection to this socket whose handshake is over, or the reason why there is none.
    pub fn connect(&self, path: &Path, name: &str) -> Result<Session, std::io::Error> {
        let stream = UnixStream::connect(path).expect("it listens");
        stream.set_read_timeout(Some(DEADLINE)).expect("an option");
        stream.set_write_timeout(Some(DEADLINE)).expect("an option");
        let mut stream = StreamOwned::new(self.session(name), stream);
        stream.conn.complete_io(&mut stream.sock)?;
        Ok(Session { stream })
    }

    /// The same for requests.
    #[track_caller]
    pub fn client(&self, path: &Path, name: &str) -> Client {
        let session = self.connect(path, name).unwrap_or_else(|error| panic!("{name}: {error}"));
        Client::above(session)
    }
}

/// A session of a client's. Ends as a connection in the clear does; that the server has said so first is asserted.
pub struct Session {
    pub stream: StreamOwned<ClientConnection, UnixStream>,
}

impl Read for Session {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        self.stream.read(into)
    }
}

impl Write for Session {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.stream.flush()
    }
}

/// The name in a certificate.
pub fn is_for(certificate: &CertificateDer<'_>, pair: &Pair) -> bool {
    CertificateDer::from_pem_slice(pair.certificate.as_bytes()).expect("PEM") == *certificate
}
