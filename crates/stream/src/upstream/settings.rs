//! What a server block says about passing sessions on.
//! (<https://nginx.org/en/docs/stream/ngx_stream_proxy_module.html>)

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gale_config::Setting;
use gale_engine::tls::settings::TlsClientSettings;
use gale_engine::tls::{NamedFailure, TlsClient};
use gale_engine::upstream::{AddressPass, Bind, ProxyVersion};
use gale_engine::variables::subject::Subject;
use gale_engine::variables::template::{SizeTemplate, Template};
use gale_protocol::proxy_protocol::Transport;
use gale_runtime::ConnectOptions;

use crate::session::Session;

/// How long the name of a protocol above TLS may be (RFC 7301, section 3.1).
pub const ALPN_BYTES_MAX: usize = 255;

/// See the file's head. The names are those of the directives without `proxy_`.
#[derive(Default)]
pub struct ProxySettings {
    /// The servers. Not inherited.
    pub pass: Option<AddressPass<Session>>,
    /// The address to connect from.
    pub bind: Setting<Option<Bind<Session>>>,
    /// Checked: the address to connect from is always that of the attempt.
    pub bind_dynamic: Setting<bool>,
    /// `SO_KEEPALIVE`
    pub socket_keepalive: Setting<bool>,
    /// `SO_RCVBUF` in bytes, 0 for the kernel's.
    pub socket_rcvbuf: Setting<u64>,
    /// `SO_SNDBUF` in bytes, 0 for the kernel's.
    pub socket_sndbuf: Setting<u64>,
    /// How long connecting may take.
    pub connect_timeout: Setting<Duration>,
    /// How long nothing may pass in either direction.
    pub timeout: Setting<Duration>,
    /// How much is received at once where bytes pass through memory.
    pub buffer_size: Setting<u64>,
    /// How many bytes of a client pass in a second, 0 for no limit.
    pub upload_rate: Setting<SizeTemplate<Session>>,
    /// How many bytes of a server pass in a second, 0 for no limit.
    pub download_rate: Setting<SizeTemplate<Session>>,
    /// Whether each direction ends by itself.
    pub half_close: Setting<bool>,
    /// Whether the next server is tried.
    pub next_upstream: Setting<bool>,
    /// How many servers are tried, 0 for all.
    pub next_upstream_tries: Setting<u64>,
    /// For how long servers are tried, zero for ever.
    pub next_upstream_timeout: Setting<Duration>,
    /// Which header of the PROXY protocol servers get.
    pub protocol: Setting<ProxyVersion>,
    /// How many datagrams of a client belong to one session, 0 for all.
    pub requests: Setting<u64>,
    /// How many datagrams answer one of the client's; without it nobody knows.
    pub responses: Setting<u64>,
    /// Whether servers are spoken to over TLS.
    pub ssl: Setting<bool>,
    /// What is asked of them then.
    pub tls: TlsClientSettings,
    /// The name that a server's certificate is to have; else that of the group.
    pub tls_name: Setting<Template<Session>>,
    /// The protocols above TLS that servers are offered (ALPN).
    pub tls_alpn: Setting<Vec<Template<Session>>>,
    /// The names of the certificate that is shown to servers and of its key, if they have variables.
    pub tls_certificate: Option<(Template<Session>, Template<Session>)>,
    /// What `tls` comes to; there once the configuration is complete.
    pub tls_client: Option<Arc<OnceLock<Arc<TlsClient>>>>,
}

impl ProxySettings {
    /// The header of the PROXY protocol that servers get for this session; empty for none.
    pub fn proxy_header(&self, session: &Session) -> Vec<u8> {
        let version = *self.protocol.get();
        if version == ProxyVersion::Off {
            // Our address takes a system call.
            return Vec::new();
        }
        let transport = if session.datagrams().is_some() { Transport::Datagram } else { Transport::Stream };
        version.header(transport, session.remote(), session.local_address(), session.tls())
    }

    /// How connections are made for this session.
    pub fn connect_options(&self, session: &Session) -> ConnectOptions {
        let bind = self.bind.get_opt().and_then(Option::as_ref);
        ConnectOptions {
            keepalive: *self.socket_keepalive.get(),
            timeout: Some(*self.connect_timeout.get()),
            receive_buffer: size(*self.socket_rcvbuf.get()),
            send_buffer: size(*self.socket_sndbuf.get()),
            local: bind.and_then(|bind| bind.evaluate(session)),
            transparent: bind.is_some_and(|bind| bind.is_transparent),
            ..ConnectOptions::default()
        }
    }

    /// How much is received at once where bytes pass through memory.
    pub fn piece_bytes(&self) -> usize {
        usize::try_from(*self.buffer_size.get()).unwrap_or(usize::MAX).max(1)
    }

    /// How many bytes of the client, and of the server, pass in a second; 0 for no limit.
    pub fn rates(&self, session: &Session) -> (u64, u64) {
        let rate = |setting: &Setting<SizeTemplate<Session>>| {
            setting.get_opt().map_or(0, |rate: &SizeTemplate<Session>| rate.evaluate(session))
        };
        (rate(&self.upload_rate), rate(&self.download_rate))
    }

    /// What this session asks of servers that are spoken to over TLS.
    ///
    /// # Errors
    /// The certificate that they are to be shown cannot be had.
    pub async fn tls_client(&self, session: &Session) -> Result<Arc<TlsClient>, NamedFailure> {
        let client = self.tls_client.as_ref().and_then(|client| client.get());
        let mut client = Arc::clone(client.expect("a server that speaks TLS was prepared for it"));
        if let Some((certificate, key)) = self.tls_certificate.as_ref().filter(|_| client.needs_certificate()) {
            client = client.with_certificate(&certificate.evaluate(session), &key.evaluate(session)).await?;
        }
        // Names that no handshake can carry are left out, as in nginx; the empty ones of variables above all.
        let protocols = self.tls_alpn.get_opt().into_iter().flatten().map(|name| name.evaluate(session));
        let protocols: Vec<Vec<u8>> = protocols.filter(|name| (1..=ALPN_BYTES_MAX).contains(&name.len())).collect();
        Ok(if protocols.is_empty() { client } else { client.offering(protocols) })
    }

    /// The name of the server for a handshake; `group` is what `proxy_pass` calls it.
    pub fn tls_name(&self, session: &Session, group: &str) -> Vec<u8> {
        match self.tls_name.get_opt() {
            Some(name) => name.evaluate(session),
            None => group.as_bytes().to_vec(),
        }
    }
}

fn size(bytes: u64) -> Option<usize> {
    usize::try_from(bytes).ok().filter(|&bytes| bytes > 0)
}
