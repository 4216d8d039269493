//! Parsers and messages that limit_req and limit_conn share.

use gale_base::log_level::Level;
use gale_config::{Diagnostic, Statement, Word, values};

/// Parses `limit_…_log_level info | notice | warn | error`.
pub(crate) fn log_level(statement: &Statement) -> Result<Level, Diagnostic> {
    let levels = [("info", Level::Info), ("notice", Level::Notice), ("warn", Level::Warn), ("error", Level::Error)];
    values::enumeration(statement, &levels)
}

/// Parses `limit_…_status CODE`.
pub(crate) fn rejection_status(statement: &Statement) -> Result<u16, Diagnostic> {
    values::number_between(statement, 400, 599).map(|status| status as u16)
}

/// Error: `zone=` is missing.
pub(crate) fn needs_zone(statement: &Statement) -> Diagnostic {
    statement.error(format!("\"{}\" must have \"zone\" parameter", statement.name.text))
}

/// Error: the parameter is unknown.
pub(crate) fn invalid_parameter(word: &Word) -> Diagnostic {
    invalid(word, "parameter")
}

/// Error: the part `what` of the parameter is invalid.
pub(crate) fn invalid(word: &Word, what: &str) -> Diagnostic {
    Diagnostic::emerg(format!("invalid {what} \"{}\"", word.text)).at(word.span)
}
