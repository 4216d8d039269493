//! Severities and line formats of the error log.

use serde::{Deserialize, Serialize};

/// Severity of a log message, most severe first. <https://nginx.org/en/docs/ngx_core_module.html#error_log>
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Level {
    Emerg,
    Alert,
    Crit,
    Error,
    Warn,
    Notice,
    Info,
    Debug,
}

/// Format of the lines of an error log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LineForm {
    /// nginx's format.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

impl Level {
    /// The name used in the configuration and in log lines.
    pub const fn name(self) -> &'static str {
        match self {
            Level::Emerg => "emerg",
            Level::Alert => "alert",
            Level::Crit => "crit",
            Level::Error => "error",
            Level::Warn => "warn",
            Level::Notice => "notice",
            Level::Info => "info",
            Level::Debug => "debug",
        }
    }
}
