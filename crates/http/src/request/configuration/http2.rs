//! The settings of nginx's http v2 module and our own limits on floods. The module's table fills them.
//! (<https://nginx.org/en/docs/http/ngx_http_v2_module.html>)

use std::sync::Arc;

use gale_config::Setting;
use gale_protocol::http1;
use gale_protocol::http2::{FloodLimits, Limits};

use crate::request::configuration::settings::CoreSettings;

/// One scope's settings; every field is the directive `http2_…` of the same name unless it says otherwise. Sizes are
/// bytes.
#[derive(Default)]
pub struct Http2Settings {
    /// `http2`
    pub enabled: Setting<bool>,
    /// `http2_max_concurrent_streams`
    pub concurrent_streams_max: Setting<u32>,
    /// `http2_body_preread_size`: how much of a body a client may send before anybody has asked for it.
    pub body_preread_size: Setting<u32>,
    /// `http2_chunk_size`: the most that a frame of a body holds.
    pub chunk_size: Setting<u64>,
    /// `http2_recv_buffer_size`: how much is received at once, at most.
    pub recv_buffer_size: Setting<u64>,
    /// `http2_flood_limits`: how often a client may do what costs us more than it, in ten seconds.
    pub flood_limits: Setting<FloodLimits>,
}

/// What an address needs of HTTP/2 before a request has named its server: as its default server says.
#[derive(Clone, Debug)]
pub struct Http2Address {
    /// What clients may do.
    pub limits: Arc<Limits>,
    /// How much is received at once, in bytes.
    pub receive_max: usize,
}

/// What all streams of a connection together may send before anybody has asked for it, in bytes.
const CONNECTION_WINDOW: u32 = 1 << 20;

impl Default for Http2Address {
    /// Where no module has the settings.
    fn default() -> Http2Address {
        Http2Address { limits: Arc::default(), receive_max: RECEIVE_MAX }
    }
}

impl Http2Address {
    /// What the settings of a server come to.
    pub fn of(core: &CoreSettings, settings: &Http2Settings) -> Http2Address {
        let stream_window = *settings.body_preread_size.get();
        let limits = Limits {
            head: head_limits(core),
            concurrent_streams_max: *settings.concurrent_streams_max.get(),
            stream_window,
            connection_window: CONNECTION_WINDOW.max(stream_window),
            extended_connect: true,
            floods: settings.flood_limits.get().clone(),
            ..Limits::default()
        };
        let receive_max = usize::try_from(*settings.recv_buffer_size.get()).unwrap_or(usize::MAX);
        Http2Address { limits: Arc::new(limits), receive_max: receive_max.clamp(RECEIVE_MIN, RECEIVE_MAX) }
    }
}

/// Less is never received at once.
const RECEIVE_MIN: usize = 1024;

/// More is not received at once: a record of TLS, and the budget of a small task.
const RECEIVE_MAX: usize = 16 * 1024;

/// The bounds of request heads in a server, whatever the version.
pub fn head_limits(core: &CoreSettings) -> http1::Limits {
    let large = *core.large_client_header_buffers.get();
    let small = *core.client_header_buffer_size.get();
    http1::Limits {
        line_max: large.size.max(small),
        head_max: small.saturating_add(large.size.saturating_mul(large.count)),
        headers_max: *core.max_headers.get(),
        ignore_invalid_headers: *core.ignore_invalid_headers.get(),
        underscores_in_headers: *core.underscores_in_headers.get(),
    }
}
