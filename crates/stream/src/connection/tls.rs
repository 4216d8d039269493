//! TLS handshake with a client: selection of the server by name, its settings, and verification of the client's
//! certificate. (<https://nginx.org/en/docs/stream/ngx_stream_ssl_module.html>)

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;

use gale_base::log_level::Level;
use gale_engine::variables::subject::Subject;
use gale_runtime::Buffer;
use gale_tls::TlsServer;
use gale_tls::accepting::{self, FIRST_BYTES, FirstMessage, HandshakeOwner, SHAKING_HANDS, Unfit};
use gale_tls::challenges::{self, Found};
use gale_tls::ocsp;
use gale_tls::settings::{TlsSettings, VerifyClient};
use gale_worker::traffic::{Shaken, count_handshake};

use crate::session::{self, Session};

/// Returns the server that answers an ACME challenge for this name. It may come from another process with the same
/// state.
async fn challenge_server(name: &[u8]) -> Option<Arc<TlsServer>> {
    match challenges::tls_server(name) {
        Found::Known(server) => Some(server),
        Found::Ask => challenges::tls_server_elsewhere(name).await,
        Found::Nothing => None,
    }
}

impl Session {
    /// Performs the handshake and checks the client's certificate. The error is the final status of the session.
    pub(super) async fn shake_hands(&mut self) -> Result<(), u16> {
        self.apply_nodelay();
        let settings = self.scope().conf_of::<TlsSettings>().expect("the ssl module is among the modules");
        let timeout = *settings.handshake_timeout.get();
        let shaken = gale_runtime::timeout(timeout, self.handshake()).await;
        let shaken = shaken.unwrap_or_else(|_| {
            accepting::time_out(self);
            Err(session::INTERNAL_SERVER_ERROR)
        });
        shaken?;
        self.check_certificate()
    }

    /// Sets `TCP_NODELAY` if the selected server wants it.
    fn apply_nodelay(&self) {
        if let Some(transport) = self.transport()
            && *self.core().tcp_nodelay.get()
        {
            // A failure costs only speed.
            let _ = transport.set_nodelay(true);
        }
    }

    async fn handshake(&mut self) -> Result<(), u16> {
        // The bytes of the handshake do not count as the session's.
        let (name, asks_challenge) = self.read_first_message().await?;
        if asks_challenge
            && let Some(name) = &name
            && let Some(server) = challenge_server(name).await
        {
            let input = std::mem::take(&mut self.input);
            // The handshake itself is the answer (RFC 8737, section 3), so the server's rules for clients do not apply.
            let is_answered = self.shake_hands_with(&server, Some(name), input).await;
            return Err(if is_answered { session::OK } else { session::INTERNAL_SERVER_ERROR });
        }
        if let Some(name) = &name {
            self.choose_server(name);
            self.apply_nodelay();
        }
        let default = self.place().servers.default;
        let server = self.stream().server(self.server()).tls.clone();
        let server = server.or_else(|| self.stream().server(default).tls.clone());
        let server: Arc<TlsServer> = server.ok_or(session::INTERNAL_SERVER_ERROR)?;
        let input = std::mem::take(&mut self.input);
        let tls = self.tls().expect("the connection was made for it");
        if server.rejects() {
            accepting::reject(self, tls);
            self.count_handshake(Shaken::Failed);
            return Err(session::INTERNAL_SERVER_ERROR);
        }
        let server = match server.needs_certificates() {
            false => server,
            true => {
                // Certificate names may contain `$ssl_server_name`.
                tls.note_server_name(name.as_deref());
                let names = || self.certificate_names();
                let with_certificates = accepting::with_certificates(self, tls, &server, names).await;
                with_certificates.ok_or(session::INTERNAL_SERVER_ERROR)?
            }
        };
        if !self.shake_hands_with(&server, name.as_deref(), input).await {
            return Err(session::INTERNAL_SERVER_ERROR);
        }
        let log = |level, message: &str| self.log(level, format_args!("{message}"));
        Box::pin(ocsp::clients::validate(self.worker(), tls, log)).await;
        Ok(())
    }

    /// Performs the handshake with this server's settings. Returns true on success.
    async fn shake_hands_with(&self, server: &Arc<TlsServer>, name: Option<&[u8]>, input: Buffer) -> bool {
        let tls = self.tls().expect("the connection was made for it");
        match tls.start(server, name, false, input) {
            Ok(()) => accepting::finish(self, tls).await,
            Err(failure) => {
                accepting::fail(self, &failure);
                false
            }
        }
    }

    /// Evaluates the names of the server's certificates and keys that contain variables.
    fn certificate_names(&self) -> Vec<(Vec<u8>, Vec<u8>)> {
        let default = self.place().servers.default;
        let own = self.stream().server(self.server());
        let server = if own.tls.is_some() { own } else { self.stream().server(default) };
        let names = server.certificate_names.iter();
        names.map(|(certificate, key)| (certificate.evaluate(self), key.evaluate(self))).collect()
    }

    /// Reads until the client's first message is complete or invalid. Returns the server name in it, and whether a
    /// certificate authority asks for a challenge (`tls-alpn-01`).
    async fn read_first_message(&mut self) -> Result<(Option<Vec<u8>>, bool), u16> {
        loop {
            if let Some(first) = FirstMessage::read(self.input.readable()) {
                let FirstMessage { name, asks_challenge, old_version, .. } = first;
                let Some(version) = old_version else { return Ok((name, asks_challenge)) };
                name.into_iter().for_each(|name| self.choose_server(&name));
                accepting::refuse_version(self, self.tls().expect("the connection was made for it"), version);
                return Err(session::INTERNAL_SERVER_ERROR);
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

    /// Checks that the client has presented the certificate required of it.
    fn check_certificate(&self) -> Result<(), u16> {
        let server = self.stream().server(self.server());
        let mode = server.verify_client;
        let Some(tls) = self.tls().filter(|_| mode != VerifyClient::Off) else { return Ok(()) };
        let verdict = tls.details(|details| details.verdict()).ok_or(session::INTERNAL_SERVER_ERROR)?;
        let log = |message: fmt::Arguments<'_>| self.log(Level::Info, message);
        match accepting::check_certificate(mode, verdict, server.zone.as_deref(), log) {
            None => Ok(()),
            Some(Unfit::Bad | Unfit::Missing) => Err(session::INTERNAL_SERVER_ERROR),
        }
    }
}

impl HandshakeOwner for Session {
    fn log_handshake(&self, level: Level, message: fmt::Arguments<'_>) {
        self.log(level, message);
    }

    fn count_handshake(&self, shaken: Shaken) {
        count_handshake(self.stream().server(self.server()).zone.as_deref(), shaken);
    }
}
