//! A client's side of TLS for threads that may wait: the socket's own timeouts bound each call.

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

/// How many certificates of issuers a server may show.
const VERIFY_DEPTH: u64 = 10;

/// Where the certificates of trusted authorities are.
#[derive(Debug)]
pub enum TrustedBy {
    /// In this text, PEM.
    Text(Vec<u8>),
    /// In this file, which is read for each connection; where this process may not read it, what is known of it.
    File(PathBuf),
    /// In the system's own store, which is read for each connection.
    System,
}

/// What files of authorities say of which only the master may read some: see [`note_file`].
static KNOWN_FILES: Mutex<BTreeMap<PathBuf, Vec<u8>>> = Mutex::new(BTreeMap::new());

/// Notes what a file of authorities says, for clients that may not read it themselves.
pub fn note_file(path: &Path, text: &[u8]) {
    KNOWN_FILES.lock().insert(path.to_owned(), text.to_owned());
}

/// What is asked of a server.
pub struct BlockingClient {
    name: String,
    trusted: TrustedBy,
}

impl BlockingClient {
    /// A client of the server of this name, which its certificate has to be for.
    pub fn new(name: &str, trusted: TrustedBy) -> BlockingClient {
        BlockingClient { name: name.to_owned(), trusted }
    }

    /// Whether the text has certificates, and a certificate can have the name.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self) -> Result<(), String> {
        self.name().and_then(|_| self.config()).map(drop).map_err(|error| error.to_string())
    }

    /// What is trusted.
    pub fn trusted(&self) -> &TrustedBy {
        &self.trusted
    }

    /// Shakes hands until then, over a connection whose calls have timeouts.
    ///
    /// # Errors
    /// The connection's, and why the server is not trusted.
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
                // The server learns why.
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

/// Why there is no handshake. The words are those of servers that requests are passed to, without the word for these.
fn invalid(error: rustls::Error) -> io::Error {
    let words = TlsFailure::of(error).to_string();
    let words = words.strip_prefix("upstream ").unwrap_or(&words);
    io::Error::new(io::ErrorKind::InvalidData, words)
}

/// The first store of the system that can be read.
///
/// # Errors
/// There is none.
pub fn read_system(mut read: impl FnMut(&Path) -> io::Result<Vec<u8>>) -> io::Result<Vec<u8>> {
    let found = SYSTEM_STORES.iter().find_map(|path| read(Path::new(path)).ok());
    found.ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, "no file with trusted CA certificates was found on this system")
    })
}

/// A connection.
pub struct BlockingTls {
    connection: ClientConnection,
    socket: TcpStream,
}

impl BlockingTls {
    /// Sends all of it.
    ///
    /// # Errors
    /// The connection's.
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

    /// Whether the server has not closed it, as far as it shows without waiting.
    pub fn is_open(&mut self) -> bool {
        if self.socket.set_nonblocking(true).is_err() {
            return false;
        }
        let is_open = self.take_what_came();
        self.socket.set_nonblocking(false).is_ok() && is_open
    }

    fn take_what_came(&mut self) -> bool {
        // A server that says more than this is asked again the next time.
        for _ in 0..16 {
            match self.connection.read_tls(&mut self.socket) {
                Ok(0) => return false,
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
                Ok(_) => {}
            }
            match self.connection.process_new_packets() {
                Ok(state) if !state.peer_has_closed() => {
                    // It has nothing to say that matters.
                    let mut said = vec![0; state.plaintext_bytes_to_read()];
                    let _ = self.connection.reader().read(&mut said);
                }
                _ => return false,
            }
        }
        true
    }
}

/// The server is told that nothing more comes (RFC 5425, section 4.4). Before that its unread bytes are taken off the
/// socket, or the connection would end with a reset, and lines on their way with it.
impl Drop for BlockingTls {
    fn drop(&mut self) {
        if self.is_open() {
            self.connection.send_close_notify();
            let _ = self.connection.write_tls(&mut self.socket);
        }
        let _ = self.socket.shutdown(Shutdown::Write);
    }
}
