//! The handshake of a session at an address that speaks TLS: the server that the client names, its rules, and whether
//! the client's certificate is good enough.
//! (<https://nginx.org/en/docs/stream/ngx_stream_ssl_module.html>)

use std::future::poll_fn;
use std::sync::Arc;

use gale_base::log_level::Level;
use gale_engine::tls::challenges::{self, Found};
use gale_engine::tls::ocsp;
use gale_engine::tls::settings::{TlsSettings, VerifyClient};
use gale_engine::tls::{TlsServer, Verdict};
use gale_engine::traffic::{Shaken, Unverified, count_handshake, count_unverified};
use gale_engine::variables::subject::Subject;
use gale_protocol::client_hello::{self, Status};

use crate::session::{self, Session};

/// What is received at once: a usual first message.
const FIRST_BYTES: usize = 4096;

/// The alert `unrecognized_name`, fatal, in the clear (RFC 6066, section 3).
const UNRECOGNIZED_NAME: &[u8] = &[21, 3, 3, 0, 2, 2, 112];

/// The alert `internal_error`, fatal, in the clear (RFC 8446, section 6.2).
const INTERNAL_ERROR: &[u8] = &[21, 3, 3, 0, 2, 2, 80];

const SHAKING_HANDS: &str = "while SSL handshaking";

/// What is looked at of a client's first message.
#[derive(Default)]
struct FirstMessage {
    /// The name of the server that it wants.
    name: Option<Vec<u8>>,
    /// It is an issuer of certificates that asks who is there.
    asks_challenge: bool,
}

/// Who answers an issuer's question about this name: this process, or another one with the same state.
async fn challenge_server(name: &[u8]) -> Option<Arc<TlsServer>> {
    match challenges::tls_server(name) {
        Found::Known(server) => Some(server),
        Found::Ask => challenges::tls_server_elsewhere(name).await,
        Found::Nothing => None,
    }
}

impl Session {
    /// Shakes hands with the client; the error is the status that the session ends with.
    pub(super) async fn shake_hands(&mut self) -> Result<(), u16> {
        if let Some(transport) = self.transport()
            && *self.core().tcp_nodelay.get()
        {
            // Whether the kernel waits for more is a matter of speed alone.
            let _ = transport.set_nodelay(true);
        }
        let settings = self.scope().conf_of::<TlsSettings>().expect("the ssl module is among the modules");
        let timeout = *settings.handshake_timeout.get();
        let shaken = gale_runtime::timeout(timeout, self.handshake()).await;
        let shaken = shaken.unwrap_or_else(|_| {
            let message = "client timed out (110: Connection timed out)";
            self.log(Level::Info, format_args!("{message} {SHAKING_HANDS}"));
            self.count_handshake(Shaken::TimedOut);
            Err(session::INTERNAL_SERVER_ERROR)
        });
        shaken?;
        self.check_certificate()
    }

    async fn handshake(&mut self) -> Result<(), u16> {
        // What has come so far is no bytes of the session's.
        let FirstMessage { name, asks_challenge } = self.read_first_message().await?;
        if asks_challenge
            && let Some(name) = &name
            && let Some(server) = challenge_server(name).await
        {
            return Err(self.answer_challenge(&server, name).await);
        }
        if let Some(name) = &name {
            self.choose_server(name);
        }
        let default = self.place().servers.default;
        let server = self.stream().server(self.server()).tls.clone();
        let server = server.or_else(|| self.stream().server(default).tls.clone());
        let server: Arc<TlsServer> = server.ok_or(session::INTERNAL_SERVER_ERROR)?;
        let input = std::mem::take(&mut self.input);
        let tls = self.tls().expect("the connection was made for it");
        if server.rejects() {
            // A client that does not take it learns it from the end of the connection.
            let _ = tls.socket().try_send_copy(UNRECOGNIZED_NAME, false);
            let message = "SSL_do_handshake() failed (SSL: error:0A0000EA:SSL routines::callback failed)";
            self.log(Level::Info, format_args!("{message} {SHAKING_HANDS}"));
            self.count_handshake(Shaken::Failed);
            return Err(session::INTERNAL_SERVER_ERROR);
        }
        let server = match server.needs_certificates() {
            false => server,
            true => {
                // Names of certificates may ask for it.
                tls.note_server_name(name.as_deref());
                server.with_certificates(&self.certificate_names()).await.map_err(|failure| {
                    self.log(Level::Error, format_args!("{failure} {SHAKING_HANDS}"));
                    // A client that does not take it learns it from the end of the connection.
                    let _ = tls.socket().try_send_copy(INTERNAL_ERROR, false);
                    session::INTERNAL_SERVER_ERROR
                })?
            }
        };
        let started = tls.start(&server, name.as_deref(), false, input);
        let shaken = match started {
            Ok(()) => poll_fn(|context| tls.poll_handshake(context)).await,
            failed => failed,
        };
        shaken.map_err(|failure| {
            let level = if failure.is_usual() { Level::Info } else { Level::Crit };
            self.log(level, format_args!("{failure} {SHAKING_HANDS}"));
            self.count_handshake(failure.outcome());
            session::INTERNAL_SERVER_ERROR
        })?;
        let is_resumed = tls.details(|details| details.is_resumed()) == Some(true);
        self.count_handshake(if is_resumed { Shaken::Resumed } else { Shaken::Full });
        let log = |level, message: &str| self.log(level, format_args!("{message}"));
        Box::pin(ocsp::clients::validate(self.worker(), tls, log)).await;
        Ok(())
    }

