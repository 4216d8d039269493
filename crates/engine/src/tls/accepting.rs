//! A client's handshake, as every protocol has it: what its first message says, certificates that have to be read
//! first, how the handshake ends, and whether the client's certificate is good enough.
//!
//! It chooses no server: names belong to a protocol's configuration. It receives nothing either, since what has come so
//! far is the protocol's.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;

use gale_base::log_level::Level;
use gale_protocol::client_hello::{self, ClientHello, Status, host_of};

use super::settings::VerifyClient;
use super::{NamedFailure, TlsFailure, TlsServer, TlsStream, Verdict, challenges};
use crate::traffic::{ServerZone, Shaken, Unverified, count_unverified};

/// What is received at once before anything is known: a usual first message.
pub const FIRST_BYTES: usize = 4096;

/// What is being done, as messages have it.
pub const SHAKING_HANDS: &str = "while SSL handshaking";

/// The alert `unrecognized_name`, fatal, in the clear (RFC 6066, section 3).
const UNRECOGNIZED_NAME: &[u8] = &[21, 3, 3, 0, 2, 2, 112];

/// The alert `internal_error`, fatal, in the clear (RFC 8446, section 6.2).
const INTERNAL_ERROR: &[u8] = &[21, 3, 3, 0, 2, 2, 80];

/// The connection of a protocol whose client shakes hands.
pub trait HandshakeOwner {
    /// Writes a message about the handshake.
    fn log_handshake(&self, level: Level, message: fmt::Arguments<'_>);

    /// Counts the end of the handshake, also for the server that the client has named ([`count_handshake`]).
    ///
    /// [`count_handshake`]: crate::traffic::count_handshake
    fn count_handshake(&self, shaken: Shaken);
}

/// What a client's first message says.
#[derive(Debug, Default)]
pub struct FirstMessage<'i> {
    /// The name of the server that it wants, in lower case.
    pub name: Option<Vec<u8>>,
    /// It is an issuer of certificates that asks who is there.
    pub asks_challenge: bool,
    /// The version that it speaks, if that is older than all that are spoken here.
    pub old_version: Option<u16>,
    /// The message; none if it cannot be read. Then the library says what is wrong with it.
    pub hello: Option<ClientHello<'i>>,
}

impl<'i> FirstMessage<'i> {
    /// Reads it; none while it is not whole.
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

/// Refuses a client that speaks no version as new as TLSv1.2.
pub fn refuse_version(owner: &impl HandshakeOwner, stream: &TlsStream, version: u16) {
    fail(owner, &stream.refuse_version(version));
}

/// Refuses a client that has named a server which rejects handshakes (`ssl_reject_handshake`). The protocol counts it.
pub fn reject(owner: &impl HandshakeOwner, stream: &TlsStream) {
    // A client that does not take it learns it from the end of the connection.
    let _ = stream.socket().try_send_copy(UNRECOGNIZED_NAME, false);
    let message = "SSL_do_handshake() failed (SSL: error:0A0000EA:SSL routines::callback failed)";
    owner.log_handshake(Level::Info, format_args!("{message} {SHAKING_HANDS}"));
}

/// The server for this handshake of one whose certificates have to be read first; `names` evaluates theirs. None if
/// there is none, which the client is told.
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
        // A client that does not take it learns it from the end of the connection.
        let _ = stream.socket().try_send_copy(INTERNAL_ERROR, false);
    })
    .ok()
}

/// Ends a handshake that was begun, and counts it. True if it has gone well.
pub async fn finish(owner: &impl HandshakeOwner, stream: &TlsStream) -> bool {
    if let Err(failure) = poll_fn(|context| stream.poll_handshake(context)).await {
        fail(owner, &failure);
        return false;
    }
    let is_resumed = stream.details(|details| details.is_resumed()) == Some(true);
    owner.count_handshake(if is_resumed { Shaken::Resumed } else { Shaken::Full });
    true
}

/// Says why a handshake has failed, and counts it.
pub fn fail(owner: &impl HandshakeOwner, failure: &TlsFailure) {
    let level = if failure.is_usual() { Level::Info } else { Level::Crit };
    owner.log_handshake(level, format_args!("{failure} {SHAKING_HANDS}"));
    owner.count_handshake(failure.outcome());
}

/// Says that a client has taken too long, and counts it.
pub fn time_out(owner: &impl HandshakeOwner) {
    owner.log_handshake(Level::Info, format_args!("client timed out (110: Connection timed out) {SHAKING_HANDS}"));
    owner.count_handshake(Shaken::TimedOut);
}

/// What is wrong with a client's certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// It is not good.
    Bad,
    /// It is missing.
    Missing,
}

/// What is wrong with this certificate at a server that wants clients to have one as `mode` says; counted for its zone
/// and told.
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
