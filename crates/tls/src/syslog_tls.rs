//! Syslog over TLS: the server's certificate has to match its name and come from a trusted authority.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use gale_log::{Carrier, Channel, Secure, SyslogSettings};
use gale_process::Resources;

use super::blocking::{BlockingClient, BlockingTls, TrustedBy, note_file, read_system};
use super::random;

/// TLS settings of a log, for a process that builds the configuration; `None` if the log does not use TLS.
///
/// # Errors
/// The CA certificates cannot be read.
pub fn of(settings: &SyslogSettings, resources: &mut dyn Resources) -> Result<Option<Arc<dyn Secure>>, String> {
    if settings.carrier != Carrier::Tls {
        return Ok(None);
    }
    random::want();
    let (text, name) = match &settings.trusted {
        Some(path) => (resources.secret(path), path.display().to_string()),
        None => (read_system(|path| resources.secret(path)), "of the system".to_owned()),
    };
    let failed = |why: String| format!("cannot load trusted certificates \"{name}\" of a syslog server: {why}");
    let text = text.map_err(|error| failed(error.to_string()))?;
    if let Some(path) = &settings.trusted {
        note_file(path, &text);
    }
    let client = BlockingClient::new(&settings.name, TrustedBy::Text(text));
    client.check().map_err(failed)?;
    Ok(Some(Arc::new(client)))
}

/// The same for the logs of whole processes, which exist before a configuration is built. They read the CA file for
/// each connection.
pub fn of_process(settings: &SyslogSettings) -> Option<Arc<dyn Secure>> {
    let trusted = settings.trusted.clone().map_or(TrustedBy::System, TrustedBy::File);
    (settings.carrier == Carrier::Tls)
        .then(|| Arc::new(BlockingClient::new(&settings.name, trusted)) as Arc<dyn Secure>)
}

impl Secure for BlockingClient {
    fn shake_hands(&self, stream: TcpStream, deadline: Instant) -> io::Result<Box<dyn Channel>> {
        BlockingClient::shake_hands(self, stream, deadline).map(|channel| Box::new(channel) as Box<dyn Channel>)
    }

    fn identity(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        match self.trusted() {
            TrustedBy::Text(text) => text.hash(&mut hasher),
            TrustedBy::File(path) => path.hash(&mut hasher),
            TrustedBy::System => {}
        }
        hasher.finish()
    }
}

impl Channel for BlockingTls {
    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        BlockingTls::send(self, bytes)
    }

    fn is_open(&mut self) -> bool {
        BlockingTls::is_open(self)
    }
}
