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
    /// `http2_body_preread_size`: initial window of a stream: bytes of a body that are accepted before
    /// they are read.
    pub body_preread_size: Setting<u32>,
    /// `http2_chunk_size`: maximum size of a DATA frame's payload.
    pub chunk_size: Setting<u64>,
    /// `http2_recv_buffer_size`: maximum number of bytes received at once.
    pub recv_buffer_size: Setting<u64>,
    /// `http2_flood_limits`: limits, per ten seconds, on actions that cost the server more than the client.
    pub flood_limits: Setting<FloodLimits>,
}

/// HTTP/2 settings of an address, taken from its default server: a connection needs them before a request names its
/// server.
#[derive(Clone, Debug)]
pub struct Http2Address {
    /// Limits on clients.
    pub limits: Arc<Limits>,
    /// Maximum number of bytes received at once.
    pub receive_max: usize,
}

/// Window of a connection, in bytes: data of all its streams that is accepted before it is read.
const CONNECTION_WINDOW: u32 = 1 << 20;

impl Default for Http2Address {
    /// The settings without an http v2 module.
    fn default() -> Http2Address {
        Http2Address { limits: Arc::default(), receive_max: RECEIVE_MAX }
    }
}

impl Http2Address {
    /// Computes the settings of an address from those of its default server.
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

/// Lower bound of `receive_max`, in bytes.
const RECEIVE_MIN: usize = 1024;

/// Upper bound of `receive_max`, in bytes: a TLS record, and the budget of a small task.
const RECEIVE_MAX: usize = 16 * 1024;

/// Returns the limits on request heads in a server, for all versions of HTTP.
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
