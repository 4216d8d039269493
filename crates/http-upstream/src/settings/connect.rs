//! Opening of connections to servers.

use std::time::Duration;

use gale_config::Setting;
use gale_http::request::Request;
use gale_http::request::variables::template::{Template, any_is_true};
use gale_protocol::proxy_protocol::Transport;
use gale_runtime::{ConnectOptions, SocketAddress};
use gale_upstream::{Bind, ProxyVersion};

use super::{SettingsGroup, UpstreamSettings};

/// Settings that every protocol has.
#[derive(Default)]
pub struct ConnectSettings {
    /// The local address of connections.
    pub bind: Setting<Option<Bind<Request>>>,
    /// Accepted; the local address is always evaluated for each attempt.
    pub bind_dynamic: Setting<bool>,
    /// The chosen server is used only if all values are non-empty and not `0`.
    pub allow_upstream: Setting<Vec<Vec<Template>>>,
    /// `SO_KEEPALIVE`
    pub socket_keepalive: Setting<bool>,
    /// Timeout for connecting.
    pub connect_timeout: Setting<Duration>,
}

impl SettingsGroup for ConnectSettings {}

/// Sizes of the kernel's buffers for a connection.
#[derive(Default)]
pub struct SocketBufferSettings {
    /// `SO_RCVBUF` in bytes; 0 for the kernel's default.
    pub socket_rcvbuf: Setting<u64>,
    /// `SO_SNDBUF` in bytes; 0 for the kernel's default.
    pub socket_sndbuf: Setting<u64>,
}

impl SettingsGroup for SocketBufferSettings {
    fn absent() -> SocketBufferSettings {
        SocketBufferSettings { socket_rcvbuf: Setting::of(0), socket_sndbuf: Setting::of(0) }
    }
}

/// Settings of HTTP servers alone.
#[derive(Default)]
pub struct HttpServerSettings {
    /// Version of the PROXY protocol header sent to servers.
    pub proxy_protocol: Setting<ProxyVersion>,
    /// Pass trailers of responses on.
    pub pass_trailers: Setting<bool>,
}

impl SettingsGroup for HttpServerSettings {
    fn absent() -> HttpServerSettings {
        HttpServerSettings { proxy_protocol: Setting::of(ProxyVersion::Off), pass_trailers: Setting::of(false) }
    }
}

impl UpstreamSettings {
    /// True if this request may be passed to its chosen server.
    pub fn allows_server(&self, request: &Request) -> bool {
        let conditions = self.connect.allow_upstream.get_opt().map(Vec::as_slice).unwrap_or_default();
        conditions.iter().flatten().all(|text| any_is_true(std::slice::from_ref(text), request))
    }

    /// The local address of connections for this request.
    pub fn local_address(&self, request: &Request) -> Option<SocketAddress> {
        self.connect.bind.get_opt()?.as_ref()?.evaluate(request)
    }

    /// The PROXY protocol header of a connection for this request; empty for none.
    pub fn proxy_header(&self, request: &Request) -> Vec<u8> {
        match self.http.proxy_protocol.get() {
            ProxyVersion::Off => Vec::new(),
            version => {
                let exchange = request.exchange();
                version.header(Transport::Stream, request.remote(), exchange.local_address(), exchange.tls())
            }
        }
    }

    /// True if a PROXY protocol header is sent.
    pub fn sends_proxy_header(&self) -> bool {
        *self.http.proxy_protocol.get() != ProxyVersion::Off
    }

    /// Socket options and timeout of connections for this request.
    pub fn connect_options(&self, request: &Request) -> ConnectOptions {
        let mut options = ConnectOptions {
            keepalive: *self.connect.socket_keepalive.get(),
            timeout: Some(*self.connect.connect_timeout.get()),
            receive_buffer: size(*self.socket_buffers.socket_rcvbuf.get()),
            send_buffer: size(*self.socket_buffers.socket_sndbuf.get()),
            ..ConnectOptions::default()
        };
        if let Some(bind) = self.connect.bind.get_opt().and_then(Option::as_ref) {
            options.local = bind.evaluate(request);
            options.transparent = bind.is_transparent;
        }
        options
    }
}

fn size(bytes: u64) -> Option<usize> {
    usize::try_from(bytes).ok().filter(|&bytes| bytes > 0)
}
