//! TLS clients.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::compress::CertDecompressor;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::version::{TLS12, TLS13};
use rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore, SignatureScheme, StreamOwned,
    SupportedProtocolVersion,
};

use super::authority::{Authority, Pair};
use super::{Client, DEADLINE};

/// Configuration of TLS clients.
pub struct Tls {
    config: ClientConfig,
}

impl Tls {
    /// Any version of TLS; trusts this authority.
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

    /// Sends early data on resumption.
    pub fn with_early_data(mut self) -> Tls {
        self.config.enable_early_data = true;
        self
    }

    /// Accepts compressed certificates.
    pub fn decompressing(mut self, decompressor: &'static dyn CertDecompressor) -> Tls {
        self.config.cert_decompressors = vec![decompressor];
        self
    }

    /// Verifies servers' certificates with this verifier.
    pub fn verified_by(mut self, verifier: Arc<dyn ServerCertVerifier>) -> Tls {
        self.config.dangerous().set_certificate_verifier(verifier);
        self
    }

    /// Offers only cipher suites of TLSv1.2 with RSA keys.
    pub fn rsa_only(authority: &Authority) -> Tls {
        let mut provider = aws_lc_rs::default_provider();
        provider.cipher_suites.retain(|suite| suite.suite().as_str().is_some_and(|name| name.contains("_RSA_")));
        Tls::of(provider, authority, &[&TLS12], None)
    }

    /// Client side of a session with the server of this name.
    pub fn session(&self, name: &str) -> ClientConnection {
        let name = ServerName::try_from(name.to_owned()).expect("a name");
        ClientConnection::new(Arc::new(self.config.clone()), name).expect("a session")
    }

    /// Connects to this socket and completes the handshake.
    pub fn connect(&self, path: &Path, name: &str) -> Result<Session, std::io::Error> {
        let stream = UnixStream::connect(path).expect("it listens");
        stream.set_read_timeout(Some(DEADLINE)).expect("an option");
        stream.set_write_timeout(Some(DEADLINE)).expect("an option");
        let mut stream = StreamOwned::new(self.session(name), stream);
        stream.conn.complete_io(&mut stream.sock)?;
        Ok(Session { stream })
    }

    /// Connects to this address and completes the handshake.
    pub fn connect_tcp(
        &self,
        address: SocketAddr,
        name: &str,
    ) -> Result<StreamOwned<ClientConnection, TcpStream>, std::io::Error> {
        let stream = TcpStream::connect(address).expect("it listens");
        stream.set_read_timeout(Some(DEADLINE)).expect("an option");
        stream.set_write_timeout(Some(DEADLINE)).expect("an option");
        let mut stream = StreamOwned::new(self.session(name), stream);
        stream.conn.complete_io(&mut stream.sock)?;
        Ok(stream)
    }

    /// [`Tls::connect`] for requests.
    #[track_caller]
    pub fn client(&self, path: &Path, name: &str) -> Client {
        let session = self.connect(path, name).unwrap_or_else(|error| panic!("{name}: {error}"));
        Client::above(session)
    }
}

/// ClientHello of a client that only speaks this version, which is older than TLSv1.2.
pub fn old_hello(version: u16) -> Vec<u8> {
    let [high, low] = version.to_be_bytes();
    let suites = [0, 4, 0xc0, 0x09, 0xc0, 0x13];
    let body = [&[high, low][..], &[7; 32], &[0], &suites, &[1, 0]].concat();
    let length = u8::try_from(body.len()).expect("short");
    [&[22, 3, 1, 0, length + 4, 1, 0, 0, length][..], &body].concat()
}

/// A client's session. Reads to its end behave as on a cleartext connection, after an assertion that `close_notify`
/// came first.
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

/// Accepts any certificate and keeps its stapled OCSP response.
#[derive(Debug, Default)]
pub struct AnyCertificate(Mutex<Vec<u8>>);

impl AnyCertificate {
    /// Stapled OCSP response of the last certificate.
    pub fn stapled(&self) -> Vec<u8> {
        self.0.lock().expect("no test failed with it").clone()
    }
}

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        ocsp: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        *self.0.lock().expect("no test failed with it") = ocsp.to_vec();
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        aws_lc_rs::default_provider().signature_verification_algorithms.supported_schemes()
    }
}
