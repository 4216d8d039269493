//! Settings of a server block for passing sessions to servers.
//! (<https://nginx.org/en/docs/stream/ngx_stream_proxy_module.html>)

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gale_config::Setting;
use gale_engine::variables::subject::Subject;
use gale_engine::variables::template::{SizeTemplate, Template};
use gale_protocol::proxy_protocol::Transport;
use gale_runtime::ConnectOptions;
use gale_tls::settings::TlsClientSettings;
use gale_tls::{NamedFailure, TlsClient};
use gale_upstream::{AddressPass, Bind, ProxyVersion};

use crate::session::Session;

/// Maximum length of an ALPN protocol name (RFC 7301, section 3.1).
pub const ALPN_BYTES_MAX: usize = 255;

/// Settings named after their directives without `proxy_`.
#[derive(Default)]
pub struct ProxySettings {
    /// The servers. Not inherited.
    pub pass: Option<AddressPass<Session>>,
    /// Local address of connections.
    pub bind: Setting<Option<Bind<Session>>>,
    /// Accepted; the local address is evaluated for each attempt anyway.
    pub bind_dynamic: Setting<bool>,
    /// `SO_KEEPALIVE`
    pub socket_keepalive: Setting<bool>,
    /// `SO_RCVBUF` in bytes, 0 for the kernel's.
    pub socket_rcvbuf: Setting<u64>,
    /// `SO_SNDBUF` in bytes, 0 for the kernel's.
    pub socket_sndbuf: Setting<u64>,
    /// Time limit for connecting.
    pub connect_timeout: Setting<Duration>,
    /// Longest time without bytes in either direction.
    pub timeout: Setting<Duration>,
    /// Size of a read where bytes are copied through memory.
    pub buffer_size: Setting<u64>,
    /// Bytes per second from the client; 0 for no limit.
    pub upload_rate: Setting<SizeTemplate<Session>>,
    /// Bytes per second from the server; 0 for no limit.
    pub download_rate: Setting<SizeTemplate<Session>>,
    /// Close each direction separately.
    pub half_close: Setting<bool>,
    /// Try the next server after a failure.
    pub next_upstream: Setting<bool>,
    /// Maximum number of servers tried; 0 for no limit.
    pub next_upstream_tries: Setting<u64>,
    /// Time limit for trying servers; zero for no limit.
    pub next_upstream_timeout: Setting<Duration>,
    /// PROXY protocol version sent to servers.
    pub protocol: Setting<ProxyVersion>,
    /// Datagrams from a client in one session; 0 for no limit.
    pub requests: Setting<u64>,
    /// Datagrams expected in answer to each of the client's; unknown if not set.
    pub responses: Setting<u64>,
    /// Connect to servers with TLS.
    pub ssl: Setting<bool>,
    /// TLS settings of these connections.
    pub tls: TlsClientSettings,
    /// Name expected in the server's certificate; by default that of the group.
    pub tls_name: Setting<Template<Session>>,
    /// Protocols offered to servers in ALPN.
    pub tls_alpn: Setting<Vec<Template<Session>>>,
    /// Names of the client certificate and its key, if they contain variables.
    pub tls_certificate: Option<(Template<Session>, Template<Session>)>,
    /// The client built from `tls`; present once the configuration is complete.
    pub tls_client: Option<Arc<OnceLock<Arc<TlsClient>>>>,
}

impl ProxySettings {
    /// Returns the PROXY protocol header for this session; empty if there is none.
    pub fn proxy_header(&self, session: &Session) -> Vec<u8> {
        let version = *self.protocol.get();
        if version == ProxyVersion::Off {
            // Getting the local address takes a system call, so this comes first.
            return Vec::new();
        }
        let transport = if session.datagrams().is_some() { Transport::Datagram } else { Transport::Stream };
        version.header(transport, session.remote(), session.local_address(), session.tls())
    }

    /// Returns the options of connections for this session.
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

    /// Returns the size of a read where bytes are copied through memory.
    pub fn piece_bytes(&self) -> usize {
        usize::try_from(*self.buffer_size.get()).unwrap_or(usize::MAX).max(1)
    }

    /// Returns the limits in bytes per second from the client and from the server; 0 for no limit.
    pub fn rates(&self, session: &Session) -> (u64, u64) {
        let rate = |setting: &Setting<SizeTemplate<Session>>| {
            setting.get_opt().map_or(0, |rate: &SizeTemplate<Session>| rate.evaluate(session))
        };
        (rate(&self.upload_rate), rate(&self.download_rate))
    }

    /// Returns the TLS client for connections of this session.
    ///
    /// # Errors
    /// The client certificate could not be loaded.
    pub async fn tls_client(&self, session: &Session) -> Result<Arc<TlsClient>, NamedFailure> {
        let client = self.tls_client.as_ref().and_then(|client| client.get());
        let mut client = Arc::clone(client.expect("a server that uses TLS has its settings"));
        if let Some((certificate, key)) = self.tls_certificate.as_ref().filter(|_| client.needs_certificate()) {
            client = client.with_certificate(&certificate.evaluate(session), &key.evaluate(session)).await?;
        }
        // Names that do not fit into a handshake are skipped, as in nginx. Above all, these are empty values of
        // variables.
        let protocols = self.tls_alpn.get_opt().into_iter().flatten().map(|name| name.evaluate(session));
        let protocols: Vec<Vec<u8>> = protocols.filter(|name| (1..=ALPN_BYTES_MAX).contains(&name.len())).collect();
        Ok(if protocols.is_empty() { client } else { client.offering(protocols) })
    }

    /// Returns the server name for a handshake; `group` is the name in `proxy_pass`.
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
