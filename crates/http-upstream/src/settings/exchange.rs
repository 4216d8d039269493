//! Times and the buffer of an exchange with a server.

use std::time::Duration;

use gale_config::Setting;

use super::{SettingsGroup, UpstreamSettings};

/// Settings that every protocol has.
#[derive(Default)]
pub struct ExchangeSettings {
    /// Timeout between two writes of a request.
    pub send_timeout: Setting<Duration>,
    /// Timeout between two reads of a response.
    pub read_timeout: Setting<Duration>,
    /// Maximum length of a response's head, in bytes.
    pub buffer_size: Setting<u64>,
}

impl SettingsGroup for ExchangeSettings {}

/// Time limit of a whole request.
#[derive(Default)]
pub struct DeadlineSettings {
    /// Timeout from the first attempt to the end of the response; 0 for none.
    pub request_timeout: Setting<Duration>,
}

impl SettingsGroup for DeadlineSettings {
    fn absent() -> DeadlineSettings {
        DeadlineSettings { request_timeout: Setting::of(Duration::ZERO) }
    }
}

impl UpstreamSettings {
    /// Maximum length of a response's head, in bytes.
    pub fn head_max(&self) -> usize {
        usize::try_from(*self.exchange.buffer_size.get()).unwrap_or(usize::MAX)
    }
}
