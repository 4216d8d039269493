//! Failures of a server that are answered otherwise: by the next server, or by a stale response.
//!
//! The conditions themselves, `RetryOn`, stand in `settings.rs`.

use std::time::Duration;

use gale_config::Setting;

use super::{RetryOn, SettingsGroup};

/// Attempts with further servers. Every protocol has them.
#[derive(Default)]
pub struct RetrySettings {
    /// Conditions under which the next server is tried.
    pub next_upstream: Setting<RetryOn>,
    /// Maximum number of attempts; 0 for no limit.
    pub next_upstream_tries: Setting<u64>,
    /// Time limit for further attempts; 0 for none.
    pub next_upstream_timeout: Setting<Duration>,
}

impl SettingsGroup for RetrySettings {}

/// Use of stale responses.
#[derive(Default)]
pub struct StaleSettings {
    /// Conditions under which a stale response is used.
    pub cache_use_stale: Setting<RetryOn>,
}

impl SettingsGroup for StaleSettings {}
