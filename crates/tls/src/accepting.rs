//! Server side of a handshake, shared by all protocols: reads the first message, loads certificates that depend on it,
//! finishes the handshake and checks the client's certificate.
//!
//! It does not choose the server, because names belong to a protocol's configuration, and it receives no bytes: the
//! protocol does.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;

use gale_base::log_level::Level;
use gale_protocol::client_hello::{self, ClientHello, Status, host_of};
use gale_worker::traffic::{ServerZone, Shaken, Unverified, count_unverified};

use super::settings::VerifyClient;
use super::{NamedFailure, TlsFailure, TlsServer, TlsStream, Verdict, challenges};

/// Size of the first receive: enough for a usual ClientHello.
pub const FIRST_BYTES: usize = 4096;

/// Activity named in messages.
pub const SHAKING_HANDS: &str = "while SSL handshaking";

/// The alert `unrecognized_name`, fatal, in the clear (RFC 6066, section 3).
const UNRECOGNIZED_NAME: &[u8] = &[21, 3, 3, 0, 2, 2, 112];

/// The alert `internal_error`, fatal, in the clear (RFC 8446, section 6.2).
const INTERNAL_ERROR: &[u8] = &[21, 3, 3, 0, 2, 2, 80];

/// Connection of a protocol whose client is in the handshake.
pub trait HandshakeOwner {
    /// Writes a message about the handshake.
    fn log_handshake(&self, level: Level, message: fmt::Arguments<'_>);

    /// Counts the end of the handshake, also for the server that the client has named (see [`count_handshake`]).
    ///
    /// [`count_handshake`]: gale_worker::traffic::count_handshake
    fn count_handshake(&self, shaken: Shaken);
}

/// Contents of a client's first message.
#[derive(Debug, Default)]
pub struct FirstMessage<'i> {
    /// Server name that the client wants (SNI), in lower case.
    pub name: Option<Vec<u8>>,
    /// `true` if the client is an issuer of certificates that validates a challenge.
    pub asks_challenge: bool,
    /// Newest version that the client speaks, if it is older than every supported version.
    pub old_version: Option<u16>,
    /// The parsed message, or `None` if it is malformed. The library then reports the fault.
    pub hello: Option<ClientHello<'i>>,
}

impl<'i> FirstMessage<'i> {
    /// Parses the message; `None` while it is incomplete.
    pub fn read(input: &'i [u8]) -> Option<FirstMessage<'i>> {
        match client_hello::parse(input) {
            Status::NeedMore => None,
            Status::Malformed => Some(FirstMessage::default()),
            Status::Complete(hello) => {
                let asks_challenge = hello.alpn_protocols().any(|protocol| protocol == challenges::ALPN);
                let (name, old_version) = (hello.server_name().map(host_of), hello.version_before_tls12());
                Some(FirstMessage { name, asks_challenge, old_version, hello: Some(hello) })
            }
        }
    }
}

/// Refuses a client whose newest version is older than TLSv1.2.
pub fn refuse_version(owner: &impl HandshakeOwner, stream: &TlsStream, version: u16) {
    fail(owner, &stream.refuse_version(version));
}

/// Refuses a client that has named a server with `ssl_reject_handshake`. The protocol counts it.
pub fn reject(owner: &impl HandshakeOwner, stream: &TlsStream) {
    // If the alert cannot be sent at once, the client only sees the connection close.
    let _ = stream.socket().try_send_copy(UNRECOGNIZED_NAME, false);
    let message = "SSL_do_handshake() failed (SSL: error:0A0000EA:SSL routines::callback failed)";
    owner.log_handshake(Level::Info, format_args!("{message} {SHAKING_HANDS}"));
}

/// Loads the certificates of a server whose certificate names have variables, for this handshake; `names` evaluates the
/// names. Returns `None` after an alert to the client if they cannot be loaded.
pub async fn with_certificates(
    owner: &impl HandshakeOwner,
    stream: &TlsStream,
    server: &Arc<TlsServer>,
    names: impl FnOnce() -> Vec<(Vec<u8>, Vec<u8>)>,
) -> Option<Arc<TlsServer>> {
    let read: Result<_, NamedFailure> = async {
        server.load_managed().await?;
        server.with_certificates(&names()).await
    }
    .await;
    read.map_err(|failure| {
        owner.log_handshake(Level::Error, format_args!("{failure} {SHAKING_HANDS}"));
        // If the alert cannot be sent at once, the client only sees the connection close.
        let _ = stream.socket().try_send_copy(INTERNAL_ERROR, false);
    })
    .ok()
}

/// Completes a handshake and counts it. Returns `true` on success.
pub async fn finish(owner: &impl HandshakeOwner, stream: &TlsStream) -> bool {
    if let Err(failure) = poll_fn(|context| stream.poll_handshake(context)).await {
        fail(owner, &failure);
        return false;
    }
    let is_resumed = stream.details(|details| details.is_resumed()) == Some(true);
    owner.count_handshake(if is_resumed { Shaken::Resumed } else { Shaken::Full });
    true
}

/// Logs why a handshake failed, and counts it.
pub fn fail(owner: &impl HandshakeOwner, failure: &TlsFailure) {
    let level = if failure.is_usual() { Level::Info } else { Level::Crit };
    owner.log_handshake(level, format_args!("{failure} {SHAKING_HANDS}"));
    owner.count_handshake(failure.outcome());
}

/// Logs a handshake timeout, and counts it.
pub fn time_out(owner: &impl HandshakeOwner) {
    owner.log_handshake(Level::Info, format_args!("client timed out (110: Connection timed out) {SHAKING_HANDS}"));
    owner.count_handshake(Shaken::TimedOut);
}

/// Reason to reject a client's certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// The certificate failed verification.
    Bad,
    /// The client sent no certificate.
    Missing,
}

/// Checks a client's certificate against the mode of `ssl_verify_client`. A fault is returned, logged, and counted for
/// the zone.
pub fn check_certificate(
    mode: VerifyClient,
    verdict: Verdict,
    zone: Option<&ServerZone>,
    log: impl FnOnce(fmt::Arguments<'_>),
) -> Option<Unfit> {
    match verdict {
        _ if mode == VerifyClient::Off => None,
        Verdict::Bad(fault) if mode == VerifyClient::OptionalNoCa && fault.is_unknown_issuer() => None,
        Verdict::Bad(fault) => {
            count_unverified(zone, fault.reason());
            log(format_args!("client SSL certificate verify error: {fault}"));
            Some(Unfit::Bad)
        }
        Verdict::None if mode == VerifyClient::On => {
            count_unverified(zone, Unverified::Missing);
            log(format_args!("client sent no required SSL certificate"));
            Some(Unfit::Missing)
        }
        Verdict::None | Verdict::Good => None,
    }
}
