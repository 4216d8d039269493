//! How severe a message of the error log is, and how a line of it looks.

use serde::{Deserialize, Serialize};

/// Severity of a message, most severe first. <https://nginx.org/en/docs/ngx_core_module.html#error_log>
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

/// How the lines of an error log look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LineForm {
    /// nginx's.
    #[default]
    Text,
    /// An object of JSON in each line.
    Json,
}

impl Level {
    /// The name as it stands in the configuration and in a line of the log.
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
