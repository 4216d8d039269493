//! Client side of TLS for threads that may block. The socket's own timeouts bound each call.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};

use super::client::SYSTEM_STORES;
use super::failure::TlsFailure;
use super::load;
use super::verify::Purpose;
use super::verify_server::Verifier;

/// Longest chain of issuers that a server may present.
const VERIFY_DEPTH: u64 = 10;

/// Source of the trusted CA certificates.
#[derive(Debug)]
pub enum TrustedBy {
    /// PEM text.
    Text(Vec<u8>),
    /// A file, read for each connection. If this process may not read it, the text given to [`note_file`] is used.
    File(PathBuf),
    /// The system's CA store, read for each connection.
    System,
}

/// Contents of CA files that only the master may read; see [`note_file`].
static KNOWN_FILES: Mutex<BTreeMap<PathBuf, Vec<u8>>> = Mutex::new(BTreeMap::new());

/// Stores the contents of a CA file for clients that may not read it themselves.
pub fn note_file(path: &Path, text: &[u8]) {
    KNOWN_FILES.lock().insert(path.to_owned(), text.to_owned());
}

/// Client settings for one server.
pub struct BlockingClient {
    name: String,
    trusted: TrustedBy,
}

impl BlockingClient {
    /// Creates a client for the server of this name, which its certificate must match.
    pub fn new(name: &str, trusted: TrustedBy) -> BlockingClient {
        BlockingClient { name: name.to_owned(), trusted }
    }

    /// Checks that the CA certificates can be read and that the server name is valid.
    ///
    /// # Errors
    /// A description of the fault.
    pub fn check(&self) -> Result<(), String> {
        self.name().and_then(|_| self.config()).map(drop).map_err(|error| error.to_string())
    }

    /// Source of the trusted CA certificates.
    pub fn trusted(&self) -> &TrustedBy {
        &self.trusted
    }

    /// Performs the handshake before the deadline, over a socket whose calls have timeouts.
    ///
    /// # Errors
    /// Errors of the connection, or the reason why the server is not trusted.
    pub fn shake_hands(&self, mut socket: TcpStream, deadline: Instant) -> io::Result<BlockingTls> {
        let mut connection = ClientConnection::new(self.config()?, self.name()?).map_err(invalid)?;
        while connection.is_handshaking() {
            if Instant::now() >= deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            if connection.wants_write() {
                connection.write_tls(&mut socket)?;
            } else if connection.read_tls(&mut socket)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            } else if let Err(error) = connection.process_new_packets() {
                // Sends the alert.
                let _ = connection.write_tls(&mut socket);
                return Err(invalid(error));
            }
        }
        Ok(BlockingTls { connection, socket })
    }

    fn name(&self) -> io::Result<ServerName<'static>> {
        let wrong =
            || io::Error::new(io::ErrorKind::InvalidInput, format!("\"{}\" is not a valid server name", self.name));
        ServerName::try_from(self.name.clone()).map_err(|_| wrong())
    }

    fn config(&self) -> io::Result<Arc<ClientConfig>> {
        let text = match &self.trusted {
            TrustedBy::Text(text) => text.clone(),
            TrustedBy::File(path) => {
                std::fs::read(path).or_else(|error| KNOWN_FILES.lock().get(path).cloned().ok_or(error))?
            }
            TrustedBy::System => read_system(|path| std::fs::read(path))?,
        };
        let authorities = load::authorities(&text, Purpose::Server).map_err(io::Error::other)?;
        if authorities.is_empty() {
            return Err(io::Error::other("no certificate"));
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier = Verifier::new(Some(authorities), Vec::new(), VERIFY_DEPTH, &provider);
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let builder = builder.map_err(io::Error::other)?.dangerous();
        let config = builder.with_custom_certificate_verifier(Arc::new(verifier)).with_no_client_auth();
        Ok(Arc::new(config))
    }
}

/// Error of a failed handshake. The words are those of handshakes with upstream servers, without "upstream".
fn invalid(error: rustls::Error) -> io::Error {
    let words = TlsFailure::of(error).to_string();
    let words = words.strip_prefix("upstream ").unwrap_or(&words);
    io::Error::new(io::ErrorKind::InvalidData, words)
}

/// Contents of the system's CA store: the first file that can be read.
///
/// # Errors
/// No such file can be read.
pub fn read_system(mut read: impl FnMut(&Path) -> io::Result<Vec<u8>>) -> io::Result<Vec<u8>> {
    let found = SYSTEM_STORES.iter().find_map(|path| read(Path::new(path)).ok());
    found.ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, "no file with trusted CA certificates was found on this system")
    })
}

/// An established connection.
pub struct BlockingTls {
    connection: ClientConnection,
    socket: TcpStream,
}

impl BlockingTls {
    /// Sends all bytes.
    ///
    /// # Errors
    /// Errors of the connection.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            // The library's buffer is bounded.
            let taken = self.connection.writer().write(rest)?;
            rest = &rest[taken..];
            while self.connection.wants_write() {
                if self.connection.write_tls(&mut self.socket)? == 0 {
                    return Err(io::ErrorKind::WriteZero.into());
                }
            }
        }
        Ok(())
    }

    /// `true` unless the server is known to have closed the connection; does not block.
    pub fn is_open(&mut self) -> bool {
        if self.socket.set_nonblocking(true).is_err() {
            return false;
        }
        let is_open = self.take_received();
        self.socket.set_nonblocking(false).is_ok() && is_open
    }

    fn take_received(&mut self) -> bool {
        // Bounded; the next call reads the rest.
        for _ in 0..16 {
            match self.connection.read_tls(&mut self.socket) {
                Ok(0) => return false,
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
                Ok(_) => {}
            }
            match self.connection.process_new_packets() {
                Ok(state) if !state.peer_has_closed() => {
                    // Application data from the server is discarded.
                    let mut said = vec![0; state.plaintext_bytes_to_read()];
                    let _ = self.connection.reader().read(&mut said);
                }
                _ => return false,
            }
        }
        true
    }
}

/// Sends close_notify (RFC 5425, section 4.4). Unread bytes are taken off the socket first: with unread bytes, closing
/// would reset the connection and lose log lines in flight.
impl Drop for BlockingTls {
    fn drop(&mut self) {
        if self.is_open() {
            self.connection.send_close_notify();
            let _ = self.connection.write_tls(&mut self.socket);
        }
        let _ = self.socket.shutdown(Shutdown::Write);
    }
}