    /// The handshake is the answer (RFC 8737, section 3), whatever servers want of their clients. The result is the
    /// status that the session ends with.
    async fn answer_challenge(&mut self, server: &Arc<TlsServer>, name: &[u8]) -> u16 {
        let input = std::mem::take(&mut self.input);
        let tls = self.tls().expect("the connection was made for it");
        let shaken = match tls.start(server, Some(name), false, input) {
            Ok(()) => poll_fn(|context| tls.poll_handshake(context)).await,
            failed => failed,
        };
        match shaken {
            Ok(()) => {
                self.count_handshake(Shaken::Full);
                session::OK
            }
            Err(failure) => {
                self.log(Level::Info, format_args!("{failure} {SHAKING_HANDS}"));
                self.count_handshake(failure.outcome());
                session::INTERNAL_SERVER_ERROR
            }
        }
    }

    fn count_handshake(&self, shaken: Shaken) {
        count_handshake(self.stream().server(self.server()).zone.as_deref(), shaken);
    }

    /// The names of the server's certificates and keys, where they have variables.
    fn certificate_names(&self) -> Vec<(Vec<u8>, Vec<u8>)> {
        let default = self.place().servers.default;
        let own = self.stream().server(self.server());
        let server = if own.tls.is_some() { own } else { self.stream().server(default) };
        let names = server.certificate_names.iter();
        names.map(|(certificate, key)| (certificate.evaluate(self), key.evaluate(self))).collect()
    }

    /// Reads until the client's first message is whole, or is none.
    async fn read_first_message(&mut self) -> Result<FirstMessage, u16> {
        loop {
            match client_hello::parse(self.input.readable()) {
                Status::Complete(hello) => {
                    let name = hello.server_name().map(client_hello::host_of);
                    if let Some(version) = hello.version_before_tls12() {
                        let failure = self.tls().expect("the connection was made for it").refuse_version(version);
                        if let Some(name) = &name {
                            self.choose_server(name);
                        }
                        self.log(Level::Info, format_args!("{failure} {SHAKING_HANDS}"));
                        self.count_handshake(failure.outcome());
                        return Err(session::INTERNAL_SERVER_ERROR);
                    }
                    let asks_challenge = hello.alpn_protocols().any(|protocol| protocol == challenges::ALPN);
                    return Ok(FirstMessage { name, asks_challenge });
                }
                // The library says what is wrong with it.
                Status::Malformed => return Ok(FirstMessage::default()),
                Status::NeedMore => {}
            }
            let mut input = std::mem::take(&mut self.input);
            let transport = self.transport().expect("a handshake is on a connection");
            let received = poll_fn(|context| transport.poll_recv(context, &mut input, FIRST_BYTES)).await;
            self.input = input;
            match received {
                Ok(1..) => {}
                Ok(0) | Err(_) => {
                    self.log(Level::Info, format_args!("peer closed connection in SSL handshake {SHAKING_HANDS}"));
                    return Err(session::INTERNAL_SERVER_ERROR);
                }
            }
        }
    }

    /// Whether the client has the certificate that it has to have.
    fn check_certificate(&self) -> Result<(), u16> {
        let mode = self.stream().server(self.server()).verify_client;
        let Some(tls) = self.tls().filter(|_| mode != VerifyClient::Off) else { return Ok(()) };
        let refusal = tls.details(|details| match details.verdict() {
            Verdict::Bad(fault) if mode == VerifyClient::OptionalNoCa && fault.is_unknown_issuer() => false,
            Verdict::Bad(fault) => {
                count_unverified(self.stream().server(self.server()).zone.as_deref(), fault.reason());
                self.log(Level::Info, format_args!("client SSL certificate verify error: {fault}"));
                true
            }
            Verdict::None if mode == VerifyClient::On => {
                count_unverified(self.stream().server(self.server()).zone.as_deref(), Unverified::Missing);
                self.log(Level::Info, format_args!("client sent no required SSL certificate"));
                true
            }
            Verdict::None | Verdict::Good => false,
        });
        if refusal == Some(false) { Ok(()) } else { Err(session::INTERNAL_SERVER_ERROR) }
    }
}
